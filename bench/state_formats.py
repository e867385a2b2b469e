"""How far from float64 do optimizer states in fewer than 32 bits lead Adam, and what is lost with other formats?

Simulates Adam on gradients with a small mean and much noise, whose sizes differ inside a block of 128 elements by
e^spread, and prints for each format the error of the distance that the weights went and of the single updates, relative
to float64, and bias and deviation of sqrt(v). The project's formats go through the kernels, the others through torch.
docs/numerics.md has the table.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from _common import emit

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import StateKind

BLOCK = 128
Tensor = torch.Tensor
Store = Callable[[Tensor, Tensor, int], tuple[Tensor, Tensor]]  # (m, v, step) -> what is read back
Round = Callable[[Tensor], Tensor]
BETA1, BETA2, EPS = 0.9, 0.999, 1e-8


@dataclass(frozen=True, slots=True)
class Case:
    """Gradients: standard deviations e^(spread * normal) per element; `drop` > 0: 1000 times smaller after it."""

    spread: float
    steps: int
    drop: int = 0


def kernel(kind: StateKind) -> Store:
    """Store and load with the project's kernels."""
    dtype = {StateKind.FLOAT32: torch.float32, StateKind.BFLOAT16: torch.bfloat16, StateKind.INT8: torch.uint8}[kind]

    def store(m: Tensor, v: Tensor, step: int) -> tuple[Tensor, Tensor]:
        states = torch.empty(m.numel(), dtype=dtype), torch.empty(m.numel(), dtype=dtype)
        units = torch.empty(max(kind.units_bytes(m.numel()), 1), dtype=torch.uint8)
        loaded = torch.empty_like(m), torch.empty_like(v)
        addresses = (states[0].data_ptr(), states[1].data_ptr())
        at = units.data_ptr() if kind is StateKind.INT8 else 0
        values = (m.data_ptr(), v.data_ptr())
        cpu_adam.save_states(kind, values=values, states=addresses, units=at, numel=m.numel(), step=step)
        values = (loaded[0].data_ptr(), loaded[1].data_ptr())
        cpu_adam.load_states(kind, values=values, states=addresses, units=at, numel=m.numel())
        return loaded

    return store


def both(first: Round, second: Round) -> Store:
    """Round each moment by a rule of its own."""
    return lambda m, v, step: (first(m), second(v))


def bf16_nearest(x: Tensor) -> Tensor:
    """Round half to even."""
    return x.bfloat16().float()


def linear(levels: int) -> Round:
    """Round to the nearest of `levels` equidistant numbers up to the block's largest magnitude."""

    def rounded(x: Tensor) -> Tensor:
        blocks = x.view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38) / levels
        return (torch.round(blocks / scale) * scale).view(-1)

    return rounded


def of_root(inner: Round) -> Round:
    """Store sqrt(v) instead of v."""
    return lambda v: inner(v.sqrt()) ** 2


def dynamic_map(*, signed: bool) -> Round:
    """Round to the nearest entry of the dynamic map, times the block's largest magnitude.

    Source: bitsandbytes, ``create_dynamic_map``; Dettmers et al., "8-bit optimizers via block-wise quantization", 2022.
    """
    entries = [0.0, 1.0]
    bits = 7 if signed else 8
    for exponent in range(7):
        count = 2 ** (exponent + bits - 7)
        borders = torch.linspace(0.1, 1, count + 1)
        means = (borders[:-1] + borders[1:]) / 2 * 10.0 ** (exponent - 6)
        entries += means.tolist() + ((-means).tolist() if signed else [])
    table = torch.tensor(sorted(entries))
    middle = (table[1:] + table[:-1]) / 2

    def rounded(x: Tensor) -> Tensor:
        blocks = x.view(-1, BLOCK)
        scale = blocks.abs().amax(1, keepdim=True).clamp(min=1e-38)
        return (table[torch.bucketize(blocks / scale, middle)] * scale).view(-1)

    return rounded


