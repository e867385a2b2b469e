"""The kernels' variants through the engine: compressed moments, and the optimizers with one state or none."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from fakes import FakeStore, make_manager, make_plan_with, make_unit
from harness import (
    WIDTH,
    Outcome,
    assert_equal,
    assert_same_tensors,
    batch,
    everything_on_device,
    host,
    loss_of,
    nvme,
    run,
    tight,
)
from models import architecture
from torch import nn

import offload
from offload import LAMB, SGD, Adagrad, Adam, AdamW, Engine, Lion
from offload.checkpoint.values import gather_states, scatter_parameters, scatter_states
from offload.kernels import cpu_adam, optimizers
from offload.kernels.cpu_adam import StateKind
from offload.memory.budget import Tier
from offload.optim.recipe import StepCounts
from offload.planning.asked import Homes
from offload.planning.roles import States
from offload.shards.manager import Manager
from offload.spec import NotNegative, OptimizerSpec, Positive, optimizer

pytestmark = pytest.mark.usefixtures("single_torch_thread")

COMPRESSED = ("bfloat16", "int8")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
SIZES = (3000, 5000, 1, 128, 9000)
OPTIMIZERS = {
    "sgd": SGD(lr=1e-2, weight_decay=0.1),
    "momentum": SGD(lr=1e-2, momentum=0.9, dampening=0.1),
    "lion": Lion(lr=1e-3, weight_decay=0.1),
    "adagrad": Adagrad(lr=1e-2, lr_decay=0.1),
    "lamb": LAMB(lr=1e-2, weight_decay=0.1),
}
# blocks of 130 K elements: several chunks; parameters of 104 and 312, which end inside a block of 128 elements
GPT2 = architecture(
    "gpt2", "GPT2Config", "GPT2LMHeadModel", vocab_size=200, n_embd=104, n_layer=3, n_head=4, n_positions=64
)


def gpt2(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = GPT2.build().to(dtype)
    return model


def net(dtype: torch.dtype = torch.float32) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(6))).to(dtype)


def net_loss(forward: Callable[..., Any], number: int) -> torch.Tensor:
    """Return a loss, of inputs in the dtype that the net has."""
    model = forward.module if isinstance(forward, Engine) else forward
    assert isinstance(model, nn.Module)
    dtype = next(model.parameters()).dtype
    loss: torch.Tensor = forward(batch(number).to(dtype)).float().sub(1).pow(4).mean()
    return loss


def advance(engine: Engine, numbers: Sequence[int]) -> None:
    for number in numbers:
        engine.backward(net_loss(engine, number))
        assert engine.step()
        engine._manager.check()


def assert_differs(ours: Outcome, theirs: Outcome) -> None:
    assert any(not torch.equal(ours.parameters[name], value) for name, value in theirs.parameters.items())


def elsewhere(model: nn.Module, path: Path, *, whole: bool = False) -> dict[str, dict[str, Any]]:
    """Return placements of :data:`GPT2` that differ in homes, units, chunks and threads."""
    large = nvme(model, path, unit_bytes=1 << 20, whole=whole)
    return {
        "host": host(model, unit_bytes=128 << 10, whole=whole),
        "nvme, small units": {**nvme(model, path, unit_bytes=48 << 10, whole=whole), "threads": 1},
        "nvme, chunks": {**large, "chunk_numel": 65536, "threads": 3},
    }


# --- compressed moments -----------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize(("dtype", "accumulation"), [("fp32", 1), ("bf16", 2), ("fp16", 1)])
@pytest.mark.parametrize("state_dtype", COMPRESSED)
def test_placement_never_changes_the_result(state_dtype: str, dtype: str, accumulation: int, tmp_path: Path) -> None:
    """Random bits follow the element, not its unit, chunk or thread; blocks of 8-bit moments likewise."""
    threads = cpu_adam.num_threads()
    data = [GPT2.batch(number) for number in range(3 * accumulation)]
    common: dict[str, Any] = {"max_grad_norm": 0.5, "gradient_accumulation_steps": accumulation}
    common["initial_loss_scale"] = 256.0
    make = lambda: gpt2(DTYPES[dtype])  # noqa: E731
    truth = run(make(), data, **common, **everything_on_device(), state_dtype=state_dtype)
    assert len(truth.norms) == 3, "every step was taken"
    assert {home.param for home in truth.plan.homes} == {Tier.DEVICE}
    assert_differs(truth, run(make(), data, **common, **everything_on_device()))
    try:
        units = set()
        for options in elsewhere(make(), tmp_path).values():
            ours = run(make(), data, **common, **options, state_dtype=state_dtype)
            assert_equal(ours, truth)
            assert Tier.DEVICE not in {home.states for home in ours.plan.homes}
            units.add(len(ours.plan.request.units))
            largest = max(unit.numel for unit in ours.plan.request.units)
        assert len(units) >= 2 and largest > ours.plan.chunk_numel
    finally:
        cpu_adam.set_num_threads(threads)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("state_dtype", COMPRESSED)
def test_moments_are_close_to_exact_ones(state_dtype: str) -> None:
    """One step on the same gradients: within a unit in the last place of the format (and of 8-bit blocks' largest)."""
    data = [GPT2.batch(0)]
    exact = run(gpt2(), data, **everything_on_device())
    ours = run(gpt2(), data, **everything_on_device(), state_dtype=state_dtype)
    relative = {"bfloat16": 2**-7, "int8": 2**-3}[state_dtype]
    for position, state in exact.states.items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert ours.states[position][name].dtype == torch.float32
            error = (ours.states[position][name] - state[name]).abs()
            assert (error <= relative * state[name].abs() + 2**-8 * state[name].abs().max()).all()


@pytest.mark.cpu("parameters are updated where they are used")
@pytest.mark.parametrize("state_dtype", ["float32", *COMPRESSED])
def test_the_plan_counts_the_bytes_that_move(state_dtype: str, tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    options = tight(model, tmp_path, dtype="bfloat16", state_dtype=state_dtype)
    with Engine(model, AdamW(), **options) as engine:
        text = str(engine.plan)
        units = engine.plan.request.units
        numel = sum(unit.numel for unit in units)
        advance(engine, [0])
        engine.drain()
        before = engine.stats().links["nvme_write"].bytes
        advance(engine, [1])
        engine.drain()
        written = engine.stats().links["nvme_write"].bytes - before
        advance(engine, [2])
        before = engine.stats().links["nvme_read"].bytes
        advance(engine, [3, 4, 5])  # each forward brings what the step before it has left to update
        read = (engine.stats().links["nvme_read"].bytes - before) / 3
    moments = {"float32": 8 * numel, "bfloat16": 4 * numel, "int8": 2 * numel + 4096 * len(units)}[state_dtype]
    assert written == engine.plan.step_bytes["nvme_write"] == 4 * numel + moments  # a page of scales per chunk
    assert 2 * numel + moments <= read <= engine.plan.step_bytes["nvme_read"] == 6 * numel + moments  # masters; caches
    assert ("lossy" in text) == (state_dtype != "float32")
    assert {"float32": "", "bfloat16": "4 bytes per", "int8": "2.016 bytes per"}[state_dtype] in text


@contextmanager
def managing(home: Homes, kind: StateKind, dtype: str) -> Iterator[tuple[Manager, StepCounts]]:
    units = [make_unit(0, SIZES, dtype)]
    store = FakeStore()
    manager = make_manager(make_plan_with(units, [home], states=States(kind=kind)), store)
    try:
        yield manager, StepCounts(units)
        assert not store.flying
    finally:
        manager.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("kind", [StateKind.BFLOAT16, StateKind.INT8])
def test_what_is_gathered_is_stored_again_with_the_same_bits(kind: StateKind, dtype: str) -> None:
    generator = torch.Generator().manual_seed(1)
    values = {(0, i): torch.randn(size, generator=generator) for i, size in enumerate(SIZES)}
    states = {at: {"step": 3, "exp_avg": v, "exp_avg_sq": v.square(), "master": v} for at, v in values.items()}
    found = []
    for home in (Homes(Tier.DEVICE, Tier.HOST, Tier.DEVICE), Homes(Tier.NVME, Tier.HOST, Tier.NVME)):
        with managing(home, kind, dtype) as (manager, counts):
            scatter_parameters(manager, values)
            scatter_states(manager, counts, states)
            first = gather_states(manager, counts)
            scatter_states(manager, counts, {at: {**state, "step": 9} for at, state in first.items()})  # other bits
            again = gather_states(manager, counts)
        for at, state in first.items():
            assert again[at].pop("step") == 9 and state.pop("step") == 3
            assert_same_tensors(again[at], state)
            assert not torch.equal(state["exp_avg"], values[at]) or values[at].numel() == 1
        found.append(first)
    for at, state in found[0].items():
        assert_same_tensors(found[1][at], state)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("state_dtype", COMPRESSED)
def test_state_dict_round_trip(state_dtype: str, dtype: str, tmp_path: Path) -> None:
    """Saved in one placement, loaded in another: the run goes on with the same bits as without the pause."""
    check_round_trip(AdamW(lr=1e-2), DTYPES[dtype], tmp_path, state_dtype=state_dtype)


def check_round_trip(spec: Any, dtype: torch.dtype, path: Path, **options: Any) -> None:
    name = str(dtype).removeprefix("torch.")
    options["initial_loss_scale"] = 8.0
    with Engine(net(dtype), spec, **everything_on_device(), **options) as whole:
        advance(whole, range(4))
        truth, states = whole.state_dict(), whole.optimizer.state_dict()
    model = net(dtype)
    with Engine(model, spec, **tight(model, path, dtype=name), **options) as first:
        advance(first, range(2))
        saved, packed = first.state_dict(), first.optimizer.state_dict()
    assert all(tensor.dtype == torch.float32 for state in packed["state"].values() for tensor in state.values())
    with Engine(net(dtype), spec, **everything_on_device(), **options) as second:
        second.load_state_dict(saved)
        second.optimizer.load_state_dict(packed)
        advance(second, range(2, 4))
        assert_same_tensors(second.state_dict(), truth)
        resumed = second.optimizer.state_dict()
    assert resumed["param_groups"] == states["param_groups"]
    for position, state in states["state"].items():
        assert_same_tensors(resumed["state"][position], state)


@pytest.mark.parametrize("state_dtype", COMPRESSED)
def test_state_of_a_torch_optimizer_is_taken_over(state_dtype: str, tmp_path: Path) -> None:
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-3)
    plain_steps(plain, optimizer, range(2))
    model = copy.deepcopy(plain)
    given = torch.optim.AdamW(model.parameters(), lr=1e-3)
    given.load_state_dict(optimizer.state_dict())
    with Engine(model, given, **tight(model, tmp_path), state_dtype=state_dtype) as engine:
        found = engine.optimizer.state_dict()["state"]
        for position, state in optimizer.state_dict()["state"].items():
            assert found[position]["step"] == 2
            for name in ("exp_avg", "exp_avg_sq"):
                error = (found[position][name] - state[name]).abs()
                assert (error <= 2**-3 * state[name].abs() + 2**-8 * state[name].abs().max()).all()
        advance(engine, range(2, 4))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_only_the_moments_of_adam_are_compressed(name: str) -> None:
    with pytest.raises(offload.ConfigError, match='state_dtype: expected "float32" but got .int8.*only the moments'):
        Engine(net(), OPTIMIZERS[name], state_dtype="int8", **everything_on_device())


# --- other optimizers -------------------------------------------------------------------------------------------------


def plain_steps(model: nn.Module, optimizer: torch.optim.Optimizer, numbers: Sequence[int]) -> None:
    for number in numbers:
        optimizer.zero_grad()
        loss_of(model, number).backward()
        optimizer.step()


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, in torch."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("exp_avg", torch.zeros_like(p))
                p.mul_(1 - group["lr"] * group["weight_decay"])
                p.sub_(group["lr"] * torch.sign(beta1 * m + (1 - beta1) * p.grad))
                m.mul_(beta2).add_((1 - beta2) * p.grad)


class PlainLamb(torch.optim.Optimizer):
    """Algorithm 2 of the paper with phi(x) = x, in torch.

    m, v, bc1, bc2 as in Adam; u = (m / bc1) / (sqrt(v / bc2) + eps) + weight_decay * p; p -= lr * |p| / |u| * u, with
    norms over the whole parameter, and a ratio of 1 where one of them is 0.
    """

    def __init__(self, parameters: Any, **options: Any) -> None:
        super().__init__(parameters, options)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                state = self.state[p]
                step = state["step"] = state.get("step", 0) + 1
                m = state.setdefault("exp_avg", torch.zeros_like(p))
                v = state.setdefault("exp_avg_sq", torch.zeros_like(p))
                m.mul_(beta1).add_((1 - beta1) * p.grad)
                v.mul_(beta2).add_((1 - beta2) * p.grad**2)
                corrected = (v / (1 - beta2**step)).sqrt() + group["eps"]
                u = m / (1 - beta1**step) / corrected + group["weight_decay"] * p
                lengths = p.norm(), u.norm()
                p.sub_(group["lr"] * (lengths[0] / lengths[1] if all(lengths) else 1.0) * u)


PARITY: dict[str, tuple[Any, Callable[[Any], torch.optim.Optimizer]]] = {
    "sgd": (SGD(lr=1e-2, weight_decay=0.1), lambda p: torch.optim.SGD(p, lr=1e-2, weight_decay=0.1)),
    "momentum": (
        SGD(lr=1e-2, momentum=0.9, dampening=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, dampening=0.1),
    ),
    "nesterov": (
        SGD(lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
        lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    ),
    "adagrad": (
        Adagrad(lr=1e-2, lr_decay=0.1, weight_decay=0.1, eps=1e-4),
        lambda p: torch.optim.Adagrad(p, lr=1e-2, lr_decay=0.1, weight_decay=0.1, eps=1e-4),
    ),
    "lion": (
        Lion(lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
        lambda p: PlainLion(p, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1),
    ),
    "lamb": (
        LAMB(lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1),
        lambda p: PlainLamb(p, lr=1e-2, betas=(0.9, 0.99), eps=1e-4, weight_decay=0.1),
    ),
}


@pytest.mark.parametrize("name", PARITY)
def test_an_optimizer_is_that_of_torch(name: str, tmp_path: Path) -> None:
    spec, make = PARITY[name]
    plain = net()
    optimizer = make(plain.parameters())
    plain_steps(plain, optimizer, range(4))
    model = net()
    with Engine(model, spec, **tight(model, tmp_path)) as engine:
        advance(engine, range(4))
        ours, states = engine.state_dict(), engine.optimizer.state_dict()["state"]
    for key, value in plain.state_dict().items():
        assert torch.allclose(ours[key], value, rtol=1e-5, atol=1e-6), key
    theirs = optimizer.state_dict()["state"]
    for position in range(len(list(plain.parameters()))):
        expected = {key: value for key, value in theirs.get(position, {}).items() if key != "step"}
        assert states[position].pop("step") == 4
        assert states[position].keys() == expected.keys()
        for key, value in expected.items():
            assert torch.allclose(states[position][key], value, rtol=1e-4, atol=1e-7), key


@pytest.mark.parametrize("name", [name for name in PARITY if name not in ("lion", "lamb")])
def test_an_optimizer_of_torch_is_taken_over_and_given_back(name: str, tmp_path: Path) -> None:
    """Two steps in torch, two in the engine, two in torch: as six in torch."""
    _, make = PARITY[name]
    plain = net()
    optimizer = make(plain.parameters())
    plain_steps(plain, optimizer, range(2))
    model = copy.deepcopy(plain)
    given = make(model.parameters())
    given.load_state_dict(optimizer.state_dict())
    with Engine(model, given, **tight(model, tmp_path)) as engine:
        advance(engine, range(2, 4))
        packed = engine.optimizer.state_dict()
    back = make(model.parameters())
    back.load_state_dict(packed)
    plain_steps(model, back, range(4, 6))
    plain_steps(plain, optimizer, range(2, 6))
    for key, value in plain.state_dict().items():
        assert torch.allclose(model.state_dict()[key], value, rtol=1e-5, atol=1e-6), key


def test_adagrad_of_torch_before_its_first_step(tmp_path: Path) -> None:
    plain, model = net(), net()
    optimizer = torch.optim.Adagrad(plain.parameters())
    with Engine(model, torch.optim.Adagrad(model.parameters()), **tight(model, tmp_path)) as engine:
        assert engine.optimizer.state_dict()["state"] == {}
        advance(engine, [0])
        plain_steps(plain, optimizer, [0])
        for key, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[key], value, rtol=1e-5, atol=1e-6), key


@pytest.mark.few
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_placement_never_changes_an_optimizers_result(name: str, dtype: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"optimizer": OPTIMIZERS[name], "loss_of": net_loss, "initial_loss_scale": 8.0}
    numbers = range(3)
    truth = run(net(DTYPES[dtype]), numbers, **options, **everything_on_device())
    assert len(truth.norms) == 3
    model = net(DTYPES[dtype])
    for placement in (
        host(model, unit_bytes=4608),
        tight(model, tmp_path, dtype=str(DTYPES[dtype]).removeprefix("torch.")),
    ):
        assert_equal(run(net(DTYPES[dtype]), numbers, **options, **placement), truth)


@pytest.mark.parametrize(
    ("name", "dtype"),
    [("sgd", "bf16"), ("sgd", "fp32"), ("momentum", "fp16"), ("lion", "bf16"), ("lamb", "bf16")],
)
def test_state_dict_round_trip_of_an_optimizer(name: str, dtype: str, tmp_path: Path) -> None:
    check_round_trip(OPTIMIZERS[name], DTYPES[dtype], tmp_path)


@pytest.mark.parametrize("dtype", DTYPES)
def test_lamb_has_the_norm_of_whole_parameters_wherever_they_are(dtype: str, tmp_path: Path) -> None:
    """Chunks of 65536 elements would divide parameters of the larger units; these end with one."""
    data = [GPT2.batch(number) for number in range(4)]
    options: dict[str, Any] = {"max_grad_norm": 0.5, "gradient_accumulation_steps": 2, "initial_loss_scale": 256.0}
    options["optimizer"] = LAMB(lr=1e-2, weight_decay=0.1)
    truth = run(gpt2(DTYPES[dtype]), data, **options, **everything_on_device())
    assert len(truth.norms) == 2
    model = gpt2(DTYPES[dtype])
    placements = elsewhere(model, tmp_path, whole=True)
    for placement in placements.values():
        ours = run(gpt2(DTYPES[dtype]), data, **options, **placement)
        assert_equal(ours, truth)
    slots = [slot for unit in ours.plan.request.units for slot in unit.slots]
    assert any(slot.offset_numel < ours.plan.chunk_numel == 65536 < slot.end_numel for slot in slots)


@pytest.mark.cpu("states on the device")
@pytest.mark.parametrize(("name", "size"), [("sgd", 2), ("momentum", 6), ("lion", 6), ("adagrad", 6), ("lamb", 10)])
def test_states_cost_what_an_optimizer_has(name: str, size: int) -> None:
    model = net(torch.bfloat16)
    with Engine(model, OPTIMIZERS[name], **everything_on_device()) as engine:
        units = engine.plan.request.units
        numel = sum(unit.numel for unit in units)
        assert engine.plan.arena_bytes[Tier.DEVICE] == (2 + 2 + size) * numel


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda p: torch.optim.Adam(p, differentiable=True), "differentiable=True is not supported"),
        (lambda p: Adam, "expected an instance of offload.AdamW"),
    ],
)
def test_what_is_not_supported_is_refused(make: Callable[[Any], Any], text: str) -> None:
    model = net()
    with pytest.raises(offload.ConfigError, match=text):
        Engine(model, make(model.parameters()), **everything_on_device())


