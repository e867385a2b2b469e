"""What a call of torch does with a tensor: looks at its shape and the like, reads it, writes it.

Owns the table, by the names that torch gives to functions, methods and properties. It is asked for tensors whose bytes
are elsewhere: parameters outside their uses (:mod:`offload.module.absent`) and gradients that have moved away
(:mod:`offload.module.handles`).
"""

from __future__ import annotations

import functools
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from types import FrameType
from typing import Any

import torch

from offload.nested import tensors_in
from offload.torch_private import no_subclasses, parse_to


class Does(Enum):
    """What a call does with its tensors."""

    LOOK = "look"  # at shape, dtype, gradient, hooks: at nothing that is in the bytes
    OPEN = "open"  # the memory itself
    PASS = "pass"  # it on: a backward pass, which finds it by itself
    MEASURE = "measure"  # strides and offset
    MAKE = "make"  # another tensor of the same shape, without a look at the bytes
    ASSIGN = "assign"  # ``tensor.data = value``
    WRITE = "write"
    READ = "read"


def names(text: str) -> frozenset[str]:
    """Return the words of a list of names."""
    return frozenset(text.split())


_CONTENT_PROPERTIES = ("data", "T", "mT", "H", "mH", "real", "imag")
_LOOKS = names(
    "__dir__ __hash__ __len__ __sizeof__ _is_view _is_zerotensor _has_compatible_shallow_copy_type _use_count "
    "const_data_ptr data_ptr dim dim_order element_size get_device has_names is_coalesced is_complex is_conj "
    "is_distributed is_floating_point is_inference is_neg is_pinned is_same_size is_set_to is_shared is_signed "
    "is_storage is_tensor ndimension nelement numel register_hook register_post_accumulate_grad_hook requires_grad_ "
    "result_type retain_grad size __dlpack_device__ dense_dim sparse_dim"
)
_OPENS = names("__dlpack__ storage storage_type _typed_storage untyped_storage")
_MEASURES = names("stride storage_offset is_contiguous dim_order is_non_overlapping_and_dense")
_MAKES = names(
    "empty_like full_like ones_like rand_like randint_like randn_like zeros_like new new_empty new_empty_strided "
    "new_full new_ones new_tensor new_zeros"
)
_AUGMENTED = names("add and div floordiv lshift mod mul or pow rshift sub truediv xor")
_ALSO_WRITING = ("__setitem__", "__delitem__", "__setstate__", "module_load")


def _found(wanted: Iterable[str]) -> frozenset[Any]:
    """Return the functions and methods of torch with these names."""
    places = (torch.Tensor, torch)
    return frozenset(getattr(place, name) for name in wanted for place in places if hasattr(place, name))


_TABLE = {
    Does.MEASURE: _found(_MEASURES),
    Does.LOOK: _found(_LOOKS),
    Does.OPEN: _found(_OPENS),
    Does.MAKE: _found(_MAKES),
    Does.PASS: frozenset({torch.autograd.grad, torch.autograd.backward, torch.Tensor.backward}),
}
_CONTENT_GETTERS = tuple(getattr(torch.Tensor, name) for name in _CONTENT_PROPERTIES)
_ADDRESSES = _found(("data_ptr", "const_data_ptr"))
DATA = torch.Tensor.data


@functools.lru_cache(maxsize=4096)
def what(func: Any) -> Does:
    """Return what a function, method or property access of torch does; READ where nothing else is known."""
    name = name_of(func)
    owner = getattr(func, "__self__", None)
    if name == "__get__":
        return Does.READ if any(owner is getter for getter in _CONTENT_GETTERS) else Does.LOOK
    if name in ("__set__", "__delete__"):
        return Does.ASSIGN if owner is DATA else Does.LOOK
    for does, functions in _TABLE.items():
        if func in functions:
            return does
    in_place = name.endswith("_") and not name.endswith("__")
    augmented = name.startswith("__i") and name.endswith("__") and name[3:-2] in _AUGMENTED
    return Does.WRITE if in_place or augmented or name in _ALSO_WRITING else Does.READ


@functools.lru_cache(maxsize=4096)
def is_of_grad(func: Any) -> bool:
    """Tell whether a property access of torch is one of ``.grad``, which has two names."""
    return any(getattr(func, "__self__", None) is owner for owner in (torch.Tensor.grad, torch.Tensor._grad))


@functools.lru_cache(maxsize=4096)
def is_address(func: Any) -> bool:
    """Tell whether a method of torch returns the address of a tensor's bytes."""
    return func in _ADDRESSES


def name_of(func: Any) -> str:
    """Return what a function of torch is called."""
    return str(getattr(func, "__name__", func))


def described(func: Any) -> str:
    """Return what a function of torch is called, for messages; of a property the property's name."""
    name = name_of(func)
    return name_of(func.__self__) if name in ("__get__", "__set__", "__delete__") else name


def written(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """Yield the tensors that a call writes to."""
    out = kwargs.get("out")
    if out is not None:
        yield from tensors_in(out)
    if what(func) in (Does.WRITE, Does.ASSIGN):
        fused = name_of(func).startswith("_fused_")  # parameters and states in several lists
        targets = args if fused else args[:1] or [kwargs.get(name) for name in ("input", "self", "tensor")]
        for target in targets:
            yield from tensors_in(target)


def calling_frame(frame: FrameType) -> FrameType:
    """Return the frame that a call of torch comes from, behind those of modes."""
    while frame.f_code.co_name == "__torch_function__" and frame.f_back is not None:
        frame = frame.f_back
    return frame


def collects_state(func: Any, caller: FrameType, modules: Container[Any]) -> bool:
    """Tell whether this is torch making a state dict of `modules`: its values are replaced when it has them all.

    Fetched one by one for it, they would all stay on the device until then. So it gets the parameters themselves:
    hooks may rename them, and what they make of them is made of the real content.
    """
    saving = func is torch.Tensor.detach and caller.f_code is torch.nn.Module._save_to_state_dict.__code__
    return saving and caller.f_locals.get("self") in modules


def unchanged(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Tell whether a conversion of ``args[0]`` would return it as it is: ``p.to("cpu")`` of what is there."""
    tensor = args[0] if args else None
    if not isinstance(tensor, torch.Tensor) or kwargs.get("copy"):
        return False
    name = name_of(func)
    wanted: torch.dtype | None = None
    device: torch.device | None = None
    if name == "to":
        if any(isinstance(value, torch.Tensor) for value in args[1:]):
            return False
        if True in args[1:]:  # non_blocking or copy: not worth telling them apart
            return False
        with no_subclasses():
            device, wanted, _, memory_format = parse_to(*args[1:], **kwargs)
        if memory_format is not None:
            return False
    elif name in _CONVERSIONS:
        wanted = _CONVERSIONS[name]
    elif name == "cpu":
        device = torch.device("cpu")
    else:
        return name == "contiguous" and len(args) == 1 and not kwargs
    same_device = device is None or device == tensor.device
    return same_device and (wanted is None or wanted == tensor.dtype)


_CONVERSIONS = {
    "float": torch.float32,
    "double": torch.float64,
    "half": torch.float16,
    "bfloat16": torch.bfloat16,
}
