"""DeepSpeed's scripts through the door: the losses of a plain loop, its counts, its checkpoints and its refusals."""

from __future__ import annotations

import difflib
import errno
import io
import logging
import os
import runpy
import sys
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from foreign.deepspeed_recorder import LR, Net, groups_of
from harness import assert_same_tensors, everything_on_device, host, nvme
from reference import train
from torch import nn

import offload
from offload import deepspeed
from offload.errors import BudgetError, CheckpointError, ConfigError, NonFiniteError, OffloadError, StateError
from offload.integrations.deepspeed.schedules import WarmupDecayLR

ROOT = Path(__file__).resolve().parent.parent
RECORDED = Path(__file__).parent / "foreign" / "deepspeed.tar.xz"
WIDTH, STEPS, ACCUMULATION, CLIP = 32, 20, 2, 0.5
RATES = {"total_num_steps": 24, "warmup_max_lr": 1e-2, "warmup_num_steps": 6}
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": ACCUMULATION,
    "gradient_clipping": CLIP,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3, "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupDecayLR", "params": RATES},
    "zero_optimization": {"stage": 3},
}

pytestmark = pytest.mark.usefixtures("single_torch_thread")


class Tower(nn.Module):
    """Linear layers whose forward gives a loss, as models of transformers do."""

    def __init__(self, layers: int = 5) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(layers))
        self.greeting = "good day"

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        for layer in self.layers:
            x = x + layer(x).tanh()
        return SimpleNamespace(loss=x.sub(1).square().mean())

    def salute(self) -> str:
        return self.greeting


def tower(dtype: torch.dtype = torch.float32) -> Tower:
    torch.manual_seed(3)
    return Tower().to(dtype)


def batch(number: int) -> dict[str, torch.Tensor]:
    return {"x": torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))}


def initialize(model: nn.Module | None = None, config: Any = None, **more: Any) -> deepspeed.DeepSpeedEngine:
    """Return the engine of a tower, on the device if nothing else is said."""
    if not {"device", "max_memory"} & more.keys():
        more = {**everything_on_device(), **more}
    engine: deepspeed.DeepSpeedEngine = deepspeed.initialize(
        model=model or tower(), config={**CONFIG, **(config or {})}, **more
    )[0]
    return engine