def test_momentum_in_all_groups_or_in_none() -> None:
    model = net()
    first, *rest = model.parameters()
    groups = [{"params": [first], "momentum": 0.0}, {"params": rest}]
    with pytest.raises(offload.ConfigError, match="momentum above 0 but got 0.*in all groups of SGD, or in none"):
        Engine(model, torch.optim.SGD(groups, lr=0.1, momentum=0.9), **everything_on_device())
    with Engine(net(), SGD(), **everything_on_device()) as engine:
        engine.optimizer.param_groups[0]["momentum"] = 0.9
        engine.backward(net_loss(engine, 0))
        with pytest.raises(offload.ConfigError, match=r"expected momentum 0 but got 0\.9"):
            engine.step()


# --- a new one --------------------------------------------------------------------------------------------------------


@optimizer
class WarmSGD(OptimizerSpec):
    """A class is all that a new optimizer takes beside its kernel: SGD whose learning rate grows to `lr`."""

    KERNEL: ClassVar[int] = 1
    STATES: ClassVar[tuple[str, ...]] = ()

    lr: NotNegative = 1e-2
    steps: Positive = 4.0

    def constants(self, step: int) -> tuple[float, ...]:
        return 0.0, -(self.lr * min(step / self.steps, 1.0))


def test_a_new_optimizer_is_one_class(tmp_path: Path) -> None:
    plain, model = net(), net()
    by_torch = torch.optim.SGD(plain.parameters(), lr=1e-2)
    warm = torch.optim.lr_scheduler.LambdaLR(by_torch, lambda step: min((step + 1) / 4, 1.0))
    with (
        Engine(plain, by_torch, **everything_on_device()) as theirs,
        Engine(model, WarmSGD(model.parameters(), steps=4), **tight(model, tmp_path)) as ours,
    ):
        for number in range(6):
            advance(theirs, [number])
            warm.step()
        advance(ours, range(6))
        assert_same_tensors(ours.state_dict(), theirs.state_dict())
        assert ours.plan.request.states.names == ()
        ours.optimizer.param_groups[0]["steps"] = 0.0
        ours.backward(net_loss(ours, 6))
        with pytest.raises(offload.ConfigError, match="^param group: steps is out of range: 0.0; take a finite number"):
            ours.step()
    with pytest.raises(offload.ConfigError, match="^WarmSGD: unknown option 'stps' .did you mean 'steps'"):
        WarmSGD(stps=3)  # type: ignore[call-arg]
    with pytest.raises(offload.ConfigError, match="only the moments of Adam"):
        Engine(net(), WarmSGD(), state_dtype="int8", **everything_on_device())


