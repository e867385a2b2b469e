"""Imports of old DeepSpeed scripts: each gives what does the same in one process, or an error that says what does."""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import pytest
import torch
from harness import everything_on_device
from torch import nn

from offload import deepspeed
from offload.errors import ConfigError, StateError
from offload.integrations.deepspeed import refusals

pytestmark = pytest.mark.usefixtures("single_torch_thread")

WORKS = [
    "import deepspeed.comm as dist",
    "import deepspeed.checkpointing",
    "import deepspeed.utils.logging as log",
    "from deepspeed import comm as dist, zero",
    "from deepspeed import DeepSpeedEngine, add_config_arguments, get_accelerator, init_distributed, initialize",
    "from deepspeed.accelerator import get_accelerator",
    "from deepspeed.comm import ReduceOp, all_reduce, barrier, get_rank, get_world_size, is_initialized",
    "from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam",
    "from deepspeed.ops.adagrad import DeepSpeedCPUAdagrad",
    "from deepspeed.ops.lion import DeepSpeedCPULion, FusedLion",
    "from deepspeed.runtime.dataloader import RepeatingLoader",
    "from deepspeed.runtime.engine import DeepSpeedEngine",
    "from deepspeed.runtime.lr_schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR",
    "from deepspeed.runtime.utils import see_memory_usage",
    "from deepspeed.runtime.zero import GatheredParameters, Init",
    "from deepspeed.runtime.zero.partition_parameters import GatheredParameters, Init, ZeroParamStatus",
    "from deepspeed.utils import RepeatingLoader, log_dist, logger, safe_get_full_fp32_param, set_z3_leaf_modules",
    "from deepspeed.utils.logging import log_dist, logger",
    "from deepspeed.zero import GatheredParameters, Init",
]
REFUSED = {
    "import deepspeed.pipe": "wrap an ordinary module",
    "from deepspeed.pipe import LayerSpec, PipelineModule": "wrap an ordinary module",
    "from deepspeed import PipelineModule": "wrap an ordinary module",
    "from deepspeed.runtime.pipe.topology import ProcessTopology": "wrap an ordinary module",
    "from deepspeed import DeepSpeedConfig": "deepspeed.config_from",
    "from deepspeed.runtime.config import DeepSpeedConfig": "deepspeed.config_from",
    "from deepspeed.runtime.zero.config import DeepSpeedZeroConfig": "deepspeed.config_from",
    "from deepspeed.runtime.zero.stage3 import estimate_zero3_model_states_mem_needs_all_live": "engine.plan",
    "from deepspeed.runtime.fp16.onebit.adam import OnebitAdam": "not compressed",
    "from deepspeed.moe.layer import MoE": "model's own experts",
    "from deepspeed.ops.lamb import FusedLamb": "offload.LAMB",
    "from deepspeed.ops.op_builder import CPUAdamBuilder": "built with the package",
    "from deepspeed.ops.sparse_attention import SparseSelfAttention": "own attention",
    "from deepspeed.profiling.flops_profiler import get_model_profile": "torch.profiler",
    "from deepspeed.monitor.monitor import MonitorMaster": "engine.stats",
    "from deepspeed.utils import groups": "one data-parallel group",
    "from deepspeed.utils.timer import SynchronizedWallClockTimer": "torch.profiler",
    "from deepspeed.utils.zero_to_fp32 import get_fp32_state_dict_from_zero_checkpoint": "checkpoint export",
    "from deepspeed.utils import safe_get_local_grad": "safe_get_full_",
    "from deepspeed.zero import TiledLinear": "torch.nn.Linear",
    "from deepspeed.comm import isend": "leave it out",
    "from deepspeed.checkpointing import get_cuda_rng_tracker": "torch.utils.checkpoint",
    "from deepspeed.inference.config import DeepSpeedInferenceConfig": "evaluates a model of any size",
    "from deepspeed.sequence.layer import DistributedAttention": "leave it out",
    "from deepspeed.compression.compress import init_compression": "leave it out",
}


def run(statement: str) -> dict[str, Any]:
    """Run a statement of a script in which ``deepspeed`` has become ``offload.deepspeed``; return its names."""
    names: dict[str, Any] = {}
    exec(re.sub(r"\b(import|from) deepspeed", r"\1 offload.deepspeed", statement), names)
    del names["__builtins__"]
    return names


@pytest.mark.parametrize("statement", WORKS)
def test_imports_that_work(statement: str) -> None:
    for name, value in run(statement).items():
        if name != "offload":
            assert isinstance(value, ModuleType) or value is getattr(deepspeed, name, value)


