"""The door for DeepSpeed scripts: ``from offload import deepspeed`` in the place of ``import deepspeed``.

Owns the module that scripts see. What is of DeepSpeed and not here is refused by name. ``docs/deepspeed.md`` says what
the keys of a configuration are here. Next: :mod:`offload.integrations.deepspeed.engine`.
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed import HashStore  # type: ignore[attr-defined]
from torch.utils.data import DataLoader

from offload.errors import ConfigError, did_you_mean
from offload.integrations.deepspeed import ops, runtime, utils, zero
from offload.integrations.deepspeed.config import Translation, config_from
from offload.integrations.deepspeed.data import RepeatingLoader
from offload.integrations.deepspeed.engine import DeepSpeedEngine
from offload.integrations.deepspeed.optimizers import optimizer_from
from offload.module.refusals import refuse_ranks
from offload.optimizer import OffloadOptimizer
from offload.spec import OptimizerSpec

__all__ = [
    "DeepSpeedEngine",
    "RepeatingLoader",
    "Translation",
    "add_config_arguments",
    "config_from",
    "init_distributed",
    "initialize",
    "ops",
    "runtime",
    "utils",
    "zero",
]

logger = logging.getLogger(__name__)

_ELSEWHERE: Mapping[str, str] = {
    "comm": "there is one process: leave it out, or use torch.distributed after deepspeed.init_distributed()",
    "checkpointing": "take torch.utils.checkpoint, or model.gradient_checkpointing_enable()",
    "accelerator": "take engine.device",
    "get_accelerator": "take engine.device",
    "init_inference": "offload.Engine(model) evaluates a model of any size",
    "InferenceEngine": "offload.Engine(model) evaluates a model of any size",
    "PipelineModule": "one process has all of the model: wrap an ordinary module",
    "pipe": "one process has all of the model: wrap an ordinary module",
    "tp_model_init": "one process has all of the model: leave it out",
    "moe": "take the model's own experts: they are offloaded like other parameters",
    "OnDevice": 'take torch.device("meta") as a context, and offload.Engine(model, weights=...)',
    "DeepSpeedConfig": "deepspeed.config_from(config) reads and explains one",
    "DeepSpeedHybridEngine": "engine.module.generate works during training",
    "compression": "leave it out: weights would be others",
    "launcher": "start the script with python",
}


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Any = None,
    training_data: Any = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Any = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    **options: Any,
) -> tuple[DeepSpeedEngine, OffloadOptimizer | None, DataLoader[Any] | None, Any]:
    """Make an engine of a model and a DeepSpeed configuration.

    Args:
        args: with ``deepspeed_config``, where `config` is not given; ``"auto"`` values are filled from it.
        model: as in :class:`offload.Engine`.
        optimizer: of torch or of this package, or a function that makes one of `model_parameters`; in the place of the
            configuration's.
        model_parameters: what the configuration's optimizer trains: parameters or groups; None: all trainable ones.
        training_data: a dataset, for the loader that is returned.
        lr_scheduler: a schedule, or a function that makes one of the optimizer; in the place of the configuration's.
            It is stepped with the optimizer.
        distributed_port: not heeded.
        mpu: has to be None.
        dist_init_required: True makes a process group of one.
        collate_fn: of the loader.
        config: a dict or a JSON file.
        mesh_param: has to be None.
        config_params: another name of `config`.
        **options: of :class:`offload.Config`, on top of the configuration: ``max_memory``, ``device`` and the like.

    Returns:
        The engine, its optimizer, the loader and the schedule; None for what there is not.

    Raises:
        ConfigError: see :func:`config_from` and :class:`offload.Engine`.
        StateError: there are several processes.
        BudgetError, swap.SwapError: see :class:`offload.Engine`.
    """
    if model is None:
        raise ConfigError("model: expected a torch.nn.Module but got none; pass model=")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu: expected None, for one process has all of the model; leave mpu and mesh_param out")
    if dist_init_required:
        init_distributed()
    translation = config_from(_config_of(args, config, config_params), args=args, **options)
    if translation.config.run_dir is not None:
        raise ConfigError(
            "run_dir: expected none, for the schedule would not be in it, but got a directory; use save_checkpoint, or "
            "offload.Engine with deepspeed.config_from(...).config"
        )
    logger.info("configuration:\n%s", translation)
    for line in translation.left_out:
        logger.warning("%s: is left out, which changes no result: %s", line.path, line.here)
    chosen = _optimizer(optimizer, model, model_parameters, translation)
    engine = DeepSpeedEngine(
        model,
        chosen,
        translation,
        lr_scheduler=lr_scheduler,
        training_data=training_data,
        collate_fn=collate_fn,
    )
    if hasattr(args, "local_rank"):
        args.local_rank = engine.local_rank
    logger.info("plan:\n%s", engine.plan)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _config_of(args: Any, config: Any, config_params: Any) -> Any:
    given = config if config is not None else config_params
    named = getattr(args, "deepspeed_config", None)
    if given is not None and named is not None:
        raise ConfigError("config: expected one but got config= and args.deepspeed_config; leave one out")
    if given is None and named is None:
        raise ConfigError("config: expected a dict or a JSON file but got none; pass config=, or --deepspeed_config")
    return named if given is None else given


def _optimizer(
    given: Any, model: nn.Module, parameters: Any, translation: Translation
) -> OptimizerSpec | torch.optim.Optimizer | None:
    """Return the optimizer of a script, or else of its configuration."""
    members = None if parameters is None else list(parameters)
    trainable = [one for one in model.parameters() if one.requires_grad] if members is None else members
    if given is None:
        return None if translation.optimizer is None else optimizer_from(translation.optimizer, trainable)
    if isinstance(given, (OptimizerSpec, torch.optim.Optimizer)) or not callable(given):
        chosen: Any = given
    else:
        chosen = given(trainable)
    return chosen  # type: ignore[no-any-return]


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make a process group of one, so that ``torch.distributed.get_rank()`` and the like work.

    Args:
        dist_backend: of torch; None: torch's choice.
        auto_mpi_discovery: not heeded, as all that is said of others.
        distributed_port: not heeded.
        verbose: not heeded.
        timeout: not heeded.
        init_method: not heeded.
        dist_init_required: False makes none.
        config: not heeded.
        rank: 0 or -1.
        world_size: 1 or -1.

    Raises:
        StateError: there are several processes.
        ConfigError: there are to be.
    """
    refuse_ranks()
    if world_size > 1 or rank > 0:
        raise ConfigError(f"init_distributed: expected one process but got rank {rank} of {world_size}; start one")
    there = torch.distributed.is_available() and not torch.distributed.is_initialized()
    if there and dist_init_required is not False:
        store = HashStore()
        torch.distributed.init_process_group(dist_backend, store=store, rank=0, world_size=1)


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the script alone")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="FILE", help="JSON file")
    return parser


def __getattr__(name: str) -> Any:
    if name in _ELSEWHERE:
        raise ConfigError(f"deepspeed.{name}: expected one of {', '.join(__all__)}; {_ELSEWHERE[name]}")
    raise AttributeError(f"deepspeed has no {name!r} here{did_you_mean(name, __all__)}; it has {', '.join(__all__)}")
