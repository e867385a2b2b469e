"""What the benches that go by the clock share: an 8 B Llama on the meta device, a small one like it, and their engines.

Importing this lets them import the simulated device of the tests.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from simulated.engine import Watch, untouched
from simulated.figures import Figures, watched

import offload
from offload.planning.hardware import Hardware

HEADROOM = 0.95  # of device and host memory
LEAST_NORM = 1e-3  # to which a step that clips does: in a dry run, each sum of squares is 1
SEQUENCE = 2048
LOSS_TOKENS = 2048  # whose logits are there at once

FULL = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
SMALL = {**FULL, "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 3, "vocab_size": 512}


class WithLoss(nn.Module):
    """A Llama and its loss, whose logits are made for some tokens at a time, and again in backward."""

    def __init__(self, sizes: dict[str, int]) -> None:
        super().__init__()
        import transformers

        config = transformers.LlamaConfig(**sizes, tie_word_embeddings=False)
        whole = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        whole.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        self.model, self.head = whole.model, whole.lm_head

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the mean loss of tokens (rows, length)."""
        hidden = self.model(input_ids=ids, use_cache=False).last_hidden_state.flatten(0, 1)
        parts = zip(hidden.split(LOSS_TOKENS), ids.flatten().split(LOSS_TOKENS), strict=True)
        losses = [checkpoint(self._loss, *part, use_reentrant=False) for part in parts]
        return torch.stack(losses).sum() / ids.numel()

    def _loss(self, hidden: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(self.head(hidden).float(), labels, reduction="sum")


def made(sizes: dict[str, int]) -> WithLoss:
    """Return the model on the meta device."""
    with torch.device("meta"):
        return WithLoss(sizes).train()


def memory_of(hardware: Hardware) -> dict[str, int]:
    """Return the budgets of a machine without a drive."""
    return {"device": int(hardware.device_bytes * HEADROOM), "cpu": int(hardware.host_bytes * HEADROOM)}


@contextlib.contextmanager
def engine_of(model: nn.Module, **options: Any) -> Iterator[offload.Engine]:
    """Make an engine, inside the clock."""
    ours = offload.Engine(untouched(model), offload.AdamW(lr=1e-4), device="sim", **options)
    try:
        yield ours
    finally:
        ours.close(restore=False)


def tokens(rows: int) -> torch.Tensor:
    """Return a micro-batch."""
    return torch.zeros(rows, SEQUENCE, dtype=torch.int64, device="sim")


def steps_of(
    ours: offload.Engine, watch: Watch, hardware: Hardware, *, rows: int, micro_batches: int = 1, steps: int = 2
) -> Figures:
    """Return what steps of an engine take."""
    ids = tokens(rows)

    def step() -> None:
        for _ in range(micro_batches):
            ours.backward(ours(ids))
            ours.step()

    return watched(watch, hardware, step, steps=steps)
