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

    __slots__ = ("key", "superseded")

    def __init__(self, key: Hashable) -> None:
        self.key = key
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
        self._failed: dict[Hashable, SwapError] = {}

    def __contains__(self, key: object) -> bool:
        """Tell whether a put of `key` is in flight."""
        return key in self._pending

    @property
    def failed(self) -> Mapping[Hashable, SwapError]:
        """Keys whose last put failed and was neither repeated nor undone since."""
        return self._failed

    def begin(self, key: Hashable) -> Put:
        """Note a put that has been started after all others."""
        put = Put(key)
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
            self._failed.pop(put.key, None)
        else:
            del pending[at]
            if self._keep_failures:
                self._failed[put.key] = error
        if not pending:
            del self._pending[put.key]
        return error is None

    def fail(self, key: Hashable, error: SwapError) -> None:
        """The bytes of a put that took effect turned out not to be safe."""
        self._failed[key] = error

    def forget(self, key: Hashable) -> None:
        """No put of `key` that is in flight takes effect, and a failed one is of no interest."""
        for put in self._pending.pop(key, []):
            put.superseded = True
        self._failed.pop(key, None)

    def forget_all(self) -> None:
        """`forget` every key."""
        for key in [*self._pending, *self._failed]:
            self.forget(key)
