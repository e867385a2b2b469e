"""States that are read while backward computes, where steps clip: what is read when, and that it changes no bit."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fakes import FakeStore, FakeTicket, make_manager, make_plan_with, make_unit, peek, poke
from harness import (
    WIDTH,
    apart,
    assert_same_tensors,
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
from offload.errors import NonFiniteError, StateError
from offload.memory.budget import Tier
from offload.planning.asked import Homes
from offload.planning.roles import Role
from offload.shards.manager import Manager
from offload.shards.read_ahead import Record
from offload.shards.stream import ALL_STATES, Chunk
from swap import SwapDeadlineError, SwapError
from swap.io.faults import Fault, FaultTarget

CHUNK = 4096
UNITS = 4
SLOTS = 6
ROLES = frozenset({Role.PARAM}) | ALL_STATES
H, N = Tier.HOST, Tier.NVME
STEPS = ("step", "step", "skip", "states", "zero", "gather", "evaluate", "load", "checkpoint", "sleep", "drain")

# --- one record -------------------------------------------------------------------------------------------------------


class Ends:
    """A ticket whose wait raises, and that is over then or not."""

    def __init__(self, error: Exception, *, over: bool) -> None:
        self.error = error
        self.over = over

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None) -> None:
        raise self.error


def test_memory_to_which_a_drive_that_hangs_may_still_write_is_not_let_go() -> None:
    Record(0, 0, Ends(SwapError("torn"), over=True)).settle(1.0)
    with pytest.raises(TimeoutError, match="late"):
        Record(0, 0, Ends(TimeoutError("late"), over=False)).settle(1.0)


# --- the order of events ----------------------------------------------------------------------------------------------


def no_guess() -> None:
    """Say that the step is likely to clip."""


class Bench:
    """A manager with all content in place and all parameters on the device, in a run whose steps clip."""

    def __init__(self, manager: Manager, store: FakeStore) -> None:
        self.manager = manager
        self.store = store

    def forward(self) -> None:
        """Use all units, in order."""
        for unit in self.manager.units:
            self.manager.acquire(unit.index).close()
            self.manager.advance_updates(no_guess)

    def backward(self, *units: int) -> None:
        """Let gradients arrive, the last unit's first."""
        for index in units or range(UNITS - 1, -1, -1):
            self.manager.add_gradient(index, 0, torch.ones(2 * CHUNK, dtype=torch.bfloat16), final=True)
            self.manager.advance_updates(no_guess)

    def step(self, *left_out: int) -> None:
        """Take a step that counts up the first byte of each role of each chunk."""
        manager = self.manager
        manager.finish_step()
        manager.restart_schedule()
        manager.backward.reconcile(self)  # type: ignore[arg-type]
        units = [unit for unit in manager.units if unit.index not in left_out]
        manager.forward.begin(units, self.visit, manager.ahead)
        manager.forward.read_ahead()

    def finish(self) -> None:
        """Let the last step be home."""
        self.manager.forward.finish()
        self.manager.check()

    def ranges(self, unit: Any) -> object:
        raise AssertionError("nothing was guessed")

    def visit(self, chunk: Chunk) -> None:
        self.store.events.append(("visit", (chunk.unit.index, chunk.number)))
        for role in ROLES & chunk.addresses.keys():
            poke(chunk.addresses[role], bytes([peek(chunk.addresses[role], 1)[0] + 1]))

    def happened(self, what: str) -> list[Any]:
        """Return the states' records to which it has happened since the last time."""
        return [key[::2] for kind, key in self.store.events if kind == what and key[1] == "master"]

    def first_bytes(self) -> dict[Any, int]:
        return {key: data[0] for key, data in self.store.objects.items() if key[1] in ("param", "master")}

    def arrive(self) -> None:
        """Let everything that is in flight be over."""
        for ticket in list(self.store.flying):
            with contextlib.suppress(SwapError):
                ticket.wait()


