"""Kernels of a CUDA device, without one: the same text, as C++ for the host, has the bits of the CPU's kernels.

NVRTC needs no GPU to compile it. What comes out runs on one alone: an engine compares before it uses it, and
tests/test_cuda.py trains.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib.metadata
import itertools
import os
import platform
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import offload
from offload.kernels import cpu_adam, nvrtc
from offload.kernels.cpu_adam import SUM_BLOCK, Dtype, Hyper, MasterKind, StateKind, StepArrays
from offload.kernels.on_device import Measured
from offload.memory import device_kernels
from offload.memory.device_kernels import CudaKernels

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "csrc" / "cpu_adam"
KERNELS = {"STEP": ["step"], "MOVE": ["convert", "accumulate"], "SUM": ["sum_blocks", "sum_ranges"]}
COMPILER = shutil.which(os.environ.get("CXX", "c++"))

RESULTS, INPUTS = 0x8000, 0x0040  # of subnormal numbers that are zero, in the register of SSE

pytestmark = [
    pytest.mark.skipif(COMPILER is None, reason="no C++ compiler"),
    pytest.mark.skipif(platform.machine() not in ("x86_64", "AMD64"), reason="the emulation is one of x86-64"),
]


class _Loaded:
    """As :class:`offload.kernels.nvrtc.Program`."""

    def __init__(self, library: ctypes.CDLL, flushes: int) -> None:
        self._library = library
        self._flushes = flushes

    def launch(self, name: str, blocks: int, stream: int, *arguments: Any) -> None:
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        function = getattr(self._library, f"launch_{name}")
        function.restype = ctypes.c_bool
        if not function(places, ctypes.c_size_t(blocks), ctypes.c_uint(self._flushes)):
            raise nvrtc.CudaError(f"{name}: threads of a warp have parted")


class Emulated:
    """Compiles the kernels for the host."""

    def __init__(self, folder: Path, change: Callable[[str], str] = str, flushes: int = RESULTS | INPUTS) -> None:
        self._folder = folder
        self._flushes = flushes
        self._made: dict[tuple[str, ...], _Loaded] = {}
        self._source = folder / "on_cuda.cu"
        self._source.write_text(change((SOURCES / "on_cuda.cu").read_text()))

    def get(self, *macros: str, flush: bool) -> Any:
        if macros not in self._made:
            assert COMPILER is not None
            stem = self._folder / f"kernels{len(self._made)}"
            warps = str(macros[0] == "SUM").lower()
            launches = "".join(f"LAUNCH({name}, {warps})\n" for name in KERNELS[macros[0]])
            text = f'#include "{TESTS}/emulated.h"\n#include "{self._source}"\n{launches}'
            stem.with_suffix(".cpp").write_text(text)
            command = [
                COMPILER,
                "-std=c++20",
                "-O1",
                "-Wl,-Bsymbolic",
                "-ffp-contract=off",
                "-fno-math-errno",
                "-w",
                "-shared",
                "-fPIC",
            ]  # libc has a step, too
            defined = [f"-D{macro}" for macro in ("OFFLOAD_ON_CUDA", *macros)]
            files = [str(stem.with_suffix(".cpp")), "-o", str(stem.with_suffix(".so"))]
            subprocess.run([*command, f"-I{SOURCES}", *defined, *files], check=True, capture_output=True, text=True)
            self._made[macros] = _Loaded(ctypes.CDLL(str(stem.with_suffix(".so"))), self._flushes if flush else 0)
        return self._made[macros]


def kernels(folder: Path, change: Callable[[str], str] = str, **more: int) -> CudaKernels:
    return CudaKernels(torch.device("cpu"), Emulated(folder, change, **more), lambda: 0)


def counted(folder: Path) -> tuple[CudaKernels, list[str]]:
    """Return kernels, and the names of those that are launched."""
    programs, launched = Emulated(folder), list[str]()

    class Counting:
        def get(self, *macros: str, flush: bool) -> Any:
            program = programs.get(*macros, flush=flush)

            class One:
                def launch(self, name: str, blocks: int, stream: int, *arguments: Any) -> None:
                    launched.append(name)
                    program.launch(name, blocks, stream, *arguments)

            return One()

    return CudaKernels(torch.device("cpu"), Counting(), lambda: 0), launched


@pytest.mark.parametrize(
    ("rules", "kind", "dtype"),
    [
        ({0, 1, 2, 3, 4}, StateKind.FLOAT32, Dtype.FLOAT32),
        ({0}, StateKind.FLOAT32, Dtype.BFLOAT16),
        ({0}, StateKind.FLOAT32, Dtype.FLOAT16),
        ({0}, StateKind.BFLOAT16, Dtype.BFLOAT16),
    ],
)
def test_bits_are_the_cpus(rules: set[int], kind: StateKind, dtype: Dtype, tmp_path: Path) -> None:
    assert kernels(tmp_path).refusal(rules, kind, {dtype}) is None


@pytest.mark.parametrize(
    ("right", "wrong", "text"),
    [
        ("Mode::kStep, Dtype::GRADIENT", "Mode::kStep, Dtype::kBfloat16", "Adam of FLOAT32 gradients"),
        ("half = kSumLanes / 2", "half = kSumLanes / 4", "sum of squares"),
        ("begin < chunks; begin += kWarp", "begin < 1; begin += kWarp", "sum of squares"),
        ("args.offset = range.offset", "args.offset = 0", "Adam of BFLOAT16 gradients"),
        ("blockIdx.x - batch.first[own]", "blockIdx.x", "Adam of FLOAT32 gradients"),
        ("accumulate_range", "convert_range", "accumulation"),
    ],
)
def test_other_bits_are_seen(right: str, wrong: str, text: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        assert right in source
        return source.replace(right, wrong)

    kind, dtype = (StateKind.BFLOAT16, Dtype.BFLOAT16) if "offset" in right else (StateKind.FLOAT32, Dtype.FLOAT32)
    why = kernels(tmp_path, change).refusal({0}, kind, {dtype})
    assert why is not None and "other bits than the CPU's" in why and text in why


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        (
            "half /= 2) {\n        sum",
            "half /= 2) {\n        if (lane >= 2 * half) {\n            return;\n        }\n        sum",
        ),
        ("__shfl_sync(0xffffffffu, sum, k)", "__shfl_sync(0x0000ffffu, sum, k)"),
    ],
)
def test_threads_that_part_are_seen(right: str, wrong: str, tmp_path: Path) -> None:
    """CUDA does not define what they get of each other."""

    def change(source: str) -> str:
        assert right in source
        return source.replace(right, wrong)

    why = kernels(tmp_path, change).refusal({0}, StateKind.FLOAT32, {Dtype.FLOAT32})
    assert why is not None and "have parted" in why


def random(numel: int, number: int) -> torch.Tensor:
    return torch.randn(max(numel, 1), generator=torch.Generator().manual_seed(number))[:numel]


@pytest.mark.parametrize("most_blocks", [32, device_kernels.MOST_BLOCKS])
def test_many_ranges_are_measured_by_few_launches(
    most_blocks: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of two dtypes, some without elements, some longer than what one launch should measure."""
    monkeypatch.setattr(device_kernels, "MOST_BLOCKS", most_blocks)
    sizes = [0, 1, 4096, 16 * 4096, 16 * 4096 + 1, 40 * 16 * 4096 + 17, *range(5, 140), 0]
    numbers = [random(numel, position) for position, numel in enumerate(sizes)]
    numbers[3][[5, 60_000]] = float("inf")
    numbers = [tensor.bfloat16() if position % 3 else tensor for position, tensor in enumerate(numbers)]
    totals = torch.ones(2 * len(numbers), dtype=torch.float64)
    dtypes = [Dtype.BFLOAT16 if tensor.dtype is torch.bfloat16 else Dtype.FLOAT32 for tensor in numbers]
    found, launched = counted(tmp_path)
    places = [totals.data_ptr() + 16 * position for position in range(len(numbers))]
    found.sums_of_squares(
        [
            Measured(tensor.data_ptr(), dtype, tensor.numel(), place)
            for tensor, dtype, place in zip(numbers, dtypes, places, strict=True)
        ]
    )
    expected = [
        cpu_adam.sum_of_squares(tensor.data_ptr(), dtype, tensor.numel())
        for tensor, dtype in zip(numbers, dtypes, strict=True)
    ]
    assert found.read_totals(places) == expected
    assert (len(launched) == 6) == (most_blocks > 32), "94 and 48 ranges, of which one launch takes 56"


