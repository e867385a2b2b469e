"""How many bytes of the swap files older versions take, which somebody still needs while training writes new ones.

Owns who needs them: the last commit of a durable run, and a checkpoint that is copied meanwhile.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.sizes import whole_pages


def committed_bytes(request: Request, chunk_numel: int) -> int:
    """Return what the last commit keeps, beside the versions that are current.

    Of several ranks, it is the last two: another rank may lack the last one.
    """
    if request.commit is None:
        return 0
    trained = [unit for unit in request.units if unit.trainable]
    shards = sum(
        request.record_bytes(unit, roles, chunk_numel) for unit in trained for roles in ((Role.PARAM,), STATE_ROLES)
    )
    kept = 1 if request.world_size == 1 else 2
    return kept * shards + 2 * kept * whole_pages(request.commit.record_bytes)  # two versions of each record


def frozen_bytes(request: Request, chunk_numel: int) -> int:
    """Return what a durable run needs beside, once somebody writes all frozen parameters: no step does."""
    return sum(rewritten_bytes(request, unit, chunk_numel) for unit in request.units)


def rewritten_bytes(request: Request, unit: Unit, chunk_numel: int) -> int:
    """Return the same for one unit; 0 where it is trained: the plan has room for that."""
    return 0 if unit.trainable else request.record_bytes(unit, (Role.PARAM,), chunk_numel)


def held_bytes(request: Request, homes: Sequence[Homes], chunk_numel: int) -> int:
    """Return what a checkpoint holds, beside the versions that training writes."""
    return sum(
        request.record_bytes(unit, roles, chunk_numel)
        for unit, home in zip(request.units, homes, strict=True)
        for tier, roles in ((home.param, (Role.PARAM,)), (home.states, STATE_ROLES))
        if request.holds and unit.trainable and tier is Tier.NVME
    )
