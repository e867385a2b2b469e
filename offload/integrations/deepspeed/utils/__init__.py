"""``deepspeed.utils``: full values of one parameter, the repeating loader, and a log.

Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from offload.errors import StateError
from offload.integrations.deepspeed.data import RepeatingLoader
from offload.integrations.deepspeed.engine import DeepSpeedEngine, engine_of
from offload.integrations.deepspeed.refusals import missing
from offload.integrations.deepspeed.utils import logging
from offload.integrations.deepspeed.utils.logging import log_dist, logger

__all__ = [
    "RepeatingLoader",
    "log_dist",
    "logger",
    "logging",
    "safe_get_full_fp32_param",
    "safe_get_full_grad",
    "safe_get_full_optimizer_state",
    "safe_set_full_fp32_param",
    "safe_set_full_grad",
    "safe_set_full_optimizer_state",
    "set_z3_leaf_modules",
]


def safe_get_full_fp32_param(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of a parameter's fp32 master on the engine's device; None of a parameter without an engine."""
    engine = engine_of(param)
    return None if engine is None else engine.read_full(param)


def safe_get_full_optimizer_state(param: nn.Parameter, optim_state_key: str) -> torch.Tensor | None:
    """Return a copy of a state, by torch's name; None where there is none (yet)."""
    engine = engine_of(param)
    return None if engine is None else engine.read_full(param, optim_state_key)


def safe_get_full_grad(param: nn.Parameter) -> torch.Tensor | None:
    """Return a copy of the gradient that waits for the next step: averaged and unscaled; None where there is none."""
    engine = engine_of(param)
    if engine is None:
        return None
    with engine.gather_gradients(param):
        return None if param.grad is None else param.grad.float().clone()


def safe_set_full_fp32_param(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let a parameter's fp32 master have other elements, and the parameter their rounding.

    Raises:
        ConfigError: the shape does not fit.
        StateError: no engine has the parameter.
    """
    _require(param).write_full(param, value)


def safe_set_full_optimizer_state(param: nn.Parameter, value: torch.Tensor, optim_state_key: str) -> None:
    """Let a state have other elements.

    Raises:
        ConfigError: the shape does not fit.
        StateError: no engine has the parameter, or it has no such state (yet).
    """
    _require(param).write_full(param, value, optim_state_key)


def safe_set_full_grad(param: nn.Parameter, value: torch.Tensor) -> None:
    """Let the gradient that waits for the next step have other elements.

    Raises:
        StateError: no engine has the parameter, or no gradient has arrived.
    """
    with _require(param).gather_gradients(param, modify=True):
        if param.grad is None:
            raise StateError("safe_set_full_grad: expected a gradient but none has arrived; call backward first")
        param.grad.copy_(value)


def set_z3_leaf_modules(model: nn.Module, leaf_module_classes: Iterable[type | str]) -> list[nn.Module]:
    """Return the modules of these classes, and leave them as they are: the engine finds units by itself."""
    kinds = tuple(leaf_module_classes)
    return [one for one in model.modules() if type(one) in kinds or type(one).__name__ in kinds]


def _require(parameter: nn.Parameter) -> DeepSpeedEngine:
    engine = engine_of(parameter)
    if engine is None:
        raise StateError(
            f"parameter of shape {tuple(parameter.shape)}: expected one of an engine of deepspeed.initialize but none "
            "has it; write into it, or pass one of engine.module's"
        )
    return engine


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.utils", name, __all__)
