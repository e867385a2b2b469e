"""Where a fine-tuning run writes its figures while it goes on: TensorBoard, JSON lines, or Weights & Biases.

Owns their names. A library is imported when it is asked for. Knows neither models nor the engine, only its statistics.
Next: :mod:`offload.cli.finetune.run`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Protocol

from offload.cli.finetune.report import StepRecord, perplexity, plain_json
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.stats import Stats


class Log(Protocol):
    """Takes scalars by step."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write what is known of a step."""

    def close(self) -> None:
        """Write what waits. Idempotent."""


class NoLog:
    """Takes scalars and keeps none."""

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Do nothing."""

    def close(self) -> None:
        """Do nothing."""


class JsonLines:
    """One JSON object for each step and each evaluation, in the file log.jsonl.

    A resumed run goes on behind step `done`: what was written of later steps is dropped.
    """

    def __init__(self, folder: Path, done: int) -> None:
        path = folder / "log.jsonl"
        before = list(_lines_until(path, done)) if done and path.is_file() else []
        self._file = path.open("w", encoding="utf-8")
        self._file.writelines(before)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Write an object with a line of its own."""
        self._file.write(json.dumps({"step": step, **plain_json(values)}) + "\n")
        self._file.flush()

    def close(self) -> None:
        """Close the file."""
        self._file.close()


def _lines_until(path: Path, step: int) -> Iterator[str]:
    for line in path.read_text(encoding="utf-8").splitlines(keepends=True):
        if line.endswith("\n") and json.loads(line)["step"] <= step:  # a killed run may have left half a line
            yield line


class TensorBoard:
    """Event files of TensorBoard; a resumed run hides what was written of steps behind `done`."""

    def __init__(self, folder: Path, done: int) -> None:
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError as error:
            raise FinetuneError("log: tensorboard is not installed; pip install tensorboard") from error
        self._writer: Any = SummaryWriter(str(folder), purge_step=done + 1 if done else None)

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Add scalars."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Close the file."""
        self._writer.close()


class WeightsAndBiases:
    """A run of Weights & Biases; a resumed run goes on with the one whose id is in the folder."""

    def __init__(self, folder: Path, done: int) -> None:
        try:
            import wandb
        except ImportError as error:
            raise FinetuneError("log: wandb is not installed; pip install wandb") from error
        kept = folder / "wandb-run-id"
        before = kept.read_text(encoding="utf-8") if done and kept.is_file() else None
        self._run: Any = wandb.init(project="offload", dir=str(folder), id=before, resume="allow")
        kept.write_text(str(self._run.id), encoding="utf-8")

    def add(self, step: int, values: Mapping[str, float]) -> None:
        """Send scalars."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """End the run."""
        self._run.finish()


LOGS: dict[str, Callable[[Path, int], Log]] = {
    "jsonl": JsonLines,
    "tensorboard": TensorBoard,
    "wandb": WeightsAndBiases,
}


def open_log(settings: Settings, done: int) -> Log:
    """Return the log that the settings ask for; a resumed run has `done` steps behind it.

    Raises:
        FinetuneError: its library is not installed, or its folder cannot be written to.
    """
    if settings.log is None:
        return NoLog()
    folder = settings.log_dir
    if folder is None:
        assert settings.output is not None  # the settings have checked it
        folder = settings.output / "log"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        return LOGS[settings.log](folder, done)
    except OSError as error:
        raise FinetuneError(f"log {folder}: cannot be written to: {error.strerror or error}") from error


def step_scalars(record: StepRecord, before: Stats, after: Stats) -> dict[str, float]:
    """Return what is known of one step, between two snapshots of the engine."""
    norm = {} if record.grad_norm is None else {"train/grad_norm": record.grad_norm}
    return {
        "train/loss": record.loss,
        "train/lr": record.lr,
        **norm,
        "train/tokens_per_second": record.tokens / record.seconds if record.seconds > 0 else 0.0,
        "wait/parameters_seconds": after.stall_seconds - before.stall_seconds,
        "wait/activations_seconds": after.activation_stall_seconds - before.activation_stall_seconds,
        "wait/updates_seconds": after.update_stall_seconds - before.update_stall_seconds,
        **{f"memory/{tier}_bytes": float(size) for tier, size in after.used_bytes.items()},
    }


def evaluation_scalars(loss: float) -> dict[str, float]:
    """Return what is known of an evaluation."""
    return {"eval/loss": loss, "eval/perplexity": perplexity(loss)}
