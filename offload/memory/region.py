"""The placement of buffers of different sizes and owners inside one buffer, and the search for what must leave.

Owns offsets. Knows owners by number; must not know what they are. Next: :mod:`offload.shards.working_set` and
:mod:`offload.shards.gradients` decide who leaves.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection

from offload.memory.arena import Buffer
from offload.sizes import PAGE_BYTES, round_up


class Region:
    """Places variable-sized buffers of different owners into one buffer; evicts by windows.

    Small blocks are placed from the low end and large ones (a quarter of the region and more) from the high end, so
    that a large embedding and a stream of blocks do not cut each other's room into pieces.
    Invariant: blocks are disjoint, sorted by offset, inside the region.

    Attributes:
        size_bytes: present size, at most the buffer's.
        used_bytes: handed out now.
        layout: a number that is the same where the same owners have the same blocks, in a region of the same size.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size_bytes = buffer.size_bytes
        self.used_bytes = 0
        self.layout = hash(buffer.size_bytes)
        self._blocks: list[tuple[int, int, int]] = []  # offset, size, owner
        self._block_of: dict[int, tuple[int, int, int]] = {}  # the same by owner

    @property
    def whole(self) -> Buffer:
        """All of the region as one buffer."""
        return self._part(0, self.size_bytes)

    def move(self, by_bytes: int) -> None:
        """Note that the memory is elsewhere. Nothing may be in it."""
        assert not self._blocks
        self._buffer = self._buffer.moved(by_bytes)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the buffer it lies in."""
        return self._buffer.size_bytes

    @property
    def end_bytes(self) -> int:
        """End of the last block."""
        return self._blocks[-1][0] + self._blocks[-1][1] if self._blocks else 0

    def owners_beyond(self, offset_bytes: int) -> list[int]:
        """Return the owners of blocks that reach beyond `offset_bytes`, the last one first."""
        return [owner for offset, size, owner in reversed(self._blocks) if offset + size > offset_bytes]

    def resize(self, size_bytes: int) -> Buffer:
        """Let the region end at `size_bytes`; returns the part by which it has grown or shrunk."""
        assert self.end_bytes <= size_bytes <= self.largest_bytes, (self.end_bytes, size_bytes, self.largest_bytes)
        before, self.size_bytes = self.size_bytes, size_bytes
        self.layout ^= hash(before) ^ hash(size_bytes)
        return self._part(min(before, size_bytes), abs(size_bytes - before))

    def owners(self) -> list[int]:
        """Return the owners in address order."""
        return [owner for _, _, owner in self._blocks]

    def room_beside(self, owner: int) -> int:
        """Return the bytes in one piece that there would be if the block of `owner` were the only one."""
        offset, size, _ = self._block_of[owner]
        return max(offset, self.size_bytes - offset - size)

    def free_bytes_without(self, owners: Collection[int]) -> int:
        """Return the bytes that would be free, in however many pieces, if the blocks of `owners` were not there."""
        theirs = [self._block_of[owner][1] for owner in owners if owner in self._block_of]
        return self.size_bytes - self.used_bytes + sum(theirs)

    def allocate(self, size_bytes: int, owner: int) -> Buffer | None:
        """Return a buffer for `owner`, or None where no gap is large enough."""
        assert owner not in self._block_of, f"{owner} holds a buffer"
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        if size_bytes > self.size_bytes - self.used_bytes:
            return None
        gaps = [(start, end) for start, end in self._gaps() if end - start >= size_bytes]
        if not gaps:
            return None
        if size_bytes * 4 >= self.size_bytes:
            offset = gaps[-1][1] - size_bytes
        else:
            offset = gaps[0][0]
        self._block_of[owner] = block = offset, size_bytes, owner
        bisect.insort(self._blocks, block)
        self.used_bytes += size_bytes
        self.layout ^= hash(block)
        return self._part(offset, size_bytes)

    def free(self, owner: int) -> None:
        """Take back the buffer of `owner`."""
        assert owner in self._block_of, f"{owner} holds no buffer"
        block = self._block_of.pop(owner)
        self._blocks.remove(block)
        self.used_bytes -= block[1]
        self.layout ^= hash(block)

    def hand_over(self, owner: int, heir: int) -> None:
        """Let the buffer of `owner` belong to `heir` from now on."""
        assert heir not in self._block_of, heir
        offset, size, _ = block = self._block_of.pop(owner)
        self._block_of[heir] = self._blocks[self._blocks.index(block)] = inherited = offset, size, heir
        self.layout ^= hash(block) ^ hash(inherited)

    def pack(self, movable: Callable[[int], bool]) -> list[tuple[int, Buffer, Buffer]]:
        """Move blocks to the low end, in address order, so that the gaps become one as far as possible.

        Args:
            movable: whether an owner's block may be moved.

        Returns:
            (owner, old buffer, new buffer) of what moves, in the order in which the bytes must be moved (the two may
            overlap).
        """
        moves, blocks, end = [], [], 0
        for offset, size, owner in self._blocks:
            if offset > end and movable(owner):
                moves.append((owner, self._part(offset, size), self._part(end, size)))
                offset = end
            blocks.append((offset, size, owner))
            end = offset + size
        for block in (*self._blocks, *blocks):
            self.layout ^= hash(block)
        self._blocks = blocks
        self._block_of = {block[2]: block for block in blocks}
        return moves

    def _part(self, offset: int, size: int) -> Buffer:
        return Buffer(self._buffer.tier, self._buffer.address + offset, self._buffer.offset_bytes + offset, size)

    def cheapest_window(self, size_bytes: int, cost: Callable[[int], float | None]) -> list[int] | None:
        """Return the owners to evict so that `size_bytes` fit in one piece, at the least highest cost.

        Args:
            size_bytes: what must fit.
            cost: cost of evicting an owner; None where it must stay.
        """
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        costs = [cost(owner) for _, _, owner in self._blocks]
        able = [value for value in costs if value is not None]
        if not able:
            return None
        cheapest = costs.index(min(able))
        if self._room_at(cheapest, cheapest) >= size_bytes:  # no window costs less
            return [self._blocks[cheapest][2]]
        best: tuple[float, int, list[int]] | None = None
        for first in range(len(self._blocks)):
            if costs[first] is None:
                continue
            highest = float("-inf")
            for last in range(first, len(self._blocks)):
                value = costs[last]
                if value is None:
                    break
                highest = max(highest, value)
                if self._room_at(first, last) >= size_bytes:
                    if best is None or (highest, last - first) < best[:2]:
                        best = (highest, last - first, [b[2] for b in self._blocks[first : last + 1]])
                    break
        return None if best is None else best[2]

    def _room_at(self, first: int, last: int) -> int:
        """Return the bytes in one piece that there would be without the blocks from number `first` to `last`."""
        blocks = self._blocks
        start = blocks[first - 1][0] + blocks[first - 1][1] if first else 0
        return (blocks[last + 1][0] if last + 1 < len(blocks) else self.size_bytes) - start

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, end = [], 0
        for offset, size, _ in self._blocks:
            if offset > end:
                gaps.append((end, offset))
            end = offset + size
        if end < self.size_bytes:
            gaps.append((end, self.size_bytes))
        return gaps
