"""Modules of bitsandbytes with weights of 4 or 8 bits: made ready for an engine, and given back.

Owns what such modules would do to their weights by themselves - quantize them when they are moved, pack them anew for a
processor, cast a bias, keep weights beside the parameter or until backward - which has to happen before the engine has
them, or not at all. No library is imported: modules are known by the class of their weights. Next:
:mod:`offload.checkpoint.loading`.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.classes import is_a
from offload.errors import SAVE_FIRST, ConfigError, StateError
from offload.module.absent import is_lost
from offload.module.binding import Binding
from offload.module.saved import SavedTensors
from offload.wrappers import is_wrapper

_FUNCTION = "MatMul4BitBackward"  # of bitsandbytes; keeps (None, weight) in an attribute called tensors


def make_ready(model: nn.Module, dtype: torch.dtype | None) -> None:
    """Quantize what ``.to(device)`` would, where it is, and undo or do what a first forward does to parameters.

    That stays done where something later fails: the weights are what the user wanted them to be.

    Args:
        model: may have modules of bitsandbytes.
        dtype: that parameters will be cast to; None where they keep theirs.

    Raises:
        ConfigError: a 4-bit weight is to be trained, has no scales or would be cast, or a bias gets another dtype than
            its module computes in; or other quantized weights would be cast. Nothing was changed.
    """
    for name, parameter in model.named_parameters():
        if is_wrapper(parameter) and dtype not in (None, parameter.dtype):
            raise ConfigError(
                f"dtype: expected {parameter.dtype}, which {name} had before it was quantized, but got {dtype}; leave "
                "dtype= out, or cast the model before it is quantized"
            )
    found, eight = list(_four_bit(model)), list(_eight_bit(model))
    for name, module, weight in eight:
        if weight.requires_grad:
            raise ConfigError(
                f"parameter {name}: expected 8-bit weights of bitsandbytes to be frozen but got requires_grad=True; "
                "call requires_grad_(False) on it, and train adapters"
            )
        if weight.dtype == torch.int8 and weight.SCB is None and module.state.SCB is None:
            raise ConfigError(
                f"parameter {name}: expected 8-bit weights of bitsandbytes with their scales but got none; load the "
                "model again"
            )
    for name, module, weight in found:
        if weight.requires_grad:
            raise ConfigError(
                f"parameter {name}: expected 4-bit weights of bitsandbytes to be frozen but got requires_grad=True; "
                "call requires_grad_(False) on it, and train adapters"
            )
        if weight.bnb_quantized and weight.quant_state is None:
            raise ConfigError(
                f"parameter {name}: expected 4-bit weights of bitsandbytes with their scales but got none; load the "
                "model again"
            )
        if weight.quant_storage.is_floating_point and dtype not in (None, weight.quant_storage):
            raise ConfigError(
                f"dtype: expected {weight.quant_storage}, in which {name} keeps its 4-bit weights, but got {dtype}; "
                "leave dtype= out, or load the model with another quant_storage"
            )
        if _bias(module) is not None and dtype is not None and module.compute_dtype not in (None, dtype):
            raise ConfigError(
                f"dtype: expected {module.compute_dtype}, in which the module of {name} computes, but got {dtype}; "
                "leave dtype= out, or load the model with that compute dtype"
            )
    for _, module, weight in found:
        if getattr(weight.quant_state, "packing_format_for_cpu", False):
            module.state_dict()  # unpacks, in place
        if not weight.bnb_quantized:
            weight.to(weight.device)  # in place, too
        bias = _bias(module)
        if bias is not None and module.compute_dtype not in (None, bias.dtype):
            Binding.rebind(bias, bias.detach().to(module.compute_dtype))  # as its forward rebinds it
    for _, module, weight in eight:
        if weight.dtype != torch.int8:
            weight.to(weight.device)  # in place
        if weight.CB is not None:
            module.init_8bit_state()


@contextlib.contextmanager
def ready_meanwhile(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Make a model ready for the block alone: afterwards it is what it was.

    Args:
        model: as of :func:`make_ready`.
        dtype: as of :func:`make_ready`.

    Raises:
        ConfigError: as :func:`make_ready`, or weights on the meta device are not quantized, which nobody can do there.
    """
    found = [*_four_bit(model), *_eight_bit(model)]
    for name, _, weight in found:
        if weight.is_meta and weight.dtype.is_floating_point and not getattr(weight, "bnb_quantized", False):
            raise ConfigError(
                f"parameter {name}: expected weights of bitsandbytes that are quantized but got them on the meta device"
                ", where they cannot be; load the model first"
            )
    tensors = [one for _, module, weight in found for one in (weight, module.bias) if one is not None]
    contents = [(tensor, tensor.data) for tensor in tensors]
    scales = [weight.quant_state for _, _, weight in found if getattr(weight, "quant_state", None) is not None]
    states = [module.state for _, module, _ in found if hasattr(module, "state")]
    owners: list[Any] = [*(part for _, *parts in found for part in parts), *scales, *states]
    attributes = [(owner, dict(vars(owner))) for owner in owners]
    try:
        make_ready(model, dtype)
        yield
    finally:
        for tensor, content in contents:
            Binding.rebind(tensor, content)
        for owner, before in attributes:
            vars(owner).clear()
            vars(owner).update(before)


def needs_scales(parameter: Any) -> bool:
    """Tell whether bitsandbytes keeps scales beside a parameter, without which nobody reads its elements."""
    if is_a(parameter, "bitsandbytes", "Int8Params"):
        return not parameter.has_fp16_weights
    return is_a(parameter, "bitsandbytes", "Params4bit")


