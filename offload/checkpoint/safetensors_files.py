"""Reads safetensors files of others: which tensors a checkpoint has, and any range of a tensor's elements.

Their headers are read by :mod:`offload.checkpoint.format.safetensors`. Bytes are read by ``pread`` into memory of the
caller's: nothing is mapped, so that no page of a file counts to the process. Knows names and bytes, nothing of models.
Next: :mod:`offload.checkpoint.deferred`.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import math
import os
from collections.abc import Iterator
from pathlib import Path

import torch

from offload.checkpoint.format.safetensors import DTYPES, HeaderError, parse_object, read_header
from offload.errors import ConfigError
from offload.sizes import format_bytes

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"


@dataclasses.dataclass(frozen=True, slots=True)
class StoredTensor:
    """One tensor of a file.

    Attributes:
        name: in the file.
        path: of the file.
        dtype: of its elements.
        shape: of it.
        offset_bytes: from the file's start to its first element.
    """

    name: str
    path: Path
    dtype: torch.dtype
    shape: tuple[int, ...]
    offset_bytes: int

    @property
    def size_bytes(self) -> int:
        """Bytes of all elements."""
        return math.prod(self.shape) * self.dtype.itemsize


def read_at(descriptor: int, target: memoryview, offset_bytes: int) -> int:
    """Read bytes of a file to `target`; returns how many: fewer than it has room for if the file ends before.

    Raises:
        OSError: it cannot be read.
    """
    done = 0
    while done < len(target) and (count := os.preadv(descriptor, [target[done:]], offset_bytes + done)):
        done += count
    return done


class OpenFiles:
    """Files that are being read, opened when they are first needed."""

    def __init__(self) -> None:
        self._descriptors: dict[Path, int] = {}

    def read(self, tensor: StoredTensor, begin: int, end: int, address: int) -> None:
        """Read elements [begin, end) of a tensor to `address`.

        Raises:
            ConfigError: the file has become shorter since its header was read.
            OSError: it cannot be read.
        """
        descriptor = self._descriptors.get(tensor.path)
        if descriptor is None:
            descriptor = self._descriptors[tensor.path] = os.open(tensor.path, os.O_RDONLY | os.O_CLOEXEC)
        size = (end - begin) * tensor.dtype.itemsize
        if not size:
            return
        target = memoryview((ctypes.c_char * size).from_address(address)).cast("B")
        offset = tensor.offset_bytes + begin * tensor.dtype.itemsize
        if (done := read_at(descriptor, target, offset)) < size:
            raise ConfigError(
                f"{tensor.path}: expected tensor {tensor.name} to have {format_bytes(tensor.size_bytes)} but the "
                f"file ends at byte {offset + done}; it was cut off while it was being read: copy it again"
            )

    def close(self) -> None:
        """Close all. Idempotent."""
        while self._descriptors:
            os.close(self._descriptors.popitem()[1])


@dataclasses.dataclass(frozen=True, slots=True)
class FileReader:
    """Reads one tensor of a file."""

    files: OpenFiles
    tensor: StoredTensor

    def read(self, begin: int, end: int, address: int) -> None:
        """Read elements [begin, end) to `address`, as :meth:`OpenFiles.read` does."""
        self.files.read(self.tensor, begin, end, address)


def find_tensors(path: str | os.PathLike[str]) -> dict[str, StoredTensor]:
    """Return the tensors of a checkpoint by name, in the order of its files; reads nothing but headers.

    Args:
        path: a folder with ``model.safetensors`` or, without it, shards and their index; or one such file.

    Raises:
        ConfigError: there is no such file, one is missing or cut off, or it is no safetensors file; names file and
            tensor.
    """
    where = Path(path)
    index = where if where.name.endswith(".index.json") else where / INDEX
    single = where if where.is_file() else where / SINGLE
    if not where.exists():
        raise ConfigError(
            f"{where}: expected a folder with safetensors files but it does not exist; of a model on the hub, pass "
            "what huggingface_hub.snapshot_download(name) returns"
        )
    if single.is_file() and single != index:  # first, as transformers does
        return _read_header(single)
    if index.is_file():
        return _find_sharded(index)
    others = sorted(other.name for pattern in ("*.bin", "*.pt", "*.gguf") for other in where.glob(pattern))
    raise ConfigError(
        f"{where}: expected {SINGLE} or {INDEX} but got {', '.join(others[:3]) or 'neither'}; load other formats with "
        "transformers, and save them again with save_pretrained"
    )


def _find_sharded(index: Path) -> dict[str, StoredTensor]:
    with _naming(index):
        content = parse_object(index.read_bytes())
    places = content.get("weight_map")
    if not isinstance(places, dict) or not all(isinstance(place, str) for place in places.values()):
        raise ConfigError(f"{index}: expected a weight_map of names to files but it has none; download it again")
    found: dict[str, StoredTensor] = {}
    for name in dict.fromkeys(places.values()):
        shard = index.parent / name
        first = next(tensor for tensor, place in places.items() if place == name)
        if shard.parent != index.parent or not shard.is_file():
            count = sum(place == name for place in places.values())
            raise ConfigError(
                f"{shard}: expected a file with {count} tensors, {first} the first of them, but it does not exist; "
                "download it again"
            )
        found.update(_read_header(shard))
    for tensor, place in places.items():
        if tensor not in found or found[tensor].path.name != place:
            raise ConfigError(
                f"{index.parent / place}: expected tensor {tensor}, as {index.name} says, but the file has no such "
                "one; files and index are of two checkpoints: download them again"
            )
    return found


def _read_header(path: Path) -> dict[str, StoredTensor]:
    with _naming(path):
        _, members = read_header(path)
    size = path.stat().st_size
    found = {}
    for name, member in members.items():
        dtype = getattr(torch, DTYPES[member.dtype])
        found[name] = tensor = StoredTensor(name, path, dtype, member.shape, member.offset)
        end = tensor.offset_bytes + tensor.size_bytes
        if end > size:
            raise ConfigError(
                f"{path}: expected tensor {name} to end at byte {end} but the file has {size}; it is cut off: download "
                "it again"
            )
    return found


@contextlib.contextmanager
def _naming(path: Path) -> Iterator[None]:
    """Name the file that is not what it should be.

    Raises:
        ConfigError: it is not.
    """
    try:
        yield
    except HeaderError as error:
        raise ConfigError(f"{path}: {error}; {error.remedy}") from error
