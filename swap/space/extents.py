"""Which ranges of a fixed space are free: a pure-Python extent allocator.

Owns: the free ranges of one file. Every byte is free or in exactly one allocated extent; neighbours that are
both free are one range.
Must not know: files, I/O, what an extent is for.
Next: `allocation` keeps one allocator per file.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable
from dataclasses import dataclass

from swap.errors import SwapFullError, format_bytes


@dataclass(frozen=True, slots=True, order=True)
class Extent:
    """A range of a file.

    Attributes:
        offset: first byte, a multiple of the alignment.
        length: bytes, a multiple of the alignment, more than 0.
    """

    offset: int
    length: int

    @property
    def end(self) -> int:
        """First byte after the range."""
        return self.offset + self.length


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is not below `value`."""
    return -(-value // multiple) * multiple


class ExtentAllocator:
    """Aligned extents out of `capacity` bytes: best fit, coalescing, O(log n) search.

    Not thread-safe. Lengths are rounded up to the alignment, so an extent may be longer than asked.

    Attributes:
        alignment: of every offset and length, bytes.
    """

    def __init__(self, capacity: int, alignment: int = 4096) -> None:
        """Manage the range from 0 to `capacity`, a multiple of `alignment`, in bytes.

        Raises:
            ValueError: impossible numbers.
        """
        if alignment < 1:
            raise ValueError(f"alignment: expected at least 1 byte but got {alignment}")
        if capacity < 0 or capacity % alignment:
            raise ValueError(f"capacity: expected a multiple of {alignment} bytes but got {capacity}")
        self.alignment = alignment
        self._capacity = capacity
        self._free_bytes = capacity
        self._lengths: dict[int, int] = {}  # free range: offset to length
        self._offsets: list[int] = []  # the same offsets, sorted
        self._by_length: list[tuple[int, int]] = []  # (length, offset), sorted
        self._allocated: dict[int, int] = {}  # allocated extent: offset to length
        if capacity:
            self._add_free(0, capacity)

    @property
    def capacity(self) -> int:
        """Size of the managed space in bytes."""
        return self._capacity

    @property
    def free_bytes(self) -> int:
        """Bytes in free ranges."""
        return self._free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated extents."""
        return self._capacity - self._free_bytes

    @property
    def largest_free(self) -> int:
        """Length of the longest free range in bytes, 0 when there is none."""
        return self._by_length[-1][0] if self._by_length else 0

    def allocate(self, length: int) -> Extent:
        """Take a contiguous extent of at least `length` bytes from the smallest free range that holds it.

        Raises:
            ValueError: length is not positive.
            SwapFullError: no free range is long enough; nothing is taken.
        """
        if length <= 0:
            raise ValueError(f"length: expected more than 0 bytes but got {length}")
        need = round_up(length, self.alignment)
        at = bisect_left(self._by_length, (need, -1))
        if at == len(self._by_length):
            raise SwapFullError(
                f"extents: {format_bytes(need)} needed in one piece but the longest free range is "
                f"{format_bytes(self.largest_free)} ({self._free_bytes} of {self._capacity} bytes free)",
                length_bytes=need,
            )
        have, offset = self._by_length[at]
        self._remove_free(offset)
        if have > need:
            self._add_free(offset + need, have - need)
        self._allocated[offset] = need
        self._free_bytes -= need
        return Extent(offset, need)

    def occupy(self, extents: Iterable[Extent]) -> None:
        """Take exactly these extents; everything must be free now.

        Raises:
            ValueError: one is misaligned, empty, outside the space, or overlaps another; nothing is taken.
        """
        assert not self._allocated, "occupy: something is allocated already"
        taken = sorted(extents)
        at = 0
        for extent in taken:
            aligned = extent.offset % self.alignment == 0 and extent.length % self.alignment == 0
            if not aligned or extent.length <= 0 or extent.offset < at or extent.end > self._capacity:
                raise ValueError(f"occupy: {extent} is misaligned, outside {self._capacity} bytes, or overlaps another")
            at = extent.end
        self._lengths.clear()
        self._offsets.clear()
        self._by_length.clear()
        self._allocated = {extent.offset: extent.length for extent in taken}
        self._free_bytes = self._capacity - sum(self._allocated.values())
        at = 0
        for extent in [*taken, Extent(self._capacity, 0)]:
            if at < extent.offset:
                self._lengths[at] = extent.offset - at
            at = extent.end
        self._offsets = sorted(self._lengths)
        self._by_length = sorted((length, offset) for offset, length in self._lengths.items())

    def free(self, extent: Extent) -> None:
        """Give an extent back.

        Raises:
            ValueError: it is not allocated (freed twice, or never handed out); nothing changes.
        """
        if self._allocated.get(extent.offset) != extent.length:
            raise ValueError(f"free: {extent} is not allocated")
        del self._allocated[extent.offset]
        self._free_bytes += extent.length
        self._make_free(extent.offset, extent.length)

    def grow(self, capacity: int) -> None:
        """Manage the range up to `capacity`, a multiple of the alignment; what is new is free.

        Raises:
            ValueError: that is less than before, or no multiple.
        """
        if capacity < self._capacity or capacity % self.alignment:
            raise ValueError(f"capacity: expected at least {self._capacity} bytes, aligned, but got {capacity}")
        more, begin = capacity - self._capacity, self._capacity
        if more:
            self._capacity = capacity
            self._free_bytes += more
            self._make_free(begin, more)

    def free_ranges(self) -> list[Extent]:
        """All free ranges in order of their offset."""
        return [Extent(offset, self._lengths[offset]) for offset in self._offsets]

    def _make_free(self, offset: int, length: int) -> None:
        """Make a range free, joined with its free neighbours."""
        at = bisect_left(self._offsets, offset)
        if at < len(self._offsets) and self._offsets[at] == offset + length:
            after = self._offsets[at]
            length += self._lengths[after]
            self._remove_free(after)
        if at > 0 and self._offsets[at - 1] + self._lengths[self._offsets[at - 1]] == offset:
            before = self._offsets[at - 1]
            length += self._lengths[before]
            offset = before
            self._remove_free(before)
        self._add_free(offset, length)

    def _add_free(self, offset: int, length: int) -> None:
        self._lengths[offset] = length
        insort(self._offsets, offset)
        insort(self._by_length, (length, offset))

    def _remove_free(self, offset: int) -> None:
        length = self._lengths.pop(offset)
        del self._offsets[bisect_left(self._offsets, offset)]
        del self._by_length[bisect_left(self._by_length, (length, offset))]
