"""Ties a module tree to the memory manager.

Owns the hooks on modules and parameters, and the handles that autograd keeps instead of parameters:

* Forward pre-hooks lease the units a module needs and lend it their parameters; forward hooks return them. A use that
  no hook announced (tied weights, functional use) is seen by a ``TorchFunctionMode`` that is active inside the
  outermost forward.
* Outside of a forward, a parameter's own class sees every call (:mod:`offload.module.absent`): reads are served in the
  same way, writes are refused.
* Autograd's saved tensors that view a unit become handles (unit, offset, shape, stride) and are rebuilt when backward
  asks for them: evicting a unit between forward and backward frees its memory. Whatever else still views the unit
  (recomputed tensors of gradient checkpointing, aliases of the user) holds a reference on the unit's storage, and the
  manager never evicts a unit whose storage is referenced from outside.
* A hook behind each parameter's gradient accumulation hands the gradient to the manager, and leaves a handle in
  ``.grad`` (:mod:`offload.module.handles`).

Knows neither budgets nor the optimizer. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode
from torch.utils.hooks import RemovableHandle

from offload.activations.ledger import WORTH_SAMPLING_BYTES, Activations, SavedActivation
from offload.errors import NEW_ENGINE, SAVE_FIRST, BudgetError, StateError
from offload.memory.tiers import view_at
from offload.module import refusals
from offload.module.absent import is_lost, owners
from offload.module.binding import Binding
from offload.module.gradient_book import GradientBook
from offload.module.saved import InForce, Over, SavedView
from offload.module.torch_calls import Does, calling_frame, what
from offload.planning.units import Where
from offload.shards.backward_updates import Recipe
from offload.shards.copies import Lease
from offload.shards.manager import Manager
from offload.torch_private import (
    NO_GRAPH_TASK,
    function_modes,
    graph_task,
    in_backward,
    is_transformed,
    may_have_hooks,
    no_subclasses,
    top_hooks,
)

# Modules that some engine manages, so that a second one can be refused.
_managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, slots=True)
class Attached:
    """What the hooks need while an engine works, given when they are attached.

    Attributes:
        manager: owner of the shards.
        activations: ledger of what autograd keeps.
        book: of the gradients.
        final_micro_batch: whether no further backward pass follows before the step, given how many there have been.
        guess: what the step will probably do; None where no guess is worth its while.
        refuse_gradient: why gradients are not taken now; None where they are.
        check_interrupt: hands an interrupt on that came meanwhile.
        assign: lets the content of a parameter be a tensor's.
        take_over: lets what was changed in place in a unit be its content.
        load: takes the value that ``module.load_state_dict`` copies to a parameter; False where none is under way.
    """

    manager: Manager
    activations: Activations
    book: GradientBook
    final_micro_batch: Callable[[int], bool]
    guess: Callable[[], Recipe | None]
    refuse_gradient: Callable[[], str | None]
    check_interrupt: Callable[[], None]
    assign: Callable[[Where, torch.Tensor], None]
    take_over: Callable[[int], None]
    load: Callable[[Where, Any], bool]


class Loan:
    """A unit's parameters while somebody uses them: leased, and ordinary parameters."""

    __slots__ = ("_hooks", "_index", "_lease")

    def __init__(self, hooks: Hooks, index: int, lease: Lease) -> None:
        self._hooks = hooks
        self._index = index
        self._lease = lease

    def close(self) -> None:
        """Take the parameters back, and return the lease."""
        self._hooks.take_back(self._index)
        self._lease.close()


