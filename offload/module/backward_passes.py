"""Numbers backward passes: gradients that come in one pass are added as autograd does, those of another in fp32.

Owns which of torch's graph tasks belong together: a segment of reentrant checkpointing has a task of its own, and
belongs to the pass in which it was repeated. Refuses passes of two threads at once. Next:
:mod:`offload.module.gradient_hooks`.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

from offload.errors import StateError
from offload.module.pass_times import PassTimes
from offload.torch_private import NO_GRAPH_TASK, at_end_of_backward, graph_task, runs_backward, watch_backward


class BackwardPasses:
    """Backward passes of one engine.

    Attributes:
        number: of the latest.
    """

    def __init__(self, times: PassTimes, *, in_callers: bool) -> None:
        """Begin with none.

        Args:
            times: of the passes.
            in_callers: torch runs a pass in the thread that calls it, as it does on the CPU; elsewhere in one of its
                own, where two are never at once.
        """
        self.number = 0
        self._times = times
        self._in_callers = in_callers
        self._thread: int | None = None  # that was in the latest
        self._watched: weakref.ref[Any] | None = None  # the latest, unless it is known to have ended
        self._tasks: set[int] = set()  # torch's numbers of that pass, and of those inside it that repeat segments
        self._repeated_in = NO_GRAPH_TASK  # the one in which a segment was repeated last

    @property
    def is_over(self) -> bool:
        """Whether the latest has ended, well or not; none is under way."""
        return self._watched is None or self._watched() is None

    def note(self) -> None:
        """Note which backward pass is under way; those that repeat a segment inside it belong to it.

        Raises:
            StateError: another thread is in one, too.
        """
        task = graph_task()
        if task in self._tasks or task == NO_GRAPH_TASK:
            return
        here = threading.get_ident()
        if self._in_callers and self._thread not in (None, here) and _is_pythons() and runs_backward(self._thread):
            raise StateError(
                "backward: expected one thread at a time but another one is in a backward pass of the engine's model; "
                "let threads take turns, with a threading.Lock around each forward, backward and step"
            )
        is_another = self._repeated_in not in self._tasks or self.is_over
        if is_another:
            self._tasks, self._thread = set(), here
            self.number += 1
            at_end_of_backward(self.end)
            self._watched = watch_backward()
        self._tasks.add(task)
        self._times.begin_backward(is_another=is_another)

    def note_repetition(self) -> None:
        """Note that the pass under way repeats a segment."""
        self.note()
        self._repeated_in = graph_task()

    def end(self) -> None:
        """Note that the latest backward pass is over: what comes is of another one."""
        self._tasks.clear()
        self._watched = None
        self._thread = None
        self._repeated_in = NO_GRAPH_TASK


def _is_pythons() -> bool:
    """Tell whether this thread was made in Python: torch makes those in which segments are repeated deeply nested."""
    return not isinstance(threading.current_thread(), threading._DummyThread)
