"""A tensor that has not been read: it has shape, dtype and device, and remembers where its elements are.

What is done to it is remembered, too, and gives a deferred tensor again. So whoever renames, joins, splits or casts the
tensors of a checkpoint may do so before a byte of them is read. :func:`fill` then makes any range of what came out.
Views, casts, ``cat``, ``stack`` and parts only move elements in order: of these, no more than the range is read. Any
other operation is computed as a whole.

Owns the class, and how ranges are made. Knows nothing of files or models. Next: :mod:`offload.checkpoint.pretrained`.
"""

from __future__ import annotations

import bisect
import dataclasses
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from offload.errors import ConfigError
from offload.nested import tensors_in

_META = torch.device("meta")


class Reader(Protocol):
    """Has the elements of one tensor."""

    def read(self, begin: int, end: int, address: int) -> None:
        """Write elements [begin, end), in order, to `address`."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Call:
    """The result of an operation, or its number `index` where it has several."""

    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    index: int | None = None

    @property
    def name(self) -> str:
        return str(self.function)

    @property
    def is_view(self) -> bool:
        return any(result.alias_info is not None for result in self.function._schema.returns)


class Kept:
    """The last tensor that was computed as a whole: the next range is most likely one of it."""

    def __init__(self) -> None:
        self._call: object = None
        self._tensor: torch.Tensor | None = None

    def tensor(self, call: object, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """Return what `call` gives."""
        if self._call is not call or self._tensor is None:
            self.clear()  # first: there may be no room for two
            self._call, self._tensor = call, compute()
        return self._tensor

    def clear(self) -> None:
        """Keep nothing."""
        self._call = self._tensor = None


class DeferredTensor(torch.Tensor):
    """Stands for a tensor whose elements have not been read. See the module's text.

    Attributes:
        source: has them: a reader, an operation, or a tensor.
    """

    source: Reader | _Call | torch.Tensor

    @staticmethod
    def __new__(cls, like: torch.Tensor, source: Reader | _Call | torch.Tensor) -> DeferredTensor:
        """Make a deferred tensor with the form of `like`, which is on the meta device."""
        made: DeferredTensor = torch.Tensor._make_wrapper_subclass(
            cls, like.shape, strides=like.stride(), dtype=like.dtype, device=torch.device("cpu")
        )
        made.source = source
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            return _change(func, args, kwargs)
        if not any("Tensor" in str(result.type) for result in func._schema.returns):
            return func(*_mapped(args, whole), **_mapped(kwargs, whole))
        forms = _mapped(kwargs, _form)
        if forms.get("device") is not None:
            forms["device"] = _META
        found = func(*_mapped(args, _form), **forms)
        if isinstance(found, (list, tuple)):
            return type(found)(DeferredTensor(one, _Call(func, args, kwargs, i)) for i, one in enumerate(found))
        return DeferredTensor(found, _Call(func, args, kwargs))

    def data_ptr(self) -> int:
        """Return the address of the elements, which are made now, and kept."""
        if not isinstance(self.source, torch.Tensor):
            self.source = whole(self).contiguous()
        return self.source.data_ptr()

    def contiguous(self, memory_format: torch.memory_format = torch.contiguous_format) -> torch.Tensor:
        """Return another one: what is made of it goes with it, although others may still hold this one."""
        if self.is_contiguous(memory_format=memory_format):
            return DeferredTensor(_form(self), self.source)
        return super().contiguous(memory_format=memory_format)

    def untyped_storage(self) -> Any:
        """Return what tells this tensor from others: who saves tensors asks which ones are the same."""
        return _Identity(self)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        """Say what it is, without the elements."""
        return f"DeferredTensor(shape={tuple(self.shape)}, dtype={self.dtype})"


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class _Identity:
    """In the place of a storage."""

    tensor: DeferredTensor

    def data_ptr(self) -> int:
        return id(self.tensor)

    def nbytes(self) -> int:
        return self.tensor.nbytes


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """Return an ordinary tensor with all elements; itself, if it is one."""
    if not isinstance(tensor, DeferredTensor):
        return tensor
    source = tensor.source
    if isinstance(source, torch.Tensor):
        return source
    if isinstance(source, _Call) and (not _moves(source) or all(map(_is_made, tensors_in(source.args)))):
        return _computed(source)
    made = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    fill(tensor, 0, made.numel(), made.view(-1), Kept())
    return made


def uncast(tensor: torch.Tensor) -> torch.Tensor:
    """Return what has been cast to `tensor`, in the dtype that it had at first."""
    while isinstance(tensor, DeferredTensor) and isinstance(tensor.source, _Call):
        if tensor.source.name not in _SAME or tensor.source.args[0].shape != tensor.shape:
            break
        tensor = tensor.source.args[0]
    return tensor


@dataclasses.dataclass(frozen=True, slots=True)
class Unread:
    """A deferred tensor as a :class:`offload.checkpoint.sources.Source`.

    Attributes:
        tensor: the deferred one.
        kept: what is computed as a whole; sources that are read one after the other have the same.
    """

    tensor: torch.Tensor
    kept: Kept

    @property
    def shape(self) -> tuple[int, ...]:
        """Its shape."""
        return tuple(self.tensor.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its elements."""
        return self.tensor.dtype

    def read(self, start: int, stop: int) -> torch.Tensor:
        """Return the elements [start, stop).

        Raises:
            ConfigError, OSError: a file cannot be read.
        """
        out = torch.empty(stop - start, dtype=self.tensor.dtype, device="cpu")
        fill(self.tensor, start, stop, out, self.kept)
        return out


