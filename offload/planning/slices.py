"""Which slice of a unit is whose.

Pure arithmetic, the same on every rank. Next: :mod:`offload.planning.plan` says which roles are sliced.
"""

from __future__ import annotations

from offload.planning.units import PAD_NUMEL
from offload.sizes import round_up


def owned_range(numel: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the elements [begin, end) of a unit that `rank` owns; a single rank owns all of them.

    The slices of all ranks follow each other and cover the unit. They are cut at multiples of :data:`PAD_NUMEL`
    elements, so that a cut divides neither a page of 4 KiB in a role with one or more bytes per element, nor a block of
    8-bit states. All are of one length, as a gather in place needs it, but the last ones: these are shorter or empty.

    Args:
        numel: elements of the unit, with its padding.
        rank: counted from 0, below `world_size`.
        world_size: ranks that share the unit.
    """
    assert 0 <= rank < world_size, f"rank {rank} of {world_size}"
    length = round_up(numel, PAD_NUMEL * world_size) // world_size
    return min(rank * length, numel), min((rank + 1) * length, numel)
