"""What would make a batch fit whose activations do not: each change is tried, none is guessed.

Owns which changes there are, and their order: first what costs no memory, then few of these together, then shorter
sequences with all that saves most, then the device that would do. Knows no model: whoever asks tells whether a change
does. Next: :mod:`offload.trials` tells it.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from offload.activations.ledger import with_margin
from offload.config import Config
from offload.errors import ConfigError
from offload.memory.budget import Tier
from offload.planning.choosing import AUTO, OFFLOAD, RECOMPUTE
from offload.planning.work import Work, is_ids
from offload.sizes import parse_bytes

EIGHTHS = (8, 9, 10, 12, 16)  # of the device budget that should do, which are tried


@dataclasses.dataclass(frozen=True, slots=True)
class Change:
    """What may be asked for instead; `text` says how, in Python's names.

    `chunk_loss` and `checkpointing` are of the model that is made: it has them beside those that were asked for.
    """

    text: str
    asked: Config
    budgets: Mapping[Tier, int]
    batch: Any
    chunk_loss: bool = False
    checkpointing: bool = False

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
    may_checkpoint: bool,
    checkpointing: bool,
) -> Iterator[str]:
    """Yield what would make a batch fit, in Python's names.

    Args:
        fits: tries a change.
        start: what was asked for.
        work: of the batch.
        room_bytes: what the plan leaves to activations on the device.
        may_chunk: the loss is one whose logits may be formed by chunks.
        may_checkpoint: the model may be made so that it computes activations again by itself.
        checkpointing: it does so.
    """
    asked, batch, need = start.asked, start.batch, _whole_mib(with_margin(work.device_bytes))
    moving = asked.activations in (OFFLOAD, AUTO)

    def recompute(change: Change) -> Change:
        rooms = ("activation_cpu_memory", "activation_nvme_memory")
        said = [name for name in rooms if getattr(change.asked, name) is not None]
        text = f'activations="{RECOMPUTE}"' + (f" without {' and '.join(said)}" if said else "")
        return change.with_options(text, activations=RECOMPUTE, activation_cpu_memory=None, activation_nvme_memory=None)

    def leave(change: Change) -> Change:
        text = f'activations="{OFFLOAD}"' + (" and checkpointing=True" if checkpointing else "")
        return change.with_options(text, activations=OFFLOAD)

    def wider(change: Change) -> Change:
        return change.with_options(f'activation_memory="{need >> 20}MiB"', activation_memory=need)

    def drive(change: Change) -> Change:
        peak = _whole_mib(work.peak_bytes)
        return change.with_options(f'activation_nvme_memory="{peak >> 20}MiB"', activation_nvme_memory=peak)

    def chunk(change: Change) -> Change:
        return change.and_("chunk_loss=True", chunk_loss=True)

    def again(change: Change) -> Change:
        return change.and_("checkpointing=True", checkpointing=True)

    def size(rows: int, length: int) -> Way:
        return lambda change: change.and_(f"micro-batches of {rows}x{length}", batch=(rows, length))

    ids = is_ids(batch)
    chunks: list[Way] = [chunk] if may_chunk and ids else []
    memory: list[list[Way]] = [[wider]] if need < start.budgets[Tier.DEVICE] else []
    memory += [[drive]] if moving and start.budgets[Tier.NVME] else []
    modes: list[Way] = [leave] if not moving else []
    if not checkpointing and asked.activations != RECOMPUTE:
        modes = [recompute, *modes]
    ways = [each for each in (chunks, modes) if each]
    if ids and batch[0] > 1:
        likely = max(int(batch[0] * room_bytes / work.device_bytes), 1)
        ways.append([size(many, batch[1]) for many in dict.fromkeys((likely, max(likely // 2, 1), 1))])
    alone = [_first(fits, start, ([way] for way in each)) for each in (*memory, *ways)]
    yield from (change.text for change in alone if change is not None)
    if not any(alone):
        found = _together(fits, start, ways)
        if found is None and ids:
            more: list[Way] = [again] if may_checkpoint else []
            most = [more] if moving else [[leave, *more], more]
            most += [[recompute]] if recompute in modes else []
            sizes = [size(1, batch[1] >> halved) for halved in range(1, batch[1].bit_length())]
            most += [[*some, chunk] for some in most if chunks]  # which takes more where the head has more than logits
            found = _first(fits, start, ([each, *some] for each in sizes for some in most))
        yield from (change.text for change in (found,) if change is not None)
    enough = start.budgets[Tier.DEVICE] + need - room_bytes
    larger = [_larger(enough * eighths // 8) for eighths in EIGHTHS]  # units of a larger device may be larger
    bought = _first(fits, start, (some for each in larger for some in ([each], [each, wider])))
    if bought is not None:
        yield bought.text


def _larger(device_bytes: int) -> Way:
    size = _whole_mib(device_bytes)
    said = f"{size >> 20}MiB"

    def larger(change: Change) -> Change:
        parse_bytes(said, subject=Tier.DEVICE.value)  # as whoever follows it does: no machine may have as much
        return change.and_(f'max_memory["device"]="{said}"', budgets={**change.budgets, Tier.DEVICE: size})

    return larger


def _together(fits: Callable[[Change], bool], start: Change, ways: Sequence[Sequence[Way]]) -> Change | None:
    """Return the first of few changes together that do, of each way the most that it can."""
    chosen = (some for many in range(2, len(ways) + 1) for some in itertools.combinations(ways, many))
    return _first(fits, start, ([way[-1] for way in some] for some in chosen))


def _first(fits: Callable[[Change], bool], start: Change, tried: Iterable[Sequence[Way]]) -> Change | None:
    """Return the first of the changes that do, each of some ways together; options may refuse one of these."""
    for ways in tried:
        with contextlib.suppress(ConfigError):
            change = functools.reduce(lambda change, way: way(change), ways, start)
            if fits(change):
                return change
    return None


def _whole_mib(size_bytes: int) -> int:
    return -(-size_bytes >> 20) << 20
