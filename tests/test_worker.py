"""Updates beside an accelerator: a worker does the arithmetic, and nobody waits for it who need not."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Collection, Iterator
from concurrent.futures import CancelledError

import pytest
import torch
from fakes import ApartDevice, FakeStore, LateWorker, late_worker, make_manager, make_plan_with, make_unit, peek, poke

from offload.errors import StateError
from offload.memory.budget import Tier
from offload.planning.asked import Homes
from offload.planning.roles import Role
from offload.shards.copies import WriteLease
from offload.shards.forward_updates import ForwardUpdates
from offload.shards.manager import Manager
from offload.shards.shard import Event, Shard, State
from offload.shards.stream import ALL_STATES, Chunk
from offload.shards.worker import WorkerThread, failed, settle
from swap import SwapError

CHUNK = 4096
UNITS = 4
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
ROLES = frozenset({Role.PARAM}) | ALL_STATES
IN_MEMORY, ON_NVME = Homes(H, H, H), Homes(N, H, N)


class Step:
    """A step over units with all content in place; a visit raises the first byte of each role."""

    def __init__(self, manager: Manager, store: FakeStore, worker: LateWorker) -> None:
        self.manager = manager
        self.store = store
        self.worker = worker
        self.updates: ForwardUpdates = manager.forward
        self.visited: list[tuple[int, int]] = []
        self.error: Exception | None = None

    def visit(self, chunk: Chunk) -> None:
        if self.error is not None:
            raise self.error
        self.visited.append((chunk.unit.index, chunk.number))
        for role in ROLES & chunk.addresses.keys():
            poke(chunk.addresses[role], bytes([peek(chunk.addresses[role], 1)[0] + 1]))

    def begin(self, under_way: Collection[int]) -> None:
        for unit in self.manager.units:
            self.manager.add_gradient(unit.index, 0, torch.ones(unit.numel, dtype=torch.bfloat16), final=True)
        self.store.events.clear()
        self.updates.begin(self.manager.units, self.visit, under_way=under_way)

    def first_bytes(self) -> list[set[int]]:
        """Return the first byte of each role, per chunk of all units."""
        found: list[set[int]] = []

        def look(chunk: Chunk) -> None:
            found.append({peek(chunk.addresses[role], 1)[0] for role in ROLES & chunk.addresses.keys()})

        self.manager.stream(self.manager.units, look, reads=ROLES)
        return found


@contextlib.contextmanager
def stepping(*homes: Homes, chunks: int = 2, working: int = UNITS, under_way: Collection[int] = ()) -> Iterator[Step]:
    """The device has room for `working` units; backward has updates of `under_way`."""
    units = [make_unit(index, [chunks * CHUNK]) for index in range(UNITS)]
    given = (homes * UNITS)[:UNITS]
    room = working * units[0].param_bytes
    plan = make_plan_with(units, given, chunk_numel=CHUNK, working_bytes=room, device_is_host=False)
    store = FakeStore()
    with late_worker() as worker:
        manager = make_manager(plan, store, device=ApartDevice())
        step = Step(manager, store, worker)
        try:
            manager.stream(units, _zero, reads=frozenset(), writes=ROLES)
            step.begin(under_way)
            yield step
        finally:
            for ticket in list(store.flying):
                with contextlib.suppress(SwapError):
                    ticket.wait()
            manager.close()


def _zero(chunk: Chunk) -> None:
    for address in chunk.addresses.values():
        poke(address, b"\0")


def test_all_that_is_in_memory_is_given_to_the_worker_at_once_and_nobody_waits() -> None:
    with stepping(IN_MEMORY) as step:
        step.updates.read_ahead()
        assert len(step.worker.queue) == UNITS, "it goes on though nobody passes by"
        step.updates.advance()
        assert not step.visited and all(index in step.updates for index in range(UNITS))
        step.worker.do(2)
        step.updates.advance()
        assert [index in step.updates for index in range(UNITS)] == [False, False, True, True]
        assert step.manager.tiers.counters.update_stalls == 0
        step.manager.check()


def test_whoever_needs_a_unit_waits_for_it_and_for_none_behind_it() -> None:
    with stepping(IN_MEMORY) as step:
        step.updates.read_ahead()
        lease = step.manager.acquire(1)
        assert step.visited == [(0, 0), (1, 0)] and len(step.worker.queue) == 2
        buffer = step.manager.tiers.param(1).work_buffer
        assert buffer is not None and peek(buffer.address, 1) == b"\1", "the device has the updated parameters"
        lease.close()
        assert step.manager.tiers.counters.update_stalls == 2


@pytest.mark.parametrize("homes", [(IN_MEMORY,), (ON_NVME,), (Homes(D, H, H),), (ON_NVME, IN_MEMORY)], ids=str)
def test_whoever_looks_waits_for_all(homes: tuple[Homes, ...]) -> None:
    with stepping(*homes) as step:
        step.updates.read_ahead()
        found = step.first_bytes()
        assert not step.worker.queue and len(step.visited) >= UNITS
        assert {1} in found and {0} not in found
        step.manager.check()


def test_a_gradient_of_the_next_step_waits_for_the_worker() -> None:
    with stepping(IN_MEMORY) as step:
        step.updates.read_ahead()
        gradient = torch.ones(2 * CHUNK, dtype=torch.bfloat16)
        step.manager.add_gradient(UNITS - 1, 0, gradient, final=True)
        assert len(step.visited) == UNITS, "the worker reads what is about to be overwritten"


def test_a_slot_is_used_again_when_its_chunk_was_worked_on_and_written() -> None:
    """Eight chunks for each of four slots; the store checks ranges in flight, the bytes show the worker's."""
    with stepping(ON_NVME, chunks=8) as step:
        for index in range(UNITS):
            step.updates.read_ahead()
            step.updates.require(index)
        assert step.first_bytes() == [{1}] * (8 * UNITS)
        assert step.visited == [(index, number) for index in range(UNITS) for number in range(8)]


