"""Reads checkpoints that are files of ``torch.save``, and folders of the Hugging Face trainer and of Accelerate.

Owns where in them model and optimizer are, and which parameter has which number: torch numbers parameters in the order
of the param groups. Next: :mod:`offload.checkpoint.foreign.opening`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.foreign.files import FileTensor, read_safetensors
from offload.checkpoint.foreign.found import Facts, Found, Group
from offload.checkpoint.foreign.inert import read_torch_file
from offload.checkpoint.sources import Source, whole
from offload.errors import ConfigError

_MODEL_KEYS = ("model_state_dict", "model", "state_dict", "module", "net", "weights")
_OPTIMIZER_KEYS = ("optimizer_state_dict", "optimizer", "optimizer_states", "optim", "opt")
_SCHEDULER_KEYS = ("scheduler_state_dict", "lr_scheduler", "scheduler", "lr_schedulers")
# Each may be in several files, which an index lists; the last one is FSDP's in one file.
_WEIGHTS = ("model.safetensors", "pytorch_model.bin", "pytorch_model_fsdp.bin")
_OPTIMIZERS = ("optimizer.pt", "optimizer.bin")  # of the trainer, and of Accelerate
_SCHEDULERS = ("scheduler.pt", "scheduler.bin")
_SHARDS = "pytorch_model_fsdp_0"  # of both, under FSDP: a folder of torch.distributed.checkpoint


class NamesError(ConfigError):
    """An optimizer's parameters are numbered, and the names that were given are none, or not theirs."""


def read_file(path: Path, names: Sequence[Sequence[str]] | None) -> Found:
    """Return what a file of ``torch.save`` holds: a state dict, or a dict with those of a model and an optimizer.

    Args:
        path: the file.
        names: parameters by param group, in the optimizer's order; None where nobody knows; empty where an optimizer's
            state is not wanted.

    Raises:
        ConfigError: it holds neither, several of one kind, or an optimizer whose groups are not those of `names`.
    """
    return find_parts(path, "torch.save", read_torch_file(path), names)


def find_parts(path: Path, kind: str, content: Any, names: Sequence[Sequence[str]] | None) -> Found:
    """Return what a dict holds that somebody has made of state dicts; as :func:`read_file`.

    Raises:
        ConfigError: as :func:`read_file`.
    """
    if not isinstance(content, Mapping):
        raise ConfigError(f"{path}: expected a dict but got {type(content).__name__}; save state dicts")
    content = _with_inner(content)
    bare = _is_state_dict(content)  # the model's tensors lie at the top, or a loss lies beside model and optimizer
    models = {key: value for key, value in content.items() if key in _MODEL_KEYS} if bare else content
    model = _only(path, models, _MODEL_KEYS, _is_state_dict, "model's state dict")
    optimizer = _only(path, content, _OPTIMIZER_KEYS, _is_optimizer, "optimizer's state dict")
    if model is None and bare:
        if optimizer is None:
            return _found(path, content, None, names, Facts(kind))
        model = content
    if model is None:
        raise ConfigError(
            f"{path}: expected a model's state dict but got the keys {sorted(map(str, content))[:8]}; save "
            "{'model': model.state_dict(), 'optimizer': optimizer.state_dict()}"
        )
    step = _plain(next((content[key] for key in ("global_step", "step", "iteration") if key in content), None))
    epoch = content.get("epoch")
    facts = Facts(
        kind,
        global_step=step if isinstance(step, int) else None,
        epoch=epoch if isinstance(epoch, (int, float)) else None,
        scheduler=next((content[key] for key in _SCHEDULER_KEYS if key in content), None),
    )
    return _found(path, model, optimizer, names, facts)


def is_trainer_folder(folder: Path) -> bool:
    """Tell whether a folder is one that the Hugging Face trainer, or ``save_state`` of Accelerate, has saved."""
    return _first(folder, ("trainer_state.json", *_OPTIMIZERS)) is not None or (folder / _SHARDS).is_dir()


