"""A small program with every kind of wait that offloading needs, and what becomes of it when one is left out.

Weights stream through two slots on the device, gradients go home, on streams of their own. It has nothing of the
project: it shows that the schedules and the checker see the mistakes that a runtime can make.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from simulated import Run, Schedule, fixed, running

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

LAYERS, WIDTH, STEPS = 4, 16, 3
SCHEDULES = fixed(2)  # one stream uploads, one downloads


def weights() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(LAYERS)]


def batch(step: int) -> torch.Tensor:
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))


def truth() -> list[torch.Tensor]:
    """Return the weights after plain training on the CPU."""
    all_weights = weights()
    for step in range(STEPS):
        parameters = [weight.clone().requires_grad_() for weight in all_weights]
        h = batch(step)
        for parameter in parameters:
            h = torch.tanh(h @ parameter)
        h.pow(2).mean().backward()
        for weight, parameter in zip(all_weights, parameters, strict=True):
            assert parameter.grad is not None
            weight.sub_(parameter.grad, alpha=0.5)
    return all_weights


class Fetched(torch.autograd.Function):
    """A linear layer whose weight is fetched for the forward, and again for the backward."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, index: int, program: Program) -> torch.Tensor:
        ctx.index, ctx.program = index, program
        ctx.save_for_backward(h)
        weight = program.fetch(index)
        out = h @ weight
        program.vacate(index)
        return out

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        (h,) = ctx.saved_tensors
        weight = ctx.program.fetch(ctx.index)
        of_input, of_weight = gradient @ weight.t(), h.t() @ gradient
        ctx.program.vacate(ctx.index)
        ctx.program.take_home(ctx.index, of_weight)
        return of_input, None, None


class Program:
    """Training through two slots; `without` names the wait that is left out."""

    def __init__(self, without: str | None) -> None:
        self.without = without
        place = torch.device("sim:0")
        self.up, self.down = torch.Stream(place), torch.Stream(place)
        self.homes = [weight.pin_memory() for weight in weights()]
        self.gradients = [torch.empty(WIDTH, WIDTH).pin_memory() for _ in range(LAYERS)]
        self.staging = torch.empty(WIDTH, WIDTH).pin_memory()
        self.staged = torch.Event(place)
        self.slots = [torch.empty(WIDTH, WIDTH, device=place) for _ in range(2)]
        self.vacated = [torch.Event(place) for _ in self.slots]
        self.turn = 0
        self.slot_of: dict[int, int] = {}
        self.leaving: list[tuple[torch.Event, torch.Tensor | None]] = []
        if self.keeps("the upload stream waits for the memory that it fills"):
            self.up.wait_stream(self.compute())

    def keeps(self, wait: str) -> bool:
        return self.without != wait

    def compute(self) -> torch.Stream:
        return torch.accelerator.current_stream(torch.device("sim:0"))

    def fetch(self, index: int) -> torch.Tensor:
        slot, self.turn = self.turn, 1 - self.turn
        self.slot_of[index] = slot
        if self.keeps("the upload waits for the last reader of the slot"):
            self.up.wait_event(self.vacated[slot])
        if self.keeps("the host waits before it overwrites staging memory"):
            self.staged.synchronize()
        self.staging.copy_(self.homes[index])
        with self.up:
            self.slots[slot].copy_(self.staging, non_blocking=True)
        self.staged.record(self.up)
        if self.keeps("compute waits for the upload"):
            self.compute().wait_event(self.staged)
        return self.slots[slot]

    def vacate(self, index: int) -> None:
        self.vacated[self.slot_of[index]].record(self.compute())

    def take_home(self, index: int, gradient: torch.Tensor) -> None:
        if self.keeps("the download waits for the gradient"):
            self.down.wait_event(self.compute().record_event())
        with self.down:
            self.gradients[index].copy_(gradient, non_blocking=True)
        kept = gradient if self.keeps("a gradient lives until it has left") else None
        self.leaving.append((self.down.record_event(), kept))

    def step(self) -> None:
        for event, _ in self.leaving:
            if self.keeps("the host waits before it reads gradients"):
                event.synchronize()
        self.leaving.clear()
        for weight, gradient in zip(self.homes, self.gradients, strict=True):
            weight.sub_(gradient, alpha=0.5)

    def train(self) -> list[torch.Tensor]:
        for step in range(STEPS):
            h = batch(step).pin_memory().to("sim", non_blocking=True).requires_grad_()
            for index in range(LAYERS):
                h = torch.tanh(Fetched.apply(h, index, self))
            h.pow(2).mean().backward()
            self.step()
        return [weight.clone() for weight in self.homes]


def run(schedule: Schedule, without: str | None) -> tuple[bool, Run]:
    """Return whether the bits are the truth's, and what was seen."""
    with running(schedule) as seen:
        before = [torch.ones(WIDTH, WIDTH, device="sim") for _ in range(8)]
        del before  # the slots get this memory, with the work on it that is still queued
        result = Program(without).train()
    return all(map(torch.equal, result, truth())), seen


def test_with_all_waits_the_bits_are_right_under_every_schedule() -> None:
    for schedule in SCHEDULES:
        right, seen = run(schedule, None)
        assert right and seen.races == [], schedule.name


# what is left out -> whether some schedule must give wrong bits, whether the checker must see it in a run that is right
WAITS = {
    "the upload stream waits for the memory that it fills": (False, True),
    "the upload waits for the last reader of the slot": (True, True),
    "the host waits before it overwrites staging memory": (True, False),  # the host's own accesses are not seen
    "compute waits for the upload": (True, True),
    "the download waits for the gradient": (True, True),
    "a gradient lives until it has left": (True, True),
    "the host waits before it reads gradients": (True, False),
}


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_that_is_left_out_is_seen(wait: str) -> None:
    wrong, raced = [], []
    for schedule in SCHEDULES:
        right, seen = run(schedule, wait)
        if not right:
            wrong.append(schedule.name)
        if seen.races:
            raced.append(schedule.name)
    needs_wrong_bits, needs_races = WAITS[wait]
    assert bool(wrong) >= needs_wrong_bits and bool(raced) >= needs_races, (wrong, raced)
    if needs_races:
        assert "eager" in raced  # where everything comes out right by luck
    assert wrong or raced
    print(f"without: {wait}: wrong under {wrong}, races under {raced}")
