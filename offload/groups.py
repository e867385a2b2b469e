"""What an optimizer gets as its first argument: parameters, names with them, or groups with options of their own.

Owns the forms in which torch's optimizers take them. Knows nothing of torch: a parameter is what has ``requires_grad``.
Whose parameters they are is checked in :mod:`offload.optimizer`. Next: :mod:`offload.config`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from offload.errors import ConfigError


class ParamGroups:
    """Groups of parameters, each with options of its own, in order.

    Equal is only what is the same: parameters have no truth that a comparison could ask for.
    """

    __slots__ = ("_groups",)

    def __init__(self, groups: Iterable[Mapping[str, Any]]) -> None:
        self._groups = tuple({**group, "params": list(group["params"])} for group in groups)

    def __repr__(self) -> str:
        """Return how many parameters there are: they themselves would fill the screen."""
        return f"<groups of {', '.join(str(len(group['params'])) for group in self._groups)} parameters>"

    def copies(self) -> list[dict[str, Any]]:
        """Return the groups as torch's optimizers take them, and may keep them."""
        return [{**group, "params": list(group["params"])} for group in self._groups]

    def options(self) -> list[dict[str, Any]]:
        """Return the options of each group."""
        return [{name: value for name, value in group.items() if name != "params"} for group in self._groups]


def parse_groups(params: Any, *, subject: str) -> ParamGroups:
    """Return what a user gave as the parameters of an optimizer.

    Args:
        params: an iterable of parameters, of pairs of a name and a parameter, or of dicts with these under ``params``.
        subject: the optimizer, for the error text.

    Raises:
        ConfigError: it is something else, or empty.
    """
    if isinstance(params, ParamGroups):
        return params
    if isinstance(params, (int, float)):
        raise ConfigError(
            f"{subject}: expected parameters as the first argument, as in torch, but got {params!r}; lr= is a keyword"
        )
    members = _members(params, subject)
    if not any(isinstance(member, Mapping) for member in members):
        return ParamGroups([{"params": _parameters(members, subject)}])
    groups = []
    for number, group in enumerate(members):
        if not isinstance(group, Mapping) or "params" not in group:
            got = "one without" if isinstance(group, Mapping) else f"a {type(group).__name__}"
            raise ConfigError(f"{subject}: expected dicts with 'params' but got {got} at position {number}")
        inside = f"{subject}, param group {number}"
        given = [group["params"]] if _is_parameter(group["params"]) else _members(group["params"], inside)
        groups.append({**group, "params": _parameters(given, inside)})
    return ParamGroups(groups)


def _is_parameter(value: Any) -> bool:
    return hasattr(value, "requires_grad")


def _members(params: Any, subject: str) -> list[Any]:
    """Return the members of an iterable that has an order, which the numbers in a state dict are."""
    if hasattr(params, "named_parameters"):
        remedy = "pass its .parameters()"
    elif _is_parameter(params):
        remedy = "put it in a list"
    elif isinstance(params, (str, bytes, Mapping, set, frozenset)) or not isinstance(params, Iterable):
        remedy = "pass model.parameters(), or a list of dicts with 'params'"
    else:
        members = list(params)
        if members:
            return members
        raise ConfigError(f"{subject}: expected parameters but got none; was the iterator used before?")
    raise ConfigError(f"{subject}: expected a list of parameters or groups but got a {type(params).__name__}; {remedy}")


def _parameters(members: list[Any], subject: str) -> list[Any]:
    """Return parameters, or pairs of a name and a parameter, which torch tells apart."""
    for number, member in enumerate(members):
        pair = isinstance(member, tuple) and len(member) == 2 and isinstance(member[0], str)
        if not _is_parameter(member[1] if pair else member):
            raise ConfigError(
                f"{subject}: expected parameters, or pairs of a name and a parameter, but got a "
                f"{type(member).__name__} at position {number}; pass model.parameters()"
            )
    return members
