"""The bench of the swap store runs and says what it promises."""

from __future__ import annotations

from pathlib import Path

import benches


def test_smoke(tmp_path: Path) -> None:
    result, done = benches.run("swap", tmp_path, "--smoke", "--path", str(tmp_path))
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
    assert {"kernel", "store", "batch", "tensors", "fetch", "commit", "machine"} <= set(result)
    assert set(result["tensors"]) == {"64 KiB", "256 KiB", "1 MiB"}
    assert all({"write store", "read store"} <= set(figures) for figures in result["tensors"].values())
    assert set(result["store"]) == {"write without", "write with", "read without", "read with"}
    assert [path.name for path in tmp_path.iterdir()] == ["swap.json"]