def go_on(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> tuple[list[float], list[float]]:
    """Train with micro-batches of these numbers; returns losses, and norms of the steps."""
    losses, norms = [], []
    for number in range(first, last):
        loss = engine(**batch(number)).loss
        engine.backward(loss)
        if engine.step():
            norm = engine.get_global_grad_norm()
            assert norm is not None
            norms.append(norm)
        losses.append(loss.item())
    return losses, norms


@pytest.fixture
def engine() -> Iterator[deepspeed.DeepSpeedEngine]:
    with initialize() as made:
        assert isinstance(made, deepspeed.DeepSpeedEngine)
        yield made


# --- the losses ---


@pytest.fixture(scope="module")
def plain() -> Any:
    """The same training in a plain loop of torch."""
    schedules: list[WarmupDecayLR] = []

    def make(parameters: Any) -> torch.optim.Optimizer:
        optimizer = torch.optim.AdamW(parameters, lr=1e-3, weight_decay=0.1)
        schedules.append(WarmupDecayLR(optimizer, **RATES))  # type: ignore[arg-type]
        return optimizer

    batches = [batch(number) for number in range(STEPS * ACCUMULATION)]
    return train(
        tower(),
        batches,
        make,
        max_grad_norm=CLIP,
        accumulation=ACCUMULATION,
        after_step=lambda _: schedules[0].step(),
    )


def from_its_file(options: dict[str, Any]) -> dict[str, Any]:
    """Let the configuration say what is on the drive, and budgets stand beside it."""
    rest = {
        key: value for key, value in options.items() if key not in ("nvme_path", "offload_param", "offload_optimizer")
    }
    there = {"device": "nvme", "nvme_path": str(options["nvme_path"])}
    return {"config": {"zero_optimization": {"stage": 3, "offload_param": there, "offload_optimizer": there}}, **rest}


Placed = Callable[[nn.Module, Path], dict[str, Any]]
PLACES: dict[str, Placed] = {
    "device": lambda model, path: everything_on_device(),
    "host": lambda model, path: host(model),
    "nvme": lambda model, path: from_its_file(nvme(model, path)),
}


def test_losses_are_those_of_a_plain_loop_for_every_placement(plain: Any, tmp_path: Path) -> None:
    truth: tuple[Any, ...] | None = None
    for place, options in PLACES.items():
        model = tower()
        with initialize(model, **options(model, tmp_path)) as engine:
            losses, norms = go_on(engine, 0, STEPS * ACCUMULATION)
            assert engine.optimizer is not None
            found = (losses, norms, engine.state_dict(), engine.optimizer.state_dict()["state"])
        if truth is None:
            truth = found
            assert losses == pytest.approx([loss.item() for loss in plain.losses], rel=1e-4)
            assert norms == pytest.approx(plain.norms, rel=1e-4)
            assert max(norms) > CLIP and found[2].keys() == tower().state_dict().keys()
            continue
        assert (losses, norms) == truth[:2], place
        assert_same_tensors(found[2], truth[2])
        for number, state in found[3].items():
            assert_same_tensors(state, truth[3][number])


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}, {"fp16": {"enabled": True}}])
def test_a_resumed_run_has_the_bits_of_one_that_went_on(config: dict[str, Any], tmp_path: Path) -> None:
    middle, end = 5 * ACCUMULATION + 1, 8 * ACCUMULATION
    cast = {"bf16": torch.bfloat16, "fp16": torch.float16}.get(next(iter(config), ""), torch.float32)

    def trained(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> list[Any]:
        losses = []
        for number in range(first, last):
            loss = engine(batch(number)["x"].to(cast)).loss
            engine.backward(loss)
            engine.step()
            losses.append((loss.item(), engine.get_lr(), engine.cur_scale))
        return losses

    with initialize(config=config) as whole:
        before = trained(whole, 0, middle)
        assert whole.save_checkpoint(tmp_path, client_state={"next": middle, "losses": before}) is True
        after = trained(whole, middle, end)
        steps, samples, digests = whole.global_steps, whole.global_samples, whole.digests()
    model = tower()
    with initialize(model, config, **host(model)) as resumed:
        path, state = resumed.load_checkpoint(str(tmp_path))
        assert path == str(tmp_path / "global_step5") and state is not None and state["next"] == middle
        assert resumed.micro_steps == middle and resumed.is_gradient_accumulation_boundary()
        assert trained(resumed, middle, end) == after
        assert (resumed.global_steps, resumed.global_samples, resumed.digests()) == (steps, samples, digests)


def test_a_pass_that_is_not_averaged(engine: deepspeed.DeepSpeedEngine) -> None:
    norms = []
    for options in ({}, {"scale_wrt_gas": False}):
        loss = engine(**batch(0)).loss
        returned = engine.backward(loss, **options)
        assert returned.item() == pytest.approx(loss.item() / (1 if options else ACCUMULATION))
        norms.append(engine.grad_norm)
        engine.zero_grad()
    assert norms[1] == pytest.approx(ACCUMULATION * norms[0])  # type: ignore[operator]


def test_torchs_own_backward_is_averaged_too(engine: deepspeed.DeepSpeedEngine) -> None:
    engine.backward(engine(**batch(0)).loss)
    expected = engine.grad_norm
    engine.zero_grad()
    engine(**batch(0)).loss.backward()
    assert engine.grad_norm == expected


def test_zero_grad_inside_of_an_accumulation(
    engine: deepspeed.DeepSpeedEngine, caplog: pytest.LogCaptureFixture
) -> None:
    """As with ZeRO: the gradients are not where it looks, and the count goes on."""
    taken = []
    for number in range(4):
        engine.zero_grad()
        engine.backward(engine(**batch(number)).loss)
        taken.append(engine.step())
    assert taken == [False, True, False, True] and engine.micro_steps == 4
    assert [record.getMessage().partition(":")[0] for record in caplog.records].count("zero_grad") == 1
    digests = engine.digests()
    with initialize() as other:
        go_on(other, 0, 4)
        assert other.digests() == digests


@pytest.mark.parametrize("block", ["no_sync", "coalesce_grad_reduction"])
def test_passes_inside_no_sync_do_not_count(block: str, engine: deepspeed.DeepSpeedEngine) -> None:
    with getattr(engine, block)():
        engine.backward(engine(**batch(0)).loss)
        with pytest.raises(StateError, match="outside of no_sync"):
            engine.step()
        with pytest.raises(StateError, match="one block"), engine.no_sync():
            pass
    engine.backward(engine(**batch(1)).loss)
    assert engine.step() is False and engine.micro_steps == 1


# --- what is counted ---


def test_counts(engine: deepspeed.DeepSpeedEngine, caplog: pytest.LogCaptureFixture) -> None:
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (8, 4)
    assert (engine.gradient_accumulation_steps(), engine.gradient_clipping()) == (2, CLIP)
    assert engine.get_global_grad_norm() is None and engine.get_lr() == [0.0]
    assert not engine.is_gradient_accumulation_boundary()
    go_on(engine, 0, 3)
    assert engine.is_gradient_accumulation_boundary() and not engine.was_step_applied()
    assert (engine.micro_steps, engine.global_steps, engine.global_samples, engine.skipped_steps) == (3, 1, 8, 0)
    norm = engine.get_global_grad_norm()
    engine.backward(engine(**batch(3)).loss)
    assert engine.get_global_grad_norm() == norm != engine.grad_norm
    engine.step()
    assert engine.was_step_applied() and engine.get_lr() == engine.lr_scheduler.get_last_lr() != [0.0]
    assert engine.get_mom() == [(0.9, 0.999)]
    assert (engine.world_size, engine.dp_world_size, engine.global_rank, engine.local_rank) == (1, 1, 0, 0)
    assert (engine.zero_optimization_stage(), engine.zero_optimization()) == (3, True)
    assert engine.zero_optimization_partition_gradients() and engine.zero_optimization_partition_weights()
    assert (engine.steps_per_print(), engine.get_data_parallel_rank()) == (None, 0)
    assert not engine.fp16_enabled() and not engine.bfloat16_enabled() and engine.cur_scale == 1.0
    assert (engine.optimizer_name(), engine.scheduler_name()) == ("AdamW", "WarmupDecayLR")
    engine.set_train_micro_batch_size(3)
    assert (engine.train_batch_size(), engine.gradient_accumulation_steps()) == (6, 2)


def test_a_step_that_overflows_leaves_the_schedule() -> None:
    fp16 = {"enabled": True, "initial_scale_power": 30, "hysteresis": 1}
    with initialize(config={"fp16": fp16, "gradient_accumulation_steps": 1}) as engine:
        taken = []
        for number in range(20):
            before = engine.get_lr(), engine.cur_scale, engine.lr_scheduler.last_batch_iteration
            engine.backward(engine(batch(number)["x"].half()).loss)
            taken.append(engine.step())
            assert engine.was_step_applied() == taken[-1]
            assert engine.lr_scheduler.last_batch_iteration == before[2] + taken[-1]
            assert engine.cur_scale == before[1] / (1 if taken[-1] else 2)
            assert taken[-1] or engine.get_lr() == before[0]
        skipped = taken.count(False)
        assert 0 < skipped < 20 and taken == [False] * skipped + [True] * (20 - skipped)
        assert (engine.skipped_steps, engine.global_steps, engine.global_samples) == (skipped, 20, 80)
        assert engine.fp16_enabled() and engine.dynamic_loss_scale()


def test_a_static_loss_scale_stays() -> None:
    fp16 = {"enabled": True, "loss_scale": 2.0**30}
    with initialize(config={"fp16": fp16, "gradient_accumulation_steps": 1}) as engine:
        for number in range(3):
            engine.backward(engine(batch(number)["x"].half()).loss)
            assert engine.step() is False and engine.cur_scale == 2.0**30
        assert not engine.dynamic_loss_scale()


def test_progress_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "offload"):
        config = {"steps_per_print": 2, "wandb": {"enabled": True}, "gradient_accumulation_steps": 1}
        with initialize(config=config) as engine:
            go_on(engine, 0, 4)
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(",")[0] for line in lines if line.startswith("step=")] == ["step=2", "step=4"]
    assert any("wandb" in r.getMessage() for r in caplog.records if r.levelno == logging.WARNING)
    assert any("gradient_clipping" in line and "max_grad_norm" in line for line in lines)