def test_what_is_in_memory_does_not_wait_for_the_drive() -> None:
    with stepping(ON_NVME, IN_MEMORY) as step:
        step.updates.read_ahead()
        assert step.store.flying and len(step.worker.queue) == 2
        step.worker.do(2)
        assert step.visited == [(1, 0), (3, 0)]
        step.updates.advance()
        assert [index in step.updates for index in range(UNITS)] == [True, False] * 2
        step.updates.finish()
        assert not step.updates.active
        step.manager.check()


LATE = (IN_MEMORY, IN_MEMORY, ON_NVME, IN_MEMORY)  # what needs the drive is not needed soon


def let_fly(store: FakeStore) -> None:
    """Let all that is on its way come to its end, whatever it is."""
    for ticket in list(store.flying):
        with contextlib.suppress(SwapError):
            ticket.wait()


def test_the_drive_goes_on_while_others_are_updated() -> None:
    with stepping(*LATE, chunks=8) as step:
        step.updates.read_ahead()
        assert step.store.flying and len(step.worker.queue) == 3
        let_fly(step.store)
        step.updates.advance()
        step.worker.do(1)
        assert step.visited == [(2, 0)], "before what was given earlier"
        let_fly(step.store)
        step.manager.acquire(0).close()
        assert any(kind == "put" and key[0] == 2 for kind, key in step.store.events), "it leaves meanwhile"
        assert {unit for unit, _ in step.visited} == {0, 2}
        step.updates.finish()
        assert step.first_bytes() == [{1}, {1}, *[{1}] * 8, {1}]


def test_a_read_that_fails_is_repeated_by_who_needs_it() -> None:
    with stepping(*LATE) as step:
        step.store.fail = lambda kind, key, count: SwapError("worn out") if (kind, count) == ("get", 0) else None
        step.updates.read_ahead()
        let_fly(step.store)
        for index in (0, 1, 3):
            step.manager.acquire(index).close()
            assert 2 in step.updates, "nobody else is told"
        step.manager.acquire(2).close()
        step.updates.finish()
        assert step.first_bytes() == [{1}, {1}, {1}, {1}, {1}]


def test_a_write_that_fails_is_told_to_who_waits_for_another() -> None:
    with stepping(*LATE, chunks=8) as step:
        step.store.fail = lambda kind, key, count: SwapError("no space") if kind == "put" else None
        step.updates.read_ahead()
        while step.updates.failure is None:
            let_fly(step.store)
            step.updates.advance()
            step.worker.do(min(len(step.worker.queue), 1))
        with pytest.raises(SwapError, match="no space"):
            step.manager.acquire(1)
        with pytest.raises(StateError, match="failed half way.*no space"):
            step.manager.acquire(0)
        assert not step.worker.queue
        step.manager.check()


@pytest.mark.parametrize("updated", [True, False])
def test_what_needs_the_drive_waits_for_what_backward_has_under_way(updated: bool) -> None:
    with stepping(IN_MEMORY, ON_NVME, ON_NVME, IN_MEMORY, under_way={1}) as step:
        step.updates.advance()
        assert len(step.worker.queue) == 2 and not step.store.flying
        assert all(index in step.updates for index in range(UNITS))
        step.updates.join(step.manager.ahead, {1} if updated else set())
        assert (1 in step.updates) is not updated
        step.updates.finish()
        assert step.first_bytes() == [{1}, *[{0 if updated else 1}] * 2, {1}, {1}, {1}]
        step.begin(())
        step.updates.finish()
        step.manager.check()


