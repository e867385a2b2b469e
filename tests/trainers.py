"""A tiny model, its data, and the arguments under which trainers of other libraries train it."""

from __future__ import annotations

import collections
import dataclasses
import importlib
from collections.abc import Callable, Container
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf
from models import VOCABULARY, architecture
from torch import nn

from offload.module.handles import GradientHandle
from offload.module.torch_calls import name_of

LR = 1e-2
STEPS = 5
SMALL = architecture(
    "small",
    "LlamaConfig",
    "LlamaForCausalLM",
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    vocab_size=VOCABULARY,
)


def model(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return SMALL.build().to(dtype)


def rows(count: int = 64) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    ids = [torch.randint(3, VOCABULARY, (12,), generator=generator) for _ in range(count)]
    return [{"input_ids": row, "labels": row} for row in ids]


def adam(module: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(module.parameters(), lr=LR, weight_decay=0.0)


def assert_close(ours: list[float], truth: list[float], tolerance: float) -> None:
    assert len(ours) == len(truth) > 0
    for a, b in zip(ours, truth, strict=True):
        assert a == pytest.approx(b, rel=tolerance), (ours, truth)


@dataclasses.dataclass
class Log:
    """What a trainer has logged."""

    losses: list[float] = dataclasses.field(default_factory=list)
    norms: list[float] = dataclasses.field(default_factory=list)


def arguments(path: Path, kind: type = hf.TrainingArguments, **more: Any) -> Any:
    given = {
        "output_dir": str(path / "out"),
        "per_device_train_batch_size": 2,
        "max_steps": STEPS,
        "learning_rate": LR,
        "logging_steps": 1,
        "report_to": [],
        "save_strategy": "no",
        "use_cpu": True,
        "disable_tqdm": True,
        "bf16": False,
        **more,
    }
    return kind(**given)


def logged(trainer: Any) -> Log:
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    norms = [entry["grad_norm"] for entry in entries if "grad_norm" in entry]  # transformers 4.56: only if it clips
    return Log([entry["loss"] for entry in entries], norms)


# What clipping by norm asks of each gradient, where it asks each.
CLIPPING = frozenset({"norm", "linalg_vector_norm", "mul_", "_foreach_norm", "_foreach_mul_"})


def calls_of_handles(monkeypatch: pytest.MonkeyPatch) -> collections.Counter[str]:
    """Return what counts the calls of torch on gradients that have moved away from now on, by their names."""
    counts: collections.Counter[str] = collections.Counter()
    answer = GradientHandle.__torch_function__.__func__  # type: ignore[attr-defined]

    def counted(cls: type, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        counts[name_of(func)] += 1
        return answer(cls, func, types, args, kwargs)

    monkeypatch.setattr(GradientHandle, "__torch_function__", classmethod(counted))
    return counts


def word_tokenizer(path: Path) -> Any:
    """Return a tokenizer whose tokens are words ``w0`` to ``w199``."""
    tokenizers = importlib.import_module("tokenizers")
    words = {f"w{number}": number for number in range(VOCABULARY)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    special = {"eos_token": "w2", "pad_token": "w0", "unk_token": "w0"}
    names = ["input_ids", "attention_mask"]  # all of which a Llama takes
    return hf.PreTrainedTokenizerFast(tokenizer_object=tokenizer, model_input_names=names, **special)


def lightning_module(
    core: nn.Module,
    make: Callable[[nn.Module], torch.optim.Optimizer],
    log: Log,
    *,
    skipped: Container[int] = (),
) -> Any:
    lightning = pytest.importorskip("lightning")

    class Module(lightning.LightningModule):  # type: ignore[name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.core = core

        def training_step(self, batch: Any, number: int) -> torch.Tensor | None:
            loss: torch.Tensor = self.core(**batch).loss
            log.losses.append(loss.item())
            return None if number in skipped else loss

        def validation_step(self, batch: Any, number: int) -> None:
            self.log("val_loss", self.core(**batch).loss)

        def on_before_optimizer_step(self, optimizer: Any) -> None:
            norm = torch.nn.utils.get_total_norm([p.grad for p in self.core.parameters() if p.grad is not None])
            log.norms.append(float(norm))

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return make(self.core)

    return Module()


def lightning_trainer(path: Path, **more: Any) -> Any:
    lightning = importlib.import_module("lightning")
    given = {
        "accelerator": "cpu",
        "devices": 1,
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "enable_checkpointing": False,
        "max_steps": STEPS,
        "default_root_dir": str(path),
        **more,
    }
    return lightning.Trainer(**given)


def loader(count: int = 64) -> Any:
    return torch.utils.data.DataLoader(rows(count), batch_size=2)