def read_trainer_folder(folder: Path, names: Sequence[Sequence[str]] | None) -> Found:
    """Return what a folder of the Hugging Face trainer, or of Accelerate, holds; as :func:`read_file`.

    Raises:
        ConfigError: a file is missing or damaged; the text names it.
    """
    if (second := _first(folder, ("model_1.safetensors", "pytorch_model_1.bin", "optimizer_1.bin"))) is not None:
        raise ConfigError(
            f"{folder}: expected one model and one optimizer but got {second.name}, too; put the files of one into a "
            "folder of their own, under the names of the first"
        )
    weights = read_weights(folder)
    optimizer = None
    if (file := _first(folder, _OPTIMIZERS)) is not None:
        optimizer = read_torch_file(file)
        if not _is_optimizer(optimizer):
            raise ConfigError(f"{file}: expected an optimizer's state dict; copy it again")
    state: Mapping[str, Any] = {}
    if (file := _first(folder, ("trainer_state.json",))) is not None:
        try:
            state = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"{file}: expected JSON but got: {error}; copy it again") from error
    schedule, random = _first(folder, _SCHEDULERS), _first(folder, ("rng_state.pth",))
    facts = Facts(
        "Accelerate" if not state and (folder / _OPTIMIZERS[1]).is_file() else "transformers.Trainer",
        global_step=state.get("global_step"),
        epoch=state.get("epoch"),
        scheduler=None if schedule is None else read_torch_file(schedule),
        rng=None if random is None else read_torch_file(random),
    )
    return _found(folder, weights, optimizer, names, facts)


def _first(folder: Path, names: Sequence[str]) -> Path | None:
    """Return the first of some files that a folder has."""
    return next((folder / name for name in names if (folder / name).is_file()), None)


def read_weights(folder: Path) -> dict[str, FileTensor]:
    """Return the weights that a folder has in one file or in several that an index lists.

    Raises:
        ConfigError: there are none, or a file is missing or damaged.
    """
    for name in _WEIGHTS:
        read = read_safetensors if name.endswith(".safetensors") else read_torch_file
        if (folder / name).is_file():
            return dict(read(folder / name))
        index = folder / f"{name}.index.json"
        if index.is_file():
            try:
                files = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
            except (OSError, ValueError, KeyError, AttributeError) as error:
                raise ConfigError(f"{index}: expected an index but got {type(error).__name__}: {error}") from error
            found: dict[str, FileTensor] = {}
            for file in files:
                if Path(file).name != file or not (folder / file).is_file():
                    raise ConfigError(f"{folder / str(file)}: expected a file that {index.name} lists; copy it, too")
                found.update(read(folder / file))
            return found
    if _first(folder, ("adapter_model.safetensors", "adapter_model.bin")) is not None:
        raise ConfigError(
            f"{folder}: expected the model's weights but got adapters of PEFT alone; resume the run from it with "
            "offload.hf.OffloadTrainer, or load them with PeftModel.from_pretrained before the engine is made"
        )
    if (folder / _SHARDS).is_dir():
        raise ConfigError(
            f"{folder}: expected the model's weights in one file but got shards of FSDP; import {folder / _SHARDS} "
            "with strict=False: it has the weights, without the optimizer's state"
        )
    raise ConfigError(
        f"{folder}: expected {' or '.join(_WEIGHTS[:2])}, or an index of it, but got neither; copy it, too"
    )


def _with_inner(content: Mapping[Any, Any]) -> Mapping[Any, Any]:
    """Return a dict together with the only one in it that has all: PyTorch's recipe for DCP has it in "app".

    Not one that has a model alone: weights of before, or averages, beside the model.
    """

    def has(value: Any, keys: Sequence[str], fits: Callable[[Any], bool]) -> bool:
        return isinstance(value, Mapping) and any(fits(value.get(key)) for key in keys)

    if has(content, _MODEL_KEYS, _is_state_dict) or any(map(_is_optimizer, content.values())):
        return content
    inner = [value for value in content.values() if has(value, _MODEL_KEYS, _is_state_dict)]
    whole = [value for value in inner if len(content) == 1 or has(value, _OPTIMIZER_KEYS, _is_optimizer)]
    return {**content, **whole[0]} if len(whole) == 1 else content


def _is_state_dict(value: Any) -> bool:
    return (
        isinstance(value, Mapping)
        and any(isinstance(item, Source) for item in value.values())
        and all(isinstance(name, str) for name in value)
        and not _is_optimizer(value)
    )


def _is_optimizer(value: Any) -> bool:
    if not isinstance(value, Mapping):
        return False
    return "param_groups" in value or any(isinstance(key, str) and key.startswith("param_groups.") for key in value)


def _only(path: Path, content: Mapping[Any, Any], keys: Sequence[str], fits: Any, what: str) -> Any:
    """Return the value that `fits`: under one of `keys`, or the only one."""
    values = {  # Lightning has lists, of one where there is one optimizer
        key: value[0] if isinstance(value, (list, tuple)) and len(value) == 1 else value
        for key, value in content.items()
    }
    found = [key for key, value in values.items() if fits(value)]
    usual = [key for key in found if key in keys]
    several = usual or found
    if len(several) > 1:
        raise ConfigError(f"{path}: expected one {what} but got {several}; save a file with the one to go on from")
    return values[several[0]] if several else None


