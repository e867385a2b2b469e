"""How results of the NVMe bench are shown: as a table, as JSON, as a picture.

Owns the wording. Must not know how anything was measured.
Next: :mod:`offload.cli.drive.tune`, which fills what is shown here.
"""

from __future__ import annotations

import dataclasses
import json
import math
from pathlib import Path
from typing import Any

from offload.cli.drive.measure import Pattern, Settings, size_text
from offload.cli.drive.tune import PathReport, Report, Row, Wear

_WIDTH = 34


def report_text(report: Report) -> str:
    """Return the tables."""
    where = report.machine
    lines = [f"{where['cpu']}, {where['cores']} processors, Linux {where['kernel']}, commit {report.commit or 'none'}"]
    rounds = 1 if report.options.smoke else report.options.rounds
    for one in report.paths:
        lines += ["", *_path_lines(one, rounds)]
    lines += ["", f"this run wrote {report.written_bytes / 1e9:.1f} GB"]
    if report.options.smoke:
        lines.append("smoke run: shows that it works, the numbers mean nothing")
    return "\n".join(lines)


def _path_lines(one: PathReport, rounds: int) -> list[str]:
    lines = [_title(one, rounds)]
    for note in one.notes:
        lines.append(f"  note: {note}")
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
            name = f"{latency.engine}, {size_text(latency.object_bytes)}, {state}"
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
    if one.figures:
        lines += ["", f"{'figure':62s}{'measured':>10s}{'bound':>12s}"]
        for figure in one.figures:
            bound = f"{'<=' if figure.at_most else '>='} {figure.bound:g}"
            lines.append(f"{figure.name:62s}{figure.measured:10.4g}{bound:>12s}{'' if figure.reached else '  missed'}")
    if one.wear is not None:
        lines += ["", wear_text(one.wear)]
    return lines


def _title(one: PathReport, rounds: int) -> str:
    times = f"{rounds} rounds" if rounds != 1 else "1 round"
    if one.path is None:
        return f"all {one.facts['paths']} paths together: {size_text(one.size_bytes)}, {times}"
    facts = one.facts
    drive = facts["model"] or facts["drive"] or "no block device"
    io = "O_DIRECT" if facts["direct"] else "page cache"
    return (
        f"{one.path}: {facts['file_system'] or 'unknown file system'} on {drive}, {io}, alignment "
        f"{facts['alignment_bytes']}, {size_text(facts['free_bytes'])} free; file of {size_text(one.size_bytes)}, "
        f"{size_text(one.sample_bytes)} per measurement, {times}"
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
    """Return the report as plain values: samples (of latencies their rounds' medians) and medians. Holds no date."""
    return {
        "bench": "nvme",
        "commit": report.commit,
        "machine": report.machine,
        "options": _plain(dataclasses.asdict(report.options)),
        "written_bytes": report.written_bytes,
        "paths": [_path_json(one) for one in report.paths],
    }


def _path_json(one: PathReport) -> dict[str, Any]:
    values: dict[str, Any] = _plain(dataclasses.asdict(one))
    for plain, row in zip(values["rows"], one.rows, strict=True):
        plain |= {"bandwidth_gb_s": row.bandwidth_gb_s, "cpu_seconds_per_gb": row.cpu_seconds_per_gb}
    for plain, latency in zip(values["latencies"], one.latencies, strict=True):
        plain["rounds"] = latency.medians
        plain |= {"median_seconds": latency.median_seconds, "p99_seconds": latency.p99_seconds}
    for plain, figure in zip(values["figures"], one.figures, strict=True):
        plain["reached"] = figure.reached
    if one.wear is not None:
        values["wear"] |= {"share_per_1000_steps": one.wear.share_per_1000_steps, "steps": one.wear.steps}
    return values


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value


def write_report(report: Report, folder: Path) -> list[Path]:
    """Write nvme.json and, where matplotlib is installed, nvme.png; returns what was written.

    Raises:
        OSError: the folder cannot be written to.
    """
    folder.mkdir(parents=True, exist_ok=True)
    written = [folder / "nvme.json"]
    written[0].write_text(json.dumps(report_json(report), indent=1) + "\n", encoding="utf-8")
    if plot(report, folder / "nvme.png"):
        written.append(folder / "nvme.png")
    return written


# ---- picture ----


def plot(report: Report, target: Path) -> bool:
    """Draw contenders by pattern and the sweep of every path; False without matplotlib."""
    try:
        import matplotlib

        matplotlib.use("Agg")
        from matplotlib import pyplot
    except ImportError:
        return False
    shown = [one for one in report.paths if one.rows]
    if not shown:
        return False
    figure, axes = pyplot.subplots(len(shown), 2, figsize=(13, 4.2 * len(shown)), squeeze=False)
    for (left, right), one in zip(axes, shown, strict=True):
        _plot_patterns(left, one)
        _plot_sweep(right, one)
    figure.tight_layout()
    figure.savefig(target, dpi=110)
    pyplot.close(figure)
    return True


def _plot_patterns(axis: Any, one: PathReport) -> None:
    patterns = [pattern.value for pattern in Pattern]
    names = list(dict.fromkeys(row.contender for row in one.rows if row.case in patterns))
    for position, name in enumerate(names):
        speeds = [row.bandwidth_gb_s if (row := one.row(pattern, name)) else 0.0 for pattern in patterns]
        places = [index + 0.8 * position / len(names) for index in range(len(patterns))]
        axis.bar(places, speeds, width=0.8 / len(names), label=name)
    axis.set_xticks([index + 0.4 * (1 - 1 / max(len(names), 1)) for index in range(len(patterns))], patterns)
    axis.set_ylabel("GB/s (median)")
    axis.set_title(str(one.path) if one.path is not None else "all paths together")
    axis.legend(fontsize=7)


def _plot_sweep(axis: Any, one: PathReport) -> None:
    if not one.sweep:
        axis.set_axis_off()
        return
    lines: dict[str, list[tuple[int, float]]] = {}
    for swept in one.sweep:
        settings = swept.settings
        width = f"{settings.threads} threads" if settings.engine == "threads" else f"depth {settings.queue_depth}"
        lines.setdefault(f"{settings.engine}, {width}", []).append((settings.block_bytes, swept.score))
    for name, points in lines.items():
        points.sort()
        style = "--" if name.startswith("threads") else "-"
        axis.plot([size / 1024 for size, _ in points], [speed for _, speed in points], style, marker="o", label=name)
    axis.set_xscale("log", base=2)
    axis.set_xlabel("block, KiB")
    axis.set_ylabel("GB/s, half read, half written")
    axis.set_title("sweep")
    axis.legend(fontsize=7)
