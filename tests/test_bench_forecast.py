"""The bench of forecasts: a smoke run leaves alone what the user has measured."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench" / "forecast.py"


@pytest.mark.nightly
def test_a_smoke_run_keeps_its_measurements_to_itself(tmp_path: Path) -> None:
    cache, drive, output = tmp_path / "cache", tmp_path / "drive", tmp_path / "forecast.json"
    (cache / "offload").mkdir(parents=True)
    drive.mkdir()
    mine = cache / "offload" / "measured.json"
    mine.write_text('{"mine": 1}', encoding="utf-8")
    command = [sys.executable, str(BENCH), "--smoke", "--mixes", "all in memory", "--path", str(drive)]
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache)}
    done = subprocess.run(
        [*command, "--json", str(output)], env=environment, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert mine.read_text(encoding="utf-8") == '{"mine": 1}' and list(drive.iterdir()) == []
    assert [file.name for file in mine.parent.iterdir()] == ["measured.json"]
    (mix,) = json.loads(output.read_text(encoding="utf-8"))["mixes"].values()
    assert mix["predicted_s"] > 0 and mix["measured_s"] > 0
