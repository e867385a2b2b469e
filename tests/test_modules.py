"""Modules of every kind through the engine under the tightest budget, against plain PyTorch.

Each case is a model and how its loss comes about. The first loss and its gradients must equal plain PyTorch's bit by
bit; three steps must follow ``torch.optim.AdamW``.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import itertools
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from harness import (
    WIDTH,
    Forward,
    assert_equal,
    batch,
    everything_on_device,
    parameters_on_device,
    run,
    tight,
)
from torch import nn
from torch.autograd import forward_ad
from torch.nn.utils import parametrizations, parametrize
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

import offload
from offload.shards.copies import Copies
from offload.shards.shard import Shard

STEPS = 3
EPS = 1e-3  # large: a gradient that is zero but for rounding (a bias before a norm) must not become a step


pytestmark = pytest.mark.usefixtures("single_torch_thread")


def linear() -> nn.Linear:
    return nn.Linear(WIDTH, WIDTH)


class Stack(nn.Module):
    """Body of most cases: enough blocks that not all fit the working region."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(linear() for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


@dataclasses.dataclass
class Case:
    """A model, and its scalar loss for micro-batch number n given what calls the model."""

    build: Callable[[], nn.Module]
    loss: Callable[[Forward, int], torch.Tensor] = lambda forward, number: forward(batch(number)).pow(2).mean()
    options: dict[str, Any] = dataclasses.field(default_factory=dict)


CASES: dict[str, Case] = {}


def case(**options: Any) -> Callable[[type[nn.Module]], type[nn.Module]]:
    """Register a model class called with and returning a tensor."""

    def register(cls: type[nn.Module]) -> type[nn.Module]:
        CASES[cls.__name__] = Case(cls, **options)
        return cls

    return register


# --- parameters used outside their module's forward ------------------------------------------------------------------


