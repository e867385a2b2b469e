"""Updates that are made before it is known whether they count: during backward, as gradients become complete.

A step multiplies every gradient by a factor that depends on all of them, so the factor is known only when backward has
ended. Where the last steps have clipped nothing it can be guessed, though. So units are updated while backward goes on,
with the factor of a step that clips nothing, and what comes out is written *aside*: beside the old content, which stays
as it is. On NVMe that is under another name, in host memory in spare buffers. The step then compares. Where an update
was made from what the step has fixed - the same gradient, factor and hyper-parameters - its result becomes the content,
by a change of names or of buffers; else it is dropped, and the update is made as if there had been no guess. Either way
the numbers are the same: a wrong guess costs time of the drive and the processor, and never a result.

Owns what is aside. Knows neither norms nor hyper-parameters:
:mod:`offload.optim.recipe` makes the updates. The other half of a step's work, after its end, is
:mod:`offload.shards.forward_updates`. Next: :mod:`offload.shards.manager`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections import deque
from collections.abc import Callable, Sequence
from typing import Protocol

from offload.errors import ConfigError, InternalError
from offload.memory.budget import Tier
from offload.memory.transfer import CopyDeadlineError, TicketGroup
from offload.planning.plan import MOST_QUEUED, STAGING_SLOTS
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.shard import Shard, State
from offload.shards.stream import Chunk, come_to_rest
from offload.shards.tiers import Tiers
from offload.shards.updates import Pace, Queue, Update, Updates

logger = logging.getLogger(__name__)

LARGEST_SHARE_KEPT = 1 / 3  # of the working region


class Recipe(Protocol):
    """What a step does to each unit."""

    def ranges(self, unit: Unit) -> object:
        """Return what a unit's update is made from beside its gradient: equal where the results are.

        Raises:
            ConfigError: a hyper-parameter is out of its range.
        """

    def visit(self, chunk: Chunk) -> None:
        """Update a chunk."""


@dataclasses.dataclass(slots=True, eq=False)
class _Guess(Update):
    """An update that may be undone."""

    made_from: object = None

    @property
    def is_over(self) -> bool:
        """Whether the worker has come to its end."""
        task = self.chunks[-1].task
        return task is not None and task.done()

    @property
    def was_begun(self) -> bool:
        """Whether any of it was read or worked on."""
        return any(chunk.task is None or not chunk.task.cancel() for chunk in self.chunks)


class BackwardUpdates(Updates[_Guess]):
    """Updates of one engine that are made during backward. See the module's text.

    All methods are called by the thread that computes.

    Attributes:
        has_room: whether any unit may ever be updated before the step.
        completed: units whose gradients have become complete for the step under way.
        has_lent: whether somebody has slots of :meth:`idle_slot`.
    """

    def __init__(self, tiers: Tiers, safe_point: contextlib.AbstractContextManager[object]) -> None:
        super().__init__(tiers, safe_point, aside=True)
        self._queue = Queue[_Guess](self._new_pipeline(), urgent=True)
        self._recipe: Recipe | None = None
        self._asked = False  # whether there is a recipe for this step
        self._refused = False  # whether no guess is worth its while
        self._begun = False  # whether anything was begun for this step
        self.completed = 0
        self.has_lent = False
        away = (unit for unit in tiers.units if unit.trainable and not tiers.plan.on_device(unit))
        self._some_stay = any(tiers.plan.home(unit, Role.PARAM) is Tier.DEVICE for unit in away)
        self._trained = sum(unit.trainable for unit in tiers.units)
        self.has_room = bool(tiers.plan.early_bytes or tiers.plan.spare_units)
        self._room_bytes = tiers.plan.early_bytes
        self._done: list[_Guess] = []

    @property
    def guessed(self) -> bool:
        """Whether any update was begun since the last step."""
        return self._begun

    @property
    def has_more_to_do(self) -> bool:
        """Whether an update is under way, or waits for its turn."""
        return bool(self._queue.waiting or self._queue.open)

    @property
    def rests(self) -> bool:
        """Whether nothing is updated early in the backward that is under way: staging is free."""
        return self.completed > 0 and (self._refused or not self.has_room)

    @property
    def is_ending(self) -> bool:
        """Whether one gradient is missing at most: what is not begun soon is left to the forward."""
        return self._begun and not self._worker.apart and self.completed >= self._trained - 1

    def has_begun(self, index: int) -> bool:
        """Tell whether the update of unit `index` was begun."""
        return any(update.unit.index == index for update in (*self._queue.open, *self._done))

    def idle_slot(self) -> int | None:
        """Give a slot of staging away until backward's updates end, if those that are begun have others."""
        slot = self._queue.pipeline.give(keep=STAGING_SLOTS)
        self.has_lent |= slot is not None
        return slot

    # --- during backward --------------------------------------------------------------------------------------------

    def advance(self, guess: Callable[[], Recipe | None], completed: Sequence[int]) -> None:
        """Work on what has arrived, and start what there is room for. It never fails.

        It waits for nothing but the last upload from memory that it needs. An I/O error, or one that is late, ends it
        for this step: whoever makes the updates after it meets the error again, or not.

        Args:
            guess: what the step is likely to do, None where no guess is worth its while. It is called once per step,
                when the first gradient is complete.
            completed: units whose gradients have become complete since the last time.
        """
        self.completed += len(completed)
        if not (self.has_room and (completed or self.has_more_to_do)):
            return
        try:
            with self._timed():
                for index in completed:
                    self._offer(index, guess)
                for _ in range(self._queue.pipeline.ahead):
                    if not self._work(self._queue, Pace.READY):
                        break
                self._start(self._queue, Pace.READY)
        except (OSError, CopyDeadlineError) as error:
            self._give_up(error)

    def go_on(self) -> None:
        """Work on what has arrived as in :meth:`advance`, if a step was guessed."""
        if self._asked:
            self.advance(lambda: None, self._tiers.gradients.take_completed())

    def withdraw(self, index: int) -> None:
        """Undo what was done for a unit, whose gradient is about to change."""
        for update in self._all():
            if update.unit.index == index:
                self._drop(update)

    def withdraw_all(self) -> None:
        """Undo everything: somebody is about to read or write parameters or states, or to drop the gradients."""
        self._undo_all()
        self.has_lent = False

    def _undo_all(self) -> None:
        self._tiers.gradients.take_completed()
        for update in reversed(self._all()):  # the worker must not begin with the next one while one is awaited
            self._drop(update)
        self._close()

    def rest(self) -> None:
        """Finish what is begun and begin nothing more: somebody is about to read, and needs the staging buffers.

        All the rest stays as it is. An I/O error ends it for this step, as in :meth:`advance`.
        """
        try:
            with self._safe_point:
                while self._queue.open:
                    self._work(self._queue, Pace.OPEN)
                for update in self._done:
                    self._wait_until_written(update)
        except (OSError, CopyDeadlineError) as error:
            self._give_up(error)

    def wanted_here(self) -> list[int]:
        """Return the units whose parameters should stay on the device until their updates have begun.

        Those would not be made early else. The last ones come first, and most of the room is for what backward uses.
        """
        if not self.has_more_to_do:  # as at most uses
            return []
        tiers, wanted = self._tiers, []
        left = int((tiers.working.size_bytes or tiers.plan.working_bytes) * LARGEST_SHARE_KEPT)
        for update in (*self._queue.open, *reversed(self._queue.waiting)):
            if update.unit.param_bytes <= left and tiers.updates_in_place(tiers.param(update.unit.index)):
                left -= update.unit.param_bytes
                wanted.append(update.unit.index)
        return wanted

    def _give_up(self, error: Exception) -> None:
        logger.warning("early updates: %s", str(error))
        self._undo_all()
        self._asked = True  # and no recipe: nothing more in this step

    # --- the step ---------------------------------------------------------------------------------------------------

    def reconcile(self, recipe: Recipe) -> tuple[set[int], set[int]]:
        """Keep what the step would do as well and undo the rest.

        What is under way is finished first: these units came last in backward, so they come first in the forward. If
        the CPU can update others without the drive meanwhile, :meth:`finish` does that, once these have begun. What
        only waits for the worker is left to the forward, which knows a better order.

        Returns:
            The units that need no update any more, and those that are under way.
        """
        if self._some_stay:  # compute waits for what is sent from now on, and reads of parameters must not
            self._tiers.mover.await_compute(self._tiers.deadline_s)
        self._tiers.gradients.take_completed()
        self._queue.waiting.clear()
        for update in reversed(list(self._queue.open)):
            if update.made_from != recipe.ranges(update.unit) or self._is_left(update):
                self._drop(update)
        if not self._beside_drive:
            return self.finish(recipe), set()
        taken = self._take_done(recipe)
        for update in reversed(list(self._queue.open)):
            if self._is_viewed(update):
                self._drop(update)
        under_way = {update.unit.index for update in self._queue.open}
        if not under_way:
            self._end_step()
        return taken, under_way

    def finish(
        self, recipe: Recipe, meanwhile: Callable[[Callable[[], int | None]], None] = lambda slot: None
    ) -> set[int]:
        """Finish what is under way; returns the units that need no update any more.

        Args:
            recipe: of the step.
            meanwhile: called as often as something is waited for, with what gives away a slot of staging.
        """
        while self._queue.open:
            meanwhile(self.idle_slot)
            try:
                self._work(self._queue, Pace.ALL)
            except InternalError:
                raise
            except Exception as error:  # where the step is taken already, the forward makes these updates
                if not isinstance(error, OSError) and not self._beside_drive:
                    raise
                logger.warning("early updates: %s", str(error))
                for update in list(self._queue.open):
                    self._drop(update)
        taken = self._take_done(recipe)
        self._end_step()
        return taken

    def _end_step(self) -> None:
        self._close()
        self.has_lent = False

    def _take_done(self, recipe: Recipe) -> set[int]:
        """Let what is done be the content, if the step would do the same; returns these units."""
        taken = {update.unit.index for update in self._done if self._may_take(update, recipe)}
        for index in taken:
            self._make_way(index)  # may fail: nothing is taken then
        for update in list(self._done):
            if update.unit.index in taken:
                self._take(update)
            else:
                self._drop(update)
        return taken

    def _is_left(self, update: _Guess) -> bool:
        """Tell whether nothing of an update in host memory was worked on, and nothing will be."""
        if update.takes_slots:
            return False
        task = update.chunks[0].task
        return task is None or task.cancel()

    def _may_take(self, update: _Guess, recipe: Recipe) -> bool:
        try:
            self._wait_until_written(update)
        except OSError as error:
            logger.warning("early update of %s: %s", update.unit.name, str(error))
            return False
        return not self._is_viewed(update) and update.made_from == recipe.ranges(update.unit)

    def _is_viewed(self, update: _Guess) -> bool:
        """Tell whether a tensor of the user views the parameters: it stays a view, for the unit is updated in place."""
        index = update.unit.index
        return bool(self._tiers.param(index).readers or self._tiers.bound.borrowed(index))

    def _make_way(self, index: int) -> None:
        """Take old parameters off the device."""
        working, param = self._tiers.working, self._tiers.param(index)
        if param.state is State.FETCHING:
            working.wait_for_prefetch(param)
        if param.state is State.RESIDENT:
            working.evict(param)
        self._tiers.copies.forgive(param)

    def _take(self, update: _Guess) -> None:
        tiers, param = self._tiers, self._tiers.param(update.unit.index)
        shards = self._shards(update.unit)
        if param.home is Tier.DEVICE:
            update.leases.send_param(update.unit)
            shards.remove(param)
        else:
            tiers.copies.renew(param)
        tiers.copies.take_aside(shards)
        tiers.counters.early_units += 1
        self._done.remove(update)

    def _wait_until_written(self, update: Update) -> None:
        TicketGroup([ticket for chunk in update.chunks for ticket in chunk.writing]).wait(self._tiers.deadline_s)

    # --- the policy -------------------------------------------------------------------------------------------------

    def _offer(self, index: int, guess: Callable[[], Recipe | None]) -> None:
        """Queue the update of a unit whose gradient is complete, if there is a point in it and room for it."""
        if not self._asked:
            self._asked = True
            self._recipe = guess()
            self._refused = self._recipe is None
        tiers = self._tiers
        unit = tiers.units[index]
        size = tiers.plan.aside_bytes(unit)
        if self._recipe is None or not tiers.plan.updates_early(unit) or size > self._room_bytes:
            return
        if not tiers.gradients.is_whole(index):
            return
        if any(shard.state is State.FAILED for shard in self._shards(unit)):
            return
        try:
            made_from = self._recipe.ranges(unit)
        except ConfigError:  # the step will say so
            self._recipe = None
            return
        if made_from:
            self._room_bytes -= size
            self._queue.waiting.append(_Guess(unit, Leases(tiers), self._recipe.visit, made_from=made_from))

    def _next(self, queue: Queue[_Guess]) -> Unit | None:
        return queue.waiting[-1].unit if queue.waiting else None

    def _begin_next(self, queue: Queue[_Guess], pace: Pace, *, waits: bool) -> bool:
        """Begin the unit that came last, whose parameters are most likely still there.

        One whose parameters the next forward reads in any case is passed over. Where whoever passes by makes updates,
        nobody does any more once all gradients have come: the forward makes what is left, in place, and need not wait
        until it is written.
        """
        tiers = self._tiers
        if not self._worker.apart and self.completed >= self._trained:
            return False
        queued = sum(not update.takes_slots and not update.is_over for update in queue.open)
        while queue.waiting and pace is not Pace.OPEN:
            if queued >= MOST_QUEUED and not queue.pipeline.takes_slots(queue.waiting[-1].unit):
                return False  # a better one may come before the worker needs it
            update = queue.waiting.pop()
            param = tiers.param(update.unit.index)
            if tiers.updates_in_place(param) and param.state is not State.RESIDENT:
                self._room_bytes += tiers.plan.aside_bytes(update.unit)
                continue
            self._begun = True
            self._begin(queue, update)
            return True
        return False

    def _end(self, queue: Queue[_Guess], update: _Guess) -> None:
        self._done.append(update)

    def _fail(self, error: BaseException) -> None:
        """Leave it to whoever undoes it: the content is as it was."""

    def _all(self) -> list[_Guess]:
        return [*self._queue.waiting, *self._queue.open, *self._done]

    def _drop(self, update: _Guess) -> None:
        """Undo an update. Its room is not used again before the next step: the drive has enough to do."""
        come_to_rest(update.chunks, self._tiers)
        self._queue.pipeline.forget(update.chunks)
        update.leases.stop_reading()
        owners: tuple[list[_Guess] | deque[_Guess], ...] = (self._queue.waiting, self._queue.open, self._done)
        for owner in owners:
            if update in owner:
                owner.remove(update)
        self._tiers.copies.drop_aside(self._shards(update.unit))
        self._tiers.counters.early_units_dropped += update.was_begun

    def _close(self) -> None:
        """Be ready for the next step."""
        assert not (self._queue.waiting or self._queue.open or self._done)
        self._recipe = None
        self._asked = self._begun = self._refused = False
        self.completed = 0
        self._room_bytes = self._tiers.plan.early_bytes
        self._queue = Queue[_Guess](self._new_pipeline(), urgent=True)

    def _shards(self, unit: Unit) -> list[Shard]:
        """Return the shards that an update writes."""
        found = (self._tiers.copies.get(unit.index, role) for role in (Role.PARAM, *STATE_ROLES))
        return [shard for shard in found if shard is not None]
