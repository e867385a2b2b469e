"""The planner: which tier each shard lives in, worked out before anything is loaded.

Owns the policy of budgets, and the words of a refusal. Pure Python over the values of :mod:`offload.planning.plan`.

What lives on NVMe is read and written once per step, gradients per micro-batch, and parameters are read more than once:

========== =================================================================================
gradients  one read and one write of each micro-batch
parameters one read each for forward and backward, one more for the update of a GPU; one write
states     one read and one write of larger shards
========== =================================================================================

So host memory goes to gradients first, then to parameters, then to states. An optimizer whose own class makes the steps
takes host memory beside all this, for temporaries and small states. If these homes fit, there may be better ones:
:mod:`offload.planning.homes`.

Next: :mod:`offload.build` makes the request, :mod:`offload.planning.sizing` the plan of the homes, and
:mod:`offload.shards.manager` lays out the arenas.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Mapping, Sequence

from offload.errors import BudgetError, ConfigError
from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.homes import by_time
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.sizing import (
    ENOUGH_BYTES,
    TooSmall,
    activation_bytes,
    least_buffers,
    plan_of,
    region_of_slices,
    together,
)
from offload.planning.traffic import saved_s
from offload.planning.units import Unit
from offload.sizes import PAGE_BYTES, format_bytes

SMALL_UNIT_BYTES = 1 << 20
SMALL_UNITS_SHARE = 0.05


Asks = Callable[[Mapping[Tier, int]], Request]  # the same with other budgets


def make_plan(request: Request, asks: Asks | None = None) -> Plan:
    """Choose homes and sizes.

    Args:
        request: what is asked.
        asks: the same with other budgets, where these decide how units are cut, or what is set aside. A refusal then
            names budgets with which they would do.

    Raises:
        ConfigError: optimizer states are to stay on a device that cannot update them, whatever the budgets.
        BudgetError: the model cannot be trained within the budgets; names the tier, the bytes, and the smallest budget
            that would do with the other budgets as they are (or the smallest combination, where one is not enough).
    """
    if request.optimizer_tier is Tier.DEVICE and not request.device_is_host and any(u.trainable for u in request.units):
        _refuse_states_on_device(request)
    if request.param_tier is Tier.DEVICE and not request.device_is_host and request.slices_parameters:
        raise ConfigError(
            'offload_param="none": slices of parameters (stage=3) cannot stay on this device: ranks send them from '
            'host memory; use "auto", "cpu" or "nvme", or stage=2'
        )
    try:
        first = _by_roles(request)
    except TooSmall as short:
        raise _refusal(request, short, asks) from None
    return by_time(first.request, first)


def is_possible(request: Request) -> bool:
    """Tell whether there is a plan, without the search for budgets that would do."""
    try:
        _by_roles(request)
    except TooSmall:
        return False
    return True


def _by_roles(request: Request) -> Plan:
    """Return the plan that goes by roles; if no unit's states have room on the device, the one without kernels there.

    Raises:
        TooSmall: a budget is too small for what has no other place.
    """
    if request.updates_on_device and request.optimizer_tier is None:
        with contextlib.suppress(TooSmall):
            first = Planner(request).plan()
            if any(map(request.on_device, first.homes)):
                return first
        request = dataclasses.replace(request, states_may_stay=False)
    return Planner(request).plan()


def _refuse_states_on_device(request: Request) -> None:
    """Refuse states that are to stay on a device where nothing could update them."""
    if request.world_size > 1:
        why = "cannot stay on this device with several ranks, which update in host memory"
    elif request.own is not None:
        why = f"cannot stay on this device: {request.own.name} makes its steps in host memory"
    elif not request.updates_on_device:
        why = "cannot stay on this device: it has no kernel whose bits were compared with the CPU's"
    elif request.param_tier not in (None, Tier.DEVICE):
        why = 'stay on a device only with the parameters, but offload_param is not "none" or "auto"'
    else:
        return
    raise ConfigError(f'offload_optimizer="none": optimizer states {why}; use "auto", "cpu" or "nvme"')


class _Shards:
    """The shards of one kind, by the index of their unit: what each takes, and where it lives so far."""

    def __init__(self, kind: str, sizes: Mapping[int, int], forced: Tier | None = None) -> None:
        self.kind = kind
        self.sizes = sizes
        self.forced = forced
        self.homes: dict[int, Tier] = {}

    @property
    def total_bytes(self) -> int:
        """Bytes of all of them."""
        return sum(self.sizes.values())

    def homeless(self) -> dict[int, int]:
        """Return the sizes of those that have no home yet."""
        return {index: size for index, size in self.sizes.items() if index not in self.homes}

    def put_all(self, tier: Tier) -> None:
        """Make `tier` the home of all that have none yet."""
        self.homes |= dict.fromkeys(self.homeless(), tier)

    def leave(self, tier: Tier) -> None:
        """Take back the homes in `tier`."""
        self.homes = {index: home for index, home in self.homes.items() if home is not tier}


class Planner:
    """Makes one plan: fills the device, then host memory, and leaves the rest to NVMe."""

    def __init__(self, request: Request) -> None:
        trained = [unit for unit in request.units if unit.trainable]
        params = {unit.index: request.role_bytes(unit, Role.PARAM) for unit in request.units}
        grads = {unit.index: request.role_bytes(unit, Role.GRAD) for unit in trained}
        states = {unit.index: request.shard_bytes(unit, STATE_ROLES) for unit in trained}
        self._request = request
        self._params = _Shards("parameters", params, request.param_tier)
        self._grads = _Shards("gradients", grads)
        self._states = _Shards("optimizer states", states, request.optimizer_tier)
        self._activation_bytes = 0

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            TooSmall: a budget is too small for what has no other place.
        """
        self._fill_device()
        self._fill_host()
        params, grads, states = self._params.homes, self._grads.homes, self._states.homes
        units = self._request.units
        return plan_of(self._request, [Homes(params[u.index], grads.get(u.index), states.get(u.index)) for u in units])

    # --- device ---

    def _fill_device(self) -> None:
        """Keep everything there if it fits; else small units, and the rest of the room holds working copies.

        Optimizer states and gradients may stay where the device is host memory, or updates units by itself.
        """
        request = self._request
        widest = request.widest(request.units)
        states_stay = request.optimizer_tier is Tier.DEVICE
        trained = [unit for unit in request.units if unit.trainable]
        totals = 0 if request.device_is_host else request.total_bytes(trained)
        resident = self._grads.total_bytes + self._states.total_bytes + totals
        params_stay = request.param_tier is Tier.DEVICE
        needed = 0 if params_stay and not request.slices_parameters else sum(unit.param_bytes for unit in widest)
        needed += self._params.total_bytes if params_stay else 0
        self._activation_bytes = activation_bytes(request, needed + (resident if states_stay else 0))
        room = request.budgets[Tier.DEVICE] - self._activation_bytes - (resident if states_stay else 0)
        if room < 0:
            states_too = 'optimizer states (offload_optimizer="none") and ' if states_stay else ""
            raise TooSmall(Tier.DEVICE, f"{states_too}{format_bytes(self._activation_bytes)} of activations")
        if request.slices_parameters:
            room = self._slice_device(room, widest)
        elif params_stay or (request.param_tier is None and self._params.total_bytes <= room):
            if self._params.total_bytes > room:
                raise TooSmall(Tier.DEVICE, 'parameters (offload_param="none")')
            self._params.put_all(Tier.DEVICE)
            room -= self._params.total_bytes
        else:
            room = self._share_device(room, widest)
        if request.updates_on_device and not states_stay:
            if request.optimizer_tier is None and request.own is None and request.states_may_stay:
                self._keep_units([unit for unit in trained if self._params.homes.get(unit.index)], room)
        elif states_stay and not request.device_is_host and trained:
            if any(unit.index not in self._params.homes for unit in trained):
                raise TooSmall(Tier.DEVICE, 'parameters and optimizer states (offload_optimizer="none")')
        if states_stay or (request.optimizer_tier is None and request.device_is_host and resident <= room):
            self._grads.put_all(Tier.DEVICE)
            self._states.put_all(Tier.DEVICE)

    def _keep_units(self, units: Sequence[Unit], room: int) -> None:
        """Let the states and gradients of units whose parameters are on the device stay there, as far as there is room.

        The units come first that save the most seconds per byte, and of equals those that the next forward needs first.
        Gradients have room to become fp32.
        """
        request = self._request
        size = {unit.index: self._states.sizes[unit.index] + request.wide_bytes(unit) for unit in units}
        # A rank may have none of a unit, which takes no room then.
        units = sorted(units, key=lambda unit: -saved_s(request, unit) / max(size[unit.index], 1))
        kept: list[Unit] = []
        for unit in units:
            left = room - size[unit.index]
            if left >= request.total_bytes([*kept, unit]):
                kept.append(unit)
                room = left
        for unit in kept:
            self._grads.homes[unit.index] = self._states.homes[unit.index] = Tier.DEVICE

    def _share_device(self, room: int, widest: Sequence[Unit]) -> int:
        """Divide the device between working copies and small units that stay; return the bytes that neither takes."""
        request, homes = self._request, self._params.homes
        largest = together(request, room, widest, self._activation_bytes)
        used = 0
        for unit in sorted(request.units, key=lambda u: u.param_bytes):
            small = unit.param_bytes <= SMALL_UNIT_BYTES and request.param_tier is None
            share = used + unit.param_bytes <= room * SMALL_UNITS_SHARE
            if small and share and largest + used + unit.param_bytes <= room:
                homes[unit.index] = Tier.DEVICE
                used += unit.param_bytes
        away = sum(unit.param_bytes for unit in request.units if unit.index not in homes)
        return room - used - min(room - used, away) // PAGE_BYTES * PAGE_BYTES

    def _slice_device(self, room: int, widest: Sequence[Unit]) -> int:
        """Divide the device between whole units and slices of all, if these fit; return the bytes that neither takes.

        Whole units get what is of use and no more: ranks with other budgets than each other then keep the same ones.
        """
        request, slices = self._request, self._params
        stay = request.param_tier is Tier.DEVICE
        largest = together(request, room, widest, self._activation_bytes)
        if stay and largest + slices.total_bytes > room:
            raise TooSmall(Tier.DEVICE, 'the largest units and slices of parameters (offload_param="none")')
        room -= region_of_slices(request, room - (slices.total_bytes if stay else 0), widest)
        may_stay = request.param_tier is None and request.device_is_host  # else they are sent from host memory
        if stay or (may_stay and slices.total_bytes <= room):
            slices.put_all(Tier.DEVICE)
            room -= slices.total_bytes
        return room

    # --- host memory ---

    def _fill_host(self) -> None:
        """Give host memory away, with NVMe only where it is asked for or needed."""
        request = self._request
        if Tier.NVME not in (request.param_tier, request.optimizer_tier):
            try:
                return self._share_host(nvme=False)
            except TooSmall:
                if request.budgets[Tier.NVME] <= 0:
                    raise
                for shards in (self._params, self._grads, self._states):
                    shards.leave(Tier.HOST)
        return self._share_host(nvme=True)

    def _share_host(self, *, nvme: bool) -> None:
        """Give host memory away in order of worth."""
        request = self._request
        also = f" and {request.own}" if request.own else ""
        waiting = self._grads.homeless()
        buffers = least_buffers(request, waiting, nvme=nvme)
        left = request.budgets[Tier.HOST] - buffers.total_bytes - request.own_bytes
        for shards in (self._params, self._states):  # what has no choice comes first
            if shards.forced is Tier.HOST:
                left -= sum(shards.homeless().values())
                shards.put_all(Tier.HOST)
                if left < 0:
                    raise TooSmall(Tier.HOST, f'{shards.kind} (forced to "cpu") and buffers{also}')
        if nvme and waiting and sum(waiting.values()) > left:
            left += buffers.total_bytes
            buffers = least_buffers(request, waiting, nvme=nvme, spilled=max(waiting.values()))
            left -= buffers.total_bytes
        if left < 0:
            pipeline = "the buffers of the NVMe pipeline" if buffers.slot_bytes else "buffers"
            raise TooSmall(Tier.HOST, f"{pipeline}{also}")
        for shards in (self._grads, self._params, self._states):
            for index, size in shards.homeless().items():
                if shards.forced is not Tier.NVME and size <= left:
                    shards.homes[index] = Tier.HOST
                    left -= size
                elif nvme:
                    shards.homes[index] = Tier.NVME
                else:
                    raise TooSmall(Tier.HOST, f"{shards.kind} without an NVMe tier{also}")


