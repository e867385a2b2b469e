"""Norms of whole parameters and of their directions, where each of several ranks has slices of them: LAMB's first pass.

Owns the order of the sums: by blocks, and all blocks of a parameter in its order, so that they have the bits of one
process. The arithmetic of an element is in ``csrc/cpu_adam``. Next: :mod:`offload.optim.recipe` makes the second pass.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

import torch

from offload.distributed.exchange import parts_of
from offload.kernels import cpu_adam
from offload.planning.roles import Role
from offload.planning.units import Slot, Unit, Where
from offload.shards.manager import Manager
from offload.spec import Hyper

_CHUNK_NUMEL = 1 << 16  # which the kernel sums before it goes on: of these, one is summed in one call


class Norms:
    """Sums of squares of one step, of blocks that begin at multiples of :data:`.cpu_adam.SUM_BLOCK`."""

    def __init__(self, manager: Manager, updated: Mapping[int, Sequence[int]]) -> None:
        """Begin; `updated` has the slots of each unit that the step updates, the same on all ranks."""
        self._ranks = manager.tiers.ranks
        request, units = manager.tiers.plan.request, manager.units
        self._blocks = [
            _blocks(dataclasses.replace(request, rank=rank).owned, [units[index] for index in updated], updated)
            for rank in range(request.slices)
        ]
        self._begins = {index: request.owned(units[index], Role.GRAD)[0] for index in updated}
        self._mine = {
            where: torch.zeros(2, count, dtype=torch.float64)
            for where, count in self._blocks[self._ranks.node.rank].items()
        }

    def add(
        self,
        where: Where,
        slot: Slot,
        start: int,
        stop: int,
        arrays: Callable[[int, int], cpu_adam.StepArrays],
        hyper: Hyper,
    ) -> None:
        """Update the moments of elements [start, stop) of a unit, and measure them.

        Args:
            where: the parameter.
            slot: the same.
            start: first element; one of a block, as that of each stream's chunk.
            stop: the one behind the last.
            arrays: returns the arrays of some of the elements.
            hyper: of the step.
        """
        row, first = self._mine[where], max(slot.offset_numel, self._begins[where[0]])
        while start < stop:
            at = start - slot.offset_numel
            end = min(slot.offset_numel + at + _CHUNK_NUMEL, slot.end_numel)
            if at % _CHUNK_NUMEL or end > stop:  # a part of a chunk: others may have more of it
                end = min(start + cpu_adam.SUM_BLOCK, stop)
            sums = cpu_adam.lamb_moments(arrays(start, end), hyper)
            row[:, (start - first) // cpu_adam.SUM_BLOCK] = torch.tensor(sums, dtype=torch.float64)
            start = end

    def join(self, where: str) -> dict[Where, tuple[float, float]]:
        """Return the sums of squares of each parameter and of its direction; all ranks come here.

        Raises:
            RanksError: another rank has failed, is elsewhere, ended or not come.
        """
        self._ranks.agree(where)
        longest = max(sum(blocks.values()) for blocks in self._blocks)
        mine = torch.zeros(2, max(longest, 1), dtype=torch.float64)
        at = 0
        for row in self._mine.values():
            mine[:, at : at + row.shape[1]] = row
            at += row.shape[1]
        node = self._ranks.node  # which has all slices
        rows = node.gather_from_all(mine.view(-1), where).view(node.world, 2, -1)
        found: dict[Where, list[torch.Tensor]] = {}
        for parts, blocks in zip(rows, self._blocks, strict=True):
            at = 0
            for parameter, count in blocks.items():  # a parameter's slices follow each other in rank order
                found.setdefault(parameter, []).append(parts[:, at : at + count])
                at += count
        joined = {parameter: torch.cat(parts, dim=1).contiguous() for parameter, parts in found.items()}
        return {parameter: (_total(sums[0]), _total(sums[1])) for parameter, sums in joined.items()}


def _blocks(
    owned: Callable[[Unit, Role], tuple[int, int]], units: Sequence[Unit], updated: Mapping[int, Sequence[int]]
) -> dict[Where, int]:
    """Return how many blocks a rank has of each parameter."""
    return {
        (unit.index, part.slot): -(-(part.end - part.begin) // cpu_adam.SUM_BLOCK)
        for unit in units
        for part in parts_of([(slot.offset_numel, slot.end_numel) for slot in unit.slots], *owned(unit, Role.GRAD))
        if part.slot in updated[unit.index]
    }


def _total(blocks: torch.Tensor) -> float:
    return float(cpu_adam.join_block_sums(blocks.data_ptr(), blocks.numel()))
