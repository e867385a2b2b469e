"""Durable stores: what is there after closing, killing, cutting the power, and damage."""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TypeVar

import pytest
from aligned_memory import Memory, pattern
from conftest import PROFILE
from hypothesis import given
from hypothesis import strategies as st
from test_aio import in_child
from test_store import BLOCK, descriptors, fill_second, get, is_interrupted, put
from test_store import engine as engine  # a fixture

import swap.durable.manifest
import swap.io.files
from swap import (
    Fault,
    FaultAction,
    FaultTarget,
    Mode,
    SwapCorruptError,
    SwapDeadlineError,
    SwapError,
    SwapFullError,
    SwapLockedError,
    SwapStore,
)
from swap.durable.disk import Disk
from swap.durable.manifest import Manifest
from swap.durable.records import decode_key, decode_record, encode_key, encode_record
from swap.io.files import SwapFile
from swap.space.mapping import Version

T = TypeVar("T")
CAPACITY = 64 * BLOCK
TESTS = str(Path(__file__).parent)


def open_store(paths: Path | Sequence[Path], engine: str = "threads", disk: Disk | None = None) -> SwapStore:
    return SwapStore(paths, CAPACITY, mode=Mode.DURABLE, engine=engine, block_bytes=BLOCK, threads=2, disk=disk)


def contents(store: SwapStore) -> dict[object, bytes]:
    return {key: get(store, key) for key in store.keys()}  # noqa: SIM118


def reopened(paths: Path | Sequence[Path]) -> dict[object, bytes]:
    with open_store(paths) as store:
        return contents(store)


# ---- what survives ----


def test_committed_objects_survive_and_others_do_not(engine: str, tmp_path: Path) -> None:
    keys = ["text", 7, -1, True, None, b"\x00\xff", (1, "exp_avg", 0), ((), ("a", (b"b",)))]
    with open_store(tmp_path, engine) as store:
        assert store.checksums
        for number, key in enumerate(keys):
            put(store, key, pattern((1 + number % 3) * BLOCK, number))
        store.commit()
        put(store, "text", pattern(BLOCK, 100))
        put(store, "new", pattern(BLOCK, 101))
        store.delete(7)
    expected = {key: pattern((1 + number % 3) * BLOCK, number) for number, key in enumerate(keys)}
    with open_store(tmp_path, engine) as store:
        assert contents(store) == expected
        store.delete(7)
        put(store, "text", pattern(2 * BLOCK, 102))
        store.commit()
        store.commit()  # nothing changed
        used = store.used_bytes
    del expected[7]
    expected["text"] = pattern(2 * BLOCK, 102)
    with open_store(tmp_path, engine) as store:
        assert contents(store) == expected
        assert store.used_bytes == used == BLOCK + sum(len(data) for data in expected.values())  # and the first block
        assert store.used_bytes + store.free_bytes == store.capacity_bytes == CAPACITY
        assert sorted(os.listdir(tmp_path)) == ["swap.data", "swap.lock", "swap.manifest"]
        assert os.stat(tmp_path / "swap.data").st_size == CAPACITY


def test_abort_and_snapshot(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "a", pattern(BLOCK, 1))
        store.commit()
        put(store, "a", pattern(BLOCK, 2))
        with store.snapshot() as snapshot:
            store.commit()
            put(store, "a", pattern(BLOCK, 3))
            store.abort()
            memory = Memory(BLOCK)
            snapshot.get("a", memory.address, BLOCK).wait()
            assert memory[0:BLOCK] == pattern(BLOCK, 1)
        assert get(store, "a") == pattern(BLOCK, 2)
    assert reopened(tmp_path) == {"a": pattern(BLOCK, 2)}


@pytest.mark.parametrize("key", [1.5, object(), ["a"], {"a": 1}, ("a", 1.5), frozenset()])
def test_keys_that_cannot_be_written_down_are_refused(tmp_path: Path, key: object) -> None:
    memory = Memory(BLOCK)
    with open_store(tmp_path) as store:
        with pytest.raises(TypeError, match="durable store needs keys of str, int, bool, None, bytes and tuples"):
            store.put(key, memory.address, BLOCK)  # type: ignore[arg-type]
        assert store.used_bytes == BLOCK


keys = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text() | st.binary(),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=5,
)


@given(key=keys)
def test_keys_come_back_as_they_were(key: object) -> None:
    record = encode_record({"key": encode_key(key)})  # type: ignore[arg-type]
    found = decode_record(record, 0)
    assert found is not None
    back = decode_key(found[0]["key"])
    assert (back, type(back)) == (key, type(key))
    assert found[1] == len(record)
    assert decode_record(record[:-1], 0) is None


def test_several_paths(engine: str, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in "abc"]
    for path in paths:
        path.mkdir()
    capacity = 24 << 20
    with SwapStore(paths, capacity, mode=Mode.DURABLE, weights=[1, 2, 1], engine=engine) as store:
        put(store, "large", pattern(8 << 20, 1))
        assert {piece.file for piece in store._contents.mapping.working["large"].pieces} == {0, 1, 2}
        store.commit()
    with SwapStore(paths, capacity, mode=Mode.DURABLE, weights=[1, 2, 1], engine=engine) as store:
        assert get(store, "large") == pattern(8 << 20, 1)
    with pytest.raises(SwapError, match="expected 3 paths but got 2"):
        open_store(paths[:2])
    with pytest.raises(SwapCorruptError, match="of run .* in swap.manifest of the first path but there is none"):
        open_store([paths[1], paths[0], paths[2]])
    with pytest.raises(SwapCorruptError, match="expected the data file of path 1 of run .* but got path 2"):
        SwapStore([paths[0], paths[2], paths[1]], capacity, mode=Mode.DURABLE)
    with pytest.raises(ValueError, match="different directories"):
        open_store([paths[0], paths[0]])