def test_each_module_is_there_once() -> None:
    for statement in WORKS:
        run(statement)
    for name, module in sys.modules.items():
        if name.startswith("offload.deepspeed."):
            assert module.__name__ == name.replace("offload.", "offload.integrations.", 1)


@pytest.mark.parametrize("statement", REFUSED)
def test_imports_that_are_refused_by_name(statement: str) -> None:
    """An error of this package, and an ``ImportError`` for scripts that can do without."""
    with pytest.raises(refusals.MissingModuleError, match=REFUSED[statement]) as caught:
        run(statement)
    assert isinstance(caught.value, ConfigError) and isinstance(caught.value, ImportError)
    assert str(caught.value).startswith("deepspeed.")


def test_an_unknown_import_says_what_there_is() -> None:
    with pytest.raises(ImportError, match=r"deepspeed has no 'initialise' here.*did you mean 'initialize'"):
        run("from deepspeed import initialise")
    with pytest.raises(ImportError, match=r"deepspeed\.ops has no 'adamm' here.*did you mean 'adam'"):
        run("import deepspeed.ops.adamm")
    with pytest.raises(ModuleNotFoundError, match="nothing_of_ours"):
        __import__("nothing_of_ours")


def test_names_answer_hasattr() -> None:
    assert not hasattr(deepspeed, "PipelineModule") and hasattr(deepspeed, "comm")
    with pytest.raises(ConfigError, match=r"deepspeed\.PipelineModule: expected one of .*; each process"):
        _ = deepspeed.PipelineModule
    assert deepspeed.__version__.split(".")[0] == "0"


@pytest.fixture
def group() -> Iterator[None]:
    deepspeed.init_distributed()
    try:
        yield
    finally:
        deepspeed.comm.destroy_process_group()
        assert not torch.distributed.is_initialized()


def collectives() -> None:
    """What each gives is what torch gives in a process group of one."""
    dist, here = deepspeed.comm, torch.arange(4.0)
    for call in (dist.all_reduce, dist.reduce, dist.broadcast):
        left = here.clone()
        assert call(left) is None and torch.equal(left, here)
        assert call(left, async_op=True).wait() and torch.equal(left, here)
    for name, given in (("all_gather", lambda to: [to]), ("all_gather_into_tensor", lambda to: to)):
        to = torch.zeros(4)
        getattr(dist, name)(given(to), here)
        assert torch.equal(to, here)
    for name in ("reduce_scatter", "scatter"):
        to = torch.zeros(4)
        getattr(dist, name)(to, [here])
        assert torch.equal(to, here)
    for name in ("reduce_scatter_tensor", "all_to_all_single"):
        to = torch.zeros(4)
        getattr(dist, name)(to, here)
        assert torch.equal(to, here)
    to = torch.zeros(4)
    dist.gather(here, [to])
    found: list[Any] = [None]
    dist.all_gather_object(found, "mine")
    dist.broadcast_object_list(found)
    assert torch.equal(to, here) and found == ["mine"]
    assert dist.gather(here) is None and dist.scatter(here) is None and torch.equal(here, torch.arange(4.0))
    dist.barrier()
    dist.monitored_barrier()
    dist.log_summary()
    assert (dist.get_rank(), dist.get_world_size(), dist.get_local_rank(), dist.get_global_rank(None, 0)) == (
        0,
        1,
        0,
        0,
    )
    assert dist.is_available() and dist.new_group([0]) is dist.get_world_group() is None
    with pytest.raises(ConfigError, match="expected 0, the only process, but got 1"):
        dist.broadcast(here, src=1)


def test_collectives_of_one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not deepspeed.comm.is_initialized()
    collectives()
    monkeypatch.setenv("WORLD_SIZE", "2")
    for call in (deepspeed.comm.get_rank, deepspeed.comm.get_world_size):
        with pytest.raises(StateError, match="WORLD_SIZE"):
            call()


@pytest.mark.usefixtures("group")
def test_collectives_of_a_group_of_one() -> None:
    assert deepspeed.comm.is_initialized()
    collectives()


