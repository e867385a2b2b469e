"""The examples run, each on a tiny model; in this process, so that their libraries are imported once."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).resolve().parent.parent / "examples"

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore")]


# what the others share; test_accelerate.py, test_deepspeed.py, test_example_qlora.py, test_example_ranks.py
ELSEWHERE = ("common", "accelerate_", "deepspeed_", "qlora", "ranks")


@pytest.mark.parametrize(
    "name", sorted(path.stem for path in EXAMPLES.glob("*.py") if not path.stem.startswith(ELSEWHERE))
)
def test_example(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", [name, "--output", str(tmp_path / "out"), "--nvme-path", str(tmp_path)])
    monkeypatch.syspath_prepend(EXAMPLES)
    runpy.run_path(str(EXAMPLES / f"{name}.py"), run_name="__main__")
