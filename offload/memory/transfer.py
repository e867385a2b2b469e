"""Bytes on their way: one asynchronous copy is one Transfer, and a Mover starts them.

Owns what both promise, and how they are waited for. A transfer owns both ends until it has been waited for. Must not
know shards, states or schedules. Next: :mod:`offload.memory.cpu` and :mod:`offload.memory.accelerator` move.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Protocol

import torch

from offload.errors import OffloadError
from offload.memory.arena import Arena, Buffer
from offload.memory.budget import Claim
from offload.stats import Counters

logger = logging.getLogger(__name__)

PART_S = 1.0  # of a wait for a worker, and what it has at least when the process goes on
STOPPED_S = 0.5  # by which a part took longer than asked: the process was stopped


class CopyDeadlineError(OffloadError):
    """A copy by a worker has not ended in its time; it goes on."""


class LeftToWhoNeedsIt:
    """Lets what fails in a ``with`` block be met by whoever needs the bytes: nothing that was asked for has failed.

    These are errors of drives and devices, which are RuntimeErrors. A missed deadline is none, nor are the package's.
    One can be entered any number of times: most modules' forwards do.
    """

    def __init__(self, what: str) -> None:
        """Note what fails, for the log."""
        self._what = what

    def __enter__(self) -> None:
        """Begin the block."""

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if error is None or isinstance(error, (OffloadError, TimeoutError)):
            return False
        if not isinstance(error, (OSError, RuntimeError)):
            return False
        logger.warning("%s: %s", self._what, str(error))  # its text: the error knows frames, and so what they hold
        return True


class Ticket(Protocol):
    """An operation of the swap store under way."""

    def done(self) -> bool:
        """Tell whether waiting would return at once."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait; raise what went wrong."""


class Transfer(Protocol):
    """One asynchronous copy."""

    def done(self) -> bool:
        """Tell whether waiting would return at once."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the bytes may be used by compute; raise what went wrong.

        Raises:
            swap.SwapError: an I/O error, or the deadline passed.
            CopyDeadlineError: a copy did not end within `timeout_s` seconds.
        """


class TicketGroup:
    """Several swap tickets as one transfer."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        """Tell whether all tickets are done."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for every ticket, also after one has failed: its buffers are in use. Raise the first error.

        All are under way together: where one is late, no other is waited for as long again.
        """
        failure: BaseException | None = None
        for ticket in self._tickets:
            try:
                ticket.wait(timeout_s)
            except OSError as error:
                failure = failure or error
                if isinstance(error, TimeoutError):
                    timeout_s = 0.0
        if failure is not None:
            raise failure


def wait_out(tickets: Iterable[Ticket | Transfer], timeout_s: float) -> None:
    """Wait for what is under way together, whatever becomes of it; what is late shares one deadline."""
    for ticket in tickets:
        with contextlib.suppress(Exception):
            try:
                ticket.wait(timeout_s)
            finally:
                if not ticket.done():
                    timeout_s = 0.0


class FutureTransfer:
    """A copy carried out by a worker thread."""

    def __init__(self, future: Future[Any], subject: str, *, is_waiting: Callable[[], bool] = lambda: False) -> None:
        """Follow a copy.

        Args:
            future: of the worker.
            subject: for the message.
            is_waiting: tells whether what keeps the worker has a deadline of its own, whose error says more.
        """
        self._future = future
        self._subject = subject
        self._is_waiting = is_waiting

    def done(self) -> bool:
        """Tell whether the worker is through."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the worker; the time begins again while that waits for what has a deadline of its own.

        Time during which the process is stopped does not count: parts are counted, however long each has taken.
        """
        left_s, is_graced = timeout_s, False
        while True:
            part_s = None if left_s is None else min(left_s, PART_S)
            begin = time.monotonic()
            try:
                self._future.result(part_s)
                return
            except FutureTimeoutError:
                if self._future.done():
                    self._future.result()  # it has ended meanwhile, or failed with such an error itself
                    return
            assert left_s is not None and part_s is not None
            left_s -= part_s
            if not is_graced and time.monotonic() - begin - part_s > STOPPED_S:
                left_s, is_graced = max(left_s, PART_S), True  # for the worker to catch up
            if left_s > 0:
                continue
            if not self._is_waiting():
                raise CopyDeadlineError(
                    f"{self._subject}: expected to end within {timeout_s} s but it is still running; "
                    "raise io_deadline_s if the machine is just slow"
                )
            left_s = timeout_s or PART_S  # whoever asks without waiting waits here, for that deadline


class Brought(FutureTransfer):
    """A copy of what others bring: how long that may take is theirs to say."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for it as long as it takes."""
        super().wait(None)


