"""Calls every public method and property of ``torch.Tensor`` with arguments that fit a square matrix.

For tests of what stands for a tensor: it must answer as the tensor does, or refuse by name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy
import torch

WIDTH = 32

_NOT_OF_THE_TENSOR = {
    *("__class__", "__init__", "__new__", "__init_subclass__", "__subclasshook__", "__getattribute__", "__setattr__"),
    *("__delattr__", "__torch_function__", "__torch_dispatch__", "__doc__", "__module__", "__annotations__"),
    *("__dict__", "__weakref__", "__dir__", "__getstate__", "__array_priority__", "__dlpack_c_exchange_api__"),
    *("__cuda_array_interface__", "__hash__", "__sizeof__", "__dlpack_device__"),
    *("__firstlineno__", "__static_attributes__"),  # of each class, from Python 3.13 on
    *("__annotate__", "__annotate_func__", "__annotations_cache__"),  # from 3.14 on
}


def names() -> list[str]:
    """Return the names of all public methods and properties, operators among them."""
    found = (name for name in dir(torch.Tensor) if not name.startswith("_") or name.startswith("__"))
    return sorted(name for name in found if name not in _NOT_OF_THE_TENSOR)


def is_property(name: str) -> bool:
    return not callable(getattr(torch.Tensor, name))


def writes(name: str) -> bool:
    """Tell whether a method changes its tensor's content or memory, by torch's own convention."""
    if name in ("requires_grad_", "retain_grad"):
        return False
    augmented = name.startswith("__i") and name not in ("__int__", "__index__", "__invert__", "__iter__")
    underscored = name.endswith("_") and not name.endswith("__")
    return augmented or underscored or name in ("__setitem__", "__setstate__", "module_load")


def _arguments() -> list[tuple[Any, ...]]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(WIDTH, WIDTH, generator=generator)
    v = torch.randn(WIDTH, generator=generator)
    rows = torch.tensor([1, 2])
    zeros = torch.zeros(WIDTH, WIDTH, dtype=torch.long)
    return [
        *[(), (0,), (0.5,), (2.0,), (x,), (v,), (0, 1), (x, x), (x, 0.5), (v, v), (x[:, :2], x[:2]), (rows,)],
        *[(0, rows), (0, rows, 0.5), (0, rows, x[:2]), (0, rows, x[:2], "mean"), ((rows, rows), v[:2])],
        *[(x > 0,), (x > 0, 0.5), (x > 0, x), (0, zeros), (0, zeros, x), (0, zeros, x, "sum"), (zeros, x)],
        *[(2, 0, 0.5), (2, 0), (0, 0, 1), (0, 0, 2, 1), (torch.float64,), ("cpu",), ((WIDTH * WIDTH,),)],
        *[(WIDTH, WIDTH), ((WIDTH, WIDTH), (WIDTH, 1)), (x, (WIDTH, WIDTH), (WIDTH, 1)), (x, 0, 1), (x[0], 0, 1)],
        *[((16, 16),), ((WIDTH, WIDTH), 0.5), (torch.Tensor,), (lambda *values: values[0],), (x, lambda a, b: a)],
        *[(x, x, lambda a, b, c: a), (0, (16, 16)), (0, (2, 16)), (x.expand(1, WIDTH, WIDTH),) * 2],
    ]


ARGUMENTS = _arguments()


def call(tensor: torch.Tensor, name: str, arguments: tuple[Any, ...]) -> Any:
    """Call a method, or look at a property, always with the same random numbers."""
    torch.default_generator.manual_seed(1)  # of the CPU alone: for others, torch keeps the caller's whole stack
    return getattr(tensor, name) if is_property(name) else getattr(tensor, name)(*arguments)


def fitting(make: Callable[[], torch.Tensor], name: str) -> tuple[Any, bool, tuple[Any, ...]] | None:
    """Find arguments that work on what `make` returns; None where there are none.

    Returns:
        What the call returns, whether gradients were recorded meanwhile, and the arguments.
    """
    for arguments in ARGUMENTS if not is_property(name) else [()]:
        for grad in (True, False):
            try:
                with torch.set_grad_enabled(grad):
                    result = call(make(), name, arguments)
            except Exception:
                continue
            if result is not NotImplemented:
                return result, grad, arguments
    return None


def same(left: Any, right: Any) -> bool:
    """Tell whether two results are equal."""
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        if (left.layout, left.shape, left.dtype, left.device) != (right.layout, right.shape, right.dtype, right.device):
            return False
        if left.layout is not torch.strided:
            left, right = left.to_dense(), right.to_dense()
        return bool(((left == right) | ((left != left) & (right != right))).all())
    if isinstance(left, (list, tuple)) and type(left) is type(right):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, numpy.ndarray):
        return numpy.array_equal(left, right)
    if hasattr(left, "__next__"):
        return same(list(left), list(right))
    return bool(left == right or (left != left and right != right))
