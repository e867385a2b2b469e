"""What the engine promises to a training loop: order of calls, optimizer, state dicts, evaluation, life and death."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import os
import subprocess
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from harness import (
    ACTIVATION_BYTES,
    LINEAR_BYTES,
    WIDTH,
    assert_equal,
    assert_same_tensors,
    batch,
    collect,
    everything,
    everything_on_device,
    guess_nothing,
    host,
    let_go,
    loss_of,
    nvme,
    run,
    tight,
    working_bytes,
)
from harness import plain as plainly
from models import BY_NAME
from torch import nn

import offload
from offload import SGD, AdamW, Engine
from offload.checkpoint.loading import Loader
from offload.memory.devices import resolve_device
from offload.module.handles import GradientHandle
from offload.module.refusals import refuse_batch
from offload.shards.manager import Manager

pytestmark = pytest.mark.usefixtures("single_torch_thread")


class Net(nn.Module):
    """Blocks with dropout and running statistics; six units."""

    def __init__(self, dropout: float = 0.0, norm: type[nn.Module] = nn.BatchNorm1d) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.drop = nn.Dropout(dropout)
        self.norm = norm(WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.drop(torch.tanh(block(x))) + x
        return self.norm(x)


class Nested(nn.Module):
    """Five modules within each other; each keeps its weight in use while it calls the next: five units at once."""

    def __init__(self, depth: int = 5) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(WIDTH, WIDTH) / WIDTH)
        self.inner = Nested(depth - 1) if depth > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = x if self.inner is None else self.inner(torch.tanh(x @ self.weight))
        return inner @ self.weight + x


def net(seed: int = 0, **options: Any) -> Net:
    torch.manual_seed(seed)
    return Net(**options)


def half_net(seed: int = 0) -> Net:
    """Return a net without running statistics, which stay fp32 whatever the dtype of the parameters."""
    return net(seed, norm=nn.LayerNorm)


def step(engine: Engine, number: int) -> torch.Tensor:
    torch.manual_seed(1000 + number)
    loss = loss_of(engine, number)
    engine.backward(loss)
    engine.step()
    engine._manager.check()
    return loss.detach()


def train(engine: Engine, numbers: range) -> list[torch.Tensor]:
    return [step(engine, number) for number in numbers]


def plain_step(model: nn.Module, optimizer: torch.optim.Optimizer, number: int) -> torch.Tensor:
    torch.manual_seed(1000 + number)
    optimizer.zero_grad()
    loss = loss_of(model, number)
    loss.backward()
    optimizer.step()
    return loss.detach()


def assert_close(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


EPS = 1e-3  # large: gradients that are zero but for rounding must not become a step


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    model = net()
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **tight(model, tmp_path)) as engine:
        yield engine


# --- frozen parameters, adapters -------------------------------------------------------------------------------------


def test_frozen_parameters_cost_no_states_and_never_change(tmp_path: Path) -> None:
    model = net()
    for block in model.blocks[:4]:
        block.requires_grad_(False)
    before = copy.deepcopy(model.state_dict())
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        units = engine.plan.request.units
        frozen = sum(slot.numel for unit in units if not unit.trainable for slot in unit.slots)
        assert frozen == 4 * (WIDTH * WIDTH + WIDTH)
        written = engine.stats().links["nvme_write"].bytes
        train(engine, range(2))
        engine.drain()
        # Per step, parameters (4 B) and moments (8 B) of what trains, and nothing else: units are whole pages.
        assert engine.stats().links["nvme_write"].bytes - written == 2 * 12 * sum(u.numel for u in units if u.trainable)
        state = engine.optimizer.state_dict()["state"]
        assert len(state) == sum(1 for p in model.parameters() if p.requires_grad)
        after = engine.state_dict()
    for name, value in before.items():
        same = torch.equal(after[name], value)
        assert same == name.startswith(tuple(f"blocks.{i}." for i in range(4))) or "norm" in name


def test_everything_frozen_is_refused_for_training_and_evaluates(tmp_path: Path) -> None:
    model = net().requires_grad_(False).eval()
    with pytest.raises(offload.ConfigError, match="frozen"):
        Engine(model, AdamW(), **tight(model, tmp_path))
    truth = model(batch(0))
    with Engine(model, **tight(model, tmp_path)) as engine:
        assert torch.equal(engine(batch(0)), truth)
        assert engine.optimizer is None
        with pytest.raises(offload.StateError, match="only evaluates"):
            engine.step()


def test_evaluation_engine_of_a_trainable_model_refuses_backward(tmp_path: Path) -> None:
    model = net()
    with Engine(model, **tight(model, tmp_path)) as engine:
        loss = loss_of(engine, 0)
        with pytest.raises(offload.StateError, match="only evaluates"):
            engine.backward(loss)


def test_evaluation_engine_keeps_no_gradients(tmp_path: Path) -> None:
    """Nobody counts nor moves them. What the refusal names gives those of inputs, as without an engine."""
    model = net().eval()
    x = batch(0).requires_grad_()
    (truth,) = torch.autograd.grad(model(x).sum(), x)
    with Engine(model, **tight(model, tmp_path)) as engine:
        with pytest.raises(offload.StateError, match=r"gradient of \S+: this engine only evaluates"):
            engine(x).sum().backward()
        assert all(parameter.grad is None for parameter in model.parameters())
        assert torch.equal(torch.autograd.grad(engine(x).sum(), x)[0], truth)
        model.requires_grad_(False)
        x.grad = None
        engine(x).sum().backward()
        assert torch.equal(x.grad, truth)
        model.requires_grad_(True)
    model(x).sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_lora_through_peft(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")

    def build() -> nn.Module:
        torch.manual_seed(0)
        config = peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1, init_lora_weights=False)
        return peft.get_peft_model(BY_NAME["llama"].build(), config).train()

    data = [BY_NAME["llama"].batch(number) for number in range(3)]
    truth = run(build(), data, **everything_on_device())
    model = build()
    ours = run(model, data, **nvme(model, tmp_path))
    assert_equal(ours, truth)
    plain = plainly(build())
    torch.manual_seed(1000)
    assert torch.equal(plain(**data[0]).loss, ours.losses[0])
    assert len(ours.states) == sum("lora" in name for name, _ in plain.named_parameters())
    for name, value in plain.state_dict().items():
        assert torch.equal(ours.parameters[name], value) == ("lora" not in name), name
    assert ours.stats.misses + ours.stats.stalls > 0


# --- gradients --------------------------------------------------------------------------------------------------------


def test_plain_backward_equals_engine_backward(tmp_path: Path) -> None:
    states = []
    for plain in (False, True):
        model = net()
        with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
            for number in range(2):
                loss = loss_of(engine, number)
                loss.backward() if plain else engine.backward(loss)
                assert engine.step()
            states.append(engine.state_dict())
    assert_same_tensors(*states)


def test_retain_graph_and_several_losses_add_up(tmp_path: Path) -> None:
    def backward(engine: Engine, kind: str) -> None:
        y = engine(batch(0))
        first, second = y.pow(2).mean(), y.sub(2).abs().mean()
        if kind == "sum":
            engine.backward(first + second)
        elif kind == "two":
            engine.backward(first, retain_graph=True)
            engine.backward(second)
        else:
            engine.backward(first, retain_graph=True)
            engine.backward(first)

    gradients = {}
    for kind in ("sum", "two", "twice"):
        model = net()
        with Engine(model, AdamW(betas=(0.0, 0.9)), **tight(model, tmp_path)) as engine:
            backward(engine, kind)
            engine.step()
            gradients[kind] = [s["exp_avg"] for s in engine.optimizer.state_dict()["state"].values()]
    plain = net()
    plain(batch(0)).pow(2).mean().backward()
    for one, two, twice, parameter in zip(
        gradients["sum"], gradients["two"], gradients["twice"], plain.parameters(), strict=True
    ):
        assert torch.allclose(one, two, rtol=1e-5, atol=1e-7)
        assert torch.equal(twice, 2 * parameter.grad)


def test_gradients_on_inputs(engine: Engine) -> None:
    x, y = batch(0).requires_grad_(), batch(0).requires_grad_()
    plain = net()
    (ours,) = torch.autograd.grad(engine(x).pow(2).sum(), x)
    (theirs,) = torch.autograd.grad(plain(y).pow(2).sum(), y)
    assert torch.equal(ours, theirs)
    with pytest.raises(offload.StateError, match="backward"):
        engine.step()  # no parameter has a gradient
    engine.backward(loss_of(engine, 1))
    assert engine.step()


def test_accumulation_averages(tmp_path: Path) -> None:
    """Two micro-batches count as one batch: exp_avg is (g0 + g1) / 2."""
    model = net()
    with Engine(model, AdamW(betas=(0.0, 0.9)), gradient_accumulation_steps=2, **tight(model, tmp_path)) as engine:
        for number in range(2):
            assert engine.is_gradient_accumulation_boundary() == (number == 1)
            engine.backward(loss_of(engine, number))
            assert engine.step() == (number == 1)
        ours = [s["exp_avg"] for s in engine.optimizer.state_dict()["state"].values()]
        norm = engine.grad_norm
    plain = net()
    for number in range(2):
        loss_of(plain, number).backward()
    for mine, parameter in zip(ours, plain.parameters(), strict=True):
        assert torch.equal(mine, parameter.grad / 2)
    total = torch.cat([p.grad.flatten().double() / 2 for p in plain.parameters()]).norm()
    assert norm == pytest.approx(float(total), rel=1e-12)


def test_clipping_scales_to_the_norm(tmp_path: Path) -> None:
    """With beta1 = 0, exp_avg is g * max_norm / (norm + 1e-6)."""
    model = net()
    with Engine(model, AdamW(betas=(0.0, 0.9)), max_grad_norm=0.25, **tight(model, tmp_path)) as engine:
        step(engine, 0)
        norm = engine.grad_norm
        assert norm is not None and norm > 0.25
        ours = [s["exp_avg"] for s in engine.optimizer.state_dict()["state"].values()]
    plain = net()
    torch.manual_seed(1000)
    loss_of(plain, 0).backward()
    for mine, parameter in zip(ours, plain.parameters(), strict=True):
        assert torch.allclose(mine, parameter.grad * (0.25 / (norm + 1e-6)), rtol=1e-6, atol=0)


def test_the_norm_is_of_all_parameters_with_a_gradient(tmp_path: Path) -> None:
    """Also of those that the optimizer leaves out, as in clip_grad_norm_(model.parameters()); frozen ones have none."""
    plain, model = net(), net()
    for each in (plain, model):
        each.blocks[1].requires_grad_(False)
    optimizer = torch.optim.AdamW(groups(plain)[:1], eps=EPS)
    given = torch.optim.AdamW(groups(model)[:1], eps=EPS)
    with Engine(model, given, max_grad_norm=0.25, **tight(model, tmp_path)) as engine:
        for number in range(3):
            plain.zero_grad()
            loss_of(plain, number).backward()
            every = [p.grad for p in plain.parameters() if p.grad is not None]
            theirs = [p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
            assert len(theirs) < len(every) < len(list(plain.parameters()))
            total = torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
            optimizer.step()
            step(engine, number)
            assert engine.grad_norm == pytest.approx(float(total), rel=1e-5) and float(total) > 0.25
        assert_close(engine.state_dict(), plain.state_dict())


def test_zero_grad_forgets(engine: Engine) -> None:
    before = engine.state_dict()
    loss_of(engine, 0).backward()
    engine.zero_grad()
    with pytest.raises(offload.StateError, match="backward"):
        engine.step()
    loss_of(engine, 0).backward()
    engine.optimizer.zero_grad()
    with pytest.raises(offload.StateError, match="backward"):
        engine.step()
    after = engine.state_dict()
    for name in before:
        assert torch.equal(before[name], after[name]) or "running" in name or "tracked" in name
    step(engine, 1)


@pytest.mark.parametrize("face", ["engine", "optimizer"])
def test_zeros_that_nobody_gets_are_told(face: str, engine: Engine) -> None:
    zeroing: Any = engine if face == "engine" else engine.optimizer
    loss_of(engine, 0).backward()
    with pytest.warns(UserWarning, match="zero_grad: set_to_none=False would leave zeros, but gradients are") as told:
        zeroing.zero_grad(set_to_none=False)
    assert told[0].filename == __file__
    assert all(parameter.grad is None for parameter in engine.module.parameters())
    loss_of(engine, 0).backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        zeroing.zero_grad(set_to_none=True)
    assert all(parameter.grad is None for parameter in engine.module.parameters())


def test_zero_grad_restarts_the_accumulation(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), gradient_accumulation_steps=2, **tight(model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        assert not engine.step()
        engine.zero_grad()
        assert [step(engine, n) is not None and engine.stats().step for n in (1, 2)] == [0, 1]


def test_gradients_leave_no_memory_on_the_parameters(engine: Engine) -> None:
    engine.backward(loss_of(engine, 0))
    for parameter in engine.module.parameters():
        assert isinstance(parameter.grad, GradientHandle)
        assert (parameter.grad.shape, parameter.grad.dtype) == (parameter.shape, parameter.dtype)
    engine.step()
    assert all(parameter.grad is None for parameter in engine.module.parameters())


# --- optimizer --------------------------------------------------------------------------------------------------------


def groups(model: Net) -> list[dict[str, Any]]:
    return [
        {"params": [p for n, p in model.named_parameters() if n.endswith("weight")], "weight_decay": 0.3, "lr": 2e-2},
        {"params": [p for n, p in model.named_parameters() if n.endswith("bias")], "weight_decay": 0.0},
    ]


@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.Adam])
def test_groups_and_scheduler_of_a_torch_optimizer(kind: type[torch.optim.Optimizer], tmp_path: Path) -> None:
    """The scheduler was made for the optimizer that the engine took over."""
    plain, model = net(), net()
    optimizer = kind(groups(plain), lr=1e-2, betas=(0.8, 0.95), eps=EPS)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)
    given = kind(groups(model), lr=1e-2, betas=(0.8, 0.95), eps=EPS)
    schedulers = [torch.optim.lr_scheduler.CosineAnnealingLR(given, T_max=4)]
    with Engine(model, given, **tight(model, tmp_path)) as engine:
        for number in range(4):
            assert torch.allclose(step(engine, number), plain_step(plain, optimizer, number), rtol=1e-5)
            for each in (scheduler, *schedulers):
                each.step()
            rates = [group["lr"] for group in engine.optimizer.param_groups]
            assert rates == [group["lr"] for group in optimizer.param_groups]
        assert_close(engine.state_dict(), plain.state_dict())


def test_scheduler_and_hooks_on_the_engines_optimizer(engine: Engine) -> None:
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    pairs = [
        torch.optim.lr_scheduler.LambdaLR(each, lambda epoch: 0.5**epoch) for each in (engine.optimizer, optimizer)
    ]
    seen: list[str] = []
    engine.optimizer.register_step_pre_hook(lambda *args: seen.append("before"))
    engine.optimizer.register_step_post_hook(lambda *args: seen.append("after"))
    for number in range(3):
        assert torch.allclose(step(engine, number), plain_step(plain, optimizer, number), rtol=1e-5)
        for scheduler in pairs:
            scheduler.step()
    assert seen == ["before", "after"] * 3
    assert_close(engine.state_dict(), plain.state_dict())


def test_optimizer_step_with_closure(engine: Engine) -> None:
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)

    def closure() -> torch.Tensor:
        engine.optimizer.zero_grad()
        loss = loss_of(engine, 0)
        loss.backward()
        return loss

    loss = engine.optimizer.step(closure)
    assert loss is not None and torch.equal(loss.detach(), plain_step(plain, optimizer, 0))
    assert_close(engine.state_dict(), plain.state_dict())


def test_optimizer_is_a_torch_optimizer(engine: Engine) -> None:
    assert isinstance(engine.optimizer, torch.optim.Optimizer)
    given = {id(p) for group in engine.optimizer.param_groups for p in group["params"]}
    assert given == {id(p) for p in engine.module.parameters()}


def test_a_torch_optimizer_that_was_taken_over_is_no_trap(tmp_path: Path) -> None:
    """Code that still holds it gets the engine's states, drops the engine's gradients, and cannot load past it."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    with Engine(model, optimizer, **tight(model, tmp_path)) as engine:
        step(engine, 0)
        saved = optimizer.state_dict()
        assert engine.optimizer is not None and saved["state"].keys() == set(range(len(list(model.parameters()))))
        for position, state in engine.optimizer.state_dict()["state"].items():
            assert_same_tensors(saved["state"][position], state)
        with pytest.raises(offload.StateError, match=r"engine\.optimizer\.load_state_dict"):
            torch.optim.AdamW.load_state_dict(optimizer, saved)
        assert optimizer.param_groups is engine.optimizer.param_groups
        before = engine.state_dict()
        engine.backward(loss_of(engine, 1))
        optimizer.zero_grad()
        with pytest.raises(offload.StateError, match="none has arrived"):
            engine.step()
        assert_same_tensors(engine.state_dict(), before)
    with Engine(model, optimizer, **everything_on_device()) as again:  # and taken over once more
        step(again, 0)
        assert optimizer.state_dict()["state"].keys() == saved["state"].keys()
        with pytest.raises(offload.StateError, match="it is closed"):
            engine.optimizer.step()
    with pytest.raises(offload.StateError, match="it is closed"):
        optimizer.step()
    del engine, again
    collect()
    for call in (
        optimizer.step,
        optimizer.state_dict,
        lambda: optimizer.load_state_dict(saved),
        lambda: torch.optim.AdamW.step(optimizer),
    ):
        with pytest.raises(offload.StateError, match="an engine has taken this optimizer over, and is gone"):
            call()


