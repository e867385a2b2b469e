"""Next-use predictions against a naive model that walks the trace."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.planning import schedule as schedule_module
from offload.planning.schedule import NEVER, Schedule

traces = st.lists(st.integers(0, 5), max_size=12)


def walk(trace: list[int], position: int, unit: int) -> int:
    """Naive distance: step through the cyclic trace."""
    for steps in range(len(trace)):
        if trace[(position + steps) % len(trace)] == unit:
            return steps
    return NEVER


class Naive:
    """The text of :class:`Schedule`, taken literally."""

    def __init__(self, trace: list[int]) -> None:
        self.trace = list(trace)
        self.position = 0
        self.recorded: list[int] = []

    def use(self, unit: int) -> None:
        if self.recorded and self.recorded[-1] == unit:
            return
        self.recorded.append(unit)
        distance = walk(self.trace, self.position, unit)
        if distance != NEVER:
            self.position += distance + 1

    def restart(self) -> None:
        if self.recorded:
            self.trace, self.recorded = self.recorded, []
        self.position = 0

    def upcoming(self, limit: int) -> list[int]:
        ahead = [self.trace[(self.position + i) % len(self.trace)] for i in range(min(limit, len(self.trace)))]
        return list(dict.fromkeys(ahead))


@given(guess=traces, steps=st.lists(traces, max_size=5), limit=st.integers(0, 20))
def test_predictions_agree_with_the_naive_model(guess: list[int], steps: list[list[int]], limit: int) -> None:
    schedule, naive = Schedule(guess), Naive(guess)

    def compare() -> None:
        assert schedule.trace == tuple(naive.trace)
        assert schedule.last == (naive.recorded[-1] if naive.recorded else None)
        for unit in range(7):
            assert schedule.distance(unit) == walk(naive.trace, naive.position, unit)
            for behind in range(len(naive.trace) + 1):
                found = walk(naive.trace, naive.position + behind, unit)
                assert schedule.distance(unit, behind=behind) == (found if found == NEVER else found + behind)
        for number in range(-1, len(naive.trace)):
            coming = naive.trace[(naive.position + number) % len(naive.trace)] if naive.trace else None
            assert coming is None or schedule.coming(number) == coming
        assert list(schedule.upcoming(limit)) == naive.upcoming(limit)

    compare()
    for uses in steps:
        for unit in uses:
            schedule.use(unit)
            naive.use(unit)
            compare()
        schedule.restart()
        naive.restart()
        compare()


@given(traces.filter(bool))
def test_a_repeated_step_is_predicted_use_by_use(uses: list[int]) -> None:
    schedule = Schedule([])
    for unit in uses:
        schedule.use(unit)
    schedule.restart()
    trace = [unit for unit, _ in itertools.groupby(uses)]  # uses in a row are one use
    assert list(schedule.trace) == trace
    for expected in trace:
        assert schedule.distance(expected) == 0
        assert next(schedule.upcoming(1)) == expected
        schedule.use(expected)


def test_the_first_guess_is_replaced_by_what_was_seen() -> None:
    schedule = Schedule([0, 1, 2, 2, 1, 0])
    assert list(schedule.upcoming(64)) == [0, 1, 2]
    for unit in (2, 0, 2):
        schedule.use(unit)
    schedule.restart()
    assert schedule.trace == (2, 0, 2)
    schedule.restart()  # a step without uses says nothing about the next one
    assert schedule.trace == (2, 0, 2)


def test_changed_control_flow_is_followed() -> None:
    schedule = Schedule([0, 1, 2, 3, 4])
    schedule.use(0)
    schedule.use(3)  # 1 and 2 were left out
    assert list(schedule.upcoming(2)) == [4, 0]
    schedule.use(9)  # never seen: the position stays
    assert schedule.distance(9) == NEVER
    assert list(schedule.upcoming(2)) == [4, 0]
    schedule.use(1)  # back: counts as the next round
    assert list(schedule.upcoming(3)) == [2, 3, 4]
    assert schedule.distance(1) == 4
    schedule.restart()
    assert schedule.trace == (0, 3, 9, 1)


def test_nothing_is_upcoming_without_a_trace() -> None:
    schedule = Schedule([])
    assert list(schedule.upcoming(5)) == []
    assert schedule.distance(0) == NEVER
    schedule.use(0)
    assert list(schedule.upcoming(5)) == []


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(0, 12))
def test_what_comes_within_the_step_ends_with_the_trace(trace: list[int], uses: int) -> None:
    schedule = Schedule([])
    for _ in range(2):
        schedule.restart()
        for unit in trace:
            schedule.use(unit)
    schedule.restart()
    steps = list(schedule.trace)
    for unit in steps[:uses]:
        schedule.use(unit)
    rest = steps[min(uses, len(steps)) :]
    assert list(schedule.upcoming(64, within_step=True)) == list(dict.fromkeys(rest))
    assert list(schedule.upcoming(64)) == list(dict.fromkeys(rest + steps))


def test_a_step_that_never_ends_is_recorded_up_to_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where somebody runs forwards that record gradients, and never a step."""
    monkeypatch.setattr(schedule_module, "MOST_USES", 10)
    schedule = Schedule([0, 1, 2])
    for _ in range(2000):
        for unit in (0, 1, 2):
            assert schedule.distance(unit) == 0
            schedule.use(unit)
            assert schedule.last == unit
    assert len(schedule._recorded) == 10
    schedule.restart()
    assert schedule.trace == (0, 1, 2, 0, 1, 2, 0, 1, 2, 2)
    for unit in (0, 1, 2, 2, 1, 0):  # a step at last
        schedule.use(unit)
    schedule.restart()
    assert schedule.trace == (0, 1, 2, 1, 0)
