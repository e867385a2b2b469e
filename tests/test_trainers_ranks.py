"""Trainers of other libraries in several processes: the bits of one process that accumulates as many micro-batches."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import run
from trainers import Log, adam, arguments, lightning_module, lightning_trainer, logged, model, rows, word_tokenizer

import offload
from offload.errors import ConfigError

pytestmark = [
    pytest.mark.cpu(reason="ranks send each other what is in host memory"),
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.nightly,  # three processes import the libraries: half a minute
    pytest.mark.slow,
]

WORLD, ACCUMULATION = 3, 2  # of each of them
BUDGETS = {"max_memory": {"device": "48MiB", "cpu": "48MiB", "nvme": "64MiB"}, "unit_bytes": 16 << 10, "threads": 1}


def placed(path: str) -> dict[str, Any]:
    return {**BUDGETS, "nvme_path": path, "offload_param": "nvme", "offload_optimizer": "nvme"}


def launched(rank: int, world: int) -> None:
    """Let the environment be as torchrun makes it."""
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)
    if world > 1:
        names: dict[str, object] = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_WORLD_SIZE": world}
        names |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1, "TORCHELASTIC_RUN_ID": "none"}  # nobody meets there
        os.environ.update({name: str(value) for name, value in names.items()})


def bits(tensors: Any) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def agreed(every: list[Any], *own: str) -> dict[str, Any]:
    """Return what ranks have found, in which all but their `own` has to be the same."""
    for found in every:
        assert isinstance(found, dict), every
        for name in found.keys() - set(own):
            assert found[name] == every[0][name], name
    return every[0]


# --- Accelerate -------------------------------------------------------------------------------------------------------


def accelerated(rank: int, world: int, stage: Any, path: str, state: str | None = None) -> dict[str, Any]:
    """Train two steps and save, or load a `state`; one more; load, and that one again."""
    from accelerate import Accelerator

    launched(rank, world)
    accumulation = ACCUMULATION * WORLD // world
    made, module = Accelerator(cpu=True, gradient_accumulation_steps=accumulation), model()
    options = {**placed(path), "gradient_accumulation_steps": accumulation, "gradient_reduction": "sum"}
    engine = offload.Engine(module, adam(module), device="cpu", stage=stage if world > 1 else None, **options)
    times = WORLD // world  # accelerate steps a schedule once per process
    schedule = torch.optim.lr_scheduler.LambdaLR(engine.optimizer, lambda number: 1 / (1 + number * times))
    data = torch.utils.data.DataLoader(rows(6 * ACCUMULATION * WORLD), batch_size=2)
    trained, optimizer, loader, prepared = offload.accelerate.prepare(made, engine, data, schedule)
    assert trained is module and made.num_processes == world

    def train(first: int, steps: int) -> dict[str, Any]:
        losses, norms = [], []
        for number, batch in enumerate(made.skip_first_batches(loader, first * accumulation)):
            if number == steps * accumulation:
                break
            with made.accumulate(trained):
                loss = trained(**batch).loss
                made.backward(loss)
                if made.sync_gradients:
                    norms.append(float(made.clip_grad_norm_(trained.parameters(), 0.5)))
                optimizer.step()
                prepared.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return {"losses": losses, "norms": norms, "rate": optimizer.param_groups[0]["lr"]}

    found: dict[str, Any] = {}
    if state is None:
        state = f"{path}/state"
        found["begin"] = train(0, 2)
        made.save_state(state)
    else:
        made.load_state(state)
    found["end"] = train(2, 1)
    found["parameters"] = bits(engine.state_dict())
    made.load_state(state)
    found["again"] = train(2, 1)
    assert bits(engine.state_dict()) == found["parameters"]
    engine.wait_for_ranks("before metrics")
    with torch.no_grad():
        mean = trained(**next(iter(data))).loss
    engine.wait_for_ranks("metrics")
    found["metrics"] = made.gather_for_metrics(mean).tolist()
    made.save_model(trained, f"{path}/weights")
    engine.close()
    return found


# --- transformers -----------------------------------------------------------------------------------------------------


def trained(rank: int, world: int, stage: Any, path: str) -> dict[str, Any]:
    """Four steps, with a checkpoint, evaluations and the best model; the last two again."""
    found = transformed(rank, world, stage, path, None)
    again = transformed(rank, world, stage, path, f"{path}/out/checkpoint-2")
    assert again["parameters"] == found["parameters"]
    return found


def transformed(rank: int, world: int, stage: Any, path: str, resume: str | None) -> dict[str, Any]:
    from offload.integrations.hf import OffloadTrainer

    launched(rank, world)
    given = arguments(
        Path(path),
        max_steps=4,
        gradient_accumulation_steps=ACCUMULATION * WORLD // world,
        max_grad_norm=0.5,
        lr_scheduler_type="cosine",
        save_strategy="steps",
        eval_strategy="steps",
        save_steps=2,
        eval_steps=2,
        load_best_model_at_end=True,
        per_device_eval_batch_size=1,
        logging_steps=1,
    )
    data = rows(4 * ACCUMULATION * WORLD * 2)
    trainer = OffloadTrainer(
        model=model(), args=given, train_dataset=data, eval_dataset=rows(10), offload=placed(path), offload_stage=stage
    )
    trainer.train(resume_from_checkpoint=resume)
    log = logged(trainer)
    assert trainer.engine is not None
    evaluated = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    found = {
        "losses": log.losses,
        "norms": log.norms,
        "evaluated": evaluated,
        "parameters": bits(trainer.engine.state_dict()),
    }
    found["metrics"] = trainer.evaluate(rows(7))["eval_loss"]
    trainer.save_model(f"{path}/weights")
    found["step"], found["best"] = trainer.state.global_step, Path(trainer.state.best_model_checkpoint).name
    trainer.engine.close()
    return found


# --- TRL --------------------------------------------------------------------------------------------------------------


def judge() -> torch.nn.Module:
    import transformers

    torch.manual_seed(0)
    config = model().config
    config.num_labels, config.pad_token_id = 1, 0
    return transformers.LlamaForSequenceClassification(config)


def asks(base: Any) -> Any:
    """Return a callback that calls the model three times behind each step."""

    def ask(self: Any, args: Any, state: Any, control: Any, model: Any, **more: Any) -> None:
        with torch.no_grad():
            for _ in range(3):
                model(input_ids=torch.tensor([[3, 4, 5]]))

    return type("Asks", (base,), {"on_step_end": ask})()


def tuned(rank: int, world: int, stage: Any, path: str) -> dict[str, Any]:
    """Take three steps of SFT, of a reward model, and of DPO, whose reference follows the model in each process.

    Where parameters are whole, the first process calls the model between steps, and the others do not.
    """
    import datasets
    import transformers
    import trl

    from offload.integrations.hf import OffloadTrainerMixin

    launched(rank, world)
    found: dict[str, Any] = {}
    words = [" ".join(f"w{int(number)}" for number in row["input_ids"]) for row in rows(3 * ACCUMULATION * WORLD * 2)]
    texts = datasets.Dataset.from_dict({"text": words})
    pairs = datasets.Dataset.from_dict({"prompt": words, "chosen": words[1:] + words[:1], "rejected": words[::-1]})
    kinds = {"sft": (trl.SFTTrainer, trl.SFTConfig, texts, {}), "dpo": (trl.DPOTrainer, trl.DPOConfig, pairs, {})}
    kinds["dpo"][3].update(ref_model=model())
    kinds["reward"] = trl.RewardTrainer, trl.RewardConfig, pairs, {"model": judge()}
    follows = {"dpo": {"sync_ref_model": True, "ref_model_sync_steps": 1}}
    for name, (kind, config, data, more) in kinds.items():
        steps = ACCUMULATION * WORLD // world
        given = arguments(
            Path(path),
            config,
            max_steps=3,
            gradient_accumulation_steps=steps,
            gradient_checkpointing=False,
            **follows.get(name, {}),
        )
        options = {
            "model": model(),
            "args": given,
            "train_dataset": data,
            "processing_class": word_tokenizer(Path(path)),
            "offload": placed(path),
            "offload_stage": stage,
        }
        trainer = type(kind.__name__, (OffloadTrainerMixin, kind), {})(**(options | more))
        if rank == 0 and world > 1 and stage != 3:
            trainer.add_callback(asks(transformers.TrainerCallback))
        trainer.train()
        log, engine = logged(trainer), trainer.engine
        found[name] = {"losses": log.losses, "norms": log.norms, "parameters": bits(engine.state_dict())}
        engine.close()
    return found


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [None, 2, 3])
def test_trl(stage: int | None, one: Any, tmp_path: Path) -> None:
    (tmp_path / "three").mkdir()
    truth = one(tuned)
    found = agreed(run(tuned, WORLD, WORLD, stage, str(tmp_path / "three"), limit_s=400.0))
    for name in ("sft", "dpo", "reward"):
        assert found[name]["losses"] == pytest.approx(truth[name]["losses"], rel=1e-5)
        assert found[name]["norms"] == pytest.approx(truth[name]["norms"], rel=1e-4)


def refused_in_ranks(rank: int, path: str) -> str:
    import datasets
    import trl

    from offload.integrations.hf import OffloadTrainerMixin

    launched(rank, WORLD)
    kind = type("GRPO", (OffloadTrainerMixin, trl.GRPOTrainer), {})
    trainer = kind(
        model=model(),
        reward_funcs=lambda completions, **_: [0.0 for _ in completions],
        args=arguments(Path(path), trl.GRPOConfig, num_generations=2, max_completion_length=4),
        train_dataset=datasets.Dataset.from_dict({"prompt": ["w1 w2"] * 12}),
        processing_class=word_tokenizer(Path(path)),
        offload=placed(path),
        offload_stage=3,
    )
    try:
        trainer.train()
    except ConfigError as error:
        return str(error)
    return "nothing"


@pytest.mark.nightly
def test_trl_generates_without_slices_of_parameters(tmp_path: Path) -> None:
    for text in run(refused_in_ranks, WORLD, str(tmp_path), limit_s=240.0):
        assert text.startswith("offload_stage: expected 1 or 2 of GRPO in several processes but got 3"), text


# --- Lightning --------------------------------------------------------------------------------------------------------


def fitted(rank: int, world: int, stage: Any, path: str) -> dict[str, Any]:
    """Three steps; the last one again, after a checkpoint."""
    launched(rank, world)
    found = {}
    for name, first, last in (("whole", 0, 3), ("half", 0, 2), ("rest", 2, 3)):
        log, strategy = Log(), offload.lightning.OffloadStrategy(**placed(path))
        if world > 1:
            strategy = offload.lightning.OffloadRanksStrategy(stage=stage, **placed(path))
        trainer = lightning_trainer(
            Path(path),
            devices=world,
            max_steps=last,
            accumulate_grad_batches=ACCUMULATION * WORLD // world,
            gradient_clip_val=0.5,
            strategy=strategy,
            use_distributed_sampler=False,  # Lightning's would shuffle
        )
        module = lightning_module(model(), adam, log)
        given = rows(3 * ACCUMULATION * WORLD)
        sampler = torch.utils.data.DistributedSampler(given, num_replicas=world, rank=rank, shuffle=False)
        data = torch.utils.data.DataLoader(given, batch_size=1, sampler=sampler)
        trainer.fit(module, data, ckpt_path=f"{path}/half.ckpt" if first else None)
        assert (trainer.world_size, trainer.global_rank, trainer.global_step) == (world, rank, last)
        trainer.save_checkpoint(f"{path}/{name}.ckpt")
        trainer.save_checkpoint(f"{path}/{name}.weights", weights_only=True)
        engine = trainer.strategy.engine
        trainer.validate(module, torch.utils.data.DataLoader(rows(7), batch_size=1), verbose=False)
        found[name] = {"losses": log.losses, "norms": log.norms, "parameters": bits(engine.state_dict())}
        found[name]["validated"] = float(trainer.strategy.reduce(trainer.callback_metrics["val_loss"]))
        engine.close()
    return found


def without_room(rank: int, path: str) -> str:
    """Return what a save has raised for whose last part the first process has no room."""
    from test_lightning import FullAt

    launched(rank, WORLD)
    strategy = offload.lightning.OffloadRanksStrategy(stage=2, checkpoint_io=FullAt(1), **placed(path))
    trainer = lightning_trainer(Path(path), devices=WORLD, max_steps=1, strategy=strategy)
    trainer.fit(lightning_module(model(), adam, Log()), torch.utils.data.DataLoader(rows(WORLD), batch_size=1))
    try:
        trainer.save_checkpoint(f"{path}/kept.ckpt")
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    finally:
        strategy.engine.close()
    return "nothing"


def uneven(rank: int, path: str) -> dict[str, Any]:
    """Evaluate other numbers of batches on each rank, with metrics that ask torch's process group; save behind it."""
    import torchmetrics
    from lightning.pytorch import LightningModule

    class Measured(LightningModule):
        def __init__(self, core: torch.nn.Module) -> None:
            super().__init__()
            self.core, self.means = core, torch.nn.ModuleList([torchmetrics.MeanMetric() for _ in range(2)])

        def training_step(self, batch: Any, number: int) -> torch.Tensor:
            loss: torch.Tensor = self.core(**batch).loss
            return loss

        def validation_step(self, batch: Any, number: int, dataloader_idx: int = 0) -> None:
            mean: Any = self.means[dataloader_idx]
            mean.update(self.core(**batch).loss)
            self.log(f"mean_{dataloader_idx}", mean, add_dataloader_idx=False)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return adam(self.core)

    launched(rank, WORLD)
    found = {}
    batches = [torch.utils.data.DataLoader(rows(1 + each), batch_size=1) for each in (rank, WORLD - rank)]
    for name in ("fit", "validate"):
        trainer = lightning_trainer(
            Path(path),
            devices=WORLD,
            max_steps=2,
            strategy=offload.lightning.OffloadRanksStrategy(stage=3, **placed(path)),
            use_distributed_sampler=False,
            val_check_interval=1,
        )
        module, data = Measured(model()), torch.utils.data.DataLoader(rows(2), batch_size=1)
        if name == "fit":
            trainer.fit(module, data, batches[0])
        trainer.validate(module, batches, verbose=False)
        trainer.save_checkpoint(f"{path}/{name}.ckpt")
        found[name] = {each: float(value) for each, value in trainer.callback_metrics.items()}
        trainer.strategy.engine.close()
    return found


