"""Is this machine ready? Facts about it, what is wrong with them, and what to do about that.

Owns the facts that matter (:class:`Facts`), the checks that judge them (:data:`CHECKS`, pure functions) and how
findings are shown. Gathering never raises: what cannot be found out is None. Must not know models or training.
Next: :mod:`offload.memory.machine` for where facts come from.

A *problem* keeps something from working, a *warning* costs speed; both carry a remedy.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import re
from collections.abc import Callable, Sequence
from enum import Enum
from pathlib import Path
from typing import Any

from offload.memory import machine
from offload.sizes import GIB, format_bytes

BUILD = "build it: pip install . (or make venv) in the checkout, which needs a C++20 compiler"
LEAST_KERNEL = (5, 10)
LEAST_TORCH = (2, 7)
LEAST_TRANSFORMERS = (4, 56)
LEAST_PYTHON = (3, 10)
PAGE_LOCK_PROBE_BYTES = 256 << 20
LEAST_MEMORY_BYTES = 4 * GIB
LEAST_FREE_BYTES = 10 * GIB
LEAST_OPEN_FILES = 256
NETWORK_FILE_SYSTEMS = frozenset({"nfs", "nfs4", "cifs", "smb3", "9p", "fuse.sshfs", "ceph", "lustre", "glusterfs"})
PATH_ERRORS: dict[type[Exception], str] = {
    FileNotFoundError: "there is no such folder",
    NotADirectoryError: "it is not a folder",
    PermissionError: "this user may not write there",
}
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs"})


class Level(str, Enum):
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
    """A folder that shall hold swap files."""

    path: str  # as the user named it
    error: str | None = None  # why no file can be created there
    direct: bool = True  # files can be opened with O_DIRECT, and the file system takes it
    alignment_bytes: int | None = None  # that direct I/O needs
    mount: machine.Mount | None = None
    free_bytes: int | None = None  # that this user may write


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class GpuFacts:
    """One GPU as torch sees it."""

    name: str
    memory_bytes: int
    capability: tuple[int, int]


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Everything that is judged; None means not known, where nothing else is said."""

    system: str = "Linux"
    kernel: str = ""  # release
    python: str = ""
    torch: str | None = None  # version, None when missing
    torch_error: str | None = None  # why it cannot be imported
    torch_cuda: str | None = None  # that torch was built with
    omp_dynamic: bool = False  # OpenMP may start fewer threads than it is asked for
    omp_binding: str | None = None  # variable by which OpenMP keeps this process on fewer processors than it has
    transformers: str | None = None  # version, None when missing
    extension_errors: dict[str, str] = dataclasses.field(default_factory=dict)  # extension -> why it does not load
    uring_refusal: str | None = None  # why io_uring cannot be used, None when it can
    lockable_bytes: int | None = None  # None without a limit
    open_files: int | None = None  # that a process may have
    huge_pages: str | None = None  # "always", "madvise" or "never"
    isas: tuple[str, ...] = ()  # paths of the optimizer kernels, widest first
    cores: int | None = None  # that this process may use
    numa_nodes: int = 1
    memory_bytes: int | None = None
    available_bytes: int | None = None
    container_bytes: int | None = None  # limit of the container
    gpus: tuple[GpuFacts, ...] = ()  # that torch can use
    gpu_present: bool = False  # a driver for NVIDIA GPUs is loaded
    gpu_driver: str | None = None
    visible_gpus: str | None = None  # CUDA_VISIBLE_DEVICES, None where it is not set
    page_lock_refusal: str | None = None  # why the first GPU cannot copy from host memory by itself, None where it can
    update_refusal: str | None = None  # why the first GPU makes no updates, None where their bits are the CPU's
    operators_measured: int = 0  # of models, on this machine
    rates_measured: tuple[str, ...] = ()  # of its parts, a line each
    paths: tuple[PathFacts, ...] = ()


# ---- gathering ----


