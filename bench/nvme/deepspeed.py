"""What the NVMe bench compares with: the asynchronous I/O handle of DeepSpeed, at its best settings.

Owns how that handle is asked for a workload and how its settings are found. It is no dependency: without DeepSpeed, or
where its operator cannot be built, the bench goes on without it. Must not know our engines.

The handle reads and writes tensors in memory that it has locked. Huge pages are put under that, as under ours, unless
it is to be seen with memory as it makes it. Each of its threads takes an equal part of every operation and works on one
at a time. How many threads, how long an operation and how large a request serve it best depends on the drive, so all of
them are tried before a case is measured for the first time. Workloads of large objects may be done in operations as
long as the memory.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Protocol

from offload.cli.drive.measure import (
    ContenderError,
    Pattern,
    Sample,
    Workload,
    Workspace,
    plan_operations,
    timed,
)
from offload.sizes import MIB
from swap.io.aio import Job

if TYPE_CHECKING:
    import torch

DEEPSPEED = "DeepSpeed aio handle, huge pages"
DEEPSPEED_ORDINARY = "DeepSpeed aio handle"
TUNING_BYTES = 256 * MIB
TUNING_RUNS = 2
HUGE_PAGE_BYTES = 2 * MIB
_PENDING_OPERATIONS = 256  # a read opens the file, and closes it only when it is waited for
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25


def deepspeed_installed() -> bool:
    """Tell whether there is a DeepSpeed to compare with."""
    return find_spec("deepspeed") is not None


class Handle(Protocol):
    """What is used of DeepSpeed's ``aio_handle``. Both calls return 0 when the operation was started."""

    def async_pread(self, buffer: torch.Tensor, filename: str, file_offset: int) -> int:
        """Start a read; the file is opened anew."""

    def async_pwrite(self, buffer: torch.Tensor, fd: int, file_offset: int) -> int:
        """Start a write."""

    def wait(self) -> int:
        """Wait for everything that was started, which must be something."""

    def new_cpu_locked_tensor(self, num_elem: int, example: torch.Tensor) -> torch.Tensor:
        """Allocate locked memory; operations on other memory go through a copy."""

    def free_cpu_locked_tensor(self, tensor: torch.Tensor) -> bool:
        """Free it."""


