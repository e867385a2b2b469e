"""What a step fetches of parameters, and of gradients, once steps repeat: the engine's own policy, over sizes alone.

Owns the simulation of the working region. It goes by the units' order of use, by :func:`.who_leaves`, and by the
places of :class:`.Region`, as an engine does. Owns that of the pool of gradients, too, which the unit leaves that came
first in backward. It knows no time: what is asked for is there, and what is written is home, at once. So it is exact
where a drive keeps up; a slow one may keep a unit from leaving. Next: :mod:`offload.planning.timing` makes seconds of
the bytes.
"""

from __future__ import annotations

from collections.abc import Container, Iterable

from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.memory.region import Region
from offload.planning.eviction import who_gives_way, who_leaves, who_may_leave
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.schedule import PREFETCH_WINDOW, Schedules
from offload.planning.units import Unit
from offload.planning.uses import Uses
from offload.sizes import whole_pages

LEAST_MICRO_BATCHES = 4  # that are simulated of a step with many, beside those at its ends


def fetched(
    plan: Plan, uses: Uses, *, micro_batches: int = 1, updated_early: Container[int] = ()
) -> list[tuple[Unit, ...]]:
    """Return the units that each pass of a step fetches, once steps repeat: forward and backward of each micro-batch.

    Args:
        plan: homes, and the size of the working region.
        uses: of a micro-batch.
        micro_batches: of a step.
        updated_early: units whose updates are made during backward: the step drops their old working copies.
    """
    units, on_host = plan.request.units, plan.request.device_is_host
    dropped = [u.index for u in units if u.trainable and (u.index in updated_early or not on_host)]
    ahead = PREFETCH_WINDOW // max(len(uses.forward) + len(uses.backward), 1) + 2  # micro-batches that a use looks at
    many = min(micro_batches, 2 * ahead + LEAST_MICRO_BATCHES)
    while True:
        found, states = _simulated(_WorkingRegion(plan), uses, many, dropped)
        if many == micro_batches:
            break
        alike = [k for k in range(2, many - ahead) if states[k] == states[k - 1]]
        if alike:  # as this micro-batch, all are until one looks beyond the step
            at = 2 * alike[0]
            found[at:at] = found[at : at + 2] * (micro_batches - many)
            break
        many = min(micro_batches, 2 * many)
    return [tuple(units[index] for index in each) for each in found]


def gradients_read(plan: Plan, uses: Uses, *, micro_batches: int = 1) -> list[frozenset[int]]:
    """Return the units whose gradients come from the drive: for each backward pass of a step, then for its updates.

    A pass adds to what those before it have summed up. What is in the pool still is not read.

    Args:
        plan: homes, and the size of the pool.
        uses: of a micro-batch.
        micro_batches: of a step.
    """
    units = plan.request.units
    order = reversed(dict.fromkeys((*uses.forward, *(unit.index for unit in units))))
    spilled = (units[index] for index in order if plan.home(units[index], Role.GRAD) is Tier.NVME)
    sizes = {unit.index: plan.role_bytes(unit, Role.GRAD) for unit in spilled}
    pool = Region(Buffer(Tier.HOST, 0, 0, plan.grad_pool_bytes))
    found, known = list[frozenset[int]](), dict[int, int]()
    while len(found) < micro_batches:
        entered = frozenset(index for index, size_bytes in sizes.items() if _enters(pool, index, size_bytes))
        found.append(entered if found else frozenset())  # the first pass has nothing to add to
        first = known.setdefault(pool.layout, len(found))
        found += found[first:] * ((micro_batches - len(found)) // max(len(found) - first, 1))  # all is as it was then
    return [*found, frozenset(sizes).difference(pool.owners())]


def _enters(pool: Region, index: int, size_bytes: int) -> bool:
    """Let a unit's gradient be in the pool, which others leave for it; tells whether it was not there."""
    if index in pool.owners():
        return False
    while pool.allocate(size_bytes, index) is None:
        pool.free(max(pool.owners()))
    return True


def _simulated(
    region: _WorkingRegion, uses: Uses, micro_batches: int, dropped: Iterable[int]
) -> tuple[list[tuple[int, ...]], list[object]]:
    """Return what each pass of a step fetches once steps repeat, and what is where before each micro-batch."""
    seen = set[object]()
    while True:
        passes, states = list[tuple[int, ...]](), list[object]()
        for _ in range(micro_batches):
            states.append(region.places)
            for order in (uses.forward, uses.backward):
                for index in order:
                    region.use(index)
                passes.append(region.take_fetched())
        region.end_step(dropped)
        now = (tuple(passes), region.places)
        if now in seen:
            return passes, states
        seen.add(now)


class _WorkingRegion:
    """Working copies as an engine would have them, without bytes."""

    def __init__(self, plan: Plan) -> None:
        units = plan.request.units
        away = [plan.home(unit, Role.PARAM) is not Tier.DEVICE for unit in units]
        self._sizes = [whole_pages(unit.param_bytes) * away[unit.index] for unit in units]
        self._region = Region(Buffer(Tier.DEVICE, 0, 0, plan.working_bytes))
        self._schedule = Schedules([unit.index for unit in units]).training
        self._here: dict[int, int] = {}  # where each is
        self._in_use: int | None = None
        self._fetched: list[int] = []

    @property
    def places(self) -> tuple[tuple[int, int], ...]:
        """What is where."""
        return tuple(sorted(self._here.items()))

    def take_fetched(self) -> tuple[int, ...]:
        """Return the units that were fetched since the last time."""
        found, self._fetched = tuple(self._fetched), []
        return found

    def use(self, index: int) -> None:
        """Use a unit, and fetch what comes next."""
        self._schedule.use(index)
        self._in_use = None
        if self._is_away(index):
            self._fetch(index, required=True)
        self._in_use = index
        self._prefetch()

    def end_step(self, dropped: Iterable[int]) -> None:
        """Drop working copies of units that were updated elsewhere, and fetch what the next step begins with."""
        self._schedule.restart()
        self._in_use = None
        for index in dropped:
            if index in self._here:
                self._evict(index)
        self._prefetch()

    def _prefetch(self) -> None:
        for index in self._schedule.upcoming(PREFETCH_WINDOW):
            if self._is_away(index) and not self._fetch(index, required=False):
                return

    def _fetch(self, index: int, *, required: bool) -> bool:
        size = self._sizes[index]
        placed = self._region.allocate(size, index)
        if placed is None:
            asked = (self._region, self._schedule, index)
            later = who_gives_way(*asked, required=required)
            costs = who_may_leave(self._region, self._schedule, filter(self._may_leave, later), size)
            known = (*asked, self._sizes.__getitem__, costs)
            leaving = who_leaves(*known, required=required)
            packs = leaving is None
            if leaving is None:
                leaving = who_leaves(*known, required=required, packs=True)
            if leaving is None:
                assert not required, "the plan has room for the largest units"
                return False
            for owner in leaving:
                self._evict(owner)
            if packs:
                for owner, _, target in self._region.pack(lambda _: True):
                    self._here[owner] = target.offset_bytes
            placed = self._region.allocate(size, index)
            assert placed is not None
        self._here[index] = placed.offset_bytes
        self._fetched.append(index)
        return True

    def _evict(self, index: int) -> None:
        self._region.free(index)
        del self._here[index]

    def _is_away(self, index: int) -> bool:
        return self._sizes[index] > 0 and index not in self._here

    def _may_leave(self, index: int) -> bool:
        return index != self._in_use
