"""Optimizers whose own class makes the steps: what they leave is what they leave in torch, wherever the bytes are.

The arithmetic is torch's own on the same fp32 tensors, so everything is compared with ``torch.equal``. The global norm
is not: the engine adds squares up in float64. So the plain loop takes the norms of the engine's run where it clips.
"""

from __future__ import annotations

import copy
import functools
import types
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import ACTIVATION_BYTES, everything_on_device, host, nvme, run
from models import BY_NAME
from reference import to_bfloat16_half_up
from torch import nn

import offload
from offload import Engine
from offload.activations.rss import open_rss, reset_high_water, trim_heap
from offload.memory.budget import Tier
from offload.optim.step import clip_factor

pytestmark = pytest.mark.usefixtures("single_torch_thread")

Make = Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]
LLAMA = BY_NAME["llama"]


class Custom(torch.optim.Optimizer):
    """A user's own: an argument that is not in the groups, no decorator, states of all kinds."""

    def __init__(self, parameters: Iterable[nn.Parameter], lr: float, *, gain: float) -> None:
        super().__init__(parameters, {"lr": lr})
        self.gain = gain

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                state = self.state[p]
                with torch.no_grad():
                    if not state:
                        state.update(seen=0, slow=p.clone(), sizes=[torch.zeros(()), {"last": p.new_zeros(1)}])
                    state["seen"] += 1
                    state["signs"] = p.grad.sign().to(torch.int8)
                    state["sizes"][0] = p.grad.abs().mean()
                    state["sizes"][1]["last"] += p.mean()
                    state["gradient"] = p.grad  # not a copy
                    if "turn" not in state:
                        state.update(turn=p.clone(), other=torch.zeros_like(p))
                    state["turn"], state["other"] = state["other"].add_(p), state["turn"]  # exchanged
                    p -= group["lr"] * self.gain * (p.grad + 0.1 * state["sizes"][0] * state["signs"])
                    state["slow"] = state["slow"].lerp(p, 0.5) + 0.0 * state["seen"]  # a new tensor


CLASSES: dict[str, Make] = {
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=1e-3, momentum=0.9, centered=True),
    "nadam": lambda p: torch.optim.NAdam(p, lr=1e-3, weight_decay=0.1),
    "radam": lambda p: torch.optim.RAdam(p, lr=1e-2),
    "adadelta": lambda p: torch.optim.Adadelta(p, lr=1.0),
    "adamax": lambda p: torch.optim.Adamax(p, lr=1e-3, weight_decay=0.1),
    "asgd": lambda p: torch.optim.ASGD(p, lr=1e-2, t0=1),
    "rprop": lambda p: torch.optim.Rprop(p, lr=1e-4),
    "adafactor": lambda p: torch.optim.Adafactor(p, lr=1e-2),
    "muon": lambda p: torch.optim.Muon([matrix for matrix in p if matrix.dim() == 2], lr=1e-2),
    "amsgrad": lambda p: torch.optim.AdamW(p, lr=1e-3, amsgrad=True),
    "maximize": lambda p: torch.optim.Adam(p, lr=1e-4, maximize=True),
    "maximize sgd": lambda p: torch.optim.SGD(p, lr=1e-3, momentum=0.9, nesterov=True, maximize=True),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=1e-2, initial_accumulator_value=0.1),
    "custom": lambda p: Custom(p, 1e-2, gain=2.0),
}
# As many states of the parameter's shape as are placed.
PLACED = {
    "custom": 4,
    "rmsprop": 3,
    "asgd": 1,
    "adafactor": 0,
    "muon": 1,
    "amsgrad": 3,
    "maximize sgd": 1,
    "adagrad": 1,
}
PLACES = {"device": Tier.DEVICE, "host": Tier.HOST, "nvme": Tier.NVME, "mixed": Tier.NVME}
SOME = ("rmsprop", "adafactor", "custom")


