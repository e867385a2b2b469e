"""Records that prove to be whole: JSON with its length and CRC-32C in front, one per line.

Owns: the framing, and how a key is written.
Must not know: what a record says.
Next: `manifest` is a file of records, the first block of a data file is one.

    9ae0daaf 0000001c {"seq":7,"delete":["a"]}
    crc32c   length   payload, then a newline; length and payload are covered by the crc
"""

from __future__ import annotations

import json
import re
from collections.abc import Hashable
from typing import Any, Final

from swap.io.checksums import crc32c

_PREFIX_BYTES: Final = 18  # two words of 8 hexadecimal digits, each with a blank

_PREFIX: Final = re.compile(rb"(?=[0-9a-f]{8} [0-9a-f]{8} )")

Record = dict[str, Any]


def encode_record(record: Record) -> bytes:
    """Return a record as bytes, newline included."""
    payload = json.dumps(record, separators=(",", ":")).encode("ascii")
    covered = b"%08x %b" % (len(payload), payload)
    return b"%08x %b\n" % (crc32c(covered), covered)


def decode_record(data: bytes, start: int) -> tuple[Record, int] | None:
    """Return the record at `start` and where the next one begins; None unless it is there as a whole and intact."""
    prefix = data[start : start + _PREFIX_BYTES]
    if len(prefix) < _PREFIX_BYTES:
        return None
    try:
        length = int(prefix[9:17], 16)
    except ValueError:
        return None
    end = start + _PREFIX_BYTES + length
    covered = data[start + 9 : end]
    if data[end : end + 1] != b"\n" or prefix != b"%08x %08x " % (crc32c(covered), length):
        return None
    record = json.loads(data[start + _PREFIX_BYTES : end])
    return (record, end + 1) if isinstance(record, dict) else None


def may_be_torn(data: bytes, start: int) -> bool:
    """Tell whether what is at `start`, to the end, can be the rest of one record that was being appended.

    It cannot if there is more than one line, or a whole record somewhere behind: then something intact was damaged.
    """
    if b"\n" in data[start:-1]:
        return False
    return not any(decode_record(data, match.start()) for match in _PREFIX.finditer(data, start + 1))


def encode_key(key: Hashable) -> Any:
    """Return a key in a form that JSON can hold.

    Raises:
        TypeError: it is not made of str, int, bool, None, bytes and tuples of these.
    """
    if key is None or isinstance(key, (str, int)):
        return key
    if isinstance(key, bytes):
        return {"bytes": key.hex()}
    if isinstance(key, tuple):
        return [encode_key(part) for part in key]
    raise TypeError(
        f"key {key!r}: a durable store needs keys of str, int, bool, None, bytes and tuples of these "
        f"but got {type(key).__name__}"
    )


def decode_key(value: Any) -> Hashable:
    """Undo `encode_key`."""
    if isinstance(value, list):
        return tuple(decode_key(part) for part in value)
    if isinstance(value, dict):
        return bytes.fromhex(value["bytes"])
    key: Hashable = value
    return key
