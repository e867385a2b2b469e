"""What a device that the host cannot address computes by itself: the same arithmetic, on its own addresses.

Owns the questions. A device answers them only if its bits were compared with those of
:mod:`offload.kernels.cpu_adam`, which define every result. Next: :mod:`offload.memory.device` says where they come
from.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Sequence
from typing import Protocol

from offload.kernels.ranges import Dtype, StateKind
from offload.kernels.step import StepArrays
from offload.spec import Hyper

TOTAL_BYTES = 16  # of what is measured of a range: a float64, and an int64


class Stepper(Protocol):
    """Makes optimizer steps on addresses that it knows. :mod:`offload.kernels.cpu_adam` is one."""

    def step(self, arrays: StepArrays, hyper: Hyper) -> None:
        """Update master weights and states in place; see :func:`offload.kernels.cpu_adam.step`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """A range that is measured.

    Attributes:
        address: (numel,) `dtype`.
        total: address of :data:`TOTAL_BYTES` for the sum of squares and the number of elements that are not finite.
    """

    address: int
    dtype: Dtype
    numel: int
    total: int


class DeviceKernels(Protocol):
    """Arithmetic on addresses of a device, given to the stream that is current; nobody waits for it.

    Results have the bits of :mod:`offload.kernels.cpu_adam`. Many ranges are given at once, for each launch takes the
    host a while.
    """

    def steps(self, steps: Sequence[tuple[StepArrays, Hyper]]) -> None:
        """Update master weights and states in place, as by one :func:`offload.kernels.cpu_adam.step` each."""

    def take_gradient(self, *, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int, add: bool) -> None:
        """Copy a gradient, or add it to what is there; the arguments are those of the function in ``cpu_adam``."""

    def sums_of_squares(self, ranges: Sequence[Measured]) -> None:
        """Measure ranges, as by one :func:`offload.kernels.cpu_adam.sum_of_squares` each."""

    def convert(self, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int) -> None:
        """Convert a range to another dtype."""

    def refusal(self, rules: Collection[int], kind: StateKind, dtypes: Collection[Dtype]) -> str | None:
        """Return why the device should not make updates; None where its bits were compared with the CPU's.

        Args:
            rules: of the optimizer, by their numbers.
            kind: in which its states are stored.
            dtypes: of parameters.
        """

    def read_totals(self, addresses: Sequence[int]) -> list[tuple[float, int]]:
        """Wait for what was measured, and return it."""
