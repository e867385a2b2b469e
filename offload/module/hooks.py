"""Ties a module tree to the memory manager.

Owns the hooks on modules. Forward pre-hooks lease the units that a module needs and lend it their parameters; forward
hooks return them. What else sees a use of a parameter has a file of its own:

* :mod:`offload.module.unannounced`: uses inside forwards that no hook announced.
* :mod:`offload.module.outside`: reads and assignments outside of forwards.
* :mod:`offload.module.saved`: tensors that autograd keeps for backward. Whatever else still views a unit (recomputed
  tensors of gradient checkpointing, aliases of the user) holds a reference on the unit's storage, and the manager never
  evicts a unit whose storage is referenced from outside.
* :mod:`offload.module.gradient_hooks`: gradients.

Knows neither budgets nor the optimizer. Next: :mod:`offload.build`.
"""

from __future__ import annotations

import contextlib
import os
import weakref
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.activations.ledger import Activations
from offload.errors import NEW_ENGINE, SAVE_FIRST, StateError
from offload.interrupt import calls_users_code
from offload.module import refusals
from offload.module.absent import is_lost, owner_of
from offload.module.backward_passes import BackwardPasses
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.module.forwards import Forwards, InForce
from offload.module.gradient_book import GradientBook
from offload.module.gradient_hooks import GradientHooks, HookCalls
from offload.module.left_out import LeftOut
from offload.module.lending import Lending, Loan
from offload.module.outside import OutsideAccess
from offload.module.pass_times import PassTimes
from offload.module.reachable import reachable
from offload.module.saved import SavedTensors
from offload.module.unannounced import UnannouncedUses
from offload.planning.partition import UnitTree
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.torch_private import (
    in_backward,
    is_transformed,
    keep_versions_where_parametrized,
    may_have_hooks,
    no_subclasses,
    wraps_what_is_made,
)

# Modules that some engine manages, so that a second one can be refused.
_managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def refuse_taken(model: nn.Module, tree: UnitTree) -> None:
    """Refuse a model that another engine has, or had, or has parameters of.

    Raises:
        StateError: it is such a model.
    """
    taken = [tree.module_names[m] or "model" for m in tree.leases if m in _managed]
    if taken:
        raise StateError(
            f"model {type(model).__name__}: already wrapped by another engine (at {taken[0]}), which "
            f"offload.Engine.of(model) returns; {NEW_ENGINE}"
        )
    refusals.refuse_shared(tree, owner_of)
    refusals.refuse_used(tree, is_lost)


