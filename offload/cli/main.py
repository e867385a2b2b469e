"""Command line: ``finetune``, ``generate``, ``merge``, ``plan``, ``checkpoint``, ``tune``, ``doctor``, ``top``, ...

Also as ``python -m offload``. Owns arguments, exit codes and how errors are shown. Knows nothing of what the commands
do. The options of ``finetune`` are in :mod:`offload.cli.finetune.settings`. Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import signal
import sys
from collections.abc import Callable, Collection, Sequence
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn

from offload.cli import completion, generate, merge, plan, scale, top
from offload.cli.checkpoint import command as checkpoints
from offload.cli.drive import command as drive
from offload.cli.finetune.settings import EngineSettings, Settings, settings_of
from offload.cli.finetune.stopping import Stopped
from offload.cli.heavy import leave_out_quantizers
from offload.cli.options import add_options, values_of
from offload.cli.placement import PlacementSettings
from offload.cli.waiting import bound_spinning
from offload.cli.wording import in_options
from offload.errors import ConfigError, OffloadError, did_you_mean

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE = 128 + signal.SIGPIPE
EXIT_STOPPED = 128 + signal.SIGTERM


class Process(Enum):
    """Whose process a command runs in."""

    OWN = "own"
    SHARED = "shared"


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the option that was meant, of the command that was called."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Return what was parsed; refuse here what this command does not know, not where its caller looks."""
        parsed, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = sorted(option for option in self._option_string_actions if option.startswith("--"))
            wrong = next((word for word in unknown if word.startswith("--")), None)
            meant = "" if wrong is None else did_you_mean(wrong.split("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{meant}")
        return parsed, []

    def error(self, message: str) -> NoReturn:
        """Show the call and the error, and leave."""
        self.print_usage(sys.stderr)
        self.exit(EXIT_USAGE, f"{self.prog}: error: {message}\n")


def build_parser() -> argparse.ArgumentParser:
    """Return the parser of all commands."""
    parser = _Parser(
        prog="offload",
        description="Train models that do not fit the device, exactly, through host memory and NVMe.",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="store_true", help="show the version and leave")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)
    _add_models(commands)
    text = "what would a step take, and where?"
    plan.add_arguments(commands.add_parser("plan", allow_abbrev=False, help=text, description=plan.DESCRIPTION))
    text = "what would a step of many GPUs take?"
    scale.add_arguments(commands.add_parser("scale", allow_abbrev=False, help=text, description=scale.DESCRIPTION))
    _add_drive(commands)
    _add_doctor(commands)
    text = "show engines that run, live"
    top.add_arguments(commands.add_parser("top", allow_abbrev=False, help=text, description=top.DESCRIPTION))
    text = "list, check and export checkpoints"
    checkpoint = commands.add_parser("checkpoint", allow_abbrev=False, help=text, description=checkpoints.DESCRIPTION)
    checkpoints.add_arguments(checkpoint, _Parser)
    text = "let a shell complete this command"
    complete = commands.add_parser("completion", allow_abbrev=False, help=text, description=completion.DESCRIPTION)
    completion.add_arguments(complete)
    return parser


def _add_drive(commands: argparse._SubParsersAction[Any]) -> None:
    bench = commands.add_parser("bench", allow_abbrev=False, help="measure this machine")
    benches = bench.add_subparsers(dest="bench", metavar="WHAT", parser_class=_Parser, required=True)
    tune = "measure drives, keep the settings that serve them best"
    for where, name, text in ((commands, "tune", tune), (benches, "nvme", "another name of tune")):
        drive.add_arguments(where.add_parser(name, allow_abbrev=False, help=text, description=drive.DESCRIPTION))


def _add_doctor(commands: argparse._SubParsersAction[Any]) -> None:
    doctor = commands.add_parser(
        "doctor",
        allow_abbrev=False,
        help="is this machine ready?",
        description="Look at what the runtime needs from this machine; name every problem with its remedy. "
        "Exit code 0: no problem, 1: problems.",
    )
    doctor.add_argument("paths", type=Path, nargs="*", metavar="PATH", help="folders that shall hold swap files")
    doctor.add_argument("--json", action="store_true", help="print JSON instead of text")
    doctor.add_argument("--strict", action="store_true", help="exit code 1 for warnings too")


