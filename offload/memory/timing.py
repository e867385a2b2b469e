"""How long a device was busy with copies and passes, how long it stood still, and when, by its own clock.

Owns pairs of timing events until they are over, and which moment of the device is which of the host. Where a back end
has no times, bytes are counted alone. Next: :mod:`offload.stats` shows the seconds.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import threading
import time
from collections import deque
from collections.abc import Iterator

import torch

from offload.spans import COMPUTE, SHORTEST_WAIT_S, WAIT
from offload.stats import Counters

logger = logging.getLogger(__name__)

ANCHORED_S = 5.0  # then clocks may have drifted apart, and torch gives milliseconds between events as 32-bit numbers


@dataclasses.dataclass(frozen=True, slots=True)
class _Anchor:
    """A moment of the device that came at once, on a stream without work, and the host's time of it."""

    event: torch.Event
    host_s: float

    def time_of(self, event: torch.Event) -> float:
        """Return the host's time of a moment that is over."""
        return self.host_s + self.event.elapsed_time(event) / 1e3


@dataclasses.dataclass(slots=True, eq=False)
class Pass:
    """A pass that has begun on a stream.

    Attributes:
        stream: that has been given it.
        begin: when the stream has come so far.
        waited_s: seconds of all waits until then; 0 until that is known.
    """

    stream: torch.Stream
    begin: torch.Event
    waited_s: float = 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class _Given:
    """What a stream has been given between two moments: a copy, a pass or a wait; or the beginning of a pass."""

    link: str
    name: str
    begin: torch.Event
    end: torch.Event
    size_bytes: int
    anchor: _Anchor
    of_pass: Pass | None = None


class Stopwatch:
    """Counts bytes and the device's seconds per link, and of waits. Safe from several threads.

    One thread at a time computes: passes and waits end in the order in which they are told.
    """

    def __init__(self, counters: Counters, place: torch.device) -> None:
        self._counters = counters
        self._place = place
        self._lock = threading.Lock()
        self._given: deque[_Given] = deque()  # not yet read, the oldest first
        self._waited_s = 0.0  # of all waits that were read
        self._still: torch.Stream | None = None  # is given nothing else
        self._anchor: _Anchor | None = None
        self._has_times = True

    def start(self, stream: torch.Stream) -> torch.Event | None:
        """Return the moment when `stream` has come so far; None where moments have no times."""
        if not self._has_times:
            return None
        begin = torch.Event(self._place, enable_timing=True)
        begin.record(stream)
        return begin

    def stop(
        self, link: str, stream: torch.Stream, begin: torch.Event | None, size_bytes: int = 0, *, name: str = "copy"
    ) -> None:
        """Count `size_bytes` moved over `link`, and the seconds from `begin` until `stream` has come so far."""
        self._counters.add(link, size_bytes=size_bytes)
        if begin is not None:
            self._stop(link, name, stream, begin, size_bytes)

    def begin_pass(self, stream: torch.Stream) -> Pass | None:
        """Return that a pass begins on `stream`; None where moments have no times."""
        begin = self.start(stream)
        if begin is None:
            return None
        begun = Pass(stream, begin)
        with self._lock:
            self._given.append(_Given(COMPUTE, "", begin, begin, 0, self._anchored(), begun))
        return begun

    def end_pass(self, what: str, begun: Pass) -> None:
        """Count the seconds of a pass in which its stream has not waited as those of computing `what`."""
        self._stop(COMPUTE, what, begun.stream, begun.begin, of_pass=begun)

    def end_wait(self, what: str, stream: torch.Stream, begun: torch.Event | None, begin: float) -> None:
        """Keep that compute has waited for `what`: from the moment `begun` until `stream` has come so far.

        Where moments have no times, it is from `begin` of the host's clock until now.
        """
        if begun is None:
            self._counters.spans.add_wait(what, begin, time.perf_counter())
        else:
            self._stop(WAIT, what, stream, begun)

    @contextlib.contextmanager
    def waiting(self, what: str, stream: torch.Stream) -> Iterator[None]:
        """Keep when compute on `stream` has waited, in the ``with`` block, for `what`."""
        begun, begin = self.start(stream), time.perf_counter()
        try:
            yield
        except BaseException:  # the device may be lost
            self._counters.spans.add_wait(what, begin, time.perf_counter())
            raise
        if time.perf_counter() - begin >= SHORTEST_WAIT_S:
            self.end_wait(what, stream, begun, begin)

    def read(self) -> None:
        """Count the seconds of what is over. Waits for nothing."""
        with self._lock:
            while self._given and self._given[0].end.query():
                try:
                    self._count(self._given.popleft())
                except RuntimeError as error:  # how a back end says that its events have none
                    logger.info("%s: no times of copies (%s)", self._place, error)
                    self._has_times = False
                    self._given.clear()

    def _count(self, given: _Given) -> None:
        counters, begun = self._counters, given.of_pass
        if begun is not None and given.begin is given.end:
            begun.waited_s = self._waited_s  # of those before it: they were told before
            return
        seconds = given.begin.elapsed_time(given.end) / 1e3
        begin = given.anchor.time_of(given.begin) if given.anchor.event.query() else None
        if given.link == WAIT:
            counters.add_stood(given.name, seconds)
            if begin is not None:
                self._waited_s += counters.spans.add_wait(given.name, begin, begin + seconds)
            return
        counters.add(given.link, seconds=seconds if begun is None else seconds - (self._waited_s - begun.waited_s))
        if begin is not None:
            counters.spans.add(given.link, given.name, begin, begin + seconds, given.size_bytes)

    def _stop(
        self,
        link: str,
        name: str,
        stream: torch.Stream,
        begin: torch.Event,
        size_bytes: int = 0,
        *,
        of_pass: Pass | None = None,
    ) -> None:
        end = self.start(stream)
        if end is not None:
            with self._lock:
                self._given.append(_Given(link, name, begin, end, size_bytes, self._anchored(), of_pass))
            self.read()

    def _anchored(self) -> _Anchor:
        """Return what tells the host's time of moments that come now."""
        now = time.perf_counter()
        if self._anchor is None or now - self._anchor.host_s > ANCHORED_S:
            if self._still is None:
                self._still = torch.Stream(self._place)
            event = torch.Event(self._place, enable_timing=True)
            event.record(self._still)
            self._anchor = _Anchor(event, now)
        return self._anchor
