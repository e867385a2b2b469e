"""Errors of the simulated device on demand. faults.h says which calls of the host can fail."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator

from simulated import load

WORK, EVENTS, WAITS = 1, 2, 4  # kernels and copies; recording and waiting for events; waits of the host
ALL = WORK | EVENTS | WAITS


@dataclasses.dataclass
class Calls:
    """How many calls could have failed; known when the block has ended."""

    count: int = 0


@contextlib.contextmanager
def failing(nth: int, asks: int = WORK, *, lost: bool = False) -> Iterator[Calls]:
    """Let a call of the host raise torch.AcceleratorError while the block runs.

    Args:
        nth: which of the calls, from 1; 0 counts them only.
        asks: which calls can fail.
        lost: all that follow fail as well.
    """
    core, calls = load(), Calls()
    core.fail_at(nth, asks, lost)
    try:
        yield calls
    finally:
        calls.count = core.fail_at(0, 0, False)
