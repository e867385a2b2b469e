"""Ctrl-C anywhere in a step on the simulated device: the engine is usable behind it, with the right bits."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType

import pytest
from harness import assert_same_tensors, batch
from simulated import Schedule, running
from simulated.kernels import on_device, updating
from test_simulated_engine import EACH, loss_of, named, net, placed

import offload
from offload import AdamW, Engine

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

OURS = str(Path(offload.__file__).parent)
STEPS = 2


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


class AtCall:
    """Raises SIGINT at the nth call of one of the package's functions in this thread; 0 counts them only.

    What a kernel of the device calls does not count: no device has an interpreter.
    """

    def __init__(self, nth: int) -> None:
        self.nth = nth
        self.count = 0

    def __call__(self, frame: FrameType, event: str, argument: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(OURS) and not on_device():
            self.count += 1
            if self.count == self.nth:
                signal.raise_signal(signal.SIGINT)


def train(engine: Engine, trigger: AtCall) -> int:
    """Run what was interrupted again, unless the step was taken; returns how often that was."""
    interrupts, run = 0, engine._parts.steps.run
    sys.setprofile(trigger)
    try:
        while run.steps < STEPS:
            try:
                engine.backward(loss_of(engine, batch(run.steps).to("sim")))
                engine.step()
            except KeyboardInterrupt:
                interrupts += 1
                engine.zero_grad()
                engine._manager.check()  # type: ignore[union-attr]
        try:
            engine.drain()
        except KeyboardInterrupt:
            interrupts += 1
            engine.drain()
    finally:
        sys.setprofile(None)
    return interrupts


@pytest.mark.few(2)
@pytest.mark.parametrize("stride", [pytest.param(17, marks=pytest.mark.nightly), 499])
@pytest.mark.parametrize("home", ["cpu", "nvme", "resident"])
@pytest.mark.parametrize("schedule", EACH, **named)
def test_an_interrupt_at_any_call(schedule: Schedule, home: str, stride: int, tmp_path: Path) -> None:
    def run(nth: int) -> tuple[dict[str, object], int, int]:
        model, trigger = net(), AtCall(nth)
        options, kernels = placed(home, model, tmp_path), updating() if home == "resident" else contextlib.nullcontext()
        with running(schedule) as seen, kernels, Engine(model, AdamW(lr=1e-2), **options) as engine:
            interrupts = train(engine, trigger)
            engine._manager.check()  # type: ignore[union-attr]
            result = engine.state_dict()
        assert seen.races == []
        return result, interrupts, trigger.count

    truth, none, count = run(0)
    assert none == 0
    interrupts = 0
    for nth in range(1, count, stride if home != "resident" else -(-stride // 4)):  # there are fewer calls
        ours, some, _ = run(nth)
        assert_same_tensors(ours, truth)  # type: ignore[arg-type]
        interrupts += some
    assert interrupts > 5
