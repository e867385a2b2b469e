"""What this machine gives: seconds of a model's operators, and bytes per second of updates, copies, memory and drives.

Owns how each is measured, and the file in the user's cache folder that keeps it, per machine and version of torch.
Operators run one by one, on tensors of the shapes that a pass over the meta device has seen: no model is loaded.
Updates and copies are those of an engine with a small model, and drives are reached through a store as engines have
one. Next: :mod:`offload.predicting` makes seconds of a step of them.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import logging
import statistics
import time
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload.engine import Engine
from offload.kernels import cpu_adam
from offload.kernels.optimizers import SGD
from offload.memory import drives
from offload.memory.arena import HOST, HostArena, bytes_at, fill_with_noise
from offload.memory.budget import Tier
from offload.memory.device import Device
from offload.memory.kept import keep, read_kept
from offload.memory.limits import free_host_bytes, total_host_bytes
from offload.memory.machine import cpu_name, queued_s
from offload.optim.copies import is_plain
from offload.optim.probe import OwnHyper
from offload.optim.rules import StepOf, rule_of
from offload.planning.hardware import DESKTOP, Hardware
from offload.planning.moved import update_bytes
from offload.planning.plan import Plan
from offload.planning.work import Blank, Call, Kernel, Work, work_of
from offload.sizes import MIB, figures
from offload.spec import OptimizerSpec
from swap import SwapStore, wait_all
from swap.store import StoreTicket

logger = logging.getLogger(__name__)

_ENOUGH_S, _LEAST, _MOST = 0.03, 3, 7  # of one measurement: so long, and so often
_IN_SUCCESSION = 20
_QUEUED_SHARE = 0.05  # of a measurement, that its threads may wait for a processor that others have
_DISTURBED_S = 0.2  # of one measurement, until it is taken as it is
_CACHE_BYTES = 64 * MIB
ROOM_SHARE = 1 / 2  # of what is free, for tensors of an operator that is measured
_WIDE, _LAYERS = 2048, 4  # of the small model: 32 MiB of parameters, and 192 MiB of states
_WIDE_BESIDE = 4096  # of that which a processor updates for another device: more than caches of a server have room for
_ROWS, _STEPS = 128, 9  # that it computes on, so that caches are as cold as in a step of others
_NARROW, _HEADS, _SMALL_LAYERS = 32, 4, 8  # of kernels that take no time
_OBJECT_BYTES, _OBJECTS = 4 * MIB, 64
_COPY_BYTES = 128 * MIB
_NONE = 1e6  # bytes per second of a drive that nobody has named: the least that a machine may have

_RATES = ("update", "h2d", "d2h")
_HOST_COSTS = ("operator", "hook", "gradient")
_LITTLE = 1e-9
_OPERATOR, _PRODUCTS = "Call(", "products in"  # the names of these begin so

_ATTENTION = "aten._scaled_dot_product_flash_attention.default"
_ATTENTION_BACKWARD = "aten._scaled_dot_product_flash_attention_backward.default"


class Here:
    """This machine, as far as it was measured; what was not is measured when it is asked for.

    A context manager: at its end, however that comes, what was measured is kept.

    Attributes:
        file: that keeps it.
    """

    def __init__(self, device: Device, *, again: bool = False) -> None:
        """Read what is kept of the machine; with `again`, forget it."""
        self._device = device
        self.file = drives.cache_file().with_name("measured.json")
        threads = f"{torch.get_num_threads()} threads, {cpu_adam.num_threads()} of updates"
        self._name = f"{device.name()}; {cpu_name()}; torch {torch.__version__}; {threads}"
        known = {} if again else read_kept(self.file).get(self._name)
        self._known: dict[str, Any] = known if isinstance(known, dict) else {}

    def __enter__(self) -> Here:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Write what is known; whoever cannot write measures again next time."""
        try:
            keep(self.file, self._name, self._known)
        except OSError as refusal:
            logger.warning("measurements: not kept in %s (%s)", self.file, refusal)

    @property
    def operators(self) -> int:
        """How many operators were measured."""
        return sum(name.startswith(_OPERATOR) for name in self._known)

    @property
    def rates(self) -> list[str]:
        """What else was measured, in words: of each thing a line."""
        found = []
        for name, kept in sorted(self._known.items()):
            parts = kept if isinstance(kept, dict) else {"": kept}
            if parts and not name.startswith(_OPERATOR) and all(map(_is_measured, parts.values())):
                found.append(f"{name}: {', '.join(_in_words(name, part, value) for part, value in parts.items())}")
        return found

    def timed(self, work: Work, hardware: Hardware) -> Work:
        """Return the work with the seconds that its kernels take on the device.

        Args:
            work: counted.
            hardware: this machine, for operators that do not run alone: what they take follows from their bytes.
        """
        kernels, known, too_large = {**work.forward, **work.backward}, dict[Kernel, float | None](), set[Kernel]()
        for kernel in kernels:
            try:
                known[kernel] = self._kernel_s(kernel)
            except torch.OutOfMemoryError:  # nothing is known of it: there may be room next time
                known[kernel] = None
                too_large.add(kernel)
        alone = {kernel: kernel.seconds(hardware) if took is None else took for kernel, took in known.items()}
        forward_s, backward_s = (
            sum(alone[kernel] * many for kernel, many in part.items()) for part in (work.forward, work.backward)
        )
        return dataclasses.replace(
            work,
            measured_s=(forward_s, backward_s),
            unmeasured=_operators(kernel for kernel in kernels if known[kernel] is None and kernel not in too_large),
            too_large=_operators(too_large),
        )

    def _kernel_s(self, kernel: Kernel) -> float | None:
        """Return the seconds of one kernel; None where it does not run alone.

        Raises:
            torch.OutOfMemoryError: it was not measured, for too little memory is free.
        """

        def measured() -> float | None:
            if kernel.size_bytes > self._room_bytes():
                self._device.trim()  # of what was measured before
                if kernel.size_bytes > self._room_bytes():
                    raise torch.OutOfMemoryError(f"{kernel.call.operator}: expected room for its tensors; free memory")
            return seconds_of(kernel.call, self._device)

        found: float | None = self._value(str(kernel.call), measured)
        return found

    def _room_bytes(self) -> int:
        """Return the bytes that tensors of one operator may have: it may want as much again while it runs."""
        free_bytes = free_host_bytes() if self._device.addressable else self._device.free_bytes()
        return int(free_bytes * ROOM_SHARE)

    def hardware(
        self,
        optimizer: OptimizerSpec | torch.optim.Optimizer,
        *,
        state_dtype: str,
        paths: Sequence[Path],
        chunk_numel: int,
        streams_states: bool,
    ) -> Hardware:
        """Return the machine's numbers.

        Args:
            optimizer: whose updates are measured; of another model, so that its class and options count.
            state_dtype: in which it keeps its states.
            paths: directories on the drives; where none is named, the drive has no speed.
            chunk_numel: elements that are updated at once.
            streams_states: they pass through memory from a drive. A CPU that computes has to see to each chunk: what it
                takes for that counts as time of updates.
        """
        step = _step_of(optimizer)
        what = f"{_who_makes(step, optimizer)} with {state_dtype}"
        names = "; ".join(drives.device_of(path) or str(path) for path in paths)
        if tuned := drives.store_options(paths):  # which `offload tune` may change
            names += f" with {', '.join(f'{name} {value}' for name, value in tuned.items())}"
        at_once = f"{chunk_numel} elements at once"
        rates = self._value(
            f"updates of {what}, {at_once}",
            lambda: _engine_rates(self._device, step, state_dtype, chunk_numel),
            _RATES,
        )
        update_bytes_s = rates["update"]
        if paths and streams_states and self._device.addressable:
            update_bytes_s = self._value(
                f"updates of {what} through drive {names}, {at_once}",
                lambda: _streamed_rate(self._device, step, state_dtype, paths, chunk_numel),
            )
        products = {
            dtype: self._value(f"{_PRODUCTS} {dtype}", functools.partial(_product_rate, self._device, dtype))
            for dtype in (torch.bfloat16, torch.float32)
        }
        copies = {
            place: self._value(f"memory of {place}", functools.partial(_copy_rate, self._device, place))
            for place in ("device", "host")
        }
        drive = dict.fromkeys(_DRIVE, _NONE)
        if paths:
            drive = self._value(f"drive {names}", lambda: _drive_rates(paths), _DRIVE)
        beside = not self._device.addressable
        host = self._value("the host's part of a step", lambda: _host_costs(self._device), _HOST_COSTS)
        return Hardware(
            name="this machine",
            flops_16=products[torch.bfloat16],
            flops_32=products[torch.float32],
            flops_share=1.0,
            device_bytes=self._device.total_bytes(),
            device_bytes_s=copies["device"],
            h2d_bytes_s=rates["h2d"],
            d2h_bytes_s=rates["d2h"],
            host_bytes=total_host_bytes(),
            host_bytes_s=max(copies["host"], rates["update"], update_bytes_s),
            update_bytes_s=update_bytes_s,
            drive_read_bytes_s=drive["read"],
            drive_write_bytes_s=drive["write"],
            drive_mixed_bytes_s=min(drive["mixed"], drive["read"] + drive["write"]),
            drive_s=0.0,  # in the seconds of objects
            kernel_s=0.0,  # in those of operators
            copy_s=DESKTOP.copy_s * beside,
            launch_s=DESKTOP.launch_s * beside,
            operator_s=host["operator"],
            hook_s=host["hook"],
            gradient_s=host["gradient"],
        )

    def _value(self, name: str, measure: Callable[[], Any], parts: Collection[str] = ()) -> Any:
        """Return what is known by a name, or is measured now: a number, or one for each of `parts`.

        What is kept is measured again if it cannot be that: somebody else has written to the file.
        """
        kept = self._known.get(name)
        if parts:
            is_one = isinstance(kept, dict) and kept.keys() == set(parts) and all(map(_is_measured, kept.values()))
        else:  # an operator may be known to be one that does not run alone
            is_one = _is_measured(kept) or (kept is None and name in self._known and name.startswith(_OPERATOR))
        if not is_one:
            self._known[name] = measure()
        return self._known[name]


