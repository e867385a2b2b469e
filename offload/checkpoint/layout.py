"""Which file has what of which columns, and the files under way: what every way of writing them has in common.

Owns the division of columns among files, the entries of the index that follow from it, and the order in which files are
begun and ended. Knows neither where bytes come from nor shards. Next: :mod:`offload.checkpoint.saving` writes from the
tiers, :mod:`offload.checkpoint.copying` what is held.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Mapping, Sequence
from pathlib import Path

from offload.checkpoint.columns import GRADIENT, Column, Span, divide
from offload.checkpoint.format.index import Entry, Range, StoredFile
from offload.checkpoint.format.safetensors import ITEMSIZES, Member
from offload.checkpoint.format.staging import Checksums, Staging
from offload.checkpoint.format.writer import FileWriter
from offload.planning.units import Slot, Unit, Where

MOST_UNFLUSHED = 16  # files that are complete and still open: they are flushed when somebody has the time

Ranges = dict[tuple[str, Where], list[Range]]  # by label and parameter


@dataclasses.dataclass(frozen=True, slots=True)
class Cell:
    """What one file has of one parameter in one column."""

    label: str
    where: Where
    begin: int  # of the stored tensor's elements
    end: int
    member: Member


@dataclasses.dataclass(frozen=True, slots=True)
class Columns:
    """What is stored of each unit.

    Attributes:
        units: of the model.
        of: columns, by unit.
        waiting: parameters whose gradient waits for the next step: others have none in a file.
        slices: by unit, the elements that are written; None for all of them.
    """

    units: Sequence[Unit]
    of: Sequence[Sequence[Column]]
    waiting: Container[Where]
    slices: Mapping[int, tuple[int, int]] | None = None

    def has(self, column: Column, where: Where) -> bool:
        """Tell whether anything is stored of a parameter in a column."""
        return column.label != GRADIENT or where in self.waiting

    def entries(self, ranges: Mapping[tuple[str, Where], Sequence[Range]]) -> list[Entry]:
        """Return what the index says of all tensors, which are in `ranges` of files."""
        return [
            Entry(
                column.label, slot.name, column.dtype, column.shape(slot), tuple(ranges.get((column.label, where), ()))
            )
            for unit in self.units
            for column in self.of[unit.index]
            for position, slot in enumerate(unit.slots)
            if self.has(column, where := (unit.index, position))
        ]


class Layout:
    """Where in which files columns are.

    Attributes:
        columns: which.
        spans: what of a unit is in which file, in the order of files.
        files: how many there are.
    """

    def __init__(self, columns: Columns, file_bytes: int, first: int = 0, suffix: str = "") -> None:
        """Divide `columns` among files of about `file_bytes`, the first of which has the number `first`.

        The names of one rank's files have a `suffix` that others' have not.
        """
        self.columns = columns
        self._suffix = suffix
        sizes = [sum(ITEMSIZES[column.dtype] for column in found) for found in columns.of]
        stored = [unit for unit in columns.units if sizes[unit.index]]
        divided = divide(stored, sizes, file_bytes, columns.slices)
        self.spans = [dataclasses.replace(span, file=span.file + first) for span in divided]
        self.files = len({span.file for span in self.spans})
        self._cells = [(span, cell) for span in self.spans for cell in self._cells_of(span, columns.units[span.unit])]

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return sum(cell.member.size_bytes for _, cell in self._cells)

    @property
    def buffers(self) -> int:
        """How many a :class:`Staging` needs at least: each column of a file fills one."""
        return max(map(len, self.columns.of), default=0) + 1

    def regions(self) -> dict[int, dict[str, list[Member]]]:
        """Return the tensors by file and label."""
        found: dict[int, dict[str, list[Member]]] = {}
        for span, cell in self._cells:
            found.setdefault(span.file, {}).setdefault(cell.label, []).append(cell.member)
        return found

    def ranges(self, sums: Mapping[tuple[int, str], Checksums]) -> Ranges:
        """Return where everything is, when all of it is written."""
        ranges: Ranges = {}
        for span, cell in self._cells:
            checksums = sums[span.file, cell.member.key].result()
            place = Range(self.file_name(span.file), cell.member.key, cell.begin, cell.end, checksums)
            ranges.setdefault((cell.label, cell.where), []).append(place)
        return ranges

    def file_name(self, number: int) -> str:
        """Return the name of a file."""
        return f"tensors{self._suffix}-{number + 1:05d}.safetensors"

    def _cells_of(self, span: Span, unit: Unit) -> list[Cell]:
        cells = []
        for column in self.columns.of[unit.index]:
            for position, slot, start, stop in span.overlaps(unit, 0, unit.numel):
                where = (unit.index, position)
                if not self.columns.has(column, where):
                    continue
                begin = column.numel(start - slot.offset_numel)
                end = column.numel(stop - slot.offset_numel)
                whole = (start, stop) == (slot.offset_numel, slot.end_numel)
                shape = column.shape(slot) if whole else (end - begin,)
                cells.append(Cell(column.label, where, begin, end, Member(key_of(column, slot), column.dtype, shape)))
        return cells


class Files:
    """The files of a layout, written one after the other.

    Attributes:
        stored: what the index says of those that are complete.
    """

    def __init__(self, folder: Path, layout: Layout, staging: Staging) -> None:
        """Begin with none of them."""
        self.stored: dict[str, StoredFile] = {}
        self._folder = folder
        self._layout = layout
        self._staging = staging
        self._regions = layout.regions()
        self._writer: FileWriter | None = None
        self._number = -1
        self._sums: dict[tuple[int, str], Checksums] = {}
        self._unflushed: list[FileWriter] = []

    def append(self, number: int, label: str, key: str, address: int, size_bytes: int) -> None:
        """Write the next bytes of a tensor to file `number`.

        Raises:
            swap.SwapError: something could not be written.
        """
        if number != self._number:
            self.end()
            regions = self._regions[number]
            labels = sorted(regions, key=lambda label: -ITEMSIZES[regions[label][0].dtype])
            path = self._folder / self._layout.file_name(number)
            self._writer = FileWriter(path, {label: regions[label] for label in labels}, self._staging)
            self._number = number
        assert self._writer is not None
        self._writer.append(label, key, address, size_bytes)

    def end(self) -> None:
        """End the file under way: the file system has all of it when this returns.

        Raises:
            swap.SwapError: something could not be written.
        """
        if self._writer is not None:
            self._writer.write_rest()
            self.stored[self._layout.file_name(self._number)] = self._writer.stored
            self._sums.update({(self._number, key): sums for key, sums in self._writer.sums.items()})
            self._unflushed.append(self._writer)
            self._writer = None
            if len(self._unflushed) > MOST_UNFLUSHED:
                self._unflushed.pop(0).finish()

    def flush(self) -> Ranges:
        """Wait until all is on the drive; returns where everything is.

        Raises:
            swap.SwapError: something could not be flushed.
        """
        self.end()
        while self._unflushed:
            self._unflushed[0].finish()
            self._unflushed.pop(0)
        return self._layout.ranges(self._sums)

    def close(self) -> None:
        """Close what is open, whatever is in it. Idempotent."""
        self._staging.settle()
        for writer in (*self._unflushed, *([self._writer] if self._writer else [])):
            writer.close()


def key_of(column: Column, slot: Slot) -> str:
    """Return what a parameter's tensor in a column is called in a file."""
    return f"{column.label}:{slot.name}"
