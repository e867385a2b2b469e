"""Where the values of a model's parameters are in a checkpoint, as ``from_pretrained`` of transformers has it.

transformers itself makes the model and says which tensor goes where: renamed, tied, split, joined, cast, initialised
where it is missing. But the tensors that it is given are deferred: no byte of the files is read, and what comes out
tells how each parameter is made. So there is no table of names here, and no architecture.

Owns the way from a folder to a model on the meta device and the :class:`Weights` of its parameters. Next:
:mod:`offload.checkpoint.loading` writes them home.
"""

from __future__ import annotations

import dataclasses
import logging
import os
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.checkpoint.deferred import DeferredTensor, Kept, Unread, uncast, whole
from offload.checkpoint.safetensors_files import FileReader, OpenFiles, find_tensors
from offload.classes import import_transformers, is_a
from offload.errors import ConfigError

logger = logging.getLogger(__name__)

ADAPTED = ".base_layer"  # part of a parameter's name that an adapter of PEFT has put there
_OTHER_FILES = ("variant", "subfolder", "gguf_file", "state_dict")  # options of transformers


@dataclasses.dataclass(frozen=True, slots=True)
class Weights:
    """Values for parameters and buffers of a model that lives as long as these.

    Attributes:
        parameters: by the parameter's id: in files, or in memory where they have been initialised.
        buffers: (module, name, value).
        files: that are read.
        kept: what was computed of them last.
    """

    parameters: dict[int, Unread | torch.Tensor]
    buffers: list[tuple[nn.Module, str, torch.Tensor]]
    files: OpenFiles
    kept: Kept

    def close(self) -> None:
        """Close the files. Idempotent."""
        self.kept.clear()
        self.files.close()


def read_pretrained(
    path: str | os.PathLike[str],
    kind: type | None,
    dtype: str | torch.dtype,
    options: Mapping[str, Any],
) -> tuple[nn.Module, Weights]:
    """Return the model of a checkpoint, its parameters on the meta device, and their values.

    Args:
        path: a folder with ``config.json`` and safetensors.
        kind: class of transformers, perhaps an ``Auto`` one; None takes what the config names.
        dtype: ``"auto"`` for the config's (or, without one, the files'); or a dtype.
        options: further arguments of ``from_pretrained``.

    Raises:
        ConfigError: the files or the config cannot be used, and names file and tensor; or transformers is not
            installed.
    """
    transformers = import_transformers()
    other = [name for name in _OTHER_FILES if options.get(name)]
    if options.get("use_safetensors") is False:
        other.append("use_safetensors=False")
    if other:
        raise ConfigError(
            f"model_options: expected none that names other files but got {', '.join(other)}; pass the folder of the "
            "safetensors that are to be read, as model.safetensors or shards with their index"
        )
    files, found = _deferred(path)
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(
            f"{path}: expected a config.json beside the weights but there is none; make the model yourself on the meta "
            "device, and pass weights= to offload.Engine"
        )
    rest: dict[str, Any] = dict(options)
    config = rest.pop("config", None)
    if config is None:
        config, rest = transformers.AutoConfig.from_pretrained(path, return_unused_kwargs=True, **rest)
    model, info = _load(_kind(kind, config, path, transformers), config, found, path, {**rest, "dtype": dtype})
    tell_differences(path, model, info)
    model.config.name_or_path = os.fspath(path)
    model.name_or_path = os.fspath(path)
    if model.can_generate() and (Path(path) / "generation_config.json").is_file():
        model.generation_config = transformers.GenerationConfig.from_pretrained(path)
    return model, _detached(model, files)


