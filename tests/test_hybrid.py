"""Slices within nodes, and replicas over them: the bits of one process that adds each node's gradients up first."""

from __future__ import annotations

import math
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_ranks import Ended, Raised, run
from test_rank_checkpoints import as_bytes
from test_ranks import Board, bits, drawn_presence, gradients, summed
from test_stage_1 import (
    CLIP,
    HOMES,
    STEPS,
    batch,
    compare_states,
    content,
    joined,
    net,
    options,
    result,
    smallest,
)
from test_stage_1 import train as train_flat
from test_stage_3 import Deep
from torch import nn

from offload import AdamW, Engine
from offload.distributed.exchange import KERNEL_DTYPE

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

Shape = tuple[int, int]  # nodes, ranks of a node


def mesh_of(*shape: int, names: tuple[str, ...] | None = None) -> Any:
    from torch.distributed.device_mesh import init_device_mesh

    return init_device_mesh("cpu", shape, mesh_dim_names=names)


# --- training ---------------------------------------------------------------------------------------------------------


def engine_of(name: str, path: str, accumulation: int, **more: Any) -> Engine:
    settings = options(name, path) | {"gradient_accumulation_steps": accumulation} | more
    if name.endswith("spill"):
        settings["max_memory"]["cpu"] = smallest(name, settings)
    return Engine(net(name), AdamW(lr=0.01, weight_decay=0.1), **settings)


def train(rank: int, shape: Shape, accumulation: int, name: str, path: str, stage: int) -> dict[str, Any]:
    """Train on this rank's share of the micro-batches; return everything that must be equal."""
    losses, norms, world = [], [], math.prod(shape)
    with engine_of(name, path, accumulation, stage=stage, group=mesh_of(*shape)) as engine:
        for step in range(STEPS):
            for micro in range(accumulation):
                loss = engine(*batch((step * accumulation + micro) * world + rank))
                engine.backward(loss)
                losses.append(loss.item())
                engine.step()
            norms.append(engine.grad_norm)
        return result(engine, losses, norms)


def add(sums: dict[str, torch.Tensor], more: dict[str, torch.Tensor]) -> None:
    """Add in float32; what is absent is left out."""
    for name, value in more.items():
        sums[name] = sums[name] + value if name in sums else value


def sums_of(plain: nn.Module, numbers: range, local: int) -> tuple[dict[str, torch.Tensor], list[float]]:
    """Return the sum of the micro-batches' gradients, added within each run of `local` first, and their losses."""
    sums, losses = dict[str, torch.Tensor](), list[float]()
    for first in numbers[::local]:
        of_node = dict[str, torch.Tensor]()
        for number in range(first, first + local):
            plain.zero_grad(set_to_none=True)
            loss = plain(*batch(number))
            loss.backward()
            losses.append(loss.item())
            add(of_node, {key: p.grad.float() for key, p in plain.named_parameters() if p.grad is not None})
        add(sums, of_node)
    return sums, losses


def fold(rank: int, shape: Shape, accumulation: int, name: str, path: str) -> dict[str, Any]:
    """Train in one process with sums of plain gradients in the shape of nodes, in the place of its own."""
    with engine_of(name, path, accumulation * math.prod(shape)) as engine:
        dtype = getattr(torch, name.split("-")[0])
        losses, norms = train_by_sums(engine, lambda: net(name).to(dtype), shape, accumulation, STEPS)
        return result(engine, losses, norms)


def train_by_sums(
    engine: Engine, make: Callable[[], nn.Module], shape: Shape, accumulation: int, steps: int
) -> tuple[list[float], list[float]]:
    """Take steps of an engine of one process with such sums; `make` makes its model. Return losses and norms."""
    losses, norms, many = list[float](), [], accumulation * math.prod(shape)
    manager = engine._life.require_open()
    places = {slot.name: (unit.index, position) for unit in manager.units for position, slot in enumerate(unit.slots)}
    for step in range(steps):
        plain = make()
        plain.load_state_dict(engine.state_dict())
        numbers = range(step * many, (step + 1) * many)
        sums, found = sums_of(plain, numbers, shape[1])
        for number in numbers:
            loss = engine(*batch(number))
            assert loss.item() == found[number - numbers[0]]
            engine.backward(loss)
            if number == numbers[-1]:
                for key, value in sums.items():
                    manager.gradients.overwrite(*places[key], value.flatten())
            engine.step()
        losses += found
        norms.append(engine.grad_norm)
    return losses, norms


