"""A user's own optimizer after an engine has taken it over: code that holds it goes on as if nothing had happened."""

from __future__ import annotations

import collections
import contextlib
import copy
import dataclasses
import functools
import gc
import types
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, assert_same_tensors, everything_on_device, loss_of, tight
from torch import nn
from torch.optim import lr_scheduler
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from offload import Adam, AdamW, BudgetError, ConfigError, Engine, StateError
from offload.torch_private import no_hooks_of_steps

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


@pytest.mark.parametrize("face", ["engine.optimizer", "optimizer"])
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad])
def test_a_fused_optimizer_beside_a_grad_scaler(kind: Any, face: str) -> None:
    """The scaler unscales and skips, which it leaves to a fused step in torch."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[float]:
        scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0), []
        for number in range(3):
            loss = loss_of(model, number)
            scaler.scale(loss * (float("inf") if number == 1 else 1)).backward()
            scaler.step(optimizer)
            scaler.update()
            scales.append(scaler.get_scale())
            optimizer.zero_grad()
        return scales

    plain, model = net(), net()
    expected = train(plain, kind(plain.parameters(), lr=LR, fused=False))
    with facing(face, kind(model.parameters(), lr=LR, fused=True), model) as (engine, optimizer):
        assert train(model, optimizer) == expected == [1024.0, 512.0, 512.0]
        assert engine.stats().step == 2
        assert_near(engine.state_dict(), dict(plain.state_dict()))


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


@pytest.mark.parametrize("way", ["engine", "engine.optimizer", "optimizer"])
def test_hooks_of_all_optimizers_and_a_class_that_steps_itself(way: str, tmp_path: Path) -> None:
    """None while the engine is made, and none per parameter; a hook may be what makes the updates."""
    model = net()
    optimizer = Own(model.parameters(), lr=LR)
    seen: list[object] = []
    engines: list[Engine] = []

    def look(stepped: torch.optim.Optimizer, *_: object) -> None:
        seen.append(stepped)
        for engine in engines:
            engine.state_dict()

    handle = register_optimizer_step_post_hook(look)
    try:
        with Engine(model, optimizer, **tight(model, tmp_path, whole=True)) as engine:
            assert seen == []
            engines.append(engine)
            for number in range(2):
                loss_of(model, number).backward()
                WAYS[way](engine, optimizer)()
            engine.state_dict()
            assert seen == [engine.optimizer] * 2
            engines.clear()
    finally:
        handle.remove()
    seen.clear()
    with Engine(model, Own(model.parameters(), lr=LR), **everything_on_device()) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
    assert not seen


def test_hooks_of_all_optimizers_run_where_another_thread_updates_without() -> None:
    """As the worker does beside an accelerator: a loop may have a second optimizer, and register hooks meanwhile."""
    parameter = nn.Parameter(torch.ones(1))
    seen: list[str] = []

    def step() -> list[str]:
        seen.clear()
        torch.optim.SGD([parameter]).step()
        return list(seen)

    with contextlib.ExitStack() as last, ThreadPoolExecutor(1) as other:
        last.callback(register_optimizer_step_pre_hook(lambda *_: seen.append("before")).remove)
        without = no_hooks_of_steps()
        other.submit(without.__enter__).result()
        later = register_optimizer_step_post_hook(lambda *_: seen.append("after"))
        last.callback(later.remove)
        assert other.submit(step).result() == []
        assert step() == ["before", "after"]
        other.submit(without.__exit__, None, None, None).result()
        assert step() == other.submit(step).result() == ["before", "after"]
        later.remove()
        assert step() == ["before"]


def halved(step: Callable[..., Any]) -> Callable[..., Any]:
    """Return a step with half of the gradients, which looks like the one that it is made of."""

    @functools.wraps(step)
    def take(self: Any, *args: Any, **kwargs: Any) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.grad = parameter.grad / 2
        return step(self, *args, **kwargs)

    return take


def bound(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step = types.MethodType(halved(type(optimizer).step), optimizer)  # type: ignore[method-assign]


def counted(optimizer: torch.optim.Optimizer) -> None:
    bound(optimizer)
    SCHEDULES["lambda"](optimizer)


REPLACED: dict[str, Callable[[Any], None]] = {
    "method": bound,
    "function": lambda optimizer: setattr(optimizer, "step", lambda closure=None: None),
    "partial": lambda optimizer: setattr(optimizer, "step", functools.partial(optimizer.step, None)),
    "below a scheduler's": counted,
}


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.RMSprop])
@pytest.mark.parametrize("how", REPLACED)
def test_a_step_of_the_instance_is_refused(how: str, kind: Any) -> None:
    model = net()
    optimizer = kind(model.parameters(), lr=LR)
    REPLACED[how](optimizer)
    with pytest.raises(
        ConfigError, match=rf"^optimizer: expected {kind.__name__} to step as its class does.*`del optimizer\.step`"
    ):
        Engine(model, optimizer, **everything_on_device())
    del optimizer.step
    with Engine(model, optimizer, **everything_on_device()) as engine:
        advance(engine, [0])


@pytest.mark.parametrize("around", [lambda step: step, torch.no_grad(), torch.optim.Optimizer.profile_hook_step])
def test_a_step_of_the_instance_that_is_the_classes(
    around: Callable[..., Any], undisturbed: dict[str, torch.Tensor]
) -> None:
    model = net()
    optimizer = adamw(model)
    optimizer.step = types.MethodType(around(torch.optim.AdamW.step), optimizer)  # type: ignore[method-assign]
    SCHEDULES["lambda"](optimizer)
    with Engine(model, optimizer, **everything_on_device()) as engine:
        optimizer.param_groups[0]["lr"] = LR
        advance(engine, range(3))
        assert_same_tensors(engine.state_dict(), undisturbed)


class Halved(torch.optim.SGD):
    """A kind of SGD whose step says that it is that of torch."""

    step = halved(torch.optim.SGD.step)


class Quiet(torch.optim.SGD):
    """A kind of SGD around whose step there is something of torch's only."""

    step = torch.no_grad()(torch.optim.SGD.step)


