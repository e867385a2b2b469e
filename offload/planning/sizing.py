"""What follows from homes: buffers, room for new versions, what is left, and so the plan.

Owns the sizes of everything in which nothing lives. Decides on no home. Pure Python over plain values.

Next: :mod:`offload.planning.planner` chooses homes and asks for the plan.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Collection, Mapping, Sequence

from offload.memory.budget import Tier
from offload.planning import versions
from offload.planning.asked import LOOK_AHEAD, WORKING_UNITS, Homes, Request
from offload.planning.plan import NVME_SLACK_CHUNKS, STAGING_SLOTS, Plan, most_in_flight
from offload.planning.roles import STATE_ROLES, Role, role_bytes
from offload.planning.traffic import step_bytes
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
LARGER_CHUNKS_SHARE = 0.5  # of host memory that is left, where nothing is on NVMe
ACTIVATION_SHARE = 0.5
ENOUGH_BYTES = 1 << 60


class TooSmall(Exception):
    """A budget is too small for `what`."""

    def __init__(self, tier: Tier, what: str) -> None:
        super().__init__(what)
        self.tier = tier
        self.what = what


@dataclasses.dataclass(slots=True)
class Buffers:
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
        """Bytes of all of them."""
        passing = self.pool_bytes + self.fetch_bytes + self.grad_bytes + self.exchange_bytes + self.activation_bytes
        return self.slots * self.slot_bytes + passing


@dataclasses.dataclass(frozen=True, slots=True)
class OnDevice:
    """How the device budget is divided beside what is at home there.

    Attributes:
        activation_bytes: for activations, at least.
        working_bytes: for working copies of parameters.
        totals_bytes: for what is measured of gradients that wait there.
    """

    activation_bytes: int
    working_bytes: int
    totals_bytes: int


def bytes_at(request: Request, homes: Sequence[Homes], tier: Tier) -> int:
    """Return the bytes of shards whose home is `tier`, without the padding of records."""
    total = 0
    for unit, home in zip(request.units, homes, strict=True):
        for where, roles in ((home.param, (Role.PARAM,)), (home.grad, (Role.GRAD,)), (home.states, STATE_ROLES)):
            if where is tier:
                total += request.shard_bytes(unit, roles)
    return total


def totals_bytes(request: Request, homes: Sequence[Homes]) -> int:
    """Return the device memory for what is measured of gradients that wait there."""
    there = [unit for unit, home in zip(request.units, homes, strict=True) if request.on_device(home)]
    return request.total_bytes(there) if there else 0


def activation_bytes(request: Request, needed_bytes: int) -> int:
    """Return the bytes for activations: what is asked for, else a share that leaves what is needed."""
    if request.activation_bytes is not None:
        return request.activation_bytes
    budget = request.budgets[Tier.DEVICE]
    return max(min(int(budget * ACTIVATION_SHARE), budget - needed_bytes), 0)


def together(request: Request, room: int, widest: Sequence[Unit], activations: int) -> int:
    """Return the bytes of the units that must fit the device together.

    Raises:
        TooSmall: `room` is less.
    """
    largest = sum(unit.param_bytes for unit in widest)
    if largest > room:
        what = "largest units" if len(widest) <= WORKING_UNITS else "units that are in use at once"
        names = ", ".join(f"{unit.name} {format_bytes(unit.param_bytes)}" for unit in widest)
        raise TooSmall(
            Tier.DEVICE, f"the {len(widest)} {what} ({names}) and {format_bytes(activations)} of activations"
        )
    return largest


def region_of_slices(request: Request, room: int, widest: Sequence[Unit]) -> int:
    """Return the bytes in which units are whole, of which ranks have slices: what is of use and no more.

    Ranks with other budgets than each other then keep the same ones.
    """
    ahead = LOOK_AHEAD * max(unit.param_bytes for unit in request.units)
    wanted = min(sum(unit.param_bytes for unit in widest) + ahead, sum(unit.param_bytes for unit in request.units))
    return min(wanted, room) // PAGE_BYTES * PAGE_BYTES


def least_buffers(request: Request, leaving: Collection[int], *, nvme: bool, spilled: int = 0) -> Buffers:
    """Return the smallest buffers in host memory.

    Args:
        request: what is asked.
        leaving: units whose gradients leave the device.
        nvme: something is at home on NVMe.
        spilled: bytes of the largest gradient that is; gradients pass through the slots, too.
    """
    buffers = Buffers(
        chunk_numel_of(request),
        exchange_bytes=request.exchange_bytes + request.landing_bytes + request.passing_bytes,
        activation_bytes=request.host_activation_bytes,
    )
    if nvme or not request.device_is_host:  # parameters of a GPU pass through staging, too
        buffers.slot_bytes = _least_slot_bytes(request, buffers.chunk_numel)
        buffers.slots = STAGING_SLOTS if buffers.slot_bytes else 0
    if nvme and not request.device_is_host and not request.slices_parameters:
        buffers.fetch_bytes = 2 * max(request.role_bytes(unit, Role.PARAM) for unit in request.units)
    if not request.device_is_host:
        sizes = (whole_pages(unit.param_bytes) for unit in request.units if unit.index in leaving)
        buffers.grad_bytes = max(sizes, default=0)
    if spilled:
        buffers.pool_bytes = GRAD_POOL_BUFFERS * spilled
        buffers.slot_bytes = max(buffers.slot_bytes, slot_bytes(request, buffers.chunk_numel))
    return buffers


def _least_slot_bytes(request: Request, chunk_numel: int) -> int:
    """Return bytes of one staging slot where no gradient is on NVMe; those of units that a GPU updates may pass."""
    there = request.updates_on_device and request.states_may_stay
    may_stay = there and request.optimizer_tier in (None, Tier.DEVICE)
    return slot_bytes(request, chunk_numel, gradients=may_stay, wide=may_stay)


def worthy_slots(request: Request, buffers: Buffers) -> int:
    """Return how many slots more are worth their room where something is on NVMe."""
    worth = int(_trainable_numel(request) * MOST_STAGING_SHARE) // buffers.slot_bytes if buffers.slots else 0
    return max(min(worth, MOST_STAGING_SLOTS) - STAGING_SLOTS, 0)


def chunk_numel_of(request: Request) -> int:
    """Return elements per optimizer chunk: a multiple of the smallest, bounded by memory and the largest unit."""
    if request.chunk_numel is not None:
        return round_up(request.chunk_numel, MIN_CHUNK_NUMEL)
    smallest = STAGING_SLOTS * max(slot_bytes(request, MIN_CHUNK_NUMEL), 1)
    largest = max((unit.numel for unit in request.units), default=0)
    frozen = sum(request.owned_numel(unit, Role.PARAM) for unit in request.units if not unit.trainable)
    worth = int(_trainable_numel(request) * STAGING_SHARE + frozen * FROZEN_STAGING_SHARE) // smallest
    return max(min(worth, min(MAX_CHUNK_NUMEL, largest) // MIN_CHUNK_NUMEL), 1) * MIN_CHUNK_NUMEL


def slot_bytes(request: Request, chunk_numel: int, *, gradients: bool = True, wide: bool = False) -> int:
    """Return bytes of one staging slot: a chunk in every role that may have to pass through it.

    With `wide`, gradients may have become fp32.
    """
    roles = (Role.PARAM, Role.GRAD, *STATE_ROLES) if gradients else (Role.PARAM, *STATE_ROLES)
    alike = {(unit.dtype, unit.trainable, unit.chunk_limit(chunk_numel)): unit for unit in request.units}
    accumulate = wide or request.accumulate
    sizes = (
        sum(role_bytes(unit, role, numel, accumulate=accumulate, states=request.states) for role in roles)
        for (_, _, numel), unit in alike.items()
    )
    return whole_pages(max(sizes, default=0))


def plan_of(request: Request, homes: Sequence[Homes]) -> Plan:
    """Return the plan that has these homes.

    Raises:
        TooSmall: a budget is too small for them.
    """
    return _Sizes(request, tuple(homes)).plan()


class _Sizes:
    """Sizes around the homes of one plan."""

    def __init__(self, request: Request, homes: tuple[Homes, ...]) -> None:
        self._request = request
        self._homes = homes

    def plan(self) -> Plan:
        """Return the plan; raises :class:`TooSmall`."""
        request, homes = self._request, self._homes
        device = self._divide_device()
        buffers = self._buffers()
        committed = versions.committed_bytes(request, buffers.chunk_numel)
        held = versions.held_bytes(request, homes, buffers.chunk_numel)
        nvme = self._nvme_bytes(buffers, committed + held)
        arenas = {
            Tier.DEVICE: bytes_at(request, homes, Tier.DEVICE) + device.working_bytes + device.totals_bytes,
            Tier.HOST: bytes_at(request, homes, Tier.HOST) + buffers.total_bytes,
            Tier.NVME: nvme,
        }
        wide = self._widening(arenas, device.activation_bytes)
        left = request.budgets[Tier.HOST] - request.own_bytes - arenas[Tier.HOST] - wide.get(Tier.HOST, 0)
        # What a durable run writes early is what the step writes: the last commit keeps the versions before.
        left_on_drive = ENOUGH_BYTES if request.commit else request.budgets[Tier.NVME] - nvme
        larger = self._make_chunks_larger(buffers, left)
        spare, early = self._beside(buffers.chunk_numel, left - larger, left_on_drive)
        left -= larger + sum(spare.values())
        arenas[Tier.HOST] += larger + sum(spare.values()) + self._add_slots(buffers, left, early)
        arenas[Tier.NVME] += 0 if request.commit else early
        return Plan(
            request=request,
            homes=homes,
            working_bytes=device.working_bytes,
            activation_bytes=request.budgets[Tier.DEVICE] - arenas[Tier.DEVICE] - wide.get(Tier.DEVICE, 0),
            grad_pool_bytes=buffers.pool_bytes,
            fetch_staging_bytes=buffers.fetch_bytes,
            grad_staging_bytes=buffers.grad_bytes,
            chunk_numel=buffers.chunk_numel,
            staging_slots=buffers.slots,
            staging_slot_bytes=buffers.slot_bytes,
            arena_bytes=arenas,
            step_bytes=step_bytes(request, homes, buffers.chunk_numel, device.working_bytes),
            totals_bytes=device.totals_bytes,
            committed_bytes=committed,
            held_bytes=held,
            early_bytes=early,
            spare_units=frozenset(spare),
            wide_bytes=wide,
        )

    def _divide_device(self) -> OnDevice:
        """Divide what is not at home on the device between activations and working copies, which take what is left."""
        request = self._request
        passing = request.passing(self._homes)
        widest = request.widest(passing)
        totals = totals_bytes(request, self._homes)
        at_home = bytes_at(request, self._homes, Tier.DEVICE) + totals
        activations = activation_bytes(request, at_home + sum(unit.param_bytes for unit in widest))
        room = request.budgets[Tier.DEVICE] - activations - at_home
        together(request, room, widest, activations)
        if request.slices_parameters:
            working = region_of_slices(request, room, widest)
        else:
            working = min(room, sum(unit.param_bytes for unit in passing)) // PAGE_BYTES * PAGE_BYTES
        return OnDevice(activations, working, totals)

    @property
    def _uses_drive(self) -> bool:
        return any(Tier.NVME in (home.param, home.grad, home.states) for home in self._homes)

    def _buffers(self) -> Buffers:
        """Return the buffers, with more of those that are worth it if host memory is left; raises `TooSmall`."""
        request, units = self._request, self._request.units
        leaving = [u.index for u in units if u.trainable and self._homes[u.index].grad is not Tier.DEVICE]
        spilled = [request.role_bytes(u, Role.GRAD) for u in units if self._homes[u.index].grad is Tier.NVME]
        nvme = self._uses_drive
        buffers = least_buffers(request, leaving, nvme=nvme, spilled=max(spilled, default=0))
        left = request.budgets[Tier.HOST] - request.own_bytes - buffers.total_bytes
        left -= bytes_at(request, self._homes, Tier.HOST)
        if left < 0:
            raise TooSmall(Tier.HOST, "what is at home in host memory, and buffers")
        if buffers.grad_bytes:
            more = min(left // buffers.grad_bytes, MOST_GRADS_IN_FLIGHT - 1) * buffers.grad_bytes
            buffers.grad_bytes += more
            left -= more
        if nvme and buffers.slots:
            buffers.slots += max(min(left // buffers.slot_bytes, worthy_slots(request, buffers)), 0)
        return buffers

    def _nvme_bytes(self, buffers: Buffers, beside_bytes: int) -> int:
        """Return the bytes that the swap files need, `beside_bytes` of them for older versions."""
        request, total = self._request, beside_bytes + self._request.nvme_activation_bytes
        for unit, home in zip(request.units, self._homes, strict=True):
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
            raise TooSmall(Tier.NVME, what)
        return total

    def _beside(self, chunk_numel: int, left: int, left_on_drive: int) -> tuple[dict[int, int], int]:
        """Return what updates beside the old content take: of host memory by unit, and in the swap files together.

        Units whose update uses the drive come first: it has little else to do in backward. Where host memory has no
        room for all of a kind, those that have it are spread over the model: so have those that are left to the next
        forward, which comes to them one by one. The one whose gradient comes last is the last to have it: nothing is
        left that its update could go beside. Units that need none of it share what there is in the swap files.
        """
        request, homes, found, early = self._request, self._homes, dict[int, int](), 0
        sizes = {unit.index: request.spare_bytes(unit, homes[unit.index]) for unit in request.units}
        aside = {unit.index: request.aside_bytes(unit, homes[unit.index], chunk_numel) for unit in request.units}
        units = [unit for unit in reversed(request.units) if sizes[unit.index]]  # gradients come in this order
        last = units.pop() if units else None
        due: list[Unit] = []
        for drives in (True, False):
            kind = [unit for unit in units if (aside[unit.index] > 0) is drives]
            due += _spread(kind, sizes, left - sum(sizes[unit.index] for unit in due))
        for unit in sorted(request.units, key=lambda unit: (unit is last, unit not in due, -unit.index)):
            size = sizes[unit.index]
            if 0 < size <= left and early + aside[unit.index] <= left_on_drive:
                found[unit.index] = size
                left -= size
            elif size:
                continue
            early += aside[unit.index]
        return found, min(early, left_on_drive // PAGE_BYTES * PAGE_BYTES)

    def _make_chunks_larger(self, buffers: Buffers, left: int) -> int:
        """Let the CPU update larger chunks; returns the bytes of staging that these take more.

        It begins each chunk with as many calls, and its threads share one. On a drive they lie in chunks of a size
        that no budget changes: it may be that of another machine.
        """
        request, slots, before = self._request, buffers.slots, buffers.slots * buffers.slot_bytes
        if request.chunk_numel is not None or self._uses_drive or request.commit is not None:
            return 0
        updated = (
            unit.numel
            for unit, home in zip(request.units, self._homes, strict=True)
            if unit.trainable and (request.device_is_host or home.states is not Tier.DEVICE)
        )
        most = round_up(min(MAX_CHUNK_NUMEL, max(updated, default=0)), MIN_CHUNK_NUMEL)
        numels = range(buffers.chunk_numel, most + 1, MIN_CHUNK_NUMEL)
        room = before + int(left * LARGER_CHUNKS_SHARE)
        fitting = bisect.bisect_right(numels, room, key=lambda numel: slots * _least_slot_bytes(request, numel))
        if fitting:
            buffers.chunk_numel = numels[fitting - 1]
            buffers.slot_bytes = _least_slot_bytes(request, buffers.chunk_numel) if slots else 0
        return slots * buffers.slot_bytes - before

    def _add_slots(self, buffers: Buffers, left: int, early: int) -> int:
        """Add slots, as the swap files have room for what leaves them; returns their bytes.

        Beside an accelerator they keep the drive busy. If steps clip, they have states that backward has read.
        """
        request, worth = self._request, 0
        if early and not request.device_is_host:
            worth = int(_trainable_numel(request) * APART_STAGING_SHARE)
        if early and request.clips:
            on_drive = (u for u in request.units if self._homes[u.index].states is Tier.NVME)
            states = sum(request.shard_bytes(unit, STATE_ROLES) for unit in on_drive)
            worth = max(worth, int(states * CLIPPED_STAGING_SHARE))
        size = buffers.slot_bytes
        if not worth or not size:
            return 0
        worth //= size
        more = max(min(worth, most_in_flight(size, early)) - buffers.slots, 0)
        more = max(min(more, left // size), 0)
        buffers.slots += more
        return more * size

    def _widening(self, arenas: Mapping[Tier, int], activations: int) -> dict[Tier, int]:
        """Return per tier what gradients of 16 bits take more once they are fp32; nothing if there is no room."""
        request = self._request
        more: dict[Tier, int] = {}
        for unit, home in zip(request.units, self._homes, strict=True):
            size = request.wide_bytes(unit) - request.role_bytes(unit, Role.GRAD)
            if size and home.grad is not None:
                more[home.grad] = more.get(home.grad, 0) + size
        spare = {
            Tier.DEVICE: request.budgets[Tier.DEVICE] - activations - arenas[Tier.DEVICE],
            Tier.HOST: request.budgets[Tier.HOST] - request.own_bytes - arenas[Tier.HOST],
        }
        return more if all(size <= spare.get(tier, 0) for tier, size in more.items()) else {}


def _trainable_numel(request: Request) -> int:
    return sum(request.owned_numel(unit, Role.GRAD) for unit in request.units if unit.trainable)


def _spread(units: Sequence[Unit], sizes: Mapping[int, int], room: int) -> list[Unit]:
    """Return those of `units` that have a part of `room`, spread over all of them."""
    total, left, passed = sum(sizes[unit.index] for unit in units), room, 0
    found = []
    for unit in units:
        size = sizes[unit.index]
        passed += size
        if passed * room >= total * (room - left + size) and size <= left:
            found.append(unit)
            left -= size
    return found
