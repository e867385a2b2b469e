"""A step where the CPU computes and updates, played over units: from the last backward to the end of the next forward.

Owns the order in which the drive serves updates, and what waits for it:

* A unit's share of compute is that of its parameters. If a pass uses it more than once, each use has as much.
* The thread that computes passes by the drive when a module that is computed again has ended, and when a gradient has
  come. If the drive is over with what it was asked for, the thread works on what was read, has it written, and asks for
  more: for half of the slots of staging.
* A unit with room beside its old content is updated during backward: the one whose gradient came last comes first.
  Nothing begins once all gradients have come.
* A gradient at home on NVMe waits for the sum so far, if the pool of gradients has it no more. The new sum is written.
* When backward has ended, what has begun is finished. All other units follow in the order of the forward, which waits
  for each. What the drive was asked for together is over at about the same time, so it waits there, too, until the
  first of these pieces is worked on and more is asked for. Beside an update, parameters that the forward needs later
  come as fast.

Pure arithmetic over plain values. Next: :mod:`offload.planning.timing`. Beside an accelerator, it is
:mod:`offload.planning.played` that tells this.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Collection, Container, Mapping, Sequence

from offload.planning.hardware import Hardware
from offload.planning.moved import Moved, Sums, fetch_of, gradient_of, lane_seconds, trained_of, update_of
from offload.planning.plan import STAGING_SLOTS, Plan
from offload.planning.roles import Role
from offload.planning.units import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class InTurn:
    """Updates during a backward.

    Attributes:
        early: units that are updated.
        end_s: seconds until backward has ended, and what has begun is finished.
    """

    early: frozenset[int]
    end_s: float


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """A unit's update: pieces that pass through staging, and what each takes of the CPU and the drive."""

    index: int
    pieces: int
    piece_s: float
    read_bytes: float
    write_bytes: float


class _Backward:
    """The thread that computes, and the drive beside it.

    Attributes:
        at_s: the time.
        begun: units whose updates were.
    """

    def __init__(self, plan: Plan, hardware: Hardware) -> None:
        self.at_s = 0.0
        self.begun: set[int] = set()
        self._hardware = hardware
        self._many = at_once(plan)
        self._free_s = 0.0  # when the drive is over with what it was asked for
        self._waiting: list[_Load] = []
        self._coming: list[_Load] = []  # one for each piece that is read
        self._open: _Load | None = None
        self._left = 0  # pieces of it that nobody has asked for

    def ask(self, moved: Moved) -> None:
        """Have the drive move bytes, behind what it was asked for."""
        self._free_s = max(self._free_s, self.at_s) + lane_seconds(moved, self._hardware)["drive"]

    def add(self, gradient: Moved) -> None:
        """Wait for the sum that a gradient at home on NVMe is added to, and have the new one written."""
        if gradient.drive_read:
            self.ask(Moved(drive_read=gradient.drive_read))
            self.at_s = self._free_s
        if gradient.drive_write:
            self.ask(Moved(drive_write=gradient.drive_write))

    def offer(self, load: _Load) -> None:
        """Have the gradient of a unit."""
        self._waiting.append(load)

    def pass_by(self, *, begins: bool = True) -> None:
        """Work on what was read, and ask for more."""
        if self.at_s < self._free_s:
            return
        here, self._coming = self._coming, []
        while len(self._coming) < self._many and self._may_ask(begins=begins):
            assert self._open is not None
            self._coming.append(self._open)
            self._left -= 1
        moved = Moved(
            drive_read=round(sum(load.read_bytes for load in self._coming)),
            drive_write=round(sum(load.write_bytes for load in here)),
        )
        begin_s = self.at_s + (here[0].piece_s if here else 0.0)  # more is asked for once a piece is worked on
        self._free_s = begin_s + lane_seconds(moved, self._hardware)["drive"]
        self.at_s += sum(load.piece_s for load in here)

    def close(self) -> None:
        """Finish what was begun."""
        while self._coming or self._left:
            self.at_s = max(self.at_s, self._free_s)
            self.pass_by(begins=False)
        self.at_s = max(self.at_s, self._free_s)

    def _may_ask(self, *, begins: bool) -> bool:
        """Tell whether there is a piece to ask for; begin a unit for it if need be."""
        if not self._left and begins and self._waiting:
            self._open = self._waiting.pop()
            self._left = self._open.pieces
            self.begun.add(self._open.index)
        return self._left > 0


def at_once(plan: Plan) -> int:
    """Return how many pieces are read together, while as many are written: half of the slots, as in the engine."""
    return max(plan.staging_slots, STAGING_SLOTS) // 2


