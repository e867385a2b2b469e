"""The CPU as the device: host and device share one memory.

Owns the thread that copies parameters, and direct reads from NVMe. Next: :mod:`offload.memory.devices`.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import psutil
import torch

from offload.kernels.on_device import DeviceKernels
from offload.memory import machine
from offload.memory.arena import HOST, Arena, Buffer, HostArena, bytes_at
from offload.memory.budget import Tier
from offload.memory.limits import total_host_bytes
from offload.memory.transfer import Brought, FutureTransfer, MoverNeeds, Ticket, TicketGroup, Transfer
from offload.spans import D2H, H2D
from offload.stats import Counters
from offload.torch_private import no_dispatch, no_functions

AT_ONCE_BYTES = 256 << 10  # copied in the time, 65 us on a virtual machine, that handing a copy to a thread takes


class CpuDevice:
    """The CPU. See :class:`offload.memory.device.Device`."""

    addressable = True
    kernels: DeviceKernels | None = None  # the host's do

    def __init__(self) -> None:
        self.place = HOST
        with no_functions(), no_dispatch():
            # MKL's vector functions lose digits in a process's first call of one, if several threads share that call.
            torch.ones(1, dtype=torch.float32, device=HOST).cos()

    def name(self) -> str:
        """Return the processor's name."""
        return machine.cpu_name()

    def identity(self) -> str | None:
        """Nothing: processes share it."""
        return None

    def free_bytes(self) -> int:
        """Return what the system has available."""
        return int(psutil.virtual_memory().available)

    def total_bytes(self) -> int:
        """Return what main memory there is."""
        return total_host_bytes()

    def trim(self) -> None:
        """Nothing: torch keeps none."""

    def arena(self, size_bytes: int) -> Arena:
        """Take main memory that can be given back in parts."""
        return HostArena(Tier.DEVICE, size_bytes)

    def host_arena(self, size_bytes: int) -> Arena:
        """Take main memory."""
        return HostArena(Tier.HOST, size_bytes)

    def mover(self, needs: MoverNeeds) -> CpuMover:
        """Return a mover that needs no staging."""
        return CpuMover(needs.counters)

    def out_of_memory(self, error: BaseException, *, what: str, limit_bytes: int, held: Mapping[str, int]) -> None:
        """Nothing: main memory has no end of its own."""

    def begin_thread(self) -> None:
        """Nothing: every thread is the CPU's."""

    def event(self) -> Past:
        """Return a moment that is over: compute on the CPU is synchronous."""
        return Past()

    def synchronize(self) -> None:
        """Nothing is ever outstanding."""


class Past:
    """A moment that is over."""

    def query(self) -> bool:
        """Tell that it is."""
        return True

    def synchronize(self) -> None:
        """Wait for nothing."""


class Arrived(TicketGroup):
    """A copy that is over."""

    def use(self, timeout_s: float) -> None:
        """Wait for nothing."""


