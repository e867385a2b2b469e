"""Faults to inject into an engine, for tests: no root and no broken disk needed.

Owns: the words in which a fault is described.
Must not know: how an engine carries one out (csrc/aio/faults.h counts, the engines act).
Next: `aio.Aio.inject`.
"""

from __future__ import annotations

import errno as _errno
from dataclasses import dataclass
from enum import Enum


class FaultAction(Enum):
    """What an injected fault does to the I/O that it hits."""

    FAIL = "fail"
    SHORT = "short"
    HANG = "hang"
    DELAY = "delay"
    LIE = "lie"


class FaultTarget(Enum):
    """Which I/Os an injected fault counts and hits."""

    ANY = "any"
    READS = "reads"
    WRITES = "writes"


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """A fault to inject into an engine, for tests: no root and no broken disk needed.

    An I/O is one request to the device: at most ``block_bytes`` of an operation, and one more for each retry
    or continuation after a partial transfer.

    Attributes:
        nth: which matching I/O is hit, counted from 1 since the fault was planned.
        action: FAIL (result is `errno`), SHORT (at most `short_bytes` are transferred; 0 looks like the end
            of the file), HANG (never completes), DELAY (issued `delay_s` later) or LIE (succeeds with wrong bytes: the
            first byte of a read is inverted, a write is not carried out).
        errno: for FAIL.
        short_bytes: for SHORT, bytes.
        delay_s: for DELAY, seconds.
        target: which I/Os count.
        forever: hit every matching I/O from the nth on, not only the nth.
    """

    nth: int = 1
    action: FaultAction = FaultAction.FAIL
    errno: int = _errno.EIO
    short_bytes: int = 0
    delay_s: float = 0.0
    target: FaultTarget = FaultTarget.ANY
    forever: bool = False