@case()
class FunctionalUse(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(F.linear(x, block.weight, block.bias)) + x
        return x


@case()
class MatrixProductOfTwoUnits(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for first, second in itertools.pairwise(self.blocks):
            x = torch.tanh(x @ (first.weight @ second.weight.T) + second.bias)
        return x


@case()
class RootParameters(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(WIDTH))
        self.matrix = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x * self.scale) @ self.matrix + self.scale.sum()


@case()
class Closure(Stack):
    def __init__(self) -> None:
        super().__init__()
        weight = self.blocks[1].weight
        self.mix = lambda x: torch.addmm(self.blocks[2].bias, x, weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.mix(super().forward(self.mix(x)))


@case()
class UseOfAnotherModulesParameter(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        return x @ self.blocks[0].weight.t() + self.blocks[5].weight.mean()


@case()
class ViewsKeptAcrossOtherModules(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        kept = self.blocks[0].weight.t().chunk(2, dim=0)
        x = super().forward(x)
        return x[:, : WIDTH // 2] @ kept[0] + x[:, WIDTH // 2 :] @ kept[1]


@case()
class StackedParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rows = nn.ParameterList(nn.Parameter(torch.randn(WIDTH, WIDTH) / 8) for _ in range(4))
        self.named = nn.ParameterDict({"a": nn.Parameter(torch.randn(WIDTH)), "b": nn.Parameter(torch.randn(WIDTH))})
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x + self.named["a"])
        x = torch.einsum("bi,kij->bj", x, torch.stack([self.rows[0], self.rows[1]]))
        return x @ torch.cat(list(self.rows[2:]), dim=1)[:, :WIDTH] * self.named["b"]


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, weight = ctx.saved_tensors
        return grads[0] @ weight.t(), x.t() @ grads[0]


class Custom(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.eye(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(x, self.weight)


@case()
class CustomFunction(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.custom = Custom()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.custom(super().forward(self.custom(x)))


@case()
class CustomFunctionOfAnotherModulesParameter(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Scaled.apply(super().forward(x), self.blocks[0].weight)


class ScaledByAll(torch.autograd.Function):
    """Torch saves what it is given when its forward has ended: by then the first weight may have left again."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        product = x @ weight
        scale = sum(other.norm() for other in others)
        ctx.save_for_backward(x, weight, scale)
        return product * scale

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight, scale = ctx.saved_tensors
        grad = grads[0] * scale
        return grad @ weight.t(), x.t() @ grad, *(None for _ in ctx.needs_input_grad[2:])


@case()
class CustomFunctionOfManyUnits(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return ScaledByAll.apply(super().forward(x), *(block.weight for block in self.blocks))


@case()
class CustomFunctionOfManyUnitsInSegments(CustomFunctionOfManyUnits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)


# --- gradient checkpointing -----------------------------------------------------------------------------------------


def _checkpointed(reentrant: bool, kind: str) -> type[nn.Module]:
    class Checkpointed(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x.requires_grad_()
            run_segment = functools.partial(checkpoint, use_reentrant=reentrant)
            if kind == "blocks":
                for block in self.blocks:
                    x = torch.tanh(run_segment(block, x)) + x
            elif kind == "all":
                x = run_segment(super().forward, x)
            elif kind == "functional":
                for first, second in itertools.pairwise(self.blocks):
                    x = run_segment(lambda x, a, b: torch.tanh(a(x) @ b.weight * b.bias), x, first, second)
            elif kind == "parameters only":
                for block in self.blocks:
                    x = run_segment(lambda x, b: torch.tanh(F.linear(x, b.weight, b.bias)), x, block)
            elif kind == "selective":  # a mode that sees every operation, and wants the same ones in the repetition
                keep = functools.partial(create_selective_checkpoint_contexts, [torch.ops.aten.addmm.default])
                for block in self.blocks:
                    x = run_segment(lambda x, b: torch.tanh(b(x)), x, block, context_fn=keep)
            else:
                assert kind == "nested"

                def inner(x: torch.Tensor) -> torch.Tensor:
                    x = self.blocks[0](x).tanh()
                    return run_segment(lambda x: self.blocks[2](self.blocks[1](x).tanh()), x) * self.blocks[3].bias

                x = run_segment(inner, run_segment(inner, x))
            return x

    return Checkpointed


for _kind in ("blocks", "all", "functional", "parameters only", "nested"):
    CASES[f"checkpoint {_kind}"] = Case(_checkpointed(False, _kind))
    CASES[f"reentrant checkpoint {_kind}"] = Case(_checkpointed(True, _kind))


class Borrows(nn.Module):
    """Uses a parameter of another module."""

    def __init__(self, other: nn.Linear) -> None:
        super().__init__()
        self.own = linear()
        self.other = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.own(x)) @ self.other[0].weight


def _nested_borrowing(reentrant: bool) -> type[nn.Module]:
    """Backward runs inside backward, where torch has switched our mode off."""

    class Nested(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.body = Stack()
            self.segments = nn.ModuleList(Borrows(block) for block in self.body.blocks)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            def outer(x: torch.Tensor, *segments: nn.Module) -> torch.Tensor:
                for segment in segments:
                    x = checkpoint(segment, x, use_reentrant=reentrant) + x
                return x

            x = checkpoint(outer, x.requires_grad_(), *self.segments, use_reentrant=reentrant)
            return self.body(x)

    return Nested


CASES["checkpoint nested, parameters of others"] = Case(_nested_borrowing(False))
CASES["reentrant checkpoint nested, parameters of others"] = Case(_nested_borrowing(True))
CASES["checkpoint selective"] = Case(_checkpointed(False, "selective"))


# --- several uses, no use, tied ---------------------------------------------------------------------------------------


@case()
class UsedSeveralTimes(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for _ in range(3):
            x = self.blocks[0](torch.tanh(self.blocks[1](x)))
        return super().forward(x)


@case()
class Recursive(Stack):
    def forward(self, x: torch.Tensor, depth: int = 2) -> torch.Tensor:
        x = super().forward(x)
        return self(x, depth - 1) if depth else x


@case()
class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(40, WIDTH)
        self.body = Stack()
        self.head = nn.Linear(WIDTH, 40, bias=False)
        self.head.weight = self.words.weight
        self.again = nn.Linear(WIDTH, 40)
        self.again.weight = self.words.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(self.words((x[:, :3].abs() * 7).long()).mean(1))
        return self.head(x) + self.again(x.tanh())


@case()
class SharedBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        shared = linear()
        self.blocks = nn.ModuleList([shared, linear(), shared, linear(), linear(), shared])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


@case(loss=lambda forward, number: forward(batch(number), use=[1, 3] if number == 1 else [0, 1, 2, 4]).pow(2).mean())
class SomeWithoutGradient(Stack):
    """Which parameters get a gradient differs by step; block 5 never gets one."""

    def forward(self, x: torch.Tensor, use: list[int]) -> torch.Tensor:
        for index in use:
            x = torch.tanh(self.blocks[index](x)) + x
        return x


@case()
class GradientWithoutFlow(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            x = self.blocks[0](x)
        return super().forward(x.detach()) + self.blocks[3](x).detach()


@case()
class SparseEmbedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(64, WIDTH, sparse=True)
        self.bag = nn.EmbeddingBag(64, WIDTH)
        self.body = Stack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ids = (x[:, :3].abs() * 7).long()
        return self.body(self.words(ids).mean(1) + self.bag(ids))


# --- inputs and outputs -----------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Result:
    hidden: list[torch.Tensor | None]
    extra: dict[str, Any]


class Nested(Stack):
    def forward(self, data: dict[str, Any], scale: tuple[Any, ...] = (), *, result: Result | None = None) -> Result:
        x = data["x"]["deep"][0] * (scale[0] if scale else 1.0)
        hidden = []
        for block in self.blocks:
            x = torch.tanh(block(x))
            hidden.append(x)
        if result is not None:
            hidden += result.hidden
        return Result([None, *hidden], {"last": (x, None), "name": "nested"})


def _nested_loss(forward: Forward, number: int) -> torch.Tensor:
    first = forward({"x": {"deep": [batch(number), None]}}, (2.0, "word"))
    second = forward({"x": {"deep": (first.extra["last"][0],)}}, result=first)
    return sum(h.pow(2).mean() for h in second.hidden if h is not None)  # type: ignore[return-value]


CASES["nested inputs and outputs"] = Case(Nested, _nested_loss)


# --- stock modules ----------------------------------------------------------------------------------------------------


def _sequence(module: Callable[[], nn.Module], call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> Case:
    class Sequence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = Stack()
            self.module = module()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return call(self.module, self.before(x))

    return Case(Sequence, lambda forward, number: forward(batch(number, 3, 5, WIDTH)).pow(2).mean())


CASES["LSTM"] = _sequence(lambda: nn.LSTM(WIDTH, WIDTH, num_layers=2, bidirectional=True), lambda m, x: m(x)[0])
CASES["GRU"] = _sequence(lambda: nn.GRU(WIDTH, WIDTH, dropout=0.3, num_layers=2), lambda m, x: m(x)[0])
CASES["LSTMCell"] = _sequence(lambda: nn.LSTMCell(WIDTH, WIDTH), lambda m, x: m(x[1], m(x[0]))[1])
CASES["MultiheadAttention"] = _sequence(
    lambda: nn.MultiheadAttention(WIDTH, 4, dropout=0.1), lambda m, x: m(x, x, x)[0]
)
CASES["TransformerEncoder"] = _sequence(
    lambda: nn.TransformerEncoder(nn.TransformerEncoderLayer(WIDTH, 4, 2 * WIDTH), 2, enable_nested_tensor=False),
    lambda m, x: m(x),
)
CASES["Transformer"] = _sequence(
    lambda: nn.Transformer(WIDTH, 4, 1, 1, 2 * WIDTH, batch_first=True), lambda m, x: m(x, x[:, :2])
)
CASES["Bilinear"] = _sequence(lambda: nn.Bilinear(WIDTH, WIDTH, 4), lambda m, x: m(x, x.flip(0)))
CASES["Conv1d and BatchNorm"] = _sequence(
    lambda: nn.Sequential(nn.Conv1d(5, 8, 3), nn.BatchNorm1d(8), nn.PReLU(), nn.ConvTranspose1d(8, 2, 3)),
    lambda m, x: m(x),
)
CASES["GroupNorm and LayerNorm"] = _sequence(
    lambda: nn.Sequential(nn.GroupNorm(1, 5), nn.LayerNorm(WIDTH), nn.RMSNorm(WIDTH)), lambda m, x: m(x)
)
CASES["ModuleDict"] = _sequence(
    lambda: nn.ModuleDict({"even": linear(), "odd": Stack()}), lambda m, x: m["odd"](m["even"](x[::2]))
)
CASES["weight_norm"] = _sequence(lambda: parametrizations.weight_norm(linear()), lambda m, x: m(x))
CASES["spectral_norm"] = _sequence(lambda: parametrizations.spectral_norm(linear()), lambda m, x: m(x))
CASES["orthogonal"] = _sequence(lambda: parametrizations.orthogonal(linear()), lambda m, x: m(x))


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def _symmetric() -> nn.Module:
    module = linear()
    parametrize.register_parametrization(module, "weight", Symmetric())
    return module


CASES["own parametrization"] = _sequence(_symmetric, lambda m, x: m(x))
CASES["old weight_norm"] = _sequence(lambda: torch.nn.utils.weight_norm(linear()), lambda m, x: m(x))
CASES["Dropout"] = _sequence(lambda: nn.Sequential(nn.Dropout(0.3), linear(), nn.AlphaDropout(0.2)), lambda m, x: m(x))
CASES["frozen parts"] = _sequence(lambda: linear().requires_grad_(False), lambda m, x: m(x))
CASES["lazy after a dry run"] = _sequence(
    lambda: (lambda m: (m(torch.zeros(1, WIDTH)), m)[1])(nn.LazyLinear(WIDTH)), lambda m, x: m(x)
)


class RootWeightNorm(nn.Linear):
    """The outermost module is the one with the old weight norm: its hook runs before any forward."""


CASES["old weight_norm at the root"] = Case(lambda: torch.nn.utils.weight_norm(RootWeightNorm(WIDTH, WIDTH)))


class NotContiguous(Stack):
    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].weight = nn.Parameter(torch.randn(WIDTH, WIDTH).t() / 8)
        self.scalar = nn.Parameter(torch.tensor(1.5))
        self.empty = nn.Parameter(torch.empty(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * self.scalar + self.empty.sum()


CASES["odd shapes and strides"] = Case(NotContiguous)


class Turn(nn.Linear):
    """Views that share a parameter's bytes and have other signs: a conjugate, and its imaginary part."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        turn = torch.view_as_complex(self.weight[:2].view(WIDTH, 2)).conj()
        assert turn.is_conj() and turn.imag.is_neg()
        x = torch.view_as_real(torch.complex(super().forward(x), x) * turn).sum(2)
        return torch.tanh(x * turn.imag)


def _turning(segment: Callable[..., torch.Tensor]) -> type[nn.Module]:
    class Turning(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(Turn(WIDTH, WIDTH) for _ in range(6))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in self.blocks:
                x = segment(block, x.requires_grad_()) + x
            return x

    return Turning


CASES["views with other signs"] = Case(_turning(lambda block, x: block(x)))
CASES["checkpoint views with other signs"] = Case(_turning(functools.partial(checkpoint, use_reentrant=False)))
CASES["reentrant checkpoint views with other signs"] = Case(_turning(functools.partial(checkpoint, use_reentrant=True)))


class SignedGradient(Stack):
    """A gradient of one element is contiguous, so autograd leaves it as it is: with other signs than its bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.turn = nn.Parameter(torch.ones(1)), nn.Parameter(torch.full((1,), 0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.view_as_real(super().forward(x) * torch.complex(self.scale, self.turn).conj()).sum(2)


CASES["gradient with another sign"] = Case(SignedGradient)


def _penalty(forward: Forward, number: int) -> torch.Tensor:
    x = batch(number).requires_grad_()
    y = forward(x)
    (slope,) = torch.autograd.grad(y.sum(), x, create_graph=True)
    return y.pow(2).mean() + slope.pow(2).mean()


CASES["gradient penalty"] = Case(Stack, _penalty)
CASES["two forwards, one loss"] = Case(Stack, lambda f, n: (f(batch(n)) * f(batch(n + 50))).mean())
CASES["forward under no_grad in between"] = Case(
    Stack, lambda f, n: (lambda y, z: (y - z).pow(2).mean())(f(batch(n)), torch.no_grad()(f)(batch(n + 50)))
)


def _on_modules(forward: Forward, number: int) -> torch.Tensor:
    """Submodules called directly, not through the outermost one."""
    model = forward.module if isinstance(forward, offload.Engine) else forward
    return model.blocks[1](model(batch(number))).pow(2).mean()


CASES["submodule called from outside"] = Case(Stack, _on_modules)


class UserHooks(Stack):
    """Hooks of the user on modules and parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[1].weight.register_hook(lambda g: g * 2)
        self.blocks[2].register_forward_pre_hook(lambda m, a: (a[0] * m.weight.mean(),))
        self.blocks[3].register_forward_hook(lambda m, a, o: o + m.bias)
        self.blocks[4].register_full_backward_hook(lambda m, gi, go: tuple(g * 0.5 for g in gi))


CASES["user hooks"] = Case(UserHooks)

# --- the test ---------------------------------------------------------------------------------------------------------


def build(name: str) -> nn.Module:
    torch.manual_seed(0)
    return CASES[name].build().train()


UNITS_AT_ONCE = {"gradient penalty": 6}  # what create_graph keeps outside a forward stays on the device


@pytest.mark.parametrize("name", CASES)
def test_module(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loss_of = CASES[name].loss
    plain = build(name)
    optimizer = torch.optim.AdamW([p for p in plain.parameters() if p.requires_grad], lr=1e-3, eps=EPS)
    truth, gradients = [], {}
    for number in range(STEPS):
        torch.manual_seed(1000 + number)
        loss = loss_of(plain, number)
        loss.backward()
        truth.append(loss.detach())
        for key, parameter in plain.named_parameters():
            if number == 0 and parameter.grad is not None:
                gradient = parameter.grad
                gradients[key] = gradient.to_dense() if gradient.is_sparse else gradient.clone()
        for parameter in plain.parameters():
            if parameter.grad is not None and parameter.grad.is_sparse:
                parameter.grad = parameter.grad.to_dense()  # AdamW takes no sparse ones
        optimizer.step()
        optimizer.zero_grad()

    # With beta1 = 0 exp_avg is the gradient.
    model = build(name)
    options = tight(model, tmp_path, units=UNITS_AT_ONCE.get(name, 3))
    first = run(model, [0], loss_of=loss_of, optimizer=offload.AdamW(lr=1e-3, betas=(0.0, 0.9)), **options)
    assert torch.equal(first.losses[0], truth[0])
    names = [key for key, parameter in model.named_parameters() if parameter.requires_grad]
    ours = {names[position]: state["exp_avg"] for position, state in first.states.items()}
    assert ours.keys() == gradients.keys()
    for key, gradient in ours.items():
        assert torch.equal(gradient, gradients[key]), f"gradient of {key}"

    fetched, fetch = list[int](), Copies.start_fetch

    def noted(copies: Copies, shard: Shard, *start: Any) -> None:
        fetched.append(shard.unit.index)
        fetch(copies, shard, *start)

    with monkeypatch.context() as patched:
        patched.setattr(Copies, "start_fetch", noted)
        outcome = run(build(name), range(STEPS), loss_of=loss_of, optimizer=offload.AdamW(lr=1e-3, eps=EPS), **options)
    for mine, theirs in zip(outcome.losses, truth, strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5)
    for key, value in plain.state_dict().items():
        assert torch.allclose(outcome.parameters[key], value, rtol=1e-5, atol=1e-5), key
    steps = {position: float(state["step"]) for position, state in outcome.states.items()}
    trained = [p for p in plain.parameters() if p.requires_grad]
    assert steps == {i: float(optimizer.state[p]["step"]) for i, p in enumerate(trained) if p in optimizer.state}

    for options in (everything_on_device(), parameters_on_device()):
        device = run(build(name), range(STEPS), loss_of=loss_of, optimizer=offload.AdamW(lr=1e-3, eps=EPS), **options)
        assert_equal(outcome, device)
    units = outcome.plan.request.units
    if outcome.plan.working_bytes < sum(unit.param_bytes for unit in units):
        assert len(fetched) > len(set(fetched)) > 0, "units come again"


def _use_parameters_in_hooks(model: nn.Module) -> None:
    """Register hooks that run before the engine's, and after."""
    blocks = model.blocks
    model.register_forward_pre_hook(lambda m, a: (a[0] + blocks[5].weight.mean(),), prepend=True)
    model.register_forward_hook(lambda m, a, o: o * blocks[0].weight.mean())
    blocks[1].register_forward_pre_hook(lambda m, a: (a[0] * m.weight.std(),), prepend=True)
    blocks[2].register_forward_hook(lambda m, a, o: o + blocks[4].bias)
    blocks[3].register_full_backward_hook(lambda m, gi, go: (gi[0] + m.weight.mean(),))


def test_hooks_that_the_user_registers_on_a_wrapped_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    plain = Stack()
    model = copy.deepcopy(plain)
    _use_parameters_in_hooks(plain)
    loss = plain(batch(0)).pow(2).mean()
    loss.backward()
    with offload.Engine(model, offload.AdamW(betas=(0.0, 0.9)), **tight(model, tmp_path)) as engine:
        _use_parameters_in_hooks(model)
        ours = engine(batch(0)).pow(2).mean()
        assert torch.equal(ours, loss)
        engine.backward(ours)
        engine.step()
        states = engine.optimizer.state_dict()["state"]  # type: ignore[union-attr]
        for position, (name, parameter) in enumerate(plain.named_parameters()):
            assert torch.equal(states[position]["exp_avg"], parameter.grad), name


@pytest.mark.parametrize("activations", ["keep", "offload"])
@pytest.mark.parametrize("through", ["engine", "model"])
def test_saved_tensor_hooks_of_the_user_see_all_but_parameters(through: str, activations: str, tmp_path: Path) -> None:
    """As torch's ``save_on_cpu`` does: what they keep is theirs, wherever the call comes from."""
    torch.manual_seed(0)
    plain, seen = Stack(), list[list[torch.Size]]()

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        seen[-1].append(tensor.shape)
        return tensor.clone()

    model = copy.deepcopy(plain)
    shapes = {parameter.shape for parameter in plain.parameters()} | {plain.blocks[0].weight.t().shape}
    seen.append([])
    with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.clone):
        loss = plain(batch(0)).pow(2).mean()
    loss.backward()
    options = tight(model, tmp_path, activations=activations)
    with offload.Engine(model, offload.AdamW(betas=(0.0, 0.9)), **options) as engine:
        seen.append([])
        with torch.autograd.graph.saved_tensors_hooks(pack, torch.Tensor.clone):
            ours = (engine if through == "engine" else model)(batch(0)).pow(2).mean()
        engine.backward(ours)
        engine.step()
        theirs, others = ([shape for shape in shapes_seen if shape not in shapes] for shapes_seen in seen)
        assert theirs == others and len(others) > 6 and others == seen[1]
        states = engine.optimizer.state_dict()["state"]  # type: ignore[union-attr]
        for position, (name, parameter) in enumerate(plain.named_parameters()):
            assert torch.equal(states[position]["exp_avg"], parameter.grad), name


@pytest.mark.parametrize("make", ["attention", "encoder"])
def test_evaluation_of_attention_is_the_same_for_every_placement(make: str, tmp_path: Path) -> None:
    """In evaluation torch takes other operators, but only where no mode and no hook is in force."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            layer: Callable[[], nn.Module] = functools.partial(
                nn.TransformerEncoderLayer, WIDTH, 4, 2 * WIDTH, batch_first=True
            )
            if make == "attention":
                layer = functools.partial(nn.MultiheadAttention, WIDTH, 4, batch_first=True)
            self.layers = nn.ModuleList(layer() for _ in range(4))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for layer in self.layers:
                x = layer(x, x, x)[0] if make == "attention" else layer(x)
            return x

    def outputs(**options: Any) -> torch.Tensor:
        torch.manual_seed(0)
        with offload.Engine(Net(), **options) as engine, torch.no_grad():
            engine.eval()
            result: torch.Tensor = engine(batch(0, 3, 5, WIDTH))
        return result

    torch.manual_seed(0)
    plain = Net().eval()
    ours = outputs(**tight(plain, tmp_path))
    assert torch.equal(ours, outputs(**everything_on_device()))
    assert torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.no_grad():
            assert torch.equal(ours, plain(batch(0, 3, 5, WIDTH)))
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def test_engines_in_two_threads_switch_the_fast_path_of_attention_together() -> None:
    """The one that has begun first ends inside the forward of the other."""
    inside, leave, seen = threading.Event(), threading.Event(), list[bool]()

    class First(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            inside.set()
            assert leave.wait(60)
            return super().forward(x)

    class Second(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            leave.set()
            thread.join()
            seen.append(torch.backends.mha.get_fastpath_enabled())
            return super().forward(x)

    def evaluate(engine: offload.Engine) -> None:
        with torch.no_grad():
            engine(batch(0))

    first = offload.Engine(First(WIDTH, WIDTH), None, **everything_on_device())
    second = offload.Engine(Second(WIDTH, WIDTH), None, **everything_on_device())
    with first, second:
        thread = threading.Thread(target=evaluate, args=(first,))
        thread.start()
        assert inside.wait(60)
        evaluate(second)
    assert seen == [False] and torch.backends.mha.get_fastpath_enabled()


def test_forward_mode_differentiation(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = Stack()

    def tangent(forward: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        with forward_ad.dual_level():
            return forward_ad.unpack_dual(forward(forward_ad.make_dual(batch(0), batch(1)))).tangent

    truth = tangent(model)
    with offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
        assert torch.equal(tangent(engine), truth)


@pytest.mark.parametrize("reentrant", [False, True])
def test_plain_backward_of_a_segment_without_modules(reentrant: bool, tmp_path: Path) -> None:
    """Repeated outside engine.backward(), no mode sees such a segment, but its parameters' own class does."""
    found = []
    for plain in (False, True):
        CASES["it"] = Case(_checkpointed(reentrant, "parameters only"))
        model = build("it")
        del CASES["it"]
        with offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
            loss = engine(batch(0)).pow(2).mean()
            loss.backward() if plain else engine.backward(loss)
            assert engine.step()
            found.append(engine.state_dict())
    for name, value in found[0].items():
        assert torch.equal(found[1][name], value), name


@pytest.mark.parametrize("way", ["grad", "materialize", "inputs", "engine"])
@pytest.mark.parametrize("use", ["segment", "hook"])
def test_a_backward_pass_for_given_parameters_may_use_them(use: str, way: str, tmp_path: Path) -> None:
    """Without a module's forward, as in a segment of its own, or in a hook of the user."""

    class Reused(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if use == "segment":
                x = checkpoint(lambda x: F.linear(x, self.blocks[5].weight).tanh(), x, use_reentrant=False)
            x = super().forward(x)
            if use == "hook":
                x.register_hook(lambda slope: slope @ self.blocks[0].weight)
            return x

    found: list[list[torch.Tensor]] = []
    for place in (everything_on_device, tight):
        torch.manual_seed(0)
        model = Reused()
        model.unused = nn.Linear(3, 3) if way == "materialize" else None
        wanted = list(model.parameters())
        options = place(model, tmp_path) if place is tight else place()
        with offload.Engine(model, offload.AdamW(), **options) as engine:
            loss = engine(batch(0)).pow(2).mean()
            if way in ("grad", "materialize"):
                found.append(list(torch.autograd.grad(loss, wanted, materialize_grads=way == "materialize")))
                continue
            loss.backward(inputs=wanted) if way == "inputs" else engine.backward(loss, inputs=wanted)
            with engine.gather_gradients():
                found.append([parameter.grad.clone() for parameter in wanted])
    for ours, theirs in zip(*found, strict=True):
        assert torch.equal(ours, theirs)
        assert ours.stride() == theirs.stride()


class Captioner(Stack):
    """Like image captioners of transformers: ``generate`` uses a parameter of its own, outside any forward."""

    def __init__(self) -> None:
        super().__init__()
        self.queries = nn.Parameter(torch.randn(1, WIDTH))
        self.reader = linear()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x + self.reader(self.queries.expand(x.shape[0], -1)))

    def generate(self, x: torch.Tensor, take: Callable[[nn.Parameter], torch.Tensor]) -> torch.Tensor:
        read = self.reader(input=take(self.queries))
        for block in self.blocks:
            x = torch.tanh(block(x + read)) + x
        return x


VIEWS: dict[str, Callable[[nn.Parameter], torch.Tensor]] = {
    "expand": lambda p: p.expand(4, -1),
    "index": lambda p: p[0],
    "detach": lambda p: p.detach(),
}


@pytest.mark.parametrize("view", VIEWS)
def test_view_taken_outside_any_forward(view: str, tmp_path: Path) -> None:
    """It shows what the parameter holds, and keeps it on the device as long as it lives."""
    torch.manual_seed(0)
    plain = Captioner()
    model = copy.deepcopy(plain)
    with torch.no_grad(), offload.Engine(model, offload.AdamW(), **tight(model, tmp_path)) as engine:
        with engine.gather(model.blocks[:3]):
            pass
        index = next(u.index for u in engine.plan.request.units if any(s.name == "queries" for s in u.slots))
        assert index not in engine._manager.bound  # displaced
        truth = plain.generate(batch(0), VIEWS[view])
        assert torch.equal(engine.module.generate(batch(0), VIEWS[view]), truth)
        taken = VIEWS[view](model.queries)
        engine(batch(0))
        assert torch.equal(taken, VIEWS[view](plain.queries)) and engine._manager.bound.borrowed(index)
        del taken
        with engine.gather(model.queries):
            assert torch.equal(engine.module.generate(batch(0), VIEWS[view]), truth)
        engine(batch(0))
        same = engine.module.generate(batch(0), lambda parameter: parameter)  # seen where the forward uses it
        assert torch.equal(same, plain.generate(batch(0), lambda parameter: parameter))
        assert torch.equal(engine(batch(1)), plain(batch(1)))
        engine._manager.check()
