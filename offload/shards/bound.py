"""Which units' parameters view their bytes on the device, and whether anybody else views them or has changed them.

Owns the views. It rebinds no parameter itself: that is the :class:`Binder`'s work (``module/binding.py``). Knows no
states of shards: :mod:`offload.shards.working_set` is next, and says when units come and go.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Protocol

import torch

from offload.errors import StateError
from offload.memory.arena import Arena, Buffer, view_at, views_at
from offload.planning.units import Unit
from offload.torch_private import no_dispatch, no_functions, storage_use_count

# Of a tensor that views a unit: dtype, first element, shape, stride.
Form = tuple[torch.dtype, int, torch.Size, tuple[int, ...]]
MOST_FORMS = 4  # per parameter that are kept: its own, transposed, and the same of a part


class Binder(Protocol):
    """Makes parameters see their bytes."""

    def bind(self, unit: Unit, address: int, views: Sequence[torch.Tensor]) -> None:
        """Let the unit's parameters be what `views` view, one each: the unit's bytes begin at `address`."""

    def unbind(self, unit: Unit) -> None:
        """Let the unit's parameters be stand-ins without memory."""

    def changed(self, unit: Unit) -> str | None:
        """Return the name of a bound parameter that somebody else has changed."""

    def count_update(self, unit: Unit) -> None:
        """Let torch count a change of each of a bound unit's parameters, which is nobody else's."""


@dataclasses.dataclass(slots=True)
class Residency:
    """A unit's parameters on the device.

    Attributes:
        storage: over the bytes.
        views: of the storage, one for each parameter.
        own_references: how many of the storage's are its own, those of the views, and the binding's.
        others: further views of the storage, by their form, that were asked for: backward asks for the same ones again.
    """

    storage: torch.UntypedStorage
    views: list[torch.Tensor]
    own_references: int = 0
    others: dict[Form, torch.Tensor] = dataclasses.field(default_factory=dict)

    @classmethod
    def at(cls, buffer: Buffer, arena: Arena, unit: Unit) -> Residency:
        """Return that of a unit whose bytes are in a buffer of an arena."""
        storage = arena.storage(buffer)
        places = [(slot.offset_numel, slot.shape) for slot in unit.slots]
        return cls(storage, views_at(storage, getattr(torch, unit.dtype), places))

    @property
    def address(self) -> int:
        """Where the bytes are: others may have moved them elsewhere, as ``share_memory_`` does."""
        return self.storage.data_ptr()

    def borrowed(self) -> bool:
        """Tell whether a tensor other than the parameters still views the bytes."""
        return storage_use_count(self.storage) > self.own_references

    def note_bound(self, borrowers: int = 0) -> None:
        """Note that the parameters view the bytes, beside references of others."""
        self.own_references = storage_use_count(self.storage) - borrowers

    def note_unbound(self) -> None:
        """Note that the parameters view them no more."""
        self.own_references = 1 + len(self.views) + len(self.others)

    def view(self, form: Form) -> torch.Tensor:
        """Return a tensor over the bytes, or some of them, of which nobody else has this object."""
        known = self.others.get(form)
        if known is None:
            known = view_at(self.storage, *form)
            plain = known.untyped_storage().data_ptr() == self.address  # else a transform of torch's has wrapped it
            if not plain or len(self.others) >= MOST_FORMS * len(self.views):
                return known
            self.others[form] = known
            self.own_references += 1
        if torch.is_inference_mode_enabled():
            return view_at(self.storage, *form)
        with no_functions(), no_dispatch():
            return known.detach()


class BoundUnits:
    """Units whose parameters view their bytes on the device. See the module's text."""

    def __init__(self, units: Sequence[Unit], arena: Arena, binder: Binder) -> None:
        """Begin with none.

        Args:
            units: all there are.
            arena: of the device.
            binder: rebinds parameters.
        """
        self._units = units
        self._arena = arena
        self._binder = binder
        self._residency: dict[int, Residency] = {}
        self._last: dict[int, Residency] = {}  # of units that have left: most come to the same place again
        self._hidden: set[int] = set()  # units that an update is still to come to: nobody may see them as they are

    def __contains__(self, index: int) -> bool:
        """Tell whether the unit's parameters are on the device and bound."""
        return index in self._residency

    def __iter__(self) -> Iterator[int]:
        """Iterate over the units, which must stay the same meanwhile."""
        return iter(self._residency)

    def storage(self, index: int) -> torch.UntypedStorage:
        """Return the storage that a unit's parameters view."""
        return self._residency[index].storage

    def view(self, index: int, form: Form) -> torch.Tensor:
        """Return a tensor over a unit's bytes, which keeps them where they are as long as it lives."""
        return self._residency[index].view(form)

    def borrowed(self, index: int) -> bool:
        """Tell whether a tensor other than the parameters views the unit's bytes on the device."""
        return index in self._residency and self._residency[index].borrowed()

    def count_update(self, unit: Unit) -> None:
        """Let torch count that the bytes were updated: graphs that have kept what views them are stale."""
        for view in self._residency[unit.index].others.values():
            if not view.is_inference():
                torch.autograd.graph.increment_version(view)
        if unit.index not in self._hidden:
            self._binder.count_update(unit)

    def bind(self, unit: Unit, buffer: Buffer) -> None:
        """Let the unit's parameters view `buffer`."""
        index = unit.index
        residency = self._last.pop(index, None)
        if residency is None or residency.address != buffer.address or residency.borrowed():
            residency = Residency.at(buffer, self._arena, unit)
        if index not in self._hidden:
            self._binder.bind(unit, residency.address, residency.views)
        residency.note_bound()
        self._residency[index] = residency

    def unbind(self, unit: Unit) -> Residency:
        """Let the unit's parameters be stand-ins; return what tells whether somebody still views the bytes."""
        if unit.index not in self._hidden:
            self._binder.unbind(unit)
        residency = self._last[unit.index] = self._residency.pop(unit.index)
        residency.note_unbound()
        return residency

    def hide(self, unit: Unit) -> None:
        """Let the unit's parameters be stand-ins until :meth:`show`, wherever their bytes are."""
        residency = self._residency.get(unit.index)
        if residency is not None:
            self._binder.unbind(unit)
            residency.note_unbound()
        self._hidden.add(unit.index)

    def hides(self, index: int) -> bool:
        """Tell whether the unit's parameters are stand-ins wherever their bytes are."""
        return index in self._hidden

    def show(self, unit: Unit) -> None:
        """Let the unit's parameters be seen again, where they are on the device."""
        self._hidden.discard(unit.index)
        residency = self._residency.get(unit.index)
        if residency is not None:
            borrowers = storage_use_count(residency.storage) - residency.own_references
            self._binder.bind(unit, residency.address, residency.views)
            residency.note_bound(borrowers)

    def forget(self) -> None:
        """Keep nothing of units that have left: their places may become others'."""
        self._last.clear()

    def refuse_change(self, unit: Unit) -> None:
        """Check that nobody else has written to the unit's parameters, or rebound them.

        Raises:
            StateError: somebody has, outside ``engine.gather(modify=True)``; names the parameter.
        """
        name = self._binder.changed(unit)
        if name is not None:
            raise StateError(
                f"parameter {name}: was changed in place or rebound outside the engine, and would be lost; change it "
                "inside engine.gather(parameter, modify=True)"
            )

    def refuse_changes(self) -> None:
        """Check the same of all units.

        Raises:
            StateError: somebody has, as in :meth:`refuse_change`.
        """
        for index in self._residency:
            self.refuse_change(self._units[index])
