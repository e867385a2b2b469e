"""Measure reads and writes of a drive through the I/O engines of :mod:`swap.io.aio`.

Owns the words of the NVMe bench (:class:`Workload`, :class:`Sample`, :class:`Contender`), the unlinked files and the
memory that contenders share, and our own contenders. Must not know the peers, which cases are worth measuring, or how
results are shown.
Next: :mod:`offload.cli.drive.tune` for the cases.

All contenders of a case use the same file (the same blocks of the drive) and the same amount of memory: the queue's,
``queue_depth x block_bytes``. Requests that are in flight together may then share memory, which is fine here because
nobody looks at the bytes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Protocol

import swap.io.files
from offload.sizes import MIB, short_bytes
from swap.errors import SwapError
from swap.io.aio import Aio, Job, Priority, wait_all
from swap.io.files import SwapFile, reserve

DEADLINE_SECONDS = 600.0  # a slow drive is what the bench is for; only a dead one is an error


class Pattern(Enum):
    """What is done with the file."""

    READ = "read"
    WRITE = "write"
    MIXED = "mixed"  # a read, a write, a read...; half the bytes each


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """What one measurement moves.

    Attributes:
        pattern: read, write or both.
        total_bytes: to move: as many whole objects as they have, at least one.
        object_bytes: moved by one operation.
    """

    pattern: Pattern
    total_bytes: int
    object_bytes: int

    @property
    def operations(self) -> int:
        """How many operations that makes."""
        return max(1, self.total_bytes // self.object_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measurement: bytes moved, wall time, processor time of the process that moved them (seconds)."""

    moved_bytes: int
    seconds: float
    cpu_seconds: float

    @property
    def bandwidth_gb_s(self) -> float:
        """Bytes per second / 1e9."""
        return self.moved_bytes / self.seconds / 1e9

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Processor seconds for 1e9 bytes."""
        return self.cpu_seconds / self.moved_bytes * 1e9


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """How an engine is asked to work; see :class:`swap.io.aio.Aio`. `threads` matters to the thread engine only."""

    engine: str = "io_uring"
    queue_depth: int = 32
    block_bytes: int = 4 * MIB
    threads: int = 4

    @property
    def footprint_bytes(self) -> int:
        """Memory that the queue holds when it is full."""
        return self.queue_depth * self.block_bytes

    def __str__(self) -> str:
        workers = f", {self.threads} threads" if self.engine == "threads" else f" x {self.queue_depth}"
        return f"{self.engine} {short_bytes(self.block_bytes)}{workers}"


class ContenderError(Exception):
    """A contender cannot run here; the text says why. The bench goes on without it."""


class Contender(Protocol):
    """Something that can carry out a workload."""

    @property
    def name(self) -> str:
        """What the table calls it."""

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """Carry out `workload` in `place` and measure it.

        Raises:
            ContenderError: it cannot run here.
        """


# ---- where it happens ----


@dataclasses.dataclass(frozen=True, slots=True)
class ScratchFile(SwapFile):
    """An open file without a name, of which `size_bytes` are reserved on the drive."""

    size_bytes: int

    @property
    def visible_as(self) -> str:
        """A name under which other programs of this user can open it while it exists."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"


def open_unlinked(directory: str | Path, size_bytes: int, *, direct: bool = True) -> ScratchFile:
    """Create a file without a name in `directory` and reserve its space.

    It is gone when the descriptor is closed, however the process ends.

    Raises:
        SwapFullError: not enough room.
        SwapError: the directory is missing or not writable.
    """
    opened = swap.io.files.open_unlinked(str(directory), direct=direct)
    file = ScratchFile(opened.fd, opened.directory, opened.direct, opened.alignment, size_bytes)
    try:
        reserve(file, size_bytes)
    except BaseException:
        os.close(file.fd)
        raise
    return file


