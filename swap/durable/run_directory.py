"""A run directory: what a durable store leaves on the drives, and how it is found again.

Owns: the lock, the names and first blocks of the data files, the procedure of creating and of opening a run.
Must not know: transfers, the order of puts.
Next: `manifest` for the mapping itself, `commits` for when it is committed.

    DIRECTORY/swap.lock      who uses the directory; locked with flock as long as its process lives
    DIRECTORY/swap.data      the extents; its first block says which run and which path it belongs to
    DIRECTORY/swap.manifest  the mapping; in the first directory only

A run is created in this order: data files of full size, the manifest, the first blocks of the data files. What a crash
leaves in between is told from a foreign file and from a lost manifest: a first block that was never written is zeros.
Without a manifest, the next creation gives its room back, and so does one that fails.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import fcntl
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from swap.durable.disk import Disk
from swap.durable.manifest import NO_MARK, Manifest, RunFacts
from swap.durable.records import decode_record, encode_record
from swap.errors import SwapCorruptError, SwapError, SwapLockedError, format_bytes
from swap.io.checksums import granule_for
from swap.io.files import SwapFile, cut_back, divide_capacity, open_error, open_named, reserve, sizes_of
from swap.space.allocation import Piece, Space
from swap.space.extents import Extent
from swap.space.mapping import Version

_log = logging.getLogger(__name__)

LOCK_NAME: Final = "swap.lock"
DATA_NAME: Final = "swap.data"
MANIFEST_NAME: Final = "swap.manifest"
_FORMAT: Final = "offload-swap-data"
_LOCK_TEXT_BYTES: Final = 256


@dataclass(slots=True)
class RunDirectory:
    """An open run.

    Attributes:
        files: data files, in the order of the paths.
        sizes: of the data files, bytes.
        alignment: of offsets, lengths and addresses, bytes.
        manifest: the mapping on the drive.
        versions: the mapping as of the last commit.
        locks: descriptors that hold the locks.
    """

    files: list[SwapFile]
    sizes: list[int]
    alignment: int
    manifest: Manifest
    versions: dict[Hashable, Version]
    locks: list[int]

    def check_names(self) -> None:
        """Check that this run's files are found by their names, and let its locks look used.

        Who cleans a drive up may remove what is old, and nothing else writes to a lock.

        Raises:
            SwapError: a file is gone, or another one has its name.
        """
        held = []
        if not self.manifest.doubtful:  # else it is written anew
            held.append((MANIFEST_NAME, self.files[0].directory, self.manifest.fd))
        for file, lock in zip(self.files, self.locks, strict=True):
            held += [(DATA_NAME, file.directory, file.fd), (LOCK_NAME, file.directory, lock)]
        for name, directory, fd in held:
            path = os.path.join(directory, name)
            try:
                if not os.path.samestat(os.stat(path), os.fstat(fd)):
                    raise FileNotFoundError(_errno.ENOENT, os.strerror(_errno.ENOENT))
            except OSError as error:
                raise SwapError(
                    f"{path}: expected the file that this store has open but it is gone or another one",
                    errno=error.errno,
                    path=path,
                    remedy="move the file back, or begin another run: this one would not be found again",
                ) from None
        for lock in self.locks:
            with contextlib.suppress(OSError):
                os.utime(lock)


def open_run(
    directories: Sequence[str], capacity_bytes: int, weights: Sequence[float] | None, disk: Disk
) -> tuple[RunDirectory, Space]:
    """Open the run in `directories`, or create one where they are empty; and say what is free in it.

    Args:
        directories: existing ones, in the same order every time.
        capacity_bytes: size of all data files together. More than they have makes them longer.
        weights: sizes in proportion to these; None for the free space.
        disk: the operating system.

    Raises:
        SwapLockedError: somebody uses a directory.
        SwapCorruptError: a file is damaged, cut off, missing, or not one of this run.
        SwapFullError: not enough room.
        SwapError: a directory is missing or not writable, or the run is larger than `capacity_bytes`.
        ValueError: a directory is given twice, or a capacity below two blocks per path.
    """
    if len({os.path.realpath(directory) for directory in directories}) < len(directories):
        raise ValueError(f"paths: expected different directories but got {list(directories)}")
    directories = [os.path.abspath(directory) for directory in directories]  # whoever changes the working directory
    with contextlib.ExitStack() as undo:
        locks = []
        for directory in directories:
            locks.append(_lock(directory))
            undo.callback(os.close, locks[-1])
        path = os.path.join(directories[0], MANIFEST_NAME)
        with contextlib.suppress(FileNotFoundError):
            os.unlink(path + ".new")
        try:
            try:
                manifest, versions = Manifest.load(path, disk)
            except FileNotFoundError:
                run = _create(directories, capacity_bytes, weights, disk, locks, undo)
            else:
                undo.callback(manifest.close)
                run = _reopen(directories, capacity_bytes, weights, disk, locks, undo, manifest, versions)
        except OSError as error:
            if isinstance(error, SwapError):
                raise
            raise open_error(directories[0], error) from None
        space = Space(run.sizes, run.alignment, weights)
        _occupy(space, run)
        undo.pop_all()
    return run, space


def find_run(directories: Sequence[str | os.PathLike[str]], key: Hashable) -> tuple[int, bool]:
    """Look at the run in `directories` without opening it: the bytes of its data files, and whether it has `key`.

    Both are as of the last commit, 0 and False where there is no run. Somebody may use the run meanwhile.

    Raises:
        SwapCorruptError: the manifest is damaged, or it is none.
        SwapError: it cannot be opened, or another version of this software wrote it.
    """
    try:
        manifest, versions = Manifest.load(os.path.join(directories[0], MANIFEST_NAME), Disk())
    except FileNotFoundError:
        return 0, False
    manifest.close()
    return sum(manifest.facts.sizes), key in versions


def marks_of(directories: Sequence[str | os.PathLike[str]]) -> list[int]:
    """Return to which marks of its commits the run in `directories` can :func:`go_back`, in order.

    `NO_MARK` is among them where nothing is committed, or there is no run yet. As :func:`find_run`, this only looks.

    Raises:
        SwapError: as of :func:`find_run`.
    """
    try:
        manifest, _ = Manifest.load(os.path.join(directories[0], MANIFEST_NAME), Disk())
    except FileNotFoundError:
        return [NO_MARK]
    manifest.close()
    return manifest.marks


def go_back(directories: Sequence[str | os.PathLike[str]], mark: int) -> None:
    """Let the last commit with `mark`, one of :func:`marks_of`, be the run's last one.

    What only later commits have is lost. The extents of that commit must be as they were: so somebody has held them.

    Raises:
        SwapLockedError: somebody uses the run.
        SwapError: the manifest cannot be written.
    """
    path = os.path.join(directories[0], MANIFEST_NAME)
    if not os.path.exists(path):
        return
    with contextlib.ExitStack() as last:
        last.callback(os.close, _lock(os.fspath(directories[0])))
        manifest, _ = Manifest.load(path, Disk())
        last.callback(manifest.close)
        if manifest.mark != mark or manifest.doubtful:
            manifest.cut(mark)


# ---- lock ----


def _lock(directory: str) -> int:
    """Lock a directory for this process; returns the descriptor that holds the lock until it is closed."""
    path = os.path.join(directory, LOCK_NAME)
    try:
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise open_error(directory, error) from None
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        started = time.strftime("%Y-%m-%d %H:%M:%S %z")
        text = f"process {os.getpid()} on {socket.gethostname()} since {started}"
        os.pwrite(fd, text.encode()[: _LOCK_TEXT_BYTES - 1].ljust(_LOCK_TEXT_BYTES, b" "), 0)
    except OSError as error:
        holder = os.pread(fd, _LOCK_TEXT_BYTES, 0).decode(errors="replace").strip()
        os.close(fd)
        if error.errno not in (_errno.EWOULDBLOCK, _errno.EACCES):
            raise open_error(directory, error) from None
        raise SwapLockedError(
            f"run directory {directory}: expected to be its only user but got {holder or 'another one'}",
            errno=error.errno,
            path=directory,
            remedy="close that store, wait for that process to end, or name another directory",
        ) from None
    return fd


# ---- a new run ----


def _create(
    directories: Sequence[str],
    capacity_bytes: int,
    weights: Sequence[float] | None,
    disk: Disk,
    locks: list[int],
    undo: contextlib.ExitStack,
) -> RunDirectory:
    for directory in directories:
        _check_no_run(directory)
    files = _open_files(directories, undo)
    path = os.path.join(directories[0], MANIFEST_NAME)
    _empty(files, path)  # of the rest of a creation that a crash ended, whose room is not free
    undo.callback(_empty, files, path)
    alignment = max(file.alignment for file in files)
    capacity = capacity_bytes // alignment * alignment
    if capacity < 2 * alignment * len(files):
        raise ValueError(
            f"capacity_bytes: expected at least {2 * alignment * len(files)} bytes, two blocks per path, "
            f"but got {capacity_bytes}"
        )
    sizes = divide_capacity(files, capacity, alignment, weights)
    if min(sizes) < 2 * alignment:
        raise ValueError(
            f"weights: expected a share of at least {2 * alignment} bytes per path but got {min(sizes)} of {capacity}"
        )
    facts = RunFacts(secrets.token_hex(8), granule_for(alignment), tuple(sizes))
    manifest = Manifest(path, facts, disk)
    for file, size in zip(files, sizes, strict=True):
        reserve(file, size)
        disk.sync(file.fd)
        disk.sync_directory(file.directory)
    undo.callback(manifest.close)
    manifest.rewrite({})
    for index, directory in enumerate(directories):
        _write_header(os.path.join(directory, DATA_NAME), facts, index, disk)
    return RunDirectory(files, sizes, alignment, manifest, {}, locks)


def _empty(files: Sequence[SwapFile], manifest_path: str) -> None:
    """Give the room of data files back, of which no manifest tells."""
    if not os.path.exists(manifest_path):
        for file in files:
            os.ftruncate(file.fd, 0)


def _check_no_run(directory: str) -> None:
    """Refuse a data file that is not the rest of a creation that a crash ended."""
    path = os.path.join(directory, DATA_NAME)
    try:
        block = _read_header(path)
    except FileNotFoundError:
        return
    if not block.strip(b"\0"):
        return
    ours = decode_record(block, 0)
    if ours is not None and ours[0].get("format") == _FORMAT:
        raise SwapCorruptError(
            f"{path}: expected the manifest of run {ours[0].get('run')} in {MANIFEST_NAME} of the first path "
            "but there is none",
            path=path,
            remedy="name the paths of the run in their order, restore the manifest, or remove the data file",
        )
    raise _foreign(path)


# ---- a run that exists ----


def _reopen(
    directories: Sequence[str],
    capacity_bytes: int,
    weights: Sequence[float] | None,
    disk: Disk,
    locks: list[int],
    undo: contextlib.ExitStack,
    manifest: Manifest,
    versions: dict[Hashable, Version],
) -> RunDirectory:
    facts = manifest.facts
    if len(facts.sizes) != len(directories):
        raise SwapError(
            f"run directory {directories[0]}: expected {len(facts.sizes)} paths but got {len(directories)}",
            path=directories[0],
            remedy="name the paths that the run was created with, in their order",
        )
    if capacity_bytes < sum(facts.sizes):
        raise SwapError(
            f"run directory {directories[0]}: expected a capacity of at least {format_bytes(sum(facts.sizes))}, which "
            f"the run has, but got {format_bytes(capacity_bytes)}",
            path=directories[0],
            length_bytes=sum(facts.sizes),
            remedy="allow that much, or name an empty directory",
        )
    for index, directory in enumerate(directories):
        path = os.path.join(directory, DATA_NAME)
        try:
            block = _read_header(path)
        except FileNotFoundError:
            raise SwapCorruptError(
                f"{path}: expected the data file of path {index} of run {facts.run} but there is none",
                path=path,
                remedy="name the paths of the run in their order, or restore the file",
            ) from None
        if not versions and _header(facts, index).startswith(block.rstrip(b"\0")):
            _write_header(path, facts, index, disk)  # a crash came before all of it was written
        else:
            _check_header(path, block, facts, index)
    files = _open_files(directories, undo)
    alignment = max(file.alignment for file in files)
    for file, size in zip(files, facts.sizes, strict=True):
        have = os.fstat(file.fd).st_size
        if have < size:
            path = os.path.join(file.directory, DATA_NAME)
            raise SwapCorruptError(
                f"{path}: expected {size} bytes but got {have}: it was cut off",
                path=path,
                offset_bytes=have,
                length_bytes=size - have,
                remedy="restore the run directory from a copy, or name an empty one",
            )
        if have > size:  # a crash ended a growth; nothing there was committed
            os.ftruncate(file.fd, size)
        # A killed process may have left direct writes with the drive, aimed at extents that are free now. Reserving
        # waits for them (ext4, xfs and btrfs let no allocation overtake direct I/O), so that they cannot hit new data.
        reserve(file, size)
    sizes = list(facts.sizes)
    extra = (capacity_bytes - sum(sizes)) // alignment * alignment
    if extra:
        more = divide_capacity(files, extra, alignment, weights)
        sizes = [size + added for size, added in zip(sizes, more, strict=True)]
        grow(files, manifest, versions, sizes, lambda file: disk.sync(file.fd))
    return RunDirectory(files, sizes, alignment, manifest, versions, locks)


def grow(
    files: Sequence[SwapFile],
    manifest: Manifest,
    versions: Mapping[Hashable, Version],
    sizes: Sequence[int],
    flush: Callable[[SwapFile], None],
) -> None:
    """Make the data files longer, then say so in the manifest.

    Args:
        files: of the run.
        manifest: of the run.
        versions: what is committed.
        sizes: that they are to have.
        flush: returns when the drive has what is in a file.

    Raises:
        SwapFullError: no room; the files are as long as before.
        SwapError: something could not be written or flushed; they are, too, unless the manifest may say otherwise.
    """
    before, reserved = sizes_of(files), False
    try:
        for file, have, size in zip(files, manifest.facts.sizes, sizes, strict=True):
            if size > have:
                reserve(file, size, have)
                flush(file)
        reserved = True
        manifest.resize(tuple(sizes), versions)
    except OSError:
        if not (reserved and manifest.doubtful):
            cut_back(files, before)
        raise
    _log.info("run directory %s: grown to %d bytes", files[0].directory, sum(sizes))


def _check_header(path: str, block: bytes, facts: RunFacts, index: int) -> None:
    """Refuse a data file whose first block does not say that it is the one that the manifest means."""
    found = decode_record(block, 0)
    if found is None or found[0].get("format") != _FORMAT:
        raise _foreign(path)
    run, place = found[0].get("run"), found[0].get("index")
    if (run, place) != (facts.run, index):
        raise SwapCorruptError(
            f"{path}: expected the data file of path {index} of run {facts.run} but got path {place} of run {run}",
            path=path,
            remedy="name the paths of the run in their order, and do not mix files of several runs",
        )


# ---- both ----


def _occupy(space: Space, run: RunDirectory) -> None:
    """Take the first blocks and all committed extents."""
    pieces = [Piece(index, Extent(0, run.alignment)) for index in range(len(run.files))]
    for version in run.versions.values():
        pieces += version.pieces
    try:
        space.occupy(pieces)
    except ValueError as error:
        raise SwapCorruptError(
            f"{run.manifest.path}: expected disjoint extents inside the data files but got {error}",
            path=run.manifest.path,
            remedy="restore the run directory from a copy, or name an empty one",
        ) from None


def _open_files(directories: Sequence[str], undo: contextlib.ExitStack) -> list[SwapFile]:
    files = []
    for directory in directories:
        files.append(open_named(os.path.join(directory, DATA_NAME), directory))
        undo.callback(os.close, files[-1].fd)
    return files


def _read_header(path: str) -> bytes:
    """Return the first block.

    Raises:
        FileNotFoundError: there is no such file.
        SwapError: it cannot be opened.
    """
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise open_error(os.path.dirname(path), error) from None
    try:
        return os.pread(fd, 4096, 0)
    finally:
        os.close(fd)


def _header(facts: RunFacts, index: int) -> bytes:
    return encode_record({"format": _FORMAT, "version": 1, "run": facts.run, "index": index})


def _write_header(path: str, facts: RunFacts, index: int, disk: Disk) -> None:
    """Write the first block, which direct transfers never touch, through the page cache."""
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        disk.write(fd, _header(facts, index), 0)
        disk.sync(fd)
    finally:
        os.close(fd)


def _foreign(path: str) -> SwapCorruptError:
    return SwapCorruptError(
        f"{path}: expected a data file of a swap store but its first block says something else",
        path=path,
        remedy="name another directory, or remove the file",
    )
