"""Copies of a user's optimizer that have no parameters: its own class steps in them, on whatever it is given.

Owns what of an optimizer is copied, whether that is still what it was, and what must not be in it. Neither the user's
model nor the optimizer is touched. Next: :mod:`offload.optim.probe` tries the copies.
"""

from __future__ import annotations

import collections
import copy
import functools
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.errors import ConfigError
from offload.optim.takeover import GIVEN

REMEDY = (
    'use offload.AdamW, with state_dtype="int8" for states of 8 bits, or a class of torch.optim that updates each '
    "parameter by itself, such as torch.optim.NAdam"
)


class _Bare(torch.optim.Optimizer):
    """Has what torch gives every optimizer."""


_HOLDS = ("state", "param_groups")  # what a copy has of its own
_PLAIN = (bool, int, float, complex, str, bytes, type(None))


@functools.cache  # not where this is imported: torch takes a second for its first optimizer
def _of_torch() -> frozenset[str]:
    """Return the attributes that torch gives every optimizer, but those that a class may change."""
    return frozenset(vars(_Bare([torch.zeros(1, device="cpu")], {}))) - {"defaults", *_HOLDS}


class Copies:
    """Makes copies of an optimizer as it is now: of all that it has but parameters, states and hooks."""

    def __init__(self, optimizer: torch.optim.Optimizer, attributes: Mapping[str, Any] | None = None) -> None:
        """Keep what is copied.

        Args:
            optimizer: the user's; it is not changed.
            attributes: of it; all that are its own by default.

        Raises:
            ConfigError: an attribute has parameters in it, or cannot be copied.
        """
        self._optimizer = optimizer
        self._own = self._copied(own_attributes(optimizer) if attributes is None else attributes)

    def __call__(self, groups: list[dict[str, Any]]) -> torch.optim.Optimizer:
        """Return a copy with these param groups and no states."""
        optimizer = self._optimizer
        of_torch = {name: value for name, value in vars(optimizer).items() if name in _of_torch()}
        made: torch.optim.Optimizer = object.__new__(type(optimizer))
        vars(made).update(of_torch, **copy.deepcopy(self._own))
        vars(made).update((name, collections.OrderedDict()) for name in of_torch if name.startswith("_optimizer_"))
        vars(made).update(state=collections.defaultdict(dict), param_groups=groups)
        return made

    def current(self) -> Copies:
        """Return what makes copies of the optimizer now: this, if its attributes are what they were.

        Others may have hung something on the optimizer since it was first copied. That is none of the class's, and left
        out, unless it is plain.

        Raises:
            ConfigError: an attribute has parameters in it now, or cannot be copied.
        """
        found = own_attributes(self._optimizer)
        found = {name: value for name, value in found.items() if name in self._own or is_plain(value)}
        return self if same(found, self._own) else Copies(self._optimizer, found)

    def _copied(self, attributes: Mapping[str, Any]) -> dict[str, Any]:
        name, groups = type(self._optimizer).__name__, self._optimizer.param_groups
        try:
            return copy.deepcopy(dict(attributes), _Guard([p for group in groups for p in group["params"]], name))
        except ConfigError:
            raise
        except Exception as error:
            raise ConfigError(
                f"optimizer: expected attributes of {name} that can be copied but got {type(error).__name__}: "
                f"{error}; {REMEDY}"
            ) from error


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return the attributes that are neither torch's own nor an engine's."""
    # `step` is there where a scheduler counts the calls, too
    return {name: value for name, value in vars(optimizer).items() if name not in {*_of_torch(), *_HOLDS, *GIVEN}}


def is_plain(value: object) -> bool:
    """Tell whether a value is a number, a string or the like, or a list, tuple or dictionary of such."""
    if isinstance(value, dict):
        return is_plain(list(value.items()))
    return isinstance(value, _PLAIN) or (isinstance(value, (list, tuple)) and all(map(is_plain, value)))


def same(left: Any, right: Any, seen: dict[tuple[int, int], object] | None = None) -> bool:
    """Tell whether a value and a copy of another are equal, with all that is in them; what cannot be copied counts so.

    Args:
        left: one.
        right: the other one.
        seen: pairs that are being compared: objects may have each other.
    """
    seen = {} if seen is None else seen
    if left is right or (id(left), id(right)) in seen:
        return True
    seen[id(left), id(right)] = left, right  # kept alive: no other object gets their ids
    if isinstance(left, _PLAIN) and isinstance(right, _PLAIN):
        return bool(left == right) or (left != left and right != right)
    if isinstance(left, torch.Tensor) and isinstance(right, torch.Tensor):
        alike = (left.dtype, left.device, left.shape) == (right.dtype, right.device, right.shape)
        return alike and (left.is_meta or torch.equal(left, right))
    if type(left) is not type(right):
        return False
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(same(*pair, seen) for pair in zip(left, right, strict=True))
    if isinstance(left, (set, frozenset)):  # of objects only the number is known
        return len(left) == len(right) and _plain_ones(left) == _plain_ones(right)
    if isinstance(left, Mapping):
        if left.keys() == right.keys():
            return all(same(left[key], right[key], seen) for key in left)
        return same(list(left.items()), list(right.items()), seen)
    return all(same(*pair, seen) for pair in itertools.zip_longest(_parts(left), _parts(right)))


def _plain_ones(values: Iterable[object]) -> set[object]:
    return {value for value in values if isinstance(value, _PLAIN)}


def _parts(value: object) -> list[object]:
    """Return what a copy of an object is made from."""
    try:
        parts = value.__reduce_ex__(4)
    except Exception:
        return []
    return [parts] if isinstance(parts, str) else [list(p) if isinstance(p, Iterator) else p for p in parts]


class _Guard(dict[int, Any]):
    """The memo of a deep copy, which comes by here with every object: parameters must not be among them."""

    def __init__(self, parameters: Sequence[torch.Tensor], name: str) -> None:
        super().__init__()
        self._forbidden = {id(parameter) for parameter in parameters}
        self._name = name

    def get(self, key: int, default: Any = None) -> Any:
        if key in self._forbidden:
            raise ConfigError(
                f"optimizer: expected {self._name} to keep parameters in its groups only but it has some in an "
                f"attribute of its own, and cannot work on one after the other; {REMEDY}"
            )
        return super().get(key, default)
