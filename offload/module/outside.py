"""Parameters that are read and assigned outside of forwards, and loaded by ``module.load_state_dict()``.

Owns serving such calls, which a parameter's own class sees (:mod:`offload.module.absent`). What users write through
what they get is :mod:`offload.module.changes`'s business. Next: :mod:`offload.module.hooks` attaches this.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch import nn

from offload.errors import BudgetError, StateError
from offload.memory.budget import Tier
from offload.module.absent import owners
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.module.gradient_book import GradientBook
from offload.module.saved import SavedTensors, address_of
from offload.module.torch_calls import collects_state
from offload.module.unannounced import UnannouncedUses
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.torch_private import in_backward, no_subclasses, top_hooks

_MEMORY_FORMATS = (torch.channels_last, torch.channels_last_3d)


class OutsideAccess:
    """The :class:`.Keeper` of one engine's parameters. See the module's text."""

    def __init__(
        self,
        model: nn.Module,
        binding: Binding,
        book: GradientBook,
        uses: UnannouncedUses,
        saved: SavedTensors,
        changes: OutsideChanges,
        manager: Manager,
    ) -> None:
        """Prepare; :meth:`attach` lets calls come here.

        Args:
            model: whose parameters these are.
            binding: knows where they are.
            book: of their gradients.
            uses: lends them for one call.
            saved: what autograd keeps of them meanwhile.
            changes: takes what is written to them.
            manager: owner of the shards.
        """
        self._model = weakref.ref(model)
        self._binding = binding
        self._book = book
        self._uses = uses
        self._saved = saved
        self._changes = changes
        self._manager = manager

    def attach(self) -> None:
        """Let every call on a parameter come here, but for those where it is lent."""
        self._changes.loads.attach()
        owners.update(dict.fromkeys(self._binding.identities(), self))
        for unit in self._binding.tree.units:
            self._binding.watch(unit.index)

    def detach(self) -> None:
        """Undo :meth:`attach`. Idempotent. Parameters that are not given memory of their own then cannot be read."""
        self._changes.loads.detach()
        for identity in self._binding.identities():
            if owners.get(identity) is self:
                del owners[identity]

    def describe(self, parameter: torch.Tensor) -> str:
        """Return what a parameter of this model is called here, for messages."""
        return f"{self._binding.name(parameter)} of the engine on {type(self._model()).__name__}"

    def read(self, parameters: list[torch.Tensor], call: Callable[[], Any]) -> Any:
        """Run `call`, which reads these parameters outside a forward, or where no mode sees it.

        What autograd saves of them meanwhile are handles, so that a penalty on all weights needs no room for them all;
        but not where somebody else's hooks are in force, who counts what he sees (gradient checkpointing does).

        Raises:
            BudgetError: they do not fit the device budget at once, beside those that other tensors still view.
        """
        self._changes.adopt()
        binding, manager = self._binding, self._manager
        indices = list(dict.fromkeys(binding.units_of(parameters)))
        try:
            with contextlib.ExitStack() as contexts:
                if top_hooks() is None and torch.is_grad_enabled():
                    contexts.enter_context(self._saved.hooks())
                result = self._uses.use(indices, call)
        except BudgetError as error:
            names = ", ".join(f"parameter {binding.name(parameter)}" for parameter in parameters[:3])
            raise BudgetError(
                f"{names}: expected room on the device to read them outside a forward but there is none beside what is "
                "in use or viewed by other tensors; read fewer at once, drop their views, or use engine.gather or "
                f"engine.apply\n{error}"
            ) from error
        for index in indices:
            if manager.bound.borrowed(index) or binding.changed(binding.tree.units[index]) is not None:
                self._changes.note_handed(index)
                manager.forward.finish_open()  # whoever views them may write while nothing leaves
        return result

    def assign(self, parameter: torch.Tensor, value: Any) -> None:
        """Let a parameter's content be that of `value`: ``parameter.data = value``.

        Raises:
            StateError: `value` is of another shape, dtype or device.
        """
        if value is parameter:
            return
        if self._binding.wrapper_of(parameter) is not None:
            raise StateError(
                f"parameter {self._binding.name(parameter)}: expected its inner tensors to be written but got a tensor "
                "as its .data, which changes nothing in plain torch; use engine.load_state_dict, or write inner "
                "tensors inside engine.gather(parameter, modify=True)"
            )
        where, name = self._where(parameter), f"parameter {self._binding.name(parameter)}"
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
                    "one with channels last, which no engine keeps; pass batches in that format, or leave it out"
                )
            mine = value.data_ptr() == parameter.data_ptr() and value.is_contiguous()
            viewed = self._binding.unit_at(address_of(value)) is not None
        if not mine:
            if viewed or self._manager.bound.borrowed(where[0]):
                graph = "or compute the value under torch.no_grad(), " if value.requires_grad else ""
                raise StateError(
                    f"{name}: expected no other tensor that views it, or parameters beside it, when "
                    f"its .data is replaced, for that tensor would change, too; drop it, {graph}or take a copy with "
                    "parameter.detach().clone()"
                )
            self._changes.write({where: value})
        elif self._binding.is_bound(where[0]):
            self._changes.note_handed(where[0])
            self._changes.adopt()

    def show_gradient(self, parameter: torch.Tensor) -> None:
        """Let ``parameter.grad`` be what it stands for."""
        where = self._binding.slot_of(parameter)
        if where is not None:
            self._book.show(where)

    def show_address(self, parameter: torch.Tensor) -> None:
        """Lend the parameter to the forward under way, so that its address is that of its bytes until that ends.

        Raises:
            BudgetError: the device has no room for it beside what the forward has lent so far.
            StateError: a backward pass wants it, and the bytes do not stay on the device.
        """
        indices = self._binding.units_of([parameter])
        if self.in_forward():
            try:
                self._uses.lend(indices)
            except BudgetError as error:
                raise BudgetError(
                    f"parameter {self.describe(parameter)}: data_ptr in a forward keeps it on the device until that "
                    f"ends; id(parameter) tells parameters apart without that: {error}",
                    budgets=error.budgets,
                ) from error
        elif in_backward() and not all(map(self._stays, indices)):  # what is there by chance may leave at any time
            raise StateError(
                f"parameter {self.describe(parameter)}: data_ptr in a backward pass expected memory that stays where "
                "it is; keep the parameter by ctx.save_for_backward in forward, and take what that returns"
            )

    def begin_backward(self, parameter: torch.Tensor) -> None:
        """Let a backward pass begin with a parameter as a gradient of the user's.

        Raises:
            StateError: its bytes do not stay on the device.
        """
        if not all(map(self._stays, self._binding.units_of([parameter]))):
            raise StateError(
                f"parameter {self.describe(parameter)}: a gradient that a backward pass begins with expected memory "
                "that stays where it is; give parameter.detach().clone()"
            )

    def _stays(self, index: int) -> bool:
        return self._manager.tiers.plan.homes[index].param is Tier.DEVICE and self._binding.is_bound(index)

    def in_forward(self) -> bool:
        """Tell whether this thread is in a forward of the module."""
        return self._uses.in_forward

    def load(self, parameter: torch.Tensor, value: Any) -> bool:
        """Take the value of a parameter that ``module.load_state_dict`` has come to; False where none is under way."""
        loads = self._changes.loads
        if not loads.is_under_way or not isinstance(value, torch.Tensor):
            return False
        loads.note(self._binding.spread(parameter, value))
        return True

    def collects_state(self, func: Any, caller: FrameType) -> bool:
        """Tell whether this is torch making a state dict: its values are replaced by real ones when it has them all."""
        return collects_state(func, caller, self._binding.tree.leases)

    def _where(self, parameter: torch.Tensor) -> Where:
        where = self._binding.slot_of(parameter)
        assert where is not None
        return where


def _in_format(tensor: torch.Tensor) -> Callable[[torch.memory_format], bool]:
    return lambda form: tensor.is_contiguous(memory_format=form)
