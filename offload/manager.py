"""The memory manager: the only writer of shard state.

Owns every shard of an engine, the arenas they live in, and the transfers under way. It answers three questions: give me
this unit's parameters on the device (:meth:`Manager.acquire`), take this gradient (:meth:`Manager.add_gradient`), and
let me run over these shards chunk by chunk (:meth:`Manager.open`, used by :mod:`offload.stream`). It knows neither
modules nor hyper-parameters, and rebinds no parameter itself: that is the :class:`Binder`'s work (``hooks.py``).

Called from one thread at a time: the one that computes, or the one that runs the optimizer step while the former waits.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import logging
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from offload import cpu_adam
from offload.config import format_bytes
from offload.errors import BudgetError, InternalError, StateError
from offload.placement import STATE_ROLES, Plan, role_itemsize
from offload.schedule import NEVER, Schedule
from offload.shard import (
    HAS_WORKING_COPY,
    IN_FLIGHT,
    Event,
    Role,
    Shard,
    State,
    Unit,
    advance,
    check,
)
from offload.stats import Counters
from offload.tiers import Arena, Budget, Buffer, Region, Tier, storage_use_count
from offload.transfer import CpuMover, CudaMover, Mover, Ticket, TicketGroup, Transfer
from swap import SwapStore

logger = logging.getLogger(__name__)

PREFETCH_WINDOW = 64  # uses of the schedule that are looked at
KERNEL_DTYPE = {
    "float32": cpu_adam.Dtype.FLOAT32,
    "bfloat16": cpu_adam.Dtype.BFLOAT16,
    "float16": cpu_adam.Dtype.FLOAT16,
}


class Binder(Protocol):
    """Makes parameters see their bytes."""

    def bind(self, unit: Unit, storage: torch.UntypedStorage) -> None:
        """Let the unit's parameters view `storage`."""

    def unbind(self, unit: Unit) -> None:
        """Let the unit's parameters be stand-ins without memory."""

    def changed(self, unit: Unit) -> str | None:
        """Return the name of a bound parameter that somebody else has changed."""


@dataclasses.dataclass(slots=True)
class Residency:
    """A unit's parameters on the device: their storage, and how many references are the binding's own."""

    storage: torch.UntypedStorage
    own_references: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stray:
    """A buffer whose shard has left it while something still uses it: a late transfer, or a tensor of the user.

    Attributes:
        owner: its name in `region`, a negative number.
        region: where it goes when it is free; None where it is a home and stays the shard's.
        busy: tells whether it is still in use.
    """

    owner: int
    region: Region | None
    busy: Callable[[], bool]


