"""The swap store against a dictionary, with faults; and what happens at its edges."""

from __future__ import annotations

import contextlib
import errno
import gc
import logging
import mmap
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
from aligned_memory import Memory, pattern
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule
from test_aio import in_child

import swap.io.files
from swap import (
    PAST_TRANSFERS,
    Extent,
    Fault,
    FaultAction,
    FaultTarget,
    Mode,
    StoreTicket,
    SwapDeadlineError,
    SwapError,
    SwapFullError,
    SwapStore,
    engines_available,
    wait_all,
)
from swap.io.checksums import granule_for
from swap.io.files import SwapFile, divide_capacity

BLOCK = 4096
MIB = 1 << 20


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in engines_available():
        pytest.skip(f"{name} does not work here")
    return name


@pytest.fixture
def store(engine: str, tmp_path: Path) -> Iterator[SwapStore]:
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine, block_bytes=BLOCK) as opened:
        yield opened


def put(store: SwapStore, key: object, data: bytes) -> None:
    memory = Memory(max(len(data), 1))
    memory.fill(data)
    store.put(key, memory.address, len(data)).wait()


def get(store: SwapStore, key: object) -> bytes:
    length = store.length_of(key)
    memory = Memory(length)
    store.get(key, memory.address, length).wait()
    return memory[0:length]


def descriptors() -> int:
    gc.collect()
    return len(os.listdir("/proc/self/fd"))


def test_past_transfers_ended_when_they_did_whenever_they_are_waited_for(store: SwapStore) -> None:
    memory, begin = Memory(4 * BLOCK), time.monotonic()
    store.put("a", memory.address, 2 * BLOCK).wait()
    tickets = [store.get("a", memory.address, 2 * BLOCK)]
    tickets += [store.get("a", memory.address + 2 * BLOCK, BLOCK, offset=BLOCK)]
    while store.stats().in_flight:
        pass
    over = time.monotonic()
    reads = store.past(writes=False)
    for ticket in tickets:
        ticket.wait()
    assert store.past(writes=False) == reads  # each once
    writes, stats = store.past(writes=True), store.stats()
    assert [(past.key, past.size_bytes) for past in reads] == [("a", 2 * BLOCK), ("a", BLOCK)]
    assert [(past.key, past.size_bytes) for past in writes] == [("a", 2 * BLOCK)]
    assert all(begin <= past.begin_s < past.end_s <= over for past in [*reads, *writes])
    assert writes[0].end_s - writes[0].begin_s == pytest.approx(stats.write_seconds)


def test_past_transfers_went_well_and_are_a_bounded_number(store: SwapStore) -> None:
    many = PAST_TRANSFERS + 5
    memory = Memory(many * BLOCK)
    put(store, "a", b"x" * BLOCK)
    store.inject(Fault(action=FaultAction.FAIL, target=FaultTarget.READS, errno=errno.EIO))
    with pytest.raises(SwapError):
        store.get("a", memory.address, BLOCK).wait()
    assert store.past(writes=False) == []
    wait_all(store.get_many([("a", memory.address + number * BLOCK, BLOCK) for number in range(many)]))
    assert len(store.past(writes=False)) == PAST_TRANSFERS


# ---- against a dictionary ----

SLOT_BLOCKS = 6
SLOTS = 24


@dataclass
class Writing:
    ticket: StoreTicket
    key: int
    data: bytes
    slot: int


@dataclass
class Reading:
    ticket: StoreTicket
    expected: bytes
    slot: int


