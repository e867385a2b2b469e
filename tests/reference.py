"""The truth: a plain PyTorch training loop, without any of this package.

16-bit models train with fp32 master weights: the optimizer works on fp32 copies, and the parameters are the copies
rounded to 16 bits. bfloat16 rounds half up, as the runtime's split master does (``bits + 0x8000``), everything else is
torch's own arithmetic.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn


def to_bfloat16_half_up(value: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bfloat16, halves up (away from zero in magnitude)."""
    bits = value.contiguous().view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)


@dataclasses.dataclass
class Run:
    losses: list[torch.Tensor]
    norms: list[float]
    parameters: dict[str, torch.Tensor]


def train(
    model: nn.Module,
    batches: Sequence[dict[str, Any]],
    make_optimizer: Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer],
    *,
    max_grad_norm: float | None = None,
    accumulation: int = 1,
    after_step: Callable[[torch.optim.Optimizer], None] | None = None,
) -> Run:
    """Train on the batches, one micro-batch each; returns the losses of all micro-batches."""
    trainable = [p for p in model.parameters() if p.requires_grad]
    masters = [nn.Parameter(p.detach().float().clone()) for p in trainable]
    optimizer = make_optimizer(masters)
    losses, norms = [], []
    sums: list[torch.Tensor | None] = [None] * len(trainable)
    for number, batch in enumerate(batches, start=1):
        loss = model(**batch).loss
        loss.backward()
        losses.append(loss.detach().clone().cpu())
        for index, parameter in enumerate(trainable):
            if parameter.grad is not None:
                gradient = parameter.grad.float()
                held = sums[index]
                sums[index] = gradient if held is None else held + gradient
                parameter.grad = None
        if number % accumulation:
            continue
        for master, total in zip(masters, sums, strict=True):
            master.grad = None if total is None else total / accumulation
        sums = [None] * len(trainable)
        norm = nn.utils.clip_grad_norm_(masters, max_grad_norm if max_grad_norm is not None else float("inf"))
        norms.append(norm.item())
        optimizer.step()
        with torch.no_grad():
            for parameter, master in zip(trainable, masters, strict=True):
                if parameter.dtype == torch.bfloat16:
                    parameter.copy_(to_bfloat16_half_up(master))
                else:
                    parameter.copy_(master)
        if after_step is not None:
            after_step(optimizer)
    return Run(losses, norms, {n: p.detach().clone().cpu() for n, p in model.named_parameters()})
