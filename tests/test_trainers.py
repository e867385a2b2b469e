"""Trainers around the engine: what they log, clip, save and load is what they do without it.

Each loop runs twice from the same seeds: with the plain model, and with one whose parameters and states live on NVMe.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from harness import WIDTH, everything_on_device, loss_of, nvme, tight
from torch import nn
from trainers import (
    LR,
    STEPS,
    Log,
    adam,
    arguments,
    assert_close,
    lightning_module,
    lightning_trainer,
    loader,
    logged,
    model,
    rows,
    word_tokenizer,
)

import offload
from offload import AdamW, Engine

pytestmark = [
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
    pytest.mark.filterwarnings("ignore::FutureWarning"),
    pytest.mark.filterwarnings("ignore::UserWarning"),
]

# --- Hugging Face -----------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("trainer_steps", "options"),
    [
        pytest.param(1, {}, id="defaults"),
        pytest.param(2, {}, id="the trainer accumulates"),
        pytest.param(2, {"gradient_accumulation_steps": 2, "gradient_reduction": "sum"}, id="both know"),
    ],
)
def test_trainer(trainer_steps: int, options: dict[str, Any], dtype: torch.dtype, tmp_path: Path) -> None:
    """Its default clips at 1.0, and the gradients of this model are longer."""
    args = arguments(tmp_path, gradient_accumulation_steps=trainer_steps)
    plain = hf.Trainer(model=model(dtype), args=args, train_dataset=rows())
    plain.train()
    truth = logged(plain)
    assert min(truth.norms) > args.max_grad_norm == 1.0
    module = model(dtype)
    with Engine(module, AdamW(lr=LR, weight_decay=0.0), **nvme(module, tmp_path, **options)) as engine:
        trainer = hf.Trainer(model=engine.module, args=args, train_dataset=rows(), optimizers=(engine.optimizer, None))
        trainer.train()
        assert engine.stats().step == STEPS
        if trainer_steps == 1 or not options:  # updates during backward rest once steps turn out not to be calm
            assert engine.stats().early_units_dropped <= len(engine.plan.request.units)
    ours = logged(trainer)
    # torch adds bf16 gradients of several micro-batches in bf16 and takes their norms in it, the engine in fp32
    exact = dtype is torch.float32
    assert_close(ours.losses, truth.losses, 1e-4 if exact else 2e-3)
    assert_close(ours.norms, truth.norms, 1e-4 if exact else 8e-3)  # one unit of bf16 in which torch rounds them
    assert_close(ours.norms[:1], truth.norms[:1], 1e-6 if exact else 8e-3)


def test_trainer_on_a_torch_optimizer_that_was_taken_over(tmp_path: Path) -> None:
    args = arguments(tmp_path)
    plain = hf.Trainer(model=model(), args=args, train_dataset=rows())
    plain.train()
    module = model()
    with Engine(module, adam(module), **nvme(module, tmp_path)) as engine:
        trainer = hf.Trainer(model=module, args=args, train_dataset=rows(), optimizers=(engine.optimizer, None))
        trainer.train()
    assert_close(logged(trainer).losses, logged(plain).losses, 1e-4)
    assert_close(logged(trainer).norms, logged(plain).norms, 1e-4)


def test_trainer_with_an_optimizer_of_its_own_is_refused_before_it_makes_states(tmp_path: Path) -> None:
    """Else it would train nothing: it would find no gradients, and log losses for ever."""
    module = model()
    with Engine(module, AdamW(lr=LR), **nvme(module, tmp_path)) as engine:
        trainer = hf.Trainer(model=engine.module, args=arguments(tmp_path), train_dataset=rows())
        with pytest.raises(offload.StateError, match=r"zeros_like of parameter .*step with engine\.optimizer"):
            trainer.train()
        states = trainer.optimizer.optimizer.state.values()
        assert not any(value.numel() > 1 for state in states for value in state.values())
        assert engine.stats().step == 0


def test_trainer_resumes(tmp_path: Path) -> None:
    """From the files that it writes itself: the rest of the run has the losses of one that was not interrupted."""
    whole = None
    found = []
    for resume in (False, True):
        module = model()
        with Engine(module, AdamW(lr=LR, weight_decay=0.0), **nvme(module, tmp_path)) as engine:
            args = arguments(tmp_path / str(resume), save_strategy="steps", save_steps=3, max_steps=STEPS)
            trainer = hf.Trainer(model=module, args=args, train_dataset=rows(), optimizers=(engine.optimizer, None))
            trainer.train(resume_from_checkpoint=whole if resume else None)
            found.append((logged(trainer).losses[-2:], engine.state_dict()))
            whole = str(tmp_path / "False" / "out" / "checkpoint-3")
            assert engine.stats().step == STEPS
    assert found[0][0] == found[1][0]
    for name, value in found[0][1].items():
        assert torch.equal(value, found[1][1][name]), name


def test_trainer_loads_the_best_model_at_the_end(tmp_path: Path) -> None:
    module = model()
    with Engine(module, AdamW(lr=LR), **nvme(module, tmp_path)) as engine:
        args = arguments(
            tmp_path,
            max_steps=3,
            save_strategy="steps",
            save_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            load_best_model_at_end=True,
            greater_is_better=True,  # the loss goes down, so this is the first checkpoint
            per_device_eval_batch_size=2,
        )
        trainer = hf.Trainer(
            model=module,
            args=args,
            train_dataset=rows(),
            eval_dataset=rows(4),
            optimizers=(engine.optimizer, None),
        )
        trainer.train()
        best = trainer.state.best_model_checkpoint
        assert best is not None and best.endswith("checkpoint-1")
        again = trainer.evaluate()["eval_loss"]
        assert again == trainer.state.best_metric
        saved = hf.LlamaForCausalLM.from_pretrained(best).state_dict()
        for name, value in engine.state_dict().items():
            assert torch.equal(value, saved[name]), name


def test_trl_fine_tuning(tmp_path: Path) -> None:
    trl = pytest.importorskip("trl")
    datasets = pytest.importorskip("datasets")
    tokenizer = word_tokenizer(tmp_path)
    texts = [{"text": " ".join(f"w{int(i)}" for i in row["input_ids"])} for row in rows()]
    found = []
    for through_engine in (False, True):
        module = model()
        args = arguments(tmp_path, trl.SFTConfig, max_length=16, gradient_checkpointing=False, dataset_num_proc=None)
        common = {"args": args, "train_dataset": datasets.Dataset.from_list(texts), "processing_class": tokenizer}
        if through_engine:
            with Engine(module, AdamW(lr=LR, weight_decay=0.0), **nvme(module, tmp_path)) as engine:
                trainer = trl.SFTTrainer(model=module, optimizers=(engine.optimizer, None), **common)
                trainer.train()
        else:
            trainer = trl.SFTTrainer(model=module, **common)
            trainer.train()
        found.append(logged(trainer))
    assert min(found[0].norms) > 1.0
    assert_close(found[1].losses, found[0].losses, 1e-4)
    assert_close(found[1].norms, found[0].norms, 1e-4)


# --- Accelerate -------------------------------------------------------------------------------------------------------


def accelerated(
    module: nn.Module, optimizer: torch.optim.Optimizer, *, steps: int, max_norm: float, value: float | None = None
) -> Log:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=steps)
    loader = torch.utils.data.DataLoader(rows(), batch_size=2)
    module, optimizer, loader = accelerator.prepare(module, optimizer, loader)
    log = Log()
    for number, batch in enumerate(loader):
        if number == STEPS * steps:
            break
        with accelerator.accumulate(module):
            loss = module(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                if value is not None:
                    accelerator.clip_grad_value_(module.parameters(), value)
                log.norms.append(float(accelerator.clip_grad_norm_(module.parameters(), max_norm)))
            optimizer.step()
            optimizer.zero_grad()
            log.losses.append(loss.item())
    return log


@pytest.mark.few
@pytest.mark.parametrize(
    ("steps", "options"),
    [
        pytest.param(1, {}, id="one"),
        pytest.param(2, {}, id="it accumulates"),
        pytest.param(2, {"gradient_accumulation_steps": 2, "gradient_reduction": "sum"}, id="both know"),
    ],
)
@pytest.mark.parametrize("kind", [torch.optim.AdamW, torch.optim.SGD])
def test_accelerate(kind: type[torch.optim.Optimizer], steps: int, options: dict[str, Any], tmp_path: Path) -> None:
    """With SGD, a lost clip shows at once: these losses would go up."""
    lr = LR if kind is torch.optim.AdamW else 1.0
    plain = model()
    truth = accelerated(plain, kind(plain.parameters(), lr=lr), steps=steps, max_norm=0.5)
    assert min(truth.norms) > 0.5
    module = model()
    given = kind(module.parameters(), lr=lr)
    with Engine(module, given, **nvme(module, tmp_path, **options)) as engine:
        ours = accelerated(module, engine.optimizer, steps=steps, max_norm=0.5)
        assert engine.stats().step == STEPS
    assert_close(ours.losses, truth.losses, 1e-4)
    assert_close(ours.norms, truth.norms, 1e-4)


def test_accelerate_clips_values_only_of_gathered_gradients(tmp_path: Path) -> None:
    module = model()
    with Engine(module, AdamW(), **nvme(module, tmp_path)) as engine:
        with pytest.raises(offload.StateError, match=r"clamp.*with engine\.gather_gradients"):
            accelerated(module, engine.optimizer, steps=1, max_norm=1.0, value=0.1)


def test_accelerate_saves_and_loads_its_state(tmp_path: Path) -> None:
    accelerate = pytest.importorskip("accelerate")
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
    accelerator = accelerate.Accelerator(cpu=True)
    module = model()
    with Engine(module, AdamW(lr=LR), **nvme(module, tmp_path)) as engine:
        prepared, optimizer = accelerator.prepare(module, engine.optimizer)
        batches = [{name: value[None] for name, value in row.items()} for row in rows(4)]

        def train(numbers: range) -> list[float]:
            losses = []
            for number in numbers:
                loss = prepared(**batches[number]).loss
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
            return losses

        train(range(2))
        accelerator.save_state(str(tmp_path / "state"))
        first = train(range(2, 4))
        accelerator.load_state(str(tmp_path / "state"))
        assert engine.stats().step == 2
        assert train(range(2, 4)) == first


# --- Lightning --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 2])
def test_lightning_clips(steps: int, tmp_path: Path) -> None:
    truth, ours = Log(), Log()
    clip = {"gradient_clip_val": 0.1, "accumulate_grad_batches": steps}
    lightning_trainer(tmp_path, **clip).fit(lightning_module(model(), adam, truth), loader())
    engines: list[Engine] = []

    def make(core: nn.Module) -> torch.optim.Optimizer:
        engines.append(Engine(core, adam(core), **nvme(core, tmp_path)))
        assert engines[0].optimizer is not None
        return engines[0].optimizer

    lightning_trainer(tmp_path, **clip).fit(lightning_module(model(), make, ours), loader())
    assert engines[0].stats().step == STEPS
    engines[0].close()
    assert min(truth.norms) > 0.1
    assert_close(ours.losses, truth.losses, 1e-4)
    assert_close(ours.norms, truth.norms, 1e-4)


@pytest.mark.parametrize("resumes", [False, True])
def test_lightning_sets_up_an_engine(resumes: bool, tmp_path: Path) -> None:
    """`setup` comes before Lightning moves the module, loads a checkpoint, and asks for the optimizer."""
    lightning = pytest.importorskip("lightning")
    keep = lightning.pytorch.callbacks.ModelCheckpoint(
        tmp_path / "kept", "{step}", every_n_train_steps=2, save_top_k=-1
    )
    saves = {"callbacks": [keep], "enable_checkpointing": True}
    truth, ours = Log(), Log()
    lightning_trainer(tmp_path, **saves).fit(lightning_module(model(), adam, truth), loader())
    path = tmp_path / "kept" / "step=2.ckpt" if resumes else None
    if resumes:
        truth = Log()
        lightning_trainer(tmp_path).fit(lightning_module(model(), adam, truth), loader(), ckpt_path=path)
        assert len(truth.losses) == STEPS - 2
    engines: list[Engine] = []
    module = lightning_module(model(), lambda _: engines[0].optimizer, ours)

    def setup(stage: str) -> None:
        engines.append(Engine(module.core, adam(module.core), **nvme(module.core, tmp_path)))

    module.setup = setup
    lightning_trainer(tmp_path).fit(module, loader(), ckpt_path=path)
    (engine,) = engines
    with engine:
        assert engine.stats().step == len(ours.losses)
    assert_close(ours.losses, truth.losses, 1e-4)
    assert_close(ours.norms, truth.norms, 1e-4)


@pytest.mark.parametrize("face", ["engine.optimizer", "taken over"])
def test_lightning_skips_a_batch(face: str, tmp_path: Path) -> None:
    """Where `training_step` returns None, there is no backward; Lightning calls the optimizer all the same."""
    truth, ours = Log(), Log()
    lightning_trainer(tmp_path).fit(lightning_module(model(), adam, truth, skipped=(0, 2)), loader())
    engines: list[Engine] = []

    def make(core: nn.Module) -> torch.optim.Optimizer:
        given = adam(core)
        engines.append(Engine(core, given, **nvme(core, tmp_path)))
        assert engines[0].optimizer is not None
        return given if face == "taken over" else engines[0].optimizer

    lightning_trainer(tmp_path).fit(lightning_module(model(), make, ours, skipped=(0, 2)), loader())
    assert engines[0].stats().step == STEPS - 2
    engines[0].close()
    assert len(truth.losses) == STEPS and [norm > 0 for norm in truth.norms] == [False, True, False, True, True]
    assert_close(ours.norms, truth.norms, 1e-4)
    assert_close(ours.losses, truth.losses, 1e-4)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_lightning_clipping_of_values_is_refused(algorithm: str, tmp_path: Path) -> None:
    module = model()
    with Engine(module, AdamW(lr=LR), **nvme(module, tmp_path)) as engine:
        trainer = lightning_trainer(tmp_path, gradient_clip_val=0.1, gradient_clip_algorithm=algorithm)
        core = lightning_module(module, lambda _: engine.optimizer, Log())
        if algorithm == "norm":
            trainer.fit(core, loader())
            return
        with pytest.raises(offload.StateError, match=r"clamp.*with engine\.gather_gradients"):
            trainer.fit(core, loader())


def test_lightning_validates_a_checkpoint(tmp_path: Path) -> None:
    """With a live engine in the module: the checkpoint goes to where the parameters are."""
    lightning = pytest.importorskip("lightning")
    module = model()
    with Engine(module, AdamW(lr=1.0), **nvme(module, tmp_path)) as engine:
        core = lightning_module(module, lambda _: engine.optimizer, Log())
        keep = lightning.pytorch.callbacks.ModelCheckpoint(
            dirpath=tmp_path / "kept", every_n_train_steps=1, save_top_k=-1, filename="{step}"
        )
        trainer = lightning_trainer(tmp_path, max_steps=2, callbacks=[keep], enable_checkpointing=True)
        trainer.fit(core, loader())
        last = trainer.validate(core, loader(), verbose=False)[0]["val_loss"]
        first = trainer.validate(core, loader(), ckpt_path=str(tmp_path / "kept" / "step=1.ckpt"), verbose=False)
        saved = torch.load(tmp_path / "kept" / "step=1.ckpt", weights_only=False)["state_dict"]
        for name, value in engine.state_dict().items():
            assert torch.equal(value, saved[f"core.{name}"]), name
        assert first[0]["val_loss"] != last


# --- averages ---------------------------------------------------------------------------------------------------------


def stack() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])


def test_an_average_of_weights(tmp_path: Path) -> None:
    """Torch's own wants all parameters at once. Where they do not fit, engine.apply does the same unit by unit."""
    decay = 0.9
    roomy, small = stack(), stack()
    average = torch.optim.swa_utils.AveragedModel(
        stack(), multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(decay)
    )
    mine: dict[str, torch.Tensor] = {}

    def update(name: str, parameter: nn.Parameter) -> None:
        mine[name] = mine[name].lerp(parameter, 1 - decay) if name in mine else parameter.clone()

    with (
        Engine(roomy, AdamW(lr=LR), **everything_on_device()) as first,
        Engine(small, AdamW(lr=LR), **tight(small, tmp_path)) as second,
    ):
        for number in range(3):
            for engine in (first, second):
                engine.backward(loss_of(engine, number))
                engine.step()
            average.update_parameters(roomy)
            second.apply(update)
        with pytest.raises(offload.BudgetError, match=r"expected room on the device to read them(.|\n)*engine\.apply"):
            average.update_parameters(small)
        changed = second.state_dict()
    plain = stack()
    for name, value in average.module.named_parameters():
        assert torch.equal(mine[name], value), name
        assert not torch.equal(value, plain.get_parameter(name)) and not torch.equal(value, changed[name]), name
