"""What the lanes of an engine have lately done: spans of time in rings of fixed size.

Owns the lanes' names and what is forgotten: the oldest, of each lane by itself. Times are those of
``time.perf_counter``. Knows nothing of who writes. Next: :mod:`offload.report` sums them up, :mod:`offload.trace`
writes them to a file.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

STEP, COMPUTE = "step", "compute"
CPU_ADAM = "cpu_adam"  # updates; beside an accelerator also what takes gradients, in a thread of its own
WAIT = "wait"  # of computing: by a device's clock, where it has one and the wait is not for ranks or a commit
UPDATES = "updates"  # of the thread that computes: it begins and follows them, beside what it waits for
UPDATE = "update"  # a span of `COMPUTE`: what a device that is not the CPU updates by itself
H2D, D2H, NVME_READ, NVME_WRITE = "h2d", "d2h", "nvme_read", "nvme_write"
COLLECTIVES = "collectives"  # with other ranks
LANES = (STEP, COMPUTE, WAIT, UPDATES, CPU_ADAM, H2D, D2H, NVME_READ, NVME_WRITE, COLLECTIVES)

KEPT = 4096  # spans per lane, which take less than a MiB
LONGER = {D2H: 4}  # so many times as many: each gradient leaves an accelerator by itself
SHORTEST_WAIT_S = 1e-5  # what is waited for no longer than that had arrived


class Span(NamedTuple):
    """One thing that a lane did.

    Attributes:
        lane: one of `LANES`.
        name: what it was; of a wait, what was waited for, and of which unit, as ``"parameters: layers.0"``.
        begin: seconds.
        end: seconds: of a copy by a device or of the drive, when it was over there, whenever somebody asked.
        size_bytes: that were moved.
    """

    lane: str
    name: str
    begin: float
    end: float
    size_bytes: int = 0


class Spans:
    """Rings of the last spans. Safe from several threads.

    Attributes:
        waited: seconds of all waits so far, per what was waited for. A wait within another one counts as itself alone,
            so the sum is how long computing stood still.
        passes: seconds of all forward and backward passes so far, and of the device's own updates. They come one behind
            the other.
    """

    def __init__(self, kept: int = KEPT) -> None:
        """Begin with nothing; each lane keeps its last `kept` spans, and those of `LONGER` more."""
        self._kept = {lane: kept * LONGER.get(lane, 1) for lane in LANES}
        self._waits = threading.Lock()  # others go without: each appends to one ring or copies one, in one go
        # Bare tuples: they take a quarter of the time, and garbage collection soon forgets them.
        self._rings: dict[str, deque[tuple[str, float, float, int]]] = {
            lane: deque(maxlen=most) for lane, most in self._kept.items()
        }
        self.waited: dict[str, float] = {}
        self._stood: deque[tuple[float, float]] = deque(maxlen=kept)  # beginnings and ends; no two of them overlap
        self.passes: dict[str, float] = {}

    def add(self, lane: str, name: str, begin: float, end: float, size_bytes: int = 0) -> None:
        """Keep a span that is over; the lane's oldest is forgotten where it has too many."""
        self._rings[lane].append((name, begin, end, size_bytes))
        if lane == COMPUTE:
            self.passes[name] = self.passes.get(name, 0.0) + end - begin

    def add_wait(self, name: str, begin: float, end: float) -> float:
        """Keep a wait of computing, unless what it wanted was there; return its seconds that lie in no other one.

        One of a device may be told when later ones of the host are known.
        """
        if end - begin < SHORTEST_WAIT_S:
            return 0.0
        what, first, last, seconds = name.partition(":")[0], begin, end, end - begin
        later = list[tuple[float, float]]()
        with self._waits:
            self.add(WAIT, name, begin, end)
            while self._stood and self._stood[-1][1] > begin:
                other = self._stood.pop()
                if other[0] >= end:
                    later.append(other)
                else:
                    seconds -= min(other[1], end) - max(other[0], begin)
                    first, last = min(first, other[0]), max(last, other[1])
            self._stood.append((first, last))
            self._stood.extend(reversed(later))
            self.waited[what] = self.waited.get(what, 0.0) + seconds
        return seconds

    def recorded(self) -> Recorded:
        """Return what is kept."""
        lanes = {lane: list(ring) for lane, ring in self._rings.items()}
        return Recorded.of({lane: [Span(lane, *span) for span in lanes[lane]] for lane in lanes}, self._kept)


class Recorded(NamedTuple):
    """What lanes have done lately.

    Attributes:
        spans: the earlier begin first.
        complete_from: from this time on nothing is missing, in seconds; 0 where nothing was forgotten.
    """

    spans: Sequence[Span]
    complete_from: float

    @classmethod
    def of(cls, lanes: dict[str, list[Span]], kept: Mapping[str, int]) -> Recorded:
        """Return the spans of lanes, each in the order in which they were kept; a lane of `kept` may have lost some."""
        full = [spans[0].end for lane, spans in lanes.items() if len(spans) >= kept[lane]]
        spans = sorted((span for spans in lanes.values() for span in spans), key=lambda span: span.begin)
        return cls(spans, max(full, default=0.0))

    def beside(self, other: Recorded) -> Recorded:
        """Return both together."""
        spans = sorted((*self.spans, *other.spans), key=lambda span: span.begin)
        return Recorded(spans, max(self.complete_from, other.complete_from))


def covered_s(spans: Iterable[tuple[float, float]]) -> float:
    """Return the seconds in which at least one of `spans`, each a begin and an end, was under way."""
    seconds, reached = 0.0, float("-inf")
    for begin, end in sorted(spans):
        seconds += max(end - max(begin, reached), 0.0)
        reached = max(reached, end)
    return seconds
