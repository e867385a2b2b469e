"""The book of one engine's gradients: what is in each ``.grad``, and what the coming step learns from that.

As in torch, ``.grad`` is the truth: where it is None, the step leaves the parameter out; a tensor that somebody has put
there is the gradient. A gradient that has moved away has left a :class:`.GradientHandle` there. The handle is made when
somebody looks: as long as a parameter's own class sees every call, nobody can tell, and most are never looked at.

Owns which handle is whose, and whether what it was made for is still there. The bytes are in
:mod:`offload.shards.gradients`, the arithmetic that handles answer is in :mod:`offload.module.handles`. Next:
:mod:`offload.module.gradient_hooks` puts handles in place, :mod:`offload.optim.recipe` uses their factors.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence

import torch
from torch import nn

from offload.errors import StateError
from offload.module.absent import Absent
from offload.module.handles import GradientHandle, Value
from offload.planning.units import Unit, Where
from offload.shards.gradients import GradientNorm
from offload.shards.manager import Manager
from offload.torch_private import no_functions, no_subclasses, without_modes

KEEP = "to keep one, clone it inside 'with engine.gather_gradients(parameter):'"
NORM_NUMEL = 1 << 20  # elements that a norm other than the usual one looks at together


class GradientBook:
    """Gradients of one engine that have moved away. See the module's text."""

    def __init__(
        self,
        units: Sequence[Unit],
        parameters: Sequence[Sequence[nn.Parameter]],
        manager: Manager,
        device: torch.device,
        averaging: Callable[[], float],
    ) -> None:
        """Prepare.

        Args:
            units: of the model.
            parameters: per unit, its parameters.
            manager: has the bytes.
            device: of the handles.
            averaging: returns what makes the mean over micro-batches of a sum of scaled gradients.
        """
        self._manager = manager
        self._gradients = manager.gradients
        self._device = device
        self.averaging = averaging
        self._slots = {
            (unit.index, slot): parameter
            for unit in units
            if unit.trainable
            for slot, parameter in enumerate(parameters[unit.index])
        }
        self._units = units
        self._unseen: dict[Where, Value] = {}  # what handles will stand for that nobody has looked at
        self._origins: dict[Where, object] = {}
        self._contents: dict[Where, object] = {}  # another one when elements have become others
        self._gathered: set[Where] = set()  # whose ``.grad`` has elements for a while

    # --- in backward ------------------------------------------------------------------------------------------------

    def take(self, parameter: torch.Tensor, where: Where) -> tuple[torch.Tensor, GradientHandle | Value | None] | None:
        """Take what autograd has left in ``.grad``, which is None then.

        Returns:
            The gradient of this pass, and the handle that it was added to, or what one would stand for; None where
            nothing was there before. None if there is no gradient: a hook of the user has taken it.
        """
        if where in self._gathered:
            raise StateError(
                f"backward: the gradient of {self.name_of(where)} is gathered; leave the engine.gather_gradients block "
                "first"
            )
        gradient, parameter.grad = parameter.grad, None
        unseen = self._unseen.get(where)
        if gradient is None:
            if unseen is None and where in self._origins:
                self._forget(where)
            return None
        if unseen is not None:
            self._add_to(where, unseen)
            return gradient, unseen
        if not isinstance(gradient, GradientHandle):
            if where in self._origins:  # ``.grad`` was cleared since the last pass
                self._manager.forget_gradient(*where)
            return gradient, None
        try:
            incoming = gradient.take_incoming()
            self._add_to(where, self.value_of(gradient, where))
        except BaseException:
            parameter.grad = gradient
            raise
        return incoming, gradient

    def _add_to(self, where: Where, value: Value) -> None:
        """Note that something is about to be added to what has arrived of a gradient."""
        if value.factor != 1.0:
            self._manager.multiply_gradient(*where, value.factor)
        self._change(where, value)

    def put(self, parameter: torch.Tensor, where: Where, before: GradientHandle | Value | None) -> None:
        """Leave a handle in ``.grad``, the former one where there was one."""
        if before is None:
            self.put_new(parameter, where)
        elif isinstance(before, Value):
            self._leave(parameter, where, before)
        else:  # with create_graph, autograd has made it a result of its own addition
            parameter.grad = before if before.grad_fn is None else before.like()

    def put_new(self, parameter: torch.Tensor, where: Where, scale: float = 1.0) -> Value:
        """Leave a new handle in ``.grad``; returns what it stands for."""
        self._origins[where] = self._contents[where] = new = object()
        value = Value(where, new, new, scale)
        self._leave(parameter, where, value)
        return value

    def _leave(self, parameter: torch.Tensor, where: Where, value: Value) -> None:
        with no_subclasses():
            parameter.grad = None
        self._unseen[where] = value
        if not isinstance(parameter, Absent):
            self.show(where)

    def show(self, where: Where) -> None:
        """Let ``.grad`` be what it stands for: somebody may look there from now on."""
        value = self._unseen.get(where)
        if value is None:
            return
        unit = self._units[where[0]]
        with no_subclasses(), without_modes():
            handle = GradientHandle(self, unit.slots[where[1]].shape, getattr(torch, unit.dtype), self._device, value)
            parameter = self._slots[where]
            handle.put_incoming(parameter.grad)  # which autograd has made, and a hook before ours looks at
            parameter.grad = handle
        del self._unseen[where]

    def show_unit(self, index: int) -> None:
        """Do as :meth:`show` for each parameter of a unit."""
        if self._unseen:
            for slot in range(len(self._units[index].slots)):
                self.show((index, slot))

    def _change(self, where: Where, value: Value) -> None:
        """Note that elements have become others, which `value` stands for: copies from before refuse."""
        self._contents[where] = value.content = object()
        value.scale = value.clip = 1.0

    def note_arrived(self) -> None:
        """Leave a handle for each gradient that has come from another rank alone."""
        with no_subclasses():
            for where, parameter in self._slots.items():
                if parameter.grad is not None or where in self._unseen:
                    continue
                if self._gradients.arrived(where[0])[where[1]]:
                    self.put_new(parameter, where)

    # --- at the step ------------------------------------------------------------------------------------------------

    def adopt(self) -> None:
        """Take over what somebody has put in ``.grad``, and forget what somebody has taken out of it.

        Raises:
            StateError: a handle there is of another parameter, or of an earlier step; or gradients are gathered; or
                backward has left something that the engine could not take.
        """
        if self._gathered:
            raise StateError("gradients are gathered: leave the engine.gather_gradients block first")
        with no_functions():
            found = [(where, parameter, parameter.grad) for where, parameter in self._slots.items()]
        with no_subclasses():
            for where, parameter, gradient in found:
                handle, unseen = gradient if isinstance(gradient, GradientHandle) else None, where in self._unseen
                if handle.is_added_to if handle is not None else unseen and gradient is not None:
                    raise StateError(
                        f"gradient of {self.name_of(where)}: expected all of it but a backward pass has ended before "
                        "the engine could take what it added, for a hook of yours failed, or set .grad where torch "
                        "asks no class; call engine.zero_grad() and run the micro-batches again"
                    )
                if handle is not None:
                    self.value_of(handle, where)
                elif gradient is not None:
                    self.replace(parameter, where, gradient)
                elif where in self._origins and not unseen:
                    self._forget(where)

    def _forget(self, where: Where) -> None:
        """Forget a gradient that somebody has taken out of ``.grad``."""
        self._manager.forget_gradient(*where)
        del self._origins[where]

    def replace(self, parameter: torch.Tensor, where: Where, gradient: torch.Tensor) -> None:
        """Let a tensor be what the coming step uses as a parameter's gradient."""
        dense = gradient.to_dense() if gradient.layout is not torch.strided else gradient
        self._manager.overwrite_gradient(*where, dense.detach().reshape(-1))
        self.put_new(parameter, where, 1.0 / self.averaging())

    @contextlib.contextmanager
    def gathering(self, places: Iterable[Where]) -> Iterator[None]:
        """Let ``.grad`` of parameters have elements meanwhile.

        Raises:
            StateError: some are gathered already.
        """
        if self._gathered:
            raise StateError("gather_gradients: gradients are gathered already; leave that block first")
        self._gathered = set(places)
        try:
            yield
        finally:
            self._gathered = set()

    def trains(self, where: Where) -> bool:
        """Tell whether a parameter is one of those that are trained."""
        return where in self._slots

    def is_current(self, handle: GradientHandle) -> bool:
        """Tell whether the gradient that a handle was made for still waits for its step."""
        return self._origins.get(handle.value.where) is handle.value.origin

    def measure(self) -> GradientNorm:
        """Add up what is measured of each gradient, in model order: the same bits for every placement."""
        self._manager.require_awake()
        self._gradients.await_copies()
        squares = left = 0.0
        bad, spoilt, factors, count = list[str](), list[str](), dict[Where, float](), 0
        for where, value in self._values():
            total = self._gradients.sum_of(*where)
            assert total is not None, where
            count += 1
            squares += total[0] * (value.scale * value.scale) if value.scale != 1.0 else total[0]
            left += total[0] * (value.factor * value.factor) if value.factor != 1.0 else total[0]
            if total[1]:
                bad.append(self.name_of(where))
            if not math.isfinite(value.factor):
                spoilt.append(self.name_of(where))
            if value.factor != 1.0:
                factors[where] = value.factor
        return GradientNorm(squares, left, bad, spoilt, count, factors)

    def factors(self) -> dict[Where, float]:
        """Return per gradient that waits what it has been multiplied by. :meth:`adopt` comes first."""
        return {where: value.factor for where, value in self._values()}

    def waiting(self) -> dict[Where, Value]:
        """Return what stands for each gradient that waits. :meth:`adopt` comes first."""
        return dict(self._values())

    def restore(self, where: Where, *, scale: float, clip: float) -> None:
        """Let a gradient whose elements are there wait for the next step, multiplied by so much."""
        with no_subclasses():
            value = self.put_new(self._slots[where], where, scale)
        value.clip = clip

    def clear(self) -> None:
        """Let every ``.grad`` be None; handles that somebody has kept refuse from now on."""
        self._origins.clear()
        self._unseen.clear()
        with no_subclasses():
            for parameter in self._slots.values():
                parameter.grad = None

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters that are trained, in model order."""
        return list(self._slots.values())

    def _values(self) -> Iterator[tuple[Where, Value]]:
        """Yield what is in ``.grad`` of each parameter, in model order. :meth:`adopt` comes first."""
        with no_functions():
            found = [(where, parameter.grad) for where, parameter in self._slots.items()]
        for where, gradient in found:
            unseen = self._unseen.get(where)
            if unseen is not None:
                yield where, unseen
            elif isinstance(gradient, GradientHandle):
                yield where, self.value_of(gradient, where)

    # --- what handles ask -------------------------------------------------------------------------------------------

    def name_of(self, where: Where) -> str:
        """Return a parameter's name."""
        return self._units[where[0]].slots[where[1]].name

    def value_of(self, handle: GradientHandle, where: Where | None = None) -> Value:
        """Return what a handle stands for.

        Raises:
            StateError: the gradient is gone, or it is not the one of the parameter at `where`, or autograd has added to
                it what the engine has not taken yet.
        """
        value = handle.value
        if handle.is_added_to:
            name = handle.book.name_of(value.where)
            raise StateError(
                f"gradient of {name}: expected one that the engine has taken but autograd has just added to it, and a "
                "hook from before the engine comes first; register it after the engine is made"
            )
        if where is not None and (handle.book is not self or value.where != where):
            raise StateError(
                f"gradient of {self.name_of(where)}: expected its own in .grad but got that of "
                f"{handle.book.name_of(value.where)}; use engine.gather_gradients(modify=True) to copy gradients"
            )
        if not self.is_current(handle):
            raise StateError(
                f"gradient of {self.name_of(value.where)}: expected one that waits for a step but this handle is from "
                f"before the last step or zero_grad, or .grad was None when a pass began; the gradient is gone; {KEEP}"
            )
        if value.content is not self._contents[value.where]:
            raise StateError(
                f"gradient of {self.name_of(value.where)}: expected elements of when this copy was made but a later "
                f"backward pass or assignment has changed them, and a handle keeps none; {KEEP}"
            )
        return value

    def norm(self, value: Value, order: float) -> float:
        """Return the norm of what the step would use of a gradient."""
        raw = self._raw_norm(value.where, order)
        if order == 0.0:  # how many are not zero
            return raw if value.factor else 0.0
        return raw * abs(value.factor) * self.averaging()

    def is_finite(self, value: Value) -> bool:
        """Tell whether all elements are."""
        total = self._total(value.where)
        return not total[1] and math.isfinite(value.factor)

    def values(self, value: Value, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Return the elements, (numel,), as a tensor of its own."""
        self._manager.require_awake()
        real = self._gradients.copied(*value.where, device)
        factor = value.factor * self.averaging()
        return (real if factor == 1.0 else real.mul_(factor)).to(dtype)

    def fill(self, value: Value, content: torch.Tensor | float) -> None:
        """Let the elements be those of a tensor of the same shape, or one number."""
        with no_subclasses():
            now = self._slots[value.where].grad
        if not isinstance(now, GradientHandle) or now.value is not value:
            raise StateError(
                f"gradient of {self.name_of(value.where)}: expected the one in .grad to be written to but got a copy, "
                f"which has no elements of its own; {KEEP}"
            )
        if isinstance(content, torch.Tensor):
            content = content.detach().reshape(-1)
        self._manager.overwrite_gradient(*value.where, content)
        self._change(value.where, value)
        if isinstance(content, torch.Tensor):
            value.scale = 1.0 / self.averaging()

    def _total(self, where: Where) -> tuple[float, int]:
        """Return the sum of squares of what has arrived of a gradient, and how many elements are not finite."""
        self._manager.require_awake()
        self._gradients.await_copies()
        total = self._gradients.sum_of(*where)
        assert total is not None, where
        return total

    def _raw_norm(self, where: Where, order: float) -> float:
        if order == 2.0:
            total = self._total(where)
            return math.sqrt(total[0]) if total[0] >= 0 else total[0]  # NaN stays NaN
        self._manager.require_awake()
        content = self._gradients.content(*where)
        if not content.numel():
            return 0.0
        parts = (part.cpu().float() for part in content.split(NORM_NUMEL))  # the same bits wherever it waits
        norms = [torch.linalg.vector_norm(part, order) for part in parts]
        return float(torch.linalg.vector_norm(torch.stack(norms), order)) if order else float(sum(norms))
