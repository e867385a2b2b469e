"""What this machine is made of: processor, memory limits, file systems, drives. Read from /proc and /sys.

Owns the reading; a function answers None (or an empty value) where the system does not tell. Must not know what the
facts are good for: :mod:`offload.memory.limits` makes budgets of them, :mod:`offload.cli.doctor` judges them,
:mod:`offload.cli.drive.tune` prints them beside its measurements.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import platform
import resource
import shutil
import stat
import subprocess
from collections.abc import Iterator, Mapping
from importlib import metadata
from pathlib import Path

_CGROUPS = Path("/sys/fs/cgroup")
_CGROUP_UNLIMITED = 1 << 60  # cgroup v1 writes a number near 2^63 for "no limit"
_CAP_IPC_LOCK = 14


def read_text(path: str | Path) -> str | None:
    """Return the stripped content of a small file, or None."""
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return Path(path).read_text(encoding="utf-8").strip()
    return None


def read_int(path: str | Path) -> int | None:
    """Return the number in a small file; None without one (also for "max")."""
    text = read_text(path)
    with contextlib.suppress(ValueError):
        return None if text is None else int(text)
    return None


def cpu_name() -> str:
    """Return the processor's name."""
    for line in (read_text("/proc/cpuinfo") or "").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor() or platform.machine()