def llama(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = LLAMA.build().to(dtype)
    return model


def placements(model: nn.Module, path: Path) -> dict[str, dict[str, Any]]:
    name = str(next(model.parameters()).dtype).removeprefix("torch.")
    return {
        "device": everything_on_device(),
        "host": host(model, whole=True),
        "nvme": nvme(model, path, whole=True, dtype=name),
        "mixed": {**nvme(model, path, whole=True, dtype=name), "offload_param": "cpu"},
    }


def plain(
    model: nn.Module,
    data: Sequence[dict[str, Any]],
    make: Make,
    *,
    norms: Sequence[float] = (),
    max_norm: float | None = None,
    accumulation: int = 1,
    scale: float = 1.0,
) -> tuple[list[torch.Tensor], torch.optim.Optimizer]:
    """Train with fp32 masters in plain torch; one factor on the gradient, of given norms."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float().clone()) for p in trainable]
    optimizer = make(masters)
    losses = []
    for number, batch in enumerate(data):
        loss = model(**batch).loss
        losses.append(loss.detach().clone())
        (loss * scale).backward()
        for parameter, master in zip(trainable, masters, strict=True):
            gradient, parameter.grad = parameter.grad, None
            if gradient is not None:
                master.grad = gradient.float() if master.grad is None else master.grad + gradient.float()
        if (number + 1) % accumulation:
            continue
        norm = norms[number // accumulation] if norms else 0.0
        factor = clip_factor(norm, max_norm) * (1.0 / (accumulation * scale))
        for master in masters:
            if master.grad is not None:
                master.grad.mul_(factor)
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for parameter, master in zip(trainable, masters, strict=True):
                rounded = to_bfloat16_half_up(master) if parameter.dtype == torch.bfloat16 else master
                parameter.copy_(rounded)
    return losses, optimizer


def assert_same_state(ours: Any, theirs: Any) -> None:
    """Compare states of any kind, bit by bit and type by type; an fp32 master is the engine's own affair."""
    if isinstance(theirs, dict):
        assert ours.keys() - ({"master"} - theirs.keys()) == theirs.keys()
        for key, value in theirs.items():
            assert_same_state(ours[key], value)
    elif isinstance(theirs, torch.Tensor):
        assert ours.dtype == theirs.dtype and torch.equal(ours, theirs)
    elif isinstance(theirs, (list, tuple)):
        assert type(ours) is type(theirs) and len(ours) == len(theirs)
        for left, right in zip(ours, theirs, strict=True):
            assert_same_state(left, right)
    else:
        assert type(ours) is type(theirs) and ours == theirs


def check_parity(name: str, dtype: torch.dtype, place: str, path: Path, **options: Any) -> None:
    make = CLASSES[name]
    accumulation = options.get("gradient_accumulation_steps", 1)
    data = [LLAMA.batch(number) for number in range(3 * accumulation)]
    model = llama(dtype)
    ours = run(model, data, optimizer=make(model.parameters()), **options, **placements(model, path)[place])
    homes = {home.states for home in ours.plan.homes} | {home.param for home in ours.plan.homes}
    assert PLACES[place] in homes
    assert place != "mixed" or len(homes) > 1
    truth = llama(dtype)
    losses, optimizer = plain(
        truth,
        data,
        make,
        norms=ours.norms,
        max_norm=options.get("max_grad_norm"),
        accumulation=accumulation,
        scale=options.get("initial_loss_scale", 1.0) if dtype == torch.float16 else 1.0,
    )
    assert all(torch.equal(mine, other) for mine, other in zip(ours.losses, losses, strict=True))
    for key, parameter in truth.named_parameters():
        assert torch.equal(ours.parameters[key], parameter), key
    assert_same_state(ours.states, optimizer.state_dict()["state"])
    assert not list(path.iterdir())


# --- parity -----------------------------------------------------------------------------------------------------------


@pytest.mark.few(18)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CLASSES)
def test_a_class_of_torch_leaves_what_it_leaves_in_torch(name: str, place: str, tmp_path: Path) -> None:
    check_parity(name, torch.float32, place, tmp_path)