class OwnBackward(torch.nn.Module):
    """What a module has that runs backward itself."""

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()


def refused_backward(rank: int, path: str) -> str:
    """Return how a module with a backward of its own is refused."""
    launched(rank, WORLD)
    strategy = offload.lightning.OffloadRanksStrategy(stage=2, **placed(path))
    module = lightning_module(model(), adam, Log())
    module.__class__ = type("Own", (OwnBackward, type(module)), {})
    trainer = lightning_trainer(Path(path), devices=WORLD, max_steps=1, strategy=strategy)
    try:
        trainer.fit(module, torch.utils.data.DataLoader(rows(WORLD), batch_size=1))
    except ConfigError as error:
        return str(error)
    return "nothing"


# --- all of a library, so that it is imported once --------------------------------------------------------------------

SCENARIOS: dict[str, tuple[Callable[..., dict[str, Any]], Any]] = {
    "accelerate, 2": (accelerated, 2),
    "accelerate, 3": (accelerated, 3),
    "trainer": (trained, None),
    "trainer, 3": (trained, 3),
    "lightning, 1": (fitted, 1),
    "lightning, 3": (fitted, 3),
}


LIGHTNING = {"lightning, 1", "lightning, 3"}


def everything(rank: int, path: str, names: list[str]) -> dict[str, dict[str, Any]]:
    found = {}
    for name in names:
        scenario, stage = SCENARIOS[name]
        os.makedirs(f"{path}/{name}", exist_ok=True)
        found[name] = scenario(rank, WORLD, stage, f"{path}/{name}")
    return found


