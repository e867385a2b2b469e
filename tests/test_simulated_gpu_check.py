"""The check of a GPU goes all the way on the simulated device."""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
# What is measured of the machine is small: the simulated device copies 0.1 GB/s.
RUN = """
import runpy, sys
from offload import measuring
measuring._WIDE = measuring._WIDE_BESIDE = 128
measuring._OBJECTS = 2
measuring._COPY_BYTES = measuring._CACHE_BYTES = 1 << 20
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


@pytest.mark.usefixtures("sim")
def test_the_gpu_check_goes_all_the_way(gpu_check: Any, tmp_path: Path) -> None:
    """On the simulated device: every section has its figures."""
    words = [str(SCRIPTS / "gpu_check.py"), "--device", "sim", "--smoke", "--output", str(tmp_path)]
    command = [sys.executable, "-c", RUN, *words]
    done = subprocess.run(command, cwd=SCRIPTS.parent, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    found = json.loads((tmp_path / "gpu-check.json").read_text())
    assert tuple(found) == gpu_check.SECTIONS
    assert found["tests"]["exit"] == 0 and found["placement"]["same"] and found["activations"]["same"]
    assert all(found["forecast"][home]["predicted s"] > 0 for home in ("device", "cpu", "nvme"))
    for home in ("states in host memory", "states on NVMe"):
        assert found[home]["bytes per step"]["h2d"] > 0 and found[home]["step s"] > 0
    assert found["states on NVMe"]["bytes per step"]["nvme_write"] > 0
    assert json.loads((tmp_path / "trace.json").read_text())["traceEvents"]
    text = (tmp_path / "gpu-check.txt").read_text()
    assert text.startswith("gpu check: passed") and all(name in text for name in found)
    assert sorted(path.name for path in tmp_path.iterdir()) == [
        *("forecast-cpu.txt", "forecast-device.txt", "forecast-nvme.txt", "gpu-check.json", "gpu-check.txt"),
        *("plan-cpu.txt", "plan-nvme.txt", "plan-resident.txt", "tests.txt", "trace.json"),
    ]


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    spec = importlib.util.spec_from_file_location("gpu_check", SCRIPTS / "gpu_check.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "gpu_check", module)
    spec.loader.exec_module(module)
    return module


@pytest.mark.nightly
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("machine", ["desktop", "h200"])
def test_the_large_model_fits_the_machine_that_is_asked_for(
    machine: str, home: str, gpu_check: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By the clock, in a dry run: its budgets have room for a step, with 80 GiB of drive."""
    import torch
    from simulated.engine import engine_clock, untouched

    from offload import AdamW, Engine
    from offload.planning.hardware import PRESETS

    free = shutil.disk_usage(tmp_path)._replace(free=80 << 30)
    monkeypatch.setattr(gpu_check.shutil, "disk_usage", lambda path: free)
    with engine_clock(PRESETS[machine], dry=True):
        check = gpu_check.Check("sim:0", gpu_check.FULL, tmp_path, tmp_path)
        shape = check.size.large
        model = untouched(check.llama(shape, at="meta"))
        assert sum(parameter.numel() for parameter in model.parameters()) > 6.7e9
        with Engine(model, AdamW(lr=1e-5), **check.options(home, shape)) as engine:
            ids = torch.zeros(1, check.size.tokens, dtype=torch.int64, device="sim")
            engine.backward(engine(input_ids=ids, labels=ids).loss)
            engine.step()
            engine.drain()
            assert engine.stats().step == 1 and engine.stats().links["d2h"].bytes > 2 * 6.7e9  # of gradients
            engine.close(restore=False)
