"""Nested plain values as JSON, and back: dicts, lists, tuples, numbers, texts, bytes; tensors stand beside them.

Owns what may be kept beside the parameters, and how JSON spells what it has no word for. No code is run by reading it.
Next: :mod:`offload.checkpoint.saving`.
"""

from __future__ import annotations

import base64
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.classes import is_a
from offload.errors import CheckpointError
from offload.module.refusals import unreadable

REMEDY = (
    "keep dicts, lists, tuples, numbers, texts, bytes and tensors, as state_dict() of a scheduler, a sampler or a data "
    "loader returns them"
)
_NUMPY = ("floating", "integer", "bool_", "bool")  # classes of its scalars that are numbers here
_OWN: dict[type, Callable[[Any], Any]] = {int: int.__int__, float: float.__float__, str: str.__str__}


class Encoder:
    """Turns values into what JSON has.

    Attributes:
        tensors: those that were met, by the name that stands for each of them.
    """

    def __init__(self) -> None:
        self.tensors: dict[str, torch.Tensor] = {}

    def encode(self, value: Any, path: str) -> Any:
        """Return `value` for JSON; `path` is what errors and tensors call it.

        Scalars of NumPy, and numbers and texts of classes made of Python's, become Python's own.

        Raises:
            CheckpointError: something in it is of another type; names it.
        """
        value = _plain(value)
        kind = type(value)
        if value is None or kind in (bool, int, str):
            return value
        if kind is float:
            return value if math.isfinite(value) else {"$float": repr(value)}
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if kind is bytes:
            return {"$bytes": base64.b64encode(value).decode("ascii")}
        if kind in (list, tuple, torch.Size):
            items = [self.encode(item, f"{path}[{position}]") for position, item in enumerate(value)]
            return items if kind is list else {"$tuple": items}
        if kind is Counter:
            return {"$counter": self._pairs(value, path)}
        if isinstance(value, Mapping) and kind.__module__ in ("builtins", "collections", "types"):
            if all(type(key) is str and not key.startswith("$") for key in value):
                return {key: self.encode(item, f"{path}.{key}") for key, item in value.items()}
            return {"$dict": self._pairs(value, path)}
        raise CheckpointError(f"{path}: expected a plain value but got one of type {kind.__name__}; {REMEDY}")

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Any]:
        return [
            [self.encode(key, f"a key of {path}"), self.encode(item, f"{path}[{key!r}]")] for key, item in value.items()
        ]

    def _tensor(self, value: torch.Tensor, path: str) -> dict[str, str]:
        kind = "one on the meta device" if value.is_meta else unreadable(value)
        if kind is not None:
            raise CheckpointError(f"{path}: expected an ordinary tensor but got {kind}; {REMEDY}")
        name = path
        while name in self.tensors:
            name += "'"
        self.tensors[name] = value
        return {"$tensor": name}


def _plain(value: Any) -> Any:
    """Return a scalar of NumPy, or a number or text of a class made of Python's, as Python's own; others unchanged."""
    if type(value) in (bool, int, float, str):
        return value
    if any(is_a(value, "numpy", name) for name in _NUMPY) and not is_a(value, "numpy", "timedelta64"):
        value = value.item()
    for kind, own in _OWN.items():  # not by a method that the class may have replaced, as enumerations do
        if isinstance(value, kind) and type(value) is not bool:
            return own(value)
    return value


def decode(value: Any, tensor: Callable[[str], torch.Tensor]) -> Any:
    """Return what :meth:`Encoder.encode` was given; `tensor` returns one by name."""
    if isinstance(value, list):
        return [decode(item, tensor) for item in value]
    if not isinstance(value, dict):
        return value
    if len(value) == 1:
        (word, content) = next(iter(value.items()))
        if word == "$tensor":
            return tensor(content)
        if word == "$float":
            return float(content)
        if word == "$bytes":
            return base64.b64decode(content)
        if word == "$tuple":
            return tuple(decode(item, tensor) for item in content)
        if word in ("$dict", "$counter"):
            pairs = {decode(key, tensor): decode(item, tensor) for key, item in content}
            return Counter(pairs) if word == "$counter" else pairs
    return {key: decode(item, tensor) for key, item in value.items()}
