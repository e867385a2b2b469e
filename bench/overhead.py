"""What do the hooks cost? Engine step time over a plain PyTorch loop with the same optimizer kernel, all resident.

Both sides run the same model, batches and Adam kernel in one process, interleaved; the figure is the median of the
ratios within a round (bound: 1.0; to reach: at most 1.05). The plain loop clips by the global norm as the engine does.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from _common import emit, load_model

import offload
from offload import cpu_adam

HYPER: dict[str, Any] = {
    "lr": 1e-5,
    "beta1": 0.9,
    "beta2": 0.999,
    "eps": 1e-8,
    "weight_decay": 0.1,
    "decoupled": True,
}


class PlainLoop:
    """Forward, backward, global norm, and the same kernel on one set of fp32 states per parameter."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.model = model
        self.count = 0
        self.states = [
            (
                torch.zeros(p.shape, dtype=torch.int16),
                torch.zeros(p.shape, dtype=torch.float32),
                torch.zeros(p.shape, dtype=torch.float32),
            )
            for p in model.parameters()
        ]

    def step(self, batch: dict[str, Any]) -> float:
        """Take one step; returns the loss."""
        loss = self.model(**batch).loss
        loss.backward()
        self.count += 1
        dtype = cpu_adam.Dtype.BFLOAT16
        squares = sum(
            cpu_adam.sum_of_squares(p.grad.data_ptr(), dtype, p.numel())[0]
            for p in self.model.parameters()
            if p.grad is not None
        )
        scale = min(1.0, 1.0 / (squares**0.5 + 1e-6))
        hyper = cpu_adam.AdamHyper(step=self.count, grad_scale=scale, **HYPER)
        for parameter, (master, exp_avg, exp_avg_sq) in zip(self.model.parameters(), self.states, strict=True):
            assert parameter.grad is not None
            cpu_adam.adam_step(
                numel=parameter.numel(),
                grad=parameter.grad.data_ptr(),
                grad_dtype=dtype,
                param=parameter.data_ptr(),
                master=master.data_ptr(),
                master_kind=cpu_adam.MasterKind.SPLIT,
                exp_avg=exp_avg.data_ptr(),
                exp_avg_sq=exp_avg_sq.data_ptr(),
                hyper=hyper,
            )
            parameter.grad = None
        return loss.item()


class EngineLoop:
    """The same through the engine, everything on the device."""

    def __init__(self, model: torch.nn.Module) -> None:
        self.engine = offload.Engine(
            model,
            offload.AdamW(lr=HYPER["lr"], weight_decay=HYPER["weight_decay"]),
            device="cpu",
            max_memory={"device": "12GiB", "cpu": "1GiB"},
            max_grad_norm=1.0,
        )

    def step(self, batch: dict[str, Any]) -> float:
        """Take one step; returns the loss."""
        loss = self.engine(**batch).loss
        self.engine.backward(loss)
        self.engine.step()
        return float(loss.item())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, two rounds")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    model, vocabulary = load_model("tiny" if arguments.smoke else "real")
    rounds = 2 if arguments.smoke else arguments.rounds
    model.train()
    ids = torch.randint(0, vocabulary, (1, arguments.tokens), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids, "labels": ids, "use_cache": False}
    sides: dict[str, Callable[[dict[str, Any]], float]] = {
        "plain": PlainLoop(copy.deepcopy(model)).step,
        "engine": EngineLoop(model).step,
    }
    seconds: dict[str, list[float]] = {name: [] for name in sides}
    losses: dict[str, list[float]] = {name: [] for name in sides}
    for number in range(rounds + 1):
        for name in list(sides) if number % 2 else list(sides)[::-1]:
            begin = time.perf_counter()
            losses[name].append(sides[name](batch))
            if number:  # the first round touches memory
                seconds[name].append(time.perf_counter() - begin)
    medians = {name: statistics.median(values) for name, values in seconds.items()}
    ratios = [engine / plain for engine, plain in zip(seconds["engine"], seconds["plain"], strict=True)]
    ratio = statistics.median(ratios)
    print(f"plain {medians['plain']:.3f} s, engine {medians['engine']:.3f} s per step of {arguments.tokens} tokens")
    print(
        f"engine / plain = {ratio:.3f}, {min(ratios):.3f} to {max(ratios):.3f} in {rounds} rounds (to reach: 1.05); "
        f"losses equal: {losses['plain'] == losses['engine']}"
    )
    result = {"seconds": medians, "ratio": ratio, "ratios": ratios, "bound": 1.05, "losses": losses}
    emit(arguments.json, result | {"tokens": arguments.tokens})


if __name__ == "__main__":
    main()
