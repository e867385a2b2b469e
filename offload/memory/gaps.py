"""Room in one piece of memory for what comes and goes in any order, without owners.

Owns offsets. Next: :mod:`offload.activations.away` keeps activations there.
"""

from __future__ import annotations

import bisect


class Gaps:
    """Hands out ranges of `size_bytes`, the lowest that fits first.

    It knows free ranges alone: what leaves in the reverse of the order in which it came leaves few of them.
    Invariant: they are disjoint, sorted, do not touch, and are inside.

    Attributes:
        free_bytes: of all free ranges.
    """

    def __init__(self, size_bytes: int) -> None:
        self.free_bytes = size_bytes
        self._begins = [0] if size_bytes else []
        self._ends = [size_bytes] if size_bytes else []

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of `size_bytes` in one piece, or None where they do not fit."""
        for number, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if end - begin >= size_bytes:
                if end - begin == size_bytes:
                    del self._begins[number], self._ends[number]
                else:
                    self._begins[number] = begin + size_bytes
                self.free_bytes -= size_bytes
                return begin
        return None

    def give_back(self, begin: int, size_bytes: int) -> None:
        """Take back a range that was handed out."""
        end, number = begin + size_bytes, bisect.bisect(self._begins, begin)
        assert number == 0 or self._ends[number - 1] <= begin, "handed out twice"
        assert number == len(self._begins) or end <= self._begins[number], "handed out twice"
        joins_before = number > 0 and self._ends[number - 1] == begin
        joins_behind = number < len(self._begins) and self._begins[number] == end
        self.free_bytes += size_bytes
        if joins_before and joins_behind:
            self._ends[number - 1] = self._ends[number]
            del self._begins[number], self._ends[number]
        elif joins_before:
            self._ends[number - 1] = end
        elif joins_behind:
            self._begins[number] = begin
        else:
            self._begins.insert(number, begin)
            self._ends.insert(number, end)
