"""Locks of files: who saves into a directory of checkpoints, and who reads one.

Owns that they end with what they were taken for, whoever was forked meanwhile. Knows no format. Next:
:mod:`offload.checkpoint.format.folder`.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path


def lock(fd: int, *, shared: bool = False) -> bool:
    """Lock a file for this process, until :func:`unlock`; False where another one has it."""
    try:
        fcntl.flock(fd, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:  # a file system without locks
        return True
    return True


def open_to_lock(path: Path, flags: int = os.O_RDONLY) -> int:
    """Open a file for :func:`lock`; children that are forked do not keep it open, and so locked."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o666)
    _locked.add(fd)
    return fd


def unlock(fd: int) -> None:
    """Give a lock back, whoever else has the file open, and close it; in a forked child, it is closed already."""
    if fd in _locked:
        _locked.remove(fd)
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(fd, fcntl.LOCK_UN)
        os.close(fd)


_locked: set[int] = set()  # opened by this process


def _close_in_child() -> None:
    for fd in _locked:
        os.close(fd)
    _locked.clear()


os.register_at_fork(after_in_child=_close_in_child)
