"""Makes a model that is larger than memory, from scratch: parameters are made in files without a name on the drive.

Everything is done as ever, in the order of ever, so random numbers are those of ordinary construction. But memory of
large parameters is a shared mapping of a file: the kernel may write it out. While the model is made, pages that were
touched are returned to the kernel's cache again and again. An engine frees each unit's files when it has loaded them.

Owns the context. Next: :mod:`offload.engine` takes the model.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from offload.checkpoint.mapped import TOUCHED_BYTES, MappedFiles, memory_of
from offload.errors import ConfigError
from offload.module.binding import Binding
from offload.nested import tensors_in
from offload.sizes import MIB

SMALLEST_BYTES = 1 * MIB  # of a parameter that is made on the drive
_HOST = torch.device("cpu")


@contextlib.contextmanager
def init(path: str | os.PathLike[str] | None = None) -> Iterator[None]:
    """Make models inside the ``with`` block without holding them in memory: the same bits as without it.

    Parameters of 1 MiB and more that a module registers in this thread have their memory in files without a name. They
    are ordinary parameters. The peak is about the largest parameter, twice, and 64 MiB. Outside of the block, what is
    touched stays in memory as long as the kernel likes: make the engine next, which moves unit by unit. What takes the
    place of a parameter's memory (``model.to(dtype)``) is in memory again: pass ``dtype=`` to the engine or to the
    model's constructor instead.

    Args:
        path: folder on a drive with room for the model; None for the one for temporary files.

    Raises:
        ConfigError: the folder does not exist, or is in memory itself.
        swap.SwapFullError: the drive is full.
        swap.SwapError: the drive fails.
    """
    folder = Path(tempfile.gettempdir() if path is None else path)
    in_memory = memory_of(folder)
    if not folder.is_dir() or in_memory is not None:
        got = f"{in_memory}, which is memory" if folder.is_dir() else "no folder there"
        raise ConfigError(f"init: expected {folder} to be a folder on a drive but got {got}; pass path=")
    making = _Making(folder)
    hook = register_module_parameter_registration_hook(making.move)
    try:
        with making:
            yield
    finally:
        hook.remove()
        making.close()


class _Making(TorchFunctionMode):
    """Moves parameters to files, and sees what touches them."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self._files = MappedFiles(folder, "init", "pass path= with more room")
        self._thread = threading.get_ident()
        self._made: dict[int, torch.Tensor] = {}  # by address, which is theirs as long as they are here
        self._touched_bytes = 0

    def move(self, module: nn.Module, name: str, parameter: Any) -> None:
        """Let a parameter that is being registered have its memory on the drive."""
        if type(parameter) is not nn.Parameter or threading.get_ident() != self._thread:
            return
        if parameter.device != _HOST or parameter.nbytes < SMALLEST_BYTES or not parameter.is_contiguous():
            return
        if parameter.data_ptr() in self._made:
            return  # tied
        with torch.no_grad():
            there = self._files.empty(parameter.shape, parameter.dtype, f"{type(module).__name__}.{name}")
            self._made[there.data_ptr()] = there
            old, new = parameter.detach().view(-1), there.view(-1)
            step = TOUCHED_BYTES // parameter.element_size()
            for begin in range(0, old.numel(), step):
                new[begin : begin + step] = old[begin : begin + step]
        Binding.rebind(parameter, there)

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in((args, kwargs or {})):
            if type(tensor) in (torch.Tensor, nn.Parameter) and tensor.device == _HOST:
                self._touched_bytes += tensor.nbytes
        if self._touched_bytes > TOUCHED_BYTES:
            self.release()
        return result

    def release(self) -> None:
        """Return the pages of all files to the kernel's cache; nothing is lost, for the mappings are shared."""
        self._files.release(self._made.values())
        self._touched_bytes = 0

    def close(self) -> None:
        """Return pages once more, and leave the parameters to their module."""
        self.release()
        self._made.clear()
