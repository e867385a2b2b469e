"""Commit and abort: when changes of the mapping become the committed state, in memory and on the drives.

Owns: the order of waiting for puts, flushing data, writing the manifest and flipping the mapping, and what a failure of
each leaves behind. Must not know: how a manifest is written, where a put goes.
Next: `mapping` for the two mappings, `manifest` for the file; docs/swap.md has the procedure as a drawing.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

from swap.backing import Backing
from swap.errors import SwapError, error_class
from swap.io.files import SwapFile, divide_capacity
from swap.space.contents import Contents
from swap.space.mapping import Changes
from swap.transfers import Transfers


class Commits:
    """Commits of one store, one at a time."""

    def __init__(self, contents: Contents, transfers: Transfers, backing: Backing) -> None:
        """Commit changes of `contents`, in the manifest of `backing`, too, if there is one."""
        self._map = contents.mapping
        self._puts = contents.puts
        self._lock = contents.lock
        self._transfers = transfers
        self._backing = backing
        self._files = backing.files
        self._run = backing.run
        self._manifest = backing.run.manifest if backing.run else None
        self._disk = backing.disk
        self._one_at_a_time = threading.Lock()

    def commit(self, limit_s: float, mark: tuple[int, ...] | None = None) -> None:
        """See `SwapStore.commit`."""
        with self._one_at_a_time:
            self._transfers.await_puts(limit_s)
            done: Changes | None = None
            try:
                with self._lock:
                    self._check_failed_puts()
                    changes = self._map.begin_commit()
                self._make_durable(changes, mark)
                done = changes
                with self._lock:
                    self._map.end_commit(changes)
            except BaseException as error:
                with self._lock:
                    if self._manifest is not None and not isinstance(error, SwapError):
                        self._manifest.doubtful = True  # Ctrl-C: what the drive and the mapping have may differ
                    if done is not None:
                        self._map.end_commit(done)
                        if self._manifest is not None:
                            self._manifest.doubtful = False
                    elif self._manifest is None or not self._manifest.doubtful:
                        self._map.let_go()
                raise

    def abort(self) -> None:
        """See `SwapStore.abort`."""
        with self._one_at_a_time:
            with self._lock:
                committed = self._map.committed
            if self._manifest is not None and self._manifest.doubtful:
                # The drive may hold the commit that failed. Before its extents are used again it must be undone there.
                self._manifest.rewrite(committed)
            with self._lock:
                self._puts.forget_all()
                self._map.abort()
                self._map.let_go()

    def grow(self, capacity_bytes: int, weights: Sequence[float] | None) -> None:
        """See `SwapStore.grow`. A manifest that says so is written anew, as of the last commit."""
        with self._one_at_a_time:
            space = self._backing.space
            more = (capacity_bytes - space.capacity_bytes) // space.alignment * space.alignment
            if more > 0:
                with self._lock:
                    committed = self._map.committed
                shares = divide_capacity(self._files, more, space.alignment, weights)
                sizes = self._backing.grow(shares, committed, self._flush)
                with self._lock:
                    space.grow(sizes)
                    self._map.let_go()

    def _make_durable(self, changes: Changes, mark: tuple[int, ...] | None) -> None:
        run, manifest = self._run, self._manifest
        if run is None or manifest is None or not (changes or manifest.doubtful or mark not in (None, manifest.marked)):
            return
        run.check_names()
        written = [version for version in changes.values() if version is not None]
        for file in sorted({piece.file for version in written for piece in version.pieces}):
            self._flush(self._files[file])
        manifest.commit(changes, lambda: self._map.after(changes), mark=mark, before=self._map.committed)

    def _flush(self, file: SwapFile) -> None:
        """Flush a data file. If that fails, what was put since the last commit may be lost, and has to be put again.

        A second flush would not say so.
        """
        try:
            self._disk.sync(file.fd)
        except OSError as error:
            failure = error_class(error.errno)(
                f"swap path {file.directory}: cannot flush the data of a commit",
                errno=error.errno,
                path=file.directory,
                remedy="look at the kernel log; then put the objects again, or abort",
            )
            with self._lock:
                self._puts.fail(self._map.uncommitted_keys(), failure)
            raise failure from None

    def _check_failed_puts(self) -> None:
        for key, error in self._puts.failed.items():
            raise type(error)(
                f"commit: expected every put since the last one to succeed but put {key!r} failed",
                errno=error.errno,
                path=error.path,
                offset_bytes=error.offset_bytes,
                length_bytes=error.length_bytes,
                remedy="put or delete it again, or abort",
                detail=str(error),
            )
