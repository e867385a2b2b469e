"""Parameters outside a forward: what is read is real, what is written is refused by name, and nothing is NaN."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import io
import multiprocessing
import pickle
import re
import signal
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sweep
import torch
from harness import WIDTH, assert_same_tensors, batch, everything_on_device, host, loss_of, parameters_on_device, tight
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

import offload
from offload import SGD, AdamW, Engine
from offload.memory.budget import Tier
from offload.module.absent import AbsentParameter
from offload.module.binding import Binding
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.torch_private import function_modes, top_hooks

pytestmark = [
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
]

PLACES: dict[str, Callable[[nn.Module, Path], dict[str, Any]]] = {
    "device": lambda model, path: everything_on_device(),
    "host": lambda model, path: host(model, unit_bytes=4608),
    "nvme": tight,
}


class Net(nn.Module):
    """Six blocks, each a unit."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x)) + x
        return x


def net(seed: int = 0, dtype: torch.dtype = torch.float32) -> Net:
    torch.manual_seed(seed)
    return Net().to(dtype)


def displace(engine: Engine, index: int, others: int = 3) -> None:
    """Let a block's parameters leave the device, which has room for three: so many others are in use at once."""
    with contextlib.ExitStack() as stack:
        for other in [other for other in range(6) if other != index][-others:]:
            stack.enter_context(engine.gather(engine.module.blocks[other]))


@pytest.fixture(scope="module")
def wrapped(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Engine, Net]]:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path_factory.mktemp("swap"))) as engine:
        yield engine, model


# --- the sweep --------------------------------------------------------------------------------------------------------

# What differs, and why that is right.
EXEMPT = {
    "_version": "counted by torch, which rebinds",
    "data_ptr": "an address that tells parameters apart; the bytes are not there",
    "const_data_ptr": "the same",
    "dequantize": "torch makes a leaf that it returns unchanged the result of an operation",
    "register_hook": "every handle is another one",
    "register_post_accumulate_grad_hook": "the same",
    "new_empty": "content is undefined",
    "new_empty_strided": "the same",
    "new": "the same",
    "backward": "makes a gradient, which leaves",
}
REFUSED_READS = {"storage", "untyped_storage", "storage_type"}  # memory that would not stay


def test_every_method_on_a_parameter_that_is_away(wrapped: tuple[Engine, Net]) -> None:
    """A reading one returns what it returns of an ordinary parameter, a writing one is refused and changes nothing."""
    engine, model = wrapped
    truth = net().blocks[2].weight.detach()
    parameter = model.blocks[2].weight
    index = next(unit.index for unit in engine.plan.request.units if unit.name == "blocks.2")
    wrong, tried, refused = [], 0, 0
    for name in sweep.names():
        if name in EXEMPT:
            continue
        found = sweep.fitting(lambda: nn.Parameter(truth.clone()), name)
        if found is None:
            continue  # not for a float matrix
        wanted, grad, arguments = found
        displace(engine, 2)
        assert index not in engine._manager.bound
        tried += 1
        try:
            with torch.set_grad_enabled(grad):
                got = sweep.call(parameter, name, arguments)
        except offload.StateError as error:
            refused += 1
            remedy = "before the engine is made" if name == "set_" else "engine.gather"
            if not (sweep.writes(name) or name in REFUSED_READS) or remedy not in str(error):
                wrong.append((name, str(error)))
        except Exception as error:
            wrong.append((name, repr(error)))
        else:
            if sweep.writes(name) or not sweep.same(wanted, got):
                wrong.append((name, wanted, got))
        del wanted
        got = None
        parameter.requires_grad_(True)
        now = engine.state_dict()["blocks.2.weight"]
        if not torch.equal(now, truth):
            wrong.append((name, "has changed it"))
            parameter.data = truth.clone()
    assert not wrong
    assert tried > 400 and refused > 100
    engine._manager.check()


# Functions of torch.nn.utils and torch.nn.init that take parameters or modules, on a wrapped model.
UTILITIES: dict[str, Callable[[Net], Any]] = {
    "parameters_to_vector of what fits": lambda m: nn.utils.parameters_to_vector(m.blocks[:2].parameters()),
    "fuse_linear_bn_weights": lambda m: nn.utils.fuse_linear_bn_weights(
        m.blocks[0].weight, m.blocks[0].bias, *torch.zeros(1, WIDTH), *torch.ones(1, WIDTH), 1e-5, *torch.ones(2, WIDTH)
    ),
    "deepcopy": lambda m: copy.deepcopy(m.blocks[0].weight),
    "pickle": lambda m: pickle.loads(pickle.dumps(m.blocks[0].weight)),
    "save": lambda m: _saved(m.blocks[0].weight),
    "numpy": lambda m: m.blocks[0].weight.detach().numpy(),
    "item": lambda m: m.blocks[0].weight[0, 1].item(),
    "histogram": lambda m: torch.histc(m.blocks[0].weight, 10),
    "format": lambda m: f"{m.blocks[0].weight.sum():.6f}",
    "repr": lambda m: repr(m.blocks[0].weight),
    "functional": lambda m: torch.nn.functional.linear(batch(0), m.blocks[0].weight, bias=m.blocks[0].bias),
    "lerp": lambda m: torch.lerp(m.blocks[0].weight, m.blocks[1].weight, 0.5),
    "as a source of lerp_": lambda m: torch.zeros(WIDTH, WIDTH).lerp_(m.blocks[0].weight.detach(), 0.5),
    "as a source of copy_": lambda m: torch.zeros(WIDTH, WIDTH).copy_(m.blocks[0].weight.detach()),
    "foreach": lambda m: torch._foreach_norm([m.blocks[0].weight, m.blocks[1].weight]),
    "dot": lambda m: sum((p.detach() ** 2).sum() for p in m.parameters()),
    "all norms": lambda m: [p.norm() for p in m.parameters()],
    "kwargs only": lambda m: torch.clamp(input=m.blocks[0].weight, min=0),
    "list": lambda m: m.blocks[0].weight.tolist(),
    "iteration": lambda m: list(m.blocks[0].bias),
    "autograd.grad": lambda m: torch.autograd.grad(m.blocks[0].weight.pow(2).sum(), m.blocks[0].weight),
    "functional_call": lambda m: torch.func.functional_call(m, dict(net(3).named_parameters()), (batch(0),)),
}


def _saved(parameter: torch.Tensor) -> torch.Tensor:
    file = io.BytesIO()
    torch.save(parameter, file)
    file.seek(0)
    loaded: torch.Tensor = torch.load(file, weights_only=True)
    return loaded


def test_a_saved_parameter_is_alone_in_its_file(wrapped: tuple[Engine, Net]) -> None:
    """Its unit has others beside it, which torch would write, too, for it writes storages whole."""
    _, model = wrapped
    bias = model.blocks[0].bias
    bias.note = "kept"  # type: ignore[attr-defined]
    try:
        for copied in (_saved(bias), pickle.loads(pickle.dumps(bias)), copy.copy(bias)):
            assert type(copied) is nn.Parameter and copied.note == "kept"
            assert torch.equal(copied, net().blocks[0].bias) and copied.untyped_storage().nbytes() == WIDTH * 4
    finally:
        del bias.note


