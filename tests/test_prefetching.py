"""What is brought ahead of its use, where a step finds what the one before it has found: the same, without thinking."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NamedTuple

import pytest
import torch
from fakes import FakeStore, make_manager, make_plan_with, make_unit
from hypothesis import given, settings
from hypothesis import strategies as st

from offload.memory.arena import view_at
from offload.memory.budget import Tier
from offload.planning.plan import Homes
from offload.planning.roles import Role
from offload.shards.manager import Manager
from offload.shards.prefetching import Prefetching

UNITS = 6
CHUNK = 4096
FRAME_BYTES = 2 * CHUNK


class Use(NamedTuple):
    """A use of a unit: for some more uses, somebody goes on using or viewing it; the drive may be late."""

    unit: int
    held_for: int = 0
    viewed: bool = False
    prompt: bool = True


@contextlib.contextmanager
def managing(frames: int, sizes: list[int]) -> Iterator[tuple[Manager, FakeStore]]:
    units = [make_unit(index, [size * CHUNK]) for index, size in enumerate(sizes)]
    homes = [Homes(Tier.NVME, Tier.HOST, Tier.HOST)] * len(units)
    store = FakeStore()
    manager = make_manager(make_plan_with(units, homes, working_bytes=frames * FRAME_BYTES), store, prefetch=True)
    manager.stream(units, lambda chunk: None, reads=frozenset(), writes=frozenset({Role.PARAM}))
    manager.working.grow(frames * FRAME_BYTES)
    store.events.clear()
    try:
        yield manager, store
    finally:
        manager.close()


def come_and_go(frames: int, sizes: list[int], steps: list[list[Use]]) -> list[Any]:
    """Return what was fetched, and who was there, use by use."""
    found: list[Any] = []
    with managing(frames, sizes) as (manager, store):
        for step in steps:
            held: list[tuple[int, contextlib.ExitStack]] = []
            for turn, use in enumerate(step):
                for until, rest in held:
                    if until == turn:
                        rest.close()
                lease, rest = manager.acquire(use.unit), contextlib.ExitStack()
                if use.viewed:
                    rest.callback(view_at(manager.bound.storage(use.unit), torch.uint8, 0, (1,)).numel)
                    lease.close()
                else:
                    rest.callback(lease.close)
                held.append((turn + use.held_for, rest))
                if not use.held_for:
                    rest.close()
                while use.prompt and store.flying:
                    store.flying[0].wait()
                here = frozenset(u.index for u in manager.units if manager.tiers.param(u.index).work_buffer)
                found.append((list(store.events), here, manager.tiers.counters.misses, manager.tiers.counters.stalls))
                store.events.clear()
                manager.check()
            for _, rest in held:
                rest.close()
            manager.restart_schedule()
    return found


@st.composite
def runs(draw: st.DrawFn) -> tuple[int, list[int], list[list[Use]]]:
    """Steps of the same uses, some of which differ in what goes on beside them."""
    sizes = draw(st.lists(st.sampled_from((1, 1, 1, 2)), min_size=UNITS, max_size=UNITS))
    trace = draw(st.lists(st.integers(0, UNITS - 1), min_size=6, max_size=12))
    frames = sum(sorted(sizes)[-3:]) + draw(st.integers(0, 1))  # one in use, one held, and one that comes
    steps = [list(map(Use, trace)) for _ in range(6)]
    turns, units, flags = st.integers(0, len(trace) - 1), st.integers(0, UNITS - 1), st.booleans()
    beside = st.tuples(st.integers(2, 5), turns, st.just(None) | units, st.integers(0, 3), flags, flags)
    for number, turn, instead, held_for, viewed, prompt in draw(st.lists(beside, min_size=1, max_size=6)):
        alone = not any(use.held_for for use in steps[number])
        unit = trace[turn] if instead is None else instead
        steps[number][turn] = Use(unit, held_for * alone, viewed, prompt)
    return frames, sizes, steps


@settings(max_examples=max(100, settings.default.max_examples))
@given(run=runs())
def test_what_was_done_before_is_what_would_be_chosen_again(run: tuple[int, list[int], list[list[Use]]]) -> None:
    remembered = come_and_go(*run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            Prefetching, "_choose_as_before", lambda self, schedule, uses: self._choose(schedule, uses, []).ended
        )
        assert remembered == come_and_go(*run)


def test_a_step_that_repeats_itself_is_not_thought_over() -> None:
    chosen: list[int] = []
    choose = Prefetching._choose

    def counted(self: Prefetching, *asked: Any) -> Any:
        chosen.append(1)
        return choose(self, *asked)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefetching, "_choose", counted)
        steps = [list(map(Use, (0, 1, 2, 3, 2, 1)))] * 6
        found = come_and_go(2, [1] * UNITS, steps)
    per_step = len(found) // 6
    assert found[-per_step:] == found[-2 * per_step : -per_step] and any(events for events, *_ in found[-per_step:])
    learned = len(chosen)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Prefetching, "_choose", counted)
        come_and_go(2, [1] * UNITS, steps + steps)
    assert len(chosen) == 2 * learned, "more steps ask no more"
