"""Who does the arithmetic of updates: a thread of its own beside an accelerator, else whoever passes by.

Beside an accelerator the processor is idle, and the thread that launches kernels must not stop for an update. Where the
device is the CPU, its cores compute already. Owns the thread. Knows neither chunks nor what is done with them. Next:
:mod:`offload.shards.updates`.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, wait
from typing import Protocol

from offload.memory.errands import Errands


class Task(Protocol):
    """Arithmetic that was given to a worker."""

    def done(self) -> bool:
        """Tell whether waiting would return at once."""

    def wait(self) -> None:
        """Wait for it, as long as it takes; raise what it has raised."""

    def failed(self) -> bool:
        """Tell whether it has raised something."""

    def cancel(self) -> bool:
        """Take it back, if it has not begun; returns whether it never will."""

    def settle(self) -> None:
        """Take it back, or wait until it is over, whatever came of it."""


class Worker(Protocol):
    """Does arithmetic: what is urgent first, else in the order in which it is given.

    Attributes:
        apart: whether somebody else can go on meanwhile.
    """

    apart: bool

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Task:
        """Give it something to do, before all that is not urgent."""

    def close(self) -> None:
        """Finish what has begun, and forget the rest. Idempotent."""


class Done:
    """Arithmetic that went well and is over."""

    def done(self) -> bool:
        """Tell that it is."""
        return True

    def wait(self) -> None:
        """Wait for nothing."""

    def failed(self) -> bool:
        """Tell that it has not."""
        return False

    def cancel(self) -> bool:
        """Tell that it is too late."""
        return False

    def settle(self) -> None:
        """Wait for nothing."""


class Caller:
    """Worker that is whoever calls: what goes wrong is raised there."""

    apart = False

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Task:
        """Do it."""
        work()
        return Done()

    def close(self) -> None:
        """Nothing is ever left."""


class FutureTask:
    """Arithmetic in another thread."""

    def __init__(self, future: Future[None]) -> None:
        self._future = future

    def done(self) -> bool:
        """Tell whether it is over."""
        return self._future.done()

    def wait(self) -> None:
        """Wait until it is."""
        self._future.result()

    def failed(self) -> bool:
        """Tell whether it has raised something."""
        return self._future.done() and (self._future.cancelled() or self._future.exception() is not None)

    def cancel(self) -> bool:
        """Take it back, if it has not begun."""
        return self._future.cancel()

    def settle(self) -> None:
        """Take it back, or wait until it is over."""
        if not self._future.cancel():
            wait([self._future])


class WorkerThread:
    """Worker in a thread of its own, which begins with the first work."""

    apart = True

    def __init__(self) -> None:
        self._thread = Errands[None](1, "offload-update")

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> Task:
        """Put it behind what is as urgent."""
        return FutureTask(self._thread.submit(lambda _: work(), urgent=urgent))

    def close(self) -> None:
        """Finish what has begun, and forget the rest."""
        self._thread.close(cancel=True)
