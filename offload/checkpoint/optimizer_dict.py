"""Reads what claims to be an optimizer's state dict, and says what is wrong with it before anything is written.

Owns the shape of the dict: groups, their parameters' numbers, entries by number. What a state may be is the business of
:mod:`offload.checkpoint.values`, which options make a step that of :mod:`offload.optim.rules`. Next:
:mod:`offload.optimizer`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from offload.errors import ConfigError

SUBJECT = "optimizer state dict"
REMEDY = "load what state_dict() of the same kind of optimizer returned"


def part(state_dict: Any, name: str) -> Mapping[Any, Any]:
    """Return a dict that an optimizer's state dict has.

    Raises:
        ConfigError: it is not there, or something else.
    """
    if not isinstance(state_dict, Mapping) or name not in state_dict or "param_groups" not in state_dict:
        got = f"the keys {list(state_dict)[:5]}" if isinstance(state_dict, Mapping) else type(state_dict).__name__
        raise ConfigError(f"{SUBJECT}: expected a dict with 'state' and 'param_groups' but got {got}; {REMEDY}")
    found = state_dict[name]
    if not isinstance(found, Mapping):
        raise ConfigError(f"{SUBJECT}: expected {name!r} as a dict but got {type(found).__name__}; {REMEDY}")
    return found


def saved_groups(state_dict: Mapping[str, Any], groups: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return the groups of a state dict, which are like `groups`.

    Raises:
        ConfigError: they are not.
    """
    saved = state_dict["param_groups"]
    if not isinstance(saved, (list, tuple)) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in saved
    ):
        raise ConfigError(f"{SUBJECT}: expected 'param_groups' as a list of dicts with 'params'; {REMEDY}")
    expected, got = [[len(group["params"]) for group in of] for of in (groups, saved)]
    if expected != got:
        raise ConfigError(
            f"{SUBJECT}: expected groups of {expected} parameters but got {got}; make the optimizer with the groups "
            "that it was saved with"
        )
    return [dict(group) for group in saved]


def by_parameter(
    values: Mapping[Any, Any], name: str, numbers_of: Sequence[Any], parameters: Sequence[torch.Tensor]
) -> dict[torch.Tensor, Any]:
    """Return values by parameter that a state dict has by number.

    Raises:
        ConfigError: a number is of no parameter.
    """
    try:
        parameter_of = dict(zip(numbers_of, parameters, strict=True))
    except TypeError as error:
        raise ConfigError(f"{SUBJECT}: expected numbers in 'params' of 'param_groups'; {REMEDY}") from error
    for number in values:
        if number not in parameter_of:
            raise ConfigError(
                f"{SUBJECT}: expected {name!r} with the numbers of the groups' {len(parameter_of)} parameters but got "
                f"{number!r}; {REMEDY}, with its keys as they were"
            )
    return {parameter_of[number]: value for number, value in values.items()}
