"""Checkpoints on the simulated accelerator: out of memory that the host cannot read, and back, under every schedule."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, everything_on_device
from simulated import EAGER, LAZY, NAME, Schedule, running
from test_checkpoints import Run, assert_same, batch, directory, seed
from test_simulated_engine import net as plain_net
from test_simulated_engine import placed

from offload import AdamW

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")


class SimulatedRun(Run):
    """A run whose batches are where the engine is."""

    def __init__(self, place: dict[str, Any], **options: Any) -> None:
        self.build(plain_net(dtype=torch.bfloat16), lambda model: AdamW(lr=1e-2), {**place, **options})

    def train(self, numbers: range) -> None:
        for number in numbers:
            x = batch(number).to(self.engine.device, torch.bfloat16)
            noise = torch.rand(4, WIDTH, device=self.engine.device).to(torch.bfloat16)  # of the device's generator
            loss = self.engine(x + noise).float().sub(1).pow(4).mean()
            self.losses.append(loss.detach().cpu())
            self.engine.backward(loss)
            if self.engine.step():
                self.schedule.step()


def resume_elsewhere(first: str, second: str, schedule: Schedule, path: Path) -> None:
    """Go on at another home, with a gradient that waits: it is saved and loaded, too."""
    options = {"gradient_accumulation_steps": 2, "max_grad_norm": 0.5}
    with running(schedule) as seen:
        seed()
        whole = SimulatedRun(placed(first, plain_net(), directory(path, "a")), **options)
        with whole.engine:
            whole.train(range(3))
            whole.engine.save_checkpoint(path / "saved", client_state=whole.client_state())
            digests = whole.engine.digests()
            whole.train(range(3, 6))
            truth = whole.outcome()
        after = SimulatedRun(placed(second, plain_net(), directory(path, "b")), **options)
        with after.engine:
            after.schedule.load_state_dict(after.engine.load_checkpoint(path / "saved")["schedule"])
            assert after.engine.digests() == digests
            after.train(range(3, 6))
            assert all(torch.equal(a, b) for a, b in zip(after.losses, whole.losses[3:], strict=True))
            assert_same(after.outcome(), truth)
    assert seen.races == []


@pytest.mark.parametrize("schedule", [LAZY, EAGER], ids=lambda value: value.name)
@pytest.mark.parametrize(("first", "second"), [("device", "nvme"), ("nvme", "cpu"), ("cpu", "device")])
def test_resumed_elsewhere(first: str, second: str, schedule: Schedule, tmp_path: Path) -> None:
    resume_elsewhere(first, second, schedule, tmp_path)


@pytest.mark.parametrize("schedule", [LAZY, EAGER], ids=lambda value: value.name)
@pytest.mark.parametrize("place", ["nvme", "device"])
def test_copied_while_training_goes_on(place: str, schedule: Schedule, tmp_path: Path) -> None:
    with running(schedule) as run:
        seed()
        room = {"background_checkpoints": True}
        whole = SimulatedRun({**placed(place, plain_net(), directory(tmp_path, "a")), **room})
        with whole.engine:
            whole.train(range(2))
            state = whole.client_state()
            pending = whole.engine.save_checkpoint(tmp_path / "saved", client_state=state, wait=False)
            whole.train(range(2, 5))
            truth = whole.outcome()
            pending.wait()
        after = SimulatedRun(placed("nvme", plain_net(), directory(tmp_path, "b")))
        with after.engine:
            after.schedule.load_state_dict(after.engine.load_checkpoint(tmp_path / "saved")["schedule"])
            after.train(range(2, 5))
            assert all(torch.equal(a, b) for a, b in zip(after.losses, whole.losses[2:], strict=True))
            assert_same(after.outcome(), truth)
    assert not run.races


@pytest.mark.parametrize("run_dir", [False, True])
def test_resumed_on_a_device_of_another_number(run_dir: bool, tmp_path: Path) -> None:
    """What is drawn there is what would have been drawn on the former device."""
    module = torch.get_device_module(NAME)
    place = placed("nvme", plain_net(), directory(tmp_path, "a"))
    if run_dir:
        place = {**place, "nvme_path": None, "run_dir": directory(tmp_path, "run")}
    seed()
    run = SimulatedRun({**place, "device": f"{NAME}:0"})
    with run.engine:
        run.train(range(2))
        if not run_dir:
            run.engine.save_checkpoint(tmp_path / "saved")
        drawn = module.get_rng_state(0)
    seed()
    assert not torch.equal(drawn, module.get_rng_state(1))
    after = SimulatedRun({**place, "device": f"{NAME}:1"})
    with after.engine:
        if not run_dir:
            after.engine.load_checkpoint(tmp_path / "saved")
        assert torch.equal(module.get_rng_state(1), drawn)
        assert not torch.equal(module.get_rng_state(0), drawn)


def test_resumed_without_it(tmp_path: Path) -> None:
    """What was saved on the accelerator goes on on the processor."""
    run = SimulatedRun(placed("nvme", plain_net(), directory(tmp_path, "a")))
    with run.engine:
        run.train(range(2))
        run.engine.save_checkpoint(tmp_path / "saved")
        truth = run.outcome()
    after = SimulatedRun(everything_on_device())
    with after.engine:
        after.engine.load_checkpoint(tmp_path / "saved")
        assert_same(after.outcome(), truth)
