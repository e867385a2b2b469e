"""What units tell of their parameters."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from offload.planning.units import Unit, lay_out


@given(
    sizes=st.lists(st.sampled_from([0, 1, 127, 128, 129, 4095, 4096, 4097]), min_size=1, max_size=6),
    cuts=st.lists(st.integers(0, 30_000), max_size=4),
)
def test_ranges_have_each_element_of_each_parameter_once(sizes: list[int], cuts: list[int]) -> None:
    slots, numel = lay_out([(f"p{number}", (size,)) for number, size in enumerate(sizes)])
    unit = Unit(0, "unit", "float32", 4, True, numel, slots)
    found: dict[int, list[int]] = {position: [] for position in range(len(slots))}
    ends = sorted({0, numel, *(min(cut, numel) for cut in cuts)})
    for begin, end in zip(ends, ends[1:], strict=False):
        for position, slot, start, stop in unit.overlaps(begin, end):
            assert slot is slots[position] and begin <= start < stop <= end
            found[position] += range(start, stop)
    assert found == {p: list(range(slot.offset_numel, slot.end_numel)) for p, slot in enumerate(slots)}
