"""Placements in lockstep while the world disturbs them: no difference, and one that is made is found and named."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

BENCH = Path(__file__).resolve().parent.parent / "bench"


def soak(
    path: Path, *arguments: str, timeout_s: float = 300
) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    result = path / "soak.json"
    command = [sys.executable, str(BENCH / "soak.py"), "--path", str(path), "--json", str(result), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout_s, check=False)
    assert result.exists(), done.stderr[-3000:]
    assert [file.name for file in path.iterdir()] == ["soak.json"], "nothing is left behind"
    return done, json.loads(result.read_text(encoding="utf-8"))


@pytest.mark.slow
def test_a_few_steps_without_a_difference(tmp_path: Path) -> None:
    done, result = soak(tmp_path, "--smoke", "--seed", "4", "--steps", "12")
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    counts = result["counts"]
    assert result["seed"] == 4 and result["difference"] is None
    assert counts["steps"] == 12 and counts["digests"] > 0
    for disturbance in ("clipped steps", "late I/Os drawn", "steps beside a busy process", "steps with ballast"):
        assert counts[disturbance] > 0, disturbance
    assert counts["nvme early_units"] > 0 and counts["nvme stalls"] > 0 and counts["mixed stalls"] > 0


@pytest.mark.nightly
def test_wrong_bytes_from_a_drive_are_found_and_named(tmp_path: Path) -> None:
    done, result = soak(tmp_path, "--smoke", "--seed", "1", "--steps", "12", "--cut", "6")
    assert done.returncode == 1 and "DIFFERENT" in done.stdout, done.stdout + done.stderr[-3000:]
    found = result["difference"]
    assert found["step"] >= 7, "the sixth step was still right"
    assert found["differs"] and all(line.startswith("nvme: unit model.") for line in found["differs"])
    assert any(line.startswith("nvme, behind the step") for line in found["under way"])


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.parametrize("model", ["tiny", "small"])
def test_ten_minutes_without_a_difference(model: str, tmp_path: Path) -> None:
    done, result = soak(tmp_path, "--model", model, "--minutes", "5", "--steps", "1000000", timeout_s=1200)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
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
    monkeypatch.syspath_prepend(str(BENCH))
    spec = importlib.util.spec_from_file_location("step_bench", BENCH / "step.py")
    assert spec is not None and spec.loader is not None
    step = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(step)
    assert step.unsteady(losses) == expected
