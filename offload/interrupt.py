"""Ctrl-C at places where nothing is half done.

Owns the deferral of SIGINT while the engine works: the signal is noted, and handed to the handler that was installed
before at the next safe point (between modules, between gradients, after a step). A second Ctrl-C while the first one
waits is handed on at once. Only the main thread receives signals; elsewhere, and where no Python handler is installed,
nothing is changed. The handler is put back when the engine's call ends.
"""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any


class Deferral:
    """Context manager that holds SIGINT back; may be nested and used again."""

    def __init__(self) -> None:
        self._handler: Callable[[int, FrameType | None], Any] | None = None
        self._depth = 0
        self._pending = False

    def __enter__(self) -> Deferral:
        """Start holding SIGINT back."""
        if threading.current_thread() is threading.main_thread():
            self._depth += 1
            handler = signal.getsignal(signal.SIGINT)
            if self._depth == 1 and callable(handler):
                self._handler = handler
                self._pending = False
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        self._depth -= 1
        if self._depth or self._handler is None:
            return
        handler, self._handler = self._handler, None
        signal.signal(signal.SIGINT, handler)
        if self._pending:
            self._pending = False
            if error is None:
                handler(signal.SIGINT, None)

    def check(self) -> None:
        """Hand on a signal that came meanwhile: nothing is half done here."""
        if self._pending and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._pending = False
            self._handler(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending and self._handler is not None:
            self._handler(number, frame)
        self._pending = True
