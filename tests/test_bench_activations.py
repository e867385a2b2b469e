"""The bench of activations runs, and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "activations.py"


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "activations.json"
    command = [sys.executable, str(BENCH), "--smoke", "--path", str(tmp_path), "--json", str(output)]
    command += ["--modes", "keep", "host", "nvme"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "losses of all modes have the same bits" in done.stdout
    modes = json.loads(output.read_text(encoding="utf-8"))["modes"]
    for mode in ("host", "nvme"):
        assert modes[mode]["booked_bytes"] < 0.4 * modes["keep"]["booked_bytes"]
        # What is asked for on its way out need not come back: of the device's part at most, or of the staging.
        left, back = modes[mode]["moved"]["d2h"], modes[mode]["moved"]["h2d"]
        assert 0 < back <= left <= back + (16 << 20)
    left, back = modes["nvme"]["moved"]["nvme_write"], modes["nvme"]["moved"]["nvme_read"]
    assert 0 < back <= left <= back + (4 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["activations.json"]


@pytest.mark.nightly
def test_grid(tmp_path: Path) -> None:
    output = tmp_path / "grid.json"
    command = [sys.executable, str(BENCH), "--grid", "--smoke", "--path", str(tmp_path), "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "losses of all ways have the same bits" in done.stdout
    cells = json.loads(output.read_text(encoding="utf-8"))["cells"]
    assert len(cells) == 2
    for cell in cells:
        assert all(told.startswith(("offload, ", "recompute, ")) and "by the plan" in told for told in cell["told"])


@pytest.mark.nightly
def test_longest_contexts(tmp_path: Path) -> None:
    """Where the model's own loss and activations have room for 1024 tokens, others have it for eight times as many."""
    output = tmp_path / "contexts.json"
    command = [sys.executable, str(BENCH), "--smoke", "--context", "--device", "12MiB", "--path", str(tmp_path)]
    command += ["--json", str(output), "--modes", "keep", "recompute"]
    for trials in (3, 0):
        done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
        assert done.returncode == 0, done.stderr
        assert done.stderr.count(" tokens: ") == trials  # they are not made again
    contexts = json.loads(output.read_text(encoding="utf-8"))["contexts"]
    assert {mode: found["tokens"] for mode, found in contexts.items()} == {"keep": 1024, "recompute": 8192}
