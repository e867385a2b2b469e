"""The command that measures drives and keeps their settings: its options, its progress, what it prints.

``offload tune`` and ``offload bench nvme`` are two names of it. Knows nothing of what is measured.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from offload.errors import ConfigError

if TYPE_CHECKING:
    from offload.cli.drive.results import Options, Report

COMPARISON = "The comparison with fio and DeepSpeed comes with the sources: python bench/nvme."
DESCRIPTION = (
    "Measure drives through the engines of the NVMe tier, and keep the settings that serve them best for "
    "offload.Engine. Uses files without names: nothing is left behind, however it ends. " + COMPARISON
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options to `parser`."""
    parser.add_argument(
        "paths", type=Path, nargs="*", default=[Path(".")], metavar="PATH", help="folder on a drive (default: this one)"
    )
    parser.add_argument(
        "--size", metavar="SIZE", help="most space to fill (default: 1GiB, at most 10 %% of what is free)"
    )
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="measurements of everything (default: 5)")
    parser.add_argument("--full", action="store_true", help="the wide sweep of settings (minutes, and many writes)")
    parser.add_argument("--smoke", action="store_true", help="small and short: shows that it runs, measures nothing")
    parser.add_argument("--output", type=Path, metavar="DIR", help="folder for nvme.json")
    parser.add_argument("--no-keep", action="store_true", help="do not keep the suggested settings for offload.Engine")
    parser.add_argument(
        "--bytes-per-step", metavar="SIZE", help="written by a training step (see the plan) to all drives: shows wear"
    )
    parser.add_argument("--endurance", metavar="SIZE", help="bytes that each drive is rated for, such as 600TB")


def options_of(arguments: argparse.Namespace) -> Options:
    """Return what the arguments ask for.

    Raises:
        ConfigError: an option is wrong.
    """
    from offload.cli.drive.results import Options

    return Options(
        paths=tuple(arguments.paths),
        size_bytes=_bytes_of(arguments.size, "--size"),
        rounds=arguments.rounds,
        full=arguments.full,
        smoke=arguments.smoke,
        bytes_per_step=_bytes_of(arguments.bytes_per_step, "--bytes-per-step"),
        endurance_bytes=_bytes_of(arguments.endurance, "--endurance"),
    )


def _bytes_of(text: str | None, subject: str) -> int | None:
    from offload.sizes import Share, parse_bytes

    if text is None:
        return None
    size = parse_bytes(text, subject=subject)
    if isinstance(size, Share):
        raise ConfigError(f"{subject}: expected bytes such as 8GiB but got {text!r}")
    return size


def run(arguments: argparse.Namespace) -> None:
    """Measure: progress to stderr, tables to stdout.

    Raises:
        OffloadError: an option is wrong, or the results cannot be written.
        SwapError: a drive is too full, cannot be used, or fails.
    """
    from offload.cli.drive.report import report_json, report_text, write_json
    from offload.cli.drive.tune import tune

    with Progress() as progress:
        report = tune(options_of(arguments), progress.show)
    print(report_text(report))
    keep(report, arguments)
    if arguments.output is not None:
        print(f"wrote {write_json(report_json(report), arguments.output)}")


def keep(report: Report, arguments: argparse.Namespace) -> None:
    """Keep the suggested settings, unless the arguments say otherwise."""
    from offload.cli.drive.tune import keep_suggestions

    kept = None if arguments.no_keep or arguments.smoke else keep_suggestions(report)
    if kept is not None:
        print(f"suggested settings kept in {kept}: offload.Engine uses them on these drives")


class Progress:
    """What goes on, on stderr: one line that changes on a terminal, a line for each case elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self._case = ""

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def show(self, what: str, done: int, expected: int) -> None:
        """Show what is measured next; the part up to the first colon is the case."""
        share = f"{done / expected:4.0%}"
        case = what.split(":")[0]
        if self._terminal:
            print(f"\r\x1b[K{share} {what[:100]}", end="", file=sys.stderr, flush=True)
        elif case and case != self._case:
            print(f"{share} {case}", file=sys.stderr, flush=True)
        self._case = case or self._case
