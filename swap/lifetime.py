"""The life of a store: open, closed, dropped, left to the interpreter's exit, or inherited by a forked child.

Owns: whether it may be used; when the engine stops and the descriptors are closed, exactly once and only in the process
that opened them. Must not know: what the descriptors are for.
Next: `store` has one `Gate` and one `Holdings`.
"""

from __future__ import annotations

import contextlib
import errno as _errno
import logging
import os
import weakref
from collections.abc import Callable, Sequence

from swap.errors import SwapDeadlineError, SwapError
from swap.io.aio import Aio

_log = logging.getLogger(__name__)


class Gate:
    """Whether something may be used: it is open, and this is the process that opened it.

    Attributes:
        closed: `close` was called.
    """

    def __init__(self, subject: str) -> None:
        """Open the gate for this process; `subject` names what is behind it."""
        self.closed = False
        self._subject = subject
        self._forks = _forks

    @property
    def inherited(self) -> bool:
        """This is a child of the process that opened it."""
        return self._forks != _forks

    def close(self) -> None:
        """Let nobody through any more."""
        self.closed = True

    def check(self) -> None:
        """Return only if it may be used.

        Raises:
            SwapError: it is closed, or belongs to the parent process.
        """
        if self.inherited:
            raise SwapError(
                f"{self._subject}: it belongs to the parent process",
                errno=_errno.ECHILD,
                remedy="open one after fork()",
            )
        if self.closed:
            raise SwapError(f"{self._subject}: it is closed", errno=_errno.EBADF, remedy="open a new one")


class Holdings:
    """An engine and the descriptors that it works on."""

    def __init__(self, owner: object, aio: Aio, fds: Sequence[int], close: Callable[[], None]) -> None:
        """Take over `aio` and `fds`; they are closed when `owner` goes away, at the latest.

        Args:
            owner: whose going away ends it.
            aio: works on the descriptors; stopped first.
            fds: descriptors, closed in this order.
            close: called when the engine has stopped, before the descriptors are closed.
        """
        self._fds = tuple(fds)
        self._memory: list[object] = []
        self._finalizer = weakref.finalize(owner, _close, aio, self._fds, close, self._memory, os.getpid())
        _held.add(self)

    def take_memory(self, memory: object) -> None:
        """Own what holds the memory of transfers in flight: it stays for good if the engine cannot be stopped."""
        self._memory.append(memory)

    def close(self) -> None:
        """Stop the engine and close the descriptors. Idempotent."""
        _held.discard(self)
        self._finalizer()

    def close_inherited(self) -> None:
        """Close the descriptors in a forked child: it must keep neither the space of unlinked files nor a lock."""
        for fd in self._fds:
            with contextlib.suppress(OSError):
                os.close(fd)


def _close(aio: Aio, fds: Sequence[int], close: Callable[[], None], memory: list[object], pid: int) -> None:
    if os.getpid() != pid:
        return
    try:
        aio.close(min(aio.deadline_s, 5.0))
    except SwapDeadlineError:
        _log.warning("swap: transfers were still in flight when the store went away")
    if aio.ended:  # otherwise a worker might use a number that names another file by then, or write after the lock
        close()
        for fd in fds:
            os.close(fd)
    else:
        leave(memory)


def leave(memory: object) -> None:
    """Keep memory for good: the kernel may still write to it, and nobody is told when that ends."""
    _left.append(memory)


def weakly(method: Callable[[], str]) -> Callable[[], str]:
    """Refer to a method without keeping its object alive."""
    reference = weakref.WeakMethod(method)

    def call() -> str:
        bound = reference()
        return "an object that is gone" if bound is None else bound()

    return call


_held: weakref.WeakSet[Holdings] = weakref.WeakSet()
_left: list[object] = []  # memory that the kernel may still write to
_forks = 0  # that this process is away from the one that imported this module


def _close_in_child() -> None:
    global _forks
    _forks += 1
    for holdings in list(_held):
        holdings.close_inherited()
    _held.clear()


os.register_at_fork(after_in_child=_close_in_child)
