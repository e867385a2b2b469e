"""The bench of homes runs, and its random homes are feasible, of all kinds, and the same for the same seed."""

from __future__ import annotations

from pathlib import Path

import benches
import pytest

pytestmark = pytest.mark.usefixtures("sim")


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    result, done = benches.run("homes", tmp_path, "--smoke")
    assert result["random"] == 2 and len(result["settings"]) == 2
    for setting in result["settings"]:
        assert setting["name"] in done.stdout and len(setting["seconds"]) == 2
        assert setting["best"]["step_s"] == setting["seconds"][0]
        assert setting["of_best"] == setting["chosen"]["step_s"] / setting["best"]["step_s"]
        for plan in (setting["chosen"], setting["best"]):
            assert plan["step_s"] >= max(plan["work_s"].values()), "no lane is busy for longer than a step"
            assert all(sum(shares.values()) == pytest.approx(1, abs=0.01) for shares in plan["shares"].values())
