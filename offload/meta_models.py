"""Language models of transformers without weights: of a name, a folder, a file or a config.

Owns what such words stand for, the errors where they stand for nothing, and how long a model's sequences may be. Next:
:mod:`offload.predicting` plans for these models; :mod:`offload.known_models` has the shapes.
"""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.activations.causal_loss import chunk_loss
from offload.classes import import_transformers
from offload.errors import ConfigError, did_you_mean
from offload.known_models import KNOWN
from offload.module.recomputing import blocks_of

KEPT_BLOCKS = 2  # of a model that is shortened
_OTHER_MODELS = "AutoModelForSeq2SeqLM", "AutoModelForSpeechSeq2Seq", "AutoModelForImageTextToText"


def made_on_meta(model: Any, *, checkpointing: bool, chunked: bool) -> nn.Module:
    """Return a model of transformers on the meta device, in 16 bits if its config names nothing else.

    Args:
        model: a known name, a folder with config.json, that file, or a config of transformers.
        checkpointing: it computes activations again in backward, if it can.
        chunked: its loss forms the logits by chunks.

    Raises:
        ConfigError: it is none of these, or transformers cannot make a language model of it, or is not installed.
    """
    transformers = import_transformers()

    if isinstance(model, (str, os.PathLike)):
        model = _config_of(model)
    if not isinstance(model, transformers.PretrainedConfig):
        raise ConfigError(f"model: expected a module, a config of transformers, a folder or a name but got {model!r}")
    if getattr(model, "quantization_config", None) is not None:
        raise ConfigError(
            f"model {type(model).__name__}: expected weights that are not quantized but it has a quantization_config; "
            "load it with from_pretrained, and pass the module"
        )
    made = _made(model, getattr(model, "dtype", None) or torch.bfloat16)
    if checkpointing and made.supports_gradient_checkpointing:
        compute_again(made)
    for config in (made.config, getattr(made.config, "text_config", made.config)):
        config.use_cache = False
    if chunked:
        chunk_loss(made)
    return made.train()  # type: ignore[no-any-return]


def names_dtype(model: Any) -> bool:
    """Tell whether a config, or the folder, file or known name of one, says in what its weights are."""
    if isinstance(model, (str, os.PathLike)) and _is_known(model):
        return True
    config = _config_of(model) if isinstance(model, (str, os.PathLike)) else model
    return getattr(config, "dtype", None) is not None


def _made(config: Any, dtype: torch.dtype) -> Any:
    """Return the language model of a config: of an encoder beside a decoder, both; of one that sees images, all of it.

    Raises:
        ConfigError: there is none.
    """
    transformers = import_transformers()

    config = copy.deepcopy(config)  # models write into theirs
    names = [] if getattr(config, "is_encoder_decoder", False) else ["AutoModelForCausalLM"]
    why, cause = "is no language model of transformers", None
    order = [*names, *_OTHER_MODELS]
    if hasattr(config, "text_config"):  # else transformers makes of some models only what reads text
        order.reverse()
    for name in order:
        kind: Any = getattr(transformers, name, None)  # older versions have fewer
        if kind is None:
            continue
        try:
            with torch.device("meta"):
                return kind.from_config(config, dtype=dtype, trust_remote_code=False)
        except Exception as error:  # of each model's own class, too
            _refuse_code(type(config).__name__, error)
            if isinstance(error, ValueError) and "Unrecognized configuration class" in str(error):
                continue
            why, cause = " ".join(str(error).split()), error
            break
    raise ConfigError(
        f"model {type(config).__name__}: {why}; correct the config, or make the module yourself on the meta device, "
        "and pass it"
    ) from cause


def shortened(model: nn.Module) -> nn.Module:
    """Return a model with the first few of the blocks that repeat: a batch holds no more at once than with all of them.

    Args:
        model: of :func:`made_on_meta`; it is changed.
    """
    blocks = {id(block) for _, block in blocks_of(model)}
    for inner in list(model.modules()):
        if isinstance(inner, nn.ModuleList) and any(id(block) in blocks for block in inner):
            del inner[KEPT_BLOCKS:]
    return model


def _config_of(model: str | os.PathLike[str]) -> Any:
    """Return the config of transformers that a known name, a folder or a file stands for.

    Raises:
        ConfigError: it stands for none, or transformers does not know the model.
    """
    transformers = import_transformers()

    if _is_known(model):
        shapes = dict(KNOWN[str(model).lower()])
        return transformers.AutoConfig.for_model(shapes.pop("model_type"), **shapes)
    file = Path(model) if os.path.isfile(model) else Path(model) / "config.json"
    if not os.path.isfile(file):
        raise ConfigError(
            f"model {os.fspath(model)}: expected a folder with config.json that may be read, such a file, or the name "
            f"of a known model{did_you_mean(str(model), KNOWN)}; known: {', '.join(KNOWN)}"
        )
    try:
        return transformers.AutoConfig.from_pretrained(file, trust_remote_code=False)
    except Exception as error:  # of each model's own class, too
        _refuse_code(os.fspath(model), error)
        raise ConfigError(
            f"model {os.fspath(model)}: expected a config that transformers can read but got: "
            f"{' '.join(str(error).split())}; correct the file"
        ) from error


def _is_known(model: str | os.PathLike[str]) -> bool:
    """Tell whether this is a known name. A folder with config.json is that model, whatever its name."""
    return isinstance(model, str) and model.lower() in KNOWN and not os.path.isfile(Path(model) / "config.json")


def _refuse_code(model: str, error: Exception) -> None:
    """Raise another error, if `error` says that a model comes with code of its own."""
    if "trust_remote_code" in str(error):
        raise ConfigError(
            f"model {model}: expected a model that is part of transformers but it comes with code of its own, which no "
            "plan runs; make the module on the meta device, and pass it to offload.plan"
        ) from error


def compute_again(model: Any) -> None:
    """Let a model of transformers compute activations again in backward; older versions have another name for it."""
    enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
    enable({"use_reentrant": False})


def positions_of(model: Any) -> int | None:
    """Return how many positions a model of transformers has in a table; None if it computes them: they have no end.

    Of one that sees images, too, it is not known: the table may be of the images.
    """
    most = getattr(model.config, "max_position_embeddings", None)
    if most is None or not getattr(model.config, "position_biased_input", True):  # DeBERTa may have distances alone
        return None
    words = model.get_input_embeddings()
    for module in model.modules():
        if isinstance(module, nn.Embedding) and module is not words and most <= module.num_embeddings <= most + 2:
            skipped = 0 if module.padding_idx is None else module.padding_idx + 1
            return min(int(most), module.num_embeddings - skipped)
    return int(most) if any(one.dim() == 2 and one.shape[0] == most for one in model.buffers()) else None
