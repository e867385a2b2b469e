"""Writes what is held to the files of a checkpoint, while training goes on.

Owns which part of a record on NVMe goes to which file, and the reads that are ahead. It knows of the engine what
:class:`offload.shards.held.Held` holds of it, and nothing else: it runs in another thread. Next:
:mod:`offload.background`.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterator

from offload.checkpoint.columns import Span
from offload.checkpoint.format.staging import Staging
from offload.checkpoint.layout import Files, Layout, key_of
from offload.memory.transfer import Ticket
from offload.planning.units import Unit
from offload.shards.held import Held, Key
from offload.sizes import whole_pages

READS_AHEAD = 3  # buffers that are being filled while one is used


@dataclasses.dataclass(frozen=True, slots=True)
class _Part:
    """Bytes [begin, end) of a record, which are the next ones of a tensor in a file."""

    begin: int
    end: int
    label: str
    key: str


@dataclasses.dataclass(frozen=True, slots=True)
class _Piece:
    """What is read at once: `size_bytes` of a record from `offset` on, and what of it goes to a file."""

    record: Key
    offset: int
    size_bytes: int
    file: int
    parts: list[_Part]


def copy_held(held: Held, layout: Layout, files: Files, staging: Staging) -> None:
    """Write all that `layout` has of what is held.

    Args:
        held: the content.
        layout: of the files.
        files: the same, under way.
        staging: buffers, :data:`READS_AHEAD` and one more than the columns need.

    Raises:
        swap.SwapError: an I/O error.
    """
    reading: deque[tuple[_Piece, int, Ticket]] = deque()

    def use_first() -> None:
        piece, address, ticket = reading[0]
        ticket.wait(None)
        for part in piece.parts:
            begin, end = max(part.begin, piece.offset), min(part.end, piece.offset + piece.size_bytes)
            files.append(piece.file, part.label, part.key, address + begin - piece.offset, end - begin)
        staging.give(address)
        reading.popleft()

    try:
        for piece in _pieces(held, layout, staging.size_bytes):
            address = staging.take()
            reading.append((piece, address, held.read(piece.record, piece.offset, address, piece.size_bytes)))
            if len(reading) > READS_AHEAD:
                use_first()
        while reading:
            use_first()
        files.end()
    except BaseException:
        for _, address, ticket in reading:  # the memory is the drive's until they are over
            staging.give(address, [ticket])
        raise


def _pieces(held: Held, layout: Layout, most_bytes: int) -> Iterator[_Piece]:
    """Yield what is to be read, in the order of the files; a chunk that two files have a part of comes twice."""
    for span in layout.spans:
        unit = layout.columns.units[span.unit]
        for number, (begin, end) in enumerate(held.chunks(unit)):
            if begin < span.end and end > span.begin:
                yield from _pieces_of(held, layout, unit, span, number, (begin, end), most_bytes)


def _pieces_of(
    held: Held, layout: Layout, unit: Unit, span: Span, number: int, chunk: tuple[int, int], most_bytes: int
) -> Iterator[_Piece]:
    for key, offsets, size in held.records(unit, number, *chunk):
        parts = []
        for column in layout.columns.of[unit.index]:
            for _, slot, start, stop in span.overlaps(unit, *chunk) if column.role in offsets else ():
                first = offsets[column.role] + column.size_bytes(start - chunk[0])
                parts.append(_Part(first, first + column.size_bytes(stop - start), column.label, key_of(column, slot)))
        parts.sort(key=lambda part: part.begin)
        stored = whole_pages(size)
        for offset in range(0, stored, most_bytes):
            last = min(offset + most_bytes, stored)
            inside = [part for part in parts if part.begin < last and part.end > offset]
            if inside:
                yield _Piece(key, offset, last - offset, span.file, inside)
