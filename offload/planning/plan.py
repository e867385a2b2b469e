"""The plan: homes, buffer sizes and the bytes of a step, as a value that prints itself.

Owns what is asked of the planner (:class:`Request`), what it answers (:class:`Plan`), and the sizes that follow from
both. Pure Python over plain values: it needs no torch, no GPU and no disk. It decides nothing.

Next: :mod:`offload.planning.planner` makes plans, :mod:`offload.shards.manager` lays out the arenas as a plan says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from offload.kernels.on_device import TOTAL_BYTES
from offload.kernels.ranges import StateKind
from offload.memory.budget import Tier
from offload.planning.roles import ADAM_STATES, STATE_ROLES, Role, States, role_bytes
from offload.planning.slices import owned_range
from offload.planning.units import Unit
from offload.sizes import PAGE_BYTES, format_bytes, whole_pages

WORKING_UNITS = 3  # computing, arriving, leaving
STAGING_SLOTS = 4  # at least: reading, reading, computing, writing
NVME_SLACK_CHUNKS = 16  # versions in flight: copy-on-write needs room for them
MANIFEST_LINE_BYTES = 52  # what the store's manifest says of a chunk, checksums apart
GRANULE_BYTES, CHECKSUM_DIGITS = 256 << 10, 8  # of a durable store
_COLUMNS = ("parameters", "gradients", "states", "buffers", "total", "budget")
EXCHANGE_PIECE_BYTES = 4 << 20  # of one rank's gradients that come or leave at once
LOOK_AHEAD = 2  # units of slices that are gathered while others are used
PASSING_UNITS = 2  # in host memory on their way to a device: one is gathered while the one before is copied
NEAR_SHARE = 8  # this part of the device's activations is for those that leave last, and those that come and go
STAYING_SHARE = 3 / 4  # the same where only those leave that do not fit; the rest is for temporaries
MOST_SLOTS = 64  # of the pipeline, with those in memory that is idle at the moment


@dataclasses.dataclass(frozen=True, slots=True)
class OwnBytes:
    """Host memory that an optimizer whose own class makes the steps takes outside the arenas.

    Attributes:
        name: of the class.
        kept_bytes: states that are not of their parameter's shape: they stay in host memory.
        step_bytes: fp32 copies and temporaries while the parameter that needs most is updated.
    """

    name: str
    kept_bytes: int
    step_bytes: int

    @property
    def total_bytes(self) -> int:
        """Bytes of both, whole pages."""
        return whole_pages(self.kept_bytes + self.step_bytes)

    def __str__(self) -> str:
        return (
            f"{format_bytes(self.step_bytes)} of temporaries while {self.name} updates its largest parameter, "
            f"{format_bytes(self.kept_bytes)} of its small states"
        )


@dataclasses.dataclass(frozen=True, slots=True)
class Commit:
    """What a step leaves on the drive beside the shards, so that the run goes on from it.

    Attributes:
        record_bytes: of what is kept beside the shards, with room for what the user keeps there.
        drives: that are flushed.
    """

    record_bytes: int
    drives: int

    @property
    def flushes(self) -> int:
        """Flushes that a commit waits for: of each drive's data, and of the manifest."""
        return self.drives + 1


