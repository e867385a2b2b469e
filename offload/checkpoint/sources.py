"""Where the values of a parameter come from when it is written: a tensor in memory, or files that are read meanwhile.

Owns how elements reach the stream, a piece at a time. Next: :mod:`offload.checkpoint.values` writes them home.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Protocol

import torch

from offload.checkpoint.deferred import Kept, fill

PIECE_BYTES = 1 << 20  # that are read at once


class Source(Protocol):
    """Values of one parameter."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""

    def pieces(self, begin: int, end: int, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """Yield (begin, end, address) of elements [begin, end) in `dtype`; each is valid until the next one.

        Raises:
            ConfigError, OSError: a file cannot be read.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class FromTensor:
    """Values in host memory, contiguous and in the dtype that is asked for."""

    tensor: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.tensor.dtype

    def pieces(self, begin: int, end: int, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """Yield all of it."""
        assert dtype == self.tensor.dtype and self.tensor.is_contiguous()
        yield begin, end, self.tensor.data_ptr() + begin * self.tensor.element_size()


@dataclasses.dataclass(frozen=True, slots=True)
class FromFiles:
    """Values that are read when they are wanted.

    Attributes:
        tensor: a deferred one.
        kept: what is computed as a whole; sources that are read one after the other have the same.
    """

    tensor: torch.Tensor
    kept: Kept

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the parameter."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the values."""
        return self.tensor.dtype

    def pieces(self, begin: int, end: int, dtype: torch.dtype) -> Iterator[tuple[int, int, int]]:
        """Read and yield a MiB after the other."""
        numel = PIECE_BYTES // max(dtype.itemsize, self.tensor.dtype.itemsize)
        buffer = torch.empty(min(numel, end - begin), dtype=dtype, device="cpu")
        for first in range(begin, end, numel):
            last = min(first + numel, end)
            fill(self.tensor, first, last, buffer[: last - first], self.kept)
            yield first, last, buffer.data_ptr()