def gather(paths: Sequence[Path] = ()) -> Facts:
    """Return the facts about this machine and about folders for swap files. Never raises, takes a few seconds."""
    values: dict[str, Any] = {}
    for collect in (_system_facts, _memory_facts, _extension_facts, _torch_facts, _measured_facts):
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
    values: dict[str, Any] = {"extension_errors": {}}
    try:
        from offload.kernels.cpu_adam import available_isas

        values["isas"] = available_isas()
    except Exception as error:
        values["extension_errors"]["offload._cpu_adam"] = str(error.__cause__ or error)
    try:
        from swap.io.aio import uring_refusal

        values["uring_refusal"] = uring_refusal()
    except Exception as error:
        values["extension_errors"]["swap._aio"] = str(error.__cause__ or error)
    return values


def _torch_facts() -> dict[str, Any]:
    values: dict[str, Any] = {"torch": machine.version_of("torch"), "gpu_driver": _gpu_driver()}
    values["visible_gpus"] = os.environ.get("CUDA_VISIBLE_DEVICES")
    try:
        import torch

        values |= {"torch": torch.__version__, "torch_cuda": torch.version.cuda}
        values["omp_binding"] = machine.bound_by(torch.get_num_threads())
        from offload.memory.devices import gpus

        values["gpus"] = tuple(
            GpuFacts(name=name, memory_bytes=size, capability=capability) for name, size, capability in gpus()
        )
        if values["gpus"]:
            from offload.memory.page_lock import refusal

            values["page_lock_refusal"] = refusal(torch.device("cuda", 0), PAGE_LOCK_PROBE_BYTES)
            values["update_refusal"] = _update_refusal()
    except Exception as error:
        values["torch_error"] = f"{type(error).__name__}: {error}"
    return values


def _update_refusal() -> str | None:
    """Return why the first GPU makes no updates of AdamW for bf16 parameters."""
    from offload.kernels.cpu_adam import Dtype, StateKind
    from offload.kernels.optimizers import AdamW
    from offload.memory.devices import open_device

    kernels = open_device("cuda:0").kernels
    if kernels is None:
        return "there are no kernels for it"
    return kernels.refusal({AdamW().kernel}, StateKind.FLOAT32, {Dtype.BFLOAT16})


def _measured_facts() -> dict[str, Any]:
    from offload.measuring import Here
    from offload.memory.devices import open_device

    known = Here(open_device(None))
    return {"operators_measured": known.operators, "rates_measured": tuple(known.rates)}


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
    """Create a file without a name in `path` and ask about it; nothing is written."""
    try:
        from swap.io.aio import file_facts
        from swap.io.files import open_nameless

        try:
            fd, direct = open_nameless(str(path), os.O_DIRECT), True
        except OSError:
            fd, direct = open_nameless(str(path), 0), False
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
    except Exception as error:
        if isinstance(error, FileNotFoundError) and path.is_dir():
            return PathFacts(path=str(path), error="no file can be created there")
        return PathFacts(path=str(path), error=PATH_ERRORS.get(type(error), str(error)))


# ---- judging: one function per check, which returns what it found ----


Verdicts = list[tuple[Level, str, str]]  # level, text, remedy


def _ok(text: str) -> Verdicts:
    return [(Level.OK, text, "")]


def _warning(text: str, remedy: str) -> Verdicts:
    return [(Level.WARNING, text, remedy)]


def _problem(text: str, remedy: str) -> Verdicts:
    return [(Level.PROBLEM, text, remedy)]


def _version(text: str | None) -> tuple[int, ...]:
    """Return the leading numbers of a version, () when there are none."""
    numbers = re.match(r"\d+(\.\d+){0,2}", text or "", re.ASCII)
    return tuple(map(int, numbers[0].split("."))) if numbers else ()


def _kernel(facts: Facts) -> Verdicts:
    text = f"{facts.system} {facts.kernel}"
    if facts.system != "Linux":
        return _problem(text, "use Linux: the NVMe tier needs its I/O interfaces")
    if _version(facts.kernel) < LEAST_KERNEL:
        return _warning(text, "use Linux 5.10 or newer (6.1 for the best io_uring)")
    return _ok(text)


def _python(facts: Facts) -> Verdicts:
    if _version(facts.python) < LEAST_PYTHON:
        return _problem(facts.python or "unknown version", "use Python 3.10 or newer")
    return _ok(facts.python)


