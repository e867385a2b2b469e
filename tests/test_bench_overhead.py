"""The bench of what bookkeeping costs: layers that come for each use, and a model of tiny layers."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

BENCH = Path(__file__).resolve().parent.parent / "bench" / "overhead.py"


def smoke(case: str, folder: Path) -> tuple[dict[str, Any], str]:
    """Run a case in short; returns what it has written, and printed."""
    output = folder / "result.json"
    words = [sys.executable, str(BENCH), case, "--smoke", "--json", str(output)]
    done = subprocess.run(words, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return json.loads(output.read_text()), done.stdout


def test_smoke_of_streamed_layers(tmp_path: Path) -> None:
    found, printed = smoke("--streamed", tmp_path)
    assert [each.split(",")[0] for each in found["uses"]] == ["cpu", "cpu", "nvme", "nvme"]
    assert all(math.isfinite(us) for case in found["uses"].values() for us in case)  # of few rounds, perhaps below zero
    assert printed.splitlines()[-1] == f"to reach: {found['bound_us']:.0f} us"


def test_smoke_of_the_host(tmp_path: Path) -> None:
    found, printed = smoke("--host", tmp_path)
    assert list(found["host_ms"]) == ["without checkpoints", "with checkpoints"]
    assert all(len(taken) == 6 and min(taken) > 0 for taken in found["host_ms"].values())
    assert printed.count(" of plain") == 2