class StoreMachine(RuleBasedStateMachine):
    """Model: `current` maps keys to bytes; a put changes it only when it was waited for with success.

    The store reaps by itself only when it has no room, so the machine drains before that would happen. Which request
    a fault hits depends on timing, so nothing that is drawn may depend on what happened: numbers are taken modulo.
    """

    @initialize(engine=st.sampled_from(engines_available()), paths=st.integers(1, 2), blocks=st.sampled_from([16, 40]))
    def start(self, engine: str, paths: int, blocks: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.store = SwapStore(
            [self.directory.name] * paths, blocks * BLOCK, engine=engine, block_bytes=BLOCK, queue_depth=4, threads=2
        )
        self.memory = Memory(SLOTS * SLOT_BLOCKS * BLOCK)
        self.free_slots = list(range(SLOTS))
        self.current: dict[int, bytes] = {}
        self.writing: list[Writing] = []  # in the order of their start
        self.reading: list[Reading] = []
        self.faulty = False
        self.seed = 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.drain()
        assert self.store.used_bytes == sum(len(data) for data in self.current.values())
        for key, data in self.current.items():
            assert get(self.store, key) == data
        for key in list(self.current):
            self.store.delete(key)
        assert self.store.free_bytes == self.store.capacity_bytes
        self.store.close()
        assert os.listdir(self.directory.name) == []
        self.directory.cleanup()

    def address(self, slot: int) -> int:
        return self.memory.address + slot * SLOT_BLOCKS * BLOCK

    def finish_write(self, at: int) -> None:
        write = self.writing.pop(at)
        try:
            write.ticket.wait()
        except SwapError:
            assert self.faulty
        else:
            # What was started earlier may not overwrite it any more.
            self.current[write.key] = write.data
            for earlier in [w for w in self.writing[:at] if w.key == write.key]:
                self.forget(earlier)
        self.free_slots.append(write.slot)

    def forget(self, write: Writing) -> None:
        """Wait for a put that cannot take effect any more."""
        self.writing.remove(write)
        with contextlib.suppress(SwapError):
            write.ticket.wait()
        self.free_slots.append(write.slot)

    def finish_read(self, at: int) -> None:
        read = self.reading.pop(at)
        try:
            read.ticket.wait()
        except SwapError:
            assert self.faulty
        else:
            start = read.slot * SLOT_BLOCKS * BLOCK
            assert self.memory[start : start + len(read.expected)] == read.expected
        self.free_slots.append(read.slot)

    def drain(self) -> None:
        self.store.clear_faults()
        while self.writing:
            self.finish_write(0)
        while self.reading:
            self.finish_read(0)
        self.store.drain()
        self.faulty = False

    @rule(
        key=st.integers(0, 4), urgent=st.booleans(), blocks=st.integers(1, SLOT_BLOCKS), less=st.integers(0, BLOCK - 1)
    )
    def put(self, key: int, urgent: bool, blocks: int, less: int) -> None:
        need = blocks * BLOCK
        if not self.free_slots or self.store.free_bytes < need:
            self.drain()
        slot = self.free_slots.pop()
        start = slot * SLOT_BLOCKS * BLOCK
        self.seed += 1
        data = pattern(need, self.seed)
        self.memory[start : start + need] = data
        if self.store.free_bytes < need:
            with pytest.raises(SwapFullError, match=str(need)):
                self.store.put(key, self.address(slot), need - less)
            self.free_slots.append(slot)
            return
        ticket = self.store.put(key, self.address(slot), need - less, urgent=urgent)
        self.writing.append(Writing(ticket, key, data, slot))

    @rule(key=st.integers(0, 4), urgent=st.booleans(), start=st.integers(0, 100), end=st.integers(0, 100))
    def get(self, key: int, urgent: bool, start: int, end: int) -> None:
        if not self.free_slots:
            self.drain()
        if key not in self.current:
            with pytest.raises(KeyError, match="swap store"):
                self.store.get(key, self.memory.address, BLOCK)
            return
        blocks = len(self.current[key]) // BLOCK
        first = start % blocks
        last = first + 1 + end % (blocks - first)
        slot = self.free_slots.pop()
        length = (last - first) * BLOCK
        ticket = self.store.get(key, self.address(slot), length, offset=first * BLOCK, urgent=urgent)
        self.reading.append(Reading(ticket, self.current[key][first * BLOCK : last * BLOCK], slot))

    @rule(which=st.integers(0, 100))
    def wait_for_a_put(self, which: int) -> None:
        if self.writing:
            self.finish_write(which % len(self.writing))

    @rule(which=st.integers(0, 100))
    def wait_for_a_get(self, which: int) -> None:
        if self.reading:
            self.finish_read(which % len(self.reading))

    @rule(key=st.integers(0, 4))
    def delete(self, key: int) -> None:
        pending = [write for write in self.writing if write.key == key]
        if key not in self.current and not pending:
            with pytest.raises(KeyError, match="no such object"):
                self.store.delete(key)
            return
        self.store.delete(key)
        self.current.pop(key, None)
        for write in pending:
            self.forget(write)

    @rule()
    def drain_everything(self) -> None:
        self.drain()
        assert self.store.stats().in_flight == 0

    @rule(
        nth=st.integers(1, 8),
        action=st.sampled_from([FaultAction.FAIL, FaultAction.SHORT]),
        code=st.sampled_from([errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN]),
        what=st.sampled_from(FaultTarget),
    )
    def inject(self, nth: int, action: FaultAction, code: int, what: FaultTarget) -> None:
        self.store.inject(Fault(nth=nth, action=action, errno=code, target=what))
        self.faulty = True

    @invariant()
    def mapping_is_the_models(self) -> None:
        if not hasattr(self, "store"):
            return
        assert set(self.store.keys()) == set(self.current)
        assert len(self.store) == len(self.current)
        for key, data in self.current.items():
            assert self.store.length_of(key) == len(data)

    @invariant()
    def extents_add_up(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        assert store.used_bytes + store.free_bytes == store.capacity_bytes
        seen: set[tuple[int, Extent]] = set()
        for version in store._contents.mapping.working.values():
            assert sum(piece.extent.length for piece in version.pieces) == version.length
            for piece in version.pieces:
                assert (piece.file, piece.extent) not in seen
                seen.add((piece.file, piece.extent))
                for free in store._backing.space.allocators[piece.file].free_ranges():
                    assert piece.extent.end <= free.offset or free.end <= piece.extent.offset


TestStoreMachine = StoreMachine.TestCase


def test_nth_io_fails_until_a_run_passes(engine: str, tmp_path: Path) -> None:
    """Replace 4 objects of 3 blocks, then read them: each is old or new, never mixed."""
    old, new = pattern(3 * BLOCK, 1), pattern(3 * BLOCK, 2)
    memory = Memory(3 * BLOCK)
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine, block_bytes=BLOCK) as store:
        for nth in range(1, 100):
            memory.fill(old)
            for key in range(4):
                store.put(key, memory.address, 3 * BLOCK).wait()
            memory.fill(new)
            store.inject(Fault(nth=nth))
            failed = []
            for key, ticket in enumerate([store.put(key, memory.address, 3 * BLOCK) for key in range(4)]):
                try:
                    ticket.wait()
                except SwapError:
                    failed.append(key)
            reads_failed = 0
            for key in range(4):
                try:
                    assert get(store, key) == (old if key in failed else new)
                except SwapError:
                    reads_failed += 1
            store.clear_faults()
            assert store.used_bytes == 4 * 3 * BLOCK
            # 12 requests write, 12 read; a failed operation may leave requests out that were not issued yet
            assert len(failed) == (1 if nth <= 12 else 0)
            if not failed and not reads_failed:
                break
        else:
            pytest.fail("no run passed")


# ---- copy on write ----


def test_reads_see_the_old_version_until_the_put_is_reaped(store: SwapStore) -> None:
    old, new = pattern(2 * BLOCK, 1), pattern(3 * BLOCK, 2)
    put(store, "a", old)
    memory = Memory(3 * BLOCK)
    memory.fill(new)
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.1, target=FaultTarget.WRITES))
    ticket = store.put("a", memory.address, 3 * BLOCK)
    assert get(store, "a") == old
    assert store.used_bytes == 5 * BLOCK  # both versions
    ticket.wait()
    assert get(store, "a") == new
    assert store.used_bytes == 3 * BLOCK
    ticket.wait()  # again: nothing happens


