"""The memory manager: a state machine against a model in a dictionary, and single situations.

The state machine runs on a real swap store with injected faults. Content is made of 16-bit words that name unit, role
and version, so that bytes of the wrong unit, of an old version, or of a mixture show wherever they turn up.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import pytest
import torch
from fakes import FakeBinder, FakeStore, FakeTicket, make_manager, make_plan_with, make_unit, peek, poke
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from offload.errors import BudgetError, StateError
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.memory.cpu import CpuDevice, CpuMover
from offload.memory.transfer import MoverNeeds
from offload.planning.asked import Homes
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.bound import MOST_FORMS, Form
from offload.shards.copies import Lease
from offload.shards.manager import Manager
from offload.shards.shard import State
from offload.shards.stream import ALL_STATES, Chunk
from offload.stats import Counters
from swap import Fault, FaultAction, FaultTarget, SwapDeadlineError, SwapError, SwapStore
from swap.store import StoreTicket

D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME
CHUNK = 4096
PARAM = frozenset({Role.PARAM})
ROLE_NUMBER = {Role.PARAM: 1, Role.MASTER: 2, Role.EXP_AVG: 3, Role.EXP_AVG_SQ: 4}
ROLES = frozenset(ROLE_NUMBER)
VERSIONS = 1 << 9


def word(unit: int, role: Role, version: int) -> bytes:
    return (unit << 12 | ROLE_NUMBER[role] << 9 | version % VERSIONS).to_bytes(2, "little")


def words_of(numel: int) -> Form:
    """The form of a tensor over the first `numel` words of a unit."""
    return torch.uint16, 0, torch.Size((numel,)), (1,)


def words(data: bytes) -> set[bytes]:
    """The distinct 16-bit words in `data`."""
    return {
        int(value).to_bytes(2, "little") for value in torch.frombuffer(bytearray(data), dtype=torch.uint16).unique()
    }


class Stop(Exception):
    """Raised in the middle of a stream."""


class FaultyStore(SwapStore):
    """A swap store whose nth read or write from now on fails; counted by call, so that runs can be repeated.

    Attributes:
        planned: how many calls from now on the next failure is, per kind.
    """

    planned: dict[FaultTarget, int]

    def put(self, key: Any, address: int, length: int, *, urgent: bool = False) -> StoreTicket:
        return self._count(FaultTarget.WRITES, lambda: SwapStore.put(self, key, address, length, urgent=urgent))

    def get(self, key: Any, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> StoreTicket:
        return self._count(FaultTarget.READS, lambda: SwapStore.get(self, key, address, length, urgent=urgent))

    def put_many(self, items: Sequence[tuple[Any, int, int]], *, urgent: bool = False) -> list[StoreTicket]:
        return [self.put(*item, urgent=urgent) for item in items]

    def get_many(self, items: Sequence[tuple[Any, int, int]], *, urgent: bool = False) -> list[StoreTicket]:
        return [self.get(*item, urgent=urgent) for item in items]

    def _count(self, kind: FaultTarget, start: Callable[[], StoreTicket]) -> StoreTicket:
        self.planned[kind] = self.planned.get(kind, 0) - 1
        if self.planned[kind] != 0:
            return start()
        with contextlib.suppress(SwapError):  # its waiter will meet it
            self.drain()
        self.clear_faults()
        self.inject(Fault(target=kind))
        ticket = start()
        with contextlib.suppress(SwapError):
            ticket.wait()
        assert ticket._error is not None
        return ticket


LOST = "lost"
FRESH = "fresh"


class ManagerMachine(RuleBasedStateMachine):
    """Random calls; the model knows what every shard must hold."""

    UNITS = [
        make_unit(0, [100, 3000]),
        make_unit(1, [4096]),
        make_unit(2, [3900, 50]),
        make_unit(3, [6000, 2000]),  # two chunks
        make_unit(4, [1000], trainable=False),
        make_unit(5, [4096, 4096]),
        make_unit(6, [7, 9, 11]),
    ]
    HOMES = [
        Homes(D, H, H),
        Homes(H, H, N),
        Homes(N, N, N),
        Homes(N, N, H),
        Homes(N, None, None),
        Homes(H, N, N),
        Homes(N, H, H),
    ]
    WORKING_BYTES = 64 << 10  # units take 8 or 16 KiB
    SMALLEST_BYTES = 40 << 10  # the three largest of those that are not at home on the device

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory()
        plan = make_plan_with(self.UNITS, self.HOMES, working_bytes=self.WORKING_BYTES, chunk_numel=CHUNK)
        self.store = FaultyStore(self.directory.name, plan.arena_bytes[N], deadline_s=30.0)
        self.store.planned = {}
        self.binder = FakeBinder()
        self.manager = make_manager(plan, self.store, binder=self.binder, prefetch=True)
        self.versions = itertools.count(1)
        self.content: dict[tuple[int, Role], int | str] = {}
        self.leases = dict.fromkeys(range(len(self.UNITS)), 0)
        self.held: dict[int, list[Lease]] = {index: [] for index in range(len(self.UNITS))}
        self.borrowed: list[tuple[int, torch.Tensor]] = []
        self.gradients: dict[tuple[int, int], int] = {}  # sum of what has arrived, per slot
        self.faults = 0
        self.errors = 0

    def teardown(self) -> None:
        self.manager.close()
        self.manager.close()
        for budget in self.manager.tiers.budgets.values():
            assert budget.claims() == {}
        assert not self.binder.bound
        for index, tensor in self.borrowed:
            self.check_borrowed(index, tensor)  # the memory outlives the manager
        assert os.listdir(self.directory.name) == []
        self.directory.cleanup()

    # --- helpers ---

    def expected(self, unit: Unit, role: Role) -> bytes:
        version = self.content[unit.index, role]
        assert isinstance(version, int) or version == FRESH
        return word(unit.index, role, version) if isinstance(version, int) else bytes(2)

    def roles(self, unit: Unit) -> list[Role]:
        return [role for role in ROLE_NUMBER if self.manager.copies.get(unit.index, role) is not None]

    def is_lost(self, unit: Unit, roles: Iterable[Role] = ROLE_NUMBER) -> bool:
        return any(self.content.get((unit.index, role)) == LOST for role in roles)

    def expect_error(self, error: SwapError) -> None:
        assert "injected" in str(error) or error.errno is not None
        self.errors += 1
        assert self.errors <= self.faults, error

    def free_units(self) -> list[Unit]:
        return [unit for unit in self.UNITS if not self.leases[unit.index]]

    def check_borrowed(self, index: int, tensor: torch.Tensor) -> None:
        """A tensor of the user shows its own unit's words, whatever has happened to the unit."""
        tag = tensor.to(torch.int32) >> 9 & 0x7F
        assert (tag == (index << 3 | ROLE_NUMBER[Role.PARAM])).all()

    def run_stream(
        self, units: list[Unit], *, reads: frozenset[Role], writes: frozenset[Role], stop: int | None = None
    ) -> bool:
        """Stream over units, checking what is read and writing a new version; tells whether it went through."""
        version = next(self.versions)
        visits: list[int] = []

        def visit(chunk: Chunk) -> None:
            visits.append(chunk.unit.index)
            for role in self.roles(chunk.unit):
                size = self.manager.tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
                if role in reads:
                    assert words(peek(chunk.addresses[role], size)) == {self.expected(chunk.unit, role)}
                if role in writes:
                    poke(chunk.addresses[role], word(chunk.unit.index, role, version) * (size // 2))
            if Role.GRAD in reads and chunk.unit.trainable:
                self.check_gradient(chunk)
            if stop is not None and len(visits) > stop:
                raise Stop

        done = False
        try:
            self.manager.stream(units, visit, reads=reads, writes=writes)
            done = True
        except Stop:
            pass
        except SwapError as error:
            self.expect_error(error)
        for unit in units:
            for role in self.roles(unit):
                if role not in writes:
                    continue
                shard = self.manager.copies.get(unit.index, role)
                assert shard is not None
                if done:
                    self.content[unit.index, role] = version
                elif unit.index in visits:
                    assert self.manager.copies.is_lost(shard)
                    self.content[unit.index, role] = LOST
                else:  # nothing had been written yet: it is as it was
                    was_lost = self.content[unit.index, role] == LOST
                    assert self.manager.copies.is_lost(shard) == was_lost
        return done

    def check_gradient(self, chunk: Chunk) -> None:
        for number, _, start, stop in chunk.unit.overlaps(chunk.begin, chunk.end):
            total = self.gradients.get((chunk.unit.index, number))
            if total is not None:
                data = peek(chunk.at(Role.GRAD, start, 2), (stop - start) * 2)
                assert (torch.frombuffer(bytearray(data), dtype=torch.bfloat16) == total).all()

    # --- rules ---

    @initialize()
    def load(self) -> None:
        for unit in self.UNITS:
            for role in self.roles(unit):
                self.content[unit.index, role] = FRESH
        assert self.run_stream(self.UNITS, reads=frozenset(), writes=PARAM)

    unit_numbers = st.integers(0, len(UNITS) - 1)

    @rule(index=unit_numbers)
    def acquire(self, index: int) -> None:
        unit = self.UNITS[index]
        others = any(count for other, count in self.leases.items() if other != index)
        tried = 0
        while True:
            try:
                lease = self.manager.acquire(index)
            except StateError:
                assert self.is_lost(unit, PARAM)
                return
            except BudgetError:
                assert others or self.borrowed
                return
            except SwapError as error:
                self.expect_error(error)
                tried += 1
                assert tried <= self.faults
                continue  # a failed read is simply tried again
            break
        assert not self.is_lost(unit, PARAM)
        self.leases[index] += 1
        self.held[index].append(lease)

    @precondition(lambda self: any(self.leases.values()))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        index = data.draw(st.sampled_from([i for i, count in self.leases.items() if count]))
        self.held[index].pop().close()
        self.leases[index] -= 1

    @rule(index=unit_numbers)
    def borrow(self, index: int) -> None:
        try:
            tensor = self.manager.view_of(index, words_of(self.UNITS[index].numel))
        except StateError:
            assert self.is_lost(self.UNITS[index], PARAM)
        except BudgetError:
            assert any(self.leases.values()) or self.borrowed
        except SwapError as error:
            self.expect_error(error)
        else:
            self.borrowed.append((index, tensor))

    @precondition(lambda self: self.borrowed)
    @rule(data=st.data())
    def give_back(self, data: st.DataObject) -> None:
        del self.borrowed[data.draw(st.integers(0, len(self.borrowed) - 1))]

    @rule()
    def prefetch(self) -> None:
        self.manager.prefetch()

    @rule(subset=st.sets(unit_numbers, min_size=1))
    def read(self, subset: set[int]) -> None:
        units = [self.UNITS[index] for index in sorted(subset)]
        if any(self.is_lost(unit) for unit in units):
            with pytest.raises((StateError, SwapError)) as caught:
                self.manager.stream(units, lambda chunk: None, reads=ROLES)
            if isinstance(caught.value, SwapError):
                self.expect_error(caught.value)
            return
        self.run_stream(units, reads=ROLES, writes=frozenset())

    @rule(subset=st.sets(unit_numbers, min_size=1), stop=st.none() | st.integers(0, 6))
    def update(self, subset: set[int], stop: int | None) -> None:
        """An optimizer step over units that are whole: reads and writes."""
        units = [u for u in self.free_units() if u.index in subset and u.trainable and not self.is_lost(u)]
        if units:
            chunks = sum(len(unit.chunks(CHUNK)) for unit in units)
            done = self.run_stream(units, reads=ROLES | {Role.GRAD}, writes=ROLES, stop=stop)
            assert not done or stop is None or stop >= chunks

    @rule(subset=st.sets(unit_numbers, min_size=1))
    def reload(self, subset: set[int]) -> None:
        """Overwrite whole units, lost ones included."""
        units = [unit for unit in self.free_units() if unit.index in subset]
        self.run_stream(units, reads=frozenset(), writes=ROLES)

    @rule(index=unit_numbers, data=st.data(), value=st.integers(1, 3), final=st.booleans())
    def add_gradient(self, index: int, data: st.DataObject, value: int, final: bool) -> None:
        unit = self.UNITS[index]
        if not unit.trainable:
            return
        number = data.draw(st.integers(0, len(unit.slots) - 1))
        if self.gradients.get((index, number), 0) > 200:
            return  # sums are whole numbers that bfloat16 holds exactly
        tensor = torch.full(unit.slots[number].shape, float(value), dtype=torch.bfloat16)
        try:
            self.manager.add_gradient(index, number, tensor, final=final)
        except SwapError as error:
            self.expect_error(error)
            self.reset()  # what the engine does after an error in backward
        else:
            self.gradients[index, number] = self.gradients.get((index, number), 0) + value

    @rule(index=unit_numbers)
    def measure(self, index: int) -> None:
        unit = self.UNITS[index]
        if not unit.trainable:
            return
        try:
            sums = self.manager.gradients.sums(index)
        except SwapError as error:
            self.expect_error(error)
            self.reset()
            return
        for number, (slot, total) in enumerate(zip(unit.slots, sums, strict=True)):
            value = self.gradients.get((index, number))
            assert total == (None if value is None else (float(slot.numel * value * value), 0))

    @rule(by_bytes=st.integers(1, 32 << 10))
    def grow(self, by_bytes: int) -> None:
        before = self.manager.working.size_bytes
        grown = self.manager.working.grow(by_bytes)
        assert grown % 4096 == 0 and grown <= by_bytes
        assert self.manager.working.size_bytes == before + grown <= self.WORKING_BYTES
        assert grown > by_bytes - 4096 or before + grown == self.WORKING_BYTES

    @rule()
    def shrink(self) -> None:
        before, held = self.manager.working.size_bytes, {i for i, count in self.leases.items() if count}
        given = self.manager.working.shrink(1)
        assert self.manager.working.size_bytes == before - given >= self.SMALLEST_BYTES
        assert held <= {index for index in range(len(self.UNITS)) if index in self.manager.bound}
        assert held or self.borrowed or before - given == self.SMALLEST_BYTES  # only what is in use keeps it larger

    @rule()
    def drop_gradients(self) -> None:
        self.manager.drop_gradients()
        self.gradients.clear()
        for unit in self.UNITS:
            shard = self.manager.copies.get(unit.index, Role.GRAD)
            assert shard is None or shard.state is State.EMPTY

    @rule()
    def reset(self) -> None:
        self.manager.reset()
        self.leases = dict.fromkeys(self.leases, 0)
        for held in self.held.values():
            while held:
                held.pop().close()  # whoever comes too late returns nothing: check() counts
        self.gradients.clear()

    @rule()
    def end_step(self) -> None:
        self.manager.restart_schedule()

    @rule(
        nth=st.integers(1, 6),
        hit=st.sampled_from([FaultTarget.READS, FaultTarget.WRITES]),
        fault=st.sampled_from([FaultAction.FAIL, FaultAction.SHORT, FaultAction.DELAY]),
    )
    def inject(self, nth: int, hit: FaultTarget, fault: FaultAction) -> None:
        if fault is FaultAction.FAIL:
            self.store.planned[hit] = nth
            self.faults += 1
        else:
            self.store.inject(Fault(nth=nth, action=fault, target=hit, short_bytes=4096, delay_s=0.001))

    # --- invariants ---

    @invariant()
    def bookkeeping_agrees(self) -> None:
        self.manager.check()
        for budget in self.manager.tiers.budgets.values():
            assert sum(budget.claims().values()) == budget.used_bytes <= budget.limit_bytes
        assert self.store.used_bytes <= self.store.capacity_bytes
        for index, count in self.leases.items():
            shard = self.manager.copies.get(index, Role.PARAM)
            assert shard is not None and shard.readers == count and not shard.writing
            assert not count or index in self.manager.bound
        arrived = {
            (u.index, s)
            for u in self.UNITS
            if u.trainable
            for s, a in enumerate(self.manager.gradients.arrived(u.index))
            if a
        }
        assert arrived == self.gradients.keys()

    @invariant()
    def what_is_bound_shows_the_last_completed_write(self) -> None:
        for index, storage in self.binder.bound.items():
            assert index in self.manager.bound
            data = peek(storage.data_ptr(), self.UNITS[index].param_bytes)
            assert words(data) == {self.expected(self.UNITS[index], Role.PARAM)}

    @invariant()
    def nothing_in_use_is_reused(self) -> None:
        for index, tensor in self.borrowed:
            self.check_borrowed(index, tensor)
        ranges: list[tuple[int, int, str]] = []

        def note(buffer: Buffer | None, size: int, what: str) -> None:
            if buffer is not None:
                ranges.append((buffer.address, buffer.address + size, what))

        for unit in self.UNITS:
            for role in Role:
                shard = self.manager.copies.get(unit.index, role)
                if shard is not None:
                    note(shard.home_buffer, shard.size_bytes, f"home of {shard.describe()}")
                    note(shard.work_buffer, shard.size_bytes, f"copy of {shard.describe()}")
        for slot in self.manager.tiers.staging:
            note(slot, slot.size_bytes, "staging")
        kept = {(tensor.data_ptr(), index) for index, tensor in self.borrowed}
        own = {s.data_ptr() for s in self.binder.bound.values()}
        own |= {
            s.home_buffer.address
            for u in self.UNITS
            if (s := self.manager.copies.get(u.index, Role.PARAM)) and s.home_buffer
        }
        ranges += [(at, at + self.UNITS[i].param_bytes, f"tensor of {i}") for at, i in kept if at not in own]
        ranges.sort()
        for (_, end, one), (start, _, other) in itertools.pairwise(ranges):
            assert end <= start, f"{one} and {other}"


TestManagerMachine = ManagerMachine.TestCase


# --- single situations ----------------------------------------------------------------------------------------------


@contextlib.contextmanager
def managing(
    units: list[Unit], homes: list[Homes], *, prefetch: bool = False, **more: Any
) -> Iterator[tuple[Manager, FakeStore]]:
    store = FakeStore()
    manager = make_manager(make_plan_with(units, homes, chunk_numel=CHUNK, **more), store, prefetch=prefetch)

    def load(chunk: Chunk) -> None:
        size = manager.tiers.chunk_bytes(chunk.unit, Role.PARAM, chunk.begin, chunk.end)
        poke(chunk.addresses[Role.PARAM], word(chunk.unit.index, Role.PARAM, 1) * (size // 2))

    manager.stream(units, load, reads=frozenset(), writes=PARAM)
    store.events.clear()
    try:
        yield manager, store
    finally:
        store.before_wait = lambda ticket: None
        manager.close()


def state(manager: Manager, index: int, role: Role = Role.PARAM) -> State:
    shard = manager.copies.get(index, role)
    assert shard is not None
    return shard.state


def units_of(count: int) -> list[Unit]:
    return [make_unit(index, [CHUNK]) for index in range(count)]  # 8 KiB each


def late(kind: str, *units: int) -> Callable[[FakeTicket], None]:
    """Let waits for transfers of these units miss their deadline."""

    def before_wait(ticket: FakeTicket) -> None:
        if ticket.kind == kind and ticket.key[0] in units:  # type: ignore[index]
            raise SwapDeadlineError("late")

    return before_wait


def test_a_buffer_is_not_reused_while_a_late_read_may_still_fill_it() -> None:
    with managing(units_of(3), [Homes(N, H, N)] * 3, working_bytes=16 << 10) as (manager, store):
        store.before_wait = late("get", 0)
        with pytest.raises(SwapDeadlineError):
            manager.acquire(0)
        (flying,) = store.flying
        second = manager.acquire(1)  # the store refuses memory that is in flight
        manager.check()
        with pytest.raises(BudgetError):
            manager.acquire(2)  # the other half is leased, and the late read's must not be taken
        store.before_wait = lambda ticket: None
        flying.wait()
        manager.acquire(2)  # now it is free
        assert words(peek(manager.bound.storage(1).data_ptr(), 8 << 10)) == {word(1, Role.PARAM, 1)}
        second.close()
        manager.acquire(0)  # the unit itself can be fetched anew
        assert words(peek(manager.bound.storage(0).data_ptr(), 8 << 10)) == {word(0, Role.PARAM, 1)}


def test_a_failed_read_is_raised_where_it_is_needed_and_tried_again() -> None:
    with managing(units_of(2), [Homes(N, H, N)] * 2, prefetch=True, working_bytes=16 << 10) as (manager, store):
        store.fail = lambda kind, key, count: SwapError("injected", errno=5) if key[0] == 1 else None  # type: ignore[index]
        manager.acquire(0)  # starts to fetch unit 1
        assert state(manager, 1) is State.FETCHING
        with pytest.raises(SwapError, match="injected"):
            manager.acquire(1)
        assert state(manager, 1) is State.FAILED
        manager.check()
        store.fail = lambda kind, key, count: None
        manager.acquire(1)
        assert state(manager, 1) is State.RESIDENT
        manager.reset()
        manager.check()
        assert state(manager, 1) is State.RESIDENT


def test_a_failed_prefetch_does_not_fail_who_needs_its_room() -> None:
    with managing(units_of(4), [Homes(N, H, N)] * 4, prefetch=True, working_bytes=16 << 10) as (manager, store):
        store.fail = lambda kind, key, count: SwapError("injected", errno=5) if key[0] == 1 else None  # type: ignore[index]
        manager.acquire(0)  # starts to fetch unit 1, which takes the rest of the region
        assert state(manager, 1) is State.FETCHING
        manager.acquire(3)
        assert state(manager, 3) is State.RESIDENT
        manager.check()
        store.fail = lambda kind, key, count: None
        manager.reset()
        manager.acquire(1)
        assert state(manager, 1) is State.RESIDENT


def test_reset_does_not_make_a_half_written_unit_whole() -> None:
    for home in (Homes(D, H, H), Homes(H, H, H), Homes(N, H, N)):
        units = [make_unit(0, [2 * CHUNK])]
        with managing(units, [home], working_bytes=16 << 10) as (manager, _):
            manager.acquire(0).close()

            def visit(chunk: Chunk) -> None:
                poke(chunk.addresses[Role.PARAM], word(0, Role.PARAM, 2) * chunk.numel)
                if chunk.end == chunk.unit.numel:
                    raise Stop

            with pytest.raises(Stop):
                manager.stream(units, visit, reads=ROLES, writes=ROLES)
            for _ in range(2):
                assert {state(manager, 0, role) for role in ROLES} == {State.FAILED}
                assert 0 not in manager.bound
                with pytest.raises(StateError):
                    manager.acquire(0)
                for roles in (PARAM, ALL_STATES):
                    with pytest.raises(StateError, match="lost"):
                        manager.stream(units, lambda chunk: None, reads=roles)
                manager.reset()
                manager.check()


def test_a_tensor_of_the_user_keeps_its_memory_when_a_step_fails() -> None:
    units = units_of(2)
    with managing(units, [Homes(H, H, H)] * 2, working_bytes=8 << 10) as (manager, _):
        tensor: torch.Tensor | None = manager.view_of(0, words_of(CHUNK))

        def stop(chunk: Chunk) -> None:
            raise Stop

        with pytest.raises(Stop):
            manager.stream(units[:1], stop, reads=ROLES, writes=ROLES)
        with pytest.raises(BudgetError):
            manager.acquire(1)
        assert tensor is not None and words(tensor.numpy().tobytes()) == {word(0, Role.PARAM, 1)}
        del tensor
        manager.acquire(1)
        manager.check()


def test_borrowed_units_stay_and_units_used_last_leave_first() -> None:
    with managing(units_of(4), [Homes(H, H, H)] * 4, working_bytes=24 << 10) as (manager, _):
        for index in (0, 1, 2):  # the schedule expects 3 next, then 3, 2, 1, 0
            manager.acquire(index).close()
        lease = manager.acquire(3)
        assert [index in manager.bound for index in range(4)] == [False, True, True, True]
        lease.close()
        tensor = manager.view_of(1, words_of(CHUNK))
        manager.acquire(0)
        assert 1 in manager.bound and 0 in manager.bound
        assert words(tensor.numpy().tobytes()) == {word(1, Role.PARAM, 1)}


def test_views_of_a_unit_are_the_askers_own() -> None:
    """Their memory is kept to be asked for again, by form; no more than a few forms are, and nobody sees that."""
    with managing(units_of(3), [Homes(H, H, H)] * 3, working_bytes=16 << 10) as (manager, _):
        manager.acquire(0).close()
        for numel in [CHUNK, CHUNK, *range(1, 2 * MOST_FORMS)]:
            first, second = (manager.view_of(0, words_of(numel)) for _ in range(2))
            assert first is not second and first.data_ptr() == second.data_ptr() and first.shape == (numel,)
            del first
            assert manager.bound.borrowed(0)
            del second
            assert not manager.bound.borrowed(0)
        assert len(manager.bound._residency[0].others) == MOST_FORMS
        with torch.inference_mode():
            view = manager.view_of(0, words_of(CHUNK))
        assert not view.is_inference()
        del view
        for index in (1, 2, 0):  # it leaves, and comes again
            manager.acquire(index).close()
            assert words(manager.view_of(index, words_of(CHUNK)).numpy().tobytes()) == {word(index, Role.PARAM, 1)}
            assert not manager.bound.borrowed(index)
        manager.check()


def test_a_view_that_a_transform_has_wrapped_is_not_kept() -> None:
    with managing(units_of(1), [Homes(H, H, H)], working_bytes=8 << 10) as (manager, _):

        def ask(x: torch.Tensor) -> torch.Tensor:
            return x + manager.view_of(0, words_of(CHUNK)).to(x.dtype)

        manager.acquire(0).close()
        torch.func.functionalize(ask)(torch.zeros(CHUNK))
        view = manager.view_of(0, words_of(CHUNK))
        assert view.untyped_storage().data_ptr() == manager.bound.storage(0).data_ptr()


def test_a_unit_that_will_be_borrowed_does_not_cut_the_room_in_two() -> None:
    """The region is that of the three largest units, 48 KiB; borrowed in its middle, a small one is in the way."""
    small, large = [make_unit(index, [CHUNK]) for index in range(4)], make_unit(4, [4 * CHUNK])
    with managing([*small, large], [Homes(H, H, H)] * 5, working_bytes=48 << 10) as (manager, _):
        leases = [manager.acquire(index) for index in range(4)]
        for lease in leases:
            lease.close()
        before = manager.bound.storage(2).data_ptr()
        tensor = manager.view_of(2, words_of(CHUNK), aside=True)
        assert tensor.data_ptr() < before
        manager.acquire(4)
        manager.acquire(1)
        assert words(tensor.numpy().tobytes()) == {word(2, Role.PARAM, 1)}
        manager.check()


def test_uses_are_counted_as_hits_misses_and_stalls() -> None:
    with managing(units_of(3), [Homes(N, H, N)] * 3, prefetch=True, working_bytes=24 << 10) as (manager, store):
        counters = manager.tiers.counters
        manager.acquire(0)
        assert (counters.hits, counters.misses, counters.stalls) == (0, 1, 0)
        assert {key[0] for what, key in store.events if what == "get"} == {0, 1, 2}  # the next ones are on their way
        manager.acquire(1)
        assert (counters.hits, counters.misses, counters.stalls) == (0, 1, 1)
        manager.acquire(1)
        assert (counters.hits, counters.misses, counters.stalls) == (1, 1, 1)
        assert counters.stall_seconds > 0


def test_the_next_unit_is_always_here_or_on_its_way() -> None:
    with managing(units_of(4), [Homes(N, H, N)] * 4, prefetch=True, working_bytes=16 << 10) as (manager, _):
        counters = manager.tiers.counters
        for _ in range(3):
            misses = counters.misses
            for index in (0, 1, 2, 3, 2, 1):
                manager.acquire(index).close()
                manager.prefetch()
                following = next(manager.schedule.upcoming(1))
                assert state(manager, following) in (State.RESIDENT, State.FETCHING)
            manager.restart_schedule()
        assert counters.misses == misses  # nothing had to be asked for once the trace was known


def test_what_another_pass_has_fetched_ahead_leaves() -> None:
    """Each kind of pass uses units of its own, as a model and its reference do: what has come for one is in no way."""
    with managing(units_of(8), [Homes(N, H, N)] * 8, prefetch=True, working_bytes=24 << 10) as (manager, store):
        counters = manager.tiers.counters
        for _ in range(3):
            misses = counters.misses
            for training, uses in ((True, (0, 1, 2, 3)), (False, (4, 5, 6, 7))):
                manager.begin_pass(training=training)
                for ticket in list(store.flying):  # the drive has brought what was asked for
                    ticket.wait()
                for index in uses:
                    manager.acquire(index).close()
                    manager.check()
            manager.restart_schedule()
        assert counters.misses - misses == 2  # the first unit of each pass: the other one has not foreseen it


def gradient(manager: Manager, index: int, value: float, *, final: bool = True, backward_pass: int = 0) -> None:
    for number, slot in enumerate(manager.units[index].slots):
        tensor = torch.full(slot.shape, value, dtype=torch.bfloat16)
        manager.add_gradient(index, number, tensor, final=final, backward_pass=backward_pass)


def test_spilled_gradients_accumulate_across_the_pool() -> None:
    units = units_of(4)
    with managing(units, [Homes(H, N, H)] * 4) as (manager, store):
        for value in (1.0, 2.0):
            for index in reversed(range(4)):
                gradient(manager, index, value, final=value == 2.0)
        for index in range(4):
            assert manager.gradients.sums(index) == [(9.0 * CHUNK, 0)]
        manager.drop_gradients()
        assert manager.gradients.sums(0) == [None]
        assert not store.flying and not any(key[1] == "grad" for key in store.objects)  # type: ignore[index]


def test_a_gradient_that_cannot_be_written_is_kept_until_it_is_dropped() -> None:
    with managing(units_of(4), [Homes(H, N, H)] * 4) as (manager, store):
        store.fail = lambda kind, key, count: SwapError("full", errno=28) if kind == "put" else None
        gradient(manager, 3, 1.0)
        gradient(manager, 2, 1.0)
        with pytest.raises(SwapError, match="full"):
            gradient(manager, 1, 1.0)  # the pool is full and its oldest cannot leave
        manager.check()
        store.fail = lambda kind, key, count: None
        gradient(manager, 1, 1.0)  # the write is tried again
        assert manager.gradients.sums(3) == [(float(CHUNK), 0)]
        manager.drop_gradients()
        store.fail = lambda kind, key, count: SwapError("full", errno=28)
        gradient(manager, 0, 1.0)
        assert state(manager, 0, Role.GRAD) is State.FLUSHING
        manager.drop_gradients()  # nobody needs it any more: no error
        assert state(manager, 0, Role.GRAD) is State.EMPTY
        manager.check()


def test_a_gradient_that_cannot_be_read_back_is_lost_until_it_is_dropped() -> None:
    with managing(units_of(3), [Homes(H, N, H)] * 3) as (manager, store):
        for index in (2, 1, 0):
            gradient(manager, index, 1.0)
        assert state(manager, 2, Role.GRAD) is State.STORED
        store.fail = lambda kind, key, count: SwapError("injected", errno=5) if kind == "get" else None
        with pytest.raises(SwapError, match="injected"):
            gradient(manager, 2, 1.0)
        manager.check()
        assert state(manager, 2, Role.GRAD) is State.FAILED
        store.fail = lambda kind, key, count: None
        with pytest.raises(StateError, match="gradient of u2"):
            gradient(manager, 2, 1.0)
        manager.drop_gradients()
        gradient(manager, 2, 3.0)
        assert manager.gradients.sums(2) == [(9.0 * CHUNK, 0)]


def test_a_refused_write_leaves_nothing_in_flight() -> None:
    """The store refuses the chunks of a gradient, of which it has begun none: it stays where it is."""
    with managing([make_unit(0, [2 * CHUNK])], [Homes(H, N, H)]) as (manager, store):

        def refuse(items: Sequence[tuple[Any, int, int]], *, urgent: bool = False) -> list[FakeTicket]:
            assert len(items) == 2
            raise SwapError("full", errno=28)

        store.put_many = refuse  # type: ignore[method-assign]
        with pytest.raises(SwapError, match="full"):
            gradient(manager, 0, 1.0)
        assert not store.flying
        assert state(manager, 0, Role.GRAD) is State.DIRTY
        manager.check()


def test_an_interrupted_wait_can_be_taken_up_again() -> None:
    def interrupt(ticket: FakeTicket) -> None:
        raise KeyboardInterrupt

    with managing(units_of(1), [Homes(N, N, H)], working_bytes=8 << 10) as (manager, store):
        gradient(manager, 0, 1.0)
        store.before_wait = interrupt
        with pytest.raises(KeyboardInterrupt):
            gradient(manager, 0, 1.0)
        with pytest.raises(KeyboardInterrupt):
            manager.acquire(0)
        manager.check()
        store.before_wait = lambda ticket: None
        gradient(manager, 0, 1.0)
        manager.acquire(0)
        manager.reset()
        manager.check()
        assert not store.flying


def test_gradients_of_other_dtypes_are_summed_in_fp32_over_micro_batches() -> None:
    with managing(units_of(1), [Homes(H, H, H)], accumulate=True) as (manager, _):
        values = [256.0, 1.0, 1.0]  # 256 + 1 + 1 = 256 in bfloat16, 258 in fp32
        for number, value in enumerate(values):
            gradient(manager, 0, value, final=number == 2)
        assert manager.gradients.sums(0) == [(258.0**2 * CHUNK, 0)]
        gradient(manager, 0, 2.0, final=False)  # what was measured before does not count any more
        assert manager.gradients.sums(0) == [(260.0**2 * CHUNK, 0)]


class LateDevice(CpuDevice):
    """The CPU, whose gradients come to the host as late as somebody waits for them."""

    def mover(self, needs: MoverNeeds) -> CpuMover:
        return LateMover(needs.counters)


class LateMover(CpuMover):
    def __init__(self, counters: Counters) -> None:
        super().__init__(counters)
        self._waiting: list[tuple[torch.Tensor, Callable[[int], None]]] = []

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None], *, group: int, last: bool) -> None:
        self._waiting.append((tensor, use))

    def wait(self, timeout_s: float) -> None:
        while self._waiting:
            tensor, use = self._waiting.pop(0)
            use(tensor.data_ptr())


@pytest.mark.parametrize("device", [CpuDevice, LateDevice])
def test_backward_passes_that_nobody_announced_are_summed_in_fp32(device: type[CpuDevice]) -> None:
    plan = make_plan_with(units_of(1), [Homes(H, H, H)], chunk_numel=CHUNK)
    plan = dataclasses.replace(plan, wide_bytes={H: 2 * CHUNK})
    manager = make_manager(plan, FakeStore(), device=device())
    for number, value in enumerate([256.0, 1.0, 1.0]):  # the next passes come before this one has left the device
        gradient(manager, 0, value, final=False, backward_pass=number)
    manager.gradients.await_copies()
    assert manager.gradients.sums(0) == [(258.0**2 * CHUNK, 0)]
    manager.close()


@pytest.mark.parametrize("device", [CpuDevice, LateDevice])
def test_a_gradient_on_its_way_counts_as_one_that_has_come(device: type[CpuDevice]) -> None:
    manager = make_manager(
        make_plan_with(units_of(1), [Homes(H, H, H)], chunk_numel=CHUNK), FakeStore(), device=device()
    )
    assert not manager.gradients.any_arrived
    gradient(manager, 0, 2.0)
    assert manager.gradients.any_arrived
    manager.multiply_gradient(0, 0, 3.0)  # what was measured on its way must not count afterwards
    assert manager.gradients.sums(0) == [(36.0 * CHUNK, 0)]
    manager.drop_gradients()
    assert not manager.gradients.any_arrived
    manager.close()


def test_a_gradient_that_is_not_finite_is_counted() -> None:
    with managing(units_of(1), [Homes(H, H, H)]) as (manager, _):
        tensor = torch.ones(CHUNK, dtype=torch.bfloat16)
        tensor[3], tensor[70], tensor[71] = float("nan"), float("inf"), -float("inf")
        manager.add_gradient(0, 0, tensor, final=False)
        ((_, bad),) = [total for total in manager.gradients.sums(0) if total is not None]
        assert bad == 3


def test_memory_stays_mapped_for_tensors_that_outlive_the_manager() -> None:
    with managing(units_of(1), [Homes(H, H, H)], working_bytes=8 << 10) as (manager, _):
        tensor = manager.view_of(0, words_of(CHUNK))
        manager.close()
    del manager
    gc.collect()
    assert words(tensor.numpy().tobytes()) == {word(0, Role.PARAM, 1)}


def test_memory_stays_mapped_for_tensors_of_a_failed_step() -> None:
    units = units_of(1)
    with managing(units, [Homes(H, H, H)], working_bytes=8 << 10) as (manager, _):
        tensor = manager.view_of(0, words_of(CHUNK))

        def stop(chunk: Chunk) -> None:
            raise Stop

        with pytest.raises(Stop):
            manager.stream(units, stop, reads=ROLES, writes=ROLES)
        manager.close()
    del manager
    gc.collect()
    assert words(tensor.numpy().tobytes()) == {word(0, Role.PARAM, 1)}


def test_gradients_need_not_be_contiguous() -> None:
    unit = make_unit(0, [6])
    with managing([unit], [Homes(H, H, H)]) as (manager, _):
        manager.add_gradient(0, 0, torch.arange(12, dtype=torch.bfloat16)[::2], final=True)
        assert manager.gradients.sums(0) == [(float(sum((2 * i) ** 2 for i in range(6))), 0)]


def test_the_dump_names_what_is_not_at_home() -> None:
    with managing(units_of(2), [Homes(H, H, H)] * 2, working_bytes=8 << 10) as (manager, _):
        tensor = manager.view_of(1, words_of(CHUNK))
        text = manager.tiers.dump()
        assert "u1/param: resident, home cpu" in text and "borrowed" in text and "u0" not in text
        del tensor


def test_all_is_given_back_where_the_device_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = make_plan_with(units_of(2), [Homes(H, H, N)] * 2, working_bytes=16 << 10)
    manager = make_manager(plan, FakeStore())

    def fails() -> None:
        raise RuntimeError("device-side assert")

    monkeypatch.setattr(manager.tiers.device, "synchronize", fails)
    with pytest.raises(RuntimeError, match="device-side assert"):
        manager.close()
    assert all(budget.used_bytes == 0 for budget in manager.tiers.budgets.values())