ON_DEVICE = Homes(D, H, H)


@pytest.mark.parametrize("slots", [0, 1, 2])
def test_what_passes_through_staging_meanwhile_has_the_slots_that_backward_leaves(slots: int) -> None:
    with stepping(ON_DEVICE, ON_NVME, ON_DEVICE, ON_NVME, chunks=4, under_way={1}) as step:
        left = [buffer.address for buffer in step.manager.tiers.staging[:slots]]
        for _ in range(6):
            step.updates.advance_beside(lambda: left.pop() if left else None)
        step.updates.join(step.manager.ahead, ())
        for index in (2, 0, 3, 1):
            step.manager.acquire(index).close()
        assert step.first_bytes() == [{1}] * 16
        step.manager.check()


def test_a_step_that_is_lost_half_way_leaves_nothing_with_the_worker() -> None:
    with stepping(IN_MEMORY, ON_NVME, under_way={1}) as step:
        step.updates.advance()
        step.updates.lose(RuntimeError("not now"))
        assert not step.worker.queue
        with pytest.raises(StateError, match="failed half way.*not now"):
            step.manager.acquire(0)
        step.manager.check()


def test_room_on_the_device_waits_for_no_update() -> None:
    """Where they occupy nothing of the working region, there is nothing to reclaim."""
    with stepping(IN_MEMORY) as step:
        step.updates.require(0)
        step.updates.read_ahead()
        step.manager._finish_open_updates()
        assert step.visited == [(0, 0)]


def reads_of_parameters(store: FakeStore) -> list[int]:
    """Return the units of which parameters were read, once for each chunk."""
    return [key[0] for kind, key in store.events if kind == "get" and key[1].startswith("param")]


def test_new_parameters_come_to_the_device_from_where_they_were_updated() -> None:
    """Their home is on the drive: they are read once, for the update, and used while they are written."""
    with stepping(ON_NVME, working=2 * UNITS) as step:
        for index in range(UNITS):
            lease = step.manager.acquire(index)
            param = step.manager.tiers.param(index)
            assert param.work_buffer is not None and peek(param.work_buffer.address, 1) == b"\1"
            assert peek(param.work_buffer.address + 2 * CHUNK, 1) == b"\1", "the second chunk"
            assert param.state is State.FLUSHING or index, "nobody waits for what goes home"
            step.manager.check()
            lease.close()
        assert reads_of_parameters(step.store) == [index for index in range(UNITS) for _ in range(2)]
        step.updates.finish()
        assert {step.manager.tiers.param(index).state for index in range(UNITS)} == {State.RESIDENT}
        assert step.first_bytes() == [{1}] * (2 * UNITS), "at home as well"


def test_what_is_filled_leaves_room_for_what_is_used() -> None:
    """Half of the region; a unit that is needed has it, once what is filled is home."""
    with stepping(ON_NVME, working=2) as step:
        step.updates.read_ahead()
        assert [step.manager.tiers.param(index).state for index in range(2)] == [State.DIRTY, State.STORED]
        for index in range(UNITS):
            step.manager.acquire(index).close()
            step.manager.check()
        assert len(reads_of_parameters(step.store)) < 2 * 2 * UNITS, "some were filled"
        assert step.first_bytes() == [{1}] * (2 * UNITS)