def test_state_of_a_torch_optimizer_is_taken_over(tmp_path: Path) -> None:
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    for number in range(2):
        plain_step(plain, optimizer, number)
    model = copy.deepcopy(plain)
    given = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=EPS)
    given.load_state_dict(optimizer.state_dict())
    with Engine(model, given, **tight(model, tmp_path)) as engine:
        packed = engine.optimizer.state_dict()
        for position, state in optimizer.state_dict()["state"].items():
            for name, value in state.items():
                assert torch.equal(packed["state"][position][name], value)
        for number in range(2, 4):
            assert torch.allclose(step(engine, number), plain_step(plain, optimizer, number), rtol=1e-5)
        assert_close(engine.state_dict(), plain.state_dict())


@pytest.mark.parametrize("dtype", [None, "bfloat16", "float16"])
def test_optimizer_state_dict_round_trip(dtype: str | None, tmp_path: Path) -> None:
    """Save after two steps, load into another engine elsewhere, go on: the same bits as without the pause."""
    options = {"dtype": dtype, "initial_loss_scale": 8.0} if dtype else {}

    def make(placement: dict[str, Any]) -> Engine:
        return Engine(half_net(), AdamW(lr=1e-2), **{**placement, **options})

    cast = (lambda e, n: e(batch(n).to(getattr(torch, dtype))).float().pow(2).mean()) if dtype else loss_of

    def go(engine: Engine, numbers: range) -> None:
        for number in numbers:
            engine.backward(cast(engine, number))
            assert engine.step()

    with make(everything_on_device()) as whole:
        go(whole, range(4))
        truth, states = whole.state_dict(), whole.optimizer.state_dict()
    with make(tight(half_net(), tmp_path, **options)) as first:
        go(first, range(2))
        saved, packed = first.state_dict(), first.optimizer.state_dict()
    path = tmp_path / "saved.pt"
    torch.save({"model": saved, "optimizer": packed}, path)
    loaded = torch.load(path, weights_only=True)
    path.unlink()
    with make(tight(half_net(), tmp_path, **options)) as second:
        second.load_state_dict(loaded["model"])
        second.optimizer.load_state_dict(loaded["optimizer"])
        go(second, range(2, 4))
        assert_same_tensors(second.state_dict(), truth)
        again = second.optimizer.state_dict()
    assert again["state"].keys() == states["state"].keys()
    for position, state in states["state"].items():
        assert_same_tensors(again["state"][position], state)


