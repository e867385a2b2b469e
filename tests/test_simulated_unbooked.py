"""Where all stays on an accelerator whose memory torch counts, autograd keeps what it saves, and nothing is booked."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, batch
from simulated.kernels import updating
from test_simulated_engine import HOMES, MIB, loss_of, net, placed
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, BudgetError, Engine, StateError
from offload.activations import ledger
from offload.torch_private import top_hooks

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")


@pytest.fixture
def resident(tmp_path: Path) -> Any:
    """An engine with everything on the device."""
    with updating():
        model = net()
        with Engine(model, AdamW(lr=1e-2), **placed("resident", model, tmp_path)) as engine:
            yield engine


@pytest.mark.parametrize("home", [*HOMES, "resident"])
def test_no_hooks_for_saved_tensors_where_all_stays(home: str, tmp_path: Path) -> None:
    model = net()
    found = []
    model.blocks[2].register_forward_hook(lambda *_: found.append(top_hooks() is None))  # type: ignore[index,union-attr]
    with updating(), Engine(model, AdamW(lr=1e-2), **placed(home, model, tmp_path)) as engine:
        engine.backward(loss_of(engine, batch(0).to("sim")))
        engine.step()
        assert engine._parts.activations.is_empty()
    assert found == [home == "resident"]


def stepped(engine: Engine) -> None:
    engine.step()


def loaded(engine: Engine) -> None:
    engine.load_state_dict(engine.state_dict())


def gathered(engine: Engine) -> None:
    with engine.gather(engine.module, modify=True), torch.no_grad():
        for parameter in engine.module.parameters():
            parameter.mul_(2)


@pytest.mark.parametrize("segment", [False, True])
@pytest.mark.parametrize("change", [stepped, loaded, gathered])
def test_a_graph_of_former_parameters_is_stale(
    change: Callable[[Engine], None], segment: bool, resident: Engine
) -> None:
    """As in plain PyTorch, torch says so; what a segment repeats, it repeats with what is there, likewise."""
    x = batch(0).to("sim").requires_grad_()
    loss = (checkpoint(resident, x, use_reentrant=False) if segment else resident(x)).float().pow(2).mean()
    resident.backward(loss, retain_graph=True)
    if change is not stepped:
        resident.zero_grad()
    change(resident)
    with contextlib.nullcontext() if segment else pytest.raises(RuntimeError, match="modified by an inplace operation"):
        resident.backward(loss)
    resident.zero_grad()
    resident.backward(loss_of(resident, batch(1).to("sim")))
    resident.step()


def test_a_tensor_changed_in_place_is_told_by_torch(resident: Engine) -> None:
    def change(module: nn.Module, _: object, output: torch.Tensor) -> torch.Tensor:
        result = torch.sigmoid(output)
        with torch.no_grad():
            result.mul_(2)
        return result

    hook = resident.module.blocks[1].register_forward_hook(change)  # type: ignore[index,union-attr]
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        resident.backward(loss_of(resident, batch(0).to("sim")))
    hook.remove()
    resident.backward(loss_of(resident, batch(0).to("sim")))
    resident.step()


def test_a_graph_outlives_what_it_was_made_by(tmp_path: Path) -> None:
    """The engine is asleep meanwhile, refuses to sleep, or is closed: gradients of the input are right, or refused."""
    model, plain = net(), net()
    data = batch(0)
    truth = data.clone().requires_grad_()
    plain(truth).float().pow(2).mean().backward()
    with updating():
        engine = Engine(model, AdamW(lr=1e-2), **placed("resident", model, tmp_path))
        x = data.to("sim").requires_grad_()
        loss = engine(x).float().pow(2).mean()
        try:
            engine.sleep()
        except StateError as error:
            assert "views" in str(error)
        else:
            engine.wake()
        (found,) = torch.autograd.grad(loss, x, retain_graph=True)
        assert truth.grad is not None
        assert torch.allclose(found.cpu(), truth.grad, atol=1e-6)
        engine.close()
        (found,) = torch.autograd.grad(loss, x)
        assert torch.allclose(found.cpu(), truth.grad, atol=1e-6)


@pytest.mark.parametrize("between", ["nothing", "a forward", "an evaluation", "an evaluation of the module"])
def test_what_does_not_fit_is_refused_when_the_pass_is_over(
    between: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ledger, "TOLERANCE_BYTES", 0)
    model = net()
    options = placed("resident", model, tmp_path)
    options["max_memory"]["device"] = "2MiB"
    small, large = torch.ones(4, WIDTH, device="sim"), torch.ones(2048, WIDTH, device="sim")
    with updating(), Engine(model, AdamW(lr=1e-2), **options) as engine:
        engine.backward(engine(small).sum())
        engine.step()
        losses = [engine(large).sum()]
        if between == "a forward":
            losses.append(engine(small).sum())
        elif between != "nothing":
            with torch.no_grad():
                (engine if between == "an evaluation" else model)(small)
        with pytest.raises(BudgetError, match="a micro-batch took .* as measured but"):
            for loss in losses:
                engine.backward(loss)
        del losses, loss
        engine.backward(engine(small).sum())  # the engine goes on
        engine.step()
        assert engine.stats().peak_bytes["device"] <= 2 * MIB


def test_a_graph_that_nobody_wanted_is_no_pass_of_the_next_one(resident: Engine) -> None:
    """A forward with gradients, and no backward: the pass goes on with the next forward."""
    x = batch(0).to("sim")
    for _ in range(3):
        resident(x)
    resident.backward(loss_of(resident, x))
    resident.step()
    assert resident._parts.activations.is_empty()
