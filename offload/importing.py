"""Compares what another program has saved of a run with a model and an optimizer, and loads it into a live engine.

Owns the comparison: which names, shapes, states and groups must fit. All of it is compared before anything is written.
The bytes then go through the loading of state dicts, range by range. Next:
:mod:`offload.checkpoint.foreign.opening`, which reads the files; :mod:`offload.converting` writes them as a checkpoint.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint.blank import make_blank
from offload.checkpoint.foreign.found import Facts, Found
from offload.checkpoint.foreign.opening import open_foreign
from offload.checkpoint.module_state import tensors_by_name
from offload.checkpoint.sources import PIECE_NUMEL, Converted, Source, numel_of, whole
from offload.distributed.together import Together
from offload.errors import ConfigError
from offload.life import Life
from offload.optim.rules import Rule

_MOST_NAMED = 5  # names in an error


class Trained(Protocol):
    """An optimizer that goes on.

    Attributes:
        param_groups: with the model's parameters.
        rule: of its steps.
        is_adamw: weight decay is decoupled.
    """

    @property
    def param_groups(self) -> Sequence[Mapping[str, Any]]: ...  # noqa: D102
    @property
    def rule(self) -> Rule: ...  # noqa: D102
    @property
    def is_adamw(self) -> bool: ...  # noqa: D102


@dataclasses.dataclass(frozen=True, slots=True)
class Fitting:
    """A checkpoint that fits a model and an optimizer.

    Attributes:
        weights: what the module is to be loaded with, by first names: masters where there are any, else weights; fp32
            for what is trained in 16 bits.
        packed: the optimizer's state dict, with numbers in the order of its groups; None where there is none to load.
        facts: the rest.
    """

    weights: dict[str, Any]
    packed: dict[str, Any] | None
    facts: Facts


def import_checkpoint(
    path: str | Path, module: nn.Module, parts: Parts, life: Life, *, strict: bool, states: bool = True
) -> Facts:
    """Load a checkpoint; see ``Engine.import_checkpoint``. Without `states`, the optimizer stays as it is."""
    with parts.hooks.deferral, Together(parts.ranks, "import_checkpoint") as together:
        with life.refilling(f"importing {path}", strict=strict and states) as again:
            return _import(path, module, parts, life, together, strict=strict, states=states, again=again)


def _import(
    path: str | Path,
    module: nn.Module,
    parts: Parts,
    life: Life,
    together: Together,
    *,
    strict: bool,
    states: bool,
    again: bool,
) -> Facts:
    manager, optimizer = life.require_open(), parts.steps.optimizer if states else None
    trained = {
        id(parameter): unit.dtype
        for unit, members in zip(parts.tree.units, parts.tree.parameters, strict=True)
        for parameter in (members if unit.trainable else ())
    }
    names = Names(module, trained)
    found = open_foreign(path, [] if optimizer is None else names.by_group(optimizer.param_groups))
    fitting = fit(names, found, optimizer, strict=strict)
    manager.tiers.refuse_leased(manager.units)
    has_states = fitting.packed is not None
    together.meet({"strict": strict, "the names of weights": str(sorted(fitting.weights)), "has states": has_states})
    if again:
        make_blank(manager, parts.steps.counts)
    if optimizer is not None and fitting.packed is not None:
        optimizer.load_state_dict(fitting.packed)  # it refuses before it writes
    manager.safe_point.check()
    parts.tensors.load(fitting.weights, strict=False)
    together.end()
    return fitting.facts


def fit(names: Names, found: Found, optimizer: Trained | None, *, strict: bool) -> Fitting:
    """Return what of a checkpoint is to be loaded; see ``Engine.import_checkpoint``.

    Raises:
        ConfigError: it does not fit.
    """
    found = names.unprefixed(found)
    weights = names.weights(found, strict=strict)
    packed = None if optimizer is None else _packed(names, optimizer, found, strict=strict)
    return Fitting(weights, packed, found.facts)


class Names:
    """Parameters and buffers of a module by all of their names."""

    def __init__(self, module: nn.Module, trained: Mapping[int, str]) -> None:
        """Look at a module; `trained` has the dtypes of parameters that are trained, by identity."""
        self._aliases: dict[int, list[str]] = {}  # by parameter
        self._parameters: dict[str, nn.Parameter] = {}
        for name, parameter in module.named_parameters(remove_duplicate=False):
            self._aliases.setdefault(id(parameter), []).append(name)
            self._parameters[name] = parameter
        self._buffers = {
            name: tensor for name, tensor in tensors_by_name(module).items() if name not in self._parameters
        }
        self._trained = {self._aliases[number][0]: dtype for number, dtype in trained.items()}

    def first(self, name: str) -> str:
        """Return the first name of a parameter, or the name that is no parameter's."""
        parameter = self._parameters.get(name)
        return name if parameter is None else self._aliases[id(parameter)][0]

    def of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's first name."""
        return self._aliases[id(parameter)][0]

    def by_group(self, groups: Sequence[Mapping[str, Any]]) -> list[list[str]]:
        """Return the names of an optimizer's parameters, in its order."""
        return [[self.of(parameter) for parameter in group["params"]] for group in groups]

    def unprefixed(self, found: Found) -> Found:
        """Return a checkpoint without what a wrapper of the model has put before all of its names."""
        own = self._parameters.keys() | self._buffers.keys()
        if found.weights.keys() & own:
            return found
        for prefix in ("module.", "_orig_mod.", "module._orig_mod.", "model."):
            cut = {name.removeprefix(prefix) for name in found.weights if name.startswith(prefix)}
            if len(cut) == len(found.weights) and cut & own:
                return _without(found, prefix)
        return found

    def weights(self, found: Found, *, strict: bool) -> dict[str, Any]:
        """Return what the module is to be loaded with: masters where there are any, else weights.

        Raises:
            ConfigError: names or shapes do not fit.
        """
        values: dict[str, Any] = {}
        missing, other = [], []
        masters = {self.first(name): master for name, master in found.masters.items()}
        for aliases in self._aliases.values():
            name = aliases[0]
            given = [found.weights[alias] for alias in aliases if alias in found.weights]
            if not given:
                missing.append(name)
                continue
            for one in given[1:]:
                _refuse_untied(found.path, aliases, given[0], one)
            value = masters.get(name, given[0]) if name in self._trained else given[0]
            for one in (value, given[0]):
                if tuple(one.shape) != tuple(self._parameters[name].shape):
                    other.append(f"{name}: {tuple(self._parameters[name].shape)} but got {tuple(one.shape)}")
                    break
            narrow = self._trained.get(name) in ("bfloat16", "float16")
            values[name] = Converted(value, torch.float32) if narrow else value  # a master is the value, exactly
        for name, buffer in self._buffers.items():
            content = found.weights.get(name)
            if content is None:
                missing.append(name)
            elif tuple(content.shape) != tuple(buffer.shape):
                other.append(f"{name}: {tuple(buffer.shape)} but got {tuple(content.shape)}")
            else:
                values[name] = whole(content)
        if other:
            raise ConfigError(
                f"{found.path}: expected shapes {'; '.join(other[:_MOST_NAMED])}; make the model as it was saved"
            )
        unexpected = sorted(found.weights.keys() - self._parameters.keys() - self._buffers.keys())
        if missing or unexpected:
            missing.sort()
            if strict or not values:
                remedy = ", or pass strict=False to ignore" if values else ": no name fits"
                raise ConfigError(
                    f"{found.path}: expected the model's names but {missing[:_MOST_NAMED]} are missing, unexpected "
                    f"{unexpected[:_MOST_NAMED]}; make the model as it was saved{remedy}"
                )
            warnings.warn(
                f"import_checkpoint: {found.path} lacks {len(missing)} of the model's tensors, which stay as they are: "
                f"{missing[:_MOST_NAMED]}; {len(unexpected)} others are left out: {unexpected[:_MOST_NAMED]}",
                stacklevel=6,
            )
        return values

    def states(self, found: Found, optimizer: Trained, *, strict: bool) -> dict[str, dict[str, Any]]:
        """Return the optimizer's states by first names.

        Raises:
            ConfigError: they are of another optimizer, or of parameters that this one has not.
        """
        trained = {name for group in self.by_group(optimizer.param_groups) for name in group}
        result: dict[str, dict[str, Any]] = {}
        unexpected = []
        for name, state in found.states.items():
            kept = {key: value for key, value in state.items() if value is not None}
            if not kept.keys() - {"step"}:
                if optimizer.rule.names or "step" not in kept:
                    continue
            first = self.first(name)
            if first not in trained or first not in self._trained:
                unexpected.append(name)
                continue
            _refuse_kind(found.path, name, kept, optimizer, self._parameters[name].shape)
            placed = optimizer.rule.names
            result[first] = {
                key: whole(value) if isinstance(value, Source) and key not in placed else value
                for key, value in kept.items()
            }
        if unexpected:
            unexpected.sort()
            if strict:
                raise ConfigError(
                    f"{found.path}: expected states of what the engine's optimizer trains but got those of "
                    f"{unexpected[:_MOST_NAMED]}, too; train them, or pass strict=False to leave them out"
                )
            warnings.warn(
                f"import_checkpoint: {found.path} has states of {len(unexpected)} parameters that the optimizer does "
                f"not train; they are left out: {unexpected[:_MOST_NAMED]}",
                stacklevel=7,
            )
        return result