@pytest.fixture(scope="module")
def of_ranks(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    path = tmp_path_factory.mktemp("ranks")
    return run(everything, WORLD, str(path), sorted(SCENARIOS.keys() - LIGHTNING), limit_s=400.0), path


@pytest.fixture(scope="module")
def of_lightning(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Any], Path]:
    path = tmp_path_factory.mktemp("lightning")
    return run(everything, WORLD, str(path), sorted(LIGHTNING), limit_s=400.0), path


@pytest.fixture(scope="module")
def known() -> dict[Callable[..., dict[str, Any]], dict[str, Any]]:
    """What scenarios have found in one process."""
    return {}


@pytest.fixture
def one(tmp_path: Path, single_torch_thread: None, known: Any) -> Iterator[Callable[..., dict[str, Any]]]:
    """Yield what runs a scenario in this process alone, once."""

    def alone(scenario: Callable[..., dict[str, Any]]) -> Any:
        if scenario not in known:
            known[scenario] = scenario(0, 1, None, str(tmp_path))
        return known[scenario]

    before = dict(os.environ)
    yield alone
    os.environ.clear()
    os.environ.update(before)


def part(of_ranks: tuple[list[Any], Path], name: str) -> list[Any]:
    for found in of_ranks[0]:
        assert isinstance(found, dict), found
    return [found[name] for found in of_ranks[0]]