def _found(
    path: Path,
    weights: Mapping[str, Any],
    optimizer: Mapping[str, Any] | None,
    names: Sequence[Sequence[str]] | None,
    facts: Facts,
) -> Found:
    tensors: dict[str, Source] = {name: value for name, value in weights.items() if isinstance(value, Source)}
    wanted = optimizer is not None and (names is None or len(names) > 0)
    groups, states = _by_name(path, optimizer, names) if wanted else ([], {})
    return Found(str(path), tensors, {}, states, groups, facts)


def _by_name(
    path: Path, optimizer: Any, names: Sequence[Sequence[str]] | None
) -> tuple[list[Group], dict[str, dict[str, Any]]]:
    """Return the groups and the states of an optimizer's state dict, which has numbers, by name.

    Raises:
        ConfigError: the groups are not those of `names`.
    """
    saved, numbered = _parts_of_optimizer(path, optimizer)
    own = [_names_in(group) for group in saved]
    if all(found is not None for found in own):
        names = [found for found in own if found is not None]
    if names is None:
        raise NamesError(
            f"{path}: expected names of the optimizer's parameters, which it numbers, but there are none; import it "
            "into an engine whose optimizer has the same groups, or make the optimizer with model.named_parameters()"
        )
    expected, got = [len(group) for group in names], [len(group["params"]) for group in saved]
    if expected != got:
        raise NamesError(
            f"{path}: expected param groups of {expected} parameters but got {got}; make the engine's optimizer with "
            "the groups that it was saved with, frozen parameters included"
        )
    name_of = {
        number: name
        for group, members in zip(saved, names, strict=True)
        for number, name in zip(group["params"], members, strict=True)
    }
    states: dict[str, dict[str, Any]] = {}
    for number, state in numbered.items():
        name = name_of.get(number)
        if name is None:
            raise ConfigError(f"{path}: expected states of parameters in the groups but got number {number!r}")
        if state:
            states[name] = {key: _small(value) for key, value in state.items()}
    groups = [
        Group(tuple(members), {k: _plain(v) for k, v in group.items() if k not in ("params", "param_names")})
        for group, members in zip(saved, names, strict=True)
    ]
    return groups, states


def _parts_of_optimizer(
    path: Path, optimizer: Mapping[str, Any]
) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Return an optimizer's groups, and its states by number or name, whichever way they were saved."""
    if "param_groups" not in optimizer:
        return _unflattened(optimizer)
    groups, states = optimizer["param_groups"], optimizer.get("state", {})
    if isinstance(groups, Mapping):  # torch.distributed.checkpoint has flattened a list
        groups = [groups[number] for number in sorted(groups, key=int)]
    if (
        not isinstance(groups, (list, tuple))
        or not all(isinstance(group, Mapping) and isinstance(group.get("params"), (list, tuple)) for group in groups)
        or not isinstance(states, Mapping)
        or not all(isinstance(state, Mapping) for state in states.values())
    ):
        raise ConfigError(f"{path}: expected an optimizer's 'state' and 'param_groups' as state_dict() returns them")
    if any(isinstance(number, int) for group in groups for number in group["params"]):
        states = {int(number): state for number, state in states.items()}  # they became text in a flattened dict
    return list(groups), states


def _unflattened(optimizer: Mapping[str, Any]) -> tuple[list[Mapping[str, Any]], Mapping[Any, Mapping[str, Any]]]:
    """Return groups and states of a dict with keys such as ``state.NAME.exp_avg`` and ``param_groups.NAME.lr``."""
    found: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for key, value in optimizer.items():
        kind, _, rest = key.partition(".")
        name, _, what = rest.rpartition(".")
        found.setdefault(kind, {}).setdefault(name, {})[what] = value
    groups: list[dict[str, Any]] = []
    for name, options in found["param_groups"].items():
        options = {what: value for what, value in options.items() if what not in ("params", "param_names")}
        group = next((one for one in groups if one["options"] == options), None)
        if group is None:
            groups.append(group := {"options": options, "params": []})
        group["params"].append(name)
    return [{**group["options"], "params": group["params"]} for group in groups], found["state"]


def _names_in(group: Mapping[str, Any]) -> list[str] | None:
    """Return the names of a saved group's parameters, if it has them."""
    found = group.get("param_names", group["params"])  # the former, if the optimizer was given named parameters
    return list(found) if len(found) == len(group["params"]) and all(isinstance(name, str) for name in found) else None


def _small(value: Any) -> Any:
    """Return a tensor of one element, such as a step, as it is in memory; what else there is as it is."""
    return whole(value) if isinstance(value, Source) and value.shape == () else value


def _plain(value: Any) -> Any:
    """Return an option, which may be a tensor (a learning rate), as a plain value."""
    value = _small(value)
    return value.item() if isinstance(value, torch.Tensor) else value