@pytest.mark.few(6)
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SOME)
def test_16_bit_models_have_fp32_masters(name: str, dtype: torch.dtype, place: str, tmp_path: Path) -> None:
    """With clipping, accumulation and a loss scale: one factor on the gradient."""
    options = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "initial_loss_scale": 256.0}
    check_parity(name, dtype, place, tmp_path, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_states_of_the_parameters_shape_are_placed(name: str) -> None:
    """2 bytes of parameter, 2 of gradient, 2 of master, 4 for each state; the rest is small, and in the plan."""
    model = llama(torch.bfloat16)
    with Engine(model, CLASSES[name](model.parameters()), **everything_on_device()) as engine:
        numel = sum(unit.numel for unit in engine.plan.request.units)
        size = 6 + 4 * PLACED.get(name, 2)
        assert engine.plan.arena_bytes[Tier.DEVICE] == size * numel
        own = engine.plan.request.own
        assert own is not None and own.name == type(CLASSES[name](model.parameters())).__name__
        used = engine.stats().used_bytes["cpu"]
        assert used == engine.plan.arena_bytes[Tier.HOST] + engine.plan.request.own_bytes
        assert f"torch's own {own.name}" in str(engine.plan)
        engine.backward(engine(**LLAMA.batch(0)).loss)
        engine.step()
        kept = [t for s in engine.optimizer.state_dict()["state"].values() for k, t in s.items() if k != "master"]
        bytes_kept = sum(tensor.nbytes for tensor in tensors_of(kept))
        placed = 4 * sum(p.numel() for p in model.parameters() if name != "muon" or p.dim() == 2) * PLACED.get(name, 2)
        assert bytes_kept - placed == own.kept_bytes
        assert engine.stats().used_bytes["cpu"] == used, "nothing was unforeseen"


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    items = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    return [tensor for item in items for tensor in tensors_of(item)]


# --- what training means ----------------------------------------------------------------------------------------------


class Branches(nn.Module):
    """One of two branches per batch: the other's parameters get no gradient. A frozen layer, scalars, an empty one."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.branches = nn.ModuleList(nn.Linear(24, 24) for _ in range(2))
        self.frozen = nn.Linear(24, 24).requires_grad_(False)
        self.gain = nn.Parameter(torch.tensor(1.5))
        self.nothing = nn.Parameter(torch.zeros(0, 3))
        self.cube = nn.Parameter(torch.randn(2, 3, 4))

    def forward(self, x: torch.Tensor, branch: int) -> Any:
        y = self.frozen(torch.tanh(self.branches[branch](x))) * self.gain + self.cube.flatten() + self.nothing.sum()
        return type("Output", (), {"loss": y.sub(1).pow(4).mean()})


def branch_batch(number: int) -> dict[str, Any]:
    return {"x": torch.randn(4, 24, generator=torch.Generator().manual_seed(number)), "branch": number % 2}


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad and p.numel()]


def two_groups(make: Callable[..., torch.optim.Optimizer], model: nn.Module) -> torch.optim.Optimizer:
    parameters = trained(model)
    return make([{"params": parameters[:2], "lr": 3e-3}, {"params": parameters[2:]}])


@pytest.mark.parametrize(
    "make",
    [
        lambda g: torch.optim.RMSprop(g, lr=1e-3, momentum=0.5),
        lambda g: torch.optim.Adafactor(g, lr=1e-2),
        lambda g: torch.optim.NAdam(g, lr=torch.tensor(1e-3)),
    ],
)
def test_groups_schedules_and_parameters_without_gradient(make: Any, tmp_path: Path) -> None:
    """As in plain torch, with a scheduler that was made before the engine, and a hook on the user's optimizer."""
    plain_model, model = Branches(), Branches()
    theirs, given = two_groups(make, plain_model), two_groups(make, model)
    schedulers = [torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5) for optimizer in (theirs, given)]
    stepped: list[Any] = []
    given.register_step_post_hook(lambda optimizer, *_: stepped.append(optimizer))
    room = {"device": "cpu", "max_memory": {"device": ACTIVATION_BYTES + (1 << 20), "cpu": "16MiB", "nvme": "64MiB"}}
    room |= {"nvme_path": tmp_path, "offload_param": "nvme", "offload_optimizer": "nvme"}
    with Engine(model, given, activation_memory=ACTIVATION_BYTES, **room) as engine:
        for number in (0, 0, 1, 0, 1):
            plain_model(**branch_batch(number)).loss.backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(engine(**branch_batch(number)).loss)
            engine.step()
            for scheduler in schedulers:
                scheduler.step()
            engine._manager.check()
            ours = engine.state_dict()
            for key, value in plain_model.state_dict().items():
                assert torch.equal(ours[key], value), key
        expected, found = theirs.state_dict(), engine.optimizer.state_dict()
    assert stepped == [given] * 5  # once per step, not once per parameter
    assert_same_state(found["state"], expected["state"])
    assert [group["lr"] for group in found["param_groups"]] == [group["lr"] for group in expected["param_groups"]]


