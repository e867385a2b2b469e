"""One Ctrl-C inside a call of the engine: the call is repeated, or was made, and nothing is lost or counted twice."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import Engine
from offload.interrupt import Deferral
from offload.module.gradient_book import GradientBook
from offload.optim.step import MicroBatches
from offload.watching import Watch

MEMORY = {"max_memory": {"device": "32MiB", "cpu": "16MiB"}}


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupt(patch: pytest.MonkeyPatch, owner: Any, name: str, *, nth: int = 1, behind: bool = False) -> list[int]:
    """Let SIGINT come before or behind the nth call of a function, once; returns a list with the calls so far."""
    real, calls = getattr(owner, name), [0]

    def wrapper(*args: Any, **kwargs: Any) -> Any:
        calls[0] += 1
        now = calls[0] == nth
        if now and not behind:
            signal.raise_signal(signal.SIGINT)
        result = real(*args, **kwargs)
        if now and behind:
            signal.raise_signal(signal.SIGINT)
        return result

    patch.setattr(owner, name, wrapper)
    return calls


# --- backward -----------------------------------------------------------------------------------------------------


def accumulate(engine: Engine, micro_batch: int | None, arm: Callable[[pytest.MonkeyPatch], object]) -> float:
    """Take a step of two micro-batches; both again where one is interrupted, which is armed in `micro_batch`."""
    number, taken = 0, False
    while not taken:
        try:
            loss = engine(torch.full((2, 8), number + 1.0)).square().mean()
            with pytest.MonkeyPatch.context() as patch:
                if number == micro_batch:
                    arm(patch)
                engine.backward(loss)
            number += 1
            taken = engine.step()
        except KeyboardInterrupt:
            assert not engine._training.has_gradients()
            number, micro_batch = 0, None
    assert number == 2 and engine.grad_norm is not None
    return engine.grad_norm


@pytest.mark.parametrize("behind", [False, True])
@pytest.mark.parametrize(
    ("owner", "name"),
    [
        (Deferral, "__enter__"),
        (GradientBook, "adopt"),
        (MicroBatches, "note_backward"),
        (Watch, "note_loss"),
        (Watch, "passed"),
        (Deferral, "__exit__"),
    ],
)
def test_an_interrupted_backward_drops_the_gradients_of_the_step(owner: type, name: str, behind: bool) -> None:
    def norm(micro_batch: int | None) -> float:
        torch.manual_seed(0)
        model = nn.Linear(8, 8)
        with Engine(model, offload.SGD(lr=0.1), device="cpu", gradient_accumulation_steps=2, **MEMORY) as engine:
            return accumulate(engine, micro_batch, lambda patch: interrupt(patch, owner, name, behind=behind))

    expected = norm(None)
    assert norm(0) == norm(1) == expected
