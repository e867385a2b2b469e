"""Adapters of PEFT that a fine-tuning run trains beside the frozen model.

Owns the way from options to PEFT's configuration, whose defaults hold for what is not given. Next:
:mod:`offload.integrations.peft` merges adapters.
"""

from __future__ import annotations

from typing import Any

from offload.cli.finetune.settings import FinetuneError, Settings
from offload.cli.models import as_in_memory


def with_adapters(model: Any, settings: Settings) -> Any:
    """Return a model of transformers with the adapters that the settings ask for; itself if they ask for none.

    Raises:
        FinetuneError: PEFT is not installed, or cannot put such adapters on the model.
    """
    if settings.peft is None:
        return model
    try:
        from peft import LoraConfig, get_peft_model
    except ImportError as error:
        raise FinetuneError("peft: peft is not installed; pip install 'offload[finetune]'") from error
    given = {"r": settings.lora_rank, "lora_alpha": settings.lora_alpha, "target_modules": _targets(settings)}
    options: Any = {name: value for name, value in given.items() if value is not None}
    try:
        with as_in_memory(model):
            return get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", **options))
    except ValueError as error:
        raise FinetuneError(
            f"peft: cannot put adapters on {type(model).__name__}: {error}; name modules with --lora-targets, or all "
            "linear ones with --lora-targets all-linear"
        ) from error


def _targets(settings: Settings) -> list[str] | str | None:
    """Return the modules' names, split where commas are between them; PEFT knows one word for all linear ones."""
    if settings.lora_targets is None:
        return None
    names = [name for given in settings.lora_targets for name in given.split(",") if name]
    return names[0] if names == ["all-linear"] else names
