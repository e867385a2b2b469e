"""Updates that are made before it is known whether they count: during backward, as gradients become complete.

A step multiplies every gradient by a factor that depends on all of them, so the factor is known only when backward has
ended. Where the last steps have clipped nothing it can be guessed, though. So units whose parameters and states live on
NVMe are updated while backward goes on, with the factor of a step that clips nothing, and what comes out is written
*aside*: beside the old content, which stays as it is. The step then compares. Where an update was made from what the
step has fixed - the same gradient, factor and hyper-parameters - its result becomes the content, by a change of names;
else it is deleted, and the update is made as if there had been no guess. Either way the numbers are the same: a wrong
guess costs the drive's time, and never a result.

Owns what is under way and aside. Knows neither norms nor hyper-parameters: :mod:`offload.optim.recipe` makes the
updates. The other half of a step's work, after its end, is :mod:`offload.shards.forward_updates`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Protocol

from offload.errors import ConfigError
from offload.memory.transfer import TicketGroup
from offload.planning.placement import STATE_ROLES
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.leases import Leases
from offload.shards.manager import Manager
from offload.shards.shard import Shard, State
from offload.shards.stream import ALL_STATES, Chunk, Pipeline, come_to_rest

logger = logging.getLogger(__name__)

WRITTEN = frozenset({Role.PARAM}) | ALL_STATES
MOST_CALM_STEPS = 16
LARGEST_SHARE_KEPT = 1 / 3  # of the working region


class Calm:
    """Whether a step is worth guessing: after calm ones, more of them after each wrong guess.

    A step is calm where each gradient comes in the backward pass that was said to be the last, and nothing multiplies
    it: nothing clips, and no trainer accumulates without saying so.
    """

    def __init__(self, *, expected: bool) -> None:
        """Begin.

        Args:
            expected: the first step is likely to be calm.
        """
        self._steps = 0
        self._needed = 0 if expected else 1

    def __bool__(self) -> bool:
        """Tell whether the next step is likely to be calm."""
        return self._steps >= self._needed

    def note(self, *, calm: bool, guessed: bool) -> None:
        """Note a step: whether it was calm, and whether a guess was made."""
        self._steps = self._steps + 1 if calm else 0
        if not calm:
            self._needed = min(2 * self._needed, MOST_CALM_STEPS) if guessed and self._needed else max(self._needed, 1)
        elif guessed:
            self._needed = max(self._needed // 2, 1)


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
class _Update:
    """A unit's update: chunks [0, worked) are done, [worked, started) have their bytes or wait for them."""

    unit: Unit
    made_from: object
    leases: Leases
    chunks: list[Chunk] = dataclasses.field(default_factory=list)
    started: int = 0
    worked: int = 0


