"""Leaves the quick run few cases of a test: with ``@pytest.mark.few``, so many that each value of a parameter occurs.

Of a parameter that is a dataclass, each value of each field does. With ``few(4)`` it is four of the cases. The choice
depends on the cases alone, so every process of a run makes the same one. The profiles `nightly` and `sweep` run all.
Whoever names a case runs it, since a choice among one is that one.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import pytest


def cover(cases: Sequence[Mapping[str, Hashable]], count: int | None = None) -> list[int]:
    """Return the positions of cases in which each value of each parameter occurs, or of as many as `count`.

    Each case that is taken has the most values that no former one has; of those, the most pairs of values; of those it
    is the first.
    """
    values = [set(case.items()) for case in cases]
    pairs = [set(itertools.combinations(case.items(), 2)) for case in cases]
    left, taken = list(range(len(cases))), list[int]()
    missing, missing_pairs = set().union(*values), set().union(*pairs)
    while left and (missing if count is None else len(taken) < count):
        best = max(left, key=lambda number: (len(values[number] & missing), len(pairs[number] & missing_pairs)))
        left.remove(best)
        taken.append(best)
        missing -= values[best]
        missing_pairs -= pairs[best]
    return sorted(taken)


def leave_out(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Take of each test with the mark the cases of the quick run alone."""
    tests: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("few"):
            tests.setdefault(item.nodeid.split("[", 1)[0], []).append(item)
    out = set[pytest.Item]()
    for cases in tests.values():
        mark = cases[0].get_closest_marker("few")
        assert mark is not None
        taken = cover([_values(case) for case in cases], *mark.args)
        out.update(case for number, case in enumerate(cases) if number not in taken)
    if out:
        config.hook.pytest_deselected(items=[item for item in items if item in out])
        items[:] = [item for item in items if item not in out]


def _values(item: Any) -> dict[str, Hashable]:
    """Return what a case has for each parameter, or for each field of one; what cannot be hashed is itself alone."""
    found: dict[str, Hashable] = {}
    for name, value in item.callspec.params.items():
        fields = dataclasses.fields(value) if dataclasses.is_dataclass(value) and not isinstance(value, type) else ()
        parts = {f"{name}.{field.name}": getattr(value, field.name) for field in fields} or {name: value}
        for part, one in parts.items():
            try:
                hash(one)
                found[part] = one
            except TypeError:
                found[part] = id(one)
    return found
