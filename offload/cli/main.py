"""Command line: ``offload finetune``, ``tune`` (or ``bench nvme``), ``doctor``; also as ``python -m offload``.

Owns arguments, exit codes and how errors are shown. Knows nothing of what the commands do. Next:
:mod:`offload.cli.finetune`.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from offload.cli.drive import command as drive
from offload.errors import ConfigError, OffloadError, did_you_mean

if TYPE_CHECKING:
    from offload.cli.finetune_text import Settings

EXIT_ERROR = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 128 + signal.SIGINT
EXIT_PIPE = 128 + signal.SIGPIPE


class _Parser(argparse.ArgumentParser):
    """An argument parser that suggests the option that was meant."""

    def long_options(self) -> list[str]:
        """Return the options of this parser and its commands that begin with two dashes."""
        options = {option for option in self._option_string_actions if option.startswith("--")}
        for action in self._actions:
            if isinstance(action, argparse._SubParsersAction):
                for parser in action.choices.values():
                    options.update(parser.long_options())
        return sorted(options)

    def error(self, message: str) -> NoReturn:
        """Show the call and the error, and leave."""
        if message.startswith("unrecognized arguments:"):
            for word in message.split(":", 1)[1].split():
                if word.startswith("--"):
                    message += did_you_mean(word.split("=")[0], self.long_options())
                    break
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
    _add_finetune(commands)
    _add_drive(commands)
    _add_doctor(commands)
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


def _add_finetune(commands: argparse._SubParsersAction[Any]) -> None:
    finetune = commands.add_parser(
        "finetune",
        allow_abbrev=False,
        help="fine-tune a causal language model of Hugging Face on a text",
        description="Fine-tune a causal language model of Hugging Face on a text, within memory budgets. Shows the "
        "plan, the progress, and a report: held-out loss and a sample before and after, memory against the budgets, "
        "bytes per link.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    data = finetune.add_argument_group("what to train on")
    data.add_argument("--model", type=Path, required=True, metavar="DIR", help="folder of the model and its tokenizer")
    data.add_argument("--text", type=Path, required=True, metavar="FILE", help="UTF-8 text")
    data.add_argument("--held-out", type=float, default=0.05, metavar="SHARE", help="share kept for evaluation")
    data.add_argument("--output", type=Path, metavar="DIR", help="folder for report.json and loss.png")
    data.add_argument("--save-model", action="store_true", help="also write the trained model to OUTPUT/model")

    training = finetune.add_argument_group("training")
    training.add_argument("--steps", type=int, default=100, metavar="N", help="optimizer steps")
    training.add_argument("--lr", type=float, default=2e-5, metavar="RATE", help="learning rate of AdamW")
    training.add_argument("--warmup-steps", type=int, default=5, metavar="N", help="steps of rising learning rate")
    training.add_argument("--weight-decay", type=float, default=0.1, metavar="RATE", help="decoupled weight decay")
    training.add_argument("--sequence-length", type=int, default=512, metavar="N", help="tokens per sequence")
    training.add_argument("--batch-size", type=int, default=1, metavar="N", help="sequences per micro-batch")
    training.add_argument(
        "--gradient-accumulation-steps", type=int, default=1, metavar="N", help="micro-batches per optimizer step"
    )
    training.add_argument(
        "--max-grad-norm", type=float, default=1.0, metavar="NORM", help="clip to it; 0 does not clip"
    )
    training.add_argument("--gradient-checkpointing", action="store_true", help="recompute activations in backward")
    training.add_argument("--dtype", metavar="NAME", help="bfloat16, float16 or float32; default: the model's")
    training.add_argument("--seed", type=int, default=0, metavar="N", help="of the order of the text")

    memory = finetune.add_argument_group("memory (sizes such as 700MiB, 8GiB, 80%; default: what is free)")
    memory.add_argument("--device", metavar="NAME", help="cuda or cpu; default: cuda where there is one")
    memory.add_argument("--device-memory", metavar="SIZE", help="of the device, activations included")
    memory.add_argument("--activation-memory", metavar="SIZE", help="part of it kept for activations")
    memory.add_argument("--cpu-memory", metavar="SIZE", help="of the host")
    memory.add_argument("--nvme-memory", metavar="SIZE", help="of the drive")
    memory.add_argument(
        "--nvme-path", type=Path, action="append", metavar="DIR", help="folder on the drive; repeatable"
    )
    memory.add_argument("--offload-param", metavar="TIER", help="auto, none, cpu or nvme: force where parameters live")
    memory.add_argument("--offload-optimizer", metavar="TIER", help="the same for the optimizer's states")
    memory.add_argument("--state-dtype", metavar="NAME", help="of Adam's moments: float32 (exact), bfloat16 or int8")
    memory.add_argument("--config", type=Path, metavar="FILE", help="JSON file with options of offload.Config")

    showing = finetune.add_argument_group("evaluation and samples")
    showing.add_argument("--evaluations", type=int, default=3, metavar="N", help="evaluations after the first")
    showing.add_argument("--evaluation-sequences", type=int, default=8, metavar="N", help="sequences in one evaluation")
    showing.add_argument("--sample-tokens", type=int, default=40, metavar="N", help="length of the sample; 0: none")
    showing.add_argument("--prompt", metavar="TEXT", help="text to continue; default: held-out text")


def engine_options(arguments: argparse.Namespace) -> dict[str, Any]:
    """Return the options of :class:`offload.Config` that the arguments name, on top of ``--config``.

    Raises:
        ConfigError: the configuration file cannot be read.
    """
    options: dict[str, Any] = {}
    if arguments.config is not None:
        try:
            options = json.loads(arguments.config.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ConfigError(f"config file {arguments.config}: cannot be read as JSON: {error}") from error
        if not isinstance(options, dict):
            raise ConfigError(f"config file {arguments.config}: expected a JSON object at the top")
    budgets = {
        tier: size
        for tier, size in (
            ("device", arguments.device_memory),
            ("cpu", arguments.cpu_memory),
            ("nvme", arguments.nvme_memory),
        )
        if size is not None
    }
    if budgets:
        options["max_memory"] = {**(options.get("max_memory") or {}), **budgets}
    plain = ("device", "activation_memory", "dtype", "state_dtype", "offload_param", "offload_optimizer", "nvme_path")
    for name in plain:
        value = getattr(arguments, name)
        if value is not None:
            options[name] = value
    return options


def finetune_settings(arguments: argparse.Namespace) -> Settings:
    """Return the settings that the arguments name.

    Raises:
        OffloadError: a value is out of range.
    """
    from offload.cli.finetune_text import Settings

    return Settings(
        model=arguments.model,
        text=arguments.text,
        output=arguments.output,
        save_model=arguments.save_model,
        steps=arguments.steps,
        sequence_length=arguments.sequence_length,
        batch_size=arguments.batch_size,
        gradient_accumulation_steps=arguments.gradient_accumulation_steps,
        lr=arguments.lr,
        weight_decay=arguments.weight_decay,
        max_grad_norm=arguments.max_grad_norm or None,
        warmup_steps=arguments.warmup_steps,
        held_out=arguments.held_out,
        evaluation_sequences=arguments.evaluation_sequences,
        evaluations=arguments.evaluations,
        sample_tokens=arguments.sample_tokens,
        prompt=arguments.prompt,
        gradient_checkpointing=arguments.gradient_checkpointing,
        seed=arguments.seed,
        engine_options=engine_options(arguments),
    )


def run_doctor(arguments: argparse.Namespace) -> int:
    """Run ``offload doctor``; returns the exit code."""
    from offload.cli.doctor import diagnose, exit_code, findings_json, findings_text, gather

    findings = diagnose(gather(arguments.paths))
    print(json.dumps(findings_json(findings), indent=1) if arguments.json else findings_text(findings))
    return exit_code(findings, strict=arguments.strict)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line.

    Returns:
        The exit code: 0, 1 after an error, 2 for a wrong call, 130 after Ctrl-C, 141 where nobody reads the output any
        more (``offload doctor | head -1``).
    """
    try:
        try:
            return _main(arguments)
        finally:
            sys.stdout.flush()
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the interpreter flushes once more at its end
        return EXIT_PIPE


def _main(arguments: Sequence[str] | None) -> int:
    parser = build_parser()
    parsed = parser.parse_args(arguments)
    if parsed.version:
        import offload

        print(f"offload {offload.__version__}")
        return 0
    if parsed.command is None:
        parser.print_help()
        return EXIT_USAGE
    if parsed.command == "doctor":
        return run_doctor(parsed)
    return guarded(lambda: _run(parsed))


def _run(parsed: argparse.Namespace) -> None:
    if parsed.command == "finetune":
        from offload.cli.finetune import run

        run(finetune_settings(parsed))
    else:
        drive.run(parsed)


def guarded(command: Callable[[], None]) -> int:
    """Run a command and show what ends it; returns the exit code."""
    from swap.errors import SwapError

    # Transfers and the optimizer work beside torch's threads, whose spinning would take the cores from them. Read when
    # torch is first imported, which is below.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    try:
        command()
    except KeyboardInterrupt:
        print("\noffload: interrupted; nothing is left on the drive", file=sys.stderr)
        return EXIT_INTERRUPTED
    except (OffloadError, SwapError) as error:
        print(f"offload: error: {error}", file=sys.stderr)
        return EXIT_ERROR
    return 0
