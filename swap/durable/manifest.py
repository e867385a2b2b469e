r"""The manifest: which extents hold which key as of the last commit, in a file that survives any crash.

Owns: the format, what a commit writes and in which order, how a file that a crash left behind is read.
Must not know: transfers, locks, which directory it is in.
Next: `records` for the framing; `run_directory` opens it; docs/swap.md has the whole procedure.

The file is a log. Its first record describes the run, every other one is a commit:

    {"format":"offload-swap-manifest","version":1,"run":"5f0c...","granule":262144,"sizes":[1073741824]}
    {"seq":1,"put":[[key,[[file,offset,length,"crc..."],...]],...],"delete":[key,...]}
    {"seq":2,...

A commit may have a mark, which is not less than those before it, beside the marks of those that are held. Whoever
commits beside others goes back to a mark that all have: the log is cut off there.

A commit appends one record and flushes it: its cost follows what changed, not what is there. When the log has grown to
several times the size of its contents it is written anew beside the old one, flushed, and renamed over it.

A crash while a record is appended leaves a piece of it at the end. That commit never returned, so the piece is ignored.
Anything else that is not intact is damage, and refused: `SwapCorruptError` rather than an older mapping.
"""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from swap.durable.disk import Disk
from swap.durable.records import Record, decode_key, decode_record, encode_key, encode_record, may_be_torn
from swap.errors import SwapCorruptError, SwapError, error_class
from swap.space.allocation import Piece
from swap.space.extents import Extent
from swap.space.mapping import Changes, Version

_log = logging.getLogger(__name__)

FORMAT: Final = "offload-swap-manifest"
VERSION: Final = 1
_GROWTH: Final = 4  # the log may become this many times as long as its contents
_LEAST_LOG_BYTES: Final = 1 << 20
NO_MARK: Final = -1


@dataclass(frozen=True, slots=True)
class RunFacts:
    """What all files of a run agree on.

    Attributes:
        run: a random name, which also stands in the data files.
        granule_bytes: bytes per checksum.
        sizes: of the data files, bytes.
    """

    run: str
    granule_bytes: int
    sizes: tuple[int, ...]


