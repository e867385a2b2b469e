"""What users see of a run's bytes, seconds, hits and stalls: one frozen snapshot of the counters of all parts.

Owns where each number of :class:`offload.stats.Stats` comes from, and each span. Next: :mod:`offload.engine` offers
both to users.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from offload.build import Parts
from offload.memory.budget import Tier
from offload.seeing.history import Sample
from offload.shards.manager import Manager
from offload.spans import NVME_READ, NVME_WRITE, Recorded, Span
from offload.stats import LinkStats, Stats
from swap import PAST_TRANSFERS, SwapStats, SwapStore


def take_snapshot(parts: Parts, manager: Manager | None) -> Stats:
    """Return what has been counted so far.

    Args:
        parts: of the engine.
        manager: owner of the shards; None where the engine is closed.
    """
    counters, run = parts.counters, parts.steps.run
    if manager is not None:
        manager.tiers.mover.note_times()
    parts.activations.refund()
    links, used, peak = _counted(parts, manager)
    return Stats(
        step=run.steps,
        skipped_steps=run.skipped,
        links=links,
        hits=counters.hits,
        misses=counters.misses,
        stalls=counters.stalls,
        stall_seconds=counters.compute_waited_s("parameters"),
        update_chunks=counters.update_chunks,
        update_chunks_ahead=counters.update_chunks_ahead,
        update_stalls=counters.update_stalls,
        update_seconds=counters.update_seconds,
        update_stall_seconds=counters.update_stall_seconds,
        early_units=counters.early_units,
        early_units_dropped=counters.early_units_dropped,
        commits=counters.commits,
        commit_seconds=counters.commit_seconds,
        record_bytes=counters.record_bytes,
        used_bytes=used,
        peak_bytes=peak,
        budget_bytes={tier.value: budget.limit_bytes for tier, budget in parts.budgets.items()},
        loss_scale=run.scaler.scale,
        gathers=counters.gathers,
        gathers_for_others=counters.gathers_for_others,
        activation_stall_seconds=counters.compute_waited_s("activations"),
    )


def take_sample(parts: Parts, manager: Manager, time_s: float, loss: float | None = None) -> Sample:
    """Return what has been counted so far, for the history of a run. It asks no device, and gives nothing back.

    Args:
        parts: of the engine.
        manager: owner of the shards.
        time_s: of ``time.perf_counter``, now.
        loss: mean since the sample before, if known.
    """
    run, step, spans = parts.steps.run, parts.steps.step, parts.counters.spans
    links, used, peak = _counted(parts, manager)
    return Sample(
        time_s=time_s,
        step=run.steps + run.skipped,
        used_bytes=used,
        peak_bytes=peak,
        links=links,
        waited=dict(spans.waited),
        passes=dict(spans.passes),
        loss=loss,
        grad_norm=None if step is None else step.grad_norm,
    )


def _counted(parts: Parts, manager: Manager | None) -> tuple[dict[str, LinkStats], dict[str, int], dict[str, int]]:
    """Return what links have moved, what each tier holds, and the most that it has held."""
    links = parts.counters.links()
    peak = {tier.value: budget.peak_bytes for tier, budget in parts.budgets.items()}
    if manager is None:
        if parts.counters.drive_peak_bytes is not None:
            peak[Tier.NVME.value] = parts.counters.drive_peak_bytes
        return links, {tier.value: budget.used_bytes for tier, budget in parts.budgets.items()}, peak
    used = manager.tiers.used_bytes()
    stores = [store.stats() for store in _stores(parts, manager)]
    if stores:
        links |= _moved(stores)
        used[Tier.NVME.value] = sum(one.used_bytes for one in stores)
        peak[Tier.NVME.value] = sum(one.peak_used_bytes for one in stores)
    return links, used, peak


def keep_drive(parts: Parts, manager: Manager) -> None:
    """Keep what the swap stores have counted: they are about to be closed."""
    stores = [store.stats() for store in _stores(parts, manager)]
    if stores:
        for link, moved in _moved(stores).items():
            parts.counters.add(link, size_bytes=moved.bytes, seconds=moved.seconds)
        parts.counters.drive_peak_bytes = sum(one.peak_used_bytes for one in stores)


def _moved(stores: Sequence[SwapStats]) -> dict[str, LinkStats]:
    """Return what stores have read and written, which work side by side."""
    read_s, write_s = (max(getattr(one, name) for one in stores) for name in ("read_seconds", "write_seconds"))
    return {
        NVME_READ: LinkStats(sum(one.read_bytes for one in stores), read_s),
        NVME_WRITE: LinkStats(sum(one.written_bytes for one in stores), write_s),
    }


def take_spans(parts: Parts, manager: Manager) -> Recorded:
    """Return what all lanes have lately done; the drive's from its store.

    Args:
        parts: of the engine.
        manager: owner of the shards.
    """
    manager.tiers.mover.note_times()
    recorded = parts.counters.spans.recorded()
    for store in _stores(parts, manager):
        drive = {
            lane: [
                Span(lane, _name_of(past.key, manager), past.begin_s, past.end_s, past.size_bytes)
                for past in store.past(writes=lane == NVME_WRITE)
            ]
            for lane in (NVME_READ, NVME_WRITE)
        }
        recorded = recorded.beside(Recorded.of(drive, dict.fromkeys(drive, PAST_TRANSFERS)))
    return recorded


def _stores(parts: Parts, manager: Manager) -> list[SwapStore]:
    """Return the swap store, and of a durable run the one of activations."""
    return [store for store in (manager.tiers.store, parts.activations.store) if store is not None]


def _name_of(key: Hashable, manager: Manager) -> str:
    """Return what an object of the store is: a role of a unit, a part of a run's record, or an activation."""
    if isinstance(key, tuple) and len(key) == 3:
        index, role, _ = key
        return f"{role}: {manager.units[index].name}"
    return "activation" if isinstance(key, tuple) and key[0] == "activation" else "record"