# --- optimizers and schedules ---


def stepped(optimizer: Any, parameters: Any = None, section: Any = None, **more: Any) -> dict[str, torch.Tensor]:
    """Return the parameters after three steps."""
    model = tower()
    config = {"optimizer": section, "scheduler": None, "gradient_accumulation_steps": 1}
    given = optimizer(model) if isinstance(optimizer, Made) else optimizer
    members = parameters(model) if parameters else None
    with initialize(model, config, optimizer=given, model_parameters=members, **more) as engine:
        go_on(engine, 0, 3)
        return engine.state_dict()


class Made:
    """Makes an optimizer of a model."""

    def __init__(self, make: Callable[[nn.Module], Any]) -> None:
        self._make = make

    def __call__(self, model: nn.Module) -> Any:
        return self._make(model)


def decayed(model: nn.Module) -> list[dict[str, Any]]:
    """Return matrices and others as groups."""
    return [
        {"params": [p for p in model.parameters() if p.ndim > 1]},
        {"params": [p for p in model.parameters() if p.ndim <= 1], "weight_decay": 0.0},
    ]


OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def test_optimizers_of_the_configuration() -> None:
    truth = {
        "adamw": stepped(offload.AdamW(**OPTIONS)),
        "adam": stepped(offload.Adam(**OPTIONS)),
        "lion": stepped(offload.Lion(betas=(0.9, 0.999), **OPTIONS)),
        "adagrad": stepped(offload.Adagrad(**OPTIONS)),
        "sgd": stepped(offload.SGD(momentum=0.9, **OPTIONS)),
        "none": stepped(offload.AdamW(lr=1e-2, weight_decay=0.0)),
    }
    for type_, params, expected in (
        ("AdamW", OPTIONS, "adamw"),
        ("Adam", OPTIONS, "adamw"),  # as in DeepSpeed
        ("Adam", {**OPTIONS, "adam_w_mode": False}, "adam"),
        ("AdamW", {**OPTIONS, "torch_adam": True}, "adamw"),
        ("Adam", {**OPTIONS, "torch_adam": True, "adam_w_mode": False}, "adam"),
        ("Lion", OPTIONS, "lion"),
        ("Adagrad", OPTIONS, "adagrad"),
        ("SGD", {**OPTIONS, "momentum": 0.9}, "sgd"),
        ("AdamW", {"lr": 1e-2, "betas": [0.9, 0.999]}, "none"),
    ):
        found = stepped(None, section={"type": type_, "params": params})
        assert_same_tensors(found, truth[expected])


@pytest.mark.parametrize("how", ["members", "groups", "torch", "spec", "function"])
def test_gradients_that_nobody_steps_by_are_refused(how: str) -> None:
    """The norm would count them; frozen, they are in no norm, as DeepSpeed's has those of the optimizer alone."""
    for freeze in (False, True):
        model = tower()
        some = [*model.layers[2:].parameters()]
        given: Any = {
            "members": {"model_parameters": iter(some)},
            "groups": {"model_parameters": [{"params": some[:1]}, {"params": some[1:], "lr": 1e-2}]},
            "torch": {"optimizer": torch.optim.AdamW(some, lr=1e-3)},
            "spec": {"optimizer": offload.AdamW(some, lr=1e-3)},
            "function": {"optimizer": lambda members: torch.optim.AdamW(members, lr=1e-3), "model_parameters": some},
        }[how]
        config = {"scheduler": None, "gradient_accumulation_steps": 1}
        if not freeze:
            with pytest.raises(ConfigError, match=r"model_parameters: .* 4 are left out, such as layers\.0\.weight"):
                initialize(model, config, **given)
            continue
        model.layers[:2].requires_grad_(False)
        plain = tower()
        plain(**batch(0)).loss.backward()
        gradients = [p.grad for p in plain.layers[2:].parameters() if p.grad is not None]
        with initialize(model, config, **given) as engine:
            assert go_on(engine, 0, 1)[1] == [pytest.approx(float(torch.nn.utils.get_total_norm(gradients)), rel=1e-5)]


