"""Findings from made-up machines, and a run on this one."""

from __future__ import annotations

import dataclasses
import errno
import json
import os
import stat
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.cli import doctor
from offload.cli.doctor import (
    Facts,
    Finding,
    GpuFacts,
    Level,
    PathFacts,
    diagnose,
    exit_code,
    findings_json,
    findings_text,
    gather,
)
from offload.cli.main import main
from offload.memory import machine

ROOT = Path(__file__).resolve().parent.parent
GIB = 1 << 30
GOOD = Facts(
    kernel="6.1.0-18-amd64",
    python="3.11.7",
    torch="2.7.0+cu126",
    torch_cuda="12.4",
    transformers="4.56.0",
    lockable_bytes=None,
    open_files=1024,
    huge_pages="madvise",
    isas=("avx2", "scalar"),
    cores=8,
    memory_bytes=64 * GIB,
    available_bytes=60 * GIB,
    gpus=(GpuFacts(name="RTX 4090", memory_bytes=24 * GIB, capability=(8, 9)),),
    gpu_present=True,
    gpu_driver="550.54",
    paths=(PathFacts(path="/nvme", alignment_bytes=512, mount=machine.Mount("ext4", "259:1", "nvme0n1"),
                     free_bytes=500 * GIB),),
)  # fmt: skip


def bad(facts: Facts) -> list[Finding]:
    return [finding for finding in diagnose(facts) if finding.level is not Level.OK]


def test_a_good_machine_has_no_findings() -> None:
    findings = diagnose(GOOD)
    assert bad(GOOD) == []
    assert exit_code(findings, strict=True) == 0
    assert findings_text(findings).endswith("everything is fine")
    others = {"OpenMP"}  # is there only where it is wrong
    assert {finding.subject for finding in findings} == {*doctor.CHECKS, "path /nvme"} - others


def test_a_lock_limit_is_enough_for_all_memory_of_the_container() -> None:
    """An engine registers all of its host memory at once."""
    facts = dataclasses.replace(GOOD, lockable_bytes=16 * GIB, container_bytes=16 * GIB)
    assert [finding.subject for finding in bad(facts)] == ["memory"]