class Workspace:
    """Files on the drives to measure and the memory that is written to them. A context manager.

    Attributes:
        files: one per directory.
        size_bytes: of all files together.
        base_address: of the memory, aligned to huge pages and filled with noise.
        memory_bytes: its length.
    """

    def __init__(self, directories: Sequence[Path], size_bytes: int, memory_bytes: int) -> None:
        """Create the files and the memory.

        Raises:
            SwapFullError: not enough room on a drive.
            SwapError: a directory cannot be used.
        """
        from offload.memory.arena import HostArena, fill_with_noise
        from offload.memory.budget import Tier

        with contextlib.ExitStack() as undo:
            files = []
            for directory in directories:
                share = size_bytes // len(directories) // MIB * MIB
                files.append(open_unlinked(directory, share))
                undo.callback(os.close, files[-1].fd)
            self._memory = HostArena(Tier.HOST, memory_bytes)
            undo.callback(self._memory.close)
            fill_with_noise(self._memory.base_address, memory_bytes)
            self._undo = undo.pop_all()
        self.files = tuple(files)
        self.size_bytes = sum(file.size_bytes for file in files)
        self.base_address = self._memory.base_address
        self.memory_bytes = memory_bytes

    def __enter__(self) -> Workspace:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Close the files, which deletes them, and return the memory. Idempotent."""
        self._undo.close()

    @property
    def extents(self) -> list[tuple[int, int]]:
        """Descriptor and bytes of every file."""
        return [(file.fd, file.size_bytes) for file in self.files]

    def make_empty(self) -> None:
        """Take their blocks from the files."""
        for file in self.files:
            os.ftruncate(file.fd, 0)

    def reserve(self) -> None:
        """Give empty files fresh blocks that were never written.

        Raises:
            SwapFullError: the drive has become too full for that.
        """
        for file in self.files:
            reserve(file, file.size_bytes)


# ---- our contenders ----


def plan_operations(
    workload: Workload,
    files: Sequence[tuple[int, int]],
    base_address: int,
    memory_bytes: int,
    weights: Sequence[float] = (),
) -> list[Job]:
    """Return what a workload does, in the order of submission.

    Args:
        workload: what to do.
        files: (descriptor, size in bytes) of the files, which take turns.
        base_address: of the memory, which is used again and again from the start.
        memory_bytes: its length; at least one object long.
        weights: share of each file; () for equal ones.

    Raises:
        ValueError: an object does not fit the memory or a file.
    """
    size = workload.object_bytes
    slots = memory_bytes // size
    if slots < 1 or any(file_size < size for _, file_size in files):
        raise ValueError(f"object_bytes: {size} do not fit {memory_bytes} bytes of memory or a file")
    plan = []
    shares = weights or [1.0] * len(files)
    taken = [0] * len(files)
    for index in range(workload.operations):
        file = min(range(len(files)), key=lambda i: (taken[i] + 1) / shares[i])  # the farthest behind its share
        fd, file_size = files[file]
        offset = taken[file] * size % (file_size // size * size)
        taken[file] += 1
        write = workload.pattern is Pattern.WRITE or (workload.pattern is Pattern.MIXED and index % 2 == 1)
        plan.append(Job(write, fd, offset, base_address + index % slots * size, size))
    return plan


@contextlib.contextmanager
def open_engine(settings: Settings, place: Workspace, *, registered: bool) -> Iterator[Aio]:
    """Open an engine on the files of `place`; its memory is registered if asked for and allowed.

    Raises:
        ContenderError: the engine cannot be opened here, or the kernel refuses to register the memory.
    """
    try:
        aio = Aio(
            engine=settings.engine,
            queue_depth=settings.queue_depth,
            block_bytes=settings.block_bytes,
            threads=settings.threads,
            deadline_s=DEADLINE_SECONDS,
        )
    except SwapError as error:
        raise ContenderError(str(error)) from None
    with aio:
        for file in place.files:
            aio.register_file(file.fd, file.directory)
        if registered and not aio.register_buffer(place.base_address, place.memory_bytes):
            raise ContenderError(
                f"{short_bytes(place.memory_bytes)} cannot be registered (ulimit -l is too low, Linux is older than "
                "5.19, or the build had liburing before 2.2)"
            )
        yield aio


@dataclasses.dataclass(frozen=True, slots=True)
class Ours:
    """An engine of :mod:`swap.io.aio`.

    Attributes:
        settings: of the engine.
        registered: the memory is registered with the kernel once, not at every request.
        label: what the table calls it; "" makes a name from the settings.
        weights: share of each file of the place; () for equal ones.
    """

    settings: Settings = Settings()
    registered: bool = False
    label: str = ""
    weights: tuple[float, ...] = ()

    @property
    def name(self) -> str:
        """See :class:`Contender`."""
        return self.label or str(self.settings)

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """See :class:`Contender`."""
        plan = plan_operations(workload, place.extents, place.base_address, place.memory_bytes, self.weights)
        with open_engine(self.settings, place, registered=self.registered) as aio:
            return timed(sum(job.length for job in plan), lambda: wait_all(aio.submit(plan)))


def timed(moved_bytes: int, action: Callable[[], object]) -> Sample:
    """Run `action` and return what it took; processor time is that of all threads of this process."""
    cpu_before, before = _cpu_seconds(), time.perf_counter()
    action()
    seconds = time.perf_counter() - before
    return Sample(moved_bytes, seconds, _cpu_seconds() - cpu_before)


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


# ---- latency ----


def idle_latencies(settings: Settings, place: Workspace, object_bytes: int, count: int) -> list[float]:
    """Return the seconds that each of `count` single reads took while nothing else was in flight.

    Raises:
        ContenderError: the engine cannot be opened here.
    """
    workload = Workload(pattern=Pattern.READ, total_bytes=object_bytes * count, object_bytes=object_bytes)
    plan = plan_operations(workload, place.extents, place.base_address, place.memory_bytes)
    with open_engine(settings, place, registered=False) as aio:
        return [_seconds_of(aio, job) for job in plan]


def latencies_under_writes(settings: Settings, place: Workspace, object_bytes: int, write_bytes: int) -> list[float]:
    """Return the seconds that urgent single reads took while `write_bytes` of write-back kept the drive busy.

    Raises:
        ContenderError: the engine cannot be opened here.
    """
    half = place.memory_bytes // 2
    big = min(16 * MIB, half)
    writes = Workload(pattern=Pattern.WRITE, total_bytes=write_bytes, object_bytes=big)
    reads = Workload(pattern=Pattern.READ, total_bytes=object_bytes, object_bytes=object_bytes)
    plan = plan_operations(writes, place.extents, place.base_address, half)
    fetch, *_ = plan_operations(reads, place.extents, place.base_address + half, half)
    seconds: list[float] = []
    with open_engine(settings, place, registered=False) as aio:
        tickets = [aio.submit([job])[0] for job in plan]
        while not seconds or not all(ticket.done() for ticket in tickets[-2:]):
            seconds.append(_seconds_of(aio, fetch._replace(priority=Priority.URGENT)))
        wait_all(tickets)
    return seconds


def _seconds_of(aio: Aio, job: Job) -> float:
    before = time.perf_counter()
    aio.submit([job])[0].wait()
    return time.perf_counter() - before
