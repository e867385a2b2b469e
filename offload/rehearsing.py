"""A micro-batch on the meta device, in each mode of activations: what is computed, and what would be moved.

Owns how a model is brought into a mode for that, and out of it again. Next: :mod:`offload.planning.work` counts,
:mod:`offload.activations.rehearsal` decides what leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.activations.rehearsal import Rehearsal
from offload.errors import ConfigError
from offload.module.block_state import BlockState
from offload.module.recomputing import Recomputing, can_recompute
from offload.planning.choosing import AUTO, KEEP, OFFLOAD, RECOMPUTE
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.work import Work, is_ids, work_of

Case = tuple[Plan, Work]


class Rehearsals:
    """Micro-batches on the meta device. None runs twice, and modules do not change in between."""

    def __init__(self, dtype: torch.dtype | None) -> None:
        """Begin with nothing; parameters are cast to `dtype`, if it is given."""
        self._dtype = dtype
        self._held: dict[tuple[object, ...], tuple[Mapping[str, int], int]] = {}

    def cases(self, module: nn.Module, batch: Any, plan: Plan, tree: UnitTree) -> dict[str, Case]:
        """Return the plan and the work of a micro-batch per mode that is possible; arguments as of :func:`work_of`.

        There is one mode, unless ``activations="auto"`` has to choose.

        Raises:
            ConfigError: as :func:`work_of`, or the module has no blocks that could be computed again.
        """
        asked = plan.request.activations
        if asked == RECOMPUTE:
            return {asked: self.case(module, batch, plan, asked, tree)}
        case = self.case(module, batch, plan, OFFLOAD, tree)
        if asked != AUTO:
            return {asked: case}
        if not case[0].activation_step_bytes:
            return {KEEP: case}
        cases = {OFFLOAD: case}
        if can_recompute(module):
            cases[RECOMPUTE] = self.case(module, batch, plan, RECOMPUTE, tree)
        return cases

    def case(
        self, module: nn.Module, batch: Any, plan: Plan, mode: str, tree: UnitTree, known: Work | None = None
    ) -> Case:
        """Return a plan with what a micro-batch moves in a mode, and what it computes.

        The latter may be `known`: then it is for seconds, and what the device holds at once is not looked for.

        Raises:
            ConfigError: as :meth:`cases`.
        """
        with _recomputing(module) if mode == RECOMPUTE else contextlib.nullcontext():
            work = known or self._work(module, batch, plan, tree=tree)
        if not plan.near_bytes:
            self._held[_key(module, batch, mode)] = {}, work.peak_bytes
            return plan.with_activations({}), work
        moved, held = self._rehearsed(module, batch, plan, mode, plan.near_bytes, plan.last_bytes)
        if known is None and held > plan.activation_bytes:  # then an engine lets go of all that may leave
            held = self.held_bytes(module, batch, plan, mode)
        return plan.with_activations(moved), dataclasses.replace(work, held_bytes=held)

    def _work(self, module: nn.Module, batch: Any, plan: Plan, **asked: Any) -> Work:
        """Count it, and let the module be what it was: forwards count their calls, keep what they made, and draw.

        A module in evaluation mode, as loaded ones are, is counted in training mode: a step is. Its ``train`` is not
        called, for those of some libraries change weights. Parts of a module in training mode keep their own modes.
        """
        state = BlockState(module, ())
        with state.put_back(), torch.random.fork_rng(devices=[]):
            if not module.training:
                for part in module.modules():
                    part.training = True
            work = work_of(module, batch, **asked, dtype=self._dtype, on_cpu=plan.request.device_is_host)
        changed = state.changed()
        if changed is not None:
            raise ConfigError(
                f"model {type(module).__name__}: its forward changed {changed} in place, which cannot be put back; "
                "leave batch out to have the plan in bytes, or register it as a buffer"
            )
        return work

    def held_bytes(self, module: nn.Module, batch: Any, plan: Plan, mode: str) -> int:
        """Return the activations that a micro-batch in a mode has on the device at once, if all leave that may.

        Raises:
            ConfigError: as :meth:`cases`.
        """
        return self._rehearsed(module, batch, plan, mode, 0, 0)[1]

    def _rehearsed(
        self, module: nn.Module, batch: Any, plan: Plan, mode: str, near_bytes: int, last_bytes: int
    ) -> tuple[Mapping[str, int], int]:
        """Return the bytes of activations that a micro-batch moves per link, and those on the device at once."""
        rooms = {
            "near_bytes": near_bytes,
            "last_bytes": last_bytes,
            "host_bytes": plan.request.host_activation_bytes,
            "drive_bytes": plan.request.nvme_activation_bytes,
        }
        key = _key(module, batch, mode, *(rooms.values() if plan.near_bytes else ()))
        if key not in self._held:
            rehearsal = Rehearsal(**rooms) if plan.near_bytes else None
            with _recomputing(module) if mode == RECOMPUTE else contextlib.nullcontext():
                work = self._work(module, batch, plan, watch=rehearsal.watch if rehearsal else None)
            self._held[key] = rehearsal.moved() if rehearsal else {}, work.peak_bytes
        return self._held[key]


def _key(module: nn.Module, batch: Any, mode: str, *rooms: int) -> tuple[object, ...]:
    """Return what tells a micro-batch from others; of those that are no sizes of ids, there is one."""
    return module, batch if is_ids(batch) else None, mode == RECOMPUTE, rooms


@contextlib.contextmanager
def _recomputing(module: nn.Module) -> Iterator[None]:
    """Let the blocks of a model be computed again in the ``with`` block."""
    recomputing = Recomputing(module)
    recomputing.attach()
    try:
        yield
    finally:
        recomputing.detach()
