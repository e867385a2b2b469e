"""Placements in lockstep while the world disturbs them: no difference, and one that is made is found and named."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import benches
import pytest


def soak(
    path: Path, *words: str, code: int = 0, timeout_s: float = 300
) -> tuple[dict[str, Any], subprocess.CompletedProcess[str]]:
    found = benches.run("soak", path, "--path", str(path), *words, code=code, timeout_s=timeout_s)
    assert [file.name for file in path.iterdir()] == ["soak.json"], "nothing is left behind"
    return found


@pytest.mark.slow
def test_a_few_steps_without_a_difference(tmp_path: Path) -> None:
    result, _ = soak(tmp_path, "--smoke", "--seed", "4", "--steps", "12")
    counts = result["counts"]
    assert result["seed"] == 4 and result["difference"] is None
    assert counts["steps"] == 12 and counts["digests"] > 0
    for disturbance in ("clipped steps", "late I/Os drawn", "steps beside a busy process", "steps with ballast"):
        assert counts[disturbance] > 0, disturbance
    assert counts["nvme early_units"] > 0 and counts["nvme stalls"] > 0 and counts["mixed stalls"] > 0


@pytest.mark.nightly
def test_wrong_bytes_from_a_drive_are_found_and_named(tmp_path: Path) -> None:
    result, done = soak(tmp_path, "--smoke", "--seed", "1", "--steps", "12", "--cut", "6", code=1)
    assert "DIFFERENT" in done.stdout
    found = result["difference"]
    assert found["step"] >= 7, "the sixth step was still right"
    assert found["differs"] and all(line.startswith("nvme: unit model.") for line in found["differs"])
    assert any(line.startswith("nvme, behind the step") for line in found["under way"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "small"])
def test_ten_minutes_without_a_difference(model: str, tmp_path: Path) -> None:
    result, _ = soak(tmp_path, "--model", model, "--minutes", "5", "--steps", "1000000", timeout_s=1200)
    assert result["counts"]["steps"] >= 20


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ({"nvme": [[1.0, 2.0]]}, {}),
        ({"nvme": [[1.0, 2.0], [1.0, 2.0]], "plain": [[1.0, 3.0], [1.0, 3.0]]}, {}),
        ({"nvme": [[1.0, 2.0, 3.0], [1.0, 2.5, 3.5], [1.0, 2.0, 3.0]], "plain": [[1.0], [1.0]]}, {"nvme": 1}),
    ],
)
def test_the_step_bench_tells_rounds_that_differ(
    losses: dict[str, Any], expected: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert benches.load("step", monkeypatch).unsteady(losses) == expected
