"""Homes by time: beside an accelerator, several ways to fill memory are compared by what the drive makes of a step.

Owns that choice, where a plan by a fixed order of roles has something on NVMe; else everything stays as it is. The
drive is the price then: of all lanes it has the most work on any machine (:mod:`offload.planning.hardware`). In a step
with M micro-batches, one byte of memory saves it so many bytes, and has what beside:

========== ============= ================================================================================
of         read, written and
========== ============= ================================================================================
gradients  M, M          without them in memory, a unit is not updated during backward
parameters 2 M + 1, 1    in memory, they need a version for that; the one more is for the update
staging    none          the drive has something to do while units are computed
versions   none          beside parameters: what an update moves of states goes beside backward, ten times as much
states     1, 1
========== ============= ================================================================================

No order of these is the best in all budgets. A unit whose parameters and states are all on NVMe takes little memory and
is updated during backward, but moves the most. One that has all in memory moves nothing. A unit between the two moves
its states when no compute is left to hide them. So a :class:`_Fill` says how many units are on NVMe as a whole, how
many gradients are, and how much memory is left free: sizes make staging and versions of it. What is left holds states.
:class:`.DriveTime` tells the length of a step by the plan that follows. From two fills on, numbers are changed until no
change is for the better.

How long a batch computes is not known. So fills are compared by two lengths of compute, which are shares of what the
drive moves if it moves least (:data:`COMPUTE_SHARES`). With less compute, all that counts is what the drive moves. With
more, the drive has time for anything.

Parameters go to the device first, where working copies can spare the room: a working copy saves a pass, a home all of
them and the update's. Units in memory come first in the model, or are spread over it. If they come first, gradients of
the others come first, so that these are updated when backward ends. ``bench/homes.py`` compares the plans with random
ones.

Next: :mod:`offload.planning.planner` asks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
from collections.abc import Sequence

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.drive_time import DriveTime
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.sizing import (
    MOST_GRADS_IN_FLIGHT,
    TooSmall,
    activation_bytes,
    bytes_at,
    least_buffers,
    plan_of,
    totals_bytes,
)
from offload.planning.units import Unit

COMPUTE_SHARES = (0.4, 1.0)
SEVERAL = 4  # micro-batches of a step, where it has more than one
GOLDEN = 0.6180339887  # multiples of it, without whole parts, are spread evenly however many there are


@dataclasses.dataclass(frozen=True, slots=True)
class _Fill:
    """A way to fill memory.

    Attributes:
        whole: share of the units that may leave memory; they are on NVMe, but for gradients.
        grads: share of the other units whose gradients are on NVMe.
        free: memory that is left to staging and versions, in slots by those that hold the states of the largest unit.
        first: units in memory come first; else they are spread over the model.
    """

    whole: float = 0.0
    grads: float = 0.0
    free: float = 0.0
    first: bool = True


BEGINS = (_Fill(whole=1 / 4), _Fill(whole=3 / 4))
TRIED = (  # what is changed together; room in memory is what units without gradients there give to others
    {"free": (0.0, 1 / 4, 1 / 2, 1.0), "grads": (0.0, 1 / 4, 1 / 2, 3 / 4, 1.0)},
    {"whole": (0.0, 1 / 8, 1 / 4, 3 / 8, 1 / 2, 3 / 4)},
    {"first": (False, True)},
)


def by_time(request: Request, first: Plan) -> Plan:
    """Return the plan by which a step is shortest; `first` where there is nothing to choose.

    Args:
        request: what is asked.
        first: the plan by a fixed order of roles.
    """
    if request.device_is_host or request.world_size > 1 or request.commit is not None:
        return first
    if not any(Tier.NVME in (home.param, home.grad, home.states) for home in first.homes):
        return first
    return _Search(request, first).plan()


_Found = tuple[float, Plan | None]  # how long a step is, and by which plan; infinitely, where there is none


class _Search:
    """Compares fills of memory; no homes are looked at twice."""

    def __init__(self, request: Request, first: Plan) -> None:
        self._filling = _Filling(request, first.homes)
        self._request = request
        self._micro_batches = SEVERAL if request.accumulate else 1
        self._first = first
        least = self._made(self._filling.homes(_Fill())) or first
        moved = max(DriveTime(least).work(self._micro_batches), 1)
        self._computes = [share * moved for share in COMPUTE_SHARES]
        self._least = self._lengths(least)
        self._by_fill: dict[_Fill, _Found] = {}
        self._by_homes: dict[tuple[Homes, ...], _Found] = {}

    def plan(self) -> Plan:
        """Return the best that is found."""
        length, plan = min((self._look(self._changed(fill)) for fill in BEGINS), key=lambda found: found[0])
        return plan if plan is not None and length < self._length(self._first) else self._first

    def _changed(self, best: _Fill) -> _Fill:
        """Return the fill that no change makes better."""
        before = None
        while before != best:
            before = best
            for change in TRIED:
                values = itertools.product(*change.values())
                tried = [dataclasses.replace(best, **dict(zip(change, value, strict=True))) for value in values]
                best = min((best, *tried), key=lambda fill: self._look(fill)[0])
        return best

    def _look(self, fill: _Fill) -> _Found:
        if fill not in self._by_fill:
            homes = tuple(self._filling.homes(fill))
            if homes not in self._by_homes:
                plan = self._made(homes)
                self._by_homes[homes] = (math.inf, None) if plan is None else (self._length(plan), plan)
            self._by_fill[fill] = self._by_homes[homes]
        return self._by_fill[fill]

    def _made(self, homes: Sequence[Homes]) -> Plan | None:
        """Return the plan; None if it does not fit, by what is rounded up."""
        with contextlib.suppress(TooSmall):
            return plan_of(self._request, homes)
        return None

    def _length(self, plan: Plan) -> float:
        """Return the length of a step over that by which the drive moves least: the mean of both lengths of compute."""
        ratios = [length / least for length, least in zip(self._lengths(plan), self._least, strict=True)]
        return sum(ratios) / len(ratios)

    def _lengths(self, plan: Plan) -> list[float]:
        time = DriveTime(plan)
        return [time.step(compute, self._micro_batches) for compute in self._computes]


class _Filling:
    """Fills the device and host memory anew, but for what is forced, and for units that the device updates."""

    def __init__(self, request: Request, first: Sequence[Homes]) -> None:
        """Fill the device, and keep what stays where it is."""
        self._request = request
        self._params: dict[int, Tier] = {}
        self._grads: dict[int, Tier] = {}
        self._states: dict[int, Tier] = {}
        for unit, home in zip(request.units, first, strict=True):
            if request.param_tier is not None or home.param is Tier.DEVICE:
                self._params[unit.index] = home.param
            if home.grad is Tier.DEVICE:
                self._grads[unit.index] = home.grad
            if home.states is not None and (request.optimizer_tier is not None or home.states is Tier.DEVICE):
                self._states[unit.index] = home.states
        self._sizes: dict[tuple[Role, ...], dict[int, int]] = {
            roles: {unit.index: request.shard_bytes(unit, roles) for unit in request.units}
            for roles in ((Role.PARAM,), (Role.GRAD,), STATE_ROLES)
        }
        self._left = 0
        self._fill_device()
        self._stay = dict(self._params), dict(self._grads), dict(self._states)

    def homes(self, fill: _Fill) -> list[Homes]:
        """Return the homes."""
        self._params, self._grads, self._states = map(dict, self._stay)
        self._fill_host(fill)
        return self._so_far()

    def _so_far(self) -> list[Homes]:
        """Return the homes, on NVMe of what has none yet."""
        params, grads, states = self._params, self._grads, self._states
        return [
            Homes(params.get(unit.index, Tier.NVME), grads.get(unit.index), states.get(unit.index))
            for unit in self._request.units
        ]

    def _fill_device(self) -> None:
        """Let parameters stay there as far as working copies can spare the room."""
        request, homes = self._request, self._so_far()
        away = [unit for unit in _spread(request.units) if unit.index not in self._params]
        needed = bytes_at(request, homes, Tier.DEVICE) + totals_bytes(request, homes)
        needed += sum(unit.param_bytes for unit in request.widest(away))
        room = request.budgets[Tier.DEVICE] - activation_bytes(request, needed) - needed
        for unit in away:
            if unit.param_bytes <= room:
                self._params[unit.index] = Tier.DEVICE
                room -= unit.param_bytes

    def _fill_host(self, fill: _Fill) -> None:
        """Choose what leaves memory, and give it to gradients, parameters and states of what is left, in this order."""
        request = self._request
        units = list(request.units) if fill.first else _spread(request.units)
        trained = [unit for unit in units if unit.trainable]
        whole = _last_of([unit for unit in units if unit.index not in self._params], fill.whole)
        self._params |= dict.fromkeys(whole, Tier.NVME)
        self._states = dict.fromkeys(set(whole) & {unit.index for unit in trained}, Tier.NVME) | self._states
        leaving = [unit for unit in trained if unit.index not in self._grads]
        self._grads |= dict.fromkeys(_last_of([u for u in leaving if u.index not in whole], fill.grads), Tier.NVME)
        self._left = self._room(leaving, fill)
        self._put(self._grads, trained, Role.GRAD)
        self._put(self._params, units, Role.PARAM)
        self._put(self._states, trained, *STATE_ROLES)

    def _room(self, leaving: Sequence[Unit], fill: _Fill) -> int:
        """Return what is left of host memory beside the least buffers, and what `fill` leaves free."""
        request, sizes = self._request, self._sizes[Role.GRAD,]
        indices = [unit.index for unit in leaving]
        left = request.budgets[Tier.HOST] - request.own_bytes - bytes_at(request, self._so_far(), Tier.HOST)
        buffers = least_buffers(request, indices, nvme=True)
        kept = sum(sizes[index] for index in indices if index not in self._grads)
        if Tier.NVME in self._grads.values() or kept > left - buffers.total_bytes:  # some pass through a pool
            buffers = least_buffers(request, indices, nvme=True, spilled=max((sizes[i] for i in indices), default=0))
        left -= buffers.total_bytes
        largest = max((unit.numel for unit in leaving), default=0)
        slots = int(-(-largest // buffers.chunk_numel) * fill.free)
        return left - slots * buffers.slot_bytes - (MOST_GRADS_IN_FLIGHT - 1) * buffers.grad_bytes * (slots > 0)

    def _put(self, homes: dict[int, Tier], units: Sequence[Unit], *roles: Role) -> None:
        """Give those of `units` that have none yet a home of these roles, in host memory while there is room."""
        for unit in units:
            if unit.index not in homes:
                size = self._sizes[roles][unit.index]
                fits = size <= self._left
                homes[unit.index] = Tier.HOST if fits else Tier.NVME
                self._left -= size if fits else 0


def _spread(units: Sequence[Unit]) -> list[Unit]:
    """Return the units in an order of which each part is spread over the model."""
    return sorted(units, key=lambda unit: unit.index * GOLDEN % 1)


def _last_of(units: Sequence[Unit], share: float) -> list[int]:
    """Return the indices of the last `share` of units."""
    return [unit.index for unit in units[len(units) - int(len(units) * share) :]]
