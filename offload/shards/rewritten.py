"""Room in the swap files for frozen units that somebody writes beside the last commit of a durable run.

No step writes them, so the plan has room for one version. Owns which were written since the last commit, and how much
longer the files become. Next: :mod:`offload.shards.manager` says when.
"""

from __future__ import annotations

from collections.abc import Iterable

from offload.planning import versions
from offload.planning.units import Unit
from offload.shards.tiers import Tiers


class Rewritten:
    """Frozen units whose content is not that of the last commit."""

    def __init__(self, tiers: Tiers) -> None:
        """Begin with none."""
        self._tiers = tiers
        self._units: dict[int, Unit] = {}

    def make_room(self, units: Iterable[Unit]) -> None:
        """Note that `units` are about to be written; have room for them, as far as the budget has any.

        The files become longer by twice as much each time, until there is room for all frozen units.

        Raises:
            swap.SwapFullError: the drive has no room. Nothing was written.
            swap.SwapError: another I/O error.
        """
        plan = self._tiers.plan
        request, numel = plan.request, plan.chunk_numel
        self._units |= {unit.index: unit for unit in units if not unit.trainable}
        needed = sum(versions.rewritten_bytes(request, unit, numel) for unit in self._units.values())
        arena = plan.store_bytes
        there = self._tiers.store_bytes - arena
        if needed > max(there, 0):
            self._tiers.lengthen(arena + min(max(needed, 2 * there), versions.frozen_bytes(request, numel)))

    def note_commit(self) -> None:
        """Note that all content is committed."""
        self._units.clear()
