"""The NVMe bench: its arithmetic on made-up samples, its contenders on a small file, and that it leaves nothing."""

from __future__ import annotations

import errno
import json
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cli import main as cli
from offload.cli.drive.measure import (
    MIB,
    ContenderError,
    Ours,
    Pattern,
    Sample,
    Settings,
    Workload,
    Workspace,
    idle_latencies,
    latencies_under_writes,
    open_unlinked,
    plan_operations,
    size_text,
)
from offload.cli.drive.report import report_json, report_text, wear_text, write_report
from offload.cli.drive.tune import (
    Figure,
    Options,
    PathReport,
    Row,
    Swept,
    estimate_wear,
    figures_of,
    interleave,
    keep_suggestions,
    ratio_of,
    run_bench,
    suggest,
    sweep_settings,
    usable_size,
)
from offload.cli.nvme_deepspeed import DEEPSPEED
from offload.cli.nvme_peers import Fio, fio_command, fio_installed, naive_contenders, naive_methods, read_fio
from offload.errors import ConfigError
from offload.memory import drives as known
from swap.errors import SwapError, SwapFullError
from swap.io.aio import engines_available

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30


def sample(gb_s: float, cpu_seconds: float = 0.0) -> Sample:
    return Sample(10**9, 1 / gb_s, cpu_seconds)


# ---- how much of the drive ----


@pytest.mark.parametrize(
    ("asked", "free", "expected"),
    [
        (None, 100 * GIB, GIB),  # the default
        (None, 5 * GIB, 512 * MIB),  # a tenth of what is free
        (None, 640 * MIB, 64 * MIB),  # the least
        (2 * GIB, 20 * GIB, 2 * GIB),
        (100 * MIB + 5, 20 * GIB, 100 * MIB),  # whole MiB
    ],
)
def test_size(asked: int | None, free: int, expected: int) -> None:
    assert usable_size(asked, free, Path("/x")) == expected


@pytest.mark.parametrize(("asked", "free"), [(None, 640 * MIB - 1), (None, 0), (2 * GIB, 20 * GIB - 1)])
def test_too_little_space_is_refused(asked: int | None, free: int) -> None:
    with pytest.raises(SwapFullError, match=r"bench path /x: the bench fills at most 10% of the free space, but"):
        usable_size(asked, free, Path("/x"))


def test_refusal_names_the_size_that_would_do() -> None:
    with pytest.raises(SwapFullError, match="at most --size 2047MiB"):  # a tenth of 20479 MiB, whole
        usable_size(2 * GIB, 20 * GIB - MIB, Path("/x"))


def test_nearly_full_drive_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    seen: list[str] = []
    with pytest.raises(SwapFullError, match="free space or name a directory on another drive"):
        run_bench(Options(paths=(tmp_path,)), lambda what, done, of: seen.append(what), lambda path: 100 * MIB)
    assert seen == [] and list(tmp_path.iterdir()) == []


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one directory"):
        Options(paths=())
    with pytest.raises(ConfigError, match="rounds"):
        Options(paths=(tmp_path,), rounds=0)
    with pytest.raises(ConfigError, match="at least 64 MiB"):
        Options(paths=(tmp_path,), size_bytes=MIB)
    with pytest.raises(ConfigError, match="expected a directory"):
        run_bench(Options(paths=(tmp_path / "missing",)), lambda *_: None)


# ---- arithmetic ----


class Scripted:
    """A contender that plays samples back."""

    def __init__(self, name: str, samples: list[Sample], log: list[str], fail_at: int | None = None) -> None:
        self.name = name
        self.samples = samples
        self.log = log
        self.fail_at = fail_at
        self.runs = 0

    def run(self, workload: Workload, place: Workspace) -> Sample:
        self.log.append(self.name)
        self.runs += 1
        if self.runs == self.fail_at:
            raise ContenderError("not here")
        return self.samples[self.runs - 1]


READ = Workload(pattern=Pattern.READ, total_bytes=MIB, object_bytes=MIB)