class Centred(torch.optim.SGD):
    """A kind of SGD that changes gradients where torch's step collects them."""

    def _init_group(self, group: Any, params: Any, grads: Any, *lists: Any) -> Any:
        found = super()._init_group(group, params, grads, *lists)  # type: ignore[misc]
        grads[:] = [grad - grad.mean() for grad in grads]
        return found


@pytest.mark.parametrize("kind", [Halved, Quiet, Centred])
def test_a_step_that_is_made_of_torchs(kind: Any) -> None:
    """What others have put around one is taken, too."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        optimizer: torch.optim.Optimizer = kind(model.parameters(), lr=LR, momentum=0.9)
        return optimizer

    model = net()
    with Engine(model, make(model), **everything_on_device()) as engine:
        assert (engine.plan.request.own is None) == (kind is Quiet)
        advance(engine, range(3))
        assert_near(engine.state_dict(), trained_plainly(make, range(3)))


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
        calls = engine.optimizer._calls
        clear = functools.partial(pytest.fail, "what steps here has nothing to clear")
        engine.optimizer._calls = dataclasses.replace(calls, zero_grad=clear)
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


@pytest.mark.few
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


# --- both faces: the engine's optimizer and the one that it took over ------------------------------------------------

FACES = ("engine.optimizer", "optimizer")
ENGINES: dict[str, Callable[..., dict[str, Any]]] = {
    "resident": lambda model, path: everything_on_device(),
    "nvme": tight,
}


@contextmanager
def facing(face: str, given: Any, model: nn.Module, **options: Any) -> Iterator[tuple[Engine, Any]]:
    """Make an engine that takes `given` over; yield it and one of the two optimizers."""
    with Engine(model, given, **(options or everything_on_device())) as engine:
        yield engine, engine.optimizer if face == "engine.optimizer" else given


def advance(engine: Engine, numbers: Iterable[int]) -> None:
    for number in numbers:
        engine.backward(loss_of(engine, number))
        assert engine.step()


def trained_plainly(make: Callable[[nn.Module], Any], numbers: Iterable[int], change: Any = None) -> dict[str, Any]:
    """Return parameters of a plain loop; `change` gets the optimizer after the first step."""
    model = net()
    optimizer = make(model)
    for count, number in enumerate(numbers):
        if count == 1 and change is not None:
            change(optimizer, model)
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()
    return dict(model.state_dict())


def assert_near(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> None:
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-5, atol=1e-6), name


@pytest.mark.parametrize("face", FACES)
def test_a_hook_before_loading_may_put_states_in_another_order(face: str) -> None:
    """By the parameters' names, as torch's documentation has it; shapes do not tell them apart."""

    def named(model: nn.Module, *, turned: bool = False) -> torch.optim.AdamW:
        return torch.optim.AdamW(list(model.named_parameters())[:: -1 if turned else 1], lr=LR)

    def by_name(state_dict: dict[str, Any]) -> dict[str, Any]:
        (group,) = state_dict["param_groups"]
        return {name: state_dict["state"][number]["exp_avg"] for number, name in enumerate(group["param_names"])}

    def adapt(optimizer: Any, state_dict: dict[str, Any]) -> None:
        seen.append("before")
        (saved,), (own,) = state_dict["param_groups"], optimizer.param_groups
        places = {name: number for number, name in enumerate(own["param_names"])}
        states = {places[name]: state_dict["state"][number] for number, name in enumerate(saved["param_names"])}
        state_dict["state"] = states
        state_dict["param_groups"] = [{**saved, "param_names": own["param_names"]}]

    model = net()
    with Engine(model, named(model), **everything_on_device()) as engine:
        advance(engine, range(2))
        saved = engine.optimizer.state_dict()
    keys = list(saved["state"])
    seen: list[object] = []
    model = net()
    with facing(face, named(model, turned=True), model) as (engine, optimizer):
        optimizer.register_load_state_dict_pre_hook(adapt)
        optimizer.register_load_state_dict_post_hook(lambda o: seen.append(by_name(o.state_dict())))
        optimizer.load_state_dict(saved)
        assert list(saved["state"]) == keys and saved["param_groups"][0]["param_names"][0] == "0.0.weight"
        before, after = seen
        assert before == "before"
        assert_same_tensors(after, by_name(saved))  # type: ignore[arg-type]


@pytest.mark.parametrize("face", FACES)
def test_a_checkpoint_is_no_dict_that_hooks_may_change(face: str, tmp_path: Path) -> None:
    """It has its groups, and its states by name: a hook would see half of a dict."""
    model = net()
    seen: list[str] = []
    with facing(face, adamw(model), model) as (engine, optimizer):
        optimizer.register_load_state_dict_pre_hook(lambda *_: seen.append("before"))
        optimizer.register_load_state_dict_post_hook(lambda *_: seen.append("after"))
        advance(engine, [0])
        engine.save_checkpoint(tmp_path / "saved")
        optimizer.param_groups[0]["lr"] = 0.5
        engine.load_checkpoint(tmp_path / "saved")
        assert optimizer.param_groups[0]["lr"] == LR and not seen


@pytest.mark.parametrize(("face", "made"), [(FACES[0], "after"), (FACES[1], "before"), (FACES[1], "after")])
def test_a_hook_behind_state_dict_sees_the_states_and_may_change_them(face: str, made: str) -> None:
    def halve(optimizer: Any, state_dict: dict[str, Any]) -> dict[str, Any]:
        for state in state_dict["state"].values():
            state["exp_avg"] = state["exp_avg"].bfloat16()
        return {"optimizer": state_dict}

    model = net()
    given = adamw(model)
    calls: list[str] = []
    if made == "before":
        given.register_state_dict_post_hook(halve)
    with facing(face, given, model) as (engine, optimizer):
        if made == "after":
            optimizer.register_state_dict_post_hook(halve)
        optimizer.register_state_dict_pre_hook(lambda *_: calls.append("before"))
        advance(engine, [0])
        found = optimizer.state_dict()
        assert list(found) == ["optimizer"] and calls == ["before"]
        assert {state["exp_avg"].dtype for state in found["optimizer"]["state"].values()} == {torch.bfloat16}
        assert len(found["optimizer"]["state"]) == 6 and found["optimizer"]["run"]["step"] == 1


@pytest.mark.parametrize("face", FACES)
def test_a_state_dict_leaves_out_what_is_in_no_group_any_more(face: str) -> None:
    """Somebody freezes a layer, and takes it out of its group."""
    model = net()
    with facing(face, adamw(model), model) as (engine, optimizer):
        advance(engine, [0])
        model[0].requires_grad_(False)
        (group,) = optimizer.param_groups
        group["params"] = [parameter for parameter in group["params"] if parameter.requires_grad]
        advance(engine, [1])
        saved = optimizer.state_dict()
        assert [(number, state["step"]) for number, state in saved["state"].items()] == [(n, 2) for n in range(4)]
        optimizer.load_state_dict(saved)
        advance(engine, [2])


def test_a_step_of_zeros_where_the_class_finds_the_learning_rate_itself() -> None:
    """transformers' Adafactor has ``lr=None`` then: that is no rate of zero."""

    class Relative(torch.optim.SGD):
        def step(self, closure: Any = None) -> Any:  # type: ignore[override]
            for parameter in self.param_groups[0]["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad + 1)

    model = net()
    given = Relative(model.parameters())
    given.param_groups[0]["lr"] = None
    with Engine(model, given, **everything_on_device()) as engine:
        before = engine.state_dict()
        (engine(torch.ones(1, WIDTH)).sum() * 0).backward()
        engine.optimizer.step()
        assert_same_tensors(engine.state_dict(), {name: value - 1 for name, value in before.items()})


@pytest.mark.parametrize("way", ["made", "loaded"])
def test_the_remedy_for_a_state_of_a_frozen_parameter(way: str) -> None:
    """Followed to the letter, at both places where a state may come from."""
    model = net()
    given = adamw(model)
    loss_of(model, 0).backward()
    given.step()
    given.zero_grad()
    saved = given.state_dict()
    model[0].requires_grad_(False)
    text = (
        r"^0\.0\.\w+: expected no optimizer state, for it is frozen; take it out: `del optimizer\.state\[...\]` before"
    )
    if way == "made":
        with pytest.raises(ConfigError, match=text):
            Engine(model, given, **everything_on_device())
        for parameter in model[0].parameters():
            del given.state[parameter]
    else:
        given = adamw(model)
    with Engine(model, given, **everything_on_device()) as engine:
        if way == "loaded":
            with pytest.raises(ConfigError, match=text):
                engine.optimizer.load_state_dict(saved)
            del saved["state"][0], saved["state"][1]
            engine.optimizer.load_state_dict(saved)
        advance(engine, [1])
        assert [state["step"] for state in engine.optimizer.state_dict()["state"].values()] == [2] * 4


FORMS: dict[str, Callable[[nn.Linear], Any]] = {
    "one": lambda layer: layer.weight,
    "list": lambda layer: list(layer.parameters()),
    "generator": lambda layer: layer.parameters(),
    "named": lambda layer: layer.named_parameters(),
}


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("face", FACES)
def test_a_group_that_cannot_be_trained_is_refused_when_it_is_added(face: str, form: str) -> None:
    """Of another model; frozen when the engine was made. Nothing is changed."""
    model = net()
    model[2][0].requires_grad_(False)
    part = model[0].named_parameters() if form == "named" else model[0].parameters()
    with facing(face, torch.optim.AdamW(part, lr=LR), model) as (engine, optimizer):
        head = nn.Linear(WIDTH, 2)
        with pytest.raises(
            ConfigError, match=r"^optimizer: a parameter of shape \(2, 32\) is not one of the model's; m"
        ):
            optimizer.add_param_group({"params": FORMS[form](head)})
        with pytest.raises(ConfigError, match=r"required a gradient when the engine was made but got .*\(32, 32\)"):
            optimizer.add_param_group({"params": FORMS[form](model[2][0])})
        with pytest.raises(ValueError, match="some parameters appear in more than one parameter group"):
            optimizer.add_param_group({"params": FORMS[form](model[0][0])})
        with pytest.raises(ConfigError, match="lr is out of range: -1"):
            optimizer.add_param_group({"params": FORMS[form](model[1][0]), "lr": -1})
        with pytest.raises(TypeError, match="set"):
            optimizer.add_param_group({"params": set(model[1].parameters())})
        assert len(engine.optimizer.param_groups) == 1
        advance(engine, range(2))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("place", ENGINES)
@pytest.mark.parametrize("face", FACES)
def test_a_group_that_is_added_is_trained_from_then_on(face: str, place: str, form: str, tmp_path: Path) -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        part = model[0].named_parameters() if form == "named" else model[0].parameters()  # type: ignore[index]
        return torch.optim.AdamW(part, lr=LR, eps=1e-4)

    def add(optimizer: Any, model: Any) -> None:
        optimizer.add_param_group({"params": FORMS[form](model[1][0]), "lr": LR / 2})

    model = net()
    given = make(model)
    with facing(face, given, model, **ENGINES[place](model, tmp_path)) as (engine, optimizer):
        advance(engine, [0])
        engine.backward(loss_of(engine, 1))
        add(optimizer, model)  # its gradient has arrived: as in torch, this step is its first
        assert engine.step()
        advance(engine, [2])
        assert engine.optimizer.param_groups is given.param_groups and len(given.param_groups) == 2
        assert_near(engine.state_dict(), trained_plainly(make, range(3), add))
        states = optimizer.state_dict()["state"]
        assert states[0]["step"] == 3 and states[2]["step"] == 2


@pytest.mark.parametrize("face", FACES)
def test_parameters_that_are_put_into_a_group_are_refused_by_the_next_step(face: str) -> None:
    model = net()
    with facing(face, adamw(model), model) as (engine, optimizer):
        before = engine.state_dict()
        group = optimizer.param_groups[0]
        group["params"].append(nn.Parameter(torch.ones(3)))
        engine.backward(loss_of(engine, 0))
        with pytest.raises(ConfigError, match=r"shape \(3,\) is not one of the model's"):
            engine.step()
        group["params"].pop()
        assert_same_tensors(engine.state_dict(), before)
        advance(engine, [0])


def test_other_groups_of_an_optimizer_that_was_taken_over_are_refused_by_the_next_step(
    undisturbed: dict[str, torch.Tensor],
) -> None:
    model = net()
    optimizer = adamw(model)
    with Engine(model, optimizer, **everything_on_device()) as engine:
        optimizer.param_groups = [{**optimizer.param_groups[0], "lr": 0.0}]
        engine.backward(loss_of(engine, 0))
        with pytest.raises(StateError, match="expected param_groups to be the list that it has in common"):
            optimizer.step()
        optimizer.step()
        advance(engine, (1, 2))
        assert_same_tensors(engine.state_dict(), undisturbed)


def test_the_remedy_for_a_frozen_parameter() -> None:
    """Followed to the letter: what was trained goes on with its states, the new parameter begins."""
    model = net()
    model[2].requires_grad_(False)
    first = Engine(model, AdamW([*model[0].parameters(), *model[1].parameters()], lr=LR), **everything_on_device())
    advance(first, range(2))
    model[2].requires_grad_(True)
    with pytest.raises(ConfigError, match=r"save engine\.optimizer\.state_dict\(\), close.*add_param_group$"):
        first.optimizer.add_param_group({"params": model[2].parameters()})
    saved = first.optimizer.state_dict()
    first.close()
    with Engine(
        model, AdamW([*model[0].parameters(), *model[1].parameters()], lr=LR), **everything_on_device()
    ) as engine:
        engine.optimizer.load_state_dict(saved)
        engine.optimizer.add_param_group({"params": model[2].parameters()})
        before = engine.state_dict()
        advance(engine, [2])
        assert not torch.equal(engine.state_dict()["2.0.weight"], before["2.0.weight"])
        assert [state["step"] for state in engine.optimizer.state_dict()["state"].values()] == [3, 3, 3, 3, 1, 1]


READS_AND_WRITES: dict[str, Callable[[Any, Any], object]] = {
    "state[parameter]": lambda state, p: state[p]["exp_avg"],
    "state[parameter] = ...": lambda state, p: state.__setitem__(p, {}),
    "del state[parameter]": lambda state, p: state.__delitem__(p),
    "state.get(parameter)": lambda state, p: state.get(p, {}),
    "state.values()": lambda state, p: [s["exp_avg"].zero_() for s in state.values()],
    "state.setdefault(...)": lambda state, p: state.setdefault(p, {}),
    "state.pop(...)": lambda state, p: state.pop(p, None),
    "state.popitem()": lambda state, p: state.popitem(),
    "state.clear()": lambda state, p: state.clear(),
    "state.update(...)": lambda state, p: state.update({p: {}}),
    "state |= ...": lambda state, p: state.__ior__({p: {}}),
    "state | ...": lambda state, p: state | {p: {}},
    "state.copy()": lambda state, p: state.copy(),
    "a copy or a pickle": lambda state, p: copy.deepcopy(state),
}


@pytest.mark.parametrize("face", FACES)
def test_a_state_is_neither_read_nor_written_without_a_word(face: str, undisturbed: dict[str, torch.Tensor]) -> None:
    model = net()
    with facing(face, adamw(model), model) as (engine, optimizer):
        advance(engine, [0])
        for call, use in READS_AND_WRITES.items():
            with pytest.raises(StateError, match=r"^optimizer\.state: expected state_dict\(\).* but got") as caught:
                use(optimizer.state, model[0][0].weight)
            assert f"got {call}" in str(caught.value) and "pass it to load_state_dict()" in str(caught.value)
        advance(engine, (1, 2))
        assert_same_tensors(engine.state_dict(), undisturbed)


@pytest.mark.parametrize("face", FACES)
def test_who_looks_for_states_finds_none(face: str) -> None:
    """As Lightning does, which moves those that it finds, and torch's profiler, which asks each parameter's."""
    model = net()
    with facing(face, adamw(model), model) as (engine, optimizer):
        with torch.profiler.profile(profile_memory=True, with_stack=True):
            advance(engine, [0])
        state = optimizer.state
        assert not state and len(state) == 0 and list(state) == list(state.items()) == list(state.keys()) == []
        assert model[0][0].weight not in state and state.get("name", 1) == 1 and dict(state) == {} == {**state}
        assert "use state_dict()" in repr(state) and "Parameter Group 0" in repr(optimizer)
        assert len(optimizer.state_dict()["state"]) == 6
        optimizer.state = optimizer.state  # as accelerate's wrapper may
        advance(engine, [1])


@pytest.mark.parametrize("place", ENGINES)
@pytest.mark.parametrize("face", FACES)
def test_distributed_checkpoints_find_the_states_as_they_are(
    face: str, place: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Torch makes a step on zeros where `state` is empty; the engine's moments must not decay in it."""
    module = pytest.importorskip("torch.distributed.checkpoint.state_dict")
    model = net()
    with facing(face, adamw(model), model, **ENGINES[place](model, tmp_path)) as (engine, optimizer):
        advance(engine, range(2))
        before = optimizer.state_dict()["state"]
        found = module.get_optimizer_state_dict(model, optimizer)
        weights = engine.state_dict()
        for (name, _), state in zip(model.named_parameters(), before.values(), strict=True):
            assert_same_tensors(found["state"][name], state)
        assert engine.stats().step == 2
        advance(engine, [2])
        assert_same_tensors(engine.state_dict(), undisturbed)
    model = net()
    with facing(face, adamw(model), model, **ENGINES[place](model, tmp_path)) as (engine, optimizer):
        engine.load_state_dict(weights)
        module.set_optimizer_state_dict(model, optimizer, found)
        assert engine.stats().step == 0 and optimizer.param_groups[0]["lr"] == LR
        advance(engine, [2])
        assert_same_tensors(engine.state_dict(), undisturbed)


@pytest.mark.parametrize("replace", ["step", "state_dict", "load_state_dict"])
def test_states_that_are_assigned_are_refused(replace: str, undisturbed: dict[str, torch.Tensor]) -> None:
    """At once on the engine's, and by the next call on one that was taken over."""
    model = net()
    given = adamw(model)
    refused = r"^optimizer\.state: expected .* but got state = \.\.\.; to change states"
    with Engine(model, given, **everything_on_device()) as engine:
        advance(engine, [0])
        with pytest.raises(StateError, match=refused):
            engine.optimizer.state = collections.defaultdict(dict)
        saved = given.state_dict()
        given.state = collections.defaultdict(dict)
        if replace == "load_state_dict":
            given.load_state_dict(saved)  # which replaces the states in torch, too
        else:
            engine.backward(loss_of(engine, 1))
            with pytest.raises(StateError, match=refused):
                getattr(given, replace)()
            engine.zero_grad()
        with pytest.raises(StateError, match=r"state\[parameter\]"):
            given.state[model[0][0].weight]
        advance(engine, (1, 2))
        assert_same_tensors(engine.state_dict(), undisturbed)


def test_an_ordinary_optimizer_again_when_the_engine_is_closed() -> None:
    """Its states are lost, and it says so; what is put into it afterwards is the next engine's."""
    model = net()
    optimizer = adamw(model)
    engine = Engine(model, optimizer, **everything_on_device())
    advance(engine, range(2))
    saved = optimizer.state_dict()
    engine.close()
    assert type(optimizer.state) is collections.defaultdict and not optimizer.state
    with pytest.raises(StateError, match=r"it is closed; make a new one and load what engine\.optimizer\.state"):
        optimizer.state_dict()
    del engine
    gc.collect()
    with pytest.raises(StateError, match=r"gone with its states; make a new engine with it, and load what engine"):
        optimizer.state_dict()
    assert "add_param_group" not in vars(optimizer)
    for position, parameter in enumerate(model.parameters()):
        optimizer.state[parameter] = saved["state"][position]
    assert len(optimizer.state_dict()["state"]) == 6
    with Engine(model, optimizer, **everything_on_device()):
        assert {int(state["step"]) for state in optimizer.state_dict()["state"].values()} == {2}
        with pytest.raises(StateError, match=r"state\[parameter\]"):
            optimizer.state[model[0][0].weight]


def test_an_engine_that_could_not_be_made_leaves_the_states() -> None:
    model = net()
    optimizer = adamw(model)
    loss_of(model, 0).backward()
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(BudgetError):
        Engine(model, optimizer, device="cpu", max_memory={"device": 4096, "cpu": 4096})
    assert len(optimizer.state) == len(optimizer.state_dict()["state"]) == 6
    assert optimizer.state[model[0][0].weight]["step"] == 1


KINDS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": adamw,
    "adam": lambda model: torch.optim.Adam(model.parameters(), lr=LR, eps=1e-4),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9),
    "adagrad": lambda model: torch.optim.Adagrad(model.parameters(), lr=LR, eps=1e-4),
    "nadam": lambda model: torch.optim.NAdam(model.parameters(), lr=LR, eps=1e-4),
    "rmsprop": lambda model: torch.optim.RMSprop(model.parameters(), lr=LR, eps=1e-4),
    "maximize": lambda model: torch.optim.Adam(model.parameters(), lr=LR, eps=1e-4, maximize=True),
}
OFF: dict[str, Any] = {"momentum": 0.0}  # what an option is before; others are False
REFUSED_SWITCHES = [
    *((kind, "maximize") for kind in ("adamw", "adam", "sgd", "adagrad")),
    *((kind, "differentiable") for kind in KINDS),
    *((kind, "amsgrad") for kind in ("adamw", "adam", "maximize")),
    ("rmsprop", "centered"),
    ("rmsprop", "momentum"),
]


