"""Where activations are that have left the device: a part of host memory, and behind it one of the drive.

Owns the rooms in both parts, and the transfers between them. What was saved first is needed last, so it goes on to the
drive first. Some of the host's part is for what passes through, so that reads and writes of the drive find room. The
drive is called for a few at a time, as a call takes longer than to hand one more over. Knows neither tensors nor the
device. Next: :mod:`offload.activations.leaving` copies between here and the device.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections import deque
from collections.abc import Container, Sequence

from offload.activations.in_order import InOrder
from offload.memory.arena import Buffer
from offload.memory.gaps import Gaps
from offload.memory.transfer import Ticket
from offload.sizes import PASSING_SHARE, whole_pages
from swap import SwapDeadlineError, SwapStore

GROUP_BYTES = 8 << 20  # that are worth a call of the drive
GROUP_SHARE = 8  # or this part of what is for passing through, if that is less
MOST_AT_ONCE = 64  # of one call; the store begins so many together, or none


@dataclasses.dataclass(slots=True, eq=False)
class Room:
    """What one storage has of the two parts.

    Attributes:
        key: the higher, the later it was saved.
        size_bytes: whole pages.
        offset: in the host's part; None where it has none there.
        stored: the drive has the content.
        ticket: of a read or a write of the drive that is under way.
        resting: it is in host memory until there is too much.
        copied: the device reads what is in host memory, so that it must stay.
        dead: nobody wants it any more.
    """

    key: int
    size_bytes: int
    offset: int | None = None
    stored: bool = False
    ticket: Ticket | None = None
    resting: bool = False
    copied: bool = False
    dead: bool = False


class Away:
    """Rooms of one engine's activations. See the module's text. Called from one thread at a time.

    Attributes:
        drive_read_bytes, drive_written_bytes: of transfers, begun so far.
        largest_bytes: of a storage that may pass here.
        refused_bytes: of the largest storage that stays on the device, for it is larger than what may pass here.
    """

    def __init__(self, host: Buffer, store: SwapStore | None, drive_bytes: int, *, apart: bool = False) -> None:
        """Begin with nothing.

        Args:
            host: the part of host memory.
            store: the swap store; None where there is none.
            drive_bytes: part of it.
            apart: nobody else uses the store: it is closed with this.
        """
        self._apart = store if apart else None
        self.drive_read_bytes = self.drive_written_bytes = self.refused_bytes = 0
        self._host = host
        self._store = store if drive_bytes else None
        self._gaps = Gaps(host.size_bytes)
        self._drive_free_bytes = drive_bytes
        passing_bytes = host.size_bytes // PASSING_SHARE if self._store is not None else 0
        self._most_resting_bytes = host.size_bytes - passing_bytes
        self._group_bytes = min(passing_bytes // GROUP_SHARE, GROUP_BYTES)
        self.largest_bytes = passing_bytes or host.size_bytes
        self._resting: dict[int, Room] = {}  # by key, in the order in which they came
        self._resting_bytes = 0
        self._flying: deque[Room] = deque()  # with transfers of the drive, in the order in which they began
        self._back = InOrder[Room]()  # in host memory although the drive has them
        self._far = InOrder[Room]()  # of these two parts, the drive alone has them
        self._asked_key = 0  # the highest that was ever asked for: what was saved before is backward's
        self._taken_bytes = 0  # since somebody asked, while some of that was on the drive
        self._inside_bytes = 0  # the most of these: backward saves as much, so reads ahead leave room for it

    def address(self, room: Room) -> int:
        """Return where the bytes are in host memory."""
        assert room.offset is not None, room
        return self._host.address + room.offset

    # --- going ------------------------------------------------------------------------------------------------------

    def take(self, room: Room) -> bool:
        """Find host memory for what leaves the device, if need be by waiting for the drive; False where there is none.

        Raises:
            swap.SwapError: what was there before could not be written.
        """
        if room.size_bytes > self.largest_bytes:
            self.refused_bytes = max(self.refused_bytes, room.size_bytes)
            return False
        if any(self._far.before(self._asked_key)):
            self._taken_bytes += room.size_bytes
        room.offset = self._gaps.take(room.size_bytes)
        while room.offset is None and self.make_room():
            room.offset = self._gaps.take(room.size_bytes)
        return room.offset is not None

    def rest(self, room: Room) -> None:
        """Note that the bytes are in host memory: they stay, or others go on to the drive for them.

        Raises:
            swap.SwapError: a write could not be begun.
        """
        room.resting = True
        self._resting[room.key] = room
        self._resting_bytes += room.size_bytes
        if self._resting_bytes > self._most_resting_bytes + self._group_bytes:
            self._write_first()

    def _write_first(self) -> None:
        """Begin to write what was saved first: what exceeds that which may rest, or else one; nothing without room."""
        if self._store is None:
            return
        rooms: list[Room] = []
        resting_bytes, drive_free_bytes = self._resting_bytes, self._drive_free_bytes
        for room in itertools.islice(self._resting.values(), MOST_AT_ONCE):
            is_enough = bool(rooms) and resting_bytes <= self._most_resting_bytes
            if is_enough or room.size_bytes > drive_free_bytes:
                break
            rooms.append(room)
            resting_bytes -= room.size_bytes
            drive_free_bytes -= room.size_bytes
        if not rooms:
            return
        tickets = self._store.put_many([(_name(room), self.address(room), room.size_bytes) for room in rooms])
        for room, ticket in zip(rooms, tickets, strict=True):
            room.ticket = ticket
            self._unrest(room)
        self.drive_written_bytes += self._drive_free_bytes - drive_free_bytes
        self._drive_free_bytes = drive_free_bytes
        self._flying += rooms

    # --- coming back ------------------------------------------------------------------------------------------------

    def read_ahead(self, key: int, wanted: Container[int]) -> None:
        """Begin to read what is needed next, as far as host memory has room.

        That waits until it is worth a call of the drive. What is needed next and still being written stays in host
        memory behind it, as long as nothing else needs the place.

        Args:
            key: what was saved before is needed.
            wanted: keys of what the device does not have.

        Raises:
            swap.SwapError: they could not be begun.
        """
        self._asked_key = max(self._asked_key, key)
        self._inside_bytes = max(self._inside_bytes, min(self._taken_bytes, self._host.size_bytes // 2))
        self._taken_bytes = 0
        first = next((room for room in self._far.before(key) if room.key in wanted), None)
        if first is None or (not self._has_room_ahead() and not self._make_room_ahead(key, first)):
            return
        rooms: list[Room] = []
        room_bytes = self._gaps.free_bytes - self._inside_bytes
        for room in self._far.before(key):
            if room.size_bytes > room_bytes or len(rooms) == MOST_AT_ONCE:
                break
            if room.key in wanted:
                rooms.append(room)
                room_bytes -= room.size_bytes
        self._begin_reads(rooms, urgent=False)

    def _has_room_ahead(self) -> bool:
        """Tell whether there is room for so much that it is worth a call of the drive."""
        return self._gaps.free_bytes - self._inside_bytes >= self._group_bytes

    def _make_room_ahead(self, key: int, first: Room) -> bool:
        """Give up what is needed behind `first`; False where something needed before is here, or any is on its way."""
        ahead = next(self._back.before(key), None)
        if self._flying or (ahead is not None and ahead.key > first.key):
            return False
        for room in list(itertools.takewhile(lambda room: room.key < first.key, self._back)):
            if not room.copied and not self._has_room_ahead():
                self._give_back(room)
        return True

    def read(self, room: Room) -> bool:
        """Begin to read what is asked for; False where host memory has no room now.

        Raises:
            swap.SwapError: it could not be begun.
        """
        self._begin_reads([room], urgent=True)
        return room.ticket is not None

    def _begin_reads(self, rooms: Sequence[Room], *, urgent: bool) -> None:
        """Begin to read what the drive alone has, one behind the other, as far as host memory has room."""
        taken = []
        for room in rooms:
            assert room.stored and room.ticket is None, room
            room.offset = self._gaps.take(room.size_bytes)
            if room.offset is None:
                break
            taken.append(room)
        if not taken:
            return
        assert self._store is not None
        items = [(_name(room), self.address(room), room.size_bytes) for room in taken]
        try:
            tickets = self._store.get_many(items, urgent=urgent)
        except BaseException:
            for room in taken:
                self._give_back(room)
            raise
        for room, ticket in zip(taken, tickets, strict=True):
            room.ticket = ticket
            self.drive_read_bytes += room.size_bytes
            self._far.discard(room.key)
        self._flying += taken

    def make_room(self) -> bool:
        """Free host memory; False where nothing can be done.

        Raises:
            swap.SwapError: what was there before could not be written.
        """
        is_writing = bool(self._flying) and not self._flying[0].stored
        room = None if is_writing else next((room for room in self._back if not room.copied), None)
        if room is not None:  # it is needed last
            self._give_back(room)
            return True
        if not self._flying:
            self._write_first()
        if not self._flying:
            return False
        self._end(self._flying.popleft())
        return True

    def is_here(self, room: Room) -> bool:
        """Tell whether the bytes are in host memory now."""
        if room.ticket is not None and room.stored and room.ticket.done():
            self.wait(room)
        return room.offset is not None and (room.ticket is None or not room.stored)

    def wait(self, room: Room) -> None:
        """Wait for a read.

        Raises:
            swap.SwapError: it has failed; it may be begun again.
        """
        if room.ticket is not None and room.stored:
            self._flying.remove(room)
            self._end(room, wanted=True)

    def vacate(self, room: Room) -> None:
        """Note that the device has read it: host memory of what the drive has, too, is given back."""
        room.copied = False
        if room.key in self._back:
            self._give_back(room)

    # --- the end ----------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Note the transfers of the drive that are over.

        Raises:
            swap.SwapError: a write has failed. What was to be written stays in host memory.
        """
        while self._flying and self._flying[0].ticket is not None and self._flying[0].ticket.done():
            self._end(self._flying.popleft())

    def settle(self) -> None:
        """Wait for the transfers of the drive that are under way.

        Raises:
            swap.SwapError: a write has failed. What was to be written stays in host memory.
        """
        while self._flying:
            self._end(self._flying.popleft())

    def release(self, room: Room) -> None:
        """Give back all rooms, of host memory once nothing is under way there."""
        room.dead = True
        if room.ticket is None:
            self._forget(room)

    def close(self) -> None:
        """Wait for what is under way, whatever becomes of it; what is late is left to whoever closes the store."""
        for room in self._flying:
            room.dead = True
        with contextlib.suppress(SwapDeadlineError):
            while self._flying:
                self._end(self._flying.popleft())
        self._flying.clear()
        if self._apart is not None:
            self._apart.close()

    @property
    def apart(self) -> SwapStore | None:
        """The store that nobody else uses; None where others do, or there is none."""
        return self._apart

    @property
    def wanted_bytes(self) -> int:
        """The smallest part of host memory that storages could all pass which have stayed; 0 where none has."""
        return self.refused_bytes * (PASSING_SHARE if self._store is not None else 1)

    @property
    def used_bytes(self) -> int:
        """Bytes taken of host memory."""
        return self._host.size_bytes - self._gaps.free_bytes

    def _end(self, room: Room, *, wanted: bool = False) -> None:
        """Take note of a transfer that is no longer among those under way; waits for it.

        Whoever needs what could not be read meets the error again. What is not over in time stays under way.

        Raises:
            swap.SwapDeadlineError: it is not over.
            swap.SwapError: it was a write, or `wanted`, and has failed.
        """
        ticket, reads = room.ticket, room.stored
        assert ticket is not None, room
        try:
            ticket.wait()
        except BaseException as error:
            if isinstance(error, SwapDeadlineError) or not isinstance(error, OSError):
                self._flying.appendleft(room)  # its memory is nobody else's until then
                raise
            room.ticket = None
            if reads:
                self._give_back(room)
            else:
                self._undo(room)
            if not room.dead and (wanted or not reads):
                raise
        else:
            room.ticket, room.stored = None, True
            self._back.add(room.key, room)
            if not reads and not room.copied and room.key >= self._asked_key:
                self._give_back(room)
        if room.dead:
            self._forget(room)

    def _undo(self, room: Room) -> None:
        """Let what could not be written rest where it is."""
        self._drive_free_bytes += room.size_bytes
        room.resting = True
        self._resting = {room.key: room, **self._resting}  # again the first
        self._resting_bytes += room.size_bytes

    def _forget(self, room: Room) -> None:
        self._unrest(room)
        if room.stored and self._store is not None:
            self._store.delete(_name(room))
            self._drive_free_bytes += room.size_bytes
            room.stored = False
        if room.offset is not None:
            self._give_back(room)
        self._far.discard(room.key)

    def _unrest(self, room: Room) -> None:
        if room.resting:
            room.resting = False
            del self._resting[room.key]
            self._resting_bytes -= room.size_bytes

    def _give_back(self, room: Room) -> None:
        assert room.offset is not None
        self._gaps.give_back(room.offset, room.size_bytes)
        room.offset = None
        self._back.discard(room.key)
        if room.stored:
            self._far.add(room.key, room)


def _name(room: Room) -> tuple[str, int]:
    """Return its key in the swap store."""
    return "activation", room.key


def room_for(key: int, size_bytes: int) -> Room:
    """Return a room for a storage, which has nothing yet."""
    return Room(key, whole_pages(size_bytes))