def test_contenders_take_turns_and_start_in_turn() -> None:
    log: list[str] = []
    steps: list[str] = []
    names = ["a", "b", "c"]
    contenders = [(Scripted(name, [sample(i + 1.0) for i in range(3)], log), READ) for name in names]
    samples, notes = interleave(contenders, None, 3, steps.append)  # type: ignore[arg-type]
    assert "".join(log) == "abcbcacab" == "".join(steps)
    assert all(samples[index] == [sample(1.0), sample(2.0), sample(3.0)] for index in range(3))
    assert notes == []


def test_a_contender_that_fails_is_left_out_and_named() -> None:
    log: list[str] = []
    contenders = [
        (Scripted("a", [sample(1.0)] * 3, log), READ),
        (Scripted("b", [sample(1.0)] * 3, log, fail_at=2), READ),
    ]
    samples, notes = interleave(contenders, None, 3, lambda _: None)  # type: ignore[arg-type]
    assert list(samples) == [0] and log.count("b") == 2
    assert notes == ["b: left out: not here"]


def test_ratio_is_paired_by_round() -> None:
    """Rounds of (2, 1), (4, 4), (9, 3) GB/s: ratios 2, 1, 3, their median 2 (of the medians: 4 / 3)."""
    mine, other = [sample(2.0), sample(4.0), sample(9.0)], [sample(1.0), sample(4.0), sample(3.0)]
    assert ratio_of(mine, other) == pytest.approx(2.0)
    assert ratio_of(mine, None) is None


def test_row_medians() -> None:
    row = Row("read", "x", (sample(1.0, 0.1), sample(3.0, 0.2), sample(2.0, 0.3)))
    assert row.bandwidth_gb_s == pytest.approx(2.0)
    assert row.cpu_seconds_per_gb == pytest.approx(0.2)  # 0.6 s for 3 GB


def test_suggestion_is_the_cheapest_among_the_fast() -> None:
    def swept(depth: int, read: float, write: float, cpu: float) -> Swept:
        return Swept(Settings(queue_depth=depth), read, write, cpu)

    # scores (harmonic means): 3.0, 2.9, 2.0, 2.99
    sweep = [
        swept(64, 3.0, 3.0, 0.010),
        swept(8, 2.9, 2.9, 0.004),
        swept(1, 2.0, 2.0, 0.001),
        swept(4, 2.99, 2.99, 0.005),
    ]
    assert suggest(sweep) == Settings(queue_depth=8)
    assert suggest([*sweep, swept(32, 2.9, 2.9, 0.02)]) == Settings()  # the defaults, where nothing is much better
    assert suggest([*sweep, swept(32, 2.8, 2.8, 0.02)]) == Settings(queue_depth=8)
    assert suggest([]) is None
    assert Swept(Settings(), 1.0, 3.0, 0.0).score == pytest.approx(1.5)  # 2 / (1 + 1/3)


def test_wear() -> None:
    """2 GB per step, 600 TB: 2 TB per 1000 steps = 1/300 of the life; 300 000 steps."""
    wear = estimate_wear(2 * 10**9, 600 * 10**12, 0)
    assert wear.share_per_1000_steps == pytest.approx(1 / 300)
    assert wear.steps == 300_000 and not wear.assumed
    assumed = estimate_wear(10**9, None, 10**12)
    assert assumed.endurance_bytes == 600 * 10**12 and assumed.assumed
    assert "--endurance" in wear_text(assumed) and "--endurance" not in wear_text(wear)


def test_figures_compare_what_was_measured() -> None:
    report = PathReport(Path("/x"), GIB, GIB, {})
    assert figures_of(report) == []
    report.rows = [
        Row("read", "io_uring", (sample(3.0, 0.002), sample(3.3, 0.004))),
        Row("read", Fio().name, (sample(2.0), sample(3.0))),
        Row("read", "threads", (sample(1.5, 0.1), sample(3.3, 0.1))),
        Row("read", DEEPSPEED, (sample(2.0), sample(3.3))),
    ]
    figures = {figure.name: figure for figure in figures_of(report)}
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


