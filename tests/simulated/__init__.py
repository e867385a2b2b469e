"""A simulated accelerator, torch's device "sim": its streams run as late, or as early, as an adversary chooses.

It proves order: who waits for whom, over which bytes. Kernels are the CPU's, so results have the CPU's bits. It knows
nothing of the project. :func:`load` registers the device, :func:`running` sets a schedule; streams.h says what work is.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import importlib.util
import types
from collections.abc import Iterator
from typing import Any

from simulated.build import CannotBuild as CannotBuild
from simulated.build import library

NAME = "sim"


@dataclasses.dataclass(frozen=True)
class Schedule:
    """When work that was given to a stream runs; the default is lazy: when something waits for it.

    Attributes:
        name: for tests.
        eager: everything runs at once.
        first: numbers of streams whose work runs at once: 0 is a device's default stream, n the n-th that was made.
        seed: of a random choice of streams after each call; None makes no choices.
    """

    name: str
    eager: bool = False
    first: tuple[int, ...] = ()
    seed: int | None = None


LAZY = Schedule("lazy")
EAGER = Schedule("eager", eager=True)


def first(*streams: int) -> Schedule:
    """Return the schedule in which some streams run at once and the others are lazy."""
    return Schedule("first " + " ".join(map(str, streams)), first=streams)


def at_random(seed: int) -> Schedule:
    """Return a schedule that depends on `seed` alone."""
    return Schedule(f"seed {seed}", seed=seed)


def fixed(streams: int) -> list[Schedule]:
    """Return schedules for a program that makes `streams` streams.

    For a fixed order of host calls, two operations that nothing orders run in both orders in some of them.
    """
    return [LAZY, EAGER, *(first(number) for number in range(streams + 1))]


@dataclasses.dataclass
class Run:
    """What was seen while a schedule was in force; complete when it has ended.

    Attributes:
        races: accesses that nothing orders, each naming both operations and their streams.
        counts: per stream ("sim:0/1") what was counted.
        order: of what ran, as "stream operation".
    """

    races: list[str] = dataclasses.field(default_factory=list)
    counts: dict[str, dict[str, int]] = dataclasses.field(default_factory=dict)
    order: list[str] = dataclasses.field(default_factory=list)

    def total(self, what: str) -> int:
        """Return the sum over all streams."""
        return sum(counts.get(what, 0) for counts in self.counts.values())


@functools.cache
def load() -> Any:
    """Build the device where need be and register it; returns the extension. From then on torch has an accelerator.

    Raises:
        CannotBuild: this machine cannot.
    """
    import torch

    path = library()
    spec = importlib.util.spec_from_file_location("_simulated", path)
    assert spec is not None and spec.loader is not None
    core = importlib.util.module_from_spec(spec)
    torch.utils.rename_privateuse1_backend(NAME)
    spec.loader.exec_module(core)
    torch._register_device_module(NAME, _device_module(core))
    torch.utils.generate_methods_for_privateuse1_backend(for_storage=True)
    _begin(core, EAGER)
    return core


@contextlib.contextmanager
def running(schedule: Schedule, *, check: bool = True) -> Iterator[Run]:
    """Run the body under `schedule`; streams are numbered in the order in which the body makes them.

    Args:
        schedule: in force until the body ends; what is queued then runs.
        check: look for accesses that nothing orders.
    """
    core, run = load(), Run()
    _begin(core, schedule)
    core.check(check)
    core.trace(True)
    core.counts(True)
    try:
        yield run
    finally:
        run.counts = counts()
        run.races = core.races()
        core.check(False)
        try:
            _begin(core, EAGER)  # waits for everything
        finally:
            run.order = core.trace(False)


def counts() -> dict[str, dict[str, int]]:
    """Return per stream what was counted: kernels, copies, bytes and synchronisations by direction and kind."""
    core = load()
    return {_stream_name(core, number): found for number, found in enumerate(core.counts(False)) if found}


def pending() -> dict[str, int]:
    """Return per stream how many operations have not run yet."""
    core = load()
    return {_stream_name(core, number): many for number, many in enumerate(core.pending()) if many}


@contextlib.contextmanager
def limit(size_bytes: int, device: int = 0) -> Iterator[None]:
    """Let a device have `size_bytes` of memory: more raises torch.OutOfMemoryError."""
    core = load()
    before = core.usage(device)[2]
    core.set_limit(device, size_bytes)
    try:
        yield
    finally:
        core.set_limit(device, before)


def _begin(core: Any, schedule: Schedule) -> None:
    core.begin(schedule.eager, list(schedule.first), schedule.seed is not None, schedule.seed or 0)


def _stream_name(core: Any, number: int) -> str:
    return f"{NAME}:{number // core.STREAMS}/{number % core.STREAMS}"


def _device_module(core: Any) -> types.ModuleType:
    """Return what torch.get_device_module("sim") is: the functions that other back ends have, by the same names."""
    import torch

    def index(device: Any = None) -> int:
        found = torch.device(device).index if isinstance(device, (str, torch.device)) else device
        return core.current_device() if found is None else found

    @contextlib.contextmanager
    def device(device: Any) -> Iterator[None]:
        before = core.exchange_device(index(device))
        try:
            yield
        finally:
            core.exchange_device(before)

    def mem_get_info(device: Any = None) -> tuple[int, int]:
        used, _, most = core.usage(index(device))
        return most - used, most

    def seed_all(seed: int) -> None:
        for number in range(core.DEVICES):
            core.set_random_state(number, seed & (2**63 - 1), 0)

    def random_state(device: Any = None) -> torch.Tensor:
        return torch.tensor(core.random_state(index(device)), dtype=torch.int64).view(torch.uint8)

    def set_random_state(state: torch.Tensor, device: Any = None) -> None:
        core.set_random_state(index(device), *state.view(torch.int64).tolist())

    module = types.ModuleType(f"torch.{NAME}")
    contents: dict[str, Any] = {
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "_initialized": True,  # what torch's checkpointing asks, before it keeps random states of a device
        "_is_in_bad_fork": lambda: False,
        "device_count": lambda: core.DEVICES,
        "current_device": core.current_device,
        "set_device": lambda device: core.exchange_device(index(device)) and None,
        "device": device,
        "get_device_name": lambda device=None: "simulated accelerator",
        "Stream": torch.Stream,
        "Event": torch.Event,
        "current_stream": lambda device=None: torch.accelerator.current_stream(index(device)),
        "synchronize": lambda device=None: torch.accelerator.synchronize(index(device)),
        "memory_allocated": lambda device=None: core.usage(index(device))[0],
        "max_memory_allocated": lambda device=None: core.usage(index(device))[1],
        "reset_peak_memory_stats": lambda device=None: core.reset_peak(index(device)),
        "mem_get_info": mem_get_info,
        "empty_cache": lambda: [core.empty_cache(number) for number in range(core.DEVICES)] and None,
        "host_register": core.lock,
        "host_unregister": core.unlock,
        "manual_seed": seed_all,
        "manual_seed_all": seed_all,
        "get_rng_state": random_state,
        "set_rng_state": set_random_state,
        "get_amp_supported_dtype": lambda: [torch.bfloat16, torch.float16],
    }
    for name, value in contents.items():
        setattr(module, name, value)
    return module
