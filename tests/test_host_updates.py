"""Updates during backward where states live in host memory: beside the content, taken or dropped, never half."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from early_updates import arrive, compare_guesses, early, guesses, interrupt_an_update, train
from fakes import (
    ApartDevice,
    FakeStore,
    LateWorker,
    late_worker,
    make_manager,
    make_plan_with,
    make_unit,
    peek,
    poke,
    versions,
)
from harness import (
    LINEAR_BYTES,
    WIDTH,
    apart,
    assert_same_tensors,
    batch,
    everything,
    everything_on_device,
    host,
    one_torch_thread,
    parameters_on_device,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload import AdamW, Engine
from offload.errors import InternalError
from offload.memory.budget import Tier
from offload.memory.transfer import CopyDeadlineError
from offload.planning.asked import Homes
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards import stream
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk

CHUNK = 4096
UNITS = 3
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
ROLES = frozenset({Role.PARAM}) | ALL_STATES
HOMES = [Homes(H, H, H), Homes(D, H, H)]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units are small here, and have two chunks."""
    monkeypatch.setattr(stream, "LARGE_CHUNK_NUMEL", CHUNK)


# --- the order of events ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeRecipe:
    """Counts up the first byte of each role that it visits; `version` is what a unit's update is made from."""

    version: str = "guess"
    visited: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    error: Exception | None = None

    def ranges(self, unit: Unit) -> object:
        return (self.version, unit.index)

    def visit(self, chunk: Chunk) -> None:
        if self.error is not None:
            raise self.error
        self.visited.append((chunk.unit.index, chunk.number))
        for role in ROLES & chunk.addresses.keys():
            old = chunk.sources.get(role, chunk.addresses[role])
            poke(chunk.addresses[role], bytes([peek(old, 1)[0] + 1]))


class Bench:
    """A manager beside an accelerator whose content counts up, and a worker that does nothing by itself."""

    def __init__(self, manager: Manager, worker: LateWorker) -> None:
        self.manager = manager
        self.early = manager.backward
        self.worker = worker
        self.recipe = FakeRecipe()

    def add(self, *indices: int) -> None:
        """Let gradients arrive, and pass by as the hooks do."""
        for index in indices:
            gradient = torch.ones(2 * CHUNK, dtype=torch.bfloat16)
            self.manager.add_gradient(index, 0, gradient, final=True)
            for _ in range(2):
                self.manager.advance_updates(lambda: self.recipe)
                for ticket in [t for u in self.early._queue.open for chunk in u.chunks for t in chunk.reading]:
                    ticket.wait()  # parameters that come from the device

    def content(self) -> list[list[int]]:
        """Return the first byte of every role per chunk, in a list per unit."""
        found: list[list[int]] = [[] for _ in self.manager.units]

        def look(chunk: Chunk) -> None:
            found[chunk.unit.index] += [peek(chunk.addresses[role], 1)[0] for role in ROLES & chunk.addresses.keys()]

        self.manager.stream(self.manager.units, look, reads=ROLES, keep_early=True)
        return found

    def raw(self) -> list[int]:
        """Return the first byte of each shard's home."""
        homes = [shard.home_buffer for shard in self.manager.copies if shard.role is not Role.GRAD]
        return [peek(home.address, 1)[0] for home in homes if home is not None]


@contextlib.contextmanager
def watching(home: Homes, *, spare: range = range(UNITS), first: Homes | None = None) -> Iterator[Bench]:
    """`first` is the home of unit 0, if it has another one."""
    units = [make_unit(index, [2 * CHUNK]) for index in range(UNITS)]
    homes = [first or home, *[home] * (UNITS - 1)]
    plan = make_plan_with(units, homes, chunk_numel=CHUNK, working_bytes=UNITS * units[0].param_bytes)
    plan = dataclasses.replace(plan, spare_units=frozenset(spare))
    request = dataclasses.replace(plan.request, device_is_host=False)
    more = sum(request.spare_bytes(unit, homes[unit.index]) for unit in units if unit.index in spare)
    arenas = {**plan.arena_bytes, H: plan.arena_bytes[H] + more}
    plan = dataclasses.replace(plan, request=request, arena_bytes=arenas)
    with late_worker() as worker:
        manager = make_manager(plan, FakeStore(), device=ApartDevice())
        try:
            manager.stream(units, _zero, reads=frozenset(), writes=ROLES)
            yield Bench(manager, worker)
            manager.check()
        finally:
            manager.close()


