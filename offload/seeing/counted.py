"""Where the time of the last steps went, of what was counted: for steps with more spans than are kept.

Owns what of a report counts can tell. Next: :mod:`offload.report` sums up spans, which tell more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from offload.report import LINKS, LaneReport, Report
from offload.seeing.history import Between, Sample
from offload.spans import COMPUTE, CPU_ADAM, D2H, H2D, STEP, Recorded
from offload.stats import LinkStats, Stats


def counted_report(
    recorded: Recorded,
    samples: Sequence[Sample],
    stats: Stats,
    *,
    host_computes: bool,
    predicted: Mapping[str, float] | None = None,
) -> Report | None:
    """Return where the time between the last two samples went; None where there are none, or no step is between them.

    What a CPU computes has no updates in it; it is compared together with them, as a plan tells it. How long the drive
    was busy is not known, for reads and writes are counted apart, nor how long gradients were taken from a GPU: these
    are not compared.

    Args:
        recorded: spans: those of steps are kept for long.
        samples: of the run.
        stats: bytes of the tiers.
        host_computes: the device is the CPU.
        predicted: as in :func:`offload.report.make_report`.
    """
    if len(samples) < 2:
        return None
    before, after = samples[-2:]
    ended = [span for span in recorded.spans if span.lane == STEP and before.time_s < span.end <= after.time_s]
    if not ended:
        return None
    between, nothing = Between.of(before, after), LinkStats(0, 0.0)
    links = {lane: between.links.get(lane, nothing) for lane in LINKS}
    took = {"step": between.seconds, **{lane: links[lane].seconds for lane in (COMPUTE, H2D, D2H)}}
    if host_computes:
        took[COMPUTE] += links[CPU_ADAM].seconds
    pairs = {name: (predicted.get(name, 0.0), seconds / len(ended)) for name, seconds in took.items() if predicted}
    return Report(
        step_seconds=tuple(span.end - span.begin for span in ended),
        seconds=between.seconds,
        lanes={lane: LaneReport(link.seconds, link.bytes) for lane, link in links.items()},
        waits={what: seconds for what, seconds in between.waited.items() if seconds > 0},
        waited_seconds=sum(between.waited.values()),
        stats=stats,
        compared={name: both for name, both in pairs.items() if any(both)},
    )
