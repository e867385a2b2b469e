"""What the benches share: the model they run on, and how results are written."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:  # an earlier commit, which a bench may run on, has other files
    from offload.cli.finetune.settings import Settings
    from offload.cli.finetune.text import Windows


SLACK_BYTES = 64 << 20  # of memory, that a run may take besides its budgets


def model_directory() -> Path:
    """Return where ``make prepare`` has put the real model."""
    return Path(os.environ.get("OFFLOAD_MODEL", _cache() / "smollm2-135m"))


def text_file() -> Path:
    """Return where ``make prepare`` has put the real text."""
    return _cache() / "text" / "corpus.txt"


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "offload"


def text_windows(settings: Settings) -> Windows:
    """Return token windows of a text, cut by the model's own tokenizer."""
    from offload.cli.finetune.text import make_windows, read_text
    from offload.cli.models import load_tokenizer

    encode = load_tokenizer(settings.model)
    return make_windows(
        lambda text: encode(text, add_special_tokens=False)["input_ids"], read_text(settings.data), settings
    )


# hidden and feed-forward size, layers, vocabulary, heads for keys and values, tied embedding
_RANDOM = {
    "tiny": (64, 128, 3, 256, 1, True),
    "small": (256, 768, 12, 4096, 2, True),
    "medium": (384, 1024, 12, 18432, 2, True),
    "real": (576, 1536, 30, 49152, 3, True),
    "large": (2048, 5632, 20, 32000, 16, False),
}


def vocabulary_size(name: str) -> int:
    """Return the number of tokens that a model knows."""
    return _RANDOM[name][3]


def load_model(name: str) -> tuple[torch.nn.Module, int]:
    """Return a bf16 model and its vocabulary size.

    It is ``real`` (135 M), or a random Llama: ``tiny`` (0.1 M), ``small`` (11 M), ``medium`` (26 M) or ``large``
    (1.1 B).

    Where the real one has not been prepared, a random one of the same architecture takes its place.
    """
    import transformers

    if name == "real" and model_directory().exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.bfloat16)
        return model, model.config.vocab_size
    torch.manual_seed(0)
    hidden, feed_forward, layers, vocabulary, kv_heads, tied = _RANDOM[name]
    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=feed_forward,
        num_hidden_layers=layers,
        vocab_size=vocabulary,
        num_attention_heads=hidden // 64,
        num_key_value_heads=kv_heads,
        tie_word_embeddings=tied,
    )
    return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16), vocabulary


def meta_llama(layers: int, hidden: int, vocabulary: int, *, checkpointing: bool = True) -> torch.nn.Module:
    """Return a bf16 Llama on the meta device; :func:`initialise` gives it values."""
    import transformers
    from transformers.models.llama.modeling_llama import LlamaForCausalLM, LlamaRotaryEmbedding

    config = transformers.LlamaConfig(
        hidden_size=hidden,
        intermediate_size=hidden * 11 // 4,
        num_hidden_layers=layers,
        num_attention_heads=hidden // 64,
        num_key_value_heads=hidden // 128,
        vocab_size=vocabulary,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).to(torch.bfloat16)
    model.model.rotary_emb = LlamaRotaryEmbedding(config)  # its buffers are computed, not loaded
    if checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
    return model.train()


def initialise(module: torch.nn.Module) -> None:
    """Give a module's own parameters random values."""
    for parameter in module.parameters(recurse=False):
        parameter.normal_(0.0, 0.02) if parameter.dim() > 1 else parameter.fill_(1.0)


def plain_step(
    model: torch.nn.Module, max_grad_norm: float, **options: Any
) -> tuple[Callable[[dict[str, Any]], float], torch.optim.Optimizer]:
    """Return a step of torch alone, which returns its loss, and its optimizer: the fused AdamW, with fp32 masters."""
    parameters = list(model.parameters())
    masters = [torch.nn.Parameter(parameter.detach().float()) for parameter in parameters]
    optimizer = torch.optim.AdamW(masters, **options, fused=True)

    def step(batch: dict[str, Any]) -> float:
        loss = model(**batch).loss
        loss.backward()
        for parameter, master in zip(parameters, masters, strict=True):
            assert parameter.grad is not None
            master.grad, parameter.grad = parameter.grad.float(), None
        torch.nn.utils.clip_grad_norm_(masters, max_grad_norm)
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(parameters, masters, strict=True):
                parameter.copy_(master)
        return float(loss.detach())

    return step, optimizer


def call_vector_functions() -> None:
    """Call one of MKL's vector functions in one thread, as making an engine does; see docs/numerics.md.

    Threads that share the first call of a process may get values with fewer digits.
    """
    torch.ones(1).cos()


def emit(path: str | None, result: dict[str, Any]) -> None:
    """Write `result` as JSON with machine and commit."""
    if path is None:
        return
    from offload.memory import machine

    result |= {"commit": machine.commit(), "machine": machine.describe()}
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
