"""Finds units in a module tree.

Owns the rule that groups parameters: elements of ``ModuleList``/``Sequential`` (transformer blocks, experts) are units,
what is left over (embeddings, norms, heads) are units too, and what is too large is split at its children. No
architecture is named. Knows torch modules only as a tree of parameters. Next: :mod:`offload.planning.planner`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import nn

from offload.classes import is_a
from offload.errors import ConfigError
from offload.planning.units import Unit, Where, aligned_numel, lay_out
from offload.torch_private import no_subclasses
from offload.wrappers import Shell, inner_tensors, is_wrapper, leaves, take_apart

REFERENCE = "(reference)"  # before the names of a reference model's modules; no attribute is called so
SMALL_SHARE = 64  # modules below 1/64 of the model are not split further, unless they are made to come apart
LOOSE_SHARE = 8  # modules that are not elements of a list are split above 1/8 of the model
TRAINABLE_DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclasses.dataclass(frozen=True, slots=True)
class Wrapper:
    """A frozen parameter that is made of inner tensors, each of which has a slot.

    Attributes:
        name: path in the model.
        parameter: itself.
        shell: what it is, with the places of its inner tensors.
    """

    name: str
    parameter: nn.Parameter
    shell: Shell[Where]

    @property
    def places(self) -> list[Where]:
        """Where its inner tensors are."""
        return [where for _, where in self.shell.items()]


@dataclasses.dataclass(frozen=True)
class UnitTree:
    """Units of a model and the modules that need them.

    Attributes:
        units: in model order.
        parameters: per unit, its parameters in the order of its slots; the inner tensors of wrappers count as such.
        leases: per module (with parameters anywhere below it), the units its forward needs; may be empty.
        module_names: path of each of these modules.
        wrappers: parameters that are made of inner tensors.
    """

    units: list[Unit]
    parameters: list[list[nn.Parameter]]
    leases: dict[nn.Module, tuple[int, ...]]
    module_names: dict[nn.Module, str]
    wrappers: tuple[Wrapper, ...] = ()

    def describe_wrappers(self) -> dict[str, Any]:
        """Return how each wrapper is made of its inner tensors, by name, as JSON has it; not of a reference model.

        Raises:
            ConfigError: the class of one keeps something else than plain values.
        """
        own = [wrapper for wrapper in self.wrappers if not self.units[wrapper.places[0][0]].reference]
        return {wrapper.name: wrapper.shell.described() for wrapper in own}

    def names(self) -> dict[int, str]:
        """Return what each parameter of the model, and each inner tensor, is called, by identity."""
        found = {id(wrapper.parameter): wrapper.name for wrapper in self.wrappers}
        for unit, members in zip(self.units, self.parameters, strict=True):
            found.update((id(member), slot.name) for member, slot in zip(members, unit.slots, strict=True))
        return found

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


class WithReference(nn.Module):
    """A model and its reference model as one tree, in which the model's names are what they are without the other."""

    def __init__(self, model: nn.Module, reference: nn.Module) -> None:
        """Put the models together.

        Args:
            model: the one that trains.
            reference: another one, of which nothing requires a gradient.
        """
        super().__init__()
        self.model, self.reference = model, reference

    def named_children(self) -> Iterator[tuple[str, nn.Module]]:
        """Yield both models."""
        yield "", self.model
        yield REFERENCE, self.reference

    def named_modules(
        self, memo: set[nn.Module] | None = None, prefix: str = "", remove_duplicate: bool = True
    ) -> Iterator[tuple[str, nn.Module]]:
        """Yield the modules of the model, and then those of the reference model."""
        memo = set() if memo is None else memo
        for name, model in self.named_children():
            yield from model.named_modules(memo, prefix + name, remove_duplicate)


def dtype_name(dtype: torch.dtype) -> str:
    """Return ``"bfloat16"`` for ``torch.bfloat16``."""
    return str(dtype).removeprefix("torch.")


def model_bytes(model: nn.Module, dtype: torch.dtype | None) -> int:
    """Return the bytes of all parameters after the cast to `dtype`."""
    return _stored_bytes(leaves(model.parameters()), dtype)


def find_units(
    model: nn.Module,
    *,
    max_unit_bytes: int,
    dtype: torch.dtype | None = None,
    train: bool = True,
    whole: bool = False,
    ranks: int = 1,
    slices_frozen: bool = False,
) -> UnitTree:
    """Group the parameters of `model` into units.

    Args:
        model: any module, or one :class:`WithReference`; it is not changed.
        max_unit_bytes: split modules with more parameter bytes than this where they have children.
        dtype: dtype that floating point parameters will be cast to; None keeps each one's.
        train: parameters that require a gradient get one; else all count as frozen.
        whole: trainable parameters are updated as a whole each.
        ranks: how many share the gradients and states of a trainable unit.
        slices_frozen: they may share a frozen one, too.

    Raises:
        ConfigError: the model has no parameters, or a trainable one has a dtype that cannot be trained or shares its
            memory with another one.
    """
    names, starts = _number(model, dtype, train=train)
    if train:
        _refuse_shared_memory(model)
    units: list[Unit] = []
    members: list[list[Any]] = []
    roots: dict[nn.Module, list[int]] = {}
    for path, module, parameters in _Groups(model, max_unit_bytes, dtype).found:
        kinds: dict[tuple[torch.dtype, bool], list[torch.Tensor]] = {}
        reference = path.partition(".")[0] == REFERENCE
        for parameter in parameters:
            trainable = train and parameter.requires_grad
            kinds.setdefault((_stored_dtype(parameter, dtype), trainable), []).append(parameter)
        for (stored, trainable), part in kinds.items():
            shapes = [(names[id(p)], tuple(p.shape)) for p in part]
            undivided = whole and trainable
            shared = ranks if trainable or slices_frozen else 1
            slots, numel = lay_out(shapes, [starts[id(p)] for p in part], whole=undivided, ranks=shared)
            suffix = "" if len(kinds) == 1 else f" [{dtype_name(stored)}{'' if trainable else ', frozen'}]"
            index, name, size = len(units), dtype_name(stored), stored.itemsize
            unit = Unit(index, path + suffix, name, size, trainable, numel, slots, undivided, shared, reference)
            units.append(unit)
            members.append(part)
            roots.setdefault(module, []).append(index)
    places = {id(p): (index, slot) for index, part in enumerate(members) for slot, p in enumerate(part)}
    leases: dict[nn.Module, tuple[int, ...]] = {}
    module_names: dict[nn.Module, str] = {}
    for name, module in model.named_modules():
        if next(module.parameters(), None) is not None:
            adapts = is_a(module, "peft", "ParamWrapper")  # a parameter below it, by others that are below it
            own = [places[id(p)][0] for p in leaves(module.parameters(recurse=adapts))]
            needed = [*roots.get(module, []), *own]
            leases[module] = tuple(dict.fromkeys(needed))
            module_names[module] = name
    wrappers = tuple(
        Wrapper(name, parameter, take_apart(parameter).map(lambda inner: places[id(inner)]))
        for name, parameter in model.named_parameters()
        if is_wrapper(parameter)
    )
    return UnitTree(units, members, leases, module_names, wrappers)


