"""Commits of a durable run: when the contents of the store, with a record beside them, become what is found again.

Of several ranks, each commits by itself, and goes back to the newest commit that all have. So what an earlier one has
is held until all ranks have a later one. A step may be committed again when parameters have been written behind it.
The commit before is let go then, so one is told from the other: by its mark.

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
_MARKS = 1 << 20  # of what may be committed between two meetings of the ranks: one more for each time they write
_MOST_TOLD = 16  # of the marks of one rank


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
        self._mark = None if ranks.world == 1 else _next(store.mark)  # of the next commit; all ranks count alike
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
    def marks(self) -> list[int]:
        """Those of the commits to which this rank can go back."""
        return sorted(self._held)[:_MOST_TOLD]

    def pass_on(self, marks: Iterable[Iterable[float]] = ()) -> None:
        """Note that all ranks are together, and that what is committed from now on is another version.

        Args:
            marks: of each rank its :attr:`marks`: what is older than the newest that all have is let go.
        """
        if self._mark is None:
            return
        self._mark = _next(self._mark)
        kept = max(set(self._held).intersection(*marks), default=NO_MARK) if marks else NO_MARK
        for mark in [mark for mark in self._held if mark < kept]:
            self._held.pop(mark).release()

    def note_write(self) -> None:
        """Note that parameters are about to be written: each rank does so, but they need not be together."""
        if self._mark is not None:
            self._mark += 1

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
            replaced = {mark for mark in self._held if self._mark is not None and _next(mark) == _next(self._mark)}
            self.failed = True
            try:
                self._record.renew()
                self._put(STATE_KEY, self._sealed)
                self._put(LATE_KEY, late)
                kept = sorted(self._held.keys() - replaced)
                self._store.commit(mark=None if self._mark is None else (self._mark, *kept))
            except SwapError as error:
                raise self._failed(error) from error
            self.due = self.failed = False
            if self._mark is not None:
                before = [self._held.pop(mark) for mark in replaced]
                self._held[self._mark] = self._store.snapshot()
                for snapshot in before:
                    snapshot.release()
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


def _next(mark: int) -> int:
    """Return the first mark behind the next meeting of the ranks."""
    return (mark // _MARKS + 1) * _MARKS


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
