"""Numbers backward passes: gradients that come in one pass are added as autograd does, those of another in fp32.

Owns which of torch's graph tasks belong together: a segment of reentrant checkpointing has a task of its own, and
belongs to the pass in which it was repeated. Next: :mod:`offload.module.gradient_hooks`.
"""

from __future__ import annotations

from offload.torch_private import NO_GRAPH_TASK, graph_task


class BackwardPasses:
    """Backward passes of one engine.

    Attributes:
        number: of the latest.
    """

    def __init__(self) -> None:
        self.number = 0
        self._tasks: set[int] = set()  # torch's numbers of that pass, and of those inside it that repeat segments
        self._repeated_in = NO_GRAPH_TASK  # the one in which a segment was repeated last

    def note(self) -> None:
        """Note which backward pass is under way; those that repeat a segment inside it belong to it."""
        task = graph_task()
        if task in self._tasks:
            return
        if self._repeated_in in self._tasks:
            self._tasks.add(task)
        else:
            self._tasks = {task}
            self.number += 1

    def note_repetition(self) -> None:
        """Note that the pass under way repeats a segment."""
        self.note()
        self._repeated_in = graph_task()

    def end(self) -> None:
        """Note that the latest backward pass is over: what comes is of another one."""
        self._tasks.clear()
        self._repeated_in = NO_GRAPH_TASK
