"""A step beside an accelerator, played over units: from the last backward to the end of the next forward.

Owns the order in which things happen, as :class:`.Lanes` lets time go by:

* The device computes unit by unit, each once its parameters are there and the host has given it the work.
* A gradient goes to the host and is taken there by the CPU, beside updates. The host's thread hands gradients over
  until there is no room for the next one. Then it waits for the oldest to leave, and passes by what it has begun.
* A gradient at home on NVMe is added to what the drive brings of it, and written: each waits for the one before, and
  for room in the pool of gradients.
* A unit that has room beside its old content is updated during backward: the one whose gradient came last comes first.
* When all gradients are there, what has begun is finished. All other units follow in the order of the forward: those
  with something on NVMe in a line of their own, so that the drive goes on while others are updated.
* A unit's new parameters go to the device once the unit is updated, or where they were read anew.
* What passes through staging goes in pieces. Some are read while others are written, also into the next backward.
* If a step clips, no unit is updated during backward, but staging fills with states.

So steps repeat; the second one is told. It is the engine's policy without its reasons. Pure arithmetic over plain
values. Next: :mod:`offload.planning.timing`.
"""

from __future__ import annotations

import dataclasses
import math
from collections import defaultdict, deque
from collections.abc import Collection, Mapping, Sequence

from offload.memory.budget import Tier
from offload.planning.hardware import Hardware
from offload.planning.lanes import CALLS, COMPUTE, D2H, H2D, READ, TAKE, UPDATE, WRITE, Lanes, Moment, Process
from offload.planning.moved import Moved, Sums, gradient_of, update_of
from offload.planning.plan import LARGE_CHUNK_NUMEL, MOST_QUEUED, Plan
from offload.planning.played_activations import PlayedActivations, Saved
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.planning.waits import leaves_of

STEPS = 2  # that are played
AHEAD = 2  # units that come while another one is used
LEAST_PIECES, MOST_PIECES = 2, 32  # of a unit: more of them change little
AT_ONCE = 8  # pieces for which staging has room, at least
CHUNK_CALLS = 16  # calls of the host to bring a chunk from the device and send it back


@dataclasses.dataclass(frozen=True, slots=True)
class Pass:
    """A forward or a backward pass.

    Attributes:
        order: units, as it is done with them.
        compute_s: of the device per unit.
        calls_s: of the host's thread, to give the device this work.
        fetched: units whose parameters come for it.
        gradients: per unit those of its parameters, as :attr:`Part.gradients`; by default, they come at its end.
    """

    order: Sequence[int]
    compute_s: Mapping[int, float]
    calls_s: Mapping[int, float]
    fetched: Collection[int]
    gradients: Mapping[int, Sequence[tuple[int, float]]] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(slots=True, eq=False)
class _Line:
    """Updates that go one behind the other.

    Attributes:
        room_bytes: of staging.
        staged: bytes in it.
        in_flight: pieces, and units that do not pass through staging.
    """

    room_bytes: float
    staged: float = 0.0
    in_flight: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class _Way:
    """A trained unit's gradient and update.

    Attributes:
        unit: which.
        gradient, update: bytes.
        leaves: of :func:`leaves_of`.
        home: of its parameters.
        early: it may be updated during backward.
        aside_bytes: of the drive for that.
        pieces: in which it passes through staging; 0 if it does not.
        piece_bytes: of staging for each.
        line: of those that are made when all gradients are there.
    """

    unit: Unit
    gradient: Moved
    leaves: Sequence[tuple[float, float]]
    update: Moved
    home: Tier | None
    early: bool
    aside_bytes: int
    pieces: int
    piece_bytes: float
    line: _Line


@dataclasses.dataclass(frozen=True, slots=True)
class Played:
    """A step that was played.

    Attributes:
        step_s: seconds from one end of the forward to the next one.
        filled_bytes: of parameters at home on NVMe that come to the device from where they were updated.
        early_units: that were updated during backward.
        stayed_bytes: of activations that had not left when they were wanted back.
    """

    step_s: float
    filled_bytes: int
    early_units: int
    stayed_bytes: int


