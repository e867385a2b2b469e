"""Kernels of csrc/cpu_adam: accuracy against float64, the same bits everywhere, edges, threads, bad input."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from offload import _cpu_adam, cpu_adam
from offload.cpu_adam import AdamHyper, Dtype, MasterKind

ROOT = Path(__file__).resolve().parent.parent
LENGTHS = (
    0,
    1,
    15,
    16,
    17,
    63,
    64,
    65,
    127,
    997,
    4099,
    2 * 65536 + 131,
)  # the last one: three chunks, one partial
ISAS = cpu_adam.available_isas()
STORAGE = {Dtype.FLOAT32: np.uint32, Dtype.BFLOAT16: np.uint16, Dtype.FLOAT16: np.uint16}
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}

Bits = npt.NDArray[np.unsignedinteger]


@pytest.fixture(autouse=True)
def automatic() -> Iterator[None]:
    """Leave the choice of path and the number of threads as they were."""
    threads = cpu_adam.num_threads()
    yield
    cpu_adam.force_isa(None)
    cpu_adam.set_num_threads(threads)


# ---- helpers -----------------------------------------------------------------------------------------------


def address(array: npt.NDArray[np.generic] | torch.Tensor) -> int:
    return array.data_ptr() if isinstance(array, torch.Tensor) else array.ctypes.data


def placed(values: Bits, offset: int = 0) -> Bits:
    """Copy values to memory that starts `offset` elements after a 64-byte boundary."""
    room = np.empty(values.nbytes + 64 + offset * values.itemsize, np.uint8)
    start = -room.ctypes.data % 64 + offset * values.itemsize
    view = room[start : start + values.nbytes].view(values.dtype)
    view[:] = values
    return view


def any_bits(rng: np.random.Generator, dtype: Dtype, numel: int) -> Bits:
    """Every class of number: any bit pattern, with NaN, infinity, zeros and subnormals made frequent."""
    storage = STORAGE[dtype]
    values = rng.integers(0, np.iinfo(storage).max, numel, dtype=storage, endpoint=True)
    special = {
        Dtype.FLOAT32: [
            0,
            0x80000000,
            1,
            0x807FFFFF,
            0x7F800000,
            0xFF800000,
            0x7FFFFFFF,
            0xFF800001,
            0x3F800000,
        ],
        Dtype.BFLOAT16: [0, 0x8000, 1, 0x807F, 0x7F80, 0xFF80, 0x7FFF, 0xFF81, 0x3F80],
        Dtype.FLOAT16: [0, 0x8000, 1, 0x83FF, 0x7C00, 0xFC00, 0x7FFF, 0xFC01, 0x3C00],
    }[dtype]
    at = rng.random(numel) < 0.2
    values[at] = rng.choice(np.array(special, storage), int(at.sum()))
    return values


def bf16_half_up(bits: Bits) -> Bits:
    """Reference: add half a unit of the upper half to the magnitude, drop the lower half; NaN is 0x7fc0."""
    wide = bits.astype(np.uint64)
    rounded = ((wide + 0x8000) >> 16).astype(np.uint16)
    return np.where((bits & 0x7FFFFFFF) > 0x7F800000, np.uint16(0x7FC0), rounded).astype(np.uint16)


def widen(bits: Bits, dtype: Dtype) -> npt.NDArray[np.float32]:
    if dtype is Dtype.FLOAT32:
        return bits.view(np.float32)
    if dtype is Dtype.FLOAT16:
        return bits.view(np.float16).astype(np.float32)
    return (bits.astype(np.uint32) << 16).view(np.float32)


@dataclass(frozen=True)
class Variant:
    grad: Dtype
    kind: MasterKind
    emit: Dtype | None = None
    decoupled: bool = True

    def __str__(self) -> str:
        emit = self.emit.name.lower() if self.emit else "none"
        return f"{self.grad.name.lower()}-{self.kind.value}-{emit}-{'adamw' if self.decoupled else 'adam'}"


VARIANTS = [
    Variant(grad, kind, emit, decoupled)
    for grad in Dtype
    for kind, emit in (
        (MasterKind.SPLIT, None),
        (MasterKind.FLOAT32, None),
        (MasterKind.FLOAT32, Dtype.BFLOAT16),
        (MasterKind.FLOAT32, Dtype.FLOAT16),
    )
    for decoupled in (True, False)
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
HYPER = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, step=3, grad_scale=0.37)


@dataclass
class Shard:
    """The arrays of one step, as bits, and the step itself on a part of them."""

    variant: Variant
    grad: Bits
    master: Bits
    exp_avg: Bits
    exp_avg_sq: Bits
    param: Bits

    @staticmethod
    def random(variant: Variant, numel: int, seed: int, *, classes: bool) -> Shard:
        rng = np.random.default_rng(seed)
        if classes:
            words = [any_bits(rng, Dtype.FLOAT32, numel) for _ in range(3)]
            grad = any_bits(rng, variant.grad, numel)
        else:
            words = [
                (rng.standard_normal(numel) * 0.02).astype(np.float32).view(np.uint32),
                (rng.standard_normal(numel) * 1e-3).astype(np.float32).view(np.uint32),
                (rng.standard_normal(numel) ** 2 * 1e-6).astype(np.float32).view(np.uint32),
            ]
            values = torch.from_numpy(rng.standard_normal(numel) * 1e-3).to(TORCH[variant.grad])
            integers = values.view(torch.int32 if variant.grad is Dtype.FLOAT32 else torch.int16).numpy()
            grad = integers.view(STORAGE[variant.grad])
        param = np.zeros(numel, np.uint16)
        master = words[0]
        if variant.kind is MasterKind.SPLIT:
            master = any_bits(rng, Dtype.BFLOAT16, numel) if classes else np.empty(numel, np.uint16)
            if classes:
                param = any_bits(rng, Dtype.BFLOAT16, numel)
            else:
                cpu_adam.split_master(address(words[0]), address(param), address(master), numel)
        return Shard(variant, grad, master, words[1], words[2], param)

    def copy(self, offsets: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)) -> Shard:
        arrays = (self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.param)
        return Shard(self.variant, *(placed(a, o) for a, o in zip(arrays, offsets, strict=True)))

    def step(self, hyper: AdamHyper, begin: int = 0, end: int | None = None) -> Shard:
        part = slice(begin, end)
        numel = len(self.grad[part])
        split = self.variant.kind is MasterKind.SPLIT
        cpu_adam.adam_step(
            numel=numel,
            grad=address(self.grad[part]),
            grad_dtype=self.variant.grad,
            param=address(self.param[part]) if split else 0,
            master=address(self.master[part]),
            master_kind=self.variant.kind,
            exp_avg=address(self.exp_avg[part]),
            exp_avg_sq=address(self.exp_avg_sq[part]),
            emit=address(self.param[part]) if self.variant.emit else 0,
            emit_dtype=self.variant.emit,
            hyper=replace(hyper, decoupled=self.variant.decoupled),
        )
        return self

    def weights(self) -> npt.NDArray[np.float32]:
        if self.variant.kind is MasterKind.FLOAT32:
            return self.master.view(np.float32)
        joined = np.empty(len(self.master), np.float32)
        cpu_adam.join_master(address(self.param), address(self.master), address(joined), len(joined))
        return joined

    def assert_same(self, other: Shard, what: str) -> None:
        for name in ("grad", "master", "exp_avg", "exp_avg_sq", "param"):
            np.testing.assert_array_equal(getattr(self, name), getattr(other, name), err_msg=f"{name}: {what}")


# ---- accuracy ----------------------------------------------------------------------------------------------


def reference_step(
    p: npt.NDArray[np.float64],
    m: npt.NDArray[np.float64],
    v: npt.NDArray[np.float64],
    g: npt.NDArray[np.float64],
    h: AdamHyper,
) -> None:
    """Kingma & Ba, algorithm 1, and Loshchilov & Hutter, algorithm 2, in float64 and in place."""
    g = g * h.grad_scale
    if h.decoupled:
        p *= 1 - h.lr * h.weight_decay
    else:
        g = g + h.weight_decay * p
    m += (1 - h.beta1) * (g - m)
    v += (1 - h.beta2) * (g * g - v)
    p -= h.lr * (m / (1 - h.beta1**h.step)) / (np.sqrt(v / (1 - h.beta2**h.step)) + h.eps)


@pytest.mark.parametrize("variant", [v for v in VARIANTS if v.emit is not Dtype.FLOAT16], ids=str)
def test_hundred_steps_as_close_to_float64_as_torch(variant: Variant) -> None:
    numel, rng = 4099, np.random.default_rng(1)
    shard = Shard.random(variant, numel, 2, classes=False)
    shard.exp_avg[:] = 0
    shard.exp_avg_sq[:] = 0
    exact = shard.weights().astype(np.float64)
    moments = np.zeros(numel), np.zeros(numel)
    theirs = torch.nn.Parameter(torch.from_numpy(shard.weights().copy()))
    optimizer_class = torch.optim.AdamW if variant.decoupled else torch.optim.Adam
    optimizer = optimizer_class([theirs], lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(1, 101):
        fresh = torch.from_numpy(rng.standard_normal(numel)).mul_(1e-2).to(TORCH[variant.grad])
        shard.grad[:] = fresh.view(torch.int32 if fresh.itemsize == 4 else torch.int16).numpy().view(shard.grad.dtype)
        hyper = AdamHyper(1e-3, 0.9, 0.95, 1e-8, 0.1, step=step, decoupled=variant.decoupled)
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
    shard.step(AdamHyper(1.0, grad_scale=0.0))  # m = 0, so p = p * 1 - lr * 0 / denominator
    np.testing.assert_array_equal(shard.master, before)


# ---- the same bits everywhere ------------------------------------------------------------------------------


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
                lambda a, n, d=d: cpu_adam.accumulate(address(a[0]), address(a[1]), d, n),
            ),
            (
                f"accumulate_same-{d.name}",
                [d, d],
                lambda a, n, d=d: cpu_adam.accumulate_same(address(a[0]), address(a[1]), d, n),
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
    cpu_adam.accumulate(address(acc32), address(grad), dtype, numel)
    cpu_adam.accumulate_same(address(acc), address(grad), dtype, numel)
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


@pytest.mark.parametrize("isa", ISAS)
def test_subnormals_are_flushed_in_the_step_only(isa: str) -> None:
    cpu_adam.force_isa(isa)
    cpu_adam.set_num_threads(2)
    shard = Shard.random(Variant(Dtype.FLOAT32, MasterKind.FLOAT32), 200_000, 12, classes=False)
    shard.grad[:] = 0
    shard.exp_avg[:] = 5  # subnormal
    shard.exp_avg_sq[:] = 0x00800000  # 2**-126; times 0.95 it is subnormal
    before = shard.master.copy()
    shard.step(AdamHyper(1.0, 0.9, 0.95))
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
        cpu_adam.accumulate(address(acc), address(grad), Dtype.FLOAT32, 100)
    finally:
        torch.set_flush_denormal(False)
    assert (acc == 7).all(), f"set_flush_denormal supported: {supported}"


# ---- threads and processes ---------------------------------------------------------------------------------


def test_concurrent_calls_from_several_threads() -> None:
    cpu_adam.set_num_threads(3)
    variant = Variant(Dtype.BFLOAT16, MasterKind.SPLIT)
    start = Shard.random(variant, 300_001, 13, classes=False)
    want = start.copy()
    for _ in range(5):
        want.step(HYPER)
    results = [start.copy() for _ in range(4)]

    def work(shard: Shard) -> None:
        for _ in range(5):
            shard.step(HYPER)

    threads = [threading.Thread(target=work, args=(shard,)) for shard in results]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for shard in results:
        want.assert_same(shard, "concurrent")


def test_thread_count_may_change_while_calls_run() -> None:
    start = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 300_001, 14, classes=False)
    want, got = start.copy(), start.copy()
    for threads in (1, 4, 2, 3, 1):
        cpu_adam.set_num_threads(1)
        want.step(HYPER)
        cpu_adam.set_num_threads(threads)
        assert cpu_adam.num_threads() == threads
        got.step(HYPER)
    want.assert_same(got, "changing thread count")


def in_child(work: Callable[[], bool]) -> int:
    """Fork, run `work` in the child with a deadline, return the child's wait status."""
    pid = os.fork()
    if pid == 0:
        signal.alarm(30)
        os._exit(0 if work() else 1)
    return os.waitpid(pid, 0)[1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_forked_child_makes_its_own_pool() -> None:
    cpu_adam.set_num_threads(2)
    start = Shard.random(Variant(Dtype.BFLOAT16, MasterKind.SPLIT), 300_001, 15, classes=False)
    want = start.copy().step(HYPER)
    stop = threading.Event()
    busy = threading.Thread(target=lambda: [start.copy().step(HYPER) for _ in iter(stop.is_set, True)])
    busy.start()  # so that forks also happen in the middle of a step

    def work() -> bool:
        for _ in range(3):
            got = start.copy().step(HYPER)
            want.assert_same(got, "after fork")
        return True

    try:
        assert [in_child(work) for _ in range(5)] == [0] * 5
    finally:
        stop.set()
        busy.join()
    want.assert_same(start.copy().step(HYPER), "in the parent, after the forks")


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **environment},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_threads_start_at_the_first_call_that_needs_them() -> None:
    code = """
import array, os
from offload import cpu_adam
def threads(): return len(os.listdir("/proc/self/task"))
before = threads()
cpu_adam.set_num_threads(3)
data = array.array("f", [1.0]) * 300000
cpu_adam.sum_of_squares(data.buffer_info()[0], cpu_adam.Dtype.FLOAT32, 1000)
assert threads() == before
assert cpu_adam.sum_of_squares(data.buffer_info()[0], cpu_adam.Dtype.FLOAT32, 300000) == (300000.0, 0)
assert threads() == before + 2
"""
    result = run_python(code)
    assert result.returncode == 0, result.stderr


