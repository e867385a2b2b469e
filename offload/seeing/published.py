"""The small file in which a running engine says how it is, for ``python -m offload top``.

Owns where the files are, their format, and which of them are of processes that have ended. One file per engine, which
only its user may read. It is written in place: nothing is renamed or synchronised, so a write costs microseconds. A
checksum tells a reader that it came in the middle of one. Must not import torch. Next: :mod:`offload.watching` writes,
:mod:`offload.cli.top` reads.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import logging
import math
import os
import stat
import weakref
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from offload.cache import cache_folder

logger = logging.getLogger(__name__)

VERSION = 1
SUFFIX = ".engine"
FORGOTTEN_S = 86400.0  # of a file of another machine or container, of which nobody here knows whether it runs
_TRIES = 50  # of a reader that comes in the middle of writes
_MOST_BYTES = 1 << 20
_numbers = itertools.count(1)  # of the engines of this process


def folder() -> Path:
    """Return where the files of this user's engines are."""
    return cache_folder() / "running"


def _space() -> str:
    """Return in which space a number means one process: this machine since it started, and this container."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return ""


def _start_of(pid: int) -> str | None:
    """Return when a process began, in ticks since the machine did; None of one that has ended."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before may have anything in it
    return None if len(fields) < 20 or fields[0] in "ZX" else fields[19]


class Publisher:
    """Writes one engine's file. If it cannot be written, that is logged, and nothing is written any more."""

    def __init__(self) -> None:
        """Begin without a file."""
        self.path: Path | None = None
        self._file: int | None = None
        self._who = {"version": VERSION, "pid": os.getpid(), "start": _start_of(os.getpid()), "space": _space()}
        self._is_over = False
        self._removal: weakref.finalize[..., Publisher] | None = None

    def write(self, state: Mapping[str, Any]) -> None:
        """Replace what the file says."""
        if self._is_over:
            return
        try:
            if self._file is None:
                self._open()
            assert self._file is not None
            os.pwrite(self._file, packed({**self._who, **state}), 0)
        except OSError as error:
            logger.info("offload top does not show this engine: %s", error)
            self.close()

    def _open(self) -> None:
        directory = folder()
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        running(directory)  # forgets those of processes that were killed
        space = zlib.crc32(str(self._who["space"]).encode())  # containers and nodes may share this folder
        self.path = directory / f"{os.getpid()}-{next(_numbers)}-{space:08x}{SUFFIX}"
        self.path.unlink(missing_ok=True)  # of an earlier process of this number
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
        self._file = os.open(self.path, flags, 0o600)
        self._removal = weakref.finalize(self, _remove, self._file, self.path, os.getpid())

    def close(self) -> None:
        """Remove the file, as the end of the process does. Idempotent."""
        self._is_over = True
        removal = None if self._removal is None else self._removal.detach()
        if removal is not None:
            _remove(*removal[2])


def _remove(file: int, path: Path, pid: int) -> None:
    """Close and remove a file, unless this is a child that has it from its parent."""
    with contextlib.suppress(OSError):
        os.close(file)
        if os.getpid() == pid:
            path.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, slots=True)
class Running:
    """An engine that runs.

    Attributes:
        path: of its file.
        state: what the file says.
        written_s: when, in seconds since 1970.
    """

    path: Path
    state: Mapping[str, Any]
    written_s: float

    @property
    def pid(self) -> int:
        """Of its process."""
        return int(self.state["pid"])


def running(directory: Path | None = None) -> list[Running]:
    """Return this user's engines that run here; files of processes that have ended are removed."""
    found, space, now_s = [], _space(), datetime.datetime.now().timestamp()
    for path in sorted((folder() if directory is None else directory).glob(f"*{SUFFIX}")):
        with contextlib.suppress(OSError):
            about = path.stat()
            if about.st_uid != os.getuid():
                continue
            one = read(path)
            if one is not None and is_running(one):
                found.append(one)
            elif (one is not None and one.state["space"] == space) or now_s - about.st_mtime > FORGOTTEN_S:
                path.unlink(missing_ok=True)
    return found


def is_running(one: Running) -> bool:
    """Tell whether an engine that was read is one of a process that runs here."""
    start = _start_of(one.pid)
    return one.path.exists() and one.state["space"] == _space() and start is not None and start == one.state["start"]


def packed(state: Mapping[str, Any]) -> bytes:
    """Return the content of a file: checksum, length, and JSON, in which a number that is not finite is null."""
    content = json.dumps(_plain(state), allow_nan=False).encode()
    return b"%08x %d\n" % (zlib.crc32(content), len(content)) + content


def read(path: Path) -> Running | None:
    """Return what a file says; None where it is no such file.

    Raises:
        OSError: it cannot be read.
    """
    for _ in range(_TRIES):
        about = path.stat()
        if not stat.S_ISREG(about.st_mode):  # reading a pipe would wait for whoever writes to it
            return None
        with path.open("rb") as file:
            head, _, rest = file.read(_MOST_BYTES).partition(b"\n")
        with contextlib.suppress(ValueError):
            checksum, length = head.split()
            content = rest[: int(length)]
            if len(content) == int(length) and zlib.crc32(content) == int(checksum, 16):
                state = json.loads(content)
                return Running(path, state, about.st_mtime) if _is_whole(state) else None
    return None


def _is_whole(state: Any) -> bool:
    return (
        isinstance(state, dict)
        and state.get("version") == VERSION
        and isinstance(state.get("pid"), int)
        and {"start", "space", "step", "tiers", "lanes", "waits"} <= state.keys()
    )


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