def _torch(facts: Facts) -> Verdicts:
    if facts.torch is None:
        return _problem("not installed", "pip install torch")
    if facts.torch_error is not None:
        return _problem(f"{facts.torch} cannot be imported: {facts.torch_error}", "install torch again")
    text = f"{facts.torch}, {f'CUDA {facts.torch_cuda}' if facts.torch_cuda else 'without CUDA'}"
    return _problem(text, "pip install 'torch>=2.7'") if _version(facts.torch) < LEAST_TORCH else _ok(text)


def _threads(facts: Facts) -> Verdicts:
    found: list[tuple[Level, str, str]] = []
    if facts.omp_dynamic:
        found += _problem("OMP_DYNAMIC=TRUE, with which torch itself computes NaN", "unset OMP_DYNAMIC")
    if facts.omp_binding is not None:
        found += _warning(
            f"{facts.omp_binding} binds the thread that imports torch, and with it updates and the drive's work",
            f"unset {facts.omp_binding}; taskset or numactl restrict a process as a whole",
        )
    return found


def _transformers(facts: Facts) -> Verdicts:
    needed = "needed by `offload finetune`, `generate`, `merge` and `plan`"
    if facts.transformers is None:
        return _ok(f"not installed ({needed}: pip install 'offload[finetune]')")
    is_old = _version(facts.transformers) < LEAST_TRANSFORMERS
    return _problem(facts.transformers, "pip install 'transformers>=4.56'") if is_old else _ok(facts.transformers)


def _extensions(facts: Facts) -> Verdicts:
    if not facts.extension_errors:
        return _ok("loaded")
    errors = sorted(facts.extension_errors.items())
    return [verdict for name, why in errors for verdict in _problem(f"{name} cannot be loaded: {why}", BUILD)]


def _gpu(facts: Facts) -> Verdicts:
    driver = f"driver {facts.gpu_driver}" if facts.gpu_driver else "driver version unknown"
    if not facts.gpus and not facts.gpu_present:
        return _ok("none; models train on the processor")
    if not facts.gpus and (facts.torch is None or facts.torch_error is not None):
        return []  # nobody knows whether torch could use it
    if not facts.gpus and facts.torch_cuda is None:
        remedy = "install a torch that is built with CUDA (https://pytorch.org/get-started/locally)"
        return _problem(f"present ({driver}), but torch is built without CUDA", remedy)
    if not facts.gpus and facts.visible_gpus is not None:
        text = f"present ({driver}), but torch sees none with CUDA_VISIBLE_DEVICES={facts.visible_gpus!r}"
        return _problem(text, "unset CUDA_VISIBLE_DEVICES, or name GPUs in it that nvidia-smi -L lists")
    if not facts.gpus:
        remedy = f"install a driver that supports CUDA {facts.torch_cuda}, and look at nvidia-smi"
        return _problem(f"present ({driver}), but torch cannot use it", remedy)
    found: Verdicts = []
    for gpu in facts.gpus:
        major, minor = gpu.capability
        text = f"{gpu.name}, {format_bytes(gpu.memory_bytes)}, compute capability {major}.{minor}, {driver}"
        remedy = "train in float16 or float32, or use a GPU of compute capability 8.0 or more"
        found += _warning(f"{text}: bfloat16 is slow on it", remedy) if gpu.capability < (8, 0) else _ok(text)
    return found


def _page_lock(facts: Facts) -> Verdicts:
    if not facts.gpus:
        return []
    if facts.page_lock_refusal is None:
        return _ok(f"{format_bytes(PAGE_LOCK_PROBE_BYTES)} of host memory can be page-locked for the GPU")
    text = f"host memory cannot be page-locked for the GPU ({facts.page_lock_refusal})"
    remedy = "raise what a process may lock (ulimit -l unlimited; container: --ulimit memlock=-1), or free host memory"
    return _warning(f"{text}: its copies are several times slower, and compute waits for them", remedy)


