"""The plan: homes, buffer sizes, and the bytes and seconds a step will take, worked out before anything is loaded.

Owns the arithmetic of budgets. Pure Python over plain values: testable without torch, a GPU or a disk. It decides
nothing at run time. Next: :mod:`offload.shards.manager` lays out the arenas as the plan says.

What sits on NVMe is read and written once per step (parameters: read for forward and backward,
and where the device is a GPU for the update, and written); so host memory is given first to gradients (which would be
written and read again), then to parameters (three passes or four), then to states (two passes). An optimizer whose own
class makes the steps takes host memory beside all this, for temporaries and small states.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping, Sequence

from offload.config import format_bytes
from offload.errors import BudgetError, ConfigError
from offload.kernels.ranges import StateKind
from offload.memory.tiers import BUFFER_ALIGNMENT_BYTES, Tier
from offload.planning.roles import ADAM_STATES, STATE_ROLES, Role, States, role_bytes, whole_pages
from offload.planning.units import Unit

WORKING_UNITS = 3  # computing, arriving, leaving
STAGING_SLOTS = 4  # at least: reading, reading, computing, writing
MOST_STAGING_SLOTS = 16  # where host memory is left: the more, the longer the drive goes on while nobody passes by
GRAD_POOL_BUFFERS = 2  # spilled gradients: one filling, one leaving
MIN_CHUNK_NUMEL = 64 * 1024
MAX_CHUNK_NUMEL = 2 * 1024 * 1024
STAGING_SHARE = 0.2  # bytes of staging per parameter that are worth their room
MOST_STAGING_SHARE = 0.27  # the same where host memory is left
ACTIVATION_SHARE = 0.5
SMALL_UNIT_BYTES = 1 << 20
SMALL_UNITS_SHARE = 0.05
NVME_SLACK_CHUNKS = 16
MOST_SLOTS = 64  # of the pipeline, with those in memory that is idle at the moment
_ENOUGH_BYTES = 1 << 60


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
class Request:
    """What the planner needs to know.

    Attributes:
        units: all units of the model.
        budgets: bytes per tier.
        param_tier, optimizer_tier: a forced home, or None.
        accumulate: gradients are kept in fp32 (several micro-batches per step).
        device_is_host: the compute device is the CPU: states may live on DEVICE, and NVMe reads reach it directly.
        activation_bytes: part of the device budget for activations, None for the default.
        chunk_numel: optimizer chunk, None for the default.
        alignment_bytes: granularity of the swap files.
        states: what the optimizer remembers of each element, and in which format.
        held_together: sets of units (their indices) that nested forwards have in use at once.
        own: what the optimizer takes where its own class makes the steps, else None.
    """

    units: Sequence[Unit]
    budgets: Mapping[Tier, int]
    param_tier: Tier | None = None
    optimizer_tier: Tier | None = None
    accumulate: bool = False
    device_is_host: bool = True
    activation_bytes: int | None = None
    chunk_numel: int | None = None
    alignment_bytes: int = BUFFER_ALIGNMENT_BYTES
    states: States = ADAM_STATES
    held_together: Sequence[frozenset[int]] = ()
    own: OwnBytes | None = None

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


@dataclasses.dataclass(frozen=True, slots=True)
class Homes:
    """Homes of one unit's shards; `states` is None for a frozen unit, like `grad`."""

    param: Tier
    grad: Tier | None
    states: Tier | None


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """Homes, buffers, and worst-case bytes per tier. ``print(plan)`` shows it as a table.

    Attributes:
        homes: per unit.
        working_bytes: region of DEVICE for working copies of parameters.
        activation_bytes: room in the device budget for activations and temporaries.
        grad_pool_bytes: region of HOST for gradients on their way to NVMe.
        fetch_staging_bytes: buffers of HOST through which NVMe reaches a GPU.
        grad_staging_bytes: buffer of HOST through which gradients leave a GPU.
        chunk_numel, staging_slots, staging_slot_bytes: the optimizer's pipeline buffers in HOST.
        arena_bytes: bytes of each tier that are taken at start (NVMe: file size).
        step_bytes: predicted bytes per link and optimizer step (one micro-batch).
        early_bytes: room in NVME for updates that are made before it is known whether they count.
        wide_bytes: room in each tier, beside the arena, for gradients of 16-bit units in fp32, which they become once a
            second backward pass of a step adds to them; empty where there is none.
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
    early_bytes: int = 0
    wide_bytes: Mapping[Tier, int] = dataclasses.field(default_factory=dict)

    @property
    def most_slots(self) -> int:
        """Slots that the optimizer's pipeline may have: the swap files have room for a new version of each chunk."""
        size = self.staging_slot_bytes + self.request.alignment_bytes
        return min(NVME_SLACK_CHUNKS + self.early_bytes // size, MOST_SLOTS)

    def aside_bytes(self, unit: Unit) -> int:
        """Return the bytes in the swap files of a unit's update beside the old content; 0 where there is none.

        There is where parameters and states are at home on NVMe, and the gradient waits for the step in memory.
        """
        return _aside_bytes(self.request, unit, self.homes[unit.index], self.chunk_numel)

    def stays(self, unit: Unit) -> bool:
        """Tell whether everything of a unit is on the device: then there is nothing that its update would wait for."""
        homes = self.homes[unit.index]
        return homes.param is Tier.DEVICE and homes.states is Tier.DEVICE

    def role_bytes(self, unit: Unit, role: Role) -> int:
        """Return the bytes of a shard, whole pages."""
        return _bytes(self.request, unit, role)

    def room_bytes(self, unit: Unit, role: Role) -> int:
        """Return the bytes of a shard's home in memory: of a gradient's with the room to become fp32, if there is."""
        wide = role is Role.GRAD and self.wide_bytes
        return _wide_bytes(self.request, unit) if wide else self.role_bytes(unit, role)

    def chunk_bytes(self, unit: Unit, role: Role, numel: int) -> int:
        """Return the bytes of `numel` elements of a shard, from the start of a chunk on."""
        return _exact_bytes(self.request, unit, role, numel)

    def home(self, unit: Unit, role: Role) -> Tier | None:
        """Return the home of a shard, None where the unit has no such role."""
        homes = self.homes[unit.index]
        if role is Role.PARAM:
            return homes.param
        return homes.grad if role is Role.GRAD else homes.states

    def __str__(self) -> str:
        return render(self)


def make_plan(request: Request) -> Plan:
    """Choose homes and sizes.

    Raises:
        ConfigError: optimizer states are to stay on a GPU, which they cannot yet, whatever the budgets.
        BudgetError: the model cannot be trained within the budgets; names the tier, the bytes, and the smallest budget
            that would do with the other budgets as they are (or the smallest combination, where one is not enough).
    """
    if request.optimizer_tier is Tier.DEVICE and not request.device_is_host and any(u.trainable for u in request.units):
        raise ConfigError(
            'offload_optimizer="none": optimizer states cannot stay on a GPU yet; use "auto", "cpu" or "nvme"'
        )
    try:
        return _plan(request)
    except _TooSmall as short:
        raise _refusal(request, short) from None


class _TooSmall(Exception):
    """A budget is too small for `what`."""

    def __init__(self, tier: Tier, what: str) -> None:
        super().__init__(what)
        self.tier = tier
        self.what = what


def _plan(request: Request) -> Plan:
    device_budget, host_budget = request.budgets[Tier.DEVICE], request.budgets[Tier.HOST]
    units = request.units
    params = {unit.index: unit.param_bytes for unit in units}
    grads = {u.index: _bytes(request, u, Role.GRAD) for u in units if u.trainable}
    states = {u.index: sum(_bytes(request, u, role) for role in STATE_ROLES) for u in units if u.trainable}

    # DEVICE: everything if it fits; else small units stay and the rest of the room holds working copies.
    widest = request.widest(units)
    largest = sum(unit.param_bytes for unit in widest)
    resident = sum(grads.values()) + sum(states.values())
    states_stay = request.optimizer_tier is Tier.DEVICE
    if request.activation_bytes is not None:
        activation = request.activation_bytes
    else:
        needed = sum(params.values()) if request.param_tier is Tier.DEVICE else largest
        needed += resident if states_stay else 0
        activation = max(min(int(device_budget * ACTIVATION_SHARE), device_budget - needed), 0)
    room = device_budget - activation - (resident if states_stay else 0)
    if room < 0:
        states_too = 'optimizer states (offload_optimizer="none") and ' if states_stay else ""
        what = f"{states_too}{format_bytes(activation)} of activations"
        raise _TooSmall(Tier.DEVICE, what)
    param_home: dict[int, Tier] = {}
    working = 0
    on_device = sum(params.values())
    if request.param_tier is Tier.DEVICE or (request.param_tier is None and on_device <= room):
        if on_device > room:
            raise _TooSmall(Tier.DEVICE, 'parameters (offload_param="none")')
        param_home = dict.fromkeys(params, Tier.DEVICE)
    else:
        if largest > room:
            what = "largest units" if len(widest) <= WORKING_UNITS else "units that are in use at once"
            names = ", ".join(f"{unit.name} {format_bytes(unit.param_bytes)}" for unit in widest)
            text = f"the {len(widest)} {what} ({names}) and {format_bytes(activation)} of activations"
            raise _TooSmall(Tier.DEVICE, text)
        on_device = 0
        for unit in sorted(units, key=lambda u: u.param_bytes):
            small = unit.param_bytes <= SMALL_UNIT_BYTES and request.param_tier is None
            share = on_device + unit.param_bytes <= room * SMALL_UNITS_SHARE
            if small and share and largest + on_device + unit.param_bytes <= room:
                param_home[unit.index] = Tier.DEVICE
                on_device += unit.param_bytes
        away = sum(size for index, size in params.items() if index not in param_home)
        working = min(room - on_device, away) // BUFFER_ALIGNMENT_BYTES * BUFFER_ALIGNMENT_BYTES
    device_left = room - on_device - working

    # Optimizer states and gradients may stay on DEVICE only where it is host memory.
    state_home: dict[int, Tier] = {}
    grad_home: dict[int, Tier] = {}
    if states_stay or (request.optimizer_tier is None and request.device_is_host and resident <= device_left):
        state_home = dict.fromkeys(states, Tier.DEVICE)
        grad_home = dict.fromkeys(grads, Tier.DEVICE)
        on_device += resident

    def fill_host(nvme_allowed: bool) -> tuple[dict[int, Tier], dict[int, Tier], dict[int, Tier], dict[str, int]]:
        """Give host memory away in order of worth; raise where NVMe would be needed but is not there."""
        chunk = _chunk(request)
        also = f" and {request.own}" if request.own else ""
        grad_at, param_at, state_at = dict(grad_home), dict(param_home), dict(state_home)
        sizes = {"staging": 0, "pool": 0, "fetch": 0, "down": 0, "chunk": chunk, "slot": 0, "slots": 0}
        if nvme_allowed or not request.device_is_host:  # parameters of a GPU pass through staging, too
            sizes["slot"] = _slot_bytes(request, chunk, gradients=False)
            sizes["slots"] = STAGING_SLOTS if sizes["slot"] else 0
            if nvme_allowed and not request.device_is_host:
                sizes["fetch"] = 2 * max(params.values())
            if not request.device_is_host:
                sizes["down"] = max((params[index] for index in grads), default=0)
        left = host_budget - sizes["slots"] * sizes["slot"] - sizes["fetch"] - sizes["down"] - request.own_bytes
        kinds = [
            ("parameters", params, param_at, request.param_tier),
            ("optimizer states", states, state_at, request.optimizer_tier),
        ]
        for kind, wanted, placed, forced in kinds:  # what has no choice comes first
            if forced is Tier.HOST:
                left -= sum(size for index, size in wanted.items() if index not in placed)
                placed.update((index, Tier.HOST) for index in wanted if index not in placed)
                if left < 0:
                    raise _TooSmall(Tier.HOST, f'{kind} (forced to "cpu") and buffers{also}')
        waiting = [size for index, size in grads.items() if index not in grad_at]
        if nvme_allowed and waiting and sum(waiting) > left:
            sizes["pool"] = GRAD_POOL_BUFFERS * max(waiting)
            narrow, sizes["slot"] = sizes["slot"], _slot_bytes(request, chunk)  # gradients pass through it, too
            left -= sizes["pool"] + sizes["slots"] * (sizes["slot"] - narrow)
        if left < 0:
            raise _TooSmall(Tier.HOST, f"the buffers of the NVMe pipeline{also}" if sizes["slot"] else f"buffers{also}")
        for kind, wanted, placed, forced in [("gradients", grads, grad_at, None), *kinds]:
            for index, size in wanted.items():
                if index in placed:
                    continue
                if forced is not Tier.NVME and size <= left:
                    placed[index] = Tier.HOST
                    left -= size
                elif nvme_allowed:
                    placed[index] = Tier.NVME
                else:
                    raise _TooSmall(Tier.HOST, f"{kind} without an NVMe tier{also}")
        if nvme_allowed and sizes["slots"]:
            worth = min(int(_trainable_numel(request) * MOST_STAGING_SHARE) // sizes["slot"], MOST_STAGING_SLOTS)
            sizes["slots"] += max(min(left // sizes["slot"], worth - STAGING_SLOTS), 0)
        sizes["staging"] = sizes["slots"] * sizes["slot"]
        return grad_at, param_at, state_at, sizes

    placed = None
    if Tier.NVME not in (request.param_tier, request.optimizer_tier):
        try:
            placed = fill_host(nvme_allowed=False)
        except _TooSmall:
            if request.budgets[Tier.NVME] <= 0:
                raise
    if placed is None:
        placed = fill_host(nvme_allowed=True)
    grad_at, param_at, state_at, sizes = placed

    nvme = 0
    for unit in units:
        if param_at[unit.index] is Tier.NVME:
            nvme += _padded(request, unit, (Role.PARAM,), sizes["chunk"])
        if unit.trainable and state_at[unit.index] is Tier.NVME:
            nvme += _padded(request, unit, STATE_ROLES, sizes["chunk"])
        if unit.trainable and grad_at[unit.index] is Tier.NVME:
            nvme += _padded(request, unit, (Role.GRAD,), sizes["chunk"])
    if nvme:  # copy-on-write needs room for the versions in flight
        nvme += NVME_SLACK_CHUNKS * (sizes["slot"] + request.alignment_bytes)
    if nvme > request.budgets[Tier.NVME]:
        raise _TooSmall(Tier.NVME, "parameters, gradients and states that do not fit above")
    homes = tuple(Homes(param_at[u.index], grad_at.get(u.index), state_at.get(u.index)) for u in units)
    aside = sum(_aside_bytes(request, u, home, sizes["chunk"]) for u, home in zip(units, homes, strict=True))
    early = min(aside, request.budgets[Tier.NVME] - nvme) // request.alignment_bytes * request.alignment_bytes

    host = sizes["staging"] + sizes["pool"] + sizes["fetch"] + sizes["down"]
    host += sum(size for i, size in grads.items() if grad_at[i] is Tier.HOST)
    host += sum(size for i, size in params.items() if param_at[i] is Tier.HOST)
    host += sum(size for i, size in states.items() if state_at[i] is Tier.HOST)
    device = on_device + working
    spare = {Tier.DEVICE: device_budget - activation - device, Tier.HOST: host_budget - host - request.own_bytes}
    wide = _widening(request, homes)
    if any(size > spare.get(tier, 0) for tier, size in wide.items()):
        wide = {}
    return Plan(
        request=request,
        homes=homes,
        working_bytes=working,
        activation_bytes=device_budget - device - wide.get(Tier.DEVICE, 0),
        grad_pool_bytes=sizes["pool"],
        fetch_staging_bytes=sizes["fetch"],
        grad_staging_bytes=sizes["down"],
        chunk_numel=sizes["chunk"],
        staging_slots=sizes["slots"],
        staging_slot_bytes=sizes["slot"],
        arena_bytes={Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: nvme + early},
        step_bytes=_step_bytes(request, homes, sizes["chunk"]),
        early_bytes=early,
        wide_bytes=wide,
    )


def _widening(request: Request, homes: Sequence[Homes]) -> dict[Tier, int]:
    """Return per tier what the gradients of 16-bit units take beyond their own bytes once they are fp32."""
    more: dict[Tier, int] = {}
    for unit, home in zip(request.units, homes, strict=True):
        size = _wide_bytes(request, unit) - _bytes(request, unit, Role.GRAD)
        if size and home.grad is not None:
            more[home.grad] = more.get(home.grad, 0) + size
    return more


def _wide_bytes(request: Request, unit: Unit) -> int:
    return whole_pages(role_bytes(unit, Role.GRAD, unit.numel, accumulate=True, states=request.states))


def _bytes(request: Request, unit: Unit, role: Role) -> int:
    return whole_pages(_exact_bytes(request, unit, role, unit.numel))


def _exact_bytes(request: Request, unit: Unit, role: Role, numel: int) -> int:
    return role_bytes(unit, role, numel, accumulate=request.accumulate, states=request.states)


def _chunk(request: Request) -> int:
    """Return elements per optimizer chunk: a multiple of the smallest one, bounded by memory and the largest unit."""
    if request.chunk_numel is not None:
        return -(-request.chunk_numel // MIN_CHUNK_NUMEL) * MIN_CHUNK_NUMEL
    smallest = STAGING_SLOTS * max(_slot_bytes(request, MIN_CHUNK_NUMEL), 1)
    largest = max((unit.numel for unit in request.units), default=0)
    wanted = min(
        int(_trainable_numel(request) * STAGING_SHARE) // smallest, min(MAX_CHUNK_NUMEL, largest) // MIN_CHUNK_NUMEL
    )
    return max(wanted, 1) * MIN_CHUNK_NUMEL


def _trainable_numel(request: Request) -> int:
    return sum(unit.numel for unit in request.units if unit.trainable)


def _slot_bytes(request: Request, chunk: int, *, gradients: bool = True) -> int:
    """Return bytes of one staging slot: a chunk in every role that may have to pass through it."""
    roles = (Role.PARAM, Role.GRAD, *STATE_ROLES) if gradients else (Role.PARAM, *STATE_ROLES)
    longest = [(unit, unit.chunk_limit(chunk)) for unit in request.units]
    sizes = (sum(_exact_bytes(request, unit, role, numel) for role in roles) for unit, numel in longest)
    return whole_pages(max(sizes, default=0))


def _padded(request: Request, unit: Unit, roles: Sequence[Role], chunk: int) -> int:
    """Return bytes in the swap files: one record per chunk, padded to their granularity."""
    align = request.alignment_bytes
    sizes = (sum(_exact_bytes(request, unit, role, end - begin) for role in roles) for begin, end in unit.chunks(chunk))
    return sum(-(-size // align) * align for size in sizes)


def _aside_bytes(request: Request, unit: Unit, homes: Homes, chunk: int) -> int:
    if request.own is not None:  # what its class keeps in host memory cannot be put aside
        return 0
    if not (unit.trainable and homes.param is homes.states is Tier.NVME and homes.grad is Tier.HOST):
        return 0
    return _padded(request, unit, (Role.PARAM,), chunk) + _padded(request, unit, STATE_ROLES, chunk)


def _step_bytes(request: Request, homes: Sequence[Homes], chunk: int) -> dict[str, int]:
    """Predict bytes per link for one optimizer step with one micro-batch, working copies never surviving."""
    read = write = h2d = adam = d2h = 0
    for unit, home in zip(request.units, homes, strict=True):
        states = sum(_exact_bytes(request, unit, role, unit.numel) for role in STATE_ROLES)
        grad = _bytes(request, unit, Role.GRAD)
        passes = 2 if unit.trainable else 1
        if home.param is Tier.NVME:
            read += passes * unit.param_bytes
            if unit.trainable:
                write += unit.param_bytes
                read += 0 if request.device_is_host else unit.param_bytes  # else what forward fetches is updated
        if home.param is not Tier.DEVICE and not (request.device_is_host and home.param is Tier.NVME):
            h2d += passes * unit.param_bytes
        if home.states is Tier.NVME:
            record = _padded(request, unit, STATE_ROLES, chunk)
            read += record
            write += record
        if home.grad is Tier.NVME:
            read += grad
            write += grad
        if unit.trainable:
            adam += unit.param_bytes + grad + states
            d2h += unit.param_bytes if not request.device_is_host else 0
    return {"nvme_read": read, "nvme_write": write, "h2d": h2d, "d2h": d2h, "cpu_adam": adam}


def _refusal(request: Request, short: _TooSmall) -> BudgetError:
    """Word a refusal, with the smallest budgets that would do."""
    budgets = dict(request.budgets)
    raised: list[Tier] = []
    failing: Tier | None = short.tier
    while failing is not None:  # raise one budget after another until there is a plan...
        assert failing not in raised, f"{failing} is too small at any size"
        raised.append(failing)
        budgets[failing] = _ENOUGH_BYTES
        failing = _failing_tier(request, budgets)
    for tier in raised:  # ...then lower each again; more memory never makes a plan impossible, so bisection is exact
        low, high = request.budgets[tier] // BUFFER_ALIGNMENT_BYTES, _ENOUGH_BYTES // BUFFER_ALIGNMENT_BYTES
        while high - low > 1:
            middle = (low + high) // 2
            budgets[tier] = middle * BUFFER_ALIGNMENT_BYTES
            if _failing_tier(request, budgets) is None:
                high = middle
            else:
                low = middle
        budgets[tier] = high * BUFFER_ALIGNMENT_BYTES
    limit, need = request.budgets[short.tier], budgets[short.tier]
    if len(raised) == 1:
        text = (
            f"{short.what} need {format_bytes(need)} ({need} bytes) but the limit is {format_bytes(limit)}; "
            f'the smallest max_memory["{short.tier.value}"] that would do is {need} bytes'
        )
    else:
        each = " and ".join(f'max_memory["{tier.value}"] = {budgets[tier]} bytes' for tier in raised)
        text = (
            f"{short.what} do not fit {format_bytes(limit)}, and other budgets are too small as well; "
            f"what would do is {each}"
        )
    if short.tier is not Tier.NVME:
        text += ", or offload more of it: see nvme_path and offload_param/offload_optimizer"
    return BudgetError(f"{short.tier.value} budget: {text}")


def _failing_tier(request: Request, budgets: Mapping[Tier, int]) -> Tier | None:
    try:
        _plan(dataclasses.replace(request, budgets=budgets))
    except _TooSmall as short:
        return short.tier
    return None


def render(plan: Plan) -> str:
    """Return the plan as a table for people."""
    request = plan.request
    rows: list[tuple[str, ...]] = [("", "parameters", "gradients", "states", "buffers", "total", "budget")]
    buffers = {
        Tier.DEVICE: plan.working_bytes,
        Tier.HOST: plan.arena_bytes[Tier.HOST],
        Tier.NVME: plan.arena_bytes[Tier.NVME],
    }
    for tier in Tier:
        param = sum(u.param_bytes for u in request.units if plan.homes[u.index].param is tier)
        grad = sum(_bytes(request, u, Role.GRAD) for u in request.units if plan.homes[u.index].grad is tier)
        states = sum(
            sum(_bytes(request, u, role) for role in STATE_ROLES)
            for u in request.units
            if plan.homes[u.index].states is tier
        )
        rest = buffers[tier] - (0 if tier is Tier.DEVICE else param + grad + states)
        own = request.own_bytes if tier is Tier.HOST else 0
        sizes = (param, grad, states, rest + own, plan.arena_bytes[tier] + own, request.budgets[tier])
        rows.append((tier.value, *(format_bytes(size) if size else "-" for size in sizes)))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    trainable = sum(slot.numel for u in request.units if u.trainable for slot in u.slots)
    frozen = sum(slot.numel for u in request.units if not u.trainable for slot in u.slots)
    lines.insert(
        0,
        f"{len(request.units)} units, {trainable:,} trainable parameters" + (f", {frozen:,} frozen" if frozen else ""),
    )
    if request.states.kind is not StateKind.FLOAT32 and trainable:
        share = format(
            len(request.states.names) * request.states.kind.itemsize + request.states.kind.units_bytes(1024) / 1024,
            ".4g",
        )
        names = " and ".join(request.states.names)
        lines.append(f"{names} in {request.states.kind.value} (lossy): {share} bytes per parameter instead of 8")
    if request.own:
        lines.append(f"optimizer: torch's own {request.own.name} on fp32 tensors in host memory, slower than a kernel")
        lines.append(f"outside the tiers, in the cpu budget: {request.own}")
    lines.append(f"activations and temporaries: {format_bytes(plan.activation_bytes)} of the device budget")
    if plan.wide_bytes:
        room = ", ".join(f"{format_bytes(size)} of the {tier.value} budget" for tier, size in plan.wide_bytes.items())
        lines.append(f"room to add several backward passes in fp32, used only then: {room}")
    moved = ", ".join(f"{link} {format_bytes(size)}" for link, size in plan.step_bytes.items() if size)
    lines.append(f"moved per step (one micro-batch, nothing cached): {moved or 'nothing'}")
    if plan.early_bytes:
        room = format_bytes(plan.early_bytes)
        lines.append(f"updates during backward: {room} of the nvme buffers, beside the old content")
    if plan.step_bytes["nvme_write"]:
        lines.append(f"drive wear: {plan.step_bytes['nvme_write'] * 1000 / 1e12:.3g} TB written per 1000 steps")
    return "\n".join(lines)
