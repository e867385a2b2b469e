"""The door of Accelerate: what a loop logs is what it logs without an engine, whole and resumed."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import accelerate
import pytest
import safetensors.torch
import torch
from harness import assert_same_tensors, host, nvme
from torch import nn
from trainers import CLIPPING, LR, Log, adam, assert_close, calls_of_handles, model, rows

import offload
from offload import AdamW, Engine
from offload.errors import ConfigError, StateError
from offload.integrations import accelerate as door
from offload.integrations.accelerate import prepare

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore")]

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "accelerate_loop.py"


def accelerator(**more: Any) -> accelerate.Accelerator:
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerate.state.GradientState._reset_state()
    return accelerate.Accelerator(cpu=True, **more)


def schedule_of(optimizer: torch.optim.Optimizer) -> Any:
    return torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)


def train(
    made: accelerate.Accelerator, prepared: Any, *, first: int, count: int, step_of: Callable[[], int] | None = None
) -> Log:
    """Train on batches from the `first` of the loader; clips, accumulates and schedules."""
    module, optimizer, loader, schedule = prepared
    log = Log()
    for number, batch in enumerate(made.skip_first_batches(loader, first)):
        if number == count:
            break
        with made.accumulate(module):
            loss = module(**batch).loss
            made.backward(loss)
            if made.sync_gradients:
                log.norms.append(float(made.clip_grad_norm_(module.parameters(), 0.5)))
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            log.losses.append(loss.item())
    return log


def loader() -> Any:
    return torch.utils.data.DataLoader(rows(), batch_size=2)


def plain(made: accelerate.Accelerator) -> Any:
    module = model()
    optimizer = adam(module)
    return made.prepare(module, optimizer, loader(), schedule_of(optimizer))


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("steps", "precision"),
    [(2, "no"), (1, "no"), pytest.param(1, "bf16", marks=pytest.mark.nightly)],
)
def test_trains_as_without(steps: int, precision: str, tmp_path: Path) -> None:
    """Twenty batches; saved and loaded in the middle."""
    arguments = {"gradient_accumulation_steps": steps, "mixed_precision": precision}
    made = accelerator(**arguments)
    prepared = plain(made)
    truth = train(made, prepared, first=0, count=20)
    found = []
    for place in (nvme, host):
        made, module = accelerator(**arguments), model()
        options = place(module, tmp_path) if place is nvme else place(module)
        with Engine(module, adam(module), **options) as engine:
            given = (loader(), engine, schedule_of(engine.optimizer))
            data, *trained, schedule = prepare(made, *given)
            prepared = (*trained, data, schedule)
            first = train(made, prepared, first=0, count=10)
            made.save_state(str(tmp_path / place.__name__))
            second = train(made, prepared, first=10, count=10)
            found.append((first, second, engine.digests()))
            assert engine.stats().step == 20 // steps
            made.load_state(str(tmp_path / place.__name__))
            again = train(made, prepared, first=10, count=10)
            assert (again, engine.digests()) == (second, found[0][2])
    assert found[0] == found[1]
    names = {file.name for file in (tmp_path / "nvme").iterdir()}
    assert "offload" in names and not {"model.safetensors", "pytorch_model.bin"} & names
    assert (tmp_path / "nvme" / "optimizer.bin").stat().st_size < 4096  # says that there is nothing in it
    exact = precision == "no"
    compared = None if exact else 5  # rounding to bf16 adds up
    assert_close((first.losses + second.losses)[:compared], truth.losses[:compared], 1e-4 if exact else 2e-3)
    assert_close((first.norms + second.norms)[:compared], truth.norms[:compared], 1e-4 if exact else 8e-3)


def batches(made: accelerate.Accelerator, module: nn.Module, optimizer: Any, count: int) -> None:
    for batch, _ in zip(loader(), range(count), strict=False):
        made.backward(module(**batch).loss)
        optimizer.step()
        optimizer.zero_grad()


def test_each_engine_of_an_accelerator_is_saved(tmp_path: Path) -> None:
    """And an engine that is closed leaves its place to the next one."""
    made, state = accelerator(), str(tmp_path / "state")
    one, other = model(), model()
    with Engine(one, adam(one), **nvme(one, tmp_path)) as first:
        with Engine(other, adam(other), **nvme(other, tmp_path)) as second:
            trained = [prepare(made, engine) for engine in (first, second, first)][:2]
            batches(made, *trained[0], 1)
            batches(made, *trained[1], 2)
            digests = [first.digests(), second.digests()]
            assert digests[0] != digests[1]
            made.save_state(state)
            for each in trained:
                batches(made, *each, 1)
            made.load_state(state)
            assert [first.digests(), second.digests()] == digests
    names = {path.name for path in (tmp_path / "state").iterdir()}
    assert {"offload", "offload_1", "optimizer.bin", "optimizer_1.bin"} <= names and "optimizer_2.bin" not in names
    with Engine(one, adam(one), **nvme(one, tmp_path)) as engine:
        batches(made, *prepare(made, engine), 1)
        made.save_state(str(tmp_path / "next"))
        made.load_state(state)
        assert engine.digests() == digests[0]
    assert not (tmp_path / "next" / "offload_1").exists()


def test_an_engine_that_an_accelerator_lets_go_leaves_its_place(tmp_path: Path) -> None:
    """As with accelerate's find_executable_batch_size: what loads the state has one engine, the second one."""
    made, one, other = accelerator(), model(), model()
    with Engine(one, adam(one), **nvme(one, tmp_path)) as first:
        prepare(made, first)
        made.free_memory()
        made.save_state(str(tmp_path / "none"))
        with Engine(other, adam(other), **nvme(other, tmp_path)) as second:
            batches(made, *prepare(made, second), 1)
            made.save_state(str(tmp_path / "state"))
            digests = [first.digests(), second.digests()]
            batches(made, second.module, second.optimizer, 1)
            made.load_state(str(tmp_path / "state"))
            assert [first.digests(), second.digests()] == digests and digests[0] != digests[1]
    assert (tmp_path / "state" / "offload").is_dir()
    assert not [*tmp_path.glob("none/offload*")] and not (tmp_path / "state" / "offload_1").exists()


