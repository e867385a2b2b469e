"""What ``parameter.grad`` is when the gradient has moved away: a tensor without memory that knows its norm.

A gradient leaves the device as soon as autograd has made it. What stays in ``.grad`` is a :class:`GradientHandle` of
its shape, dtype and device. Its value is what the coming step would use: averaged, unscaled, and times the factors that
it has been multiplied by, which enter the step as one multiplication. So torch's clipping, a trainer's, ``GradScaler``
and ``is None`` work as ever; what needs the elements is refused by name.

Owns the tensor class, the calls of torch that it answers, and the refusal of all others. What a handle is worth now is
in the :class:`Book` of its engine. Next: :mod:`offload.module.gradient_book`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from offload.errors import StateError
from offload.module.torch_calls import DATA, Does, described, name_of, names, unchanged, what
from offload.nested import tensors_in
from offload.planning.units import Where
from offload.torch_private import in_backward, no_subclasses

_META = torch.device("meta")
_DEVICE = torch.ops.prim.device.default


@dataclasses.dataclass(slots=True, eq=False)
class Value:
    """What a handle stands for; its aliases share it.

    Attributes:
        where: the parameter.
        origin: is the same object as long as the gradient is the one that this was made for.
        scale: product of the numbers that it was multiplied by.
        clip: product of the 0-dim tensors that it was multiplied by, which is how torch clips.
        content: is the same object as long as the elements are those that this was made for.
    """

    where: Where
    origin: object
    content: object
    scale: float = 1.0
    clip: float = 1.0

    @property
    def factor(self) -> float:
        """What the step multiplies the gradient by, beside averaging and unscaling."""
        return self.scale * self.clip


class Book(Protocol):
    """Has the gradients that handles stand for."""

    def name_of(self, where: Where) -> str:
        """Return a parameter's name."""

    def value_of(self, handle: GradientHandle, where: Where | None = None) -> Value:
        """Return what a handle stands for.

        Raises:
            StateError: the gradient is gone, or it is not the one of the parameter at `where`.
        """

    def norm(self, value: Value, order: float) -> float:
        """Return the norm of what the step would use of a gradient."""

    def is_finite(self, value: Value) -> bool:
        """Tell whether all elements are."""

    def values(self, value: Value, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the elements, (numel,), as a tensor of its own."""

    def fill(self, value: Value, content: torch.Tensor | float) -> None:
        """Let the elements be those of a tensor of the same shape, or one number."""


class GradientHandle(torch.Tensor):
    """Stands for a gradient that has left. See the module's text.

    Attributes:
        value: what it stands for.
        owner: the book that has the gradient, as long as its engine lives.
        place: the device that it says it is on. To torch's dispatcher it is a meta tensor, so torch refuses to make it
            the ``.data`` of a tensor, for which it asks no class.
    """

    value: Value
    place: torch.device

    @staticmethod
    def __new__(
        cls, book: Book, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, value: Value
    ) -> GradientHandle:
        """Make a handle of a tensor of `shape`, `dtype` and `device`."""
        handle: GradientHandle = torch.Tensor._make_wrapper_subclass(
            cls, shape, dtype=dtype, device=_META, dispatch_device=True
        )
        handle.owner, handle.value, handle.place = weakref.ref(book), value, device
        handle._incoming = None
        return handle

    owner: weakref.ref[Book]  # the garbage collector does not see that parameters have handles
    _incoming: torch.Tensor | None

    @property
    def book(self) -> Book:
        """Where the gradient is.

        Raises:
            StateError: its engine is gone.
        """
        book = self.owner()
        if book is None:
            raise StateError(
                "gradient: expected one that waits for a step but its engine is gone, and the gradient, too"
            )
        return book

    def like(
        self,
        *,
        value: Value | None = None,
        shape: Sequence[int] | None = None,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
    ) -> GradientHandle:
        """Return another handle; an alias of this one where there is no other `value`."""
        with no_subclasses():
            shape = tuple(self.shape if shape is None else shape)
            return GradientHandle(self.book, shape, dtype or self.dtype, device or self.place, value or self.value)

    @property
    def is_added_to(self) -> bool:
        """Whether autograd has added what nobody has taken."""
        return self._incoming is not None

    def put_incoming(self, gradient: torch.Tensor | None) -> None:
        """Note what autograd would have added to this handle, had it been there."""
        self._incoming = gradient

    def take_incoming(self) -> torch.Tensor:
        """Return what autograd has added to this handle."""
        incoming, self._incoming = self._incoming, None
        assert incoming is not None
        return incoming

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        does, name = what(func), name_of(func)
        self = _handle_in(args, kwargs)
        if does is Does.ASSIGN:
            return _assign(args[0], args[1] if len(args) > 1 else None)
        if does in (Does.LOOK, Does.MEASURE) and name not in _BYTES:
            with no_subclasses():
                return func(*args, **kwargs)
        if name in _FINITENESS:
            return _finiteness(self, func, args)
        if name == "__repr__" or (name == "__format__" and args[1:] == ("",)):
            return repr(self)
        if unchanged(func, args, kwargs):
            return args[0]
        if name not in _ANSWERED and getattr(func, "__self__", None) is not DATA:
            self.refuse(described(func))
        with no_subclasses():
            return func(*args, **kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func is _DEVICE:
            return args[0].place
        name = func._schema.name.removeprefix("aten::")
        handle = _handle_in(args, kwargs or {})
        answer = _ANSWERS.get(name)
        return handle.refuse(name) if answer is None else answer(handle, func, args, kwargs or {})

    def refuse(self, what: str) -> Any:
        """Refuse what needs the elements.

        Raises:
            StateError: always.
        """
        name = self.book.name_of(self.value.where)
        self.book.value_of(self)
        raise StateError(
            f"{what} of the gradient of {name}: expected a tensor with elements but the gradient has left the device; "
            "step with engine.optimizer, clip with clip_grad_norm_, and for the elements use "
            "'with engine.gather_gradients(parameter, modify=...):'"
        )

    def __repr__(self, *, tensor_contents: Any = None) -> Any:  # type: ignore[override]
        """Say what it stands for, without the elements."""
        with no_subclasses():
            form = f"shape={tuple(self.shape)}, dtype={self.dtype}, device='{self.device}'"
        return f"GradientHandle({self.book.name_of(self.value.where)}, {form}, factor={self.value.factor:g})"

    def as_subclass(self, kind: type) -> Any:
        """Refuse to be of another class; torch does not ask ``__torch_function__``.

        Raises:
            StateError: always.
        """
        return self.refuse("as_subclass")

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be other memory; torch does not ask ``__torch_function__``.

        Raises:
            StateError: always.
        """
        return self.refuse("set_")

    def __deepcopy__(self, memo: object) -> Any:
        """Refuse to be copied.

        Raises:
            StateError: always.
        """
        return self.refuse("deepcopy")

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be pickled.

        Raises:
            StateError: always.
        """
        return self.refuse("a pickle")


# --- what handles answer ----------------------------------------------------------------------------------------------

_BYTES = names("data_ptr const_data_ptr __dlpack_device__")
_FINITENESS = names("isfinite isinf isnan isneginf isposinf")
# By the names that torch's Python functions have. What they lead to below is in _ANSWERS.
_ANSWERED = names(
    "mul mul_ multiply multiply_ div div_ divide divide_ true_divide true_divide_ neg neg_ negative negative_ zero_ "
    "__mul__ __rmul__ __imul__ __truediv__ __itruediv__ __neg__ __pos__ positive detach detach_ clone "
    "norm vector_norm matrix_norm linalg_vector_norm linalg_matrix_norm linalg_norm "
    "_foreach_norm _foreach_mul _foreach_mul_ _foreach_div "
    "_foreach_div_ _foreach_neg _foreach_neg_ _foreach_zero_ _amp_foreach_non_finite_check_and_unscale_ "
    "to float double half bfloat16 cpu cuda contiguous view reshape flatten view_as ravel alias"
)


def _finiteness(handle: GradientHandle, func: Any, args: Sequence[Any]) -> torch.Tensor:
    """Return a mask: one value for all where all elements are finite, else made from them."""
    value = handle.book.value_of(handle)
    with no_subclasses():
        shape, device, dtype = tuple(handle.shape), handle.device, handle.dtype
    if handle.book.is_finite(value):
        mask: torch.Tensor = func(torch.zeros((), device=device), *args[1:])
        return mask.expand(shape)
    mask = func(handle.book.values(value, dtype, device), *args[1:])
    return mask.view(shape)


def _number(handle: GradientHandle, value: Any, name: str) -> float:
    """Return a number, or what is in a tensor of one element."""
    if isinstance(value, (int, float)):
        return float(value)
    if isinstance(value, torch.Tensor) and not isinstance(value, GradientHandle) and value.numel() == 1:
        return float(value)
    return float(handle.refuse(f"{name} by other than a number"))


def _multiply(handle: GradientHandle, factor: float, by: Any) -> None:
    value = handle.book.value_of(handle)
    if isinstance(by, torch.Tensor):
        value.clip *= factor
    else:
        value.scale *= factor


def _factor(handle: GradientHandle, by: Any, name: str) -> float:
    number = _number(handle, by, name)
    if not name.removeprefix("_foreach_").startswith(("div", "true_divide")):
        return number
    return 1.0 / number if number else math.copysign(math.inf, number)


def _scaled(handle: GradientHandle, by: Any, name: str) -> GradientHandle:
    """Return a handle of its own for the product."""
    product = handle.like(value=dataclasses.replace(handle.book.value_of(handle)))
    _multiply(product, _factor(handle, by, name), by)
    return product


def _mul(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    name = func._schema.name.removeprefix("aten::")
    if kwargs or len(args) != 2 or (args[0] is not handle and (name.endswith("_") or name != "mul")):
        handle.refuse(name)
    by = args[1] if args[0] is handle else args[0]
    if not name.endswith("_"):
        return _scaled(handle, by, name)
    _multiply(handle, _factor(handle, by, name), by)
    return handle


def _neg(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    if not func._schema.name.endswith("_"):
        return _scaled(handle, -1.0, "neg")
    _multiply(handle, -1.0, None)
    return handle


def _add(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    """Take what autograd adds; nobody else adds."""
    name = func._schema.name.removeprefix("aten::")
    by_autograd = in_backward() and len(args) == 2 and not kwargs
    if not by_autograd or args[0] is not handle or isinstance(args[1], GradientHandle):
        handle.refuse(name)
    target = handle if name == "add_" else handle.like()
    target._incoming = args[1]
    return target


def _assign(target: GradientHandle, content: Any) -> None:
    """Do ``target.data = content``."""
    if target is content:  # module.to() of what is there already
        return
    value = target.book.value_of(target)
    with no_subclasses():
        own, got = (
            (tuple(tensor.shape), tensor.dtype, tensor.device) if isinstance(tensor, torch.Tensor) else type(tensor)
            for tensor in (target, content)
        )
    if own != got or content.layout is not torch.strided:
        raise StateError(
            f"gradient of {target.book.name_of(value.where)}: expected a dense tensor of shape, dtype and device {own} "
            f"as its .data but got {got}"
        )
    if not isinstance(content, GradientHandle):
        target.book.fill(value, content)
        return
    other = content.book.value_of(content, value.where)
    value.scale, value.clip = other.scale, other.clip


def _zero(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    handle.book.fill(handle.book.value_of(handle), 0.0)
    return handle


def _handle_in(args: Sequence[Any], kwargs: Mapping[str, Any]) -> GradientHandle:
    """Return the first handle among the arguments of a call."""
    if args and isinstance(args[0], GradientHandle):  # of nearly every call, and clipping makes two per gradient
        return args[0]
    return next(tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, GradientHandle))


@functools.lru_cache(maxsize=64)
def _arguments_of(func: Any) -> tuple[str, ...]:
    """Return the names of an operation's arguments."""
    return tuple(argument.name for argument in func._schema.arguments)


def _alias(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    return handle.like()


def _clone(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    return handle.like(value=dataclasses.replace(handle.book.value_of(handle)))


def _to_copy(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    value = dataclasses.replace(handle.book.value_of(handle))
    dtype = kwargs.get("dtype") or handle.dtype
    if not dtype.is_floating_point:
        handle.refuse("_to_copy")
    return handle.like(value=value, dtype=dtype, device=kwargs.get("device"))


def _view(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> GradientHandle:
    if isinstance(args[1], torch.dtype):
        handle.refuse("view as another dtype")
    shape = torch.empty(handle.shape, device="meta").view(args[1]).shape
    return handle.like(shape=shape)


def _norm(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> torch.Tensor:
    given = {**dict(zip(_arguments_of(func), args, strict=False)), **kwargs}
    order = given.get("ord", given.get("p", 2))
    dims = given.get("dim") or range(handle.dim())
    if {dim % max(handle.dim(), 1) for dim in dims} != set(range(handle.dim())) or given.get("out") is not None:
        handle.refuse(func._schema.name.removeprefix("aten::") + " along a dimension")
    result = _norm_of(handle, 2.0 if order is None else float(order), given.get("dtype"))
    return result.view([1] * handle.dim()) if given.get("keepdim") else result


def _norm_of(handle: GradientHandle, order: float, dtype: torch.dtype | None) -> torch.Tensor:
    """Return a norm, in fp32 where the gradient has fewer bits."""
    dtype = dtype or (torch.float64 if handle.dtype is torch.float64 else torch.float32)
    return torch.tensor(handle.book.norm(handle.book.value_of(handle), order), dtype=dtype, device=handle.place)


def _foreach_norm(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    order = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    dtype = args[2] if len(args) > 2 else kwargs.get("dtype")
    return [
        _norm_of(tensor, float(order), dtype)
        if isinstance(tensor, GradientHandle)
        else torch.linalg.vector_norm(tensor, order, dtype=dtype)
        for tensor in args[0]
    ]


def _foreach_scale(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    name = func._schema.name.removeprefix("aten::")
    in_place = name.endswith("_")
    single = getattr(torch.Tensor, name.removeprefix("_foreach_"))
    factors = args[1] if isinstance(args[1], (list, tuple)) else [args[1]] * len(args[0])
    results = []
    for tensor, by in zip(args[0], factors, strict=True):
        if not isinstance(tensor, GradientHandle):
            results.append(single(tensor, by))
        elif in_place:
            _multiply(tensor, _factor(tensor, by, name), by)
        else:
            results.append(_scaled(tensor, by, name))
    return None if in_place else results


def _foreach_each(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> list[Any] | None:
    name = func._schema.name.removeprefix("aten::")
    single = getattr(torch.Tensor, name.removeprefix("_foreach_"))
    results = [single(tensor) for tensor in args[0]]
    return None if name.endswith("_") else results


def _unscale(handle: GradientHandle, func: Any, args: Any, kwargs: Any) -> None:
    """Do what ``GradScaler.unscale_`` wants: note what is not finite, and multiply by a number."""
    tensors, found_inf, inverse = args
    for tensor in tensors:
        if not isinstance(tensor, GradientHandle):
            func([tensor], found_inf, inverse)
            continue
        value = tensor.book.value_of(tensor)
        if not tensor.book.is_finite(value):
            found_inf.fill_(1.0)
        value.scale *= float(inverse)


_ANSWERS: dict[str, Callable[[GradientHandle, Any, Any, Any], Any]] = {
    "add": _add,
    "add_": _add,
    "mul": _mul,
    "mul_": _mul,
    "div": _mul,
    "div_": _mul,
    "neg": _neg,
    "neg_": _neg,
    "zero_": _zero,
    "detach": _alias,
    "alias": _alias,
    "lift_fresh": _alias,
    "clone": _clone,
    "_to_copy": _to_copy,
    "view": _view,
    "_unsafe_view": _view,
    "norm": _norm,
    "linalg_vector_norm": _norm,
    "_foreach_norm": _foreach_norm,
    "_foreach_mul": _foreach_scale,
    "_foreach_mul_": _foreach_scale,
    "_foreach_div": _foreach_scale,
    "_foreach_div_": _foreach_scale,
    "_foreach_neg": _foreach_each,
    "_foreach_neg_": _foreach_each,
    "_foreach_zero_": _foreach_each,
    "_amp_foreach_non_finite_check_and_unscale_": _unscale,
}
