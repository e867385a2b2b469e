"""What a fine-tuning run is asked for, and the token windows that it trains on.

Owns the options of a run and the way from a text to batches. Knows neither models nor the engine. Next:
:mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.errors import OffloadError


class FinetuneError(OffloadError):
    """The run cannot start or go on; the text says why and what to do."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """Options of a run.

    Attributes:
        model: folder of the model and its tokenizer.
        text: UTF-8 file to train on.
        output: folder for ``report.json`` and ``loss.png``; None writes neither.
        save_model: also write the trained model to ``output/model``.
        steps: optimizer steps.
        sequence_length: tokens per sequence.
        batch_size: sequences per micro-batch.
        gradient_accumulation_steps: micro-batches per optimizer step.
        lr, weight_decay, max_grad_norm: of AdamW; the learning rate warms up over `warmup_steps`, then falls as a
            cosine to a tenth.
        held_out: share of the text, at its end, that is not trained on.
        evaluation_sequences: sequences of the held-out text in one evaluation.
        evaluations: evaluations after the first, evenly over the run.
        sample_tokens: tokens of the sample continuation; 0 takes no samples.
        prompt: text to continue; None takes the beginning of a held-out paragraph.
        gradient_checkpointing: recompute activations in backward instead of keeping them.
        seed: of the order of the training windows and of dropout.
        engine_options: further options of :class:`offload.Config`.
    """

    model: Path
    text: Path
    output: Path | None = None
    save_model: bool = False
    steps: int = 100
    sequence_length: int = 512
    batch_size: int = 1
    gradient_accumulation_steps: int = 1
    lr: float = 2e-5
    weight_decay: float = 0.1
    max_grad_norm: float | None = 1.0
    warmup_steps: int = 5
    held_out: float = 0.05
    evaluation_sequences: int = 8
    evaluations: int = 3
    sample_tokens: int = 40
    prompt: str | None = None
    gradient_checkpointing: bool = False
    seed: int = 0
    engine_options: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("steps", "sequence_length", "batch_size", "gradient_accumulation_steps"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {getattr(self, name)}")
        for name in ("evaluation_sequences", "evaluations"):
            if getattr(self, name) < 1:
                raise FinetuneError(f"{name}: expected a whole number >= 1 but got {getattr(self, name)}")
        if self.sequence_length < 2:
            raise FinetuneError("sequence_length: a sequence of one token has no next token; use at least 2")
        if not 0 < self.held_out < 1:
            raise FinetuneError(f"held_out: expected a share in (0, 1) but got {self.held_out}")
        if self.sample_tokens < 0 or self.warmup_steps < 0:
            raise FinetuneError("sample_tokens and warmup_steps: expected whole numbers >= 0")
        if self.save_model and self.output is None:
            raise FinetuneError("save_model: no output folder is given")

    @property
    def tokens_per_step(self) -> int:
        """Tokens of one optimizer step."""
        return self.sequence_length * self.batch_size * self.gradient_accumulation_steps


@dataclasses.dataclass(frozen=True, slots=True)
class Windows:
    """Token windows of a text, cut without overlap.

    Attributes:
        train: (windows, sequence_length) int64, HOST.
        held_out: (evaluation_sequences or fewer, sequence_length) int64, HOST.
        prompt: (tokens,) int64, HOST: beginning of a held-out paragraph.
    """

    train: torch.Tensor
    held_out: torch.Tensor
    prompt: torch.Tensor


def read_text(path: Path) -> str:
    """Return the text of a file.

    Raises:
        FinetuneError: it cannot be read, is not UTF-8 or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise FinetuneError(
            f"text {path}: expected UTF-8 but byte {error.start} does not fit; convert it first, for example: "
            "iconv -f latin1 -t utf-8"
        ) from error
    except OSError as error:
        raise FinetuneError(f"text {path}: cannot be read: {error.strerror or error}") from error
    if not text.strip():
        raise FinetuneError(f"text {path}: is empty")
    return text


def split_text(text: str, held_out: float) -> tuple[str, str]:
    """Return the part to train on and the held-out rest, cut between paragraphs where there are any."""
    cut = int(len(text) * (1 - held_out))
    boundary = text.find("\n\n", cut)
    if boundary != -1 and boundary < len(text) - (len(text) - cut) // 2:
        cut = boundary + 2
    return text[:cut], text[cut:]


def make_windows(encode: Callable[[str], Sequence[int]], text: str, settings: Settings) -> Windows:
    """Tokenise `text` and cut it into windows; held-out windows are spread evenly over the held-out part.

    Raises:
        FinetuneError: the text is too short for one window of each kind.
    """
    train_text, held_text = split_text(text, settings.held_out)
    length = settings.sequence_length
    train, held = list(encode(train_text)), list(encode(held_text))
    counts = len(train) // length, len(held) // length
    if min(counts) < 1:
        raise FinetuneError(
            f"text: expected at least {length} tokens to train on and {length} held out (sequence_length) but got "
            f"{len(train)} and {len(held)}; take a longer text, or a shorter sequence_length"
        )
    train_windows = torch.tensor(train[: counts[0] * length]).view(-1, length)
    held_windows = torch.tensor(held[: counts[1] * length]).view(-1, length)
    wanted = min(settings.evaluation_sequences, counts[1])
    chosen = torch.linspace(0, counts[1] - 1, wanted).round().long()
    prompt = settings.prompt if settings.prompt is not None else first_sentences(held_text)
    return Windows(train_windows, held_windows[chosen], torch.tensor(list(encode(prompt)) or train[:1]))


def first_sentences(text: str, *, words: int = 24) -> str:
    """Return the first words of the first paragraph of `text` that has twice as many, or of the text."""
    for paragraph in text.split("\n\n"):
        parts = paragraph.split()
        if len(parts) >= 2 * words:
            return " ".join(parts[:words])
    return " ".join(text.split()[:words])


def batches(windows: torch.Tensor, settings: Settings, device: torch.device) -> Iterator[dict[str, torch.Tensor]]:
    """Yield micro-batches for ever: every window once per epoch, in an order drawn from the seed."""
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while True:
        while len(order) < settings.batch_size:
            order.extend(torch.randperm(len(windows), generator=generator).tolist())
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        tokens = windows[chosen].to(device)
        yield {"input_ids": tokens, "labels": tokens}
