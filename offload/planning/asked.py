"""What is asked of the planner, what a unit's homes are, and the sizes that follow from the question alone.

Pure Python over plain values: it needs no torch, no GPU and no disk. It decides nothing.

Next: :mod:`offload.planning.plan` is the answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from offload.kernels.on_device import TOTAL_BYTES
from offload.memory.budget import Tier
from offload.planning.roles import ADAM_STATES, STATE_ROLES, Role, States, role_bytes
from offload.planning.slices import owned_range
from offload.planning.units import Unit
from offload.sizes import format_bytes, whole_pages

WORKING_UNITS = 3  # computing, arriving, leaving
MANIFEST_LINE_BYTES = 52  # what the store's manifest says of a chunk, checksums apart
GRANULE_BYTES, CHECKSUM_DIGITS = 256 << 10, 8  # of a durable store
EXCHANGE_PIECE_BYTES = 4 << 20  # of one rank's gradients that come or leave at once
LOOK_AHEAD = 2  # units of slices that are gathered while others are used
PASSING_UNITS = 2  # in host memory on their way to a device: one is gathered while the one before is copied


@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Homes of one unit's shards; `states` is None for a frozen unit, like `grad`."""

    param: Tier
    grad: Tier | None
    states: Tier | None

    def updated(self) -> tuple[tuple[Tier | None, tuple[Role, ...]], ...]:
        """Return what an update writes, with its home: on NVMe, each is a record."""
        return (self.param, (Role.PARAM,)), (self.states, STATE_ROLES)


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
        states_may_stay: there; False where no unit's have room, so that no buffers need to be as large as for them.
        activations: what becomes of activations, as in :class:`offload.Config`.
        host_activation_bytes, nvme_activation_bytes: parts of these budgets for activations that leave the device.
        chunk_numel: optimizer chunk, None for the default.
        states: what the optimizer remembers of each element, and in which format.
        held_together: sets of units (their indices) that nested forwards have in use at once.
        own: what the optimizer takes where its own class makes the steps, else None.
        update_passes: how many times a kernel's update goes over parameters and states: LAMB's wants norms first.
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
    states_may_stay: bool = True
    activation_bytes: int | None = None
    activations: str = "keep"
    host_activation_bytes: int = 0
    nvme_activation_bytes: int = 0
    chunk_numel: int | None = None
    states: States = ADAM_STATES
    held_together: Sequence[frozenset[int]] = ()
    own: OwnBytes | None = None
    update_passes: int = 1
    commit: Commit | None = None
    holds: bool = False
    rank: int = 0
    world_size: int = 1
    nodes: int = 1
    stage: int = 1
    clips: bool = False
    _known: dict[object, int] = dataclasses.field(default_factory=dict, init=False, repr=False, compare=False)

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

    def passing(self, homes: Sequence[Homes]) -> list[Unit]:
        """Return the units that need working copies, or to become whole there."""
        return [unit for unit in self.units if self.slices_parameters or homes[unit.index].param is not Tier.DEVICE]

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
        return self.shard_bytes(unit, (role,))

    def shard_bytes(self, unit: Unit, roles: tuple[Role, ...]) -> int:
        """Return the bytes of the shards of `roles`, whole pages each; worked out once, for many homes are compared."""
        key = unit.index, roles
        if key not in self._known:
            sizes = (self.chunk_bytes(unit, role, self.owned_numel(unit, role)) for role in roles)
            self._known[key] = sum(map(whole_pages, sizes))
        return self._known[key]

    def kept_bytes(self, unit: Unit, roles: tuple[Role, ...]) -> int:
        """Return the bytes of the elements that this rank keeps, as they are; worked out once, too."""
        key = unit.index, roles, "as they are"
        if key not in self._known:
            numel = self.owned_numel(unit, roles[0])
            self._known[key] = sum(self.chunk_bytes(unit, role, numel) for role in roles)
        return self._known[key]

    def wide_bytes(self, unit: Unit) -> int:
        """Return the bytes of a unit's gradients in fp32, whole pages."""
        numel = self.owned_numel(unit, Role.GRAD)
        return whole_pages(role_bytes(unit, Role.GRAD, numel, accumulate=True, states=self.states))

    def chunk_bytes(self, unit: Unit, role: Role, numel: int) -> int:
        """Return the bytes of `numel` elements of a shard, from the start of a chunk on."""
        return role_bytes(unit, role, numel, accumulate=self.accumulate, states=self.states)

    def record_bytes(self, unit: Unit, roles: tuple[Role, ...], chunk_numel: int) -> int:
        """Return the bytes of a unit in the swap files: a record of `roles` per chunk, padded to their granularity.

        The roles of a record have one slice. It is worked out once.
        """
        key = unit.index, roles, chunk_numel
        if key not in self._known:
            begin, end = self.owned(unit, roles[0])
            self._known[key] = sum(
                many * whole_pages(sum(self.chunk_bytes(unit, role, numel) for role in roles))
                for numel, many in unit.chunk_lengths(chunk_numel, begin, end).items()
            )
        return self._known[key]

    def manifest_bytes(self, chunk_numel: int) -> int:
        """Return about how many bytes a commit adds to the store's manifest: a line per chunk that a step writes."""
        total = 0
        for unit in self.units:
            if unit.trainable:
                lines = 2 * len(unit.chunks(chunk_numel)) * MANIFEST_LINE_BYTES
                size = self.shard_bytes(unit, (Role.PARAM, *STATE_ROLES))
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
        return sum(self.shard_bytes(unit, roles) for tier, roles in homes.updated() if tier is not Tier.NVME)

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
