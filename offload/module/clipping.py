"""Clips gradients that have moved away all at once, with the bits of ``torch.nn.utils.clip_grad_norm_``.

torch's function asks each gradient for its norm and multiplies each: some calls per parameter, and on an accelerator a
copy and a wait. Of handles the norms are numbers that are there already, so one tensor of them is enough.

Owns what torch's function does with handles alone. Everything else is left to torch. Next:
:mod:`offload.module.handles` answers torch's own calls.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from offload.module.handles import GradientHandle
from offload.torch_private import no_subclasses


def handles_of(parameters: Iterable[torch.Tensor]) -> list[GradientHandle] | None:
    """Return the gradients of parameters, where all of them have moved away and are of one kind.

    Args:
        parameters: of any module.

    Returns:
        Those that are there, in the order of `parameters`; None where there is none, where some have elements, or where
        they differ in dtype or device, so that torch would add their norms in another order.
    """
    found = [gradient for parameter in parameters if (gradient := parameter.grad) is not None]
    with no_subclasses():
        handles = [gradient for gradient in found if isinstance(gradient, GradientHandle)]
        kinds = {(handle.dtype, handle.place) for handle in handles}
    return handles if len(handles) == len(found) and len(kinds) == 1 else None


def clip_handles(handles: Sequence[GradientHandle], max_norm: float, norm_type: float) -> torch.Tensor:
    """Multiply gradients as ``torch.nn.utils.clip_grad_norm_`` would, and return the norm before.

    Args:
        handles: at least one, of one kind: see :func:`handles_of`.
        max_norm: the norm afterwards, at most.
        norm_type: order of the norm; may be infinite.

    Returns:
        A 0-dim tensor on the gradients' device, fp32 unless they have more bits.

    Raises:
        StateError: a gradient is gone.
    """
    order = float(norm_type)
    values = [(handle.book, handle.book.value_of(handle)) for handle in handles]
    with no_subclasses():
        dtype = torch.float64 if handles[0].dtype is torch.float64 else torch.float32
        place = handles[0].place
    norms = torch.tensor([book.norm(value, order) for book, value in values], dtype=dtype, device=place)
    total: torch.Tensor = torch.linalg.vector_norm(norms, order)
    one = torch.nn.Parameter(torch.ones((), dtype=dtype, device=place))  # becomes what torch multiplies by
    one.grad = torch.ones((), dtype=dtype, device=place)
    torch.nn.utils.clip_grads_with_norm_(one, max_norm, total, foreach=False)
    factor = float(one.grad)
    for _, value in values:
        value.clip *= factor
    return total


def clip_grad_norm_(parameters: Iterable[torch.Tensor], max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
    """Do what ``torch.nn.utils.clip_grad_norm_`` does, to the bit.

    Args:
        parameters: whose gradients are clipped.
        max_norm: the norm afterwards, at most.
        norm_type: order of the norm; may be infinite.

    Returns:
        The norm before, a 0-dim tensor.
    """
    given = list(parameters)
    handles = handles_of(given)
    if handles is None:
        return torch.nn.utils.clip_grad_norm_(given, max_norm, norm_type)
    return clip_handles(handles, max_norm, norm_type)