def test_the_accelerator_is_the_engines_device() -> None:
    device = deepspeed.get_accelerator()
    with deepspeed.initialize(model=nn.Linear(2, 2), config={"train_batch_size": 1})[0] as engine:
        assert device.current_device_name() == str(engine.device) and device.device_name() == engine.device.type
        assert torch.device(device.device_name(0)) == engine.device
    device.set_device(0)
    device.synchronize()
    device.empty_cache()
    assert device.current_device() == 0 and device.device_count() >= 1 and device.is_available()
    assert device.communication_backend_name() in ("gloo", "nccl")
    assert device.is_bf16_supported() and device.is_fp16_supported()
    device.manual_seed_all(3)
    drawn = torch.rand(2)
    torch.manual_seed(3)
    assert torch.equal(drawn, torch.rand(2))
    with pytest.raises(ConfigError, match=r"get_accelerator\(\).total_memories: .*engine\.stats"):
        _ = device.total_memories


def test_activation_checkpointing(caplog: pytest.LogCaptureFixture) -> None:
    checkpointing = deepspeed.checkpointing
    torch.manual_seed(0)
    layer, x = nn.Linear(4, 4), torch.ones(2, 4)
    layer(x).tanh().sum().backward()
    assert layer.weight.grad is not None
    truth, calls = layer.weight.grad.clone(), []
    layer.weight.grad = None
    layer.register_forward_pre_hook(lambda *_: calls.append(1))
    checkpointing.configure(None, checkpoint_in_cpu=True, partition_activations=True)
    assert "changes no result" in caplog.text and checkpointing.is_configured()
    checkpointing.checkpoint(layer, x).tanh().sum().backward()
    checkpointing.reset()
    assert torch.equal(layer.weight.grad, truth) and len(calls) == 2
    with pytest.raises(ConfigError, match="mpu_: expected None"):
        checkpointing.configure(object())


SCRIPT = """
import argparse
import deepspeed
from deepspeed import comm as dist
from deepspeed.accelerator import get_accelerator
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
from deepspeed.runtime.lr_schedules import WarmupLR
from deepspeed.runtime.utils import see_memory_usage
from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from deepspeed.utils.logging import log_dist, logger
from torch import nn, ones

parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
parser.add_argument("--local_rank", type=int, default=-1)
args = parser.parse_args(["--deepspeed", "--local_rank", "0"])
get_accelerator().set_device(args.local_rank)
deepspeed.init_distributed()
is_offloaded = CONFIG["zero_optimization"]["offload_optimizer"]["device"] != "none"
with deepspeed.zero.Init(config_dict_or_path=CONFIG):
    model = nn.Linear(8, 8)
for parameter in model.parameters():
    assert not hasattr(parameter, "ds_id") or parameter.ds_status == ZeroParamStatus.AVAILABLE
    dist.broadcast(parameter, 0)
optimizer = (DeepSpeedCPUAdam if is_offloaded else FusedAdam)(model.parameters(), lr=1e-2)
schedule = WarmupLR(optimizer, warmup_max_lr=1e-2, warmup_num_steps=2)
engine, optimizer, _, schedule = deepspeed.initialize(
    args=args, model=model, optimizer=optimizer, lr_scheduler=schedule, config=CONFIG, dist_init_required=False
)
see_memory_usage("ready", force=True)
for _ in range(5):  # the warm-up's first two rates are 0
    loss = engine(ones(2, 8).to(get_accelerator().current_device_name())).square().mean()
    engine.backward(loss)
    engine.step()
    total = loss.detach().clone()
    dist.all_reduce(total, op=dist.ReduceOp.AVG)
    if dist.get_rank() == 0:
        log_dist(f"loss {total.item() / dist.get_world_size()}", ranks=[0])
dist.barrier()
last = total.item()
engine.destroy()
dist.destroy_process_group()
"""


def test_a_script_of_the_wild(caplog: pytest.LogCaptureFixture) -> None:
    """As people write them, with the module's name changed alone."""
    offload_section = {key: value for key, value in everything_on_device().items() if key != "device"}
    config = {
        "train_batch_size": 2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "offload": {**offload_section, "device": "cpu"},
    }
    text = re.sub(r"^from deepspeed", "from offload.deepspeed", SCRIPT, flags=re.MULTILINE)
    names: dict[str, Any] = {"CONFIG": config}
    with caplog.at_level("INFO", "offload.deepspeed"):
        exec(text.replace("import deepspeed\n", "from offload import deepspeed\n"), names)
    said = [record.getMessage() for record in caplog.records if record.name == "offload.deepspeed"]
    losses = [float(line.split()[1]) for line in said if line.startswith("loss ")]
    assert any(line.startswith("ready: resident set ") for line in said)
    assert len(losses) == 5 and losses[4] == names["last"] < losses[0]
