"""Tensors that are made of inner tensors: torch calls them wrapper subclasses, quantized weights of torchao are some.

By ``__tensor_flatten__`` such a tensor names its inner tensors, and what else it takes to make another one of them by
``__tensor_unflatten__``. Owns taking them apart, putting them together, and saying in plain values how a tensor is
made. No library is imported, and nothing is made of what a file says. Next: :mod:`offload.planning.partition`, which
gives each inner tensor a slot.
"""

from __future__ import annotations

import dataclasses
import enum
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Generic, TypeVar

import torch

from offload.classes import package_of
from offload.errors import ConfigError
from offload.torch_private import no_subclasses

Part = TypeVar("Part")
Other = TypeVar("Other")


def has_own_storage(kind: Any) -> bool:
    """Tell whether a class of tensors leaves operations to torch, and so keeps its elements where torch does."""
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__


def is_wrapper(tensor: torch.Tensor) -> bool:
    """Tell whether a tensor is made of inner tensors, and says how."""
    kind = type(tensor)
    flattens = hasattr(kind, "__tensor_flatten__") and hasattr(kind, "__tensor_unflatten__")
    return flattens and not has_own_storage(kind)


@dataclasses.dataclass(frozen=True, slots=True)
class Shell(Generic[Part]):
    """What a tensor is, without its inner tensors: in the place of each is a `Part`.

    Attributes:
        kind: class of the tensor.
        context: what the class says of it.
        shape: of the tensor.
        stride: of the tensor.
        dtype: that the tensor says it has.
        parts: by the names of the inner tensors; a shell again where one is made of others itself.
    """

    kind: type[torch.Tensor]
    context: Any
    shape: torch.Size
    stride: tuple[int, ...]
    dtype: torch.dtype
    parts: dict[str, Part | Shell[Part]]

    def items(self, path: str = "") -> Iterator[tuple[str, Part]]:
        """Yield the parts with their names, of nested ones with dots between them."""
        for name, part in self.parts.items():
            below = f"{path}.{name}" if path else name
            if isinstance(part, Shell):
                yield from part.items(below)
            else:
                yield below, part

    def map(self, function: Callable[[Part], Other]) -> Shell[Other]:
        """Return a shell with what `function` makes of each part."""
        parts: dict[str, Other | Shell[Other]] = {
            name: part.map(function) if isinstance(part, Shell) else function(part) for name, part in self.parts.items()
        }
        return Shell(self.kind, self.context, self.shape, self.stride, self.dtype, parts)

    def tensor(self) -> torch.Tensor:
        """Return a tensor made of the parts, which are tensors; it says that it is where the first of them is."""
        parts: dict[str, Any] = {
            name: part.tensor() if isinstance(part, Shell) else part for name, part in self.parts.items()
        }
        context = _placed(self.context, next(part.device for part in parts.values()))
        unflatten: Any = self.kind.__tensor_unflatten__  # type: ignore[attr-defined]
        made: torch.Tensor = unflatten(parts, context, self.shape, self.stride)
        return made

    def described(self) -> dict[str, Any]:
        """Return what makes the tensor of its inner tensors, as JSON has it.

        Raises:
            ConfigError: the class keeps something else than plain values.
        """
        name = f"{package_of(self.kind)}.{self.kind.__qualname__}"
        inner = {key: part.described() if isinstance(part, Shell) else None for key, part in self.parts.items()}
        return {
            "class": name,
            "dtype": str(self.dtype).removeprefix("torch."),
            "shape": list(self.shape),
            "inner": inner,
            "context": _plain(self.context, name),
        }


def take_apart(tensor: torch.Tensor) -> Shell[torch.Tensor]:
    """Return a wrapper's shell with its inner tensors."""
    wrapper: Any = tensor
    with no_subclasses():
        names, context = wrapper.__tensor_flatten__()
        form = (wrapper.shape, wrapper.stride(), wrapper.dtype)
    inner = {name: getattr(wrapper, name) for name in names}
    parts = {name: take_apart(one) if is_wrapper(one) else one for name, one in inner.items()}
    return Shell(type(tensor), context, *form, parts)


def inner_tensors(tensor: torch.Tensor) -> list[tuple[str, torch.Tensor]]:
    """Return what a tensor is made of with its names; an ordinary one itself, without a name."""
    return list(take_apart(tensor).items()) if is_wrapper(tensor) else [("", tensor)]


def leaves(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Yield tensors, in a wrapper's place its inner ones."""
    for tensor in tensors:
        if is_wrapper(tensor):
            yield from (inner for _, inner in inner_tensors(tensor))
        else:
            yield tensor


def _placed(value: Any, device: torch.device) -> Any:
    """Return a context for inner tensors on this device."""
    if isinstance(value, torch.device):
        return device
    if type(value) is dict:
        return {key: _placed(item, device) for key, item in value.items()}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        there = [name for name in names if isinstance(getattr(value, name), torch.device)]
        return dataclasses.replace(value, **dict.fromkeys(there, device)) if there else value
    return value


def _plain(value: Any, owner: str) -> Any:
    """Return a value of a context as JSON has it; where it is does not belong to it."""
    if isinstance(value, enum.Enum):
        return {"enum": type(value).__qualname__, "name": value.name}
    if value is None or type(value) in (bool, int, str):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"float": repr(value)}
    if isinstance(value, torch.device):
        return {"device": None}
    if isinstance(value, (torch.dtype, torch.layout)):
        return {"torch": str(value).removeprefix("torch.")}
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
        return {"class": type(value).__qualname__, "fields": _plain(fields, owner)}
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return {"class": type(value).__qualname__, "fields": _plain(value._asdict(), owner)}
    if isinstance(value, (list, tuple)):
        return [_plain(item, owner) for item in value]
    if isinstance(value, dict) and all(type(key) is str for key in value):
        return {key: _plain(item, owner) for key, item in value.items()}
    raise ConfigError(
        f"{owner}: expected plain values in what makes it of its inner tensors but got one of type "
        f"{type(value).__qualname__}, which no checkpoint can hold; quantize the model with another configuration"
    )
