"""Moves bytes between tiers: one asynchronous copy is one Transfer.

Owns how a copy is carried out on this machine: worker threads and direct NVMe reads where the device is the CPU;
streams, events and page-locked staging where it is a GPU. A transfer owns both ends until it has been waited for.
Must not know shards, states or schedules. Next: :mod:`offload.shards.manager` decides what is moved and when.
"""

from __future__ import annotations

import collections
import ctypes
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Protocol

import torch

from offload.errors import OffloadError
from offload.memory.tiers import Buffer, view_at
from offload.stats import Counters
from offload.torch_private import storage_at


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
            OffloadError: a copy did not end within `timeout_s` seconds.
        """


class TicketGroup:
    """Several swap tickets as one transfer."""

    def __init__(self, tickets: Sequence[Ticket]) -> None:
        self._tickets = tickets

    def done(self) -> bool:
        """Tell whether all tickets are done."""
        return all(ticket.done() for ticket in self._tickets)

    def wait(self, timeout_s: float | None) -> None:
        """Wait for every ticket, also after one has failed: its buffers are in use. Raise the first error."""
        failure: BaseException | None = None
        for ticket in self._tickets:
            try:
                ticket.wait(timeout_s)
            except OSError as error:
                failure = failure or error
        if failure is not None:
            raise failure


class FutureTransfer:
    """A copy carried out by a worker thread."""

    def __init__(self, future: Future[None], subject: str) -> None:
        self._future = future
        self._subject = subject

    def done(self) -> bool:
        """Tell whether the worker is through."""
        return self._future.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the worker."""
        try:
            self._future.result(timeout_s)
        except FutureTimeoutError:
            if self._future.done():
                raise
            raise OffloadError(
                f"{self._subject}: expected to end within {timeout_s} s but it is still running; "
                "raise io_deadline_s if the machine is just slow"
            ) from None


class CudaTransfer:
    """A copy on a CUDA stream: waiting makes the current stream wait, not the host."""

    def __init__(self, future: Future[torch.cuda.Event], subject: str) -> None:
        self._enqueued = FutureTransfer(future, subject)  # type: ignore[arg-type]
        self._future = future

    def done(self) -> bool:
        """Tell whether the copy is complete."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or bool(self._future.result().query())

    def wait(self, timeout_s: float) -> None:
        """Order the current stream behind the copy."""
        self._enqueued.wait(timeout_s)
        torch.cuda.current_stream().wait_event(self._future.result())


class Mover(Protocol):
    """Brings parameters to the device and gradients to the host."""

    def fetch_host(self, source: int, target: Buffer, size_bytes: int) -> Transfer:
        """Copy `size_bytes` from host address `source` to `target` on the device."""

    def fetch_nvme(self, read: Callable[[int], list[Ticket]], target: Buffer, size_bytes: int) -> Transfer:
        """Bring an object from NVMe to `target`; `read(address)` starts the reads into `address`."""

    def release(self, buffer: Buffer) -> None:
        """Note that compute is done with `buffer`: later copies into it are ordered behind."""

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None]) -> None:
        """Call `use(address)` with the contiguous bytes of a device `tensor` in host memory, now or later, in order."""

    def settle(self, timeout_s: float) -> None:
        """Wait until every `use` of :meth:`read_tensor` has run; raise what went wrong in one."""

    def close(self) -> None:
        """End the worker threads."""


class CpuMover:
    """Mover where the device is the CPU: host and device are both addressable."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-h2d")

    def fetch_host(self, source: int, target: Buffer, size_bytes: int) -> Transfer:
        """Copy in a worker thread (the copy does not hold the interpreter lock)."""
        future = self._worker.submit(self._copy, target.address, source, size_bytes)
        return FutureTransfer(future, f"copy of {size_bytes} bytes to the device")

    def fetch_nvme(self, read: Callable[[int], list[Ticket]], target: Buffer, size_bytes: int) -> Transfer:
        """Read straight into the device arena."""
        return TicketGroup(read(target.address))

    def release(self, buffer: Buffer) -> None:
        """Nothing to order: compute on the CPU is synchronous."""

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None]) -> None:
        """Use the tensor where it is."""
        use(tensor.data_ptr())

    def settle(self, timeout_s: float) -> None:
        """Nothing is ever outstanding."""

    def close(self) -> None:
        """End the worker."""
        self._worker.shutdown(wait=True)

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        begin = time.perf_counter()
        ctypes.memmove(target, source, size_bytes)
        self._counters.add("h2d", size_bytes=size_bytes, seconds=time.perf_counter() - begin)


