"""Writes one file of a checkpoint from several places at once, in whole pages and past the page cache.

A file has a region per role, one behind the other, and each region grows from its beginning. So a buffer per region is
enough: what has filled it is written while the next one fills. Owns that, and the checksums of what is written. Next:
:mod:`offload.checkpoint.saving` says what goes where.
"""

from __future__ import annotations

import ctypes
import dataclasses
import errno
import functools
import os
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from offload.checkpoint.format.index import StoredFile
from offload.checkpoint.format.safetensors import Member, make_header
from offload.checkpoint.format.staging import Checksums, OpenFile, Staging
from offload.sizes import PAGE_BYTES, format_bytes
from swap import SwapError, SwapFullError
from swap.io.aio import preallocate


class FileWriter:
    """One safetensors file under way.

    Attributes:
        sums: per key, the checksums of what has been written.
    """

    def __init__(self, path: Path, regions: Mapping[str, Sequence[Member]], staging: Staging) -> None:
        """Make the file, with room for all of it.

        Args:
            path: where.
            regions: by name, the tensors that are written one behind the other.
            staging: buffers, one per region and some more.

        Raises:
            swap.SwapFullError: no room.
        """
        members = [member for region in regions.values() for member in region]
        header, placed, size_bytes = make_header(members)
        self.stored = StoredFile(size_bytes, zlib.crc32(header))
        self.sums = {member.key: Checksums() for member in members}
        self._staging = staging
        self._closed = False
        self._file = OpenFile(path, staging.aio, write=True)
        try:
            self._reserve(size_bytes)
            self._write(header)
        except BaseException:
            self._file.close()
            raise
        self._regions: dict[str, _Region] = {}
        begin = len(header)
        for name, region in regions.items():
            size = sum(member.size_bytes for member in region)
            self._regions[name] = _Region(begin)
            begin += size
        assert [member.key for member in placed] == list(self.sums), "a key stands twice in a file"

    def append(self, region: str, key: str, address: int, size_bytes: int) -> None:
        """Write the next bytes of a region, which are those of the tensor `key`; they are copied before this returns.

        Raises:
            swap.SwapError: something before could not be written.
        """
        place, staging = self._regions[region], self._staging
        while size_bytes:
            if not place.address:
                place.address = staging.take()
            used = place.end - place.base
            part = min(size_bytes, staging.size_bytes - used)
            ctypes.memmove(place.address + used, address, part)
            place.segments.append((self.sums[key], place.address + used, part))
            place.end, address, size_bytes = place.end + part, address + part, size_bytes - part
            if used + part == staging.size_bytes:
                self._flush(place)

    def write_rest(self) -> None:
        """Write what is left, and wait until the file system has all of it.

        Raises:
            swap.SwapError: something could not be written.
        """
        for place in self._regions.values():
            if place.address:
                self._flush(place)
        self._staging.land()

    def finish(self) -> None:
        """Write what is left, wait until all of it is on the drive, and close the file.

        Raises:
            swap.SwapError: something could not be written or flushed.
        """
        self.write_rest()
        try:
            self._file.sync()
        except OSError as error:
            raise self._failed(error, "flushed") from error
        self.close()

    def close(self) -> None:
        """Close the file, whatever is in it. Idempotent; nothing may be in flight."""
        if not self._closed:
            self._closed = True
            self._staging.close_file(self._file)

    def _flush(self, place: _Region) -> None:
        """Write the buffer of a region; whole pages pass by the page cache, its two ends do not."""
        staging, file = self._staging, self._file
        address, base, first, last = place.address, place.base, place.begin, place.end
        inner = -(-first // PAGE_BYTES) * PAGE_BYTES, last // PAGE_BYTES * PAGE_BYTES
        if not file.direct:
            inner = first, last
        tickets = []
        if inner[0] < inner[1]:
            start = address + inner[0] - base
            size = inner[1] - inner[0]
            tickets.append(staging.aio.write(file.direct_fd, inner[0], start, size, priority=staging.priority))
        work = staging.in_turn(functools.partial(_take_sums, place.segments))
        place.segments, place.address = [], 0
        place.base = place.begin = last
        staging.give(address, tickets, work)
        ends = [(first, min(inner[0], last)), (max(inner[1], first), last)] if inner[0] <= inner[1] else [(first, last)]
        try:
            for begin, end in ends:
                if begin < end:
                    file.write_part(address + begin - base, end - begin, begin)
        except OSError as error:
            raise self._failed(error, "written") from error

    def _reserve(self, size_bytes: int) -> None:
        code = preallocate(self._file.fd, size_bytes)
        if code in (errno.EOPNOTSUPP, errno.ENOSYS):
            os.ftruncate(self._file.fd, size_bytes)
        elif code:
            raise self._failed(OSError(code, os.strerror(code)), f"given its {format_bytes(size_bytes)}")

    def _write(self, header: bytes) -> None:
        try:
            buffer = ctypes.create_string_buffer(header, len(header))
            self._file.write_part(ctypes.addressof(buffer), len(header), 0)
        except OSError as error:
            raise self._failed(error, "written") from error

    def _failed(self, error: OSError, verb: str) -> OSError:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        return (SwapFullError if full else SwapError)(
            f"checkpoint file {self._file.path}: cannot be {verb}",
            errno=error.errno,
            path=str(self._file.path),
            remedy="free space, keep fewer checkpoints, or name a directory on another drive" if full else "",
        )


@dataclasses.dataclass(slots=True)
class _Region:
    """The part of a file that is written next in one region: [begin, end) of it is in the buffer.

    Attributes:
        begin, end: offsets in the file.
        base: offset in the file that the buffer begins at, a whole page.
        address: of the buffer, 0 where there is none.
        segments: what of the buffer is of which tensor.
    """

    begin: int
    end: int = 0
    base: int = 0
    address: int = 0
    segments: list[tuple[Checksums, int, int]] = dataclasses.field(default_factory=list)

    def __post_init__(self) -> None:
        self.end, self.base = self.begin, self.begin // PAGE_BYTES * PAGE_BYTES


def _take_sums(segments: Sequence[tuple[Checksums, int, int]]) -> None:
    for sums, address, size_bytes in segments:
        sums.update(address, size_bytes)
