"""The bench of activations runs, and says what it promises."""

from __future__ import annotations

from pathlib import Path

import benches
import pytest


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    words = ["--smoke", "--path", str(tmp_path), "--modes", "keep", "host", "nvme"]
    result, done = benches.run("activations", tmp_path, *words)
    assert "losses of all modes have the same bits" in done.stdout
    modes = result["modes"]
    for mode in ("host", "nvme"):
        assert modes[mode]["booked_bytes"] < 0.4 * modes["keep"]["booked_bytes"]
        # What is asked for on its way out need not come back: of the device's part at most, or of the staging.
        left, back = modes[mode]["moved"]["d2h"], modes[mode]["moved"]["h2d"]
        assert 0 < back <= left <= back + (16 << 20)
    left, back = modes["nvme"]["moved"]["nvme_write"], modes["nvme"]["moved"]["nvme_read"]
    assert 0 < back <= left <= back + (4 << 20)
    assert [path.name for path in tmp_path.iterdir()] == ["activations.json"]


@pytest.mark.nightly
def test_grid(tmp_path: Path) -> None:
    result, done = benches.run("activations", tmp_path, "--grid", "--smoke", "--path", str(tmp_path))
    assert "losses of all ways have the same bits" in done.stdout
    cells = result["cells"]
    assert len(cells) == 2
    for cell in cells:
        assert all(told.startswith(("offload, ", "recompute, ")) and "by the plan" in told for told in cell["told"])


@pytest.mark.nightly
def test_longest_contexts(tmp_path: Path) -> None:
    """Where the model's own loss and activations have room for 1024 tokens, others have it for eight times as many."""
    words = ["--smoke", "--context", "--device", "12MiB", "--path", str(tmp_path), "--modes", "keep", "recompute"]
    for trials in (3, 0):
        result, done = benches.run("activations", tmp_path, *words)
        assert done.stderr.count(" tokens: ") == trials  # they are not made again
    contexts = result["contexts"]
    assert {mode: found["tokens"] for mode, found in contexts.items()} == {"keep": 1024, "recompute": 8192}
