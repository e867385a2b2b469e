"""What was seen of an engine by the clock: seconds of its steps, what its lanes did, and who kept whom."""

from __future__ import annotations

import bisect
import dataclasses
import itertools
from collections.abc import Callable, Mapping

import simulated
from offload.planning.hardware import Hardware
from simulated.clock import Drive, Operation, operations
from simulated.engine import Use, Watch
from simulated.ranks import LANES


@dataclasses.dataclass(frozen=True)
class Turn:
    """A gradient's way round, by the device's own time: seconds of computing since the first operation of a step.

    Attributes:
        unit: of the parameter.
        numel: elements.
        ready_s: when the last backward pass of a step has made it.
        needed_s: when the unit is used first in a step.
    """

    unit: int
    numel: int
    ready_s: float
    needed_s: float


@dataclasses.dataclass(frozen=True)
class Figures:
    """What a step took, on average over the steps that were watched.

    Attributes:
        step_s: from the device's last operation of a step to that of the next.
        busy_s: per lane; of the drive, reads and writes apart.
        work_s: per lane what its work would take alone: of the drive, reads and writes as well as they go together; of
            the wire to other ranks, all that it carries.
        moved_bytes: per lane.
        idle_s: per lane of a stream, what it waited for.
        waits_s: per actor, what it waited for.
        ahead: of each use of a unit, how many uses the host was ahead of the device; the least is what counts.
        peak_bytes: of device memory.
        turns: of the gradients of a step.
        hidden_s: per lane, the part of `busy_s` in which the device computed.
        beside_s: the same in which the device computed, or the CPU worked.
    """

    step_s: float
    busy_s: Mapping[str, float]
    work_s: Mapping[str, float]
    moved_bytes: Mapping[str, float]
    idle_s: Mapping[str, Mapping[str, float]]
    waits_s: Mapping[str, float]
    ahead: tuple[int, ...]
    peak_bytes: int
    turns: tuple[Turn, ...] = ()
    hidden_s: Mapping[str, float] = dataclasses.field(default_factory=dict)
    beside_s: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def used(self) -> float:
        """Share of the time in which the device computes: U."""
        return self.busy_s.get("compute", 0.0) / self.step_s

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.work_s, key=lambda lane: self.work_s[lane])

    @property
    def bound_s(self) -> float:
        """What the lane with the most work needs: no step is shorter."""
        return self.work_s[self.binding]

    @property
    def reached(self) -> float:
        """The bound over the time: R."""
        return self.bound_s / self.step_s


def watched(watch: Watch, hardware: Hardware, step: Callable[[], object], *, warm: int = 2, steps: int = 2) -> Figures:
    """Take steps and return what they took; the first ones tell an engine what comes."""
    core = simulated.load()
    for _ in range(warm):
        step()
    begin = _end_of_compute(operations())
    watch.begin_window()
    core.reset_peak(0)
    for _ in range(steps):
        step()
    done = operations()
    time = (_end_of_compute(done) - begin) / steps
    return Figures(
        step_s=time,
        busy_s={lane: seconds / steps for lane, seconds in _busy(done).items()},
        work_s={lane: seconds / steps for lane, seconds in _work(done, hardware).items()},
        moved_bytes={lane: size / steps for lane, size in _moved(done).items()},
        idle_s={lane: {k: s / steps for k, s in sorted(why.items())} for lane, why in sorted(core.idle(True).items())},
        waits_s={who: seconds / steps for who, seconds in sorted(core.waits(True).items())},
        ahead=_ahead(watch.uses),
        peak_bytes=core.usage(0)[1],
        turns=_turns(watch, done, steps),
        hidden_s={lane: seconds / steps for lane, seconds in _beside(done, "compute").items()},
        beside_s={lane: seconds / steps for lane, seconds in _beside(done, "compute", "cpu").items()},
    )


def _end_of_compute(done: list[Operation]) -> float:
    """Return when the device last had work: it is told why it was idle once it has some again."""
    return max(operation.end for operation in done if operation.lane == "compute")


def _busy(done: list[Operation]) -> dict[str, float]:
    busy: dict[str, float] = {}
    for operation in done:
        busy[operation.lane] = busy.get(operation.lane, 0.0) + operation.end - operation.begin
    return busy


def _beside(done: list[Operation], *lanes: str) -> dict[str, float]:
    """Return per lane the seconds in which one of `lanes` was busy, too."""
    worked, beside = _worked(done, *lanes), dict[str, float]()
    for operation in done:
        seconds = worked(operation.end) - worked(operation.begin)
        beside[operation.lane] = beside.get(operation.lane, 0.0) + seconds
    return beside


def _worked(done: list[Operation], *lanes: str) -> Callable[[float], float]:
    """Return what returns the seconds until a time in which one of `lanes` was busy."""
    busy = list[tuple[float, float]]()
    for begin, end in sorted((each.begin, each.end) for each in done if each.lane in lanes):
        begin = max(begin, busy[-1][1] if busy else begin)
        if begin < end:
            busy.append((begin, end))
    begins = [begin for begin, _ in busy]
    sums = list(itertools.accumulate((end - begin for begin, end in busy), initial=0.0))

    def worked(time: float) -> float:
        number = bisect.bisect_left(begins, time)
        return sums[number] - (max(busy[number - 1][1] - time, 0.0) if number else 0.0)

    return worked


def _moved(done: list[Operation]) -> dict[str, float]:
    moved: dict[str, float] = {}
    for operation in done:
        moved[operation.lane] = moved.get(operation.lane, 0.0) + operation.size_bytes
    return moved


def _work(done: list[Operation], hardware: Hardware) -> dict[str, float]:
    moved, work = _moved(done), _busy(done)
    read, written = (moved.get(f"drive {side}", 0.0) for side in Drive.SIDES)
    for side in Drive.SIDES:
        work.pop(f"drive {side}", None)
    if read + written:
        alone = max(read / hardware.drive_read_bytes_s, written / hardware.drive_write_bytes_s)
        work["drive"] = max(alone, (read + written) / hardware.drive_mixed_bytes_s)
    sent = [work.pop(lane) for lane in LANES if lane in work]
    if sent:
        work["wire"] = sum(sent)
    if "cpu" in work:
        work["cpu"] = moved["cpu"] / hardware.update_bytes_s
    return work


def _turns(watch: Watch, done: list[Operation], steps: int) -> tuple[Turn, ...]:
    """Return those of the last step."""
    computed_by = _worked(done, "compute")
    before_s = computed_by(float("inf")) * (steps - 1) / steps

    def computed(time: float) -> float:
        """Return the seconds of computing until then, in the last step."""
        return computed_by(time) - before_s

    uses = watch.uses[len(watch.uses) - len(watch.uses) // steps :]
    made = watch.made[len(watch.made) - len(watch.made) // steps :]
    needed: dict[int, float] = {}
    for use in uses:
        needed.setdefault(use.unit, computed(use.begins))
    last = {(each.unit, each.slot): each for each in made}
    return tuple(
        Turn(each.unit, each.numel, computed(each.ready), needed[each.unit])
        for each in last.values()
        if each.unit in needed
    )


def _ahead(uses: list[Use]) -> tuple[int, ...]:
    """Return per use how many uses, itself among them, were given to the device that it had not begun."""
    return tuple(
        sum(1 for earlier in uses[: number + 1] if earlier.begins > use.asked) for number, use in enumerate(uses)
    )