def test_a_loop_may_save_the_optimizer_by_hand(tmp_path: Path) -> None:
    """Its dict is the engine's optimizer's. Only the accelerator's own files have nothing of it."""
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        trained, optimizer = prepare(made, engine)
        seen = []
        made.register_save_state_pre_hook(lambda *_: seen.append(optimizer.state_dict()))
        batches(made, trained, optimizer, 2)
        made.save_state(str(tmp_path / "state"))
        truth = engine.optimizer.state_dict()
        made.save({"model": made.get_state_dict(trained), "optimizer": optimizer.state_dict()}, tmp_path / "by_hand")
        by_hand = torch.load(tmp_path / "by_hand", weights_only=True)
        for found in (seen[0], by_hand["optimizer"]):
            assert found["run"] == truth["run"] and found["param_groups"] == truth["param_groups"]
            assert found["state"].keys() == truth["state"].keys()
            for number, state in truth["state"].items():
                assert_same_tensors(found["state"][number], state)
        assert torch.load(tmp_path / "state" / "optimizer.bin") == {}
        saved = engine.digests()
        batches(made, trained, optimizer, 1)
        trained.load_state_dict(by_hand["model"])
        assert engine.digests() != saved
        optimizer.load_state_dict(by_hand["optimizer"])
        assert engine.digests() == saved and engine.stats().step == 2
        with pytest.raises(ConfigError, match="^optimizer state dict: expected"):
            optimizer.load_state_dict({})
        made.load_state(str(tmp_path / "state"))
        assert made._optimizers == [optimizer] and optimizer.state_dict()["state"]


def test_refuses_a_further_engine_where_the_loss_is_scaled(tmp_path: Path) -> None:
    made, one, other = accelerator(), model(torch.float16), model()
    first = Engine(one, AdamW(), **nvme(one, tmp_path))
    with first, Engine(other, AdamW(), **nvme(other, tmp_path)) as second:
        prepare(made, first)
        with pytest.raises(ConfigError, match=r"^prepare: expected one engine on an accelerator that .*close the o"):
            prepare(made, second)
        first.close()
        prepare(made, second)
        assert made.scaler is None