def test_lion_differs_where_there_is_no_gradient(caplog: pytest.LogCaptureFixture) -> None:
    class Rows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.rows = nn.Embedding(4, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = self.rows(x).square().sum()
            return found

    torch.manual_seed(0)
    model = Rows()
    before = model.rows.weight.detach().clone()
    config = {"optimizer": {"type": "Lion", "params": {"lr": 0.1}}, "scheduler": None, "gradient_accumulation_steps": 1}
    with initialize(model, config) as engine:
        engine.backward(engine(torch.tensor([0, 2])))
        engine.step()
        after = engine.state_dict()["rows.weight"]
    assert torch.equal(after[[1, 3]], before[[1, 3]]) and (after[[0, 2]] != before[[0, 2]]).all()
    assert "DeepSpeed's move" in caplog.text


def test_optimizers_of_the_script() -> None:
    adamw = stepped(Made(lambda model: offload.AdamW(decayed(model), **OPTIONS)))
    adam = stepped(Made(lambda model: offload.Adam(decayed(model), **OPTIONS)))
    cpu_adam, fused = deepspeed.ops.adam.DeepSpeedCPUAdam, deepspeed.ops.adam.FusedAdam
    for make, expected in (
        (lambda model: cpu_adam(decayed(model), **OPTIONS), adamw),
        (lambda model: fused(decayed(model), **OPTIONS), adamw),
        (lambda model: cpu_adam(decayed(model), adamw_mode=False, **OPTIONS), adam),
        (lambda model: fused(decayed(model), adam_w_mode=False, **OPTIONS), adam),
    ):
        assert_same_tensors(stepped(Made(make)), expected)
    assert_same_tensors(stepped(lambda groups: cpu_adam(groups, **OPTIONS), decayed), adamw)
    assert_same_tensors(stepped(None, decayed, {"type": "AdamW", "params": OPTIONS}), adamw)
    lion = stepped(Made(lambda model: deepspeed.ops.lion.FusedLion(decayed(model), **OPTIONS)))
    assert_same_tensors(lion, stepped(None, decayed, {"type": "Lion", "params": OPTIONS}))
    sums = stepped(Made(lambda model: deepspeed.ops.adagrad.DeepSpeedCPUAdagrad(model.parameters(), **OPTIONS)))
    assert_same_tensors(sums, stepped(None, None, {"type": "Adagrad", "params": OPTIONS}))


@pytest.mark.parametrize(
    ("type_", "params", "text"),
    [
        ("OneBitAdam", {}, "OneBitAdam; gradients are not compressed"),
        ("Lamb", {}, "offload.LAMB"),
        ("Muon", {}, "torch.optim.Muon"),
        ("MuAdam", {}, "mup.MuAdam"),
        ("Adamw", {"max_grad_norm": 1.0}, "set gradient_clipping"),
        ("AdamW", {"bias_correction": False}, "bias correction"),
        ("AdamW", {"amsgrad": True}, "amsgrad"),
        ("AdamW", {"fp32_optimizer_states": False}, "state_dtype"),
        ("AdamW", {"learning_rate": 1.0}, "learning_rate"),
        ("SDG", {}, "did you mean 'SGD'"),
    ],
)
def test_optimizers_that_are_refused(type_: str, params: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        initialize(config={"optimizer": {"type": type_, "params": params}})


def test_schedules_of_the_script() -> None:
    model = tower()
    optimizer = deepspeed.ops.adam.DeepSpeedCPUAdam(model.parameters(), lr=1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0 / (step + 1))
    config = {"gradient_accumulation_steps": 1}
    made = deepspeed.initialize(
        model=model, optimizer=optimizer, lr_scheduler=schedule, config={**CONFIG, **config}, **everything_on_device()
    )
    engine = made[0]
    assert made[1] is engine.optimizer and made[2] is None and made[3] is schedule is engine.lr_scheduler
    go_on(engine, 0, 2)
    assert engine.get_lr() == [1.0 / 3]
    engine.destroy()
    with initialize(
        config=config, lr_scheduler=lambda given: torch.optim.lr_scheduler.StepLR(given, 1, gamma=0.5)
    ) as engine:
        go_on(engine, 0, 2)
        assert engine.get_lr() == [1e-3 / 4]
    section = {"scheduler": {"type": "StepLR", "params": {"step_size": 1, "gamma": 0.5}}}
    with initialize(config={**config, **section}) as engine:
        go_on(engine, 0, 2)
        assert engine.get_lr() == [1e-3 / 4]


def test_a_schedule_of_another_optimizer_is_refused() -> None:
    model = tower()
    one, other = (torch.optim.AdamW(model.parameters()) for _ in range(2))
    schedule = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ConfigError, match=r"lr_scheduler: expected a scheduler .*got a ConstantLR of another one"):
        initialize(model, optimizer=one, lr_scheduler=schedule)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"config": {"scheduler": {"type": "WarmUpLR", "params": {}}}}, "did you mean 'WarmupLR'"),
        ({"config": {"scheduler": {"type": "WarmupLR", "params": {"warmup": 3}}}}, "unexpected keyword argument"),
        ({"config": {"optimizer": None}}, "expected an optimizer, too"),
        ({"lr_scheduler": torch.optim.lr_scheduler.ReduceLROnPlateau}, "ReduceLROnPlateau.step needs metrics"),
        ({"mpu": object()}, "mpu: expected None"),
        ({"run_dir": "/nowhere"}, "run_dir: expected none"),
        ({"config": {"steps_per_print": "often"}}, "steps_per_print: expected a number"),
    ],
)
def test_what_does_not_fit_is_refused_and_leaves_the_model(more: dict[str, Any], text: str) -> None:
    model = tower()
    with pytest.raises(ConfigError, match=text):
        initialize(model, **more)
    assert torch.equal(model.layers[0].weight, tower().layers[0].weight)
    initialize(model).close()


# --- checkpoints ---


