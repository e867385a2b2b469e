"""Commit, abort and snapshots against dictionaries; checksums of a store."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aligned_memory import Memory, pattern
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from test_store import BLOCK, get, put
from test_store import engine as engine  # a fixture

from swap import (
    Fault,
    FaultAction,
    FaultTarget,
    Mode,
    Snapshot,
    StoreTicket,
    SwapCorruptError,
    SwapDeadlineError,
    SwapError,
    SwapFullError,
    SwapStore,
    engines_available,
)
from swap.io.checksums import GRANULE_BYTES
from swap.objects import Objects

MIB = 1 << 20


@pytest.fixture
def store(engine: str, tmp_path: Path) -> Iterator[SwapStore]:
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine, block_bytes=BLOCK, mode=Mode.EXPLICIT) as opened:
        yield opened


def get_from(snapshot: Snapshot, key: object) -> bytes:
    memory = Memory(snapshot.length_of(key))
    snapshot.get(key, memory.address, memory.size).wait()
    return memory[0 : memory.size]


class CommitMachine(RuleBasedStateMachine):
    """Model: a dictionary each for what gets see, what is committed, and every snapshot. Keys 0 to 4."""

    @initialize(engine=st.sampled_from(engines_available()), checksums=st.booleans(), paths=st.integers(1, 3))
    def start(self, engine: str, checksums: bool, paths: int) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.store = SwapStore(
            [self.directory.name] * paths,
            60 * BLOCK,
            engine=engine,
            block_bytes=BLOCK,
            queue_depth=4,
            threads=2,
            mode=Mode.EXPLICIT,
            checksums=checksums,
        )
        self.working: dict[int, bytes] = {}
        self.committed: dict[int, bytes] = {}
        self.snapshots: list[tuple[Snapshot, dict[int, bytes]]] = []
        self.failed: set[int] = set()
        self.seed = 0

    def teardown(self) -> None:
        if not hasattr(self, "store"):
            return
        self.check_contents()
        for snapshot, _ in self.snapshots:
            snapshot.release()
        self.store.abort()
        for key in list(self.committed):
            self.store.delete(key)
        self.store.commit()
        assert self.store.free_bytes == self.store.capacity_bytes
        self.store.close()
        self.directory.cleanup()

    @rule(key=st.integers(0, 4), blocks=st.integers(1, 4), fails=st.booleans())
    def put(self, key: int, blocks: int, fails: bool) -> None:
        self.seed += 1
        data = pattern(blocks * BLOCK, self.seed)
        if fails:
            self.store.inject(Fault(target=FaultTarget.WRITES))
        try:
            put(self.store, key, data)
        except SwapFullError:
            assert self.store.free_bytes < len(data)
        except SwapError:
            assert fails
            self.failed.add(key)
        else:
            assert not fails
            self.working[key] = data
            self.failed.discard(key)
        self.store.clear_faults()

    @rule(key=st.integers(0, 4))
    def delete(self, key: int) -> None:
        if key not in self.working and key not in self.failed:
            with pytest.raises(KeyError):
                self.store.delete(key)
            return
        self.store.delete(key)
        self.working.pop(key, None)
        self.failed.discard(key)

    @rule()
    def commit(self) -> None:
        if self.failed:
            with pytest.raises(SwapError, match="expected every put since the last one to succeed"):
                self.store.commit()
            return
        self.store.commit()
        self.committed = dict(self.working)
        assert not self.store.uncommitted

    @rule(put_in_flight=st.booleans())
    def abort(self, put_in_flight: bool) -> None:
        memory = Memory(BLOCK)
        ticket: StoreTicket | None = None
        if put_in_flight and self.store.free_bytes >= BLOCK:
            ticket = self.store.put(0, memory.address, BLOCK)
        self.store.abort()
        if ticket is not None:
            ticket.wait()
        self.working = dict(self.committed)
        self.failed.clear()
        assert not self.store.uncommitted

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule()
    def snapshot(self) -> None:
        self.snapshots.append((self.store.snapshot(), dict(self.committed)))

    @precondition(lambda self: len(self.snapshots) < 3)
    @rule(keys=st.sets(st.integers(0, 4)))
    def snapshot_of_keys(self, keys: set[int]) -> None:
        if not keys <= set(self.working):
            with pytest.raises(KeyError):  # and nothing is held
                self.store.snapshot(keys)
            return
        self.snapshots.append((self.store.snapshot(keys), {key: self.working[key] for key in keys}))

    @precondition(lambda self: self.snapshots)
    @rule(which=st.integers(0, 2))
    def release(self, which: int) -> None:
        snapshot, _ = self.snapshots.pop(which % len(self.snapshots))
        snapshot.release()
        snapshot.release()  # nothing happens
        assert len(snapshot) == 0

    @rule()
    def check_contents(self) -> None:
        for key, data in self.working.items():
            assert get(self.store, key) == data
        for snapshot, contents in self.snapshots:
            assert {key: get_from(snapshot, key) for key in snapshot.keys()} == contents  # noqa: SIM118

    @invariant()
    def mapping_and_extents_are_the_models(self) -> None:
        if not hasattr(self, "store"):
            return
        store = self.store
        assert set(store.keys()) == set(self.working)
        # Equal contents are one version: patterns differ with every put.
        versions = {*self.working.values(), *self.committed.values()}
        for _, contents in self.snapshots:
            versions |= set(contents.values())
        assert store.used_bytes == sum(len(version) for version in versions)


TestCommitMachine = CommitMachine.TestCase


def test_nothing_is_committed_before_commit(store: SwapStore) -> None:
    put(store, "a", pattern(BLOCK, 1))
    put(store, "b", pattern(BLOCK, 2))
    with store.snapshot() as before:
        assert before.keys() == []
        store.commit()
        assert before.keys() == []
    put(store, "a", pattern(BLOCK, 3))
    store.delete("b")
    assert store.keys() == ["a"]  # gets see what is not committed
    store.abort()
    assert get(store, "a") == pattern(BLOCK, 1)
    assert get(store, "b") == pattern(BLOCK, 2)
    with pytest.raises(KeyError, match="snapshot"):
        before.length_of("a")


def test_commit_waits_for_puts_in_flight(store: SwapStore) -> None:
    memory = Memory(BLOCK)
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.05))
    store.put("a", memory.address, BLOCK)
    store.commit()
    store.abort()
    assert get(store, "a") == bytes(BLOCK)


def test_commit_behind_a_stuck_put_meets_the_deadline(engine: str, tmp_path: Path) -> None:
    memory = Memory(BLOCK)
    store = SwapStore(tmp_path, 1 << 16, engine=engine, mode=Mode.EXPLICIT, deadline_s=0.05)
    put(store, "a", pattern(BLOCK))
    store.inject(Fault(action=FaultAction.HANG))
    store.put("b", memory.address, BLOCK)
    with pytest.raises(SwapDeadlineError, match="put 'b'"):
        store.commit()
    store.abort()
    assert store.keys() == []
    with pytest.raises(SwapDeadlineError):
        store.close()


def test_failed_put_keeps_its_transaction_from_being_committed(store: SwapStore) -> None:
    put(store, "a", pattern(BLOCK, 1))
    store.commit()
    put(store, "a", pattern(BLOCK, 2))
    store.inject(Fault(errno=errno.ENOSPC, target=FaultTarget.WRITES))
    with pytest.raises(SwapFullError):
        put(store, "b", pattern(BLOCK, 3))
    for _ in range(2):
        with pytest.raises(SwapError, match="put 'b' failed.*ENOSPC.*put or delete it again, or abort"):
            store.commit()
    put(store, "b", pattern(BLOCK, 4))
    store.commit()
    store.abort()
    assert (get(store, "a"), get(store, "b")) == (pattern(BLOCK, 2), pattern(BLOCK, 4))


def test_an_earlier_put_does_not_make_up_for_a_later_one_that_failed(store: SwapStore) -> None:
    """Two puts of a key in flight: the second one fails, and is reaped first, as `wait_all` does."""
    put(store, "a", pattern(BLOCK, 1))
    store.commit()
    older = Memory(BLOCK)
    older.fill(pattern(BLOCK, 2))
    for remedy in ("put", "delete", "abort"):
        store.inject(Fault(nth=2, target=FaultTarget.WRITES))
        first, second = (store.put("a", older.address, BLOCK) for _ in range(2))
        with pytest.raises(SwapError, match="EIO"):
            second.wait()
        first.wait()
        for _ in range(2):
            with pytest.raises(SwapError, match="put 'a' failed.*put or delete it again, or abort"):
                store.commit()
        if remedy == "put":
            put(store, "a", pattern(BLOCK, 3))
        elif remedy == "delete":
            store.delete("a")
        else:
            store.abort()
        store.commit()
    assert store.keys() == []


def test_commit_without_waiting_reports_the_failure_itself(store: SwapStore) -> None:
    memory = Memory(BLOCK)
    store.inject(Fault(target=FaultTarget.WRITES))
    store.put("a", memory.address, BLOCK)
    with pytest.raises(SwapError, match="EIO"):
        store.commit()
    store.abort()
    store.commit()


def test_scratch_store_has_no_commits_but_snapshots(engine: str, tmp_path: Path) -> None:
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine) as store:
        for call in (store.commit, store.abort):
            with pytest.raises(ValueError, match="mode=Mode.EXPLICIT"):
                call()
        put(store, "a", pattern(BLOCK, 1))
        with store.snapshot() as snapshot:
            put(store, "a", pattern(BLOCK, 2))
            assert store.used_bytes == 2 * BLOCK
            assert get_from(snapshot, "a") == pattern(BLOCK, 1)
        assert store.used_bytes == BLOCK
        assert get(store, "a") == pattern(BLOCK, 2)


def test_read_of_a_snapshot_outlives_it(store: SwapStore) -> None:
    put(store, "a", pattern(BLOCK, 1))
    store.commit()
    snapshot = store.snapshot()
    store.delete("a")
    store.commit()
    memory = Memory(BLOCK)
    store.inject(Fault(action=FaultAction.DELAY, delay_s=0.05))
    ticket = snapshot.get("a", memory.address, BLOCK)
    snapshot.release()
    assert store.used_bytes == BLOCK
    ticket.wait()
    assert memory[0:BLOCK] == pattern(BLOCK, 1)
    assert store.used_bytes == 0


def test_get_from_a_snapshot_that_is_released_meanwhile(store: SwapStore, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another thread, when the get has begun."""
    put(store, "a", pattern(BLOCK, 1))
    store.commit()
    snapshot = store.snapshot()
    put(store, "a", pattern(BLOCK, 2))
    store.commit()
    memory, read = Memory(BLOCK), Objects.read

    def read_late(*given: Any, **more: Any) -> Any:
        snapshot.release()
        return read(*given, **more)

    monkeypatch.setattr(Objects, "read", read_late)
    with pytest.raises(KeyError, match="snapshot"):
        snapshot.get("a", memory.address, BLOCK).wait()
    monkeypatch.undo()
    assert store.used_bytes == BLOCK and get(store, "a") == pattern(BLOCK, 2)