def test_optimizer_state_loads_into_torch_and_back(engine: Engine, tmp_path: Path) -> None:
    train(engine, range(2))
    plain = net()
    plain.load_state_dict(engine.state_dict())
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    optimizer.load_state_dict(engine.optimizer.state_dict())
    for number in range(2, 4):
        assert torch.allclose(step(engine, number), plain_step(plain, optimizer, number), rtol=1e-5)
    assert_close(engine.state_dict(), plain.state_dict())
    model = copy.deepcopy(plain)
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **tight(model, tmp_path)) as other:
        other.optimizer.load_state_dict(optimizer.state_dict())
        for number in range(4, 6):
            assert torch.allclose(step(other, number), plain_step(plain, optimizer, number), rtol=1e-5)
        assert_close(other.state_dict(), plain.state_dict())


@pytest.mark.parametrize("way", ["taken over", "loaded"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_master_that_went_through_torch_does_not_come_back(dtype: str, way: str, tmp_path: Path) -> None:
    """torch's optimizers keep `master`, cast to the parameter's dtype, and leave it behind: the parameters count."""
    options = {"dtype": dtype, "initial_loss_scale": 8.0}
    kind = getattr(torch, dtype)
    with Engine(half_net(), AdamW(lr=1e-2, eps=EPS), **tight(half_net(), tmp_path, **options)) as engine:
        engine.backward(engine(batch(0).to(kind)).float().pow(2).mean())
        engine.step()
        packed, saved = engine.optimizer.state_dict(), engine.state_dict()
    plain = half_net().to(kind)
    plain.load_state_dict(saved)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    optimizer.load_state_dict(packed)
    assert optimizer.state[plain.norm.weight]["master"].dtype is kind
    plain(batch(1).to(kind)).float().pow(2).mean().backward()
    optimizer.step()
    plain.zero_grad()
    wanted = {name: value.clone() for name, value in plain.state_dict().items()}
    assert any(not torch.equal(wanted[name], saved[name]) for name in wanted)
    states = optimizer.state_dict()
    if way == "taken over":
        engine = Engine(plain, optimizer, **tight(plain, tmp_path, **options))
    else:
        engine = Engine(plain, AdamW(lr=1e-2, eps=EPS), **tight(plain, tmp_path, **options))
        engine.optimizer.load_state_dict(states)
    with engine:
        assert_same_tensors(engine.state_dict(), wanted)
        for position, name in enumerate(wanted):
            state = engine.optimizer.state_dict()["state"][position]
            assert state["step"] == 2 and torch.equal(state["master"], wanted[name].float())
            assert torch.equal(state["exp_avg"], states["state"][position]["exp_avg"].float())


# --- reading and writing tensors -------------------------------------------------------------------------------------


def test_parameters_keep_name_shape_dtype_and_identity(tmp_path: Path) -> None:
    model = net()
    before = {name: (p, p.shape, p.dtype, p.requires_grad, p.stride()) for name, p in model.named_parameters()}
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        train(engine, range(2))
        for name, parameter in model.named_parameters():
            same, shape, dtype, requires_grad, _ = before[name]
            assert parameter is same and parameter.shape == shape and parameter.dtype == dtype
            assert parameter.requires_grad == requires_grad and parameter.is_leaf
            assert isinstance(parameter, nn.Parameter) and parameter.device == engine.device
    for name, parameter in model.named_parameters():
        assert parameter is before[name][0] and parameter.stride() == before[name][4]


def test_state_dict_is_the_modules(engine: Engine) -> None:
    before = net().state_dict()
    assert_same_tensors(engine.state_dict(), before)
    assert_same_tensors(dict(engine.module.state_dict()), before)
    assert list(engine.module.state_dict()) == list(before)
    part = engine.module.blocks[3].state_dict(prefix="x.")
    assert_same_tensors(part, {"x.weight": before["blocks.3.weight"], "x.bias": before["blocks.3.bias"]})
    taken = engine.state_dict()
    kept = {name: value.clone() for name, value in taken.items()}
    for name, value in taken.items():
        value.zero_()
        assert torch.equal(engine.state_dict()[name], kept[name]) or "norm.r" in name or "tracked" in name


def test_load_state_dict(engine: Engine, tmp_path: Path) -> None:
    train(engine, range(1))
    other = net(seed=5)
    assert engine.load_state_dict(other.state_dict()) == ([], [])
    assert_same_tensors(engine.state_dict(), dict(other.state_dict()))
    engine.eval()
    other.eval()
    assert torch.equal(engine(batch(3)), other(batch(3)))
    part = {"blocks.2.bias": torch.ones(WIDTH)}
    with pytest.raises(offload.ConfigError, match="blocks.0.bias"):
        engine.load_state_dict(part)
    found = engine.load_state_dict({**part, "head.weight": torch.ones(1)}, strict=False)
    theirs = other.load_state_dict({**part, "head.weight": torch.ones(1)}, strict=False)
    assert type(found) is type(theirs) and found.unexpected_keys == theirs.unexpected_keys == ["head.weight"]
    ours = [name for name in found.missing_keys if "tracked" not in name]  # which old versions of torch had not
    assert sorted(ours) == sorted(theirs.missing_keys) and "blocks.0.weight" in ours
    assert torch.equal(engine.state_dict()["blocks.2.bias"], torch.ones(WIDTH))
    with pytest.raises(offload.ConfigError, match="blocks.1.weight"):
        engine.load_state_dict({"blocks.1.weight": torch.ones(3, 3)}, strict=False)
    with pytest.raises(offload.ConfigError, match="shape"):
        engine.load_state_dict({"blocks.1.weight": torch.ones(3, 3), "blocks.1.bias": torch.zeros(WIDTH)}, strict=False)
    assert torch.equal(engine.state_dict()["blocks.1.bias"], other.state_dict()["blocks.1.bias"])
    engine.module.load_state_dict(net(seed=6).state_dict())
    assert_same_tensors(engine.state_dict(), dict(net(seed=6).state_dict()))
    engine.train()
    step(engine, 1)


@pytest.mark.parametrize("way", ["load_state_dict", "data"])
def test_a_value_with_another_sign_than_its_bytes(way: str) -> None:
    """As the imaginary part of a conjugate."""
    model = nn.Linear(1, 1, bias=False)
    value = torch.ones(1, 1)
    other = torch.complex(value, value).conj().imag
    assert other.is_neg() and other.is_contiguous()
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        if way == "data":
            model.weight.data = other
        else:
            engine.load_state_dict({"weight": other})
        assert torch.equal(engine.state_dict()["weight"], -value)


def test_loading_fp32_values_into_bf16_keeps_them_as_masters(tmp_path: Path) -> None:
    model = half_net()
    with Engine(model, AdamW(lr=0.0), **tight(model, tmp_path, dtype="bfloat16")) as engine:
        wanted = half_net(7).state_dict()
        engine.load_state_dict(wanted)
        engine.backward(engine(batch(0).bfloat16()).float().pow(2).mean())
        engine.step()  # lr = 0: states come to exist, nothing moves
        for position, (name, _) in enumerate(model.named_parameters()):
            assert torch.equal(engine.optimizer.state_dict()["state"][position]["master"], wanted[name]), name


def test_gather_reads_and_modifies(engine: Engine) -> None:
    truth = net().state_dict()
    block = engine.module.blocks[4]
    with engine.gather(block.weight):
        assert torch.equal(block.weight, truth["blocks.4.weight"])
    with engine.gather([block.weight, block.bias], modify=True), torch.no_grad():
        block.weight.mul_(2)
        block.bias.fill_(3)
    after = engine.state_dict()
    assert torch.equal(after["blocks.4.weight"], 2 * truth["blocks.4.weight"])
    assert torch.equal(after["blocks.4.bias"], torch.full((WIDTH,), 3.0))
    with (
        pytest.raises(offload.StateError, match=r"blocks\.4\.bias.*modify=True"),
        engine.gather(block),
        torch.no_grad(),
    ):
        block.bias.fill_(9)
    assert torch.equal(engine.state_dict()["blocks.4.bias"], torch.full((WIDTH,), 3.0))
    with pytest.raises(KeyError), engine.gather(block, modify=True), torch.no_grad():
        block.bias.fill_(7)
        raise KeyError
    assert torch.equal(engine.state_dict()["blocks.4.bias"], torch.full((WIDTH,), 3.0))
    with pytest.raises(offload.BudgetError, match="device budget"), engine.gather(engine.module):
        pass
    with pytest.raises(offload.StateError, match="not one of this engine"), engine.gather(nn.Parameter(torch.ones(2))):
        pass
    plain = net()
    plain.load_state_dict(after)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    assert torch.equal(step(engine, 0), plain_step(plain, optimizer, 0))
    assert_close(engine.state_dict(), plain.state_dict())


def replace_data(weight: nn.Parameter) -> None:
    weight.data = 2 * weight.data


@pytest.mark.parametrize(
    "double",
    [
        lambda weight: weight.data.mul_(2),
        pytest.param(lambda weight: weight.detach().numpy().__imul__(2), marks=pytest.mark.cpu("numpy")),
        replace_data,
    ],
    ids=["data", "numpy", "replaced"],
)
def test_gather_sees_changes_that_torch_does_not_count(
    engine: Engine, double: Callable[[nn.Parameter], object]
) -> None:
    name, block = "blocks.4.weight", engine.module.blocks[4]
    step(engine, 0)
    before = engine.state_dict()
    with engine.gather(block, modify=True):
        double(block.weight)
    after = engine.state_dict()
    assert torch.equal(after[name], 2 * before[name])
    assert_same_tensors({**after, name: before[name]}, before)  # the others are as they were
    plain = net()
    plain.load_state_dict(after)
    assert torch.equal(loss_of(engine, 1), loss_of(plain, 1))
    with pytest.raises(KeyError), engine.gather(block, modify=True):
        double(block.weight)
        raise KeyError
    assert_same_tensors(engine.state_dict(), after)
    step(engine, 2)


@pytest.mark.parametrize("options", [lambda model: everything_on_device(), host], ids=["device", "host"])
def test_gather_keeps_such_changes_in_every_master(options: Callable[[nn.Module], dict[str, Any]]) -> None:
    model = net().to(torch.bfloat16)
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **options(model)) as engine:
        engine.backward(engine(torch.ones(2, WIDTH, dtype=torch.bfloat16)).float().square().sum())
        engine.step()
        with engine.gather(model.blocks[4], modify=True):
            model.blocks[4].weight.data.mul_(2)
        number = [name for name, _ in model.named_parameters()].index("blocks.4.weight")
        master = engine.optimizer.state_dict()["state"][number]["master"]
        assert torch.equal(master, engine.state_dict()["blocks.4.weight"].float())


PLACES: dict[str, Callable[..., dict[str, Any]]] = {
    "device": lambda model, path: everything_on_device(),
    "host": lambda model, path: host(model, unit_bytes=LINEAR_BYTES),
    "nvme": tight,
}


@pytest.mark.few(12)
@pytest.mark.parametrize("raises", [False, True])
@pytest.mark.parametrize("modify", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES)
def test_gather_refuses_changes_of_what_was_not_gathered(
    place: str, dtype: torch.dtype, modify: bool, raises: bool, tmp_path: Path
) -> None:
    """The change is refused by name and undone; what is changed with it, and may be, is kept."""
    model = half_net().to(dtype)
    block = model.blocks[4]
    options = {"initial_loss_scale": 8.0, **PLACES[place](model, tmp_path)}
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **options) as engine:
        x = batch(0).to(dtype)
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()
        before = everything(engine)
        refused = pytest.raises(offload.StateError, match=r"parameter blocks\.4\.bias was changed but not gathered")
        with pytest.raises(KeyError) if raises else refused, engine.gather(block.weight, modify=modify):
            with torch.no_grad():
                block.bias.fill_(5)
                if modify:
                    block.weight.fill_(2)
            if raises:
                raise KeyError
        if place == "device" and not modify:  # there is no other copy
            with pytest.raises(offload.StateError, match=r"parameter blocks\.4\.bias: was changed in place"):
                engine.backward(engine(x).float().pow(2).mean())
                engine.step()
            return
        after = everything(engine)
        if modify and not raises:
            number = [name for name, _ in model.named_parameters()].index("blocks.4.weight")
            for name in {"blocks.4.weight", f"{number}.master"} & before.keys():
                assert torch.equal(after[name], torch.full_like(before[name], 2))
                before[name] = after[name]
        assert_same_tensors(after, before)
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()
        engine._manager.check()


