"""The door of Hugging Face: what each trainer logs is what it logs without an engine, whole and resumed.

Each trainer runs from the same seed with the plain model, with everything in host memory, with parameters and states on
NVMe, and once more on NVMe from the checkpoint in the middle.
"""

from __future__ import annotations

import copy
import dataclasses
import functools
import gc
import importlib.metadata
import inspect
import itertools
import math
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import accelerate
import datasets
import pytest
import safetensors.torch
import torch
import transformers as hf
import trl
from harness import host, nvme, working_bytes
from models import VOCABULARY
from torch import nn
from trainers import CLIPPING, LR, arguments, assert_close, calls_of_handles, logged, model, rows, word_tokenizer

from offload import AdamW, Engine
from offload.cli import main as cli
from offload.errors import BATCH_TOO_LARGE, BudgetError, ConfigError, StateError
from offload.integrations import hf as door_of_hf
from offload.integrations import libraries
from offload.integrations.hf import OffloadCallback, OffloadTrainer, OffloadTrainerMixin
from offload.memory.budget import Tier
from offload.optimizer import OffloadOptimizer

pytestmark = [
    pytest.mark.usefixtures("single_torch_thread"),
    pytest.mark.filterwarnings("ignore"),
]


@pytest.fixture(scope="module", autouse=True)
def old_objects_rest() -> Iterator[None]:
    """Accelerate collects garbage in each call of ``train()``: without what the libraries have made, that is quick."""
    gc.freeze()
    yield
    gc.unfreeze()


class SFT(OffloadTrainerMixin, trl.SFTTrainer):
    pass


class DPO(OffloadTrainerMixin, trl.DPOTrainer):
    pass


class GRPO(OffloadTrainerMixin, trl.GRPOTrainer):
    pass


class Reward(OffloadTrainerMixin, trl.RewardTrainer):
    pass


class Seq2Seq(OffloadTrainerMixin, hf.Seq2SeqTrainer):
    pass


@dataclasses.dataclass(frozen=True)
class Door:
    """A trainer, and how to make it.

    Attributes:
        plain: the trainer without an engine.
        ours: the one with.
        config: class of its arguments.
        model: makes a model.
        given: returns its other keyword arguments.
        options: of its arguments.
        refers: it has a reference model.
    """

    plain: Any
    ours: Any
    config: Any
    model: Callable[[Path], nn.Module]
    given: Callable[[Path], dict[str, Any]]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    refers: bool = False

    def arguments(self, path: Path, **more: Any) -> Any:
        return arguments(path, self.config, **{**self.options, **more})

    def make(self, path: Path, place: Callable[..., dict[str, Any]] | None = None, **more: Any) -> Any:
        """Return a trainer: the plain one, or ours with its engine where `place` says."""
        given = {"model": self.model(path), "args": self.arguments(path, **more), **self.given(path)}
        if place is None:
            return self.plain(**given)
        return self.ours(**given, offload=placed(place, both(given["model"]) if self.refers else given["model"], path))


def both(module: nn.Module) -> nn.Module:
    """Return a module with the units of a model and of its reference model."""
    return nn.ModuleDict({"model": module, "reference": copy.deepcopy(module)})


def placed(place: Callable[..., dict[str, Any]], module: nn.Module, path: Path) -> dict[str, Any]:
    """Return options with room for the three largest units on the device."""
    options: dict[str, Any] = place(module, path) if place is nvme else place(module)
    del options["device"]
    return options


def sentence(row: dict[str, torch.Tensor], *, begin: int = 0) -> str:
    return " ".join(f"w{int(number)}" for number in row["input_ids"][begin:])


def texts(*names: str) -> datasets.Dataset:
    """Return a data set with a text per name; a text's neighbours are others'."""
    given = rows()
    found = [
        {name: sentence(given[(number + 7 * place) % len(given)], begin=6) for place, name in enumerate(names)}
        for number in range(len(given))
    ]
    return datasets.Dataset.from_list(found)


def even_words(completions: list[str], **_: Any) -> list[float]:
    """Reward completions for words with even numbers."""
    return [sum(int(word[1:]) % 2 == 0 for word in text.split()) / 8 for text in completions]


def small(path: Path) -> nn.Module:
    return model()


def saved(path: Path) -> nn.Module:
    """Return a model that trainers can load again from its own folder, as they load reference models."""
    made = model()
    made.save_pretrained(path / "model")
    made.config._name_or_path = str(path / "model")
    return made


def t5(path: Path) -> nn.Module:
    torch.manual_seed(0)
    config = hf.T5Config(
        vocab_size=VOCABULARY, d_model=32, d_kv=8, d_ff=64, num_layers=1, num_heads=4, decoder_start_token_id=0
    )
    return hf.T5ForConditionalGeneration(config)


def judge(path: Path) -> nn.Module:
    torch.manual_seed(0)
    config = model().config
    config.num_labels, config.pad_token_id = 1, 0
    return hf.LlamaForSequenceClassification(config)


def prompts(path: Path) -> dict[str, Any]:
    return {
        "train_dataset": texts("prompt"),
        "processing_class": word_tokenizer(path),
        "reward_funcs": even_words,
    }


