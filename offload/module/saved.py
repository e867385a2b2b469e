"""What autograd keeps for backward: of a tensor that views a unit a handle, of any other the tensor, charged.

Owns these handles, and our saved-tensor hooks on top of those of gradient checkpointing. Evicting a unit between
forward and backward frees its memory, for a handle holds none of it. Next: :mod:`offload.module.hooks`, whose forwards
put the hooks in force.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from offload.activations.leaving import LeavingActivations, SavedElsewhere
from offload.activations.ledger import Activations, SavedActivation
from offload.errors import StateError
from offload.interrupt import Deferral
from offload.module.backward_passes import BackwardPasses
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.shards.bound import Form
from offload.shards.manager import Manager
from offload.torch_private import counts_tensors, no_dispatch, no_functions, top_hooks
from offload.wrappers import Shell, has_own_storage, is_wrapper, take_apart

_NOTHING = torch.empty(0, dtype=torch.uint8, device="cpu")  # whatever is the default where this is imported
_ORDINARY = frozenset({torch.Tensor, torch.nn.Parameter})


class SavedView(NamedTuple):
    """What autograd keeps instead of a tensor that views a unit."""

    unit: int
    version: int
    form: Form
    is_conj: bool  # complex, and read with the other sign of the imaginary part
    is_neg: bool  # read with the other sign
    in_segment: bool  # of gradient checkpointing, which may be repeated while what was saved is being looked at


def _signed(view: torch.Tensor, saved: SavedView) -> torch.Tensor:
    """Return a view that is read with the signs of what was saved."""
    if saved.is_conj or saved.is_neg:
        with no_functions(), no_dispatch():
            view = view.conj() if saved.is_conj else view
            view = view._neg_view() if saved.is_neg else view
    return view


class SavedTensors:
    """What autograd keeps of one engine's forwards. See the module's text."""

    def __init__(
        self,
        binding: Binding,
        changes: OutsideChanges,
        manager: Manager,
        activations: Activations,
        device: torch.device,
        deferral: Deferral,
        passes: BackwardPasses,
    ) -> None:
        """Prepare.

        Args:
            binding: knows the units by the addresses of their bytes.
            changes: by others.
            manager: owner of the shards.
            activations: ledger that tensors are charged to.
            device: of the engine; tensors of others are not charged.
            deferral: holds Ctrl-C back while something is half done.
            passes: of backward, which ask for what was saved.
        """
        self._passes = passes
        self._binding = binding
        self._changes = changes
        self._manager: Manager | None = manager
        self._activations = activations
        self._leaving = activations if isinstance(activations, LeavingActivations) else None
        self._device = device
        self._deferral = deferral

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep for `tensor`."""
        address = address_of(tensor)
        if address is None:
            return take_apart(tensor).map(self.pack) if is_wrapper(tensor) else SavedActivation(tensor)
        view = self._view(tensor, address, in_segment=False)
        if view is not None:
            return view
        if tensor.device != self._device:
            return SavedActivation(tensor)
        if self._leaving is not None:
            return self._deferral.around(self._leaving.keep, tensor)
        return SavedActivation(tensor, self._activations, address)

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given.

        Raises:
            StateError: the engine is closed, or the parameters have changed since.
        """
        if self._passes.is_over:
            self._passes.note()  # so that its beginning is counted
        if isinstance(saved, SavedActivation):
            return saved.get()
        if isinstance(saved, SavedElsewhere):
            assert self._leaving is not None
            return self._deferral.around(self._bring, self._leaving, saved)
        if isinstance(saved, Shell):
            return saved.map(self.unpack).tensor()
        assert isinstance(saved, SavedView)
        manager = self._manager
        if manager is None:
            raise StateError("backward: the engine that ran this forward is closed; run backward before close()")
        return self._deferral.around(self._fetch, manager, saved)

    def _bring(self, leaving: LeavingActivations, saved: SavedElsewhere) -> torch.Tensor:
        self._deferral.check()
        self._passes.note()
        with no_functions():
            return leaving.bring(saved)

    def _fetch(self, manager: Manager, saved: SavedView) -> torch.Tensor:
        self._deferral.check()
        self._passes.note()
        if manager.copies.params[saved.unit].version != saved.version:
            raise StateError(
                f"backward: parameters of {self._binding.tree.units[saved.unit].name} were changed after this forward "
                "(by a step or by loading), so its graph is stale; run the forward again"
            )
        if saved.unit in self._changes.handed:
            self._refuse_written(saved)
        self._activations.balance()
        # Not by a name here: the frame of a read that failed may outlive this, and would keep the view.
        return _signed(manager.view_of(saved.unit, saved.form, aside=saved.in_segment), saved)

    def _refuse_written(self, saved: SavedView) -> None:
        """Refuse a view of a parameter that was written to through a tensor that views it, as torch does."""
        unit = self._binding.tree.units[saved.unit]
        dtype, first, shape, strides = saved.form
        last = first + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        scale = dtype.itemsize / self._binding.dtypes[saved.unit].itemsize
        for slot in (unit.slots[index] for index in self._binding.changes(unit)):
            if first * scale < slot.offset_numel + slot.numel and slot.offset_numel < (last + 1) * scale:
                raise StateError(
                    f"backward: parameter {slot.name} was written to after this forward, through a tensor that views "
                    "it, so its graph is stale; write to it before the forward, or after backward"
                )

    def keep(self, tensor: torch.Tensor) -> tuple[Any, Callable[[Any], torch.Tensor]]:
        """Return what keeps `tensor` for backward as autograd would here and now, and what makes it of that again."""
        pack, unpack = top_hooks() or (self.pack, self.unpack)
        return pack(tensor), unpack

    def view_in_segment(self, tensor: torch.Tensor) -> SavedView | Shell[object] | None:
        """Return the handle of a tensor of a segment that views a unit, None for any other tensor."""
        address = address_of(tensor)
        if address is not None:
            return self._view(tensor, address, in_segment=True)
        if is_wrapper(tensor):
            shell = take_apart(tensor)
            if any(self._binding.unit_at(address_of(inner)) is not None for _, inner in shell.items()):
                return shell.map(lambda inner: self.view_in_segment(inner) or self.pack(inner))
        return None

    def missing_hooks(self) -> torch.autograd.graph.saved_tensors_hooks | None:
        """Return the hooks to put in force, over those of somebody else; None where ours are uppermost."""
        hidden = top_hooks()
        if hidden is None:
            return self.hooks()
        owner = getattr(hidden[0], "__self__", None)
        if owner is self or (isinstance(owner, Over) and owner.saved is self):
            return None
        over = Over(self, *hidden)
        return torch.autograd.graph.saved_tensors_hooks(over.pack, over.unpack)

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        """Return our hooks, which put whatever is in force out of it."""
        return torch.autograd.graph.saved_tensors_hooks(self.pack, self.unpack)

    def close(self) -> None:
        """Rebuild no more tensors. Idempotent."""
        self._manager = None

    def _view(self, tensor: torch.Tensor, address: int, *, in_segment: bool) -> SavedView | None:
        """Return the handle of a tensor that views a unit, or is a parameter that is away; None for any other one."""
        unit = self._binding.unit_at(address)
        if unit is not None:
            form = (tensor.dtype, int(tensor.storage_offset()), tensor.shape, tensor.stride())
        else:
            where = self._binding.stood_in_for(address)
            if where is None:
                return None
            unit, slot = where[0], self._binding.tree.units[where[0]].slots[where[1]]
            with no_functions():  # as it is when it is here
                here = torch.empty(slot.shape, dtype=self._binding.dtypes[unit], device="meta")
                form = (here.dtype, slot.offset_numel, here.shape, here.stride())
        assert self._manager is not None, "closed"
        version = self._manager.copies.params[unit].version
        return SavedView(unit, version, form, tensor.is_conj(), tensor.is_neg(), in_segment)


class Over:
    """Our saved-tensor hooks over those of somebody else: views of units are ours, everything else is theirs.

    Gradient checkpointing without reentrance counts the tensors that pass its hooks, in the forward and again in its
    repetition; of views of units it gets an empty tensor both times. So a unit need not stay on the device while its
    segment waits, and a repetition that saves something else is refused by torch: no other tensor is like that one.
    """

    def __init__(
        self, saved: SavedTensors, pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]
    ) -> None:
        self.saved = saved
        self._pack = pack
        self._unpack = unpack
        self._counts = counts_tensors(pack)

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep for `tensor`."""
        view = self.saved.view_in_segment(tensor)
        if view is None:
            return _Theirs(self._pack(tensor), self._unpack)
        if self._counts:
            self._pack(_NOTHING)
        return view

    def unpack(self, saved: object) -> torch.Tensor:
        """Return the tensor that :meth:`pack` was given."""
        return saved.unpack(saved.packed) if isinstance(saved, _Theirs) else self.saved.unpack(saved)


class _Theirs(NamedTuple):
    """What other saved-tensor hooks made of a tensor."""

    packed: Any
    unpack: Callable[[Any], torch.Tensor]


def address_of(tensor: torch.Tensor) -> int | None:
    """Return where a tensor's storage begins; None where it has no single one of its own."""
    kind = type(tensor)
    if (kind not in _ORDINARY and not has_own_storage(kind)) or tensor.layout is not torch.strided:
        return None
    with no_functions():
        if tensor._is_zerotensor():  # what forward-mode differentiation makes of a missing tangent
            return None
        return tensor.untyped_storage().data_ptr()
