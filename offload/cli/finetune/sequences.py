"""What a fine-tuning run trains on, once it is tokens: sequences of which batches are made.

Owns padding, the labels that do not count, and the order of the batches. Knows neither models nor the engine. Next:
:mod:`offload.cli.finetune.packing`, rows that share a sequence; :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Sequence
from typing import Protocol

import torch

from offload.cli.finetune.settings import Settings

IGNORED = -100  # label that torch's cross entropy leaves out


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """A micro-batch: `inputs` of the model, (sequences, tokens) int64, HOST.

    Attributes:
        inputs: by the names of the model's arguments.
        tokens: without padding.
        targets: tokens whose prediction counts.
    """

    inputs: dict[str, torch.Tensor]
    tokens: int
    targets: int

    @classmethod
    def of(cls, inputs: dict[str, torch.Tensor], padding: int = 0) -> Batch:
        """Return a batch with its counts; `padding` of its tokens are none."""
        targets = int((inputs["labels"][:, 1:] != IGNORED).sum())  # nothing predicts a first token
        return cls(inputs, inputs["input_ids"].numel() - padding, targets)

    def on(self, device: torch.device) -> dict[str, torch.Tensor]:
        """Return the inputs on a device."""
        return {name: value.to(device) for name, value in self.inputs.items()}


class Sequences(Protocol):
    """Sequences of tokens, counted from 0."""

    def __len__(self) -> int:
        """Return how many there are."""

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Return some of them as a micro-batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class Cut:
    """Windows of a text, (windows, tokens) int64, HOST: every token counts."""

    windows: torch.Tensor

    def __len__(self) -> int:
        return len(self.windows)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Return some windows as a micro-batch."""
        tokens = self.windows[list(chosen)]
        return Batch.of({"input_ids": tokens, "labels": tokens})


@dataclasses.dataclass(frozen=True, slots=True)
class Tokens:
    """One row: its tokens, and which of them count."""

    ids: Sequence[int]
    counts: Sequence[bool]

    @property
    def targets(self) -> int:
        """Tokens whose prediction counts."""
        return sum(self.counts[1:])

    def cut(self, length: int) -> Tokens:
        """Return the first `length` tokens."""
        return Tokens(self.ids[:length], self.counts[:length])


class Rows:
    """Rows of different lengths: a batch is padded on the right, and the padding is masked.

    Args:
        rows: at least one.
        pad: token of the padding.
    """

    def __init__(self, rows: Iterable[Tokens], pad: int) -> None:
        kept = list(rows)
        self._pad = pad
        self._ids = [torch.tensor(row.ids, dtype=torch.int32) for row in kept]
        self._counts = [torch.tensor(row.counts, dtype=torch.bool) for row in kept]
        self._counts = [torch.cat([counts.new_zeros(1), counts[1:]]) for counts in self._counts]
        self.targets: int = sum(int(counts.sum()) for counts in self._counts)

    def __len__(self) -> int:
        return len(self._ids)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each row."""
        return [len(ids) for ids in self._ids]

    @property
    def pad(self) -> int:
        """Token of the padding."""
        return self._pad

    def tokens(self, number: int) -> torch.Tensor:
        """Return a row's tokens: (tokens,) int64, HOST."""
        return self._ids[number].long()

    def labels(self, number: int) -> torch.Tensor:
        """Return a row's labels: (tokens,) int64, HOST. The first one does not count."""
        return self.tokens(number).masked_fill(~self._counts[number], IGNORED)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Return some rows as a micro-batch, as long as the longest of them."""
        lengths = [len(self._ids[number]) for number in chosen]
        longest = max(lengths)
        ids = torch.full((len(lengths), longest), self._pad)
        labels = torch.full_like(ids, IGNORED)
        for place, number in enumerate(chosen):
            ids[place, : lengths[place]] = self.tokens(number)
            labels[place, : lengths[place]] = self.labels(number)
        inputs = {"input_ids": ids, "labels": labels}
        if min(lengths) < longest:
            inputs["attention_mask"] = (torch.arange(longest) < torch.tensor(lengths)[:, None]).long()
        return Batch.of(inputs, padding=ids.numel() - sum(lengths))


def orders(count: int, settings: Settings) -> Iterator[list[int]]:
    """Yield which of `count` sequences are in each micro-batch, for ever.

    Every sequence comes once per epoch, in an order drawn from the seed.
    """
    generator = torch.Generator().manual_seed(settings.seed)
    order: list[int] = []
    while True:
        while len(order) < settings.batch_size:
            order.extend(torch.randperm(count, generator=generator).tolist())
        chosen, order = order[: settings.batch_size], order[settings.batch_size :]
        yield chosen
