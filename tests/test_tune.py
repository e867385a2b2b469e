"""Tuning a drive: its arithmetic on made-up samples, small runs, what is kept, and that nothing is left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

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
)
from offload.cli.drive.report import report_json, report_text, wear_text, write_json
from offload.cli.drive.results import Options, PathReport, Report, Row, Swept, estimate_wear, ratio_of
from offload.cli.drive.tune import (
    Fresh,
    Peers,
    _together,
    charge,
    interleave,
    keep_suggestions,
    spare_memory,
    suggest,
    sweep_settings,
    tune,
    usable_size,
)
from offload.errors import ConfigError
from offload.memory import drives as known
from offload.memory import machine
from swap.errors import SwapError, SwapFullError
from swap.io.aio import engines_available

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
FACTS = {
    "file_system": "ext4",
    "drive": "vda",
    "model": None,
    "direct": True,
    "alignment_bytes": 4096,
    "free_bytes": GIB,
}


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
        tune(Options(paths=(tmp_path,)), lambda what, *_: seen.append(what), free_space=lambda path: 100 * MIB)
    assert seen == [] and list(tmp_path.iterdir()) == []


def test_a_path_that_cannot_be_used_is_refused_before_another_one_is_measured(tmp_path: Path) -> None:
    """Nobody can create a file in /proc."""
    seen: list[str] = []
    options = Options(paths=(tmp_path, Path("/proc")), smoke=True)
    with pytest.raises(SwapError, match="swap path /proc"):
        tune(options, lambda what, *_: seen.append(what), free_space=lambda path: GIB)
    assert seen == [] and list(tmp_path.iterdir()) == []


def test_options_are_checked(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one directory"):
        Options(paths=())
    with pytest.raises(ConfigError, match="rounds"):
        Options(paths=(tmp_path,), rounds=0)
    with pytest.raises(ConfigError, match="at least 64 MiB"):
        Options(paths=(tmp_path,), size_bytes=MIB)
    with pytest.raises(ConfigError, match="expected a directory"):
        tune(Options(paths=(tmp_path / "missing",)), lambda *_: None)


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


def test_each_of_several_drives_wears_by_its_part(tmp_path: Path) -> None:
    """By its speed. Two folders of one drive have the wear of that."""
    paths = (tmp_path, Path("/proc"), tmp_path)
    reports = [PathReport(path, MIB, MIB, FACTS) for path in paths]
    charge(Options(paths=paths, bytes_per_step=5000, endurance_bytes=10**6), reports)
    assert [one.wear and one.wear.steps for one in reports] == [300, 599, 300]  # nobody knows their speeds
    for one, speed in zip(reports, (1.0, 3.0, 1.0), strict=True):
        one.sweep, one.suggested = [Swept(Settings(), speed, speed, 0.0)], Settings()
    charge(Options(paths=paths, bytes_per_step=5000), reports)
    assert [one.wear and one.wear.bytes_per_step for one in reports] == [2000, 3000, 2000]


@pytest.mark.parametrize("engines", [("io_uring", "threads"), ("threads",)])
def test_sweep_has_no_duplicates_and_fits_the_engines(engines: tuple[str, ...]) -> None:
    short, full = (sweep_settings(full=full, smoke=False, engines=engines) for full in (False, True))
    assert len(set(short)) == len(short) < len(set(full)) == len(full)
    assert {settings.engine for settings in full} == set(engines)
    if "io_uring" in engines:
        assert Settings() in short and Settings() in full
    assert len(sweep_settings(full=False, smoke=True, engines=engines)) == len(engines)


def test_a_first_write_meets_reserved_blocks_or_an_empty_file(tmp_path: Path) -> None:
    met: list[int] = []

    class Looking:
        name = "looking"

        def run(self, workload: Workload, place: Workspace) -> Sample:
            met.append(os.fstat(place.files[0].fd).st_size)
            return Sample(MIB, 1.0, 0.5)

    with Workspace([tmp_path], 8 * MIB, MIB) as place:
        reserved = Fresh(Looking()).run(READ, place)
        Fresh(Looking(), grows=True).run(READ, place)
    assert met == [8 * MIB, 0]
    assert reserved.seconds > 1.0  # reserving counts


# ---- the whole ----


def test_smoke_run_from_library_to_files(tmp_path: Path) -> None:
    drives = [tmp_path / "a", tmp_path / "b"]
    for drive in drives:
        drive.mkdir()
    steps: list[tuple[int, int]] = []
    options = Options(paths=tuple(drives), smoke=True, bytes_per_step=10**9)
    report = tune(options, lambda what, done, of: steps.append((done, of)))
    assert [one.path for one in report.paths] == [*drives, None]
    assert all(done <= of for done, of in steps)
    assert all(list(drive.iterdir()) == [] for drive in drives)
    one = report.paths[0]
    assert one.size_bytes == 32 * MIB
    assert {row.case for row in one.rows} >= {"read", "write", "mixed", "first write", "read, tensors of 64 KiB"}
    assert {sweep.settings.engine for sweep in one.sweep} == set(engines_available())
    assert one.suggested in [sweep.settings for sweep in one.sweep]
    assert {latency.engine for latency in one.latencies} == set(engines_available())
    assert report.written_bytes > 0 and one.wear is not None

    found = next(swept for swept in one.sweep if swept.settings == one.suggested)
    assert keep_suggestions(report) == known.cache_file()
    kept = known.recall(drives[0])  # on the same device as the second, which was kept last
    assert kept is not None and kept.engine in engines_available() and found.read_gb_s > 0 < kept.write_gb_s

    text = report_text(report)
    for words in ("GB/s", "CPU s/GB", "suggested: engine=", "wear: ", "all 2 paths together"):
        assert words in text
    stored = json.loads(write_json(report_json(report), tmp_path / "out").read_text())
    assert stored == json.loads(json.dumps(report_json(report)))
    assert [path["path"] for path in stored["paths"]] == [*map(str, drives), None]
    assert stored["paths"][0]["rows"][0]["bandwidth_gb_s"] > 0
    assert not any("date" in key or "time" in key for key in stored)


def test_files_of_many_paths_together_have_room_for_an_object_each(tmp_path: Path) -> None:
    """A third of 32 MiB would be less than the 16 MiB of one."""
    paths = tuple(tmp_path / name for name in "abc")
    for path in paths:
        path.mkdir()
    alone = [PathReport(path, 32 * MIB, 32 * MIB, FACTS) for path in paths]
    found = _together(Options(paths=paths, smoke=True), 32 * MIB, alone, lambda *_: None).report
    assert found.size_bytes == 48 * MIB and {row.case for row in found.rows} == {"read", "write"}


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a checkout")
def test_the_commit_is_that_of_the_checkout() -> None:
    head = subprocess.run(["git", "rev-parse", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert machine.commit() == (head.stdout.strip() or None)


def test_without_io_uring(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("offload.cli.drive.tune.engines_available", lambda: ("threads",))
    monkeypatch.setattr("offload.cli.drive.tune.uring_refusal", lambda: "EPERM (forbidden here)")
    report = tune(Options(paths=(tmp_path,), smoke=True), lambda *_: None)
    assert "forbidden here" in report_text(report)
    assert {row.contender for row in report.paths[0].rows} == {"threads"}
    monkeypatch.setattr(known, "device_of", lambda path: "A (1:0)")
    assert keep_suggestions(report) is not None
    assert known.store_options([tmp_path])["engine"] == "auto"  # io_uring, as soon as it works


def test_threads_that_were_better_than_io_uring_are_insisted_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "device_of", lambda path: "A (1:0)")
    one = PathReport(tmp_path, MIB, MIB, FACTS)
    one.sweep = [Swept(Settings(), 1.0, 1.0, 0.0), Swept(Settings(engine="threads", threads=8), 2.0, 2.0, 0.0)]
    one.suggested = suggest(one.sweep)
    keep_suggestions(Report(Options(paths=(tmp_path,)), machine.describe(), None, [one]))
    options = known.store_options([tmp_path])
    assert (options["engine"], options["threads"]) == ("threads", 8)


@pytest.mark.parametrize("known_of", [2, 1])
def test_paths_together_are_measured_as_a_store_stripes_them(
    known_of: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the fastest one's settings, and shares by speed; a store has the defaults where one is not known."""
    engine = engines_available()[0]
    used: list[tuple[Settings, tuple[float, ...], int]] = []

    def run(self: Ours, workload: Workload, place: Workspace) -> Sample:
        used.append((self.settings, self.weights, len(place.files)))
        return Sample(MIB, 1.0, 0.0)

    monkeypatch.setattr(Ours, "run", run)
    options = Options(paths=(tmp_path, tmp_path), smoke=True)
    alone = [PathReport(tmp_path, 32 * MIB, 16 * MIB, FACTS) for _ in options.paths]
    fast, slow = Settings(engine=engine, queue_depth=8), Settings(engine=engine, queue_depth=16)
    for one, settings, speed in zip(alone[:known_of], (slow, fast), (1.0, 3.0), strict=False):
        one.sweep, one.suggested = [Swept(settings, speed, speed, 0.0)], settings
    report = _together(options, 64 * MIB, alone, lambda *_: None).report
    both, weights = (fast, (1.0, 3.0)) if known_of == 2 else (Settings(engine=engine), ())
    case = [(both, weights, 2), (both, (), 1), (both, (), 1)]
    assert used[1:] == case * 2  # behind the filling
    assert [row.contender for row in report.rows[:2]] == [str(both), f"{tmp_path} alone"]


