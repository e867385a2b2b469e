"""A module's state dict whose parameters are read when somebody needs their bytes: for saving what is larger than RAM.

Owns the readers of single parameters. What is done to such tensors is remembered by
:mod:`offload.checkpoint.deferred`. Next: :mod:`offload.checkpoint.module_state`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.deferred import DeferredTensor
from offload.checkpoint.safetensors_files import INDEX, SINGLE
from offload.checkpoint.values import overlaps
from offload.errors import ConfigError
from offload.module.binding import Binding
from offload.planning.roles import Role
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.shards.stream import Chunk
from offload.sizes import format_bytes, parse_bytes

SHARD_BYTES = "2GB"  # of a file of weights, if nobody says more: so much is in memory while it is written


@dataclasses.dataclass(frozen=True, slots=True)
class ParameterReader:
    """Reads one parameter from its home, as far as it is asked for."""

    manager: Manager
    where: Where

    def read(self, begin: int, end: int, address: int) -> None:
        """Write elements [begin, end), in order, to `address`.

        Raises:
            swap.SwapError: an I/O error.
        """
        unit, position = self.manager.units[self.where[0]], self.where[1]
        offset = unit.slots[position].offset_numel
        first, last, size = offset + begin, offset + end, unit.itemsize

        def visit(chunk: Chunk) -> None:
            for index, _, start, stop in overlaps(chunk):
                start, stop = max(start, first), min(stop, last)
                if index == position and start < stop:
                    source = chunk.at(Role.PARAM, start, size)
                    ctypes.memmove(address + (start - first) * size, source, (stop - start) * size)

        with self.manager.safe_point:
            self.manager.stream([unit], visit, reads=frozenset({Role.PARAM}), span=(first, last))


@contextlib.contextmanager
def in_one_form(directory: str | Path) -> Iterator[None]:
    """Delete the single file of an earlier save if the ``with`` block saves shards: it would be read in their place."""
    single, index = Path(directory, SINGLE), Path(directory, INDEX)
    before = [_identity(path) for path in (single, index)]
    yield
    if _identity(index) != before[1] and _identity(single) == before[0]:
        single.unlink(missing_ok=True)


@contextlib.contextmanager
def without_quantizer(model: Any) -> Iterator[None]:
    """Let a model of transformers be saved as the ordinary one that it is, whatever its files were.

    Saving does backwards what reading did: weights that were dequantized would be quantized, and nothing would say so.
    """
    found = vars(model).get("_weight_conversions")
    if not found or getattr(model.config, "quantization_config", None) is not None:
        yield
        return
    kept = list(found)
    found[:] = [ordinary for each in kept for ordinary in _ordinary(each)]
    try:
        yield
    finally:
        found[:] = kept


def _ordinary(conversion: Any) -> list[Any]:
    """Return what a conversion is without its quantizer's part in it: itself, what the model's own is, or none."""
    operations = getattr(conversion, "operations", ())
    others = [one for one in operations if not hasattr(one, "hf_quantizer")]
    if len(others) == len(operations):
        return [conversion]
    names = next(getattr(one.hf_quantizer, "serialized_names", {}) for one in operations if one not in others)
    scales = {name for weight, stored in names.items() for name in stored if name != weight}
    sources = [one for one in conversion._original_source_patterns if one.rpartition(".")[2] not in scales]
    if not others or not scales:  # of all weights; or nobody knows which sources are scales
        return []
    return [conversion.copy(sources, conversion._original_target_patterns, operations=others)]


def _identity(path: Path) -> tuple[int, ...] | None:
    """Return what changes if a file is written; None where there is none."""
    with contextlib.suppress(OSError):
        info = path.stat()
        return info.st_ino, info.st_size, info.st_mtime_ns
    return None


def warn_of_shard(most: int | str, total_bytes: int, budget_bytes: int) -> None:
    """Warn where one file of a checkpoint takes more memory than the user wants the host to give.

    Args:
        most: bytes of a file, as ``save_pretrained`` takes them.
        total_bytes: of all parameters.
        budget_bytes: of the host.
    """
    with contextlib.suppress(ConfigError):  # transformers has its own error
        size = parse_bytes(most, subject="max_shard_size")
        shard_bytes = min(size, total_bytes) if isinstance(size, int) else 0
        if shard_bytes > budget_bytes:
            warnings.warn(
                f"save_pretrained: takes up to {format_bytes(shard_bytes)} of host memory for one file, beside what "
                f"the engine has there, more than the host budget of {format_bytes(budget_bytes)}; pass a smaller "
                "max_shard_size, or make sure that the machine has the room",
                stacklevel=3,
            )


def deferred_state(module: nn.Module, binding: Binding, manager: Manager) -> dict[str, Any]:
    """Return the module's state dict: parameters as deferred tensors, the same one for a tied one; buffers as ever."""
    found: dict[str, Any] = dict(module.state_dict(keep_vars=True))
    made: dict[Where, DeferredTensor] = {}

    def deferred(where: Where) -> torch.Tensor:
        if where not in made:
            unit = manager.units[where[0]]
            form = torch.empty(unit.slots[where[1]].shape, dtype=binding.dtypes[where[0]], device="meta")
            made[where] = DeferredTensor(form, ParameterReader(manager, where))
        return made[where]

    for name, value in found.items():
        where, wrapper = binding.slot_of(value), binding.wrapper_of(value)
        if wrapper is not None:
            found[name] = wrapper.shell.map(deferred).tensor()
        elif where is not None:
            found[name] = deferred(where)
        else:
            found[name] = value.detach() if isinstance(value, torch.Tensor) else value
    return found
