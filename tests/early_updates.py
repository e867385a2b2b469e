"""Runs with updates during backward, for the tests of all homes: their results must not depend on any guess."""

from __future__ import annotations

import contextlib
import signal
from typing import Any, NamedTuple

import pytest
import torch
from harness import assert_same_tensors, batch, everything, loss_of
from torch import nn

from offload import AdamW, Engine
from offload.kernels import cpu_adam
from swap import Fault, FaultTarget, SwapError

Tensors = dict[str, torch.Tensor]


def train(engine: Engine, number: int, scale: float = 1.0) -> None:
    dtype = next(engine.module.parameters()).dtype
    engine.backward(engine(batch(number).to(dtype)).float().sub(1).pow(4).mean() * scale)


def arrive(engine: Engine) -> None:
    """Let the worker come to the end of what it has, as it would on a device that takes its time."""
    manager, step = engine._manager, engine._step
    assert step is not None
    manager.gradients.await_copies()
    manager.advance_updates(step.guess)
    while manager.backward._queue.open:
        for chunk in manager.backward._queue.open[0].chunks:
            for ticket in chunk.reading:
                ticket.wait()
            if chunk.task is not None:
                chunk.task.result()
        manager.advance_updates(step.guess)


def early(engine: Engine) -> tuple[int, int]:
    """Return how many units' early updates were taken, and how many were dropped."""
    stats = engine.stats()
    return stats.early_units, stats.early_units_dropped


class Guessed(NamedTuple):
    """What a run of right and wrong guesses has led to."""

    tensors: Tensors
    norms: list[float | None]
    skipped: int
    early: tuple[int, int]


def guesses(
    model: nn.Module, optimizer: Any, state_dtype: str, accumulation: int, *, arrives: bool, **where: Any
) -> Guessed:
    """Take 8 steps. Gradients of every fourth are 1000 times as large: that step clips, or overflows in fp16.

    Args:
        model: of the dtype.
        optimizer: its optimizer.
        state_dtype: the format of its states.
        accumulation: micro-batches of a step.
        arrives: let the worker come to the end of what it has before each step.
        **where: more options of the engine.
    """
    options = {"max_grad_norm": 50.0, "gradient_accumulation_steps": accumulation, "state_dtype": state_dtype} | where
    if next(model.parameters()).dtype is torch.float16:
        options["initial_loss_scale"] = 2.0**8
    with Engine(model, optimizer, **options) as engine:
        norms = []
        for number in range(8 * accumulation):
            train(engine, number, 1000.0 if number // accumulation % 4 == 3 else 1.0)
            if arrives and (number + 1) % accumulation == 0:
                arrive(engine)
            if engine.step():
                norms.append(engine.grad_norm)
            engine._manager.check()
        stats = engine.stats()
        assert stats.peak_bytes["cpu"] <= stats.budget_bytes["cpu"]
        return Guessed(everything(engine), norms, stats.skipped_steps, early(engine))


def compare_guesses(ours: Guessed, truth: Guessed) -> None:
    """Compare a run with the truth."""
    assert_same_tensors(ours.tensors, truth.tensors)
    assert (ours.norms, ours.skipped) == (truth.norms, truth.skipped)


class Failed(NamedTuple):
    """What a run with a transfer that fails has led to."""

    tensors: Tensors
    dropped: bool
    again: bool  # a micro-batch had to be run again


def fail_in_backward(model: nn.Module, target: FaultTarget, nth: int | None, *, arrives: bool, **where: Any) -> Failed:
    """Take two steps. From the second backward on, until all has come to its end, let the nth transfer fail, if any."""
    again = False
    with Engine(model, AdamW(lr=1e-2), **where) as engine:
        train(engine, 0)
        engine.step()
        engine.drain()
        loss = loss_of(engine, 1)
        store = engine._manager.tiers.store
        if nth is not None:
            assert store is not None
            store.inject(Fault(nth=nth, target=target))
        try:
            engine.backward(loss)
        except SwapError:  # it was a parameter's that backward needs
            again = True
            train(engine, 1)
        if store is not None:
            with contextlib.suppress(SwapError):  # whoever needs what has failed meets the error
                if arrives:
                    arrive(engine)
                store.drain()
            engine._manager.advance_updates(engine._step.guess)
            store.clear_faults()
        engine.step()
        engine._manager.check()
        return Failed(everything(engine), early(engine)[1] > 0, again)


def interrupt_an_update(model: nn.Module, *, interrupts: bool, **where: Any) -> Tensors:
    """Take three steps. If `interrupts`, Ctrl-C comes before the second one, in the first update during backward.

    The micro-batch is then run again, and nothing else.
    """
    real, calls = cpu_adam.step, 0

    def interrupted(*arguments: Any) -> None:
        nonlocal calls
        calls += 1
        if calls == 1:
            signal.raise_signal(signal.SIGINT)
        real(*arguments)

    with Engine(model, AdamW(lr=1e-2), **where) as engine:
        train(engine, 0)
        engine.step()
        engine.drain()
        if interrupts:
            with pytest.MonkeyPatch.context() as patch, pytest.raises(KeyboardInterrupt) as caught:
                patch.setattr(cpu_adam, "step", interrupted)
                for _ in range(100):  # passing by makes an update at some time
                    train(engine, 1)
                    engine.zero_grad()
            if all(entry.name != "train" for entry in caught.traceback):
                engine.zero_grad()  # the worker was late, and this call was broken off: backward was over
        for number in (1, 2):
            train(engine, number)
            engine.step()
        engine._manager.check()
        return everything(engine)
