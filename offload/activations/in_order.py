"""Things under keys, in the order of the keys.

Owns nothing beyond that. Next: :mod:`offload.activations.leaving` and :mod:`offload.activations.away` look here for
what backward needs next.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator
from typing import Generic, TypeVar

T = TypeVar("T")


class InOrder(Generic[T]):
    """One thing per key. Adding to the end, and removing from there, takes no time to speak of."""

    def __init__(self) -> None:
        self._things: dict[int, T] = {}
        self._keys: list[int] = []  # sorted

    def __contains__(self, key: object) -> bool:
        return key in self._things

    def __len__(self) -> int:
        return len(self._keys)

    def add(self, key: int, thing: T) -> None:
        """Have a thing; one that is there under this key stays."""
        if key not in self._things:
            self._things[key] = thing
            bisect.insort(self._keys, key)

    def discard(self, key: int) -> None:
        """Have it no more, if it is there."""
        if self._things.pop(key, None) is not None:
            del self._keys[bisect.bisect_left(self._keys, key)]

    def __iter__(self) -> Iterator[T]:
        """Yield all, the smallest key first."""
        return (self._things[key] for key in self._keys)

    def before(self, key: int) -> Iterator[T]:
        """Yield what has smaller keys, the largest first. Who asks may remove the one that came last."""
        for number in range(bisect.bisect_left(self._keys, key) - 1, -1, -1):
            yield self._things[self._keys[number]]
