"""Runs over shards chunk by chunk, wherever they live: reads, work and writes as a pipeline.

Owns the pipeline over the staging buffers: while one chunk is computed on, the next ones are arriving from NVMe and the
previous ones are leaving, so both queues of the drive are busy at once. What lives in memory is used in place, and a
unit of which nothing moves is one chunk. The optimizer step, checkpoints and loading are all visits of this one stream.
Knows no hyper-parameters.
"""

from __future__ import annotations

import ctypes
import dataclasses
import sys
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future

from offload.kernels import cpu_adam
from offload.kernels.on_device import Stepper
from offload.labels import labelled
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.memory.transfer import Ticket
from offload.planning.plan import LARGE_CHUNK_NUMEL, STAGING_SLOTS
from offload.planning.roles import STATE_ROLES, Role, States
from offload.planning.units import Unit
from offload.shards.leases import Access, Leases
from offload.shards.read_ahead import Record
from offload.shards.shard import Shard, State
from offload.shards.tiers import Tiers
from offload.shards.worker import settle
from offload.sizes import whole_pages

ALL_STATES = frozenset(STATE_ROLES)


@dataclasses.dataclass(slots=True)
class Chunk:
    """Elements [begin, end) of a unit, with the host address of each role's first element."""

    unit: Unit
    number: int
    begin: int
    end: int
    addresses: dict[Role, int]
    access: Access
    leases: Leases
    reading: list[Ticket] = dataclasses.field(default_factory=list)
    writing: list[Ticket] = dataclasses.field(default_factory=list)
    writing_param: list[Ticket] = dataclasses.field(default_factory=list)  # of `writing`
    staged: frozenset[Role] = frozenset()
    kernels: Stepper = cpu_adam  # what steps on its addresses
    sources: dict[Role, int] = dataclasses.field(default_factory=dict)  # of the content, where that stays as it is
    spare: frozenset[Role] = frozenset()  # in spare memory, where they belong
    ahead: Record | None = None  # of its states, which was read before it was started
    task: Future[None] | None = None  # its arithmetic, once a worker has it

    def before(self) -> Chunk:
        """Return the chunk as it was before a visit that works beside the content: with the old content's addresses."""
        return dataclasses.replace(self, addresses=self.addresses | self.sources, sources={})

    @property
    def numel(self) -> int:
        """Elements in the chunk."""
        return self.end - self.begin

    def at(self, role: Role, element: int, itemsize: int) -> int:
        """Return the address of unit element `element` in `role`, whose elements have `itemsize` bytes."""
        return self.addresses[role] + (element - self.begin) * itemsize

    def states_at(self, element: int, states: States) -> tuple[tuple[int, ...], int]:
        """Return the addresses of the optimizer's states, and of the scales of 8-bit ones (else 0), at `element`."""
        found = tuple(self.at(role, element, states.kind.itemsize) for role, _ in states.roles())
        scales = self.addresses.get(Role.SCALES)
        return found, 0 if scales is None else scales + states.kind.units_bytes(element - self.begin)


def copy_sources(tiers: Tiers, chunk: Chunk) -> None:
    """Copy what lies elsewhere to the chunk's addresses, to be worked on in place."""
    for role, source in chunk.sources.items():
        _copy(source, chunk.addresses[role], tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end))
    chunk.sources = {}


