"""The planner: which tier each shard lives in, worked out before anything is loaded.

Owns the policy of budgets, and the words of a refusal. Pure Python over the values of :mod:`offload.planning.plan`.

What lives on NVMe is read and written once per step, and parameters are read more than once:

========== =================================================================================
gradients  one read and one write
parameters one read each for forward and backward, one more for the update of a GPU; one write
states     one read and one write of larger shards
========== =================================================================================

So host memory goes to gradients first, then to parameters, then to states. An optimizer whose own class makes the steps
takes host memory beside all this, for temporaries and small states.

Next: :mod:`offload.build` makes the request, :mod:`offload.shards.manager` lays out the arenas.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.errors import BudgetError, ConfigError
from offload.memory.budget import Tier
from offload.planning import versions
from offload.planning.plan import (
    LOOK_AHEAD,
    NVME_SLACK_CHUNKS,
    STAGING_SLOTS,
    WORKING_UNITS,
    Homes,
    Plan,
    Request,
    most_in_flight,
)
from offload.planning.roles import STATE_ROLES, Role, role_bytes
from offload.planning.traffic import saved_s, step_bytes
from offload.planning.units import Unit
from offload.sizes import PAGE_BYTES, format_bytes, round_up, whole_pages

MOST_STAGING_SLOTS = 16
GRAD_POOL_BUFFERS = 2  # spilled gradients: one filling, one leaving
MOST_GRADS_IN_FLIGHT = 3  # units leaving a GPU, where host memory is left: made, copied, used
MIN_CHUNK_NUMEL = 64 * 1024
MAX_CHUNK_NUMEL = 2 * 1024 * 1024
STAGING_SHARE = 0.2  # bytes of staging per trainable parameter that are worth their room
FROZEN_STAGING_SHARE = 0.01  # the same per frozen one, which passes through when it is loaded
MOST_STAGING_SHARE = 0.27  # the same where host memory is left
APART_STAGING_SHARE = 1.2  # the same beside an accelerator: who starts transfers waits for units of its backward
CLIPPED_STAGING_SHARE = 0.5  # of states on NVMe: a backward in which no update is made has time to read as much
ACTIVATION_SHARE = 0.5
SMALL_UNIT_BYTES = 1 << 20
SMALL_UNITS_SHARE = 0.05
_ENOUGH_BYTES = 1 << 60


def make_plan(request: Request) -> Plan:
    """Choose homes and sizes.

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
        return Planner(request).plan()
    except _TooSmall as short:
        raise _refusal(request, short) from None


def _refuse_states_on_device(request: Request) -> None:
    """Refuse states that are to stay on a device where nothing could update them."""
    if request.world_size > 1:
        why = "cannot stay on this device with several ranks, which update in host memory"
    elif not request.updates_on_device:
        why = "cannot stay on this device: it has no kernel whose bits were compared with the CPU's"
    elif request.own is not None:
        why = f"cannot stay on this device: {request.own.name} makes its steps in host memory"
    elif request.param_tier not in (None, Tier.DEVICE):
        why = 'stay on a device only with the parameters, but offload_param is not "none" or "auto"'
    else:
        return
    raise ConfigError(f'offload_optimizer="none": optimizer states {why}; use "auto", "cpu" or "nvme"')


class _TooSmall(Exception):
    """A budget is too small for `what`; `remedy` is one beside the others."""

    def __init__(self, tier: Tier, what: str, remedy: str = "") -> None:
        super().__init__(what)
        self.tier = tier
        self.what = what
        self.remedy = remedy


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

    def bytes_at(self, tier: Tier) -> int:
        """Return the bytes whose home is `tier`."""
        return sum(size for index, size in self.sizes.items() if self.homes[index] is tier)


