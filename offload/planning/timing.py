"""How long a step takes by a plan, on a machine of which only numbers are known.

Owns the formula, max(compute, links, CPU) + fill, and what it needs: bytes per lane and step, with what stays in the
working region. Pure arithmetic over plain values. Next: :mod:`offload.forecast` shows it.

Activations that leave the device go beside the forward that makes them, and come back beside its backward.

A step has two spans. While micro-batches but the last are computed, parameters come and gradients go. From the last
backward to the end of the next forward, updates are made as well: gradients come from the last unit to the first, and
parameters are needed from the first to the last. If every step clips, updates wait for the norm, and these are two
spans: the drive reads in backward what the first updates need, and writes what the last ones have made. Units' updates
are served one behind the other: as gradients come, and in the order of the forward once backward has ended. By how much
this takes longer than the busiest lane is the fill. Shares of compute are those of parameters.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping

from offload.memory.budget import Tier
from offload.planning.hardware import Hardware
from offload.planning.plan import Plan
from offload.planning.residency import fetched
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.planning.uses import Uses
from offload.planning.work import Kernel, Work

LANES = ("compute", "h2d", "d2h", "cpu", "drive")


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
class Span:
    """A part of a step in which lanes work side by side.

    Attributes:
        name: of it.
        seconds: of work per lane.
    """

    name: str
    seconds: Mapping[str, float]

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.seconds, key=lambda lane: self.seconds[lane])

    @property
    def bound_s(self) -> float:
        """Its seconds."""
        return self.seconds[self.binding]


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one optimizer step.

    Attributes:
        spans: the parts of a step, one behind the other.
        fill_s: in which the busiest lane waits for others.
        moved: bytes.
    """

    spans: tuple[Span, ...]
    fill_s: float
    moved: Moved

    @property
    def bound_s(self) -> float:
        """Of the busiest lane of each span: no schedule is faster."""
        return sum(span.bound_s for span in self.spans)

    @property
    def step_s(self) -> float:
        """Of the step."""
        return self.bound_s + self.fill_s

    @property
    def seconds(self) -> dict[str, float]:
        """Work per lane."""
        return {lane: sum(span.seconds[lane] for span in self.spans) for lane in LANES}

    @property
    def binding(self) -> str:
        """The lane that takes most of the step."""
        bound = dict.fromkeys(LANES, 0.0)
        for span in self.spans:
            bound[span.binding] += span.bound_s
        return max(bound, key=lambda lane: bound[lane])


def timing_of(plan: Plan, work: Work, hardware: Hardware, *, micro_batches: int, clips: bool) -> Timing:
    """Predict a step.

    Args:
        plan: homes of the shards.
        work: of one micro-batch.
        hardware: the machine.
        micro_batches: of a step.
        clips: every step is clipped, so that no update begins before all gradients are there.
    """
    forward_s, backward_s = work.measured_s or (
        max(_device_s(work.forward, hardware), work.operators * hardware.operator_s),
        _device_s(work.backward, hardware),
    )
    host = plan.request.device_is_host
    away, back = _activations(plan)
    early = _early(plan, hardware, backward_s, clips=clips)
    uses = work.uses or Uses.in_order(plan.request.units)
    passes = _fetched(plan, uses, micro_batches, early.done_s)
    fresh, again = passes[0] + Moved(drive_read=-_filled(plan, early)), passes[-1]
    gradients, updates, earlier = _out(plan, first=True), _updates(plan), micro_batches - 1
    if earlier:
        gradients = _out(plan, first=False)
        moved = sum(passes[1:-1], gradients * (earlier - 1)) + _out(plan, first=True) + (away + back) * earlier
        spans = [_span("micro-batches but the last", earlier * (forward_s + backward_s), moved, hardware, host)]
    else:
        moved, spans = Moved(), []
    alternate_s = _bound_s(forward_s, away, hardware) + _bound_s(backward_s, back, hardware)
    fill_s = max(earlier * alternate_s - sum(span.bound_s for span in spans), 0.0)
    forward_s += _updates_there_s(plan, hardware)  # of the one forward that comes behind them
    backward, forward = again + gradients + back, fresh + updates + away
    ahead_s = 0.0
    if clips:  # no update goes beside backward
        before = _span("backward", backward_s, backward, hardware, host)
        ahead, ahead_s = _ahead(plan, before, hardware)
        found = [
            _span(before.name, backward_s, backward + ahead, hardware, host),
            _span("updates, forward", forward_s, forward + ahead * -1, hardware, host),
        ]
    else:
        name = "backward, updates, forward"
        found = [_span(name, forward_s + backward_s, backward + forward, hardware, host)]
    bound_s = sum(span.bound_s for span in found)
    if host:  # the processor that computes makes the updates, too
        beside_s = sum(early.update_s[index] for index in early.done_s)
        forward_s, backward_s = forward_s + sum(early.update_s.values()) - beside_s, backward_s + beside_s
    took_s = _in_turn_s(plan, early, hardware, forward_s, backward_s, ahead_s)
    fill_s += max(took_s - bound_s, alternate_s - bound_s, 0.0)
    return Timing((*spans, *found), fill_s, moved + backward + forward)


