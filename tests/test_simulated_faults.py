"""A device that fails: any one call of the host, or all from some call on.

The error is torch's own. Gradients are dropped, the engine goes on with the same bits or says that it cannot, and
closing gives everything back.
"""

from __future__ import annotations

import contextlib
import gc
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, batch
from simulated import EAGER, LAZY, Schedule, load, running
from simulated.faults import ALL, EVENTS, WAITS, WORK, failing
from simulated.kernels import updating
from test_simulated_engine import EACH, MIB, loss_of, named, net, placed

import offload
from offload import AdamW, Engine
from offload.memory.transfer import Ticket
from offload.shards.forward_updates import ForwardUpdates

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

STEPS = 3
RETAINED = 32 << 10  # pytest keeps some errors, with frames and the activations of a step; an arena has 48 KiB
LOST = "a step failed half way (AcceleratorError: sim: injected error"
KINDS = {"kernels and copies": WORK, "events": EVENTS, "waits of the host": WAITS}


def step(engine: Engine, number: int) -> None:
    engine.backward(loss_of(engine, batch(number).to("sim")))
    assert engine.step()


def train(engine: Engine) -> int:
    """Run what fails again; returns how many calls of the engine failed."""
    failed = 0
    for number in range(STEPS + 1):
        for _ in range(2):
            try:
                step(engine, number) if number < STEPS else engine.drain()
                break
            except torch.AcceleratorError as error:
                assert "sim: injected error" in str(error)
                failed += 1
                if engine._life.unusable is None:
                    engine._manager.check()  # type: ignore[union-attr]
        else:
            pytest.fail("a call that failed once failed again")
    return failed


def make(home: str, path: Path) -> Engine:
    model, kernels = net(), updating() if home == "resident" else contextlib.nullcontext()
    with kernels:
        return Engine(model, AdamW(lr=1e-2), **placed(home, model, path))


def in_use() -> int:
    """Return the device's bytes that somebody has; neither cycles, nor what autograd still has of a failed backward."""
    for _ in range(2):
        torch.ones(1, device="sim", requires_grad=True).sum().backward()
        gc.collect()
    used: int = load().usage(0)[0]
    return used


def undisturbed(home: str, path: Path, schedule: Schedule, asks: int) -> tuple[dict[str, torch.Tensor], int]:
    """Return the parameters behind the training, and how many calls could fail."""
    with running(schedule), make(home, path) as engine:
        with failing(0, asks) as calls:
            assert train(engine) == 0
        return engine.state_dict(), calls.count


def stride(*, quick: int, nightly: int) -> Any:
    return pytest.mark.parametrize("stride", [pytest.param(nightly, marks=pytest.mark.nightly), quick])


@pytest.mark.few
@stride(quick=59, nightly=2)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("home", ["cpu", "nvme", "mixed", "resident"])
@pytest.mark.parametrize("schedule", EACH, **named)
def test_any_call_may_fail(schedule: Schedule, home: str, kind: str, stride: int, tmp_path: Path) -> None:
    """Once: the engine goes on, with the right bits, or says that a step is lost."""
    truth, count = undisturbed(home, tmp_path, schedule, KINDS[kind])
    exact = 0
    for nth in range(1, count + 1, stride if home != "resident" else -(-stride // 15)):  # there are few calls
        with running(schedule) as seen:
            engine = make(home, tmp_path)
            with failing(nth, KINDS[kind]):
                try:
                    train(engine)
                except offload.StateError as error:
                    assert LOST in str(error)
            if engine._life.unusable is None:
                try:
                    ours = engine.state_dict()
                except torch.AcceleratorError:  # of a prefetch, which only this call needs
                    ours = engine.state_dict()
                assert_same_tensors(ours, truth)
                assert engine.stats().step == STEPS
                exact += 1
            engine.close()
        assert not list(tmp_path.iterdir())
        assert seen.races == [] or KINDS[kind] == WAITS  # who could not wait has ordered nothing
    assert (exact > 0) == (count > 0)


@pytest.mark.parametrize("schedule", [LAZY, EAGER], **named)
def test_a_wait_behind_new_parameters_that_are_home_may_fail(
    schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They have been waited for: what fails then is not theirs, and the next step can update them."""
    are_over, homecomings, truth, exact = ForwardUpdates._are_over, 0, None, 0

    def fail_behind(self: ForwardUpdates, writes: Sequence[Ticket]) -> bool:
        nonlocal homecomings
        over = are_over(self, writes)
        homecomings += over
        if over and homecomings == nth:
            load().fail_at(1, WAITS, False)
        return over

    monkeypatch.setattr(ForwardUpdates, "_are_over", fail_behind)
    for nth in range((STEPS - 1) * 6):  # of six units in each step
        homecomings, model = 0, net()
        options = placed("nvme", model, tmp_path, max_grad_norm=1e-3)  # which leaves all updates to the next forward
        options["max_memory"]["device"] += MIB  # new parameters find room beside the old ones
        with running(schedule), Engine(model, AdamW(lr=1e-2), **options) as engine, failing(0, WAITS):
            try:
                train(engine)
            except offload.StateError as error:
                assert LOST in str(error)
                continue
            load().fail_at(0, 0, False)
            assert homecomings >= nth and engine.stats().step == STEPS
            ours = engine.state_dict()
        truth = ours if truth is None else truth
        assert_same_tensors(ours, truth)
        exact += 1
    assert exact > 1


@pytest.mark.few(2)
@stride(quick=199, nightly=9)
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", [LAZY, EAGER], **named)
def test_a_device_that_is_lost(
    schedule: Schedule, home: str, stride: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error names it; closing ends, gives all memory back, and the process can use a device again."""
    monkeypatch.setattr(logging.root.manager, "disable", logging.CRITICAL)  # pytest keeps errors, and these tensors
    truth, count = undisturbed(home, tmp_path, schedule, ALL)
    before = in_use()
    for nth in range(1, count + 1, stride):
        with running(schedule):
            engine = make(home, tmp_path)
            with failing(nth, ALL, lost=True):
                try:
                    train_once(engine)
                    assert nth > 0.8 * count, "only work ahead of a step that never comes"
                except torch.AcceleratorError as error:
                    assert "the device is lost" in str(error)
                with pytest.raises((torch.AcceleratorError, offload.StateError)):
                    step(engine, 0)
                try:
                    engine.close()
                except torch.AcceleratorError as error:
                    assert "the device is lost" in str(error)
                engine.close()
            assert not list(tmp_path.iterdir())
            with pytest.raises(offload.StateError, match="closed"):
                engine.state_dict()
            del engine
        now = in_use()
        assert now < before + RETAINED
        before = now
    with running(schedule), make(home, tmp_path) as engine:
        train_once(engine)
        assert_same_tensors(engine.state_dict(), truth)


def train_once(engine: Engine) -> None:
    for number in range(STEPS):
        step(engine, number)
    engine.drain()
    engine.state_dict()
