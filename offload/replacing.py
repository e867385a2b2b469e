"""A file that is replaced as a whole, or stays as it was.

Owns that, and the errors of a path that cannot be written: those of ``torch.save``, too. Next: :mod:`offload.trace`,
:mod:`offload.seeing.page`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

import torch

from offload.errors import ConfigError


@contextlib.contextmanager
def replacing(path: str | Path, what: str, *, binary: bool = False) -> Iterator[IO[Any]]:
    """Give a file to write to, which takes the place of `path` when the block has ended well.

    Args:
        path: of the file; its folder must exist.
        what: the call that it is for, which an error begins with.
        binary: bytes are written to it; else text.

    Raises:
        ConfigError: it cannot be written.
    """
    if not isinstance(path, (str, Path)) or "\0" in str(path):
        raise ConfigError(f"{what}: expected the path of a file but got {path!r}; name a file")
    try:
        target = Path(path).resolve()
    except (OSError, RuntimeError) as error:  # before Python 3.13, of links that lead to each other
        raise ConfigError(f"{what}: expected the path of a file but got {path}: {error}; name a file") from error
    partial = target.with_name(f"{target.name}.{secrets.token_hex(4)}.part")  # of this call alone, of all machines
    try:
        if target.exists() and not target.is_file():
            raise ConfigError(
                f"{what}: expected the path of a file but got {path}, which is something else; name a file"
            )
        with partial.open("wb") if binary else partial.open("w", encoding="utf-8") as file:
            yield file
        if target.exists():
            with contextlib.suppress(OSError):  # some file systems have no modes
                shutil.copymode(target, partial)
        os.replace(partial, target)
    except OSError as error:
        raise ConfigError(
            f"{what}: expected a file that can be written but got {path}: {error.strerror}; name one in a folder that "
            "exists, is writable and has room"
        ) from error
    finally:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)


def save_torch(value: object, file: IO[bytes]) -> None:
    """Write by ``torch.save``.

    Raises:
        OSError: what the drive has said: torch makes a RuntimeError of it, as it cannot end the file.
    """
    try:
        torch.save(value, file)
    except RuntimeError as error:
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise
