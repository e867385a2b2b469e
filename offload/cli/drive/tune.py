"""What does this drive give, and which settings serve it best?

Owns which cases are measured, how they are interleaved, how much of the drive they may use, which settings follow from
the numbers, and that these are kept. Must not know how a byte is moved (:mod:`offload.cli.drive.measure`) or how
results are shown (:mod:`offload.cli.drive.report`). Others to compare with are somebody else's to bring
(:class:`Peers`).

Everything that is compared runs in turn within one round, and a ratio is the median of the ratios of the rounds: the
speed of a shared drive drifts by more than what is compared.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from offload.cli.drive.measure import (
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
    open_unlinked,
    timed,
)
from offload.cli.drive.results import (
    LEAST_SIZE_BYTES,
    SMOKE_SIZE_BYTES,
    Latency,
    Options,
    PathReport,
    Report,
    Row,
    Swept,
    cost_of,
    estimate_wear,
    ratio_of,
    speed_of,
)
from offload.errors import ConfigError
from offload.memory import drives, machine
from offload.sizes import MIB, short_bytes
from swap.errors import SwapFullError
from swap.io.aio import engines_available, file_facts, uring_refusal

DEFAULT_SIZE_BYTES = 1 << 30
FREE_SHARE = 0.10  # of the free space that the bench may fill
SAMPLE_SECONDS = 1.0  # a slow drive moves fewer bytes per measurement rather than taking for ever
OBJECT_BYTES = 16 * MIB
SAME_WITHIN = 0.05  # settings closer than this are told apart by what they cost, not by their speed

REGISTERED = Ours(registered=True, label="io_uring, registered buffers")
URING = Ours(label="io_uring")
THREADS = Ours(Settings(engine="threads"), label="threads")

Progress = Callable[[str, int, int], None]  # what is measured next, done, of how many


@dataclasses.dataclass(frozen=True, slots=True)
class Peers:
    """Who else takes part beside the engines; by default nobody.

    Attributes:
        everywhere: in all cases with the files as they are.
        large: in reads and writes of large objects only.
        fresh: in the first write; see :class:`Fresh`.
        reference: name of the one whom ratios are to.
    """

    everywhere: Sequence[Contender] = ()
    large: Sequence[Contender] = ()
    fresh: Sequence[Contender] = ()
    reference: str | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Fresh:
    """A contender that writes a new file: to blocks reserved just before, which counts, or to one that grows."""

    inner: Contender
    grows: bool = False

    @property
    def name(self) -> str:
        """See :class:`offload.cli.drive.measure.Contender`."""
        return self.inner.name

    def run(self, workload: Workload, place: Workspace) -> Sample:
        """See :class:`offload.cli.drive.measure.Contender`."""
        place.make_empty()
        reserving = timed(0, (lambda: None) if self.grows else place.reserve)
        writing = self.inner.run(workload, place)
        return Sample(
            writing.moved_bytes, reserving.seconds + writing.seconds, reserving.cpu_seconds + writing.cpu_seconds
        )


@dataclasses.dataclass(frozen=True, slots=True)
class _Alone:
    """An engine on one of the files of a place."""

    engine: Ours
    index: int
    name: str

    def run(self, workload: Workload, place: Workspace) -> Sample:
        files = place.files
        try:
            place.files = (files[self.index],)
            return self.engine.run(workload, place)
        finally:
            place.files = files


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
            f"bench path {path}: the bench fills at most {FREE_SHARE:.0%} of the free space, but {short_bytes(needed)} "
            f"are needed and {short_bytes(free_bytes)} are free",
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
    """Keep each drive's suggested settings for the engine; returns the file, None where there is nothing to keep.

    Threads that had no io_uring beside them were not chosen: an engine takes it as soon as it works here.
    Figures of the page cache are not kept: beside those of a real drive, they would draw most bytes to the slow one.
    """
    file = None
    for one in report.paths:
        found = one.best
        if one.path is not None and found is not None and one.facts["direct"]:
            chosen = any(swept.settings.engine == "io_uring" for swept in one.sweep)
            settings = found.settings if chosen else dataclasses.replace(found.settings, engine="auto")
            measured = drives.Measured(
                **dataclasses.asdict(settings),
                read_gb_s=found.read_gb_s,
                write_gb_s=found.write_gb_s,
                date=datetime.date.today().isoformat(),
            )
            file = drives.remember(one.path, measured) or file
    return file


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


class Run:
    """One run over one place: what its cases share.

    Attributes:
        report: where results go.
        place: where the next case runs.
        written_bytes: so far.
    """

    def __init__(self, report: PathReport, place: Workspace, options: Options, progress: Progress) -> None:
        self.report = report
        self.place = place
        self.rounds = options.rounds_made
        self.written_bytes = 0
        self._smoke = options.smoke
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

    def fill(self) -> int:
        """Write every byte of the files once; returns how much a measurement should move on a drive this fast."""
        size = self.place.size_bytes
        workload = Workload(pattern=Pattern.WRITE, total_bytes=size, object_bytes=MIB)
        sample = Ours(Settings(engine=engines_available()[0])).run(workload, self.place)
        self.written_bytes += sample.moved_bytes
        fitting = int(sample.moved_bytes / sample.seconds * SAMPLE_SECONDS) // OBJECT_BYTES * OBJECT_BYTES
        return max(min(OBJECT_BYTES, size), min(size // OBJECT_BYTES * OBJECT_BYTES, fitting))

    def case(self, name: str, contenders: Sequence[Contender], workload: Workload, reference: str | None) -> None:
        """Measure contenders on one workload; ratios are to the one named `reference`, if it ran."""
        names = [contender.name for contender in contenders]
        pairs = [(contender, workload) for contender in contenders]
        samples, notes = interleave(pairs, self.place, self.rounds, lambda who: self.step(f"{name}: {who}"))
        base = samples.get(names.index(reference)) if reference in names else None
        share = {Pattern.READ: 0.0, Pattern.MIXED: 0.5, Pattern.WRITE: 1.0}[workload.pattern]
        for index, taken in samples.items():
            row = Row(name, names[index], tuple(taken), reference if base else None, ratio_of(taken, base))
            self.report.rows.append(row)
            self.written_bytes += int(share * sum(sample.moved_bytes for sample in taken))
        self.report.note(*notes)

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
            self.report.sweep.append(Swept(settings, speed_of(read), speed_of(write), cost_of([*read, *write])))
            self.written_bytes += sum(sample.moved_bytes for sample in write)
        self.report.suggested = suggest(self.report.sweep)
        self.report.note(*notes)

    def latency(self, engines: Sequence[str], write_bytes: int) -> None:
        """Measure single reads, idle and under write-back; engines take turns."""
        counts = [(64 << 10, 200), (MIB, 200), (OBJECT_BYTES, 20)]
        if self._smoke:
            counts = [(MIB, 4)]
        taken: dict[tuple[str, int, bool], list[tuple[float, ...]]] = {}
        for number in range(self.rounds):
            for engine in engines if number % 2 else reversed(engines):
                settings = Settings(engine=engine)
                self.step(f"latency: {engine}")
                with self._may_be_left_out(engine):
                    for object_bytes, count in counts:
                        seconds = idle_latencies(settings, self.place, object_bytes, count)
                        taken.setdefault((engine, object_bytes, False), []).append(tuple(seconds))
                    seconds = latencies_under_writes(settings, self.place, MIB, write_bytes)
                    self.written_bytes += write_bytes
                    taken.setdefault((engine, MIB, True), []).append(tuple(seconds))
        self.report.latencies += [Latency(*key, tuple(rounds)) for key, rounds in sorted(taken.items())]

    @contextlib.contextmanager
    def _may_be_left_out(self, who: str) -> Iterator[None]:
        try:
            yield
        except ContenderError as error:
            self.report.note(f"{who}: left out: {error}")


def tune(
    options: Options,
    progress: Progress,
    peers: Callable[[], Peers] = Peers,
    free_space: Callable[[Path], int] = free_bytes_of,
) -> Report:
    """Measure every path, and with several all of them together.

    Args:
        options: what to measure.
        progress: told what is measured next.
        peers: makes those who take part beside the engines, anew for every path.
        free_space: bytes free at a path; for tests.

    Raises:
        SwapFullError: a drive is too full.
        SwapError: a path cannot be used, or a drive fails.
        ConfigError: a path is not a directory.
    """
    asked = SMOKE_SIZE_BYTES if options.smoke and options.size_bytes is None else options.size_bytes
    sizes = {path: usable_size(asked, free_space(path), path, options.least_size_bytes) for path in options.paths}
    for path, size in sizes.items():  # before any is measured, which takes minutes
        os.close(open_unlinked(path, size).fd)
    runs = [_one_path(options, path, sizes[path], progress, peers()) for path in options.paths]
    charge(options, [run.report for run in runs])
    if len(runs) > 1:
        runs.append(_together(options, min(sizes.values()), [run.report for run in runs], progress))
    return Report(
        options,
        dict(machine.describe()),
        machine.commit(),
        [run.report for run in runs],
        sum(run.written_bytes for run in runs),
    )


def _one_path(options: Options, path: Path, size: int, progress: Progress, peers: Peers) -> Run:
    engines = engines_available()
    ours: list[Contender] = [REGISTERED, URING, THREADS] if "io_uring" in engines else [THREADS]
    everywhere = [*ours, *peers.everywhere]
    choices = sweep_settings(full=options.full, smoke=options.smoke, engines=engines)
    memory = 32 * MIB if options.smoke else Settings().footprint_bytes
    sweep_memory = max([memory, *(settings.footprint_bytes for settings in choices)])
    free_bytes = machine.free_space(path)
    with Workspace([path], size, memory) as place:
        facts = {**_facts_of(path, place), "free_bytes": free_bytes}
        one = PathReport(path, place.size_bytes, place.size_bytes, facts)
        run = Run(one, place, options, progress)
        run.step("filling the file")
        one.sample_bytes = run.fill()
        one.note(*_conditions(facts))
        small = _small_sizes(options, one.sample_bytes)
        run.expect(
            1
            + run.rounds * ((4 + 2 * len(small)) * len(everywhere) + 3 * len(peers.large) + len(engines))
            + 2 * len(choices) * min(run.rounds, 3)
        )
        for pattern in Pattern:
            workload = Workload(pattern=pattern, total_bytes=one.sample_bytes, object_bytes=OBJECT_BYTES)
            run.case(pattern.value, [*everywhere, *peers.large], workload, peers.reference)
        for object_bytes, total_bytes in small:
            for pattern in (Pattern.READ, Pattern.WRITE):
                workload = Workload(pattern=pattern, total_bytes=total_bytes, object_bytes=object_bytes)
                name = f"{pattern.value}, tensors of {short_bytes(object_bytes)}"
                run.case(name, everywhere, workload, peers.reference)
        run.latency(engines, one.sample_bytes)
    with Workspace([path], size, min(sweep_memory, spare_memory())) as run.place:
        run.fill()
        run.sweep(choices, max(OBJECT_BYTES, one.sample_bytes // 4))
        workload = Workload(pattern=Pattern.WRITE, total_bytes=run.place.size_bytes, object_bytes=OBJECT_BYTES)
        run.case("first write", [*map(Fresh, ours), *peers.fresh], workload, peers.reference)
    return run


def charge(options: Options, reports: Sequence[PathReport]) -> None:
    """Add the wear of each drive: it is written its part, in proportion to its speed, as a store stripes.

    Args:
        options: with what a step writes to all drives together; nothing is added without.
        reports: one for each path of the options; paths on one drive have the wear of that.
    """
    if options.bytes_per_step is None:
        return
    speeds = [one.best.score for one in reports if one.best is not None]
    if len(speeds) < len(reports):
        speeds = [1.0] * len(reports)
    devices = [path.stat().st_dev for path in options.paths]
    for path, device, one in zip(options.paths, devices, reports, strict=True):
        share = sum(speed for speed, other in zip(speeds, devices, strict=True) if other == device) / sum(speeds)
        info = os.statvfs(path)
        written, capacity = round(options.bytes_per_step * share), info.f_blocks * info.f_frsize
        one.wear = estimate_wear(written, options.endurance_bytes, capacity)


def _small_sizes(options: Options, sample_bytes: int) -> list[tuple[int, int]]:
    """Return (bytes of one tensor, bytes in all) of the cases with many small tensors."""
    if options.smoke:
        return [(64 << 10, 4 * MIB)]
    sizes = ((64 << 10, 2000), (256 << 10, 1000), (MIB, 512))
    return [(size, min(size * count, sample_bytes)) for size, count in sizes]


def _together(options: Options, size: int, alone: Sequence[PathReport], progress: Progress) -> Run:
    """Measure one engine over all paths at once, as a store that knows them stripes, against each of them alone.

    The fastest path's settings hold for all, shares are in proportion to speed; see
    :func:`offload.memory.drives.store_options`.
    """
    paths = options.paths
    share = max(size // len(paths) // MIB * MIB, OBJECT_BYTES)  # paths may share a drive
    found = [one.best for one in alone if one.best is not None]
    ours = Ours(Settings(engine=engines_available()[0]))
    if len(found) == len(paths):
        best = max(found, key=lambda swept: swept.score)
        ours = Ours(best.settings, weights=tuple(swept.score for swept in found))
    with Workspace(paths, share * len(paths), Settings().footprint_bytes) as place:
        total = PathReport(None, place.size_bytes, min(report.sample_bytes for report in alone), {"paths": len(paths)})
        run = Run(total, place, options, progress)
        run.expect(2 + 2 * run.rounds * (1 + len(paths)))
        run.step("filling the files")
        run.fill()
        single = dataclasses.replace(ours, weights=())
        singles = [_Alone(single, index, f"{path} alone") for index, path in enumerate(paths)]
        for pattern in (Pattern.READ, Pattern.WRITE):
            workload = Workload(pattern=pattern, total_bytes=total.sample_bytes, object_bytes=OBJECT_BYTES)
            run.case(pattern.value, [ours, *singles], workload, None)
        if share_a_drive(paths):
            total.note("some paths are on the same file system: together they cannot be faster than alone")
    return run


def share_a_drive(paths: Sequence[Path]) -> bool:
    """Tell whether some of the paths are on one file system."""
    return len({path.stat().st_dev for path in paths}) < len(paths)


def spare_memory() -> int:
    """An eighth of the memory that is free, in the container where there is one; at least what one queue needs."""
    from offload.memory.limits import free_host_bytes

    return max(Settings().footprint_bytes, free_host_bytes() // 8)


def _facts_of(path: Path, place: Workspace) -> dict[str, Any]:
    facts = file_facts(place.files[0].fd)
    mount = machine.mount_of(path)
    return {
        "file_system": mount.file_system if mount else None,
        "drive": mount.drive if mount else None,
        "model": mount.model if mount else None,
        "direct": place.files[0].direct,
        "alignment_bytes": place.files[0].alignment,
        "in_memory": facts.in_memory,
    }


def _conditions(facts: dict[str, Any]) -> list[str]:
    """Return what makes the numbers mean less than they seem to."""
    notes = []
    if refusal := uring_refusal():
        notes.append(f"io_uring cannot be used here: {refusal}")
    if facts["in_memory"]:
        notes.append("this file system keeps its files in memory: these are not figures of a drive, and not kept")
    elif not facts["direct"]:
        notes.append("no direct I/O here: these are figures of the page cache, and not kept")
    if machine.transparent_huge_pages() == "never":
        notes.append("huge pages are off: reads and writes cost more (see `offload doctor`)")
    load = os.getloadavg()[0] / (os.cpu_count() or 1)
    if load > 0.5:
        notes.append(f"other programs keep {load:.0%} of the processors busy: only the ratios mean something")
    return notes
