"""CUDA kernels, compiled at run time by NVRTC, which torch brings along: no compiler is needed.

Owns the two libraries, NVRTC and the driver, and what their functions take. Knows neither torch nor what is computed:
the texts come from :mod:`offload.kernels.extension`. Next: :mod:`offload.memory.device_kernels` launches.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator, Sequence
from typing import Any

from offload.kernels.extension import _cpu_adam
from offload.spec import CONSTANTS

SOURCE = "on_cuda.cu"
_STANDARD, _HEADERS = "std_on_cuda.h", ("cmath", "cstddef", "cstdint", "type_traits")
THREADS = 256  # of a block

# Exact IEEE operations and explicit fma only, as in csrc/cpu_adam/CMakeLists.txt.
_OPTIONS = (
    "--std=c++17",
    "-default-device",
    "-DOFFLOAD_ON_CUDA",
    "--fmad=false",
    "--prec-div=true",
    "--prec-sqrt=true",
)


RANGES = 56  # that one launch works on; kRanges in csrc/cpu_adam/on_cuda.cu, as the structures


class StepRange(ctypes.Structure):
    """Addresses of one range to be updated."""

    _fields_ = [
        *((name, ctypes.c_uint64) for name in ("grad", "param", "master", "state0", "state1", "emit")),
        *((name, ctypes.c_uint64) for name in ("offset", "numel")),
    ]


class StepBatch(ctypes.Structure):
    """Ranges with the same hyper-parameters, and the first thread block of each."""

    _fields_ = [
        ("constants", ctypes.c_float * CONSTANTS),
        ("seed", ctypes.c_uint64),
        ("step", ctypes.c_uint64),
        ("ranges", StepRange * RANGES),
        ("first", ctypes.c_uint32 * RANGES),
        ("count", ctypes.c_uint32),
    ]


class SumRange(ctypes.Structure):
    """Addresses of one range to be measured, and of what is measured."""

    _fields_ = [(name, ctypes.c_uint64) for name in ("data", "numel", "total")]


class SumBatch(ctypes.Structure):
    """Ranges of one dtype, the first thread block of each, and where sums of blocks of elements wait."""

    _fields_ = [
        ("sums", ctypes.c_uint64),
        ("counts", ctypes.c_uint64),
        ("ranges", SumRange * RANGES),
        ("first", ctypes.c_uint32 * RANGES),
        ("count", ctypes.c_uint32),
    ]


class CudaError(RuntimeError):
    """A library of CUDA is missing, or a call of one has failed."""


class Program:
    """Kernels that were compiled together, in one device's memory."""

    def __init__(self, driver: Driver, image: bytes) -> None:
        """Load what a compiler has made.

        Raises:
            CudaError: the driver refuses it.
        """
        self._driver = driver
        self._module = ctypes.c_void_p()
        self._functions: dict[str, ctypes.c_void_p] = {}
        with driver.current():
            driver.call("cuModuleLoadData", ctypes.byref(self._module), image)

    def launch(self, name: str, blocks: int, stream: int, *arguments: Any) -> None:
        """Give a stream a kernel.

        Args:
            name: of the kernel.
            blocks: of :data:`THREADS` threads.
            stream: the driver's handle of it.
            *arguments: values of ctypes.

        Raises:
            CudaError: the driver refuses it.
        """
        places = (ctypes.c_void_p * len(arguments))(*(ctypes.addressof(argument) for argument in arguments))
        with self._driver.current():
            if name not in self._functions:
                function = ctypes.c_void_p()
                self._driver.call("cuModuleGetFunction", ctypes.byref(function), self._module, name.encode())
                self._functions[name] = function
            shape = (blocks, 1, 1, THREADS, 1, 1)
            self._driver.call("cuLaunchKernel", self._functions[name], *shape, 0, ctypes.c_void_p(stream), places, None)