def _operators(kernels: Iterable[Kernel]) -> tuple[str, ...]:
    """Return the names of the operators."""
    return tuple(sorted({kernel.call.operator for kernel in kernels}))


def _is_measured(value: object) -> bool:
    """Tell whether it is a number that may have been measured: seconds, or something per second."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and 1e-15 < value < 1e18


def _in_words(name: str, part: str, value: float) -> str:
    """Return a number that was measured, with its unit."""
    if part in _HOST_COSTS:
        text = f"{figures(value * 1e6)} us"
    else:
        text = f"{figures(value / 1e12)} TFLOP/s" if name.startswith(_PRODUCTS) else f"{figures(value / 1e9)} GB/s"
    return f"{part} {text}".lstrip()


# --- operators --------------------------------------------------------------------------------------------------------


def seconds_of(call: Call, device: Device) -> float | None:
    """Return the seconds of one operator on `device`; None where it does not run alone.

    Raises:
        torch.OutOfMemoryError: the device has no room for it.
    """
    try:
        run = _run_of(call, device)
        with torch.no_grad():
            return _median_s(run, device)
    except torch.OutOfMemoryError:
        raise
    except (RuntimeError, TypeError, ValueError, IndexError, AttributeError) as error:
        logger.info("operator %s: not measured, for it does not run alone: %s", call.operator, error)
        return None


def _run_of(call: Call, device: Device) -> Callable[[], Any]:
    """Return what runs an operator, on tensors with content. Attention takes the kernel that torch takes here."""
    if call.operator == _ATTENTION:
        return _attention_of(call, device)[0]
    if call.operator == _ATTENTION_BACKWARD:
        attend, parts = _attention_of(call, device, backward=True)
        output, gradient = attend(), _filled(call.arguments[0], device)

        def go_back() -> None:
            torch.autograd.backward(output, gradient, retain_graph=True, inputs=parts)
            for part in parts:
                part.grad = None

        return go_back
    operator: Any = functools.reduce(getattr, call.operator.split("."), torch.ops)
    arguments = [_filled(value, device) for value in call.arguments]
    named = {name: device.place if name == "device" else _filled(value, device) for name, value in call.named}
    return functools.partial(operator, *arguments, **named)


def _attention_of(
    call: Call, device: Device, *, backward: bool = False
) -> tuple[Callable[[], torch.Tensor], list[torch.Tensor]]:
    """Return attention, and the query, key and value of it."""
    blanks, causal = (call.arguments[1:4], call.arguments[11]) if backward else (call.arguments[:3], call.arguments[4])
    parts = [_filled(blank, device).requires_grad_(backward) for blank in blanks]
    query, key, value = parts
    attend = functools.partial(nn.functional.scaled_dot_product_attention, query, key, value, is_causal=bool(causal))
    return attend, parts


def _filled(value: Any, device: Device) -> Any:
    """Return an argument with content: ones of floats, which no kernel minds, and zeros as indices."""
    if isinstance(value, tuple):
        return [_filled(one, device) for one in value]
    if not isinstance(value, Blank):
        return value
    extent = 1 + sum((size - 1) * stride for size, stride in zip(value.shape, value.strides, strict=True))
    content = 1 if value.dtype.is_floating_point or value.dtype is torch.bool else 0
    memory = torch.full((max(extent, 0),), content, dtype=value.dtype, device=device.place)
    return memory.as_strided(value.shape, value.strides)


def _median_s(run: Callable[[], Any], device: Device, *, cold: bool = True) -> float:
    """Return the seconds of a call, the median of some, after one that is not counted.

    If `cold`, caches of a processor are filled with something else in between, as by the other operators of a step.
    On another device a measurement is of several calls in succession, as the host does not wait for each in a step.
    Calls whose threads have waited for a processor that others had do not count, unless all of them have: threads of
    an operator wait for each other, and so a tenth of a millisecond takes five.
    """
    others = torch.ones(_CACHE_BYTES, dtype=torch.uint8) if device.addressable and cold else None
    many = 1 if device.addressable else _IN_SUCCESSION
    run()
    device.synchronize()
    seconds, disturbed = list[float](), list[float]()
    while len(seconds) < _LEAST or (sum(seconds) < _ENOUGH_S and len(seconds) < _MOST):
        if others is not None:
            others.add_(1)
        queued, begin = queued_s(), time.perf_counter()
        for _ in range(many):
            run()
        device.synchronize()
        took = time.perf_counter() - begin
        own = queued_s() - queued <= _QUEUED_SHARE * took
        (seconds if own else disturbed).append(took / many)
        if sum(disturbed) * many > _DISTURBED_S:
            break
    if not seconds:
        warnings.warn(
            "measuring: other processes have the processors, so seconds of this machine are too long; end them, and "
            "measure again",
            stacklevel=2,
        )
    return statistics.median(seconds or [min(disturbed)])


def _product_rate(device: Device, dtype: torch.dtype) -> float:
    one = torch.ones(_WIDE, _WIDE, dtype=dtype, device=device.place)
    return 2.0 * _WIDE**3 / _median_s(lambda: one @ one, device)


class _Block(nn.Module):
    """A decoder's layer in small: the operators that most models have, between Python of as many lines."""

    def __init__(self) -> None:
        super().__init__()
        linears = (nn.Linear(_NARROW, _NARROW, bias=False) for _ in range(7))
        self.query, self.key, self.value, self.out, self.gate, self.up, self.down = linears
        self.before, self.between = (nn.Parameter(torch.ones(_NARROW)) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = _normalized(x, self.before)
        parts = (part(y) for part in (self.query, self.key, self.value))
        query, key, value = (part.view(1, -1, _HEADS, _NARROW // _HEADS).transpose(1, 2) for part in parts)
        query, key = (one + torch.cat((-one[..., 1:], one[..., :1]), dim=-1) * 0.5 for one in (query, key))
        y = nn.functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(x.shape))
        y = _normalized(x, self.between)
        more: torch.Tensor = self.down(nn.functional.silu(self.gate(y)) * self.up(y))
        return x + more


def _normalized(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return scale * (x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6))


class _Blocks(nn.Module):
    """Some of them, checkpointed."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(_Block() for _ in range(_SMALL_LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x.sum()


def _host_costs(device: Device) -> dict[str, float]:
    """Return the host's seconds per operator, with its share of modules, autograd and checkpointing.

    And what an engine adds to these: per call of a module, and per gradient that leaves the device. Where the device is
    the CPU, what the operators take alone is not in it.
    """
    net, x = _Blocks(), torch.ones(1, _HEADS, _NARROW, device=device.place)
    work = work_of(net, (x.cpu(),), on_cpu=device.addressable)
    plain = copy.deepcopy(net).to(device.place)
    forward_s, backward_s = _passes_s(plain, lambda loss: loss.backward(), plain.zero_grad, x, device)
    options: dict[str, Any] = {"offload_param": "none", "offload_optimizer": "cpu"}
    options["max_grad_norm"] = _LITTLE  # every step clips: no update is made in backward
    with Engine(net, SGD(lr=0.0), device=str(device.place), **options) as engine:

        def end() -> None:
            engine.step()
            engine.drain()  # a forward waits for updates by itself

        ours_s = _passes_s(engine, engine.backward, end, x, device)
    calls = sum(isinstance(module, (_Block, nn.Linear)) for module in net.modules())  # in a forward, and once more
    hook_s = max(ours_s[0] - forward_s, _LITTLE) / calls
    more_s = ours_s[1] - backward_s - hook_s * calls
    alone_s = _alone_s(work, device) if device.addressable else 0.0
    return {
        "operator": max(forward_s + backward_s - alone_s, _LITTLE) / sum(work.operators),
        "hook": hook_s,
        "gradient": max(more_s, _LITTLE) / len(list(net.parameters())),
    }


def _alone_s(work: Work, device: Device) -> float:
    """Return the seconds of all operators of a small model, in succession, and nothing between them."""
    runs = [
        (_run_of(kernel.call, device), many) for part in (work.forward, work.backward) for kernel, many in part.items()
    ]

    def run() -> None:
        for operator, many in runs:
            for _ in range(many):
                operator()

    with torch.no_grad():
        return _median_s(run, device, cold=False)


def _passes_s(
    model: Callable[[torch.Tensor], torch.Tensor],
    go_back: Callable[[torch.Tensor], object],
    end: Callable[[], object],
    x: torch.Tensor,
    device: Device,
) -> tuple[float, float]:
    """Return the median seconds of a forward and of a backward pass; each is waited for."""
    seconds: list[tuple[float, float]] = []
    for _ in range(1 + _MOST):
        device.synchronize()
        begin = time.perf_counter()
        loss = model(x)
        device.synchronize()
        between = time.perf_counter()
        go_back(loss)
        device.synchronize()
        seconds.append((between - begin, time.perf_counter() - between))
        end()
    forward_s, backward_s = (statistics.median(taken) for taken in zip(*seconds[1:], strict=True))
    return forward_s, backward_s


# --- memory, updates, copies, drives ----------------------------------------------------------------------------------


def _copy_rate(device: Device, place: str) -> float:
    """Return bytes per second of memory, read and written together."""
    where = device.place if place == "device" else torch.device("cpu")
    source = torch.ones(_COPY_BYTES, dtype=torch.uint8, device=where)
    target = torch.zeros_like(source)
    return 2.0 * _COPY_BYTES / _median_s(lambda: target.copy_(source), device)


@dataclasses.dataclass(frozen=True, slots=True)
class _Steps:
    """Steps of an engine with a small model: the seconds of each one, behind the first.

    Attributes:
        plan: the engine's.
        busy_s: per link, in which it was busy.
        processor_s: that the thread which computes had of a processor.
    """

    plan: Plan
    busy_s: Mapping[str, float]
    processor_s: float


def _step_of(optimizer: OptimizerSpec | torch.optim.Optimizer) -> StepOf:
    """Return what a step needs to know; of several param groups, that of the largest parameter counts, or the first."""
    if isinstance(optimizer, OptimizerSpec):
        group: Mapping[str, Any] = optimizer.options_by_group()[0]
    else:
        group = max(optimizer.param_groups, key=lambda one: max((p.numel() for p in one["params"]), default=0))
    return rule_of(optimizer).hyper(group, 1, 1.0)


def _who_makes(step: StepOf, optimizer: object) -> str:
    """Return a name of what makes a step: a kernel and its states, or a class of torch with the options that are set.

    What a class does in a step may depend on each option. Of a fraction, only whether it is 0 counts.
    """
    if not isinstance(step, OwnHyper):
        return f"{type(step.spec).__module__}.{type(step.spec).__name__}({', '.join(step.spec.states)})"
    said = {name: value for name, value in sorted(step.options.items()) if is_plain(value) and value}
    options = ", ".join(f"{name}={value}" if isinstance(value, (int, str)) else name for name, value in said.items())
    return f"{type(optimizer).__module__}.{type(optimizer).__name__}({options})"


def _steps_of(device: Device, step: StepOf, **options: Any) -> _Steps:
    """Return what the median step of an engine takes."""
    wide = _WIDE if device.addressable else _WIDE_BESIDE
    model = nn.Sequential(*(nn.Linear(wide, wide, bias=False, dtype=torch.bfloat16) for _ in range(_LAYERS)))
    x = torch.ones(_ROWS, wide, dtype=torch.bfloat16, device=device.place)
    optimizer: OptimizerSpec | torch.optim.Optimizer
    if isinstance(step, OwnHyper):
        like = next(iter(step.members.values()))
        optimizer = step.make([like.group(step.options, list(model.parameters()))])
    else:
        optimizer = step.spec
    with Engine(model, optimizer, device=str(device.place), offload_param="cpu", **options) as engine:
        seen, clock = [], []
        for _ in range(1 + _STEPS):
            engine.backward(engine(x).float().sum() * 0)  # gradients of zero: no learning rate makes weights diverge
            engine.step()
            engine.drain()
            seen.append(engine.stats().links)
            clock.append(time.thread_time())
        plan = engine.plan
    busy_s = {link: _median_growth([links[link].seconds for links in seen]) for link in seen[0]}
    return _Steps(plan, busy_s, _median_growth(clock))


def _median_growth(values: Sequence[float]) -> float:
    """Return by how much each value is larger than the one before, the median."""
    return statistics.median(after - before for before, after in itertools.pairwise(values))


def _engine_rates(device: Device, step: StepOf, state_dtype: str, chunk_numel: int) -> dict[str, float]:
    """Return bytes per second of updates, as an engine counts them, and of copies: states are in host memory."""
    options = {"state_dtype": state_dtype, "chunk_numel": chunk_numel, "offload_optimizer": "cpu"}
    steps = _steps_of(device, step, **options)
    rates = {"update": _updated_bytes(steps.plan) / steps.busy_s["cpu_adam"]}
    for link in ("h2d", "d2h"):
        took = steps.busy_s[link]
        if device.addressable:
            rates[link] = (steps.plan.step_bytes[link] / took if took > 0 else 0.0) or _copy_rate(device, "host") / 2
        else:
            rates[link] = _link_rate(device, to_device=link == "h2d")
    return rates


def _link_rate(device: Device, *, to_device: bool) -> float:
    """Return bytes per second of copies from host memory as engines have it to another device, or back."""
    arena = device.host_arena(_COPY_BYTES)
    try:
        host = bytes_at(arena.take(_COPY_BYTES).address, _COPY_BYTES, HOST)
        there = torch.zeros(_COPY_BYTES, dtype=torch.uint8, device=device.place)
        source, target = (host, there) if to_device else (there, host)
        return _COPY_BYTES / _median_s(lambda: target.copy_(source, non_blocking=True), device)
    finally:
        device.synchronize()  # also where something is queued, and nobody has waited for it
        arena.close()


def _streamed_rate(device: Device, step: StepOf, state_dtype: str, paths: Sequence[Path], chunk_numel: int) -> float:
    """Return bytes per second of updates whose states are on drives, with what the processor takes to stream these."""
    there, streamed = (
        _steps_of(device, step, state_dtype=state_dtype, chunk_numel=chunk_numel, **options)
        for options in (
            {"offload_optimizer": "cpu"},
            {"offload_optimizer": "nvme", "nvme_path": [str(path) for path in paths]},
        )
    )
    more_s = max(streamed.processor_s - there.processor_s, 0.0)
    return _updated_bytes(there.plan) / (there.busy_s["cpu_adam"] + more_s)


def _updated_bytes(plan: Plan) -> int:
    return sum(update_bytes(plan, unit) for unit in plan.request.units)


_DRIVE = ("write", "read", "mixed")


def _drive_rates(paths: Sequence[Path]) -> dict[str, float]:
    """Return bytes per second of the drives together, through a store as an engine has one."""
    arena = HostArena(Tier.HOST, _OBJECTS * _OBJECT_BYTES)
    fill_with_noise(arena.base_address, arena.size_bytes)  # some drives and file systems do not write zeros
    items = [(number, arena.base_address + number * _OBJECT_BYTES, _OBJECT_BYTES) for number in range(_OBJECTS)]

    def start(store: SwapStore, way: str) -> list[StoreTicket]:
        if way == "mixed":
            pairs = zip(items[::2], items[1::2], strict=True)
            return [ticket for put, get in pairs for ticket in (store.put(*put), store.get(*get))]
        return store.put_many(items) if way == "write" else store.get_many(items)

    seconds: dict[str, list[float]] = {way: [] for way in _DRIVE}
    with SwapStore(list(paths), 3 * _OBJECTS * _OBJECT_BYTES, **drives.store_options(paths)) as store:
        if not store.direct:
            warnings.warn(
                f"measuring: without direct I/O (O_DIRECT) in {', '.join(map(str, paths))}, speeds of the drive may be "
                "those of main memory; name a directory on another file system",
                stacklevel=2,
            )
        for _ in range(1 + _LEAST):
            for way in _DRIVE:
                begin = time.perf_counter()
                wait_all(start(store, way))
                seconds[way].append(time.perf_counter() - begin)
    return {way: _OBJECTS * _OBJECT_BYTES / statistics.median(took[1:]) for way, took in seconds.items()}
