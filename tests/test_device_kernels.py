"""Kernels of a CUDA device, without one: the same text, as C++ for the host, has the bits of the CPU's kernels.

What NVRTC makes of it is shown on a GPU alone: an engine compares before it uses it, and tests/test_cuda.py trains.
"""

from __future__ import annotations

import ctypes
import os
import platform
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from offload.kernels import cpu_adam, nvrtc
from offload.kernels.cpu_adam import Dtype, StateKind
from offload.memory import device_kernels
from offload.memory.device_kernels import CudaKernels

TESTS = Path(__file__).resolve().parent
SOURCES = TESTS.parent / "csrc" / "cpu_adam"
KERNELS = {"STEP": ["step"], "MOVE": ["convert", "accumulate"], "SUM": ["sum_lanes", "sum_chunks", "sum_all"]}
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

    def launch(self, name: str, threads: int, stream: int, *arguments: Any) -> None:
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        blocks = ctypes.c_size_t(-(-threads // nvrtc.THREADS))
        getattr(self._library, f"launch_{name}")(places, blocks, ctypes.c_uint(self._flushes))


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
            launches = "".join(f"LAUNCH({name})\n" for name in KERNELS[macros[0]])
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
        ("half /= 2) {\n            for", "half /= 3) {\n            for", "sum of squares"),
        ("accumulate_range", "convert_range", "accumulation"),
    ],
)
def test_other_bits_are_seen(right: str, wrong: str, text: str, tmp_path: Path) -> None:
    def change(source: str) -> str:
        assert right in source
        return source.replace(right, wrong)

    why = kernels(tmp_path, change).refusal({0}, StateKind.FLOAT32, {Dtype.FLOAT32})
    assert why is not None and "other bits than the CPU's" in why and text in why


@pytest.mark.parametrize("numel", [0, 1, 4096, 16 * 4096 + 1, 5 * 16 * 4096, 100 * 4096 + 17])
def test_a_sum_in_pieces_has_the_bits_of_one(numel: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(device_kernels, "PIECE_BLOCKS", 32)
    numbers = torch.randn(max(numel, 1), generator=torch.Generator().manual_seed(numel))[:numel]
    if numel > 200_000:
        numbers[[5, 150_000]] = float("inf")
    found, total = kernels(tmp_path), torch.ones(2, dtype=torch.float64)
    found.sum_of_squares(numbers.data_ptr(), Dtype.FLOAT32, numel, total=total.data_ptr())
    assert found.read_totals([total.data_ptr()]) == [cpu_adam.sum_of_squares(numbers.data_ptr(), Dtype.FLOAT32, numel)]


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
    assert ctypes.sizeof(nvrtc.StepArgs) == 192
    assert f"kSumLanes = {device_kernels._LANES};" in header
    assert f"kGroup = {device_kernels._GROUP};" in (SOURCES / "groups.h").read_text()


def test_no_library_is_told() -> None:
    with pytest.raises(nvrtc.CudaError, match="no-such-library.*libm.so.6: it has no nvrtcGetCUBIN"):
        nvrtc.Compiler(["no-such-library.so", "libm.so.6"], (9, 0))