class EarlyUpdates:
    """Updates of one engine that are made during backward. See the module's text.

    All methods are called by the thread that computes.
    """

    def __init__(
        self,
        manager: Manager,
        guess: Callable[[], Recipe | None],
        *,
        safe_point: contextlib.AbstractContextManager[object],
    ) -> None:
        """Watch the gradients from now on.

        Args:
            manager: owner of the shards.
            guess: called once per step, when the first gradient is complete; None where nothing is worth a guess.
            safe_point: held while something is half done: hands Ctrl-C on at its end.
        """
        self._manager = manager
        self._guess = guess
        self._safe_point = safe_point
        self._complete: deque[int] = deque()  # units whose gradients may be used; filled by the thread that takes them
        self._recipe: Recipe | None = None
        self._asked = False  # whether there is a recipe for this step
        self._begun = False  # whether anything was begun for this step
        self._room_bytes = manager.plan.early_bytes
        self._pipeline = self._new_pipeline()
        self._waiting: list[_Update] = []
        self._open: deque[_Update] = deque()
        self._done: list[_Update] = []
        manager.early = self
        manager.working.wanted_here = self._wanted_here
        manager.gradients.on_complete = self._complete.append
        manager.gradients.on_change = self.withdraw
        manager.gradients.on_drop = self.withdraw_all

    @property
    def guessed(self) -> bool:
        """Whether any update was begun since the last step."""
        return self._begun

    # --- during backward --------------------------------------------------------------------------------------------

    def advance(self) -> None:
        """Work on what has arrived, and start what there is room for. Waits for nothing, and never fails.

        An I/O error ends it for this step: whoever makes the updates after it meets the error again, or not.
        """
        if not (self._complete or self._waiting or self._open):
            return
        begin = time.perf_counter()
        try:
            with self._safe_point:
                while self._complete:
                    self._offer(self._complete.popleft())
                for _ in range(self._pipeline.ahead):
                    if not self._work(wait=False):
                        break
                self._start(wait=False)
        except OSError as error:
            self._give_up(error)
        finally:
            self._manager.counters.update_seconds += time.perf_counter() - begin

    def withdraw(self, index: int) -> None:
        """Undo what was done for a unit, whose gradient is about to change."""
        for update in [*self._waiting, *self._open, *self._done]:
            if update.unit.index == index:
                self._drop(update)

    def withdraw_all(self) -> None:
        """Undo everything: somebody is about to read or write parameters or states, or to drop the gradients."""
        self._complete.clear()
        for update in [*self._waiting, *self._open, *self._done]:
            self._drop(update)
        self._close()

    def rest(self) -> None:
        """Finish what is begun and begin nothing more: somebody is about to read, and needs the staging buffers.

        All the rest stays as it is. An I/O error ends it for this step, as in :meth:`advance`.
        """
        try:
            with self._safe_point:
                while self._open:
                    self._work(wait=True, more=False)
                for update in self._done:
                    TicketGroup([ticket for chunk in update.chunks for ticket in chunk.writing]).wait(
                        self._manager.deadline_s
                    )
        except OSError as error:
            self._give_up(error)

    def _give_up(self, error: OSError) -> None:
        logger.warning("early updates: %s", error)
        self.withdraw_all()
        self._asked = True  # and no recipe: nothing more in this step

    # --- the step ---------------------------------------------------------------------------------------------------

    def settle(self, recipe: Recipe) -> set[int]:
        """Keep what the step would do as well and undo the rest; returns the units that need no update any more.

        What is under way is finished first: these units came last in backward, so they come first in the forward.
        """
        self._complete.clear()
        self._waiting.clear()
        for update in list(self._open):
            if update.made_from != recipe.ranges(update.unit):
                self._drop(update)
        try:
            while self._open:
                self._work(wait=True)
        except OSError as error:
            logger.warning("early updates: %s", error)
            for update in list(self._open):
                self._drop(update)
        taken = set()
        for update in list(self._done):
            if self._may_take(update, recipe):
                self._take(update)
                taken.add(update.unit.index)
            else:
                self._drop(update)
        self._close()
        return taken

    def _may_take(self, update: _Update, recipe: Recipe) -> bool:
        manager, param = self._manager, self._param(update.unit)
        try:
            TicketGroup([ticket for chunk in update.chunks for ticket in chunk.writing]).wait(manager.deadline_s)
        except OSError as error:
            logger.warning("early update of %s: %s", update.unit.name, error)
            return False
        # A tensor of the user that views the parameters stays a view of them: such a unit is updated in place.
        viewed = param.readers or manager.working.borrowed(update.unit.index)
        return not viewed and update.made_from == recipe.ranges(update.unit)

    def _take(self, update: _Update) -> None:
        manager, param = self._manager, self._param(update.unit)
        if param.state is State.FETCHING:
            manager.working.finish_prefetch(param)
        if param.state is State.RESIDENT:
            manager.working.evict(param)
        manager.copies.forgive(param)
        manager.copies.take_aside(self._shards(update.unit))
        manager.versions[update.unit.index] += 1
        manager.counters.early_units += 1
        self._done.remove(update)

    # --- one chunk after the other ----------------------------------------------------------------------------------

    def _offer(self, index: int) -> None:
        """Queue the update of a unit whose gradient is complete, if there is a point in it and room for it."""
        if not self._asked:
            self._asked = True
            self._manager.finish_step()  # its last writes may still be leaving the buffers that are used here
            self._recipe = self._guess()
        manager = self._manager
        unit = manager.units[index]
        size = manager.plan.aside_bytes(unit)
        if self._recipe is None or not size or size > self._room_bytes or not manager.gradients.is_whole(index):
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
            self._waiting.append(_Update(unit, made_from, Leases(manager)))

    def _work(self, *, wait: bool, more: bool = True) -> bool:
        """Work on the chunk whose turn it is; returns False where there is none, or only waiting would bring it."""
        self._start(wait=wait, more=more)
        if not self._open:
            return False
        update = self._open[0]
        if update.started == update.worked:
            return False
        chunk = update.chunks[update.worked]
        there = all(ticket.done() for ticket in chunk.reading)
        if not there and not wait:
            return False
        counters = self._manager.counters
        begin = time.perf_counter()
        TicketGroup(chunk.reading).wait(self._manager.deadline_s)  # also where it is over: for what went wrong
        counters.update_stall_seconds += time.perf_counter() - begin
        assert self._recipe is not None
        self._pipeline.work(chunk, self._recipe.visit)
        counters.update_chunks += 1
        counters.update_stalls += not there
        update.worked += 1
        if update.worked == len(update.chunks):
            self._open.popleft()
            self._done.append(update)
            update.leases.stop_reading()
        return True

    def _start(self, *, wait: bool, more: bool = True) -> None:
        """Start the reads of chunks whose turn is near; those of further units only where `more` may begin."""
        while sum(update.started - update.worked for update in self._open) < self._pipeline.ahead:
            leaving = self._pipeline.leaving()
            if not wait and not all(ticket.done() for ticket in leaving):
                return
            TicketGroup(leaving).wait(self._manager.deadline_s)  # also where it is over: for what went wrong
            if not self._open or self._open[-1].started == len(self._open[-1].chunks):
                if not self._waiting or not more:
                    return
                self._begin(self._waiting.pop())  # the last one: its parameters are most likely still there
                continue
            update = self._open[-1]
            self._pipeline.start(update.chunks[update.started])
            update.started += 1

    def _begin(self, update: _Update) -> None:
        """Begin an update; not where that would read parameters that the next forward reads in any case."""
        manager, param = self._manager, self._param(update.unit)
        if manager.updates_in_place(param) and param.state is not State.RESIDENT:
            self._room_bytes += manager.plan.aside_bytes(update.unit)
            return
        self._begun = True
        try:
            update.chunks = self._pipeline.open(update.unit, update.leases)
        except BaseException:
            update.leases.stop_reading()
            raise
        self._open.append(update)

    def _wanted_here(self) -> list[int]:
        """Return the units whose parameters should stay on the device until their updates have begun.

        Those would not be made early else. The last ones come first, and most of the room is for what backward uses.
        """
        manager, wanted = self._manager, []
        left = int((manager.working.size_bytes or manager.plan.working_bytes) * LARGEST_SHARE_KEPT)
        for update in (*self._open, *reversed(self._waiting)):
            if update.unit.param_bytes <= left and manager.updates_in_place(self._param(update.unit)):
                left -= update.unit.param_bytes
                wanted.append(update.unit.index)
        return wanted

    def _drop(self, update: _Update) -> None:
        """Undo an update. Its room is not used again before the next step: the drive has enough to do."""
        come_to_rest(update.chunks, self._manager.deadline_s)
        update.leases.stop_reading()
        for owner in (self._waiting, self._open, self._done):
            if update in owner:
                owner.remove(update)
        self._manager.copies.drop_aside(self._shards(update.unit))
        self._manager.counters.early_units_dropped += bool(update.chunks)

    def _close(self) -> None:
        """Be ready for the next step."""
        assert not (self._waiting or self._open or self._done)
        self._recipe = None
        self._asked = self._begun = False
        self._room_bytes = self._manager.plan.early_bytes
        self._pipeline = self._new_pipeline()

    def _new_pipeline(self) -> Pipeline:
        return Pipeline(self._manager, reads=WRITTEN | {Role.GRAD}, writes=WRITTEN, aside=True)

    def _param(self, unit: Unit) -> Shard:
        return self._manager.copies.of(unit.index, Role.PARAM)

    def _shards(self, unit: Unit) -> list[Shard]:
        """Return the shards that an update writes."""
        copies = self._manager.copies
        found = (copies.get(unit.index, role) for role in (Role.PARAM, *STATE_ROLES))
        return [shard for shard in found if shard is not None]
