"""Updates on a CUDA device, by the kernels of ``csrc/cpu_adam`` as NVRTC compiles them.

Owns which of them there are, and the streams that they are given to. They are used on a device whose bits were compared
with those of :mod:`offload.kernels.cpu_adam` in this process. Next: :mod:`offload.shards.device_updates` calls them.
"""

from __future__ import annotations

import ctypes
import functools
import logging
from collections.abc import Callable, Collection, Iterator, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch

from offload.kernels import cpu_adam, optimizers
from offload.kernels.cpu_adam import SUM_BLOCK, Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.nvrtc import (
    RANGES,
    THREADS,
    Compiler,
    Driver,
    Program,
    StepBatch,
    StepRange,
    SumBatch,
    SumRange,
)
from offload.kernels.on_device import TOTAL_BYTES, Measured
from offload.memory.arena import bytes_at
from offload.spec import OptimizerSpec
from offload.torch_private import no_dispatch, no_functions

logger = logging.getLogger(__name__)

_RULES = {0: "Adam", 1: "Sgd", 2: "Momentum", 3: "Lion", 4: "Adagrad"}  # csrc/cpu_adam/rules.h, by kernels.h
_STATES = {StateKind.FLOAT32: "Float32States", StateKind.BFLOAT16: "Bfloat16States"}
_DTYPES = {Dtype.FLOAT32: "kFloat32", Dtype.BFLOAT16: "kBfloat16", Dtype.FLOAT16: "kFloat16"}
_EMITS = {None: "kFloat32", Dtype.BFLOAT16: "kEmitBfloat16", Dtype.FLOAT16: "kEmitFloat16"}
TORCH_DTYPE = {Dtype.FLOAT32: torch.float32, Dtype.BFLOAT16: torch.bfloat16, Dtype.FLOAT16: torch.float16}
_SPECS: dict[int, OptimizerSpec] = {  # one for each rule
    0: optimizers.AdamW(lr=0.01, weight_decay=0.1),
    1: optimizers.SGD(lr=0.01, weight_decay=0.1),
    2: optimizers.SGD(lr=0.01, momentum=0.9, nesterov=True),
    3: optimizers.Lion(lr=0.01, weight_decay=0.1),
    4: optimizers.Adagrad(lr=0.01),
}
_GROUP = 2  # elements of a thread; kGroup in csrc/cpu_adam/groups.h
_WARP = 32
_CHUNK_NUMEL = 16 * SUM_BLOCK  # kChunk in csrc/cpu_adam/kernels.h
MOST_BLOCKS = 1 << 17  # that one launch measures, but for a longer range: 536 M elements, whose sums take 2 MiB


class Programs(Protocol):
    """Kernels that are compiled when they are asked for first."""

    def get(self, *macros: str, flush: bool) -> Program:
        """Return what ``on_cuda.cu`` is with these macros; with `flush`, subnormal numbers count as zero."""


class _Compiled:
    """Programs of one device, and what compiles and runs them, which is looked for when the first is asked for."""

    def __init__(self, place: torch.device) -> None:
        self._place = place
        self._made: dict[tuple[tuple[str, ...], bool], Program] = {}

    def get(self, *macros: str, flush: bool) -> Program:
        """Return what was compiled, or compile it."""
        key = macros, flush
        if key not in self._made:
            self._made[key] = Program(self._driver, self._compiler.compile(macros, flush=flush))
        return self._made[key]

    @functools.cached_property
    def _driver(self) -> Driver:
        return Driver(self._place.index)

    @functools.cached_property
    def _compiler(self) -> Compiler:
        version = (torch.version.cuda or "").partition(".")[0]
        brings_it_along = Path(torch.__file__).parent / "lib" / "libcaffe2_nvrtc.so"
        names = [str(brings_it_along), f"libnvrtc.so.{version}", "libnvrtc.so"]
        return Compiler(names, torch.get_device_module(self._place).get_device_capability(self._place))