class Hooks:
    """Hooks of one engine on its model. See the module's text."""

    def __init__(self, model: nn.Module, binding: Binding, device: torch.device) -> None:
        tree = binding.tree
        taken = [tree.module_names[m] or "model" for m in tree.leases if m in _managed]
        if taken:
            raise StateError(
                f"model {type(model).__name__}: already wrapped by another engine (at {taken[0]}); {NEW_ENGINE}"
            )
        refusals.refuse_shared(tree, _owner_of)
        refusals.refuse_used(tree, is_lost)
        self.binding = binding
        self._tree = tree
        self._device = device
        self._leases = dict(tree.leases)
        self._remembered: dict[nn.Module, tuple[int, ...]] = {}  # units used in a module's forward without a lease
        self._handed: set[int] = set()  # units that tensors outside the module may still view
        self._copies: list[tuple[str, weakref.ref[torch.Tensor], int]] = []  # that state dicts gave, as they were then
        self._stack: list[tuple[nn.Module, list[Loan], InForce]] = []
        self._watching = 0
        self._registered: list[RemovableHandle] = []
        self._attached: Attached | None = None  # None where the engine is not made yet, or closed
        self._model = weakref.ref(model)
        self._process = os.getpid()
        self._pass = 0  # number of the latest backward pass
        self._tasks: set[int] = set()  # torch's numbers of that pass, and of those inside it that repeat segments
        self._repeated_in = NO_GRAPH_TASK  # the one in which a segment was repeated last

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

    def describe(self, parameter: torch.Tensor) -> str:
        """Return what a parameter of this model is called here, for messages."""
        return f"{self.binding.name(parameter)} of the engine on {type(self._model()).__name__}"

    def untrained(self) -> str | None:
        """Return the name of a parameter that wants a gradient but that nobody trains."""
        model = self._model()
        if model is None:
            return None
        with no_subclasses():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    where = self.binding.slot_of(parameter)
                    if where is None or not self._tree.units[where[0]].trainable:
                        return name
        return None

    # --- attach and detach ------------------------------------------------------------------------------------------

    def attach(self, attached: Attached) -> None:
        """Register all hooks."""
        self._attached = attached
        for module in self._leases:
            # First, because hooks of the user may use parameters (the older weight_norm computes the weight in one).
            before = module.register_forward_pre_hook(self._before_forward, prepend=True, with_kwargs=True)
            self._registered.append(before)
            self._registered.append(module.register_forward_hook(self._after_forward, always_call=True))
            _managed.add(module)
        for unit, parameters in zip(self._tree.units, self._tree.parameters, strict=True):
            if unit.trainable:
                for slot, parameter in enumerate(parameters):
                    hook = self._gradient_hook(unit.index, slot)
                    self._registered.append(parameter.register_post_accumulate_grad_hook(hook))
        owners.update(dict.fromkeys(self.binding.identities(), self))
        for unit in self._tree.units:
            self.binding.watch(unit.index)

    def detach(self) -> None:
        """Remove all hooks. Idempotent. Parameters that are not given memory of their own then cannot be read."""
        self.unwind()
        for handle in self._registered:
            handle.remove()
        self._registered.clear()
        for module in self._leases:
            _managed.discard(module)
        if self._attached is not None:
            self._attached.book.clear()
        for identity in self.binding.identities():
            if owners.get(identity) is self:
                del owners[identity]
        for unit in self._tree.units:
            if self.binding.is_lent(unit.index):  # gathered by somebody who is still at it
                self.binding.watch(unit.index)
        self._attached = None

    def unwind(self) -> None:
        """Leave every forward that an interrupt has torn out of."""
        with contextlib.ExitStack() as last:  # all of them, whatever fails on the way
            for _ in self._stack:
                last.callback(self._leave)

    # --- lending ----------------------------------------------------------------------------------------------------

    def lend(self, index: int) -> Loan:
        """Lease a unit's parameters, and lend them: they are ordinary parameters until the loan is closed."""
        refusals.refuse_child(self._process)
        lease = self._at.manager.acquire(index)
        self.binding.lend(index)
        return Loan(self, index, lease)

    def take_back(self, index: int) -> None:
        """Note that one of those who use a unit's parameters is done with them."""
        if self._attached is not None:  # else closed meanwhile
            self.binding.take_back(index)

    @property
    def _at(self) -> Attached:
        assert self._attached is not None
        return self._attached

    # --- modules ----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        at = self._at
        refusals.refuse_child(self._process)
        if self._stack and not in_backward() and self._is_stale(module):
            self.unwind()  # an interrupt has torn out of what was not called through the engine
        at.check_interrupt()
        if not may_have_hooks():
            raise StateError(
                "model: cannot be differentiated by torch.func (grad, vjp, jacrev, vmap) while an engine has it, for "
                "its parameters come and go; use torch.autograd, or close the engine first"
            )
        if is_transformed():
            raise StateError(
                "model: cannot be traced or compiled (torch.jit.trace, torch.compile) while an engine has it, for its "
                f"parameters come and go; call it as it is, or close the engine first; {SAVE_FIRST}"
            )
        if in_backward():
            self._note_task()
            self._repeated_in = graph_task()
        elif not self._stack:
            self.end_pass()
            self.settle_changes()
            if torch.is_grad_enabled():
                at.book.adopt()
            at.activations.close_pass()  # of a backward that was not called through the engine
            at.activations.open_pass()
        at.activations.balance()
        contexts = self._enter()
        loans: list[Loan] = []
        try:
            for index in self._leases[module]:
                loans.append(self.lend(index))
            if self.binding.rebound:
                at.manager.working.refuse_changes()
            for index in self._remembered.get(module, ()):
                at.manager.note_use(index)
        except BaseException:
            for loan in loans:
                loan.close()
            contexts.leave()
            raise
        self._stack.append((module, loans, contexts))

    def _is_stale(self, module: nn.Module) -> bool:
        """Tell whether what is on the stack cannot be under way where a forward of `module` begins, in no backward."""
        if self._stack[-1][2].graph_task != NO_GRAPH_TASK:
            return True
        return module is self._model() and all(entered is not module for entered, _, _ in self._stack)

    def _enter(self) -> InForce:
        """Enter what must be active inside a forward, and inside the forward that a backward pass repeats.

        A segment of gradient checkpointing brings saved-tensor hooks of its own, which hide those of the outermost
        module: its modules put ours on top again.
        """
        if not self._stack and not in_backward():
            self._at.manager.begin_pass(training=torch.is_grad_enabled())
        seeing = bool(self._stack or self._watching) and (not in_backward() or self._sees())
        contexts = InForce()
        hidden = top_hooks()
        owner = getattr(hidden[0], "__self__", None) if hidden is not None else None
        if owner is not self and not (isinstance(owner, Over) and owner.hooks is self):
            over = self if hidden is None else Over(self, *hidden)
            contexts.enter(torch.autograd.graph.saved_tensors_hooks(over.pack, over.unpack))
        if not seeing:
            contexts.enter(self._seeing())
        return contexts

    def _sees(self) -> bool:
        """Tell whether the mode is active: torch switches it off inside a function that it has seen.

        Backward may run there, or in a thread of its own.
        """
        if not self._at.manager.hides_parameters:
            return True
        modes = function_modes()
        return any(isinstance(mode, _SeeParameters) and mode.hooks is self for mode in modes)

    def _seeing(self) -> contextlib.AbstractContextManager[object]:
        """Return what brings parameters that are used unannounced, and makes torch choose its operators as if it did.

        Attention has a fast path for evaluation, of other operators, that torch takes only where no mode is active.
        """
        return _SeeParameters(self) if self._at.manager.hides_parameters else _without_fast_path()

    def backward(self, loss: torch.Tensor, gradient: torch.Tensor | None = None, **options: Any) -> None:
        """Run ``loss.backward(gradient, **options)``, watching.

        Torch switches a mode off inside the functions that it sees. It does not see a backward pass that starts at an
        edge of the graph, so what is repeated in it is watched.
        """
        self.end_pass()
        with self.watch():
            if not loss.requires_grad or options.get("inputs") is not None or (gradient is None and loss.numel() != 1):
                loss.backward(gradient, **options)  # for torch's own errors; and given inputs are tensors that it sees
                return
            edge = torch.autograd.graph.get_gradient_edge(loss)
            torch.autograd.backward(edge, (torch.ones_like(loss) if gradient is None else gradient,), **options)

    @contextlib.contextmanager
    def watch(self) -> Iterator[None]:
        """Serve parameters that are used outside any module's forward.

        That is in a backward pass that repeats a part of the forward, where the user has gathered parameters, and in
        hooks of the user around the outermost module's forward.
        """
        with contextlib.ExitStack() as contexts:
            contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
            contexts.enter_context(self._seeing())
            self._watching += 1
            try:
                yield
            finally:
                self._watching -= 1

    def _after_forward(self, module: nn.Module, args: object, output: object) -> None:
        if self._stack and self._stack[-1][0] is module:
            self._leave()
            at = self._at
            at.manager.advance_updates(at.guess)
            if output is not None:
                at.activations.balance()
            elif not self._stack:  # the forward has failed
                at.activations.abandon_pass()

    def _leave(self) -> None:
        _, loans, contexts = self._stack.pop()
        try:
            for loan in loans:
                loan.close()
        finally:
            contexts.leave()

    def use_unannounced(self, indices: list[int], call: Callable[[], Any]) -> Any:
        """Run `call`, which uses the parameters of the units `indices`; not all of them are lent.

        The innermost module remembers those that no hook has brought: where a prefetch brings one in time, the
        schedule must still learn of its use.
        """
        if self._stack:
            module = self._stack[-1][0]
            new = [index for index in indices if index not in self._leases[module]]
            self._remembered[module] = tuple(dict.fromkeys((*self._remembered.get(module, ()), *new)))
        loans: list[Loan] = []
        try:
            for index in sorted(indices, key=lambda index: not self.binding.is_bound(index)):  # hold first what is here
                loans.append(self.lend(index))
            return call()
        finally:
            for loan in loans:
                loan.close()

    def units_used(self, values: Iterable[Any]) -> list[int]:
        """Return the units of the parameters in `values` (one level deep)."""
        used = []
        for value in values:
            where = self.binding.slot_of(value)
            if where is not None:
                used.append(where[0])
            elif type(value) in (list, tuple):
                used.extend(self.units_used(value))
        return used

    def all_lent(self, indices: list[int]) -> bool:
        """Tell whether the parameters of all these units are on the device, for somebody to use."""
        return all(map(self.binding.is_lent, indices))

    # --- parameters outside their uses ------------------------------------------------------------------------------

    def read(self, parameters: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call`, which reads these parameters outside a forward, or where no mode sees it.

        What autograd saves of them meanwhile are handles, so that a penalty on all weights needs no room for them all;
        but not where somebody else's hooks are in force, who counts what he sees (gradient checkpointing does).

        Raises:
            BudgetError: they do not fit the device budget at once, beside those that other tensors still view.
        """
        self.settle_changes()
        indices = list(dict.fromkeys(self.units_used(parameters)))
        try:
            with contextlib.ExitStack() as contexts:
                if top_hooks() is None and torch.is_grad_enabled():
                    contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
                result = self.use_unannounced(indices, call)
        except BudgetError as error:
            names = ", ".join(f"parameter {self.binding.name(parameter)}" for parameter in parameters[:3])
            raise BudgetError(
                f"{names}: expected room on the device to read them outside a forward but there is none beside what is "
                "in use or viewed by other tensors; read fewer at once, drop their views, or use engine.gather or "
                f"engine.apply\n{error}"
            ) from error
        manager = self._at.manager
        for index in indices:
            if manager.working.borrowed(index) or self.binding.changed(self._tree.units[index]) is not None:
                self._handed.add(index)
                manager.forward.finish_open()  # whoever views them may write while nothing leaves
        return result

    def assign(self, parameter: torch.Tensor, value: Any) -> None:
        """Let a parameter's content be that of `value`: ``parameter.data = value``.

        Raises:
            StateError: `value` is of another shape, dtype or device.
        """
        if value is parameter:
            return
        where, name = self._where(parameter), f"parameter {self.binding.name(parameter)}"
        with no_subclasses():
            own = (tuple(parameter.shape), parameter.dtype, parameter.device)
            got = (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)
            if own != got:
                raise StateError(
                    f"{name}: expected a tensor of shape, dtype and device {own} as its .data but got "
                    f"{got}; its form cannot change while an engine has it (pass dtype= to the engine, or close it)"
                )
            if not value.is_contiguous() and any(map(_in_format(value), _MEMORY_FORMATS)):
                raise StateError(
                    f"{name}: expected a tensor in torch's default memory format as its .data but got "
                    "one with channels last; convert the module before the engine is made"
                )
            mine = value.data_ptr() == parameter.data_ptr() and value.is_contiguous()
            viewed = self.binding.unit_at(_address(value)) is not None
        if not mine:
            if viewed or self._at.manager.working.borrowed(where[0]):
                raise StateError(
                    f"{name}: expected no other tensor that views it, or parameters beside it, when "
                    "its .data is replaced, for that tensor would change, too; drop it, or take a copy with "
                    "parameter.detach().clone()"
                )
            self._at.assign(where, value)
        elif self.binding.is_bound(where[0]):
            self._handed.add(where[0])
            self.settle_changes()

    def load(self, parameter: torch.Tensor, value: Any) -> bool:
        """Take the value of a parameter that ``module.load_state_dict`` has come to; False where none is under way."""
        return self._at.load(self._where(parameter), value)

    def _where(self, parameter: torch.Tensor) -> Where:
        where = self.binding.slot_of(parameter)
        assert where is not None
        return where

    def collects_state(self, func: Any, caller: FrameType) -> bool:
        """Tell whether this is torch making a state dict: its values are replaced by real ones when it has them all.

        Fetched one by one for it, they would all stay on the device until then.
        """
        saving = func is torch.Tensor.detach and caller.f_code is nn.Module._save_to_state_dict.__code__
        return saving and caller.f_locals.get("self") in self._leases

    def settle_changes(self) -> None:
        """Let what was written through tensors that view parameters be the parameters' content."""
        if self._stack or in_backward():
            return
        if self._copies:
            self._refuse_written_copies()
        if not self._handed:
            return
        at, binding = self._at, self.binding
        for index in list(self._handed):
            if binding.is_lent(index):
                continue  # gathered: whoever did looks for itself
            if index not in binding.rebound and binding.changed(self._tree.units[index]) is not None:
                at.take_over(index)
            if not at.manager.working.borrowed(index):
                self._handed.discard(index)

    def note_copies(self, copies: Mapping[str, torch.Tensor]) -> None:
        """Note what ``module.state_dict()`` gives away, where plain torch gives the parameters' own memory."""
        self._copies = [entry for entry in self._copies if entry[1]() is not None]
        for name, copy in copies.items():
            if not copy.is_inference():
                self._copies.append((name, weakref.ref(copy), copy._version))

    def forget_copies(self) -> None:
        """Let what state dicts gave away be written to."""
        self._copies.clear()

    def _refuse_written_copies(self) -> None:
        for name, reference, version in self._copies:
            copy = reference()
            if copy is not None and copy._version != version:
                self.forget_copies()
                raise StateError(
                    f"state dict: {name} was written to, which changes no parameter: while an engine has the module, "
                    "its state dict has copies; load what was changed with module.load_state_dict(state, strict=False)"
                )

    # --- autograd ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep for `tensor`."""
        address = _address(tensor)
        unit = self.binding.unit_at(address)
        if unit is not None:
            return self._view(tensor, unit, in_segment=False)
        charged = address is not None and tensor.device.type == self._device.type
        return SavedActivation(tensor, self._at.activations if charged else None)

    def keep(self, tensor: torch.Tensor) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        """Return what keeps `tensor` for backward as autograd would here and now, and what makes it of that again."""
        pack, unpack = top_hooks() or (self.pack, self.unpack)
        return pack(tensor), unpack

    def view_in_segment(self, tensor: torch.Tensor) -> SavedView | None:
        """Return the handle of a tensor of a segment that views a unit, None for any other tensor."""
        unit = self.binding.unit_at(_address(tensor))
        return None if unit is None else self._view(tensor, unit, in_segment=True)

    def _view(self, tensor: torch.Tensor, unit: int, *, in_segment: bool) -> SavedView:
        version = self._at.manager.tiers.param(unit).version
        offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return SavedView(unit, version, tensor.dtype, offset, shape, stride, in_segment)

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given."""
        if isinstance(saved, SavedActivation):
            return saved.get()
        assert isinstance(saved, SavedView)
        at = self._attached
        if at is None:
            raise StateError("backward: the engine that ran this forward is closed; run backward before close()")
        at.check_interrupt()
        if at.manager.tiers.param(saved.unit).version != saved.version:
            raise StateError(
                f"backward: parameters of {self._tree.units[saved.unit].name} were changed after this forward (by a "
                "step or by loading), so its graph is stale; run the forward again"
            )
        at.activations.balance()
        storage = at.manager.resident_storage(saved.unit, aside=saved.in_segment)
        return view_at(storage, saved.dtype, saved.offset, saved.shape, saved.stride)

    def _gradient_hook(self, unit: int, slot: int) -> Callable[[torch.Tensor], None]:
        reference = weakref.ref(self)  # the garbage collector does not see what a parameter's hooks refer to

        def hook(parameter: torch.Tensor) -> None:
            self = reference()
            if self is None:  # collected with its engine, and could not remove this; somebody else has the parameter
                return
            with no_subclasses():
                self._take_gradient(parameter, unit, slot)

        return hook

    def _take_gradient(self, parameter: torch.Tensor, unit: int, slot: int) -> None:
        """Hand on what autograd has made, and leave a handle."""
        at, where = self._at, (unit, slot)
        gradient, before = at.book.take(parameter, where)
        try:
            refusal = at.refuse_gradient()
            if refusal is not None:
                raise StateError(refusal)
            at.check_interrupt()
            if gradient.requires_grad:
                raise StateError(
                    f"gradient of {self._tree.units[unit].slots[slot].name}: expected backward without create_graph, "
                    "for nothing can be differentiated through .grad once it has left the device; use "
                    "torch.autograd.grad(loss, parameters, create_graph=True)"
                )
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if gradient.nbytes >= WORTH_SAMPLING_BYTES:
                at.activations.balance()
            shape = self._tree.units[unit].slots[slot].shape
            if gradient.dtype != self.binding.dtypes[unit] or tuple(gradient.shape) != shape:
                name = self._tree.units[unit].slots[slot].name
                resized = "was resized after it was wrapped, do so before"
                converted = "was converted after it was wrapped, pass dtype= to the engine"
                raise StateError(
                    f"gradient of {name}: expected {self.binding.dtypes[unit]} {shape} but got {gradient.dtype} "
                    f"{tuple(gradient.shape)}; the module {resized if tuple(gradient.shape) != shape else converted}"
                )
            self._note_task()
            final = at.final_micro_batch(at.manager.gradients.passes(unit, slot, self._pass))
            at.manager.add_gradient(unit, slot, gradient, final=final, backward_pass=self._pass)
        except BaseException:
            if before is not None:
                at.book.put(parameter, where, before)
            raise
        at.book.put(parameter, where, before)
        at.manager.advance_updates(at.guess)

    def _note_task(self) -> None:
        """Note which backward pass is under way; those that repeat a segment inside it belong to it."""
        task = graph_task()
        if task in self._tasks:
            return
        if self._repeated_in in self._tasks:
            self._tasks.add(task)
        else:
            self._tasks = {task}
            self._pass += 1

    def end_pass(self) -> None:
        """Note that the latest backward pass is over: what comes is of another one."""
        self._tasks.clear()
        self._repeated_in = NO_GRAPH_TASK


class _SeeParameters(TorchFunctionMode):
    """Brings parameters to the device that are used without their module's forward."""

    def __init__(self, hooks: Hooks) -> None:
        super().__init__()
        self.hooks = hooks

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        used = self.hooks.units_used(args)
        if kwargs:
            used += self.hooks.units_used(kwargs.values())
        if not used or self.hooks.all_lent(used) or what(func) in _NOT_SERVED:
            return func(*args, **kwargs)
        if self.hooks.collects_state(func, calling_frame(sys._getframe(1))):
            with no_subclasses():
                return func(*args, **kwargs)
        return self.hooks.use_unannounced(list(dict.fromkeys(used)), lambda: func(*args, **kwargs))


@contextlib.contextmanager
def _without_fast_path() -> Iterator[None]:
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)


# What needs no parameters on the device, and what a parameter's own class takes over or refuses.
_NOT_SERVED = (Does.LOOK, Does.OPEN, Does.MEASURE, Does.MAKE, Does.PASS, Does.ASSIGN, Does.WRITE)


def _owner_of(parameter: nn.Parameter) -> str | None:
    """Return what a parameter is called in the engine that has it, None where none has."""
    owner = owners.get(id(parameter))
    return None if owner is None else owner.describe(parameter)


def _address(tensor: torch.Tensor) -> int | None:
    """Return where a tensor's storage begins; None where it has no single one of its own."""
    if not refusals.has_own_storage(type(tensor)) or tensor.layout is not torch.strided:
        return None
    if tensor._is_zerotensor():  # what forward-mode differentiation makes of a missing tangent
        return None
    with no_subclasses():
        return tensor.untyped_storage().data_ptr()


_MEMORY_FORMATS = (torch.channels_last, torch.channels_last_3d)


def _in_format(tensor: torch.Tensor) -> Callable[[torch.memory_format], bool]:
    return lambda form: tensor.is_contiguous(memory_format=form)