def _zero(chunk: Chunk) -> None:
    for address in chunk.addresses.values():
        poke(address, b"\0")


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_what_was_guessed_right_becomes_the_content(home: Homes) -> None:
    with watching(home) as bench:
        for step in range(1, 4):  # the buffers change places every time
            bench.add(2, 1, 0)
            assert not bench.recipe.visited or step > 1, "it waits for nothing"
            before = bench.raw()
            while bench.worker.queue:
                bench.worker.do(1)
                bench.manager.advance_updates(lambda: bench.recipe)
            assert bench.raw() == before == [step - 1] * len(before), "the content stays as it is"
            assert bench.early.reconcile(bench.recipe)[0] == {0, 1, 2}
            assert versions(bench.manager) == [step + 1] * UNITS, "graphs of before are stale"
            bench.manager.drop_gradients()
            assert bench.content() == [[step] * len(found) for found in bench.content()]
        assert bench.manager.tiers.counters.early_units == 9


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_chunks_that_need_no_slots_are_large(home: Homes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "LARGE_CHUNK_NUMEL", 2 * CHUNK)
    with watching(home) as bench:
        bench.add(2, 1, 0)
        while bench.worker.queue:
            bench.worker.do(1)
            bench.manager.advance_updates(lambda: bench.recipe)
        assert sorted(bench.recipe.visited) == [(0, 0), (1, 0), (2, 0)]
        assert bench.early.reconcile(bench.recipe)[0] == {0, 1, 2}


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_what_was_guessed_wrong_changes_nothing(home: Homes) -> None:
    with watching(home) as bench:
        bench.add(2, 1, 0)
        bench.worker.do(3)
        bench.manager.advance_updates(lambda: bench.recipe)
        assert bench.early.reconcile(FakeRecipe(version="clipped"))[0] == set()
        assert not bench.worker.queue and set(bench.raw()) == {0}
        counters = bench.manager.tiers.counters
        assert counters.early_units == 0 and counters.early_units_dropped == 2, "one was not begun"


@pytest.mark.parametrize("home", HOMES, ids=str)
def test_the_step_finishes_what_the_worker_is_at_and_leaves_what_only_waits(home: Homes) -> None:
    with watching(home) as bench:
        bench.add(2, 1, 0)
        bench.worker.do(1)
        assert bench.early.reconcile(bench.recipe)[0] == {2}
        assert bench.recipe.visited == [(2, 0), (2, 1)] and not bench.worker.queue
        assert bench.manager.tiers.counters.early_units_dropped == 0


