"""What the world does to a store: limits, full and read-only file systems, forbidden rings, many stores at once.

Short transfers, injected errors of every request, stuck and slow devices are in test_aio and test_store; power cuts,
kills and damaged files in test_durable.
"""

from __future__ import annotations

import contextlib
import errno
import os
import subprocess
import sys
import tempfile
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from aligned_memory import Memory, pattern
from test_aio import SECCOMP_AGAINST_IO_URING
from test_store import BLOCK, get, put
from test_store import engine as engine  # a fixture

from swap import Fault, FaultTarget, Mode, SwapError, SwapFullError, SwapStore

TESTS = str(Path(__file__).parent)
NOBODY = 65534
PREFIX = f"""
import os, resource, sys
sys.path.insert(0, {TESTS!r})
from aligned_memory import Memory, pattern
from swap import *
import swap.store

def give_up_root():
    if os.geteuid() == 0:
        os.setgid({NOBODY})
        os.setuid({NOBODY})

def round_trip(store, length=1 << 20):
    memory = Memory(length)
    memory.fill(pattern(length, 1))
    store.put("a", memory.address, length).wait()
    memory.fill(b"")
    store.get("a", memory.address, length).wait()
    assert memory[0:length] == pattern(length, 1)
"""


def run(script: str) -> list[str]:
    """Run a script in a process of its own and return its lines."""
    text = PREFIX + textwrap.dedent(script)
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def public_directory() -> Iterator[str]:
    """A directory that any user can reach."""
    with tempfile.TemporaryDirectory(dir="/tmp") as directory:
        os.chmod(directory, 0o777)
        yield directory


@pytest.mark.parametrize("forever", [False, True])
@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EROFS, errno.EDQUOT])
def test_nth_request_fails_until_a_run_passes(engine: str, tmp_path: Path, code: int, forever: bool) -> None:
    """Three objects of two blocks replaced and committed, or aborted: old or new as a whole, with checksums."""
    old = {key: pattern(2 * BLOCK, key) for key in range(3)}
    new = {key: pattern(2 * BLOCK, 10 + key) for key in range(3)}
    memory = Memory(6 * BLOCK)
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine, block_bytes=BLOCK, mode=Mode.EXPLICIT, checksums=True) as store:
        for nth in range(1, 50):
            for key, data in old.items():
                put(store, key, data)
            store.commit()
            for key, data in new.items():
                memory[key * 2 * BLOCK : (key + 1) * 2 * BLOCK] = data
            store.inject(Fault(nth=nth, errno=code, target=FaultTarget.WRITES, forever=forever))
            tickets = [store.put(key, memory.address + key * 2 * BLOCK, 2 * BLOCK) for key in new]
            failed = []
            for ticket in tickets:
                try:
                    ticket.wait()
                except SwapError as error:
                    assert isinstance(error, SwapFullError) == (code in (errno.ENOSPC, errno.EDQUOT))
                    failed.append(ticket)
            store.clear_faults()
            if failed:
                with pytest.raises(SwapError, match="put or delete it again, or abort"):
                    store.commit()
                store.abort()
            else:
                store.commit()
            assert {key: get(store, key) for key in old} == (old if failed else new)
            assert store.used_bytes == 6 * BLOCK
            assert bool(failed) == (nth <= 6)  # 6 requests write
            if not failed:
                return
    pytest.fail("no run passed")


