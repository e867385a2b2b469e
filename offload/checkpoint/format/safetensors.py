"""Headers of safetensors files: eight bytes of length, JSON, then the tensors one behind the other.

Owns that layout and the checks of it, for files of the engine and for those of others. The bytes of the tensors are
somebody else's business: :mod:`offload.checkpoint.format.writer`, :mod:`offload.checkpoint.format.reader`,
:mod:`offload.checkpoint.safetensors_files`. Knows neither torch nor the library of the same name.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from offload.sizes import PAGE_BYTES, round_up

_TABLE = {  # torch's dtype and the bytes of an element, by the names in files
    "F64": ("float64", 8),
    "F32": ("float32", 4),
    "F16": ("float16", 2),
    "BF16": ("bfloat16", 2),
    "F8_E4M3": ("float8_e4m3fn", 1),
    "F8_E5M2": ("float8_e5m2", 1),
    "I64": ("int64", 8),
    "I32": ("int32", 4),
    "I16": ("int16", 2),
    "I8": ("int8", 1),
    "U64": ("uint64", 8),
    "U32": ("uint32", 4),
    "U16": ("uint16", 2),
    "U8": ("uint8", 1),
    "BOOL": ("bool", 1),
    "C64": ("complex64", 8),
}
DTYPES = {name: dtype for name, (dtype, _) in _TABLE.items()}
ITEMSIZES = {name: size for name, (_, size) in _TABLE.items()}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


class HeaderError(Exception):
    """A file's beginning is not what it should be; whose file it is knows who reads it, and says so to users.

    Attributes:
        remedy: for files that come from somebody else.
    """

    def __init__(self, message: str, *, remedy: str) -> None:
        """Say what is wrong, and what to do."""
        super().__init__(message)
        self.remedy = remedy


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A tensor of a file.

    Attributes:
        key: its name there.
        dtype: as safetensors calls it.
        shape: of it.
        offset: of its first byte from the start of the file.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def size_bytes(self) -> int:
        """Bytes of its elements."""
        return math.prod(self.shape) * ITEMSIZES[self.dtype]


def make_header(members: Iterable[Member]) -> tuple[bytes, list[Member], int]:
    """Return the beginning of a file, its tensors with their offsets, and the size of the whole file.

    The first tensor begins on a page.
    """
    table: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    begins, at = [], 0
    for member in members:
        begins.append((member, at))
        end = at + member.size_bytes
        table[member.key] = {"dtype": member.dtype, "shape": list(member.shape), "data_offsets": [at, end]}
        at = end
    text = json.dumps(table, separators=(",", ":")).encode()
    size = round_up(_LENGTH_BYTES + len(text), PAGE_BYTES)
    header = (size - _LENGTH_BYTES).to_bytes(_LENGTH_BYTES, "little") + text.ljust(size - _LENGTH_BYTES)
    return header, [dataclasses.replace(member, offset=size + begin) for member, begin in begins], size + at


def read_header(path: Path) -> tuple[bytes, dict[str, Member]]:
    """Return the beginning of a file, up to its first tensor, and the tensors by key.

    Whether the file goes on to the end of each of them is not looked at.

    Raises:
        HeaderError: it is none of a safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        size = os.fstat(file.fileno()).st_size
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or not 2 <= length <= min(size - _LENGTH_BYTES, _MOST_HEADER_BYTES):
            raise HeaderError(
                f"expected a safetensors file but its header would take {length} of {size} bytes",
                remedy="it is cut off or of another format: download it again",
            )
        text = file.read(length)
    table = parse_object(text)
    table.pop("__metadata__", None)
    return start + text, {key: _member(key, value, begin=_LENGTH_BYTES + length) for key, value in table.items()}


def parse_object(text: bytes) -> dict[str, Any]:
    """Return a JSON object.

    Raises:
        HeaderError: it is something else.
    """
    try:
        content = json.loads(text)
    except ValueError as error:
        raise HeaderError(f"expected JSON but got {text[:20]!r}", remedy="it is damaged: download it again") from error
    if not isinstance(content, dict):
        raise HeaderError(f"expected a JSON object but got {text[:20]!r}", remedy="it is damaged: download it again")
    return content


def _member(key: str, value: Any, *, begin: int) -> Member:
    remedy = "the header is damaged: download it again"
    try:
        dtype, shape = value["dtype"], tuple(_counts(value["shape"]))
        first, last = _counts(value["data_offsets"])
        known = dtype in ITEMSIZES
    except (TypeError, KeyError, ValueError) as error:
        message = f"tensor {key}: expected dtype, shape and data_offsets but got {value!r:.100}"
        raise HeaderError(message, remedy=remedy) from error
    if not known:
        raise HeaderError(
            f"tensor {key}: expected one of {', '.join(DTYPES)} but got dtype {dtype}",
            remedy="save the checkpoint in one of these",
        )
    member = Member(key, dtype, shape, begin + first)
    if last - first != member.size_bytes:
        message = (
            f"tensor {key}: expected {member.size_bytes} bytes for shape {shape} of {dtype} but got {last - first}"
        )
        raise HeaderError(message, remedy=remedy)
    return member


def _counts(values: Iterable[Any]) -> Sequence[int]:
    """Return whole numbers from 0 on.

    Raises:
        ValueError: one is something else.
    """
    counts = list(values)
    if not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"expected whole numbers but got {counts}")
    return counts
