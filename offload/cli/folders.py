"""Output folders of commands: whole, or not there.

Owns where files are until all of them are written, and what is said of a folder that cannot be written to. Next:
:mod:`offload.cli.merge` and :mod:`offload.cli.checkpoint.export`.
"""

from __future__ import annotations

import contextlib
import errno
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path

from offload.errors import CheckpointError

REMEDY = "free space, or name a folder on another drive"


def things_in(output: Path) -> str | None:
    """Return what is in the way of files in a folder, in words; None for an empty one, or where nothing is there."""
    if not output.exists():
        return None
    if not output.is_dir():
        return "is no folder"
    found = sorted(file.name for file in output.iterdir() if file.name != "lost+found")  # of a mounted drive
    return f"has {', '.join(found[:3])}" if found else None


@contextlib.contextmanager
def written_whole(output: Path, subject: str = "") -> Iterator[Path]:
    """Yield a new folder: its files come into `output` if the ``with`` block ends well, and are deleted if not.

    It is in `output` if that is there, which may be where a drive is mounted, and else beside it.

    Args:
        output: a folder, or a path with nothing there.
        subject: how errors begin; empty for the path.

    Raises:
        CheckpointError: it cannot be written to.
        swap.SwapFullError: no room on the drive.
    """
    from swap.errors import SwapError, SwapFullError  # not there without the extensions: doctor says so

    output = output.absolute()
    there = output.exists()
    name = f".{output.name}-{secrets.token_hex(4)}"
    new = output / name if there else output.with_name(name)
    try:
        new.mkdir(parents=True)
        yield new
        if there:
            for file in new.iterdir():
                file.rename(output / file.name)
        else:
            new.rename(output)
    except SwapError:
        raise
    except OSError as error:
        text = f"{subject or output}: cannot be written to"
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            raise SwapFullError(text, errno=error.errno, path=str(output), remedy=REMEDY) from error
        raise CheckpointError(f"{text}: {error.strerror or error}; name another folder") from error
    finally:
        shutil.rmtree(new, ignore_errors=True)
