"""The part of a step that is done later: updates whose every input is fixed, made before anybody sees the result.

Owns the order in which they are made, and what of them is on its way home. A step fixes the norm, the factor and the
hyper-parameters and returns; then units are updated in the order in which the next forward uses them, so that the
drive reads and writes while something else computes. Beside an accelerator, units with something on NVMe have a queue
of their own: the drive goes on while others are updated. Whoever passes by works on what has arrived
(:meth:`ForwardUpdates.advance`), and whoever needs a unit waits for it (:meth:`ForwardUpdates.require`). Until its
update, a unit's gradient is kept, and its parameters are stand-ins: nobody sees the old ones.

The other half, before the step, is :mod:`offload.shards.backward_updates`. Next: :mod:`offload.shards.manager` asks for
what it needs, :mod:`offload.optim.step` begins steps.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Collection, Container, Iterator, Sequence

from offload.errors import StateError
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.memory.transfer import CopyDeadlineError, Ticket
from offload.planning.roles import Role
from offload.planning.schedule import Schedules
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.read_ahead import ReadAhead
from offload.shards.shard import Shard, State
from offload.shards.stream import Chunk, come_to_rest, slots_of
from offload.shards.tiers import Tiers
from offload.shards.updates import Pace, Queue, Update, Updates

logger = logging.getLogger(__name__)

MOST_AT_ONCE = 8  # chunks that are worked on behind a module: what computes must not wait long for its next operation


@dataclasses.dataclass(slots=True, eq=False)
class _Leaving:
    """A unit's update whose chunks are all done: the writes that take it home."""

    update: Update
    read_again: bool  # PARAM, from its home
    writes: list[Ticket]
    param_writes: list[Ticket]  # of them

    @classmethod
    def of(cls, update: Update, param: Shard) -> _Leaving:
        """Return that of an update that is done."""
        chunks = update.chunks
        return cls(
            update,
            param.work_buffer is None and any(chunk.writing_param for chunk in chunks),
            [ticket for chunk in chunks for ticket in chunk.writing],
            [ticket for chunk in chunks for ticket in chunk.writing_param],
        )


@contextlib.contextmanager
def _tolerant() -> Iterator[None]:
    """Leave an I/O error, or a late copy, to whoever needs what it concerns, and so meets it again."""
    try:
        yield
    except (OSError, CopyDeadlineError) as error:
        logger.warning("step: %s", str(error))


