"""Writes parameters home: values that somebody gives, and what was changed in place on the device.

Owns the choice of which masters follow. The bytes are :mod:`offload.checkpoint.values`'s business. Next:
:mod:`offload.module.changes`, which tells when.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch

from offload.checkpoint import values as checkpoint
from offload.checkpoint.sources import Source
from offload.module.binding import Binding
from offload.planning.roles import Role
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.torch_private import no_subclasses


class ParameterWriter:
    """Writes one engine's parameters home. See the module's text."""

    def __init__(self, binding: Binding, manager: Callable[[], Manager]) -> None:
        """Prepare.

        Args:
            binding: tells what was changed in place.
            manager: returns the owner of the shards, or raises where it is not to be used any more.
        """
        self._binding = binding
        self._manager = manager

    def write(self, values: Mapping[Where, torch.Tensor | Source]) -> None:
        """Let the contents of parameters be these tensors, or what sources read, each of its parameter's shape."""
        checkpoint.scatter_parameters(self._manager(), values)

    def adopt(self, index: int) -> None:
        """Let what was changed in place in a unit that is on the device be its content.

        Its home still has what was there before, and tells which elements have changed: only their masters change.
        """
        manager, unit = self._manager(), self._binding.tree.units[index]
        manager.finish_updates()
        shard = manager.copies.of(index, Role.PARAM)
        parameters = self._binding.tree.parameters[index]
        with no_subclasses():
            values = {
                (index, slot): parameters[slot].detach().to("cpu", copy=True) for slot in self._binding.changes(unit)
            }
        if not shard.stays and not shard.is_sliced:
            manager.working.read_again(shard, manager.tiers.deadline_s)
        self._binding.accept_changes(unit)
        checkpoint.scatter_parameters(manager, values, keep_masters=not shard.stays)