def test_descriptors_run_out(engine: str, tmp_path: Path) -> None:
    """Stores are opened until the limit of open files is reached; those that are open go on working."""
    lines = run(
        f"""
        def descriptors():  # without opening one
            found = 0
            for fd in range(64):
                try:
                    os.fstat(fd)
                    found += 1
                except OSError:
                    pass
            return found

        resource.setrlimit(resource.RLIMIT_NOFILE, (64, 64))
        stores = []
        try:
            while True:
                stores.append(SwapStore({str(tmp_path)!r}, 1 << 20, engine={engine!r}, threads=1))
        except SwapError as error:
            print(type(error).__name__, error)
        assert len(stores) > 5
        for store in stores:
            round_trip(store, 1 << 19)
        before = descriptors()
        for mode in (Mode.SCRATCH, Mode.DURABLE):
            try:
                while True:
                    stores.append(SwapStore({str(tmp_path)!r}, 1 << 20, mode=mode, engine={engine!r}))
            except SwapError:
                pass
            assert descriptors() == before  # nothing was left open
        """
    )
    assert lines[0].startswith("SwapError")
    assert "EMFILE" in lines[0] or "Too many open files" in lines[0]
    assert "ulimit -n" in lines[0] or 'use engine="threads"' in lines[0]


@pytest.mark.parametrize("mode", ["SCRATCH", "DURABLE"])
def test_read_only_directory(public_directory: str, mode: str) -> None:
    os.chmod(public_directory, 0o555)
    lines = run(
        f"""
        give_up_root()
        try:
            SwapStore({public_directory!r}, 1 << 20, mode=Mode.{mode})
        except SwapError as error:
            print(error)
        """
    )
    assert len(lines) == 1
    assert f"swap path {public_directory}: expected a directory to create a file in (EACCES 13" in lines[0]
    assert "make the directory writable for this user or name another" in lines[0]
    assert os.listdir(public_directory) == []


def test_read_only_file_system(tmp_path: Path) -> None:
    """A file system that is mounted read-only in a mount namespace of its own."""
    if os.geteuid() != 0:
        pytest.skip("mounting needs root")
    target = tmp_path / "mounted"
    target.mkdir()
    script = PREFIX + textwrap.dedent(
        f"""
        for mode in Mode:
            try:
                SwapStore({str(target)!r}, 1 << 20, mode=mode)
            except SwapError as error:
                print(error)
        """
    )
    command = f'mount -t tmpfs -o ro none {target} && exec "$@"'
    unshare = ["unshare", "--mount", "sh", "-c", command, "sh", sys.executable, "-c", script]
    with contextlib.suppress(FileNotFoundError):
        done = subprocess.run(unshare, capture_output=True, text=True, timeout=60, check=False)
        if done.returncode == 0:
            assert len(done.stdout.splitlines()) == 3
            assert done.stdout.count("EROFS 30") == 3
            assert done.stdout.count("mounted for writing") == 3
            return
    pytest.skip("mount namespaces are not allowed here")


def test_file_system_that_becomes_read_only(engine: str, tmp_path: Path) -> None:
    memory = Memory(BLOCK)
    with SwapStore(tmp_path, 64 * BLOCK, engine=engine) as store:
        put(store, "a", pattern(BLOCK, 1))
        store.inject(Fault(errno=errno.EROFS, target=FaultTarget.WRITES, forever=True))
        for _ in range(3):
            with pytest.raises(SwapError, match="EROFS.*the file system became read-only"):
                store.put("a", memory.address, BLOCK).wait()
        assert get(store, "a") == pattern(BLOCK, 1)
        store.clear_faults()
        put(store, "a", pattern(BLOCK, 2))


@pytest.mark.parametrize("mode", ["SCRATCH", "DURABLE"])
def test_ring_is_forbidden(tmp_path: Path, mode: str) -> None:
    """The store falls back to threads, says so once and in its statistics, and works."""
    lines = run(
        SECCOMP_AGAINST_IO_URING
        + f"""
import logging
logging.basicConfig(stream=sys.stdout, format="%(message)s")
with SwapStore({str(tmp_path)!r}, 1 << 22, mode=Mode.{mode}) as store:
    round_trip(store)
    print(store.engine, "|", store.stats().fallback_reason)
"""
    )
    if lines == ["no seccomp here"]:
        pytest.skip("seccomp filters are not available")
    said = [line for line in lines if "io_uring cannot be used, threads are used instead" in line]
    assert len(said) == 1
    assert lines[-1].startswith("threads | ")


