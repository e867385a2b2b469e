"""What autograd keeps of a unit instead of a tensor, and what a forward has put on torch's stacks to make it do so.

Owns the handles of saved views, our hooks on top of those of gradient checkpointing, and taking contexts off again
after an interrupt. Next: :mod:`offload.module.hooks`, whose forwards use them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch.overrides import TorchFunctionMode

from offload.torch_private import function_modes, graph_task, top_hooks


class SavedView(NamedTuple):
    """What autograd keeps instead of a tensor that views a unit."""

    unit: int
    version: int
    dtype: torch.dtype
    offset: int
    shape: torch.Size
    stride: tuple[int, ...]
    in_segment: bool  # of gradient checkpointing, which may be repeated while what was saved is being looked at


class Keeps(Protocol):
    """Makes handles of views, and views of handles."""

    def view_in_segment(self, tensor: torch.Tensor) -> SavedView | None:
        """Return the handle of a tensor of a segment that views a unit, None for any other tensor."""

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that was saved."""


class Over:
    """Our saved-tensor hooks over those of somebody else: views of units are ours, everything else is theirs.

    Gradient checkpointing without reentrance counts the tensors that pass its hooks, in the forward and again in its
    repetition; views of units pass it by both times. So a unit need not stay on the device while its segment waits.
    """

    def __init__(
        self, hooks: Keeps, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self.hooks = hooks
        self._pack = pack
        self._unpack = unpack

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep for `tensor`."""
        view = self.hooks.view_in_segment(tensor)
        return view if view is not None else _Theirs(self._pack(tensor), self._unpack)

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given."""
        return saved.unpack(saved.packed) if isinstance(saved, _Theirs) else self.hooks.unpack(saved)


@dataclasses.dataclass(frozen=True, slots=True)
class _Theirs:
    """What other saved-tensor hooks made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


class InForce:
    """What one forward has put on torch's stacks of saved-tensor hooks and modes, and takes off again.

    An interrupt tears out of a module without its forward hook. What is on the stacks then lies there until
    :meth:`.Hooks.unwind`, and contexts that were left meanwhile have taken off the uppermost instead of their own: so
    as many are taken off as were put there, whosever they are. But every thread has its own stacks, and torch puts
    them back when a node of a backward pass ends, or fails: what is on the present stacks then is not touched.
    """

    __slots__ = ("_contexts", "_thread", "graph_task")

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self.graph_task: int = graph_task()
        self._contexts: list[contextlib.AbstractContextManager[object]] = []

    def enter(self, context: contextlib.AbstractContextManager[object]) -> None:
        """Enter a context that :meth:`leave` leaves."""
        context.__enter__()
        self._contexts.append(context)

    def leave(self) -> None:
        """Leave all contexts that are still in force."""
        here = self._thread == threading.get_ident() and self.graph_task == graph_task()
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
