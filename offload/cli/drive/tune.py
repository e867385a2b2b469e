"""What does this drive give? The cases of the NVMe bench, its figures and its advice.

Owns which cases are measured, how they are interleaved, how much of the drive they may use, and what follows from the
numbers: ratios, figures to reach, suggested settings, wear. Must not know how a byte is moved
(:mod:`offload.cli.drive.measure`, :mod:`offload.cli.nvme_peers`) or how results are shown
(:mod:`offload.cli.drive.report`).

Everything that is compared runs in turn within one round, and a ratio is the median of the ratios of the rounds: the
speed of a shared drive drifts by more than what is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import psutil

from offload.cli.drive.measure import (
    MIB,
    Contender,
    ContenderError,
    Ours,
    Pattern,
    Sample,
    Settings,
    Workload,
    Workspace,
    idle_latencies,
    latencies_under_writes,
    size_text,
    timed,
)
from offload.cli.nvme_deepspeed import DEEPSPEED, DEEPSPEED_ORDINARY, DeepSpeed, deepspeed_installed
from offload.cli.nvme_peers import Fio, fio_installed, naive_contenders
from offload.errors import ConfigError
from offload.memory import drives, machine
from swap.errors import SwapFullError
from swap.io.aio import engines_available, file_facts, uring_refusal

DEFAULT_SIZE_BYTES = 1 << 30
FREE_SHARE = 0.10  # of the free space that the bench may fill
LEAST_SIZE_BYTES = 64 * MIB
SMOKE_SIZE_BYTES = 32 * MIB
SAMPLE_SECONDS = 1.0  # a slow drive moves fewer bytes per measurement rather than taking for ever
OBJECT_BYTES = 16 * MIB
SAME_WITHIN = 0.05  # settings closer than this are told apart by what they cost, not by their speed
DRIVE_WRITES = 600  # an ordinary consumer drive is rated for this many times its capacity

FIO = Fio()
REGISTERED = Ours(registered=True, label="io_uring, registered buffers")
URING = Ours(label="io_uring")
THREADS = Ours(Settings(engine="threads"), label="threads")

Progress = Callable[[str, int, int], None]  # what is measured next, done, of how many


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """What to measure.

    Attributes:
        paths: directories on the drives.
        size_bytes: most space to fill at a time; None: 1 GiB, or a tenth of the free space where that is less.
        rounds: measurements of everything.
        full: the wide sweep.
        smoke: small and short: shows that it runs, measures nothing.
        bytes_per_step: written by one step of a training run, for the wear; None: not asked.
        endurance_bytes: that the drive is rated for; None: an assumption.
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
                f"size: expected at least {size_text(self.least_size_bytes)} but got {size_text(self.size_bytes)}"
            )

    @property
    def least_size_bytes(self) -> int:
        """Below this nothing can be measured."""
        return SMOKE_SIZE_BYTES if self.smoke else LEAST_SIZE_BYTES


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
        """Median."""
        return statistics.median(sample.bandwidth_gb_s for sample in self.samples)

    @property
    def cpu_seconds_per_gb(self) -> float:
        """Over all rounds: the clock that counts it may tick as slowly as a measurement is long."""
        return sum(s.cpu_seconds for s in self.samples) / sum(s.moved_bytes for s in self.samples) * 1e9


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