@pytest.mark.parametrize("place", PLACES)
def test_a_change_from_before_is_not_accepted_by_gather(place: str, tmp_path: Path) -> None:
    """Of a neighbour it is refused; of the parameter itself it is kept with `modify`, and else left to be refused."""
    model = half_net().to(torch.bfloat16)
    block = model.blocks[0]
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **PLACES[place](model, tmp_path)) as engine:
        x = batch(0).bfloat16()
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()
        engine.drain()  # else an update may want the block's room, and refuse the change when the block ends

        def write(module: nn.Module, *_: Any) -> None:
            module.bias.fill_(5)

        with torch.no_grad(), block.register_forward_pre_hook(write):
            block(x)  # inside a forward, a parameter is an ordinary one
        refused = pytest.raises(offload.StateError, match=r"parameter blocks\.0\.bias: was changed in place or rebound")
        with refused, engine.gather(block.weight):
            pass
        with engine.gather(block):
            assert block.bias[0] == 5
        with pytest.raises(KeyError), engine.gather(block, modify=True):
            raise KeyError
        with refused:
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
        engine.zero_grad()
        with engine.gather(block.bias, modify=True):
            pass
        number = [name for name, _ in model.named_parameters()].index("blocks.0.bias")
        found = everything(engine)
        assert torch.equal(found["blocks.0.bias"], torch.full((WIDTH,), 5.0, dtype=torch.bfloat16))
        assert torch.equal(found[f"{number}.master"], torch.full((WIDTH,), 5.0))
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()


@pytest.mark.parametrize("place", PLACES)
def test_gathers_within_each_other(place: str, tmp_path: Path) -> None:
    """Each block sees its own parameters changed, and no other block's as strange."""
    model = net()
    first, second = model.blocks[0], model.blocks[1]
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        before = engine.state_dict()
        with engine.gather(first.weight, modify=True), torch.no_grad():
            first.weight.fill_(2)
            with engine.gather(first.bias), engine.gather(second, modify=True):
                assert torch.equal(first.bias, before["blocks.0.bias"])
                first.weight[0] = 3
                second.bias.fill_(4)
        before["blocks.0.weight"].fill_(2)[0] = 3
        before["blocks.1.bias"].fill_(4)
        assert_same_tensors(engine.state_dict(), before)
        step(engine, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("place", PLACES)
def test_gather_keeps_masters_of_elements_that_do_not_change(place: str, dtype: str, tmp_path: Path) -> None:
    """As loading the same values does; also of what is written with the value that it has."""
    model = half_net().to(getattr(torch, dtype))
    options = {"initial_loss_scale": 8.0, **PLACES[place](model, tmp_path)}
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **options) as engine:
        engine.backward(engine(batch(0).to(model.norm.weight.dtype)).float().pow(2).mean())
        assert engine.step()
        before, block = everything(engine), model.blocks[4]
        names = [name for name, _ in model.named_parameters()]
        weight, bias = (f"{names.index(f'blocks.4.{name}')}.master" for name in ("weight", "bias"))
        assert not torch.equal(before[weight][1:], before["blocks.4.weight"][1:].float())
        with engine.gather(block, modify=True), torch.no_grad():
            block.weight[0].zero_()
            block.weight.data[2, 3] = 7
            block.bias.mul_(1)
        for name in ("blocks.4.weight", weight):
            before[name][0] = 0
            before[name][2, 3] = 7
        assert not torch.equal(before[bias], before["blocks.4.bias"].float())
        assert_same_tensors(everything(engine), before)


