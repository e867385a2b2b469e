"""What the working set fetches: no more than an optimal policy would, and nothing that was not asked for ahead.

The optimum is found by trying everything: all sets of units that may be on the device, use by use.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeStore, make_manager, make_plan_with, make_unit
from harness import host, nvme
from hypothesis import given
from hypothesis import strategies as st
from models import CORE, MORE, Architecture

import offload
from offload.memory.budget import Tier
from offload.planning.plan import Homes
from offload.planning.roles import Role
from offload.shards.manager import Manager

UNITS = 6
CHUNK = 4096
FRAME_BYTES = 2 * CHUNK  # a unit
LEARNED, MEASURED = 2, 8  # steps

# --- the optimum ------------------------------------------------------------------------------------------------------


def fewest_fetches(uses: Sequence[int], frames: int, here: frozenset[int], in_use: int, *, ahead: bool) -> int:
    """Return the fewest fetches of any policy, for units of one size: by trying all choices of who leaves.

    Args:
        uses: of units, none twice in a row.
        frames: units that there is room for.
        here: those that are there at the beginning.
        in_use: the one that was used last.
        ahead: each unit is asked for while the one before it is in use, at the latest: it cannot take its place.
    """
    fewest = {here: 0}
    for unit in uses:
        found: dict[frozenset[int], int] = {}
        for there, fetches in fewest.items():
            if unit in there:
                ways = [(there, fetches)]
            elif len(there) < frames:
                ways = [(there | {unit}, fetches + 1)]
            else:
                leaving = there - {in_use} if ahead else there
                ways = [(there - {other} | {unit}, fetches + 1) for other in leaving]
            for after, many in ways:
                found[after] = min(many, found.get(after, many))
        fewest, in_use = found, unit
    return min(fewest.values())


def without_repeats(uses: Sequence[int]) -> list[int]:
    """Return uses of which none follows itself, in the next step either."""
    found = [unit for number, unit in enumerate(uses) if number == 0 or uses[number - 1] != unit]
    return found[:-1] if len(found) > 1 and found[0] == found[-1] else found


@contextlib.contextmanager
def managing(frames_bytes: int, sizes: Sequence[int], *, prefetch: bool) -> Iterator[tuple[Manager, FakeStore]]:
    units = [make_unit(index, [size * CHUNK]) for index, size in enumerate(sizes)]
    plan = make_plan_with(units, [Homes(Tier.NVME, Tier.HOST, Tier.HOST)] * len(units), working_bytes=frames_bytes)
    store = FakeStore()
    manager = make_manager(plan, store, prefetch=prefetch)
    manager.stream(units, lambda chunk: None, reads=frozenset(), writes=frozenset({Role.PARAM}))
    manager.working.grow(frames_bytes)  # what the plan gave
    try:
        yield manager, store
    finally:
        manager.close()


class Counted:
    """Uses units of a manager, and counts the fetches of those that were used."""

    def __init__(self, manager: Manager, store: FakeStore) -> None:
        self._manager = manager
        self._store = store
        self._unused: set[int] = set()
        self._fetches = 0

    def begin(self) -> None:
        """Count from now on."""
        self._unused.clear()
        self._fetches = 0

    @property
    def fetches(self) -> int:
        """How many there were, without those that are still to be used."""
        return self._fetches - len(self._unused)

    @property
    def here(self) -> frozenset[int]:
        """The units that are there, or on their way."""
        return frozenset(u.index for u in self._manager.units if self._manager.tiers.param(u.index).work_buffer)

    def step(self, uses: Sequence[int]) -> None:
        """Use units one after the other; a step ends."""
        for unit in uses:
            self._manager.acquire(unit).close()
            while self._store.flying:  # the drive is prompt
                self._store.flying[0].wait()
            for what, key in self._store.events:
                if what == "get" and key[2] == 0:
                    self._fetches += 1
                    self._unused.add(key[0])
            self._store.events.clear()
            self._unused.discard(unit)
        self._manager.restart_schedule()


traces = st.lists(st.integers(0, UNITS - 1), min_size=2, max_size=12).map(without_repeats).filter(lambda t: len(t) > 1)


@given(uses=traces, frames=st.integers(2, 4), ahead=st.booleans())
def test_what_is_fetched_is_the_least_that_will_do(uses: list[int], frames: int, ahead: bool) -> None:
    """Units of one size: the fetches of a repeated trace are as many as those of the best policy that knows it all.

    Without prefetching, that is Belady's optimum. With it, it is the optimum of all policies that have asked for each
    unit at the latest while the one before it is used; and none is fetched that was not asked for.
    """
    with managing(frames * FRAME_BYTES, [1] * UNITS, prefetch=ahead) as (manager, store):
        counted = Counted(manager, store)
        for _ in range(LEARNED):
            counted.step(uses)
        here = counted.here
        counted.begin()
        misses = manager.tiers.counters.misses
        for _ in range(MEASURED):
            counted.step(uses)
        fewest = fewest_fetches(uses * MEASURED, frames, here, uses[-1], ahead=ahead)
        assert counted.fetches == fewest
        assert manager.tiers.counters.misses - misses == (0 if ahead else fewest)


@given(
    uses=traces,
    sizes=st.lists(st.integers(1, 4), min_size=UNITS, max_size=UNITS),
    spare=st.integers(0, 4),
)
def test_units_of_different_sizes_come_ahead_and_take_the_place_of_what_is_used_later(
    uses: list[int], sizes: list[int], spare: int
) -> None:
    """Whom to evict is a hard problem then. What holds: no use misses, where there is room for the two largest units.

    And nothing leaves for what is used later.
    """
    room = sum(sorted(sizes)[-2:]) + spare
    with managing(room * FRAME_BYTES, sizes, prefetch=True) as (manager, store):
        counted = Counted(manager, store)
        for _ in range(LEARNED):
            counted.step(uses)
        misses, evict, left = manager.tiers.counters.misses, manager.working.evict, list[Any]()

        def evicted(shard: Any) -> None:
            left.append(manager.schedule.distance(shard.unit.index))
            evict(shard)

        start = manager.working.start_fetch

        def fetched(shard: Any, schedule: Any, **how: Any) -> Any:
            left.clear()
            came = start(shard, schedule, **how)
            assert all(schedule.distance(shard.unit.index) < distance for distance in left)
            return came

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(manager.working, "evict", evicted)
            patch.setattr(manager.working, "start_fetch", fetched)
            for _ in range(MEASURED):
                counted.step(uses)
                manager.check()
        assert manager.tiers.counters.misses == misses


# --- models -----------------------------------------------------------------------------------------------------------

DYNAMIC = {"qwen3_moe", "deepseek_v3", "mixtral", "olmoe", "gpt_oss"}  # experts are used as tokens want them
WAYS: dict[str, dict[str, Any]] = {
    "plain": {},
    "clipped": {"max_grad_norm": 1e-6},
    "accumulated": {"gradient_accumulation_steps": 2},
    "evaluated": {},
}
EVERY_DAY = ("llama", "gpt2", "t5", "whisper")  # tied weights, an encoder beside a decoder


def models() -> list[Any]:
    static = [kind for kind in (*CORE, *MORE) if kind.name not in DYNAMIC]
    marks = {kind.name: [] if kind.name in EVERY_DAY else [pytest.mark.nightly] for kind in static}
    return [pytest.param(kind, id=kind.name, marks=marks[kind.name]) for kind in static]


@pytest.mark.few
@pytest.mark.cpu("homes are those of the CPU")
@pytest.mark.usefixtures("single_torch_thread")
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("kind", models())
def test_a_static_model_misses_nothing_after_the_first_step(
    kind: Architecture, home: str, way: str, tmp_path: Path
) -> None:
    """There is room for the three largest units. A second evaluation knows what the first one has used."""
    torch.manual_seed(0)
    model = kind.build()
    options = {**(host(model) if home == "host" else nvme(model, tmp_path)), **WAYS[way]}
    micro_batches = options.get("gradient_accumulation_steps", 1)
    with offload.Engine(model, offload.AdamW(lr=1e-3), **options) as engine:

        def step() -> int:
            for number in range(micro_batches):
                engine.backward(engine(**kind.batch(number)).loss)
                engine.step()
            if way == "evaluated":
                with torch.no_grad():
                    engine(**kind.batch(0))
            return engine.stats().misses

        for _ in range(2 if way == "evaluated" else 1):
            misses = step()
        assert [step() - misses for _ in range(3)] == [0, 0, 0]
        stats = engine.stats()
        assert stats.links["h2d" if home == "host" else "nvme_read"].bytes > 0 and stats.hits > 0