@dataclasses.dataclass(frozen=True, slots=True)
class Wear:
    """What training does to a drive.

    Attributes:
        bytes_per_step: written.
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
    figures: list[Figure] = dataclasses.field(default_factory=list)
    wear: Wear | None = None
    notes: list[str] = dataclasses.field(default_factory=list)

    def row(self, case: str, contender: str) -> Row | None:
        """Return the row, if it was measured."""
        return next((row for row in self.rows if (row.case, row.contender) == (case, contender)), None)


@dataclasses.dataclass(slots=True)
class Report:
    """The whole run."""

    options: Options
    machine: dict[str, Any]
    commit: str | None
    paths: list[PathReport] = dataclasses.field(default_factory=list)
    written_bytes: int = 0


# ---- how much of the drive ----


def usable_size(asked: int | None, free_bytes: int, path: Path, least_bytes: int = LEAST_SIZE_BYTES) -> int:
    """Return how many bytes the bench may fill on a drive with `free_bytes` free; whole MiB.

    Raises:
        SwapFullError: too little is free for a measurement, or for the size asked for.
    """
    most = int(free_bytes * FREE_SHARE) // MIB * MIB
    needed = asked if asked is not None else least_bytes
    if needed > most:
        remedy = "free space or name a directory on another drive"
        if asked is not None and most >= least_bytes:
            remedy = f"ask for at most --size {most // MIB}MiB, or {remedy}"
        raise SwapFullError(
            f"bench path {path}: the bench fills at most {FREE_SHARE:.0%} of the free space, but {size_text(needed)} "
            f"are needed and {size_text(free_bytes)} are free",
            path=str(path),
            length_bytes=needed,
            remedy=remedy,
        )
    return min(DEFAULT_SIZE_BYTES, most) if asked is None else asked // MIB * MIB


def free_bytes_of(path: Path) -> int:
    """Return the free space at `path`.

    Raises:
        ConfigError: there is no such directory.
    """
    if not path.is_dir():
        raise ConfigError(f"bench path {path}: expected a directory; create it or name another")
    return machine.free_space(path)


# ---- measuring ----


def interleave(
    contenders: Sequence[tuple[Contender, Workload]],
    place: Workspace,
    rounds: int,
    step: Callable[[str], None],
) -> tuple[dict[int, list[Sample]], list[str]]:
    """Measure every contender once per round, starting each round with another one.

    Returns:
        Samples by position in `contenders` (only of those that ran in every round), and why others did not.
    """
    samples: dict[int, list[Sample]] = {index: [] for index in range(len(contenders))}
    notes = []
    for turn in range(rounds):
        for position in range(len(contenders)):
            index = (position + turn) % len(contenders)
            if index not in samples:
                step("")
                continue
            contender, workload = contenders[index]
            step(contender.name)
            try:
                samples[index].append(contender.run(workload, place))
            except ContenderError as error:
                notes.append(f"{contender.name}: left out: {error}")
                del samples[index]
    return samples, notes


def ratio_of(samples: Sequence[Sample], reference: Sequence[Sample] | None) -> float | None:
    """Return the median over rounds of bandwidth / bandwidth of the reference."""
    if not reference:
        return None
    pairs = zip(samples, reference, strict=True)
    return statistics.median(mine.bandwidth_gb_s / other.bandwidth_gb_s for mine, other in pairs)


def suggest(sweep: Sequence[Swept]) -> Settings | None:
    """Return the settings to use.

    Among those within 5 % of the fastest: the defaults if they are there, else what costs the processor least.
    """
    if not sweep:
        return None
    best = max(swept.score for swept in sweep)
    near = [swept for swept in sweep if swept.score >= best * (1 - SAME_WITHIN)]
    if any(swept.settings == Settings() for swept in near):
        return Settings()
    return min(near, key=lambda swept: (swept.cpu_seconds_per_gb, -swept.score)).settings


def keep_suggestions(report: Report) -> Path | None:
    """Keep each drive's suggested settings for the engine; returns the file, None where there is nothing to keep."""
    file = None
    for one in report.paths:
        found = next((swept for swept in one.sweep if swept.settings == one.suggested), None)
        if one.path is not None and found is not None:
            measured = drives.Measured(
                **dataclasses.asdict(found.settings),
                read_gb_s=found.read_gb_s,
                write_gb_s=found.write_gb_s,
                date=datetime.date.today().isoformat(),
            )
            file = drives.remember(one.path, measured) or file
    return file


def estimate_wear(bytes_per_step: int, endurance_bytes: int | None, capacity_bytes: int) -> Wear:
    """Return what `bytes_per_step` do to a drive; without a rating, 600 times its capacity is assumed."""
    if endurance_bytes is not None:
        return Wear(bytes_per_step, endurance_bytes, assumed=False)
    return Wear(bytes_per_step, DRIVE_WRITES * max(capacity_bytes, 1), assumed=True)