def _updates(facts: Facts) -> Verdicts:
    if not facts.gpus or facts.torch_error is not None:
        return []
    if facts.torch_cuda is None:
        return _ok("optimizer states stay in host memory: ROCm has no kernels for updates yet")
    if facts.update_refusal is None:
        return _ok("the GPU updates what lives on it, with the bits of the CPU's kernels")
    text = f"the GPU makes no updates ({facts.update_refusal}): optimizer states stay in host memory"
    return _warning(text, "install torch with the libraries of CUDA that it names, NVRTC among them; report other bits")


def _memory(facts: Facts) -> Verdicts:
    if facts.memory_bytes is None:
        return _warning("size unknown", 'name the budget yourself: max_memory={"cpu": ...}')
    text = f"{format_bytes(facts.memory_bytes)}, {format_bytes(facts.available_bytes or 0)} available"
    usable = min(facts.memory_bytes, facts.available_bytes or facts.memory_bytes)
    if facts.container_bytes is not None and facts.container_bytes < facts.memory_bytes:
        text += f", container limited to {format_bytes(facts.container_bytes)}"
        usable = min(usable, facts.container_bytes)
        if usable >= LEAST_MEMORY_BYTES:
            remedy = f'stay below it with max_memory={{"cpu": "{usable * 8 // 10 // GIB}GiB"}}, or raise the limit'
            return _warning(text, remedy)
    if usable < LEAST_MEMORY_BYTES:
        return _warning(text, "close other programs or raise the limit: less than 4 GiB can be used")
    return _ok(text)


def _processor(facts: Facts) -> Verdicts:
    text = f"{facts.cores or '?'} usable cores, optimizer kernels {', '.join(facts.isas) or 'unknown'}"
    if facts.isas and facts.isas[0] == "scalar":
        return _warning(text, "use a processor with AVX2: the optimizer is several times faster there")
    return _ok(text)


def _measured(facts: Facts) -> Verdicts:
    if not facts.operators_measured and not facts.rates_measured:
        return _ok("not yet; offload plan --hardware here does it")
    text = f"{facts.operators_measured} operators; offload plan --hardware here --measure-again does it anew"
    return _ok(text) + [verdict for line in facts.rates_measured for verdict in _ok(line)]


def _numa(facts: Facts) -> Verdicts:
    if facts.numa_nodes <= 1:
        return _ok("one memory node")
    remedy = "keep the process on the node of the GPU and the drive: numactl --cpunodebind=N --membind=N"
    return _warning(f"{facts.numa_nodes} memory nodes: far memory is slower", remedy)


def _huge_pages(facts: Facts) -> Verdicts:
    if facts.huge_pages != "never":
        return _ok(facts.huge_pages or "not known to this kernel")
    remedy = "as root: echo madvise > /sys/kernel/mm/transparent_hugepage/enabled"
    return _warning("off: the NVMe tier needs several times the processor time", remedy)


def _lock_limit(facts: Facts) -> Verdicts:
    if facts.lockable_bytes is None:
        return _ok("no limit")
    text = f"limit {format_bytes(facts.lockable_bytes)}"
    known = [size for size in (facts.memory_bytes, facts.container_bytes) if size is not None]
    if known and facts.lockable_bytes >= min(known):
        return _ok(text)
    remedy = "raise it: ulimit -l unlimited, or memlock in /etc/security/limits.conf (container: --ulimit memlock=-1)"
    text += ": host memory of more than that is not registered with io_uring (twice the processor time)"
    return _warning(text, remedy)


def _open_files(facts: Facts) -> Verdicts:
    if facts.open_files is None:
        return _ok("no limit")
    text = f"limit {facts.open_files}"
    return _warning(text, "raise it: ulimit -n 4096") if facts.open_files < LEAST_OPEN_FILES else _ok(text)


# What the I/O engine says about io_uring, and what makes it work then; the first that fits.
_URING_REMEDIES = (
    ("without liburing", "install liburing-dev (Fedora: liburing-devel), then pip install . in the checkout again"),
    ("locked-memory", "raise ulimit -l, or use Linux 5.12 or newer, which does not need it"),
    ("forbidden", "sysctl kernel.io_uring_disabled=0 (container: a seccomp profile that permits it)"),
    ("", f"use Linux {'.'.join(map(str, LEAST_KERNEL))} or newer outside of a sandbox"),
)


