"""What lanes did, and when: rings of spans, the report that is made of them, and the file for trace viewers."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from harness import WIDTH, loss_of, tight
from hypothesis import given
from hypothesis import strategies as st
from test_stats import snapshot
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import report as reports
from offload.replacing import replacing
from offload.report import Report, make_report
from offload.snapshot import take_spans
from offload.spans import LANES, Recorded, Span, Spans, covered_s
from offload.stats import Stats
from offload.trace import write_trace

# --- rings ------------------------------------------------------------------------------------------------------------


def test_a_lane_forgets_its_oldest_and_no_other() -> None:
    spans = Spans(kept=3)
    spans.add("step", "step 1", 0.0, 9.0)
    for number in range(5):
        spans.add("h2d", f"copy {number}", number, number + 0.5, 7)
    kept = spans.recorded()
    assert [span.name for span in kept.spans] == ["step 1", "copy 2", "copy 3", "copy 4"]
    assert kept.spans[1] == Span("h2d", "copy 2", 2, 2.5, 7)
    assert kept.complete_from == 2.5  # the oldest that is there: one before it may have ended just then


def test_copies_to_the_host_are_kept_longer() -> None:
    """There is one for each gradient: a step of many micro-batches has thousands."""
    spans = Spans(kept=3)
    for number in range(13):
        spans.add("d2h", f"copy {number}", number, number + 0.5, 7)
        if number == 11:
            assert spans.recorded().complete_from == 0.5  # full: one may have been forgotten
    kept = spans.recorded()
    assert [span.name for span in kept.spans] == [f"copy {number}" for number in range(1, 13)]
    assert kept.complete_from == 1.5


def test_what_is_there_already_is_no_wait() -> None:
    spans = Spans()
    spans.add_wait("updates", 1.0, 1.000001)
    spans.add_wait("updates", 1.0, 1.5)
    assert [span.end for span in spans.recorded().spans] == [1.5]


def test_unknown_lanes_are_a_mistake() -> None:
    with pytest.raises(KeyError):
        Spans().add("pcie", "copy", 0, 1)


TIMES = st.lists(st.tuples(st.integers(0, 30), st.integers(0, 8)).map(lambda at: (at[0], at[0] + at[1])), max_size=12)


@given(TIMES)
def test_covered_time_counts_each_moment_once(spans: list[tuple[int, int]]) -> None:
    assert covered_s(spans) == len({moment for begin, end in spans for moment in range(begin, end)})


@given(TIMES)
def test_waits_within_others_count_once(waits: list[tuple[int, int]]) -> None:
    """One that ends later may have begun earlier."""
    spans = Spans()
    for number, (begin, end) in enumerate(sorted(waits, key=lambda wait: wait[1])):
        spans.add_wait(("ranks", "parameters: a")[number % 2], begin, end)
        assert all(seconds >= 0 for seconds in spans.waited.values())
    assert sum(spans.waited.values()) == covered_s(waits)


@given(TIMES, st.randoms(use_true_random=False))
def test_waits_that_are_told_in_any_order_count_once(waits: list[tuple[int, int]], random: Random) -> None:
    """A device tells late of its own."""
    spans = Spans()
    random.shuffle(waits)
    told = [spans.add_wait("parameters: a", *wait) for wait in waits]
    assert all(seconds >= 0 for seconds in told)
    assert sum(told) == sum(spans.waited.values()) == covered_s(waits)


# --- reports ----------------------------------------------------------------------------------------------------------


def recorded(*spans: Span, complete_from: float = 0.0) -> Recorded:
    return Recorded(sorted(spans, key=lambda span: span.begin), complete_from)


TWO_STEPS = (
    Span("step", "step 1", 10, 20),
    Span("step", "step 2", 20, 30),
    Span("compute", "forward", 11, 21),
    Span("compute", "forward", 22, 28),
    Span("wait", "parameters: a", 12, 14),
    Span("wait", "updates", 13, 16),
    Span("cpu_adam", "a", 23, 24, 10),
    Span("nvme_read", "param: a", 5, 15, 2_000_000_000),
    Span("nvme_read", "param: b", 12, 18, 1_000_000_000),
    Span("nvme_read", "param: c", 31, 32, 5),
)


@pytest.mark.parametrize("host_computes", [True, False])
def test_a_report_sums_what_lies_in_its_steps(host_computes: bool) -> None:
    report = make_report(recorded(*TWO_STEPS), snapshot({}), host_computes=host_computes)
    assert report.step_seconds == (10, 10) and report.seconds == 20
    assert report.lanes["compute"].seconds == (11 if host_computes else 12)  # waits of 12 to 16, an update of 1
    assert report.lanes["nvme_read"].seconds == 8  # 10 to 18
    assert report.lanes["nvme_read"].size_bytes == 2_000_000_000  # half of the first
    assert report.lanes["nvme_read"].bandwidth_gb_s == 0.25
    assert report.waits == {"parameters": 2, "updates": 3} and report.waited_seconds == 4
    assert report.binding_lane == "compute"


def test_an_accelerator_computes_while_the_host_waits_for_others() -> None:
    spans = (*TWO_STEPS, Span("wait", "ranks", 17, 19), Span("wait", "commit", 22, 24))
    report = make_report(recorded(*spans), snapshot({}), host_computes=False)
    assert report.lanes["compute"].seconds == 12 and report.waits["ranks"] == report.waits["commit"] == 2


def test_what_the_host_does_for_updates_is_no_computing() -> None:
    """Beside what they wait for, and beside kernels where these run in the same thread."""
    spans = (*TWO_STEPS, Span("updates", "updates", 15, 18), Span("updates", "updates", 23, 25))
    report = make_report(recorded(*spans), snapshot({}), host_computes=True, predicted={"compute": 1.0})
    assert report.lanes["updates"].seconds == 2 + 1 and report.lanes["compute"].seconds == 11 - 3
    assert report.compared["compute"][1] == (8 + 3 + 1) / 2  # as a plan has it: all that the processor does
    assert "\n  updates       1.500 s     15 %\n" in str(report)
    report = make_report(recorded(*spans), snapshot({}), host_computes=False)  # its waits are the device's
    assert report.lanes["updates"].seconds == 3 + 2 and report.lanes["compute"].seconds == 12
    assert "\n  updates " not in str(make_report(recorded(*TWO_STEPS), snapshot({}), host_computes=True))


def test_short_steps_are_told_in_milliseconds() -> None:
    spans = (
        Span("step", "step 1", 0, 0.002),
        Span("compute", "forward", 0, 0.001),
        Span("wait", "updates", 0.001, 0.002),
    )
    text = str(make_report(recorded(*spans), snapshot({}), host_computes=False))
    assert text.startswith("the last step: 2.000 ms\n") and "  compute      1.000 ms     50 %\n" in text
    assert "computing waited 1.000 ms, 50 %: updates 1.000 ms" in text


def test_a_report_leaves_out_steps_of_which_something_is_forgotten() -> None:
    report = make_report(recorded(*TWO_STEPS, complete_from=15), snapshot({}), host_computes=True)
    assert report.step_seconds == (10,) and report.waits == {}


def test_a_report_of_a_step_with_more_spans_than_are_kept_looks_at_what_is_there() -> None:
    report = make_report(recorded(*TWO_STEPS, complete_from=25), snapshot({}), host_computes=True)
    assert report.step_seconds == () and report.seconds == 32 - 25
    assert report.lanes["compute"].seconds == 3 and report.lanes["nvme_read"].size_bytes == 5


def test_a_report_is_of_steps_that_follow_each_other() -> None:
    """Not of what was done before a checkpoint was loaded, nor of loading it."""
    before = (Span("step", "step 1", 1, 3), Span("step", "step 2", 3, 6), Span("compute", "forward", 1, 6))
    report = make_report(recorded(*before, *TWO_STEPS), snapshot({}), host_computes=False)
    assert report.step_seconds == (10, 10) and report.seconds == 20
    assert str(report).startswith("the last 2 steps: 10.000 s each (10.000 s to 10.000 s)\n")


def test_a_report_looks_at_the_last_steps() -> None:
    steps = [Span("step", f"step {n}", n, n + 1) for n in range(reports.STEPS + 3)]
    report = make_report(recorded(*steps), snapshot({}), host_computes=True)
    assert len(report.step_seconds) == reports.STEPS and report.seconds == reports.STEPS


def test_a_report_before_the_first_step_looks_at_all() -> None:
    report = make_report(recorded(Span("h2d", "copy", 1, 3, 8)), snapshot({}), host_computes=True)
    assert report.step_seconds == () and report.seconds == 2 and report.lanes["h2d"].size_bytes == 8
    assert str(report).startswith("no whole step is recorded: the last 2.000 s")
    nothing = make_report(recorded(), snapshot({}), host_computes=True)
    assert nothing.binding_lane is None and "nothing was busy" in str(nothing)


def test_a_report_fits_on_one_screen() -> None:
    text = str(make_report(recorded(*TWO_STEPS), snapshot({}), host_computes=True)).splitlines()
    assert len(text) <= 24 and max(map(len, text)) <= 80
    assert text[0] == "the last 2 steps: 10.000 s each (10.000 s to 10.000 s)"
    assert "  nvme_read     4.000 s     40 %    954 MiB    0.25" in text
    assert "  compute binds: busy in 55 % of the time" in text
    assert "computing waited 2.000 s, 20 %: updates 1.500 s, parameters 1.000 s" in text


# --- files ------------------------------------------------------------------------------------------------------------


def events_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """Return a file's complete events, and the names of its rows."""
    content = json.loads(path.read_text(encoding="utf-8"))
    names = {e["tid"]: e["args"]["name"] for e in content["traceEvents"] if e["name"] == "thread_name"}
    return [event for event in content["traceEvents"] if event["ph"] == "X"], names


