"""The check of a GPU goes all the way on the simulated device."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"


@pytest.mark.usefixtures("sim")
def test_the_gpu_check_goes_all_the_way(tmp_path: Path) -> None:
    """On the simulated device: every section has its figures."""
    command = [sys.executable, str(SCRIPTS / "gpu_check.py"), "--device", "sim", "--smoke", "--output", str(tmp_path)]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert list(found) == [
        *("machine", "tests", "links", "resident", "placement", "states in host memory", "states on NVMe")
    ]
    assert found["tests"]["exit"] == 0 and found["placement"]["same"]
    for home in ("states in host memory", "states on NVMe"):
        assert found[home]["bytes per step"]["h2d"] > 0 and found[home]["step s"] > 0
    assert found["states on NVMe"]["bytes per step"]["nvme_write"] > 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    text = (tmp_path / "gpu-check.txt").read_text()
    assert text.startswith("gpu check: passed") and all(name in text for name in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("gpu-check.json", "gpu-check.txt", "plan-cpu.txt", "plan-nvme.txt", "tests.txt", "trace.json")
    ]
