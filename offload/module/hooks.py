"""Ties a module tree to the memory manager; the only file that rebinds ``param.data``.

Owns the hooks on modules and parameters, the stand-ins of parameters that are not on the device, who sees which of the
two, and the handles that autograd keeps instead of parameters:

* A parameter that is not resident has as ``.data`` one NaN *expanded* to its shape (stride 0): shape, dtype and
  identity stay real, it takes no memory, and a use that slipped through turns into NaN, which is noticed.
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
from offload.labels import labelled
from offload.memory.tiers import view_at
from offload.module import refusals
from offload.module.absent import absent_class, is_lost, owners
from offload.module.handles import Handles
from offload.module.saved import InForce, Over, SavedView
from offload.module.torch_calls import Does, calling_frame, what
from offload.planning.partition import UnitTree
from offload.planning.units import Unit
from offload.shards.manager import Manager
from offload.torch_private import (
    NO_GRAPH_TASK,
    function_modes,
    graph_task,
    in_backward,
    is_transformed,
    may_have_hooks,
    no_functions,
    no_subclasses,
    top_hooks,
)

# Modules that some engine manages, so that a second one can be refused.
_managed: weakref.WeakSet[nn.Module] = weakref.WeakSet()


@dataclasses.dataclass(frozen=True, slots=True)
class Ask:
    """What the hooks ask of those above them.

    Attributes:
        final_micro_batch: whether no further backward pass follows before the step, given how many there have been.
        refuse_gradient: why gradients are not taken now; None where they are.
        check_interrupt: hands an interrupt on that came meanwhile.
        assign: lets the content of a parameter be a tensor's.
        take_over: lets what was changed in place in a unit be its content.
        load: takes the value that ``module.load_state_dict`` copies to a parameter; False where none is under way.
    """

    final_micro_batch: Callable[[int], bool]
    refuse_gradient: Callable[[], str | None]
    check_interrupt: Callable[[], None]
    assign: Callable[[tuple[int, int], torch.Tensor], None]
    take_over: Callable[[int], None]
    load: Callable[[tuple[int, int], Any], bool]


class Hooks:
    """Hooks of one engine on its model. See the module's text."""

    def __init__(self, model: nn.Module, tree: UnitTree, device: torch.device) -> None:
        taken = [tree.module_names[m] or "model" for m in tree.leases if m in _managed]
        if taken:
            raise StateError(
                f"model {type(model).__name__}: already wrapped by another engine (at {taken[0]}); {NEW_ENGINE}"
            )
        refusals.refuse_shared(tree, _owner_of)
        refusals.refuse_used(tree, is_lost)
        self._tree = tree
        self._device = device
        self._leases = dict(tree.leases)
        self._remembered: dict[nn.Module, tuple[int, ...]] = {}  # units used in a module's forward without a lease
        self._slot_of: dict[int, tuple[int, int]] = {}
        self._stand_ins: list[list[torch.Tensor]] = []
        self._dtypes = [getattr(torch, unit.dtype) for unit in tree.units]
        for unit, parameters in zip(tree.units, tree.parameters, strict=True):
            self._stand_ins.append([stand_in(s.shape, self._dtypes[unit.index], device) for s in unit.slots])
            for slot, parameter in enumerate(parameters):
                self._slot_of[id(parameter)] = (unit.index, slot)
        self._kinds = [[type(parameter) for parameter in parameters] for parameters in tree.parameters]
        self._lent = [0] * len(tree.units)  # by those who use a unit's parameters now
        self._handed: set[int] = set()  # units that tensors outside the module may still view
        self._copies: list[tuple[str, weakref.ref[torch.Tensor], int]] = []  # that state dicts gave, as they were then
        self._bases: dict[int, int] = {}
        self._base_of: dict[int, int] = {}
        self._versions: dict[int, list[int]] = {}  # torch's version counters when the unit was bound
        self._away: dict[int, list[int]] = {}  # units whose parameters are stand-ins, with torch's counters since then
        self._rebound: dict[int, str] = {}  # parameter of a unit that somebody has changed while it was a stand-in
        self._stack: list[tuple[nn.Module, tuple[int, ...], InForce]] = []
        self._watching = 0
        self._registered: list[RemovableHandle] = []
        self._manager: Manager | None = None
        self._activations: Activations | None = None
        self._handles: Handles | None = None
        self._ask: Ask | None = None
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

    # --- binding ----------------------------------------------------------------------------------------------------

    @labelled("bind")
    def bind(self, unit: Unit, storage: torch.UntypedStorage) -> None:
        """Let the unit's parameters view `storage`."""
        dtype = self._dtypes[unit.index]
        with no_functions():
            versions = self._away.pop(unit.index, None)
            if versions is not None:
                self._note_rebound(unit, versions)
            for slot, parameter in zip(unit.slots, self._tree.parameters[unit.index], strict=True):
                parameter.data = view_at(storage, dtype, slot.offset_numel, slot.shape)
            self._versions[unit.index] = [p._version for p in self._tree.parameters[unit.index]]
        base = storage.data_ptr()
        self._bases[base] = unit.index
        self._base_of[unit.index] = base

    def unbind(self, unit: Unit) -> None:
        """Let the unit's parameters be stand-ins."""
        base = self._base_of.pop(unit.index, None)
        self._versions.pop(unit.index, None)
        self._rebound.pop(unit.index, None)
        if base is not None:
            del self._bases[base]
        with no_functions():
            for index, parameter in enumerate(self._tree.parameters[unit.index]):
                parameter.data = self._stand_ins[unit.index][index]
            self._away[unit.index] = [p._version for p in self._tree.parameters[unit.index]]

    def _note_rebound(self, unit: Unit, versions: list[int]) -> None:
        """Note a parameter that is not the stand-in any more, or whose content was written to through an alias."""
        parameters, stand_ins = self._tree.parameters[unit.index], self._stand_ins[unit.index]
        for slot, parameter, ours, version in zip(unit.slots, parameters, stand_ins, versions, strict=True):
            if parameter.data_ptr() != ours.data_ptr() or parameter._version != version:
                self._rebound[unit.index] = slot.name
                return

    def replace(self, unit: Unit, tensors: Iterable[torch.Tensor]) -> None:
        """Give the unit's parameters ordinary memory: the engine is being closed."""
        with no_subclasses():
            for parameter, tensor in zip(self._tree.parameters[unit.index], tensors, strict=True):
                parameter.data = tensor
        self._set_classes(unit.index, self._kinds[unit.index])

    def abandon(self, index: int) -> None:
        """Let nobody read parameters whose content is lost."""
        self._set_classes(index, map(absent_class, self._kinds[index]))

    @staticmethod
    def give_back(parameter: nn.Parameter, own: torch.Tensor) -> None:
        """Let a parameter that was rebound view its own memory again."""
        with no_subclasses():
            parameter.data = own

    def changed(self, unit: Unit) -> str | None:
        """Return the name of a parameter that somebody else has written to or rebound since the unit was bound."""
        first = next(self.changes(unit), None)
        return None if first is None else unit.slots[first].name

    def changes(self, unit: Unit) -> Iterator[int]:
        """Yield the slots of parameters that somebody else has written to or rebound since the unit was bound."""
        versions = self._versions.get(unit.index)
        if versions is None:
            return
        base, rebound = self._base_of[unit.index], self._rebound.get(unit.index)
        with no_subclasses():
            found = [(p._version, p.data_ptr()) for p in self._tree.parameters[unit.index]]
        for position, (slot, version, now) in enumerate(zip(unit.slots, versions, found, strict=True)):
            moved = slot.numel and now[1] != base + slot.offset_numel * unit.itemsize
            if now[0] != version or moved or slot.name == rebound:
                yield position

    def refuse_rebound(self) -> None:
        """Check that no parameter is other memory than its unit's: what somebody has put there in a forward.

        Raises:
            StateError: one is; names it.
        """
        for index, base in self._base_of.items():
            unit = self._tree.units[index]
            with no_subclasses():
                found = [parameter.data_ptr() for parameter in self._tree.parameters[index]]
            for slot, now in zip(unit.slots, found, strict=True):
                if slot.numel and now != base + slot.offset_numel * unit.itemsize:
                    raise StateError(
                        f"parameter {slot.name}: was rebound (its .data replaced) inside a forward, and what was put "
                        "there is lost; assign outside of forwards, or inside engine.gather(parameter, modify=True)"
                    )

    def accept_changes(self, unit: Unit) -> None:
        """Take the present content of the unit's parameters as its own."""
        self._rebound.pop(unit.index, None)
        if unit.index in self._versions:
            with no_subclasses():
                self._versions[unit.index] = [p._version for p in self._tree.parameters[unit.index]]

    def untrained(self) -> str | None:
        """Return the name of a parameter that wants a gradient but that nobody trains."""
        model = self._model()
        if model is None:
            return None
        with no_subclasses():
            for name, parameter in model.named_parameters():
                if parameter.requires_grad:
                    where = self._slot_of.get(id(parameter))
                    if where is None or not self._tree.units[where[0]].trainable:
                        return name
        return None

    def slot_of(self, parameter: torch.Tensor) -> tuple[int, int] | None:
        """Return (unit, slot) of a parameter of this model."""
        return self._slot_of.get(id(parameter))

    def describe(self, parameter: torch.Tensor) -> str:
        """Return what a parameter of this model is called here, for messages."""
        unit, slot = self._slot_of[id(parameter)]
        return f"{self._tree.units[unit].slots[slot].name} of the engine on {type(self._model()).__name__}"

    # --- attach and detach ------------------------------------------------------------------------------------------

    def attach(self, manager: Manager, activations: Activations, handles: Handles, ask: Ask) -> None:
        """Register all hooks."""
        self._manager = manager
        self._activations = activations
        self._handles = handles
        self._ask = ask
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
        owners.update(dict.fromkeys(self._slot_of, self))
        for index in range(len(self._kinds)):
            self._set_classes(index, map(absent_class, self._kinds[index]))

    def detach(self) -> None:
        """Remove all hooks. Idempotent. Parameters that are not given memory of their own then cannot be read."""
        self.unwind()
        for handle in self._registered:
            handle.remove()
        self._registered.clear()
        for module in self._leases:
            _managed.discard(module)
        if self._handles is not None:
            self._handles.clear()
        for identity in self._slot_of:
            if owners.get(identity) is self:
                del owners[identity]
        for index, lent in enumerate(self._lent):
            if lent:  # gathered by somebody who is still at it
                self._set_classes(index, map(absent_class, self._kinds[index]))
        self._manager = None

    def unwind(self) -> None:
        """Leave every forward that an interrupt has torn out of."""
        with contextlib.ExitStack() as last:  # all of them, whatever fails on the way
            for _ in self._stack:
                last.callback(self._leave)

    # --- lending ----------------------------------------------------------------------------------------------------

    def acquire(self, index: int) -> None:
        """Lease a unit's parameters, and lend them: they are ordinary parameters until :meth:`release`."""
        assert self._manager is not None
        refusals.refuse_child(self._process)
        self._manager.acquire(index)
        self._lent[index] += 1
        if self._lent[index] == 1:
            self._set_classes(index, self._kinds[index])

    def release(self, index: int, *, leased: bool = True) -> None:
        """Take parameters back, and return the lease; not where an error has returned all leases (not `leased`)."""
        if self._manager is None:  # closed meanwhile
            return
        self._lent[index] -= 1
        if not self._lent[index]:
            self._set_classes(index, map(absent_class, self._kinds[index]))
        if leased:
            self._manager.release(index)

    def _set_classes(self, index: int, kinds: Iterable[type]) -> None:
        for parameter, kind in zip(self._tree.parameters[index], kinds, strict=True):
            parameter.__class__ = kind

    # --- modules ----------------------------------------------------------------------------------------------------

    def _before_forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        assert self._manager is not None
        refusals.refuse_child(self._process)
        if self._stack and not in_backward() and self._is_stale(module):
            self.unwind()  # an interrupt has torn out of what was not called through the engine
        assert self._activations is not None and self._ask is not None and self._handles is not None
        self._ask.check_interrupt()
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
                self._handles.adopt()
            self._activations.close_pass()  # of a backward that was not called through the engine
            self._activations.open_pass()
        self._activations.balance()
        units = self._leases[module]
        contexts = self._enter()
        leased = 0
        try:
            for index in units:
                self.acquire(index)
                leased += 1
            if self._rebound:
                self._manager.working.refuse_changes()
            for index in self._remembered.get(module, ()):
                self._manager.note_use(index)
        except BaseException:
            for index in units[:leased]:
                self.release(index)
            contexts.leave()
            raise
        self._stack.append((module, units, contexts))

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
        assert self._manager is not None
        if not self._stack and not in_backward():
            self._manager.begin_pass(training=torch.is_grad_enabled())
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
        assert self._manager is not None
        if not self._manager.hides_parameters:
            return True
        modes = function_modes()
        return any(isinstance(mode, _SeeParameters) and mode.hooks is self for mode in modes)

    def _seeing(self) -> contextlib.AbstractContextManager[object]:
        """Return what brings parameters that are used unannounced, and makes torch choose its operators as if it did.

        Attention has a fast path for evaluation, of other operators, that torch takes only where no mode is active.
        """
        assert self._manager is not None
        return _SeeParameters(self) if self._manager.hides_parameters else _without_fast_path()

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
        assert self._manager is not None
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
            assert self._activations is not None and self._manager is not None
            self._manager.advance_updates()
            if output is not None:
                self._activations.balance()
            elif not self._stack:  # the forward has failed
                self._activations.abandon_pass()

    def _leave(self) -> None:
        _, units, contexts = self._stack.pop()
        try:
            for index in units:
                self.release(index)
        finally:
            contexts.leave()

    def use_unannounced(self, indices: list[int], call: Callable[[], Any]) -> Any:
        """Run `call`, which uses the parameters of the units `indices`; not all of them are lent.

        The innermost module remembers those that no hook has brought: where a prefetch brings one in time, the
        schedule must still learn of its use.
        """
        assert self._manager is not None
        if self._stack:
            module, leased, _ = self._stack[-1]
            new = [index for index in indices if index not in leased]
            self._remembered[module] = tuple(dict.fromkeys((*self._remembered.get(module, ()), *new)))
        taken = []
        try:
            for index in sorted(indices, key=lambda index: index not in self._base_of):  # hold first what is here
                self.acquire(index)
                taken.append(index)
            return call()
        finally:
            for index in taken:
                self.release(index)

    def units_used(self, values: Iterable[Any]) -> list[int]:
        """Return the units of the parameters in `values` (one level deep)."""
        used = []
        for value in values:
            where = self._slot_of.get(id(value))  # parameters are kept alive: their ids are theirs alone
            if where is not None:
                used.append(where[0])
            elif type(value) in (list, tuple):
                used.extend(self.units_used(value))
        return used

    def all_lent(self, indices: list[int]) -> bool:
        """Tell whether the parameters of all these units are on the device, for somebody to use."""
        return all(self._lent[index] for index in indices)

    # --- parameters outside their uses ------------------------------------------------------------------------------

    def read(self, parameters: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call`, which reads these parameters outside a forward, or where no mode sees it.

        What autograd saves of them meanwhile are handles, so that a penalty on all weights needs no room for them all;
        but not where somebody else's hooks are in force, who counts what he sees (gradient checkpointing does).

        Raises:
            BudgetError: they do not fit the device budget at once, beside those that other tensors still view.
        """
        self.settle_changes()
        indices = list(dict.fromkeys(self._slot_of[id(parameter)][0] for parameter in parameters))
        try:
            with contextlib.ExitStack() as contexts:
                if top_hooks() is None and torch.is_grad_enabled():
                    contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack))
                result = self.use_unannounced(indices, call)
        except BudgetError as error:
            names = ", ".join(self._name(parameter) for parameter in parameters[:3])
            raise BudgetError(
                f"{names}: expected room on the device to read them outside a forward but there is none beside what is "
                "in use or viewed by other tensors; read fewer at once, drop their views, or use engine.gather or "
                f"engine.apply\n{error}"
            ) from error
        assert self._manager is not None
        for index in indices:
            if self._manager.working.borrowed(index) or self.changed(self._tree.units[index]) is not None:
                self._handed.add(index)
                self._manager.working.finish_open_updates()  # whoever views them may write while nothing leaves
        return result

    def assign(self, parameter: torch.Tensor, value: Any) -> None:
        """Let a parameter's content be that of `value`: ``parameter.data = value``.

        Raises:
            StateError: `value` is of another shape, dtype or device.
        """
        if value is parameter:
            return
        assert self._ask is not None and self._manager is not None
        where = self._slot_of[id(parameter)]
        with no_subclasses():
            own = (tuple(parameter.shape), parameter.dtype, parameter.device)
            got = (tuple(value.shape), value.dtype, value.device) if isinstance(value, torch.Tensor) else type(value)
            if own != got:
                raise StateError(
                    f"{self._name(parameter)}: expected a tensor of shape, dtype and device {own} as its .data but got "
                    f"{got}; its form cannot change while an engine has it (pass dtype= to the engine, or close it)"
                )
            if not value.is_contiguous() and any(map(_in_format(value), _MEMORY_FORMATS)):
                raise StateError(
                    f"{self._name(parameter)}: expected a tensor in torch's default memory format as its .data but got "
                    "one with channels last; convert the module before the engine is made"
                )
            mine = value.data_ptr() == parameter.data_ptr() and value.is_contiguous()
            viewed = _address(value) in self._bases
        if not mine:
            if viewed or self._manager.working.borrowed(where[0]):
                raise StateError(
                    f"{self._name(parameter)}: expected no other tensor that views it, or parameters beside it, when "
                    "its .data is replaced, for that tensor would change, too; drop it, or take a copy with "
                    "parameter.detach().clone()"
                )
            self._ask.assign(where, value)
        elif where[0] in self._base_of:
            self._handed.add(where[0])
            self.settle_changes()

    def load(self, parameter: torch.Tensor, value: Any) -> bool:
        """Take the value of a parameter that ``module.load_state_dict`` has come to; False where none is under way."""
        assert self._ask is not None
        return self._ask.load(self._slot_of[id(parameter)], value)

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
        assert self._manager is not None and self._ask is not None
        for index in list(self._handed):
            if self._lent[index]:
                continue  # gathered: whoever did looks for itself
            if index not in self._rebound and self.changed(self._tree.units[index]) is not None:
                self._ask.take_over(index)
            if not self._manager.working.borrowed(index):
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

    def _name(self, parameter: torch.Tensor) -> str:
        unit, slot = self._slot_of[id(parameter)]
        return f"parameter {self._tree.units[unit].slots[slot].name}"

    # --- autograd ---------------------------------------------------------------------------------------------------

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep for `tensor`."""
        address = _address(tensor)
        if address in self._bases:
            return self._view(tensor, self._bases[address], in_segment=False)
        charged = address is not None and tensor.device.type == self._device.type
        return SavedActivation(tensor, self._activations if charged else None)

    def keep(self, tensor: torch.Tensor) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        """Return what keeps `tensor` for backward as autograd would here and now, and what makes it of that again."""
        pack, unpack = top_hooks() or (self.pack, self.unpack)
        return pack(tensor), unpack

    def view_in_segment(self, tensor: torch.Tensor) -> SavedView | None:
        """Return the handle of a tensor of a segment that views a unit, None for any other tensor."""
        address = _address(tensor)
        return self._view(tensor, self._bases[address], in_segment=True) if address in self._bases else None

    def _view(self, tensor: torch.Tensor, unit: int, *, in_segment: bool) -> SavedView:
        assert self._manager is not None
        version = self._manager.versions[unit]
        offset, shape, stride = int(tensor.storage_offset()), tensor.shape, tensor.stride()
        return SavedView(unit, version, tensor.dtype, offset, shape, stride, in_segment)

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given."""
        if isinstance(saved, SavedActivation):
            return saved.get()
        assert isinstance(saved, SavedView)
        if self._manager is None:
            raise StateError("backward: the engine that ran this forward is closed; run backward before close()")
        assert self._ask is not None
        self._ask.check_interrupt()
        if self._manager.versions[saved.unit] != saved.version:
            raise StateError(
                f"backward: parameters of {self._tree.units[saved.unit].name} were changed after this forward (by a "
                "step or by loading), so its graph is stale; run the forward again"
            )
        assert self._activations is not None
        self._activations.balance()
        storage = self._manager.resident_storage(saved.unit, aside=saved.in_segment)
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
        assert self._manager is not None and self._activations is not None
        assert self._handles is not None and self._ask is not None
        where = unit, slot
        gradient, before = self._handles.take(parameter, where)
        try:
            refusal = self._ask.refuse_gradient()
            if refusal is not None:
                raise StateError(refusal)
            self._ask.check_interrupt()
            if gradient.requires_grad:
                raise StateError(
                    f"gradient of {self._tree.units[unit].slots[slot].name}: expected backward without create_graph, "
                    "for nothing can be differentiated through .grad once it has left the device; use "
                    "torch.autograd.grad(loss, parameters, create_graph=True)"
                )
            if gradient.layout is not torch.strided:
                gradient = gradient.to_dense()
            if gradient.nbytes >= WORTH_SAMPLING_BYTES:
                self._activations.balance()
            shape = self._tree.units[unit].slots[slot].shape
            if gradient.dtype != self._dtypes[unit] or tuple(gradient.shape) != shape:
                name = self._tree.units[unit].slots[slot].name
                resized = "was resized after it was wrapped, do so before"
                converted = "was converted after it was wrapped, pass dtype= to the engine"
                raise StateError(
                    f"gradient of {name}: expected {self._dtypes[unit]} {shape} but got {gradient.dtype} "
                    f"{tuple(gradient.shape)}; the module {resized if tuple(gradient.shape) != shape else converted}"
                )
            self._note_task()
            gradients = self._manager.gradients
            final = self._ask.final_micro_batch(gradients.passes(unit, slot, self._pass))
            gradients.add(unit, slot, gradient, final=final, backward_pass=self._pass)
        except BaseException:
            if before is not None:
                self._handles.put(parameter, where, before)
            raise
        self._handles.put(parameter, where, before)
        self._manager.advance_updates()

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


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `shape` without memory of its own, full of NaN (zeros where the dtype has no NaN)."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