def _copy(source: int, target: int, size_bytes: int) -> None:
    """Copy whole words between host addresses, in the threads of the kernels."""
    word = cpu_adam.Dtype.FLOAT32
    cpu_adam.convert(source, word, target, word, size_bytes // word.itemsize)


def stream(
    tiers: Tiers,
    units: Sequence[Unit],
    visit: Callable[[Chunk], None],
    *,
    reads: frozenset[Role],
    writes: frozenset[Role] = frozenset(),
    widely: bool = False,
    span: tuple[int, int] | None = None,
    slices: bool = False,
) -> None:
    """Call `visit` for every chunk of `units`, in order, with the roles in `reads | writes` addressable.

    For :meth:`offload.shards.manager.Manager.stream`, which tells more: no update may be under way.
    """
    first, last = span or (0, sys.maxsize)
    pipeline = Pipeline(tiers, reads=reads, writes=writes)
    if widely and Role.GRAD not in reads | writes:
        pipeline.widen(tiers.gradients.idle())
    leases = Leases(tiers)
    written: set[int] = set()
    chunks: list[Chunk] = []
    try:
        for unit in units:
            if slices:
                first, last = tiers.plan.request.owned(unit, Role.GRAD)
            chunks += [chunk for chunk in pipeline.open(unit, leases) if chunk.begin < last and chunk.end > first]
        for chunk in chunks[: pipeline.ahead]:
            pipeline.start(chunk)
        for index, chunk in enumerate(chunks):
            if index + pipeline.ahead < len(chunks):
                pipeline.start(chunks[index + pipeline.ahead])
            for ticket in chunk.reading:
                ticket.wait(tiers.deadline_s)
            written.add(chunk.unit.index)
            pipeline.compute(chunk, visit)
            pipeline.write(chunk)
        for chunk in chunks:
            for ticket in chunk.writing:
                ticket.wait(tiers.deadline_s)
    except BaseException:
        come_to_rest(chunks, tiers)
        leases.abandon(written)
        raise
    leases.close()


def slots_of(tiers: Tiers) -> list[int]:
    """Return the addresses of the slots of staging."""
    return [buffer.address for buffer in tiers.staging]


def come_to_rest(chunks: Iterable[Chunk], tiers: Tiers) -> None:
    """Wait for what the chunks have in flight, whatever becomes of it: an error is on its way up.

    What does not end even so is left to whoever needs its memory.
    """
    chunks = list(chunks)
    for chunk in reversed(chunks):  # the last ones are those that a worker has not begun
        if chunk.task is not None:
            settle(chunk.task)
    tiers.copies.wait_out([ticket for chunk in chunks for ticket in (*chunk.reading, *chunk.writing)])


class Pipeline:
    """Slots of host memory, which chunks take in turn: started, worked on and gone in one order."""

    def __init__(
        self,
        tiers: Tiers,
        *,
        reads: frozenset[Role],
        writes: frozenset[Role] = frozenset(),
        aside: bool = False,
        updates: bool = False,
        slots: Sequence[int] | None = None,
        filled: Mapping[tuple[int, int], Record] | None = None,
        pieces: bool = False,
    ) -> None:
        """Prepare; `reads` and `writes` as in :func:`stream`, `slots` are addresses: all of staging, unless given.

        With `aside`, what is written goes beside the content, which stays as it is, and PARAM is not leased. PARAM and
        the states are at home on NVMe then, or have spare memory. Slots of `filled` have what was read before, by unit
        and chunk: the pipeline waits for these reads. With `pieces`, no chunk keeps others waiting for long.

        With `updates`, spare memory is nobody else's: PARAM that is at home on the device passes through it. What has
        written PARAM there is over: its gradient has come, or compute was waited for.
        """
        self._tiers = tiers
        self._aside = aside
        self._updates = updates
        self._pieces = pieces
        self._reads = reads
        self._writes = writes
        self._filled = dict(filled or {})  # until their chunks are started
        taken = {record.slot for record in self._filled.values()}
        self._staging = dict.fromkeys(slots_of(tiers) if slots is None else slots)
        self._free = deque(address for address in self._staging if address not in taken)  # slots that were never used
        self._is_wide = False
        self._taken: deque[tuple[Chunk, int]] = deque()  # chunks and their slots, the oldest first

    @property
    def ahead(self) -> int:
        """So many chunks may be started and not worked on: half of the slots, the others are being written."""
        return max(self._slots, STAGING_SLOTS) // 2

    @property
    def _slots(self) -> int:
        return len(self._free) + len(self._filled) + len(self._taken)

    def widen(self, buffers: Iterable[Buffer]) -> None:
        """Use host memory that is idle as further slots, as many as there may be."""
        plan = self._tiers.plan
        size = plan.staging_slot_bytes
        for begin, end in _joined(buffers) if size else ():
            for address in range(begin, end - size + 1, size):
                if self._slots < plan.most_slots:
                    self._free.append(address)
                    self._is_wide = True

    @property
    def staging(self) -> Collection[int]:
        """Its slots of staging."""
        return self._staging.keys()

    def add(self, slots: Sequence[int]) -> None:
        """Use these slots of staging, too."""
        self._staging |= dict.fromkeys(slots)
        self._free.extend(slots)

    def borrowed(self) -> list[Ticket]:
        """Return the writes that leave slots outside of staging; all that was started was worked on."""
        return [ticket for chunk, address in self._taken if address not in self._staging for ticket in chunk.writing]

    def narrow(self) -> None:
        """Have no slots outside of staging any more; nothing leaves them."""
        if not self._is_wide:
            return
        self._is_wide = False
        self._free = deque(address for address in self._free if address in self._staging)
        self._taken = deque((chunk, address) for chunk, address in self._taken if address in self._staging)

    def give(self, *, keep: int = 0) -> int | None:
        """Give a slot of staging away, if nothing is on its way from one; chunks have at least `keep` others."""
        if self._slots <= keep or self._tiers.copies.is_any_late():
            return None
        leaving = self.leaving()
        if leaving and all(ticket.done() for ticket in leaving):
            self._free.append(self._taken.popleft()[1])
        return self._free.popleft() if self._free else None

    def forget(self, chunks: Iterable[Chunk]) -> None:
        """Take the slots of chunks back that are undone and have come to rest; others keep their turn and their slots.

        A chunk that nobody counts any more must not stay in line: behind it, one that is still worked on would lose
        its slot too early.
        """
        gone = {id(chunk) for chunk in chunks}
        self._free.extend(address for chunk, address in self._taken if id(chunk) in gone)
        self._taken = deque((chunk, address) for chunk, address in self._taken if id(chunk) not in gone)

    def open(self, unit: Unit, leases: Leases) -> list[Chunk]:
        """Lease what is needed of a unit; returns its chunks."""
        param = self._tiers.param(unit.index)
        if self._has_spare(param):  # it was sent from there, or that was its home before the last step
            assert param.spare_buffer is not None
            self._tiers.mover.await_source(param.spare_buffer.address)
        if self._aside:
            access = leases.open(unit, reads=self._reads - {Role.PARAM}, writes=frozenset())
        else:
            access = leases.open(unit, reads=self._reads, writes=self._writes)
        spans = self._ranges(unit, access)
        return [Chunk(unit, number, begin, end, {}, access, leases) for number, begin, end in spans]

    def takes_slots(self, unit: Unit) -> bool:
        """Tell whether a unit's chunks wait for each other's slots.

        Beside a worker, those of which nothing moves do not: all may be worked on ahead. Elsewhere they take their
        turn, too: what is begun cannot leave the device.
        """
        if not self._tiers.worker.apart:
            return True
        if self._aside:
            return self._tiers.plan.aside_bytes(unit) > 0
        wanted = (self._tiers.copies.of(unit.index, role) for role in self._roles(unit))
        return any(shard.home is not Tier.HOST and not self._has_spare(shard) for shard in wanted)

    def _has_spare(self, shard: Shard) -> bool:
        """Tell whether a shard is worked on in its spare memory: beside its content, or PARAM if all else is there."""
        if shard.spare_buffer is None or self._aside:
            return shard.spare_buffer is not None
        in_memory = self._tiers.plan.homes[shard.unit.index].states is Tier.HOST
        return self._updates and shard.home is Tier.DEVICE and in_memory

    def _roles(self, unit: Unit) -> list[Role]:
        """Return the roles that the unit has of those that are visited."""
        return _roles(self._tiers, unit, self._reads | self._writes)

    def _ranges(self, unit: Unit, access: Access) -> list[tuple[int, int, int]]:
        """Return what is visited, with its number: all at once where everything has host memory of its own.

        With gradients that is what this rank owns. Without them it is all of the unit. States are there of what is
        owned. Aside, or with `pieces`, chunks that need no slots are large: the host begins each with as many calls.
        """
        plan, copies, roles = self._tiers.plan, self._tiers.copies, self._roles(unit)
        visited = Role.GRAD if Role.GRAD in roles else Role.PARAM
        begin, end = plan.request.owned(unit, visited)
        at_once = all(plan.request.owned(unit, role) == (begin, end) for role in roles if role is not Role.PARAM)
        for shard in (copies.of(unit.index, role) for role in roles):
            home = shard.home_buffer
            is_here = home is not None and access.addresses.get(shard.role) == home.address
            if not at_once or not (is_here or (self._has_spare(shard) and not self._aside)):
                chunks = plan.chunks(unit, visited)
                return _joined_chunks(chunks) if self._aside and not self.takes_slots(unit) else chunks
        return _joined_chunks(plan.chunks(unit, visited)) if self._pieces else [(0, begin, end)]

    def has_room(self, started: int) -> bool:
        """Tell whether one more chunk should be started, while `started` ones have not been worked on."""
        if self._tiers.staging and started >= self._slots:  # others have the rest
            return False
        if (self._free or self._filled) and not self._aside:  # aside, a better chunk may come before others are needed
            return True
        return started < self.ahead

    def leaving(self) -> list[Ticket]:
        """Return the writes that must be over before the next chunk can have a slot."""
        return self._taken[0][0].writing if self._taken and not (self._free or self._filled) else []

    def settle(self) -> None:
        """Wait for what was read ahead and is not used, and forget it: its slots are free, but for what is late."""
        records, self._filled = list(self._filled.values()), {}
        self._free.extend(record.slot for record in records)
        self._tiers.copies.wait_out([record.ticket for record in records])

    def _free_last(self) -> None:
        """Forget what was read ahead for the chunk that is needed last."""
        key = next(reversed(self._filled))
        self._filled[key].settle(self._tiers.deadline_s)
        self._free.append(self._filled.pop(key).slot)

    def start(self, chunk: Chunk, *, urgent: bool = False) -> None:
        """Give the chunk its addresses; start the reads of what comes through staging.

        They come before what is not `urgent`, as long as no write has to make room.
        """
        tiers, unit = self._tiers, chunk.unit
        staged, from_device = [], []
        owned = tiers.plan.request.is_owned(unit, chunk.begin)
        for role in self._roles(unit):
            if not owned and role is not Role.PARAM:
                continue
            base = chunk.access.addresses.get(role)
            if self._has_spare(tiers.copies.of(unit.index, role)):
                from_device += [role] if self._put_beside(chunk, role) else []
            elif base is None:
                staged.append(role)
            else:
                chunk.addresses[role] = base + tiers.offset_bytes(unit, role, chunk.begin)
        chunk.staged = frozenset(staged + from_device)
        if staged:
            urgent = self._take_slot(chunk, staged, urgent=urgent)
        if chunk.staged:
            self.read(chunk, urgent=urgent)

    def _take_slot(self, chunk: Chunk, staged: Sequence[Role], *, urgent: bool) -> bool:
        """Give roles of the chunk their addresses in a slot; returns whether it was free at once, if `urgent`."""
        tiers = self._tiers
        tiers.copies.await_late()  # it may still come to any slot
        chunk.ahead = self._filled.pop((chunk.unit.index, chunk.number), None)
        if chunk.ahead is None and self._filled and not self._free:
            self._free_last()
        if chunk.ahead is not None:
            self._free.appendleft(chunk.ahead.slot)
        for ticket in self.leaving():  # the slot's previous user was worked on long ago
            ticket.wait(tiers.deadline_s)
        urgent = urgent and bool(self._free)
        address = self._free.popleft() if self._free else self._taken.popleft()[1]
        self._taken.append((chunk, address))
        for role in staged:
            chunk.addresses[role] = address
            address += tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
        return urgent

    def _put_beside(self, chunk: Chunk, role: Role) -> bool:
        """Give a role of the chunk its address in spare memory; returns whether it is to be read from the device."""
        shard = self._tiers.copies.of(chunk.unit.index, role)
        offset = self._tiers.offset_bytes(chunk.unit, role, chunk.begin)
        assert shard.spare_buffer is not None and shard.home_buffer is not None
        chunk.addresses[role] = shard.spare_buffer.address + offset
        if self._aside:
            chunk.spare |= {role}
        if shard.home is Tier.DEVICE:
            return True
        if role is Role.PARAM or not chunk.access.fresh_states:
            chunk.sources[role] = shard.home_buffer.address + offset
        return False

    def read(self, chunk: Chunk, *, urgent: bool = False) -> None:
        """Start the reads of a chunk that has its addresses."""
        chunk.reading = []
        try:
            self._read(chunk, urgent=urgent)
        except BaseException:
            come_to_rest([chunk], self._tiers)
            raise

    @labelled("fetch")
    def _read(self, chunk: Chunk, *, urgent: bool) -> None:
        tiers, unit, access = self._tiers, chunk.unit, chunk.access
        ahead = self._take_over(chunk)
        for role in (Role.PARAM, Role.GRAD):
            if role in chunk.staged and role in self._reads:
                size = tiers.chunk_bytes(unit, role, chunk.begin, chunk.end)
                here = tiers.working_address(unit.index) if self._aside and role is Role.PARAM else None
                if here is not None:
                    _copy(here + tiers.chunk_bytes(unit, role, 0, chunk.begin), chunk.addresses[role], size)
                    continue
                asked = (unit, role, chunk.number, chunk.addresses[role], size)
                ticket = chunk.leases.read_chunk(*asked, urgent=urgent, settled=self._updates)
                if ticket is not None:
                    chunk.reading.append(ticket)
        for role, size in () if ahead or access.fresh_states else self._records(chunk, self._reads):
            name = role if tiers.plan.on_device(unit) else Role.MASTER
            ticket = chunk.leases.read_chunk(unit, name, chunk.number, chunk.addresses[role], size, urgent=urgent)
            if ticket is not None:
                chunk.reading.append(ticket)

    def _take_over(self, chunk: Chunk) -> bool:
        """Let the chunk wait for what was read before it was started, if that is where it belongs: tells whether."""
        record, chunk.ahead = chunk.ahead, None  # a read that is repeated brings all
        if record is None:
            return False
        if record.address != next((chunk.addresses[role] for role in STATE_ROLES if role in chunk.staged), None):
            record.settle(self._tiers.deadline_s)  # parameters have come between
            return False
        chunk.reading.append(record.ticket)
        self._tiers.counters.update_chunks_ahead += 1
        return True

    def _records(self, chunk: Chunk, wanted: frozenset[Role]) -> list[tuple[Role, int]]:
        """Return what of a chunk's states comes and goes in one piece: the first role of each, and its bytes.

        That is all of them on NVMe, and each role on a device.
        """
        tiers, unit = self._tiers, chunk.unit
        sizes = [
            (role, tiers.chunk_bytes(unit, role, chunk.begin, chunk.end))
            for role in STATE_ROLES
            if role in chunk.staged and role in wanted
        ]
        if not sizes or tiers.plan.on_device(unit):
            return sizes
        return [(sizes[0][0], whole_pages(sum(size for _, size in sizes)))]

    def compute(self, chunk: Chunk, visit: Callable[[Chunk], None]) -> None:
        """Call `visit` with a chunk whose reads are over; in any thread."""
        if chunk.access.fresh_states:
            copy_sources(self._tiers, chunk)
            _initialise_states(self._tiers, chunk)
        visit(chunk)

    @labelled("write_back")
    def write(self, chunk: Chunk) -> None:
        """Start the writes of a chunk that was worked on."""
        tiers, unit, writes = self._tiers, chunk.unit, self._writes - chunk.spare
        together: list[tuple[Role, int, int]] = []  # to NVMe
        for role in (Role.PARAM, Role.GRAD):
            if role not in writes or role not in chunk.addresses:
                continue
            size = tiers.chunk_bytes(unit, role, chunk.begin, chunk.end)
            shard = tiers.copies.of(unit.index, role)
            if self._has_spare(shard):
                if chunk.end == tiers.plan.request.owned(unit, Role.GRAD)[1]:  # the last one: none reads the home now
                    chunk.leases.send_spare(unit)
            elif role in chunk.staged or (role is Role.PARAM and shard.home_buffer is None):
                urgent = role is Role.PARAM and role in chunk.staged and not self._aside  # somebody waits to use it
                if shard.home is Tier.NVME and not urgent:
                    together.append((role, chunk.addresses[role], size))
                    continue
                ticket = chunk.leases.write_chunk(
                    unit, role, chunk.number, chunk.addresses[role], size, aside=self._aside, urgent=urgent
                )
                chunk.writing.append(ticket)
                if role is Role.PARAM:
                    chunk.writing_param.append(ticket)
                if role in chunk.staged and shard.state is State.DIRTY:
                    assert shard.work_buffer is not None
                    source, offset = chunk.addresses[role], tiers.chunk_bytes(unit, role, 0, chunk.begin)
                    filling = tiers.mover.fill(source, shard.work_buffer, offset, size)
                    chunk.writing.append(filling)
                    chunk.writing_param.append(filling)
            elif role is Role.PARAM and chunk.access.write_through:
                target = chunk.access.write_through + tiers.chunk_bytes(unit, role, 0, chunk.begin)
                ctypes.memmove(target, chunk.addresses[role], size)
        records = [(role, chunk.addresses[role], size) for role, size in self._records(chunk, writes)]
        if tiers.plan.on_device(unit):
            for role, address, size in records:
                chunk.writing.append(chunk.leases.write_chunk(unit, role, chunk.number, address, size))
        else:
            together += [(Role.MASTER, address, size) for _, address, size in records]
        if together:
            tickets = chunk.leases.write_pieces(unit, chunk.number, together, aside=self._aside)
            for (role, _, _), ticket in zip(together, tickets, strict=True):
                chunk.writing.append(ticket)
                if role is Role.PARAM:
                    chunk.writing_param.append(ticket)


def _joined_chunks(chunks: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """Return chunks as large as they may be without slots; each has the number of its first part."""
    found: list[tuple[int, int, int]] = []
    for number, begin, end in chunks:
        if found and begin == found[-1][2] and end - found[-1][1] <= LARGE_CHUNK_NUMEL:
            found[-1] = (*found[-1][:2], end)
        else:
            found.append((number, begin, end))
    return found


def _joined(buffers: Iterable[Buffer]) -> list[tuple[int, int]]:
    """Return the addresses [begin, end) of the fewest ranges that have all buffers, in order."""
    ranges: list[tuple[int, int]] = []
    for buffer in sorted(buffers, key=lambda buffer: buffer.address):
        end = buffer.address + buffer.size_bytes
        if ranges and ranges[-1][1] == buffer.address:
            ranges[-1] = (ranges[-1][0], end)
        else:
            ranges.append((buffer.address, end))
    return ranges


def _roles(tiers: Tiers, unit: Unit, wanted: frozenset[Role]) -> list[Role]:
    """Return the wanted roles that the unit has, records in their order."""
    order = (Role.PARAM, Role.GRAD, *STATE_ROLES)
    return [role for role in order if role in wanted and tiers.copies.get(unit.index, role) is not None]


def _initialise_states(tiers: Tiers, chunk: Chunk) -> None:
    """Give states that have no content their first one: zero moments, a master equal to the parameter."""
    for role in STATE_ROLES:
        if role in chunk.addresses:
            size = tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
            ctypes.memset(chunk.addresses[role], 0, size)
    if chunk.unit.dtype == "float16" and Role.MASTER in chunk.addresses and Role.PARAM in chunk.addresses:
        cpu_adam.convert(
            chunk.addresses[Role.PARAM],
            cpu_adam.Dtype.FLOAT16,
            chunk.addresses[Role.MASTER],
            cpu_adam.Dtype.FLOAT32,
            chunk.numel,
        )
