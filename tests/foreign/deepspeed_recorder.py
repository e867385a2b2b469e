"""Records the checkpoints of DeepSpeed that tests/test_import_zero.py reads. Not part of the tests: they need none.

The recording is ``deepspeed.tar.xz`` beside this file. To renew it, in an environment that has DeepSpeed as well::

    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node 1 tests/foreign/deepspeed_recorder.py WORK
    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node 2 tests/foreign/deepspeed_recorder.py WORK
    DS_ACCELERATOR=cpu python -m torch.distributed.run --nproc-per-node 3 tests/foreign/deepspeed_recorder.py WORK
    tar -cJf tests/foreign/deepspeed.tar.xz --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C WORK .

Each folder ``zero<stage>-<dtype>-x<ranks>`` holds what ``save_checkpoint`` wrote after three steps, without the
scripts, and ``expected.safetensors``: what DeepSpeed itself says of each parameter then (``before``), and after three
further steps (``after``). All ranks see the same batches, so that one process can repeat the steps.
"""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import nn

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}
STEPS = 3
LR, DECAY = 1e-2, 0.1


class Net(nn.Module):
    """Tied, frozen and odd-sized parameters, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(8, 8, bias=False)
        self.hidden = nn.Linear(8, 5)
        self.frozen = nn.Linear(5, 5)
        self.norm = nn.LayerNorm(5)
        self.back = nn.Linear(5, 8)
        self.head = nn.Linear(8, 8, bias=False)
        self.head.weight = self.embed.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.tensor(0.5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(self.frozen(self.hidden(self.embed(x)).tanh()))
        out: torch.Tensor = self.head(self.back(x)) * self.scale.to(x.dtype)
        return out


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Return two param groups: matrices decay, the others do not."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1], "weight_decay": DECAY},
        {"params": [p for p in trained if p.ndim <= 1], "weight_decay": 0.0},
    ]


def batch(number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the input of a step."""
    return torch.randn(2, 8, generator=torch.Generator().manual_seed(number)).to(dtype)


def loss_of(forward: Any, number: int, dtype: torch.dtype) -> torch.Tensor:
    """Return the loss of a step."""
    loss: torch.Tensor = forward(batch(number, dtype)).float().sub(1).pow(2).mean()
    return loss


def record(stage: int, dtype: str, folder: Path) -> None:
    """Train, save, train on; the first rank writes what is expected."""
    import deepspeed
    from deepspeed.utils import safe_get_full_fp32_param, safe_get_full_optimizer_state

    def look(engine: Any, when: str) -> dict[str, torch.Tensor]:
        found = {}
        if stage < 3:  # it links the states when the first group has stepped: those of the others are missing
            engine.optimizer._hp_optimizer_states_linked = False
            engine.optimizer._lazy_init_hp_params_optimizer_state()
        for name, p in engine.module.named_parameters():
            if p.requires_grad:
                found[f"{when}:master:{name}"] = safe_get_full_fp32_param(p).clone()
                for state in ("exp_avg", "exp_avg_sq"):
                    found[f"{when}:{state}:{name}"] = safe_get_full_optimizer_state(p, state).clone()
            with deepspeed.zero.GatheredParameters([p], enabled=stage == 3):
                found[f"{when}:weight:{name}"] = p.detach().clone()
        return {key: value.detach().view(-1).contiguous() for key, value in found.items()}

    torch.manual_seed(0)
    model = Net()
    config: dict[str, Any] = {
        "train_micro_batch_size_per_gpu": 2,
        "zero_optimization": {
            "stage": stage,
            "stage3_param_persistence_threshold": 0,
            "sub_group_size": 20 if torch.distributed.get_world_size() == 3 else 10**9,  # several flat groups in ZeRO-3
        },
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 1000,
    }
    if dtype == "bf16":
        config["bf16"] = {"enabled": True}
    elif dtype == "fp16":
        config["fp16"] = {"enabled": True, "initial_scale_power": 8, "loss_scale_window": 100}
    optimizer = torch.optim.AdamW(groups_of(model), lr=LR)
    engine, *_ = deepspeed.initialize(model=model, optimizer=optimizer, config=config)

    def train(numbers: range) -> None:
        for number in numbers:
            engine.backward(loss_of(engine, number, DTYPES[dtype]))
            engine.step()

    train(range(STEPS))
    engine.save_checkpoint(str(folder))
    expected = look(engine, "before")
    train(range(STEPS, 2 * STEPS))
    expected |= look(engine, "after")
    if torch.distributed.get_rank() == 0:
        facts = {"deepspeed": deepspeed.__version__, "torch": torch.__version__}
        save_file(expected, str(folder / "expected.safetensors"), {"facts": json.dumps(facts)})
        for script in ("zero_to_fp32.py", "zero_to_torch.py"):
            (folder / script).unlink(missing_ok=True)
    torch.distributed.barrier()
    engine.destroy()


def main() -> None:
    """Record every stage and dtype for this number of ranks."""
    import deepspeed

    torch.set_num_threads(1)
    deepspeed.get_accelerator().is_fp16_supported = lambda: True  # slowly, on a CPU, but torch can
    deepspeed.init_distributed("gloo")
    ranks, work = torch.distributed.get_world_size(), Path(sys.argv[1]).resolve()
    for stage in (1, 2, 3):
        for dtype in DTYPES:
            if dtype == "fp16" and ranks != 2:
                continue  # the layout is that of bf16; what differs is the loss scale
            folder = work / f"zero{stage}-{dtype}-x{ranks}"
            if torch.distributed.get_rank() == 0:
                shutil.rmtree(folder, ignore_errors=True)
            torch.distributed.barrier()
            record(stage, dtype, folder)
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
