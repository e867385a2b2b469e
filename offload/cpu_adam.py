"""Typed face of the CPU optimizer kernels: Adam steps, gradient sums, conversions on raw addresses.

Owns the arguments' meaning and their checks; the arithmetic is in ``csrc/cpu_adam``. Knows neither torch
nor shards: a range is an address (int, aligned to its element) and a number of elements, and the caller
keeps it alive until the call returns. Next to read: ``csrc/cpu_adam/kernels.h`` (the formulas),
``kernels_impl.h`` (the kernels).

Every function releases the GIL, may be called from several threads at once, and gives the same bits for any
instruction set, number of threads, alignment and division of the work into ranges (``sum_of_squares``: for
the same range).

Floating point:

* Subnormal float32 values count as zero in ``adam_step`` and ``sum_of_squares`` and are kept everywhere
  else, whatever ``torch.set_flush_denormal`` says.
* A NaN result is the positive quiet NaN (0x7fc00000, 0x7fc0, 0x7e00). NaN stays NaN and infinity stays
  infinity, in the 16-bit parameter too; a finite value of at least ``2**127 * (2 - 2**-8)`` becomes
  infinite in bfloat16 (the split master still holds it), one of at least 65520 in float16.
* Parameters are rounded to bfloat16 half up in magnitude (the rounding that splits a master), to float16
  half to even; sums in ``accumulate_same`` are rounded half to even.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from offload import _cpu_adam

__all__ = [
    "AdamHyper",
    "Dtype",
    "MasterKind",
    "accumulate",
    "accumulate_same",
    "adam_step",
    "available_isas",
    "convert",
    "force_isa",
    "isa",
    "join_master",
    "num_threads",
    "set_num_threads",
    "split_master",
    "sum_of_squares",
]


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


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of one Adam step.

    Attributes:
        lr: Learning rate, at least 0.
        beta1: Decay of ``exp_avg``, in [0, 1).
        beta2: Decay of ``exp_avg_sq``, in [0, 1).
        eps: Added to the root of the corrected second moment, at least 0.
        weight_decay: At least 0.
        step: 1 for the first step; the bias corrections' exponent.
        decoupled: True for AdamW, False for Adam with an L2 term in the gradient.
        grad_scale: Factor on the gradient before anything else: clipping, loss scale and accumulation in one.

    Raises:
        ValueError: A value is outside its range.
    """

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = True
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        for name in ("lr", "eps", "weight_decay"):
            value = getattr(self, name)
            if not (value >= 0.0 and math.isfinite(value)):
                raise ValueError(f"{name}: expected a finite number of at least 0 but got {value}; correct the option")
        for name in ("beta1", "beta2"):
            value = getattr(self, name)
            if not 0.0 <= value < 1.0:
                raise ValueError(f"{name}: expected a number in [0, 1) but got {value}; correct betas")
        if self.step < 1:
            raise ValueError(f"step: expected 1 or more but got {self.step}; count the first step as 1")
        if not math.isfinite(self.grad_scale):
            raise ValueError(f"grad_scale: expected a finite number but got {self.grad_scale}; skip the step")


