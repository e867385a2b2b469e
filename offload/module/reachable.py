"""Which parameters a backward pass can reach, before it begins.

Owns the way through autograd's graph. Next: :mod:`offload.module.hooks` asks before a backward pass.
"""

from __future__ import annotations

from typing import Any

import torch

_PYTHON: Any = torch.autograd.function.BackwardCFunction  # base of the nodes of functions in Python


def reachable(loss: torch.Tensor) -> list[torch.Tensor] | None:
    """Return the leaves whose ``.grad`` a backward pass from `loss` may change.

    Returns:
        None where that cannot be told: a function in Python may run a backward pass of its own.
    """
    if loss.grad_fn is None:
        return [loss]
    found, seen, ahead = list[torch.Tensor](), set[Any](), [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        if node in seen:
            continue
        seen.add(node)
        if isinstance(node, _PYTHON):
            return None
        leaf = getattr(node, "variable", None)
        if leaf is not None:
            found.append(leaf)
        ahead.extend(following for following, _ in node.next_functions if following is not None)
    return found
