"""Which units' parameters are on the device: fetched into the working region, bound, and evicted from it.

Owns the choice of who leaves for whom. What is bound, and whether somebody else still looks at a unit's bytes, is known
by :mod:`offload.shards.bound`. Leases and prefetching are the business of :mod:`offload.shards.manager`, which is next.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Collection, Container, Iterable, Sequence
from enum import Enum
from typing import NamedTuple

from offload.errors import BudgetError, InternalError, StateError
from offload.memory.arena import Arena, Buffer
from offload.memory.budget import Claim
from offload.memory.region import Region
from offload.memory.transfer import LeftToWhoNeedsIt, Mover, Transfer
from offload.planning.asked import Request
from offload.planning.eviction import who_gives_way, who_leaves, who_may_leave
from offload.planning.roles import Role
from offload.planning.schedule import Schedule
from offload.planning.units import Unit
from offload.shards.bound import BoundUnits, Residency
from offload.shards.conductor import Conductor
from offload.shards.copies import Copies, touch
from offload.shards.shard import HAS_WORKING_COPY, Shard, State
from offload.sizes import HUGE_PAGE_BYTES, PAGE_BYTES, format_bytes, round_up, whole_pages

_FILLED = (State.DIRTY, State.FLUSHING)  # what cannot leave before it is home


class Came(Enum):
    """What became of a fetch that was asked for."""

    STARTED = "started"
    HELD_UP = "held up"  # there would be room if what is on its way could leave
    NO_ROOM = "no room"


class Fetch(NamedTuple):
    """What became of a fetch.

    Attributes:
        came: whether it was started.
        left: units that have left for it.
        certain: this follows from the schedule, the places, and the readers of the unit used last.
        bound: it was not started although what had arrived was bound, in search of room.
    """

    came: Came
    left: tuple[int, ...] = ()
    certain: bool = False
    bound: bool = False


class Room(NamedTuple):
    """A buffer for a working copy, None where there is none; the rest as of :class:`Fetch`."""

    buffer: Buffer | None
    left: tuple[int, ...] = ()
    certain: bool = False


class WorkingSet:
    """Parameters on the device. See the module's text."""

    def __init__(
        self,
        request: Request,
        copies: Copies,
        arena: Arena,
        addressable: bool,
        claim: Claim,
        mover: Mover,
        bound: BoundUnits,
        reclaim: Callable[[], None],
        conductor: Conductor | None = None,
    ) -> None:
        """Begin with nothing on the device, and without the memory that could be given back.

        Args:
            request: what was planned for.
            copies: the shards.
            arena: of the device.
            addressable: whether the host can use it.
            claim: the arena's.
            mover: of bytes to the device.
            bound: binds and unbinds them.
            reclaim: makes whoever holds working copies for a while, to update them, be done with them.
            conductor: gathers units of which this rank has slices; None where it has all of them.
        """
        self._request = request
        self._units = request.units
        self._copies = copies
        self._arena = arena
        self._addressable = addressable
        self._claim = claim
        self._mover = mover
        self._bound = bound
        self._used: set[int] = set()  # units of which somebody may still have a lease or a view
        self._reclaim = reclaim
        self._conductor = conductor
        region = copies.regions.get(Role.PARAM)
        self._elastic = region if arena.elastic else None
        if self._elastic is not None:
            self.shrink(self._elastic.size_bytes)
            touch(self._elastic.whole)

    # --- coming -----------------------------------------------------------------------------------------------------

    def start_fetch(self, shard: Shard, schedule: Schedule, *, required: bool, wanted: Container[int] = ()) -> Fetch:
        """Start to bring PARAM to the device; what is used later than it gives way, with `required` anything that may.

        Args:
            shard: which.
            schedule: tells when units are used.
            required: it must come.
            wanted: units that must not leave for one that is not.

        Returns:
            What became of it: it was started where it is `required`.

        Raises:
            BudgetError: there is no room and it is `required`.
            swap.SwapError: an I/O error.
        """
        room = Room(self._copies.allocate(shard), certain=True)
        if room.buffer is None and required:
            room = Room(self._require_room(shard, schedule))
        elif room.buffer is None:
            later, certain = self._gives_way(shard, schedule, wanted)
            if not later and not self._is_free(shard.work_bytes):
                return Fetch(Came.NO_ROOM, certain=certain)
            room = self._find_room(shard, schedule, later, wanted)
            if room.buffer is None:
                if self._is_held_up(shard, schedule, later):
                    return Fetch(Came.HELD_UP)
                return Fetch(Came.NO_ROOM, certain=certain and room.certain, bound=True)
            room = room._replace(certain=certain and room.certain)
        assert room.buffer is not None
        self._start_in(shard, room.buffer, urgent=required)
        return Fetch(Came.STARTED, room.left, room.certain)

    def fetch_again(self, shard: Shard, left: Sequence[int]) -> bool:
        """Start to bring PARAM to where it came before, when the same units were here: for it, the same ones leave.

        Returns:
            Whether it was started: they may leave, and there is room then.
        """
        if not all(map(self._is_idle, left)):
            return False
        for owner in left:
            self.evict(self._copies.params[owner])
        buffer = self._copies.allocate(shard)
        if buffer is not None:
            self._start_in(shard, buffer, urgent=False)
        return buffer is not None

    def _start_in(self, shard: Shard, buffer: Buffer, *, urgent: bool) -> None:
        self._copies.start_fetch(shard, buffer, functools.partial(self._start, shard, buffer, urgent=urgent))

    def _start(self, shard: Shard, buffer: Buffer, *, urgent: bool) -> Transfer:
        """Start to bring a unit to `buffer` on the device: from its home, or from all ranks."""
        if self._conductor is None:
            return self._bring(shard, buffer, urgent=urgent)
        if not self._addressable:
            return self._conductor.start_apart(shard, buffer, self._mover, urgent=urgent)
        place = self._conductor.place(shard, buffer)
        return self._conductor.start(shard, buffer, self._bring(shard, place, urgent=urgent))

    def _bring(self, shard: Shard, place: Buffer, *, urgent: bool) -> Transfer:
        """Start to bring what a shard has at home to `place` on the device."""
        copies, home = self._copies, shard.home_buffer
        if home is not None:
            return self._mover.fetch_host(home.address, place, shard.size_bytes, urgent=urgent)
        read = functools.partial(copies.start_reads, shard, urgent=urgent)
        return self._mover.fetch_nvme(read, place, copies.read_sizes(shard), urgent=urgent)

    def begin_to_fill(self, shard: Shard, schedule: Schedule) -> bool:
        """Let PARAM have a working copy that an update is about to fill, where all that gives way is used later.

        At most half of the region is filled at once, or one unit: what is filled cannot leave.
        """
        if not self.may_fill(shard):
            return False
        buffer = self._copies.allocate(shard)
        if buffer is None:
            later, _ = self._gives_way(shard, schedule, ())
            buffer = self._find_room(shard, schedule, later, ()).buffer
        if buffer is None:
            return False
        self._copies.begin_in(shard, buffer)
        self._bound.bind(shard.unit, buffer)
        return True

    def may_fill(self, shard: Shard) -> bool:
        """Tell whether one more working copy may be filled."""
        region = self._copies.regions[Role.PARAM]
        there = [self._copies.params[owner] for owner in region.owners() if owner >= 0]
        filled = [each.size_bytes for each in there if each.state in _FILLED]
        return not filled or sum(filled) + shard.size_bytes <= region.size_bytes // 2

    def use(self, shard: Shard) -> None:
        """Note that compute is about to use a unit that is on the device, on the stream that is current."""
        if self._addressable:
            return
        buffer = shard.home_buffer if shard.stays else shard.work_buffer
        assert buffer is not None, shard.describe()
        if not shard.stays:
            self._used.add(shard.unit.index)
        self._mover.use(buffer)

    def release_idle(self) -> None:
        """Note the units that nobody uses any more: what comes in their place waits for no later compute."""
        for index in tuple(self._used):
            shard = self._copies.params[index]
            if not shard.readers and not self._bound.borrowed(index):
                assert shard.work_buffer is not None, shard.describe()
                self._used.discard(index)
                self._mover.release(shard.work_buffer)

    def wait_for_fetch(self, shard: Shard) -> None:
        """Wait for a fetch, and bind what it brings."""
        self._copies.wait(shard)
        assert shard.work_buffer is not None
        self._bound.bind(shard.unit, shard.work_buffer)

    def wait_for_prefetch(self, shard: Shard) -> None:
        """Wait for a fetch that nobody has asked for: if it failed, the shard is as it was before, and may be read."""
        with LeftToWhoNeedsIt("prefetch"):
            self.wait_for_fetch(shard)
        self._copies.forgive(shard)

    def bind_arrived(self) -> list[int]:
        """Bind the copies that nobody has waited for and that have arrived, so that they can leave; return which."""
        copies = self._copies
        fetched = [shard for shard in copies.in_flight(Role.PARAM) if shard.state is State.FETCHING]
        arrived = [shard for shard in fetched if not copies.is_late(shard)]
        for shard in arrived:
            self.wait_for_prefetch(shard)
        return [shard.unit.index for shard in arrived]

    def hide(self, shard: Shard) -> None:
        """Let the unit's parameters be stand-ins until they are shown: what is on the device is of before a step.

        Where an update does not take place on the device, the working copy is dropped.
        """
        if not shard.stays and (shard.is_sliced or not self._addressable):
            if shard.state is State.FETCHING:
                self.wait_for_prefetch(shard)
            if shard.state is State.RESIDENT:
                self.evict(shard)
        self._bound.hide(shard.unit)

    def read_again(self, shard: Shard, deadline_s: float) -> None:
        """Let a working copy be what its home holds, whatever somebody has written to it."""
        buffer, mover = shard.work_buffer, self._mover
        assert shard.state is State.RESIDENT and buffer is not None and not shard.is_sliced, shard.describe()
        mover.use(buffer)  # behind what somebody has written there
        mover.release(buffer)
        self._bring(shard, buffer, urgent=True).wait(deadline_s)
        self.use(shard)

    # --- going ------------------------------------------------------------------------------------------------------

    def evict(self, shard: Shard) -> None:
        """Drop a working copy that equals its home.

        Raises:
            StateError: somebody has changed it.
        """
        self._bound.refuse_change(shard.unit)
        self._copies.evict(shard)
        self._unbind(shard)

    def refuse_borrowed(self, shard: Shard) -> None:
        """Check that a working copy that is about to be replaced is not viewed by anybody else.

        Raises:
            StateError: it is; names the unit.
        """
        if shard.state is State.RESIDENT and self._bound.borrowed(shard.unit.index):
            raise StateError(
                f"parameters of {shard.unit.name}: a tensor outside the model still views their device memory, so "
                "they cannot be replaced; drop it before the step"
            )

    def unbind_lost(self, shard: Shard) -> None:
        """Take the parameters off content that is neither old nor new; tensors of the user keep their memory."""
        self._copies.leave(shard, self._unbind(shard).borrowed)

    def close(self) -> list[Callable[[], bool]]:
        """Unbind everything; returns what tells of each unit that somebody still views whether that is so."""
        left = [self._unbind(self._copies.params[index]) for index in list(self._bound)]
        self._bound.forget()
        return [residency.borrowed for residency in left if residency.borrowed()]

    def check(self) -> None:
        """Check that what is bound follows from the states.

        Raises:
            InternalError: it does not.
        """
        for shard in self._copies.params:
            if not shard.stays:
                if (shard.unit.index in self._bound) != (shard.state in HAS_WORKING_COPY):
                    raise InternalError(f"{shard.describe()}: binding and state disagree")

    def lay_aside(self, shard: Shard) -> None:
        """Move a unit that is about to be borrowed to where the largest unit still fits beside it.

        Where it is borrowed it cannot be moved any more, and in the middle of a small region it would cut the room for
        the others in two. Only where memory is the CPU's.
        """
        region, copies = self._elastic, self._copies
        if region is None or shard.stays or self._bound.borrowed(shard.unit.index):
            return
        largest = max(s.work_bytes for s in copies.params if not s.stays)
        if region.room_beside(shard.unit.index) >= min(largest, region.size_bytes - whole_pages(shard.work_bytes)):
            return
        self._reclaim()
        for arriving in copies.in_flight(Role.PARAM):
            self.wait_for_prefetch(arriving)
        copies.sweep(Role.PARAM)
        for owner in region.owners()[: region.owners().index(shard.unit.index)]:
            if self._is_idle(owner):
                self.evict(copies.params[owner])
        self._pack(region)

    def leave(self) -> list[int]:
        """Take everything off the device: drop working copies, let what is at home there be stand-ins.

        Returns:
            The units at home there, for :meth:`come_back`.

        Raises:
            StateError: somebody views a unit's bytes, or has changed them; nothing was changed.
        """
        copies = self._copies
        for shard in copies.in_flight(Role.PARAM):
            self.wait_for_prefetch(shard)
        self._bound.refuse_changes()
        for index in self._bound:
            if self._bound.borrowed(index):
                raise StateError(
                    f"parameters of {self._units[index].name}: a tensor outside the model still views their device "
                    "memory, so it cannot be given back; drop it, and graphs of losses, before"
                )
        at_home = [index for index in self._bound if copies.params[index].stays]
        for index in list(self._bound):
            if index in at_home:
                self._unbind(copies.params[index])
            else:
                self.evict(copies.params[index])
        if Role.PARAM in copies.regions:
            copies.sweep(Role.PARAM)
        self._bound.forget()
        return at_home

    def come_back(self, at_home: Iterable[int]) -> None:
        """Let units that are at home on the device view their bytes again."""
        for index in at_home:
            shard = self._copies.params[index]
            assert shard.home_buffer is not None
            self._bound.bind(shard.unit, shard.home_buffer)

    # --- the region's size ------------------------------------------------------------------------------------------

    @property
    def size_bytes(self) -> int:
        """Present size of the working region, where it can change; else 0."""
        return self._elastic.size_bytes if self._elastic is not None else 0

    @property
    def smallest_arena_bytes(self) -> int:
        """Device memory that the parameters need at least, were they placed for it."""
        return self._widest_bytes(self._units)

    def shrink(self, by_bytes: int) -> int:
        """Give memory of the working region and its reservation back; returns how much was possible.

        It stays as large as the largest units that must be there together.

        Raises:
            StateError: somebody has changed a unit that would have to leave.
        """
        region, copies = self._elastic, self._copies
        if region is None:
            return 0
        copies.sweep(Role.PARAM)
        by_bytes = round_up(by_bytes, HUGE_PAGE_BYTES)
        streamed = [s.unit for s in copies.params if not s.stays]
        smallest = min(self._widest_bytes(streamed), region.size_bytes)
        wanted_bytes = max(region.size_bytes - by_bytes, smallest)
        for owner in region.owners_beyond(wanted_bytes):
            shard = copies.params[owner] if owner >= 0 else None
            if shard is not None and shard.state in (State.DIRTY, State.FLUSHING):
                self._reclaim()
            if shard is not None and shard.state is State.FETCHING:
                self.wait_for_prefetch(shard)
            if shard is None or shard.readers or self._bound.borrowed(owner):
                break
            if shard.state is State.RESIDENT:
                self.evict(shard)
        copies.sweep(Role.PARAM)
        part = region.resize(max(wanted_bytes, region.end_bytes))
        if part.size_bytes:
            self._arena.discard(part)
            self._claim.resize(self._claim.size_bytes - part.size_bytes)
        return part.size_bytes

    def make_room(self, by_bytes: int) -> int:
        """See :meth:`offload.memory.transfer.Mover.make_room`."""
        return self._mover.make_room(by_bytes)

    def leave_more(self, by_bytes: int) -> int:
        """See :meth:`offload.memory.transfer.Mover.leave_more`."""
        return self._mover.leave_more(by_bytes)

    @property
    def leaving_bytes(self) -> int:
        """See :attr:`offload.memory.transfer.Mover.leaving_bytes`."""
        return self._mover.leaving_bytes

    def grow(self, by_bytes: int) -> int:
        """Take memory for the working region, at most `by_bytes` and what the plan gave it; returns how much."""
        region = self._elastic
        if region is None:
            return 0
        by_bytes = min(by_bytes, region.largest_bytes - region.size_bytes)
        by_bytes -= by_bytes % PAGE_BYTES
        if by_bytes:
            self._claim.resize(self._claim.size_bytes + by_bytes)
            touch(region.resize(region.size_bytes + by_bytes))
        return by_bytes

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _widest_bytes(self, units: Iterable[Unit]) -> int:
        return sum(whole_pages(unit.param_bytes) for unit in self._request.widest(units))

    def _grow_for(self, size_bytes: int) -> bool:
        """Make a gap of `size_bytes` at the region's end, if the plan's size and the budget allow it."""
        region = self._elastic
        if region is None:
            return False
        missing_bytes = whole_pages(size_bytes) - (region.size_bytes - region.end_bytes)
        if missing_bytes > min(self._claim.budget.free_bytes, region.largest_bytes - region.size_bytes):
            return False
        return self.grow(missing_bytes) == missing_bytes

    def _unbind(self, shard: Shard) -> Residency:
        self._used.discard(shard.unit.index)
        return self._bound.unbind(shard.unit)

    def _gives_way(self, shard: Shard, schedule: Schedule, wanted: Container[int]) -> tuple[list[int], bool]:
        """Tell who gives way to a unit for which there is no room.

        Returns:
            Who is used later, and not by anybody now; and whether all others who are used later are `wanted`.
        """
        params = self._copies.params
        later = who_gives_way(self._copies.regions[Role.PARAM], schedule, shard.unit.index, required=False)
        free = [owner for owner in later if owner >= 0 and not params[owner].readers]
        certain = len(free) == len(later) or all(owner in wanted for owner in later if owner not in free)
        return free, certain

    def _is_free(self, size_bytes: int) -> bool:
        """Tell whether so much is free, in however many pieces."""
        return self._copies.regions[Role.PARAM].free_bytes_without(()) >= size_bytes

    def _find_room(self, shard: Shard, schedule: Schedule, later: Collection[int], wanted: Container[int]) -> Room:
        """Find a working buffer, evicting what is used `later` and not `wanted`."""
        region = self._copies.regions[Role.PARAM]
        choose = functools.partial(who_leaves, region, schedule, shard.unit.index, self._work_bytes, required=False)
        rest = [owner for owner in later if owner not in wanted]
        idle = [owner for owner in rest if self._is_idle(owner)]
        certain = len(idle) == len(rest)
        window = choose(able := who_may_leave(region, schedule, idle, shard.work_bytes))
        if window is None:
            arrived = [] if shard.is_sliced else self.bind_arrived()
            if any(owner in later for owner in arrived):
                idle = [owner for owner in rest if self._is_idle(owner)]
                window = choose(able := who_may_leave(region, schedule, idle, shard.work_bytes))
        if window is not None:
            return Room(self._evict_for(shard, window), tuple(window), certain)
        leaving = choose(able, packs=True)
        if leaving is None:
            return Room(None, certain=certain)
        if not all(map(self._is_movable, region.owners())):
            return Room(None)
        return Room(self._compact(region, shard, leaving))

    def _require_room(self, shard: Shard, schedule: Schedule) -> Buffer:
        """Find a working buffer, evicting anything that may leave.

        Raises:
            BudgetError: that is not possible.
        """
        copies = self._copies
        region = copies.regions[Role.PARAM]
        choose = functools.partial(who_leaves, region, schedule, shard.unit.index, self._work_bytes, required=True)

        def costs() -> dict[int, int] | None:
            return who_may_leave(region, schedule, filter(self._is_idle, region.owners()), shard.work_bytes)

        window = choose(able := costs())
        if window is None:
            self._reclaim()
            for arriving in copies.in_flight(Role.PARAM):  # prefetched copies can go once they are here
                self.wait_for_prefetch(arriving)
            window = choose(able := costs())
            if window is None and self._grow_for(shard.work_bytes) and (buffer := copies.allocate(shard)) is not None:
                return buffer
        if window is None:
            gc.collect()  # tensors in reference cycles, for instance of a caught exception, hold buffers
            window = choose(able := costs())
        if window is not None:
            return self._evict_for(shard, window)
        leaving = choose(able, packs=True)
        buffer = self._compact(region, shard, leaving) if leaving is not None else None
        buffer = buffer or self._compact(region, shard, [owner for owner in region.owners() if self._is_idle(owner)])
        if buffer is not None:
            return buffer
        raise BudgetError(
            f"device budget: unit {shard.unit.name} needs {format_bytes(shard.work_bytes)} in one piece but the "
            f"{format_bytes(region.size_bytes)} for working copies are in use at once; raise "
            f'max_memory["device"], lower activation_memory, or tile a large layer with offload.ops.tile_\n'
            f"{copies.dump()}"
        )

    def _evict_for(self, shard: Shard, window: Iterable[int]) -> Buffer:
        """Evict neighbours, in whose place a unit has room."""
        for owner in window:
            self.evict(self._copies.params[owner])
        buffer = self._copies.allocate(shard)
        assert buffer is not None
        return buffer

    def _is_held_up(self, shard: Shard, schedule: Schedule, later: Iterable[int]) -> bool:
        """Tell whether a unit for which there is no room would have some if what is on its way could leave."""

        def may_leave(owner: int) -> bool:
            if owner < 0 or self._is_idle(owner):
                return owner >= 0
            return self._copies.params[owner].state in (*_FILLED, State.FETCHING)

        region = self._copies.regions[Role.PARAM]
        costs = who_may_leave(region, schedule, filter(may_leave, later), shard.work_bytes)
        known = (region, schedule, shard.unit.index, self._work_bytes, costs)
        return who_leaves(*known, required=False, packs=True) is not None

    def _work_bytes(self, index: int) -> int:
        shard = self._copies.params[index]
        return 0 if shard.stays else shard.work_bytes

    def _is_idle(self, owner: int) -> bool:
        """Tell whether a working copy can be dropped: it equals its home, and nobody uses or views it."""
        return self._is_movable(owner) and not self._copies.params[owner].readers

    def _is_movable(self, owner: int) -> bool:
        """Tell whether a working copy can be moved: nobody views it, and it is neither updated nor on its way."""
        bound = self._bound
        return owner in bound and not bound.borrowed(owner) and self._copies.params[owner].state is State.RESIDENT

    def _compact(self, region: Region, shard: Shard, leaving: Iterable[int]) -> Buffer | None:
        """Make one gap: evict those that are `leaving`, and move the rest together, leased ones, too."""
        for owner in leaving:
            self.evict(self._copies.params[owner])
        self._pack(region)
        return self._copies.allocate(shard)

    def _pack(self, region: Region) -> None:
        """Move together what may be moved."""
        copies = self._copies

        for owner, source, target in region.pack(self._is_movable):
            moved = copies.params[owner]
            self._bound.refuse_change(moved.unit)
            self._unbind(moved)
            self._mover.move(source, target, moved.work_bytes)
            copies.note_moved(moved, target)
            self._bound.bind(moved.unit, target)
            self._used.add(owner)