def play(
    plan: Plan,
    hardware: Hardware,
    backward: Pass,
    forward: Pass,
    *,
    clips: bool,
    sums: Sums,
    before_s: float,
    there_s: float,
    saved: Saved | None = None,
) -> Played:
    """Play steps until they repeat.

    Args:
        plan: homes, staging, and room beside old content.
        hardware: the machine.
        backward: the last one of a step.
        forward: the first one of the next step.
        clips: every step does.
        sums: of gradients.
        before_s: seconds of other micro-batches.
        there_s: of the updates that the device makes.
        saved: activations that leave; None where all stay.
    """
    fixed_s = before_s, there_s
    return _Play(plan, hardware, backward, forward, saved, clips=clips, sums=sums, fixed_s=fixed_s).result()


class _Play:
    """Processes over the units of one plan. See the module's text."""

    def __init__(
        self,
        plan: Plan,
        hardware: Hardware,
        backward: Pass,
        forward: Pass,
        saved: Saved | None,
        *,
        clips: bool,
        sums: Sums,
        fixed_s: tuple[float, float],
    ) -> None:
        self._plan = plan
        self._units = plan.request.units
        self._hardware = hardware
        self._backward, self._forward = backward, forward
        self._clips = clips
        self._sums = sums
        self._before_s, self._there_s = fixed_s
        self._lanes = Lanes(hardware)
        self._activations = None if saved is None else PlayedActivations(self._lanes, hardware, saved)
        self._moments: defaultdict[tuple[int, str, int], Moment] = defaultdict(Moment)
        self._is_beside = plan.beside_drive()
        self._first = _Line(float((plan.staging_slots - plan.slots_beside) * plan.staging_slot_bytes))
        self._beside = _Line(float(plan.slots_beside * plan.staging_slot_bytes))
        trained = {unit.index: unit for unit in self._units if unit.trainable and not plan.on_device(unit)}
        leaves = leaves_of(backward.order, trained, backward.gradients, plan.grad_staging_bytes)
        self._ways = {index: self._way(unit, leaves[index]) for index, unit in trained.items()}
        self._changed = Moment()  # of what a process that updates may wait for
        self._taken = Moment()  # of the gradient that came last; they are taken one by one
        self._taken.has_come = True
        self._spilling = 0  # bytes of gradients in their pool that are not at home on NVMe yet
        self._passed = Moment()  # of the host's thread, which looks at what has come when a gradient leaves the device
        self._offered: list[_Way] = []  # units whose gradients have come, the last one behind
        self._missing = 0  # gradients
        self._queue: deque[tuple[_Way, Moment]] = deque()  # units in host memory that the CPU has, once all is there
        self._read_ahead = 0.0  # bytes in staging that were read ahead
        self._is_reading_ahead = False
        self._begun = 0.0  # bytes that backward has begun with, and that were not updated yet
        self._here_until_s = 0.0  # until when the host's thread passes
        self._early: set[int] = set()
        self._ends: list[float] = []

    def _way(self, unit: Unit, leaves: Sequence[tuple[float, float]]) -> _Way:
        plan, home = self._plan, self._plan.home(unit, Role.PARAM)
        line = self._beside if unit.index in self._is_beside else self._first
        update, pieces, through = update_of(plan, unit, self._sums.updated), 0, 0
        if update.drive_read or update.drive_write or (home is Tier.DEVICE and unit.index not in plan.spare_units):
            through = max(update.drive_read, update.drive_write, unit.param_bytes)
            times = through / max(line.room_bytes, 1)
            pieces = max(min(math.ceil(times * MOST_PIECES), MOST_PIECES), math.ceil(times * AT_ONCE), LEAST_PIECES)
        return _Way(
            unit,
            gradient_of(plan, unit, first=not self._sums.adds, added=self._sums.added),
            leaves,
            update,
            home,
            not self._clips and plan.updates_early(unit),
            plan.aside_bytes(unit),
            pieces,
            min(through / max(pieces, 1), line.room_bytes / AT_ONCE),
            line,
        )

    def result(self) -> Played:
        """Play."""
        for process in (self._device(), self._host(), self._updates()):
            self._lanes.begin(process)
        self._lanes.run()
        assert len(self._ends) == STEPS, "the step that is played has come to a halt"
        late = (way for index, way in self._ways.items() if index not in self._early)
        filled = sum(way.unit.param_bytes for way in late if way.home is Tier.NVME and self._is_sent(way))
        stayed = 0 if self._activations is None else self._activations.stayed_bytes
        return Played(self._ends[-1] - self._ends[-2], filled, len(self._early), stayed)

    def _is_sent(self, way: _Way) -> bool:
        """Tell whether a late update brings new parameters to the device by itself: they pass through staging."""
        return way.home is Tier.DEVICE or (way.home is Tier.NVME and self._plan.request.world_size == 1)

    def _moment(self, step: int, what: str, index: int = 0) -> Moment:
        return self._moments[step, what, index]

    def _come(self, step: int, what: str, index: int = 0) -> None:
        self._lanes.come(self._moments[step, what, index])

    def _note_change(self) -> None:
        changed, self._changed = self._changed, Moment()
        self._lanes.come(changed)

    def _note_pass(self) -> None:
        passed, self._passed = self._passed, Moment()
        self._here_until_s = self._lanes.now_s + max(self._backward.calls_s.values(), default=0.0)
        self._lanes.come(passed)

    @property
    def _host_is_here(self) -> bool:
        """Whether the host's thread passes: it gives the device the work of one unit, and then waits for a gradient."""
        return self._lanes.now_s <= self._here_until_s

    # --- compute ----------------------------------------------------------------------------------------------------

    def _device(self) -> Process:
        for step in range(STEPS):
            self._missing = len(self._ways)
            yield COMPUTE, self._before_s
            self._lanes.begin(self._bring(step, self._backward, "back"))
            if self._activations is not None:
                self._activations.turn()
            for index in self._backward.order:
                yield from self._compute(step, self._backward, "back", index)
                if index in self._ways:
                    self._lanes.begin(self._gradient(step, self._ways[index]))
            yield COMPUTE, self._there_s
            yield self._moment(step, "closed")
            for index in self._early:
                if self._ways[index].home is Tier.DEVICE:  # the device waits for all that it was given
                    yield self._moment(step, "on: here", index)
            for index in self._forward.order:
                yield from self._compute(step, self._forward, "on", index)
            self._ends.append(self._lanes.now_s)

    def _compute(self, step: int, which: Pass, name: str, index: int) -> Process:
        yield self._moment(step, f"{name}: asked", index)
        yield self._moment(step, f"{name}: here", index)
        self._come(step, f"{name}: begun", index)
        compute_s = which.compute_s.get(index, 0.0)
        if self._activations is None:
            done, way = 0.0, self._ways.get(index)
            if way is not None and which is self._backward:
                for share, part in way.leaves[:-1]:
                    yield COMPUTE, compute_s * (share - done)
                    done = share
                    self._lanes.begin(self._leave(way, part))
            yield COMPUTE, compute_s * (1.0 - done)
        elif which is self._forward:
            yield from self._activations.forward(index, compute_s)
        else:
            yield from self._activations.backward(index, compute_s)
        yield self._moment(step, f"{name}: given", index)

    def _host(self) -> Process:
        for step in range(STEPS):
            for name, which in (("back", self._backward), ("on", self._forward)):
                for index in which.order:
                    if name == "on":
                        yield self._moment(step, "closed")
                        if index in self._ways:
                            yield self._moment(step, "updated", index)
                    self._come(step, f"{name}: asked", index)
                    yield CALLS, which.calls_s.get(index, 0.0)
                    self._come(step, f"{name}: given", index)
                if name == "on":
                    continue
                yield self._moment(step, "closed")
                self._lanes.begin(self._bring(step, self._forward, "on"))

    # --- parameters -------------------------------------------------------------------------------------------------

    def _bring(self, step: int, which: Pass, name: str) -> Process:
        """Bring parameters to the device, in the order of a pass."""
        behind = self._begins(which)
        for position, index in enumerate(which.order):
            unit, way = self._units[index], self._ways.get(index) if name == "on" else None
            if behind[position] >= 0:
                yield self._moment(step, f"{name}: begun", which.order[behind[position]])
            if way is not None:
                yield self._moment(step, "updated", index)
                if way.home is Tier.DEVICE or (index not in self._early and self._is_sent(way)):
                    continue
            if index in which.fetched:
                if self._plan.home(unit, Role.PARAM) is Tier.NVME:
                    yield READ, unit.param_bytes
                self._lanes.begin(self._send(step, unit, f"{name}: here"))
            else:
                self._come(step, f"{name}: here", index)

    def _begins(self, which: Pass) -> list[int]:
        """Return per unit of a pass which one begins before it may come: two before it, or more if there is room."""
        found, first, bytes_there = list[int](), 0, 0
        for position, index in enumerate(which.order):
            bytes_there += self._units[index].param_bytes if index in which.fetched else 0
            while bytes_there > self._plan.working_bytes:
                bytes_there -= self._units[which.order[first]].param_bytes if which.order[first] in which.fetched else 0
                first += 1
            found.append(min(first, position - AHEAD))
        return found

    def _send(self, step: int, unit: Unit, then: str) -> Process:
        yield H2D, unit.param_bytes + self._hardware.copy_s * self._hardware.h2d_bytes_s
        self._come(step, then, unit.index)

    # --- gradients and updates --------------------------------------------------------------------------------------

    def _leave(self, way: _Way, part: float) -> Process:
        """Let a part of a gradient leave the device, for which the host waits."""
        copies_s = len(way.unit.slots) * self._hardware.copy_s
        yield D2H, (way.gradient.d2h + copies_s * self._hardware.d2h_bytes_s) * part
        self._note_pass()

    def _gradient(self, step: int, way: _Way) -> Process:
        """Take what is left of a gradient to the host, and offer its unit to be updated."""
        before, self._taken = self._taken, Moment()
        taken, spilled = self._taken, way.gradient.drive_write
        yield from self._leave(way, 1.0 if self._activations is not None else way.leaves[-1][1])
        yield before
        while spilled and self._spilling + spilled > self._plan.grad_pool_bytes:
            yield self._changed
        self._spilling += spilled
        yield READ, way.gradient.drive_read
        yield TAKE, way.gradient.cpu
        self._lanes.come(taken)
        self._missing -= 1
        self._come(step, "first gradient")
        if way.early and self._missing:
            yield self._passed
            self._offered.append(way)
        elif not self._missing:
            self._note_pass()
        self._note_change()
        yield WRITE, spilled
        self._spilling -= spilled
        self._note_change()

    def _updates(self) -> Process:
        """Make the updates of all steps: first those that do not wait for the step, then all others."""
        for step in range(STEPS):
            if self._ways:
                yield self._moment(step, "first gradient")
            if self._clips:
                self._lanes.begin(self._fill_staging())
            else:
                yield from self._rest()  # what the last step writes
            self._early, room = set(), self._plan.early_bytes
            self._lanes.begin(self._work_on_queue())
            while self._missing:
                if not self._offered or (not self._offered[-1].pieces and len(self._queue) >= MOST_QUEUED):
                    yield self._changed
                    continue
                way = self._offered.pop()
                if way.aside_bytes > room:
                    continue
                room -= way.aside_bytes
                self._early.add(way.unit.index)
                if way.pieces:
                    yield from self._update(step, way)
                else:
                    self._queue.append((way, Moment()))
                    self._lanes.begin(self._download(*self._queue[-1]))
            beside = self._left_beside()
            self._lanes.begin(self._make_beside(step, beside))
            while not self._clips and (self._first.in_flight or self._queue):
                yield self._changed
            self._offered.clear()
            self._come(step, "closed")
            for index in self._early:
                if self._ways[index].home is Tier.DEVICE:
                    self._lanes.begin(self._send(step, self._units[index], "on: here"))
            for index in self._forward.order:
                if index in self._early:
                    self._come(step, "updated", index)
                elif index in self._ways and index not in beside:
                    yield from self._update(step, self._ways[index])

    def _left_beside(self) -> list[int]:
        """Return units that are updated beside those that need the drive, all gradients being there."""
        while self._is_beside and len(self._queue) > 1:
            self._early.discard(self._queue.pop()[0].unit.index)
        return [index for index in self._forward.order if index in self._is_beside and index not in self._early]

    def _make_beside(self, step: int, indices: Sequence[int]) -> Process:
        """Make the updates of these units, one behind the other."""
        for index in indices:
            yield from self._update(step, self._ways[index])

    def _rest(self) -> Process:
        """Wait until nothing is in flight."""
        while self._first.in_flight or self._beside.in_flight or self._queue:
            yield self._changed

    def _download(self, way: _Way, here: Moment) -> Process:
        """Bring what an update needs to the host."""
        if way.home is Tier.DEVICE:
            yield D2H, way.unit.param_bytes
        self._lanes.come(here)
        self._note_change()

    def _work_on_queue(self) -> Process:
        """Update units in host memory during backward; what has not begun then is left to the forward."""
        while self._missing or self._queue:
            if not self._queue:
                yield self._changed
                continue
            way, here = self._queue[0]
            yield here
            if self._missing:
                yield UPDATE, way.update.cpu
            else:
                self._early.discard(way.unit.index)
            self._queue.popleft()
            self._note_change()

    def _fill_staging(self) -> Process:
        """Read states ahead, as gradients come, until the step needs the drive itself."""
        ahead, many = min(self._plan.ahead_bytes, self._readable_bytes()), max(len(self._ways), 1)
        piece, read = ahead / many / LEAST_PIECES, 0.0
        while read < ahead and self._missing:
            line = self._first
            if read + piece > ahead * (1 - self._missing / many) or line.staged + piece > line.room_bytes:
                yield self._changed
                continue
            line.staged += piece
            read += piece
            self._is_reading_ahead = True
            yield READ, piece
            self._is_reading_ahead = False
            self._read_ahead += piece
            self._note_change()

    def _readable_bytes(self) -> int:
        """Return the bytes of states that forward needs before it needs staging for what cannot be read yet."""
        total = 0
        ways = (self._ways[index] for index in self._forward.order if index in self._ways)
        for way in (way for way in ways if way.line is self._first):
            if way.pieces and (not way.update.drive_read or way.gradient.drive_write):
                break
            total += way.update.drive_read
        return total

    def _update(self, step: int, way: _Way) -> Process:
        """Begin the pieces of a unit's update, as far as there is room for them."""
        early, pieces = way.unit.index in self._early, max(way.pieces, 1)
        line = self._first if early else way.line
        for number in range(pieces):
            known = min(way.update.drive_read / pieces, self._read_ahead) if line is self._first else 0.0
            wanted = max(way.piece_bytes - known, 0.0)
            while way.pieces and line.staged + wanted > line.room_bytes:
                if not line.in_flight and not self._is_reading_ahead:
                    break  # what was read ahead has the rest of its slots
                yield self._changed
            while early and self._missing and not self._may_begin(wanted):
                yield self._changed if self._host_is_here else self._passed
            self._read_ahead -= known
            line.staged += wanted
            self._begun += wanted * early
            line.in_flight += 1
            self._lanes.begin(self._piece(step, way, line, known, early=early, last=number == pieces - 1))
        while not way.pieces and way.home is not Tier.DEVICE and (line.in_flight or self._queue):
            yield self._changed

    def _may_begin(self, size_bytes: float) -> bool:
        """Tell whether one more piece may be begun early: half of staging is for what is on its way home."""
        return self._host_is_here and self._begun + size_bytes <= self._first.room_bytes / 2

    def _piece(self, step: int, way: _Way, line: _Line, known: float, *, early: bool, last: bool) -> Process:
        """Bring a piece, all but what is `known` of it, update it, and let it leave."""
        unit, pieces, sends = way.unit, max(way.pieces, 1), not early and self._is_sent(way)
        if way.home is Tier.DEVICE:
            if way.pieces:
                calls = CHUNK_CALLS * math.ceil(unit.numel / self._plan.chunk_numel / pieces)
                yield CALLS, calls * self._hardware.operator_s
            yield D2H, unit.param_bytes / pieces
        yield READ, way.update.drive_read / pieces - known
        while early and self._missing and not self._host_is_here:
            yield self._passed
        turns = math.ceil(unit.numel / LARGE_CHUNK_NUMEL) if line is self._beside and not way.pieces else 1
        for _ in range(turns):  # others have theirs between
            yield UPDATE, way.update.cpu / pieces / turns
        while early and self._missing and not self._host_is_here:
            yield self._passed
        self._begun -= way.piece_bytes * early
        self._note_change()
        if sends:
            yield H2D, unit.param_bytes / pieces
        waits = way.home is Tier.NVME and not sends  # they are read from there
        if last and not early and not waits:
            self._come(step, "updated", unit.index)
            if sends:
                self._come(step, "on: here", unit.index)
        yield WRITE, way.update.drive_write / pieces
        if last and not early and waits:
            self._come(step, "updated", unit.index)
        line.in_flight -= 1
        line.staged = max(line.staged - max(way.piece_bytes, known), 0.0)
        self._note_change()