def test_failed_put_keeps_the_old_version_and_tells_every_time(store: SwapStore) -> None:
    old = pattern(BLOCK, 1)
    put(store, "a", old)
    memory = Memory(BLOCK)
    store.inject(Fault(errno=errno.ENOSPC))
    ticket = store.put("a", memory.address, BLOCK)
    for _ in range(2):
        with pytest.raises(SwapFullError, match=r"ENOSPC.*free space"):
            ticket.wait()
    assert ticket.done()
    assert get(store, "a") == old
    assert store.used_bytes == BLOCK
    store.drain()  # it was reported


def test_drain_reports_a_failure_that_nobody_waited_for(store: SwapStore) -> None:
    memory = Memory(BLOCK)
    store.inject(Fault())
    store.put("a", memory.address, BLOCK)
    with pytest.raises(SwapError, match="EIO"):
        store.drain()
    store.drain()
    assert "a" not in store


def test_last_started_put_wins_whatever_the_order_of_waiting(store: SwapStore) -> None:
    memories = [Memory(BLOCK) for _ in range(3)]
    for seed, memory in enumerate(memories):
        memory.fill(pattern(BLOCK, seed))
    tickets = [store.put("a", memory.address, BLOCK) for memory in memories]
    tickets[1].wait()
    assert get(store, "a") == pattern(BLOCK, 1)
    tickets[0].wait()  # started before: comes too late
    assert get(store, "a") == pattern(BLOCK, 1)
    tickets[2].wait()
    assert get(store, "a") == pattern(BLOCK, 2)
    assert store.used_bytes == BLOCK


def test_old_extent_is_not_reused_while_it_is_read(store: SwapStore) -> None:
    put(store, "a", pattern(BLOCK, 1))
    target = Memory(BLOCK)
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.1, target=FaultTarget.READS))
    read = store.get("a", target.address, BLOCK)
    store.delete("a")
    assert store.used_bytes == BLOCK
    for i in range(20):  # would take the freed extent at once: best fit
        put(store, i, pattern(BLOCK, 100 + i))
    read.wait()
    assert target[0:BLOCK] == pattern(BLOCK, 1)
    assert store.used_bytes == 20 * BLOCK


def test_delete_beats_a_put_in_flight(store: SwapStore) -> None:
    memory = Memory(BLOCK)
    ticket = store.put("a", memory.address, BLOCK)
    store.delete("a")
    ticket.wait()
    assert "a" not in store
    assert store.used_bytes == 0


def test_first_put_in_flight_is_not_there_yet(store: SwapStore) -> None:
    memory = Memory(BLOCK)
    store.put("a", memory.address, BLOCK)
    with pytest.raises(KeyError, match="has not been reaped"):
        store.get("a", memory.address, BLOCK)
    store.drain()
    assert store.length_of("a") == BLOCK


# ---- room ----


def test_full_store_says_the_bytes_and_stays_usable(store: SwapStore) -> None:
    put(store, "a", pattern(40 * BLOCK, 1))
    memory = Memory(25 * BLOCK)
    with pytest.raises(SwapFullError, match=r"102400 bytes.* but .*98304 bytes.* of .*262144 bytes") as caught:
        store.put("b", memory.address, 25 * BLOCK)
    assert caught.value.length_bytes == 25 * BLOCK
    assert "b" not in store
    put(store, "b", pattern(24 * BLOCK, 2))
    assert store.free_bytes == 0
    assert get(store, "a") == pattern(40 * BLOCK, 1)
    assert get(store, "b") == pattern(24 * BLOCK, 2)
    assert store.stats().peak_used_bytes == store.capacity_bytes


def test_put_waits_for_room_that_is_about_to_be_free(store: SwapStore) -> None:
    """Capacity 64: 30 used, 30 in flight for the same key; 30 more fit only when the old version is gone."""
    put(store, "a", pattern(30 * BLOCK, 1))
    memory = Memory(30 * BLOCK)
    memory.fill(pattern(30 * BLOCK, 2))
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.05))
    store.put("a", memory.address, 30 * BLOCK)
    put(store, "b", pattern(30 * BLOCK, 3))
    assert get(store, "a") == pattern(30 * BLOCK, 2)
    assert get(store, "b") == pattern(30 * BLOCK, 3)


@pytest.mark.parametrize("closes", [True, False])
def test_memory_for_granules_stays_where_the_kernel_holds_a_read(engine: str, tmp_path: Path, closes: bool) -> None:
    """A part of a granule is read with all of it: what even closing cannot take back comes to nobody else's memory."""
    size = 64 << 20
    store = SwapStore(tmp_path, size, engine=engine, checksums=True, deadline_s=0.05)
    granule = granule_for(store.alignment)
    put(store, "a", b"\1" * 2 * granule)
    aio, memory = store.aio, Memory(granule)
    native = aio._engine

    class Held:
        """The engine as a kernel leaves it that does not let go of a request."""

        def __getattr__(self, name: str) -> Any:
            return getattr(native, name)

        def close(self, timeout_s: float) -> tuple[bool, bool]:
            return False, False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(aio, "_engine", Held())
        patch.setattr("swap.io.aio._unended", [])
        store.inject(Fault(action=FaultAction.DELAY, delay_s=0.5, target=FaultTarget.READS))
        store.get("a", memory.address, BLOCK, offset=BLOCK)
        if closes:
            with pytest.raises(SwapDeadlineError, match="still held"):
                store.close()
        del store
        gc.collect()
    others = [mmap.mmap(-1, granule + more) for more in (BLOCK, 0, 2 * BLOCK) * 4]
    while native.counters()["in_flight"]:
        pass
    assert not any(any(other[:]) for other in others)
    assert native.counters()["read_errors"] == 0
    native.close(1.0)


