"""``offload plan``: where a model would live and what a step would take, for models and machines that are not here.

Owns the options of the command, and what it shows while it works. Next: :mod:`offload.predicting`.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import logging
import os
import re
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TextIO, get_args

from offload.cli.wording import in_options
from offload.config import ActivationMode, Config, OffloadTier
from offload.errors import BudgetError, ConfigError
from offload.kernels import optimizers
from offload.known_models import KNOWN
from offload.planning.hardware import PRESETS

if TYPE_CHECKING:
    from offload.forecast import Forecast

DESCRIPTION = (
    "Tell where a model would live within budgets, whether a batch fits, how long a step would take, which lane binds, "
    "and what would help. Nothing is loaded, and no device is needed. Exit code 0: it fits, 1: it does not; the text "
    "then names the smallest budget that would do."
)
_OPTIMIZERS = ("AdamW", "Adam", "SGD", "Lion", "Adagrad", "LAMB")
_BATCH = re.compile(r"(\d+)x(\d+)")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    known, machines = ", ".join(KNOWN), ", ".join(PRESETS)
    parser.add_argument("--model", required=True, help=f"a folder with config.json, or one of {known}")
    parser.add_argument("--batch", type=_batch, metavar="ROWSxLENGTH", help="of a micro-batch, in tokens: 4x2048")
    parser.add_argument("--hardware", metavar="NAME|FILE", help=f"the machine: here, {machines}, or a JSON file")
    parser.add_argument("--measure-again", action="store_true", help="what is known of this machine (--hardware here)")
    parser.add_argument("--device", metavar="BYTES", help="budget of the device, such as 24GiB")
    parser.add_argument("--cpu", metavar="BYTES", help="budget of host memory")
    parser.add_argument("--nvme", metavar="BYTES", help="budget of the drive")
    parser.add_argument("--drive", metavar="DIR", help="a folder on this machine's drive; beside --nvme, default: .")
    for name, what in (("--offload-param", "parameters"), ("--offload-optimizer", "states")):
        parser.add_argument(name, default="auto", choices=get_args(OffloadTier), help=f"force where {what} live")
    parser.add_argument("--optimizer", default="AdamW", choices=_OPTIMIZERS)
    parser.add_argument("--state-dtype", default="float32", help="float32, bfloat16 or int8")
    parser.add_argument("--accumulate", type=int, default=1, metavar="N", help="micro-batches of a step")
    parser.add_argument("--clip", action="store_true", help="every step clips the norm of its gradient")
    parser.add_argument(
        "--checkpointing",
        action="store_true",
        help="transformers compute them again, beside --activations, too",
    )
    parser.add_argument("--chunk-loss", action="store_true", help="without the logits of all tokens at once")
    activations = parser.add_mutually_exclusive_group()
    activations.add_argument(
        "--keep-activations",
        action="store_const",
        dest="activations",
        const="keep",
        help="the same as --activations keep",
    )
    activations.add_argument(
        "--activations",
        choices=get_args(ActivationMode),
        help="what the engine makes of them; if nothing is said, transformers compute them again",
    )
    for tier, text in (
        ("", "the device"),
        ("-cpu", "host memory, if they leave the device"),
        ("-nvme", "the drive, likewise"),
    ):
        parser.add_argument(f"--activation{tier}-memory", metavar="BYTES", help=f"for activations: part of {text}")
    parser.add_argument("--ranks", type=int, default=1, metavar="N", help="that train together; budgets are each one's")
    parser.add_argument("--stage", default="auto", choices=("auto", "1", "2", "3"), help="of several ranks")
    parser.add_argument("--json", action="store_true", help="print JSON instead of text")


def run(arguments: argparse.Namespace) -> None:
    """Print the forecast.

    Raises:
        BudgetError: it does not fit; after the forecast, if only activations do not.
        ConfigError: an option makes no sense.
    """
    try:
        with _uncollected():
            found = _forecast(arguments)
    except (BudgetError, ConfigError) as error:
        if arguments.json:
            said: dict[str, Any] = {"fits": None, "error": in_options(str(error), vars(arguments))}
            if isinstance(error, BudgetError):  # else nobody knows what a wrong call asks for
                said |= {"fits": False, "budgets": error.budgets, "larger_than": error.larger_than}
            print(json.dumps(said, indent=1))
        raise
    print(json.dumps(found.to_dict(), indent=1) if arguments.json else in_options(str(found), vars(arguments)))
    if not found.fits:
        raise BudgetError(found.remedy())


def _forecast(arguments: argparse.Namespace) -> Forecast:
    from offload.predicting import plan

    budgets = {tier: getattr(arguments, tier) for tier in ("device", "cpu", "nvme")}
    memory = {tier: size for tier, size in budgets.items() if size is not None}
    options: dict[str, Any] = {
        "max_memory": memory,
        "state_dtype": arguments.state_dtype,
        "gradient_accumulation_steps": arguments.accumulate,
        "max_grad_norm": 1.0 if arguments.clip else None,
        "activation_memory": arguments.activation_memory,
        "activation_cpu_memory": arguments.activation_cpu_memory,
        "activation_nvme_memory": arguments.activation_nvme_memory,
        "offload_param": arguments.offload_param,
        "offload_optimizer": arguments.offload_optimizer,
    }
    if arguments.activations:
        options["activations"] = arguments.activations
    if arguments.stage != "auto" and arguments.ranks == 1:
        raise ConfigError(f"stage: expected ranks beside it, several, but got --stage {arguments.stage} alone")
    wants = "nvme" in (*memory, arguments.offload_param, arguments.offload_optimizer)
    if wants or arguments.activation_nvme_memory:
        options["nvme_path"] = arguments.drive or os.curdir
    elif arguments.drive is not None:
        if arguments.hardware not in (None, "here"):
            raise ConfigError(
                f'drive: expected hardware="here", or max_memory["nvme"], beside it but got {arguments.hardware}; a '
                "machine that is not here has as much of a drive as you say"
            )
        options["nvme_path"] = arguments.drive
    with telling(sys.stderr):
        return plan(
            arguments.model,
            getattr(optimizers, arguments.optimizer)(lr=1e-4),
            batch=arguments.batch,
            hardware=arguments.hardware,
            checkpointing=arguments.checkpointing or (False if arguments.activations else None),
            chunk_loss=arguments.chunk_loss,
            ranks=arguments.ranks,
            stage=arguments.stage if arguments.stage == "auto" else int(arguments.stage),
            measure_again=arguments.measure_again,
            config=Config.load(options),
        )


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """Leave cycles of objects where they are: looking for them among those of torch takes a tenth of a forecast."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


