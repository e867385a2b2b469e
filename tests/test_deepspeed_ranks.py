"""DeepSpeed's scripts in several processes: the bits of one process that accumulates as many micro-batches."""

from __future__ import annotations

import gc
import logging
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_deepspeed import CONFIG, ROOT, WIDTH, tower

from offload import deepspeed
from offload.errors import ConfigError

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD, STEPS, MICRO = 3, 4, 4
BUDGETS = {"device": "cpu", "max_memory": {"device": "32MiB", "cpu": "32MiB"}, "unit_bytes": 8 << 10}
HALF = {"fp16": {"enabled": True, "initial_scale_power": 4}}


def homes(tier: str, path: str) -> dict[str, Any]:
    there = {"device": tier, "nvme_path": path} if tier == "nvme" else {"device": tier}
    return {"offload_param": there, "offload_optimizer": there}


def configuration(world: int, stage: int, path: str, tier: str, more: dict[str, Any]) -> dict[str, Any]:
    """Return a configuration of six micro-batches a step, whatever the world is."""
    zero = {"stage": stage, **homes(tier, path)}
    accumulation = 2 * WORLD // world
    sizes = {"train_batch_size": MICRO * 2 * WORLD, "gradient_accumulation_steps": accumulation}
    return {**CONFIG, **sizes, "train_micro_batch_size_per_gpu": MICRO, "zero_optimization": zero, **more}


