"""Counts the seconds of forward and backward passes as those of computing, whoever has called them.

Owns when a pass begins and ends. What the engine calls is counted from end to end. A forward that others call, such as
a trainer, is counted where its outermost module begins and ends. A ``loss.backward()`` of the user is counted from the
first tensor that it asks for to torch's end of it. A device that is not the CPU computes later: if it has a clock, its
own seconds count. Next: :mod:`offload.training` calls passes, :mod:`offload.module.hooks` and
:mod:`offload.module.backward_passes` see those of others, and :mod:`offload.watching` is told.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator

from offload.memory.transfer import Mover
from offload.spans import COMPUTE
from offload.stats import Counters
from offload.torch_private import NO_GRAPH_TASK, at_end_of_backward, graph_task, in_backward


@dataclasses.dataclass(slots=True, eq=False)
class _Begun:
    """A pass that has begun.

    Attributes:
        first: torch's number of its first task, for a backward pass of the user.
        begin: seconds of the host.
        waited_s: seconds that were waited for until then.
        there: the moment of the device; None where it has no clock.
        tasks: of it, which are under way.
    """

    first: int
    begin: float
    waited_s: float
    there: object | None
    tasks: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class PassCalls:
    """What is told of passes, "forward" or "backward".

    Attributes:
        begins: that one begins.
        ends: that one is over. Of one that the engine has called and that has failed, nothing is told.
    """

    begins: Callable[[str], None]
    ends: Callable[[str], None]


class PassTimes:
    """Seconds of the passes of one engine. See the module's text."""

    def __init__(self, mover: Mover, counters: Counters, calls: PassCalls) -> None:
        """Begin with none.

        Args:
            mover: knows the device's clock.
            counters: of seconds, and of waits, which are no computing.
            calls: told of passes.
        """
        self._mover = mover
        self._counters = counters
        self._calls = calls
        self._ours = 0  # passes under way that the engine has called
        self._theirs: _Begun | None = None  # a backward pass that others have called
        self._forward: _Begun | None = None  # likewise

    @contextlib.contextmanager
    def counting(self, what: str) -> Iterator[None]:
        """Count the seconds of the ``with`` block in which nothing was waited for as those of computing `what`."""
        if in_backward() and not self._ours:  # of the user, which repeats this
            if self._theirs is None:
                self.begin_backward(is_another=True)
            yield
            return
        self._theirs = self._forward = None  # it has failed
        begun = self._begin(what)
        self._ours += 1
        try:
            yield
        finally:
            self._ours -= 1
            self._end(what, begun)
        self._calls.ends(what)

    def begin_forward(self) -> None:
        """See the beginning of a forward, in no backward pass, from inside its outermost module."""
        self._theirs = None  # it has failed
        self._forward = None if self._ours else self._begin("forward")

    def end_forward(self) -> None:
        """See its end, unless the engine has called it."""
        begun, self._forward = self._forward, None
        if begun is not None:
            self._end("forward", begun)
            self._calls.ends("forward")

    def forget_forward(self) -> None:
        """Forget a forward that an interrupt has torn out of."""
        self._forward = None

    def begin_backward(self, *, is_another: bool) -> None:
        """See the beginning of one of torch's tasks, which are all there is of a backward pass, from inside it.

        Args:
            is_another: pass; else the task belongs to the one under way.
        """
        task = graph_task()
        inside = self._ours or self._forward is not None
        if inside or (self._theirs is not None and self._theirs.first == task):
            return
        if is_another or self._theirs is None:
            self._theirs = self._begin("backward", task)
        self._theirs.tasks += 1
        at_end_of_backward(functools.partial(self._end_backward, self._theirs))

    def _end_backward(self, begun: _Begun) -> None:
        begun.tasks -= 1
        if begun is self._theirs and not begun.tasks:
            self._theirs = None
            self._end("backward", begun)
            self._calls.ends("backward")

    def _begin(self, what: str, first: int = NO_GRAPH_TASK) -> _Begun:
        self._calls.begins(what)
        return _Begun(first, time.perf_counter(), self._counters.waits_seconds, self._mover.begin_computing())

    def _end(self, what: str, begun: _Begun) -> None:
        if begun.there is not None:
            self._mover.end_computing(what, begun.there)
            return
        waited_s, end = self._counters.waits_seconds - begun.waited_s, time.perf_counter()
        self._counters.add("compute", seconds=max(end - begun.begin - waited_s, 0.0))
        self._counters.spans.add(COMPUTE, what, begun.begin, end)