def test_the_sweep_takes_memory_of_the_container(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=64 * GIB))
    for free, taken in ((8 * GIB, GIB), (GIB // 2, 128 * MIB)):  # an eighth, but what one queue needs
        monkeypatch.setattr(machine, "cgroup_memory_free", lambda free=free: free)
        assert spare_memory() == taken


def test_peers_take_part_in_their_cases_and_are_made_anew_for_every_path(tmp_path: Path) -> None:
    made = []

    def peers() -> Peers:
        everywhere, large, fresh = (Scripted(name, [sample(2.0)] * 9, []) for name in ("all", "large", "fresh"))
        made.append(everywhere)
        return Peers([everywhere], [large], [fresh], "all")

    report = tune(Options(paths=(tmp_path, tmp_path), smoke=True), lambda *_: None, peers)
    assert len(made) == 2
    large, small = {"read", "write", "mixed"}, {"read, tensors of 64 KiB", "write, tensors of 64 KiB"}
    for one in report.paths[:2]:
        cases = {name: {row.case for row in one.rows if row.contender == name} for name in ("all", "large", "fresh")}
        assert cases == {"all": large | small, "large": large, "fresh": {"first write"}}
        for row in one.rows:
            assert (row.reference, row.ratio) == (
                (None, None) if row.case == "first write" else ("all", pytest.approx(row.bandwidth_gb_s / 2.0))
            )


@pytest.mark.parametrize("words", [["tune"], ["bench", "nvme"]])
def test_command(words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    drive = tmp_path / "drive"
    drive.mkdir()
    assert cli.main([*words, str(drive), "--smoke", "--output", str(tmp_path / "out")]) == 0
    shown = capsys.readouterr()
    assert "suggested:" in shown.out and "nvme.json" in shown.out and "kept in" not in shown.out
    assert "read" in shown.err and "sweep" in shown.err  # progress
    assert list(drive.iterdir()) == [] and [file.name for file in (tmp_path / "out").iterdir()] == ["nvme.json"]


@pytest.mark.parametrize(("extra", "kept"), [([], True), (["--no-keep"], False), (["--smoke"], False)])
def test_settings_are_kept_unless_told_otherwise(
    extra: list[str], kept: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    small = Report(Options(paths=(tmp_path,)), machine.describe(), None, [PathReport(tmp_path, MIB, MIB, FACTS)])
    small.paths[0].sweep, small.paths[0].suggested = [Swept(Settings(), 2.0, 1.0, 0.0)], Settings()
    monkeypatch.setattr("offload.cli.drive.tune.tune", lambda options, progress: small)
    monkeypatch.setattr(known, "cache_file", lambda: tmp_path / "drives.json")
    monkeypatch.setattr(known, "device_of", lambda path: "A (1:0)")
    assert cli.main(["tune", str(tmp_path), *extra]) == 0
    assert ("kept in" in capsys.readouterr().out) == kept
    found = known.recall(tmp_path)
    assert (found is not None and (found.read_gb_s, found.write_gb_s) == (2.0, 1.0)) == kept


def test_figures_of_the_page_cache_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cached, drive = tmp_path / "cached", tmp_path / "drive"
    found = [PathReport(path, MIB, MIB, FACTS | {"direct": path == drive}) for path in (cached, drive)]
    for one in found:
        one.sweep, one.suggested = [Swept(Settings(), 2.0, 1.0, 0.0)], Settings()
    monkeypatch.setattr(known, "cache_file", lambda: tmp_path / "drives.json")
    monkeypatch.setattr(known, "device_of", lambda path: path.name)
    assert keep_suggestions(Report(Options(paths=(cached, drive)), {}, None, found)) == known.cache_file()
    assert known.recall(drive) is not None and known.recall(cached) is None


def test_a_folder_that_cannot_be_written_to_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="--output .*file: cannot be written to"):
        write_json({}, tmp_path / "file")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--size", "1EiB"], "unknown unit"),
        (["--size", "10%"], "expected bytes"),
        (["--endurance", "600TB"], "--endurance: expected --bytes-per-step beside it"),
        (["--endurance", "0", "--bytes-per-step", "1GB"], "--endurance: expected at least 1 byte"),
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
    assert cli.main(["tune", *arguments]) == cli.EXIT_ERROR
    assert words in capsys.readouterr().err


def _descendants(pid: int) -> list[int]:
    found = []
    for task in Path(f"/proc/{pid}/task").glob("*"):
        for child in (task / "children").read_text().split():
            found += [int(child), *_descendants(int(child))]
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("words", "case"),
    [("-m offload bench nvme", "read"), ("-m offload tune --full", "sweep"), ("bench/nvme --output /nowhere", "read")],
)
def test_interrupt_leaves_nothing(tmp_path: Path, words: str, case: str) -> None:
    """Ctrl-C in the middle of a case: exit code 130, no file, no fio that goes on."""
    rounds = "1" if case == "sweep" else "100000"
    command = [sys.executable, *words.split(), str(tmp_path), "--size", "64MiB", "--rounds", rounds]
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