def test_checkpoints(engine: deepspeed.DeepSpeedEngine, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert engine.load_checkpoint(tmp_path) == (None, None) and "nothing was loaded" in caplog.text
    go_on(engine, 0, 4)
    engine.save_checkpoint(tmp_path, tag=7)
    first = engine.digests()
    go_on(engine, 4, 8)
    engine.save_checkpoint(tmp_path, save_latest=False)
    assert (tmp_path / "latest").read_text() == "7\n"
    path, state = engine.load_checkpoint(tmp_path)
    assert (path, state) == (str(tmp_path / "7"), {}) and engine.digests() == first
    assert engine.load_checkpoint(tmp_path, "global_step4")[0] == str(tmp_path / "global_step4")
    assert engine.global_steps == 4 and engine.global_samples == 32
    assert engine.load_checkpoint(tmp_path / "7")[0] == str(tmp_path / "7")
    with pytest.raises(CheckpointError, match="there are 7, global_step4"):
        engine.load_checkpoint(tmp_path, "global_step9")
    with pytest.raises(CheckpointError, match="client_state"):
        engine.save_checkpoint(tmp_path, client_state={"function": print})
    with pytest.raises(ConfigError, match="exclude_frozen_parameters"):
        engine.save_checkpoint(tmp_path, exclude_frozen_parameters=True)
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint(tmp_path, custom_load_fn=print)


def test_a_resumed_run_follows_the_schedule_of_its_configuration(tmp_path: Path) -> None:
    """Six steps of six, and on to 18: the rates are those of a run that was to take 18 from the beginning."""

    def made(total: int) -> deepspeed.DeepSpeedEngine:
        section = {"type": "WarmupDecayLR", "params": {**RATES, "warmup_num_steps": 2, "total_num_steps": total}}
        return initialize(config={"scheduler": section, "gradient_accumulation_steps": 1})

    def rates(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> list[float]:
        found = []
        for number in range(first, last):
            go_on(engine, number, number + 1)
            found += engine.get_lr()
        return found

    with made(18) as whole:
        truth = rates(whole, 0, 10)
    with made(6) as short:
        rates(short, 0, 7)
        assert short.get_lr() == [0.0]
        short.save_checkpoint(tmp_path)
    with made(18) as resumed:
        resumed.load_checkpoint(tmp_path)
        assert resumed.get_lr() == resumed.lr_scheduler.get_last_lr() == [0.0]  # as in DeepSpeed, for one step
        assert rates(resumed, 7, 10) == truth[7:] and min(truth[7:]) > 0


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_parts_of_a_checkpoint(dtype: str, tmp_path: Path) -> None:
    config = {"bf16": {"enabled": True}} if dtype == "bfloat16" else {}
    cast = getattr(torch, dtype)

    def trained(engine: deepspeed.DeepSpeedEngine, first: int, last: int) -> None:
        for number in range(first, last):
            engine.backward(engine(batch(number)["x"].to(cast)).loss)
            engine.step()

    def masters(engine: deepspeed.DeepSpeedEngine) -> dict[str, Any]:
        return {
            name: (one["parameter"], deepspeed.utils.safe_get_full_fp32_param(engine.module.get_parameter(name)))
            for name, one in engine.digests().items()
        }

    with initialize(config=config) as engine:
        trained(engine, 0, 6)
        engine.save_checkpoint(tmp_path, client_state={"a": 1})
        saved = masters(engine)
    with initialize(config=config) as engine:
        trained(engine, 50, 53)
        rates, drawn = engine.get_lr(), torch.random.get_rng_state()
        torch.rand(3)
        later, own = torch.random.get_rng_state(), moments(engine)
        assert engine.load_checkpoint(tmp_path, load_module_only=True)[1] == {"a": 1}
        assert torch.equal(torch.random.get_rng_state(), later) and not torch.equal(later, drawn)
        assert (engine.global_steps, engine.micro_steps, engine.get_lr()) == (1, 2, rates)
        assert engine.optimizer is not None and engine.grad_norm is not None
        for name, (digest, master) in masters(engine).items():
            assert digest == saved[name][0] and torch.equal(master, saved[name][1]), name
        assert_same_tensors(moments(engine), own)
        assert {int(state["step"]) for state in engine.optimizer.state_dict()["state"].values()} == {1}
        trained(engine, 0, 2)
    with initialize(config=config) as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False, load_lr_scheduler_states=False)
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (3, -1)
        assert engine.optimizer is not None
        assert all(not state["step"] for state in engine.optimizer.state_dict()["state"].values())
        assert {name: digest for name, (digest, _) in masters(engine).items()} == {n: d for n, (d, _) in saved.items()}


STATES = {"exp_avg", "exp_avg_sq"}


def moments(engine: deepspeed.DeepSpeedEngine) -> dict[str, torch.Tensor]:
    assert engine.optimizer is not None
    states = engine.optimizer.state_dict()["state"].items()
    return {f"{at} {name}": value.clone() for at, state in states for name, value in state.items() if name in STATES}


OTHERS: dict[str, dict[str, Any]] = {
    "another kernel": {"config": {"optimizer": {"type": "Lion", "params": {"lr": 1e-4}}}},
    "another class": {"config": {"optimizer": {"type": "SGD", "params": {"lr": 1e-2, "momentum": 0.9}}}},
    "of torch": {"optimizer": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3)},
    "frozen layers": {},
    "only evaluates": {"config": {"optimizer": None, "scheduler": None}},
}