def _add_models(commands: argparse._SubParsersAction[Any]) -> None:
    finetune = commands.add_parser(
        "finetune",
        allow_abbrev=False,
        help="fine-tune a causal language model of Hugging Face on chats, rows or a text",
        description="Fine-tune a causal language model of Hugging Face within memory budgets, whole or with adapters. "
        "Shows the plan, the progress, and a report: held-out loss and a sample before and after, memory against the "
        "budgets, bytes per link.",
    )
    add_options(finetune, Settings, EngineSettings)
    text = "continue a text with a causal language model of Hugging Face, within memory budgets"
    what = commands.add_parser("generate", allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_options(what, generate.GenerateSettings, PlacementSettings)
    text = "merge adapters of PEFT into a model, layer by layer"
    what = commands.add_parser("merge", allow_abbrev=False, help=text, description=f"{text[0].upper()}{text[1:]}.")
    add_options(what, merge.MergeSettings, PlacementSettings)


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run ``offload doctor``; returns the exit code."""
    from offload.cli.doctor import diagnose, exit_code, findings_json, findings_text, gather

    findings = diagnose(gather(arguments.paths))
    print(json.dumps(findings_json(findings), indent=1) if arguments.json else findings_text(findings))
    return exit_code(findings, strict=arguments.strict)


def own_process() -> int:
    """Run the command line of this process, which does nothing else.

    Returns:
        The exit code: that of :func:`main`, or 74 where the output has no room.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")  # names of models and programs may have any letters
    try:
        return main(process=Process.OWN)
    except OSError as error:
        if error.filename is not None or _takes_output():
            raise
        _give_up_output()
        print(f"offload: error: output: {error.strerror}; free space, or write it elsewhere", file=sys.stderr)
        return os.EX_IOERR


def _takes_output() -> bool:
    try:
        return sys.stdout is None or os.write(sys.stdout.fileno(), b"\n") > 0
    except OSError:
        return False


def main(arguments: Sequence[str] | None = None, *, process: Process = Process.SHARED) -> int:
    """Run the command line.

    Args:
        arguments: the words; None for those of this process.
        process: in which it runs; one of its own goes without libraries that the command does not need.

    Returns:
        The exit code: 0, 1 after an error, 2 for a wrong call, 130 after Ctrl-C, 143 where a run has ended by SIGTERM,
        141 where nobody reads the output any more (``offload doctor | head -1``).
    """
    try:
        try:
            return _main(arguments, process)
        finally:
            if sys.stdout is not None:  # the shell has closed it
                sys.stdout.flush()
    except BrokenPipeError:
        _give_up_output()
        return EXIT_PIPE


def _give_up_output() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end


def _main(arguments: Sequence[str] | None, process: Process) -> int:
    parser = build_parser()
    completion.answer(parser)
    parsed = parser.parse_args(arguments)
    if parsed.version:
        import offload

        print(f"offload {offload.__version__}")
        return 0
    if parsed.command is None:
        parser.print_help()
        return EXIT_USAGE
    if parsed.command == "doctor":
        try:
            return run_doctor(parsed)
        except KeyboardInterrupt:
            return _interrupted()
    answers = parsed.command == "plan"  # whether a model fits: 1 is no
    return guarded(lambda: _run(parsed, process), vars(parsed), wrong_call=EXIT_USAGE if answers else EXIT_ERROR)


def _run(parsed: argparse.Namespace, process: Process) -> None:
    if process is Process.OWN:
        bound_spinning(os.environ)
        leave_out_quantizers(parsed)
    if parsed.command == "finetune":
        from offload.cli.finetune.run import run

        run(settings_of(parsed))
    elif parsed.command == "generate":
        wanted = generate.GenerateSettings(**values_of(parsed, generate.GenerateSettings))
        generate.run(wanted, PlacementSettings(**values_of(parsed, PlacementSettings)).options())
    elif parsed.command == "merge":
        merging = merge.MergeSettings(**values_of(parsed, merge.MergeSettings))
        merge.run(merging, PlacementSettings(**values_of(parsed, PlacementSettings)).options())
    elif parsed.command == "completion":
        completion.run(parsed)
    elif parsed.command == "plan":
        plan.run(parsed)
    elif parsed.command == "scale":
        scale.run(parsed)
    elif parsed.command == "top":
        top.run(parsed)
    elif parsed.command == "checkpoint":
        checkpoints.run(parsed)
    else:
        drive.run(parsed)


def guarded(command: Callable[[], None], names: Collection[str] = (), *, wrong_call: int = EXIT_ERROR) -> int:
    """Run a command, and show what ends it in words of its options, which argparse keeps under these names.

    Args:
        command: what is run.
        names: of its options.
        wrong_call: the exit code where options are understood but make no sense.

    Returns:
        The exit code.
    """
    from swap.errors import SwapError

    try:
        command()
    except KeyboardInterrupt:
        return _interrupted()
    except Stopped as stopped:
        print(f"offload: {stopped}", file=sys.stderr)
        return EXIT_STOPPED
    except (OffloadError, SwapError) as error:
        print(f"offload: error: {in_options(str(error), names)}", file=sys.stderr)
        return wrong_call if isinstance(error, ConfigError) else EXIT_ERROR
    except OSError as error:  # of a file or folder that the user has named
        if error.filename is None:
            raise
        print(f"offload: error: {error.filename}: {error.strerror}; name another file or folder", file=sys.stderr)
        return wrong_call
    return 0


def _interrupted() -> int:
    """Say that Ctrl-C has ended the command; returns the exit code."""
    print("\noffload: interrupted; nothing is left on the drive but whole checkpoints", file=sys.stderr)
    return EXIT_INTERRUPTED
