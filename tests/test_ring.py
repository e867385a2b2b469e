"""The ring that gradients pass through: pieces are disjoint, and room that is there is found."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.memory.ring import ALIGN_BYTES, Ring


@given(st.integers(1, 20), st.lists(st.one_of(st.none(), st.integers(0, 20 * ALIGN_BYTES)), max_size=60))
def test_pieces_are_disjoint_and_what_fits_is_given(blocks: int, steps: list[int | None]) -> None:
    """None frees the oldest piece. A piece fits behind the newest one, or else at the start, up to the oldest one."""
    size_bytes = blocks * ALIGN_BYTES
    ring = Ring(size_bytes)
    taken: list[range] = []
    for step in steps:
        if step is None:
            if taken:
                ring.free(1)
                taken.pop(0)
            continue
        wanted = -(-max(step, 1) // ALIGN_BYTES) * ALIGN_BYTES
        starts = [taken[-1].stop, 0] if taken else [0]
        fitting = [
            start
            for start in starts
            if start + wanted <= size_bytes
            and not any(start < piece.stop and piece.start < start + wanted for piece in taken)
        ]
        offset = ring.take(step)
        assert offset == (fitting[0] if fitting else None)
        if offset is not None:
            taken.append(range(offset, offset + wanted))


def test_an_empty_ring_takes_all_of_it_again() -> None:
    ring = Ring(4 * ALIGN_BYTES)
    for size_bytes in (3 * ALIGN_BYTES, 4 * ALIGN_BYTES, ALIGN_BYTES + 1):
        assert ring.take(size_bytes) == 0
        assert ring.take(4 * ALIGN_BYTES) is None
        ring.free(1)