def test_memory_that_is_shared_with_others_is_not_written_to(tmp_path: Path) -> None:
    """Nobody would notice what is written there."""
    model = net().requires_grad_(False)
    with Engine(model, None, **tight(model, tmp_path)):
        for array in (model.blocks[0].bias.numpy(), np.asarray(model.blocks[0].bias)):
            assert np.array_equal(array, net().blocks[0].bias.detach().numpy())
            with pytest.raises(ValueError, match="read-only"):
                array[0] = 1
        with pytest.raises(offload.StateError, match=r"blocks\.0\.bias.*__dlpack__ expected memory that stays"):
            torch.from_dlpack(model.blocks[0].bias)


BEGINNINGS: dict[str, Callable[[Engine, torch.Tensor, torch.Tensor], object]] = {
    "backward": lambda e, y, p: y.backward(p),
    "autograd.backward": lambda e, y, p: torch.autograd.backward([y, y], grad_tensors=[torch.zeros_like(y), p]),
    "inputs": lambda e, y, p: torch.autograd.backward(y, p, inputs=[e.module.bias]),
    "grad": lambda e, y, p: setattr(e.module.bias, "grad", torch.autograd.grad(y, e.module.bias, grad_outputs=p)[0]),
    "batched": lambda e, y, p: setattr(
        e.module.bias, "grad", torch.autograd.grad(y[0], e.module.bias, p, is_grads_batched=True)[0].sum(0)
    ),
    "engine": lambda e, y, p: e.backward(y, gradient=p),
}


@pytest.mark.parametrize("way", BEGINNINGS)
@pytest.mark.parametrize("place", PLACES)
def test_a_parameter_that_a_backward_pass_begins_with(place: str, way: str, tmp_path: Path) -> None:
    """Torch takes the memory: the parameter's where that stays, and else it is refused, wherever the bytes are now."""
    model = net()
    model.bias = torch.zeros(WIDTH, requires_grad=True)
    expected = model.blocks[2].weight.detach().sum(0)
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        parameter = model.blocks[2].weight
        for leave in (lambda: None, lambda: displace(engine, 2)):
            leave()
            model.bias.grad = None
            if place != "device":
                text = r"blocks\.2\.weight.* that a backward pass begins with .*parameter\.detach\(\)\.clone\(\)$"
                with pytest.raises(offload.StateError, match=text):
                    BEGINNINGS[way](engine, model.bias.expand(WIDTH, WIDTH) * 2, parameter)
                parameter = parameter.detach().clone()
            BEGINNINGS[way](engine, model.bias.expand(WIDTH, WIDTH) * 2, parameter)
            assert torch.allclose(model.bias.grad, 2 * expected, atol=1e-5)
            parameter = model.blocks[2].weight


@pytest.mark.parametrize("place", PLACES)
def test_a_product_of_slopes_with_a_parameter_that_is_away(place: str, tmp_path: Path) -> None:
    """A call that asks for gradients of parameters is seen, so it gets the real value of what it begins with, too."""
    model = net()
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        first = model.blocks[0].bias
        (slope,) = torch.autograd.grad(first.pow(3).sum(), first, create_graph=True)  # whose graph holds that unit
        displace(engine, 5, others=2)
        (product,) = torch.autograd.grad(slope, first, grad_outputs=model.blocks[5].bias)
    true = net()
    assert torch.allclose(product, 6 * true.blocks[0].bias * true.blocks[5].bias)


@pytest.mark.parametrize("use", UTILITIES)
def test_helpers_that_read(use: str, wrapped: tuple[Engine, Net]) -> None:
    engine, model = wrapped
    displace(engine, 5)
    assert sweep.same(UTILITIES[use](model), UTILITIES[use](net()))


# --- torch.nn.utils ---------------------------------------------------------------------------------------------------


