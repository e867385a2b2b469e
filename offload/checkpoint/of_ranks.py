"""Tensors of which each of several ranks has its slices: all of them on every rank, piece by piece.

Owns what is sent, and where what comes belongs. All ranks come through here with the same tensors in one order. Next:
:mod:`offload.checkpoint.values` has the tensors.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch

from offload.checkpoint.dict_memory import Memory
from offload.distributed.exchange import share
from offload.planning.roles import Role
from offload.planning.units import Unit, Where
from offload.shards.manager import Manager

PIECE_NUMEL = 1 << 18  # elements of each rank that are sent at once


def share_slices(
    manager: Manager,
    tensors: Mapping[Where, Mapping[str, torch.Tensor]],
    memory: Memory,
    where: str,
    sizes: Mapping[str, Callable[[int], int]] | None = None,
) -> None:
    """Fill in what other ranks have; nothing where there is one.

    Args:
        manager: knows the ranks, and their slices.
        tensors: by parameter and name, contiguous on the CPU, of which this rank's slice is in place.
        memory: of the tensors.
        where: the place, for errors.
        sizes: by name, how many elements a tensor has for the first n of its parameter; None for as many.

    Raises:
        RanksError: another rank has failed, ended or not come.
    """
    ranks = manager.tiers.ranks.node  # which has all slices
    if ranks.world == 1:
        return
    for unit in manager.units:
        slices = _slices(manager, unit)
        longest = max(end - begin for begin, end in slices)
        for name in _names(tensors, unit):
            size = (sizes or {}).get(name, _as_many)
            own = {
                position: named[name]
                for position in range(len(unit.slots))
                if name in (named := tensors.get((unit.index, position), {}))
            }
            dtype = next(iter(own.values())).dtype
            for first in range(0, longest, PIECE_NUMEL):
                pieces = [(begin + first, min(begin + first + PIECE_NUMEL, end)) for begin, end in slices]
                mine = torch.zeros(size(min(PIECE_NUMEL, longest - first)), dtype=dtype, device="cpu")
                for elements, piece in _overlaps(unit, own, mine, *pieces[ranks.rank], size):
                    piece.copy_(elements)
                rows = ranks.gather_from_all(mine, where)
                for rank, row in enumerate(rows):
                    if rank != ranks.rank:
                        for elements, piece in _overlaps(unit, own, row, *pieces[rank], size):
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
    return [dataclasses.replace(request, rank=rank).owned(unit, Role.GRAD) for rank in range(request.slices)]


def _names(tensors: Mapping[Where, Mapping[str, torch.Tensor]], unit: Unit) -> Iterable[str]:
    """Return the names of all tensors of a unit, each once, in an order that all ranks have."""
    return dict.fromkeys(
        name for position in range(len(unit.slots)) for name in tensors.get((unit.index, position), {})
    )


def _overlaps(
    unit: Unit,
    tensors: Mapping[int, torch.Tensor],
    piece: torch.Tensor,
    begin: int,
    end: int,
    size: Callable[[int], int],
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield what tensors have of the unit's elements [begin, end), and where that is in a piece which has them."""
    for position, slot, start, stop in unit.overlaps(begin, end):
        if position in tensors:
            skip, at = size(start - slot.offset_numel), size(start - begin)
            numel = size(stop - start)
            yield tensors[position].view(-1)[skip : skip + numel], piece[at : at + numel]


def _as_many(numel: int) -> int:
    return numel
