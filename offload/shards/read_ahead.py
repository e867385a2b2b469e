"""States that the next forward's first updates need, read while backward computes.

If a step clips, its factor is known only when backward has ended: no update can be made before. Nobody uses the staging
buffers in such a backward, and the drive has little to do. So records of states are read into them, in the order in
which the next forward uses their units. The step's pipeline then takes these buffers over as slots. Nothing is changed
by it: what is read is content, which stays as it is until its update. Where updates are made during backward, the same
is done at its end for units that are left.

Owns which records are on their way or here, and in which buffers, until somebody takes them over or they are dropped.
It knows neither norms nor hyper-parameters. Next: :mod:`offload.shards.manager` says when, :mod:`offload.shards.stream`
takes the buffers over.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable, Container, Iterable, Iterator

from offload.memory.budget import Tier
from offload.memory.transfer import Ticket
from offload.planning.roles import STATE_ROLES, Role
from offload.shards.copies import chunk_key
from offload.shards.shard import Shard, State
from offload.shards.tiers import Tiers
from offload.sizes import whole_pages

logger = logging.getLogger(__name__)

FEWEST = 4  # records that are on their way at the beginning: the parameters that backward needs shall not come behind


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """The states of one chunk, in a slot of staging.

    Attributes:
        slot: its address.
        address: of the states, in it.
        ticket: of the read.
    """

    slot: int
    address: int
    ticket: Ticket

    def settle(self, deadline_s: float) -> None:
        """Wait until nothing comes to the slot any more, whatever became of the read.

        Raises:
            TimeoutError: the drive hangs, and may still write to the slot.
        """
        try:
            self.ticket.wait(deadline_s)
        except Exception:
            if not self.ticket.done():
                raise


@dataclasses.dataclass(frozen=True, slots=True)
class _Wanted:
    """A record that may be read."""

    shard: Shard  # the first role of it
    number: int
    offset: int  # of the states in the slot
    size_bytes: int


class ReadAhead:
    """Records that come before the step that uses them. See the module's text."""

    def __init__(self, tiers: Tiers, safe_point: contextlib.AbstractContextManager[object]) -> None:
        """Begin with none; `safe_point` hands Ctrl-C on at its end."""
        self._tiers = tiers
        self._safe_point = safe_point
        self._records: dict[tuple[int, int], Record] = {}
        self._slots: list[int] = []  # that are free
        self._coming: Iterator[_Wanted | None] | None = None
        self._trained = sum(unit.trainable for unit in tiers.units)
        slots = len(tiers.staging) - tiers.plan.slots_beside
        self._most = slots if tiers.shared is None and tiers.plan.ahead_bytes else 0
        self._beside = tiers.plan.beside_drive()

    def advance(self, order: Iterable[int], completed: int, slot: Callable[[], int | None]) -> None:
        """Start the reads whose turn it is. Waits for nothing; an I/O error is met by the update that needs the record.

        Args:
            order: units as the next forward uses them.
            completed: units whose gradients are there: reads are spread over backward.
            slot: gives a slot of staging until :meth:`take`, None where none is free.
        """
        due = min(FEWEST + self._most * completed // self._trained, self._most)
        if len(self._records) >= due or self._tiers.copies.is_any_late():  # which may still come to any slot
            return
        if self._coming is None:
            self._coming = self._wanted(order)
        with self._safe_point:
            try:
                while len(self._records) < due:
                    free = self._slots.pop() if self._slots else slot()
                    if free is None:
                        return
                    self._slots.append(free)
                    wanted = next(self._coming, None)
                    if wanted is None:
                        return
                    self._start(wanted, free)
                    self._slots.pop()
            except OSError as error:
                logger.warning("states ahead: %s", str(error))
                self._coming = iter(())

    def take(self, indices: Container[int]) -> dict[tuple[int, int], Record]:
        """Hand over what has been read of units `indices`, by unit and chunk, and drop the rest; no slot is kept."""
        taken = {key: record for key, record in self._records.items() if key[0] in indices}
        for key in taken:
            del self._records[key]
        self.drop(keep_slots=False)
        return taken

    def drop(self, *, keep_slots: bool = True) -> None:
        """Forget everything: somebody is about to change content, or needs the slots, for good or for a while.

        What is late does not keep anybody from that: whoever uses a slot next waits for it.
        """
        records, self._records, self._coming = list(self._records.values()), {}, None
        self._slots = [*self._slots, *(record.slot for record in records)] if keep_slots else []
        self._tiers.copies.wait_out([record.ticket for record in records])

    def _start(self, wanted: _Wanted, slot: int) -> None:
        store, address = self._tiers.copies.require_store(), slot + wanted.offset
        ticket = store.get(chunk_key(wanted.shard, wanted.number), address, wanted.size_bytes)
        self._records[wanted.shard.unit.index, wanted.number] = Record(slot, address, ticket)

    def _wanted(self, order: Iterable[int]) -> Iterator[_Wanted | None]:
        """Yield records in order, up to the first unit that needs slots for something that cannot be read yet.

        None, as long as the next one is on its way home.
        """
        tiers = self._tiers
        for unit in (tiers.units[index] for index in order):
            if not unit.trainable or tiers.plan.on_device(unit) or unit.index in self._beside:
                continue
            found = (tiers.copies.get(unit.index, role) for role in STATE_ROLES)
            states = [shard for shard in found if shard is not None and shard.home is Tier.NVME]
            passes = not tiers.device.addressable and tiers.param(unit.index).home is not Tier.HOST  # param, too
            gradient_passes = tiers.plan.home(unit, Role.GRAD) is Tier.NVME
            if not states and not passes and not gradient_passes:
                continue
            while states and states[0].writing:
                yield None
            if not states or gradient_passes or states[0].state is not State.STORED:
                return
            for number, begin, end in tiers.plan.chunks(unit, Role.GRAD):
                size = sum(tiers.chunk_bytes(unit, shard.role, begin, end) for shard in states)
                offset = tiers.chunk_bytes(unit, Role.PARAM, begin, end) if passes else 0
                yield _Wanted(states[0], number, offset, whole_pages(size))
