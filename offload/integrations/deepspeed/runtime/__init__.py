"""Modules where scripts look for them: ``runtime.lr_schedules`` and others."""

from typing import Any

from offload.integrations.deepspeed.refusals import missing
from offload.integrations.deepspeed.runtime import dataloader, engine, lr_schedules, utils, zero

__all__ = ["dataloader", "engine", "lr_schedules", "utils", "zero"]


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.runtime", name, __all__)
