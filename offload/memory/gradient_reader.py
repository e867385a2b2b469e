"""Gradients on their way from an accelerator to the host: units of them, several at once.

Owns the download stream, the page-locked ring that gradients pass through, and two threads: one waits for copies, the
other uses what has arrived. Whoever hands a gradient over does not wait, unless the ring or the device budget is full.
Next: :mod:`offload.shards.gradients` adds what arrives.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from offload.memory.arena import HOST, Arena, Buffer, bytes_at
from offload.memory.budget import Claim
from offload.memory.ordering import Streams, entered
from offload.memory.ring import Ring
from offload.memory.timing import Stopwatch
from offload.memory.transfer import FutureTransfer
from offload.torch_private import no_dispatch, no_functions


@dataclasses.dataclass(slots=True)
class _Batch:
    """Gradients whose copies one event follows.

    Attributes:
        tensors: kept until the copies are over.
        uses: what is still to be called, and with which address.
        size_bytes: on the device.
        pieces: of the ring.
        left: that the copies are over, and the device's memory free; None while gradients may still come.
        used: that all of it was used, likewise.
        told: of its failure.
    """

    tensors: list[torch.Tensor] = dataclasses.field(default_factory=list)
    uses: deque[tuple[Callable[[int], None], int]] = dataclasses.field(default_factory=deque)
    size_bytes: int = 0
    pieces: int = 0
    left: Future[None] | None = None
    used: Future[None] | None = None
    told: bool = False


class GradientReader:
    """Copies gradients to the host, and calls whoever uses them there. See the module's text.

    All methods but the consumer's are called from one thread at a time.
    """

    def __init__(
        self,
        streams: Streams,
        host: Arena,
        ring: Buffer,
        claim: Claim,
        watch: Stopwatch,
        place: torch.device,
        *,
        largest_bytes: int,
    ) -> None:
        """Begin with nothing on its way.

        Args:
            streams: of the device.
            host: arena that `ring` lies in.
            ring: page-locked host memory, at least the largest unit of gradients.
            claim: of the device budget: holds what the gradients take there.
            watch: counts bytes and seconds.
            place: of the device.
            largest_bytes: of a gradient: so much of the budget is left to the next one, which autograd makes by itself.
        """
        self._streams = streams
        self._host = host
        self._address = ring.address
        self._ring = Ring(ring.size_bytes)
        self._claim = claim
        self._watch = watch
        self._left_bytes = largest_bytes  # of the budget: so much is left to others
        self._most_bytes = self._free_bytes = 0  # that they had at once since that was said; the least that was free
        self._stream = torch.Stream(place)
        self._copies = ThreadPoolExecutor(1, "offload-d2h", streams.begin_thread)
        self._consumer = ThreadPoolExecutor(1, "offload-gradients", streams.begin_thread)
        self._batch = _Batch()
        self._group = -1
        self._flying: deque[_Batch] = deque()
        self._failure: BaseException | None = None

    @property
    def stream(self) -> torch.Stream:
        """The stream of all copies to the host."""
        return self._stream

    def read(
        self, tensor: torch.Tensor, use: Callable[[int], None], *, group: int, last: bool, deadline_s: float
    ) -> None:
        """Copy a gradient to the host behind what the current stream has been given; `use` is called there.

        Args:
            tensor: contiguous, on the device.
            use: called by the consumer with the host's address of the bytes, in the order of calls.
            group: gradients of one group in succession travel together.
            last: none of its group is expected next.
            deadline_s: after which a copy that room is wanted from counts as lost.
        """
        if group != self._group:
            self._send()
            self._group = group
        size = tensor.numel() * tensor.element_size()
        address = self._room_for(size, deadline_s)
        batch = self._batch
        batch.pieces += 1  # of the ring, also where something fails
        self._stream.wait_event(self._streams.event())
        begin = self._watch.start(self._stream)  # each by itself: the link has nothing to do until the next one is made
        batch.tensors.append(tensor)  # it lives until its copies are over, also where one of them fails
        self._copy(tensor, address, size)
        self._watch.stop("d2h", self._stream, begin, size)
        batch.uses.append((use, address))
        batch.size_bytes += size
        self._claim.resize(self._claim.size_bytes + min(size, self._claim.budget.free_bytes))
        if last:
            self._send()
        self._leave(self._left_bytes, deadline_s)
        held_bytes, free_bytes = self._claim.size_bytes, self._claim.budget.free_bytes
        self._free_bytes = min(free_bytes, self._free_bytes) if self._most_bytes else free_bytes
        self._most_bytes = max(self._most_bytes, held_bytes)

    def _copy(self, tensor: torch.Tensor, address: int, size: int) -> None:
        with no_functions(), no_dispatch(), entered(self._stream):  # modes of the user, which come with a backward
            source = tensor.view(-1).view(torch.uint8)
            for begin, end in self._host.spans(address, size):
                target = bytes_at(address + begin, end - begin, HOST)
                target.copy_(source[begin:end], non_blocking=True)

    def wait(self, timeout_s: float) -> None:
        """Wait until everything is used; raise what went wrong first. What is late is given up: nobody uses it."""
        self._send()
        for batch in self._flying:
            self._wait_for(batch, timeout_s)
        self._reap()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def make_room(self, wanted_bytes: int, timeout_s: float) -> int:
        """Wait until `wanted_bytes` less are on the device, or none are; returns how many less."""
        before = self._claim.size_bytes
        self._leave(self._claim.budget.free_bytes + wanted_bytes, timeout_s)
        return before - self._claim.size_bytes

    def leave_more(self, by_bytes: int) -> int:
        """Leave `by_bytes` more to others than ever since the last call, at most what was there; returns how much."""
        more_bytes = min(by_bytes, self._most_bytes)
        if more_bytes:
            self._left_bytes = max(self._left_bytes, self._free_bytes) + more_bytes
        self._most_bytes = 0
        return more_bytes

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the budget that gradients on their way have now."""
        self._reap()
        return self._claim.size_bytes

    def close(self) -> None:
        """Let everything be used, and end the threads: also where a lost device takes nothing any more."""
        with contextlib.ExitStack() as last:  # whoever uses gradients writes to memory that is about to go
            last.callback(self._reap)
            last.callback(self._consumer.shutdown)
            last.callback(self._copies.shutdown)
            self._send()

    # --- what is on its way -----------------------------------------------------------------------------------------

    def _send(self) -> None:
        """Let the consumer have what has been collected."""
        batch = self._batch
        if not batch.pieces:
            return
        arrived = self._streams.event(self._stream)  # may fail: nothing was changed then
        self._batch = _Batch()
        self._flying.append(batch)
        batch.left = self._copies.submit(_await_copies, batch, arrived)
        batch.used = self._consumer.submit(_use, batch, batch.left)

    def _room_for(self, size: int, deadline_s: float) -> int:
        """Return an address in the ring; waits for the oldest gradients to be used where there is none."""
        self._reap()
        while (offset := self._ring.take(size)) is None:
            self._send()
            oldest = self._flying[0]
            if oldest.told:
                self._await_given_up(oldest, deadline_s)
            else:
                self._wait_for(oldest, deadline_s)
            if not self._reap():
                self.wait(0)  # late: raises
        return self._address + offset

    def _leave(self, free_bytes: int, timeout_s: float) -> None:
        """Wait for the oldest gradients to leave the device until the budget has so much left, or none are there."""
        self._reap()
        while self._claim.size_bytes and self._claim.budget.free_bytes < free_bytes:
            self._send()
            batch = next((batch for batch in self._flying if not _has_left(batch)), None)
            if batch is not None and batch.left is not None:
                with self._waiting(), contextlib.suppress(Exception):  # who waits for its use is told
                    FutureTransfer(batch.left, "copy of gradients to the host").wait(timeout_s)
                if not _has_left(batch):
                    return  # late
            self._reap()

    def _wait_for(self, batch: _Batch, timeout_s: float) -> None:
        """Wait until a batch is used; note its failure."""
        if batch.told:
            return
        try:
            self._await_use(batch, timeout_s)
        except Exception as error:  # errors of a device are RuntimeErrors
            batch.uses.clear()
            batch.told = True
            self._failure = self._failure or error

    def _await_given_up(self, batch: _Batch, timeout_s: float) -> None:
        """Wait until nothing uses the room of a batch that was given up; how it has ended was told."""
        try:
            self._await_use(batch, timeout_s)
        except Exception:
            if batch.used is None or not batch.used.done():
                raise

    def _await_use(self, batch: _Batch, timeout_s: float) -> None:
        assert batch.used is not None
        with contextlib.nullcontext() if batch.used.done() else self._waiting():
            FutureTransfer(batch.used, "copy of gradients to the host").wait(timeout_s)

    def _waiting(self) -> contextlib.AbstractContextManager[None]:
        """Keep when compute stands still in the ``with`` block: it goes on with what it was given before."""
        return self._watch.waiting("gradients", self._streams.current_stream())

    def _reap(self) -> int:
        """Take back what the oldest batches have held, as far as they are used or have left; returns how many are."""
        count = 0
        while self._flying:
            batch = self._flying[0]
            if batch.used is None or not batch.used.done():
                break
            self._wait_for(batch, 0)
            self._flying.popleft()
            self._ring.free(batch.pieces)
            count += 1
        if self._claim.size_bytes:
            held = self._batch.size_bytes + sum(batch.size_bytes for batch in self._flying if not _has_left(batch))
            self._claim.resize(min(held, self._claim.size_bytes))
        return count


def _has_left(batch: _Batch) -> bool:
    return batch.left is not None and batch.left.done()


def _await_copies(batch: _Batch, arrived: torch.Event) -> None:
    arrived.synchronize()
    batch.tensors.clear()


def _use(batch: _Batch, left: Future[None]) -> None:
    """Have all of a batch used behind its copies, also after a failure; raise the first one."""
    left.result()
    failure: Exception | None = None
    with contextlib.suppress(IndexError):  # all is used, or given up meanwhile
        while True:
            use, address = batch.uses.popleft()
            try:
                use(address)
            except Exception as error:
                failure = failure or error
    if failure is not None:
        raise failure