class Operator(Protocol):
    """DeepSpeed's compiled operator."""

    def aio_handle(
        self, block_size: int, queue_depth: int, single_submit: bool, overlap_events: bool, intra_op_parallelism: int
    ) -> Any:
        """Open a handle with its threads."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class HandleSettings:
    """How a handle is asked to work.

    Attributes:
        threads: of the handle; every operation is divided among them.
        block_bytes: largest request.
        queue_depth: requests in flight per thread.
        operation_bytes: length of an operation; 0: that of an object.
    """

    threads: int
    block_bytes: int = MIB
    queue_depth: int = 32
    operation_bytes: int = 0


def handle_settings(workload: Workload, memory_bytes: int) -> list[HandleSettings]:
    """Return the settings worth trying for a workload."""
    if workload.object_bytes <= MIB:
        counts = [count for count in (1, 2, 4, 8, 16) if workload.object_bytes % (count * 4096) == 0]
        return [HandleSettings(threads=count) for count in counts]
    lengths = {0, memory_bytes // 2, memory_bytes} if workload.pattern is not Pattern.MIXED else {0, memory_bytes // 2}
    lengths = {length for length in lengths if length == 0 or workload.total_bytes % length == 0}
    return [
        HandleSettings(threads=count, block_bytes=block, operation_bytes=length)
        for count in (1, 2, 4, 8)
        for block in (MIB, 2 * MIB)
        for length in sorted(lengths)
    ]


def load_operator() -> Operator:
    """Build (the first time, for minutes) and load DeepSpeed's operator.

    Raises:
        ContenderError: it cannot be built or loaded here; usually libaio-dev is missing.
    """
    try:
        from deepspeed.ops.op_builder import AsyncIOBuilder  # type: ignore[import-not-found]

        operator: Operator = AsyncIOBuilder().load(verbose=False)
    except Exception as error:  # whatever building a library of others raises, the bench goes on
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise ContenderError(f"its operator async_io cannot be loaded: {reason}") from None
    return operator


class DeepSpeed:
    """DeepSpeed's handle, or two of them (one reads, one writes) for a mixed workload. A contender.

    Attributes:
        found: the settings that served a workload best, by pattern and length of an object.
    """

    def __init__(self, operator: Operator | None = None, *, like: DeepSpeed | None = None) -> None:
        """Use an operator and huge pages.

        Args:
            operator: None: load it when it is first needed.
            like: use what this one uses, but ordinary memory.
        """
        self.found: dict[tuple[Pattern, int], HandleSettings] = like.found if like is not None else {}
        self._operator: Operator | None = operator if like is None else like._operator
        self._huge_pages = like is None

    @property
    def name(self) -> str:
        """See :class:`offload.cli.drive.measure.Contender`."""
        return DEEPSPEED if self._huge_pages else DEEPSPEED_ORDINARY

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """See :class:`offload.cli.drive.measure.Contender`. The first run of a workload is preceded by the tuning."""
        if self._operator is None:
            self._operator = load_operator()
        case = workload.pattern, workload.object_bytes
        if case not in self.found:
            self.found[case] = self._tune(self._operator, workload, place)
        return _measure(self._operator, self.found[case], workload, place, huge_pages=self._huge_pages)

    @staticmethod
    def _tune(operator: Operator, workload: Workload, place: Workspace) -> HandleSettings:
        short = max(min(workload.total_bytes, TUNING_BYTES), place.memory_bytes)
        short -= short % place.memory_bytes
        trial = dataclasses.replace(workload, total_bytes=max(short, workload.object_bytes))
        choices = handle_settings(trial, place.memory_bytes)
        best = dict.fromkeys(choices, 0.0)
        for _ in range(TUNING_RUNS):
            for choice in choices:
                best[choice] = max(best[choice], _measure(operator, choice, trial, place).bandwidth_gb_s)
        return max(choices, key=best.__getitem__)


def _measure(
    operator: Operator, settings: HandleSettings, workload: Workload, place: Workspace, *, huge_pages: bool = True
) -> Sample:
    workload = dataclasses.replace(workload, object_bytes=settings.operation_bytes or workload.object_bytes)
    plan = plan_operations(workload, place.extents, 0, place.memory_bytes)
    names = {file.fd: file.visible_as for file in place.files}

    def open_handle() -> Handle:
        handle: Handle = operator.aio_handle(settings.block_bytes, settings.queue_depth, False, True, settings.threads)
        return handle

    try:
        reader = open_handle()
        writer = open_handle() if workload.pattern is Pattern.MIXED else reader
        with _locked_memory(reader, place, huge_pages=huge_pages) as memory:
            steps = [(one, memory[one.address : one.address + one.length]) for one in plan]
            moved = sum(one.length for one in plan)
            return timed(moved, lambda: _carry_out(reader, writer, steps, names))
    except (RuntimeError, TypeError, AttributeError) as error:  # another version of DeepSpeed
        raise ContenderError(str(error).splitlines()[0]) from None


def _carry_out(
    reader: Handle,
    writer: Handle,
    steps: Sequence[tuple[Job, torch.Tensor]],
    names: dict[int, str],
) -> None:
    for first in range(0, len(steps), _PENDING_OPERATIONS):
        batch = steps[first : first + _PENDING_OPERATIONS]
        for one, tensor in batch:
            if one.write:
                code = writer.async_pwrite(tensor, one.fd, one.offset)
            else:
                code = reader.async_pread(tensor, names[one.fd], one.offset)
            if code != 0:
                raise ContenderError(f"it refuses an operation of {one.length} bytes")
        writes = sum(one.write for one, _ in batch)
        if writes < len(batch):
            reader.wait()
        if writes and (writer is not reader or writes == len(batch)):
            writer.wait()


@contextlib.contextmanager
def _locked_memory(handle: Handle, place: Workspace, *, huge_pages: bool) -> Iterator[torch.Tensor]:
    """Lend memory that the handle takes as it is, with the noise of `place` in it."""
    import torch

    length = place.memory_bytes + HUGE_PAGE_BYTES
    whole = handle.new_cpu_locked_tensor(length, torch.empty(0, dtype=torch.uint8))
    try:
        start = -whole.data_ptr() % HUGE_PAGE_BYTES
        memory = whole[start : start + place.memory_bytes]
        whole_pages = place.memory_bytes // HUGE_PAGE_BYTES * HUGE_PAGE_BYTES
        library = ctypes.CDLL(None)
        for advice in (_MADV_HUGEPAGE, _MADV_COLLAPSE) if huge_pages else ():  # best effort
            library.madvise(ctypes.c_void_p(memory.data_ptr()), ctypes.c_size_t(whole_pages), advice)
        ctypes.memmove(memory.data_ptr(), place.base_address, place.memory_bytes)
        yield memory
    finally:
        handle.free_cpu_locked_tensor(whole)
