"""The bench of virtual time runs, says what it promises, and its schedule of others is what its text says."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from types import ModuleType

import benches
import documents
import pytest
from hypothesis import given
from hypothesis import strategies as st
from simulated.figures import Turn

from bench import _host_updates as updates
from offload.planning.hardware import DESKTOP

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benches.load("simulated", monkeypatch)


def test_a_batch_near_break_even(bench: ModuleType) -> None:
    """Of a small model: compute and the busiest lane besides have as much work, to a row."""
    found = bench.run_case(bench.CASES[0], bench.SMALL, None)
    assert 0 < found["U"] <= 1 and 0 < found["R"] <= 1 and found["step_s"] >= found["bound_s"]
    besides = max(seconds for lane, seconds in found["work_s"].items() if lane != "compute")
    assert abs(found["work_s"]["compute"] - besides) <= found["work_s"]["compute"] / found["rows"]
    assert found["of_plain"] > 1 and found["deepspeed_s"]["total"] > 0


def test_activations_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a small model: copies go beside compute, in less time than torch's, with as much of the device."""
    bench = benches.load("simulated_activations", monkeypatch)
    result = bench.run_setting(bench.SMALL, bench.SETTINGS[0])
    found = result["modes"]
    assert set(found) == set(bench.MODES)
    nowhere, theirs, tight = result["tight"][: len(bench.TIGHT_MODES)]
    keep, offload = found["keep"], found["offload"]
    assert offload["peak_bytes"] < keep["peak_bytes"] and keep["step_s"] < offload["step_s"] < tight["step_s"]
    assert offload["overlapped"]["h2d"] > tight["overlapped"]["h2d"]
    assert nowhere["step_s"] < tight["step_s"] < theirs["step_s"]
    assert tight["peak_bytes"] < 1.05 * found["save_on_cpu"]["peak_bytes"]


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    result, done = benches.run("simulated", tmp_path, "--smoke")
    for line in (
        "states on NVMe, desktop",
        "units in the median",
        "the device waits for",
        "DeepSpeed's schedule",
        "plain",
        "offload.plan says",
    ):
        assert line in done.stdout
    assert set(result["machines"]) == {"desktop", "h200"} and len(result["cases"]) == 2
    for case in result["cases"]:
        assert 0 < case["U"] <= 1 and 0 < case["R"] <= 1 and case["step_s"] >= case["bound_s"]
        besides = max(seconds for lane, seconds in case["work_s"].items() if lane != "compute")
        row_s = case["work_s"]["compute"] / case["rows"]
        assert abs(case["work_s"]["compute"] - besides) <= row_s, "not near break-even"
    assert "drive" in result["cases"][1]["work_s"] and result["cases"][0]["of_plain"] > 1


def test_everything_resident_takes_1_02_of_plain_torch(bench: ModuleType) -> None:
    """Virtual time is exact: 8 B parameters on an H200, with masters and fp32 moments, which plain torch lacks."""
    case = next(case for case in bench.CASES if case.name == "all resident")
    found = bench.run_case(case, bench.FULL, None)
    assert found["of_plain"] <= 1.02
    assert found["of_predicted"] == pytest.approx(1.0, abs=0.02)


@pytest.mark.nightly
def test_a_step_with_states_on_the_drive_takes_what_the_plan_says(bench: ModuleType) -> None:
    """Within 10 %: 8 B parameters on the desktop, in one micro-batch."""
    case = next(case for case in bench.CASES if case.name == "states on NVMe, one micro-batch")
    assert bench.run_case(case, bench.FULL, None)["of_predicted"] == pytest.approx(1.0, abs=0.1)


def test_the_schedule_of_deepspeed_by_hand(bench: ModuleType) -> None:
    """1e9 parameters on the desktop: copies at 25 GB/s, updates at 62.72, the drive at 7, 5, and together 6."""
    host, drive = bench.CASES[1], bench.CASES[4]
    found = bench.of_deepspeed(host, 1e9, compute_s=0.1, micro_batches=1)
    assert found["forward and backward"] == pytest.approx(2 * 2 / 25)  # the gathers of two passes; compute is shorter
    assert found["step"] == pytest.approx(30 / 62.72)
    assert found["total"] == pytest.approx(4 / 25 + 30 / 62.72)
    found = bench.of_deepspeed(drive, 1e9, compute_s=3.0, micro_batches=2)
    assert found["forward and backward"] == 3.0
    assert found["step"] == pytest.approx((12 + 12) / 6)


