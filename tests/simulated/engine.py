"""The engine by the clock: its workers, its drive, its kernels on the CPU and its memory are stood in for.

What the engine decides, it decides by what it sees, so all that it sees goes by the clock: its threads are actors, its
store is a drive with bandwidths, and its kernels take the host's time. Nothing of the engine is changed: names in its
modules are given other values for a while. In a dry run, host memory is addresses that nobody may touch.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import ctypes
import dataclasses
import importlib
import pkgutil
import sys
import threading
import types
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from torch import nn

import offload
import simulated
from offload.kernels.ranges import Dtype, StateKind
from offload.memory.accelerator import AcceleratorDevice
from offload.memory.arena import HOST, Arena
from offload.memory.budget import Tier
from offload.memory.errands import Errands
from offload.module.gradient_hooks import GradientHooks
from offload.module.hooks import Hooks
from offload.planning.hardware import Hardware
from offload.sizes import HUGE_PAGE_BYTES, round_up
from simulated.clock import (
    Costs,
    Drive,
    VirtualCondition,
    VirtualErrands,
    VirtualEvent,
    VirtualExecutor,
    VirtualLock,
    VirtualTicket,
    clock,
    now,
    operations,
    wait_for_all,
)
from simulated.kernels import UpdatingDevice, on_device
from simulated.ranks import Wire, Wires, stand_ins
from swap import PastTransfer, SwapStats, SwapStore

PIECE_BYTES = 4 << 20  # of a kernel on the CPU, after which others have a turn
LEAST_BYTES = 64 << 10  # that a kernel does in one piece
# Commands, and doors: these import the libraries that they stand in, which takes seconds, and nothing of an engine.
_APART = ("offload.cli", "offload.__main__", "offload._cpu_adam", "offload.integrations.")


def costs_of(hardware: Hardware) -> Costs:
    """Return what operators and copies take on a machine."""
    return Costs(
        flops_16=hardware.flops_16 * hardware.flops_share,
        flops_32=hardware.flops_32 * hardware.flops_share,
        device_bytes=hardware.device_bytes_s,
        h2d_bytes=hardware.h2d_bytes_s,
        d2h_bytes=hardware.d2h_bytes_s,
        kernel_s=hardware.kernel_s,
        copy_s=hardware.copy_s,
        launch_s=hardware.launch_s,
        operator_s=hardware.operator_s,
    )


class Cpu:
    """The threads that share a kernel's work: one piece of a kernel at a time, at what memory has left."""

    def __init__(self, hardware: Hardware) -> None:
        self._core = simulated.load()
        self._hardware = hardware
        self._free_at = 0.0
        self.drives: list[Drive | Wire] = []  # that use the same memory

    def run(self, name: str, size_bytes: float) -> None:
        """Let the caller work on `size_bytes`, read and written together.

        What a piece takes at least goes by, and what copies have left of it meanwhile is done: they may begin then.
        """
        left = size_bytes
        while left > 0:
            piece = min(left, PIECE_BYTES)
            begin = max(self._core.now(), self._free_at)
            end = self._free_at = begin + piece / self._hardware.update_bytes_s
            moved = self._moved_by_drives()
            self._core.wait_until(end, f"cpu {name}")
            done = piece if piece <= LEAST_BYTES else self._done(begin, end, self._moved_by_drives() - moved)
            self._core.note("cpu", name, int(done), begin, end)
            left -= done

    def _moved_by_drives(self) -> float:
        return sum(drive.moved_bytes() for drive in self.drives)

    def _done(self, begin: float, end: float, moved: float) -> float:
        """Return the bytes of a kernel's work that memory had room for, beside copies and what drives have `moved`."""
        hardware, seconds = self._hardware, end - begin
        h2d_s, d2h_s, both_s = self._core.copying(begin, end)
        up, down, drives = hardware.h2d_bytes_s, hardware.d2h_bytes_s, moved / seconds
        times = (seconds - h2d_s - d2h_s - both_s, 0.0), (h2d_s, up), (d2h_s, down), (both_s, up + down)
        return sum(took_s * hardware.updates_beside(copied + drives) for took_s, copied in times)


