"""How long a step takes by a plan, on a machine of which only numbers are known.

Owns the formula, max(compute, links, CPU) + fill: seconds per lane, and in which spans of a step they are spent. Pure
arithmetic over plain values. Next: :mod:`offload.forecast` shows it.

Activations that leave the device go beside the forward that makes them, and come back beside its backward:
:mod:`offload.planning.played_activations` has their order. Where the device is the CPU, its threads copy them instead
of computing.

A step has two spans. While micro-batches but the last are computed, parameters come and gradients go. From the last
backward to the end of the next forward, updates are made as well: gradients come from the last unit to the first, and
parameters are needed from the first to the last. If every step clips, updates wait for the norm, and these are two
spans: the drive reads in backward what the first updates need, and writes what the last ones have made. By how much
this takes longer than the busiest lane is the fill.

Beside an accelerator, :mod:`offload.planning.played` tells it; where the device is the CPU,
:mod:`offload.planning.in_turn`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.planning.hardware import Hardware
from offload.planning.in_turn import InTurn, beside_backward, in_turn_s
from offload.planning.moved import (
    Moved,
    Sums,
    activations_of,
    fetch_of,
    gradients_of,
    lane_seconds,
    trained_of,
    update_bytes,
    updates_of,
)
from offload.planning.plan import Plan
from offload.planning.played import Pass, play
from offload.planning.played_activations import Saved
from offload.planning.residency import fetched, gradients_read
from offload.planning.units import Unit
from offload.planning.uses import Uses
from offload.planning.work import Kernel, Part, Work
from offload.sizes import PASSING_SHARE

LANES = ("compute", "h2d", "d2h", "cpu", "drive")


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
        moved: bytes. Where the device is the CPU, the drive keeps up, and the working region has the size of the plan,
            those of links and drive are what ``engine.stats()`` counts.
        early_units: that are updated during backward.
    """

    spans: tuple[Span, ...]
    fill_s: float
    moved: Moved
    early_units: int = 0

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
    host, uses = plan.request.device_is_host, work.uses or Uses.in_order(plan.request.units)
    forward_s, backward_s = _computing_s(plan, work, hardware)
    away, back = activations_of(plan)
    if host:
        forward_s, backward_s = forward_s + _copies_s(away, hardware), backward_s + _copies_s(back, hardware)
    alternate_s = _bound_s(forward_s, away, hardware) + _bound_s(backward_s, back, hardware)
    early: InTurn | None = None
    plays = False  # activations, so that their order is in what a step took
    may_be = [unit.index for unit in plan.request.units if host and not clips and plan.updates_early(unit)]
    passes = fetched(plan, uses, micro_batches=micro_batches, updated_early=may_be)
    *added, updated = gradients_read(plan, uses, micro_batches=micro_batches)
    earlier = micro_batches - 1
    sums = Sums(earlier > 0, added[-1], updated)
    if host:
        calls = {index: part.calls for index, part in work.parts[1].items()} if work.parts else {}
        early = beside_backward(plan, hardware, uses.forward, calls, passes[-1], backward_s, clips=clips, sums=sums)
        passes = fetched(plan, uses, micro_batches=micro_batches, updated_early=early.early)
    fresh, *between, again = (fetch_of(plan, units) for units in passes)
    summed, updates = gradients_of(plan, added[:-1]), updates_of(plan, updated)
    gradients = gradients_of(plan, added) + summed * -1
    spans: list[Span] = []
    moved = Moved()
    if earlier:
        moved = sum(between, summed) + (away + back) * earlier
        spans = [_span("micro-batches but the last", earlier * (forward_s + backward_s), moved, hardware, host)]
    bound_s = sum(span.bound_s for span in spans)
    spilled = Moved(drive_read=summed.drive_read, drive_write=summed.drive_write)  # beside backward alone
    passes_s = earlier * _bound_s(forward_s, away, hardware)
    passes_s += _bound_s(earlier * backward_s, back * earlier + spilled, hardware)
    fill_s = max(passes_s - bound_s, 0.0)
    there_s = _updates_there_s(plan, hardware)  # of the one forward that comes behind them
    took_s, early_units = 0.0, len(early.early) if early else 0
    if not host:
        before_s, (first, last) = bound_s + fill_s, _passes(plan, work, hardware, uses, (forward_s, backward_s), passes)
        saved = _saved(plan, work, first, away)
        plays = saved is not None
        played = play(
            plan, hardware, last, first, clips=clips, sums=sums, before_s=before_s, there_s=there_s, saved=saved
        )
        took_s, early_units = played.step_s - before_s, played.early_units
        fresh += Moved(drive_read=-played.filled_bytes)
        back += Moved(h2d=-min(played.stayed_bytes, back.h2d))
    backward, forward = again + gradients + back, fresh + updates + away
    ahead_s = 0.0
    if clips:  # no update goes beside backward
        before = _span("backward", backward_s, backward, hardware, host)
        ahead, ahead_s = _ahead(plan, before, hardware)
        found = [
            _span(before.name, backward_s, backward + ahead, hardware, host),
            _span("updates, forward", forward_s + there_s, forward + ahead * -1, hardware, host),
        ]
    else:
        name = "backward, updates, forward"
        found = [_span(name, forward_s + there_s + backward_s, backward + forward, hardware, host)]
    if early is not None:
        took_s = in_turn_s(plan, hardware, uses.forward, passes[0], early, forward_s + there_s, ahead_s, updated)
    bound_s = sum(span.bound_s for span in found)
    fill_s += max(took_s - bound_s, 0.0 if plays else alternate_s - bound_s, 0.0)
    return Timing((*spans, *found), fill_s, moved + backward + forward, early_units)


