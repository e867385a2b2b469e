"""Transfers between memory and the extents of versions, and what of them is in flight.

Owns: how a range of a version becomes reads and writes of files, checksums included; tickets; the first error of each.
Must not know: keys, mappings, which version is current: `objects` is told when a transfer is over and decides.
Next: `io.aio` carries the reads and writes out.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
import time
from collections import deque
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from swap.backing import Backing
from swap.errors import SwapError
from swap.io.aio import Aio, IoTicket, Job, Priority
from swap.io.checksums import ReadPart, parts_of_read, words
from swap.space.extents import round_up
from swap.space.mapping import Version
from swap.stats import PAST_TRANSFERS, PastTransfer


class StoreTicket:
    """Ticket of one put or get. Reaping it (`wait`, or `done` answering True) lets a put take effect."""

    __slots__ = ("_error", "_ios", "_on_end", "_plan", "_transfers")

    def __init__(
        self, transfers: Transfers, plan: _Plan, ios: Sequence[IoTicket], on_end: Callable[[StoreTicket], None] | None
    ) -> None:
        """Follow a transfer that has been started.

        Args:
            transfers: who started it.
            plan: what it does.
            ios: its reads or writes of files.
            on_end: called, locked, when it is reaped; again, if an interrupt came meanwhile.
        """
        self._transfers = transfers
        self._plan = plan
        self._ios = ios
        self._on_end = on_end
        self._error: SwapError | None = None

    def done(self) -> bool:
        """Tell whether the transfer is over, well or badly. A put that went well has taken effect then."""
        if self in self._transfers.flying:
            for io in self._ios:
                if not io.done():
                    return False
            self._transfers.reap(self)
        return True

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
        if self in self._transfers.flying:
            limit_s = self._transfers.deadline_s if timeout_s is None else timeout_s
            self.wait_reaped(time.monotonic() + limit_s, limit_s)
        if self._error is not None:
            self._transfers.note_reported(self)
            raise self._error

    def wait_reaped(self, end: float, limit_s: float) -> None:
        """Wait until `end` (of the monotonic clock), after `limit_s` seconds in the message; say not how it went.

        Raises:
            SwapDeadlineError: not over in time.
        """
        for io in self._ios:
            if not io.wait_done(end - time.monotonic()):
                raise io.deadline_error(limit_s, self._transfers.dump())
        self._transfers.reap(self)

    def take_effect(self) -> SwapError | None:
        """Do what follows the end of the transfer; return why it failed. Locked. May be repeated after an interrupt."""
        plan = self._plan
        for io in self._ios:
            self._error = io.error()
            if self._error is not None:
                break
        if self._error is None:
            if plan.writes and plan.jobs[0].granule_bytes:
                plan.version.checksums = tuple(io.checksums for io in self._ios)
            for bounce in plan.bounces:
                bounce.copy()
        plan.bounces.clear()  # their memory
        if self._on_end is not None:
            self._on_end(self)
        return self._error

    def past(self) -> tuple[Hashable, float, float, int]:
        """What a `PastTransfer` is made of, of one that is over: its first part's begin, and its last one's end."""
        plan, (begin, end) = self._plan, self._ios[0].times
        if len(self._ios) == 1:
            return plan.key, begin, end, plan.jobs[0].length
        end = max(io.times[1] for io in self._ios)
        return plan.key, begin, end, sum(job.length for job in plan.jobs)

    @property
    def error(self) -> SwapError | None:
        """Why a reaped transfer failed, or None."""
        return self._error

    @property
    def writes(self) -> bool:
        """Whether it is a put."""
        return self._plan.writes

    @property
    def version(self) -> Version:
        """What is written or read."""
        return self._plan.version

    @property
    def what(self) -> str:
        """A name for messages: ``put 'a'``."""
        return f"{'put' if self._plan.writes else 'get'} {self._plan.key!r}"


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


class _Plan(NamedTuple):
    """What a transfer does.

    Attributes:
        key: for messages.
        version: written or read.
        writes: memory to files.
        jobs: reads or writes of files.
        bounces: memory between files and the caller's, of reads that cut a granule.
    """

    key: Hashable
    version: Version
    writes: bool
    jobs: list[Job]
    bounces: list[_Bounce]


class Transfers:
    """Starts transfers and keeps those that are not reaped. `lock` is the store's and guards everything here.

    Attributes:
        flying: those that are not reaped, oldest first.
    """

    def __init__(
        self,
        aio: Aio,
        backing: Backing,
        lock: threading.RLock,
        granule_bytes: int,
        dump: Callable[[], str],
        release: Callable[[Version], None],
    ) -> None:
        """Use an engine and files that somebody else opened and closes.

        Args:
            aio: engine; gets to know the files here.
            backing: the files that pieces point to.
            lock: of the store.
            granule_bytes: bytes per checksum of what is written, a multiple of the alignment; 0 for none.
            dump: state of the store, for messages.
            release: ends the hold on a version, once, when the transfer that was started with it is over. Locked.
        """
        self.dump = dump
        self._release = release
        self._aio = aio
        self._files = backing.files
        self._lock = lock
        self._alignment = backing.space.alignment
        self._granule_bytes = granule_bytes
        self.flying: dict[StoreTicket, None] = {}
        self._unreported: dict[StoreTicket, SwapError] = {}  # failures that nobody was told of
        self._past_reads = deque[tuple[Hashable, float, float, int]](maxlen=PAST_TRANSFERS)
        self._past_writes = deque[tuple[Hashable, float, float, int]](maxlen=PAST_TRANSFERS)
        for file in backing.files:
            aio.register_file(file.fd, file.directory)

    @property
    def deadline_s(self) -> float:
        """Limit in seconds of waits that give none."""
        return self._aio.deadline_s

    def write(
        self, writes: Sequence[Write], priority: Priority, on_end: Callable[[StoreTicket], None]
    ) -> list[StoreTicket]:
        """Start writing all of some versions, all or none, with one submission.

        `on_end` is called per ticket, locked, when it is reaped; again, if an interrupt came meanwhile.

        Raises:
            SwapError: the engine is closed; nothing was started.
        """
        return self._start([self._plan_write(write, priority) for write in writes], on_end)

    def read(self, reads: Sequence[Read], priority: Priority) -> list[StoreTicket]:
        """Start reading ranges of versions; see `write`."""
        return self._start([self._plan_read(read, priority) for read in reads])

    def _plan_write(self, write: Write, priority: Priority) -> _Plan:
        address = write.address
        jobs = []
        for piece in write.version.pieces:
            extent = piece.extent
            fd = self._files[piece.file].fd
            jobs.append(Job(True, fd, extent.offset, address, extent.length, priority, self._granule_bytes))
            address += extent.length
        return _Plan(write.key, write.version, True, jobs, [])

    def _plan_read(self, read: Read, priority: Priority) -> _Plan:
        version, offset, length, address = read.version, read.offset, read.length, read.address
        plan = _Plan(read.key, version, False, [], [])
        start = 0
        for index, piece in enumerate(version.pieces):
            end = start + piece.extent.length
            first, last = max(offset, start), min(offset + length, end)
            if first < last:
                self._plan_piece(plan, index, first - start, last - start, address + first - offset, priority)
            start = end
        return plan

    def _plan_piece(self, plan: _Plan, index: int, first: int, last: int, address: int, priority: Priority) -> None:
        """Add reads of the range [first, last) of one piece."""
        version = plan.version
        extent = version.pieces[index].extent
        fd = self._files[version.pieces[index].file].fd
        granule = self._granule_bytes
        if not granule or not version.checksums:
            plan.jobs.append(Job(False, fd, extent.offset + first, address, last - first, priority))
            return
        for part in parts_of_read(first, last, extent.length, granule):
            where = address + part.wanted_first - first
            if not part.whole:
                bounce = _Bounce.for_part(part, where, self._alignment)
                plan.bounces.append(bounce)
                where = bounce.address
            expected = words(version.checksums[index], part.first, part.last, granule)
            at = extent.offset + part.first
            plan.jobs.append(Job(False, fd, at, where, part.last - part.first, priority, granule, expected))

    def _start(self, plans: Sequence[_Plan], on_end: Callable[[StoreTicket], None] | None = None) -> list[StoreTicket]:
        try:
            flying = iter(self._aio.submit([job for plan in plans for job in plan.jobs]))
            tickets = [StoreTicket(self, plan, list(islice(flying, len(plan.jobs))), on_end) for plan in plans]
            self.flying.update(dict.fromkeys(tickets))
            return tickets
        except (SwapError, ValueError):
            raise
        except BaseException:  # an interrupt: nobody knows of what it has let begin
            self._aio.await_idle()
            raise

    def reap(self, ticket: StoreTicket) -> None:
        """Let a finished transfer take effect, once. All its parts must be done."""
        with self._lock:
            if ticket not in self.flying:
                return
            error = ticket.take_effect()
            if error is not None:
                self._unreported[ticket] = error
            del self.flying[ticket]  # if an interrupt came before, whoever asks next does all of it again
            self._release(ticket.version)
            if error is None:
                (self._past_writes if ticket.writes else self._past_reads).append(ticket.past())

    def note_reported(self, ticket: StoreTicket) -> None:
        """Note that somebody was told of a failure."""
        with self._lock:
            self._unreported.pop(ticket, None)

    def in_flight(self) -> list[StoreTicket]:
        """Tickets that are not reaped, oldest first."""
        with self._lock:
            return list(self.flying)

    def past(self, *, writes: bool) -> list[PastTransfer]:
        """The last reads or writes that went well and were reaped, in the order of reaping."""
        with self._lock:
            return [PastTransfer(*past) for past in (self._past_writes if writes else self._past_reads)]

    def reap_finished(self) -> None:
        """Reap what is over."""
        for ticket in self.in_flight():
            ticket.done()

    def await_puts(self, limit_s: float) -> None:
        """Wait until the puts that are in flight now are over, well or badly.

        Raises:
            SwapDeadlineError: they did not finish in time.
        """
        end = time.monotonic() + limit_s
        for ticket in self.in_flight():
            if ticket.writes:
                ticket.wait_reaped(end, limit_s)

    def drain(self, limit_s: float) -> None:
        """Wait until nothing is in flight.

        Raises:
            SwapDeadlineError: transfers did not finish in time.
            SwapError: the first failure that nobody has waited for.
        """
        end = time.monotonic() + limit_s
        while waiting := self.in_flight():
            waiting[0].wait_reaped(end, limit_s)
        with self._lock:
            failed = list(self._unreported.values())
            self._unreported.clear()
        if failed:
            raise failed[0]


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
        aligned = round_up(start, alignment)
        return cls(memory, aligned, part.wanted_first - part.first, target, part.wanted_last - part.wanted_first)

    def copy(self) -> None:
        """Copy the wanted part to its place."""
        ctypes.memmove(self.target, self.address + self.skip, self.length)