def seconds(value: float) -> str:
    """Return seconds as tables give them, with three digits."""
    return f"{value:.1f} s" if value >= 9.95 else f"{value:.2f} s"


def rows_of(path: str, heading: str, first: str) -> list[list[str]]:
    """Return the rows of the table whose first column is `first`, below a heading."""
    lines = documents.section(documents.read(path), heading).splitlines()
    begin = next(number for number, line in enumerate(lines) if line.startswith(f"| {first}"))
    table = itertools.takewhile(lambda line: line.startswith("|"), lines[begin + 2 :])
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def test_documents_say_what_is_stored() -> None:
    """Tables of steps by the clock, of steps that clip, and of what the plan predicts."""
    cases = json.loads((benches.BENCH / "results" / "simulated.json").read_text(encoding="utf-8"))["cases"]
    calm, clipped = ([case for case in cases if case["clips"] is clips] for clips in (False, True))
    rows = rows_of("bench/results.md", "A step by the clock", "parameters, states | machine | tokens | step | bound")
    assert [row[3:] for row in rows] == [
        [
            seconds(case["step_s"]),
            f"{seconds(case['bound_s'])} ({case['binding']})",
            f"{case['R']:.2f}",
            f"{case['U']:.2f}",
            seconds(case["deepspeed_s"]["total"]) if case["deepspeed_s"] else "",
        ]
        for case in calm
    ]
    assert [row[2].split(",")[0].replace(" ", "") for row in rows] == [str(case["tokens"]) for case in calm]
    rows = rows_of("bench/results.md", "A step by the clock", "parameters, states; desktop, 28 672 tokens")
    assert [row[2:] for row in rows] == [
        [
            seconds(case["step_s"]),
            seconds(case["clipped_bound_s"]),
            f"{case['of_clipped_bound']:.2f}",
            f"{case['of_calm_bound']:.2f}",
        ]
        for case in clipped
    ]
    told = {
        f"{case['step_s']:.2f} s, {case['predicted_s']:.2f} s, {case['of_predicted']:.2f}": case["name"]
        for case in calm
    }
    for row in rows_of("docs/planning.md", "How far it can be trusted", "case"):
        assert row[0].split(",")[0] == told[", ".join(row[1:])].split(",")[0], row


SECONDS = st.integers(0, 20)


@given(jobs=st.lists(st.tuples(SECONDS, st.integers(1, 9), SECONDS), min_size=1, max_size=6))
def test_no_set_of_updates_wants_more_than_the_bound(jobs: list[tuple[int, int, int]]) -> None:
    """Whatever the order: no set of jobs begins before the first is ready, and the least that is left follows it."""
    sets = [found for size in range(1, len(jobs) + 1) for found in itertools.combinations(jobs, size)]
    wanted = max(min(j[0] for j in s) + sum(j[1] for j in s) + min(j[2] for j in s) for s in sets)
    ends = updates.ends([updates.Job(number, *map(float, job)) for number, job in enumerate(jobs)])
    assert max(end + job[2] for end, job in zip(ends, jobs, strict=True)) == wanted


def test_the_bound_by_hand() -> None:
    """Two units on the desktop, each a second of the CPU: the last one's gradient comes first.

    A byte that is copied takes 16.04 of 25 bytes from the CPU. The second unit's update ends 1 s before its use; the
    first one's can begin when backward has ended, and the forward that it delays takes 1 s up to the cut.
    """
    lost = (62.72 - 46.68) / 25
    assert updates.lost_per_copied_byte(DESKTOP) == pytest.approx(lost)
    numel = round(62.72e9 / (30 + 4 * lost))
    turns = [Turn(0, numel, ready_s=6.0, needed_s=0.0), Turn(1, numel, ready_s=3.0, needed_s=1.0)]
    bound = updates.shortest(turns, 6.0, DESKTOP)
    assert bound.step_s == pytest.approx(7.0)
    first, last = bound.ways
    assert (first.ready_s, last.ready_s) == (5.0, 2.0)
    assert (first.updated_s, last.updated_s) == (pytest.approx(6.0), pytest.approx(3.0))
    assert first.host_s == pytest.approx(5.0 + 2 * numel / 25e9) and first.device_s == pytest.approx(6.0)
    assert (first.needed_s, last.needed_s) == (5.0, 6.0)
