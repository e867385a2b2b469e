"""SIGTERM, which a cluster sends to a job that it takes its machine from: a run ends behind the step, and is saved.

Owns the signal while a run trains. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType, TracebackType


class Stopped(Exception):
    """A run has ended because it was told to; the text says what became of it."""


class Stop:
    """Notes SIGTERM inside a ``with`` statement. The second one ends the process at once.

    Attributes:
        asked: whether it came.
    """

    def __init__(self) -> None:
        self.asked = False
        self._takes = threading.current_thread() is threading.main_thread()  # no other one may install a handler

    def __enter__(self) -> Stop:
        """Begin to take the signal, unless somebody else does."""
        self._takes = self._takes and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
        if self._takes:
            signal.signal(signal.SIGTERM, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._takes:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked:
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            os.kill(os.getpid(), signal.SIGTERM)
        self.asked = True