class Hooks:
    """Hooks of one engine on its model. See the module's text.

    Attributes:
        binding: units and parameters.
        lending: lends parameters.
        times: seconds of passes.
        uses: of parameters that no hook announces.
        saved: what autograd keeps.
        left_out: accelerators that would save without the module.
        deferral: holds Ctrl-C back while something is half done.
    """

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        forwards: Forwards,
        changes: OutsideChanges,
        manager: Manager,
        activations: Activations,
        book: GradientBook,
        device: torch.device,
        calls: HookCalls,
    ) -> None:
        """Prepare; :meth:`attach` registers the hooks.

        Args:
            model: not that of another engine (:func:`refuse_taken`).
            binding: of its parameters.
            forwards: of its modules, none under way.
            changes: what others have changed.
            manager: owner of the shards.
            activations: ledger of what autograd keeps.
            book: of the gradients.
            device: of the engine.
            calls: what is asked of the engine.
        """
        self.binding = binding
        self.lending = Lending(binding, book, manager)
        self.times = PassTimes(manager.tiers.mover, manager.tiers.counters, calls.passes)
        self._passes = BackwardPasses(self.times, in_callers=manager.tiers.device.addressable)
        self.saved = SavedTensors(binding, changes, manager, activations, device, calls.deferral, self._passes)
        self.uses = UnannouncedUses(binding, forwards, self.lending, self.saved, manager, calls.deferral)
        self._outside = OutsideAccess(model, binding, book, self.uses, self.saved, changes, manager)
        self.left_out = LeftOut(model)
        self._gradients = GradientHooks(binding, book, self._passes, manager, activations, calls, self.left_out)
        self._model = weakref.ref(model)
        self._leases = dict(binding.tree.leases)
        self._forwards = forwards
        self._changes = changes
        self._manager = manager
        self._mover = manager.tiers.mover
        self._activations = activations
        self._book = book
        self._calls = calls
        self.deferral = calls.deferral
        self._registered: list[RemovableHandle] = []
        self._process = os.getpid()

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled, which is to say, that a module is: its hooks hold this object.

        Raises:
            StateError: always.
        """
        raise StateError(
            "model: cannot be copied or pickled while an engine has it, for its parameters are elsewhere; save "
            "engine.state_dict() or call engine.save_pretrained(directory), or call engine.close() first; for an "
            "average of weights, copy the model before the engine is made, or use engine.apply"
        )

    def untrained(self) -> tuple[str, nn.Parameter] | None:
        """Return a parameter that wants a gradient but that nobody trains, with its name."""
        model = self._model()
        if model is None:
            return None
        with no_subclasses():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    where = self.binding.slot_of(parameter)
                    if where is None or not self.binding.tree.units[where[0]].trainable:
                        return name, parameter
        return None

    # --- attach and detach ------------------------------------------------------------------------------------------

    def attach(self) -> None:
        """Register all hooks."""
        keep_versions_where_parametrized()
        for module in self._leases:
            # First, because hooks of the user may use parameters (the older weight_norm computes the weight in one).
            before = module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            self._registered.append(before)
            self._registered.append(module.register_forward_hook(self._after_forward, always_call=True))
            _managed.add(module)
        self._gradients.attach()
        self._outside.attach()

    def detach(self) -> None:
        """Remove all hooks. Idempotent. Parameters that are not given memory of their own then cannot be read."""
        self.unwind()
        for handle in self._registered:
            handle.remove()
        self._registered.clear()
        for module in self._leases:
            _managed.discard(module)
        self._gradients.detach()
        self.left_out.end()
        self._outside.detach()
        self.lending.close()
        self.saved.close()

    def unwind(self) -> None:
        """Leave every forward that an interrupt has torn out of."""
        self._forwards.unwind()
        self.times.forget_forward()

    def refuse_other_threads(self) -> None:
        """Refuse to be in another thread than the one whose forward is under way.

        Raises:
            StateError: that thread is in its forward.
        """
        self._forwards.refuse_other_threads()

    # --- modules ----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        refusals.refuse_child(self._process)
        if not self._registered:  # who repeats a forward has put this hook back
            raise StateError("backward: the engine that ran this forward is closed; run backward before close()")
        if self._needs_nothing(module):
            self.deferral.check()
            self.deferral.around(self._activations.balance)
        elif in_backward():
            self.deferral.around(self._repeat_forward, module)
        else:
            try:
                self.deferral.around(self._forwards.begin, self._begin_forward, module)
            except BaseException:
                if not self._forwards.under_way:
                    self.times.forget_forward()
                raise

    def _needs_nothing(self, module: nn.Module) -> bool:
        """Tell whether a forward around has done all that one of `module` needs, and nothing has changed since.

        Not where parameters come and go, or updates are made: each forward is a moment to go on with that.
        """
        under_way = self._forwards.under_way
        if not under_way or self._manager.has_more_to_do:
            return False
        around, _, contexts = under_way[-1]
        return (
            module is not around
            and module is not self._model()  # whose forward finds what an interrupt has left
            and module in self._leases  # and no copy of one
            and all(map(self.binding.is_lent, self._leases[module]))
            and contexts.is_uppermost()
            and contexts.stream == self._mover.note_stream()
            and not is_transformed()
        )

    def _repeat_forward(self, module: nn.Module) -> None:
        self._begin_forward(module, repeats=True)

    def _begin_forward(self, module: nn.Module, *, repeats: bool = False) -> None:
        under_way = self._forwards.under_way
        if under_way and not repeats and self._forwards.are_stale(module, self._model()):
            self.unwind()  # an interrupt has torn out of what was not called through the engine
        self.deferral.check()
        _refuse_without_hooks()
        if is_transformed():
            raise StateError(
                "model: cannot be traced or compiled (torch.jit.trace, torch.compile) while an engine has it, for its "
                f"parameters come and go; call it as it is, or close the engine first; {SAVE_FIRST}"
            )
        if self._manager.may_hide_parameters and wraps_what_is_made():
            raise StateError(
                "model: cannot be transformed by torch.func (jvp, jacfwd, functionalize) while an engine has it, for "
                "its parameters come and go; use torch.autograd.forward_ad, or close the engine first"
            )
        self._manager.require_awake()  # before room is made for what autograd keeps
        if repeats:
            self._passes.note_repetition()
        elif not under_way:
            self._begin_pass()
        self._activations.balance()
        contexts = self._enter(repeats=repeats)
        loans: list[Loan] = []
        try:
            leases = self._leases.get(module)
            if leases is None:
                raise StateError(
                    f"model: {type(module).__name__} is a copy of a module that an engine has, whose parameters are "
                    "elsewhere; call the module itself, or copy the model before the engine is made"
                )
            for index in leases:
                loans.append(self.lending.lend(index))
            if self.binding.rebound:
                self._manager.bound.refuse_changes()
            for index in self.uses.remembered(module):
                self._manager.note_use(index)
        except BaseException:
            for loan in loans:
                loan.close()
            contexts.leave()
            raise
        under_way.append((module, loans, contexts))

    def _begin_pass(self) -> None:
        """Begin the forward of the outermost module."""
        self.times.begin_forward()
        self._passes.end()
        self._changes.adopt()
        if torch.is_grad_enabled():
            self._book.adopt()
        self._activations.close_pass()  # of a backward that was not called through the engine
        self._activations.open_pass()

    def _enter(self, *, repeats: bool) -> InForce:
        """Enter what must be active inside a forward, and inside the forward that a backward pass repeats.

        A segment of gradient checkpointing brings saved-tensor hooks of its own, which hide those of the outermost
        module: its modules put ours on top again.
        """
        outermost = not self._forwards.under_way
        if outermost and not repeats:
            self._manager.begin_pass(training=torch.is_grad_enabled())
        seen = (not outermost or self.uses.watching) and (not repeats or self.uses.are_seen())
        contexts = InForce(self._mover.note_stream())
        hooks = self.saved.missing_hooks()
        if hooks is not None:
            contexts.enter(hooks)
        if not seen:
            contexts.enter(self.uses.seeing())
        return contexts

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._forwards.is_innermost(module):
            self.deferral.around(self._end_forward, output)

    def _end_forward(self, output: object) -> None:
        self._forwards.leave()
        self._manager.advance_updates(self._calls.guess)
        is_over = not self._forwards.under_way and not in_backward()  # a repetition stops early
        if output is not None:
            self._activations.balance()
        elif is_over:  # the forward has failed
            self._activations.abandon_pass()
        if is_over:
            self.times.end_forward()

    def watch(self) -> contextlib.AbstractContextManager[None]:
        """Serve parameters that are used outside any module's forward, inside the ``with`` block.

        Raises:
            StateError: what autograd keeps cannot be seen here.
        """
        _refuse_without_hooks()
        return self.uses.watch()

    def reached(self, loss: torch.Tensor, **options: Any) -> list[Where] | None:
        """Return the parameters that ``loss.backward(**options)`` may reach; None where that is not known."""
        leaves = None if options.get("inputs") is not None else reachable(loss)
        if leaves is None:
            return None
        with no_subclasses():
            places = (self.binding.slot_of(leaf) for leaf in leaves if isinstance(leaf, nn.Parameter))
        return [place for place in places if place is not None]

    @calls_users_code
    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
        """Run ``loss.backward(gradient, **options)``, watching.

        Torch switches a mode off inside the functions that it sees. It does not see a backward pass that starts at an
        edge of the graph, so what is repeated in it is watched.
        """
        self._passes.end()
        with self.watch():
            no_loss = loss.numel() != 1 or not loss.dtype.is_floating_point
            if not loss.requires_grad or options.get("inputs") is not None or (gradient is None and no_loss):
                loss.backward(gradient, **options)  # for torch's own errors; and given inputs are tensors that it sees
                return
            edge = torch.autograd.graph.get_gradient_edge(loss)
            torch.autograd.backward(edge, (torch.ones_like(loss) if gradient is None else gradient,), **options)


def _refuse_without_hooks() -> None:
    """Refuse to be where nobody sees what autograd keeps.

    Raises:
        StateError: it is such a place.
    """
    if not may_have_hooks():
        raise StateError(
            "model: cannot be differentiated by torch.func (grad, vjp, jacrev), nor run inside of "
            "torch.autograd.graph.disable_saved_tensors_hooks, while an engine has it, for its parameters come and go; "
            "use torch.autograd, or close the engine first"
        )