def _refusal(request: Request, short: TooSmall, asks: Asks | None) -> BudgetError:
    """Word a refusal, with the smallest budgets that would do."""
    budgets = dict(request.budgets)
    raised: list[Tier] = []
    failing: Tier | None = short.tier
    while failing is not None:  # raise one budget after another until there is a plan...
        assert failing not in raised, f"{failing} is too small at any size"
        raised.append(failing)
        budgets[failing] = ENOUGH_BYTES
        failing = _failing_tier(request, budgets, asks)
    # ...then lower each again: more memory never makes a plan of the same units impossible, so bisection is exact. If a
    # larger device has larger units, it finds a budget that does, and of which a page less does not.
    for tier in raised:
        low, high = request.budgets[tier] // PAGE_BYTES, ENOUGH_BYTES // PAGE_BYTES
        while high - low > 1:
            middle = (low + high) // 2
            budgets[tier] = middle * PAGE_BYTES
            if _failing_tier(request, budgets, asks) is None:
                high = middle
            else:
                low = middle
        budgets[tier] = high * PAGE_BYTES
    limit, need = request.budgets[short.tier], budgets[short.tier]
    if len(raised) == 1:
        text = (
            f"{short.what} do not fit beside the rest: the tier needs {format_bytes(need)} ({need} bytes) in all but "
            f"the limit is {format_bytes(limit)}; "
            f'the smallest max_memory["{short.tier.value}"] that would do is {need} bytes'
        )
    else:
        each = " and ".join(f'max_memory["{tier.value}"] = {budgets[tier]} bytes' for tier in raised)
        text = (
            f"{short.what} do not fit {format_bytes(limit)}, and other budgets are too small as well; "
            f"what would do is {each}"
        )
    if short.tier is not Tier.NVME and request.commit is None:
        text += ", or offload more of it: see nvme_path, offload_param and offload_optimizer"
    enough = {tier.value: budgets[tier] for tier in raised}
    return BudgetError(f"{short.tier.value} budget: {text}", budgets=enough)


def _failing_tier(request: Request, budgets: Mapping[Tier, int], asks: Asks | None) -> Tier | None:
    sets_aside = request.host_activation_bytes or request.nvme_activation_bytes  # it may be shares of budgets
    if asks is not None and (sets_aside or budgets[Tier.DEVICE] != request.budgets[Tier.DEVICE]):
        request = asks(dict(budgets))
    try:
        _by_roles(dataclasses.replace(request, budgets=budgets))
    except TooSmall as short:
        return short.tier
    return None
