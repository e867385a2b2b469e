"""What would a step take on machines that are not here? Virtual seconds of the engine on the simulated device.

An 8 B Llama in bf16 with gradient checkpointing trains in a dry run: every operator, copy, kernel of the CPU, read and
write has a cost from a description of the machine (``offload/planning/hardware.py``), and nothing has bytes. The run is
deterministic. docs/architecture.md says what the clock shows and what it cannot.

Most cases have a batch near break-even: so many rows that the device computes as long as the lane with the most work
besides. Compute is a line through two small batches. The other lanes may depend on rows, so the batch is sought again
with the work that was seen, until it stays. Where such a batch does not fit, several micro-batches make it up. Then the
drive has work for updates from the last backward to the next forward only, so two cases have the largest micro-batch
that fits, and nothing else.

Bounds: R is the work of the busiest lane over the time of a step (bound: 1), U the share of the time in which the
device computes, `ahead` how many units the host has given to the device that it has not begun. To reach: U of 0.90 with
states in host memory, R of 0.90 with states on NVMe, one unit ahead, and 1.02 of plain torch with everything resident.
Where states are in host memory, `_host_updates.py` says which U is the most that any order of work could reach.
Plain torch makes its steps by the fused AdamW, with bf16 moments and without masters. Ours have masters, and fp32
moments unless a case says bf16. If states live on the device, its own kernels make the updates.

Where every step clips, no update is made during backward. The bound is then backward + max(forward + updates, the
drive's work not done in backward), where staging has room for what is; to reach: 1.10 of it, or 1.15 of the bound
without clipping if there is host memory for that.

Beside it stands what ``offload.plan`` predicts, by a formula (docs/planning.md).

So does DeepSpeed's schedule, as a bound for these machines and not as a run. Assumed in its favour: gathers and
gradients are hidden behind compute as far as they go, the CPU's step reaches the same bytes per second as ours, its
states pass the drive while the CPU works, and nothing else takes time. What remains is its order: the step begins when
backward has ended, and the next forward when the step has. It moves fp32 masters and moments (12 B a parameter each
way), and its step reads and writes 30 B a parameter.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import tempfile
import time
from collections.abc import Iterator
from typing import Any

import torch
from _common import emit
from _host_updates import shortest
from _llama import FULL, LEAST_NORM, SEQUENCE, SMALL, engine_of, made, memory_of, steps_of, tokens
from simulated import load
from simulated.engine import engine_clock
from simulated.figures import Figures, watched

import offload
from offload import Config
from offload.memory.budget import Tier
from offload.planning.hardware import PRESETS, Hardware
from offload.planning.partition import find_units
from offload.planning.timing import Timing, timing_of
from offload.planning.work import work_of
from offload.request import unit_bytes_of

MOST_MICRO_BATCHES = 16
MOST_LEFT = int(3.1 * 2**30)  # of the device for parameters: the three largest units take 2.4 GiB


@dataclasses.dataclass(frozen=True)
class Case:
    """Where parameters and states live, on which machine.

    Attributes:
        gathers: DeepSpeed's parameters come from the host for each pass; else they stay on the device.
        rows: of one micro-batch that makes up a step; None for a batch near break-even, which there is if a lane beside
            compute has work.
        working_bytes: of the device for working copies of parameters, all else is left to activations; None: half.
        state_dtype: of our moments.
        clips: every step does.
    """

    name: str
    machine: str
    param: str
    optimizer: str
    gathers: bool = True
    rows: int | None = None
    working_bytes: int | None = None
    state_dtype: str = "float32"
    clips: bool = False


CASES = (
    Case("parameters resident, states in host memory", "h200", "none", "cpu", gathers=False),
    Case("states in host memory", "desktop", "cpu", "cpu"),
    Case("states in host memory, a row more", "desktop", "cpu", "cpu", rows=4),
    Case("states in host memory", "gh200", "cpu", "cpu"),
    Case("states on NVMe", "desktop", "cpu", "nvme"),
    Case("parameters and states on NVMe", "desktop", "nvme", "nvme"),
    Case("states on NVMe, one micro-batch", "desktop", "cpu", "nvme", rows=14, working_bytes=MOST_LEFT),
    Case("parameters and states on NVMe, one micro-batch", "desktop", "nvme", "nvme", rows=14, working_bytes=MOST_LEFT),
    Case(
        "states on NVMe, one micro-batch, every step clips",
        "desktop",
        "cpu",
        "nvme",
        rows=14,
        working_bytes=MOST_LEFT,
        clips=True,
    ),
    Case(
        "parameters and states on NVMe, one micro-batch, every step clips",
        "desktop",
        "nvme",
        "nvme",
        rows=14,
        working_bytes=MOST_LEFT,
        clips=True,
    ),
    Case("all resident", "h200", "none", "none", gathers=False, rows=6),
    Case("all resident, bf16 moments", "h200", "none", "none", gathers=False, rows=6, state_dtype="bfloat16"),
    Case("all resident, most of the device", "h200", "none", "none", gathers=False, rows=14),
)


@dataclasses.dataclass(frozen=True)
class Batch:
    """Rows of a micro-batch, and how many of these a step has."""

    rows: int
    micro_batches: int

    @property
    def tokens(self) -> int:
        """Of a step."""
        return self.rows * self.micro_batches * SEQUENCE


@contextlib.contextmanager
def engine(case: Case, hardware: Hardware, sizes: dict[str, int], micro_batches: int) -> Iterator[offload.Engine]:
    """Make an engine for a case, inside the clock."""
    memory = memory_of(hardware)
    with tempfile.TemporaryDirectory() as folder:
        options: dict[str, Any] = {"offload_param": case.param, "offload_optimizer": case.optimizer}
        if case.working_bytes is not None:
            options |= {"activation_memory": memory["device"] - case.working_bytes}
        options["state_dtype"] = case.state_dtype
        options["max_grad_norm"] = LEAST_NORM if case.clips else None
        if "nvme" in (case.param, case.optimizer):
            options |= {"nvme_path": folder}
        budgets = memory if "nvme_path" not in options else {**memory, "nvme": "1TB"}
        options |= {"max_memory": budgets, "gradient_accumulation_steps": micro_batches}
        with engine_of(made(sizes), **options) as found:
            yield found


def of_engine(case: Case, sizes: dict[str, int], batch: Batch, steps: int = 2) -> Figures:
    """Return what steps of the engine take."""
    hardware = PRESETS[case.machine]
    with (
        engine_clock(hardware, dry=True, updates=case.optimizer == "none") as watch,
        engine(case, hardware, sizes, batch.micro_batches) as ours,
    ):
        return steps_of(ours, watch, hardware, rows=batch.rows, micro_batches=batch.micro_batches, steps=steps)


def predicted(case: Case, sizes: dict[str, int], batch: Batch) -> Timing:
    """Return what ``offload.plan`` says of a step, by a formula."""
    hardware = PRESETS[case.machine]
    with engine_clock(hardware, dry=True, updates=case.optimizer == "none"):
        with engine(case, hardware, sizes, batch.micro_batches) as ours:
            plan = ours.plan
    model = made(sizes)
    tree = find_units(model, max_unit_bytes=unit_bytes_of(Config(), plan.request.budgets[Tier.DEVICE]))
    work = work_of(model, [torch.empty(batch.rows, SEQUENCE, dtype=torch.int64, device="meta")], tree=tree)
    return timing_of(plan, work, hardware, micro_batches=batch.micro_batches, clips=case.clips)


def of_plain_torch(machine: str, sizes: dict[str, int], batch: Batch) -> Figures:
    """Return what steps of plain torch take, everything on the device, with torch's fused AdamW."""
    hardware = PRESETS[machine]
    with engine_clock(hardware, dry=True) as watch:
        model = made(sizes).to_empty(device="sim")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = tokens(batch.rows)

        def step() -> None:
            for _ in range(batch.micro_batches):
                model(ids).backward()
            optimizer.step()
            optimizer.zero_grad()

        return watched(watch, hardware, step)


