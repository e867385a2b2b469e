"""The asynchronous engines: every behaviour on each engine that works here."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from aligned_memory import Memory, pattern

from swap import (
    Aio,
    Fault,
    FaultAction,
    FaultTarget,
    IoTicket,
    Job,
    Priority,
    SwapDeadlineError,
    SwapError,
    SwapFullError,
    engines_available,
    uring_refusal,
)

BLOCK = 4096
MIB = 1 << 20


def faulty_aio(faults: list[Fault], **options: Any) -> Aio:
    aio = Aio(**options)
    for fault in faults:
        aio.inject(fault)
    return aio


@pytest.fixture(params=["io_uring", "threads"])
def engine(request: pytest.FixtureRequest) -> str:
    name: str = request.param
    if name not in engines_available():
        pytest.skip(f"{name} does not work here: {uring_refusal()}")
    return name


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    """A buffered file: any offset, length and address will do."""
    descriptor = os.open(tmp_path / "file", os.O_RDWR | os.O_CREAT, 0o600)
    yield descriptor
    os.close(descriptor)


@pytest.fixture
def direct_fd(tmp_path: Path) -> Iterator[int]:
    try:
        descriptor = os.open(tmp_path / "direct", os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
    except OSError as error:
        pytest.skip(f"no O_DIRECT on the file system of {tmp_path}: {error}")
    os.posix_fallocate(descriptor, 0, 1 << 20)
    yield descriptor
    os.close(descriptor)


def round_trip(aio: Aio, fd: int, offset: int, length: int) -> None:
    """Write a pattern, read it back elsewhere, check the bytes and their surroundings."""
    source, target = Memory(length + 2 * BLOCK), Memory(length + 2 * BLOCK)
    data = pattern(length, seed=length)
    source[BLOCK : BLOCK + length] = data
    aio.write(fd, offset, source.address + BLOCK, length).wait()
    aio.read(fd, offset, target.address + BLOCK, length).wait()
    assert target[BLOCK : BLOCK + length] == data
    assert target[0:BLOCK] == bytes(BLOCK)
    assert target[BLOCK + length : 2 * BLOCK + length] == bytes(BLOCK)


@pytest.mark.parametrize("length", [0, 1, 511, 4095, 4096, 4097, 65536, 3 * 65536 + 13, 999_983])
@pytest.mark.parametrize("block_bytes", [4096, 65536])
def test_round_trip_of_any_length(engine: str, fd: int, length: int, block_bytes: int) -> None:
    with Aio(engine=engine, block_bytes=block_bytes, queue_depth=3, threads=3) as aio:
        assert aio.engine == engine
        round_trip(aio, fd, 7, length)
        stats = aio.stats()
    assert (stats.reads, stats.writes, stats.read_bytes, stats.write_bytes) == (1, 1, length, length)
    assert stats.in_flight == 0


def test_round_trip_direct_with_registered_memory_and_file(engine: str, direct_fd: int) -> None:
    with Aio(engine=engine, block_bytes=16384) as aio:
        aio.register_file(direct_fd)
        memory = Memory(1 << 20)
        registered = aio.register_buffer(memory.address, 1 << 19)  # half of it: one request may straddle
        assert engine == "io_uring" or not registered
        memory[0 : 1 << 19] = pattern(1 << 19)
        half = 1 << 19
        aio.write(direct_fd, 0, memory.address, half).wait()
        aio.read(direct_fd, 0, memory.address + half, half).wait()
        assert memory[half : 2 * half] == pattern(half)
        quarter = half // 2
        aio.read(direct_fd, 0, memory.address + quarter, half).wait()  # half registered, half not
        assert memory[quarter : quarter + half] == pattern(half)
        aio.unregister_buffer(memory.address)
        aio.unregister_file(direct_fd)
        aio.read(direct_fd, 0, memory.address, BLOCK).wait()
        assert memory[0:BLOCK] == pattern(BLOCK)


def test_registering_many_ranges_stops_at_the_table_and_nothing_breaks(engine: str, fd: int) -> None:
    memory = Memory(1100 * BLOCK)
    with Aio(engine=engine) as aio:
        taken = [aio.register_buffer(memory.address + i * BLOCK, BLOCK) for i in range(1100)]
        assert taken == sorted(taken, reverse=True)
        assert sum(taken) in (0, 1024) or resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY
        memory.fill(pattern(1100 * BLOCK))
        aio.write(fd, 0, memory.address, 1100 * BLOCK).wait()
        assert os.pread(fd, 1100 * BLOCK, 0) == pattern(1100 * BLOCK)


@pytest.mark.parametrize(("offset", "length", "shift"), [(1, 4096, 0), (0, 4095, 0), (0, 4096, 1)])
def test_misaligned_direct_transfer_is_an_error(
    engine: str, direct_fd: int, offset: int, length: int, shift: int
) -> None:
    memory = Memory(4 * BLOCK)
    with Aio(engine=engine) as aio, pytest.raises(SwapError, match="EINVAL.*multiples") as caught:
        aio.write(direct_fd, offset, memory.address + shift, length).wait()
    assert caught.value.errno == errno.EINVAL
    assert caught.value.offset_bytes == offset
    assert caught.value.length_bytes == length


@pytest.mark.parametrize("arguments", [(-1, 0, 4096, 1), (3, -1, 4096, 1), (3, 0, 0, 1), (3, (1 << 63) - 1, 4096, 2)])
def test_impossible_arguments_are_refused(engine: str, arguments: tuple[int, int, int, int]) -> None:
    with Aio(engine=engine) as aio:
        with pytest.raises(ValueError, match="expected|beyond"):
            aio.read(*arguments)
        with pytest.raises(ValueError, match="empty"):
            aio.register_buffer(0, 10)
        assert aio.stats().in_flight == 0


def test_unmapped_memory_is_an_error(engine: str, fd: int) -> None:
    os.pwrite(fd, b"x" * 8192, 0)
    with Aio(engine=engine) as aio, pytest.raises(SwapError, match="EFAULT"):
        aio.read(fd, 0, 4096, 4096).wait()  # page 1 is never mapped (vm.mmap_min_addr)


def test_closed_descriptor_is_an_error(engine: str) -> None:
    memory = Memory(BLOCK)
    descriptor = os.open("/dev/null", os.O_RDONLY)
    with Aio(engine=engine) as aio, pytest.raises(SwapError, match="EBADF"):
        os.close(descriptor)  # only now: the engine would take the number for itself
        aio.read(descriptor, 0, memory.address, BLOCK).wait()


def test_end_of_file_is_an_error_and_names_where(engine: str, fd: int) -> None:
    os.pwrite(fd, b"x" * 5000, 0)
    memory = Memory(2 * BLOCK)
    with Aio(engine=engine) as aio:
        ticket = aio.read(fd, 0, memory.address, 8192)
        with pytest.raises(SwapError, match="truncated") as caught:
            ticket.wait()
    assert caught.value.errno == errno.ENODATA
    assert caught.value.offset_bytes == 5000  # 5000 bytes came, then nothing
    assert memory[0:5000] == b"x" * 5000


def test_real_enospc_is_swap_full(engine: str) -> None:
    memory = Memory(BLOCK)
    descriptor = os.open("/dev/full", os.O_WRONLY)
    try:
        with Aio(engine=engine) as aio, pytest.raises(SwapFullError, match="ENOSPC"):
            aio.write(descriptor, 0, memory.address, BLOCK).wait()
    finally:
        os.close(descriptor)


def test_error_names_the_registered_file(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    with faulty_aio(engine=engine, faults=[Fault(errno=errno.EIO)]) as aio:
        aio.register_file(fd, "/some/drive")
        with pytest.raises(SwapError, match=r"write of 4096 bytes at offset 0 of /some/drive.*EIO 5") as caught:
            aio.write(fd, 0, memory.address, BLOCK).wait()
    assert caught.value.path == "/some/drive"
    copy = pickle.loads(pickle.dumps(caught.value))
    assert (type(copy), str(copy)) == (SwapError, str(caught.value))


# ---- faults ----


def transfers(aio: Aio, fd: int, memory: Memory, half: int) -> list[IoTicket]:
    """Two writes, then two reads of the same ranges, several requests each."""
    tickets = []
    for start in (aio.write, aio.read):
        pair = [start(fd, i * half, memory.address + i * half, half) for i in range(2)]
        for ticket in pair:
            while not ticket.wait_done(10):
                pass
        tickets += pair
    return tickets


@pytest.mark.parametrize("code", [errno.EIO, errno.ENOSPC, errno.EINTR, errno.EAGAIN])
def test_nth_io_fails_until_a_run_passes(engine: str, fd: int, code: int) -> None:
    half = 3 * BLOCK
    retried = code in (errno.EINTR, errno.EAGAIN)
    memory = Memory(2 * half)
    memory.fill(pattern(2 * half))
    for nth in range(1, 100):
        os.pwrite(fd, pattern(2 * half, seed=1), 0)
        with faulty_aio(engine=engine, block_bytes=BLOCK, faults=[Fault(nth=nth, errno=code)]) as aio:
            tickets = transfers(aio, fd, memory, half)
            failed = [error for ticket in tickets if (error := ticket.error())]
            stats = aio.stats()
        assert [error.errno for error in failed] == ([] if retried or nth > 12 else [code])
        assert stats.read_errors + stats.write_errors == len(failed)
        assert stats.in_flight == 0
        if retried:
            assert stats.retries == (1 if nth <= 12 else 0)
        if nth > 12:  # 4 operations of 3 requests: the 13th I/O does not exist
            break
        memory.fill(pattern(2 * half))
    else:
        pytest.fail("no run passed")


def test_endless_eagain_is_an_error_in_the_end(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    with faulty_aio(engine=engine, faults=[Fault(errno=errno.EAGAIN, forever=True)]) as aio:
        with pytest.raises(SwapError, match="EAGAIN"):
            aio.write(fd, 0, memory.address, BLOCK).wait()
        aio.clear_faults()
        aio.write(fd, 0, memory.address, BLOCK).wait()


@pytest.mark.parametrize("short_bytes", [1, 4096, 5000])
def test_short_transfers_are_continued(engine: str, fd: int, short_bytes: int) -> None:
    fault = Fault(action=FaultAction.SHORT, short_bytes=short_bytes, forever=short_bytes > 1)
    with faulty_aio(engine=engine, block_bytes=16384, faults=[fault]) as aio:
        round_trip(aio, fd, 0, 50_001)
        assert aio.stats().short_transfers > 0


def test_short_direct_transfers_are_continued(engine: str, direct_fd: int) -> None:
    fault = Fault(action=FaultAction.SHORT, short_bytes=BLOCK, forever=True)
    with faulty_aio(engine=engine, block_bytes=4 * BLOCK, faults=[fault]) as aio:
        round_trip(aio, direct_fd, 0, 13 * BLOCK)


def test_short_of_nothing_is_the_end_of_the_file(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    with (
        faulty_aio(engine=engine, faults=[Fault(action=FaultAction.SHORT, target=FaultTarget.READS)]) as aio,
        pytest.raises(SwapError, match="ENODATA"),
    ):
        aio.read(fd, 0, memory.address, BLOCK).wait()


def test_targets_count_separately(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    with faulty_aio(engine=engine, faults=[Fault(nth=2, target=FaultTarget.READS)]) as aio:
        for start, fails in [(aio.write, 0), (aio.read, 0), (aio.write, 0), (aio.read, 1), (aio.read, 0)]:
            ticket = start(fd, 0, memory.address, BLOCK)
            ticket.wait_done(10)
            assert (ticket.error() is not None) == bool(fails)


def test_operation_that_never_completes_meets_the_deadline(engine: str, fd: int) -> None:
    memory, beside = Memory(BLOCK), Memory(BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    hang = Fault(action=FaultAction.HANG, target=FaultTarget.WRITES)  # any thread may come to a fault first
    aio = faulty_aio(engine=engine, deadline_s=0.05, faults=[hang])
    stuck = aio.write(fd, 8192, memory.address, BLOCK)
    aio.read(fd, 0, beside.address, BLOCK).wait(10)  # the others go on
    for _ in range(2):  # it may be waited for again
        with pytest.raises(SwapDeadlineError, match="0.05 s") as caught:
            stuck.wait()
    assert isinstance(caught.value, TimeoutError)
    assert "write fd" in caught.value.detail
    assert "offset 8192 length 4096" in str(caught.value)
    assert not stuck.done()
    with pytest.raises(SwapDeadlineError, match="cancelled"):
        aio.close()
    with pytest.raises(SwapError, match="ECANCELED"):
        stuck.wait()
    aio.close()  # idempotent, and quiet now


def test_engine_full_of_stuck_operations_cancels_what_waits(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    fault = Fault(action=FaultAction.HANG, forever=True)
    aio = faulty_aio(engine=engine, queue_depth=2, threads=2, faults=[fault])
    tickets = [aio.write(fd, i * BLOCK, memory.address, BLOCK) for i in range(5)]
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)
    for ticket in tickets:
        with pytest.raises(SwapError, match="ECANCELED"):
            ticket.wait(10)


def test_delayed_operation_completes(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    os.pwrite(fd, pattern(BLOCK), 0)
    with faulty_aio(engine=engine, faults=[Fault(action=FaultAction.DELAY, delay_s=0.05)]) as aio:
        start = time.monotonic()
        ticket = aio.read(fd, 0, memory.address, BLOCK)
        assert not ticket.done() or time.monotonic() - start >= 0.05  # this thread may have been stopped meanwhile
        ticket.wait()
        assert time.monotonic() - start >= 0.05
        assert aio.stats().read_seconds >= 0.05
    assert memory[0:BLOCK] == pattern(BLOCK)


def test_close_cancels_a_long_delay(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    aio = faulty_aio(engine=engine, faults=[Fault(action=FaultAction.DELAY, delay_s=3600)])
    ticket = aio.read(fd, 0, memory.address, BLOCK)
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)
    with pytest.raises(SwapError, match="ECANCELED"):
        ticket.wait(10)


# ---- order ----


def test_urgent_overtakes_what_waits(engine: str, fd: int) -> None:
    """One request at a time; the first is held up, so everything else queues behind it."""
    memory = Memory(32 * BLOCK)
    os.pwrite(fd, bytes(33 * BLOCK), 0)
    faults = [
        Fault(action=FaultAction.DELAY, delay_s=0.5),
        # The urgent read is the 2nd I/O (the 1st, if the engine wakes up late); the 3rd is held for good, so that
        # nothing behind it can be done.
        Fault(nth=3, action=FaultAction.HANG),
    ]
    aio = faulty_aio(engine=engine, queue_depth=1, threads=1, block_bytes=BLOCK, faults=faults)
    normal = [aio.write(fd, i * BLOCK, memory.address, BLOCK) for i in range(20)]
    urgent = aio.read(fd, 0, memory.address, BLOCK, priority=Priority.URGENT)
    urgent.wait()
    assert [ticket.done() for ticket in normal[1:]] == [False] * 19
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_urgent_operations_keep_the_queue_short(engine: str, fd: int) -> None:
    """Writes that never end fill a queue of 4, and then no read gets through; while urgent reads come, 2 are let in.

    The engine may need longer between two of the reads than it stays considerate for (50 ms), on a busy machine:
    hence several attempts. Without consideration none of them could succeed.
    """
    memory = Memory(2 * BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)

    def attempt() -> bool:
        faults = [Fault(action=FaultAction.HANG, target=FaultTarget.WRITES, forever=True)]
        aio = faulty_aio(engine=engine, queue_depth=4, threads=4, block_bytes=BLOCK, faults=faults)
        try:
            urgent = aio.read(fd, 0, memory.address, BLOCK, priority=Priority.URGENT)
            writes = [aio.write(fd, BLOCK, memory.address + BLOCK, BLOCK) for _ in range(8)]
            for _ in range(5):
                urgent.wait(1)
                urgent = aio.read(fd, 0, memory.address, BLOCK, priority=Priority.URGENT)
            urgent.wait(1)
            assert not any(ticket.done() for ticket in writes)
            return True
        except SwapDeadlineError:
            return False
        finally:
            with pytest.raises(SwapDeadlineError):
                aio.close(0.05)

    assert any(attempt() for _ in range(20))


def test_what_was_held_back_for_urgent_operations_goes_out_by_itself(engine: str, fd: int) -> None:
    """The first 2 writes never end; the others are held back until no urgent operation came for a while."""
    memory = Memory(2 * BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    faults = [Fault(nth=nth, action=FaultAction.HANG, target=FaultTarget.WRITES) for nth in (1, 2)]
    aio = faulty_aio(engine=engine, queue_depth=8, threads=8, block_bytes=BLOCK, faults=faults)
    urgent = aio.read(fd, 0, memory.address, BLOCK, priority=Priority.URGENT)
    writes = [aio.write(fd, BLOCK, memory.address + BLOCK, BLOCK) for _ in range(10)]
    urgent.wait()
    for ticket in writes[2:]:
        ticket.wait(10)
    assert [ticket.done() for ticket in writes[:2]] == [False] * 2
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_a_long_write_is_cut_while_urgent_operations_come(engine: str, fd: int) -> None:
    """Of one block of 4 MiB a second request fails: so there is one, and it does not begin where a block does.

    The engine may need longer to begin the write than it stays considerate for (50 ms): hence several attempts.
    """
    memory = Memory(4 * MIB + BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)

    def attempt() -> int | None:
        faults = [Fault(nth=2, target=FaultTarget.WRITES)]
        with faulty_aio(engine=engine, queue_depth=4, threads=4, block_bytes=4 * MIB, faults=faults) as aio:
            urgent = aio.read(fd, 0, memory.address + 4 * MIB, BLOCK, priority=Priority.URGENT)
            write = aio.write(fd, BLOCK, memory.address, 4 * MIB)
            urgent.wait()
            try:
                write.wait()
            except SwapError as error:
                return error.offset_bytes
        return None

    found = {attempt() for _ in range(20)}
    assert found & {BLOCK + MIB, BLOCK + 2 * MIB, BLOCK + 3 * MIB}, found
    assert found <= {None, *(BLOCK + i * MIB for i in range(4))}


def test_what_is_cut_arrives_whole(engine: str, fd: int) -> None:
    """Two blocks and a bit, written while urgent reads come for a part of the time."""
    length = 8 * MIB + BLOCK + 1
    memory, target = Memory(length), Memory(length)
    data = pattern(length)
    memory[0:length] = data
    os.pwrite(fd, bytes(BLOCK), length)
    with Aio(engine=engine, queue_depth=4, threads=4, block_bytes=4 * MIB) as aio:
        for reads in range(4):
            os.pwrite(fd, bytes(length), 0)
            for _ in range(reads):
                aio.read(fd, length, target.address, BLOCK, priority=Priority.URGENT).wait()
            write = aio.write(fd, 0, memory.address, length)
            for _ in range(reads):
                aio.read(fd, length, target.address, BLOCK, priority=Priority.URGENT).wait()
            write.wait()
            assert os.pread(fd, length, 0) == data
        assert aio.stats().write_bytes == 4 * length


def test_background_operations_leave_room_for_the_others(engine: str, fd: int) -> None:
    """Of 9 that never end 4 are with the device, and 4 places of 8 are left for a read and a write."""
    memory = Memory(2 * BLOCK)
    os.pwrite(fd, bytes(2 * BLOCK), 0)
    faults = [Fault(nth=nth, action=FaultAction.HANG) for nth in (1, 2, 3, 4)]
    aio = faulty_aio(engine=engine, queue_depth=8, threads=8, block_bytes=BLOCK, faults=faults)
    waiting = [aio.write(fd, 0, memory.address, BLOCK, priority=Priority.BACKGROUND) for _ in range(9)]
    while aio.stats().queue_depth < 4:
        pass
    for _ in range(5):
        aio.read(fd, BLOCK, memory.address + BLOCK, BLOCK).wait()
        aio.write(fd, BLOCK, memory.address + BLOCK, BLOCK).wait()
    assert not any(ticket.done() for ticket in waiting)
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_background_operations_get_through_where_others_always_wait(engine: str, fd: int) -> None:
    """One request at a time: the first is held up, the third never ends; the second is the one that waits for long."""
    memory = Memory(BLOCK)
    faults = [Fault(action=FaultAction.DELAY, delay_s=0.5), Fault(nth=3, action=FaultAction.HANG)]
    aio = faulty_aio(engine=engine, queue_depth=1, threads=1, block_bytes=BLOCK, faults=faults)
    normal = [aio.write(fd, i * BLOCK, memory.address, BLOCK) for i in range(3)]
    background = aio.write(fd, 0, memory.address, BLOCK, priority=Priority.BACKGROUND)
    background.wait()
    assert not any(ticket.done() for ticket in normal[1:])
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_reads_and_writes_alternate(engine: str, fd: int) -> None:
    """Behind a held-up write 4 writes and 4 reads wait; the 5th of them is held for good: 2 of each are done."""
    memory = Memory(2 * BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    faults = [
        Fault(action=FaultAction.DELAY, delay_s=0.5),
        Fault(nth=6, action=FaultAction.HANG),
    ]
    aio = faulty_aio(engine=engine, queue_depth=1, threads=1, block_bytes=BLOCK, faults=faults)
    aio.write(fd, 0, memory.address, BLOCK, priority=Priority.URGENT)  # first, whenever the engine wakes up
    writes = [aio.write(fd, 0, memory.address, BLOCK) for _ in range(4)]
    reads = [aio.read(fd, 0, memory.address + BLOCK, BLOCK) for _ in range(4)]
    reads[1].wait()
    writes[1].wait()
    assert [t.done() for t in writes + reads] == [True, True, False, False] * 2
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_devices_take_turns(engine: str, fd: int) -> None:
    """One request at a time of 4 writes to a file, then 2 to another device: in turns, so the 5th is the file's 3rd.

    It is held for good; first come, first served would have done all four of the file and none of the device.
    """
    memory = Memory(BLOCK)
    other = os.open("/dev/null", os.O_WRONLY)
    aio = faulty_aio(engine=engine, queue_depth=1, threads=1, faults=[Fault(nth=5, action=FaultAction.HANG)])
    jobs = [Job(True, descriptor, 0, memory.address, BLOCK) for descriptor in (fd, fd, fd, fd, other, other)]
    tickets = aio.submit(jobs)
    for ticket in tickets[:2] + tickets[4:]:
        ticket.wait(10)
    assert [ticket.done() for ticket in tickets[2:4]] == [False, False]
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)
    os.close(other)


def test_batch_is_started_as_a_whole_or_not_at_all(engine: str, fd: int) -> None:
    memory = Memory(64 * BLOCK)
    memory.fill(pattern(64 * BLOCK))
    with Aio(engine=engine, queue_depth=4) as aio:
        assert aio.submit([]) == []
        jobs = [Job(True, fd, i * BLOCK, memory.address + i * BLOCK, BLOCK) for i in range(64)]
        with pytest.raises(ValueError, match="offset"):
            aio.submit([*jobs, Job(True, fd, -1, memory.address, BLOCK)])
        assert aio.stats().in_flight == aio.stats().writes == 0
        for ticket in aio.submit([*jobs, Job(True, fd, 0, 0, 0)]):
            ticket.wait()
        assert aio.stats().writes == 65
    assert os.pread(fd, 64 * BLOCK, 0) == pattern(64 * BLOCK)
    with pytest.raises(SwapError, match="closed"):
        aio.submit(jobs)


def test_several_threads_share_one_engine(engine: str, fd: int) -> None:
    failures: list[BaseException] = []
    os.ftruncate(fd, 4 * (1 << 20))

    def work(index: int) -> None:
        try:
            memory = Memory(1 << 18)
            for turn in range(20):
                data = pattern(1 << 17, seed=index * 1000 + turn)
                memory[0 : 1 << 17] = data
                aio.write(fd, index << 20, memory.address, 1 << 17).wait()
                aio.read(fd, index << 20, memory.address + (1 << 17), 1 << 17).wait()
                assert memory[1 << 17 : 1 << 18] == data
        except BaseException as error:
            failures.append(error)

    with Aio(engine=engine, block_bytes=16384, queue_depth=4) as aio:
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert aio.stats().reads == aio.stats().writes == 80


def test_all_who_wait_for_one_ticket_are_woken(engine: str, fd: int) -> None:
    """One wait gives up, then eight threads sleep on a read that is held up; without a wake-up they would time out."""
    memory = Memory(BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    with faulty_aio(engine=engine, faults=[Fault(action=FaultAction.DELAY, delay_s=0.3)]) as aio:
        ticket = aio.read(fd, 0, memory.address, BLOCK)
        with pytest.raises(SwapDeadlineError):
            ticket.wait(0.0)
        answers: list[bool] = []
        threads = [threading.Thread(target=lambda: answers.append(ticket.wait_done(30))) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert answers == [True] * 8 and ticket.done()


def test_latencies_are_of_submission_to_result(engine: str, fd: int) -> None:
    """Of 20 reads one is held up for 50 ms: rank ceil(0.95 x 20) = 19 is not that one, rank ceil(0.99 x 20) = 20 is."""
    memory = Memory(BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    with faulty_aio(engine=engine, faults=[Fault(nth=7, action=FaultAction.DELAY, delay_s=0.05)]) as aio:
        for _ in range(20):
            aio.read(fd, 0, memory.address, BLOCK).wait()
        stats = aio.stats()
    latency = stats.read_latency
    assert 0 < latency.p50_s <= latency.p95_s <= latency.p99_s <= latency.max_s
    assert latency.p99_s == latency.max_s >= 0.05  # the end of the last bucket is cut at the longest
    assert (stats.write_latency.p50_s, stats.write_latency.max_s) == (0, 0)


def test_failed_operations_have_no_latency(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    with faulty_aio(engine=engine, faults=[Fault()]) as aio:
        with pytest.raises(SwapError):
            aio.write(fd, 0, memory.address, BLOCK).wait()
        stats = aio.stats()
    assert (stats.write_errors, stats.write_latency.max_s) == (1, 0)


def test_queue_depth_is_what_the_device_holds(engine: str, fd: int) -> None:
    """Two writes never come back; a read beside them makes three at a time."""
    memory = Memory(2 * BLOCK)
    os.pwrite(fd, bytes(BLOCK), 0)
    faults = [Fault(action=FaultAction.HANG, target=FaultTarget.WRITES, forever=True)]
    aio = faulty_aio(engine=engine, queue_depth=3, threads=3, block_bytes=BLOCK, faults=faults)
    for _ in range(2):
        aio.write(fd, 0, memory.address, BLOCK)
    for _ in range(10_000):  # until both writes have been given to the device
        aio.read(fd, 0, memory.address + BLOCK, BLOCK).wait()
        if aio.stats().queue_depth == 2:
            break
    aio.read(fd, 0, memory.address + BLOCK, BLOCK).wait()
    stats = aio.stats()
    assert (stats.queue_depth, stats.peak_queue_depth) == (2, 3)
    assert (stats.in_flight, stats.peak_in_flight) == (2, 3)
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_many_engines_at_once(engine: str, fd: int) -> None:
    engines = [Aio(engine=engine) for _ in range(10)]
    for i, aio in enumerate(engines):
        round_trip(aio, fd, i, 5000)
    for aio in engines:
        aio.close()


# ---- life ----


def test_closed_engine_refuses(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    aio = Aio(engine=engine)
    ticket = aio.write(fd, 0, memory.address, BLOCK)
    aio.close()
    ticket.wait()
    with pytest.raises(SwapError, match="closed"):
        aio.read(fd, 0, memory.address, BLOCK)
    assert not aio.register_buffer(memory.address, BLOCK)
    assert aio.ended


def test_dropped_engine_finishes_its_work(engine: str, fd: int) -> None:
    memory = Memory(1 << 20)
    memory.fill(pattern(1 << 20))
    aio = Aio(engine=engine)
    aio.write(fd, 0, memory.address, 1 << 20)
    del aio
    assert os.pread(fd, 1 << 20, 0) == pattern(1 << 20)


def in_child(function: object) -> int:
    """Run in a forked child; returns its exit status, or raises when it hangs."""
    child = os.fork()
    if child == 0:
        code = 99
        try:
            function()  # type: ignore[operator]
            code = 0
        finally:
            os._exit(code)
    for _ in range(1000):
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.01)
    os.kill(child, 9)
    os.waitpid(child, 0)
    raise AssertionError("the child hangs")


def test_an_error_of_a_signals_handler_comes_as_it_is(engine: str, fd: int) -> None:
    def raise_late(*_: object) -> None:
        raise TimeoutError("mine")

    memory, before = Memory(BLOCK), signal.signal(signal.SIGALRM, raise_late)
    aio = faulty_aio(engine=engine, faults=[Fault(action=FaultAction.HANG)])
    try:
        stuck = aio.write(fd, 0, memory.address, BLOCK)
        signal.setitimer(signal.ITIMER_REAL, 0.01)
        with pytest.raises(TimeoutError, match="^mine$"):
            stuck.wait(60)
    finally:
        signal.signal(signal.SIGALRM, before)
    with pytest.raises(SwapDeadlineError):
        aio.close(0.05)


def test_forked_child_gets_a_clear_error_and_does_not_hang(engine: str, fd: int) -> None:
    memory = Memory(BLOCK)
    aio = faulty_aio(engine=engine, faults=[Fault(action=FaultAction.HANG)])
    holder = {"aio": aio, "stuck": aio.write(fd, 0, memory.address, BLOCK)}
    del aio

    def child() -> None:
        for use in (
            lambda: holder["aio"].read(fd, 0, memory.address, BLOCK),  # type: ignore[union-attr]
            lambda: holder["aio"].stats(),  # type: ignore[union-attr]
            lambda: holder["stuck"].wait(10),  # type: ignore[union-attr]
        ):
            with pytest.raises(SwapError, match="parent"):
                use()
        holder["aio"].close()  # type: ignore[union-attr]
        holder.clear()  # destructors in the child
        with Aio(engine=engine) as own:  # a new engine works in the child
            round_trip(own, fd, 0, 10_000)

    assert in_child(child) == 0
    parent = holder["aio"]
    assert isinstance(parent, Aio)
    round_trip(parent, fd, 8192, 10_000)  # the parent goes on as if nothing had happened
    with pytest.raises(SwapDeadlineError):
        parent.close(0.05)


def test_interpreter_exit_with_work_in_flight(engine: str, tmp_path: Path) -> None:
    script = f"""
        import os, sys
        sys.path.insert(0, {str(Path(__file__).parent)!r})
        from aligned_memory import Memory, pattern
        from swap import Aio
        fd = os.open({str(tmp_path / "out")!r}, os.O_RDWR | os.O_CREAT, 0o600)
        memory = Memory(1 << 22)
        memory.fill(pattern(1 << 22))
        aio = Aio(engine={engine!r})
        aio.write(fd, 0, memory.address, 1 << 22)
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(script)], check=True, timeout=60)
    assert (tmp_path / "out").read_bytes() == pattern(1 << 22)


