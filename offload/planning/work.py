"""What a device has to do for one micro-batch, found out without a device: operators of a forward and a backward pass.

Owns the pass over the meta device, where tensors have shapes and no bytes, and what it counts (:class:`Work`): the
operations and bytes of each operator, and the bytes that are alive at once beside parameters. Knows neither plans nor
machines. Next: :mod:`offload.planning.timing` makes seconds of it.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.flop_counter import flop_registry

from offload.errors import ConfigError, StateError
from offload.nested import tensors_in
from offload.planning.hardware import Hardware
from offload.planning.meta_operators import GROUPED_MM, AsDevicesHave, run_on_meta
from offload.planning.partition import UnitTree
from offload.planning.uses import Recording, Uses
from offload.torch_private import DispatchMode, storage_place
from offload.wrappers import is_wrapper

_aten = torch.ops.aten
_META = torch.device("meta")
_CAUSAL = {
    _aten._scaled_dot_product_flash_attention: 4,
    _aten._scaled_dot_product_flash_attention_backward: 11,
}  # the argument that says so

MOST_TOKENS = 1 << 40  # of a batch: torch counts elements in 64 bits


@dataclasses.dataclass(frozen=True, slots=True)
class Blank:
    """A tensor without content: all that the seconds of an operator depend on."""

    dtype: torch.dtype
    shape: tuple[int, ...]
    strides: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Blank:
        """Return that of a tensor."""
        return cls(tensor.dtype, tuple(tensor.shape), tensor.stride())


@dataclasses.dataclass(frozen=True, slots=True)
class Call:
    """How an operator was called.

    Attributes:
        operator: with its overload, such as "aten.mm.default".
        arguments: with :class:`Blank` for tensors, tuples for lists, and None for devices.
        named: the same, by name.
    """

    operator: str
    arguments: tuple[Any, ...]
    named: tuple[tuple[str, Any], ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One operator on a device.

    Attributes:
        flops: multiplications and additions of matrix products.
        size_bytes: read and written.
        narrow: it computes in 16 bits.
        call: how to have it run alone.
    """

    flops: float
    size_bytes: int
    narrow: bool
    call: Call

    def seconds(self, hardware: Hardware) -> float:
        """Return what it takes on a device of which only numbers are known."""
        rate = (hardware.flops_16 if self.narrow else hardware.flops_32) * hardware.flops_share
        return max(self.flops / rate, self.size_bytes / hardware.device_bytes_s, hardware.kernel_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What a pass does while one unit is the latest that was used.

    Attributes:
        kernels: how often each runs.
        operators: calls of torch by the host.
        calls: of modules that have the engine's hooks.
        gradients: of the unit's parameters, as they come: elements, and which share of the pass's products is made.
    """

    kernels: Mapping[Kernel, int]
    operators: int
    calls: int
    gradients: tuple[tuple[int, float], ...] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """One micro-batch.

    Attributes:
        forward, backward: how often each kernel runs; what is computed again belongs to the latter.
        operators: calls of torch by the host, in forward and in backward.
        peak_bytes: that are alive at once beside parameters and their gradients.
        assumed: questions about values of tensors that were answered with yes: on the meta device there are none.
        measured_s: of forward and of backward, where their kernels were measured on the device.
        unmeasured: operators among them that could not be: they do not run alone.
        too_large: likewise: their tensors have no room in the memory that is free.
        uses: of units, in their order; None where the units are not known.
        parts: of forward and of backward, by unit, likewise.
        held_bytes: what the device holds at once of `peak_bytes` where activations leave it; None where none does.
        reached: units to which a gradient comes; None where the units are not known.
    """

    forward: Mapping[Kernel, int]
    backward: Mapping[Kernel, int]
    operators: tuple[int, int]
    peak_bytes: int
    assumed: int
    measured_s: tuple[float, float] | None = None
    unmeasured: tuple[str, ...] = ()
    too_large: tuple[str, ...] = ()
    uses: Uses | None = None
    parts: tuple[Mapping[int, Part], Mapping[int, Part]] | None = None
    held_bytes: int | None = None
    reached: frozenset[int] | None = None

    @property
    def device_bytes(self) -> int:
        """Activations that the device has to hold at once."""
        return self.peak_bytes if self.held_bytes is None else self.held_bytes

    def twice_as_fast(self) -> Work:
        """Return it as measured on a device of twice the speed; as it is where it was not measured."""
        halves = None if self.measured_s is None else (self.measured_s[0] / 2, self.measured_s[1] / 2)
        return dataclasses.replace(self, measured_s=halves)

    @property
    def flops(self) -> float:
        """Of both passes."""
        return sum(kernel.flops * many for part in (self.forward, self.backward) for kernel, many in part.items())


Watch = Callable[[Sequence[torch.Tensor]], contextlib.AbstractContextManager[Any]]


def work_of(
    model: nn.Module,
    batch: tuple[int, int] | Mapping[str, Any] | Sequence[Any],
    watch: Watch | None = None,
    tree: UnitTree | None = None,
    *,
    dtype: torch.dtype | None = None,
    on_cpu: bool = False,
) -> Work:
    """Count what a forward and a backward pass take.

    Args:
        model: any module; it is not changed, and may be on the meta device.
        batch: (rows, length) of token ids, for a model that takes ``input_ids`` and ``labels``; else what its forward
            takes, by name or in order, with tensors of any device. Their values are not looked at.
        watch: is entered around each module's forward, with the parameters; None where nobody looks.
        tree: the model's units, whose uses are noted; None where nobody asks. There is no `watch` then.
        dtype: that parameters of floating point are cast to; None keeps each one's.
        on_cpu: the device is a CPU, whose attention makes all scores where it has no kernel.

    Raises:
        ConfigError: weights are quantized, or the passes need values of tensors, or fail for another reason; names it.
    """
    arguments, named = _inputs(batch)
    _refuse_quantized(model)
    state = {name: _hollow(tensor, dtype) for name, tensor in model.named_parameters(remove_duplicate=True)}
    parameters = list(state.values())
    recording = None if tree is None else Recording(tree, state)
    state |= {name: _hollow(tensor) for name, tensor in model.named_buffers()}
    counter = _Counter(parameters, recording)
    with contextlib.ExitStack() as undo:
        for parameter in parameters:
            if parameter.requires_grad:
                undo.enter_context(contextlib.closing(_Dropped(parameter, counter)))
        watched = watch or (lambda _: contextlib.nullcontext())
        enter = (lambda _: watched(parameters)) if recording is None else recording.enter
        fused = functools.partial(AsDevicesHave, grouped=watch is not None, on_cpu=on_cpu)
        undo.enter_context(contextlib.closing(_Inside(model, enter, fused)))
        undo.enter_context(torch.enable_grad())
        undo.enter_context(counter)
        try:
            passes = _Passes(model, counter, recording)
            inside = {f"model.{name}": tensor for name, tensor in state.items()}
            forward, backward, uses = torch.func.functional_call(passes, inside, arguments, named)
        except StateError as error:  # of what is put into models: it says what to do
            raise ConfigError(str(error)) from error
        except Exception as error:
            raise ConfigError(
                f"model {type(model).__name__}: what a batch takes cannot be told without running it: "
                f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}; leave batch out to have "
                "the plan in bytes"
            ) from error
    operators = _operators(forward), _operators(backward)
    parts = None if uses is None else (forward, backward)
    found = Work(_all(forward), _all(backward), operators, counter.peak_bytes, counter.assumed, uses=uses, parts=parts)
    return found if uses is None else dataclasses.replace(found, reached=frozenset(counter.reached))


def _operators(parts: Mapping[int, Part]) -> int:
    return sum(part.operators for part in parts.values())


def _all(parts: Mapping[int, Part]) -> Mapping[Kernel, int]:
    """Return the kernels of all parts."""
    return sum((collections.Counter(part.kernels) for part in parts.values()), collections.Counter())


def _refuse_quantized(model: nn.Module) -> None:
    """Refuse weights whose kernels are a library's own: nobody knows what these do."""
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter) or hasattr(parameter, "quant_state") or hasattr(parameter, "SCB"):
            raise ConfigError(
                f"parameter {name}: expected an ordinary tensor but got {type(parameter).__name__}, whose kernels "
                "cannot be counted; leave batch out to have the plan in bytes"
            )