@contextlib.contextmanager
def clipping(*, slots: int = SLOTS, gradients: Tier = H) -> Iterator[Bench]:
    """Two steps were taken and one forward was made."""
    units = [make_unit(index, [2 * CHUNK]) for index in range(UNITS)]
    store = FakeStore()
    working = UNITS * units[0].param_bytes
    plan = make_plan_with(
        units, [Homes(N, gradients, N)] * UNITS, chunk_numel=CHUNK, working_bytes=working, staging_slots=slots
    )
    manager = make_manager(plan, store)
    bench = Bench(manager, store)
    try:
        manager.stream(units, lambda chunk: None, reads=frozenset(), writes=ROLES)
        for _ in range(2):
            bench.forward()
            bench.backward()
            bench.step()
        bench.forward()
        bench.arrive()
        manager.advance_updates(no_guess)
        store.events.clear()
        yield bench
    finally:
        bench.arrive()
        manager.close()


def records(*units: int) -> list[tuple[int, int]]:
    return [(index, number) for index in units for number in range(2)]


def test_records_come_in_the_order_of_the_forward_spread_over_backward() -> None:
    with clipping(slots=8) as bench:
        seen = []
        for index in (3, 2, 1, 0):
            bench.backward(index)
            seen.append(len(bench.happened("get")))
        assert bench.happened("get") == records(0, 1, 2, 3)
        assert seen == [6, 8, 8, 8], "four at the beginning, and a quarter more for each unit"
        assert not bench.happened("visit")


def test_the_step_reads_nothing_again() -> None:
    with clipping() as bench:
        before, counters = bench.first_bytes(), bench.manager.tiers.counters
        counters.update_chunks_ahead = 0
        bench.backward()
        ahead = bench.happened("get")
        bench.step()
        bench.forward()
        bench.finish()
        assert ahead == records(0, 1, 2) and bench.happened("get") == records(0, 1, 2, 3)
        assert counters.update_chunks_ahead == len(ahead)
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


def test_what_a_step_leaves_out_is_dropped() -> None:
    with clipping() as bench:
        before = bench.first_bytes()
        bench.backward()
        bench.step(0, 2)
        bench.finish()
        assert bench.first_bytes() == {key: value + (key[0] in (1, 3)) for key, value in before.items()}


def test_a_unit_that_was_not_expected_first_finds_a_slot() -> None:
    """All slots have what others need; the last one is given up."""
    with clipping(slots=4) as bench:
        before = bench.first_bytes()
        bench.backward()
        assert bench.happened("get") == records(0, 1)
        order, bench.manager.units = bench.manager.units, tuple(reversed(bench.manager.units))
        bench.step()
        bench.manager.units = order
        bench.finish()
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


@pytest.mark.parametrize("who", ["stream", "keep early", "drop", "reset", "finish_updates", "rest"])
def test_whoever_needs_the_slots_has_them_and_they_are_filled_again(who: str) -> None:
    with clipping() as bench:
        manager, before = bench.manager, bench.first_bytes()
        bench.backward(3, 2)
        assert bench.happened("get") and bench.store.flying
        if who == "stream":
            manager.stream(manager.units, bench.visit, reads=ROLES, writes=ROLES)
            before = {key: value + 1 for key, value in before.items()}
        elif who == "keep early":
            manager.stream(manager.units, lambda chunk: None, reads=ROLES | {Role.GRAD}, keep_early=True)
        elif who == "drop":
            manager.drop_gradients()
        elif who == "reset":
            manager.reset()
        elif who == "rest":
            manager.rest([Tier.HOST])
            manager.go_on()
        else:
            manager.finish_updates()
        assert not bench.store.flying
        bench.store.events.clear()
        bench.backward(*((3, 2, 1, 0) if who in ("drop", "reset") else (1, 0)))
        assert bench.happened("get") == records(0, 1, 2)
        bench.step()
        bench.finish()
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


def test_closing_waits_for_what_is_on_its_way() -> None:
    with clipping() as bench:
        bench.backward(3, 2)
        assert bench.store.flying
        bench.manager.close()
        assert not bench.store.flying


