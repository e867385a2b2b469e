"""``deepspeed.utils.logging``: the log of scripts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any

import torch

from offload.integrations.deepspeed.refusals import missing

__all__ = ["log_dist", "logger"]

logger = logging.getLogger("offload.deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log a message, if this rank or all are to."""
    own = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
    if not ranks or own in ranks or -1 in ranks:
        logger.log(level, message)


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.utils.logging", name, __all__)