def test_keyboard_interrupt_ends_a_wait() -> None:
    script = """
        import os, signal, sys, threading
        sys.path.insert(0, TESTS)
        from aligned_memory import Memory
        from swap import Aio, Fault, FaultAction
        memory = Memory(4096)
        aio = Aio()
        aio.inject(Fault(action=FaultAction.HANG))
        ticket = aio.read(os.open("/dev/zero", os.O_RDONLY), 0, memory.address, 4096)
        threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        try:
            ticket.wait(60)
        except KeyboardInterrupt:
            print("interrupted")
        try:
            aio.close(0.05)
        except TimeoutError:
            print("closed")
    """
    text = textwrap.dedent(script).replace("TESTS", repr(str(Path(__file__).parent)))
    result = subprocess.run([sys.executable, "-c", text], check=True, timeout=60, capture_output=True, text=True)
    assert result.stdout.split() == ["interrupted", "closed"]


def test_time_while_the_process_is_stopped_does_not_count() -> None:
    """Stopped for longer than the deadline; the drive ends after that, within what is left of it."""
    script = """
        import os, sys, time
        sys.path.insert(0, TESTS)
        from aligned_memory import Memory
        from swap import Aio, Fault, FaultAction, SwapDeadlineError, wait_all
        memory = Memory(4096)
        delays = [Fault(action=FaultAction.DELAY, nth=nth, delay_s=delay) for nth, delay in ((1, 2.7), (2, 2.5))]
        aio = Aio()
        for fault in (*delays, Fault(action=FaultAction.HANG, nth=3)):
            aio.inject(fault)
        fd = os.open("/dev/zero", os.O_RDONLY)
        tickets = [aio.read(fd, 0, memory.address, 4096) for _ in range(3)]
        print("waiting", flush=True)
        wait_all(tickets[:2], 1.5)  # sees the second end after the first one's time is over
        print("succeeded")
        begin = time.monotonic()
        try:
            tickets[2].wait(0.1)
        except SwapDeadlineError:
            print("late" if time.monotonic() - begin > 3 else "missed")
        try:
            aio.close(0.05)
        except TimeoutError:
            print("closed")
    """
    text = textwrap.dedent(script).replace("TESTS", repr(str(Path(__file__).parent)))
    command = [sys.executable, "-c", text]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as child:
        assert child.stdout is not None
        try:
            assert child.stdout.readline() == "waiting\n"
            time.sleep(0.2)
            child.send_signal(signal.SIGSTOP)
            time.sleep(2.0)
            child.send_signal(signal.SIGCONT)
            output, _ = child.communicate(timeout=30)
        finally:
            child.kill()
    assert output.split() == ["succeeded", "missed", "closed"], output


