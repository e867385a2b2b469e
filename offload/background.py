"""A checkpoint that is completed by a thread of its own while training goes on.

Owns the thread, and who is told how it ended: whoever waits, else the engine's next call that saves or ends. What the
thread does is the business of :mod:`offload.checkpoints`.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path

from offload.module import refusals

logger = logging.getLogger(__name__)

PAUSE_S = 0.1  # after which whoever waits looks for Ctrl-C


class PendingCheckpoint:
    """A checkpoint under way: what ``engine.save_checkpoint(wait=False)`` returns.

    Its folder has another name until it is complete. If it fails, :meth:`wait` raises the error; if nobody waits, the
    engine's next ``save_checkpoint``, ``load_checkpoint``, ``drain`` or ``close`` does.

    Attributes:
        path: the folder that it will be.
    """

    def __init__(self, path: Path, complete: Callable[[], object]) -> None:
        """Have a thread call `complete`. The interpreter waits for it before it ends."""
        self.path = path
        self._complete = complete
        self._process = os.getpid()
        self._error: BaseException | None = None
        self._told = False
        self._over = threading.Event()
        threading.Thread(target=self._run, name="checkpoint copy").start()

    def done(self) -> bool:
        """Tell whether it is over, well or badly."""
        return self._over.is_set()

    def wait(self, timeout: float | None = None) -> Path:
        """Wait until it is complete.

        Args:
            timeout: seconds to wait at most; None: as long as it takes.

        Returns:
            The folder.

        Raises:
            TimeoutError: it is still under way.
            StateError: this is another process than the one that has begun it.
            swap.SwapFullError: the drive has no room. Older checkpoints stay in every case.
            swap.SwapError: another I/O error.
            CheckpointError: the directory cannot be written to.
        """
        refusals.refuse_child(self._process)
        if not self._over.wait(timeout):
            raise TimeoutError(
                f"checkpoint {self.path}: expected within {timeout:g} s but it is being copied; wait again"
            )
        if self._error is not None:
            self._told = True
            raise self._error
        return self.path

    def settle(self, pause: Callable[[], None]) -> None:
        """Wait until it is over, calling `pause` now and then; raise why it failed, unless somebody was told."""
        while not self._over.wait(PAUSE_S):
            pause()
        self.tell()

    def tell(self) -> None:
        """Raise why it failed, if it has and nobody was told."""
        if self._over.is_set() and self._error is not None and not self._told:
            self.wait()

    def __repr__(self) -> str:
        state = "copying" if not self.done() else "complete" if self._error is None else f"failed: {self._error}"
        return f"<{type(self).__name__} {self.path}: {state}>"

    def _run(self) -> None:
        try:
            self._complete()
        except BaseException as error:  # told to whoever waits
            logger.warning("checkpoint %s: %s", self.path, str(error))
            self._error = error
        finally:
            del self._complete  # with all that it holds
            self._over.set()
