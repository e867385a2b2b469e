"""An accelerator gets its memory back from an engine that sleeps, which goes on with the same bits."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import PAGE, WIDTH, Outcome, batch, everything_on_device
from simulated.kernels import updating
from test_checkpoints import directory
from test_simulated_engine import loss_of, net, placed
from test_simulated_mutations import leave_out, missed_by_an_engine, trained
from torch import nn

from offload import AdamW, Engine
from offload.memory.budget import Tier
from offload.planning.units import Where
from offload.shards.gradients_on_device import GradientsOnDevice

pytestmark = pytest.mark.usefixtures("single_torch_thread")


@pytest.mark.few
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


@pytest.mark.usefixtures("sim")
def test_it_wakes_when_there_is_room_for_all_gradients_that_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And not before: what it had taken of their memory is given back."""
    make, made = GradientsOnDevice._make, list[object]()

    def fails_once(self: GradientsOnDevice, where: Where, *more: Any) -> int:
        made.append(where)
        if len(made) == 5:
            raise torch.OutOfMemoryError("no room for the fifth")
        return make(self, where, *more)

    found = []
    for sleeps in (False, True):
        model = net()
        options = placed("resident", model, tmp_path, gradient_accumulation_steps=2)
        with updating(), Engine(model, AdamW(lr=1e-2), **options) as engine:
            for number in range(2):
                engine.backward(loss_of(engine, batch(number).to(engine.device)))
                engine.step()
                if sleeps and number == 0:
                    engine.sleep()
                    with monkeypatch.context() as patch:
                        patch.setattr(GradientsOnDevice, "_make", fails_once)
                        with pytest.raises(torch.OutOfMemoryError, match="fifth"):
                            engine.wake()
                        engine.wake()
                    assert len(made) == 5 + 12
            found.append(engine.digests())
    assert found[0] == found[1]


# what is left out -> module, function, its text, what is there instead
WAITS = {
    "memory is given back behind all that reads it": (
        "offload.shards.tiers", "Tiers.release", "self.device.synchronize()", "pass"
    ),
    "memory is used again behind the work of its last owner": (
        "offload.shards.tiers", "Tiers.take_again",
        "self.device.synchronize()  # work of the memory's last owner may be queued", "pass",
    ),
}  # fmt: skip


def run_asleep(home: str, path: Path) -> Outcome:
    """Sleep after each step, with work queued: on the arena before, on its memory meanwhile, and on two streams."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))  # no buffers: nothing makes the host wait
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    losses = []
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        side = None if home == "truth" else torch.Stream("sim:0")
        for number in range(4):
            engine.backward(loss_of(engine, batch(number).pin_memory().to(engine.device, non_blocking=True)))
            engine.step()
            engine.drain()
            with side or contextlib.nullcontext(), torch.no_grad():
                x = batch(number).pin_memory().to(engine.device, non_blocking=True)
                losses.append(loss_of(engine, x))
            if side is not None:
                engine.sleep()
                size = engine.plan.arena_bytes[Tier.DEVICE] - engine.plan.loose_bytes + PAGE
                other = torch.ones(size, dtype=torch.uint8, device=engine.device)
                del other
                with side if number % 2 else contextlib.nullcontext():
                    engine.wake()
        with side or contextlib.nullcontext():
            losses = [loss.cpu() for loss in losses]
        return Outcome(losses, [], engine.state_dict(), {}, [], engine.stats(), engine.plan)


@pytest.mark.usefixtures("sim")
def test_it_sleeps_and_wakes_behind_all_that_is_queued(tmp_path: Path) -> None:
    programs = {home: trained(run_asleep, home, tmp_path) for home in ("device", "cpu")}
    assert list(missed_by_an_engine(tmp_path, programs)) == []


@pytest.mark.parametrize("wait", WAITS)
@pytest.mark.usefixtures("sim")
def test_a_wait_that_is_left_out_is_seen(wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    programs = {home: trained(run_asleep, home, tmp_path) for home in ("device", "cpu")}
    leave_out(WAITS[wait], monkeypatch)
    seen = next(missed_by_an_engine(tmp_path, programs), None)
    assert seen, "nothing has missed it"
    print(f"without {wait}: {seen}")
