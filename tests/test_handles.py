"""What stands in ``.grad`` for a gradient that has left: clipping, scaling, clearing and accumulating as in torch."""

from __future__ import annotations

import contextlib
import copy
import gc
import math
import pickle
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import sweep
import torch
from harness import (
    ACTIVATION_BYTES,
    WIDTH,
    assert_same_tensors,
    batch,
    everything_on_device,
    host,
    loss_of,
    parameters_on_device,
    tight,
)
from torch import nn

import offload
from offload import SGD, AdamW, Engine
from offload.activations.rss import Rss, reset_high_water
from offload.memory.budget import Tier
from offload.module.gradient_book import GradientBook
from offload.module.handles import GradientHandle

pytestmark = [
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]


PLACES: dict[str, Callable[..., dict[str, Any]]] = {
    "device": lambda model, path, **more: {**everything_on_device(), **more},
    "states on the host": lambda model, path, **more: {**parameters_on_device(), **more},
    "host": lambda model, path, **more: {**host(model, unit_bytes=4608), **more},
    "nvme": tight,
}


class Net(nn.Module):
    """Six blocks, each a unit, and a parameter that is used now and then."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.rare = nn.Parameter(torch.ones(WIDTH))
        self.uses_rare = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x * self.rare if self.uses_rare else x


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


@pytest.fixture
def wrapped(tmp_path: Path) -> Iterator[tuple[Engine, Net, Net]]:
    """An engine on NVMe, its model, and the plain model."""
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        yield engine, model, net()


def backward(engine: Engine, plain: nn.Module, number: int = 0) -> None:
    engine.backward(loss_of(engine, number))
    loss_of(plain, number).backward()


def gradients(module: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in module.parameters() if p.grad is not None]


def assert_close(ours: torch.Tensor | float, truth: torch.Tensor | float, rel: float = 1e-6) -> None:
    assert float(ours) == pytest.approx(float(truth), rel=rel, nan_ok=True)


# --- the sweep --------------------------------------------------------------------------------------------------------

ANSWERED = {  # beside what looks at shape, dtype and the like
    *("mul", "mul_", "multiply", "multiply_", "div", "div_", "divide", "divide_", "true_divide", "true_divide_"),
    *("__mul__", "__imul__", "__rmul__", "__truediv__", "__itruediv__", "__div__", "__idiv__"),
    *("neg", "neg_", "negative", "negative_", "__neg__", "__pos__", "positive", "zero_", "norm", "clone", "detach"),
    *("detach_", "data", "to", "float", "double", "half", "bfloat16", "cpu", "contiguous", "view", "reshape"),
    *("flatten", "ravel", "view_as", "isfinite", "isinf", "isnan", "isneginf", "isposinf", "requires_grad_"),
    *("__repr__", "__str__"),
}


def test_every_method_on_a_handle(wrapped: tuple[Engine, Net, Net]) -> None:
    """What needs no elements answers as the gradient would; everything else is refused, and changes nothing."""
    engine, model, plain = wrapped
    loss_of(plain, 0).backward()
    truth = plain.blocks[2].weight.grad
    assert truth is not None
    wrong, answered, refused = [], set(), 0
    handle: Any = None
    for name in sweep.names():
        reference: list[torch.Tensor] = []
        found = sweep.fitting(lambda: reference.append(truth.clone()) or reference[-1], name)  # noqa: B023
        if found is None:
            continue
        wanted, grad, arguments = found
        if handle is None:
            engine.zero_grad()
            engine.backward(loss_of(engine, 0))
            handle = model.blocks[2].weight.grad
            assert isinstance(handle, GradientHandle)
        try:
            with torch.set_grad_enabled(grad):
                got = sweep.call(handle, name, arguments)
        except offload.StateError as error:
            refused += 1
            if name in ANSWERED and arguments not in ((torch.float64,),):
                wrong.append((name, arguments, str(error)))
            if "gradient of blocks.2.weight" not in str(error) or "engine.gather_gradients" not in str(error):
                wrong.append((name, str(error)))
        except Exception as error:
            if name != "dequantize":
                wrong.append((name, repr(error)))
        else:
            answered.add(name)
            if isinstance(got, GradientHandle):
                norm = wanted.double().norm()
                rounded = 1e-2 if wanted.dtype.itemsize < 4 else 1e-5
                alike = (got.shape, got.dtype) == (wanted.shape, wanted.dtype)
                if not alike or float(got.norm()) != pytest.approx(float(norm), rel=rounded):
                    wrong.append((name, wanted, got))
            elif isinstance(got, torch.Tensor) and got.is_floating_point() and name == "norm":
                assert_close(got, wanted)
            elif name not in ("__repr__", "__str__", "_version") and not sweep.same(wanted, got):
                wrong.append((name, wanted, got))
        now = reference[-1] if name in answered and name in ANSWERED else truth
        if float(handle.norm()) != pytest.approx(float(now.norm()), rel=1e-5):
            wrong.append((name, "has changed it", handle.norm(), now.norm()))
        if name in answered:  # what is refused leaves the gradient to the next one
            handle = None
    assert not wrong
    properties = {name for name in answered if sweep.is_property(name)}
    assert {"shape", "dtype", "device", "is_sparse", "requires_grad"} < properties
    assert refused > 300
    engine._manager.check()


def test_it_takes_no_memory_and_says_what_it_is(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, _ = wrapped
    engine.backward(loss_of(engine, 0))
    handle = model.blocks[1].weight.grad
    assert handle is not None and handle.grad_fn is None and not handle.requires_grad
    assert (
        repr(handle) == "GradientHandle(blocks.1.weight, shape=(32, 32), dtype=torch.float32, device='cpu', factor=1)"
    )
    assert f"{handle}" == repr(handle)
    for use in (
        copy.deepcopy,
        pickle.dumps,
        lambda h: f"{h:.3f}",
        lambda h: h.data_ptr(),
        lambda h: h.untyped_storage(),
        bool,
        float,
    ):
        with pytest.raises((offload.StateError, RuntimeError), match=r"gradient of blocks|Boolean value|converted to"):
            use(handle)


# --- norms and clipping -----------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("order", [2.0, math.inf, 1.0, 3.0, 0.0, -math.inf])
@pytest.mark.parametrize("foreach", [None, False, True])
def test_norms(order: float, foreach: bool | None, wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    backward(engine, plain)
    for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
        assert_close(ours.norm(order), theirs.norm(order), 1e-5)
        assert_close(torch.linalg.vector_norm(ours, order), torch.linalg.vector_norm(theirs, order), 1e-5)
        dims = tuple(range(ours.dim()))
        whole = torch.linalg.vector_norm(ours, order, dims, keepdim=True)
        assert_close(whole, torch.linalg.vector_norm(theirs, order, dims, keepdim=True), 1e-5)
        if ours.dim() == 2:
            assert_close(torch.linalg.norm(ours, "fro"), torch.linalg.matrix_norm(theirs), 1e-5)
            with pytest.raises(offload.StateError, match="along a dimension of the gradient"):
                torch.linalg.vector_norm(ours, order, (1,))
    total = torch.nn.utils.get_total_norm(gradients(model), order, foreach=foreach)
    assert_close(total, torch.nn.utils.get_total_norm(gradients(plain), order), 1e-5)
    assert total.dtype == torch.float32 and total.device == engine.device


def test_how_many_elements_are_not_zero_does_not_depend_on_a_factor(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    backward(engine, plain)
    for factor in (0.25, -3.0, 0.0):
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            ours.mul_(factor)
            theirs.mul_(factor)
            assert ours.norm(0).item() == theirs.norm(0).item()


@pytest.mark.few(6)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("foreach", [None, False, True])
@pytest.mark.parametrize("place", PLACES)
def test_torchs_clipping(place: str, foreach: bool | None, dtype: torch.dtype, tmp_path: Path) -> None:
    """The step is one with clipped gradients, and both report the norm before."""
    model, other = net(dtype=dtype), net(dtype=dtype)
    (tmp_path / "swap").mkdir()
    with (
        Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine,
        Engine(other, SGD(lr=0.1), max_grad_norm=0.05, **everything_on_device()) as built_in,
    ):
        for number in range(3):
            x = batch(number).to(dtype)
            for one in (engine, built_in):
                one.backward(one(x).float().sub(1).pow(4).mean())
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05, foreach=foreach)
            assert norm > 0.05
            assert_close(engine.grad_norm, norm)
            assert_close(torch.nn.utils.get_total_norm(gradients(model)), 0.05, 1e-4)
            assert engine.step() and built_in.step()
            assert_close(engine.grad_norm, norm)
            assert_close(built_in.grad_norm, norm, 1e-2 if dtype is torch.bfloat16 else 1e-5)
        for name, value in built_in.state_dict().items():
            ours = engine.state_dict()[name]
            assert torch.allclose(ours.float(), value.float(), rtol=1e-2 if dtype is torch.bfloat16 else 1e-5)
            assert name == "rare" or not torch.equal(ours, net(dtype=dtype).state_dict()[name])


@pytest.mark.parametrize("place", PLACES)
def test_placement_changes_nothing_when_torch_clips(place: str, tmp_path: Path) -> None:
    """Clipping that comes and goes, so that updates during backward are guessed rightly and wrongly."""
    found = []
    for where in (place, "device"):
        model = net()
        with Engine(model, AdamW(lr=1e-2), **PLACES[where](model, tmp_path)) as engine:
            for number in range(8):
                engine.backward(loss_of(engine, number))
                if number in (2, 3, 6):
                    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                engine.step()
                engine._manager.check()
            early = engine.stats()
            found.append(engine.state_dict())
    assert_same_tensors(*found)
    del early


def test_a_factor_that_differs_from_the_guess_withdraws_it(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            engine.step()
        taken, dropped = engine.stats().early_units, engine.stats().early_units_dropped
        assert taken and not dropped
        engine.backward(loss_of(engine, 3))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        engine.step()
        assert engine.stats().early_units == taken and engine.stats().early_units_dropped > 0


def test_clipping_twice(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    backward(engine, plain)
    for limit in (1.0, 0.5, 2.0):
        ours = torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        truth = torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        assert_close(ours, truth, 1e-5)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        assert_close(a.norm(), b.norm(), 1e-5)


def test_both_clip(tmp_path: Path) -> None:
    """The engine clips what torch has left; grad_norm is the norm before either."""
    model, plain = net(), net()
    with Engine(model, SGD(lr=0.1), max_grad_norm=0.25, **tight(model, tmp_path)) as engine:
        backward(engine, plain)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.25)
        engine.step()
        assert_close(engine.grad_norm, norm)
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("limit", [0.0, -1.0, math.inf])
def test_odd_limits_mean_what_they_mean_in_torch(limit: float, tmp_path: Path) -> None:
    model, plain = net(), net()
    with Engine(model, SGD(lr=0.1), **tight(model, tmp_path)) as engine:
        backward(engine, plain)
        torch.nn.utils.clip_grad_norm_(model.parameters(), limit)
        torch.nn.utils.clip_grad_norm_(plain.parameters(), limit)
        engine.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_a_limit_of_nan_is_refused_at_the_step(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, _ = wrapped
    before = engine.state_dict()
    engine.backward(loss_of(engine, 0))
    torch.nn.utils.clip_grad_norm_(model.parameters(), math.nan)
    with pytest.raises(offload.NonFiniteError, match=r"gradient of rare: was multiplied by NaN.*Look at max_norm"):
        engine.step()
    assert_same_tensors(engine.state_dict(), before)
    engine.backward(loss_of(engine, 0))
    assert engine.step()


def test_the_engines_own_clipping(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    with pytest.raises(offload.StateError, match="call backward first"):
        engine.clip_grad_norm_(1.0)
    assert float(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)) == 0.0, "as torch's own without gradients"
    backward(engine, plain)
    for limit in (-1.0, math.nan, "1"):
        with pytest.raises(offload.ConfigError, match=r"clip_grad_norm_: expected max_norm"):
            engine.clip_grad_norm_(limit)  # type: ignore[arg-type]
    for order in (2.0, math.inf):
        norm = engine.clip_grad_norm_(0.5, norm_type=order)
        assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5, norm_type=order), 1e-5)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        assert_close(a.norm(), b.norm(), 1e-5)


def test_grad_norm_is_known_before_the_step(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, _, plain = wrapped
    assert engine.grad_norm is None
    backward(engine, plain)
    before = engine.grad_norm
    assert_close(before, torch.nn.utils.get_total_norm(gradients(plain)), 1e-5)
    engine.step()
    assert engine.grad_norm == before
    engine.backward(loss_of(engine, 1))
    assert engine.grad_norm != before
    engine.zero_grad()
    assert engine.grad_norm == before


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_gradients_that_are_not_finite(value: float, wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    engine.backward(loss_of(engine, 0) + 0 * model.blocks[0].weight.sum())
    loss_of(plain, 0).backward()
    for module in (model, plain):
        with engine.gather_gradients(modify=True) if module is model else torch.no_grad():
            module.blocks[3].weight.grad[4, 5] = value
    for module in (model, plain):
        assert bool(module.blocks[3].weight.grad.isnan().any()) == math.isnan(value)
        assert not torch.isfinite(module.blocks[3].weight.grad).all() and torch.isfinite(module.rare.grad).all()
        assert (
            not torch.isfinite(module.blocks[3].weight.grad)[4, 5] and torch.isfinite(model.blocks[3].weight.grad)[5, 4]
        )
        with pytest.raises(RuntimeError, match="The total norm of order"):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, error_if_nonfinite=True)
        norm = float(torch.nn.utils.get_total_norm(gradients(module)))
        assert math.isnan(norm) == math.isnan(value) and math.isinf(norm) == math.isinf(value)
    before = engine.state_dict()
    with pytest.raises(offload.NonFiniteError, match=r"gradient of blocks\.3\.weight: expected finite"):
        engine.step()
    assert_same_tensors(engine.state_dict(), before)


# --- arithmetic, absence, assignment ----------------------------------------------------------------------------------


def scale_each(module: Net) -> None:
    for number, p in enumerate(module.parameters()):
        p.grad.mul_(number / 7)


def assign_products(module: Net) -> None:
    for p in module.parameters():
        p.grad = p.grad * 0.25


def through_data(module: Net) -> None:
    for p in module.parameters():
        p.grad.data.mul_(0.5)
        p.grad.detach().div_(4)


def foreach(module: Net) -> None:
    grads = [p.grad for p in module.parameters()]
    torch._foreach_mul_(grads, 0.5)
    torch._foreach_div_(grads, [float(n + 1) for n in range(len(grads))])
    torch._foreach_neg_(grads)


def absent(module: Net) -> None:
    module.blocks[2].weight.grad = None
    del module.rare.grad


def zeros(module: Net) -> None:
    module.blocks[2].weight.grad.zero_()
    module.rare.grad *= 0


def keep_zeros(module: Net) -> None:
    module.zero_grad(set_to_none=False)
    module.rare.grad = torch.ones(WIDTH)


def own_tensor(module: Net) -> None:
    module.blocks[1].weight.grad = torch.full((WIDTH, WIDTH), 0.01)
    module.rare.grad = torch.ones(WIDTH).to_sparse().coalesce().to_dense()


def clip_each(module: Net) -> None:
    for p in module.parameters():
        torch.nn.utils.clip_grad_norm_(p, 0.01)


CHANGES = [scale_each, assign_products, through_data, foreach, absent, zeros, keep_zeros, own_tensor, clip_each]


@pytest.mark.few
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("place", PLACES)
def test_the_step_uses_what_is_in_grad(place: str, change: Callable[[nn.Module], None], tmp_path: Path) -> None:
    """Absent, zero, scaled, replaced: what torch's AdamW would do with it."""
    model, plain = net(), net()
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2, weight_decay=0.3, eps=1e-3)
    with Engine(model, AdamW(lr=1e-2, weight_decay=0.3, eps=1e-3), **PLACES[place](model, tmp_path)) as engine:
        for number in range(4):
            given.zero_grad()
            backward(engine, plain, number)
            if number % 2:
                change(model)
                change(plain)
            engine.step()
            given.step()
            assert all(p.grad is None for p in model.parameters())
        ours, states = engine.state_dict(), engine.optimizer.state_dict()["state"]
        for position, (name, value) in enumerate(plain.named_parameters()):
            assert torch.allclose(ours[name], value, rtol=1e-4, atol=1e-6), name
            assert states[position]["step"] == given.state[value]["step"], name
        engine._manager.check()


