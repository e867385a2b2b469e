"""The space of a store: which ranges of its files hold which version, and which are free.

Owns: one extent allocator per file, and how an object is spread over files.
Must not know: what the bytes mean, files as the operating system sees them, I/O.
Next: `extents` within one file; `objects` asks here where a new version goes.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from swap.space.extents import Extent, ExtentAllocator


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a version: an extent of the file with this index."""

    file: int
    extent: Extent


STRIPE_BYTES: Final = 1 << 20
"""Least part of an object on one of several files: below that a second device costs more than it gives."""


def check_weights(weights: Sequence[float], paths: int) -> None:
    """Refuse weights that are not one positive number per path.

    Raises:
        ValueError: they are not.
    """
    if len(weights) != paths or not all(math.isfinite(weight) and weight > 0 for weight in weights):
        raise ValueError(f"weights: expected {paths} positive numbers, one per path, but got {list(weights)}")


class Space:
    """Extents over several files. Not thread-safe.

    Objects of at least two stripes lie on all files at once, in proportion to the weights, so that one transfer keeps
    every device busy. A smaller object lies on the file that is farthest behind its share of the used bytes. What does
    not fit where it should go goes where there is room.

    Attributes:
        alignment: of every piece, bytes.
        allocators: one per file, in the order of the paths.
        capacity_bytes: of all files together.
        peak_used_bytes: the most that was ever allocated.
    """

    def __init__(self, capacities: Sequence[int], alignment: int, weights: Sequence[float] | None = None) -> None:
        """Manage files of `capacities` bytes, multiples of `alignment`, all of them free.

        Args:
            capacities: one per file.
            alignment: of extents, bytes.
            weights: share of every file, usually its device's bandwidth; None for equal ones.
        """
        self.allocators = tuple(ExtentAllocator(capacity, alignment) for capacity in capacities)
        self.capacity_bytes = sum(capacities)
        self.peak_used_bytes = 0
        self.alignment = alignment
        given = [1.0] * len(capacities) if weights is None else list(weights)
        self._shares = [weight / sum(given) for weight in given]

    @property
    def free_bytes(self) -> int:
        """Bytes in free extents."""
        return sum(allocator.free_bytes for allocator in self.allocators)

    @property
    def used_bytes(self) -> int:
        """Bytes in allocated extents."""
        return self.capacity_bytes - self.free_bytes

    def allocate(self, need: int) -> tuple[Piece, ...]:
        """Take `need` bytes, a multiple of the alignment; () when there is no room.

        A file gives one piece where it has a free range that is long enough, else several: what fits by the sum of
        bytes fits.
        """
        if self.free_bytes < need:
            return ()
        pieces = [piece for file, length in enumerate(self._divide(need)) for piece in self._allocate_in(file, length)]
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return tuple(pieces)

    def occupy(self, pieces: Iterable[Piece]) -> None:
        """Take exactly these pieces; everything must be free now.

        Raises:
            ValueError: one is in no file, misaligned, outside its file, or overlaps another.
        """
        extents: list[list[Extent]] = [[] for _ in self.allocators]
        for piece in pieces:
            if not 0 <= piece.file < len(extents):
                raise ValueError(f"occupy: {piece} is in none of {len(extents)} files")
            extents[piece.file].append(piece.extent)
        for allocator, taken in zip(self.allocators, extents, strict=True):
            allocator.occupy(taken)
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)

    def grow(self, capacities: Sequence[int]) -> None:
        """Manage longer files: `capacities` as they are now.

        Raises:
            ValueError: one is shorter than it was, or not aligned.
        """
        for allocator, capacity in zip(self.allocators, capacities, strict=True):
            allocator.grow(capacity)
        self.capacity_bytes = sum(capacities)

    def free(self, pieces: Sequence[Piece]) -> None:
        """Give pieces back.

        Raises:
            ValueError: one of them is not allocated.
        """
        for piece in pieces:
            self.allocators[piece.file].free(piece.extent)

    def _divide(self, need: int) -> list[int]:
        """Bytes of an object per file."""
        if len(self.allocators) == 1:
            return [need]
        files = range(len(self.allocators))
        free = [allocator.free_bytes for allocator in self.allocators]
        lengths = [0] * len(free)
        if need >= 2 * STRIPE_BYTES:
            for file in files:
                length = int(need * self._shares[file]) // self.alignment * self.alignment
                lengths[file] = min(length, free[file]) if length >= STRIPE_BYTES else 0
        total = self.used_bytes + need
        missing = need - sum(lengths)

        def preference(file: int) -> tuple[bool, bool, float]:
            # A small object is one piece if that is possible at all; the rest of a large one joins another part.
            fits = self.allocators[file].largest_free - lengths[file] >= missing
            behind = total * self._shares[file] - self.allocators[file].used_bytes - lengths[file]
            return fits, lengths[file] > 0, behind

        for file in sorted(files, key=preference, reverse=True):
            extra = min(missing, free[file] - lengths[file])
            lengths[file] += extra
            missing -= extra
        return lengths

    def _allocate_in(self, file: int, length: int) -> Iterator[Piece]:
        allocator = self.allocators[file]
        while length:
            part = min(length, allocator.largest_free)
            yield Piece(file, allocator.allocate(part))
            length -= part
