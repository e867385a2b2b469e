"""Files that hold swapped bytes: opened with direct I/O where possible, without a name, preallocated.

Owns: how such a file comes into being, its alignment, the words in which a directory or a full disk is refused.
Must not know: extents, keys, engines.
Next: `space` divides files into extents; `store` owns both. The NVMe bench opens its files here, too.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import fcntl
import logging
import os
import secrets
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Protocol

from swap.errors import SwapError, SwapFullError, error_class, format_bytes
from swap.io.aio import file_facts, preallocate

_log = logging.getLogger(__name__)

LEAST_ALIGNMENT_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class SwapFile:
    """An open file for swapped bytes.

    Attributes:
        fd: opened for reading and writing, with O_DIRECT where `direct`.
        directory: where its bytes are.
        direct: the page cache is bypassed.
        alignment: of offsets, lengths and addresses, bytes; a multiple of 4096.
    """

    fd: int
    directory: str
    direct: bool
    alignment: int


def open_unlinked(directory: str, *, direct: bool = True) -> SwapFile:
    """Create an empty file without a name in `directory`; it is gone when its descriptor is closed.

    Args:
        directory: an existing directory.
        direct: bypass the page cache where the file system allows it; a warning says where it does not.

    Raises:
        SwapFullError: no room for even an empty file.
        SwapError: the directory is missing or not writable, or no descriptor is left.
    """
    return _open(directory, lambda flags: open_nameless(directory, flags), direct)


def open_named(path: str, directory: str) -> SwapFile:
    """Open the file at `path` in `directory`, or create an empty one, with direct I/O where that is possible.

    Raises:
        SwapFullError: no room for even an empty file.
        SwapError: the directory is missing, or it or the file is not writable.
    """
    return _open(directory, lambda flags: os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | flags, 0o600), True)


def create_scratch(
    directories: Sequence[str], capacity_bytes: int, weights: Sequence[float] | None = None
) -> tuple[list[SwapFile], list[int]]:
    """Create one file without a name per directory and preallocate `capacity_bytes` over all of them.

    Args:
        directories: existing ones.
        capacity_bytes: of all files together, rounded down to the alignment.
        weights: sizes in proportion to these; None for the free space.

    Returns:
        The files, which the caller closes, and their sizes in bytes.

    Raises:
        SwapFullError: the file systems have not enough room; the text names needed and free bytes per path.
        SwapError: a directory is missing or not writable.
        ValueError: a capacity below the alignment.
    """
    with contextlib.ExitStack() as undo:
        files = []
        for directory in directories:
            files.append(open_unlinked(directory))
            undo.callback(os.close, files[-1].fd)
        alignment = max(file.alignment for file in files)
        capacity = capacity_bytes // alignment * alignment
        if capacity <= 0:
            raise ValueError(f"capacity_bytes: expected at least {alignment} bytes but got {capacity_bytes}")
        sizes = divide_capacity(files, capacity, alignment, weights)
        for file, size in zip(files, sizes, strict=True):
            if size:
                reserve(file, size)
        undo.pop_all()
    return files, sizes


def reserve(file: SwapFile, length_bytes: int, first: int = 0) -> None:
    """Preallocate the bytes up to a length, so that a full disk is found now and not in the middle of a run.

    Args:
        file: whose length it becomes, at least.
        length_bytes: of the file.
        first: the bytes before it are there already; XFS wants free space for all that is asked for.

    Raises:
        SwapFullError: not enough room.
        SwapError: any other refusal.
    """
    code = preallocate(file.fd, length_bytes, first)
    if code in (_errno.ENOSPC, _errno.EDQUOT) and _has_all_blocks(file, length_bytes):
        return
    if code in (_errno.EOPNOTSUPP, _errno.ENOSYS):
        _log.warning(
            "swap path %s: space cannot be reserved here; a full disk will be found only later", file.directory
        )
        code = _lengthen(file, length_bytes)
    if code in (_errno.ENOSPC, _errno.EDQUOT):
        raise SwapFullError(
            f"swap path {file.directory}: {format_bytes(length_bytes - first)} needed but "
            f"{format_bytes(free_bytes_of(file))} free",
            errno=code,
            path=file.directory,
            length_bytes=length_bytes - first,
            remedy="free space, raise the quota, add a path on another drive, or ask for less",
        )
    elif code:
        raise SwapError(
            f"swap path {file.directory}: cannot reserve {format_bytes(length_bytes - first)}",
            errno=code,
            path=file.directory,
            length_bytes=length_bytes - first,
            remedy="raise the file size limit (ulimit -f)" if code == _errno.EFBIG else "name another path",
        )


def _lengthen(file: SwapFile, length_bytes: int) -> int:
    """Give a file this length without room for it; returns 0 or why not (errno)."""
    try:
        os.ftruncate(file.fd, length_bytes)
    except OSError as error:
        return error.errno or _errno.EIO
    return 0


def sizes_of(files: Sequence[SwapFile]) -> list[int]:
    """Sizes of files, bytes."""
    return [os.fstat(file.fd).st_size for file in files]


def cut_back(files: Sequence[SwapFile], sizes: Sequence[int]) -> None:
    """Give the room behind these sizes back, as far as the system does it: an error is on its way up."""
    for file, size in zip(files, sizes, strict=True):
        with contextlib.suppress(OSError):
            os.ftruncate(file.fd, size)


def _has_all_blocks(file: SwapFile, length_bytes: int) -> bool:
    facts = os.fstat(file.fd)
    return facts.st_size >= length_bytes and facts.st_blocks * 512 >= length_bytes  # that is their unit everywhere


def free_bytes_of(file: SwapFile) -> int:
    """Free space of the file system that holds `file`, bytes."""
    info = os.fstatvfs(file.fd)
    return info.f_bavail * info.f_frsize


def divide_capacity(
    files: Sequence[SwapFile], capacity: int, alignment: int, weights: Sequence[float] | None = None
) -> list[int]:
    """Divide `capacity` bytes over files in proportion to weights or else to free space, as far as there is room.

    Paths on one file system share its free space.

    Raises:
        SwapFullError: together the file systems have less than `capacity` free.
    """
    devices = [os.fstat(file.fd).st_dev for file in files]
    free = [
        free_bytes_of(file) // devices.count(device) // alignment * alignment
        for file, device in zip(files, devices, strict=True)
    ]
    total = sum(free)
    if total < capacity:
        each = ", ".join(f"{file.directory} {format_bytes(size)}" for file, size in zip(files, free, strict=True))
        raise SwapFullError(
            f"swap files: {format_bytes(capacity)} needed but {format_bytes(total)} free: {each}",
            errno=_errno.ENOSPC,
            path=files[0].directory,
            length_bytes=capacity,
            remedy="free space, add a path on another drive, or ask for less",
        )
    if weights is None:
        wanted = [capacity * size // total for size in free]
    else:
        wanted = [int(capacity * (weight / sum(weights))) for weight in weights]
    shares = [min(size, want // alignment * alignment) for size, want in zip(free, wanted, strict=True)]
    rest = capacity - sum(shares)
    for i in sorted(range(len(files)), key=lambda i: free[i] - shares[i], reverse=True):
        extra = min(rest, free[i] - shares[i])
        shares[i] += extra
        rest -= extra
    return shares


class _Opener(Protocol):
    def __call__(self, extra_flags: int) -> int: ...


def _open(directory: str, opener: _Opener, direct: bool) -> SwapFile:
    try:
        try:
            fd = opener(os.O_DIRECT if direct else 0)
        except OSError as error:
            if error.errno != _errno.EINVAL or not direct:
                raise
            direct = False
            fd = opener(0)
            _log_indirect(directory)
    except OSError as error:
        raise open_error(directory, error) from None
    facts = file_facts(fd)
    if facts.in_memory:
        _log.warning("swap path %s: it is a file system in memory; its bytes are host memory, not disk", directory)
    elif direct and facts.direct_refused:
        _log_indirect(directory)
    if direct and (facts.direct_refused or facts.in_memory):
        direct = False
        flags = fcntl.fcntl(fd, fcntl.F_GETFL)
        fcntl.fcntl(fd, fcntl.F_SETFL, flags & ~os.O_DIRECT)
    alignment = max(LEAST_ALIGNMENT_BYTES, facts.memory_alignment, facts.offset_alignment)
    return SwapFile(fd, directory, direct, alignment)


def _log_indirect(directory: str) -> None:
    _log.warning("swap path %s: no direct I/O (O_DIRECT) here; the page cache is used, which is slower", directory)


def open_nameless(directory: str, extra_flags: int) -> int:
    """Open an empty file without a name in `directory`; the caller closes the descriptor that is returned.

    Args:
        directory: an existing one.
        extra_flags: such as O_DIRECT.

    Raises:
        OSError: it cannot be; no file is left.
    """
    flags = os.O_RDWR | os.O_CLOEXEC | extra_flags
    try:
        return os.open(directory, flags | os.O_TMPFILE, 0o600)
    except OSError as error:
        # File systems without O_TMPFILE answer EOPNOTSUPP; kernels without it see a directory (EISDIR).
        if error.errno not in (_errno.EOPNOTSUPP, _errno.EISDIR):
            raise
    name = os.path.join(directory, f".swap-{os.getpid()}-{secrets.token_hex(8)}")
    try:
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, 0o600)
    finally:
        with contextlib.suppress(FileNotFoundError):  # also where O_DIRECT is refused, for the file is there by then
            os.unlink(name)


def open_error(directory: str, error: OSError) -> SwapError:
    """The error of a file that could not be created or opened in `directory`."""
    remedies = {
        _errno.ENOENT: "create the directory or name another",
        _errno.ENOTDIR: "name a directory, not a file",
        _errno.EACCES: "make the directory writable for this user or name another",
        _errno.EPERM: "make the directory writable for this user or name another",
        _errno.EROFS: "name a directory on a file system that is mounted for writing",
        _errno.EMFILE: "raise the limit of open files (ulimit -n)",
        _errno.ENFILE: "raise the system's limit of open files (sysctl fs.file-max)",
        _errno.ENOSPC: "free space or name another directory",
    }
    return error_class(error.errno)(
        f"swap path {directory}: expected a directory to create a file in",
        errno=error.errno,
        path=directory,
        remedy=remedies.get(error.errno or 0, "name another directory"),
    )
