"""The model that a checkpoint of another program is compared with: names, shapes and dtypes, without elements.

Owns where it comes from, and how trainers divide its parameters. Next: :mod:`offload.converting`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.converting import Groups
from offload.errors import ConfigError


def make_skeleton(model: str, dtype: str | None) -> nn.Module:
    """Return a model on the meta device.

    Args:
        model: a folder with config.json, such a file, or ``MODULE:CALLABLE``, which returns the model.
        dtype: of its parameters; None keeps what the model says.

    Raises:
        ConfigError: it is none of these.
    """
    made = _configured(Path(model)) if Path(model).exists() or ":" not in model else _called(model)
    return made if dtype is None else made.to(getattr(torch, dtype))


def _configured(path: Path) -> nn.Module:
    try:
        import transformers
    except ImportError as error:
        raise ConfigError(
            "--model: transformers is not installed; pip install 'offload[finetune]', or pass MODULE:CALLABLE"
        ) from error
    file = path / "config.json" if path.is_dir() else path
    if not file.is_file():
        raise ConfigError(
            f"--model: expected a folder with config.json, such a file, or MODULE:CALLABLE but got {str(path)!r}"
        )
    try:
        config = transformers.AutoConfig.from_pretrained(file, local_files_only=True)
        kind: Any = getattr(transformers, (config.architectures or [""])[0], transformers.AutoModelForCausalLM)
        dtype = getattr(config, "dtype", None)
        make = getattr(kind, "_from_config", None) or kind.from_config
        with torch.device("meta"):
            made: nn.Module = make(config, dtype=dtype) if dtype is not None else make(config)
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"--model: {file}: expected the config of a model of transformers but got: {error}"
        ) from error
    return made


def _called(model: str) -> nn.Module:
    where, _, name = model.partition(":")
    sys.path.insert(0, os.getcwd())  # as python -m has it
    try:
        with torch.device("meta"):
            made = getattr(importlib.import_module(where), name)()
    except (ImportError, AttributeError, TypeError) as error:
        raise ConfigError(
            f"--model: expected {where} to have {name}, which returns the model without arguments, but got: {error}"
        ) from error
    finally:
        sys.path.remove(os.getcwd())
    if not isinstance(made, nn.Module):
        raise ConfigError(f"--model: expected {model} to return a torch.nn.Module but got {type(made).__name__}")
    return made


def usual_groups(model: nn.Module) -> Iterator[Groups]:
    """Yield how others divide trained parameters in two: for weight decay, by dimensions, or as the trainer does."""
    trained = {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}
    yield _divided(trained, {name for name, parameter in trained.items() if parameter.ndim > 1})
    with contextlib.suppress(ImportError):  # without the trainer's own dependencies nobody has such a file
        from transformers import Trainer

        yield _divided(trained, set(Trainer.get_decay_parameter_names(None, model)))


def _divided(trained: Iterable[str], first: Container[str]) -> Groups:
    return [[name for name in trained if (name in first) is yes] for yes in (True, False)]