def is_interrupted(nth: int, files: tuple[str, ...], call: Callable[[], None]) -> bool:
    """Let Ctrl-C come at the nth call or return of a function of these files; tell whether there are so many."""
    left = nth

    def trace(frame: FrameType, event: str, value: object) -> Any:
        nonlocal left
        if not frame.f_code.co_filename.endswith(files):
            return None
        if event in ("call", "return"):
            left -= 1
            if not left:
                raise KeyboardInterrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        return True
    finally:
        sys.settrace(before)
    return False


def test_a_put_that_is_interrupted_while_it_is_reaped_takes_effect_then(store: SwapStore) -> None:
    files = ("swap/transfers.py", "swap/objects.py", "swap/space/puts.py", "swap/space/mapping.py")
    memory = Memory(BLOCK)
    for nth in range(1, 60):
        memory.fill(pattern(BLOCK, nth))
        ticket = store.put("a", memory.address, BLOCK)
        interrupted = is_interrupted(nth, files, ticket.wait)
        assert interrupted or nth > 12
        ticket.wait()
        assert ticket.done() and get(store, "a") == pattern(BLOCK, nth)
        store.delete("a")
        if not interrupted:
            return
    pytest.fail("no put passed")


@pytest.mark.parametrize("where", ["submit", "write"])
def test_what_an_interrupt_has_let_begin_is_over_when_it_is_raised(store: SwapStore, where: str) -> None:
    """It comes when the drive has the request, and before anybody has the ticket: neither room nor memory is free."""
    memory = Memory(BLOCK)
    memory.fill(pattern(BLOCK, 1))
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.1))
    target: Any = store.aio if where == "submit" else store._transfers
    begin = getattr(target, where)

    def interrupted(*given: Any) -> Any:
        begin(*given)
        raise KeyboardInterrupt

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, where, interrupted)
        with pytest.raises(KeyboardInterrupt):
            store.put("a", memory.address, BLOCK)
    assert store.stats().in_flight == 0
    put(store, "b", pattern(BLOCK, 2))
    assert get(store, "b") == pattern(BLOCK, 2)


def test_put_without_room_behind_a_stuck_transfer_meets_the_deadline(engine: str, tmp_path: Path) -> None:
    memory = Memory(6 * BLOCK)
    store = SwapStore(tmp_path, 10 * BLOCK, engine=engine, deadline_s=0.05)
    store.inject(Fault(action=FaultAction.HANG))
    store.put("a", memory.address, 6 * BLOCK)
    with pytest.raises(SwapDeadlineError, match=r"0.05 s") as caught:
        store.put("b", memory.address, 6 * BLOCK)
    assert "tickets not reaped" in str(caught.value)
    assert "put 'a'" in str(caught.value)
    with pytest.raises(SwapDeadlineError):
        store.drain()
    with pytest.raises(SwapDeadlineError):
        store.close()


def test_scattered_free_space_is_used_to_the_last_block(store: SwapStore) -> None:
    for key in range(64):
        put(store, key, pattern(BLOCK, key))
    for key in range(0, 64, 2):
        store.delete(key)
    put(store, "big", pattern(32 * BLOCK, 99))  # 32 holes of one block
    assert store.free_bytes == 0
    assert get(store, "big") == pattern(32 * BLOCK, 99)
    part = Memory(3 * BLOCK)
    store.get("big", part.address, 3 * BLOCK, offset=7 * BLOCK).wait()
    assert part[0 : 3 * BLOCK] == pattern(32 * BLOCK, 99)[7 * BLOCK : 10 * BLOCK]
    for key in range(1, 64, 2):
        assert get(store, key) == pattern(BLOCK, key)
    memory = Memory(32 * BLOCK)
    store.delete("big")
    store.inject(Fault(nth=20))
    ticket = store.put("big", memory.address, 32 * BLOCK)  # one of the pieces fails: all of them are given back
    with pytest.raises(SwapError, match="EIO"):
        ticket.wait()
    assert store.free_bytes == 32 * BLOCK


def test_objects_spread_over_paths(engine: str, tmp_path: Path) -> None:
    directories = [tmp_path / "a", tmp_path / "b"]
    for directory in directories:
        directory.mkdir()
    with SwapStore(directories, 41 * BLOCK, engine=engine) as store:
        shares = [extents.capacity for extents in store._backing.space.allocators]
        assert sum(shares) == 41 * BLOCK
        assert abs(shares[0] - shares[1]) <= BLOCK  # one file system: halves
        for key in range(20):
            put(store, key, pattern(BLOCK, key))
        assert [extents.used_bytes for extents in store._backing.space.allocators] == [10 * BLOCK, 10 * BLOCK]
        assert all(get(store, key) == pattern(BLOCK, key) for key in range(20))
        assert store.stats().paths == tuple(str(directory) for directory in directories)


def test_shares_follow_free_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    class Space:
        f_frsize = BLOCK

        def __init__(self, blocks: int) -> None:
            self.f_bavail = blocks

    class Stat:
        def __init__(self, device: int) -> None:
            self.st_dev = device

    space = {1010: Space(300), 1011: Space(100), 1012: Space(100)}
    device = {1010: 1, 1011: 2, 1012: 2}  # two paths on the second device share its 100 blocks
    monkeypatch.setattr(swap.io.files.os, "fstatvfs", space.__getitem__)
    real = os.fstat
    monkeypatch.setattr(swap.io.files.os, "fstat", lambda fd: Stat(device[fd]) if fd in device else real(fd))
    files = [SwapFile(fd, f"/{fd}", True, BLOCK) for fd in device]
    assert divide_capacity(files, 40 * BLOCK, BLOCK) == [30 * BLOCK, 5 * BLOCK, 5 * BLOCK]
    assert divide_capacity(files, 400 * BLOCK, BLOCK) == [300 * BLOCK, 50 * BLOCK, 50 * BLOCK]
    # By weights 2 : 1 : 1; then the second device is full and the first takes the rest.
    assert divide_capacity(files, 40 * BLOCK, BLOCK, [2, 1, 1]) == [20 * BLOCK, 10 * BLOCK, 10 * BLOCK]
    assert divide_capacity(files, 300 * BLOCK, BLOCK, [2, 1, 1]) == [200 * BLOCK, 50 * BLOCK, 50 * BLOCK]
    with pytest.raises(SwapFullError, match=r"needed but .*\(1638400 bytes\) free: /1010 .*, /1011 .*, /1012 "):
        divide_capacity(files, 401 * BLOCK, BLOCK)


