"""A few buffers between memory and the files of a checkpoint, and the thread that takes checksums of them.

Owns the buffers, who has them, and the checksums of blocks. Knows neither torch nor tensors. Next:
:mod:`offload.checkpoint.format.writer` and :mod:`offload.checkpoint.format.reader`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
import os
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from offload.checkpoint.format.index import BLOCK_BYTES
from offload.errors import CheckpointError
from offload.sizes import HUGE_PAGE_BYTES, MIB, PAGE_BYTES, round_up
from swap import Aio, Priority, Ticket
from swap.io.aio import file_facts
from swap.lifetime import leave

BUFFERS = 32  # half of them keep a drive busy while the others wait for their turn
BUFFER_BYTES = 2 * MIB


class Staging:
    """Buffers of one size, an I/O engine and one thread; a context manager.

    Attributes:
        count: of buffers.
        size_bytes: of each buffer.
        aio: moves them from and to files.
        priority: of what it moves, among all that this engine moves.
    """

    def __init__(self, count: int, size_bytes: int, *, deadline_s: float, aio: Aio | None = None) -> None:
        """Take the memory: `count` buffers of `size_bytes`, whole pages; `aio` is somebody's who closes it."""
        self.count = count
        self.size_bytes = size_bytes
        self.priority = Priority.NORMAL
        self._memory = mmap.mmap(-1, count * size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        with contextlib.suppress(OSError):  # a kernel without huge pages: slower, not wrong
            self._memory.madvise(mmap.MADV_HUGEPAGE)
        start = round_up(ctypes.addressof(ctypes.c_char.from_buffer(self._memory)), HUGE_PAGE_BYTES)
        self._free = deque(start + number * size_bytes for number in range(count))
        self._flying: deque[tuple[int, Sequence[Ticket], Future[None]]] = deque()  # the oldest first
        self._late: list[Ticket] = []  # that were not over in time: their buffers and files are theirs
        self._unclosed: list[OpenFile] = []
        self.aio = Aio(deadline_s=deadline_s) if aio is None else aio
        self._closes_aio = aio is None
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")

    def take(self) -> int:
        """Return the address of a buffer, which is the caller's until :meth:`give`; waits for one that is leaving."""
        if not self._free:
            assert self._flying, "every buffer is somebody's"
            self._land()
        return self._free.popleft()

    def give(self, address: int, tickets: Sequence[Ticket] = (), work: Future[None] | None = None) -> None:
        """Give a buffer back that is free when the transfers and the work are over."""
        if tickets or work is not None:
            self._flying.append((address, tickets, work or _nothing()))
        else:
            self._free.append(address)

    def step_back(self) -> None:
        """Let what is moved from now on be what nobody waits for; who moves it takes the checksums, too."""
        self.priority = Priority.BACKGROUND

    def in_turn(self, work: Callable[[], None]) -> Future[None]:
        """Have the thread do `work` behind what it was given before."""
        if self.priority is not Priority.BACKGROUND:
            try:
                return self._thread.submit(work)
            except RuntimeError as error:
                if "new futures" not in str(error):  # a thread that cannot start has the work in its queue
                    raise
        work()  # the interpreter ends: the thread has ended with all its work
        return _nothing()

    def land(self) -> None:
        """Wait until nothing is in flight; raise the first error."""
        while self._flying:
            self._land()

    def settle(self) -> None:
        """Wait until nothing is in flight, whatever becomes of it: an error is on its way up, or was."""
        while self._flying:
            with contextlib.suppress(Exception):
                self._land()

    def _land(self) -> None:
        address, tickets, work = self._flying.popleft()
        try:
            for ticket in tickets:
                ticket.wait(0.0 if self._late else None)  # the drive hangs: nobody waits as long for each of them
        finally:
            late = [ticket for ticket in tickets if not ticket.done()]
            self._late += late
            if not late:
                self._free.append(address)
            work.result()

    def close_file(self, file: OpenFile) -> None:
        """Close a file; not before the end where something may come late that would meet another one of its number."""
        if self._has_landed():
            file.close()
        else:
            self._unclosed.append(file)

    def _has_landed(self) -> bool:
        return all(ticket.done() for ticket in self._late)

    def __enter__(self) -> Staging:
        return self

    def __exit__(self, *error: object) -> None:
        self.settle()
        self._thread.shutdown()
        try:
            if self._closes_aio:
                self.aio.close()
        finally:
            if self._has_landed():
                for file in self._unclosed:
                    file.close()
            else:
                leave((self._memory, self._unclosed))


def _nothing() -> Future[None]:
    done: Future[None] = Future()
    done.set_result(None)
    return done


class Checksums:
    """CRC-32 of the blocks of a range whose bytes come one behind the other."""

    def __init__(self) -> None:
        self._done: list[int] = []
        self._crc = 0
        self._filled = 0  # bytes of the block under way

    def update(self, address: int, size_bytes: int) -> None:
        """Take the next bytes."""
        while size_bytes:
            part = min(size_bytes, BLOCK_BYTES - self._filled)
            self._crc = zlib.crc32((ctypes.c_char * part).from_address(address), self._crc)
            self._filled, address, size_bytes = self._filled + part, address + part, size_bytes - part
            if self._filled == BLOCK_BYTES:
                self._end_block()

    def result(self) -> tuple[int, ...]:
        """Return the checksums when all bytes have come."""
        if self._filled:
            self._end_block()
        return tuple(self._done)

    def _end_block(self) -> None:
        self._done.append(self._crc)
        self._crc = self._filled = 0


class OpenFile:
    """A file of a checkpoint, opened twice: for transfers of whole pages past the page cache, and for the rest."""

    def __init__(self, path: Path, aio: Aio, *, write: bool) -> None:
        """Open it; with `write`, make it.

        Raises:
            CheckpointError: it cannot be opened.
        """
        flags = os.O_CLOEXEC | (os.O_RDWR | os.O_CREAT | os.O_EXCL if write else os.O_RDONLY)
        try:
            self.fd = os.open(path, flags, 0o666)
        except OSError as error:
            verb = "written" if write else "read"
            raise CheckpointError(f"checkpoint file {path}: cannot be {verb}: {error.strerror or error}") from error
        self.path = path
        self.size_bytes = os.fstat(self.fd).st_size
        self._aio = aio
        self.direct_fd = self._open_direct(flags & ~(os.O_CREAT | os.O_EXCL))
        aio.register_file(self.direct_fd, str(path))

    @property
    def direct(self) -> bool:
        """Whether transfers pass by the page cache, and so must be whole pages."""
        return self.direct_fd != self.fd

    def _open_direct(self, flags: int) -> int:
        facts = file_facts(self.fd)
        if facts.in_memory or facts.direct_refused or max(facts.memory_alignment, facts.offset_alignment) > PAGE_BYTES:
            return self.fd
        try:
            return os.open(self.path, flags | os.O_DIRECT)
        except OSError:  # the file system has none: the page cache is used
            return self.fd

    def write_part(self, address: int, size_bytes: int, offset: int) -> None:
        """Write less than a page."""
        data = ctypes.string_at(address, size_bytes)
        while data:
            written = os.pwrite(self.fd, data, offset)
            data, offset = data[written:], offset + written

    def sync(self) -> None:
        """Return when the content is on the drive, and leave the page cache to others."""
        os.fsync(self.fd)
        if hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close it; nothing may be in flight."""
        self._aio.unregister_file(self.direct_fd)
        if self.direct:
            os.close(self.direct_fd)
        os.close(self.fd)