class Manifest:
    """An open manifest. Not thread-safe: the store commits one at a time.

    Attributes:
        facts: of the run.
        path: of the file.
        doubtful: a flush failed, or Ctrl-C came between, so what the drive holds is either state; the next commit or
            `rewrite` ends that.
        mark: of the last commit; `NO_MARK` where none had one.
    """

    def __init__(self, path: str, facts: RunFacts, disk: Disk, fd: int = -1) -> None:
        """Describe a manifest, open as `fd` if it exists: `rewrite` creates one, `load` opens one."""
        self.path = path
        self.facts = facts
        self.doubtful = False
        self.mark = NO_MARK
        self._disk = disk
        self._ends: dict[int, int] = {}  # of the last commit with each mark, in the file
        self._held: tuple[int, ...] = ()  # other marks whose extents were held at the last commit
        self._fd = fd
        self._sequence = 0
        self._end = 0
        self._rewritten_bytes = 0

    @classmethod
    def load(cls, path: str, disk: Disk) -> tuple[Manifest, dict[Hashable, Version]]:
        """Open the manifest at `path` and read the last committed mapping.

        Raises:
            FileNotFoundError: there is none.
            SwapCorruptError: it is damaged, or it is no manifest.
            SwapError: it cannot be opened, or another version of this software wrote it.
        """
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        except FileNotFoundError:
            raise
        except OSError as error:
            raise _failure(path, "cannot be opened", error, "make it readable and writable for this user") from None
        with contextlib.ExitStack() as undo:
            undo.callback(os.close, fd)
            data = b"".join(iter(lambda: os.read(fd, 1 << 24), b""))
            manifest = cls(path, _read_facts(path, data), disk, fd)
            versions = manifest._replay(data)
            undo.pop_all()
        return manifest, versions

    @property
    def marked(self) -> tuple[int, ...]:
        """Mark of the last commit, and others whose extents were held then."""
        return self.mark, *self._held

    @property
    def marks(self) -> list[int]:
        """Those that `cut` takes, in order; `NO_MARK` is nothing."""
        return sorted(self._ends.keys() & set(self.marked))

    def cut(self, mark: int) -> None:
        """Forget what was committed behind the last commit with `mark`, one of `marks`.

        Raises:
            SwapError: the file cannot be cut off.
        """
        self._end, self.doubtful = self._ends[mark], True
        self._undo_append()
        if self.doubtful:
            raise SwapError(
                f"{self.path}: cannot be cut off behind an earlier commit",
                path=self.path,
                remedy="look at the kernel log; then open it again",
            )

    def commit(
        self,
        changes: Changes,
        mapping_after: Callable[[], Mapping[Hashable, Version]],
        *,
        mark: tuple[int, ...] | None = None,
        before: Mapping[Hashable, Version] | None = None,
    ) -> None:
        """Make changes durable. The data they point to must be on the drive.

        Args:
            changes: since the last commit.
            mapping_after: the whole mapping, changes included; called when the log is written anew.
            mark: of the commit, and those before whose extents are held. What the commit before had stays apart, then.
            before: the mapping of the commit before; beside a mark.

        Raises:
            SwapError: not committed; if `doubtful` the drive may hold either state, and extents of both must be kept.
        """
        try:
            self._commit(changes, mapping_after, mark, before)
        except SwapError:
            raise
        except BaseException:  # Ctrl-C, perhaps behind the append: who called takes the commit for not made
            self.doubtful = True
            raise

    def _commit(
        self,
        changes: Changes,
        mapping_after: Callable[[], Mapping[Hashable, Version]],
        mark: tuple[int, ...] | None,
        before: Mapping[Hashable, Version] | None,
    ) -> None:
        if mark is None and self.doubtful:
            self.rewrite(mapping_after())
            return
        if mark is not None and (self.doubtful or (self.mark in mark[1:] and self._is_long())):
            assert before is not None
            try:
                self.rewrite(before)
            except SwapError as error:
                if self.doubtful:
                    raise
                _log.warning("%s", error)
        self._append(_commit_record(self._sequence + 1, changes.items(), mark))
        if mark is not None:
            self.mark, *held = mark
            self._held = tuple(held)
            self._ends[self.mark] = self._end
        elif self._is_long():
            try:
                self.rewrite(mapping_after())
            except SwapError as error:  # the commit itself is done
                _log.warning("%s", error)

    def resize(self, sizes: tuple[int, ...], mapping: Mapping[Hashable, Version]) -> None:
        """Note that the data files have other sizes; `mapping` is what is committed.

        Raises:
            SwapError: it did not work; the old sizes hold unless `doubtful`.
        """
        if self.mark == NO_MARK or self.doubtful:
            self.rewrite(mapping, replace(self.facts, sizes=sizes))
            return
        self._append(_commit_record(self._sequence + 1, ()) | {"sizes": sizes})  # what `marks` has stays
        self.facts = replace(self.facts, sizes=sizes)

    def _append(self, record: Record) -> None:
        data = encode_record(record)
        self.doubtful = True  # if Ctrl-C comes in the middle of it
        try:
            self._disk.write(self._fd, data, self._end)
            self._disk.sync(self._fd)
        except OSError as error:
            self._undo_append()
            raise _failure(self.path, "cannot append a commit", error, "free space or look at the kernel log") from None
        self._sequence += 1
        self._end += len(data)
        self.doubtful = False

    def rewrite(self, mapping: Mapping[Hashable, Version], facts: RunFacts | None = None) -> None:
        """Write the file anew with this mapping, and with other facts if given.

        Raises:
            SwapError: it did not work; the old file is in place unless `doubtful`.
        """
        facts = facts or self.facts
        data = encode_record(
            {
                "format": FORMAT,
                "version": VERSION,
                "run": facts.run,
                "granule": facts.granule_bytes,
                "sizes": facts.sizes,
            }
        )
        marked = self.mark != NO_MARK
        mark = (self.mark,) if marked else None
        data += encode_record(_commit_record(self._sequence + 1, mapping.items(), mark))
        beside = self.path + ".new"
        fd = -1
        try:
            fd = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
            self._disk.write(fd, data, 0)
            self._disk.sync(fd)
            self._disk.replace(beside, self.path)
            self.doubtful = True  # until the names are on the drive, too
        except BaseException as error:
            if fd >= 0:
                os.close(fd)
            if not isinstance(error, OSError):  # Ctrl-C, perhaps behind the rename: then the open file has no name
                self.doubtful = True
                raise
            with contextlib.suppress(OSError):
                os.unlink(beside)
            raise _failure(self.path, "cannot be written anew", error, "free space or look at the kernel log") from None
        self.close()
        self._fd, self._end, self._rewritten_bytes = fd, len(data), len(data)
        self._sequence += 1
        self._ends = {self.mark: self._end} if marked or not mapping else {}
        self.facts = facts
        try:
            self._disk.sync_directory(os.path.dirname(self.path))
        except OSError as error:
            raise _failure(self.path, "its new version cannot be flushed", error, "look at the kernel log") from None
        self.doubtful = False

    def _is_long(self) -> bool:
        return self._end > max(_LEAST_LOG_BYTES, _GROWTH * self._rewritten_bytes)

    @property
    def fd(self) -> int:
        """Of the open file; -1 once it is closed."""
        return self._fd

    def close(self) -> None:
        """Close the file. Idempotent."""
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)

    def _undo_append(self) -> None:
        """Remove what an append that failed may have left in the file, which ends the doubt."""
        with contextlib.suppress(OSError):
            self._disk.truncate(self._fd, self._end)
            self._disk.sync(self._fd)
            self.doubtful = False

    def _replay(self, data: bytes) -> dict[Hashable, Version]:
        """Carry out the commits of the log; a piece of one at the end is cut off."""
        _, at = _decode(self.path, data, 0)
        versions: dict[Hashable, Version] = {}
        while at < len(data) or not self._rewritten_bytes:
            found = decode_record(data, at)
            if found is None and self._rewritten_bytes and may_be_torn(data, at):
                _log.warning(
                    "%s: the last commit was not finished and is ignored (%d bytes)", self.path, len(data) - at
                )
                break
            record, after = found or _decode(self.path, data, at)
            if self._rewritten_bytes and record["seq"] != self._sequence + 1:
                raise _corrupt(self.path, at, f"expected commit {self._sequence + 1} but got {record['seq']}")
            _apply(record, versions)
            if "sizes" in record:
                self.facts = replace(self.facts, sizes=tuple(record["sizes"]))
            self._sequence = record["seq"]
            at = after
            self._rewritten_bytes = self._rewritten_bytes or at  # what was written in one go: intact or damaged
            self.mark, *held = record.get("mark", self.marked)
            self._held = tuple(held)
            if "mark" in record or not versions:
                self._ends[self.mark] = at
        self._end = at
        if at < len(data):
            # The next commit is appended here: nothing of the piece may be left behind it.
            self.doubtful = True
        return versions