def dealt(every: list[list[float]]) -> list[float]:
    """Return losses of micro-batches that were dealt round-robin in their order."""
    return [loss for losses in zip(*every, strict=True) for loss in losses]


@pytest.mark.parametrize("name", ["accelerate, 2", "accelerate, 3"])
def test_accelerate(name: str, of_ranks: Any, one: Any) -> None:
    truth, every = one(accelerated), part(of_ranks, name)
    found = agreed(every, "begin", "end", "again")
    assert found["parameters"] == truth["parameters"]
    for run_name, steps in (("begin", 2), ("end", 1), ("again", 1)):
        assert all({**each[run_name], "losses": None} == {**truth[run_name], "losses": None} for each in every)
        assert dealt([each[run_name]["losses"] for each in every]) == truth[run_name]["losses"]
        assert len(truth[run_name]["norms"]) == steps and min(truth[run_name]["norms"]) > 0.5
    assert len(found["metrics"]) == WORLD and len(set(found["metrics"])) == 1
    assert (of_ranks[1] / name / "weights" / "model.safetensors").is_file()
    assert (of_ranks[1] / name / "state" / "offload" / "latest").is_file()


def test_accelerate_goes_on_with_other_processes(of_ranks: Any, one: Any, tmp_path: Path) -> None:
    """One step of two what one process has saved, and of one what three have saved."""
    truth, folders = one(accelerated), [tmp_path / name for name in ("one", "two")]
    for folder in folders:
        folder.mkdir()
    states = [of_ranks[1] / "accelerate, 2" / "state", tmp_path / "one" / "state"]
    run(accelerated, 1, 1, None, str(folders[0]), limit_s=200.0)
    every = [
        *run(accelerated, 1, 1, None, str(folders[0]), str(states[0]), limit_s=200.0),
        *run(accelerated, 2, 2, 2, str(folders[1]), str(states[1]), limit_s=200.0),
    ]
    assert [found["parameters"] == truth["parameters"] for found in every] == [True] * 3, every


