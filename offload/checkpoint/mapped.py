"""Tensors whose memory is a shared mapping of a file without a name: the kernel may write it out, so it is not held.

Owns the files: how they are made, that there is room for them, and how their pages are returned. A file vanishes with
the last tensor over it. Knows nothing of what the tensors are for. Next: :mod:`offload.checkpoint.dict_memory` has
state dicts there, :mod:`offload.initialisation` makes models there.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import tempfile
from collections.abc import Iterable, Sequence
from os import posix_fallocate
from pathlib import Path

import torch

from offload.memory.machine import free_space, mount_of
from offload.sizes import MIB, format_bytes
from swap.errors import error_class

TOUCHED_BYTES = 64 * MIB  # after which pages are returned
_IN_MEMORY = ("tmpfs", "ramfs")  # file systems that are no drive


class MappedFiles:
    """Makes tensors in one folder, and returns the pages of those that were touched.

    Raises in its methods:
        swap.SwapFullError: no room on the drive.
        swap.SwapError: the drive fails.
    """

    def __init__(self, folder: Path, subject: str, remedy: str) -> None:
        """Prepare; `subject` and `remedy` are of errors."""
        self._folder = folder
        self._subject = subject
        self._remedy = remedy
        self._touched: dict[int, torch.Tensor] = {}  # by address
        self._touched_bytes = 0

    def refuse_if_full(self, size_bytes: int) -> None:
        """Check that the drive has room for tensors of `size_bytes` in all.

        Raises:
            swap.SwapFullError: it has not.
        """
        free = free_space(self._folder)
        if free < size_bytes:
            raise self._failed(f"needs {format_bytes(size_bytes)} but {format_bytes(free)} are free", errno.ENOSPC)

    def empty(self, shape: Sequence[int], dtype: torch.dtype, name: str) -> torch.Tensor:
        """Return a tensor of zeros in a new file; `name` is of errors."""
        numel = torch.Size(shape).numel()
        size_bytes = numel * dtype.itemsize
        try:
            with tempfile.TemporaryFile(dir=self._folder, prefix=".offload-") as file:
                posix_fallocate(file.fileno(), 0, size_bytes)  # a page that has no room later ends the process
                path = f"/proc/self/fd/{file.fileno()}"
                flat = torch.from_file(path, shared=True, size=numel, dtype=dtype)
        except OSError as error:
            raise self._failed(f"{name} needs {format_bytes(size_bytes)} on the drive", error.errno) from error
        return flat.view(torch.Size(shape))

    def touch(self, tensors: Iterable[torch.Tensor], size_bytes: int) -> None:
        """Note that so many bytes of tensors were read or written; return pages where it is time."""
        for tensor in tensors:
            self._touched[tensor.data_ptr()] = tensor
        self._touched_bytes += size_bytes
        if self._touched_bytes > TOUCHED_BYTES:
            self.release(self._touched.values())
            self._touched.clear()
            self._touched_bytes = 0

    @staticmethod
    def release(tensors: Iterable[torch.Tensor]) -> None:
        """Return the pages of tensors to the kernel's cache; nothing is lost, for the mappings are shared."""
        advise = ctypes.CDLL(None, use_errno=True).madvise
        for tensor in tensors:
            advise(ctypes.c_void_p(tensor.data_ptr()), ctypes.c_size_t(tensor.nbytes), mmap.MADV_DONTNEED)

    def close(self) -> None:
        """Return the pages that were touched, and leave the tensors to whoever has them. Idempotent."""
        self.release(self._touched.values())
        self._touched.clear()
        self._touched_bytes = 0

    def _failed(self, text: str, code: int | None) -> OSError:
        return error_class(code)(f"{self._subject}: {text}", errno=code, path=str(self._folder), remedy=self._remedy)


def memory_of(folder: Path) -> str | None:
    """Return the name of a folder's file system if that is in memory; None for a drive's, or if nothing is known."""
    mount = mount_of(folder)
    return mount.file_system if mount is not None and mount.file_system in _IN_MEMORY else None