def test_gather_refuses_a_parameter_that_became_another(engine: Engine) -> None:
    block = engine.module.blocks[4]
    before = engine.state_dict()
    for other in (torch.ones(3), block.weight.detach().double()):
        with (
            pytest.raises(offload.StateError, match=r"blocks\.4\.bias was replaced.*another shape, dtype"),
            engine.gather(block, modify=True),
        ):
            block.bias.data = other
    assert_same_tensors(engine.state_dict(), before)
    with pytest.raises(offload.StateError, match=r"blocks\.4\.bias was changed; pass modify"), engine.gather(block):
        block.bias.data = torch.ones(WIDTH)
    step(engine, 0)


def test_a_state_dict_made_while_parameters_are_watched(engine: Engine, tmp_path: Path) -> None:
    """In gather and in hooks of a forward or backward: torch looks at each parameter, and nothing is fetched for it."""
    truth, block = dict(net().named_parameters()), engine.module.blocks[4]
    made: list[dict[str, torch.Tensor]] = []

    def make(*_: object) -> None:
        made.extend((engine.state_dict(), dict(engine.module.state_dict())))
        made.append({**made[-1], **block.state_dict(prefix="blocks.4.")})

    with engine.gather(block):
        make()
    block.register_forward_pre_hook(make)
    block.register_full_backward_hook(make)
    step(engine, 0)
    assert len(made) == 9
    for state in made:
        assert_same_tensors({name: state[name] for name in truth}, truth)


def test_a_loss_on_gathered_parameters(engine: Engine) -> None:
    """A penalty may be computed outside any forward, in a block of gather or not."""
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    weight = engine.module.blocks[2].weight
    for gathered in (True, False):
        with engine.gather(weight) if gathered else contextlib.nullcontext():
            loss = loss_of(engine, 0) + weight.pow(2).sum()
        engine.backward(loss)
        assert engine.step()
        optimizer.zero_grad()
        (loss_of(plain, 0) + plain.blocks[2].weight.pow(2).sum()).backward()
        optimizer.step()
        assert_close(engine.state_dict(), plain.state_dict())


def test_a_penalty_on_all_weights_needs_no_room_for_them_all(engine: Engine) -> None:
    """What autograd saves of each is a handle, so that the unit may leave before backward."""
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    for number in range(2):
        penalty = sum(p.pow(2).sum() for p in engine.module.parameters())
        engine.backward(loss_of(engine, number) + 0.1 * penalty)
        engine.step()
        optimizer.zero_grad()
        (loss_of(plain, number) + 0.1 * sum(p.pow(2).sum() for p in plain.parameters())).backward()
        optimizer.step()
    assert_close(engine.state_dict(), plain.state_dict())


def test_save_pretrained_round_trip(tmp_path: Path) -> None:
    model = BY_NAME["gpt2"].build()
    swap, target = tmp_path / "swap", tmp_path / "saved"
    swap.mkdir()
    with Engine(model, AdamW(), **nvme(model, swap)) as engine:
        engine.backward(engine(**BY_NAME["gpt2"].batch(0)).loss)
        engine.step()
        engine.save_pretrained(target)
        truth = engine.state_dict()
    loaded = hf.GPT2LMHeadModel.from_pretrained(target)
    assert_same_tensors(dict(loaded.state_dict()), truth)
    assert loaded.lm_head.weight is loaded.transformer.wte.weight
    with Engine(net(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(offload.StateError, match="save_pretrained"):
            engine.save_pretrained(target)


# --- evaluation, generation ------------------------------------------------------------------------------------------


def test_evaluation_between_training_steps_changes_nothing(tmp_path: Path) -> None:
    def go(evaluate: bool) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
        model = net(dropout=0.2)
        losses = []
        with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
            for number in range(3):
                torch.manual_seed(1000 + number)
                loss = loss_of(engine, number)
                if evaluate:
                    state = torch.get_rng_state()
                    engine.eval()
                    assert not engine.training and not model.blocks[0].training
                    with torch.no_grad():
                        one = engine(batch(77))
                    with torch.inference_mode():
                        assert torch.equal(engine(batch(77)), one)
                    assert torch.equal(engine(batch(77)), one)
                    engine.train()
                    torch.set_rng_state(state)
                engine.backward(loss)
                engine.step()
                losses.append(loss.detach())
            return losses, engine.state_dict()

    quiet, busy = go(False), go(True)
    assert all(torch.equal(a, b) for a, b in zip(quiet[0], busy[0], strict=True))
    assert_same_tensors(busy[1], quiet[1])


def test_evaluation_equals_the_plain_model(engine: Engine) -> None:
    plain = net().eval()
    engine.eval()
    for context in (torch.enable_grad, torch.no_grad, torch.inference_mode):
        with context():
            assert torch.equal(engine(batch(1)), plain(batch(1)))
            assert torch.equal(engine.module(batch(2)), plain(batch(2)))


def test_batch_norm_statistics_are_the_plain_models(engine: Engine) -> None:
    plain = net()
    for number in range(3):
        loss_of(engine, number)
        loss_of(plain, number)
    ours, theirs = engine.state_dict(), plain.state_dict()
    for name in ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked"):
        assert torch.equal(ours[name], theirs[name])
    with pytest.raises(offload.ConfigError, match=r"norm\.running_mean: expected a tensor .* NoneType"):
        engine.load_state_dict({**ours, "norm.running_mean": None})
    assert_same_tensors(engine.state_dict(), ours)


@pytest.mark.parametrize("name", ["gpt2", "t5", "llama"])
def test_generate(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = BY_NAME[name].build().eval()
    model = copy.deepcopy(plain)
    ids = BY_NAME[name].batch(0)["input_ids"]
    wanted = {"max_new_tokens": 6, "min_new_tokens": 6, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    truth = plain.generate(ids, **wanted)
    with Engine(model, AdamW(), **nvme(model, tmp_path)) as engine:
        assert torch.equal(engine.module.generate(ids, **wanted), truth)
        engine.backward(engine.train()(**BY_NAME[name].batch(0)).loss)
        assert engine.step()
        engine.eval()
        assert engine.generate(ids, **wanted, num_beams=2).shape[0] == ids.shape[0]
        assert engine.stats().misses + engine.stats().stalls > 0


def test_generate_is_the_modules(tmp_path: Path) -> None:
    plain = BY_NAME["gpt2"].build().eval()
    ids = BY_NAME["gpt2"].batch(0)["input_ids"]
    wanted = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0}
    with Engine(copy.deepcopy(plain), **everything_on_device()) as engine:
        assert torch.equal(engine.generate(ids, **wanted), plain.generate(ids, **wanted))
    with pytest.raises(offload.StateError, match="closed"):
        engine.generate(ids)
    with Engine(net(), **everything_on_device()) as engine:
        with pytest.raises(offload.StateError, match="generate: expected a module that has it but got"):
            engine.generate(ids)


def test_an_engine_says_what_it_is() -> None:
    model = net()
    count = sum(parameter.numel() for parameter in model.parameters())
    engine = Engine(model, AdamW(), **everything_on_device())
    what = f"<offload.Engine of {type(model).__name__}: {len(engine.plan.homes)} units, {count:,} trainable parameters"
    assert repr(engine) == f"{what}, on {engine.device}>"
    engine.close()
    assert repr(engine) == f"{what}, closed>"


def test_a_plan_as_json(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **nvme(model, tmp_path)) as engine:
        plan = engine.plan
    found = json.loads(json.dumps(plan.to_dict()))
    assert [unit["name"] for unit in found["units"]] == [unit.name for unit in plan.request.units]
    assert {unit["home"]["states"] for unit in found["units"] if unit["trainable"]} == {"nvme"}
    for tier, size in plan.arena_bytes.items():
        row = found["bytes"][tier.value]
        assert row["total"] == size and row["budget"] == plan.request.budgets[tier]
        assert row["total"] == row["parameters"] + row["gradients"] + row["states"] + row["buffers"]
    assert found["step_bytes"] == dict(plan.step_bytes) and "\n".join(found["notes"]) in str(plan)


@pytest.mark.cpu("its generator")
def test_dropout_uses_the_plain_models_random_numbers(tmp_path: Path) -> None:
    plain, model = net(dropout=0.3), net(dropout=0.3)
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        torch.manual_seed(3)
        ours = engine(batch(0))
        rest = torch.rand(4)
    torch.manual_seed(3)
    assert torch.equal(ours, plain(batch(0)))
    assert torch.equal(rest, torch.rand(4))


# --- several engines --------------------------------------------------------------------------------------------------


def test_several_engines_at_once(tmp_path: Path) -> None:
    """A teacher and two students, interleaved, give what each gives alone."""

    def student(seed: int) -> Engine:
        model = net(seed)
        return Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))

    alone = []
    for seed in (1, 2):
        with student(seed) as engine:
            alone.append((train(engine, range(3)), engine.state_dict()))
    teacher_model = net(9).eval()
    truth = teacher_model(batch(5))
    with Engine(teacher_model, **tight(teacher_model, tmp_path)) as teacher, student(1) as one, student(2) as two:
        losses: dict[int, list[torch.Tensor]] = {0: [], 1: []}
        for number in range(3):
            pending = []
            for engine in (one, two):
                torch.manual_seed(1000 + number)
                pending.append(loss_of(engine, number))
                with torch.no_grad():
                    assert torch.equal(teacher(batch(5)), truth)
            for index, (engine, loss) in enumerate(zip((one, two), pending, strict=True)):
                engine.backward(loss)
                engine.step()
                losses[index].append(loss.detach())
        for index, engine in enumerate((one, two)):
            assert all(torch.equal(a, b) for a, b in zip(losses[index], alone[index][0], strict=True))
            assert_same_tensors(engine.state_dict(), alone[index][1])


def test_one_loss_through_two_engines(tmp_path: Path) -> None:
    """Distillation with gradients into both: the output of one is the input of the other."""
    first, second = net(1), net(2)
    plain = nn.Sequential(net(1), net(2))
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, eps=EPS)
    with (
        Engine(first, AdamW(lr=1e-2, eps=EPS), **tight(first, tmp_path)) as one,
        Engine(second, AdamW(lr=1e-2, eps=EPS), **tight(second, tmp_path)) as two,
    ):
        for number in range(2):
            loss = two(one(batch(number))).sub(1).pow(4).mean()
            loss.backward()
            assert one.step() and two.step()
            assert torch.allclose(loss.detach(), plain_step(plain, optimizer, number), rtol=1e-5)
        assert_close(one.state_dict(), dict(plain[0].state_dict()))
        assert_close(two.state_dict(), dict(plain[1].state_dict()))


