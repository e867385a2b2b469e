"""Shapes of models that people train, by name: of plain numbers, a plan can be made without any file.

Owns the numbers. Sources: ``config.json`` of each model as its makers publish it. transformers makes modules of them.
"""

from __future__ import annotations

from typing import Any


def _llama(hidden: int, inner: int, layers: int, heads: int, shared: int, vocabulary: int) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": inner,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": shared,
        "vocab_size": vocabulary,
        "max_position_embeddings": 131072,
        "tie_word_embeddings": False,
    }


def _mixtral(hidden: int, inner: int, layers: int, heads: int, vocabulary: int) -> dict[str, Any]:
    experts = {"num_local_experts": 8, "num_experts_per_tok": 2, "sliding_window": None}
    return _llama(hidden, inner, layers, heads, 8, vocabulary) | {"model_type": "mixtral"} | experts


def _qwen3(hidden: int, inner: int, layers: int, heads: int, *, tied: bool) -> dict[str, Any]:
    sizes = _llama(hidden, inner, layers, heads, 8, 151936)
    return sizes | {"model_type": "qwen3", "head_dim": 128, "tie_word_embeddings": tied}


def _qwen3_moe(hidden: int, inner: int, layers: int, heads: int, shared: int) -> dict[str, Any]:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": inner, "decoder_sparse_step": 1}
    sizes = _qwen3(hidden, inner, layers, heads, tied=False) | {"num_key_value_heads": shared}
    return sizes | {"model_type": "qwen3_moe", "mlp_only_layers": []} | experts


KNOWN: dict[str, dict[str, Any]] = {
    "llama-2-7b": _llama(4096, 11008, 32, 32, 32, 32000),
    "llama-2-13b": _llama(5120, 13824, 40, 40, 40, 32000),
    "llama-3.2-1b": _llama(2048, 8192, 16, 32, 8, 128256) | {"tie_word_embeddings": True, "head_dim": 64},
    "llama-3.1-8b": _llama(4096, 14336, 32, 32, 8, 128256),
    "llama-3.1-70b": _llama(8192, 28672, 80, 64, 8, 128256),
    "llama-3.1-405b": _llama(16384, 53248, 126, 128, 8, 128256),
    "mistral-7b": _llama(4096, 14336, 32, 32, 8, 32768) | {"model_type": "mistral", "sliding_window": None},
    "mixtral-8x7b": _mixtral(4096, 14336, 32, 32, 32000),
    "mixtral-8x22b": _mixtral(6144, 16384, 56, 48, 32768),
    "qwen3-8b": _qwen3(4096, 12288, 36, 32, tied=False),
    "qwen3-14b": _qwen3(5120, 17408, 40, 40, tied=False),
    "qwen3-32b": _qwen3(5120, 25600, 64, 64, tied=False),
    "qwen3-30b-a3b": _qwen3_moe(2048, 768, 48, 32, 4),
    "qwen3-235b-a22b": _qwen3_moe(4096, 1536, 94, 64, 4),
}
