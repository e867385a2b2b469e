"""Exact heterogeneous memory offload for PyTorch: train models larger than the GPU through host memory and NVMe.

``offload.Engine`` wraps any ``torch.nn.Module``; see :mod:`offload.engine`. Importing this package imports neither
torch nor the compiled extensions: names are loaded when they are first used.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from offload import ops as ops
    from offload.config import Config
    from offload.engine import Engine
    from offload.errors import (
        BudgetError,
        CheckpointError,
        ConfigError,
        InternalError,
        NonFiniteError,
        OffloadError,
        RanksError,
        StateError,
    )
    from offload.forecast import Forecast
    from offload.initialisation import init
    from offload.integrations import accelerate as accelerate
    from offload.integrations import deepspeed as deepspeed
    from offload.integrations import hf as hf
    from offload.integrations import lightning as lightning
    from offload.integrations import peft as peft
    from offload.kernels.optimizers import LAMB, SGD, Adagrad, Adam, AdamW, Lion
    from offload.planning.hardware import Hardware
    from offload.planning.plan import Plan
    from offload.predicting import plan
    from offload.pretrained import load_pretrained
    from offload.report import Report
    from offload.stats import LinkStats, Stats

__version__ = "0.1.0"

_HOMES = {
    "LAMB": "kernels.optimizers",
    "SGD": "kernels.optimizers",
    "Adagrad": "kernels.optimizers",
    "Lion": "kernels.optimizers",
    "Adam": "kernels.optimizers",
    "AdamW": "kernels.optimizers",
    "Config": "config",
    "Engine": "engine",
    "BudgetError": "errors",
    "CheckpointError": "errors",
    "ConfigError": "errors",
    "InternalError": "errors",
    "NonFiniteError": "errors",
    "OffloadError": "errors",
    "RanksError": "errors",
    "StateError": "errors",
    "Forecast": "forecast",
    "plan": "predicting",
    "Hardware": "planning.hardware",
    "Plan": "planning.plan",
    "Report": "report",
    "LinkStats": "stats",
    "Stats": "stats",
    "init": "initialisation",
    "load_pretrained": "pretrained",
}

_DOORS = ("accelerate", "deepspeed", "hf", "lightning", "peft")  # of other libraries' scripts

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "BudgetError",
    "CheckpointError",
    "Config",
    "ConfigError",
    "Engine",
    "Forecast",
    "Hardware",
    "InternalError",
    "LinkStats",
    "Lion",
    "NonFiniteError",
    "OffloadError",
    "Plan",
    "RanksError",
    "Report",
    "StateError",
    "Stats",
    "init",
    "load_pretrained",
    "plan",
]


def __getattr__(name: str) -> Any:
    if name == "ops":
        return importlib.import_module("offload.ops")
    if name in _DOORS:
        return importlib.import_module(f"offload.integrations.{name}")
    if name not in _HOMES:
        raise AttributeError(f"module 'offload' has no attribute {name!r}")
    return getattr(importlib.import_module(f"offload.{_HOMES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*__all__, *_DOORS, "ops"])