NIGHTLY = pytest.mark.nightly
QUIET = {"gradient_checkpointing": False}
DOORS = {
    "Trainer": Door(
        hf.Trainer,
        OffloadTrainer,
        hf.TrainingArguments,
        small,
        lambda path: {"train_dataset": rows()},
        {
            "gradient_accumulation_steps": 3,
            "lr_scheduler_type": "cosine",
            "warmup_steps": 3,
            "weight_decay": 0.1,
            "accelerator_config": {"use_seedable_sampler": False},  # the order of rows is drawn where training begins
        },
    ),
    "Seq2Seq": Door(
        hf.Seq2SeqTrainer, Seq2Seq, hf.Seq2SeqTrainingArguments, t5, lambda path: {"train_dataset": rows()}
    ),
    "SFT": Door(
        trl.SFTTrainer,
        SFT,
        trl.SFTConfig,
        small,
        lambda path: {"train_dataset": texts("text"), "processing_class": word_tokenizer(path)},
        {**QUIET, "max_length": 16},
    ),
    "DPO": Door(
        trl.DPOTrainer,
        DPO,
        trl.DPOConfig,
        small,
        lambda path: {
            "ref_model": model(),
            "train_dataset": texts("prompt", "chosen", "rejected"),
            "processing_class": word_tokenizer(path),
        },
        QUIET,
        refers=True,
    ),
    "GRPO": Door(
        trl.GRPOTrainer,
        GRPO,
        trl.GRPOConfig,
        saved,
        prompts,
        {**QUIET, "max_completion_length": 6, "num_generations": 2, "beta": 0.1},
        refers=True,
    ),
    "Reward": Door(
        trl.RewardTrainer,
        Reward,
        trl.RewardConfig,
        judge,
        lambda path: {"train_dataset": texts("chosen", "rejected"), "processing_class": word_tokenizer(path)},
        QUIET,
    ),
}


QUICK = ("Trainer", "DPO", "GRPO")


@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("name", [name if name in QUICK else pytest.param(name, marks=NIGHTLY) for name in DOORS])
def test_door(name: str, steps: int, tmp_path: Path) -> None:
    door, middle = DOORS[name], steps // 2
    plain = door.make(tmp_path, max_steps=steps)
    plain.train()
    truth = logged(plain)
    assert max(map(abs, truth.losses)) > 1e-3 and len(set(truth.norms)) > 1
    saves = {"save_strategy": "steps", "save_steps": middle}
    found = []
    for place, resume in ((nvme, None), (host, None), (nvme, f"checkpoint-{middle}")):
        trainer = door.make(tmp_path, place, max_steps=steps, **(saves if place is nvme else {}))
        folder = Path(trainer.args.output_dir)
        trainer.train(resume_from_checkpoint=resume and str(folder / resume))
        with trainer.engine as engine:
            assert engine.stats().step == steps
            assert engine.stats().peak_bytes["device"] <= engine.plan.request.budgets[Tier.DEVICE]
            found.append((logged(trainer), engine.digests()))
            assert (engine.reference is not None) == door.refers
        assert (folder / f"checkpoint-{middle}" / "offload" / "latest").is_file()
        assert not (folder / f"checkpoint-{middle}" / "optimizer.pt").exists()
    (ours, digests), (other, placed_otherwise), (resumed, digests_again) = found
    assert_close(ours.losses, truth.losses, 1e-4)
    assert_close(ours.norms, truth.norms, 1e-4)
    assert (ours, digests) == (other, placed_otherwise)
    assert (ours, digests) == (resumed, digests_again)


# --- around training --------------------------------------------------------------------------------------------------


def simple(path: Path, module: nn.Module | None = None, *, options: dict[str, Any] | None = None, **more: Any) -> Any:
    """Return an `OffloadTrainer` of three steps; `more` are arguments of the trainer or of its `TrainingArguments`."""
    module = model() if module is None else module
    own = inspect.signature(hf.Trainer.__init__).parameters
    given = {name: more.pop(name) for name in [*more] if name in own}
    return OffloadTrainer(
        model=given.pop("model", module),
        args=arguments(path, **{"max_steps": 3, "per_device_eval_batch_size": 2, **more}),
        **{"train_dataset": rows(), "eval_dataset": rows(4), **given},
        offload={**placed(nvme, module, path), **(options or {})},
    )


def test_evaluates_predicts_and_generates_between_steps(tmp_path: Path) -> None:
    plain = hf.Trainer(model=model(), args=arguments(tmp_path, max_steps=3), train_dataset=rows())
    before = plain.evaluate(rows(4))["eval_loss"]
    plain.train()
    trainer = simple(tmp_path)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(before, rel=1e-5)
    trainer.train()
    with trainer.engine:
        after = trainer.evaluate()["eval_loss"]
        assert after == pytest.approx(plain.evaluate(rows(4))["eval_loss"], rel=1e-5) and after != before
        ours, truth = trainer.predict(rows(4)), plain.predict(rows(4))
        assert ours.predictions == pytest.approx(truth.predictions, abs=1e-4)
        ids = rows(1)[0]["input_ids"][None]
        options = {"max_new_tokens": 4, "do_sample": False}
        assert torch.equal(trainer.model.generate(ids, **options), plain.model.generate(ids, **options))
        words = word_tokenizer(tmp_path)
        said, wanted = (
            hf.pipeline("text-generation", model=one.model, tokenizer=words)("w5 w9", **options)
            for one in (trainer, plain)
        )
        assert said == wanted
        trainer.train()  # once more, with the engine that is there
        assert trainer.engine.stats().step == 6


def test_only_evaluates(tmp_path: Path) -> None:
    trainer = simple(tmp_path, train_dataset=None)
    truth = hf.Trainer(model=model(), args=arguments(tmp_path), eval_dataset=rows(4)).evaluate()["eval_loss"]
    with_engine = trainer.evaluate()["eval_loss"]
    assert with_engine == pytest.approx(truth, rel=1e-5)
    engine = trainer.engine
    assert engine.optimizer is None
    trainer.train_dataset = rows()  # there is something to train now
    trainer.train()
    with trainer.engine:
        assert trainer.engine is not engine and trainer.engine.stats().step == 3


