"""The plan: homes, buffer sizes and the bytes of a step, as a value that prints itself.

Owns what the planner answers to a :class:`Request`. Pure Python over plain values: it needs no torch, no GPU and no
disk. It decides nothing.

Next: :mod:`offload.planning.planner` makes plans, :mod:`offload.shards.manager` lays out the arenas as a plan says.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from offload.kernels.ranges import StateKind
from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.sizes import PAGE_BYTES, figures, format_bytes, whole_pages

STAGING_SLOTS = 4  # at least: reading, reading, computing, writing
LARGE_CHUNK_NUMEL = 16 << 20  # of what needs no slot, in one piece
MOST_QUEUED = 3  # units in host memory that a worker has at once during backward
NVME_SLACK_CHUNKS = 16  # versions in flight: copy-on-write needs room for them
_COLUMNS = ("parameters", "gradients", "states", "buffers", "total", "budget")
NEAR_SHARE = 8  # this part of the device's activations is for those that leave last, and those that come and go
STAYING_SHARE = 3 / 4  # the same where only those leave that do not fit; the rest is for temporaries
MOST_SLOTS = 64  # of the pipeline, with those in memory that is idle at the moment


def most_in_flight(slot_bytes: int, early_bytes: int) -> int:
    """Return for how many chunks on their way to NVMe the swap files have room."""
    return NVME_SLACK_CHUNKS + early_bytes // (slot_bytes + PAGE_BYTES)


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
        left, total, request = self.staging_slots - self.slots_beside, 0, self.request
        for unit, homes in zip(request.units, self.homes, strict=True):
            if left and homes.states is Tier.NVME and homes.grad is Tier.HOST and request.world_size == 1:
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
    def page_locked_bytes(self) -> int:
        """Host memory that is page-locked, for copies to and from a device that is not the CPU."""
        return 0 if self.request.device_is_host else self.arena_bytes[Tier.HOST]

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

    def beside_drive(self) -> frozenset[int]:
        """Return the units without anything on NVMe that the CPU updates beside others; none on a CPU."""
        homes, request = self.homes, self.request
        updated = {unit.index for unit in request.units if unit.trainable and not self.on_device(unit)}
        beside = {i for i in updated if Tier.NVME not in (homes[i].param, homes[i].grad, homes[i].states)}
        return frozenset(beside) if beside != updated and not request.device_is_host else frozenset()

    @property
    def slots_beside(self) -> int:
        """Slots of staging for those of :meth:`beside_drive`: by their part of the bytes that pass through it."""
        beside, passing = self.beside_drive(), {True: 0, False: 0}
        for unit, homes in zip(self.request.units, self.homes, strict=True):
            roles = {Role.PARAM: homes.param, Role.GRAD: homes.grad, **dict.fromkeys(STATE_ROLES, homes.states)}
            spare = unit.index in self.spare_units and homes.states is Tier.HOST
            if unit.trainable and not self.on_device(unit) and not spare:
                passes = (self.role_bytes(unit, role) for role, home in roles.items() if home is not Tier.HOST)
                passing[unit.index in beside] += sum(passes)
        if not passing[True]:
            return 0
        least, share = STAGING_SLOTS // 2, passing[True] / sum(passing.values())
        return min(max(round(self.staging_slots * share), least), self.staging_slots - least)

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

    @property
    def least_working_bytes(self) -> int:
        """Bytes of the working region that give way to nothing: those of the units that must be there together."""
        widest = self.request.widest(self.request.passing(self.homes))
        return min(sum(unit.param_bytes for unit in widest), self.working_bytes)

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
            ``activation_step_bytes``; of host memory, ``page_locked_bytes`` for a device that is not the CPU; what a
            rank writes to the drive, ``wear_bytes_per_step`` of one micro-batch, and
            ``wear_bytes_per_further_micro_batch``; ``notes``, as printed.
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
            "page_locked_bytes": self.page_locked_bytes,
            "wear_bytes_per_step": self.step_bytes["nvme_write"],
            "wear_bytes_per_further_micro_batch": self._worn_again_bytes,
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
                yield f"activations: auto: {self.choice or 'the second micro-batch decides'}"
                yield f"activations beyond {format_bytes(self.last_bytes)} on the device: {away}"
            else:
                near = format_bytes(self.near_bytes)
                yield f"activations that leave the device: {away}; {near} for those on their way"
        if self.activation_step_bytes:
            yield f"moved of activations, per micro-batch: {_listed(self.activation_step_bytes)}"
        trained = [unit for unit in request.units if unit.trainable]
        if not request.device_is_host and trained:
            many = sum(map(self.on_device, trained))
            elsewhere = request.own is not None or request.optimizer_tier in (Tier.HOST, Tier.NVME)
            lacking = not request.updates_on_device and not elsewhere
            why = ": it has no kernel whose bits were compared with the CPU's" if lacking else ""
            why = why if request.world_size == 1 else ": several ranks update in host memory"
            yield f"updates on the device: {many} of {len(trained)} units{why}"
        if not request.device_is_host:
            yield f"page-locked for copies to and from the device: {format_bytes(self.page_locked_bytes)} of cpu"
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
            yield f"drive wear: {self._wear()}"

    @property
    def _worn_again_bytes(self) -> int:
        """Bytes that each further micro-batch of a step writes to the drive."""
        spilled = [unit for unit in self.request.units if self.home(unit, Role.GRAD) is Tier.NVME]
        gradients = sum(self.role_bytes(unit, Role.GRAD) for unit in spilled)
        return gradients + self.activation_step_bytes.get("nvme_write", 0)

    def _wear(self) -> str:
        """Return what steps write to the drive, in words: what each micro-batch writes is told apart."""
        request, written, again = self.request, self.step_bytes["nvme_write"], self._worn_again_bytes
        text = f"{figures(written * 1000 / 1e12)} TB written per 1000 steps"
        if request.accumulate and again:
            text += f" of one micro-batch, and {figures(again * 1000 / 1e12)} TB more for each further one"
        return text if request.world_size == 1 else f"{text}, by this rank alone"


def _listed(sizes: Mapping[str, int]) -> str:
    return ", ".join(f"{link} {format_bytes(size)}" for link, size in sizes.items() if size)