class CudaMover:
    """Mover for a CUDA device: one stream per direction, events only.

    NVMe reads pass through two page-locked staging buffers, gradients through one. A buffer is reused only after the
    event recorded at its release. Gradients that wait for their copy take device memory that no plan knows, so they
    are at most as many bytes as their staging buffer has.
    """

    def __init__(
        self,
        counters: Counters,
        device: torch.device,
        staging: Sequence[Buffer],
        gradient_staging: Buffer,
        deadline_s: float,
    ) -> None:
        self._counters = counters
        self._device = device
        self._upload = torch.cuda.Stream(device)
        self._download = torch.cuda.Stream(device)
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-h2d")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-d2h")
        self._staging = list(staging)
        self._staging_events: list[torch.cuda.Event | None] = [None] * len(staging)
        self._turn = 0
        self._released: dict[int, torch.cuda.Event] = {}
        self._deadline_s = deadline_s
        self._gradients: collections.deque[tuple[Future[None], int]] = collections.deque()  # on their way, with bytes
        self._gradient_bytes = 0
        self._gradient_failure: BaseException | None = None
        self._gradient_staging = gradient_staging

    def fetch_host(self, source: int, target: Buffer, size_bytes: int) -> Transfer:
        """Copy from page-locked memory on the upload stream."""
        event = self._ready(target)
        future = self._worker.submit(self._enqueue, source, target, size_bytes, event)
        return CudaTransfer(future, f"copy of {size_bytes} bytes to {self._device}")

    def fetch_nvme(self, read: Callable[[int], list[Ticket]], target: Buffer, size_bytes: int) -> Transfer:
        """Read into staging, then copy on the upload stream; the worker thread waits in between."""
        event = self._ready(target)

        def run() -> torch.cuda.Event:
            turn = self._turn
            self._turn = (turn + 1) % len(self._staging)
            used = self._staging_events[turn]
            if used is not None:
                used.synchronize()
            address = self._staging[turn].address
            TicketGroup(read(address)).wait(None)  # the store's own deadline holds
            copied = self._enqueue(address, target, size_bytes, event)
            self._staging_events[turn] = copied
            return copied

        return CudaTransfer(self._worker.submit(run), f"fetch of {size_bytes} bytes to {self._device}")

    def download(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy device address `source` to page-locked host address `target`."""
        return self._direct(source, target, size_bytes, "d2h")

    def upload(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy page-locked host address `source` to device address `target`."""
        return self._direct(source, target, size_bytes, "h2d")

    def _direct(self, source: int, target: int, size_bytes: int, link: str) -> Ticket:
        compute = torch.cuda.Event()
        compute.record(torch.cuda.current_stream(self._device))

        def run() -> None:
            begin = time.perf_counter()
            down = link == "d2h"
            stream = self._download if down else self._upload
            host = _bytes_at(target if down else source, size_bytes, torch.device("cpu"))
            device = _bytes_at(source if down else target, size_bytes, self._device)
            with torch.cuda.stream(stream):
                stream.wait_event(compute)
                if down:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)
                stream.synchronize()
            self._counters.add(link, size_bytes=size_bytes, seconds=time.perf_counter() - begin)

        worker = self._reader if link == "d2h" else self._worker
        return FutureTransfer(worker.submit(run), f"copy of {size_bytes} bytes ({link})")

    def release(self, buffer: Buffer) -> None:
        """Record that compute enqueued so far may still read `buffer`."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self._device))
        self._released[buffer.address] = event

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None]) -> None:
        """Copy on the download stream; a worker waits for the copy and calls `use`."""
        ready = torch.cuda.Event()
        ready.record(torch.cuda.current_stream(self._device))

        size = tensor.numel() * tensor.element_size()

        def run() -> None:
            host = _bytes_at(self._gradient_staging.address, size, torch.device("cpu"))
            begin = time.perf_counter()
            with torch.cuda.stream(self._download):
                self._download.wait_event(ready)
                host.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                self._download.synchronize()
            self._counters.add("d2h", size_bytes=size, seconds=time.perf_counter() - begin)
            use(host.data_ptr())

        while self._gradients and self._gradient_bytes + size > self._gradient_staging.size_bytes:
            self._reap(self._deadline_s)
        self._gradients.append((self._reader.submit(run), size))
        self._gradient_bytes += size

    def settle(self, timeout_s: float) -> None:
        """Wait for the gradients on their way."""
        while self._gradients:  # all of them: none may add to a gradient that counts as dropped
            self._reap(timeout_s)
        failure, self._gradient_failure = self._gradient_failure, None
        if failure is not None:
            raise failure

    def _reap(self, timeout_s: float) -> None:
        """Wait for the oldest gradient on its way; :meth:`settle` tells of its failure."""
        future, size = self._gradients.popleft()
        self._gradient_bytes -= size
        try:
            FutureTransfer(future, "copy of a gradient to the host").wait(timeout_s)
        except (OSError, OffloadError) as error:
            self._gradient_failure = self._gradient_failure or error

    def close(self) -> None:
        """End the workers."""
        self._worker.shutdown(wait=True)
        self._reader.shutdown(wait=True)

    def _ready(self, target: Buffer) -> list[torch.cuda.Event]:
        """Return the events of every release that a copy into `target` must follow."""
        events = []
        for address, event in list(self._released.items()):
            if event.query():
                del self._released[address]
            else:
                events.append(event)
        return events

    def _enqueue(self, source: int, target: Buffer, size_bytes: int, after: list[torch.cuda.Event]) -> torch.cuda.Event:
        begin = time.perf_counter()
        done = torch.cuda.Event()
        host = _bytes_at(source, size_bytes, torch.device("cpu"))
        device = _bytes_at(target.address, size_bytes, self._device)
        with torch.cuda.stream(self._upload):
            for event in after:
                self._upload.wait_event(event)
            device.copy_(host, non_blocking=True)
            done.record(self._upload)
        self._counters.add("h2d", size_bytes=size_bytes, seconds=time.perf_counter() - begin)
        return done


def _bytes_at(address: int, size_bytes: int, device: torch.device) -> torch.Tensor:
    return view_at(storage_at(address, size_bytes, device), torch.uint8, 0, (size_bytes,))