def near_break_even(case: Case, sizes: dict[str, int]) -> tuple[Batch, Figures]:
    """Return the batch whose compute takes as long as the lane with the most work besides, and the engine's figures."""
    for micro_batches in (1, 2, 4, 8, MOST_MICRO_BATCHES):
        small = [of_engine(case, sizes, Batch(rows, micro_batches), steps=1) for rows in (1, 2)]
        row_s = small[1].work_s["compute"] - small[0].work_s["compute"]
        fixed_s = small[0].work_s["compute"] - row_s
        figures, tried = small[1], dict[int, Figures]()
        while (rows := max(1, round((besides_s(figures) - fixed_s) / row_s))) not in tried:
            try:
                figures = tried[rows] = of_engine(case, sizes, Batch(rows, micro_batches))
            except torch.OutOfMemoryError as error:
                print(f"  {rows} rows in {micro_batches} micro-batches: {str(error).splitlines()[0]}")
                break
        else:
            return Batch(rows, micro_batches), tried[rows]
    raise SystemExit(f"{case.name} on {case.machine}: no batch near break-even fits the device")


def besides_s(figures: Figures) -> float:
    """Return the work of the busiest lane besides compute."""
    return max(seconds for lane, seconds in figures.work_s.items() if lane != "compute")


def of_deepspeed(case: Case, numel: int, compute_s: float, micro_batches: int) -> dict[str, float]:
    """Return the least seconds of DeepSpeed's schedule, as the module's text says."""
    hardware = PRESETS[case.machine]
    gathers = 2 * micro_batches if case.gathers else 1  # forward and backward, or once behind the step
    up_s, down_s = gathers * 2 * numel / hardware.h2d_bytes_s, micro_batches * 2 * numel / hardware.d2h_bytes_s
    before_s = max(compute_s, up_s, down_s) if case.gathers else max(compute_s, down_s) + up_s
    step_s = 30 * numel / hardware.update_bytes_s
    if case.optimizer == "nvme":
        moved = 12 * numel
        alone_s = max(moved / hardware.drive_read_bytes_s, moved / hardware.drive_write_bytes_s)
        step_s = max(step_s, alone_s, 2 * moved / hardware.drive_mixed_bytes_s)
    return {"forward and backward": before_s, "step": step_s, "total": before_s + step_s}