def check(shape: Shape, accumulation: int, name: str, tmp_path: Path, stages: tuple[int, ...]) -> None:
    nodes, local = shape
    world = nodes * local
    (one,) = run(fold, 1, shape, accumulation, name, str(tmp_path))
    (flat,) = run(train_flat, 1, 1, accumulation * world, name, str(tmp_path), 1)
    for alone in (one, flat):
        assert not isinstance(alone, (Raised, Ended)), alone
    assert all(math.isfinite(norm) and norm > CLIP for norm in one["norms"]), one["norms"]  # clipping is active
    is_flat = local == 1 or (nodes == 1 and accumulation == 1)
    kinds = ("norms", "parameters", "states")
    if is_flat or name.startswith("float32"):  # else the shape is part of the bits; float32 holds sums of some bfloat16
        assert all(one[kind] == flat[kind] for kind in kinds) is is_flat
    truth = flat if nodes == 1 else one
    for stage in stages:
        every = run(train, world, shape, accumulation, name, str(tmp_path), stage)
        for rank, found in enumerate(every):
            assert not isinstance(found, (Raised, Ended)), found
            assert found["losses"] == truth["losses"][rank::world]
            assert found["norms"] == truth["norms"]
            assert found["parameters"] == truth["parameters"]
            assert found["homes"] == HOMES[name.split("-")[2]]
        for first in range(0, world, local):  # each node has all of the states
            compare_states(every[first : first + local], truth)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("shape", "accumulation", "name", "stages"),
    [
        ((2, 2), 2, "bfloat16-float32-host", (3,)),
        ((2, 2), 1, "float32-int8-nvme", (1,)),
        ((3, 1), 2, "float32-float32-device", (2,)),
    ],
)
def test_nodes_add_their_own_gradients_first(
    shape: Shape, accumulation: int, name: str, stages: tuple[int, ...], tmp_path: Path
) -> None:
    check(shape, accumulation, name, tmp_path, stages)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "name", ["float32-float32-spill", "bfloat16-int8-nvme", "float32-int8-host", "bfloat16-float32-device"]
)
@pytest.mark.parametrize("shape", [(2, 2), (3, 1), (1, 3), (2, 3), (3, 2)])
def test_more_nodes(shape: Shape, name: str, tmp_path: Path) -> None:
    for accumulation in (1, 2):
        check(shape, accumulation, name, tmp_path, (1, 2, 3))


# --- one exchange -----------------------------------------------------------------------------------------------------


class Level(Board):
    """Ranks of a node, or owners of a slice, that are threads."""

    def gather(self, full: torch.Tensor, where: str) -> None:
        self._rows[self.rank] = full.view(self.world, -1)[self.rank].clone()
        self._barrier.wait(10)
        full.copy_(torch.cat(list(self._rows)))
        self._barrier.wait(10)


