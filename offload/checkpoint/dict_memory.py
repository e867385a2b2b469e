"""Where the tensors of state dicts lie: in ordinary memory, or on the drive where that has no room for them.

Owns the choice, and the warning if there is none. Next: :mod:`offload.checkpoint.values` fills the tensors;
:mod:`offload.checkpoint.mapped` has the files.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Protocol

import torch

from offload.checkpoint.mapped import MappedFiles, memory_of
from offload.memory.budget import Budget
from offload.memory.machine import free_space
from offload.sizes import MIB, format_bytes

SMALLEST_BYTES = MIB // 16  # of a tensor that is on the drive


class Memory(Protocol):
    """Makes the tensors of one state dict."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a tensor to be filled; `name` is of errors."""

    def touch(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> None:
        """Note that so many bytes of tensors were written."""


class Ordinary:
    """Ordinary host memory."""

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a tensor to be filled."""
        return torch.empty(torch.Size(shape), dtype=dtype, device="cpu")

    def touch(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> None:
        """Do nothing."""


class OnDrive:
    """Files without a name, but for tensors of less than :data:`SMALLEST_BYTES`."""

    def __init__(self, files: MappedFiles) -> None:
        self._files = files

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a tensor to be filled."""
        small = torch.Size(shape).numel() * dtype.itemsize < SMALLEST_BYTES
        return ORDINARY.empty(shape, dtype, name) if small else self._files.empty(shape, dtype, name)

    def touch(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> None:
        """Note that so many bytes of tensors were written; their pages are returned where it is time."""
        self._files.touch([tensor for tensor in tensors if tensor.nbytes >= SMALLEST_BYTES], size_bytes)


ORDINARY = Ordinary()


class DictMemory:
    """Memory for one engine's state dicts. See the module's text."""

    def __init__(self, budget: Budget, paths: Sequence[Path]) -> None:
        """Prepare.

        Args:
            budget: of the host: state dicts are beside what is claimed of it.
            paths: folders on drives, of which the one with the most room is taken; none where there is no drive.
        """
        self._budget = budget
        self._paths = tuple(paths)

    @contextlib.contextmanager
    def open(self, subject: str, size_bytes: int) -> Iterator[Memory]:
        """Yield memory for a state dict of `size_bytes`, which is filled inside the block.

        Raises:
            swap.SwapFullError: neither the budget nor the drive has room.

        Warns:
            UserWarning: there is no drive, and it is more than the host budget.
        """
        paths = [path for path in self._paths if path.is_dir() and memory_of(path) is None]
        if size_bytes <= self._budget.free_bytes or not paths:
            self._warn(subject, size_bytes)
            yield ORDINARY
            return
        remedy = 'free space, raise max_memory["cpu"], or write engine.save_checkpoint, which takes neither'
        files = MappedFiles(max(paths, key=free_space), subject, remedy)
        files.refuse_if_full(size_bytes)
        with contextlib.closing(files):
            yield OnDrive(files)

    def _warn(self, subject: str, size_bytes: int) -> None:
        limit = self._budget.limit_bytes
        if size_bytes > limit:
            warnings.warn(
                f"{subject}: takes {format_bytes(size_bytes)} of host memory beside what the engine has there, more "
                f"than the host budget of {format_bytes(limit)}; name a drive with nvme_path, where it can lie, make "
                "sure that the machine has the room, or read parameters in parts with engine.gather or engine.apply",
                stacklevel=5,
            )