# --- 16 bits ----------------------------------------------------------------------------------------------------------


def half_step(engine: Engine, number: int, factor: float = 1.0) -> bool:
    x = batch(number).to(next(engine.module.parameters()).dtype)
    engine.backward(engine(x).float().pow(2).mean() * factor)
    return engine.step()


def test_float16_overflow_skips_and_loses_nothing(tmp_path: Path) -> None:
    """With hysteresis 2, the second overflow in a row halves the scale; the other steps go on as if it had not been."""
    options = {"dtype": "float16", "loss_scale_window": 2, "loss_scale_hysteresis": 2, "initial_loss_scale": 64.0}
    model = half_net()
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **tight(model, tmp_path, **options)) as engine:
        assert half_step(engine, 0) and engine.loss_scale == 64.0
        before, states = engine.state_dict(), engine.optimizer.state_dict()["state"]
        assert not half_step(engine, 1, factor=1e7)
        assert engine.loss_scale == 64.0, "the first overflow is forgiven"
        assert not half_step(engine, 2, factor=1e7)
        assert engine.loss_scale == 32.0
        after = engine.state_dict()
        for name in before:
            assert torch.equal(before[name], after[name])
        for position, state in engine.optimizer.state_dict()["state"].items():
            assert_same_tensors(state, states[position])
        assert engine.stats().skipped_steps == 2 and engine.stats().step == 1
        assert half_step(engine, 3) and engine.loss_scale == 32.0
        assert half_step(engine, 4) and engine.loss_scale == 64.0, "two good steps in a row double it"
        ours = list(engine.optimizer.state_dict()["state"].values())
        assert [float(s["step"]) for s in ours] == [3.0] * len(ours)
    model = half_net()
    with Engine(model, AdamW(lr=1e-2, eps=EPS), **tight(model, tmp_path, **options)) as engine:
        for number in (0, 3, 4):
            assert half_step(engine, number)
        for mine, other in zip(ours, engine.optimizer.state_dict()["state"].values(), strict=True):
            # the scale is a power of two: what differs is only what underflows
            assert torch.allclose(mine["master"], other["master"], rtol=1e-4, atol=1e-6)


def test_float16_refuses_an_unscaled_backward(tmp_path: Path) -> None:
    model = half_net()
    with Engine(model, AdamW(), **tight(model, tmp_path, dtype="float16")) as engine:
        loss = engine(batch(0).half()).float().pow(2).mean()
        with pytest.raises(offload.StateError, match=r"engine\.backward"):
            loss.backward()
        assert half_step(engine, 0)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype_keeps_fp32_masters(dtype: str, tmp_path: Path) -> None:
    """Casting an fp32 model rounds the parameters only: the masters are the fp32 values."""
    model = half_net()
    truth = {name: p.detach().clone() for name, p in model.named_parameters()}
    with Engine(model, AdamW(lr=0.0), **tight(model, tmp_path, dtype=dtype, initial_loss_scale=8.0)) as engine:
        assert all(p.dtype == getattr(torch, dtype) for p in model.parameters())
        assert half_step(engine, 0)
        state = engine.optimizer.state_dict()["state"]
        for position, (name, value) in enumerate(truth.items()):
            assert torch.equal(state[position]["master"], value), name
            close = (engine.state_dict()[name].float() - value).abs()
            assert (close <= 2**-8 * value.abs() + 2**-24).all()


@pytest.mark.parametrize("place", [tight, lambda model, path, **more: {**everything_on_device(), **more}])
def test_dtype_leaves_buffers_alone(place: Any, tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **place(model, tmp_path, dtype="bfloat16")) as engine:
        assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
        kinds = {name: buffer.dtype for name, buffer in model.named_buffers()}
        assert kinds == {
            "norm.running_mean": torch.float32,
            "norm.running_var": torch.float32,
            "norm.num_batches_tracked": torch.int64,
        }
        assert engine.state_dict()["norm.running_var"].dtype == torch.float32


def test_dtype_float32_of_a_half_model(tmp_path: Path) -> None:
    model = half_net().half()
    truth = {name: p.detach().float() for name, p in model.named_parameters()}
    with Engine(model, AdamW(), **tight(model, tmp_path, dtype="float32")) as engine:
        assert_same_tensors({k: v for k, v in engine.state_dict().items() if k in truth}, truth)
        assert all(p.dtype == torch.float32 for p in model.parameters())


def test_small_updates_are_kept_in_bf16(tmp_path: Path) -> None:
    """Steps far below bf16's resolution add up in the master: after 64 steps of 2**-14 the parameter has moved."""
    model = nn.Linear(4, 4).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    with Engine(model, AdamW(lr=2**-14, weight_decay=0.0), **tight(model, tmp_path)) as engine:
        for _ in range(64):
            engine.backward(engine(torch.ones(1, 4, dtype=torch.bfloat16)).float().sum())
            engine.step()
        # the gradient is constant, so Adam's step is lr: 64 * 2**-14 = 2**-8, one bf16 step below 1
        assert torch.equal(engine.state_dict()["weight"], torch.full((4, 4), 1 - 2**-8, dtype=torch.bfloat16))


# --- life and death ---------------------------------------------------------------------------------------------------


def test_meta_model_is_initialised_unit_by_unit(tmp_path: Path) -> None:
    with torch.device("meta"):
        model = hf.LlamaForCausalLM(hf.LlamaConfig(**_tiny_llama()))
    torch.manual_seed(0)
    with Engine(model, AdamW(), **nvme(model, tmp_path)) as engine:
        state = engine.state_dict()
        assert not any(value.is_meta for value in state.values())
        spread = model.config.initializer_range
        assert 0.5 * spread < float(state["model.layers.0.mlp.up_proj.weight"].std()) < 2 * spread
        assert torch.equal(state["model.norm.weight"], torch.ones(32))
        loss = engine(**BY_NAME["llama"].batch(0)).loss
        assert 0.5 < float(loss) / 5.298 < 1.5  # ln(200): an untrained model guesses
        engine.backward(loss)
        assert engine.step()


def _tiny_llama() -> dict[str, Any]:
    return {
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 200,
    }