def levels(shape: Shape) -> list[Any]:
    """Return the ranks of a mesh."""

    def level(count: int) -> list[Level]:
        rows, barrier = [None] * count, threading.Barrier(count)
        return [Level(rank, count, rows, barrier) for rank in range(count)]

    nodes, local = shape
    within, between = [level(local) for _ in range(nodes)], [level(nodes) for _ in range(local)]
    found = []
    for rank in range(nodes * local):
        one: Any = Level(rank, nodes * local, [], threading.Barrier(1))
        one.node, one.owners = within[rank // local][rank % local], between[rank % local][rank // local]
        found.append(one)
    return found


def in_shape(found: torch.Tensor, present: Any, slots: Any, local: int) -> tuple[torch.Tensor, list[bool]]:
    """Return the sum of (micro-batches, ranks, elements) that adds runs of `local` ranks first; NaN where none is."""
    sums: dict[int, torch.Tensor] = {}
    for micro, there in zip(found, present, strict=True):
        for first in range(0, len(there), local):
            of_node: dict[int, torch.Tensor] = {}
            for rank in range(first, first + local):
                for slot, (begin, end) in enumerate(slots):
                    if there[rank][slot]:
                        value = micro[rank, begin:end].float()
                        of_node[slot] = of_node[slot] + value if slot in of_node else value
            for slot, value in of_node.items():
                sums[slot] = sums[slot] + value if slot in sums else value
    total = torch.full((found.shape[2],), float("nan"))
    for slot, value in sums.items():
        total[slice(*slots[slot])] = value
    return total, [slot in sums for slot in range(len(slots))]


@given(
    st.data(),
    st.sampled_from([(2, 1), (2, 2), (2, 3), (3, 1), (3, 2)]),
    st.sampled_from(list(KERNEL_DTYPE)),
    st.integers(0, 1000),
)
def test_the_sum_has_the_shape_of_the_nodes(data: st.DataObject, shape: Shape, dtype: torch.dtype, seed: int) -> None:
    nodes, local = shape
    world = nodes * local
    width = nodes * data.draw(st.integers(1, 5), "elements of a part of a slice")
    slots, present = drawn_presence(data, world, local * width)
    room = data.draw(st.integers(4 * world, 4 * world * width + 40), "bytes of a piece")
    found = gradients(world, len(present), local * width, dtype, seed)
    expected, arrived = in_shape(found, present, slots, local)
    totals, known = summed(levels(shape), found, present, slots, room)
    assert known == [arrived] * world
    for first in range(0, world, local):
        assert bits(torch.cat(totals[first : first + local])) == bits(expected)


# --- checkpoints ------------------------------------------------------------------------------------------------------


def step_on(engine: Engine, rank: int, world: int, many: int, step: int) -> None:
    for micro in range(many // world):
        engine.backward(engine(*batch(step * many + micro * world + rank)))
        engine.step()


def save(rank: int, shape: Shape, name: str, path: str) -> tuple[Any, Any]:
    """Take two steps, save, and take one more: return what there was at both times."""
    world = math.prod(shape)
    more = {"background_checkpoints": True} if name.endswith(("nvme", "spill")) else {}
    with engine_of(name, path, 1, stage=3, group=mesh_of(*shape), **more) as engine:
        for step in range(2):
            step_on(engine, rank, world, world, step)
        engine.save_checkpoint(f"{path}/saved")
        engine.save_checkpoint(f"{path}/behind", wait=False).wait()
        saved = content(engine)
        step_on(engine, rank, world, world, 2)
        return saved, content(engine)


def load(rank: int, world: int, shape: Shape | None, name: str, path: str, folder: str, many: int) -> tuple[Any, Any]:
    """Load what was saved, and take a step more."""
    more = {"stage": 2} if world > 1 else {}
    if shape is not None:
        more |= {"stage": 1, "group": mesh_of(*shape)}
    with engine_of(name, path, many // world, **more) as engine:
        engine.load_checkpoint(f"{path}/{folder}")
        loaded = content(engine)
        if many % world == 0:
            step_on(engine, rank, world, many, 2)
        return loaded, content(engine)


@pytest.mark.parametrize(
    ("shape", "name"),
    [
        ((2, 2), "bfloat16-float32-nvme"),
        pytest.param((2, 2), "float32-int8-host", marks=pytest.mark.nightly),
        pytest.param((3, 1), "bfloat16-int8-nvme", marks=pytest.mark.nightly),
        pytest.param((2, 3), "bfloat16-float32-spill", marks=pytest.mark.nightly),
    ],
)
def test_one_node_writes_a_checkpoint_and_any_ranks_load_it(shape: Shape, name: str, tmp_path: Path) -> None:
    world = math.prod(shape)
    every = run(save, world, shape, name, str(tmp_path))
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
    whole = every[: shape[1]]
    for folder, loaders in (("behind", [(1, None)]), ("saved", [(1, None), (3, None), (world, shape)])):
        (saved,) = (tmp_path / folder).glob("step-*")
        writers = {path.name.split("-of-rank-")[1][0] for path in saved.glob("tensors*")}
        assert writers == {str(rank) for rank in range(shape[1])}
        for ranks, of in loaders:
            loaded = run(load, ranks, ranks, of, name, str(tmp_path), folder, world)
            for found in loaded:
                assert not isinstance(found, (Raised, Ended)), found
                assert found[0]["parameters"] == whole[0][0]["parameters"]
            node = loaded[: shape[1]] if of else loaded
            assert joined(*(found[0] for found in node)) == joined(*(found[0] for found in whole))
            if of:  # the run goes on with the same bits
                for before, after in zip(every, loaded, strict=True):
                    assert after[1]["parameters"] == before[1]["parameters"]
                    assert joined(after[1]) == joined(before[1])


def interrupt(rank: int, shape: Shape, name: str, path: str) -> tuple[Any, Any, Any]:
    """Save between two micro-batches of a step, go on, load and go on again."""
    world = math.prod(shape)

    def go_on(engine: Engine, first: int, count: int) -> Any:
        for number in range(first, first + count):
            engine.backward(engine(*batch(number * world + rank)))
            engine.step()
        return engine.digests(), as_bytes(engine.optimizer.state_dict()), content(engine)

    with engine_of(name, path, 2, stage=2, group=mesh_of(*shape)) as engine:
        go_on(engine, 0, 3)
        engine.save_checkpoint(f"{path}/saved")
        waiting = engine.digests()
        whole = go_on(engine, 3, 1)
        engine.load_checkpoint(f"{path}/saved")
        assert engine.digests() == waiting
        return waiting, whole, go_on(engine, 3, 1)


def test_what_waits_inside_a_step_is_saved_and_goes_on(tmp_path: Path) -> None:
    every = run(interrupt, 4, (2, 2), "bfloat16-int8-host", str(tmp_path))
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found[1] == found[2] and found[0] != found[1][0]
        assert (found[0], found[1][:2]) == (every[0][0], every[0][1][:2])
    assert any("gradient" in roles for roles in every[0][0].values())


def commit(rank: int, shape: Shape | None, path: str) -> Any:
    """Begin a durable run, or go on with it; return its folder and what there is."""
    more = {"stage": 1} if shape is None else {"stage": 1, "group": mesh_of(*shape)}
    memory = {"device": "40MiB", "cpu": "40MiB", "nvme": "64MiB"}
    try:
        engine = Engine(net("bfloat16"), AdamW(lr=0.01), device="cpu", run_dir=path, max_memory=memory, **more)
    except Exception as error:
        return str(error)
    with engine:
        steps, found = engine.stats().step, content(engine)
        step_on(engine, rank, math.prod(shape or (4,)), 4, steps)
        engine.drain()
        return Path(engine.config.paths()[0]).name, steps, found, content(engine)


@pytest.mark.nightly
def test_a_durable_run_goes_on_with_as_many_nodes(tmp_path: Path) -> None:
    first, again = (run(commit, 4, (2, 2), str(tmp_path)) for _ in range(2))
    for rank, (one, other) in enumerate(zip(first, again, strict=True)):
        assert (one[:2], other[:2]) == ((f"rank-{rank}-of-2x2", 0), (f"rank-{rank}-of-2x2", 1)), (one, other)
        assert other[2] == one[3]
    for text in run(commit, 4, None, str(tmp_path)):
        assert "expected a run of 4 ranks but got one of 2x2; go on with 2x2" in text


# --- what is sent -----------------------------------------------------------------------------------------------------


def measure(rank: int, shape: Shape, stage: int) -> dict[str, Any]:
    torch.manual_seed(0)
    more = {"stage": stage, "group": mesh_of(*shape), "max_memory": {"device": "256MiB", "cpu": "24MiB"}}
    with Engine(Deep(), AdamW(), device="cpu", unit_bytes=1 << 19, offload_param="cpu", **more) as engine:
        moved = []
        for _ in range(5):
            batch = torch.full((2, 256), rank + 1.0, requires_grad=True)
            engine.backward(engine(batch))
            moved.append({name: link.bytes for name, link in engine.stats().links.items()})
            engine.step()
        plan = engine.plan
        links = ("collectives", "between_nodes")
        return {
            "moved": {link: moved[-1][link] - moved[-2][link] for link in links},
            "planned": {link: plan.step_bytes[link] for link in links},
            "text": str(plan),
            "gradients": sum(4 * unit.numel for unit in plan.request.units),
        }


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_what_goes_within_a_node_and_between_nodes_is_as_planned(stage: int) -> None:
    for rank, found in enumerate(run(measure, 4, (2, 2), stage)):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["moved"]["between_nodes"] == found["planned"]["between_nodes"] == found["gradients"] // 2
        assert found["moved"]["collectives"] == pytest.approx(found["planned"]["collectives"], rel=0.01)
        assert f"stage {stage}, rank {rank} of 4, node {rank // 2} of 2: a slice of" in found["text"]


# --- meshes -----------------------------------------------------------------------------------------------------------


def error_of(act: Any) -> tuple[str, str]:
    try:
        act()
    except Exception as error:
        return type(error).__name__, str(error)
    return "nothing", ""


def tiny(**more: Any) -> Engine:
    torch.manual_seed(0)
    memory = {"device": "16MiB", "cpu": "16MiB"}
    return Engine(nn.Linear(8, 8), AdamW(), device="cpu", **({"stage": 1, "max_memory": memory} | more))


def refuse(rank: int) -> dict[str, tuple[str, str]]:
    from torch.distributed.device_mesh import DeviceMesh

    named = mesh_of(2, 2, names=("replicate", "shard"))
    meshes = {
        "three": mesh_of(2, 2, 1),
        "tensor": mesh_of(2, 2, names=("dp", "tp")),
        "pipeline": mesh_of(2, 2, 1, names=("pp_outer", "dp_replicate", "dp_shard")),
        "turned": mesh_of(2, 2, names=("dp_shard", "dp_replicate")),
        "part": named["shard"],
        "foreign": DeviceMesh("cpu", [[0], [1]]),
        "mixed": DeviceMesh("cpu", [[0, 2], [1, 3]]),
    }
    found = {what: error_of(lambda mesh=mesh: tiny(group=mesh)) for what, mesh in meshes.items()}
    found["no stage"] = error_of(lambda: tiny(group=named, stage=None))
    found["others"] = error_of(lambda: tiny(group=named if rank == 1 else None))
    with tiny(group=mesh_of(4)) as engine:
        found["line"] = "", str(engine.plan)
    with tiny(group=named) as engine:
        found["nodes"] = "", str(engine.plan)
    torch.distributed.destroy_process_group()
    found["gone"] = error_of(lambda: tiny(group=named))
    return found


def test_other_meshes_are_refused_by_name() -> None:
    every = run(refuse, 4)
    texts = {
        "three": "expected a mesh of one dimension, or of two, nodes and ranks of a node, but got a mesh (2, 2, 1)",
        "tensor": "got dimension tp in a mesh (2, 2) of ranks [[0, 1], [2, 3]] called ('dp', 'tp'); tensor, pipeline",
        "pipeline": "got dimension pp_outer in a mesh (2, 2, 1)",
        "turned": "pass a mesh whose first dimension replicates, and whose second one shards",
        "foreign": "expected a mesh of all 4 processes but got a mesh (2, 1) of ranks [[0], [1]]; pass the mesh that",
        "mixed": "expected ranks 0 to 3 in order, node after node, but got a mesh (2, 2) of ranks [[0, 2], [1, 3]]",
    }
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        for what, text in texts.items():
            assert found[what][0] == "ConfigError" and text in found[what][1], found[what]
        first = rank // 2 * 2
        assert f"got a mesh (2,) of ranks [{first}, {first + 1}] called ('shard',)" in found["part"][1]
        assert found["no stage"][0] == "StateError"
        assert found["gone"][0] == "StateError" and "got a DeviceMesh of one that is gone; call" in found["gone"][1]
        assert found["others"] == (
            "RanksError",
            "ranks: expected one shape but got 4 ranks on ranks 0, 2, 3, 2 nodes of 2 ranks on rank 1; pass the same "
            "group on all ranks",
        )
        assert "node" not in found["line"][1]
        assert f"rank {rank} of 4, node {rank // 2} of 2" in found["nodes"][1]


# --- failures ---------------------------------------------------------------------------------------------------------


def fail(rank: int, how: str, stage: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 2, in the second node, fail while the others go on."""

    def backward(value: float = 1.0) -> None:
        engine.backward(engine(torch.full((2, 8), value)).mean())

    with tiny(stage=stage, group=mesh_of(2, 2)) as engine:
        backward()
        assert engine.step()
        if rank == 2 and how == "forward":
            first = error_of(lambda: engine(torch.ones(2, 7)))
        elif rank == 2 and how == "elsewhere":
            first = error_of(engine.step)
        else:
            first = error_of(lambda: backward(float("nan") if rank == 2 and how == "nan" else 1.0))
        afterwards = error_of(backward)
        if afterwards[0] == "nothing":
            assert engine.step()
        return first, afterwards


@pytest.mark.parametrize(
    ("how", "stage"),
    [
        ("forward", 3),
        ("nan", 3),
        pytest.param("forward", 1, marks=pytest.mark.nightly),
        pytest.param("elsewhere", 3, marks=pytest.mark.nightly),
    ],
)
def test_what_fails_in_one_node_is_told_to_all(how: str, stage: int) -> None:
    every = run(fail, 4, how, stage)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        first, afterwards = found
        if how == "nan":
            assert first[0] == ("NonFiniteError" if rank == 2 else "RanksError") and afterwards[0] == "nothing"
            assert "rank 2" in first[1] or rank == 2
        elif how == "elsewhere":
            assert first[0] == "RanksError" and first[1] == every[0][0][1]
            assert "on ranks 0, 1, 3" in first[1] and "on rank 2" in first[1]
        elif rank == 2:
            assert first[0] == "RuntimeError" and afterwards[0] == "RanksError"
        else:
            assert first[0] == "RanksError" and first[1].startswith("rank 2: RuntimeError: ")