def test_growing_and_not_shrinking(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "a", pattern(60 * BLOCK, 1))
        store.commit()
    with SwapStore(tmp_path, 2 * CAPACITY, mode=Mode.DURABLE) as store:
        put(store, "b", pattern(60 * BLOCK, 2))
        store.commit()
        assert store.capacity_bytes == 2 * CAPACITY == os.stat(tmp_path / "swap.data").st_size
    with pytest.raises(
        SwapError, match=r"capacity of at least .*524288 bytes.* but got .*262144 bytes.*allow that much"
    ):
        open_store(tmp_path)
    with SwapStore(tmp_path, 2 * CAPACITY, mode=Mode.DURABLE) as store:
        assert contents(store) == {"a": pattern(60 * BLOCK, 1), "b": pattern(60 * BLOCK, 2)}


def test_growing_that_fails_leaves_the_old_size(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "a", pattern(60 * BLOCK, 1))
        store.commit()
    for nth in (1, 2, 3, 4):  # flush of the longer file; the manifest's write, flush and renaming
        with pytest.raises(SwapError, match="ENOSPC"):
            SwapStore(tmp_path, 2 * CAPACITY, mode=Mode.DURABLE, disk=FaultyDisk(nth, False, errno.ENOSPC))
        assert reopened(tmp_path) == {"a": pattern(60 * BLOCK, 1)}
        assert os.stat(tmp_path / "swap.data").st_size == CAPACITY


def test_growing_while_open_is_whole_or_nothing(tmp_path: Path) -> None:
    """The nth operation of it fails: a commit afterwards, and the next process, have what they would have had."""
    for nth in range(1, 20):
        path, disk = tmp_path / f"{nth}", FaultyDisk(1 << 20, False, errno.EIO)
        path.mkdir()
        wanted = {"a": pattern(40 * BLOCK, 1), "b": pattern(40 * BLOCK, 2)}
        with open_store(path, disk=disk) as store:
            put(store, "a", wanted["a"])
            store.commit()
            put(store, "a", pattern(20 * BLOCK, 3))
            disk.left = nth
            try:
                store.grow(2 * CAPACITY)
            except SwapError as error:
                assert error.errno == errno.EIO
                if not store._backing.run.manifest.doubtful:
                    assert os.stat(path / "swap.data").st_size == CAPACITY
                store.abort()
                assert contents(store) == {"a": wanted["a"]}
                store.grow(2 * CAPACITY)
            disk.left = 1 << 20
            put(store, "a", wanted["a"])
            put(store, "b", wanted["b"])
            store.commit()
        with SwapStore(path, 2 * CAPACITY, mode=Mode.DURABLE) as store:
            assert contents(store) == wanted
        if not disk.failed:
            assert nth > 4
            return
    pytest.fail("no growth passed")


def test_a_power_cut_while_growing_leaves_a_committed_state(tmp_path: Path) -> None:
    for nth in range(1, 40):
        path, image = tmp_path / f"{nth}", tmp_path / f"{nth}-image"
        path.mkdir()
        disk = PowerDisk(path, image, nth, nth)
        one, other = pattern(20 * BLOCK, 1), pattern(40 * BLOCK, 2)
        possible: list[dict[object, bytes]] = [{}]
        store: SwapStore | None = None
        try:
            store = open_store(path, disk=disk)
            put(store, "a", one)
            possible = [{}, {"a": one}]
            store.commit()
            possible = [{"a": one}]
            put(store, "b", other)
            store.grow(2 * CAPACITY)
            put(store, "c", other)
            possible = [{"a": one}, {"a": one, "b": other, "c": other}]
            store.commit()
            possible = possible[1:]
        except PowerCut:
            pass
        finally:
            if store is not None:
                store.close()
        if not disk.cut:
            assert nth > 12
            return
        with SwapStore(image, 2 * CAPACITY, mode=Mode.DURABLE) as store:
            assert contents(store) in possible, nth
    pytest.fail("no run passed")


def test_a_run_that_cannot_be_created_leaves_no_room_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths = [tmp_path / "a", tmp_path / "b"]
    for path in paths:
        path.mkdir()
    fill_second(monkeypatch)
    with pytest.raises(SwapFullError):
        open_store(paths)
    assert [os.stat(path / "swap.data").st_blocks for path in paths] == [0, 0]
    assert reopened(paths) == {}


def test_the_rest_of_a_creation_is_room_for_the_next_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = tmp_path / "swap.data"
    with data.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, CAPACITY)
    room = data.stat().st_blocks * 512 + BLOCK  # of all the drive

    def rest(file: SwapFile) -> int:
        return room - data.stat().st_blocks * 512

    monkeypatch.setattr(swap.io.files, "free_bytes_of", rest)
    assert reopened(tmp_path) == {}
    assert data.stat().st_size == CAPACITY


def test_checksums_are_kept_and_may_be_left_out(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "a", pattern(2 * BLOCK, 1))
        store.commit()
        offset = store._contents.mapping.working["a"].pieces[0].extent.offset
    with (tmp_path / "swap.data").open("r+b") as file:
        file.seek(offset + 5)
        file.write(b"\xee")
    with open_store(tmp_path) as store, pytest.raises(SwapCorruptError, match="expected checksum"):
        get(store, "a")
    with SwapStore(tmp_path, CAPACITY, mode=Mode.DURABLE, checksums=False) as store:
        assert get(store, "a") != pattern(2 * BLOCK, 1)
        put(store, "b", pattern(BLOCK, 2))
        store.commit()
    with open_store(tmp_path) as store:
        assert get(store, "b") == pattern(BLOCK, 2)  # written without
        with pytest.raises(SwapCorruptError):
            get(store, "a")


# ---- one user at a time ----


