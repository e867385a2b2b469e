"""What engines and stores count.

Owns: the frozen snapshots that `stats()` returns.
Must not know: who counts (csrc/aio/engine.cc and `store`).
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass
from typing import Final, NamedTuple

PAST_TRANSFERS: Final = 4096
"""Reads that a store remembers, and as many writes."""


@dataclass(frozen=True, slots=True)
class Latency:
    """How long operations took, in seconds, from submission to result; all 0 before the first one succeeded.

    The time includes waiting for a place in the queue, which is what the caller sees. Percentiles come from a histogram
    of fixed size with four buckets per factor of two: each is the end of its bucket, at most a quarter too high.

    Attributes:
        p50_s: half of the operations took no longer. Likewise `p95_s` and `p99_s`.
        max_s: the longest, exactly.
    """

    p50_s: float = 0.0
    p95_s: float = 0.0
    p99_s: float = 0.0
    max_s: float = 0.0


@dataclass(frozen=True, slots=True)
class AioStats:
    """Counters of one engine since it was opened.

    Attributes:
        reads: operations that succeeded. Likewise `writes`.
        read_bytes: bytes of those. Likewise `write_bytes`.
        read_seconds: time with at least one read in flight. Likewise `write_seconds`.
        read_errors: operations that failed. Likewise `write_errors`.
        read_latency: of operations that succeeded. Likewise `write_latency`.
        in_flight: operations submitted and not finished.
        peak_in_flight: the most there were at a time.
        queue_depth: requests that the device holds now; an operation is cut into requests of at most `block_bytes`.
        peak_queue_depth: the most it held at a time.
        short_transfers: partial transfers that were continued.
        retries: requests repeated after EINTR or EAGAIN.
    """

    reads: int
    read_bytes: int
    read_errors: int
    read_seconds: float
    read_latency: Latency
    writes: int
    write_bytes: int
    write_errors: int
    write_seconds: float
    write_latency: Latency
    in_flight: int
    peak_in_flight: int
    queue_depth: int
    peak_queue_depth: int
    short_transfers: int
    retries: int


class PastTransfer(NamedTuple):
    """A transfer of a store that went well.

    Attributes:
        key: of the object.
        begin_s: when it was submitted, in seconds of the monotonic clock.
        end_s: when its last byte was there, by the same clock, whenever somebody asked.
        size_bytes: that were moved.
    """

    key: Hashable
    begin_s: float
    end_s: float
    size_bytes: int


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A snapshot of a store's counters since it was opened.

    Attributes:
        read_bytes: bytes read successfully. Likewise `written_bytes`.
        read_seconds: time with at least one read in flight. Likewise `write_seconds`.
        reads: transfers that succeeded. Likewise `writes`.
        read_latency: of those. Likewise `write_latency`.
        in_flight: transfers submitted and not finished; a transfer of several pieces counts once per piece.
        peak_in_flight: the most there were at a time.
        queue_depth: requests that the devices hold now.
        peak_queue_depth: the most they held at a time.
        used_bytes: bytes in extents: current versions, versions being written, old versions being read.
        peak_used_bytes: the most `used_bytes` ever was.
        capacity_bytes: size of all files together.
        engine: "io_uring" or "threads".
        fallback_reason: why it is not io_uring, or None.
        direct: whether the page cache is bypassed (O_DIRECT) on every path.
        paths: directories that hold the files.
    """

    read_bytes: int
    written_bytes: int
    read_seconds: float
    write_seconds: float
    reads: int
    writes: int
    read_latency: Latency
    write_latency: Latency
    in_flight: int
    peak_in_flight: int
    queue_depth: int
    peak_queue_depth: int
    used_bytes: int
    peak_used_bytes: int
    capacity_bytes: int
    engine: str
    fallback_reason: str | None
    direct: bool
    paths: tuple[str, ...]