def test_refuses_a_scaler_that_several_processes_do_not_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of float32 parameters that compute in float16: the accelerator has it on a GPU."""
    made, module = accelerator(), model()
    made.scaler = scaler = torch.amp.GradScaler("cpu")
    with Engine(module, AdamW(), **nvme(module, tmp_path)) as engine:
        monkeypatch.setattr(type(engine.plan.request), "world_size", 2)
        with pytest.raises(ConfigError, match=r'mixed_precision: expected "no" or "bf16" .* but got "fp16".*choose'):
            door.scale_together(made, engine)
        assert made.scaler is scaler


def test_float16_is_scaled(tmp_path: Path) -> None:
    made, module = accelerator(), model(torch.float16)
    options = nvme(module, tmp_path, initial_loss_scale=2.0**24, loss_scale_hysteresis=1)
    with Engine(module, AdamW(lr=LR), **options) as engine:
        schedule = torch.optim.lr_scheduler.StepLR(engine.optimizer, 1000)
        trained, optimizer, data, schedule = prepare(made, engine, loader(), schedule)
        log = train(made, (trained, optimizer, data, schedule), first=0, count=12)
        stats = engine.stats()
        assert stats.skipped_steps > 0 and stats.step + stats.skipped_steps == 12 and engine.loss_scale < 2.0**24
        assert schedule.scheduler.last_epoch == stats.step
    assert len(log.losses) == 12 and all(loss < 10 for loss in log.losses)


def test_a_state_needs_no_file_of_the_scale(tmp_path: Path) -> None:
    """One process writes none where several look for it; the engine's checkpoint has the scale."""
    made, module = accelerator(), model(torch.float16)
    options = nvme(module, tmp_path, initial_loss_scale=2.0**24, loss_scale_hysteresis=1)
    with Engine(module, AdamW(lr=LR), **options) as engine:
        prepared = prepare(made, engine, loader(), schedule_of(engine.optimizer))
        scaler, saved = made.scaler, (engine.loss_scale, engine.digests())
        made.save_state(str(tmp_path / "state"))
        (tmp_path / "state" / "scaler.pt").unlink()
        train(made, prepared, first=0, count=4)
        assert engine.loss_scale < saved[0]
        made.load_state(str(tmp_path / "state"))
        assert (engine.loss_scale, engine.digests()) == saved
        (tmp_path / "state" / "optimizer.bin").unlink()
        with pytest.raises(FileNotFoundError, match=r"optimizer\.bin"):
            made.load_state(str(tmp_path / "state"))
        assert scaler is not None and made.scaler is scaler


@pytest.mark.parametrize("inside", [False, True])
def test_an_accumulation_goes_on_or_begins(inside: bool, tmp_path: Path) -> None:
    """Behind a step, the next one has all its micro-batches, however many there were; inside of one, those left."""
    syncs = []
    for steps, count in ((2, 5 if inside else 4), (2 if inside else 3, 3)):
        made, module = accelerator(gradient_accumulation_steps=steps), model()
        options = {"gradient_accumulation_steps": steps, "gradient_reduction": "sum", **nvme(module, tmp_path)}
        with Engine(module, adam(module), **options) as engine:
            trained, optimizer, data = prepare(made, engine, loader())
            if syncs:
                made.load_state(str(tmp_path / "state"))
            for _, batch in zip(range(count), data, strict=False):
                with made.accumulate(trained):
                    made.backward(trained(**batch).loss)
                    syncs.append(made.sync_gradients)
                    optimizer.step()
                    optimizer.zero_grad()
            made.save_state(str(tmp_path / "state"))
    assert syncs[-3:] == ([True, False, True] if inside else [False, False, True])


def test_the_engine_may_be_made_after_prepare(tmp_path: Path) -> None:
    """An optimizer that was prepared before is taken over, without what accelerate has put around it."""
    made, module = accelerator(), model()
    prepared, optimizer, data = made.prepare(module, adam(module), loader())
    with Engine(prepared, optimizer, **nvme(module, tmp_path)) as engine:
        schedule = schedule_of(engine.optimizer)
        ours = train(made, (prepared, optimizer, data, schedule), first=0, count=4)
        assert engine.stats().step == 4
    made = accelerator()
    assert_close(ours.losses, train(made, plain(made), first=0, count=4).losses, 1e-4)


