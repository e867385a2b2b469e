"""Checksums (CRC-32C) of swapped bytes, one per granule of an extent.

Owns: the typed face of the checksum kernels, the size of a granule, and which granules a partial read has to see.
Must not know: stores, engines. The engine's own workers sum what is written and compare what was read
(csrc/aio/checksums.h), so neither the thread that submits nor the I/O thread spends time on it.
Next: `aio` passes checksums on, `transfers` keeps them with the version.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from swap.io.extension import _aio

GRANULE_BYTES: Final = 256 << 10
"""Bytes per checksum. A read of a part of an object reads at most two granules more than was asked for."""

WORD_BYTES: Final = 4


def granule_for(alignment: int) -> int:
    """Bytes per checksum in files whose ranges are multiples of `alignment` bytes."""
    return max(GRANULE_BYTES, alignment)


def crc32c(data: bytes) -> int:
    """CRC-32C of `data`."""
    return _aio.crc32c_bytes(data, 0)


def crc32c_at(address: int, length: int, crc: int = 0, *, portable: bool = False) -> int:
    """CRC-32C of `length` bytes of memory, appended to bytes whose CRC-32C is `crc`.

    With `portable`, by the kernel for processors without the instruction.

    Raises:
        ValueError: a null pointer.
    """
    return _aio.crc32c(address, length, crc, portable)


def crc32c_kernel() -> str:
    """Name of the kernel that this processor runs: "sse4.2" or "portable"."""
    return _aio.crc32c_kernel()


@dataclass(frozen=True, slots=True)
class ReadPart:
    """A range to read in one go so that its checksums can be compared.

    Attributes:
        first: start of the range, a multiple of the granule.
        last: its end, a multiple of the granule or the end of the extent.
        wanted_first: start of the part that was asked for; all of it unless the part cuts a granule.
        wanted_last: its end.
    """

    first: int
    last: int
    wanted_first: int
    wanted_last: int

    @property
    def whole(self) -> bool:
        """Everything that is read was asked for, so it can be read into its place."""
        return (self.first, self.last) == (self.wanted_first, self.wanted_last)


def parts_of_read(first: int, last: int, length: int, granule: int) -> Iterator[ReadPart]:
    """Cut a read of [first, last) of an extent of `length` bytes so that every part has its own checksums.

    Granules that are wanted as a whole make one part; one that is cut, at either end, is a part of its own.
    """
    at = first
    while at < last:
        start = at // granule * granule
        granule_end = min(start + granule, length)
        if start == at and granule_end <= last:
            end = last if last == length else last // granule * granule
            yield ReadPart(at, end, at, end)
        else:
            end = min(granule_end, last)
            yield ReadPart(start, granule_end, at, end)
        at = end


def words(checksums: bytes, first: int, last: int, granule: int) -> bytes:
    """The checksums of the range [first, last) of a part, out of those of the whole extent."""
    return checksums[first // granule * WORD_BYTES : -(-last // granule) * WORD_BYTES]
