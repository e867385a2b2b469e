"""What users may do wrong with a device, or unusually: a clear error, or the right bits."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_equal, assert_same_tensors, batch, everything_on_device
from harness import run as train
from simulated import LAZY, limit, load, running
from test_simulated_engine import HOMES, SCHEDULES, loss_of, net, on_cpu, placed, run_net
from torch import nn

import offload
from offload import AdamW, Engine

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

KIB = 1 << 10


def used() -> int:
    gc.collect()
    bytes_used: int = load().usage(0)[0]
    return bytes_used


def make(model: nn.Module, home: str, path: Path, **more: Any) -> Engine:
    return Engine(model, AdamW(lr=1e-2), max_grad_norm=0.5, **placed(home, model, path, **more))


def step(engine: Engine, number: int) -> None:
    engine.backward(loss_of(engine, batch(number).to(engine.device)))
    assert engine.step()


# --- memory -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("home", HOMES)
def test_a_budget_above_the_free_memory(home: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """What was taken is given back: the same host memory can be page-locked again."""
    model = net()
    before, taken = {name: value.clone() for name, value in model.state_dict().items()}, used()
    with limit(taken + 40 * KIB):
        with pytest.raises(
            offload.BudgetError, match=r"sim:0 has no room for .* of parameters: .*Lower max_memory\[.device"
        ):
            make(model, home, tmp_path)
    assert used() == taken and not list(tmp_path.iterdir())
    assert_same_tensors(dict(model.state_dict()), before)
    truth = run_net("truth", tmp_path)
    assert_equal(on_cpu(run_net(home, tmp_path)), truth)
    assert "page-locked" not in caplog.text


@pytest.mark.parametrize("home", HOMES)
def test_the_device_is_full_in_a_step(home: str, tmp_path: Path) -> None:
    """Torch's own error, and the micro-batch can be run again."""
    truth = run_net("truth", tmp_path)
    with make(net(), home, tmp_path) as engine:
        for number in range(4):
            x = batch(number).to("sim")
            with limit(used()), pytest.raises(torch.OutOfMemoryError):
                engine.backward(loss_of(engine, x))
            loss = loss_of(engine, x)
            with limit(used()), pytest.raises(torch.OutOfMemoryError):
                engine.backward(loss)
            del loss
            engine._manager.check()  # type: ignore[union-attr]
            step(engine, number)
        assert_same_tensors(engine.state_dict(), truth.parameters)


# --- places -----------------------------------------------------------------------------------------------------------


def all_of_it(model: nn.Module, place: str) -> None:
    model.to(place)


def its_buffers(model: nn.Module, place: str) -> None:
    model.shift = model.shift.to(place)


def parts_of_it(model: nn.Module, place: str) -> None:
    model.blocks[0].to(place)
    model.blocks[1].to("sim:0")


@pytest.mark.few
@pytest.mark.parametrize("move", [all_of_it, its_buffers, parts_of_it])
@pytest.mark.parametrize("place", ["sim:0", "sim:1"])
@pytest.mark.parametrize("home", HOMES)
def test_what_is_on_a_device_already(
    home: str, place: str, move: Callable[[nn.Module, str], None], tmp_path: Path
) -> None:
    """It is taken from there, and given back there."""
    truth = run_net("truth", tmp_path)
    model = net()
    move(model, place)
    before = {name: tensor.device for name, tensor in model.state_dict().items()}
    options = placed(home, model, tmp_path)
    data = [batch(number).to("sim") for number in range(4)]
    with running(LAZY) as seen:
        ours = train(model, data, optimizer=AdamW(lr=1e-2), loss_of=loss_of, max_grad_norm=0.5, **options)
    ours.parameters = {name: value.cpu() for name, value in ours.parameters.items()}
    assert_equal(on_cpu(ours), truth)
    assert {name: tensor.device for name, tensor in model.state_dict().items()} == before
    assert_same_tensors({name: tensor.cpu() for name, tensor in model.state_dict().items()}, truth.parameters)
    assert seen.races == []


class Packed(nn.Module):
    """Leaves out what lies behind the end of a sequence: torch wants to have lengths on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, lengths: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.net(nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True).data)
        return found


def test_lengths_that_torch_wants_on_the_cpu(tmp_path: Path) -> None:
    x, lengths = torch.stack([batch(0), batch(1)])[:, :3], torch.tensor([3, 2])
    with make(Packed(), "cpu", tmp_path) as engine:
        assert engine(x.to("sim"), lengths).shape[0] == 5


@pytest.mark.parametrize("place", ["cpu", "sim:1"])
def test_a_batch_on_another_device(place: str, tmp_path: Path) -> None:
    expected = rf"is on {place} but the engine computes on sim:0; move it with \.to\(engine\.device\)"
    with make(net(), "cpu", tmp_path) as engine:
        for given in (batch(0).to(place), [batch(0).to("sim"), {"x": batch(0).to(place)}]):
            with pytest.raises(offload.StateError, match=f"batch: argument 0.*{expected}"):
                engine(given)
        with pytest.raises(RuntimeError, match="on the same device"):  # around the engine, torch refuses
            engine.module(batch(0).to("sim:1"))
        output = engine(batch(0).to("sim"))
        with pytest.raises(RuntimeError, match="on the same device"):
            engine.backward(output.sub(batch(1).to("sim:1")).pow(2).mean())
        del output
        step(engine, 0)


@pytest.mark.parametrize("name", ["sim:2", "sim:7"])
def test_no_such_index(name: str) -> None:
    with pytest.raises(offload.ConfigError, match=f"index below 2 but got '{name}'; torch sees 2 sim devices"):
        Engine(net(), AdamW(), **{**everything_on_device(), "device": name})


@pytest.mark.parametrize("home", HOMES)
def test_another_device_is_current(home: str, tmp_path: Path) -> None:
    """While the engine is made, and while it works."""
    truth = run_net("truth", tmp_path)
    module = torch.get_device_module("sim")
    for schedule in SCHEDULES[:2]:
        with running(schedule) as seen:
            with module.device(1), make(net(), home, tmp_path, device="sim:0") as engine:
                for number in range(4):
                    with module.device(number % 2):
                        step(engine, number)
                assert_same_tensors(engine.state_dict(), truth.parameters)
        assert seen.races == [], schedule.name
        assert all(name.startswith("sim:0") for name, counts in seen.counts.items() if "kernels" in counts)


@pytest.mark.parametrize("home", HOMES)
def test_the_cache_may_be_emptied(home: str, tmp_path: Path) -> None:
    """Between all modules, in forward and backward, as some trainers do: the arena is in use and stays."""
    truth = run_net("truth", tmp_path)
    empty = torch.get_device_module("sim").empty_cache
    for schedule in SCHEDULES:
        model = net()
        for block in model.blocks:
            block.register_forward_hook(lambda *_: empty())
            block.register_full_backward_hook(lambda *_: empty())
        with running(schedule) as seen, make(model, home, tmp_path) as engine:
            for number in range(4):
                step(engine, number)
            empty()
            assert_same_tensors(engine.state_dict(), truth.parameters)
        assert seen.races == [], schedule.name
