"""What users change outside of their engine's own calls becomes the parameters' content, or is refused.

Users write through tensors that view parameters, assign ``parameter.data``, and write to what ``module.state_dict()``
has given them. Owns which units may have been written to, and the copies that state dicts gave. Writing home is the
business of :class:`Writer`. Next: :mod:`offload.module.outside` tells of reads and assignments.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from typing import Any, Protocol

import torch

from offload.errors import StateError
from offload.module.binding import Binding
from offload.module.forwards import Forwards
from offload.module.load import ModuleLoad
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.torch_private import counted_by, in_backward, no_dispatch, no_functions


class Writer(Protocol):
    """Writes parameters home."""

    def write(self, values: Mapping[Where, Any]) -> None:
        """Let the contents of parameters be these tensors, each of its parameter's shape."""

    def adopt(self, index: int) -> None:
        """Let what was changed in place in a unit that is on the device be its content."""


class OutsideChanges:
    """Changes of one engine's parameters by others. See the module's text.

    Attributes:
        loads: through the module, whose values are changes, too.
        handed: units that tensors outside the module may still view.
    """

    def __init__(self, binding: Binding, forwards: Forwards, manager: Manager, writer: Writer) -> None:
        """Prepare.

        Args:
            binding: tells what others have changed.
            forwards: while one is under way, changes wait.
            manager: owner of the shards.
            writer: of parameters home.
        """
        self._binding = binding
        self._forwards = forwards
        self._manager = manager
        self._writer = writer
        self.loads = ModuleLoad(binding.tree.leases, self.write)
        self.handed: set[int] = set()
        # That state dicts gave: what counts changes of each, and how many there were then. On a CPU nobody need keep
        # the copy. Those of another device are on the CPU, where torch would make another one of each parameter.
        self._copies: list[tuple[str, weakref.ref[torch.Tensor], torch.Tensor | None, int]] = []
        self._counts = manager.tiers.device.addressable

    def note_handed(self, index: int) -> None:
        """Note that tensors outside the module may view a unit."""
        self.handed.add(index)

    def adopt(self) -> None:
        """Let what was loaded, or written through tensors that view parameters, be the parameters' content."""
        if self._forwards.under_way or in_backward():
            return
        self.loads.flush()
        if self._copies:
            self._refuse_written_copies()
        if not self.handed:
            return
        binding = self._binding
        for index in list(self.handed):
            if binding.is_lent(index):
                continue  # gathered: whoever did looks for itself
            if index not in binding.rebound and binding.changed(binding.tree.units[index]) is not None:
                self._writer.adopt(index)
            if not self._manager.bound.borrowed(index):
                self.handed.discard(index)

    def write(self, values: Mapping[Where, Any]) -> None:
        """Let the contents of parameters be these tensors, after what was written to them before."""
        self.forget_copies()  # who has written to them meant this
        self.adopt()
        self._writer.write(values)

    def note_copies(self, copies: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Note what ``module.state_dict()`` gives away, where plain torch gives the parameters' own memory."""
        self._refuse_written_copies()
        with no_functions(), no_dispatch():
            for name, copy in copies:
                if not copy.is_inference():
                    nothing = torch.empty(0, dtype=copy.dtype, device=copy.device)
                    counter = counted_by(copy, nothing) if self._counts else None
                    self._copies.append((name, weakref.ref(copy), counter, copy._version))

    def forget_copies(self) -> None:
        """Let what state dicts gave away be written to."""
        self._copies.clear()

    def _refuse_written_copies(self) -> None:
        for name, reference, own, version in self._copies:
            counter = reference() if own is None else own
            if counter is not None and counter._version != version:
                self.forget_copies()
                raise StateError(
                    f"state dict: {name} was written to, which changes no parameter: while an engine has the module, "
                    "its state dict has copies; load what was changed with module.load_state_dict(state, strict=False)"
                )
        self._copies = [entry for entry in self._copies if entry[1]() is not None]