def test_refuses(tmp_path: Path) -> None:
    made, module = accelerator(gradient_accumulation_steps=2), model()
    with pytest.MonkeyPatch.context() as patch, Engine(module, AdamW(), **nvme(module, tmp_path)) as engine:
        patch.setattr(accelerate.Accelerator, "distributed_type", accelerate.DistributedType.FSDP)
        with pytest.raises(
            ConfigError, match=r"^prepare: expected an accelerator without a plugin but got one of FSDP"
        ):
            prepare(made, engine)
        patch.undo()
        patch.setattr(accelerate.Accelerator, "num_processes", 2)
        with pytest.raises(ConfigError, match=r"s processes, 1, but got one of 2; pass cpu=True to Acc"):
            prepare(made, engine)
    with pytest.raises(ConfigError, match=r"expected one engine with an optimizer but got 0 engines"):
        prepare(made, module)
    with Engine(module, AdamW(), **nvme(module, tmp_path, gradient_accumulation_steps=2)) as engine:
        with pytest.raises(
            ConfigError, match=r"gradient_accumulation_steps=2 without gradient_reduction=\"sum\"; pass both"
        ):
            prepare(made, engine)
    other = schedule_of(adam(module))
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        with pytest.raises(ConfigError, match=r"prepare: expected a scheduler .*CosineAnnealingLR of another one"):
            prepare(made, other, engine)
        *_, prepared = prepare(made, engine, other.optimizer, other)  # of somebody else's, who is here, too
        assert prepared.scheduler is other
    durable = {**nvme(module, tmp_path), "run_dir": tmp_path / "run"}
    durable.pop("nvme_path")
    with Engine(module, AdamW(), **durable) as engine, pytest.raises(ConfigError, match="run_dir: expected a run that"):
        prepare(made, engine)
    with Engine(module, **nvme(module, tmp_path, offload_optimizer="auto")) as engine:
        with pytest.raises(ConfigError, match=r"one that only evaluates; pass offload\.Engine\(model, optimizer"):
            prepare(made, engine)


