#!/usr/bin/env python3
"""Try the doors with the oldest libraries that pyproject.toml allows.

    python scripts/oldest.py [--with NAME==VERSION]... [pytest's arguments]

A virtual environment in build/oldest gets each library of the doors' extras in the version behind its `>=`, torch and
pytest as constraints.txt pins them, and this package, built. Then the doors' tests run, on what is installed there.
Called by `make test-oldest`; needs Python 3.11.

Owns: build/oldest. Must not know: what the tests do.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import venv
from collections.abc import Iterable
from pathlib import Path
from typing import Final

import tomllib

ROOT: Final = Path(__file__).resolve().parent.parent
HOME: Final = ROOT / "build" / "oldest"
EXTRAS: Final = ("hf", "trl", "lightning")
BUILT_WITH: Final = ("scikit-build-core", "pybind11", "cmake", "ninja")
TESTED_WITH: Final = ("torch", "pytest", "pytest-timeout", "hypothesis", "bitsandbytes")
TESTS: Final = (
    *("hf", "trainers", "accelerate", "lightning", "examples", "peft", "peft_training"),
    *("deepspeed", "deepspeed_config", "deepspeed_imports"),
)


def oldest(requirements: Iterable[str]) -> dict[str, str]:
    """Return the version behind the `>=` of each requirement, by name.

    Raises:
        ValueError: one has none, so that nothing says how old it may be.
    """
    found = {}
    for requirement in requirements:
        match = re.fullmatch(r"([\w.-]+)>=([\w.]+)", requirement)
        if match is None:
            raise ValueError(f"pyproject.toml: expected NAME>=VERSION but got {requirement!r}; give a lower bound")
        found[match[1]] = match[2]
    return found


def pinned(names: Iterable[str]) -> list[str]:
    """Return the lines of constraints.txt for these names."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = {line.partition("==")[0].replace("_", "-"): line for line in lines if "==" in line}
    return [pins[name] for name in names]


def main(arguments: list[str]) -> int:
    """Make the environment, and run the tests; returns what pytest does."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--with", dest="others", action="append", default=[], metavar="NAME==VERSION")
    options, rest = parser.parse_known_args(arguments)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"]
    wanted = oldest([one for extra in EXTRAS for one in extras[extra]])
    wanted.update(one.split("==") for one in options.others)
    shutil.rmtree(HOME, ignore_errors=True)
    venv.create(HOME, with_pip=True)

    def pip(*words: str) -> None:
        command = [str(HOME / "bin/python"), "-m", "pip", "install", "--quiet", *words]
        subprocess.run(command, cwd=ROOT, check=True, env={**os.environ, "CXX": os.environ.get("CXX", "c++")})

    pip(
        *pinned([*BUILT_WITH, *TESTED_WITH]),
        *("psutil", "numpy", "aiofiles"),
        *(f"{name}=={least}" for name, least in wanted.items()),
    )
    build = HOME / "build"
    liburing = f"--config-settings=cmake.define.OFFLOAD_LIBURING_ROOT={ROOT / 'build/liburing'}"
    pip("--no-build-isolation", "--no-deps", f"--config-settings=build-dir={build}", liburing, ".")
    print("with", ", ".join(f"{name} {least}" for name, least in wanted.items()), flush=True)
    # Not `python -m pytest`, and no path of the checkout: the package that was installed is imported.
    command = [str(HOME / "bin/pytest"), "-q", "-o", "pythonpath=", *(f"tests/test_{name}.py" for name in TESTS), *rest]
    return subprocess.run(command, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
