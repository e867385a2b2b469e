"""SIGTERM ends ``offload finetune`` behind a step, which is saved first; a damaged checkpoint is left out."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from offload.cli import main as cli
from offload.cli.finetune.progress import Progress
from offload.cli.finetune.stopping import Stop

pytest.importorskip("transformers")
pytest.importorskip("tokenizers")

from finetuning import make_model_folder

pytestmark = pytest.mark.usefixtures("single_torch_thread")


@pytest.fixture(scope="module")
def given(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("given")
    make_model_folder(path / "model")
    (path / "text").write_text("the quick brown fox jumps over the lazy dog. " * 100)
    return path


@pytest.fixture
def run(given: Path, tmp_path: Path) -> Callable[..., tuple[int, Any]]:
    def call(name: str, *words: str) -> tuple[int, Any]:
        line = ["finetune", "--model", str(given / "model"), "--text", str(given / "text"), "--device", "cpu"]
        line += ["--output", str(tmp_path / name), "--sequence-length", "16", "--sample-tokens", "0", "--steps", "4"]
        line += ["--evaluations", "1", "--evaluation-sequences", "1", "--device-memory", "16MiB"]
        line += ["--cpu-memory", "16MiB", "--nvme-memory", "64MiB"]
        line += [] if "--run-dir" in words else ["--nvme-path", str(tmp_path)]
        code, found = cli.main([*line, *words]), tmp_path / name / "report.json"
        steps = json.loads(found.read_text())["steps"] if found.is_file() else []
        return code, [(row["step"], row["loss"]) for row in steps]

    return call


@pytest.fixture
def terminated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Steps in which SIGTERM comes; each is taken out when it has come."""
    real, steps = Progress.step, [2]

    def step(self: Progress, record: Any, *args: Any) -> None:
        if record.step in steps:
            steps.remove(record.step)
            os.kill(os.getpid(), signal.SIGTERM)
        real(self, record, *args)

    monkeypatch.setattr(Progress, "step", step)
    return steps


@pytest.mark.parametrize("how", ["--save-every", "--run-dir"])
def test_the_step_in_progress_is_saved(
    how: str,
    run: Callable[..., tuple[int, Any]],
    terminated: list[int],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    value, saved = {
        "--save-every": ("3", "a checkpoint was saved"),
        "--run-dir": (str(tmp_path / "run"), "it was committed"),
    }[how]
    assert run("parts", how, value, "--resume", "auto") == (143, [])
    assert f"offload: ended by SIGTERM after step 2 of 4; {saved}; go on with --resume\n" in capsys.readouterr().err
    assert not terminated and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    code, resumed = run("parts", how, value, "--resume", "auto")
    assert code == 0 and "resumed after step 2\n" in capsys.readouterr().out
    assert (0, resumed) == run("whole")


def test_nothing_saved_is_said(
    run: Callable[..., tuple[int, Any]], terminated: list[int], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("parts") == (143, [])
    assert "after step 2 of 4; nothing was saved: pass --save-every or --run-dir\n" in capsys.readouterr().err


def test_a_damaged_checkpoint_is_left_out(
    run: Callable[..., tuple[int, Any]],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    caplog: pytest.LogCaptureFixture,
) -> None:
    code, whole = run("run", "--save-every", "1", "--keep-checkpoints", "3")
    file = tmp_path / "run" / "checkpoints" / "step-00000004" / "tensors-00001.safetensors"
    file.write_bytes(file.read_bytes()[:-1] + b"?")
    again, resumed = run("run", "--resume", "--steps", "5")
    assert "resumed after step 3\n" in capsys.readouterr().out
    assert "step-00000004/tensors-00001.safetensors: is damaged" in caplog.text
    assert code == again == 0 and resumed[:4] == whole


def test_the_second_signal_ends_the_process_and_others_keep_their_handlers() -> None:
    text = "import os, signal\nfrom offload.cli.finetune.stopping import Stop\nwith Stop() as stop:\n"
    text += (
        "    for _ in range(2):\n        os.kill(os.getpid(), signal.SIGTERM)\n        print(stop.asked, flush=True)"
    )
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (-signal.SIGTERM, "True\n")
    former = signal.signal(signal.SIGTERM, signal.SIG_IGN)
    try:
        with Stop():
            assert signal.getsignal(signal.SIGTERM) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGTERM, former)
    with Stop():  # as the main thread has it
        other = threading.Thread(target=lambda: Stop().__enter__())
        other.start()
        other.join()
        assert signal.getsignal(signal.SIGTERM).__func__ is Stop._note  # type: ignore[union-attr]
