"""Tensors that lie in files: where, in which order and dtype, and how their elements are read.

Owns the reading of bytes. Knows no format but that of safetensors, which is a list of such places. Next:
:mod:`offload.checkpoint.foreign.inert` finds them in the files of ``torch.save``.
"""

from __future__ import annotations

import dataclasses
import math
import mmap
from pathlib import Path

import numpy as np
import torch

from offload.checkpoint.safetensors_files import find_tensors, read_at
from offload.errors import ConfigError


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
        target = elements.view(torch.uint8).numpy().data
        offset = self.offset_bytes + start * self.dtype.itemsize
        try:
            with self.path.open("rb", buffering=0) as file:
                done = read_at(file.fileno(), target, offset)
        except OSError as error:
            raise ConfigError(f"{self.path}: cannot be read: {error}") from error
        if done < len(target):
            raise ConfigError(
                f"{self.path}: expected {len(target)} bytes at {offset} but got {done}; it was cut off since it was "
                "opened: copy it again"
            )
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
    return {
        name: FileTensor(path, found.offset_bytes, found.shape, contiguous_stride(found.shape), found.dtype)
        for name, found in find_tensors(path).items()
    }
