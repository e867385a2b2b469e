"""Typed face of the CPU optimizer kernels: Adam steps, gradient sums, conversions on raw addresses.

Owns the arguments' meaning and their checks; the arithmetic is in ``csrc/cpu_adam``. Knows neither torch
nor shards: a range is an address (int, aligned to its element) and a number of elements, and the caller
keeps it alive until the call returns. Next to read: ``csrc/cpu_adam/kernels.h`` (the formulas),
``kernels_impl.h`` (the kernels).

Every function releases the GIL, may be called from several threads at once, and gives the same bits for any
instruction set, number of threads, alignment and division of the work into ranges (``sum_of_squares``: for
the same range).

Floating point:

* Subnormal float32 values count as zero in the optimizer steps and ``sum_of_squares`` and are kept everywhere
  else, whatever ``torch.set_flush_denormal`` says.
* A NaN result is the positive quiet NaN (0x7fc00000, 0x7fc0, 0x7e00). NaN stays NaN and infinity stays
  infinity, in the 16-bit parameter too; a finite value of at least ``2**127 * (2 - 2**-8)`` becomes
  infinite in bfloat16 (the split master still holds it), one of at least 65520 in float16.
* Parameters are rounded to bfloat16 half up in magnitude (the rounding that splits a master), to float16
  half to even; sums in ``take_gradient`` are rounded half to even. Optimizer states of fewer than 32 bits are
  rounded stochastically, with random bits that depend on the seed, the step and the element's global index only.
"""

from __future__ import annotations

import threading
from typing import ClassVar

from offload.kernels.extension import _cpu_adam
from offload.kernels.ranges import STATE_BLOCK, Dtype, MasterKind, Range, StateKind, check, checked_numel
from offload.kernels.step import (
    LINE_BYTES,
    StepArrays,
    StepTarget,
    lamb_apply,
    lamb_moments,
    load_states,
    save_states,
    step,
)
from offload.spec import Hyper

SUM_BLOCK = 4096  # elements whose squares are summed as one, by kSumBlock in kernels.h

__all__ = [
    "LINE_BYTES",
    "STATE_BLOCK",
    "SUM_BLOCK",
    "Dtype",
    "Hyper",
    "MasterKind",
    "StateKind",
    "StepArrays",
    "StepTarget",
    "Threads",
    "available_isas",
    "convert",
    "force_isa",
    "isa",
    "join_block_sums",
    "join_master",
    "lamb_apply",
    "lamb_moments",
    "load_states",
    "num_threads",
    "save_states",
    "set_num_threads",
    "split_master",
    "step",
    "sum_of_squares",
    "take_gradient",
]


def sum_of_squares(address: int, dtype: Dtype, numel: int, *, blocks: int = 0) -> tuple[float, int]:
    """Sum the squares of a range in float64 and count its infinities and NaNs.

    The order of the additions is fixed by the element's index in the range: 32 lanes inside blocks of 4096
    elements, blocks in order inside chunks of 65536, chunks in order. Squares of finite float32 neither
    overflow nor round.

    Args:
        address: Address, (numel,) ``dtype``; only read.
        dtype: Any ``Dtype``.
        numel: Elements.
        blocks: Address, (ceil(numel / SUM_BLOCK),) float64, written with the sum of each block; 0 for none.

    Returns: The sum (infinite or NaN when an element is not finite) and the number of elements that are not
    finite.

    Raises:
        ValueError: The range is missing or misaligned.
    """
    count = checked_numel(numel)
    if count == 0:
        return 0.0, 0
    check(Range("address", address, count, dtype.itemsize), *_block_sums(blocks, count))
    return _cpu_adam.sum_of_squares(address, dtype.value, count, blocks)


def join_block_sums(blocks: int, count: int) -> float:
    """Return the sum that :func:`sum_of_squares` returns of a range, bit for bit, of the sums of its blocks.

    So a range may be measured in parts, each of which begins at a multiple of :data:`SUM_BLOCK` elements.

    Args:
        blocks: Address, (count,) float64, as :func:`sum_of_squares` writes them; only read.
        count: Blocks.

    Raises:
        ValueError: The sums are missing or misaligned.
    """
    checked = checked_numel(count)
    if checked == 0:
        return 0.0
    check(Range("blocks", blocks, checked, 8))
    return _cpu_adam.join_block_sums(blocks, checked)