@pytest.mark.parametrize(
    ("change", "subject", "level", "words"),
    [
        ({"system": "Darwin"}, "kernel", Level.PROBLEM, "use Linux"),
        ({"kernel": "4.18.0-513.el8"}, "kernel", Level.WARNING, "5.10"),
        ({"python": "3.9.2"}, "python", Level.PROBLEM, "3.10"),
        ({"torch": None}, "torch", Level.PROBLEM, "pip install torch"),
        ({"torch": "2.6.0"}, "torch", Level.PROBLEM, "torch>=2.7"),
        ({"omp_dynamic": True}, "OpenMP", Level.PROBLEM, "unset OMP_DYNAMIC"),
        ({"omp_binding": "OMP_PROC_BIND"}, "OpenMP", Level.WARNING, "unset OMP_PROC_BIND; taskset"),
        ({"transformers": "4.55.4"}, "transformers", Level.PROBLEM, "transformers>=4.56"),
        ({"torch_error": "ImportError: libcudnn"}, "torch", Level.PROBLEM, "libcudnn"),
        ({"extension_errors": {"swap._aio": "no module"}}, "extensions", Level.PROBLEM, "pip install ."),
        ({"gpus": ()}, "gpu", Level.PROBLEM, "nvidia-smi"),
        ({"gpus": (), "torch_cuda": None}, "gpu", Level.PROBLEM, "built with CUDA"),
        ({"gpus": (), "visible_gpus": ""}, "gpu", Level.PROBLEM, "unset CUDA_VISIBLE_DEVICES"),
        ({"gpus": (), "torch": None, "torch_cuda": None}, "torch", Level.PROBLEM, "pip install torch"),
        ({"gpus": (), "torch_error": "ImportError", "torch_cuda": None}, "torch", Level.PROBLEM, "again"),
        (
            {"gpus": (GpuFacts(name="T4", memory_bytes=16 * GIB, capability=(7, 5)),)},
            "gpu",
            Level.WARNING,
            "float16",
        ),
        ({"available_bytes": 2 * GIB}, "memory", Level.WARNING, "close other programs"),
        ({"container_bytes": 16 * GIB}, "memory", Level.WARNING, '"12GiB"'),  # 80 % of 16, in whole GiB
        ({"container_bytes": GIB}, "memory", Level.WARNING, "less than 4 GiB"),
        ({"memory_bytes": None}, "memory", Level.WARNING, "max_memory"),
        ({"isas": ("scalar",)}, "processor", Level.WARNING, "AVX2"),
        ({"numa_nodes": 2}, "numa", Level.WARNING, "numactl"),
        ({"huge_pages": "never"}, "huge pages", Level.WARNING, "madvise"),
        ({"lockable_bytes": 8 << 20}, "locked memory", Level.WARNING, "ulimit -l"),
        ({"lockable_bytes": 8 * GIB}, "locked memory", Level.WARNING, "more than that is not registered"),
        ({"page_lock_refusal": "error 2"}, "page-locking", Level.WARNING, "ulimit -l"),
        ({"update_refusal": "no libnvrtc"}, "updates", Level.WARNING, "NVRTC"),
        ({"open_files": 64}, "open files", Level.WARNING, "ulimit -n"),
        (
            {"uring_refusal": "EPERM (forbidden here: ...)"},
            "io_uring",
            Level.WARNING,
            "sysctl kernel.io_uring_disabled=0",
        ),
        ({"uring_refusal": "built without liburing"}, "io_uring", Level.WARNING, "install liburing-dev"),
        ({"uring_refusal": "ENOSYS (this kernel has no io_uring)"}, "io_uring", Level.WARNING, "use Linux 5.10"),
        ({"uring_refusal": "ENOMEM (the locked-memory limit ...)"}, "io_uring", Level.WARNING, "raise ulimit -l"),
    ],
)
def test_each_fault_is_named_with_a_remedy(change: dict[str, object], subject: str, level: Level, words: str) -> None:
    found = bad(dataclasses.replace(GOOD, **change))  # type: ignore[arg-type]
    assert [(finding.subject, finding.level) for finding in found] == [(subject, level)]
    assert words in found[0].text + found[0].remedy
    assert exit_code(found) == (level is Level.PROBLEM)
    assert exit_code(found, strict=True) == 1


@pytest.mark.parametrize(
    ("path", "level", "words"),
    [
        (PathFacts(path="/x", error="there is no such folder"), Level.PROBLEM, "no such folder"),
        (PathFacts(path="/x", mount=machine.Mount("tmpfs", "0:27")), Level.PROBLEM, "host memory"),
        (PathFacts(path="/x", mount=machine.Mount("nfs4", "0:40")), Level.WARNING, "network"),
        (PathFacts(path="/x", direct=False), Level.WARNING, "page cache"),
        (PathFacts(path="/x", mount=machine.Mount("ext4", "8:1", "sda", None, True)), Level.WARNING, "spinning"),
        (PathFacts(path="/x", free_bytes=GIB), Level.WARNING, "free space"),
    ],
)
def test_each_fault_of_a_path_is_named(path: PathFacts, level: Level, words: str) -> None:
    found = bad(dataclasses.replace(GOOD, paths=(path,)))
    assert [(finding.subject, finding.level) for finding in found] == [("path /x", level)]
    assert words in found[0].text + found[0].remedy


def test_io_uring_has_one_remedy_per_cause() -> None:
    """The engine's own words for each cause are in csrc/aio; one that none of them is in gets none of theirs."""
    sources = [(ROOT / "csrc/aio" / name).read_text(encoding="utf-8") for name in ("engine.cc", "uring_engine.cc")]
    words = [words for words, _ in doctor._URING_REMEDIES if words]
    assert all(any(part in source for source in sources) for part in words)
    remedies = [bad(dataclasses.replace(GOOD, uring_refusal=part))[0].remedy for part in (*words, "EINVAL")]
    assert len(set(remedies)) == 4
    assert ["liburing-dev" in remedy for remedy in remedies] == [True, False, False, False]
    assert ["sysctl" in remedy for remedy in remedies] == [False, False, True, False]