def test_a_read_that_fails_is_repeated_by_the_update_that_needs_it() -> None:
    with clipping() as bench:
        before = bench.first_bytes()
        bench.store.fail = lambda kind, key, count: SwapError("no") if key == (0, "master", 1) else None
        bench.backward()
        bench.arrive()
        bench.store.fail = lambda kind, key, count: None
        bench.step()
        with pytest.raises(SwapError):
            bench.manager.forward.require(0)
        bench.finish()
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


def test_writes_from_staging_go_on_in_backward_and_those_from_gradients_do_not() -> None:
    """The gradients that come next are written where the latter leave."""
    with clipping(slots=4) as bench:
        bench.backward()
        bench.step()
        bench.forward()
        staging = {buffer.address for buffer in bench.manager.tiers.staging}

        def leaving() -> list[bool]:
            puts = [ticket for ticket in bench.store.flying if ticket.kind == "put" and ticket.key[1] == "master"]
            return [ticket.address in staging for ticket in puts]

        assert leaving() and bench.manager.forward.active
        in_staging = leaving().count(True)
        bench.backward(3)
        assert leaving() == [True] * in_staging and in_staging > 0
        assert not bench.happened("get over")[8:], "nobody waits for a slot"
        bench.arrive()
        bench.backward(2, 1, 0)
        assert not bench.manager.forward.active, "whoever passes by sees that they are home"


def test_nothing_is_read_where_gradients_pass_through_the_slots_or_updates_are_made_early() -> None:
    with clipping(gradients=N) as bench:
        bench.backward()
        assert not bench.happened("get")


def test_an_error_of_a_write_that_lags_is_an_error_of_the_step() -> None:
    with clipping(slots=4) as bench:
        bench.backward()
        bench.step()
        bench.store.fail = lambda kind, key, count: SwapError("no") if kind == "put" and key[0] == 3 else None
        bench.forward()
        bench.store.fail = lambda kind, key, count: None
        with pytest.raises(SwapError):
            bench.backward()
            bench.step()
        bench.manager.forward.abandon()


# --- a drive that hangs -----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def hanging(store: FakeStore, hangs: Callable[[FakeTicket], bool]) -> Iterator[list[FakeTicket]]:
    """Let tickets be late whenever they are waited for; yields those, each as often as somebody has waited."""
    waited: list[FakeTicket] = []

    def hang(ticket: FakeTicket) -> None:
        if hangs(ticket):
            waited.append(ticket)
            raise SwapDeadlineError("late")

    store.before_wait = hang
    try:
        yield waited
    finally:
        store.before_wait = lambda ticket: None


@pytest.mark.parametrize("who", ["drop", "reset"])
def test_gradients_are_dropped_though_what_was_read_ahead_is_late(who: str) -> None:
    with clipping() as bench:
        manager, before = bench.manager, bench.first_bytes()
        bench.backward(3, 2)
        with hanging(bench.store, lambda ticket: True):
            (manager.drop_gradients if who == "drop" else manager.reset)()
            assert not manager.gradients.any_arrived
            with pytest.raises(TimeoutError):
                manager.stream(manager.units, bench.visit, reads=ROLES)
            with pytest.raises(TimeoutError):
                manager.rest([Tier.HOST])
        bench.arrive()
        bench.store.events.clear()
        bench.backward()
        assert bench.happened("get") == records(0, 1, 2)
        bench.step()
        bench.finish()
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


def test_a_step_is_taken_though_a_read_that_it_does_not_use_is_late() -> None:
    """Its updates wait for the slot, but nobody who only passes by does."""
    with clipping() as bench:
        before, forward = bench.first_bytes(), bench.manager.forward
        bench.backward()
        with hanging(bench.store, lambda ticket: ticket.key == (0, "master", 1)) as waited:
            bench.step(0)
            waited.clear()
            for _ in range(UNITS):
                bench.manager.advance_updates(no_guess)
            assert not waited
            with pytest.raises(TimeoutError):
                forward.require(1)
        assert forward.failure is None
        bench.finish()
        assert bench.first_bytes() == {key: value + (key[0] != 0) for key, value in before.items()}


