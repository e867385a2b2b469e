"""Blocks that are computed again in backward: the same bits, and the model as it was at the end."""

from __future__ import annotations

import array
import functools
import inspect
import random
import sys
import types
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import assert_equal, everything_on_device
from test_leaving import Net, loss_of, net, options, rows, run
from torch import nn

import offload
from offload.errors import ConfigError, StateError
from offload.memory.budget import Tier
from offload.module import repetition
from offload.module.recomputing import blocks_of

pytestmark = pytest.mark.usefixtures("single_torch_thread")


def test_the_same_bits_with_less_of_the_device(tmp_path: Path) -> None:
    """Dropout has the same masks again; parameters that live on the drive are away in between."""
    truth = run(net(), **everything_on_device())
    kept = truth.stats.peak_bytes["device"] - truth.plan.arena_bytes[Tier.DEVICE]
    for home in ("none", "nvme"):
        ours = run(net(), **options(tmp_path, home=home, activations="recompute"))
        assert_equal(ours, truth)
        if home == "none":
            assert ours.stats.peak_bytes["device"] - ours.plan.arena_bytes[Tier.DEVICE] < 0.6 * kept


def test_the_model_is_as_it_was(tmp_path: Path) -> None:
    model = net()
    before = [dict(vars(block)) for block in model.blocks]
    forwards = []
    model.blocks[0].forward = lambda x: (forwards.append(1), nn.Sequential.forward(model.blocks[0], x))[1]
    own = model.blocks[0].forward
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with torch.no_grad():
            engine(rows(0))
        assert len(forwards) == 1
        engine.backward(loss_of(engine, rows(0)))
        assert len(forwards) == 3  # and again in backward
        engine.step()
    assert model.blocks[0].forward is own
    for block, was in zip(model.blocks[1:], before[1:], strict=True):
        assert vars(block).keys() == was.keys()


def test_a_forward_looks_as_it_did(tmp_path: Path) -> None:
    """To models that ask which arguments a block takes; in whatever way its forward was put in place."""

    def plain(x: torch.Tensor, *, twice: bool = False) -> torch.Tensor:
        return x.sin() * (2 if twice else 1)

    model = net()
    model.blocks[1].forward = plain
    model.blocks[2].forward = model.blocks[0].forward  # a method of somebody else
    model.blocks[3].forward = functools.partial(plain, twice=True)
    before = [block.forward for block in model.blocks]
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")):
        for block, forward in zip(model.blocks, before, strict=True):
            assert block.forward != forward and inspect.signature(block.forward) == inspect.signature(forward)
            for name in ("__name__", "__qualname__", "__doc__", "__self__"):
                assert not hasattr(forward, name) or getattr(block.forward, name) == getattr(forward, name)
        assert inspect.signature(model.blocks[0].forward.__func__) == inspect.signature(nn.Sequential.forward)
        assert torch.equal(model.blocks[3](torch.ones(2)), 2 * torch.ones(2).sin())
    assert [block.forward for block in model.blocks] == before


def test_a_forward_that_somebody_puts_over_it_stays(tmp_path: Path) -> None:
    model = net()
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")):
        below = model.blocks[0].forward
        model.blocks[0].forward = above = lambda x: below(x) * 2
    assert model.blocks[0].forward is above
    x = rows(0).requires_grad_()
    torch.manual_seed(1)
    y = above(x)
    torch.manual_seed(1)
    assert torch.equal(y, nn.Sequential.forward(model.blocks[0], x) * 2)


def test_a_failed_engine_leaves_the_model(tmp_path: Path) -> None:
    model = net()
    small = {"device": "4KiB", "cpu": "4KiB"}
    with pytest.raises(offload.BudgetError):
        offload.Engine(model, offload.AdamW(), device="cpu", max_memory=small, activations="recompute")
    assert not any("forward" in vars(block) for block in model.blocks)


