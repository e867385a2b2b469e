"""Ranks by the clock: what they send goes beside compute, and is what was planned."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import benches
import pytest
from simulated.ranks import GRADIENTS, PARAMETERS

pytestmark = pytest.mark.usefixtures("sim")


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    return benches.load("simulated_ranks", monkeypatch)


@pytest.mark.nightly
def test_smoke(tmp_path: Path) -> None:
    _, done = benches.run("simulated_ranks", tmp_path, "--smoke")
    assert [line.partition(":")[0] for line in done.stdout.splitlines()] == [f"2 ranks, stage {n}" for n in (1, 2, 3)]


@pytest.mark.few(1)
@pytest.mark.parametrize("world", [2, 4])
def test_what_ranks_send_is_hidden_behind_compute(bench: ModuleType, world: int) -> None:
    """With stage 2 and 3, each unit's gradient leaves while the next one computes; with 3, parameters come ahead.

    With stages 1 and 2, a unit's new parameters go round beside the next one's update. With stage 1, gradients leave
    behind backward: so the figures tell one from the other.
    """
    sizes = {**bench.SMALL, "num_hidden_layers": 16}
    found = {stage: bench.run_case(bench.Case(world, stage), sizes) for stage in (1, 2, 3)}
    hidden = {stage: case["hidden"] for stage, case in found.items()}
    assert hidden[2]["gradients"] >= bench.HIDDEN and hidden[3]["gradients"] >= bench.HIDDEN
    assert hidden[3]["parameters"] >= bench.HIDDEN
    assert hidden[1]["parameters"] == hidden[2]["parameters"] == 0
    assert min(found[1]["beside"]["parameters"], found[2]["beside"]["parameters"]) >= bench.HIDDEN
    assert hidden[1]["gradients"] == found[1]["beside"]["gradients"] == 0
    assert found[2]["step_s"] < found[1]["step_s"]  # why stage="auto" takes it on accelerators
    for stage, case in found.items():
        sent = case["moved_bytes"][GRADIENTS] + case["moved_bytes"][PARAMETERS]
        assert sent == pytest.approx(case["planned_bytes"], rel=0.01), stage


@pytest.mark.nightly
def test_what_ranks_send_of_8_b_parameters_is_hidden(bench: ModuleType) -> None:
    found = bench.run_case(bench.Case(4, 3), bench.FULL)
    assert min(found["hidden"]["gradients"], found["hidden"]["parameters"]) >= bench.HIDDEN
