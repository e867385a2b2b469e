"""A step by the drive's time: worked examples, and bounds that hold for any homes."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import pytest
from drawn_homes import any_homes
from hypothesis import given
from hypothesis import strategies as st

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.drive_time import CPU_BYTES, CPU_SPEED, DriveTime
from offload.planning.plan import STAGING_SLOTS, Plan
from offload.planning.sizing import plan_of
from offload.planning.units import Unit, lay_out

MIB, GIB = 1 << 20, 1 << 30
CHUNK = 64 * 1024
MANY = 4  # units
NUMEL = 4 * MIB  # of each
STATES, GRAD, PARAM = 10 * NUMEL, 2 * NUMEL, 2 * NUMEL  # its bytes
IN_MEMORY = Homes(Tier.HOST, Tier.HOST, Tier.HOST)


def units() -> list[Unit]:
    found = []
    for index in range(MANY):
        slots, numel = lay_out([(f"u{index}.weight", (NUMEL,))])
        found.append(Unit(index, f"u{index}", "bfloat16", 2, True, numel, slots))
    return found


def planned(homes: Sequence[Homes], host: int = 4 * GIB, *, clips: bool = False, accumulate: bool = False) -> Plan:
    request = Request(
        units(),
        {Tier.DEVICE: MANY * PARAM, Tier.HOST: host, Tier.NVME: GIB},
        device_is_host=False,
        activation_bytes=0,
        chunk_numel=CHUNK,
        clips=clips,
        accumulate=accumulate,
    )
    return plan_of(request, homes)


def one_away(index: int, away: Homes) -> list[Homes]:
    return [away if number == index else IN_MEMORY for number in range(MANY)]


def test_with_nothing_on_the_drive_a_step_is_compute() -> None:
    time = DriveTime(planned([IN_MEMORY] * MANY))
    assert time.work(1) == 0 and time.step(1000.0, 1) == pytest.approx(1000.0)


def test_the_forward_waits_for_the_first_unit_and_not_for_the_last_one() -> None:
    """Behind backward nothing is computed until unit 0 is updated; beside each unit, slots hold a part of unit 3's."""
    compute = 1e9
    away = Homes(Tier.HOST, Tier.NVME, Tier.NVME)  # its update waits for the step
    update = 2 * STATES + GRAD
    first, last = (DriveTime(planned(one_away(index, away))) for index in (0, MANY - 1))
    assert first.work(1) == last.work(1) == update + GRAD
    assert first.step(compute, 1) == pytest.approx(compute + update)
    plan = planned(one_away(MANY - 1, away))
    assert plan.spare_units, "these give memory of their gradients to staging"
    beside = (MANY - 1) * plan.most_slots * update * CHUNK // NUMEL
    assert beside < update
    updates = (MANY - 1) * NUMEL * CPU_BYTES / CPU_SPEED  # of the CPU, beside which the drive goes on
    assert last.step(compute, 1) == pytest.approx(compute + update - beside - updates)


def test_an_update_is_no_further_ahead_than_the_working_region_reaches() -> None:
    """Three copies have room: beside unit 0 nothing is done for unit 3."""
    away = Homes(Tier.HOST, Tier.NVME, Tier.NVME)
    wide = planned(one_away(MANY - 1, away))
    narrow = dataclasses.replace(wide, working_bytes=3 * PARAM)
    beside = wide.most_slots * (2 * STATES + GRAD) * CHUNK // NUMEL
    assert DriveTime(narrow).step(1e9, 1) == pytest.approx(DriveTime(wide).step(1e9, 1) + beside)


def test_an_update_during_backward_goes_beside_compute_as_far_as_slots_go() -> None:
    """It begins when two more units were computed; half of the slots pass with each further one, and the end waits."""
    compute = 1e9
    away = Homes(Tier.NVME, Tier.HOST, Tier.NVME)
    plan = planned(one_away(MANY - 1, away))
    assert plan.updates_early(plan.request.units[-1]) and plan.spare_units, "others are updated without the drive"
    update = 2 * (STATES + PARAM)
    beside = min(plan.staging_slots / 2 * update * CHUNK / NUMEL, update)
    expected = compute + update - beside + PARAM  # the next forward reads the new parameters
    assert DriveTime(plan).step(compute, 1) == pytest.approx(expected)


def test_slots_make_a_step_shorter() -> None:
    away = [Homes(Tier.HOST, Tier.HOST, Tier.NVME)] * MANY
    few, many = planned(away, 100 * MIB), planned(away)
    assert few.staging_slots < many.staging_slots
    assert DriveTime(many).step(1e8, 1) < DriveTime(few).step(1e8, 1)


def test_if_steps_clip_backward_reads_the_first_states_ahead() -> None:
    away, compute = Homes(Tier.HOST, Tier.HOST, Tier.NVME), 1e9
    calm, clipped = (planned(one_away(0, away), clips=clips) for clips in (False, True))
    assert clipped.ahead_bytes > 0 and clipped.staging_slots >= STAGING_SLOTS
    written = min(STATES, clipped.staging_slots * CHUNK // NUMEL * STATES)
    late = 2 * STATES - clipped.ahead_bytes - written
    assert DriveTime(clipped).step(compute, 1) <= compute + max(late, 0) + STATES
    assert DriveTime(clipped).step(compute, 1) < compute + 2 * STATES
    assert DriveTime(calm).work(1) == DriveTime(clipped).work(1)


@given(
    seed=st.integers(0, 1000),
    compute=st.floats(0.0, 1e9),
    micro_batches=st.integers(1, 5),
    clips=st.booleans(),
)
def test_a_step_is_no_shorter_than_compute_and_no_longer_than_both(
    seed: int, compute: float, micro_batches: int, clips: bool
) -> None:
    homes = any_homes(planned([IN_MEMORY] * MANY).request, seed)
    time = DriveTime(planned(homes, clips=clips, accumulate=micro_batches > 1))
    length = time.step(compute, micro_batches)
    assert compute * (1 - 1e-9) <= length <= compute + time.work(micro_batches) + 1e-3


def test_a_frozen_unit_on_the_drive_is_read_by_each_pass_and_never_updated() -> None:
    plan = planned([IN_MEMORY] * MANY)
    frozen = [dataclasses.replace(unit, trainable=unit.index > 0) for unit in plan.request.units]
    request = dataclasses.replace(plan.request, units=frozen)
    time = DriveTime(plan_of(request, [Homes(Tier.NVME, None, None), *[IN_MEMORY] * (MANY - 1)]))
    assert time.work(1) == 2 * PARAM and time.work(3) == 6 * PARAM
