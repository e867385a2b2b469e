"""A micro-batch on the meta device, in each mode of activations: what is computed, and what would be moved.

Owns how a model is brought into a mode for that, and out of it again. Next: :mod:`offload.planning.work` counts,
:mod:`offload.activations.rehearsal` decides what leaves.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from torch import nn

from offload.activations.rehearsal import Rehearsal
from offload.module.recomputing import Recomputing, can_recompute
from offload.planning.choosing import AUTO, KEEP, OFFLOAD, RECOMPUTE
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.work import Work, work_of

Case = tuple[Plan, Work]


def cases_of(module: nn.Module, batch: Any, plan: Plan, tree: UnitTree) -> dict[str, Case]:
    """Return the plan and the work of a micro-batch per mode that is possible; arguments as of :func:`work_of`.

    There is one mode, unless ``activations="auto"`` has to choose.

    Raises:
        ConfigError: as :func:`work_of`, or the module has no blocks that could be computed again.
    """
    asked = plan.request.activations
    if asked == RECOMPUTE:
        return {asked: case_of(module, batch, plan, asked, tree)}
    case = case_of(module, batch, plan, OFFLOAD, tree)
    if asked != AUTO:
        return {asked: case}
    if not case[0].activation_step_bytes:
        return {KEEP: case}
    cases = {OFFLOAD: case}
    if can_recompute(module):
        cases[RECOMPUTE] = case_of(module, batch, plan, RECOMPUTE, tree)
    return cases


def case_of(module: nn.Module, batch: Any, plan: Plan, mode: str, tree: UnitTree, known: Work | None = None) -> Case:
    """Return a plan with what a micro-batch moves in a mode, and what it computes; this may be `known`.

    Raises:
        ConfigError: as :func:`cases_of`.
    """
    with _recomputing(module) if mode == RECOMPUTE else contextlib.nullcontext():
        work = known or work_of(module, batch, tree=tree)
        if not plan.near_bytes:
            return plan.with_activations({}), work
        moved, held = _rehearsed(module, batch, plan, plan.near_bytes, plan.last_bytes)
        if held > plan.activation_bytes:  # then an engine lets go of all that may leave
            _, held = _rehearsed(module, batch, plan, 0, 0)
        return plan.with_activations(moved), dataclasses.replace(work, held_bytes=held)


def held_bytes(module: nn.Module, batch: Any, plan: Plan, mode: str) -> int:
    """Return the activations that a micro-batch in a mode has on the device at once, if all leave that may.

    Raises:
        ConfigError: as :func:`cases_of`.
    """
    with _recomputing(module) if mode == RECOMPUTE else contextlib.nullcontext():
        return _rehearsed(module, batch, plan, 0, 0)[1] if plan.near_bytes else work_of(module, batch).peak_bytes


def _rehearsed(
    module: nn.Module, batch: Any, plan: Plan, near_bytes: int, last_bytes: int
) -> tuple[Mapping[str, int], int]:
    """Return the bytes of activations that a micro-batch moves per link, and those that are on the device at once."""
    request = plan.request
    rehearsal = Rehearsal(
        near_bytes=near_bytes,
        last_bytes=last_bytes,
        host_bytes=request.host_activation_bytes,
        drive_bytes=request.nvme_activation_bytes,
    )
    held = work_of(module, batch, rehearsal.watch).peak_bytes
    return rehearsal.moved(), held


@contextlib.contextmanager
def _recomputing(module: nn.Module) -> Iterator[None]:
    """Let the blocks of a model be computed again in the ``with`` block."""
    recomputing = Recomputing(module)
    recomputing.attach()
    try:
        yield
    finally:
        recomputing.detach()
