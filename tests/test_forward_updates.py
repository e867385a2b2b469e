"""The part of a step that is done later: what waits for what, and that nobody can tell when it was done."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeStore, FakeTicket, make_manager, make_plan_with, make_unit, versions
from harness import (
    WIDTH,
    assert_same_tensors,
    batch,
    everything,
    everything_on_device,
    host,
    loss_of,
    one_torch_thread,
    parameters_on_device,
    tight,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, Engine
from offload.errors import StateError
from offload.memory.budget import Tier
from offload.planning.asked import Homes
from offload.planning.plan import STAGING_SLOTS
from offload.planning.roles import Role
from offload.shards.forward_updates import ForwardUpdates
from offload.shards.manager import Manager
from offload.shards.shard import Shard, State
from offload.shards.stream import ALL_STATES, Chunk
from offload.torch_private import function_modes, in_backward
from swap import SwapError

CHUNK = 4096
ROLES = frozenset({Role.PARAM}) | ALL_STATES
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
UNITS = 4
ON_NVME = Homes(N, H, N)

# --- the order of events ----------------------------------------------------------------------------------------------


def noted(store: FakeStore) -> Callable[[Chunk], None]:
    """Return a visitor that notes its visits among the store's events."""
    return lambda chunk: store.events.append(("visit", (chunk.unit.index, chunk.number)))


@contextlib.contextmanager
def pending(
    home: Homes = ON_NVME,
    working: int = 0,
    *,
    resident: int = 0,
    chunks: int = 2,
    early_bytes: int = 0,
    staging_slots: int = STAGING_SLOTS,
) -> Iterator[tuple[Manager, FakeStore, ForwardUpdates]]:
    """A step over units of some chunks with all content in place and gradients there; nothing of it has been done.

    The device has room for `working` units, and `resident` are there.
    """
    units = [make_unit(index, [chunks * CHUNK]) for index in range(UNITS)]
    store = FakeStore()
    plan = make_plan_with(
        units,
        [home] * UNITS,
        chunk_numel=CHUNK,
        working_bytes=working * units[0].param_bytes,
        early_bytes=early_bytes,
        staging_slots=staging_slots,
    )
    manager = make_manager(plan, store, prefetch=resident == 0)
    try:
        manager.stream(units, lambda chunk: None, reads=frozenset(), writes=ROLES)
        for unit in units[:resident]:
            manager.acquire(unit.index).close()
        for unit in units:
            manager.add_gradient(unit.index, 0, torch.ones(chunks * CHUNK, dtype=torch.bfloat16), final=True)
        store.events.clear()
        store.urgent.clear()
        manager.forward.begin(units, noted(store), manager.ahead)
        yield manager, store, manager.forward
    finally:
        arrive_quietly(store)
        manager.close()


def happened(store: FakeStore, what: str) -> list[Any]:
    return [key for kind, key in store.events if kind == what]


def arrive(store: FakeStore) -> None:
    """Let everything that is in flight be over."""
    for ticket in list(store.flying):
        ticket.wait()


def test_nothing_is_done_before_somebody_needs_it() -> None:
    with pending(working=UNITS, resident=1) as (manager, store, updates):
        assert store.events == []
        updates.read_ahead()
        assert happened(store, "get") == [(0, "master", 0), (0, "master", 1)], "two chunks ahead"
        updates.advance()
        assert not happened(store, "get over") and not happened(store, "visit"), "it waits for nothing"
        assert all(index in updates for index in range(UNITS))
        assert manager.forward.active


def test_passing_by_works_on_what_has_arrived() -> None:
    chunks = [(index, number) for index in range(2) for number in range(2)]
    with pending(working=UNITS, resident=2) as (_, store, updates):
        updates.read_ahead()
        assert happened(store, "get") == [(index, "master", number) for index, number in chunks], "into all four slots"
        arrive(store)
        updates.advance()
        assert happened(store, "visit") == chunks[:2], "no longer than for half of the slots"
        updates.advance()
        assert happened(store, "visit") == chunks
        before = len(store.events)
        updates.advance()
        assert not [event for event in store.events[before:] if event[0] in ("visit", "get over", "put over")]