def _computing_s(plan: Plan, work: Work, hardware: Hardware) -> tuple[float, float]:
    """Return the seconds of a forward and of a backward without anything that they wait for.

    The host gives work to an accelerator that computes meanwhile. A CPU has one thread for both.
    """
    device_s = work.measured_s or (_device_s(work.forward, hardware), _device_s(work.backward, hardware))
    host_s = [many * hardware.operator_s for many in work.operators]
    if not plan.request.device_is_host:
        forward_s, backward_s = (max(took, given) for took, given in zip(device_s, host_s, strict=True))
        return forward_s, backward_s
    hooks_s = [sum(part.calls for part in parts.values()) * hardware.hook_s for parts in work.parts or ({}, {})]
    gradients_s = sum(len(unit.slots) for unit in trained_of(plan)) * hardware.gradient_s
    return device_s[0] + host_s[0] + hooks_s[0], device_s[1] + host_s[1] + hooks_s[1] + gradients_s


def _passes(
    plan: Plan,
    work: Work,
    hardware: Hardware,
    uses: Uses,
    seconds: tuple[float, float],
    fetches: Sequence[Sequence[Unit]],
) -> tuple[Pass, Pass]:
    """Return the first forward of a step and its last backward, which take so many `seconds` of the device.

    A unit is needed when it is used first, and its gradient is there when backward has passed that use again: backward
    of an embedding does not need the weight, but makes its gradient. Where nobody has counted its kernels, its share is
    that of parameters.
    """
    numels = {unit.index: float(unit.numel) for unit in plan.request.units}
    forward = tuple(dict.fromkeys((*uses.forward, *numels)))
    backward = forward[::-1]
    first, last = work.parts or ({}, {})
    hooks_s = {unit.index: len(unit.slots) * hardware.gradient_s for unit in trained_of(plan)}
    return (
        _pass(hardware, forward, first, numels, seconds[0], fetches[0], {}),
        _pass(hardware, backward, last, numels, seconds[1], fetches[-1], hooks_s),
    )


def _saved(plan: Plan, work: Work, forward: Pass, away: Moved) -> Saved | None:
    """Return the activations that leave in a forward; a unit's share is that of the bytes that its kernels touch."""
    parts = work.parts[0] if work.parts else {}
    shares = {index: sum(k.size_bytes * many for k, many in part.kernels.items()) for index, part in parts.items()}
    shares = shares or {unit.index: unit.numel for unit in plan.request.units}
    total = sum(shares.values())
    if not away.d2h or not total:
        return None
    kept, host_bytes = away.d2h + plan.last_bytes, plan.request.host_activation_bytes
    passing_bytes = host_bytes // PASSING_SHARE if plan.request.nvme_activation_bytes else 0
    return Saved(
        {index: kept * shares.get(index, 0) // total for index in forward.order},
        plan.near_bytes,
        plan.last_bytes,
        host_bytes,
        host_bytes - passing_bytes,
    )


def _pass(
    hardware: Hardware,
    order: tuple[int, ...],
    parts: Mapping[int, Part],
    numels: Mapping[int, float],
    compute_s: float,
    fetches: Sequence[Unit],
    gradients_s: Mapping[int, float],
) -> Pass:
    shares = {index: _device_s(part.kernels, hardware) for index, part in parts.items()} or numels
    total = sum(shares.values()) or 1.0
    gradients = {index: part.gradients for index, part in parts.items()}
    calls_s = {
        index: part.operators * hardware.operator_s + part.calls * hardware.hook_s + gradients_s.get(index, 0.0)
        for index, part in parts.items()
    }
    shares = {index: compute_s * share / total for index, share in shares.items()}
    return Pass(order, shares, calls_s, frozenset(unit.index for unit in fetches), gradients)


def _ahead(plan: Plan, backward: Span, hardware: Hardware) -> tuple[Moved, float]:
    """Return what of updates the drive does in a backward that has none, and its seconds.

    States of the first ones are read, and those of the last ones written, as far as staging has room for them.
    """
    moved = Moved(drive_read=plan.ahead_bytes, drive_write=plan.ahead_bytes)
    seconds = lane_seconds(moved, hardware)["drive"]
    share = min((backward.bound_s - backward.seconds["drive"]) / seconds, 1.0) if seconds else 0.0
    room = int(plan.ahead_bytes * share)
    return Moved(drive_read=room, drive_write=room), seconds * share


def _bound_s(compute_s: float, moved: Moved, hardware: Hardware) -> float:
    """Return the seconds of a pass that activations go beside: what leaves in it does not leave in another one."""
    return max(compute_s, *lane_seconds(moved, hardware).values())


def _copies_s(moved: Moved, hardware: Hardware) -> float:
    """Return the seconds in which all threads of a CPU copy what leaves it, or comes back."""
    return 2 * (moved.d2h + moved.h2d) / hardware.host_bytes_s


def _device_s(kernels: Mapping[Kernel, int], hardware: Hardware) -> float:
    return sum(kernel.seconds(hardware) * many for kernel, many in kernels.items())


def _updates_there_s(plan: Plan, hardware: Hardware) -> float:
    """Return what a device takes for the units that it updates by itself."""
    there = [unit for unit in trained_of(plan) if plan.on_device(unit)]
    return sum(update_bytes(plan, unit) for unit in there) / hardware.device_bytes_s


def _span(name: str, compute_s: float, moved: Moved, hardware: Hardware, one_processor: bool) -> Span:
    seconds = {"compute": compute_s, **lane_seconds(moved, hardware)}
    if one_processor:  # which computes and updates
        seconds["compute"] += seconds["cpu"]
        seconds["cpu"] = 0.0
    return Span(name, seconds)
