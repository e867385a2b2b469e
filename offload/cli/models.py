"""Models of Hugging Face, as the commands load them: offline, from a folder, with a tokenizer or adapters beside.

Owns what is said where a folder is not what it should be. Heavy libraries are imported where they are used. Next:
:mod:`offload.checkpoint.pretrained` reads a checkpoint without the model in memory.
"""

from __future__ import annotations

import contextlib
import json
import math
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from offload.classes import import_transformers
from offload.cli.heavy import is_quantized, quantization_of
from offload.errors import ConfigError, OffloadError

if TYPE_CHECKING:
    import torch
    from transformers import PreTrainedTokenizerBase

    from offload.checkpoint.pretrained import Weights
    from offload.engine import Engine

ADAPTER_FILES = ("adapter_model.safetensors", "adapter_model.bin")
WEIGHT_FILES = ("model.safetensors", "pytorch_model.bin")  # in the order in which transformers looks for them
WIDER_BYTES = {"F8_E4M3": 1, "F8_E5M2": 1, "U8": 3, "I8": 3}  # more per byte, in bf16; integers are two of 4 bits
TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt")
LEAVE_THE_MODEL = (True, False, "gaussian", "eva", "orthogonal")  # ways to initialise LoRA


def require_model(folder: Path) -> None:
    """Refuse a folder that is no model.

    Raises:
        ConfigError: it is none.
    """
    if not (folder / "config.json").is_file():
        raise ConfigError(f"model {folder}: expected a folder with config.json, as save_pretrained writes it")


def tokenizer_folder(model: Path, adapter: Path | None) -> Path:
    """Return where the tokenizer is: beside the adapters if there is one, else beside the model."""
    if adapter is not None and (adapter / "tokenizer_config.json").is_file():
        return adapter
    return model


def load_tokenizer(folder: Path, chat_template: Path | None = None) -> PreTrainedTokenizerBase:
    """Load a tokenizer from a folder, offline.

    Args:
        folder: where it is.
        chat_template: a Jinja file in place of its own template.

    Raises:
        ConfigError: it or the template cannot be loaded, or transformers is not installed.
    """
    transformers = import_transformers()
    if not any((folder / name).is_file() for name in TOKENIZER_FILES):
        raise ConfigError(
            f"model {folder}: expected a tokenizer beside the model but there is none; copy tokenizer.json and "
            "tokenizer_config.json of the model into the folder"
        )
    try:
        tokenizer: PreTrainedTokenizerBase = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # the library tokenizers raises this very class
        raise ConfigError(f"model {folder}: its tokenizer cannot be loaded: {' '.join(str(error).split())}") from error
    if chat_template is not None:
        try:
            tokenizer.chat_template = chat_template.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"chat_template {chat_template}: cannot be read: {error}") from error
    return tokenizer


def read_causal_model(folder: Path) -> tuple[torch.nn.Module, Weights | None]:
    """Return a causal language model, its parameters on the meta device, and where their values are.

    If transformers alone can read the files, quantized ones or pickles, their values are in memory, and None comes
    with the model.

    Args:
        folder: of the model: config.json and weights.

    Raises:
        ConfigError: it cannot be loaded, or has to be in memory and does not fit there.
    """
    from transformers import AutoModelForCausalLM

    from offload.checkpoint.pretrained import read_pretrained, tell_differences

    with _told(folder):
        whole = _why_whole(folder)
        if whole is None:
            return read_pretrained(folder, AutoModelForCausalLM, "auto", {})
        _require_memory(folder, whole)
        options: dict[str, Any] = {"dtype": "auto", "local_files_only": True, "output_loading_info": True}
        if _method_of(folder) == "bitsandbytes":
            options["device_map"] = "cpu"  # without it the whole model is on the GPU first, whatever the budgets
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
        tell_differences(folder, model, info)
        return model, None


@contextlib.contextmanager
def _told(folder: Path) -> Iterator[None]:
    """Raise what transformers and its quantizers refuse as an error of the model's folder.

    Raises:
        ConfigError: the ``with`` block cannot load the model.
    """
    from swap.errors import SwapError  # which is not there without the extensions: doctor says so

    try:
        yield
    except (OffloadError, SwapError):
        raise
    except (OSError, ValueError, ImportError, RuntimeError) as error:
        raise ConfigError(f"model {folder}: cannot be loaded: {' '.join(str(error).split())}") from error


