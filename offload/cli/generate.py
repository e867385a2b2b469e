"""The command ``offload generate``: a model, with adapters or without, continues a text within memory budgets.

Owns its options, and what it prints: the new text on standard output while it comes, its speed on standard error. Must
not import torch at the top, so that ``--help`` is quick. Next: :mod:`offload.cli.models`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import sys
import time
from collections.abc import Mapping
from dataclasses import field
from pathlib import Path
from typing import Any

from offload.cli.models import (
    load_engine,
    load_tokenizer,
    quiet_transformers,
    require_model,
    tokenizer_folder,
)
from offload.cli.options import option
from offload.errors import ConfigError

_text = functools.partial(option, "what to generate")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class GenerateSettings:
    """Options of the command.

    Raises:
        ConfigError: a value is out of range.
    """

    model: Path = field(metadata=_text("folder of the model and its tokenizer", "DIR"))
    adapter: Path | None = field(default=None, metadata=_text("folder of adapters that PEFT has saved", "DIR"))
    prompt: str = field(metadata=_text("text to continue; -: standard input", "TEXT"))
    chat: bool = field(default=False, metadata=_text("the prompt is a user's message; uses the chat template"))
    system: str | None = field(default=None, metadata=_text("the system's message before it", "TEXT"))
    chat_template: Path | None = field(
        default=None, metadata=_text("Jinja file in place of the model's own template", "FILE")
    )
    max_new_tokens: int = field(default=128, metadata=_text("length of the new text at most", "N"))
    temperature: float | None = field(
        default=None, metadata=_text("0: always the likeliest token (default: as the model's own settings say)", "T")
    )
    seed: int = field(default=0, metadata=_text("of what is drawn", "N"))

    def __post_init__(self) -> None:
        if self.max_new_tokens < 1:
            raise ConfigError(f"max_new_tokens: expected a whole number >= 1 but got {self.max_new_tokens}")
        if self.temperature is not None and not 0 <= self.temperature < float("inf"):
            raise ConfigError(f"temperature: expected a number >= 0 but got {self.temperature}")
        for name in ("system", "chat_template"):
            if getattr(self, name) is not None and not self.chat:
                raise ConfigError(f"{name}: expected chat beside it but got none; add --chat")

    def sampling(self) -> dict[str, Any]:
        """Return how tokens are chosen, as transformers takes it."""
        if self.temperature is None:
            return {}
        return {"do_sample": True, "temperature": self.temperature} if self.temperature else {"do_sample": False}


def run(settings: GenerateSettings, engine_options: Mapping[str, Any]) -> None:
    """Generate.

    Raises:
        OffloadError: a folder or an option cannot be used, or the budgets cannot hold the model.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    import torch

    require_model(settings.model)
    tokenizer = load_tokenizer(tokenizer_folder(settings.model, settings.adapter), settings.chat_template)
    from transformers import TextStreamer

    from offload.meta_models import positions_of

    inputs = _inputs(tokenizer, settings)
    engine = load_engine(settings.model, settings.adapter, dict(engine_options))
    with contextlib.closing(engine), quiet_transformers():
        most = _length(settings.max_new_tokens, inputs["input_ids"].shape[1], positions_of(engine.module))
        torch.manual_seed(settings.seed)
        given = {name: value.to(engine.device) for name, value in inputs.items()}
        begin = time.perf_counter()
        made = engine.generate(
            **given,
            max_new_tokens=most,
            streamer=TextStreamer(tokenizer, skip_prompt=True, skip_special_tokens=True),
            **settings.sampling(),
        )
        seconds = time.perf_counter() - begin
    count = made.shape[1] - given["input_ids"].shape[1]
    print(f"{count} tokens in {seconds:.1f} s: {count / seconds:.2f} tokens/s", file=sys.stderr)


def _length(asked: int, prompt: int, positions: int | None) -> int:
    """Return how many tokens a model can add to a prompt; says so if that is fewer than what is asked for.

    Raises:
        ConfigError: the prompt is longer than the table of positions.
    """
    if positions is None:
        return asked
    if prompt > positions:
        raise ConfigError(f"prompt: expected at most {positions} tokens, the model's positions, but got {prompt}")
    most = positions - prompt + 1  # nobody reads the last one
    if most < asked:
        print(f"at most {most} new tokens: the model has {positions} positions", file=sys.stderr)
    return min(asked, most)


def _inputs(tokenizer: Any, settings: GenerateSettings) -> dict[str, Any]:
    """Return the prompt's tokens and their mask, (1, tokens) int64 each."""
    prompt = sys.stdin.read() if settings.prompt == "-" else settings.prompt
    if not settings.chat:
        made = tokenizer(prompt, return_tensors="pt")
    else:
        from offload.cli.finetune.rendering import rendered

        if tokenizer.chat_template is None:
            raise ConfigError(
                f"model {settings.model}: expected a tokenizer with a chat template but it has none; pass "
                "--chat-template FILE, or leave --chat out"
            )
        system = [] if settings.system is None else [{"role": "system", "content": settings.system}]
        messages = [*system, {"role": "user", "content": prompt}]
        made = rendered(
            lambda: tokenizer.apply_chat_template(
                messages, add_generation_prompt=True, return_dict=True, return_tensors="pt"
            ),
            f"model {settings.model}",
        )
    if made["input_ids"].shape[1] == 0:
        raise ConfigError("prompt: expected text but it is empty; name what is to be continued")
    return {"input_ids": made["input_ids"], "attention_mask": made["attention_mask"]}