class _OneLine(logging.Handler):
    """Shows on a terminal what is being done, each time in the place of what was done before."""

    def __init__(self, stream: TextIO) -> None:
        super().__init__()
        self._stream = stream

    def emit(self, record: logging.LogRecord) -> None:
        """Show a line; a warning stays."""
        warns = record.levelno >= logging.WARNING
        self._show(f"offload: {record.getMessage()}\n" if warns else f"{record.getMessage()} ...")

    def clear(self) -> None:
        """Leave no line behind."""
        self._show("")

    def _show(self, text: str) -> None:
        self._stream.write(f"\r\x1b[K{text}")
        self._stream.flush()


@contextlib.contextmanager
def telling(stream: TextIO) -> Iterator[None]:
    """Show what a forecast is doing, if somebody looks at `stream`."""
    if not stream.isatty():
        yield
        return
    logger, line = logging.getLogger("offload.predicting"), _OneLine(stream)
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(line)
    try:
        yield
    finally:
        logger.removeHandler(line)
        logger.setLevel(before)
        line.clear()


def _batch(text: str) -> tuple[int, int]:
    match = _BATCH.fullmatch(text)
    if match is None or not all(map(int, match.groups())):
        raise argparse.ArgumentTypeError(f"expected ROWSxLENGTH, such as 4x2048, but got {text!r}")
    return int(match[1]), int(match[2])