def _why_whole(folder: Path) -> str | None:
    """Return why a model has to be in memory as a whole; None if it has not."""
    if is_quantized(folder):
        return "its weights are quantized"
    return None if any(folder.glob("*.safetensors")) else "its weights are not in safetensors"


def _require_memory(folder: Path, why: str) -> None:
    """Refuse a model that does not fit memory.

    Raises:
        ConfigError: it does not.
    """
    from offload.memory.limits import free_host_bytes
    from offload.sizes import format_bytes

    files, free = _files_of(folder), free_host_bytes()
    size = sum(path.stat().st_size for path in files)
    if _is_dequantized(folder):
        size += sum(_wider_bytes(path) for path in files if path.suffix == ".safetensors")
        why += ", and transformers dequantizes them here"
    if size > free:
        raise ConfigError(
            f"model {folder}: expected {format_bytes(size)} of free memory, where all of it has to be because {why}, "
            f"but got {format_bytes(free)}; where there is more, save it once as save_pretrained does, in safetensors "
            "that are not quantized: such a model may be larger than memory"
        )


def _files_of(folder: Path) -> list[Path]:
    """Return the files that transformers reads weights from; others may be beside them, with the same weights."""
    for name in WEIGHT_FILES:
        index = folder / f"{name}.index.json"
        if (folder / name).is_file():
            return [folder / name]
        if index.is_file():
            return [folder / shard for shard in set(json.loads(index.read_bytes())["weight_map"].values())]
    return []


def _method_of(folder: Path) -> str | None:
    """Return what has quantized a model, as transformers calls it; None where nothing has."""
    how = quantization_of(folder)
    if how is None:
        return None
    return "bitsandbytes" if how.get("load_in_4bit") or how.get("load_in_8bit") else how.get("quant_method")


def _is_dequantized(folder: Path) -> bool:
    """Tell whether transformers makes ordinary weights of quantized ones, for want of what computes with these."""
    method = _method_of(folder)
    if method not in ("fp8", "mxfp8"):
        return method == "mxfp4"  # but for kernels that few have
    from transformers.quantizers import AutoHfQuantizer

    quantizer = AutoHfQuantizer.from_config(quantization_of(folder), pre_quantized=True)
    quantizer.validate_environment()
    return bool(getattr(quantizer.quantization_config, "dequantize", False))


def _wider_bytes(file: Path) -> int:
    """Return by how much the tensors of a file grow when they are dequantized."""
    import safetensors

    with safetensors.safe_open(file, "pt") as opened:
        parts = map(opened.get_slice, opened.keys())
        return sum(math.prod(part.get_shape()) * WIDER_BYTES.get(part.get_dtype(), 0) for part in parts)


def load_engine(folder: Path, adapter: Path | None, options: dict[str, Any]) -> Engine:
    """Return an engine that evaluates a model whose weights go straight into its tiers.

    Quantized ones are in memory before.

    Args:
        folder: of the model: config.json and safetensors.
        adapter: folder that PEFT has saved; None for the model alone.
        options: of :class:`offload.Config`.

    Raises:
        ConfigError: a folder is not what it should be, or a library is not installed.
        BudgetError: the budgets cannot hold the model.
        swap.SwapError: the NVMe path is missing, not writable, or full.
    """
    from offload.config import Config
    from offload.engine import Engine

    require_model(folder)
    config = Config.load(options)
    with quiet_transformers():
        model, weights = _read(folder, adapter)
        with _told(folder), contextlib.nullcontext() if weights is None else contextlib.closing(weights):
            return Engine(model, None, config, weights=weights)


def _read(folder: Path, adapter: Path | None) -> tuple[Any, Weights | None]:
    """Return a model, with adapters if there are some, and where its values are.

    It is of the class that config.json names. If the adapters do not fit that one, it is what ``finetune`` reads, which
    may be a part of it.

    Raises:
        ConfigError: a folder is not what it should be.
    """
    from transformers import AutoModelForCausalLM

    if is_quantized(folder):
        model, weights = read_causal_model(folder)
        return model if adapter is None else _adapted(model, weights, adapter), weights
    refusals = []
    for kind in (None, AutoModelForCausalLM):
        try:
            return _read_as(kind, folder, adapter)
        except ConfigError as error:
            refusals.append(error)
    raise refusals[0]


