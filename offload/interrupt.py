"""Ctrl-C at places where nothing is half done.

Owns the deferral of SIGINT while the engine works: the signal is noted, and handed to the handler that was installed
before at the next safe point (between modules, between gradients, after a step). A second Ctrl-C while the first one
waits is handed on at once. Only the main thread receives signals; elsewhere, and where no Python handler is installed,
nothing is changed. The handler is put back when the engine's call ends.

A handler may raise between any two instructions, also in those that install ours and put the former one back:

* Whoever hands a signal on at once has put the former handler back before, so that it does not matter what is skipped.
* What is left where some other exception has skipped the end of a ``with`` block (a timeout's alarm) is found at the
  next one: the function that the block was in is not running any more (of a generator that cannot be told).
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of what it returns: 2 us a call
import inspect
import sys
import threading
from collections.abc import Callable
from signal import SIGINT
from types import FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")


class Deferral:
    """Holds SIGINT back inside a ``with`` statement; may be nested and used again."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # the former one
        self._inside: list[FrameType] = []  # the frames of the `with` statements, outermost first
        self._pending = False

    def __enter__(self) -> Deferral:
        """Start holding SIGINT back."""
        if threading.current_thread() is threading.main_thread():
            caller = sys._getframe(1)
            if self._inside:
                while self._inside and not _is_running(self._inside[-1], caller):
                    self._inside.pop()
                if not self._inside:
                    self._put_back()
            if self._inside:
                self._inside.append(caller)
            else:
                self._begin(caller)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        caller = sys._getframe(1)
        while self._inside and self._inside.pop() is not caller:
            pass
        if self._inside:
            return
        self._put_back()
        if self._pending and self._handler is not None:
            self._pending = False
            if error is None:
                self._handler(SIGINT, None)

    def around(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function while SIGINT is held back; where it is already, without a block of its own."""
        if self._inside:
            return function(*args)
        with self:
            return function(*args)

    def check(self) -> None:
        """Hand on a signal that came meanwhile: nothing is half done here."""
        if self._pending and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._pending = False
            self._handler(SIGINT, None)

    def _begin(self, caller: FrameType) -> None:
        handler = _signal.getsignal(SIGINT)
        if handler != self._note:  # else it was left there, and the former one is known
            self._handler = handler if callable(handler) else None
        self._pending = False
        try:
            self._inside.append(caller)
            if self._handler is not None:
                _signal.signal(SIGINT, self._note)
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Install the former handler, if ours is there."""
        try:
            if self._handler is not None and _signal.getsignal(SIGINT) == self._note:
                _signal.signal(SIGINT, self._handler)
        finally:
            self._inside = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._inside and not self._pending:
            self._pending = True
            return
        assert self._handler is not None
        inside, pending = self._inside, self._pending
        self._pending = False
        self._put_back()
        self._handler(number, frame)
        if inside and _signal.getsignal(SIGINT) == self._handler:  # it did not raise: go on
            self._inside, self._pending = inside, pending
            _signal.signal(SIGINT, self._note)


def _is_running(frame: FrameType, innermost: FrameType | None) -> bool:
    if frame.f_code.co_flags & inspect.CO_GENERATOR:  # suspended where a `with` block of its caller runs
        return True
    while innermost is not None and innermost is not frame:
        innermost = innermost.f_back
    return innermost is frame
