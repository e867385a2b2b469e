"""What ``optimizer.state`` is while an engine keeps the states: an empty mapping that refuses to read or write one.

Owns the refusal. Libraries ask whether there is anything and iterate over it: they find nothing, and go on. Must not
know where states are. Next: :mod:`offload.optimizer` and :mod:`offload.optim.takeover`, whose optimizers have one each.
"""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping
from typing import Any, NoReturn

import torch

from offload.errors import StateError


def refuse(call: str) -> NoReturn:
    """Refuse to read or write states here.

    Raises:
        StateError: always.
    """
    raise StateError(
        "optimizer.state: expected state_dict(), which gathers the states from where the engine keeps them, but got "
        f"{call}; to change states, edit what state_dict() returns and pass it to load_state_dict()"
    )


class OffloadedStates(MutableMapping[Any, Any]):
    """Stands for the states of an optimizer, which the engine keeps elsewhere.

    Length, truth, ``in``, iteration, ``keys()`` and ``items()`` are those of an empty mapping. It is no dict: what is
    written in C would pass by a dict's methods, or call them where nothing may be refused (torch's profiler).

    Raises:
        StateError: from everything that reads a state or writes one.
    """

    __slots__ = ()

    def __len__(self) -> int:
        """Return 0."""
        return 0

    def __iter__(self) -> Iterator[Any]:
        """Return an iterator over nothing."""
        return iter(())

    def __contains__(self, key: object) -> bool:
        """Return False."""
        return False

    def __repr__(self) -> str:
        """Say where the states are found."""
        return "<states that the engine keeps: use state_dict()>"

    def __getitem__(self, key: Any) -> NoReturn:
        """Refuse."""
        refuse("state[parameter]")

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        """Refuse."""
        refuse("state[parameter] = ...")

    def __delitem__(self, key: Any) -> NoReturn:
        """Refuse."""
        refuse("del state[parameter]")

    def get(self, key: Any, default: Any = None) -> Any:
        """Refuse a parameter; return `default` for any other key: no such state is kept."""
        if isinstance(key, torch.Tensor):
            refuse("state.get(parameter)")
        return default

    def values(self) -> NoReturn:
        """Refuse."""
        refuse("state.values()")

    def setdefault(self, key: Any, default: Any = None) -> NoReturn:
        """Refuse."""
        refuse("state.setdefault(...)")

    def pop(self, key: Any, default: Any = None) -> NoReturn:
        """Refuse."""
        refuse("state.pop(...)")

    def popitem(self) -> NoReturn:
        """Refuse."""
        refuse("state.popitem()")

    def clear(self) -> NoReturn:
        """Refuse."""
        refuse("state.clear()")

    def update(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse."""
        refuse("state.update(...)")

    def __ior__(self, other: Any) -> NoReturn:
        """Refuse."""
        refuse("state |= ...")

    def __or__(self, other: Any) -> NoReturn:
        """Refuse."""
        refuse("state | ...")

    def copy(self) -> NoReturn:
        """Refuse."""
        refuse("state.copy()")

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Refuse."""
        refuse("a copy or a pickle of it")
