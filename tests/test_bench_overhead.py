"""The bench of what bookkeeping costs: layers that come for each use, and a model of tiny layers."""

from __future__ import annotations

import math
from pathlib import Path

import benches


def test_smoke_of_streamed_layers(tmp_path: Path) -> None:
    found, done = benches.run("overhead", tmp_path, "--streamed", "--smoke")
    assert [each.split(",")[0] for each in found["uses"]] == ["cpu", "cpu", "nvme", "nvme"]
    assert all(math.isfinite(us) for case in found["uses"].values() for us in case)  # of few rounds, perhaps below zero
    assert done.stdout.splitlines()[-1] == f"to reach: {found['bound_us']:.0f} us"


def test_smoke_of_the_host(tmp_path: Path) -> None:
    found, done = benches.run("overhead", tmp_path, "--host", "--smoke")
    assert list(found["host_ms"]) == ["without checkpoints", "with checkpoints"]
    assert all(len(taken) == 6 and min(taken) > 0 for taken in found["host_ms"].values())
    assert done.stdout.count(" of plain") == 2