def test_logs_what_the_engine_does(tmp_path: Path) -> None:
    trainer = simple(tmp_path, callbacks=[OffloadCallback()])
    trainer.train()
    with trainer.engine as engine:
        logs = [entry for entry in trainer.state.log_history if "loss" in entry]
        assert len(logs) == 3
        written = [entry["offload/nvme_written_bytes"] for entry in logs]
        assert 0 < written[0] < written[1] < written[2] <= engine.stats().links["nvme_write"].bytes
        assert all(entry["offload/nvme_read_gb_s"] > 0 for entry in logs[1:])
        for tier, budget in engine.stats().budget_bytes.items():
            assert 0 <= logs[-1][f"offload/{tier}_bytes"] <= logs[-1][f"offload/{tier}_peak_bytes"] <= budget
        assert logs[-1]["offload/stalls"] >= 0 and logs[-1]["offload/stall_seconds"] >= 0
        assert logs[-1]["offload/activation_stall_seconds"] == 0, "none leave"


def test_logs_what_an_engine_of_the_users_does(tmp_path: Path) -> None:
    module = model()
    with Engine(module, AdamW(lr=LR), **nvme(module, tmp_path)) as engine:
        trainer = hf.Trainer(
            model=module,
            args=arguments(tmp_path, max_steps=1),
            train_dataset=rows(),
            optimizers=(engine.optimizer, None),
            callbacks=[OffloadCallback(engine)],
        )
        trainer.train()
        assert trainer.state.log_history[0]["offload/nvme_written_bytes"] > 0


def test_loads_the_best_model(tmp_path: Path) -> None:
    both = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = simple(tmp_path, load_best_model_at_end=True, greater_is_better=True, **both)
    trainer.train()
    with trainer.engine as engine:
        best = trainer.state.best_model_checkpoint
        assert best.endswith("checkpoint-1")
        truth = hf.LlamaForCausalLM.from_pretrained(best).state_dict()
        assert all(torch.equal(value, truth[name]) for name, value in engine.state_dict().items())


def test_loads_the_best_adapters(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    adapted = peft.get_peft_model(model(), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=False))
    both = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "steps", "save_steps": 1}
    trainer = simple(tmp_path, adapted, load_best_model_at_end=True, greater_is_better=True, learning_rate=3.0, **both)
    trainer.train()
    with trainer.engine as engine:
        best = trainer.state.best_model_checkpoint
        saved_as = safetensors.torch.load_file(f"{best}/adapter_model.safetensors")
        found = peft.get_peft_model_state_dict(adapted, state_dict=engine.state_dict())
    assert not best.endswith("checkpoint-3") and saved_as.keys() == found.keys()
    assert all(torch.equal(value, found[name]) for name, value in saved_as.items())


def test_resumes_what_the_plain_trainer_has_saved(tmp_path: Path) -> None:
    saves = {"save_strategy": "steps", "save_steps": 2}
    plain = hf.Trainer(model=model(), args=arguments(tmp_path, max_steps=3, **saves), train_dataset=rows())
    plain.train()
    trainer = simple(tmp_path, **saves)
    trainer.train(resume_from_checkpoint=str(tmp_path / "out" / "checkpoint-2"))
    trainer.engine.close()
    assert_close(logged(trainer).losses, logged(plain).losses, 1e-4)


def test_the_plain_trainer_resumes_with_exported_states(tmp_path: Path) -> None:
    plain = hf.Trainer(model=model(), args=arguments(tmp_path, max_steps=4), train_dataset=rows())
    plain.train()
    trainer = simple(tmp_path, max_steps=4, save_strategy="steps", save_steps=2)
    trainer.train()
    trainer.engine.close()
    saved = tmp_path / "out" / "checkpoint-2"
    words = ["checkpoint", "export", str(saved / "offload"), "--to", "torch", "--output", str(tmp_path / "exported")]
    assert cli.main(words) == 0
    torch.save(torch.load(tmp_path / "exported" / "checkpoint.pt")["optimizer"], saved / "optimizer.pt")
    resumed = hf.Trainer(model=model(), args=arguments(tmp_path, max_steps=4), train_dataset=rows())
    resumed.train(resume_from_checkpoint=str(saved))
    assert_close(logged(resumed).losses[2:], logged(plain).losses[2:], 1e-4)


def test_float16_keeps_its_loss_scale(tmp_path: Path) -> None:
    """The first steps overflow; a schedule does not advance in them, as with torch's scaler."""
    saves = {"save_strategy": "steps", "save_steps": 4, "max_steps": 8, "lr_scheduler_type": "linear"}
    options = {"initial_loss_scale": 2.0**24, "loss_scale_window": 2, "loss_scale_hysteresis": 1}
    found = []
    for resume in (None, str(tmp_path / "out" / "checkpoint-4")):
        module = model(torch.float16)
        trainer = simple(tmp_path, module, options=options, **saves)
        trainer.train(resume_from_checkpoint=resume)
        with trainer.engine as engine:
            skipped = engine.stats().skipped_steps
            assert 0 < skipped < 8 == engine.stats().step + skipped
            assert trainer.lr_scheduler.last_epoch == engine.stats().step
            found.append((engine.loss_scale, logged(trainer).losses, engine.digests()))
    assert found[0] == found[1]
    assert not (tmp_path / "out" / "checkpoint-4" / "scaler.pt").exists()  # the plain trainer has no scaler to load it


