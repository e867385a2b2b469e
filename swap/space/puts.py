"""The order of puts: of several puts of one key in flight, the one started last wins.

Owns: which puts are in flight, which of them may still take effect, and which keys lack a put that failed.
Must not know: versions, transfers.
Next: `objects` asks here when a put is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping

from swap.errors import SwapError


class Put:
    """A put in flight.

    Attributes:
        key: of what.
        number: of those that were started.
        superseded: it has no effect any more: it is over, a later one took effect first, or the key was deleted.
    """

    __slots__ = ("key", "number", "superseded")

    def __init__(self, key: Hashable, number: int) -> None:
        self.key = key
        self.number = number
        self.superseded = False


class PutOrder:
    """Puts in flight by key. Not thread-safe: the store's lock is held around every call."""

    def __init__(self, *, keep_failures: bool) -> None:
        """Start with none.

        Args:
            keep_failures: remember keys whose put failed.
        """
        self._keep_failures = keep_failures
        self._pending: dict[Hashable, list[Put]] = {}
        self._started = 0
        self._failed: dict[Hashable, SwapError] = {}
        self._failed_number: dict[Hashable, int] = {}  # of the last put that failed, or was started before it did

    def __contains__(self, key: object) -> bool:
        """Tell whether a put of `key` is in flight."""
        return key in self._pending

    @property
    def failed(self) -> Mapping[Hashable, SwapError]:
        """Keys whose last put failed and was neither repeated nor undone since."""
        return self._failed

    def begin(self, key: Hashable) -> Put:
        """Note a put that has been started after all others."""
        self._started += 1
        put = Put(key, self._started)
        self._pending.setdefault(key, []).append(put)
        return put

    def end(self, put: Put, error: SwapError | None) -> None:
        """Note that a put is over, and has taken effect unless it failed. May be repeated after an interrupt."""
        if put.superseded:
            return
        pending = self._pending[put.key]
        later_failed = put.number <= self._failed_number.get(put.key, 0)  # then that one is lacking still
        if error is None:
            if not later_failed:
                self._forget_failure(put.key)
            over = pending[: pending.index(put) + 1]  # what was started before must not overwrite it later
        else:
            if self._keep_failures and not later_failed:
                self._failed[put.key], self._failed_number[put.key] = error, put.number
            over = [put]
        for each in over:
            each.superseded = True
        pending[:] = [each for each in pending if not each.superseded]
        if not pending:
            del self._pending[put.key]

    def fail(self, keys: Iterable[Hashable], error: SwapError) -> None:
        """The bytes of puts of `keys` that took effect, and of those in flight, turned out not to be safe.

        One that is started from now on helps.
        """
        for key in [*keys, *self._pending]:
            self._failed[key], self._failed_number[key] = error, self._started

    def forget(self, key: Hashable) -> None:
        """No put of `key` that is in flight takes effect, and a failed one is of no interest."""
        for put in self._pending.pop(key, []):
            put.superseded = True
        self._forget_failure(key)

    def forget_all(self) -> None:
        """`forget` every key."""
        for key in [*self._pending, *self._failed]:
            self.forget(key)

    def _forget_failure(self, key: Hashable) -> None:
        self._failed.pop(key, None)
        self._failed_number.pop(key, None)