class Mixed(nn.Module):
    """A layer for each of torch's helpers."""

    def __init__(self, prepare: Callable[[Mixed], Any] | None = None) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH)
        self.conv, self.norm2 = nn.Conv2d(4, 4, 3, padding=1), nn.BatchNorm2d(4)
        self.conv3, self.last = nn.Conv3d(4, 4, 3, padding=1), nn.Linear(WIDTH, WIDTH)
        if prepare is not None:
            prepare(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm2(self.conv(x.view(-1, 4, 2, 4)))
        y = self.conv3(y[..., None]).reshape(x.shape)
        return self.last(self.norm(self.linear(y)))


def mixed(prepare: Callable[[Mixed], Any] | None = None) -> Mixed:
    torch.manual_seed(0)
    return Mixed(prepare).eval()


utils = nn.utils
NEW_PARAMETERS = "requires a gradient but was frozen, or not there, when the engine was made"
# What each public function of torch.nn.utils does with a wrapped model: what it does with a plain one, then a step;
# or an error that begins with this, at once or at the step.
NN_UTILS: dict[str, tuple[Callable[[Mixed], Any], str | None, str | None]] = {
    "clip_grad_norm": (lambda m: utils.clip_grad_norm(m.parameters(), 1.0), None, None),
    "clip_grad_norm_": (lambda m: utils.clip_grad_norm_(m.parameters(), 1.0), None, None),
    "clip_grads_with_norm_": (lambda m: utils.clip_grads_with_norm_(m.parameters(), 1.0, torch.ones(())), None, None),
    "get_total_norm": (lambda m: utils.get_total_norm([p.grad for p in m.parameters()]), None, None),
    "clip_grad_value_": (lambda m: utils.clip_grad_value_(m.parameters(), 1.0), "clamp_ of the gradient of", None),
    "convert_conv2d_weight_memory_format": (
        lambda m: utils.convert_conv2d_weight_memory_format(m, torch.channels_last),
        "parameter conv.weight: expected a tensor in torch's default memory format",
        None,
    ),
    "convert_conv3d_weight_memory_format": (
        lambda m: utils.convert_conv3d_weight_memory_format(m, torch.channels_last_3d),
        "parameter conv3.weight: expected a tensor in torch's default memory format",
        None,
    ),
    "fuse_conv_bn_eval": (lambda m: utils.fuse_conv_bn_eval(m.conv, m.norm2), "model: cannot be copied", None),
    "fuse_conv_bn_weights": (
        lambda m: utils.fuse_conv_bn_weights(m.conv.weight, m.conv.bias, *_running(m.norm2)),
        None,
        None,
    ),
    "fuse_linear_bn_eval": (lambda m: utils.fuse_linear_bn_eval(m.linear, m.norm), "model: cannot be copied", None),
    "fuse_linear_bn_weights": (
        lambda m: utils.fuse_linear_bn_weights(m.linear.weight, m.linear.bias, *_running(m.norm)),
        None,
        None,
    ),
    "parameters_to_vector": (lambda m: utils.parameters_to_vector(m.linear.parameters()), None, None),
    "vector_to_parameters": (
        lambda m: utils.vector_to_parameters(torch.arange(32.0 * 33) / 1000, m.linear.parameters()),
        None,
        None,
    ),
    "weight_norm": (lambda m: _nothing(utils.weight_norm(m.linear)), None, NEW_PARAMETERS),
    "spectral_norm": (lambda m: _nothing(torch.manual_seed(0), utils.spectral_norm(m.linear)), None, None),
    "remove_weight_norm": (lambda m: _nothing(utils.remove_weight_norm(m.last)), None, NEW_PARAMETERS),
    "remove_spectral_norm": (lambda m: _nothing(utils.remove_spectral_norm(m.last)), None, NEW_PARAMETERS),
    "skip_init": (lambda m: _nothing(utils.skip_init(nn.Linear, 2, 2)), None, None),
    "parametrizations.weight_norm": (
        lambda m: _nothing(utils.parametrizations.weight_norm(m.linear)),
        "nn.Parameter of parameter linear.weight",
        None,
    ),
    "parametrizations.spectral_norm": (
        lambda m: _nothing(torch.manual_seed(0), utils.parametrizations.spectral_norm(m.linear)),
        "parameter linear.weight of the engine on Mixed: set_ would give it other memory",
        None,
    ),
    "parametrizations.orthogonal": (
        lambda m: _nothing(utils.parametrizations.orthogonal(m.linear)),
        "parameter linear.weight of the engine on Mixed: set_ would give it other memory",
        None,
    ),
    "prune.l1_unstructured": (lambda m: _nothing(prune.l1_unstructured(m.linear, "weight", amount=0.5)), None, None),
    "prune.ln_structured": (lambda m: _nothing(prune.ln_structured(m.linear, "weight", 0.5, n=2, dim=0)), None, None),
    "prune.global_unstructured": (
        lambda m: prune.global_unstructured(
            [(m.linear, "weight"), (m.last, "weight")], pruning_method=prune.L1Unstructured, amount=0.5
        ),
        None,
        None,
    ),
    "prune.remove": (
        lambda m: _nothing(prune.identity(m.linear, "weight"), prune.remove(m.linear, "weight")),
        None,
        None,
    ),
    "stateless.functional_call": (
        lambda m: utils.stateless.functional_call(m, {"linear.weight": torch.zeros(WIDTH, WIDTH)}, (batch(0),)),
        None,
        None,
    ),
}
PREPARED: dict[str, Callable[[Mixed], Any]] = {
    "remove_weight_norm": lambda m: utils.weight_norm(m.last),
    "remove_spectral_norm": lambda m: utils.spectral_norm(m.last),
}
WITH_GRADIENTS = ("clip_grad", "clip_grads", "get_total")


def _nothing(*_: object) -> None:
    """Return nothing: modules are not compared."""


def _running(norm: Any) -> tuple[Any, ...]:
    return norm.running_mean, norm.running_var, norm.eps, norm.weight, norm.bias


def test_the_table_of_utilities_is_complete() -> None:
    public = {name for name in dir(utils) if not name.startswith("_") and callable(getattr(utils, name))}
    assert public == {name for name in NN_UTILS if "." not in name}


@pytest.mark.parametrize("name", NN_UTILS)
def test_torch_nn_utils(name: str, tmp_path: Path) -> None:
    use, refused, refused_step = NN_UTILS[name]
    plain, model = mixed(PREPARED.get(name)), mixed(PREPARED.get(name))
    with torch.no_grad() if name.startswith("fuse") else torch.enable_grad():
        if name.startswith(WITH_GRADIENTS):
            plain(batch(0)).sum().backward()
        wanted = use(plain)
        truth = plain(batch(0))
    budgets = {"device": "24660KiB", "cpu": "16MiB", "nvme": "64MiB"}
    options = {"device": "cpu", "max_memory": budgets, "activation_memory": "24MiB", "nvme_path": tmp_path}
    with Engine(model, SGD(lr=0.1), unit_bytes=5000, offload_param="nvme", **options) as engine:
        if name.startswith(WITH_GRADIENTS):
            engine.backward(engine(batch(0)).sum())
        if refused is not None:
            with pytest.raises(offload.StateError) as caught:
                use(model)
            assert str(caught.value).startswith(refused), caught.value
            return
        got = use(model)
        if name.startswith(("clip_grad", "get_total")):
            assert got is wanted is None or torch.allclose(got, wanted, rtol=1e-5)
        else:
            assert sweep.same(got, wanted)
        assert torch.equal(engine(batch(0)), truth)
        engine.zero_grad()
        model.train()
        engine.backward(engine(batch(0)).sum())
        if refused_step is not None:
            with pytest.raises(offload.StateError, match=refused_step):
                engine.step()
        else:
            assert engine.step()


WRITERS: dict[str, Callable[[Net], Any]] = {
    "init": lambda m: nn.init.normal_(m.blocks[0].weight),
    "init by keyword": lambda m: nn.init.constant_(tensor=m.blocks[0].weight, val=0.5),
    "reset_parameters": lambda m: m.blocks[0].reset_parameters(),
    "item assignment": lambda m: m.blocks[0].weight.__setitem__(0, 1.0),
    "out": lambda m: torch.add(torch.ones(WIDTH), torch.ones(WIDTH), out=m.blocks[0].bias),
    "foreach": lambda m: torch._foreach_add_([m.blocks[0].weight], 1.0),
    "augmented": lambda m: m.blocks[0].weight.__iadd__(1.0),
    "copy_": lambda m: m.blocks[0].weight.copy_(torch.zeros(WIDTH, WIDTH)),
    "lerp_": lambda m: m.blocks[0].weight.lerp_(m.blocks[1].weight, 0.5),
    "share_memory": lambda m: m.share_memory(),
    "a new Parameter of it": lambda m: nn.Parameter(m.blocks[0].weight),
    "fused optimizer": lambda m: torch._fused_sgd_(
        [m.blocks[0].weight], [torch.ones(WIDTH, WIDTH)], [], weight_decay=0.0, momentum=0.0, lr=1.0, dampening=0.0,
        nesterov=False, maximize=False, is_first_step=True,
    ),
}  # fmt: skip


@pytest.mark.few
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("write", WRITERS)
def test_helpers_that_write_are_refused(write: str, place: str, tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        with torch.no_grad(), pytest.raises(offload.StateError, match=r"parameter blocks\.0\.\w+ of the engine on Net"):
            WRITERS[write](model)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, net().state_dict()[name])


def test_what_does_not_fit_at_once_is_refused_with_a_remedy(wrapped: tuple[Engine, Net]) -> None:
    engine, model = wrapped
    with pytest.raises(offload.BudgetError, match=r"expected room on the device to read them(.|\n)*use engine\.gather"):
        nn.utils.parameters_to_vector(model.parameters())
    gc.collect()
    assert model.blocks[3].weight.isfinite().all()
    engine._manager.check()


def test_a_view_holds_its_unit_and_metadata_fetches_nothing(wrapped: tuple[Engine, Net]) -> None:
    engine, model = wrapped
    displace(engine, 1)
    before = engine.stats()
    weight = model.blocks[1].weight
    assert (weight.shape, weight.dtype, weight.numel(), weight.is_leaf) == ((WIDTH, WIDTH), torch.float32, 1024, True)
    assert weight.stride() == (WIDTH, 1) and weight.is_contiguous() and isinstance(weight, nn.Parameter)
    assert torch.zeros_like(weight).stride() == (WIDTH, 1)
    assert weight.to("cpu") is weight and weight.float() is weight and weight.contiguous() is weight
    model.to("cpu")
    after = engine.stats()
    assert (after.misses, after.stalls) == (before.misses, before.stalls)
    row = weight[3]
    displace(engine, 1, others=2)
    engine(batch(0))
    assert torch.equal(row, net().blocks[1].weight[3])


def test_metadata_of_a_parameter_that_is_named(wrapped: tuple[Engine, Net]) -> None:
    engine, model = wrapped
    displace(engine, 2)
    weight = model.blocks[2].weight
    assert torch.numel(input=weight) == WIDTH * WIDTH  # type: ignore[call-overload]
    assert torch.is_floating_point(input=weight) and not torch.is_complex(input=weight)


def test_a_parameter_is_an_ordinary_one_inside_a_forward(wrapped: tuple[Engine, Net]) -> None:
    """So that its operations cost nothing extra."""
    engine, model = wrapped
    seen = []
    handle = model.blocks[2].register_forward_pre_hook(lambda module, args: seen.append(type(module.weight)))
    engine(batch(0))
    handle.remove()
    assert seen == [nn.Parameter] and type(model.blocks[2].weight) is AbsentParameter
    with engine.gather(model.blocks[2]):
        assert type(model.blocks[2].weight) is nn.Parameter


@pytest.mark.parametrize("place", PLACES)
def test_reading_between_a_step_and_the_next_forward_waits_for_the_update(place: str, tmp_path: Path) -> None:
    norms = []
    for where in (place, "device"):
        model = net()
        with Engine(model, AdamW(lr=0.1), **PLACES[where](model, tmp_path)) as engine:
            engine.backward(loss_of(engine, 0))
            engine.step()
            norms.append([p.norm().item() for p in model.parameters()])
    assert norms[0] == norms[1] and norms[0] != [p.norm().item() for p in net().parameters()]


# --- assignment -------------------------------------------------------------------------------------------------------


def masters(engine: Engine) -> dict[int, torch.Tensor]:
    assert engine.optimizer is not None
    return {position: state["master"] for position, state in engine.optimizer.state_dict()["state"].items()}


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("how", ["replaced", "added to", "written through an alias"])
def test_assignments_are_taken_over(how: str, place: str, dtype: torch.dtype, tmp_path: Path) -> None:
    """``parameter.data = x`` and ``parameter.data += x``, with the masters of what changes, and of nothing else."""
    model = net(dtype=dtype)
    with Engine(model, AdamW(lr=1e-3), initial_loss_scale=8.0, **PLACES[place](model, tmp_path)) as engine:
        x = batch(0).to(dtype)
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        before, old = engine.state_dict()["blocks.1.weight"], masters(engine) if dtype != torch.float32 else {}
        change = torch.zeros(WIDTH, WIDTH, dtype=dtype)
        change[0] = 2
        weight = model.blocks[1].weight
        if how == "replaced":
            weight.data = before + change
        elif how == "added to":
            weight.data += change
        else:
            weight.data.add_(change)
        wanted = before + change
        assert torch.equal(weight.detach(), wanted)
        displace(engine, 1)
        saved = engine.state_dict()
        assert torch.equal(saved["blocks.1.weight"], wanted)
        for name, value in net(dtype=dtype).state_dict().items():
            if name != "blocks.1.weight":
                assert saved[name].shape == value.shape
        if dtype != torch.float32:
            now = masters(engine)[2]
            assert torch.equal(now[0], wanted[0].float()) and torch.equal(now[1:].to(dtype), wanted[1:])
            if place != "device" or how == "replaced":
                assert torch.equal(now[1:], old[2][1:])
        engine.backward(engine(x).float().pow(2).mean())
        engine.step()
        engine._manager.check()
        last = engine.state_dict()["blocks.1.weight"]
    assert torch.equal(weight, last) and type(weight) is nn.Parameter


@pytest.mark.parametrize("place", PLACES)
def test_a_change_through_an_alias_is_taken_over_when_closed(place: str, tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, AdamW(), **PLACES[place](model, tmp_path))
    alias = model.blocks[4].bias.data
    alias.fill_(7)
    engine.close()
    assert torch.equal(model.blocks[4].bias, torch.full((WIDTH,), 7.0))


@pytest.mark.few
@pytest.mark.parametrize("early", [False, True])
@pytest.mark.parametrize("place", [*PLACES, "states"])
def test_a_view_that_is_kept_follows_the_steps(place: str, early: bool, tmp_path: Path) -> None:
    """As in torch, it shows every update at once, and what is written through it is the parameter's content."""
    model, plain = net(), net()
    options = parameters_on_device() if place == "states" else PLACES[place](model, tmp_path)
    if early:
        options["max_grad_norm"] = None
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain)]
    with Engine(model, optimizers[0], **options) as engine:
        views = [m.blocks[5].weight.detach() for m in (model, plain)]
        for number in range(6):
            for m, optimizer in zip((model, plain), optimizers, strict=True):
                loss_of(m, number).backward()
                optimizer.step()
                optimizer.zero_grad()
            assert torch.allclose(*views, atol=1e-6), number
            if number == 3:
                for view in views:
                    view.mul_(0.5)
            assert torch.allclose(model.blocks[5].weight, plain.blocks[5].weight, atol=1e-6), number
        engine._manager.check()
        found = engine.state_dict()
    for name, value in plain.state_dict().items():
        assert torch.allclose(found[name], value, atol=1e-6), name


