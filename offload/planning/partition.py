"""Finds units in a module tree.

Owns the rule that groups parameters: elements of ``ModuleList``/``Sequential`` (transformer blocks, experts) are units,
what is left over (embeddings, norms, heads) are units too, and what is too large is split at its children. No
architecture is named. Knows torch modules only as a tree of parameters. Next: :mod:`offload.planning.planner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from itertools import pairwise

import torch
from torch import nn

from offload.errors import ConfigError
from offload.planning.units import Unit, aligned_numel, lay_out
from offload.torch_private import no_subclasses

SMALL_SHARE = 64  # modules below 1/64 of the model are not split further
LOOSE_SHARE = 8  # modules that are not elements of a list are split above 1/8 of the model
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True)
class UnitTree:
    """Units of a model and the modules that need them.

    Attributes:
        units: in model order.
        parameters: per unit, its parameters in the order of its slots.
        leases: per module (with parameters anywhere below it), the units its forward needs; may be empty.
        module_names: path of each of these modules.
    """

    units: list[Unit]
    parameters: list[list[nn.Parameter]]
    leases: dict[nn.Module, tuple[int, ...]]
    module_names: dict[nn.Module, str]

    def held_together(self, model: nn.Module, *, more_than: int) -> list[frozenset[int]]:
        """Return the sets of `more_than` units that are in use at once where each module calls those below it."""
        seen: set[tuple[nn.Module, frozenset[int]]] = set()

        def descend(module: nn.Module, above: frozenset[int]) -> None:
            held = above.union(self.leases.get(module, ()))
            if (module, held) not in seen:
                seen.add((module, held))
                for child in module.children():
                    descend(child, held)

        descend(model, frozenset())
        return sorted({held for _, held in seen if len(held) > more_than}, key=sorted)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def model_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of all parameters after the cast to `dtype`."""
    return _stored_bytes(model.parameters(), dtype)


def find_units(
    model: nn.Module,
    *,
    max_unit_bytes: int,
    dtype: torch.dtype | None = None,
    train: bool = True,
    whole: bool = False,
) -> UnitTree:
    """Group the parameters of `model` into units.

    Args:
        model: any module; it is not changed.
        max_unit_bytes: split modules with more parameter bytes than this where they have children.
        dtype: dtype that floating point parameters will be cast to; None keeps each one's.
        train: parameters that require a gradient get one; else all count as frozen.
        whole: trainable parameters are updated as a whole each.

    Raises:
        ConfigError: the model has no parameters, or a trainable one has a dtype that cannot be trained or shares its
            memory with another one.
    """
    names, starts = _number(model, dtype, train=train)
    if train:
        _refuse_shared_memory(model)
    units: list[Unit] = []
    members: list[list[nn.Parameter]] = []
    roots: dict[nn.Module, list[int]] = {}
    for path, module, parameters in _Groups(model, max_unit_bytes, dtype).found:
        kinds: dict[tuple[torch.dtype, bool], list[nn.Parameter]] = {}
        for parameter in parameters:
            trainable = train and parameter.requires_grad
            kinds.setdefault((_stored_dtype(parameter, dtype), trainable), []).append(parameter)
        for (stored, trainable), part in kinds.items():
            shapes = [(names[id(p)], tuple(p.shape)) for p in part]
            undivided = whole and trainable
            slots, numel = lay_out(shapes, [starts[id(p)] for p in part], whole=undivided)
            suffix = "" if len(kinds) == 1 else f" [{dtype_name(stored)}{'' if trainable else ', frozen'}]"
            index = len(units)
            units.append(
                Unit(index, path + suffix, dtype_name(stored), stored.itemsize, trainable, numel, slots, undivided)
            )
            members.append(part)
            roots.setdefault(module, []).append(index)
    unit_of = {id(p): index for index, part in enumerate(members) for p in part}
    leases: dict[nn.Module, tuple[int, ...]] = {}
    module_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if next(module.parameters(), None) is not None:
            needed = [*roots.get(module, []), *(unit_of[id(p)] for p in module.parameters(recurse=False))]
            leases[module] = tuple(dict.fromkeys(needed))
            module_names[module] = name
    return UnitTree(units, members, leases, module_names)


