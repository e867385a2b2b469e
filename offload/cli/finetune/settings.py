"""What a fine-tuning run is asked for, and the command line that is made of it.

Owns the options: each is one field with its type, default and help, from which the parser is generated. Must not import
torch, so that ``--help`` is quick. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import typing
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from offload.errors import ConfigError, OffloadError


class FinetuneError(OffloadError):
    """The run cannot start or go on; the text says why and what to do."""


def _option(group: str, text: str, metavar: str | None = None) -> dict[str, str | None]:
    return {"group": group, "help": text, "metavar": metavar}


_data = functools.partial(_option, "what to train on")
_training = functools.partial(_option, "training")
_memory = functools.partial(_option, "memory (sizes such as 700MiB, 8GiB, 80%; default: what is free)")
_showing = functools.partial(_option, "evaluation and samples")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of a run; `engine_options` are further ones of :class:`offload.Config`.

    Raises:
        FinetuneError: a value is out of range.
    """

    model: Path = field(metadata=_data("folder of the model and its tokenizer", "DIR"))
    text: Path = field(metadata=_data("UTF-8 text", "FILE"))
    held_out: float = field(default=0.05, metadata=_data("share kept for evaluation, at the end", "SHARE"))
    output: Path | None = field(default=None, metadata=_data("folder for report.json and loss.png", "DIR"))
    save_every: int = field(
        default=0, metadata=_data("checkpoint in OUTPUT/checkpoints every N steps and at the end; 0: none", "N")
    )
    keep_checkpoints: int = field(default=2, metadata=_data("checkpoints that stay", "N"))
    resume: bool | Literal["auto"] = field(
        default=False,
        metadata=_data("go on with the run in RUN_DIR, or the latest checkpoint in OUTPUT/checkpoints; auto: if any"),
    )
    save_model: bool = field(default=False, metadata=_data("also write the trained model to OUTPUT/model"))
    steps: int = field(default=100, metadata=_training("optimizer steps", "N"))
    lr: float = field(default=2e-5, metadata=_training("learning rate of AdamW; it falls to a tenth", "RATE"))
    warmup_steps: int = field(default=5, metadata=_training("steps of rising learning rate", "N"))
    weight_decay: float = field(default=0.1, metadata=_training("decoupled weight decay", "RATE"))
    sequence_length: int = field(default=512, metadata=_training("tokens per sequence", "N"))
    batch_size: int = field(default=1, metadata=_training("sequences per micro-batch", "N"))
    gradient_accumulation_steps: int = field(default=1, metadata=_training("micro-batches per optimizer step", "N"))
    max_grad_norm: float | None = field(default=1.0, metadata=_training("clip to it; 0 does not clip", "NORM"))
    gradient_checkpointing: bool = field(default=False, metadata=_training("recompute activations in backward"))
    seed: int = field(default=0, metadata=_training("of the order of the text and of dropout", "N"))
    evaluations: int = field(default=3, metadata=_showing("evaluations after the first, evenly spread", "N"))
    evaluation_sequences: int = field(default=8, metadata=_showing("sequences in one evaluation", "N"))
    sample_tokens: int = field(default=40, metadata=_showing("length of the sample; 0: none", "N"))
    prompt: str | None = field(default=None, metadata=_showing("text to continue; default: held-out text", "TEXT"))
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = ("steps", "sequence_length", "batch_size", "gradient_accumulation_steps", "keep_checkpoints")
        for name in (*counts, "evaluation_sequences", "evaluations"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {getattr(self, name)}")
        if self.sequence_length < 2:
            raise FinetuneError("sequence_length: a sequence of one token has no next token; use at least 2")
        if not 0 < self.held_out < 1:
            raise FinetuneError(f"held_out: expected a share in (0, 1) but got {self.held_out}")
        if min(self.sample_tokens, self.warmup_steps, self.save_every) < 0:
            raise FinetuneError("sample_tokens, warmup_steps and save_every: expected whole numbers >= 0")
        for name in ("save_model", "save_every", *(() if self.is_durable else ("resume",))):
            if getattr(self, name) and self.output is None:
                raise FinetuneError(f"{name}: no output folder is given")
        if self.resume not in (True, False, "auto"):
            raise FinetuneError(f'resume: expected True, False or "auto" but got {self.resume!r}')

    @property
    def is_durable(self) -> bool:
        """Whether each step is committed to a run directory."""
        return self.engine_options.get("run_dir") is not None

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.batch_size * self.gradient_accumulation_steps


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings:
    """Options of :class:`offload.Config` that the command line has; None leaves one to the file, or to its default."""

    dtype: str | None = field(
        default=None, metadata=_training("bfloat16, float16 or float32; default: the model's", "NAME")
    )
    device: str | None = field(default=None, metadata=_memory("cuda or cpu; default: cuda where there is one", "NAME"))
    device_memory: str | None = field(default=None, metadata=_memory("of the device, activations included", "SIZE"))
    activation_memory: str | None = field(default=None, metadata=_memory("part of it kept for activations", "SIZE"))
    cpu_memory: str | None = field(default=None, metadata=_memory("of the host", "SIZE"))
    nvme_memory: str | None = field(default=None, metadata=_memory("of the drive", "SIZE"))
    nvme_path: list[Path] | None = field(default=None, metadata=_memory("folder on the drive; repeatable", "DIR"))
    run_dir: list[Path] | None = field(
        default=None, metadata=_memory("the same, for a durable run: each step is committed there", "DIR")
    )
    offload_param: str | None = field(
        default=None, metadata=_memory("auto, none, cpu or nvme: force where parameters live", "TIER")
    )
    offload_optimizer: str | None = field(default=None, metadata=_memory("the same for the optimizer's states", "TIER"))
    state_dtype: str | None = field(
        default=None, metadata=_memory("of Adam's moments: float32 (exact), bfloat16 or int8", "NAME")
    )
    background_checkpoints: bool | None = field(
        default=None, metadata=_memory("room on the drive to save checkpoints while training goes on")
    )
    config: Path | None = field(default=None, metadata=_memory("JSON file with options of offload.Config", "FILE"))

    def options(self) -> dict[str, Any]:
        """Return the options that are set, on top of those in the file `config`.

        Raises:
            ConfigError: the file cannot be read.
        """
        options: dict[str, Any] = {} if self.config is None else _read_options(self.config)
        given = {name: value for name, value in dataclasses.asdict(self).items() if value is not None}
        given.pop("config", None)
        tiers = ("device", "cpu", "nvme")
        budgets = {tier: given.pop(f"{tier}_memory") for tier in tiers if f"{tier}_memory" in given}
        if budgets:
            given["max_memory"] = {**(options.get("max_memory") or {}), **budgets}
        return options | given


def _read_options(path: Path) -> dict[str, Any]:
    try:
        options = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ConfigError(f"config file {path}: cannot be read as JSON: {error}") from error
    if not isinstance(options, dict):
        raise ConfigError(f"config file {path}: expected a JSON object at the top")
    return options


def add_options(parser: argparse.ArgumentParser) -> None:
    """Add an option for every field with a help text, in the groups that the fields name."""
    groups: dict[str, argparse._ArgumentGroup] = {}
    for owner in (Settings, EngineSettings):
        kinds = typing.get_type_hints(owner)
        for option in dataclasses.fields(owner):
            if not option.metadata:
                continue
            title, text, default = option.metadata["group"], option.metadata["help"], option.default
            if title not in groups:
                groups[title] = parser.add_argument_group(title)
            how: dict[str, Any] = {"default": default}
            kind, *others = typing.get_args(kinds[option.name]) or [kinds[option.name]]  # of `int | None`: int
            if kind is bool and others:  # a flag that takes a word, too
                how |= {"nargs": "?", "const": True, "choices": typing.get_args(others[0])}
            elif kind is bool:
                how["action"] = "store_true"
            elif typing.get_origin(kind) is list:
                how |= {"action": "append", "type": typing.get_args(kind)[0], "metavar": option.metadata["metavar"]}
            else:
                how |= {"type": kind, "metavar": option.metadata["metavar"]}
            if default is dataclasses.MISSING:
                how |= {"default": None, "required": True}
            elif default is not None and default is not False:
                text += " (default: %(default)s)"
            groups[title].add_argument(f"--{option.name.replace('_', '-')}", help=text, **how)


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that parsed arguments name.

    Raises:
        OffloadError: a value is out of range, or the configuration file cannot be read.
    """
    given = vars(arguments)
    engine = EngineSettings(**{option.name: given[option.name] for option in dataclasses.fields(EngineSettings)})
    values = {option.name: given[option.name] for option in dataclasses.fields(Settings) if option.metadata}
    values["max_grad_norm"] = values["max_grad_norm"] or None
    return Settings(**values, engine_options=engine.options())
