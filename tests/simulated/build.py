"""Builds the extension of the simulated accelerator when a test wants it: once per sources, torch and compiler.

What is built stays in ``build/``. ``python tests/simulated/build.py`` builds it ahead of the tests.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shlex
import shutil
import subprocess
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
BUILD = HERE.parent.parent / "build"
NAME = "_simulated"
FLAGS = ["-O1", "-std=c++20", "-fPIC", "-fvisibility=hidden", "-Wall", "-DAT_PER_OPERATOR_HEADERS"]


class CannotBuild(Exception):
    """The extension cannot be built on this machine; says what is missing."""


def library() -> Path:
    """Return the built extension; builds it where it is not there, which takes about half a minute.

    Raises:
        CannotBuild: there is no compiler, no header, or they do not fit together.
    """
    compiler = shlex.split(os.environ.get("CXX", "c++"))
    if shutil.which(compiler[0]) is None:
        raise CannotBuild(f"no C++ compiler ({compiler[0]})")
    include = Path(sysconfig.get_paths()["include"])
    if not (include / "Python.h").exists():
        raise CannotBuild(f"Python's headers are not in {include}")
    folder = BUILD / f"simulated-{_fingerprint(compiler)}"
    target = folder / f"{NAME}.so"
    if target.exists():
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # another test run may be building it
        if not target.exists():
            _build(compiler, include, folder, target)
    return target


def _fingerprint(compiler: list[str]) -> str:
    import torch

    version = subprocess.run([*compiler, "--version"], capture_output=True, check=False).stdout
    parts = [torch.__version__.encode(), version, sysconfig.get_config_var("SOABI").encode(), " ".join(FLAGS).encode()]
    parts += [path.name.encode() + path.read_bytes() for path in sorted(HERE.glob("*.cpp")) + sorted(HERE.glob("*.h"))]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _build(compiler: list[str], include: Path, folder: Path, target: Path) -> None:
    import torch

    root = Path(torch.__file__).parent
    abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
    paths = [root / "include", root / "include/torch/csrc/api/include", include]
    options = [*FLAGS, abi, *(f"-isystem{path}" for path in paths)]

    def compile_one(source: Path) -> Path:
        result = folder / f"{source.stem}.o"
        _run([*compiler, *options, "-c", str(source), "-o", str(result)])
        return result

    with ThreadPoolExecutor(os.cpu_count()) as workers:
        objects = list(workers.map(compile_one, sorted(HERE.glob("*.cpp"))))
    built = folder / "linked"
    libraries = ["-ltorch", "-ltorch_cpu", "-lc10", "-ltorch_python"]
    _run([*compiler, "-shared", *map(str, objects), "-o", str(built), f"-L{root / 'lib'}", *libraries])
    for path in objects:
        path.unlink()
    built.rename(target)


def _run(command: list[str]) -> None:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBuild(f"{command[-1]} could not be built:\n{done.stderr[-3000:]}")


if __name__ == "__main__":
    print(library())
