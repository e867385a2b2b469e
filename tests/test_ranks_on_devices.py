"""Several ranks, each with an accelerator of its own, here a simulated one: the bits of one process on the CPU."""

from __future__ import annotations

import math
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_hybrid
import test_rank_lamb
import test_rank_sleeping
import test_stage_2
import test_stage_3
import torch
from several_ranks import Ended, Raised, run
from simulated import EAGER, LAZY, CannotBuild, Schedule, at_random, first, fixed, load, running
from simulated.build import library
from simulated.instead import MOVER_STREAMS
from test_rank_checkpoint_errors import error_of
from test_stage_1 import CLIP, STEPS, batch, check_bits, options, result, smallest, steps
from test_stage_3 import WORLD
from torch import nn

from offload import AdamW, Engine, NonFiniteError

MIB = 1 << 20
HOMES = {  # of parameters, gradients and states: the slowest of all units
    "device": ("Tier.DEVICE", "Tier.HOST", "Tier.HOST"),
    "host": ("Tier.HOST", "Tier.HOST", "Tier.HOST"),
    "nvme": ("Tier.NVME", "Tier.HOST", "Tier.NVME"),
    "spill": ("Tier.NVME", "Tier.NVME", "Tier.NVME"),
}


@pytest.fixture(autouse=True, scope="module")
def built() -> None:
    """Build the simulated accelerator once, not in each rank. No test here has it in its own process."""
    try:
        library()
    except CannotBuild as missing:
        pytest.skip(f"no simulated accelerator: {missing}")


def train(
    rank: int, world: int, micro_batches: int, name: str, path: str, stage: int | None, schedule: Schedule | None
) -> dict[str, Any]:
    """Train on this rank's share of the micro-batches, on a device under a schedule or on the CPU."""
    settings = options(name, path) | {"gradient_accumulation_steps": micro_batches // world, "stage": stage}
    if schedule is None:
        return steps(rank, world, micro_batches, name, settings)
    load()
    settings["device"] = "sim:1" if rank == 1 else "sim"
    if stage == 3 or not name.endswith("device"):
        # Units leave it, and others come in their place; of the wide ones in float32, five of 1.5 MiB have to fit.
        mib = 3 if not name.endswith("spill") else 9 if name.startswith("float32") else 4
        settings["max_memory"]["device"] = mib * MIB
        settings["activation_memory"] = "1MiB"
    if name.endswith("spill"):
        settings["max_memory"]["cpu"] = smallest(name, settings)
    with running(schedule) as seen:
        found = steps(rank, world, micro_batches, name, settings)
    return found | {"races": seen.races[:3]}


def check(micro_batches: int, name: str, tmp_path: Path, *cases: tuple[int, Schedule]) -> None:
    (one,) = run(train, 1, 1, micro_batches, name, str(tmp_path), None, None)
    assert all(math.isfinite(norm) and norm > CLIP for norm in one["norms"]), one["norms"]  # clipping is active
    for stage, schedule in cases:
        every = run(train, WORLD, WORLD, micro_batches, name, str(tmp_path), stage, schedule)
        check_bits(one, every)
        home = "host" if stage == 3 and name.endswith("device") else name.split("-")[2]
        assert [found["homes"] for found in every] == [HOMES[home]] * WORLD
        assert [found["races"] for found in every] == [[]] * WORLD


def train_in_nodes(
    rank: int, shape: test_hybrid.Shape, name: str, path: str, stage: int, schedule: Schedule
) -> dict[str, Any]:
    """Train as `test_hybrid.train` does, on a device."""
    load()
    device = torch.device("sim:1" if rank == 1 else "sim")
    losses, norms, world = [], [], math.prod(shape)
    more = {"device": device, "stage": stage, "group": test_hybrid.mesh_of(*shape)}
    with running(schedule) as seen, test_hybrid.engine_of(name, path, 1, **more) as engine:
        for step in range(STEPS):
            tokens, expert = batch(step * world + rank)
            loss = engine(tokens.to(engine.device), expert)
            engine.backward(loss)
            losses.append(loss.item())
            engine.step()
            norms.append(engine.grad_norm)
        engine._life.require_open().check()
        found = result(engine, losses, norms)
    assert seen.races == []
    return found


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_nodes_of_ranks_on_devices_are_those_of_ranks_on_cpus(stage: int, tmp_path: Path) -> None:
    shape, name = (2, 2), "bfloat16-float32-host"
    on_cpus = run(test_hybrid.train, 4, shape, 1, name, str(tmp_path), stage)
    on_devices = run(train_in_nodes, 4, shape, name, str(tmp_path), stage, LAZY)
    for there, here in zip(on_devices, on_cpus, strict=True):
        assert not isinstance(there, (Raised, Ended)), there
        assert all(there[kind] == here[kind] for kind in ("losses", "norms", "parameters", "states"))


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("stage", "micro_batches", "name", "schedule"),
    [
        (3, 6, "bfloat16-float32-nvme", first(1)),
        (1, 3, "float32-float32-device", LAZY),
        (2, 6, "bfloat16-int8-host", EAGER),
        (3, 3, "float32-float32-host", LAZY),
    ],
)
def test_ranks_on_devices_are_one_process(
    stage: int, micro_batches: int, name: str, schedule: Schedule, tmp_path: Path
) -> None:
    check(micro_batches, name, tmp_path, (stage, schedule))


