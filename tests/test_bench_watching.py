"""The bench of what it costs to be looked at."""

from __future__ import annotations

from pathlib import Path

import benches
import pytest


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    found, done = benches.run("watching", tmp_path, "--smoke")
    assert found["spans_of_step"] > 0
    assert found["step_us"] < found["sample_us"] / 10 and found["pass_us"] < found["sample_us"] / 10  # nothing is due
    # at most one sample in 50 ms and one a second for the file, and one write a second
    expected = (found["sample_us"] * (20 + 1) + found["write_us"]) / 1e6
    assert abs(found["bound_share"] - expected) < 1e-9
    assert [line.split()[0] for line in done.stdout.splitlines()[:3]] == ["span", "wait", "pass"]
