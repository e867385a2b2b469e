"""Several ranks with slices of gradients and states: the bits of one process that accumulates their micro-batches."""

from __future__ import annotations

import ctypes
import math
import re
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from torch import nn

from offload import AdamW, BudgetError, Engine, RanksError
from offload.distributed.ranks import Agreement, OneRank
from offload.memory import limits, machine
from offload.planning.roles import STATE_ROLES, Role
from offload.several import who_shares
from offload.shards.stream import ALL_STATES, Chunk

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

STEPS = 3
CLIP = 0.05  # less than any norm
HOMES = {  # of parameters, gradients and states: the slowest of all units
    "device": ("Tier.DEVICE", "Tier.DEVICE", "Tier.DEVICE"),
    "host": ("Tier.HOST", "Tier.HOST", "Tier.HOST"),
    "nvme": ("Tier.NVME", "Tier.HOST", "Tier.NVME"),
    "spill": ("Tier.NVME", "Tier.NVME", "Tier.NVME"),
}
WIDTH = 72  # squares are larger than a page, and slices cut them
WIDE = 360  # so that slices of gradients, of four ranks, too, are more than the buffers through which they leave


class Net(nn.Module):
    """Blocks, of which a batch uses one of two experts; a tied head; a frozen layer."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(96, width)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 3 * width), nn.Linear(3 * width, width)) for _ in "ab"
        )
        self.experts = nn.ModuleList(nn.Linear(width, width) for _ in "ab")
        self.norm = nn.LayerNorm(width)
        self.frozen = nn.Linear(width, width).requires_grad_(False)
        self.never = nn.Linear(5, 5)
        self.head = nn.Linear(width, 96, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, tokens: torch.Tensor, expert: int) -> torch.Tensor:
        x = self.embedding(tokens)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        x = x + self.frozen(self.experts[expert](x))
        logits = self.head(self.norm(x)).float()
        return nn.functional.cross_entropy(logits.flatten(0, 1), tokens.roll(1, 1).flatten())


def net(name: str) -> Net:
    torch.manual_seed(3)
    return Net(WIDE if name.endswith("spill") else WIDTH)


def batch(number: int) -> tuple[torch.Tensor, int]:
    """Return a micro-batch of all ranks by its number: tokens, and the expert that they go to."""
    random = torch.Generator().manual_seed(100 + number)
    return torch.randint(0, 96, (2, 7), generator=random), int(number % 12 == 1)


def options(name: str, path: str) -> dict[str, Any]:
    """Return the options of a case, by its name: dtype, format of states, homes."""
    dtype, states, home = name.split("-")
    found: dict[str, Any] = {"device": "cpu", "dtype": dtype, "state_dtype": states, "max_grad_norm": CLIP}
    found |= {
        "initial_loss_scale": 64.0,
        "unit_bytes": 64 << 10,
        "max_memory": {"device": "40MiB", "cpu": "40MiB"},
        "threads": 1,
    }
    if home == "host":
        return found | {"offload_param": "cpu", "offload_optimizer": "cpu"}
    if home in ("nvme", "spill"):
        found["max_memory"] |= {"nvme": "64MiB"}
        return found | {"offload_param": "nvme", "offload_optimizer": "nvme", "nvme_path": path}
    return found


def smallest(name: str, settings: dict[str, Any]) -> int:
    """Return the smallest budget of host memory: gradients have no home there."""
    small = settings | {"max_memory": settings["max_memory"] | {"cpu": 1 << 20}}
    with pytest.raises((BudgetError, RanksError)) as caught:  # another rank's may come first: it has the same slices
        Engine(net(name), AdamW(), **small)
    found = re.search(r"would do is (\d+) bytes", str(caught.value))
    assert found is not None
    return int(found[1])


def states_of(engine: Engine) -> dict[tuple[str, str], list[tuple[int, bytes]]]:
    """Return the bytes of all states that are here, by parameter and role, with the element at which each begins."""
    found: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    manager = engine._life.require_open()
    states = manager.tiers.plan.request.states

    def visit(chunk: Chunk) -> None:
        for _, slot, start, stop in chunk.unit.overlaps(chunk.begin, chunk.end) if chunk.unit.trainable else ():
            for role in STATE_ROLES:
                if role not in chunk.addresses:
                    continue
                master = 2 if chunk.unit.dtype == "bfloat16" else 4
                size = {Role.MASTER: master}.get(role, states.kind.itemsize) * (stop - start)
                at = chunk.addresses[role] + size // (stop - start) * (start - chunk.begin)
                if role is Role.SCALES:
                    size = states.kind.units_bytes(stop - start)
                    at = chunk.addresses[role] + states.kind.units_bytes(start - chunk.begin)
                known = found.setdefault((slot.name, role.value), [])
                known.append((start - slot.offset_numel, ctypes.string_at(at, size)))

    manager.stream(manager.units, visit, reads=ALL_STATES | {Role.PARAM}, parts=True)
    return found


def train(rank: int, world: int, micro_batches: int, name: str, path: str, stage: int = 1) -> dict[str, Any]:
    """Train on this rank's share of the micro-batches; return everything that must be equal."""
    settings = options(name, path) | {"gradient_accumulation_steps": micro_batches // world}
    settings |= {"stage": stage} if world > 1 else {}
    if name.endswith("spill"):
        settings["max_memory"]["cpu"] = smallest(name, settings)
    return steps(rank, world, micro_batches, name, settings)


def steps(rank: int, world: int, micro_batches: int, name: str, settings: dict[str, Any]) -> dict[str, Any]:
    """Train with these settings, wherever the engine computes."""
    accumulation = micro_batches // world
    losses, norms = [], []
    with Engine(net(name), AdamW(lr=0.01, weight_decay=0.1), **settings) as engine:
        for step in range(STEPS):
            for micro in range(accumulation):
                tokens, expert = batch(step * micro_batches + micro * world + rank)
                loss = engine(tokens.to(engine.device), expert)
                engine.backward(loss)
                losses.append(loss.item())
                assert engine.step() == (micro == accumulation - 1)
            norms.append(engine.grad_norm)
        found = result(engine, losses, norms) | {"never": engine.module.never.weight.grad}
        engine._life.require_open().check()
        return found


def result(engine: Engine, losses: list[float], norms: list[float]) -> dict[str, Any]:
    """Return what steps have led to."""
    trained = [unit for unit in engine.plan.request.units if unit.trainable]
    roles = (Role.PARAM, Role.GRAD, Role.EXP_AVG)
    homes = tuple(max(str(engine.plan.home(unit, role)) for unit in trained) for role in roles)
    return {"losses": losses, "norms": norms, "homes": homes} | content(engine)


def content(engine: Engine) -> dict[str, Any]:
    parameters = {key: value.view(torch.uint8).numpy().tobytes() for key, value in engine.state_dict().items()}
    return {"parameters": parameters, "states": states_of(engine)}


def joined(*every: dict[str, Any]) -> dict[tuple[str, str], bytes]:
    """Return the states that ranks have together, whatever the slices and chunks in which they have them."""
    states: dict[tuple[str, str], list[tuple[int, bytes]]] = {}
    for found in every:
        for key, parts in found["states"].items():
            states.setdefault(key, []).extend(parts)
    return {key: b"".join(data for _, data in sorted(parts)) for key, parts in states.items()}


def compare_states(every: list[Any], one: dict[str, Any]) -> None:
    found, expected = joined(*every), joined(one)
    assert found.keys() == expected.keys()
    assert [key for key in expected if found[key] != expected[key]] == []


def check(world: int, micro_batches: int, name: str, tmp_path: Path, *, stages: tuple[int, ...] = (1, 2)) -> None:
    (one,) = run(train, 1, 1, micro_batches, name, str(tmp_path), 1)
    assert all(math.isfinite(norm) and norm > CLIP for norm in one["norms"]), one["norms"]  # clipping is active
    for stage in stages:
        check_ranks(one, run(train, world, world, micro_batches, name, str(tmp_path), stage), name)


def check_ranks(one: dict[str, Any], every: list[Any], name: str) -> None:
    """Compare what ranks have with what one process has."""
    check_bits(one, every)
    assert all(found["homes"] == HOMES[name.split("-")[2]] == one["homes"] for found in every)


def check_bits(one: dict[str, Any], every: list[Any]) -> None:
    """Compare losses, norms, parameters and states."""
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["losses"] == one["losses"][rank :: len(every)]
        assert found["norms"] == one["norms"]
        assert found["parameters"] == one["parameters"]
        assert found["never"] is None
    compare_states(every, one)


@pytest.mark.nightly
@pytest.mark.parametrize("world", [2, 3, 4])
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("states", ["float32", "bfloat16", "int8"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_ranks_are_one_process(dtype: str, states: str, home: str, world: int, tmp_path: Path) -> None:
    for accumulation in (1, 2):
        check(world, world * accumulation, f"{dtype}-{states}-{home}", tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize("name", ["bfloat16-float32-nvme", "float32-float32-device", "bfloat16-int8-host"])
def test_four_ranks_are_one_process(name: str, tmp_path: Path) -> None:
    check(4, 4, name, tmp_path)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("world", "micro_batches", "name"), [(2, 4, "bfloat16-bfloat16-host"), (3, 6, "bfloat16-float32-spill")]
)
def test_ranks_that_accumulate_are_one_process(world: int, micro_batches: int, name: str, tmp_path: Path) -> None:
    check(world, micro_batches, name, tmp_path)


def train_elsewhere(rank: int, world: int, path: str, stage: int) -> dict[str, Any]:
    return train(rank, world, world, f"float32-float32-{list(HOMES)[rank]}", path, stage)


@pytest.mark.few(1)
@pytest.mark.parametrize("stage", [1, 2])
def test_each_rank_may_have_other_homes(stage: int, tmp_path: Path) -> None:
    (one,) = run(train, 1, 1, 3, "float32-float32-device", str(tmp_path), 1)
    every = run(train_elsewhere, 3, 3, str(tmp_path), stage)
    check_bits(one, every)
    assert [found["homes"] for found in every] == [HOMES[home] for home in ("device", "host", "nvme")]


# --- what nobody has named --------------------------------------------------------------------------------------------

FREE_BYTES, DRIVE_BYTES = 384 << 20, 512 << 20
PERCENT = {"device": "50%", "cpu": "50%", "nvme": "50%"}


def planned(rank: int, path: str, shares: bool, together: int) -> dict[str, int]:
    """Return the budgets of a rank of a machine of so many, of which the last rank of all has no drive."""
    options: dict[str, Any] = {"nvme_path": path} if rank < 2 else {}
    if shares:
        options["max_memory"] = {tier: text for tier, text in PERCENT.items() if tier != "nvme" or options}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(limits, "free_host_bytes", lambda: FREE_BYTES)
        patch.setattr(machine.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=DRIVE_BYTES))
        patch.setattr(machine, "identity", lambda: str(rank // together))
        torch.manual_seed(0)
        with Engine(nn.Linear(64, 64), AdamW(), device="cpu", stage=1, threads=1, **options) as engine:
            return dict(engine.stats().budget_bytes)


@pytest.mark.parametrize("shares", [False, True])
def test_ranks_of_a_machine_share_what_it_has_free(shares: bool, tmp_path: Path) -> None:
    every = run(planned, 3, str(tmp_path), shares, 3)
    host = [found["device"] + found["cpu"] for found in every]
    assert 0.8 * FREE_BYTES < sum(host) <= FREE_BYTES and len(set(host)) == 1
    assert [found["nvme"] for found in every] == [int(DRIVE_BYTES // 2 * (0.5 if shares else 0.9))] * 2 + [0]


def test_ranks_of_other_machines_share_nothing(tmp_path: Path) -> None:
    two, again, alone = run(planned, 3, str(tmp_path), True, 2)
    assert two == again == {"device": FREE_BYTES // 4, "cpu": FREE_BYTES // 4, "nvme": DRIVE_BYTES // 4}
    assert alone == {"device": FREE_BYTES // 2, "cpu": FREE_BYTES // 2, "nvme": 0}


def test_an_engine_apart_has_its_part_of_what_the_launcher_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    assert who_shares(OneRank(), [7]) == (1, {7: 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert who_shares(OneRank(), [7]) == (4, {7: 4})


def test_a_group_has_its_part_of_what_the_launcher_has_started(monkeypatch: pytest.MonkeyPatch) -> None:
    class Two(OneRank):
        """Both are on this machine; one has another drive."""

        def agree(self, where: str, *_: object, numbers: Sequence[float] = (), **__: object) -> Agreement:
            return Agreement((tuple(numbers), (numbers[0], 8.0)))

    assert who_shares(Two(), [7]) == (2, {7: 1})
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert who_shares(Two(), [7]) == (4, {7: 3})
