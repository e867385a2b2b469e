"""The order in which a micro-batch uses units, found out on the meta device.

Owns the recording: a module's forward uses the units that an engine would lease for it, and backward uses the unit of
each parameter that autograd has kept a view of. Uses that no module announces are seen in backward alone. Next:
:mod:`offload.planning.work` runs the micro-batch, :mod:`offload.planning.residency` tells what it fetches.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from offload.planning.partition import UnitTree
from offload.planning.units import Unit
from offload.torch_private import SavedTensorHooks, storage_place, top_hooks


@dataclasses.dataclass(frozen=True, slots=True)
class Uses:
    """The units that a micro-batch uses, in their order, by index.

    Attributes:
        forward, backward: its passes.
    """

    forward: tuple[int, ...]
    backward: tuple[int, ...]

    @classmethod
    def in_order(cls, units: Iterable[Unit]) -> Uses:
        """Return those of a model that uses its units as they come, and back."""
        order = tuple(unit.index for unit in units)
        return cls(order, order[::-1])


class Recording:
    """Notes the uses of one model's units. See the module's text.

    Attributes:
        latest: the unit that was used last: what is computed now is counted as its own.
        calls: of modules that have the engine's hooks, since somebody has taken them, by the unit that was latest.
    """

    def __init__(self, tree: UnitTree, parameters: Mapping[str, torch.Tensor]) -> None:
        """Begin; `parameters` are those that are used, on the meta device, by their names in the model."""
        self._leases = tree.leases
        self._units = {
            storage_place(parameters[slot.name]): unit.index
            for unit in tree.units
            for slot in unit.slots
            if slot.name in parameters
        }
        self._noted: list[int] = []
        self.latest = 0
        self.calls: collections.Counter[int] = collections.Counter()

    def enter(self, module: nn.Module) -> contextlib.AbstractContextManager[Any]:
        """Note that a module's forward begins; what is returned is in force until it ends."""
        for unit in self._leases.get(module, ()):
            self.note(unit)
        self.calls[self.latest] += module in self._leases
        hidden = top_hooks()
        if hidden is not None and isinstance(getattr(hidden[0], "__self__", None), _Over):
            return contextlib.nullcontext()
        over = _Over(self, hidden)
        return torch.autograd.graph.saved_tensors_hooks(over.pack, over.unpack)

    def take(self) -> tuple[int, ...]:
        """Return what was noted since the last time."""
        found, self._noted = tuple(self._noted), []
        return found

    def unit_of(self, tensor: torch.Tensor) -> int | None:
        """Return the unit that a tensor is a view of."""
        return self._units.get(storage_place(tensor))

    def note(self, unit: int) -> None:
        """Note a use."""
        self._noted.append(unit)
        self.latest = unit


class _Over:
    """Saved-tensor hooks that see views of units, over those of somebody else, such as gradient checkpointing."""

    def __init__(self, recording: Recording, hidden: SavedTensorHooks | None) -> None:
        self._recording = recording
        self._hidden = hidden

    def pack(self, tensor: torch.Tensor) -> object:
        """Return what autograd shall keep."""
        unit = self._recording.unit_of(tensor)
        if unit is not None:
            return unit, tensor
        return None, tensor if self._hidden is None else self._hidden[0](tensor)

    def unpack(self, saved: Any) -> Any:
        """Return the tensor that :meth:`pack` was given."""
        unit, kept = saved
        if unit is not None:
            self._recording.note(unit)
            return kept
        return kept if self._hidden is None else self._hidden[1](kept)
