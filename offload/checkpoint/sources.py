"""Tensors that are read range by range, from files for instance, so that none has to be in memory as a whole.

Owns what a source is, and views of sources. :mod:`offload.checkpoint.values` writes sources home as it writes tensors.
Next: :mod:`offload.checkpoint.deferred` and :mod:`offload.checkpoint.foreign.inert`, whose sources are in files.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch

PIECE_NUMEL = 1 << 20  # elements that are read at once; whole blocks of 8-bit states


@runtime_checkable
class Source(Protocol):
    """A tensor that is read in ranges."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop), counted in row-major order, as a tensor of one dimension on the CPU.

        Raises:
            ConfigError: a file has changed or cannot be read.
        """


@dataclasses.dataclass(frozen=True, slots=True)
class Converted:
    """Another source's elements in another dtype."""

    source: Source
    dtype: torch.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return self.source.shape

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop)."""
        return self.source.read(start, stop).to(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Part:
    """The elements [begin, begin + numel) of a source."""

    source: Source
    begin: int
    numel: int


class Joined:
    """Parts of other sources, one behind the other."""

    def __init__(self, shape: Sequence[int], parts: Sequence[Part]) -> None:
        """Prepare.

        Args:
            shape: of the whole, which has as many elements as the parts.
            parts: of one dtype; at least one.
        """
        self.shape = tuple(shape)
        self.dtype = parts[0].source.dtype
        self._parts = tuple(parts)
        self._ends = tuple(itertools.accumulate(part.numel for part in parts))
        assert self._ends[-1] == math.prod(self.shape)

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop)."""
        found = []
        number = bisect.bisect_right(self._ends, start)
        while start < stop:
            part, end = self._parts[number], self._ends[number]
            first = part.begin + start - (end - part.numel)
            here = min(stop, end) - start
            if here:
                found.append(part.source.read(first, first + here))
            start, number = start + here, number + 1
        return found[0] if len(found) == 1 else torch.cat(found) if found else torch.empty(0, dtype=self.dtype)


def numel_of(source: Source | torch.Tensor) -> int:
    """Return the number of elements."""
    return math.prod(source.shape)


def whole(source: Source) -> torch.Tensor:
    """Return all elements of a small source as a tensor of its shape."""
    return source.read(0, numel_of(source)).reshape(source.shape)


def on_cpu(value: torch.Tensor | Source, dtype: torch.dtype) -> torch.Tensor | Source:
    """Return a value of which :func:`elements` are in `dtype`."""
    if isinstance(value, torch.Tensor):
        return value.detach().to("cpu", dtype).resolve_conj().resolve_neg().contiguous()
    return Converted(value, dtype)


def elements(value: torch.Tensor | Source, start: int, stop: int) -> torch.Tensor:
    """Return the elements [start, stop), in row-major order, of what :func:`on_cpu` returned."""
    return value.view(-1)[start:stop] if isinstance(value, torch.Tensor) else value.read(start, stop)