@pytest.mark.few
@pytest.mark.parametrize(("kind", "switch"), REFUSED_SWITCHES)
@pytest.mark.parametrize("face", FACES)
def test_an_option_that_asks_for_another_step_is_refused(face: str, kind: str, switch: str, tmp_path: Path) -> None:
    model = net()
    own = kind in ("nadam", "rmsprop", "maximize")
    with facing(face, KINDS[kind](model), model, **tight(model, tmp_path, whole=own)) as (engine, optimizer):
        advance(engine, range(2))
        before, states = engine.state_dict(), optimizer.state_dict()
        group = optimizer.param_groups[0]
        off = OFF.get(switch, False)
        on = 0.9 if switch in OFF else True
        group[switch] = on
        engine.backward(loss_of(engine, 2))
        with pytest.raises(
            ConfigError, match=rf"^param group: expected {switch}={off}, as when .* but got {on}; set it"
        ):
            optimizer.step()
        assert_same_tensors(engine.state_dict(), before)
        group[switch] = off
        for position, state in states["state"].items():
            assert_same_tensors(optimizer.state_dict()["state"][position], state)
        with pytest.raises(ConfigError, match=f"expected {switch}={off}"):
            optimizer.load_state_dict({**states, "param_groups": [{**states["param_groups"][0], switch: on}]})
        advance(engine, [2])


