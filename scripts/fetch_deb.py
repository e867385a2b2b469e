#!/usr/bin/env python3
"""Download Debian packages as an ordinary user and unpack them into a folder.

Uses `apt-get download` and `dpkg-deb -x`: nothing is installed, nothing needs root. Where the package lists
of the system are missing, private ones are fetched into the work folder. Standard library only, because the
set-up runs it before there is a virtual environment.

    python3 scripts/fetch_deb.py build/liburing liburing-dev liburing2
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

DOWNLOAD_TIMEOUT_S = 120
UPDATE_TIMEOUT_S = 180


class FetchError(Exception):
    """A package could not be had; the text says why."""


def _run(command: list[str], cwd: Path, timeout_s: float) -> None:
    env = dict(os.environ, LC_ALL="C", DEBIAN_FRONTEND="noninteractive")
    try:
        done = subprocess.run(
            command,
            cwd=cwd,
            env=env,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise FetchError(f"{command[0]}: no answer within {timeout_s:g} s") from error
    if done.returncode != 0:
        lines = [line for line in (done.stderr + done.stdout).splitlines() if line.strip()]
        raise FetchError(f"{' '.join(command[:2])}: {lines[-1] if lines else f'exit code {done.returncode}'}")


def _private_lists(work: Path) -> list[str]:
    """Return apt options that keep its lists and cache below `work`, which an ordinary user can write."""
    state = work / "apt"
    for folder in ("lists/partial", "archives/partial"):
        (state / folder).mkdir(parents=True, exist_ok=True)
    return [
        "-o", f"Dir::State::Lists={state / 'lists'}",
        "-o", f"Dir::Cache={state}",
        "-o", "Acquire::Languages=none",
        "-o", "APT::Sandbox::User=",
        "-o", "Acquire::Retries=2",
    ]  # fmt: skip


def fetch(target: Path, packages: list[str]) -> None:
    """Unpack `packages` below `target`; atomic: `target` appears complete or not at all.

    Raises:
        FetchError: if apt or dpkg is missing, or a package cannot be downloaded or unpacked.
    """
    for tool in ("apt-get", "dpkg-deb"):
        if shutil.which(tool) is None:
            raise FetchError(f"{tool} not found: this is no Debian or Ubuntu system")
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix=f".{target.name}-", dir=target.parent) as name:
        work = Path(name)
        try:
            _run(["apt-get", "download", *packages], work, DOWNLOAD_TIMEOUT_S)
        except FetchError:  # usually no package lists yet
            options = _private_lists(work)
            _run(["apt-get", "update", *options], work, UPDATE_TIMEOUT_S)
            _run(["apt-get", "download", *options, *packages], work, DOWNLOAD_TIMEOUT_S)
        root = work / "root"
        root.mkdir()
        for archive in sorted(work.glob("*.deb")):
            _run(["dpkg-deb", "-x", str(archive), str(root)], work, DOWNLOAD_TIMEOUT_S)
        shutil.rmtree(target, ignore_errors=True)
        os.replace(root, target)


def main(arguments: list[str]) -> int:
    """Run as a command; returns the exit code."""
    if len(arguments) < 2:
        print(__doc__, file=sys.stderr)
        return 2
    try:
        fetch(Path(arguments[0]).resolve(), arguments[1:])
    except (FetchError, OSError) as error:
        print(f"fetch_deb: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
