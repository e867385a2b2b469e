"""What lives on NVMe as it is at one moment, readable while training goes on.

Owns the names that the content has in the store at that moment, and the snapshot that keeps its extents: updates write
to fresh ones. What lives in memory is changed in place, so it is not among it. Reading yields to all that training
reads and writes. Next: :mod:`offload.checkpoint.copying` reads it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator

from offload.memory.budget import Tier
from offload.memory.transfer import Ticket
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.shards.copies import chunk_key
from offload.shards.shard import Shard, State
from offload.shards.tiers import Tiers
from swap import Priority, Snapshot

Key = tuple[int, str, int]


class Held:
    """Parameters and states on NVMe as of one moment: a context manager that lets go of them at its end.

    The snapshot is all that it has of the engine: it is read in another thread.
    """

    def __init__(self, tiers: Tiers) -> None:
        """Hold what is at home on NVMe now; no update may be under way."""
        self._plan = tiers.plan
        self._keys: dict[tuple[int, Role], dict[int, Key]] = {}  # by number of the chunk
        for unit in tiers.units:
            for roles in ((Role.PARAM,), STATE_ROLES):
                shards = [shard for role in roles if (shard := tiers.copies.get(unit.index, role)) is not None]
                if shards and all(map(_is_stored, shards)):
                    chunks = self._plan.chunks(unit, shards[0].role)
                    keys = {number: chunk_key(shards[0], number) for number, _, _ in chunks}
                    self._keys |= {(unit.index, shard.role): keys for shard in shards}
        names = {key for keys in self._keys.values() for key in keys.values()}
        self._snapshot: Snapshot | None = tiers.copies.require_store().snapshot(names) if names else None
        self._released = threading.Event()

    def has(self, unit: Unit, role: Role) -> bool:
        """Tell whether a unit's content in a role is held."""
        return (unit.index, role) in self._keys

    @property
    def any(self) -> bool:
        """Whether anything is held."""
        return bool(self._keys)

    def changing_bytes(self, units: Iterable[Unit]) -> int:
        """Return the bytes on NVMe that stay in use when training has written `units` anew."""
        request, numel = self._plan.request, self._plan.chunk_numel
        return sum(
            request.record_bytes(unit, roles, numel)
            for unit in units
            for roles in ((Role.PARAM,), STATE_ROLES)
            if any(self.has(unit, role) for role in roles)
        )

    def chunks(self, unit: Unit) -> list[tuple[int, int]]:
        """Return the elements of a unit's chunks."""
        return unit.chunks(self._plan.chunk_numel)

    def records(self, unit: Unit, number: int, begin: int, end: int) -> Iterator[tuple[Key, dict[Role, int], int]]:
        """Yield key, the offset of each role, and bytes of each record of chunk `number`, elements [begin, end).

        Of several ranks, the chunk is one that this rank keeps.
        """
        for roles in ((Role.PARAM,), STATE_ROLES):
            offsets: dict[Role, int] = {}
            size = 0
            for role in roles:
                if self.has(unit, role):
                    offsets[role] = size
                    size += self._plan.chunk_bytes(unit, role, end - begin)
            if offsets:
                yield self._keys[unit.index, next(iter(offsets))][number], offsets, size

    def read(self, key: Key, offset: int, address: int, size_bytes: int) -> Ticket:
        """Start reading a part of a record to host `address`; offset and address are whole pages.

        Raises:
            swap.SwapError: the store is closed.
        """
        assert self._snapshot is not None
        return self._snapshot.get(key, address, size_bytes, offset=offset, priority=Priority.BACKGROUND)

    def release(self) -> None:
        """Let go of everything. Idempotent; in any thread."""
        if self._snapshot is not None:
            self._snapshot.release()
        self._released.set()

    def await_release(self) -> None:
        """Wait until it is let go of."""
        self._released.wait()

    @property
    def released(self) -> bool:
        """Whether it was let go of."""
        return self._released.is_set()

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()


def _is_stored(shard: Shard) -> bool:
    return shard.home is Tier.NVME and shard.state not in (State.EMPTY, State.FAILED)
