"""The bench of durable runs runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "durable.py"


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "durable.json"
    command = [sys.executable, str(BENCH), "--smoke", "--path", str(tmp_path), "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for line in (
        "3 kills: ",
        " 0 wrong; ",
        "kills while a checkpoint was copied",
        "commit: ",
        "flushes (planned 2)",
        "step: ",
    ):
        assert line in done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert result["kills"]["losses_compared"] > 0 and result["kills"]["wrong"] == []
    assert result["cost"]["flushes"] == result["cost"]["planned_flushes"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["durable.json"]