def test_a_step_that_is_lost_tells_its_own_error_though_what_was_read_ahead_is_late() -> None:
    with clipping() as bench:
        bench.backward()
        bench.step()
        with hanging(bench.store, lambda ticket: True):
            bench.manager.forward.lose(SwapError("torn"))
        with pytest.raises(StateError, match="torn"):
            bench.forward()


def test_slots_that_were_kept_are_not_read_to_while_a_late_read_may_still_come_there() -> None:
    with clipping() as bench:
        manager, before = bench.manager, bench.first_bytes()
        bench.backward(3, 2)
        ahead = list(bench.store.flying)
        with hanging(bench.store, lambda ticket: ticket not in ahead and ticket.kind == "get"):
            with pytest.raises(TimeoutError):
                manager.stream(manager.units, lambda chunk: None, reads=ROLES, keep_early=True)
            bench.store.events.clear()
            manager.advance_updates(no_guess)  # the store refuses memory that is in flight
            assert not bench.happened("get")
        bench.arrive()
        bench.backward(1, 0)
        assert bench.happened("get") == records(0, 1, 2)
        bench.step()
        bench.finish()
        assert bench.first_bytes() == {key: value + 1 for key, value in before.items()}


# --- no result depends on it ------------------------------------------------------------------------------------------


def make(depth: int = 5) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(depth)])


def options(path: Path, depth: int = 5, **more: Any) -> dict[str, Any]:
    return {**tight(make(depth), path, **more)}


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def train(engine: Engine, number: int) -> None:
    engine.backward(loss_of(engine, number))


def between(engine: Engine, what: str, number: int, place: Path, seen: list[dict[str, torch.Tensor]]) -> None:
    """Do something between backward and step, while states are ahead."""
    first = next(iter(engine.module.parameters()))
    if what == "states":
        seen.append(everything(engine))
    elif what == "zero":
        engine.zero_grad()
        train(engine, number + 100)
    elif what == "gather":
        with engine.gather(first, modify=True), torch.no_grad():
            first.mul_(1.5)
    elif what == "evaluate":
        with torch.no_grad():
            seen.append({"loss": loss_of(engine, number)})
    elif what == "load":
        engine.load_state_dict({name: value + 0.01 for name, value in engine.state_dict().items()})
    elif what == "checkpoint":
        engine.save_checkpoint(place / "checkpoint")
    elif what == "sleep":
        engine.zero_grad()
        engine.sleep()
        engine.wake()
        train(engine, number)
    elif what == "drain":
        engine.drain()
    elif what == "skip":
        engine.zero_grad()
        infinite = first.register_hook(lambda gradient: gradient * torch.inf)
        train(engine, number + 100)
        infinite.remove()
        with pytest.raises(NonFiniteError):
            engine.step()
        train(engine, number)


def run(events: list[str], place: Path, *, depth: int = 5, **where: Any) -> tuple[list[dict[str, torch.Tensor]], int]:
    """Train with steps that all clip, and something between each backward and its step."""
    seen: list[dict[str, torch.Tensor]] = []
    with Engine(make(depth), AdamW(lr=1e-2), max_grad_norm=1e-3, **where) as engine:
        for number, what in enumerate(events):
            train(engine, number)
            between(engine, what, number, place, seen)
            engine.step()
            engine._manager.check()
        seen.append(everything(engine))
        return seen, engine.stats().update_chunks_ahead


