"""A user's own optimizer after an engine has taken it over: code that holds it goes on as if nothing had happened."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, assert_same_tensors, everything_on_device, loss_of, tight
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload import AdamW, ConfigError, Engine

pytestmark = [pytest.mark.timeout(120), pytest.mark.usefixtures("single_torch_thread")]

LR = 1e-2


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(3)))


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4)


@pytest.fixture(scope="module")
def undisturbed() -> dict[str, torch.Tensor]:
    """Parameters after three steps of an engine that takes an optimizer over."""
    model = net()
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            assert engine.step()
        return engine.state_dict()


def plain_run(steps: int, schedule: Callable[[Any], Any] | None = None) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return parameters and learning rates of a plain loop."""
    model = net()
    optimizer = adamw(model)
    scheduler = schedule(optimizer) if schedule else None
    rates = []
    for number in range(steps):
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        rates.append(optimizer.param_groups[0]["lr"])
    return model.state_dict(), rates


def kept_step(optimizer: torch.optim.Optimizer) -> Callable[..., Any]:
    """Return the class's own step, as somebody has it who asked for it before the engine was made."""
    return type(optimizer).step.__get__(optimizer)


# --- steps ------------------------------------------------------------------------------------------------------------

WAYS: dict[str, Callable[[Engine, Any], Callable[..., Any]]] = {
    "engine": lambda engine, optimizer: engine.step,
    "engine.optimizer": lambda engine, optimizer: engine.optimizer.step,
    "optimizer": lambda engine, optimizer: optimizer.step,
    "kept": lambda engine, optimizer: kept_step(optimizer),
}


@pytest.mark.parametrize("way", WAYS)
def test_a_step_is_a_step_whoever_is_asked_for_it(
    way: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """The same bits, and the hooks on the user's optimizer run once with it, as torch runs them."""
    model = net()
    optimizer = adamw(model)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda o, args, kwargs: seen.append("before") or check(o, args, kwargs))
    optimizer.register_step_post_hook(lambda o, args, kwargs: seen.append("after") or check(o, args, kwargs))

    def check(called_with: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert called_with is optimizer and isinstance(args[0], torch.optim.AdamW) and not args[1:] and not kwargs

    with Engine(model, optimizer, **tight(model, tmp_path)) as engine:
        step = WAYS[way](engine, optimizer)
        optimizer.register_step_post_hook(lambda *_: seen.append("later"))
        for number in range(3):
            loss_of(model, number).backward()
            step()
            assert engine.stats().step == number + 1
        assert_same_tensors(engine.state_dict(), undisturbed)
    assert seen == ["before", "after", "later"] * 3


@pytest.mark.parametrize("way", ["engine.optimizer", "optimizer", "kept"])
def test_a_closure(way: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """It runs once per step, with gradients, and its loss is returned; a hook may put another one in its place."""
    model = net()
    optimizer = adamw(model)
    calls: list[int] = []

    def closure_of(number: int) -> Callable[[], torch.Tensor]:
        def closure() -> torch.Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, number)
            loss.backward()
            calls.append(number)
            return loss

        return closure

    instead: list[int] = []
    optimizer.register_step_pre_hook(lambda o, *_: ((o, closure_of(instead.pop())), {}) if instead else None)
    with Engine(model, optimizer, **tight(model, tmp_path)) as engine:
        step = WAYS[way](engine, optimizer)
        first = step(closure_of(0))
        instead.append(1)
        step(closure_of(7))
        step(closure=closure_of(2))
        assert_same_tensors(engine.state_dict(), undisturbed)
    assert calls == [0, 1, 2]
    assert torch.equal(first.detach(), loss_of(net(), 0).detach())


def test_hooks_of_all_optimizers_run_once_per_step() -> None:
    model = net()
    optimizer = adamw(model)
    seen: list[str] = []
    handles = [
        register_optimizer_step_pre_hook(lambda *_: seen.append("before")),
        register_optimizer_step_post_hook(lambda *_: seen.append("after")),
    ]
    try:
        with Engine(model, optimizer, **everything_on_device()) as engine:
            for way in ("engine", "engine.optimizer", "optimizer"):
                loss_of(model, 0).backward()
                WAYS[way](engine, optimizer)()
        assert seen == ["before", "after"] * 3
    finally:
        for handle in handles:
            handle.remove()


class Own(torch.optim.RMSprop):
    """A user's own, which clears gradients itself."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.zero_grad()
        return loss


@pytest.mark.parametrize("way", WAYS)
def test_a_class_that_steps_itself(way: str) -> None:
    """Its own step, where somebody has kept it, has nothing to update and clears nothing."""
    plain, model = net(), net()
    torch.optim.RMSprop(net().parameters())  # its step runs hooks from now on, also where a subclass calls it
    theirs, given = (Own(each.parameters(), lr=LR) for each in (plain, model))
    stepped: list[object] = []
    given.register_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    with Engine(model, given, **everything_on_device()) as engine:
        step = WAYS[way](engine, given)
        engine.optimizer.on_zero_grad = lambda: pytest.fail("what steps here has nothing to clear")
        for number in range(3):
            loss_of(plain, number).backward()
            theirs.step()
            loss_of(model, number).backward()
            step()
        assert_same_tensors(engine.state_dict(), dict(plain.state_dict()))
    assert stepped == [given] * 3


@pytest.mark.parametrize("way", WAYS)
def test_taken_over_again(way: str, undisturbed: dict[str, torch.Tensor]) -> None:
    """By the next engine: steps are its, hooks run once, and the first engine's optimizer is done with."""
    model = net()
    optimizer = adamw(model)
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda *args: stepped.append(args[0]))
    first = Engine(model, optimizer, **everything_on_device())
    first.backward(loss_of(first, 0))
    first.step()
    saved = optimizer.state_dict()
    first.close()
    with Engine(model, optimizer, **everything_on_device()) as engine:
        optimizer.load_state_dict(saved)
        with pytest.raises(RuntimeError, match="it is closed"):
            first.optimizer.step()
        for number in (1, 2):
            loss_of(model, number).backward()
            WAYS[way](engine, optimizer)()
        assert_same_tensors(engine.state_dict(), undisturbed)
    assert stepped == [optimizer] * 3


