"""The bench of forecasts: a smoke run leaves alone what the user has measured."""

from __future__ import annotations

from pathlib import Path

import benches
import pytest


@pytest.mark.nightly
def test_a_smoke_run_keeps_its_measurements_to_itself(tmp_path: Path) -> None:
    cache, drive = tmp_path / "cache", tmp_path / "drive"
    (cache / "offload").mkdir(parents=True)
    drive.mkdir()
    mine = cache / "offload" / "measured.json"
    mine.write_text('{"mine": 1}', encoding="utf-8")
    words = ["--smoke", "--mixes", "all in memory", "--path", str(drive)]
    result, _ = benches.run("forecast", tmp_path, *words, XDG_CACHE_HOME=str(cache))
    assert mine.read_text(encoding="utf-8") == '{"mine": 1}' and list(drive.iterdir()) == []
    assert [file.name for file in mine.parent.iterdir()] == ["measured.json"]
    (mix,) = result["mixes"].values()
    assert mix["predicted_s"] > 0 and mix["measured_s"] > 0