def test_virtual_drives_that_claim_to_spin_are_believed_not_to() -> None:
    path = PathFacts(path="/x", mount=machine.Mount("ext4", "254:0", "vda", None, True), free_bytes=99 * GIB)
    assert bad(dataclasses.replace(GOOD, paths=(path,))) == []


def test_a_missing_transformers_names_the_commands_that_need_it() -> None:
    [finding] = [one for one in diagnose(Facts()) if one.subject == "transformers"]
    assert all(f"`{name}`" in finding.text for name in ("offload finetune", "generate", "merge", "plan"))


def test_nothing_known_is_survived() -> None:
    """All defaults: what a machine looks like where every collector failed."""
    found = bad(Facts(paths=(PathFacts(path="/x"),)))
    assert all(finding.remedy for finding in found)
    assert findings_json(found)["problems"] >= 1


@given(
    version=st.text(max_size=12),
    system=st.text(max_size=8),
    memory=st.none() | st.integers(0, 1 << 50),
    container=st.none() | st.integers(0, 1 << 50),
    isas=st.lists(st.sampled_from(["avx512", "avx2", "scalar"]), unique=True),
    nodes=st.integers(-1, 16),
)
def test_odd_machines_get_findings_not_exceptions(
    version: str, system: str, memory: int | None, container: int | None, isas: list[str], nodes: int
) -> None:
    facts = Facts(
        system=system,
        kernel=version,
        python=version,
        torch=version,
        memory_bytes=memory,
        available_bytes=memory,
        container_bytes=container,
        isas=tuple(isas),
        numa_nodes=nodes,
        gpu_present=True,
    )
    findings = diagnose(facts)
    assert findings_text(findings)
    json.dumps(findings_json(findings))


def test_a_collector_that_fails_does_not_hide_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> dict[str, object]:
        raise OSError("odd machine")

    monkeypatch.setattr("offload.cli.doctor._system_facts", fail)
    monkeypatch.setattr("offload.cli.doctor._torch_facts", fail)
    facts = gather()
    assert facts.kernel == "" and facts.torch is None
    assert facts.memory_bytes is not None and facts.isas


# ---- facts ----


@pytest.mark.parametrize(
    ("own", "files", "limit"),
    [
        ("0::/a/b\n", {"a/b/memory.max": "max", "a/memory.max": "1000"}, 1000),  # a parent's limit counts
        ("0::/a/b\n", {"a/b/memory.max": "500", "a/memory.max": "1000"}, 500),
        ("0::/a\n", {"a/memory.max": "max"}, None),
        ("4:memory:/docker/x\n", {"memory/docker/x/memory.limit_in_bytes": "2048"}, 2048),
        ("4:memory:/x\n", {"memory/x/memory.limit_in_bytes": "9223372036854771712"}, None),  # "no limit" in version 1
        ("4:memory:/gone\n", {"memory/memory.limit_in_bytes": "4096"}, 4096),  # inside the container: the root's
        ("7:cpu:/x\n", {"memory.max": "1"}, None),
        ("", {}, None),
        ("nonsense", {}, None),
    ],
)
def test_container_limit(tmp_path: Path, own: str, files: dict[str, str], limit: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cgroup_memory_limit(tmp_path, own) == limit


@pytest.mark.parametrize(
    ("own", "files", "free"),
    [
        ("0::/a\n", {"a/memory.max": "1000", "a/memory.current": "300"}, 700),
        (  # file cache that may go does not count: 1000 - (900 - 600)
            "0::/a\n",
            {"a/memory.max": "1000", "a/memory.current": "900", "a/memory.stat": "anon 300\ninactive_file 600"},
            700,
        ),
        (  # the tightest group is not the one with the smallest limit: min(500 - 100, 1000 - 950)
            "0::/a/b\n",
            {
                "a/b/memory.max": "500",
                "a/b/memory.current": "100",
                "a/memory.max": "1000",
                "a/memory.current": "950",
            },
            50,
        ),
        (  # version 1: of the group and those below it
            "4:memory:/x\n",
            {
                "memory/x/memory.limit_in_bytes": "2048",
                "memory/x/memory.usage_in_bytes": "1024",
                "memory/x/memory.stat": "inactive_file 1\ntotal_inactive_file 24",
            },
            1048,
        ),
        ("0::/a\n", {"a/memory.max": "1000", "a/memory.current": "1100"}, 0),
        ("0::/a\n", {"a/memory.max": "1000"}, 1000),
        ("0::/a\n", {"a/memory.max": "max", "a/memory.current": "300"}, None),
        ("", {}, None),
    ],
)
def test_room_in_the_container(tmp_path: Path, own: str, files: dict[str, str], free: int | None) -> None:
    for name, text in files.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text + "\n")
    assert machine.cgroup_memory_free(tmp_path, own) == free


