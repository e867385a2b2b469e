"""The gradients of all ranks, added up in rank order by whoever owns a slice: the same bits as one process's.

Owns the order of the sum. A gradient travels in its own dtype and is added in fp32, onto what earlier micro-batches
left, as one process adds micro-batch after micro-batch: the world size is only a placement. A rank that has no gradient
of a parameter adds nothing, not zeros. Where a gradient comes from and where a sum lives is others' business.

Where there are several nodes, a sum has two levels. Each node adds its ranks' gradients of the micro-batch up, in rank
order and in fp32. The owners of a slice add these sums of nodes onto what there is, in the order of nodes, and send no
other gradients between nodes. A node of which no rank has a gradient adds nothing, either. Next:
:mod:`offload.kernels.cpu_adam` adds.
"""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable, Sequence

import torch

from offload.distributed.ranks import Ranks
from offload.kernels import cpu_adam

KERNEL_DTYPE = {
    torch.float32: cpu_adam.Dtype.FLOAT32,
    torch.bfloat16: cpu_adam.Dtype.BFLOAT16,
    torch.float16: cpu_adam.Dtype.FLOAT16,
}
_SUM_BYTES = 4  # of an element of a sum


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """What of a parameter lies in a slice: elements [begin, end) of the slice.

    Attributes:
        slot: position of the parameter in its unit.
        begin, end: its elements.
    """

    slot: int
    begin: int
    end: int


def parts_of(spans: Iterable[tuple[int, int]], begin: int, end: int) -> list[Part]:
    """Return what lies in a slice.

    Args:
        spans: first element, and the one behind the last, of each parameter of a unit.
        begin: first element of the unit that is in the slice.
        end: the one behind the last.
    """
    found = []
    for slot, (first, last) in enumerate(spans):
        start, stop = max(first, begin), min(last, end)
        if start < stop:
            found.append(Part(slot, start - begin, stop - begin))
    return found


def share(ranks: Ranks, mine: bytes, where: str) -> list[bytes]:
    """Return, by rank, what each says: all of them as many bytes.

    Raises:
        RanksError: another rank has failed, ended or not come.
    """
    rows = ranks.gather_from_all(torch.frombuffer(bytearray(mine), dtype=torch.uint8), where)
    return [row.numpy().tobytes() for row in rows]


