"""The pipeline over chunks: what overlaps, what waits, and what an exception leaves."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from fakes import FakeStore, FakeTicket, make_manager, make_plan_with, make_unit, peek, poke, versions
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import StateError
from offload.kernels.ranges import StateKind
from offload.memory.budget import Tier
from offload.planning.asked import Homes
from offload.planning.roles import Role, States
from offload.planning.units import Unit
from offload.shards.manager import Manager
from offload.shards.shard import State
from offload.shards.stream import ALL_STATES, Chunk
from swap import SwapDeadlineError, SwapError

CHUNK = 4096
PARAM = frozenset({Role.PARAM})
ROLES = PARAM | ALL_STATES
D, H, N = Tier.DEVICE, Tier.HOST, Tier.NVME


@contextmanager
def managing(units: list[Unit], homes: list[Homes], **more: Any) -> Iterator[tuple[Manager, FakeStore]]:
    store = FakeStore()
    manager = make_manager(make_plan_with(units, homes, chunk_numel=CHUNK, **more), store)
    try:
        yield manager, store
    finally:
        manager.close()


def content(unit: Unit, role: Role, number: int, size: int, version: int) -> bytes:
    """Bytes that tell unit, role, chunk and version apart."""
    stamp = bytes([unit.index, list(Role).index(role), number, version])
    return (stamp * (size // 4 + 1))[:size]


def write(manager: Manager, units: list[Unit], version: int, log: list[tuple[str, Any]] | None = None) -> None:
    """Overwrite everything with a version, without reading."""

    def visit(chunk: Chunk) -> None:
        if log is not None:
            log.append(("visit", (chunk.unit.index, chunk.number)))
        for role in chunk.addresses:
            size = manager.tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
            poke(chunk.addresses[role], content(chunk.unit, role, chunk.number, size, version))

    manager.stream(units, visit, reads=frozenset(), writes=ROLES)


def ranges(manager: Manager, unit: Unit) -> list[tuple[int, int]]:
    """What a stream over `ROLES` visits where no working copy is on the device: a unit that is in memory, at once."""
    shards = (manager.copies.get(unit.index, role) for role in ROLES)
    moves = any(shard is not None and shard.home is N for shard in shards)
    return unit.chunks(CHUNK) if moves else [(0, unit.numel)]


def check_content(manager: Manager, units: list[Unit], version: int) -> None:
    """Read everything and compare it with a version."""
    seen = []

    def visit(chunk: Chunk) -> None:
        seen.append((chunk.unit.index, chunk.begin, chunk.end))
        for role in ROLES:
            size = manager.tiers.chunk_bytes(chunk.unit, role, chunk.begin, chunk.end)
            if size:
                expected = content(chunk.unit, role, chunk.number, size, version)
                assert peek(chunk.addresses[role], size) == expected, (chunk.unit.name, role, chunk.number)

    manager.stream(units, visit, reads=ROLES)
    assert seen == [(unit.index, *ends) for unit in units for ends in ranges(manager, unit)]


homes = st.tuples(st.sampled_from(Tier), st.sampled_from(Tier))


@st.composite
def unit_and_homes(draw: st.DrawFn) -> tuple[list[Unit], list[Homes]]:
    kinds = st.tuples(st.sampled_from(["bfloat16", "float16", "float32"]), st.integers(1, 4), st.booleans(), homes)
    units, where = [], []
    for index, (dtype, chunks, trainable, (param, states)) in enumerate(draw(st.lists(kinds, min_size=1, max_size=7))):
        units.append(make_unit(index, [chunks * CHUNK - 5], dtype, trainable))
        where.append(Homes(param, H if trainable else None, states if trainable else None))
    return units, where


FORMATS = [*(States(kind=kind) for kind in StateKind), States(("momentum_buffer",)), States(())]


@given(unit_and_homes(), st.sampled_from(FORMATS))
def test_what_was_written_is_read_wherever_it_lives(case: tuple[list[Unit], list[Homes]], states: States) -> None:
    units, where = case
    with managing(units, where, states=states) as (manager, store):
        for version in (1, 2):
            write(manager, units, version)
            assert not store.flying
            manager.check()
            check_content(manager, units, version)
            assert not store.flying
            manager.check()
        for unit in units:
            for role in ROLES:
                shard = manager.copies.get(unit.index, role)
                assert shard is None or (shard.state is State.STORED and not shard.readers and not shard.writing)


def test_reading_writes_nothing() -> None:
    units = [make_unit(0, [3 * CHUNK])]
    with managing(units, [Homes(N, H, N)]) as (manager, store):
        write(manager, units, 1)
        before = dict(store.objects)
        store.events.clear()
        check_content(manager, units, 1)
        assert store.objects == before
        assert not any(what.startswith("put") for what, _ in store.events)


def run_logged(chunks: int, slots: int) -> tuple[list[tuple[str, Any]], dict[int, int]]:
    """Update a unit with everything on NVMe; returns the events, chunk numbers as keys, and when chunks are visited."""
    units = [make_unit(0, [chunks * CHUNK])]
    with managing(units, [Homes(N, H, N)], staging_slots=slots) as (manager, store):
        write(manager, units, 1)
        store.events.clear()

        def visit(chunk: Chunk) -> None:
            store.events.append(("visit", (0, "visit", chunk.number)))

        manager.stream(units, visit, reads=ROLES, writes=ROLES)
        events = [(what, key[2]) for what, key in store.events]
    return events, {number: events.index(("visit", number)) for number in range(chunks)}


@pytest.mark.parametrize("slots", [4, 5, 8])
@pytest.mark.parametrize("chunks", [1, 2, 3, 4, 5, 9, 20])
def test_reads_run_ahead_and_writes_are_not_waited_for(chunks: int, slots: int) -> None:
    events, visits = run_logged(chunks, slots)
    last = {event: position for position, event in enumerate(events)}
    first = {event: len(events) - 1 - position for position, event in enumerate(reversed(events))}
    for number in range(chunks):
        assert last["get over", number] < visits[number] < first["put", number]  # read, computed, written
        if number + 1 < chunks:
            assert last["get", number + 1] < visits[number]  # the next one is arriving
            assert first["get over", number + 1] > last["put", number]  # and not waited for before this one leaves
            assert first["put over", number] > visits[number + 1]  # which is not waited for before the next is done
        if number + slots // 2 < chunks:
            assert last["get", number + slots // 2] < visits[number]
        if number + slots < chunks:  # of four slots the fifth chunk takes the first one's, after its writes
            assert last["put over", number] < first["get", number + slots]
    assert [event for event in events if event[0] == "visit"] == [("visit", number) for number in range(chunks)]
    assert sum(what == "get" for what, _ in events) == 2 * chunks  # the parameter, and the states as one record
    assert sum(what == "put" for what, _ in events) == 2 * chunks


@pytest.mark.parametrize("staged", [(0, 8), (0, 4, 8), (0, 2, 4, 6, 8), (1, 2, 3, 4, 8, 9), tuple(range(10))])
def test_a_slot_is_not_reused_before_its_writer_has_left(staged: tuple[int, ...]) -> None:
    """Units in between whose bytes are in memory need no slot. The store checks every range in flight."""
    units = [make_unit(index, [CHUNK]) for index in range(10)]
    where = [Homes(H, H, N if index in staged else H) for index in range(10)]
    with managing(units, where) as (manager, store):
        write(manager, units, 1)
        write(manager, units, 2)
        check_content(manager, units, 2)
        store.events.clear()
        manager.stream(units, lambda chunk: None, reads=ROLES, writes=ROLES)
        keys = [(what, key[0]) for what, key in store.events]
        for writer, reader in zip(staged, staged[4:], strict=False):
            assert keys.index(("put over", writer)) < keys.index(("get", reader))
        check_content(manager, units, 2)


class Stop(Exception):
    pass


def check_lost(manager: Manager, units: list[Unit], lost: list[int], version: int = 1) -> None:
    """The units `lost` are lost in every role, the others have the content of `version`."""
    manager.check()
    for unit in units:
        shards = [s for role in ROLES if (s := manager.copies.get(unit.index, role)) is not None]
        assert not any(shard.writing or shard.readers for shard in shards)
        if unit.index in lost:
            assert {shard.state for shard in shards} == {State.FAILED}
        else:
            check_content(manager, [unit], version)


def read_with(manager: Manager, units: list[Unit]) -> None:
    manager.stream(units, lambda chunk: None, reads=ROLES)


@given(case=unit_and_homes(), stop=st.integers(0, 27))
def test_an_exception_leaves_nothing_in_flight_and_no_mixture_that_passes_for_content(
    case: tuple[list[Unit], list[Homes]], stop: int
) -> None:
    units, where = case
    with managing(units, where) as (manager, store):
        total = sum(len(ranges(manager, unit)) for unit in units)
        write(manager, units, 1)
        visited: list[int] = []

        def visit(chunk: Chunk) -> None:
            visited.append(chunk.unit.index)
            if len(visited) > stop % total:
                raise Stop

        with pytest.raises(Stop):
            manager.stream(units, visit, reads=ROLES, writes=ROLES)
        assert not store.flying
        check_lost(manager, units, visited)
        for unit in units:
            if unit.index in visited:
                with pytest.raises(StateError, match=unit.name):
                    read_with(manager, [unit])
                with pytest.raises(StateError, match=unit.name):
                    manager.acquire(unit.index)
        manager.check()
        write(manager, units, 3)  # whole new content repairs it
        check_content(manager, units, 3)
        manager.check()


@given(case=unit_and_homes(), nth=st.integers(0, 200), kind=st.sampled_from(["get", "put"]))
def test_a_failed_transfer_is_raised_and_leaves_nothing_in_flight(
    case: tuple[list[Unit], list[Homes]], nth: int, kind: str
) -> None:
    units, where = case
    with managing(units, where) as (manager, store):
        write(manager, units, 1)
        store.events.clear()
        manager.stream(units, lambda chunk: None, reads=ROLES, writes=ROLES)
        operations = sum(what == kind for what, _ in store.events)
        if operations == 0:
            return
        start = store._counts[kind]
        injected = SwapError("injected", errno=5)
        store.fail = lambda what, key, count: injected if (what, count) == (kind, start + nth % operations) else None
        visited: list[int] = []
        with pytest.raises(SwapError) as caught:
            manager.stream(units, lambda chunk: visited.append(chunk.unit.index), reads=ROLES, writes=ROLES)
        assert caught.value is injected
        assert not store.flying
        store.fail = lambda what, key, count: None
        check_lost(manager, units, visited)


def test_what_was_not_written_is_as_it_was() -> None:
    """Opening the last unit fails: working copies, content at home and states that never had any stay what they are."""
    units = [make_unit(index, [CHUNK]) for index in range(4)]
    where = [Homes(H, H, H), Homes(N, H, N), Homes(D, H, H), Homes(N, H, N)]
    with managing(units, where, working_bytes=units[0].param_bytes) as (manager, _):
        write(manager, units[:2], 1)
        manager.stream(units[2:3], lambda chunk: None, reads=frozenset(), writes=PARAM)  # no states
        manager.acquire(0).close()
        states = {(shard.unit.index, shard.role): shard.state for shard in manager.copies}
        assert set(states.values()) == {State.RESIDENT, State.STORED, State.EMPTY}
        before = versions(manager)
        with pytest.raises(StateError, match="u3: expected content but nothing was loaded"):
            manager.stream(units, lambda chunk: None, reads=ROLES, writes=ROLES)
        manager.check()
        assert states == {(shard.unit.index, shard.role): shard.state for shard in manager.copies}
        assert versions(manager) == before  # a graph of before is not stale
        check_content(manager, units[:2], 1)


def test_what_was_lost_and_not_written_is_still_lost() -> None:
    units = [make_unit(index, [CHUNK]) for index in range(2)]
    with managing(units, [Homes(N, H, N), Homes(H, H, H)]) as (manager, _):
        write(manager, units, 1)
        for lost in ([1], [0, 1]):  # the second time, unit 1 was open to be overwritten
            with pytest.raises(Stop):
                manager.stream([units[i] for i in lost], stop_at_once, reads=frozenset(), writes=ROLES)
            check_lost(manager, units, lost)


def test_a_failed_read_without_writing_loses_nothing() -> None:
    units = [make_unit(0, [3 * CHUNK]), make_unit(1, [CHUNK])]
    with managing(units, [Homes(N, H, N), Homes(H, H, H)]) as (manager, store):
        write(manager, units, 1)
        store.fail = lambda kind, key, count: SwapError("injected", errno=5) if kind == "get" else None
        with pytest.raises(SwapError):
            read_with(manager, units)
        store.fail = lambda kind, key, count: None
        manager.check()
        check_content(manager, units, 1)


def test_a_reader_elsewhere_keeps_its_lease() -> None:
    """A stream returns its own leases and no others, also when it fails."""
    units = [make_unit(0, [CHUNK])]
    with managing(units, [Homes(H, H, N)], working_bytes=units[0].param_bytes) as (manager, store):
        write(manager, units, 1)
        lease = manager.acquire(0)
        shard = manager.copies.get(0, Role.PARAM)
        assert shard is not None
        check_content(manager, units, 1)
        assert shard.readers == 1
        manager.stream(units, lambda chunk: None, reads=ALL_STATES)  # does not touch PARAM
        assert shard.readers == 1
        with pytest.raises(Stop):
            manager.stream(units, stop_at_once, reads=ROLES)
        assert shard.readers == 1
        lease.close()
        manager.check()


def stop_at_once(chunk: Chunk) -> None:
    raise Stop


@pytest.mark.parametrize("tier", [H, N])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_states_without_content_count_as_zero_moments_and_a_master_equal_to_the_parameter(
    dtype: str, tier: Tier
) -> None:
    units = [make_unit(0, [2 * CHUNK], dtype)]
    torch_dtype = getattr(torch, dtype)
    values = torch.linspace(-3, 3, 2 * CHUNK).to(torch_dtype)
    itemsize = units[0].itemsize
    with managing(units, [Homes(tier, H, tier)]) as (manager, _):

        def load(chunk: Chunk) -> None:
            data = values[chunk.begin : chunk.end].contiguous().view(torch.uint8).numpy().tobytes()
            poke(chunk.addresses[Role.PARAM], data)

        manager.stream(units, load, reads=frozenset(), writes=PARAM)
        for slot in manager.tiers.staging:  # whatever was there before must not show
            poke(slot.address, b"\xff" * slot.size_bytes)
        seen = 0

        def visit(chunk: Chunk) -> None:
            nonlocal seen
            seen += 1
            assert chunk.access.fresh_states
            assert peek(chunk.addresses[Role.EXP_AVG], chunk.numel * 4) == bytes(chunk.numel * 4)
            assert peek(chunk.addresses[Role.EXP_AVG_SQ], chunk.numel * 4) == bytes(chunk.numel * 4)
            part = values[chunk.begin : chunk.end]
            if dtype == "bfloat16":  # a remainder of zero: the parameter is its own master
                assert peek(chunk.addresses[Role.MASTER], chunk.numel * 2) == bytes(chunk.numel * 2)
            elif dtype == "float16":
                assert peek(chunk.addresses[Role.MASTER], chunk.numel * 4) == part.float().numpy().tobytes()
            assert chunk.at(Role.PARAM, chunk.begin + 3, itemsize) == chunk.addresses[Role.PARAM] + 3 * itemsize

        manager.stream(units, visit, reads=ROLES, writes=ROLES)
        assert seen == (2 if tier is N else 1)
        manager.stream(units, lambda chunk: check_not_fresh(chunk), reads=ROLES)


def check_not_fresh(chunk: Chunk) -> None:
    assert not chunk.access.fresh_states
    assert all(role in chunk.addresses for role in (Role.EXP_AVG, Role.EXP_AVG_SQ))


def test_a_gradient_that_is_used_as_all_are_dropped_is_not_the_next_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside an accelerator: whoever computes gave it up, its drive being late, while a thread adds it."""
    units = [make_unit(0, [CHUNK])]
    gradient, uses = torch.ones(CHUNK, dtype=torch.bfloat16), list[Callable[[int], None]]()
    with managing(units, [Homes(N, N, N)]) as (manager, store), ThreadPoolExecutor(1) as consumer:
        monkeypatch.setattr(manager.tiers.mover, "read_tensor", lambda tensor, use, **_: uses.append(use))
        gradients = manager.gradients
        gradients.add(0, 0, gradient, final=False)
        uses.pop()(gradient.data_ptr())
        gradients.empty_pool()
        begun, dropped = threading.Event(), threading.Event()

        def drop(ticket: FakeTicket) -> None:
            store.before_wait = lambda ticket: None
            begun.set()
            assert not dropped.wait(0.1), "that waits for what is being added"

        store.before_wait = drop
        for _ in range(2):  # one of which has not begun
            gradients.add(0, 0, gradient, final=False)
        adding = consumer.submit(uses[0], gradient.data_ptr())
        assert begun.wait(60.0)
        gradients.drop()
        dropped.set()
        adding.result(60.0)
        uses[1](gradient.data_ptr())
        assert not gradients.any_arrived and manager.copies.of(0, Role.GRAD).state is State.EMPTY


