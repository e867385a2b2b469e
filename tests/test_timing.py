"""Seconds of copies by a device's clock: read when they are over, in any order, or not at all where it has none."""

from __future__ import annotations

from typing import cast

import pytest
import torch

from offload.memory import timing
from offload.memory.timing import ANCHORED_S, Stopwatch
from offload.spans import Span
from offload.stats import Counters

PLACE = torch.device("cuda", 0)


class FakeStream:
    """Of a device with a clock that the test sets."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.over = True


class FakeEvent:
    """What it was when the stream came there."""

    has_times = True

    def __init__(self, place: torch.device, enable_timing: bool = False) -> None:
        assert place == PLACE and enable_timing

    def record(self, stream: FakeStream) -> None:
        self.stream, self.at_ms = stream, stream.now_ms

    def query(self) -> bool:
        return self.stream.over

    def elapsed_time(self, end: FakeEvent) -> float:
        if not self.has_times:
            raise RuntimeError("events have no time")
        return end.at_ms - self.at_ms


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> type[FakeEvent]:
    monkeypatch.setattr(torch, "Event", FakeEvent)
    monkeypatch.setattr(torch, "Stream", lambda place: FakeStream())
    monkeypatch.setattr(FakeEvent, "has_times", True)
    return FakeEvent


def copy(watch: Stopwatch, stream: FakeStream, ms: float) -> None:
    begin = watch.start(stream)  # type: ignore[arg-type]
    stream.now_ms += ms
    watch.stop("h2d", stream, begin, 100)  # type: ignore[arg-type]


def test_seconds_are_counted_when_a_copy_is_over_and_bytes_at_once(clock: type[FakeEvent]) -> None:
    counters, stream = Counters(), FakeStream()
    watch = Stopwatch(counters, PLACE)
    stream.over = False
    copy(watch, stream, 500)
    stream.now_ms += 9000  # something else
    copy(watch, stream, 250)
    assert counters.links()["h2d"].bytes == 200 and counters.links()["h2d"].seconds == 0
    stream.over = True
    watch.read()
    watch.read()
    assert counters.links()["h2d"].seconds == 0.75


def test_without_a_clock_bytes_are_counted_alone(clock: type[FakeEvent]) -> None:
    clock.has_times = False
    counters, stream = Counters(), FakeStream()
    watch = Stopwatch(counters, PLACE)
    for _ in range(3):
        copy(watch, stream, 500)
    assert counters.links()["h2d"].bytes == 300 and counters.links()["h2d"].seconds == 0
    assert watch.start(stream) is None  # type: ignore[arg-type]  # nobody asks again


def test_spans_are_by_the_host_s_clock_whenever_they_are_read(
    clock: type[FakeEvent], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A stream without work tells at once which moment of the device is now; after a while, it is asked again."""
    idle, host = FakeStream(), [50.0]
    monkeypatch.setattr(torch, "Stream", lambda place: idle)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: host[0])
    counters, stream = Counters(), FakeStream()
    watch = Stopwatch(counters, PLACE)
    idle.now_ms, stream.now_ms, stream.over = 7000.0, 7100.0, False  # the stream has work for 100 ms yet
    copy(watch, stream, 500)
    host[0] += 2 * ANCHORED_S
    idle.now_ms, stream.now_ms = 7001.0 + 2000 * ANCHORED_S, 18000.0  # the device's clock is 1 ms ahead by then
    copy(watch, stream, 250)
    stream.over, host[0] = True, 1000.0  # read late
    watch.read()
    first, second = counters.spans.recorded().spans
    assert first == Span("h2d", "copy", pytest.approx(50.1), pytest.approx(50.6), 100)
    assert second == Span("h2d", "copy", pytest.approx(60.999), pytest.approx(61.249), 100)


def test_a_pass_computes_beside_its_waits(clock: type[FakeEvent]) -> None:
    """Also where updates of the device come within it, and with waits before it; its span has them all."""
    counters, stream = Counters(), FakeStream()
    watch, given = Stopwatch(counters, PLACE), cast(torch.Stream, stream)

    def wait(what: str, ms: float) -> None:
        begun = watch.start(given)
        stream.now_ms += ms
        watch.end_wait(what, given, begun, 0.0)

    stream.over = False
    wait("parameters: a", 4000)
    begun = watch.begin_pass(given)
    assert begun is not None
    stream.now_ms += 1000
    wait("parameters: b", 2000)
    inner = watch.begin_pass(given)
    assert inner is not None
    stream.now_ms += 250
    watch.end_pass("update", inner)
    wait("activations", 500)
    watch.end_pass("forward", begun)
    assert watch.begin_pass(given) is not None  # of a pass that fails
    wait("parameters: a", 8000)
    stream.over = True
    watch.read()
    assert counters.links()["compute"].seconds == 1.25 + 0.25
    assert counters.spans.passes == {"update": 0.25, "forward": pytest.approx(3.75)}
    assert counters.stood == {"parameters": 14.0, "activations": 0.5}
    assert counters.spans.waited == pytest.approx(counters.stood)


def test_a_wait_within_another_one_is_no_computing_once(clock: type[FakeEvent]) -> None:
    counters, stream = Counters(), FakeStream()
    watch, given = Stopwatch(counters, PLACE), cast(torch.Stream, stream)
    begun = watch.begin_pass(given)
    outer = watch.start(given)
    inner = watch.start(given)
    stream.now_ms += 1000
    watch.end_wait("gradients", given, inner, 0.0)
    stream.now_ms += 1000
    watch.end_wait("parameters: a", given, outer, 0.0)
    stream.now_ms += 4000
    assert begun is not None
    watch.end_pass("backward", begun)
    assert counters.links()["compute"].seconds == pytest.approx(4.0)


@pytest.mark.parametrize("has_times", [False, True])
def test_what_the_host_waits_for_is_a_wait_of_the_device(
    clock: type[FakeEvent], has_times: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As long as the device has nothing else to do; without a clock, as long as the host waits."""
    clock.has_times = has_times
    host, counters, stream = [1.0], Counters(), FakeStream()
    watch, given = Stopwatch(counters, PLACE), cast(torch.Stream, stream)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: host[0])
    copy(watch, stream, 500)
    with watch.waiting("gradients", given):
        host[0], stream.now_ms = 3.0, stream.now_ms + 750
    with watch.waiting("gradients", given):  # it is there
        stream.now_ms += 9000
    watch.read()
    waits = [span for span in counters.spans.recorded().spans if span.lane == "wait"]
    assert [(span.name, span.end - span.begin) for span in waits] == [
        ("gradients", pytest.approx(0.75) if has_times else 2.0)
    ]


def test_a_wait_that_fails_is_the_host_s(clock: type[FakeEvent], monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked of a device that may be lost."""
    host, counters = [1.0], Counters()
    monkeypatch.setattr(timing.time, "perf_counter", lambda: host[0])
    watch, given = Stopwatch(counters, PLACE), cast(torch.Stream, FakeStream())
    with pytest.raises(TimeoutError), watch.waiting("gradients", given):
        host[0] = 3.0
        raise TimeoutError
    assert counters.spans.recorded().spans == [Span("wait", "gradients", 1.0, 3.0)]
