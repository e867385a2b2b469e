"""Whether a library is there, and new enough; asks for its version without importing it."""

from __future__ import annotations

import importlib.metadata
import re

from offload.errors import ConfigError


def require(library: str, least: str, *, door: str) -> None:
    """Refuse a library that is missing, or older than what the door was made for.

    Args:
        library: its name on PyPI.
        least: the oldest version that will do.
        door: what the user has asked for.

    Raises:
        ConfigError: it is; says how to install it.
    """
    remedy = f"pip install '{library}>={least}'"
    try:
        found = importlib.metadata.version(library)
    except importlib.metadata.PackageNotFoundError:
        raise ConfigError(f"{door}: expected {library} {least} or later but it is not installed; {remedy}") from None
    if _parts(found) < _parts(least):
        raise ConfigError(f"{door}: expected {library} {least} or later but got {found}; {remedy}")


def _parts(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]