# ---- creation ----


def test_nothing_in_the_directory(store: SwapStore, tmp_path: Path) -> None:
    put(store, "a", pattern(BLOCK))
    assert os.listdir(tmp_path) == []
    store.close()
    assert os.listdir(tmp_path) == []


def test_more_than_the_disk_is_refused_up_front(tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(SwapFullError, match=r"needed but .* free") as caught:
        SwapStore(tmp_path, 1 << 60)
    assert caught.value.errno == errno.ENOSPC
    assert descriptors() == before


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, SwapFullError, "65536 bytes.*needed.*free space"),
        (errno.EDQUOT, SwapFullError, "quota"),
        (errno.EFBIG, SwapError, "ulimit -f"),
        (errno.EIO, SwapError, "cannot reserve"),
    ],
)
def test_refused_preallocation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, kind: type[SwapError], text: str
) -> None:
    before = descriptors()
    monkeypatch.setattr(swap.io.files, "preallocate", lambda fd, length, first: code)
    with pytest.raises(kind, match=text):
        SwapStore(tmp_path, 65536)
    assert descriptors() == before


def test_file_system_without_preallocation(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(swap.io.files, "preallocate", lambda fd, length, first: errno.EOPNOTSUPP)
    with caplog.at_level(logging.WARNING), SwapStore(tmp_path, 65536) as store:
        put(store, "a", pattern(65536))
        assert get(store, "a") == pattern(65536)
    assert "cannot be reserved" in caplog.text


@pytest.mark.parametrize("mode", [Mode.SCRATCH, Mode.DURABLE])
@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (errno.ENOSPC, SwapFullError, "bytes.*needed.*free space"),
        (errno.EFBIG, SwapError, "ulimit -f"),
        (errno.EIO, SwapError, "cannot reserve"),
    ],
)
def test_length_that_a_file_system_without_preallocation_refuses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, kind: type[SwapError], text: str, mode: Mode
) -> None:
    real = os.ftruncate

    def ftruncate(fd: int, length: int) -> None:
        if length >= 16 * BLOCK:
            raise OSError(code, os.strerror(code))
        real(fd, length)

    monkeypatch.setattr(swap.io.files, "preallocate", lambda fd, length, first: errno.EOPNOTSUPP)
    monkeypatch.setattr(os, "ftruncate", ftruncate)
    with SwapStore(tmp_path, 8 * BLOCK, mode=mode) as store:
        with pytest.raises(kind, match=rf"swap path {tmp_path}.*{text}") as caught:
            store.grow(16 * BLOCK)
        assert (caught.value.errno, caught.value.path, store.capacity_bytes) == (code, str(tmp_path), 8 * BLOCK)
    with pytest.raises(kind, match=text):
        SwapStore(tmp_path, 16 * BLOCK, mode=mode)


@pytest.mark.parametrize("mode", Mode)
def test_file_system_that_wants_room_for_all_that_is_reserved(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode
) -> None:
    """XFS: less is free than the files have. A store grows by less, and by no more; a run is opened again."""
    room, real = [64 * BLOCK], swap.io.files.preallocate

    def preallocate_as_xfs_does(fd: int, length: int, first: int = 0) -> int:
        before = os.fstat(fd).st_blocks
        code = errno.ENOSPC if length - first > room[0] else real(fd, length, first)
        room[0] -= (os.fstat(fd).st_blocks - before) * 512
        return code

    monkeypatch.setattr(swap.io.files, "preallocate", preallocate_as_xfs_does)
    with SwapStore(tmp_path, 40 * BLOCK, mode=mode) as store:
        put(store, "a", pattern(30 * BLOCK))
        if mode is not Mode.SCRATCH:
            store.commit()
        store.grow(60 * BLOCK)
        assert 0 <= room[0] <= 4 * BLOCK
        with pytest.raises(SwapFullError, match=r"32768 bytes\) needed"):
            store.grow(68 * BLOCK)
        put(store, "b", pattern(20 * BLOCK))
        assert (get(store, "a"), get(store, "b")) == (pattern(30 * BLOCK), pattern(20 * BLOCK))
    if mode is not Mode.DURABLE:
        return
    with SwapStore(tmp_path, 60 * BLOCK, mode=mode) as store:
        assert get(store, "a") == pattern(30 * BLOCK)
    with pytest.raises(SwapFullError):
        SwapStore(tmp_path, 68 * BLOCK, mode=mode)
    with open(tmp_path / "swap.data", "r+b") as file:  # a hole is no room
        os.truncate(file.fileno(), 50 * BLOCK)
        os.truncate(file.fileno(), 60 * BLOCK)
    with pytest.raises(SwapFullError, match=r"245760 bytes\) needed"):
        SwapStore(tmp_path, 60 * BLOCK, mode=mode)