@dataclasses.dataclass(slots=True)
class _Buffers:
    """Host memory in which nothing lives: see :class:`Plan` for the sizes."""

    chunk_numel: int
    slots: int = 0
    slot_bytes: int = 0
    pool_bytes: int = 0
    fetch_bytes: int = 0
    grad_bytes: int = 0
    exchange_bytes: int = 0
    activation_bytes: int = 0

    @property
    def total_bytes(self) -> int:
        passing = self.pool_bytes + self.fetch_bytes + self.grad_bytes + self.exchange_bytes + self.activation_bytes
        return self.slots * self.slot_bytes + passing


class Planner:
    """Makes one plan: fills the device, then host memory, and leaves the rest to NVMe."""

    def __init__(self, request: Request) -> None:
        trained = [unit for unit in request.units if unit.trainable]
        params = {unit.index: request.role_bytes(unit, Role.PARAM) for unit in request.units}
        grads = {unit.index: request.role_bytes(unit, Role.GRAD) for unit in trained}
        states = {unit.index: sum(request.role_bytes(unit, role) for role in STATE_ROLES) for unit in trained}
        self._request = request
        self._params = _Shards("parameters", params, request.param_tier)
        self._grads = _Shards("gradients", grads)
        self._states = _Shards("optimizer states", states, request.optimizer_tier)
        self._activation_bytes = 0
        self._working_bytes = 0
        self._totals_bytes = 0

    def plan(self) -> Plan:
        """Return the plan.

        Raises:
            _TooSmall: a budget is too small for what has no other place.
        """
        request = self._request
        self._fill_device()
        buffers = self._fill_host()
        params, grads, states = self._params.homes, self._grads.homes, self._states.homes
        homes = tuple(Homes(params[u.index], grads.get(u.index), states.get(u.index)) for u in request.units)
        committed = versions.committed_bytes(request, buffers.chunk_numel)
        held = versions.held_bytes(request, homes, buffers.chunk_numel)
        nvme = self._nvme_bytes(homes, buffers, committed + held)
        chunk = buffers.chunk_numel
        arenas = {
            Tier.DEVICE: self._bytes_at(Tier.DEVICE) + self._working_bytes + self._totals_bytes,
            Tier.HOST: self._bytes_at(Tier.HOST) + buffers.total_bytes,
            Tier.NVME: nvme,
        }
        wide = self._widening(homes, arenas)
        left = request.budgets[Tier.HOST] - request.own_bytes - arenas[Tier.HOST] - wide.get(Tier.HOST, 0)
        # What a durable run writes early is what the step writes: the last commit keeps the versions before.
        left_on_drive = _ENOUGH_BYTES if request.commit else request.budgets[Tier.NVME] - nvme
        spare, early = self._beside(homes, chunk, left, left_on_drive)
        left -= sum(spare.values())
        arenas[Tier.HOST] += sum(spare.values()) + self._add_slots(buffers, left, early)
        arenas[Tier.NVME] += 0 if request.commit else early
        return Plan(
            request=request,
            homes=homes,
            working_bytes=self._working_bytes,
            activation_bytes=request.budgets[Tier.DEVICE] - arenas[Tier.DEVICE] - wide.get(Tier.DEVICE, 0),
            grad_pool_bytes=buffers.pool_bytes,
            fetch_staging_bytes=buffers.fetch_bytes,
            grad_staging_bytes=buffers.grad_bytes,
            chunk_numel=chunk,
            staging_slots=buffers.slots,
            staging_slot_bytes=buffers.slot_bytes,
            arena_bytes=arenas,
            step_bytes=step_bytes(request, homes, chunk, self._working_bytes),
            totals_bytes=self._totals_bytes,
            committed_bytes=committed,
            held_bytes=held,
            early_bytes=early,
            spare_units=frozenset(spare),
            wide_bytes=wide,
        )

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
        self._activation_bytes = self._activations(needed + (resident if states_stay else 0))
        room = request.budgets[Tier.DEVICE] - self._activation_bytes - (resident if states_stay else 0)
        if room < 0:
            states_too = 'optimizer states (offload_optimizer="none") and ' if states_stay else ""
            raise _TooSmall(Tier.DEVICE, f"{states_too}{format_bytes(self._activation_bytes)} of activations")
        if request.slices_parameters:
            room = self._slice_device(room, widest)
        elif params_stay or (request.param_tier is None and self._params.total_bytes <= room):
            if self._params.total_bytes > room:
                raise _TooSmall(Tier.DEVICE, 'parameters (offload_param="none")')
            self._params.put_all(Tier.DEVICE)
            room -= self._params.total_bytes
        else:
            room = self._share_device(room, widest)
        if request.updates_on_device and not states_stay:
            if request.optimizer_tier is None and request.own is None:
                self._keep_units([unit for unit in trained if self._params.homes.get(unit.index)], room)
        elif states_stay and not request.device_is_host and trained:
            if any(unit.index not in self._params.homes for unit in trained):
                raise _TooSmall(Tier.DEVICE, 'parameters and optimizer states (offload_optimizer="none")')
            self._totals_bytes = totals
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
        self._totals_bytes = request.total_bytes(kept)

    def _activations(self, needed_bytes: int) -> int:
        """Return the bytes for activations: what is asked for, else a share that leaves what is needed."""
        request = self._request
        if request.activation_bytes is not None:
            return request.activation_bytes
        budget = request.budgets[Tier.DEVICE]
        return max(min(int(budget * ACTIVATION_SHARE), budget - needed_bytes), 0)

    def _share_device(self, room: int, widest: Sequence[Unit]) -> int:
        """Divide the device between working copies and small units that stay; return the bytes that neither takes."""
        request, homes = self._request, self._params.homes
        largest = self._together(room, widest)
        used = 0
        for unit in sorted(request.units, key=lambda u: u.param_bytes):
            small = unit.param_bytes <= SMALL_UNIT_BYTES and request.param_tier is None
            share = used + unit.param_bytes <= room * SMALL_UNITS_SHARE
            if small and share and largest + used + unit.param_bytes <= room:
                homes[unit.index] = Tier.DEVICE
                used += unit.param_bytes
        away = sum(unit.param_bytes for unit in request.units if unit.index not in homes)
        self._working_bytes = min(room - used, away) // PAGE_BYTES * PAGE_BYTES
        return room - used - self._working_bytes

    def _together(self, room: int, widest: Sequence[Unit]) -> int:
        """Return the bytes of the units that must fit the device together."""
        largest = sum(unit.param_bytes for unit in widest)
        if largest > room:
            what = "largest units" if len(widest) <= WORKING_UNITS else "units that are in use at once"
            names = ", ".join(f"{unit.name} {format_bytes(unit.param_bytes)}" for unit in widest)
            text = f"the {len(widest)} {what} ({names}) and {format_bytes(self._activation_bytes)} of activations"
            raise _TooSmall(
                Tier.DEVICE, text, "a large nn.Linear can be tiled: offload.ops.tile_(model, larger_than=...)"
            )
        return largest

    def _slice_device(self, room: int, widest: Sequence[Unit]) -> int:
        """Divide the device between whole units and slices of all, if these fit; return the bytes that neither takes.

        Whole units get what is of use and no more: ranks with other budgets than each other then keep the same ones.
        """
        request, slices = self._request, self._params
        stay = request.param_tier is Tier.DEVICE
        largest = self._together(room, widest)
        if stay and largest + slices.total_bytes > room:
            raise _TooSmall(Tier.DEVICE, 'the largest units and slices of parameters (offload_param="none")')
        ahead = LOOK_AHEAD * max(unit.param_bytes for unit in request.units)
        wanted = min(largest + ahead, sum(unit.param_bytes for unit in request.units))
        self._working_bytes = min(wanted, room - (slices.total_bytes if stay else 0)) // PAGE_BYTES * PAGE_BYTES
        room -= self._working_bytes
        may_stay = request.param_tier is None and request.device_is_host  # else they are sent from host memory
        if stay or (may_stay and slices.total_bytes <= room):
            slices.put_all(Tier.DEVICE)
            room -= slices.total_bytes
        return room

    # --- host memory ---

    def _fill_host(self) -> _Buffers:
        """Give host memory away, with NVMe only where it is asked for or needed; return the buffers."""
        request = self._request
        if Tier.NVME not in (request.param_tier, request.optimizer_tier):
            try:
                return self._share_host(nvme=False)
            except _TooSmall:
                if request.budgets[Tier.NVME] <= 0:
                    raise
                for shards in (self._params, self._grads, self._states):
                    shards.leave(Tier.HOST)
        return self._share_host(nvme=True)

    def _share_host(self, *, nvme: bool) -> _Buffers:
        """Give host memory away in order of worth."""
        request = self._request
        also = f" and {request.own}" if request.own else ""
        buffers = self._buffers(nvme=nvme)
        left = request.budgets[Tier.HOST] - buffers.total_bytes - request.own_bytes
        for shards in (self._params, self._states):  # what has no choice comes first
            if shards.forced is Tier.HOST:
                left -= sum(shards.homeless().values())
                shards.put_all(Tier.HOST)
                if left < 0:
                    raise _TooSmall(Tier.HOST, f'{shards.kind} (forced to "cpu") and buffers{also}')
        waiting = list(self._grads.homeless().values())
        if nvme and waiting and sum(waiting) > left:  # gradients pass through the slots, too
            left += buffers.total_bytes
            buffers.pool_bytes = GRAD_POOL_BUFFERS * max(waiting)
            buffers.slot_bytes = max(buffers.slot_bytes, self._slot_bytes(buffers.chunk_numel))
            left -= buffers.total_bytes
        if left < 0:
            pipeline = "the buffers of the NVMe pipeline" if buffers.slot_bytes else "buffers"
            raise _TooSmall(Tier.HOST, f"{pipeline}{also}")
        for shards in (self._grads, self._params, self._states):
            for index, size in shards.homeless().items():
                if shards.forced is not Tier.NVME and size <= left:
                    shards.homes[index] = Tier.HOST
                    left -= size
                elif nvme:
                    shards.homes[index] = Tier.NVME
                else:
                    raise _TooSmall(Tier.HOST, f"{shards.kind} without an NVMe tier{also}")
        if buffers.grad_bytes:
            more = min(left // buffers.grad_bytes, MOST_GRADS_IN_FLIGHT - 1) * buffers.grad_bytes
            buffers.grad_bytes += more
            left -= more
        if nvme and buffers.slots:
            worth = int(self._trainable_numel() * MOST_STAGING_SHARE) // buffers.slot_bytes
            more = min(left // buffers.slot_bytes, min(worth, MOST_STAGING_SLOTS) - STAGING_SLOTS)
            buffers.slots += max(more, 0)
        return buffers

    def _buffers(self, *, nvme: bool) -> _Buffers:
        """Return the smallest buffers; no gradient passes through these."""
        request, params = self._request, self._params.sizes
        buffers = _Buffers(
            self._chunk_numel(),
            exchange_bytes=request.exchange_bytes + request.landing_bytes + request.passing_bytes,
            activation_bytes=request.host_activation_bytes,
        )
        if nvme or not request.device_is_host:  # parameters of a GPU pass through staging, too
            may_stay = request.updates_on_device and request.optimizer_tier in (None, Tier.DEVICE)
            buffers.slot_bytes = self._slot_bytes(buffers.chunk_numel, gradients=may_stay, wide=may_stay)
            buffers.slots = STAGING_SLOTS if buffers.slot_bytes else 0
        if nvme and not request.device_is_host and not request.slices_parameters:
            buffers.fetch_bytes = 2 * max(params.values())
        if not request.device_is_host:
            homeless = self._grads.homeless()
            leaving = (whole_pages(unit.param_bytes) for unit in request.units if unit.index in homeless)
            buffers.grad_bytes = max(leaving, default=0)
        return buffers

    def _chunk_numel(self) -> int:
        """Return elements per optimizer chunk: a multiple of the smallest, bounded by memory and the largest unit."""
        request = self._request
        if request.chunk_numel is not None:
            return round_up(request.chunk_numel, MIN_CHUNK_NUMEL)
        smallest = STAGING_SLOTS * max(self._slot_bytes(MIN_CHUNK_NUMEL), 1)
        largest = max((unit.numel for unit in request.units), default=0)
        frozen = sum(request.owned_numel(unit, Role.PARAM) for unit in request.units if not unit.trainable)
        worth = int(self._trainable_numel() * STAGING_SHARE + frozen * FROZEN_STAGING_SHARE) // smallest
        return max(min(worth, min(MAX_CHUNK_NUMEL, largest) // MIN_CHUNK_NUMEL), 1) * MIN_CHUNK_NUMEL

    def _slot_bytes(self, chunk_numel: int, *, gradients: bool = True, wide: bool = False) -> int:
        """Return bytes of one staging slot: a chunk in every role that may have to pass through it.

        With `wide`, gradients may have become fp32.
        """
        request = self._request
        roles = (Role.PARAM, Role.GRAD, *STATE_ROLES) if gradients else (Role.PARAM, *STATE_ROLES)
        longest = [(unit, unit.chunk_limit(chunk_numel)) for unit in request.units]
        accumulate = wide or request.accumulate
        sizes = (
            sum(role_bytes(unit, role, numel, accumulate=accumulate, states=request.states) for role in roles)
            for unit, numel in longest
        )
        return whole_pages(max(sizes, default=0))

    def _trainable_numel(self) -> int:
        request = self._request
        return sum(request.owned_numel(unit, Role.GRAD) for unit in request.units if unit.trainable)

    # --- sums ---

    def _bytes_at(self, tier: Tier) -> int:
        return sum(shards.bytes_at(tier) for shards in (self._params, self._grads, self._states))

    def _nvme_bytes(self, homes: Sequence[Homes], buffers: _Buffers, beside_bytes: int) -> int:
        """Return the bytes that the swap files need, `beside_bytes` of them for older versions."""
        request, total = self._request, beside_bytes + self._request.nvme_activation_bytes
        for unit, home in zip(request.units, homes, strict=True):
            for tier, roles in ((home.param, (Role.PARAM,)), (home.grad, (Role.GRAD,)), (home.states, STATE_ROLES)):
                if tier is Tier.NVME:
                    total += request.record_bytes(unit, roles, buffers.chunk_numel)
        if total:
            total += NVME_SLACK_CHUNKS * (buffers.slot_bytes + PAGE_BYTES)
        if total > request.budgets[Tier.NVME]:
            twice = ", twice those of parameters and states (run_dir: the last commit and what follows it)"
            again = ", once more those of parameters and states (background_checkpoints)" if request.holds else ""
            also = " and activations" if request.nvme_activation_bytes else ""
            kinds = f"parameters, gradients and states that do not fit above{also}"
            what = f"{kinds}{twice if request.commit else ''}{again}"
            raise _TooSmall(Tier.NVME, what)
        return total

    def _beside(
        self, homes: Sequence[Homes], chunk_numel: int, left: int, left_on_drive: int
    ) -> tuple[dict[int, int], int]:
        """Return what updates beside the old content take: of host memory by unit, and in the swap files together.

        Where host memory has no room for all of them, those that have it are spread over the model: so have those that
        are left to the next forward, which comes to them one by one. The one whose gradient comes last is the last to
        have it: nothing is left that its update could go beside. Units that need none of it share what there is in the
        swap files.
        """
        request, found, early = self._request, dict[int, int](), 0
        sizes = {unit.index: request.spare_bytes(unit, homes[unit.index]) for unit in request.units}
        units = [unit for unit in reversed(request.units) if sizes[unit.index]]  # gradients come in this order
        last = units.pop() if units else None
        total, room, passed = sum(sizes[unit.index] for unit in units), left, 0
        due = []
        for unit in units:
            passed += sizes[unit.index]
            if passed * room >= total * (room - left + sizes[unit.index]) and sizes[unit.index] <= left:
                due.append(unit)
                left -= sizes[unit.index]
        left = room
        for unit in sorted(request.units, key=lambda unit: (unit is last, unit not in due, -unit.index)):
            size = sizes[unit.index]
            aside = request.aside_bytes(unit, homes[unit.index], chunk_numel)
            if 0 < size <= left and early + aside <= left_on_drive:
                found[unit.index] = size
                left -= size
            elif size:
                continue
            early += aside
        return found, min(early, left_on_drive // PAGE_BYTES * PAGE_BYTES)

    def _add_slots(self, buffers: _Buffers, left: int, early: int) -> int:
        """Add slots, as the swap files have room for what leaves them; returns their bytes.

        Beside an accelerator they keep the drive busy. If steps clip, they have states that backward has read.
        """
        request, worth = self._request, 0
        if early and not request.device_is_host:
            worth = int(self._trainable_numel() * APART_STAGING_SHARE)
        if early and request.clips:
            worth = max(worth, int(self._states.bytes_at(Tier.NVME) * CLIPPED_STAGING_SHARE))
        size = buffers.slot_bytes
        if not worth or not size:
            return 0
        worth //= size
        more = max(min(worth, most_in_flight(size, early)) - buffers.slots, 0)
        more = max(min(more, left // size), 0)
        buffers.slots += more
        return more * size

    def _widening(self, homes: Sequence[Homes], arenas: Mapping[Tier, int]) -> dict[Tier, int]:
        """Return per tier what gradients of 16 bits take more once they are fp32; nothing if there is no room."""
        request = self._request
        more: dict[Tier, int] = {}
        for unit, home in zip(request.units, homes, strict=True):
            size = request.wide_bytes(unit) - request.role_bytes(unit, Role.GRAD)
            if size and home.grad is not None:
                more[home.grad] = more.get(home.grad, 0) + size
        spare = {
            Tier.DEVICE: request.budgets[Tier.DEVICE] - self._activation_bytes - arenas[Tier.DEVICE],
            Tier.HOST: request.budgets[Tier.HOST] - request.own_bytes - arenas[Tier.HOST],
        }
        return more if all(size <= spare.get(tier, 0) for tier, size in more.items()) else {}


def _refusal(request: Request, short: _TooSmall) -> BudgetError:
    """Word a refusal, with the smallest budgets that would do."""
    budgets = dict(request.budgets)
    raised: list[Tier] = []
    failing: Tier | None = short.tier
    while failing is not None:  # raise one budget after another until there is a plan...
        assert failing not in raised, f"{failing} is too small at any size"
        raised.append(failing)
        budgets[failing] = _ENOUGH_BYTES
        failing = _failing_tier(request, budgets)
    for tier in raised:  # ...then lower each again; more memory never makes a plan impossible, so bisection is exact
        low, high = request.budgets[tier] // PAGE_BYTES, _ENOUGH_BYTES // PAGE_BYTES
        while high - low > 1:
            middle = (low + high) // 2
            budgets[tier] = middle * PAGE_BYTES
            if _failing_tier(request, budgets) is None:
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
    text += f"; {short.remedy}" if short.remedy else ""
    return BudgetError(f"{short.tier.value} budget: {text}")


def _failing_tier(request: Request, budgets: Mapping[Tier, int]) -> Tier | None:
    try:
        Planner(dataclasses.replace(request, budgets=budgets)).plan()
    except _TooSmall as short:
        return short.tier
    return None
