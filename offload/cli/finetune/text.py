"""The token windows that a fine-tuning run trains on.

Owns the way from a text to batches. Knows neither models nor the engine. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from offload.cli.finetune.settings import FinetuneError, Settings


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
