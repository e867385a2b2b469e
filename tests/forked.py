"""Runs code in a process of its own that a server forks: it has torch and the runtime already, and costs milliseconds.

For code that the test kills or that has to end its process. The variables that torch and the extensions read when they
are imported are those of the server; what is registered with atexit does not run.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from several_ranks import server

LIMIT_S = 120.0


def run(code: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    """Run code with arguments as ``python -c`` does, and return how it has ended, and what it has printed.

    Raises:
        subprocess.TimeoutExpired: it has not ended in time, and was killed.
    """
    with tempfile.TemporaryDirectory() as folder:
        output, errors = Path(folder) / "output", Path(folder) / "errors"
        process = server().Process(target=_execute, args=(code, arguments, output, errors), daemon=True)
        process.start()
        process.join(LIMIT_S)
        if process.exitcode is None:
            process.kill()
            process.join()
            raise subprocess.TimeoutExpired(code, LIMIT_S, output.read_text(), errors.read_text())
        return subprocess.CompletedProcess(code, process.exitcode, output.read_text(), errors.read_text())


def _execute(code: str, arguments: tuple[str, ...], output: Path, errors: Path) -> None:
    for path, stream in ((output, 1), (errors, 2)):
        os.dup2(os.open(path, os.O_WRONLY | os.O_CREAT), stream)
    sys.argv = ["-c", *arguments]
    exec(compile(code, "<code of a test>", "exec"), {"__name__": "__main__"})