@pytest.mark.parametrize("who", ["stream", "drop", "reset", "finish_updates", "gradient", "write"])
@pytest.mark.parametrize("home", HOMES, ids=str)
def test_whoever_comes_between_waits_for_the_worker_and_undoes(home: Homes, who: str) -> None:
    """The worker is in the middle of a unit: what it reads must not change, and what it writes counts no more."""
    with watching(home) as bench:
        manager = bench.manager
        bench.add(2, 1)
        bench.worker.do(1)
        bench.worker.begun = begun = bench.worker.queue[0]
        if who == "stream":
            manager.stream(manager.units, lambda chunk: None, reads=ROLES)
        elif who == "drop":
            manager.drop_gradients()
        elif who == "reset":
            manager.reset()
        elif who == "finish_updates":
            manager.finish_updates()
        elif who == "gradient":
            manager.add_gradient(2, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
        else:
            manager.stream(manager.units, _zero, reads=frozenset(), writes=ROLES)
        assert begun.done() and not begun.cancelled(), "it was waited for"
        assert bench.recipe.visited == [(2, 0), (2, 1)] and set(bench.raw()) == {0}
        taken = bench.early.reconcile(bench.recipe)[0]
        assert 2 not in taken and all(shard.readers == 0 for shard in manager.copies)


@pytest.mark.parametrize("who", ["looks", "clips"])
def test_whoever_undoes_waits_for_no_more_than_the_worker_is_at(who: str) -> None:
    with watching(HOMES[0]) as bench:
        bench.add(2, 1, 0)
        bench.worker.begun = bench.worker.queue[0]
        bench.worker.begins_next = True
        bench.manager.finish_updates() if who == "looks" else bench.early.reconcile(FakeRecipe(version="clipped"))
        assert bench.recipe.visited == [(2, 0)]


def test_a_reader_that_disturbs_nothing_sees_the_old_content_and_the_guess_stays() -> None:
    with watching(HOMES[0]) as bench:
        bench.add(2, 1)
        assert set(map(max, bench.content())) == {0}
        assert bench.early.reconcile(bench.recipe)[0] == {1, 2}


@pytest.mark.parametrize("index", [0, 1])
def test_updates_go_on_while_a_gradient_waits_for_room(index: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of what has come; not of the unit whose gradient it changes."""
    with watching(HOMES[0]) as bench:
        manager, gradient = bench.manager, torch.ones(2 * CHUNK, dtype=torch.bfloat16)
        bench.add(2)
        manager.add_gradient(1, 0, gradient, final=True)
        assert [update.unit.index for update in bench.early._queue.open] == [2]
        left = iter([True])
        monkeypatch.setattr(manager.gradients, "await_next", lambda room_for=None: next(left, False))
        manager.add_gradient(index, 0, gradient, final=True)
        assert [update.unit.index for update in bench.early._queue.open] == ([2, 1] if index == 0 else [2])


def test_only_units_that_the_plan_has_room_for() -> None:
    with watching(HOMES[0], spare=range(1, 3)) as bench:
        bench.add(2, 1, 0)
        bench.worker.do(len(bench.worker.queue))
        assert bench.early.reconcile(bench.recipe)[0] == {1, 2}


def test_an_error_of_the_arithmetic_is_told_and_undone() -> None:
    with watching(HOMES[0]) as bench:
        bench.recipe.error = ValueError("no such kernel")
        bench.add(2)
        bench.worker.do(1)
        with pytest.raises(ValueError, match="no such kernel"):
            bench.manager.advance_updates(lambda: bench.recipe)
        bench.manager.reset()
        assert set(bench.raw()) == {0} and not bench.manager.has_lost_content()


def late(source: int) -> None:
    raise CopyDeadlineError("late")


def test_an_upload_that_is_late_ends_the_guesses_and_not_the_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(HOMES[1]) as bench:
        bench.add(2)
        monkeypatch.setattr(bench.manager.tiers.mover, "await_source", late)
        bench.add(1)
        assert not bench.early.has_more_to_do
        monkeypatch.undo()
        assert bench.early.reconcile(bench.recipe)[0] == set() and set(bench.raw()) == {0}
        bench.manager.forward.begin(bench.manager.units[1:], bench.recipe.visit)
        monkeypatch.setattr(bench.manager.tiers.mover, "await_source", late)
        bench.manager.forward.advance()
        with pytest.raises(CopyDeadlineError):
            bench.manager.forward.require(1)
        monkeypatch.undo()
        bench.manager.forward.finish()
        assert sorted(bench.recipe.visited) == [(1, 0), (2, 0)]


@pytest.mark.parametrize("error", [ValueError("no such kernel"), InternalError("a bug")])
def test_what_fails_while_others_are_updated_is_left_to_the_forward(error: Exception) -> None:
    with watching(HOMES[0], first=Homes(N, H, N)) as bench:
        bench.add(2)
        bench.worker.do(1)
        bench.recipe.error = error
        assert bench.early.reconcile(bench.recipe) == (set(), {2})
        with pytest.raises(InternalError, match="a bug") if "bug" in str(error) else contextlib.nullcontext():
            assert bench.early.finish(bench.recipe, lambda slot: None) == set()
        bench.manager.reset()
        assert set(bench.raw()) == {0} and not bench.manager.has_lost_content()


def test_the_devices_parameters_are_lost_where_they_were_overwritten_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    with watching(HOMES[1]) as bench:
        bench.add(2)
        bench.worker.do(2)

        def fails(*arguments: object, **options: object) -> Any:
            raise RuntimeError("the device is gone")

        monkeypatch.setattr(bench.manager.tiers.mover, "fetch_host", fails)
        with pytest.raises(RuntimeError, match="is gone"):
            bench.early.reconcile(bench.recipe)
        assert bench.manager.has_lost_content()
        monkeypatch.undo()
        bench.manager.reset()


def test_parameters_on_the_device_are_sent_once_when_all_of_their_pieces_are_updated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """In the queue beside that of the drive, where updates go in pieces: each reads the old content from the device."""
    with watching(HOMES[1], first=Homes(N, H, N)) as bench:
        manager, mover = bench.manager, bench.manager.tiers.mover
        for step in (1, 2):
            bench.recipe.visited.clear()
            sent: list[list[tuple[int, int]]] = []
            fetch_host = type(mover).fetch_host

            def send(*given: Any, **options: Any) -> Any:
                sent.append(sorted(bench.recipe.visited))  # noqa: B023
                return fetch_host(mover, *given, **options)  # noqa: B023

            monkeypatch.setattr(mover, "fetch_host", send)
            for unit in manager.units:
                manager.add_gradient(unit.index, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
            manager.forward.begin([manager.units[2], manager.units[1]], bench.recipe.visit)
            manager.forward.finish()
            assert sent == [[(2, 0), (2, 1)], [(1, 0), (1, 1), (2, 0), (2, 1)]]
            manager.drop_gradients()
            assert bench.content()[1:] == [[step] * 8, [step] * 8]


def test_parameters_on_their_way_to_the_device_are_awaited_before_their_old_home_is_written(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with watching(HOMES[0]) as bench:
        awaited: list[int] = []
        monkeypatch.setattr(bench.manager.tiers.mover, "await_source", awaited.append)
        homes = []
        for _ in range(3):
            home = bench.manager.tiers.param(2).home_buffer
            assert home is not None
            homes.append(home.address)
            bench.add(2)
            bench.worker.do(2)
            assert bench.early.reconcile(bench.recipe)[0] == {2}
            bench.manager.drop_gradients()
        assert homes[0] == homes[2] != homes[1]
        assert awaited == [homes[1], homes[0], homes[1]]


# --- through the engine -----------------------------------------------------------------------------------------------


def make(dtype: torch.dtype = torch.float32, depth: int = 4) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)]).to(dtype)


def in_memory(model: nn.Module, params: str, *, whole: bool = False) -> dict[str, Any]:
    """Options: states in host memory, parameters there too or on the device."""
    if params == "device":
        return {**parameters_on_device(), "unit_bytes": LINEAR_BYTES}
    return host(model, unit_bytes=LINEAR_BYTES, whole=whole)


OPTIMIZERS = {
    "adamw": lambda: AdamW(lr=1e-2),
    "sgd": lambda: offload.SGD(lr=1e-2),
    "momentum": lambda: offload.SGD(lr=1e-2, momentum=0.9),
    "lion": lambda: offload.Lion(lr=1e-3),
    "lamb": lambda: offload.LAMB(lr=1e-2),
}
KINDS = [
    (torch.float32, "float32", 1, "adamw"),
    (torch.float32, "int8", 3, "adamw"),
    (torch.bfloat16, "float32", 3, "adamw"),
    (torch.bfloat16, "bfloat16", 1, "adamw"),
    (torch.bfloat16, "int8", 1, "adamw"),
    (torch.float16, "float32", 1, "adamw"),
    (torch.float16, "bfloat16", 3, "adamw"),
    (torch.bfloat16, "float32", 1, "sgd"),
    (torch.float32, "float32", 1, "sgd"),
    (torch.bfloat16, "float32", 1, "momentum"),
    (torch.float16, "float32", 1, "lion"),
    (torch.bfloat16, "float32", 1, "lamb"),
]


@pytest.mark.few(8)
@pytest.mark.parametrize("params", ["cpu", "device"])
@pytest.mark.parametrize(("dtype", "state_dtype", "accumulation", "optimizer"), KINDS, ids=str)
@pytest.mark.usefixtures("single_torch_thread")
def test_guesses_right_and_wrong_change_no_bit(
    dtype: torch.dtype, state_dtype: str, accumulation: int, optimizer: str, params: str
) -> None:
    kind = OPTIMIZERS[optimizer](), state_dtype, accumulation
    truth = guesses(make(dtype), *kind, arrives=False, **everything_on_device())
    with apart():
        where = in_memory(make(dtype), params, whole=optimizer == "lamb")
        ours = guesses(make(dtype), *kind, arrives=True, **where)
    compare_guesses(ours, truth)
    assert truth.early == (0, 0) and ours.early[0] >= 8 and ours.early[1] >= 2


def test_on_the_cpu_device_there_is_no_room_and_nothing_is_updated_early() -> None:
    with Engine(make(), AdamW(lr=1e-2), **in_memory(make(), "cpu")) as engine:
        assert not engine.plan.spare_units and "updates during backward" not in str(engine.plan)
        for number in range(2):
            train(engine, number)
            engine.step()
        assert early(engine) == (0, 0)


@pytest.mark.usefixtures("single_torch_thread")
def test_a_class_of_torch_is_not_guessed_and_steps_in_the_worker() -> None:
    """What it keeps in host memory could not be taken back."""

    def run(**where: Any) -> dict[str, torch.Tensor]:
        model = make(torch.bfloat16)
        with Engine(model, torch.optim.RMSprop(model.parameters(), lr=1e-2), **where) as engine:
            for number in range(3):
                train(engine, number)
                engine.step()
            assert not engine.plan.spare_units and early(engine) == (0, 0)
            return everything(engine)

    truth = run(**everything_on_device())
    with apart():
        assert_same_tensors(run(**in_memory(make(torch.bfloat16), "cpu", whole=True)), truth)


@pytest.mark.few
@pytest.mark.parametrize("params", ["cpu", "device"])
@pytest.mark.parametrize("between", ["states", "zero", "backward", "load", "gather", "evaluate", "rate", "close"])
def test_what_comes_between_backward_and_step(between: str, params: str) -> None:
    results: list[dict[str, torch.Tensor]] = []

    def run(**where: Any) -> dict[str, torch.Tensor]:
        model, found = make(), {}
        with Engine(model, AdamW(lr=1e-2), **where) as engine:
            assert engine.optimizer is not None
            train(engine, 0)
            engine.step()
            train(engine, 1)
            if between == "states":
                found.update({f"before {name}": value for name, value in everything(engine).items()})
            elif between == "zero":
                engine.zero_grad()
                train(engine, 2)
            elif between == "backward":
                train(engine, 2)
            elif between == "load":
                engine.load_state_dict({name: value + 1 for name, value in engine.state_dict().items()})
            elif between == "gather":
                with engine.gather(model[2].weight, modify=True), torch.no_grad():
                    model[2].weight.mul_(2)
            elif between == "evaluate":
                with torch.no_grad():
                    found["output"] = engine(batch(3)).clone()
            elif between == "rate":
                engine.optimizer.param_groups[0]["lr"] = 1e-3
            if between != "close":
                engine.step()
                train(engine, 4)
                engine.step()
                found |= everything(engine)
        return found | {f"after {name}": value.clone() for name, value in model.state_dict().items()}

    results.append(run(**everything_on_device()))
    with apart():
        results.append(run(**in_memory(make(), params)))
    assert_same_tensors(*results)


@pytest.mark.parametrize("params", ["cpu", "device"])
def test_interrupt_in_an_update_during_backward(params: str) -> None:
    """It comes through at a safe point."""
    truth = interrupt_an_update(make(), interrupts=False, **everything_on_device())
    with apart():
        assert_same_tensors(interrupt_an_update(make(), interrupts=True, **in_memory(make(), params)), truth)


@functools.cache
def room_for(params: str, units: int) -> int:
    """Return the smallest host budget with room for the updates of so many units."""
    with apart(), Engine(make(), AdamW(), **in_memory(make(), params)) as engine:
        plan = engine.plan
        assert len(plan.spare_units) == 4
        return plan.arena_bytes[H] - plan.spare_bytes * (4 - units) // 4


@pytest.mark.parametrize("units", [0, 1, 3])
def test_budgets_hold_and_units_without_room_are_left_to_the_forward(units: int) -> None:
    where = in_memory(make(), "cpu")
    where["max_memory"]["cpu"] = room_for("cpu", units)
    with apart(), Engine(make(), AdamW(lr=1e-2), **where) as engine:
        assert len(engine.plan.spare_units) == units
        assert (f"of {units} of 4 units" in str(engine.plan)) == bool(units)
        train(engine, 0)
        arrive(engine)
        engine.step()
        assert early(engine) == (units, 0)
        assert engine.stats().peak_bytes["cpu"] <= engine.stats().budget_bytes["cpu"]


def seen_in(actions: list[str], *, waits: bool, **where: Any) -> list[dict[str, torch.Tensor]]:
    """Return what a run holds where it is read, and at its end: an action per step, on gradients of one batch.

    Args:
        actions: "calm" steps; "clip" with gradients 1000 times as large, "twice" after another backward, "read" and
            "load" after parameters and states were read or parameters halved; "skip" has no step.
        waits: let the worker come to the end of what it has before each step.
        **where: options of the engine.
    """
    seen = []
    with Engine(make(), AdamW(lr=1e-2), max_grad_norm=50.0, **where) as engine:
        for number, action in enumerate(actions):
            train(engine, number, 1000.0 if action == "clip" else 1.0)
            if waits:
                arrive(engine)
            if action == "read":
                seen.append(everything(engine))
            elif action == "load":
                engine.load_state_dict({name: value / 2 for name, value in engine.state_dict().items()})
            elif action == "twice":
                train(engine, number + 100)
            elif action == "skip":
                engine.zero_grad()
                continue
            engine.step()
            engine._manager.check()
        return [*seen, everything(engine)]


@given(
    actions=st.lists(st.sampled_from(["calm", "clip", "skip", "read", "load", "twice"]), min_size=1, max_size=8),
    params=st.sampled_from(["cpu", "device"]),
    waits=st.booleans(),
    units=st.sampled_from([0, 2, 4]),
)
def test_any_sequence_gives_the_same(actions: list[str], params: str, waits: bool, units: int) -> None:
    with one_torch_thread():
        truth = seen_in(actions, waits=waits, **everything_on_device())
        with apart():
            where = in_memory(make(), params)
            where["max_memory"]["cpu"] = room_for(params, units)
            for ours, expected in zip(seen_in(actions, waits=waits, **where), truth, strict=True):
                assert_same_tensors(ours, expected)