@dataclasses.dataclass(frozen=True, slots=True)
class Request:
    """What the planner needs to know.

    Attributes:
        units: all units of the model.
        budgets: bytes per tier.
        param_tier, optimizer_tier: a forced home, or None.
        accumulate: gradients are kept in fp32 (several micro-batches per step).
        device_is_host: the compute device is the CPU: states may live on DEVICE, and NVMe reads reach it directly.
        activation_bytes: part of the device budget for activations, None for the default.
        updates_on_device: a device that is not the CPU has kernels for updates, so that states may live on DEVICE.
        activations: what becomes of activations, as in :class:`offload.Config`.
        host_activation_bytes, nvme_activation_bytes: parts of these budgets for activations that leave the device.
        chunk_numel: optimizer chunk, None for the default.
        states: what the optimizer remembers of each element, and in which format.
        held_together: sets of units (their indices) that nested forwards have in use at once.
        own: what the optimizer takes where its own class makes the steps, else None.
        commit: of each step: parameters and states are at home on NVMe then, and their old versions stay until the new
            ones are committed; None where nothing is.
        holds: a checkpoint may hold what lives on NVMe while it is copied.
        rank, world_size: which of how many ranks this plan is for; each keeps a slice of gradients and states.
        nodes: of as many ranks each, which have all slices together; those of other nodes are replicas of them.
        clips: every step is likely to clip, so that no update is made during backward.
        stage: of ZeRO, of several ranks: 1 keeps a micro-batch's gradients whole until its end, 2 exchanges each unit's
            as soon as it is there. With 3, each rank keeps a slice of parameters, too; gradients are as with 2.
    """

    units: Sequence[Unit]
    budgets: Mapping[Tier, int]
    param_tier: Tier | None = None
    optimizer_tier: Tier | None = None
    accumulate: bool = False
    device_is_host: bool = True
    updates_on_device: bool = False
    activation_bytes: int | None = None
    activations: str = "keep"
    host_activation_bytes: int = 0
    nvme_activation_bytes: int = 0
    chunk_numel: int | None = None
    states: States = ADAM_STATES
    held_together: Sequence[frozenset[int]] = ()
    own: OwnBytes | None = None
    commit: Commit | None = None
    holds: bool = False
    rank: int = 0
    world_size: int = 1
    nodes: int = 1
    stage: int = 1
    clips: bool = False

    @property
    def slices(self) -> int:
        """Return how many slices a unit has: one for each rank of a node."""
        return self.world_size // self.nodes

    def on_device(self, homes: Homes) -> bool:
        """Tell whether a unit is updated by a device that is not the CPU: all of it is at home there."""
        return not self.device_is_host and homes.states is Tier.DEVICE

    def total_bytes(self, units: Iterable[Unit]) -> int:
        """Return the device memory for what is measured of gradients of `units` that wait there, whole pages."""
        return whole_pages(TOTAL_BYTES * sum(len(unit.slots) for unit in units))

    @property
    def piece_bytes(self) -> int:
        """Return the bytes of gradients of all ranks that come, or leave, at once."""
        largest = max((unit.param_bytes for unit in self.units if unit.trainable), default=0)
        return min(largest, EXCHANGE_PIECE_BYTES * self.slices)

    @property
    def waiting_bytes(self) -> int:
        """Host memory for gradients of a micro-batch until all ranks have theirs.

        It has room for all units, or where they leave one by one, for what comes, waits and leaves.
        """
        sizes = sorted((unit.param_bytes for unit in self.units if unit.trainable), reverse=True)
        return sum(sizes[:WORKING_UNITS] if self.exchanges_early else sizes)

    @property
    def exchange_bytes(self) -> int:
        """Host memory for gradients that wait for other ranks, and for pieces on their way."""
        return 0 if self.world_size == 1 else self.waiting_bytes + 2 * self.piece_bytes

    @property
    def exchanges_early(self) -> bool:
        """Whether gradients leave during backward, unit by unit."""
        return self.stage >= 2

    @property
    def slices_parameters(self) -> bool:
        """Whether each rank keeps a slice of parameters, so that whole units are there only while they are used."""
        return self.slices > 1 and self.stage == 3

    @property
    def landing_bytes(self) -> int:
        """Host memory for a unit that others gather, and this rank does not need."""
        return max((unit.param_bytes for unit in self.units), default=0) if self.slices_parameters else 0

    @property
    def passing_bytes(self) -> int:
        """Host memory in which units become whole on their way to a device that the host cannot address."""
        return 0 if self.device_is_host else PASSING_UNITS * self.landing_bytes

    @property
    def own_bytes(self) -> int:
        """Host memory outside the arenas that the optimizer takes."""
        return self.own.total_bytes if self.own else 0

    def widest(self, units: Iterable[Unit]) -> list[Unit]:
        """Return those of `units` that must fit the device together.

        These are the three largest, or what nested forwards have in use at once where that is more.
        """
        among = {unit.index: unit for unit in units}
        sets = [[among[index] for index in held if index in among] for held in self.held_together]
        sets.append(sorted(among.values(), key=lambda unit: unit.param_bytes, reverse=True)[:WORKING_UNITS])
        return max(reversed(sets), key=lambda held: sum(unit.param_bytes for unit in held))

    def owned(self, unit: Unit, role: Role) -> tuple[int, int]:
        """Return the elements [begin, end) of `unit` that this rank keeps in `role`.

        Before stage 3, parameters are kept whole. So is all of a unit whose parameters no slice may divide.
        """
        if self.slices == 1 or unit.whole or (role is Role.PARAM and not self.slices_parameters):
            return 0, unit.numel
        return owned_range(unit.numel, self.rank % self.slices, self.slices)

    def is_owned(self, unit: Unit, element: int) -> bool:
        """Tell whether this rank keeps gradients and states of the chunk that begins at `element`."""
        begin, end = self.owned(unit, Role.GRAD)
        return begin <= element < end

    def owned_numel(self, unit: Unit, role: Role) -> int:
        """Return how many elements these are."""
        begin, end = self.owned(unit, role)
        return end - begin

    def role_bytes(self, unit: Unit, role: Role) -> int:
        """Return the bytes of a shard, whole pages."""
        return whole_pages(self.chunk_bytes(unit, role, self.owned_numel(unit, role)))

    def wide_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients in fp32, whole pages."""
        numel = self.owned_numel(unit, Role.GRAD)
        return whole_pages(role_bytes(unit, Role.GRAD, numel, accumulate=True, states=self.states))

    def chunk_bytes(self, unit: Unit, role: Role, numel: int) -> int:
        """Return the bytes of `numel` elements of a shard, from the start of a chunk on."""
        return role_bytes(unit, role, numel, accumulate=self.accumulate, states=self.states)

    def record_bytes(self, unit: Unit, roles: Sequence[Role], chunk_numel: int) -> int:
        """Return the bytes of a unit in the swap files: a record of `roles` per chunk, padded to their granularity.

        The roles of a record have one slice.
        """
        total = 0
        begin, end = self.owned(unit, roles[0])
        for first, last in unit.chunks(chunk_numel):
            numel = max(min(last, end) - max(first, begin), 0)
            total += whole_pages(sum(self.chunk_bytes(unit, role, numel) for role in roles))
        return total

    def manifest_bytes(self, chunk_numel: int) -> int:
        """Return about how many bytes a commit adds to the store's manifest: a line per chunk that a step writes."""
        total = 0
        for unit in self.units:
            if unit.trainable:
                lines = 2 * len(unit.chunks(chunk_numel)) * MANIFEST_LINE_BYTES
                size = sum(self.role_bytes(unit, role) for role in (Role.PARAM, *STATE_ROLES))
                total += lines + size // GRANULE_BYTES * CHECKSUM_DIGITS
        return total

    def aside_bytes(self, unit: Unit, homes: Homes, chunk_numel: int) -> int:
        """Return the bytes in the swap files of a unit's update beside the old content; 0 where it needs none."""
        if not self._updates_early(unit, homes):
            return 0
        records = [roles for tier, roles in homes.updated() if tier is Tier.NVME]
        return sum(self.record_bytes(unit, roles, chunk_numel) for roles in records)

    def spare_bytes(self, unit: Unit, homes: Homes) -> int:
        """Return the host memory of a unit's update beside the old content; 0 where it needs none."""
        if not self._updates_early(unit, homes):
            return 0
        in_memory = [role for tier, roles in homes.updated() if tier is not Tier.NVME for role in roles]
        return sum(self.role_bytes(unit, role) for role in in_memory)

    def _updates_early(self, unit: Unit, homes: Homes) -> bool:
        """Tell whether a unit may be updated beside the old content: its gradient waits for the step in memory.

        Where the device is the CPU, its cores are busy during backward: there, for what the drive has to do anyway.
        """
        if self.own is not None or not unit.trainable or homes.grad is not Tier.HOST:
            return False  # what its own class keeps in host memory cannot be put aside
        if self.world_size > 1 and not self.device_is_host:
            return False  # several ranks update when all of them have come to the step
        if self.device_is_host:
            return homes.param is homes.states is Tier.NVME
        return homes.states in (Tier.HOST, Tier.NVME)


