"""The figures that the engines are to reach, and what was measured of them."""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Iterator, Sequence
from pathlib import Path

from offload.cli.drive.measure import Pattern
from offload.cli.drive.results import PathReport, ratio_of
from offload.cli.drive.tune import REGISTERED, THREADS, URING, share_a_drive
from offload.sizes import MIB, short_bytes

from .deepspeed import DEEPSPEED, DEEPSPEED_ORDINARY
from .peers import Fio


@dataclasses.dataclass(frozen=True, slots=True)
class Figure:
    """A figure to reach: `bound` is the least, or with `at_most` the most."""

    name: str
    measured: float
    bound: float
    at_most: bool = False

    @property
    def reached(self) -> bool:
        """Whether it is."""
        return self.measured <= self.bound if self.at_most else self.measured >= self.bound


# whom, as its figures name it, and the bounds of reads, writes and both of large objects
_LARGE = (
    (Fio().name, "fio with huge pages and fixed buffers", (1.0, 1.0, 1.0)),
    (Fio(tuned=False).name, "fio with its ordinary memory", (1.1, 1.1, 1.1)),
    (DEEPSPEED, DEEPSPEED, (1.15, 1.0, 1.10)),
    (DEEPSPEED_ORDINARY, DEEPSPEED_ORDINARY, (1.15, 1.0, 1.10)),
)
# whom, as its figures name it, the bytes of a tensor, the bounds of reads and writes
_SMALL = (
    (DEEPSPEED, DEEPSPEED, 64 << 10, (1.8, 1.6)),
    (Fio().name, "fio", 256 << 10, (0.90, 0.90)),
    (Fio().name, "fio", MIB, (0.86, 0.86)),
)


def figures_of(report: PathReport, paths: Sequence[Path]) -> list[Figure]:
    """Return the figures to reach, as far as they were measured.

    Args:
        report: what was measured at a path, or at all of them together.
        paths: all of them.
    """
    if report.path is None:
        return [] if share_a_drive(paths) else list(_together(report, len(paths)))
    best = REGISTERED.name if report.row(Pattern.READ.value, REGISTERED.name) else URING.name  # as fio, where allowed
    return [*_ratios(report, best), *_costs(report, best), *_fetches(report)]


def _together(report: PathReport, count: int) -> Iterator[Figure]:
    for pattern in (Pattern.READ, Pattern.WRITE):
        rows = [row for row in report.rows if row.case == pattern.value]
        if len(rows) == 1 + count:
            each = zip(*(row.samples for row in rows), strict=True)
            shares = [one.bandwidth_gb_s / sum(s.bandwidth_gb_s for s in others) for one, *others in each]
            yield Figure(f"{pattern.value}, all paths / sum of each", statistics.median(shares), 0.95)


def _ratios(report: PathReport, best: str) -> Iterator[Figure]:
    def compare(name: str, case: str, mine: str, other: str, bound: float) -> Iterator[Figure]:
        a, b = report.row(case, mine), report.row(case, other)
        if a is not None and b is not None and (ratio := ratio_of(a.samples, b.samples)) is not None:
            yield Figure(name, ratio, bound)

    for peer, title, bounds in _LARGE:
        for pattern, bound in zip(Pattern, bounds, strict=True):
            yield from compare(f"{pattern.value} / {title}", pattern.value, best, peer, bound)
    for peer, title, object_bytes, (reading, writing) in _SMALL:
        for pattern, bound in ((Pattern.READ, reading), (Pattern.WRITE, writing)):
            case = f"{pattern.value}, tensors of {short_bytes(object_bytes)}"
            yield from compare(f"{case} / {title}", case, best, peer, bound)
    yield from compare(f"first write / {DEEPSPEED}", "first write", best, DEEPSPEED, 1.4)
    for pattern in Pattern:
        yield from compare(f"{pattern.value}, threads / io_uring", pattern.value, THREADS.name, URING.name, 0.90)


def _costs(report: PathReport, best: str) -> Iterator[Figure]:
    for contender, bound in ((REGISTERED, 0.004), (URING, 0.008), (THREADS, 0.016)):
        if (cost := _cost(report, contender.name)) is not None:
            yield Figure(f"CPU seconds per GB, {contender.name}", cost, bound, at_most=True)
    for mine, other, bound in ((best, Fio().name, 1.0), (THREADS.name, URING.name, 5.0)):
        cost, base = _cost(report, mine), _cost(report, other)
        if cost is not None and base:
            yield Figure(f"CPU of {mine} / {other}", cost / base, bound, at_most=True)


def _cost(report: PathReport, contender: str) -> float | None:
    """Return the processor seconds per GB of large reads, writes and both; None where it did not run."""
    rows = [row for pattern in Pattern if (row := report.row(pattern.value, contender)) is not None]
    return statistics.median(row.cpu_seconds_per_gb for row in rows) if rows else None


def _fetches(report: PathReport) -> Iterator[Figure]:
    """Yield by engine how much longer a read of 1 MiB takes under write-back: the median of the ratios in a round."""
    medians = {(one.engine, one.under_writes): one.medians for one in report.latencies if one.object_bytes == MIB}
    for (engine, under_writes), rounds in medians.items():
        if under_writes:
            ratio = statistics.median(busy / idle for busy, idle in zip(rounds, medians[engine, False], strict=True))
            yield Figure(f"fetch of 1 MiB under write-back / idle, {engine}", ratio, 3.0, at_most=True)
