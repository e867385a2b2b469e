"""Mixtures of homes beside an accelerator, which may have all of a unit: the same bits, however late copies are."""

from __future__ import annotations

import contextlib
from pathlib import Path

import pytest
from harness import everything_on_device, in_turn
from simulated import LAZY, at_random, running
from simulated.kernels import updating
from test_mixed_homes import ROOM, TRAININGS, Training, check, homes_by

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")


@pytest.mark.parametrize(("training", "updates"), in_turn(TRAININGS, [False, True]))
def test_mixtures_change_no_bit(training: Training, updates: bool, tmp_path: Path) -> None:
    truth = training.outcome(**everything_on_device())
    for seed, schedule in enumerate((LAZY, at_random(0), LAZY, at_random(1))):
        with homes_by(seed), updating() if updates else contextlib.nullcontext(), running(schedule) as seen:
            ours = training.outcome("sim", device="sim", max_memory=ROOM, nvme_path=tmp_path)
        check(ours, truth)
        assert not seen.races, seen.races[0]
    assert not list(tmp_path.iterdir())