def test_lock_limit_of_64_kib(engine: str, public_directory: str) -> None:
    """Registering memory is refused, and everything works without; as root the limit does not count."""
    lines = run(
        f"""
        resource.setrlimit(resource.RLIMIT_MEMLOCK, (65536, 65536))
        give_up_root()
        with SwapStore({public_directory!r}, 1 << 24, engine={engine!r}) as store:
            memory = Memory(1 << 23)
            registered = store.register_buffer(memory.address, 1 << 23)
            round_trip(store)
            memory.fill(pattern(1 << 23, 2))
            store.put("b", memory.address, 1 << 23).wait()
            store.get("b", memory.address, 1 << 23).wait()
            assert memory[0 : 1 << 23] == pattern(1 << 23, 2)
            store.unregister_buffer(memory.address)
            print(registered)
        """
    )
    assert lines == ["False"]


def test_thread_limit(public_directory: str) -> None:
    """No further thread may be started: the engine and the checksums say so, and nothing is left behind."""
    lines = run(
        f"""
        give_up_root()
        with SwapStore({public_directory!r}, 1 << 22, engine="threads", threads=1, checksums=True) as store:
            resource.setrlimit(resource.RLIMIT_NPROC, (1, 1))
            try:
                round_trip(store)
            except SwapError as error:
                print(error)
            print(store.used_bytes, store.stats().in_flight)
            try:
                SwapStore({public_directory!r}, 1 << 22, engine="threads")
            except SwapError as error:
                print(error)
        """
    )
    if lines[0] == str(1 << 20) + " 0":
        pytest.skip("the limit of processes does not count here")
    assert "cannot start a thread for checksums" in lines[0]
    assert lines[1] == "0 0"
    assert "cannot start its workers" in lines[2]
    assert "ulimit -u" in lines[2]


def test_concurrent_stores_in_one_process_and_directory(engine: str, tmp_path: Path) -> None:
    failures: list[BaseException] = []

    def work(index: int) -> None:
        try:
            mode = Mode.SCRATCH if index % 2 else Mode.EXPLICIT
            with SwapStore(tmp_path, 256 * BLOCK, engine=engine, mode=mode, checksums=index > 1) as store:
                for turn in range(8):
                    for key in range(3):
                        put(store, key, pattern((1 + key) * 8 * BLOCK, index * 100 + turn * 10 + key))
                    if mode is Mode.EXPLICIT:
                        store.commit()
                    for key in range(3):
                        assert get(store, key) == pattern((1 + key) * 8 * BLOCK, index * 100 + turn * 10 + key)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert os.listdir(tmp_path) == []


def test_several_threads_put_commit_and_read_one_store(engine: str, tmp_path: Path) -> None:
    """Each thread has keys of its own; one more commits and takes snapshots all the time."""
    failures: list[BaseException] = []
    over = threading.Event()
    with SwapStore(tmp_path, 512 * BLOCK, engine=engine, mode=Mode.EXPLICIT, checksums=True) as store:

        def work(index: int) -> None:
            try:
                for turn in range(25):
                    put(store, index, pattern(4 * BLOCK, index * 100 + turn))
                    assert get(store, index) == pattern(4 * BLOCK, index * 100 + turn)
            except BaseException as error:
                failures.append(error)

        def commit() -> None:
            try:
                while not over.is_set():
                    store.commit()
                    with store.snapshot() as snapshot:
                        for key in snapshot.keys():  # noqa: SIM118
                            memory = Memory(4 * BLOCK)
                            snapshot.get(key, memory.address, 4 * BLOCK).wait()
                            assert memory[0:8] != bytes(8)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(1, 4)]
        committer = threading.Thread(target=commit)
        for thread in [*threads, committer]:
            thread.start()
        for thread in threads:
            thread.join()
        over.set()
        committer.join()
        assert failures == []
        store.commit()
        assert store.used_bytes == 12 * BLOCK