@pytest.mark.parametrize("isa", ISAS)
def test_environment_variable_forces_a_path(isa: str) -> None:
    result = run_python("from offload import cpu_adam; print(cpu_adam.isa())", OFFLOAD_CPU_ADAM_ISA=isa)
    assert result.stdout.strip() == isa, result.stderr


def test_unknown_path_in_the_environment_names_the_choices() -> None:
    code = "from offload import cpu_adam; print('imported'); cpu_adam.isa()"
    result = run_python(code, OFFLOAD_CPU_ADAM_ISA="sse9")
    assert "imported" in result.stdout
    assert f"ValueError: OFFLOAD_CPU_ADAM_ISA: expected one of {', '.join(ISAS)}" in result.stderr
    assert "sse9" in result.stderr


def test_the_bench_runs(tmp_path: Path) -> None:
    command = [
        sys.executable,
        str(ROOT / "bench" / "cpu_adam.py"),
        "--smoke",
        "--json",
        str(tmp_path / "out.json"),
    ]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    report = json.loads((tmp_path / "out.json").read_text(encoding="utf-8"))
    assert report["machine"]["isa"] == cpu_adam.isa()
    assert len(report["table"]) == 10
    assert all(row["milliseconds"] > 0 for row in report["table"])


# ---- bad input ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "named"),
    [
        ({"lr": -1.0}, "lr"),
        ({"lr": math.nan}, "lr"),
        ({"eps": -1e-8}, "eps"),
        ({"weight_decay": math.inf}, "weight_decay"),
        ({"beta1": 1.0}, "beta1"),
        ({"beta2": -0.1}, "beta2"),
        ({"step": 0}, "step"),
        ({"grad_scale": math.inf}, "grad_scale"),
    ],
)
def test_hyper_parameters_outside_their_range(values: dict[str, float], named: str) -> None:
    with pytest.raises(ValueError, match=rf"^{named}: expected .* but got .*; "):
        replace(HYPER, **values)  # type: ignore[arg-type]


