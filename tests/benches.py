"""How tests run the benches in bench/, and how they import them."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def run(
    name: str, folder: Path, *words: str, code: int = 0, timeout_s: float = 600, **variables: str
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    """Run a bench; return what it has written as JSON, and its end.

    Args:
        name: of the bench.
        folder: where it runs, and writes "<name>.json".
        *words: its arguments.
        code: its expected exit code.
        timeout_s: the most seconds.
        **variables: of its environment, besides this process's.
    """
    output = folder / f"{name}.json"
    command = [sys.executable, str(BENCH / f"{name}.py"), *words, "--json", str(output)]
    done = subprocess.run(
        command, cwd=folder, env=os.environ | variables, capture_output=True, text=True, timeout=timeout_s, check=False
    )
    assert done.returncode == code, done.stdout[-3000:] + done.stderr[-3000:]
    return json.loads(output.read_text(encoding="utf-8")), done


def load(name: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a bench, which finds those beside it meanwhile."""
    monkeypatch.syspath_prepend(str(BENCH))
    return importlib.import_module(f"bench.{name}")
