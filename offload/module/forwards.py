"""Forwards under way: what each has been lent, and what each has put on torch's stacks.

Owns the stack of them, and taking it down again where an interrupt has torn out of a forward. Next:
:mod:`offload.module.hooks` begins and ends them.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from offload.errors import StateError
from offload.module.lending import Loan
from offload.torch_private import NO_GRAPH_TASK, calls_under_way, function_modes, graph_task, top_hooks


class InForce:
    """What one forward has put on torch's stacks of saved-tensor hooks and modes, and takes off again.

    An interrupt tears out of a module without its forward hook. What is on the stacks then lies there until
    :meth:`Forwards.unwind`, and contexts that were left meanwhile have taken off the uppermost instead of their own: so
    as many are taken off as were put there, whosever they are. But every thread has its own stacks, and torch puts
    them back when a node of a backward pass ends, or fails: what is on the present stacks then is not touched.
    """

    __slots__ = ("_contexts", "_uppermost", "graph_task", "stream", "thread")

    def __init__(self, stream: int) -> None:
        """Put nothing there yet, in a forward that computes on the device's stream of this number."""
        self.stream = stream
        self.thread = threading.get_ident()
        self.graph_task: int = graph_task()
        self._contexts: list[contextlib.AbstractContextManager[object]] = []
        self._uppermost = top_hooks()

    def enter(self, context: contextlib.AbstractContextManager[object]) -> None:
        """Enter a context that :meth:`leave` leaves."""
        context.__enter__()
        self._contexts.append(context)
        self._uppermost = top_hooks()

    def is_here(self) -> bool:
        """Tell whether these are the present stacks."""
        return self.thread == threading.get_ident() and self.graph_task == graph_task()

    def is_uppermost(self) -> bool:
        """Tell whether these are the present stacks, and nobody has put saved-tensor hooks above."""
        now, then = top_hooks(), self._uppermost
        return now is not None and then is not None and now[0] is then[0] and self.is_here()

    def leave(self) -> None:
        """Leave all contexts that are still in force."""
        here = self.is_here()
        while self._contexts:
            context = self._contexts.pop()
            if isinstance(context, torch.autograd.graph.saved_tensors_hooks):
                there = here and top_hooks() is not None
            elif isinstance(context, TorchFunctionMode):
                there = here and bool(function_modes())
            else:
                there = True
            if there:
                context.__exit__(None, None, None)


class Forwards:
    """Forwards of one engine's modules.

    Attributes:
        under_way: per forward its module, what it has been lent, and what it has in force; the outermost first.
    """

    def __init__(self) -> None:
        self.under_way: list[tuple[nn.Module, list[Loan], InForce]] = []
        self._beginning: int | None = None  # thread in which one begins; it may wait for the drive

    def begin(self, function: Callable[[nn.Module], None], module: nn.Module) -> None:
        """Let a forward begin in `function`, which is given `module`.

        Raises:
            StateError: as :meth:`refuse_other_threads`.
        """
        self.refuse_other_threads()
        self._beginning = threading.get_ident()
        try:
            function(module)
        finally:
            self._beginning = None

    def leave(self) -> None:
        """End the innermost."""
        _, loans, contexts = self.under_way.pop()
        try:
            for loan in loans:
                loan.close()
        finally:
            contexts.leave()

    def is_innermost(self, module: nn.Module) -> bool:
        """Tell whether the innermost is that of `module` in this thread."""
        return (
            bool(self.under_way)
            and self.under_way[-1][0] is module
            and self.under_way[-1][2].thread == threading.get_ident()
        )

    def refuse_other_threads(self) -> None:
        """Refuse to be in another thread than the one whose forward is under way.

        Raises:
            StateError: that thread is in its forward, and no interrupt has torn it out.
        """
        here = threading.get_ident()
        busy = self._beginning is not None and self._beginning != here
        if self.under_way and not busy:
            module, _, contexts = self.under_way[-1]
            busy = contexts.thread != here and _is_in(contexts.thread, module)
        if busy:
            raise StateError(
                "engine: expected one thread at a time but another one is in a forward of its model, which is lent the "
                "parameters; let threads take turns, with a threading.Lock around each forward, backward and step"
            )

    def unwind(self) -> None:
        """End all of them: an interrupt has torn out of them."""
        with contextlib.ExitStack() as last:  # all of them, whatever fails on the way
            for _ in self.under_way:
                last.callback(self.leave)

    def are_stale(self, module: nn.Module, outermost: nn.Module | None) -> bool:
        """Tell whether these cannot be under way where a forward of `module` begins, in no backward pass.

        Args:
            module: whose forward begins.
            outermost: the model.
        """
        if self.under_way[-1][2].graph_task != NO_GRAPH_TASK:
            return True
        if module is not outermost:
            return False
        entered = sum(one is module for one, _, _ in self.under_way)
        if not entered:
            return True
        here = self.under_way[-1][2].thread == threading.get_ident()  # another thread has stacks of its own
        return here and entered >= calls_under_way(module)  # of which one is about to be entered


def _is_in(thread: int, module: nn.Module) -> bool:
    """Tell whether a thread runs a method of `module`."""
    frame = sys._current_frames().get(thread)
    while frame is not None:
        if frame.f_locals.get("self") is module:
            return True
        frame = frame.f_back
    return False
