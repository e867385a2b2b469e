r"""The swap store: objects of bytes under keys, on disk, written by copy-on-write.

Owns: the swap files, which extents hold which version of which key, and the order in which versions replace
each other. Must not know: what the bytes mean; tensors, shards, budgets of other tiers.
Next: `space` for the extents, `files` for how files come into being, `aio` for the transfers.

A put never touches the bytes that are valid now. It writes to a fresh extent; when the write has been reaped
successfully the key is mapped to the new extent, and the old one becomes free once no read is in flight on
it:

    put(k) --> fresh extent --write--> reaped well:  mapping[k] = fresh, old extent freed
                                   \-> failed:       fresh extent freed, mapping[k] as before

The files have no name from the moment they exist, so nothing is left behind however the process ends.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import logging
import os
import threading
import time
import weakref
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from swap.aio import Aio, IoTicket, Priority
from swap.errors import SwapDeadlineError, SwapError, SwapFullError, format_bytes
from swap.faults import Fault
from swap.files import capacities_by_free_space, open_unlinked, reserve
from swap.space import Piece, Space
from swap.stats import SwapStats

_log = logging.getLogger(__name__)


@dataclass(slots=True, eq=False)
class _Version:
    """Bytes of a key as of one put."""

    pieces: tuple[Piece, ...]
    length: int
    readers: int = 0
    replaced: bool = False


class StoreTicket:
    """Ticket of one put or get. Reaping it (`wait`, or `done` answering True) lets a put take effect."""

    __slots__ = ("_error", "_io", "_key", "_put", "_settled", "_store", "_superseded", "_version")

    def __init__(self, store: SwapStore, key: Hashable, version: _Version, *, put: bool) -> None:
        self._store = store
        self._key = key
        self._version = version
        self._put = put
        self._io: list[IoTicket] = []
        self._settled = False
        self._superseded = False  # a later put of the key took effect first, or the key was deleted
        self._error: SwapError | None = None

    def done(self) -> bool:
        """Tell whether the transfer is over, well or badly. A put that went well has taken effect then."""
        if not self._settled and all(io.done() for io in self._io):
            self._store._settle(self)
        return self._settled

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the transfer is over.

        Args:
            timeout_s: seconds to wait at most; None uses the deadline of the store.

        Raises:
            SwapDeadlineError: not over in time; it stays in flight, its memory must not be reused, and it may
                be waited for again.
            SwapFullError: the file system is full although the file was preallocated.
            SwapError: the transfer failed. A failed put leaves the version before it in place.
        """
        limit_s = self._store.deadline_s if timeout_s is None else timeout_s
        self._wait_settled(time.monotonic() + limit_s, limit_s)
        self._store._reported(self)
        if self._error is not None:
            raise self._error

    def _wait_settled(self, end: float, limit_s: float) -> None:
        """Wait until `end` (of the monotonic clock), after `limit_s` seconds in the message."""
        for io in self._io:
            if not io.wait_done(end - time.monotonic()):
                raise io.deadline_error(limit_s, self._store.dump())
        self._store._settle(self)

    def _describe(self) -> str:
        return f"{'put' if self._put else 'get'} {self._key!r}"