GOOD: dict[str, object] = {
    "numel": 16,
    "grad": 0x10000,
    "grad_dtype": Dtype.FLOAT32,
    "master": 0x20000,
    "master_kind": MasterKind.FLOAT32,
    "exp_avg": 0x30000,
    "exp_avg_sq": 0x40000,
    "hyper": HYPER,
}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"numel": -1}, "numel: expected 0 or more"),
        ({"grad": 0}, "grad: expected the address of 16 elements"),
        ({"exp_avg": 0x30002}, "exp_avg: expected an address that is a multiple of 4 B"),
        ({"exp_avg": 0x20000 + 60}, "exp_avg: expected a range of its own but it overlaps master by 4 B"),
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
def test_bad_ranges_are_refused(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        cpu_adam.adam_step(**{**GOOD, **change})  # type: ignore[arg-type]
    assert "; " in str(caught.value), "an error says what to do"


def test_helpers_refuse_bad_ranges() -> None:
    for call in (
        lambda: cpu_adam.sum_of_squares(0, Dtype.FLOAT32, 1),
        lambda: cpu_adam.sum_of_squares(0x10001, Dtype.BFLOAT16, 1),
        lambda: cpu_adam.accumulate(0x10000, 0x10000, Dtype.BFLOAT16, 4),
        lambda: cpu_adam.accumulate_same(0x10000, 0x10006, Dtype.BFLOAT16, 4),
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
    cpu_adam.accumulate(0, 0, Dtype.BFLOAT16, 0)
    cpu_adam.convert(0, Dtype.BFLOAT16, 0, Dtype.FLOAT32, 0)
    cpu_adam.split_master(0, 0, 0, 0)
    cpu_adam.adam_step(
        numel=0,
        grad=0,
        grad_dtype=Dtype.BFLOAT16,
        master=0,
        master_kind=MasterKind.SPLIT,
        exp_avg=0,
        exp_avg_sq=0,
        hyper=HYPER,
    )
