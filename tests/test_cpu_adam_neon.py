"""The NEON path, compiled for AArch64 and run in an emulator: the same bits as the scalar path of this machine.

On an AArch64 machine the other tests of the kernels run it. Elsewhere this needs a C++20 cross compiler and a user-mode
emulator; ``OFFLOAD_AARCH64_CXX`` and ``OFFLOAD_AARCH64_RUN`` name them where they are not the usual ones, for example
``python -m ziglang c++ -target aarch64-linux-musl`` and ``qemu-aarch64-static``.
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
KERNELS = ROOT / "csrc" / "cpu_adam"
# Of what every kernel writes: a change of any bit in it is a change of the formats or of the arithmetic.
DIGEST = "e343ef1c999272c0"
FLAGS = ["-std=c++20", "-O1", "-ffp-contract=off", "-fno-math-errno", "-Wall", "-Wextra", "-Werror", f"-I{KERNELS}"]


def command(variable: str, *usual: str) -> list[str] | None:
    """Return the command that a variable names, or the first usual one that is installed."""
    if variable in os.environ:
        return shlex.split(os.environ[variable])
    return next(([name] for name in usual if shutil.which(name)), None)


def digests(compiler: list[str], runner: list[str], paths: list[str], output: Path) -> dict[str, str]:
    """Compile the digest program with some paths, run it, return the digest of each."""
    sources = [ROOT / "tests" / "kernel_digest.cpp", *(KERNELS / f"kernels_{path}.cpp" for path in paths)]
    defines = [f"-DOFFLOAD_HAVE_{path.upper()}" for path in paths]
    subprocess.run([*compiler, "-static", *FLAGS, *defines, *map(str, sources), "-o", str(output)], check=True)
    lines = subprocess.run([*runner, str(output)], check=True, capture_output=True, text=True).stdout
    return dict(line.split() for line in lines.splitlines())


@pytest.mark.slow
@pytest.mark.nightly
@pytest.mark.skipif(platform.machine() == "aarch64", reason="this is an AArch64 machine: the other tests run NEON")
def test_neon_gives_the_same_bits_as_this_machine(tmp_path: Path) -> None:
    cross = command("OFFLOAD_AARCH64_CXX", "aarch64-linux-gnu-g++")
    runner = command("OFFLOAD_AARCH64_RUN", "qemu-aarch64-static", "qemu-aarch64")
    here = command("CXX", "g++", "clang++")
    for what, found in (("C++ compiler", here), ("AArch64 C++ compiler", cross), ("AArch64 emulator", runner)):
        if found is None:
            pytest.skip(f"no {what}")
    assert cross is not None and runner is not None and here is not None
    theirs = digests(cross, runner, ["neon", "scalar"], tmp_path / "aarch64")
    ours = digests(here, [], ["scalar"], tmp_path / "here")
    assert ours == {"scalar": DIGEST}
    assert theirs == {"scalar": DIGEST, "neon": DIGEST}


@pytest.mark.slow
@pytest.mark.nightly
def test_the_bits_are_those_of_the_formats(tmp_path: Path) -> None:
    here = command("CXX", "g++", "clang++")
    if here is None:
        pytest.skip("no C++ compiler")
    found = digests(here, [], ["scalar"], tmp_path / "here")
    assert found == {"scalar": DIGEST}
