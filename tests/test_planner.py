"""Plans: whatever the units and budgets, a plan fits and adds up, or a refusal names the smallest budget that does."""

from __future__ import annotations

import copy
import dataclasses
import itertools
import re
from collections.abc import Sequence
from typing import Any

import pytest
from drawn_homes import any_homes
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import BudgetError, ConfigError
from offload.kernels.ranges import StateKind
from offload.memory.budget import Tier
from offload.planning import homes as filling
from offload.planning.asked import WORKING_UNITS, Commit, Homes, OwnBytes, Request
from offload.planning.plan import NVME_SLACK_CHUNKS, STAGING_SLOTS, Plan, most_in_flight
from offload.planning.planner import Planner, make_plan
from offload.planning.roles import MOMENTS, STATE_ROLES, Role, States, role_bytes
from offload.planning.sizing import (
    APART_STAGING_SHARE,
    CLIPPED_STAGING_SHARE,
    MAX_CHUNK_NUMEL,
    MIN_CHUNK_NUMEL,
    MOST_STAGING_SHARE,
    MOST_STAGING_SLOTS,
    TooSmall,
    chunk_numel_of,
    plan_of,
)
from offload.planning.slices import owned_range
from offload.planning.units import PAD_NUMEL, Unit, lay_out
from offload.sizes import PAGE_BYTES, format_bytes

PAGE = PAGE_BYTES
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}


def make_unit(index: int, numel: int, dtype: str = "bfloat16", trainable: bool = True, *, whole: bool = False) -> Unit:
    slots, padded = lay_out([(f"u{index}.weight", (numel,))], whole=whole)
    return Unit(index, f"u{index}", dtype, ITEMSIZE[dtype], trainable, padded, slots, whole)


def budgets(device: int, host: int, nvme: int = 0) -> dict[Tier, int]:
    return {Tier.DEVICE: device, Tier.HOST: host, Tier.NVME: nvme}


@st.composite
def unit_lists(draw: st.DrawFn) -> list[Unit]:
    small = st.integers(1, 40 * PAD_NUMEL)
    sizes = draw(st.lists(small | st.integers(1, 6_000_000), min_size=1, max_size=8))
    kinds = st.sampled_from([(dtype, True) for dtype in ("bfloat16", "float16", "float32")] + [("int8", False)])
    kinds = kinds | st.just(("bfloat16", False))
    whole = draw(st.booleans())
    made = ((index, size, *draw(kinds)) for index, size in enumerate(sizes))
    return [make_unit(*unit, whole=whole and unit[-1]) for unit in made]


sizes_in_bytes = st.integers(0, 80 * MIB) | st.integers(0, 4000).map(lambda pages: pages * PAGE)


names = st.sampled_from([("exp_avg", "exp_avg_sq"), ("momentum_buffer",), (), tuple("abcdef")])
states = st.builds(States, kind=st.sampled_from(StateKind)) | st.builds(States, names)


@st.composite
def requests(draw: st.DrawFn) -> Request:
    device_is_host = draw(st.booleans())
    tiers = [None, None, Tier.DEVICE, Tier.HOST, Tier.NVME]
    world_size = draw(st.just(1) | st.integers(2, 4))
    updates_on_device = not device_is_host and world_size == 1 and draw(st.booleans())
    own = draw(st.none() | st.builds(OwnBytes, st.just("Muon"), st.integers(0, MIB), st.integers(0, 20 * MIB)))
    param_tier = draw(st.sampled_from(tiers))
    stays = updates_on_device and own is None and param_tier in (None, Tier.DEVICE)
    optimizer_tiers = tiers if device_is_host or stays else [None, Tier.HOST, Tier.NVME]
    units = draw(unit_lists())
    may_slice = device_is_host or world_size == 1 or param_tier is not Tier.DEVICE
    return Request(
        units=units,
        budgets=budgets(draw(sizes_in_bytes), draw(sizes_in_bytes), draw(st.just(0) | sizes_in_bytes | st.just(GIB))),
        param_tier=param_tier,
        optimizer_tier=draw(st.sampled_from(optimizer_tiers)),
        accumulate=draw(st.booleans()),
        device_is_host=device_is_host,
        updates_on_device=updates_on_device,
        activation_bytes=draw(st.none() | st.integers(0, 30 * MIB)),
        chunk_numel=draw(st.none() | st.integers(1, 300_000)),
        states=draw(states),
        held_together=draw(st.lists(st.frozensets(st.integers(0, len(units) - 1)), max_size=3)),
        own=own,
        rank=draw(st.integers(0, world_size - 1)),
        world_size=world_size,
        nodes=draw(st.sampled_from([nodes for nodes in (1, 2, 3, 4) if world_size % nodes == 0])),
        stage=draw(st.sampled_from([1, 2, 3] if may_slice else [1, 2])),
    )


def size(plan: Plan, unit: Unit, *roles: Role) -> int:
    """Bytes of a unit's shards, from the formula of the module's text: whole pages each."""
    return sum(pages(exact_size(plan, unit, numel(plan, unit, role), role)) for role in roles)


def numel(plan: Plan, unit: Unit, role: Role) -> int:
    """Elements that the plan's rank keeps: before stage 3 all of the parameters, a slice of the rest."""
    begin, end = kept(plan, unit, role)
    return end - begin


def kept(plan: Plan, unit: Unit, role: Role) -> tuple[int, int]:
    if (role is Role.PARAM and plan.request.stage < 3) or unit.whole:
        return 0, unit.numel
    local = plan.request.world_size // plan.request.nodes
    return owned_range(unit.numel, plan.request.rank % local, local)


def records_of(plan: Plan, unit: Unit, roles: Sequence[Role]) -> int:
    """Bytes of a unit's records: one per chunk, of whole pages: only scales leave a rest."""
    slice_begin, slice_end = kept(plan, unit, roles[0])
    total = 0
    for begin, end in unit.chunks(plan.chunk_numel):
        begin, end = max(begin, slice_begin), min(end, slice_end)
        total += pages(exact_size(plan, unit, end - begin, *roles)) if begin < end else 0
    return total