def test_mount_of_takes_the_deepest_and_the_last(tmp_path: Path) -> None:
    block = tmp_path / "block" / "259:1"
    (block / "queue").mkdir(parents=True)
    (block / "device").mkdir()
    (block / "queue" / "rotational").write_text("0\n")
    (block / "device" / "model").write_text("Fast Drive \n")
    inside = tmp_path / "data with space"
    inside.mkdir()
    escaped = str(inside).replace(" ", "\\040")
    table = (
        "1 0 254:0 / / rw - ext4 /dev/root rw\n"
        f"2 1 0:27 / {escaped} rw - tmpfs tmpfs rw\n"
        f"3 1 259:1 / {escaped} ro,relatime shared:1 - xfs /dev/nvme0n1 rw\n"
        "garbage\n"
    )
    mount = machine.mount_of(inside, table, tmp_path / "block")
    assert mount == machine.Mount("xfs", "259:1", "259:1", "Fast Drive", False)
    outside = machine.mount_of(tmp_path, table, tmp_path / "block")
    assert outside is not None and outside.file_system == "ext4" and outside.drive is None
    assert machine.mount_of(tmp_path / "missing", table) is None
    assert machine.mount_of(inside, "") is None


def test_a_drive_has_the_same_name_after_each_boot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where mountinfo has a number 0:N, which the next boot gives to another one."""
    partition = tmp_path / "nvme0n1" / "nvme0n1p2"
    (partition / "partition").mkdir(parents=True)
    (tmp_path / "nvme0n1" / "queue").mkdir()
    (tmp_path / "nvme0n1" / "queue" / "rotational").write_text("1\n")
    (tmp_path / "259:2").symlink_to(partition)
    nodes = {"/dev/nvme0n1p2": (stat.S_IFBLK, os.makedev(259, 2)), "/dev/fuse": (stat.S_IFCHR, os.makedev(259, 2))}
    real = os.stat

    def look(path: Any, **options: Any) -> Any:
        if str(path) in nodes:
            return SimpleNamespace(st_mode=nodes[str(path)][0], st_rdev=nodes[str(path)][1])
        return real(path, **options)

    monkeypatch.setattr(machine.os, "stat", look)

    def found(number: str, kind: str) -> machine.Mount | None:
        return machine.mount_of(tmp_path, f"1 0 {number} /@ / rw - {kind} rw\n", tmp_path)

    assert found("0:44", "btrfs /dev/nvme0n1p2") == machine.Mount("btrfs", "259:2", "nvme0n1", None, True)
    for kind in ("btrfs /dev/hidden", "zfs pool/data", "overlay overlay", "nfs4 host:/data", "fuse /dev/fuse"):
        name, source = kind.split()
        assert found("0:44", kind) == found("0:45", kind) == machine.Mount(name, f"{source} at /")


def test_numa_nodes(tmp_path: Path) -> None:
    for name in ("node0", "node1", "nodes", "node_x"):
        (tmp_path / name).mkdir()
    assert machine.numa_nodes(tmp_path) == 2
    assert machine.numa_nodes(tmp_path / "missing") == 1


def test_paths_on_one_file_system_have_its_free_bytes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: SimpleNamespace(free=GIB))
    assert machine.free_bytes((tmp_path / "a", tmp_path / "b", tmp_path / "missing")) == GIB
    assert machine.free_bytes(()) is None


def test_paths_that_cannot_be_used_are_told(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    facts = gather([tmp_path / "missing", file, Path("/proc")])
    errors = [path.error or "" for path in facts.paths]
    assert errors == ["there is no such folder", "it is not a folder", "no file can be created there"]
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("direct", [True, False])
def test_a_file_system_whose_files_all_have_names_will_do(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As it does for a store. What refuses direct I/O does so when the file is there."""
    real = os.open

    def opened(path: Any, flags: int, mode: int = 0o777) -> int:
        if flags & os.O_TMPFILE == os.O_TMPFILE:
            raise OSError(errno.EOPNOTSUPP, "not supported")
        made = real(path, flags & ~os.O_DIRECT, mode)
        if flags & os.O_DIRECT and not direct:
            os.close(made)
            raise OSError(errno.EINVAL, "invalid")
        return made

    monkeypatch.setattr(os, "open", opened)
    found = doctor._path_facts(tmp_path)
    assert found.error is None and (direct or not found.direct)
    assert list(tmp_path.iterdir()) == []


