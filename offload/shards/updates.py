"""Updates of units, chunk by chunk: the queues that updates during backward and during the next forward share.

Owns what is begun: whose chunk's turn it is, what has arrived of it, and which reads are ahead. Whoever passes by
starts reads and writes, and works on what is there; beside an accelerator, has a worker work on it. Whoever needs a
unit waits. A queue has an order of its own, and slots: none waits for another. Which unit joins which queue, which one
comes next, and what becomes of one that is done, is a policy:
:mod:`offload.shards.forward_updates` and :mod:`offload.shards.backward_updates`. Knows no hyper-parameters: what is
done with a chunk is the policy's caller's business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from enum import Enum
from typing import Generic, TypeVar

from offload.labels import labelled
from offload.memory.transfer import Ticket, TicketGroup
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.read_ahead import Record
from offload.shards.stream import ALL_STATES, Chunk, Pipeline
from offload.shards.tiers import Tiers
from offload.shards.worker import failed
from offload.spans import SHORTEST_WAIT_S, UPDATES

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES


class Pace(Enum):
    """What is waited for."""

    READY = "ready"  # nothing
    NEXT = "next"  # the chunk whose turn it is
    OPEN = "open"  # the same, and no further unit is begun
    ALL = "all"  # the same, and units are begun as fast as they can be


@dataclasses.dataclass(slots=True, eq=False)
class Update:
    """A unit's update: chunks [0, worked) are done, a worker has [worked, given), [given, started) wait for bytes."""

    unit: Unit
    leases: Leases
    visit: Callable[[Chunk], None]
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    started: int = 0
    given: int = 0
    takes_slots: bool = True  # see Pipeline.takes_slots
    worked: int = 0


U = TypeVar("U", bound=Update)


@dataclasses.dataclass(slots=True, eq=False)
class Queue(Generic[U]):
    """Updates in an order of their own.

    Attributes:
        pipeline: the slots that their chunks take in turn.
        urgent: the worker does its chunks before those of others.
        waiting: not begun.
        open: begun.
        unread: the chunk whose read has failed, and is to be repeated.
    """

    pipeline: Pipeline
    urgent: bool = False
    waiting: deque[U] = dataclasses.field(default_factory=deque)
    open: deque[U] = dataclasses.field(default_factory=deque)
    unread: Chunk | None = None