@pytest.mark.nightly
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtypes", ["float32-float32", "bfloat16-int8", "float16-bfloat16"])
def test_ranks_on_devices_are_one_process_under_all_schedules(dtypes: str, home: str, tmp_path: Path) -> None:
    cases = [(stage, schedule) for stage in (1, 2, 3) for schedule in fixed(MOVER_STREAMS)]
    check(6, f"{dtypes}-{home}", tmp_path, *cases)


# --- what other files show of ranks on CPUs ---------------------------------------------------------------------------


def on_device(rank: int, case: Callable[..., Any], schedule: Schedule, *args: Any) -> tuple[Any, list[str]]:
    """Be a rank of another file's test, with engines on the simulated device; return what it does, and races."""
    from simulated import instead

    instead.install()
    with running(schedule) as seen:
        found = case(rank, *args)
    return found, seen.races[:3]


def run_on_devices(case: Callable[..., Any], schedule: Schedule, *args: Any) -> list[Any]:
    every = run(on_device, WORLD, case, schedule, *args)
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found[1] == []
    return [found for found, _ in every]


@pytest.mark.nightly
@pytest.mark.parametrize("schedule", [LAZY, at_random(3)])
def test_ranks_on_devices_may_use_different_modules(schedule: Schedule) -> None:
    """And evaluate, read, write, load and close, with slices of parameters."""
    (one,) = run(test_stage_3.wander, 1, 1, {})
    for found in run_on_devices(test_stage_3.wander, schedule, WORLD, {"stage": 3}):
        assert found["others"] > 0
        assert all(one["losses"][number] == loss for number, loss in found["losses"].items())
        assert found["parameters"] == found["closed"] == one["parameters"]


@pytest.mark.parametrize("stage", [3, *(pytest.param(stage, marks=pytest.mark.nightly) for stage in (1, 2))])
def test_ranks_on_devices_may_meet_units_in_other_orders(stage: int) -> None:
    """With overflows, too, after which all of them skip the step."""
    options = "float16", 6 << 20, 2.0**18
    (one,) = run(test_stage_2.train, 1, 1, None, *options)
    for rank, found in enumerate(run_on_devices(test_stage_2.train, LAZY, WORLD, stage, *options)):
        assert found["losses"] == one["losses"][rank::WORLD]
        assert str(found["norms"]) == str(one["norms"])  # NaN is NaN
        assert found["scales"] == one["scales"] and found["parameters"] == one["parameters"]


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.nightly), 3])
def test_what_ranks_on_devices_take_and_send_is_as_planned(stage: int) -> None:
    for found in run_on_devices(test_stage_3.measure, LAZY, stage, "256MiB", "24MiB", 5):
        moved, planned = min(found["wire"]), found["planned"]  # a rank that waits for room gathers for others, too
        assert abs(moved - planned) <= 0.01 * planned, found
        assert all(peak <= size for peak, size in found["peaks"]), found["peaks"]


