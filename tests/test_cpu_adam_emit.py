"""Deferred commit: what is emitted before the factor on the gradient is known, and what is committed later."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kernel_arrays import (
    HYPER,
    ISAS,
    LENGTHS,
    VARIANTS,
    Bits,
    Shard,
    Variant,
    address,
    automatic,
    every_variant,
    gradient,
    placed,
)

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


def emission(shard: Shard, offset: int = 0) -> Bits:
    """Room for the parameter, with a pattern that the kernel must overwrite."""
    storage = np.uint32 if shard.emit_dtype is Dtype.FLOAT32 else np.uint16
    return placed(np.full(len(shard.grad), 0x5A5A, storage), offset)


def parameter(shard: Shard) -> Bits:
    """The parameter after a plain step."""
    return shard.master if shard.emit_dtype is Dtype.FLOAT32 else shard.param


def hyper_of(variant: Variant, step: int, grad_scale: float) -> Hyper:
    hyper = variant.of_its_kind(HYPER)
    return replace(hyper, spec=replace(hyper.spec, lr=1e-3 / step), step=step, grad_scale=grad_scale)


@pytest.mark.few(20)
@every_variant
@pytest.mark.parametrize("classes", [False, True], ids=["usual", "any-bits"])
def test_emission_is_the_parameter_of_the_step(variant: Variant, classes: bool) -> None:
    hyper = variant.of_its_kind(HYPER)
    for numel in LENGTHS:
        start = Shard.random(variant, numel, numel, classes=classes)
        stepped = start.copy().step(HYPER)
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offset in ((1, 0), (2, 1)):
                cpu_adam.set_num_threads(threads)
                shard = start.copy((offset, 3 * offset, 5 * offset, 7 * offset, 9 * offset))
                out = emission(shard, offset)
                cpu_adam.emit(shard.arrays(out=out), hyper)
                np.testing.assert_array_equal(out, parameter(stepped), err_msg=f"{isa} {numel}")
                shard.assert_same(start, f"{isa}: states must not change")


@pytest.mark.few(20)
@every_variant
@pytest.mark.parametrize("classes", [False, True], ids=["usual", "any-bits"])
def test_commit_and_emit_is_a_step_and_an_emission(variant: Variant, classes: bool) -> None:
    first, second = hyper_of(variant, 3, 0.37), hyper_of(variant, 4, 1.0)
    for numel in LENGTHS:
        start = Shard.random(variant, numel, numel, classes=classes)
        fresh = Shard.random(variant, numel, numel + 1, classes=classes).grad
        pending = start.grad.copy()
        committed = start.copy().step(first)
        committed.grad[:] = fresh
        want = committed.copy().step(second)
        if variant.emit is not None:  # commits do not write the parameter
            committed.param[:] = start.param
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offset in ((1, 0), (2, 1)):
                cpu_adam.set_num_threads(threads)
                shard = start.copy((offset, 3 * offset, 5 * offset, 7 * offset, 9 * offset))
                shard.grad[:] = fresh
                out, old = emission(shard, offset), placed(pending, 11 * offset)
                arrays = shard.arrays(out=out)
                cpu_adam.emit(arrays, second, pending=address(old), pending_hyper=first)
                np.testing.assert_array_equal(out, parameter(want), err_msg=f"{isa} {numel}")
                committed.assert_same(shard, f"{isa} {numel}")


@given(
    variant=st.sampled_from([v for v in VARIANTS if v.decoupled and v.grad is Dtype.BFLOAT16]),
    factors=st.lists(st.sampled_from([0.0, 0.25, 1.0, None]), min_size=1, max_size=6),
)
def test_any_sequence_of_steps_deferred_by_one(variant: Variant, factors: list[float | None]) -> None:
    """Emit with the factor 1, learn the real one afterwards (None: the step is skipped), re-emit where it differs."""
    numel, rng = 300, np.random.default_rng(len(factors))
    plain = Shard.random(variant, numel, 1, classes=False)
    deferred = plain.copy()
    out = emission(deferred)
    pending: tuple[Bits, Hyper] | None = None
    count = 0
    for factor in factors:
        grad = gradient(rng.standard_normal(numel) * 1e-3, variant.grad)
        deferred.grad[:] = plain.grad[:] = grad
        guess = hyper_of(variant, count + 1, 1.0)
        before: dict[str, Any] = {}
        if pending is not None:
            before = {"pending": address(pending[0]), "pending_hyper": pending[1]}
        cpu_adam.emit(deferred.arrays(out=out), guess, **before)
        if factor is None:  # not finite: neither side does the step; the parameter is emitted without it
            pending = None
            continue
        count += 1
        real = replace(guess, grad_scale=factor)
        plain.step(real)
        if factor != 1.0:
            cpu_adam.emit(deferred.arrays(out=out), real)
        np.testing.assert_array_equal(out, parameter(plain))
        pending = grad.copy(), real
    if pending is not None:
        deferred.grad[:] = pending[0]
        deferred.step(pending[1])
    if variant.emit is not None:  # commits do not write it
        deferred.param[:] = plain.param
    plain.assert_same(deferred, "after the last commit")


@pytest.mark.parametrize(
    ("master", "change", "message"),
    [
        (MasterKind.SPLIT, {"emit": 0}, "emit: expected the address"),
        (MasterKind.SPLIT, {"emit_dtype": None}, "emit_dtype: expected BFLOAT16 but got None"),
        (MasterKind.SPLIT, {"emit_dtype": Dtype.FLOAT16}, "emit_dtype: expected BFLOAT16 but got Dtype.FLOAT16"),
        (MasterKind.FLOAT32, {"emit_dtype": None}, "emit_dtype: expected a dtype but got None"),
        (MasterKind.FLOAT32, {"emit": 0x20000}, "expected a range of its own"),
    ],
)
def test_bad_emissions_are_refused(master: MasterKind, change: dict[str, Any], message: str) -> None:
    arrays = StepArrays(
        numel=16,
        grad=0x10000,
        grad_dtype=Dtype.FLOAT32,
        master=0x20000,
        master_kind=master,
        param=0x50000 if master is MasterKind.SPLIT else 0,
        states=(0x30000, 0x40000),
        emit=0x60000,
        emit_dtype=Dtype.BFLOAT16,
        state_kind=StateKind.FLOAT32,
    )
    with pytest.raises(ValueError, match=message):
        cpu_adam.emit(replace(arrays, **change), HYPER)
    for wrong in ({"pending": 0x70000}, {"pending_hyper": HYPER}):
        with pytest.raises(ValueError, match="pending: expected an address and pending_hyper"):
            cpu_adam.emit(arrays, HYPER, **wrong)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="pending: expected a range of its own but it overlaps"):
        cpu_adam.emit(arrays, HYPER, pending=0x60000, pending_hyper=HYPER)