def most_in_flight(slot_bytes: int, early_bytes: int) -> int:
    """Return for how many chunks on their way to NVMe the swap files have room."""
    return NVME_SLACK_CHUNKS + early_bytes // (slot_bytes + PAGE_BYTES)


@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Homes of one unit's shards; `states` is None for a frozen unit, like `grad`."""

    param: Tier
    grad: Tier | None
    states: Tier | None

    def updated(self) -> tuple[tuple[Tier | None, Sequence[Role]], ...]:
        """Return what an update writes, with its home: on NVMe, each is a record."""
        return (self.param, (Role.PARAM,)), (self.states, STATE_ROLES)


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Homes, buffers, and worst-case bytes per tier. ``print(plan)`` shows it as a table.

    Attributes:
        homes: per unit.
        working_bytes: region of DEVICE for working copies of parameters.
        activation_bytes: room in the device budget for activations and temporaries.
        grad_pool_bytes: region of HOST for gradients on their way to NVMe.
        fetch_staging_bytes: buffers of HOST through which NVMe reaches a GPU.
        grad_staging_bytes: buffer of HOST through which gradients leave a GPU; as much of DEVICE they take meanwhile,
            of what is left to activations.
        chunk_numel, staging_slots, staging_slot_bytes: the optimizer's pipeline buffers in HOST.
        arena_bytes: bytes of each tier that are taken at start (NVMe: file size), but for :attr:`loose_bytes`.
        step_bytes: predicted bytes per link and optimizer step (one micro-batch).
        totals_bytes: region of DEVICE for what is measured of gradients that wait there.
        committed_bytes: room in NVME for the versions that the last commit needs, beside those that a step writes.
        held_bytes: room in NVME for the versions that a checkpoint holds while it is copied.
        early_bytes: room in NVME for updates that are made before it is known whether they count.
        spare_units: units with room for the same in HOST.
        wide_bytes: room in each tier, beside the arena, for gradients of 16-bit units in fp32, which they become once a
            second backward pass of a step adds to them; empty where there is none.
        activation_step_bytes: per link, of activations that leave the device in a micro-batch, in `step_bytes`, too;
            empty where that is not known, or none leave.
        choice: what ``activations="auto"`` has chosen, and why; empty where nothing is chosen yet.
    """

    request: Request
    homes: tuple[Homes, ...]
    working_bytes: int
    activation_bytes: int
    grad_pool_bytes: int
    fetch_staging_bytes: int
    grad_staging_bytes: int
    chunk_numel: int
    staging_slots: int
    staging_slot_bytes: int
    arena_bytes: Mapping[Tier, int]
    step_bytes: Mapping[str, int]
    totals_bytes: int = 0
    committed_bytes: int = 0
    held_bytes: int = 0
    early_bytes: int = 0
    spare_units: frozenset[int] = frozenset()
    wide_bytes: Mapping[Tier, int] = dataclasses.field(default_factory=dict)
    activation_step_bytes: Mapping[str, int] = dataclasses.field(default_factory=dict)
    choice: str = ""

    def with_activations(self, moved: Mapping[str, int] | None, choice: str = "") -> Plan:
        """Return the plan with what a micro-batch moves of activations, where that is known, per link."""
        assert not self.activation_step_bytes, "they would count twice"
        added = {link: size for link, size in (moved or {}).items() if size}
        total = {link: size + added.get(link, 0) for link, size in self.step_bytes.items()}
        return dataclasses.replace(self, step_bytes=total, activation_step_bytes=added, choice=choice)

    @property
    def most_slots(self) -> int:
        """Slots that the optimizer's pipeline may have: the swap files have room for a new version of each chunk."""
        return max(min(most_in_flight(self.staging_slot_bytes, self.early_bytes), MOST_SLOTS), self.staging_slots)

    @property
    def ahead_bytes(self) -> int:
        """States that staging has room for in the backward of a step that clips: of the units that forward uses first.

        They are read before the step. As much may be on its way home still from the step before.
        """
        left, total, request = self.staging_slots, 0, self.request
        for unit, homes in zip(request.units, self.homes, strict=True):
            if homes.states is Tier.NVME and homes.grad is Tier.HOST and request.world_size == 1:
                for _, begin, end in self.chunks(unit, Role.GRAD)[:left]:
                    total += whole_pages(sum(self.chunk_bytes(unit, role, end - begin) for role in STATE_ROLES))
                    left -= 1
        return total

    @property
    def near_bytes(self) -> int:
        """Room on the device for activations that leave last, and those that come and go."""
        if not self.request.host_activation_bytes:
            return 0
        asked = self.request.activation_bytes
        part = self.activation_bytes if asked is None else min(asked, self.activation_bytes)
        return int(part * STAYING_SHARE) if self.request.activations == "auto" else part // NEAR_SHARE

    @property
    def last_bytes(self) -> int:
        """Those of `near_bytes` that are for activations that leave last."""
        if self.request.activations == "auto":
            return int(self.near_bytes * (1 - 1 / NEAR_SHARE))
        return self.near_bytes // 2

    @property
    def apart_bytes(self) -> int:
        """Room in NVME for activations, in files of their own: those of a durable run keep what it commits."""
        return self.request.nvme_activation_bytes if self.request.commit else 0

    @property
    def store_bytes(self) -> int:
        """Room in NVME for all else."""
        return self.arena_bytes[Tier.NVME] - self.apart_bytes

    @property
    def spare_bytes(self) -> int:
        """Host memory for updates that are made before it is known whether they count."""
        units = (unit for unit in self.request.units if unit.index in self.spare_units)
        return sum(self.request.spare_bytes(unit, self.homes[unit.index]) for unit in units)

    def aside_bytes(self, unit: Unit) -> int:
        """Return the bytes in the swap files of a unit's update beside the old content; 0 where it needs none."""
        return self.request.aside_bytes(unit, self.homes[unit.index], self.chunk_numel)

    def updates_early(self, unit: Unit) -> bool:
        """Tell whether there is host memory for a unit's update beside the old content, if it needs any."""
        if self.request.spare_bytes(unit, self.homes[unit.index]):
            return unit.index in self.spare_units
        return self.aside_bytes(unit) > 0

    def on_device(self, unit: Unit) -> bool:
        """Tell whether a unit is updated by a device that is not the CPU; see :meth:`Request.on_device`."""
        return self.request.on_device(self.homes[unit.index])

    @property
    def loose_bytes(self) -> int:
        """Bytes of the device's arena that it leaves to torch, for gradients that wait there: each is a tensor."""
        units = (unit for unit in self.request.units if unit.trainable and self.on_device(unit))
        return sum(self.room_bytes(unit, Role.GRAD) for unit in units)

    def stays(self, unit: Unit) -> bool:
        """Tell whether everything of a unit is on the device: then there is nothing that its update would wait for."""
        homes = self.homes[unit.index]
        return homes.param is Tier.DEVICE and homes.states is Tier.DEVICE

    def role_bytes(self, unit: Unit, role: Role) -> int:
        """Return the bytes of a shard, whole pages."""
        return self.request.role_bytes(unit, role)

    def room_bytes(self, unit: Unit, role: Role) -> int:
        """Return the bytes of a shard's home in memory: of a gradient's with the room to become fp32, if there is."""
        wide = role is Role.GRAD and self.wide_bytes
        return self.request.wide_bytes(unit) if wide else self.role_bytes(unit, role)

    def chunk_bytes(self, unit: Unit, role: Role, numel: int) -> int:
        """Return the bytes of `numel` elements of a shard, from the start of a chunk on."""
        return self.request.chunk_bytes(unit, role, numel)

    def chunks(self, unit: Unit, role: Role) -> list[tuple[int, int, int]]:
        """Return the chunks of a shard: the number of each in its unit, and its elements [begin, end)."""
        first, last = self.request.owned(unit, role)
        chunks = enumerate(unit.chunks(self.chunk_numel))
        return [(number, begin, end) for number, (begin, end) in chunks if first <= begin < last]

    def home(self, unit: Unit, role: Role) -> Tier | None:
        """Return the home of a shard, None where the unit has no such role."""
        homes = self.homes[unit.index]
        if role is Role.PARAM:
            return homes.param
        return homes.grad if role is Role.GRAD else homes.states

    def to_dict(self) -> dict[str, Any]:
        """Return the plan as plain values, for JSON.

        Returns:
            ``units``: per unit its ``name``, ``trainable``, and per kind of shard the tier that is its ``home``;
            ``bytes``: per tier those of parameters, gradients and states at home there, of buffers, in total, and of
            the budget; ``activation_bytes`` of the device budget; ``step_bytes`` per link, and of these
            ``activation_step_bytes``; ``notes``, as printed.
        """
        units = []
        for unit, homes in zip(self.request.units, self.homes, strict=True):
            kinds = (("parameters", homes.param), ("gradients", homes.grad), ("states", homes.states))
            home = {kind: tier.value for kind, tier in kinds if tier is not None}
            units.append({"name": unit.name, "trainable": unit.trainable, "home": home})
        return {
            "units": units,
            "bytes": {tier.value: dict(zip(_COLUMNS, self._sizes(tier), strict=True)) for tier in Tier},
            "activation_bytes": self.activation_bytes,
            "step_bytes": dict(self.step_bytes),
            "activation_step_bytes": dict(self.activation_step_bytes),
            "notes": list(self._notes()),
        }

    def __str__(self) -> str:
        return "\n".join([self.headline(), *self._table(), *self._notes()])

    def headline(self) -> str:
        """Return how many units and parameters there are, in words."""
        frozen = self._numel(trainable=False)
        text = f"{len(self.request.units)} units, {self._numel(trainable=True):,} trainable parameters"
        return f"{text}, {frozen:,} frozen" if frozen else text

    def _numel(self, *, trainable: bool) -> int:
        return sum(slot.numel for unit in self.request.units if unit.trainable is trainable for slot in unit.slots)

    def _table(self) -> list[str]:
        """Return a line per tier: what is at home there, and what is left of its arena for buffers."""
        rows: list[tuple[str, ...]] = [("", *_COLUMNS)]
        for tier in Tier:
            rows.append((tier.value, *(format_bytes(size) if size else "-" for size in self._sizes(tier))))
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]

    def _sizes(self, tier: Tier) -> tuple[int, ...]:
        """Return the bytes of a tier, in the order of :data:`_COLUMNS`."""
        kinds = ((Role.PARAM,), (Role.GRAD,), STATE_ROLES)
        at_home = [sum(self._bytes_at(tier, role) for role in roles) for roles in kinds]
        arena = self.arena_bytes[tier]
        buffers = self.working_bytes + self.totals_bytes if tier is Tier.DEVICE else arena - sum(at_home)
        own = self.request.own_bytes if tier is Tier.HOST else 0
        return (*at_home, buffers + own, arena + own, self.request.budgets[tier])

    def _bytes_at(self, tier: Tier, role: Role) -> int:
        return sum(self.role_bytes(unit, role) for unit in self.request.units if self.home(unit, role) is tier)

    def _notes(self) -> Iterator[str]:
        request, states = self.request, self.request.states
        if states.kind is not StateKind.FLOAT32 and self._numel(trainable=True):
            share = len(states.names) * states.kind.itemsize + states.kind.units_bytes(1024) / 1024
            text = f"{' and '.join(states.names)} in {states.kind.value} (lossy)"
            yield f"{text}: {share:.4g} bytes per parameter instead of 8"
        if request.own:
            yield f"optimizer: torch's own {request.own.name} on fp32 tensors in host memory, slower than a kernel"
            yield f"outside the tiers, in the cpu budget: {request.own}"
        yield f"activations and temporaries: {format_bytes(self.activation_bytes)} of the device budget"
        if self.near_bytes:
            away = f"{format_bytes(request.host_activation_bytes)} of the cpu buffers"
            if request.nvme_activation_bytes:
                away += f", {format_bytes(request.nvme_activation_bytes)} of the nvme buffers"
            if request.activations == "auto":
                yield f"activations: auto: {self.choice or 'the first step decides'}"
                yield f"activations beyond {format_bytes(self.last_bytes)} on the device: {away}"
            else:
                near = format_bytes(self.near_bytes)
                yield f"activations that leave the device: {away}; {near} for those on their way"
        if self.activation_step_bytes:
            yield f"moved of activations, per micro-batch: {_listed(self.activation_step_bytes)}"
        trained = [unit for unit in request.units if unit.trainable]
        if not request.device_is_host and trained:
            many = sum(map(self.on_device, trained))
            why = "" if request.updates_on_device else ": it has no kernel whose bits were compared with the CPU's"
            why = why if request.world_size == 1 else ": several ranks update in host memory"
            yield f"updates on the device: {many} of {len(trained)} units{why}"
        if not request.device_is_host:
            yield f"page-locked for copies to and from the device: {format_bytes(self.arena_bytes[Tier.HOST])} of cpu"
        if self.grad_staging_bytes:
            yield f"gradients on their way to the host: at most {format_bytes(self.grad_staging_bytes)} at once"
        if request.exchange_bytes:
            sliced = "parameters, gradients and states" if request.slices_parameters else "gradients and states"
            rank = f"stage {request.stage}, rank {request.rank} of {request.world_size}"
            if request.nodes > 1:
                rank += f", node {request.rank // request.slices} of {request.nodes}"
            what = f"a slice of {sliced}" if request.slices > 1 else "all of parameters, gradients and states"
            room = format_bytes(request.exchange_bytes)
            yield f"{rank}: {what}; {room} of cpu for gradients until all ranks have theirs"
        if request.slices_parameters:
            landing = format_bytes(request.landing_bytes)
            through = f", {format_bytes(request.passing_bytes)} for those on their way to the device"
            yield (
                f"units are whole in {format_bytes(self.working_bytes)} of the device budget while they are used; "
                f"{landing} of cpu for one that only other ranks use{through if request.passing_bytes else ''}"
            )
        if self.wide_bytes:
            room = ", ".join(
                f"{format_bytes(size)} of the {tier.value} budget" for tier, size in self.wide_bytes.items()
            )
            yield f"room to add several backward passes in fp32, used only then: {room}"
        yield f"moved per step (one micro-batch, nothing cached): {_listed(self.step_bytes) or 'nothing'}"
        if self.early_bytes:
            room = format_bytes(self.early_bytes)
            yield f"updates during backward: {room} of the nvme buffers, beside the old content"
        if request.clips and self.ahead_bytes:
            room = f"{format_bytes(self.ahead_bytes)} of states, through the cpu buffers"
            yield f"read during backward if a step clips: {room}"
        if self.spare_units:
            room = f"{format_bytes(self.spare_bytes)} of the cpu buffers, beside the old content"
            yield f"updates during backward: {room} of {len(self.spare_units)} of {len(trained)} units"
        if request.commit:
            manifest = format_bytes(request.manifest_bytes(self.chunk_numel))
            record, kept = format_bytes(request.commit.record_bytes), format_bytes(self.committed_bytes)
            yield (
                f"each step is committed: about {manifest} of manifest, up to {record} of record, "
                f"{request.commit.flushes} flushes; {kept} of the nvme buffers keep the last commit"
            )
        if self.held_bytes:
            yield f"checkpoints in the background: {format_bytes(self.held_bytes)} of the nvme buffers, to copy from"
        if self.step_bytes["nvme_write"]:
            yield f"drive wear: {self.step_bytes['nvme_write'] * 1000 / 1e12:.3g} TB written per 1000 steps"


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{link} {format_bytes(size)}" for link, size in sizes.items() if size)