def pages(size_bytes: int) -> int:
    return -(-size_bytes // PAGE) * PAGE


def exact_size(plan: Plan, unit: Unit, numel: int, *roles: Role) -> int:
    accumulate, states = plan.request.accumulate, plan.request.states
    state = {StateKind.FLOAT32: 4, StateKind.BFLOAT16: 2, StateKind.INT8: 1}[states.kind]
    per_element = {
        Role.PARAM: ITEMSIZE[unit.dtype],
        Role.GRAD: 4 if accumulate else ITEMSIZE[unit.dtype],
        Role.MASTER: {"bfloat16": 2, "float16": 4}.get(unit.dtype, 0),
        **{role: state * (len(states.names) > position) for position, role in enumerate(MOMENTS)},
        Role.SCALES: 2 / 128 * (states.kind is StateKind.INT8),
    }
    return sum(int(numel * per_element[role]) for role in roles if unit.trainable or role is Role.PARAM)


def updated_beside(plan: Plan, unit: Unit, homes: Homes) -> tuple[int, int]:
    """Return what a unit's update beside the old content takes in host memory and on NVMe: 0 where there is none."""
    request = plan.request
    may = unit.trainable and request.own is None and homes.grad is Tier.HOST
    if request.device_is_host:
        may = may and homes.param is homes.states is Tier.NVME
    elif request.world_size > 1:  # they update when all of them have come to the step
        may = False
    in_memory = on_drive = 0
    for home, roles in ((homes.param, [Role.PARAM]), (homes.states, STATE_ROLES)) if may else ():
        if home is Tier.NVME:
            on_drive += records_of(plan, unit, roles)
        else:
            in_memory += size(plan, unit, *roles)
    return in_memory, on_drive


def check_plan(plan: Plan) -> None:
    request = plan.request
    units = request.units
    assert len(plan.homes) == len(units)
    for unit, homes in zip(units, plan.homes, strict=True):
        assert isinstance(homes.param, Tier)
        assert isinstance(homes.grad, Tier) == isinstance(homes.states, Tier) == unit.trainable
        if request.param_tier is not None:
            assert homes.param is request.param_tier
        if request.optimizer_tier is not None and unit.trainable:
            assert homes.states is request.optimizer_tier
        for role, home in ((Role.PARAM, homes.param), (Role.GRAD, homes.grad), (Role.EXP_AVG, homes.states)):
            assert plan.home(unit, role) is home
            assert plan.role_bytes(unit, role) == size(plan, unit, role)
        if not request.device_is_host and Tier.DEVICE in (homes.grad, homes.states):  # all of it, or nothing
            assert request.updates_on_device and request.own is None
            assert homes == Homes(Tier.DEVICE, Tier.DEVICE, Tier.DEVICE) and plan.on_device(unit)
        else:
            assert not plan.on_device(unit)

    def at(tier: Tier) -> int:
        total = 0
        for unit, homes in zip(units, plan.homes, strict=True):
            total += size(plan, unit, Role.PARAM) * (homes.param is tier)
            total += size(plan, unit, Role.GRAD) * (homes.grad is tier)
            total += size(plan, unit, *STATE_ROLES) * (homes.states is tier)
        return total

    staging = plan.staging_slots * plan.staging_slot_bytes
    totals = pages(16 * sum(len(unit.slots) for unit in units if plan.on_device(unit)))
    assert plan.totals_bytes == totals
    assert plan.arena_bytes[Tier.DEVICE] == at(Tier.DEVICE) + plan.working_bytes + totals
    transit = plan.fetch_staging_bytes + plan.grad_staging_bytes + request.exchange_bytes
    is_sliced = request.world_size > request.nodes and request.stage == 3
    # a unit that only other ranks use, and two on their way to a device that the host cannot address
    transit += (1 if request.device_is_host else 3) * max(unit.param_bytes for unit in units) if is_sliced else 0
    beside = [updated_beside(plan, unit, homes) for unit, homes in zip(units, plan.homes, strict=True)]
    spare = [in_memory for unit, (in_memory, _) in zip(units, beside, strict=True) if unit.index in plan.spare_units]
    assert plan.spare_bytes == sum(spare) and all(spare)
    assert plan.arena_bytes[Tier.HOST] == at(Tier.HOST) + staging + plan.grad_pool_bytes + transit + plan.spare_bytes
    slack = NVME_SLACK_CHUNKS * (plan.staging_slot_bytes + PAGE_BYTES)
    records = 0
    for unit, homes in zip(units, plan.homes, strict=True):
        for home, roles in ((homes.param, [Role.PARAM]), (homes.grad, [Role.GRAD]), (homes.states, STATE_ROLES)):
            if home is Tier.NVME:
                records += records_of(plan, unit, roles)
    certain = records + slack if records else 0
    free = {
        Tier.HOST: request.budgets[Tier.HOST] - plan.arena_bytes[Tier.HOST] - plan.wide_bytes.get(Tier.HOST, 0),
        Tier.NVME: (request.budgets[Tier.NVME] - certain) // PAGE * PAGE,
    }
    aside = 0  # the new content of what is updated during backward, as long as the old one is there
    for unit, (in_memory, on_drive) in reversed(list(zip(units, beside, strict=True))):
        assert plan.aside_bytes(unit) == on_drive
        if in_memory and unit.index not in plan.spare_units:  # what is left is too little for it
            assert in_memory > free[Tier.HOST] - request.own_bytes or aside + on_drive > free[Tier.NVME]
            continue
        assert plan.updates_early(unit) == (in_memory + on_drive > 0)
        aside += on_drive
    assert plan.early_bytes == min(aside, free[Tier.NVME])
    assert plan.arena_bytes[Tier.NVME] == certain + plan.early_bytes
    in_flight = NVME_SLACK_CHUNKS + plan.early_bytes // (plan.staging_slot_bytes + PAGE_BYTES)
    assert plan.staging_slots <= max(in_flight, 4), "each may be on its way, beside what it replaces"
    own = request.own
    if own is not None:  # whole pages
        assert request.own_bytes == pages(own.kept_bytes + own.step_bytes)
    for tier in Tier:
        limit = request.budgets[tier] - request.own_bytes * (tier is Tier.HOST)
        assert 0 <= plan.arena_bytes[tier] <= plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) <= limit
        assert plan.arena_bytes[tier] % PAGE == 0
    on_device = plan.arena_bytes[Tier.DEVICE] + plan.wide_bytes.get(Tier.DEVICE, 0)
    assert plan.activation_bytes + on_device == request.budgets[Tier.DEVICE]
    if plan.wide_bytes:  # gradients of 16 bits may become fp32: all of them, where they are
        for tier in Tier:
            more = sum(
                pages(4 * numel(plan, unit, Role.GRAD)) - plan.role_bytes(unit, Role.GRAD)
                for unit, homes in zip(units, plan.homes, strict=True)
                if homes.grad is tier
            )
            assert plan.wide_bytes.get(tier, 0) == more
            assert not (more and tier is Tier.NVME)
    for unit in units:
        wide = unit.trainable and plan.wide_bytes
        fp32 = pages(4 * numel(plan, unit, Role.GRAD))
        assert plan.room_bytes(unit, Role.GRAD) == (fp32 if wide else plan.role_bytes(unit, Role.GRAD))
    if request.activation_bytes is not None:
        assert plan.activation_bytes >= request.activation_bytes
    assert plan.working_bytes % PAGE == 0 and plan.grad_pool_bytes % PAGE == 0

    # the working region holds the three largest of the units that pass through it, and each set of them held at once
    passing = {u.index: u.param_bytes for u in units if is_sliced or plan.homes[u.index].param is not Tier.DEVICE}
    assert plan.working_bytes >= sum(sorted(passing.values(), reverse=True)[:WORKING_UNITS])
    for held in request.held_together:
        assert plan.working_bytes >= sum(size_bytes for index, size_bytes in passing.items() if index in held)
    assert plan.chunk_numel % MIN_CHUNK_NUMEL == 0 and plan.chunk_numel > 0
    if request.chunk_numel is None:
        assert plan.chunk_numel <= MAX_CHUNK_NUMEL
    else:
        assert 0 <= plan.chunk_numel - request.chunk_numel < MIN_CHUNK_NUMEL
    if records or not request.device_is_host:
        asides = [plan.aside_bytes(u) for u in units] if not request.device_is_host or request.clips else []
        most = most_in_flight(plan.staging_slot_bytes, plan.early_bytes) if any(asides) else 0
        assert STAGING_SLOTS <= plan.staging_slots <= max(most, MOST_STAGING_SLOTS)
        share = APART_STAGING_SHARE if any(asides) and not request.device_is_host else MOST_STAGING_SHARE
        worth = share * sum(u.numel for u in units if u.trainable)
        states = (size(plan, u, *STATE_ROLES) for u in units if plan.homes[u.index].states is Tier.NVME)
        worth = max(worth, CLIPPED_STAGING_SHARE * sum(states) if any(asides) and request.clips else 0)
        worth = min(worth, request.budgets[Tier.HOST])
        extra = (plan.staging_slots - STAGING_SLOTS) * plan.staging_slot_bytes
        assert extra == 0 or plan.staging_slots * plan.staging_slot_bytes <= worth
        there = request.updates_on_device and request.states_may_stay
        may_stay = there and request.optimizer_tier in (None, Tier.DEVICE)
        gradients = (Role.GRAD,) if plan.grad_pool_bytes and not may_stay else ()
        every = (Role.PARAM, *gradients, *STATE_ROLES)
        longest = [(unit, unit.chunk_limit(plan.chunk_numel)) for unit in units]
        assert plan.staging_slot_bytes == pages(
            max(exact_size(plan, u, n, *every) + 4 * n * (may_stay and u.trainable) for u, n in longest)
        )
    spilled = [size(plan, u, Role.GRAD) for u in units if plan.homes[u.index].grad is Tier.NVME]
    assert plan.grad_pool_bytes >= 2 * max(spilled, default=0)
    through = [u.param_bytes for u in units if plan.homes[u.index].param is Tier.NVME]
    if not request.device_is_host:
        assert plan.fetch_staging_bytes >= 2 * max(through, default=0) * (not is_sliced)
        assert not (is_sliced and Tier.DEVICE in {homes.param for homes in plan.homes})  # ranks send from host memory
        largest = max((u.param_bytes for u in units if u.trainable and not plan.on_device(u)), default=0)
        assert plan.grad_staging_bytes in (largest, 2 * largest, 3 * largest)
    else:
        assert plan.fetch_staging_bytes == plan.grad_staging_bytes == 0
    assert str(plan)


