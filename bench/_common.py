"""What the benches share: the model they run on, and how results are written."""

from __future__ import annotations

import json
import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch


def model_directory() -> Path:
    """Return where ``make prepare`` has put the real model."""
    cache = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"))
    return Path(os.environ.get("OFFLOAD_MODEL", cache / "offload" / "smollm2-135m"))


def load_model(*, tiny: bool) -> tuple[torch.nn.Module, int]:
    """Return the real 135 M model, or with `tiny` a random one of the same architecture; and its vocabulary size."""
    import transformers

    if not tiny and model_directory().exists():
        model = transformers.AutoModelForCausalLM.from_pretrained(model_directory(), dtype=torch.bfloat16)
        return model, model.config.vocab_size
    torch.manual_seed(0)
    sizes = (64, 128, 3, 256) if tiny else (576, 1536, 30, 49152)
    config = transformers.LlamaConfig(
        hidden_size=sizes[0],
        intermediate_size=sizes[1],
        num_hidden_layers=sizes[2],
        vocab_size=sizes[3],
        num_attention_heads=sizes[0] // 64 or 1,
        num_key_value_heads=max(sizes[0] // 192, 1),
        tie_word_embeddings=True,
    )
    return transformers.LlamaForCausalLM(config), sizes[3]


def emit(path: str | None, result: dict[str, Any]) -> None:
    """Write `result` as JSON with machine and commit."""
    if path is None:
        return
    here = Path(__file__).resolve().parent
    commit = subprocess.run(
        ["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=False
    ).stdout.strip()
    result |= {
        "commit": commit,
        "machine": {
            "cpu": _cpu(),
            "cores": os.cpu_count(),
            "kernel": platform.release(),
            "torch": torch.__version__,
        },
    }
    Path(path).write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


def _cpu() -> str:
    for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()
