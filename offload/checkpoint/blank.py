"""An engine whose content can be overwritten, whatever of it was lost by a load that failed half way.

Owns what takes the place of content that nobody will read: no states yet, and zeros. Next:
:mod:`offload.checkpoints` and :mod:`offload.importing`, which then load all of it.
"""

from __future__ import annotations

import ctypes

from offload.optim.recipe import StepCounts
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import without_reference
from offload.shards.manager import Manager
from offload.shards.stream import Chunk


def make_blank(manager: Manager, counts: StepCounts) -> None:
    """Let states be those before the first step, and parameters that were lost be zeros.

    Raises:
        swap.SwapError: an I/O error.
    """
    manager.finish_updates()
    for shard in manager.copies:
        if shard.role in STATE_ROLES:
            manager.copies.discard(shard)
    counts.forget()
    sliced = manager.tiers.plan.request.slices_parameters  # then ranks write together, and have lost other units
    own = without_reference(manager.units)
    lost = [unit for unit in own if sliced or manager.copies.is_lost(manager.tiers.param(unit.index))]

    def clear(chunk: Chunk) -> None:
        size = manager.tiers.chunk_bytes(chunk.unit, Role.PARAM, chunk.begin, chunk.end)
        ctypes.memset(chunk.addresses[Role.PARAM], 0, size)

    manager.stream(lost, clear, reads=frozenset(), writes=frozenset({Role.PARAM}))