def named_budgets(error: BudgetError) -> dict[Tier, int]:
    found = re.findall(r'max_memory\["(\w+)"\] = (\d+) bytes|max_memory\["(\w+)"\] that would do is (\d+)', str(error))
    named = {Tier(a or c): int(b or d) for a, b, c, d in found}
    assert error.budgets == {tier.value: size for tier, size in named.items()} == copy.copy(error).budgets
    return named


def refused(request: Request) -> BudgetError | None:
    try:
        make_plan(request)
    except BudgetError as error:
        return error
    return None


def enlarged(request: Request) -> Request:
    """Return the request with budgets that just do, where its own do not."""
    error = refused(request)
    return request if error is None else dataclasses.replace(request, budgets=request.budgets | named_budgets(error))


def staged(request: Request) -> bool:
    """Tell whether host memory has room for the buffers that states on the device need."""
    try:
        Planner(request).plan()
    except TooSmall:
        return False
    return True


@given(requests())
def test_states_on_the_device_save_what_the_link_and_the_cpu_would_carry(request: Request) -> None:
    """Where the plan chooses: no link carries more in a step than without kernels on the device."""
    request = dataclasses.replace(request, device_is_host=False, own=None, world_size=1, nodes=1, rank=0)
    if request.optimizer_tier is Tier.DEVICE:
        request = dataclasses.replace(request, optimizer_tier=None)
    plans = [dataclasses.replace(request, updates_on_device=there) for there in (True, False)]
    if any(refused(one) for one in plans):
        return
    there, elsewhere = map(make_plan, plans)
    assert all(there.step_bytes[link] <= elsewhere.step_bytes[link] for link in ("h2d", "d2h", "cpu_adam"))
    kept = [unit for unit in request.units if there.on_device(unit)]
    saved = sum(
        exact_size(there, unit, unit.numel, Role.PARAM, *STATE_ROLES) + there.role_bytes(unit, Role.GRAD)
        for unit in kept
    )
    assert there.step_bytes["cpu_adam"] == elsewhere.step_bytes["cpu_adam"] - saved
    if request.optimizer_tier is None and staged(plans[0]):  # what was left out has no room on the device
        room = there.activation_bytes - (request.activation_bytes or 0)
        for unit in request.units:
            if unit.trainable and there.homes[unit.index].param is Tier.DEVICE and unit not in kept:
                if request.activation_bytes is not None:
                    fp32 = pages(4 * unit.numel)
                    assert size(there, unit, *STATE_ROLES) + fp32 + PAGE > room


@given(requests())
def test_kernels_that_no_unit_has_room_for_take_no_room(request: Request) -> None:
    """The plan is the one without them; so whatever fits without them fits."""
    request = dataclasses.replace(
        request, device_is_host=False, own=None, world_size=1, nodes=1, rank=0, optimizer_tier=None
    )
    without = dataclasses.replace(request, updates_on_device=False)
    if refused(without):
        return
    there, elsewhere = make_plan(dataclasses.replace(request, updates_on_device=True)), make_plan(without)
    if not any(map(there.on_device, request.units)):
        assert (there.homes, there.arena_bytes) == (elsewhere.homes, elsewhere.arena_bytes)