def _number(model: nn.Module, dtype: torch.dtype | None, *, train: bool) -> tuple[dict[int, str], dict[int, int]]:
    """Return the name of each parameter and the index of its first element in the model, by the parameter's id."""
    names: dict[int, str] = {}
    starts: dict[int, int] = {}
    end = 0
    for name, parameter in model.named_parameters():
        names[id(parameter)] = name
        starts[id(parameter)] = end
        end += aligned_numel(parameter.numel())
        stored = _stored_dtype(parameter, dtype)
        if train and parameter.requires_grad and stored not in TRAINABLE_DTYPES:
            raise ConfigError(
                f"parameter {name}: expected float32, bfloat16 or float16 to train but got {dtype_name(stored)}; "
                f'freeze it with requires_grad_(False) or pass dtype="float32"'
            )
    if not names:
        raise ConfigError(f"model {type(model).__name__}: expected parameters but it has none")
    return names, starts


class _Groups:
    """Parameters grouped by module: `found` has each group's path and module. A tied parameter is in the first."""

    def __init__(self, model: nn.Module, max_unit_bytes: int, dtype: torch.dtype | None) -> None:
        self.found: list[tuple[str, nn.Module, list[nn.Parameter]]] = []
        self._taken: set[int] = set()
        self._max_unit_bytes = max_unit_bytes
        self._dtype = dtype
        self._total_bytes = model_bytes(model, dtype)
        self._descend(model, "", element=False)

    def _descend(self, module: nn.Module, path: str, *, element: bool) -> None:
        size = _stored_bytes(self._fresh(module, recurse=True), self._dtype)
        limit = self._max_unit_bytes
        if not element:
            limit = min(limit, self._total_bytes // LOOSE_SHARE)
        whole = size <= limit and not any(map(_is_list, module.modules()))
        small = size * SMALL_SHARE <= self._total_bytes
        self._close(module, path, recurse=whole or small)
        if not (whole or small):
            for name, child in module.named_children():
                self._descend(child, f"{path}.{name}" if path else name, element=_is_list(module))

    def _fresh(self, module: nn.Module, *, recurse: bool) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse=recurse) if id(p) not in self._taken]

    def _close(self, module: nn.Module, path: str, *, recurse: bool) -> None:
        """Make a group of what no group has: with `recurse` of all below the module, else of its own."""
        parameters = self._fresh(module, recurse=recurse)
        if parameters:
            self._taken.update(id(p) for p in parameters)
            self.found.append((path or type(module).__name__, module, parameters))


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters on the same bytes: they would become two, and be trained apart."""
    ranges = []
    with no_subclasses():  # an engine's parameters, which are refused elsewhere, as they are
        for name, parameter in model.named_parameters():
            strides = zip(parameter.shape, parameter.stride(), strict=True)
            span = sum((size - 1) * stride for size, stride in strides) + 1
            if not parameter.is_meta and parameter.numel() == span:  # without gaps
                place = (str(parameter.device), parameter.data_ptr(), parameter.nbytes)
                ranges.append((*place, name, parameter.requires_grad))
    ranges.sort()
    for (device, begin, size, name, trained), (other_device, other_begin, _, other, other_trained) in pairwise(ranges):
        if device == other_device and other_begin < begin + size and (trained or other_trained):
            raise ConfigError(
                f"parameters {name} and {other}: expected memory of their own but they share it; tie them by making "
                "them one nn.Parameter, or clone one"
            )


def _is_list(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return isinstance(module, containers) and next(module.parameters(), None) is not None


def _stored_dtype(parameter: nn.Parameter, dtype: torch.dtype | None) -> torch.dtype:
    return dtype if dtype is not None and parameter.is_floating_point() else parameter.dtype


def _stored_bytes(parameters: Iterable[nn.Parameter], dtype: torch.dtype | None) -> int:
    return sum(p.numel() * _stored_dtype(p, dtype).itemsize for p in parameters)