def test_the_remedy_for_maximize() -> None:
    """Followed to the letter: the same as in a plain loop that turns round after a step."""
    model = net()
    first = Engine(model, adamw(model), **everything_on_device())
    advance(first, [0])
    first.optimizer.param_groups[0]["maximize"] = True
    first.backward(loss_of(first, 1))
    with pytest.raises(ConfigError, match=r"save engine\.optimizer\.state_dict.*maximize=True; set that again after"):
        first.step()
    saved = first.optimizer.state_dict()
    first.close()
    given = torch.optim.AdamW(model.parameters(), lr=LR, eps=1e-4, maximize=True)
    with Engine(model, given, **everything_on_device()) as engine:
        engine.optimizer.load_state_dict(saved)
        engine.optimizer.param_groups[0]["maximize"] = True
        advance(engine, (1, 2))
        plain = trained_plainly(adamw, range(3), lambda optimizer, _: optimizer.param_groups[0].update(maximize=True))
        assert_near(engine.state_dict(), plain)


HEEDED: dict[str, tuple[str, dict[str, Any]]] = {
    "no longer decoupled": ("adamw", {"decoupled_weight_decay": False, "weight_decay": 0.5}),
    "decoupled": ("adam", {"decoupled_weight_decay": True, "weight_decay": 0.5}),
    "betas": ("adamw", {"betas": (0.5, 0.6), "eps": 1e-3}),
    "nesterov": ("sgd", {"nesterov": True, "momentum": 0.5}),
    "dampening": ("sgd", {"dampening": 0.5, "weight_decay": 0.5}),
    "no longer ascending": ("maximize", {"maximize": False}),
    "ascending": ("nadam", {"maximize": True}),
    "how, and names": ("adamw", {"foreach": True, "capturable": False, "name": "a", "initial_lr": 1, "lr_scale": 2}),
}


