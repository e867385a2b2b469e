"""How close is the CPU optimizer step to what memory allows, and how far ahead of its peers?

Prints each variant beside the measured memory roofline (four float32 arrays updated in place), torch's fused AdamW,
DeepSpeed's CPUAdam where it is installed, and the whole ZeRO-Offload sequence, all on the same memory. A round runs
every contender once, in an order of its own, so that what else the machine does hits them alike. Times are medians;
ratios are medians of those inside a round. Writes JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import sys
import time
from dataclasses import asdict, dataclass
from pathlib import Path

# OpenMP's threads would spin for a while after an operation of torch, and take a core from what comes next. Read when
# torch is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")

import torch
from _common import emit
from _cpu_adam_contenders import (
    ACCUMULATE,
    ADD,
    DEEPSPEED,
    FULL,
    ROOFLINE,
    SEQUENCE,
    SUBNORMAL,
    TORCH,
    Contender,
    Memory,
    base,
    contenders,
    split,
)

from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import StateKind

ROOT = Path(__file__).resolve().parent.parent
Seconds = dict[str, list[float]]  # of every contender in every round


@dataclass(frozen=True, slots=True)
class Measured:
    """Medians of one contender over all rounds."""

    name: str
    milliseconds: float
    gigabytes_per_second: float
    of_roofline: float  # bandwidth / roofline bandwidth
    speedup_over_torch: float  # time of torch fused AdamW / time


@dataclass(frozen=True, slots=True)
class Figure:
    """A ratio of speeds with the least value that the project wants."""

    name: str
    measured: float
    at_least: float


def measure(what: list[Contender], rounds: int) -> Seconds:
    """Return seconds of every contender in every round, after one round that does not count."""
    seconds: Seconds = {contender.name: [] for contender in what}
    order = random.Random(0)
    for counted in [False] + [True] * rounds:
        for group in _groups(what, order):
            for contender in group:
                if contender.prepare is not None:
                    contender.prepare()
                start = time.perf_counter()
                contender.run()
                if counted:
                    seconds[contender.name].append(time.perf_counter() - start)
    return seconds


def _groups(what: list[Contender], order: random.Random) -> list[list[Contender]]:
    """Return the contenders that need no preparation in random order, then the others in theirs."""
    free = [contender for contender in what if contender.prepare is None]
    bound = [contender for contender in what if contender.prepare is not None]
    order.shuffle(free)
    return [free, bound]


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median over rounds of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def table_of(what: list[Contender], seconds: Seconds, numel: int) -> list[Measured]:
    """Return one row per contender."""
    return [
        Measured(
            name=c.name,
            milliseconds=1e3 * statistics.median(seconds[c.name]),
            gigabytes_per_second=c.bytes_per_element * numel / statistics.median(seconds[c.name]) / 1e9,
            of_roofline=ratio(seconds[ROOFLINE], seconds[c.name]) * c.bytes_per_element / what[0].bytes_per_element,
            speedup_over_torch=ratio(seconds[TORCH], seconds[c.name]),
        )
        for c in what
    ]


def figures_of(table: list[Measured], seconds: Seconds) -> list[Figure]:
    """Return the figures to reach; those against DeepSpeed where it is installed."""
    peer = DEEPSPEED if DEEPSPEED in seconds else TORCH
    plain, halved, eighth = (base(StateKind.FLOAT32), split(StateKind.BFLOAT16), split(StateKind.INT8))
    sequence = SEQUENCE.format(peer)
    of_roofline = next(row.of_roofline for row in table if row.name == plain)
    found = [Figure(f"{plain} / roofline", of_roofline, 0.95)]
    for name, other, at_least in (
        (plain, TORCH, 1.25),
        (plain, sequence, 2.5),
        (halved, sequence, 3.5),
        (SUBNORMAL + plain, plain, 0.95),
        (ACCUMULATE, ADD, 5.0),
        (FULL, DEEPSPEED, 1.08),
        (plain, DEEPSPEED, 1.15),
        (halved, DEEPSPEED, 1.6),
        (eighth, DEEPSPEED, 1.5),
    ):
        if other in seconds:
            found.append(Figure(f"{name} over {other}", ratio(seconds[other], seconds[name]), at_least))
    return found


def main(arguments: list[str] | None = None) -> int:
    """Run the bench and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements; far beyond the last-level cache")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--threads", type=int, help="for the kernels and torch; default: all processors")
    parser.add_argument("--isa", choices=cpu_adam.available_isas(), help="default: the widest")
    parser.add_argument("--json", type=Path, default=ROOT / "build" / "bench" / "cpu_adam.json")
    parser.add_argument("--smoke", action="store_true", help="small and short: shows that it runs, measures nothing")
    options = parser.parse_args(arguments)
    if options.smoke:
        options.numel, options.rounds = 1 << 18, 2
    if options.threads:
        cpu_adam.set_num_threads(options.threads)
    if options.isa:
        cpu_adam.force_isa(options.isa)
    torch.set_num_threads(cpu_adam.num_threads())

    load = os.getloadavg()[0]
    what = list(contenders(Memory(options.numel)))
    seconds = measure(what, options.rounds)
    table = table_of(what, seconds, options.numel)
    figures = figures_of(table, seconds)
    threads = cpu_adam.num_threads()
    print(f"{options.numel} elements, {options.rounds} rounds, {threads} threads, {cpu_adam.isa()}, load {load:.1f}")
    print(f"{'':66s} {'ms':>8s} {'GB/s':>6s} {'roofline':>8s} {'x torch':>8s}")
    for row in table:
        print(
            f"{row.name:66s} {row.milliseconds:8.2f} {row.gigabytes_per_second:6.1f} "
            f"{row.of_roofline:8.3f} {row.speedup_over_torch:8.2f}"
        )
    print(f"\n{'figure':96s} {'measured':>8s} {'at least':>9s}")
    for figure in figures:
        print(f"{figure.name:96s} {figure.measured:8.3f} {figure.at_least:9.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "numel": options.numel,
        "rounds": options.rounds,
        "smoke": options.smoke,
        "threads": threads,
        "isa": cpu_adam.isa(),
        "load_average_before": load,
        "table": [asdict(row) for row in table],
        "figures": [asdict(figure) for figure in figures],
        "seconds": seconds,
    }
    emit(str(options.json), report)
    return 0


if __name__ == "__main__":
    sys.exit(main())
