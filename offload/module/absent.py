"""Parameters outside their uses: reading one brings it, writing to one is refused by name, and nobody sees stand-ins.

While an engine has a module, its parameters' bytes come and go. In a forward, and inside ``engine.gather``, a parameter
is *lent*: an ordinary ``nn.Parameter`` whose calls cost nothing extra. At all other times its class is a subclass that
sees every call. Shape, dtype and the like are answered at once. A read brings the unit, waits for its update, and runs
on the real content; what the result still views holds the unit where it is. ``parameter.data = value`` goes home. Any
other write raises.

Owns the classes, and whose a parameter is. Must not know where bytes are: that is the :class:`Keeper`'s business.
Next: :mod:`offload.module.hooks` lends.
"""

from __future__ import annotations

import copy
import functools
import sys
import weakref
from collections.abc import Callable, Iterable
from types import FrameType
from typing import Any, Protocol

import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

from offload.errors import StateError
from offload.module.handles import GradientHandle
from offload.module.refusals import LOST
from offload.module.torch_calls import (
    DATA,
    Does,
    calling_frame,
    described,
    is_address,
    is_of_grad,
    name_of,
    unchanged,
    what,
    written,
)
from offload.nested import tensors_in
from offload.torch_private import begins_backward_with, no_functions, no_subclasses
from offload.wrappers import has_own_storage


