"""How long the drive makes a step, where neither machine nor batch is known: what plans are compared by.

Owns that model. Its unit of time is what the drive takes for a byte, one byte after the other. Compute takes a given
number of these units, shared by parameters; a forward is a quarter of it, for backward computes activations again.

======================= ==============================================================================================
in a step, the drive    and
======================= ==============================================================================================
earlier micro-batches   reads parameters twice, writes gradients, and from the second on reads them, beside compute
backward, unit by unit  the same, and updates beside: as a gradient comes, the latest first, half of the slots per unit
its end                 ends the update that is under way, while nothing is computed
next forward            makes a unit's update before the unit; while units are computed, as much ahead as slots hold;
                        while the CPU updates a unit that needs no drive, whatever comes next
======================= ==============================================================================================

Half of the slots, as the others are being written, and who starts transfers comes by once per unit. An update begins
two units behind the gradient: who starts it has given the device work so far ahead. If steps clip, no update goes
beside backward, but what slots hold of states is read there, and as much is written. A unit that has just been updated
is on the device: its parameters are not read again.

``bench/homes.py`` compares seconds of plans by the simulated clock; the model is within a few percent of them. The
forecast plays a step in more detail (:mod:`offload.planning.played`), and needs a machine and a batch for that.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import sys
from collections.abc import Collection

from offload.memory.budget import Tier
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit

FORWARD_SHARE = 1 / 4  # of compute
CPU_BYTES = 26  # per parameter, that the CPU reads and writes for an update
CPU_SPEED = 25  # bytes of it while the drive moves one: more than on most machines, so that little is hoped for
BEHIND = 2  # units that backward is ahead of updates beside it


@dataclasses.dataclass(frozen=True, slots=True)
class _Load:
    """What a unit asks of the drive, in bytes, and its share of compute.

    Attributes:
        copy: of its parameters, in the working region.
        param: read by each pass.
        grad: written by the first backward of a step, and read and written by each further one.
        update: read and written by its update.
        chunk: of them, those of one slot.
        early: its update asks for the drive, and may be made during backward.
        states: of `update`, read, and as much written.
        in_memory: its gradient is.
        beside: what the CPU takes for its update, while the drive goes on with those of others.
    """

    share: float
    copy: int
    param: int
    grad: int
    update: int
    chunk: int
    early: bool
    states: int
    in_memory: bool
    beside: float


class DriveTime:
    """A plan's step by the model. See the module's text."""

    def __init__(self, plan: Plan) -> None:
        units = plan.request.units
        total = sum(unit.numel for unit in units)
        beside = plan.beside_drive()
        self._loads = [_load(plan, unit, total, beside) for unit in units]
        self._copies = [0, *itertools.accumulate(load.copy for load in self._loads)]  # of all units before each
        self._working = plan.working_bytes
        self._slots = plan.staging_slots
        self._clips = plan.request.clips
        early = any(plan.updates_early(unit) for unit in units) and not self._clips
        self._slots_behind = plan.most_slots if early else plan.staging_slots  # in memory of gradients, too
        self._ahead_bytes = plan.ahead_bytes if self._clips else 0

    def work(self, micro_batches: int) -> int:
        """Return the bytes that the drive moves in a step."""
        passes, again = 2 * micro_batches, 2 * micro_batches - 1
        return sum(load.param * passes + load.grad * again + load.update for load in self._loads)

    def step(self, compute: float, micro_batches: int) -> float:
        """Return the length of a step.

        Args:
            compute: its length, all micro-batches together.
            micro_batches: of a step.
        """
        once = compute / micro_batches
        earlier = 0.0
        for number in range(micro_batches - 1):
            moved = sum(2 * load.param + load.grad * (1 if number == 0 else 2) for load in self._loads)
            earlier += max(once, moved)
        backward, left = self._backward(once * (1 - FORWARD_SHARE), 1 if micro_batches == 1 else 2)
        return earlier + backward + self._forward(once * FORWARD_SHARE, left)

    def _backward(self, compute: float, transfers: int) -> tuple[float, list[float]]:
        """Return the length of the last backward, and what is left of each unit's update."""
        loads, left = self._loads, [float(load.update) for load in self._loads]
        length = idle = 0.0
        waiting: list[int] = []
        for index in reversed(range(len(loads))):
            asked = loads[index].param + loads[index].grad * transfers
            took = max(compute * loads[index].share, asked)
            length += took
            room = took - asked
            idle += room
            if waiting:
                room = min(room, self._slots / 2 * loads[waiting[-1]].chunk)
            while waiting and room > 0:
                moved = min(left[waiting[-1]], room)
                left[waiting[-1]] -= moved
                room -= moved
                if left[waiting[-1]] == 0:
                    waiting.pop()
            if index + BEHIND < len(loads) and loads[index + BEHIND].early:
                waiting.append(index + BEHIND)
        if waiting and left[waiting[-1]] < loads[waiting[-1]].update:
            length += left[waiting[-1]]
            left[waiting[-1]] = 0.0
        if self._clips:
            self._go_ahead(left, idle / 2)
        return length, left

    def _go_ahead(self, left: list[float], size: float) -> None:
        """Take from `left` what a backward without updates does of them, in as many bytes each way.

        It reads states of the units that are updated first. If another comes before them, their slots wait for that. It
        writes what the last ones have made.
        """
        late = [index for index, load in enumerate(self._loads) if load.update]
        room = min(self._ahead_bytes, size)
        for index in late:
            if not self._loads[index].in_memory:
                break
            moved = min(self._loads[index].states, room)
            left[index] -= moved
            room -= moved
        room = min(self._slots * max((load.chunk for load in self._loads), default=0) / 2, size)
        for index in reversed(late):
            moved = min(self._loads[index].states, room)
            left[index] -= moved
            room -= moved

    def _ahead(self, left: list[float], first: int, end: int, room: float, slots: float) -> int:
        """Take from `left` what the drive does of units [first, end) in `room`; returns the first that is not done.

        At most as much is ahead as fits `slots`.
        """
        held = 0.0
        while first < end and room > 0:
            moved = min(left[first], room, max(slots * self._loads[first].chunk - held, 0.0))
            left[first] -= moved
            room -= moved
            held += moved
            if left[first] > 0:
                break
            first += 1
        return first

    def _forward(self, compute: float, left: list[float]) -> float:
        """Return the length of the forward with what is `left` of updates."""
        length, ahead = 0.0, 0
        late = [rest > 0 for rest in left]
        for index, load in enumerate(self._loads):
            length += left[index] + (0 if late[index] else load.param) + compute * load.share
            left[index] = 0.0
            ahead = max(ahead, index + 1)
            reach = bisect.bisect_right(self._copies, self._copies[index] + self._working) - 1
            ahead = self._ahead(left, ahead, len(left), load.beside, sys.maxsize)
            ahead = self._ahead(left, ahead, min(reach, len(left)), compute * load.share, self._slots_behind)
        return length


def _load(plan: Plan, unit: Unit, total_numel: int, beside: Collection[int]) -> _Load:
    request, homes = plan.request, plan.homes[unit.index]
    param = unit.param_bytes if homes.param is Tier.NVME else 0
    grad = request.role_bytes(unit, Role.GRAD) if homes.grad is Tier.NVME else 0
    states = request.record_bytes(unit, STATE_ROLES, plan.chunk_numel) if homes.states is Tier.NVME else 0
    update = 2 * states + 2 * param * unit.trainable + grad
    return _Load(
        share=unit.numel / total_numel,
        copy=0 if homes.param is Tier.DEVICE else unit.param_bytes,
        param=param,
        grad=grad,
        update=update,
        chunk=update * plan.chunk_numel // max(unit.numel, plan.chunk_numel),
        early=update > 0 and not request.clips and plan.updates_early(unit),
        states=states,
        in_memory=homes.grad is Tier.HOST,
        beside=unit.numel * CPU_BYTES / CPU_SPEED if unit.index in beside else 0.0,
    )