def test_meta_model_with_own_initialisation(tmp_path: Path) -> None:
    def fill(module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 0.25)

    class Bare(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(WIDTH, WIDTH))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight

    with torch.device("meta"):
        bare, filled, reset = Bare(), Bare(), nn.Linear(WIDTH, WIDTH)
    with pytest.raises(offload.ConfigError, match="init_weights"):
        Engine(bare, AdamW(), **everything_on_device())
    with Engine(filled, AdamW(), init_weights=fill, **everything_on_device()) as engine:
        assert torch.equal(engine.state_dict()["weight"], torch.full((WIDTH, WIDTH), 0.25))
    torch.manual_seed(4)
    with Engine(reset, AdamW(), **everything_on_device()) as engine:
        ours = engine.state_dict()
    torch.manual_seed(4)
    assert_same_tensors(ours, dict(nn.Linear(WIDTH, WIDTH).state_dict()))


def test_close_restores_the_model(tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))
    train(engine, range(2))
    truth = engine.state_dict()
    engine.close()
    engine.close()
    assert_same_tensors(dict(model.state_dict()), truth)
    with pytest.raises(offload.StateError, match="closed"):
        engine(batch(0))
    optimizer = torch.optim.AdamW(model.parameters())
    plain_step(model, optimizer, 3)  # an ordinary model again: gradients, hooks and all
    assert all(p.grad is not None for p in model.parameters())
    assert not list(tmp_path.iterdir())
    model.load_state_dict(truth)
    copy.deepcopy(model)


def test_close_without_restore_leaves_a_clear_error(tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    engine.close(restore=False)
    with pytest.raises(offload.StateError, match="closed without restoring"):
        model(batch(0))


def test_wrapping_again_after_close_continues(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        truth = train(engine, range(4))
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        losses = train(engine, range(2))
        packed = engine.optimizer.state_dict()
    with Engine(model, AdamW(lr=1e-2), **everything_on_device()) as engine:
        engine.optimizer.load_state_dict(packed)
        losses += train(engine, range(2, 4))
    assert all(torch.equal(a, b) for a, b in zip(losses, truth, strict=True))


def test_context_manager_closes_on_an_exception(tmp_path: Path) -> None:
    model = net()
    with pytest.raises(KeyError), Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        raise KeyError
    assert not list(tmp_path.iterdir())
    model(batch(0))
    with pytest.raises(offload.StateError, match="closed"):
        engine.step()


def test_an_unclosed_engine_is_collected(tmp_path: Path) -> None:
    def files() -> int:
        return sum(os.readlink(f"/proc/self/fd/{fd}").startswith(str(tmp_path)) for fd in _descriptors())

    model = net()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    step(engine, 0)
    assert files() == 1
    let_go(engine)
    seen = weakref.ref(engine)
    del engine, model
    collect()
    assert seen() is None
    assert files() == 0


@pytest.mark.cpu("the meter")
@pytest.mark.parametrize("fails", [False, True])
def test_the_meter_is_closed_with_the_engine(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    def meters() -> int:
        return sum(os.readlink(f"/proc/self/fd/{fd}").endswith("/statm") for fd in _descriptors())

    collect()
    before = meters()
    if fails:
        monkeypatch.setattr(offload.module.hooks.Hooks, "attach", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError) as caught:
            Engine(net(), AdamW(), **everything_on_device())
        assert caught.value is not None  # which keeps the engine
    else:
        engine = Engine(net(), AdamW(), **everything_on_device())
        step(engine, 0)
        assert meters() == before + 1
        engine.close()
    assert meters() == before


def _descriptors() -> list[str]:
    """Return open descriptors; the one of the listing itself is gone."""
    return [fd for fd in os.listdir("/proc/self/fd") if os.path.islink(f"/proc/self/fd/{fd}")]


def test_an_engine_lives_as_long_as_its_model(tmp_path: Path) -> None:
    """Dropping the engine object alone changes nothing: the model still needs it."""
    model, plain = net().eval(), net().eval()
    engine = Engine(model, AdamW(), **tight(model, tmp_path))
    del engine
    collect()
    assert torch.equal(model(batch(0)), plain(batch(0)))


def test_an_engine_without_a_variable_is_found_by_its_model() -> None:
    """What the refusal of a second engine says leads to one that goes on."""
    model, tied = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)), nn.Linear(2, 2)
    tied.weight = model[1].weight

    def cell() -> None:
        engine = Engine(model, AdamW(), **everything_on_device())
        engine.backward(engine(torch.ones(1, 2)).sum())
        engine.step()
        raise ValueError

    with pytest.raises(ValueError):
        cell()
    for other in (model, nn.Sequential(model), model[1], tied):
        with pytest.raises(offload.StateError, match=r"offload\.Engine\.of\(model\)"):
            Engine(other, AdamW(), **everything_on_device())
        assert Engine.of(other) is Engine.of(model)
    engine = Engine.of(model)
    assert engine is not None and engine.module is model and Engine.of(nn.Linear(2, 2)) is None
    states = engine.optimizer.state_dict()
    engine.close()
    assert Engine.of(model) is None
    with Engine(model, AdamW(), **everything_on_device()) as again:
        assert Engine.of(model) is again
        again.optimizer.load_state_dict(states)


def test_config_from_dict_file_and_keywords(tmp_path: Path) -> None:
    model = net()
    values = {key: str(value) if isinstance(value, Path) else value for key, value in tight(model, tmp_path).items()}
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**values, "max_grad_norm": 2.0}))
    results = []
    for source in (values, str(path), path, offload.Config.load(values)):
        with Engine(net(), AdamW(), source, max_grad_norm=0.5) as engine:
            assert engine.config.max_grad_norm == 0.5
            step(engine, 0)
            results.append(engine.state_dict())
    for other in results[1:]:
        assert_same_tensors(other, results[0])


def test_budget_shares_and_defaults() -> None:
    with Engine(net(), AdamW(), device="cpu", max_memory={0: "1%", "cpu": "1%"}) as engine:
        step(engine, 0)
    with Engine(net(), AdamW(), device="cpu") as engine:
        step(engine, 0)
        assert engine.stats().misses == 0


def test_stats_are_a_frozen_snapshot_within_budgets(engine: Engine) -> None:
    before = engine.stats()
    train(engine, range(2))
    after = engine.stats()
    assert before.step == 0 and after.step == 2
    with pytest.raises(AttributeError):
        after.step = 3  # type: ignore[misc]
    for tier, budget in after.budget_bytes.items():
        assert 0 <= after.used_bytes[tier] <= after.peak_bytes[tier] <= budget
    assert after.links["nvme_read"].bytes > before.links["nvme_read"].bytes
    assert after.links["cpu_adam"].bytes > 0 and after.links["compute"].seconds > 0
    assert after.binding_link in after.links


def test_activations_are_charged_and_refused(tmp_path: Path) -> None:
    """What backward keeps is bounded; what does not fit is refused with numbers, and a smaller batch goes on."""
    model = net()
    options = tight(model, tmp_path)
    options["activation_memory"] = 1 << 20
    options["max_memory"]["device"] -= ACTIVATION_BYTES - (1 << 20)
    with Engine(model, AdamW(), **options) as engine:
        with pytest.raises(offload.BudgetError, match="activations"):
            engine(torch.randn(4096, WIDTH))
        collect()  # what pytest has of the traceback
        step(engine, 0)
        with torch.no_grad():
            engine(torch.randn(4096, WIDTH))  # keeps nothing


def test_a_forward_without_backward_keeps_nothing(engine: Engine) -> None:
    """With gradients enabled, but the output dropped: the charge for its activations goes with it."""
    step(engine, 0)
    before = engine.stats().used_bytes["device"]
    for number in range(3):
        engine(batch(number))
    assert engine.stats().used_bytes["device"] == before
    kept = engine(batch(0))
    assert engine.stats().used_bytes["device"] > before
    del kept
    assert engine.stats().used_bytes["device"] == before


def test_the_plan_counts_units_that_are_in_use_at_once(tmp_path: Path) -> None:
    def nested() -> nn.Module:
        torch.manual_seed(0)
        return Nested()

    with pytest.raises(offload.BudgetError, match="the 5 units that are in use at once"):
        Engine(nested(), optimizer=AdamW(lr=1e-3), **tight(nested(), tmp_path, units=3))
    expected = run(nested(), [0, 1, 2], loss_of=loss_of, **everything_on_device())
    actual = run(nested(), [0, 1, 2], loss_of=loss_of, **tight(nested(), tmp_path, units=5))
    assert_equal(actual, expected)
    assert actual.plan.working_bytes == working_bytes(nested(), units=5, unit_bytes=LINEAR_BYTES)


@pytest.mark.parametrize("where", ["device", "nvme"])
def test_evaluation_in_inference_mode_leaves_nothing_behind(where: str, tmp_path: Path) -> None:
    """What is fetched in inference mode is used for training afterwards."""
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(5)])
    with Engine(model, AdamW(), **(everything_on_device() if where == "device" else tight(model, tmp_path))) as engine:
        guess_nothing(engine)  # all updates are made after the step
        for number in range(4):
            with torch.inference_mode():
                evaluated = loss_of(engine, number)
            trained = loss_of(engine, number)
            assert torch.equal(evaluated, trained)
            engine.backward(trained)
            engine.step()  # the rest of which is made in the next evaluation


