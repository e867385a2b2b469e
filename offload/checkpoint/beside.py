"""What a module has beside its parameters: buffers and extra states, by the names that its state dict has for them.

Owns which of them there are, and how those of a checkpoint differ from them. Next: :mod:`offload.run_state`.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from offload.checkpoint.format.index import differences
from offload.module.binding import Binding

_MOST_NAMED = 5  # buffers of other shapes or dtypes


def buffers_of(module: nn.Module, binding: Binding, *, every_name: bool = False) -> dict[str, torch.Tensor]:
    """Return what a state dict has beside parameters that have places, by the first name of their module, or by all."""
    found: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=not every_name):
        prefix = f"{path}." if path else ""
        kept = {k: b for k, b in part._buffers.items() if k not in part._non_persistent_buffers_set}
        for name, value in {**part._parameters, **kept}.items():
            if value is not None and not binding.places_of(value):
                found[prefix + name] = value
    return found


def giving_extra(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that give a state of their own, each by its first name."""
    plain = nn.Module.get_extra_state
    return {name: part for name, part in module.named_modules() if type(part).get_extra_state != plain}


def taking_extra(module: nn.Module) -> dict[str, nn.Module]:
    """Return the modules that take a state of their own, by all of their names."""
    plain, named = nn.Module.set_extra_state, module.named_modules(remove_duplicate=False)
    return {name: part for name, part in named if type(part).set_extra_state != plain}


def extra_key(module_name: str) -> str:
    """Return what a state dict calls the extra state of a module."""
    return f"{module_name}._extra_state" if module_name else "_extra_state"


def others_of(module: nn.Module, binding: Binding, saved: Mapping[str, Any], *, imported: bool = False) -> str:
    """Return how the `buffers` and the `extra` states of a checkpoint differ from the module's; empty if they do not.

    Args:
        module: to be loaded.
        binding: of its parameters.
        saved: contents of the checkpoint, decoded.
        imported: from another program, of which extra states are not kept: the module's stay as they are.
    """
    buffers = buffers_of(module, binding, every_name=True)
    parts = [_others("buffers", buffers, saved["buffers"])]
    if not imported:
        parts.append(_others("extra states", taking_extra(module), saved["extra"]))
    both = [(name, value, buffers[name]) for name, value in saved["buffers"].items() if name in buffers]
    unlike = [
        f"buffer {name} has shape {tuple(value.shape)} instead of {tuple(own.shape)}"
        for name, value, own in both
        if own.shape != value.shape
    ]
    unlike += [
        f"buffer {name} is {value.dtype}, of which {own.dtype} loses bits"
        for name, value, own in both
        if own.shape == value.shape and not _holds(own.dtype, value.dtype)
    ]
    return "; ".join([part for part in parts if part] + unlike[:_MOST_NAMED])


def _holds(own: torch.dtype, saved: torch.dtype) -> bool:
    """Tell whether one dtype has all values of another one."""
    if own is saved:
        return True
    try:
        return torch.promote_types(own, saved) is own
    except RuntimeError:  # torch promotes no float8
        return False


def _others(kind: str, own: Mapping[str, object], saved: Mapping[str, Any]) -> str:
    known = {id(own[name]) for name in saved if name in own}  # one of its names is enough
    text = differences([name for name, value in own.items() if name in saved or id(value) not in known], list(saved))
    return f"of {kind} it {text}" if text else ""