@pytest.mark.parametrize("place", PLACES)
def test_a_graph_of_a_view_is_stale_after_a_step(place: str, tmp_path: Path) -> None:
    """Nobody but torch knows such a graph, or one of second order: a step counts as a change of what is viewed."""
    model = net()
    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        x = batch(0).requires_grad_()
        other = (x @ model.blocks[0].weight.detach().t()).sum()
        engine.backward(loss_of(engine, 1))
        engine.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            other.backward()
        engine.backward(loss_of(engine, 2))  # it is no change of the user's, who would have to write it home
        engine.step()


@pytest.mark.parametrize("place", PLACES)
def test_a_write_to_a_view_between_forward_and_backward_is_refused(place: str, tmp_path: Path) -> None:
    """As torch does, which says so of what a graph has kept only: never of a bias."""
    model = net()
    with Engine(model, SGD(lr=0.1), **PLACES[place](model, tmp_path)) as engine:
        loss = loss_of(engine, 0)
        view = model.blocks[3].bias.detach()
        view.add_(1.0)
        engine.backward(loss)
        engine.step()
        loss = loss_of(engine, 1)
        other = model.blocks[3].weight.detach()
        other.clamp_(-0.01, 0.01)
        with pytest.raises(offload.StateError, match=r"parameter blocks\.3\.weight was written to after this forward"):
            engine.backward(loss)
        del other
        engine.backward(loss_of(engine, 2))
        engine.step()