# --- LR schedulers ----------------------------------------------------------------------------------------------------

SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "lambda": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch),
    "one cycle": lambda optimizer: lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=10),
    "sequential": lambda optimizer: lr_scheduler.SequentialLR(
        optimizer,
        [lr_scheduler.LinearLR(optimizer, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(optimizer, T_max=4)],
        milestones=[2],
    ),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("made", ["before", "after", "on the engine's"])
@pytest.mark.parametrize("way", WAYS)
def test_schedulers_keep_time_without_a_warning(way: str, made: str, schedule: str) -> None:
    make = SCHEDULES[schedule]
    expected, rates = plain_run(3, make)
    model = net()
    optimizer = adamw(model)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = make(optimizer) if made == "before" else None
        with Engine(model, optimizer, **everything_on_device()) as engine:
            if scheduler is None:
                scheduler = make(optimizer if made == "after" else engine.optimizer)
            for number in range(3):
                loss_of(model, number).backward()
                WAYS[way](engine, optimizer)()
                scheduler.step()
                assert engine.optimizer.param_groups[0]["lr"] == rates[number]
            ours = engine.state_dict()
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


def test_a_scheduler_that_is_early_is_told() -> None:
    model = net()
    optimizer = adamw(model)
    with Engine(model, optimizer, **everything_on_device()):
        scheduler = SCHEDULES["lambda"](optimizer)
        with pytest.warns(UserWarning, match="before `optimizer.step"):
            scheduler.step()


# --- dicts ------------------------------------------------------------------------------------------------------------


def test_what_is_loaded_is_loaded_by_the_engine(undisturbed: dict[str, torch.Tensor], tmp_path: Path) -> None:
    """With the hooks that the user's optimizer has for it; groups stay the objects that schedulers hold."""
    model = net()
    optimizer = adamw(model)
    with Engine(model, optimizer, **tight(model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        saved, weights = optimizer.state_dict(), engine.state_dict()
    model = net()
    given = adamw(model)
    seen: list[object] = []
    given.register_load_state_dict_pre_hook(lambda o, state_dict: seen.append(o) or state_dict["inside"])
    given.register_load_state_dict_post_hook(lambda o: seen.append((o, o.param_groups[0]["lr"])))
    group = given.param_groups[0]
    with Engine(model, given, **tight(model, tmp_path)) as engine:
        engine.load_state_dict(weights)
        group["lr"] = 0.5
        given.load_state_dict({"inside": saved})
        assert seen == [given, (given, LR)]
        assert given.param_groups[0] is group is engine.optimizer.param_groups[0]
        with pytest.raises(ConfigError, match="optimizer state dict: expected a dict with 'state'"):
            given.load_state_dict({"inside": {}})
        for number in (1, 2):
            engine.backward(loss_of(engine, number))
            engine.step()
        assert_same_tensors(engine.state_dict(), undisturbed)


def test_an_optimizer_of_another_engine() -> None:
    with Engine(net(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(
            ConfigError, match=r"^optimizer: .*got one that an engine has made; pass what that engine was"
        ):
            Engine(net(), engine.optimizer, **everything_on_device())


def test_an_engine_is_collected_before_what_it_took_over() -> None:
    model = net()
    optimizer = adamw(model)
    engine = Engine(model, optimizer, **everything_on_device())
    seen = weakref.ref(engine), weakref.ref(engine.optimizer)
    engine.close()
    del engine
    gc.collect()
    assert [reference() for reference in seen] == [None, None]


# --- accelerate -------------------------------------------------------------------------------------------------------


@pytest.fixture
def accelerator() -> Iterator[Any]:
    accelerate = pytest.importorskip("accelerate")
    state = pytest.importorskip("accelerate.state")
    yield accelerate.Accelerator(cpu=True)
    state.AcceleratorState._reset_state(reset_partial_state=True)
    state.GradientState._reset_state()


@pytest.mark.parametrize("order", ["prepared first", "engine first", "the engine's own"])
def test_an_optimizer_of_accelerate(order: str, accelerator: Any, tmp_path: Path) -> None:
    """Its `step` ends up in the engine, and its scheduler keeps time, whichever was made first."""
    expected, rates = plain_run(3, SCHEDULES["lambda"])
    model = net()
    optimizer = adamw(model)
    if order == "prepared first":
        prepared = accelerator.prepare(optimizer)
        engine = Engine(model, prepared, **tight(model, tmp_path))
        module = accelerator.prepare(engine.module)
    else:
        engine = Engine(model, optimizer, **tight(model, tmp_path))
        module, prepared = accelerator.prepare(
            engine.module, optimizer if order == "engine first" else engine.optimizer
        )
    with engine, warnings.catch_warnings():
        warnings.simplefilter("error")
        scheduler = accelerator.prepare(SCHEDULES["lambda"](prepared.optimizer))
        for number in range(3):
            prepared.zero_grad()
            accelerator.backward(loss_of(module, number))
            prepared.step()
            scheduler.step()
            assert engine.stats().step == number + 1 and not prepared.step_was_skipped
            assert optimizer.param_groups[0]["lr"] == rates[number]
        ours = engine.state_dict()
    for name, value in expected.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


class Scaler:
    """Steps where the count says so, as a gradient scaler does that looks for overflows."""

    def __init__(self) -> None:
        self.steps = 0

    def step(self, optimizer: torch.optim.Optimizer, *args: Any) -> None:
        self.steps += 1
        if self.steps != 2:
            optimizer.step(*args)

    def update(self) -> None:
        pass


@pytest.mark.parametrize("order", ["prepared first", "engine first"])
def test_accelerate_knows_whether_a_scaler_skipped_the_step(order: str, accelerator: Any) -> None:
    """It puts its own `step` in the optimizer's place meanwhile, and then the one that it saw first."""
    wrapper = pytest.importorskip("accelerate.optimizer").AcceleratedOptimizer
    model = net()
    optimizer = adamw(model)
    prepared = wrapper(optimizer, scaler=Scaler()) if order == "prepared first" else None
    with Engine(model, prepared or optimizer, **everything_on_device()) as engine:
        prepared = prepared or wrapper(optimizer, scaler=Scaler())
        for number in range(4):
            loss_of(model, number).backward()
            prepared.step()
            assert prepared.step_was_skipped == (number == 1)
        assert engine.stats().step == 3
        loss_of(model, 4).backward()
        optimizer.step()
        assert engine.stats().step == 4
