"""Several processes train one model, each with a slice of gradients and optimizer states.

Two of them: ``torchrun --standalone --nproc-per-node=2 examples/ranks.py``. Without torchrun it is one process, which
prints the same: how many there are does not change a bit.
"""

import argparse
import hashlib
import os

import torch
from torch import distributed, nn

import offload

parser = argparse.ArgumentParser(description=__doc__)
parser.add_argument("--steps", type=int, default=4)
parser.add_argument("--micro-batches", type=int, default=4, help="per step, of all processes together")
parser.add_argument("--stage", type=int, default=2)
given = parser.parse_args()

rank, world = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
if given.micro_batches % world:
    parser.error(f"--micro-batches: expected a multiple of the {world} processes but got {given.micro_batches}")
if world > 1:
    distributed.init_process_group("gloo")
torch.set_num_threads(1)  # the forward has the same bits with the same number of threads
torch.manual_seed(0)  # all ranks begin with the same model
model = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 1))
engine = offload.Engine(
    model,
    offload.AdamW(lr=1e-2),
    device="cpu",
    stage=given.stage,
    max_memory={"device": "16MiB", "cpu": "16MiB"},
    gradient_accumulation_steps=given.micro_batches // world,
    max_grad_norm=1.0,
)
for step in range(given.steps):
    for number in range(rank, given.micro_batches, world):  # micro-batches are dealt round-robin
        random = torch.Generator().manual_seed(step * given.micro_batches + number)
        x = torch.randn(16, 32, generator=random)
        engine.backward((engine(x) - x.sum(1, keepdim=True)).square().mean())
        engine.step()
    if rank == 0:
        print(f"step {step}: gradient norm {engine.grad_norm}")
digest = hashlib.sha256()
for value in engine.state_dict().values():
    digest.update(value.numpy().tobytes())
if rank == 0:
    print("parameters:", digest.hexdigest())
engine.close()
if world > 1:
    distributed.destroy_process_group()
