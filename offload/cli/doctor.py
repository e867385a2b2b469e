"""Is this machine ready? Facts about it, what is wrong with them, and what to do about that.

Owns the facts that matter (:class:`Facts`), the judgement over them (:func:`diagnose`, a pure function) and how
findings are shown. Gathering never raises: what cannot be found out is None. Must not know models or training.
Next: :mod:`offload.memory.machine` for where facts come from.

A *problem* keeps something from working, a *warning* costs speed; both carry a remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
from collections.abc import Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from offload.config import format_bytes
from offload.memory import machine

GIB = 1 << 30
BUILD = "build it: pip install . (or make venv) in the checkout, which needs a C++20 compiler"
LEAST_KERNEL = (5, 10)
LEAST_TORCH = (2, 7)
LEAST_PYTHON = (3, 10)
LEAST_LOCKABLE_BYTES = 64 << 20  # what registered buffers are worth having for
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_FREE_BYTES = 10 * GIB
LEAST_OPEN_FILES = 256
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs"})
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class Level(Enum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclasses.dataclass(frozen=True, slots=True)
class Finding:
    """One thing that was looked at; `remedy` is "" exactly when the level is OK."""

    subject: str
    level: Level
    text: str
    remedy: str = ""

    def __post_init__(self) -> None:
        assert (self.level is Level.OK) == (self.remedy == ""), self


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class PathFacts:
    """A folder that shall hold swap files.

    Attributes:
        path: as the user named it.
        error: why no file can be created there, or None.
        direct: files can be opened with O_DIRECT and the file system takes it.
        alignment_bytes: that direct I/O needs.
        mount: the file system.
        free_bytes: that this user may write.
    """

    path: str
    error: str | None = None
    direct: bool = True
    alignment_bytes: int | None = None
    mount: machine.Mount | None = None
    free_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as torch sees it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is judged. None means not known.

    Attributes:
        system: of the kernel, "Linux" where this runtime works.
        kernel: its release.
        python: version.
        torch: version, None when missing.
        torch_error: why torch cannot be imported.
        torch_cuda: CUDA version that torch was built with.
        omp_dynamic: OpenMP may start fewer threads than it is asked for.
        transformers: version, None when missing.
        extension_errors: compiled extension -> why it cannot be loaded.
        uring_refusal: why io_uring cannot be used, None when it can.
        lockable_bytes: that may be locked, None without a limit.
        open_files: that a process may have.
        huge_pages: "always", "madvise" or "never".
        isas: paths of the optimizer kernels, widest first.
        cores: that this process may use.
        numa_nodes: memory nodes.
        memory_bytes: RAM.
        available_bytes: of it.
        container_bytes: limit of the container.
        gpus: that torch can use.
        gpu_present: the system has a driver for NVIDIA GPUs loaded.
        gpu_driver: its version.
        paths: folders for swap files.
    """

    system: str = "Linux"
    kernel: str = ""
    python: str = ""
    torch: str | None = None
    torch_error: str | None = None
    torch_cuda: str | None = None
    omp_dynamic: bool = False
    transformers: str | None = None
    extension_errors: dict[str, str] = dataclasses.field(default_factory=dict)
    uring_refusal: str | None = None
    lockable_bytes: int | None = None
    open_files: int | None = None
    huge_pages: str | None = None
    isas: tuple[str, ...] = ()
    cores: int | None = None
    numa_nodes: int = 1
    memory_bytes: int | None = None
    available_bytes: int | None = None
    container_bytes: int | None = None
    gpus: tuple[GpuFacts, ...] = ()
    gpu_present: bool = False
    gpu_driver: str | None = None
    paths: tuple[PathFacts, ...] = ()


# ---- gathering ----


def gather(paths: Sequence[Path] = ()) -> Facts:
    """Return the facts about this machine and about folders for swap files. Never raises, takes a few seconds."""
    values: dict[str, Any] = {}
    for collect in (_system_facts, _memory_facts, _extension_facts, _torch_facts):
        with contextlib.suppress(Exception):  # an odd machine must not keep the rest from being told
            values.update(collect())
    return Facts(**values, paths=tuple(_path_facts(path) for path in paths))