def of_host_updates(figures: Figures, hardware: Hardware) -> dict[str, Any]:
    """Print the bound of U where updates are made in host memory, and return it with the way of each unit."""
    bound = shortest(figures.turns, figures.busy_s["compute"], hardware)
    most_used = figures.busy_s["compute"] / bound.step_s
    print(
        f"  U at most {most_used:.3f}, step at least {bound.step_s:.2f} s: {figures.used / most_used:.3f} of it\n"
        "  where it would be reached, in s: unit, gradient made, in host memory, updated, on the device, needed"
    )
    for way in bound.ways:
        if way in bound.ways[:2] + bound.ways[-4:] or way.unit == len(bound.ways) // 2:
            print(
                "   ",
                " ".join(
                    f"{value:7.3f}" if isinstance(value, float) else f"{value:3}" for value in dataclasses.astuple(way)
                ),
            )
    return {"U at most": most_used, "ways": [dataclasses.asdict(way) for way in bound.ways]}


def most(seconds: dict[str, float], total_s: float, many: int = 3) -> str:
    """Return the largest parts as shares of the total."""
    found = sorted(seconds.items(), key=lambda item: -item[1])[:many]
    return ", ".join(f"{what} {100 * part / total_s:.1f} %" for what, part in found if part > 0) or "nothing"