# --- where compute runs -----------------------------------------------------------------------------------------------


def test_a_device_of_cuda_has_its_index(monkeypatch: pytest.MonkeyPatch) -> None:
    """As tensors have it: storages on "cuda" and tensors on "cuda:1" do not go together."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    for given, index in ((None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:2", 2), (torch.device("cuda"), 1)):
        assert resolve_device(given) == torch.device("cuda", index)
        assert resolve_device(offload.Config(device=given).device) == torch.device("cuda", index)
    for given in ("cpu", "cpu:0", torch.device("cpu")):
        assert resolve_device(given) == torch.device("cpu")
    with pytest.raises(offload.ConfigError, match=r"'cuda' with an index below 3 but got 'cuda:3'; torch sees 3 CUDA"):
        resolve_device("cuda:3")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert resolve_device(None) == torch.device("cpu")
    with pytest.raises(offload.ConfigError, match=r"'cuda:0' was asked for but torch sees no CUDA device"):
        resolve_device("cuda:0")


class Elsewhere(torch.Tensor):
    """Says that it is on another GPU."""

    device = property(lambda self: torch.device("cuda:1"))  # type: ignore[assignment]


def test_a_batch_on_another_gpu_is_refused() -> None:
    given = batch(0).as_subclass(Elsewhere)
    refuse_batch((given,), {}, torch.device("cuda", 1))
    with pytest.raises(offload.StateError, match=r"is on cuda:1 but the engine computes on cuda:0; move it"):
        refuse_batch((given,), {}, torch.device("cuda", 0))


def test_numbers_and_lengths_may_be_in_host_memory() -> None:
    """As ``pack_padded_sequence`` wants lengths; of the rest, the text says what else there is."""
    gpu = torch.device("cuda", 0)
    refuse_batch((torch.tensor(1.5), {"lengths": torch.tensor([3, 2])}), {"flag": torch.tensor(True)}, gpu)
    for given in (torch.zeros(2), torch.zeros(2, 2, dtype=torch.int64), torch.ones(2, dtype=torch.bool)):
        with pytest.raises(offload.StateError, match=r"argument 'x' is on cpu .*or call engine\.module\(\.\.\.\)"):
            refuse_batch((), {"x": given}, gpu)
    with pytest.raises(offload.StateError, match="argument 0 is on meta"):
        refuse_batch((torch.zeros((), device="meta"),), {}, gpu)


@pytest.mark.parametrize("optimizer", [None, AdamW()], ids=["evaluates", "trains"])
def test_a_model_keeps_its_engine(optimizer: AdamW | None) -> None:
    """Whoever keeps only the model goes on; nothing is said at the end of the process."""
    model = Engine(nn.Sequential(nn.Linear(WIDTH, WIDTH)), optimizer, **everything_on_device()).module
    collect()
    assert model(torch.ones(1, WIDTH)).shape == (1, WIDTH)
    script = (
        "import torch, offload\n"
        "budgets = {'device': 1 << 26, 'cpu': 1 << 26}\n"
        "engine = offload.Engine(torch.nn.Linear(8, 8), None, device='cpu', max_memory=budgets)\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert "Exception ignored" not in done.stderr


@pytest.mark.parametrize("pending", [False, True], ids=["stepped", "gradients wait"])
def test_an_engine_that_nobody_holds_is_collected(pending: bool) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH))
    engine = Engine(model, SGD(lr=0.1), **everything_on_device())
    engine.backward(engine(torch.ones(1, WIDTH)).sum())
    if not pending:
        engine.step()
    let_go(engine)
    manager = weakref.ref(engine._manager)
    del engine, model
    collect()
    assert manager() is None


@pytest.mark.parametrize("where", ["load", "prefetch"])
def test_an_engine_that_cannot_be_made_leaves_model_and_optimizer(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    model(torch.ones(2, WIDTH)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    plain = copy.deepcopy(model)
    theirs = torch.optim.AdamW(plain.parameters(), lr=0.1)
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    def fails(*args: object) -> None:
        raise OSError("the drive is gone")

    monkeypatch.setattr(*{"load": (Loader, "load"), "prefetch": (Manager, "prefetch")}[where], fails)
    with pytest.raises(OSError, match="the drive is gone"):
        Engine(model, optimizer, **everything_on_device())
    monkeypatch.undo()
    assert_same_tensors(model.state_dict(), plain.state_dict())
    assert torch.equal(model(torch.ones(2, WIDTH)), plain(torch.ones(2, WIDTH)))
    with Engine(model, optimizer, **everything_on_device()) as engine:
        for _ in range(2):
            engine.backward(engine(torch.ones(2, WIDTH)).square().sum())
            engine.step()
            plain(torch.ones(2, WIDTH)).square().sum().backward()
            theirs.step()
            theirs.zero_grad()
        assert_close(engine.state_dict(), dict(plain.state_dict()))


@pytest.mark.parametrize("every", [True, False])
def test_whoever_calls_step_once_per_accumulation_is_told(every: bool, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(4, 4)
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with Engine(model, AdamW(), device="cpu", gradient_accumulation_steps=3, max_memory=memory) as engine:
        for number in range(9):
            engine.backward(engine(torch.ones(2, 4)).sum())
            if every or number % 3 == 2:
                engine.step()
    told = [message for message in caplog.messages if "call engine.step() behind each of them" in message]
    assert len(told) == (not every)


@pytest.mark.parametrize("first", [True, False])
def test_whoever_forgets_gradients_before_each_micro_batch_is_told(
    first: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """No step would ever be taken."""
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with Engine(nn.Linear(4, 4), AdamW(), device="cpu", gradient_accumulation_steps=2, max_memory=memory) as engine:
        for number in range(6):
            if first or number % 2 == 0:
                engine.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
        assert engine.stats().step == (0 if first else 3)
    told = [message for message in caplog.messages if message.startswith("zero_grad: drops 1 of")]
    assert len(told) == first


def test_a_checkpoint_that_is_loaded_inside_an_accumulation_is_no_zero_grad_of_the_users(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Whoever calls that later is told still."""
    options = {"gradient_accumulation_steps": 4, **everything_on_device()}
    with Engine(nn.Linear(4, 4), AdamW(), **options) as engine:
        engine.save_checkpoint(tmp_path)
        for forget in (functools.partial(engine.load_checkpoint, tmp_path), engine.zero_grad):
            assert not any("zero_grad" in message for message in caplog.messages)
            engine.backward(engine(torch.ones(2, 4)).sum())
            engine.step()
            forget()
    assert any(message.startswith("zero_grad: drops 1 of") for message in caplog.messages)


@pytest.mark.parametrize("view", [lambda w: w.data, lambda w: w.data[2:], lambda w: w.detach().t()[1]])
def test_a_buffer_that_views_a_trained_parameter_is_refused(view: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """It would not follow the parameter any more."""
    memory = {"device": "64MiB", "cpu": "64MiB"}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_buffer("rows", view(model[1].weight))
    with pytest.raises(offload.ConfigError, match="(parameter 1.weight|buffer rows).*expected memory of their own"):
        Engine(model, AdamW(), device="cpu", max_memory=memory)
    model[1].weight.requires_grad_(False)
    with Engine(model, AdamW(), device="cpu", max_memory=memory) as engine:
        engine(torch.ones(2, 4))


def test_passes_that_were_dropped_do_not_count_as_an_accumulation(caplog: pytest.LogCaptureFixture) -> None:
    memory = {"device": "64MiB", "cpu": "64MiB"}
    with Engine(nn.Linear(4, 4), AdamW(), device="cpu", gradient_accumulation_steps=2, max_memory=memory) as engine:
        for _ in range(2):
            engine.zero_grad()
            engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
    assert not any("call engine.step() behind" in message for message in caplog.messages)


def test_a_complex_loss_is_refused_as_torch_does() -> None:
    model = nn.Linear(4, 4)
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        loss = engine(torch.ones(2, 4)).sum() * 1j
        with pytest.raises(RuntimeError, match="only for real scalar outputs"):
            engine.backward(loss)
        assert model.weight.grad is None
        engine.backward(loss, gradient=torch.tensor(1j, device=loss.device))
        assert model.weight.grad is not None
        assert engine._watch._seen.sampled_loss.value is None, "no real number: a chart cannot show it"


def test_a_loss_that_is_no_scalar_has_the_gradient_that_it_is_given() -> None:
    """Nobody looks at it as a loss: that came too late, when the gradients were there."""
    model = nn.Linear(8, 8)
    x, gradient = torch.randn(4, 8), torch.randn(4, 8)
    truth = copy.deepcopy(model)
    truth(x).backward(gradient)
    with Engine(model, SGD(lr=0.0), **everything_on_device()) as engine:
        output = engine(x)
        engine.backward(output, gradient=gradient.to(output.device))
        with engine.gather_gradients(model.weight):
            assert torch.equal(model.weight.grad, truth.weight.grad)
        engine.step()
