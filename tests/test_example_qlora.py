"""The example of QLoRA runs on a base that is larger than its device budget; in this process, for its imports."""

from __future__ import annotations

import re
import runpy
import sys
from pathlib import Path

import pytest

pytest.importorskip("peft")
pytest.importorskip("transformers")

EXAMPLE = Path(__file__).resolve().parent.parent / "examples" / "qlora.py"

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore")]


@pytest.mark.slow
@pytest.mark.few(1)
@pytest.mark.parametrize("base", ["bitsandbytes", "torchao"])
def test_qlora(base: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip(base)
    arguments = ["--output", str(tmp_path / "out"), "--nvme-path", str(tmp_path), "--steps", "2", "--base", base]
    monkeypatch.setattr(sys, "argv", [EXAMPLE.stem, *arguments])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    losses = [float(loss) for loss in re.findall(r"^\d (\S+)$", printed, re.MULTILINE)]
    assert len(losses) == 2 and losses[1] < losses[0]
    parameters, budget = (
        re.search(r"^ *nvme +([\d.]+) MiB", printed, re.MULTILINE),
        re.search(r"^device .* ([\d.]+) MiB$", printed, re.MULTILINE),
    )
    assert parameters is not None and budget is not None and float(parameters[1]) > float(budget[1])
    assert (tmp_path / "out" / "adapter_model.safetensors").exists()