def _ahead(plan: Plan, backward: Span, hardware: Hardware) -> tuple[Moved, float]:
    """Return what of updates the drive does in a backward that has none, and its seconds.

    States of the first ones are read, and those of the last ones written, as far as staging has room for them.
    """
    moved = Moved(drive_read=plan.ahead_bytes, drive_write=plan.ahead_bytes)
    seconds = _lane_seconds(moved, hardware)["drive"]
    share = min((backward.bound_s - backward.seconds["drive"]) / seconds, 1.0) if seconds else 0.0
    room = int(plan.ahead_bytes * share)
    return Moved(drive_read=room, drive_write=room), seconds * share


def _activations(plan: Plan) -> tuple[Moved, Moved]:
    """Return what a forward moves of activations, and what its backward brings back."""
    size = plan.activation_step_bytes.get
    away = Moved(d2h=size("d2h", 0), drive_write=size("nvme_write", 0))
    return away, Moved(h2d=size("h2d", 0), drive_read=size("nvme_read", 0))


def _bound_s(compute_s: float, moved: Moved, hardware: Hardware) -> float:
    """Return the seconds of a pass that activations go beside: what leaves in it does not leave in another one."""
    return max(compute_s, *_lane_seconds(moved, hardware).values())


@dataclasses.dataclass(frozen=True, slots=True)
class _Early:
    """Updates during backward, in seconds since it began; per unit that the host updates.

    Attributes:
        arrived_s: when its gradient is there.
        update_s: what its update takes of the CPU.
        serve_s: what it takes of the CPU or the drive; where the CPU computes, of the drive.
        cpu_s: of these, what it takes of the CPU.
        done_s: when it is updated; absent where it is left to the next forward.
        free_s: when the last of these is.
    """

    arrived_s: Mapping[int, float]
    update_s: Mapping[int, float]
    serve_s: Mapping[int, float]
    cpu_s: Mapping[int, float]
    done_s: Mapping[int, float]
    free_s: float


def _early(plan: Plan, hardware: Hardware, backward_s: float, *, clips: bool) -> _Early:
    """Return which units are updated before backward has ended, with units served one by one."""
    units = plan.request.units
    total = sum(unit.numel for unit in units)
    arrived_s, update_s, serve_s, cpu_s, done_s = (dict[int, float]() for _ in range(5))
    at_s, host = 0.0, plan.request.device_is_host
    for unit in reversed(units):
        at_s += backward_s * unit.numel / total
        if unit.trainable and not plan.on_device(unit):
            arrived_s[unit.index] = at_s + (0.0 if host else unit.param_bytes / hardware.d2h_bytes_s)
            lanes = _lane_seconds(_update(plan, unit), hardware)
            update_s[unit.index], cpu_s[unit.index] = lanes["cpu"], 0.0 if host else lanes["cpu"]
            serve_s[unit.index] = max(cpu_s[unit.index], lanes["drive"])
    free_s = 0.0
    for unit in reversed(units):
        begin_s = max(free_s, arrived_s.get(unit.index, 0.0))
        if unit.index in arrived_s and not clips and plan.updates_early(unit) and begin_s < backward_s:
            free_s = done_s[unit.index] = begin_s + serve_s[unit.index]
    return _Early(arrived_s, update_s, serve_s, cpu_s, done_s, free_s)


def _filled(plan: Plan, early: _Early) -> int:
    """Return the bytes of parameters at home on NVMe that come to an accelerator from where they were updated."""
    if plan.request.device_is_host or plan.request.world_size > 1:
        return 0
    late = (unit for unit in _trained(plan) if unit.index not in early.done_s)
    return sum(unit.param_bytes for unit in late if plan.home(unit, Role.PARAM) is Tier.NVME)


def _in_turn_s(
    plan: Plan, early: _Early, hardware: Hardware, forward_s: float, backward_s: float, ahead_s: float
) -> float:
    """Return the seconds from the last backward to the end of the next forward, with units served one by one.

    The drive has done `ahead_s` of its work for these updates before.
    """
    units = plan.request.units
    total = sum(unit.numel for unit in units)
    done_s, free_s, clock_s = dict(early.done_s), max(early.free_s, backward_s), backward_s
    for unit in units:
        if unit.index in early.arrived_s:
            if unit.index not in done_s:
                serve_s = max(early.serve_s[unit.index] - ahead_s, early.cpu_s[unit.index])
                ahead_s -= early.serve_s[unit.index] - serve_s
                free_s = done_s[unit.index] = max(free_s, early.arrived_s[unit.index]) + serve_s
            up_s = 0.0 if plan.request.device_is_host else unit.param_bytes / hardware.h2d_bytes_s
            clock_s = max(clock_s, done_s[unit.index] + up_s)
        clock_s += forward_s * unit.numel / total
    return clock_s