def test_reads_that_are_waited_for_come_first_unless_a_write_makes_room() -> None:
    with pending(working=UNITS, resident=2) as (_, store, updates):
        updates.read_ahead()
        first_four = happened(store, "get")
        assert store.urgent == first_four, "the forward that begins next waits for them"
        updates.require(3)
        assert len([key for key in happened(store, "get") if key[1] == "master"]) == 2 * UNITS
        assert [key for key in store.urgent if key[1] == "master"] == first_four, "the others need their slots"


def test_units_that_need_no_slot_are_not_begun_all_at_once() -> None:
    """What is begun cannot leave the device; there are two slots, which stay free."""
    with pending(Homes(H, H, H), staging_slots=2) as (_, __, updates):
        updates.read_ahead()
        assert len(updates._queues[0].open) == 2 and len(updates._queues[0].waiting) == UNITS - 2
        updates.finish()


def test_a_unit_waits_for_its_own_update_only() -> None:
    """The next unit's reads are under way before the last chunk is worked on, its updates are not made."""
    with pending(working=3) as (manager, store, updates):
        updates.read_ahead()
        manager.prefetch()
        arrive(store)
        store.events.clear()
        lease = manager.acquire(0)
        assert 0 not in updates and 1 in updates
        assert happened(store, "visit") == [(0, 0), (0, 1)]
        assert (1, "master", 0) in happened(store, "get"), "both queues are busy while unit 0 is used"
        assert not happened(store, "put over"), "nobody waits for what goes home"
        assert manager.copies.of(0, Role.PARAM).state is State.FLUSHING
        manager.check()
        lease.close()
        updates.finish()
        assert not manager.forward.active
        assert happened(store, "visit") == [(index, number) for index in range(UNITS) for number in range(2)]
        assert {shard.state for shard in manager.copies if shard.role in ALL_STATES} == {State.STORED}
        assert all(not shard.writing and not shard.readers for shard in manager.copies)
        assert not store.flying
        manager.check()


def test_prefetching_leaves_the_drive_to_updates() -> None:
    """Parameters of 128 KiB each beside staging of 4 * 56 KiB: the second one under way is one too many."""
    with pending(working=UNITS, chunks=16) as (manager, store, updates):

        def coming() -> list[int]:
            params = (manager.copies.of(index, Role.PARAM) for index in range(UNITS))
            return [shard.unit.index for shard in params if shard.state in (State.FETCHING, State.RESIDENT)]

        updates.read_ahead()
        manager.prefetch()
        assert len(coming()) == 2
        arrive(store)
        manager.prefetch()
        assert len(coming()) == 3, "the region is full; what has come is in nobody's way"


def test_prefetching_from_memory_is_in_nobodys_way() -> None:
    with pending(Homes(H, H, H), working=UNITS, staging_slots=0) as (manager, _, updates):
        updates.require(1)
        manager.prefetch()
        params = [manager.copies.of(index, Role.PARAM) for index in range(UNITS)]
        assert manager.forward.active
        assert [shard.state for shard in params] == [State.FETCHING] * 2 + [State.STORED] * 2, "two are up to date"


def test_a_parameter_is_read_once_for_its_update_and_its_use() -> None:
    with pending(working=UNITS) as (manager, store, updates):
        updates.read_ahead()
        for index in range(UNITS):
            manager.acquire(index).close()
        params = [key for key in happened(store, "get") if key[1] == "param"]
        assert sorted(params) == [(index, "param", number) for index in range(UNITS) for number in range(2)]


def test_a_gradient_is_kept_until_its_update_and_no_longer() -> None:
    with pending() as (manager, _, updates):
        states = [manager.copies.of(index, Role.GRAD) for index in range(UNITS)]
        manager.drop_gradients()  # as zero_grad() does
        assert {shard.state for shard in states} == {State.STORED}
        updates.require(1)
        assert [shard.state for shard in states] == [State.EMPTY] * 2 + [State.STORED] * 2
        assert not any(any(manager.gradients.arrived(index)) for index in range(UNITS)), "they are of the last step"


