"""Bytes between memory and NVMe: an asynchronous I/O engine and a copy-on-write swap store.

Owns: the public names of the package. Stands on its own: no torch, no tensors, only addresses and lengths.
Next: `store` (objects under keys), `aio` (raw reads and writes), `extents` (free space), `errors`.
"""

from swap.backing import Mode
from swap.durable.manifest import NO_MARK
from swap.durable.run_directory import find_run, go_back, marks_of
from swap.errors import SwapCorruptError, SwapDeadlineError, SwapError, SwapFullError, SwapLockedError
from swap.io.aio import (
    Aio,
    IoTicket,
    Job,
    Priority,
    Ticket,
    engines_available,
    uring_refusal,
    wait_all,
)
from swap.io.faults import Fault, FaultAction, FaultTarget
from swap.objects import Snapshot
from swap.space.extents import Extent, ExtentAllocator
from swap.stats import PAST_TRANSFERS, AioStats, Latency, PastTransfer, SwapStats
from swap.store import SwapStore
from swap.transfers import StoreTicket

__all__ = [
    "Aio",
    "AioStats",
    "Extent",
    "ExtentAllocator",
    "Fault",
    "FaultAction",
    "FaultTarget",
    "IoTicket",
    "Job",
    "Latency",
    "Mode",
    "NO_MARK",
    "Priority",
    "Snapshot",
    "StoreTicket",
    "SwapCorruptError",
    "SwapDeadlineError",
    "SwapError",
    "SwapFullError",
    "SwapLockedError",
    "PAST_TRANSFERS",
    "PastTransfer",
    "SwapStats",
    "SwapStore",
    "Ticket",
    "engines_available",
    "find_run",
    "go_back",
    "marks_of",
    "uring_refusal",
    "wait_all",
]