@pytest.mark.parametrize("saved", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", sorted(OTHERS))
def test_weights_of_a_run_with_another_optimizer(name: str, saved: str, tmp_path: Path) -> None:
    """What a run is fine-tuned from: its optimizer, groups and frozen layers are its own business."""
    config = {"bf16": {"enabled": True}} if saved == "bfloat16" else {}
    x = batch(0)["x"].to(getattr(torch, saved))
    with initialize(config=config) as engine:
        for _ in range(2 * ACCUMULATION + 1):  # the last one waits for a step
            engine.backward(engine(x).loss)
            engine.step()
        truth = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.save_checkpoint(tmp_path)
    for only in (True, False):
        given = OTHERS[name]
        model = tower()
        model.layers[0].requires_grad_(name != "frozen layers")
        if name == "only evaluates":
            model.requires_grad_(False)
        more = {"optimizer": given["optimizer"](model.parameters())} if "optimizer" in given else {}
        with initialize(model, {**config, **given.get("config", {})}, **more) as engine:
            engine.load_checkpoint(tmp_path, load_module_only=only, load_optimizer_states=False)
            assert_same_tensors(engine.state_dict(), truth)
            if engine.optimizer is not None:
                assert engine.global_steps == (0 if only else 2)
                assert [(engine.backward(engine(x).loss), engine.step())[1] for _ in range(ACCUMULATION)][-1]


@pytest.mark.parametrize("given", [{"load_module_only": True}, {"load_optimizer_states": False}])
def test_weights_alone_have_to_be_of_the_same_model(given: dict[str, bool], tmp_path: Path) -> None:
    with initialize() as engine:
        engine.save_checkpoint(tmp_path)
    with initialize(Tower(layers=4)) as engine:
        before = {name: value.clone() for name, value in engine.state_dict().items()}
        with pytest.raises(CheckpointError, match="is of another model"):
            engine.load_checkpoint(tmp_path, **given)
        assert_same_tensors(engine.state_dict(), before)


def test_gradients_of_a_checkpoint_from_inside_an_accumulation_are_dropped_without_states(tmp_path: Path) -> None:
    with initialize() as engine:
        engine.backward(engine(**batch(0)).loss)
        engine.step()
        engine.save_checkpoint(tmp_path)
    with initialize() as engine:
        engine.load_checkpoint(tmp_path, load_optimizer_states=False)
        assert engine.grad_norm is None and [take(engine, number) for number in range(2)] == [False, True]
    with initialize() as engine:
        engine.load_checkpoint(tmp_path)
        assert engine.grad_norm is not None and take(engine, 1)


def take(engine: deepspeed.DeepSpeedEngine, number: int) -> bool:
    engine.backward(engine(**batch(number)).loss)
    return engine.step()


def test_what_deepspeed_has_saved(tmp_path: Path) -> None:
    with tarfile.open(RECORDED) as archive:
        archive.extractall(tmp_path, filter="data")
    torch.manual_seed(5)
    model = Net()
    groups = groups_of(model)
    config = {"scheduler": {"type": "WarmupLR"}, "gradient_accumulation_steps": 1, "train_micro_batch_size_per_gpu": 5}
    folder = tmp_path / "zero3-fp32-x2"
    file = folder / "global_step3" / "zero_pp_rank_0_mp_rank_00_model_states.pt"
    beside = {"next": 5, "seen": [torch.arange(3), {"mean": torch.ones(2)}]}
    torch.save({**torch.load(file), "lr_scheduler": {"last_batch_iteration": 2}, **beside}, file)
    with initialize(model, config, optimizer=torch.optim.AdamW(groups, lr=0.5)) as engine:
        path, state = engine.load_checkpoint(folder)
        tag = (folder / "latest").read_text().strip()
        assert path == str(folder / tag) and state is not None and state.keys() == beside.keys()
        assert state["next"] == 5 and torch.equal(state["seen"][0], torch.arange(3))
        assert torch.equal(state["seen"][1]["mean"], torch.ones(2))
        assert (engine.global_steps, engine.global_samples, engine.lr_scheduler.last_batch_iteration) == (3, 12, 2)
        assert engine.get_lr() == [LR, LR]
        weights = {name: value.clone() for name, value in engine.state_dict().items()}
        engine.backward(engine(torch.ones(1, 8)).sum())
        engine.step()
        assert engine.load_checkpoint(folder, tag, load_module_only=True)[0] == path
        assert engine.global_steps == 4
        assert_same_tensors(engine.state_dict(), weights)


def test_16_bit_models(tmp_path: Path) -> None:
    model = tower()
    model.layers[0].weight.requires_grad_(False)
    with initialize(model, {"bf16": {"enabled": True}}) as engine:
        assert engine.save_16bit_model(tmp_path / "out") is True
        saved = torch.load(tmp_path / "out" / "pytorch_model.bin")
        assert_same_tensors(saved, {name: value.bfloat16() for name, value in tower().state_dict().items()})
        engine.save_fp16_model(tmp_path, "trained.bin", exclude_frozen_parameters=True)
        assert saved.keys() - torch.load(tmp_path / "trained.bin").keys() == {"layers.0.weight"}
        assert_same_tensors(engine.module_state_dict(), saved)
        assert engine.zero_gather_16bit_weights_on_model_save()
        trained = engine._zero3_consolidated_16bit_state_dict(exclude_frozen_parameters=True)
        assert trained is not None and saved.keys() - trained.keys() == {"layers.0.weight"}


class Full(io.FileIO):
    """A file on a drive that soon has no room."""

    def write(self, content: Any) -> int:
        if self.tell() > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


def test_a_16_bit_model_that_does_not_fit_leaves_the_one_before(
    tmp_path: Path, engine: deepspeed.DeepSpeedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine.save_16bit_model(tmp_path)
    file = tmp_path / "pytorch_model.bin"
    before = file.read_bytes()
    with monkeypatch.context() as patched:
        patched.setattr(Path, "open", lambda path, mode: Full(path, mode))
        with pytest.raises(ConfigError, match=f"save_16bit_model: .*{file}: No space left on device; name one in"):
            engine.save_16bit_model(tmp_path)
    assert file.read_bytes() == before and list(tmp_path.iterdir()) == [file]


# --- zero, and single parameters ---


def test_models_that_are_made_on_the_drive(tmp_path: Path) -> None:
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(600, 600)

    def made(**options: Any) -> Large:
        torch.manual_seed(1)
        with deepspeed.zero.Init(**options):
            return Large()

    expected = made(enabled=False).state_dict()
    section = {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path)}}
    assert_same_tensors(dict(made(config_dict_or_path={"zero_optimization": section}).state_dict()), dict(expected))
    assert made().layer.weight.shape == (600, 600)
    assert made(dtype=torch.bfloat16).layer.weight.dtype == torch.bfloat16 != torch.get_default_dtype()
    with pytest.raises(ConfigError, match="mpu"):
        made(mpu=object())
    with pytest.raises(ConfigError, match="zero_quantized_weights"):
        made(zero_quantized_weights=True)
    missing = {"zero_optimization": {"offload_param": {"device": "nvme", "nvme_path": str(tmp_path / "none")}}}
    with pytest.raises(ConfigError, match="no folder there"):
        made(config=missing)


