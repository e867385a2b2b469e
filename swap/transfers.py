"""Transfers between memory and the extents of versions, and what of them is in flight.

Owns: how a range of a version becomes reads and writes of files, checksums included; tickets; the first error of each.
Must not know: keys, mappings, which version is current: `store` is told when a transfer is over and decides.
Next: `aio` carries the reads and writes out.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from swap.backing import Backing
from swap.errors import SwapError
from swap.io.aio import Aio, IoTicket, Job, Priority
from swap.io.checksums import ReadPart, parts_of_read, words
from swap.space.mapping import Version


class StoreTicket:
    """Ticket of one put or get. Reaping it (`wait`, or `done` answering True) lets a put take effect."""

    __slots__ = (
        "_bounces",
        "_error",
        "_io",
        "_key",
        "_on_end",
        "_over",
        "_settled",
        "_transfers",
        "_version",
        "_writes",
    )

    def __init__(
        self,
        transfers: Transfers,
        version: Version,
        key: Hashable,
        on_end: Callable[[StoreTicket], None],
        *,
        writes: bool,
    ) -> None:
        self._transfers = transfers
        self._version = version
        self._key = key
        self._writes = writes
        self._on_end = on_end
        self._io: list[IoTicket] = []
        self._bounces: list[_Bounce] = []
        self._settled = False
        self._over = False  # settled, with all that follows
        self._error: SwapError | None = None

    def done(self) -> bool:
        """Tell whether the transfer is over, well or badly. A put that went well has taken effect then."""
        if not self._over and all(io.done() for io in self._io):
            self._transfers.settle(self)
        return self._over

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is over.

        Args:
            timeout_s: seconds to wait at most; None uses the deadline of the store.

        Raises:
            SwapDeadlineError: not over in time; it stays in flight, its memory must not be reused, and it may
                be waited for again.
            SwapFullError: the file system is full although the file was preallocated.
            SwapCorruptError: the bytes that were read are not those that were written.
            SwapError: the transfer failed. A failed put leaves the version before it in place.
        """
        if not self._over:
            limit_s = self._transfers.deadline_s if timeout_s is None else timeout_s
            self.wait_settled(time.monotonic() + limit_s, limit_s)
        if self._error is not None:
            self._transfers.reported(self)
            raise self._error

    def wait_settled(self, end: float, limit_s: float) -> None:
        """Wait until `end` (of the monotonic clock), after `limit_s` seconds in the message; say not how it went.

        Raises:
            SwapDeadlineError: not over in time.
        """
        for io in self._io:
            if not io.wait_done(end - time.monotonic()):
                raise io.deadline_error(limit_s, self._transfers.dump())
        self._transfers.settle(self)

    @property
    def error(self) -> SwapError | None:
        """Why a settled transfer failed, or None."""
        return self._error

    @property
    def version(self) -> Version:
        """What is written or read."""
        return self._version

    @property
    def what(self) -> str:
        """A name for messages: ``put 'a'``."""
        return f"{'put' if self._writes else 'get'} {self._key!r}"


class Write(NamedTuple):
    """All of a version of `key`, from memory at `address`."""

    key: Hashable
    version: Version
    address: int


class Read(NamedTuple):
    """The range [offset, offset + length) of a version of `key`, to memory at `address`."""

    key: Hashable
    version: Version
    address: int
    offset: int
    length: int


