"""Quantized layers as ordinary ones of a floating dtype, so that adapters can be merged into them and be saved.

Owns which weights are quantized, what their elements are, and which layers of PEFT expect quantized ones. Neither
bitsandbytes nor torchao is imported unless a weight is theirs. Next: :mod:`offload.integrations.peft`, which merges.
"""

from __future__ import annotations

import contextlib
import copy
import importlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from offload.checkpoint.unread_state import without_quantizer
from offload.classes import is_a, package_of
from offload.wrappers import is_wrapper

_TUNERS = ("peft.tuners.lora", "peft.tuners.adalora", "peft.tuners.ia3")
_ORDINARY = {  # by the names of PEFT's layers on quantized weights; both are classes of one tuner
    "Linear4bit": "Linear",
    "Linear8bitLt": "Linear",
    "TorchaoLoraLinear": "Linear",
    "SVDLinear4bit": "SVDLinear",
    "SVDLinear8bitLt": "SVDLinear",
}


def is_quantized(parameter: torch.Tensor) -> bool:
    """Tell whether bitsandbytes or torchao has quantized a parameter."""
    names = ("Params4bit", "Int8Params")
    return is_wrapper(parameter) or any(is_a(parameter, "bitsandbytes", name) for name in names)


def has_quantized(module: nn.Module) -> bool:
    """Tell whether a module has a quantized parameter of its own."""
    return any(map(is_quantized, module.parameters(recurse=False)))


def form_of(parameter: nn.Parameter, dtype: torch.dtype) -> torch.Tensor:
    """Return what a parameter of a quantized layer is in `dtype`, on the meta device."""
    four_bits = is_a(parameter, "bitsandbytes", "Params4bit")
    shape = vars(parameter)["quant_state"].shape if four_bits else parameter.shape
    return torch.empty(shape, dtype=dtype, device="meta")


def dequantized(parameter: nn.Parameter, module: nn.Module, value: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return the elements of a parameter of a quantized layer: a bias is cast alone.

    Args:
        parameter: has scales, if it is quantized; its own elements may be away.
        module: whose parameter it is.
        value: what its elements are in the module's state dict, on the CPU.
        dtype: of the result.
    """
    own: Any = vars(parameter)
    whole: Any = value
    if not is_quantized(parameter) or own.get("has_fp16_weights", False):  # or quantized by each forward anew
        pass
    elif is_a(parameter, "bitsandbytes", "Params4bit"):
        from bitsandbytes.functional import dequantize_4bit

        state = copy.deepcopy(own["quant_state"])  # moving it would move that of the engine's device
        state.to("cpu")
        whole = dequantize_4bit(value, state)
    elif is_a(parameter, "bitsandbytes", "Int8Params"):
        from bitsandbytes.functional import int8_vectorwise_dequant

        scales = vars(module)["state"].SCB  # there after a forward, and with an engine
        whole = int8_vectorwise_dequant(value, (own["SCB"] if scales is None else scales).cpu())
    elif hasattr(value, "get_original_weight"):  # of torchao's nf4, whose dequantize is something else
        whole = whole.get_original_weight()
    else:
        whole = whole.dequantize()
    result: torch.Tensor = whole.to(dtype)
    return result


def ordinary_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the class that a layer has on weights that are not quantized; None where nobody knows it."""
    kind = type(module)
    package, _, file = kind.__module__.rpartition(".")
    if package_of(kind) == "bitsandbytes":
        return next(one for one in kind.__mro__ if package_of(one) == "torch")
    if package_of(kind) != "peft":
        return kind
    if package not in _TUNERS:
        return None
    if file == "layer":
        return kind
    if kind.__name__ not in _ORDINARY:
        return None
    return getattr(importlib.import_module(f"{package}.layer"), _ORDINARY[kind.__name__])  # type: ignore[no-any-return]


@contextlib.contextmanager
def saved_as_ordinary(base: Any) -> Iterator[None]:
    """Let a model of transformers be saved without a word of what has quantized it."""
    names = (
        (base, "hf_quantizer"),
        (base.config, "quantization_config"),
        (base.config, "_pre_quantization_dtype"),  # of transformers 4
    )
    kept = [(owner, name, vars(owner).pop(name)) for owner, name in names if name in vars(owner)]
    try:
        with without_quantizer(base):
            yield
    finally:
        for owner, name, value in kept:
            setattr(owner, name, value)
