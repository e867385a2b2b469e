"""Whether an engine can be used: open, closed, lost, or copied into a child process.

Owns that state, and the errors for calls out of it. Next: everything that an engine's user calls asks
:meth:`Life.require_open` first.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

from offload.errors import ASLEEP, StateError
from offload.module import refusals
from offload.shards.manager import Manager


class Life:
    """The state of one engine: closed until it is opened.

    Attributes:
        manager: owner of the shards, from :meth:`open` to :meth:`end`; else None.
        closed: whether closing has begun.
        unusable: what was lost; None where all is well.
        asleep: whether its memory was given back for a while.
    """

    _CLOSE = "close it and resume from a checkpoint"
    _REFILL = "repeat it, or load another checkpoint with strict=True, or close the engine"

    def __init__(self, *, trains: bool) -> None:
        self.manager: Manager | None = None
        self.closed = False
        self.unusable: str | None = None
        self.asleep = False
        self._is_refillable = False  # what is unusable is all to be had again, by who replaces all content
        self._trains = trains
        self._process = os.getpid()

    @property
    def here(self) -> bool:
        """Whether this is the process that has made the engine: what a forked child has is its parent's."""
        return os.getpid() == self._process

    def open(self, manager: Manager) -> None:
        """Begin: the memory is there."""
        self.manager = manager

    def lose(self, what: str) -> None:
        """Note that the engine cannot be used further, and why."""
        self.unusable, self._is_refillable = what, False

    def tear(self, error: BaseException) -> None:
        """Note that a signal handler has torn out of the engine's work: nothing of the content can be relied on."""
        if self.manager is not None and not self.closed:
            self.lose(f"a signal handler raised in the midst of its work ({type(error).__name__}: {error})")
            self.manager.give_up(f"engine: {self.unusable}; {self._CLOSE}")

    @contextlib.contextmanager
    def refilling(self, what: str, *, strict: bool) -> Iterator[bool]:
        """Let the block replace all content; if it fails when it has begun to write, only another such one may follow.

        Args:
            what: is done in it, for errors.
            strict: it replaces all of it, or nothing.

        Yields:
            Whether an earlier one has failed half way: then nothing of the content is to be read.

        Raises:
            StateError: as :meth:`require_open`, or an earlier one has failed and this one may leave something out.
        """
        half = self.unusable if self._is_refillable else None
        if half is not None and not strict:
            raise StateError(f"engine: {half}; {self._REFILL}")
        if half is not None:
            self.unusable = None
        written = self._overwrites()
        try:
            yield half is not None
            self._is_refillable = False
        except BaseException as error:
            if self._overwrites() != written:
                half = f"{what} failed half way ({type(error).__name__}: {error})"
            if half is not None and self.unusable is None:
                self.unusable, self._is_refillable = half, True
            raise

    def _overwrites(self) -> int:
        return 0 if self.manager is None else self.manager.overwrites

    def sleep(self) -> None:
        """Note that the memory was given back for a while."""
        self.asleep = True

    def wake(self) -> None:
        """Note that it is there again."""
        self.asleep = False

    def close(self) -> None:
        """Note that closing has begun."""
        self.closed = True

    def end(self) -> None:
        """Note that the memory is gone."""
        self.closed, self.manager = True, None

    def require_open(self) -> Manager:
        """Return the owner of the shards.

        Raises:
            StateError: the engine is closed, unusable, asleep, or another process's.
        """
        refusals.refuse_child(self._process)
        if self.unusable is not None:
            raise StateError(f"engine: {self.unusable}; {self._REFILL if self._is_refillable else self._CLOSE}")
        if self.closed or self.manager is None:
            states = " and load what engine.optimizer.state_dict() returned before" if self._trains else ""
            raise StateError(f"engine: it is closed; make a new one{states}")
        if self.asleep:
            raise StateError(ASLEEP)
        failure = self.manager.forward.failure
        if failure is not None:
            self.lose(f"a step failed half way ({type(failure).__name__}: {failure})")
            self.manager.forward.raise_failure()
        return self.manager

    def require_records(self, what: str) -> Manager:
        """Return the owner of the shards for a call, `what`, that only looks: the engine may be asleep or unusable.

        Raises:
            StateError: the engine is closed, or another process's.
        """
        refusals.refuse_child(self._process)
        if self.closed or self.manager is None:
            raise StateError(f"{what}: the engine is closed, and its records went with it; call {what} before close")
        return self.manager
