"""Finds units in a module tree.

Owns the rule that groups parameters: elements of ``ModuleList``/``Sequential`` (transformer blocks, experts) are units,
what is left over (embeddings, norms, heads) are units too, and what is too large is split at its children. No
architecture is named. Knows torch modules only as a tree of parameters. Next: :mod:`offload.planning.planner`.
"""

from __future__ import annotations

import dataclasses
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
    return sum(p.numel() * _stored_dtype(p, dtype).itemsize for p in model.parameters())


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
    names: dict[int, str] = {}
    starts: dict[int, int] = {}  # global index of the first element
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
    if train:
        _refuse_shared_memory(model)

    total = model_bytes(model, dtype)
    groups: list[tuple[str, nn.Module, list[nn.Parameter]]] = []
    taken: set[int] = set()

    def fresh(module: nn.Module, *, recurse: bool) -> list[nn.Parameter]:
        return [p for p in module.parameters(recurse=recurse) if id(p) not in taken]

    def close_group(path: str, module: nn.Module, parameters: list[nn.Parameter]) -> None:
        if parameters:
            taken.update(id(p) for p in parameters)
            groups.append((path or type(model).__name__, module, parameters))

    def descend(module: nn.Module, path: str, *, element: bool) -> None:
        parameters = fresh(module, recurse=True)
        size = sum(p.numel() * _stored_dtype(p, dtype).itemsize for p in parameters)
        limit = max_unit_bytes if element else min(max_unit_bytes, total // LOOSE_SHARE)
        whole = size <= limit and not _is_list(module) and not any(map(_is_list, module.modules()))
        if whole or size * SMALL_SHARE <= total:
            close_group(path, module, parameters)
            return
        close_group(path, module, fresh(module, recurse=False))
        for name, child in module.named_children():
            descend(child, f"{path}.{name}" if path else name, element=_is_list(module))

    descend(model, "", element=False)

    units: list[Unit] = []
    members: list[list[nn.Parameter]] = []
    unit_of: dict[int, int] = {}
    roots: dict[nn.Module, list[int]] = {}
    for path, module, parameters in groups:
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
            unit_of.update((id(p), index) for p in part)

    leases: dict[nn.Module, tuple[int, ...]] = {}
    module_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if next(module.parameters(), None) is None:
            continue
        needed = [*roots.get(module, []), *(unit_of[id(p)] for p in module.parameters(recurse=False))]
        leases[module] = tuple(dict.fromkeys(needed))
        module_names[module] = name
    return UnitTree(units, members, leases, module_names)


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