def test_another_parameters_gradient_is_refused(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, _ = wrapped
    engine.backward(loss_of(engine, 0))
    model.blocks[1].weight.grad = model.blocks[2].weight.grad
    with pytest.raises(offload.StateError, match=r"gradient of blocks\.1\.weight: expected its own.*blocks\.2\.weight"):
        engine.step()
    assert all(p.grad is None for p in model.parameters())
    engine.backward(loss_of(engine, 0))
    assert engine.step()


@pytest.mark.parametrize("end", ["step", "zero_grad", "module.zero_grad", "optimizer.zero_grad", "close"])
def test_a_handle_that_was_kept_is_stale(end: str, tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path))
    engine.backward(loss_of(engine, 0))
    kept = model.blocks[2].weight.grad
    assert kept is not None
    ends: dict[str, Callable[[], object]] = {
        "step": engine.step,
        "zero_grad": engine.zero_grad,
        "module.zero_grad": model.zero_grad,
        "optimizer.zero_grad": engine.optimizer.zero_grad,
        "close": engine.close,
    }
    ends[end]()
    assert all(p.grad is None for p in model.parameters())
    if end != "close":
        engine.backward(loss_of(engine, 1))
    for use in (lambda: kept.norm(), lambda: kept.mul_(2), lambda: kept.sum(), lambda: kept.isnan()):
        with pytest.raises(
            offload.StateError, match=r"blocks\.2\.weight: expected one that waits.*from before the last"
        ):
            use()
    if end != "close":
        model.blocks[2].weight.grad = kept
        with pytest.raises(offload.StateError, match="from before the last step"):
            engine.step()
    engine.close()


