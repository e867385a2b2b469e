"""Where the time of the last steps went: per lane, and what computing has waited for.

Owns the sums over spans, and how they are shown on one screen. Next: :mod:`offload.snapshot` collects the spans.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from offload.sizes import short_bytes
from offload.spans import (
    COLLECTIVES,
    COMPUTE,
    CPU_ADAM,
    D2H,
    H2D,
    LANES,
    NVME_READ,
    NVME_WRITE,
    STEP,
    UPDATES,
    WAIT,
    Recorded,
    Span,
    covered_s,
)
from offload.stats import Stats

_SHORT_S = 0.01
_STOOD = "stood"  # waits that are known to be the device's
_HOST_WAITS = ("ranks", "commit")  # beside which an accelerator goes on with what it was given
STEPS = 8  # that are looked at
LINKS = tuple(lane for lane in LANES if lane not in (STEP, WAIT))
# What a plan predicts -> the lanes that are measured for it. On a CPU, computing and updates are one.
_PREDICTED = {
    "step": (STEP,),
    "compute": (COMPUTE,),
    "h2d": (H2D,),
    "d2h": (D2H,),
    "cpu": (CPU_ADAM,),
    "drive": (NVME_READ, NVME_WRITE),
}


@dataclasses.dataclass(frozen=True, slots=True)
class LaneReport:
    """What a lane did in the time of a report: the seconds in which it was busy, and the bytes that it moved."""

    seconds: float
    size_bytes: int

    @property
    def bandwidth_gb_s(self) -> float:
        """Bytes over busy seconds, in 1e9 bytes per second (0 where nothing was moved)."""
        return self.size_bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Report:
    """Where the time of the last steps went; ``print`` it.

    Attributes:
        step_seconds: of each step, from the end of the one before, the oldest first; empty where none is recorded as a
            whole, nor counted: steps with more spans than are kept are counted from the second one on.
        seconds: of all of them; where there is none, of all the time of which everything is recorded.
        lanes: per link, in that time.
        waits: seconds that computing has waited, per what it waited for.
        waited_seconds: of all waits; some lie within others.
        stats: bytes of the tiers.
        activations: what ``activations="auto"`` has chosen, in words; empty where nothing was chosen.
        compared: seconds of a step as predicted and as measured, of ``step`` and per lane, where there is a prediction
            and a step.
        predicted: there is a prediction.
    """

    step_seconds: tuple[float, ...]
    seconds: float
    lanes: Mapping[str, LaneReport]
    waits: Mapping[str, float]
    waited_seconds: float
    stats: Stats
    activations: str = ""
    compared: Mapping[str, tuple[float, float]] = dataclasses.field(default_factory=dict)
    predicted: bool = False

    @property
    def binding_lane(self) -> str | None:
        """The lane that was busy longest; None where none was."""
        name = max(LINKS, key=lambda lane: self.lanes[lane].seconds)
        return name if self.lanes[name].seconds > 0 else None

    def __str__(self) -> str:
        lanes, waits = self._lane_lines(), self._wait_lines()
        chosen = [f"activations: auto: {self.activations}"] if self.activations else []
        return "\n".join([self._headline(), *lanes, *self._prediction_lines(), *waits, *chosen, *self._tier_lines()])

    def _headline(self) -> str:
        if not self.step_seconds:
            return f"no whole step is recorded: the last {_text(self.seconds)}"
        count, per = len(self.step_seconds), self.seconds / len(self.step_seconds)
        spread = f" ({_text(min(self.step_seconds))} to {_text(max(self.step_seconds))})" if count > 1 else ""
        return f"the last {count} steps: {_text(per)} each{spread}" if count > 1 else f"the last step: {_text(per)}"

    def _lane_lines(self) -> list[str]:
        lines = [f"  {'lane':<11}{'busy':>10}{'of time':>9}{'bytes':>11}{'GB/s':>8}"]
        for name in LINKS:
            lane = self.lanes[name]
            if name in (COLLECTIVES, UPDATES) and not lane.seconds:  # one rank; nothing is updated by this thread
                continue
            moved = f"{short_bytes(lane.size_bytes / self._count):>11}{lane.bandwidth_gb_s:>8.2f}"
            share, busy = f"{self._share(lane.seconds):.0f} %", _text(lane.seconds / self._count)
            lines.append(f"  {name:<11}{busy:>10}{share:>9}{moved if lane.size_bytes else ''}")
        binding = self.binding_lane
        if binding is None:
            return [*lines, "  nothing was busy"]
        return [*lines, f"  {binding} binds: busy in {self._share(self.lanes[binding].seconds):.0f} % of the time"]

    def _prediction_lines(self) -> list[str]:
        if not self.compared:
            return ["  nothing is compared: no whole step is known"] if self.predicted else []
        lines = [f"  {'seconds':<11}{'predicted':>11}{'measured':>11}"]
        lines += [
            f"  {name:<11}{_text(first):>11}{_text(second):>11}" for name, (first, second) in self.compared.items()
        ]
        return lines

    def _wait_lines(self) -> list[str]:
        if not self.waits:
            return ["computing waited for nothing"]
        parts = [
            f"{what} {_text(seconds / self._count)}"
            for what, seconds in sorted(self.waits.items(), key=lambda wait: -wait[1])
        ]
        waited = f"{_text(self.waited_seconds / self._count)}, {self._share(self.waited_seconds):.0f} %"
        return [f"computing waited {waited}: {', '.join(parts)}"]

    def _tier_lines(self) -> list[str]:
        lines = [f"  {'tier':<11}{'used':>11}{'peak':>11}{'budget':>11}"]
        stats = self.stats
        for tier, budget in stats.budget_bytes.items():
            sizes = (stats.used_bytes.get(tier, 0), stats.peak_bytes.get(tier, 0), budget)
            lines.append(f"  {tier:<11}" + "".join(f"{short_bytes(size):>11}" for size in sizes))
        return lines

    @property
    def _count(self) -> int:
        return max(len(self.step_seconds), 1)

    def _share(self, seconds: float) -> float:
        return 100 * seconds / self.seconds if self.seconds > 0 else 0.0


def _text(seconds: float) -> str:
    """Return seconds with three decimals, or milliseconds where these would say little."""
    return f"{seconds * 1e3:.3f} ms" if 0 < seconds < _SHORT_S else f"{seconds:.3f} s"


def make_report(
    recorded: Recorded, stats: Stats, *, host_computes: bool, predicted: Mapping[str, float] | None = None
) -> Report:
    """Return where the time of the last steps went, of those that were recorded as a whole.

    Args:
        recorded: spans of all lanes.
        stats: bytes of the tiers.
        host_computes: the device is the CPU: what its thread updates in between is not computing. Beginning and
            following updates is a lane of its own, beside what they wait for and the kernels.
        predicted: seconds of ``step``, and of the lanes ``compute``, ``h2d``, ``d2h``, ``cpu`` and ``drive``, if known.
    """
    steps = whole_steps(recorded, STEPS)
    begin, end = window(steps, recorded)
    inside = [span for span in recorded.spans if span.begin < end and span.end > begin]
    per_lane: dict[str, list[Span]] = {lane: [] for lane in LANES}
    for span in inside:
        per_lane[span.lane].append(span)

    def seconds(*lanes: str) -> float:
        spans = (span for lane in lanes for span in per_lane[lane])
        return covered_s((max(span.begin, begin), min(span.end, end)) for span in spans)

    lanes = {
        lane: LaneReport(seconds(lane), sum(_bytes_inside(span, begin, end) for span in per_lane[lane]))
        for lane in LINKS
    }
    if host_computes:  # in one thread
        lanes[UPDATES] = LaneReport(seconds(UPDATES, WAIT, CPU_ADAM) - seconds(WAIT, CPU_ADAM), 0)
        beside: tuple[str, ...] = (UPDATES, WAIT, CPU_ADAM)
    else:
        per_lane[_STOOD] = [span for span in per_lane[WAIT] if span.name not in _HOST_WAITS]
        beside = (_STOOD,)
    lanes[COMPUTE] = LaneReport(seconds(COMPUTE, *beside) - seconds(*beside), 0)
    together = {name: seconds(*of) for name, of in _PREDICTED.items()}
    computing = (COMPUTE, UPDATES, CPU_ADAM) if host_computes else (COMPUTE,)
    together["compute"] = sum(lanes[lane].seconds for lane in computing)
    together |= {"step": end - begin} | ({"cpu": 0.0} if host_computes else {})
    compared = {
        name: (predicted.get(name, 0.0), took / len(steps)) for name, took in together.items() if predicted and steps
    }
    waits: dict[str, list[tuple[float, float]]] = {}
    for span in per_lane[WAIT]:
        what = span.name.partition(":")[0]
        waits.setdefault(what, []).append((max(span.begin, begin), min(span.end, end)))
    return Report(
        step_seconds=tuple(span.end - span.begin for span in steps),
        seconds=end - begin,
        lanes=lanes,
        waits={what: covered_s(spans) for what, spans in waits.items()},
        waited_seconds=seconds(WAIT),
        stats=stats,
        compared={name: both for name, both in compared.items() if any(both)},
        predicted=predicted is not None,
    )


def whole_steps(recorded: Recorded, most: int) -> list[Span]:
    """Return the last steps, `most` at most, of which everything is recorded, the earliest first.

    Each begins where the one before has ended: a checkpoint that is loaded in between begins another run.
    """
    found = list[Span]()
    for span in reversed(recorded.spans):  # in the order of time: a thread takes them
        if span.lane != STEP:
            continue
        if span.begin < recorded.complete_from or len(found) == most or (found and span.end != found[-1].begin):
            break
        found.append(span)
    return found[::-1]


def window(steps: Sequence[Span], recorded: Recorded) -> tuple[float, float]:
    """Return the time that is looked at: that of `steps`, or where there is none, all of which everything is known."""
    if steps:
        return steps[0].begin, steps[-1].end
    if not recorded.spans:
        return 0.0, 0.0
    return max(recorded.spans[0].begin, recorded.complete_from), max(span.end for span in recorded.spans)


def _bytes_inside(span: Span, begin: float, end: float) -> int:
    """Return a span's bytes, or of one that lies partly outside of a time its share."""
    if span.begin >= begin and span.end <= end:
        return span.size_bytes
    return round(span.size_bytes * (min(span.end, end) - max(span.begin, begin)) / (span.end - span.begin))