def test_options_are_those_of_the_step_whatever_happens_before_the_update(tmp_path: Path) -> None:
    model, other = llama(), llama()
    data = [LLAMA.batch(number) for number in range(2)]
    _, _ = plain(other, data, CLASSES["rmsprop"])
    given = CLASSES["rmsprop"](model.parameters())
    with Engine(model, given, **nvme(model, tmp_path, whole=True)) as engine:
        for batch in data:
            engine.backward(engine(**batch).loss)
            given.param_groups[0]["lr"] = 1e-3
            engine.step()
            given.param_groups[0]["lr"] = 1e9  # the update has not been made yet
        ours = engine.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in other.named_parameters())


def test_room_is_held_for_a_group_that_is_added() -> None:
    """As much as if the class had had it from the beginning, where the states that are placed are the same."""
    model, other, whole = Branches(), Branches(), Branches()
    adafactor = functools.partial(torch.optim.Adafactor, lr=1e-2)
    given, theirs = adafactor([model.gain]), adafactor([other.gain])
    with Engine(whole, adafactor(p for p in trained(whole)), **everything_on_device()) as engine:
        planned_bytes = engine._manager.tiers.optimizer_claim.size_bytes
    with Engine(model, given, **everything_on_device()) as engine:
        claim = engine._manager.tiers.optimizer_claim
        names = engine.optimizer.rule.names
        for optimizer, of in ((theirs, other), (given, model)):
            more = [p for p in trained(of) if p is not of.gain]
            optimizer.add_param_group({"params": more, "lr": 1e-3})
        held_bytes = claim.size_bytes
        for number in range(3):
            other(**branch_batch(number)).loss.backward()
            theirs.step()
            theirs.zero_grad()
            engine.backward(engine(**branch_batch(number)).loss)
            engine.step()
        found = engine.state_dict()
        assert all(torch.equal(found[key], value) for key, value in other.state_dict().items())
        assert claim.size_bytes == held_bytes, "nothing was unforeseen"
        assert names == () and held_bytes >= planned_bytes > 4096


def test_a_group_with_nothing_to_train_changes_nothing() -> None:
    model = Branches()
    given = torch.optim.Adafactor([model.branches[0].weight], lr=1e-2)
    with Engine(model, given, **everything_on_device()) as engine:
        records = engine._parts.steps.counts.records
        required, held_bytes = records.required, engine._manager.tiers.optimizer_claim.size_bytes
        model.cube.requires_grad_(False)
        given.add_param_group({"params": [model.cube]})
        assert required and records.required == required
        assert engine._manager.tiers.optimizer_claim.size_bytes == held_bytes


def unable(engine: Engine, optimizer: torch.optim.Optimizer, added: dict[str, Any]) -> None:
    with pytest.raises(offload.ConfigError, match=r"expected Muon to step on dense tensors with 3 dimensions"):
        optimizer.add_param_group(added)


def too_large(engine: Engine, optimizer: torch.optim.Optimizer, added: dict[str, Any]) -> None:
    budget = engine._manager.tiers.optimizer_claim.budget
    with budget.claim("others", budget.limit_bytes - budget.used_bytes), pytest.raises(offload.BudgetError):
        optimizer.add_param_group(added)


def refused_by_its_class(engine: Engine, optimizer: torch.optim.Optimizer, added: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match="this class takes no more"):
        optimizer.add_param_group(added)