def fill(tensor: torch.Tensor, begin: int, end: int, out: torch.Tensor, kept: Kept) -> None:
    """Write elements [begin, end) of a tensor to `out`.

    Args:
        tensor: deferred or not; its elements count in the order of its shape, whatever its strides.
        begin: first element.
        end: behind the last one.
        out: (end - begin,), of any dtype, contiguous, on the CPU.
        kept: what was computed as a whole.
    """
    if begin == end:
        return
    if out.dtype != tensor.dtype:
        read = torch.empty(end - begin, dtype=tensor.dtype, device="cpu")
        fill(tensor, begin, end, read, kept)
        out.copy_(read)
        return
    source = tensor.source if isinstance(tensor, DeferredTensor) else tensor
    if isinstance(source, torch.Tensor):
        out.copy_(source.detach().reshape(-1)[begin:end])
    elif not isinstance(source, _Call):
        source.read(begin, end, out.data_ptr())
    elif source.name in _SAME:
        fill(source.args[0], begin, end, out, kept)
    elif source.name in _JOINED and _is_plain(source):
        _fill_joined(source, begin, end, out, kept)
    elif (part := _part(source)) is not None:
        _fill_part(source.args[0], *part, tensor.shape, begin, end, out, kept)
    else:
        computed = kept.tensor(source, lambda: _computed(source).detach().contiguous())
        out.copy_(computed.view(-1)[begin:end])


def _computed(call: _Call) -> torch.Tensor:
    """Return what an operation gives for its whole arguments."""
    found = call.function(*_mapped(call.args, whole), **_mapped(call.kwargs, whole))
    result: torch.Tensor = found if call.index is None else found[call.index]
    return result


# Operations whose result has the elements of the first argument in their order, perhaps of another dtype.
_SAME = {
    f"aten.{name}.default"
    for name in ("alias", "detach", "clone", "_to_copy", "view", "_unsafe_view", "_reshape_alias", "unsqueeze")
} | {"aten.squeeze.default", "aten.squeeze.dim", "aten.squeeze.dims"}
_JOINED = {"aten.cat.default", "aten.stack.default"}


def _is_made(tensor: torch.Tensor) -> bool:
    """Tell whether the elements are there: those of a view, where what it views has them."""
    source = tensor.source if isinstance(tensor, DeferredTensor) else tensor
    if isinstance(source, _Call):
        return source.is_view and all(map(_is_made, tensors_in(source.args)))
    return isinstance(source, torch.Tensor)


def _moves(call: _Call) -> bool:
    """Tell whether an operation only moves elements in order."""
    joined = call.name in _JOINED and _is_plain(call)
    return joined or call.name in _SAME or _part(call) is not None


def _is_plain(call: _Call) -> bool:
    """Tell whether tensors of one number of dimensions and one dtype are joined."""
    return len({(one.dim(), one.dtype) for one in call.args[0]}) == 1


