"""Who waits for whom over the device's memory: compute for what arrives, copies for compute that still reads.

Owns the events, by ranges of addresses. The host never waits here. The user may compute on several streams that nothing
orders. Each that has used the device's parameters counts as one that may still read them, and waits for what arrives:
plain modules may be read on any stream. Next: :mod:`offload.memory.accelerator`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol

import torch

from offload.memory.arena import Buffer


class Streams(Protocol):
    """Streams and events of one device."""

    def begin_thread(self) -> None:
        """Let the thread that calls be this device's."""

    def current_stream(self) -> torch.Stream:
        """Return the stream that compute is given to now."""

    def event(self, stream: torch.Stream | None = None) -> torch.Event:
        """Return the moment when all that was given to `stream` so far is done; of None to the current one."""


def entered(stream: torch.Stream) -> torch.Stream:
    """Return another object for the same stream, for one ``with`` block, in which it is the current one.

    Torch keeps in the object what was current before. Threads that enter the same one would leave each other's.
    """
    return torch.Stream(stream.stream_id, stream.device_index, stream.device_type)


@dataclasses.dataclass(slots=True)
class _Arrival:
    """What was copied to a range that ends at `end`, and the streams that are ordered behind it."""

    end: int
    event: torch.Event
    behind: set[int]


@dataclasses.dataclass(slots=True)
class _Release:
    """Per stream, the moment when it has read a range that ends at `end` for the last time so far."""

    end: int
    events: dict[int, torch.Event]


class Ordering:
    """Order of compute and copies on one device. See the module's text.

    Called from one thread at a time.
    """

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._computing: dict[int, torch.Stream] = {}  # that have ever used anything
        self._used: set[int] = set()  # addresses of buffers that were used since the last release
        self._arrivals: dict[int, _Arrival] = {}
        self._releases: dict[int, _Release] = {}
        self._alone: torch.Stream | None = None  # the last one that was alone

    def use(self, buffer: Buffer) -> None:
        """Let the streams that compute wait for what has arrived in `buffer`; the current one is one from now on."""
        number = self.note_stream().stream_id
        self._used.add(buffer.address)
        arrival = self._arrivals.get(buffer.address)
        if arrival is None or number in arrival.behind:
            return
        if arrival.event.query():
            del self._arrivals[buffer.address]
            return
        for other, waiting in self._computing.items():
            if other not in arrival.behind:
                waiting.wait_event(arrival.event)
        arrival.behind.update(self._computing)

    def arrive(self, buffer: Buffer, event: torch.Event, behind: Iterable[int] = ()) -> None:
        """Note that `buffer` has its content from `event` on, which follows :meth:`before`; and who is behind it."""
        end, former = buffer.address + buffer.size_bytes, self._arrivals.get(buffer.address)
        if former is not None:  # longer, and maybe used by nobody: a copy to its rest has to follow it, too
            end = max(end, former.end)
        self._arrivals[buffer.address] = _Arrival(end, event, set(behind))

    def release(self, buffer: Buffer) -> None:
        """Note that nobody uses `buffer` until the next :meth:`use`, but for what its streams have been given."""
        if buffer.address not in self._used:
            return
        self._used.discard(buffer.address)
        end = buffer.address + buffer.size_bytes
        release = self._releases.setdefault(buffer.address, _Release(end, {}))
        release.end = max(release.end, end)
        for number, stream in self._computing.items():
            release.events[number] = self._streams.event(stream)

    def before(self, target: Buffer) -> list[torch.Event]:
        """Return what a copy into `target` must follow: readers of what was there, and copies to there."""
        begin, end = target.address, target.address + target.size_bytes
        found: list[torch.Event] = []
        for address, release in list(self._releases.items()):
            release.events = {number: event for number, event in release.events.items() if not event.query()}
            if not release.events:
                del self._releases[address]
            elif address < end and begin < release.end:
                found += release.events.values()
        for address, arrival in list(self._arrivals.items()):
            if arrival.event.query():
                del self._arrivals[address]
            elif address < end and begin < arrival.end:
                found.append(arrival.event)
        return found

    def computed(self) -> list[torch.Event]:
        """Return the moments when all that compute has been given so far is done."""
        return [self._streams.event(stream) for stream in self._computing.values()]

    def move(self, source: Buffer) -> list[torch.Stream]:
        """Order the current stream, which is about to move bytes, behind all others; returns these."""
        self.use(source)
        return self.begin_alone()

    def begin_alone(self) -> list[torch.Stream]:
        """Order the current stream behind all others that compute; returns these."""
        current = self.note_stream()
        others = [stream for stream in self._computing.values() if stream != current]
        for stream in others:
            current.wait_stream(stream)
        return others

    def end_alone(self, others: Sequence[torch.Stream]) -> None:
        """Order all that compute, `others` and those that come later, behind the current stream."""
        self._alone = self._streams.current_stream()
        for stream in others:
            stream.wait_stream(self._alone)

    def note_stream(self) -> torch.Stream:
        """Return the current stream, which is one that computes from now on."""
        stream = self._streams.current_stream()
        if stream.stream_id not in self._computing:
            self._computing[stream.stream_id] = stream
            if self._alone is not None:
                stream.wait_stream(self._alone)
        return stream

    def moved(self, source: Buffer, target: Buffer) -> None:
        """Note that the current stream has been given the move, and that all others that compute wait for it."""
        self.release(source)
        self._used.add(target.address)  # who uses the one may go on with the other
        self.arrive(target, self._streams.event(), self._computing)
