"""A reference model beside the one that trains: both in one engine's memory, evaluated only, and in no checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, batch, everything_on_device, host, tight
from torch import nn

from offload import AdamW, BudgetError, ConfigError, Engine, StateError
from offload.memory.budget import Tier
from offload.planning.partition import WithReference, find_units
from offload.planning.roles import Role

pytestmark = pytest.mark.usefixtures("single_torch_thread")

STEPS = 4


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


def net(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(*[Layer() for _ in range(5)])


def loss_of(model: nn.Module, reference: nn.Module, number: int) -> torch.Tensor:
    output = model(batch(number))  # first, as DPO does: the other forward comes between it and its backward
    with torch.no_grad():
        target = reference(batch(number))
    return (output - target).square().mean() + output.sub(1).square().mean()


def train(engine: Engine, first: int = 0, last: int = STEPS) -> list[float]:
    assert engine.reference is not None
    losses = []
    for number in range(first, last):
        loss = loss_of(engine.module, engine.reference, number)
        losses.append(loss.item())
        loss.backward()
        engine.optimizer.step()
        engine.optimizer.zero_grad()
        engine._manager.check()
    return losses


def plain() -> tuple[list[float], nn.Module]:
    model, reference = net(), net(1)
    optimizer = torch.optim.NAdam(model.parameters(), lr=1e-2)  # it steps itself, with the bits of a plain loop
    losses = []
    for number in range(STEPS):
        loss = loss_of(model, reference, number)
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return losses, model


def by_torch(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.NAdam(model.parameters(), lr=1e-2)


def assert_same(found: dict[str, torch.Tensor], wanted: nn.Module) -> None:
    truth = wanted.state_dict()
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        assert torch.equal(found[name], value), name


PLACES: dict[str, Callable[[nn.Module, Path], dict[str, Any]]] = {
    "device": lambda model, path: everything_on_device(),
    "host": lambda model, path: host(model),
    "nvme": tight,
}


@pytest.mark.parametrize("place", PLACES)
def test_bits_are_those_of_a_plain_loop(place: str, tmp_path: Path) -> None:
    losses, trained = plain()
    model, reference = net(), net(1)
    with Engine(model, by_torch(model), reference=reference, **PLACES[place](model, tmp_path)) as engine:
        assert train(engine) == losses
        assert_same(engine.state_dict(), trained)
        assert_same(reference.state_dict(), net(1))
    assert_same(model.state_dict(), trained)
    assert_same(reference.state_dict(), net(1))


def test_there_is_one_working_region(tmp_path: Path) -> None:
    """The budgets of one model have both: what is at home on NVMe takes no further memory."""
    plans = {}
    for both in (False, True):
        model, reference = net(), net(1)
        options = tight(model, tmp_path)  # for three units of the model
        with Engine(model, AdamW(lr=1e-2), reference=reference if both else None, **options) as engine:
            plans[both] = engine.plan
            if both:
                train(engine)
                stats = engine.stats()
    for tier in (Tier.DEVICE, Tier.HOST):
        assert plans[True].arena_bytes[tier] == plans[False].arena_bytes[tier], tier
    region = plans[True].working_bytes
    assert region == plans[False].working_bytes == 3 * plans[True].request.units[0].param_bytes
    own = [unit for unit in plans[True].request.units if not unit.reference]
    beside = [unit for unit in plans[True].request.units if unit.reference]
    assert [unit.name for unit in own] == [unit.name for unit in plans[False].request.units]
    assert sum(unit.param_bytes for unit in beside) == sum(unit.param_bytes for unit in own) > region
    assert not any(unit.trainable for unit in beside)
    homes = {plans[True].home(unit, Role.PARAM) for unit in beside}
    states = {plans[True].home(unit, Role.EXP_AVG) for unit in beside}
    assert (homes, states) == ({Tier.NVME}, {None})
    assert stats.peak_bytes["device"] <= stats.budget_bytes["device"] == options["max_memory"]["device"]
    assert stats.used_bytes["device"] < 2 * region


def test_names_are_those_without_it() -> None:
    model, reference = net(), net(1)
    alone = find_units(model, max_unit_bytes=4608)
    tree = find_units(WithReference(model, reference), max_unit_bytes=4608)
    count = len(alone.units)
    assert tree.units[:count] == alone.units and len(tree.units) == 2 * count
    assert {unit.name.partition(".")[0] for unit in tree.units[count:]} == {"(reference)"}
    assert set(tree.leases) == {*model.modules(), *reference.modules()}
    slots = [slot.name for slot in tree.units[count].slots]
    assert slots == ["(reference).0.linear.weight", "(reference).0.linear.bias"]


@pytest.mark.parametrize("wait", [True, False])
def test_checkpoints_have_the_model_alone(wait: bool, tmp_path: Path) -> None:
    model, reference = net(), net(1)
    options = {**tight(model, tmp_path), "background_checkpoints": not wait}
    with Engine(model, AdamW(lr=1e-2), reference=reference, **options) as engine:
        losses = train(engine, 0, 2)
        saved = engine.save_checkpoint(tmp_path / "saved", wait=wait)
        if not wait:
            saved.wait()
        losses += train(engine, 2)
        digests = engine.digests()
    assert not any(b"reference" in file.read_bytes() for file in (tmp_path / "saved").rglob("*") if file.is_file())

    model, reference = net(5), net(1)
    with Engine(model, AdamW(lr=1e-2), reference=reference, **options) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert train(engine, 2) == losses[2:]
        assert engine.digests() == digests
    model = net(6)
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        names = engine.digests()
        engine.save_checkpoint(tmp_path / "alone")
    assert names.keys() == {name for name in digests if not name.startswith("(reference)")} < digests.keys()

    model, reference = net(5), net(1)
    with Engine(model, AdamW(lr=1e-2), reference=reference, **options) as engine:
        engine.load_checkpoint(tmp_path / "alone")
        assert train(engine, 2) == losses[2:]


def test_a_durable_run_goes_on(tmp_path: Path) -> None:
    found = []
    for path, stops in ((tmp_path / "whole", (STEPS,)), (tmp_path / "parts", (2, STEPS))):
        begin = 0
        losses: list[float] = []
        for end in stops:
            model, reference = net(), net(1)
            options = {**tight(model, tmp_path), "run_dir": path, "nvme_path": None}
            del options["offload_param"], options["offload_optimizer"]
            with Engine(model, AdamW(lr=1e-2), reference=reference, **options) as engine:
                losses += train(engine, begin, end)
                digests = engine.digests()
            begin = end
        found.append((losses, digests))
    assert found[0] == found[1]


def test_dicts_have_the_model_alone(tmp_path: Path) -> None:
    model, reference = net(), net(1)
    with Engine(model, AdamW(lr=1e-2), reference=reference, **tight(model, tmp_path)) as engine:
        train(engine)
        assert engine.state_dict().keys() == net().state_dict().keys()
        assert len(engine.optimizer.state_dict()["state"]) == len(list(model.parameters()))
        seen: list[str] = []
        engine.apply(lambda name, parameter: seen.append(name))
        assert seen == [name for name, _ in model.named_parameters()]
        assert engine.module is model and engine.reference is reference


def test_it_can_be_written_to(tmp_path: Path) -> None:
    """An average of the weights, say: unit by unit, and within the budgets."""
    model, reference = net(), net(1)
    sources = dict(zip(map(id, reference.parameters()), model.parameters(), strict=True))
    with Engine(model, AdamW(lr=1e-2), reference=reference, **tight(model, tmp_path)) as engine:

        def mix(name: str, target: nn.Parameter) -> None:
            with engine.gather(sources[id(target)]):
                target.lerp_(sources[id(target)], 0.25)

        engine.apply(mix, reference)
        engine._manager.check()
        wanted = copy.deepcopy(net(1)).requires_grad_(False)
        for target, source in zip(wanted.parameters(), net().parameters(), strict=True):
            target.lerp_(source.detach(), 0.25)
        assert_same(reference.state_dict(), wanted)
        with torch.no_grad():
            assert torch.equal(reference(batch(0)), wanted(batch(0)))


@pytest.mark.parametrize("sleeps", [False, True])
def test_it_sleeps_and_is_cast_with_the_model(sleeps: bool, tmp_path: Path) -> None:
    truth, judge = net().bfloat16(), net(1).bfloat16()
    model, reference = net(), net(1)
    options = tight(model, tmp_path, dtype="bfloat16")
    with Engine(model, AdamW(lr=1e-2), reference=reference, **options) as engine, torch.no_grad():
        if sleeps:
            engine.sleep(host=True)
            engine.wake()
        x = batch(0).bfloat16()
        assert torch.equal(engine(x), truth(x)) and torch.equal(reference(x), judge(x))
    assert_same(reference.state_dict(), judge)


def test_only_evaluating(tmp_path: Path) -> None:
    model, reference = net(), net(1)
    with Engine(model, reference=reference, **tight(model, tmp_path)), torch.no_grad():
        assert torch.equal(loss_of(model, reference, 0), loss_of(net(), net(1), 0))


def test_gradients_go_through_it(tmp_path: Path) -> None:
    """It is frozen, and what lies before it is trained through it, as in torch."""
    truth, judge = net(), net(1)
    judge(truth(batch(0))).square().mean().backward()
    model, reference = net(), net(1)
    with Engine(model, AdamW(lr=1e-2), reference=reference, **tight(model, tmp_path)) as engine:
        engine.backward(reference(engine(batch(0))).square().mean())
        with engine.gather_gradients():
            for mine, wanted in zip(model.parameters(), truth.parameters(), strict=True):
                assert torch.equal(mine.grad, wanted.grad)
        assert all(parameter.grad is None and not parameter.requires_grad for parameter in reference.parameters())
        assert engine.step()


def test_closing_without_restoring(tmp_path: Path) -> None:
    model, reference = net(), net(1)
    Engine(model, AdamW(), reference=reference, **tight(model, tmp_path)).close(restore=False)
    for module in (model, reference):
        with pytest.raises(StateError, match="closed without restoring it"):
            module(batch(0))


def test_an_engine_that_does_not_fit_leaves_both(tmp_path: Path) -> None:
    model, reference = net(), net(1)
    options = tight(model, tmp_path)
    options["max_memory"]["nvme"] = "100KiB"
    with pytest.raises(BudgetError):
        Engine(model, AdamW(), reference=reference, **options)
    assert_same(model.state_dict(), net())
    assert_same(reference.state_dict(), net(1))
    assert torch.equal(reference(batch(0)), net(1)(batch(0)))


def shared() -> tuple[nn.Module, nn.Module]:
    model, reference = net(), net(1)
    reference[2].linear.weight = model[2].linear.weight
    return model, reference


def on_meta() -> tuple[nn.Module, nn.Module]:
    return net(), net(1).to("meta")


def itself() -> tuple[nn.Module, nn.Module]:
    model = net()
    return model, model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (itself, r"reference: expected another torch.nn.Module than the model but got the model itself.*deepcopy"),
        (lambda: (net(), "model"), r"reference: expected another torch.nn.Module than the model but got str"),
        (shared, r"reference: expected parameters that nobody trains but 2.linear.weight is one of the model's"),
        (on_meta, r"reference: expected values but parameter 0.linear.weight is on the meta device"),
    ],
)
def test_refused(make: Callable[[], tuple[nn.Module, Any]], message: str, tmp_path: Path) -> None:
    model, reference = make()
    with pytest.raises(ConfigError, match=message):
        Engine(model, AdamW(), reference=reference, **tight(net(), tmp_path))
    assert all(parameter.requires_grad for parameter in model.parameters())
    with torch.no_grad():
        model(batch(0))


def test_a_frozen_parameter_may_be_shared(tmp_path: Path) -> None:
    model, reference = shared()
    model[2].linear.weight.requires_grad_(False)
    with Engine(model, AdamW(lr=1e-2), reference=reference, **tight(model, tmp_path)) as engine:
        losses = train(engine)
        slots = [slot.name for unit in engine.plan.request.units for slot in unit.slots]
    assert len(losses) == STEPS and "2.linear.weight" in slots and "(reference).2.linear.weight" not in slots


def test_a_model_that_another_engine_has(tmp_path: Path) -> None:
    model, reference = net(), net(1)
    with Engine(reference, **tight(reference, tmp_path)):
        with pytest.raises(StateError, match="already wrapped by another engine"):
            Engine(model, AdamW(), reference=reference, **tight(model, tmp_path))
