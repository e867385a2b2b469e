"""A micro-batch on the meta device, in each mode of activations: what is computed, and what would be moved.

Owns how a model is brought into a mode for that, and out of it again. Next: :mod:`offload.planning.work` counts,
:mod:`offload.activations.rehearsal` decides what leaves.
"""

from __future__ import annotations

import contextlib
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


def moved_by(module: nn.Module, batch: Any, plan: Plan) -> Mapping[str, int]:
    """Return the bytes of activations that a micro-batch moves per link where a plan lets them leave, none else."""
    request = plan.request
    if not plan.near_bytes:
        return {}
    rehearsal = Rehearsal(
        near_bytes=plan.near_bytes,
        last_bytes=plan.last_bytes,
        host_bytes=request.host_activation_bytes,
        drive_bytes=request.nvme_activation_bytes,
    )
    work_of(module, batch, rehearsal.watch)
    return rehearsal.moved()


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


def case_of(module: nn.Module, batch: Any, plan: Plan, mode: str, tree: UnitTree) -> Case:
    """Return a plan with what a micro-batch moves in a mode, and what it computes.

    Raises:
        ConfigError: as :func:`cases_of`.
    """
    with _recomputing(module) if mode == RECOMPUTE else contextlib.nullcontext():
        return plan.with_activations(moved_by(module, batch, plan)), work_of(module, batch, tree=tree)


@contextlib.contextmanager
def _recomputing(module: nn.Module) -> Iterator[None]:
    """Let the blocks of a model be computed again in the ``with`` block."""
    recomputing = Recomputing(module)
    recomputing.attach()
    try:
        yield
    finally:
        recomputing.detach()