def test_a_file_of_a_scale_is_loaded_where_there_is_a_scaler(tmp_path: Path) -> None:
    """Earlier versions left an empty one of several processes, at which one process failed."""
    trainer, scaler = simple(tmp_path), torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.save({}, tmp_path / "scaler.pt")
    assert trainer.accelerator.scaler is None
    trainer._load_scaler(str(tmp_path))
    trainer.accelerator.scaler = scaler
    trainer._save_scaler(str(tmp_path))
    scaler.load_state_dict({**scaler.state_dict(), "scale": 4.0})
    trainer._load_scaler(str(tmp_path))
    assert scaler.state_dict()["scale"] == 8.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_adapters_resume_from_the_files_of_the_trainer(dtype: torch.dtype, tmp_path: Path) -> None:
    """A checkpoint has the adapters, not the frozen model."""
    peft = pytest.importorskip("peft")
    found = []
    for resume in (None, str(tmp_path / "out" / "checkpoint-2")):
        adapted = peft.get_peft_model(model(dtype), peft.LoraConfig(target_modules=["q_proj"], init_lora_weights=True))
        trainer = simple(tmp_path, adapted, save_strategy="steps", save_steps=2, max_steps=4, max_grad_norm=0)
        trainer.train(resume_from_checkpoint=resume)
        with trainer.engine as engine:
            found.append((logged(trainer), engine.digests()))
    names = {file.name for file in (tmp_path / "out" / "checkpoint-2").iterdir()}
    assert {"adapter_model.safetensors", "optimizer.pt"} <= names and "offload" not in names
    assert found[0] == found[1]


def test_a_model_per_call(tmp_path: Path) -> None:
    """``model_init`` makes another model in each call of ``train()``; each gets an engine."""
    trainer = simple(tmp_path, model=None, model_init=model)
    first = trainer.train().training_loss
    engine = trainer.engine
    assert trainer.train().training_loss == first
    assert trainer.engine is not engine and engine._manager is None
    trainer.engine.close()


@pytest.mark.parametrize("kind", ["torch's", "ours"])
def test_takes_the_optimizer_that_it_is_given(kind: str, tmp_path: Path) -> None:
    truth_of = model()
    optimizer = torch.optim.AdamW(truth_of.parameters(), lr=LR, weight_decay=0.0)
    plain = hf.Trainer(
        model=truth_of, args=arguments(tmp_path, max_steps=3), train_dataset=rows(), optimizers=(optimizer, None)
    )
    plain.train()
    module = model()
    ours: Any = AdamW(lr=LR, weight_decay=0.0)
    if kind == "torch's":
        ours = torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)
    trainer = simple(tmp_path, module, optimizers=(ours, None))
    trainer.train()
    trainer.engine.close()
    assert_close(logged(trainer).losses, logged(plain).losses, 1e-4)


def test_a_class_that_makes_its_own_optimizer(tmp_path: Path) -> None:
    """Its `create_optimizer` does not call the mixin's, and the engine is made all the same."""

    class Rates:
        model: Any
        optimizer: Any = None

        def create_optimizer(self) -> Any:
            if self.optimizer is None:
                head, rest = [*self.model.lm_head.parameters()], [*self.model.model.parameters()]
                self.optimizer = torch.optim.AdamW([{"params": head, "lr": 0.1 * LR}, {"params": rest}], lr=LR)
            return self.optimizer

    class Plain(Rates, hf.Trainer):
        pass

    class Ours(Rates, OffloadTrainer):
        pass

    for evaluates in (False, True):
        module = model()
        args = arguments(tmp_path, max_steps=3)
        plain = Plain(model=model(), args=args, train_dataset=rows())
        ours = Ours(model=module, args=args, train_dataset=rows(), offload=placed(nvme, module, tmp_path))
        for trainer in (plain, ours):
            if evaluates:
                trainer.evaluate(rows(4))
            trainer.train()
        with ours.engine as engine:
            assert engine.stats().step == 3
        assert_close(logged(ours).losses, logged(plain).losses, 1e-4)


def test_a_class_that_makes_an_optimizer_at_each_call(tmp_path: Path) -> None:
    """Each call trains with the one that was made for it, as the trainer does without an engine."""

    class Anew:
        model: Any
        optimizer: Any = None

        def create_optimizer(self) -> Any:
            self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=LR)
            return self.optimizer

    class Plain(Anew, hf.Trainer):
        pass

    class Ours(Anew, OffloadTrainer):
        pass

    module, args = model(), arguments(tmp_path, max_steps=2)
    plain = Plain(model=model(), args=args, train_dataset=rows())
    ours = Ours(model=module, args=args, train_dataset=rows(), offload=placed(nvme, module, tmp_path))
    found: list[list[float]] = []
    for trainer in (plain, ours):
        losses = [trainer.evaluate(rows(4))["eval_loss"]]
        for _ in range(2):
            trainer.train()
            losses += [*logged(trainer).losses, trainer.evaluate(rows(4))["eval_loss"]]
        found.append(losses)
    first = ours.engine
    ours.engine.close()
    ours.optimizer = mine = torch.optim.AdamW(module.parameters(), lr=LR)
    ours.evaluate(rows(4))  # with an engine that only evaluates, for that one was closed by hand
    assert ours.optimizer is mine
    ours.train()
    with ours.engine as engine:
        assert engine is not first and engine.stats().step == 2
    assert_close(found[1], found[0], 1e-4)