def test_blocks_are_the_outermost_that_repeat() -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = nn.ModuleList(nn.Sequential(nn.Linear(2, 2), nn.Tanh()) for _ in range(2))

    layers = nn.ModuleList(Experts() for _ in range(3))
    model = nn.ModuleDict({"embed": nn.Linear(2, 2), "body": nn.ModuleDict({"layers": layers})})
    assert [name for name, _ in blocks_of(model)] == [f"body.layers.{number}" for number in range(3)]
    assert list(blocks_of(nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)))) == []  # operators
    below = nn.Sequential(nn.Linear(2, 2), net())
    assert [name for name, _ in blocks_of(below)] == [f"1.blocks.{number}" for number in range(6)]


def test_a_model_without_blocks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match='activations: "recompute" expected blocks that repeat.* found none in Linear'
    ):
        offload.Engine(nn.Linear(2, 2), offload.AdamW(), activations="recompute", **everything_on_device())


def test_buffers_that_a_forward_changes_are_refused(tmp_path: Path) -> None:
    class Normed(Net):
        def __init__(self) -> None:
            super().__init__()
            for block in self.blocks:
                block[0] = nn.BatchNorm1d(32)

    torch.manual_seed(0)
    with offload.Engine(Normed(), offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with pytest.raises(StateError, match=r"0\.num_batches_tracked, which the forward of blocks\.0 may"):
            engine(rows(0))


class Block(nn.Module):
    """A block of an own class, as there are more than one of; what is special is in :meth:`forward`."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(32, 32)
        self.register_buffer("mean", torch.zeros(32))
        self.calls, self.scale, self.seen, self.own = 0, 1.0, list[float](), dict[str, Any]()
        self.drawn = torch.Generator().manual_seed(1)
        self.numpys, self.pythons = np.random.default_rng(2), random.Random(3)
        self.legacy, self.of_system = np.random.RandomState(4), random.SystemRandom()


class Counts(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.seen.append(float(self.calls))
        if "first" not in self.own:
            self.own["first"] = self.later = 0.5  # an attribute that was not there
        return x + self.linear(x).tanh() * (sum(self.seen) + self.own["first"] + self.later) * self.scale


class Nested(Block):
    """Has state inside of containers of all kinds, in attributes and in an argument that torch does not look into."""

    def __init__(self) -> None:
        super().__init__()

        class Own(dict[str, Any]):
            pass

        own = Own(n=0)
        own.more = {"n": 0}  # type: ignore[attr-defined]
        self.states: tuple[Any, ...] = (
            {"x": [{"n": 0}]}, deque(maxlen=2), Counter(), OrderedDict(n=0), defaultdict(int), [0] * 1001, bytearray(1),
            array.array("d", [0]), types.SimpleNamespace(n=[0]), {0}, own
        )  # fmt: skip
        self.states[0]["itself"] = self.states

    def count(self, given: Counter[str]) -> float:
        """Change all of it; return what follows from it."""
        nested, last, counter, ordered, default, long, bits, numbers, names, found, own = self.states
        for counts in (nested["x"][0], counter, ordered, default, own, own.more, given):
            counts["n"] += 1
        ordered.move_to_end("n")
        last.append(len(long))
        long.append(1)
        bits[0] += 1
        bits.append(1)
        numbers[0] += 0.5
        names.n[0] += 1
        names.m = names.n[0]
        found.add(len(found))
        counts_ = nested["x"][0]["n"], counter["n"], ordered["n"], default["n"], own["n"], own.more["n"], given["n"]
        return float(sum(counts_) + sum(last) - 1000 + sum(bits) + numbers[0] + names.m + len(found))

    def forward(self, x: torch.Tensor, given: Counter[str]) -> torch.Tensor:
        return x + self.linear(x * self.count(given) / 40).tanh()


class Replaces(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        self.mean = 0.9 * self.mean + 0.1 * y.detach().mean(0)
        return x + (y - self.mean).tanh()


class Draws(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = random.random() + np.random.rand() + self.numpys.random() + self.pythons.random() + self.legacy.randn()
        mask = (torch.rand(x.shape, generator=self.drawn) > 0.2).to(x.device)
        return x + self.linear(x).tanh() * mask * factor if np.random.rand() < 0.8 else x


class Refills(Block):
    def forward(self, x: torch.Tensor, *, name: dict[str, list[torch.Tensor]], debug: bool = False) -> torch.Tensor:
        given = name["of the caller"].pop()
        name["of the caller"].append(given + self.linear(x).tanh())
        name["more"] = []
        return x + given.sin() * (2.0 if debug else 1.0)


def of(kind: type[Block]) -> nn.Module:
    """Return a model of three blocks of a class."""

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(kind() for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            more: dict[str, Any] = {"name": {"of the caller": [x + 0]}, "debug": True} if kind is Refills else {}
            more |= {"given": Counter()} if kind is Nested else {}
            for block in self.blocks:
                x = block(x, **more)
            return x

    torch.manual_seed(0)
    return Model()


def trained(kind: type[Block], **more: Any) -> dict[str, torch.Tensor]:
    model = of(kind)
    random.seed(0)
    np.random.seed(0)
    with offload.Engine(model, offload.AdamW(lr=1e-2), **more) as engine:
        for number in range(3):
            for block in model.blocks:  # type: ignore[union-attr]
                block.scale = 1.0 + number
            loss = loss_of(engine, rows(number))
            for block in model.blocks:  # type: ignore[union-attr]
                block.scale = 7.0  # for the next forward: what is repeated has the former one
            engine.eval()
            engine.backward(loss)
            engine.train()
            engine.step()
        state = {name: tensor.clone() for name, tensor in engine.state_dict().items()}
    block: Any = model.blocks[0]  # type: ignore[index]
    drawn = [random.random(), np.random.rand(), block.pythons.random(), block.legacy.randn()]
    return state | {"drawn": torch.tensor(drawn)}


@pytest.mark.parametrize(
    "kind", [Counts, Nested, Replaces, Draws, pytest.param(Refills, marks=pytest.mark.cpu("its caller gives no copy"))]
)
def test_a_block_is_repeated_as_it_was(kind: type[Block], tmp_path: Path) -> None:
    """Counters, lists, replaced buffers, generators of all kinds, and what the caller changes: once, and the same."""
    truth = trained(kind, **everything_on_device())
    ours = trained(kind, **options(tmp_path, activations="recompute"))
    assert truth.keys() == ours.keys()
    assert all(torch.equal(ours[name], tensor) for name, tensor in truth.items())


class Remembers(Block):
    """Has state that nobody can put back."""

    def __init__(self) -> None:
        super().__init__()
        self.states = Owned(), np.zeros(1), iter(range(100)), random.SystemRandom()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        owned, numbers, numbered, of_system = self.states
        if what == "object":
            owned.n += 1
            factor = owned.n
        elif what == "array":
            numbers += 0.01
            factor = 1 + numbers[0]
        elif what == "system":
            factor = 1 + of_system.random()
        else:
            factor = next(numbered)
        y = self.linear(x * factor if what not in ("shape", "fewer", "error") else x)
        if what == "error":
            y = y.view(-1, 32 + factor)
        if what == "fewer":
            return y if factor % 2 else y.tanh().sin()
        return y[: len(y) - factor].tanh() if what == "shape" else y.tanh()


class Owned:
    n = 0


what = ""


@pytest.mark.parametrize("state", ["object", "array", "iterator", "system", "shape", "fewer", "error"])
def test_a_block_that_cannot_be_repeated_is_refused(
    state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys.modules[__name__], "what", state)
    with offload.Engine(of(Remembers), offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with pytest.raises(
            StateError, match=r"^activations: expected the forward of blocks\.2 to do the same"
        ) as found:
            engine.backward(loss_of(engine, rows(0)))
        said = {
            "shape": "it saves a tensor of shape",
            "fewer": "it saves fewer tensors",
            "error": "it fails then with RuntimeError: shape '[-1, 33]' is invalid",
        }.get(state, "has other values")
        assert said in str(found.value) and 'use activations="offload"' in str(found.value)


def test_values_are_compared_at_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounding apart, which may differ where a device adds in any order."""
    places = []
    look = repetition._values
    monkeypatch.setattr(repetition, "_values", lambda tensor: (places.append(tensor.shape), look(tensor))[1])
    seen = []
    with offload.Engine(net(), offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        for number in range(3):
            engine.backward(loss_of(engine, rows(number)))
            engine.step()
            seen.append(len(places))
    assert 0 < seen[0] == seen[1] == seen[2]
    tensor = torch.rand(300, 40).t()
    values = look(tensor)
    assert values is not None and len(set(values.tolist())) > 1000
    assert repetition._are_close(values, values * (1 + 1e-5)) and not repetition._are_close(values, values * 1.001)
    kept, flipped = torch.ones(1000, dtype=torch.bool), torch.arange(1000) >= 10
    assert repetition._are_close(kept, flipped) and not repetition._are_close(kept, torch.arange(1000) >= 100)
    assert repetition._are_close(torch.tensor([torch.nan, torch.inf]), torch.tensor([torch.nan, torch.inf]))


def hook_is_removed(model: nn.Module) -> Callable[[], object]:
    return model.blocks[2][1].register_forward_hook(lambda module, args, output: output * 2).remove


def hook_is_added(model: nn.Module) -> Callable[[], object]:
    def later() -> None:
        layer = model.blocks[2][1]
        layer.register_forward_pre_hook(lambda module, args, kwargs: ((args[0] * 2,), kwargs), with_kwargs=True)

    return later


def forward_is_replaced(model: nn.Module) -> Callable[[], object]:
    layer = model.blocks[2][1]
    layer.forward = lambda x: nn.Linear.forward(layer, x) * 2
    return lambda: vars(layer).pop("forward")


def parameter_is_swapped(model: nn.Module) -> Callable[[], object]:
    layer, own = model.blocks[2][1], model.blocks[2][1].weight
    layer.weight = model.blocks[4][1].weight
    return lambda: setattr(layer, "weight", own)


@pytest.mark.parametrize("change", [hook_is_removed, hook_is_added, forward_is_replaced, parameter_is_swapped])
def test_what_changes_in_modules_of_a_block_is_put_back(
    change: Callable[[nn.Module], Callable[[], object]], tmp_path: Path
) -> None:
    """Between forward and backward, of which the repetition sees nothing; behind it the change is there."""
    found = []
    for activations in ("keep", "recompute"):
        model = net()
        with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations=activations)) as engine:
            later = change(model)
            x = rows(0).requires_grad_()
            loss = loss_of(engine, x)
            later()
            engine.backward(loss)
            engine.step()
            found.append([loss.detach(), x.grad, *engine.state_dict().values()])
            found[-1].append(torch.tensor(len(model.blocks[2][1]._forward_pre_hooks)))
            assert "forward" not in vars(model.blocks[2][1])
            assert model.blocks[2][1].weight is not model.blocks[4][1].weight
    for kept, repeated in zip(*found, strict=True):
        assert torch.equal(kept, repeated)