SPANS = st.lists(st.tuples(st.sampled_from(LANES), st.floats(1e5, 1e5 + 1), st.floats(0, 0.5)), max_size=15)


@given(SPANS)
def test_rows_of_a_file_hold_no_two_events_at_once(tmp_path_factory: pytest.TempPathFactory, made: Any) -> None:
    """Viewers drop or bend what overlaps in a row; and each event is in a row of its lane, with its time and bytes."""
    path = tmp_path_factory.getbasetemp() / "rows.json"
    spans = [Span(lane, f"span {n}", begin, begin + time, n) for n, (lane, begin, time) in enumerate(made)]
    write_trace(path, recorded(*spans))
    events, names = events_of(path)
    assert sorted(event["args"]["bytes"] for event in events) == list(range(len(spans)))
    first = min((span.begin for span in spans), default=0.0)
    ends: dict[int, float] = {}
    for event in sorted(events, key=lambda event: (event["tid"], event["ts"], event["dur"])):
        span = spans[event["args"]["bytes"]]
        assert event["ts"] >= ends.get(event["tid"], 0)
        ends[event["tid"]] = event["ts"] + event["dur"] - 1e-6  # sums of decimals
        assert event["cat"] == span.lane == names[event["tid"]].split()[0] and event["name"] == span.name
        assert event["ts"] == pytest.approx((span.begin - first) * 1e6, abs=2e-3)
        assert event["dur"] == pytest.approx((span.end - span.begin) * 1e6, abs=2e-3)


