"""A checkpoint is saved and loaded within the budgets of training, and takes 12 bytes per parameter on the drive."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

CHILD = """
import sys
from pathlib import Path
import torch, offload
from offload.activations.rss import reset_high_water, status_bytes
from torch import nn

path = Path(sys.argv[1])

def make(width, layers):
    with torch.device("meta"):
        model = nn.Sequential(*[nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(layers)])
    return offload.Engine(model, offload.AdamW(), device="cpu", nvme_path=path, unit_bytes="4MiB",
                          max_memory={"device": "32MiB", "cpu": "32MiB", "nvme": "2GiB"}, activation_memory="8MiB",
                          offload_param="nvme", offload_optimizer="nvme", background_checkpoints=True,
                          init_weights=lambda layer: [p.normal_(0, 0.02) for p in layer.parameters(recurse=False)])

def train(engine, width):
    engine.backward(engine(torch.ones(1, width, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()

with make(64, 2) as first:  # what libraries take is not what a checkpoint takes
    train(first, 64)
    first.save_checkpoint(path / "first")
base = status_bytes("VmRSS")
engine, saved = make(1024, 24), path / "saved"

def beside():
    pending = engine.save_checkpoint(saved, tag="beside", wait=False)
    train(engine, 1024)
    pending.wait()

train(engine, 1024)
for call in (lambda: engine.save_checkpoint(saved, tag="alone"), beside, lambda: engine.load_checkpoint(saved)):
    engine.drain()
    reset_high_water()
    call()
    print(status_bytes("VmHWM") - base)
"""


def test_peaks_are_within_the_budgets(tmp_path: Path) -> None:
    """Parameters and states take 288 MiB, the budgets 64."""
    done = subprocess.run([sys.executable, "-c", CHILD, str(tmp_path)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    assert all(int(line) <= (64 + 64) << 20 for line in done.stdout.split()) and len(done.stdout.split()) == 3
    for tag in ("alone", "beside"):
        size = sum(file.stat().st_size for file in (tmp_path / "saved" / tag).iterdir())
        assert 12 <= size / (24 << 20) < 12.01