def batch(number: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(MICRO, WIDTH, generator=torch.Generator().manual_seed(number)).to(dtype)


def bits(tensors: dict[str, torch.Tensor]) -> dict[str, bytes]:
    return {name: tensor.reshape(-1).view(torch.uint8).numpy().tobytes() for name, tensor in tensors.items()}


def train(
    rank: int, world: int, stage: int, path: str, tier: str, more: dict[str, Any], first: int, last: int
) -> dict[str, Any]:
    """Load what was saved, if there are steps before; take steps [first, last), and save."""
    engine, _, _, schedule = deepspeed.initialize(
        model=tower(), config=configuration(world, stage, path, tier, more), **BUDGETS
    )
    if first:
        folder, state = engine.load_checkpoint(f"{path}/saved")
        assert folder is not None and state == {"steps": first}
    dtype = next(engine.module.parameters()).dtype
    losses, norms, rates = {}, [], []
    for step in range(first, last):
        for micro in range(engine.gradient_accumulation_steps()):
            number = step * 2 * WORLD + micro * world + rank
            loss = engine(batch(number, dtype)).loss
            engine.backward(loss)
            engine.step()
            losses[number] = loss.item()
        norms.append(engine.get_global_grad_norm())
        rates.append(engine.get_lr())
    assert (engine.global_rank, engine.world_size, engine.dp_world_size) == (rank, world, world)
    assert (deepspeed.comm.get_rank(), deepspeed.comm.get_world_size()) == (rank, world)
    assert engine.train_batch_size() == MICRO * 2 * WORLD and engine.zero_optimization_stage() == stage
    assert engine.plan.request.stage == (max(stage, 1) if world > 1 else engine.plan.request.stage)
    engine.save_checkpoint(f"{path}/saved", client_state={"steps": last})
    engine.save_16bit_model(f"{path}/weights")
    weight = engine.module.layers[1].weight
    assert engine.optimizer is not None
    found = {
        "losses": losses,
        "shared": (norms, rates, engine.global_steps, engine.global_samples, engine.skipped_steps, schedule.get_lr()),
        "parameters": bits(engine.state_dict()),
        "states": {
            number: bits({name: value for name, value in state.items() if isinstance(value, torch.Tensor)})
            for number, state in engine.optimizer.state_dict()["state"].items()
        },
        "full": bits(
            {
                "master": deepspeed.utils.safe_get_full_fp32_param(weight),
                "exp_avg": deepspeed.utils.safe_get_full_optimizer_state(weight, "exp_avg"),
            }
        ),
    }
    engine.destroy()
    return found


def whole(*given: Any) -> dict[str, Any]:
    (found,) = run(train, 1, 1, *given)
    assert isinstance(found, dict), found
    return found


def joined(every: list[Any]) -> dict[str, Any]:
    """Return what all ranks have found, who agree where they have to."""
    losses: dict[int, float] = {}
    for found in every:
        assert isinstance(found, dict), every
        losses |= found["losses"]
        assert {**found, "losses": None} == {**every[0], "losses": None}
    return {**every[0], "losses": losses}


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("stage", "tier", "more"),
    [
        (3, "nvme", HALF),
        (2, "cpu", {"bf16": {"enabled": True}}),
        (1, "none", {}),
        pytest.param(0, "cpu", HALF, marks=pytest.mark.nightly),
        pytest.param(3, "cpu", {}, marks=pytest.mark.nightly),
        pytest.param(1, "nvme", {"bf16": {"enabled": True}}, marks=pytest.mark.nightly),
    ],
)
def test_ranks_have_the_bits_of_one_process(stage: int, tier: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Half of the steps, a checkpoint, and the other half in as many processes; then in one."""
    folders = [tmp_path / name for name in ("one", "three")]
    for folder in folders:
        folder.mkdir()
    one = whole(stage, str(folders[0]), tier, more, 0, STEPS)
    given = (WORLD, stage, str(folders[1]), tier, more)
    first = joined(run(train, WORLD, *given, 0, STEPS // 2))
    second = joined(run(train, WORLD, *given, STEPS // 2, STEPS))
    assert {**first["losses"], **second["losses"]} == one["losses"]
    assert first["shared"][0] + second["shared"][0] == one["shared"][0]
    assert second["shared"][2:] == one["shared"][2:]
    assert {**second, "losses": None, "shared": None} == {**one, "losses": None, "shared": None}
    saved = [torch.load(folder / "weights" / "pytorch_model.bin") for folder in folders]
    assert bits(saved[0]) == bits(saved[1]) == one["parameters"]
    alone = whole(1, str(folders[1]), "cpu", more, STEPS, STEPS)  # loads what three have saved
    assert alone["parameters"] == one["parameters"] and alone["states"] == one["states"]


@pytest.mark.parametrize(("stage", "tier", "more"), [(3, "nvme", HALF), (1, "cpu", {})])
def test_other_numbers_of_processes_go_on(stage: int, tier: str, more: dict[str, Any], tmp_path: Path) -> None:
    """Two processes save in the middle; one, and three, take the other half of the steps."""
    two, others = tmp_path / "two", {world: tmp_path / f"on {world}" for world in (1, 3)}
    (tmp_path / "whole").mkdir()
    two.mkdir()
    truth = whole(stage, str(tmp_path / "whole"), tier, more, 0, STEPS)
    joined(run(train, 2, 2, stage, str(two), tier, more, 0, STEPS // 2))
    for world, folder in others.items():
        folder.mkdir()
        shutil.copytree(two / "saved", folder / "saved")
        found = joined(run(train, world, world, stage, str(folder), tier, more, STEPS // 2, STEPS))
        assert found["losses"].items() <= truth["losses"].items() and len(found["losses"]) == WORLD * STEPS
        assert found["shared"][0] == truth["shared"][0][STEPS // 2 :] and found["shared"][2:] == truth["shared"][2:]
        assert all(found[name] == truth[name] for name in ("parameters", "states", "full"))


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def use(rank: int, path: str) -> dict[str, Any]:
    """Go through a script: the launcher's process group, a loader, collectives, a parameter that one writes."""
    store = torch.distributed.distributed_c10d._get_default_store()
    while isinstance(store, torch.distributed.PrefixStore):
        store = store.underlying_store
    torch.distributed.destroy_process_group()
    launcher = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": WORLD, "MASTER_ADDR": "127.0.0.1"}
    launcher |= {"MASTER_PORT": store.port, "TORCHELASTIC_USE_AGENT_STORE": True}
    os.environ.update({name: str(value) for name, value in launcher.items()})
    kept = Lines()
    for name in ("offload.deepspeed", "offload.integrations.deepspeed.engine"):
        logging.getLogger(name).addHandler(kept)
        logging.getLogger(name).setLevel(logging.INFO)
    found: dict[str, Any] = {}
    data = torch.utils.data.TensorDataset(torch.arange(float(10 * WIDTH)).view(10, WIDTH))
    config = {**CONFIG, "train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "steps_per_print": 2}
    config["zero_optimization"] = {"stage": 3}
    engine, _, made, _ = deepspeed.initialize(model=tower(), config=config, training_data=data, **BUDGETS)
    assert deepspeed.comm.is_initialized() and engine.local_rank == rank
    assert made is not None and (made.sampler.rank, made.sampler.num_replicas) == (rank, WORLD)  # type: ignore
    loader = engine.deepspeed_io(data, num_local_io_workers=0)
    found["samples"] = [int(rows[0, 0]) // WIDTH for (rows,) in loader]
    for number in range(2):
        engine.backward(engine(batch(number * WORLD + rank, torch.float32)[:1]).loss)
        engine.step()
    found["lines"] = [line.split("=")[0].split(":")[0] for line in kept.lines]
    total = torch.tensor([float(rank)])
    deepspeed.comm.all_reduce(total)
    rows = torch.zeros(WORLD)
    deepspeed.comm.all_gather(list(rows.split(1)), torch.tensor([float(rank)]))
    deepspeed.comm.broadcast(tensor=total, src=1)
    deepspeed.comm.barrier()
    found["comm"] = (total.item(), rows.tolist(), deepspeed.comm.get_global_rank(None, 2))
    bias = engine.module.layers[0].bias
    with deepspeed.zero.GatheredParameters(bias, modifier_rank=1):
        if rank == 1:
            torch.nn.init.constant_(bias, 7.0)
    with deepspeed.zero.GatheredParameters([bias]):
        found["bias"] = bias.detach().tolist()
    deepspeed.utils.safe_set_full_optimizer_state(bias, torch.full((WIDTH,), 3.0), "exp_avg")
    state = deepspeed.utils.safe_get_full_optimizer_state(bias, "exp_avg")
    assert state is not None
    found["state"] = state.tolist()
    consolidated = engine._zero3_consolidated_16bit_state_dict()
    found["consolidated"] = None if consolidated is None else sorted(consolidated)
    found["names"] = sorted(name for name, _ in engine.module.named_parameters())
    for name, call in refused(engine, bias, path).items():
        try:
            call(rank)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    engine.backward(engine(batch(rank, torch.float32)[:1]).loss)
    engine.step()
    found["steps"] = engine.global_steps
    engine.destroy()
    return found


def refused(engine: deepspeed.DeepSpeedEngine, bias: Any, path: str) -> dict[str, Any]:
    def fail_inside(rank: int) -> None:
        with deepspeed.zero.GatheredParameters(bias, modifier_rank=0):
            if rank == 0:
                raise ValueError("no weights there")

    def save_nowhere(rank: int) -> None:
        Path(path, "file").write_text("", encoding="utf-8")
        engine.save_16bit_model(Path(path, "file"))

    def save_over(rank: int) -> None:
        Path(path, "over", "pytorch_model.bin").mkdir(parents=True, exist_ok=True)
        engine.save_16bit_model(Path(path, "over"))

    def other_sizes(rank: int) -> None:
        deepspeed.config_from({"train_batch_size": 8, "train_micro_batch_size_per_gpu": 2})

    def imported(rank: int) -> None:
        engine.import_checkpoint(path)

    calls = {"inside": fail_inside, "nowhere": save_nowhere, "over": save_over, "sizes": other_sizes}
    return {**calls, "imported": imported}


def test_a_script_of_several_processes(tmp_path: Path) -> None:
    every = run(use, WORLD, str(tmp_path))
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["comm"] == (3.0, [0.0, 1.0, 2.0], 2)
        assert found["bias"] == [7.0] * WIDTH and found["state"] == [3.0] * WIDTH
        assert found["steps"] == 3 and found["consolidated"] == (found["names"] if rank == 0 else None)
        assert found["lines"] == (["configuration", "plan", "step"] if rank == 0 else [])
        others = "" if rank == 0 else "RanksError: rank 0: "
        assert found["inside"] == others + "ValueError: no weights there"
        assert found["nowhere"].startswith(others + "FileExistsError" if rank else "FileExistsError")
        assert found["over"].startswith(others + "ConfigError: save_16bit_model: expected the path of a file")
        assert "gradient_accumulation_steps * 3 processes but got 8 != 2 * 1 * 3" in found["sizes"]
        assert "expected a file of torch.save" in found["imported"]
    order = list(torch.utils.data.DistributedSampler(range(10), num_replicas=1, rank=0))  # type: ignore[arg-type]
    padded = order + order[:2]
    assert [found["samples"] for found in every] == [padded[rank::WORLD] for rank in range(WORLD)]


def evaluate(rank: int, path: str) -> dict[str, Any]:
    """Evaluate other numbers of batches on each rank, and load the weights of another optimizer's run."""
    sizes = {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 1, "train_batch_size": WORLD}
    config = {**CONFIG, **sizes, "zero_optimization": {"stage": 3, **homes("nvme", path)}}
    found: dict[str, Any] = {}
    deepspeed.init_distributed()
    everyone = torch.distributed.new_group()  # another object than that of all
    for type_ in ("AdamW", "Lion"):
        optimizer = {"type": type_, "params": {"lr": 1e-3}}
        engine = deepspeed.initialize(model=tower(), config={**config, "optimizer": optimizer}, **BUDGETS)[0]
        engine.backward(engine(batch(rank, torch.float32)[:1]).loss)
        engine.step()
        if found:
            engine.load_checkpoint(f"{path}/saved", load_module_only=True)
        else:
            engine.save_checkpoint(f"{path}/saved")
        with torch.no_grad():
            losses = [engine(batch(10, torch.float32)[:1]).loss for _ in range(1 + rank)]
        total = losses[-1].clone()
        deepspeed.comm.all_reduce(total)
        if rank == 0:  # alone
            with torch.no_grad():
                engine(batch(11, torch.float32)[:1])
        deepspeed.comm.barrier(group=everyone)
        found[type_] = (total.item(), engine.global_steps, bits(engine.state_dict()))
        if type_ == "AdamW":  # the next engine comes while some processes have this one still
            del engine
            gc.disable() if rank else gc.collect()
        else:
            gc.enable()
            engine.destroy()
    return found


def test_processes_evaluate_other_numbers_of_batches(tmp_path: Path) -> None:
    every = run(evaluate, WORLD, str(tmp_path))
    assert all(isinstance(found, dict) for found in every), every
    assert every[0] == every[1] == every[2] and every[0]["AdamW"] == every[0]["Lion"]


def test_sizes_of_several_processes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "3")
    for given, expected in (
        ({"train_batch_size": 24}, (24, 8, 1)),
        ({"train_batch_size": 24, "gradient_accumulation_steps": 2}, (24, 4, 2)),
        ({"train_batch_size": 24, "train_micro_batch_size_per_gpu": 2}, (24, 2, 4)),
        ({"train_micro_batch_size_per_gpu": 2}, (6, 2, 1)),
    ):
        found = deepspeed.config_from(given).batch
        assert (found.train, found.micro, found.accumulation, found.world) == (*expected, 3)
    for refused in (
        {"train_batch_size": 4},
        {"train_batch_size": 24, "gradient_accumulation_steps": 5},
        {"train_batch_size": 2},
    ):
        with pytest.raises(ConfigError, match="train_batch_size: expected .* 3 processes"):
            deepspeed.config_from(refused)
    assert deepspeed.config_from({"train_batch_size": 3}).slices == 1
    assert deepspeed.config_from({"train_batch_size": 3, "zero_optimization": {"stage": 3}}).slices == 3


@pytest.mark.nightly
def test_the_example_under_torchrun(tmp_path: Path) -> None:
    environment = os.environ | {"OMP_NUM_THREADS": "1", "OMP_WAIT_POLICY": "PASSIVE", "GLOO_SOCKET_IFNAME": "lo"}
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    example = [str(ROOT / "examples" / "deepspeed_after.py"), "--checkpoints", str(tmp_path)]
    done = subprocess.run([*torchrun, *example], env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "latest").read_text(encoding="utf-8").strip() == "global_step16"
    files = {file.name for file in (tmp_path / "global_step16").iterdir()}
    assert {"index.json", "values-of-rank-0.safetensors", "values-of-rank-1.safetensors"} <= files
