"""Threads that do one thing after the other, what is urgent first.

Owns the queue and the threads. Knows nothing of what is done. Next: :mod:`offload.memory.accelerator` reads from the
drive in them.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future
from typing import Generic, TypeVar

T = TypeVar("T")
Errand = Callable[[int], T]  # called with the number of the thread that does it


class Errands(Generic[T]):
    """Does errands in threads of its own. Those of one urgency begin in the order in which they were given."""

    def __init__(self, threads: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        """Begin without threads: they start with the first errand, and call `begin` before it."""
        self._begin = begin
        self._name = name
        self._wanted = threads
        self._threads: list[threading.Thread] = []
        self._count = itertools.count()
        self._queue: list[tuple[bool, int, Errand[T], Future[T]]] = []
        self._undone: weakref.WeakSet[Future[T]] = weakref.WeakSet()  # urgent, and perhaps done
        self._changed = threading.Condition()
        self._closed = False

    @property
    def busy(self) -> bool:
        """Whether an urgent errand waits or is under way."""
        with self._changed:
            return not all(future.done() for future in self._undone)

    def submit(self, errand: Errand[T], *, urgent: bool) -> Future[T]:
        """Have an errand done, before all that are not urgent; returns what becomes of it."""
        future: Future[T] = Future()
        with self._changed:
            assert not self._closed and self._wanted
            if urgent:
                self._undone.add(future)
            heapq.heappush(self._queue, (not urgent, next(self._count), errand, future))
            self._changed.notify()
        while len(self._threads) < self._wanted:
            number = len(self._threads)
            thread = threading.Thread(target=self._run, args=(number,), name=f"{self._name}-{number}", daemon=True)
            self._threads.append(thread)
            thread.start()
        return future

    def do_urgent(self) -> None:
        """Do what is urgent and waits, inside of an errand of one thread."""
        assert self._wanted == 1
        while True:
            with self._changed:
                if not self._queue or self._queue[0][0]:
                    return
                _, _, errand, future = heapq.heappop(self._queue)
            _do(errand, 0, future)

    def close(self, *, cancel: bool = False) -> None:
        """Do what is left to do, or take that back, and end the threads. Idempotent."""
        with self._changed:
            self._closed = True
            for *_, future in self._queue if cancel else ():
                future.cancel()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()
        self._threads.clear()

    def _run(self, number: int) -> None:
        first = self._begin
        while True:
            with self._changed:
                while not self._queue:
                    if self._closed:
                        return
                    self._changed.wait()
                _, _, errand, future = heapq.heappop(self._queue)
            _do(errand, number, future, first)
            first = _nothing
            del errand, future  # a thread that waits keeps nothing alive


def _nothing() -> None:
    pass


def _do(errand: Errand[T], number: int, future: Future[T], begin: Callable[[], object] = _nothing) -> None:
    """Do an errand, behind `begin`: what fails there is told to whoever waits."""
    if not future.set_running_or_notify_cancel():
        return
    try:
        begin()
        future.set_result(errand(number))
    except BaseException as error:
        future.set_exception(error)
        del errand, future  # of whose traceback this is a part