def _device_s(kernels: Mapping[Kernel, int], hardware: Hardware) -> float:
    return sum(kernel.seconds(hardware) * many for kernel, many in kernels.items())


def _updates_there_s(plan: Plan, hardware: Hardware) -> float:
    """Return what a device takes for the units that it updates by itself."""
    there = [unit for unit in _trained(plan) if plan.on_device(unit)]
    return sum(update_bytes(plan, unit) for unit in there) / hardware.device_bytes_s


def _span(name: str, compute_s: float, moved: Moved, hardware: Hardware, one_processor: bool) -> Span:
    seconds = {"compute": compute_s, **_lane_seconds(moved, hardware)}
    if one_processor:  # which computes and updates
        seconds["compute"] += seconds["cpu"]
        seconds["cpu"] = 0.0
    return Span(name, seconds)


def _lane_seconds(moved: Moved, hardware: Hardware) -> dict[str, float]:
    read, write = moved.drive_read, moved.drive_write
    alone = max(read / hardware.drive_read_bytes_s, write / hardware.drive_write_bytes_s)
    return {
        "h2d": moved.h2d / hardware.h2d_bytes_s,
        "d2h": moved.d2h / hardware.d2h_bytes_s,
        "cpu": moved.cpu / hardware.update_bytes_s,
        "drive": max(alone, (read + write) / hardware.drive_mixed_bytes_s),
    }


def moved_of(plan: Plan, uses: Uses, *, micro_batches: int = 1, updated_early: Container[int] = ()) -> Moved:
    """Return the bytes of a step once steps repeat, without activations that leave the device.

    They are those that ``engine.stats()`` counts where the device is the CPU, its region has the plan's size, and the
    drive keeps up: else a copy that is not home yet may make another one leave for it.

    Args:
        plan: homes of the shards.
        uses: of a micro-batch.
        micro_batches: of a step.
        updated_early: units that are updated during backward.
    """
    moved = sum(_fetched(plan, uses, micro_batches, updated_early), _updates(plan)) + _out(plan, first=True)
    return moved + _out(plan, first=False) * (micro_batches - 1)


def _fetched(plan: Plan, uses: Uses, micro_batches: int, updated_early: Container[int]) -> list[Moved]:
    """Return what each pass fetches of parameters that are not at home on the device."""
    moved = []
    for units in fetched(plan, uses, micro_batches=micro_batches, updated_early=updated_early):
        drive = sum(unit.param_bytes for unit in units if plan.home(unit, Role.PARAM) is Tier.NVME)
        total = sum(unit.param_bytes for unit in units)
        moved.append(Moved(h2d=total - (drive if plan.request.device_is_host else 0), drive_read=drive))
    return moved


def _out(plan: Plan, *, first: bool) -> Moved:
    """Return what one backward moves of gradients: taken from what arrives, and added if it is not the `first` one."""
    moved, request = Moved(), plan.request
    for unit in _trained(plan):
        if plan.home(unit, Role.GRAD) is Tier.DEVICE:
            continue
        size, kept = unit.param_bytes, request.role_bytes(unit, Role.GRAD)
        moved += Moved(d2h=0 if request.device_is_host else size, cpu=size + kept + (0 if first else kept))
    return moved


def _updates(plan: Plan) -> Moved:
    """Return what the updates of a step move."""
    moved = Moved()
    for unit in _trained(plan):
        moved += _update(plan, unit)
    return moved


def _update(plan: Plan, unit: Unit) -> Moved:
    request, homes = plan.request, plan.homes[unit.index]
    if request.on_device(homes):
        return Moved()
    numel = request.owned_numel(unit, Role.MASTER)
    param, grad = request.chunk_bytes(unit, Role.PARAM, numel), request.role_bytes(unit, Role.GRAD)
    read = write = 0
    if homes.states is Tier.NVME:
        record = request.record_bytes(unit, STATE_ROLES, plan.chunk_numel)
        read, write = read + record, write + record
    if homes.param is Tier.NVME:
        read, write = read + (0 if request.device_is_host else param), write + param
    if homes.grad is Tier.NVME:
        read, write = read + grad, write + grad
    link = param if homes.param is Tier.DEVICE and not request.device_is_host else 0  # down to be updated, and up again
    return Moved(h2d=link, d2h=link, cpu=update_bytes(plan, unit), drive_read=read, drive_write=write)


def update_bytes(plan: Plan, unit: Unit) -> int:
    """Return the bytes that the update of a unit reads and writes: all is written but gradients."""
    request = plan.request
    numel = request.owned_numel(unit, Role.MASTER)
    kept = sum(request.chunk_bytes(unit, role, numel) for role in (Role.PARAM, *STATE_ROLES))
    return 2 * kept + request.role_bytes(unit, Role.GRAD)


def _trained(plan: Plan) -> list[Unit]:
    return [unit for unit in plan.request.units if unit.trainable]