def fill_second(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the drive have no room when a file is lengthened for the second time."""
    calls, real = [], swap.io.files.preallocate

    def preallocate_once(fd: int, length: int, first: int = 0) -> int:
        calls.append(length)
        return errno.ENOSPC if len(calls) == 2 else real(fd, length, first)

    monkeypatch.setattr(swap.io.files, "preallocate", preallocate_once)


@pytest.mark.parametrize("mode", Mode)
def test_growing_without_room_on_one_path_keeps_none_of_another(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, mode: Mode
) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    with SwapStore(paths, 40 * BLOCK, mode=mode, weights=[1, 1]) as store:
        put(store, "a", pattern(BLOCK))
        fill_second(monkeypatch)
        with pytest.raises(SwapFullError):
            store.grow(80 * BLOCK)
        assert [os.fstat(file.fd).st_size for file in store._backing.files] == [20 * BLOCK] * 2
        store.grow(80 * BLOCK)
        put(store, "b", pattern(70 * BLOCK))
        assert (get(store, "a"), get(store, "b")) == (pattern(BLOCK), pattern(70 * BLOCK))


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(SwapError, match="ENOENT.*create the directory") as caught:
        SwapStore(tmp_path / "none", MIB)
    assert caught.value.path == str(tmp_path / "none")


def test_file_instead_of_directory(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(SwapError, match="ENOTDIR.*not a file"):
        SwapStore(tmp_path / "file", MIB)


def refuse_open(monkeypatch: pytest.MonkeyPatch, flag: int, code: int) -> None:
    """Let os.open fail with `code` whenever all bits of `flag` are asked for."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & flag == flag:
            raise OSError(code, os.strerror(code))
        return real(path, flags, *rest)

    monkeypatch.setattr(swap.io.files.os, "open", refusing)


@pytest.mark.parametrize(
    ("code", "text"), [(errno.EACCES, "writable"), (errno.EROFS, "mounted for writing"), (errno.EMFILE, "ulimit -n")]
)
def test_unwritable_directory(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, code: int, text: str) -> None:
    refuse_open(monkeypatch, os.O_RDWR, code)
    with pytest.raises(SwapError, match=text):
        SwapStore(tmp_path, MIB)


def test_second_path_missing_leaves_no_descriptor(tmp_path: Path) -> None:
    before = descriptors()
    with pytest.raises(SwapError, match="ENOENT"):
        SwapStore([tmp_path, tmp_path / "none"], MIB)
    assert descriptors() == before


def test_without_direct_io_the_page_cache_is_used_and_said(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str, caplog: pytest.LogCaptureFixture
) -> None:
    refuse_open(monkeypatch, os.O_DIRECT, errno.EINVAL)
    with caplog.at_level(logging.WARNING), SwapStore(tmp_path, MIB, engine=engine) as store:
        assert not store.direct
        assert not store.stats().direct
        put(store, "a", pattern(10 * BLOCK))
        assert get(store, "a") == pattern(10 * BLOCK)
    assert [r.message for r in caplog.records if "O_DIRECT" in r.message] != []


def test_without_nameless_files_the_name_is_removed_at_once(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: str
) -> None:
    refuse_open(monkeypatch, os.O_TMPFILE, errno.EOPNOTSUPP)
    with SwapStore(tmp_path, MIB, engine=engine) as store:
        assert os.listdir(tmp_path) == []
        put(store, "a", pattern(10 * BLOCK))
        assert get(store, "a") == pattern(10 * BLOCK)


def test_without_nameless_files_and_direct_io_no_name_is_left(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """The system has created the file when it refuses direct I/O."""
    real = os.open

    def refusing(path: Any, flags: int, *rest: Any) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "no nameless files")
        if flags & os.O_DIRECT:
            os.close(real(path, flags & ~os.O_DIRECT, *rest))
            raise OSError(errno.EINVAL, "no direct I/O")
        return real(path, flags, *rest)

    monkeypatch.setattr(swap.io.files.os, "open", refusing)
    with SwapStore(tmp_path, MIB) as store:
        assert not store.direct and os.listdir(tmp_path) == []


def test_file_system_in_memory(engine: str, caplog: pytest.LogCaptureFixture) -> None:
    if not os.path.isdir("/dev/shm"):
        pytest.skip("no /dev/shm")
    with tempfile.TemporaryDirectory(dir="/dev/shm") as directory, caplog.at_level(logging.WARNING):
        with SwapStore(directory, MIB, engine=engine) as store:
            assert not store.direct
            put(store, "a", pattern(10 * BLOCK))
            assert get(store, "a") == pattern(10 * BLOCK)
        assert "memory" in caplog.text


def test_direct_on_this_file_system(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600))
    except OSError as error:
        pytest.skip(f"no O_DIRECT on the file system of {tmp_path}: {error}")
    with SwapStore(tmp_path, MIB + 1) as store:
        assert store.alignment >= 4096
        assert store.capacity_bytes == MIB  # rounded down: never more than allowed


@pytest.mark.parametrize("capacity", [0, -1, 4095])
def test_impossible_capacity(tmp_path: Path, capacity: int) -> None:
    before = descriptors()
    with pytest.raises(ValueError, match="capacity_bytes"):
        SwapStore(tmp_path, capacity)
    with pytest.raises(ValueError, match="paths"):
        SwapStore([], MIB)
    assert descriptors() == before


# ---- bad arguments ----


def test_bad_arguments_are_refused_and_change_nothing(store: SwapStore) -> None:
    memory = Memory(2 * BLOCK)
    put(store, "a", pattern(BLOCK))
    for address, length in [(memory.address + 1, BLOCK), (memory.address, 0), (memory.address, -1), (0, BLOCK)]:
        with pytest.raises(ValueError, match="expected"):
            store.put("b", address, length)
    for length, offset in [(BLOCK, 1), (2 * BLOCK, 0), (BLOCK, BLOCK), (0, 0), (BLOCK, -BLOCK)]:
        with pytest.raises(ValueError, match="range inside 4096 bytes"):
            store.get("a", memory.address, length, offset=offset)
    with pytest.raises(ValueError, match="multiple"):
        store.get("a", memory.address + 8, BLOCK)
    for call in (store.length_of, store.delete):
        with pytest.raises(KeyError):
            call("nothing")
    assert store.used_bytes == BLOCK
    assert store.keys() == ["a"]


# ---- the world interferes ----


def test_truncated_file_is_an_error_where_the_data_is_needed(store: SwapStore) -> None:
    put(store, "a", pattern(4 * BLOCK))
    os.ftruncate(store._backing.files[0].fd, BLOCK)
    memory = Memory(4 * BLOCK)
    ticket = store.get("a", memory.address, 4 * BLOCK)
    with pytest.raises(SwapError, match="ENODATA.*truncated") as caught:
        ticket.wait()
    assert caught.value.path == store.paths[0]
    assert "a" in store


