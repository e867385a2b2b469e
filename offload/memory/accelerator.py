"""A device whose memory the host cannot touch, by torch's generic streams and events.

Owns its streams, the order of copies behind compute, and page-locking. Written against ``torch.accelerator``; what
differs between back ends is :func:`_page_lock`. Next: :mod:`offload.memory.devices`.
"""

from __future__ import annotations

import collections
import ctypes
import logging
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from offload.errors import BudgetError
from offload.memory.arena import HOST, Arena, Buffer, HostArena, bytes_at
from offload.memory.budget import Tier
from offload.memory.transfer import FutureTransfer, Ticket, TicketGroup, Transfer
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.stats import Counters

logger = logging.getLogger(__name__)


class AcceleratorDevice:
    """An accelerator of torch. See :class:`offload.memory.device.Device`."""

    addressable = False

    def __init__(self, place: torch.device) -> None:
        """Use the accelerator at `place`, which has an index."""
        self.place = place

    def name(self) -> str:
        """Return what its driver calls it."""
        return str(torch.get_device_module(self.place).get_device_name(self.place))

    def free_bytes(self) -> int:
        """Return what its driver says."""
        return int(torch.get_device_module(self.place).mem_get_info(self.place)[0])

    def arena(self, size_bytes: int) -> Arena:
        """Take one allocation of torch's.

        Raises:
            BudgetError: the device has no piece of that size free.
        """
        if not size_bytes:
            return Arena(Tier.DEVICE, 0, self.place, None, 0)
        try:
            memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, device=self.place)
        except torch.OutOfMemoryError as error:
            raise BudgetError(
                f"device budget: expected {format_bytes(size_bytes)} in one piece on {self.place} but got "
                f'{format_bytes(self.free_bytes())} free; lower max_memory["device"], or free what else is there'
            ) from error
        return Arena(Tier.DEVICE, size_bytes, self.place, memory, round_up(memory.data_ptr(), PAGE_BYTES))

    def host_arena(self, size_bytes: int) -> Arena:
        """Take page-locked main memory."""
        return LockedArena(Tier.HOST, size_bytes, self.place)

    def mover(
        self, counters: Counters, host: Arena, *, fetch_bytes: int, gradient_bytes: int, deadline_s: float
    ) -> AcceleratorMover:
        """Return a mover with staging buffers in `host`."""
        half = fetch_bytes // 2
        fetch = [host.take(half) for _ in range(2)] if half else []
        return AcceleratorMover(counters, self, fetch, host.take(gradient_bytes), deadline_s)

    def current_stream(self) -> torch.Stream:
        """Return the stream that compute is given to now."""
        return torch.accelerator.current_stream(self.place)

    def event(self, stream: torch.Stream | None = None) -> torch.Event:
        """Return the moment when all that was given to `stream` so far is done; of None to the current one."""
        event = torch.Event(self.place)
        event.record(self.current_stream() if stream is None else stream)
        return event

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.accelerator.synchronize(self.place)


class LockedArena(HostArena):
    """Host memory that stays where it is, so that the device can copy from and to it by itself."""

    def __init__(self, tier: Tier, size_bytes: int, place: torch.device) -> None:
        super().__init__(tier, size_bytes)
        self._unlock = _page_lock(self.base_address, size_bytes, place) if size_bytes else None
        self.elastic = self._unlock is None

    def close(self, busy: Sequence[Callable[[], bool]] = ()) -> None:
        """Unlock and unmap it, as :meth:`Arena.close` says. Idempotent."""
        unlock, self._unlock = self._unlock, None
        if unlock is not None:
            unlock()
        super().close(busy)


def _page_lock(address: int, size_bytes: int, place: torch.device) -> Callable[[], None] | None:
    """Page-lock host memory; returns what undoes it, None where that is not possible."""
    module: Any = torch.get_device_module(place)
    try:
        with module.device(place):  # a back end makes a context, and that on the device that is current
            unregister = _register(module, address, size_bytes, place.type)
    except RuntimeError as error:
        logger.warning(
            "host arena: %s could not be page-locked for %s (%s): copies are several times slower, and who starts one "
            "waits for it; a lower max_memory['cpu'] may fit what the system lets a process lock (ulimit -l)",
            format_bytes(size_bytes),
            place,
            error,
        )
        return None

    def unlock() -> None:
        with module.device(place):
            unregister(address)

    return unlock