@pytest.mark.parametrize("place", PLACES)
def test_data_is_not_replaced_while_somebody_views_it(place: str, tmp_path: Path) -> None:
    """In torch the view keeps the old content, and tied parameters share; here it would become the new one."""
    model = net()
    with Engine(model, SGD(), **PLACES[place](model, tmp_path)) as engine:
        first, second = model.blocks[0].weight, model.blocks[1].weight
        truth = [p.detach().clone() for p in (first, second)]
        refused = r"expected no other tensor that views it, .*parameter\.detach\(\)\.clone\(\)$"
        kept = first.data
        with pytest.raises(offload.StateError, match=refused):
            first.data = torch.zeros(WIDTH, WIDTH)
        assert torch.equal(kept, truth[0])
        del kept
        with pytest.raises(offload.StateError, match=refused):
            first.data, second.data = second.data, first.data
        with pytest.raises(offload.StateError, match=refused):
            first.data = second.data
        gc.collect()
        assert [torch.equal(p, value) for p, value in zip((first, second), truth, strict=True)] == [True, True]
        kept = first.data.clone()
        first.data = torch.zeros(WIDTH, WIDTH)
        assert not first.any()
        first.data = kept
        assert torch.equal(first, truth[0])
        engine._manager.check()


# --- state dicts ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_writing_to_a_state_dict_is_refused(place: str, tmp_path: Path) -> None:
    """In torch that changes the module: the classic way to load a part of a checkpoint."""
    model = net()
    with Engine(model, SGD(lr=0.0), **PLACES[place](model, tmp_path)) as engine:
        refused = r"state dict: blocks\.2\.bias was written to, .*; load what was changed with module\.load_state_dict"
        own = model.state_dict()
        own["blocks.2.bias"].copy_(torch.full((WIDTH,), 7.0))
        with pytest.raises(offload.StateError, match=refused):
            engine(batch(0))
        engine(batch(0))  # told once
        model.load_state_dict(own)
        assert model.blocks[2].bias.eq(7).all()
        own = model.state_dict()
        own["blocks.2.bias"].zero_()
        with pytest.raises(offload.StateError, match=refused):
            model.blocks[2].bias.norm()
        del own
        # Nor is what nobody keeps lost in silence; beside an accelerator torch would make such a copy itself.
        for use in (lambda: engine(batch(0)), model.state_dict) if engine.device.type == "cpu" else ():
            model.state_dict()["blocks.2.bias"].zero_()
            with pytest.raises(offload.StateError, match=refused):
                use()
            use()
        own = model.state_dict()
        own["blocks.2.bias"].zero_()
        model.load_state_dict(own)  # so nothing is lost
        assert not model.blocks[2].bias.any()
        copies = engine.state_dict()  # said to be copies
        copies["blocks.2.bias"].fill_(1)
        engine.backward(loss_of(engine, 0))
        engine.step()
        assert not model.blocks[2].bias.any()