@pytest.mark.parametrize("name", HEEDED)
@pytest.mark.parametrize("face", FACES)
def test_options_that_a_step_heeds_may_change(face: str, name: str, tmp_path: Path) -> None:
    kind, options = HEEDED[name]

    def change(optimizer: Any, model: nn.Module) -> None:
        optimizer.param_groups[0].update(options)

    model = net()
    own = kind in ("nadam", "maximize")
    with facing(face, KINDS[kind](model), model, **tight(model, tmp_path, whole=own)) as (engine, optimizer):
        advance(engine, [0])
        change(optimizer, model)
        advance(engine, (1, 2))
        assert_near(engine.state_dict(), trained_plainly(KINDS[kind], range(3), change))


def test_groups_of_adam_may_differ_in_their_decay() -> None:
    def make(model: nn.Module) -> torch.optim.Optimizer:
        first, *rest = model.parameters()
        groups = [{"params": [first], "decoupled_weight_decay": True}, {"params": rest}]
        return torch.optim.Adam(groups, lr=LR, eps=1e-4, weight_decay=0.5)

    model = net()
    with Engine(model, make(model), **everything_on_device()) as engine:
        advance(engine, range(3))
        assert_near(engine.state_dict(), trained_plainly(make, range(3)))


@pytest.mark.parametrize("ours", [True, False])
@pytest.mark.parametrize("saved", ["adam", "adamw"])
@pytest.mark.parametrize("kind", ["adam", "adamw"])
def test_a_dict_of_the_other_adam_says_how_to_decay_as_in_torch(kind: str, saved: str, ours: bool) -> None:
    """Torch's AdamW stays what it is; its Adam becomes what the dict says."""
    model = net()
    plain = KINDS[kind](net())
    packed = KINDS[saved](net()).state_dict()
    plain.load_state_dict(packed)
    spec = {"adam": Adam, "adamw": AdamW}[kind](lr=LR)
    with Engine(model, spec if ours else KINDS[kind](model), **everything_on_device()) as engine:
        engine.optimizer.load_state_dict(packed)
        group = engine.optimizer.param_groups[0]
        assert group["decoupled_weight_decay"] is plain.param_groups[0]["decoupled_weight_decay"]