def named_leaves(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the parameters of a model with their names, in the place of a wrapper its inner tensors."""
    for name, parameter in model.named_parameters():
        for inner, tensor in inner_tensors(parameter):
            yield f"{name}.{inner}" if inner else name, tensor


def _number(model: nn.Module, dtype: torch.dtype | None, *, train: bool) -> tuple[dict[int, str], dict[int, int]]:
    """Return the name of each leaf and the index of its first element in the model, by the leaf's id."""
    names: dict[int, str] = {}
    starts: dict[int, int] = {}
    end = 0
    for name, parameter in named_leaves(model):
        if id(parameter) in names:
            continue  # an inner tensor that two wrappers share
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
        self.found: list[tuple[str, nn.Module, list[torch.Tensor]]] = []
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
        small &= size <= self._max_unit_bytes or not any(map(_comes_apart, module.modules()))
        self._close(module, path, recurse=whole or small)
        if not (whole or small):
            for name, child in module.named_children():
                self._descend(child, f"{path}.{name}" if path else name, element=_is_list(module))

    def _fresh(self, module: nn.Module, *, recurse: bool) -> list[torch.Tensor]:
        found = {id(p): p for p in leaves(module.parameters(recurse=recurse))}
        return [p for number, p in found.items() if number not in self._taken]

    def _close(self, module: nn.Module, path: str, *, recurse: bool) -> None:
        """Make a group of what no group has: with `recurse` of all below the module, else of its own."""
        parameters = self._fresh(module, recurse=recurse)
        if parameters:
            self._taken.update(id(p) for p in parameters)
            self.found.append((path or type(module).__name__, module, parameters))


def _refuse_shared_memory(model: nn.Module) -> None:
    """Refuse two parameters, or one and a buffer, on the same bytes: they would become two, and be trained apart."""
    ranges = []
    with no_subclasses():  # an engine's parameters, which are refused elsewhere, as they are
        for name, parameter in named_leaves(model):
            strides = zip(parameter.shape, parameter.stride(), strict=True)
            span = sum((size - 1) * stride for size, stride in strides) + 1
            if not parameter.is_meta and parameter.numel() == span:  # without gaps
                place = (str(parameter.device), parameter.data_ptr(), parameter.nbytes)
                ranges.append((*place, f"parameter {name}", parameter.requires_grad))
        for name, buffer in model.named_buffers():
            if (
                type(buffer) is torch.Tensor
                and buffer.layout is torch.strided
                and not buffer.is_meta
                and buffer.numel()
            ):
                span = sum((size - 1) * stride for size, stride in zip(buffer.shape, buffer.stride(), strict=True)) + 1
                place = (str(buffer.device), buffer.data_ptr(), span * buffer.itemsize)
                ranges.append((*place, f"buffer {name}", False))
    ends: dict[tuple[str, bool], tuple[int, str]] = {}  # the last one so far, of what is trained and of what is not
    for device, begin, size, name, trained in sorted(ranges):
        for other_trained in (True, False):
            end, other = ends.get((device, other_trained), (0, ""))
            if begin < end and (trained or other_trained):
                raise ConfigError(
                    f"{other} and {name}: expected memory of their own but they share it; tie parameters by making "
                    "them one nn.Parameter, compute a buffer in forward, or clone one"
                )
        ends[device, trained] = max(ends.get((device, trained), (0, "")), (begin + size, name))


def _is_list(module: nn.Module) -> bool:
    containers = (nn.ModuleList, nn.ModuleDict, nn.Sequential)
    return isinstance(module, containers) and next(module.parameters(), None) is not None


def _comes_apart(module: nn.Module) -> bool:
    """Tell whether a module is a part that shall be a unit of its own."""
    return getattr(type(module), "comes_apart", False) is True


def _stored_dtype(parameter: torch.Tensor, dtype: torch.dtype | None) -> torch.dtype:
    """Return what a leaf is stored as: inner tensors, which are no parameters, are never cast."""
    cast = dtype is not None and isinstance(parameter, nn.Parameter) and parameter.is_floating_point()
    return dtype if cast and dtype is not None else parameter.dtype


def _stored_bytes(parameters: Iterable[torch.Tensor], dtype: torch.dtype | None) -> int:
    return sum(p.numel() * _stored_dtype(p, dtype).itemsize for p in parameters)
