"""Several rows in one sequence, and whether a model keeps them apart.

Owns which rows share a sequence, and the positions that tell a model where each begins. Models of transformers mask
attention across rows by these positions. That is not taken on trust: the engine's own model is asked. Next:
:mod:`offload.cli.finetune.sequences`.

Source: best-fit decreasing, D. S. Johnson, Near-optimal bin packing algorithms, 1973.
"""

from __future__ import annotations

import bisect
import inspect
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from offload.cli.finetune.sequences import IGNORED, Batch, Rows
from offload.cli.finetune.settings import FinetuneError

if TYPE_CHECKING:
    from offload.engine import Engine

PROBE_TOKENS = 8
MOST_NOISE = 0.05  # of what leaks when rows are joined: other tokens in the sequence may change how sums are rounded


def fitted(lengths: Sequence[int], room: int) -> list[list[int]]:
    """Return which rows share a sequence of `room` tokens: the longest first, each where least is left over.

    Args:
        lengths: of the rows, each at most `room`.
        room: tokens of a sequence.
    """
    bins: list[list[int]] = []
    free: list[tuple[int, int]] = []  # (tokens left, which bin), ascending
    for row in sorted(range(len(lengths)), key=lambda row: (-lengths[row], row)):
        place = bisect.bisect_left(free, (lengths[row], -1))
        if place == len(free):
            bins.append([])
            left, chosen = room, len(bins) - 1
        else:
            left, chosen = free.pop(place)
        bins[chosen].append(row)
        bisect.insort(free, (left - lengths[row], chosen))
    return bins


class Packed:
    """Sequences of one length, each with several rows; what is left over at the end is padding.

    Args:
        rows: none longer than `length`.
        length: tokens of a sequence.
        apart: positions begin anew in each row; else they go on.
    """

    def __init__(self, rows: Rows, length: int, *, apart: bool) -> None:
        self._rows = rows
        self._length = length
        self._apart = apart
        self._bins = fitted(rows.lengths, length)

    def __len__(self) -> int:
        return len(self._bins)

    @property
    def filled(self) -> float:
        """Share of all places that has tokens."""
        return sum(self._rows.lengths) / (len(self) * self._length)

    def batch(self, chosen: Sequence[int]) -> Batch:
        """Return some sequences as a micro-batch."""
        parts: dict[str, list[torch.Tensor]] = {"input_ids": [], "labels": [], "position_ids": []}
        padding = 0
        for number in chosen:
            rows = self._bins[number]
            rest = self._length - sum(self._rows.lengths[row] for row in rows)
            padding += rest
            pads = torch.full((rest,), self._rows.pad)
            parts["input_ids"].append(torch.cat([*map(self._rows.tokens, rows), pads]))
            parts["labels"].append(torch.cat([*map(self._rows.labels, rows), torch.full_like(pads, IGNORED)]))
            lengths = [*(self._rows.lengths[row] for row in rows), rest]
            parts["position_ids"].append(torch.cat([torch.arange(length) for length in lengths]))
        inputs = {name: torch.stack(values) for name, values in parts.items() if self._apart or name != "position_ids"}
        return Batch.of(inputs, padding)


def require_apart(engine: Engine, batch_size: int, device: torch.device) -> None:
    """Refuse a model in which a row sees the row before it in the same sequence; takes up to four short forwards.

    The second row's logits must not depend on the first row's tokens.

    Raises:
        FinetuneError: they do.
    """
    remedy = "leave --packing out, or let rows see those before with --packing joined"
    module: Any = engine.module
    inner = module.get_base_model() if hasattr(module, "get_base_model") else module  # inside one of PEFT
    arguments = inspect.signature(inner.forward).parameters
    if "position_ids" not in arguments:
        raise FinetuneError(
            f"packing: expected a model that can keep rows apart but {type(inner).__name__} takes no position_ids; "
            f"{remedy}"
        )
    vocabulary = int(inner.get_input_embeddings().weight.shape[0])
    row = torch.arange(PROBE_TOKENS)

    def second_row(shift: int, positions: torch.Tensor) -> torch.Tensor:
        tokens = torch.cat([row + shift, row]).remainder(vocabulary).expand(batch_size, -1)
        made = engine(input_ids=tokens.to(device), position_ids=positions.expand(batch_size, -1).to(device))
        return made.logits[:, PROBE_TOKENS:].float()  # type: ignore[no-any-return]

    def difference(positions: torch.Tensor) -> float:
        return float((second_row(0, positions) - second_row(1, positions)).abs().max())

    engine.eval()
    with torch.no_grad():
        apart = difference(torch.cat([row, row]))
        if apart > 0 and not apart <= MOST_NOISE * difference(torch.arange(2 * PROBE_TOKENS)):
            raise FinetuneError(
                f"packing: expected a model that keeps rows apart but in {type(inner).__name__} a row's logits change "
                f"by {apart:.3g} with the tokens of the row before; {remedy}"
            )
    engine.train()