class CudaKernels:
    """Kernels of one CUDA device. See :class:`offload.kernels.on_device.DeviceKernels`."""

    def __init__(self, place: torch.device, programs: Programs, stream: Callable[[], int]) -> None:
        """Have them compiled where they are needed.

        Args:
            place: the device.
            programs: of it.
            stream: tells the driver's handle of the stream that is current.
        """
        self._place = place
        self._programs = programs
        self._stream = stream
        self._compared: dict[tuple[frozenset[int], StateKind, frozenset[Dtype]], str | None] = {}

    def steps(self, steps: Sequence[tuple[StepArrays, Hyper]]) -> None:
        """Give the stream updates: those of the same hyper-parameters and formats together."""
        alike: dict[tuple[Any, ...], list[tuple[StepArrays, Hyper]]] = {}
        for arrays, hyper in steps:
            assert arrays.target is None and arrays.state_kind in _STATES
            formats = arrays.state_kind, arrays.grad_dtype, arrays.master_kind, arrays.emit_dtype
            alike.setdefault((*formats, arrays.seed, id(hyper)), []).append((arrays, hyper))
        for same in alike.values():
            self._steps([arrays for arrays, _ in same if arrays.numel], same[0][1])

    def _steps(self, alike: Sequence[StepArrays], hyper: Hyper) -> None:
        for first in range(0, len(alike), RANGES):
            arrays = alike[first]
            master = "kSplit" if arrays.master_kind is MasterKind.SPLIT else _EMITS[arrays.emit_dtype]
            program = self._programs.get(
                "STEP",
                f"RULE={_RULES[hyper.spec.kernel]}",
                f"STATES={_STATES[arrays.state_kind]}",
                f"GRADIENT={_DTYPES[arrays.grad_dtype]}",
                f"MASTER={master}",
                flush=True,
            )
            given = StepBatch(seed=arrays.seed, step=hyper.step)
            given.constants[:] = hyper.constants()
            blocks = 0
            for place, one in enumerate(alike[first : first + RANGES]):
                states = (*one.states, 0, 0)[:2]
                given.ranges[place] = StepRange(
                    one.grad, one.param, one.master, *states, one.emit, one.offset, one.numel
                )
                given.first[place], given.count = blocks, place + 1
                blocks += -(-one.numel // (_GROUP * THREADS))
            self._launch(program, "step", blocks, given)

    def take_gradient(self, *, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int, add: bool) -> None:
        """Give the stream a copy or a sum."""
        if add:
            self._move("accumulate", src, src_dtype, dst, dst_dtype, numel)
        else:
            self.convert(src, src_dtype, dst, dst_dtype, numel)

    def sums_of_squares(self, ranges: Sequence[Measured]) -> None:
        """Give the stream sums: blocks of elements, then all of each range."""
        for dtype in dict.fromkeys(each.dtype for each in ranges):
            batch: list[Measured] = []
            blocks = 0
            for each in (each for each in ranges if each.dtype is dtype):
                more = _sum_blocks(each.numel)
                if batch and (len(batch) == RANGES or blocks + more > MOST_BLOCKS):
                    self._sums(batch, blocks)
                    batch, blocks = [], 0
                batch.append(each)
                blocks += more
            self._sums(batch, blocks)

    def _sums(self, batch: Sequence[Measured], blocks: int) -> None:
        program = self._programs.get("SUM", f"FROM={_DTYPES[batch[0].dtype]}", flush=True)
        with no_functions(), no_dispatch():
            scratch = torch.empty(2 * blocks, dtype=torch.float64, device=self._place)
        given = SumBatch(scratch.data_ptr(), scratch.data_ptr() + 8 * blocks, count=len(batch))
        begin = 0
        for place, each in enumerate(batch):
            given.ranges[place] = SumRange(each.address, each.numel, each.total)
            given.first[place] = begin
            begin += _sum_blocks(each.numel) * _WARP // THREADS
        self._launch(program, "sum_blocks", begin, given)
        self._launch(program, "sum_ranges", -(-len(batch) * _WARP // THREADS), given)

    def convert(self, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int) -> None:
        """Give the stream a conversion."""
        if src_dtype is dst_dtype:
            size = numel * src_dtype.itemsize
            bytes_at(dst, size, self._place).copy_(bytes_at(src, size, self._place))
        else:
            self._move("convert", src, src_dtype, dst, dst_dtype, numel)

    def read_totals(self, addresses: Sequence[int]) -> list[tuple[float, int]]:
        """Copy what was measured to the host, in one piece, and wait for it."""
        if not addresses:
            return []
        begin = min(addresses)
        found = bytes_at(begin, max(addresses) + TOTAL_BYTES - begin, self._place).cpu()
        values, counts = found.view(torch.float64).tolist(), found.view(torch.int64).tolist()
        return [(values[(at - begin) // 8], counts[(at - begin) // 8 + 1]) for at in addresses]

    def refusal(self, rules: Collection[int], kind: StateKind, dtypes: Collection[Dtype]) -> str | None:
        """Compile what updates of such parameters need, and compare its bits with the CPU's, once; log why not."""
        if not have_kernels(rules, kind):
            return "there are no kernels for such states, or such steps"
        key = frozenset(rules), kind, frozenset(dtypes)
        if key not in self._compared:
            try:
                self._compared[key] = self._compare(rules, kind, dtypes)
            except torch.OutOfMemoryError as error:  # there may be room next time
                return str(error)
            if self._compared[key] is not None:
                logger.warning("%s: updates go through host memory: %s", self._place, self._compared[key])
        return self._compared[key]

    def _compare(self, rules: Collection[int], kind: StateKind, dtypes: Collection[Dtype]) -> str | None:
        try:
            with no_functions(), no_dispatch(), torch.inference_mode(False):  # modes of the user, a default device too
                found = list(_Comparison(self, self._place).run(rules, kind, dtypes))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            return str(error)
        differing = [text for text, equal in found if not equal]
        return f"other bits than the CPU's: {', '.join(differing)}" if differing else None

    def _move(self, name: str, src: int, src_dtype: Dtype, dst: int, dst_dtype: Dtype, numel: int) -> None:
        if numel:
            program = self._programs.get("MOVE", f"FROM={_DTYPES[src_dtype]}", f"TO={_DTYPES[dst_dtype]}", flush=False)
            places = map(ctypes.c_uint64, (src, dst))
            self._launch(program, name, -(-numel // (_GROUP * THREADS)), *places, ctypes.c_size_t(numel))

    def _launch(self, program: Program, name: str, blocks: int, *arguments: Any) -> None:
        if blocks:
            program.launch(name, blocks, self._stream(), *arguments)


def _sum_blocks(numel: int) -> int:
    """Return the blocks of whole chunks that have room for `numel` elements."""
    return -(-numel // _CHUNK_NUMEL) * (_CHUNK_NUMEL // SUM_BLOCK)


# Subnormal numbers, those whose squares, products and steps are, and what is not finite.
_SPECIAL = (
    *(0.0, -0.0, 1e-41, -1e-39, 2e-18, -2e-38, 1.176e-38, 1e-37, 5e-37, 3e38),
    *(float("inf"), float("-inf"), float("nan")),
)
_SCALES = (0.5, 0.5, 2.0**30)  # of gradients, in three steps: the last one makes normal numbers of subnormal ones


class _Comparison:
    """Runs kernels of a device and the CPU's on the same numbers, those that are not finite or subnormal among them."""

    NUMEL = _CHUNK_NUMEL + 4501  # two chunks; neither the last block nor the last thread's group is full
    CUT = 3001  # of two ranges that are updated together
    MANY = 35  # times as many elements have more chunks than a warp has threads

    def __init__(self, kernels: CudaKernels, place: torch.device) -> None:
        self._kernels = kernels
        self._place = place
        self._generator = torch.Generator().manual_seed(0)

    def run(self, rules: Collection[int], kind: StateKind, dtypes: Collection[Dtype]) -> Iterator[tuple[str, bool]]:
        """Give what was compared, and whether all bits are equal."""
        for dtype in sorted(dtypes, key=lambda dtype: dtype.value):
            for gradient in dict.fromkeys((dtype, Dtype.FLOAT32)):
                name = f"of {gradient.name} gradients"
                yield f"sum of squares {name}", self._sum(gradient)
                yield f"accumulation {name}", self._take(dtype, gradient, add=True)
                yield f"conversion {name}", self._take(dtype, gradient, add=False)
                for rule in sorted(rules):
                    yield f"{_RULES[rule]} {name}, {dtype.name} parameters", self._step(rule, kind, dtype, gradient)

    def _numbers(self, dtype: Dtype = Dtype.FLOAT32, *, each: bool = False) -> torch.Tensor:
        """Return numbers; each special one meets all of an array with `each` in one without."""
        float32, many = torch.float32, len(_SPECIAL)
        scales = 10.0 ** torch.randint(-6, 3, (self.NUMEL,), generator=self._generator).to(float32)
        found = torch.randn(self.NUMEL, generator=self._generator, dtype=float32) * scales
        special = torch.tensor(_SPECIAL, dtype=float32)
        found[100 : 100 + many**2] = special.repeat_interleave(many) if each else special.repeat(many)
        return found.to(TORCH_DTYPE[dtype])

    def _sum(self, dtype: Dtype) -> bool:
        here = self._numbers(dtype)
        finite = here[1000:].clone()
        tried = [here, finite, finite.repeat(self.MANY), finite[:0], finite[:1], finite[1 : SUM_BLOCK + 2]]
        there = [numbers.to(self._place, copy=True) for numbers in tried]
        totals = torch.ones(2 * len(tried), dtype=torch.float64, device=self._place)
        places = [totals.data_ptr() + number * TOTAL_BYTES for number in range(len(tried))]
        self._kernels.sums_of_squares(
            [Measured(t.data_ptr(), dtype, t.numel(), place) for t, place in zip(there, places, strict=True)]
        )
        expected = [cpu_adam.sum_of_squares(numbers.data_ptr(), dtype, len(numbers)) for numbers in tried]
        return str(self._kernels.read_totals(places)) == str(expected)  # a NaN is itself, as text

    def _take(self, source: Dtype, target: Dtype, *, add: bool) -> bool:
        src, dst = self._numbers(source, each=True), self._numbers(target)
        there, onto = src.to(self._place, copy=True), dst.to(self._place, copy=True)
        self._kernels.take_gradient(
            src=there.data_ptr(),
            src_dtype=source,
            dst=onto.data_ptr(),
            dst_dtype=target,
            numel=self.NUMEL,
            add=add,
        )
        cpu_adam.take_gradient(
            src=src.data_ptr(),
            src_dtype=source,
            dst=dst.data_ptr(),
            dst_dtype=target,
            numel=self.NUMEL,
            add=add,
            measure=False,
        )
        return _same_bits(onto, dst)

    def _step(self, rule: int, kind: StateKind, dtype: Dtype, gradient: Dtype) -> bool:
        spec = _SPECS[rule]
        split, half = dtype is Dtype.BFLOAT16, dtype is Dtype.FLOAT16
        here = {"master": self._numbers(), "grad": self._numbers(gradient, each=True)}
        if split:
            here["param"] = torch.empty(self.NUMEL, dtype=torch.bfloat16)
            remainder = torch.empty(self.NUMEL, dtype=torch.int16)
            cpu_adam.split_master(here["master"].data_ptr(), here["param"].data_ptr(), remainder.data_ptr(), self.NUMEL)
            here["master"] = remainder
        if half:
            here["emit"] = torch.empty(self.NUMEL, dtype=torch.float16)
        width = torch.float32 if kind is StateKind.FLOAT32 else torch.bfloat16
        here |= {name: torch.zeros(self.NUMEL, dtype=width) for name in spec.states}
        there = {name: tensor.to(self._place, copy=True) for name, tensor in here.items()}
        equal = True
        for step, scale in enumerate(_SCALES, 1):
            hyper = Hyper(spec, step, scale)
            steps = [
                [
                    StepArrays(
                        numel=end - begin,
                        grad=_at(at["grad"], begin),
                        grad_dtype=gradient,
                        master=_at(at["master"], begin),
                        master_kind=MasterKind.SPLIT if split else MasterKind.FLOAT32,
                        states=tuple(_at(at[name], begin) for name in spec.states),
                        param=_at(at["param"], begin) if split else 0,
                        state_kind=kind,
                        emit=_at(at["emit"], begin) if half else 0,
                        emit_dtype=dtype if half else None,
                        seed=7,
                        offset=3 + begin,
                    )
                    for begin, end in ((0, self.CUT), (self.CUT, self.NUMEL))
                ]
                for at in (here, there)
            ]
            for arrays in steps[0]:
                cpu_adam.step(arrays, hyper)
            self._kernels.steps([(arrays, hyper) for arrays in steps[1]])
            equal = equal and all(_same_bits(there[name], tensor) for name, tensor in here.items())
        return equal


def _at(tensor: torch.Tensor, element: int) -> int:
    return tensor.data_ptr() + element * tensor.itemsize


def _same_bits(there: torch.Tensor, here: torch.Tensor) -> bool:
    return torch.equal(there.cpu().view(torch.uint8), here.view(torch.uint8))


def have_kernels(rules: Collection[int], kind: StateKind) -> bool:
    """Tell whether a device of CUDA has kernels for steps by these rules, with states that are stored so."""
    return bool(rules) and _RULES.keys() >= set(rules) and kind in _STATES


@functools.cache
def open_kernels(place: torch.device) -> CudaKernels | None:
    """Return the kernels of a device; None where it is not CUDA's."""
    if place.type != "cuda" or torch.version.cuda is None:
        return None
    module = torch.get_device_module(place)
    return CudaKernels(place, _Compiled(place), lambda: int(module.current_stream(place).cuda_stream))
