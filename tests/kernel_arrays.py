"""What the tests of the kernels share: arrays as bits at any alignment, and one step on a part of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.optimizers import Adam, AdamW

LENGTHS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 997, 4099, 2 * 65536 + 131)  # the last one: three chunks, one partial
ISAS = cpu_adam.available_isas()
STORAGE = {Dtype.FLOAT32: np.uint32, Dtype.BFLOAT16: np.uint16, Dtype.FLOAT16: np.uint16}
STATE_STORAGE = {StateKind.FLOAT32: np.uint32, StateKind.BFLOAT16: np.uint16, StateKind.INT8: np.uint8}
TORCH = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}

Bits = npt.NDArray[np.unsignedinteger]
Floats = npt.NDArray[np.float32]


@contextlib.contextmanager
def automatic() -> Iterator[None]:
    """Leave the choice of path and the number of threads as they were."""
    threads = cpu_adam.num_threads()
    try:
        yield
    finally:
        cpu_adam.force_isa(None)
        cpu_adam.set_num_threads(threads)


def add_gradient(acc: int, acc_dtype: Dtype, grad: int, grad_dtype: Dtype, numel: int) -> None:
    """Add a gradient to what is at `acc`, and measure nothing."""
    cpu_adam.take_gradient(
        src=grad, src_dtype=grad_dtype, dst=acc, dst_dtype=acc_dtype, numel=numel, add=True, measure=False
    )


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
    states: StateKind = StateKind.FLOAT32

    def __str__(self) -> str:
        emit = self.emit.name.lower() if self.emit else "none"
        adam = "adamw" if self.decoupled else "adam"
        return f"{self.grad.name.lower()}-{self.kind.value}-{emit}-{adam}-{self.states.value}"

    def of_its_kind(self, hyper: Hyper) -> Hyper:
        """Return the same options for AdamW or Adam."""
        return replace(hyper, spec=(AdamW if self.decoupled else Adam)(**hyper.spec.options()))


MASTERS = (
    (MasterKind.SPLIT, None),
    (MasterKind.FLOAT32, None),
    (MasterKind.FLOAT32, Dtype.BFLOAT16),
    (MasterKind.FLOAT32, Dtype.FLOAT16),
)
VARIANTS = [
    Variant(grad, kind, emit, decoupled, states)
    for states in StateKind
    for grad in Dtype
    for kind, emit in MASTERS
    for decoupled in (True, False)
    if decoupled or states is StateKind.FLOAT32 or grad is Dtype.BFLOAT16
]
every_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)
HYPER = Hyper(AdamW(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1), step=3, grad_scale=0.37)
# The third block of random numbers begins behind the 100th element of a range that starts at the first.
OFFSET = 2 * 65536 - 128


@dataclass
class Shard:
    """The arrays of one step, as bits, and the step itself on a part of them."""

    variant: Variant
    grad: Bits
    master: Bits
    exp_avg: Bits
    exp_avg_sq: Bits
    param: Bits
    units: Bits

    @staticmethod
    def random(variant: Variant, numel: int, seed: int, *, classes: bool) -> Shard:
        """Values of the usual sizes, or with `classes` any bits."""
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
            grad = gradient(rng.standard_normal(numel) * 1e-3, variant.grad)
        param = np.zeros(numel, np.uint16)
        master = words[0]
        if variant.kind is MasterKind.SPLIT:
            master = any_bits(rng, Dtype.BFLOAT16, numel) if classes else np.empty(numel, np.uint16)
            if classes:
                param = any_bits(rng, Dtype.BFLOAT16, numel)
            else:
                cpu_adam.split_master(address(words[0]), address(param), address(master), numel)
        shard = Shard(variant, grad, master, words[1], words[2], param, np.zeros(0, np.uint8))
        storage = STATE_STORAGE[variant.states]
        if variant.states is not StateKind.FLOAT32:
            shard.exp_avg, shard.exp_avg_sq = np.zeros(numel, storage), np.zeros(numel, storage)
            shard.units = np.zeros(variant.states.units_bytes(numel), np.uint8)
        if classes and variant.states is StateKind.BFLOAT16:
            shard.exp_avg, shard.exp_avg_sq = (any_bits(rng, Dtype.BFLOAT16, numel) for _ in range(2))
        elif classes and variant.states is StateKind.INT8:  # any code with any unit that is ever written
            shard.exp_avg, shard.exp_avg_sq = (rng.integers(0, 256, numel, np.uint8) for _ in range(2))
            shard.units = rng.integers(4, 225, len(shard.units), np.uint8)
        elif variant.states is not StateKind.FLOAT32:
            shard.store_moments(words[1].view(np.float32), words[2].view(np.float32))
        return shard

    def copy(self, offsets: tuple[int, int, int, int, int] = (0, 0, 0, 0, 0)) -> Shard:
        """Copy to memory that starts so many elements after a 64-byte boundary."""
        arrays = (self.grad, self.master, self.exp_avg, self.exp_avg_sq, self.param)
        return Shard(self.variant, *(placed(a, o) for a, o in zip(arrays, offsets, strict=True)), self.units.copy())

    def arrays(self, begin: int = 0, end: int | None = None) -> StepArrays:
        """Describe a part."""
        part = slice(begin, end)
        split = self.variant.kind is MasterKind.SPLIT
        blocks = self.variant.states is StateKind.INT8
        return StepArrays(
            numel=len(self.grad[part]),
            grad=address(self.grad[part]),
            grad_dtype=self.variant.grad,
            param=address(self.param[part]) if split else 0,
            master=address(self.master[part]),
            master_kind=self.variant.kind,
            states=(address(self.exp_avg[part]), address(self.exp_avg_sq[part])),
            state_kind=self.variant.states,
            units=address(self.units[begin // 128 * 2 :]) if blocks else 0,
            emit=address(self.param[part]) if self.variant.emit else 0,
            emit_dtype=self.variant.emit,
            seed=5,
            offset=OFFSET + begin,
        )

    def step(self, hyper: Hyper, begin: int = 0, end: int | None = None) -> Shard:
        cpu_adam.step(self.arrays(begin, end), self.variant.of_its_kind(hyper))
        return self

    def weights(self) -> Floats:
        if self.variant.kind is MasterKind.FLOAT32:
            return self.master.view(np.float32)
        joined = np.empty(len(self.master), np.float32)
        cpu_adam.join_master(address(self.param), address(self.master), address(joined), len(joined))
        return joined

    def moments(self) -> tuple[Floats, Floats]:
        """Return what the states are in float32."""
        values = np.empty(len(self.grad), np.float32), np.empty(len(self.grad), np.float32)
        cpu_adam.load_states(**self._recoding(*values), offset=OFFSET)
        return values

    def store_moments(self, exp_avg: Floats, exp_avg_sq: Floats, *, seed: int = 5, step: int = 1) -> None:
        cpu_adam.save_states(**self._recoding(exp_avg, exp_avg_sq), seed=seed, step=step, offset=OFFSET)

    def _recoding(self, exp_avg: Floats, exp_avg_sq: Floats) -> dict[str, Any]:
        return {
            "kind": self.variant.states,
            "values": (address(exp_avg), address(exp_avg_sq)),
            "states": (address(self.exp_avg), address(self.exp_avg_sq)),
            "units": address(self.units) if self.variant.states is StateKind.INT8 else 0,
            "numel": len(self.grad),
        }

    def assert_same(self, other: Shard, what: str) -> None:
        for name in ("grad", "master", "exp_avg", "exp_avg_sq", "param", "units"):
            np.testing.assert_array_equal(getattr(self, name), getattr(other, name), err_msg=f"{name}: {what}")


def gradient(values: npt.NDArray[np.float64], dtype: Dtype) -> Bits:
    """Round values to a gradient's dtype."""
    rounded = torch.from_numpy(values).to(TORCH[dtype])
    return rounded.view(torch.int32 if dtype is Dtype.FLOAT32 else torch.int16).numpy().view(STORAGE[dtype])
