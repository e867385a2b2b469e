"""Mixtures of homes beside an accelerator, which may have all of a unit: the same bits, however late copies are."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from simulated import LAZY, Schedule, at_random, running
from simulated.kernels import updating
from test_mixed_homes import ROOM, TRAININGS, Training, check, homes_by, on_device

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")


@pytest.mark.few(8)
@pytest.mark.parametrize(("seed", "schedule"), [*enumerate((LAZY, at_random(0), LAZY, at_random(1)))])
@pytest.mark.parametrize("updates", [False, True])
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_mixtures_change_no_bit(
    training: Training, updates: bool, seed: int, schedule: Schedule, tmp_path: Path
) -> None:
    truth = on_device(training)
    with homes_by(seed), updating() if updates else contextlib.nullcontext(), running(schedule) as seen:
        ours = training.outcome("sim", device="sim", max_memory=ROOM, nvme_path=tmp_path)
    check(ours, truth)
    assert not seen.races, seen.races[0]
    assert not list(tmp_path.iterdir())