def test_second_user_is_told_who_is_the_first(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "a", pattern(BLOCK))
        with pytest.raises(SwapLockedError, match=f"got process {os.getpid()} on .* since 20..-.*wait for") as caught:
            open_store(tmp_path)
        assert caught.value.path == str(tmp_path)
        script = f"from swap import *; SwapStore({str(tmp_path)!r}, {CAPACITY}, mode=Mode.DURABLE)"
        other = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
        assert other.returncode == 1
        assert f"got process {os.getpid()} on" in other.stderr
        store.commit()
    assert reopened(tmp_path) == {"a": pattern(BLOCK)}


def test_second_path_in_use_gives_the_first_one_back(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
    before = descriptors()
    with open_store(tmp_path / "b"), pytest.raises(SwapLockedError, match="/b: expected to be its only user"):
        open_store([tmp_path / "a", tmp_path / "b"])
    with open_store(tmp_path / "a"):
        pass
    assert descriptors() == before


def test_lock_ends_with_its_process(engine: str, tmp_path: Path) -> None:
    """Also with transfers in flight: the lock's descriptor is not the engine's business."""
    script = f"""
        import os, signal, sys
        sys.path.insert(0, {TESTS!r})
        from aligned_memory import Memory
        from swap import Mode, SwapStore
        store = SwapStore({str(tmp_path)!r}, 1 << 24, mode=Mode.DURABLE, engine={engine!r})
        memory = Memory(1 << 23)
        store.put("a", memory.address, 1 << 23)
        os.kill(os.getpid(), signal.SIGKILL)
    """
    assert subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=False, timeout=60).returncode == -9
    with SwapStore(tmp_path, 1 << 24, mode=Mode.DURABLE) as store:
        assert store.keys() == []


def test_forked_child_does_not_keep_the_lock(tmp_path: Path) -> None:
    store = open_store(tmp_path)
    reader, writer = os.pipe()
    go_reader, go_writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(writer, b"x")
        os.read(go_reader, 1)
        os._exit(0)
    os.read(reader, 1)
    store.close()
    with open_store(tmp_path):  # while the child lives
        pass
    os.write(go_writer, b"x")
    assert os.waitpid(child, 0)[1] == 0
    for fd in (reader, writer, go_reader, go_writer):
        os.close(fd)


def test_forked_child_cannot_commit(tmp_path: Path) -> None:
    def child() -> None:
        with pytest.raises(SwapError, match="fork"):
            store.commit()
        with pytest.raises(SwapError, match="fork"):
            store.abort()

    with open_store(tmp_path) as store:
        put(store, "a", pattern(BLOCK))
        assert in_child(child) == 0
        store.commit()
    assert reopened(tmp_path) == {"a": pattern(BLOCK)}


def test_everything_is_closed(tmp_path: Path) -> None:
    before = descriptors()
    store = open_store(tmp_path)
    store.close()
    store.close()
    assert descriptors() == before
    store = open_store(tmp_path)
    del store
    assert descriptors() == before


# ---- damage ----


def make_run(path: Path, commits: int = 3) -> list[dict[object, bytes]]:
    """Return the contents after every commit, the empty one first."""
    states: list[dict[object, bytes]] = [{}]
    with open_store(path) as store:
        for number in range(commits):
            data = pattern((1 + number % 2) * BLOCK, number)
            put(store, number, data)
            store.commit()
            states.append({**states[-1], number: data})
    return states


def test_manifest_cut_at_any_byte_is_the_last_whole_commit_or_refused(tmp_path: Path) -> None:
    """Commits only add objects here, so that the extents of all of them are intact."""
    run, copy = tmp_path / "run", tmp_path / "copy"
    run.mkdir()
    states = make_run(run)
    manifest = run / "swap.manifest"
    whole = manifest.read_bytes()
    ends = [at for at in range(1, len(whole) + 1) if whole[at - 1 : at] == b"\n"]
    assert len(ends) == 2 + len(states) - 1  # facts, the empty mapping, the commits
    for length in range(len(whole)):
        manifest.write_bytes(whole[:length])
        if length < ends[1]:  # that was written in one go and cannot be in pieces
            with pytest.raises(SwapCorruptError, match="swap.manifest: expected an intact record"):
                Manifest.load(str(manifest), Disk())
            continue
        if length % 7 and length not in ends:  # the store itself at some of the lengths
            opened, versions = Manifest.load(str(manifest), Disk())
            opened.close()
            assert len(versions) == len(states[sum(end <= length for end in ends) - 2])
            continue
        shutil.copytree(run, copy)
        expected = states[sum(end <= length for end in ends) - 2]
        with open_store(copy) as store:
            assert contents(store) == expected
            put(store, "next", pattern(BLOCK, 99))  # and it goes on from there
            store.commit()
        assert reopened(copy) == {**expected, "next": pattern(BLOCK, 99)}
        shutil.rmtree(copy)


@given(at=st.integers(0, 10_000), bit=st.integers(0, 7))
def test_flipped_bit_in_the_manifest_is_never_taken_for_good(at: int, bit: int) -> None:
    versions = {"a": Version((), 0), "b": Version((), 0)}
    whole = encode_record({"seq": 1, "put": [[key, []] for key in versions], "delete": []})
    damaged = bytearray(whole)
    damaged[at % len(whole)] ^= 1 << bit
    assert decode_record(bytes(damaged), 0) is None


def test_damage_in_the_middle_of_the_manifest_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    manifest = tmp_path / "swap.manifest"
    whole = manifest.read_bytes()
    last = whole[:-1].rindex(b"\n") + 1
    for at in range(last):
        damaged = bytearray(whole)
        damaged[at] ^= 0x01
        manifest.write_bytes(damaged)
        with pytest.raises(SwapCorruptError, match="swap.manifest"):
            Manifest.load(str(manifest), Disk())
    lines = whole.splitlines(keepends=True)
    manifest.write_bytes(b"".join(lines[:3] + lines[4:]))
    with pytest.raises(SwapCorruptError, match="expected commit 3 but got 4"):
        Manifest.load(str(manifest), Disk())


