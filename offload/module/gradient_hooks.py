"""Hands each gradient to the manager when autograd has made it, and leaves a handle in ``.grad``.

Owns the hooks behind the parameters' gradient accumulation, and the refusal of gradients that cannot be taken. Next:
:mod:`offload.module.gradient_book`, :mod:`offload.shards.gradients`.
"""

from __future__ import annotations

import dataclasses
import weakref
from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from offload.activations.ledger import WORTH_SAMPLING_BYTES, Activations
from offload.errors import StateError
from offload.interrupt import Deferral
from offload.module.backward_passes import BackwardPasses
from offload.module.binding import Binding
from offload.module.gradient_book import GradientBook
from offload.module.left_out import LeftOut
from offload.module.pass_times import PassCalls
from offload.shards.backward_updates import Recipe
from offload.shards.manager import Manager
from offload.torch_private import no_subclasses


@dataclasses.dataclass(frozen=True, slots=True)
class HookCalls:
    """What hooks ask of the engine and its step.

    Attributes:
        final_micro_batch: whether no further backward pass follows before the step, given how many there have been.
        guess: what the step will probably do; None where no guess is worth its while.
        refuse_gradient: why gradients are not taken now; None where they are.
        deferral: holds Ctrl-C back while something is half done.
        passes: what is told of passes.
        kept: lives as long as the model has the hooks: the engine, which nobody else may hold.
    """

    final_micro_batch: Callable[[int], bool]
    guess: Callable[[], Recipe | None]
    refuse_gradient: Callable[[], str | None]
    deferral: Deferral
    passes: PassCalls
    kept: object


class GradientHooks:
    """Hooks behind the gradients of one engine's parameters. See the module's text."""

    def __init__(
        self,
        binding: Binding,
        book: GradientBook,
        passes: BackwardPasses,
        manager: Manager,
        activations: Activations,
        calls: HookCalls,
        left_out: LeftOut,
    ) -> None:
        """Prepare; :meth:`attach` registers the hooks.

        Args:
            binding: units and parameters.
            book: puts handles in ``.grad``.
            passes: of backward.
            manager: takes the gradients.
            activations: ledger of what autograd keeps.
            calls: what is asked of the engine.
            left_out: looks at who calls backward.
        """
        self._binding = binding
        self._units = binding.tree.units
        self._book = book
        self._passes = passes
        self._manager = manager
        self._activations = activations
        self._calls = calls
        self._left_out = left_out
        self._latest = passes.number  # pass whose gradients have come
        self._registered: list[RemovableHandle] = []

    def attach(self) -> None:
        """Register a hook behind each parameter that is trained, or that gets a gradient which nobody takes."""
        for unit, parameters in zip(self._units, self._binding.tree.parameters, strict=True):
            for slot, parameter in enumerate(parameters):
                if unit.trainable or parameter.requires_grad:
                    hook = self._hook(unit.index, slot)
                    self._registered.append(parameter.register_post_accumulate_grad_hook(hook))

    def detach(self) -> None:
        """Remove the hooks, and the handles in ``.grad``. Idempotent."""
        for handle in self._registered:
            handle.remove()
        if self._registered:
            self._book.clear()
        self._registered.clear()

    def _hook(self, unit: int, slot: int) -> Callable[[torch.Tensor], None]:
        reference = weakref.ref(self)  # the garbage collector does not see what a parameter's hooks refer to

        def hook(parameter: torch.Tensor) -> None:
            self = reference()
            if self is None:  # collected with its engine, and could not remove this; somebody else has the parameter
                return
            take = self._take if self._units[unit].trainable else self._refuse
            with no_subclasses():
                self._calls.deferral.around(take, parameter, unit, slot)

        return hook

    def _refuse(self, parameter: torch.Tensor, unit: int, slot: int) -> None:
        """Refuse what would stay on the device, beside what the budget counts."""
        parameter.grad = None
        raise StateError(
            f"gradient of {self._units[unit].slots[slot].name}: this engine only evaluates; call "
            "model.requires_grad_(False), take torch.autograd.grad(loss, inputs), or pass "
            "optimizer=offload.AdamW(...) to train"
        )

    def _take(self, parameter: torch.Tensor, unit: int, slot: int) -> None:
        """Hand on what autograd has made, and leave a handle."""
        where, manager, calls = (unit, slot), self._manager, self._calls
        taken = self._book.take(parameter, where)
        if taken is None:
            return
        gradient, before = taken
        try:
            refusal = calls.refuse_gradient()
            if refusal is not None:
                raise StateError(refusal)
            calls.deferral.check()
            if gradient.requires_grad:
                raise StateError(
                    f"gradient of {self._units[unit].slots[slot].name}: expected backward without create_graph, "
                    "for nothing can be differentiated through .grad once it has left the device; use "
                    "torch.autograd.grad(loss, parameters, create_graph=True)"
                )
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if gradient.is_neg():  # whose bytes have the other sign
                gradient = gradient.resolve_neg()
            if gradient.nbytes >= WORTH_SAMPLING_BYTES:
                self._activations.await_gradient()
            shape = self._units[unit].slots[slot].shape
            if gradient.dtype != self._binding.dtypes[unit] or tuple(gradient.shape) != shape:
                raise StateError(self._misfit(parameter, gradient, unit, slot))
            self._passes.note()
            number = self._passes.number
            if number != self._latest:
                self._latest = number
                self._left_out.look()
            final = calls.final_micro_batch(manager.gradients.passes(unit, slot, number))
            manager.add_gradient(unit, slot, gradient, final=final, backward_pass=number)
        except BaseException:
            if before is not None:
                self._book.put(parameter, where, before)
            raise
        self._book.put(parameter, where, before)
        manager.advance_updates(calls.guess)

    def _misfit(self, parameter: torch.Tensor, gradient: torch.Tensor, unit: int, slot: int) -> str:
        name, shape = self._units[unit].slots[slot].name, self._units[unit].slots[slot].shape
        resized = "was resized after it was wrapped, do so before"
        converted = "was converted after it was wrapped, pass dtype= to the engine"
        told = "the module " + (resized if tuple(gradient.shape) != shape else converted)
        if getattr(parameter, "grad_dtype", None) == gradient.dtype != parameter.dtype:
            told = "leave the parameter's grad_dtype as it was, for the engine adds backward passes in fp32 by itself"
        return (
            f"gradient of {name}: expected {self._binding.dtypes[unit]} {shape} but got {gradient.dtype} "
            f"{tuple(gradient.shape)}; {told}"
        )