@pytest.mark.parametrize("place", PLACES)
def test_hooks_of_state_dicts_rename_and_convert(place: str, tmp_path: Path) -> None:
    """As torch's checkpoint_wrapper renames: what is under another name is real, and what they made is kept."""

    def convert(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[f"{prefix}weight"] = state[f"{prefix}weight"].half()
        state[f"{prefix}halved"] = state.pop(f"{prefix}bias") / 2

    def changed() -> Net:
        model = net()
        model.blocks[1] = checkpoint_wrapper(model.blocks[1])
        model.blocks[4].register_state_dict_post_hook(convert)
        return model

    plain, model = changed().state_dict(), changed()
    with Engine(model, SGD(), **PLACES[place](model, tmp_path)) as engine:
        displace(engine, 1)
        with engine.gather(model.blocks[0]):  # lent ones are ordinary parameters
            found = {"module": model.state_dict(), "engine": engine.state_dict(), "outer": nn.Sequential(model)}
        found["outer"] = {name[2:]: value for name, value in found["outer"].state_dict().items()}
        model.blocks[0].weight.data = torch.zeros(WIDTH, WIDTH)  # nobody holds what is lent of it
    for which, state in found.items():
        assert list(state) == list(plain), which
        for name, value in plain.items():
            assert torch.equal(state[name], value) and state[name].dtype == value.dtype, (which, name)
            assert not state[name].requires_grad


def test_a_state_dict_of_variables_has_the_parameters_themselves(tmp_path: Path) -> None:
    model = net()
    with Engine(model, SGD(), **tight(model, tmp_path)):
        for name, value in model.state_dict(keep_vars=True).items():
            assert value is model.get_parameter(name) and value.requires_grad
        with pytest.raises(offload.StateError, match=r"mul_ would write where nothing written stays"):
            model.state_dict(keep_vars=True)["blocks.0.weight"].mul_(2)


# --- where the engine is not ------------------------------------------------------------------------------------------

USES: dict[str, Callable[[Engine, Net], object]] = {
    "forward": lambda engine, model: model(batch(0)),
    "engine": lambda engine, model: engine(batch(0)),
    "read": lambda engine, model: model.blocks[0].weight.norm(),
    "state dict": lambda engine, model: model.state_dict(),
    "step": lambda engine, model: engine.step(),
    "gather": lambda engine, model: engine.gather(model.blocks[0]).__enter__(),
}


@pytest.mark.few
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("place", PLACES)
def test_a_forked_child_is_refused(place: str, use: str, tmp_path: Path) -> None:
    """It has neither the memory of arenas nor the drive's queue."""
    model = net()
    with Engine(model, SGD(), **PLACES[place](model, tmp_path)) as engine:
        engine(batch(0))
        receive, send = multiprocessing.Pipe(duplex=False)

        def child() -> None:
            try:
                USES[use](engine, model)
            except offload.StateError as error:
                send.send(str(error))
            engine.close()

        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of threads
            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
        process.join(60)
        assert process.exitcode == 0
        assert receive.poll(), "nothing was refused"
        assert re.match(r"engine: expected the process that made it .* one forked from it", receive.recv())
        engine.backward(loss_of(engine, 0))
        assert engine.step()


ELSEWHERE: dict[str, Callable[[Engine, Net], object]] = {
    **{use: USES[use] for use in ("forward", "engine", "step")},
    "module": lambda engine, model: model.blocks[0](batch(0)),
    "zero_grad": lambda engine, model: engine.optimizer.zero_grad(),
}


def in_a_thread(call: Callable[[], object]) -> object:
    """Return what a call returns in a thread of its own."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(call).result(60)


@pytest.mark.parametrize("use", ELSEWHERE)
def test_another_thread_is_refused_inside_a_forward(use: str, tmp_path: Path) -> None:
    """It would take back the parameters that the forward computes with."""
    model = net()
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        truth, refused = engine(batch(0)).detach(), []

        def meanwhile(module: nn.Module, args: object) -> None:
            with pytest.raises(offload.StateError, match=r"expected one thread at a time .*threading\.Lock") as error:
                in_a_thread(lambda: ELSEWHERE[use](engine, model))
            refused.append(error.value)

        with model.blocks[3].register_forward_pre_hook(meanwhile):
            output = engine(batch(0))
        assert torch.equal(output, truth) and refused
        engine.backward(loss_of(engine, 0))
        assert in_a_thread(engine.step)  # in turn


@pytest.mark.parametrize("repeats", [False, True])
@pytest.mark.parametrize("through", ["loss", "engine"])
def test_another_thread_is_refused_inside_a_backward_pass(through: str, repeats: bool, tmp_path: Path) -> None:
    """Gradients of both would be taken for those of one pass after the other."""
    model = net()
    for block in model.blocks if repeats else ():
        block.forward = functools.partial(checkpoint, block.forward, use_reentrant=False)  # type: ignore[method-assign]
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        losses, refused = [loss_of(engine, number) for number in range(2)], list[BaseException]()
        call = engine.backward if through == "engine" else torch.Tensor.backward

        def meanwhile(parameter: torch.Tensor) -> None:
            with pytest.raises(offload.StateError, match=r"expected one thread at a time .*threading\.Lock") as error:
                in_a_thread(lambda: losses[1].backward())
            refused.append(error.value)

        with model.blocks[3].weight.register_post_accumulate_grad_hook(meanwhile):  # type: ignore[union-attr]
            call(losses[0])
        assert len(refused) == 1
        engine.zero_grad()
        in_a_thread(lambda: call(loss_of(engine, 2)))  # in turn
        in_a_thread(engine.step)


def test_a_thread_that_was_interrupted_is_in_no_forward(tmp_path: Path) -> None:
    model = net()
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        truth = engine(batch(0)).detach()

        def interrupt(module: nn.Module, args: object) -> None:
            raise KeyboardInterrupt

        with model.blocks[3].register_forward_pre_hook(interrupt), pytest.raises(KeyboardInterrupt):
            model(batch(0))
        assert torch.equal(in_a_thread(lambda: model(batch(0)).detach()), truth)


INTERRUPTED: dict[str, Callable[[Engine, Net], object]] = {
    "forward": lambda engine, model: model(batch(0)),
    "module": lambda engine, model: model.blocks[0](batch(0)),
    "backward": lambda engine, model: model(batch(0)).sum().backward(),
    "read": lambda engine, model: model.blocks[0].weight.norm(),
    "gather": lambda engine, model: engine.gather(model.blocks[0]).__enter__(),
    "apply": lambda engine, model: engine.apply(lambda name, parameter: None),
    "state dict": lambda engine, model: model.state_dict(),
    "digests": lambda engine, model: engine.digests(),
}


@pytest.mark.parametrize("nth", [1, 2, 5])
@pytest.mark.parametrize("use", INTERRUPTED)
def test_an_interrupt_leaves_no_parameter_half_bound(
    use: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where no call of the engine is around: in a notebook, the loop is begun anew after Ctrl-C."""
    left = 0
    real = Binding.bind

    class Interrupting(list[torch.Tensor]):
        """Views, one of which is reached when Ctrl-C is pressed."""

        def __iter__(self) -> Iterator[torch.Tensor]:
            nonlocal left
            for view in super().__iter__():
                left -= 1
                if not left:
                    signal.raise_signal(signal.SIGINT)
                yield view

    def interrupt(bound: Binding, unit: Unit, address: int, views: Sequence[torch.Tensor]) -> None:
        real(bound, unit, address, Interrupting(views))

    model = net()
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        truth = engine(batch(0)).detach()
        displace(engine, 0)
        monkeypatch.setattr(Binding, "bind", interrupt)
        left = nth
        with contextlib.suppress(KeyboardInterrupt):
            INTERRUPTED[use](engine, model)
        assert left <= 0 or use not in ("forward", "backward")  # others bind less
        left = 0
        engine.optimizer.zero_grad()
        for _ in range(2):
            assert torch.equal(model(batch(0)), truth)
        engine.backward(loss_of(engine, 0))
        assert engine.step()


@pytest.mark.parametrize("evaluates", [False, True])
def test_a_forward_that_uses_a_transform_is_refused_by_name(evaluates: bool) -> None:
    """Torch says that it wants no hooks, which are the engine's."""

    class Slopes(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.func.grad(lambda y: y.pow(3).sum())(super().forward(x))

    with Engine(Slopes(WIDTH, WIDTH), SGD(), **everything_on_device()) as engine:
        refused = r"a forward cannot use torch\.func .*use torch\.autograd\.grad"
        with torch.set_grad_enabled(not evaluates), pytest.raises(offload.StateError, match=refused):
            engine(batch(0))


@pytest.mark.parametrize("transform", ["grad", "vjp", "no hooks"])
@pytest.mark.parametrize("through", ["engine", "model"])
def test_transforms_of_torch_func_are_refused(through: str, transform: str, tmp_path: Path) -> None:
    model = net()
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        call: Callable[[torch.Tensor], torch.Tensor] = engine if through == "engine" else model
        with pytest.raises(offload.StateError, match=r"cannot be differentiated by torch\.func .*use torch\.autograd"):
            if transform == "grad":
                torch.func.grad(lambda x: call(x).sum())(batch(0))
            elif transform == "vjp":
                torch.func.vjp(call, batch(0))
            else:
                with torch.autograd.graph.disable_saved_tensors_hooks("none here"):
                    call(batch(0))
        engine.backward(loss_of(engine, 0))
        assert engine.step()


@pytest.mark.parametrize("transform", ["jvp", "jacfwd", "functionalize"])
def test_transforms_that_wrap_what_is_made_are_refused_where_parameters_come(transform: str, tmp_path: Path) -> None:
    """Where all stays, nothing is made, and they work as on a plain module."""
    x = batch(0)
    run: dict[str, Callable[[Any], Any]] = {
        "jvp": lambda module: torch.func.jvp(module, (x,), (torch.ones_like(x),))[1],
        "jacfwd": lambda module: torch.func.jacfwd(module)(x),
        "functionalize": lambda module: torch.func.functionalize(module)(x),
    }
    model, plain = net(), net()
    with Engine(model, SGD(), **tight(model, tmp_path)) as engine:
        with pytest.raises(offload.StateError, match=r"model: cannot be transformed by torch\.func"):
            run[transform](model)
        engine.backward(loss_of(engine, 0))
        engine.step()
    with Engine(plain, SGD(), **everything_on_device()):
        assert torch.allclose(run[transform](plain), run[transform](net()), atol=1e-6)


@pytest.mark.parametrize("place", PLACES)
def test_rebinding_inside_a_forward_is_refused_by_name(place: str, tmp_path: Path) -> None:
    """There a parameter is an ordinary one, so nobody sees it; it is noticed when the unit would leave, or is saved."""
    model = net()
    engine = Engine(model, AdamW(), **PLACES[place](model, tmp_path))

    def rebind(module: nn.Module, args: object) -> None:
        module.weight.data = torch.zeros(WIDTH, WIDTH)

    with torch.no_grad(), model.blocks[3].register_forward_pre_hook(rebind):
        model.blocks[3](batch(0))
    with pytest.raises(offload.StateError, match=r"parameter blocks\.3\.weight: was changed in place or rebound"):
        engine.state_dict()
    with pytest.raises(offload.StateError, match=r"parameter blocks\.3\.weight: was rebound .* inside a forward"):
        engine.close()
    assert torch.equal(model.blocks[3].weight, net().blocks[3].weight)


def test_vector_to_parameters(wrapped: tuple[Engine, Net], tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        nn.utils.vector_to_parameters(nn.utils.parameters_to_vector(net(5).parameters()), model.parameters())
        for name, value in net(5).state_dict().items():
            assert torch.equal(engine.state_dict()[name], value)


def test_two_engines_in_one_operation(tmp_path: Path) -> None:
    """A reference model that follows the trained one: read here, written there, each within its own budgets."""
    trained, reference = net(1), net(2)
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with (
        Engine(trained, AdamW(), **tight(trained, tmp_path / "a")) as first,
        Engine(reference, **tight(reference, tmp_path / "b")) as second,
        torch.no_grad(),
    ):
        distance = sum((a - b).pow(2).sum() for a, b in zip(trained.parameters(), reference.parameters(), strict=True))
        truth = sum((a - b).pow(2).sum() for a, b in zip(net(1).parameters(), net(2).parameters(), strict=True))
        assert torch.equal(distance, truth)
        for target, source in zip(reference.parameters(), trained.parameters(), strict=True):
            target.data.mul_(0.4).add_(source.data, alpha=0.6)  # as trl's sync_ref_model does
        found = second.state_dict()
        for (name, a), b in zip(net(2).named_parameters(), net(1).parameters(), strict=True):
            assert torch.equal(found[name], a.mul(0.4).add(b, alpha=0.6)), name
        assert second(batch(0)).isfinite().all()
        for engine in (first, second):
            engine._manager.check()


def test_parameters_of_an_engine_that_did_not_restore_them(tmp_path: Path) -> None:
    model = net()
    Engine(model, AdamW(), **tight(model, tmp_path)).close(restore=False)
    with pytest.raises(offload.StateError, match=r"norm of a parameter .*closed without restoring it.*load the model"):
        model.blocks[0].weight.norm()
    with pytest.raises(offload.StateError, match="closed without restoring"):
        model(batch(0))
    with pytest.raises(offload.StateError, match="closed without restoring"):
        copy.deepcopy(model)(batch(0))
    model.load_state_dict(net(4).state_dict())
    assert model._forward_pre_hooks
    assert torch.equal(model(batch(0)), net(4)(batch(0)))
    assert not model._forward_pre_hooks, "nothing is lost any more"
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        assert torch.equal(engine(batch(0)), net(4)(batch(0)))


def test_a_subclass_of_parameter_is_guarded_too(tmp_path: Path) -> None:
    class Tagged(nn.Parameter):
        tag = "mine"

    model = net()
    model.blocks[1].weight = Tagged(model.blocks[1].weight.detach().clone())
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        displace(engine, 1)
        weight = model.blocks[1].weight
        assert isinstance(weight, Tagged) and weight.tag == "mine" and torch.equal(weight, net().blocks[1].weight)
        with torch.no_grad(), pytest.raises(offload.StateError, match="fill_ would write"):
            weight.fill_(0)
        engine.backward(loss_of(engine, 0))
        engine.step()
    assert type(model.blocks[1].weight) is Tagged


# --- module.load_state_dict -------------------------------------------------------------------------------------------


class Normed(Net):
    """With buffers, a tied weight, and a parameter that the module itself has."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(WIDTH)
        self.blocks[5].weight = self.blocks[0].weight
        self.scale = nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super().forward(x)) * self.scale


def normed(seed: int) -> Normed:
    torch.manual_seed(seed)
    model = Normed()
    model.norm.running_mean.normal_()
    model.scale.data.normal_()
    return model


@pytest.mark.parametrize("place", PLACES)
def test_module_load_state_dict_writes_through(place: str, tmp_path: Path) -> None:
    model = normed(0)
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        wanted = dict(normed(1).state_dict())
        assert repr(model.load_state_dict(wanted)) == "<All keys matched successfully>"
        for name, value in engine.state_dict().items():
            assert torch.equal(value, wanted[name]), name
        model.eval()
        assert torch.equal(engine(batch(0)), normed(1).eval()(batch(0)))
        shards = [{name: value} for name, value in normed(2).state_dict().items()]
        for shard in shards:
            report = model.load_state_dict(shard, strict=False)
            assert report.missing_keys and not set(report.missing_keys) & shard.keys() and not report.unexpected_keys
        for name, value in engine.state_dict().items():
            assert torch.equal(value, normed(2).state_dict()[name]), name
        model.blocks[1].load_state_dict(normed(3).blocks[1].state_dict())
        assert torch.equal(engine.state_dict()["blocks.1.bias"], normed(3).state_dict()["blocks.1.bias"])


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize(
    ("change", "message"),
    [
        pytest.param(lambda state: state.pop("blocks.3.weight"), "Missing key.*blocks.3.weight", id="missing"),
        pytest.param(lambda state: state.update(other=torch.ones(1)), "Unexpected key.*other", id="unexpected"),
        pytest.param(
            lambda state: state.update({"blocks.4.weight": torch.ones(3, 3)}), "size mismatch for blocks.4", id="shape"
        ),
        pytest.param(
            lambda state: state.update({"blocks.4.weight": "text"}),
            "blocks.4.weight.*expected torch.Tensor",
            id="no tensor",
        ),
    ],
)
def test_a_state_dict_that_does_not_fit_changes_nothing(
    place: str, change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path
) -> None:
    model = normed(0)
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        state = dict(normed(1).state_dict())
        change(state)
        with pytest.raises(RuntimeError, match=f"(?s){message}"):
            model.load_state_dict(state)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name]), name
        model.load_state_dict(normed(1).state_dict())  # what came before has left nothing
        assert torch.equal(engine.state_dict()["blocks.4.weight"], normed(1).state_dict()["blocks.4.weight"])


def test_loading_through_a_module_around_the_wrapped_one(tmp_path: Path) -> None:
    model = normed(0)
    outer = nn.ModuleDict({"core": model, "own": nn.Linear(2, 2)})
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        wanted = nn.ModuleDict({"core": normed(1), "own": nn.Linear(2, 2)}).state_dict()
        outer.load_state_dict(wanted)
        for name, value in engine.state_dict().items():
            assert torch.equal(value, wanted[f"core.{name}"]), name
        assert torch.equal(outer["own"].weight, wanted["own.weight"])
        for name, value in outer.state_dict().items():
            assert torch.equal(value, wanted[name]), name


def test_a_load_that_was_broken_off_leaves_nothing(tmp_path: Path) -> None:
    model = normed(0)
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        handle = model.blocks[2].register_load_state_dict_pre_hook(_raise)
        with pytest.raises(KeyError):
            model.load_state_dict(normed(1).state_dict())
        handle.remove()
        assert torch.equal(engine.state_dict()["scale"], normed(0).state_dict()["scale"])
        with torch.no_grad(), pytest.raises(offload.StateError, match="copy_ would write"):
            model.scale.copy_(torch.zeros(WIDTH))
        model.load_state_dict(normed(1).state_dict())
        assert torch.equal(engine.state_dict()["scale"], normed(1).state_dict()["scale"])


def test_a_load_is_not_taken_for_one_that_was_broken_off(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its frame may be where the other one's was: nothing that the other one has come to is written."""
    monkeypatch.setattr("offload.module.load.id", lambda _: 1, raising=False)
    model = normed(0)
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        handle = model.norm.register_load_state_dict_pre_hook(_raise)
        with pytest.raises(KeyError):
            model.load_state_dict(normed(1).state_dict())
        handle.remove()
        wanted = normed(2).state_dict()
        model.load_state_dict({"scale": wanted["scale"]}, strict=False)
        found, before = engine.state_dict(), normed(0).state_dict()
        assert torch.equal(found["scale"], wanted["scale"])
        assert torch.equal(found["blocks.2.weight"], before["blocks.2.weight"])


def _raise(*_: object) -> None:
    raise KeyError


def test_a_hook_of_the_user_may_forgive_missing_keys(tmp_path: Path) -> None:
    """As those of adapters do; torch raises nothing then, so what is there must be loaded."""
    model = normed(0)

    def forgive(module: nn.Module, report: Any) -> None:
        report.missing_keys.clear()

    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        model.register_load_state_dict_post_hook(forgive)
        state = dict(normed(1).state_dict())
        del state["blocks.3.weight"]
        model.load_state_dict(state)
        found = engine.state_dict()
        assert torch.equal(found["blocks.2.weight"], state["blocks.2.weight"])
        assert torch.equal(found["blocks.3.weight"], normed(0).state_dict()["blocks.3.weight"])


@pytest.mark.parametrize("place", PLACES)
def test_hooks_of_a_load_read_what_it_has_come_to(place: str, tmp_path: Path) -> None:
    """As in torch: a hook of a module, older or younger than the engine, makes buffers of the new weights."""

    def derive(module: Any, report: Any) -> None:
        module.norms.copy_(module.weight.detach().norm(dim=1))
        module.bias.data.div_(2)

    def derived(seed: int) -> Net:
        model = net(seed)
        for block in model.blocks[1:3]:
            block.register_buffer("norms", torch.zeros(WIDTH))
        model.blocks[1].register_load_state_dict_post_hook(derive)
        return model

    def outputs(module: Any, report: Any) -> None:
        seen.append((module(batch(0)).detach(), {name: value.clone() for name, value in module.state_dict().items()}))

    seen: list[Any] = []
    plain, model, wanted = derived(0), derived(0), derived(1).state_dict()
    with Engine(model, SGD(lr=0.0), **PLACES[place](model, tmp_path)) as engine:
        for one in (plain, model):
            one.blocks[2].register_load_state_dict_post_hook(derive)
            one.register_load_state_dict_post_hook(outputs)
            one.load_state_dict(wanted)
        (output, state), (ours, found) = seen
        assert_same_tensors(found, state)
        assert_same_tensors(dict(engine.state_dict()), plain.state_dict())
        assert torch.equal(ours, output)


def test_assigning_is_refused(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **tight(model, tmp_path)) as engine:
        with pytest.raises(offload.StateError, match="assign=True would replace the parameters"):
            model.load_state_dict(net(1).state_dict(), assign=True)
        torch.__future__.set_swap_module_params_on_conversion(True)
        try:
            with pytest.raises(offload.StateError, match="set to swap parameters"):
                model.load_state_dict(net(1).state_dict())
        finally:
            torch.__future__.set_swap_module_params_on_conversion(False)
        assert torch.equal(engine.state_dict()["blocks.1.weight"], net().state_dict()["blocks.1.weight"])


# --- apply ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
def test_apply_runs_within_the_budgets(place: str, tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(), **PLACES[place](model, tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        before = engine.state_dict()
        names = []

        def halve(name: str, parameter: nn.Parameter) -> None:
            names.append(name)
            if name.endswith("weight"):
                parameter.mul_(0.5)

        engine.apply(halve)
        assert names == [name for name, _ in model.named_parameters()]
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name] * (0.5 if name.endswith("weight") else 1))
        engine.apply(lambda name, parameter: parameter.zero_(), model.blocks[2].bias)
        assert not engine.state_dict()["blocks.2.bias"].any() and engine.state_dict()["blocks.1.bias"].any()
        homes = {engine._manager.copies.get(u.index, Role.PARAM).home for u in engine.plan.request.units}
        assert (Tier.DEVICE in homes) == (place == "device")
        with pytest.raises(KeyError):
            engine.apply(_raise)
        engine.backward(loss_of(engine, 1))
        engine.step()
        engine._manager.check()


# --- peft -------------------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("safe", [False, True])
@pytest.mark.parametrize("place", PLACES)
def test_merging_adapters(place: str, safe: bool, dora: bool, tmp_path: Path) -> None:
    """What is saved afterwards is what was merged, whether the base fits the device or not."""
    peft = pytest.importorskip("peft")
    from models import BY_NAME

    def build() -> Any:
        torch.manual_seed(0)
        config = peft.LoraConfig(
            r=4, target_modules=["q_proj", "v_proj", "down_proj"], use_dora=dora, init_lora_weights=False
        )
        return peft.get_peft_model(BY_NAME["llama"].build(), config)

    data = BY_NAME["llama"].batch(0)
    truth = build().merge_and_unload(safe_merge=safe)
    swap = tmp_path / "swap"
    swap.mkdir()
    model = build()
    from harness import nvme

    options = {
        "device": lambda: everything_on_device(),
        "host": lambda: host(model),
        "nvme": lambda: nvme(model, swap),
    }[place]()
    with Engine(model, AdamW(), **options):
        merged = model.merge_and_unload(safe_merge=safe)
        assert torch.equal(merged(**data).loss, truth(**data).loss)
        merged.save_pretrained(tmp_path / "out")
    saved = type(truth).from_pretrained(tmp_path / "out")
    for name, value in truth.state_dict().items():
        assert torch.equal(saved.state_dict()[name], value), name
        assert torch.equal(merged.state_dict()[name], value), name


class TimeIsUp(Exception):
    """Of a signal handler."""


@pytest.mark.parametrize("number", range(1, 9))
def test_a_signal_handler_may_raise_while_parameters_are_lent(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As that of a timeout: SIGALRM is not held back, and nobody can say what is bound then."""

    def up(*_: object) -> None:
        raise TimeIsUp

    model, calls, real = net(), [0], Binding._set_classes

    def set_classes(self: Binding, *given: Any) -> None:
        calls[0] += 1
        if calls[0] == number:
            signal.raise_signal(signal.SIGALRM)
        real(self, *given)

    with Engine(model, SGD(lr=0.1), **host(model)) as engine:
        engine(batch(0))
        before = signal.signal(signal.SIGALRM, up)
        try:
            monkeypatch.setattr(Binding, "_set_classes", set_classes)
            with pytest.raises(TimeIsUp):
                engine(batch(0))
        finally:
            signal.signal(signal.SIGALRM, before)
        monkeypatch.undo()
        for call in (engine, model):
            with pytest.raises(offload.StateError, match="a signal handler raised in the midst of its work .TimeIsUp"):
                call(batch(0))
    assert top_hooks() is None and not function_modes()
