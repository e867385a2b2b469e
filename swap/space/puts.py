"""The order of puts: of several puts of one key in flight, the one started last wins.

Owns: which puts are in flight, which of them may still take effect, and which keys lack a put that failed.
Must not know: versions, transfers.
Next: `objects` asks here when a put is over.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping

from swap.errors import SwapError


class Put:
    """A put in flight; `superseded` when a later put of the key took effect first, or the key was deleted."""

    __slots__ = ("key", "number", "superseded")

    def __init__(self, key: Hashable, number: int) -> None:
        self.key = key
        self.number = number  # of those that were started
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

    def end(self, put: Put, error: SwapError | None) -> bool:
        """Note that a put is over; tell whether it takes effect."""
        if put.superseded:
            return False
        pending = self._pending[put.key]
        at = pending.index(put)
        if error is None:  # what was started before must not overwrite it later
            for earlier in pending[:at]:
                earlier.superseded = True
            del pending[: at + 1]
            if put.number > self._failed_number.get(put.key, 0):  # else a later one is lacking still
                self._forget_failure(put.key)
        else:
            del pending[at]
            if self._keep_failures and put.number > self._failed_number.get(put.key, 0):
                self._failed[put.key], self._failed_number[put.key] = error, put.number
        if not pending:
            del self._pending[put.key]
        return error is None

    def fail(self, key: Hashable, error: SwapError) -> None:
        """The bytes of a put that took effect turned out not to be safe: one that is started from now on helps."""
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
