"""Who does the arithmetic of updates: a thread of its own beside an accelerator, else whoever passes by.

Beside an accelerator the processor is idle, and the thread that launches kernels must not stop for an update. Where the
device is the CPU, its cores compute already. Owns the thread. Knows neither chunks nor what is done with them. Next:
:mod:`offload.shards.updates`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Protocol

from offload.memory.errands import Errands


class Worker(Protocol):
    """Does arithmetic: what is urgent first, else in the order in which it is given.

    Attributes:
        apart: whether somebody else can go on meanwhile.
    """

    apart: bool

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Future[None]:
        """Give it something to do, before all that is not urgent."""

    def close(self) -> None:
        """Finish what has begun, and forget the rest. Idempotent."""


class Caller:
    """Worker that is whoever calls: what goes wrong is raised there."""

    apart = False

    def __init__(self) -> None:
        self._over: Future[None] = Future()
        self._over.set_result(None)

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Future[None]:
        """Do it."""
        work()
        return self._over

    def close(self) -> None:
        """Nothing is ever left."""


class WorkerThread:
    """Worker in a thread of its own, which begins with the first work."""

    apart = True

    def __init__(self, begin: Callable[[], None]) -> None:
        """Begin without a thread, which calls `begin` first."""
        self._thread = Errands[None](1, "offload-update", begin)

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Future[None]:
        """Put it behind what is as urgent."""
        return self._thread.submit(lambda _: work(), urgent=urgent)

    def close(self) -> None:
        """Finish what has begun, and forget the rest."""
        self._thread.close(cancel=True)


def failed(task: Future[None]) -> bool:
    """Tell whether a worker's arithmetic is over, and has not gone well."""
    return task.done() and (task.cancelled() or task.exception() is not None)


def settle(task: Future[None]) -> None:
    """Take a worker's arithmetic back, or wait until it is over, whatever came of it."""
    if not task.cancel():
        task.exception()
