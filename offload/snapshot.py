"""What users see of a run's bytes, seconds, hits and stalls: one frozen snapshot of the counters of all parts.

Owns where each number of :class:`offload.stats.Stats` comes from, and each span. Next: :mod:`offload.engine` offers
both to users.
"""

from __future__ import annotations

from collections.abc import Hashable

from offload.build import Parts
from offload.memory.budget import Tier
from offload.seeing.history import Sample
from offload.shards.manager import Manager
from offload.spans import NVME_READ, NVME_WRITE, Recorded, Span
from offload.stats import LinkStats, Stats
from swap import PAST_TRANSFERS


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
    used = {tier.value: budget.used_bytes for tier, budget in parts.budgets.items()}
    if manager is not None:
        used = manager.tiers.used_bytes()
    links, peak = _moved(parts, manager)
    return Stats(
        step=run.steps,
        skipped_steps=run.skipped,
        links=links,
        hits=counters.hits,
        misses=counters.misses,
        stalls=counters.stalls,
        stall_seconds=counters.stall_seconds,
        update_chunks=counters.update_chunks,
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
    links, peak = _moved(parts, manager)
    return Sample(
        time_s=time_s,
        step=run.steps + run.skipped,
        used_bytes=manager.tiers.used_bytes(),
        peak_bytes=peak,
        links=links,
        waited=dict(spans.waited),
        passes=dict(spans.passes),
        loss=loss,
        grad_norm=None if step is None else step.grad_norm,
    )


def _moved(parts: Parts, manager: Manager | None) -> tuple[dict[str, LinkStats], dict[str, int]]:
    """Return what links have moved, and the most that each tier has held."""
    links = parts.counters.links()
    peak = {tier.value: budget.peak_bytes for tier, budget in parts.budgets.items()}
    store = None if manager is None else manager.tiers.store
    if store is not None:
        swapped = store.stats()
        links["nvme_read"] = LinkStats(swapped.read_bytes, swapped.read_seconds)
        links["nvme_write"] = LinkStats(swapped.written_bytes, swapped.write_seconds)
        peak[Tier.NVME.value] = swapped.peak_used_bytes
    return links, peak


def take_spans(parts: Parts, manager: Manager) -> Recorded:
    """Return what all lanes have lately done; the drive's from its store.

    Args:
        parts: of the engine.
        manager: owner of the shards.
    """
    manager.tiers.mover.note_times()
    recorded, store = parts.counters.spans.recorded(), manager.tiers.store
    if store is None:
        return recorded
    drive = {
        lane: [
            Span(lane, _name_of(past.key, manager), past.begin_s, past.end_s, past.size_bytes)
            for past in store.past(writes=lane == NVME_WRITE)
        ]
        for lane in (NVME_READ, NVME_WRITE)
    }
    return recorded.beside(Recorded.of(drive, PAST_TRANSFERS))


def _name_of(key: Hashable, manager: Manager) -> str:
    """Return what an object of the store is: a role of a unit, or part of a run's record."""
    if isinstance(key, tuple) and len(key) == 3:
        index, role, _ = key
        return f"{role}: {manager.units[index].name}"
    return "record"