class _Passes(nn.Module):
    """Both passes as one call, so that what is computed again in backward has the same parameters."""

    def __init__(self, model: nn.Module, counter: _Counter, recording: Recording | None) -> None:
        super().__init__()
        self.model = model
        self._counter = counter
        self._recording = recording

    def forward(self, *arguments: Any, **named: Any) -> tuple[Mapping[int, Part], Mapping[int, Part], Uses | None]:
        """Return the parts of forward, those of backward, and the uses of units."""
        loss = _loss(self.model(*arguments, **named))
        forward = self._counter.next_pass()
        used = () if self._recording is None else self._recording.take()
        if loss.requires_grad:
            torch.autograd.backward(loss)
        uses = None if self._recording is None else Uses(used, self._recording.take())
        return forward, self._counter.next_pass(), uses


def _inputs(batch: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    if isinstance(batch, Mapping):
        return (), {name: _on_meta(value) for name, value in batch.items()}
    if not isinstance(batch, Sequence) or isinstance(batch, str) or not batch:
        got = f"a {type(batch).__name__}; put it in a list" if isinstance(batch, torch.Tensor) else repr(batch)
        raise ConfigError(f"batch: expected (rows, length) or what forward takes but got {got}")
    if not all(isinstance(value, int) for value in batch):
        return tuple(_on_meta(value) for value in batch), {}
    if len(batch) != 2 or min(batch) < 1 or any(isinstance(value, bool) for value in batch):
        raise ConfigError(f"batch: expected (rows, length), two numbers >= 1, but got {batch!r}")
    if batch[0] * batch[1] > MOST_TOKENS:
        raise ConfigError(f"batch: expected at most {MOST_TOKENS} tokens but got {batch!r}")
    ids = torch.empty(tuple(batch), dtype=torch.int64, device="meta")
    return (), {"input_ids": ids, "labels": ids}


def is_ids(batch: Any) -> bool:
    """Tell whether a batch is given as (rows, length)."""
    return isinstance(batch, tuple) and all(isinstance(value, int) for value in batch)


def _on_meta(value: Any) -> Any:
    return _hollow(value) if isinstance(value, torch.Tensor) else value


def _hollow(tensor: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    """Return a leaf of the same shape without bytes; of floating point in `dtype`, if it is given."""
    dtype = dtype if tensor.is_floating_point() else None
    return torch.empty_like(tensor, device="meta", dtype=dtype).requires_grad_(tensor.requires_grad)


def _loss(output: Any) -> torch.Tensor:
    """Return the loss in an output, or a sum of its first tensor."""
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    first = next(iter(tensors_in(output)), None)
    if first is None:
        raise ConfigError("no tensor in the output of forward")
    return first.float().sum()


class _Dropped:
    """A gradient that goes as soon as it has come, as an engine has it."""

    def __init__(self, parameter: torch.Tensor, counter: _Counter) -> None:
        def drop(_: torch.Tensor) -> None:
            if parameter.grad is not None:
                counter.note_gradient(parameter)
                counter.forget(parameter.grad)
            parameter.grad = None

        self._handle = parameter.register_post_accumulate_grad_hook(drop)

    def close(self) -> None:
        self._handle.remove()


class _Inside:
    """While a module's forward runs, again in backward, too, it is watched, and attention is one kernel, as on GPUs."""

    def __init__(
        self,
        model: nn.Module,
        watch: Callable[[nn.Module], contextlib.AbstractContextManager[Any]],
        fused: Callable[[], contextlib.AbstractContextManager[Any]],
    ) -> None:
        self._fused = fused
        self._entered: list[contextlib.ExitStack] = []  # by the modules that are running, the outermost attends
        self._watch = watch
        self._handles = [
            handle
            for module in model.modules()
            for handle in (
                module.register_forward_pre_hook(self._enter),
                module.register_forward_hook(self._leave, always_call=True),
            )
        ]

    def _enter(self, module: nn.Module, arguments: Any) -> None:
        entered = contextlib.ExitStack()
        if not self._entered:
            entered.enter_context(self._fused())
        entered.enter_context(self._watch(module))
        self._entered.append(entered)

    def _leave(self, module: nn.Module, arguments: Any, output: Any) -> None:
        self._entered.pop().close()

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


@dataclasses.dataclass(slots=True, eq=False)
class _Known:
    """What is known of an operator on arguments of one form.

    Attributes:
        kernel: that does it.
        output: of it, with :class:`Blank` for tensors; None where it has to be asked for each time.
    """

    kernel: Kernel
    output: Any


class _Counter(DispatchMode):
    """Counts kernels, per unit where there is a recording, and bytes that are alive.

    An operator runs once for each form of its arguments, for its output's form follows from theirs. Most of a model
    repeats, and torch takes more time to find out a form than to make a tensor of it.
    """

    def __init__(self, parameters: Sequence[torch.Tensor], recording: Recording | None) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._recording = recording
        self._known: dict[object, _Known] = {}
        self._made: collections.defaultdict[int, collections.Counter[_Known]] = collections.defaultdict(
            collections.Counter
        )
        self._alive: dict[int, weakref.ref[Any] | None] = {storage_place(tensor): None for tensor in parameters}
        self._alive_bytes = 0
        self._operators: collections.Counter[int] = collections.Counter()
        self._flops: collections.defaultdict[int, float] = collections.defaultdict(float)
        self._gradients: collections.defaultdict[int, list[tuple[int, float]]] = collections.defaultdict(list)
        self._drawn: set[int] = set()  # storages of single random numbers
        self._unlikely: set[int] = set()  # and of answers whether one is less than a probability, by which layers drop
        self.reached: set[int] = set()  # units to which a gradient has come
        self.peak_bytes = 0
        self.assumed = 0

    def next_pass(self) -> dict[int, Part]:
        """Return what was counted since the last pass, by unit."""
        calls = self._recording.calls if self._recording is not None else collections.Counter[int]()
        found = {
            unit: Part(self._kernels(unit), self._operators[unit], calls[unit], self._come(unit))
            for unit in self._operators
        }
        for counted in (self._made, self._operators, self._flops, self._gradients, calls):
            counted.clear()
        return found

    def _come(self, unit: int) -> tuple[tuple[int, float], ...]:
        total = self._flops[unit]
        return tuple((numel, made / total if total else 1.0) for numel, made in self._gradients[unit])

    def note_gradient(self, parameter: torch.Tensor) -> None:
        """Note that a parameter's gradient has come."""
        unit = None if self._recording is None else self._recording.unit_of(parameter)
        if unit is not None:
            self.reached.add(unit)
            self._gradients[unit].append((parameter.numel(), self._flops[unit]))

    def _kernels(self, unit: int) -> collections.Counter[Kernel]:
        kernels: collections.Counter[Kernel] = collections.Counter()
        for known, many in self._made[unit].items():
            kernels[known.kernel] += many
        return kernels

    def forget(self, tensor: torch.Tensor) -> None:
        """Count a tensor as gone."""
        self._end(storage_place(tensor), tensor.untyped_storage().nbytes())

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        unit = 0 if self._recording is None else self._recording.latest
        self._operators[unit] += 1
        if func is _aten._local_scalar_dense.default and args[0].dtype is torch.bool:
            self.assumed += 1
            return storage_place(args[0]) not in self._unlikely
        if func.is_view:
            output = func(*args, **kwargs)
        else:
            form = func, _form(args), _form(tuple(kwargs.items()))
            known = self._known.get(form)
            if known is not None and known.output is not None:
                output = _filled(known.output)
            else:
                output = run_on_meta(func, args, kwargs)
            if known is None:
                known = self._known[form] = _known(func, args, kwargs, output)
            self._made[unit][known] += 1
            self._flops[unit] += known.kernel.flops
        if isinstance(output, torch.Tensor):
            self._begin(output)
            if not output.dim():
                self._note_draw(func, args, output)
        else:
            for tensor in tensors_in(output):
                self._begin(tensor)
        return output

    def _note_draw(self, func: Any, args: Any, output: torch.Tensor) -> None:
        """Note what comes of a random number."""
        if func.overloadpacket is _aten.rand:
            self._drawn.add(storage_place(output))
        elif func.overloadpacket in (_aten.lt, _aten.le) and storage_place(args[0]) in self._drawn:
            self._unlikely.add(storage_place(output))

    def _begin(self, tensor: torch.Tensor) -> None:
        storage, place = tensor.untyped_storage(), storage_place(tensor)
        if place not in self._alive:
            size = storage.nbytes()
            self._alive_bytes += size
            self.peak_bytes = max(self.peak_bytes, self._alive_bytes)
            self._alive[place] = weakref.ref(storage, lambda _: self._end(place, size))

    def _end(self, place: int, size: int) -> None:
        if self._alive.pop(place, None) is not None:
            self._alive_bytes -= size
            self._drawn.discard(place)
            self._unlikely.discard(place)


def _form(value: Any) -> Any:
    """Return all that the form of an operator's output depends on, hashable; numbers that are equal differ by type."""
    if isinstance(value, torch.Tensor):
        return value.dtype, value.shape, value.stride(), value.device
    if isinstance(value, (list, tuple)):
        return tuple(_form(one) for one in value)
    return type(value), value


def _known(func: Any, args: Any, kwargs: Any, output: Any) -> _Known:
    """Return what is known once an operator has run.

    Nothing of the output is, if it shares memory with an argument, or if the operator changes one.
    """
    given, made = list(tensors_in((args, kwargs))), list(tensors_in(output))
    new = {storage_place(tensor) for tensor in made}.difference(map(storage_place, given))
    parts = output if isinstance(output, tuple) else (output,)
    same = len(new) == len(made) and all(map(_is_told, parts)) and not func._schema.is_mutable
    return _Known(_kernel(func, args, kwargs, output, [*given, *made]), _blank(output) if same else None)


def _is_told(part: Any) -> bool:
    """Tell whether the form of an output's part is all of it: if it is a tensor, no other one has its storage."""
    if not isinstance(part, torch.Tensor):
        return part is None or type(part) is int
    whole = type(part) is torch.Tensor and part.is_meta and part.layout is torch.strided
    return whole and part.untyped_storage().nbytes() == _filled(Blank.of(part)).untyped_storage().nbytes()


def _filled(form: Any) -> Any:
    """Return an operator's output, with new tensors."""
    if isinstance(form, Blank):
        return torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=_META)
    return tuple(map(_filled, form)) if isinstance(form, tuple) else form


def _kernel(func: Any, args: Any, kwargs: Any, output: Any, tensors: Sequence[torch.Tensor]) -> Kernel:
    packet = func.overloadpacket
    flops = 0.0
    if packet is GROUPED_MM:  # of experts: one operand or the result has a dimension for them, tokens have not
        left, right = args[:2]
        flops = 2.0 * left.numel() * right.shape[-1]
    if packet in flop_registry:
        flops = float(flop_registry[packet](*args, **kwargs, out_val=output))
        position = _CAUSAL.get(packet)
        if position is not None and len(args) > position and args[position]:
            flops /= 2  # half of the scores are not computed
    size = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    narrow = any(tensor.dtype in (torch.bfloat16, torch.float16) for tensor in tensors)
    named = tuple((name, _blank(value)) for name, value in kwargs.items())
    return Kernel(flops, size, narrow, Call(str(func), _blank(tuple(args)), named))


def _blank(value: Any) -> Any:
    """Return an argument of an operator without content, hashable."""
    if isinstance(value, torch.Tensor):
        return Blank.of(value)
    if isinstance(value, (list, tuple)):
        return tuple(_blank(one) for one in value)
    return None if isinstance(value, torch.device) else value