def test_every_optimizer_has_a_public_name() -> None:
    table = {
        name for name, kind in vars(optimizers).items() if isinstance(kind, type) and kind.__base__ is OptimizerSpec
    }
    assert len(table) >= 5 and table <= set(offload.__all__)


# --- parameters and groups as the first argument ----------------------------------------------------------------------


def weights_and_biases(model: nn.Module, **options: Any) -> list[dict[str, Any]]:
    """Return two groups that together are not all of a net's parameters."""
    named = [(name, p) for name, p in model.named_parameters() if not name.startswith("1.")]
    return [
        {"params": [p for name, p in named if name.endswith("weight")], **options},
        {"params": (p for name, p in named if name.endswith("bias"))},
    ]


GROUPED: dict[str, tuple[Any, dict[str, Any], dict[str, Any], Callable[..., torch.optim.Optimizer] | None]] = {
    "adamw": (AdamW, {"lr": 1e-2, "eps": 1e-4}, {"lr": 3e-2, "weight_decay": 0.3}, torch.optim.AdamW),
    "adam": (Adam, {"lr": 1e-2, "eps": 1e-4}, {"betas": (0.5, 0.6), "weight_decay": 0.3}, torch.optim.Adam),
    "sgd": (SGD, {"lr": 1e-2}, {"lr": 3e-2, "weight_decay": 0.1}, torch.optim.SGD),
    "momentum": (SGD, {"lr": 1e-2, "momentum": 0.9}, {"momentum": 0.5, "nesterov": True}, torch.optim.SGD),
    "adagrad": (Adagrad, {"lr": 1e-2, "eps": 1e-4}, {"lr": 3e-2, "lr_decay": 0.1}, torch.optim.Adagrad),
    "lion": (Lion, {"lr": 1e-3}, {"lr": 3e-3, "betas": (0.5, 0.6)}, None),
    "lamb": (LAMB, {"lr": 1e-2, "eps": 1e-4}, {"lr": 3e-2, "weight_decay": 0.1}, None),
}


