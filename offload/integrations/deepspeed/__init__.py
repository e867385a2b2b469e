"""The door for DeepSpeed scripts: ``from offload import deepspeed`` in the place of ``import deepspeed``.

Owns the module that scripts see. What is of DeepSpeed and not here is refused by name, with the remedies of
:mod:`offload.integrations.deepspeed.refusals`. ``docs/deepspeed.md`` says what the keys of a configuration are here.
Next: :mod:`offload.integrations.deepspeed.engine`.
"""

from __future__ import annotations

import argparse
import sys
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from offload.errors import ConfigError
from offload.integrations.deepspeed import accelerator, checkpointing, comm, ops, runtime, utils, zero
from offload.integrations.deepspeed.accelerator import get_accelerator
from offload.integrations.deepspeed.comm import init_distributed
from offload.integrations.deepspeed.config import Translation, config_from
from offload.integrations.deepspeed.data import RepeatingLoader
from offload.integrations.deepspeed.engine import DeepSpeedEngine
from offload.integrations.deepspeed.optimizers import optimizer_from
from offload.integrations.deepspeed.refusals import Refusals, missing
from offload.integrations.deepspeed.utils.logging import log_dist, logger
from offload.integrations.libraries import launched
from offload.optimizer import OffloadOptimizer
from offload.spec import OptimizerSpec

__all__ = [
    "DeepSpeedEngine",
    "RepeatingLoader",
    "Translation",
    "accelerator",
    "add_config_arguments",
    "checkpointing",
    "comm",
    "config_from",
    "get_accelerator",
    "init_distributed",
    "initialize",
    "log_dist",
    "logger",
    "ops",
    "runtime",
    "utils",
    "zero",
]

__version__ = "0.19.8"  # of the DeepSpeed whose names these are
sys.meta_path.append(Refusals("offload.deepspeed", __name__))  # last: asked for what nobody else has found


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
        dist_init_required: True makes a process group, if there is none; None does if there are several processes.
        collate_fn: of the loader.
        config: a dict or a JSON file.
        mesh_param: has to be None.
        config_params: another name of `config`.
        **options: of :class:`offload.Config`, on top of the configuration: ``max_memory``, ``device`` and the like.

    Returns:
        The engine, its optimizer, the loader and the schedule; None for what there is not.

    Raises:
        ConfigError: see :func:`config_from` and :class:`offload.Engine`; or a parameter that requires a gradient is in
            no param group.
        RanksError: another process has another model or configuration, or has failed.
        BudgetError, swap.SwapError: see :class:`offload.Engine`.
    """
    if model is None:
        raise ConfigError("model: expected a torch.nn.Module but got none; pass model=")
    if mpu is not None or mesh_param is not None:
        raise ConfigError("mpu: expected None, for each process has all of the model; leave mpu and mesh_param out")
    if dist_init_required or (dist_init_required is None and launched() > 1):
        init_distributed()
    translation = config_from(_config_of(args, config, config_params), args=args, **options)
    if translation.config.run_dir is not None:
        raise ConfigError(
            "run_dir: expected none, for the schedule would not be in it, but got a directory; use save_checkpoint, or "
            "offload.Engine with deepspeed.config_from(...).config"
        )
    first = comm.get_rank() == 0
    log_dist(f"configuration:\n{translation}", ranks=[0])
    for line in translation.left_out if first else ():
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
    log_dist(f"plan:\n{engine.plan}", ranks=[0])
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


def add_config_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add ``--deepspeed`` and ``--deepspeed_config FILE``; returns the parser."""
    group = parser.add_argument_group("DeepSpeed", "DeepSpeed's configuration")
    group.add_argument("--deepspeed", action="store_true", help="for the script alone")
    group.add_argument("--deepspeed_config", default=None, type=str, metavar="FILE", help="JSON file")
    return parser


def __getattr__(name: str) -> Any:
    raise missing("deepspeed", name, __all__)
