"""Updates where the CPU computes, played in turn: which are made during backward, and what waits for the others."""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.planning.hardware import Hardware
from offload.planning.in_turn import InTurn, at_once, beside_backward, in_turn_s
from offload.planning.moved import Moved, Sums, gradient_of, lane_seconds, update_of
from offload.planning.plan import Plan

LAYERS, WIDE = 6, 64
SLOWEST = 1e6  # bytes per second
MACHINE = dataclasses.replace(
    Hardware.load("desktop"),
    drive_read_bytes_s=1e9,
    drive_write_bytes_s=1e9,
    drive_mixed_bytes_s=1e9,
    update_bytes_s=1e12,
    host_bytes_s=1e12,
)
ORDER = tuple(range(LAYERS))


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Six equal units with all on NVMe, whose updates are one piece each."""
    return planned(tmp_path_factory.mktemp("drive"), WIDE * WIDE)


@functools.cache
def planned(path: Path, chunk_numel: int) -> Plan:
    """Return a plan of equal units, in pieces of so many elements."""
    model = torch.nn.Sequential(*(torch.nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS)))
    found = offload.plan(
        model,
        device="cpu",
        offload_param="nvme",
        offload_optimizer="nvme",
        max_memory={"device": "1MiB", "cpu": "16MiB", "nvme": "64MiB"},
        nvme_path=path,
        chunk_numel=chunk_numel,
    ).plan
    assert all(found.updates_early(unit) for unit in found.request.units)
    assert all(unit.numel == WIDE * WIDE for unit in found.request.units)
    return found


def backward(plan: Plan, machine: Hardware, seconds: float, *, clips: bool = False) -> InTurn:
    return beside_backward(plan, machine, ORDER, {}, [], seconds, clips=clips, sums=Sums(adds=False))


def work_s(plan: Plan, machine: Hardware) -> tuple[float, float, float]:
    """Return seconds of the CPU for gradients and for updates, and of the drive: of all units, which are equal."""
    unit = plan.request.units[0]
    update = lane_seconds(update_of(plan, unit), machine)
    gradient = lane_seconds(gradient_of(plan, unit, first=True), machine)
    return gradient["cpu"] * LAYERS, update["cpu"] * LAYERS, update["drive"] * LAYERS


def test_a_backward_that_is_slow_beside_the_drive_has_all_updates_but_one(plan: Plan) -> None:
    """None begins once all gradients have come: only the write of the one before the last is waited for."""
    gradients_s, updates_s, drive_s = work_s(plan, MACHINE)
    slow = backward(plan, MACHINE, 100 * drive_s)
    assert slow.early == set(ORDER) - {0}
    update = update_of(plan, plan.request.units[0])
    write_s = lane_seconds(Moved(drive_write=update.drive_write), MACHINE)["drive"]
    made_s = updates_s * (LAYERS - 1) / LAYERS
    assert slow.end_s == pytest.approx(100 * drive_s + gradients_s + made_s + write_s, rel=1e-3)


def test_a_backward_that_is_short_beside_the_drive_has_what_it_can_ask_for_once(plan: Plan) -> None:
    """The first gradient's unit is read; no further one is begun, as the drive is not over with it when all are there.

    The thread does not come by in between, and asks for one unit only, for it has no other one then.
    """
    _, _, drive_s = work_s(plan, MACHINE)
    found = backward(plan, MACHINE, drive_s / LAYERS / 10)
    assert found.early == {LAYERS - 1}
    update = update_of(plan, plan.request.units[0])
    assert found.end_s >= lane_seconds(update, MACHINE)["drive"]


def test_the_unit_whose_gradient_came_last_comes_first(plan: Plan) -> None:
    """The drive is over with the first unit, a read, when two more have come: the later one of them follows."""
    _, _, drive_s = work_s(plan, MACHINE)
    update = update_of(plan, plan.request.units[0])
    read_s = lane_seconds(Moved(drive_read=update.drive_read), MACHINE)["drive"]
    # Gradients come each 0.7 reads, from the last unit on; the read of the first is over before the third one.
    found = backward(plan, MACHINE, 0.7 * read_s * LAYERS)
    assert {LAYERS - 1, LAYERS - 3} <= found.early
    assert len(found.early) < LAYERS


def test_a_step_that_clips_updates_nothing_early(plan: Plan) -> None:
    gradients_s, _, drive_s = work_s(plan, MACHINE)
    found = backward(plan, MACHINE, drive_s, clips=True)
    assert found.early == set()
    assert found.end_s == pytest.approx(drive_s + gradients_s)


def test_a_forward_waits_for_the_updates_that_are_left(plan: Plan) -> None:
    """Where compute takes nothing, it takes as long as the drive; where it takes long, the first unit is waited for.

    A unit is one piece here. The drive pauses for one piece of those that it has at once.
    """
    _, updates_s, drive_s = work_s(plan, MACHINE)
    drive_s += updates_s / at_once(plan)
    begin = InTurn(frozenset(), 1.0)
    nothing = in_turn_s(plan, MACHINE, ORDER, [], begin, 0.0, 0.0)
    assert nothing == pytest.approx(1 + drive_s + updates_s / LAYERS)
    long = in_turn_s(plan, MACHINE, ORDER, [], begin, 100.0, 0.0)
    assert long == pytest.approx(1 + drive_s / LAYERS + updates_s + 100)
    assert in_turn_s(plan, MACHINE, ORDER, [], begin, 100.0, 2 * drive_s) == pytest.approx(1 + updates_s + 100)
    assert in_turn_s(plan, MACHINE, ORDER, [], InTurn(frozenset(ORDER), 1.0), 100.0, 0.0) == pytest.approx(101)


def test_parameters_that_come_again_are_waited_for(plan: Plan) -> None:
    """All of them are on the drive, and compute takes nothing."""
    units = plan.request.units
    read_s = sum(unit.param_bytes for unit in units) / MACHINE.drive_read_bytes_s
    found = in_turn_s(plan, MACHINE, ORDER, units, InTurn(frozenset(ORDER), 1.0), 0.0, 0.0)
    assert found == pytest.approx(1 + read_s)


def test_parameters_that_come_again_hold_up_an_update(plan: Plan) -> None:
    """The first unit waits for its update, beside which the drive brings as many bytes of others: 5 x 4 of 5 x 4 here.

    An update reads and writes two moments, and writes parameters: 20 bytes per element. Five units have 4 each.
    """
    first, *others = plan.request.units
    _, updates_s, _ = work_s(plan, MACHINE)
    pause_s = updates_s / LAYERS / at_once(plan)
    backward = InTurn(frozenset(unit.index for unit in others), 1.0)
    found = in_turn_s(plan, MACHINE, ORDER, others, backward, 100.0, 0.0)
    assert found == pytest.approx(
        101 + (20 + 5 * 4) * WIDE**2 / MACHINE.drive_mixed_bytes_s + updates_s / LAYERS + pause_s
    )


@pytest.mark.parametrize("numel", [WIDE * WIDE, WIDE * WIDE // 8])
@given(seconds=st.floats(1e-6, 1.0), rate=st.floats(SLOWEST, 1e12), again=st.booleans(), calls=st.integers(0, 9))
def test_no_lane_does_more_than_it_can(
    tmp_path_factory: pytest.TempPathFactory, numel: int, seconds: float, rate: float, again: bool, calls: int
) -> None:
    """Backward takes at least what the CPU computes, and what the drive does for the units that it has updated."""
    plan = planned(tmp_path_factory.getbasetemp(), numel)
    drive = dict.fromkeys(("drive_read_bytes_s", "drive_write_bytes_s", "drive_mixed_bytes_s"), rate)
    machine = dataclasses.replace(MACHINE, **drive)
    gradients_s, updates_s, drive_s = work_s(plan, machine)
    order = ORDER + (0,) * again  # a tied unit is used last, too
    sums = Sums(adds=False)
    found = beside_backward(plan, machine, order, dict.fromkeys(ORDER, calls), [], seconds, clips=False, sums=sums)
    share = len(found.early) / LAYERS
    assert found.early, "the first gradient's unit is begun at once"
    assert found.end_s >= (seconds + gradients_s + updates_s * share) * (1 - 1e-9)
    assert found.end_s >= drive_s * share * (1 - 1e-3)  # bytes are whole numbers
    assert found.end_s <= (seconds + gradients_s + updates_s * share + drive_s * share) * (1 + 1e-3) + updates_s
