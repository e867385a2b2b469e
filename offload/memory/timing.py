"""How long a device was busy with copies, and when, by its own clock.

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


@dataclasses.dataclass(frozen=True, slots=True)
class _Copy:
    """What a stream has been given between two moments."""

    link: str
    name: str
    begin: torch.Event
    end: torch.Event
    size_bytes: int
    anchor: _Anchor


class Stopwatch:
    """Counts bytes and the device's seconds per link. Safe from several threads."""

    def __init__(self, counters: Counters, place: torch.device) -> None:
        self._counters = counters
        self._place = place
        self._lock = threading.Lock()
        self._copies: deque[_Copy] = deque()  # not yet read, the oldest first
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
        end = self.start(stream) if begin is not None else None
        if begin is not None and end is not None:
            with self._lock:
                self._copies.append(_Copy(link, name, begin, end, size_bytes, self._anchored()))
            self.read()

    @contextlib.contextmanager
    def waiting(self, what: str) -> Iterator[None]:
        """Keep when the thread that computes has waited, in the ``with`` block, for `what`."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            self._counters.spans.add_wait(what, begin, time.perf_counter())

    def read(self) -> None:
        """Count the seconds of what is over. Waits for nothing."""
        with self._lock:
            while self._copies:
                copy = self._copies[0]
                if not copy.end.query():
                    return
                self._copies.popleft()
                try:
                    seconds = copy.begin.elapsed_time(copy.end) / 1e3
                    self._counters.add(copy.link, seconds=seconds)
                    if copy.anchor.event.query():
                        begin = copy.anchor.time_of(copy.begin)
                        self._counters.spans.add(copy.link, copy.name, begin, begin + seconds, copy.size_bytes)
                except RuntimeError as error:  # how a back end says that its events have none
                    logger.info("%s: no times of copies (%s)", self._place, error)
                    self._has_times = False
                    self._copies.clear()
                    return

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