class Driver:
    """CUDA's driver, for one device."""

    def __init__(self, index: int) -> None:
        """Use the device's context that all others use, too.

        Raises:
            CudaError: there is no driver, or no such device.
        """
        self._library = _library(("libcuda.so.1",), "cuLaunchKernel")
        device, self._context = ctypes.c_int(), ctypes.c_void_p()
        self.call("cuInit", 0)
        self.call("cuDeviceGet", ctypes.byref(device), index)
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(self._context), device)

    def call(self, name: str, *arguments: Any) -> None:
        """Call a function.

        Raises:
            CudaError: it has failed.
        """
        status = getattr(self._library, name)(*arguments)
        if status:
            said = ctypes.c_char_p()
            self._library.cuGetErrorString(status, ctypes.byref(said))
            raise CudaError(f"{name}: {said.value.decode() if said.value else 'unknown error'} ({status})")

    @contextlib.contextmanager
    def current(self) -> Iterator[None]:
        """Let this thread's calls in the ``with`` block be of this device."""
        self.call("cuCtxPushCurrent_v2", self._context)
        try:
            yield
        finally:
            self.call("cuCtxPopCurrent_v2", ctypes.byref(ctypes.c_void_p()))


class Compiler:
    """NVRTC, for devices of one compute capability."""

    def __init__(self, names: Sequence[str], capability: tuple[int, int]) -> None:
        """Find the library.

        Args:
            names: files that may be it, or bring it along.
            capability: of the device.

        Raises:
            CudaError: it is not there.
        """
        self._library = _library(names, "nvrtcGetCUBIN")
        self._architecture = f"--gpu-architecture=sm_{self._newest(*capability)}"

    def _newest(self, major: int, minor: int) -> int:
        """Return the newest architecture of a generation that NVRTC knows: its code runs on later ones, too."""
        count = ctypes.c_int()
        self._call("nvrtcGetNumSupportedArchs", ctypes.byref(count))
        known = (ctypes.c_int * count.value)()
        self._call("nvrtcGetSupportedArchs", known)
        wanted = 10 * major + minor
        return max((one for one in known if 10 * major <= one <= wanted), default=wanted)

    def compile(self, macros: Sequence[str], *, flush: bool) -> bytes:
        """Return what the driver loads, of :data:`SOURCE`.

        Args:
            macros: ``NAME`` or ``NAME=value``.
            flush: subnormal numbers count as zero.

        Raises:
            CudaError: NVRTC refuses it; has its log.
        """
        options = [*_OPTIONS, self._architecture, f"--ftz={str(flush).lower()}", *(f"-D{macro}" for macro in macros)]
        program = ctypes.c_void_p()
        texts = _texts()
        headers = [(name, text) for name, text in texts.items() if name != SOURCE]
        self._call(
            "nvrtcCreateProgram",
            ctypes.byref(program),
            texts[SOURCE].encode(),
            SOURCE.encode(),
            len(headers),
            _strings(text for _, text in headers),
            _strings(name for name, _ in headers),
        )
        try:
            try:
                self._call("nvrtcCompileProgram", program, len(options), _strings(options))
            except CudaError as error:
                log = self._bytes("nvrtcGetProgramLogSize", "nvrtcGetProgramLog", program)
                raise CudaError(f"{error}: {log.decode(errors='replace').strip()}") from None
            return self._bytes("nvrtcGetCUBINSize", "nvrtcGetCUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _bytes(self, sized: str, filled: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(sized, program, ctypes.byref(size))
        buffer = ctypes.create_string_buffer(size.value)
        self._call(filled, program, buffer)
        return buffer.raw

    def _call(self, name: str, *arguments: Any) -> None:
        status = getattr(self._library, name)(*arguments)
        if status:
            tell = self._library.nvrtcGetErrorString
            tell.restype = ctypes.c_char_p
            raise CudaError(f"{name}: {tell(status).decode()} ({status})")


@functools.cache
def _texts() -> dict[str, str]:
    """Return the source and its headers, by the names under which it includes them."""
    return {**_cpu_adam.cuda_texts(), **dict.fromkeys(_HEADERS, f'#include "{_STANDARD}"\n')}


def _strings(texts: Any) -> Any:
    encoded = [text.encode() for text in texts]
    return (ctypes.c_char_p * len(encoded))(*encoded)


def _library(names: Sequence[str], function: str) -> Any:
    """Return the first library that is there and has a function."""
    missing = []
    for name in names:
        try:
            library = ctypes.CDLL(name)
        except OSError as error:
            missing.append(str(error))
            continue
        if hasattr(library, function):
            return library
        missing.append(f"{name}: it has no {function}")
    raise CudaError("; ".join(missing))
