"""Models with weights of torchao, which are made of inner tensors: as in plain torch, wherever they live."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, everything_on_device, host, nvme
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, CheckpointError, ConfigError, Engine, StateError, plan
from offload.cli import main as cli
from offload.wrappers import inner_tensors, is_wrapper, take_apart

torchao = pytest.importorskip("torchao")
from torchao.quantization import (  # noqa: E402
    Float8WeightOnlyConfig,
    Int8DynamicActivationInt8WeightConfig,
    Int8WeightOnlyConfig,
    IntxWeightOnlyConfig,
    PerGroup,
    quantize_,
)
from torchao.quantization.quantize_.workflows.nf4.nf4_tensor import to_nf4  # noqa: E402

pytestmark = [
    pytest.mark.timeout(120),
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

WIDTH = 128
BLOCKS = 4
UNIT_BYTES = 20 << 10  # a unit of one layer


class Block(nn.Module):
    """A frozen layer with an adapter beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.down = nn.Linear(WIDTH, 4, bias=False)
        self.up = nn.Linear(4, WIDTH, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.base(x) + self.up(self.down(x))) + x


class Net(nn.Module):
    def __init__(self, reentrant: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.reentrant is not None and self.training:  # one segment, of which the device has no room for all
            return checkpoint(self.through, x, use_reentrant=self.reentrant)
        return self.through(x)

    def through(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def of_config(config: Any) -> Callable[[nn.Module], None]:
    return lambda model: quantize_(model, config, filter_fn=lambda module, name: name.endswith("base"))


def of_nf4(model: nn.Module) -> None:
    for block in model.blocks:
        block.base.weight = nn.Parameter(to_nf4(block.base.weight.detach()), requires_grad=False)


FORMATS: dict[str, Callable[[nn.Module], None]] = {
    "int8": of_config(Int8WeightOnlyConfig(set_inductor_config=False)),
    "int8 in groups": of_config(Int8WeightOnlyConfig(granularity=PerGroup(32), set_inductor_config=False)),
    "int4": of_config(IntxWeightOnlyConfig(weight_dtype=torch.int4, granularity=PerGroup(32))),
    "float8": of_config(Float8WeightOnlyConfig(set_inductor_config=False)),
    "nf4": of_nf4,
    "int8, inputs too": of_config(Int8DynamicActivationInt8WeightConfig(set_inductor_config=False)),
}
QUICK = ("int8", "nf4")
ROUNDS_INPUTS = "int8, inputs too"  # where a step differs in its last bit, inputs come to be rounded otherwise
FORMS = [pytest.param(form, marks=[] if form in QUICK else pytest.mark.nightly) for form in FORMATS]
_made: dict[str, nn.Module] = {}


def net(form: str = "int8", *, reentrant: bool | None = None) -> Any:
    if form not in _made:
        torch.manual_seed(0)
        _made[form] = Net(None)
        FORMATS[form](_made[form])
    model = copy.deepcopy(_made[form])
    model.reentrant = reentrant
    return model


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], number: int) -> torch.Tensor:
    x = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number)).requires_grad_()
    return forward(x).sub(1).square().mean()


