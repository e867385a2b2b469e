"""Seconds of copies by a device's clock: read when they are over, in any order, or not at all where it has none."""

from __future__ import annotations

import pytest
import torch

from offload.memory.timing import Stopwatch
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
