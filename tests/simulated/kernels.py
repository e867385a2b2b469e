"""Kernels of the simulated device for updates: the CPU's own, run by a stream over the device's memory.

So their bits are the CPU's, and what is shown is order: they run as late as any other work of their stream, and the
checker sees what they read and write. By the clock they take what their bytes take of the device's memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import torch

import simulated
from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.on_device import TOTAL_BYTES, Measured
from offload.memory import devices
from offload.memory.accelerator import AcceleratorDevice
from offload.memory.arena import bytes_at

Range = tuple[int, int, bool]  # address, bytes, written
_running = threading.local()


def on_device() -> bool:
    """Tell whether what this thread runs is work of the device: the host's time does not count."""
    return getattr(_running, "yes", False)


class SimulatedKernels:
    """Kernels of one simulated device. See the module's text."""

    def __init__(self, place: torch.device) -> None:
        self._core = simulated.load()
        self._place = place

    def steps(self, steps: Sequence[tuple[StepArrays, Hyper]]) -> None:
        """Give the stream updates."""
        for arrays, hyper in steps:
            self._step(arrays, hyper)

    def _step(self, arrays: StepArrays, hyper: Hyper) -> None:
        numel, split = arrays.numel, arrays.master_kind is MasterKind.SPLIT
        written = [(arrays.master, numel * (2 if split else 4)), (arrays.param, 2 * numel)]
        written += [(state, numel * arrays.state_kind.itemsize) for state in arrays.states]
        written.append((arrays.units, arrays.state_kind.units_bytes(numel)))
        emitted = numel * arrays.emit_dtype.itemsize if arrays.emit_dtype else 0
        ranges: list[Range] = [(arrays.grad, numel * arrays.grad_dtype.itemsize, False)]
        ranges += [(address, size, True) for address, size in (*written, (arrays.emit, emitted)) if address]
        read_too = sum(size for address, size in written if address)
        inside = dataclasses.replace(
            arrays,
            grad=self._inside(arrays.grad),
            master=self._inside(arrays.master),
            param=self._inside(arrays.param),
            states=tuple(map(self._inside, arrays.states)),
            units=self._inside(arrays.units),
            emit=self._inside(arrays.emit),
        )
        self._launch("update", functools.partial(cpu_adam.step, inside, hyper), ranges, more_bytes=read_too)

    def take_gradient(self, *, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int, add: bool) -> None:
        """Give the stream a copy or a sum."""
        sizes = numel * src_dtype.itemsize, numel * dst_dtype.itemsize
        kernel = functools.partial(
            cpu_adam.take_gradient,
            src=self._inside(src),
            src_dtype=src_dtype,
            dst=self._inside(dst),
            dst_dtype=dst_dtype,
            numel=numel,
            add=add,
            measure=False,
        )
        self._launch("take", kernel, [(src, sizes[0], False), (dst, sizes[1], True)], more_bytes=sizes[1] if add else 0)

    def sums_of_squares(self, ranges: Sequence[Measured]) -> None:
        """Give the stream sums."""
        for each in ranges:
            kernel = functools.partial(self._sum, self._inside(each.address), self._inside(each.total), each)
            size = each.numel * each.dtype.itemsize
            self._launch("sum", kernel, [(each.address, size, False), (each.total, TOTAL_BYTES, True)])

    def convert(self, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int) -> None:
        """Give the stream a conversion."""
        kernel = functools.partial(cpu_adam.convert, self._inside(src), src_dtype, self._inside(dst), dst_dtype, numel)
        ranges = [(src, numel * src_dtype.itemsize, False), (dst, numel * dst_dtype.itemsize, True)]
        self._launch("convert", kernel, ranges)

    def refusal(self, rules: Collection[int], kind: StateKind, dtypes: Collection[Dtype]) -> str | None:
        """Refuse nothing: the kernels are the CPU's."""
        return None

    def read_totals(self, addresses: Sequence[int]) -> list[tuple[float, int]]:
        """Copy what was measured to the host, in one piece, and wait for it."""
        if not addresses:
            return []
        begin = min(addresses)
        found = bytes_at(begin, max(addresses) + TOTAL_BYTES - begin, self._place).cpu()
        if self._core.is_dry():
            return [(1.0, 0) for _ in addresses]
        values, counts = found.view(torch.float64).tolist(), found.view(torch.int64).tolist()
        return [(values[(at - begin) // 8], counts[(at - begin) // 8 + 1]) for at in addresses]

    @staticmethod
    def _sum(source: int, target: int, each: Measured) -> None:
        value, count = cpu_adam.sum_of_squares(source, each.dtype, each.numel)
        if target:  # else the run is dry
            ctypes.c_double.from_address(target).value = value
            ctypes.c_int64.from_address(target + 8).value = count

    def _launch(self, name: str, kernel: Callable[[], Any], ranges: Sequence[Range], *, more_bytes: int = 0) -> None:
        def run() -> None:
            _running.yes = True
            try:
                kernel()
            finally:
                _running.yes = False

        size = sum(size for _, size, _ in ranges) + more_bytes
        self._core.launch(self._place.index, name, run, list(ranges), size)

    def _inside(self, address: int) -> int:
        return int(self._core.shadow(address)) if address else 0


class UpdatingDevice(AcceleratorDevice):
    """An accelerator with kernels for updates."""

    def __init__(self, place: torch.device) -> None:
        super().__init__(place)
        self.kernels = SimulatedKernels(place)


@contextlib.contextmanager
def updating() -> Iterator[None]:
    """Let the accelerators of engines that are made in the body have kernels for updates."""
    before = devices.AcceleratorDevice
    devices.AcceleratorDevice = UpdatingDevice  # type: ignore[misc]
    try:
        yield
    finally:
        devices.AcceleratorDevice = before  # type: ignore[misc]
