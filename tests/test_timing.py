"""Seconds of copies by a device's clock: read when they are over, in any order, or not at all where it has none."""

from __future__ import annotations

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


def test_waits_for_the_device_are_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    host = [1.0]
    monkeypatch.setattr(timing.time, "perf_counter", lambda: host[0])
    counters = Counters()
    with pytest.raises(TimeoutError), Stopwatch(counters, PLACE).waiting("gradients"):
        host[0] = 3.0
        raise TimeoutError
    assert counters.spans.recorded().spans == [Span("wait", "gradients", 1.0, 3.0)]
