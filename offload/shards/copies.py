"""The copies of every shard: the states that tell which are valid, and the transfers between them.

Owns the table of shards, the regions that their working copies live in, and what is in flight. It is the only writer of
a shard's state: whoever has something happen to a shard calls :meth:`Copies.change`, or one of the steps that come in
pairs - a fetch, a flush - and are the same for every role. It decides nothing: :mod:`offload.shards.working_set`
chooses which parameters come and go, :mod:`offload.shards.gradients` which gradients, :mod:`offload.shards.leases` what
is streamed over.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import itertools
from collections.abc import Callable, Collection, Container, Iterator, Mapping, Sequence

from offload.errors import InternalError
from offload.labels import labelled
from offload.memory.arena import Arena, Buffer
from offload.memory.budget import Tier
from offload.memory.region import Region
from offload.memory.transfer import Ticket, TicketGroup, Transfer, wait_out
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.shards.shard import IN_FLIGHT, Event, Shard, State, advance, check
from offload.sizes import whole_pages
from swap import SwapCorruptError, SwapStore


@dataclasses.dataclass(frozen=True, slots=True)
class Stray:
    """A buffer whose shard has left it while something still uses it: a late transfer, or a tensor of the user.

    Attributes:
        owner: its name in `region`, a negative number.
        region: where it goes when it is free; None where it is a home and stays the shard's.
        buffer: in the region, if there is one.
        busy: tells whether it is still in use.
    """

    owner: int
    region: Region | None
    buffer: Buffer | None
    busy: Callable[[], bool]


class Lease:
    """The right to read a shard, on whichever copy."""

    __slots__ = ("_drops", "_shard")

    def __init__(self, shard: Shard) -> None:
        shard.readers += 1
        self._shard: Shard | None = shard
        self._drops = shard.drops

    def close(self) -> None:
        """Return the lease. Idempotent; nothing happens where an error has dropped all leases of the shard."""
        shard, self._shard = self._shard, None
        if shard is not None and shard.drops == self._drops:
            assert shard.readers > 0, shard.describe()
            shard.readers -= 1


class WriteLease:
    """The right to write a shard, alone.

    Attributes:
        shard: which.
        before: its state before.
    """

    __slots__ = ("before", "shard")

    def __init__(self, shard: Shard, before: State) -> None:
        shard.writing = True
        self.shard = shard
        self.before = before

    def close(self) -> None:
        """Return the lease."""
        self.shard.writing = False


class Copies:
    """Shards, states and transfers of one engine. See the module's text.

    Attributes:
        params: the shards of parameters, per unit.
        regions: where working copies live: of PARAM on the device, of GRAD in host memory. A role without is absent.
        dump: describes everything, for error messages.
    """

    def __init__(
        self,
        plan: Plan,
        arenas: Mapping[Tier, Arena],
        store: SwapStore | None,
        *,
        deadline_s: float,
        release: Callable[[Buffer], None],
        dump: Callable[[], str],
    ) -> None:
        self.plan = plan
        self.dump = dump
        self._release = release  # is told of each buffer that becomes free
        self._store = store
        self._deadline_s = deadline_s
        self._table: dict[tuple[int, Role], Shard] = {}
        self._transfers: dict[Shard, Transfer] = {}
        self._unread: set[Shard] = set()  # failed by a read: their homes are as they were
        self._late: list[Ticket] = []  # of no shard: see wait_out
        self._known_parts: dict[Shard, list[tuple[int, int, int]]] = {}
        self._strays: list[Stray] = []
        self._stray_names = itertools.count(-2, -1)  # -1 has the hash of -2: layouts would be alike
        for unit in plan.request.units:
            for role in (Role.PARAM, Role.GRAD, *STATE_ROLES):
                size = plan.role_bytes(unit, role)
                home = plan.home(unit, role)
                if size == 0 or home is None:
                    continue
                shard = self._table[unit.index, role] = Shard(unit, role, home, size)
                in_torch = role is Role.GRAD and plan.on_device(unit)  # whose memory has it
                if home is not Tier.NVME and not in_torch:
                    shard.home_buffer = arenas[home].take(plan.room_bytes(unit, role))
                if unit.index in plan.spare_units and role is not Role.GRAD and home is not Tier.NVME:
                    shard.spare_buffer = arenas[Tier.HOST].take(size)
        self.touch_empty(arenas)
        self.params = [self._table[unit.index, Role.PARAM] for unit in plan.request.units]
        rooms = ((Role.PARAM, Tier.DEVICE, plan.working_bytes), (Role.GRAD, Tier.HOST, plan.grad_pool_bytes))
        self.regions = {role: Region(arenas[tier].take(size)) for role, tier, size in rooms if size}

    # --- shards and states ------------------------------------------------------------------------------------------

    def __iter__(self) -> Iterator[Shard]:
        """Iterate over all shards, unit by unit."""
        return iter(self._table.values())

    def get(self, index: int, role: Role) -> Shard | None:
        """Return a shard, None where the unit has none in this role."""
        return self._table.get((index, role))

    def of(self, index: int, role: Role) -> Shard:
        """Return a shard that exists."""
        return self._table[index, role]

    def change(self, shard: Shard, *events: Event) -> None:
        """Let `events` happen to a shard, one after the other.

        Raises:
            InternalError: one has no meaning in the state, or would break a lease.
        """
        for event in events:
            shard.state = advance(shard, event)

    def forgive(self, shard: Shard) -> None:
        """Let a shard whose fetch failed count as stored again: whoever reads it meets the error again, or not."""
        if shard in self._unread:
            self._unread.discard(shard)
            self.change(shard, Event.RESTORE, Event.OVERWRITE_HOME)

    def is_lost(self, shard: Shard) -> bool:
        """Tell whether the content is gone, at home too."""
        return shard.state is State.FAILED and shard not in self._unread

    def discard(self, shard: Shard) -> None:
        """Forget a shard's content, wherever it is."""
        with contextlib.suppress(Exception):  # a transfer of what nobody needs any more
            self.wait(shard)
        if shard.work_buffer is not None:
            self.leave(shard)
        if shard.state is State.FAILED:
            self._unread.discard(shard)
            self.change(shard, Event.RESTORE)
        elif shard.state is not State.EMPTY:
            self.change(shard, Event.DISCARD)
        if shard.home is Tier.NVME:
            self._delete_chunks(shard, aside=False)

    def take_aside(self, shards: Sequence[Shard]) -> None:
        """Let what was written aside be the content of `shards`, which are at home in host memory or on NVMe.

        The old content is deleted, or will be overwritten by the next one.
        """
        for shard in shards:  # the states have one record: all names first
            self.change(shard, Event.OVERWRITE_HOME)
        self._delete_records(shards, aside=False)
        for shard in shards:
            if shard.home is Tier.NVME:
                shard.side = not shard.side
            else:
                assert shard.home is Tier.HOST and shard.spare_buffer is not None, shard.describe()
                shard.home_buffer, shard.spare_buffer = shard.spare_buffer, shard.home_buffer

    def drop_aside(self, shards: Sequence[Shard]) -> None:
        """Delete what was written aside."""
        self._delete_records(shards, aside=True)

    def _delete_records(self, shards: Sequence[Shard], *, aside: bool) -> None:
        """Delete what the store has of a unit's `shards`, whose states have one record together."""
        named = {chunk_key(shard, 0): shard for shard in shards if shard.home is Tier.NVME}
        for shard in named.values():
            self._delete_chunks(shard, aside=aside)

    def _delete_chunks(self, shard: Shard, *, aside: bool) -> None:
        store = self.require_store()
        for number in range(len(shard.unit.chunks(self.plan.chunk_numel))):
            with contextlib.suppress(KeyError):  # a put that has failed is forgotten, too
                store.delete(chunk_key(shard, number, aside=aside))

    # --- what an earlier process has left ---------------------------------------------------------------------------

    def sides(self) -> list[int]:
        """Return the units whose content has the second of its names in the store."""
        return [shard.unit.index for shard in self if shard.role is Role.PARAM and shard.side]

    def find_stored(self, index: int, *, side: bool) -> None:
        """Let what the store has of a unit be its content: parameters, and states if it had any.

        Args:
            index: unit.
            side: which of its two names the content has.

        Raises:
            swap.SwapCorruptError: the store lacks a part of it, or has another size.
        """
        for roles in ((Role.PARAM,), STATE_ROLES):
            shards = [shard for role in roles if (shard := self.get(index, role)) is not None]
            for shard in shards:
                shard.side = side
            if shards and self._is_stored(shards):
                for shard in shards:
                    self.change(shard, Event.OVERWRITE_HOME)

    def _is_stored(self, record: Sequence[Shard]) -> bool:
        """Tell whether the store has the chunks of shards that are one record; states may not be there yet."""
        store, unit, role = self.require_store(), record[0].unit, record[0].role
        there = right = 0
        chunks = self.plan.chunks(unit, role)
        for number, begin, end in chunks:
            key = chunk_key(record[0], number)
            size = whole_pages(sum(self.plan.chunk_bytes(unit, shard.role, end - begin) for shard in record))
            there += key in store
            right += key in store and store.length_of(key) == size
        if right == len(chunks) or (not there and role is not Role.PARAM):
            return bool(there)
        raise SwapCorruptError(
            f"{unit.name}: expected {len(chunks)} chunks of {role.value} in the swap store but {right} are whole",
            remedy="restore the run directory from a copy, or name an empty one and load a checkpoint",
        )

    def forget_others(self, kept: Container[object]) -> None:
        """Delete what the store has beside the content of all shards and `kept` keys."""
        known = {
            chunk_key(shard, number)
            for shard in self
            if shard.state is State.STORED
            for number in range(len(shard.unit.chunks(self.plan.chunk_numel)))
        }
        store = self.require_store()
        for key in list(store.keys()):
            if key not in known and key not in kept:
                store.delete(key)

    # --- leases -----------------------------------------------------------------------------------------------------

    def lease(self, shard: Shard) -> Lease:
        """Let somebody read a shard."""
        return Lease(shard)

    def drop_leases(self, shard: Shard) -> None:
        """Forget who reads a shard: an exception has torn them away."""
        shard.readers = 0
        shard.drops += 1

    def lease_to_write(self, shard: Shard, event: Event) -> WriteLease:
        """Let somebody write a shard, which `event` opens for it."""
        before = shard.state
        if before is State.FAILED:
            self.change(shard, Event.RESTORE)
        self.change(shard, event)
        return WriteLease(shard, before)

    def renew(self, shard: Shard) -> None:
        """Note that the content is another one."""
        shard.version += 1

    # --- buffers of working copies ----------------------------------------------------------------------------------

    def allocate(self, shard: Shard) -> Buffer | None:
        """Return a buffer for the shard's working copy, or None where nothing large enough is free."""
        self.sweep(shard.role)
        return self.regions[shard.role].allocate(shard.work_bytes, shard.unit.index)

    def sweep(self, role: Role) -> None:
        """Free the buffers of strays that nothing uses any more. A role's region belongs to one thread at a time."""
        if not self._strays:
            return
        region = self.regions[role]
        for stray in [stray for stray in self._strays if stray.region is region and not stray.busy()]:
            self._free(region, stray.owner, stray.buffer)
            self._strays.remove(stray)

    def begin_in(self, shard: Shard, buffer: Buffer) -> None:
        """Let a shard have a working copy in `buffer`, which somebody is about to fill."""
        self.change(shard, Event.OVERWRITE_WORK)
        shard.work_buffer = buffer

    def note_moved(self, shard: Shard, buffer: Buffer) -> None:
        """Note that the bytes of a working copy were moved to `buffer`."""
        shard.work_buffer = buffer

    def leave(self, shard: Shard, busy: Callable[[], bool] = lambda: False) -> None:
        """Take the working copy off its buffer, which is free as soon as it is not `busy`; a home stays the shard's."""
        buffer = shard.work_buffer
        region = self.regions[shard.role] if buffer is not None else None
        if not busy():
            if region is not None:
                self._free(region, shard.unit.index, buffer)
            shard.work_buffer = None
            return
        shard.work_buffer = None
        name = next(self._stray_names)
        if region is not None:
            region.hand_over(shard.unit.index, name)
        self._strays.append(Stray(name, region, buffer, busy))

    def _free(self, region: Region, owner: int, buffer: Buffer | None) -> None:
        """Take a buffer back: what the device has been given to do may still read it, so copies into it must follow."""
        assert buffer is not None
        self._release(buffer)  # may fail: nothing was changed then
        region.free(owner)

    def evict(self, shard: Shard) -> None:
        """Drop a working copy that equals its home."""
        state = advance(shard, Event.EVICT)
        self.leave(shard)
        shard.state = state

    def touch_empty(self, arenas: Mapping[Tier, Arena]) -> None:
        """Bring the pages of homes without content and of spare memory in, as far as they are in `arenas`.

        Those of parameters come with their content, room for fp32 gradients when it is needed.
        """
        for shard in self:
            arena, is_empty = arenas.get(shard.home), shard.state is State.EMPTY and shard.role is not Role.PARAM
            if shard.home_buffer is not None and is_empty and arena is not None and arena.addressable:
                touch(shard.home_buffer, shard.size_bytes)
            if shard.spare_buffer is not None and Tier.HOST in arenas:
                touch(shard.spare_buffer)

    def move_homes(self, tier: Tier, by_bytes: int) -> None:
        """Note that the memory of a tier is elsewhere, and that no working copies are in it."""
        for shard in self:
            if shard.home is tier and shard.home_buffer is not None:
                shard.home_buffer = shard.home_buffer.moved(by_bytes)
        if tier is Tier.DEVICE and Role.PARAM in self.regions:
            self.regions[Role.PARAM].move(by_bytes)

    # --- transfers --------------------------------------------------------------------------------------------------

    @labelled("fetch")
    def start_fetch(self, shard: Shard, buffer: Buffer, start: Callable[[], Transfer]) -> None:
        """Fetch a working copy into `buffer`, which :meth:`allocate` gave, by what `start` starts."""
        self.change(shard, Event.FETCH)
        shard.work_buffer = buffer
        try:
            self._transfers[shard] = start()
        except BaseException:
            self._fetch_failed(shard)
            raise

    @labelled("spill")
    def start_flush(self, shard: Shard) -> None:
        """Write a working copy to its home on NVMe."""
        self.change(shard, Event.FLUSH)
        assert shard.work_buffer is not None
        try:
            tickets = self.require_store().put_many(self._pieces(shard, shard.work_buffer.address))
        except BaseException:
            self.change(shard, Event.FLUSH_FAILED)
            raise
        self._transfers[shard] = TicketGroup(tickets)

    def flushing(self, shard: Shard, tickets: Sequence[Ticket]) -> None:
        """Note that `tickets`, which are under way, write a working copy home."""
        self.change(shard, Event.FLUSH)
        self._transfers[shard] = TicketGroup(tickets)

    def flushed(self, shard: Shard) -> None:
        """Note that all that :meth:`flushing` was told of has been waited for."""
        del self._transfers[shard]
        self.change(shard, Event.FLUSHED)

    def is_late(self, shard: Shard) -> bool:
        """Tell whether :meth:`wait` would have to wait."""
        return shard.state in IN_FLIGHT and not self._transfers[shard].done()

    @labelled("wait")
    def wait(self, shard: Shard) -> None:
        """Wait for the transfer of a shard, if there is one. What interrupts the wait leaves it under way.

        Raises:
            swap.SwapError: an I/O error, or the deadline passed; with the state of all shards as a note.
            OffloadError: a copy did not end in time.
        """
        if shard.state not in IN_FLIGHT:
            return
        fetching = shard.state is State.FETCHING
        try:
            self._transfers[shard].wait(self._deadline_s)
        except Exception as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self.dump())
            if fetching:
                self._fetch_failed(shard)
            else:
                del self._transfers[shard]
                self.change(shard, Event.FLUSH_FAILED)
            raise
        del self._transfers[shard]
        self.change(shard, Event.FETCHED if fetching else Event.FLUSHED)

    def wait_out(self, tickets: Collection[Ticket]) -> None:
        """Wait for what nobody needs, whatever becomes of it; what is late is left to whoever needs its memory.

        As long as it is under way, staging and idle buffers are its own.
        """
        try:
            wait_out(tickets, self._deadline_s)
        finally:
            self._late += [ticket for ticket in tickets if not ticket.done()]

    def is_any_late(self) -> bool:
        """Tell whether some of it is still under way."""
        return not all(ticket.done() for ticket in self._late)

    def await_late(self) -> None:
        """Wait until all of it is over, whatever became of it.

        Raises:
            TimeoutError: the drive hangs, and may still use the memory.
        """
        for ticket in list(self._late):
            try:
                ticket.wait(self._deadline_s)
            except Exception:
                if not ticket.done():
                    raise
            with contextlib.suppress(ValueError):  # another thread has waited, too
                self._late.remove(ticket)

    def in_flight(self, role: Role) -> list[Shard]:
        """Return the shards of a role that have a transfer."""
        return [shard for shard in list(self._transfers) if shard.role is role]

    def start_reads(self, shard: Shard, address: int, *, urgent: bool) -> list[Ticket]:
        """Start to read a shard from NVMe to host `address`, chunk by chunk."""
        return list(self.require_store().get_many(self._pieces(shard, address), urgent=urgent))

    def read_sizes(self, shard: Shard) -> list[int]:
        """Return the bytes of each of :meth:`start_reads`."""
        return [end - begin for _, begin, end in self._parts(shard)]

    def require_store(self) -> SwapStore:
        """Return the swap store."""
        assert self._store is not None, "a shard has its home on NVMe but there is no store"
        return self._store

    # --- life and death ---------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Let everything come to rest."""
        wait_out(self._transfers.values(), self._deadline_s)  # nobody needs the bytes any more
        self._transfers.clear()

    def strays(self) -> list[Callable[[], bool]]:
        """Return what tells of each buffer that its shard has left whether it is still in use."""
        return [stray.busy for stray in self._strays if stray.busy()]

    def check(self) -> None:
        """Check the invariants of every shard.

        Raises:
            InternalError: one does not hold.
        """
        for shard in self:
            check(shard)
            if (shard.state in IN_FLIGHT) != (shard in self._transfers):
                raise InternalError(f"{shard.describe()}: in flight and transfers disagree")

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _fetch_failed(self, shard: Shard) -> None:
        transfer = self._transfers.pop(shard, None)
        self.change(shard, Event.FETCH_FAILED)
        self._unread.add(shard)
        # It may only have been late: then it still writes to the buffer.
        self.leave(shard, lambda: transfer is not None and not transfer.done())

    def _pieces(self, shard: Shard, address: int) -> list[tuple[tuple[int, str, int], int, int]]:
        """Return key, address and bytes of each of a shard's chunks, which is at host `address` as a whole."""
        parts = self._parts(shard)
        return [(chunk_key(shard, number), address + begin, end - begin) for number, begin, end in parts]

    def _parts(self, shard: Shard) -> list[tuple[int, int, int]]:
        """Return the number of each of a shard's chunks, and its bytes from the shard's start."""
        known = self._known_parts.get(shard)
        if known is not None:
            return known
        first, last = self.plan.request.owned(shard.unit, shard.role)
        itemsize = shard.size_bytes // (last - first)
        chunks = self.plan.chunks(shard.unit, shard.role)
        parts = [(number, (begin - first) * itemsize, (end - first) * itemsize) for number, begin, end in chunks]
        self._known_parts[shard] = parts
        return parts


def chunk_key(shard: Shard, number: int, *, aside: bool = False) -> tuple[int, str, int]:
    """Return the name of a shard's chunk in the swap store, or of what is written aside of it.

    The state roles are one record, named by MASTER.
    """
    role = Role.MASTER if shard.role in STATE_ROLES else shard.role
    return shard.unit.index, role.value + "'" * (shard.side is not aside), number


def touch(buffer: Buffer, size_bytes: int | None = None) -> None:
    """Bring the pages in now, all or the first `size_bytes`: the first step must not pay for page faults."""
    ctypes.memset(buffer.address, 0, buffer.size_bytes if size_bytes is None else size_bytes)