def test_several_threads(store: SwapStore) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            for turn in range(15):
                put(store, index, pattern(4 * BLOCK, index * 100 + turn))
                assert get(store, index) == pattern(4 * BLOCK, index * 100 + turn)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert store.used_bytes == 16 * BLOCK


def test_stuck_transfer_meets_the_deadline_and_close_does_not_hang(engine: str, tmp_path: Path) -> None:
    memory = Memory(BLOCK)
    before = descriptors()
    store = SwapStore(tmp_path, MIB, engine=engine, deadline_s=0.05)
    put(store, "a", pattern(BLOCK))
    store.inject(Fault(action=FaultAction.HANG))
    ticket = store.get("a", memory.address, BLOCK)
    with pytest.raises(SwapDeadlineError, match="swap store: 1 objects"):
        ticket.wait()
    put(store, "b", pattern(BLOCK))  # the rest goes on
    with pytest.raises(SwapDeadlineError):
        store.close()
    store.close()
    with pytest.raises(SwapError, match="closed"):
        store.put("a", memory.address, BLOCK)
    with pytest.raises(SwapError, match="ECANCELED"):
        ticket.wait()
    assert descriptors() == before


def test_close_lets_puts_take_effect_first(engine: str, tmp_path: Path) -> None:
    memory = Memory(BLOCK)
    store = SwapStore(tmp_path, MIB, engine=engine)
    ticket = store.put("a", memory.address, BLOCK)
    store.close()
    ticket.wait()
    assert store.keys() == ["a"]


def test_dropped_store_gives_everything_back(engine: str, tmp_path: Path) -> None:
    before = descriptors()
    store = SwapStore(tmp_path, MIB, engine=engine)
    memory = Memory(BLOCK)
    store.put("a", memory.address, BLOCK).wait()
    del store
    gc.collect()
    assert descriptors() == before


def test_forked_child_gets_a_clear_error_and_keeps_no_space(store: SwapStore) -> None:
    put(store, "a", pattern(BLOCK))
    fd = store._backing.files[0].fd
    memory = Memory(BLOCK)

    def child() -> None:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
        with pytest.raises(SwapError, match="fork"):
            store.get("a", memory.address, BLOCK)
        with pytest.raises(SwapError, match="fork"):
            store.drain()
        store.close()

    assert in_child(child) == 0
    assert get(store, "a") == pattern(BLOCK)


def test_forked_child_has_no_ring(store: SwapStore) -> None:
    """A mapping of the ring holds the files and the memory that are registered with it."""
    rings = [line for line in Path("/proc/self/maps").read_text().splitlines() if "io_uring" in line]
    assert rings or store.engine != "io_uring"

    def child() -> None:
        assert "io_uring" not in Path("/proc/self/maps").read_text()

    assert in_child(child) == 0


@pytest.mark.parametrize("hang", [False, True])
def test_interpreter_exit_with_a_transfer_in_flight(engine: str, tmp_path: Path, hang: bool) -> None:
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from aligned_memory import Memory
        from swap import Fault, FaultAction, SwapStore
        store = SwapStore({str(tmp_path)!r}, 1 << 24, engine={engine!r}, deadline_s=0.2)
        if {hang}:
            store.inject(Fault(action=FaultAction.HANG))
        memory = Memory(1 << 23)
        store.put("a", memory.address, 1 << 23)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert os.listdir(tmp_path) == []


def test_killed_process_leaves_nothing(engine: str, tmp_path: Path) -> None:
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from aligned_memory import Memory
        from swap import SwapStore
        store = SwapStore({str(tmp_path)!r}, 1 << 24, engine={engine!r})
        memory = Memory(1 << 23)
        store.put("a", memory.address, 1 << 23)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    result = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=60)
    assert result.returncode == -9
    assert os.listdir(tmp_path) == []


def test_stats_and_dump(store: SwapStore) -> None:
    assert store.register_buffer((memory := Memory(16 * BLOCK)).address, 16 * BLOCK) in (True, False)
    put(store, "a", pattern(3 * BLOCK))
    store.get("a", memory.address, 2 * BLOCK).wait()
    store.unregister_buffer(memory.address)
    stats = store.stats()
    assert (stats.writes, stats.written_bytes, stats.reads, stats.read_bytes) == (1, 3 * BLOCK, 1, 2 * BLOCK)
    assert stats.read_seconds > 0
    assert stats.write_seconds > 0
    assert 0 < stats.read_latency.p50_s <= stats.read_latency.max_s
    assert 0 < stats.write_latency.p50_s <= stats.write_latency.max_s
    assert stats.peak_in_flight == 1
    assert stats.queue_depth == 0
    assert 1 <= stats.peak_queue_depth <= 3  # a put of three requests
    assert stats.engine == store.engine
    assert (stats.in_flight, stats.used_bytes, stats.peak_used_bytes) == (0, 3 * BLOCK, 3 * BLOCK)
    assert "1 objects" in store.dump()
    assert f"engine {store.engine}" in store.dump()


# ---- many objects at once ----


