"""Asynchronous reads and writes between raw memory and files: the typed face of the extension.

Owns: the choice of the engine (io_uring, or threads where io_uring is missing or forbidden), argument checks,
error texts, deadlines, behaviour after a fork and at exit.
Must not know: extents, keys, which bytes matter; it moves what it is told to move.
Next: `operations` for jobs and tickets; `store` builds the swap store on one `Aio`; csrc/aio/engine.h is the other
side.

Example:
    >>> aio = Aio()
    >>> ticket = aio.write(fd, 0, address, length)   # returns at once; the memory must stay alive
    >>> ticket.wait(None)                            # raises SwapError if the write failed
"""

from __future__ import annotations

import atexit
import contextlib
import errno as _errno
import os
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

from swap.errors import SwapDeadlineError, SwapError
from swap.io.extension import _aio
from swap.io.faults import Fault, FaultTarget
from swap.io.operations import IoTicket, Job, Priority, Ticket, wait_all
from swap.stats import AioStats, Latency

__all__ = [
    "Aio",
    "FileFacts",
    "IoTicket",
    "Job",
    "Priority",
    "Ticket",
    "engines_available",
    "file_facts",
    "is_memory_held",
    "preallocate",
    "uring_refusal",
    "wait_all",
]

_ENGINE_VARIABLE = "OFFLOAD_AIO_ENGINE"
_ENGINES = ("io_uring", "threads")


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What the kernel says about an open file.

    Attributes:
        memory_alignment: of addresses for direct I/O, bytes; 0 when not known.
        offset_alignment: of offsets and lengths for direct I/O, bytes; 0 when not known or not possible.
        direct_refused: the kernel says that direct I/O is not possible on this file.
        in_memory: the file system keeps its files in memory (tmpfs, ramfs).
    """

    memory_alignment: int
    offset_alignment: int
    direct_refused: bool
    in_memory: bool


def file_facts(fd: int) -> FileFacts:
    """Ask the kernel about an open file (statx, statfs).

    Raises:
        SwapError: the descriptor is not open.
    """
    with _as_swap_error():
        facts = _aio.file_facts(fd)
    return FileFacts(
        memory_alignment=facts["memory_alignment"],
        offset_alignment=facts["offset_alignment"],
        direct_refused=facts["alignment_known"] and facts["offset_alignment"] == 0,
        in_memory=facts["in_memory"],
    )


def preallocate(fd: int, length: int, first: int = 0) -> int:
    """Reserve the bytes of a file from `first` to `length` (fallocate); returns 0 or the errno of the refusal."""
    return _aio.preallocate(fd, length, first)


def engines_available() -> tuple[str, ...]:
    """Engines that work here and now, best first. Probes the kernel, which costs well under a millisecond."""
    return _ENGINES if not _uring_refusal() else _ENGINES[1:]


def uring_refusal() -> str | None:
    """Why io_uring cannot be used here, or None when it can."""
    return _uring_refusal() or None


def _uring_refusal() -> str:
    return _aio.uring_refusal()


def _engine_asked(engine: str) -> str:
    """The engine asked for, by the environment if `engine` is "auto"."""
    asked = os.environ.get(_ENGINE_VARIABLE, "auto") or "auto" if engine == "auto" else engine
    if asked not in ("auto", *_ENGINES):
        source = f"environment variable {_ENGINE_VARIABLE}" if engine == "auto" else "engine"
        raise ValueError(f"{source}: expected auto, io_uring or threads but got {asked!r}")
    return asked


def _open_engine(asked: str, queue_depth: int, block_bytes: int, threads: int) -> tuple[_aio.Engine, str | None]:
    """Open the engine asked for, or the thread engine with the reason why "auto" could not be io_uring."""
    refusal = None
    if asked != "threads":
        refusal = _uring_refusal()
        if not refusal:
            try:
                return _aio.Engine("io_uring", queue_depth, block_bytes, threads), None
            except OSError as error:
                refusal = str(error.strerror)
        if asked == "io_uring":
            raise SwapError(
                f"io_uring: it was asked for but cannot be used here: {refusal}",
                remedy='use engine="threads" (or "auto")',
            )
    try:
        return _aio.Engine("threads", queue_depth, block_bytes, threads), refusal
    except OSError as error:
        raise SwapError(
            "thread engine: cannot start its workers",
            errno=error.errno,
            remedy="raise the limit of processes (ulimit -u)",
        ) from None


class Aio:
    """One submission queue for asynchronous reads and writes; safe from several threads.

    Attributes:
        engine: name of the engine in use, "io_uring" or "threads".
        fallback_reason: why it is not io_uring, or None when it is, or when threads were asked for.
        deadline_s: limit in seconds of waits that give none.
    """

    def __init__(
        self,
        *,
        engine: str = "auto",
        queue_depth: int = 32,
        block_bytes: int = 4 << 20,
        threads: int = 4,
        deadline_s: float = 60.0,
    ) -> None:
        """Open an engine.

        Args:
            engine: "auto" (io_uring where it works, else threads; the environment variable OFFLOAD_AIO_ENGINE
                decides when set), "io_uring" or "threads".
            queue_depth: requests given to the kernel at a time (io_uring).
            block_bytes: largest request; longer operations are cut. A multiple of 4096.
            threads: workers of the thread engine.
            deadline_s: limit in seconds of waits that give none.

        Raises:
            ValueError: unknown engine or impossible numbers.
            SwapError: the engine asked for does not work here; the text says why.
        """
        if not deadline_s > 0:
            raise ValueError(f"deadline_s: expected more than 0 seconds but got {deadline_s}")
        self.deadline_s = deadline_s
        self._pid = os.getpid()
        self._names: dict[int, str] = {}
        self._closed = False
        self._ended = False
        self._close_lock = threading.Lock()
        self._engine, self.fallback_reason = _open_engine(_engine_asked(engine), queue_depth, block_bytes, threads)
        self.engine: str = self._engine.name
        _open.add(self)

    def read(
        self, fd: int, offset: int, address: int, length: int, *, priority: Priority = Priority.NORMAL
    ) -> IoTicket:
        """Start reading `length` bytes at `offset` of a file into memory.

        The memory must stay valid and untouched, and the file open, until the ticket is done.

        Raises:
            ValueError: impossible numbers.
            SwapError: the engine is closed or belongs to the parent process.
        """
        return self.submit([Job(False, fd, offset, address, length, priority)])[0]

    def write(
        self, fd: int, offset: int, address: int, length: int, *, priority: Priority = Priority.NORMAL
    ) -> IoTicket:
        """Start writing `length` bytes from memory to `offset` of a file; see `read`."""
        return self.submit([Job(True, fd, offset, address, length, priority)])[0]

    def submit(self, jobs: Sequence[Job]) -> list[IoTicket]:
        """Start several reads and writes, all or none; cheaper than one call each.

        Returns:
            One ticket per job, in the same order.

        Raises:
            ValueError: impossible numbers.
            SwapError: the engine is closed or belongs to the parent process, or a thread for checksums cannot be
                started.
        """
        with _as_swap_error():
            operations = self._engine.submit(jobs)
        return [IoTicket(self, operation, job) for operation, job in zip(operations, jobs, strict=True)]

    def register_file(self, fd: int, name: str | None = None) -> bool:
        """Let the kernel look the file up once (best effort) and name it in errors.

        Call `unregister_file` before the descriptor is closed.
        """
        if name is not None:
            self._names[fd] = name
        with _as_swap_error():
            return self._engine.register_file(fd)

    def name_of(self, fd: int) -> str:
        """What errors call a file."""
        return self._names.get(fd) or f"file descriptor {fd}"

    def unregister_file(self, fd: int) -> None:
        """Forget a file given to `register_file`."""
        self._names.pop(fd, None)
        with _as_swap_error():
            self._engine.unregister_file(fd)

    def register_buffer(self, address: int, length: int) -> bool:
        """Let the kernel pin a memory range once instead of at every request: 40 % less CPU time. Best effort.

        Call `unregister_buffer` before the memory is unmapped: the kernel goes on using the old pages
        otherwise.

        Returns:
            False when refused (thread engine, old kernel or liburing, lock limit): everything works without.
        """
        with _as_swap_error():
            return self._engine.register_buffer(address, length)

    def unregister_buffer(self, address: int) -> None:
        """Forget a range given to `register_buffer`. Nothing may be in flight on it."""
        with _as_swap_error():
            self._engine.unregister_buffer(address)

    def inject(self, fault: Fault) -> None:
        """Plan a fault, for tests."""
        with _as_swap_error():
            self._engine.plan_fault(
                fault.action.value,
                fault.nth,
                fault.forever,
                fault.target is not FaultTarget.WRITES,
                fault.target is not FaultTarget.READS,
                fault.errno,
                fault.short_bytes,
                fault.delay_s,
            )

    def clear_faults(self) -> None:
        """Drop all planned faults."""
        with _as_swap_error():
            self._engine.clear_faults()

    def stats(self) -> AioStats:
        """Counters since the engine was opened."""
        with _as_swap_error():
            c = self._engine.counters()
        return AioStats(
            reads=c["reads"],
            read_bytes=c["read_bytes"],
            read_errors=c["read_errors"],
            read_seconds=c["read_seconds"],
            read_latency=Latency(*c["read_latency"]),
            writes=c["writes"],
            write_bytes=c["write_bytes"],
            write_errors=c["write_errors"],
            write_seconds=c["write_seconds"],
            write_latency=Latency(*c["write_latency"]),
            in_flight=c["in_flight"],
            peak_in_flight=c["peak_in_flight"],
            queue_depth=c["queue_depth"],
            peak_queue_depth=c["peak_queue_depth"],
            short_transfers=c["short_transfers"],
            retries=c["retries"],
        )

    def await_idle(self) -> None:
        """Wait until nothing is in flight, for `deadline_s` at most: an error is on its way up."""
        end = time.monotonic() + self.deadline_s
        while self._engine.counters()["in_flight"] and time.monotonic() < end:
            time.sleep(1e-3)

    def dump(self) -> str:
        """State of the engine and the oldest operations in flight, for error messages."""
        return self._engine.dump()

    @property
    def ended(self) -> bool:
        """True when `close` left nothing running: descriptors and memory may be reused."""
        return self._ended

    def close(self, timeout_s: float | None = None) -> None:
        """Wait for the operations in flight and stop the engine. Idempotent; does nothing in a forked child.

        Args:
            timeout_s: seconds to wait at most; None uses `deadline_s`.

        Raises:
            SwapDeadlineError: operations did not finish in time. They are cancelled as far as the kernel lets
                go of them; if it does not, the memory they use must not be reused.
        """
        if self._pid != os.getpid():
            return
        limit_s = self.deadline_s if timeout_s is None else timeout_s
        with self._close_lock:
            if self._closed:
                return
            state = self._engine.dump()
            drained, self._ended = self._engine.close(limit_s)
            ended, self._closed = self._ended, True
            _open.discard(self)
            if not ended:
                _unended.append(self)
        if not drained:
            held = "were cancelled" if ended else "are still held by the kernel: do not reuse their memory"
            raise SwapDeadlineError(
                f"close of the I/O engine: expected an end within {limit_s:g} s but operations {held}",
                errno=_errno.ETIMEDOUT,
                remedy="look at the kernel log for a stuck device",
                detail=state,
            )

    def __enter__(self) -> Aio:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _as_swap_error(contextlib.AbstractContextManager[None]):
    """Turn the extension's OSError (closed, forked) into SwapError; one without a number is of a signal's handler."""

    __slots__ = ()

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, OSError) and error.errno is not None and not isinstance(error, SwapError):
            raise SwapError(str(error.strerror), errno=error.errno) from None


_open: weakref.WeakSet[Aio] = weakref.WeakSet()
_unended: list[Aio] = []  # whose close() has left something running


def is_memory_held() -> bool:
    """Tell whether operations of an engine that was closed are still held by the kernel: it may write to their memory.

    Nobody is told any more when that ends.
    """
    return bool(_unended)


def _abandon_in_child() -> None:
    for aio in list(_open):
        aio._engine.abandon_in_child()


def _close_at_exit() -> None:
    for aio in list(_open):
        with contextlib.suppress(SwapError):
            aio.close(min(aio.deadline_s, 5.0))


os.register_at_fork(after_in_child=_abandon_in_child)
atexit.register(_close_at_exit)
