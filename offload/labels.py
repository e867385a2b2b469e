"""Names of phases in the user's own profiler: ``offload::fetch``, and so bind, update, spill, write_back and wait.

Owns the prefix, and that a phase costs nothing where no profiler is running. Times in a trace are those of the calling
thread: a fetch is its start, and a wait is what was not hidden.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import ParamSpec, TypeVar

import torch

from offload.torch_private import is_profiled

P = ParamSpec("P")
R = TypeVar("R")


def labelled(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator that shows calls of a function as ``offload::<name>`` in ``torch.profiler``."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not is_profiled():
                return function(*args, **kwargs)
            with torch.profiler.record_function(f"offload::{name}"):
                return function(*args, **kwargs)

        return call

    return decorate
