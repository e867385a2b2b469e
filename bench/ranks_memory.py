"""What does a rank hold in memory? The peak of the resident set while an engine trains, in one process and in several.

Everything stays in memory, so the figure is what parameters, gradients, states and buffers take; what the process has
before the engine is made is subtracted. Beside it stands what the plan says, and how much of that is for whole
gradients that wait for other ranks. To reach with slices of parameters and two ranks: 0.6 of one process.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
from pathlib import Path
from typing import Any

import torch
from torch import nn

import offload
from offload.memory.budget import Tier

WIDTH, LAYERS = 1024, 24  # 25 M parameters
STEPS = 4
BUDGETS = {"device": "2GiB", "cpu": "2GiB"}


class Blocks(nn.Module):
    """Square layers, each a unit."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return a loss."""
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x.square().mean()


def _status(name: str) -> int:
    """Return a line of this process's memory, in bytes."""
    lines = Path("/proc/self/status").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(f"{name}:"))


def _train(width: int, layers: int, dtype: str, stage: int | None) -> dict[str, int]:
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Blocks(width, layers)
    options: dict[str, Any] = {"device": "cpu", "dtype": dtype, "unit_bytes": width * width * 4, "max_memory": BUDGETS}
    before = _status("VmRSS")
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak begins here
    with offload.Engine(model, offload.AdamW(), stage=stage, **options) as engine:
        for _ in range(STEPS):
            engine.backward(engine(torch.ones(4, width, dtype=getattr(torch, dtype))))
            engine.step()
        plan, peak = engine.plan, _status("VmHWM")
        engine.close(restore=False)
    request = plan.request
    waiting = request.waiting_bytes if request.world_size > 1 else 0
    planned = sum(plan.arena_bytes[tier] for tier in (Tier.DEVICE, Tier.HOST))
    return {"peak_bytes": peak - before, "planned_bytes": planned, "waiting_gradients_bytes": waiting}


def _be_rank(rank: int, world: int, port: int, case: tuple[int, int, str, int | None], pipe: Any) -> None:
    torch.set_num_threads(1)
    store = torch.distributed.TCPStore("127.0.0.1", port, is_master=False)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    stage = case[3]
    _train(64, 2, case[2], stage)  # what is imported, and what a first step leaves in the heap
    pipe.send(_train(*case))
    torch.distributed.barrier()


def measure(world: int, case: tuple[int, int, str, int | None]) -> list[dict[str, int]]:
    """Return what each of `world` ranks holds."""
    store = torch.distributed.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context, ranks = multiprocessing.get_context("spawn"), []
    for rank in range(world):
        here, there = context.Pipe(duplex=False)
        process = context.Process(target=_be_rank, args=(rank, world, store.port, case, there))
        process.start()
        there.close()
        ranks.append((process, here))
    found = [here.recv() for _, here in ranks]
    for process, _ in ranks:
        process.join()
    return found


def main() -> None:
    """Measure, print and write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--smoke", action="store_true", help="a small model")
    parser.add_argument("--json", type=Path, help="file for the result")
    arguments = parser.parse_args()
    width, layers = (128, 8) if arguments.smoke else (WIDTH, LAYERS)
    report: dict[str, Any] = {"parameters": width * width * layers, "cases": []}
    for dtype in ("float32",) if arguments.smoke else ("float32", "bfloat16"):
        one = 0
        for world, stage in ((1, None), (2, 3)) if arguments.smoke else ((1, None), (2, 1), (2, 2), (2, 3), (4, 3)):
            found = max(measure(world, (width, layers, dtype, stage)), key=lambda rank: rank["peak_bytes"])
            one = one or found["peak_bytes"]
            line = {"dtype": dtype, "ranks": world, "stage": stage, "share": found["peak_bytes"] / one, **found}
            report["cases"].append(line)
            print(json.dumps(line))
    if arguments.json:
        arguments.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
