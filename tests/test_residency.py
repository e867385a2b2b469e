"""What passes of a step fetch, by simulation: many micro-batches as if each were simulated, and in little time."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from fakes import make_plan_with, make_unit
from hypothesis import given
from hypothesis import strategies as st

from offload.memory.budget import Tier
from offload.planning import residency
from offload.planning.plan import Homes, Plan
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