class Complete(torch.optim.Adafactor):
    """Has all that it will have."""

    def add_param_group(self, group: dict[str, Any]) -> None:
        if getattr(self, "is_made", False):
            raise TypeError("this class takes no more")
        super().add_param_group(group)


UNABLE: dict[str, tuple[Any, Any]] = {
    "class": (torch.optim.Muon, unable),
    "room": (torch.optim.Adafactor, too_large),
    "its own": (Complete, refused_by_its_class),
}


@pytest.mark.parametrize("why", UNABLE)
def test_a_group_that_its_class_cannot_train_is_refused_when_it_is_added(why: str) -> None:
    """Nothing is changed, and training goes on."""
    make, refused = UNABLE[why]
    model = Branches()
    given = make([model.branches[0].weight], lr=1e-2)
    given.is_made = True
    with Engine(model, given, **everything_on_device()) as engine:
        claim = engine._manager.tiers.optimizer_claim
        held_bytes = claim.size_bytes
        refused(engine, given, {"params": [model.cube]})
        assert claim.size_bytes == held_bytes and len(given.param_groups) == 1
        engine.backward(engine(**branch_batch(0)).loss)
        assert engine.step()


class Scaled(torch.optim.Optimizer):
    """A user's own, with attributes that decide on its steps."""

    def __init__(self, parameters: Iterable[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": 1e-2})
        self.scale, self._held, self.extra = 1.0, types.SimpleNamespace(shift=[0.0]), 0.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    factor = self.scale + self._held.shift[0] + getattr(self, "extra", 3.0) + getattr(self, "late", 0.0)
                    p -= group["lr"] * factor * p.grad


CHANGES: dict[str, Callable[[Any, float], Any]] = {
    "number": lambda optimizer, x: setattr(optimizer, "scale", x),
    "of an object": lambda optimizer, x: optimizer._held.shift.__setitem__(0, x),
    "object": lambda optimizer, x: setattr(optimizer, "_held", types.SimpleNamespace(shift=[x])),
    "a new one": lambda optimizer, x: setattr(optimizer, "late", x),
    "not there": lambda optimizer, x: vars(optimizer).pop("extra", None),
}


@pytest.mark.parametrize("change", CHANGES)
def test_attributes_are_those_of_the_step(change: str, tmp_path: Path) -> None:
    """What is changed before a step counts, and what is changed after it, before the update, does not."""
    model, other = llama(), llama()
    given, theirs = Scaled(model.parameters()), Scaled(other.parameters())
    with Engine(model, given, **nvme(model, tmp_path, whole=True)) as engine:
        for number in range(3):
            other(**LLAMA.batch(number)).loss.backward()
            engine.backward(engine(**LLAMA.batch(number)).loss)
            for optimizer in (theirs, given):
                CHANGES[change](optimizer, 2.0 + number)
            theirs.step()
            engine.step()
            theirs.zero_grad()
            if change != "not there":
                CHANGES[change](given, 1e9)  # the update has not been made yet
        ours = engine.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in other.named_parameters())


def test_attributes_that_no_copy_can_have() -> None:
    """They are refused by the step, if the class has them; what others have hung on the optimizer is left alone."""
    model = llama()
    given = Scaled(model.parameters())
    with Engine(model, given, **everything_on_device()) as engine:
        before = engine.state_dict()
        given.trainer = types.SimpleNamespace(model=model)  # type: ignore[attr-defined]
        engine.backward(engine(**LLAMA.batch(0)).loss)
        engine.step()
        after = engine.state_dict()
        assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])
        engine.backward(engine(**LLAMA.batch(1)).loss)
        held, given._held = given._held, types.SimpleNamespace(shift=[0.0], first=next(iter(model.parameters())))
        with pytest.raises(offload.ConfigError, match=r"keep parameters in its groups only but it has some in an attr"):
            engine.step()
        assert all(torch.equal(value, after[key]) for key, value in engine.state_dict().items())
        given._held = held
        engine.backward(engine(**LLAMA.batch(1)).loss)
        assert engine.step()