class FourBitModules:
    """The 4-bit modules of one engine, as long as it has them."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._saved: SavedTensors | None = None
        self._handles: list[RemovableHandle] = []
        self._packing: list[Any] = []  # modules that would pack their weights for the processor
        self._moved: list[tuple[Any, torch.device]] = []  # scales, with where they were

    def attach(self, device: torch.device, saved: SavedTensors) -> None:
        """Move scales to the device, where compute wants them, and keep modules from changing their weights.

        Args:
            device: of the engine.
            saved: what autograd keeps of weights.
        """
        self._saved = saved
        for name, module, weight in _four_bit(self._model):
            where = weight.quant_state.absmax.device
            if where != device:
                self._moved.append((weight.quant_state, where))
                weight.quant_state.to(device)
            if getattr(module, "support_avx512bf16_for_cpu", False):
                module.support_avx512bf16_for_cpu = False
                self._packing.append(module)
            if _bias(module) is not None:
                self._handles.append(module.register_forward_pre_hook(_refuse_cast_bias(name), with_kwargs=True))
            self._handles.append(module.register_forward_hook(self._let_go, prepend=True))

    def detach(self) -> None:
        """Undo :meth:`attach`. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for module in self._packing:
            module.support_avx512bf16_for_cpu = True
        for scales, device in self._moved:
            scales.to(device)
        self._handles, self._packing, self._moved = [], [], []

    def _let_go(self, module: nn.Module, args: object, output: object) -> None:
        """Let a weight that waits for backward be a handle, as if the function had saved it with autograd.

        It keeps the tensor itself, with which its unit would have to stay on the device.
        """
        last: Any = output.grad_fn if isinstance(output, torch.Tensor) else None
        before = [node for node, _ in last.next_functions[:1]] if last is not None else []  # where the last is a cast
        for node in (last, *before):
            tensors = getattr(node, "tensors", None)
            if type(node).__name__ == _FUNCTION and isinstance(tensors, tuple) and len(tensors) == 2:
                if isinstance(tensors[1], torch.Tensor):
                    assert self._saved is not None
                    node.tensors = _Waiting(self._saved, tensors[1])
                return


class EightBitModules:
    """The 8-bit modules of one engine, as long as it has them: none keeps its weight beside the parameter."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._handles: list[RemovableHandle] = []
        self._states: list[tuple[Any, type, torch.device]] = []  # with what they were, and where their scales were

    def release(self) -> None:
        """Let modules and their backward ask for the weight where it is: its memory is about to be freed."""
        for _, module, _ in _eight_bit(self._model):
            kind: type = type(module.state)
            self._states.append((module.state, kind, module.state.SCB.device))
            vars(module.state).pop("CB", None)
            vars(module.state)["of_module"] = module
            module.state.__class__ = _without_weight(kind)

    def attach(self, device: torch.device) -> None:
        """Move scales to the device, where compute wants them, and keep modules from casting a bias."""
        for name, module, _ in _eight_bit(self._model):
            module.state.SCB = module.state.SCB.to(device)
            if module.bias is not None:
                self._handles.append(module.register_forward_pre_hook(_refuse_cast_bias(name), with_kwargs=True))

    def detach(self) -> None:
        """Undo both, when parameters have memory of their own again; what is lost is left. Idempotent."""
        for handle in self._handles:
            handle.remove()
        for state, kind, device in self._states:
            weight = vars(state)["of_module"].weight
            if not is_lost(weight):
                state.__class__ = kind
                state.CB = weight.data
                del vars(state)["of_module"]
            state.SCB = state.SCB.to(device)
        self._handles, self._states = [], []


class _WithoutWeight:
    """Has no weight of its own: it is the module's, in a forward and in backward."""

    @property
    def CB(self) -> torch.Tensor:
        """The weight as it is now."""
        weight: torch.Tensor = vars(self)["of_module"].weight.data
        return weight

    @CB.setter
    def CB(self, value: object) -> None:
        pass  # a module that is moved moves its weight, too


@functools.cache
def _without_weight(kind: type) -> type:
    return type(kind.__name__, (_WithoutWeight, kind), {})


class _Waiting:
    """In the place of a function's own pair of nothing and a weight."""

    __slots__ = ("_packed", "_unpack")

    def __init__(self, saved: SavedTensors, weight: torch.Tensor) -> None:
        self._packed, self._unpack = saved.keep(weight)

    def __iter__(self) -> Iterator[torch.Tensor | None]:
        yield None
        yield self._unpack(self._packed)


def _four_bit(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the 4-bit weights of a model with their names and modules."""
    for path, module in model.named_modules():
        for name, weight in module.named_parameters(prefix=path, recurse=False):
            if is_a(weight, "bitsandbytes", "Params4bit"):
                yield name, module, weight


def _eight_bit(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the 8-bit weights of a model's linear layers with their names and modules."""
    for path, module in model.named_modules():
        if is_a(module, "bitsandbytes", "Linear8bitLt") and not module.weight.has_fp16_weights:
            yield f"{path}.weight" if path else "weight", module, module.weight


def _bias(module: Any) -> nn.Parameter | None:
    """Return the bias that a module casts to what it computes in."""
    return module.bias if is_a(module, "bitsandbytes", "Linear4bit") else None


def _refuse_cast_bias(name: str) -> Any:
    """Return a hook that refuses what would cast the bias beside the weight `name` for good, in the middle of a run."""

    def refuse(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        values = args[0] if args else kwargs["x"]
        computes = getattr(module, "compute_dtype", None) or values.dtype
        if module.bias.dtype != computes:
            raise StateError(
                f"parameter {name.removesuffix('weight')}bias: expected {computes}, in which its module computes, but "
                f"got {module.bias.dtype}; make the module with that compute_dtype, or close the engine and "
                f"cast it; {SAVE_FIRST}"
            )

    return refuse
