"""How short can a step be whose states are in host memory? A bound for every order of work that is exact.

A unit's update needs its last gradient, and the next forward needs the update. So a step goes round: backward, the
updates, the next forward. The cut is where no update can be under way: behind the forward's first use of the last unit,
and before the first gradient. From there on, the CPU is one machine with jobs:

* a job may begin when the device has made its gradient, if it computes without a pause (``ready``);
* it takes what the CPU's kernels read and write, at the rate of the machine. Each byte that has to be copied meanwhile,
  the gradient down and the parameter up, takes host memory's bandwidth;
* once it is done, the device has to compute from the unit's first use on (``needed``).

The rule that makes the last end come first is known: whoever has the most computing behind it comes first, and others
give way at any moment (Jackson's preemptive schedule). Copies may be made in pieces as small as one likes, and never
wait for each other. So no order of work is faster, and one that is as fast may not exist.

Source: J. Carlier, The one-machine sequencing problem, European Journal of Operational Research 11 (1982).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

from offload.planning.hardware import Hardware

if TYPE_CHECKING:
    from simulated.figures import Turn

UPDATE_BYTES = (
    30  # of a bf16 parameter: its gradient is taken (2 + 2) and read; it and 10 bytes of states are rewritten
)
COPIED_BYTES = 2  # of it, in each direction


@dataclasses.dataclass(frozen=True)
class Job:
    """One gradient's update: seconds of the CPU, and when it may begin; what is left to compute once it is done."""

    unit: int
    ready_s: float
    work_s: float
    left_s: float


@dataclasses.dataclass(frozen=True)
class Way:
    """A unit's way round in the schedule that the bound is made of: seconds since the cut, if the device never waits.

    Attributes:
        unit: which.
        ready_s: the device has made the gradient.
        host_s: it is in host memory.
        updated_s: the CPU has updated the unit.
        device_s: its parameters are on the device.
        needed_s: the forward uses it, if nothing waits.
    """

    unit: int
    ready_s: float
    host_s: float
    updated_s: float
    device_s: float
    needed_s: float


@dataclasses.dataclass(frozen=True)
class Bound:
    """The shortest step, and each unit's way in it."""

    step_s: float
    ways: tuple[Way, ...]


def lost_per_copied_byte(hardware: Hardware) -> float:
    """Return how many bytes the CPU's kernels lose at least per byte that is copied beside them."""

    def lost(copied: float) -> float:
        return (hardware.update_bytes_s - hardware.updates_beside(copied)) / copied

    up, down = hardware.h2d_bytes_s, hardware.d2h_bytes_s
    return min(lost(up), lost(down), lost(up + down))


def ends(jobs: Sequence[Job]) -> list[float]:
    """Return when each job ends if the one with the most left behind it goes first, and others give way to it."""
    todo = sorted(range(len(jobs)), key=lambda number: jobs[number].ready_s, reverse=True)
    work, ended = [job.work_s for job in jobs], [0.0] * len(jobs)
    here: list[tuple[float, int]] = []
    time = 0.0
    while todo or here:
        if not here:
            time = max(time, jobs[todo[-1]].ready_s)
        while todo and jobs[todo[-1]].ready_s <= time:
            number = todo.pop()
            heapq.heappush(here, (-jobs[number].left_s, number))
        number = here[0][1]
        until = min(time + work[number], jobs[todo[-1]].ready_s) if todo else time + work[number]
        if until >= time + work[number]:
            heapq.heappop(here)
            ended[number] = until
        work[number] -= until - time
        time = until
    return ended


def shortest(turns: Iterable[Turn], computing_s: float, hardware: Hardware) -> Bound:
    """Return the bound of a step.

    Args:
        turns: of its gradients.
        computing_s: of the device, in a step.
        hardware: the machine.
    """
    turns = sorted(turns, key=lambda turn: turn.ready_s)
    cut = max(turn.needed_s for turn in turns)
    per_element = UPDATE_BYTES + 2 * COPIED_BYTES * lost_per_copied_byte(hardware)
    jobs = [
        Job(turn.unit, turn.ready_s - cut, turn.numel * per_element / hardware.update_bytes_s, cut - turn.needed_s)
        for turn in turns
    ]
    assert all(job.ready_s >= 0 for job in jobs), "a gradient is made before a unit is used first"
    free, step_s, ways = 0.0, computing_s, dict[int, Way]()
    for turn, job, ended in zip(turns, jobs, ends(jobs), strict=True):
        free = max(free, job.ready_s) + turn.numel * COPIED_BYTES / hardware.d2h_bytes_s
        updated = max(ended, free)
        step_s = max(step_s, updated + job.left_s)
        before = ways.get(turn.unit)
        ways[turn.unit] = Way(
            turn.unit,
            job.ready_s,
            free,
            max(updated, before.updated_s if before else 0.0),
            0.0,
            computing_s - job.left_s,
        )
    return Bound(step_s, tuple(_uploaded(ways.values(), turns, hardware)))


def _uploaded(ways: Iterable[Way], turns: Sequence[Turn], hardware: Hardware) -> list[Way]:
    """Return the ways with the moments when parameters are on the device: one copy after the other."""
    free, found = 0.0, list[Way]()
    for way in sorted(ways, key=lambda way: way.updated_s):
        size = COPIED_BYTES * sum(turn.numel for turn in turns if turn.unit == way.unit)
        free = max(free + size / hardware.h2d_bytes_s, way.updated_s)  # but for the last piece, it goes beside
        found.append(dataclasses.replace(way, device_s=free))
    return sorted(found, key=lambda way: way.unit)
