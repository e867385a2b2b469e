"""The token windows of a text that a fine-tuning run trains on.

Owns the way from a text to windows. Knows neither models nor the engine. Next: :mod:`offload.cli.finetune.sequences`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from offload.cli.finetune.settings import FinetuneError, Settings


@dataclasses.dataclass(frozen=True, slots=True)
class Windows:
    """Token windows of a text, cut without overlap.

    Attributes:
        train: (windows, sequence_length) int64, HOST.
        held_out: (evaluation_sequences or fewer, sequence_length) int64, HOST.
        prompt: (tokens,) int64, HOST: beginning of a held-out paragraph, or of one to train on if none is held out.
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
    train_text, held_text = split_text(text, settings.held_out or 0.0)
    length = settings.sequence_length
    train, held = list(encode(train_text)), list(encode(held_text))
    counts = len(train) // length, len(held) // length
    if counts[0] < 1 or (counts[1] < 1 and settings.held_out):
        parts = f"{length} tokens to train on and {length} held out", f"{len(train)} and {len(held)}"
        wanted, got = parts if settings.held_out else (f"{length} tokens", str(len(train)))
        raise FinetuneError(
            f"text: expected at least {wanted} (sequence_length) but got {got}; take a longer text, or a shorter "
            "sequence_length"
        )
    train_windows = torch.tensor(train[: counts[0] * length]).view(-1, length)
    held_windows = torch.tensor(held[: counts[1] * length]).view(-1, length)
    chosen = evenly(counts[1], settings.evaluated_most)
    prompt = settings.prompt if settings.prompt is not None else first_sentences(held_text or train_text)
    return Windows(train_windows, held_windows[chosen], torch.tensor(list(encode(prompt)) or train[:1]))


def evenly(count: int, most: int | None) -> torch.Tensor:
    """Return `most` of `count` indices, evenly spread: int64, HOST; all without `most`."""
    wanted = count if most is None else min(most, count)
    return torch.linspace(0, count - 1, wanted).round().long()


def first_sentences(text: str, *, words: int = 24) -> str:
    """Return the first words of the first paragraph of `text` that has twice as many, or of the text."""
    for paragraph in text.split("\n\n"):
        parts = paragraph.split()
        if len(parts) >= 2 * words:
            return " ".join(parts[:words])
    return " ".join(text.split()[:words])
