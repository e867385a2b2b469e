"""Updates during backward: what is begun when, what becomes of a guess, and that no result depends on it."""

from __future__ import annotations

import contextlib
import dataclasses
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from early_updates import compare_guesses, early, fail_in_backward, guesses, interrupt_an_update, train
from fakes import FakeStore, FakeTicket, make_manager, make_plan_with, make_unit, peek, poke, versions
from harness import (
    WIDTH,
    assert_same_tensors,
    computes_on_cpu,
    everything,
    everything_on_device,
    loss_of,
    one_torch_thread,
    tight,
)
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from offload import AdamW, Engine
from offload.errors import ConfigError, NonFiniteError
from offload.memory.budget import Tier
from offload.optim.step import MOST_CALM_STEPS, Calm
from offload.planning.asked import Homes
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.schedule import Schedule
from offload.planning.units import Unit
from offload.shards.backward_updates import BackwardUpdates
from offload.shards.manager import Manager
from offload.shards.shard import State
from offload.shards.stream import ALL_STATES, Chunk
from offload.shards.working_set import Came
from swap import SwapDeadlineError, SwapError
from swap.io.faults import FaultTarget

CHUNK = 4096
UNITS = 3
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
ON_NVME = Homes(N, H, N)
ROLES = frozenset({Role.PARAM}) | ALL_STATES

# --- the order of events ----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class FakeRecipe:
    """Counts up the first byte of each role that it visits; `version` is what a unit's update is made from."""

    store: FakeStore
    version: str = "guess"
    refused: bool = False

    def ranges(self, unit: Unit) -> object:
        if self.refused:
            raise ConfigError("lr: expected at least 0")
        return (self.version, unit.index)

    def visit(self, chunk: Chunk) -> None:
        self.store.events.append(("visit", (chunk.unit.index, chunk.number)))
        for role in ROLES & chunk.addresses.keys():
            first = peek(chunk.addresses[role], 1)[0]
            poke(chunk.addresses[role], bytes([first + 1]))


@dataclasses.dataclass
class Bench:
    """A manager with all content in place, and early updates over it; nothing has arrived yet."""

    manager: Manager
    store: FakeStore
    early: BackwardUpdates
    recipe: FakeRecipe
    asked: list[None]

    def guess(self) -> FakeRecipe:
        self.asked.append(None)
        return self.recipe

    def fetch(self, *indices: int) -> None:
        """Bring parameters to the device, as a backward does."""
        for index in indices:
            self.manager.acquire(index).close()
        self.store.events.clear()

    def add(self, index: int, *, final: bool = True) -> None:
        """Let a unit's gradient arrive, and pass by as the hooks do."""
        self.manager.add_gradient(index, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=final)
        self.manager.advance_updates(self.guess)

    def arrive(self) -> None:
        """Let everything that is in flight be over."""
        for ticket in list(self.store.flying):
            with contextlib.suppress(SwapError):
                ticket.wait()

    def make_all(self) -> None:
        """Pass by until nothing is left to do."""
        for _ in range(8 * UNITS):
            self.arrive()
            self.manager.advance_updates(self.guess)
        self.arrive()

    def make_step(self) -> None:
        """Keep what was guessed, and let the forward make the rest."""
        taken = self.early.reconcile(self.recipe)[0]
        left = [unit for unit in self.manager.units if unit.index not in taken]
        self.manager.forward.begin(left, self.recipe.visit, self.manager.ahead)
        self.manager.forward.finish()

    def happened(self, what: str) -> list[Any]:
        return [key for kind, key in self.store.events if kind == what]

    def content(self) -> dict[Any, bytes]:
        """What the shards hold, by the names that they have when nothing was ever taken."""
        return {(key[0], key[1].rstrip("'"), key[2]): data for key, data in self.store.objects.items()}


