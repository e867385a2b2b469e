"""Kernels of csrc/cpu_adam at the edges of the number formats: every class of number, sums, subnormals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from kernel_arrays import (
    HYPER,
    ISAS,
    STORAGE,
    TORCH,
    Shard,
    Variant,
    add_gradient,
    address,
    any_bits,
    automatic,
    bf16_half_up,
    widen,
)

from offload import _cpu_adam
from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind
from offload.kernels.optimizers import LAMB, AdamW

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    with automatic():
        yield


# ---- numbers at the edges ----------------------------------------------------------------------------------

INTERESTING = (0x00000000, 0x00800000, 0x3F800000, 0x7F7F8000, 0x7F800000, 0x80000000, 0xFF7FFFFF, 0xFFFFFFFF)


@pytest.mark.parametrize("isa", ISAS)
def test_split_master_is_recovered_around_every_edge(isa: str) -> None:
    cpu_adam.force_isa(isa)
    window = 1 << 18
    for centre in INTERESTING:
        first = max(centre - window, 0)
        assert _cpu_adam.count_split_failures(first, min(centre + window, 1 << 32)) == 0, hex(centre)


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("isa", ISAS)
def test_split_master_is_recovered_for_all_patterns(isa: str) -> None:
    cpu_adam.force_isa(isa)
    assert _cpu_adam.count_split_failures(0, 1 << 32) == 0


def test_split_maps_numbers_as_documented() -> None:
    cases = {  # float32 bits: (parameter, remainder), from (param << 16) + remainder == bits
        0x00000000: (0x0000, 0),
        0x80000000: (0x8000, 0),
        0x3F808000: (0x3F81, -0x8000),  # a tie goes up in magnitude
        0x3F807FFF: (0x3F80, 0x7FFF),
        0xBF808000: (0xBF81, -0x8000),
        0x7F800000: (0x7F80, 0),  # infinity
        0xFF800000: (0xFF80, 0),
        0x7F7FFFFF: (0x7F80, -1),  # the largest finite number: the parameter is infinite, the master is not
        0x7F800001: (0x7FC0, 0),  # any NaN
        0xFFFFFFFF: (0x7FC0, 0),
        0x00000001: (0x0000, 1),  # subnormal
    }
    source = np.array(list(cases), np.uint32)
    param, remainder, back = (np.empty(len(cases), t) for t in (np.uint16, np.int16, np.uint32))
    cpu_adam.split_master(address(source), address(param), address(remainder), len(cases))
    assert list(zip(param.tolist(), remainder.tolist(), strict=True)) == list(cases.values())
    cpu_adam.join_master(address(param), address(remainder), address(back), len(cases))
    np.testing.assert_array_equal(back, np.where((source & 0x7FFFFFFF) > 0x7F800000, np.uint32(0x7FC00000), source))


@pytest.mark.parametrize("isa", ISAS)
def test_conversions_of_every_16_bit_number(isa: str) -> None:
    cpu_adam.force_isa(isa)
    every = np.arange(1 << 16, dtype=np.uint16)
    for dtype in (Dtype.BFLOAT16, Dtype.FLOAT16):
        wide, back = np.empty(1 << 16, np.uint32), np.empty(1 << 16, np.uint16)
        cpu_adam.convert(address(every), dtype, address(wide), Dtype.FLOAT32, 1 << 16)
        nan = np.isnan(widen(every, dtype))
        np.testing.assert_array_equal(wide[~nan], widen(every, dtype).view(np.uint32)[~nan])
        assert (wide[nan] == 0x7FC00000).all()
        cpu_adam.convert(address(wide), Dtype.FLOAT32, address(back), dtype, 1 << 16)
        np.testing.assert_array_equal(back[~nan], every[~nan])
        assert (back[nan] == (0x7FC0 if dtype is Dtype.BFLOAT16 else 0x7E00)).all()


@pytest.mark.parametrize("isa", ISAS)
def test_narrowing_conversions(isa: str) -> None:
    cpu_adam.force_isa(isa)
    rng = np.random.default_rng(8)
    bits = any_bits(rng, Dtype.FLOAT32, 300_000)
    # around every float16 number and every tie between two of them
    near = np.arange(1 << 16, dtype=np.uint16).view(np.float16).astype(np.float32).view(np.uint32).astype(np.int64)
    ties = (near[:, None] + np.array([-1, 0, 1, 0xFFF, 0x1000, 0x1001])).ravel() & 0xFFFFFFFF
    small = rng.uniform(-(2.0**-13), 2.0**-13, 100_000).astype(np.float32).view(np.uint32)
    bits = np.concatenate([bits, ties.astype(np.uint32), small])
    got = np.empty(len(bits), np.uint16)
    nan = np.isnan(bits.view(np.float32))
    cpu_adam.convert(address(bits), Dtype.FLOAT32, address(got), Dtype.FLOAT16, len(bits))
    with np.errstate(over="ignore", invalid="ignore"):
        want = bits.view(np.float32).astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(got[~nan], want[~nan])
    assert (got[nan] == 0x7E00).all()
    cpu_adam.convert(address(bits), Dtype.FLOAT32, address(got), Dtype.BFLOAT16, len(bits))
    np.testing.assert_array_equal(got, bf16_half_up(bits))


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", Dtype)
def test_accumulation_is_that_of_torch(isa: str, dtype: Dtype) -> None:
    cpu_adam.force_isa(isa)
    rng = np.random.default_rng(9)
    numel = 200_003
    storage = torch.int32 if dtype is Dtype.FLOAT32 else torch.int16

    def tensor(d: Dtype) -> torch.Tensor:
        bits = any_bits(rng, d, numel)
        return torch.from_numpy(bits.view(np.int32 if d is Dtype.FLOAT32 else np.int16)).view(TORCH[d])

    acc32, acc, grad = tensor(Dtype.FLOAT32), tensor(dtype), tensor(dtype)
    want32, want = acc32 + grad.float(), acc + grad
    add_gradient(address(acc32), Dtype.FLOAT32, address(grad), dtype, numel)
    add_gradient(address(acc), dtype, address(grad), dtype, numel)
    assert torch.equal(torch.isnan(acc32), torch.isnan(want32))
    assert torch.equal(torch.isnan(acc), torch.isnan(want))
    number32, number = ~torch.isnan(want32), ~torch.isnan(want)
    assert torch.equal(acc32.view(torch.int32)[number32], want32.view(torch.int32)[number32])
    assert torch.equal(acc.view(storage)[number], want.view(storage)[number])


def summed_in_order(values: npt.NDArray[np.float64]) -> float:
    """Reference of the order: 32 lanes in blocks of 4096, blocks in chunks of 65536, chunks in order."""
    total = 0.0
    for chunk in range(0, len(values), 65536):
        of_chunk = 0.0
        for begin in range(chunk, min(chunk + 65536, len(values)), 4096):
            block = values[begin : begin + 4096]
            lanes = np.zeros(32)
            for row in np.pad(block, (0, -len(block) % 32)).reshape(-1, 32):
                lanes += row * row
            while len(lanes) > 1:
                lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
            of_chunk += float(lanes[0])
        total += of_chunk
    return total


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", Dtype)
def test_sum_of_squares_has_the_documented_order(isa: str, dtype: Dtype) -> None:
    cpu_adam.force_isa(isa)
    rng = np.random.default_rng(10)
    for numel in (0, 1, 31, 64, 4095, 4097, 65536 + 4096 + 17):
        values = torch.from_numpy(rng.standard_normal(numel)).to(TORCH[dtype])
        got = cpu_adam.sum_of_squares(address(values) if numel else 0, dtype, numel)
        assert got == (summed_in_order(values.double().numpy()), 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", Dtype)
def test_a_range_may_be_measured_in_parts(isa: str, dtype: Dtype) -> None:
    """Parts that begin at a block have the sums of the whole's blocks, of which the whole's sum is made again."""
    cpu_adam.force_isa(isa)
    rng = np.random.default_rng(11)
    for numel in (1, 4096, 4097, 65536 + 4096 + 17, 3 * 65536):
        values = torch.from_numpy(rng.standard_normal(numel) * 10.0 ** rng.integers(-3, 3, numel)).to(TORCH[dtype])
        whole = cpu_adam.sum_of_squares(address(values), dtype, numel)
        count = -(-numel // cpu_adam.SUM_BLOCK)
        sums, taken, moved = np.full(count, -1.0), np.full(count, -1.0), torch.zeros_like(values)
        cut = count // 3 * cpu_adam.SUM_BLOCK
        for begin, end in ((0, cut), (cut, numel)):
            at = begin // cpu_adam.SUM_BLOCK * 8
            cpu_adam.sum_of_squares(
                address(values) + begin * values.itemsize, dtype, end - begin, blocks=address(sums) + at
            )
            cpu_adam.take_gradient(
                src=address(values) + begin * values.itemsize,
                src_dtype=dtype,
                dst=address(moved) + begin * values.itemsize,
                dst_dtype=dtype,
                numel=end - begin,
                add=False,
                measure=True,
                blocks=address(taken) + at,
            )
        assert np.array_equal(sums, taken)
        assert cpu_adam.join_block_sums(address(sums), count) == whole[0]
    assert cpu_adam.join_block_sums(0, 0) == 0.0


def test_sums_of_blocks_keep_what_is_not_finite() -> None:
    for number in (math.inf, math.nan):
        sums = np.array([1.0, number, 2.0])
        assert str(cpu_adam.join_block_sums(address(sums), 3)) == str(number)
    with pytest.raises(ValueError, match="blocks"):
        cpu_adam.join_block_sums(address(sums) + 4, 1)
    values = np.ones(4097, np.float32)
    with pytest.raises(ValueError, match="overlaps"):
        cpu_adam.sum_of_squares(address(values), Dtype.FLOAT32, 4097, blocks=address(values) // 8 * 8 + 4096)


def test_sum_of_squares_neither_overflows_nor_vanishes() -> None:
    big = np.full(10_000, 3e38, np.float32)
    assert cpu_adam.sum_of_squares(address(big), Dtype.FLOAT32, 10_000) == pytest.approx(
        (1e4 * float(big[0]) ** 2, 0), rel=1e-12
    )
    small = np.full(10_000, 1e-30, np.float32)
    total, _ = cpu_adam.sum_of_squares(address(small), Dtype.FLOAT32, 10_000)
    assert total == pytest.approx(1e4 * float(small[0]) ** 2, rel=1e-12)


def test_sum_of_squares_beyond_one_batch_of_chunks() -> None:
    numel = 1024 * 65536 + 65536 + 5  # one batch, one chunk, a rest; zero pages cost no memory
    values = np.zeros(numel, np.uint16)
    ones = [0, 65535, 65536, 1024 * 65536 - 1, 1024 * 65536, numel - 6, numel - 1]
    values[ones] = 0x3C00
    values[numel - 3] = 0x7C00
    assert cpu_adam.sum_of_squares(address(values), Dtype.FLOAT16, numel) == (math.inf, 1)
    values[numel - 3] = 0
    assert cpu_adam.sum_of_squares(address(values), Dtype.FLOAT16, numel) == (float(len(ones)), 0)


@pytest.mark.parametrize("isa", ISAS)
@pytest.mark.parametrize("dtype", Dtype)
def test_non_finite_elements_are_counted(isa: str, dtype: Dtype) -> None:
    cpu_adam.force_isa(isa)
    infinity = {Dtype.FLOAT32: 0x7F800000, Dtype.BFLOAT16: 0x7F80, Dtype.FLOAT16: 0x7C00}[dtype]
    for numel in (1, 17, 5000, 70_001):
        values = np.zeros(numel, STORAGE[dtype])
        at = sorted({0, numel // 2, numel - 1})
        for k, index in enumerate(at):
            values[index] = infinity + k  # infinity, then NaNs
        total, count = cpu_adam.sum_of_squares(address(values), dtype, numel)
        assert count == len(at)
        assert math.isinf(total) if len(at) == 1 else math.isnan(total)


@pytest.mark.parametrize("isa", ISAS)
def test_nan_and_infinity_reach_the_parameter(isa: str) -> None:
    cpu_adam.force_isa(isa)
    for kind, emit in (
        (MasterKind.SPLIT, None),
        (MasterKind.FLOAT32, Dtype.BFLOAT16),
        (MasterKind.FLOAT32, Dtype.FLOAT16),
    ):
        shard = Shard.random(Variant(Dtype.FLOAT32, kind, emit), 100, 11, classes=False)
        shard.grad.view(np.float32)[[3, 99]] = [
            np.nan,
            np.inf,
        ]  # infinite gradient: m and sqrt(v) infinite, p NaN
        shard.step(HYPER)
        param = widen(shard.param, emit or Dtype.BFLOAT16)
        assert np.flatnonzero(np.isnan(param)).tolist() == [3, 99]
        assert np.flatnonzero(np.isnan(shard.weights())).tolist() == [3, 99]
        assert np.isinf(shard.exp_avg.view(np.float32)[99])


def steps_of(isa: str, states: StateKind, spec: AdamW | LAMB, *gradients: float) -> Shard:
    """Take a step from 0.5 with each of the gradients, one after the other, on this path."""
    cpu_adam.force_isa(isa)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32, states=states), 128, 1, classes=False)
    for array in (shard.exp_avg, shard.exp_avg_sq, shard.units):
        array[:] = 0
    shard.master.view(np.float32)[:] = 0.5
    for step, value in enumerate(gradients, 1):
        shard.grad.view(np.float32)[:] = value
        cpu_adam.step(shard.arrays(), Hyper(spec, step))
    return shard


def exact(spec: AdamW, *gradients: float) -> float:
    """Return the same weight in float64."""
    p, m, v, (beta1, beta2) = 0.5, 0.0, 0.0, spec.betas
    for step, g in enumerate(gradients, 1):
        m, v = beta1 * m + (1 - beta1) * g, beta2 * v + (1 - beta2) * g * g
        root = math.sqrt(v / (1 - beta2**step)) + spec.eps
        p = p * (1 - spec.lr * spec.weight_decay) - spec.lr * m / (1 - beta1**step) / root
    return p


NEAR = {StateKind.FLOAT32: 1e-4, StateKind.BFLOAT16: 0.02, StateKind.INT8: 0.2}  # of the way


@pytest.mark.parametrize("states", StateKind)
@pytest.mark.parametrize("largest", [1e20, -3e20, 1e25])
def test_a_gradient_without_a_square_leaves_numbers(states: StateKind, largest: float) -> None:
    """Its square is above 3.4e38; a thousandth of it is not, or, as in torch, the second moment stays infinite."""
    spec, gradients = AdamW(lr=1e-2), (largest, 1.0, 1.0)
    shards = [steps_of(isa, states, spec, *gradients) for isa in ISAS]
    for shard in shards:
        shard.assert_same(shards[0], "paths")
    if abs(largest) < 5e20:
        want = exact(spec, *gradients)
        np.testing.assert_allclose(shards[0].weights() - 0.5, want - 0.5, rtol=NEAR[states])
    elif states is not StateKind.INT8:  # of which a block is NaN then
        np.testing.assert_allclose(shards[0].weights(), 0.5 * (1 - 1e-4) ** 3, rtol=1e-6)
    if states is StateKind.FLOAT32:
        assert np.isfinite(steps_of(ISAS[0], states, LAMB(), *gradients).weights()).all()


@pytest.mark.parametrize("states", StateKind)
@pytest.mark.parametrize("betas", [(0.0, 0.0), (0.0, 1e-8), (0.3, 0.4), (0.49, 0.5)], ids=str)
@pytest.mark.parametrize("fall", [1e-3, 1e-6])
def test_small_betas_forget(states: StateKind, betas: tuple[float, float], fall: float) -> None:
    """What is left of a large gradient is betas of it, and no rounding error of it."""
    spec, gradients = AdamW(lr=1e-2, betas=betas), (3.0, 3.0 * fall, 2.0 * fall)
    shards = [steps_of(isa, states, spec, *gradients) for isa in ISAS]
    for shard in shards:
        shard.assert_same(shards[0], "paths")
    np.testing.assert_allclose(shards[0].weights() - 0.5, exact(spec, *gradients) - 0.5, rtol=NEAR[states])
    m, v = shards[0].moments()
    if states is StateKind.FLOAT32:
        lamb = steps_of(ISAS[0], states, LAMB(betas=betas), *gradients)
        np.testing.assert_array_equal(lamb.exp_avg.view(np.float32), m)
        np.testing.assert_array_equal(lamb.exp_avg_sq.view(np.float32), v)


@pytest.mark.parametrize("eps", [0.0, 1e-30])
def test_a_second_moment_that_is_flushed_divides_nothing(eps: float) -> None:
    """The square of 1e-20 is no normal number; without a least eps, the step is infinite, and of 0 NaN."""
    for gradient in (1e-20, 0.0):
        weights = steps_of(ISAS[-1], StateKind.FLOAT32, AdamW(lr=1e-2, eps=eps), gradient, gradient).weights()
        assert np.abs(weights - 0.5).max() <= 2e-2
    assert AdamW(eps=1e-17).constants(1)[5] == 1e-17  # 2^-63 / sqrt(1 - 0.999) is 3.4e-18


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_are_flushed_in_the_step_only(isa: str) -> None:
    cpu_adam.force_isa(isa)
    cpu_adam.set_num_threads(2)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 200_000, 12, classes=False)
    shard.grad[:] = 0
    shard.exp_avg[:] = 5  # subnormal
    shard.exp_avg_sq[:] = 0x00800000  # 2**-126; times 0.95 it is subnormal
    before = shard.master.copy()
    shard.step(Hyper(AdamW(lr=1.0, betas=(0.9, 0.95), weight_decay=0.0)))
    assert not shard.exp_avg.any()
    assert not shard.exp_avg_sq.any()
    np.testing.assert_array_equal(shard.master, before)
    tiny = np.array([1e-40], np.float32)
    assert (tiny * np.float32(1.0))[0] != 0, "the caller's floating-point environment was changed"


def test_accumulation_keeps_subnormals_whatever_the_caller_set() -> None:
    acc = np.full(100, 3, np.uint32)
    grad = np.full(100, 4, np.uint32)
    supported = torch.set_flush_denormal(True)
    try:
        add_gradient(address(acc), Dtype.FLOAT32, address(grad), Dtype.FLOAT32, 100)
    finally:
        torch.set_flush_denormal(False)
    assert (acc == 7).all(), f"set_flush_denormal supported: {supported}"
