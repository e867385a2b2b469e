"""Headers of safetensors files: eight bytes of length, JSON, then the tensors one behind the other.

Owns that layout. The bytes of the tensors are somebody else's business: :mod:`offload.checkpoint.format.writer`,
:mod:`offload.checkpoint.format.reader`. Knows neither torch nor the library of the same name.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from offload.errors import CheckpointError
from offload.sizes import PAGE_BYTES, round_up

ITEMSIZES = {
    **dict.fromkeys(("F64", "I64", "U64", "C64"), 8),
    **dict.fromkeys(("F32", "I32", "U32"), 4),
    **dict.fromkeys(("F16", "BF16", "I16", "U16"), 2),
    **dict.fromkeys(("I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2"), 1),
}
NAMES = {  # of torch's dtypes
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "complex64": "C64",
}
DTYPES = {name: dtype for dtype, name in NAMES.items()}  # torch's, by the names in files
_LENGTH_BYTES = 8
_MOST_HEADER_BYTES = 100_000_000  # as the library has it


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

    Raises:
        CheckpointError: it is none of a safetensors file.
        OSError: it cannot be read.
    """
    with path.open("rb") as file:
        start = file.read(_LENGTH_BYTES)
        length = int.from_bytes(start, "little")
        if len(start) < _LENGTH_BYTES or length > _MOST_HEADER_BYTES:
            raise CheckpointError(_damaged(path, "it begins with no length of a header"))
        text = file.read(length)
    members = {}
    try:
        for key, value in json.loads(text).items():
            if key != "__metadata__":
                begin, _ = value["data_offsets"]
                offset = _LENGTH_BYTES + length + int(begin)
                members[key] = Member(key, str(value["dtype"]), tuple(map(int, value["shape"])), offset)
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise CheckpointError(_damaged(path, f"its header is not that of a safetensors file ({error})")) from None
    return start + text, members


def _damaged(path: Path, what: str) -> str:
    return f"checkpoint file {path}: is damaged: {what}; load another checkpoint"
