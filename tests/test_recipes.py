"""Each recipe of the guide, and what it says of moving here, leaves what the same loop of plain PyTorch leaves."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from documents import blocks, read, section
from harness import WIDTH, batch, everything_on_device, tight
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import offload
from offload import AdamW, Engine, StateError

pytestmark = pytest.mark.usefixtures("single_torch_thread")

PAGE = read("docs/guide/recipes.md")
MOVING = read("docs/guide/moving.md")
BATCHES = [batch(number) for number in range(6)]
Make = Callable[..., torch.optim.Optimizer]
by_torch: Make = functools.partial(torch.optim.NAdam, lr=1e-2)  # it steps itself, with the bits of a plain loop


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.linear(x)) + x


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[Layer() for _ in range(5)])


def loss_of(output: torch.Tensor) -> torch.Tensor:
    return output.sub(1).square().mean() / 8  # so that the recipes' clipping leaves gradients as they are


@contextlib.contextmanager
def recipe(heading: str, model: nn.Module, optimizer: Any, options: dict[str, Any], **more: Any) -> Iterator[Any]:
    """Run the snippets below a heading; gives the names that they leave. ``only`` is the number of the one to run."""
    found = blocks(section(more.pop("page", PAGE), heading))
    only = more.pop("only", None)
    names = {"model": model, "optimizer": optimizer, "options": options, "batches": BATCHES, "loss_of": loss_of}
    names |= {"torch": torch, "offload": offload, "copy": copy, "device": "cpu", **more}
    try:
        exec(compile("\n".join(found if only is None else found[only : only + 1]), heading, "exec"), names)
        yield names
    finally:
        for value in names.values():
            if isinstance(value, Engine):
                value.close()


def plain(
    model: nn.Module, optimizer: torch.optim.Optimizer, after: Callable[[int], object] = lambda step: None
) -> None:
    """Train as the recipes do, without an engine."""
    for step, x in enumerate(BATCHES):
        loss_of(model(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
        after(step)


def assert_same(engine: Engine, model: nn.Module, *, exactly: bool = True) -> None:
    ours = engine.state_dict()
    for name, value in model.state_dict().items():
        close = torch.equal(ours[name], value) if exactly else torch.allclose(ours[name], value, rtol=2e-5, atol=1e-6)
        assert close, name


def assert_same_moments(engine: Engine, optimizer: torch.optim.Optimizer, *, exactly: bool = True) -> None:
    assert engine.optimizer is not None
    ours, theirs = engine.optimizer.state_dict()["state"], optimizer.state_dict()["state"]
    assert ours.keys() == theirs.keys()
    for position, state in theirs.items():
        for name, value in state.items():
            mine = torch.as_tensor(ours[position][name])
            assert torch.equal(mine, value) if exactly else torch.allclose(mine, value, rtol=1e-4, atol=1e-8), name


# --- averages ---------------------------------------------------------------------------------------------------------


def test_torchs_average() -> None:
    truth = net()
    average = AveragedModel(truth, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    plain(truth, by_torch(truth.parameters()), lambda step: average.update_parameters(truth))
    model = net()
    with recipe("If the model fits the device", model, by_torch(model.parameters()), everything_on_device()) as names:
        assert_same(names["engine"], truth)
        for name, value in average.state_dict().items():
            assert torch.equal(names["average"].state_dict()[name], value), name


def test_an_average_in_an_engine(tmp_path: Path) -> None:
    truth = net()
    average = copy.deepcopy(truth)

    def update(step: int) -> None:
        with torch.no_grad():
            for mean, value in zip(average.parameters(), truth.parameters(), strict=True):
                mean.lerp_(value, 0.1)

    plain(truth, by_torch(truth.parameters()), update)
    model = net()
    with recipe("If it does not", model, by_torch(model.parameters()), tight(model, tmp_path)) as names:
        assert_same(names["engine"], truth)
        assert_same(names["averages"], average)
        assert torch.equal(names["loss"], loss_of(average(BATCHES[0])).detach())
        assert torch.equal(names["averaged"]["0.linear.bias"], average.state_dict()["0.linear.bias"])


# --- a second model ---------------------------------------------------------------------------------------------------


def test_a_reference_model_in_the_same_engine(tmp_path: Path) -> None:
    """Both within one budget, with the bits of a plain loop."""
    truth, reference = net(), net()
    optimizer = by_torch(truth.parameters())
    for x in BATCHES:
        with torch.no_grad():
            target = reference(x)
        output = truth(x)
        (loss_of(output) + (output - target).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = net()
    options = tight(model, tmp_path)
    heading = "A reference model in the same budgets"
    with recipe(heading, model, by_torch(model.parameters()), options) as names:
        engine = names["engine"]
        stats = engine.stats()
        whole_bytes = sum(unit.numel * unit.itemsize for unit in engine.plan.request.units)
        assert stats.peak_bytes["device"] <= stats.budget_bytes["device"] and engine.plan.working_bytes < whole_bytes
        assert_same(engine, truth)
        for name, value in reference.state_dict().items():
            assert torch.equal(engine.reference.state_dict()[name], value), name


# --- scaling and schedules --------------------------------------------------------------------------------------------


def test_torchs_grad_scaler_around_fp32(tmp_path: Path) -> None:
    truth = net()
    optimizer, scaler = by_torch(truth.parameters()), torch.amp.GradScaler("cpu")
    for x in BATCHES:
        with torch.autocast("cpu", dtype=torch.float16):
            loss = loss_of(truth(x))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        assert torch.nn.utils.clip_grad_norm_(truth.parameters(), 1.0) < 1
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    model = net()
    heading = "Parameters in fp32, autocast to float16"
    with recipe(heading, model, by_torch(model.parameters()), tight(model, tmp_path)) as names:
        assert_same(names["engine"], truth)
        assert names["scaler"].state_dict() == scaler.state_dict()


def test_the_engines_own_scale_for_float16(tmp_path: Path) -> None:
    """Against fp32 masters that are updated beside a float16 model; a ``GradScaler`` on top is refused by name."""
    truth = net().half()
    masters = [nn.Parameter(p.detach().float()) for p in truth.parameters()]
    optimizer = by_torch(masters)
    for x in BATCHES:
        (loss_of(truth(x.half()).float()) * 1024).backward()
        for master, parameter in zip(masters, truth.parameters(), strict=True):
            assert parameter.grad is not None
            master.grad = parameter.grad.float() / 1024
            parameter.grad = None
        assert torch.nn.utils.clip_grad_norm_(masters, 1.0) < 1
        optimizer.step()
        with torch.no_grad():
            for master, parameter in zip(masters, truth.parameters(), strict=True):
                parameter.copy_(master)
    model = net().half()
    options = tight(model, tmp_path, dtype="float16", initial_loss_scale=1024.0)
    with recipe("Parameters in float16", model, by_torch(model.parameters()), options) as names:
        engine = names["engine"]
        assert engine.stats().skipped_steps == 0
        assert_same(engine, truth)
        scaler = torch.amp.GradScaler("cpu")
        with pytest.raises(StateError, match=r"call engine\.backward\(loss\)"):
            scaler.scale(loss_of(engine(BATCHES[0].half()).float())).backward()


def test_a_schedule(tmp_path: Path) -> None:
    truth = net()
    optimizer = by_torch(truth.parameters())
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1e-2, total_steps=len(BATCHES))
    betas = []

    def after(step: int) -> None:
        schedule.step()
        betas.append(optimizer.param_groups[0]["betas"])

    plain(truth, optimizer, after)
    assert len(set(betas)) > 3, "it changes the momentum"
    model = net()
    options = tight(model, tmp_path)
    with recipe("Schedules of the learning rate", model, by_torch(model.parameters()), options, only=0) as names:
        assert_same(names["engine"], truth)
        assert names["schedule"].get_last_lr() == schedule.get_last_lr()


def test_a_schedule_of_a_durable_run(tmp_path: Path) -> None:
    """It is interrupted inside of the warm-up, and behind it."""
    truth = net()
    optimizer = by_torch(truth.parameters())
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, total_iters=4)
    plain(truth, optimizer, lambda step: schedule.step())
    for end in (2, 5, 6):
        model = net()
        options = tight(model, tmp_path)
        for option in ("nvme_path", "offload_param", "offload_optimizer"):
            del options[option]
        more = {"run": tmp_path / "run", "batches": BATCHES[:end]}
        with recipe("In a durable run", model, by_torch(model.parameters()), options, **more) as names:
            assert names["schedule"].last_epoch == end
            left = names["engine"].state_dict()
    assert left.keys() == truth.state_dict().keys()
    assert all(torch.equal(left[name], value) for name, value in truth.state_dict().items())


# --- parts of the model -----------------------------------------------------------------------------------------------


def test_a_learning_rate_per_layer(tmp_path: Path) -> None:
    truth = net()
    groups = [{"params": layer.parameters(), "lr": 1e-2 * 0.8 ** (4 - depth)} for depth, layer in enumerate(truth)]
    plain(truth, torch.optim.AdamW(groups, weight_decay=0.1))
    model = net()
    with recipe("A learning rate per layer", model, None, tight(model, tmp_path)) as names:
        assert_same(names["engine"], truth, exactly=False)
        rates = [group["lr"] for group in names["engine"].optimizer.param_groups]
        assert rates == sorted(rates) and len(set(rates)) == 5


def unfreezing(model: nn.Sequential) -> Callable[[int], object]:
    """Return what the recipe does to `model` before each step but the first, said after the step before."""

    def after(step: int) -> None:
        if step == 1:
            model[-2].requires_grad_(True)
        if step == 3:
            model.requires_grad_(True)

    return after


@pytest.mark.parametrize("make", [by_torch, functools.partial(torch.optim.AdamW, lr=1e-2)])
@pytest.mark.parametrize("place", ["device", "nvme"])
def test_gradual_unfreezing(make: Make, place: str, tmp_path: Path) -> None:
    truth, model = net(), net()
    theirs = make(truth.parameters())
    truth[:-1].requires_grad_(False)
    plain(truth, theirs, unfreezing(truth))
    options = everything_on_device() if place == "device" else tight(model, tmp_path)
    with recipe("Gradual unfreezing", model, make(model.parameters()), options, only=0) as names:
        engine = names["engine"]
        assert_same(engine, truth, exactly=make is by_torch)
        assert_same_moments(engine, theirs, exactly=make is by_torch)
        assert engine.optimizer.state_dict()["state"][0]["step"] == 2


def test_unfreezing_with_a_new_engine(tmp_path: Path) -> None:
    truth, model = net(), net()
    truth[:-2].requires_grad_(False)
    theirs = torch.optim.AdamW(truth[-2:].parameters(), lr=1e-2)

    def after(step: int) -> None:
        if step == 2:
            truth.requires_grad_(True)
            theirs.add_param_group({"params": truth[:-2].parameters()})

    plain(truth, theirs, after)
    with recipe("Gradual unfreezing", model, None, tight(model, tmp_path), only=1) as names:
        assert_same(names["engine"], truth, exactly=False)
        assert_same_moments(names["engine"], theirs, exactly=False)


@pytest.mark.parametrize("make", [functools.partial(torch.optim.AdamW, lr=1e-2), functools.partial(AdamW, lr=1e-2)])
def test_the_remedy_where_a_group_has_the_frozen_parameter(make: Callable[..., Any]) -> None:
    """As torch has it, whose optimizers often get all parameters; followed to the letter."""
    truth, model = net(), net()
    theirs = torch.optim.AdamW(truth.parameters(), lr=1e-2)
    truth[:2].requires_grad_(False)
    plain(truth, theirs, lambda step: truth[:2].requires_grad_(step >= 2))
    model[:2].requires_grad_(False)
    engine = Engine(model, make(model.parameters()), **everything_on_device())
    for x in BATCHES[:3]:
        engine.backward(loss_of(engine(x)))
        engine.step()
    model.requires_grad_(True)
    engine.backward(loss_of(engine(BATCHES[3])))
    text = r"^parameter 0\.linear\.weight: requires a gradient but was frozen, .*and load the dict into its optimizer$"
    with pytest.raises(StateError, match=text):
        engine.step()
    saved = engine.optimizer.state_dict()
    engine.close()
    model.zero_grad()
    with Engine(model, make(model.parameters()), **everything_on_device()) as engine:
        engine.optimizer.load_state_dict(saved)
        for x in BATCHES[3:]:
            engine.backward(loss_of(engine(x)))
            engine.step()
        assert_same(engine, truth, exactly=False)
        assert_same_moments(engine, theirs, exactly=False)


def test_two_networks_against_each_other(tmp_path: Path) -> None:
    generator, discriminator = net(), net()
    theirs = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in (generator, discriminator)]
    for x in BATCHES:
        made = generator(x)
        discriminator.zero_grad()
        (loss_of(discriminator(x)) - loss_of(discriminator(made.detach()))).backward()
        theirs[1].step()
        generator.zero_grad()
        loss_of(discriminator(made)).backward()
        theirs[0].step()
    model = net()
    with recipe("Two networks against each other", model, None, tight(model, tmp_path)) as names:
        assert_same(names["g"], generator, exactly=False)
        assert_same(names["d"], discriminator, exactly=False)
        assert names["d"].stats().early_units_dropped == 0
        assert names["g"].stats().early_units_dropped == 0


def test_what_is_frozen_is_not_written(tmp_path: Path) -> None:
    """Each layer is a unit, of whose content the same bytes are written in each step that trains it."""
    model = net()
    with Engine(model, AdamW(lr=1e-2), **tight(model, tmp_path)) as engine:
        written = []
        for frozen in (0, 3, 5, 0):
            model.requires_grad_(True)
            model[:frozen].requires_grad_(False)
            if frozen < 5:
                engine.backward(loss_of(engine(BATCHES[0])))
                engine.step()
            engine.drain()
            written.append(engine.stats().links["nvme_write"].bytes)
        steps = [after - before for before, after in zip(written, written[1:], strict=False)]
        assert steps[1] == 0 and steps[2] > 0
        assert steps[0] * 5 == steps[2] * 2


def test_a_gradient_that_waits_when_its_layer_is_frozen(tmp_path: Path) -> None:
    truth, model = net(), net()
    theirs = by_torch(truth.parameters())
    with Engine(model, by_torch(model.parameters()), **tight(model, tmp_path)) as engine:
        for step, x in enumerate(BATCHES[:3]):
            loss_of(truth(x)).backward()
            engine.backward(loss_of(engine(x)))
            if step == 1:
                for module in (truth, model):
                    module[:2].requires_grad_(False)
            theirs.step()
            theirs.zero_grad()
            engine.step()
        assert_same(engine, truth)
        assert_same_moments(engine, theirs)


def test_a_loop_of_accelerate(tmp_path: Path) -> None:
    """Two micro-batches per step; the norms are below the limit, so that clipping changes no bit."""
    truth, model = net(), net()
    theirs = by_torch(truth.parameters())
    for number, x in enumerate(BATCHES):
        (loss_of(truth(x)) / 2).backward()
        if number % 2:
            assert torch.nn.utils.clip_grad_norm_(truth.parameters(), 1.0) < 1
            theirs.step()
            theirs.zero_grad()
    loader = torch.utils.data.DataLoader(torch.cat(BATCHES), batch_size=len(BATCHES[0]))
    heading, options = "Training with a plugin for DeepSpeed or FSDP", tight(model, tmp_path)
    options["max_memory"]["device"] *= 2
    with recipe(heading, model, by_torch(model.parameters()), options, page=MOVING, loader=loader) as names:
        assert names["engine"].stats().step == 3
        assert_same(names["engine"], truth)


# --- tools of torch ---------------------------------------------------------------------------------------------------


@pytest.fixture
def without_code_generation(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compile as ever, but let torch's own operators compute: a C++ compiler would take most of the time."""
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="aot_eager"))