class Exchange:
    """Sends each rank the gradients of its slice, piece by piece, and adds up what comes."""

    def __init__(self, ranks: Ranks, received: torch.Tensor, staging: torch.Tensor) -> None:
        """Begin.

        Args:
            ranks: who takes part.
            received: (n,) uint8 in host memory, for a piece of all ranks: at least 4 bytes for each.
            staging: the same, for what is sent.
        """
        assert received.numel() == staging.numel() >= _SUM_BYTES * ranks.world
        self._node = ranks.node
        self._owners = ranks.owners
        self._received = received
        self._staging = staging

    def add(
        self,
        gradient: torch.Tensor | None,
        parts: Sequence[Part],
        presence: Sequence[Sequence[bool]],
        arrived: Sequence[bool],
        *,
        total: int,
        numel: int,
        dtype: torch.dtype,
        where: str,
    ) -> list[bool]:
        """Add all ranks' gradients of this rank's slice of a unit to their sum, rank after rank.

        Args:
            gradient: (slices * n,) contiguous, in host memory: this rank's, of all of the unit. What is absent has any
                content; None where all is.
            parts: what lies in this rank's slice.
            presence: by rank and slot, whether a gradient is there.
            arrived: per slot, whether there is a sum already; else the first gradient takes its place.
            total: address of the sum, (n,) float32.
            numel: slices * n.
            dtype: of gradients.
            where: the place, for errors.

        Returns:
            Per slot, whether there is a sum now, of this rank's slice or of others'.

        Raises:
            RanksError: another rank has failed, ended or not come. The sum is of no use then.
        """
        slices, nodes = self._node.world, self._owners.world
        rows = None if gradient is None else gradient.view(slices, -1)
        numel //= slices
        piece = self._received.numel() // max(dtype.itemsize * slices, _SUM_BYTES if nodes > 1 else 0)
        piece -= piece % nodes
        for begin in range(0, numel, piece):
            end = min(begin + piece, numel)
            received = _rows(self._received, dtype, slices, end - begin)
            sent = rows
            if sent is None or end - begin < numel:
                sent = _rows(self._staging, dtype, slices, end - begin)
                if rows is not None:
                    _put(sent, rows[:, begin:end])
            self._node.swap(received, sent, where)
            if nodes == 1:
                _fold(received, presence, parts, arrived, begin, total)
            else:
                self._add_nodes(received, presence, parts, arrived, begin, total, where)
        return [any(flags) for flags in zip(arrived, *presence, strict=True)]

    def _add_nodes(
        self,
        received: torch.Tensor,
        presence: Sequence[Sequence[bool]],
        parts: Sequence[Part],
        arrived: Sequence[bool],
        begin: int,
        total: int,
        where: str,
    ) -> None:
        """Add the sums of all nodes to the sum, node after node.

        Each owner of the slice adds up its part of the piece, and sends the others what comes of it.

        Args:
            received: (slices, n) of the ranks of this node: elements of the slice from `begin` on; overwritten.
            presence: as in :meth:`add`.
            parts: the same.
            arrived: the same.
            begin: the first element.
            total: as in :meth:`add`.
            where: the same.
        """
        slices, nodes = received.shape[0], self._owners.world
        numel, first = received.shape[1], self._owners.rank * slices
        part = numel // nodes
        sums = _rows(self._staging, torch.float32, nodes, part)
        nothing = [False] * len(arrived)
        _fold(received, presence[first : first + slices], parts, nothing, begin, sums.data_ptr() - begin * _SUM_BYTES)
        of_nodes = _rows(self._received, torch.float32, nodes, part)
        self._owners.swap(of_nodes, sums, where)
        of_each = [presence[rank : rank + slices] for rank in range(0, len(presence), slices)]
        there = [[any(flags) for flags in zip(*node, strict=True)] for node in of_each]
        _fold(of_nodes, there, parts, arrived, begin + self._owners.rank * part, total)
        memory = (ctypes.c_char * (numel * _SUM_BYTES)).from_address(total + begin * _SUM_BYTES)
        self._owners.gather(torch.frombuffer(memory, dtype=torch.float32), where)


def _fold(
    rows: torch.Tensor,
    presence: Sequence[Sequence[bool]],
    parts: Sequence[Part],
    arrived: Sequence[bool],
    begin: int,
    total: int,
) -> None:
    """Add rows to a sum, one after the other.

    Args:
        rows: (m, n) of the elements of a slice from `begin` on.
        presence: by row and slot, whether a gradient is there.
        parts: what lies in the slice.
        arrived: per slot, whether there is a sum already; else the first gradient takes its place.
        begin: the first element.
        total: address of the sum of the slice's first element, float32.
    """
    end = begin + rows.shape[1]
    here = [part for part in parts if part.begin < end and part.end > begin]
    known = list(arrived)
    for row, present in zip(rows, presence, strict=True):
        for part in here:
            if present[part.slot]:
                _add(row, part, begin, end, total, first=not known[part.slot])
                known[part.slot] = True


def _put(target: torch.Tensor, source: torch.Tensor) -> None:
    """Copy the rows of `source` to those of `target`: (m, n), whose rows are contiguous."""
    size_bytes = target.shape[1] * target.itemsize
    for to, row in zip(target, source, strict=True):
        ctypes.memmove(to.data_ptr(), row.data_ptr(), size_bytes)


def _rows(memory: torch.Tensor, dtype: torch.dtype, world: int, numel: int) -> torch.Tensor:
    return memory[: world * numel * dtype.itemsize].view(dtype).view(world, numel)


def _add(row: torch.Tensor, part: Part, begin: int, end: int, total: int, *, first: bool) -> None:
    """Add what lies in elements [begin, end) of a slice, of which `row` has one rank's gradients, of one parameter."""
    start, stop = max(part.begin, begin), min(part.end, end)
    cpu_adam.take_gradient(
        src=row.data_ptr() + (start - begin) * row.itemsize,
        src_dtype=KERNEL_DTYPE[row.dtype],
        dst=total + start * _SUM_BYTES,
        dst_dtype=cpu_adam.Dtype.FLOAT32,
        numel=stop - start,
        add=not first,
        measure=False,
    )