def adamw(model: nn.Module) -> torch.optim.AdamW:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def flat(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    """Return a state dict with inner tensors in place of what is made of them."""
    return {f"{name}.{inner}": value for name, one in state.items() for inner, value in inner_tensors(one)}


def nadam(model: nn.Module) -> torch.optim.NAdam:
    """Return an optimizer that has no kernel: an engine's steps are torch's own."""
    return torch.optim.NAdam([p for p in model.parameters() if p.requires_grad], lr=1e-2, eps=1e-4)


def plain_run(
    model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    """Return losses, the last of evaluation, and the state dict of a plain loop."""
    optimizer, losses = make(model), []
    for number in range(3):
        optimizer.zero_grad()
        loss = loss_of(model, number)
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    with torch.no_grad():
        losses.append(loss_of(model.eval(), 3))
    return losses, flat(model.state_dict())


def engine_run(
    model: nn.Module, make: Callable[[nn.Module], torch.optim.Optimizer] = adamw, **options: Any
) -> tuple[list[torch.Tensor], dict[str, torch.Tensor]]:
    with Engine(model, make(model), **options) as engine:
        losses = []
        for number in range(3):
            loss = loss_of(engine, number)
            engine.backward(loss)
            assert engine.step()
            losses.append(loss.detach())
            engine._manager.check()
        with torch.no_grad():
            losses.append(loss_of(engine.eval(), 3))
        return losses, flat(engine.state_dict())


def small(path: Path, form: str = "int8", **more: Any) -> dict[str, Any]:
    """Return options with room for three units on the device, the rest on the drive."""
    return nvme(net(form), path, unit_bytes=UNIT_BYTES, **more)


def assert_close(ours: Any, theirs: Any) -> None:
    assert ours[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        a, b = ours[1][name].float(), value.float()
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-5) if "up" in name or "down" in name else torch.equal(a, b), name
    assert all(torch.allclose(a, b, rtol=1e-4) for a, b in zip(ours[0], theirs[0], strict=True))


def assert_same(ours: Any, theirs: Any) -> None:
    assert [torch.equal(a, b) for a, b in zip(ours[0], theirs[0], strict=True)] == [True] * 4
    assert_same_tensors(ours[1], theirs[1])


@pytest.mark.parametrize("form", [*list(FORMATS)[:5], *FORMS[5:]])
def test_training_is_that_of_the_plain_model(form: str, tmp_path: Path) -> None:
    """With the same bits wherever it lives; afterwards, the parameters are what they were."""
    ours = engine_run(net(form), **everything_on_device())
    if form != ROUNDS_INPUTS:
        assert_close(ours, plain_run(net(form)))
    for options in (host(net(form), unit_bytes=UNIT_BYTES), small(tmp_path, form)):
        model = net(form)
        weights = [block.base.weight for block in model.blocks]
        inner = [value for weight in weights for _, value in inner_tensors(weight)]
        kinds = [type(weight) for weight in weights]
        other = engine_run(model, **options)
        assert_same(other, ours)
        assert all(block.base.weight is weight for block, weight in zip(model.blocks, weights, strict=True))
        assert [type(weight) for weight in weights] == kinds
        assert all(type(value) is torch.Tensor for value in inner)
        assert all(a is b for a, b in zip(inner, (v for w in weights for _, v in inner_tensors(w)), strict=True))
        with torch.no_grad():
            assert torch.equal(loss_of(model.eval(), 3), other[0][3])


@pytest.mark.parametrize("form", FORMS)
def test_where_steps_are_torchs_own_so_are_all_bits(form: str, tmp_path: Path) -> None:
    truth = plain_run(net(form), nadam)
    for options in (everything_on_device(), small(tmp_path, form)):
        assert_same(engine_run(net(form), nadam, **options), truth)


@pytest.mark.cpu("torchao packs these weights for the processor, and refuses inputs on other devices")
def test_a_kernel_without_a_derivative_evaluates(tmp_path: Path) -> None:
    """Four bits, packed for the processor: torch itself refuses backward by name."""
    kernels = pytest.importorskip("torchao.prototype.quantization.int4")
    quantize, runs = of_config(kernels.PrototypeInt4WeightOnlyConfig(group_size=32)), []
    torch.manual_seed(0)
    plain = Net(None).eval()
    quantize(plain)
    model = copy.deepcopy(plain)
    with torch.no_grad():
        runs.append(loss_of(plain, 0))
        with Engine(model, **nvme(plain, tmp_path, unit_bytes=UNIT_BYTES)) as engine:
            runs.append(loss_of(engine, 0))
    assert torch.equal(*runs)


def test_a_plan_is_in_bytes_alone() -> None:
    forecast = plan(net(), hardware="desktop")
    assert any(slot.name == "blocks.0.base.weight.qdata" for unit in forecast.plan.request.units for slot in unit.slots)
    with pytest.raises(ConfigError, match=r"^parameter blocks\.0\.base\.weight: .* but got Int8Tensor, .*leave batch"):
        plan(net(), hardware="desktop", batch=(torch.ones(4, WIDTH),))


@pytest.mark.parametrize("reentrant", [False, pytest.param(True, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("form", QUICK)
def test_checkpointed_segments(form: str, reentrant: bool, tmp_path: Path) -> None:
    truth = engine_run(net(form), **everything_on_device())
    assert_same(engine_run(net(form, reentrant=reentrant), **small(tmp_path, form)), truth)


# --- classes of our own: what torchao's do not do, but others may ----------------------------------------------------


class Halves(torch.Tensor):
    """The sum of two tensors, with operations below autograd, which so keeps it for backward as a whole."""

    @staticmethod
    def __new__(cls, first: Any, second: Any, note: Any = None) -> Halves:
        made = torch.Tensor._make_wrapper_subclass(cls, first.shape, dtype=torch.float32, device=first.device)
        made.first, made.second, made.note = first, second, note
        return made

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        return ["first", "second"], {"note": self.note}

    @classmethod
    def __tensor_unflatten__(cls, inner: Any, context: Any, size: Any, stride: Any) -> Halves:
        return cls(inner["first"], inner["second"], context["note"])

    def sum_of_both(self) -> torch.Tensor:
        first = self.first.sum_of_both() if isinstance(self.first, Halves) else self.first
        return first + self.second

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        mine = args[0]
        if func in (torch.ops.aten.detach.default, torch.ops.aten.t.default, torch.ops.aten.clone.default):
            if isinstance(mine, Halves):
                return Halves(func(mine.first), func(mine.second), mine.note)
        plain = [one.sum_of_both() if isinstance(one, Halves) else one for one in args]
        return func(*plain, **(kwargs or {}))


def halves_of(weight: torch.Tensor, *, nested: bool = False, note: Any = "half") -> Halves:
    half = weight.detach() / 2
    return Halves(halves_of(half) if nested else half, half.clone(), note)


def net_of_halves(**options: Any) -> Any:
    torch.manual_seed(0)
    model = Net(None)
    for block in model.blocks:
        block.base.weight = nn.Parameter(halves_of(block.base.weight, **options), requires_grad=False)
    return model


@pytest.mark.parametrize(
    ("nested", "reentrant"),
    [
        (False, None),
        (True, False),
        *(
            pytest.param(*case, marks=pytest.mark.nightly)
            for case in ((True, None), (False, False), (False, True), (True, True))
        ),
    ],
)
def test_what_autograd_keeps_of_a_wrapper_waits_away_from_the_device(
    nested: bool, reentrant: bool | None, tmp_path: Path
) -> None:
    """The weight itself, or a transposed one on the same bytes: four wait where is room for three."""
    truth = plain_run(net_of_halves(nested=nested))
    model = net_of_halves(nested=nested)
    model.reentrant = reentrant
    options = nvme(model, tmp_path, unit_bytes=4 * WIDTH * WIDTH * (3 if nested else 2) + (8 << 10))
    assert_close(engine_run(model, **options), truth)
    names = [name for name, _ in inner_tensors(model.blocks[0].base.weight)]
    assert names == (["first.first", "first.second", "second"] if nested else ["first", "second"])


def test_what_no_checkpoint_can_hold_is_refused(tmp_path: Path) -> None:
    """A class may keep anything beside its inner tensors; it trains all the same."""
    model = net_of_halves(note=object())
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        with pytest.raises(
            ConfigError, match=r"^test_wrappers\.Halves: expected plain values .* of type object, which"
        ):
            engine.save_checkpoint(tmp_path)


# --- outside of forwards ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_reading_brings_what_is_away(form: str, tmp_path: Path) -> None:
    plain, model = net(form).blocks[0].base.weight, net(form)
    real = plain.get_original_weight() if form == "nf4" else plain.dequantize()
    with Engine(model, adamw(model), **small(tmp_path, form)) as engine:
        weight = model.blocks[0].base.weight
        assert (weight.shape, weight.dtype, weight.stride()) == (plain.shape, plain.dtype, plain.stride())
        assert torch.equal(weight.get_original_weight() if form == "nf4" else weight.dequantize(), real)
        for (name, one), (_, truth) in zip(inner_tensors(weight), inner_tensors(plain), strict=True):
            assert one.shape == truth.shape, name
            assert torch.equal(one.clone(), truth), name
        assert repr(weight).replace(f", device='{engine.device}'", "").split("[")[0] == repr(plain).split("[")[0]
        x = torch.ones(2, WIDTH)
        assert torch.equal(nn.functional.linear(x.to(engine.device), weight).cpu(), nn.functional.linear(x, plain))
        taken = weight.detach()
        copied = copy.deepcopy(weight)
        assert_same_tensors(dict(inner_tensors(taken)), dict(inner_tensors(plain)))
        assert_same_tensors(dict(inner_tensors(copied)), dict(inner_tensors(plain)))
        del taken
        engine.backward(loss_of(engine, 0))
        engine._manager.check()


def test_writing_is_refused(tmp_path: Path) -> None:
    model = net()
    with Engine(model, adamw(model), **small(tmp_path)) as engine:
        weight, other = model.blocks[0].base.weight, net().blocks[1].base.weight
        before = flat(engine.state_dict())
        name = r"^parameter blocks\.0\.base\.weight of the engine on Net: "
        with pytest.raises(StateError, match=name + "copy_ would write where nothing written stays"):
            weight.copy_(other)
        with pytest.raises(StateError, match=r"^parameter blocks\.0\.base\.weight\.qdata of .*: add_ would write"):
            weight.qdata.add_(1)
        with pytest.raises(StateError, match=r"^parameter blocks\.0\.base\.weight: expected its inner tensors to be"):
            weight.data = other
        with pytest.raises(StateError, match=r"^gather: parameter blocks\.0\.base\.weight\.scale was changed; pass"):
            with engine.gather(weight):
                weight.scale.mul_(2)
        assert_same_tensors(flat(engine.state_dict()), before)
        for convert in (lambda: model.to("cpu"), model.half, lambda: model.to(torch.bfloat16)):
            with pytest.raises(StateError, match=name + "a conversion of its module would put"):
                convert()
        assert model.blocks[0].base.weight is weight
        assert_same_tensors(flat(engine.state_dict()), before)
        own, weight.scale = weight.scale, other.scale
        with pytest.raises(
            StateError, match=r"^parameter blocks\.0\.base\.weight: expected its own inner tensor scale"
        ):
            loss_of(engine, 0)
        weight.scale = own
        engine.backward(loss_of(engine, 0))
        engine._manager.check()


def test_gathered_and_applied(tmp_path: Path) -> None:
    """The parameter is one, whatever it is made of; what is written to its inner tensors is kept."""
    model, truth = net(), net()
    seen = []
    with torch.no_grad():
        for block in truth.blocks:
            block.base.weight.scale.mul_(2)

    def doubled(name: str, parameter: Any) -> None:
        seen.append(name)
        if is_wrapper(parameter):
            parameter.scale.mul_(2)

    with Engine(model, adamw(model), **small(tmp_path)) as engine:
        engine.apply(doubled)
        assert sorted(seen) == sorted(name for name, _ in truth.named_parameters())
        assert_same_tensors(flat(engine.state_dict()), flat(truth.state_dict()))
        with engine.gather(model.blocks[0].base.weight, modify=True):
            model.blocks[0].base.weight.qdata.zero_()
        assert not engine.state_dict()["blocks.0.base.weight"].qdata.any()
        assert_same_tensors(
            {"loss": loss_of(engine, 0).detach()},
            {"loss": loss_of(lambda x: with_zeros(truth)(x), 0).detach()},
        )


def with_zeros(model: Any) -> Any:
    model.blocks[0].base.weight.qdata.zero_()
    return model


def test_lost_parameters_are_not_read_as_others(tmp_path: Path) -> None:
    model = net()
    engine = Engine(model, adamw(model), **small(tmp_path))
    engine.close(restore=False)
    weight = model.blocks[0].base.weight
    for use in (
        lambda: loss_of(model, 0),
        lambda: weight.dequantize(),
        lambda: weight.copy_(net().blocks[0].base.weight),
    ):
        with pytest.raises(StateError, match="expected content but it has none"):
            use()


# --- saved and loaded -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_state_dicts_have_whole_parameters(form: str, tmp_path: Path) -> None:
    plain = net(form)
    other = net(form)
    with torch.no_grad():
        for block in other.blocks:
            for _, inner in inner_tensors(block.base.weight):
                inner.copy_(inner.flip(0) if inner.dim() else inner)
    model = net(form)
    with Engine(model, adamw(model), **small(tmp_path, form)) as engine:
        state = engine.state_dict()
        assert {name: type(value) for name, value in state.items()} == {
            name: type(value) for name, value in plain.state_dict().items()
        }
        assert_same_tensors(flat(state), flat(plain.state_dict()))
        with engine.gather(model.blocks[0].base):
            state = engine.state_dict()
            addresses = {inner.data_ptr() for _, inner in inner_tensors(model.blocks[0].base.weight)}
            assert addresses.isdisjoint(value.data_ptr() for value in flat(state).values())
        assert_same_tensors(flat(state), flat(plain.state_dict()))
        engine.load_state_dict(other.state_dict())
        assert_same_tensors(flat(engine.state_dict()), flat(other.state_dict()))
        model.load_state_dict(plain.state_dict())
        assert_same_tensors(flat(engine.state_dict()), flat(plain.state_dict()))
        assert engine.deferred_state_dict().keys() == state.keys()


def test_what_does_not_fit_is_not_loaded(tmp_path: Path) -> None:
    model = net()
    with Engine(model, adamw(model), **small(tmp_path)) as engine:
        before = engine.state_dict()
        text = r"expected a Int8Tensor of shape \(128, 128\), quantized in the same way, but got a "
        for wrong, kind in (
            (torch.zeros(WIDTH, WIDTH), r"Tensor of shape \(128, 128\); load"),
            (net("float8").state_dict()["blocks.0.base.weight"], "Float8Tensor of"),
            (net("int8 in groups").state_dict()["blocks.0.base.weight"], "Int8Tensor of"),
            (3, "int; load"),
        ):
            with pytest.raises(ConfigError, match=rf"^blocks\.0\.base\.weight: {text}{kind}"):
                engine.load_state_dict({**before, "blocks.0.base.weight": wrong})
            if isinstance(wrong, torch.Tensor):
                with pytest.raises(RuntimeError, match=text):
                    model.load_state_dict({**before, "blocks.0.base.weight": wrong})
        assert_same_tensors(flat(engine.state_dict()), flat(before))


@pytest.mark.parametrize("form", FORMS)
def test_a_checkpoint_goes_on_elsewhere(form: str, tmp_path: Path) -> None:
    """It holds inner tensors, and says in plain values what is made of them."""
    model, swap = net(form), tmp_path / "swap"
    swap.mkdir()
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        path = engine.save_checkpoint(tmp_path / "run")
        engine.backward(loss_of(engine, 1))
        engine.step()
        truth = flat(engine.state_dict())
    index = json.loads((path / "index.json").read_text())
    shell = take_apart(net(form).blocks[0].base.weight)
    assert index["wrappers"]["blocks.0.base.weight"] == shell.described()
    stored = {entry["name"] for entry in index["tensors"] if entry["role"] == "parameter"}
    assert {f"blocks.0.base.weight.{name}" for name, _ in shell.items()} <= stored
    assert cli.main(["checkpoint", "export", str(tmp_path / "run"), "--output", str(tmp_path / "out")]) == 1
    assert not (tmp_path / "out").exists()
    model = net(form)
    with torch.no_grad():
        for block in model.blocks:
            for _, inner in inner_tensors(block.base.weight):
                inner.zero_()
    with Engine(model, adamw(model), **small(swap, form)) as engine:
        engine.load_checkpoint(tmp_path / "run")
        engine.backward(loss_of(engine, 1))
        engine.step()
        assert_same_tensors(flat(engine.state_dict()), truth)


def test_a_checkpoint_of_weights_made_otherwise_is_refused(tmp_path: Path) -> None:
    """The same shapes and dtypes, which mean something else."""
    model = net_of_halves(note="one")
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        engine.save_checkpoint(tmp_path)
    model = net_of_halves(note="two")
    with Engine(model, adamw(model), **everything_on_device()) as engine:
        with pytest.raises(
            CheckpointError, match=r"expected blocks\.0\.base\.weight made as .*two.* got it made as .*one"
        ):
            engine.load_checkpoint(tmp_path, strict=False)


def test_a_durable_run_goes_on(tmp_path: Path) -> None:
    options = {key: value for key, value in small(tmp_path).items() if not key.startswith(("nvme", "offload"))}
    states = []
    for steps in ((0, 1, 2), (0, 1), (2,)):
        model = net()
        run = tmp_path / ("whole" if len(steps) == 3 else "parts")
        with Engine(model, adamw(model), run_dir=run, **options) as engine:
            assert (engine.resumed is not None) == (steps == (2,))
            for number in steps:
                engine.backward(loss_of(engine, number))
                engine.step()
            states.append(flat(engine.state_dict()))
    assert_same_tensors(states[2], states[0])
    model = net("int8 in groups")
    with pytest.raises(ConfigError, match=r"^run_dir .* got another one: "):
        Engine(model, adamw(model), run_dir=tmp_path / "parts", **options)


# --- what cannot be had -----------------------------------------------------------------------------------------------


def test_what_cannot_be_had_is_refused(tmp_path: Path) -> None:
    model = net()
    model.blocks[1].base.weight.requires_grad_()
    with pytest.raises(
        ConfigError, match=r"^parameter blocks\.1\.base\.weight: .*be frozen but got torchao Int8Tensor"
    ):
        Engine(model, AdamW(), **everything_on_device())
    model = net()
    with pytest.raises(ConfigError, match=r"^dtype: expected torch\.float32, which blocks\.0\.base\.weight had before"):
        Engine(model, adamw(model), dtype="bfloat16", **everything_on_device())
    assert_same(
        engine_run(net(), dtype="float32", **everything_on_device()), engine_run(net(), **everything_on_device())
    )
    model = net_of_halves()
    model.blocks[1].base.weight.second = model.blocks[1].base.weight.second.t()
    text = r"^parameter blocks\.1\.base\.weight: expected inner tensors without gaps, .* second of test_wrappers Halves"
    with pytest.raises(ConfigError, match=text):
        Engine(model, AdamW(), **everything_on_device())
    model = net()
    model.register_buffer("table", net().blocks[0].base.weight.detach())
    with pytest.raises(ConfigError, match=r"^buffer table: .*Int8Tensor.*; register it as a frozen torch\.nn\.Param"):
        Engine(model, AdamW(), **everything_on_device())


def test_an_optimizer_of_all_parameters(tmp_path: Path) -> None:
    """Frozen ones among them, as ``AdamW(model.parameters())`` has them; and its checkpoints have their names."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, eps=1e-4)
    with Engine(model, optimizer, **small(tmp_path)) as engine:
        engine.backward(loss_of(engine, 0))
        engine.step()
        engine.save_checkpoint(tmp_path / "run")
        engine.load_checkpoint(tmp_path / "run")
        assert "blocks.0.base.weight" not in engine.digests()
        assert "blocks.0.base.weight.qdata" in engine.digests()


def test_tied_parameters(tmp_path: Path) -> None:
    """One parameter in two modules is one in the engine, too; inner tensors that two parameters share are one."""
    runs = []
    for place in (everything_on_device(), small(tmp_path, units=5)):
        model = net()
        model.blocks[2].base.weight = model.blocks[0].base.weight
        shared = take_apart(model.blocks[1].base.weight)
        twin: Any = shared.tensor()
        twin._is_param = True  # nn.Parameter would make other inner tensors
        model.blocks[3].base.weight = twin
        with Engine(model, adamw(model), **place) as engine:
            engine.backward(loss_of(engine, 0))
            engine.step()
            runs.append(flat(engine.state_dict()))
            assert model.blocks[2].base.weight is model.blocks[0].base.weight
    assert_same_tensors(*runs)
