"""Gradients that leave during backward, in engines of several processes: one process's bits, and bytes as planned."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from torch import nn
from torch.utils.checkpoint import checkpoint

from offload import AdamW, Engine
from offload.module.reachable import reachable

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")
WORLD = 3
STEPS = 6
WIDTH = 96


class Experts(nn.Module):
    """Blocks with experts, of which each micro-batch takes another one; some leave a block out."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, WIDTH)
        self.experts = nn.ModuleList(nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4)) for _ in range(3))
        self.between = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.last = nn.Linear(WIDTH, 1)

    def forward(self, x: torch.Tensor, number: int) -> torch.Tensor:
        x = torch.tanh(self.first(x))
        layers = list(zip(self.experts, self.between, strict=True))
        for depth, (experts, between) in enumerate(layers[::-1] if number % 5 == 3 else layers):  # in another order
            x = x + torch.tanh(experts[(number + depth) % 4](x))
            if number % 4 != depth:
                x = x + torch.tanh(between(x))
        return self.last(x).float().square().mean()


def batch(number: int) -> torch.Tensor:
    return torch.randn(3, 8, generator=torch.Generator().manual_seed(number))


def train(rank: int, world: int, stage: int | None, dtype: str, cpu: int, scale: float) -> dict[str, Any]:
    """Train on this rank's share of the micro-batches; return everything that must be equal, and the bytes."""
    torch.manual_seed(1)
    options: dict[str, Any] = {"dtype": dtype, "max_grad_norm": 0.5, "unit_bytes": "32KiB", "threads": 1}
    options |= {"gradient_accumulation_steps": WORLD // world, "stage": stage, "initial_loss_scale": scale}
    options |= {"max_memory": {"device": "16MiB", "cpu": cpu}, "loss_scale_window": 2, "device": "cpu"}
    losses, norms, scales = [], [], []
    with Engine(Experts(), AdamW(lr=0.01), **options) as engine:
        for number in range(STEPS * WORLD):
            if number % world == rank or world == 1:
                loss = engine(batch(number).to(engine.module.first.weight.dtype), number)
                engine.backward(loss)
                losses.append(loss.item())
                engine.step()
                norms.append(engine.grad_norm)
                scales.append((engine.loss_scale, engine.stats().skipped_steps))
        found = {key: value.view(torch.uint8).numpy().tobytes() for key, value in engine.state_dict().items()}
        request = engine.plan.request
        return {
            "losses": losses,
            "norms": norms[WORLD // world - 1 :: WORLD // world],
            "scales": scales[WORLD // world - 1 :: WORLD // world],
            "parameters": found,
            "waiting": (request.waiting_bytes, sum(unit.param_bytes for unit in request.units)),
        }


@pytest.mark.few(1)
@pytest.mark.parametrize(("dtype", "scale"), [("float32", 1.0), ("float16", 2.0**18)])
def test_ranks_with_experts_of_their_own_are_one_process(dtype: str, scale: float) -> None:
    (one,) = run(train, 1, 1, None, dtype, 4 << 20, scale)
    assert len(set(one["norms"])) > 2
    for stage in (1, 2, 3):
        for rank, found in enumerate(run(train, WORLD, WORLD, stage, dtype, 4 << 20, scale)):
            assert not isinstance(found, (Raised, Ended)), found
            assert found["losses"] == one["losses"][rank::WORLD]
            assert str(found["norms"]) == str(one["norms"])  # NaN is NaN
            assert found["scales"] == one["scales"]
            assert found["parameters"] == one["parameters"]
            assert (found["waiting"][0] < found["waiting"][1] / 3) is (stage >= 2)
    if dtype == "float16":
        assert 0 < one["scales"][-1][1] < STEPS  # steps were skipped on all ranks, and others were taken


# --- bytes ------------------------------------------------------------------------------------------------------------


def written_bytes() -> int:
    """Return what this process has given the system to write: to sockets, and to nothing else of any size here."""
    return int(Path("/proc/self/io").read_text(encoding="utf-8").split("wchar:")[1].split()[0])


def send(rank: int, stage: int) -> tuple[int, int, int, dict[str, tuple[int, int]]]:
    """Return what a rank sends in some steps: by the system, by the engine's own count, and by the plan."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(256, 256) for _ in range(8)))
    memory = {"device": "16MiB", "cpu": "8MiB"}
    with Engine(model, AdamW(lr=0.01), device="cpu", stage=stage, max_memory=memory, unit_bytes="256KiB") as engine:
        before, counted = written_bytes(), engine.stats().links["collectives"].bytes
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(2, 256)).mean())
            assert engine.step()
        stats, planned = engine.stats(), engine.plan.to_dict()["bytes"]
        peaks = {tier: (stats.peak_bytes[tier], int(planned[tier]["total"])) for tier in planned}
        peaks["device"] = peaks["device"][0], peaks["device"][1] + engine.plan.activation_bytes
        counted = stats.links["collectives"].bytes - counted
        assert engine.report().lanes["collectives"].size_bytes > counted / STEPS
        return written_bytes() - before, counted, STEPS * engine.plan.step_bytes["collectives"], peaks


@pytest.mark.parametrize("stage", [1, 2])
def test_what_is_sent_is_what_was_planned(stage: int) -> None:
    for found in run(send, WORLD, stage):
        assert not isinstance(found, (Raised, Ended)), found
        written, counted, planned, peaks = found
        assert planned > 4 << 20
        assert abs(counted - planned) <= 0.01 * planned
        assert abs(written - planned) <= 0.01 * planned
        for tier, (peak, size) in peaks.items():
            assert peak <= size, tier


# --- what a backward pass reaches -------------------------------------------------------------------------------------


def test_what_a_backward_pass_reaches_is_read_from_the_graph() -> None:
    used, left_out = nn.Linear(3, 3), nn.Linear(3, 3)
    x = used(torch.ones(1, 3))
    for twice in (False, True):
        found = reachable((x * used.weight if twice else x).sum())
        assert found is not None
        assert {id(leaf) for leaf in found} == {id(parameter) for parameter in used.parameters()}
    assert reachable((checkpoint(left_out, x, use_reentrant=True)).sum()) is None
    kept = reachable((checkpoint(left_out, x, use_reentrant=False)).sum())
    assert kept is not None and len(kept) == 4
    leaf = torch.ones(3, requires_grad=True)
    assert reachable(leaf) == [leaf]


class Twice(nn.Module):
    """Uses its first layer in two checkpointed segments."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.last = nn.Linear(8, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor, reentrant: bool) -> torch.Tensor:
        for _ in range(2):
            x = checkpoint(self.layer, x, use_reentrant=reentrant)
        return self.last(x).mean()


def checkpoint_twice(rank: int, stage: int, reentrant: bool) -> Any:
    torch.manual_seed(0)
    memory = {"device": "16MiB", "cpu": "8MiB"}
    with Engine(Twice(), AdamW(lr=0.01), device="cpu", stage=stage, max_memory=memory) as engine:
        engine.backward(engine(torch.ones(2, 8, requires_grad=True), reentrant))
        assert engine.step()
        return {key: value.tolist() for key, value in engine.state_dict().items()}


def test_a_layer_in_two_reentrant_segments_is_refused_with_the_remedy() -> None:
    for found in [*run(checkpoint_twice, 2, 2, True), *run(checkpoint_twice, 2, 3, True)]:
        assert isinstance(found, Raised)
        assert "expected all of it before those of layer go to the other ranks" in found.text
        assert "pass stage=1, or use_reentrant=False" in found.text
    remedies = [*run(checkpoint_twice, 2, 1, True), *run(checkpoint_twice, 2, 2, False)]
    assert all(found == remedies[0] for found in remedies) and isinstance(remedies[0], dict)
