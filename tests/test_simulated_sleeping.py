"""An accelerator gets its memory back from an engine that sleeps, which goes on with the same bits."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
import torch
from harness import batch
from simulated.kernels import updating
from test_checkpoints import directory
from test_simulated_engine import loss_of, net, placed

from offload import AdamW, Engine
from offload.memory.budget import Tier

pytestmark = pytest.mark.usefixtures("single_torch_thread")


@pytest.mark.parametrize("host", [False, True])
@pytest.mark.parametrize("home", ["device", "cpu", "nvme", "resident"])
@pytest.mark.usefixtures("sim")
def test_a_device_gets_its_memory_back(home: str, host: bool, tmp_path: Path) -> None:
    """What another one has taken meanwhile stays as it is: the engine comes back somewhere else.

    It sleeps between steps, and while gradients wait for the second micro-batch.
    """

    def run(name: str, sleeps: bool) -> tuple[list[torch.Tensor], dict[str, dict[str, str]]]:
        model = net()
        options = {**placed(home, model, directory(tmp_path, name)), "nvme_path": tmp_path / name}
        options["max_memory"] = {**options["max_memory"], "nvme": "64MiB"}
        losses, others = [], []
        options |= {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
        kernels = updating() if home == "resident" else contextlib.nullcontext()
        with kernels, Engine(model, AdamW(lr=1e-2), **options) as engine:
            device = torch.get_device_module(engine.device)
            for number in range(6):
                if number in (2, 3) and sleeps:
                    arena = engine.plan.arena_bytes[Tier.DEVICE] - engine.plan.loose_bytes
                    before = device.memory_allocated()
                    engine.sleep(host=host)
                    assert before - device.memory_allocated() >= arena > 0
                    others.append(torch.full((arena,), 7, dtype=torch.uint8, device=engine.device))
                    engine.wake()
                loss = loss_of(engine, batch(number).to(engine.device))
                losses.append(loss.detach().cpu())
                engine.backward(loss)
                engine.step()
                del loss
            digests = engine.digests()
            assert all((other.cpu() == 7).all() for other in others), "theirs by now"
            return losses, digests

    truth, found = run("one", False), run("two", True)
    assert all(torch.equal(a, b) for a, b in zip(found[0], truth[0], strict=True)) and found[1] == truth[1]
