"""What the NVMe bench compares with: fio, and the ways in which programs commonly keep tensors in files.

Owns the command lines of fio and the reading of its answers, and the naive baselines. Must not know our engines.

fio works on the very file that our engines work on, through /proc: it has no name, and nothing stays behind when
either program is killed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Sequence
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

from offload.cli.drive.measure import (
    Contender,
    ContenderError,
    Pattern,
    Sample,
    ScratchFile,
    Settings,
    Workload,
    Workspace,
    open_unlinked,
    timed,
)
from offload.sizes import MIB

if TYPE_CHECKING:
    import torch

FIO_TIMEOUT_SECONDS = 600.0
_FIO_PATTERNS = {Pattern.READ: "read", Pattern.WRITE: "write", Pattern.MIXED: "rw"}


def fio_installed() -> bool:
    """Tell whether there is a fio to compare with."""
    return shutil.which("fio") is not None


@dataclasses.dataclass(frozen=True, slots=True)
class Fio:
    """fio's io_uring engine.

    Attributes:
        settings: queue depth and block size, as for our engine.
        tuned: huge pages (through malloc: no root needed) and fixed buffers; otherwise fio's ordinary memory.
    """

    settings: Settings = Settings()
    tuned: bool = True

    @property
    def name(self) -> str:
        """See :class:`offload.cli.drive.measure.Contender`."""
        return "fio, huge pages, fixed buffers" if self.tuned else "fio, its ordinary memory"

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """See :class:`offload.cli.drive.measure.Contender`."""
        command = fio_command(self.settings, workload, place.files, fixed_buffers=self.tuned)
        environment = dict(os.environ)
        if self.tuned:
            environment["GLIBC_TUNABLES"] = "glibc.malloc.hugetlb=1"
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, env=environment, timeout=FIO_TIMEOUT_SECONDS, check=False
            )
        except (OSError, subprocess.TimeoutExpired) as error:
            raise ContenderError(f"fio: {error}") from None
        if done.returncode:
            reason = (done.stderr.strip() or done.stdout.strip() or "no reason given").splitlines()[-1]
            raise ContenderError(f"fio ended with exit code {done.returncode}: {reason}")
        return read_fio(done.stdout)


def fio_command(
    settings: Settings, workload: Workload, files: Sequence[ScratchFile], *, fixed_buffers: bool
) -> list[str]:
    """Return the command line that makes fio do what our engine does."""
    block = min(settings.block_bytes, workload.object_bytes)
    command = [
        "fio",
        "--name=offload",
        "--filename=" + ":".join(file.visible_as for file in files),
        f"--rw={_FIO_PATTERNS[workload.pattern]}",
        "--ioengine=io_uring",
        f"--direct={int(all(file.direct for file in files))}",
        f"--bs={block}",
        f"--iodepth={settings.queue_depth}",
        f"--size={sum(file.size_bytes for file in files)}",
        f"--io_size={workload.total_bytes}",
        "--registerfiles",
        # Nothing but the transfers: no buffer scrambling, no random map, fewer clock calls; the file is there already.
        "--scramble_buffers=0",
        "--norandommap",
        "--gtod_reduce=1",
        "--allow_file_create=0",
        "--overwrite=1",
        "--fallocate=none",
        "--thread=1",
        "--output-format=json",
    ]
    return [*command, "--fixedbufs"] if fixed_buffers else command


def read_fio(output: str) -> Sample:
    """Return the measurement in fio's JSON output, which may follow lines of warnings.

    Raises:
        ContenderError: the output is not what is expected.
    """
    try:
        job = json.loads(output[output.index("{") :])["jobs"][0]
        moved = sum(int(job[kind]["io_bytes"]) for kind in ("read", "write"))
        milliseconds = max(float(job[kind]["runtime"]) for kind in ("read", "write"))
        cpu_share = (float(job["usr_cpu"]) + float(job["sys_cpu"])) / 100
        if moved <= 0 or milliseconds <= 0:
            raise ValueError("nothing was moved")
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ContenderError(f"fio: its output cannot be understood: {error}") from None
    return Sample(moved, milliseconds / 1e3, cpu_share * milliseconds / 1e3)


# ---- naive baselines ----


class NaiveFile:
    """Tensors that make up a state to keep, and a file without a name to keep them in."""

    def __init__(self, place: Workspace, total_bytes: int, tensor_bytes: int = 16 * MIB) -> None:
        """Create the tensors; the file is opened beside the first file of `place`."""
        import torch

        numel = min(tensor_bytes, total_bytes)
        self.tensors: dict[str, torch.Tensor] = {
            f"tensor{index}": torch.randint(0, 256, (numel,), dtype=torch.uint8)
            for index in range(max(1, total_bytes // numel))
        }
        self.total_bytes = sum(tensor.numel() for tensor in self.tensors.values())
        self.directory = place.files[0].directory
        self.fd = open_unlinked(self.directory, self.total_bytes, direct=False).fd

    @property
    def visible_as(self) -> str:
        """A name under which the file can be opened while it exists."""
        return f"/proc/{os.getpid()}/fd/{self.fd}"

    def replace(self, save: Callable[[str], None]) -> None:
        """Let `save` make a new file for those that insist on a name; it loses the name as soon as it is written."""
        with tempfile.TemporaryDirectory(prefix=".offload-bench-", dir=self.directory) as folder:
            name = os.path.join(folder, "tensors")
            save(name)
            fd = os.open(name, os.O_RDWR | os.O_CLOEXEC)
        os.close(self.fd)
        self.fd = fd

    def forget_cached(self) -> None:
        """Drop what was made durable from the page cache, so that the next read is one of the drive."""
        os.posix_fadvise(self.fd, 0, 0, os.POSIX_FADV_DONTNEED)

    def close(self) -> None:
        """Close, and so delete, the file."""
        os.close(self.fd)


@dataclasses.dataclass(frozen=True, slots=True)
class Naive:
    """A common way to keep tensors in a file; writes end with fsync, reads start with a cold page cache.

    Attributes:
        method: key of :data:`METHODS`.
        file: what is kept, and where.
    """

    method: str
    file: NaiveFile

    @property
    def name(self) -> str:
        """See :class:`offload.cli.drive.measure.Contender`."""
        return self.method

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """See :class:`offload.cli.drive.measure.Contender`. A read is of what the same method wrote, not counted."""
        save, load = METHODS[self.method]
        try:
            if workload.pattern is Pattern.WRITE:
                return timed(self.file.total_bytes, lambda: self._save_durably(save))
            self._save_durably(save)
            self.file.forget_cached()
            return timed(self.file.total_bytes, lambda: load(self.file))
        except Exception as error:  # whatever a library of others raises, the bench goes on
            raise ContenderError(f"{self.method}: {error}") from None

    def _save_durably(self, save: Callable[[NaiveFile], None]) -> None:
        save(self.file)
        os.fsync(self.file.fd)


def _reopened(naive: NaiveFile, mode: str) -> Any:
    return open(naive.visible_as, mode)


def _bytes_of(tensor: torch.Tensor) -> Any:
    return memoryview(tensor.numpy())  # type: ignore[arg-type]  # arrays are buffers; numpy says so from Python 3.12 on


def _torch_save(naive: NaiveFile) -> None:
    import torch

    with _reopened(naive, "wb") as file:
        torch.save(naive.tensors, file)


def _torch_load(naive: NaiveFile) -> None:
    import torch

    with _reopened(naive, "rb") as file:
        torch.load(file, weights_only=True)


def _safetensors_save(naive: NaiveFile) -> None:
    from safetensors.torch import save_file

    naive.replace(lambda name: save_file(naive.tensors, name))


def _safetensors_load(naive: NaiveFile) -> None:
    from safetensors.torch import load_file

    for tensor in load_file(naive.visible_as).values():
        tensor.clone()  # it may be a mapping whose bytes are read only now


def _raw_save(naive: NaiveFile) -> None:
    with _reopened(naive, "wb") as file:
        for tensor in naive.tensors.values():
            file.write(_bytes_of(tensor))


def _mmap_load(naive: NaiveFile) -> None:
    import torch

    whole = torch.from_file(naive.visible_as, shared=False, size=naive.total_bytes, dtype=torch.uint8)
    whole.clone()


def _read_load(naive: NaiveFile) -> None:
    with _reopened(naive, "rb") as file:
        for tensor in naive.tensors.values():
            file.readinto(_bytes_of(tensor))


# method -> how it saves, how it loads
METHODS = {
    "torch.save, torch.load": (_torch_save, _torch_load),
    "safetensors": (_safetensors_save, _safetensors_load),
    "write() and mmap": (_raw_save, _mmap_load),
    "write() and read()": (_raw_save, _read_load),
}


def naive_methods() -> list[str]:
    """Return the methods that can run here."""
    return [method for method in METHODS if method != "safetensors" or find_spec("safetensors") is not None]


@contextlib.contextmanager
def naive_contenders(place: Workspace, total_bytes: int) -> Iterator[list[Contender]]:
    """Open the naive contenders, which share `total_bytes` of tensors and one file."""
    naive = NaiveFile(place, total_bytes)
    try:
        yield [Naive(method, naive) for method in naive_methods()]
    finally:
        naive.close()