def beside_backward(
    plan: Plan,
    hardware: Hardware,
    forward: Sequence[int],
    calls: Mapping[int, int],
    fetches: Collection[Unit],
    backward_s: float,
    *,
    clips: bool,
    sums: Sums,
) -> InTurn:
    """Tell which units are updated before backward has ended, and when that is.

    Args:
        plan: homes, staging and room beside old content.
        hardware: the machine.
        forward: units in the order of their uses; gradients come in the other direction.
        calls: of modules that are computed again, by unit.
        fetches: units whose parameters come for it.
        backward_s: that it takes without gradients and updates.
        clips: every step does, and nothing is updated before.
        sums: of gradients.
    """
    trained = {unit.index: unit for unit in trained_of(plan)}
    coming = {unit.index: unit for unit in fetches}
    played, room, complete = _Backward(plan, hardware), plan.early_bytes, 0
    for index, share, left in reversed(_visits(plan, forward)):
        if index in coming:
            played.ask(fetch_of(plan, [coming.pop(index)]))
        unit = None if left else trained.get(index)
        passes = calls.get(index, 0) // (left + 1) + (len(unit.slots) if unit is not None else 0)
        compute_s, gradient = backward_s * share, Moved()
        if unit is not None:  # its gradient comes
            gradient = gradient_of(plan, unit, first=not sums.adds, added=sums.added)
            compute_s += lane_seconds(gradient, hardware)["cpu"]
        for number in range(max(passes, 1)):
            played.at_s += compute_s / max(passes, 1)
            if unit is not None and number + 1 == passes:
                played.add(gradient)
                complete += 1
                if not clips and plan.updates_early(unit) and plan.aside_bytes(unit) <= room:
                    room -= plan.aside_bytes(unit)
                    played.offer(_load(plan, hardware, unit))
            if passes:
                played.pass_by(begins=complete < len(trained))
    played.close()
    return InTurn(frozenset(played.begun), played.at_s)


def in_turn_s(
    plan: Plan,
    hardware: Hardware,
    forward: Sequence[int],
    fetches: Collection[Unit],
    backward: InTurn,
    forward_s: float,
    ahead_s: float,
    updated: Container[int] = (),
) -> float:
    """Return the seconds from the last backward to the end of the next forward.

    Args:
        plan: homes.
        hardware: the machine.
        forward: units in the order of their uses.
        fetches: units whose parameters come for it.
        backward: what was told of it.
        forward_s: that the forward takes without updates.
        ahead_s: of the drive's work for its updates, done before.
        updated: units whose gradients the drive brings for that.
    """
    late = {unit.index: unit for unit in trained_of(plan) if unit.index not in backward.early}
    coming = {unit.index: unit for unit in fetches}
    clock_s = free_s = backward.end_s
    for index, share, _ in _visits(plan, forward):
        moved, pause_s = Moved(), 0.0
        if index in late:
            unit = late.pop(index)
            moved, load = update_of(plan, unit, updated), _load(plan, hardware, unit)
            pause_s = load.piece_s * load.pieces / at_once(plan) if load.read_bytes + load.write_bytes else 0.0
        beside_bytes = moved.drive_read + moved.drive_write
        if index in coming:
            moved += fetch_of(plan, [coming.pop(index)])
        while coming and beside_bytes > 0:  # as much of them is on its way as there is in staging
            fetched = fetch_of(plan, [coming.pop(next(iter(coming)))])
            moved += fetched
            beside_bytes -= fetched.drive_read
        lanes = lane_seconds(moved, hardware)
        serve_s = max(lanes["drive"] - ahead_s, 0.0)
        ahead_s -= lanes["drive"] - serve_s
        serve_s += pause_s if serve_s else 0.0
        free_s += serve_s
        if serve_s:
            clock_s = max(clock_s, free_s)
        clock_s += lanes["cpu"] + forward_s * share
    return clock_s


def _visits(plan: Plan, forward: Sequence[int]) -> list[tuple[int, float, int]]:
    """Return what a forward uses: the unit, this use's share of compute, and how often the unit was used before.

    Units that nobody has seen in use come first.
    """
    units = plan.request.units
    total = sum(unit.numel for unit in units) or 1
    seen = [index for index, _ in itertools.groupby(forward)]
    order = [*(unit.index for unit in units if unit.index not in seen), *seen]
    many, before = collections.Counter(order), collections.Counter[int]()
    visits = []
    for index in order:
        visits.append((index, units[index].numel / total / many[index], before[index]))
        before[index] += 1
    return visits


def _load(plan: Plan, hardware: Hardware, unit: Unit) -> _Load:
    update, pieces = update_of(plan, unit), max(len(plan.chunks(unit, Role.GRAD)), 1)
    cpu_s = lane_seconds(update, hardware)["cpu"]
    return _Load(unit.index, pieces, cpu_s / pieces, update.drive_read / pieces, update.drive_write / pieces)