class Multiplied(torch.optim.Optimizer):
    """A user's own, with learning rates by parameter, and some that it knows by name."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 1e-2})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p, name in zip(group["params"], group["param_names"], strict=True):
                if p.grad is None:
                    continue
                factor = getattr(p, "more", [1.0])[0] * p.lr_mult
                if "norm" not in name:
                    factor *= 0.5
                if p.lr_mult > 1:
                    self.state[p]["kept"] = p.clone()
                p -= group["lr"] * factor * p.grad


def multiplied(model: nn.Module) -> Multiplied:
    for number, p in enumerate(model.parameters()):
        p.lr_mult = number % 3 + 0.5  # type: ignore[attr-defined]
    names = dict(model.named_parameters())
    norms = [name for name in names if "norm" in name]
    others = [name for name in names if "norm" not in name]
    return Multiplied([{"params": [(name, names[name]) for name in some]} for some in (norms, others)])


@pytest.mark.parametrize("place", PLACES)
def test_a_class_may_ask_for_a_parameters_attributes_and_name(place: str, tmp_path: Path) -> None:
    """Those of the step: what is changed after it, before the update, does not count."""
    model, other = llama(), llama()
    given, theirs = multiplied(model), multiplied(other)
    with Engine(model, given, **placements(model, tmp_path)[place]) as engine:
        for number in range(3):
            other(**LLAMA.batch(number)).loss.backward()
            engine.backward(engine(**LLAMA.batch(number)).loss)
            for side in (model, other):
                for p in side.parameters():
                    p.more = [1.0 + number]  # type: ignore[attr-defined]
            theirs.step()
            engine.step()
            theirs.zero_grad()
            for p in model.parameters():
                p.more[0] = 1e9  # type: ignore[attr-defined]
        ours, states = engine.state_dict(), engine.optimizer.state_dict()["state"]
    assert all(torch.equal(ours[key], value) for key, value in other.named_parameters())
    assert_same_state({number: state for number, state in states.items() if state}, theirs.state_dict()["state"])


def autocast() -> Any:
    return torch.autocast("cpu", dtype=torch.bfloat16)


class Clearing(torch.optim.RMSprop):
    """A user's own that drops gradients itself."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.zero_grad()


def test_a_class_that_clears_gradients_is_taken_over_twice() -> None:
    """What an engine puts in the place of `zero_grad` is none of the class's."""
    results = []
    for times in (1, 2):
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        optimizer = Clearing(model.parameters(), lr=0.1)
        engines = []
        for _ in range(times):  # the former ones stay alive
            engines.append(Engine(model, optimizer, **everything_on_device()))
            if len(engines) < times:
                engines[-1].close()
        for _ in range(2):
            engines[-1].backward(engines[-1](torch.ones(2, 8)).square().sum())
            engines[-1].step()
        results.append(engines[-1].state_dict()["weight"])
        engines[-1].close()
    assert torch.equal(*results)


@pytest.mark.few
@pytest.mark.parametrize("context", [torch.no_grad, autocast], ids=["no_grad", "autocast"])
@pytest.mark.parametrize("name", ["adafactor", "muon", "custom"])
def test_an_update_inside_a_forward_knows_nothing_of_its_contexts(name: str, context: Any, tmp_path: Path) -> None:
    data = [LLAMA.batch(number) for number in range(3)]
    truth = llama()
    plain(truth, data, CLASSES[name])
    model = llama()
    with Engine(model, CLASSES[name](model.parameters()), **nvme(model, tmp_path, whole=True)) as engine:
        for batch in data:
            engine.backward(engine(**batch).loss)
            engine.step()
            assert engine._manager.forward.active
            with context():
                engine(**batch)  # makes the updates
        ours = engine.state_dict()
    assert all(torch.equal(ours[key], value) for key, value in truth.named_parameters())


def test_overflow_of_float16_skips_the_step() -> None:
    model = llama(torch.float16)
    with Engine(model, CLASSES["nadam"](model.parameters()), initial_loss_scale=2.0**40, **everything_on_device()) as e:
        before = e.state_dict()
        e.backward(e(**LLAMA.batch(0)).loss)
        assert not e.step()
        assert e.optimizer.state_dict()["state"] == {}
        assert all(torch.equal(value, before[key]) for key, value in e.state_dict().items())


