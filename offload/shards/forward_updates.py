"""The part of a step that is done later: updates whose every input is fixed, made before anybody sees the result.

Owns the order in which they are made, and what of them is under way. A step fixes the norm, the factor and the
hyper-parameters and returns; then units are updated in the order in which the next forward uses them, so that the
drive reads and writes while something else computes. There is no thread: whoever passes by works on what has arrived
(:meth:`PendingUpdates.advance`), and whoever needs a unit waits for it (:meth:`PendingUpdates.require`). Until its
update, a unit's gradient is kept, and its parameters are stand-ins: nobody sees the old ones.

Knows neither hyper-parameters nor norms: what is done with a chunk is the visitor's business. Its user is
:mod:`offload.optim.recipe`; :mod:`offload.shards.manager` asks for what it needs.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from enum import Enum

from offload.errors import StateError
from offload.memory.transfer import Ticket, TicketGroup
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.manager import Manager
from offload.shards.shard import State
from offload.shards.stream import ALL_STATES, Chunk, Pipeline, come_to_rest

logger = logging.getLogger(__name__)

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES
MOST_AT_ONCE = 8  # chunks that are worked on behind a module: what computes must not wait long for its next operation


class Pace(Enum):
    """What is waited for."""

    READY = "ready"  # nothing
    NEXT = "next"  # the chunk whose turn it is
    OPEN = "open"  # the same, and no further unit is begun
    ALL = "all"  # the same, and units are begun as fast as they can be


@dataclasses.dataclass(slots=True)
class _Update:
    """A unit's update under way: chunks [0, worked) are done, [worked, started) have their bytes or wait for them."""

    unit: Unit
    leases: Leases
    chunks: list[Chunk]
    started: int = 0
    worked: int = 0
    through_staging: bool = False  # PARAM has to be read from its home again
    leaving: list[Ticket] = dataclasses.field(default_factory=list)  # the writes, when all chunks are done
    leaving_param: list[Ticket] = dataclasses.field(default_factory=list)  # of them

    def note_end(self) -> None:
        """Note that all chunks are done."""
        self.through_staging = any(Role.PARAM in chunk.staged for chunk in self.chunks)
        self.leaving = [ticket for chunk in self.chunks for ticket in chunk.writing]
        self.leaving_param = [ticket for chunk in self.chunks for ticket in chunk.writing_param]


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    """Leave an I/O error to whoever needs what it concerns, and so meets it again."""
    try:
        yield
    except OSError as error:
        logger.warning("step: %s", error)


