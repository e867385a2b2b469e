"""The command of the comparison: that of ``offload tune``, with others beside the engines and a picture."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from offload.cli.drive.command import Progress, add_arguments, keep, options_of
from offload.cli.main import guarded

OUTPUT = Path(__file__).resolve().parents[2] / "build" / "bench"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    parser = argparse.ArgumentParser(
        prog="python bench/nvme",
        description="Measure drives through the engines of the NVMe tier, beside fio and DeepSpeed's aio handle (if "
        "installed) and common ways to keep tensors in files. Leaves nothing behind, however it ends.",
    )
    add_arguments(parser)
    parser.set_defaults(output=OUTPUT)
    parsed = parser.parse_args(arguments)
    return guarded(lambda: run(parsed))


def run(arguments: argparse.Namespace) -> None:
    """Measure, show and write.

    Raises:
        OffloadError: an option is wrong, or the results cannot be written.
        SwapError: a drive is too full, cannot be used, or fails.
    """
    from .cases import compare
    from .report import comparison_text, write_comparison

    with Progress() as progress:
        report = compare(options_of(arguments), progress.show)
    print(comparison_text(report))
    keep(report, arguments)
    print("wrote " + ", ".join(map(str, write_comparison(report, arguments.output))))