def adam_step(
    *,
    numel: int,
    grad: int,
    grad_dtype: Dtype,
    param: int = 0,
    master: int,
    master_kind: MasterKind,
    exp_avg: int,
    exp_avg_sq: int,
    emit: int = 0,
    emit_dtype: Dtype | None = None,
    hyper: AdamHyper,
) -> None:
    """Update master weights and moments in place, in one pass over memory.

    Constants are computed in float64 and rounded once; elements in float32 with fma::

        g = grad * grad_scale (+ weight_decay * p for L2)
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        p = p * (1 - lr * weight_decay) - lr / bc1 * (m / (sqrt(v) / sqrt(bc2) + eps)), bc = 1 - beta**step

    Args:
        numel: Elements in every range.
        grad: Address, (numel,) ``grad_dtype``; only read.
        grad_dtype: Any ``Dtype``.
        param: Address, (numel,) bfloat16, updated in place; for ``MasterKind.SPLIT``, else 0.
        master: Address, (numel,) float32, or int16 remainder for ``MasterKind.SPLIT``; updated in place.
        master_kind: Where the master weight lives.
        exp_avg: Address, (numel,) float32, updated in place.
        exp_avg_sq: Address, (numel,) float32, updated in place.
        emit: Address, (numel,) ``emit_dtype``, written with the new parameter; 0 for none.
            ``MasterKind.FLOAT32`` only.
        emit_dtype: BFLOAT16 or FLOAT16, with ``emit``.
        hyper: The step's hyper-parameters.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another, or a dtype does not fit.
    """
    count = _numel(numel)
    split = master_kind is MasterKind.SPLIT
    if split and (emit or emit_dtype is not None):
        raise ValueError("emit: expected none with a split master, whose upper half is the parameter; pass 0 and None")
    if not split and param:
        raise ValueError("param: expected 0 with a float32 master; pass the 16-bit parameter as emit")
    if bool(emit) != (emit_dtype is not None) and count:
        raise ValueError("emit: expected an address and emit_dtype but got only one; pass both or neither")
    if emit_dtype is Dtype.FLOAT32:
        raise ValueError("emit_dtype: expected BFLOAT16 or FLOAT16 but got FLOAT32; read the master instead")
    if count == 0:
        return
    ranges = [
        _range("grad", grad, count, grad_dtype.itemsize),
        _range("master", master, count, 2 if split else 4),
        _range("exp_avg", exp_avg, count, 4),
        _range("exp_avg_sq", exp_avg_sq, count, 4),
    ]
    if split:
        ranges.append(_range("param", param, count, 2))
    if emit_dtype is not None:
        ranges.append(_range("emit", emit, count, 2))
    _check_disjoint(ranges)
    bias1 = 1.0 - hyper.beta1**hyper.step
    bias2 = 1.0 - hyper.beta2**hyper.step
    _cpu_adam.adam_step(
        numel=count,
        grad=grad,
        grad_dtype=grad_dtype.value,
        param=param,
        master=master,
        master_kind=_MASTER_CODES[None if split else emit_dtype, split],
        exp_avg=exp_avg,
        exp_avg_sq=exp_avg_sq,
        emit=emit,
        decoupled=hyper.decoupled,
        one_minus_beta1=1.0 - hyper.beta1,
        one_minus_beta2=1.0 - hyper.beta2,
        eps=hyper.eps,
        neg_step=-hyper.lr / bias1,
        inv_sqrt_bc2=1.0 / math.sqrt(bias2),
        decay=1.0 - hyper.lr * hyper.weight_decay,
        weight_decay=hyper.weight_decay,
        grad_scale=hyper.grad_scale,
    )


def sum_of_squares(address: int, dtype: Dtype, numel: int) -> tuple[float, int]:
    """Sum the squares of a range in float64 and count its infinities and NaNs.

    The order of the additions is fixed by the element's index in the range: 32 lanes inside blocks of 4096
    elements, blocks in order inside chunks of 65536, chunks in order. Squares of finite float32 neither
    overflow nor round.

    Args:
        address: Address, (numel,) ``dtype``; only read.
        dtype: Any ``Dtype``.
        numel: Elements.

    Returns: The sum (infinite or NaN when an element is not finite) and the number of elements that are not
    finite.

    Raises:
        ValueError: The range is missing or misaligned.
    """
    count = _numel(numel)
    if count == 0:
        return 0.0, 0
    _range("address", address, count, dtype.itemsize)
    return _cpu_adam.sum_of_squares(address, dtype.value, count)


def take_gradient(
    *, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int, add: bool, measure: bool
) -> tuple[float, int]:
    """Copy a gradient, or add it to what is there, and measure the result in the same pass.

    The same bits as a copy or :func:`convert` (with ``add``: :func:`accumulate_same`, into float32
    :func:`accumulate`) followed by :func:`sum_of_squares` of ``dst``.

    Args:
        src: Address, (numel,) ``src_dtype``; only read.
        src_dtype: Any ``Dtype``.
        dst: Address, (numel,) ``dst_dtype``; overwritten or added to.
        dst_dtype: Any ``Dtype``; with ``add``, that of the source or float32.
        numel: Elements.
        add: Add to ``dst`` instead of overwriting it.
        measure: Return the sum of squares; else (0.0, 0).

    Returns: As :func:`sum_of_squares`.

    Raises:
        ValueError: A range is missing, misaligned or overlaps the other, or the dtypes do not add up.
    """
    count = _numel(numel)
    if count == 0:
        return 0.0, 0
    _check_disjoint([_range("src", src, count, src_dtype.itemsize), _range("dst", dst, count, dst_dtype.itemsize)])
    return _cpu_adam.take_gradient(src, src_dtype.value, dst, dst_dtype.value, count, add, measure)