def rewrite_facts(path: Path, **changes: object) -> None:
    manifest = path / "swap.manifest"
    whole = manifest.read_bytes()
    found = decode_record(whole, 0)
    assert found is not None
    facts, end = found
    manifest.write_bytes(encode_record(facts | changes) + whole[end:])


def test_other_version_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    rewrite_facts(tmp_path, version=2)
    with pytest.raises(SwapError, match="expected a manifest of version 1 but got version 2; open it with the version"):
        open_store(tmp_path)


def test_other_format_is_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    rewrite_facts(tmp_path, format="something else")
    with pytest.raises(SwapCorruptError, match="expected a manifest but got 'something else'"):
        open_store(tmp_path)
    (tmp_path / "swap.manifest").write_bytes(b"\x89PNG and so on\n" * 100)
    with pytest.raises(SwapCorruptError, match="intact record"):
        open_store(tmp_path)


def test_data_file_that_was_cut_off(tmp_path: Path) -> None:
    make_run(tmp_path)
    os.truncate(tmp_path / "swap.data", CAPACITY - BLOCK)
    with pytest.raises(SwapCorruptError, match=rf"swap.data: expected {CAPACITY} bytes but got .*: it was cut off"):
        open_store(tmp_path)


def test_data_file_that_is_missing_or_foreign_or_of_another_run(tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        make_run(tmp_path / name)
    data = tmp_path / "a" / "swap.data"
    shutil.copy(tmp_path / "b" / "swap.data", data)
    with pytest.raises(SwapCorruptError, match="expected the data file of path 0 of run .* but got path 0 of run"):
        open_store(tmp_path / "a")
    data.write_bytes(b"somebody else's bytes" * 10_000)
    with pytest.raises(SwapCorruptError, match="first block says something else"):
        open_store(tmp_path / "a")
    data.unlink()
    with pytest.raises(SwapCorruptError, match="but there is none"):
        open_store(tmp_path / "a")
    assert not data.exists()


def test_foreign_data_file_is_not_overwritten(tmp_path: Path) -> None:
    data = tmp_path / "swap.data"
    data.write_bytes(b"precious")
    with pytest.raises(SwapCorruptError, match="name another directory, or remove the file"):
        open_store(tmp_path)
    assert data.read_bytes() == b"precious"


def test_lost_manifest_does_not_lose_the_data(tmp_path: Path) -> None:
    make_run(tmp_path)
    (tmp_path / "swap.manifest").rename(tmp_path / "kept")
    with pytest.raises(SwapCorruptError, match="restore the manifest, or remove the data file"):
        open_store(tmp_path)
    (tmp_path / "kept").rename(tmp_path / "swap.manifest")
    assert len(reopened(tmp_path)) == 3


def test_extents_that_overlap_are_refused(tmp_path: Path) -> None:
    make_run(tmp_path)
    manifest = tmp_path / "swap.manifest"
    whole = manifest.read_bytes()
    for wrong in ([0, 0, BLOCK, ""], [0, CAPACITY, BLOCK, ""], [1, BLOCK, BLOCK, ""], [0, BLOCK + 1, BLOCK, ""]):
        record = encode_record({"seq": 5, "put": [["x", [wrong]]], "delete": []})
        manifest.write_bytes(whole + record)
        with pytest.raises(SwapCorruptError, match="disjoint extents inside the data files"):
            open_store(tmp_path)


@pytest.mark.parametrize("name", ["a/swap.lock", "a/swap.data", "a/swap.manifest", "b/swap.lock", "b/swap.data"])
@pytest.mark.parametrize("gone", [True, False])
def test_commit_is_refused_while_a_file_of_the_run_is_not_found(tmp_path: Path, name: str, gone: bool) -> None:
    """It would return well, and nothing would be found. The file may come back."""
    for each in ("a", "b"):
        (tmp_path / each).mkdir()
    paths, file = (tmp_path / "a", tmp_path / "b"), tmp_path / name
    with open_store(paths) as store:
        put(store, "x", pattern(BLOCK, 1))
        store.commit()
        file.rename(tmp_path / "kept")
        if not gone:
            file.write_bytes(b"another one")
        store.commit()  # nothing to commit
        put(store, "x", pattern(BLOCK, 2))
        with pytest.raises(SwapError, match=f"{file}: expected the file that this store has open") as caught:
            store.commit()
        assert (caught.value.errno, caught.value.path) == (errno.ENOENT, str(file))
        (tmp_path / "kept").rename(file)
        store.abort()
        assert contents(store) == {"x": pattern(BLOCK, 1)}
        put(store, "x", pattern(BLOCK, 3))
        store.commit()
    assert reopened(paths) == {"x": pattern(BLOCK, 3)}


def test_locks_look_used_after_a_commit(tmp_path: Path) -> None:
    """Who cleans a drive up removes what is old."""
    with open_store(tmp_path) as store:
        os.utime(tmp_path / "swap.lock", (1, 1))
        put(store, "x", pattern(BLOCK))
        store.commit()
        facts = (tmp_path / "swap.lock").stat()
        assert min(facts.st_mtime, facts.st_atime) > 1


def test_a_run_with_a_relative_path_goes_on_in_another_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(swap.durable.manifest, "_LEAST_LOG_BYTES", 0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run").mkdir()
    with open_store(Path("run")) as store:
        monkeypatch.chdir("/")
        for number in range(10):  # the log is written anew
            put(store, "x", pattern(BLOCK, number))
            store.commit()
    assert reopened(tmp_path / "run") == {"x": pattern(BLOCK, 9)}


# ---- faults ----


class FaultyDisk(Disk):
    """Fails the nth operation, or all from the nth on; a write that fails has written half of its bytes."""

    def __init__(self, nth: int, forever: bool, code: int) -> None:
        self.left = nth
        self.forever = forever
        self.code = code
        self.failed = 0

    def _count(self) -> bool:
        self.left -= 1
        fails = self.left == 0 or (self.forever and self.left < 0)
        self.failed += fails
        return fails

    def _refuse(self) -> None:
        raise OSError(self.code, os.strerror(self.code))

    def write(self, fd: int, data: bytes, offset: int) -> None:
        if self._count():
            super().write(fd, data[: len(data) // 2], offset)
            self._refuse()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        if self._count():
            self._refuse()
        super().sync(fd)

    def truncate(self, fd: int, length: int) -> None:
        if self._count():
            self._refuse()
        super().truncate(fd, length)

    def replace(self, source: str, target: str) -> None:
        if self._count():
            self._refuse()
        super().replace(source, target)

    def sync_directory(self, path: str) -> None:
        if self._count():
            self._refuse()
        super().sync_directory(path)


@pytest.mark.parametrize("answer", ["repeat", "abort", "reopen"])
@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC])
def test_nth_operation_fails_until_a_run_passes(tmp_path: Path, answer: str, forever: bool, code: int) -> None:
    """Four commits; what fails is repeated, aborted, or left as it is. Contents are always a committed state."""
    for nth in range(1, 200):
        directory = tmp_path / str(nth)
        directory.mkdir()
        disk = FaultyDisk(nth, forever, code)
        state: dict[object, bytes] = {}
        possible = [state]
        with contextlib.ExitStack() as stack:
            try:
                store = stack.enter_context(open_store(directory, disk=disk))
            except SwapError as error:
                assert error.errno == code
                assert reopened(directory) == {}
                continue
            for number in range(4):
                wanted = {**state, number % 3: pattern(BLOCK, 10 * nth + number)}
                put(store, number % 3, wanted[number % 3])
                try:
                    store.commit()
                except SwapError as error:
                    assert isinstance(error, SwapFullError) == (code == errno.ENOSPC)
                    if answer == "repeat":
                        put(store, number % 3, wanted[number % 3])  # a failed flush asks for it
                        try:
                            store.commit()
                        except SwapError:
                            assert forever
                            possible = [state, wanted]
                            break
                    elif answer == "abort":
                        try:
                            store.abort()
                        except SwapError:
                            assert forever
                            possible = [state, wanted]
                            break
                        assert contents(store) == state
                        continue
                    else:
                        possible = [state, wanted]
                        break
                state = wanted
                possible = [state]
        assert reopened(directory) in possible
        if not disk.failed:
            assert nth > 10
            return
    pytest.fail("no run passed")


class FlushOnce(Disk):
    """Fails one flush of data."""

    failing = False

    def sync(self, fd: int) -> None:
        if self.failing and os.readlink(f"/proc/self/fd/{fd}").endswith("swap.data"):
            self.failing = False
            raise OSError(errno.EIO, "flush")
        super().sync(fd)


def test_failed_flush_asks_for_the_data_again(tmp_path: Path) -> None:
    disk = FlushOnce()
    with open_store(tmp_path, disk=disk) as store:
        put(store, "a", pattern(BLOCK, 1))
        put(store, "b", pattern(BLOCK, 2))
        disk.failing = True
        with pytest.raises(SwapError, match="cannot flush the data of a commit.*put the objects again, or abort"):
            store.commit()
        put(store, "a", pattern(BLOCK, 1))
        with pytest.raises(SwapError, match="put 'b' failed"):
            store.commit()
        put(store, "b", pattern(BLOCK, 2))
        store.commit()
    assert reopened(tmp_path) == {"a": pattern(BLOCK, 1), "b": pattern(BLOCK, 2)}


def test_failed_flush_of_a_growth_asks_for_the_data_again(tmp_path: Path) -> None:
    """What it may have lost was put before, or was in flight."""
    disk, memory = FlushOnce(), Memory(BLOCK)
    with open_store(tmp_path, disk=disk) as store:
        put(store, "a", pattern(BLOCK, 1))
        store.commit()
        put(store, "b", pattern(BLOCK, 2))
        flying = store.put("c", memory.address, BLOCK)
        disk.failing = True
        with pytest.raises(SwapError, match="cannot flush the data of a commit.*put the objects again, or abort"):
            store.grow(2 * CAPACITY)
        flying.wait()
        for key in ("b", "c"):
            with pytest.raises(SwapError, match=f"put '{key}' failed"):
                store.commit()
            put(store, key, pattern(BLOCK, 3))
        store.commit()
    assert reopened(tmp_path) == {"a": pattern(BLOCK, 1), "b": pattern(BLOCK, 3), "c": pattern(BLOCK, 3)}


def test_extents_of_a_commit_in_doubt_are_not_used_again(tmp_path: Path) -> None:
    """The flush of the manifest fails and so does taking it back: the drive may hold either commit."""

    class Doubt(Disk):
        failing = False

        def sync(self, fd: int) -> None:
            if self.failing and os.readlink(f"/proc/self/fd/{fd}").endswith("swap.manifest"):
                raise OSError(errno.EIO, "flush")
            super().sync(fd)

        def truncate(self, fd: int, length: int) -> None:
            if not self.failing:
                super().truncate(fd, length)
                return
            raise OSError(errno.EIO, "truncate")

    disk = Doubt()
    with open_store(tmp_path, disk=disk) as store:
        put(store, "a", pattern(20 * BLOCK, 1))
        store.commit()
        put(store, "a", pattern(20 * BLOCK, 2))
        disk.failing = True
        with pytest.raises(SwapError, match="cannot append a commit.*EIO"):
            store.commit()
        assert store.free_bytes == (64 - 1 - 40) * BLOCK
        put(store, "a", pattern(20 * BLOCK, 3))  # replaces the second version, which may be on the drive: it is kept
        assert store.free_bytes == (64 - 1 - 60) * BLOCK
        shutil.copytree(tmp_path, tmp_path / "copy")
        assert reopened(tmp_path / "copy") == {"a": pattern(20 * BLOCK, 2)}
        disk.failing = False
        store.abort()
        assert store.free_bytes == (64 - 1 - 20) * BLOCK
        assert get(store, "a") == pattern(20 * BLOCK, 1)
        put(store, "a", pattern(20 * BLOCK, 4))
    assert reopened(tmp_path) == {"a": pattern(20 * BLOCK, 1)}


class InterruptedDisk(Disk):
    """Lets an interrupt come at the nth operation: in its place, or with `late` when it is done."""

    def __init__(self) -> None:
        self.left = 0
        self.late = False

    def pass_by(self, call: Callable[[], T]) -> T:
        self.left -= 1
        if not self.left and not self.late:
            raise KeyboardInterrupt
        late = not self.left
        done = call()
        if late:
            raise KeyboardInterrupt
        return done

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.pass_by(lambda: Disk.write(self, fd, data, offset))

    def sync(self, fd: int) -> None:
        self.pass_by(lambda: Disk.sync(self, fd))

    def replace(self, source: str, target: str) -> None:
        self.pass_by(lambda: Disk.replace(self, source, target))

    def sync_directory(self, path: str) -> None:
        self.pass_by(lambda: Disk.sync_directory(self, path))


@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("answer", ["repeat", "abort"])
@pytest.mark.parametrize("marked", [False, True])
def test_interrupt_at_any_operation_of_a_commit(
    tmp_path: Path, marked: bool, answer: str, late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The log is written anew at each commit up to then; making a record counts as an operation, too.

    What the drive holds then is either state, whatever is put meanwhile. After a commit or an abort it is that one.
    """
    disk = InterruptedDisk()
    monkeypatch.setattr("swap.durable.manifest._GROWTH", 0)
    monkeypatch.setattr("swap.durable.manifest.encode_record", lambda one: disk.pass_by(lambda: encode_record(one)))
    old, new = {"a": pattern(12 * BLOCK, 1)}, {"a": pattern(12 * BLOCK, 2)}
    for nth in range(1, 30):
        directory, copy = tmp_path / str(nth), tmp_path / f"{nth}-copy"
        directory.mkdir()
        monkeypatch.setattr("swap.durable.manifest._LEAST_LOG_BYTES", 1)
        with open_store(directory, disk=disk) as store:
            put(store, "a", old["a"])
            store.commit(mark=(1,) if marked else None)
            put(store, "a", new["a"])
            disk.left, disk.late = nth, late
            try:
                store.commit(mark=(2, 1) if marked else None)
            except KeyboardInterrupt:
                interrupted = True
            else:
                interrupted = False
            disk.left = 0
            monkeypatch.setattr("swap.durable.manifest._LEAST_LOG_BYTES", 1 << 20)
            put(store, "b", pattern(12 * BLOCK, 3))
            shutil.copytree(directory, copy)
            assert reopened(copy) in ([old, new] if interrupted else [new])
            store.delete("b")
            if answer == "repeat":
                store.commit(mark=(2, 1) if marked else None)
            else:
                store.abort()
            wanted = new if answer == "repeat" or not interrupted else old
            assert contents(store) == wanted and store.used_bytes == (1 + 12) * BLOCK  # a file begins with one
            put(store, "b", pattern(40 * BLOCK, 4))  # in what is free now
            shutil.rmtree(copy)
            shutil.copytree(directory, copy)
            assert reopened(copy) == wanted
            store.commit(mark=(3, 2) if marked else None)
        assert reopened(directory) == {**wanted, "b": pattern(40 * BLOCK, 4)}
        if not interrupted:
            assert nth > 8
            return
    pytest.fail("no run passed")


class Unflushed(Disk):
    """Takes no time for flushes."""

    def sync(self, fd: int) -> None:
        pass

    def sync_directory(self, path: str) -> None:
        pass


@pytest.mark.parametrize("answer", ["repeat", "abort"])
def test_interrupt_in_the_books_of_a_commit(tmp_path: Path, answer: str) -> None:
    """Memory and drive have the same state, the old one or the new one. What is repeated lacks nothing."""
    old = {"a": pattern(12 * BLOCK, 1), "b": pattern(BLOCK, 2)}
    new = {"a": pattern(12 * BLOCK, 3), "c": pattern(BLOCK, 4)}
    for nth in range(1, 100):
        directory, copy = tmp_path / str(nth), tmp_path / f"{nth}-copy"
        directory.mkdir()
        with open_store(directory, disk=Unflushed()) as store:
            for key, data in old.items():
                put(store, key, data)
            store.commit()
            for key, data in new.items():
                put(store, key, data)
            store.delete("b")
            interrupted = is_interrupted(nth, ("swap/commits.py", "swap/space/mapping.py"), store.commit)
            put(store, "d", pattern(12 * BLOCK, 5))
            shutil.copytree(directory, copy)
            assert reopened(copy) in (old, new)
            shutil.rmtree(copy)
            store.delete("d")
            if answer == "repeat":
                store.commit()
            else:
                store.abort()
            wanted = contents(store)
            assert wanted == new or (wanted == old and interrupted and answer == "abort"), nth
            assert store.used_bytes == (1 + 13) * BLOCK  # a file begins with one
            put(store, "d", pattern(45 * BLOCK, 6))  # in what is free now
            shutil.copytree(directory, copy)
            assert reopened(copy) == wanted
            store.commit()
        assert reopened(directory) == {**wanted, "d": pattern(45 * BLOCK, 6)}
        if not interrupted:
            assert nth > 8
            return
    pytest.fail("no run passed")


def test_data_that_cannot_be_written_is_not_committed(engine: str, tmp_path: Path) -> None:
    with open_store(tmp_path, engine) as store:
        put(store, "a", pattern(BLOCK, 1))
        store.commit()
        memory = Memory(BLOCK)
        store.inject(Fault(target=FaultTarget.WRITES, errno=errno.ENOSPC))
        store.put("a", memory.address, BLOCK)
        with pytest.raises(SwapFullError):
            store.commit()
    assert reopened(tmp_path) == {"a": pattern(BLOCK, 1)}


def test_stuck_transfer_keeps_the_lock_until_the_process_ends(tmp_path: Path) -> None:
    memory = Memory(BLOCK)
    store = open_store(tmp_path)
    store._aio.deadline_s = 0.05
    store.inject(Fault(action=FaultAction.HANG))
    store.put("a", memory.address, BLOCK)
    with pytest.raises(SwapDeadlineError):
        store.commit()
    with pytest.raises(SwapDeadlineError):
        store.close()
    assert reopened(tmp_path) == {}  # an injected hang ends with the engine, and so does the lock


def test_commit_writes_what_changed_and_not_what_is_there(tmp_path: Path) -> None:
    """One key of 1 or of 500: the same record, but for the digits of its numbers."""
    sizes = []
    capacity = 1100 * BLOCK
    with SwapStore(tmp_path, capacity, mode=Mode.DURABLE) as store:
        for count in (1, 500):
            memory = Memory(BLOCK)
            for key in range(count):
                store.put(key, memory.address, BLOCK)
            store.commit()
            before = os.stat(tmp_path / "swap.manifest").st_size
            put(store, 0, pattern(BLOCK, count))
            store.commit()
            sizes.append(os.stat(tmp_path / "swap.manifest").st_size - before)
    assert abs(sizes[1] - sizes[0]) < 10


def test_log_is_written_anew_when_it_has_grown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap.durable.manifest._LEAST_LOG_BYTES", 2000)
    with open_store(tmp_path) as store:
        sizes = []
        for number in range(60):
            put(store, number % 5, pattern(BLOCK, number))
            store.commit()
            sizes.append(os.stat(tmp_path / "swap.manifest").st_size)
    assert max(sizes) < 2500
    assert any(after < before for before, after in zip(sizes, sizes[1:], strict=False))
    assert reopened(tmp_path) == {number % 5: pattern(BLOCK, number) for number in range(55, 60)}


def test_log_that_cannot_be_written_anew_does_not_fail_the_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("swap.durable.manifest._LEAST_LOG_BYTES", 1)
    monkeypatch.setattr("swap.durable.manifest._GROWTH", 0)
    disk = FaultyDisk(1 << 30, False, errno.ENOSPC)
    with open_store(tmp_path, disk=disk) as store:
        put(store, "a", pattern(BLOCK, 1))
        disk.left = 4  # flush of the data, append, flush of the manifest, then the file beside it
        store.commit()
        assert disk.failed == 1
    assert reopened(tmp_path) == {"a": pattern(BLOCK, 1)}


# ---- power cuts ----


class PowerCut(Exception):
    pass


class PowerDisk(Disk):
    """Cuts the power at the nth operation and leaves in `image` what the drive could hold then.

    Of every file the flushed contents are there; of what was written since, any sectors. Of the names in the directory
    either those of the last flush or the present ones. Nothing can be done afterwards.
    """

    SECTOR = 512

    def __init__(self, directory: Path, image: Path, nth: int, seed: int) -> None:
        self.directory = directory
        self.image = image
        self.left = nth
        self.random = random.Random(seed)
        self.flushed: dict[int, bytes] = {}  # by inode
        self.names: dict[str, int] = {}
        self.cut = False

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self._alive()
        if self.left == 1:
            super().write(fd, data, offset)
        self._step()
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self._step()
        super().sync(fd)
        self.flushed[os.fstat(fd).st_ino] = self._read(Path(os.readlink(f"/proc/self/fd/{fd}")))

    def truncate(self, fd: int, length: int) -> None:
        self._step()
        super().truncate(fd, length)

    def replace(self, source: str, target: str) -> None:
        self._alive()
        if self.left == 1:
            super().replace(source, target)
        self._step()
        super().replace(source, target)

    def sync_directory(self, path: str) -> None:
        self._step()
        self.names = self._listing()

    def _alive(self) -> None:
        if self.cut:
            raise PowerCut

    def _step(self) -> None:
        self._alive()
        self.left -= 1
        if self.left == 0:
            self.cut = True
            self._leave_image()
            raise PowerCut

    def _listing(self) -> dict[str, int]:
        return {path.name: path.stat().st_ino for path in self.directory.iterdir()}

    @staticmethod
    def _read(path: Path) -> bytes:
        return path.read_bytes()

    def _leave_image(self) -> None:
        self.image.mkdir()
        now = self._listing()
        present = {inode: self._read(self.directory / name) for name, inode in now.items()}
        names = now if self.random.random() < 0.5 else self.names
        for name, inode in names.items():
            old = self.flushed.get(inode, b"")
            new = present.get(inode, old)
            length = self.random.choice([len(old), len(new), self.random.randint(min(len(old), len(new)), len(new))])
            mixed = bytearray(length)
            for at in range(0, length, self.SECTOR):
                source = self.random.choice([old, new])
                sector = source[at : at + self.SECTOR][: length - at]
                mixed[at : at + len(sector)] = sector
            (self.image / name).write_bytes(mixed)


@pytest.mark.parametrize("seed", range(2 if PROFILE == "quick" else 20))
def test_power_cut_at_any_operation_leaves_a_committed_state(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random puts, deletes, commits and aborts; the image holds the last commit that returned, or the one under way."""
    monkeypatch.setattr("swap.durable.manifest._LEAST_LOG_BYTES", 1500)  # so that the log is written anew now and then
    for nth in range(1, 500):
        chance = random.Random(seed)
        directory, image = tmp_path / f"{nth}", tmp_path / f"{nth}-image"
        directory.mkdir()
        disk = PowerDisk(directory, image, nth, seed * 1000 + nth)
        committed: dict[object, bytes] = {}
        possible = [committed]
        store: SwapStore | None = None
        try:
            store = open_store(directory, disk=disk)
            for number in range(10 if PROFILE == "quick" else 25):
                working = dict(committed)
                for step in range(chance.randint(1, 3)):
                    key = chance.randint(0, 5)
                    if key in working and chance.random() < 0.3:
                        store.delete(key)
                        del working[key]
                    else:
                        working[key] = pattern(chance.randint(1, 3) * BLOCK, 1000 * seed + 10 * number + step)
                        put(store, key, working[key])
                if chance.random() < 0.2:
                    store.abort()
                    continue
                possible = [committed, working]
                store.commit()
                committed = working
                possible = [committed]
        except PowerCut:
            assert disk.cut
        finally:
            if store is not None:
                store.close()
        if not disk.cut:
            assert nth > 25
            return
        found = reopened(image)
        assert found in possible, f"operation {nth}"
        with open_store(image) as again:  # and it works
            put(again, "more", pattern(BLOCK, 1))
            again.commit()
        assert reopened(image) == {**found, "more": pattern(BLOCK, 1)}
        shutil.rmtree(directory)
        shutil.rmtree(image)
    pytest.fail("no run passed")


# ---- kill -9 ----

WORKER = """
import os, random, signal, sys
sys.path.insert(0, sys.argv[1])
from aligned_memory import Memory
from swap import Mode, SwapStore
from swap.durable.disk import Disk
import test_durable

directory, engine, seed, kill_at = sys.argv[2], sys.argv[3], int(sys.argv[4]), int(sys.argv[5])

class KillingDisk(Disk):
    left = kill_at

    def _count(self):
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def write(self, fd, data, offset):
        if self.left == 1:
            super().write(fd, data[: len(data) // 2], offset)
        self._count()
        super().write(fd, data, offset)

    def sync(self, fd):
        self._count()
        super().sync(fd)
        self._count()

    def replace(self, source, target):
        self._count()
        super().replace(source, target)
        self._count()

store = SwapStore(directory, test_durable.KILL_CAPACITY, mode=Mode.DURABLE, engine=engine, disk=KillingDisk())
memory = Memory(1 << 16)
number = test_durable.number_in(store)
while True:
    number += 1
    tickets = []
    memories = []
    for key, data in test_durable.changes_of(number).items():
        if data is None:
            store.delete(key)
            continue
        memories.append(Memory(len(data)))
        memories[-1].fill(data)
        tickets.append(store.put(key, memories[-1].address, len(data)))
    store.commit()
    os.write(1, b"%d\\n" % number)
"""

KILL_CAPACITY = 4 << 20


def changes_of(number: int) -> dict[str, bytes | None]:
    """What commit `number` changes: its own number, some objects, and from time to time a deletion."""
    chance = random.Random(number)
    changes: dict[str, bytes | None] = {"number": pattern(BLOCK, number)}
    for _ in range(chance.randint(1, 4)):
        changes[f"object {chance.randint(0, 9)}"] = pattern(chance.randint(1, 16) * BLOCK, chance.getrandbits(30))
    if number % 5 == 0:
        victim = f"object {number // 5 % 10}"
        if victim in state_after(number - 1):
            changes[victim] = None
    return changes


STATES: dict[int, dict[str, bytes]] = {0: {}}


def state_after(number: int) -> dict[str, bytes]:
    """What there is after commit `number`."""
    for at in range(max(STATES), number):
        state: dict[str, bytes | None] = {**STATES[at], **changes_of(at + 1)}
        STATES[at + 1] = {key: data for key, data in state.items() if data is not None}
        STATES.pop(at - 3, None)
    return STATES[number]


def number_in(store: SwapStore) -> int:
    """Number of the last commit, as the store itself says it."""
    return int.from_bytes(get(store, "number")[4:8], "little") if "number" in store else 0


def test_number_is_read_from_the_pattern() -> None:
    assert pattern(BLOCK, 123456)[4:8] == (123456).to_bytes(4, "little")


def kill_loop(directory: Path, engine: str, kills: int, seed: int) -> Iterator[int]:
    """Run the worker and kill it `kills` times; yield the number of the last commit it reported, each time."""
    chance = random.Random(seed)
    reported = 0
    for kill in range(kills):
        by_itself = chance.random() < 0.7
        kill_at = chance.randint(1, 40) if by_itself else 1 << 30
        worker = subprocess.Popen(
            [sys.executable, "-c", WORKER, TESTS, str(directory), engine, str(seed + kill), str(kill_at)],
            stdout=subprocess.PIPE,
        )
        assert worker.stdout is not None
        stop_after = chance.randint(0, 12)
        for lines, line in enumerate(worker.stdout):
            reported = int(line)
            if not by_itself and lines >= stop_after:
                worker.kill()
                break
        for line in worker.stdout:  # what it still said before the signal came
            reported = int(line)
        assert worker.wait(60) == -signal.SIGKILL
        worker.stdout.close()
        yield reported


def check_kills(directory: Path, engine: str, kills: int, seed: int) -> None:
    STATES.clear()
    STATES[0] = {}
    number = 0
    for reported in kill_loop(directory, engine, kills, seed):
        known = max(reported, number)  # the one after it may have been committed and not reported
        with SwapStore(directory, KILL_CAPACITY, mode=Mode.DURABLE) as store:
            number = number_in(store)
            assert known <= number <= known + 1
            assert contents(store) == state_after(number)
            assert store.used_bytes == BLOCK + sum(len(data) for data in state_after(number).values())


def test_killed_process_leaves_the_last_commit(engine: str, tmp_path: Path) -> None:
    check_kills(tmp_path, engine, kills=6, seed=1)


@pytest.mark.nightly
def test_killed_process_leaves_the_last_commit_very_often(engine: str, tmp_path: Path) -> None:
    check_kills(tmp_path, engine, kills=250, seed=2)