class ForwardUpdates(Updates[Update]):
    """What the last step has left to do. See the module's text.

    Attributes:
        failure: what a part of the step was lost by; None where all is well.
        settled: how many units have become usable so far, or have come home.
    """

    def __init__(
        self, tiers: Tiers, safe_point: contextlib.AbstractContextManager[object], schedules: Schedules
    ) -> None:
        """Begin with nothing to do; `schedules` tell which room on the device new parameters may have."""
        super().__init__(tiers, safe_point, aside=False)
        self._schedules = schedules if tiers.shared is None else None  # else a part of each unit is updated here
        self._slots_beside = tiers.plan.slots_beside
        self._queues = self._new_queues()
        self._joining: list[Update] = []  # that are in no queue yet: the drive still works for the backward
        self._idle: list[Buffer] = []  # memory of gradients that they will have as slots
        self._leaving: list[_Leaving] = []  # done, and on their way home
        self._old: set[int] = set()  # units whose parameters must not be used yet
        self.failure: BaseException | None = None
        self.settled = 0
        self._reported = False
        self.join(None, ())

    def __contains__(self, index: int) -> bool:
        """Tell whether the unit's parameters are still those of before the step."""
        return index in self._old

    @property
    def hides_any(self) -> bool:
        """Whether any unit's parameters are still those of before the step, or were lost."""
        return bool(self._old) or self.failure is not None

    @property
    def active(self) -> bool:
        """Whether anything is left to do, or was lost."""
        return bool(self._are_open or self._are_waiting or self._leaving or self.failure is not None)

    @property
    def _are_open(self) -> bool:
        return any(queue.open for queue in self._queues)

    @property
    def _are_waiting(self) -> bool:
        return any(queue.waiting for queue in self._queues)

    def begin(
        self,
        units: Sequence[Unit],
        visit: Callable[[Chunk], None],
        ahead: ReadAhead | None = None,
        under_way: Collection[int] = (),
    ) -> None:
        """Take the units' gradients over and hide their parameters; the step is taken from here on.

        Args:
            units: whose gradients have arrived, in the order in which they are needed.
            visit: updates a chunk.
            ahead: what was read of states before; None where nothing was.
            under_way: of the units, those whose updates have begun in backward, with the slots of staging. They, and
                all that need the drive, wait for :meth:`join`.

        Raises:
            StateError: parameters are in use. Nothing was changed.
            swap.SwapError, OffloadError: a transfer failed. The gradients are dropped; nothing else was changed.
        """
        assert not self.active
        tiers, shards = self._tiers, [self._tiers.param(unit.index) for unit in units]
        tiers.refuse_in_use(units)
        old = {unit.index for unit in units}
        try:
            idle = tiers.gradients.hold(old)
            for shard in shards:
                tiers.working.hide(shard)
        except BaseException:
            for shard in shards:
                if tiers.bound.hides(shard.unit.index):
                    tiers.bound.show(shard.unit)
            for index in old.difference(under_way):
                tiers.gradients.let_go(index)
            raise
        for shard in shards:
            tiers.copies.renew(shard)
        self._old |= old
        self._queues = self._new_queues()
        for unit in units:
            update = Update(unit, Leases(tiers, self._schedules), visit)
            if unit.index in self._beside_drive and unit.index not in under_way:
                self._queue_of(unit.index).waiting.append(update)
            else:
                self._joining.append(update)
        if under_way and self._slots_beside:  # backward has left few others
            self._queues[-1].pipeline.widen(idle)
        else:
            self._idle = idle
        if not under_way:
            self.join(ahead, ())

    def join(self, ahead: ReadAhead | None, updated: Container[int]) -> None:
        """Let what was left out of :meth:`begin` join the others, but for units that backward has `updated`."""
        tiers, joining, self._joining = self._tiers, self._joining, []
        left = [update for update in joining if update.unit.index not in updated]
        filled = ahead.take({update.unit.index for update in left}) if ahead is not None else {}
        taken, given = {record.slot for record in filled.values()}, self._queues[-1].pipeline.staging
        slots = [slot for slot in slots_of(tiers) if slot not in taken and slot not in given]
        wanted = max(self._slots_beside - len(given), 0)
        pipeline = self._queues[0].pipeline = self._new_pipeline(slots=[*taken, *slots[wanted:]], filled=filled)
        self._queues[-1].pipeline.add(slots[:wanted])
        pipeline.widen(self._idle)
        self._idle = []
        for update in left:
            self._queue_of(update.unit.index).waiting.append(update)
        for unit in (update.unit for update in joining if update.unit.index in updated):
            pipeline.widen(tiers.gradients.let_go(unit.index))
            self._old.discard(unit.index)
            tiers.bound.show(unit)

    def _new_queues(self) -> list[Queue[Update]]:
        """Return a queue for all units; or one for those with something on NVMe, and one for the others."""
        queues = [Queue[Update](self._new_pipeline(slots=()), urgent=True)]
        return [*queues, Queue(self._new_pipeline(slots=(), pieces=True))] if self._beside_drive else queues

    def _queue_of(self, index: int) -> Queue[Update]:
        return self._queues[-1 if index in self._beside_drive else 0]

    def lose(self, error: BaseException) -> None:
        """Note that a step has failed of which a part is made."""
        self._fail(error)
        self._reported = True

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
                leaving = [leaving for leaving in self._leaving if leaving.update.unit.index == index]
                for one in leaving:
                    self._leave(one, one.param_writes)
                if not leaving:
                    queue = self._queue_of(index)
                    assert queue.open or queue.waiting, f"unit {index} waits for an update that nobody makes"
                    self._work_beside(queue)
                    self._work(queue, Pace.NEXT)
            self._start_all()  # the drive has something to do in the meantime

    def advance(self) -> None:
        """Work on what has arrived, and start what there is room for. What fails is met by whoever needs it."""
        if self.failure is None and self.active:
            with self._working():
                for queue in self._queues:
                    with _tolerant():
                        self._work_ahead(queue)

    def advance_beside(self, slot: Callable[[], int | None]) -> None:
        """Go on before :meth:`join` as in :meth:`advance`, with slots of staging that `slot` gives."""
        beside = self._queues[-1].pipeline
        while len(beside.staging) < self._slots_beside and (given := slot()) is not None:
            beside.add([given])
        self.advance()

    def read_ahead(self) -> None:
        """Start the first reads: the forward that begins next waits for them."""
        if self.active:
            with self._working():
                self._start_all(urgent=True)

    def finish_open(self) -> None:
        """Make the updates that are under way, and wait until they are home: what they occupy can go."""
        if self.active:
            with self._working():
                while self._are_open:
                    self._work_on_all(Pace.OPEN)
                self._leave_all()

    def make_room(self) -> None:
        """Make the updates under way that may have filled working copies, and wait until they are home."""
        if self.active:
            with self._working():
                while self._queues[0].open:
                    self._work(self._queues[0], Pace.OPEN)
                self._leave_all()

    def make(self) -> None:
        """Make all updates, and have nothing of them in memory of gradients. What leaves staging goes on.

        Raises:
            swap.SwapError: as :meth:`finish`.
        """
        if self.active:
            with self._working():
                while self._are_open or self._are_waiting:
                    self._work_on_all(Pace.ALL)
                for queue in self._queues:
                    self._wait_for_writes(queue.pipeline.borrowed())
                for leaving in list(self._leaving):
                    self._leave(leaving)
        for queue in self._queues:
            queue.pipeline.narrow()

    def idle_slot(self) -> int | None:
        """Give a slot of staging away until the next step, if there is one; behind :meth:`make`."""
        return self._queues[0].pipeline.give()

    def finish(self) -> None:
        """Make all updates and wait until they are home.

        Raises:
            swap.SwapError: an I/O error. Where nothing was lost by it, this may be called again.
        """
        if self.active:
            with self._working():
                while self._are_open or self._are_waiting:
                    self._work_on_all(Pace.ALL)
                self._leave_all()

    def raise_failure(self) -> None:
        """Raise what went wrong: the first time itself, then that the step was lost."""
        if self.failure is None:
            return
        if not self._reported:
            self._reported = True
            raise self.failure
        raise StateError(
            f"engine: a step failed half way ({type(self.failure).__name__}: {self.failure}); close it and resume "
            "from a checkpoint"
        ) from self.failure

    def abandon(self) -> None:
        """Forget what is left to do: nobody will see it."""
        self._forget_all()
        self.failure = None

    def _forget_all(self) -> None:
        for queue in self._queues:
            queue.waiting.clear()
            queue.open.clear()
        self._joining.clear()
        self._leaving.clear()
        for queue in self._queues:
            queue.pipeline.settle()

    # --- the policy -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _working(self) -> Iterator[None]:
        self.raise_failure()
        try:
            with self._timed():
                yield
        except BaseException:
            self._reported = self.failure is not None
            raise

    def _work(self, queue: Queue[Update], pace: Pace) -> bool:
        for leaving in list(self._leaving):
            self._leave(leaving)
        return super()._work(queue, pace)

    def _work_on_all(self, pace: Pace) -> None:
        """Work on the next chunk of a queue, and if any unit may be begun, before on what is ready in the other."""
        begins = pace is Pace.ALL
        queue = next(queue for queue in self._queues if queue.open or (queue.waiting and begins))
        if begins:
            self._work_beside(queue)
        self._work(queue, pace)

    def _work_beside(self, one: Queue[Update]) -> None:
        """Work on what is ready in other queues. If a read fails there, whoever needs it meets that again."""
        for queue in self._queues:
            if queue is not one:
                with _tolerant():
                    self._work_ahead(queue)
                self.raise_failure()

    def _work_ahead(self, queue: Queue[Update]) -> None:
        """Work on what has arrived, and start what there is room for."""
        for _ in range(min(queue.pipeline.ahead, MOST_AT_ONCE)):
            if not self._work(queue, Pace.READY):
                return
        self._start(queue, Pace.READY)  # the drive has something to do in the meantime

    def _start_all(self, *, urgent: bool = False) -> None:
        for queue in self._queues:
            with _tolerant():
                self._start(queue, Pace.READY, urgent=urgent)

    def _next(self, queue: Queue[Update]) -> Unit | None:
        return queue.waiting[0].unit if queue.waiting else None

    def _begin_next(self, queue: Queue[Update], pace: Pace, *, waits: bool) -> bool:
        if not queue.waiting or pace is Pace.OPEN:
            return False
        if not waits and pace is not Pace.ALL and not self._may_begin(queue, queue.waiting[0].unit):
            return False
        self._begin(queue, queue.waiting[0])
        queue.waiting.popleft()
        return True

    def _may_begin(self, queue: Queue[Update], unit: Unit) -> bool:
        """Tell whether a unit can be begun without waiting, and its parameters are where they are best updated.

        There they stay until they are home: more than two units must leave half of the working region to the forward.
        """
        tiers, copies = self._tiers, self._tiers.copies
        param, gradient = tiers.param(unit.index), copies.of(unit.index, Role.GRAD)
        if tiers.updates_in_place(param):
            begun = [*queue.open, *(leaving.update for leaving in self._leaving)]
            sizes = [update.unit.param_bytes for update in begun]
            if param.state is State.STORED:
                return False
            if len(sizes) > 1 and sum(sizes) + unit.param_bytes > tiers.plan.working_bytes // 2:
                return False
        elif self._schedules is not None and param.home is Tier.NVME and not param.is_sliced:
            if not tiers.working.may_fill(param):
                return False
        return not copies.is_late(param) and not copies.is_late(gradient)

    def _end(self, queue: Queue[Update], update: Update) -> None:
        leaving = _Leaving.of(update, self._tiers.param(update.unit.index))
        self._leaving.append(leaving)
        idle = self._tiers.gradients.let_go(update.unit.index)
        if queue is self._queues[0] or self._slots_beside:
            queue.pipeline.widen(idle)
        elif self._joining:
            self._idle += idle
        else:
            self._queues[0].pipeline.widen(idle)
        self._leave(leaving)

    # --- on the way home --------------------------------------------------------------------------------------------

    def _leave_all(self) -> None:
        for leaving in list(self._leaving):
            self._leave(leaving, leaving.writes)

    def _leave(self, leaving: _Leaving, wait_for: Sequence[Ticket] = ()) -> None:
        """Let a unit that is updated be used as soon as it may be, and forget it when it is home."""
        index, tiers, leases = leaving.update.unit.index, self._tiers, leaving.update.leases
        param = tiers.param(index)
        self._wait_for_writes(wait_for)
        home = self._are_over(leaving.writes)  # asked first: whatever is over afterwards, this unit is not forgotten
        written = home or self._are_over(leaving.param_writes)
        if index in self._old and (written or not leaving.read_again):
            leases.hand_over({Role.PARAM}, () if leaving.read_again else leaving.param_writes)
            self._old.discard(index)
            self.settled += 1
            tiers.bound.show(param.unit)
        if written and leaving.param_writes and param.state is State.FLUSHING:
            tiers.copies.flushed(param)  # a device that is asked again may fail
            leaving.param_writes = []  # what is written of it from now on is somebody else's
        if home:
            leases.close()
            self.settled += 1
            self._leaving.remove(leaving)

    def _are_over(self, writes: Sequence[Ticket]) -> bool:
        """Tell whether all writes are over; raise what went wrong. The last ones are asked first."""
        if not all(ticket.done() for ticket in reversed(writes)):
            return False
        self._wait_for_writes(writes)
        return True

    def _fail(self, error: BaseException) -> None:
        """Note that a part of the step is lost: nothing of it is of use any more."""
        self.failure = error
        logger.error("step: failed half way: %s", str(error))
        begun = [update for queue in self._queues for update in queue.open]
        for update in reversed((*(leaving.update for leaving in self._leaving), *begun)):
            come_to_rest(update.chunks, self._tiers)
            param = self._tiers.param(update.unit.index)
            if param.state is State.FLUSHING:
                with contextlib.suppress(Exception):  # the first error is on its way up
                    self._tiers.copies.wait(param)
            update.leases.abandon({update.unit.index})
        self._forget_all()
