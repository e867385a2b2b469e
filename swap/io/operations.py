"""One read or write, as it is asked for and as it is waited for.

Owns: jobs, tickets, waiting for many of them, and the text of an error of one operation.
Must not know: how an engine is chosen or opened.
Next: `aio` starts jobs and returns tickets.
"""

from __future__ import annotations

import errno as _errno
import time
from collections.abc import Sequence
from enum import IntEnum
from typing import NamedTuple, Protocol

from swap.errors import SwapCorruptError, SwapDeadlineError, SwapError, error_class
from swap.io.extension import _aio

_REMEDIES = {
    _errno.EIO: "the device failed: look at the kernel log and replace or avoid the drive",
    _errno.EINVAL: "direct I/O needs address, offset and length to be multiples of the file's alignment",
    _errno.EFAULT: "the address range is not (or no longer) mapped memory",
    _errno.EBADF: "the file is closed or was opened for another direction",
    _errno.ENODATA: "the file ends before the range does: it was truncated or never that long",
    _errno.ENOSPC: "free space on the file system or use another path",
    _errno.EDQUOT: "raise the quota or use another path",
    _errno.EROFS: "the file system became read-only: look at the kernel log",
    _errno.ECANCELED: "the engine was closed before the operation finished",
}


class Priority(IntEnum):
    """Order in which waiting operations go to the device: every urgent one before any normal one.

    While urgent operations keep coming, the device is also given fewer normal requests at a time, so that an urgent
    one does not wait behind a full queue. Use it for what computation waits for, not for everything.

    Background operations are for what nobody waits for: they take what the others leave, and a few MiB per second where
    these leave nothing.
    """

    BACKGROUND = 0
    NORMAL = 1
    URGENT = 2


class Ticket(Protocol):
    """One asynchronous operation."""

    def done(self) -> bool:
        """Tell whether the operation is over, well or badly. Neither blocks nor raises."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Block until the operation is over.

        Args:
            timeout_s: seconds to wait at most; None uses the deadline of the engine or store.

        Raises:
            SwapDeadlineError: not over in time; the operation stays in flight and may be waited for again.
            SwapError: the operation failed. Every wait on this ticket raises it.
        """


def wait_all(tickets: Sequence[Ticket], timeout_s: float | None = None) -> None:
    """Wait until several operations are over.

    Cheaper than to wait for them in their order: what was started last usually ends last, so whoever waits for that one
    first sleeps once and finds the others done.

    Args:
        tickets: in the order in which they were started.
        timeout_s: seconds to wait at most, for all of them; None uses the deadline of the engine or store for each.

    Raises:
        SwapDeadlineError: one is not over in time; all may be waited for again.
        SwapError: the first failure in the order of the tickets, when all are over.
    """
    end = None if timeout_s is None else time.monotonic() + timeout_s
    failure: SwapError | None = None
    for ticket in reversed(tickets):
        try:
            ticket.wait(None if end is None else max(end - time.monotonic(), 0.0))
        except SwapDeadlineError:
            raise
        except SwapError as error:
            failure = error
    if failure is not None:
        raise failure


class Job(NamedTuple):
    """One read or write for `Aio.submit`.

    Attributes:
        write: memory to file, else file to memory.
        fd: file.
        offset: first byte in the file.
        address: memory; it must stay valid and untouched until the ticket is done.
        length: bytes.
        priority: see `Priority`.
        granule_bytes: take (write) or compare (read) the CRC-32C of every so many bytes before the ticket is done;
            0 for none.
        expected: of a read with checksums, those of the range, as `IoTicket.checksums` gave them.
    """

    write: bool
    fd: int
    offset: int
    address: int
    length: int
    priority: Priority = Priority.NORMAL
    granule_bytes: int = 0
    expected: bytes = b""


class Issuer(Protocol):
    """What a ticket needs of the engine that issued it."""

    deadline_s: float

    def dump(self) -> str:
        """State of the engine, for messages."""

    def name_of(self, fd: int) -> str:
        """What errors call a file."""


class IoTicket:
    """Ticket of one read or write of an `Aio`."""

    __slots__ = ("_aio", "_job", "_operation", "_subject")

    def __init__(self, aio: Issuer, operation: _aio.Operation, job: Job) -> None:
        self._aio = aio
        self._operation = operation
        self._job = job
        self._subject = aio.name_of(job.fd)

    def done(self) -> bool:
        """See `Ticket.done`."""
        return self._operation.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """See `Ticket.wait`."""
        limit_s = self._aio.deadline_s if timeout_s is None else timeout_s
        if not self.wait_done(limit_s):
            raise self.deadline_error(limit_s, self._aio.dump())
        if error := self.error():
            raise error

    def wait_done(self, timeout_s: float) -> bool:
        """Block until the operation is over or `timeout_s` passed; tell whether it is over, not how it went.

        Raises:
            SwapError: the operation belongs to the parent process.
        """
        try:
            return self._operation.wait(max(timeout_s, 0.0))
        except OSError as error:
            if error.errno is None:  # a TimeoutError, say, of a signal's handler
                raise
            raise SwapError(str(error.strerror), errno=error.errno) from None

    def deadline_error(self, limit_s: float, state: str) -> SwapDeadlineError:
        """The error of a wait that gave up after `limit_s` seconds, with a state dump in its text."""
        return SwapDeadlineError(
            f"{self._what()}: expected a result within {limit_s:g} s but got none",
            errno=_errno.ETIMEDOUT,
            path=self._subject,
            offset_bytes=self._job.offset,
            length_bytes=self._job.length,
            remedy="look at the kernel log for a stuck device, or allow a longer deadline",
            detail=state,
        )

    def error(self) -> SwapError | None:
        """The error of a finished operation; None while it is in flight or when it succeeded."""
        code = self._operation.error
        if code == 0:
            return None
        at, length = self._operation.error_offset, self._operation.error_length
        expected, actual = self._operation.error_checksums
        if code == _errno.EBADMSG and expected != actual:
            return SwapCorruptError(
                f"{self._what()}: expected checksum {expected:#010x} at offset {at}, {length} bytes, "
                f"but got {actual:#010x}",
                errno=code,
                path=self._subject,
                offset_bytes=at,
                length_bytes=length,
                remedy="the drive, its cable or something that wrote to the file changed the bytes: use another copy",
            )
        return error_class(code)(
            f"{self._what()}: failed at offset {at}, {length} bytes",
            errno=code,
            path=self._subject,
            offset_bytes=at,
            length_bytes=length,
            remedy=_REMEDIES.get(code, "look at the kernel log"),
        )

    @property
    def checksums(self) -> bytes:
        """Checksums of a finished write that asked for them: a word of 4 bytes per granule."""
        return self._operation.checksums

    @property
    def times(self) -> tuple[float, float]:
        """When the operation was submitted and when it was over (else 0), in seconds of the monotonic clock."""
        return self._operation.times

    def _what(self) -> str:
        verb = "write" if self._job.write else "read"
        return f"{verb} of {self._job.length} bytes at offset {self._job.offset} of {self._subject}"