def test_handles_of_two_engines_in_one_call(tmp_path: Path) -> None:
    first, second, plain = net(1), net(2), nn.ModuleList([net(1), net(2)])
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Engine(first, SGD(lr=1.0), **tight(first, tmp_path / "a")) as a,
        Engine(second, SGD(lr=1.0), **tight(second, tmp_path / "b")) as b,
    ):
        backward(a, plain[0])
        backward(b, plain[1])
        linear = nn.Linear(3, 3)
        linear(torch.ones(3)).sum().backward()
        own = copy.deepcopy(linear)
        own.weight.grad, own.bias.grad = linear.weight.grad.clone(), linear.bias.grad.clone()
        for parallel in (False, True):
            mine = [*first.parameters(), *second.parameters(), *linear.parameters()]
            ours = torch.nn.utils.clip_grad_norm_(mine, 2.0 - parallel, foreach=parallel)
            truth = torch.nn.utils.clip_grad_norm_([*plain.parameters(), *own.parameters()], 2.0 - parallel)
            assert_close(ours, truth, 1e-5)
        assert torch.allclose(linear.weight.grad, own.weight.grad, rtol=1e-5)
        a.step()
        b.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= p.grad
        for engine, module in ((a, plain[0]), (b, plain[1])):
            for name, value in module.state_dict().items():
                assert torch.allclose(engine.state_dict()[name], value, rtol=1e-4, atol=1e-6), name