# ---- checksums ----


def damage(store: SwapStore, key: object, at: int) -> None:
    """Invert a byte of an object in its file."""
    start = 0
    for piece in store._contents.mapping.working[key].pieces:
        if start <= at < start + piece.extent.length:
            block = Memory(BLOCK)
            where = piece.extent.offset + (at - start) // BLOCK * BLOCK
            fd = store._backing.files[piece.file].fd
            os.preadv(fd, [block.map], where)
            block[at % BLOCK : at % BLOCK + 1] = bytes([block[at % BLOCK : at % BLOCK + 1][0] ^ 0xFF])
            os.pwritev(fd, [block.map], where)
        start += piece.extent.length


@pytest.mark.parametrize("mode", [Mode.SCRATCH, Mode.EXPLICIT])
def test_damaged_bytes_are_refused_where_they_are_needed(engine: str, tmp_path: Path, mode: Mode) -> None:
    size = 3 * GRANULE_BYTES + BLOCK
    with SwapStore(tmp_path, 4 * MIB, engine=engine, checksums=True, mode=mode) as store:
        assert store.checksums
        data = pattern(size)
        put(store, "a", data)
        damage(store, "a", 2 * GRANULE_BYTES + 5)
        offset = store._contents.mapping.working["a"].pieces[0].extent.offset + 2 * GRANULE_BYTES
        with pytest.raises(SwapCorruptError, match="expected checksum 0x.* but got 0x") as caught:
            get(store, "a")
        assert (caught.value.path, caught.value.offset_bytes, caught.value.length_bytes) == (
            str(tmp_path),
            offset,
            GRANULE_BYTES,
        )
        memory = Memory(2 * GRANULE_BYTES)
        store.get("a", memory.address, 2 * GRANULE_BYTES).wait()  # the rest is intact
        assert memory[0 : 2 * GRANULE_BYTES] == data[: 2 * GRANULE_BYTES]
        for first in (2 * GRANULE_BYTES - BLOCK, 2 * GRANULE_BYTES + BLOCK):  # any part of the damaged granule
            with pytest.raises(SwapCorruptError):
                store.get("a", memory.address, 2 * BLOCK, offset=first).wait()