class Updates(ABC, Generic[U]):
    """Queues of updates. See the module's text."""

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
        self._worker = tiers.worker
        self._beside_drive = tiers.plan.beside_drive()
        self._waits: list[tuple[float, float]] = []  # by the host's clock, since it began to go on

    # --- what a policy says -----------------------------------------------------------------------------------------

    @abstractmethod
    def _next(self, queue: Queue[U]) -> Unit | None:
        """Return the unit whose turn it is, if any is left."""

    @abstractmethod
    def _begin_next(self, queue: Queue[U], pace: Pace, *, waits: bool) -> bool:
        """Begin the unit whose turn it is, by :meth:`_begin`; returns False where none may be begun.

        Args:
            queue: whose turn it is.
            pace: what is waited for.
            waits: there is nothing else to go on with.
        """

    @abstractmethod
    def _end(self, queue: Queue[U], update: U) -> None:
        """Note that all chunks of an update are done, and on their way home."""

    @abstractmethod
    def _fail(self, error: BaseException) -> None:
        """Note that a chunk, or a write, has failed; the error is on its way up."""

    # --- one chunk after the other ----------------------------------------------------------------------------------

    def _work(self, queue: Queue[U], pace: Pace) -> bool:
        """Work on the chunk whose turn it is; returns False where there is none, or it would have to be waited for."""
        self._start(queue, pace)
        if not queue.open:
            return False
        update = queue.open[0]
        if update.started == update.worked:
            return False
        chunk = update.chunks[update.worked]
        late = not _is_over(chunk)
        if update.given == update.worked:
            if not self._has_arrived(queue, chunk, pace):
                return False
            self._give(queue, update)
        assert chunk.task is not None
        if pace is Pace.READY and not chunk.task.done():
            return False
        if self._worker.apart:
            self._wait_for_task(chunk.task)
        try:
            queue.pipeline.write(chunk)
        except BaseException as error:
            self._fail(error)
            raise
        counters = self._tiers.counters
        counters.update_chunks += 1
        counters.update_stalls += late
        update.worked += 1
        if update.worked == len(update.chunks):
            queue.open.popleft()
            update.leases.stop_reading()
            self._end(queue, update)
        return True

    def _start(self, queue: Queue[U], pace: Pace, *, urgent: bool = False) -> None:
        """Start the reads of chunks whose turn is near, and give a worker what has arrived."""
        self._start_reads(queue, pace, urgent=urgent)
        if self._worker.apart:
            self._give_out(queue)

    def _start_reads(self, queue: Queue[U], pace: Pace, *, urgent: bool) -> None:
        pipeline, begun = queue.pipeline, queue.open
        while True:
            update = begun[-1] if begun and begun[-1].started < len(begun[-1].chunks) else None
            unit = update.unit if update is not None else self._next(queue)
            if unit is None:
                return
            ahead = sum(update.started - update.worked for update in begun if update.takes_slots)
            waits = pace is not Pace.READY and all(update.started == update.worked for update in begun)
            if pipeline.takes_slots(unit) and not self._make_room(pipeline, ahead, waits=waits):
                return
            if update is None:
                if not self._begin_next(queue, pace, waits=waits):
                    return
                update = begun[-1]
            pipeline.start(update.chunks[update.started], urgent=urgent or pace is Pace.NEXT)
            update.started += 1

    def _make_room(self, pipeline: Pipeline, ahead: int, *, waits: bool) -> bool:
        """Have a slot free for one more chunk; False where there is none, or it would have to be waited for."""
        if not pipeline.has_room(ahead):
            return False
        leaving = pipeline.leaving()
        if not waits and (self._tiers.copies.is_any_late() or not all(ticket.done() for ticket in leaving)):
            return False
        self._wait_for_writes(leaving)
        return True

    def _give_out(self, queue: Queue[U]) -> None:
        """Give the worker all that has arrived; what a read keeps waiting keeps those waiting that are read, too."""
        behind = False
        for update in queue.open:
            while update.given < update.started:
                chunk = update.chunks[update.given]
                if chunk.reading and (behind or not self._is_here(queue, chunk)):
                    behind = True
                    break
                self._give(queue, update)

    def _give(self, queue: Queue[U], update: U) -> None:
        """Have the next chunk of an update worked on."""
        chunk = update.chunks[update.given]
        work = functools.partial(queue.pipeline.compute, chunk, update.visit)
        try:
            chunk.task = self._worker.submit(work, urgent=queue.urgent)
        except BaseException as error:
            self._fail(error)
            raise
        update.given += 1

    def _begin(self, queue: Queue[U], update: U) -> None:
        """Lease what an update needs; its chunks come next."""
        update.takes_slots = queue.pipeline.takes_slots(update.unit)
        try:
            update.chunks = queue.pipeline.open(update.unit, update.leases)
        except BaseException:
            update.leases.abandon(())
            raise
        queue.open.append(update)

    def _has_arrived(self, queue: Queue[U], chunk: Chunk, pace: Pace) -> bool:
        """Tell whether a chunk's bytes are there; a read that failed is repeated by who cannot do without."""
        if queue.unread is chunk:
            if pace is Pace.READY:
                return False
            queue.pipeline.read(chunk)
            queue.unread = None
        if pace is Pace.READY and not all(ticket.done() for ticket in chunk.reading):
            return False
        try:
            self._wait(chunk.reading)
        except OSError as error:
            if isinstance(error, TimeoutError) or not all(ticket.done() for ticket in chunk.reading):
                raise  # it is still under way, and may be waited for again
            queue.unread = chunk
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(f"while {chunk.unit.name} was being updated")
            raise
        return True

    def _is_here(self, queue: Queue[U], chunk: Chunk) -> bool:
        """Tell whether a chunk's bytes have come; what went wrong is met when it is the chunk's turn."""
        if queue.unread is chunk or not all(ticket.done() for ticket in chunk.reading):
            return False
        try:
            self._wait(chunk.reading)
        except OSError:
            return False
        return True

    # --- waiting ----------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _timed(self) -> Iterator[None]:
        """Count the time, and let no Ctrl-C come between."""
        begin, waits = time.perf_counter(), list[tuple[float, float]]()
        outer, self._waits = self._waits, waits
        try:
            with self._safe_point:
                yield
        finally:
            counters, end = self._tiers.counters, time.perf_counter()
            counters.update_seconds += end - begin
            for wait_begin, wait_end in (*waits, (end, end)):
                counters.spans.add(UPDATES, "updates", begin, wait_begin)
                begin = wait_end
            self._waits = outer

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        """Wait for tickets, also for those that are over: for what went wrong."""
        begun, begin = self._begin_wait(all(ticket.done() for ticket in tickets))
        try:
            TicketGroup(tickets).wait(self._tiers.deadline_s)
        except TimeoutError as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._tiers.dump())
            raise
        finally:
            self._count_wait(begin, begun)

    @labelled("wait")
    def _wait_for_task(self, task: Future[None]) -> None:
        begun, begin = self._begin_wait(task.done())
        try:
            task.result()
        except BaseException as error:
            if failed(task):  # else it is still under way, and may be waited for again
                self._fail(error)
            raise
        finally:
            self._count_wait(begin, begun)

    def _begin_wait(self, is_over: bool) -> tuple[object | None, float]:
        """Return the device's moment, unless what is waited for is there, and the host's."""
        return None if is_over else self._tiers.mover.begin_waiting(), time.perf_counter()

    def _count_wait(self, begin: float, begun: object | None) -> None:
        counters, end = self._tiers.counters, time.perf_counter()
        counters.update_stall_seconds += end - begin
        if end - begin >= SHORTEST_WAIT_S:
            self._waits.append((begin, end))
            self._tiers.mover.end_waiting("updates", begun, begin)

    def _wait_for_writes(self, writes: Sequence[Ticket]) -> None:
        try:
            self._wait(writes)
        except TimeoutError:
            raise  # it is still under way, and may be waited for again
        except OSError as error:
            self._fail(error)
            raise

    def _new_pipeline(
        self,
        *,
        slots: Sequence[int] | None = None,
        filled: Mapping[tuple[int, int], Record] | None = None,
        pieces: bool = False,
    ) -> Pipeline:
        return Pipeline(
            self._tiers,
            reads=WRITTEN | {Role.GRAD},
            writes=WRITTEN,
            aside=self._aside,
            updates=True,
            slots=slots,
            filled=filled,
            pieces=pieces,
        )


def _is_over(chunk: Chunk) -> bool:
    """Tell whether nobody has to wait for a chunk: neither for its bytes, nor for who works on it."""
    if chunk.task is not None:
        return chunk.task.done()
    return all(ticket.done() for ticket in chunk.reading)