class SwapStore:
    """Objects of bytes on disk; see the module docstring for what a put promises. Safe from several threads.

    Addresses, offsets and lengths are multiples of `alignment`; a length that is not is rounded up, and the
    caller's buffer must be padded accordingly. Memory given to `put` and `get` must stay valid and untouched
    until the ticket is done. A put needs room for the new version while the old one still exists.

    Attributes:
        alignment: bytes, a multiple of 4096.
        capacity_bytes: size of all files together.
        direct: whether the page cache is bypassed on every path.
        engine: "io_uring" or "threads".
        fallback_reason: why it is not io_uring, or None.
        deadline_s: limit in seconds of waits that give none.
        paths: directories that hold the files.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        capacity_bytes: int,
        *,
        engine: str = "auto",
        deadline_s: float = 60.0,
        faults: Iterable[Fault] | None = None,
        queue_depth: int = 32,
        block_bytes: int = 1 << 20,
        threads: int = 4,
    ) -> None:
        """Create and preallocate the swap files.

        Args:
            paths: existing directories; the capacity is spread over them in proportion to their free space.
            capacity_bytes: size of all files together, rounded down to the alignment.
            engine: "auto", "io_uring" or "threads"; see `swap.aio.Aio`.
            deadline_s: limit in seconds of waits that give none.
            faults: faults to inject, for tests.
            queue_depth: requests given to the kernel at a time (io_uring).
            block_bytes: largest request; longer transfers are cut. A multiple of 4096.
            threads: workers of the thread engine.

        Raises:
            SwapFullError: the file systems have not enough room; the text names needed and free bytes per
            path.
            SwapError: a directory is missing or not writable, or the engine asked for does not work here.
            ValueError: no path, or a capacity below the alignment.
        """
        directories = [paths] if isinstance(paths, (str, Path)) else list(paths)
        if not directories:
            raise ValueError("paths: expected at least one directory but got none")
        self.deadline_s = deadline_s
        self._pid = os.getpid()
        self._lock = threading.RLock()
        self._versions: dict[Hashable, _Version] = {}
        self._pending_puts: dict[Hashable, list[StoreTicket]] = {}
        self._in_flight: dict[int, StoreTicket] = {}
        self._unreported: dict[int, StoreTicket] = {}
        self._closed = False
        self.paths = tuple(str(directory) for directory in directories)
        with contextlib.ExitStack() as undo:
            files = []
            for path in self.paths:
                files.append(open_unlinked(path))
                undo.callback(os.close, files[-1].fd)
            self.alignment = max(file.alignment for file in files)
            self.capacity_bytes = capacity_bytes // self.alignment * self.alignment
            if self.capacity_bytes <= 0:
                raise ValueError(f"capacity_bytes: expected at least {self.alignment} bytes but got {capacity_bytes}")
            capacities = capacities_by_free_space(files, self.capacity_bytes, self.alignment)
            for file, capacity in zip(files, capacities, strict=True):
                if capacity:
                    reserve(file, capacity)
            self._space = Space(capacities, self.alignment)
            self._aio = Aio(
                engine=engine,
                queue_depth=queue_depth,
                block_bytes=block_bytes,
                threads=threads,
                deadline_s=deadline_s,
                faults=faults or (),
            )
            undo.pop_all()
        self._files = files
        self.engine = self._aio.engine
        self.fallback_reason = self._aio.fallback_reason
        self.direct = all(file.direct for file in files)
        for file in files:
            self._aio.register_file(file.fd, file.directory)
        if self.fallback_reason:
            _log.warning("swap: io_uring cannot be used, threads are used instead: %s", self.fallback_reason)
        self._finalizer = weakref.finalize(self, _clean_up, self._aio, [file.fd for file in files], self._pid)
        _open.add(self)

    # ---- objects ----

    def put(self, key: Hashable, address: int, length: int) -> StoreTicket:
        """Start writing a new version of `key`. It takes effect when the ticket has been reaped successfully.

        Of several puts of one key in flight, the one started last wins. Blocks only when the store has no
        room until transfers in flight are over.

        Raises:
            ValueError: address not aligned, or length not positive.
            SwapFullError: no room even when nothing is in flight any more.
            SwapDeadlineError: no room because transfers in flight do not finish.
            SwapError: the store is closed or belongs to the parent process.
        """
        self._check_usable()
        self._check_address(address)
        if length <= 0:
            raise ValueError(f"put {key!r}: expected a length of more than 0 bytes but got {length}")
        need = self._round_up(length)
        end = time.monotonic() + self.deadline_s
        while True:
            with self._lock:
                self._check_usable()
                if pieces := self._allocate(need):
                    ticket = StoreTicket(self, key, _Version(pieces, need), put=True)
                    try:
                        self._start(ticket, address, 0, need, Priority.NORMAL)
                    except BaseException:
                        self._replace(ticket._version)
                        raise
                    self._pending_puts.setdefault(key, []).append(ticket)
                    return ticket
                blocking = self._oldest_in_flight()
            if blocking is None:
                raise SwapFullError(
                    f"swap store: put {key!r} needs {format_bytes(need)} but "
                    f"{format_bytes(self.free_bytes)} of {format_bytes(self.capacity_bytes)} are free",
                    length_bytes=need,
                    remedy="give the store more capacity or delete objects; "
                    "a put needs room beside the version that it replaces",
                )
            blocking._wait_settled(end, self.deadline_s)

    def get(self, key: Hashable, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> StoreTicket:
        """Start reading the current version of `key`, or `length` bytes of it from `offset`.

        Args:
            key: which object.
            address: where to, a multiple of the alignment.
            length: bytes; the buffer holds it rounded up to the alignment.
            offset: first byte within the object, a multiple of the alignment.
            urgent: overtake everything that waits and is not urgent (something waits for these bytes).

        Raises:
            KeyError: the key has no version (never put, put not reaped yet, or deleted).
            ValueError: not aligned, or the range is not inside the object.
            SwapError: the store is closed or belongs to the parent process.
        """
        self._check_usable()
        self._check_address(address)
        need = self._round_up(length)
        with self._lock:
            version = self._version(key)
            if length <= 0 or offset < 0 or offset % self.alignment or offset + need > version.length:
                raise ValueError(
                    f"get {key!r}: expected a range inside {version.length} bytes, starting at a multiple of "
                    f"{self.alignment}, but got offset {offset}, length {length}"
                )
            ticket = StoreTicket(self, key, version, put=False)
            version.readers += 1
            try:
                self._start(ticket, address, offset, need, Priority.URGENT if urgent else Priority.NORMAL)
            except BaseException:
                version.readers -= 1
                raise
        return ticket

    def delete(self, key: Hashable) -> None:
        """Forget `key`; puts of it that are in flight will have no effect. Reads in flight still succeed.

        Raises:
            KeyError: the key has no version and no put in flight.
        """
        self._check_usable()
        with self._lock:
            pending = self._pending_puts.pop(key, [])
            if key not in self._versions and not pending:
                raise KeyError(f"{key!r}: no such object in the swap store")
            for ticket in pending:
                ticket._superseded = True
            if version := self._versions.pop(key, None):
                self._replace(version)

    def length_of(self, key: Hashable) -> int:
        """Length in bytes of the current version, rounded up to the alignment.

        Raises:
            KeyError: the key has no version.
        """
        with self._lock:
            return self._version(key).length

    def __contains__(self, key: Hashable) -> bool:
        with self._lock:
            return key in self._versions

    def __len__(self) -> int:
        with self._lock:
            return len(self._versions)

    def keys(self) -> list[Hashable]:
        """Keys that have a version, as of now."""
        with self._lock:
            return list(self._versions)

    # ---- the whole store ----

    @property
    def used_bytes(self) -> int:
        """Bytes in extents: current versions, versions being written, old versions being read."""
        with self._lock:
            return self._space.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that a put could take now."""
        with self._lock:
            return self._space.free_bytes

    def drain(self, deadline_s: float | None = None) -> None:
        """Wait until nothing is in flight; all successful puts have taken effect then.

        Raises:
            SwapDeadlineError: transfers did not finish in time.
            SwapError: the first failure that nobody has waited for.
        """
        self._check_usable()
        limit_s = self.deadline_s if deadline_s is None else deadline_s
        end = time.monotonic() + limit_s
        while ticket := self._oldest_in_flight():
            ticket._wait_settled(end, limit_s)
        with self._lock:
            failed = list(self._unreported.values())
            self._unreported.clear()
        for ticket in failed:
            if ticket._error is not None:
                raise ticket._error

    def register_buffer(self, address: int, length: int) -> bool:
        """Pin a memory range once for all transfers (best effort); see `swap.aio.Aio.register_buffer`."""
        self._check_usable()
        return self._aio.register_buffer(address, length)

    def unregister_buffer(self, address: int) -> None:
        """Forget a range given to `register_buffer`, before the memory is unmapped."""
        self._check_usable()
        self._aio.unregister_buffer(address)

    def inject(self, fault: Fault) -> None:
        """Plan a fault, for tests."""
        self._aio.inject(fault)

    def clear_faults(self) -> None:
        """Drop all planned faults."""
        self._aio.clear_faults()

    def stats(self) -> SwapStats:
        """Counters since the store was opened."""
        io = self._aio.stats()
        with self._lock:
            return SwapStats(
                read_bytes=io.read_bytes,
                written_bytes=io.write_bytes,
                read_seconds=io.read_seconds,
                write_seconds=io.write_seconds,
                reads=io.reads,
                writes=io.writes,
                read_latency=io.read_latency,
                write_latency=io.write_latency,
                in_flight=io.in_flight,
                peak_in_flight=io.peak_in_flight,
                queue_depth=io.queue_depth,
                peak_queue_depth=io.peak_queue_depth,
                used_bytes=self.used_bytes,
                peak_used_bytes=self._space.peak_used_bytes,
                capacity_bytes=self.capacity_bytes,
                engine=self.engine,
                fallback_reason=self.fallback_reason,
                direct=self.direct,
                paths=self.paths,
            )

    def dump(self) -> str:
        """State of the store and its engine, for error messages."""
        if self._pid != os.getpid():
            return "swap store of the parent process"
        with self._lock:
            lines = [
                f"swap store: {len(self._versions)} objects, {self.used_bytes} of {self.capacity_bytes} "
                f"bytes used, {len(self._in_flight)} tickets not reaped"
            ]
            lines += [
                f"  {path}: {extents.used_bytes} of {extents.capacity} bytes used, "
                f"longest free range {extents.largest_free}"
                for path, extents in zip(self.paths, self._space.allocators, strict=True)
            ]
            waiting = [ticket._describe() for ticket in list(self._in_flight.values())[:8]]
            lines += [f"  oldest: {', '.join(waiting)}"] if waiting else []
            lines.append(self._aio.dump())
        return "\n".join(lines)

    @property
    def closed(self) -> bool:
        """True after `close`."""
        return self._closed

    def close(self) -> None:
        """Wait for the transfers in flight, stop the engine, drop the files.

        Idempotent; does nothing in a forked child.

        Raises:
            SwapDeadlineError: transfers did not finish in time (the store is closed nevertheless); if the
                text says that the kernel still holds them, their memory must not be reused.
        """
        if self._pid != os.getpid() or self._closed:
            return
        with self._lock:
            self._closed = True
            _open.discard(self)
        try:
            self._aio.close(self.deadline_s)
        finally:
            for ticket in list(self._in_flight.values()):
                ticket.done()
            self._finalizer()

    def __enter__(self) -> SwapStore:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- inside ----

    def _check_usable(self) -> None:
        if self._pid != os.getpid():
            raise SwapError(
                "swap store: it belongs to the parent process",
                errno=_errno.ECHILD,
                remedy="open one after fork()",
            )
        if self._closed:
            raise SwapError("swap store: it is closed", errno=_errno.EBADF, remedy="open a new one")

    def _check_address(self, address: int) -> None:
        if address <= 0 or address % self.alignment:
            raise ValueError(f"address: expected a multiple of {self.alignment} but got {address:#x}")

    def _round_up(self, length: int) -> int:
        return -(-length // self.alignment) * self.alignment

    def _version(self, key: Hashable) -> _Version:
        version = self._versions.get(key)
        if version is None:
            why = "its first put has not been reaped" if key in self._pending_puts else "no such object"
            raise KeyError(f"{key!r}: {why} in the swap store")
        return version

    def _start(self, ticket: StoreTicket, address: int, offset: int, length: int, priority: Priority) -> None:
        """Submit the part [offset, offset + length) of the ticket's version, piece by piece. Locked."""
        start = 0
        submit = self._aio.write if ticket._put else self._aio.read
        for piece in ticket._version.pieces:
            first = max(offset, start)
            last = min(offset + length, start + piece.extent.length)
            if first < last:
                at = piece.extent.offset + first - start
                where = address + first - offset
                ticket._io.append(submit(self._files[piece.file].fd, at, where, last - first, priority=priority))
            start += piece.extent.length
        self._in_flight[id(ticket)] = ticket

    def _oldest_in_flight(self) -> StoreTicket | None:
        with self._lock:
            return next(iter(self._in_flight.values()), None)

    def _allocate(self, need: int) -> tuple[Piece, ...]:
        """Take `need` bytes; () when there is no room even after what is over was reaped. Locked."""
        if self._space.free_bytes < need:
            for ticket in list(self._in_flight.values()):
                ticket.done()
        return self._space.allocate(need)

    def _settle(self, ticket: StoreTicket) -> None:
        """Let a finished transfer take effect, once. All its pieces must be done."""
        with self._lock:
            if ticket._settled:
                return
            ticket._settled = True
            self._in_flight.pop(id(ticket), None)
            ticket._error = next((error for io in ticket._io if (error := io.error())), None)
            if ticket._error is not None:
                self._unreported[id(ticket)] = ticket
            if ticket._put:
                self._settle_put(ticket)
            else:
                ticket._version.readers -= 1
                self._free_if_unused(ticket._version)

    def _settle_put(self, ticket: StoreTicket) -> None:
        key = ticket._key
        pending = self._pending_puts.get(key, [])
        if ticket in pending:
            at = pending.index(ticket)
            if ticket._error is None:  # what was started before must not overwrite it later
                for earlier in pending[:at]:
                    earlier._superseded = True
                del pending[: at + 1]
            else:
                del pending[at]
            if not pending:
                del self._pending_puts[key]
        if ticket._error is not None or ticket._superseded:
            self._replace(ticket._version)
            return
        old = self._versions.get(key)
        self._versions[key] = ticket._version
        if old is not None:
            self._replace(old)

    def _replace(self, version: _Version) -> None:
        version.replaced = True
        self._free_if_unused(version)

    def _free_if_unused(self, version: _Version) -> None:
        if version.replaced and version.readers == 0:
            self._space.free(version.pieces)

    def _reported(self, ticket: StoreTicket) -> None:
        if ticket._error is not None:
            with self._lock:
                self._unreported.pop(id(ticket), None)


# ---- end of a store, a process, a fork ----

_open: weakref.WeakSet[SwapStore] = weakref.WeakSet()


def _clean_up(aio: Aio, fds: Sequence[int], pid: int) -> None:
    """Stop the engine and close the files; runs once, at close, when a store is dropped, or at exit."""
    if os.getpid() != pid:
        return
    try:
        aio.close(min(aio.deadline_s, 5.0))
    except SwapDeadlineError:
        _log.warning("swap: transfers were still in flight when the store went away")
    if aio.ended:  # otherwise a worker might use a number that names another file by then
        for fd in fds:
            os.close(fd)


def _abandon_in_child() -> None:
    """A forked child must not keep the space of unlinked files alive."""
    for store in list(_open):
        for file in store._files:
            with contextlib.suppress(OSError):
                os.close(file.fd)


os.register_at_fork(after_in_child=_abandon_in_child)