def test_gathered_parameters(tmp_path: Path) -> None:
    model = tower()
    with initialize(model, **nvme(model, tmp_path)) as engine:
        other, weight = nn.Parameter(torch.ones(2)), model.layers[1].weight
        with deepspeed.zero.GatheredParameters([weight, other], modifier_rank=0):
            weight.data.zero_()
        with deepspeed.zero.GatheredParameters(weight):
            assert not weight.any()
        with deepspeed.zero.GatheredParameters(model.parameters(), enabled=False), torch.no_grad():
            assert other.sum() == 2
        with pytest.raises(StateError, match="modify=True"), deepspeed.zero.GatheredParameters(weight):
            with torch.no_grad():
                weight.add_(1)
        with pytest.raises(ConfigError, match="modifier_rank"):
            deepspeed.zero.GatheredParameters(weight, modifier_rank=1)
        assert not engine.state_dict()["layers.1.weight"].any()
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=0):  # of no engine
        weight.data.fill_(2)
    deepspeed.zero.register_external_parameter(model, weight)


@pytest.mark.parametrize("config", [{}, {"bf16": {"enabled": True}}])
def test_single_parameters_in_full(config: dict[str, Any], tmp_path: Path) -> None:
    utils, model = deepspeed.utils, tower()
    config = {**config, "gradient_accumulation_steps": 1}
    cast = torch.bfloat16 if "bf16" in config else torch.float32
    weight, frozen = model.layers[2].weight, model.layers[1].bias
    frozen.requires_grad_(False)
    with initialize(model, config, **nvme(model, tmp_path, dtype="bfloat16" if "bf16" in config else None)) as engine:
        assert torch.equal(utils.safe_get_full_fp32_param(weight), tower().layers[2].weight)
        assert torch.equal(utils.safe_get_full_fp32_param(frozen), tower().layers[1].bias.to(cast).float())
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        assert utils.safe_get_full_grad(weight) is None
        with pytest.raises(StateError, match="take a step first"):
            utils.safe_set_full_optimizer_state(weight, torch.zeros(WIDTH, WIDTH), "exp_avg")
        with pytest.raises(StateError, match="call backward first"):
            utils.safe_set_full_grad(weight, torch.zeros(WIDTH, WIDTH))
        engine.backward(engine(batch(0)["x"].to(cast)).loss)
        gradient = utils.safe_get_full_grad(weight)
        utils.safe_set_full_grad(weight, torch.full_like(gradient, 0.25))
        assert torch.equal(utils.safe_get_full_grad(weight), torch.full_like(gradient, 0.25))
        utils.safe_set_full_grad(weight, gradient)
        engine.step()
        before = engine.digests()
        moment = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert engine.optimizer is not None
        number = [id(one) for one in engine.optimizer.param_groups[0]["params"]].index(id(weight))
        packed = engine.optimizer.state_dict()["state"][number]
        assert torch.equal(moment, packed["exp_avg"]) and moment.any()
        master = utils.safe_get_full_fp32_param(weight)
        assert torch.equal(master, packed.get("master", engine.state_dict()["layers.2.weight"]))
        utils.safe_set_full_optimizer_state(weight, moment + 1, "exp_avg")
        utils.safe_set_full_fp32_param(weight, master + 1e-6)
        assert torch.equal(utils.safe_get_full_optimizer_state(weight, "exp_avg"), moment + 1)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), master + 1e-6)
        utils.safe_set_full_optimizer_state(weight, moment, "exp_avg")
        utils.safe_set_full_fp32_param(weight, master)
        assert engine.digests() == before
        assert utils.safe_get_full_optimizer_state(frozen, "exp_avg") is None
    assert utils.safe_get_full_fp32_param(weight) is None and utils.safe_get_full_grad(weight) is None
    with pytest.raises(StateError, match="none has it"):
        utils.safe_set_full_fp32_param(weight, master)


# --- the module, and what is refused ---


def test_the_engine_stands_for_its_module(engine: deepspeed.DeepSpeedEngine) -> None:
    assert isinstance(engine, offload.Engine)
    assert engine.salute() == "good day" and engine.greeting == "good day"
    assert [name for name, _ in engine.named_parameters()] == [n for n, _ in engine.module.named_parameters()]
    assert len(list(engine.parameters())) == 10
    assert engine.eval().training is False and engine.train().training is True
    assert engine.to(engine.device) is engine.to(torch.float32) is engine
    engine.empty_partition_cache()
    for asked in (torch.bfloat16, "meta"):
        with pytest.raises(StateError, match="where the engine computes"):
            engine.to(asked)
    with pytest.raises(AttributeError, match="did you mean 'global_steps'"):
        engine.global_step  # noqa: B018
    assert deepspeed.utils.set_z3_leaf_modules(engine.module, [nn.Linear]) == list(engine.module.layers)


@pytest.mark.parametrize("name", sorted(deepspeed.engine.REFUSED))  # type: ignore[attr-defined]
def test_methods_that_are_not_here_are_refused_by_name(name: str, engine: deepspeed.DeepSpeedEngine) -> None:
    with pytest.raises(StateError, match=f"engine.{name}: "):
        getattr(engine, name)
    assert not hasattr(engine, name)


def test_names_that_are_not_here_are_refused_by_name() -> None:
    for name in ("init_inference", "PipelineModule", "moe", "OnDevice"):
        with pytest.raises(ConfigError, match=f"deepspeed.{name}: "):
            getattr(deepspeed, name)
    with pytest.raises(AttributeError, match="did you mean 'initialize'"):
        deepspeed.initialise  # type: ignore[attr-defined]  # noqa: B018
    for module, name in ((deepspeed.zero, "TiledLinear"), (deepspeed.utils, "safe_get_local_grad")):
        with pytest.raises(ConfigError, match=name):
            getattr(module, name)
    for module in (deepspeed.zero, deepspeed.utils):
        with pytest.raises(AttributeError):
            module.nothing  # noqa: B018