def run_case(case: Case, sizes: dict[str, int], rows: int | None) -> dict[str, Any]:
    """Measure a case, near break-even or with so many rows, print it and return its figures."""
    began = time.perf_counter()
    print(f"{case.name}, {case.machine}")
    rows = case.rows if rows is None else rows
    if rows is None:
        batch, figures = near_break_even(case, sizes)
    else:
        batch = Batch(rows, 1)
        figures = of_engine(case, sizes, batch)
    numel = sum(parameter.numel() for parameter in made(sizes).parameters())
    theirs = of_deepspeed(case, numel, figures.busy_s["compute"], batch.micro_batches)
    ahead = sorted(figures.ahead)
    result: dict[str, Any] = {
        **dataclasses.asdict(case),
        **dataclasses.asdict(batch),
        "tokens": batch.tokens,
        **{name: value for name, value in dataclasses.asdict(figures).items() if name != "turns"},
        "U": figures.used,
        "R": figures.reached,
        "bound_s": figures.bound_s,
        "binding": figures.binding,
        "ahead": {"median": ahead[len(ahead) // 2], "share without": ahead.count(0) / len(ahead)},
        "deepspeed_s": None if case.optimizer == "none" else theirs,  # which does not offload then
    }
    print(
        f"  {batch.tokens} tokens in {batch.micro_batches} micro-batches: step {figures.step_s:.2f} s, bound "
        f"{figures.bound_s:.2f} s ({figures.binding}), R {figures.reached:.3f}, U {figures.used:.3f}\n"
        f"  ahead {result['ahead']['median']} units in the median, none in {result['ahead']['share without']:.0%} of "
        f"uses; device memory {figures.peak_bytes / 1e9:.1f} GB\n"
        f"  the device waits for: {most(dict(figures.idle_s['compute']), figures.step_s)}\n"
        f"  work: {', '.join(f'{lane} {seconds:.2f} s' for lane, seconds in figures.work_s.items())}"
    )
    told = predicted(case, sizes, batch)
    result |= {"predicted_s": told.step_s, "of_predicted": told.step_s / figures.step_s}
    print(f"  offload.plan says {told.step_s:.2f} s, {result['of_predicted']:.2f} of it; {told.binding} binds")
    if case.clips:
        result |= {"clipped_bound_s": told.bound_s, "of_clipped_bound": figures.step_s / told.bound_s}
        result |= {"of_calm_bound": figures.step_s / figures.bound_s}
        print(
            f"  backward + max(forward + updates, drive's work not done in backward): {told.bound_s:.2f} s; ours "
            f"{result['of_clipped_bound']:.3f} of it (to reach: 1.10), and {result['of_calm_bound']:.3f} of the bound "
            "without clipping (1.15)"
        )
    if case.optimizer == "cpu" and batch.micro_batches == 1:
        result |= of_host_updates(figures, PRESETS[case.machine])
    if case.optimizer != "none":
        total = theirs["total"]
        print(f"  DeepSpeed's schedule: {total:.2f} s at least, {total / figures.step_s:.2f} of ours")
    if case.param == "none":
        plain = of_plain_torch(case.machine, sizes, batch)
        result |= {"plain_s": plain.step_s, "of_plain": figures.step_s / plain.step_s}
        print(f"  plain torch: {plain.step_s:.2f} s; ours {result['of_plain']:.3f} of it (to reach: 1.02)")
    result["simulated_in_s"] = time.perf_counter() - began
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a model of three layers, two of the cases")
    parser.add_argument("--only", help="cases whose name or machine contains this")
    parser.add_argument("--rows", type=int, help="in one micro-batch, instead of a batch near break-even")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    load()
    sizes = SMALL if arguments.smoke else FULL
    cases = (CASES[0], CASES[4]) if arguments.smoke else CASES
    chosen = [case for case in cases if not arguments.only or arguments.only in f"{case.name}, {case.machine}"]
    results = [run_case(case, sizes, arguments.rows) for case in chosen]
    machines = {name: dataclasses.asdict(PRESETS[name]) for name in sorted({case.machine for case in chosen})}
    emit(arguments.json, {"model": sizes, "cases": results, "machines": machines})


if __name__ == "__main__":
    main()
