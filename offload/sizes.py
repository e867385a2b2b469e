"""Byte counts: read, written, rounded.

Owns what a size looks like to people, and the sizes that all of the package agrees on. Next: every other file.
"""

from __future__ import annotations

import dataclasses
import math
import re

from offload.errors import ConfigError

MIB = 1 << 20
GIB = 1 << 30
MOST_BYTES = 1 << 56  # of one thing: the planner adds several, and compares with more
PAGE_BYTES = 4096  # buffers begin at such addresses and records on NVMe have such lengths
HUGE_PAGE_BYTES = 2 << 20
PASSING_SHARE = 4  # this part of host memory for activations is for what passes through to the drive, and back

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*|%)\s*$")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A budget given as a share of what the tier has free, in 0..1."""

    fraction: float


def parse_bytes(value: int | str | float, *, subject: str, shares: bool = True) -> int | Share:
    """Parse a byte count.

    Args:
        value: an integer (bytes), ``"8GiB"``, ``"500 MB"`` (decimal), ``"1.5G"`` (binary) or ``"80%"``.
        subject: what is being parsed, for the error text.
        shares: percentages are possible, for the error text.

    Returns:
        Bytes, or a :class:`Share` for a percentage.

    Raises:
        ConfigError: the text is not a byte count, is negative, or more than any machine has.
    """
    size = _parsed(value, subject, '"8GiB", "500MB" or "80%"' if shares else '"8GiB" or "500MB"')
    if not isinstance(size, Share) and size > MOST_BYTES:
        raise ConfigError(f"{subject}: expected at most {MOST_BYTES} bytes but got {value!r}")
    return size


def _parsed(value: int | str | float, subject: str, examples: str) -> int | Share:
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f'{subject}: expected bytes as int or text like "8GiB" but got {value!r}')
    if not isinstance(value, str):
        if value < 0 or (isinstance(value, float) and not value.is_integer()):
            raise ConfigError(f"{subject}: expected a whole, non-negative number of bytes but got {value!r}")
        return int(value)
    match = _SIZE.match(value)
    if match is None:
        raise ConfigError(f"{subject}: expected bytes like {examples} but got {value!r}")
    number, unit = float(match.group(1)), match.group(2)
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{subject}: expected a percentage in (0, 100] but got {value!r}")
        return Share(number / 100)
    if unit.upper() not in _UNITS:
        raise ConfigError(f"{subject}: unknown unit in {value!r}; use B, KiB, MiB, GiB, TiB, KB, MB, GB, TB or %")
    size = number * _UNITS[unit.upper()]
    return int(size) if math.isfinite(size) else MOST_BYTES + 1


def format_bytes(size_bytes: float) -> str:
    """Return `size_bytes` for people, with binary units: ``1.50 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


def short_bytes(size_bytes: float) -> str:
    """Return `size_bytes` for people in three figures, without needless ones: ``64 KiB``, ``1.5 GiB``, ``812 MiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 999.5:
            return f"{size:.3g} {unit}"
        size /= 1024
    return f"{size:.3g} TiB"


def figures(value: float, many: int = 3) -> str:
    """Return a number for people in so many figures, those before the point all: ``0.642``, ``45.3``, ``2,037``."""
    text = f"{value:.{many}g}"
    return f"{value:,.0f}" if "e+" in text else text


def round_up(value: int, multiple: int) -> int:
    """Return the least multiple of `multiple` that is at least `value`."""
    return -(-value // multiple) * multiple


def whole_pages(size_bytes: int) -> int:
    """Return bytes rounded up to what buffers and records consist of."""
    return round_up(size_bytes, PAGE_BYTES)
