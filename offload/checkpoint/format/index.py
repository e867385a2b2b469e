"""The index of a checkpoint: one JSON file that says which file holds which elements of which tensor, and all else.

Owns its names, its version and its own checksum. ``docs/checkpoints.md`` describes it for others. Next:
:mod:`offload.checkpoint.format.folder` knows where an index lies.
"""

from __future__ import annotations

import dataclasses
import json
import math
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.checkpoint.format.safetensors import ITEMSIZES
from offload.errors import CheckpointError

FORMAT = "offload-checkpoint"
VERSION = 1
BLOCK_BYTES = 4 << 20  # of a range, with a checksum each
FILE_NAME = "index.json"


class DamagedError(CheckpointError):
    """The files of a checkpoint are not those that were written."""


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Elements [begin, end) of a tensor, counted in row-major order, in one file.

    Attributes:
        file: its name.
        key: of the elements in the file.
        begin, end: which elements of the tensor they are.
        checksums: CRC-32 of each block of :data:`BLOCK_BYTES` of the range, the last one shorter.
    """

    file: str
    key: str
    begin: int
    end: int
    checksums: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A tensor of a checkpoint.

    Attributes:
        role: "parameter", "master", "gradient", "scales", a state's name, or "value".
        name: of the parameter, or of the value.
        dtype: as safetensors calls it.
        shape: of the tensor.
        ranges: where its elements are; they cover it, in order.
    """

    role: str
    name: str
    dtype: str
    shape: tuple[int, ...]
    ranges: tuple[Range, ...]

    @property
    def numel(self) -> int:
        """Elements."""
        return math.prod(self.shape)

    @property
    def size_bytes(self) -> int:
        """Bytes."""
        return self.numel * ITEMSIZES[self.dtype]


@dataclasses.dataclass(frozen=True, slots=True)
class StoredFile:
    """A file of a checkpoint: its size, and the CRC-32 of what comes before its first tensor."""

    size_bytes: int
    header_checksum: int


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """What a checkpoint holds.

    Attributes:
        tag: its name.
        sequence: a number that is greater than those of the checkpoints before it in the same directory.
        entries: the tensors.
        files: by name.
        contents: everything else, as JSON has it.
    """

    tag: str
    sequence: int
    entries: tuple[Entry, ...]
    files: dict[str, StoredFile]
    contents: dict[str, Any]

    def by_role(self) -> dict[tuple[str, str], Entry]:
        """Return the tensors by role and name."""
        return {(entry.role, entry.name): entry for entry in self.entries}

    @property
    def size_bytes(self) -> int:
        """Bytes of all files of tensors."""
        return sum(file.size_bytes for file in self.files.values())

    def to_json(self) -> str:
        """Return the text of the index."""
        body: dict[str, Any] = {
            "format": FORMAT,
            "version": VERSION,
            "tag": self.tag,
            "sequence": self.sequence,
            "block_bytes": BLOCK_BYTES,
            **self.contents,
            "files": {
                name: {"size_bytes": file.size_bytes, "header_checksum": file.header_checksum}
                for name, file in self.files.items()
            },
            "tensors": [_entry_to_json(entry) for entry in self.entries],
        }
        return json.dumps({**body, "checksum": _checksum(body)}, separators=(",", ":"), allow_nan=False)

    @classmethod
    def read(cls, path: Path) -> Index:
        """Read an index.

        Raises:
            CheckpointError: it is damaged (:class:`DamagedError`), or of a newer version.
        """
        try:
            body = json.loads(path.read_text(encoding="utf-8"))
        except OSError as error:
            raise CheckpointError(f"checkpoint index {path}: cannot be read: {error.strerror or error}") from error
        except ValueError as error:
            raise DamagedError(f"checkpoint index {path}: is damaged: {error}; load another checkpoint") from error
        if not isinstance(body, dict) or body.get("format") != FORMAT:
            raise CheckpointError(f"checkpoint index {path}: expected one with the format {FORMAT!r}")
        if body.get("version") != VERSION:
            raise CheckpointError(
                f"checkpoint index {path}: expected version {VERSION} of the format but got {body.get('version')!r}; "
                "load it with the version of offload that wrote it, or a later one"
            )
        expected = body.pop("checksum", None)
        if expected != _checksum(body):
            raise DamagedError(
                f"checkpoint index {path}: is damaged: expected checksum {expected} but got {_checksum(body)}; load "
                "another checkpoint"
            )
        for name in ("format", "version", "block_bytes"):
            body.pop(name)
        tensors, files = body.pop("tensors"), body.pop("files")
        return cls(
            tag=body.pop("tag"),
            sequence=body.pop("sequence"),
            entries=tuple(_entry_of_json(entry) for entry in tensors),
            files={name: StoredFile(**file) for name, file in files.items()},
            contents=body,
        )


def _checksum(body: dict[str, Any]) -> int:
    return zlib.crc32(json.dumps(body, separators=(",", ":"), allow_nan=False).encode())


def _entry_to_json(entry: Entry) -> dict[str, Any]:
    return {
        "role": entry.role,
        "name": entry.name,
        "dtype": entry.dtype,
        "shape": list(entry.shape),
        "ranges": [
            {"file": r.file, "key": r.key, "range": [r.begin, r.end], "checksums": list(r.checksums)}
            for r in entry.ranges
        ],
    }


def _entry_of_json(value: dict[str, Any]) -> Entry:
    ranges = tuple(
        Range(r["file"], r["key"], r["range"][0], r["range"][1], tuple(r["checksums"])) for r in value["ranges"]
    )
    return Entry(value["role"], value["name"], value["dtype"], tuple(value["shape"]), ranges)


def differences(expected: Sequence[str], found: Sequence[str], most: int = 5) -> str:
    """Return what is missing and what is too much in `found`, the first ones by name; empty where they agree."""
    missing, more = [name for name in expected if name not in set(found)], set(found) - set(expected)
    parts = []
    for what, names in (("lacks", missing), ("has also", [name for name in found if name in more])):
        if names:
            rest = f" and {len(names) - most} more" if len(names) > most else ""
            parts.append(f"{what} {', '.join(names[:most])}{rest}")
    return "; ".join(parts)
