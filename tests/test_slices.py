"""Slices of ranks: whatever the unit and the world, they tile the unit and cut no page and no block."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.kernels.cpu_adam import SUM_BLOCK
from offload.kernels.ranges import STATE_BLOCK, StateKind
from offload.planning.roles import MOMENTS, STATE_ROLES, Role, States, role_bytes
from offload.planning.slices import owned_range
from offload.planning.units import PAD_NUMEL, Unit, lay_out
from offload.sizes import PAGE_BYTES

numels = st.integers(1, 3000).map(lambda pages: pages * PAD_NUMEL) | st.just(PAD_NUMEL)
worlds = st.integers(1, 9) | st.integers(1, 5000)


@given(numels, worlds)
def test_slices_follow_each_other_and_cover_the_unit(numel: int, world_size: int) -> None:
    slices = [owned_range(numel, rank, world_size) for rank in range(world_size)]
    assert slices[0][0] == 0 and slices[-1][1] == numel
    assert all(begin <= end for begin, end in slices)
    assert all(first[1] == second[0] for first, second in zip(slices, slices[1:], strict=False))


@given(numels, worlds)
def test_only_the_last_slices_are_shorter(numel: int, world_size: int) -> None:
    sizes = [end - begin for begin, end in (owned_range(numel, rank, world_size) for rank in range(world_size))]
    full = -(-numel // (PAD_NUMEL * world_size)) * PAD_NUMEL
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[: numel // full] == [full] * (numel // full)
    assert len([size for size in sizes if 0 < size < full]) <= 1


@given(numels)
def test_a_single_rank_owns_everything(numel: int) -> None:
    assert owned_range(numel, 0, 1) == (0, numel)


@given(numels, worlds, st.sampled_from(["bfloat16", "float16", "float32"]), st.sampled_from(StateKind))
def test_no_cut_divides_a_page_or_a_block(numel: int, world_size: int, dtype: str, kind: StateKind) -> None:
    unit = Unit(0, "u", dtype, 4 if dtype == "float32" else 2, True, numel, ())
    states = States(tuple("abcdef"), kind)
    begins = {owned_range(numel, rank, world_size)[0] for rank in range(world_size)}
    for begin in begins:
        assert begin % STATE_BLOCK == 0
        for role in (Role.PARAM, Role.GRAD, Role.MASTER, *MOMENTS):
            assert role_bytes(unit, role, begin, accumulate=False, states=states) % PAGE_BYTES == 0
    for role in STATE_ROLES:  # scales, too: what all ranks keep is what one would
        ranges = [owned_range(numel, rank, world_size) for rank in range(world_size)]
        kept = sum(role_bytes(unit, role, end - begin, accumulate=False, states=states) for begin, end in ranges)
        assert kept == role_bytes(unit, role, numel, accumulate=False, states=states)


@given(st.lists(st.integers(0, 3 * PAD_NUMEL), min_size=1, max_size=12), st.integers(1, 9), st.booleans())
def test_no_cut_divides_a_block_of_squares(sizes: list[int], world_size: int, whole: bool) -> None:
    """So the sums of blocks that ranks take of their slices are those of the whole parameter."""
    slots, numel = lay_out([(f"p{number}", (size,)) for number, size in enumerate(sizes)], whole=whole)
    for rank in range(world_size):
        begin, _ = owned_range(numel, rank, world_size)
        for slot in slots:
            if slot.offset_numel < begin < slot.end_numel:
                assert (begin - slot.offset_numel) % SUM_BLOCK == 0


def test_a_small_unit_leaves_ranks_without_a_slice() -> None:
    assert [owned_range(2 * PAD_NUMEL, rank, 4) for rank in range(4)] == [
        (0, PAD_NUMEL),
        (PAD_NUMEL, 2 * PAD_NUMEL),
        (2 * PAD_NUMEL, 2 * PAD_NUMEL),
        (2 * PAD_NUMEL, 2 * PAD_NUMEL),
    ]


@pytest.mark.parametrize(("rank", "world_size"), [(-1, 2), (2, 2), (0, 0)])
def test_a_rank_outside_its_world_is_a_mistake(rank: int, world_size: int) -> None:
    with pytest.raises(AssertionError, match=f"rank {rank} of {world_size}"):
        owned_range(PAD_NUMEL, rank, world_size)


@given(st.integers(1, 300), st.integers(1, 8), st.integers(1, 70), st.data())
def test_lengths_of_chunks_are_counted_as_chunks_lie(length: int, ranks: int, chunk: int, data: st.DataObject) -> None:
    unit = Unit(0, "unit", "float32", 4, True, length * ranks, (), ranks=ranks)
    begin = data.draw(st.integers(0, unit.numel))
    end = data.draw(st.integers(begin, unit.numel))
    lengths = [min(last, end) - max(first, begin) for first, last in unit.chunks(chunk)]
    assert unit.chunk_lengths(chunk, begin, end) == Counter(one for one in lengths if one > 0)