@pytest.mark.few
@pytest.mark.parametrize("place", [contextlib.nullcontext, apart], ids=["cpu", "apart"])
@pytest.mark.parametrize("what", STEPS[1:])
@pytest.mark.usefixtures("single_torch_thread")
def test_what_comes_between_changes_no_bit(
    what: str, place: Callable[[], contextlib.AbstractContextManager[None]], tmp_path: Path
) -> None:
    events = ["step", "step", what, "step", what, "step"]
    truth, none = run(events, tmp_path / "a", **everything_on_device())
    with place():
        ours, ahead = run(events, tmp_path / "b", **options(folder(tmp_path / "swap")))
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same_tensors(mine, theirs)
    assert ahead > 0 and none == 0


@given(
    events=st.lists(st.sampled_from(STEPS), min_size=1, max_size=6),
    depth=st.integers(1, 6),
    units=st.integers(3, 5),
    nvme=st.sampled_from(["256MiB", "17MiB"]),
)
def test_any_sequence_of_events_gives_the_same(
    events: list[str], depth: int, units: int, nvme: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    path = tmp_path_factory.mktemp("swap", numbered=True)
    with one_torch_thread():
        where = options(folder(path / "swap"), depth, units=units)
        where["max_memory"]["nvme"] = nvme
        ours, _ = run(events, path / "b", depth=depth, **where)
        truth, _ = run(events, path / "a", depth=depth, **everything_on_device())
    for mine, theirs in zip(ours, truth, strict=True):
        assert_same_tensors(mine, theirs)


def test_closing_while_states_are_ahead_loses_nothing(tmp_path: Path) -> None:
    results = []
    for where in (everything_on_device(), options(tmp_path)):
        model = make()
        with Engine(model, AdamW(lr=1e-2), max_grad_norm=1e-3, **where) as engine:
            for number in range(3):
                train(engine, number)
                engine.step()
            train(engine, 3)
        results.append({name: value.clone() for name, value in model.state_dict().items()})
    assert_same_tensors(*results)
    assert not list(tmp_path.iterdir())


def is_lost(engine: Engine) -> bool:
    """Tell whether a part of a step is; then end the engine without what is left."""
    lost = engine._manager.forward.failure is not None
    if lost:
        engine.close(restore=False)
    return lost


@pytest.mark.parametrize("target", [FaultTarget.READS, FaultTarget.WRITES])
def test_any_single_transfer_from_backward_on_may_fail(target: FaultTarget, tmp_path: Path) -> None:
    """Fail the n-th: a read is repeated by who needs it; a lost write is told, and nothing goes on silently."""

    def run_one(fail: int | None, **where: Any) -> dict[str, torch.Tensor] | None:
        with Engine(make(), AdamW(lr=1e-2), max_grad_norm=1e-3, **where) as engine:
            for number in range(2):
                train(engine, number)
                engine.step()
            loss = loss_of(engine, 2)
            store = engine._manager.tiers.store
            if store is not None and fail is not None:
                store.inject(Fault(nth=fail, target=target))
            try:
                engine.backward(loss)
            except SwapError:  # of a parameter that backward needs, or of what a step has left to write
                if is_lost(engine):
                    return None
                train(engine, 2)
            for _ in range(10):
                try:
                    if engine.stats().step == 2:
                        engine.step()
                    return everything(engine)
                except (SwapError, StateError):
                    if is_lost(engine):
                        return None
            raise AssertionError("an error that is never over")

    lost = 0
    with one_torch_thread():
        truth = run_one(None, **everything_on_device())
        assert truth is not None
        for fail in range(1, 12):
            ours = run_one(fail, **options(tmp_path))
            lost += ours is None
            if ours is not None:
                assert_same_tensors(ours, truth)
    assert lost == 0 or target is FaultTarget.WRITES


def test_what_is_read_ahead_ends_before_a_unit_whose_gradient_passes_through_the_slots(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its update comes before those behind it, and needs the slots."""
    made = make_plan_with

    def mixed(units: list[Any], homes: list[Homes], **more: Any) -> Any:
        return made(units, [homes[0], Homes(N, N, N), *homes[2:]], **more)

    monkeypatch.setitem(globals(), "make_plan_with", mixed)
    with clipping() as bench:
        bench.backward()
        assert bench.happened("get") == records(0)
