"""The bench of the seconds that a forecast takes."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "planning.py"


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "result.json"
    words = [sys.executable, str(BENCH), "--smoke", "--json", str(output)]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    (found,) = json.loads(output.read_text())["calls"].values()
    assert [found["wall_s"], found["processor_s"]] == found["rounds"][0] and found["processor_s"] > 0.1
