"""A directory of checkpoints: which are whole, which is the latest, and how a new one takes its place.

A checkpoint is a folder named by its tag. It is written under another name, flushed, renamed, and ``latest`` follows
last; so whatever ends a save, the ones before stay. Owns names, locks and the order of renames. Knows nothing of what
is in the files. Next: :mod:`offload.checkpoints`.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import re
import secrets
import shutil
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import TypeVar

from offload.checkpoint.format.index import FILE_NAME, DamagedError, Index
from offload.checkpoint.format.locks import lock, open_to_lock, unlock
from offload.checkpoint.format.small_files import write_text
from offload.errors import CheckpointError
from swap.durable.disk import Disk
from swap.errors import SwapFullError, format_bytes

logger = logging.getLogger(__name__)
T = TypeVar("T")

LATEST = "latest"
LOCK = ".lock"
_SAVING = ".saving-"  # under way, or what a broken-off save has left
_REPLACED = ".replaced-"  # while another one takes its place
_DELETED = ".deleted-"
_DISK = Disk()
_TAG = re.compile(r"[A-Za-z0-9_][A-Za-z0-9_.+=-]{0,199}")


class Folder:
    """One directory of checkpoints."""

    def __init__(self, directory: str | Path) -> None:
        self.path = Path(directory).absolute()  # whoever changes the working directory

    # --- reading ----------------------------------------------------------------------------------------------------

    def tags(self) -> list[str]:
        """Return the whole checkpoints, the oldest first; damaged ones are among them, before the others."""
        found = []
        for tag in {path.name.removeprefix(_REPLACED) for path in self._folders()}:
            if not tag.startswith(".") and (path := _whole(self.path / tag)) is not None:
                try:
                    found.append((Index.read(path / FILE_NAME).sequence, tag))
                except CheckpointError as error:
                    logger.warning("%s", error)
                    found.append((-1, tag))
        return [tag for _, tag in sorted(found)]

    def at(self, tag: str) -> Path:
        """Return the folder of one of the :meth:`tags`; it has another name if its replacement was broken off."""
        return _whole(self.path / tag) or self.path / tag

    def unfinished(self) -> list[str]:
        """Return the folders that a broken-off save has left."""
        return sorted(path.name for path in self._folders() if path.name.startswith(_SAVING))

    def tell_unfinished(self) -> None:
        """Log what broken-off saves have left: nobody reads it."""
        for name in self.unfinished():
            logger.warning("checkpoint %s: a save was broken off; it is ignored", self.path / name)

    def find(self, tag: str | None) -> Path:
        """Return the folder of a checkpoint: of a tag, or of the latest one.

        Raises:
            CheckpointError: there is none.
        """
        if tag is not None:
            if (found := _whole(self.path / tag)) is not None:
                return found
            raise CheckpointError(f"checkpoint {self.path / tag}: there is none{self._hint()}")
        if (found := _whole(self.path)) is not None:  # the folder of a checkpoint itself
            return found
        self.tell_unfinished()
        with contextlib.suppress(OSError, UnicodeDecodeError):
            named = (self.path / LATEST).read_text(encoding="utf-8").strip()
            if _TAG.fullmatch(named) and (found := _whole(self.path / named)) is not None:
                return found
        tags = self.tags()
        if not tags:
            raise CheckpointError(f"checkpoint directory {self.path}: there is no checkpoint in it{self._hint()}")
        logger.warning("checkpoint directory %s: %r names no checkpoint; taking %s", self.path, LATEST, tags[-1])
        return self.at(tags[-1])

    @contextlib.contextmanager
    def reading(self, tag: str | None) -> Iterator[Path]:
        """Yield the folder that :meth:`find` finds, which nobody replaces or deletes meanwhile.

        Raises:
            CheckpointError: there is none.
        """
        while True:
            path = self.find(tag)
            with contextlib.ExitStack() as last:
                if _stays(path / FILE_NAME, last):
                    yield path
                    return

    def _hint(self) -> str:
        if not self.path.is_dir():
            return "; the directory does not exist: name the one that save_checkpoint wrote to"
        tags, unfinished = self.tags(), self.unfinished()
        if tags:
            return f"; there are {', '.join(tags)}"
        return f"; only what broken-off saves have left: {', '.join(unfinished)}" if unfinished else "; it holds none"

    def _folders(self) -> list[Path]:
        try:
            return [path for path in self.path.iterdir() if path.is_dir()]
        except FileNotFoundError:
            return []
        except OSError as error:
            raise CheckpointError(
                f"checkpoint directory {self.path}: cannot be read: {error.strerror or error}; name a directory"
            ) from error

    # --- writing ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def writing(self) -> Iterator[None]:
        """Have the directory for oneself, for a save; put right what an earlier save was broken off in.

        Raises:
            CheckpointError: another save uses it, it cannot be written to, or it is a checkpoint itself.
        """
        if (self.path / FILE_NAME).is_file():
            raise CheckpointError(
                f"checkpoint directory {self.path}: is a checkpoint itself, as its {FILE_NAME} says, and would be "
                f"loaded in the place of those in it; name the directory that it is in, {self.path.parent}"
            )
        with contextlib.ExitStack() as last:
            try:
                self.path.mkdir(parents=True, exist_ok=True)
                fd = open_to_lock(self.path / LOCK, os.O_RDWR | os.O_CREAT)
                last.callback(unlock, fd)
                if not lock(fd):
                    raise CheckpointError(
                        f"checkpoint directory {self.path}: another save is under way in it; wait for it, or save to "
                        "another directory"
                    )
                self._put_right()
            except OSError as error:
                raise self._refused(error) from error
            yield

    def next_sequence(self) -> int:
        """Return a number that is greater than those of all checkpoints here."""
        most = 0
        for tag in self.tags():
            with contextlib.suppress(CheckpointError):
                most = max(most, Index.read(self.at(tag) / FILE_NAME).sequence)
        return most + 1

    @contextlib.contextmanager
    def begin(self, tag: str, size_bytes: int, token: int | None = None) -> Iterator[Path]:
        """Yield a new folder for a checkpoint of about `size_bytes`; it is deleted if the block raises.

        Args:
            tag: of the checkpoint.
            size_bytes: of its tensors.
            token: that :func:`new_token` has returned, for whoever is to :meth:`join`; None makes one.

        Raises:
            swap.SwapFullError: the drive has no room for it.
            CheckpointError: the directory cannot be written to, or something else has the name of the tag.
        """
        if os.path.lexists(self.path / tag) and not (self.path / tag / FILE_NAME).is_file():
            raise CheckpointError(
                f"checkpoint {self.path / tag}: expected a checkpoint that is replaced, or nothing of this name, but "
                "something else is there, which would be deleted; save under another tag, or move it away"
            )
        folder = self._saving(tag, new_token() if token is None else token)
        try:
            info = os.statvfs(self.path)
            free = info.f_bavail * info.f_frsize
            if free < size_bytes:
                raise SwapFullError(
                    f"checkpoint directory {self.path}: a checkpoint needs {format_bytes(size_bytes)} but "
                    f"{format_bytes(free)} are free",
                    errno=errno.ENOSPC,
                    path=str(self.path),
                    length_bytes=size_bytes,
                    remedy="free space, keep fewer checkpoints, or name a directory on another drive",
                )
            folder.mkdir()
        except SwapFullError:
            raise
        except OSError as error:
            raise self._refused(error) from error
        try:
            yield folder
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise

    def join(self, tag: str, token: int) -> Path:
        """Return the folder that another process has begun with the same `tag` and `token`.

        Raises:
            CheckpointError: it is not to be seen here.
        """
        folder = self._saving(tag, token)
        if not folder.is_dir():
            raise CheckpointError(
                f"checkpoint directory {self.path}: expected the one that rank 0 writes to but got another one, in "
                "which its new folder is not to be seen; name the same directory on all ranks, on a file system that "
                "all their machines share"
            )
        return folder

    def write(self, path: Path, text: str) -> None:
        """Write a file of a checkpoint that is under way.

        Raises:
            CheckpointError, swap.SwapFullError: it cannot be written.
        """
        try:
            write_text(path, text)
        except OSError as error:
            raise self._refused(error) from error

    def remove(self, path: Path) -> None:
        """Delete a file of a checkpoint that is under way.

        Raises:
            CheckpointError: it cannot be deleted.
        """
        try:
            path.unlink()
        except OSError as error:
            raise self._refused(error) from error

    def publish(self, folder: Path, tag: str, index: str, *, latest: bool = True) -> Path:
        """Write the text of the index, which completes a folder; give it its name. With `latest`, let that be it.

        Raises:
            CheckpointError: the checkpoint in whose place it comes is being read, or something could not be written.
        """
        target, aside = self.path / tag, self.path / f"{_REPLACED}{tag}"
        replaces = False
        try:
            write_text(folder / FILE_NAME, index)
            _DISK.sync_directory(str(folder))
            replaces = target.exists()
            if replaces and (aside.exists() or not self._put_aside(target, aside)):  # aside is what somebody reads
                raise CheckpointError(
                    f"checkpoint {target}: is being read and cannot be replaced; save under another tag"
                )
            folder.rename(target)
            _DISK.sync_directory(str(self.path))
            if latest:
                write_text(self.path / LATEST, f"{tag}\n")
                _DISK.sync_directory(str(self.path))
        except BaseException as error:
            if replaces and not target.exists():
                with contextlib.suppress(OSError):  # the next save tries again
                    aside.rename(target)
            if isinstance(error, OSError):
                raise self._refused(error) from error
            raise
        if replaces:
            self._give_up(aside)
        return target

    def keep(self, count: int) -> None:
        """Give up the oldest checkpoints until `count` are left; what somebody reads, or others have made, stays."""
        for tag in self.tags()[:-count]:
            if self._is_known(tag):
                self._give_up(self.at(tag))

    def _is_known(self, tag: str) -> bool:
        """Tell whether a folder is a checkpoint of this version of the format, maybe a damaged one."""
        try:
            Index.read(self.at(tag) / FILE_NAME)
        except DamagedError:
            return True
        except CheckpointError:  # of a later version, say, or of another program
            return False
        return True

    def given_up(self) -> list[Path]:
        """Return the folders that are to be deleted: nobody finds them any more."""
        return [path for path in self._folders() if path.name.startswith(_DELETED)]

    def sweep(self) -> None:
        """Delete what was given up, in any thread. If it is broken off, the next save deletes the rest."""
        gone = self.given_up()
        with contextlib.suppress(OSError):
            if gone:
                _DISK.sync_directory(str(self.path))  # else a power cut may leave the old names, and half of the files
            for path in gone:
                if path.is_symlink():  # what it leads to is not this directory's
                    path.unlink()
                else:
                    shutil.rmtree(path, ignore_errors=True)

    def _give_up(self, folder: Path) -> None:
        """Let a folder be none that anybody finds, unless somebody reads it."""
        with contextlib.suppress(OSError):  # it costs room, and the next save tries again
            self._put_aside(folder, self.path / f"{_DELETED}{secrets.token_hex(4)}")

    def _saving(self, tag: str, token: int) -> Path:
        return self.path / f"{_SAVING}{tag}-{token:08x}"

    def _put_right(self) -> None:
        for path in self._folders():
            if path.name.startswith(_REPLACED):
                target = self.path / path.name.removeprefix(_REPLACED)
                if target.exists():
                    self._give_up(path)
                else:
                    self._put_aside(path, target)  # unless somebody reads it: it is found where it is
            elif path.name.startswith(_SAVING):
                shutil.rmtree(path, ignore_errors=True)
        self.sweep()

    @staticmethod
    def _put_aside(folder: Path, name: Path) -> bool:
        """Give a folder another name; False where somebody reads it."""
        with contextlib.ExitStack() as last:
            with contextlib.suppress(OSError):  # without an index, it is no checkpoint
                fd = open_to_lock(folder / FILE_NAME)
                last.callback(unlock, fd)
                if not lock(fd):
                    return False
            folder.rename(name)
            return True

    def _refused(self, error: OSError) -> Exception:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return SwapFullError(
                f"checkpoint directory {self.path}: cannot be written to",
                errno=error.errno,
                path=str(self.path),
                remedy="free space, keep fewer checkpoints, or name a directory on another drive",
            )
        return CheckpointError(
            f"checkpoint directory {self.path}: cannot be written to: {error.strerror or error}; name a directory on a "
            "file system that is mounted for writing"
        )


def _whole(path: Path) -> Path | None:
    """Return where the checkpoint is whose folder is to be `path`; None where there is none.

    A save that was broken off between its two renames has left the checkpoint that it was to replace under the name
    that it had for that time. Whoever reads takes it from there, and the next save renames it.
    """
    aside = path.parent / f"{_REPLACED}{path.name}"
    for folder in (path,) if path.exists() else (aside,):
        if (folder / FILE_NAME).is_file():
            return folder
    return None


def _stays(index: Path, last: contextlib.ExitStack) -> bool:
    """Lock an index until `last` ends; False where its folder was put aside since it was found."""
    try:
        fd = open_to_lock(index)
        last.callback(unlock, fd)
        return lock(fd, shared=True) and os.path.samestat(os.fstat(fd), index.stat())
    except FileNotFoundError:
        return False
    except OSError:  # whoever reads it says why
        return True


def first_whole(folders: Iterable[Path], load: Callable[[Path], T]) -> tuple[Path, T]:
    """Load the first of some checkpoints that is whole, and log what is wrong with those before it.

    Args:
        folders: of the checkpoints, one at least.
        load: one of them.

    Returns:
        Its folder, and what `load` returns.

    Raises:
        DamagedError: none is whole.
    """
    damage: DamagedError | None = None
    for folder in folders:
        try:
            return folder, load(folder)
        except DamagedError as error:
            logger.warning("%s", error)
            damage = error
    assert damage is not None, "expected a checkpoint"
    raise damage


def new_token() -> int:
    """Return a number that tells one save from another."""
    return secrets.randbits(32)


def check_tag(tag: str) -> str:
    """Return the tag of a checkpoint.

    Raises:
        CheckpointError: it cannot be the name of a folder.
    """
    if not isinstance(tag, str) or not _TAG.fullmatch(tag) or tag == LATEST:
        raise CheckpointError(
            f"tag: expected letters, digits and any of '_.+=-', not beginning with one of '.+=-', but got {tag!r}"
        )
    return tag