@contextlib.contextmanager
def watching(
    home: Homes = ON_NVME,
    *,
    room: Callable[[Plan, Unit], int] = lambda plan, unit: UNITS * plan.aside_bytes(unit),
    more: int = 0,
    slots: int = 4,
    sizes: Sequence[int] = (2 * CHUNK,),
) -> Iterator[Bench]:
    """Three units that are on the device, and `more` for which there is no room beside them; `sizes` of parameters."""
    units = [make_unit(index, list(sizes)) for index in range(UNITS + more)]
    store = FakeStore()
    working = UNITS * units[0].param_bytes
    plan = make_plan_with(units, [home] * len(units), chunk_numel=CHUNK, working_bytes=working, staging_slots=slots)
    plan = dataclasses.replace(plan, early_bytes=room(plan, units[0]))
    manager = make_manager(plan, store)
    try:
        manager.stream(units, lambda chunk: None, reads=frozenset(), writes=ROLES)
        store.events.clear()
        bench = Bench(manager, store, manager.backward, FakeRecipe(store), [])
        bench.fetch(*range(UNITS))
        yield bench
        bench.arrive()
    finally:
        manager.close()


def test_a_unit_is_begun_when_its_gradient_is_complete_while_others_are_still_to_come() -> None:
    with watching() as bench:
        bench.add(2)
        assert bench.happened("get") == [(2, "master", 0), (2, "master", 1)], "the parameters are here"
        assert not bench.happened("get over") and not bench.happened("visit"), "it waits for nothing"
        bench.arrive()
        bench.add(1)
        assert bench.happened("visit") == [(2, 0), (2, 1)]
        assert (2, "param'", 0) in bench.happened("put") and (2, "master'", 0) in bench.happened("put")
        assert bench.asked == [None], "one guess for the whole step"
        bench.arrive()
        bench.manager.check()


def test_a_unit_is_left_to_the_forward_if_the_last_micro_batch_brings_one_of_its_gradients_twice() -> None:
    """As many have come as it has parameters, but a third one may be on its way."""
    with watching(sizes=(CHUNK, CHUNK)) as bench:
        gradient = torch.ones(CHUNK, dtype=torch.bfloat16)
        bench.manager.add_gradient(2, 1, gradient, final=False)
        for _ in range(2):
            bench.manager.add_gradient(2, 0, gradient, final=True, backward_pass=1)
        bench.manager.advance_updates(bench.guess)
        assert not bench.early.has_begun(2) and not bench.early.has_more_to_do


