"""How objects are spread over files."""

from __future__ import annotations

from pathlib import Path

import pytest
from aligned_memory import Memory, pattern
from hypothesis import given
from hypothesis import strategies as st
from test_store import engine as engine  # a fixture
from test_store import get, put

from swap import Mode, SwapFullError, SwapStore
from swap.space.allocation import STRIPE_BYTES, Piece, Space

BLOCK = 4096
MIB = 1 << 20


def per_file(pieces: tuple[Piece, ...], files: int) -> list[int]:
    return [sum(piece.extent.length for piece in pieces if piece.file == file) for file in range(files)]


@pytest.mark.parametrize(
    ("weights", "expected"),
    [
        (None, [20, 20]),
        ([1, 1], [20, 20]),
        ([3, 1], [30, 10]),
        ([0.5, 1.5], [10, 30]),
        ([100, 1], [40, 0]),  # the second part would be less than a stripe
    ],
)
def test_large_object_lies_on_all_files_in_proportion(weights: list[float] | None, expected: list[int]) -> None:
    space = Space([64 * MIB, 64 * MIB], BLOCK, weights)
    assert per_file(space.allocate(40 * MIB), 2) == [size * MIB for size in expected]


@given(
    weights=st.lists(st.integers(1, 9), min_size=2, max_size=4),
    sizes=st.lists(st.integers(1, 255), min_size=20, max_size=60),
)
def test_small_objects_keep_to_the_proportion(weights: list[int], sizes: list[int]) -> None:
    """Each goes as a whole to the file farthest behind, so no file is ever farther ahead than one object."""
    space = Space([64 * MIB] * len(weights), BLOCK, weights)
    for size in sizes:
        assert len(space.allocate(size * BLOCK)) == 1
        for file, weight in enumerate(weights):
            share = space.used_bytes * weight / sum(weights)
            assert space.allocators[file].used_bytes - share <= max(sizes) * BLOCK


@given(
    capacities=st.lists(st.integers(0, 1200), min_size=1, max_size=4),
    needs=st.lists(st.tuples(st.integers(1, 900), st.booleans()), max_size=20),
    weights=st.lists(st.integers(1, 9), min_size=4, max_size=4),
)
def test_what_fits_by_the_sum_of_bytes_fits(
    capacities: list[int], needs: list[tuple[int, bool]], weights: list[int]
) -> None:
    space = Space([blocks * BLOCK for blocks in capacities], BLOCK, weights[: len(capacities)])
    live: list[tuple[Piece, ...]] = []
    for blocks, free_one in needs:
        before = space.free_bytes
        pieces = space.allocate(blocks * BLOCK)
        assert bool(pieces) == (before >= blocks * BLOCK)
        if pieces:
            assert sum(per_file(pieces, len(capacities))) == blocks * BLOCK
            assert space.free_bytes == before - blocks * BLOCK
            live.append(pieces)
        if free_one and live:
            space.free(live.pop(len(live) // 2))
    for pieces in live:
        space.free(pieces)
    assert space.free_bytes == space.capacity_bytes == sum(capacities) * BLOCK
    assert [len(allocator.free_ranges()) for allocator in space.allocators] == [1 if c else 0 for c in capacities]


def test_full_file_leaves_the_rest_to_the_others() -> None:
    space = Space([4 * MIB, 64 * MIB], BLOCK, [1, 1])
    assert per_file(space.allocate(20 * MIB), 2) == [4 * MIB, 16 * MIB]
    assert per_file(space.allocate(20 * MIB), 2) == [0, 20 * MIB]
    assert per_file(space.allocate(BLOCK), 2) == [0, BLOCK]


def test_bytes_land_in_proportion_and_come_back(engine: str, tmp_path: Path) -> None:
    paths = [tmp_path / "fast", tmp_path / "slow"]
    for path in paths:
        path.mkdir()
    with SwapStore(paths, 64 * MIB, engine=engine, weights=[3, 1]) as store:
        assert [allocator.capacity for allocator in store._backing.space.allocators] == [48 * MIB, 16 * MIB]
        for key in range(3):
            put(store, key, pattern(8 * MIB, key))
        for key in range(3, 11):
            put(store, key, pattern(MIB, key))
        assert [allocator.used_bytes for allocator in store._backing.space.allocators] == [24 * MIB, 8 * MIB]
        for key in range(11):
            assert get(store, key) == pattern(8 * MIB if key < 3 else MIB, key)
        part = Memory(2 * MIB)
        store.get(0, part.address, 2 * MIB, offset=5 * MIB).wait()  # across the edge at 6 MiB
        assert part[0 : 2 * MIB] == pattern(8 * MIB, 0)[5 * MIB : 7 * MIB]


@pytest.mark.few
@pytest.mark.parametrize("mode", Mode)
def test_an_open_store_grows(mode: Mode, engine: str, tmp_path: Path) -> None:
    """What is there stays; what did not fit before fits then, and on all files in proportion."""
    paths = [tmp_path / "fast", tmp_path / "slow"]
    for path in paths:
        path.mkdir()
    with SwapStore(paths, 8 * MIB, engine=engine, weights=[3, 1], mode=mode) as store:
        put(store, 1, pattern(6 * MIB, 1))
        with pytest.raises(SwapFullError):
            put(store, 2, pattern(8 * MIB, 2))
        store.grow(4 * MIB)  # nothing: they are longer
        store.grow(16 * MIB)
        assert [allocator.capacity for allocator in store._backing.space.allocators] == [12 * MIB, 4 * MIB]
        put(store, 2, pattern(8 * MIB, 2))
        assert store.capacity_bytes == 16 * MIB
        assert [get(store, key) for key in (1, 2)] == [pattern(6 * MIB, 1), pattern(8 * MIB, 2)]
        with pytest.raises(SwapFullError, match="swap files: .* needed but .* free"):
            store.grow(1 << 60)
        assert store.capacity_bytes == 16 * MIB


@pytest.mark.parametrize("weights", [[1], [1, 1, 1], [0, 1], [-1, 2], [float("nan"), 1], [float("inf"), 1]])
def test_impossible_weights_are_refused(tmp_path: Path, weights: list[float]) -> None:
    with pytest.raises(ValueError, match="weights: expected 2 positive numbers"):
        SwapStore([tmp_path, tmp_path], MIB, weights=weights)


def test_stripe_is_a_multiple_of_any_alignment() -> None:
    assert STRIPE_BYTES % 65536 == 0