class VirtualStore:
    """A swap store on a drive that goes by the clock. In a dry run it keeps lengths alone."""

    alignment = 4096
    capacity_bytes = 0  # it is never longer than the plan wants

    def __init__(self, cpu: Cpu, hardware: Hardware) -> None:
        self._dry = simulated.load().is_dry()
        self._objects: dict[Hashable, bytes | int] = {}
        self._done: list[tuple[Hashable, VirtualTicket]] = []
        self._drive = Drive(
            read=hardware.drive_read_bytes_s,
            write=hardware.drive_write_bytes_s,
            mixed=hardware.drive_mixed_bytes_s,
            latency_s=hardware.drive_s,
        )
        cpu.drives.append(self._drive)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._objects

    @property
    def used_bytes(self) -> int:
        """Bytes of all objects."""
        return sum(found if isinstance(found, int) else len(found) for found in self._objects.values())

    def put(self, key: Hashable, address: int, length: int, *, urgent: bool = False) -> VirtualTicket:
        """Begin to write an object; it takes the bytes at once."""
        self._objects[key] = length if self._dry else ctypes.string_at(address, length)
        self._done.append((key, self._drive.start("write", length, urgent=urgent)))
        return self._done[-1][1]

    def get(self, key: Hashable, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> VirtualTicket:
        """Begin to read an object; the bytes are there at the end."""
        found = self._objects[key]

        def deliver() -> None:
            if not isinstance(found, int):
                ctypes.memmove(address, found[offset : offset + length], length)

        self._done.append((key, self._drive.start("read", length, urgent=urgent, ended=deliver)))
        return self._done[-1][1]

    def put_many(self, items: Sequence[tuple[Hashable, int, int]], *, urgent: bool = False) -> list[VirtualTicket]:
        """Begin to write several objects."""
        return [self.put(*item, urgent=urgent) for item in items]

    def get_many(self, items: Sequence[tuple[Hashable, int, int]], *, urgent: bool = False) -> list[VirtualTicket]:
        """Begin to read several objects."""
        return [self.get(*item, urgent=urgent) for item in items]

    def delete(self, key: Hashable) -> None:
        """Forget an object."""
        del self._objects[key]

    def register_buffer(self, address: int, length: int) -> bool:
        """Nothing to do."""
        return True

    def unregister_buffer(self, address: int) -> None:
        """Nothing to do."""

    def stats(self) -> SwapStats:
        """Return nothing: what has been moved is among the operations."""
        return SwapStats(**{field.name: 0 for field in dataclasses.fields(SwapStats)})  # type: ignore[arg-type]

    def past(self, *, writes: bool) -> list[PastTransfer]:
        """Return all that is over."""
        over = [(key, t) for key, t in self._done if t.end <= now() and (t.side == "write") == writes]
        return [PastTransfer(key, ticket.begin, ticket.end, ticket.size_bytes) for key, ticket in over]

    def close(self) -> None:
        """End the drive."""
        self._drive.close()


class CpuKernels:
    """The compiled kernels with a price; in a dry run, with finite values and without bytes."""

    def __init__(self, cpu: Cpu, real: Any) -> None:
        self._cpu = cpu
        self._real = real
        self._dry = simulated.load().is_dry()

    def __getattr__(self, name: str) -> Any:
        prices: dict[str, Callable[..., float]] = {
            "step": _step_bytes,
            "take_gradient": lambda src, kind, dst, into, numel, add, measure, blocks: (
                numel * (_itemsize(kind) + _itemsize(into) * (2 if add else 1))
            ),
            "sum_of_squares": lambda address, kind, numel, blocks: numel * _itemsize(kind),
            "convert": lambda src, kind, dst, into, numel: numel * (_itemsize(kind) + _itemsize(into)),
            "accumulate": lambda acc, grad, kind, numel: numel * (8 + _itemsize(kind)),
            "accumulate_same": lambda acc, grad, kind, numel: 3 * numel * _itemsize(kind),
            "split_master": lambda src, param, remainder, numel: 8 * numel,
            "join_master": lambda param, remainder, dst, numel: 8 * numel,
        }
        price, real = prices.get(name), getattr(self._real, name)
        if price is None:
            return real

        def priced(*args: Any, **kwargs: Any) -> Any:
            if on_device():
                return real(*args, **kwargs)
            self._cpu.run(name, price(*args, **kwargs))
            if not self._dry:
                return real(*args, **kwargs)
            return (1.0, 0) if name in ("take_gradient", "sum_of_squares") else None

        return priced


def _itemsize(kind: Any) -> int:
    return Dtype(kind).itemsize


def _step_bytes(**arguments: Any) -> float:
    """Return what a step reads and writes: gradient once; parameter, master and states twice, wherever it writes."""
    split = arguments["master_kind"] == 0
    state = next(kind for kind in StateKind if kind.code == arguments["state_kind"])
    states = sum(1 for name in ("state0", "state1") if arguments[name])
    emitted = _itemsize(arguments["grad_dtype"]) if arguments["emit"] else 0
    element = _itemsize(arguments["grad_dtype"]) + 2 * (4 + states * state.itemsize) + emitted
    assert not split or arguments["param"]
    return float(arguments["numel"] * element)


class MemoryCalls:
    """Stands for ``ctypes``: copies and fills of memory have a price, and in a dry run no bytes."""

    def __init__(self, cpu: Cpu) -> None:
        self._cpu = cpu
        self._dry = simulated.load().is_dry()

    def __getattr__(self, name: str) -> Any:
        return getattr(ctypes, name)

    def memmove(self, target: Any, source: Any, size_bytes: int) -> None:
        """Copy: a byte is read and written."""
        self._cpu.run("copy", 2 * size_bytes)
        if not self._dry:
            ctypes.memmove(target, source, size_bytes)

    def memset(self, target: Any, value: int, size_bytes: int) -> None:
        """Fill."""
        self._cpu.run("fill", size_bytes)
        if not self._dry:
            ctypes.memset(target, value, size_bytes)


class Threading:
    """Stands for ``threading``: its locks are held by actors, and its events and conditions are theirs."""

    Lock = VirtualLock
    Condition = VirtualCondition
    Event = VirtualEvent

    def __getattr__(self, name: str) -> Any:
        return getattr(threading, name)


class AddressArena(Arena):
    """Host memory that is addresses alone: whoever touches it dies of SIGSEGV."""

    def __init__(self, tier: Tier, size_bytes: int) -> None:
        self._core = simulated.load()
        self._reserved = size_bytes + HUGE_PAGE_BYTES if size_bytes else 0
        self._start = self._core.reserve(self._reserved) if size_bytes else 0
        super().__init__(tier, size_bytes, HOST, None, round_up(self._start, HUGE_PAGE_BYTES))
        if size_bytes:
            self._core.lock(self.base_address, size_bytes)

    def close(self, busy: Any = (), *, written: bool = False) -> None:
        """Give the addresses back. Idempotent."""
        if self._reserved:
            self._core.unlock(self.base_address)
            self._core.give_back(self._start, self._reserved)
        self._reserved = 0
        super().close(())


class AddressDevice(AcceleratorDevice):
    """An accelerator whose host memory is addresses alone."""

    def host_arena(self, size_bytes: int) -> Arena:
        """Take addresses."""
        return AddressArena(Tier.HOST, size_bytes)


class UpdatingAddressDevice(AddressDevice, UpdatingDevice):
    """The same with kernels for updates."""


@dataclasses.dataclass(frozen=True)
class Use:
    """A module with parameters was called: when, and when the device will have done all that was given before."""

    unit: int
    asked: float
    begins: float


@dataclasses.dataclass(frozen=True)
class Made:
    """A gradient was handed over: when the device will have made it, and of how many elements it is."""

    unit: int
    slot: int
    numel: int
    ready: float


@dataclasses.dataclass
class Watch:
    """What is seen of an engine by the clock.

    Attributes:
        uses: of units, in the order of calls.
        made: gradients, likewise.
    """

    uses: list[Use] = dataclasses.field(default_factory=list)
    made: list[Made] = dataclasses.field(default_factory=list)

    def begin_window(self) -> None:
        """Forget what was seen so far."""
        core = simulated.load()
        self.uses.clear()
        self.made.clear()
        operations()
        core.waits(True)
        core.idle(True)


@contextlib.contextmanager
def engine_clock(
    hardware: Hardware, *, dry: bool, updates: bool = False, wires: Wires | None = None
) -> Iterator[Watch]:
    """Let engines that are made in the body go by the clock, on a machine of this kind.

    Args:
        hardware: the machine.
        dry: see :func:`simulated.clock.clock`.
        updates: the device has kernels for updates.
        wires: what connects each of several ranks with the others, for engines with a `stage`; for dry runs.
    """
    assert wires is None or dry
    watch = Watch()
    with clock(costs_of(hardware), dry=dry), contextlib.ExitStack() as undo:
        cpu = Cpu(hardware)
        plain, updating = (AddressDevice, UpdatingAddressDevice) if dry else (AcceleratorDevice, UpdatingDevice)
        device = updating if updates else plain
        kernels = CpuKernels(cpu, importlib.import_module("offload._cpu_adam"))
        core = simulated.load()
        moments = types.SimpleNamespace(
            perf_counter=core.now, monotonic=core.now, sleep=lambda s: core.wait_until(core.now() + s, "pause")
        )
        everywhere: dict[str, tuple[Any, Any]] = {
            "ThreadPoolExecutor": (ThreadPoolExecutor, VirtualExecutor),
            "Errands": (Errands, VirtualErrands),
            "wait": (concurrent.futures.wait, wait_for_all),
            "threading": (threading, Threading()),
            "ctypes": (ctypes, MemoryCalls(cpu)),
            "_cpu_adam": (kernels._real, kernels),
            "time": (sys.modules["time"], moments),
            "SwapStore": (SwapStore, lambda *_, **__: VirtualStore(cpu, hardware)),
        }
        for module in _engine_modules():
            for name, (real, stand_in) in everywhere.items():
                if getattr(module, name, None) is real:
                    undo.enter_context(_instead(module, name, stand_in))
        if wires is not None:
            wire = Wire(wires)
            cpu.drives.append(wire)
            for (place, name), stand_in in stand_ins(wire).items():
                undo.enter_context(_instead(sys.modules[place], name, stand_in))
        undo.enter_context(_instead(sys.modules["offload.memory.devices"], "AcceleratorDevice", device))
        undo.enter_context(_instead(sys.modules["offload.memory.page_lock"], "_touch", lambda *_: None))
        undo.enter_context(_instead(Hooks, "_before_forward", _timed_forward(hardware, watch)))
        undo.enter_context(_instead(GradientHooks, "_take", _timed_gradient(hardware, watch)))
        with simulated.limit(int(hardware.device_bytes)):
            yield watch


def untouched(model: nn.Module) -> nn.Module:
    """Give a model on the meta device memory of the host that nobody touches: addresses, and no values."""
    return model.to_empty(device="cpu")


def _engine_modules() -> list[types.ModuleType]:
    for found in pkgutil.walk_packages(offload.__path__, "offload."):
        if not found.name.startswith(_APART):
            importlib.import_module(found.name)
    return [module for name, module in sorted(sys.modules.items()) if name.startswith("offload.")]


@contextlib.contextmanager
def _instead(owner: Any, name: str, value: Any) -> Iterator[None]:
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def _timed_forward(hardware: Hardware, watch: Watch) -> Callable[..., None]:
    before, core = Hooks._before_forward, simulated.load()

    def timed(self: Hooks, module: nn.Module, args: Any, kwargs: Any) -> None:
        core.spend(hardware.hook_s, "")
        units = self._leases[module]
        if units and (not watch.uses or watch.uses[-1].unit != units[0]):
            watch.uses.append(Use(units[0], core.now(), core.end_of(0)))
        before(self, module, args, kwargs)

    return timed


def _timed_gradient(hardware: Hardware, watch: Watch) -> Callable[..., None]:
    before, core = GradientHooks._take, simulated.load()

    def timed(self: GradientHooks, parameter: Any, unit: int, slot: int) -> None:
        core.spend(hardware.gradient_s, "")
        watch.made.append(Made(unit, slot, parameter.numel(), core.end_of(0)))
        before(self, parameter, unit, slot)

    return timed
