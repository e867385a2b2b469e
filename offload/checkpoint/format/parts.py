"""What each of several ranks has written of a checkpoint, and the one index that is made of it.

Owns the parts: each is an index of the rank's own files, in a file beside them until the first rank has read it. Knows
neither ranks nor tensors. Next: :mod:`offload.checkpoints`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path

from offload.checkpoint.format.folder import Folder
from offload.checkpoint.format.index import Entry, Index
from offload.errors import InternalError

RANKS = "ranks"  # key of the index: what each rank has of its own, but for the first one's, which is the index's


def write_part(folder: Folder, new: Path, rank: int, index: Index) -> None:
    """Write the part of a rank.

    Raises:
        CheckpointError, swap.SwapFullError: it cannot be written.
    """
    folder.write(_path(new, rank), index.to_json())


def join_parts(folder: Folder, new: Path, first: Index, world: int) -> Index:
    """Return the index of all ranks' files; their parts are gone then.

    Args:
        folder: of checkpoints.
        new: the checkpoint's folder.
        first: the part of rank 0.
        world: how many ranks there are.

    Raises:
        CheckpointError: a part cannot be read.
        InternalError: the parts do not make up all tensors.
    """
    if world == 1:
        return first
    parts = [first, *(Index.read(_path(new, rank)) for rank in range(1, world))]
    files = {name: stored for part in parts for name, stored in part.files.items()}
    own = [{}, *(part.contents for part in parts[1:])]
    for rank in range(1, world):
        folder.remove(_path(new, rank))
    return dataclasses.replace(first, entries=_joined(parts), files=files, contents={**first.contents, RANKS: own})


def _joined(parts: Sequence[Index]) -> tuple[Entry, ...]:
    """Return each tensor with the ranges that all ranks have of it: slices follow each other in rank order."""
    found: dict[tuple[str, str], Entry] = {}
    for part in parts:
        for key, entry in part.by_role().items():
            known = found.get(key)
            found[key] = entry if known is None else dataclasses.replace(known, ranges=known.ranges + entry.ranges)
    for entry in found.values():
        ends = [0, *(part.end for part in entry.ranges)]
        if [part.begin for part in entry.ranges] != ends[:-1] or ends[-1] != entry.numel:
            ranges = [(part.begin, part.end) for part in entry.ranges]
            raise InternalError(
                f"checkpoint: expected ranges of all of {entry.role} of {entry.name}, {entry.numel} elements, but got "
                f"{ranges}"
            )
    return tuple(found.values())


def _path(new: Path, rank: int) -> Path:
    return new / f"part-{rank}.json"
