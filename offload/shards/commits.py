"""Commits of a durable run: when the contents of the store, with a record beside them, become what is found again.

Of several ranks, each commits by itself, and goes back to the newest step that all have. So what an earlier commit has
is held until all ranks have a later one.

Owns that moment. A step returns before its updates are made, and more of the user's belongs to it until the next one
begins: so a step is *sealed* when the next one begins, and committed when it is home. Whoever changes content for the
next step commits first. What the record says is its owner's business (:mod:`offload.durable`). Next:
:mod:`offload.shards.manager` says when.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import mmap
import time
from collections.abc import Iterable
from typing import Any, Protocol

from offload.distributed.ranks import Ranks
from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.sizes import whole_pages
from offload.stats import Counters
from swap import NO_MARK, SwapError, SwapStore

logger = logging.getLogger(__name__)

STATE_KEY, LATE_KEY = ("run", "state"), ("run", "late")  # of the record: as of the seal, and as of the commit
RECORD_KEYS = frozenset({STATE_KEY, LATE_KEY})


class Record(Protocol):
    """What decides on the next step beside the shards."""

    def seal(self) -> bytes | None:
        """Return the record as it is now; None where no step has ended since the last time."""

    def late(self) -> bytes:
        """Return what of it the updates of the step have changed."""

    def renew(self) -> None:
        """Let what is written once in a run be there, and look as new as the commit that comes."""

    def note_commit(self) -> None:
        """Note that what was sealed last is on the drive."""

    def describe(self) -> tuple[str, int, int]:
        """Return the directory of the run, the step that was sealed last, and the one that was committed last."""


class Commits:
    """Commits of one engine. See the module's text.

    Attributes:
        due: a step is sealed and not committed.
        failed: the last attempt to commit it has failed.
    """

    def __init__(
        self,
        store: SwapStore,
        record: Record,
        safe_point: contextlib.AbstractContextManager[object],
        counters: Counters,
        ranks: Ranks,
    ) -> None:
        """Begin with nothing to commit; `safe_point` is held meanwhile: it hands Ctrl-C on at its end."""
        self._ranks = ranks
        self._mark = None if ranks.world == 1 else store.mark + 1  # of the next commit; all ranks count alike
        self._held = {} if self._mark is None else {store.mark: store.snapshot()}  # what commits have, by their marks
        self._counters = counters
        self.due = self.failed = False
        self._store = store
        self._record = record
        self._safe_point = safe_point
        self._sealed = b""
        self._memory: Any = None

    @property
    def has_made(self) -> bool:
        """Whether the drive holds a commit, of this process or an earlier one."""
        return STATE_KEY in self._store

    @property
    def newest(self) -> int:
        """The mark of the last commit."""
        return max(self._held, default=NO_MARK)

    def pass_on(self, newest: Iterable[int] = ()) -> None:
        """Note that all ranks are together, and that what is committed from now on is another version.

        Args:
            newest: of each rank the mark of its last commit: what is older than the oldest of them is let go.
        """
        if self._mark is None:
            return
        self._mark += 1
        least = min(newest, default=NO_MARK)
        kept = max((mark for mark in self._held if mark <= least), default=NO_MARK)
        for mark in [mark for mark in self._held if mark < kept]:
            self._held.pop(mark).release()

    def close(self) -> None:
        """Let go of what is held. Idempotent."""
        held, self._held = self._held, {}
        for snapshot in held.values():
            snapshot.release()

    def seal(self) -> None:
        """Note that the next step begins: what belongs to the last one is complete, but for its updates."""
        sealed = self._record.seal()
        if sealed is None:
            return
        if self.due or sealed != self._sealed or self._store.uncommitted:  # else it was committed ahead, by a drain
            self._sealed, self.due, self.failed = sealed, True, False

    def make(self) -> None:
        """Commit what is sealed, if anything is. All updates must be home.

        Raises:
            swap.SwapError: it could not be committed: the drive holds the commit before, as a whole.
        """
        if not self.due or self._ranks.ended:  # then nobody knows whether all have made the step
            return
        begin = time.perf_counter()
        with self._safe_point:
            late = self._record.late()
            self.failed = True
            try:
                self._record.renew()
                self._put(STATE_KEY, self._sealed)
                self._put(LATE_KEY, late)
                self._store.commit(mark=None if self._mark is None else (self._mark, min(self._held)))
            except SwapError as error:
                raise self._failed(error) from error
            self.due = self.failed = False
            if self._mark is not None:
                before, self._held[self._mark] = self._held.get(self._mark), self._store.snapshot()
                if before is not None:
                    before.release()
            self._record.note_commit()
            self._counters.commits += 1
            end = time.perf_counter()
            self._counters.commit_seconds += end - begin
            self._counters.spans.add_wait("commit", begin, end)
            self._counters.record_bytes += len(self._sealed) + len(late)

    def _put(self, key: tuple[str, str], content: bytes) -> None:
        size_bytes = whole_pages(len(content))
        if self._memory is None or len(self._memory) < size_bytes:
            self._memory = mmap.mmap(-1, size_bytes)
        self._memory[: len(content)] = content
        view = ctypes.c_char.from_buffer(self._memory)
        try:
            self._store.put(key, ctypes.addressof(view), size_bytes).wait()
        finally:
            del view

    def _failed(self, error: SwapError) -> SwapError:
        directory, step, last = self._record.describe()
        return type(error)(
            f"run directory {directory}: step {step} is not committed, the drive holds step {last} as a whole",
            errno=error.errno,
            path=error.path,
            offset_bytes=error.offset_bytes,
            length_bytes=error.length_bytes,
            remedy="free space on the drive and go on, or close the engine and open the run again",
            detail=str(error),
        )


def read_object(store: SwapStore, key: tuple[str, str]) -> bytes:
    """Return an object of the record, with what follows it up to a whole page.

    Raises:
        KeyError: there is none.
        swap.SwapError: it cannot be read, or is damaged.
    """
    size_bytes = store.length_of(key)
    memory = HostArena(Tier.HOST, size_bytes)
    ticket = store.get(key, memory.base_address, size_bytes)
    try:
        ticket.wait()
        return ctypes.string_at(memory.base_address, size_bytes)
    finally:
        memory.close(() if ticket.done() else [lambda: not ticket.done()])
