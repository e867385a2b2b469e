"""Reads folders of torch.distributed.checkpoint (DCP), without a process group.

Owns the way from ``.metadata`` to tensors in the files beside it: each tensor is a set of boxes, which ranks have saved
apart. The library's own reader unpickles whatever ``.metadata`` and saved values name, and has whole boxes in memory.
Next: :mod:`offload.checkpoint.foreign.torch_files` finds model and optimizer in what is found here.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.foreign.files import FileTensor
from offload.checkpoint.foreign.found import Found
from offload.checkpoint.foreign.inert import Record, read_pickle, read_torch_file
from offload.checkpoint.foreign.torch_files import find_parts
from offload.checkpoint.sources import Source
from offload.errors import ConfigError


@dataclasses.dataclass(frozen=True, slots=True)
class _Box:
    """A part of a tensor: its corner in it, and its elements."""

    corner: tuple[int, ...]
    elements: FileTensor


@dataclasses.dataclass(frozen=True, slots=True)
class Boxes:
    """A tensor that boxes make up; a range is read with the rows (of the first dimension) that have it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    boxes: tuple[_Box, ...]

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop) in row-major order."""
        if len(self.boxes) == 1 and self.boxes[0].elements.shape == self.shape:
            return self.boxes[0].elements.read(start, stop)
        row = math.prod(self.shape[1:])
        first, last = start // row, -(-stop // row)
        rows = torch.empty((last - first, *self.shape[1:]), dtype=self.dtype, device="cpu")
        for box in self.boxes:
            size, corner = box.elements.shape, box.corner
            begin, end = max(first, corner[0]), min(last, corner[0] + size[0])
            if begin < end:
                within = math.prod(size[1:])
                found = box.elements.read((begin - corner[0]) * within, (end - corner[0]) * within)
                target = rows[begin - first : end - first]
                for dimension in range(1, len(size)):
                    target = target.narrow(dimension, corner[dimension], size[dimension])
                target.copy_(found.view(end - begin, *size[1:]))
        return rows.view(-1)[start - first * row : stop - first * row]


def is_dcp(folder: Path) -> bool:
    """Tell whether a folder is one of torch.distributed.checkpoint."""
    return (folder / ".metadata").is_file()


def read_dcp(folder: Path, names: Sequence[Sequence[str]] | None) -> Found:
    """Return what a folder of torch.distributed.checkpoint holds.

    Args:
        folder: what ``dcp.save`` was given.
        names: parameters by param group, in the optimizer's order, for an optimizer that numbers them; None where
            nobody knows.

    Raises:
        ConfigError: a file is missing, damaged or of a layout that is not known; the text names it.
    """
    metadata = read_pickle(folder / ".metadata")
    try:
        entries = metadata["state_dict_metadata"]
        paths = metadata.get("planner_data") or {key: (key,) for key in entries}
        stored: dict[str, list[tuple[Record, Record]]] = {}
        for index, info in metadata["storage_data"].items():
            stored.setdefault(index["fqn"], []).append((index, info))
        content: dict[Any, Any] = {}
        for key, entry in entries.items():
            value = (
                _tensor(folder, key, entry, stored[key])
                if "chunks" in entry.attributes
                else _value(folder, stored[key])
            )
            place = content
            for step in paths[key][:-1]:
                place = place.setdefault(step, {})
            place[paths[key][-1]] = value
    except (KeyError, AttributeError, TypeError, IndexError) as error:
        raise ConfigError(
            f"{folder / '.metadata'}: expected what torch.distributed.checkpoint of torch 2.7 or later writes but got "
            f"{type(error).__name__}: {error}; save it again with such a version"
        ) from error
    return find_parts(folder, "torch.distributed.checkpoint", content, names)


def _value(folder: Path, stored: Sequence[tuple[Record, Record]]) -> Any:
    """Return a value that is no tensor."""
    (_, info), *_ = stored
    return _read(folder, info)


def _tensor(folder: Path, key: str, entry: Record, stored: Sequence[tuple[Record, Record]]) -> Source:
    """Return a tensor.

    Raises:
        ConfigError: its boxes do not make it up.
    """
    shape = tuple(entry["size"])
    boxes = []
    for index, info in stored:
        elements = _read(folder, info)
        if not isinstance(elements, FileTensor):
            raise ConfigError(f"{folder / info['relative_path']}: expected a tensor of {key}; copy it again")
        boxes.append(_Box(tuple(index["offset"] or (0,) * len(shape)), elements))
    expected = {(tuple(chunk["offsets"]), tuple(chunk["sizes"])) for chunk in entry["chunks"]}
    found = {(box.corner, box.elements.shape) for box in boxes}
    if expected != found or sum(math.prod(size) for _, size in found) != math.prod(shape):
        raise ConfigError(
            f"{folder}: expected {key} of shape {shape} in {len(expected)} parts but got {len(found)} that do not make "
            "it up; save it again"
        )
    return Boxes(shape, boxes[0].elements.dtype, tuple(boxes))


def _read(folder: Path, info: Record) -> Any:
    """Return what is in a part of a file."""
    name, offset, length = info["relative_path"], info["offset"], info["length"]
    path = folder / name
    if Path(name).name != name:
        raise ConfigError(f"{folder / '.metadata'}: expected a file beside it but got {name!r}; use another checkpoint")
    if info.get("transform_descriptors"):
        raise ConfigError(
            f"{path}: expected tensors as they are but got {info['transform_descriptors']}; save without extensions"
        )
    if not path.is_file():
        raise ConfigError(f"{path}: expected the file of a rank but it is missing; copy it")
    if offset + length > path.stat().st_size:
        raise ConfigError(
            f"{path}: expected {offset + length} bytes but got {path.stat().st_size}; it was cut off: copy it again"
        )
    return read_torch_file(path, offset, length)
