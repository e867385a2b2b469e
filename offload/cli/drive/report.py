"""How what a drive gives is shown: as a table, and as JSON.

Owns the wording. Must not know how anything was measured.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from offload.cli.drive.measure import Settings
from offload.cli.drive.results import PathReport, Report, Row, Wear
from offload.errors import ConfigError
from offload.sizes import short_bytes

_WIDTH = 34


def report_text(report: Report, more: Callable[[PathReport], list[str]] = lambda one: []) -> str:
    """Return the tables, with `more` lines at the end of each path's."""
    where = report.machine
    lines = [f"{where['cpu']}, {where['cores']} processors, Linux {where['kernel']}, commit {report.commit or 'none'}"]
    for one in report.paths:
        lines += ["", *_path_lines(one, report.options.rounds_made), *more(one)]
    lines += ["", f"this run wrote {report.written_bytes / 1e9:.1f} GB"]
    if report.options.smoke:
        lines.append("smoke run: shows that it works, the numbers mean nothing")
    return "\n".join(lines)


def _path_lines(one: PathReport, rounds: int) -> list[str]:
    lines = [_title(one, rounds), *(f"  note: {note}" for note in one.notes)]
    if one.rows:
        lines += ["", f"{'case, contender':{_WIDTH + 2}s}{'GB/s':>8s}{'ratio':>8s}{'CPU s/GB':>10s}{'spread':>8s}"]
    case = ""
    for row in one.rows:
        if row.case != case:
            case = row.case
            lines.append(f"{case}{f' (ratio to {row.reference})' if row.reference else ''}")
        lines.append(_row_line(row))
    if one.latencies:
        lines += ["", f"{'one read at a time':{_WIDTH + 2}s}{'median':>8s}{'99 %':>10s}"]
        for latency in one.latencies:
            state = "under write-back" if latency.under_writes else "idle drive"
            name = f"{latency.engine}, {short_bytes(latency.object_bytes)}, {state}"
            lines.append(
                f"  {name:{_WIDTH}s}{latency.median_seconds * 1e3:8.3f}{latency.p99_seconds * 1e3:10.3f} milliseconds"
            )
    if one.sweep:
        lines += ["", f"{'settings':{_WIDTH + 2}s}{'read':>8s}{'write':>8s}{'CPU s/GB':>10s}"]
        for swept in one.sweep:
            mark = "  <- suggested" if swept.settings == one.suggested else ""
            lines.append(
                f"  {swept.settings!s:{_WIDTH}s}{swept.read_gb_s:8.2f}{swept.write_gb_s:8.2f}"
                f"{swept.cpu_seconds_per_gb:10.4f}{mark}"
            )
    if one.suggested is not None:
        lines += ["", f"suggested: {settings_text(one.suggested)}"]
    if one.wear is not None:
        lines += ["", wear_text(one.wear)]
    return lines


def _title(one: PathReport, rounds: int) -> str:
    times = f"{rounds} rounds" if rounds != 1 else "1 round"
    if one.path is None:
        return f"all {one.facts['paths']} paths together: {short_bytes(one.size_bytes)}, {times}"
    facts = one.facts
    drive = facts["model"] or facts["drive"] or "no block device"
    io = "O_DIRECT" if facts["direct"] else "page cache"
    return (
        f"{one.path}: {facts['file_system'] or 'unknown file system'} on {drive}, {io}, alignment "
        f"{facts['alignment_bytes']}, {short_bytes(facts['free_bytes'])} free; file of {short_bytes(one.size_bytes)}, "
        f"{short_bytes(one.sample_bytes)} per measurement, {times}"
    )


def _row_line(row: Row) -> str:
    ratio = "" if row.ratio is None else f"{row.ratio:.2f}"
    speeds = [sample.bandwidth_gb_s for sample in row.samples]
    spread = (max(speeds) - min(speeds)) / row.bandwidth_gb_s
    return (
        f"  {row.contender[:_WIDTH]:{_WIDTH}s}{row.bandwidth_gb_s:8.2f}{ratio:>8s}"
        f"{row.cpu_seconds_per_gb:10.4f}{spread:8.0%}"
    )


def settings_text(settings: Settings) -> str:
    """Return settings as the arguments of :class:`swap.store.SwapStore`."""
    width = f"threads={settings.threads}" if settings.engine == "threads" else f"queue_depth={settings.queue_depth}"
    return f'engine="{settings.engine}", block_bytes={settings.block_bytes}, {width}'


def wear_text(wear: Wear) -> str:
    """Return what training does to the drive, in a sentence."""
    rating = f"{wear.endurance_bytes / 1e12:.0f} TB"
    basis = f"{rating} assumed (600 drive writes); name the rating with --endurance" if wear.assumed else rating
    return (
        f"wear: {wear.bytes_per_step / 1e9:.2f} GB per step are {wear.bytes_per_step / 1e9:.2f} TB per 1000 steps, "
        f"{wear.share_per_1000_steps:.2%} of the drive's life ({basis}); worn out after {wear.steps} steps"
    )


# ---- JSON ----


def report_json(report: Report) -> dict[str, Any]:
    """Return what JSON can say of a report: samples (of latencies their rounds' medians) and medians. Holds no date."""
    return {
        "bench": "nvme",
        "commit": report.commit,
        "machine": report.machine,
        "options": dataclasses.asdict(report.options) | {"paths": [str(path) for path in report.options.paths]},
        "written_bytes": report.written_bytes,
        "paths": [_path_json(one) for one in report.paths],
    }


def _path_json(one: PathReport) -> dict[str, Any]:
    values = dataclasses.asdict(one) | {"path": None if one.path is None else str(one.path)}
    for plain, row in zip(values["rows"], one.rows, strict=True):
        plain |= {"bandwidth_gb_s": row.bandwidth_gb_s, "cpu_seconds_per_gb": row.cpu_seconds_per_gb}
    for plain, latency in zip(values["latencies"], one.latencies, strict=True):
        plain["rounds"] = latency.medians
        plain |= {"median_seconds": latency.median_seconds, "p99_seconds": latency.p99_seconds}
    if one.wear is not None:
        values["wear"] |= {"share_per_1000_steps": one.wear.share_per_1000_steps, "steps": one.wear.steps}
    return values


def write_json(values: dict[str, Any], folder: Path) -> Path:
    """Write what :func:`report_json` returned to nvme.json in `folder`, which is created; returns the file.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    file = folder / "nvme.json"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file.write_text(json.dumps(values, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--output {folder}: cannot be written to: {error}; name another folder") from error
    return file