def sweep_settings(*, full: bool, smoke: bool, engines: Sequence[str]) -> list[Settings]:
    """Return the settings that the sweep tries."""
    blocks: tuple[int, ...] = (256 << 10, MIB, 2 * MIB, 4 * MIB)  # the defaults among them
    depths: tuple[int, ...] = (8, 32)
    workers: tuple[int, ...] = (4, 8)
    if full:
        blocks = (64 << 10, 128 << 10, 256 << 10, 512 << 10, MIB, 2 * MIB, 4 * MIB, 8 * MIB)
        depths = (1, 2, 4, 8, 16, 32, 64, 128)
        workers = (1, 2, 4, 8, 16)
    if smoke:
        blocks, depths, workers = (MIB,), (4,), (2,)
    settings = []
    for block in blocks:
        if "io_uring" in engines:
            settings += [Settings(queue_depth=depth, block_bytes=block) for depth in depths]
        if "threads" in engines:
            settings += [Settings(engine="threads", block_bytes=block, threads=count) for count in workers]
    return settings


class _Run:
    """One run over one path: the shared state of its cases."""

    def __init__(self, report: PathReport, place: Workspace, options: Options, progress: Progress) -> None:
        self.report = report
        self.place = place
        self.options = options
        self.rounds = 1 if options.smoke else options.rounds
        self.written_bytes = 0
        self._progress = progress
        self._done = 0
        self._expected = 1

    def expect(self, steps: int) -> None:
        """Announce how many steps there will be in all."""
        self._expected = max(steps, 1)

    def step(self, what: str) -> None:
        """Show progress."""
        self._progress(what, min(self._done, self._expected), self._expected)
        self._done += 1

    def case(self, name: str, contenders: Sequence[Contender], workload: Workload, reference: Contender | None) -> None:
        """Measure contenders on one workload; ratios are to `reference`, if it ran."""
        pairs = [(contender, workload) for contender in contenders]
        samples, notes = interleave(pairs, self.place, self.rounds, lambda who: self.step(f"{name}: {who}"))
        base = next((samples.get(i) for i, c in enumerate(contenders) if c is reference), None)
        against = reference.name if reference is not None and base else None
        for index, taken in samples.items():
            ratio = ratio_of(taken, base)
            self.report.rows.append(Row(name, contenders[index].name, tuple(taken), against, ratio))
            self._count_written(workload, taken)
        self.note(notes)

    def sweep(self, choices: Sequence[Settings], total_bytes: int) -> None:
        """Measure reads and writes with every choice of settings."""
        pairs: list[tuple[Contender, Workload]] = []
        for settings in choices:
            for pattern in (Pattern.READ, Pattern.WRITE):
                workload = Workload(pattern=pattern, total_bytes=total_bytes, object_bytes=OBJECT_BYTES)
                pairs.append((Ours(settings), workload))
        rounds = min(self.rounds, 3)
        samples, notes = interleave(pairs, self.place, rounds, lambda who: self.step(f"sweep: {who}"))
        for index, settings in enumerate(choices):
            read, write = samples.get(2 * index), samples.get(2 * index + 1)
            if not read or not write:
                continue
            moved = [*read, *write]
            self.report.sweep.append(
                Swept(
                    settings,
                    statistics.median(sample.bandwidth_gb_s for sample in read),
                    statistics.median(sample.bandwidth_gb_s for sample in write),
                    sum(s.cpu_seconds for s in moved) / sum(s.moved_bytes for s in moved) * 1e9,
                )
            )
            self.written_bytes += sum(sample.moved_bytes for sample in write)
        self.report.suggested = suggest(self.report.sweep)
        self.note(notes)

    def latency(self, engines: Sequence[str], write_bytes: int) -> None:
        """Measure single reads, idle and under write-back; engines take turns."""
        counts = [(64 << 10, 200), (MIB, 200), (OBJECT_BYTES, 20)]
        if self.options.smoke:
            counts = [(MIB, 4)]
        taken: dict[tuple[str, int, bool], list[tuple[float, ...]]] = {}
        for number in range(self.rounds):
            for engine in engines if number % 2 else reversed(engines):
                settings = Settings(engine=engine)
                self.step(f"latency: {engine}")
                with self._left_out(engine):
                    for object_bytes, count in counts:
                        seconds = idle_latencies(settings, self.place, object_bytes, count)
                        taken.setdefault((engine, object_bytes, False), []).append(tuple(seconds))
                    seconds = latencies_under_writes(settings, self.place, MIB, write_bytes)
                    self.written_bytes += write_bytes
                    taken.setdefault((engine, MIB, True), []).append(tuple(seconds))
        self.report.latencies += [Latency(*key, tuple(rounds)) for key, rounds in sorted(taken.items())]

    def first_write(self, contenders: Sequence[Contender], workload: Workload) -> None:
        """Measure writes to a new file: to blocks reserved for it, which counts; DeepSpeed's grows as it is written."""

        @dataclasses.dataclass(frozen=True)
        class Fresh:
            inner: Contender

            @property
            def name(self) -> str:
                return self.inner.name

            def run(self, workload: Workload, place: Workspace) -> Sample:
                place.make_empty()
                if isinstance(self.inner, DeepSpeed):
                    return self.inner.run(workload, place)
                reserving = timed(0, place.reserve)
                writing = self.inner.run(workload, place)
                return Sample(
                    writing.moved_bytes,
                    reserving.seconds + writing.seconds,
                    reserving.cpu_seconds + writing.cpu_seconds,
                )

        fresh: list[Contender] = [Fresh(contender) for contender in contenders]
        reference = next((f for f, c in zip(fresh, contenders, strict=True) if c is FIO), None)
        self.case("first write", fresh, workload, reference)

    def note(self, notes: Sequence[str]) -> None:
        """Add remarks, each once."""
        self.report.notes += [note for note in dict.fromkeys(notes) if note not in self.report.notes]

    @contextlib.contextmanager
    def _left_out(self, who: str) -> Iterator[None]:
        try:
            yield
        except ContenderError as error:
            self.note([f"{who}: left out: {error}"])

    def _count_written(self, workload: Workload, samples: Sequence[Sample]) -> None:
        share = {Pattern.READ: 0.0, Pattern.MIXED: 0.5, Pattern.WRITE: 1.0}[workload.pattern]
        self.written_bytes += int(share * sum(sample.moved_bytes for sample in samples))