# --- states in and out ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", CLASSES)
def test_two_steps_in_torch_two_in_the_engine_two_in_torch(name: str, tmp_path: Path) -> None:
    """As six in torch: states are taken over, and given back in torch's own format."""
    make = CLASSES[name]

    def steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
        for number in numbers:
            optimizer.zero_grad()
            model(**LLAMA.batch(number)).loss.backward()
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))  # torch casts integers

    truth = llama()
    optimizer = make(truth.parameters())
    steps(truth, optimizer, range(2))
    model = copy.deepcopy(truth)
    given = make(model.parameters())
    given.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with Engine(model, given, **nvme(model, tmp_path, whole=True)) as engine:
        assert not given.state
        assert_same_state(engine.optimizer.state_dict()["state"], optimizer.state_dict()["state"])
        for number in range(2, 4):
            engine.backward(engine(**LLAMA.batch(number)).loss)
            engine.step()
        packed = engine.optimizer.state_dict()
    back = make(model.parameters())
    back.load_state_dict(packed)
    steps(model, back, range(4, 6))
    steps(truth, optimizer, range(2, 4))
    steps(truth, optimizer, range(4, 6))
    for key, value in truth.named_parameters():
        assert torch.equal(dict(model.named_parameters())[key], value), key
    assert_same_state(back.state_dict()["state"], optimizer.state_dict()["state"])


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", SOME)
def test_a_run_goes_on_from_a_file_in_another_placement(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    make, options = CLASSES[name], {"initial_loss_scale": 8.0}

    def steps(engine: Engine, numbers: Iterable[int]) -> None:
        for number in numbers:
            engine.backward(engine(**LLAMA.batch(number)).loss)
            assert engine.step()

    model = llama(dtype)
    with Engine(model, make(model.parameters()), **options, **everything_on_device()) as whole:
        steps(whole, range(4))
        truth, states = whole.state_dict(), whole.optimizer.state_dict()
    model = llama(dtype)
    swap = tmp_path / "swap"
    swap.mkdir()
    place = nvme(model, swap, whole=True, dtype=str(dtype).removeprefix("torch."))
    with Engine(model, make(model.parameters()), **options, **place) as first:
        steps(first, range(2))
        torch.save((first.state_dict(), first.optimizer.state_dict()), tmp_path / "saved")
        saved = copy.deepcopy(first.optimizer.state_dict())
        steps(first, range(2, 3))  # changes nothing of what was returned
        assert_same_state(torch.load(tmp_path / "saved", weights_only=False)[1]["state"], saved["state"])
    model = llama(dtype)
    with Engine(model, make(model.parameters()), **options, **everything_on_device()) as second:
        steps(second, range(7, 9))  # something else, which goes
        parameters, packed = torch.load(tmp_path / "saved", weights_only=False)
        second.load_state_dict(parameters)
        second.optimizer.load_state_dict(packed)
        steps(second, range(2, 4))
        assert all(torch.equal(value, truth[key]) for key, value in second.state_dict().items())
        assert_same_state(second.optimizer.state_dict()["state"], states["state"])
        second.optimizer.load_state_dict({"state": {}, "param_groups": packed["param_groups"]})
        assert second.optimizer.state_dict()["state"] == {}


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda state: state.pop("square_avg"), "optimizer state lacks 'square_avg'"),
        (lambda state: state.update(square_avg=torch.zeros(3)), r"expected square_avg of shape \(.*\) but got \(3,\)"),
    ],
)
def test_states_that_do_not_fit_are_refused(change: Any, text: str) -> None:
    model = llama()
    with Engine(model, CLASSES["rmsprop"](model.parameters()), **everything_on_device()) as engine:
        engine.backward(engine(**LLAMA.batch(0)).loss)
        engine.step()
        packed = engine.optimizer.state_dict()
        wrong = copy.deepcopy(packed)
        change(wrong["state"][1])
        with pytest.raises(offload.ConfigError, match=text):
            engine.optimizer.load_state_dict(wrong)
        assert_same_state(engine.optimizer.state_dict()["state"], packed["state"])


