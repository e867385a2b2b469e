"""Several ranks with slices of parameters, too: the bits of one process, whichever modules each rank uses."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_rank_checkpoint_errors import instead
from test_stage_1 import check
from torch import nn

from offload import AdamW, Engine
from offload.memory.budget import Tier
from offload.planning.roles import Role
from offload.shards.conductor import Conductor

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD = 3
LAYERS, WIDTH = 9, 64  # a layer is a unit of 5 pages; five of them fit the region


CASES = [  # each two of world, accumulation, dtype, format of states and homes meet
    (2, 2, "float32-float32-device"),
    (2, 4, "bfloat16-float32-host"),
    (2, 4, "float32-bfloat16-nvme"),
    (2, 2, "bfloat16-int8-spill"),
    (3, 6, "bfloat16-bfloat16-device"),
    (3, 3, "float32-int8-host"),
    (3, 6, "float32-float32-spill"),
    (3, 3, "bfloat16-bfloat16-nvme"),
    (4, 8, "float32-int8-device"),
    (4, 4, "bfloat16-float32-nvme"),
    (4, 8, "bfloat16-bfloat16-host"),
    (4, 4, "float32-bfloat16-device"),
    (3, 6, "bfloat16-int8-host"),
]


@pytest.mark.parametrize(
    ("world", "micro_batches", "name"),
    [
        (3, 3, "float32-float32-host"),
        (3, 6, "bfloat16-float32-nvme"),
        *(pytest.param(*case, marks=pytest.mark.nightly) for case in CASES),
    ],
)
def test_ranks_with_slices_of_parameters_are_one_process(
    world: int, micro_batches: int, name: str, tmp_path: Path
) -> None:
    check(world, micro_batches, name, tmp_path, stages=(3,))


# --- ranks that use different modules ---------------------------------------------------------------------------------


class Choice(nn.Module):
    """Layers of which each batch uses some, in an order of its own; one is frozen.

    So is a parameter of a dtype that gloo does not know.
    """

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS))
        self.layers[4].requires_grad_(False)
        self.turn = nn.Parameter(torch.randn(WIDTH, dtype=torch.complex64), requires_grad=False)

    def forward(self, x: torch.Tensor, order: list[int]) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return (x * self.turn.abs()).square().mean()


def choice(seed: int = 5) -> Choice:
    torch.manual_seed(seed)
    return Choice()


def engine_of(model: nn.Module | None = None, **options: Any) -> Engine:
    settings = {"device": "cpu", "max_memory": {"device": "8MiB", "cpu": "8MiB"}, "unit_bytes": 1 << 14, "threads": 1}
    return Engine(choice() if model is None else model, AdamW(lr=0.01), **(settings | options))


def micro_batch(number: int) -> tuple[torch.Tensor, list[int]]:
    """Return a batch of all ranks by its number, and the layers that it uses."""
    chance = random.Random(number)
    order = [chance.randrange(LAYERS) for _ in range(chance.randrange(1, 2 * LAYERS))]
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(number)), order


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: value.numpy().tobytes() for name, value in tensors.items()}


def wander(rank: int, world: int, stage: dict[str, int]) -> dict[str, Any]:
    """Train with an order of layers per micro-batch; look at parameters, evaluate and write between the steps."""
    losses: dict[int, float] = {}
    seen = []
    with engine_of(gradient_accumulation_steps=WORLD // world, max_grad_norm=0.5, **stage) as engine:
        for step in range(4):
            for number in range(WORLD * step + rank, WORLD * (step + 1), world):
                loss = engine(*micro_batch(number))
                losses[number] = loss.item()
                engine.backward(loss)
                engine.step()
            with torch.no_grad():  # of unequal length
                seen += [engine(*micro_batch(100 + more)).item() for more in range(step if world == 1 else rank)]
            if rank == 1 or world == 1:  # alone
                with engine.gather(engine.module.layers[step]):
                    seen.append(engine.module.layers[step].weight.sum().item())
            if step == 1:
                engine.apply(lambda name, parameter: parameter.mul_(0.9))
            if step == 2:
                engine.load_state_dict({name: value * 1.1 for name, value in engine.state_dict().items()})
        stats = engine.stats()
        parameters = engine.state_dict()
    found = {"losses": losses, "others": stats.gathers_for_others, "seen": seen}
    return found | {"parameters": bits(parameters), "closed": bits(engine.module.state_dict())}


def test_ranks_may_use_different_modules() -> None:
    (one,) = run(wander, 1, 1, {})
    every = run(wander, WORLD, WORLD, {"stage": 3})
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found["others"] > 0
        assert all(one["losses"][number] == loss for number, loss in found["losses"].items())
        assert found["parameters"] == found["closed"] == one["parameters"]
    assert set().union(*(found["losses"] for found in every)) == set(one["losses"])


# --- the plan ---------------------------------------------------------------------------------------------------------


class Deep(nn.Module):
    """Blocks that are used one after the other."""

    def __init__(self, layers: int = 12) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def measure(rank: int, stage: Any, device: str, cpu: str, steps: int) -> dict[str, Any]:
    torch.manual_seed(0)
    options = {"device": "cpu", "unit_bytes": 1 << 19, "stage": stage, "offload_param": "cpu"}
    with Engine(Deep(), AdamW(), max_memory={"device": device, "cpu": cpu}, **options) as engine:
        moved = []
        for _ in range(steps):  # the region of whole units takes its size in the first ones
            batch = torch.full((2, 256), rank + 1.0, requires_grad=True)  # so that backward needs the first layer
            engine.backward(engine(batch))
            # All ranks have met behind all that was under way. A step ends with what the next forward needs on its way.
            moved.append(engine.stats().links["collectives"].bytes)
            engine.step()
        plan, stats, planned = engine.plan, engine.stats(), engine.plan.to_dict()["bytes"]
        room = {tier: planned[tier.value]["total"] + (tier is Tier.DEVICE) * plan.activation_bytes for tier in Tier}
        engine._life.require_open().check()
        homes = {plan.home(unit, Role.PARAM) for unit in plan.request.units}
        return {
            "wire": [after - before for before, after in zip(moved[-3:], moved[-2:], strict=False)],
            "planned": plan.step_bytes["collectives"],
            "peaks": [(stats.peak_bytes[tier.value], room[tier]) for tier in Tier],
            "stage": plan.request.stage,
            "text": str(plan),
            "homes": homes,
        }


@pytest.mark.parametrize("stage", [1, 3])
def test_what_comes_from_other_ranks_is_as_planned(stage: int) -> None:
    for found in run(measure, WORLD, stage, "256MiB", "24MiB", 5):
        assert not isinstance(found, (Raised, Ended)), found
        assert all(abs(moved - found["planned"]) <= 0.01 * found["planned"] for moved in found["wire"]), found
        assert all(peak <= size for peak, size in found["peaks"])
        assert f"stage {stage}, rank" in found["text"]


def choose(rank: int, small: str) -> list[Any]:
    """Return what a plan is where all ranks have room, and where one has a small budget of host memory."""
    return [measure(rank, "auto", "4MiB", size, 1) for size in ("24MiB", small if rank == 1 else "24MiB")]


def test_auto_takes_slices_where_one_rank_cannot_hold_whole_parameters() -> None:
    for found in run(choose, WORLD, "10MiB"):  # of which whole parameters leave too little
        assert not isinstance(found, (Raised, Ended)), found
        assert [one["stage"] for one in found] == [1, 3]


# --- closing ----------------------------------------------------------------------------------------------------------


def close_apart(rank: int, path: str) -> tuple[int | None, int]:
    """Let the others close when rank 0 has begun to; then let rank 0 read what the others are about to close.

    Returns:
        from which step a new engine goes on, and how many parameters were read.
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    sizes = {"device": "2MiB", "cpu": "7MiB", "nvme": "256MiB"}  # less than parameters: they are not given back
    options = {"device": "cpu", "max_memory": sizes, "stage": 3, "unit_bytes": 1 << 18}

    def tell(real: Any, *args: Any, **more: Any) -> Any:
        if args[1:] == ("closing",):
            store.set("closing", "1")
        found = real(*args, **more)
        if not args[1:]:
            store.set("closing", "1")  # without having met anybody
        return found

    torch.manual_seed(0)
    with Engine(Deep(40), AdamW(), run_dir=path, **options) as engine:
        for _ in range(3):
            engine.backward(engine(torch.full((2, 256), rank + 1.0, requires_grad=True)))
            engine.step()
        if rank == 0:
            with instead(Conductor, "agree", tell), instead(Conductor, "close", tell):
                engine.close()
        store.wait(["closing"])
    torch.manual_seed(0)
    with Engine(Deep(40), AdamW(), run_dir=path, **options) as engine:
        resumed = None if engine.resumed is None else engine.resumed.step
        found = engine.state_dict() if rank == 0 else {}
    return resumed, len(found)


def test_who_closes_waits_for_who_commits_or_reads(tmp_path: Path) -> None:
    assert run(close_apart, WORLD, str(tmp_path)) == [(3, 80), (3, 0), (3, 0)]
