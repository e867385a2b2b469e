"""DeepSpeed ZeRO-3 with offloading on a CPU, as a peer of bench/step.py; only where deepspeed can be imported."""

from __future__ import annotations

import importlib.util
import logging
import os
import time
from types import ModuleType
from typing import Any

import torch

PLACEMENTS = {"DeepSpeed, cpu": ("cpu", "cpu"), "DeepSpeed, nvme": ("nvme", "nvme")}  # of parameters and states


def available() -> bool:
    """Tell whether deepspeed is installed."""
    return importlib.util.find_spec("deepspeed") is not None


def _begun() -> ModuleType:
    """Return deepspeed, as the only rank."""
    os.environ.update(DS_ACCELERATOR="cpu", RANK="0", LOCAL_RANK="0", WORLD_SIZE="1")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=os.environ.get("MASTER_PORT", "29517"))
    import deepspeed

    logging.getLogger("DeepSpeed").setLevel(logging.ERROR)
    deepspeed.init_distributed(dist_backend="gloo", verbose=False)
    return deepspeed


def checkpoint_blocks(model: torch.nn.Module) -> None:
    """Let a model of transformers checkpoint its blocks by DeepSpeed.

    Its `checkpoint_in_cpu` fails where the device is the CPU (0.19.8): it takes the memory of what it has not copied.
    """
    deepspeed = _begun()
    deepspeed.checkpointing.configure(None)
    checkpoint = deepspeed.checkpointing.checkpoint
    model._set_gradient_checkpointing(enable=True, gradient_checkpointing_func=checkpoint)  # type: ignore[operator]


def configuration(placement: str, path: str, largest_numel: int, max_grad_norm: float) -> dict[str, Any]:
    """Return the configuration of a run with clipping, states and parameters offloaded as `placement` says."""
    param, states = PLACEMENTS[placement]
    offload_param: dict[str, Any] = {"device": param}
    offload_optimizer: dict[str, Any] = {"device": states}
    stage: dict[str, Any] = {"stage": 3, "offload_param": offload_param, "offload_optimizer": offload_optimizer}
    if param == "nvme":
        # with the defaults all parameters stay gathered, and their swap buffers occupied: it stops for want of one
        stage |= {"stage3_max_live_parameters": largest_numel, "stage3_max_reuse_distance": largest_numel}
        stage |= {"stage3_prefetch_bucket_size": largest_numel // 4}
        offload_param |= {"nvme_path": path, "buffer_count": 5, "buffer_size": largest_numel, "max_in_cpu": 0}
    if states == "nvme":
        offload_optimizer |= {"nvme_path": path, "buffer_count": 4, "pipeline_read": True, "pipeline_write": True}
    return {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_clipping": max_grad_norm,
        "bf16": {"enabled": True},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "weight_decay": 0.1}},
        "zero_optimization": stage,
        "aio": {"block_size": 1 << 20, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": False},
        "steps_per_print": 1 << 30,
    }


def run(
    model: torch.nn.Module, data: list[dict[str, Any]], placement: str, path: str, max_grad_norm: float
) -> tuple[list[float], list[float]]:
    """Train with DeepSpeed; returns seconds and losses per step."""
    deepspeed = _begun()
    largest = max(parameter.numel() for parameter in model.parameters())
    options = configuration(placement, path, largest, max_grad_norm)
    engine, *_ = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=options)
    seconds, losses = [], []
    for batch in data:
        begin = time.perf_counter()
        loss = engine(**batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
        seconds.append(time.perf_counter() - begin)
    return seconds, losses