def _block_sums(address: int, numel: int) -> list[Range]:
    """Return the range that the sums of the blocks of `numel` elements take; none where they are not wanted."""
    return [Range("blocks", address, -(-numel // SUM_BLOCK), 8)] if address else []


def take_gradient(
    *, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int, add: bool, measure: bool, blocks: int = 0
) -> tuple[float, int]:
    """Copy a gradient, or add it to what is there, and measure the result in the same pass.

    The same bits as a copy or :func:`convert` (with ``add``: ``dst += src`` of torch) followed by
    :func:`sum_of_squares` of ``dst``.

    Args:
        src: Address, (numel,) ``src_dtype``; only read.
        src_dtype: Any ``Dtype``.
        dst: Address, (numel,) ``dst_dtype``; overwritten or added to.
        dst_dtype: Any ``Dtype``; with ``add``, that of the source or float32.
        numel: Elements.
        add: Add to ``dst`` instead of overwriting it.
        measure: Return the sum of squares; else (0.0, 0).
        blocks: As for :func:`sum_of_squares`; only written where `measure` is set.

    Returns: As :func:`sum_of_squares`.

    Raises:
        ValueError: A range is missing, misaligned or overlaps the other, or the dtypes do not add up.
    """
    count = checked_numel(numel)
    if count == 0:
        return 0.0, 0
    ranges = [Range("src", src, count, src_dtype.itemsize), Range("dst", dst, count, dst_dtype.itemsize)]
    check(*ranges, *_block_sums(blocks, count))
    return _cpu_adam.take_gradient(src, src_dtype.value, dst, dst_dtype.value, count, add, measure, blocks)


def split_master(src_fp32: int, param_bf16: int, remainder: int, numel: int) -> None:
    """Split float32 weights into bfloat16 parameters (rounded half up) and signed 16-bit remainders.

    ``bits(src) == (param << 16) + remainder`` for every value that is not a NaN, so ``join_master`` gives
    it back bit for bit; any NaN becomes parameter 0x7fc0 with remainder 0.

    Args:
        src_fp32: Address, (numel,) float32; only read.
        param_bf16: Address, (numel,) bfloat16, written.
        remainder: Address, (numel,) int16, written.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps another.
    """
    count = checked_numel(numel)
    if count:
        check(
            Range("src_fp32", src_fp32, count, 4),
            Range("param_bf16", param_bf16, count, 2),
            Range("remainder", remainder, count, 2),
        )
        _cpu_adam.split_master(src_fp32, param_bf16, remainder, count)


def join_master(param_bf16: int, remainder: int, dst_fp32: int, numel: int) -> None:
    """Join bfloat16 parameters and their remainders into float32 weights: the inverse of ``split_master``.

    A pair is meaningful only as ``split_master`` or :func:`step` wrote it: a parameter that was changed
    alone must be split anew.

    Args:
        param_bf16: Address, (numel,) bfloat16; only read.
        remainder: Address, (numel,) int16; only read.
        dst_fp32: Address, (numel,) float32, written.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps another.
    """
    count = checked_numel(numel)
    if count:
        check(
            Range("param_bf16", param_bf16, count, 2),
            Range("remainder", remainder, count, 2),
            Range("dst_fp32", dst_fp32, count, 4),
        )
        _cpu_adam.join_master(param_bf16, remainder, dst_fp32, count)


def convert(src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int) -> None:
    """Convert a range to another dtype.

    To bfloat16 with the rounding of ``split_master``, to float16 half to even.

    Args:
        src: Address, (numel,) ``src_dtype``; only read.
        src_dtype: Any ``Dtype``.
        dst: Address, (numel,) ``dst_dtype``, written. The same dtype is copied bit for bit.
        dst_dtype: Any ``Dtype``.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps the other.
    """
    count = checked_numel(numel)
    if count:
        check(Range("src", src, count, src_dtype.itemsize), Range("dst", dst, count, dst_dtype.itemsize))
        _cpu_adam.convert(src, src_dtype.value, dst, dst_dtype.value, count)


def set_num_threads(count: int) -> None:
    """Set how many threads share a call, the calling thread included; results do not depend on it.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"threads: expected 1 or more but got {count}; 1 is the calling thread alone")
    _cpu_adam.set_num_threads(count)


class Threads:
    """A number of threads that somebody asks for; of several, the last one decides, until it is closed."""

    _asked: ClassVar[list[Threads]] = []
    _before: ClassVar[list[int]] = []  # how many there were when nobody had asked
    _lock: ClassVar[threading.RLock] = threading.RLock()  # closed by the garbage collector, too

    def __init__(self, count: int) -> None:
        """Let `count` threads share a call.

        Raises:
            ValueError: as :func:`set_num_threads`.
        """
        self._count = count
        with self._lock:
            before = num_threads()
            set_num_threads(count)
            if not self._asked:
                self._before[:] = [before]
            self._asked.append(self)

    def close(self) -> None:
        """Ask no more: it is as if nobody had. Idempotent."""
        with self._lock:
            if self in self._asked:
                self._asked.remove(self)
                set_num_threads(self._asked[-1]._count if self._asked else self._before[0])


def num_threads() -> int:
    """Return how many threads share a call; at first the number of processors that the process may use."""
    return _cpu_adam.num_threads()


def isa() -> str:
    """Return the instruction-set path in use: ``"avx512"``, ``"avx2"``, ``"neon"`` or ``"scalar"``.

    The environment variable ``OFFLOAD_CPU_ADAM_ISA`` forces one; it is read at the first call into the
    kernels.

    Raises:
        ValueError: The environment variable names a path that is unknown or that this machine does not
            support.
    """
    return _cpu_adam.isa()


def available_isas() -> tuple[str, ...]:
    """Return the paths that this machine supports, widest first; ``"scalar"`` is always among them."""
    return tuple(_cpu_adam.available_isas())


def force_isa(name: str | None) -> None:
    """Use one instruction-set path from now on; for tests and benchmarks, results do not depend on it.

    Args:
        name: One of ``available_isas()``, or None for the automatic choice.

    Raises:
        ValueError: This machine does not support the path.
    """
    _cpu_adam.force_isa(name or "")
