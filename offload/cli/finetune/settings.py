"""What a fine-tuning run is asked for, and the command line that is made of it.

Owns the options: each is one field with its type, default and help, from which the parser is generated. Must not import
torch, so that ``--help`` is quick. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any, Literal

from offload.cli.options import option, values_of
from offload.cli.placement import PlacementSettings, memory
from offload.errors import OffloadError


class FinetuneError(OffloadError):
    """The run cannot start or go on; the text says why and what to do."""


_data = functools.partial(option, "what to train on")
_training = functools.partial(option, "training")
_adapters = functools.partial(option, "adapters")
_showing = functools.partial(option, "evaluation, samples and logs")

HELD_OUT = 0.05
EVALUATIONS = 3
EVALUATED_OF_A_SHARE = 8


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of a run; `engine_options` are further ones of :class:`offload.Config`.

    Raises:
        FinetuneError: a value is out of range, or contradicts another one.
    """

    model: Path = field(metadata=_data("folder of the model and its tokenizer", "DIR"))
    data: Path = field(
        metadata=_data(
            "rows in .jsonl, .json or .parquet (messages; prompt and completion; or text), or a UTF-8 text",
            "FILE",
            also="text",
        )
    )
    loss_on: Literal["assistant", "all"] = field(
        default="assistant", metadata=_data("tokens of rows that count: those of the assistant or completion, or all")
    )
    packing: bool | Literal["joined"] = field(
        default=False,
        metadata=_data(
            "put several rows into a sequence, each of which sees itself alone; joined: rows may see those before"
        ),
    )
    chat_template: Path | None = field(
        default=None, metadata=_data("Jinja file for messages, in place of the model's own template", "FILE")
    )
    output: Path | None = field(default=None, metadata=_data("folder for report.json, report.html and loss.png", "DIR"))
    save_every: int = field(
        default=0, metadata=_data("checkpoint in OUTPUT/checkpoints every N steps and at the end; 0: none", "N")
    )
    keep_checkpoints: int = field(default=2, metadata=_data("checkpoints that stay", "N"))
    resume: bool | Literal["auto"] = field(
        default=False,
        metadata=_data("go on with the run in RUN_DIR, or the latest checkpoint in OUTPUT/checkpoints; auto: if any"),
    )
    save_model: bool = field(
        default=False, metadata=_data("also write the trained model to OUTPUT/model, or adapters to OUTPUT/adapter")
    )
    steps: int = field(default=100, metadata=_training("optimizer steps", "N"))
    lr: float = field(default=2e-5, metadata=_training("learning rate of AdamW; it falls to a tenth", "RATE"))
    warmup_steps: int = field(default=5, metadata=_training("steps of rising learning rate", "N"))
    weight_decay: float = field(default=0.1, metadata=_training("decoupled weight decay", "RATE"))
    sequence_length: int = field(default=512, metadata=_training("tokens per sequence", "N"))
    batch_size: int = field(default=1, metadata=_training("sequences per micro-batch", "N"))
    gradient_accumulation_steps: int = field(default=1, metadata=_training("micro-batches per optimizer step", "N"))
    max_grad_norm: float | None = field(default=1.0, metadata=_training("clip to it; 0 does not clip", "NORM"))
    gradient_checkpointing: bool = field(default=False, metadata=_training("recompute activations in backward"))
    chunked_loss: bool = field(
        default=False, metadata=_training("form the logits of a part of the tokens at a time; equal but for last bits")
    )
    seed: int = field(default=0, metadata=_training("of the order of the data, adapters and dropout", "N"))
    peft: Literal["lora"] | None = field(
        default=None, metadata=_adapters("train adapters beside the frozen model, by the library PEFT")
    )
    lora_rank: int | None = field(default=None, metadata=_adapters("of the adapters (default: PEFT's)", "N"))
    lora_alpha: int | None = field(
        default=None, metadata=_adapters("adapters count times ALPHA / rank (default: PEFT's)", "ALPHA")
    )
    lora_targets: list[str] | None = field(
        default=None,
        metadata=_adapters(
            "module that gets one, such as q_proj, or all-linear; repeatable (default: PEFT's for the model)", "NAME"
        ),
    )
    eval: str = field(
        default=str(HELD_OUT),
        metadata=_showing("share of the data to hold out, or a file to evaluate on; 0: no evaluation", "SHARE|FILE"),
    )
    eval_every: int = field(
        default=0, metadata=_showing("evaluate every N steps and at the end, in place of --evaluations", "N")
    )
    evaluations: int | None = field(
        default=None,
        metadata=_showing(f"evaluations after the first, evenly spread (default: {EVALUATIONS})", "N"),
    )
    evaluation_sequences: int | None = field(
        default=None,
        metadata=_showing(f"sequences in one (default: {EVALUATED_OF_A_SHARE} of a share, all of a file)", "N"),
    )
    sample_tokens: int = field(default=40, metadata=_showing("length of the sample; 0: none", "N"))
    prompt: str | None = field(default=None, metadata=_showing("text to continue; default: held-out text", "TEXT"))
    log: Literal["tensorboard", "jsonl", "wandb"] | None = field(
        default=None, metadata=_showing("write losses, speed, memory and stalls of each step to OUTPUT/log")
    )
    log_dir: Path | None = field(default=None, metadata=_showing("another folder for the log", "DIR"))
    engine_options: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        counts = ("steps", "sequence_length", "batch_size", "gradient_accumulation_steps", "keep_checkpoints")
        for name in (*counts, "evaluation_sequences", "evaluations", "lora_rank", "lora_alpha"):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {value}")
        if self.sequence_length < 2:
            raise FinetuneError("sequence_length: a sequence of one token has no next token; use at least 2")
        if self.held_out is not None and not 0 <= self.held_out < 1:
            raise FinetuneError(f"eval: expected a share in [0, 1) or a file but got {self.eval}")
        if min(self.sample_tokens, self.warmup_steps, self.save_every, self.eval_every) < 0:
            raise FinetuneError("sample_tokens, warmup_steps, save_every and eval_every: expected whole numbers >= 0")
        for name in ("save_model", "save_every", *(() if self.is_durable else ("resume",))):
            if getattr(self, name) and self.output is None:
                raise FinetuneError(f"{name}: no output folder is given")
        for name, words in (("resume", (True, False, "auto")), ("packing", (True, False, "joined"))):
            if getattr(self, name) not in words:
                raise FinetuneError(f'{name}: expected True, False or "{words[2]}" but got {getattr(self, name)!r}')
        self._check_companions()

    def _check_companions(self) -> None:
        """Refuse options that say nothing without another one, or beside it."""
        for name in ("max_grad_norm", "gradient_accumulation_steps"):
            if name in self.engine_options:
                word = f"--{name.replace('_', '-')}"
                raise FinetuneError(f"{name}: expected it as {word} but got it among the engine's; pass {word}")
        for name in ("lora_rank", "lora_alpha", "lora_targets"):
            if getattr(self, name) is not None and self.peft is None:
                raise FinetuneError(f"{name}: expected peft beside it but got none; add --peft lora")
        for name in ("eval_every", "evaluations", "evaluation_sequences"):
            if getattr(self, name) and not self.evaluates:
                raise FinetuneError(f"{name}: expected something to evaluate on but got eval 0; leave one out")
        if self.eval_every and self.evaluations is not None:
            raise FinetuneError("eval_every: expected it or evaluations but got both; leave one out")
        if self.log_dir is not None and self.log is None:
            raise FinetuneError("log_dir: expected log beside it but got none; add --log tensorboard, jsonl or wandb")
        if self.log is not None and self.log_dir is None and self.output is None:
            raise FinetuneError("log: no folder is given; add --log-dir or --output")

    @property
    def held_out(self) -> float | None:
        """Share of the data that is held out; 0 if nothing is evaluated, None if a file has what is."""
        try:
            return float(self.eval)
        except ValueError:
            return None

    @property
    def evaluates(self) -> bool:
        """Whether held-out losses are taken."""
        return self.held_out != 0

    @property
    def evaluated_most(self) -> int | None:
        """Sequences in one evaluation; None for all."""
        if self.evaluation_sequences is not None or self.held_out is None:
            return self.evaluation_sequences
        return EVALUATED_OF_A_SHARE

    @property
    def evaluated_after(self) -> set[int]:
        """Steps after which the held-out loss is taken."""
        if not self.evaluates:
            return set()
        if self.eval_every:
            return {*range(self.eval_every, self.steps, self.eval_every), self.steps}
        count = self.evaluations or EVALUATIONS
        return {round(self.steps * (i + 1) / count) for i in range(count)}

    @property
    def is_durable(self) -> bool:
        """Whether each step is committed to a run directory."""
        return self.engine_options.get("run_dir") is not None


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class EngineSettings(PlacementSettings):
    """What a training engine takes beside its placement; None leaves one to the file, or to its default."""

    run_dir: list[Path] | None = field(
        default=None, metadata=memory("as nvme-path, for a durable run: each step is committed there", "DIR")
    )
    offload_optimizer: str | None = field(
        default=None, metadata=memory("as offload-param, for the optimizer's states", "TIER")
    )
    state_dtype: str | None = field(
        default=None, metadata=memory("of Adam's moments: float32 (exact), bfloat16 or int8", "NAME")
    )
    background_checkpoints: bool | None = field(
        default=None, metadata=memory("room on the drive to save checkpoints while training goes on")
    )


def settings_of(arguments: argparse.Namespace) -> Settings:
    """Return the settings that parsed arguments name.

    Raises:
        OffloadError: a value is out of range, or the configuration file cannot be read.
    """
    engine = EngineSettings(**values_of(arguments, EngineSettings))
    values = values_of(arguments, Settings)
    values["max_grad_norm"] = values["max_grad_norm"] or None
    return Settings(**values, engine_options=engine.options())