def _read_as(kind: type | None, folder: Path, adapter: Path | None) -> tuple[Any, Weights]:
    """Return a model of a class, with adapters if there are some, and where its values are."""
    from offload.checkpoint.pretrained import read_pretrained

    with _told(folder), contextlib.ExitStack() as files:
        model, weights = read_pretrained(folder, kind, "auto", {})
        files.callback(weights.close)
        adapted = model if adapter is None else _adapted(model, weights, adapter)
        files.pop_all()
        return adapted, weights


def _adapted(model: Any, weights: Weights | None, adapter: Path) -> Any:
    """Return a model with adapters, which are in memory; the model's own parameters stay on the meta device."""
    try:
        from peft import PeftConfig
    except ImportError as error:
        raise ConfigError(f"adapter {adapter}: peft is not installed; pip install peft") from error
    if not (adapter / "adapter_config.json").is_file() or not any((adapter / name).is_file() for name in ADAPTER_FILES):
        raise ConfigError(
            f"adapter {adapter}: expected a folder with adapter_config.json and {ADAPTER_FILES[0]}, as PEFT saves it"
        )
    try:
        return _with_values(model, weights, PeftConfig.from_pretrained(str(adapter), inference_mode=True), adapter)
    except (OSError, ValueError, KeyError, RuntimeError, TypeError, AttributeError) as error:
        lines = [line.strip() for line in str(error).splitlines()] or [repr(error)]
        raise ConfigError(
            f"adapter {adapter}: cannot be put on the model in {model.name_or_path}: {' '.join(lines[:2])}"
        ) from error


def _with_values(model: Any, weights: Weights | None, config: Any, adapter: Path) -> Any:
    """Return a model with the adapters that a folder has.

    If it has embeddings, too, as PEFT saves those that are adapted, their values are noted in `weights`.

    Raises:
        ValueError: the folder has other tensors, or its adapters change the model's own parameters when they are made.
    """
    from peft import get_peft_model, get_peft_model_state_dict, set_peft_model_state_dict
    from peft.utils import load_peft_weights

    initialised = getattr(config, "init_lora_weights", True)
    if initialised not in LEAVE_THE_MODEL:
        raise ValueError(
            f"init_lora_weights={initialised!r} changes the model's own weights, too; load both with "
            "PeftModel.from_pretrained, and pass the model to offload.Engine"
        )
    with as_in_memory(model):
        adapted = get_peft_model(model, config)
    values = load_peft_weights(str(adapter), device="cpu")
    names = get_peft_model_state_dict(adapted, save_embedding_layers=False).keys()
    own = dict(adapted.named_parameters(remove_duplicate=False))
    embeddings = (values.keys() - names) & own.keys()
    others = sorted((names ^ values.keys()) - embeddings)
    if others:
        raise ValueError(f"{len(others)} tensors are missing or unexpected, such as {others[0]}")
    for name in embeddings:
        if own[name].shape != values[name].shape:
            raise ValueError(
                f"tensor {name}: expected shape {tuple(own[name].shape)} but got {tuple(values[name].shape)}; call "
                "resize_token_embeddings, then PeftModel.from_pretrained, and pass the model to offload.Engine"
            )
        if weights is not None:
            weights.parameters[id(own[name])] = values.pop(name).to(own[name].dtype)
    set_peft_model_state_dict(adapted, values)
    return adapted.eval()


@contextlib.contextmanager
def as_in_memory(model: torch.nn.Module) -> Iterator[None]:
    """Let parameters on the meta device be on the CPU meanwhile, without memory of their own.

    PEFT makes adapters where the model is, and looks at nothing but shapes and dtypes. What it makes of
    ``requires_grad`` stays.
    """
    import torch

    from offload.module.binding import stand_in

    away: list[tuple[torch.nn.Module, str, torch.nn.Parameter]] = []
    instead: dict[int, torch.nn.Parameter] = {}  # one for those that are tied
    for module in model.modules():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            if parameter.is_meta:
                form = stand_in(tuple(parameter.shape), parameter.dtype, torch.device("cpu"))
                made = instead.setdefault(id(parameter), torch.nn.Parameter(form, parameter.requires_grad))
                away.append((module, name, parameter))
                module.register_parameter(name, made)
    try:
        yield
    finally:
        for module, name, parameter in away:
            parameter.requires_grad_(instead[id(parameter)].requires_grad)
            module.register_parameter(name, parameter)


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """Keep progress bars, and what these libraries have to tell each other, off the command's own lines.

    Raises:
        ConfigError: transformers is not installed.
    """
    import_transformers()
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    bars = transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", FutureWarning)
            yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()
