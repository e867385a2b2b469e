"""One parameter of an engine in full: its fp32 master and its optimizer states, in and out of the tiers.

Next: :mod:`offload.integrations.deepspeed.utils` offers it to scripts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint import values as checkpoint
from offload.errors import StateError
from offload.planning.units import Where
from offload.shards.manager import Manager


class FullValues:
    """Reads and writes single parameters of one engine."""

    def __init__(self, parts: Parts) -> None:
        self._parts = parts

    def read(self, manager: Manager, parameter: nn.Parameter, state: str | None) -> torch.Tensor | None:
        """Return a copy of the master, or of a state, in fp32 on the engine's device; None where there is none."""
        where = self._where(parameter)
        self._parts.changes.adopt()
        unit = manager.units[where[0]]
        text = self._meet(manager, where, state)
        found = self._states(manager, where, text).get("master" if state is None else state) if unit.trainable else None
        if found is None and state is None:
            if unit.trainable and unit.dtype != "float32":
                found = checkpoint.gather_masters(manager, (), wanted={where}, where=text)[where]
            if found is None:
                with self._parts.tensors.gather(parameter, modify=False):
                    found = parameter.detach().float().clone()
        return found.to(self._parts.device.place) if isinstance(found, torch.Tensor) else None

    def write(self, manager: Manager, parameter: nn.Parameter, value: torch.Tensor, state: str | None) -> None:
        """Let the master, or a state, have other elements."""
        where = self._where(parameter)
        name = manager.units[where[0]].slots[where[1]].name
        new = value.detach().float().cpu()
        if state is None:
            self._parts.tensors.load({name: new}, strict=False)
            return
        self._parts.changes.adopt()
        found = self._states(manager, where, self._meet(manager, where, state))
        if state not in found:
            raise StateError(f"{state} of {name}: expected a state but there is none (yet); take a step first")
        checkpoint.scatter_states(manager, self._parts.steps.counts, {where: {**found, state: new}})

    def _where(self, parameter: nn.Parameter) -> Where:
        binding = self._parts.hooks.binding
        where = binding.slot_of(parameter)
        if where is None:
            raise StateError(
                f"parameter {binding.name(parameter)}: expected one with elements of its own but it is quantized; take "
                "its dequantize()"
            )
        return where

    def _meet(self, manager: Manager, where: Where, state: str | None) -> str:
        """Meet all ranks, each of which has a part of the states; returns where."""
        text = f"{state or 'the master'} of {manager.units[where[0]].slots[where[1]].name}"
        self._parts.ranks.agree(text)
        return text

    def _states(self, manager: Manager, where: Where, text: str) -> dict[str, Any]:
        """Return the states of a parameter; nothing where there are none, or not yet."""
        return checkpoint.gather_states(manager, self._parts.steps.counts, wanted={where}, where=text).get(where, {})