class CpuMover:
    """Mover where the device is the CPU: host and device are both addressable."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="offload-h2d")

    def use(self, buffer: Buffer) -> None:
        """Nothing to note: compute on the CPU is synchronous."""

    def release(self, buffer: Buffer) -> None:
        """Nothing to order."""

    def fetch_host(self, source: int, target: Buffer, size_bytes: int, *, urgent: bool) -> Transfer:
        """Copy in a worker thread (the copy does not hold the interpreter lock), or at once where that takes less."""
        if size_bytes <= AT_ONCE_BYTES:
            self._copy(target.address, source, size_bytes)
            return TicketGroup(())
        future = self._worker.submit(self._copy, target.address, source, size_bytes)
        return FutureTransfer(future, f"copy of {size_bytes} bytes to the device")

    def await_source(self, source: int) -> None:
        """Nothing to wait for: a transfer that was waited for is over."""

    def fetch_nvme(
        self, read: Callable[[int], list[Ticket]], target: Buffer, sizes: Sequence[int], *, urgent: bool
    ) -> Transfer:
        """Read straight into the device arena."""
        return TicketGroup(read(target.address))

    def fetch_when(
        self,
        bring: Callable[[], int],
        target: Buffer,
        size_bytes: int,
        *,
        urgent: bool,
        begin: Callable[[Callable[[], Any]], Future[Any]],
    ) -> Transfer:
        """Copy in the thread that has waited for it."""
        copy = begin(lambda: self._copy(target.address, bring(), size_bytes))
        return Brought(copy, f"copy of {size_bytes} bytes to the device")

    def download(self, source: int, target: int, size_bytes: int, *, settled: bool = False) -> Ticket:
        """Copy in the worker thread."""
        return FutureTransfer(
            self._worker.submit(self._copy, target, source, size_bytes), f"copy of {size_bytes} bytes"
        )

    def upload(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy in the worker thread."""
        return self.download(source, target, size_bytes)

    def fill(self, source: int, target: Buffer, offset_bytes: int, size_bytes: int) -> Ticket:
        """Copy at once."""
        self._copy(target.address + offset_bytes, source, size_bytes)
        return TicketGroup(())

    def save(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy at once, in all threads of compute: a copy beside them would take a core of one, and the others wait."""
        self._copy(target, source, size_bytes, D2H, move=_move_in_parallel)
        return TicketGroup(())

    def restore(self, source: int, target: int, size_bytes: int) -> Arrived:
        """Copy as :meth:`save`."""
        self._copy(target, source, size_bytes, move=_move_in_parallel)
        return Arrived(())

    def note_use(self, tensor: torch.Tensor) -> None:
        """Nothing to note: compute on the CPU is synchronous."""

    def await_compute(self, timeout_s: float) -> None:
        """Nothing to wait for."""

    def move(self, source: Buffer, target: Buffer, size_bytes: int) -> None:
        """Copy."""
        ctypes.memmove(target.address, source.address, size_bytes)

    def alone(self) -> contextlib.AbstractContextManager[None]:
        """Nothing to order."""
        return contextlib.nullcontext()

    def note_stream(self) -> int:
        """Nothing to order."""
        return 0

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None], *, group: int, last: bool) -> None:
        """Use the tensor where it is."""
        use(tensor.data_ptr())

    leaving_bytes = 0  # nothing is ever on its way

    def make_room(self, wanted_bytes: int) -> int:
        """Nothing is ever on its way."""
        return 0

    leave_more = make_room

    def await_next(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        """Nothing is ever on its way."""
        return False

    def wait(self, timeout_s: float) -> None:
        """Nothing is ever outstanding."""

    def begin_computing(self) -> None:
        """Leave it to the host's clock: compute is synchronous."""

    def end_computing(self, what: str, begun: object) -> None:
        """Do nothing: nothing has begun."""

    def begin_waiting(self) -> None:
        """Leave it to the host's clock."""

    def end_waiting(self, what: str, begun: object | None, begin: float) -> None:
        """Keep when the thread that computes has waited."""
        self._counters.spans.add_wait(what, begin, time.perf_counter())

    def note_times(self) -> None:
        """They are counted already."""

    def close(self) -> None:
        """End the worker."""
        self._worker.shutdown(wait=True)

    def _copy(
        self,
        target: int,
        source: int,
        size_bytes: int,
        lane: str = H2D,
        *,
        move: Callable[[int, int, int], object] = ctypes.memmove,
    ) -> None:
        begin = time.perf_counter()
        move(target, source, size_bytes)
        end = time.perf_counter()
        self._counters.add(lane, size_bytes=size_bytes, seconds=end - begin)
        self._counters.spans.add(lane, "copy", begin, end, size_bytes)


def _move_in_parallel(target: int, source: int, size_bytes: int) -> None:
    """Copy bytes that do not overlap, in as many threads as torch computes with."""
    into, out_of = bytes_at(target, size_bytes, HOST), bytes_at(source, size_bytes, HOST)
    with no_functions(), no_dispatch():
        into.copy_(out_of)
