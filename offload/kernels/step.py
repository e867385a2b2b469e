"""The optimizer steps on raw addresses: one pass over gradient, master weight and states.

Owns what a step needs and may not be given; the arithmetic is in ``csrc/cpu_adam``, the optimizers are in
:mod:`offload.kernels.optimizers`. Users import :mod:`offload.kernels.cpu_adam`, which says what holds for every kernel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from offload.kernels.extension import _cpu_adam
from offload.kernels.optimizers import LAMB, AdamW
from offload.kernels.ranges import Dtype, MasterKind, Range, StateKind, check, checked_numel, state_ranges
from offload.spec import Hyper

LINE_BYTES = 64  # of memory, which a step that writes elsewhere fills as a whole


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTarget:
    """Where a step writes that leaves the old content as it is: addresses of as many elements, at multiples of 64 B.

    What lies at the same address as the old content is changed in place.

    Attributes:
        master, param, states, units: As in :class:`StepArrays`; units may be anywhere.
    """

    master: int
    states: tuple[int, ...]
    param: int = 0
    units: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepArrays:
    """The ranges that one optimizer step works on: addresses of `numel` elements each.

    Attributes:
        numel: Elements in every range.
        grad: (numel,) ``grad_dtype``; only read.
        grad_dtype: Any ``Dtype``.
        master: (numel,) float32, or int16 remainder for ``MasterKind.SPLIT``.
        master_kind: Where the master weight lives.
        param: (numel,) bfloat16, the split master's upper half; for ``MasterKind.SPLIT``, else 0.
        states: (numel,) ``state_kind`` each; as many as the optimizer has, in its order.
        state_kind: How the states are stored.
        units: (ceil(numel / 128), 2) uint8, the blocks' exponents; for ``StateKind.INT8``, else 0. All zeros, with
            states of all zeros, are the states before the first step.
        emit: (numel,) ``emit_dtype``, written with the new parameter, beside ``MasterKind.FLOAT32`` only, in 16 bits;
            0 for none. With a target, at a multiple of 64 B.
        emit_dtype: The dtype of ``emit``.
        seed: Of the random numbers that round states of fewer than 32 bits.
        offset: Global index of the first element, the same for the same element in every step, different for every
            element: random numbers depend on it. For ``StateKind.INT8`` a multiple of 128; blocks begin there, and a
            range that ends inside a block ends the block (nothing of it may be in another range).
        target: Where :func:`step` writes instead, but for LAMB; None: in place.
    """

    numel: int
    grad: int
    grad_dtype: Dtype
    master: int
    master_kind: MasterKind
    states: tuple[int, ...]
    param: int = 0
    state_kind: StateKind = StateKind.FLOAT32
    units: int = 0
    emit: int = 0
    emit_dtype: Dtype | None = None
    seed: int = 0
    offset: int = 0
    target: StepTarget | None = None


def step(arrays: StepArrays, hyper: Hyper) -> None:
    """Update master weights and states, in one pass over memory: in place, or to ``arrays.target``.

    Constants are computed in float64 and rounded once; elements in float32 with fma. The formulas are those of the
    optimizers' classes. LAMB, whose step depends on all of a parameter, takes the arrays for one.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another, or a dtype does not fit.
    """
    if isinstance(hyper.spec, LAMB):
        lamb_apply(arrays, hyper, hyper.spec.step_size(*lamb_moments(arrays, hyper)))
        return
    _check_emission(arrays)
    if not _checked_count(arrays, hyper):
        return
    first, second = (*arrays.states, 0, 0)[:2]
    _cpu_adam.step(
        rule=hyper.spec.kernel,
        state_kind=arrays.state_kind.code,
        mode=_STEP if arrays.target is None else _APART,
        numel=arrays.numel,
        grad=arrays.grad,
        grad_dtype=arrays.grad_dtype.value,
        param=arrays.param,
        master=arrays.master,
        master_kind=_master_code(arrays),
        state0=first,
        state1=second,
        units=arrays.units,
        emit=arrays.emit,
        constants=hyper.constants(),
        seed=arrays.seed,
        number=hyper.step,
        offset=arrays.offset,
        targets=_addresses(arrays.target),
    )


def _addresses(target: StepTarget | None) -> tuple[int, int, int, int, int]:
    if target is None:
        return 0, 0, 0, 0, 0
    first, second = (*target.states, 0, 0)[:2]
    return target.param, target.master, first, second, target.units


def _target_ranges(arrays: StepArrays, old: Sequence[Range]) -> list[Range]:
    """Return the ranges that a step writes beside `old` ones.

    Raises:
        ValueError: One is superfluous, or does not begin where a line of 64 bytes does.
    """
    target = arrays.target
    if target is None:
        return []
    if len(target.states) != len(arrays.states):
        raise ValueError(f"target: expected {len(arrays.states)} states but got {len(target.states)}; pass as many")
    named = {"master": target.master, "param": target.param, "units": target.units}
    named |= {item.name: at for item, at in zip(old, target.states, strict=False)}
    found = []
    for name, address in named.items():
        item = next((item for item in old if item.name == name), None)
        if item is None and address:
            raise ValueError(f"target {name}: expected 0 but got {address:#x}; the step has none")
        if item is None:
            continue
        if address % LINE_BYTES and name != "units":
            raise ValueError(
                f"target {name}: expected an address that is a multiple of {LINE_BYTES} but got {address:#x}; start "
                "the range at a line"
            )
        if address != item.address:
            found.append(Range(f"target {name}", address, item.entries, item.itemsize))
    return found


def _check_emission(arrays: StepArrays) -> None:
    if arrays.master_kind is MasterKind.SPLIT and (arrays.emit or arrays.emit_dtype is not None):
        raise ValueError("emit: expected none with a split master, whose upper half is the parameter; pass 0 and None")
    if arrays.emit_dtype is Dtype.FLOAT32:
        raise ValueError("emit_dtype: expected BFLOAT16 or FLOAT16 but got FLOAT32; read the master instead")
    if bool(arrays.emit) != (arrays.emit_dtype is not None) and arrays.numel:
        raise ValueError("emit: expected an address and emit_dtype but got only one; pass both or neither")
    if arrays.target is not None and arrays.emit % LINE_BYTES and arrays.numel:
        raise ValueError(
            f"emit: expected an address that is a multiple of {LINE_BYTES} with a target but got {arrays.emit:#x}; "
            "start the range at a line"
        )


def _checked_count(arrays: StepArrays, hyper: Hyper) -> int:
    """Return the number of elements; where there are some, refuse ranges that do not fit."""
    kind = arrays.state_kind
    if kind is not StateKind.FLOAT32 and not hyper.spec.COMPRESSIBLE:
        raise ValueError(
            f"state_kind: expected FLOAT32 for {type(hyper.spec).__name__} but got {kind.name}; only Adam's are "
            "compressed"
        )
    count = checked_numel(arrays.numel)
    split = arrays.master_kind is MasterKind.SPLIT
    if not split and arrays.param:
        raise ValueError("param: expected 0 with a float32 master; pass the 16-bit parameter as emit")
    ranges = state_ranges(kind, hyper.spec.states, arrays.states, arrays.units, arrays.offset, count)
    if count:
        ranges += [
            Range("grad", arrays.grad, count, arrays.grad_dtype.itemsize),
            Range("master", arrays.master, count, 2 if split else 4),
        ]
        if split:
            ranges.append(Range("param", arrays.param, count, 2))
        if arrays.emit_dtype is not None:
            ranges.append(Range("emit", arrays.emit, count, arrays.emit_dtype.itemsize))
        check(*ranges, *_target_ranges(arrays, ranges))
    return count


def _master_code(arrays: StepArrays) -> int:
    return _SPLIT if arrays.master_kind is MasterKind.SPLIT else _FLOAT32_MASTERS[arrays.emit_dtype]


def lamb_moments(arrays: StepArrays, hyper: Hyper, *, before: tuple[float, float] = (0.0, 0.0)) -> tuple[float, float]:
    """Do the first pass of LAMB over a parameter: update the moments, measure parameter and direction.

    A parameter may be divided into ranges that begin at multiples of 65536 of its elements; the sums of one range are
    `before` of the next, and have the same bits as in one call.

    Args:
        arrays: As for :func:`step`, with float32 states.
        hyper: The step's hyper-parameters.
        before: What the call for the range before returned.

    Returns: The sums of squares of the parameter and of the direction, for :meth:`LAMB.step_size`.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another, or a dtype does not fit.
    """
    _check_emission(arrays)
    if arrays.target is not None:
        raise ValueError("target: expected None for LAMB, which works in place; copy the arrays first")
    if not _checked_count(arrays, hyper):
        return before
    return _cpu_adam.lamb_moments(
        numel=arrays.numel,
        grad=arrays.grad,
        grad_dtype=arrays.grad_dtype.value,
        param=arrays.param,
        master=arrays.master,
        master_kind=_master_code(arrays),
        exp_avg=arrays.states[0],
        exp_avg_sq=arrays.states[1],
        constants=hyper.constants(),
        param_squares=before[0],
        direction_squares=before[1],
    )


def lamb_apply(arrays: StepArrays, hyper: Hyper, step_size: float) -> None:
    """Do the second pass of LAMB: ``p -= step_size * direction``, once the whole parameter is measured.

    Args:
        arrays: As for :func:`lamb_moments`; the gradient is not read.
        hyper: The step's hyper-parameters.
        step_size: :meth:`LAMB.step_size` of the whole parameter's sums.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another, or a dtype does not fit.
    """
    _check_emission(arrays)
    if _checked_count(arrays, hyper):
        _cpu_adam.lamb_apply(
            numel=arrays.numel,
            param=arrays.param,
            master=arrays.master,
            master_kind=_master_code(arrays),
            exp_avg=arrays.states[0],
            exp_avg_sq=arrays.states[1],
            emit=arrays.emit,
            constants=hyper.constants(),
            neg_step=-step_size,
        )


def save_states(
    kind: StateKind,
    *,
    values: tuple[int, int],
    states: tuple[int, int],
    units: int = 0,
    numel: int,
    seed: int = 0,
    step: int = 0,
    offset: int = 0,
) -> None:
    """Store Adam's moments in another format: what a step would have stored.

    What :func:`load_states` gives is stored again exactly, whatever the seed.

    Args:
        kind: The format to store in.
        values: Addresses of ``exp_avg`` and ``exp_avg_sq`` (at least 0), (numel,) float32 each; only read.
        states: Addresses, (numel,) ``kind`` each, written.
        units: Address, (ceil(numel / 128), 2) uint8, written; for ``StateKind.INT8``, else 0.
        numel: Elements.
        seed: Of the random numbers, like `step` and `offset`: see :class:`StepArrays`.
        step: Number of the step after which the moments have these values.
        offset: Global index of the first element.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another.
    """
    _recode(True, kind, values, states, units, numel, seed, step, offset)


def load_states(
    kind: StateKind,
    *,
    values: tuple[int, int],
    states: tuple[int, int],
    units: int = 0,
    numel: int,
    offset: int = 0,
) -> None:
    """Convert Adam's moments to float32, exactly.

    Args:
        kind: The format they are stored in.
        values: Addresses, (numel,) float32 each, written.
        states: Addresses, (numel,) ``kind`` each; only read.
        units: Address, (ceil(numel / 128), 2) uint8; only read. For ``StateKind.INT8``, else 0.
        numel: Elements.
        offset: Global index of the first element; for ``StateKind.INT8`` a multiple of 128.

    Raises:
        ValueError: A range is missing, superfluous, misaligned or overlaps another.
    """
    _recode(False, kind, values, states, units, numel, 0, 0, offset)


def _recode(
    save: bool,
    kind: StateKind,
    values: tuple[int, int],
    states: tuple[int, int],
    units: int,
    numel: int,
    seed: int,
    step: int,
    offset: int,
) -> None:
    count = checked_numel(numel)
    ranges = state_ranges(kind, AdamW.STATES, states, units, offset, count)
    if count == 0:
        return
    names = AdamW.STATES
    check(*ranges, *(Range(f"{name}_fp32", at, count, 4) for name, at in zip(names, values, strict=True)))
    _cpu_adam.recode_states(
        save=save,
        state_kind=kind.code,
        numel=count,
        exp_avg_fp32=values[0],
        exp_avg_sq_fp32=values[1],
        exp_avg=states[0],
        exp_avg_sq=states[1],
        units=units,
        seed=seed,
        step=step,
        offset=offset,
    )


# Codes of csrc/cpu_adam/kernels.h.
_STEP, _APART = range(2)
_SPLIT = 0
_FLOAT32_MASTERS: dict[Dtype | None, int] = {None: 1, Dtype.BFLOAT16: 2, Dtype.FLOAT16: 3}
