"""Records the folder of torch.distributed.checkpoint that tests/test_import_foreign.py reads: FSDP2 on two ranks.

The recording is ``fsdp.tar.xz`` beside this file. To renew it::

    python -m torch.distributed.run --nproc-per-node 2 tests/foreign/dcp_recorder.py WORK
    tar -cJf tests/foreign/fsdp.tar.xz --sort=name --owner=0 --group=0 --mtime=2026-01-01 -C WORK .

``expected.pt`` holds the same run's whole state dicts, as the first rank gathers them.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn


class Net(nn.Module):
    """Sizes that two ranks cannot halve."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 5)
        self.last = nn.Linear(5, 3, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.first(x).tanh())
        return out


def main() -> None:
    """Train two steps and save."""
    import torch.distributed as dist
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    work = Path(sys.argv[1])
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = Net()
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    fully_shard(model.first, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for number in range(2):
        model(torch.randn(2, 6, generator=torch.Generator().manual_seed(number))).pow(2).mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optim": states}, checkpoint_id=work / "run")
    full = get_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    if dist.get_rank() == 0:
        torch.save({"model": full[0], "optim": full[1]}, work / "expected.pt")
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
