"""``deepspeed.checkpointing``: activation checkpointing, which torch does.

Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

from torch.utils import checkpoint as torchs

from offload.errors import ConfigError
from offload.integrations.deepspeed.refusals import missing

__all__ = ["checkpoint", "configure", "is_configured", "reset"]

logger = logging.getLogger(__name__)


def configure(
    mpu_: Any = None,
    deepspeed_config: Any = None,
    partition_activations: bool | None = None,
    contiguous_checkpointing: bool | None = None,
    num_checkpoints: int | None = None,
    checkpoint_in_cpu: bool | None = None,
    synchronize: bool | None = None,
    profile: bool | None = None,
) -> None:
    """Do nothing: torch's checkpointing has none of these options, and none of them changes a result.

    Args:
        mpu_: has to be None.
        deepspeed_config: not heeded.
        partition_activations: not heeded.
        contiguous_checkpointing: not heeded.
        num_checkpoints: not heeded.
        checkpoint_in_cpu: True warns: the engine's configuration says it.
        synchronize: not heeded.
        profile: not heeded.

    Raises:
        ConfigError: there is to be model parallelism.
    """
    if mpu_ is not None:
        raise ConfigError("mpu_: expected None, for each process has all of the model; leave it out")
    if checkpoint_in_cpu:
        logger.warning(
            "checkpointing: checkpoint_in_cpu is left out here, which changes no result; set "
            "activation_checkpointing.cpu_checkpointing in the configuration of deepspeed.initialize"
        )


def is_configured() -> bool:
    """Tell that nothing has to be configured."""
    return True


def reset() -> None:
    """Do nothing: nothing is kept between passes."""


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """Call a function, and call it again in the backward pass instead of keeping its activations."""
    return torchs.checkpoint(function, *args, use_reentrant=False)


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.checkpointing", name, __all__)
