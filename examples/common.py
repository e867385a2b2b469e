"""What the examples share: the command line, a tiny model made from a configuration, and its data.

Nothing is downloaded. With ``--model DIR`` an example takes a real model of transformers and its tokenizer.
"""

from __future__ import annotations

import argparse
import os
import tempfile
from typing import Any

# Threads of OpenMP that wait spin for a while and then sleep, as in commands of offload. Read when torch is imported.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "100000")

import torch
import transformers
from tokenizers import Tokenizer, models, pre_tokenizers

WORDS = 200
ON_CPU = not torch.cuda.is_available()


def command_line(description: str | None) -> argparse.Namespace:
    """Return what the command line says; budgets are for the tiny model."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--model", metavar="DIR", help="a model of transformers; a tiny one is made without it")
    parser.add_argument("--nvme-path", metavar="DIR", help="on the drive to use; the system's temporary directory")
    parser.add_argument("--output", metavar="DIR", help="for checkpoints; a temporary directory")
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--device-memory", default="64MiB")
    parser.add_argument("--cpu-memory", default="64MiB")
    parser.add_argument("--nvme-memory", default="256MiB")
    given = parser.parse_args()
    given.output = given.output or tempfile.mkdtemp()
    return given


def options(given: argparse.Namespace) -> dict[str, Any]:
    """Return the engine's options: budgets, and parameters and states on the drive."""
    return {
        "max_memory": {"device": given.device_memory, "cpu": given.cpu_memory, "nvme": given.nvme_memory},
        "nvme_path": given.nvme_path or tempfile.gettempdir(),
        "offload_param": "nvme",
        "offload_optimizer": "nvme",
    }


def model(given: argparse.Namespace) -> Any:
    """Return the model."""
    torch.manual_seed(0)
    if given.model:
        return transformers.AutoModelForCausalLM.from_pretrained(given.model)
    return transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    )


def tokenizer(given: argparse.Namespace) -> Any:
    """Return the model's tokenizer; the tiny model's words are ``w3`` to ``w199``."""
    if given.model:
        return transformers.AutoTokenizer.from_pretrained(given.model)
    known = ["<pad>", "<unk>", "<eos>", *(f"w{number}" for number in range(3, WORDS))]
    words = Tokenizer(models.WordLevel({word: number for number, word in enumerate(known)}, unk_token="<unk>"))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=words, pad_token="<pad>", unk_token="<unk>", eos_token="<eos>"
    )


def sentences(count: int = 16) -> list[str]:
    """Return sentences of the tiny model's words, in which each word follows from the one before."""
    return [" ".join(f"w{3 + (start + 7 * step) % 97}" for step in range(12)) for start in range(count)]


def rows(given: argparse.Namespace) -> list[dict[str, torch.Tensor]]:
    """Return the sentences as a model takes them."""
    words = tokenizer(given)
    found = [words(sentence, return_tensors="pt").input_ids[0] for sentence in sentences()]
    length = min(map(len, found))  # a tokenizer of its own may not give all the same
    return [{"input_ids": ids[:length], "labels": ids[:length]} for ids in found]