def test_any_part_can_be_read_with_checksums(engine: str, tmp_path: Path) -> None:
    """Blocks at, before and after every edge of a granule, over pieces of scattered extents."""
    blocks = GRANULE_BYTES // BLOCK
    with SwapStore(tmp_path, 8 * MIB, engine=engine, checksums=True) as store:
        for key in range(8):
            put(store, key, pattern(MIB, key))
        for key in range(0, 8, 2):
            store.delete(key)
        size = 3 * MIB + 5 * BLOCK
        data = pattern(size, 99)
        put(store, "a", data)  # four holes of 1 MiB
        assert len(store._contents.mapping.working["a"].pieces) == 4
        memory = Memory(size)
        edges = [0, 1, blocks - 1, blocks, blocks + 1, 4 * blocks, 9 * blocks + 3, 12 * blocks + 4, 12 * blocks + 5]
        for first in edges:
            for last in edges:
                if first < last:
                    memory.fill(b"")
                    length = (last - first) * BLOCK
                    store.get("a", memory.address, length, offset=first * BLOCK).wait()
                    assert memory[0:length] == data[first * BLOCK : last * BLOCK]
                    assert memory[length:size] == bytes(size - length)


def test_lost_write_is_found(engine: str, tmp_path: Path) -> None:
    with SwapStore(tmp_path, 4 * MIB, engine=engine, checksums=True) as store:
        store.inject(Fault(action=FaultAction.LIE, target=FaultTarget.WRITES))
        put(store, "a", pattern(MIB))
        with pytest.raises(SwapCorruptError):
            get(store, "a")
        put(store, "a", pattern(MIB, 2))
        assert get(store, "a") == pattern(MIB, 2)


def test_scratch_store_has_no_checksums_unless_asked(engine: str, tmp_path: Path) -> None:
    with SwapStore(tmp_path, 4 * MIB, engine=engine) as store:
        assert not store.checksums
        put(store, "a", pattern(MIB))
        damage(store, "a", 5)
        assert get(store, "a") != pattern(MIB)
