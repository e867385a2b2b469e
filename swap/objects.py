"""Objects of a store: what puts, gets and deletes do to the mapping and to the extents.

Owns: the way of a put from a fresh extent to the mapping, room for it, ranges of gets, snapshots.
Must not know: files, engines, commits.
Next: `puts` for the order of puts, `mapping` for versions, `transfers` for the bytes.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Hashable, Iterable, Sequence
from types import TracebackType
from typing import Final, TypeVar

from swap.errors import SwapFullError, format_bytes
from swap.io.aio import Priority
from swap.lifetime import Gate
from swap.space.contents import Contents
from swap.space.extents import round_up
from swap.space.mapping import Version
from swap.space.puts import Put
from swap.transfers import Read, StoreTicket, Transfers, Write

T = TypeVar("T")

Item = tuple[Hashable, int, int]
"""Key, address and length in bytes of one object."""

GROUP: Final = 64
"""Objects that are given to the engine at a time."""


class Objects:
    """Objects under keys; see `SwapStore` for what they promise."""

    def __init__(self, contents: Contents, transfers: Transfers, gate: Gate) -> None:
        """Put into `contents` and get from them while `gate` is open."""
        self._space = contents.space
        self._map = contents.mapping
        self._puts = contents.puts
        self._lock = contents.lock
        self._transfers = transfers
        self._gate = gate
        self._alignment = contents.space.alignment
        self._started: dict[StoreTicket, Put] = {}

    def put(self, items: Sequence[Item], *, urgent: bool) -> list[StoreTicket]:
        """See `SwapStore.put_many`."""
        self._gate.check()
        for key, address, length in items:
            self._check_address(address)
            if length <= 0:
                raise ValueError(f"put {key!r}: expected a length of more than 0 bytes but got {length}")
        needs = [round_up(length, self._alignment) for _, _, length in items]
        start = functools.partial(self._start_puts, priority=_priority(urgent))
        limit_s = self._transfers.deadline_s
        end = time.monotonic() + limit_s
        while True:
            with self._lock:
                self._gate.check()
                if self._fits(sum(needs)):
                    return self._in_groups(start, list(zip(items, needs, strict=True)))
                blocking = self._transfers.in_flight()
            if not blocking:
                need = sum(needs)
                what = f"put {items[0][0]!r} needs" if len(items) == 1 else f"puts of {len(items)} objects need"
                raise SwapFullError(
                    f"swap store: {what} {format_bytes(need)} but "
                    f"{format_bytes(self._space.free_bytes)} of {format_bytes(self._space.capacity_bytes)} are free",
                    length_bytes=need,
                    remedy="give the store more capacity or delete objects; "
                    "a put needs room beside the version that it replaces",
                )
            blocking[0].wait_reaped(end, limit_s)

    def get(self, items: Sequence[Item], *, offset: int, urgent: bool) -> list[StoreTicket]:
        """See `SwapStore.get_many`; every range starts at `offset`."""
        return self.read(self.version, items, offset=offset, priority=_priority(urgent))

    def delete(self, key: Hashable) -> None:
        """See `SwapStore.delete`."""
        self._gate.check()
        with self._lock:
            if key not in self._map.working and key not in self._puts and key not in self._puts.failed:
                raise KeyError(f"{key!r}: no such object in the swap store")
            self._puts.forget(key)
            if key in self._map.working:
                self._map.remove(key)

    def snapshot(self, keys: Iterable[Hashable] | None) -> Snapshot:
        """See `SwapStore.snapshot`."""
        self._gate.check()
        with self._lock:
            if keys is None:
                return Snapshot(self, self._map.snapshot(self._map.committed))
            return Snapshot(self, self._map.snapshot({key: self.version(key) for key in keys}))

    def version(self, key: Hashable) -> Version:
        """The current version of `key`. Locked.

        Raises:
            KeyError: there is none.
        """
        version = self._map.working.get(key)
        if version is None:
            why = "its first put has not been reaped" if key in self._puts else "no such object"
            raise KeyError(f"{key!r}: {why} in the swap store")
        return version

    def read(
        self, version_of: Callable[[Hashable], Version], items: Sequence[Item], *, offset: int, priority: Priority
    ) -> list[StoreTicket]:
        """Start reading ranges of versions, which `version_of` finds under the lock; all start at `offset`."""
        self._gate.check()

        def start(group: Sequence[Read]) -> list[StoreTicket]:
            before = len(self._transfers.flying)
            for read in group:
                self._map.hold(read.version)
            try:
                return self._transfers.read(group, priority)
            except BaseException:
                self._release_not_begun(group, before)
                raise

        with self._lock:
            reads = []
            for key, address, length in items:
                version = version_of(key)
                self._check_address(address)
                need = round_up(length, self._alignment)
                if length <= 0 or offset < 0 or offset % self._alignment or offset + need > version.length:
                    raise ValueError(
                        f"get {key!r}: expected a range inside {version.length} bytes, starting at a multiple of "
                        f"{self._alignment}, but got offset {offset}, length {length}"
                    )
                reads.append(Read(key, version, address, offset, need))
            return self._in_groups(start, reads)

    def release(self, versions: dict[Hashable, Version]) -> None:
        """End the holds of a snapshot, which has no versions then."""
        with self._lock:
            while versions:
                self._map.release(versions.popitem()[1])

    def _check_address(self, address: int) -> None:
        if address <= 0 or address % self._alignment:
            raise ValueError(f"address: expected a multiple of {self._alignment} but got {address:#x}")

    def _fits(self, need: int) -> bool:
        """Tell whether there is room, if need be after what is over was reaped; what fits by the sum fits. Locked."""
        if self._space.free_bytes < need:
            self._transfers.reap_finished()
        return self._space.free_bytes >= need

    def _in_groups(self, start: Callable[[Sequence[T]], list[StoreTicket]], wanted: Sequence[T]) -> list[StoreTicket]:
        """Start transfers a few at a time, so that the drive is busy while others are prepared. Locked."""
        tickets: list[StoreTicket] = []
        before = len(self._transfers.flying)  # locked: none is reaped meanwhile
        try:
            for first in range(0, len(wanted), GROUP):
                tickets += start(wanted[first : first + GROUP])
        except BaseException:
            for ticket in self._transfers.in_flight()[before:]:  # nobody else knows, and their memory is the caller's
                ticket.wait_reaped(time.monotonic() + self._transfers.deadline_s, self._transfers.deadline_s)
            raise
        return tickets

    def _start_puts(self, wanted: Sequence[tuple[Item, int]], *, priority: Priority) -> list[StoreTicket]:
        """Start writing versions; each is its key's unless something else happens. There is room. Locked."""
        writes: list[Write] = []
        before = len(self._transfers.flying)
        for (key, address, _), need in wanted:
            version = Version(self._space.allocate(need), need)
            self._map.hold(version)
            writes.append(Write(key, version, address))
        try:
            tickets = self._transfers.write(writes, priority, self._put_ended)
        except BaseException:
            self._release_not_begun(writes, before)
            raise
        for ((key, _, _), _), ticket in zip(wanted, tickets, strict=True):
            self._started[ticket] = self._puts.begin(key)
        return tickets

    def _release_not_begun(self, wanted: Sequence[Read] | Sequence[Write], before: int) -> None:
        """End the holds of those that are not in flight behind `before` others; the rest end with them. Locked."""
        begun = {id(ticket.version) for ticket in self._transfers.in_flight()[before:]}
        for each in wanted:
            if id(each.version) not in begun:
                self._map.release(each.version)

    def _put_ended(self, ticket: StoreTicket) -> None:
        """Let a put take effect unless it failed or came too late. Locked. May be repeated after an interrupt."""
        put = self._started.get(ticket)  # none, if an interrupt came when it had just begun
        if put is not None:
            if ticket.error is None and not put.superseded:
                self._map.put(put.key, ticket.version)
            self._puts.end(put, ticket.error)
            del self._started[ticket]