def _register(module: Any, address: int, size_bytes: int, kind: str) -> Callable[[int], object]:
    """Page-lock host memory; returns the function that undoes it.

    CUDA and ROCm have ``cudaHostRegister``. Of any other back end, torch's device module is asked for two functions:
    ``host_register(address, size_bytes)``, which raises RuntimeError if it cannot, and ``host_unregister(address)``.

    Raises:
        RuntimeError: it is not possible.
    """
    unregister: Callable[[int], object]
    if kind == "cuda":
        runtime = module.cudart()
        status = int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
        if status:
            _forget_error()
            raise RuntimeError(f"error {status} of cudaHostRegister")
        unregister = runtime.cudaHostUnregister
    elif hasattr(module, "host_register"):
        module.host_register(address, size_bytes)
        unregister = module.host_unregister
    else:
        raise RuntimeError("not with this back end")
    return unregister


_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device


def _forget_error() -> None:
    """Take back CUDA's last error, which torch's next launch of a kernel would report as its own."""
    libraries: Any = ctypes.CDLL(None)
    for name in ("cudaGetLastError", "hipGetLastError"):
        if hasattr(libraries, name):
            getattr(libraries, name)()


class AcceleratorTransfer:
    """A copy on a stream: waiting makes the streams that compute wait, not the host."""

    def __init__(self, streams: Iterable[torch.Stream], future: Future[torch.Event], subject: str) -> None:
        self._streams = streams
        self._enqueued = FutureTransfer(future, subject)  # type: ignore[arg-type]
        self._future = future

    def done(self) -> bool:
        """Tell whether the copy is complete."""
        if not self._future.done():
            return False
        return self._future.exception() is not None or bool(self._future.result().query())

    def wait(self, timeout_s: float) -> None:
        """Order the streams that compute behind the copy."""
        self._enqueued.wait(timeout_s)
        for stream in self._streams:
            stream.wait_event(self._future.result())


