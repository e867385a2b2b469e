"""The step of csrc/cpu_adam: accuracy against float64, the same bits everywhere, bad input."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from kernel_arrays import (
    HYPER,
    ISAS,
    LENGTHS,
    TORCH,
    VARIANTS,
    Bits,
    Shard,
    Variant,
    add_gradient,
    address,
    any_bits,
    automatic,
    bf16_half_up,
    every_variant,
    gradient,
    placed,
)

from offload import _cpu_adam
from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.optimizers import Adam, AdamW

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


# ---- accuracy ----------------------------------------------------------------------------------------------


def reference_step(
    p: npt.NDArray[np.float64],
    m: npt.NDArray[np.float64],
    v: npt.NDArray[np.float64],
    g: npt.NDArray[np.float64],
    hyper: Hyper,
) -> None:
    """Kingma & Ba, algorithm 1, and Loshchilov & Hutter, algorithm 2, in float64 and in place."""
    h, step = hyper.spec, hyper.step
    beta1, beta2 = h.betas
    g = g * hyper.grad_scale
    if isinstance(h, Adam):
        g = g + h.weight_decay * p
    else:
        p *= 1 - h.lr * h.weight_decay
    m += (1 - beta1) * (g - m)
    v += (1 - beta2) * (g * g - v)
    p -= h.lr * (m / (1 - beta1**step)) / (np.sqrt(v / (1 - beta2**step)) + h.eps)


def assert_as_close_to_float64_as_torch(variant: Variant, steps: int) -> None:
    numel, rng = 4099, np.random.default_rng(1)
    shard = Shard.random(variant, numel, 2, classes=False)
    shard.exp_avg[:] = 0
    shard.exp_avg_sq[:] = 0
    exact = shard.weights().astype(np.float64)
    moments = np.zeros(numel), np.zeros(numel)
    theirs = torch.nn.Parameter(torch.from_numpy(shard.weights().copy()))
    optimizer_class = torch.optim.AdamW if variant.decoupled else torch.optim.Adam
    optimizer = optimizer_class([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, steps + 1):
        fresh = torch.from_numpy(rng.standard_normal(numel)).mul_(1e-2).to(TORCH[variant.grad])
        shard.grad[:] = gradient(fresh.double().numpy(), variant.grad)
        hyper = variant.of_its_kind(replace(HYPER, step=step, grad_scale=1.0))
        shard.step(hyper)
        reference_step(exact, *moments, fresh.double().numpy(), hyper)
        theirs.grad = fresh.float()
        optimizer.step()
    ours_error = np.abs(shard.weights() - exact)
    torch_error = np.abs(theirs.detach().numpy() - exact)
    # Rounding errors of the same size; the maximum of 4099 of them scatters by a few ten percent.
    assert ours_error.mean() <= 1.05 * torch_error.mean()
    assert ours_error.max() <= 1.5 * torch_error.max()
    state = optimizer.state[theirs]
    for mine, name, want in (
        (shard.exp_avg, "exp_avg", moments[0]),
        (shard.exp_avg_sq, "exp_avg_sq", moments[1]),
    ):
        error = np.abs(mine.view(np.float32) - want).mean()
        assert error <= 1.05 * np.abs(state[name].numpy() - want).mean(), name


EXACT = [v for v in VARIANTS if v.emit is not Dtype.FLOAT16 and v.states is StateKind.FLOAT32]


@pytest.mark.few(6)
@pytest.mark.parametrize("variant", EXACT, ids=str)
def test_hundred_steps_as_close_to_float64_as_torch(variant: Variant) -> None:
    assert_as_close_to_float64_as_torch(variant, 100)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("variant", EXACT, ids=str)
def test_thousand_steps_as_close_to_float64_as_torch(variant: Variant) -> None:
    assert_as_close_to_float64_as_torch(variant, 1000)


def test_split_master_never_drifts_from_a_float32_master() -> None:
    full = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.FLOAT32, Dtype.BFLOAT16), 4099, 3, classes=False)
    split = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 4099, 3, classes=False)
    rng = np.random.default_rng(4)
    for step in range(1, 201):
        fresh = torch.from_numpy(rng.standard_normal(4099) * 1e-3).bfloat16().view(torch.int16).numpy()
        for shard in (full, split):
            shard.grad[:] = fresh.view(np.uint16)
            shard.step(replace(HYPER, step=step))
    np.testing.assert_array_equal(split.weights().view(np.uint32), full.master)
    np.testing.assert_array_equal(split.param, full.param)
    np.testing.assert_array_equal(split.exp_avg_sq, full.exp_avg_sq)


@pytest.mark.parametrize("emit", [Dtype.BFLOAT16, Dtype.FLOAT16])
def test_emitted_parameter_is_the_rounded_master(emit: Dtype) -> None:
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32, emit), 70001, 5, classes=False).step(HYPER)
    if emit is Dtype.BFLOAT16:
        want = bf16_half_up(shard.master)
    else:
        want = shard.master.view(np.float32).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(shard.param, want)


@pytest.mark.parametrize("isa", ISAS)
def test_zero_gradient_scale_and_zero_moments_leave_the_weights(isa: str) -> None:
    cpu_adam.force_isa(isa)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 1000, 6, classes=False)
    shard.exp_avg[:] = 0
    before = shard.master.copy()
    shard.step(Hyper(AdamW(lr=1.0, weight_decay=0.0), grad_scale=0.0))  # m = 0, so p = p * 1 - lr * 0 / denominator
    np.testing.assert_array_equal(shard.master, before)


# ---- the same bits everywhere ------------------------------------------------------------------------------


@pytest.mark.few(20)
@every_variant
@pytest.mark.parametrize("classes", [False, True], ids=["usual", "any-bits"])
def test_step_gives_the_same_bits_on_every_path(variant: Variant, classes: bool) -> None:
    for numel in LENGTHS:
        start = Shard.random(variant, numel, numel, classes=classes)
        cpu_adam.force_isa("scalar")
        cpu_adam.set_num_threads(1)
        want = start.copy().step(HYPER)
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offsets in ((1, (0,) * 5), (2, (1, 3, 5, 7, 9)), (3, (0, 0, 0, 0, 1))):
                cpu_adam.set_num_threads(threads)
                got = start.copy(offsets).step(HYPER)
                want.assert_same(got, f"{isa}, {threads} threads, {numel} elements, offsets {offsets}")


@given(data=st.data(), variant=st.sampled_from(VARIANTS), numel=st.integers(0, 3000))
def test_step_gives_the_same_bits_for_any_division_into_ranges(
    data: st.DataObject, variant: Variant, numel: int
) -> None:
    start = Shard.random(variant, numel, numel, classes=True)
    want = start.copy().step(HYPER)
    cuts = sorted(data.draw(st.lists(st.integers(0, numel), max_size=5)))
    if variant.states is StateKind.INT8:  # whole blocks
        cuts = [cut // 128 * 128 for cut in cuts]
    cpu_adam.force_isa(data.draw(st.sampled_from(ISAS)))
    got = start.copy(data.draw(st.tuples(*[st.integers(0, 31)] * 5)))
    for begin, end in zip([0, *cuts], [*cuts, numel], strict=True):
        got.step(HYPER, begin, end)
    want.assert_same(got, f"cuts {cuts}")


@pytest.mark.parametrize("dtype", Dtype)
def test_ranges_next_door_are_left_alone(dtype: Dtype) -> None:
    for isa in ISAS:
        cpu_adam.force_isa(isa)
        for numel in LENGTHS[:-1]:
            start = Shard.random(Variant(dtype, MasterKind.FLOAT32, Dtype.BFLOAT16), numel + 80, 7, classes=False)
            got = start.copy().step(HYPER, 37, 37 + numel)
            for name in ("master", "exp_avg", "exp_avg_sq", "param"):
                for part in (slice(0, 37), slice(37 + numel, None)):
                    before, after = getattr(start, name)[part], getattr(got, name)[part]
                    np.testing.assert_array_equal(before, after, err_msg=f"{name} {isa} {numel}")


Kernel = Callable[[list[Bits], int], object]


def helpers() -> list[tuple[str, list[Dtype], Kernel]]:
    """Every other kernel: name, dtypes of its arrays (int16 as BFLOAT16), call on arrays."""
    found: list[tuple[str, list[Dtype], Kernel]] = [
        (
            "split",
            [Dtype.FLOAT32, Dtype.BFLOAT16, Dtype.BFLOAT16],
            lambda a, n: cpu_adam.split_master(address(a[0]), address(a[1]), address(a[2]), n),
        ),
        (
            "join",
            [Dtype.BFLOAT16, Dtype.BFLOAT16, Dtype.FLOAT32],
            lambda a, n: cpu_adam.join_master(address(a[0]), address(a[1]), address(a[2]), n),
        ),
    ]
    for d in Dtype:
        found += [
            (
                f"accumulate-{d.name}",
                [Dtype.FLOAT32, d],
                lambda a, n, d=d: add_gradient(address(a[0]), Dtype.FLOAT32, address(a[1]), d, n),
            ),
            (
                f"accumulate_same-{d.name}",
                [d, d],
                lambda a, n, d=d: add_gradient(address(a[0]), d, address(a[1]), d, n),
            ),
            (f"sum-{d.name}", [d], lambda a, n, d=d: cpu_adam.sum_of_squares(address(a[0]), d, n)),
        ]
        found += [
            (
                f"convert-{d.name}-{e.name}",
                [d, e],
                lambda a, n, d=d, e=e: cpu_adam.convert(address(a[0]), d, address(a[1]), e, n),
            )
            for e in Dtype
        ]
    return found


@pytest.mark.parametrize(("name", "dtypes", "call"), helpers(), ids=[h[0] for h in helpers()])
def test_helpers_give_the_same_bits_on_every_path(name: str, dtypes: list[Dtype], call: Kernel) -> None:
    for numel in LENGTHS:
        rng = np.random.default_rng(numel)
        start = [any_bits(rng, d, numel) for d in dtypes]
        cpu_adam.force_isa("scalar")
        cpu_adam.set_num_threads(1)
        want = [placed(a) for a in start]
        want_result = call(want, numel)
        for isa in ISAS:
            cpu_adam.force_isa(isa)
            for threads, offset in ((1, 0), (2, 1), (3, 7)):
                cpu_adam.set_num_threads(threads)
                got = [placed(a, (k + 1) * offset) for k, a in enumerate(start)]
                assert repr(call(got, numel)) == repr(want_result), (isa, threads, numel)
                for a, b in zip(want, got, strict=True):
                    np.testing.assert_array_equal(a, b, err_msg=f"{name} {isa} {threads} threads {numel} elements")


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"step": 0}, "step"),
        ({"grad_scale": math.inf}, "grad_scale"),
    ],
)
def test_hyper_parameters_outside_their_range(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}: expected .* but got .*; "):
        replace(HYPER, **values)  # type: ignore[arg-type]


GOOD = StepArrays(
    numel=16,
    grad=0x10000,
    grad_dtype=Dtype.FLOAT32,
    master=0x20000,
    master_kind=MasterKind.FLOAT32,
    states=(0x30000, 0x40000),
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numel": -1}, "numel: expected 0 or more"),
        ({"grad": 0}, "grad: expected the address of 16 elements"),
        ({"states": (0x30002, 0x40000)}, "exp_avg: expected an address that is a multiple of 4 B"),
        ({"states": (0x20000 + 60, 0x40000)}, "exp_avg: expected a range of its own but it overlaps master by 4 B"),
        ({"param": 0x50000}, "param: expected 0"),
        ({"master_kind": MasterKind.SPLIT}, "param: expected the address"),
        (
            {"master_kind": MasterKind.SPLIT, "param": 0x50001},
            "param: expected an address that is a multiple of 2 B",
        ),
        ({"master_kind": MasterKind.SPLIT, "param": 0x50000, "emit": 0x60000}, "emit: expected none"),
        ({"emit": 0x60000}, "emit: expected an address and emit_dtype"),
        ({"emit_dtype": Dtype.BFLOAT16}, "emit: expected an address and emit_dtype"),
        ({"emit": 0x60000, "emit_dtype": Dtype.FLOAT32}, "emit_dtype: expected BFLOAT16 or FLOAT16"),
    ],
)
def test_bad_ranges_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cpu_adam.step(replace(GOOD, **change), HYPER)
    assert "; " in str(caught.value), "an error says what to do"


ARRAYS = StepArrays(
    numel=200,
    grad=0x10000,
    grad_dtype=Dtype.FLOAT32,
    master=0x20000,
    master_kind=MasterKind.FLOAT32,
    states=(0x30000, 0x40000),
    state_kind=StateKind.INT8,
    units=0x50000,
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"states": (0x30000,)}, "states: expected 2 addresses but got 1; pass exp_avg, exp_avg_sq"),
        ({"offset": 64}, "offset: expected a multiple of 128 but got 64"),
        ({"offset": -128}, "offset: expected 0 to"),
        ({"units": 0}, "units: expected the address of 4 elements"),
        ({"units": 0x30000 + 199}, "units: expected a range of its own but it overlaps exp_avg by 1 B"),
        ({"state_kind": StateKind.BFLOAT16}, "units: expected 0 for BFLOAT16 states"),
        ({"state_kind": StateKind.FLOAT32}, "units: expected 0 for FLOAT32 states"),
    ],
)
def test_bad_states_are_refused(change: dict[str, Any], message: str) -> None:
    for call in (
        lambda arrays: cpu_adam.step(arrays, HYPER),
        lambda arrays: cpu_adam.load_states(
            arrays.state_kind,
            values=(0x70000, 0x80000),
            states=arrays.states,
            units=arrays.units,
            numel=200,
            offset=arrays.offset,
        ),
    ):
        with pytest.raises(ValueError, match=message):
            call(replace(ARRAYS, **change))


def test_helpers_refuse_bad_ranges() -> None:
    for call in (
        lambda: cpu_adam.sum_of_squares(0, Dtype.FLOAT32, 1),
        lambda: cpu_adam.sum_of_squares(0x10001, Dtype.BFLOAT16, 1),
        lambda: add_gradient(0x10000, Dtype.FLOAT32, 0x10000, Dtype.BFLOAT16, 4),
        lambda: add_gradient(0x10000, Dtype.BFLOAT16, 0x10006, Dtype.BFLOAT16, 4),
        lambda: cpu_adam.convert(0x10000, Dtype.BFLOAT16, 0x10000, Dtype.FLOAT16, 4),
        lambda: cpu_adam.split_master(0x10000, 0x20000, 0x20000, 4),
        lambda: cpu_adam.join_master(0x10000, 0x20000, 0x30002, 4),
        lambda: cpu_adam.set_num_threads(0),
        lambda: cpu_adam.force_isa("sse9"),
        lambda: _cpu_adam.sum_of_squares(0x10000, 3, 4),
    ):
        with pytest.raises(ValueError, match="expected .* but "):
            call()


def test_empty_ranges_need_no_address() -> None:
    assert cpu_adam.sum_of_squares(0, Dtype.FLOAT32, 0) == (0.0, 0)
    add_gradient(0, Dtype.FLOAT32, 0, Dtype.BFLOAT16, 0)
    cpu_adam.convert(0, Dtype.BFLOAT16, 0, Dtype.FLOAT32, 0)
    cpu_adam.split_master(0, 0, 0, 0)
    empty = replace(GOOD, numel=0, grad=0, master=0, master_kind=MasterKind.SPLIT, states=(0, 0))
    cpu_adam.step(empty, HYPER)
