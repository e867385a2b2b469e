"""The bench of what bookkeeping costs: layers that come for each use."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench" / "overhead.py"


def test_smoke_of_streamed_layers(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--streamed", "--smoke", "--json", str(output)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert [each.split(",")[0] for each in found["uses"]] == ["cpu", "cpu", "nvme", "nvme"]
    assert all(math.isfinite(us) for case in found["uses"].values() for us in case)  # of few rounds, perhaps below zero
    assert done.stdout.splitlines()[-1] == f"to reach: {found['bound_us']:.0f} us"


def test_smoke_of_the_host(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--host", "--smoke", "--json", str(output)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())["host_ms"]
    assert list(found) == ["without checkpoints", "with checkpoints"]
    assert all(len(taken) == 6 and min(taken) > 0 for taken in found.values())
    assert done.stdout.count(" of plain") == 2
