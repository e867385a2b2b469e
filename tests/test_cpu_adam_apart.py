"""Steps that write beside the old content: the same bits as in place, and what was read stays as it is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
from kernel_arrays import HYPER, ISAS, LENGTHS, Shard, Variant, automatic, every_variant, placed

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays, StepTarget
from offload.kernels.optimizers import LAMB, SGD, Adagrad, Lion


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


def blank(shard: Shard) -> Shard:
    """Return arrays of the same kind with a pattern that the kernel must overwrite, and the same gradient."""
    other = shard.copy()
    for array in (other.master, other.exp_avg, other.exp_avg_sq, other.param, other.units):
        array.view(np.uint8)[:] = 0x5A
    return other


def into(old: Shard, new: Shard) -> StepArrays:
    """Describe a step from `old` to `new`."""
    there = new.arrays()
    target = StepTarget(master=there.master, states=there.states, param=there.param, units=there.units)
    return replace(old.arrays(), emit=there.emit, target=target)


@pytest.mark.few(20)
@every_variant
@pytest.mark.parametrize("classes", [False, True], ids=["usual", "any-bits"])
def test_the_same_bits_elsewhere(variant: Variant, classes: bool) -> None:
    hyper = variant.of_its_kind(HYPER)
    for numel in LENGTHS:
        start = Shard.random(variant, numel, numel, classes=classes)
        stepped = start.copy().step(HYPER)
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offset in ((1, 0), (2, 1)):
                cpu_adam.set_num_threads(threads)
                old = start.copy((offset, 3 * offset, 5 * offset, 7 * offset, 9 * offset))
                new = blank(start)
                cpu_adam.step(into(old, new), hyper)
                if variant.kind is not MasterKind.SPLIT and variant.emit is None:
                    new.param[:] = stepped.param  # there is none
                if variant.states is not StateKind.INT8:
                    new.units[:] = stepped.units
                stepped.assert_same(new, f"{isa} {numel}")
                old.assert_same(start, f"{isa} {numel}: what was read stays as it is")


@pytest.mark.parametrize("spec", [SGD(lr=1e-2), SGD(lr=1e-2, momentum=0.9), Lion(lr=1e-3), Adagrad(lr=1e-2)], ids=str)
@pytest.mark.parametrize("grad", Dtype)
def test_every_rule(spec: SGD | Lion | Adagrad, grad: Dtype) -> None:
    hyper = Hyper(spec, step=2, grad_scale=0.5)
    start = Shard.random(Variant(grad, MasterKind.SPLIT), 4099, 1, classes=False)

    def arrays(shard: Shard) -> StepArrays:
        found = shard.arrays()
        return replace(found, states=found.states[: len(spec.states)])

    stepped = start.copy()
    cpu_adam.step(arrays(stepped), hyper)
    for isa in ISAS:
        cpu_adam.force_isa(isa)
        new = start.copy()
        new.master[:], new.param[:] = 0x5A5A, 0x5A5A
        there = arrays(new)
        target = StepTarget(master=there.master, states=there.states, param=there.param)
        old = start.copy()
        cpu_adam.step(replace(arrays(old), target=target), hyper)
        stepped.assert_same(new, isa)
        old.assert_same(start, isa)


def test_what_lies_at_the_same_address_is_changed_in_place() -> None:
    start = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 4099, 1, classes=False)
    stepped, mixed, param = start.copy().step(HYPER), start.copy(), placed(np.zeros_like(start.param))
    here = mixed.arrays()
    target = StepTarget(master=here.master, states=here.states, param=param.ctypes.data)
    cpu_adam.step(replace(here, target=target), HYPER)
    np.testing.assert_array_equal(mixed.param, start.param)
    mixed.param[:] = param
    stepped.assert_same(mixed, "parameters elsewhere, all else in place")


def test_what_cannot_be_is_refused() -> None:
    old = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 256, 1, classes=False).copy()
    arrays = into(old, blank(old))
    target = arrays.target
    assert target is not None
    for change, message in (
        ({"master": target.master + 2}, "target master: expected an address that is a multiple of 64"),
        ({"states": target.states[:1]}, "target: expected 2 states but got 1"),
        ({"units": 64}, "target units: expected 0"),
        ({"param": target.master}, "overlaps"),
        ({"param": arrays.master}, "overlaps"),
        ({"param": 0}, "target param: expected the address"),
    ):
        with pytest.raises(ValueError, match=message):
            cpu_adam.step(replace(arrays, target=replace(target, **change)), HYPER)
    half = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.FLOAT32, Dtype.FLOAT16), 256, 1, classes=False).copy()
    emitting = into(half, blank(half))
    with pytest.raises(ValueError, match="emit: expected an address that is a multiple of 64 with a target"):
        cpu_adam.step(replace(emitting, emit=emitting.emit + 2), HYPER)
    with pytest.raises(ValueError, match="target: expected None for LAMB"):
        cpu_adam.step(arrays, Hyper(LAMB(lr=1e-2), step=1, grad_scale=1.0))
