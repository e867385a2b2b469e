"""Optimizers where scripts look for them: ``ops.adam``, ``ops.lion``, ``ops.adagrad``."""

from typing import Any

from offload.integrations.deepspeed.ops import adagrad, adam, lion
from offload.integrations.deepspeed.refusals import missing

__all__ = ["adagrad", "adam", "lion"]


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.ops", name, __all__)