def test_many_ranges_are_updated_by_few_launches(tmp_path: Path) -> None:
    """Those of the same hyper-parameters; each with the bits that it has alone."""
    spec = offload.AdamW(lr=0.01, weight_decay=0.1)
    hypers = [Hyper(spec, 1, 0.5), Hyper(spec, 2, 0.5)]
    found, launched = counted(tmp_path)
    sizes = [*range(70), 513, 70_001]
    kinds = ("master", "grad", "first", "second")
    here = [{kind: random(numel, 7).abs() for kind in kinds} for numel in sizes]
    there = [{kind: tensor.clone() for kind, tensor in each.items()} for each in here]

    def steps(of: list[dict[str, torch.Tensor]]) -> list[tuple[StepArrays, Hyper]]:
        return [
            (
                StepArrays(
                    numel=numel,
                    grad=each["grad"].data_ptr(),
                    grad_dtype=Dtype.FLOAT32,
                    master=each["master"].data_ptr(),
                    master_kind=MasterKind.FLOAT32,
                    states=(each["first"].data_ptr(), each["second"].data_ptr()),
                ),
                hypers[numel % 5 == 0],
            )
            for numel, each in zip(sizes, of, strict=True)
        ]

    for arrays, hyper in steps(here):
        cpu_adam.step(arrays, hyper)
    found.steps(steps(there))
    for mine, theirs in zip(there, here, strict=True):
        assert all(torch.equal(mine[kind], theirs[kind]) for kind in kinds)
    assert launched == ["step"] * 3, "58 of the one, and 13 of the other"