@pytest.mark.parametrize("forgotten", [False, True], ids=["no gradient", "one that was forgotten"])
def test_slots_that_a_late_read_may_still_fill_are_not_used_again(forgotten: bool) -> None:
    """The one that failed waits twice, then goes: whoever comes next would find the late bytes in its slot."""
    units = [make_unit(index, [3 * CHUNK]) for index in range(2)]
    with managing(units, [Homes(N, H, N)] * 2) as (manager, store):
        write(manager, units, 1)
        gradient = torch.ones(3 * CHUNK, dtype=torch.bfloat16)
        if forgotten:
            manager.add_gradient(1, 0, gradient, final=True)
            manager.forget_gradient(1, 0)

        def hang(ticket: FakeTicket) -> None:
            if ticket.kind == "get" and ticket.key[0] == 0:  # type: ignore[index]
                raise SwapDeadlineError("late")

        store.before_wait = hang
        for _ in range(2):
            with pytest.raises(SwapDeadlineError):
                check_content(manager, units[:1], 1)
        with pytest.raises(SwapDeadlineError):
            check_content(manager, units[1:], 1)  # the store refuses memory that is in flight
        with pytest.raises(SwapDeadlineError):
            manager.gradients.add(1, 0, gradient, final=True)  # its memory may have been slots while it was idle
        store.before_wait = lambda ticket: None
        manager.gradients.add(1, 0, gradient, final=True)
        check_content(manager, units, 1)
        assert not store.flying