def test_clipping_takes_no_call_per_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function, which asks each gradient, leaves the same bits."""
    calls, found = calls_of_handles(monkeypatch), []
    for asks_each in (False, True):
        if asks_each:
            monkeypatch.setattr(door, "clip_together", lambda accelerator, engine, others: None)
        made, module = accelerator(), model()
        with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
            trained, optimizer, data, schedule = prepare(made, engine, loader(), schedule_of(engine.optimizer))
            log = train(made, (trained, optimizer, data, schedule), first=0, count=3)
            found.append((log, engine.digests()))
        assert min(log.norms) > 0.5 and bool(calls.keys() & CLIPPING) == asks_each
    assert found[0] == found[1]


def test_only_one_side_clips(tmp_path: Path) -> None:
    made, module, other = accelerator(), model(), nn.Linear(4, 4)
    with Engine(module, adam(module), max_grad_norm=0.5, **nvme(module, tmp_path)) as engine:
        for _ in range(2):  # prepared twice, it clips once
            trained, *_ = prepare(made, engine)
        made.backward(trained(**next(iter(loader()))).loss)
        with pytest.raises(ConfigError, match=r"clip_grad_norm_: expected one side.*max_norm=1\.0 beside.*leave out"):
            made.clip_grad_norm_(trained.parameters(), 1.0)
        assert float(made.clip_grad_norm_(trained.parameters(), math.inf)) == pytest.approx(engine.grad_norm)
        other(torch.ones(4)).sum().backward()  # a model that has no engine is clipped as ever
        norm = torch.nn.utils.get_total_norm([p.grad for p in other.parameters()])
        assert torch.equal(made.clip_grad_norm_(other.parameters(), 1.0), norm) and float(norm) > 1.0
        assert float(other.bias.grad.norm()) < 1.0
        engine.zero_grad()


def test_an_engine_without_the_door_is_sent_to_it(tmp_path: Path) -> None:
    """Accelerate leaves alone what it does not know, until it wants a module; nobody saves its weights then."""
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        passed, _ = made.prepare(engine, engine.optimizer)
        assert passed is engine
        for call in (
            lambda: made.clip_grad_norm_(passed.parameters(), 1.0),
            lambda: made.unwrap_model(passed),
            lambda: made.get_state_dict(passed),
            lambda: made.save_model(passed, str(tmp_path / "weights")),
        ):
            with pytest.raises(
                AttributeError, match=r"^engine: expected a torch\.nn\.Module, .* offload\.accelerate\."
            ):
                call()
        with pytest.raises(AttributeError, match="^'Engine' object has no attribute 'parametres'$"):
            engine.parametres  # noqa: B018
        assert not hasattr(engine, "named_parameters") and getattr(engine, "to", None) is None


Prepared = Callable[[accelerate.Accelerator, Engine], object]
LEFT_OUT: dict[str, Prepared] = {
    "the engine": lambda made, engine: made.prepare(engine),
    "its optimizer": lambda made, engine: made.prepare(engine.optimizer),
    "both": lambda made, engine: made.prepare(engine, engine.optimizer),
    "a part": lambda made, engine: made.prepare(engine.module.model, engine.optimizer),
    "nothing": lambda made, engine: None,
}


@pytest.mark.parametrize("what", LEFT_OUT)
def test_a_state_without_the_weights_is_refused(what: str, tmp_path: Path) -> None:
    """Without the door nobody would save them, and nobody would say so."""
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        LEFT_OUT[what](made, engine)
        for batch, _ in zip(loader(), range(2), strict=False):
            made.backward(engine(**batch).loss)
            engine.step()
        for name, call in (("save_state", made.save_state), ("load_state", made.load_state)):
            (tmp_path / "state").mkdir(exist_ok=True)
            with pytest.raises(
                StateError, match=rf"^{name}: .* call offload\.accelerate\.prepare\(accelerator, engine"
            ):
                call(str(tmp_path / "state"))
        prepare(made, engine)  # told now, by the door
        made.save_state(str(tmp_path / "told"))
        digests = engine.digests()
        made.load_state(str(tmp_path / "told"))
        assert engine.digests() == digests


def test_nothing_is_left_out_of_a_module_without_engine(tmp_path: Path) -> None:
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        made.backward(engine(**next(iter(loader()))).loss)
    made.save_state(str(tmp_path / "closed"))


def test_a_state_with_the_weights_is_not_refused(tmp_path: Path) -> None:
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        trained, optimizer = made.prepare(engine.module, engine.optimizer)
        for batch, _ in zip(loader(), range(2), strict=False):
            made.backward(trained(**batch).loss)
            optimizer.step()
        made.save_state(str(tmp_path / "state"))
        digests = engine.digests()
        made.load_state(str(tmp_path / "state"))
        assert engine.digests() == digests


def test_any_order_gives_the_same(tmp_path: Path) -> None:
    found = []
    for order in ((0, 1, 2), (1, 2, 0), (2, 0, 1)):
        made, module = accelerator(), model()
        with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
            objects = (engine, loader(), schedule_of(engine.optimizer))
            prepared = iter(prepare(made, *(objects[each] for each in order)))
            parts = {each: (next(prepared), next(prepared)) if each == 0 else (next(prepared),) for each in order}
            log = train(made, (*parts[0], *parts[1], *parts[2]), first=0, count=2)
            found.append((log, engine.digests()))
    assert found[0] == found[1] == found[2]


def test_weights_for_others(tmp_path: Path) -> None:
    """What accelerate gives and saves of a prepared module are the engine's parameters of now."""
    made, module = accelerator(), model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        trained, optimizer, data, schedule = prepare(made, engine, loader(), schedule_of(engine.optimizer))
        train(made, (trained, optimizer, data, schedule), first=0, count=1)
        truth = engine.state_dict()
        assert made.unwrap_model(trained) is module
        assert_same_tensors(dict(made.get_state_dict(trained)), truth)
        made.save_model(trained, str(tmp_path / "weights"))
        saved = safetensors.torch.load_file(tmp_path / "weights" / "model.safetensors")
        assert saved.keys() <= truth.keys()
        assert_same_tensors(saved, {name: truth[name] for name in saved})


def test_models_are_kept_where_the_door_looks_for_them() -> None:
    """The list is accelerate's own, without a public name."""
    made, module = accelerator(), nn.Linear(2, 2)
    made.prepare(module)
    assert made._models == [module]


def test_the_door_is_a_name_of_the_package() -> None:
    assert offload.accelerate.prepare is prepare


def test_accelerate_launch(tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """The command's own process is this one, so that one more is started: the example's."""
    launch = importlib.import_module("accelerate.commands.launch")
    folders = ["--output", str(tmp_path / "state"), "--nvme-path", str(tmp_path)]
    command = ["--cpu", "--num_processes", "1", "--num_machines", "1", str(EXAMPLE), *folders]
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    launch.launch_command(launch.launch_command_parser().parse_args(command))
    whole, resumed = (line.split(":")[1] for line in capfd.readouterr().out.splitlines() if "[" in line)
    assert whole.strip() == resumed.strip() and (tmp_path / "state" / "offload" / "latest").is_file()
