"""How the comparison is shown: the tables and the JSON of ``offload tune`` with figures to reach, and a picture."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from offload.cli.drive.measure import Pattern
from offload.cli.drive.report import report_json, report_text, write_json
from offload.cli.drive.results import PathReport, Report

from .figures import figures_of


def comparison_text(report: Report) -> str:
    """Return the tables."""
    return report_text(report, lambda one: _figure_lines(one, report.options.paths))


def _figure_lines(one: PathReport, paths: Sequence[Path]) -> list[str]:
    lines = ["", f"{'figure':62s}{'measured':>10s}{'bound':>12s}"]
    for figure in figures_of(one, paths):
        bound = f"{'<=' if figure.at_most else '>='} {figure.bound:g}"
        lines.append(f"{figure.name:62s}{figure.measured:10.4g}{bound:>12s}{'' if figure.reached else '  missed'}")
    return lines if len(lines) > 2 else []


def comparison_json(report: Report) -> dict[str, Any]:
    """Return :func:`offload.cli.drive.report.report_json` with the figures of every path."""
    values = report_json(report)
    for plain, one in zip(values["paths"], report.paths, strict=True):
        figures = figures_of(one, report.options.paths)
        plain["figures"] = [dataclasses.asdict(figure) | {"reached": figure.reached} for figure in figures]
    return values


def write_comparison(report: Report, folder: Path) -> list[Path]:
    """Write nvme.json and, where matplotlib is installed, nvme.png; returns what was written.

    Raises:
        ConfigError: the folder cannot be written to.
    """
    written = [write_json(comparison_json(report), folder)]
    if plot(report, folder / "nvme.png"):
        written.append(folder / "nvme.png")
    return written


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
