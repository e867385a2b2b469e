"""What engines and stores count.

Owns: the frozen snapshots that `stats()` returns.
Must not know: who counts (csrc/aio/engine.cc and `store`).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class AioStats:
    """Counters of one engine since it was opened.

    Attributes:
        reads: operations that succeeded. Likewise `writes`.
        read_bytes: bytes of those. Likewise `write_bytes`.
        read_seconds: time with at least one read in flight. Likewise `write_seconds`.
        read_errors: operations that failed. Likewise `write_errors`.
        in_flight: operations submitted and not finished.
        peak_in_flight: the most there were at a time.
        short_transfers: partial transfers that were continued.
        retries: requests repeated after EINTR or EAGAIN.
    """

    reads: int
    read_bytes: int
    read_errors: int
    read_seconds: float
    writes: int
    write_bytes: int
    write_errors: int
    write_seconds: float
    in_flight: int
    peak_in_flight: int
    short_transfers: int
    retries: int


@dataclass(frozen=True, slots=True)
class SwapStats:
    """A snapshot of a store's counters since it was opened.

    Attributes:
        read_bytes: bytes read successfully. Likewise `written_bytes`.
        read_seconds: time with at least one read in flight. Likewise `write_seconds`.
        reads: transfers that succeeded. Likewise `writes`.
        in_flight: transfers submitted and not finished.
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
    in_flight: int
    used_bytes: int
    peak_used_bytes: int
    capacity_bytes: int
    engine: str
    fallback_reason: str | None
    direct: bool
    paths: tuple[str, ...]
