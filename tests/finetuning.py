"""A tiny model of transformers with a byte-level tokenizer, in a folder, as the commands take it."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

CHAT = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
MARKED = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{% if message['role'] == 'assistant' %}"
    "{% generation %}{{ message['content'] }}<|im_end|>\n{% endgeneration %}{% else %}"
    "{{ message['content'] }}<|im_end|>\n{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SHAPE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


def make_tokenizer(template: str | None = CHAT) -> Any:
    """Return a tokenizer of 256 letters and three special tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({letter: number for number, letter in enumerate(letters)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    made = PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|im_start|>"],
    )
    made.chat_template = template
    return made


def make_model_folder(
    folder: Path, template: str | None = CHAT, *, dtype: torch.dtype = torch.bfloat16, **shape: Any
) -> None:
    """Write a Llama of two layers, and its tokenizer."""
    from transformers import LlamaConfig, LlamaForCausalLM

    tokenizer = make_tokenizer(template)
    tokenizer.save_pretrained(folder)
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=len(tokenizer), eos_token_id=tokenizer.eos_token_id, **{**SHAPE, **shape})
    LlamaForCausalLM(config).to(dtype).save_pretrained(folder)


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]]) -> Path:
    """Write rows as the name of the file says; returns it."""
    if path.suffix == ".parquet":
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist([dict(row) for row in rows]), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def chats(count: int) -> list[dict[str, Any]]:
    """Return short chats of different lengths."""
    return [
        {
            "messages": [
                {"role": "user", "content": f"say {'ab' * (number % 5 + 1)}"},
                {"role": "assistant", "content": "ab" * (number % 7 + 1)},
            ]
        }
        for number in range(count)
    ]
