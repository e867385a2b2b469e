"""The extent allocator against a plain model: a list of units, each free or owned."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from swap import Extent, ExtentAllocator, SwapFullError


class ExtentMachine(RuleBasedStateMachine):
    """Model: owner of every unit of the space, None for free."""

    @initialize(units=st.integers(0, 40), alignment=st.sampled_from([1, 512, 4096, 65536]))
    def start(self, units: int, alignment: int) -> None:
        self.alignment = alignment
        self.allocator = ExtentAllocator(units * alignment, alignment)
        self.units: list[Extent | None] = [None] * units
        self.live: list[Extent] = []

    def longest_free_run(self) -> int:
        best = run = 0
        for owner in self.units:
            run = run + 1 if owner is None else 0
            best = max(best, run)
        return best

    @rule(length=st.integers(1, 12), excess=st.integers(0, 65535))
    def allocate(self, length: int, excess: int) -> None:
        asked = length * self.alignment - excess % self.alignment
        if length > self.longest_free_run():
            with pytest.raises(SwapFullError, match=str(length * self.alignment)):
                self.allocator.allocate(asked)
            return
        extent = self.allocator.allocate(asked)
        assert extent.length == length * self.alignment
        assert extent.offset % self.alignment == 0
        first = extent.offset // self.alignment
        assert self.units[first : first + length] == [None] * length  # disjoint, and inside the space
        self.units[first : first + length] = [extent] * length
        self.live.append(extent)

    @precondition(lambda self: self.live)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        extent = self.live.pop(data.draw(st.integers(0, len(self.live) - 1)))
        self.allocator.free(extent)
        first = extent.offset // self.alignment
        length = extent.length // self.alignment
        self.units[first : first + length] = [None] * length
        with pytest.raises(ValueError, match="not allocated"):
            self.allocator.free(extent)

    @rule(more=st.integers(0, 8))
    def grow(self, more: int) -> None:
        self.units += [None] * more
        self.allocator.grow(len(self.units) * self.alignment)
        with pytest.raises(ValueError, match="capacity: expected at least"):
            self.allocator.grow(len(self.units) * self.alignment - 1)

    @invariant()
    def agrees_with_model(self) -> None:
        if not hasattr(self, "units"):
            return
        allocator = self.allocator
        free = sum(owner is None for owner in self.units) * self.alignment
        assert allocator.capacity == len(self.units) * self.alignment
        assert allocator.free_bytes == free
        assert allocator.free_bytes + allocator.used_bytes == allocator.capacity
        assert allocator.largest_free == self.longest_free_run() * self.alignment
        ranges = allocator.free_ranges()
        assert sum(extent.length for extent in ranges) == free
        for before, after in zip(ranges, ranges[1:], strict=False):
            assert before.end < after.offset  # coalesced: free ranges never touch
        for extent in ranges:
            units = self.units[extent.offset // self.alignment : extent.end // self.alignment]
            assert units == [None] * len(units)


TestExtentMachine = ExtentMachine.TestCase


def test_best_fit_takes_the_smallest_range_that_holds_it() -> None:
    allocator = ExtentAllocator(10, 1)
    extents = [allocator.allocate(n) for n in (3, 1, 2, 1, 3)]
    allocator.free(extents[0])  # free: [0, 3), then also [4, 6)
    allocator.free(extents[2])
    assert allocator.allocate(2) == Extent(4, 2)


def test_everything_freed_is_one_range_again() -> None:
    allocator = ExtentAllocator(64, 1)
    extents = [allocator.allocate(1) for _ in range(64)]
    for extent in extents[::2] + extents[1::2]:
        allocator.free(extent)
    assert allocator.free_ranges() == [Extent(0, 64)]


@pytest.mark.parametrize(("capacity", "alignment"), [(-1, 1), (4097, 4096), (1, 0)])
def test_impossible_space_is_refused(capacity: int, alignment: int) -> None:
    with pytest.raises(ValueError, match="expected"):
        ExtentAllocator(capacity, alignment)


@pytest.mark.parametrize("length", [0, -1])
def test_impossible_length_is_refused(length: int) -> None:
    with pytest.raises(ValueError, match="length"):
        ExtentAllocator(8, 1).allocate(length)


def test_foreign_extent_is_refused() -> None:
    allocator = ExtentAllocator(8, 1)
    extent = allocator.allocate(4)
    for wrong in (Extent(0, 3), Extent(1, 4), Extent(4, 4)):
        with pytest.raises(ValueError, match="not allocated"):
            allocator.free(wrong)
    allocator.free(extent)


@given(taken=st.lists(st.tuples(st.integers(0, 30), st.integers(1, 8)), max_size=8), capacity=st.integers(0, 40))
def test_occupying_is_allocating_exactly_there(taken: list[tuple[int, int]], capacity: int) -> None:
    """Units owned by the extents, counted one by one, tell whether they are disjoint and inside."""
    extents = [Extent(first * 4, length * 4) for first, length in taken]
    units = [unit for first, length in taken for unit in range(first, first + length)]
    allocator = ExtentAllocator(capacity * 4, 4)
    if len(set(units)) < len(units) or any(unit >= capacity for unit in units):
        with pytest.raises(ValueError, match="occupy"):
            allocator.occupy(extents)
        assert allocator.free_bytes == capacity * 4
        return
    allocator.occupy(extents)
    assert allocator.used_bytes == len(units) * 4
    free = {unit for extent in allocator.free_ranges() for unit in range(extent.offset // 4, extent.end // 4)}
    assert free == set(range(capacity)) - set(units)
    for extent in extents:
        allocator.free(extent)
    assert allocator.free_ranges() == ([Extent(0, capacity * 4)] if capacity else [])


@pytest.mark.parametrize("extent", [Extent(1, 4), Extent(4, 3), Extent(4, 0), Extent(-4, 4)])
def test_occupying_what_cannot_be_is_refused(extent: Extent) -> None:
    with pytest.raises(ValueError, match="occupy"):
        ExtentAllocator(16, 4).occupy([extent])
