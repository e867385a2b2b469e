"""Updates of units, chunk by chunk: the queue that updates during backward and during the next forward share.

Owns what is begun: whose chunk's turn it is, what has arrived of it, and which reads are ahead. There is no thread:
whoever passes by works on what is there, and whoever needs a unit waits. Which unit comes next, and what becomes of one
that is done, is a policy: :mod:`offload.shards.forward_updates` and :mod:`offload.shards.backward_updates`. Knows no
hyper-parameters: what is done with a chunk is the policy's caller's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from typing import Generic, TypeVar

from offload.memory.transfer import Ticket, TicketGroup
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.stream import ALL_STATES, Chunk, Pipeline
from offload.shards.tiers import Tiers

logger = logging.getLogger(__name__)

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES


class Pace(Enum):
    """What is waited for."""

    READY = "ready"  # nothing
    NEXT = "next"  # the chunk whose turn it is
    OPEN = "open"  # the same, and no further unit is begun
    ALL = "all"  # the same, and units are begun as fast as they can be


@dataclasses.dataclass(slots=True, eq=False)
class Update:
    """A unit's update: chunks [0, worked) are done, [worked, started) have their bytes or wait for them."""

    unit: Unit
    leases: Leases
    visit: Callable[[Chunk], None]
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    started: int = 0
    worked: int = 0


U = TypeVar("U", bound=Update)


class Updates(ABC, Generic[U]):
    """A queue of updates. See the module's text."""

    def __init__(self, tiers: Tiers, safe_point: contextlib.AbstractContextManager[object], *, aside: bool) -> None:
        """Begin with nothing to do.

        Args:
            tiers: the shards.
            safe_point: held while something is half done: hands Ctrl-C on at its end.
            aside: what is written goes beside the content.
        """
        self._tiers = tiers
        self._safe_point = safe_point
        self._aside = aside
        self._pipeline = self._new_pipeline()
        self._open: deque[U] = deque()  # begun
        self._unread: Chunk | None = None  # whose read has failed, and is to be repeated

    # --- what a policy says -----------------------------------------------------------------------------------------

    @abstractmethod
    def _begin_next(self, pace: Pace, *, waits: bool) -> bool:
        """Begin the unit whose turn it is, by :meth:`_begin`; returns False where none may be begun.

        Args:
            pace: what is waited for.
            waits: there is nothing else to go on with.
        """

    @abstractmethod
    def _end(self, update: U) -> None:
        """Note that all chunks of an update are done, and on their way home."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """Note that a chunk, or a write, has failed; the error is on its way up."""

    # --- one chunk after the other ----------------------------------------------------------------------------------

    def _work(self, pace: Pace) -> bool:
        """Work on the chunk whose turn it is; returns False where there is none, or it would have to be waited for."""
        self._start(pace)
        if not self._open:
            return False
        update = self._open[0]
        if update.started == update.worked:
            return False
        chunk = update.chunks[update.worked]
        if not self._has_arrived(chunk, pace):
            return False
        try:
            self._pipeline.work(chunk, update.visit)
        except BaseException as error:
            self._fail(error)
            raise
        update.worked += 1
        if update.worked == len(update.chunks):
            self._open.popleft()
            update.leases.stop_reading()
            self._end(update)
        return True

    def _start(self, pace: Pace, *, urgent: bool = False) -> None:
        """Start the reads of chunks whose turn is near."""
        while True:
            ahead = sum(update.started - update.worked for update in self._open)
            if not self._pipeline.has_room(ahead):
                return
            waits = pace is not Pace.READY and not ahead
            leaving = self._pipeline.leaving()
            if not waits and not all(ticket.done() for ticket in leaving):
                return
            self._wait_for_writes(leaving)
            if not self._open or self._open[-1].started == len(self._open[-1].chunks):
                if not self._begin_next(pace, waits=waits):
                    return
            update = self._open[-1]
            self._pipeline.start(update.chunks[update.started], urgent=urgent or pace is Pace.NEXT)
            update.started += 1

    def _begin(self, update: U) -> None:
        """Lease what an update needs; its chunks come next."""
        try:
            update.chunks = self._pipeline.open(update.unit, update.leases)
        except BaseException:
            update.leases.abandon(())
            raise
        self._open.append(update)

    def _has_arrived(self, chunk: Chunk, pace: Pace) -> bool:
        """Tell whether a chunk's bytes are there; a read that failed is repeated by who cannot do without."""
        if self._unread is chunk:
            if pace is Pace.READY:
                return False
            self._pipeline.read(chunk)
            self._unread = None
        there = all(ticket.done() for ticket in chunk.reading)
        if pace is Pace.READY and not there:
            return False
        counters = self._tiers.counters
        try:
            self._wait(chunk.reading)
        except OSError as error:
            if isinstance(error, TimeoutError) or not all(ticket.done() for ticket in chunk.reading):
                raise  # it is still under way, and may be waited for again
            self._unread = chunk
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"while {chunk.unit.name} was being updated")
            raise
        counters.update_chunks += 1
        counters.update_stalls += not there
        return True

    # --- waiting ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time, and let no Ctrl-C come between."""
        begin = time.perf_counter()
        try:
            with self._safe_point:
                yield
        finally:
            self._tiers.counters.update_seconds += time.perf_counter() - begin

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait for tickets, also for those that are over: for what went wrong."""
        begin = time.perf_counter()
        try:
            TicketGroup(tickets).wait(self._tiers.deadline_s)
        except TimeoutError as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._tiers.dump())
            raise
        finally:
            self._tiers.counters.update_stall_seconds += time.perf_counter() - begin

    def _wait_for_writes(self, writes: Sequence[Ticket]) -> None:
        try:
            self._wait(writes)
        except TimeoutError:
            raise  # it is still under way, and may be waited for again
        except OSError as error:
            self._fail(error)
            raise

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self._tiers, reads=WRITTEN | {Role.GRAD}, writes=WRITTEN, aside=self._aside)