class Transfers:
    """Starts transfers and keeps those that are not settled. `lock` is the store's and guards everything here."""

    def __init__(
        self,
        aio: Aio,
        backing: Backing,
        lock: threading.RLock,
        granule_bytes: int,
        dump: Callable[[], str],
    ) -> None:
        """Use an engine and files that somebody else opened and closes.

        Args:
            aio: engine; gets to know the files here.
            backing: the files that pieces point to.
            lock: of the store.
            granule_bytes: bytes per checksum of what is written, a multiple of the alignment; 0 for none.
            dump: state of the store, for messages.
        """
        self.dump = dump
        self._aio = aio
        self._files = backing.files
        self._lock = lock
        self._alignment = backing.space.alignment
        self._granule_bytes = granule_bytes
        self._in_flight: dict[int, StoreTicket] = {}
        self._unreported: dict[int, StoreTicket] = {}
        for file in backing.files:
            aio.register_file(file.fd, file.directory)

    @property
    def deadline_s(self) -> float:
        """Limit in seconds of waits that give none."""
        return self._aio.deadline_s

    def write(self, writes: Sequence[Write], on_end: Callable[[StoreTicket], None]) -> list[StoreTicket]:
        """Start writing all of some versions, all or none, with one submission.

        `on_end` is called once per ticket, locked, when it is settled.

        Raises:
            SwapError: the engine is closed; nothing was started.
        """
        started = []
        for write in writes:
            address = write.address
            jobs = []
            for piece in write.version.pieces:
                extent = piece.extent
                fd = self._files[piece.file].fd
                jobs.append(Job(True, fd, extent.offset, address, extent.length, Priority.NORMAL, self._granule_bytes))
                address += extent.length
            started.append((StoreTicket(self, write.version, write.key, on_end, writes=True), jobs))
        return self._start(started)

    def read(
        self, reads: Sequence[Read], priority: Priority, on_end: Callable[[StoreTicket], None]
    ) -> list[StoreTicket]:
        """Start reading ranges of versions; see `write`."""
        return self._start([self._prepare(read, priority, on_end) for read in reads])

    def _prepare(
        self, read: Read, priority: Priority, on_end: Callable[[StoreTicket], None]
    ) -> tuple[StoreTicket, list[Job]]:
        version, offset, length, address = read.version, read.offset, read.length, read.address
        ticket = StoreTicket(self, version, read.key, on_end, writes=False)
        jobs: list[Job] = []
        start = 0
        for index, piece in enumerate(version.pieces):
            end = start + piece.extent.length
            first, last = max(offset, start), min(offset + length, end)
            if first < last:
                where = address + first - offset
                jobs += self._reads(ticket, index, first - start, last - start, where, priority)
            start = end
        return ticket, jobs

    def _reads(
        self, ticket: StoreTicket, index: int, first: int, last: int, address: int, priority: Priority
    ) -> list[Job]:
        """Reads of the range [first, last) of one piece."""
        version = ticket._version
        extent = version.pieces[index].extent
        fd = self._files[version.pieces[index].file].fd
        granule = self._granule_bytes
        if not granule or not version.checksums:
            return [Job(False, fd, extent.offset + first, address, last - first, priority)]
        jobs = []
        for part in parts_of_read(first, last, extent.length, granule):
            where = address + part.wanted_first - first
            if not part.whole:
                bounce = _Bounce.for_part(part, where, self._alignment)
                ticket._bounces.append(bounce)
                where = bounce.address
            expected = words(version.checksums[index], part.first, part.last, granule)
            at = extent.offset + part.first
            jobs.append(Job(False, fd, at, where, part.last - part.first, priority, granule, expected))
        return jobs

    def _start(self, started: Sequence[tuple[StoreTicket, list[Job]]]) -> list[StoreTicket]:
        flying = self._aio.submit([job for _, jobs in started for job in jobs])
        first = 0
        for ticket, jobs in started:
            ticket._io = flying[first : first + len(jobs)]
            first += len(jobs)
            self._in_flight[id(ticket)] = ticket
        return [ticket for ticket, _ in started]

    def settle(self, ticket: StoreTicket) -> None:
        """Let a finished transfer take effect, once. All its parts must be done."""
        with self._lock:
            if ticket._settled:
                return
            ticket._settled = True
            self._in_flight.pop(id(ticket), None)
            ticket._error = next((error for io in ticket._io if (error := io.error())), None)
            if ticket._error is not None:
                self._unreported[id(ticket)] = ticket
            elif ticket._writes and self._granule_bytes:
                ticket._version.checksums = tuple(io.checksums for io in ticket._io)
            else:
                for bounce in ticket._bounces:
                    bounce.copy()
            ticket._bounces = []
            try:
                ticket._on_end(ticket)
            finally:
                ticket._over = True

    def reported(self, ticket: StoreTicket) -> None:
        """Note that somebody was told of a failure."""
        with self._lock:
            self._unreported.pop(id(ticket), None)

    def in_flight(self) -> list[StoreTicket]:
        """Tickets that are not settled, oldest first."""
        with self._lock:
            return list(self._in_flight.values())

    def settle_finished(self) -> None:
        """Settle what is over."""
        for ticket in self.in_flight():
            ticket.done()

    def drain(self, limit_s: float) -> None:
        """Wait until nothing is in flight.

        Raises:
            SwapDeadlineError: transfers did not finish in time.
            SwapError: the first failure that nobody has waited for.
        """
        end = time.monotonic() + limit_s
        while waiting := self.in_flight():
            waiting[0].wait_settled(end, limit_s)
        with self._lock:
            failed = list(self._unreported.values())
            self._unreported.clear()
        for ticket in failed:
            if ticket._error is not None:
                raise ticket._error


@dataclass(frozen=True, slots=True)
class _Bounce:
    """Memory for a granule that is read as a whole although only a part of it was asked for.

    Attributes:
        memory: holds the granule.
        address: of the granule.
        skip: bytes of it before the wanted part.
        target: where that goes.
        length: of that.
    """

    memory: mmap.mmap
    address: int
    skip: int
    target: int
    length: int

    @classmethod
    def for_part(cls, part: ReadPart, target: int, alignment: int) -> _Bounce:
        """Allocate memory for `part`."""
        memory = mmap.mmap(-1, part.last - part.first + alignment)
        start = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        aligned = -(-start // alignment) * alignment
        return cls(memory, aligned, part.wanted_first - part.first, target, part.wanted_last - part.wanted_first)

    def copy(self) -> None:
        """Copy the wanted part to its place."""
        ctypes.memmove(self.target, self.address + self.skip, self.length)