class Arriving(Protocol):
    """A copy to memory of torch's on the device."""

    def done(self) -> bool:
        """Tell whether the copy is complete."""

    def use(self, timeout_s: float) -> None:
        """Let what compute is given from now on, on the stream that is current, see the bytes."""

    def wait(self, timeout_s: float) -> None:
        """Wait until the copy is complete: nobody reads the source any more."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class MoverNeeds:
    """What a mover is made with.

    Attributes:
        counters: of bytes and seconds.
        host: gives staging buffers.
        fetch_bytes: of them, for what comes from NVMe.
        gradient_bytes: of them, for gradients.
        gradient_claim: of the device budget, for gradients on their way.
        largest_gradient_bytes: of one parameter.
        deadline_s: after which a copy counts as lost.
    """

    counters: Counters
    host: Arena
    fetch_bytes: int
    gradient_bytes: int
    gradient_claim: Claim
    largest_gradient_bytes: int
    deadline_s: float


class Mover(Protocol):
    """Brings parameters to the device and gradients to the host."""

    def use(self, buffer: Buffer) -> None:
        """Note that compute is about to use what is in `buffer`, on the stream that is current.

        What was brought there by a transfer that has been waited for is there then.
        """

    def release(self, buffer: Buffer) -> None:
        """Note that compute has been given all uses of `buffer` so far: later copies into it are ordered behind."""

    def fetch_host(self, source: int, target: Buffer, size_bytes: int, *, urgent: bool) -> Transfer:
        """Copy `size_bytes` from host address `source` to `target` on the device.

        What is `urgent` does not queue behind what is not, here and in :meth:`fetch_nvme`.
        """

    def await_source(self, source: int) -> None:
        """Wait until no :meth:`fetch_host` reads host address `source` any more.

        Waiting for a transfer orders compute behind it. The host needs more before it writes there.
        """

    def fetch_nvme(
        self, read: Callable[[int], list[Ticket]], target: Buffer, sizes: Sequence[int], *, urgent: bool
    ) -> Transfer:
        """Bring an object from NVMe to `target`.

        Args:
            read: starts the reads into an address, one after the other.
            target: on the device.
            sizes: bytes of each read.
            urgent: as in :meth:`fetch_host`.
        """

    def fetch_when(
        self,
        bring: Callable[[], int],
        target: Buffer,
        size_bytes: int,
        *,
        urgent: bool,
        begin: Callable[[Callable[[], Any]], Future[Any]],
    ) -> Transfer:
        """Copy to `target` on the device what others bring to host memory; how long that may take is theirs to say.

        Args:
            bring: waits for it; returns its host address. :meth:`await_source` tells when that may be written again.
            target: on the device.
            size_bytes: of it.
            urgent: as in :meth:`fetch_host`.
            begin: has something done in a thread, now or later; returns what becomes of it.
        """

    def download(self, source: int, target: int, size_bytes: int, *, settled: bool = False) -> Ticket:
        """Copy `size_bytes` from device address `source` to host address `target`.

        What is `settled` is waited for by nobody: whoever has written it is known to be done.
        """

    def upload(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy `size_bytes` from host address `source` to device address `target`."""

    def fill(self, source: int, target: Buffer, offset_bytes: int, size_bytes: int) -> Ticket:
        """Copy host address `source` to `target` from `offset_bytes` on; who uses `target` next sees all such copies.

        The host waits for the ticket before it writes to `source`.
        """

    def save(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy what compute has made at device address `source` to host address `target`; counts as ``d2h``.

        The memory at `source` must stay until the copy has been waited for, or is done.
        """

    def restore(self, source: int, target: int, size_bytes: int) -> Arriving:
        """Copy host address `source` to device address `target`, which torch has just given; counts as ``h2d``.

        Both must stay until the copy is done.
        """

    def note_use(self, tensor: torch.Tensor) -> None:
        """Note that compute on the stream that is current uses memory of torch's, which may be another stream's."""

    def move(self, source: Buffer, target: Buffer, size_bytes: int) -> None:
        """Move bytes on the device, to a lower address; the two may overlap. What compute is given next sees them."""

    def await_compute(self, timeout_s: float) -> None:
        """Let the host wait until all that compute has been given so far is done."""

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Let what the device is given in the ``with`` block follow all compute so far, and all that comes follow it.

        The block belongs to the stream that is current.
        """

    def note_stream(self) -> int:
        """Note that the current stream computes: :meth:`alone` follows it; returns its number, 0 if there are none."""

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None], *, group: int, last: bool) -> None:
        """Call `use(address)` with the contiguous bytes of a device `tensor` in host memory, now or later, in order.

        Tensors of one `group` in succession may travel together; `last` says that none is expected next.
        """

    def make_room(self, wanted_bytes: int) -> int:
        """Have tensors on their way to the host take `wanted_bytes` less of the device; returns how many less."""

    def leave_more(self, by_bytes: int) -> int:
        """Have tensors on their way to the host leave `by_bytes` more of the device's budget to others from now on.

        That is more than ever since the last call. Returns how many more: at most what they had at once.
        """

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the device's budget that tensors on their way to the host have now."""

    def await_next(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        """Wait until the next group of :meth:`read_tensor` has left the device; returns False where all have.

        With `room_for`, also where those on their way leave the host room for so many bytes more.
        """

    def wait(self, timeout_s: float) -> None:
        """Wait until every `use` of :meth:`read_tensor` has run; raise what went wrong in one."""

    def begin_computing(self) -> object | None:
        """Return the moment of the device when it has come so far, by its own clock.

        None where that is left to the host's: there is no other, or compute is synchronous.
        """

    def end_computing(self, what: str, begun: object) -> None:
        """Count the seconds that the device takes for what it was given since a moment, beside its waits, as `what`."""

    def begin_waiting(self) -> object | None:
        """Return the moment of the device when it has come so far, likewise."""

    def end_waiting(self, what: str, begun: object | None, begin: float) -> None:
        """Keep that compute has waited for `what`, from the moment `begun` until the device goes on.

        None stands for `begin`, seconds of the host's clock, until now. What was waited for is ordered before compute.
        """

    def note_times(self) -> None:
        """Count the device's seconds of what is over."""

    def close(self) -> None:
        """End the worker threads."""