@pytest.mark.parametrize("name", GROUPED)
def test_groups_of_a_spec_are_those_of_torch(name: str, tmp_path: Path) -> None:
    """The same bits as from torch's optimizer taken over; where torch has none, as from groups that were set later."""
    spec, common, own, theirs = GROUPED[name]
    results = []
    for kind in (spec, theirs):
        model = net()
        given = (kind or spec)(weights_and_biases(model, **(own if kind else {})), **common)
        with Engine(model, given, **tight(model, tmp_path, whole=name == "lamb")) as engine:
            if kind is None:
                engine.optimizer.param_groups[0].update(own)
            advance(engine, range(3))
            found, packed = engine.state_dict(), engine.optimizer.state_dict()
        results.append((found, packed["state"]))
        assert [len(group["params"]) for group in packed["param_groups"]] == [5, 5]
    assert_same_tensors(results[0][0], results[1][0])
    assert results[0][1].keys() == results[1][1].keys()
    for position, state in results[0][1].items():
        assert_same_tensors(state, results[1][1][position])
    before = net().state_dict()
    assert torch.equal(found["1.0.weight"], before["1.0.weight"])  # left out, as in torch
    assert not torch.equal(found["0.0.weight"], before["0.0.weight"])


def test_all_parameters_given_are_all_parameters(tmp_path: Path) -> None:
    """As an iterator, as a list, with names, and not at all."""
    results = []
    for make in (
        lambda model: AdamW(lr=1e-2),
        lambda model: AdamW(model.parameters(), 1e-2),
        lambda model: AdamW([*model.parameters()], lr=1e-2, fused=True),
        lambda model: AdamW(model.named_parameters(), lr=1e-2),
    ):
        model = net()
        with Engine(model, make(model), **tight(model, tmp_path)) as engine:
            advance(engine, range(2))
            results.append(engine.state_dict())
            group = engine.optimizer.param_groups[0]
    for other in results[1:]:
        assert_same_tensors(other, results[0])
    assert group["param_names"] == [name for name, _ in net().named_parameters()]


