"""The bench of durable runs runs and says what it promises."""

from __future__ import annotations

from pathlib import Path

import benches
import pytest


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    result, done = benches.run("durable", tmp_path, "--smoke", "--path", str(tmp_path))
    for line in (
        "3 kills: ",
        " 0 wrong; ",
        "kills while a checkpoint was copied",
        "commit: ",
        "flushes (planned 2)",
        "step: ",
    ):
        assert line in done.stdout
    assert result["kills"]["losses_compared"] > 0 and result["kills"]["wrong"] == []
    assert result["cost"]["flushes"] == result["cost"]["planned_flushes"] == 2
    assert [path.name for path in tmp_path.iterdir()] == ["durable.json"]