@pytest.mark.parametrize("homes", [(Homes(H, H, N),), (IN_MEMORY,), (Homes(D, H, N),)], ids=str)
def test_nothing_else_is_filled(homes: tuple[Homes, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """What is at home in host memory is fetched from there, and what is on the device is there."""
    with stepping(*homes) as step:
        monkeypatch.setattr(step.manager.tiers.mover, "fill", None)
        step.manager.acquire(0).close()
        step.updates.finish()


@pytest.mark.parametrize("lost", ["arithmetic", "write"])
def test_an_update_that_fails_leaves_nothing_on_the_device(lost: str) -> None:
    with stepping(ON_NVME) as step:
        if lost == "arithmetic":
            step.error = ValueError("no such kernel")
        else:
            step.store.fail = lambda kind, key, count: SwapError("no space") if kind == "put" else None
        with pytest.raises((ValueError, SwapError)):
            step.manager.acquire(0)
            step.updates.finish()
        assert step.manager.has_lost_content()
        step.manager.check()
        assert 0 not in step.manager.bound or lost == "write"


def test_an_update_that_cannot_begin_leaves_parameters_at_home(monkeypatch: pytest.MonkeyPatch) -> None:
    with stepping(ON_NVME) as step:
        states = step.manager.copies.of(0, Role.MASTER)
        lease = step.manager.copies.lease_to_write

        def fail_once(shard: Shard, event: Event) -> WriteLease:
            if shard is states:
                monkeypatch.undo()
                raise RuntimeError("not now")
            return lease(shard, event)

        monkeypatch.setattr(step.manager.copies, "lease_to_write", fail_once)
        with pytest.raises(RuntimeError, match="not now"):
            step.updates.require(0)
        assert step.manager.tiers.param(0).state is State.STORED
        step.manager.check()
        step.updates.finish()
        assert step.first_bytes() == [{1}] * (2 * UNITS)


def test_an_error_of_the_arithmetic_loses_the_step() -> None:
    with stepping(IN_MEMORY) as step:
        step.error = ValueError("no such kernel")
        step.updates.read_ahead()
        step.updates.advance()
        with pytest.raises(ValueError, match="no such kernel"):
            step.manager.acquire(2)
        with pytest.raises(StateError, match="failed half way.*no such kernel") as again:
            step.manager.finish_updates()
        assert again.value.__cause__ is step.error, "whose traceback leads to who has raised it"
        assert step.manager.has_lost_content() and not step.worker.queue, "nothing of the rest is worked on"


def test_an_error_of_the_arithmetic_is_told_to_who_passes_by() -> None:
    with stepping(IN_MEMORY) as step:
        step.error = ValueError("no such kernel")
        step.updates.read_ahead()
        step.worker.do(1)
        with pytest.raises(ValueError, match="no such kernel"):
            step.updates.advance()
        assert step.manager.has_lost_content()


def test_an_interrupt_while_the_worker_is_waited_for_loses_nothing() -> None:
    with stepping(IN_MEMORY) as step:

        def interrupted() -> None:
            step.worker.before_wait = lambda: None
            raise KeyboardInterrupt

        step.worker.before_wait = interrupted
        with pytest.raises(KeyboardInterrupt):
            step.manager.acquire(1)
        assert step.updates.failure is None
        step.updates.finish()
        assert step.first_bytes() == [{1}] * UNITS
        step.manager.check()


@pytest.mark.parametrize("homes", [IN_MEMORY, ON_NVME, Homes(D, H, H)], ids=str)
def test_a_reset_leaves_nothing_with_the_worker(homes: Homes) -> None:
    with stepping(homes) as step:
        step.updates.read_ahead()
        step.manager.reset()
        assert not step.worker.queue and not step.updates.active
        expected = State.RESIDENT if homes.param is N else State.STORED  # filled from staging
        assert step.manager.tiers.param(0).state is expected
        step.manager.check()


def test_memory_is_given_back_when_the_worker_has_stopped() -> None:
    with stepping(IN_MEMORY) as step:
        step.updates.read_ahead()
        step.updates.abandon()
        mapped, close = [], step.worker.close

        def closed() -> None:
            mapped.append(step.manager.tiers._arenas[H]._memory is not None)
            close()

        step.worker.close = closed  # type: ignore[method-assign]
        step.manager.close()
        assert mapped == [True] and not step.worker.queue


# --- the thread -------------------------------------------------------------------------------------------------------


def test_the_thread_works_in_order_and_tells_what_went_wrong() -> None:
    worker, done = WorkerThread(lambda: None), []

    def fail() -> None:
        raise ValueError("no")

    first, second, third = worker.submit(lambda: done.append(1)), worker.submit(fail), worker.submit(lambda: None)
    third.result()
    assert done == [1] and first.done() and not failed(first) and failed(second) and not failed(third)
    with pytest.raises(ValueError, match="no"):
        second.result()
    settle(second)
    worker.close()


@pytest.mark.parametrize("way", ["settle", "cancel", "close"])
def test_what_has_begun_is_waited_for_and_what_has_not_is_taken_back(way: str) -> None:
    worker, begun, go_on, done = WorkerThread(lambda: None), threading.Event(), threading.Event(), []

    def work() -> None:
        begun.set()
        go_on.wait()
        done.append("first")

    first, second = worker.submit(work), worker.submit(lambda: done.append("second"))
    begun.wait()
    assert not first.cancel() and not first.done()
    if way == "settle":
        settle(second)
    elif way == "cancel":
        assert second.cancel()

    def open_when_it_is() -> None:
        with contextlib.suppress(CancelledError):
            second.result()
        go_on.set()

    opener = threading.Thread(target=open_when_it_is)
    opener.start()
    worker.close() if way == "close" else settle(first)
    assert done == ["first"]
    worker.close()
    worker.close()
    assert done == ["first"]
    opener.join()