def run_bench(options: Options, progress: Progress, free_space: Callable[[Path], int] = free_bytes_of) -> Report:
    """Measure every path, and with several all of them together.

    Args:
        options: what to measure.
        progress: told what is measured next.
        free_space: bytes free at a path; for tests.

    Raises:
        SwapFullError: a drive is too full.
        SwapError: a path cannot be used, or a drive fails.
        ConfigError: a path is not a directory.
    """
    asked = SMOKE_SIZE_BYTES if options.smoke and options.size_bytes is None else options.size_bytes
    sizes = {path: usable_size(asked, free_space(path), path, options.least_size_bytes) for path in options.paths}
    report = Report(options, dict(machine.describe()), machine.commit())
    for path in options.paths:
        one, written = _bench_path(options, path, sizes[path], progress)
        report.paths.append(one)
        report.written_bytes += written
    if len(options.paths) > 1:
        together, written = _bench_together(options, min(sizes.values()), report.paths, progress)
        report.paths.append(together)
        report.written_bytes += written
    return report


def _bench_path(options: Options, path: Path, size: int, progress: Progress) -> tuple[PathReport, int]:
    engines = engines_available()
    choices = sweep_settings(full=options.full, smoke=options.smoke, engines=engines)
    memory = 32 * MIB if options.smoke else Settings().footprint_bytes
    sweep_memory = max([memory, *(settings.footprint_bytes for settings in choices)])
    contenders, ordinary = _contenders(engines)
    free_bytes = machine.free_space(path)
    with Workspace([path], size, memory) as place:
        facts = {**_facts_of(path, place), "free_bytes": free_bytes}
        one = PathReport(path, place.size_bytes, place.size_bytes, facts)
        run = _Run(one, place, options, progress)
        run.step("filling the file")
        one.sample_bytes = _fill(run)
        _note_conditions(run)
        small = _small_sizes(options, one.sample_bytes)
        rows = len(contenders) + len(ordinary)
        run.expect(
            1
            + run.rounds * (3 * rows + 2 * len(small) * len(contenders) + len(contenders) + 10)
            + 2 * len(choices) * min(run.rounds, 3)
            + len(engines) * run.rounds
        )
        _main_cases(run, [*contenders, *ordinary])
        for object_bytes, total_bytes in small:
            for pattern in (Pattern.READ, Pattern.WRITE):
                workload = Workload(pattern=pattern, total_bytes=total_bytes, object_bytes=object_bytes)
                run.case(f"{pattern.value}, tensors of {size_text(object_bytes)}", contenders, workload, FIO)
        run.latency(engines, one.sample_bytes)
    with Workspace([path], size, min(sweep_memory, _spare_memory())) as run.place:
        _fill(run)
        run.sweep(choices, max(OBJECT_BYTES, one.sample_bytes // 4))
        workload = Workload(pattern=Pattern.WRITE, total_bytes=run.place.size_bytes, object_bytes=OBJECT_BYTES)
        run.first_write(contenders, workload)
    _naive_cases(run, path, size)
    one.figures = figures_of(one)
    if options.bytes_per_step is not None:
        info = os.statvfs(path)
        one.wear = estimate_wear(options.bytes_per_step, options.endurance_bytes, info.f_blocks * info.f_frsize)
    return one, run.written_bytes


def _contenders(engines: Sequence[str]) -> tuple[list[Contender], list[Contender]]:
    """Return who takes part in all cases, and the peers with their ordinary memory."""
    everywhere: list[Contender] = [REGISTERED, URING] if "io_uring" in engines else []
    everywhere.append(THREADS)
    ordinary: list[Contender] = []
    if fio_installed():
        everywhere.append(FIO)
        ordinary.append(Fio(tuned=False))
    if deepspeed_installed():
        everywhere.append(deepspeed := DeepSpeed())
        ordinary.append(DeepSpeed(like=deepspeed))
    return everywhere, ordinary


def _fill(run: _Run) -> int:
    """Write every byte of the files once; returns how much a measurement should move on a drive this fast."""
    place = run.place
    settings = Settings(engine=engines_available()[0])
    workload = Workload(pattern=Pattern.WRITE, total_bytes=place.size_bytes, object_bytes=MIB)
    sample = Ours(settings).run(workload, place)
    run.written_bytes += sample.moved_bytes
    fitting = int(sample.moved_bytes / sample.seconds * SAMPLE_SECONDS) // OBJECT_BYTES * OBJECT_BYTES
    return max(min(OBJECT_BYTES, place.size_bytes), min(place.size_bytes // OBJECT_BYTES * OBJECT_BYTES, fitting))


def _main_cases(run: _Run, contenders: Sequence[Contender]) -> None:
    for pattern in Pattern:
        workload = Workload(pattern=pattern, total_bytes=run.report.sample_bytes, object_bytes=OBJECT_BYTES)
        run.case(pattern.value, contenders, workload, FIO)


def _small_sizes(options: Options, sample_bytes: int) -> list[tuple[int, int]]:
    """Return (bytes of one tensor, bytes in all) of the cases with many small tensors."""
    if options.smoke:
        return [(64 << 10, 4 * MIB)]
    sizes = ((64 << 10, 2000), (256 << 10, 1000), (MIB, 512))
    return [(size, min(size * count, sample_bytes)) for size, count in sizes]


def _naive_cases(run: _Run, path: Path, size: int) -> None:
    """Measure the naive baselines beside the engine, with two files of half the size."""
    total = 8 * MIB if run.options.smoke else 256 * MIB
    total = min(total, size // 2, _spare_memory()) // OBJECT_BYTES * OBJECT_BYTES or 8 * MIB
    ours = Ours(Settings(engine=engines_available()[0]), label=engines_available()[0])
    with Workspace([path], total, Settings().footprint_bytes) as run.place:
        _fill(run)
        with naive_contenders(run.place, total) as naive:
            for pattern in (Pattern.WRITE, Pattern.READ):
                workload = Workload(pattern=pattern, total_bytes=total, object_bytes=min(OBJECT_BYTES, total))
                run.case(f"{pattern.value} of a state, naively", [ours, *naive], workload, ours)


def _bench_together(
    options: Options, size: int, alone: Sequence[PathReport], progress: Progress
) -> tuple[PathReport, int]:
    """Measure one engine over all paths at once, in proportion to their speed, against each of them alone."""
    engine = engines_available()[0]
    paths = options.paths
    size = size // len(paths) // MIB * MIB * len(paths)  # paths may share a drive
    devices = {path.stat().st_dev for path in paths}
    ours = Ours(Settings(engine=engine), label=engine)
    with contextlib.ExitStack() as stack:
        place = stack.enter_context(Workspace(paths, size, Settings().footprint_bytes))
        total = PathReport(None, place.size_bytes, min(report.sample_bytes for report in alone), {"paths": len(paths)})
        run = _Run(total, place, options, progress)
        run.expect(2 + 2 * run.rounds * (1 + len(paths)))
        run.step("filling the files")
        _fill(run)

        @dataclasses.dataclass(frozen=True)
        class Alone:
            index: int

            @property
            def name(self) -> str:
                return f"{engine}, {paths[self.index]} alone"

            def run(self, workload: Workload, place: Workspace) -> Sample:
                files = place.files
                try:
                    place.files = (files[self.index],)
                    return ours.run(workload, place)
                finally:
                    place.files = files

        singles: list[Contender] = [Alone(index) for index in range(len(paths))]
        for pattern in (Pattern.READ, Pattern.WRITE):
            workload = Workload(pattern=pattern, total_bytes=total.sample_bytes, object_bytes=OBJECT_BYTES)
            speeds = [row.bandwidth_gb_s for one in alone if (row := one.row(pattern.value, engine)) is not None]
            weights = tuple(speeds) if len(speeds) == len(paths) else ()  # as a store that knows them stripes
            run.case(pattern.value, [dataclasses.replace(ours, weights=weights), *singles], workload, None)
            rows = [row for row in total.rows if row.case == pattern.value]
            if len(rows) == 1 + len(paths) and len(devices) == len(paths):
                each = zip(*(row.samples for row in rows), strict=True)
                shares = [one.bandwidth_gb_s / sum(s.bandwidth_gb_s for s in others) for one, *others in each]
                total.figures.append(
                    Figure(f"{pattern.value}, all paths / sum of each", statistics.median(shares), 0.95)
                )
        if len(devices) < len(paths):
            run.note(["some paths are on the same file system: together they cannot be faster than alone"])
    return total, run.written_bytes


def _spare_memory() -> int:
    """An eighth of the available memory, at least what one queue needs."""
    return max(Settings().footprint_bytes, int(psutil.virtual_memory().available) // 8)


def _facts_of(path: Path, place: Workspace) -> dict[str, Any]:
    facts = file_facts(place.files[0].fd)
    mount = machine.mount_of(path)
    return {
        "file_system": mount.file_system if mount else None,
        "drive": mount.drive if mount else None,
        "model": mount.model if mount else None,
        "direct": place.files[0].direct,
        "alignment_bytes": place.files[0].alignment_bytes,
        "in_memory": facts.in_memory,
    }


def _note_conditions(run: _Run) -> None:
    """Say what makes the numbers mean less than they seem to."""
    notes = []
    if refusal := uring_refusal():
        notes.append(f"io_uring cannot be used here: {refusal}")
    if not fio_installed():
        notes.append("fio is not installed: no ratios to it (apt install fio)")
    if run.report.facts["in_memory"]:
        notes.append("this file system keeps its files in memory: these are not figures of a drive")
    elif not run.report.facts["direct"]:
        notes.append("no direct I/O here: these are figures of the page cache")
    if machine.transparent_huge_pages() == "never":
        notes.append("huge pages are off: reads and writes cost more (see `offload doctor`)")
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > 0.5:
        notes.append(f"other programs keep {load:.0%} of the processors busy: only the ratios mean something")
    run.note(notes)


# ---- figures to reach ----


def figures_of(report: PathReport) -> list[Figure]:
    """Return the figures to reach, as far as they were measured."""
    found: list[Figure] = []

    def compare(name: str, case: str, mine: str, other: str, bound: float) -> None:
        a, b = report.row(case, mine), report.row(case, other)
        if a is not None and b is not None and (ratio := ratio_of(a.samples, b.samples)) is not None:
            found.append(Figure(name, ratio, bound))

    tuned, ordinary = FIO.name, Fio(tuned=False).name
    best = REGISTERED.name if report.row(Pattern.READ.value, REGISTERED.name) else URING.name  # as fio, where allowed
    for pattern in Pattern:
        compare(f"{pattern.value} / fio with huge pages and fixed buffers", pattern.value, best, tuned, 1.0)
    for pattern in Pattern:
        compare(f"{pattern.value} / fio with its ordinary memory", pattern.value, best, ordinary, 1.1)
    for pattern, bound in zip(Pattern, (1.15, 1.0, 1.10), strict=True):
        compare(f"{pattern.value} / {DEEPSPEED}", pattern.value, best, DEEPSPEED, bound)
    for pattern, bound in zip(Pattern, (1.15, 1.0, 1.10), strict=True):
        compare(f"{pattern.value} / {DEEPSPEED_ORDINARY}", pattern.value, best, DEEPSPEED_ORDINARY, bound)
    for pattern, bound in ((Pattern.READ, 1.8), (Pattern.WRITE, 1.6)):
        case = f"{pattern.value}, tensors of {size_text(64 << 10)}"
        compare(f"{case} / {DEEPSPEED}", case, best, DEEPSPEED, bound)
    compare(f"first write / {DEEPSPEED}", "first write", best, DEEPSPEED, 1.4)
    for object_bytes, bound in ((256 << 10, 0.90), (MIB, 0.86)):
        for pattern in (Pattern.READ, Pattern.WRITE):
            case = f"{pattern.value}, tensors of {size_text(object_bytes)}"
            compare(f"{case} / fio", case, best, tuned, bound)
    for pattern in Pattern:
        compare(f"{pattern.value}, threads / io_uring", pattern.value, THREADS.name, URING.name, 0.90)
    for contender, bound in ((REGISTERED, 0.004), (URING, 0.008), (THREADS, 0.016)):
        if (cost := _cost(report, contender.name)) is not None:
            found.append(Figure(f"CPU seconds per GB, {contender.name}", cost, bound, at_most=True))
    for mine, other, bound in ((best, tuned, 1.0), (THREADS.name, URING.name, 5.0)):
        cost, base = _cost(report, mine), _cost(report, other)
        if cost is not None and base:
            found.append(Figure(f"CPU of {mine} / {other}", cost / base, bound, at_most=True))
    for engine, ratio in _fetch_ratios(report).items():
        found.append(Figure(f"fetch of 1 MiB under write-back / idle, {engine}", ratio, 3.0, at_most=True))
    return found


def _cost(report: PathReport, contender: str) -> float | None:
    """Return the processor seconds per GB of large reads, writes and both; None where it did not run."""
    rows = [row for pattern in Pattern if (row := report.row(pattern.value, contender)) is not None]
    return statistics.median(row.cpu_seconds_per_gb for row in rows) if rows else None


def _fetch_ratios(report: PathReport) -> dict[str, float]:
    """Return by engine how much longer a read of 1 MiB takes under write-back: the median of the ratios in a round."""
    medians = {(one.engine, one.under_writes): one.medians for one in report.latencies if one.object_bytes == MIB}
    return {
        engine: statistics.median(busy / idle for busy, idle in zip(rounds, medians[engine, False], strict=True))
        for (engine, under_writes), rounds in medians.items()
        if under_writes
    }