# --- optimizers that are not the engine's -----------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    "kind", [torch.optim.AdamW, torch.optim.SGD, torch.optim.RMSprop, torch.optim.Adagrad, torch.optim.NAdam]
)
@pytest.mark.parametrize("foreach", [False, True])
def test_a_foreign_optimizer_is_refused(
    kind: type[torch.optim.Optimizer], foreach: bool, place: str, tmp_path: Path
) -> None:
    model = net()
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        foreign = kind(model.parameters(), lr=0.1, foreach=foreach)
        before = engine.state_dict()
        engine.backward(loss_of(engine, 0))
        with pytest.raises(offload.StateError, match=r"engine\.optimizer"):
            foreign.step()
        assert_same_tensors(engine.state_dict(), before)
        assert engine.step()


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_it_is_refused_before_it_has_made_its_states(place: str, tmp_path: Path) -> None:
    """Which would take twice the model's memory, on top of every budget."""
    model = nn.Sequential(*[nn.Linear(1024, 1024) for _ in range(8)])  # 32 MiB
    size = sum(p.nbytes for p in model.parameters())
    options = {"device": "256MiB", "cpu": "128MiB"} if place == "device" else {"device": "64MiB", "cpu": "64MiB"}
    more = {} if place == "device" else {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": tmp_path}
    with Engine(model, AdamW(), device="cpu", max_memory=options, **more) as engine:
        engine.backward(engine(torch.ones(1, 1024)).sum())
        gc.collect()
        meter = Rss()
        before = meter.now_bytes()
        reset_high_water()  # the peak starts anew
        with pytest.raises(offload.StateError, match="zeros_like of parameter"):
            torch.optim.AdamW(model.parameters()).step()
        assert meter.high_water_bytes() - before < size / 4
        meter.close()


# --- several backward passes ------------------------------------------------------------------------------------------


def exact_gradients(numbers: range, dtype: torch.dtype) -> list[torch.Tensor]:
    """Return sums over batches of what autograd makes in `dtype`, added in float64."""
    sums: list[torch.Tensor] = []
    for number in numbers:
        plain = net(dtype=dtype)
        plain(batch(number).to(dtype)).float().sub(1).pow(4).mean().backward()
        found = [p.grad.double() for p in plain.parameters()]
        sums = [a + b for a, b in zip(sums, found, strict=True)] if sums else found
    return sums


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    "options", [{}, {"gradient_accumulation_steps": 8, "gradient_reduction": "sum"}], ids=["1", "8"]
)
@pytest.mark.parametrize("place", PLACES)
def test_backward_passes_add_in_fp32(place: str, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Whether the engine was told of them or not, as long as the plan has room."""
    truth = exact_gradients(range(8), dtype)
    model = net(dtype=dtype)
    given = PLACES[place](model, tmp_path, **options)
    given["max_memory"] = {**given["max_memory"], "cpu": "64MiB"}
    with Engine(model, SGD(lr=0.1), **given) as engine:
        for number in range(8):
            engine(batch(number).to(dtype)).float().sub(1).pow(4).mean().backward()
        total = sum(float(g.norm().double() ** 2) for g in gradients(model)) ** 0.5
        exact = sum(float(g.norm() ** 2) for g in truth) ** 0.5
        assert total == pytest.approx(exact, rel=1e-6)
        with engine.gather_gradients():
            for parameter, wanted in zip(model.parameters(), truth, strict=True):
                rounded = wanted.float().to(dtype)
                precision = 2**-8 if dtype is torch.bfloat16 else 1e-5
                assert torch.allclose(parameter.grad.float(), rounded.float(), rtol=precision, atol=1e-4)
        engine.optimizer.step()
        engine._manager.check()
        # and again, with the room that the last step has left
        engine(batch(9).to(dtype)).float().sub(1).pow(4).mean().backward()
        first = float(gradients(model)[0].norm())
        engine(batch(9).to(dtype)).float().sub(1).pow(4).mean().backward()
        assert_close(gradients(model)[0].norm(), 2 * first, 1e-6)
        engine.optimizer.step()


@pytest.mark.parametrize("updated_early", [False, True])
def test_trainers_and_the_engines_own_accumulation_agree_to_the_bit(updated_early: bool, tmp_path: Path) -> None:
    found = []
    for options in ({"gradient_accumulation_steps": 4}, {}):
        model = net(dtype=torch.bfloat16)
        places = {**tight(model, tmp_path, dtype="bfloat16"), "max_memory": {"device": "64MiB", "cpu": "64MiB"}}
        places["max_memory"]["nvme"] = "64MiB"
        with Engine(model, AdamW(lr=1e-2), **places, **options) as engine:
            engine._step.overlap = updated_early
            for step in range(3):
                for number in range(4):
                    loss = engine(batch(4 * step + number).bfloat16()).float().sub(1).pow(4).mean()
                    loss = loss if options else loss / 4
                    engine.backward(loss)
                    if options:
                        engine.step()
                if not options:
                    engine.optimizer.step()
            found.append((engine.state_dict(), engine.stats()))
    # dividing by a power of two is exact, before backward or after it
    assert_same_tensors(found[0][0], found[1][0])
    assert found[1][1].early_units_dropped <= 7, "updates during backward rest once steps turn out to have several"


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("place", ["device", "nvme"])
def test_without_room_for_fp32_a_second_pass_is_refused(place: str, reentrant: bool, tmp_path: Path) -> None:
    """By name, with the remedy, and what has arrived is as it was. What one pass brings twice is added as in torch."""

    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for block in (*self.blocks, *self.blocks):
                x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=reentrant) + x
            return x

    torch.manual_seed(0)
    model = Shared().bfloat16()
    plain = copy.deepcopy(model)
    options = tight(model, tmp_path, dtype="bfloat16")
    if place == "device":
        needed = 3 * 4096 * (2 + 2 + 2 + 8)
        budgets = {"device": ACTIVATION_BYTES + needed, "cpu": "1MiB"}
        options = {"device": "cpu", "max_memory": budgets, "activation_memory": ACTIVATION_BYTES, "unit_bytes": 4608}
    else:
        plan_needs = 3 * 4096 * 2 + 4 * 65536 * 12
        options["max_memory"] = {**options["max_memory"], "cpu": plan_needs + 4096}
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        assert not engine.plan.wide_bytes
        x = batch(0).bfloat16().requires_grad_()
        y = batch(0).bfloat16().requires_grad_()
        engine(x).float().pow(2).mean().backward()
        plain(y).float().pow(2).mean().backward()
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            assert_close(ours.norm(), theirs.float().norm(), 1e-6)
        message = r"gradient of blocks\.\d\.\w+: expected one backward pass per step.*pass gradient_accumulation_steps"
        norm = engine.grad_norm
        with pytest.raises(offload.StateError, match=message):
            engine(x).float().pow(2).mean().backward()
        assert engine.grad_norm == norm
        engine.zero_grad()
        engine.backward(engine(x).float().pow(2).mean())
        assert engine.step()


class Repeated(nn.Module):
    """Two blocks that backward repeats."""

    def __init__(self, *, reentrant: bool) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(2)).bfloat16()
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.utils.checkpoint.checkpoint(block, x, use_reentrant=self._reentrant)
        return x


def roomy(model: nn.Module, path: Path) -> dict[str, Any]:
    options = tight(model, path, dtype="bfloat16")
    return {**options, "max_memory": {**options["max_memory"], "cpu": "64MiB"}}


@pytest.mark.parametrize("reentrant", [False, True])
def test_passes_that_repeat_segments_add_in_fp32_without_a_forward_between(reentrant: bool, tmp_path: Path) -> None:
    """Reentrant segments have tasks of their own, which belong to their pass and to no other."""

    def norms(*, between: bool) -> list[float]:
        model = Repeated(reentrant=reentrant)
        with Engine(model, SGD(lr=0.1), **roomy(model, tmp_path)) as engine:
            x, y = (batch(number).bfloat16().requires_grad_() for number in range(2))
            first = engine(x).float().pow(2).mean()
            second = None if between else engine(y).float().pow(2).mean()
            first.backward()
            (engine(y).float().pow(2).mean() if second is None else second).backward()
            return [float(gradient.norm()) for gradient in gradients(model)]

    assert norms(between=False) == norms(between=True)


@pytest.mark.parametrize("reentrant", [False, True])
def test_a_pass_behind_one_that_has_failed_is_another_one(reentrant: bool, tmp_path: Path) -> None:
    """Torch tells nobody of its end. What it has brought stays, as in torch; what comes then is added in fp32."""

    def norms(*, between: bool) -> list[float]:
        model = Repeated(reentrant=reentrant)
        with Engine(model, SGD(lr=0.1), **roomy(model, tmp_path)) as engine:
            x, y = (batch(number).bfloat16().requires_grad_() for number in range(2))
            first, second = engine(x).float().pow(2).mean(), engine(y).float().pow(2).mean()
            x.register_hook(lambda slope: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                first.backward()
            if between:
                with torch.no_grad():
                    engine(y)
            second.backward()
            return [float(gradient.norm()) for gradient in gradients(model)]

    assert norms(between=False) == norms(between=True)


@pytest.mark.parametrize("place", PLACES)
def test_a_second_backward_of_a_retained_graph(place: str, tmp_path: Path) -> None:
    model, plain = net(), net()
    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        ours, theirs = loss_of(engine, 0), loss_of(plain, 0)
        for keep in (True, True, False):
            ours.backward(retain_graph=keep)
            theirs.backward(retain_graph=keep)
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert_close(a.norm(), b.norm(), 1e-5)
        engine.step()


@pytest.mark.skipif(not hasattr(torch.Tensor, "grad_dtype"), reason="torch has no grad_dtype")
def test_a_gradient_of_another_dtype_is_refused_with_what_made_it_so() -> None:
    model = net(dtype=torch.bfloat16)
    model.blocks[0].weight.grad_dtype = torch.float32
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        loss = engine(batch(0).bfloat16()).float().pow(2).mean()
        with pytest.raises(offload.StateError, match=r"gradient of blocks\.0\.weight: .*; leave .* grad_dtype"):
            engine.backward(loss)


@pytest.mark.filterwarnings("ignore:Using backward")
@pytest.mark.parametrize("place", PLACES)
def test_backward_with_create_graph_is_refused(place: str, tmp_path: Path) -> None:
    """What is made of such a ``.grad`` would be a constant. With torch.autograd.grad, a penalty counts."""
    model, plain = net(), net()
    options = {**PLACES[place](model, tmp_path)}
    options["max_memory"] = {**options["max_memory"], "device": "1GiB"}  # graphs of gradients keep parameters
    with Engine(model, SGD(lr=0.1), **options) as engine:
        with pytest.raises(offload.StateError, match=r"without create_graph, .*torch\.autograd\.grad\("):
            loss_of(engine, 0).backward(create_graph=True)
        engine.zero_grad()
        for m in (model, plain):
            slopes = torch.autograd.grad(loss_of(m, 0), list(m.parameters()), create_graph=True)
            (loss_of(m, 1) + 0.1 * sum(slope.norm() for slope in slopes)).backward()
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert_close(a.norm(), b.norm(), 1e-5)
        assert engine.optimizer is not None
        engine.optimizer.step()


COPIES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "clone": lambda grad: grad.clone(),
    "converted": lambda grad: grad.double(),
    "multiplied": lambda grad: grad * 1.0,
    "detached clone": lambda grad: grad.detach().clone(),
}
LATER: dict[str, Callable[[Engine, Net], object]] = {
    "backward": lambda engine, model: engine.backward(loss_of(engine, 1)),
    "zero_": lambda engine, model: model.rare.grad.zero_(),  # type: ignore[union-attr]
    "zero_grad": lambda engine, model: model.zero_grad(set_to_none=False),
    "assigned": lambda engine, model: setattr(model.rare, "grad", torch.ones(WIDTH)) or engine.grad_norm,
    "data": lambda engine, model: setattr(model.rare.grad, "data", torch.ones(WIDTH)),
}


@pytest.mark.parametrize("later", LATER)
@pytest.mark.parametrize("how", COPIES)
def test_a_copy_refuses_when_the_gradient_has_become_another(
    how: str, later: str, wrapped: tuple[Engine, Net, Net]
) -> None:
    """It has no elements of its own: in torch it would still have the old ones."""
    engine, model, plain = wrapped
    backward(engine, plain)
    assert model.rare.grad is not None and plain.rare.grad is not None
    kept = COPIES[how](model.rare.grad)
    assert_close(kept.norm(), plain.rare.grad.norm())
    model.rare.grad.mul_(3.0)  # of the other one alone
    assert_close(kept.norm(), plain.rare.grad.norm())
    LATER[later](engine, model)
    refused = r"gradient of rare: .*clone it inside 'with engine\.gather_grad"
    with pytest.raises(offload.StateError, match=refused):
        kept.norm()
    if kept.dtype == model.rare.dtype:
        model.rare.grad = kept
        with pytest.raises(offload.StateError, match=refused):
            _ = engine.grad_norm


def test_a_copy_that_takes_the_place_of_the_gradient_is_the_gradient(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    backward(engine, plain)
    for m in (model, plain):
        kept = m.rare.grad.clone()
        m.rare.grad = kept.mul_(2.0)
    first = model.rare.grad
    backward(engine, plain, 1)
    assert model.rare.grad is first
    assert_close(first.norm(), plain.rare.grad.norm(), 1e-5)
    with pytest.raises(offload.StateError, match=r"expected the one in \.grad to be written to but got a copy"):
        first.clone().zero_()


def test_data_of_a_gradient_is_assigned(wrapped: tuple[Engine, Net, Net]) -> None:
    """As many helpers scale and replace gradients."""
    engine, model, plain = wrapped
    backward(engine, plain)
    for m in (model, plain):
        m.blocks[0].weight.grad.data = m.blocks[0].weight.grad.data / 100
        m.blocks[1].weight.grad.data = torch.full((WIDTH, WIDTH), 0.5)
        m.blocks[2].bias.grad.data = torch.zeros(WIDTH)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        assert_close(a.norm(), b.norm(), 1e-5)
    for _ in range(2):  # and with a second pass on top
        with engine.gather_gradients():
            for a, b in zip(gradients(model), gradients(plain), strict=True):
                assert torch.allclose(a, b, atol=1e-6)
        backward(engine, plain, 1)
    first, second = model.blocks[3].weight, model.blocks[4].weight
    with pytest.raises(offload.StateError, match=r"expected its own in \.grad but got that of blocks\.\d\.weight"):
        first.grad.data, second.grad.data = second.grad.data, first.grad.data
    with pytest.raises(
        offload.StateError, match=r"expected a dense tensor of shape, dtype and device .* as its \.data"
    ):
        first.grad.data = torch.zeros(3)
    with pytest.raises(
        offload.ConfigError, match=r"blocks\.3\.weight: expected a tensor but got offload GradientHandle"
    ):
        first.data = first.grad


@pytest.mark.parametrize("kind", ["tensor", "parameter", "empty", "double", "wrapped in a module of its own"])
def test_a_gradient_does_not_become_the_data_of_a_foreign_tensor(kind: str, wrapped: tuple[Engine, Net, Net]) -> None:
    """Torch asks no class there, and reading such a tensor would end the process."""
    engine, model, plain = wrapped
    backward(engine, plain)
    weight = model.blocks[0].weight
    foreign = {
        "tensor": torch.ones(WIDTH, WIDTH),
        "parameter": nn.Parameter(torch.ones(WIDTH, WIDTH)),
        "empty": torch.empty(0),
        "double": torch.ones(WIDTH, WIDTH, dtype=torch.float64),
        "wrapped in a module of its own": nn.Linear(WIDTH, WIDTH).weight,
    }[kind]
    before = foreign.detach().clone()
    grad = weight.grad
    for gradient in (grad, grad.data, grad * 2, grad.view(-1), grad.to(foreign.dtype)):
        with pytest.raises(RuntimeError, match="incompatible tensor type"):
            foreign.data = gradient
    assert torch.equal(foreign, before)
    with engine.gather_gradients(weight):
        foreign.data = weight.grad.to(foreign.dtype)
    assert torch.equal(foreign.float(), plain.blocks[0].weight.grad)


def test_sparse_gradients_accumulate(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(50, WIDTH, sparse=True), nn.Linear(WIDTH, 1))
    plain = copy.deepcopy(model)
    with Engine(model, SGD(lr=0.1), **everything_on_device()) as engine:
        for number in range(2):
            ids = torch.tensor([1, 2, number])
            engine(ids).sum().backward()
            plain(ids).sum().backward()
        assert_close(model[0].weight.grad.norm(), plain[0].weight.grad.to_dense().norm())
        assert engine.optimizer.step() is None


@pytest.mark.parametrize("clear", ["module", "optimizer", "engine", "set to none", "del"])
def test_what_was_cleared_is_not_added_to(clear: str, wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    engine.backward(loss_of(engine, 0))
    clears: dict[str, Callable[[], object]] = {
        "module": model.zero_grad,
        "optimizer": engine.optimizer.zero_grad,
        "engine": engine.zero_grad,
        "set to none": lambda: [setattr(p, "grad", None) for p in model.parameters()],
        "del": lambda: [p.__delattr__("grad") for p in model.parameters()],
    }
    clears[clear]()
    assert all(p.grad is None for p in model.parameters())
    with pytest.raises(offload.StateError, match="expected gradients but none has arrived"):
        engine.step()
    backward(engine, plain, 1)
    for a, b in zip(gradients(model), gradients(plain), strict=True):
        assert_close(a.norm(), b.norm(), 1e-5)
    engine.step()


def test_a_parameter_that_only_some_passes_reach(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    for number, used in enumerate((True, False, True)):
        model.uses_rare = plain.uses_rare = used
        backward(engine, plain, number)
    assert_close(model.rare.grad.norm(), plain.rare.grad.norm(), 1e-5)
    engine.step()
    model.uses_rare = False
    engine.backward(loss_of(engine, 3))
    assert model.rare.grad is None
    engine.step()
    assert engine.optimizer.state_dict()["state"][[n for n, _ in model.named_parameters()].index("rare")]["step"] == 1


@pytest.mark.parametrize("place", PLACES)
def test_adding_to_what_was_scaled(place: str, tmp_path: Path) -> None:
    """The factor belongs to what had arrived, not to what comes."""
    model, plain = net(), net()
    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        backward(engine, plain, 0)
        for module in (model, plain):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        backward(engine, plain, 1)
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert_close(a.norm(), b.norm(), 1e-5)


def test_accumulation_through_the_engines_own_calls_with_torchs_clipping(tmp_path: Path) -> None:
    """The value of a handle is averaged, at every moment of an accumulation."""
    model, plain = net(), net()
    with Engine(model, SGD(lr=0.1), gradient_accumulation_steps=3, **tight(model, tmp_path)) as engine:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            (loss_of(plain, number) / 3).backward()
            for a, b in zip(gradients(model), gradients(plain), strict=True):
                assert_close(a.norm(), b.norm(), 1e-5)
            if number == 2:
                norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
                assert_close(norm, torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.1), 1e-5)
            engine.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("reduction", [None, "mean", "sum"])
def test_exactly_one_side_divides(reduction: str | None, tmp_path: Path) -> None:
    model, plain = net(), net()
    options = {"gradient_accumulation_steps": 4, "gradient_reduction": reduction}
    with Engine(model, SGD(lr=0.1), **tight(model, tmp_path, **options)) as engine:
        for number in range(4):
            (loss_of(model, number) / (4 if reduction == "sum" else 1)).backward()
            (loss_of(plain, number) / 4).backward()
        if reduction is None:  # nobody has said who divides
            with pytest.raises(offload.StateError, match='pass gradient_reduction="sum" if the loss is divided'):
                engine.optimizer.step()
            return
        assert_close(engine.grad_norm, torch.nn.utils.get_total_norm(gradients(plain)), 1e-5)
        engine.optimizer.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-5, atol=1e-7)


def test_a_reduction_that_does_not_exist() -> None:
    with pytest.raises(
        offload.ConfigError, match=r"gradient_reduction: expected one of mean, sum.*did you mean 'mean'"
    ):
        offload.Config(gradient_reduction="meen")  # type: ignore[arg-type]


# --- GradScaler, float16 ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("unscale", [False, True])
def test_torchs_grad_scaler(unscale: bool, tmp_path: Path) -> None:
    """Around fp32 parameters: an overflow is seen and skipped, and the scale does not reach the step."""
    model, plain = net(), net()
    given = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        sides = [(model, engine.optimizer), (plain, given)]
        scalers = [torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=2) for _ in sides]
        for number in range(5):
            for (module, optimizer), scaler in zip(sides, scalers, strict=True):
                factor = 1e38 if number == 2 else 1.0
                scaler.scale(loss_of(module, number) * factor).backward()
                if unscale:
                    scaler.unscale_(optimizer)
                    torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
            assert scalers[0].get_scale() == scalers[1].get_scale()
        assert engine.stats().step == 4
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-4, atol=1e-5), name


def test_grad_norm_is_unscaled(tmp_path: Path) -> None:
    model, plain = net(), net()
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        scaler = torch.amp.GradScaler("cpu", init_scale=64.0)
        scaler.scale(loss_of(engine, 0)).backward()
        scaler.unscale_(engine.optimizer)
        loss_of(plain, 0).backward()
        assert_close(engine.grad_norm, torch.nn.utils.get_total_norm(gradients(plain)), 1e-5)


def test_float16_is_scaled_by_the_engine(tmp_path: Path) -> None:
    """A handle's value is unscaled; torch's own scaler on top of it is refused by name."""
    model, plain = net(dtype=torch.float16), net(dtype=torch.float16)
    with Engine(model, SGD(lr=0.1), initial_loss_scale=8.0, **tight(model, tmp_path, dtype="float16")) as engine:
        x = batch(0).half()
        engine.backward(engine(x).float().pow(2).mean())
        plain(x).float().pow(2).mean().backward()
        for a, b in zip(gradients(model), gradients(plain), strict=True):
            assert_close(a.norm(), b.float().norm(), 5e-3)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(ValueError, match="Attempting to unscale FP16 gradients"):
            scaler.scale(torch.ones(1))
            scaler.unscale_(engine.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1e-3)
        assert engine.step()
        assert_close(engine.grad_norm, norm)
        with pytest.raises(offload.StateError, match=r"call engine\.backward\(loss\)"):
            scaler.scale(engine(x).float().pow(2).mean()).backward()


@pytest.mark.parametrize("place", ["device", "nvme"])
def test_a_float16_run_resumes_with_its_loss_scale(place: str, tmp_path: Path) -> None:
    """As documented: module and optimizer are saved; every later bit is that of the run that was not interrupted."""
    options = {"dtype": "float16", "initial_loss_scale": 2.0**16, "loss_scale_window": 3, "loss_scale_hysteresis": 1}

    def train(engine: Engine, numbers: range) -> list[tuple[float, float]]:
        found = []
        for number in numbers:
            loss = engine(batch(number).half()).float().sub(1).pow(4).mean() * (3 if number % 4 else 30)
            engine.backward(loss)
            engine.step()
            found.append((loss.item(), engine.loss_scale))
        return found

    def make(seed: int) -> Engine:
        model = net(seed)
        given = {**everything_on_device(), **options} if place == "device" else tight(model, tmp_path, **options)
        return Engine(model, AdamW(lr=1e-3), **given)

    with make(0) as engine:
        early = train(engine, range(9))
        assert len({scale for _, scale in early}) > 2, "the scale has fallen and risen"
        saved = copy.deepcopy((engine.state_dict(), engine.optimizer.state_dict()))
        counted = engine.stats().step, engine.stats().skipped_steps
        assert counted[1] > 0
        later = train(engine, range(9, 14))
        last = engine.state_dict()
    with make(1) as engine:
        engine.load_state_dict(saved[0])
        engine.optimizer.load_state_dict(saved[1])
        assert (engine.stats().step, engine.stats().skipped_steps) == counted
        assert train(engine, range(9, 14)) == later
        assert_same_tensors(engine.state_dict(), last)
        for run in (
            {"step": -1},
            {"step": "x", "skipped_steps": 0},
            3,
            {**saved[1]["run"], "loss_scale": {"scale": 0.0}},
        ):
            with pytest.raises(offload.ConfigError, match=r"expected \w+ of 'run' as a number"):
                engine.optimizer.load_state_dict({**saved[1], "run": run})
        plain = torch.optim.AdamW(net().parameters())
        plain.load_state_dict(saved[1])  # torch ignores what it does not know


def test_a_state_dict_beyond_the_host_budget_warns_where_there_is_no_drive() -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])  # 16 MiB, states 32 MiB
    budgets = {"device": "112MiB", "cpu": "28MiB"}
    with Engine(model, AdamW(), device="cpu", max_memory=budgets, activation_memory="16MiB") as engine:
        engine.backward(engine(torch.ones(2, 512)).sum())
        engine.step()
        with pytest.warns(
            UserWarning, match=r"optimizer\.state_dict: takes 32\.\d+ MiB of host memory.*budget of 28\.00"
        ):
            engine.optimizer.state_dict()
        engine.close(restore=False)


# --- gather_gradients -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("place", PLACES)
def test_gathered_gradients_have_elements(place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model, plain = net(dtype=dtype), net(dtype=dtype)
    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        x = batch(0).to(dtype)
        engine.backward(engine(x).float().pow(2).mean())
        plain(x).float().pow(2).mean().backward()
        with engine.gather_gradients():
            for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
                assert type(ours.grad) is torch.Tensor and torch.equal(ours.grad, theirs.grad)
        assert all(isinstance(p.grad, GradientHandle) for p in model.parameters())
        with engine.gather_gradients(model.blocks[2], modify=True):
            assert isinstance(model.blocks[1].weight.grad, GradientHandle)
            torch.nn.utils.clip_grad_value_(model.blocks[2].parameters(), 1e-3)
        with engine.gather_gradients([model.blocks[3].weight, model.rare], modify=True):
            model.blocks[3].weight.grad = torch.ones(WIDTH, WIDTH, dtype=dtype)
            model.rare.grad = None
        torch.nn.utils.clip_grad_value_(plain.blocks[2].parameters(), 1e-3)
        plain.blocks[3].weight.grad.fill_(1)
        plain.rare.grad = None
        assert model.rare.grad is None
        before = engine.state_dict()
        engine.step()
        for name, p in plain.named_parameters():
            step = engine.state_dict()[name].float() - before[name].float()
            wanted = torch.zeros_like(p).float() if p.grad is None else -0.1 * p.grad.float()
            assert torch.allclose(step, wanted, rtol=1e-2, atol=2e-2 if dtype is torch.bfloat16 else 1e-6), name
        assert torch.equal(engine.state_dict()["rare"], before["rare"])
        engine._manager.check()


def test_gradients_that_have_spilled(tmp_path: Path) -> None:
    """Their norms, factors and elements come from the drive."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(256, 256) for _ in range(16)])  # 4 MiB
    plain = copy.deepcopy(model)
    budgets = {"device": "6MiB", "cpu": "3MiB", "nvme": "64MiB"}
    options = {"device": "cpu", "max_memory": budgets, "activation_memory": "4MiB", "nvme_path": tmp_path}
    with Engine(model, SGD(lr=0.1), offload_param="nvme", **options) as engine:
        assert sum(home.grad is Tier.NVME for home in engine.plan.homes) > 4
        for module in (model, plain):
            for number in range(2):
                module(torch.full((2, 256), float(number))).pow(2).sum().backward()
            torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0, norm_type=math.inf)
            module[3].weight.grad.zero_()
            module[4].weight.grad = None
        with engine.gather_gradients(model[5], modify=True):
            model[5].weight.grad.sign_()
        plain[5].weight.grad.sign_()
        for ours, theirs in zip(gradients(model), gradients(plain), strict=True):
            assert_close(ours.norm(1), theirs.norm(1), 1e-4)
        engine.step()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad if p.grad is not None else 0
        for name, value in plain.state_dict().items():
            assert torch.allclose(engine.state_dict()[name], value, rtol=1e-4, atol=1e-6), name
        engine._manager.check()


