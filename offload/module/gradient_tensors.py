"""Gradients with elements for a while: what ``engine.gather_gradients`` gives and takes.

Owns the exchange of handles and tensors in ``.grad``. What a gradient is worth is :mod:`offload.module.gradient_book`'
business. Next: :mod:`offload.engine`, which offers it to users.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from offload.memory.budget import Budget, Tier
from offload.module.binding import Binding
from offload.module.gradient_book import GradientBook
from offload.module.handles import GradientHandle
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.torch_private import no_subclasses


class GradientTensors:
    """Gathers gradients of one engine. See the module's text."""

    def __init__(
        self, book: GradientBook, binding: Binding, budgets: Mapping[Tier, Budget], manager: Callable[[], Manager]
    ) -> None:
        """Prepare.

        Args:
            book: of the engine.
            binding: knows where each parameter is.
            budgets: that of the device is charged.
            manager: returns the owner of the shards, or raises where it is not to be used any more.
        """
        self._book = book
        self._binding = binding
        self._budget = budgets[Tier.DEVICE]
        self._manager = manager

    @contextlib.contextmanager
    def gather(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None, *, modify: bool
    ) -> Iterator[None]:
        """Let ``.grad`` have elements inside the ``with`` block; see ``Engine.gather_gradients``."""
        deferral = self._manager().safe_point
        claims = contextlib.ExitStack()
        places: dict[Where, nn.Parameter] = {}
        before: dict[Where, torch.Tensor | None] = {}
        given: dict[Where, torch.Tensor] = {}
        whole = begun = False

        def end() -> None:
            with claims:
                changed = self._put_back(places, before, given if whole else None, modify=modify)
            if changed and not modify:
                raise StateError(
                    f"gather_gradients: the gradient of {self._book.name_of(changed[0])} was changed; pass "
                    "modify=True to keep changes"
                )

        try:
            with deferral:
                self._book.adopt()
                found = self._places(params)
                for where in found:
                    self._book.show(where)
                with no_subclasses():
                    before.update({where: parameter.grad for where, parameter in found.items()})
                places.update(found)
                size_bytes = sum(found[where].nbytes for where, handle in before.items() if handle is not None)
                claims.enter_context(self._budget.claim("gathered gradients", size_bytes))
                claims.enter_context(self._book.gathering(found))
                self._give(found, before, given)
            yield
            whole = True
        finally:
            try:
                with deferral:
                    begun = True
                    end()
            except BaseException:
                if not begun:  # Ctrl-C came before it was held back
                    with deferral:
                        end()
                raise

    def _give(
        self,
        places: Mapping[Where, nn.Parameter],
        before: Mapping[Where, torch.Tensor | None],
        given: dict[Where, torch.Tensor],
    ) -> None:
        """Let ``.grad`` have elements; `given` has them as soon as they are there."""
        with no_subclasses():
            for where, parameter in places.items():
                handle = before[where]
                if isinstance(handle, GradientHandle):
                    given[where] = self._elements(handle, parameter)
                    parameter.grad = given[where]

    def _elements(self, handle: GradientHandle, parameter: nn.Parameter) -> torch.Tensor:
        value = self._book.value_of(handle)
        return self._book.values(value, parameter.dtype, parameter.device).view(parameter.shape)

    def _put_back(
        self,
        places: Mapping[Where, nn.Parameter],
        before: Mapping[Where, torch.Tensor | None],
        given: Mapping[Where, torch.Tensor] | None,
        *,
        modify: bool,
    ) -> list[Where]:
        """Put handles in place again, all of them; returns whose gradients were changed.

        Args:
            places: whose gradients were gathered.
            before: the handles.
            given: the elements; None where no change is looked at.
            modify: keep changes.

        Raises:
            Exception: what failed first while changes were looked at, or kept.
        """
        changed = list[Where]()
        failure: Exception | None = None
        with no_subclasses():
            for where, parameter in places.items():
                now, handle = parameter.grad, before[where]
                if isinstance(handle, GradientHandle) and not self._book.is_current(handle):
                    continue  # zero_grad() inside the block
                parameter.grad = handle
                try:
                    if given is None or self._is_same(now, handle, given.get(where), parameter):
                        continue
                    changed.append(where)
                    if modify and now is not None:
                        self._book.replace(parameter, where, now)
                    elif modify:
                        parameter.grad = None
                except Exception as error:
                    failure = failure or error
        if failure is not None:
            raise failure
        return changed

    def _is_same(
        self, now: torch.Tensor | None, handle: torch.Tensor | None, given: torch.Tensor | None, parameter: nn.Parameter
    ) -> bool:
        if handle is None or now is None:
            return now is handle
        assert isinstance(handle, GradientHandle)
        return now is given and _same_bits(now, self._elements(handle, parameter))

    def _places(self, params: object) -> dict[Where, nn.Parameter]:
        """Return the parameters whose gradients are to be gathered by their place."""
        if params is None:
            params = self._book.parameters()
        elif isinstance(params, nn.Module):
            params = [parameter for parameter in params.parameters() if parameter.requires_grad]
        elif isinstance(params, torch.Tensor):
            params = [params]
        if not isinstance(params, Iterable):
            raise ConfigError(
                "gather_gradients: expected a parameter, several, or a module but got a value of type "
                f"{type(params).__name__}; pass some of the model's own"
            )
        places = {}
        for parameter in params:
            where = self._binding.slot_of(parameter) if isinstance(parameter, torch.Tensor) else None
            if where is None or not self._book.trains(where):
                raise StateError(
                    "gather_gradients: expected parameters that this engine trains but got "
                    + (f"one of shape {tuple(parameter.shape)}" if isinstance(parameter, torch.Tensor) else "others")
                )
            places[where] = parameter
        return places


def _same_bits(left: torch.Tensor, right: torch.Tensor) -> bool:
    return torch.equal(left, right) or bool(((left == right) | (left.isnan() & right.isnan())).all())
