"""The CPU's tests of engines with the simulated device instead: placements, checkpointing, errors, updates in advance.

Each choice of tests runs in a process of its own, since its device is chosen for all of a process.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from simulated import LAZY, at_random, first, fixed
from simulated.instead import FILES, MOVER_STREAMS, schedule_of

TESTS = Path(__file__).resolve().parent
SCHEDULES = [schedule.name for schedule in (*fixed(MOVER_STREAMS), at_random(0), at_random(1))]

# Of every file some, and of every schedule some of each: an each-used file does not tell which schedule it needs.
QUICK = (
    "test_architecture and (llama or t5) or test_fp32_follows_torch_adamw and llama or test_dtypes_with_check"
    " or test_any_single_transfer or test_interrupt or test_gather_keeps or test_generate and t5"
    " or test_training_goes_on and (interrupt or error) or test_several_engines or test_one_loss_through_two"
    " or test_reading_brings"
)


def run(*arguments: str, profile: str, timeout_s: float) -> int:
    """Run tests on the simulated device; returns how many have passed."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--tb=native", "--device", "sim"]
    environment = {**os.environ, "HYPOTHESIS_PROFILE": profile}
    environment.pop("SIMULATED_TEST_REPORTS", None)
    done = subprocess.run(
        [*command, *arguments],
        cwd=TESTS.parent,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout_s,
        check=False,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None, done.stdout
    return int(passed[1])


@pytest.mark.usefixtures("sim")
def test_some_of_each_under_every_schedule_in_turn() -> None:
    files = [
        str(TESTS / f"test_{name}.py") for name in ("parity", "engine", "backward_updates", "bad_input", "wrappers")
    ]
    assert run("--schedule", "in turn", "-k", QUICK, *files, profile="quick", timeout_s=300) > 50


@pytest.mark.nightly
@pytest.mark.slow
@pytest.mark.usefixtures("sim")
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("name", FILES)
def test_all_of_them(name: str, schedule: str) -> None:
    assert run("--schedule", schedule, str(TESTS / f"test_{name}.py"), profile="sweep", timeout_s=3600) >= FILES[name]


def test_schedules_have_names() -> None:
    assert schedule_of("lazy") == LAZY and schedule_of("first 2") == first(2) and schedule_of("seed 3") == at_random(3)
    assert [schedule_of("in turn", number).name for number in range(MOVER_STREAMS + 4)] == [
        *(s.name for s in fixed(MOVER_STREAMS)),
        "lazy",
    ]
    with pytest.raises(ValueError, match="'in turn' but got 'late'"):
        schedule_of("late")
