"""Who takes part in the comparison, and the case that only others have: a state kept in a file, naively."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from offload.cli.drive.measure import Contender, Ours, Pattern, Settings, Workload, Workspace
from offload.cli.drive.results import Options, PathReport, Report
from offload.cli.drive.tune import OBJECT_BYTES, Fresh, Peers, Progress, Run, free_bytes_of, spare_memory, tune
from offload.sizes import MIB
from swap.io.aio import engines_available

from .deepspeed import DeepSpeed, deepspeed_installed
from .peers import Fio, fio_installed, naive_contenders


def find_peers() -> Peers:
    """Return the peers that are installed."""
    everywhere: list[Contender] = []
    large: list[Contender] = []
    fresh: list[Contender] = []
    if fio_installed():
        everywhere.append(fio := Fio())
        large.append(Fio(tuned=False))
        fresh.append(Fresh(fio))
    if deepspeed_installed():
        everywhere.append(deepspeed := DeepSpeed())
        large.append(DeepSpeed(like=deepspeed))
        fresh.append(Fresh(deepspeed, grows=True))  # that is how it swaps
    return Peers(everywhere, large, fresh, Fio().name)


def compare(options: Options, progress: Progress, free_space: Callable[[Path], int] = free_bytes_of) -> Report:
    """Measure every path beside the peers; see :func:`offload.cli.drive.tune.tune` for arguments and errors."""
    report = tune(options, progress, find_peers, free_space)
    for one in report.paths:
        if one.path is not None:
            if not fio_installed():
                one.note("fio is not installed: no ratios to it (apt install fio)")
            report.written_bytes += _naive_cases(one, one.path, options, progress)
    return report


def _naive_cases(report: PathReport, path: Path, options: Options, progress: Progress) -> int:
    """Measure the naive baselines beside an engine, with two files of half the size; returns the bytes written."""
    total = 8 * MIB if options.smoke else 256 * MIB
    total = min(total, report.size_bytes // 2, spare_memory()) // OBJECT_BYTES * OBJECT_BYTES or 8 * MIB
    engine = engines_available()[0]
    with Workspace([path], total, Settings().footprint_bytes) as place:
        run = Run(report, place, options, progress)
        run.fill()
        with naive_contenders(place, total) as naive:
            contenders = [Ours(Settings(engine=engine), label=engine), *naive]
            run.expect(2 * run.rounds * len(contenders))
            for pattern in (Pattern.WRITE, Pattern.READ):
                workload = Workload(pattern=pattern, total_bytes=total, object_bytes=min(OBJECT_BYTES, total))
                run.case(f"{pattern.value} of a state, naively", contenders, workload, engine)
    return run.written_bytes
