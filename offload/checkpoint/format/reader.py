"""Reads what the files of a checkpoint hold, ahead of whoever takes it, and compares every byte with its checksum.

Owns the order of reads and the words in which a damaged file is refused. Knows neither torch nor tensors. Next:
:mod:`offload.checkpoint.restoring` says what is read.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import zlib
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path

from offload.checkpoint.format.index import BLOCK_BYTES, DamagedError, Entry, Index, Range
from offload.checkpoint.format.safetensors import ITEMSIZES, HeaderError, Member, read_header
from offload.checkpoint.format.staging import OpenFile, Staging
from offload.errors import CheckpointError
from offload.sizes import PAGE_BYTES, round_up
from swap import Ticket

OPEN_FILES = 32  # more than buffers, each of which may be of another file


class DamagedTensorError(DamagedError):
    """Bytes of a tensor are not those that were written.

    Attributes:
        entry: the tensor.
    """

    def __init__(self, entry: Entry, text: str) -> None:
        super().__init__(text)
        self.entry = entry


@dataclasses.dataclass(slots=True)
class Stretch:
    """Bytes of a range that are read together: they follow those of the range's stretch before.

    Attributes:
        sums: of the range.
        offset: in the file.
        size_bytes: of them.
        skip_bytes, drop_bytes: the first and the last of them, which are compared only.
    """

    sums: RangeSums
    offset: int
    size_bytes: int
    skip_bytes: int = 0
    drop_bytes: int = 0

    @property
    def wanted(self) -> tuple[int, int]:
        """Where in the file the others are."""
        return self.offset + self.skip_bytes, self.offset + self.size_bytes - self.drop_bytes

    def cut(self, begin: int, end: int) -> Stretch:
        """Return the bytes [begin, end) of the file."""
        first, last = (min(max(at, begin), end) for at in self.wanted)
        return Stretch(self.sums, begin, end - begin, first - begin, end - last)


class RangeSums:
    """A range whose bytes are compared with their checksums, one behind the other.

    Attributes:
        path: of the file.
    """

    def __init__(self, entry: Entry, part: Range, path: Path, member: Member, block: int = 0) -> None:
        """Begin with a block of the range, which its bytes come from on."""
        self.path = path
        self._entry = entry
        self._part = part
        self._member = member
        self._taken = block * BLOCK_BYTES
        self._crc = 0

    def update(self, address: int, size_bytes: int) -> None:
        """Compare the next bytes.

        Raises:
            CheckpointError: the block that ends here has others than were written.
        """
        while size_bytes:
            left = min(BLOCK_BYTES - self._taken % BLOCK_BYTES, self._member.size_bytes - self._taken)
            size = min(size_bytes, left)
            self._crc = zlib.crc32((ctypes.c_char * size).from_address(address), self._crc)
            self._taken, address, size_bytes = self._taken + size, address + size, size_bytes - size
            if size == left:
                self._end_block()

    def _end_block(self) -> None:
        number, actual = (self._taken - 1) // BLOCK_BYTES, self._crc
        self._crc = 0
        expected = self._part.checksums[number]
        if actual != expected:
            itemsize = ITEMSIZES[self._member.dtype]
            begin, end = number * BLOCK_BYTES, self._taken
            raise DamagedTensorError(
                self._entry,
                f"checkpoint file {self.path}: is damaged: {self._entry.role} of {self._entry.name}, elements "
                f"[{self._part.begin + begin // itemsize}, {self._part.begin + end // itemsize}), bytes "
                f"[{self._member.offset + begin}, {self._member.offset + end}) of the file: expected checksum "
                f"{expected:#010x} but got {actual:#010x}; load another checkpoint",
            )


class Source:
    """The files of one checkpoint, as its index says they are."""

    def __init__(self, folder: Path, index: Index) -> None:
        """Look at every file: its size, and what it says it holds.

        Raises:
            DamagedError: one is missing, cut off, or another one.
            CheckpointError: one cannot be read.
        """
        self._folder = folder
        self._members: dict[str, dict[str, Member]] = {}
        for name, stored in index.files.items():
            path = folder / name
            try:
                size_bytes = path.stat().st_size
                header, members = read_header(path)
            except HeaderError as error:
                raise DamagedError(f"checkpoint file {path}: is damaged: {error}; load another checkpoint") from None
            except FileNotFoundError:
                raise DamagedError(f"checkpoint file {path}: is missing; load another checkpoint") from None
            except OSError as error:
                raise CheckpointError(f"checkpoint file {path}: cannot be read: {error.strerror or error}") from error
            if zlib.crc32(header) != stored.header_checksum:
                raise DamagedError(
                    f"checkpoint file {path}: is damaged, or another one: its header, {len(header)} bytes, is not the "
                    "one that was written; put the right file there, or load another checkpoint"
                )
            if size_bytes != stored.size_bytes:
                raise DamagedError(
                    f"checkpoint file {path}: expected {stored.size_bytes} bytes but got {size_bytes}; load another "
                    "checkpoint"
                )
            self._members[name] = members

    def range_sums(self, entry: Entry, part: Range, block: int = 0) -> tuple[RangeSums, Member]:
        """Return what compares a range from one of its blocks on, and where all of it is in its file."""
        member = self._members[part.file][part.key]
        return RangeSums(entry, part, self._folder / part.file, member, block), member

    def stretches(self, entries: Iterable[Entry]) -> Iterator[Stretch]:
        """Yield all bytes of tensors, in order."""
        for entry in entries:
            for part in entry.ranges:
                sums, member = self.range_sums(entry, part)
                yield Stretch(sums, member.offset, member.size_bytes)

    def stretches_of(self, entry: Entry, begin: int, end: int) -> Iterator[Stretch]:
        """Yield the bytes of a tensor's elements [begin, end): whole blocks are read, for they are compared."""
        itemsize = ITEMSIZES[entry.dtype]
        for part in entry.ranges:
            first = (max(part.begin, begin) - part.begin) * itemsize
            last = (min(part.end, end) - part.begin) * itemsize
            if first < last:
                block = first // BLOCK_BYTES
                sums, member = self.range_sums(entry, part, block)
                start, stop = block * BLOCK_BYTES, min(round_up(last, BLOCK_BYTES), member.size_bytes)
                yield Stretch(sums, member.offset + start, stop - start, first - start, stop - last)


