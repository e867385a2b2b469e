"""The comparison with fio and others: figures on made-up samples, the peers on a small file, and its command."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.nvme import command
from bench.nvme.cases import compare
from bench.nvme.deepspeed import DEEPSPEED
from bench.nvme.figures import Figure, figures_of
from bench.nvme.peers import Fio, fio_command, fio_installed, naive_contenders, naive_methods, read_fio
from bench.nvme.report import comparison_json, comparison_text, write_comparison
from offload.cli import main as cli
from offload.cli.drive.measure import (
    MIB,
    ContenderError,
    Pattern,
    Sample,
    Settings,
    Workload,
    Workspace,
    open_unlinked,
)
from offload.cli.drive.results import Latency, Options, PathReport, Row

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def sample(gb_s: float, cpu_seconds: float = 0.0) -> Sample:
    return Sample(10**9, 1 / gb_s, cpu_seconds)


# ---- figures ----


def test_figures_compare_what_was_measured() -> None:
    report = PathReport(Path("/x"), GIB, GIB, {})
    assert figures_of(report, ()) == []
    report.rows = [
        Row("read", "io_uring", (sample(3.0, 0.002), sample(3.3, 0.004))),
        Row("read", Fio().name, (sample(2.0), sample(3.0))),
        Row("read", "threads", (sample(1.5, 0.1), sample(3.3, 0.1))),
        Row("read", DEEPSPEED, (sample(2.0), sample(3.3))),
    ]
    figures = {figure.name: figure for figure in figures_of(report, ())}
    fio = figures["read / fio with huge pages and fixed buffers"]
    assert fio.measured == pytest.approx((1.5 + 1.1) / 2) and fio.reached
    deepspeed = figures[f"read / {DEEPSPEED}"]
    assert deepspeed.measured == pytest.approx((1.5 + 1.0) / 2) and (deepspeed.bound, deepspeed.reached) == (1.15, True)
    threads = figures["read, threads / io_uring"]
    assert threads.measured == pytest.approx(0.75) and not threads.reached
    cpu = figures["CPU seconds per GB, io_uring"]
    assert cpu.measured == pytest.approx(0.003) and cpu.reached and cpu.at_most
    cost = figures["CPU of threads / io_uring"]  # 0.2 s for 2 GB, 0.006 s for 2 GB
    assert cost.measured == pytest.approx(0.2 / 0.006) and (cost.bound, cost.reached) == (5.0, False)
    assert not Figure("x", 2.0, 1.0, at_most=True).reached


def test_figure_of_a_fetch_is_paired_by_round() -> None:
    """Rounds of 2/1, 8/2 and 3/1 milliseconds: ratios 2, 4, 3, their median 3."""
    idle = Latency("threads", MIB, False, ((0.001,), (0.002,), (0.001,)))
    busy = Latency("threads", MIB, True, ((0.002,), (0.008,), (0.003,)))
    report = PathReport(Path("/x"), GIB, GIB, {}, latencies=[idle, busy])
    assert [(one.name, one.measured, one.reached) for one in figures_of(report, ())] == [
        ("fetch of 1 MiB under write-back / idle, threads", pytest.approx(3.0), True)
    ]


def test_figures_of_all_paths_are_shares_of_what_each_gives(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """3 GB/s together where 1 + 3 are given alone: 0.75. One file system for both would give no figure."""
    rows = [Row("read", name, (sample(speed),)) for name, speed in (("both", 3.0), ("a", 1.0), ("b", 3.0))]
    report = PathReport(None, GIB, GIB, {"paths": 2}, rows)
    assert figures_of(report, (tmp_path, tmp_path)) == []
    monkeypatch.setattr("bench.nvme.figures.share_a_drive", lambda paths: False)
    (figure,) = figures_of(report, (tmp_path, tmp_path))
    assert (figure.name, figure.measured) == ("read, all paths / sum of each", pytest.approx(0.75))


# ---- fio ----


def test_fio_is_asked_for_the_same_work(tmp_path: Path) -> None:
    file = open_unlinked(tmp_path, 4 * MIB)
    try:
        workload = Workload(pattern=Pattern.MIXED, total_bytes=2 * MIB, object_bytes=256 << 10)
        command = fio_command(Settings(queue_depth=8), workload, [file], fixed_buffers=True)
        assert {"--rw=rw", "--bs=262144", "--iodepth=8", f"--io_size={2 * MIB}", "--fixedbufs"} <= set(command)
        assert f"--filename=/proc/{os.getpid()}/fd/{file.fd}" in command
        large = Workload(pattern=Pattern.READ, total_bytes=8 * MIB, object_bytes=16 * MIB)
        command = fio_command(Settings(), large, [file, file], fixed_buffers=False)
        assert {"--rw=read", "--bs=4194304", "--iodepth=32", f"--size={8 * MIB}"} <= set(command)
        assert "--fixedbufs" not in command
    finally:
        os.close(file.fd)


def test_fio_output_is_read() -> None:
    """600 + 400 bytes in max(50, 40) ms, at 10 % + 30 % of a processor: 0.05 s and 0.02 s."""
    job = {"read": {"io_bytes": 600, "runtime": 50}, "write": {"io_bytes": 400, "runtime": 40}}
    text = "fio: a warning\n" + json.dumps({"jobs": [job | {"usr_cpu": 10.0, "sys_cpu": 30.0}]})
    measured = read_fio(text)
    assert measured.moved_bytes == 1000
    assert measured.seconds == pytest.approx(0.05) and measured.cpu_seconds == pytest.approx(0.02)


@pytest.mark.parametrize("text", ["", "{}", "nonsense", '{"jobs": []}', '{"jobs": [{"read": 3}]}'])
def test_fio_output_that_makes_no_sense_is_named(text: str) -> None:
    with pytest.raises(ContenderError, match="fio: its output cannot be understood"):
        read_fio(text)


@pytest.mark.skipif(not fio_installed(), reason="fio is not installed")
@pytest.mark.parametrize("tuned", [True, False])
def test_fio_runs_on_a_file_without_a_name(tmp_path: Path, tuned: bool) -> None:
    with Workspace([tmp_path], 8 * MIB, 4 * MIB) as place:
        workload = Workload(pattern=Pattern.MIXED, total_bytes=8 * MIB, object_bytes=4 * MIB)
        try:
            measured = Fio(Settings(queue_depth=4), tuned=tuned).run(workload, place)
        except ContenderError as error:
            pytest.skip(f"fio cannot run here: {error}")
        assert measured.moved_bytes == 8 * MIB
        assert list(tmp_path.iterdir()) == []


# ---- naive ----


def test_naive_baselines(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with Workspace([tmp_path], 8 * MIB, 4 * MIB) as place, naive_contenders(place, 4 * MIB) as contenders:
        assert [contender.name for contender in contenders] == naive_methods()
        for contender in contenders:
            for pattern in (Pattern.WRITE, Pattern.READ):
                workload = Workload(pattern=pattern, total_bytes=4 * MIB, object_bytes=MIB)
                assert contender.run(workload, place).moved_bytes == 4 * MIB
    monkeypatch.setattr("bench.nvme.peers.find_spec", lambda name: None)
    assert "safetensors" not in naive_methods()


# ---- the whole ----


def test_smoke_run_from_peers_to_files(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    steps: list[tuple[int, int]] = []
    report = compare(Options(paths=tuple(drives), smoke=True), lambda what, done, of: steps.append((done, of)))
    assert all(done <= of for done, of in steps)
    assert all(list(drive.iterdir()) == [] for drive in drives)
    cases = {row.case for row in report.paths[0].rows}
    assert {"read", "first write", "write of a state, naively", "read of a state, naively"} <= cases
    text = comparison_text(report)
    for words in (
        "torch.save",
        "suggested: engine=",
        "figure  ",
        "CPU seconds per GB, threads",
        "all 2 paths together",
    ):
        assert words in text
    written = write_comparison(report, tmp_path / "out")
    stored = json.loads(written[0].read_text())
    assert stored == json.loads(json.dumps(comparison_json(report)))
    assert {"name", "measured", "bound", "at_most", "reached"} == set(stored["paths"][0]["figures"][0])
    if len(written) > 1:
        assert written[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"
    kept = json.loads((ROOT / "bench" / "results" / "nvme.json").read_text())
    assert set(stored) == set(kept) and set(stored["paths"][0]) == set(kept["paths"][0])
    for part in ("rows", "latencies", "sweep", "figures"):  # what reads one of them reads the other
        assert set(stored["paths"][0][part][0]) == set(kept["paths"][0][part][0])


def test_without_fio(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.nvme.cases.fio_installed", lambda: False)
    report = compare(Options(paths=(tmp_path,), smoke=True), lambda *_: None)
    assert "fio is not installed" in comparison_text(report)
    assert not any(row.contender.startswith("fio") for row in report.paths[0].rows)


def test_command_from_another_folder(tmp_path: Path) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    words = [str(ROOT / "bench" / "nvme"), str(drive), "--smoke", "--output", str(tmp_path / "out")]
    done = subprocess.run([sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "suggested:" in done.stdout and "figure  " in done.stdout and "nvme.json" in done.stdout
    assert "naively" in done.stderr  # progress
    assert list(drive.iterdir()) == [] and (tmp_path / "out" / "nvme.json").exists()


def test_wrong_calls(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([str(tmp_path / "missing")]) == cli.EXIT_ERROR
    assert "expected a directory" in capsys.readouterr().err