class AcceleratorMover:
    """Mover for an accelerator: one stream per direction, events only.

    NVMe reads pass through two page-locked staging buffers, gradients through one. A buffer is reused only after the
    event that was recorded where it was vacated. Gradients that wait for their copy take device memory that no plan
    knows, so they are at most as many bytes as their staging buffer has.

    The user may compute on several streams that nothing orders. Each that has used the device's parameters counts as
    one that may still read them, and waits for all that arrives.
    """

    def __init__(
        self,
        counters: Counters,
        device: AcceleratorDevice,
        staging: Sequence[Buffer],
        gradient_staging: Buffer,
        deadline_s: float,
    ) -> None:
        self._counters = counters
        self._device = device
        self._upload = torch.Stream(device.place)
        self._download = torch.Stream(device.place)
        stream = device.current_stream()
        self._upload.wait_stream(stream)  # work of the arena's last owner may be queued
        self._computing = {stream.stream_id: stream}
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-h2d")
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="offload-d2h")
        self._staging = list(staging)
        self._staging_events: list[torch.Event | None] = [None] * len(staging)
        self._turn = 0
        self._released: dict[int, list[torch.Event]] = {}
        self._uploads: dict[int, Future[torch.Event]] = {}  # the last one from each host address
        self._deadline_s = deadline_s
        self._gradients: collections.deque[tuple[Future[None], int]] = collections.deque()  # on their way, with bytes
        self._gradient_bytes = 0
        self._gradient_failure: BaseException | None = None
        self._gradient_staging = gradient_staging

    def fetch_host(self, source: int, target: Buffer, size_bytes: int) -> Transfer:
        """Copy from page-locked memory on the upload stream."""
        event = self._ready(target)
        future = self._uploads[source] = self._worker.submit(self._enqueue, source, target, size_bytes, event)
        return self._transfer(future, f"copy of {size_bytes} bytes to {self._device.place}")

    def fetch_nvme(self, read: Callable[[int], list[Ticket]], target: Buffer, size_bytes: int) -> Transfer:
        """Read into staging, then copy on the upload stream; the worker thread waits in between."""
        event = self._ready(target)

        def run() -> torch.Event:
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

        return self._transfer(self._worker.submit(run), f"fetch of {size_bytes} bytes to {self._device.place}")

    def _transfer(self, future: Future[torch.Event], subject: str) -> Transfer:
        return AcceleratorTransfer(self._computing.values(), future, subject)

    def enter(self) -> None:
        """Let the current stream wait for what has arrived, and be waited for from now on."""
        stream = self._device.current_stream()
        if stream.stream_id not in self._computing:
            stream.wait_stream(self._upload)
            self._computing[stream.stream_id] = stream

    def download(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy device address `source` to page-locked host address `target`."""
        return self._direct(source, target, size_bytes, "d2h")

    def upload(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy page-locked host address `source` to device address `target`."""
        return self._direct(source, target, size_bytes, "h2d")

    def _direct(self, source: int, target: int, size_bytes: int, link: str) -> Ticket:
        computed = self._computed()

        def run() -> None:
            begin = time.perf_counter()
            down = link == "d2h"
            stream = self._download if down else self._upload
            host = bytes_at(target if down else source, size_bytes, HOST)
            device = bytes_at(source if down else target, size_bytes, self._device.place)
            with stream:
                for event in computed:
                    stream.wait_event(event)
                if down:
                    host.copy_(device, non_blocking=True)
                else:
                    device.copy_(host, non_blocking=True)
                stream.synchronize()
            self._counters.add(link, size_bytes=size_bytes, seconds=time.perf_counter() - begin)

        worker = self._reader if link == "d2h" else self._worker
        return FutureTransfer(worker.submit(run), f"copy of {size_bytes} bytes ({link})")

    def await_source(self, source: int) -> None:
        """Let the host wait for the last upload from there: compute waits for uploads without it."""
        future = self._uploads.pop(source, None)
        if future is not None and not future.exception():
            future.result().synchronize()

    def move(self, source: Buffer, target: Buffer, size_bytes: int) -> None:
        """Copy on the current stream, in pieces that do not overlap; the others that compute wait on both sides."""
        current = self._device.current_stream()
        others = [stream for stream in self._computing.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        step = source.address - target.address
        for begin in range(0, size_bytes, step):
            piece = min(step, size_bytes - begin)
            bytes_at(target.address + begin, piece, self._device.place).copy_(
                bytes_at(source.address + begin, piece, self._device.place)
            )
        for stream in others:
            stream.wait_stream(current)
        self.vacate(source)

    def vacate(self, buffer: Buffer) -> None:
        """Record that compute enqueued so far may still read `buffer`."""
        self._released[buffer.address] = self._computed()

    def _computed(self) -> list[torch.Event]:
        return [self._device.event(stream) for stream in self._computing.values()]

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None]) -> None:
        """Copy on the download stream; a worker waits for the copy and calls `use`."""
        ready = self._device.event()
        size = tensor.numel() * tensor.element_size()

        def run() -> None:
            host = bytes_at(self._gradient_staging.address, size, HOST)
            begin = time.perf_counter()
            with self._download:
                self._download.wait_event(ready)
                host.copy_(tensor.view(-1).view(torch.uint8), non_blocking=True)
                self._download.synchronize()
            self._counters.add("d2h", size_bytes=size, seconds=time.perf_counter() - begin)
            use(host.data_ptr())

        while self._gradients and self._gradient_bytes + size > self._gradient_staging.size_bytes:
            self._reap(self._deadline_s)
        self._gradients.append((self._reader.submit(run), size))
        self._gradient_bytes += size

    def wait(self, timeout_s: float) -> None:
        """Wait for the gradients on their way."""
        while self._gradients:  # all of them: none may add to a gradient that counts as dropped
            self._reap(timeout_s)
        failure, self._gradient_failure = self._gradient_failure, None
        if failure is not None:
            raise failure

    def _reap(self, timeout_s: float) -> None:
        """Wait for the oldest gradient on its way; :meth:`wait` tells of its failure."""
        future, size = self._gradients.popleft()
        self._gradient_bytes -= size
        try:
            FutureTransfer(future, "copy of a gradient to the host").wait(timeout_s)
        except Exception as error:  # errors of a device are RuntimeErrors
            self._gradient_failure = self._gradient_failure or error

    def close(self) -> None:
        """End the workers."""
        self._worker.shutdown(wait=True)
        self._reader.shutdown(wait=True)

    def _ready(self, target: Buffer) -> list[torch.Event]:
        """Return the events that a copy into `target` must follow: compute that may still read what was vacated."""
        waiting = []
        for address, events in list(self._released.items()):
            events = self._released[address] = [event for event in events if not event.query()]
            if not events:
                del self._released[address]
            waiting += events
        return waiting

    def _enqueue(self, source: int, target: Buffer, size_bytes: int, after: list[torch.Event]) -> torch.Event:
        begin = time.perf_counter()
        done = torch.Event(self._device.place)
        host = bytes_at(source, size_bytes, HOST)
        device = bytes_at(target.address, size_bytes, self._device.place)
        with self._upload:
            for before in after:
                self._upload.wait_event(before)
            device.copy_(host, non_blocking=True)
            done.record(self._upload)
        self._counters.add("h2d", size_bytes=size_bytes, seconds=time.perf_counter() - begin)
        return done