def _priority(urgent: bool) -> Priority:
    return Priority.URGENT if urgent else Priority.NORMAL


class Snapshot:
    """Versions of a store at one moment. A context manager."""

    def __init__(self, objects: Objects, versions: dict[Hashable, Version]) -> None:
        """Take over `versions`, by key, and the holds on them."""
        self._objects = objects
        self._versions = versions

    def get(
        self, key: Hashable, address: int, length: int, *, offset: int = 0, priority: Priority = Priority.NORMAL
    ) -> StoreTicket:
        """Start reading; as `SwapStore.get`, but of this moment, and with any priority.

        Raises:
            KeyError: the key had no version then, or the snapshot is released.
            ValueError: not aligned, or the range is not inside the object.
            SwapError: the store is closed or belongs to the parent process.
        """
        return self._objects.read(self._version, [(key, address, length)], offset=offset, priority=priority)[0]

    def length_of(self, key: Hashable) -> int:
        """Length in bytes, rounded up to the alignment.

        Raises:
            KeyError: the key had no version then, or the snapshot is released.
        """
        return self._version(key).length

    def keys(self) -> list[Hashable]:
        """Keys that had a version."""
        return list(self._versions)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    def release(self) -> None:
        """Let go of the extents; idempotent. Reads in flight still succeed."""
        self._objects.release(self._versions)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _version(self, key: Hashable) -> Version:
        version = self._versions.get(key)
        if version is None:
            raise KeyError(f"{key!r}: no such object in the snapshot")
        return version