def test_a_configuration_by_its_file(tmp_path: Path) -> None:
    file = tmp_path / "ds.json"
    file.write_text('{"train_batch_size": 4, "offload": {"device": "cpu"}}', encoding="utf-8")
    arguments = SimpleNamespace(deepspeed_config=str(file), local_rank=-1)
    engine, optimizer, _, schedule = deepspeed.initialize(arguments, tower())
    with engine:
        assert optimizer is None and schedule is None and arguments.local_rank == 0
        assert engine.train_batch_size() == 4 and engine.optimizer_name() is None
        with torch.no_grad():
            assert torch.equal(engine(**batch(0)).loss, tower()(**batch(0)).loss)
    for given, text in (
        ({"args": arguments, "config": {}}, "leave one out"),
        ({}, "expected a dict or a JSON file but got none"),
    ):
        with pytest.raises(ConfigError, match=text):
            deepspeed.initialize(model=tower(), **given)
    with pytest.raises(ConfigError, match="model: expected"):
        deepspeed.initialize(config=CONFIG)


def test_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    deepspeed.init_distributed(dist_init_required=False)
    assert not torch.distributed.is_initialized()
    deepspeed.init_distributed()
    try:
        deepspeed.init_distributed("gloo", rank=0, world_size=1)
        assert (torch.distributed.get_rank(), torch.distributed.get_world_size()) == (0, 1)
        initialize().close()
    finally:
        torch.distributed.destroy_process_group()
    with pytest.raises(ConfigError, match="expected rank 0 of one process but got 1"):
        deepspeed.init_distributed(rank=1)
    with pytest.raises(ConfigError, match="no RANK, MASTER_ADDR, MASTER_PORT; start them with torchrun"):
        deepspeed.init_distributed(world_size=2)
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (deepspeed.init_distributed, initialize):
        with pytest.raises(ConfigError, match="expected 2 processes .* start them with torchrun"):
            call()
    with pytest.raises(StateError, match="WORLD_SIZE=2; call deepspeed"):
        deepspeed.comm.all_reduce(torch.zeros(1))


def test_errors_are_those_of_the_engine() -> None:
    with initialize(config={"bf16": {"enabled": True}, "gradient_accumulation_steps": 1}) as engine:
        engine.backward(engine(batch(0)["x"].bfloat16()).loss)
        with deepspeed.utils.engine_of(engine.module.layers[0].bias).gather_gradients(modify=True):  # type: ignore
            engine.module.layers[0].bias.grad.fill_(float("nan"))
        with pytest.raises(NonFiniteError, match=r"layers\.0\.bias"):
            engine.step()
        assert (engine.global_steps, engine.lr_scheduler.last_batch_iteration) == (0, -1)
    with pytest.raises(BudgetError):
        initialize(device="cpu", max_memory={"device": "1KiB", "cpu": "1KiB"})
    assert issubclass(ConfigError, OffloadError)


# --- data ---


def test_loaders(engine: deepspeed.DeepSpeedEngine) -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    order = torch.utils.data.DistributedSampler(data, num_replicas=1, rank=0)
    loader = engine.deepspeed_io(data, num_local_io_workers=0)
    drawn = [batch[0].tolist() for batch in loader]
    assert [len(one) for one in drawn] == [4, 4, 2] and sum(drawn, []) == list(order)
    straight = engine.deepspeed_io(data, 5, route="eval", num_local_io_workers=0, collate_fn=len)
    assert list(straight) == [5, 5] and list(straight.sampler) == list(range(10))
    repeated = deepspeed.utils.RepeatingLoader(loader)
    assert [next(repeated)[0].tolist() for _ in range(5)] == [*drawn, *drawn[:2]]
    assert deepspeed.RepeatingLoader is deepspeed.utils.RepeatingLoader

    class Stream(torch.utils.data.IterableDataset[int]):
        def __iter__(self) -> Iterator[int]:
            return iter(range(5))

    assert [len(one) for one in engine.deepspeed_io(Stream(), num_local_io_workers=0)] == [4, 1]
    with pytest.raises(ConfigError, match="training_data: expected a torch Dataset"):
        engine.deepspeed_io(7)


def test_training_data() -> None:
    data = torch.utils.data.TensorDataset(torch.arange(10))
    made = deepspeed.initialize(
        model=tower(),
        training_data=data,
        collate_fn=len,
        config={**CONFIG, "dataloader_drop_last": True},
        **everything_on_device(),
    )
    with made[0] as engine:
        assert made[2] is engine.training_dataloader
        assert made[2].num_workers == 2 and made[2].batch_size == 4 and len(made[2]) == 2
    with pytest.raises(ConfigError, match="training_data"):
        deepspeed.initialize(model=tower(), training_data=7, config=CONFIG, **everything_on_device())


# --- examples ---


def test_examples(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    before, after = (ROOT / "examples" / f"deepspeed_{when}.py" for when in ("before", "after"))
    texts = [path.read_text(encoding="utf-8").splitlines() for path in (before, after)]
    changed = [line for line in difflib.ndiff(*texts) if line[0] in "+-" and line[2:].strip() and '"""' not in line]
    assert changed == ["- import deepspeed", "+ from offload import deepspeed"]
    monkeypatch.setitem(sys.modules, "deepspeed", deepspeed)
    monkeypatch.setattr(sys, "argv", ["example", "--checkpoints", str(tmp_path / "run")])
    losses = [runpy.run_path(str(path), run_name="example")["main"]() for path in (before, after)]
    assert losses[0] == losses[1] and len(losses[0]) == 32
    assert sum(losses[0][24:]) < 0.9 * sum(losses[0][:8])
    assert len(capsys.readouterr().out.splitlines()) == 32
    assert (tmp_path / "run" / "global_step16").is_dir()
