"""What comes to the device before it is asked for: which units, and when room for them is looked for.

Owns that choice. Steps repeat themselves: where the same use finds the same units in the same places, what was chosen
there before is chosen again without thinking it over. Who leaves for whom is the choice of
:mod:`offload.shards.working_set`. Next: :mod:`offload.shards.manager` looks ahead at each use.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable

from offload.memory.budget import Tier
from offload.planning.asked import LOOK_AHEAD
from offload.planning.roles import Role
from offload.planning.schedule import PREFETCH_WINDOW, Schedule
from offload.shards.backward_updates import BackwardUpdates
from offload.shards.forward_updates import ForwardUpdates
from offload.shards.shard import Shard, State
from offload.shards.tiers import Tiers
from offload.shards.working_set import Came

FETCHES_AHEAD = 2  # from host memory, while the processor has updates to make
PATIENCE = 4  # acquisitions of one unit after which room is looked for again
_LAYOUTS = 4  # per use of a step, of which choices are remembered


@dataclasses.dataclass(slots=True)
class _Choice:
    """What was done at a use.

    Attributes:
        fetches: units that were fetched, each with those that left for it.
        ended: one more had no room.
        bound: what had arrived was bound, in search of it.
        certain: the same would be done wherever the same use finds the same units in the same places, and the unit used
            last as much in use.
    """

    fetches: list[tuple[Shard, tuple[int, ...]]] = dataclasses.field(default_factory=list)
    ended: bool = False
    bound: bool = False
    certain: bool = True


class _Choices:
    """Those that are certain, while a schedule predicts the same uses. If they become too many, all are forgotten."""

    def __init__(self, schedule: Schedule) -> None:
        self.edition = schedule.edition
        self.most = _LAYOUTS * len(schedule.trace)
        self.made: dict[Hashable, _Choice] = {}


class Prefetching:
    """Brings one engine's units to the device ahead of their use. See the module's text.

    Attributes:
        active: whether anything is to come ahead.
        held_up: a unit that has no room as long as others are on their way.
    """

    def __init__(self, tiers: Tiers, forward: ForwardUpdates, backward: BackwardUpdates, *, wanted: bool) -> None:
        """Begin with nothing on its way.

        Args:
            tiers: the memory.
            forward: updates that the last step has left.
            backward: updates that are made ahead of the next one.
            wanted: by the user.
        """
        self._tiers = tiers
        self._copies, self._working = tiers.copies, tiers.working
        self._forward, self._backward = forward, backward
        self.active = wanted and Role.PARAM in tiers.copies.regions
        self.held_up: int | None = None
        self._is_sliced = tiers.plan.request.slices_parameters
        self._is_asynchronous = not tiers.device.addressable
        self._staging_bytes = tiers.plan.staging_slots * tiers.plan.staging_slot_bytes
        self._no_room_at: tuple[Schedule, int] | None = None  # where in which schedule there was none
        self._patience = 0
        self._chosen: dict[Schedule, _Choices] = {}

    def try_again(self) -> None:
        """Look for room the next time, though there was none: something has changed."""
        self._patience = 0

    def look_ahead(self, schedule: Schedule, uses: int = PREFETCH_WINDOW) -> None:
        """Start fetching the units of the next `uses`, as far as units used later give way."""
        if not self.active:
            return
        here = (schedule, schedule.position)
        if here == self._no_room_at and self._patience:  # a unit has many modules: little has changed since the last
            self._patience -= 1
            return
        wanted = self._backward.wanted_here()
        if wanted or self._is_sliced or self._forward.active:  # then more than uses and places matters
            ended = self._choose(schedule, uses, wanted).ended
        else:
            ended = self._choose_as_before(schedule, uses)
        if ended:
            self._no_room_at, self._patience = here, PATIENCE - 1

    def may_fetch(self, shard: Shard) -> bool:
        """Tell whether the home's content is of use on the device."""
        return not shard.writing and (shard.unit.index not in self._forward or self._tiers.comes_before_update(shard))

    def _choose_as_before(self, schedule: Schedule, uses: int) -> bool:
        """Do what was done where this use found the same units in the same places; returns whether one has no room."""
        copies, last = self._copies, schedule.last
        copies.sweep(Role.PARAM)
        region = copies.regions[Role.PARAM]
        choices = self._chosen.get(schedule)
        if choices is None or choices.edition != schedule.edition or len(choices.made) > choices.most:
            choices = self._chosen[schedule] = _Choices(schedule)
        key = (schedule.turn, last, last is None or copies.params[last].readers > 0, region.layout, uses)
        known = choices.made.get(key)
        if known is not None and all(self._fetches_again(shard, left) for shard, left in known.fetches):
            before = region.layout
            if known.bound:
                self._working.bind_arrived()
            if region.layout != before:  # what should have arrived has failed
                return self._choose(schedule, uses, []).ended
            if known.ended:
                self.held_up = None
            return known.ended
        choice = self._choose(schedule, uses, [])
        if known is not None:  # it does not fit any more, or a part of it was done just now
            del choices.made[key]
        elif choice.certain:
            choices.made[key] = choice
        return choice.ended

    def _fetches_again(self, shard: Shard, left: tuple[int, ...]) -> bool:
        return shard.state is State.STORED and not shard.writing and self._working.fetch_again(shard, left)

    def _choose(self, schedule: Schedule, uses: int, wanted: list[int]) -> _Choice:
        """Fetch what is used next, as far as there is room beside what is `wanted` by others, too."""
        params, start_fetch, choice = self._copies.params, self._working.start_fetch, _Choice()
        in_use = [] if schedule.last is None else [schedule.last]
        for index in schedule.upcoming(uses, within_step=self._is_sliced):
            shard = params[index]
            if shard.state is not State.STORED or shard.stays:
                choice.certain &= shard.stays or shard.work_buffer is not None
                continue
            if self._is_sliced and len(self._copies.in_flight(Role.PARAM)) >= LOOK_AHEAD:
                return choice  # nothing else can be asked of the ranks before these have come
            if not self.may_fetch(shard):
                choice.certain = False
                continue
            if self._forward.active and self._is_far_ahead(shard):
                return choice
            found = start_fetch(shard, schedule, required=False, wanted=in_use + wanted)
            if found.came is not Came.STARTED and wanted and schedule.distance(index) == 0:
                found = start_fetch(shard, schedule, required=False, wanted=in_use)
            choice.certain &= found.certain
            if found.came is Came.STARTED:
                choice.fetches.append((shard, found.left))
                continue
            self.held_up = index if found.came is Came.HELD_UP else None
            choice.ended, choice.bound = True, found.bound
            break
        return choice

    def _is_far_ahead(self, shard: Shard) -> bool:
        """Tell whether so much is on its way to the device that a unit can wait while updates are left to do.

        The drive has to bring what they need, and copies from host memory leave the processor less of its bandwidth.
        """
        copies = self._copies
        fetched = [other for other in copies.in_flight(Role.PARAM) if other.state is State.FETCHING]
        if shard.home is Tier.NVME:
            return sum(other.size_bytes for other in fetched if copies.is_late(other)) >= self._staging_bytes
        return self._is_asynchronous and sum(copies.is_late(other) for other in fetched) >= FETCHES_AHEAD
