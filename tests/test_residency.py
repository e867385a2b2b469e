"""What passes of a step fetch, and read of gradients: many micro-batches as if each were simulated, in little time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import make_plan_with, make_unit
from hypothesis import given
from hypothesis import strategies as st

from offload.memory.budget import Tier
from offload.planning import residency
from offload.planning.plan import Homes, Plan
from offload.planning.residency import gradients_read
from offload.planning.uses import Uses

UNITS = 6
CHUNK = 4096
FRAME_BYTES = 2 * CHUNK  # a unit
MANY = 40  # micro-batches


def plan_of(sizes: Sequence[int], frames: int) -> Plan:
    """Return a plan of units on NVMe, of so many frames each, and a region of some frames."""
    units = [make_unit(index, [size * CHUNK]) for index, size in enumerate(sizes)]
    homes = [Homes(Tier.NVME, Tier.HOST, Tier.HOST)] * len(units)
    return make_plan_with(units, homes, working_bytes=frames * FRAME_BYTES)


orders = st.lists(st.integers(0, UNITS - 1), min_size=1, max_size=2 * UNITS).map(tuple)


@given(
    forward=orders,
    backward=orders,
    sizes=st.lists(st.integers(1, 4), min_size=UNITS, max_size=UNITS),
    spare=st.integers(0, 8),
    early=st.sets(st.integers(0, UNITS - 1)),
    many=st.integers(1, MANY),
)
def test_all_micro_batches_are_as_if_each_were_simulated(
    forward: tuple[int, ...], backward: tuple[int, ...], sizes: list[int], spare: int, early: set[int], many: int
) -> None:
    """Where a step of few micro-batches has led to, one of many goes on: elsewhere, another one may repeat as well."""
    plan, uses = plan_of(sizes, sum(sorted(sizes)[-2:]) + spare), Uses(forward, backward)
    region, simulated = residency._WorkingRegion(plan), residency._simulated
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(residency, "_simulated", lambda _, *asked: simulated(region, *asked))
        found = residency.fetched(plan, uses, micro_batches=many, updated_early=early)
    steps = [simulated(region, uses, many, early)[0] for _ in range(4)]  # which may take turns
    assert [tuple(unit.index for unit in units) for units in found] in steps


def test_a_step_of_very_many_micro_batches_is_not_simulated_as_a_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    used = list[int]()
    use = residency._WorkingRegion.use
    monkeypatch.setattr(residency._WorkingRegion, "use", lambda self, index: (used.append(index), use(self, index)))
    plan = plan_of([1] * 30, 12)
    passes = residency.fetched(plan, Uses.in_order(plan.request.units), micro_batches=100_000)
    assert len(passes) == 200_000 and len(used) < 10_000
    assert passes[2:4] * 10 == passes[100:120] and all(passes)


def spilling(sizes: Sequence[int]) -> Plan:
    """Return a plan of units with all on NVMe, and a pool for two gradients of the largest."""
    units = [make_unit(index, [size * CHUNK]) for index, size in enumerate(sizes)]
    return make_plan_with(units, [Homes(Tier.NVME, Tier.NVME, Tier.NVME)] * len(units))


def test_sums_are_read_for_each_pass_that_adds_and_for_updates_unless_they_are_in_the_pool() -> None:
    """Who came first in backward leaves: the first two of the model are there at its end, and the very first stays."""
    plan = spilling([1, 1, 1, 1])
    uses = Uses.in_order(plan.request.units)
    assert gradients_read(plan, uses) == [set(), {2, 3}]
    assert gradients_read(plan, uses, micro_batches=3) == [set(), {1, 2, 3}, {1, 2, 3}, {2, 3}]
    in_memory = plan_of([1, 1], 4)
    assert gradients_read(in_memory, Uses.in_order(in_memory.request.units), micro_batches=2) == [set()] * 3


@given(order=orders, sizes=st.lists(st.integers(1, 4), min_size=UNITS, max_size=UNITS))
def test_a_step_of_more_micro_batches_reads_in_those_before_what_one_of_fewer_does(
    order: tuple[int, ...], sizes: list[int]
) -> None:
    plan, uses = spilling(sizes), Uses(order, order[::-1])
    *longest, _ = gradients_read(plan, uses, micro_batches=MANY)
    for many in range(1, MANY):
        *passes, updates = gradients_read(plan, uses, micro_batches=many)
        assert passes == longest[:many]
        assert longest[many] >= updates, "what is not in the pool behind a pass is read in the next one"


def test_gradients_of_very_many_micro_batches_are_not_simulated_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    entered = list[int]()
    enters = residency._enters
    monkeypatch.setattr(residency, "_enters", lambda pool, *unit: (entered.append(unit[0]), enters(pool, *unit))[1])
    plan = spilling([1, 2, 3] * 10)
    found = gradients_read(plan, Uses.in_order(plan.request.units), micro_batches=100_000)
    assert len(found) == 100_001 and len(entered) < 10_000