def test_auto_lets_gradients_leave_beside_backward_on_devices() -> None:
    """Where whole parameters fit, that is stage 2; else it is 3 there, too."""
    for found in run_on_devices(test_stage_3.choose, LAZY, "11MiB"):
        assert [one["stage"] for one in found] == [2, 3]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("name", ["float32-float32-device", "bfloat16-bfloat16-nvme"])
def test_ranks_on_devices_sleep(name: str, stage: int, tmp_path: Path) -> None:
    (one,) = run(test_rank_sleeping.train, 1, 1, name, str(tmp_path), stage, None)
    losses: dict[int, float] = {}
    for found in run_on_devices(test_rank_sleeping.train, LAZY, WORLD, name, str(tmp_path), stage, True):
        losses |= found.pop("losses")
        assert found == {key: value for key, value in one.items() if key != "losses"}
    assert losses == one["losses"]


@pytest.mark.nightly
@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_on_devices_have_lamb_and_checkpoints(stage: int, tmp_path: Path) -> None:
    """A checkpoint of theirs goes on in one process on the CPU, and one of its in theirs."""
    name, found = "bfloat16-float32-nvme", []
    for saved, turns in (("one", (1, 1, 1)), ("mixed", (WORLD, 1, WORLD))):
        for world in turns:
            args = world, name, str(tmp_path), stage, str(tmp_path / saved)
            every = (
                run(test_rank_lamb.train, 1, *args) if world == 1 else run_on_devices(test_rank_lamb.train, LAZY, *args)
            )
            found.append([{key: each[key] for key in ("norms", "digests")} for each in every])
    assert all(each == one[0] for one, mixed in zip(found[:3], found[3:], strict=True) for each in mixed)


# --- what is refused --------------------------------------------------------------------------------------------------


def refuse(rank: int) -> dict[str, tuple[str, str]]:
    load()
    uuids = ["GPU-a", "GPU-b", "GPU-a"]
    module = torch.get_device_module("sim")
    module.get_device_properties = lambda device: types.SimpleNamespace(uuid=uuids[rank])

    def make(**more: Any) -> None:
        torch.manual_seed(0)
        options = {"device": "sim", "max_memory": {"device": "8MiB", "cpu": "8MiB"}, "stage": 1} | more
        with Engine(nn.Linear(8, 8), AdamW(), **options) as engine:
            spoilt = torch.full((2, 8), math.nan if rank == 1 else 1.0, device="sim")
            engine.backward(engine(spoilt).mean())  # nobody looks at a loss on a device
            with pytest.raises(NonFiniteError, match="expected finite values but got NaN"):
                engine.step()
            engine.backward(engine(torch.ones(2, 8, device="sim")).mean())
            assert engine.step()

    found = {"same": error_of(make)}
    uuids[2] = "GPU-c"
    found["other"] = error_of(make)
    found["kinds"] = error_of(lambda: make(device="cpu" if rank == 1 else "sim"))
    found["states"] = error_of(lambda: make(offload_optimizer="none"))
    found["slices"] = error_of(lambda: make(offload_param="none", stage=3))
    found["whole"] = error_of(lambda: make(offload_param="none", stage=2))
    return found


def test_what_ranks_on_devices_cannot_have_is_refused_on_all() -> None:
    for found in run(refuse, WORLD):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["other"] == found["whole"] == ("nothing", "")
        kind, text = found["same"]
        assert kind == "RanksError" and "ranks 0 and 2 have the same" in text and "torch.sim.set_device" in text
        assert found["kinds"][0] == "RanksError" and "the kind of device" in found["kinds"][1]
        assert (
            found["states"][0] == "ConfigError" and "several ranks, which update in host memory" in found["states"][1]
        )
        assert found["slices"][0] == "ConfigError" and "ranks send them from host memory" in found["slices"][1]
