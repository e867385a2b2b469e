"""How close is the CPU Adam step to what memory allows, and how far ahead of torch?

Prints each kernel beside the measured memory roofline (four float32 arrays updated in place) and
``torch.optim.AdamW(fused=True)``, all on the same memory, in rounds that run every contender once, so that
what else the machine does hits them alike. Times are medians; ratios are medians of those inside a round.
Writes JSON.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import platform
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from offload import _cpu_adam, cpu_adam
from offload.cpu_adam import AdamHyper, Dtype, MasterKind

ROOT = Path(__file__).resolve().parent.parent
# OpenMP's threads spin for a while after a torch operation and would take a core from what comes next.
SETTLE_SECONDS = 0.05
HYPER = AdamHyper(lr=1e-4, weight_decay=0.1, step=10, grad_scale=0.5)


@dataclass(frozen=True, slots=True)
class Contender:
    """One thing to time."""

    name: str
    bytes_per_element: int  # read and written
    run: Callable[[], None]
    prepare: Callable[[], None] | None = None  # before each run, not timed


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
    """A ratio with the least value that the project wants."""

    name: str
    measured: float
    at_least: float


def allocate(numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Return a touched tensor on huge pages where the system gives them."""  # (numel,) dtype, HOST
    room = mmap.mmap(-1, numel * dtype.itemsize + (2 << 20))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        room.madvise(mmap.MADV_HUGEPAGE)
    start = -torch.frombuffer(room, dtype=torch.uint8).data_ptr() % (2 << 20)
    return torch.frombuffer(room, dtype=dtype, count=numel, offset=start).zero_()