def test_kernels_take_no_staging_where_nothing_is_updated_on_the_device() -> None:
    """A device with room for little more than a unit."""
    units, mib = [make_unit(number, 1 << 18) for number in range(8)], 1 << 20
    budgets = {Tier.DEVICE: 3 * mib, Tier.HOST: 64 * mib, Tier.NVME: 0}
    request = Request(units, budgets, device_is_host=False, updates_on_device=True, activation_bytes=mib)
    there, elsewhere = make_plan(request), make_plan(dataclasses.replace(request, updates_on_device=False))
    assert not any(map(there.on_device, units)) and there.arena_bytes == elsewhere.arena_bytes
    assert str(there) == str(elsewhere).replace(": it has no kernel whose bits were compared with the CPU's", "")


@given(requests())
def test_a_plan_fits_and_adds_up_or_the_smallest_budget_is_named(request: Request) -> None:
    error = refused(request)
    if error is None:
        check_plan(make_plan(request))
        return
    named = named_budgets(error)
    assert named, error
    assert str(error).startswith(f"{next(iter(named)).value} budget: ")
    enough = {**request.budgets, **named}
    check_plan(make_plan(enlarged(request)))
    for tier, limit in named.items():
        assert limit > request.budgets[tier] and limit % PAGE == 0
        less = {**enough, tier: limit - PAGE}
        assert refused(dataclasses.replace(request, budgets=less)) is not None, f"{tier}: {error}"


@given(request=requests(), seed=st.integers(0, 1000))
def test_a_plan_of_any_homes_fits_and_adds_up_or_a_tier_is_named(request: Request, seed: int) -> None:
    request = dataclasses.replace(enlarged(request), param_tier=None, optimizer_tier=None)
    homes = any_homes(request, seed)
    try:
        plan = plan_of(request, homes)
    except TooSmall as short:
        assert short.tier in Tier and short.what
        return
    assert list(plan.homes) == homes
    check_plan(plan)


@given(requests())
def test_homes_that_were_chosen_make_the_same_plan_again(request: Request) -> None:
    plan = make_plan(enlarged(request))
    assert plan_of(plan.request, plan.homes) == plan


@given(request=requests(), tier=st.sampled_from(Tier), more=sizes_in_bytes)
def test_more_memory_never_turns_a_plan_into_a_refusal(request: Request, tier: Tier, more: int) -> None:
    request = enlarged(request)
    larger = {**request.budgets, tier: request.budgets[tier] + more}
    check_plan(make_plan(dataclasses.replace(request, budgets=larger)))


@given(requests(), st.integers(1, 5), st.integers(1, 3), st.integers(0, 2))
def test_the_shards_of_the_ranks_of_each_node_are_the_unit(
    request: Request, world_size: int, nodes: int, node: int
) -> None:
    alone = dataclasses.replace(request, rank=0, world_size=1, nodes=1)
    first, more = node % nodes * world_size, {"world_size": world_size * nodes, "nodes": nodes}
    ranks = [dataclasses.replace(request, rank=first + rank, **more) for rank in range(world_size)]
    for unit in request.units:
        copies = world_size if unit.whole else 1
        if request.stage < 3:
            assert all(rank.owned(unit, Role.PARAM) == (0, unit.numel) for rank in ranks)
        sliced = (Role.PARAM,) if request.stage == 3 else ()
        for role in (*sliced, Role.GRAD, Role.MASTER, *MOMENTS):
            assert sum(rank.role_bytes(unit, role) for rank in ranks) == copies * alone.role_bytes(unit, role)
        assert sum(rank.wide_bytes(unit) for rank in ranks) == copies * alone.wide_bytes(unit)


@given(requests())
def test_plans_are_reproducible(request: Request) -> None:
    request = enlarged(request)
    assert make_plan(request) == make_plan(request)


# --- single decisions -----------------------------------------------------------------------------------------------

BLOCKS = [make_unit(index, MIB) for index in range(8)]  # 2 MiB of parameters, 2 of gradients, 10 of states each


def test_bytes_per_element_by_role() -> None:
    expected = {  # param, grad, grad when accumulating, master, moment: the table of roles.py
        "bfloat16": (2, 2, 4, 2, 4),
        "float16": (2, 2, 4, 4, 4),
        "float32": (4, 4, 4, 0, 4),
    }
    for dtype, sizes in expected.items():
        unit = make_unit(0, 10, dtype)
        roles = [(Role.PARAM, False), (Role.GRAD, False), (Role.GRAD, True), (Role.MASTER, True), (Role.EXP_AVG, True)]
        assert tuple(role_bytes(unit, role, 1, accumulate=accumulate) for role, accumulate in roles) == sizes
    frozen = make_unit(0, 10, "bfloat16", False)
    assert role_bytes(frozen, Role.PARAM, 1, accumulate=True) == 2
    assert [role_bytes(frozen, role, 1, accumulate=True) for role in (Role.GRAD, *STATE_ROLES)] == [0] * 9


def test_plenty_of_device_memory_keeps_everything_there() -> None:
    plan = make_plan(Request(BLOCKS, budgets(GIB, 0)))
    assert all((h.param, h.grad, h.states) == (Tier.DEVICE,) * 3 for h in plan.homes)
    assert plan.arena_bytes == {Tier.DEVICE: 8 * 14 * MIB, Tier.HOST: 0, Tier.NVME: 0}
    assert plan.working_bytes == plan.staging_slots == 0


