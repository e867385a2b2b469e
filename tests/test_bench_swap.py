"""The bench of the swap store runs and says what it promises."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

BENCH = Path(__file__).resolve().parent.parent / "bench" / "swap.py"


def test_smoke(tmp_path: Path) -> None:
    output = tmp_path / "swap.json"
    command = [sys.executable, str(BENCH), "--smoke", "--path", str(tmp_path), "--json", str(output)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    for line in (
        "checksums cost a write",
        "checksums cost a read",
        "CPU s/GB",
        "tensors of 256 KiB: read store",
        "fetch of 1 MiB: idle",
        "commit: 1 of 200 keys",
        "bound: one flush",
    ):
        assert line in done.stdout
    result = json.loads(output.read_text(encoding="utf-8"))
    assert {"kernel", "store", "batch", "tensors", "fetch", "commit", "machine"} <= set(result)
    assert set(result["tensors"]) == {"64 KiB", "256 KiB", "1 MiB"}
    assert all({"write store", "read store"} <= set(figures) for figures in result["tensors"].values())
    assert set(result["store"]) == {"write without", "write with", "read without", "read with"}
    assert [path.name for path in tmp_path.iterdir()] == ["swap.json"]
