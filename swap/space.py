"""The space of a store: which ranges of its files hold which version, and which are free.

Owns: one extent allocator per file and the choice of the file.
Must not know: what the bytes mean, files as the operating system sees them, I/O.
Next: `extents` within one file; `store` asks here where a new version goes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from swap.extents import Extent, ExtentAllocator


@dataclass(frozen=True, slots=True)
class Piece:
    """Part of a version: an extent of the file with this index."""

    file: int
    extent: Extent


class Space:
    """Extents over several files. Not thread-safe.

    Attributes:
        allocators: one per file, in the order of the paths.
        capacity_bytes: of all files together.
        peak_used_bytes: the most that was ever allocated.
    """

    def __init__(self, capacities: Sequence[int], alignment: int) -> None:
        """Manage files of `capacities` bytes, multiples of `alignment`, all of them free."""
        self.allocators = tuple(ExtentAllocator(capacity, alignment) for capacity in capacities)
        self.capacity_bytes = sum(capacities)
        self.peak_used_bytes = 0

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

        The file with the largest free share goes first, so that files fill in proportion to their size; one piece
        is taken where a file has one that is long enough. A space whose free ranges are scattered answers with
        several pieces: what fits by the sum of bytes fits.
        """
        if self.free_bytes < need:
            return ()
        by_share = sorted(range(len(self.allocators)), key=self._free_share, reverse=True)
        pieces: list[Piece] = []
        whole = next((file for file in by_share if self.allocators[file].largest_free >= need), None)
        if whole is not None:
            pieces.append(Piece(whole, self.allocators[whole].allocate(need)))
        missing = 0 if whole is not None else need
        while missing:
            file = max(by_share, key=lambda f: self.allocators[f].largest_free)
            length = min(missing, self.allocators[file].largest_free)
            pieces.append(Piece(file, self.allocators[file].allocate(length)))
            missing -= length
        self.peak_used_bytes = max(self.peak_used_bytes, self.used_bytes)
        return tuple(pieces)

    def free(self, pieces: Sequence[Piece]) -> None:
        """Give pieces back.

        Raises:
            ValueError: one of them is not allocated.
        """
        for piece in pieces:
            self.allocators[piece.file].free(piece.extent)

    def _free_share(self, file: int) -> float:
        allocator = self.allocators[file]
        return allocator.free_bytes / max(allocator.capacity, 1)