def test_gathered_gradients_are_those_of_the_step(tmp_path: Path) -> None:
    """Averaged, and times their factors."""
    model = net()
    with Engine(model, SGD(lr=0.1), gradient_accumulation_steps=2, **tight(model, tmp_path)) as engine:
        for number in range(2):
            engine.backward(loss_of(engine, number))
            if number == 0:
                engine.step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        with engine.gather_gradients():
            assert_close(torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]), 0.5, 1e-4)
            taken = {name: p.grad.clone() for name, p in model.named_parameters()}
        before = engine.state_dict()
        engine.step()
        for name, value in engine.state_dict().items():
            assert torch.allclose(value, before[name] - 0.1 * taken[name], rtol=1e-5, atol=1e-7)


def test_misuse_of_gather_gradients(wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, _ = wrapped
    engine.backward(loss_of(engine, 0))
    before = engine.grad_norm
    with pytest.raises(offload.StateError, match=r"gradient of blocks\.0\.weight was changed; pass modify=True"):
        with engine.gather_gradients():
            model.blocks[0].weight.grad.zero_()
    assert engine.grad_norm == before
    with pytest.raises(KeyError), engine.gather_gradients(modify=True):
        model.blocks[0].weight.grad.zero_()
        raise KeyError
    assert engine.grad_norm == before
    with engine.gather_gradients(model.rare):
        for use in (lambda: engine.backward(loss_of(engine, 1)), engine.step, lambda: engine.grad_norm):
            with pytest.raises(offload.StateError, match="gather"):
                use()
        with (
            pytest.raises(offload.StateError, match="gradients are gathered"),
            engine.gather_gradients(model.blocks[0]),
        ):
            pass
    for params, error in ((3, offload.ConfigError), (nn.Linear(2, 2), offload.StateError), ([3], offload.StateError)):
        with pytest.raises(error, match="gather_gradients: expected"), engine.gather_gradients(params):
            pass
    with engine.gather_gradients(modify=True):
        engine.zero_grad()
    assert all(p.grad is None for p in model.parameters())
    engine.backward(loss_of(engine, 1))
    assert engine.step()
    engine._manager.check()


@pytest.mark.parametrize("modify", [False, True])
def test_gathering_that_fails_on_the_way_leaves_the_gradients(
    modify: bool, wrapped: tuple[Engine, Net, Net], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever parameter it comes to, as it begins or as it ends."""
    engine, model, plain = wrapped
    backward(engine, plain)
    before, count = engine.digests(), len(list(model.parameters()))
    real, calls = GradientBook.values, 0

    def values(self: GradientBook, *given: Any) -> torch.Tensor:
        nonlocal calls
        calls += 1
        if calls == nth:
            raise MemoryError("no memory")
        return real(self, *given)

    for nth in range(1, 2 * count + 1):
        calls = 0
        with monkeypatch.context() as patch, pytest.raises(MemoryError, match="no memory"):
            patch.setattr(GradientBook, "values", values)
            with engine.gather_gradients(modify=modify):
                assert nth > count and not any(isinstance(p.grad, GradientHandle) for p in model.parameters())
        assert all(isinstance(p.grad, GradientHandle) for p in model.parameters()), nth
    assert engine.digests() == before
    assert engine.step()


def test_gathered_gradients_are_charged(tmp_path: Path) -> None:
    model = nn.Sequential(*[nn.Linear(512, 512) for _ in range(16)])  # 16 MiB
    budgets = {"device": "12MiB", "cpu": "64MiB", "nvme": "128MiB"}
    options = {"device": "cpu", "max_memory": budgets, "activation_memory": "6MiB", "nvme_path": tmp_path}
    with Engine(model, AdamW(), offload_param="nvme", **options) as engine:
        engine.backward(engine(torch.ones(2, 512)).sum())
        with pytest.raises(offload.BudgetError, match="gathered gradients needs 16"), engine.gather_gradients():
            pass
        for parameter in model.parameters():
            with engine.gather_gradients(parameter, modify=True):
                parameter.grad.sign_()
        assert engine.stats().used_bytes["device"] <= 12 << 20
        assert_close(engine.grad_norm, sum(p.numel() for p in model.parameters()) ** 0.5, 1e-4)
        engine.step()


# --- handles that nobody has looked at --------------------------------------------------------------------------------


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[GradientHandle]:
    """The handles that were made since."""
    handles: list[GradientHandle] = []
    make = GradientHandle.__new__

    def note(cls: type[GradientHandle], *args: Any) -> GradientHandle:
        handles.append(make(cls, *args))
        return handles[-1]

    monkeypatch.setattr(GradientHandle, "__new__", note)
    return handles


@pytest.mark.parametrize("place", PLACES)
def test_none_is_made_for_nobody(place: str, made: list[GradientHandle], tmp_path: Path) -> None:
    model = net()
    with Engine(model, SGD(lr=0.1), max_grad_norm=0.5, **PLACES[place](model, tmp_path)) as engine:
        for number in range(3):
            engine.backward(loss_of(engine, number))
            assert engine.grad_norm > 0
            engine.step()
        assert made == []


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("looked_at", [None, "all", "first"])
def test_to_look_changes_nothing(looked_at: str | None, place: str, tmp_path: Path) -> None:
    """Two micro-batches per step; the gradients are looked at between them, or not."""
    model, plain = net(), net()
    with Engine(model, SGD(lr=1e-3), **PLACES[place](model, tmp_path)) as engine:
        for number in range(4):
            backward(engine, plain, number)
            looks = {None: 0, "all": None, "first": 1}[looked_at]
            for p in list(model.parameters())[:looks]:
                assert isinstance(p.grad, GradientHandle) and p.grad is p.grad is p._grad
            if number % 2:
                engine.step()
                with torch.no_grad():
                    for p in plain.parameters():
                        assert p.grad is not None
                        p -= 1e-3 * p.grad
                        p.grad = None
        for ours, truth in zip(model.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(ours, truth, atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_they_are_there_wherever_a_parameter_is_an_ordinary_one(place: str, tmp_path: Path) -> None:
    """In a forward, inside gather, in a hook behind ours, and where backward runs inside gather."""
    model = net()
    found: list[bool] = []

    def look(parameter: torch.Tensor) -> None:
        found.append(isinstance(parameter.grad, GradientHandle))

    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        weight = model.blocks[0].weight
        engine.backward(loss_of(engine, 0))
        hook = model.blocks[0].register_forward_pre_hook(lambda module, _: look(module.weight))
        loss = loss_of(engine, 1)
        hook.remove()
        weight.register_post_accumulate_grad_hook(look)
        engine.backward(loss)
        engine.zero_grad()
        loss = loss_of(engine, 2)
        engine.backward(loss)
        with engine.gather(weight):
            assert type(weight) is nn.Parameter
            look(weight)
        engine.zero_grad()
        loss = loss_of(engine, 3)
        with engine.gather(weight):
            engine.backward(loss)
            look(weight)
    assert len(found) == 6 and all(found)


def test_what_is_put_in_the_place_of_one(wrapped: tuple[Engine, Net, Net]) -> None:
    """None leaves the parameter out of the step, a tensor is the gradient; nobody has looked at either before."""
    engine, model, plain = wrapped
    backward(engine, plain, 0)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    model.rare.grad = None
    model.blocks[0].weight.grad = torch.zeros(WIDTH, WIDTH)
    engine.step()
    after = engine.state_dict()
    assert torch.equal(after["rare"], before["rare"])
    assert not torch.equal(after["blocks.1.weight"], before["blocks.1.weight"])
    states = engine.optimizer.state_dict()["state"]
    names = [name for name, _ in model.named_parameters()]
    assert states[names.index("blocks.0.weight")]["exp_avg"].abs().max() == 0


def step_like_plain(engine: Engine, plain: nn.Module, lr: float = 1e-2) -> None:
    """Step both with SGD; parameters are equal then."""
    engine.step()
    with torch.no_grad():
        for p in plain.parameters():
            if p.grad is not None:
                p -= lr * p.grad
                p.grad = None
    state = engine.state_dict()
    for name, p in plain.named_parameters():
        assert torch.allclose(state[name], p.detach(), atol=1e-6), name


def assigned(model: nn.Module) -> None:
    for number, p in enumerate(model.parameters()):
        p.grad = torch.full(p.shape, 0.01 * number)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("noticed", ["in backward", "by the norm", "by a forward"])
def test_what_was_put_there_is_added_to_once(noticed: str, place: str, tmp_path: Path) -> None:
    model, plain = net(), net()
    with Engine(model, SGD(lr=1e-2), **PLACES[place](model, tmp_path)) as engine:
        ours, truth = loss_of(engine, 0), loss_of(plain, 0)
        assigned(model)
        assigned(plain)
        if noticed == "by the norm":
            assert engine.grad_norm > 0
        elif noticed == "by a forward":
            model.blocks[1](batch(1))
        (engine.backward if noticed == "in backward" else torch.Tensor.backward)(ours)
        truth.backward()
        step_like_plain(engine, plain)


def test_gathered_gradients_leave_nothing_behind(wrapped: tuple[Engine, Net, Net]) -> None:
    """Their elements are gone, what is written to them later counts for nothing, and backward adds to what was kept."""
    engine, model, _ = wrapped
    first, second = loss_of(engine, 0), loss_of(engine, 1)
    engine.backward(first)
    with engine.gather_gradients(model, modify=True):
        kept = [p.grad for p in model.parameters()]
        references = [weakref.ref(gradient) for gradient in kept]
        for gradient in kept:
            assert gradient is not None
            gradient.fill_(0.25)
    for gradient in kept:
        assert gradient is not None
        gradient.fill_(100.0)
    del kept, gradient
    gc.collect()
    assert not any(reference() is not None for reference in references)
    assert_close(engine.grad_norm, 0.25 * math.sqrt(sum(p.numel() for p in model.parameters())))
    engine.backward(second)
    engine.step()


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("look", ["a forward", "is None", "gather", "gather_gradients"])
def test_looked_at_in_inference_mode(look: str, place: str, tmp_path: Path) -> None:
    model, plain = net(), net()
    with Engine(model, SGD(lr=1e-2), **PLACES[place](model, tmp_path)) as engine:
        backward(engine, plain, 0)
        with torch.inference_mode():
            if look == "a forward":
                loss_of(engine, 5)
            elif look == "is None":
                assert model.blocks[0].weight.grad is not None
            else:
                with getattr(engine, look)(model.blocks[0].weight):
                    pass
        backward(engine, plain, 1)
        for module in (model, plain):
            torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
            for p in module.parameters():
                assert p.grad is not None
                p.grad.mul_(0.5)
        step_like_plain(engine, plain)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("does", ["looks", "takes", "fails"])
def test_hooks_of_the_user_before_ours(does: str, place: str, tmp_path: Path) -> None:
    """They see what autograd has made, and may take it; if one fails, a part of the gradient is missing."""
    model, plain = net(), net()
    passes = [0, 0]

    def hook(which: int) -> Callable[[torch.Tensor], None]:
        def act(parameter: torch.Tensor) -> None:
            if does == "looks":
                assert parameter.grad is not None
            elif does == "takes":
                parameter.grad = None
            elif passes[which]:
                raise KeyError("of the user's")

        return act

    for which, module in enumerate((model, plain)):
        module.blocks[2].weight.register_post_accumulate_grad_hook(hook(which))
    with Engine(model, SGD(lr=1e-2), **PLACES[place](model, tmp_path)) as engine:
        losses = [[loss_of(forward, number) for number in range(2)] for forward in (engine, plain)]
        for which in range(2):
            losses[which][0].backward()
        passes[:] = [1, 1]
        for which in range(2):
            with pytest.raises(KeyError) if does == "fails" else contextlib.nullcontext():
                losses[which][1].backward()
        if does == "fails":
            with pytest.raises(offload.StateError, match=r"gradient of blocks\.2\.weight: expected all of it"):
                engine.step()
            engine.zero_grad()
            plain.zero_grad()
            passes[:] = [0, 0]
            backward(engine, plain, 3)
        step_like_plain(engine, plain)


CHANGES: dict[str, Callable[[torch.Tensor], object]] = {
    "mul_": lambda p: p.grad.mul_(0.5),  # type: ignore[union-attr]
    "zero_": lambda p: p.grad.zero_(),  # type: ignore[union-attr]
    "another": lambda p: setattr(p, "grad", p.grad * 0.5),  # type: ignore[operator]
    "negative": lambda p: setattr(p, "grad", -p.grad),  # type: ignore[operator]
    "data": lambda p: setattr(p.grad, "data", torch.zeros_like(p.grad)),
    "clipped": lambda p: torch.nn.utils.clip_grad_norm_([p], 1e-3),
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("change", CHANGES)
def test_hooks_before_ours_cannot_change_what_is_being_added_to(change: str, place: str, tmp_path: Path) -> None:
    """What had arrived would change, and what comes would not. The first gradient is still a tensor, and may change."""
    model, plain = net(), net()

    def hook(parameter: torch.Tensor) -> None:
        CHANGES[change](parameter)

    for module in (model, plain):
        module.blocks[2].weight.register_post_accumulate_grad_hook(hook)
    with Engine(model, SGD(lr=1e-2), **PLACES[place](model, tmp_path)) as engine:
        backward(engine, plain, 0)
        step_like_plain(engine, plain)
        backward(engine, plain, 1)
        with pytest.raises(offload.StateError, match=r"blocks\.2\.weight: .*(autograd has just added|left the device)"):
            engine.backward(loss_of(engine, 2))
        plain.zero_grad()
        backward(engine, plain, 3)
        step_like_plain(engine, plain)


@pytest.mark.parametrize("looks", ["fake", "traced"])
def test_looked_at_where_torch_does_something_else(looks: str, wrapped: tuple[Engine, Net, Net]) -> None:
    engine, model, plain = wrapped
    backward(engine, plain, 0)
    weight = model.blocks[0].weight

    def traced(x: torch.Tensor) -> torch.Tensor:
        return x if weight.grad is None else x + 1

    if looks == "fake":
        with torch._subclasses.FakeTensorMode():
            assert isinstance(weight.grad, GradientHandle)
    else:
        assert torch.jit.trace(traced, torch.zeros(1))(torch.zeros(1)) == 1
    assert_close(weight.grad.norm(), plain.blocks[0].weight.grad.norm(), 1e-5)
    engine.step()
    assert engine.optimizer.state_dict()["state"][0]["step"] == 1