def test_what_is_changed_in_place_in_a_container_is_refused(tmp_path: Path) -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.own.setdefault("seen", [(torch.zeros(()),)])[0][0].add_(self.calls)
            self.calls = 1
            return x + self.linear(x)

    with offload.Engine(of(InPlace), offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        loss_of(engine, rows(0))
        with pytest.raises(
            StateError, match=r"no change in place of own\['seen'\]\[0\]\[0\], which .* of blocks\.0 may"
        ):
            loss_of(engine, rows(0))


@pytest.mark.parametrize("where", ["in the forward", "since"])
def test_what_is_changed_in_place_is_refused(where: str, tmp_path: Path) -> None:
    class InPlace(Block):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if where == "in the forward":
                self.mean.add_(1)
            return x + self.linear(x - self.mean)

    model = of(InPlace)
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        with pytest.raises(StateError, match=r"no change in place of mean, .* of blocks\.\d may read"):
            loss = loss_of(engine, rows(0))
            model.blocks[0].mean.add_(1)  # type: ignore[union-attr,index,operator]
            engine.backward(loss)


@pytest.mark.parametrize(
    "transform", ["vmap", pytest.param("jvp", marks=pytest.mark.cpu("elsewhere, parameters may be old"))]
)
def test_transforms_of_torch_func_are_refused_by_name(transform: str, tmp_path: Path) -> None:
    x = rows(0)
    transforms: dict[str, Callable[[Any], Any]] = {
        "vmap": lambda call: torch.func.vmap(call)(x),
        "jvp": lambda call: torch.func.jvp(call, (x,), (x,)),
    }
    away = {**options(tmp_path, activations="recompute")}
    here = {**everything_on_device(), "activations": "recompute"}  # else parameters that come refuse jvp before
    with offload.Engine(net(), offload.AdamW(), **(here if transform == "jvp" else away)) as engine:
        with pytest.raises(StateError, match=r"torch\.func \(vmap, jvp\) while blocks\.0 is computed again"):
            transforms[transform](engine)


def test_a_model_that_only_says_so_has_its_blocks_repeated(tmp_path: Path) -> None:
    """As models of transformers do, but nothing else is like theirs."""
    model = net()
    model.supports_gradient_checkpointing = True  # type: ignore[assignment]
    with offload.Engine(model, offload.AdamW(), **options(tmp_path, activations="recompute")) as engine:
        engine.backward(loss_of(engine, rows(0)))
        engine.step()


def test_a_model_of_transformers_does_it_in_its_own_way() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=3, vocab_size=64, num_attention_heads=2
    )
    ids = torch.randint(0, 64, (2, 16), generator=torch.Generator().manual_seed(0))
    losses = []
    for mode in ("keep", "recompute"):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_config(config).train()
        memory = {"device": "16MiB", "cpu": "16MiB"}
        with offload.Engine(model, offload.AdamW(lr=1e-2), device="cpu", max_memory=memory, activations=mode) as engine:
            assert model.is_gradient_checkpointing == (mode == "recompute")
            for _ in range(2):
                loss = engine(input_ids=ids, labels=ids).loss
                losses.append(loss.item())
                engine.backward(loss)
                del loss
                engine.step()
        assert not model.is_gradient_checkpointing
    assert losses[:2] == losses[2:]


def test_a_model_of_transformers_that_did_it_before_does_it_afterwards() -> None:
    import transformers

    config = transformers.LlamaConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=2, vocab_size=64, num_attention_heads=2
    )
    model = transformers.AutoModelForCausalLM.from_config(config).train()
    model.gradient_checkpointing_enable({"use_reentrant": False})
    memory = {"device": "16MiB", "cpu": "16MiB"}
    with offload.Engine(model, offload.SGD(lr=0.1), device="cpu", max_memory=memory, activations="recompute"):
        assert model.is_gradient_checkpointing
    assert model.is_gradient_checkpointing


@pytest.mark.parametrize("restore", [True, False])
def test_a_closed_engine_repeats_nothing(restore: bool, tmp_path: Path) -> None:
    """Its hooks are put back with all others."""
    engine = offload.Engine(net(), offload.AdamW(), **options(tmp_path, activations="recompute"))
    loss = loss_of(engine, rows(0))
    engine.close(restore=restore)
    with pytest.raises(StateError, match="the engine that ran this forward is closed; run backward before close"):
        loss.backward()