def _read_facts(path: str, data: bytes) -> RunFacts:
    header, _ = _decode(path, data, 0)
    if header.get("format") != FORMAT:
        raise _corrupt(path, 0, f"expected a manifest but got {header.get('format')!r}")
    if header.get("version") != VERSION:
        raise SwapError(
            f"{path}: expected a manifest of version {VERSION} but got version {header.get('version')!r}",
            path=path,
            remedy="open it with the version of this software that wrote it, or name an empty directory",
        )
    return RunFacts(header["run"], header["granule"], tuple(header["sizes"]))


def _decode(path: str, data: bytes, at: int) -> tuple[Record, int]:
    found = decode_record(data, at)
    if found is None:
        raise _corrupt(path, at, "expected an intact record but its checksum or length is wrong")
    return found


def _corrupt(path: str, at: int, text: str) -> SwapCorruptError:
    return SwapCorruptError(
        f"{path}: {text} (offset {at})",
        path=path,
        offset_bytes=at,
        remedy="restore the run directory from a copy, or name an empty one",
    )


def _failure(path: str, text: str, error: OSError, remedy: str) -> SwapError:
    return error_class(error.errno)(f"{path}: {text}", errno=error.errno, path=path, remedy=remedy)


def _commit_record(
    sequence: int, changes: Iterable[tuple[Hashable, Version | None]], mark: tuple[int, ...] | None = None
) -> Record:
    put: list[Any] = []
    delete: list[Any] = []
    for key, version in changes:
        if version is None:
            delete.append(encode_key(key))
        else:
            sums = version.checksums or (b"",) * len(version.pieces)
            rows = [
                [piece.file, piece.extent.offset, piece.extent.length, words.hex()]
                for piece, words in zip(version.pieces, sums, strict=True)
            ]
            put.append([encode_key(key), rows])
    return {"seq": sequence, "put": put, "delete": delete} | ({} if mark is None else {"mark": mark})


def _apply(record: Record, versions: dict[Hashable, Version]) -> None:
    for name in record["delete"]:
        versions.pop(decode_key(name), None)
    for name, rows in record["put"]:
        pieces = tuple(Piece(file, Extent(offset, length)) for file, offset, length, _ in rows)
        sums = tuple(bytes.fromhex(words) for *_, words in rows)
        versions[decode_key(name)] = Version(
            pieces, sum(piece.extent.length for piece in pieces), sums if all(sums) else ()
        )