# ---- choice of the engine ----


def test_choice_is_reported_and_forceable(monkeypatch: pytest.MonkeyPatch) -> None:
    available = engines_available()
    assert available[-1] == "threads"
    monkeypatch.delenv("OFFLOAD_AIO_ENGINE", raising=False)
    with Aio() as aio:
        assert aio.engine == available[0]
        assert (aio.fallback_reason is None) == (aio.engine == "io_uring")
    monkeypatch.setenv("OFFLOAD_AIO_ENGINE", "threads")
    with Aio() as aio:
        assert (aio.engine, aio.fallback_reason) == ("threads", None)
    monkeypatch.setenv("OFFLOAD_AIO_ENGINE", "uring")
    with pytest.raises(ValueError, match="OFFLOAD_AIO_ENGINE: expected auto, io_uring or threads but got 'uring'"):
        Aio()
    with pytest.raises(ValueError, match="engine: expected"):
        Aio(engine="fast")


@pytest.mark.parametrize(
    "wrong",
    [{"queue_depth": 0}, {"threads": 0}, {"block_bytes": 1000}, {"block_bytes": 0}, {"deadline_s": 0}],
)
def test_impossible_settings_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Aio(**wrong)  # type: ignore[arg-type]


# A filter that answers EPERM to a call of io_uring in all threads, as container run times install one.
SECCOMP_AGAINST_IO_URING = """
import ctypes, platform, struct, sys
libc = ctypes.CDLL(None, use_errno=True)
REFUSED, EPERM = int(sys.argv[1]) if sys.argv[1:] else 425, 1  # io_uring_setup
# load the system call number; when it is that one answer EPERM, else allow
program = b"".join(struct.pack("HBBI", *i) for i in [
    (0x20, 0, 0, 0), (0x15, 0, 1, REFUSED),
    (0x06, 0, 0, 0x00050000 | EPERM), (0x06, 0, 0, 0x7FFF0000)])
buffer = ctypes.create_string_buffer(program)
class Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]
description = Program(4, ctypes.addressof(buffer))
SECCOMP, ALL_THREADS = {"aarch64": 277}.get(platform.machine(), 317), 1
if libc.prctl(38, 1, 0, 0, 0) or libc.syscall(SECCOMP, 1, ALL_THREADS, ctypes.byref(description)):
    print("no seccomp here")
    sys.exit(0)
"""


