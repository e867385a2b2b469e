"""LAMB, whose step needs norms of whole parameters, with several ranks that have slices: the bits of one process."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_hybrid import mesh_of, train_by_sums
from test_rank_checkpoint_errors import error_of, instead
from test_stage_1 import WIDE, Net, batch, options

from offload import LAMB, Engine
from offload.optim import norms_of_ranks

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD, STEPS, ACCUMULATION = 3, 3, 2


def wide() -> Net:
    torch.manual_seed(3)
    return Net(WIDE)


def engine_of(
    name: str, path: str, world: int, stage: int, micro_batches: int = WORLD * ACCUMULATION, **more: Any
) -> Engine:
    settings = options(name, path) | {"gradient_accumulation_steps": micro_batches // world} | more
    settings["max_memory"] |= {"nvme": "128MiB"} if "nvme" in name else {}
    settings |= {"unit_bytes": 1 << 20} | ({"stage": stage} if world > 1 else {})
    return Engine(wide(), LAMB(lr=0.01, weight_decay=0.1), **settings)


def train(rank: int, world: int, name: str, path: str, stage: int, saved: str) -> dict[str, Any]:
    """Train; go on from a checkpoint of another number of ranks, if there is one, else save it."""
    micro_batches, losses = WORLD * ACCUMULATION, {}
    with engine_of(name, path, world, stage) as engine:
        first = engine.load_checkpoint(saved) if Path(saved).exists() else 0
        norms, digests = [], [engine.digests()]
        for step in range(first, first + STEPS):
            for number in range(step * micro_batches + rank, (step + 1) * micro_batches, world):
                loss = engine(*batch(number))
                losses[number] = loss.item()
                engine.backward(loss)
                engine.step()
            norms.append(engine.grad_norm)
            digests.append(engine.digests())
        engine.save_checkpoint(saved, client_state=first + STEPS)
        lengths = [slot.numel for unit in engine.plan.request.units for slot in unit.slots]
    assert max(lengths) > 2 << 16  # so that slices cut what the kernel sums as one
    return {"losses": losses, "norms": norms, "digests": digests}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("bfloat16-float32-host", 3),
        ("float32-float32-nvme", 1),
        pytest.param("float16-float32-host", 2, marks=pytest.mark.nightly),
        pytest.param("bfloat16-float32-nvme", 3, marks=pytest.mark.nightly),
    ],
)
def test_slices_have_the_norms_of_the_whole(name: str, stage: int, tmp_path: Path) -> None:
    results = []
    for turn, worlds in enumerate([(1, 1), (WORLD, 1 if stage == 1 else 2)]):
        losses: dict[int, float] = {}
        rest: list[Any] = []
        for world in worlds:
            every = run(train, world, world, name, str(tmp_path), stage, str(tmp_path / f"saved-{turn}"))
            for found in every:
                assert not isinstance(found, (Raised, Ended)), found
                losses |= found.pop("losses")
                assert found == every[0]
            rest.append(every[0])
        results.append((losses, rest))
    assert results[0] == results[1]


# --- in nodes ---------------------------------------------------------------------------------------------------------

SHAPE = (2, 2)  # nodes, ranks of a node


def train_in_nodes(rank: int, name: str, path: str, stage: int) -> dict[str, Any]:
    losses, norms, world = [], [], math.prod(SHAPE)
    with engine_of(name, path, world, stage, ACCUMULATION * world, group=mesh_of(*SHAPE)) as engine:
        for number in range(rank, STEPS * ACCUMULATION * world, world):
            loss = engine(*batch(number))
            losses.append(loss.item())
            engine.backward(loss)
            if engine.step():
                norms.append(engine.grad_norm)
        return {"losses": losses, "norms": norms, "digests": engine.digests()}


def train_as_nodes(rank: int, name: str, path: str) -> dict[str, Any]:
    """Train in one process, which adds each node's gradients up first."""
    with engine_of(name, path, 1, 0, ACCUMULATION * math.prod(SHAPE)) as engine:
        dtype = getattr(torch, name.split("-")[0])
        losses, norms = train_by_sums(engine, lambda: wide().to(dtype), SHAPE, ACCUMULATION, STEPS)
        return {"losses": losses, "norms": norms, "digests": engine.digests()}


@pytest.mark.parametrize(
    ("name", "stage"),
    [
        ("bfloat16-float32-host", 3),
        pytest.param("float32-float32-host", 1, marks=pytest.mark.nightly),
        pytest.param("bfloat16-float32-nvme", 2, marks=pytest.mark.nightly),
        pytest.param("float32-float32-nvme", 3, marks=pytest.mark.nightly),
    ],
)
def test_slices_within_nodes_have_the_norms_of_the_whole(name: str, stage: int, tmp_path: Path) -> None:
    (one,) = run(train_as_nodes, 1, name, str(tmp_path))
    assert not isinstance(one, (Raised, Ended)), one
    every = run(train_in_nodes, math.prod(SHAPE), name, str(tmp_path), stage)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["losses"] == one["losses"][rank :: len(every)]
        assert (found["norms"], found["digests"]) == (one["norms"], one["digests"])


# --- failures ---------------------------------------------------------------------------------------------------------


def fail(rank: int, path: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 1 fail between the two passes."""

    def lose(real: Any, *args: Any) -> Any:
        if rank == 1:
            raise MemoryError("no room")
        return real(*args)

    with engine_of("float32-float32-host", path, WORLD, 1) as engine:
        for number in range(ACCUMULATION):
            engine.backward(engine(*batch(rank + number)))
            if number == 0:
                engine.step()
        with instead(norms_of_ranks.Norms, "join", lose):
            first = error_of(engine.step)
        return first, error_of(lambda: engine.backward(engine(*batch(rank))))


def test_a_rank_that_fails_between_the_passes_is_told_of(tmp_path: Path) -> None:
    every = run(fail, WORLD, str(tmp_path))
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        first, afterwards = found
        assert first[0] == ("MemoryError" if rank == 1 else "RanksError") and "no room" in first[1]
        assert afterwards[0] == "RanksError" and "close the engine" in afterwards[1]