class PendingUpdates:
    """What one step has left to do. See the module's text.

    Attributes:
        failure: what a part of the step was lost by; None where all is well.
    """

    def __init__(
        self,
        manager: Manager,
        units: Sequence[Unit],
        visit: Callable[[Chunk], None],
        *,
        safe_point: contextlib.AbstractContextManager[object],
    ) -> None:
        """Take the units' gradients over and hide their parameters; the step is taken from here on.

        Args:
            manager: owner of the shards; nothing else may be left to do.
            units: whose gradients have arrived, in the order in which they are needed.
            visit: updates a chunk.
            safe_point: held while something is half done: hands Ctrl-C on at its end.

        Raises:
            StateError: parameters are in use. Nothing was changed.
        """
        assert manager.updates is None
        shards = [manager.copies.of(unit.index, Role.PARAM) for unit in units]
        manager.refuse_in_use(units)
        self._manager = manager
        self._visit = visit
        self._safe_point = safe_point
        self._pipeline = Pipeline(manager, reads=WRITTEN | {Role.GRAD}, writes=WRITTEN)
        self._waiting = deque(units)  # not begun
        self._open: deque[_Update] = deque()  # begun
        self._closing: list[_Update] = []  # done, and on their way home
        self._old = {unit.index for unit in units}  # whose parameters must not be used yet
        self._unread: Chunk | None = None  # whose read has failed, and is to be repeated
        self.failure: BaseException | None = None
        self._reported = False
        self._pipeline.widen(manager.gradients.hold(self._old))
        for shard in shards:
            manager.versions[shard.unit.index] += 1
            manager.working.hide(shard)
        manager.updates = self

    def __contains__(self, index: int) -> bool:
        """Tell whether the unit's parameters are still those of before the step."""
        return index in self._old

    # --- what others ask for ----------------------------------------------------------------------------------------

    def require(self, index: int) -> None:
        """Make the update of unit `index`, if it has not been made.

        Raises:
            swap.SwapError: an I/O error. A read is repeated when the unit is asked for again.
            StateError: an earlier failure has lost a part of the step.
        """
        if index not in self._old:
            return
        with self._working():
            while index in self._old:
                closing = [update for update in self._closing if update.unit.index == index]
                for update in closing:
                    self._leave(update, update.leaving_param)
                if not closing:
                    self._work(Pace.NEXT)
            with _tolerant():
                self._start(Pace.READY)  # the drive has something to do in the meantime

    def advance(self) -> None:
        """Work on what has arrived, and start what there is room for. What fails is met by whoever needs it."""
        if self.failure is None:
            with self._working(), _tolerant():
                for _ in range(min(self._pipeline.ahead, MOST_AT_ONCE)):
                    if not self._work(Pace.READY):
                        return
                self._start(Pace.READY)  # the drive has something to do in the meantime

    def begin(self) -> None:
        """Start the first reads: the forward that begins next waits for them."""
        with self._working(), _tolerant():
            self._start(Pace.READY, urgent=True)

    def finish_open(self) -> None:
        """Make the updates that are under way, and wait until they are home: what they occupy can go."""
        with self._working():
            while self._open:
                self._work(Pace.OPEN)
            self._leave_all()

    def finish(self) -> None:
        """Make all updates and wait until they are home."""
        with self._working():
            while self._open or self._waiting:
                self._work(Pace.ALL)
            self._leave_all()

    def check(self) -> None:
        """Raise what went wrong: the first time itself, then that the step was lost."""
        if self.failure is None:
            return
        if not self._reported:
            self._reported = True
            raise self.failure
        raise StateError(
            f"engine: a step failed half way ({type(self.failure).__name__}: {self.failure}); close it and resume "
            "from a checkpoint"
        )

    # --- one chunk after the other ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self.check()
        begin = time.perf_counter()
        try:
            with self._safe_point:
                yield
        except BaseException:
            self._reported = self.failure is not None
            raise
        finally:
            self._manager.counters.update_seconds += time.perf_counter() - begin
            if self.failure is None and not (self._waiting or self._open or self._closing):
                self._manager.updates = None

    def _work(self, pace: Pace) -> bool:
        """Work on the chunk whose turn it is; returns False where there is none, or it would have to be waited for."""
        for update in list(self._closing):
            self._leave(update)
        self._start(pace)
        if not self._open:
            return False
        update = self._open[0]
        chunk = update.chunks[update.worked]
        if update.started == update.worked or not self._has_arrived(chunk, pace):
            return False
        try:
            self._pipeline.work(chunk, self._visit)
        except BaseException as error:
            self._lose(error)
            raise
        update.worked += 1
        if update.worked == len(update.chunks):
            self._open.popleft()
            update.note_end()
            self._closing.append(update)
            update.leases.stop_reading()
            self._pipeline.widen(self._manager.gradients.release(update.unit.index))
            self._leave(update)
        return True

    def _start(self, pace: Pace, *, urgent: bool = False) -> None:
        """Start the reads of chunks whose turn is near."""
        while True:
            ahead = sum(update.started - update.worked for update in self._open)
            if not self._pipeline.has_room(ahead):
                return
            waits = pace is not Pace.READY and not ahead  # there is nothing else to go on with
            leaving = self._pipeline.leaving()
            if not waits and not all(ticket.done() for ticket in leaving):
                return
            self._wait_for_writes(leaving)
            if not self._open or self._open[-1].started == len(self._open[-1].chunks):
                if not self._waiting or pace is Pace.OPEN:
                    return
                if not waits and pace is not Pace.ALL and not self._may_begin(self._waiting[0]):
                    return
                self._begin(self._waiting[0])
                self._waiting.popleft()
            update = self._open[-1]
            self._pipeline.start(update.chunks[update.started], urgent=urgent or pace is Pace.NEXT)
            update.started += 1

    def _may_begin(self, unit: Unit) -> bool:
        """Tell whether a unit can be begun without waiting, and its parameters are where they are best updated.

        There they stay until they are home: more than two units must leave half of the working region to the forward.
        """
        manager, copies = self._manager, self._manager.copies
        param, gradient = copies.of(unit.index, Role.PARAM), copies.of(unit.index, Role.GRAD)
        if manager.updates_in_place(param):
            begun = [update.unit.param_bytes for update in (*self._open, *self._closing)]
            if param.state is State.STORED:
                return False
            if len(begun) > 1 and sum(begun) + unit.param_bytes > manager.plan.working_bytes // 2:
                return False
        return not copies.is_late(param) and not copies.is_late(gradient)

    def _begin(self, unit: Unit) -> None:
        leases = Leases(self._manager)
        try:
            chunks = self._pipeline.open(unit, leases)
        except BaseException:
            leases.abandon(())
            raise
        self._open.append(_Update(unit, leases, chunks))

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
        counters = self._manager.counters
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

    def _wait(self, tickets: Sequence[Ticket]) -> None:
        begin = time.perf_counter()
        try:
            TicketGroup(tickets).wait(self._manager.deadline_s)
        except TimeoutError as error:
            if hasattr(error, "add_note"):  # from Python 3.11 on
                error.add_note(self._manager.dump())
            raise
        finally:
            self._manager.counters.update_stall_seconds += time.perf_counter() - begin

    # --- on the way home --------------------------------------------------------------------------------------------

    def _leave_all(self) -> None:
        for update in list(self._closing):
            self._leave(update, update.leaving)

    def _leave(self, update: _Update, wait_for: Sequence[Ticket] = ()) -> None:
        """Let a unit that is updated be used as soon as it may be, and forget it when it is home."""
        index, manager = update.unit.index, self._manager
        param = manager.copies.of(index, Role.PARAM)
        self._wait_for_writes(wait_for)
        home = self._are_over(update.leaving)  # asked first: whatever is over afterwards, this unit is not forgotten
        if index in self._old and (home or not update.through_staging or self._are_over(update.leaving_param)):
            update.leases.hand_over({Role.PARAM}, () if update.through_staging else update.leaving)
            self._old.discard(index)
            manager.working.show(param)
        if home:
            if param.state is State.FLUSHING:
                manager.copies.settle(param)
            update.leases.close()
            self._closing.remove(update)

    def _are_over(self, writes: Sequence[Ticket]) -> bool:
        """Tell whether all writes are over; raise what went wrong. The last ones are asked first."""
        if not all(ticket.done() for ticket in reversed(writes)):
            return False
        self._wait_for_writes(writes)
        return True

    def _wait_for_writes(self, writes: Sequence[Ticket]) -> None:
        """Wait for writes; one that fails takes a part of the step with it."""
        try:
            self._wait(writes)
        except TimeoutError:
            raise  # it is still under way, and may be waited for again
        except OSError as error:
            self._lose(error)
            raise

    def _lose(self, error: BaseException) -> None:
        """Note that a part of the step is lost: nothing of it is of use any more."""
        self.failure = error
        logger.error("step: failed half way: %s", error)
        for update in (*self._open, *self._closing):
            come_to_rest(update.chunks, self._manager.deadline_s)
            param = self._manager.copies.of(update.unit.index, Role.PARAM)
            if param.state is State.FLUSHING:
                with contextlib.suppress(OSError):
                    self._manager.copies.settle(param)
            update.leases.abandon({update.unit.index})
        self._open.clear()
        self._closing.clear()
        self._waiting.clear()