def _uring(facts: Facts) -> Verdicts:
    refusal = facts.uring_refusal
    if "swap._aio" in facts.extension_errors:
        return []  # nobody can tell
    if refusal is None:
        return _ok("allowed")
    remedy = next(remedy for words, remedy in _URING_REMEDIES if words in refusal)
    return _warning(
        refusal, f"the thread engine is used instead, at several times the processor time; to have io_uring: {remedy}"
    )


def _path(path: PathFacts) -> Verdicts:
    if path.error is not None:
        return _problem(path.error, "name a folder on a local drive that this user can write to")
    mount = path.mount or machine.Mount("unknown file system", "")
    parts = [mount.file_system]
    if mount.drive:
        parts.append(f"on {mount.model or mount.drive}")
    parts.append(f"alignment {path.alignment_bytes or 'unknown'}")
    parts.append("O_DIRECT" if path.direct else "no O_DIRECT")
    parts.append(f"{format_bytes(path.free_bytes)} free" if path.free_bytes is not None else "free space unknown")
    text = ", ".join(parts)
    if mount.file_system in MEMORY_FILE_SYSTEMS:
        return _problem(f"{text}: its files are host memory", "name a folder on a drive")
    found: Verdicts = []
    if mount.file_system in NETWORK_FILE_SYSTEMS:
        found += _warning(f"{text}: a network file system", "name a folder on a local NVMe drive")
    elif not path.direct:
        remedy = "name a folder on ext4 or xfs: without direct I/O the page cache takes memory and time"
        found += _warning(text, remedy)
    if mount.rotational and mount.drive and mount.drive.startswith("sd"):
        found += _warning(f"{text}: a spinning disk", "name a folder on an NVMe drive")
    if path.free_bytes is not None and path.free_bytes < LEAST_FREE_BYTES:
        found += _warning(f"{text}: little space", "free space or name a folder on another drive")
    return found or _ok(text)


# Subject -> its check, in the order in which they are shown.
CHECKS: dict[str, Callable[[Facts], Verdicts]] = {
    "kernel": _kernel,
    "python": _python,
    "torch": _torch,
    "OpenMP": _threads,
    "transformers": _transformers,
    "extensions": _extensions,
    "gpu": _gpu,
    "page-locking": _page_lock,
    "updates": _updates,
    "memory": _memory,
    "processor": _processor,
    "measured": _measured,
    "numa": _numa,
    "huge pages": _huge_pages,
    "locked memory": _lock_limit,
    "open files": _open_files,
    "io_uring": _uring,
}


def diagnose(facts: Facts) -> list[Finding]:
    """Return what is right and wrong, in the order in which it is shown."""
    found = [(subject, verdict) for subject, check in CHECKS.items() for verdict in check(facts)]
    found += [(f"path {path.path}", verdict) for path in facts.paths for verdict in _path(path)]
    return [Finding(subject, *verdict) for subject, verdict in found]


def exit_code(findings: Sequence[Finding], *, strict: bool = False) -> int:
    """Return 1 with problems (with `strict`: or warnings), else 0."""
    problems, warnings = _counts(findings)
    return int(problems > 0 or (strict and warnings > 0))


# ---- showing ----


def _counts(findings: Sequence[Finding]) -> tuple[int, int]:
    levels = [finding.level for finding in findings]
    return levels.count(Level.PROBLEM), levels.count(Level.WARNING)


def findings_text(findings: Sequence[Finding]) -> str:
    """Return the findings for people."""
    width = max((len(finding.subject) for finding in findings), default=0)
    lines = []
    for finding in findings:
        lines.append(f"{finding.level.value:8s} {finding.subject:{width}s}  {finding.text}")
        if finding.remedy:
            lines.append(f"{'':8s} {'':{width}s}  -> {finding.remedy}")
    problems, warnings = _counts(findings)
    counts = f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    lines.append(counts if problems or warnings else "everything is fine")
    return "\n".join(lines)


def findings_json(findings: Sequence[Finding]) -> dict[str, Any]:
    """Return the findings as values that :mod:`json` writes."""
    problems, warnings = _counts(findings)
    return {"problems": problems, "warnings": warnings, "findings": [dataclasses.asdict(f) for f in findings]}