def test_staging_of_a_large_model_is_deeper_where_host_memory_is_left() -> None:
    """A slot has 12 bytes for each of 2 Mi elements; 0.27 bytes per parameter are worth so much."""

    def slots(parameters: int, spare_slots: float) -> int:
        units = [make_unit(index, 4 * MIB) for index in range(parameters // (4 * MIB))]
        need = sum(2 * unit.numel for unit in units) + int((STAGING_SLOTS + spare_slots) * 24 * MIB)
        plan = make_plan(Request(units, budgets(GIB, need, 64 * GIB), Tier.NVME, Tier.NVME))
        check_plan(plan)
        assert plan.chunk_numel == 2 * MIB and plan.arena_bytes[Tier.HOST] <= need
        assert all(home.grad is Tier.HOST for home in plan.homes)
        return plan.staging_slots

    assert [slots(2 << 30, spare) for spare in (0, 0.9, 1, 3.5, 11, 12, 100)] == [4, 4, 5, 7, 15, 16, 16]
    assert slots(800 << 20, 100) == 9 and slots(600 << 20, 100) == 6


def test_a_gpu_keeps_parameters_but_updates_on_the_host() -> None:
    plan = make_plan(Request(BLOCKS, budgets(GIB, GIB), device_is_host=False))
    assert all((h.param, h.grad, h.states) == (Tier.DEVICE, Tier.HOST, Tier.HOST) for h in plan.homes)
    # 8 x (2 + 10) MiB, four staging slots of 12 B per element, three units' gradients on their way, and what an update
    # during backward writes: 8 x (2 + 10) MiB
    assert plan.spare_bytes == 8 * 12 * MIB
    assert plan.arena_bytes[Tier.HOST] == 8 * 12 * MIB + 4 * 12 * plan.chunk_numel + 3 * 2 * MIB + plan.spare_bytes
    for budget in (0, MIB, GIB):  # no budget would do
        with pytest.raises(ConfigError, match='offload_optimizer="none".*no kernel.*use "auto"'):
            make_plan(Request(BLOCKS, budgets(budget, budget), optimizer_tier=Tier.DEVICE, device_is_host=False))
    frozen = [make_unit(0, MIB, trainable=False)]
    assert make_plan(Request(frozen, budgets(GIB, GIB), optimizer_tier=Tier.DEVICE, device_is_host=False))


def test_the_cpu_updates_chunks_as_large_as_host_memory_has_room_for() -> None:
    request = Request(BLOCKS, budgets(GIB, GIB), device_is_host=False)
    least, unit = chunk_numel_of(request), BLOCKS[0].numel
    assert make_plan(request).chunk_numel == unit > least
    short = refused(dataclasses.replace(request, budgets=budgets(GIB, 0)))
    assert short is not None
    need = named_budgets(short)[Tier.HOST]
    grads = 2 * 2 * MIB  # of units that leave, beside the first one
    numels = []
    for left in (0, grads, grads + 2 * 4 * 12 * MIN_CHUNK_NUMEL, grads + 4 * 4 * 12 * MIN_CHUNK_NUMEL):
        plan = make_plan(dataclasses.replace(request, budgets=budgets(GIB, need + left)))
        numels.append(plan.chunk_numel)
    assert numels == [least, least, least + MIN_CHUNK_NUMEL, least + 2 * MIN_CHUNK_NUMEL]
    for change in ({"param_tier": Tier.HOST}, {"device_is_host": True}):
        plan = make_plan(dataclasses.replace(request, **change))
        assert plan.chunk_numel == unit
    assert not plan.staging_slots and not plan.staging_slot_bytes, "a CPU that computes updates in place"
    for change in ({"chunk_numel": least}, {"optimizer_tier": Tier.NVME}):
        assert make_plan(dataclasses.replace(request, budgets=budgets(GIB, GIB, GIB), **change)).chunk_numel == least


def test_host_memory_goes_to_gradients_then_parameters_then_states() -> None:
    device = 6 * MIB  # three units, no activations
    staging = 4 * 12 * 64 * KIB
    request = Request(BLOCKS, budgets(device, 0, GIB), activation_bytes=0, chunk_numel=1)
    for host, where in (
        (staging + 16 * MIB, (Tier.HOST, Tier.NVME, Tier.NVME)),
        (staging + 32 * MIB, (Tier.HOST, Tier.HOST, Tier.NVME)),
        (112 * MIB, (Tier.HOST, Tier.HOST, Tier.HOST)),
    ):
        plan = make_plan(dataclasses.replace(request, budgets=budgets(device, host, GIB)))
        assert {(h.grad, h.param, h.states) for h in plan.homes} == {where}
    # one page less than all gradients: some spill, through a pool of two buffers
    plan = make_plan(dataclasses.replace(request, budgets=budgets(device, staging + 16 * MIB - PAGE, GIB)))
    assert plan.grad_pool_bytes == 4 * MIB
    assert [h.grad for h in plan.homes].count(Tier.HOST) == 5  # (16 MiB - 1 page - 4 MiB) / 2 MiB, rounded down


def test_what_is_forced_into_host_memory_comes_before_what_has_a_choice() -> None:
    staging = 4 * 14 * 64 * KIB
    request = Request(
        BLOCKS,
        budgets(6 * MIB, staging + 80 * MIB + 4 * MIB, GIB),
        optimizer_tier=Tier.HOST,
        activation_bytes=0,
        chunk_numel=1,
    )
    plan = make_plan(request)  # 80 MiB of states leave the 4 MiB pool for gradients that go to NVMe
    assert {h.states for h in plan.homes} == {Tier.HOST}
    assert {h.grad for h in plan.homes} == {h.param for h in plan.homes} == {Tier.NVME}
    free = make_plan(dataclasses.replace(request, optimizer_tier=None))
    for link in ("nvme_read", "nvme_write"):  # what was asked for is not what moves least
        assert plan.step_bytes[link] > free.step_bytes[link]


def test_small_units_stay_on_the_device() -> None:
    units = [make_unit(0, 1000), *(make_unit(index, MIB) for index in range(1, 9))]
    plan = make_plan(Request(units, budgets(8 * MIB, GIB), activation_bytes=0))
    assert [h.param for h in plan.homes] == [Tier.DEVICE] + [Tier.HOST] * 8
    assert plan.working_bytes == 8 * MIB - 8 * KIB  # what the small unit's padded 4096 elements leave


def test_activations_get_half_of_the_device_by_default_but_parameters_come_first() -> None:
    assert make_plan(Request(BLOCKS, budgets(20 * MIB, GIB))).activation_bytes == 10 * MIB
    assert make_plan(Request(BLOCKS, budgets(8 * MIB, GIB))).activation_bytes == 2 * MIB  # 3 units of 2 MiB
    assert make_plan(Request(BLOCKS, budgets(6 * MIB, GIB))).activation_bytes == 0


def test_forced_device_homes_come_before_activations() -> None:
    plan = make_plan(Request(BLOCKS, budgets(112 * MIB, 0), param_tier=Tier.DEVICE, optimizer_tier=Tier.DEVICE))
    assert plan.activation_bytes == 0
    plan = make_plan(Request(BLOCKS, budgets(24 * MIB, GIB), param_tier=Tier.DEVICE, optimizer_tier=Tier.HOST))
    assert plan.activation_bytes == 8 * MIB


@pytest.mark.parametrize(
    ("change", "tier", "smallest"),
    [
        ({"budgets": budgets(5 * MIB, GIB), "activation_bytes": 0}, "device", 6 * MIB),
        ({"budgets": budgets(5 * MIB, GIB), "activation_bytes": MIB}, "device", 7 * MIB),
        ({"budgets": budgets(6 * MIB, GIB), "param_tier": Tier.DEVICE}, "device", 16 * MIB),
        ({"budgets": budgets(6 * MIB, MIB)}, "cpu", 112 * MIB),
        # two levels: 4 staging slots of 14 B x 64 Ki elements and the gradient pool are all the host must hold
        ({"budgets": budgets(6 * MIB, MIB, GIB), "chunk_numel": 1}, "cpu", 4 * 14 * 64 * KIB + 4 * MIB),
        # everything but the buffers on NVMe: 8 x 14 MiB and 16 chunks
        (
            {"budgets": budgets(6 * MIB, 4 * 14 * 64 * KIB + 4 * MIB, MIB), "chunk_numel": 1},
            "nvme",
            8 * 14 * MIB + 16 * (14 * 64 * KIB + PAGE),
        ),
    ],
)
def test_refusals_name_the_smallest_budget(change: dict[str, Any], tier: str, smallest: int) -> None:
    with pytest.raises(BudgetError) as caught:
        make_plan(dataclasses.replace(Request(BLOCKS, budgets(0, 0)), **change))
    text = str(caught.value)
    assert text.startswith(f"{tier} budget: ")
    assert f'the smallest max_memory["{tier}"] that would do is {smallest} bytes' in text


def test_what_nested_forwards_hold_at_once_must_fit() -> None:
    """Five blocks of 2 MiB held together need 10 MiB, although the three largest units are 6 MiB."""
    held = [frozenset({0, 1}), frozenset(range(5)), frozenset({5, 6, 7})]
    request = Request(BLOCKS, budgets(10 * MIB - 1, GIB), activation_bytes=0, held_together=held)
    with pytest.raises(BudgetError, match=r"the 5 units that are in use at once \(u0 .*, u4 2.00 MiB\)") as caught:
        make_plan(request)
    assert named_budgets(caught.value) == {Tier.DEVICE: 10 * MIB}
    plan = make_plan(dataclasses.replace(request, budgets=budgets(10 * MIB, GIB)))
    check_plan(plan)
    assert plan.working_bytes == 10 * MIB
    assert [unit.index for unit in request.widest(BLOCKS[3:])] == [3, 4, 5]  # of what is left of the set, two are there


def test_a_refusal_of_several_tiers_names_a_combination() -> None:
    request = Request(BLOCKS, budgets(MIB, MIB), device_is_host=False, activation_bytes=0, chunk_numel=1)
    with pytest.raises(BudgetError) as caught:
        make_plan(request)
    named = named_budgets(caught.value)
    assert named.keys() == {Tier.DEVICE, Tier.HOST}


def test_a_model_that_is_all_frozen_needs_no_gradients_and_no_states() -> None:
    units = [make_unit(index, MIB, trainable=False) for index in range(8)]
    plan = make_plan(Request(units, budgets(6 * MIB, 4 * 2 * 64 * KIB, GIB), activation_bytes=0))
    check_plan(plan)
    assert {h.param for h in plan.homes} == {Tier.NVME}
    with pytest.raises(BudgetError, match="cpu budget"):
        make_plan(Request(units, budgets(6 * MIB, 0, GIB), activation_bytes=0))


# --- bytes per step -------------------------------------------------------------------------------------------------


def plan_with(param: Tier, states: Tier, dtype: str = "bfloat16", **more: Any) -> Plan:
    units = [make_unit(index, MIB, dtype) for index in range(4)]
    return plan_of_units(units, param_tier=param, optimizer_tier=states, **more)


def plan_of_units(units: Sequence[Unit], **more: Any) -> Plan:
    return make_plan(Request(units, budgets(GIB, GIB, GIB), **more))


N = 4 * MIB  # elements


@pytest.mark.parametrize(
    ("dtype", "read", "written"),
    [("bfloat16", 10, 10), ("float16", 12, 12), ("float32", 8, 8)],  # split master 2 / fp32 4 / none, moments 4 + 4
)
def test_states_on_nvme_are_read_and_written_once_per_step(dtype: str, read: int, written: int) -> None:
    moved = plan_with(Tier.DEVICE, Tier.NVME, dtype).step_bytes
    assert (moved["nvme_read"], moved["nvme_write"]) == (read * N, written * N)  # bf16: 20 B per parameter and step


def test_parameters_on_nvme_are_read_for_forward_and_backward_and_written_once() -> None:
    """On the CPU, what forward fetches is updated first; a GPU's host reads parameters for the update once more."""
    moved = plan_with(Tier.NVME, Tier.HOST).step_bytes
    assert (moved["nvme_read"], moved["nvme_write"], moved["h2d"]) == (2 * 2 * N, 2 * N, 0)
    moved = plan_with(Tier.NVME, Tier.NVME).step_bytes
    assert (moved["nvme_read"], moved["nvme_write"]) == ((4 + 10) * N, (2 + 10) * N)
    moved = plan_with(Tier.NVME, Tier.NVME, device_is_host=False).step_bytes
    assert (moved["nvme_read"], moved["nvme_write"]) == ((6 + 10) * N, (2 + 10) * N)


def test_parameters_in_host_memory_are_copied_twice() -> None:
    moved = plan_with(Tier.HOST, Tier.HOST).step_bytes
    assert moved == {"nvme_read": 0, "nvme_write": 0, "h2d": 2 * 2 * N, "d2h": 0, "cpu_adam": (2 + 2 + 10) * N}


def test_a_gpu_sends_gradients_down() -> None:
    moved = plan_with(Tier.NVME, Tier.HOST, device_is_host=False).step_bytes
    assert (moved["h2d"], moved["d2h"]) == (2 * 2 * N, 2 * N)


def test_frozen_parameters_are_read_once_and_never_written() -> None:
    units = [make_unit(index, MIB, trainable=False) for index in range(4)]
    moved = plan_of_units(units, param_tier=Tier.NVME).step_bytes
    assert moved == {"nvme_read": 2 * N, "nvme_write": 0, "h2d": 0, "d2h": 0, "cpu_adam": 0}


def test_frozen_parameters_beside_trained_ones_are_read_for_both_passes() -> None:
    """Backward goes through those behind a trained one, and nobody knows here which these are."""
    units = [make_unit(index, MIB, trainable=index == 0) for index in range(4)]
    moved = plan_of_units(units, param_tier=Tier.NVME, optimizer_tier=Tier.HOST).step_bytes
    assert (moved["nvme_read"], moved["nvme_write"]) == (2 * 2 * N, 2 * MIB)
    moved = plan_of_units(units, param_tier=Tier.HOST, optimizer_tier=Tier.HOST).step_bytes
    assert moved["h2d"] == 2 * 2 * N


def test_spilled_gradients_are_written_and_read() -> None:
    staging = 4 * 14 * 64 * KIB
    request = Request(BLOCKS, budgets(6 * MIB, staging + 4 * MIB, GIB), activation_bytes=0, chunk_numel=1)
    plan = make_plan(request)
    assert {h.grad for h in plan.homes} == {Tier.NVME}
    n = 8 * MIB
    assert plan.step_bytes["nvme_write"] == (2 + 2 + 10) * n
    assert plan.step_bytes["nvme_read"] == (4 + 2 + 10) * n


def test_the_wear_of_each_micro_batch_and_of_a_rank_alone_is_told() -> None:
    """One micro-batch writes parameters, sums and states, 2 + 4 + 10 bytes of 8 Mi; each further one the sums."""
    staging, pool = 4 * 16 * 64 * KIB, 2 * 4 * MIB
    memory = budgets(6 * MIB, staging + pool, GIB)
    plan = make_plan(Request(BLOCKS, memory, activation_bytes=0, chunk_numel=1, accumulate=True))
    assert {homes.grad for homes in plan.homes} == {Tier.NVME}
    assert str(plan).splitlines()[-1] == (
        "drive wear: 0.134 TB written per 1000 steps of one micro-batch, and 0.0336 TB more for each further one"
    )
    plain = plan.to_dict()
    assert plain["wear_bytes_per_step"] == 16 * 8 * MIB and plain["wear_bytes_per_further_micro_batch"] == 4 * 8 * MIB
    lines = str(plan_with(Tier.HOST, Tier.NVME, world_size=2)).splitlines()
    assert lines[-1] == "drive wear: 0.021 TB written per 1000 steps, by this rank alone"  # half of 10 bytes of 4 Mi


# --- the table ------------------------------------------------------------------------------------------------------


def test_the_plan_prints_as_a_table() -> None:
    units = [*(make_unit(index, MIB) for index in range(4)), make_unit(4, 1000, trainable=False)]
    request = Request(units, budgets(GIB, GIB, GIB), param_tier=Tier.HOST, optimizer_tier=Tier.NVME)
    lines = str(make_plan(request)).splitlines()
    assert lines[0] == "5 units, 4,194,304 trainable parameters, 1,000 frozen"
    assert lines[1].split() == ["parameters", "gradients", "states", "buffers", "total", "budget"]
    rows = {line.split()[0]: line for line in lines[2:5]}
    assert list(rows) == ["device", "cpu", "nvme"]
    cell = r"\s+([\d.]+ \w+|-)"
    table = {}
    for name, line in rows.items():
        match = re.fullmatch(rf"\s*{name}" + cell * 6, line)
        assert match is not None, line
        table[name] = match.groups()
    # device: working copies of all 8 MiB + 8 KiB; nvme: 10 B x 4 Mi of states, and slack
    assert table["device"][:4] == ("-", "-", "-", "8.01 MiB")
    assert table["cpu"][:2] == ("8.01 MiB", "8.00 MiB") and table["cpu"][2] == "-"
    assert table["nvme"][:3] == ("-", "-", "40.00 MiB")
    assert {row[5] for row in table.values()} == {"1.00 GiB"}
    assert "activations and temporaries: " in lines[5]
    # 2 B more for each of 4 Mi elements
    room = "room to add several backward passes in fp32, used only then: 8.00 MiB of the cpu budget"
    assert lines[6] == room
    assert lines[7].startswith("moved per step") and "nvme_read 40.00 MiB, nvme_write 40.00 MiB" in lines[7]
    # 10 B x 4 Mi x 1000 steps = 0.0419 TB
    assert lines[8] == "drive wear: 0.0419 TB written per 1000 steps"


def test_what_is_page_locked_for_a_device_is_a_number_too() -> None:
    host, apart = (make_plan(Request(BLOCKS, budgets(GIB, GIB), device_is_host=host)) for host in (True, False))
    assert host.to_dict()["page_locked_bytes"] == 0 and "page-locked" not in str(host)
    size = apart.arena_bytes[Tier.HOST]
    assert apart.to_dict()["page_locked_bytes"] == size
    assert f"page-locked for copies to and from the device: {format_bytes(size)} of cpu" in str(apart)


def test_the_table_of_a_plan_without_nvme_has_no_wear() -> None:
    text = str(make_plan(Request(BLOCKS, budgets(GIB, GIB))))
    assert "drive wear" not in text and "frozen" not in text


def test_what_an_optimizers_own_class_takes_is_in_the_plan_and_named_in_the_refusal() -> None:
    """All in host memory but for a working region: 8 x 14 MiB of all roles, and 7 MiB of its own."""
    own = OwnBytes("RMSprop", MIB - 1, 6 * MIB)
    request = Request(BLOCKS, budgets(6 * MIB, 8 * 14 * MIB + 6 * MIB), activation_bytes=0, own=own)
    with pytest.raises(BudgetError, match=r"6\.00 MiB of temporaries while RMSprop updates its largest") as caught:
        make_plan(request)
    assert named_budgets(caught.value) == {Tier.HOST: 8 * 14 * MIB + 7 * MIB}
    plan = make_plan(dataclasses.replace(request, budgets=request.budgets | named_budgets(caught.value)))
    check_plan(plan)
    assert plan.arena_bytes[Tier.HOST] == 8 * 14 * MIB
    text = str(plan)
    assert "torch's own RMSprop on fp32 tensors in host memory, slower" in text
    assert "6.00 MiB of temporaries while RMSprop updates its largest parameter, 1024.00 KiB of its small" in text
    assert "119.00 MiB  119.00 MiB" in text  # total and budget of host memory


def test_an_undivided_parameter_makes_staging_as_large_as_it_is() -> None:
    """A chunk is 64 Ki elements otherwise; four slots of 12 bytes per element: gradients stay in memory."""
    units = [make_unit(0, MIB, whole=True), make_unit(1, 1000, whole=True)]
    plan = make_plan(Request(units, budgets(6 * MIB, GIB, GIB), Tier.NVME, Tier.NVME, chunk_numel=1))
    check_plan(plan)
    assert plan.staging_slot_bytes == 12 * MIB


@pytest.mark.parametrize("room", range(1, 9))
def test_room_beside_the_content_is_for_updates_that_have_something_to_go_beside(room: int) -> None:
    """Gradients come from the last unit to the first; the forward, which needs that one first, waits in any case."""
    request = Request(BLOCKS, budgets(GIB, GIB), Tier.HOST, Tier.HOST, chunk_numel=1, device_is_host=False)
    everything = make_plan(request)
    host = everything.arena_bytes[Tier.HOST] + everything.wide_bytes[Tier.HOST] - (len(BLOCKS) - room) * 12 * MIB
    plan = make_plan(dataclasses.replace(request, budgets=budgets(GIB, host)))
    check_plan(plan)
    assert len(BLOCKS) == 8 and len(plan.spare_units) == room
    assert (0 in plan.spare_units) == (room == 8)


# --- by time, beside an accelerator ---------------------------------------------------------------------------------


def apart(device: int, host: int, nvme: int = GIB, **more: Any) -> Plan:
    """Return the plan of 16 units of 2 MiB of parameters, as much of gradients and 10 MiB of states each."""
    units = [make_unit(index, MIB) for index in range(16)]
    request = Request(units, budgets(device, host, nvme), activation_bytes=0, device_is_host=False, **more)
    plan = make_plan(request)
    check_plan(plan)
    return plan


def count(plan: Plan, kind: str, tier: Tier) -> int:
    return sum(getattr(home, kind) is tier for home in plan.homes)


@given(requests())
def test_what_fits_above_the_drive_stays_there(request: Request) -> None:
    """And if all of it does, the plan is that of roles, to the byte."""
    tier = None if request.optimizer_tier is Tier.DEVICE else request.optimizer_tier
    apart_alone = {"device_is_host": False, "world_size": 1, "nodes": 1, "rank": 0, "optimizer_tier": tier}
    request = enlarged(dataclasses.replace(request, clips=True, **apart_alone))
    plan = make_plan(request)
    first = Planner(plan.request).plan()
    check_plan(plan)
    for kind in ("param", "grad", "states"):
        if count(first, kind, Tier.NVME) == 0:
            assert count(plan, kind, Tier.NVME) == 0
    if all(Tier.NVME not in (home.param, home.grad, home.states) for home in first.homes):
        assert plan == first


def test_parameters_stay_on_the_device_where_working_copies_can_spare_the_room() -> None:
    """16 MiB have room for three working copies and for five units at home."""
    plan = apart(16 * MIB, 120 * MIB)
    assert plan.working_bytes == 6 * MIB and count(plan, "param", Tier.DEVICE) == 5
    assert 0 < count(plan, "states", Tier.HOST) < 16
    without = apart(16 * MIB, GIB, nvme=0)  # everything fits: nothing is better than working copies
    assert count(without, "param", Tier.DEVICE) == 0 and without.working_bytes == 16 * MIB
    forced = apart(16 * MIB, 120 * MIB, param_tier=Tier.HOST)
    assert count(forced, "param", Tier.HOST) == 16


def test_gradients_of_what_is_not_in_memory_come_first() -> None:
    """Backward begins with the last units, and has time for their updates; the next forward waits for none of them."""
    plan = apart(6 * MIB, 160 * MIB)
    drive = [index for index, home in enumerate(plan.homes) if home.states is Tier.NVME]
    assert 4 <= len(drive) < 16
    assert drive == list(range(drive[0], 16))


def test_memory_is_left_for_updates_during_backward() -> None:
    plan = apart(6 * MIB, 160 * MIB)
    drive = [unit for unit in plan.request.units if plan.homes[unit.index].states is Tier.NVME]
    assert sum(map(plan.updates_early, drive)) >= len(drive) // 4
    assert plan.early_bytes > 0


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("accumulate", [False, True])
@pytest.mark.parametrize("host", [34, 60, 100, 160])
def test_few_fills_are_looked_at_and_none_is_much_better(host: int, accumulate: bool, clips: bool) -> None:
    units = [make_unit(index, MIB) for index in range(16)]
    asked: dict[str, Any] = {"device_is_host": False, "activation_bytes": 0, "accumulate": accumulate, "clips": clips}
    request = Request(units, budgets(12 * MIB, host * MIB, GIB), **asked)
    search = filling._Search(request, Planner(request).plan())
    found = search._length(search.plan())
    assert found <= search._length(search._first)
    looked_at = len(search._by_fill)
    values = {name: values for change in filling.TRIED for name, values in change.items()}
    every = [filling._Fill(**dict(zip(values, each, strict=True))) for each in itertools.product(*values.values())]
    assert looked_at < len(every)
    assert found <= 1.05 * min(search._look(fill)[0] for fill in every)


def test_the_cpu_as_the_device_and_several_ranks_have_homes_by_roles() -> None:
    for more in ({"device_is_host": True}, {"device_is_host": False, "world_size": 2}):
        units = [make_unit(index, MIB) for index in range(16)]
        request = Request(units, budgets(16 * MIB, 120 * MIB, GIB), activation_bytes=0, **more)
        assert make_plan(request) == Planner(request).plan()


def test_gradients_in_flight_and_slots_do_not_share_what_is_left() -> None:
    units = [make_unit(index, 2 * MIB) for index in range(8)]
    homes = [Homes(Tier.HOST, Tier.HOST, Tier.NVME)] * len(units)
    asked = {"device_is_host": False, "activation_bytes": 0, "chunk_numel": MIN_CHUNK_NUMEL}
    for more in range(20, 48):
        host = 8 * 8 * MIB + more * MIB
        plan = plan_of(Request(units, budgets(16 * MIB, host, GIB), **asked), homes)
        assert plan.arena_bytes[Tier.HOST] <= host


def test_working_copies_of_slices_stay_within_the_device() -> None:
    units = [make_unit(index, MIB) for index in range(16)]
    for device in range(8, 48, 4):
        asked = {"device_is_host": False, "activation_bytes": 0, "world_size": 2, "stage": 3}
        plan = make_plan(Request(units, budgets(device * MIB, GIB), **asked))
        assert plan.arena_bytes[Tier.DEVICE] <= device * MIB


def test_a_durable_run_has_homes_by_roles() -> None:
    """How long commits take of the drive is not known to what compares homes."""
    units = [make_unit(index, MIB) for index in range(16)]
    request = Request(units, budgets(16 * MIB, 120 * MIB, GIB), device_is_host=False, activation_bytes=0)
    assert make_plan(request) != Planner(request).plan(), "there is something to choose"
    durable = dataclasses.replace(request, commit=Commit(1 << 16, 1))
    assert make_plan(durable) == Planner(durable).plan()