def test_a_gradient_of_the_next_step_finishes_the_last_one_first() -> None:
    with pending() as (manager, store, updates):
        updates.require(0)
        manager.add_gradient(3, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
        assert not updates._queues[0].open and not updates._queues[0].waiting
        assert happened(store, "visit")[-1] == (3, 1)
        updates.finish()
        assert not manager.forward.active
        assert manager.gradients.arrived(3) == [True]


def in_gradient_memory(manager: Manager, store: FakeStore) -> set[int]:
    """Units whose gradients' memory is read into or written from."""
    buffers = {index: manager.copies.of(index, Role.GRAD).home_buffer for index in range(UNITS)}
    return {
        index
        for index, buffer in buffers.items()
        for ticket in store.flying
        if buffer is not None and buffer.address <= ticket.address < buffer.address + buffer.size_bytes
    }


def test_memory_of_gradients_that_were_used_takes_further_chunks() -> None:
    """Bytes of a slot: 2 + 2 + 2 + 4 + 4 of each of 4096 elements; a gradient of 16 chunks is as long as 2 slots."""
    with pending(chunks=16) as (manager, store, updates):
        assert manager.tiers.plan.staging_slot_bytes == 14 * CHUNK
        updates.require(0)
        assert in_gradient_memory(manager, store) == set(), "unit 0 was the first to give its memory"
        updates.require(1)
        assert in_gradient_memory(manager, store) == {0}, "that of unit 1 is free now, the others' is not"
        updates.finish()
        assert happened(store, "visit") == [(index, number) for index in range(UNITS) for number in range(16)]
        manager.check()


def test_memory_of_a_gradient_is_left_before_the_next_one_comes() -> None:
    with pending(chunks=16) as (manager, store, updates):
        updates.require(3)
        assert in_gradient_memory(manager, store) and not updates._queues[0].waiting, "only writes are left"
        manager.add_gradient(0, 0, torch.ones(16 * CHUNK, dtype=torch.bfloat16), final=True)
        assert in_gradient_memory(manager, store) == set()
        assert {ticket.kind for ticket in store.flying} <= {"put"}, "what leaves staging goes on"
        updates.finish()
        assert not manager.forward.active and not store.flying


@pytest.mark.parametrize(("spare", "slots"), [(0, 16), (1, 17), (1000, 64)])
def test_there_are_no_more_slots_than_new_versions_have_room(spare: int, slots: int) -> None:
    """Of 16 the plan takes care; beside them, what updates in backward do not need while others are made after it."""
    size = 14 * CHUNK + 4096
    with pending(chunks=120, early_bytes=spare * size) as (manager, store, updates):
        assert manager.tiers.plan.most_slots == slots
        updates.finish()
        pipeline = updates._queues[0].pipeline
        assert len(pipeline._free) + len(pipeline._taken) == slots


def test_whoever_streams_finishes_first() -> None:
    with pending() as (manager, store, _):
        manager.stream(manager.units[:1], noted(store), reads=frozenset({Role.PARAM}))
        assert len(happened(store, "visit")) == 2 * UNITS + 2 and not manager.forward.active


def test_old_parameters_are_not_to_be_seen() -> None:
    with pending(Homes(D, H, N)) as (manager, store, updates):
        bound = manager.bound._binder.bound  # type: ignore[attr-defined]
        assert not bound
        updates.require(2)  # in order: 0 and 1 as well
        assert sorted(bound) == [0, 1, 2]
        manager.check()


@pytest.mark.parametrize("needed", [False, True], ids=["finish", "require"])
def test_writes_that_are_over_just_after_they_were_asked_for(needed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What was not home at one look and is at the next must not be forgotten before its parameters may be seen."""
    with pending() as (manager, store, updates):

        def asked(ticket: FakeTicket) -> bool:
            before = ticket.over
            if not before:
                arrive(store)
            return before

        monkeypatch.setattr(FakeTicket, "done", asked)
        if needed:
            for index in range(UNITS):
                updates.require(index)
        updates.finish()
        assert not manager.forward.active
        assert not any(index in updates for index in range(UNITS))
        assert not any(manager.bound.hides(index) for index in range(UNITS))


def test_parameters_in_use_are_not_updated() -> None:
    with pending(working=UNITS) as (manager, store, updates):
        updates.finish()
        lease = manager.acquire(1)
        with pytest.raises(StateError, match="u1: cannot be written while they are in use"):
            updates.begin(manager.units, noted(store), manager.ahead)
        assert not manager.forward.active
        lease.close()


@pytest.mark.parametrize("nth", [1, 3])
def test_a_step_that_cannot_begin_changes_nothing(nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with pending(working=UNITS, resident=2) as (manager, store, updates):
        updates.finish()
        for unit in manager.units:
            manager.add_gradient(unit.index, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
        before, hide, calls = versions(manager), manager.working.hide, itertools.count(1)

        def fails(shard: Shard) -> None:
            if next(calls) == nth:
                raise TimeoutError("the fetch is late")
            hide(shard)

        monkeypatch.setattr(manager.working, "hide", fails)
        with pytest.raises(TimeoutError):
            updates.begin(manager.units, noted(store), manager.ahead)
        assert not updates.active and not any(unit.index in updates for unit in manager.units)
        assert not any(manager.bound.hides(unit.index) for unit in manager.units)
        assert versions(manager) == before
        manager.drop_gradients()
        manager.check()
        assert all(manager.copies.of(unit.index, Role.GRAD).state is State.EMPTY for unit in manager.units)


def test_a_read_that_fails_is_repeated_for_who_needs_it() -> None:
    with pending() as (manager, store, updates):
        store.fail = lambda kind, key, count: SwapError("injected", errno=5) if key == (0, "master", 0) else None
        updates.read_ahead()
        arrive_quietly(store)
        updates.advance()
        assert not happened(store, "visit"), "who passes by meets no error"
        with pytest.raises(SwapError, match="injected"):
            updates.require(0)
        store.fail = lambda kind, key, count: None
        updates.require(0)
        assert happened(store, "visit") == [(0, 0), (0, 1)] and updates.failure is None
        updates.finish()
        manager.check()


def test_a_write_that_fails_loses_the_step() -> None:
    with pending() as (manager, store, updates):
        store.fail = lambda kind, key, count: SwapError("full", errno=28) if kind == "put" else None
        with pytest.raises(SwapError, match="full"):
            updates.finish()
        for again in (updates.finish, functools.partial(updates.require, 3), manager.finish_updates):
            with pytest.raises(StateError, match="failed half way.*full"):
                again()
        updates.advance()
        assert manager.has_lost_content() and not store.flying


def arrive_quietly(store: FakeStore) -> None:
    for ticket in list(store.flying):
        with contextlib.suppress(SwapError):
            ticket.wait()


# --- nobody can tell when it was done ---------------------------------------------------------------------------------


class Net(nn.Module):
    """Six blocks, one of them frozen, two with the same weight, one that is used only now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.blocks[1].requires_grad_(False)
        self.blocks[4].weight = self.blocks[0].weight
        self.skip = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            if number != 3 or not self.skip:
                x = torch.tanh(block(x)) + x
        return x


def make(dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(0)
    return Net().to(dtype)


def micro_batch(engine: Engine, number: int, *, skip: bool = False, scale: float = 1.0) -> torch.Tensor:
    engine.module.skip = skip
    dtype = next(engine.module.parameters()).dtype
    loss = engine(batch(number).to(dtype)).float().sub(1).pow(4).mean() * scale
    engine.backward(loss)
    return loss.detach()


def session(path: Path, placement: str, *, overlap: bool, dtype: torch.dtype, look: bool, **options: Any) -> Any:
    """Train with an LR schedule, micro-batches, a unit now and then unused, and (fp16) an overflow."""
    model = make(dtype)
    where = {"nvme": lambda: tight(model, path), "host": lambda: host(model), "device": everything_on_device}[
        placement
    ]()
    with Engine(model, AdamW(lr=1e-2), **where, **options) as engine:
        engine._step.overlap = overlap
        assert engine.optimizer is not None
        schedule = torch.optim.lr_scheduler.ExponentialLR(engine.optimizer, 0.5)
        seen, norms = [], []
        for number in range(8):
            overflow = dtype is torch.float16 and number == 3
            seen.append(micro_batch(engine, number, skip=number in (2, 5), scale=1e4 if overflow else 1.0))
            if engine.step():
                schedule.step()
                engine.optimizer.zero_grad()
                norms.append(engine.grad_norm)
                if look:
                    seen.extend(everything(engine).values())
            engine._manager.check()
        return seen, norms, everything(engine), engine.stats().skipped_steps


@pytest.mark.few(6)
@pytest.mark.parametrize("placement", ["nvme", "host"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
@pytest.mark.usefixtures("single_torch_thread")
def test_overlap_never_changes_the_result(
    placement: str, dtype: torch.dtype, accumulation: int, clip: float | None, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": accumulation, "max_grad_norm": clip}
    options |= {"initial_loss_scale": 2.0**10} if dtype is torch.float16 else {}
    run = functools.partial(session, tmp_path, dtype=dtype, **options)
    truth = run("device", overlap=False, look=True)
    for overlap, look in ((False, True), (True, True), (True, False)):
        seen, norms, final, skipped = run(placement, overlap=overlap, look=look)
        if look:
            assert len(seen) == len(truth[0]) and all(torch.equal(a, b) for a, b in zip(seen, truth[0], strict=True))
        assert norms == truth[1] and skipped == truth[3]
        assert_same_tensors(final, truth[2])
    assert (truth[3] > 0) == (dtype is torch.float16), "a gradient overflowed"


def test_hyper_parameters_are_those_at_the_step(tmp_path: Path) -> None:
    results = []
    for change_first in (False, True):
        model = make()
        with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
            assert engine.optimizer is not None
            micro_batch(engine, 0)
            engine.step()
            if not change_first:
                engine.drain()
            engine.optimizer.param_groups[0]["lr"] = 1e9
            results.append(everything(engine))
    assert_same_tensors(*results)


@pytest.mark.parametrize("restore", [None, False])
def test_close_right_after_a_step(restore: bool | None, tmp_path: Path) -> None:
    model, other = make(), make()
    engine = Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))
    micro_batch(engine, 0)
    engine.step()
    engine.close(restore=restore)
    assert not list(tmp_path.iterdir())
    if restore is None:
        with Engine(other, AdamW(lr=1e-2), **everything_on_device()) as truth:
            micro_batch(truth, 0)
            truth.step()
            assert_same_tensors(dict(model.state_dict()), truth.state_dict())


def test_a_graph_of_before_the_step_is_stale(tmp_path: Path) -> None:
    model = make()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        old = loss_of(engine, 7)
        micro_batch(engine, 0)
        engine.step()
        with pytest.raises(StateError, match="its graph is stale"):
            engine.backward(old)
        micro_batch(engine, 1)
        assert engine.step()


@pytest.mark.cpu("seconds")
def test_stats_tell_what_was_waited_for(tmp_path: Path) -> None:
    model = make()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        micro_batch(engine, 0)
        engine.step()
        engine.drain()
        stats = engine.stats()
        assert stats.update_chunks == sum(unit.trainable for unit in engine.plan.request.units)
        assert 0 <= stats.update_stalls <= stats.update_chunks
        assert 0 <= stats.update_stall_seconds <= stats.update_seconds


ACTIONS = ("batch", "skipping", "forward", "evaluate", "step", "state_dict", "states", "gather", "modify", "lr", "zero")


@given(actions=st.lists(st.sampled_from(ACTIONS), max_size=14), working=st.integers(3, 6), restore=st.booleans())
def test_any_interleaving_gives_the_same(
    actions: list[str], working: int, restore: bool, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Whatever is done between steps: the same numbers as where everything is on the device."""
    path = tmp_path_factory.mktemp("swap", numbered=True)

    def run(overlap: bool, **options: Any) -> list[torch.Tensor]:
        model, seen = make(), []
        engine = Engine(model, AdamW(lr=1e-2), max_grad_norm=1.0, **options)
        engine._step.overlap = overlap
        assert engine.optimizer is not None
        for number, action in enumerate(actions):
            if action in ("batch", "skipping"):
                seen.append(micro_batch(engine, number, skip=action == "skipping"))
            elif action == "forward":
                seen.append(loss_of(engine, number).detach())
            elif action == "evaluate":
                with torch.no_grad():
                    seen.append(loss_of(engine, number))
            elif action == "step":
                with contextlib.suppress(StateError):  # no gradient has arrived
                    engine.step()
            elif action == "state_dict":
                seen.extend(engine.state_dict().values())
            elif action == "states":
                seen.extend(everything(engine).values())
            elif action in ("gather", "modify"):
                weight = model.blocks[2].weight
                with engine.gather(weight, modify=action == "modify"), torch.no_grad():
                    weight.mul_(0.5) if action == "modify" else seen.append(weight.clone())
            elif action == "lr":
                engine.optimizer.param_groups[0]["lr"] *= 0.5
            else:
                engine.zero_grad()
            engine._manager.check()
        engine.close(restore=restore)
        return seen + ([value.clone() for value in model.state_dict().values()] if restore else [])

    with one_torch_thread():
        truth = run(False, **everything_on_device())
        model = make()
        ours = run(True, **tight(model, path, units=working))
    assert len(ours) == len(truth)
    assert all(torch.equal(a, b) for a, b in zip(ours, truth, strict=True))


def test_two_engines_each_finish_their_own(tmp_path: Path) -> None:
    models = [make(), make()]
    engines = [Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) for model in models]
    for number in range(3):
        for engine in engines:
            micro_batch(engine, number)
        for engine in engines:
            assert engine.step()
    assert_same_tensors(everything(engines[0]), everything(engines[1]))
    for engine in engines:
        engine.close()
    assert not list(tmp_path.iterdir())


def test_graphs_of_before_are_stale_before_anything_is_updated() -> None:
    """Else the first unit that one asks for would come with the parameters of after the step."""
    with pending() as (manager, store, forward):
        assert not happened(store, "visit")
        assert versions(manager) == [2] * UNITS, "written once, and about to be"


class Repeats(nn.Module):
    """Its blocks are checkpointed, and use a weight that no hook announces; it notes whether a mode sees that."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.seen: list[tuple[bool, bool]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            x = checkpoint(self._part, block, x, use_reentrant=False)
        return x

    def _part(self, block: nn.Module, x: torch.Tensor) -> torch.Tensor:
        self.seen.append((in_backward(), bool(function_modes())))
        return block(x).tanh() + nn.functional.linear(x, self.first.weight)


def test_nothing_is_watched_where_nothing_is_hidden() -> None:
    """Between the last update of a step and the next step, all parameters are there and as they should be."""

    def trained(**options: Any) -> tuple[list[tuple[bool, bool]], dict[str, torch.Tensor]]:
        model = Repeats()
        with Engine(model, AdamW(lr=1e-2), max_grad_norm=1e-3, **options) as engine:
            for number in range(3):
                engine.backward(loss_of(engine, number))
                engine.step()
            return model.seen, {name: value.clone() for name, value in engine.state_dict().items()}

    resident, truth = trained(**everything_on_device())
    assert resident == 3 * ([(False, False)] * 3 + [(True, False)] * 3)
    seen, state = trained(**parameters_on_device())
    assert_same_tensors(state, truth)
    first, *others = seen[:6], seen[6:12], seen[12:]
    assert first == resident[:6], "no step has been taken"
    for one in others:
        assert one == [(False, True)] * 3 + [(True, False)] * 3