@pytest.mark.parametrize("name", ["trainer", "trainer, 3"])
def test_trainer(name: str, of_ranks: Any, one: Any) -> None:
    truth, found = one(trained), agreed(part(of_ranks, name))
    assert found["parameters"] == truth["parameters"] and found["step"] == 4
    assert (found["norms"], found["best"]) == (truth["norms"], truth["best"])
    for values in ("losses", "evaluated", "metrics"):  # means over processes
        assert found[values] == pytest.approx(truth[values], rel=1e-5)
    path = of_ranks[1] / name
    assert (path / "weights" / "model.safetensors").is_file()
    assert (path / "out" / "checkpoint-2" / "offload" / "latest").is_file()
    state = json.loads((path / "out" / "checkpoint-4" / "trainer_state.json").read_text(encoding="utf-8"))
    assert state["global_step"] == 4


def test_trainer_goes_on_with_other_processes(of_ranks: Any, one: Any, tmp_path: Path) -> None:
    """One process from what three have saved."""
    saved = of_ranks[1] / "trainer" / "out" / "checkpoint-2"
    found, truth = transformed(0, 1, None, str(tmp_path), str(saved)), one(trained)
    assert (found["parameters"], found["norms"]) == (truth["parameters"], truth["norms"])


@pytest.mark.parametrize("name", sorted(LIGHTNING))
def test_lightning(name: str, of_lightning: Any, one: Any) -> None:
    truth, every = one(fitted), part(of_lightning, name)
    for run_name in ("whole", "half", "rest"):
        found = agreed([each[run_name] for each in every], "losses")
        assert found["parameters"] == truth[run_name]["parameters"] and found["norms"] == truth[run_name]["norms"]
        assert dealt([each[run_name]["losses"] for each in every]) == truth[run_name]["losses"]
        assert found["validated"] == pytest.approx(truth[run_name]["validated"], rel=1e-4)
    assert min(truth["whole"]["norms"]) > 0.5


def test_lightning_tells_all_processes_that_a_save_failed(tmp_path: Path) -> None:
    first, *others = run(without_room, WORLD, str(tmp_path), limit_s=240.0)
    assert first == "OSError: [Errno 28] No space left on device"
    assert all(text.startswith("RanksError: rank 0: OSError") for text in others), others
    assert [each.name for each in (tmp_path / "kept.ckpt").iterdir()] == [".lock"]


def test_lightning_evaluates_other_numbers_of_batches(tmp_path: Path) -> None:
    """A rank that is done serves the others until they are; one that only evaluates saves once."""
    found = agreed(run(uneven, WORLD, str(tmp_path), limit_s=240.0))
    assert found["fit"].keys() == {"mean_0", "mean_1"} == found["validate"].keys()
    assert found["fit"] != found["validate"]
    for name in found:
        assert (tmp_path / f"{name}.ckpt" / "latest").is_file()


def test_lightning_refuses_a_backward_of_the_module(tmp_path: Path) -> None:
    every = run(refused_backward, WORLD, str(tmp_path), limit_s=240.0)
    assert all(text.startswith("backward: expected LightningModule's but got one of Own") for text in every), every


def test_one_process_with_several_devices_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^devices: expected one but got 2; .*OffloadRanksStrategy"):
        lightning_trainer(tmp_path, devices=2, strategy=offload.lightning.OffloadStrategy())