@pytest.mark.parametrize("engines", [("io_uring", "threads"), ("threads",)])
def test_sweep_has_no_duplicates_and_fits_the_engines(engines: tuple[str, ...]) -> None:
    short, full = (sweep_settings(full=full, smoke=False, engines=engines) for full in (False, True))
    assert len(set(short)) == len(short) < len(set(full)) == len(full)
    assert {settings.engine for settings in full} == set(engines)
    if "io_uring" in engines:
        assert Settings() in short and Settings() in full
    assert len(sweep_settings(full=False, smoke=True, engines=engines)) == len(engines)


@given(
    pattern=st.sampled_from(Pattern),
    object_mib=st.integers(1, 4),
    total_mib=st.integers(1, 40),
    memory_mib=st.integers(4, 9),
    files_mib=st.lists(st.integers(4, 12), min_size=1, max_size=3),
)
def test_plans_stay_inside(
    pattern: Pattern, object_mib: int, total_mib: int, memory_mib: int, files_mib: list[int]
) -> None:
    workload = Workload(pattern=pattern, total_bytes=total_mib * MIB, object_bytes=object_mib * MIB)
    files = [(fd, size * MIB) for fd, size in enumerate(files_mib)]
    plan = plan_operations(workload, files, 1 << 40, memory_mib * MIB)
    assert len(plan) == max(1, total_mib // object_mib)
    for index, operation in enumerate(plan):
        assert operation.fd == index % len(files)
        assert 0 <= operation.offset <= files[operation.fd][1] - operation.length
        assert 0 <= operation.address - (1 << 40) <= memory_mib * MIB - operation.length
    writes = sum(operation.write for operation in plan)
    expected = {Pattern.READ: 0, Pattern.WRITE: len(plan), Pattern.MIXED: len(plan) // 2}
    assert writes == expected[pattern]


def test_files_take_turns_in_proportion_to_their_weights() -> None:
    """Of 8 operations, 6 and 2 with weights 3 and 1; each file is used from its start on."""
    plan = plan_operations(
        Workload(pattern=Pattern.READ, total_bytes=8 * MIB, object_bytes=MIB),
        [(3, 8 * MIB), (4, 8 * MIB)],
        0,
        MIB,
        (3.0, 1.0),
    )
    assert [one.offset // MIB for one in plan if one.fd == 3] == [0, 1, 2, 3, 4, 5]
    assert [one.offset // MIB for one in plan if one.fd == 4] == [0, 1]
    assert {one.fd for one in plan[:4]} == {3, 4}


def test_objects_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="object_bytes"):
        plan_operations(READ, [(0, MIB)], 0, MIB // 2)
    with pytest.raises(ValueError, match="object_bytes"):
        plan_operations(READ, [(0, MIB // 2)], 0, MIB)


def test_size_text() -> None:
    assert [size_text(n) for n in (512, 64 << 10, MIB, 3 * GIB // 2, 1 << 40)] == [
        "512 B",
        "64 KiB",
        "1 MiB",
        "1.5 GiB",
        "1 TiB",
    ]


# ---- fio ----


def test_fio_is_asked_for_the_same_work(tmp_path: Path) -> None:
    file = open_unlinked(tmp_path, 4 * MIB)
    try:
        workload = Workload(pattern=Pattern.MIXED, total_bytes=2 * MIB, object_bytes=256 << 10)
        command = fio_command(Settings(queue_depth=8), workload, [file], fixed_buffers=True)
        assert {"--rw=rw", "--bs=262144", "--iodepth=8", f"--io_size={2 * MIB}", "--fixedbufs"} <= set(command)
        assert f"--filename=/proc/{os.getpid()}/fd/{file.fd}" in command
        single = Workload(pattern=Pattern.READ, total_bytes=8 * MIB, object_bytes=4 * MIB, one_at_a_time=True)
        command = fio_command(Settings(), single, [file, file], fixed_buffers=False)
        assert {"--bs=4194304", "--iodepth=1", f"--size={8 * MIB}"} <= set(command)
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


# ---- on a small file ----


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Workspace]:
    with Workspace([tmp_path], 8 * MIB, 4 * MIB) as place:
        yield place
        assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", engines_available())
@pytest.mark.parametrize("pattern", Pattern)
@pytest.mark.parametrize("one_at_a_time", [False, True])
def test_our_engines_run_each_pattern(place: Workspace, engine: str, pattern: Pattern, one_at_a_time: bool) -> None:
    workload = Workload(pattern=pattern, total_bytes=16 * MIB, object_bytes=2 * MIB, one_at_a_time=one_at_a_time)
    measured = Ours(Settings(engine=engine)).run(workload, place)
    assert measured.moved_bytes == 16 * MIB and measured.seconds > 0 and measured.cpu_seconds >= 0


def test_what_is_written_is_the_noise_in_memory(place: Workspace) -> None:
    workload = Workload(pattern=Pattern.WRITE, total_bytes=8 * MIB, object_bytes=4 * MIB)
    Ours(Settings(engine="threads")).run(workload, place)
    with open(place.files[0].visible_as, "rb") as file:
        first, second = file.read(4 * MIB), file.read(4 * MIB)
    assert first == second  # the memory is used twice
    assert len(set(first[:4096])) > 200 and first[:MIB] != first[MIB : 2 * MIB]


def test_threads_cannot_register_buffers(place: Workspace) -> None:
    with pytest.raises(ContenderError, match="ulimit -l"):
        Ours(Settings(engine="threads"), registered=True).run(READ, place)


@pytest.mark.parametrize("engine", engines_available())
def test_latencies(place: Workspace, engine: str) -> None:
    settings = Settings(engine=engine)
    Ours(settings).run(Workload(pattern=Pattern.WRITE, total_bytes=8 * MIB, object_bytes=2 * MIB), place)
    idle = idle_latencies(settings, place, 64 << 10, 5)
    assert len(idle) == 5 and min(idle) > 0
    assert all(seconds > 0 for seconds in latencies_under_writes(settings, place, MIB, 16 * MIB))


def test_new_blocks_keep_the_size(place: Workspace) -> None:
    place.make_empty()
    assert [os.fstat(file.fd).st_size for file in place.files] == [0]
    place.reserve()
    assert [os.fstat(file.fd).st_size for file in place.files] == [8 * MIB]


def test_naive_baselines(place: Workspace) -> None:
    with naive_contenders(place, 4 * MIB) as contenders:
        assert [contender.name for contender in contenders] == naive_methods()
        for contender in contenders:
            for pattern in (Pattern.WRITE, Pattern.READ):
                workload = Workload(pattern=pattern, total_bytes=4 * MIB, object_bytes=MIB)
                assert contender.run(workload, place).moved_bytes == 4 * MIB
    assert "safetensors" not in naive_methods({"safetensors": False})


def test_directories_that_cannot_be_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match="create the directory"):
        open_unlinked(tmp_path / "missing", MIB)
    with pytest.raises(SwapError, match="not a file"):
        open_unlinked(tmp_path / "file", MIB)
    monkeypatch.setattr("swap.io.files.preallocate", lambda fd, length: errno.ENOSPC)
    with pytest.raises(SwapFullError, match="1 MiB .* needed but .* free .ENOSPC"):
        open_unlinked(tmp_path, MIB)


def test_descriptors_are_closed_after_a_failure(tmp_path: Path) -> None:
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(SwapError):
        Workspace([tmp_path, tmp_path / "missing"], 4 * MIB, MIB)
    assert len(os.listdir("/proc/self/fd")) == before


# ---- the whole ----


def test_smoke_run_from_library_to_files(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    steps: list[tuple[int, int]] = []
    options = Options(paths=tuple(drives), smoke=True, bytes_per_step=10**9)
    report = run_bench(options, lambda what, done, of: steps.append((done, of)))
    assert [one.path for one in report.paths] == [*drives, None]
    assert all(done <= of for done, of in steps)
    assert all(list(drive.iterdir()) == [] for drive in drives)
    one = report.paths[0]
    assert one.size_bytes == 32 * MIB
    assert {row.case for row in one.rows} >= {"read", "write", "mixed", "first write", "read, tensors of 64 KiB"}
    assert {sweep.settings.engine for sweep in one.sweep} == set(engines_available())
    assert one.suggested in [sweep.settings for sweep in one.sweep]
    assert {latency.engine for latency in one.latencies} == set(engines_available())
    assert report.written_bytes > 0 and one.figures and one.wear is not None

    found = next(swept for swept in one.sweep if swept.settings == one.suggested)
    assert keep_suggestions(report) == known.cache_file()
    kept = known.recall(drives[0])  # on the same device as the second, which was kept last
    assert kept is not None and kept.engine in engines_available() and found.read_gb_s > 0 < kept.write_gb_s

    text = report_text(report)
    for words in ("GB/s", "CPU s/GB", "suggested: engine=", "wear: ", "all 2 paths together", "torch.save"):
        assert words in text
    written = write_report(report, tmp_path / "out")
    stored = json.loads(written[0].read_text())
    assert stored == json.loads(json.dumps(report_json(report)))
    assert stored["paths"][0]["rows"][0]["bandwidth_gb_s"] > 0
    assert not any("date" in key or "time" in key for key in stored)
    if len(written) > 1:
        assert written[1].read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_without_fio_and_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cli.drive.tune.fio_installed", lambda: False)
    monkeypatch.setattr("offload.cli.drive.tune.engines_available", lambda: ("threads",))
    monkeypatch.setattr("offload.cli.drive.tune.uring_refusal", lambda: "EPERM (forbidden here)")
    report = run_bench(Options(paths=(tmp_path,), smoke=True), lambda *_: None)
    text = report_text(report)
    assert "fio is not installed" in text and "forbidden here" in text
    assert {row.contender for row in report.paths[0].rows if row.case == "read"} == {"threads"}


def test_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    assert cli.main(["bench", "nvme", str(drive), "--smoke", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "suggested:" in shown.out and "nvme.json" in shown.out
    assert "read" in shown.err and "sweep" in shown.err  # progress
    assert list(drive.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1EiB"], "unknown unit"),
        (["--size", "10%"], "expected bytes"),
        (["--size", "1000TiB"], "10% of the free space"),
        (["missing"], "expected a directory"),
    ],
)
def test_wrong_calls(
    arguments: list[str],
    words: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["bench", "nvme", *arguments]) == cli.EXIT_ERROR
    assert words in capsys.readouterr().err


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


@pytest.mark.parametrize("case", ["read", "sweep"])
def test_interrupt_leaves_nothing(tmp_path: Path, case: str) -> None:
    """Ctrl-C in the middle of a case: exit code 130, no file, no fio that goes on."""
    command = [sys.executable, "-m", "offload", "bench", "nvme", str(tmp_path), "--size", "64MiB", "--rounds", "100000"]
    if case == "sweep":
        command[-1] = "1"
        command.append("--full")
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    watchdog = threading.Timer(300, process.kill)
    watchdog.start()
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if line.split("% ")[-1].strip() == case:
                break
        children = _descendants(process.pid)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate()
    finally:
        watchdog.cancel()
        process.kill()
        process.wait()
    assert process.returncode == cli.EXIT_INTERRUPTED, errors
    assert "nothing is left on the drive" in errors
    assert list(tmp_path.iterdir()) == []
    assert [child for child in children if Path(f"/proc/{child}").exists()] == []


def test_thin_wrapper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[list[str]] = []

    def main(arguments: list[str]) -> int:
        calls.append(arguments)
        return 0

    monkeypatch.setattr("offload.cli.main.main", main)
    monkeypatch.setattr(sys, "argv", ["nvme.py", "--smoke"])
    with pytest.raises(SystemExit) as leaving:
        runpy.run_path(str(ROOT / "bench" / "nvme.py"), run_name="__main__")
    assert leaving.value.code == 0
    assert calls == [["bench", "nvme", "--output", str(ROOT / "build" / "bench"), "--smoke"]]
