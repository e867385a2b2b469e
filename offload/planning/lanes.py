"""Lanes of a machine that work side by side: what each is given, and how fast it goes while others are busy.

Owns the events. Each lane does one job at a time, in the order in which it is given. What happens is told by processes:
generators that yield a job, as lane and amount, and go on when it is done, or a :class:`Moment`, and go on when it has
come. Amounts are bytes, or seconds of the device and of the host's thread. Knows neither units nor plans. Next:
:mod:`offload.planning.played`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator

from offload.planning.hardware import Hardware

COMPUTE, CALLS = "compute", "calls"  # of the device, and of the host's thread that gives it work
H2D, D2H, READ, WRITE = "h2d", "d2h", "read", "write"
TAKE, UPDATE = "take", "update"  # gradients that arrive, and updates: both of the CPU
_ALL = (COMPUTE, CALLS, H2D, D2H, READ, WRITE, TAKE, UPDATE)
_LITTLE_S = 1e-9


class Moment:
    """Something that will come once; processes may wait for it."""

    __slots__ = ("has_come", "waiting")

    def __init__(self) -> None:
        self.has_come = False
        self.waiting: list[Process] = []


Process = Generator[Moment | tuple[str, float], None, None]


class Lanes:
    """Lanes of one machine, and the processes that use them.

    Attributes:
        now_s: the time.
    """

    def __init__(self, hardware: Hardware) -> None:
        self.now_s = 0.0
        self._hardware = hardware
        self._jobs: dict[str, deque[tuple[float, Process]]] = {lane: deque() for lane in _ALL}
        self._left: dict[str, float] = {}  # of the job that each busy lane is at
        self._ready: deque[Process] = deque()
        self._rates: dict[tuple[str, ...], tuple[float, ...]] = {}

    def begin(self, process: Process) -> None:
        """Let a process begin, at this time."""
        self._ready.append(process)

    def come(self, moment: Moment) -> None:
        """Let a moment have come. Idempotent."""
        moment.has_come = True
        self._ready.extend(moment.waiting)
        moment.waiting.clear()

    def run(self) -> None:
        """Let time go by until nobody has anything to do any more."""
        while True:
            while self._ready:
                self._go_on(self._ready.popleft())
            if not self._left:
                return
            self._pass_time()

    def _go_on(self, process: Process) -> None:
        for wanted in process:
            if isinstance(wanted, Moment):
                if not wanted.has_come:
                    wanted.waiting.append(process)
                    return
            elif wanted[1] > 0:
                lane, amount = wanted
                self._jobs[lane].append((amount, process))
                self._left.setdefault(lane, amount)
                return

    def _pass_time(self) -> None:
        """Go on to the end of the job that ends next."""
        busy = tuple(self._left)
        rates = self._rates.get(busy)
        if rates is None:
            rates = self._rates[busy] = self._rates_of(busy)
        took_s = min(self._left[lane] / rate for lane, rate in zip(busy, rates, strict=True))
        self.now_s += took_s
        for lane, rate in zip(busy, rates, strict=True):
            left = self._left[lane] - took_s * rate
            if left > rate * _LITTLE_S:
                self._left[lane] = left
                continue
            jobs = self._jobs[lane]
            self._ready.append(jobs.popleft()[1])
            if jobs:
                self._left[lane] = jobs[0][0]
            else:
                del self._left[lane]

    def _rates_of(self, busy: tuple[str, ...]) -> tuple[float, ...]:
        """Return what each of `busy` lanes does per second while all of them are."""
        hardware = self._hardware
        read, write = hardware.drive_read_bytes_s, hardware.drive_write_bytes_s
        both = READ in busy and WRITE in busy
        share = min(hardware.drive_mixed_bytes_s / (read + write), 1.0) if both else 1.0
        rates = {H2D: hardware.h2d_bytes_s, D2H: hardware.d2h_bytes_s, READ: read * share, WRITE: write * share}
        copied = sum(rate for lane, rate in rates.items() if lane in busy)
        updates = hardware.updates_beside(copied) / max(busy.count(TAKE) + busy.count(UPDATE), 1)
        rates |= {COMPUTE: 1.0, CALLS: 1.0, TAKE: updates, UPDATE: updates}
        return tuple(rates[lane] for lane in busy)