def _packed(names: Names, optimizer: Trained, found: Found, *, strict: bool) -> dict[str, Any] | None:
    """Return an optimizer's state dict, with numbers as the engine's has them; None where there is none to load.

    Raises:
        ConfigError: it does not fit the engine's optimizer.
    """
    if not found.groups:
        if strict:
            raise ConfigError(
                f"{found.path}: expected an optimizer's state but it has weights alone; pass strict=False to load "
                "these and keep the optimizer's state"
            )
        warnings.warn(
            f"import_checkpoint: {found.path} has weights alone; the optimizer's state stays as it is", stacklevel=6
        )
        return None
    states = names.states(found, optimizer, strict=strict)
    options_of = {names.first(name): group.options for group in found.groups for name in group.names}
    groups, packed, number = [], {}, 0
    by_group = names.by_group(optimizer.param_groups)
    for position, (group, members) in enumerate(zip(optimizer.param_groups, by_group, strict=True)):
        saved = [options_of[name] for name in members if name in options_of]
        for one in saved[1:]:
            if one is not saved[0] and dict(one) != dict(saved[0]):
                raise ConfigError(
                    f"{found.path}: expected the options of param group {position} to be the same for all of its "
                    "parameters but got several; make the engine's optimizer with the groups that it was saved with"
                )
        options = _options(found.path, optimizer, group, saved[0] if saved else {})
        numbers = list(range(number, number + len(members)))
        number += len(members)
        groups.append({**options, "params": numbers})
        packed.update({at: states[name] for at, name in zip(numbers, members, strict=True) if name in states})
    result: dict[str, Any] = {"state": packed, "param_groups": groups}
    taken = found.facts.taken
    if taken is None:
        taken = max((int(state["step"]) for state in states.values() if "step" in state), default=None)
    if taken is not None:
        result["run"] = found.facts.run(taken)
    return result


