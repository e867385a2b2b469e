"""Tensors that lie in files: where, in which order and dtype, and how their elements are read.

Owns the reading of bytes. Knows no format but that of safetensors, which is a list of such places. Next:
:mod:`offload.checkpoint.foreign.inert` finds them in the files of ``torch.save``.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from offload.errors import ConfigError

_SAFE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_MOST_HEADER_BYTES = 100 << 20  # as the library has it


@dataclasses.dataclass(frozen=True, slots=True)
class FileTensor:
    """A tensor in a file.

    Attributes:
        path: the file.
        offset_bytes: of the first element.
        shape: of the tensor.
        stride: in elements, per dimension.
        dtype: of the elements.
    """

    path: Path
    offset_bytes: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) in row-major order.

        Raises:
            ConfigError: the file ends before them, or cannot be read.
        """
        if self.stride != contiguous_stride(self.shape) and stop - start:
            return self._read_strided(start, stop)
        elements = torch.empty(stop - start, dtype=self.dtype, device="cpu")
        target: Any = elements.view(torch.uint8).numpy()
        done, offset = 0, self.offset_bytes + start * self.dtype.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                while done < len(target):
                    count = os.preadv(file.fileno(), [target[done:]], offset + done)
                    if not count:
                        raise ConfigError(
                            f"{self.path}: expected {len(target)} bytes at {offset} but got {done}; it was cut off "
                            "since it was opened: copy it again"
                        )
                    done += count
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from error
        return elements

    def _read_strided(self, start: int, stop: int) -> torch.Tensor:
        """Return elements that do not lie one behind the other: those of the rows that have them."""
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        size = self.dtype.itemsize
        try:
            with self.path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
                strides = tuple(step * size for step in self.stride)
                lie = np.ndarray(self.shape, f"V{size}", mapped, self.offset_bytes, strides)
                rows = np.ascontiguousarray(lie[first:last]).copy()
                del lie
        except (OSError, TypeError, ValueError) as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from error
        elements = torch.frombuffer(bytearray(rows.tobytes()), dtype=self.dtype)
        return elements[start - first * row : stop - first * row]


def contiguous_stride(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a tensor whose elements lie in row-major order."""
    return tuple(math.prod(shape[dimension + 1 :]) for dimension in range(len(shape)))


def read_safetensors(path: Path) -> dict[str, FileTensor]:
    """Return the tensors of a safetensors file by name.

    Raises:
        ConfigError: it is none, or was cut off.
    """
    try:
        size_bytes = path.stat().st_size
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if not 2 <= length <= min(_MOST_HEADER_BYTES, size_bytes - 8):
                raise ValueError("no header")
            header = json.loads(file.read(length))
        found = {name: _entry(path, 8 + length, entry) for name, entry in header.items() if name != "__metadata__"}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(
            f"{path}: expected a safetensors file but got {type(error).__name__}: {error}; copy it again"
        ) from error
    for name, tensor in found.items():
        end = tensor.offset_bytes + math.prod(tensor.shape) * tensor.dtype.itemsize
        if end > size_bytes:
            raise ConfigError(
                f"{path}: expected {end} bytes, for {name}, but got {size_bytes}; it was cut off: copy it again"
            )
    return found


def _entry(path: Path, base: int, entry: Any) -> FileTensor:
    begin, end = entry["data_offsets"]
    shape = tuple(int(size) for size in entry["shape"])
    dtype = _SAFE_DTYPES[entry["dtype"]]
    if begin < 0 or end - begin != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"shape {shape} in {end - begin} bytes")
    return FileTensor(path, base + begin, shape, contiguous_stride(shape), dtype)