class Keeper(Protocol):
    """Has the bytes of parameters."""

    def describe(self, parameter: torch.Tensor) -> str:
        """Return what a parameter is called, for messages."""

    def read(self, parameters: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call`, which reads these parameters, while they are lent.

        Raises:
            BudgetError: they do not fit the device budget at once.
        """

    def assign(self, parameter: torch.Tensor, value: Any) -> None:
        """Let a parameter's content be that of `value`.

        Raises:
            StateError: `value` does not fit.
        """

    def show_gradient(self, parameter: torch.Tensor) -> None:
        """Let ``parameter.grad`` be what it stands for: somebody is about to look, or to put something else there."""

    def show_address(self, parameter: torch.Tensor) -> None:
        """Let ``parameter.data_ptr()`` be where its bytes are until the forward under way ends: a kernel reads there.

        Raises:
            StateError: a backward pass wants it, and the bytes do not stay on the device.
        """

    def begin_backward(self, parameter: torch.Tensor) -> None:
        """Let a backward pass begin with a parameter as a gradient of the user's.

        Raises:
            StateError: its bytes do not stay on the device.
        """

    def in_forward(self) -> bool:
        """Tell whether this thread is in a forward of the module: no optimizer makes states there."""

    def load(self, parameter: torch.Tensor, value: Any) -> bool:
        """Take the value of a parameter that ``module.load_state_dict`` has come to; False where none is under way."""

    def collects_state(self, func: Any, caller: FrameType) -> bool:
        """Tell whether the call is of torch making a state dict, whose values are replaced when it has them all."""


# Whose a parameter is, by its identity, which nothing else can have while its owner lives and keeps it.
owners: weakref.WeakValueDictionary[int, Keeper] = weakref.WeakValueDictionary()


class Absent:
    """What is added to a parameter's class outside its uses. See the module's text."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        does = what(func)
        if does in (Does.LOOK, Does.MEASURE) and not has_own_storage(cls):  # the class itself may answer
            return _passed_on(_absent_in(args, kwargs), lambda: func(*args, **kwargs))
        if does is Does.LOOK:
            if is_of_grad(func):
                _show_gradients(args[:1])
            elif is_address(func) and (owner := owners.get(id(args[0]))) is not None:
                owner.show_address(args[0])
            elif args and begins_backward_with(args[0], calling_frame(sys._getframe(1))):
                _keeper_of(args[0], func).begin_backward(args[0])
            with no_subclasses():
                return func(*args, **kwargs)
        if does is Does.MEASURE:  # what it has when it is lent: a parameter is contiguous in its unit
            with no_subclasses():
                like = torch.empty(args[0].shape, dtype=args[0].dtype, device="meta")
                return func(like, *args[1:], **kwargs)
        absent = _absent_in(args, kwargs)
        if does is Does.OPEN:
            name = _keeper_of(absent[0], func).describe(absent[0])
            raise StateError(
                f"parameter {name}: {name_of(func)} expected memory that stays where it is; take it inside "
                "'with engine.gather(parameter):', or of parameter.detach().clone()"
            )
        if does is Does.PASS:
            return _differentiate(absent, func, args, kwargs)
        if does is Does.MAKE:
            return _make(absent, func, args, kwargs)
        caller = calling_frame(sys._getframe(1))
        for target in written(func, args, kwargs):
            if is_lost(target) and _revive(target, does, func, args):
                return func(*args, **kwargs)
        keepers = {id(tensor): _keeper_of(tensor, func) for tensor in absent}
        keeper = keepers[id(absent[0])]
        for target in written(func, args, kwargs):
            if isinstance(target, Absent):
                return _write(keepers[id(target)], target, does, func, args, kwargs)
        if not has_own_storage(cls) and _converts(caller.f_back):
            raise StateError(
                f"parameter {keeper.describe(absent[0])}: a conversion of its module would put another tensor in its "
                "place; leave .to() and the like out, for the engine moves parameters"
            )
        if unchanged(func, args, kwargs):
            return args[0]
        if keeper.collects_state(func, caller):
            return args[0]
        if caller.f_code is nn.Parameter.__new__.__code__:
            raise StateError(
                f"nn.Parameter of parameter {keeper.describe(absent[0])}: expected a tensor that stays where it is; "
                "make it of a copy, nn.Parameter(parameter.detach().clone())"
            )
        if getattr(func, "__self__", None) is DATA:
            # Not an alias that torch counts no changes of: what is written through it must be noticed.
            call: Callable[[], Any] = lambda: args[0].detach()  # noqa: E731
        else:
            call = lambda: func(*args, **kwargs)  # noqa: E731
        for other in dict.fromkeys(keepers.values()):
            mine = [tensor for tensor in absent if keepers[id(tensor)] is other]
            call = functools.partial(other.read, mine, call)
        result = call()
        if name_of(func) in ("numpy", "__array__"):
            result.flags.writeable = False  # nobody would notice what is written there
        return result

    # Torch does not ask __torch_function__ for the next two.

    def as_subclass(self, kind: type) -> Any:
        """Return a tensor of another class on the real content."""
        parameter: Any = self
        return _keeper_of(parameter, torch.Tensor.as_subclass).read([parameter], lambda: parameter.as_subclass(kind))

    def set_(self, *args: Any, **kwargs: Any) -> Any:
        """Refuse to be other memory.

        Raises:
            StateError: always.
        """
        parameter: Any = self
        name = _keeper_of(parameter, torch.Tensor.set_).describe(parameter)
        raise StateError(
            f"parameter {name}: set_ would give it other memory than its engine's, as parametrizations do; change the "
            "module's structure before the engine is made"
        )

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        """Return an ordinary parameter with the real content."""
        parameter: Any = self
        keeper = _keeper_of(parameter, copy.deepcopy)
        return keeper.read([parameter], lambda: copy.deepcopy(parameter, memo))

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle as an ordinary parameter with the real content; of its own, for torch writes storages whole."""
        parameter: Any = self
        copied = copy.deepcopy(parameter)
        vars(copied).update({name: value for name, value in vars(parameter).items() if name not in vars(copied)})
        return copied.__reduce_ex__(protocol)


class AbsentParameter(Absent, nn.Parameter):
    """An ``nn.Parameter`` outside its uses."""


@functools.cache
def absent_class(kind: type) -> type:
    """Return the class that parameters of class `kind` have outside their uses."""
    if kind is nn.Parameter:
        return AbsentParameter
    name = f"Absent{kind.__name__}" if has_own_storage(kind) else kind.__name__  # which others say who they are by
    return type(name, (Absent, kind), {"__module__": kind.__module__, "__qualname__": name})


def _show_gradients(parameters: Iterable[torch.Tensor]) -> None:
    for parameter in parameters:
        keeper = owners.get(id(parameter))
        if keeper is not None:
            keeper.show_gradient(parameter)


def _absent_in(args: Any, kwargs: Any) -> list[torch.Tensor]:
    return [tensor for tensor in tensors_in((args, kwargs)) if isinstance(tensor, Absent)]


def _converts(frame: FrameType | None) -> bool:
    """Tell whether this is a module's ``to()``, ``float()`` or the like, which swap a wrapper for what they return."""
    return frame is not None and frame.f_code is nn.Module._apply.__code__


def is_lost(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter's content went with its engine."""
    return isinstance(parameter, Absent) and id(parameter) not in owners


def owner_of(parameter: nn.Parameter) -> str | None:
    """Return what a parameter is called in the engine that has it, None where none has."""
    owner = owners.get(id(parameter))
    return None if owner is None else owner.describe(parameter)


def _keeper_of(parameter: torch.Tensor, func: Any) -> Keeper:
    keeper = owners.get(id(parameter))
    if keeper is None:
        raise StateError(f"{described(func)} of a parameter of shape {tuple(parameter.shape)}: {LOST}")
    return keeper


def base_class(kind: type) -> type:
    """Return the class whose :func:`absent_class` this is."""
    return kind.__mro__[2]


def _revive(parameter: torch.Tensor, does: Does, func: Any, args: Any) -> bool:
    """Make a parameter whose content was lost an ordinary one, which is about to get another content as a whole."""
    if not has_own_storage(type(parameter)):
        return False
    if does is Does.ASSIGN:
        parameter.__class__ = base_class(type(parameter))
        return True
    if name_of(func) != "copy_" or args[0] is not parameter:
        return False
    with no_subclasses():
        parameter.data = torch.empty_like(parameter, memory_format=torch.contiguous_format)
    parameter.__class__ = base_class(type(parameter))
    return True


def _passed_on(absent: list[torch.Tensor], call: Callable[[], Any]) -> Any:
    """Run a call that finds by itself what it needs of parameters: they are ordinary ones meanwhile."""
    _show_gradients(absent)
    kinds = [type(parameter) for parameter in absent]
    for parameter, kind in zip(absent, kinds, strict=True):
        parameter.__class__ = base_class(kind)
    try:
        return call()
    finally:
        for parameter, kind in zip(absent, kinds, strict=True):
            if parameter.__class__ is base_class(kind):
                parameter.__class__ = kind


_GRADIENTS = ("gradient", "grad_tensors", "grad_outputs")  # what a pass begins with, by torch's names


def _copied(value: Any) -> Any:
    """Return what a pass begins with, with copies of absent parameters, which keep their graph."""
    if isinstance(value, torch.Tensor):
        return value.clone() if isinstance(value, Absent) else value
    return [_copied(gradient) for gradient in value] if isinstance(value, (list, tuple)) else value


def _differentiate(absent: list[torch.Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Run a backward pass, which finds by itself what it needs.

    Edges of the graph stand for parameters whose gradients are wanted. So these stay absent: what the pass repeats, and
    hooks of the user, may use them.
    """
    _show_gradients(absent)
    given = {name: kwargs[name] for name in _GRADIENTS if kwargs.get(name) is not None}
    if _absent_in((), given):
        kwargs = {**kwargs, **{name: _copied(value) for name, value in given.items()}}
        absent = _absent_in(args, kwargs)
    is_grad = func is torch.autograd.grad
    inputs = args[1] if is_grad else kwargs.get("inputs")
    if not isinstance(inputs, tuple):
        return _passed_on(absent, lambda: func(*args, **kwargs))
    with no_functions():
        trained = {id(parameter) for parameter in absent if parameter.requires_grad}
        edges = tuple(get_gradient_edge(value) if id(value) in trained else value for value in inputs)
    if not is_grad:
        kwargs = {**kwargs, "inputs": edges}
        return _passed_on(_absent_in(args, kwargs), lambda: func(*args, **kwargs))
    materialize = kwargs.get("materialize_grads")  # which torch does not do for edges
    args, kwargs = (args[0], edges, *args[2:]), {**kwargs, "materialize_grads": False}
    found = _passed_on(_absent_in(args, kwargs), lambda: func(*args, **kwargs))
    if not materialize:
        return found
    with no_functions():
        new = functools.partial(torch.zeros_like, requires_grad=bool(kwargs.get("create_graph")))
        return tuple(new(value) if slope is None else slope for value, slope in zip(inputs, found, strict=True))


def _make(absent: list[torch.Tensor], func: Any, args: Any, kwargs: Any) -> Any:
    """Make a tensor like a parameter; not the states of an optimizer that would find no gradients."""
    _show_gradients(absent)
    with no_subclasses():
        for parameter in absent:
            waits = isinstance(parameter.grad, GradientHandle)
            if waits and not (keeper := _keeper_of(parameter, func)).in_forward():
                name = keeper.describe(parameter)
                raise StateError(
                    f"{name_of(func)} of parameter {name}: expected no tensor like it while its gradient waits for the "
                    "engine's step, for so an optimizer that is not the engine's makes states; step with "
                    "engine.optimizer, or pass that optimizer to offload.Engine; for a tensor of your own, give "
                    "parameter.shape"
                )
        return func(*args, **kwargs)


def _write(keeper: Keeper, parameter: torch.Tensor, does: Does, func: Any, args: Any, kwargs: Any) -> Any:
    """Take a value over; refuse every other write."""
    if does is Does.ASSIGN and name_of(func) == "__set__":
        return keeper.assign(parameter, args[1])
    if name_of(func) == "copy_" and keeper.load(parameter, args[1] if len(args) > 1 else kwargs.get("other")):
        return parameter
    if any(isinstance(tensor, GradientHandle) for tensor in tensors_in((args, kwargs))):
        raise StateError(
            f"parameter {keeper.describe(parameter)}: {described(func)} of a gradient that waits for the engine's "
            "step, as from an optimizer that is not the engine's; step with engine.optimizer, or pass the other one to "
            "offload.Engine"
        )
    raise StateError(
        f"parameter {keeper.describe(parameter)}: {described(func)} would write where nothing written stays; write "
        "inside 'with engine.gather(parameter, modify=True):', or in engine.apply(function)"
    )