@pytest.mark.parametrize("call", [425, 426], ids=["io_uring_setup", "io_uring_enter"])
def test_refused_io_uring_falls_back_to_threads(call: int) -> None:
    script = """
        from swap import Aio, SwapError, engines_available
        print(engines_available())
        aio = Aio()
        print(aio.engine, "|", aio.fallback_reason)
        try:
            Aio(engine="io_uring")
        except SwapError as error:
            print(error)
    """
    result = subprocess.run(
        [sys.executable, "-c", SECCOMP_AGAINST_IO_URING + textwrap.dedent(script), str(call)],
        check=True,
        timeout=60,
        capture_output=True,
        text=True,
    )
    lines = result.stdout.splitlines()
    if lines == ["no seccomp here"]:
        pytest.skip("seccomp filters are not available")
    assert lines[0] == "('threads',)"
    assert lines[1].startswith("threads | ")
    assert "container" in lines[1] or "without liburing" in lines[1]
    assert 'use engine="threads"' in lines[2]


def test_a_ring_that_breaks_down_leaves_what_the_kernel_holds() -> None:
    """It may still write to the memory: that is not reported as over, and the engine does not end."""
    before = """
        import ctypes, os, time
        from swap import Aio, SwapDeadlineError, SwapError, engines_available
        if "io_uring" not in engines_available():
            print("no io_uring here")
            raise SystemExit
        aio = Aio(engine="io_uring", queue_depth=2, deadline_s=10)
        memory, (end, other) = ctypes.create_string_buffer(8192), os.pipe()
        held = aio.read(end, 0, ctypes.addressof(memory), 4096)
        while "1 reads" not in aio.dump() or aio.stats().queue_depth != 1:
            time.sleep(1e-3)
        time.sleep(0.05)  # until the kernel has it
    """
    after = """
        for _ in range(20):  # more than a ring of failed submissions has room for
            late = aio.read(other, 0, ctypes.addressof(memory) + 4096, 4096)
            try:
                late.wait()
            except SwapDeadlineError:
                raise
            except SwapError as error:
                assert error.errno == 1, error
        assert not held.done()
        try:
            aio.close(0.05)
        except SwapDeadlineError:
            print("held", aio.ended, held.done(), flush=True)
        os._exit(0)
    """
    script = textwrap.dedent(before) + SECCOMP_AGAINST_IO_URING + textwrap.dedent(after)
    result = subprocess.run([sys.executable, "-c", script, "426"], timeout=60, capture_output=True, text=True)
    if result.stdout.startswith("no "):
        pytest.skip(result.stdout)
    assert (result.returncode, result.stdout) == (0, "held False False\n"), result.stderr


def test_import_is_light() -> None:
    script = "import swap, sys; print([m for m in ('torch', 'numpy', 'asyncio') if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", script], check=True, capture_output=True, text=True)
    assert result.stdout.strip() == "[]"