def test_mixes_the_model_into_its_reference(tmp_path: Path) -> None:
    door = DOORS["DPO"]
    options = {"max_steps": 3, "sync_ref_model": True, "ref_model_sync_steps": 1, "ref_model_mixup_alpha": 0.5}
    plain, ours = door.make(tmp_path, **options), door.make(tmp_path, nvme, **options)
    plain.train()
    ours.train()
    with ours.engine:
        truth, found = plain.ref_model.state_dict(), ours.ref_model.state_dict()
    for name, value in model().state_dict().items():
        assert torch.allclose(found[name], truth[name], atol=1e-5) and not torch.equal(found[name], value), name


@pytest.mark.parametrize(
    ("more", "tolerance"),
    [({"bf16": True}, 2e-3), ({"gradient_checkpointing": True}, 1e-4), ({"report_to": ["tensorboard"]}, 1e-4)],
)
def test_what_a_trainer_is_often_asked_for(more: dict[str, Any], tolerance: float, tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    given = arguments(tmp_path / "plain", max_steps=3, **more)
    plain, ours = hf.Trainer(model=model(), args=given, train_dataset=rows()), simple(tmp_path, **more)
    for trainer in (plain, ours):
        trainer.train()
    ours.engine.close()
    assert_close(logged(ours).losses, logged(plain).losses, tolerance)
    assert_close(logged(ours).norms, logged(plain).norms, 4 * tolerance)
    events = [len(list(path.rglob("events.out.tfevents*"))) for path in (tmp_path / "out", tmp_path / "plain")]
    assert events == ([1, 1] if "report_to" in more else [0, 0])


def test_adapters_that_trl_makes(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    door, found = DOORS["SFT"], []
    for place in (None, nvme):
        module = model()  # adapters are drawn behind it
        given = {"model": module, "args": door.arguments(tmp_path, max_steps=3), **door.given(tmp_path)}
        given["peft_config"] = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        trainer = door.plain(**given) if place is None else SFT(**given, offload=placed(place, module, tmp_path))
        trainer.train()
        found.append(logged(trainer))
        if place is not None:
            trainer.engine.close()
    assert_close(found[1].losses, found[0].losses, 1e-4)
    assert_close(found[1].norms, found[0].norms, 1e-4)


def test_preferences_of_adapters_that_trl_makes(tmp_path: Path) -> None:
    """The reference is the model with its adapters switched off: at first both say the same, so the loss is log 2."""
    peft = pytest.importorskip("peft")
    found = []
    for kind in (trl.DPOTrainer, DPO):
        adapters = peft.LoraConfig(task_type="CAUSAL_LM", target_modules=["q_proj", "v_proj"])
        torch.manual_seed(0)
        trainer = preferences(tmp_path, model(), kind, {"ref_model": None, "peft_config": adapters})
        assert trainer.ref_model is None
        trainer.train()
        found.append(logged(trainer))
    with trainer.engine as engine:
        assert engine.reference is None and engine.stats().step == 3
    assert found[0].losses[0] == pytest.approx(math.log(2), abs=1e-4) != found[0].losses[2]
    assert_close(found[1].losses, found[0].losses, 1e-4)
    assert_close(found[1].norms, found[0].norms, 1e-4)


def test_clipping_takes_no_call_per_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function, which asks each gradient, leaves the same bits."""
    calls, found = calls_of_handles(monkeypatch), []
    for asks_each in (False, True):
        if asks_each:
            monkeypatch.setattr(door_of_hf, "clip_together", lambda accelerator, engine: None)
        trainer = simple(tmp_path)
        trainer.train()
        with trainer.engine as engine:
            found.append((logged(trainer), engine.digests()))
        assert min(found[0][0].norms) > trainer.args.max_grad_norm == 1.0
        assert bool(calls.keys() & CLIPPING) == asks_each
    assert found[0] == found[1]


def test_preparing_leaves_the_states_where_they_are(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Accelerate would gather them, move them to the device, and load them again."""

    def refuse(self: Any) -> Any:
        raise AssertionError("states were gathered")

    monkeypatch.setattr(OffloadOptimizer, "state_dict", refuse)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "no")  # older libraries set it: later tests would cast, too
    trainer = simple(tmp_path, model(torch.bfloat16), bf16=True)
    trainer.train()
    with trainer.engine as engine:
        assert engine.stats().step == 3
    accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize("given", ["the trainer's", "torch's", "ours"])
def test_a_closed_engine_is_followed_by_another(given: str, tmp_path: Path) -> None:
    module = model()
    optimizers = {
        "the trainer's": None,
        "torch's": torch.optim.AdamW(module.parameters(), lr=LR),
        "ours": AdamW(lr=LR),
    }
    trainer = simple(tmp_path, module, optimizers=(optimizers[given], None))
    trainer.train()
    trainer.engine.close()
    trainer.save_model(str(tmp_path / "weights"))
    first, weights = trainer.engine, {name: value.clone() for name, value in module.state_dict().items()}
    found = hf.LlamaForCausalLM.from_pretrained(tmp_path / "weights").state_dict()
    assert all(torch.equal(value, found[name]) for name, value in weights.items())
    loss = trainer.evaluate()["eval_loss"]
    assert trainer.engine is not first and trainer.engine.optimizer is None
    trainer.engine.close()
    assert trainer.evaluate()["eval_loss"] == loss
    trainer.train()
    with trainer.engine as engine:
        assert engine.stats().step == 3
        assert any(not torch.equal(value, weights[name]) for name, value in engine.state_dict().items())


def test_a_checkpoint_has_nothing_of_earlier_runs(tmp_path: Path) -> None:
    trainer = simple(tmp_path, save_strategy="steps", save_steps=3)
    for _ in range(2):
        trainer.train()
    with trainer.engine as engine:
        assert engine.stats().step == 6
    assert [path.name for path in (tmp_path / "out" / "checkpoint-3" / "offload").glob("step-*")] == ["step-00000006"]


class Wide(nn.Module):
    """Few parameters, and activations of 4.5 MiB a row."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))

    def forward(self, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        wide = self.scale * labels.expand(-1, 1 << 17)
        for _ in range(8):
            wide = wide.sin()
        return {"loss": wide.mean()}


def test_looks_for_a_batch_size_within_the_budget(tmp_path: Path) -> None:
    trainer = OffloadTrainer(
        model=Wide(),
        args=arguments(tmp_path, max_steps=1, per_device_train_batch_size=64, auto_find_batch_size=True),
        train_dataset=[{"labels": torch.ones(1)} for _ in range(128)],
        offload={"max_memory": {"device": "160MiB", "cpu": "64MiB"}},
    )
    trainer.train()
    with trainer.engine as engine:
        assert engine.stats().step == trainer.state.global_step == 1
    assert 1 <= trainer._train_batch_size < 64


def test_searches_for_a_batch_size_know_the_budgets_error() -> None:
    error = BudgetError(f"device budget: too much{BATCH_TOO_LARGE}")
    assert accelerate.utils.memory.should_reduce_batch_size(error)
    assert pytest.importorskip("lightning.pytorch.utilities.memory").is_oom_error(error)


@pytest.mark.parametrize("how", ["an instance", "arguments by place", "no arguments", "arguments of the user"])
def test_trl_loads_models_into_host_memory(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a GPU it would take all of that for them."""
    loaded: list[Any] = []

    def load(path: str, *architecture: Any, **kwargs: Any) -> nn.Module:
        loaded.append(kwargs.get("device_map", "auto"))
        return saved(tmp_path)

    monkeypatch.chdir(tmp_path)
    module, door = saved(tmp_path), DOORS["DPO"]
    if not hasattr(trl.trainer.dpo_trainer, "create_model_from_path"):
        pytest.skip("this TRL loads models into host memory by itself")
    monkeypatch.setattr(trl.trainer.dpo_trainer, "create_model_from_path", load)
    args = door.arguments(tmp_path)
    more = {**door.given(tmp_path), "ref_model": None}
    if how == "an instance":
        trainer = DPO(module, args=args, **more)
    elif how == "arguments by place":
        del more["ref_model"]
        trainer = DPO("there", None, args, **more)
    elif how == "no arguments":
        monkeypatch.setattr(trl, "DPOConfig", functools.partial(trl.DPOConfig, use_cpu=True, bf16=False))
        trainer = DPO(model="some/where", **more)
        assert trainer.args.output_dir.endswith("where-DPO")
    else:
        args.model_init_kwargs = {"device_map": "cpu"}
        trainer = DPO(model="there", args=args, **more)
    expected = "cpu" if how == "arguments of the user" else None
    assert loaded == [expected] * (1 if how == "an instance" else 2)
    assert trainer.ref_model is not None


@pytest.mark.parametrize("loads", [False, True])
def test_a_trainer_that_copies_its_reference_gets_no_option_to_load_one(
    loads: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """TRL refuses the option beside a model that is there."""
    module = types.ModuleType("trl.of_tests")
    if loads:
        vars(module)["create_model_from_path"] = None
    monkeypatch.setitem(sys.modules, module.__name__, module)

    class SomeTrainer:
        def __init__(self, model: nn.Module, ref_model: nn.Module | None = None, args: Any = None) -> None: ...

    SomeTrainer.__module__ = module.__name__
    config = types.SimpleNamespace(model_init_kwargs=None)
    door_of_hf.load_into_host(SomeTrainer, (nn.Linear(1, 1),), {"args": config})
    assert config.model_init_kwargs == ({"device_map": None} if loads else None)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"gradient_accumulation_steps": 2}, {}, r"offload: expected one side that accumulates.*leave it out"),
        ({"gradient_reduction": "mean"}, {}, r"offload: expected one side that accumulates"),
        ({"max_grad_norm": 1.0}, {}, r"offload: expected one side that clips.*pass 0 to the trainer"),
        ({"device": "meta"}, {}, r"device: expected the trainer's, cpu, but got meta; leave it out"),
        (
            {"run_dir": ".", "nvme_path": None, "offload_param": "auto"},
            {},
            r"run_dir: .*let the trainer save",
        ),
        ({"unit_byte": 1}, {}, r"unknown option 'unit_byte' \(did you mean 'unit_bytes'"),
        ({}, {"torch_compile": True}, r"torch_compile: .*leave it out"),
        ({}, {"bf16_full_eval": True}, r"bf16_full_eval: .*pass offload="),
        ({}, {"load_best_model_at_end": True, "save_strategy": "no"}, r"load_best_model_at_end: .*save_strategy"),
    ],
)
def test_refuses(
    options: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ACCELERATE_DYNAMO_BACKEND", "no")  # transformers 4.56 sets it for the rest of the process
    with pytest.raises(ValueError, match=message):
        simple(tmp_path, options=options, **more)


def test_the_engine_clips_if_the_trainer_does_not(tmp_path: Path) -> None:
    plain = hf.Trainer(model=model(), args=arguments(tmp_path, max_steps=3), train_dataset=rows())
    plain.train()
    trainer = simple(tmp_path, options={"max_grad_norm": 1.0}, max_grad_norm=0)
    trainer.train()
    trainer.engine.close()
    assert min(logged(plain).norms) > 1.0
    assert_close(logged(trainer).losses, logged(plain).losses, 1e-4)
    if int(hf.__version__.split(".")[0]) >= 5:  # the first ones log no norm where they do not clip
        assert_close(logged(trainer).norms, logged(plain).norms, 1e-4)


@pytest.mark.parametrize("slices", [False, True])
def test_processes_meet_behind_forwards_that_need_others_parameters(
    slices: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And in none of a model that has no engine any more."""
    trainer = simple(tmp_path)
    request = types.SimpleNamespace(slices_parameters=slices)
    meetings: list[str] = []
    engine = types.SimpleNamespace(
        module=trainer.model,
        optimizer=None,
        plan=types.SimpleNamespace(request=request),
        reference=None,
        close=lambda restore: None,
        wait_for_ranks=lambda where, failure: meetings.append(where),
    )
    monkeypatch.setattr(door_of_hf, "Engine", lambda *args, **options: engine)
    monkeypatch.setattr(hf.TrainingArguments, "world_size", 3)
    monkeypatch.setattr(OffloadTrainer, "_gathers_behind_forward", True)
    monkeypatch.setattr(OffloadTrainer, "_stage_of_several", lambda trainer: 1)
    trainer._open(object())
    trainer.model(input_ids=rows(1)[0]["input_ids"][None])
    assert meetings == ["the end of a forward"] * slices
    trainer._close_of_other()
    trainer._open(object())
    trainer.model(input_ids=rows(1)[0]["input_ids"][None])
    assert len(meetings) == 2 * slices


def test_refuses_several_devices(tmp_path: Path) -> None:
    trainer = simple(tmp_path)
    trainer.args._n_gpu = 2
    with pytest.raises(ConfigError, match=r"n_gpu: expected one device but got 2.*CUDA_VISIBLE_DEVICES"):
        trainer.create_accelerator_and_postprocess()


def test_refuses_processes_of_which_the_trainer_knows_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trainer = simple(tmp_path)
    monkeypatch.setenv("WORLD_SIZE", "2")  # accelerate looks at it with use_cpu=True, or beside a GPU
    with pytest.raises(ConfigError, match=r"use_cpu: expected arguments of 2 processes but got those of 1.*use_cpu=T"):
        trainer.create_accelerator_and_postprocess()


def test_refuses_models_that_device_map_has_spread(tmp_path: Path) -> None:
    module = model()
    module.hf_device_map = {"model": "cpu", "lm_head": "disk"}
    with pytest.raises(StateError, match=r"hf_device_map.*load the model without device_map"):
        simple(tmp_path, module).train()


def test_refuses_a_schedule_of_another_optimizer(tmp_path: Path) -> None:
    module = model()
    one, other = (torch.optim.AdamW(module.parameters()) for _ in range(2))
    schedule = torch.optim.lr_scheduler.ConstantLR(other)
    with pytest.raises(ConfigError, match=r"scheduler of the optimizer beside it.*ConstantLR.*leave it out"):
        simple(tmp_path, module, optimizers=(one, schedule)).train()


def test_refuses_a_model_that_has_an_engine(tmp_path: Path) -> None:
    module = model()
    with Engine(module, AdamW(), **nvme(module, tmp_path)):
        with pytest.raises(StateError, match=r"already wrapped by another engine"):
            simple(tmp_path, module).train()


def test_a_data_set_without_labels(tmp_path: Path) -> None:
    """Transformers names it; the engine is left usable."""
    trainer = simple(tmp_path, train_dataset=[{"input_ids": row["input_ids"]} for row in rows()])
    with pytest.raises(ValueError, match="did not return a loss"):
        trainer.train()
    trainer.engine.close()


# --- reference models -------------------------------------------------------------------------------------------------


def preferences(path: Path, module: nn.Module, kind: Any = DPO, given: Any = None, **more: Any) -> Any:
    """Return a DPO trainer of three steps around `module`; `more` are its arguments, `given` replaces the data."""
    door = DOORS["DPO"]
    whole = {"model": module, "args": door.arguments(path, max_steps=3, **more), **door.given(path), **(given or {})}
    return kind(**whole) if kind is trl.DPOTrainer else kind(**whole, offload=placed(nvme, both(module), path))


def test_a_reference_model_shares_the_memory_of_the_model(tmp_path: Path) -> None:
    """One region of the device, one host budget: the plan is that of the model, but for what is on the drive."""
    module = model()
    trainer = preferences(tmp_path, module)
    trainer.train()
    with trainer.engine as engine:
        assert engine.reference is trainer.ref_model is not module
        plan, stats = engine.plan, engine.stats()
    alone = model()
    with Engine(alone, AdamW(), **nvme(both(alone), tmp_path)) as engine:
        truth = engine.plan
    assert len(plan.request.units) == 2 * len(truth.request.units)
    for tier in (Tier.DEVICE, Tier.HOST):
        assert plan.arena_bytes[tier] == truth.arena_bytes[tier] <= plan.request.budgets[tier], tier
    region = working_bytes(both(alone))
    assert plan.working_bytes == truth.working_bytes == region < 2 * working_bytes(alone)
    assert stats.peak_bytes["device"] <= stats.budget_bytes["device"]
    for name, value in model().state_dict().items():  # both are given back, and the reference is what it was
        assert torch.equal(trainer.ref_model.state_dict()[name], value) and not torch.equal(
            module.state_dict()[name], value
        ), name


def test_what_is_saved_has_no_reference_model(tmp_path: Path) -> None:
    trainer = preferences(tmp_path, model(), save_strategy="steps", save_steps=3)
    trainer.train()
    trainer.save_model(str(tmp_path / "weights"))
    with trainer.engine as engine:
        names = set(engine.state_dict())
        truth = engine.digests()
    loaded = hf.LlamaForCausalLM.from_pretrained(tmp_path / "weights")
    assert set(loaded.state_dict()) == names
    for folder in (tmp_path / "weights", tmp_path / "out"):
        assert not any(b"(reference)" in file.read_bytes() for file in folder.rglob("*") if file.is_file())
    module = model()
    with Engine(module, AdamW(lr=LR, weight_decay=0.0), **nvme(module, tmp_path)) as engine:
        engine.load_checkpoint(tmp_path / "out" / "checkpoint-3" / "offload", strict=False)
        found = engine.digests()
    assert found.keys() == {name for name in truth if not name.startswith("(reference)")}
    assert all(found[name]["parameter"] == truth[name]["parameter"] for name in found)


@pytest.mark.parametrize("refers", [True, False])
def test_a_reference_that_is_asked_before_training(refers: bool, tmp_path: Path, monkeypatch: Any) -> None:
    """TRL then asks the reference model, or the model, for all rows at once, and keeps what it says in files."""
    asked: list[Any] = []
    ask = trl.DPOTrainer.compute_ref_log_probs

    def noted(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        asked.append(type(trainer))
        if isinstance(trainer, DPO):
            assert trainer.engine.optimizer is None and (trainer.engine.reference is not None) == refers
        return ask(trainer, *args, **kwargs)

    monkeypatch.setattr(trl.DPOTrainer, "compute_ref_log_probs", noted)
    numbers = itertools.count()
    monkeypatch.setattr(  # nothing is taken from an earlier run
        datasets.Dataset, "_get_cache_file_path", lambda self, fingerprint: str(tmp_path / f"{next(numbers)}.arrow")
    )
    found = []
    for kind in (trl.DPOTrainer, DPO):
        given = None if refers else {"ref_model": None}
        trainer = preferences(tmp_path, model(), kind, given, precompute_ref_log_probs=True)
        trainer.train()
        assert set(asked) == {kind}
        found.append(logged(trainer))
        asked.clear()
    with trainer.engine as engine:
        assert engine.stats().step == 3
    assert_close(found[1].losses, found[0].losses, 1e-4)
    assert_close(found[1].norms, found[0].norms, 1e-4)


def test_accelerate_leaves_a_reference_model_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It would move it to the device as a whole, before there is an engine."""
    moved: dict[int, Any] = {}
    prepare = accelerate.Accelerator.prepare_model

    def noted(self: Any, model: Any, device_placement: Any = None, **kwargs: Any) -> Any:
        moved[id(model)] = device_placement
        return prepare(self, model, device_placement, **kwargs)

    monkeypatch.setattr(accelerate.Accelerator, "prepare_model", noted)
    trainer = preferences(tmp_path, model())
    assert moved == {id(trainer.ref_model): False}
    other = model()
    trainer.accelerator.prepare_model(other, evaluation_mode=True)
    assert moved[id(other)] is None


def test_refuses_memory_for_the_reference_model_alone(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"offload_reference: expected no budgets.*leave it out, and add its cpu"):
        preferences(tmp_path, model(), given={"offload_reference": {"max_memory": {"cpu": "1GiB"}}})


def test_refuses_another_reference_model_later(tmp_path: Path) -> None:
    trainer = preferences(tmp_path, model())
    trainer.train()
    with trainer.engine:
        with pytest.raises(StateError, match=r"ref_model: expected the reference model before the engine is made"):
            trainer.ref_model = model()


def test_a_reference_model_in_an_engine_of_the_users(tmp_path: Path) -> None:
    reference = model()
    with Engine(reference, **nvme(reference, tmp_path)) as theirs:
        trainer = preferences(tmp_path, model(), given={"ref_model": theirs.module})
        trainer.train()
        with trainer.engine as engine:
            assert engine.reference is None and theirs.module is trainer.ref_model
    plain = preferences(tmp_path, model(), trl.DPOTrainer)
    plain.train()
    assert_close(logged(trainer).losses, logged(plain).losses, 1e-4)


@pytest.mark.parametrize(("version", "message"), [("4.2.1", "but got 4.2.1"), (None, "but it is not installed")])
def test_refuses_a_library_that_is_old_or_missing(
    version: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def found(name: str) -> str:
        if version is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return version

    monkeypatch.setattr(importlib.metadata, "version", found)
    with pytest.raises(ConfigError, match=rf"offload.hf: expected transformers 4.56 or later {message}; pip install"):
        libraries.require("transformers", "4.56", door="offload.hf")
    libraries.require("transformers", "4.2", door="offload.hf") if version else None


def test_private_methods_are_still_what_they_were() -> None:
    """A release that removes or changes one must not change what the mixin does without a word."""
    for name, parameters in door_of_hf.PRIVATE.items():
        assert tuple(inspect.signature(getattr(hf.Trainer, name)).parameters) == parameters, name
        assert name in vars(OffloadTrainerMixin)
    private = {name for name in vars(OffloadTrainerMixin) if hasattr(hf.Trainer, name) and name[:2] != "__"}
    assert {name for name in private if name.startswith("_")} == set(door_of_hf.PRIVATE)
    for trainer in (trl.DPOTrainer, trl.GRPOTrainer):  # they assign ref_model, and add a callback that mixes
        assert "self.ref_model = " in inspect.getsource(trainer)
    assert "self.ref_model" not in inspect.getsource(hf.Trainer)
    sync = inspect.getsource(trl.trainer.callbacks.SyncRefModelCallback)
    assert "ref_model_sync_steps" in sync and "ref_model_mixup_alpha" in sync
