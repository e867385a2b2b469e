"""What the kernels work on: element types, where weights and states live, and the checks of addresses.

Owns the names of formats and the rule that ranges are there, aligned and disjoint. Knows neither torch nor what is
computed. Next to read: :mod:`offload.kernels.cpu_adam`, which re-exports the public names.
"""

from __future__ import annotations

import operator
from enum import Enum
from itertools import pairwise
from typing import NamedTuple

STATE_BLOCK = 128  # elements; kStateBlock in csrc/cpu_adam/kernels.h


class Dtype(Enum):
    """Element type of a range; the value is the kernels' code."""

    FLOAT32 = 0
    BFLOAT16 = 1
    FLOAT16 = 2

    @property
    def itemsize(self) -> int:
        """Bytes per element."""
        return 4 if self is Dtype.FLOAT32 else 2


class MasterKind(Enum):
    """Where the float32 master weight lives."""

    FLOAT32 = "float32"  # one float32 array; a 16-bit parameter may be emitted beside it
    SPLIT = "split"  # bfloat16 parameter (upper half, rounded half up) + int16 remainder: exact in 4 B/param


class StateKind(Enum):
    """How optimizer states are stored.

    FLOAT32 is exact. The others lose bits and are rounded stochastically, so that nothing stalls:
    ``docs/numerics.md`` has the error figures.
    """

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    INT8 = "int8"  # 8-bit floating point in blocks of 128 elements, and two bytes per block for both states

    @property
    def itemsize(self) -> int:
        """Bytes per element of one state."""
        return _STATE_SIZES[self]

    @property
    def code(self) -> int:
        """The kernels' code."""
        return _STATE_CODES[self]

    def units_bytes(self, numel: int) -> int:
        """Return the size of the block units that both states of `numel` elements share; 0 without blocks."""
        return -(-numel // STATE_BLOCK) * 2 if self is StateKind.INT8 else 0


_STATE_SIZES = {StateKind.FLOAT32: 4, StateKind.BFLOAT16: 2, StateKind.INT8: 1}
_STATE_CODES = {StateKind.FLOAT32: 0, StateKind.BFLOAT16: 1, StateKind.INT8: 2}  # kernels.h


class Range(NamedTuple):
    """One array that a kernel touches: `entries` of `itemsize` bytes at an address that is a multiple of it."""

    name: str
    address: int
    entries: int
    itemsize: int

    @property
    def end(self) -> int:
        """Address after the last byte."""
        return self.address + self.entries * self.itemsize


_BY_ADDRESS = operator.itemgetter(Range._fields.index("address"))


def checked_numel(numel: int) -> int:
    """Return a number of elements.

    Raises:
        ValueError: It is negative.
    """
    if numel < 0:
        raise ValueError(f"numel: expected 0 or more but got {numel}; pass the number of elements")
    return numel


def check(*ranges: Range) -> None:
    """Refuse ranges that are missing, misaligned or overlap.

    Raises:
        ValueError: One of them is.
    """
    for item in ranges:
        if item.address <= 0:
            raise ValueError(
                f"{item.name}: expected the address of {item.entries} elements but got {item.address}; "
                "pass data_ptr() or the like"
            )
        if item.address % item.itemsize:
            raise ValueError(
                f"{item.name}: expected an address that is a multiple of {item.itemsize} B but got "
                f"{item.address:#x}; start the range at an element"
            )
    ordered = sorted(ranges, key=_BY_ADDRESS)
    for a, b in pairwise(ordered):
        if b.address < a.end:
            raise ValueError(
                f"{b.name}: expected a range of its own but it overlaps {a.name} by {a.end - b.address} B; "
                "use another buffer"
            )


def state_ranges(
    kind: StateKind, names: tuple[str, ...], addresses: tuple[int, ...], units: int, offset: int, numel: int
) -> list[Range]:
    """Return the ranges of an optimizer's states and their units.

    Raises:
        ValueError: There are too many or too few, or the range does not start at a block.
    """
    if len(addresses) != len(names):
        raise ValueError(
            f"states: expected {len(names)} addresses but got {len(addresses)}; pass {', '.join(names) or 'none'}"
        )
    blocks = kind is StateKind.INT8
    if blocks and offset % STATE_BLOCK:
        raise ValueError(f"offset: expected a multiple of {STATE_BLOCK} but got {offset}; start the range at a block")
    if not 0 <= offset < 1 << 64:
        raise ValueError(f"offset: expected 0 to 2**64 - 1 but got {offset}; pass the first element's global index")
    if units and not blocks:
        raise ValueError(f"units: expected 0 for {kind.name} states but got {units:#x}; only INT8 states have units")
    ranges = [Range(name, address, numel, kind.itemsize) for name, address in zip(names, addresses, strict=True)]
    return [*ranges, Range("units", units, kind.units_bytes(numel), 1)] if blocks else ranges
