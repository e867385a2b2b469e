"""Writes what an engine holds to the files of a checkpoint, chunk by chunk and whatever tier it is in.

Owns which bytes of a chunk go to which file. Bytes come through :func:`offload.shards.stream.stream`; nothing is
changed, and updates that are made ahead of a step stay as they are. Next: :mod:`offload.checkpoints`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

import torch

from offload.checkpoint.columns import GRADIENT, Column, Span, columns_of, divide
from offload.checkpoint.format.index import Entry, Range, StoredFile
from offload.checkpoint.format.safetensors import ITEMSIZES, NAMES, Member
from offload.checkpoint.format.staging import Checksums, Staging
from offload.checkpoint.format.writer import FileWriter
from offload.errors import CheckpointError
from offload.planning.roles import Role
from offload.planning.units import Slot, Unit, Where
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk

VALUES_FILE = "values.safetensors"


@dataclasses.dataclass(frozen=True, slots=True)
class _Cell:
    """What one file has of one parameter in one column."""

    label: str
    where: Where
    begin: int  # of the stored tensor's elements
    end: int
    member: Member


class Contents:
    """What an engine's shards put into a checkpoint. See the module's text.

    Attributes:
        columns: per unit.
        buffers: how many a :class:`Staging` needs at least.
    """

    def __init__(self, manager: Manager, waiting: Container[Where], file_bytes: int) -> None:
        """Decide which file has what.

        Args:
            manager: owner of the shards.
            waiting: parameters whose gradient waits for the next step.
            file_bytes: of a file, about.
        """
        self._manager = manager
        self._waiting = waiting
        states, gradients = manager.tiers.plan.request.states, manager.gradients
        self.columns = [
            columns_of(unit, states, gradients.dtype(unit) if self._waits(unit) else None) for unit in manager.units
        ]
        sizes = [sum(ITEMSIZES[column.dtype] for column in columns) for columns in self.columns]
        self._spans = divide(manager.units, sizes, file_bytes)
        self._cells = [(span, cell) for span in self._spans for cell in self._cells_of(span, manager.units[span.unit])]
        self.buffers = max((len(columns) for columns in self.columns), default=0) + 1

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(cell.member.size_bytes for _, cell in self._cells)

    def write(self, folder: Path, staging: Staging) -> tuple[list[Entry], dict[str, StoredFile]]:
        """Write the files into `folder`; returns what the index says of them.

        Raises:
            StateError: content was lost by a failed step.
            swap.SwapError: an I/O error.
        """
        files = _Files(folder, self._cells, staging)
        by_unit: dict[int, list[Span]] = {}
        for span in self._spans:
            by_unit.setdefault(span.unit, []).append(span)

        def visit(chunk: Chunk) -> None:
            for span in by_unit.get(chunk.unit.index, ()):
                for column in self.columns[chunk.unit.index]:
                    for position, slot, start, stop in span.overlaps(chunk.unit, chunk.begin, chunk.end):
                        where = (chunk.unit.index, position)
                        if column.label != GRADIENT or where in self._waiting:
                            key = _key(column, slot)
                            size = column.size_bytes(stop - start)
                            files.append(span.file, column.label, key, column.address(chunk, start), size)

        roles = frozenset({Role.PARAM}) | ALL_STATES
        if any(self._waits(unit) for unit in self._manager.units):
            roles |= {Role.GRAD}
        try:
            self._manager.stream(self._manager.units, visit, reads=roles, keep_early=True, widely=True)
            stored = files.finish()
        finally:
            files.close()
        return self._entries(files.sums), stored

    def _waits(self, unit: Unit) -> bool:
        return any((unit.index, position) in self._waiting for position in range(len(unit.slots)))

    def _cells_of(self, span: Span, unit: Unit) -> list[_Cell]:
        cells = []
        for column in self.columns[unit.index]:
            for position, slot, start, stop in span.overlaps(unit, 0, unit.numel):
                if column.label == GRADIENT and (unit.index, position) not in self._waiting:
                    continue
                begin = column.numel(start - slot.offset_numel)
                end = column.numel(stop - slot.offset_numel)
                whole = (start, stop) == (slot.offset_numel, slot.end_numel)
                shape = column.shape(slot) if whole else (end - begin,)
                member = Member(_key(column, slot), column.dtype, shape)
                cells.append(_Cell(column.label, (unit.index, position), begin, end, member))
        return cells

    def _entries(self, sums: Mapping[tuple[int, str], Checksums]) -> list[Entry]:
        ranges: dict[tuple[str, Where], list[Range]] = {}
        for span, cell in self._cells:
            checksums = sums[span.file, cell.member.key].result()
            place = Range(_file_name(span.file), cell.member.key, cell.begin, cell.end, checksums)
            ranges.setdefault((cell.label, cell.where), []).append(place)
        entries = []
        for unit in self._manager.units:
            for column in self.columns[unit.index]:
                for position, slot in enumerate(unit.slots):
                    where = (unit.index, position)
                    if column.label != GRADIENT or where in self._waiting:
                        found = tuple(ranges.get((column.label, where), ()))
                        entries.append(Entry(column.label, slot.name, column.dtype, column.shape(slot), found))
        return entries


class _Files:
    """The files of one save, one after the other."""

    def __init__(self, folder: Path, cells: Sequence[tuple[Span, _Cell]], staging: Staging) -> None:
        self._folder = folder
        self._staging = staging
        self._regions: dict[int, dict[str, list[Member]]] = {}
        for span, cell in cells:
            self._regions.setdefault(span.file, {}).setdefault(cell.label, []).append(cell.member)
        self._order = list(self._regions)
        self._writer: FileWriter | None = None
        self._number = -1
        self._stored: dict[str, StoredFile] = {}
        self.sums: dict[tuple[int, str], Checksums] = {}

    def append(self, number: int, label: str, key: str, address: int, size_bytes: int) -> None:
        """Write the next bytes of a tensor to file `number`."""
        if number != self._number:
            self._next(number)
        assert self._writer is not None
        self._writer.append(label, key, address, size_bytes)

    def finish(self) -> dict[str, StoredFile]:
        """Wait until all is on the drive; returns the files."""
        self._end()
        return self._stored

    def close(self) -> None:
        """Close what is open, whatever is in it."""
        if self._writer is not None:
            self._staging.settle()
            self._writer.close()

    def _next(self, number: int) -> None:
        self._end()
        regions = self._regions[number]
        labels = sorted(regions, key=lambda label: -ITEMSIZES[regions[label][0].dtype])
        path = self._folder / _file_name(number)
        self._writer = FileWriter(path, {label: regions[label] for label in labels}, self._staging)
        self._number = number

    def _end(self) -> None:
        if self._writer is not None:
            self._writer.finish()
            self._stored[_file_name(self._number)] = self._writer.stored
            self.sums.update({(self._number, key): sums for key, sums in self._writer.sums.items()})
            self._writer = None


def _file_name(number: int) -> str:
    return f"tensors-{number + 1:05d}.safetensors"


def _key(column: Column, slot: Slot) -> str:
    return f"{column.label}:{slot.name}"


def write_values(
    folder: Path, values: Mapping[str, torch.Tensor], staging: Staging
) -> tuple[list[Entry], dict[str, StoredFile]]:
    """Write tensors that are in memory, by name; returns what the index says of them.

    Raises:
        CheckpointError: safetensors has no such dtype.
        swap.SwapError: an I/O error.
    """
    if not values:
        return [], {}
    members: dict[str, list[Member]] = {}
    for name, value in values.items():
        dtype = NAMES.get(str(value.dtype).removeprefix("torch."))
        if dtype is None:
            raise CheckpointError(f"{name}: expected a dtype that safetensors has but got {value.dtype}; convert it")
        members.setdefault(dtype, []).append(Member(name, dtype, tuple(value.shape)))
    order = sorted(members, key=lambda dtype: -ITEMSIZES[dtype])
    writer = FileWriter(folder / VALUES_FILE, {"all": [m for dtype in order for m in members[dtype]]}, staging)
    try:
        for dtype in order:
            for member in members[dtype]:
                plain = values[member.key].detach().to("cpu").contiguous()
                writer.append("all", member.key, plain.data_ptr(), member.size_bytes)
        writer.finish()
    finally:
        staging.settle()
        writer.close()
    entries = []
    for dtype in order:
        for member in members[dtype]:
            numel = member.size_bytes // ITEMSIZES[dtype]
            place = Range(VALUES_FILE, member.key, 0, numel, writer.sums[member.key].result())
            entries.append(Entry("value", member.key, dtype, member.shape, (place,) if numel else ()))
    return entries, {VALUES_FILE: writer.stored}
