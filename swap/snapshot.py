"""A mapping of a store as it was at one moment, readable whatever happens to the store afterwards.

Owns: the versions it holds, until it is released.
Must not know: how they came to be.
Next: `store.SwapStore.snapshot` makes one.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from types import TracebackType
from typing import Protocol

from swap.space.mapping import Version
from swap.transfers import StoreTicket


class ReadVersion(Protocol):
    """How a snapshot reads."""

    def __call__(
        self, key: Hashable, version: Version, address: int, length: int, *, offset: int, urgent: bool
    ) -> StoreTicket:
        """Start reading a range of a version; see `SwapStore.get`."""


class Snapshot:
    """The committed mapping of a store at one moment. A context manager."""

    def __init__(
        self,
        versions: Mapping[Hashable, Version],
        read: ReadVersion,
        release: Callable[[Mapping[Hashable, Version]], None],
    ) -> None:
        """Take over the holds on `versions`.

        Args:
            versions: by key.
            read: starts a read.
            release: gives the holds back.
        """
        self._versions = versions
        self._read = read
        self._release = release

    def get(self, key: Hashable, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> StoreTicket:
        """Start reading; as `SwapStore.get`, but of this moment.

        Raises:
            KeyError: the key had no version then, or the snapshot is released.
            ValueError: not aligned, or the range is not inside the object.
            SwapError: the store is closed or belongs to the parent process.
        """
        return self._read(key, self._version(key), address, length, offset=offset, urgent=urgent)

    def length_of(self, key: Hashable) -> int:
        """Length in bytes, rounded up to the alignment.

        Raises:
            KeyError: the key had no version then, or the snapshot is released.
        """
        return self._version(key).length

    def keys(self) -> list[Hashable]:
        """Keys that had a version."""
        return list(self._versions)

    def __contains__(self, key: Hashable) -> bool:
        return key in self._versions

    def __len__(self) -> int:
        return len(self._versions)

    def release(self) -> None:
        """Let go of the extents; idempotent. Reads in flight still succeed."""
        versions, self._versions = self._versions, {}
        self._release(versions)

    def __enter__(self) -> Snapshot:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.release()

    def _version(self, key: Hashable) -> Version:
        version = self._versions.get(key)
        if version is None:
            raise KeyError(f"{key!r}: no such object in the snapshot")
        return version