# ---- the command ----


def test_command_on_this_machine(tmp_path: Path) -> None:
    before = time.monotonic()
    command = [sys.executable, "-m", "offload", "doctor", "--json", str(tmp_path), str(tmp_path / "missing")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    seconds = time.monotonic() - before
    report = json.loads(done.stdout)
    assert done.returncode == 1, done.stderr
    levels = {finding["subject"]: finding["level"] for finding in report["findings"]}
    assert levels[f"path {tmp_path / 'missing'}"] == "problem"
    assert {"kernel", "torch", "memory", "io_uring", "huge pages"} <= levels.keys()
    assert all(bool(f["remedy"]) == (f["level"] != "ok") for f in report["findings"])
    assert seconds < 60  # a few seconds where nothing else runs
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_doctor_leaves_with_130(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(doctor, "gather", interrupted)
    assert main(["doctor"]) == 130
    assert capsys.readouterr().err.strip().count("\n") == 0


WITHOUT_EXTENSIONS = """
import sys

class Missing:
    def find_spec(self, name, path=None, target=None):
        if name in ("offload._cpu_adam", "swap._aio"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Missing())
import offload

offload.AdamW(lr=1e-3)
for use in (lambda: offload.Engine, lambda: __import__("swap"), lambda: __import__("offload.kernels.cpu_adam")):
    try:
        use()
    except ImportError as error:
        print(error)
from offload.cli.main import main

sys.exit(main(["doctor"]))
"""


def test_what_an_installation_without_extensions_says() -> None:
    """The package can be imported, and doctor runs; whatever needs an extension says how to build it."""
    command = [sys.executable, "-c", WITHOUT_EXTENSIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 1, done.stderr
    whichever, engines, kernels, *report = done.stdout.splitlines()
    remedy = "build them with 'pip install .' or 'make venv' in a checkout, which needs a C++20 compiler"
    missing = "No module named 'offload._cpu_adam'"
    assert kernels == f"offload._cpu_adam: expected the compiled optimizer kernels but got: {missing}; {remedy}"
    missing = "No module named 'swap._aio'"
    assert engines == f"swap._aio: expected the compiled I/O engines but got: {missing}; {remedy}"
    assert whichever in (kernels, engines)
    for name in ("offload._cpu_adam", "swap._aio"):
        line = next(number for number, text in enumerate(report) if f"{name} cannot be loaded" in text)
        assert report[line].endswith(f"{name} cannot be loaded: No module named '{name}'")
        assert "-> build it: pip install . (or make venv) in the checkout" in report[line + 1]