@pytest.mark.parametrize("group", [1, 4, 64])
def test_put_many_and_get_many(store: SwapStore, group: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects of 1, 2, 3... blocks; of two puts of one key the last wins, however many are started at a time."""
    monkeypatch.setattr("swap.objects.GROUP", group)
    sizes = [1, 2, 3, 4, 5]
    memory = Memory(2 * sum(sizes) * BLOCK)
    items, data, at = [], [], 0
    for index, blocks in enumerate(sizes):
        data.append(pattern(blocks * BLOCK, seed=index))
        memory[at : at + blocks * BLOCK] = data[-1]
        items.append((index if index else "twice", memory.address + at, blocks * BLOCK))
        at += blocks * BLOCK
    items.append(("twice", *items[1][1:]))
    wait_all(store.put_many(items))
    assert get(store, "twice") == data[1]
    targets = [(key, address + at, length) for key, address, length in items[1:5]]
    wait_all(store.get_many(targets, urgent=True))
    assert memory[at + BLOCK : 2 * at] == memory[BLOCK:at]
    assert (store.put_many([]), store.get_many([])) == ([], [])
    assert store.used_bytes == (2 + 2 + 3 + 4 + 5) * BLOCK  # the first "twice" has given way


def test_an_urgent_put_overtakes_those_that_wait(engine: str, tmp_path: Path) -> None:
    """One request at a time. The first is late, the urgent one is the second, and what comes third never ends."""
    memory = Memory(21 * BLOCK)
    memory[20 * BLOCK :] = pattern(BLOCK, seed=1)
    options: dict[str, Any] = {"engine": engine, "queue_depth": 1, "threads": 1, "block_bytes": BLOCK}
    with pytest.raises(SwapDeadlineError), SwapStore(tmp_path, 64 * BLOCK, deadline_s=0.5, **options) as store:
        store.inject(Fault(action=FaultAction.DELAY, delay_s=0.3))
        store.inject(Fault(nth=3, action=FaultAction.HANG, forever=True))
        normal = [store.put(key, memory.address + key * BLOCK, BLOCK) for key in range(20)]
        urgent = store.put("urgent", memory.address + 20 * BLOCK, BLOCK, urgent=True)
        urgent.wait(10)
        assert [ticket.done() for ticket in normal[1:]] == [False] * 19
        assert "urgent" in store and 19 not in store


def test_put_many_is_all_or_nothing(store: SwapStore) -> None:
    """64 blocks: 40 and 30 do not fit together; 40 and 24 do."""
    memory = Memory(64 * BLOCK)
    with pytest.raises(SwapFullError, match="puts of 2 objects need"):
        store.put_many([("a", memory.address, 40 * BLOCK), ("b", memory.address, 30 * BLOCK)])
    with pytest.raises(ValueError, match="more than 0"):
        store.put_many([("a", memory.address, BLOCK), ("b", memory.address, 0)])
    assert (len(store), store.used_bytes, store.stats().in_flight) == (0, 0, 0)
    wait_all(store.put_many([("a", memory.address, 40 * BLOCK), ("b", memory.address, 24 * BLOCK)]))
    with pytest.raises(KeyError):
        store.get_many([("a", memory.address, BLOCK), ("c", memory.address, BLOCK)])
    assert store.used_bytes == 64 * BLOCK
    store.delete("a")
    store.delete("b")
    assert store.used_bytes == 0  # nothing is held by the get that did not start


def test_an_engine_that_refuses_the_rest_of_a_batch_leaves_nothing_in_flight(
    store: SwapStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Puts start two at a time, and the second group does not: the first two are over, the others never were."""
    memory = Memory(6 * BLOCK)
    items = [(key, memory.address + key * BLOCK, BLOCK) for key in range(6)]
    submit, calls = store._aio.submit, []

    def submit_once(jobs: Any) -> Any:
        calls.append(len(jobs))
        if len(calls) == 2:
            raise SwapError("it is closed")
        return submit(jobs)

    monkeypatch.setattr("swap.objects.GROUP", 2)
    with monkeypatch.context() as patched:
        patched.setattr(store._aio, "submit", submit_once)
        with pytest.raises(SwapError, match="it is closed"):
            store.put_many(items)
    assert calls == [2, 2]
    assert store.keys() == [0, 1] and store.used_bytes == 2 * BLOCK and store.stats().in_flight == 0
    wait_all(store.put_many(items))
    assert len(store) == 6


def test_each_put_of_many_fails_for_itself(store: SwapStore) -> None:
    """Puts of one block are one I/O each: the Nth fails, whichever that is, and the others take effect."""
    memory = Memory(8 * BLOCK)
    for nth in range(1, 10):
        for kept in store.keys():  # noqa: SIM118  # a store is no mapping
            store.delete(kept)
        store.inject(Fault(nth=nth, target=FaultTarget.WRITES, errno=errno.EIO))
        tickets = store.put_many([(key, memory.address + key * BLOCK, BLOCK) for key in range(8)])
        if nth <= 8:
            with pytest.raises(SwapError, match="EIO"):
                wait_all(tickets)
        else:
            wait_all(tickets)
        assert len(store) == store.used_bytes // BLOCK == (7 if nth <= 8 else 8)
        store.clear_faults()


def test_wait_all_gives_one_deadline_to_all_and_the_first_failure(store: SwapStore) -> None:
    memory = Memory(4 * BLOCK)
    store.inject(Fault(nth=2, action=FaultAction.DELAY, delay_s=0.3))
    tickets = [store.put(key, memory.address, BLOCK) for key in range(3)]
    with pytest.raises(SwapDeadlineError):
        wait_all(tickets, 0.0)
    wait_all(tickets)
    store.clear_faults()
    tickets = [store.put("good", memory.address, BLOCK)]
    store.drain()
    for key, code in (("first", errno.EIO), ("second", errno.ENOSPC)):
        store.inject(Fault(errno=code))
        tickets.append(store.put(key, memory.address, BLOCK))
        with contextlib.suppress(SwapError):
            store.drain()
        store.clear_faults()
    with pytest.raises(SwapError, match="EIO"):
        wait_all(tickets)


def test_get_from_the_snapshot_of_a_store_that_is_gone(engine: str, tmp_path: Path) -> None:
    """With checksums, whose threads have ended with the engine."""
    script = f"""
        import sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from aligned_memory import Memory
        from swap import Mode, SwapError, SwapStore
        memory = Memory({BLOCK})
        store = SwapStore({str(tmp_path)!r}, {MIB}, engine={engine!r}, mode=Mode.DURABLE)
        store.put("a", memory.address, {BLOCK}).wait()
        store.commit()
        snapshot = store.snapshot()
        del store
        try:
            snapshot.get("a", memory.address, {BLOCK})
        except SwapError as error:
            print(error)
        del snapshot
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (0, "") and "closed" in done.stdout