def queued_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds that threads of this process have waited for a processor that others had; 0 if not told."""
    nanoseconds = 0
    for task in tasks.iterdir() if tasks.is_dir() else ():
        words = (read_text(task / "schedstat") or "").split()  # on a processor, waiting for one, how often
        nanoseconds += int(words[1]) if len(words) > 1 else 0
    return nanoseconds / 1e9


def bound_by(threads: int) -> str | None:
    """Return the variable by which OpenMP has bound this thread to less than `threads` processors; None: none has.

    GNU's runtime binds the thread that imports torch. All threads that it starts are bound with it.
    """
    set_to = {name: os.environ.get(name, "") for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY")}
    bound = hasattr(os, "sched_getaffinity") and len(os.sched_getaffinity(0)) < threads
    return next((name for name, value in set_to.items() if bound and value.lower() not in ("", "false")), None)


def version_of(package: str) -> str | None:
    """Return the installed version of a package, without importing it."""
    with contextlib.suppress(metadata.PackageNotFoundError, ValueError):
        return metadata.version(package)
    return None


def commit() -> str | None:
    """Return the commit of the checkout that this package runs from; None for an installed package."""
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(
            ["git", "rev-parse", "HEAD"], cwd=root, capture_output=True, text=True, check=True, timeout=5
        )
        return done.stdout.strip() or None
    return None


def identity() -> str:
    """Return what all processes of one machine, or of one container, have in common: its name, and its boot."""
    return f"{platform.node()} {read_text('/proc/sys/kernel/random/boot_id')}"


def describe() -> dict[str, str | int | None]:
    """Return what a measurement should be filed under."""
    return {
        "cpu": cpu_name(),
        "cores": os.cpu_count(),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": version_of("torch"),
    }


# ---- memory ----


def transparent_huge_pages() -> str | None:
    """Return the mode in force: "always", "madvise" or "never"."""
    text = read_text("/sys/kernel/mm/transparent_hugepage/enabled") or ""
    return next((word.strip("[]") for word in text.split() if word.startswith("[")), None)


def locked_memory_limit() -> int | None:
    """Return how many bytes this process may lock; None without a limit (also for privileged processes)."""
    status = read_text("/proc/self/status") or ""
    for line in status.splitlines():
        if line.startswith("CapEff:"):
            with contextlib.suppress(ValueError):
                if int(line.split()[1], 16) >> _CAP_IPC_LOCK & 1:
                    return None
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    return None if soft == resource.RLIM_INFINITY else soft


def cgroup_memory_limit(root: Path = _CGROUPS, own: str | None = None) -> int | None:
    """Return the memory limit of the container or control group, the smallest on the way up; None without one.

    Args:
        root: where control groups are mounted.
        own: content of /proc/self/cgroup, for tests.
    """
    return min((limit for limit, _ in _memory_groups(root, own)), default=None)


def cgroup_memory_free(root: Path = _CGROUPS, own: str | None = None) -> int | None:
    """Return the bytes that the memory limits around this process still allow; None without a limit.

    File cache that has not been used lately counts as free, as it does for the container runtimes: it makes room.

    Args:
        root: where control groups are mounted.
        own: content of /proc/self/cgroup, for tests.
    """
    free = []
    for limit, folder in _memory_groups(root, own):
        used = read_int(folder / "memory.current") or read_int(folder / "memory.usage_in_bytes") or 0
        stat = dict(line.split() for line in (read_text(folder / "memory.stat") or "").splitlines() if " " in line)
        cache = int(stat.get("total_inactive_file", stat.get("inactive_file", 0)))  # version 1 has both: with children
        free.append(max(limit - max(used - cache, 0), 0))
    return min(free, default=None)


def _memory_groups(root: Path, own: str | None) -> Iterator[tuple[int, Path]]:
    """Yield (limit, folder) of the control groups around this process that limit memory."""
    own = read_text("/proc/self/cgroup") or "" if own is None else own
    for line in own.splitlines():
        _, _, rest = line.partition(":")
        controllers, _, group = rest.partition(":")
        if controllers == "":
            bases, name = (root, root / "unified"), "memory.max"
        elif "memory" in controllers.split(","):
            bases, name = (root / controllers, root / "memory"), "memory.limit_in_bytes"
        else:
            continue
        for base in bases:
            folder = base / group.strip("/")
            for level in (folder, *folder.parents):
                limit = read_int(level / name)
                if limit is not None and limit < _CGROUP_UNLIMITED:
                    yield limit, level
                if level == base:
                    break


def numa_nodes(root: Path = Path("/sys/devices/system/node")) -> int:
    """Return how many memory nodes there are, at least 1."""
    with contextlib.suppress(OSError):
        return max(1, sum(entry.name[4:].isdigit() for entry in root.glob("node*")))
    return 1


# ---- drives ----


@dataclasses.dataclass(frozen=True, slots=True)
class Mount:
    """The file system that holds a path.

    Attributes:
        file_system: its type, such as "ext4".
        device: number of the block device, "major:minor"; where there is none, what was mounted, and where.
        drive: name of the block device in /sys/block, None where there is none (tmpfs, network, overlay, zfs).
        model: what the drive calls itself.
        rotational: a spinning disk; None when not known.
    """

    file_system: str
    device: str
    drive: str | None = None
    model: str | None = None
    rotational: bool | None = None


def mount_of(path: str | Path, mountinfo: str | None = None, sys_block: Path = Path("/sys/dev/block")) -> Mount | None:
    """Return the file system that holds `path`; None when the path does not exist or nothing is known.

    Args:
        path: an existing path.
        mountinfo: content of /proc/self/mountinfo, for tests.
        sys_block: where the kernel lists block devices by number.
    """
    try:
        resolved = Path(path).resolve(strict=True)
    except (OSError, RuntimeError):
        return None
    best: Mount | None = None
    longest = -1
    for line in ((read_text("/proc/self/mountinfo") or "") if mountinfo is None else mountinfo).splitlines():
        left, _, right = line.partition(" - ")
        fields, kind = left.split(), right.split()
        if len(fields) < 6 or not kind:
            continue
        point = Path(fields[4].replace("\\040", " "))
        if (point == resolved or point in resolved.parents) and len(point.parts) >= longest:
            longest = len(point.parts)
            best = Mount(kind[0], _device(fields[2], kind[1] if len(kind) > 1 else "", point))
    if best is None:
        return None
    with contextlib.suppress(OSError):
        block = (sys_block / best.device).resolve(strict=True)
        if (block / "partition").exists():
            block = block.parent
        rotational = read_int(block / "queue" / "rotational")
        return dataclasses.replace(
            best,
            drive=block.name,
            model=read_text(block / "device" / "model"),
            rotational=None if rotational is None else rotational == 1,
        )
    return best


def _device(number: str, source: str, point: Path) -> str:
    """Return what tells a mounted device from others after the next boot, too.

    Numbers 0:N are given out anew at each mount. Of btrfs, the source has a number that stays.
    """
    if not number.startswith("0:"):
        return number
    if source.startswith("/dev/"):
        with contextlib.suppress(OSError):
            info = os.stat(source)
            if stat.S_ISBLK(info.st_mode):
                return f"{os.major(info.st_rdev)}:{os.minor(info.st_rdev)}"
    return f"{source} at {point}"


def free_space(path: str | Path) -> int:
    """Return the bytes that this user may still write on the file system of `path`.

    Raises:
        OSError: the path does not exist.
    """
    info = os.statvfs(path)
    return info.f_bavail * info.f_frsize


def drives_of(paths: tuple[Path, ...]) -> dict[int, Path]:
    """Return a path on each drive of the NVMe paths, by the device's number; missing ones are the store's to report."""
    return {path.stat().st_dev: path for path in paths if path.exists()}


def free_bytes(paths: tuple[Path, ...], users: Mapping[int, int] | None = None) -> int | None:
    """Return the free bytes of the drives of the NVMe paths together, None without paths.

    Args:
        paths: of which several may be on one drive.
        users: how many processes share a drive, by the number of its device: its part is counted; None: nobody shares.
    """
    if not paths:
        return None
    drives = drives_of(paths).items()
    return sum(shutil.disk_usage(path).free // (users or {}).get(drive, 1) for drive, path in drives)
