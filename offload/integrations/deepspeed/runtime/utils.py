"""What scripts take of ``deepspeed.runtime.utils``: a line about memory."""

from __future__ import annotations

from typing import Any

from offload.activations.rss import status_bytes
from offload.integrations.deepspeed.refusals import missing
from offload.integrations.deepspeed.utils.logging import logger
from offload.sizes import GIB

__all__ = ["see_memory_usage"]


def see_memory_usage(message: str, force: bool = False) -> None:
    """Log the resident set of this process, in GiB; only where it is forced, as in DeepSpeed."""
    if force:
        logger.info("%s: resident set %.2f GiB", message, status_bytes("VmRSS") / GIB)


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.runtime.utils", name, __all__)
