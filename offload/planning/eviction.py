"""Who leaves the device for whom: the policy by which working copies of parameters come and go.

Owns the choice, over a schedule and a region: pure Python, so that an engine and a forecast choose alike. Four rules,
for units of one size: what is used next comes next; what is used last leaves; nothing leaves for what is used later;
and nothing leaves ahead of time if a unit that is used in between would be the one to leave by then. With these, no
policy that asks for each unit at the latest while the one before it is used has fewer fetches.

Source: Belady, "A Study of Replacement Algorithms for a Virtual-Storage Computer" (1966); Cao, Felten, Karlin and Li,
"A Study of Integrated Prefetching and Caching Strategies" (1995). With the fourth rule, theirs is the conservative one.

Next: :mod:`offload.shards.working_set` evicts by it, :mod:`offload.planning.residency` tells what a step fetches.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from offload.memory.region import Region
from offload.planning.schedule import NEVER, Schedule


def who_gives_way(region: Region, schedule: Schedule, unit: int, *, required: bool) -> list[int]:
    """Return the owners in `region` that are used later than a unit, or if it is `required` now, all of them."""
    return region.owners() if required else schedule.used_later(region.owners(), schedule.distance(unit))


def who_may_leave(region: Region, schedule: Schedule, idle: Iterable[int], wanted_bytes: int) -> dict[int, int] | None:
    """Return the owners in `region` that may leave for a unit, the cheapest with the least number; None if too few may.

    Args:
        region: where working copies are; no gap in it is large enough.
        schedule: tells when units are used.
        idle: those of what :func:`who_gives_way` has returned that can be evicted now.
        wanted_bytes: of the unit's working copy.
    """
    costs = {owner: -schedule.distance(owner) for owner in idle}
    return costs if region.free_bytes_without(costs) >= wanted_bytes else None


def who_leaves(
    region: Region,
    schedule: Schedule,
    unit: int,
    size_bytes: Callable[[int], int],
    costs: dict[int, int] | None,
    *,
    required: bool,
    packs: bool = False,
) -> list[int] | None:
    """Return the owners in `region` to evict for a unit; None where nobody may leave for it.

    Args:
        region: where working copies are.
        schedule: tells when units are used.
        unit: that is to come.
        size_bytes: of a unit's working copy, 0 of one that is at home on the device.
        costs: what :func:`who_may_leave` has returned.
        required: the unit is used now, so that everything that may leave does.
        packs: what stays is moved together; else those that leave are neighbours.
    """
    if costs is None:
        return None
    mine, wanted_bytes = schedule.distance(unit), size_bytes(unit)
    if packs:
        leaving = _used_last(region, size_bytes, wanted_bytes, costs)
    else:
        leaving = region.cheapest_window(wanted_bytes, costs.get)
    if not leaving or required or mine in (0, NEVER):
        return leaving
    soonest = min(map(schedule.distance, leaving))
    if schedule.latest(mine) <= soonest:
        return leaving
    before = schedule.coming(mine - 1)  # is in use while this unit has to come, at the latest
    for other in {schedule.coming(-1), *schedule.upcoming(mine)} - {before}:  # that in use now, and those in between
        if size_bytes(other) >= wanted_bytes and schedule.distance(other, behind=mine) > soonest:
            return None
    return leaving


def _used_last(
    region: Region, size_bytes: Callable[[int], int], wanted_bytes: int, costs: dict[int, int]
) -> list[int] | None:
    free_bytes, leaving = region.size_bytes - region.used_bytes, list[int]()
    for owner in sorted(costs, key=costs.__getitem__):
        if free_bytes >= wanted_bytes:
            break
        leaving.append(owner)
        free_bytes += size_bytes(owner)
    return leaving if free_bytes >= wanted_bytes else None