@pytest.mark.parametrize("flushes", [RESULTS, INPUTS, 0])
@pytest.mark.parametrize("rule", [0, 1, 3])
def test_subnormal_numbers_that_are_not_zero_are_seen(rule: int, flushes: int, tmp_path: Path) -> None:
    """Those that come, and those that become it."""
    why = kernels(tmp_path, flushes=flushes).refusal({rule}, StateKind.FLOAT32, {Dtype.FLOAT32})
    assert why is not None and "other bits" in why


def test_the_comparison_is_made_once_whatever_modes_the_user_has(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    found = kernels(tmp_path)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"), torch.inference_mode():
            assert found.refusal({1}, StateKind.FLOAT32, {Dtype.FLOAT32}) is None
    finally:
        torch.set_default_dtype(before)
    assert len(found._compared) == 1 and caplog.text == ""
    other = tmp_path / "wrong"
    other.mkdir()
    wrong = kernels(other, lambda source: source.replace("accumulate_range", "convert_range"))
    for _ in range(3):
        assert "accumulation" in (wrong.refusal({1}, StateKind.FLOAT32, {Dtype.FLOAT32}) or "")
    assert caplog.text.count("updates go through host memory: other bits than the CPU's") == 1


def test_what_has_no_kernel_is_refused(tmp_path: Path) -> None:
    for rules, kind in ((set(), StateKind.FLOAT32), ({0}, StateKind.INT8)):
        assert "no kernels" in (kernels(tmp_path).refusal(rules, kind, {Dtype.FLOAT32}) or "")


def test_what_does_not_compile_is_told(tmp_path: Path) -> None:
    class Failing(Emulated):
        def get(self, *macros: str, flush: bool) -> Any:
            raise nvrtc.CudaError("nvrtcCompileProgram: NVRTC_ERROR_COMPILATION (6): no such thing")

    found = CudaKernels(torch.device("cpu"), Failing(tmp_path), lambda: 0)
    assert "no such thing" in (found.refusal({0}, StateKind.FLOAT32, {Dtype.FLOAT32}) or "")


def test_texts_are_those_of_the_sources() -> None:
    for name, text in nvrtc._cpu_adam.cuda_texts().items():
        assert text == (SOURCES / name).read_text(), f"{name}: run 'make venv'"


def test_constants_are_those_of_the_kernels() -> None:
    header = (SOURCES / "kernels.h").read_text()
    source = (SOURCES / "on_cuda.cu").read_text()
    assert f"kSumBlock = {SUM_BLOCK};" in header
    assert f"kChunk = {device_kernels._CHUNK_NUMEL // 1024} * 1024;" in header
    assert f"blockDim{{{nvrtc.THREADS}}}" in (TESTS / "emulated.h").read_text()
    assert f"kSumLanes = {device_kernels._WARP};" in header and f"kWarp = {device_kernels._WARP};" in source
    assert f"kRanges = {nvrtc.RANGES};" in source
    assert f"sizeof(StepBatch) == {ctypes.sizeof(nvrtc.StepBatch)})" in source
    assert f"sizeof(SumBatch) == {ctypes.sizeof(nvrtc.SumBatch)})" in source
    assert f"kGroup = {device_kernels._GROUP};" in (SOURCES / "groups.h").read_text()


@pytest.fixture(scope="module")
def library() -> str:
    """NVRTC."""
    for package in ("nvidia-cuda-nvrtc", "nvidia-cuda-nvrtc-cu12"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            for file in importlib.metadata.files(package) or ():
                if re.fullmatch(r"libnvrtc\.so\.\d+", file.name):
                    return str(file.locate())
    pytest.skip("no NVRTC")


def programs() -> Iterator[tuple[str, ...]]:
    """Return the macros of programs: every rule with all states, and every format with one of them."""
    dtypes = device_kernels._DTYPES.values()
    formats = list(itertools.product(dtypes, ("kSplit", *device_kernels._EMITS.values())))
    steps = list(itertools.product(device_kernels._RULES.values(), device_kernels._STATES.values()))
    assert len(formats) >= len(steps)
    for (rule, states), (gradient, master) in zip(itertools.cycle(steps), formats):
        yield "STEP", f"RULE={rule}", f"STATES={states}", f"GRADIENT={gradient}", f"MASTER={master}"
    for dtype, other in itertools.product(dtypes, dtypes):
        yield "MOVE", f"FROM={dtype}", f"TO={other}"
    for dtype in dtypes:
        yield "SUM", f"FROM={dtype}"


def test_nvrtc_compiles_the_kernels(library: str) -> None:
    compiler = nvrtc.Compiler([library], (9, 0))
    for macros in programs():
        image = compiler.compile(macros, flush=macros[0] != "MOVE")
        assert all(name.encode() in image for name in KERNELS[macros[0]]), macros


def test_a_newer_device_of_a_known_generation_has_kernels(library: str) -> None:
    assert nvrtc.Compiler([library], (9, 9))._architecture == "--gpu-architecture=sm_90"
    assert nvrtc.Compiler([library], (99, 1))._architecture == "--gpu-architecture=sm_991", "NVRTC says why not"


def test_no_library_is_told() -> None:
    with pytest.raises(nvrtc.CudaError, match="no-such-library.*libm.so.6: it has no nvrtcGetCUBIN"):
        nvrtc.Compiler(["no-such-library.so", "libm.so.6"], (9, 0))