@dataclasses.dataclass(slots=True)
class Gradient:
    """What is known of a unit's gradient in the current step.

    Attributes:
        arrived: per slot, whether a gradient has come since the last step.
        missing: slots whose gradient has not come in the current backward.
        sums: per slot, the sum of squares and number of non-finite elements of the final gradient, None until known.
    """

    arrived: list[bool]
    missing: set[int]
    sums: list[tuple[float, int] | None]


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Addresses of one unit's shards while they are open, by role; absent where the bytes come through staging.

    Attributes:
        addresses: start of each directly addressable shard.
        fresh_states: the states have no content yet: they count as zero moments and a master equal to the parameter.
        write_through: a working copy that must be copied to this host address after it was changed, or 0.
    """

    addresses: dict[Role, int]
    fresh_states: bool
    write_through: int = 0


class Manager:
    """Memory of one engine. See the module's text."""

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        budgets: dict[Tier, Budget],
        store: SwapStore | None,
        binder: Binder,
        counters: Counters,
        *,
        deadline_s: float,
        prefetch: bool = True,
    ) -> None:
        self.plan = plan
        self.units = plan.request.units
        self.device = device
        self.budgets = budgets
        self.store = store
        self.counters = counters
        self.deadline_s = deadline_s
        order = [unit.index for unit in self.units]
        self._schedules = {True: Schedule(order + order[::-1]), False: Schedule(order)}
        self.schedule = self._schedules[True]
        self._binder = binder
        self._prefetch_enabled = prefetch
        self._shards: dict[tuple[int, Role], Shard] = {}
        self._params: list[Shard] = []
        self._residency: dict[int, Residency] = {}
        self.resets = 0  # times that all leases were dropped
        self.versions = [0] * len(self.units)  # of the parameters' content: raised whenever they are written
        self._fetches: dict[int, Transfer] = {}
        self._flushes: dict[int, Transfer] = {}
        self._gradients: dict[int, Gradient] = {}
        self._opened: list[Shard] = []
        self._unread: set[int] = set()  # units whose PARAM failed by a read: their homes are as they were
        self._strays: list[Stray] = []
        self._last_stray = 0

        for tier in Tier:
            budgets[tier].reserve("arena", plan.arena_bytes[tier])
        host_device = device.type == "cpu"
        self._device_arena = Arena(Tier.DEVICE, plan.arena_bytes[Tier.DEVICE], device)
        self._host_arena = Arena(
            Tier.HOST, plan.arena_bytes[Tier.HOST], torch.device("cpu"), page_locked=not host_device
        )
        self._arenas = {Tier.DEVICE: self._device_arena, Tier.HOST: self._host_arena}
        self._lay_out()
        self._working = Region(self._device_arena.take(plan.working_bytes)) if plan.working_bytes else None
        self._pool = Region(self._host_arena.take(plan.grad_pool_bytes)) if plan.grad_pool_bytes else None
        slot_bytes = plan.chunk_numel * plan.staging_numel_bytes
        self.staging = [self._host_arena.take(slot_bytes) for _ in range(plan.staging_slots)]
        if host_device:
            self._mover: Mover = CpuMover(counters)
        else:
            half = plan.fetch_staging_bytes // 2
            largest = max((u.param_bytes for u in self.units if u.trainable), default=1)
            fetch = [self._host_arena.take(half) for _ in range(2)] if half else []
            self._mover = CudaMover(counters, device, fetch, largest)
        for buffer in self.staging:
            self._touch(buffer)
        if store is not None:
            for arena in self._arenas.values():
                if arena.size_bytes and arena.device.type == "cpu":
                    store.register_buffer(arena.base_address, arena.size_bytes)

    # --- parameters -------------------------------------------------------------------------------------------------

    def acquire(self, index: int) -> None:
        """Take a READ lease on unit `index`'s parameters on the device, fetching them if need be."""
        self._make_resident(index)
        shard = self._params[index]
        shard.readers += 1  # prefetching must not evict what was asked for
        try:
            self.prefetch()
        except OSError as error:  # whoever needs what could not be fetched meets the error again
            logger.warning("prefetch: %s", error)
        except BaseException:
            shard.readers -= 1
            raise

    def release(self, index: int) -> None:
        """Return a lease."""
        shard = self._params[index]
        assert shard.readers > 0, shard.describe()
        shard.readers -= 1

    def discard_working_copy(self, index: int) -> None:
        """Drop what was changed in a working copy: the home holds the content."""
        shard = self._params[index]
        if shard.state is State.RESIDENT and not shard.readers and not self._borrowed(index):
            self._evict(shard)

    def note_use(self, index: int) -> None:
        """Tell the schedule of a use that will come without a lease, if the unit is here for it."""
        if index in self._residency:
            self.schedule.use(index)

    def resident_storage(self, index: int) -> torch.UntypedStorage:
        """Return the device storage of a unit for a tensor that keeps it there as long as the tensor lives."""
        self.schedule = self._schedules[True]  # only backward asks for it
        self.acquire(index)
        self._params[index].readers -= 1
        return self._residency[index].storage

    @property
    def streams_parameters(self) -> bool:
        """Tell whether any unit's parameters come and go."""
        return self._working is not None

    def is_resident(self, index: int) -> bool:
        """Tell whether the unit's parameters are on the device and bound."""
        return index in self._residency

    def begin_pass(self, *, training: bool) -> None:
        """Note that a forward begins: evaluation has its own schedule, each pass a cycle of it."""
        self.schedule = self._schedules[training]
        if not training:
            self.schedule.restart()

    def prefetch(self) -> None:
        """Start fetching the units used next, as far as units used later give way."""
        if self._working is None or not self._prefetch_enabled:
            return
        for index in self.schedule.upcoming(PREFETCH_WINDOW):
            shard = self._params[index]
            if shard.state is State.STORED and shard.home is not Tier.DEVICE and not shard.writing:
                if not self._start_fetch(shard, required=False):
                    return

    def _make_resident(self, index: int) -> None:
        shard = self._params[index]
        self.schedule.use(index)
        if index in self._residency:
            self.counters.hits += 1
            return
        begin = time.perf_counter()
        self._forgive(shard)
        if shard.state is State.FETCHING:
            self.counters.stalls += 1
            self._finish_prefetch(shard)
        if shard.state is not State.RESIDENT:
            if shard.state is not State.STORED:
                raise StateError(
                    f"parameters of {shard.unit.name}: expected content but got state {shard.state.value}; "
                    "load them again with engine.load_state_dict"
                )
            self.counters.misses += 1
            self._start_fetch(shard, required=True)
            self._finish_fetch(shard)
        self.counters.stall_seconds += time.perf_counter() - begin

    def _start_fetch(self, shard: Shard, *, required: bool) -> bool:
        index = shard.unit.index
        buffer = self._room_for(shard, required=required)
        if buffer is None:
            return False
        shard.state = advance(shard, Event.FETCH)
        shard.work_buffer = buffer
        try:
            if shard.home_buffer is not None:
                self._fetches[index] = self._mover.fetch_host(shard.home_buffer.address, buffer, shard.size_bytes)
            else:
                self._fetches[index] = self._mover.fetch_nvme(
                    lambda address: self._start_reads(shard, address, urgent=required), buffer, shard.size_bytes
                )
        except BaseException:
            self._fetch_failed(shard)
            raise
        return True

    def _finish_prefetch(self, shard: Shard) -> None:
        """Wait for a fetch that nobody has asked for: if it failed, the shard is as it was before, and may be read."""
        try:
            self._finish_fetch(shard)
        except TimeoutError:
            raise
        except OSError as error:
            logger.warning("prefetch: %s", error)
            self._forgive(shard)

    def _finish_fetch(self, shard: Shard) -> None:
        index = shard.unit.index
        try:
            self._fetches[index].wait(self.deadline_s)
        except Exception as error:
            self._explain(error)
            self._fetch_failed(shard)
            raise
        del self._fetches[index]
        shard.state = advance(shard, Event.FETCHED)
        assert shard.work_buffer is not None
        self._bind(shard, shard.work_buffer)

    def _fetch_failed(self, shard: Shard) -> None:
        index = shard.unit.index
        transfer = self._fetches.pop(index, None)
        shard.state = advance(shard, Event.FETCH_FAILED)
        shard.work_buffer = None
        self._unread.add(index)
        assert self._working is not None
        self._give_up(self._working, index, transfer)

    def _forgive(self, shard: Shard) -> None:
        """Let PARAM whose fetch failed count as stored again: whoever reads it meets the error again, or not."""
        if shard.unit.index in self._unread:
            self._unread.discard(shard.unit.index)
            shard.state = advance(shard, Event.RESTORE)
            shard.state = advance(shard, Event.OVERWRITE_HOME)

    def _give_up(self, region: Region, index: int, transfer: Transfer | None) -> None:
        """Free the buffer of a transfer that failed, as soon as the transfer is over (it may only have been late)."""
        if transfer is None or transfer.done():
            region.free(index)
        else:
            self._stray(region, index, lambda: not transfer.done())

    def _stray(self, region: Region | None, index: int, busy: Callable[[], bool]) -> None:
        self._last_stray -= 1
        if region is not None:
            region.hand_over(index, self._last_stray)
        self._strays.append(Stray(self._last_stray, region, busy))

    def _sweep(self) -> None:
        """Free the strays that nothing uses any more."""
        for stray in [stray for stray in self._strays if not stray.busy()]:
            self._strays.remove(stray)
            if stray.region is not None:
                stray.region.free(stray.owner)

    def _bind(self, shard: Shard, buffer: Buffer) -> None:
        storage = self._arenas[Tier.DEVICE].storage(buffer)
        self._binder.bind(shard.unit, storage)
        self._residency[shard.unit.index] = Residency(storage, storage_use_count(storage))

    def _borrowed(self, index: int) -> bool:
        """Tell whether a tensor other than the parameters still views the unit's bytes."""
        return self._in_use(self._residency[index])

    @staticmethod
    def _in_use(residency: Residency) -> bool:
        return storage_use_count(residency.storage) > residency.own_references

    def refuse_changes(self) -> None:
        """Check that nobody else has written to parameters on the device.

        Raises:
            StateError: somebody has, outside ``engine.gather(modify=True)``; names the parameter.
        """
        for index in self._residency:
            self._refuse_change(self.units[index])

    def _refuse_change(self, unit: Unit) -> None:
        name = self._binder.changed(unit)
        if name is not None:
            raise StateError(
                f"parameter {name}: was changed in place or rebound outside the engine, and would be lost; change it "
                "inside engine.gather(parameter, modify=True)"
            )

    def _evict(self, shard: Shard) -> None:
        index = shard.unit.index
        self._refuse_change(shard.unit)
        shard.state = advance(shard, Event.EVICT)
        self._binder.unbind(shard.unit)
        del self._residency[index]
        assert shard.work_buffer is not None and self._working is not None
        self._mover.release(shard.work_buffer)
        shard.work_buffer = None
        self._working.free(index)

    def _room_for(self, shard: Shard, *, required: bool) -> Buffer | None:
        """Find a working buffer, evicting what is needed later; None where that is not possible and not `required`."""
        region = self._working
        assert region is not None, shard.describe()
        index = shard.unit.index
        self._sweep()
        buffer = region.allocate(shard.size_bytes, index)
        if buffer is not None:
            return buffer
        mine = self.schedule.distance(index)

        def cost(owner: int) -> float | None:
            if owner < 0:
                return None
            other = self._params[owner]
            if other.state is not State.RESIDENT or other.readers or self._borrowed(owner):
                return None
            distance = self.schedule.distance(owner)
            if not required and distance <= mine:
                return None
            return -distance if distance != NEVER else float("-inf")

        window = region.cheapest_window(shard.size_bytes, cost)
        if window is None and required:
            for arriving in list(self._fetches):  # prefetched copies that are still arriving can go once they are here
                self._finish_fetch(self._params[arriving])
            window = region.cheapest_window(shard.size_bytes, cost)
            if window is None:
                gc.collect()  # tensors in reference cycles, for instance of a caught exception, hold buffers
                window = region.cheapest_window(shard.size_bytes, cost)
        if window is None:
            if not required:
                return None
            buffer = self._compact(region, cost, shard)
            if buffer is not None:
                return buffer
            raise BudgetError(
                f"device budget: unit {shard.unit.name} needs {format_bytes(shard.size_bytes)} in one piece but the "
                f"{format_bytes(region.size_bytes)} for working copies are in use at once; raise "
                f'max_memory["device"], lower activation_memory, or set a smaller unit_bytes\n{self.dump()}'
            )
        for owner in window:
            self._evict(self._params[owner])
        buffer = region.allocate(shard.size_bytes, index)
        assert buffer is not None
        return buffer

    def _compact(self, region: Region, cost: Callable[[int], float | None], shard: Shard) -> Buffer | None:
        """Make one gap of all: evict what may go, and move leased copies together (where memory is the CPU's)."""
        for owner in region.owners():
            if cost(owner) is not None:
                self._evict(self._params[owner])
        if self.device.type == "cpu":

            def movable(owner: int) -> bool:
                return owner in self._residency and not self._borrowed(owner)

            for owner, source, target in region.pack(movable):
                moved = self._params[owner]
                self._refuse_change(moved.unit)
                self._binder.unbind(moved.unit)
                del self._residency[owner]
                ctypes.memmove(target.address, source.address, moved.size_bytes)
                moved.work_buffer = target
                self._bind(moved, target)
        return region.allocate(shard.size_bytes, shard.unit.index)

    # --- gradients --------------------------------------------------------------------------------------------------

    def add_gradient(self, index: int, slot: int, gradient: torch.Tensor, *, final: bool) -> None:
        """Add one parameter's gradient to what has arrived since the last step.

        Args:
            index: unit.
            slot: position of the parameter in the unit.
            gradient: (slot shape) in the unit's dtype, on the device.
            final: no further micro-batch follows before the step, so the sum of squares is taken now.
        """
        gradient = gradient.contiguous()
        self._mover.read_tensor(gradient, lambda address: self._add(index, slot, address, final=final))

    def _add(self, index: int, slot: int, source: int, *, final: bool) -> None:
        shard, gradient = self._shards[index, Role.GRAD], self._gradients[index]
        where = shard.unit.slots[slot]
        stored, dtype = self._gradient_dtype(shard.unit), KERNEL_DTYPE[shard.unit.dtype]
        target = self._gradient_address(shard)
        target += where.offset_numel * stored.itemsize
        total = cpu_adam.take_gradient(
            src=source,
            src_dtype=dtype,
            dst=target,
            dst_dtype=stored,
            numel=where.numel,
            add=gradient.arrived[slot],
            measure=final,
        )
        gradient.arrived[slot] = True
        gradient.sums[slot] = total if final else None
        gradient.missing.discard(slot)
        if not gradient.missing:
            gradient.missing = set(range(len(shard.unit.slots)))
            if shard.home is Tier.NVME:
                self._start_flush(shard)

    def gradient_sums(self, index: int) -> list[tuple[float, int] | None]:
        """Return per slot (sum of squares, non-finite elements) of the step's gradient; None where none has arrived.

        Sums that were not taken at arrival (the last micro-batch did not reach the parameter) are taken now.
        """
        gradient, shard = self._gradients[index], self._shards[index, Role.GRAD]
        late = [s for s, arrived in enumerate(gradient.arrived) if arrived and gradient.sums[s] is None]
        if late:
            stored, base = self._gradient_dtype(shard.unit), self._gradient_address(shard)
            for slot in late:
                where = shard.unit.slots[slot]
                address = base + where.offset_numel * stored.itemsize
                gradient.sums[slot] = cpu_adam.sum_of_squares(address, stored, where.numel)
        return [total if gradient.arrived[s] else None for s, total in enumerate(gradient.sums)]

    def arrived(self, index: int) -> list[bool]:
        """Return per slot whether a gradient has arrived since the last step."""
        return self._gradients[index].arrived

    def has_lost_content(self) -> bool:
        """Tell whether parameters or states were lost by a failure while they were written."""
        return any(
            shard.state is State.FAILED and role is not Role.GRAD and not (role is Role.PARAM and index in self._unread)
            for (index, role), shard in self._shards.items()
        )

    def settle_gradients(self) -> None:
        """Wait until every gradient is in host memory (they may still be on their way to NVMe)."""
        self._mover.settle(self.deadline_s)

    def drop_gradients(self) -> None:
        """Forget all gradients that have arrived since the last step."""
        self._mover.settle(self.deadline_s)
        for index, gradient in self._gradients.items():
            shard = self._shards[index, Role.GRAD]
            if shard.state is State.FLUSHING:
                with contextlib.suppress(Exception):  # a write of what nobody needs any more
                    self._finish_flush(shard)
            if shard.work_buffer is not None:
                shard.work_buffer = None
                assert self._pool is not None
                self._pool.free(index)
            if shard.state is State.FAILED:
                shard.state = advance(shard, Event.RESTORE)
            elif shard.state is not State.EMPTY:
                shard.state = advance(shard, Event.DISCARD)
            if shard.home is Tier.NVME:
                self._delete(shard)
            slots = len(shard.unit.slots)
            gradient.arrived = [False] * slots
            gradient.missing = set(range(slots))
            gradient.sums = [None] * slots

    def _gradient_dtype(self, unit: Unit) -> cpu_adam.Dtype:
        if self.plan.request.accumulate:
            return cpu_adam.Dtype.FLOAT32
        return KERNEL_DTYPE[unit.dtype]

    def _gradient_address(self, shard: Shard) -> int:
        """Return where the unit's gradient may be written now, in host memory."""
        if shard.home_buffer is not None:
            if shard.state is State.EMPTY:
                shard.state = advance(shard, Event.OVERWRITE_HOME)
            return shard.home_buffer.address
        if shard.state is State.FLUSHING:
            self._finish_flush(shard)
        if shard.state is State.RESIDENT:
            shard.state = advance(shard, Event.MODIFY)
        elif shard.state is State.EMPTY:
            buffer = self._pool_room(shard)
            shard.state = advance(shard, Event.OVERWRITE_WORK)
            shard.work_buffer = buffer
        elif shard.state is State.STORED:
            buffer = self._pool_room(shard)
            shard.state = advance(shard, Event.FETCH)
            shard.work_buffer = buffer
            reading: TicketGroup | None = None
            try:
                reading = TicketGroup(self._start_reads(shard, buffer.address, urgent=True))
                reading.wait(self.deadline_s)
            except BaseException:
                shard.state = advance(shard, Event.FETCH_FAILED)
                shard.work_buffer = None
                assert self._pool is not None
                self._give_up(self._pool, shard.unit.index, reading)
                raise
            shard.state = advance(shard, Event.FETCHED)
            shard.state = advance(shard, Event.MODIFY)
        elif shard.state is State.FAILED:
            raise StateError(
                f"gradient of {shard.unit.name}: part of it was lost by a failed transfer; drop the gradients with "
                "engine.zero_grad() and run the micro-batches again"
            )
        assert shard.work_buffer is not None, shard.describe()
        return shard.work_buffer.address

    def _pool_room(self, shard: Shard) -> Buffer:
        """Find room for a gradient that waits for NVMe: the oldest one leaves first."""
        assert self._pool is not None, shard.describe()
        while True:
            self._sweep()
            buffer = self._pool.allocate(shard.size_bytes, shard.unit.index)
            if buffer is not None:
                return buffer
            owners: list[int] = [o for o in self._shards_in_pool() if o != shard.unit.index]
            if not owners:
                raise InternalError(f"{shard.describe()}: does not fit the gradient pool\n{self.dump()}")
            oldest = self._shards[owners[0], Role.GRAD]
            if oldest.state is State.DIRTY:
                self._start_flush(oldest)
            if oldest.state is State.FLUSHING:
                self._finish_flush(oldest)
            oldest.state = advance(oldest, Event.EVICT)
            oldest.work_buffer = None
            self._pool.free(oldest.unit.index)

    def _shards_in_pool(self) -> list[int]:
        """Return the owners of pool buffers, first filled first: in backward, units come in reverse model order."""
        assert self._pool is not None
        return sorted((owner for owner in self._pool.owners() if owner >= 0), reverse=True)

    def _start_flush(self, shard: Shard) -> None:
        shard.state = advance(shard, Event.FLUSH)
        assert shard.work_buffer is not None
        tickets: list[Ticket] = []
        try:
            for number, (begin, end) in enumerate(shard.unit.chunks(self.plan.chunk_numel)):
                itemsize = shard.size_bytes // shard.unit.numel
                address = shard.work_buffer.address + begin * itemsize
                tickets.append(self.write_chunk(shard.unit, shard.role, number, address, (end - begin) * itemsize))
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is on its way up
                TicketGroup(tickets).wait(self.deadline_s)
            shard.state = advance(shard, Event.FLUSH_FAILED)
            raise
        self._flushes[shard.unit.index] = TicketGroup(tickets)

    def _finish_flush(self, shard: Shard) -> None:
        try:
            self._flushes[shard.unit.index].wait(self.deadline_s)
        except Exception as error:
            self._explain(error)
            del self._flushes[shard.unit.index]
            shard.state = advance(shard, Event.FLUSH_FAILED)
            raise
        del self._flushes[shard.unit.index]
        shard.state = advance(shard, Event.FLUSHED)

    # --- chunks: what the optimizer and checkpoints stream over ------------------------------------------------------

    def open(self, unit: Unit, *, reads: frozenset[Role], writes: frozenset[Role]) -> Access:
        """Lease the shards of `unit` for streaming; :meth:`close_all` or :meth:`abandon_all` returns the leases.

        PARAM, GRAD and the state roles may be asked for; state roles go together.

        Raises:
            StateError: content that is to be read was lost, or has never been there.
        """
        addresses: dict[Role, int] = {}
        write_through = 0
        fresh = False
        for role in reads | writes:
            shard = self._shards.get((unit.index, role))
            if shard is None:
                continue
            if role is Role.PARAM:
                self._forgive(shard)
            if shard.state is State.FAILED:
                if role in reads:
                    raise StateError(
                        f"{role.value} of {unit.name}: expected content but it was lost by a failed step or transfer; "
                        "load it again"
                    )
                shard.state = advance(shard, Event.RESTORE)
            if role is Role.PARAM:
                write_through = self._open_param(shard, role in writes, addresses)
                continue
            if role is Role.GRAD and shard.home_buffer is None:
                if shard.state is State.FLUSHING:
                    self._finish_flush(shard)
                if shard.work_buffer is not None:
                    addresses[role] = shard.work_buffer.address
            elif shard.home_buffer is not None:
                addresses[role] = shard.home_buffer.address
            if role in STATE_ROLES:
                fresh = shard.state is State.EMPTY
            if role in writes:
                shard.state = advance(shard, Event.OVERWRITE_HOME)
                shard.writing = True
                self._opened.append(shard)
            elif shard.state is not State.EMPTY:
                shard.readers += 1
                self._opened.append(shard)
        return Access(addresses, fresh, write_through)

    def _open_param(self, shard: Shard, write: bool, addresses: dict[Role, int]) -> int:
        """Lease PARAM; returns the home address to write a changed working copy through to."""
        index = shard.unit.index
        host_device = self.device.type == "cpu"
        if write:
            self.versions[index] += 1
        if shard.state is State.FETCHING:
            self._finish_prefetch(shard)
        if shard.state is State.RESIDENT and not host_device and write:
            if self._borrowed(index):
                raise StateError(
                    f"parameters of {shard.unit.name}: a tensor outside the model still views their device memory, so "
                    "they cannot be replaced; drop it before the step"
                )
            self._evict(shard)
        if shard.state is State.RESIDENT and host_device:
            assert shard.work_buffer is not None
            addresses[Role.PARAM] = shard.work_buffer.address
            if not write:
                shard.readers += 1
                self._opened.append(shard)
                return 0
            shard.state = advance(shard, Event.MODIFY)
            shard.writing = True
            self._opened.append(shard)
            return shard.home_buffer.address if shard.home_buffer is not None else 0
        if shard.home_buffer is not None and (host_device or shard.home is Tier.HOST):
            addresses[Role.PARAM] = shard.home_buffer.address
        if write:
            shard.state = advance(shard, Event.OVERWRITE_HOME)
            shard.writing = True
        elif shard.state is State.EMPTY:
            raise StateError(f"parameters of {shard.unit.name}: expected content but nothing was loaded yet")
        else:
            shard.readers += 1
        self._opened.append(shard)
        return 0

    def close_all(self) -> None:
        """Return the leases of all opened units: what was written is now their content."""
        for shard in self._opened:
            if not shard.writing:
                shard.readers -= 1
            shard.writing = False
            if shard.state is State.DIRTY and shard.role is Role.PARAM:
                shard.state = advance(shard, Event.FLUSH)
                shard.state = advance(shard, Event.FLUSHED)
            if shard.role is Role.PARAM and shard.home is Tier.DEVICE and shard.unit.index not in self._residency:
                assert shard.home_buffer is not None
                self._bind(shard, shard.home_buffer)
        self._opened.clear()

    def abandon_all(self) -> None:
        """Mark everything that was open for writing as lost: an exception came in between."""
        for shard in self._opened:
            if not shard.writing:
                shard.readers -= 1
                continue
            shard.writing = False
            shard.state = advance(shard, Event.ABANDON)
            if shard.role is Role.PARAM and shard.unit.index in self._residency:
                self._unbind_lost(shard)
        self._opened.clear()

    def _unbind_lost(self, shard: Shard) -> None:
        """Take the parameters off content that is neither old nor new; tensors of the user keep their memory."""
        index = shard.unit.index
        self._binder.unbind(shard.unit)
        residency = self._residency.pop(index)
        region = self._working if shard.work_buffer is not None else None
        shard.work_buffer = None
        if self._in_use(residency):
            self._stray(region, index, lambda: self._in_use(residency))
        elif region is not None:
            region.free(index)

    def chunk_bytes(self, unit: Unit, role: Role, begin: int, end: int) -> int:
        """Return the bytes of elements [begin, end) in `role`."""
        return (end - begin) * role_itemsize(unit, role, accumulate=self.plan.request.accumulate)

    def read_chunk(self, unit: Unit, role: Role, number: int, address: int, size_bytes: int) -> Ticket | None:
        """Start bringing chunk `number` to host `address`; None where it has never been written.

        The state roles are one record per chunk, named by :attr:`Role.MASTER`.
        """
        shard = self._shards[unit.index, role if role is not Role.MASTER else Role.EXP_AVG]
        if shard.home is Tier.DEVICE:
            assert isinstance(self._mover, CudaMover) and shard.home_buffer is not None
            offset = self.chunk_bytes(unit, role, 0, self.plan.chunk_numel) * number
            return self._mover.download(shard.home_buffer.address + offset, address, size_bytes)
        store = self._require_store()
        key = (unit.index, role.value, number)
        return store.get(key, address, size_bytes) if key in store else None

    def write_chunk(self, unit: Unit, role: Role, number: int, address: int, size_bytes: int) -> Ticket:
        """Start writing chunk `number` from host `address` to its home."""
        shard = self._shards[unit.index, role if role is not Role.MASTER else Role.EXP_AVG]
        if shard.home is Tier.DEVICE:
            assert isinstance(self._mover, CudaMover) and shard.home_buffer is not None
            offset = self.chunk_bytes(unit, role, 0, self.plan.chunk_numel) * number
            return self._mover.upload(address, shard.home_buffer.address + offset, size_bytes)
        return self._require_store().put((unit.index, role.value, number), address, size_bytes)

    # --- life and death ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return to a settled state after an exception in forward or backward.

        Leases are dropped, transfers awaited, working copies and gradients discarded. Parameters and optimizer states
        are untouched: they are only ever written inside a step.
        """
        self.resets += 1
        for shard in self._params:
            shard.readers = 0
            if shard.state is State.FETCHING:
                with contextlib.suppress(Exception):  # the reader of the parameter will meet the error again
                    self._finish_fetch(shard)
            self._forgive(shard)
        for index in list(self._flushes):
            with contextlib.suppress(Exception):  # the gradient is discarded below
                self._finish_flush(self._shards[index, Role.GRAD])
        with contextlib.suppress(Exception):
            self._mover.settle(self.deadline_s)
        self.drop_gradients()
        self.restart_schedule()

    def restart_schedule(self) -> None:
        """Note that a training step has ended: what was used in it predicts the next one."""
        self.schedule = self._schedules[True]
        self.schedule.restart()

    def close(self) -> None:
        """Drop everything and return the memory. Idempotent."""
        for transfer in [*self._fetches.values(), *self._flushes.values()]:
            with contextlib.suppress(Exception):  # closing: nobody needs the bytes any more
                transfer.wait(self.deadline_s)
        self._fetches.clear()
        self._flushes.clear()
        self._mover.close()
        leak = any(self._borrowed(index) for index in self._residency) or any(stray.busy() for stray in self._strays)
        for index in list(self._residency):
            self._binder.unbind(self.units[index])
        self._residency.clear()
        if self.store is not None:
            self.store.close()
        for arena in self._arenas.values():
            arena.close(leak=leak)
        for tier in Tier:
            held = self.budgets[tier].reservations().get("arena", 0)
            self.budgets[tier].release("arena", held)

    def check(self) -> None:
        """Check the invariants of every shard and of the ledgers; used by tests and after resets.

        Raises:
            InternalError: one does not hold.
        """
        for shard in self._shards.values():
            check(shard)
            flying = self._fetches if shard.role is Role.PARAM else self._flushes
            if (shard.state in IN_FLIGHT) != (shard.unit.index in flying and shard.role in (Role.PARAM, Role.GRAD)):
                raise InternalError(f"{shard.describe()}: in flight and transfers disagree")
            bound = shard.unit.index in self._residency
            if shard.role is Role.PARAM and shard.home is not Tier.DEVICE:
                if bound != (shard.state in HAS_WORKING_COPY):
                    raise InternalError(f"{shard.describe()}: binding and state disagree")

    def shard(self, index: int, role: Role) -> Shard | None:
        """Return a shard for inspection."""
        return self._shards.get((index, role))

    def used_bytes(self) -> dict[str, int]:
        """Return bytes in use per tier: device arena and activations, host arena, occupied swap space."""
        used = {tier.value: self.budgets[tier].used_bytes for tier in Tier}
        used[Tier.NVME.value] = self.store.used_bytes if self.store is not None else 0
        return used

    def dump(self) -> str:
        """Return the state of every shard that is not simply at home, for error messages."""
        lines = [f"step position {len(self.schedule.trace)} uses; tiers: {self.used_bytes()}"]
        for shard in self._shards.values():
            if shard.state not in (State.EMPTY, State.STORED) or shard.readers or shard.writing:
                borrowed = (
                    ", borrowed"
                    if shard.role is Role.PARAM
                    and shard.unit.index in self._residency
                    and self._borrowed(shard.unit.index)
                    else ""
                )
                lines.append("  " + shard.describe() + borrowed)
        return "\n".join(lines)

    def _explain(self, error: Exception) -> None:
        """Add the state of the shards to a transfer's error (where Python can: from 3.11 on)."""
        if hasattr(error, "add_note"):
            error.add_note(self.dump())

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _lay_out(self) -> None:
        for unit in self.units:
            for role in (Role.PARAM, Role.GRAD, *STATE_ROLES):
                size = self.plan.role_bytes(unit, role)
                home = self.plan.home(unit, role)
                if size == 0 or home is None:
                    continue
                shard = Shard(unit, role, home, size)
                if home is not Tier.NVME:
                    shard.home_buffer = self._arenas[home].take(size)
                    if role is not Role.PARAM:
                        self._touch(shard.home_buffer)
                self._shards[unit.index, role] = shard
            self._params.append(self._shards[unit.index, Role.PARAM])
            if unit.trainable:
                slots = len(unit.slots)
                self._gradients[unit.index] = Gradient([False] * slots, set(range(slots)), [None] * slots)

    @staticmethod
    def _touch(buffer: Buffer) -> None:
        """Bring the pages in now: the first step must not pay for page faults."""
        ctypes.memset(buffer.address, 0, buffer.size_bytes)

    def _start_reads(self, shard: Shard, address: int, *, urgent: bool) -> list[Ticket]:
        store = self._require_store()
        itemsize = shard.size_bytes // shard.unit.numel
        tickets: list[Ticket] = []
        try:
            for number, (begin, end) in enumerate(shard.unit.chunks(self.plan.chunk_numel)):
                key = (shard.unit.index, shard.role.value, number)
                at = address + begin * itemsize
                tickets.append(store.get(key, at, (end - begin) * itemsize, urgent=urgent))
        except BaseException:
            with contextlib.suppress(Exception):  # the first error is on its way up
                TicketGroup(tickets).wait(self.deadline_s)
            raise
        return tickets

    def _delete(self, shard: Shard) -> None:
        store = self._require_store()
        for number in range(len(shard.unit.chunks(self.plan.chunk_numel))):
            key = (shard.unit.index, shard.role.value, number)
            if key in store:
                store.delete(key)

    def _require_store(self) -> SwapStore:
        assert self.store is not None, "a shard has its home on NVMe but there is no store"
        return self.store


def trainable_units(units: Sequence[Unit]) -> list[Unit]:
    """Return the units that the optimizer updates, in update order."""
    return [unit for unit in units if unit.trainable]