def find_weights(model: nn.Module, path: str | os.PathLike[str]) -> Weights:
    """Return the values of what the files have, and of what else a model has on the meta device.

    Raises:
        ConfigError: the files cannot be used, or have not what the model needs; names file and tensor.
    """
    files, found = _deferred(path)
    base: Any = next((part for part in model.modules() if is_a(part, "transformers", "PreTrainedModel")), None)
    if base is None:
        return _by_name(model, found, files, path)
    loaded, _ = _load(type(base), base.config, found, path, {"dtype": base.dtype})
    names = {name.replace(ADAPTED, ""): tensor for name, tensor in base.named_parameters(remove_duplicate=False)}
    weights = Weights({}, [], files, Kept())
    values = dict(loaded.named_parameters(remove_duplicate=False))
    for name, parameter in names.items():
        if parameter.is_meta or isinstance(values.get(name), DeferredTensor):
            value = _fitting(name, parameter, values.get(name), path)
            weights.parameters[id(parameter)] = _source(value, parameter.dtype, weights.kept)
    for name, parameter in model.named_parameters():
        if parameter.is_meta and id(parameter) not in weights.parameters:
            _fitting(name, parameter, None, path)
    buffers = dict(loaded.named_buffers(remove_duplicate=False))
    _add_buffers(base, buffers, weights, path)
    return weights


def _deferred(path: str | os.PathLike[str]) -> tuple[OpenFiles, dict[str, torch.Tensor]]:
    files = OpenFiles()
    found: dict[str, torch.Tensor] = {}
    for name, stored in find_tensors(path).items():
        form = torch.empty(stored.shape, dtype=stored.dtype, device="meta")
        found[name] = DeferredTensor(form, FileReader(files, stored))
    return files, found


def _kind(kind: type | None, config: Any, path: str | os.PathLike[str], transformers: Any) -> Any:
    """Return the class of the model."""
    if kind is None:
        names = getattr(config, "architectures", None) or []
        kind = getattr(transformers, names[0], None) if names else None
        if kind is None:
            raise ConfigError(
                f"{path}: expected a config.json whose architectures are classes of transformers but got {names}; pass "
                "cls= to offload.load_pretrained"
            )
    if hasattr(kind, "from_config"):  # an Auto class
        with torch.device("meta"):
            kind = type(kind.from_config(config))
    if not hasattr(kind, "from_pretrained") or not hasattr(kind, "config_class"):
        raise ConfigError(
            f"cls: expected a model class of transformers but got {getattr(kind, '__name__', kind)}; make another "
            "model on the meta device, and pass weights= to offload.Engine"
        )
    return kind


def tell_differences(path: str | os.PathLike[str], model: nn.Module, info: Mapping[str, Collection[str]]) -> None:
    """Log which tensors a folder and its model have not in common, as ``from_pretrained`` tells with the model."""
    missing, others = sorted(info["missing_keys"]), sorted(info["unexpected_keys"])
    name = type(model).__name__
    if missing:
        text = "%s: no file has the values of %s in %s (%d in all): they begin at random"
        logger.warning(text, path, missing[0], name, len(missing))
    if others:
        text = "%s: %s has no place for %s (%d in all): it is trained, and saved, without that"
        logger.warning(text, path, name, others[0], len(others))


def _load(
    kind: Any, config: Any, found: dict[str, torch.Tensor], path: str | os.PathLike[str], options: dict[str, Any]
) -> tuple[Any, Mapping[str, Collection[str]]]:
    """Let transformers load deferred tensors; returns the model, and what it has not in common with the files."""
    if getattr(config, "quantization_config", None) is not None:
        raise ConfigError(
            f"{path}: expected weights that are not quantized but config.json has a quantization_config; load it with "
            "from_pretrained, and pass it to offload.Engine"
        )
    if config.sub_configs.get("text_config") is kind.config_class is not None:  # as an Auto class does: of a part
        config = config.get_text_config()
    ignore = bool(options.pop("ignore_mismatched_sizes", False))
    model, report = kind.from_pretrained(
        None,
        config=config,
        state_dict=dict(found),
        ignore_mismatched_sizes=True,  # it would name no shape in its error
        output_loading_info=True,
        **options,
    )
    if report["mismatched_keys"] and not ignore:
        name, stored, expected = sorted(report["mismatched_keys"])[0]
        raise ConfigError(
            f"{path}: tensor {name}: expected shape {tuple(expected)} but got {tuple(stored)}, and so of "
            f"{len(report['mismatched_keys']) - 1} others; pass model_options={{'ignore_mismatched_sizes': True}} to "
            "offload.load_pretrained to initialise them anew"
        )
    return model, report


