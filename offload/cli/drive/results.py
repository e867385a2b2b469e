"""What a measurement of drives asks for and finds: plain values, and the figures that follow from samples.

Must not know how anything is measured (:mod:`offload.cli.drive.tune`) or shown (:mod:`offload.cli.drive.report`).
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.cli.drive.measure import Sample, Settings
from offload.errors import ConfigError
from offload.sizes import MIB, short_bytes

SMOKE_SIZE_BYTES = 32 * MIB
LEAST_SIZE_BYTES = 64 * MIB
DRIVE_WRITES = 600  # an ordinary consumer drive is rated for this many times its capacity


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        paths: directories on the drives.
        size_bytes: most space to fill at a time; None: 1 GiB, or a tenth of the free space where that is less.
        rounds: measurements of everything.
        full: the wide sweep.
        smoke: small and short: shows that it runs, measures nothing.
        bytes_per_step: written by one step of a training run to all drives together, for the wear; None: not asked.
        endurance_bytes: that each drive is rated for; None: an assumption.
    """

    paths: tuple[Path, ...]
    size_bytes: int | None = None
    rounds: int = 5
    full: bool = False
    smoke: bool = False
    bytes_per_step: int | None = None
    endurance_bytes: int | None = None

    def __post_init__(self) -> None:
        if not self.paths:
            raise ConfigError("bench nvme: expected at least one directory but got none; name one on the drive")
        if self.rounds < 1:
            raise ConfigError(f"rounds: expected at least 1 but got {self.rounds}")
        if self.size_bytes is not None and self.size_bytes < self.least_size_bytes:
            raise ConfigError(
                f"size: expected at least {short_bytes(self.least_size_bytes)} but got {short_bytes(self.size_bytes)}"
            )
        if self.endurance_bytes is not None and self.bytes_per_step is None:
            raise ConfigError("endurance: expected bytes_per_step beside it but got none; name what a step writes")
        if self.endurance_bytes is not None and self.endurance_bytes < 1:
            raise ConfigError(
                f"endurance: expected at least 1 byte but got {self.endurance_bytes}; name the rating of a drive"
            )

    @property
    def least_size_bytes(self) -> int:
        """Below this nothing can be measured."""
        return SMOKE_SIZE_BYTES if self.smoke else LEAST_SIZE_BYTES

    @property
    def rounds_made(self) -> int:
        """The rounds that there are: a smoke run has one."""
        return 1 if self.smoke else self.rounds


def speed_of(samples: Sequence[Sample]) -> float:
    """Return the median bandwidth, in GB/s."""
    return statistics.median(sample.bandwidth_gb_s for sample in samples)


def cost_of(samples: Sequence[Sample]) -> float:
    """Return processor seconds per GB over all samples: the clock may tick as slowly as a measurement is long."""
    return sum(one.cpu_seconds for one in samples) / sum(one.moved_bytes for one in samples) * 1e9


def ratio_of(samples: Sequence[Sample], reference: Sequence[Sample] | None) -> float | None:
    """Return the median over rounds of bandwidth / bandwidth of the reference."""
    if not reference:
        return None
    pairs = zip(samples, reference, strict=True)
    return statistics.median(mine.bandwidth_gb_s / other.bandwidth_gb_s for mine, other in pairs)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One contender in one case.

    Attributes:
        case: what was done.
        contender: by whom.
        samples: one per round.
        reference: contender that the ratio is to.
        ratio: median over the rounds of this bandwidth / that of the reference; None without a reference.
    """

    case: str
    contender: str
    samples: tuple[Sample, ...]
    reference: str | None = None
    ratio: float | None = None

    @property
    def bandwidth_gb_s(self) -> float:
        """See :func:`speed_of`."""
        return speed_of(self.samples)

    @property
    def cpu_seconds_per_gb(self) -> float:
        """See :func:`cost_of`."""
        return cost_of(self.samples)


@dataclasses.dataclass(frozen=True, slots=True)
class Latency:
    """Seconds of single reads by round: on an idle drive, or (urgent ones) while write-back keeps it busy."""

    engine: str
    object_bytes: int
    under_writes: bool
    rounds: tuple[tuple[float, ...], ...]

    @property
    def medians(self) -> list[float]:
        """Of every round: half were faster."""
        return [statistics.median(seconds) for seconds in self.rounds]

    @property
    def median_seconds(self) -> float:
        """The median round's."""
        return statistics.median(self.medians)

    @property
    def p99_seconds(self) -> float:
        """All but one in a hundred were faster."""
        seconds = sorted(itertools.chain.from_iterable(self.rounds))
        return seconds[min(len(seconds) - 1, len(seconds) * 99 // 100)]


@dataclasses.dataclass(frozen=True, slots=True)
class Swept:
    """Median bandwidth (GB/s) and processor time (seconds per GB) of one choice of settings."""

    settings: Settings
    read_gb_s: float
    write_gb_s: float
    cpu_seconds_per_gb: float

    @property
    def score(self) -> float:
        """GB/s when as much is written as read, one after the other."""
        return 2 / (1 / self.read_gb_s + 1 / self.write_gb_s)


@dataclasses.dataclass(frozen=True, slots=True)
class Wear:
    """What training does to a drive.

    Attributes:
        bytes_per_step: written to it.
        endurance_bytes: that the drive may write in its life.
        assumed: the endurance is an assumption, not given.
    """

    bytes_per_step: int
    endurance_bytes: int
    assumed: bool

    @property
    def share_per_1000_steps(self) -> float:
        """Of the drive's life, 0..1 and more."""
        return 1000 * self.bytes_per_step / self.endurance_bytes

    @property
    def steps(self) -> int:
        """Steps until the drive has written what it is rated for."""
        return self.endurance_bytes // max(self.bytes_per_step, 1)


def estimate_wear(bytes_per_step: int, endurance_bytes: int | None, capacity_bytes: int) -> Wear:
    """Return what `bytes_per_step` do to a drive; without a rating, 600 times its capacity is assumed."""
    if endurance_bytes is not None:
        return Wear(bytes_per_step, endurance_bytes, assumed=False)
    return Wear(bytes_per_step, DRIVE_WRITES * max(capacity_bytes, 1), assumed=True)


@dataclasses.dataclass(slots=True)
class PathReport:
    """Everything measured at one path (or, for `path` None, at all of them together)."""

    path: Path | None
    size_bytes: int
    sample_bytes: int
    facts: dict[str, Any]
    rows: list[Row] = dataclasses.field(default_factory=list)
    latencies: list[Latency] = dataclasses.field(default_factory=list)
    sweep: list[Swept] = dataclasses.field(default_factory=list)
    suggested: Settings | None = None
    wear: Wear | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    @property
    def best(self) -> Swept | None:
        """What the suggested settings gave; None without a sweep."""
        return next((swept for swept in self.sweep if swept.settings == self.suggested), None)

    def row(self, case: str, contender: str) -> Row | None:
        """Return the row, if it was measured."""
        return next((row for row in self.rows if (row.case, row.contender) == (case, contender)), None)

    def note(self, *notes: str) -> None:
        """Add remarks, each once."""
        self.notes += [note for note in dict.fromkeys(notes) if note not in self.notes]


@dataclasses.dataclass(slots=True)
class Report:
    """The whole run."""

    options: Options
    machine: dict[str, Any]
    commit: str | None
    paths: list[PathReport] = dataclasses.field(default_factory=list)
    written_bytes: int = 0
