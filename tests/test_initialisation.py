"""Models that are made on the drive have the bits of ordinary ones, and their memory is the kernel's to take."""

from __future__ import annotations

import errno
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, nvme
from models import BY_NAME
from torch import nn

import offload
from offload import AdamW, ConfigError, Engine, initialisation
from offload.checkpoint import mapped as mapped_files
from swap import SwapFullError


@pytest.fixture
def all_parameters(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(initialisation, "SMALLEST_BYTES", 1)
    monkeypatch.setattr(initialisation, "TOUCHED_BYTES", 4096)


def mapped(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor's memory is a mapping of a file."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, end = (int(part, 16) for part in line.split()[0].split("-"))
        if begin <= tensor.data_ptr() < end:
            return "(deleted)" in line and "rw-s" in line
    return False


@pytest.mark.usefixtures("all_parameters")
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "qwen3_moe", "mamba"])
def test_bits_are_those_of_ordinary_construction(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    plain: Any = BY_NAME[name].build()
    following = torch.rand(2)
    torch.manual_seed(3)
    with offload.init(tmp_path):
        model: Any = BY_NAME[name].build()
    assert torch.equal(torch.rand(2), following)
    assert_same_tensors(dict(model.state_dict()), dict(plain.state_dict()))
    elsewhere = [name for name, parameter in model.named_parameters() if not mapped(parameter)]
    assert elsewhere == (["cls.predictions.bias"] if name == "bert" else []), "padded: memory of its own"
    assert [n for n, _ in model.named_parameters()] == [n for n, _ in plain.named_parameters()], "tied alike"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.usefixtures("all_parameters", "single_torch_thread")
def test_an_engine_takes_the_model(tmp_path: Path) -> None:
    losses = []
    for path in (None, tmp_path):
        torch.manual_seed(3)
        if path is None:
            model: Any = BY_NAME["llama"].build()
        else:
            with offload.init(path):
                model = BY_NAME["llama"].build()
        with Engine(model, AdamW(lr=1e-2), **nvme(model, tmp_path)) as engine:
            for number in range(2):
                loss = engine(**BY_NAME["llama"].batch(number)).loss
                losses.append(loss.item())
                engine.backward(loss)
                engine.step()
        assert not any(mapped(parameter) for parameter in model.parameters())
    assert losses[:2] == losses[2:]


def test_small_and_foreign_parameters_stay(tmp_path: Path) -> None:
    others: list[nn.Module] = []
    with offload.init(tmp_path):
        large, small = nn.Linear(512, 1024, bias=False), nn.Linear(32, 32)
        with torch.device("meta"):
            meta = nn.Linear(512, 1024)
        thread = threading.Thread(target=lambda: others.append(nn.Linear(512, 1024)))
        thread.start()
        thread.join()
    after = nn.Linear(512, 1024)
    assert mapped(large.weight) and meta.weight.is_meta
    assert not any(mapped(module.weight) for module in (small, others[0], after))  # type: ignore[arg-type]


def test_refusals(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"nowhere to be a folder on a drive but got no folder there; pass path="):
        with offload.init(tmp_path / "nowhere"):
            pass
    if Path("/dev/shm").is_dir():
        with (
            pytest.raises(ConfigError, match=r"/dev/shm to be .* but got tmpfs, which is memory"),
            offload.init("/dev/shm"),
        ):
            pass

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(mapped_files, "posix_fallocate", full)
    with pytest.raises(SwapFullError, match=r"init: Linear.weight needs 2.00 MiB on the drive \(ENOSPC.*more room"):
        with offload.init(tmp_path):
            nn.Linear(512, 1024)
    assert not nn.modules.module._global_parameter_registration_hooks


_CHILD = """
import sys, torch, offload
sys.path.insert(0, sys.argv[1])
from offload.activations.rss import reset_high_water, status_bytes
from torch import nn
torch.manual_seed(0)
before = status_bytes("VmRSS")
reset_high_water()
with offload.init(sys.argv[2]):
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])
    for layer in model:
        nn.init.normal_(layer.weight)
print(status_bytes("VmHWM") - before)
reset_high_water()
engine = offload.Engine(model, None, device="cpu", max_memory={"device": "64MiB", "cpu": "32MiB", "nvme": "1GiB"},
                        nvme_path=sys.argv[2])
print(status_bytes("VmHWM") - before)
with engine.gather(model[-1].weight):
    print(model[-1].weight.view(torch.int32).sum().item())
"""


def test_peak_of_a_model_of_400_mb(tmp_path: Path) -> None:
    """One layer has 16 MiB; the engine has budgets of 96 MiB."""
    bench = Path(__file__).resolve().parent.parent / "bench"
    command = [sys.executable, "-c", _CHILD, str(bench), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    making, loading, total = done.stdout.split()
    assert int(making) < 160 << 20
    assert int(loading) < (96 + 64) << 20
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(2048, 2048, bias=False) for _ in range(24)])
    for layer in model:
        nn.init.normal_(layer.weight)  # type: ignore[arg-type]
    last: Any = model[-1].weight
    assert last.view(torch.int32).sum().item() == int(total), "so all numbers before it were the same, too"