def test_a_unit_is_begun_when_the_last_of_its_gradients_is_there_not_when_it_is_handed_over(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As beside an accelerator: an earlier micro-batch brought the one that is still on its way."""
    with watching(sizes=(CHUNK, CHUNK)) as bench:
        gradient, on_their_way = torch.ones(CHUNK, dtype=torch.bfloat16), deque[Callable[[], None]]()
        bench.manager.add_gradient(2, 0, gradient, final=False)

        def read(tensor: torch.Tensor, use: Callable[[int], None], **_: object) -> None:
            on_their_way.append(lambda: use(tensor.data_ptr()))

        monkeypatch.setattr(bench.manager.tiers.mover, "read_tensor", read)
        for slot in (1, 0):
            bench.manager.add_gradient(2, slot, gradient, final=True)
        for is_whole in (False, True):
            on_their_way.popleft()()
            bench.manager.advance_updates(bench.guess)
            assert (bench.early.has_begun(2), bench.early.has_more_to_do) == (is_whole, is_whole)


@pytest.mark.parametrize(("required", "gone"), [(False, 1), (True, 2)], ids=["prefetch", "needed now"])
def test_parameters_wait_on_the_device_for_their_update_unless_there_is_no_other_room(
    required: bool, gone: int
) -> None:
    """A third of the region is one unit: the one whose update is under way, though it is needed last of all."""
    uses = Schedule([3, 0, 1, 2])
    with watching(more=1) as bench:
        bench.add(2)
        bench.add(1)
        fourth = bench.manager.copies.of(3, Role.PARAM)
        wanted = () if required else bench.early.wanted_here()
        found = bench.manager.working.start_fetch(fourth, uses, required=required, wanted=wanted)
        assert found.came is Came.STARTED
        assert [index for index in range(UNITS) if index not in bench.manager.bound] == [gone]
        bench.manager.copies.wait(fourth)
        bench.manager.working.wait_for_fetch(fourth)
        bench.make_all()
        assert bench.happened("visit") == [(2, 0), (2, 1)] + [(1, 0), (1, 1)] * required, "what has left waits"
        assert bench.early.reconcile(bench.recipe)[0] == ({1, 2} if required else {2})
        bench.manager.check()


def test_nothing_is_begun_before_the_last_micro_batch() -> None:
    with watching() as bench:
        bench.add(2, final=False)
        assert bench.store.events == [] and not bench.asked
        bench.add(2)
        assert bench.happened("get")


def test_what_was_guessed_right_becomes_the_content() -> None:
    with watching(more=1) as bench:
        before = bench.content()
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        used = bench.store.used_bytes
        counted = versions(bench.manager)
        assert bench.early.reconcile(bench.recipe)[0] == {0, 1, 2}
        deleted = UNITS * bench.manager.tiers.plan.aside_bytes(bench.manager.units[0])
        assert used - bench.store.used_bytes == deleted, "the old content"
        after = bench.content()
        assert after.keys() == before.keys()
        for key, data in after.items():
            assert data[0] == before[key][0] + (key[0] < UNITS) and data[1:2048] == before[key][1:2048]
        assert [now - then for now, then in zip(versions(bench.manager), counted, strict=True)] == [1, 1, 1, 0]
        assert all(shard.readers == 0 for shard in bench.manager.copies)
        assert bench.manager.tiers.counters.early_units == 3 and bench.manager.tiers.counters.early_units_dropped == 0
        bench.manager.check()


def test_the_content_goes_on_from_there() -> None:
    """Names change with every step that is taken, and reads follow."""
    with watching(more=1) as bench:
        first = bench.content()[0, "param", 0][0]
        for step in range(1, 4):
            for index in (2, 1, 0):
                bench.add(index)
            bench.make_all()
            assert bench.early.reconcile(bench.recipe)[0] == {0, 1, 2}
            bench.manager.drop_gradients()
            bench.fetch(0, 1, 2)
            seen: list[int] = []
            bench.manager.stream(
                bench.manager.units[:1],
                lambda chunk, seen=seen: seen.append(peek(chunk.addresses[Role.PARAM], 1)[0]),
                reads=frozenset({Role.PARAM}),
            )
            assert seen[0] == first + step


def test_what_was_guessed_wrong_changes_nothing() -> None:
    with watching(more=1) as bench:
        before = dict(bench.store.objects)
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        assert bench.early.reconcile(FakeRecipe(bench.store, version="clipped"))[0] == set()
        assert bench.store.objects == before
        assert bench.manager.tiers.counters.early_units == 0 and bench.manager.tiers.counters.early_units_dropped == 3
        bench.manager.check()


def test_what_is_under_way_at_the_step_is_finished_and_what_waits_is_left() -> None:
    with watching() as bench:
        for index in (2, 1, 0):
            bench.add(index)
        assert bench.happened("get") == [(2, "master", 0), (2, "master", 1)]
        assert bench.early.reconcile(bench.recipe)[0] == {2}
        assert bench.happened("visit") == [(2, 0), (2, 1)]
        assert not bench.store.flying
        bench.manager.check()


def test_the_unit_whose_gradient_came_last_is_next() -> None:
    with watching(more=1) as bench:
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        assert [index for index, _ in bench.happened("visit")] == [2, 2, 0, 0, 1, 1]


def test_what_has_no_backward_left_to_go_beside_is_left_to_the_forward() -> None:
    """The last gradient ends it, for its own unit and for those that wait."""
    with watching() as bench:
        bench.add(2)
        bench.make_all()
        bench.add(1)
        bench.add(0)
        bench.make_all()
        assert bench.happened("visit") == [(2, 0), (2, 1), (1, 0), (1, 1)]
        assert bench.early.reconcile(bench.recipe)[0] == {1, 2}
        bench.manager.check()


def test_states_of_a_unit_that_is_left_are_read_while_the_last_gradient_is_missing() -> None:
    """Into slots that those under way do not need; the forward takes them over."""
    with watching(slots=12) as bench:
        before, counters = bench.content(), bench.manager.tiers.counters
        ahead = [(0, "master", 0), (0, "master", 1)]
        bench.add(2)
        bench.make_all()
        assert bench.happened("get") == [(2, "master", 0), (2, "master", 1)]
        bench.add(1)
        assert bench.happened("get")[-2:] == ahead
        bench.add(0)
        bench.make_all()
        bench.make_step()
        assert [key for key in bench.happened("get") if key[0] == 0] == ahead, "nothing is read again"
        assert counters.update_chunks_ahead == len(ahead) and counters.early_units == 2
        assert {key: data[0] for key, data in bench.content().items()} == {
            key: data[0] + 1 for key, data in before.items()
        }


@pytest.mark.parametrize("error", [False, True])
@pytest.mark.parametrize("who", ["stream", "keep early", "drop", "reset", "finish_updates"])
def test_whoever_needs_slots_that_were_read_to_has_them(who: str, error: bool) -> None:
    with watching(slots=12) as bench:
        manager, before = bench.manager, bench.content()
        bench.add(2)
        bench.make_all()
        if error:
            bench.store.fail = lambda what, key, count: SwapError("injected", errno=5) if key[0] == 1 else None
        bench.add(1)
        assert any(ticket.key[0] == 0 for ticket in bench.store.flying), "read ahead"
        if error:
            bench.arrive()
            manager.advance_updates(bench.guess)
            bench.store.fail = lambda what, key, count: None
        if who == "stream":
            manager.stream(manager.units, lambda chunk: None, reads=frozenset({Role.PARAM}))
        elif who == "keep early":
            manager.stream(manager.units, lambda chunk: None, reads=ROLES, keep_early=True)
        elif who == "drop":
            manager.drop_gradients()
        elif who == "reset":
            manager.reset()
        else:
            manager.finish_updates()
        assert not [ticket for ticket in bench.store.flying if ticket.kind == "get"]
        manager.drop_gradients()
        assert not manager.ahead._slots, "they are the pipeline's again"
        bench.fetch(0, 1, 2)
        for index in (2, 1, 0):
            bench.add(index)
            bench.make_all()
        bench.make_step()
        assert {key: data[0] for key, data in bench.content().items()} == {
            key: data[0] + 1 for key, data in before.items()
        }
        manager.check()


def test_what_was_made_of_gradients_that_are_dropped_is_undone_though_a_read_ahead_is_late() -> None:
    """A step from equal gradients would take it."""
    with watching(slots=12) as bench:
        before = dict(bench.store.objects)
        bench.add(2)
        bench.make_all()
        bench.add(1)

        def hang(ticket: FakeTicket) -> None:
            if ticket.key[0] == 0:  # type: ignore[index]
                raise SwapDeadlineError("late")

        bench.store.before_wait = hang
        bench.manager.drop_gradients()
        bench.store.before_wait = lambda ticket: None
        assert bench.store.objects == before and not bench.early.guessed
        assert not bench.manager.gradients.any_arrived


def test_what_is_under_way_is_given_up_where_the_guess_was_wrong() -> None:
    with watching() as bench:
        before = dict(bench.store.objects)
        bench.add(2)
        bench.arrive()
        bench.manager.advance_updates(bench.guess)
        assert bench.happened("visit")
        assert bench.early.reconcile(FakeRecipe(bench.store, version="clipped"))[0] == set()
        assert bench.store.objects == before and not bench.store.flying


@pytest.mark.parametrize("when", ["waiting", "under way", "done"])
def test_a_gradient_that_changes_withdraws_its_unit(when: str) -> None:
    with watching() as bench:
        before = dict(bench.store.objects)
        if when == "waiting":
            bench.add(0)
        bench.add(2)
        if when == "done":
            bench.make_all()
        bench.manager.add_gradient(2, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
        assert {key: data for key, data in bench.store.objects.items() if key[0] == 2} == {
            key: data for key, data in before.items() if key[0] == 2
        }
        bench.make_all()
        assert 2 not in bench.early.reconcile(bench.recipe)[0]
        bench.manager.check()


def test_units_that_are_withdrawn_leave_their_slots_to_others_and_take_none_that_is_in_use() -> None:
    with watching(room=lambda plan, unit: 1 << 30, more=3, sizes=(CHUNK,)) as bench:
        gradient = torch.ones(CHUNK, dtype=torch.bfloat16)
        for index in (2, 1, 0, 3, 4):
            bench.manager.acquire(index).close()
            bench.manager.add_gradient(index, 0, gradient, final=True)
            bench.manager.advance_updates(bench.guess)
            assert bench.early.has_begun(index)
            if index in (1, 0, 3):
                bench.manager.multiply_gradient(index, 0, 2.0)
                assert not bench.early.has_begun(index)
        flying = [(ticket.kind, ticket.key) for ticket in bench.store.flying]
        assert flying == [("get", (index, "master", 0)) for index in (2, 4)]
        bench.make_all()
        assert bench.early.reconcile(bench.recipe)[0] == {2, 4}
        bench.manager.check()


@pytest.mark.parametrize("who", ["stream", "drop", "reset", "finish_updates"])
def test_whoever_looks_or_drops_withdraws_all(who: str) -> None:
    with watching() as bench:
        before = dict(bench.store.objects)
        for index in (2, 1, 0):
            bench.add(index)
        bench.arrive()
        bench.manager.advance_updates(bench.guess)
        if who == "stream":
            bench.manager.stream(bench.manager.units, lambda chunk: None, reads=frozenset({Role.PARAM}))
        elif who == "drop":
            bench.manager.drop_gradients()
        elif who == "reset":
            bench.manager.reset()
        else:
            bench.manager.finish_updates()
        assert bench.store.objects == before and not bench.store.flying
        assert bench.early.reconcile(bench.recipe)[0] == set()
        bench.manager.check()


def test_a_reader_that_disturbs_nothing_finds_staging_free_and_the_updates_go_on() -> None:
    with watching(more=1) as bench:
        for index in (2, 1, 0):
            bench.add(index)
        waiting = [update.unit.index for update in bench.early._queue.waiting]
        assert bench.early._queue.open and waiting, "one is begun, others wait"
        before = {key: data for key, data in bench.content().items() if key[1] in ("param", "master")}
        seen: list[tuple[int, int]] = []

        def visit(chunk: Chunk) -> None:
            seen.append((chunk.unit.index, chunk.number))
            for role in (Role.PARAM, Role.MASTER):
                key = (chunk.unit.index, role.value, chunk.number)
                size = bench.manager.tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
                assert peek(chunk.addresses[role], size) == before[key][:size], "of before the step"

        bench.manager.stream(bench.manager.units, visit, reads=ROLES | {Role.GRAD}, keep_early=True)
        assert seen == [(index, number) for index in range(UNITS + 1) for number in range(2)]
        assert [update.unit.index for update in bench.early._queue.waiting] == waiting, "nothing more was begun"
        bench.make_all()
        assert bench.early.reconcile(bench.recipe)[0] == {0, 1, 2}
        bench.manager.check()


@pytest.mark.parametrize("kind", ["get", "put"])
def test_an_error_does_not_keep_a_reader_that_disturbs_nothing(kind: str) -> None:
    with watching() as bench:
        before = dict(bench.store.objects)
        bench.store.fail = lambda what, key, count: SwapError("injected", errno=5) if what == kind else None
        for index in (2, 1, 0):
            bench.add(index)
        bench.early.rest()
        bench.store.fail = lambda what, key, count: None
        assert bench.store.objects == before and not bench.early._queue.open and not bench.early._done
        bench.add(1)
        assert not bench.early._queue.open, "nothing more in this step"
        bench.manager.check()


@pytest.mark.parametrize("home", [Homes(H, H, N), Homes(N, H, H), Homes(N, N, N), Homes(D, H, N)], ids=str)
def test_only_where_the_old_content_stays_and_the_gradient_waits(home: Homes) -> None:
    with watching(home, room=lambda plan, unit: 1 << 30) as bench:
        for index in range(UNITS):
            bench.add(index)
        bench.make_all()
        assert bench.early.reconcile(bench.recipe)[0] == set()
        assert not bench.happened("visit")


def test_room_is_never_exceeded() -> None:
    """Room for one and a half units: one is updated early."""
    with watching(room=lambda plan, unit: plan.aside_bytes(unit) * 3 // 2) as bench:
        for _ in range(2):
            settled = bench.store.used_bytes
            for index in (2, 1, 0):
                bench.add(index)
            bench.make_all()
            assert bench.store.used_bytes - settled == bench.manager.tiers.plan.aside_bytes(bench.manager.units[0])
            assert bench.early.reconcile(bench.recipe)[0] == {2}
            bench.manager.drop_gradients()
            bench.fetch(2)


def test_a_unit_that_somebody_looks_at_is_updated_in_place() -> None:
    with watching(more=1) as bench:
        kept = bench.manager.bound.storage(1)
        view = torch.empty(0, dtype=torch.uint8).set_(kept)
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        assert bench.early.reconcile(bench.recipe)[0] == {0, 2}
        assert view.numel() and bench.manager.copies.of(1, Role.PARAM).state is State.RESIDENT
        del view, kept


def test_parameters_that_have_left_are_left_to_the_forward() -> None:
    """It reads them in any case, and updates them in place."""
    with watching(more=1) as bench:
        bench.manager.discard_working_copy(1)
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        assert not [key for key in bench.happened("get") if key[1] == "param"]
        assert bench.early.reconcile(bench.recipe)[0] == {0, 2}
        assert not {0, 2} & set(bench.manager.bound), "the copies on the device were of before the step"


@pytest.mark.parametrize("kind", ["get", "put"])
def test_an_error_is_met_by_whoever_makes_the_update_afterwards(kind: str) -> None:
    with watching() as bench:
        before = dict(bench.store.objects)
        bench.store.fail = lambda what, key, count: SwapError("injected", errno=5) if what == kind else None
        for index in (2, 1, 0):
            bench.add(index)
            bench.arrive()
        bench.make_all()
        bench.store.fail = lambda what, key, count: None
        assert bench.early.reconcile(bench.recipe)[0] == set()
        assert bench.store.objects == before
        bench.manager.check()


def test_a_hyper_parameter_out_of_range_is_the_steps_business() -> None:
    with watching() as bench:
        bench.recipe.refused = True
        bench.add(2)
        assert bench.store.events == []


def test_more_calm_steps_are_wanted_after_each_wrong_guess() -> None:
    calm = Calm(expected=False)
    assert not calm, "nothing is known yet"
    calm.note(calm=True, guessed=False)
    assert calm
    needed = []
    for _ in range(6):  # a guess that is wrong whenever one is made
        calm.note(calm=False, guessed=True)
        steps = 0
        while not calm:
            calm.note(calm=True, guessed=False)
            steps += 1
        needed.append(steps)
    assert needed == [2, 4, 8, MOST_CALM_STEPS, MOST_CALM_STEPS, MOST_CALM_STEPS]
    for _ in range(4):
        calm.note(calm=True, guessed=True)
    calm.note(calm=False, guessed=False)
    assert not calm
    calm.note(calm=True, guessed=False)
    assert calm, "right guesses have made it trust again"


@pytest.mark.parametrize("guessed", [False, True])
def test_a_first_step_that_is_expected_to_be_calm_is_guessed(guessed: bool) -> None:
    calm = Calm(expected=True)
    assert calm
    calm.note(calm=False, guessed=guessed)
    assert not calm, "it was not, so the next one is not guessed"
    calm.note(calm=True, guessed=False)
    assert calm


# --- through the engine -----------------------------------------------------------------------------------------------


def make(dtype: torch.dtype = torch.float32, depth: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)]).to(dtype)


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("state_dtype", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("accumulation", [1, 2])
@pytest.mark.usefixtures("single_torch_thread")
def test_guesses_right_and_wrong_change_no_bit(
    dtype: torch.dtype, state_dtype: str, accumulation: int, tmp_path: Path
) -> None:
    kind = AdamW(lr=1e-2), state_dtype, accumulation
    truth = guesses(make(dtype), *kind, arrives=False, **everything_on_device())
    ours = guesses(make(dtype), *kind, arrives=False, **tight(make(dtype), tmp_path))
    compare_guesses(ours, truth)
    assert truth.early == (0, 0) and min(ours.early) > 0 or not computes_on_cpu()
    assert not list(tmp_path.iterdir())


def test_updates_are_begun_during_backward(tmp_path: Path) -> None:
    """When the first layer's gradient is computed, the last layer has been updated."""
    model = make()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        seen = []
        store = engine._manager.tiers.store
        assert store is not None

        def pass_by(*_: object) -> None:
            store.drain()
            engine._manager.advance_updates(engine._step.guess)

        model[1].register_full_backward_hook(pass_by)
        model[0].weight.register_hook(lambda gradient: seen.append(engine.stats().update_chunks))
        for number in range(3):
            train(engine, number)
            before = engine.stats().early_units
            engine.step()
        assert engine.stats().early_units > before
        assert seen[-1] - seen[-2] >= 1


def test_a_learning_rate_that_changes_before_the_step_counts(tmp_path: Path) -> None:
    results = []
    for where in (everything_on_device(), tight(make(), tmp_path)):
        with Engine(make(), AdamW(lr=1e-2), **where) as engine:
            assert engine.optimizer is not None
            for number in range(4):
                train(engine, number)
                engine.optimizer.param_groups[0]["lr"] = 1e-2 / (number + 1)
                engine.step()
            results.append(everything(engine))
            taken, dropped = early(engine)
    assert_same_tensors(*results)
    assert dropped > 0 and taken <= 5, "only the first step had the learning rate that was guessed"


@pytest.mark.parametrize("between", ["states", "zero", "backward", "load", "gather", "evaluate", "nan", "close"])
def test_what_comes_between_backward_and_step(between: str, tmp_path: Path) -> None:
    results = []
    for where in (everything_on_device(), tight(make(), tmp_path)):
        model = make()
        with Engine(model, AdamW(lr=1e-2), **where) as engine:
            train(engine, 0)
            engine.step()
            saved = {name: value.clone() for name, value in engine.state_dict().items()}
            train(engine, 1)
            if between == "states":
                results.append(everything(engine))
            elif between == "zero":
                engine.zero_grad()
                train(engine, 2)
            elif between == "backward":
                train(engine, 2)
            elif between == "load":
                engine.load_state_dict({name: value + 1 for name, value in saved.items()})
            elif between == "gather":
                with engine.gather(model[2].weight, modify=True), torch.no_grad():
                    model[2].weight.mul_(2)
            elif between == "evaluate":
                with torch.no_grad():
                    results.append({"loss": loss_of(engine, 3)})
            elif between == "nan":
                engine.zero_grad()
                infinite = model[0].weight.register_hook(lambda gradient: gradient * torch.inf)
                train(engine, 2)
                infinite.remove()
                with pytest.raises(NonFiniteError):
                    engine.step()
                train(engine, 1)
            if between != "close":
                engine.step()
                train(engine, 4)
                engine.step()
                results.append(everything(engine))
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_tensors(*({key: value for r in half for key, value in r.items()} for half in halves(results)))
    assert not list(tmp_path.iterdir())


def halves(results: list[dict[str, torch.Tensor]]) -> tuple[list[Any], list[Any]]:
    middle = len(results) // 2
    return results[:middle], results[middle:]


@pytest.mark.parametrize("target", [FaultTarget.READS, FaultTarget.WRITES])
def test_any_single_transfer_of_the_backward_may_fail(target: FaultTarget, tmp_path: Path) -> None:
    """Fail the n-th: the step makes what is missing, bit for bit the same."""

    dropped = 0
    with one_torch_thread():
        truth = fail_in_backward(make(), target, None, arrives=False, **everything_on_device())
        for nth in range(1, 9):
            ours = fail_in_backward(make(), target, nth, arrives=False, **tight(make(), tmp_path))
            assert_same_tensors(ours.tensors, truth.tensors)
            assert target is FaultTarget.READS or not ours.again
            dropped += ours.dropped
    assert dropped, "an early update was among what failed"


@pytest.mark.usefixtures("single_torch_thread")
def test_interrupt_in_an_update_during_backward(tmp_path: Path) -> None:
    """It comes through when the update is done."""
    truth = interrupt_an_update(make(), interrupts=False, **everything_on_device())
    assert_same_tensors(interrupt_an_update(make(), interrupts=True, **tight(make(), tmp_path)), truth)


@given(
    clips=st.lists(st.booleans(), min_size=1, max_size=8),
    depth=st.integers(1, 6),
    units=st.integers(3, 5),
    nvme=st.sampled_from(["256MiB", "17MiB"]),
)
def test_any_sequence_of_steps_gives_the_same(
    clips: list[bool], depth: int, units: int, nvme: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("swap", numbered=True)

    def run(**where: Any) -> dict[str, torch.Tensor]:
        with Engine(make(depth=depth), AdamW(lr=1e-2), max_grad_norm=50.0, **where) as engine:
            for number, clip in enumerate(clips):
                train(engine, number, 1000.0 if clip else 1.0)
                engine.step()
                engine._manager.check()
            return everything(engine)

    with one_torch_thread():
        where = tight(make(depth=depth), path, units=units)
        where["max_memory"]["nvme"] = nvme
        assert_same_tensors(run(**where), run(**everything_on_device()))


def test_what_somebody_uses_at_the_step_is_left_to_the_forward() -> None:
    """It has to be updated where it is."""
    with watching(more=1) as bench:
        for index in (2, 1, 0):
            bench.add(index)
        bench.make_all()
        lease = bench.manager.acquire(2)
        assert bench.early.reconcile(bench.recipe)[0] == {0, 1}
        lease.close()
        bench.manager.check()