def _options(path: str, optimizer: Trained, group: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group's options: the saved ones that mean something here, the group's own for the rest.

    Raises:
        ConfigError: a saved one asks for another step.
    """
    if saved.get("bias_correction") is False:
        raise ConfigError(
            f"{path}: expected Adam with bias correction but got bias_correction=False; train it elsewhere"
        )
    if optimizer.is_adamw and saved.get("decoupled_weight_decay") is False and saved.get("weight_decay"):
        raise ConfigError(
            f"{path}: expected decoupled weight decay, of AdamW, but got Adam with weight_decay="
            f"{saved['weight_decay']!r}; make the engine with offload.Adam"
        )
    known = {*group, "initial_lr", *optimizer.rule.refused, "decoupled_weight_decay"} - {"params", "param_names"}
    own = {key: value for key, value in group.items() if key != "params"}
    return own | {key: value for key, value in saved.items() if key in known}


def _refuse_kind(path: str, name: str, state: Mapping[str, Any], optimizer: Trained, shape: Sequence[int]) -> None:
    """Refuse a parameter's state that is another optimizer's."""
    rule = optimizer.rule
    expected, got = set(rule.names), state.keys() - {"step"}
    others = {key for key in got - expected if isinstance(state[key], Source) and numel_of(state[key]) > 1}
    lacking = expected - got if rule.own is None else set()
    if others or lacking:
        raise ConfigError(
            f"{path}: expected the states {sorted(expected)} of {name} but got {sorted(got)}; make the engine with the "
            "optimizer, and its options, that was saved"
        )
    for key in sorted(expected & got):
        value = state[key]
        if tuple(value.shape) != tuple(shape):
            raise ConfigError(
                f"{path}: expected {key} of {name} in shape {tuple(shape)} but got {tuple(value.shape)}; make the "
                "optimizer with the groups, in the order, that it was saved with"
            )


def _refuse_untied(path: str, aliases: Sequence[str], first: Source, other: Source) -> None:
    """Refuse two values for one parameter."""
    if first == other or first.shape != other.shape:
        return
    for start in range(0, numel_of(first), PIECE_NUMEL):
        stop = min(start + PIECE_NUMEL, numel_of(first))
        if not torch.equal(first.read(start, stop), other.read(start, stop)):
            raise ConfigError(
                f"{path}: expected one value for {' and '.join(aliases)}, which the model ties, but got several; untie "
                "them in the model, as they were when it was saved"
            )


def _without(found: Found, prefix: str) -> Found:
    """Return a checkpoint with names that lack their beginning."""

    def shorter(values: Mapping[str, Any]) -> dict[str, Any]:
        return {name.removeprefix(prefix): value for name, value in values.items()}

    return dataclasses.replace(
        found,
        weights=shorter(found.weights),
        masters=shorter(found.masters),
        states=shorter(found.states),
        groups=[
            dataclasses.replace(group, names=tuple(name.removeprefix(prefix) for name in group.names))
            for group in found.groups
        ],
    )