def test_a_file_tells_until_when_spans_are_missing(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, recorded(*TWO_STEPS, complete_from=12))
    events, names = events_of(path)
    [event] = [event for event in events if names[event["tid"]] == "incomplete"]
    assert (event["ts"], event["dur"]) == (0, 7e6) and len(events) == len(TWO_STEPS) + 1
    assert min(names) == event["tid"], "above the others"


@pytest.mark.parametrize("what", ["folder", "no folder", "device"])
def test_a_file_that_cannot_be_written_is_refused_by_name(tmp_path: Path, what: str) -> None:
    path = {"folder": tmp_path, "no folder": tmp_path / "no" / "file", "device": Path("/dev/full")}[what]
    with pytest.raises(offload.ConfigError, match=f"trace: expected .* but got {path}.*; name"):
        write_trace(path, recorded(Span("step", "step 1", 0, 1)))
    assert list(tmp_path.iterdir()) == []


def test_a_file_that_was_there_stays_where_the_drive_is_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "trace.json"
    path.write_text("old")

    def full(content: object, file: Any) -> None:
        file.write("half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(json, "dump", full)
    with pytest.raises(offload.ConfigError, match="No space left"):
        write_trace(path, recorded())
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_two_processes_of_one_number_may_write_one_file(tmp_path: Path) -> None:
    """As those of two nodes with a shared file system: the last one's is there, as a whole."""
    path = tmp_path / "trace.json"
    with replacing(path, "trace") as first:
        first.write("first")
        with replacing(path, "trace") as second:
            second.write("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first" and list(tmp_path.iterdir()) == [path]


# --- engines ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Ran:
    """What two steps of an engine on three tiers leave."""

    engine: offload.Engine
    begin: float
    end: float
    stats: Stats
    report: Report
    spans: list[Span]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Ran]:
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    options = tight(model, tmp_path_factory.mktemp("drive"), offload_param="cpu")
    begin = time.perf_counter()
    with offload.Engine(model, offload.AdamW(lr=1e-3), **options) as engine:
        for number in range(2):
            engine.backward(loss_of(engine, number))
            engine.step()
        engine.drain()
        end = time.perf_counter()
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        yield Ran(engine, begin, end, engine.stats(), engine.report(), list(spans))


def test_every_lane_that_moved_bytes_has_them_in_its_spans(ran: Ran) -> None:
    moved = {lane: link.bytes for lane, link in ran.stats.links.items()}
    assert {lane for lane, size in moved.items() if size} >= {"h2d", "cpu_adam", "nvme_read", "nvme_write"}
    for lane, size in moved.items():
        assert sum(span.size_bytes for span in ran.spans if span.lane == lane) == size, lane


def test_spans_lie_within_the_time_of_their_steps(ran: Ran) -> None:
    assert {span.lane for span in ran.spans} >= {"step", "compute"}
    for span in ran.spans:
        assert ran.begin <= span.begin <= span.end <= ran.end, span
    first, second = [span for span in ran.spans if span.lane == "step"]
    assert (first.name, second.name) == ("step 1", "step 2") and first.end == second.begin
    names = [span.name for span in ran.spans if span.lane == "compute"]
    assert names == ["forward", "backward"] * 2


def test_busy_seconds_are_those_of_the_counters(ran: Ran) -> None:
    """By two ways: the engine of the drive counts while anything is in flight."""
    for lane in ("h2d", "cpu_adam", "nvme_read", "nvme_write"):
        seconds = ran.stats.links[lane].seconds
        assert covered_s(span[2:4] for span in ran.spans if span.lane == lane) == pytest.approx(seconds, rel=1e-6)


def test_the_report_and_the_counters_mean_the_same_by_computing(ran: Ran) -> None:
    assert ran.report.lanes["compute"].seconds == pytest.approx(ran.stats.links["compute"].seconds, rel=0.02)
    assert ran.report.lanes["updates"].seconds > 0


def test_a_closed_engine_knows_what_its_drive_has_done(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    engine = offload.Engine(model, offload.AdamW(lr=1e-3), **tight(model, tmp_path, offload_param="cpu"))
    for number in range(2):
        engine.backward(loss_of(engine, number))
        engine.step()
    engine.drain()
    before = engine.stats()
    engine.close(restore=False)
    after = engine.stats()
    assert before.links["nvme_read"].bytes and before.links["nvme_write"].bytes
    for link in ("nvme_read", "nvme_write"):
        assert after.links[link].bytes == before.links[link].bytes
        assert after.links[link].seconds >= before.links[link].seconds > 0
    assert after.peak_bytes["nvme"] == before.peak_bytes["nvme"]
    engine.close()
    assert engine.stats() == after


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_a_backward_pass_that_the_user_calls_is_counted(checkpointing: bool | None, tmp_path: Path) -> None:
    """From the first tensor that it wants to its end; with reentrant segments, and after one that has failed."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = blocks

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                if checkpointing is None:
                    x = block(x)
                else:
                    x = checkpoint(block, x, use_reentrant=checkpointing)
            return x

    def fail(grad: torch.Tensor) -> torch.Tensor:
        raise ZeroDivisionError

    model = Model()
    with offload.Engine(model, offload.AdamW(lr=1e-3), **tight(model, tmp_path, offload_param="cpu")) as engine:

        def backward(*, fails: bool = False) -> tuple[float, float, float]:
            """Return when it began, when it came to the input, and when it ended."""
            moments: list[float] = []
            x = torch.ones(64, WIDTH, requires_grad=True)
            loss = engine(x).sum()
            x.register_hook(fail if fails else lambda grad: moments.append(time.perf_counter()))
            begin = time.perf_counter()
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                loss.backward()
            return begin, *(moments or [begin]), time.perf_counter()

        backward(fails=True)
        engine.zero_grad()
        seen = [backward(), backward()]
        engine.step()
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        found = [span for span in spans if span.lane == "compute"]
        assert [span.name for span in found] == ["forward", "forward", "backward", "forward", "backward"]
        for span, (begin, at_input, end) in zip(found[2::2], seen, strict=True):
            assert begin <= span.begin < at_input <= span.end <= end
        before = engine.stats().links["compute"].seconds
        engine.backward(engine(torch.ones(64, WIDTH, requires_grad=True)).sum())
        spans = take_spans(engine._parts, engine._life.require_open()).spans
        assert [span.name for span in spans if span.lane == "compute"][5:] == ["forward", "backward"]
        assert engine.stats().links["compute"].seconds > before


def test_a_backward_pass_that_repeats_the_engine_is_one_pass(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    with offload.Engine(model, offload.AdamW(lr=1e-3), **tight(model, tmp_path, offload_param="cpu")) as engine:
        x = torch.ones(64, WIDTH, requires_grad=True)
        checkpoint(engine, x.sin(), use_reentrant=False).sin().sum().backward()
        spans = take_spans(engine._parts, engine._life.require_open()).spans
    assert [span.name for span in spans if span.lane == "compute"] == ["forward", "backward"]


def test_the_report_of_an_engine_is_of_its_steps(ran: Ran) -> None:
    report = ran.report
    assert len(report.step_seconds) == 2 and 0 < report.seconds <= ran.end - ran.begin
    assert 0 < report.lanes["compute"].seconds <= report.seconds
    assert report.lanes["nvme_read"].size_bytes > 0 and report.binding_lane is not None
    assert "nvme_read" in str(report) and "the last 2 steps" in str(report)


def test_an_engine_writes_a_file_for_trace_viewers(ran: Ran, tmp_path: Path) -> None:
    ran.engine.trace(tmp_path / "trace.json")
    events, names = events_of(tmp_path / "trace.json")
    assert {name.split()[0] for name in names.values()} >= {"step", "compute", "h2d", "cpu_adam", "nvme_read"}
    reads = {event["name"] for event in events if event["cat"] == "nvme_read"}
    assert any(name.startswith(("param: ", "master: ")) for name in reads), reads
    with pytest.raises(offload.ConfigError, match="trace: expected .* but got .*no/where"):
        ran.engine.trace(tmp_path / "no" / "where")


def test_an_engine_shows_what_it_did_until_it_is_closed(tmp_path: Path) -> None:
    engine = offload.Engine(nn.Linear(2, 2), device="cpu", max_memory={"device": "16MiB", "cpu": "16MiB"})
    assert "no whole step is recorded" in str(engine.report())
    engine.sleep()
    assert "no whole step is recorded" in str(engine.report())
    engine.close()
    for call in (engine.report, lambda: engine.trace(tmp_path / "trace.json")):
        with pytest.raises(offload.StateError, match="the engine is closed.* before close"):
            call()