# --- budgets ----------------------------------------------------------------------------------------------------------


def test_a_budget_without_room_for_temporaries_is_refused_with_the_one_that_does() -> None:
    model = llama()
    options: dict[str, Any] = {"device": "cpu", "max_memory": {"device": "64MiB", "cpu": 4096}}
    with pytest.raises(
        offload.BudgetError, match="of temporaries while RMSprop updates its largest parameter"
    ) as caught:
        Engine(model, CLASSES["rmsprop"](model.parameters()), **options)
    assert not any(p.is_meta or p.stride() == (0, 0) for p in model.parameters()), "nothing was loaded"
    smallest = int(str(caught.value).split("would do is ")[1].split()[0])
    options["max_memory"]["cpu"] = smallest - 4096
    with pytest.raises(offload.BudgetError, match="small states"):
        Engine(model, CLASSES["rmsprop"](model.parameters()), **options)
    options["max_memory"]["cpu"] = smallest
    run(model, [LLAMA.batch(0)], optimizer=CLASSES["rmsprop"](model.parameters()), **options)


def reset_peak() -> None:
    try:
        reset_high_water()
    except OSError as error:
        pytest.skip(f"the kernel does not measure peaks anew: {error}")


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", ["rmsprop", "nadam", "adafactor", "muon", "amsgrad"])
def test_an_update_takes_no_more_memory_than_is_planned(name: str, dtype: torch.dtype) -> None:
    """16 MiB per fp32 tensor of the one large parameter; 4 MiB for what torch and the C library keep for themselves."""
    meter = open_rss()
    if meter is None or not meter.high_water_bytes():
        pytest.skip("the kernel does not tell the resident set")
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 2048, bias=False)).to(dtype)
    options: dict[str, Any] = {"device": "cpu", "max_memory": {"device": "1GiB", "cpu": "1GiB"}}
    options |= {"offload_param": "cpu", "offload_optimizer": "cpu"}
    with Engine(model, CLASSES[name](model.parameters()), **options) as engine:
        planned = engine.plan.request.own_bytes
        assert planned >= 2 * (16 << 20)
        for number in range(3):
            x = torch.randn(4, 2048, generator=torch.Generator().manual_seed(number)).to(dtype)
            engine.backward(engine(x).float().pow(2).mean())
            engine.step()
            trim_heap()
            reset_peak()
            before = meter.now_bytes()
            engine.drain()
            assert meter.high_water_bytes() - before <= planned + (4 << 20)


def test_temporaries_of_updates_inside_a_forward_do_not_count_for_the_device(tmp_path: Path) -> None:
    """RMSprop takes five tensors of 32 MiB beside the gradient's while the forward waits; activations are tiny."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(2048, 4096, bias=False))
    options: dict[str, Any] = {"device": "cpu", "activation_memory": "24MiB", "offload_optimizer": "cpu"}
    options["max_memory"] = {"device": (24 + 32) << 20, "cpu": "1GiB"}
    with Engine(model, CLASSES["rmsprop"](model.parameters()), offload_param="cpu", **options) as engine:
        assert engine.plan.request.own_bytes > 160 << 20
        for number in range(4):
            x = torch.randn(2, 2048, generator=torch.Generator().manual_seed(number))
            engine.backward(engine(x).pow(2).mean())
            engine.step()


def test_an_error_of_the_class_is_raised_by_the_step_that_it_loses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also a RuntimeError, as errors of devices are, which others meet later: here nobody could."""

    def diverge(*_: object) -> None:
        raise RuntimeError("it diverged")

    model = nn.Linear(4, 4)
    with Engine(model, Custom(model.parameters(), 1e-2, gain=2.0), **everything_on_device()) as engine:
        engine.backward(engine(torch.ones(1, 4)).sum())
        monkeypatch.setattr(Custom, "step", diverge)
        with pytest.raises(RuntimeError, match="it diverged") as caught:
            engine.step()
        assert caught.traceback[-1].name == "diverge"
        with pytest.raises(offload.StateError, match="a step failed half way.*it diverged"):
            engine(torch.ones(1, 4))
