"""What would make a batch fit whose activations do not: each change is tried, none is guessed.

Owns which changes there are, and their order: first what costs no memory, then few of these together, then the device
that would do. Knows no model: whoever asks tells whether a change does. Next: :mod:`offload.forecast` asks.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from offload.config import Config
from offload.memory.budget import Tier
from offload.planning.choosing import AUTO, OFFLOAD, RECOMPUTE
from offload.planning.work import Work


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What may be asked for instead; `text` says how, in Python's names."""

    text: str
    asked: Config
    budgets: Mapping[Tier, int]
    batch: Any
    chunk_loss: bool = False

    def and_(self, text: str, **values: Any) -> Change:
        """Return a further change."""
        return dataclasses.replace(self, text=f"{self.text} and {text}" if self.text else text, **values)

    def with_options(self, text: str, **options: Any) -> Change:
        """Return a further change, of options."""
        return self.and_(text, asked=dataclasses.replace(self.asked, **options))


Way = Callable[[Change], Change]


def remedies_of(
    fits: Callable[[Change], bool],
    start: Change,
    work: Work,
    room_bytes: int,
    *,
    may_chunk: bool,
    checkpointing: bool,
) -> Iterator[str]:
    """Yield what would make a batch fit, in Python's names.

    Args:
        fits: tries a change.
        start: what was asked for.
        work: of the batch.
        room_bytes: what the plan leaves to activations on the device.
        may_chunk: the loss is one whose logits may be formed by chunks.
        checkpointing: the model computes activations again by itself.
    """
    asked, batch, need = start.asked, start.batch, _whole_mib(work.device_bytes)
    moving = asked.activations in (OFFLOAD, AUTO)

    def recompute(change: Change) -> Change:
        text = f'activations="{RECOMPUTE}"'
        return change.with_options(text, activations=RECOMPUTE, activation_cpu_memory=None, activation_nvme_memory=None)

    def leave(change: Change) -> Change:
        text = f'activations="{OFFLOAD}"' + (" and checkpointing=True" if checkpointing else "")
        return change.with_options(text, activations=OFFLOAD)

    def wider(change: Change) -> Change:
        return change.with_options(f'activation_memory="{need >> 20}MiB"', activation_memory=need)

    def drive(change: Change) -> Change:
        size = _whole_mib(work.peak_bytes)
        return change.with_options(f'activation_nvme_memory="{size >> 20}MiB"', activation_nvme_memory=size)

    def chunk(change: Change) -> Change:
        return change.and_("chunk_loss=True", chunk_loss=True)

    def rows(many: int) -> Way:
        return lambda change: change.and_(f"micro-batches of {many}x{batch[1]}", batch=(many, batch[1]))

    memory: list[list[Way]] = [[wider]] if need < start.budgets[Tier.DEVICE] else []
    memory += [[drive]] if moving and start.budgets[Tier.NVME] else []
    ways: list[list[Way]] = [[chunk]] if may_chunk and is_ids(batch) else []
    modes: list[Way] = [leave] if not moving else []
    if not checkpointing and asked.activations != RECOMPUTE:
        modes = [recompute, *modes]
    ways += [modes] if modes else []
    if is_ids(batch) and batch[0] > 1:
        likely = max(int(batch[0] * room_bytes / work.device_bytes), 1)
        ways.append([rows(many) for many in dict.fromkeys((likely, max(likely // 2, 1), 1))])
    alone = [next((change for way in each if fits(change := way(start))), None) for each in (*memory, *ways)]
    yield from (change.text for change in alone if change is not None)
    if not any(alone):
        yield from _together(fits, start, ways)
    more = _whole_mib(start.budgets[Tier.DEVICE] + work.device_bytes - room_bytes)
    larger = start.and_(f'max_memory["device"]="{more >> 20}MiB"', budgets={**start.budgets, Tier.DEVICE: more})
    bought = next((change for change in (larger, wider(larger)) if fits(change)), None)
    if bought is not None:
        yield bought.text


def _together(fits: Callable[[Change], bool], start: Change, ways: Sequence[Sequence[Way]]) -> Iterator[str]:
    """Yield the first of few changes together that do, of each way the most that it can."""
    for many in range(2, len(ways) + 1):
        for chosen in itertools.combinations(ways, many):
            change = start
            for way in chosen:
                change = way[-1](change)
            if fits(change):
                yield change.text
                return


def is_ids(batch: Any) -> bool:
    """Tell whether a batch is given as (rows, length)."""
    return isinstance(batch, tuple) and all(isinstance(value, int) for value in batch)


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20) << 20
