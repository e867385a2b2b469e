"""The model of the benches that go by the clock: an 8 B Llama on the meta device, and a small one like it."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

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
