"""State dicts that do not fit the host budget lie on the drive: the same bits, and no memory held."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors
from torch import nn

import offload
from offload import AdamW, Engine
from offload.checkpoint import mapped
from swap import SwapFullError

TIGHT = {"device": "12MiB", "cpu": "7MiB", "nvme": "256MiB"}
AMPLE = {"device": "12MiB", "cpu": "512MiB", "nvme": "256MiB"}


def trained(path: Path | None, budgets: dict[str, str], dtype: torch.dtype = torch.float32) -> Engine:
    """Return an engine after two steps; 8 MiB of parameters."""
    torch.manual_seed(1)
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(8)]).to(dtype)
    engine = Engine(
        model,
        AdamW(lr=1e-2),
        device="cpu",
        max_memory=budgets,
        activation_memory="2MiB",
        unit_bytes="1MiB",
        nvme_path=path,
        offload_param="nvme",
        offload_optimizer="nvme",
    )
    step(engine)
    step(engine)
    return engine


def step(engine: Engine) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(torch.ones(2, 512, dtype=dtype)).float().pow(2).sum())
    engine.step()


def mappings(folder: Path) -> list[str]:
    """Return the lines of the mappings of files without a name that were made in a folder."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return [line for line in maps if f" {folder}/#" in line and "(deleted)" in line and "rw-s" in line]


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return the tensors of an optimizer's state dict."""
    found = {
        f"{number}.{name}": value
        for number, entry in state["state"].items()
        for name, value in entry.items()
        if isinstance(value, torch.Tensor)
    }
    return found | {f"master.{number}": value for number, value in state.get("masters", {}).items()}


def test_the_working_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is made later lies where the engine was told: state dicts, and what a sleeping engine has."""
    swap, other = tmp_path / "swap", tmp_path / "other"
    swap.mkdir()
    other.mkdir()
    monkeypatch.chdir(tmp_path)
    with trained(Path("swap"), TIGHT) as engine:
        assert engine.config.nvme_path == str(swap)  # one, as it was given, for whoever writes options to JSON
        monkeypatch.chdir(other)
        state = engine.state_dict()
        assert mappings(swap)
        engine.sleep(host=True)
        engine.wake()
        assert_same_tensors(engine.state_dict(), state)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.usefixtures("single_torch_thread")
def test_round_trip_on_the_drive(dtype: torch.dtype, tmp_path: Path) -> None:
    swap, other = tmp_path / "swap", tmp_path / "other"
    swap.mkdir()
    other.mkdir()
    with trained(other, AMPLE, dtype) as ample:
        truth, weights = ample.optimizer.state_dict(), ample.state_dict()
        assert not mappings(other), "what fits stays in memory"
        before = sorted(swap.iterdir())
        with trained(swap, TIGHT, dtype) as engine:
            state, ours = engine.optimizer.state_dict(), engine.state_dict()
            large = [value for value in (*flat(state).values(), *ours.values()) if value.nbytes > mapped.MIB // 16]
            assert len(mappings(swap)) == len(large) and large
            assert_same_tensors(flat(state), flat(truth))
            assert_same_tensors(ours, weights)
            torch.save({"model": ours, "optimizer": state}, tmp_path / "saved.pt")
            del state, ours, large
            assert not mappings(swap), "the files are gone with the tensors"
            loaded = torch.load(tmp_path / "saved.pt", weights_only=True)
            assert_same_tensors(flat(loaded["optimizer"]), flat(truth))
            step(engine)
            engine.load_state_dict(loaded["model"])
            engine.optimizer.load_state_dict(loaded["optimizer"])
            assert_same_tensors(flat(engine.optimizer.state_dict()), flat(truth))
            step(engine)
            step(ample)
            assert_same_tensors(engine.state_dict(), ample.state_dict())
            engine.optimizer.load_state_dict(engine.optimizer.state_dict())  # from the drive to the drive
            assert_same_tensors(flat(engine.optimizer.state_dict()), flat(ample.optimizer.state_dict()))
            engine.close(restore=False)
    assert sorted(swap.iterdir()) == before == []


def test_a_drive_without_room_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with trained(tmp_path, TIGHT) as engine:
        with monkeypatch.context() as patch:
            patch.setattr(mapped, "free_space", lambda _: 1 << 20)
            for subject, ask in (
                ("optimizer.state_dict", engine.optimizer.state_dict),
                ("state_dict", engine.state_dict),
            ):
                with pytest.raises(SwapFullError, match=rf"^{subject}: needs .* MiB but 1.00 MiB are free.*free space"):
                    ask()

        def full(*_: object) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        with monkeypatch.context() as patch:
            patch.setattr(mapped, "posix_fallocate", full)
            with pytest.raises(SwapFullError, match=r"exp_avg of 0.weight needs 1.00 MiB on the drive \(ENOSPC"):
                engine.optimizer.state_dict()
        assert not mappings(tmp_path)
        step(engine)  # and nothing else has happened
        assert len(engine.optimizer.state_dict()["state"]) == 16
        engine.close(restore=False)


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="there is no folder in memory")
def test_a_folder_in_memory_is_no_drive() -> None:
    with trained(Path("/dev/shm"), TIGHT) as engine:
        with pytest.warns(UserWarning, match="optimizer.state_dict: takes 16"):
            engine.optimizer.state_dict()
        assert not mappings(Path("/dev/shm"))
        engine.close(restore=False)


_CHILD = """
import resource, sys, torch, offload
from offload.activations.rss import reset_high_water, status_bytes
from torch import nn
torch.manual_seed(0)
model = nn.Sequential(*[nn.Linear(1024, 1024, bias=False) for _ in range(24)])  # 96 MiB, states 192 MiB
engine = offload.Engine(model, offload.AdamW(), device="cpu", nvme_path=sys.argv[1], unit_bytes="4MiB",
                        max_memory={"device": "32MiB", "cpu": "32MiB", "nvme": "1GiB"}, activation_memory="8MiB",
                        offload_param="nvme", offload_optimizer="nvme")
engine.backward(engine(torch.ones(1, 1024)).mean())
engine.step()
engine.drain()
before = status_bytes("VmRSS")
reset_high_water()
data = status_bytes("VmData") + (64 << 20)
resource.setrlimit(resource.RLIMIT_DATA, (data, data))  # private memory; mappings of files do not count
weights, states = engine.state_dict(), engine.optimizer.state_dict()
print(status_bytes("VmHWM") - before)
torch.save({"model": weights, "optimizer": states}, sys.argv[2])
try:
    torch.empty(256 << 20, dtype=torch.uint8)
    print("the limit does not hold")
except RuntimeError:
    pass
"""


def test_nothing_is_held_beyond_the_budget(tmp_path: Path) -> None:
    """288 MiB of state dicts with 64 MiB of budgets: pages of the files at most, and no memory of this process."""
    command = [sys.executable, "-c", _CHILD, str(tmp_path), str(tmp_path / "saved.pt")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    filling, *more = done.stdout.split("\n")
    assert int(filling) < mapped.TOUCHED_BYTES + (32 << 20)
    assert more == [""]
    saved = torch.load(tmp_path / "saved.pt", mmap=True, weights_only=True)
    assert len(saved["model"]) == 24 and len(saved["optimizer"]["state"]) == 24
    assert offload.__version__
