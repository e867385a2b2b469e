"""The bench of what it costs to be looked at."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "watching.py"


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    done = subprocess.run(
        [sys.executable, str(BENCH), "--smoke", "--json", str(output)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(output.read_text())
    assert found["spans_of_step"] > 0
    assert found["step_us"] < found["sample_us"] / 10 and found["pass_us"] < found["sample_us"] / 10  # nothing is due
    # at most one sample in 50 ms and one a second for the file, and one write a second
    expected = (found["sample_us"] * (20 + 1) + found["write_us"]) / 1e6
    assert abs(found["bound_share"] - expected) < 1e-9
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["span", "wait", "pass"]
