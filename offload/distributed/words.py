"""Words that ranks leave for each other in the store of the process group, where no collective can reach them.

Owns the names of the words: that a rank has failed, that somebody asks where all are, and where each of them waits. A
word is seen by whoever looks. Next: :mod:`offload.distributed.processes` looks while it waits.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any

from offload.distributed.records import by_value, named, told
from offload.errors import RanksError

_FAILED, _ALARM = "failed", "alarm"


class Words:
    """The words of one set of ranks."""

    def __init__(self, store: Any, rank: int, world: int) -> None:
        """Begin.

        Args:
            store: a ``torch.distributed.Store`` that only these ranks use.
            rank: of this process.
            world: how many there are.
        """
        self._store = store
        self._rank = rank
        self._world = world

    def meet(self, deadline_s: float, shape: str) -> None:
        """Say that this rank is here, with a `shape`, and wait until all are; if not all come, take it back.

        Raises:
            RanksError: one of them has not come after `deadline_s`.
        """
        here = f"here/{self._rank}"
        self._store.set(here, shape)
        try:
            self._await_all(deadline_s)
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the store is gone
                self._store.delete_key(here)
            raise

    def _await_all(self, deadline_s: float) -> None:
        until, came = time.monotonic() + deadline_s, set[int]()
        while True:
            here = {rank for rank in range(self._world) if self._store.check([f"here/{rank}"])}
            came |= here
            if len(here) == self._world:
                return
            if time.monotonic() > until:
                silent = sorted(set(range(self._world)) - (came if len(came) < self._world else here))
                raise RanksError(
                    f"ranks: expected all {self._world} to begin an engine within {deadline_s:g} s but got no word of "
                    f"{named(silent)}; make the engine on all ranks, see why they are late, or pass a longer timeout "
                    "to init_process_group"
                )
            time.sleep(0.01)

    def compare_shapes(self) -> None:
        """Compare the shapes of all ranks, which are here: others would wait for connections that do not come.

        Raises:
            RanksError: they are not the same.
        """
        shapes = by_value(self._store.get(f"here/{rank}").decode() for rank in range(self._world))
        if len(shapes) > 1:
            raise RanksError(f"ranks: expected one shape but got {told(shapes)}; pass the same group on all ranks")

    def failure(self) -> str | None:
        """Return what has been said to have failed, if anything."""
        return str(self._store.get(_FAILED).decode()) if self._store.check([_FAILED]) else None

    def is_alarmed(self) -> bool:
        """Tell whether a rank has failed, or asks where all are."""
        return bool(self._store.check([_ALARM]))

    def fail(self, text: str) -> str:
        """Say that these ranks have failed; returns what was said first, which is what all of them raise."""
        found = self._store.compare_set(_FAILED, "", text)
        self._store.set(_ALARM, "1")
        return str(found.decode())

    def ask(self, where: str) -> None:
        """Ask where all are, and say where this one is."""
        self.answer(where)
        self._store.set(_ALARM, "1")

    def answer(self, where: str) -> None:
        """Say where this rank waits."""
        self._store.set(f"where/{self._rank}", where)

    def leave(self) -> None:
        """Say that this rank has closed its engine."""
        self._store.set(f"left/{self._rank}", "1")

    def left(self) -> list[int]:
        """Return the ranks that have closed their engines."""
        return [rank for rank in range(self._world) if self._store.check([f"left/{rank}"])]

    def places(self) -> dict[int, str]:
        """Return where ranks wait that have said so."""
        found = {}
        for rank in range(self._world):
            if self._store.check([f"where/{rank}"]):
                found[rank] = str(self._store.get(f"where/{rank}").decode())
        return found