@pytest.mark.usefixtures("without_code_generation")
def test_a_compiled_loss(tmp_path: Path) -> None:
    truth, model = net(), net()
    plain(truth, by_torch(truth.parameters()))
    torch.compiler.reset()
    torch._dynamo.utils.counters.clear()
    with recipe("The loss", model, by_torch(model.parameters()), tight(model, tmp_path)) as names:
        assert_same(names["engine"], truth)
        assert torch._dynamo.utils.counters["frames"]["ok"] == 1, "compiled once, for all steps"


@pytest.mark.usefixtures("without_code_generation")
def test_a_compiled_frozen_part(tmp_path: Path) -> None:
    truth, model = net(), net()
    truth[:2].requires_grad_(False)
    plain(truth, torch.optim.AdamW(truth[2:].parameters(), lr=1e-2))
    with recipe("A frozen part", model, None, tight(model, tmp_path)) as names:
        assert_same(names["engine"], truth[2:], exactly=False)
        with pytest.raises(StateError, match=r"is compiled \(torch\.compile\)"):
            Engine(nn.Sequential(names["features"], net()), AdamW(), **everything_on_device())


def test_the_profiler_shows_the_engines_phases(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = net()
    with recipe("torch.profiler", model, by_torch(model.parameters()), tight(model, tmp_path)) as names:
        found = {phase.key for phase in names["phases"]}
    explained = {line.split("`")[1] for line in section(PAGE, "torch.profiler").splitlines() if line.startswith("| `")}
    assert {"offload::fetch", "offload::bind", "offload::update"} <= found <= explained
    assert "offload::fetch" in capsys.readouterr().out
    assert "offload::bind" in (tmp_path / "trace.json").read_text()


class Log:
    """What a ``SummaryWriter`` and a run of wandb have in common with this."""

    def __init__(self) -> None:
        self.scalars: dict[int, dict[str, float]] = {}

    def add_scalar(self, name: str, value: float, step: int) -> None:
        self.scalars.setdefault(step, {})[name] = value

    def log(self, values: dict[str, float], step: int) -> None:
        self.scalars[step] = dict(values)


def test_what_is_logged(tmp_path: Path) -> None:
    model, writer, run = net(), Log(), Log()
    options = tight(model, tmp_path)
    heading = "TensorBoard and W&B"
    with recipe(heading, model, by_torch(model.parameters()), options, writer=writer, run=run) as names:
        stats = names["engine"].stats()
    assert writer.scalars == run.scalars and sorted(run.scalars) == list(range(len(BATCHES)))
    read_bytes = [found["nvme_read_bytes"] for found in run.scalars.values()]
    assert 0 < sum(read_bytes) <= stats.links["nvme_read"].bytes and max(read_bytes) < sum(read_bytes)
    assert all(type(value) in (int, float) for value in run.scalars[0].values())
    losses = [found["loss"] for found in run.scalars.values()]
    assert losses[-1] < losses[0]
