"""The bench of virtual time runs, says what it promises, and its schedule of others is what its text says."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

pytestmark = pytest.mark.usefixtures("sim")

BENCH = Path(__file__).resolve().parent.parent / "bench" / "simulated.py"


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(BENCH.parent))
    spec = importlib.util.spec_from_file_location("bench_simulated", BENCH)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "bench_simulated", module)
    spec.loader.exec_module(module)
    return module


def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "simulated.json"
    command = [sys.executable, str(BENCH), "--smoke", "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    for line in (
        "states on NVMe, desktop",
        "units in the median",
        "the device waits for",
        "DeepSpeed's schedule",
        "plain",
    ):
        assert line in done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert set(result["machines"]) == {"desktop", "h200"} and len(result["cases"]) == 2
    for case in result["cases"]:
        assert 0 < case["U"] <= 1 and 0 < case["R"] <= 1 and case["step_s"] >= case["bound_s"]
        besides = max(seconds for lane, seconds in case["work_s"].items() if lane != "compute")
        row_s = case["work_s"]["compute"] / case["rows"]
        assert abs(case["work_s"]["compute"] - besides) <= row_s, "not near break-even"
    assert "drive" in result["cases"][1]["work_s"] and result["cases"][0]["of_plain"] > 1


def test_the_schedule_of_deepspeed_by_hand(bench: ModuleType) -> None:
    """1e9 parameters on the desktop: copies at 25 GB/s, updates at 62.72, the drive at 7, 5, and together 6."""
    host, drive = bench.CASES[1], bench.CASES[3]
    found = bench.of_deepspeed(host, 1e9, compute_s=0.1, micro_batches=1)
    assert found["forward and backward"] == pytest.approx(2 * 2 / 25)  # the gathers of two passes; compute is shorter
    assert found["step"] == pytest.approx(30 / 62.72)
    assert found["total"] == pytest.approx(4 / 25 + 30 / 62.72)
    found = bench.of_deepspeed(drive, 1e9, compute_s=3.0, micro_batches=2)
    assert found["forward and backward"] == 3.0
    assert found["step"] == pytest.approx((12 + 12) / 6)
