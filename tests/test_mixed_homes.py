"""Any mixture of homes gives the same bits: of each unit, parameters, gradients and states anywhere."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from drawn_homes import any_homes
from harness import Outcome, assert_equal, everything_on_device, run
from torch import nn

import offload
from offload import build
from offload.memory.budget import Tier
from offload.planning.asked import Request
from offload.planning.plan import Plan
from offload.planning.sizing import bytes_at, plan_of

pytestmark = pytest.mark.usefixtures("single_torch_thread")

WIDTH = 272  # 74 Ki elements in a unit: more than a chunk
MIXTURES = 6
STEPS = 6
ROOM = {"device": "64MiB", "cpu": "64MiB", "nvme": "256MiB"}
TIGHT_UNITS = 4  # in the working region


class Net(nn.Module):
    """Seven blocks of a unit each: one is frozen, one is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(7))
        self.blocks[3].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return (rows, WIDTH)."""
        for block in (*self.blocks, self.blocks[1]):
            x = torch.tanh(block(x))
        return x


@dataclasses.dataclass(frozen=True)
class Training:
    """What is trained how.

    Attributes:
        clips: "never", "always", or in every third step "sometimes": those have gradients 1000 times as large.
    """

    dtype: torch.dtype
    state_dtype: str
    clips: str
    accumulation: int

    def __str__(self) -> str:
        kind = str(self.dtype).removeprefix("torch.")
        return f"{kind}, {self.state_dtype} states, {self.accumulation} micro-batches, clips {self.clips}"

    def options(self) -> dict[str, Any]:
        """Return the engine's."""
        norm = {"never": None, "always": 1e-4, "sometimes": 5.0}[self.clips]
        unit_bytes = (WIDTH * WIDTH + WIDTH + 4096) * self.dtype.itemsize
        found = {"max_grad_norm": norm, "state_dtype": self.state_dtype, "unit_bytes": unit_bytes}
        return found | {"gradient_accumulation_steps": self.accumulation}

    def outcome(self, place: str = "cpu", **where: Any) -> Outcome:
        """Train, and return what must not depend on `where`."""
        torch.manual_seed(0)
        model = Net().to(self.dtype)
        made = torch.Generator().manual_seed(1)
        batches = [
            (number // self.accumulation, torch.randn(3, WIDTH, generator=made).to(place, self.dtype))
            for number in range(STEPS * self.accumulation)
        ]
        return run(model, batches, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, **self.options(), **where)


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], batch: tuple[int, torch.Tensor]) -> torch.Tensor:
    """Return a loss whose gradients are 1000 times as large in every third step."""
    step, x = batch
    return forward(x).float().sub(1).pow(4).mean() * (1000.0 if step % 3 == 2 else 1.0)


@contextlib.contextmanager
def homes_by(seed: int) -> Iterator[None]:
    """Let engines have homes by chance, and room for working copies of four units."""

    def make_plan(request: Request, asks: object = None) -> Plan:
        homes = any_homes(request, seed)
        there = bytes_at(request, homes, Tier.DEVICE) + request.total_bytes(request.units)
        working = TIGHT_UNITS * max(unit.param_bytes for unit in request.units)
        left = request.budgets[Tier.DEVICE] - there - working
        return plan_of(dataclasses.replace(request, activation_bytes=left), homes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(build, "make_plan", make_plan)
        yield


TRAININGS = [
    Training(torch.float32, "float32", "never", 1),
    Training(torch.float32, "int8", "sometimes", 2),
    Training(torch.bfloat16, "float32", "sometimes", 1),
    Training(torch.bfloat16, "float32", "always", 2),
    Training(torch.bfloat16, "int8", "never", 2),
    Training(torch.bfloat16, "int8", "always", 1),
    Training(torch.bfloat16, "bfloat16", "sometimes", 2),
]


def check(outcome: Outcome, truth: Outcome) -> None:
    """Compare bit by bit; the plan is a mixture: two homes at least of parameters, of gradients, and of states."""
    homes = outcome.plan.homes
    for role in ("param", "grad", "states"):
        assert len({getattr(home, role) for home in homes} - {None}) > 1, role
    assert outcome.plan.working_bytes < sum(unit.param_bytes for unit in outcome.plan.request.units)
    assert_equal(outcome, truth)


@functools.cache
def on_device(training: Training) -> Outcome:
    """Return what the training leaves where everything is on the device."""
    return training.outcome(**everything_on_device())


@pytest.mark.few(8)
@pytest.mark.parametrize("seed", range(MIXTURES))
@pytest.mark.parametrize("training", TRAININGS, ids=str)
def test_mixtures_change_no_bit(training: Training, seed: int, tmp_path: Path) -> None:
    truth = on_device(training)
    assert len(truth.norms) == STEPS
    with homes_by(seed):
        ours = training.outcome(device="cpu", max_memory=ROOM, nvme_path=tmp_path)
    check(ours, truth)
    assert not list(tmp_path.iterdir())
