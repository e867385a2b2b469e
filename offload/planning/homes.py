"""Homes by time: beside an accelerator, what leaves NVMe is what saves the drive the most seconds per byte of memory.

Owns that choice, where a plan by a fixed order of roles has something on NVMe; else everything stays as it is. The
drive is the price then: of all lanes it has the most work on any machine (:mod:`offload.planning.hardware`). In a step
with M micro-batches, one byte of memory saves it so many bytes:

========== ============= ================================================================================
of         read, written and
========== ============= ================================================================================
gradients  M, M          without them in memory, a unit is not updated during backward
parameters 2 M + 1, 1    the one more is for the update
staging    none          the drive has something to do while units are computed
versions   none          beside parameters: what an update moves of states goes beside backward, ten times as much
states     1, 1
========== ============= ================================================================================

Parameters go to the device first, where working copies can spare the room: a working copy saves a pass, a home all of
them and the update's. Host memory goes to gradients, parameters, staging and versions of some units, and to states.
Staging and versions are worth their room only if no parameter has to be on NVMe, and if steps do not clip: then no unit
is updated during backward. A unit that is on NVMe as a whole needs no version there. If steps of one micro-batch clip,
gradients come last: they are written while the drive has nothing else to do. If not all gradients fit, they leave half
of host memory to parameters. Of each role, units that are in memory are spread over the model, so that the drive has
work all the time. ``bench/homes.py`` compares the plans with random ones.

Next: :mod:`offload.planning.planner` asks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.sizing import (
    MOST_GRADS_IN_FLIGHT,
    activation_bytes,
    bytes_at,
    least_buffers,
    totals_bytes,
    worthy_slots,
)
from offload.planning.units import Unit

GRADS_SHARE = 1 / 2  # of host memory, where not all of them fit: parameters save more, and need some of it
EARLY_SHARE = 1 / 4  # of units with states on NVMe, that may be updated during backward
GOLDEN = 0.6180339887  # multiples of it, without whole parts, are spread evenly however many there are


def by_time(request: Request, first: Sequence[Homes]) -> list[Homes] | None:
    """Return the homes that save the drive most; None where there is nothing to choose.

    They may be too large for the budgets by what is rounded up: then `first` is what fits.

    Args:
        request: what is asked.
        first: homes by a fixed order of roles, which fit.
    """
    if request.device_is_host or request.world_size > 1 or request.commit is not None:
        return None
    if not any(Tier.NVME in (home.param, home.grad, home.states) for home in first):
        return None
    return _Filling(request, first).homes()


class _Filling:
    """Fills the device and host memory anew, but for what is forced, and for units that the device updates."""

    def __init__(self, request: Request, first: Sequence[Homes]) -> None:
        """Begin with what stays where it is."""
        self._request = request
        self._units = sorted(request.units, key=lambda unit: unit.index * GOLDEN % 1)
        self._trained = [unit for unit in self._units if unit.trainable]
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
        self._left = 0

    def homes(self) -> list[Homes]:
        """Return the homes."""
        self._fill_device()
        self._fill_host()
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
        away = [unit for unit in self._units if unit.index not in self._params]
        needed = bytes_at(request, homes, Tier.DEVICE) + totals_bytes(request, homes)
        needed += sum(unit.param_bytes for unit in request.widest(away))
        room = request.budgets[Tier.DEVICE] - activation_bytes(request, needed) - needed
        for unit in away:
            if unit.param_bytes <= room:
                self._params[unit.index] = Tier.DEVICE
                room -= unit.param_bytes

    def _fill_host(self) -> None:
        """Place gradients, parameters and states, in this order; if steps of one micro-batch clip, gradients last."""
        request = self._request
        leaving = [unit.index for unit in self._trained if unit.index not in self._grads]
        sizes = {index: request.role_bytes(request.units[index], Role.GRAD) for index in leaving}
        buffers = least_buffers(request, leaving, nvme=True)
        left = request.budgets[Tier.HOST] - request.own_bytes - bytes_at(request, self._so_far(), Tier.HOST)
        last = request.clips and not request.accumulate
        kept = 0
        if last or sum(sizes.values()) > left - buffers.total_bytes:  # some pass through a pool
            buffers = least_buffers(request, leaving, nvme=True, spilled=max(sizes.values(), default=0))
            kept = 0 if last else int((left - buffers.total_bytes) * (1 - GRADS_SHARE))
        self._left = left - buffers.total_bytes - kept
        if not last:
            self._fill(self._grads, Role.GRAD)
        self._left += kept
        params = dict(self._params)
        self._fill(self._params, Role.PARAM)
        if not request.clips and Tier.NVME not in self._params.values():
            self._left -= worthy_slots(request, buffers) * buffers.slot_bytes
            self._left -= (MOST_GRADS_IN_FLIGHT - 1) * buffers.grad_bytes
            self._let_some_be_early(params)
        self._fill(self._states, *STATE_ROLES)
        self._fill(self._grads, Role.GRAD)

    def _let_some_be_early(self, params: Mapping[int, Tier]) -> None:
        """Let updates of some units have room beside the old content: :data:`EARLY_SHARE` of those on NVMe.

        Parameters need memory for that, or they are on NVMe as well, which takes none. That is better if more states
        have room then. If parameters come once for each of several micro-batches, the drive would bring them too often.

        Args:
            params: those that had a home before any was in host memory: they stay there.
        """
        units = [unit for unit in self._trained if self._grads[unit.index] is Tier.HOST]
        if self._request.own is not None:
            return
        left, states = self._left, dict(self._states)
        if not self._request.accumulate:
            self._fill(self._states, *STATE_ROLES)
            at_home = list(self._states.values()).count(Tier.HOST)
            on_drive = [unit for unit in units if self._states[unit.index] is Tier.NVME]
            may_leave = [unit for unit in on_drive if unit.index not in params]
            whole = may_leave[len(may_leave) - min(int(len(on_drive) * EARLY_SHARE), len(may_leave)) :]
            self._left, self._states = left + sum(self._size(unit, Role.PARAM) for unit in whole), dict(states)
            self._fill(self._states, *STATE_ROLES)
            if list(self._states.values()).count(Tier.HOST) > at_home:
                self._params |= dict.fromkeys((unit.index for unit in whole), Tier.NVME)
                return
        versions = {unit.index: int(self._size(unit, Role.PARAM) * EARLY_SHARE) for unit in units}
        self._left, self._states = left - sum(versions.values()), states
        for unit in self._trained:
            self._put(self._states, unit, self._size(unit, *STATE_ROLES) - versions.get(unit.index, 0))

    def _fill(self, homes: dict[int, Tier], *roles: Role) -> None:
        """Give units that have none yet a home of these roles."""
        for unit in self._units if roles == (Role.PARAM,) else self._trained:
            self._put(homes, unit, self._size(unit, *roles))

    def _put(self, homes: dict[int, Tier], unit: Unit, size_bytes: int) -> None:
        """Give a shard that has no home yet one in host memory, if there is room for `size_bytes`."""
        if unit.index not in homes:
            fits = size_bytes <= self._left
            homes[unit.index] = Tier.HOST if fits else Tier.NVME
            self._left -= size_bytes if fits else 0

    def _size(self, unit: Unit, *roles: Role) -> int:
        return sum(self._request.role_bytes(unit, role) for role in roles)