@pytest.mark.parametrize("place", ENGINES)
@pytest.mark.parametrize("way", ["engine.optimizer", "optimizer", "kept"])
def test_a_step_without_gradients_does_nothing(
    way: str, place: str, undisturbed: dict[str, torch.Tensor], tmp_path: Path
) -> None:
    """Before the first backward, after a forward alone, and where all gradients were taken away; told once."""
    model = net()
    optimizer = adamw(model)
    stepped: list[object] = []
    optimizer.register_step_post_hook(lambda *_: stepped.append(way))
    with Engine(model, optimizer, **ENGINES[place](model, tmp_path)) as engine:
        step = WAYS[way](engine, optimizer)
        scheduler = SCHEDULES["lambda"](optimizer)
        with pytest.warns(UserWarning, match=r"optimizer\.step: no gradient has arrived .*nothing was updated") as told:
            assert step() is None
        scheduler.step()  # which does not warn of a step that is missing
        optimizer.param_groups[0]["lr"] = LR
        assert len(told) == 1
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            for number in range(3):
                with torch.no_grad():
                    loss_of(model, 7)
                loss_of(model, 8)
                step()
                loss_of(model, 9).backward()
                for parameter in model.parameters():
                    parameter.grad = None
                step()
                assert engine.stats().step == number
                loss_of(model, number).backward()
                step()
                assert engine.stats().step == number + 1
        with pytest.raises(StateError, match="step: expected gradients but none has arrived"):
            engine.step()
        engine._manager.check()
        assert_same_tensors(engine.state_dict(), undisturbed)
    assert len(stepped) == 10


def test_what_state_dict_returned_is_a_copy(undisturbed: dict[str, torch.Tensor]) -> None:
    model = net()
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        advance(engine, [0])
        for state in engine.optimizer.state_dict()["state"].values():
            state["exp_avg"].zero_()
        advance(engine, (1, 2))
        assert_same_tensors(engine.state_dict(), undisturbed)


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