def _system_facts() -> dict[str, Any]:
    import resource

    open_files, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return {
        "system": platform.system(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "omp_dynamic": os.environ.get("OMP_DYNAMIC", "").strip().lower() == "true",
        "transformers": machine.version_of("transformers"),
        "lockable_bytes": machine.locked_memory_limit(),
        "open_files": None if open_files == resource.RLIM_INFINITY else open_files,
        "huge_pages": machine.transparent_huge_pages(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "numa_nodes": machine.numa_nodes(),
        "gpu_present": Path("/proc/driver/nvidia/version").exists() or Path("/dev/nvidiactl").exists(),
    }


def _memory_facts() -> dict[str, Any]:
    import psutil

    memory = psutil.virtual_memory()
    return {
        "memory_bytes": int(memory.total),
        "available_bytes": int(memory.available),
        "container_bytes": machine.cgroup_memory_limit(),
    }


def _extension_facts() -> dict[str, Any]:
    values: dict[str, Any] = {}
    errors: dict[str, str] = {}
    try:
        from offload.kernels.cpu_adam import available_isas

        values["isas"] = available_isas()
    except Exception as error:
        errors["offload._cpu_adam"] = str(error.__cause__ or error)
    try:
        from swap.io.aio import uring_refusal

        values["uring_refusal"] = uring_refusal()
    except Exception as error:
        errors["swap._aio"] = str(error.__cause__ or error)
    return {**values, "extension_errors": errors}


def _torch_facts() -> dict[str, Any]:
    values: dict[str, Any] = {"torch": machine.version_of("torch")}
    try:
        import torch

        values |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
        if torch.cuda.is_available():
            properties = [torch.cuda.get_device_properties(index) for index in range(torch.cuda.device_count())]
            values["gpus"] = tuple(
                GpuFacts(name=p.name, memory_bytes=p.total_memory, capability=(p.major, p.minor)) for p in properties
            )
    except Exception as error:
        values["torch_error"] = f"{type(error).__name__}: {error}"
    values["gpu_driver"] = _gpu_driver()
    return values


def _gpu_driver() -> str | None:
    with contextlib.suppress(Exception):
        import pynvml

        pynvml.nvmlInit()
        try:
            version = pynvml.nvmlSystemGetDriverVersion()
            return version.decode() if isinstance(version, bytes) else str(version)
        finally:
            pynvml.nvmlShutdown()
    return machine.read_text("/sys/module/nvidia/version")


def _path_facts(path: Path) -> PathFacts:
    try:
        return _probe_path(path)
    except Exception as error:
        return PathFacts(path=str(path), error=str(error))


def _probe_path(path: Path) -> PathFacts:
    """Create a file without a name in `path` and ask about it; nothing is written."""
    from swap.io.aio import file_facts

    flags, direct = os.O_RDWR | os.O_CLOEXEC | os.O_TMPFILE, True
    try:
        fd = os.open(path, flags | os.O_DIRECT, 0o600)
    except FileNotFoundError:
        return PathFacts(path=str(path), error="there is no such folder")
    except NotADirectoryError:
        return PathFacts(path=str(path), error="it is not a folder")
    except PermissionError:
        return PathFacts(path=str(path), error="this user may not write there", mount=machine.mount_of(path))
    except OSError:
        direct = False
        fd = os.open(path, flags, 0o600)
    try:
        facts = file_facts(fd)
    finally:
        os.close(fd)
    return PathFacts(
        path=str(path),
        direct=direct and not facts.direct_refused,
        alignment_bytes=max(facts.memory_alignment, facts.offset_alignment) or None,
        mount=machine.mount_of(path),
        free_bytes=machine.free_space(path),
    )


# ---- judging ----


def diagnose(facts: Facts) -> list[Finding]:
    """Return what is right and wrong, in the order in which it is shown."""
    found = [
        _kernel(facts),
        _python(facts),
        _torch(facts),
        *_threads(facts),
        _transformers(facts),
        *_extensions(facts),
        *_gpu(facts),
        _memory(facts),
        _processor(facts),
        _numa(facts),
        _huge_pages(facts),
        _lock_limit(facts),
        _open_files(facts),
    ]
    if "swap._aio" not in facts.extension_errors:
        found.append(_uring(facts))
    for path in facts.paths:
        found += _path(path)
    return found


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """Return 1 with problems (with `strict`: or warnings), else 0."""
    bad = {Level.PROBLEM, Level.WARNING} if strict else {Level.PROBLEM}
    return int(any(finding.level in bad for finding in findings))


def _ok(subject: str, text: str) -> Finding:
    return Finding(subject, Level.OK, text)


def _warning(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Level.WARNING, text, remedy)


def _problem(subject: str, text: str, remedy: str) -> Finding:
    return Finding(subject, Level.PROBLEM, text, remedy)


def _version(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version, () when there are none."""
    numbers = []
    for part in (text or "").split("+")[0].split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def _kernel(facts: Facts) -> Finding:
    if facts.system != "Linux":
        return _problem("kernel", f"{facts.system} {facts.kernel}", "use Linux: the NVMe tier needs its I/O interfaces")
    if _version(facts.kernel) < LEAST_KERNEL:
        return _warning("kernel", f"Linux {facts.kernel}", "use Linux 5.10 or newer (6.1 for the best io_uring)")
    return _ok("kernel", f"Linux {facts.kernel}")


def _python(facts: Facts) -> Finding:
    if _version(facts.python) < LEAST_PYTHON:
        return _problem("python", facts.python or "unknown version", "use Python 3.10 or newer")
    return _ok("python", facts.python)


def _torch(facts: Facts) -> Finding:
    if facts.torch is None:
        return _problem("torch", "not installed", "pip install torch")
    if facts.torch_error is not None:
        return _problem("torch", f"{facts.torch} cannot be imported: {facts.torch_error}", "install torch again")
    built = f"CUDA {facts.torch_cuda}" if facts.torch_cuda else "without CUDA"
    if _version(facts.torch) < LEAST_TORCH:
        return _problem("torch", f"{facts.torch}, {built}", "pip install 'torch>=2.7'")
    return _ok("torch", f"{facts.torch}, {built}")


def _threads(facts: Facts) -> list[Finding]:
    if not facts.omp_dynamic:
        return []
    return [_problem("OpenMP", "OMP_DYNAMIC=TRUE, with which torch itself computes NaN", "unset OMP_DYNAMIC")]


def _transformers(facts: Facts) -> Finding:
    if facts.transformers is None:
        return _ok("transformers", "not installed (needed by `offload finetune` only: pip install 'offload[finetune]')")
    return _ok("transformers", facts.transformers)


def _extensions(facts: Facts) -> list[Finding]:
    if not facts.extension_errors:
        return [_ok("extensions", "loaded")]
    return [
        _problem("extensions", f"{name} cannot be loaded: {why}", BUILD)
        for name, why in sorted(facts.extension_errors.items())
    ]


def _gpu(facts: Facts) -> list[Finding]:
    driver = f"driver {facts.gpu_driver}" if facts.gpu_driver else "driver version unknown"
    if not facts.gpus:
        if not facts.gpu_present:
            return [_ok("gpu", "none; models train on the processor")]
        if facts.torch is not None and facts.torch_cuda is None:
            remedy = "install a torch that is built with CUDA (https://pytorch.org/get-started/locally)"
            return [_problem("gpu", f"present ({driver}), but torch is built without CUDA", remedy)]
        remedy = f"install a driver that supports CUDA {facts.torch_cuda}, and look at nvidia-smi"
        return [_problem("gpu", f"present ({driver}), but torch cannot use it", remedy)]
    findings = []
    for gpu in facts.gpus:
        major, minor = gpu.capability
        text = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {major}.{minor}, {driver}"
        if gpu.capability < (8, 0):
            remedy = "train in float16 or float32, or use a GPU of compute capability 8.0 or more"
            findings.append(_warning("gpu", f"{text}: bfloat16 is slow on it", remedy))
        else:
            findings.append(_ok("gpu", text))
    return findings


def _memory(facts: Facts) -> Finding:
    if facts.memory_bytes is None:
        return _warning("memory", "size unknown", 'name the budget yourself: max_memory={"cpu": ...}')
    text = f"{format_bytes(facts.memory_bytes)}, {format_bytes(facts.available_bytes or 0)} available"
    usable = min(facts.memory_bytes, facts.available_bytes or facts.memory_bytes)
    if facts.container_bytes is not None and facts.container_bytes < facts.memory_bytes:
        text += f", container limited to {format_bytes(facts.container_bytes)}"
        usable = min(usable, facts.container_bytes)
        if usable >= LEAST_MEMORY_BYTES:
            remedy = f'stay below it with max_memory={{"cpu": "{usable * 8 // 10 // GIB}GiB"}}, or raise the limit'
            return _warning("memory", text, remedy)
    if usable < LEAST_MEMORY_BYTES:
        return _warning("memory", text, "close other programs or raise the limit: less than 4 GiB can be used")
    return _ok("memory", text)


def _processor(facts: Facts) -> Finding:
    text = f"{facts.cores or '?'} usable cores, optimizer kernels {', '.join(facts.isas) or 'unknown'}"
    if facts.isas and facts.isas[0] == "scalar":
        return _warning("processor", text, "use a processor with AVX2: the optimizer is several times faster there")
    return _ok("processor", text)


def _numa(facts: Facts) -> Finding:
    if facts.numa_nodes <= 1:
        return _ok("numa", "one memory node")
    remedy = "keep the process on the node of the GPU and the drive: numactl --cpunodebind=N --membind=N"
    return _warning("numa", f"{facts.numa_nodes} memory nodes: far memory is slower", remedy)


def _huge_pages(facts: Facts) -> Finding:
    if facts.huge_pages is None:
        return _ok("huge pages", "not known to this kernel")
    if facts.huge_pages == "never":
        remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
        return _warning("huge pages", "off: the NVMe tier needs several times the processor time", remedy)
    return _ok("huge pages", facts.huge_pages)


def _lock_limit(facts: Facts) -> Finding:
    limit = facts.lockable_bytes
    if limit is None:
        return _ok("locked memory", "no limit")
    if limit < LEAST_LOCKABLE_BYTES:
        remedy = (
            "raise it: ulimit -l unlimited, or memlock in /etc/security/limits.conf (container: --ulimit memlock=-1)"
        )
        text = f"limit {format_bytes(limit)}: buffers cannot be registered with io_uring (twice the processor time)"
        return _warning("locked memory", text, remedy)
    return _ok("locked memory", f"limit {format_bytes(limit)}")


def _open_files(facts: Facts) -> Finding:
    if facts.open_files is not None and facts.open_files < LEAST_OPEN_FILES:
        return _warning("open files", f"limit {facts.open_files}", "raise it: ulimit -n 4096")
    return _ok("open files", "no limit" if facts.open_files is None else f"limit {facts.open_files}")


# What the I/O engine says about io_uring, and what makes it work then; the first that fits.
_URING_REMEDIES = (
    ("without liburing", "install liburing-dev (Fedora: liburing-devel), then pip install . in the checkout again"),
    ("locked-memory", "raise ulimit -l, or use Linux 5.12 or newer, which does not need it"),
    ("forbidden", "sysctl kernel.io_uring_disabled=0 (container: a seccomp profile that permits it)"),
    ("", f"use Linux {'.'.join(map(str, LEAST_KERNEL))} or newer outside of a sandbox"),
)


def _uring(facts: Facts) -> Finding:
    refusal = facts.uring_refusal
    if refusal is None:
        return _ok("io_uring", "allowed")
    remedy = next(remedy for words, remedy in _URING_REMEDIES if words in refusal)
    text = "the thread engine is used instead, at several times the processor time; to have io_uring: "
    return _warning("io_uring", refusal, text + remedy)


def _path(path: PathFacts) -> list[Finding]:
    subject = f"path {path.path}"
    if path.error is not None:
        return [_problem(subject, path.error, "name a folder on a local drive that this user can write to")]
    mount = path.mount
    parts = [mount.file_system if mount else "unknown file system"]
    if mount and mount.drive:
        parts.append(f"on {mount.model or mount.drive}")
    parts.append(f"alignment {path.alignment_bytes or 'unknown'}")
    parts.append("O_DIRECT" if path.direct else "no O_DIRECT")
    parts.append(f"{format_bytes(path.free_bytes)} free" if path.free_bytes is not None else "free space unknown")
    text = ", ".join(parts)
    if mount and mount.file_system in MEMORY_FILE_SYSTEMS:
        return [_problem(subject, f"{text}: its files are host memory", "name a folder on a drive")]
    found = []
    if mount and mount.file_system in NETWORK_FILE_SYSTEMS:
        found.append(_warning(subject, f"{text}: a network file system", "name a folder on a local NVMe drive"))
    elif not path.direct:
        remedy = "name a folder on ext4 or xfs: without direct I/O the page cache takes memory and time"
        found.append(_warning(subject, text, remedy))
    if mount and mount.rotational and mount.drive and mount.drive.startswith("sd"):
        found.append(_warning(subject, f"{text}: a spinning disk", "name a folder on an NVMe drive"))
    if path.free_bytes is not None and path.free_bytes < LEAST_FREE_BYTES:
        found.append(_warning(subject, f"{text}: little space", "free space or name a folder on another drive"))
    return found or [_ok(subject, text)]


# ---- showing ----


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings for people."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:8s} {finding.subject:{width}s}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':8s} {'':{width}s}  -> {finding.remedy}")
    problems = sum(finding.level is Level.PROBLEM for finding in findings)
    warnings = sum(finding.level is Level.WARNING for finding in findings)
    counts = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    lines.append(counts if problems or warnings else "everything is fine")
    return "\n".join(lines)


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as plain values."""
    return {
        "problems": sum(finding.level is Level.PROBLEM for finding in findings),
        "warnings": sum(finding.level is Level.WARNING for finding in findings),
        "findings": [
            {"subject": f.subject, "level": f.level.value, "text": f.text, "remedy": f.remedy} for f in findings
        ],
    }
