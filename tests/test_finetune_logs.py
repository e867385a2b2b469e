"""Where a run writes its figures: the file that TensorBoard reads, JSON lines, a run of Weights & Biases."""

from __future__ import annotations

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from offload.cli.finetune.logs import NoLog, evaluation_scalars, open_log, step_scalars
from offload.cli.finetune.report import StepRecord
from offload.cli.finetune.settings import FinetuneError, Settings
from offload.stats import Counters, Stats

SIZES = {"device": 1, "cpu": 2, "nvme": 3}


def settings(folder: Path, kind: Any, **changes: Any) -> Settings:
    return Settings(model=Path("m"), data=Path("d"), log=kind, log_dir=folder, **changes)


def stats(stalls: float, updates: float) -> Stats:
    links = Counters().links()
    sizes, later = (SIZES, SIZES, SIZES), (0, 0, 0, stalls / 2)
    return Stats(0, 0, links, 0, 0, 0, stalls, 0, 0, 0.0, updates, 0, 0, 0, 0.0, 0, *sizes, 1.0, *later)


def test_scalars_of_a_step() -> None:
    found = step_scalars(StepRecord(3, 2.5, None, 1e-3, 4.0, 100), stats(1.0, 2.0), stats(1.5, 4.0))
    assert found == {
        "train/loss": 2.5,
        "train/lr": 1e-3,
        "train/tokens_per_second": 25.0,
        "wait/parameters_seconds": 0.5,
        "wait/activations_seconds": 0.25,
        "wait/updates_seconds": 2.0,
        "memory/device_bytes": 1.0,
        "memory/cpu_bytes": 2.0,
        "memory/nvme_bytes": 3.0,
    }
    assert step_scalars(StepRecord(3, 2.5, 7.0, 1e-3, 4.0, 1), stats(0, 0), stats(0, 0))["train/grad_norm"] == 7.0
    assert evaluation_scalars(0.0) == {"eval/loss": 0.0, "eval/perplexity": 1.0}


def write(folder: Path, kind: Any, done: int, steps: range) -> None:
    log = open_log(settings(folder, kind), done)
    for step in steps:
        log.add(step, {"train/loss": 10.0 * done + step})
    log.close()


def test_json_lines_of_a_resumed_run_are_those_of_one(tmp_path: Path) -> None:
    write(tmp_path / "log", "jsonl", 0, range(1, 6))
    path = tmp_path / "log" / "log.jsonl"
    path.write_text(path.read_text() + '{"step": 6, "tr')  # killed
    write(tmp_path / "log", "jsonl", 3, range(4, 6))
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert [(line["step"], line["train/loss"]) for line in lines] == [(1, 1), (2, 2), (3, 3), (4, 34), (5, 35)]
    write(tmp_path / "log", "jsonl", 0, range(1, 2))
    assert len(path.read_text().splitlines()) == 1
    log = open_log(settings(tmp_path / "log", "jsonl"), 0)
    log.add(1, {"train/loss": float("nan")})
    log.close()
    assert json.loads(path.read_text()) == {"step": 1, "train/loss": None}


def test_tensorboard_reads_what_a_resumed_run_wrote(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, "tensorboard", 0, range(1, 6))
    write(tmp_path, "tensorboard", 3, range(4, 6))
    reader = EventAccumulator(str(tmp_path))
    reader.Reload()
    found = [(event.step, event.value) for event in reader.Scalars("train/loss")]
    assert found == [(1, 1), (2, 2), (3, 3), (4, 34), (5, 35)]


def test_a_run_of_weights_and_biases_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a fake with the three calls that are used."""
    calls: list[Any] = []

    class FakeRun:
        id = "abc"

        def log(self, values: dict[str, float], step: int) -> None:
            calls.append((step, values))

        def finish(self) -> None:
            calls.append("finished")

    def init(**how: Any) -> FakeRun:
        calls.append(how)
        return FakeRun()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    write(tmp_path, "wandb", 0, range(1, 2))
    write(tmp_path, "wandb", 1, range(2, 3))
    begun = {"project": "offload", "dir": str(tmp_path), "resume": "allow"}
    first, second = (1, {"train/loss": 1.0}), (2, {"train/loss": 12.0})
    assert calls == [{**begun, "id": None}, first, "finished", {**begun, "id": "abc"}, second, "finished"]


@pytest.mark.parametrize(
    ("kind", "module"), [("wandb", "wandb"), ("tensorboard", "tensorboard"), ("tensorboard", "torch.utils.tensorboard")]
)
def test_a_missing_library_is_named(kind: str, module: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == module or name.startswith("torch.utils.tensor")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(FinetuneError, match=f"log: {kind} is not installed; pip install {kind}"):
        open_log(settings(tmp_path, kind), 0)


def test_a_folder_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(FinetuneError, match=r"log .*file/log: cannot be written to: Not a directory"):
        open_log(settings(tmp_path / "file" / "log", "jsonl"), 0)
    assert isinstance(open_log(Settings(model=Path("m"), data=Path("d")), 0), NoLog)
