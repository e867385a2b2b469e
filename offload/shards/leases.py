"""Access to shards chunk by chunk, wherever they are: what :mod:`offload.shards.stream` runs over.

Owns the leases of one stream and where the bytes of what it has open are. A working copy that the host can address
stands for its home; elsewhere the home is read and overwritten. Knows nothing of the order in which chunks come.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Container, Sequence

from offload.errors import StateError
from offload.memory.budget import Tier
from offload.memory.transfer import Ticket, TicketGroup
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.schedule import Schedules
from offload.planning.units import Unit
from offload.shards.copies import Lease, WriteLease, chunk_key
from offload.shards.shard import Event, Shard, State
from offload.shards.tiers import Tiers


@dataclasses.dataclass(frozen=True, slots=True)
class Access:
    """Addresses of one unit's shards while they are open, by role; absent where the bytes come through staging.

    Attributes:
        addresses: start of each directly addressable shard.
        fresh_states: the states have no content yet: they count as zero moments and a master equal to the parameter.
        write_through: a working copy that must be copied to this host address after it was changed, or 0.
    """

    addresses: dict[Role, int]
    fresh_states: bool
    write_through: int = 0


class Leases:
    """The shards that one stream has open."""

    def __init__(self, tiers: Tiers, schedules: Schedules | None = None) -> None:
        """Begin with none.

        Args:
            tiers: the shards.
            schedules: by which PARAM that is written and passes through staging comes to the device as well, if there
                is room; None where it is read from its home again.
        """
        self._tiers = tiers
        self._schedules = schedules
        self._copies = tiers.copies
        self._bound, self._working = tiers.bound, tiers.working
        self._reading: list[Lease] = []
        self._writing: list[WriteLease] = []

    def open(self, unit: Unit, *, reads: frozenset[Role], writes: frozenset[Role], on_device: bool = False) -> Access:
        """Lease the shards of `unit` until :meth:`close` or :meth:`abandon`.

        PARAM, GRAD and the state roles may be asked for; state roles go together. With `on_device`, all of the unit is
        at home on a device, whose addresses are wanted; else those of the host.

        Raises:
            StateError: content that is to be read was lost, or has never been there.
        """
        addresses: dict[Role, int] = {}
        write_through = 0
        fresh = False
        for role in reads | writes:
            shard = self._copies.get(unit.index, role)
            if shard is None:
                continue
            if role is Role.PARAM:
                self._copies.forgive(shard)
            if shard.state is State.FAILED and role in reads:
                raise StateError(
                    f"{role.value} of {unit.name}: expected content but it was lost by a failed step or transfer; "
                    "load it again"
                )
            if role is Role.PARAM:
                if shard.state is State.EMPTY and role in reads:
                    raise StateError(f"parameters of {unit.name}: expected content but nothing was loaded yet")
                if not on_device:
                    write_through = self._open_param(shard, role in writes, addresses)
                    continue
            if shard.home_buffer is not None:
                if on_device or self._is_addressable(shard):
                    addresses[role] = shard.home_buffer.address
            elif role is Role.GRAD:
                self._copies.wait(shard)
                if shard.work_buffer is not None:
                    addresses[role] = shard.work_buffer.address
            if role in STATE_ROLES:
                fresh = shard.state in (State.EMPTY, State.FAILED)
            if role in writes:
                self._writing.append(self._copies.lease_to_write(shard, Event.OVERWRITE_HOME))
            elif shard.state is not State.EMPTY:
                self._reading.append(self._copies.lease(shard))
        return Access(addresses, fresh, write_through)

    def _is_addressable(self, shard: Shard) -> bool:
        return shard.home is Tier.HOST or self._tiers.device.addressable

    def _open_param(self, shard: Shard, write: bool, addresses: dict[Role, int]) -> int:
        """Lease PARAM; returns the home address to write a changed working copy through to."""
        home = shard.home_buffer
        addressable = self._tiers.device.addressable
        if shard.state is State.FETCHING and (write or not shard.is_sliced):
            self._working.wait_for_prefetch(shard)
        if shard.state is State.RESIDENT and write and (shard.is_sliced or not addressable):
            self._working.refuse_borrowed(shard)
            self._working.evict(shard)
        if shard.state is State.RESIDENT and addressable and not shard.is_sliced:
            assert shard.work_buffer is not None
            addresses[Role.PARAM] = shard.work_buffer.address
            if not write:
                self._reading.append(self._copies.lease(shard))
                return 0
            self._writing.append(self._copies.lease_to_write(shard, Event.MODIFY))
            return home.address if home is not None else 0
        if home is not None and self._is_addressable(shard):
            addresses[Role.PARAM] = home.address
            if write:
                self._tiers.mover.await_source(home.address)
        if write and self._begins_to_fill(shard):
            self._writing.append(self._copies.lease_to_write(shard, Event.MODIFY))
        elif write:
            self._writing.append(self._copies.lease_to_write(shard, Event.OVERWRITE_HOME))
        else:
            self._reading.append(self._copies.lease(shard))
        return 0

    def _begins_to_fill(self, shard: Shard) -> bool:
        """Let PARAM that is at home on NVMe have a working copy to be filled beside its home, if there is room."""
        if self._schedules is None or shard.home is not Tier.NVME or self._tiers.device.addressable:
            return False
        return shard.state is State.STORED and self._working.begin_to_fill(shard, self._schedules.current)

    def send_param(self, unit: Unit) -> None:
        """Let what is in the spare memory of PARAM, whose home is the device, be its content there.

        Compute that is given to the device from now on sees it.
        """
        shard = self._copies.of(unit.index, Role.PARAM)
        assert not self._writing, shard.describe()
        self._writing.append(self._copies.lease_to_write(shard, Event.OVERWRITE_HOME))
        try:
            self.send_spare(unit)
        except BaseException:
            self.abandon({unit.index})
            raise
        self.close()

    def send_spare(self, unit: Unit) -> None:
        """Send what is in the spare memory of PARAM, which is leased, as :meth:`send_param`: all of it at once.

        Nothing reads the old content any more: compute was waited for, and could not see it since.
        """
        mover, shard = self._tiers.mover, self._copies.of(unit.index, Role.PARAM)
        home, spare = shard.home_buffer, shard.spare_buffer
        assert home is not None and spare is not None, shard.describe()
        mover.fetch_host(spare.address, home, shard.size_bytes, urgent=True).wait(self._tiers.deadline_s)
        mover.use(home)

    def close(self) -> None:
        """Return the leases: what was written is now the shards' content."""
        self.hand_over(frozenset(Role), ())
        self.stop_reading()

    def hand_over(self, roles: Container[Role], leaving: Sequence[Ticket]) -> None:
        """Return the leases on what was written in `roles`; `leaving` still take PARAM's working copy home."""
        for lease in [lease for lease in self._writing if lease.shard.role in roles]:
            lease.close()
            if lease.shard.role is Role.PARAM:
                self._hand_over_param(lease.shard, leaving)
            self._writing.remove(lease)

    def _hand_over_param(self, shard: Shard, leaving: Sequence[Ticket]) -> None:
        self._copies.renew(shard)
        if shard.state is State.DIRTY and leaving:
            self._copies.flushing(shard, leaving)
        elif shard.state is State.DIRTY:
            self._copies.change(shard, Event.FLUSH, Event.FLUSHED)
        if shard.stays and shard.unit.index not in self._bound:
            assert shard.home_buffer is not None
            self._bound.bind(shard.unit, shard.home_buffer)

    def abandon(self, written: Container[int]) -> None:
        """Return the leases after an exception.

        Args:
            written: units that may have been written to: what was open for writing of them is lost now. Others are as
                they were.
        """
        self.stop_reading()
        for lease in self._writing:
            lease.close()
            shard, before = lease.shard, lease.before
            if shard.unit.index in written or before is State.FAILED:
                self._copies.change(shard, Event.ABANDON)
                if shard.role is Role.PARAM:
                    self._copies.renew(shard)
                    if shard.unit.index in self._bound:
                        self._working.unbind_lost(shard)
            elif before is State.EMPTY:
                self._copies.change(shard, Event.DISCARD)
            elif before in (State.RESIDENT, State.DIRTY):
                self._copies.change(shard, Event.FLUSH, Event.FLUSHED)
                if before is State.DIRTY:  # a working copy that nothing has come to
                    self._working.evict(shard)
        self._writing.clear()

    def stop_reading(self) -> None:
        """Return the leases on what was only read."""
        for lease in self._reading:
            lease.close()
        self._reading.clear()

    # --- chunks that come through staging ---------------------------------------------------------------------------

    def read_chunk(
        self,
        unit: Unit,
        role: Role,
        number: int,
        address: int,
        size_bytes: int,
        *,
        urgent: bool = False,
        settled: bool = False,
    ) -> Ticket | None:
        """Start bringing chunk `number` to host `address`, before what is not urgent; None if it was never written.

        If PARAM is `settled`, nothing that the device was given still writes it. On NVMe, the state roles are one
        record per chunk, named by :attr:`Role.MASTER`.
        """
        shard, there = self._record(unit, role), self._tiers.gradients_there
        if role is Role.GRAD and there is not None and unit.index in there:
            begin, end = unit.chunks(self._tiers.plan.chunk_numel)[number]
            itemsize, download = self._tiers.gradients.dtype(unit).itemsize, self._tiers.mover.download
            parts = there.parts(unit, begin, end)
            return TicketGroup(
                [download(source, address + (at - begin) * itemsize, n * itemsize) for at, n, source in parts]
            )
        if shard.home is Tier.DEVICE:
            source = self._device_address(shard, number)
            return self._tiers.mover.download(source, address, size_bytes, settled=settled and role is Role.PARAM)
        store, key = self._copies.require_store(), chunk_key(shard, number)
        return store.get(key, address, size_bytes, urgent=urgent) if key in store else None

    def write_chunk(
        self,
        unit: Unit,
        role: Role,
        number: int,
        address: int,
        size_bytes: int,
        *,
        aside: bool = False,
        urgent: bool = False,
    ) -> Ticket:
        """Start writing chunk `number` from host `address` to its home, or beside what it has there.

        It comes before what is not `urgent`, which may be said of a home on NVMe.
        """
        shard = self._record(unit, role)
        if shard.home is Tier.DEVICE:
            return self._tiers.mover.upload(address, self._device_address(shard, number), size_bytes)
        return self._copies.require_store().put(
            chunk_key(shard, number, aside=aside), address, size_bytes, urgent=urgent
        )

    def write_pieces(
        self, unit: Unit, number: int, pieces: Sequence[tuple[Role, int, int]], *, aside: bool
    ) -> list[Ticket]:
        """Start writing parts of chunk `number` to their homes on NVMe, as :meth:`write_chunk`: all or none.

        Args:
            unit: of the chunk.
            number: of the chunk.
            pieces: role, host address and bytes of each.
            aside: beside what it has there.

        Returns:
            A ticket per piece.
        """
        keys = [chunk_key(self._record(unit, role), number, aside=aside) for role, _, _ in pieces]
        items = [(key, address, size) for key, (_, address, size) in zip(keys, pieces, strict=True)]
        return list(self._copies.require_store().put_many(items))

    def _record(self, unit: Unit, role: Role) -> Shard:
        if role is not Role.MASTER:
            return self._copies.of(unit.index, role)
        return next(shard for state in STATE_ROLES if (shard := self._copies.get(unit.index, state)) is not None)

    def _device_address(self, shard: Shard, number: int) -> int:
        """Return the address on the device of a chunk of a shard whose home is there."""
        assert shard.home_buffer is not None
        begin = shard.unit.chunks(self._tiers.plan.chunk_numel)[number][0]
        return shard.home_buffer.address + self._tiers.offset_bytes(shard.unit, shard.role, begin)