def test_a_scheduler_sees_the_groups_of_a_spec() -> None:
    model = net()
    with Engine(model, AdamW(weights_and_biases(model, lr=0.5), lr=0.1), **everything_on_device()) as engine:
        scheduler = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, [lambda _: 0.5, lambda _: 0.25])
        assert scheduler.get_last_lr() == [0.25, 0.025]
        assert "params" not in engine.optimizer.defaults


def test_parameters_that_a_spec_cannot_have() -> None:
    model, other = net(), net()
    weight = next(model.parameters())
    for spec, text in (
        (AdamW(other.parameters()), r"optimizer: a parameter of shape \(32, 32\) is not one of the model's"),
        (AdamW([*model.parameters(), torch.nn.Parameter(torch.ones(3))]), r"shape \(3,\) is not one of the model's"),
        (SGD([{"params": [weight]}, {"params": [weight]}]), r"but got: some parameters appear in more than one"),
        (SGD([weight.detach().requires_grad_() * 2]), r"but got: can't optimize a non-leaf Tensor"),
    ):
        with pytest.raises(offload.ConfigError, match=text):
            Engine(model, spec, **everything_on_device())
    with Engine(model, AdamW(model.parameters()), **everything_on_device()) as engine:
        advance(engine, [0])


def test_groups_of_a_spec_have_a_momentum_or_none() -> None:
    """As those of torch.optim.SGD: one above 0 in any group asks for a buffer, which all of them must use then."""
    model = net()
    wrong = SGD(weights_and_biases(model, momentum=0.9))
    with pytest.raises(offload.ConfigError, match="momentum above 0 but got 0.*in all groups of SGD, or in none"):
        Engine(model, wrong, **everything_on_device())
    everywhere = [{**group, "momentum": 0.9} for group in weights_and_biases(model)]
    with Engine(model, SGD(everywhere, lr=1e-2), **everything_on_device()) as engine:
        assert engine.optimizer.rule.names == ("momentum_buffer",)
        advance(engine, [0])
    nowhere = [{**group, "momentum": 0.0} for group in weights_and_biases(model)]
    with Engine(model, SGD(nowhere, momentum=0.9), **everything_on_device()) as engine:
        assert engine.optimizer.rule.names == ()
        advance(engine, [0])
