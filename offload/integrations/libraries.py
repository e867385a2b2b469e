"""What the doors have in common: is the library there and new enough, how many processes, which side does what."""

from __future__ import annotations

import importlib.metadata
import os
import re
from collections.abc import Iterable
from typing import Any

import torch

from offload.config import Config
from offload.errors import ConfigError


def require(library: str, least: str, *, door: str) -> None:
    """Refuse a library that is missing, or older than what the door was made for.

    Args:
        library: its name on PyPI.
        least: the oldest version that will do.
        door: what the user has asked for.

    Raises:
        ConfigError: it is; says how to install it.
    """
    remedy = f"pip install '{library}>={least}'"
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{door}: expected {library} {least} or later but it is not installed; {remedy}") from None
    if _parts(found) < _parts(least):
        raise ConfigError(f"{door}: expected {library} {least} or later but got {found}; {remedy}")


def processes() -> int:
    """Return how many processes train together: those of the process group, or that the launcher has started."""
    there = torch.distributed.is_available() and torch.distributed.is_initialized()
    return torch.distributed.get_world_size() if there else launched()


def launched() -> int:
    """Return how many processes the launcher has started, in which nobody may have made a process group yet."""
    text = os.environ.get("WORLD_SIZE", "").strip()
    return int(text) if text.isdecimal() else 1


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def refuse_two_sides(options: Config, *, accumulates: str, clips: str | None) -> None:
    """Refuse options of an engine that its trainer has, too.

    Args:
        options: what the user has given for the engine.
        accumulates: the trainer's argument that says over how many batches.
        clips: the trainer's argument that says how far; None if it does not clip.

    Raises:
        ConfigError: there is one; says which side it belongs to.
    """
    steps, reduction = options.gradient_accumulation_steps, options.gradient_reduction
    if steps != 1 or reduction == "mean":
        given = f"gradient_accumulation_steps={steps}" if steps != 1 else f"gradient_reduction={reduction!r}"
        raise ConfigError(
            f"offload: expected one side that accumulates but got {given} beside {accumulates} of the trainer; leave "
            "it out of the engine's options, for the engine gets the trainer's"
        )
    if options.max_grad_norm is not None and clips is not None:
        raise ConfigError(
            f"offload: expected one side that clips but got max_grad_norm={options.max_grad_norm} beside {clips} of "
            "the trainer; leave it out of the engine's options, or pass 0 to the trainer"
        )
    refuse_durable(options)


def refuse_durable(options: Config) -> None:
    """Refuse a durable run, which would go on without what the trainer knows.

    Raises:
        ConfigError: it is one.
    """
    if options.run_dir is not None:
        raise ConfigError(
            "run_dir: expected a run that the trainer resumes but got a durable one, which would go on without the "
            "trainer's own state; pass nvme_path, and let the trainer save and resume"
        )


def refuse_other_schedule(subject: str, schedule: Any, optimizers: Iterable[Any]) -> None:
    """Refuse a schedule of another optimizer than those that step.

    Args:
        subject: what the schedule was given as.
        schedule: what may be a schedule.
        optimizers: those that step. One that an engine has taken over has the engine's groups, so its schedules do.

    Raises:
        ConfigError: it would change the learning rates of nobody.
    """
    own = getattr(schedule, "optimizer", None)
    if own is None:
        return
    groups = getattr(own, "param_groups", None)
    if not any(
        own is each or (groups is not None and groups is getattr(each, "param_groups", 0)) for each in optimizers
    ):
        raise ConfigError(
            f"{subject}: expected a scheduler of the optimizer beside it but got a {type(schedule).__name__} of "
            "another one, which would change nothing; make it with that optimizer, or leave it out"
        )


def trains_float16(model: torch.nn.Module) -> bool:
    """Tell whether the loss of a model has to be scaled."""
    return any(parameter.dtype == torch.float16 for parameter in model.parameters() if parameter.requires_grad)


def is_closed(engine: Any) -> bool:
    """Tell whether an engine is closed, so that its module is an ordinary one again."""
    return bool(engine._life.closed)
