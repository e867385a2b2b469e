"""Counters of a run and the frozen snapshot that users read.

Owns the names of the links and how busy seconds are counted. Knows nothing of what is moved.
"""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Mapping

from offload.spans import Spans

BETWEEN_NODES = "between_nodes"
LINKS = ("nvme_read", "nvme_write", "h2d", "d2h", "cpu_adam", "compute", "collectives", BETWEEN_NODES)


@dataclasses.dataclass(frozen=True, slots=True)
class LinkStats:
    """What one link has carried so far: `bytes`, and `seconds` in which it was busy."""

    bytes: int
    seconds: float

    @property
    def bandwidth_gb_s(self) -> float:
        """Bytes over busy seconds, in 1e9 bytes per second (0 where nothing was moved)."""
        return self.bytes / self.seconds / 1e9 if self.seconds > 0 else 0.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stats:
    """Snapshot of an engine.

    Attributes:
        step: optimizer steps done.
        skipped_steps: steps skipped by loss scaling.
        links: bytes and busy seconds of ``nvme_read``, ``nvme_write``, ``h2d``, ``d2h``, ``cpu_adam``, ``compute``, and
            of ``collectives``: what this rank has sent to others. What it has sent to other nodes' owners of its slice
            is in ``between_nodes``. Of an accelerator, those of ``h2d``, ``d2h`` and ``compute`` are by its
            clock, as far as it is over with them; ``compute`` is from the beginning of a pass to its end there, beside
            waits for all but other ranks, and its own updates. Without a clock, copies have no seconds, and ``compute``
            is the host's time.
        hits: uses of a unit that found it on the device; counts are since the engine was made.
        misses: uses that had to start a fetch that nobody had asked for before, and wait for it.
        stalls: uses that waited for a fetch that was asked for ahead: under way, or without room as long as other
            copies were on their way, home or to the device; `stall_seconds` counts both kinds of wait.
        stall_seconds: seconds compute waited for parameters. For activations it waited `activation_stall_seconds`. Both
            are by an accelerator's clock if it has one: seconds in which it had nothing to do.
        update_chunks: pieces of units that steps have updated; `update_stalls` of them were waited for, the others had
            arrived while something else was computed. The states of `update_chunks_ahead` were read before the step.
        update_seconds: seconds spent on updates by the thread that computes, `update_stall_seconds` of them waiting for
            the drive or, beside an accelerator, for the thread that does the arithmetic.
        early_units: units that were updated during backward; `early_units_dropped` more for nothing, because the step
            clipped or something else was not as guessed.
        commits: of a durable run; `commit_seconds` were waited for them, `record_bytes` written beside the shards.
        gathers: of several ranks with slices of parameters: units that were gathered, `gathers_for_others` of them only
            for other ranks, because ranks used different modules.
        used_bytes: bytes per tier (``device``, ``cpu``, ``nvme``); activations are in ``device``.
        peak_bytes: the most that `used_bytes` has been.
        budget_bytes: the hard limits.
        loss_scale: current loss scale (1.0 unless float16).
    """

    step: int
    skipped_steps: int
    links: Mapping[str, LinkStats]
    hits: int
    misses: int
    stalls: int
    stall_seconds: float
    update_chunks: int
    update_stalls: int
    update_seconds: float
    update_stall_seconds: float
    early_units: int
    early_units_dropped: int
    commits: int
    commit_seconds: float
    record_bytes: int
    used_bytes: Mapping[str, int]
    peak_bytes: Mapping[str, int]
    budget_bytes: Mapping[str, int]
    loss_scale: float
    update_chunks_ahead: int = 0
    gathers: int = 0
    gathers_for_others: int = 0
    activation_stall_seconds: float = 0.0

    @property
    def binding_link(self) -> str:
        """Name of the link that was busy longest."""
        return max(LINKS, key=lambda name: self.links[name].seconds)


class Counters:
    """Mutable counters behind :class:`Stats`; safe from several threads.

    Attributes:
        spans: when it was that the links were busy, as far as that is kept.
        stood: seconds in which a device with a clock had nothing to do, per what it waited for; None without a clock.
            Those of the host are in `stall_seconds` and the like.
    """

    def __init__(self) -> None:
        self.spans = Spans()
        self.stood: dict[str, float] | None = None
        self._lock = threading.Lock()
        self._bytes = dict.fromkeys(LINKS, 0)
        self._seconds = dict.fromkeys(LINKS, 0.0)
        self.hits = 0
        self.misses = 0
        self.stalls = 0
        self.stall_seconds = 0.0
        self.activation_stall_seconds = 0.0
        self.update_chunks = 0
        self.update_chunks_ahead = 0
        self.update_stalls = 0
        self.update_seconds = 0.0
        self.update_stall_seconds = 0.0
        self.early_units = 0
        self.early_units_dropped = 0
        self.commits = 0
        self.commit_seconds = 0.0
        self.record_bytes = 0
        self.gathers = 0
        self.gathers_for_others = 0
        self.ranks_seconds = 0.0  # waited for other ranks
        self.drive_peak_bytes: int | None = None  # of the swap files, once they are closed

    @property
    def waits_seconds(self) -> float:
        """Seconds in which compute had to wait: for parameters, activations, commits, ranks, updates in its thread."""
        stalls = self.stall_seconds + self.activation_stall_seconds
        return stalls + self.update_seconds + self.commit_seconds + self.ranks_seconds

    def compute_waited_s(self, what: str) -> float:
        """Return the seconds that compute has waited for ``parameters`` or ``activations``."""
        if self.stood is not None:
            return self.stood.get(what, 0.0)
        return self.stall_seconds if what == "parameters" else self.activation_stall_seconds

    def wait_for_ranks(self, begin: float, end: float) -> None:
        """Count the time from `begin` to `end` as one in which compute had to wait for other ranks."""
        self.ranks_seconds += end - begin
        self.spans.add_wait("ranks", begin, end)

    def add_stood(self, name: str, seconds: float) -> None:
        """Count `seconds` in which a device with a clock had nothing to do; `name` as in ``Spans.add_wait``."""
        what = name.partition(":")[0]
        with self._lock:
            stood = self.stood = {} if self.stood is None else self.stood
            stood[what] = stood.get(what, 0.0) + seconds

    def add(self, link: str, *, size_bytes: int = 0, seconds: float = 0.0) -> None:
        """Count `size_bytes` moved and `seconds` busy on `link`."""
        with self._lock:
            self._bytes[link] += size_bytes
            self._seconds[link] += seconds

    def links(self) -> dict[str, LinkStats]:
        """Return the links' totals."""
        with self._lock:
            return {name: LinkStats(self._bytes[name], self._seconds[name]) for name in LINKS}