def _detached(model: Any, files: OpenFiles) -> Weights:
    """Put parameters on the meta device in the place of deferred ones."""
    weights = Weights({}, [], files, Kept())
    made: dict[int, nn.Parameter] = {}
    held: list[torch.Tensor] = []  # so that ids stay theirs
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if not isinstance(parameter, DeferredTensor):
                continue
            if id(parameter) not in made:
                form = torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")
                made[id(parameter)] = new = nn.Parameter(form, requires_grad=parameter.requires_grad)
                weights.parameters[id(new)] = _source(parameter, parameter.dtype, weights.kept)
                held.append(parameter)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if isinstance(buffer, DeferredTensor):
                module._buffers[name] = whole(buffer)
    return weights


def _source(value: torch.Tensor, dtype: torch.dtype, kept: Kept) -> Unread | torch.Tensor:
    """Return where the values of a parameter of `dtype` come from."""
    value = value.detach()
    if isinstance(value, DeferredTensor) and isinstance(value.source, torch.Tensor):
        value = value.source
    if value.dtype != dtype:
        value = uncast(value).to(dtype)  # not by way of a third dtype
    return Unread(value, kept) if isinstance(value, DeferredTensor) else value


def _by_name(
    model: nn.Module, found: Mapping[str, torch.Tensor], files: OpenFiles, path: str | os.PathLike[str]
) -> Weights:
    """Return the weights of a model that is not from transformers: tensor by tensor of the same name."""
    weights = Weights({}, [], files, Kept())
    names = {name for name, _ in (*model.named_parameters(remove_duplicate=False), *model.named_buffers())}
    unexpected = sorted(found.keys() - names)
    if unexpected:
        raise ConfigError(
            f"{path}: expected tensors of {type(model).__name__} but {unexpected[:5]} are none of its; pass the files "
            "of this model"
        )
    first: dict[int, str] = {}  # of tied ones, a file has one name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if name in found or id(parameter) not in first:
            first[id(parameter)] = name
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if first[id(parameter)] == name and (parameter.is_meta or name in found):
            value = _fitting(name, parameter, found.get(name), path)
            weights.parameters[id(parameter)] = _source(value, parameter.dtype, weights.kept)
    forms = dict(model.named_buffers())
    for name in sorted(model.state_dict().keys() & forms.keys()):
        if forms[name].is_meta:
            _fitting(name, forms[name], found.get(name), path)
    _add_buffers(model, {n: v.to(forms[n].dtype) for n, v in found.items() if n in forms}, weights, path)
    return weights


def _add_buffers(
    model: nn.Module, values: Mapping[str, torch.Tensor], weights: Weights, path: str | os.PathLike[str]
) -> None:
    """Note what files have of buffers that are saved, and what is known of those on the meta device.

    The others are the loader's to initialise if they are on the meta device; elsewhere they keep their content.
    """
    for prefix, module in model.named_modules():
        for name, buffer in module.named_buffers(prefix, recurse=False):
            value, key = values.get(name), name.rpartition(".")[2]
            read = isinstance(value, DeferredTensor) and key not in module._non_persistent_buffers_set
            if value is not None and (read or buffer.is_meta):
                value = whole(_fitting(name, buffer, value, path))  # rotary frequencies stay in fp32
                weights.buffers.append((module, key, value))


def _fitting(name: str, wanted: torch.Tensor, value: torch.Tensor | None, path: str | os.PathLike[str]) -> torch.Tensor:
    """Return a value, which has to be there and have the shape that is wanted.

    Raises:
        ConfigError: there is none, or one of another shape.
    """
    if value is None:
        raise ConfigError(
            f"{path}: expected a tensor for {name}, which is on the meta device, but it has none; make that parameter "
            "on the CPU: what no file has keeps its content"
        )
    if value.shape != wanted.shape:
        raise ConfigError(
            f"{path}: tensor {name}: expected shape {tuple(wanted.shape)} but got {tuple(value.shape)}; pass the files "
            "of this model"
        )
    return value
