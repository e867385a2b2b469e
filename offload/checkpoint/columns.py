"""What of a unit is in a checkpoint, and in which file each element of it is.

A *column* is what is stored of a unit in one role. Owns how a column's elements are spelled in safetensors, and how
units are divided among files. Pure values. Next: :mod:`offload.checkpoint.saving` and
:mod:`offload.checkpoint.restoring`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence

from offload.checkpoint.format.safetensors import ITEMSIZES, NAMES
from offload.errors import CheckpointError
from offload.kernels.ranges import STATE_BLOCK, Dtype, StateKind
from offload.planning.roles import Role, States
from offload.planning.units import PAD_NUMEL, Slot, Unit
from offload.shards.stream import Chunk
from offload.sizes import GIB

FILE_BYTES = 2 * GIB
PARAMETER, MASTER, GRADIENT, SCALES = "parameter", "master", "gradient", "scales"
_STATES = {StateKind.FLOAT32: "F32", StateKind.BFLOAT16: "BF16", StateKind.INT8: "U8"}
_GRADIENTS = {Dtype.FLOAT32: "F32", Dtype.BFLOAT16: "BF16", Dtype.FLOAT16: "F16"}


@dataclasses.dataclass(frozen=True, slots=True)
class Column:
    """What is stored of a unit in one role.

    Attributes:
        label: the role's name in the index; of a state, the state's.
        role: where it is in memory.
        dtype: of an element in the file.
        scales: there are two elements for each block of 8-bit states.
    """

    label: str
    role: Role
    dtype: str
    scales: bool = False

    def numel(self, numel: int) -> int:
        """Return how many elements are stored of the first `numel` of a parameter."""
        return -(-numel // STATE_BLOCK) * 2 if self.scales else numel

    def size_bytes(self, numel: int) -> int:
        """Return the bytes that are stored of `numel` elements."""
        return self.numel(numel) * ITEMSIZES[self.dtype]

    def shape(self, slot: Slot) -> tuple[int, ...]:
        """Return the shape of what is stored of a parameter."""
        return (self.numel(slot.numel) // 2, 2) if self.scales else slot.shape

    def address(self, chunk: Chunk, element: int) -> int:
        """Return where what is stored of unit element `element` is in a chunk; a block begins there."""
        return chunk.addresses[self.role] + self.size_bytes(element - chunk.begin)


def columns_of(unit: Unit, states: States, gradients: Dtype | None) -> list[Column]:
    """Return what is stored of a unit, the widest elements first, so that each tensor of a file is aligned.

    Args:
        unit: the unit.
        states: what the optimizer remembers.
        gradients: how they are stored; None where none is.

    Raises:
        CheckpointError: safetensors has no such dtype.
    """
    if unit.dtype not in NAMES:
        raise CheckpointError(
            f"checkpoint: expected parameters of a dtype that safetensors has but {unit.slots[0].name} is "
            f"{unit.dtype}; save with torch.save(engine.state_dict(), path)"
        )
    columns = [Column(PARAMETER, Role.PARAM, NAMES[unit.dtype])]
    if unit.trainable:
        if unit.dtype != "float32":
            columns.append(Column(MASTER, Role.MASTER, "I16" if unit.dtype == "bfloat16" else "F32"))
        columns += [Column(name, role, _STATES[states.kind]) for role, name in states.roles()]
        if states.kind is StateKind.INT8:
            columns.append(Column(SCALES, Role.SCALES, "U8", scales=True))
        if gradients is not None:
            columns.append(Column(GRADIENT, Role.GRAD, _GRADIENTS[gradients]))
    return sorted(columns, key=lambda column: -ITEMSIZES[column.dtype])


@dataclasses.dataclass(frozen=True, slots=True)
class Span:
    """Elements [begin, end) of a unit, which one file has."""

    file: int
    unit: int
    begin: int
    end: int

    def overlaps(self, unit: Unit, begin: int, end: int) -> Iterator[tuple[int, Slot, int, int]]:
        """Yield (position, slot, start, stop) of the unit's elements [start, stop) that are in [begin, end), too."""
        return unit.overlaps(max(begin, self.begin), min(end, self.end))


def divide(
    units: Sequence[Unit],
    element_bytes: Sequence[int],
    limit_bytes: int = FILE_BYTES,
    slices: Mapping[int, tuple[int, int]] | None = None,
) -> list[Span]:
    """Divide units among files, in order; a unit that is larger than a file is cut.

    Args:
        units: of the model.
        element_bytes: per unit, bytes that an element takes in all columns, at most.
        limit_bytes: of a file.
        slices: by unit, the elements that are written at all, whole pages; None for all of them.
    """
    spans: list[Span] = []
    file, left = 0, limit_bytes
    for unit in units:
        size = element_bytes[unit.index]
        begin, last = (0, unit.numel) if slices is None else slices[unit.index]
        if (last - begin) * size > left and left < limit_bytes:
            file, left = file + 1, limit_bytes
        while begin < last:
            room = max(left // size // PAD_NUMEL, 1) * PAD_NUMEL
            end = min(begin + room, last)
            spans.append(Span(file, unit.index, begin, end))
            left -= (end - begin) * size
            if end < last:
                file, left = file + 1, limit_bytes
            begin = end
    return spans