def accumulate(acc_fp32: int, grad: int, grad_dtype: Dtype, numel: int) -> None:
    """Add a gradient to a float32 accumulator: ``acc += grad``, as ``torch.add`` would.

    Args:
        acc_fp32: Address, (numel,) float32, updated in place.
        grad: Address, (numel,) ``grad_dtype``; only read.
        grad_dtype: Any ``Dtype``.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps the other.
    """
    count = _numel(numel)
    if count:
        _check_disjoint([_range("acc_fp32", acc_fp32, count, 4), _range("grad", grad, count, grad_dtype.itemsize)])
        _cpu_adam.accumulate(acc_fp32, grad, grad_dtype.value, count)


def accumulate_same(acc: int, grad: int, dtype: Dtype, numel: int) -> None:
    """Add a gradient to an accumulator of the same dtype, rounded half to even, as ``torch.add`` would.

    Args:
        acc: Address, (numel,) ``dtype``, updated in place.
        grad: Address, (numel,) ``dtype``; only read.
        dtype: Any ``Dtype``.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps the other.
    """
    count = _numel(numel)
    if count:
        _check_disjoint([_range("acc", acc, count, dtype.itemsize), _range("grad", grad, count, dtype.itemsize)])
        _cpu_adam.accumulate_same(acc, grad, dtype.value, count)


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
    count = _numel(numel)
    if count:
        _check_disjoint(
            [
                _range("src_fp32", src_fp32, count, 4),
                _range("param_bf16", param_bf16, count, 2),
                _range("remainder", remainder, count, 2),
            ]
        )
        _cpu_adam.split_master(src_fp32, param_bf16, remainder, count)


def join_master(param_bf16: int, remainder: int, dst_fp32: int, numel: int) -> None:
    """Join bfloat16 parameters and their remainders into float32 weights: the inverse of ``split_master``.

    A pair is meaningful only as ``split_master`` or ``adam_step`` wrote it: a parameter that was changed
    alone must be split anew.

    Args:
        param_bf16: Address, (numel,) bfloat16; only read.
        remainder: Address, (numel,) int16; only read.
        dst_fp32: Address, (numel,) float32, written.
        numel: Elements.

    Raises:
        ValueError: A range is missing, misaligned or overlaps another.
    """
    count = _numel(numel)
    if count:
        _check_disjoint(
            [
                _range("param_bf16", param_bf16, count, 2),
                _range("remainder", remainder, count, 2),
                _range("dst_fp32", dst_fp32, count, 4),
            ]
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
    count = _numel(numel)
    if count:
        _check_disjoint([_range("src", src, count, src_dtype.itemsize), _range("dst", dst, count, dst_dtype.itemsize)])
        _cpu_adam.convert(src, src_dtype.value, dst, dst_dtype.value, count)


def set_num_threads(count: int) -> None:
    """Set how many threads share a call, the calling thread included; results do not depend on it.

    Raises:
        ValueError: ``count`` is below 1.
    """
    if count < 1:
        raise ValueError(f"threads: expected 1 or more but got {count}; 1 is the calling thread alone")
    _cpu_adam.set_num_threads(count)


def num_threads() -> int:
    """Return how many threads share a call; at first the number of processors that the process may use."""
    return _cpu_adam.num_threads()


def isa() -> str:
    """Return the instruction-set path in use: ``"avx512"``, ``"avx2"`` or ``"scalar"``.

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


_MASTER_CODES: dict[tuple[Dtype | None, bool], int] = {
    (None, True): 0,
    (None, False): 1,
    (Dtype.BFLOAT16, False): 2,
    (Dtype.FLOAT16, False): 3,
}  # (emit dtype, split) -> Master in csrc/cpu_adam/kernels.h

_Range = tuple[str, int, int]  # name, first address, address after the last byte


def _numel(numel: int) -> int:
    if numel < 0:
        raise ValueError(f"numel: expected 0 or more but got {numel}; pass the number of elements")
    return numel


def _range(name: str, address: int, numel: int, itemsize: int) -> _Range:
    if address <= 0:
        raise ValueError(
            f"{name}: expected the address of {numel} elements but got {address}; pass data_ptr() or the like"
        )
    if address % itemsize:
        raise ValueError(
            f"{name}: expected an address that is a multiple of {itemsize} B but got {address:#x}; "
            "start the range at an element"
        )
    return name, address, address + numel * itemsize


def _check_disjoint(ranges: list[_Range]) -> None:
    ordered = sorted(ranges, key=lambda item: item[1])
    for (name_a, _, end), (name_b, begin, _) in zip(ordered, ordered[1:], strict=False):
        if begin < end:
            raise ValueError(
                f"{name_b}: expected a range of its own but it overlaps {name_a} by {end - begin} B; use another buffer"
            )
