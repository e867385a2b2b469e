"""Room in one piece of memory for what comes and goes in one order.

Owns offsets. Next: :mod:`offload.memory.gradient_reader` puts gradients on their way to the host there.
"""

from __future__ import annotations

from collections import deque

from offload.sizes import round_up

ALIGN_BYTES = 64  # of each piece: a cache line, and the widest vector of a kernel


class Ring:
    """Hands out pieces of `size_bytes`; who was given one first gives it back first.

    Invariant: pieces are disjoint, and inside.
    """

    def __init__(self, size_bytes: int) -> None:
        self._size_bytes = size_bytes
        self._pieces: deque[tuple[int, int]] = deque()  # begin, end; the oldest first

    def take(self, size_bytes: int) -> int | None:
        """Return the offset of `size_bytes` in one piece, or None where they do not fit now.

        What fits at all, rounded up to :data:`ALIGN_BYTES`, fits an empty ring.
        """
        size_bytes = round_up(max(size_bytes, 1), ALIGN_BYTES)
        if not self._pieces:
            begin, limit = 0, self._size_bytes
        else:
            oldest, (newest, begin) = self._pieces[0][0], self._pieces[-1]
            limit = oldest if newest < oldest else self._size_bytes
            if begin + size_bytes > limit and newest >= oldest:  # behind the end; so from the start on
                begin, limit = 0, oldest
        if begin + size_bytes > limit:
            return None
        self._pieces.append((begin, begin + size_bytes))
        return begin

    def free(self, pieces: int) -> None:
        """Take back the oldest `pieces`."""
        for _ in range(pieces):
            self._pieces.popleft()
