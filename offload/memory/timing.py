"""How long a device was busy with copies, by its own clock.

Owns pairs of timing events until they are over. Where a back end has none, bytes are counted alone. Next:
:mod:`offload.stats` shows the seconds.
"""

from __future__ import annotations

import logging
import threading
from collections import deque

import torch

from offload.stats import Counters

logger = logging.getLogger(__name__)


class Stopwatch:
    """Counts bytes and the device's seconds per link. Safe from several threads."""

    def __init__(self, counters: Counters, place: torch.device) -> None:
        self._counters = counters
        self._place = place
        self._lock = threading.Lock()
        self._spans: deque[tuple[str, torch.Event, torch.Event]] = deque()  # not yet read, the oldest first
        self._has_times = True

    def start(self, stream: torch.Stream) -> torch.Event | None:
        """Return the moment when `stream` has come so far; None where moments have no times."""
        if not self._has_times:
            return None
        begin = torch.Event(self._place, enable_timing=True)
        begin.record(stream)
        return begin

    def stop(self, link: str, stream: torch.Stream, begin: torch.Event | None, size_bytes: int = 0) -> None:
        """Count `size_bytes` moved over `link`, and the seconds from `begin` until `stream` has come so far."""
        self._counters.add(link, size_bytes=size_bytes)
        end = self.start(stream) if begin is not None else None
        if begin is not None and end is not None:
            with self._lock:
                self._spans.append((link, begin, end))
            self.read()

    def read(self) -> None:
        """Count the seconds of what is over. Waits for nothing."""
        with self._lock:
            while self._spans:
                link, begin, end = self._spans[0]
                if not end.query():
                    return
                self._spans.popleft()
                try:
                    seconds = begin.elapsed_time(end) / 1e3
                except RuntimeError as error:  # how a back end says that its events have none
                    logger.info("%s: no times of copies (%s)", self._place, error)
                    self._has_times = False
                    self._spans.clear()
                    return
                self._counters.add(link, seconds=seconds)
