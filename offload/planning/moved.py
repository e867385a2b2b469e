"""Bytes that a step moves, by lane, once steps repeat.

Owns the sums over units: of parameters that passes fetch, of gradients, of updates and of activations; and the seconds
that lanes take for them, each alone. Pure arithmetic over plain values. Next: :mod:`offload.planning.played`,
:mod:`offload.planning.in_turn` and :mod:`offload.planning.timing` make a step of them.
"""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Container, Sequence

from offload.memory.budget import Tier
from offload.planning.hardware import Hardware
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Moved:
    """Bytes of one step, by lane: `drive_read` and `drive_write` share one."""

    h2d: int = 0
    d2h: int = 0
    cpu: int = 0
    drive_read: int = 0
    drive_write: int = 0

    def __add__(self, other: Moved) -> Moved:
        names = [field.name for field in dataclasses.fields(Moved)]
        return Moved(**{name: getattr(self, name) + getattr(other, name) for name in names})

    def __mul__(self, many: int) -> Moved:
        return Moved(**{field.name: getattr(self, field.name) * many for field in dataclasses.fields(Moved)})


@dataclasses.dataclass(frozen=True, slots=True)
class Sums:
    """What becomes of gradients in the last backward of a step, and in the updates behind it.

    Attributes:
        adds: they are added to those of other micro-batches.
        added: units whose gradients so far the drive brings for that.
        updated: units whose gradients it brings for their updates.
    """

    adds: bool
    added: frozenset[int] = frozenset()
    updated: frozenset[int] = frozenset()


def lane_seconds(moved: Moved, hardware: Hardware) -> dict[str, float]:
    """Return the seconds of work per lane."""
    read, write = moved.drive_read, moved.drive_write
    alone = max(read / hardware.drive_read_bytes_s, write / hardware.drive_write_bytes_s)
    return {
        "h2d": moved.h2d / hardware.h2d_bytes_s,
        "d2h": moved.d2h / hardware.d2h_bytes_s,
        "cpu": moved.cpu / hardware.update_bytes_s,
        "drive": max(alone, (read + write) / hardware.drive_mixed_bytes_s),
    }


def fetch_of(plan: Plan, units: Sequence[Unit]) -> Moved:
    """Return what it moves to fetch parameters that are not at home on the device."""
    drive = sum(unit.param_bytes for unit in units if plan.home(unit, Role.PARAM) is Tier.NVME)
    total = sum(unit.param_bytes for unit in units)
    return Moved(h2d=total - (drive if plan.request.device_is_host else 0), drive_read=drive)


def gradients_of(plan: Plan, added: Sequence[frozenset[int]]) -> Moved:
    """Return what the first backward passes of a step move of gradients.

    Args:
        plan: homes of the shards.
        added: per pass, units whose gradients so far the drive brings, for the pass adds to them.
    """
    units, moved = trained_of(plan), Moved()
    for (first, read), many in collections.Counter((number == 0, read) for number, read in enumerate(added)).items():
        moved += sum((gradient_of(plan, unit, first=first, added=read) for unit in units), Moved()) * many
    return moved


def gradient_of(plan: Plan, unit: Unit, *, first: bool, added: Container[int] = ()) -> Moved:
    """Return what one backward moves of a unit's: taken from what arrives, and added if it is not the `first` one."""
    request, home = plan.request, plan.home(unit, Role.GRAD)
    if home is Tier.DEVICE:
        return Moved()
    size, kept = unit.param_bytes, request.role_bytes(unit, Role.GRAD)
    return Moved(
        d2h=0 if request.device_is_host else size,
        cpu=size + kept + (0 if first else kept),
        drive_read=kept if unit.index in added else 0,
        drive_write=kept if home is Tier.NVME else 0,
    )


def updates_of(plan: Plan, updated: Container[int] = ()) -> Moved:
    """Return what the updates of a step move; of units `updated`, the drive brings the gradients for that."""
    return sum((update_of(plan, unit, updated) for unit in trained_of(plan)), Moved())


def update_of(plan: Plan, unit: Unit, updated: Container[int] = ()) -> Moved:
    """Return that of one unit."""
    request, homes = plan.request, plan.homes[unit.index]
    if request.on_device(homes):
        return Moved()
    numel = request.owned_numel(unit, Role.MASTER)
    param = request.chunk_bytes(unit, Role.PARAM, numel)
    read, write = request.role_bytes(unit, Role.GRAD) if unit.index in updated else 0, 0
    if homes.states is Tier.NVME:
        record = request.record_bytes(unit, STATE_ROLES, plan.chunk_numel)
        read, write = read + record, write + record
    if homes.param is Tier.NVME:
        read, write = read + (0 if request.device_is_host else param), write + param
    link = param if homes.param is Tier.DEVICE and not request.device_is_host else 0  # down to be updated, and up again
    return Moved(h2d=link, d2h=link, cpu=update_bytes(plan, unit), drive_read=read, drive_write=write)


def update_bytes(plan: Plan, unit: Unit) -> int:
    """Return the bytes that a unit's update reads and writes: each pass reads all but gradients, and one writes it."""
    request = plan.request
    numel = request.owned_numel(unit, Role.MASTER)
    kept = sum(request.chunk_bytes(unit, role, numel) for role in (Role.PARAM, *STATE_ROLES))
    return (request.update_passes + 1) * kept + request.role_bytes(unit, Role.GRAD)


def activations_of(plan: Plan) -> tuple[Moved, Moved]:
    """Return what a forward moves of activations, and what its backward brings back."""
    size = plan.activation_step_bytes.get
    away = Moved(d2h=size("d2h", 0), drive_write=size("nvme_write", 0))
    return away, Moved(h2d=size("h2d", 0), drive_read=size("nvme_read", 0))


def trained_of(plan: Plan) -> list[Unit]:
    """Return the units that are trained."""
    return [unit for unit in plan.request.units if unit.trainable]