def minifloat(exponent_bits: int, mantissa_bits: int, *, stochastic: bool, divides: bool = False) -> Round:
    """Round to a small floating-point number whose exponent counts from the block's largest magnitude.

    What is divided by does not become zero.
    """
    dropped = 23 - mantissa_bits

    def rounded(x: Tensor) -> Tensor:
        blocks = x.view(-1, BLOCK)
        largest = blocks.abs().amax(1, keepdim=True).view(torch.int32)
        exponent = (largest + (1 << dropped) - 1 >> 23) - (1 << exponent_bits) + 2
        smallest = exponent.clamp(min=4) - 127
        step = torch.exp2((torch.frexp(blocks)[1] - 1).maximum(smallest) - mantissa_bits)
        scaled = blocks.abs() / step
        noise = torch.rand_like(scaled) if stochastic else 0.5
        found = (scaled + noise).floor()
        found = torch.where(blocks > 0, found.clamp(min=1), found) if divides else found
        return (found * step * blocks.sign()).view(-1)

    return rounded


FORMATS: dict[str, Store] = {
    "float32": kernel(StateKind.FLOAT32),
    "bf16, nearest": both(bf16_nearest, bf16_nearest),
    "bf16, stochastic: `bfloat16`": kernel(StateKind.BFLOAT16),
    "linear int8, nearest": both(linear(127), linear(255)),
    "linear int8 of m and sqrt(v), nearest": both(linear(127), of_root(linear(255))),
    "dynamic map (bitsandbytes), nearest": both(dynamic_map(signed=True), dynamic_map(signed=False)),
    "E4M3 and E5M3, nearest": both(minifloat(4, 3, stochastic=False), minifloat(5, 3, stochastic=False, divides=True)),
    "E4M3 and E4M4, stochastic": both(minifloat(4, 3, stochastic=True), minifloat(4, 4, stochastic=True, divides=True)),
    "E4M3 and sqrt(v) in E4M4, stochastic": both(
        minifloat(4, 3, stochastic=True), of_root(minifloat(4, 4, stochastic=True, divides=True))
    ),
    "E4M3 and E5M3, stochastic: `int8`": kernel(StateKind.INT8),
}


def simulate(case: Case, numel: int) -> dict[str, list[float]]:
    """Return (distance, updates, bias of sqrt(v), deviation of its logarithm) of every format."""
    torch.manual_seed(7)
    deviation = torch.exp(torch.randn(numel) * case.spread) * 1e-3
    mean = 0.2 * deviation * torch.randn(numel)
    exact = [torch.zeros(numel, dtype=torch.float64) for _ in range(3)]  # m, v, distance
    states = {name: [torch.zeros(numel) for _ in range(3)] for name in FORMATS}
    squares, total = dict.fromkeys(FORMATS, 0.0), 0.0
    for step in range(1, case.steps + 1):
        grad = mean + deviation * torch.randn(numel)
        grad *= 1e-3 if case.drop and step > case.drop else 1.0
        bias1, bias2 = 1 - BETA1**step, math.sqrt(1 - BETA2**step)

        def update(m: Tensor, v: Tensor, path: Tensor, g: Tensor, bias1: float = bias1, bias2: float = bias2) -> Tensor:
            m += (1 - BETA1) * (g - m)
            v += (1 - BETA2) * (g * g - v)
            change = (m / bias1) / (v.sqrt() / bias2 + EPS)
            path += change
            return change

        right = update(exact[0], exact[1], exact[2], grad.double())
        total += float((right**2).sum())
        for name, store in FORMATS.items():
            m, v, path = states[name]
            squares[name] += float(((update(m, v, path, grad) - right) ** 2).sum())
            states[name][:2] = store(m, v, step)
    found = {}
    for name, (_, v, path) in states.items():
        ratio = 0.5 * torch.log(v.double().clamp(min=1e-60) / exact[1])
        distance = float((path - exact[2]).norm() / exact[2].norm())
        found[name] = [distance, math.sqrt(squares[name] / total), math.exp(float(ratio.mean())), float(ratio.std())]
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a few steps: shows that it runs")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    cases = [Case(0.5, 1000), Case(2.0, 1000), Case(0.5, 3000, drop=300)]
    numel = 32 * BLOCK
    if arguments.smoke:
        cases, numel = [Case(0.5, 5)], BLOCK
    results = []
    for case in cases:
        print(f"\n{case}\n| states | distance | updates | sqrt(v) mean | deviation |\n|---|---|---|---|---|")
        found = simulate(case, numel)
        for name, figures in found.items():
            print(f"| {name} | " + " | ".join(f"{figure:.3g}" for figure in figures) + " |")
        results.append({"spread": case.spread, "steps": case.steps, "drop": case.drop, "formats": found})
    emit(arguments.json, {"cases": results})


if __name__ == "__main__":
    main()