def contenders(numel: int) -> list[Contender]:
    """Build everything that is timed, over one shared set of arrays."""
    torch.manual_seed(0)
    master, exp_avg, exp_avg_sq, grad32 = (allocate(numel, torch.float32) for _ in range(4))
    grad16, param16 = (allocate(numel, torch.bfloat16) for _ in range(2))
    remainder = allocate(numel, torch.int16)
    master.normal_(std=0.02)
    grad32.normal_(std=1e-2)
    exp_avg_sq.fill_(1e-4)
    grad16.copy_(grad32)
    a_grad16, a_grad32, a_param16 = grad16.data_ptr(), grad32.data_ptr(), param16.data_ptr()
    a_master, a_m, a_v = master.data_ptr(), exp_avg.data_ptr(), exp_avg_sq.data_ptr()
    cpu_adam.split_master(a_master, a_param16, remainder.data_ptr(), numel)

    def step(grad: int, grad_dtype: Dtype, emit: int = 0) -> None:
        cpu_adam.adam_step(
            numel=numel,
            grad=grad,
            grad_dtype=grad_dtype,
            master=a_master,
            master_kind=MasterKind.FLOAT32,
            exp_avg=a_m,
            exp_avg_sq=a_v,
            emit=emit,
            emit_dtype=Dtype.BFLOAT16 if emit else None,
            hyper=HYPER,
        )

    def base() -> None:
        step(a_grad16, Dtype.BFLOAT16, a_param16)

    def split() -> None:
        cpu_adam.adam_step(
            numel=numel,
            grad=a_grad16,
            grad_dtype=Dtype.BFLOAT16,
            param=a_param16,
            master=remainder.data_ptr(),
            master_kind=MasterKind.SPLIT,
            exp_avg=a_m,
            exp_avg_sq=a_v,
            hyper=HYPER,
        )

    parameter = torch.nn.Parameter(master)
    parameter.grad = grad32
    optimizer = torch.optim.AdamW([parameter], lr=HYPER.lr, weight_decay=HYPER.weight_decay, fused=True)
    state = {"step": torch.tensor(10.0), "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq}
    optimizer.state[parameter] = state

    def zero_offload() -> None:
        grad32.copy_(grad16)
        grad32.mul_(0.5)
        optimizer.step()
        param16.copy_(master)

    def torch_fused() -> None:
        optimizer.step()

    def torch_accumulate() -> None:
        grad32.add_(grad16)

    def subnormal_quarter() -> None:
        exp_avg[::4] = 1e-40
        exp_avg_sq[::4] = 1e-40
        grad16[::4] = 0

    def usual_again() -> None:
        grad16.copy_(grad32)
        exp_avg.normal_(std=1e-3)
        exp_avg_sq.fill_(1e-4)

    def sum_of_squares() -> None:
        cpu_adam.sum_of_squares(a_grad16, Dtype.BFLOAT16, numel)

    return [
        Contender("roofline (in place, 4 arrays)", 32, lambda: _stream(a_master, a_m, a_v, a_grad32, numel)),
        Contender("torch AdamW fused, fp32", 28, torch_fused),
        Contender("base: bf16 grad, fp32 master, emit bf16", 28, base),
        Contender("split: bf16 grad, split master", 26, split),
        Contender("fp32 grad, fp32 master", 28, lambda: step(a_grad32, Dtype.FLOAT32)),
        Contender("ZeRO-Offload sequence in torch", 28, zero_offload),
        Contender("base, 25 % subnormal moments", 28, base, subnormal_quarter),
        Contender("torch add_ bf16 to fp32", 10, torch_accumulate, usual_again),
        Contender(
            "accumulate bf16 to fp32",
            10,
            lambda: cpu_adam.accumulate(a_grad32, a_grad16, Dtype.BFLOAT16, numel),
        ),
        Contender("sum of squares, bf16", 2, sum_of_squares),
    ]


def _stream(a: int, b: int, c: int, d: int, numel: int) -> None:
    _cpu_adam.stream_in_place(a, b, c, d, 1.0, numel)


def measure(what: list[Contender], rounds: int) -> dict[str, list[float]]:
    """Return seconds of every contender in every round, after one round that does not count."""
    seconds: dict[str, list[float]] = {contender.name: [] for contender in what}
    for counted in [False] + [True] * rounds:
        for contender in what:
            if contender.prepare is not None:
                contender.prepare()
            time.sleep(SETTLE_SECONDS)
            start = time.perf_counter()
            contender.run()
            if counted:
                seconds[contender.name].append(time.perf_counter() - start)
    return seconds


def ratio(numerator: list[float], denominator: list[float]) -> float:
    """Return the median over rounds of numerator / denominator."""
    return statistics.median(a / b for a, b in zip(numerator, denominator, strict=True))


def summarise(
    what: list[Contender], seconds: dict[str, list[float]], numel: int
) -> tuple[list[Measured], list[Figure]]:
    """Return the table and the figures to reach."""
    roofline, fused = what[0], what[1]
    table = [
        Measured(
            name=c.name,
            milliseconds=1e3 * statistics.median(seconds[c.name]),
            gigabytes_per_second=c.bytes_per_element * numel / statistics.median(seconds[c.name]) / 1e9,
            of_roofline=ratio(seconds[roofline.name], seconds[c.name])
            * c.bytes_per_element
            / roofline.bytes_per_element,
            speedup_over_torch=ratio(seconds[fused.name], seconds[c.name]),
        )
        for c in what
    ]
    by_name = {row.name: row for row in table}
    base = what[2].name
    figures = [
        Figure("base / in-place roofline", by_name[base].of_roofline, 0.95),
        Figure("base over torch fused fp32", by_name[base].speedup_over_torch, 1.25),
        Figure("split over base", ratio(seconds[base], seconds[what[3].name]), 1.05),
        Figure("base over the ZeRO-Offload sequence", ratio(seconds[what[5].name], seconds[base]), 2.5),
        Figure("25 % subnormal moments over base", ratio(seconds[base], seconds[what[6].name]), 0.95),
        Figure("accumulate over torch add_", ratio(seconds[what[7].name], seconds[what[8].name]), 5.0),
    ]
    return table, figures


def machine() -> dict[str, object]:
    """Return what the figures were measured on."""
    cpu = platform.processor() or platform.machine()
    info = Path("/proc/cpuinfo")
    if info.exists():
        names = [line.split(":", 1)[1].strip() for line in info.read_text().splitlines() if "model name" in line]
        cpu = names[0] if names else cpu
    git = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=False)
    return {
        "cpu": cpu,
        "cores": os.cpu_count(),
        "threads": cpu_adam.num_threads(),
        "isa": cpu_adam.isa(),
        "torch": torch.__version__,
        "load_average": os.getloadavg()[0],
        "commit": git.stdout.strip() or "unknown",
    }


def main(arguments: list[str] | None = None) -> int:
    """Run the bench and print its tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements; far beyond the last-level cache")
    parser.add_argument("--rounds", type=int, default=9)
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

    where = machine()
    what = contenders(options.numel)
    seconds = measure(what, options.rounds)
    table, figures = summarise(what, seconds, options.numel)
    print(f"{options.numel} elements, {options.rounds} rounds, {where}")
    print(f"{'kernel':42s} {'ms':>8s} {'GB/s':>7s} {'of roofline':>12s} {'x torch fused':>14s}")
    for row in table:
        print(
            f"{row.name:42s} {row.milliseconds:8.2f} {row.gigabytes_per_second:7.1f} "
            f"{row.of_roofline:12.3f} {row.speedup_over_torch:14.2f}"
        )
    print(f"\n{'figure':42s} {'measured':>8s} {'at least':>9s}")
    for figure in figures:
        print(f"{figure.name:42s} {figure.measured:8.3f} {figure.at_least:9.2f}")
    options.json.parent.mkdir(parents=True, exist_ok=True)
    report = {
        "numel": options.numel,
        "rounds": options.rounds,
        "smoke": options.smoke,
        "machine": where,
        "table": [asdict(row) for row in table],
        "figures": [asdict(figure) for figure in figures],
        "seconds": seconds,
    }
    options.json.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
