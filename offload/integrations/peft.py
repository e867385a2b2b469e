"""The door of PEFT: adapters are merged while the checkpoint of a model that is larger than memory is written.

PEFT's own code merges copies of one layer at a time. Owns these copies, and the names that the tensors get. The engine,
its model and its drive stay as they are. Next: :mod:`offload.checkpoint.deferred`, the tensors that are made late.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import dataclasses
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import torch
from torch import nn

from offload.activations.tiling import join_tiles
from offload.checkpoint.deferred import DeferredTensor
from offload.checkpoint.unread_state import SHARD_BYTES, in_one_form, warn_of_shard
from offload.classes import package_of
from offload.config import DtypeName
from offload.engine import Engine
from offload.errors import ConfigError
from offload.integrations.dequantizing import (
    dequantized,
    form_of,
    has_quantized,
    is_quantized,
    ordinary_class,
    saved_as_ordinary,
)
from offload.integrations.libraries import require
from offload.memory.budget import Tier

require("peft", "0.21", door="offload.peft")
from peft import PeftMixedModel, PeftModel  # noqa: E402
from peft.tuners.tuners_utils import BaseTuner, BaseTunerLayer  # noqa: E402
from peft.utils import AuxiliaryTrainingWrapper  # noqa: E402

LOAD_PLAIN = "load the base model in 16 bits, put the adapters on it with PeftModel.from_pretrained, and merge there"


def merge_and_save(
    engine: Engine,
    directory: str | Path,
    *,
    adapter_names: Sequence[str] | None = None,
    safe_merge: bool = False,
    dequantize: DtypeName | None = None,
    max_shard_size: int | str = SHARD_BYTES,
    **kwargs: Any,
) -> None:
    """Save the model as ``merge_and_unload().save_pretrained(directory)`` would, bit by bit; training may go on after.

    A layer is merged on the CPU when its part of a file is written. Beside what the engine has, host memory takes one
    file of `max_shard_size`, and one layer three times. Nothing is written to the tiers.

    Args:
        engine: on a model of transformers with adapters, made by ``peft.get_peft_model`` or loaded.
        directory: for the checkpoint.
        adapter_names: the adapters to merge, as for ``merge_and_unload``; None for the active ones.
        safe_merge: let PEFT refuse weights that are not finite.
        dequantize: ``"bfloat16"``, ``"float16"`` or ``"float32"``: save layers with weights of 4 or 8 bits as ordinary
            ones of that dtype, as PEFT merges and saves them after transformers' ``dequantize``. Other layers keep
            their dtype. Adapters may be those of LoRA, DoRA, AdaLoRA and IA3. With None, such weights are refused.
        max_shard_size: bytes of a file, at most.
        **kwargs: further arguments of ``save_pretrained``.

    Raises:
        ConfigError: the model has no adapters that can be merged, or weights that are quantized, without
            `dequantize`.
        StateError: the engine is closed.
        ValueError: with `safe_merge`, PEFT has found weights that are not finite.
    """
    base = _adapted(engine.module)
    dtype = _dtype(dequantize)
    _refuse_quantized(base, dtype)
    state = _merged_state(engine, base, _Merge(adapter_names, safe_merge, dtype))
    total_bytes = sum(value.nbytes for value in state.values() if isinstance(value, torch.Tensor))
    warn_of_shard(max_shard_size, total_bytes, engine.plan.request.budgets[Tier.HOST])
    with in_one_form(directory), _as_untied(base, state), saved_as_ordinary(base):
        base.save_pretrained(directory, state_dict=state, max_shard_size=max_shard_size, **kwargs)


def _adapted(module: nn.Module) -> Any:
    """Return the model of transformers inside one with adapters; refuse what cannot be merged."""
    inner = module.base_model if isinstance(module, (PeftMixedModel, PeftModel)) else module
    if not isinstance(inner, BaseTuner):
        raise ConfigError(
            f"merge_and_save: expected a PeftModel with adapters in its layers but got a {type(module).__name__} "
            "without any; save it with engine.save_pretrained"
        )
    base: Any = inner.model
    if not any(isinstance(part, (BaseTunerLayer, AuxiliaryTrainingWrapper)) for part in base.modules()):
        raise ConfigError(
            "merge_and_save: expected adapters but they are merged and unloaded already; save what merge_and_unload "
            "returned with its own save_pretrained"
        )
    if not hasattr(base, "save_pretrained"):
        raise ConfigError(
            f"merge_and_save: expected a model of transformers but got {type(base).__name__}, which has no "
            "save_pretrained; call engine.module.merge_and_unload(), and save its state_dict()"
        )
    return base


def _dtype(name: DtypeName | None) -> torch.dtype | None:
    """Return the dtype of a name."""
    if name is not None and name not in get_args(DtypeName):
        raise ConfigError(f"dequantize: expected one of {', '.join(get_args(DtypeName))} but got {name!r}")
    return None if name is None else getattr(torch, name)


def _refuse_quantized(base: Any, dtype: torch.dtype | None) -> None:
    """Refuse quantized weights, unless they are to be saved in a floating dtype and their adapters can be merged."""
    names = [name for name, parameter in base.named_parameters() if is_quantized(parameter)]
    if not names and getattr(base.config, "quantization_config", None) is not None:
        raise ConfigError(
            "merge_and_save: expected ordinary weights, or those of bitsandbytes or torchao, but the model has a "
            f"quantization_config and none of them; {LOAD_PLAIN}"
        )
    if dtype is None:
        for name in names[:1]:
            raise ConfigError(
                f"merge_and_save: expected weights that adapters can be added to exactly but {name} is quantized by "
                f'{package_of(type(base.get_parameter(name)))}; pass dequantize="bfloat16" to merge into its '
                f"elements in that dtype, or {LOAD_PLAIN}"
            )
        return
    adapted: list[tuple[str, Any]] = [pair for pair in base.named_modules() if isinstance(pair[1], BaseTunerLayer)]
    for path, layer in adapted:
        if any(map(is_quantized, layer.parameters())) and ordinary_class(layer) is None:
            raise ConfigError(
                f"merge_and_save: expected adapters of LoRA, AdaLoRA or IA3 on quantized weights but {path} is of "
                f"class {type(layer).__module__}.{type(layer).__name__}; {LOAD_PLAIN}"
            )


def _merged_state(engine: Engine, base: nn.Module, merge: _Merge) -> dict[str, Any]:
    """Return the state dict of the model with merged layers, which are made when somebody needs their bytes."""
    layers = dict(_layers(base))
    changed: dict[int, DeferredTensor] = {}  # by the identity of the parameter
    inside = {path: _merged_layer(layer, merge, changed) for path, layer in layers.items()}
    parameters = {name: id(value) for name, value in base.state_dict(keep_vars=True).items()}
    state: dict[str, Any] = {}
    for name, value in engine.deferred_state_dict(base).items():
        path = next((path for path in layers if name.startswith(f"{path}.")), None)
        if path is None:
            state[name] = changed.get(parameters[name], value)
        else:
            state.update({f"{path}.{own}": tensor for own, tensor in inside.pop(path, {}).items()})
    return join_tiles(base, state)


def _merged_layer(layer: nn.Module, merge: _Merge, changed: dict[int, DeferredTensor]) -> dict[str, Any]:
    """Return the state dict of a merged layer, and note the parameters that merging changes in `changed`."""
    memo: dict[int, nn.Parameter] = {}
    form = _form(layer, memo, merge.dtype)
    original = {id(twin): identity for identity, twin in memo.items()}
    found: dict[str, Any] = {}
    for name, value in form.state_dict(keep_vars=True).items():
        if not isinstance(value, torch.Tensor) or not value.is_meta:
            found[name] = value.detach() if isinstance(value, torch.Tensor) else value
            continue
        like = torch.empty(value.shape, dtype=value.dtype, device="meta")
        made = DeferredTensor(like, _MergedReader(layer, name, merge))
        found[name] = changed.setdefault(original.get(id(value), id(made)), made)
    merge.note(layer, original.values() & changed.keys())
    return join_tiles(form, found)  # of a tiled layer that PEFT has put into a wrapper


def _layers(module: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that PEFT has put in the place of others, or that are quantized, with their names."""
    for name, child in module.named_children():
        below = f"{path}.{name}" if path else name
        if has_quantized(child) or isinstance(child, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            yield below, child
        else:
            yield from _layers(child, below)


ValueOf = Callable[[str, nn.Parameter, nn.Module], torch.Tensor]


class _Merge:
    """How layers are merged; has the last ones that were."""

    def __init__(self, adapter_names: Sequence[str] | None, safe: bool, dtype: torch.dtype | None) -> None:
        self.dtype = dtype  # of weights that are quantized; None where there are none
        self._how = {"safe_merge": safe, "adapter_names": None if adapter_names is None else list(adapter_names)}
        self._groups: dict[nn.Module, list[nn.Module]] = {}  # layers that share a parameter, in the model's order
        self._first: dict[int, nn.Module] = {}  # layer of a parameter, by the parameter's identity
        self._states: dict[nn.Module, dict[str, Any]] = {}

    def note(self, layer: nn.Module, parameters: Iterable[int]) -> None:
        """Note the parameters that merging a layer changes: layers that share one are merged together."""
        group = self._groups.setdefault(layer, [layer])
        for identity in parameters:
            other = self._groups[self._first.setdefault(identity, layer)]
            if other is not group:
                other.extend(group)
                self._groups.update(dict.fromkeys(group, other))
                group = other

    def state_of(self, layer: nn.Module) -> dict[str, Any]:
        """Return the state dict of a layer in whose place the merged one is."""
        if layer not in self._states:
            self._states = {}  # first: there may be no room for two
            memo: dict[int, nn.Parameter] = {}
            merged = {each: self._unloaded(each, memo) for each in self._groups[layer]}
            self._states = {each: module.state_dict() for each, module in merged.items()}
        return self._states[layer]

    def _unloaded(self, layer: nn.Module, memo: dict[int, nn.Parameter]) -> nn.Module:
        """Return a layer's twin on copies in host memory, merged, without adapters."""
        values = layer.state_dict()

        def value_of(name: str, parameter: nn.Parameter, module: nn.Module) -> torch.Tensor:
            if self.dtype is not None and has_quantized(module):
                return dequantized(parameter, module, values[name], self.dtype)
            return values[name].data  # type: ignore[no-any-return]

        twin: Any = _twin(layer, value_of, memo)
        if not isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
            return twin  # type: ignore[no-any-return]
        with torch.no_grad():
            if hasattr(twin, "unload_and_optionally_merge_module"):
                return twin.unload_and_optionally_merge_module(merge=True, **self._how)  # type: ignore[no-any-return]
            twin.merge(**self._how)
            return twin.get_base_layer()  # type: ignore[no-any-return]


def _form(layer: nn.Module, memo: dict[int, nn.Parameter], dtype: torch.dtype | None) -> nn.Module:
    """Return a layer's twin without adapters and without elements; quantized weights have `dtype`."""

    def value_of(name: str, parameter: nn.Parameter, module: nn.Module) -> torch.Tensor:
        if dtype is not None and has_quantized(module):
            return form_of(parameter, dtype)
        return torch.empty(parameter.shape, dtype=parameter.dtype, device="meta")

    twin: Any = _twin(layer, value_of, memo)
    if not isinstance(layer, (BaseTunerLayer, AuxiliaryTrainingWrapper)):
        return twin  # type: ignore[no-any-return]
    if hasattr(twin, "unload_and_optionally_merge_module"):
        how = {"merge": False, "safe_merge": False, "adapter_names": None}
        return twin.unload_and_optionally_merge_module(**how)  # type: ignore[no-any-return]
    return twin.get_base_layer()  # type: ignore[no-any-return]


@dataclasses.dataclass(frozen=True, slots=True)
class _MergedReader:
    """Has the elements of one tensor of a merged layer."""

    layer: nn.Module
    name: str
    merge: _Merge

    def read(self, begin: int, end: int, address: int) -> None:
        """Write elements [begin, end), in order, to `address`.

        Raises:
            swap.SwapError: an I/O error.
        """
        values = self.merge.state_of(self.layer)[self.name].contiguous()
        size = values.element_size()
        ctypes.memmove(address, values.data_ptr() + begin * size, (end - begin) * size)


def _twin(module: nn.Module, value_of: ValueOf, memo: dict[int, nn.Parameter], path: str = "") -> nn.Module:
    """Return a module like this one, with parameters of its own and no hooks; a shared parameter stays shared.

    One with quantized weights is an ordinary one instead.

    Args:
        module: whose twin it is.
        value_of: returns what the twin of a parameter holds, by its name, itself and its module.
        memo: twins of parameters, by the parameters' identities.
        path: of the module, with a dot behind it.
    """
    twin = copy.copy(module)
    if any(map(is_quantized, module.parameters(recurse=isinstance(module, BaseTunerLayer)))):
        twin.__class__ = ordinary_class(module)  # type: ignore[assignment]
        for name in ("fan_in_fan_out", "is_target_conv_1d_layer"):  # PEFT's layers on quantized weights lack them
            vars(twin).setdefault(name, False)
    for name, value in vars(module).items():
        if "_hooks" in name and isinstance(value, dict):
            vars(twin)[name] = type(value)()
        elif isinstance(value, (dict, list, set)):
            vars(twin)[name] = copy.copy(value)
    for name, child in module._modules.items():
        if child is not None:
            setattr(twin, name, _twin(child, value_of, memo, f"{path}{name}."))
    for name, parameter in module._parameters.items():
        if parameter is not None:
            if id(parameter) not in memo:
                memo[id(parameter)] = nn.Parameter(value_of(path + name, parameter, module), requires_grad=False)
            setattr(twin, name, memo[id(parameter)])
    return twin


@contextlib.contextmanager
def _as_untied(base: Any, state: dict[str, Any]) -> Iterator[None]:
    """Let the saved configuration say that input and output embeddings are two, where adapters have made them so."""
    config: Any = getattr(base, "config", None)
    found = [_weight_of(base, state, method) for method in ("get_input_embeddings", "get_output_embeddings")]
    if not getattr(config, "tie_word_embeddings", False) or None in found or found[0] is found[1]:
        yield
        return
    warnings.warn(
        "merge_and_save: input and output embeddings differ with the adapters; the saved configuration has "
        "tie_word_embeddings=False",
        stacklevel=4,
    )
    config.tie_word_embeddings = False
    try:
        yield
    finally:
        config.tie_word_embeddings = True


def _weight_of(base: Any, state: dict[str, Any], method: str) -> Any:
    """Return the weight of the module that a method of the model returns, in the merged state."""
    with contextlib.suppress(NotImplementedError, AttributeError):
        wanted = getattr(base, method)()
        for path, module in base.named_modules():
            if module is wanted:
                return state.get(f"{path}.weight")
    return None