@dataclasses.dataclass(slots=True)
class _Piece:
    """A buffer's worth of a file, on its way or here.

    Attributes:
        file: of it.
        begin, end: what of the file is read.
        stretches: what that is.
        address: of the buffer.
        wanted: what of the file has not been taken, the first first.
        tickets: of reads.
        ready: over when it is here and compared.
    """

    file: OpenFile
    begin: int
    end: int
    stretches: list[Stretch]
    address: int = 0
    wanted: deque[tuple[int, int]] = dataclasses.field(default_factory=deque)
    tickets: list[Ticket] = dataclasses.field(default_factory=list)
    ready: Future[None] | None = None

    def take(self, most_bytes: int) -> tuple[int, int]:
        """Return address and size of what is taken next."""
        begin, end = self.wanted.popleft()
        size = min(most_bytes, end - begin)
        if begin + size < end:
            self.wanted.appendleft((begin + size, end))
        return self.address + begin - self.begin // PAGE_BYTES * PAGE_BYTES, size


@dataclasses.dataclass(slots=True)
class _Lane:
    """One sequence of bytes: what of it is on its way or here, and what comes next."""

    pieces: Iterator[_Piece]
    room: int
    coming: deque[_Piece] = dataclasses.field(default_factory=deque)


class Reader:
    """Sequences of bytes, each made of stretches and read ahead on its own; a context manager."""

    def __init__(
        self, lanes: Mapping[str, Iterable[Stretch]], staging: Staging, widths: Mapping[str, int] | None = None
    ) -> None:
        """Start to read.

        Args:
            lanes: by name, what each sequence consists of.
            staging: for this reader alone, with a buffer per lane at least.
            widths: bytes of each lane that are taken for so many of another one, which is read as far ahead then.
        """
        self._staging = staging
        self._files: OrderedDict[Path, OpenFile] = OrderedDict()
        spare, total = staging.count - len(lanes), sum(widths[name] for name in lanes) if widths else len(lanes)
        self._lanes = {
            name: _Lane(self._cut(iter(stretches)), 1 + spare * (widths[name] if widths else 1) // total)
            for name, stretches in lanes.items()
        }
        for lane in self._lanes.values():
            self._fill(lane)

    def take(self, name: str, address: int, size_bytes: int) -> None:
        """Copy the next bytes of a lane to `address`; 0 lets them go by.

        Raises:
            CheckpointError: they are not those that were written.
            swap.SwapError: they cannot be read.
        """
        lane = self._lanes[name]
        while size_bytes:
            self._pass_by(lane)
            piece = lane.coming[0]
            assert piece.ready is not None
            piece.ready.result()
            source, size = piece.take(size_bytes)
            if address:
                ctypes.memmove(address, source, size)
                address += size
            size_bytes -= size
        self._pass_by(lane)

    def _pass_by(self, lane: _Lane) -> None:
        """Give back the buffers of which nothing is wanted any more, once they are compared."""
        while lane.coming and not lane.coming[0].wanted:
            piece = lane.coming[0]
            assert piece.ready is not None
            piece.ready.result()
            lane.coming.popleft()
            self._staging.give(piece.address)
            lane.room += 1
            self._fill(lane)

    def __enter__(self) -> Reader:
        return self

    def __exit__(self, *error: object) -> None:
        for piece in (piece for lane in self._lanes.values() for piece in lane.coming):
            assert piece.ready is not None
            with contextlib.suppress(Exception):  # nobody wants it any more
                piece.ready.result()
            self._staging.give(piece.address, piece.tickets)
        self._staging.settle()
        for file in self._files.values():
            self._staging.close_file(file)

    def _cut(self, stretches: Iterator[Stretch]) -> Iterator[_Piece]:
        """Join stretches that follow each other in a file, and cut them to the size of a buffer."""
        limit = self._staging.size_bytes - 2 * PAGE_BYTES  # reads begin and end on a page
        current: _Piece | None = None
        for stretch in stretches:
            offset, left = stretch.offset, stretch.size_bytes
            while left:
                joins = current is not None and current.file.path == stretch.sums.path and current.end == offset
                if current is not None and (not joins or current.end - current.begin == limit):
                    yield current
                    current = None
                if current is None:
                    current = _Piece(self._open(stretch.sums.path), offset, offset, [])
                size = min(left, limit - (current.end - current.begin))
                part = stretch.cut(offset, offset + size)
                current.stretches.append(part)
                if part.wanted[0] < part.wanted[1]:
                    current.wanted.append(part.wanted)
                current.end, offset, left = offset + size, offset + size, left - size
        if current is not None:
            yield current

    def _open(self, path: Path) -> OpenFile:
        """Return a file; few are open at a time, and what is in flight is of the latest ones."""
        file = self._files.pop(path, None) or OpenFile(path, self._staging.aio, write=False)
        self._files[path] = file
        while len(self._files) > OPEN_FILES:
            self._staging.close_file(self._files.pop(next(iter(self._files))))
        return file

    def _fill(self, lane: _Lane) -> None:
        while lane.room:
            piece = next(lane.pieces, None)
            if piece is None:
                return
            lane.room -= 1
            piece.address = self._staging.take()
            lane.coming.append(piece)
            self._start(piece)

    def _start(self, piece: _Piece) -> None:
        file, base = piece.file, piece.begin // PAGE_BYTES * PAGE_BYTES
        end = round_up(piece.end, PAGE_BYTES) if file.direct else piece.end
        whole = min(end, file.size_bytes // PAGE_BYTES * PAGE_BYTES) if file.direct else end
        failure: Exception | None = None
        try:
            if whole > base:
                piece.tickets.append(self._staging.aio.read(file.direct_fd, base, piece.address, whole - base))
            if piece.end > whole:  # behind the last whole page
                begin = max(whole, base)
                data = os.pread(file.fd, piece.end - begin, begin)
                ctypes.memmove(piece.address + begin - base, data, len(data))
        except Exception as error:
            failure = error
        piece.ready = self._staging.in_turn(lambda: _compare(piece, base, failure))


def _compare(piece: _Piece, base: int, failure: Exception | None) -> None:
    for ticket in piece.tickets:
        ticket.wait(None)
    if failure is not None:
        raise failure
    for stretch in piece.stretches:
        stretch.sums.update(piece.address + stretch.offset - base, stretch.size_bytes)
