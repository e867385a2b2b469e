"""Tensors of which each of several ranks has its slices: all of them on every rank, piece by piece.

Owns what is sent, and where what comes belongs. All ranks come through here with the same tensors in one order. Next:
:mod:`offload.checkpoint.values` has the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from offload.checkpoint.dict_memory import Memory
from offload.distributed.exchange import share
from offload.planning.roles import Role
from offload.planning.units import Unit, Where
from offload.shards.manager import Manager

PIECE_NUMEL = 1 << 18  # elements of each rank that are sent at once


def share_slices(
    manager: Manager, tensors: Mapping[Where, Mapping[str, torch.Tensor]], memory: Memory, where: str
) -> None:
    """Fill in what other ranks have; nothing where there is one.

    Args:
        manager: knows the ranks, and their slices.
        tensors: by parameter and name, fp32 and contiguous on the CPU, of which this rank's slice is in place.
        memory: of the tensors.
        where: the place, for errors.

    Raises:
        RanksError: another rank has failed, ended or not come.
    """
    ranks = manager.tiers.ranks
    if ranks.world == 1:
        return
    for unit in manager.units:
        slices = _slices(manager, unit)
        longest = max(end - begin for begin, end in slices)
        for name in _names(tensors, unit):
            own = {
                position: named[name]
                for position in range(len(unit.slots))
                if name in (named := tensors.get((unit.index, position), {}))
            }
            for first in range(0, longest, PIECE_NUMEL):
                mine = torch.zeros(min(PIECE_NUMEL, longest - first), dtype=torch.float32, device="cpu")
                for elements, piece in _overlaps(unit, own, mine, slices[ranks.rank][0] + first, slices[ranks.rank][1]):
                    piece.copy_(elements)
                rows = ranks.gather_from_all(mine, where)
                for rank, row in enumerate(rows):
                    if rank != ranks.rank:
                        for elements, piece in _overlaps(unit, own, row, slices[rank][0] + first, slices[rank][1]):
                            elements.copy_(piece)
                memory.touch(own.values(), rows.nbytes)


def found_by_any(manager: Manager, flags: Sequence[bool], where: str) -> list[bool]:
    """Return which of `flags` are set on one rank at least.

    Raises:
        RanksError: another rank has failed, ended or not come.
    """
    ranks = manager.tiers.ranks
    if ranks.world == 1 or not flags:
        return list(flags)
    return [any(column) for column in zip(*share(ranks, bytes(flags), where), strict=True)]


def _slices(manager: Manager, unit: Unit) -> list[tuple[int, int]]:
    request = manager.tiers.plan.request
    return [dataclasses.replace(request, rank=rank).owned(unit, Role.GRAD) for rank in range(request.world_size)]


def _names(tensors: Mapping[Where, Mapping[str, torch.Tensor]], unit: Unit) -> Iterable[str]:
    """Return the names of all tensors of a unit, each once, in an order that all ranks have."""
    return dict.fromkeys(
        name for position in range(len(unit.slots)) for name in tensors.get((unit.index, position), {})
    )


def _overlaps(
    unit: Unit, tensors: Mapping[int, torch.Tensor], piece: torch.Tensor, begin: int, end: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the elements of tensors that are in a piece of a slice, and where they are in the piece.

    The piece begins at the unit's element `begin`. The slice ends at `end`.
    """
    for position, tensor in tensors.items():
        slot = unit.slots[position]
        start, stop = max(slot.offset_numel, begin), min(slot.end_numel, end, begin + piece.numel())
        if start < stop:
            elements = tensor.view(-1)[start - slot.offset_numel : stop - slot.offset_numel]
            yield elements, piece[start - begin : stop - begin]