def _fill_joined(call: _Call, begin: int, end: int, out: torch.Tensor, kept: Kept) -> None:
    """Fill a range of several tensors that are side by side along a dimension."""
    tensors: Sequence[torch.Tensor] = call.args[0]
    dim = call.args[1] if len(call.args) > 1 else call.kwargs.get("dim", 0)
    dim = _positive(dim, tensors[0].dim() + (call.name == "aten.stack.default"))
    sizes = [math.prod(one.shape[dim:]) for one in tensors]
    ends = list(itertools.accumulate(sizes))
    position = begin
    while position < end:
        row, within = divmod(position, ends[-1])
        number = bisect.bisect_right(ends, within)
        stop = min(end, position + ends[number] - within)
        skip = row * sizes[number] + within - (ends[number] - sizes[number])
        fill(tensors[number], skip, skip + stop - position, out[position - begin : stop - begin], kept)
        position = stop


def _part(call: _Call) -> tuple[int, int] | None:
    """Return (dimension, first index) of what the operation cuts out of its argument; None for any other."""
    name, args = call.name.removeprefix("aten."), call.args
    rank = args[0].dim() if args and isinstance(args[0], torch.Tensor) else 0

    def argument(position: int, keyword: str, default: Any) -> Any:
        return args[position] if len(args) > position else call.kwargs.get(keyword, default)

    if name == "slice.Tensor" and argument(4, "step", 1) == 1:
        dim = _positive(argument(1, "dim", 0), rank)
        size, first = args[0].shape[dim], argument(2, "start", None) or 0
        return dim, min(max(_positive(first, size), 0), size)
    if name == "select.int":
        dim = _positive(argument(1, "dim", 0), rank)
        return dim, _positive(argument(2, "index", 0), args[0].shape[dim])
    if call.index is None:
        return None
    if name == "split.Tensor":
        return _positive(argument(2, "dim", 0), rank), argument(1, "split_size", 0) * call.index
    if name == "split_with_sizes.default":
        return _positive(argument(2, "dim", 0), rank), sum(argument(1, "split_sizes", ())[: call.index])
    if name == "unbind.int":
        return _positive(argument(1, "dim", 0), rank), call.index
    return None


def _fill_part(
    source: torch.Tensor,
    dim: int,
    first: int,
    shape: torch.Size,
    begin: int,
    end: int,
    out: torch.Tensor,
    kept: Kept,
) -> None:
    """Fill a range of what is cut out of `source` from index `first` of `dim` on; `shape` is the part's."""
    rows = math.prod(source.shape[:dim])
    size, step = math.prod(source.shape[dim:]), math.prod(shape) // rows
    skip = first * math.prod(source.shape[dim + 1 :])
    position = begin
    while position < end:
        row, within = divmod(position, step)
        stop = min(end, position + step - within)
        start = row * size + skip + within
        fill(source, start, start + stop - position, out[position - begin : stop - begin], kept)
        position = stop


def _change(function: Any, args: Any, kwargs: Any) -> Any:
    """Change a tensor in place: its elements are made now, so that random numbers come in the same order.

    Raises:
        ConfigError: it is a view, and what it views would not change.
    """
    target = args[0] if args else None
    others = [one for one in tensors_in((args[1:], kwargs)) if one is target]
    view = isinstance(target, DeferredTensor) and isinstance(target.source, _Call) and target.source.is_view
    if not isinstance(target, DeferredTensor) or view or others or "out" in kwargs:
        raise ConfigError(
            f"{function}: expected tensors of a checkpoint to be read only but they are written to while the model is "
            "made; load it with from_pretrained, and pass it to offload.Engine"
        )
    made = whole(target)
    function(made, *_mapped(args[1:], whole), **_mapped(kwargs, whole))
    target.source = made
    return target


def _form(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor without elements like this one."""
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=_META)


def _mapped(value: Any, function: Callable[[torch.Tensor], torch.Tensor]) -> Any:
    """Return arguments with `function` of each tensor in them."""
    if isinstance(value, torch.Tensor):
        return function(value)
    if isinstance(value, Mapping):
        return {name: _mapped(part, function) for name, part in value.items()}
    return type(value)(_mapped(part, function) for part in value) if type(value) in (list, tuple) else value


def _positive(index: int, size: int) -> int:
    return index + size if index < 0 else index
