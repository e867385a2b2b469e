"""How copies are waited for: what is late has one deadline, and none while the process is stopped."""

from __future__ import annotations

import contextlib
import types
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import OffloadError
from offload.memory import transfer
from offload.memory.transfer import FutureTransfer, TicketGroup, wait_out

DEADLINE_S = 60.0


class Clock:
    """Time that passes where somebody waits."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


class Under:
    """An operation under way: it is over at `end_s`, never where that is None, and may have failed then."""

    def __init__(self, clock: Clock, end_s: float | None, error: Exception | None) -> None:
        self.clock, self.end_s, self.error = clock, end_s, error

    def done(self) -> bool:
        return self.end_s is not None and self.clock.now_s >= self.end_s

    def wait(self, timeout_s: float | None = None) -> None:
        assert timeout_s is not None
        until_s = self.clock.now_s + timeout_s
        if self.end_s is None or self.end_s > until_s:
            self.clock.now_s = until_s
            raise TimeoutError("late")
        self.clock.now_s = max(self.clock.now_s, self.end_s)
        if self.error is not None:
            raise self.error


UNDER_WAY = st.lists(
    st.tuples(st.none() | st.floats(0, 2 * DEADLINE_S), st.none() | st.sampled_from([OSError("failed")])), max_size=6
)


@given(UNDER_WAY)
def test_what_is_late_has_one_deadline_for_all(kinds: list[tuple[float | None, OSError | None]]) -> None:
    """No wait ends before its time: what takes no longer is over, whatever the others do."""
    for is_group in (True, False):
        clock = Clock()
        tickets = [Under(clock, *kind) for kind in kinds]
        with contextlib.suppress(OSError):
            if is_group:
                TicketGroup(tickets).wait(DEADLINE_S)
                assert all(ticket.done() and ticket.error is None for ticket in tickets)
            else:
                wait_out(tickets, DEADLINE_S)
        last_s = max((ticket.end_s for ticket in tickets if ticket.done() and ticket.end_s is not None), default=0.0)
        assert clock.now_s <= last_s + DEADLINE_S
        assert all(ticket.done() or ticket.end_s is None or ticket.end_s > DEADLINE_S for ticket in tickets)


class Worker(Future):  # type: ignore[type-arg]
    """What a thread will have done at the `nth` look; the process is stopped during those of `stops`."""

    def __init__(self, clock: Clock, nth: int | None, stops: frozenset[int] = frozenset()) -> None:
        super().__init__()
        self.clock, self.nth, self.stops, self.asked_s = clock, nth, stops, list[float]()

    def result(self, timeout: float | None = None) -> Any:
        assert timeout is not None
        self.asked_s.append(timeout)
        if len(self.asked_s) == self.nth:
            return None
        self.clock.now_s += timeout + 1000.0 * (len(self.asked_s) in self.stops)
        raise FutureTimeoutError


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    made = Clock()
    monkeypatch.setattr(transfer, "time", types.SimpleNamespace(monotonic=made.monotonic))
    return made


@pytest.mark.parametrize("timeout_s", [0.0, 0.3, 2.5, DEADLINE_S])
def test_a_worker_that_hangs_is_told_at_the_deadline(timeout_s: float, clock: Clock) -> None:
    worker = Worker(clock, None)
    with pytest.raises(OffloadError, match=rf"copy: expected to end within {timeout_s} s but it is still running"):
        FutureTransfer(worker, "copy").wait(timeout_s)
    assert clock.now_s == pytest.approx(timeout_s)


@pytest.mark.parametrize("timeout_s", [0.3, 2.5, DEADLINE_S])
def test_time_while_the_process_is_stopped_does_not_count(timeout_s: float, clock: Clock) -> None:
    """Whenever it was: a worker that was stopped as well has a moment at least to end."""
    hanging = Worker(clock, None)
    with pytest.raises(OffloadError):
        FutureTransfer(hanging, "copy").wait(timeout_s)
    parts = len(hanging.asked_s)
    for stop in range(1, parts + 1):
        worker = Worker(clock, stop + 1, frozenset({stop}))
        FutureTransfer(worker, "copy").wait(timeout_s)
    worker, clock.now_s = Worker(clock, None, frozenset(range(1, 1000))), 0.0
    with pytest.raises(OffloadError):  # again and again
        FutureTransfer(worker, "copy").wait(timeout_s)
    assert sum(worker.asked_s) <= timeout_s + transfer.PART_S


def test_whoever_asks_without_waiting_waits_for_what_has_a_deadline_of_its_own_and_does_not_spin(clock: Clock) -> None:
    waiting = iter([True, True, False])
    worker = Worker(clock, None)
    with pytest.raises(OffloadError):
        FutureTransfer(worker, "copy", is_waiting=lambda: next(waiting)).wait(0.0)
    assert worker.asked_s == [0.0, transfer.PART_S, transfer.PART_S]


def test_time_begins_again_while_a_worker_waits_for_what_has_a_deadline_of_its_own(clock: Clock) -> None:
    waiting = iter([True, True, False])
    with pytest.raises(OffloadError):
        FutureTransfer(Worker(clock, None), "copy", is_waiting=lambda: next(waiting)).wait(DEADLINE_S)
    assert clock.now_s == pytest.approx(3 * DEADLINE_S)
