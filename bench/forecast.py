"""Is a step as long as ``offload.plan`` says? Predicted and measured on this machine, for five mixes of budgets.

Each round measures the machine anew (``hardware="here"``), predicts all mixes, and then trains each for a few steps, so
that both see the same hour of a shared machine. The model is the real one of 135 M parameters (``--model large --host
13GiB``: a random Llama of 1.1 B) in bf16 on 512 tokens, with checkpoints of activations (``--keep``: without). The
device is the CPU. Printed are the medians of rounds: seconds predicted and measured, their ratio, the bytes of the
drive per step as predicted and as counted, and units that are updated during backward.

A step is counted from the end of a forward to the end of the next one, when all updates of the last step are made. So
whole steps are counted, whichever units were updated during backward. Those before have taught the engine: the order of
units, and how much of the device budget activations leave to parameters.

Peaks are from another run, once per mix: its device budget is the predicted peak, and the margin that an engine keeps
free. Where there is more room, the engine leaves holes to the allocator, which is faster, and the peak depends on them.
The peak of the device is what the resident set rises by, over what the engine has claimed between two steps. That of
the host is what the engine's books have, and that of NVMe the blocks of the swap files. What was occupied of these at
most is in the result: it depends on which updates are made before backward has ended.

Each run has a process of its own, because the heap has holes of whatever ran before. To reach: seconds within 15 %,
peaks within 5 %, bytes equal. With ``--smoke``, what is measured is kept nowhere.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import contextlib
import dataclasses
import itertools
import multiprocessing
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from _common import emit, load_model

import offload
from offload.activations.ledger import with_margin
from offload.activations.rss import reset_high_water, status_bytes, trim_heap
from offload.memory.budget import Tier

MIXES: dict[str, dict[str, Any]] = {
    "all in memory": {"offload_param": "none", "offload_optimizer": "cpu"},
    "parameters and states on NVMe": {"offload_param": "nvme", "offload_optimizer": "nvme"},
    "states on NVMe": {"offload_param": "none", "offload_optimizer": "nvme"},
    "states on NVMe in int8": {"offload_param": "none", "offload_optimizer": "nvme", "state_dtype": "int8"},
    "both on NVMe, every step clips": {"offload_param": "nvme", "offload_optimizer": "nvme", "max_grad_norm": 1e-3},
}
LEARNED = 4  # steps; then the order of units is known, and the working region has its size


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """Device memory of a run: the budget, and the part of it for activations, in bytes."""

    device: int
    activations: int


def options(mix: str, path: Path, host: str | None, room: Room | None = None) -> dict[str, Any]:
    """Return the engine's options; without `room`, the device budget is as the engine finds it."""
    found = dict(MIXES[mix])
    memory: dict[str, str | int] = {} if host is None else {"cpu": host}
    if room is not None:
        memory["device"] = room.device
        found["activation_memory"] = room.activations
    if memory:
        found["max_memory"] = memory
    if "nvme" in (found["offload_param"], found["offload_optimizer"]):
        found["nvme_path"] = str(path)
    return found


def prepared(name: str, *, keep: bool) -> tuple[torch.nn.Module, int]:
    """Return a model that is trained, and its vocabulary."""
    model, vocabulary = load_model(name)
    if not keep:
        model.gradient_checkpointing_enable({"use_reentrant": False})  # type: ignore[operator]
    model.config.use_cache = False  # type: ignore[union-attr]
    return model.train(), vocabulary


@contextlib.contextmanager
def warm(
    mix: str, arguments: argparse.Namespace, path: Path, room: Room | None = None
) -> Iterator[tuple[offload.Engine, Callable[[torch.Tensor], torch.Tensor], list[torch.Tensor]]]:
    """Yield an engine that has made some steps, what tells the loss of a batch, and ``--steps`` batches."""
    model, vocabulary = prepared(arguments.model, keep=arguments.keep)
    torch.manual_seed(0)
    batches = [torch.randint(vocabulary, arguments.batch) for _ in range(arguments.steps)]
    with offload.Engine(model, offload.AdamW(lr=1e-5), **options(mix, path, arguments.host, room)) as engine:

        def loss_of(tokens: torch.Tensor) -> torch.Tensor:
            loss: torch.Tensor = engine(input_ids=tokens, labels=tokens).loss
            return loss

        for number in range(LEARNED):
            engine.backward(loss_of(batches[number % len(batches)]))
            engine.step()
        yield engine, loss_of, batches


def trained(mix: str, arguments: argparse.Namespace, path: Path) -> dict[str, Any]:
    """Return seconds, bytes of the drive and units updated during backward per step."""
    with warm(mix, arguments, path) as (engine, loss_of, batches):
        loss = loss_of(batches[0])
        engine.drain()
        seen, begin = [engine.stats()], time.perf_counter()
        for tokens in batches:
            engine.backward(loss)
            engine.step()
            loss = loss_of(tokens)
            seen.append(engine.stats())
        took = time.perf_counter() - begin
        engine.drain()
        before, after = seen[0], engine.stats()
        moved = {link: after.links[link].bytes - before.links[link].bytes for link in ("nvme_read", "nvme_write")}
    return {
        "seconds": took / arguments.steps,
        "read": moved["nvme_read"] / arguments.steps,
        "written": moved["nvme_write"] / arguments.steps,
        "early_units": [later.early_units - one.early_units for one, later in itertools.pairwise(seen)],
    }


def peaks_in(room: Room, mix: str, arguments: argparse.Namespace, path: Path) -> dict[str, int]:
    """Return the peaks of tiers in a device budget, and as ``occupied`` the most that was in use of the swap files."""
    with warm(mix, arguments, path, room) as (engine, loss_of, batches):
        trim_heap()
        claimed, resident = engine.stats().used_bytes[Tier.DEVICE.value], status_bytes("VmRSS")
        reset_high_water()
        for tokens in batches:
            engine.backward(loss_of(tokens))
            engine.step()
        risen, peaks = status_bytes("VmHWM") - resident, engine.stats().peak_bytes
        return {
            Tier.DEVICE.value: claimed + risen,
            Tier.HOST.value: peaks[Tier.HOST.value],
            Tier.NVME.value: blocks_bytes(path),
            "occupied": peaks[Tier.NVME.value],
        }


def blocks_bytes(folder: Path) -> int:
    """Return what files of this process take of the drive, of those that are, or were made, in `folder`."""
    inside = str(folder.resolve())
    opened = [file for file in Path("/proc/self/fd").iterdir() if file.exists()]
    return sum(file.stat().st_blocks * 512 for file in opened if str(file.readlink()).startswith(inside))


def apart(run: Callable[..., Any], *arguments: Any) -> Any:
    """Return what `run` returns in a process of its own."""
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(run, *arguments).result()


def predicted(mix: str, arguments: argparse.Namespace, path: Path, *, again: bool) -> offload.Forecast:
    """Return the forecast."""
    model, _ = prepared(arguments.model, keep=arguments.keep)
    return offload.plan(
        model,
        offload.AdamW(lr=1e-5),
        batch=arguments.batch,
        hardware="here",
        measure_again=again,
        **options(mix, path, arguments.host),
    )


def planned_peaks(forecast: offload.Forecast) -> dict[Tier, int]:
    """Return the bytes that the plan books of each tier; of the device with a micro-batch."""
    plan, work = forecast.plan, forecast.work
    assert work is not None
    found = {tier: plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) for tier in Tier}
    found[Tier.DEVICE] += work.peak_bytes
    return found


@contextlib.contextmanager
def measured_in(folder: Path | None) -> Iterator[None]:
    """Keep measurements of the machine in `folder` instead of the user's cache; None leaves them there."""
    before = os.environ.get("XDG_CACHE_HOME")
    if folder is not None:
        os.environ["XDG_CACHE_HOME"] = str(folder)
    try:
        yield
    finally:
        if folder is not None:
            del os.environ["XDG_CACHE_HOME"]
            if before is not None:
                os.environ["XDG_CACHE_HOME"] = before


def main() -> None:
    """Predict and measure in turn; print the medians."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="real", choices=("tiny", "small", "real", "large"))
    parser.add_argument("--batch", default=(1, 512), nargs=2, type=int, metavar=("ROWS", "LENGTH"))
    parser.add_argument("--keep", action="store_true", help="activations are kept, not computed again")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=4)
    parser.add_argument("--path", type=Path, default=Path.cwd(), help="directory on the drive")
    parser.add_argument("--host", metavar="SIZE", help="host budget, such as 13GiB; else as the engine finds it")
    parser.add_argument("--mixes", nargs="+", choices=list(MIXES), default=list(MIXES), metavar="MIX")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--smoke", action="store_true", help="a quick run without meaning")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.batch, arguments.rounds, arguments.steps = "tiny", (1, 64), 1, 1
    arguments.batch = tuple(arguments.batch)
    ratios: dict[str, list[float]] = {mix: [] for mix in arguments.mixes}
    results: dict[str, dict[str, Any]] = {}
    peaks: dict[str, dict[str, list[int]]] = {}
    occupied: dict[str, int] = {}
    with tempfile.TemporaryDirectory(dir=arguments.path) as folder, contextlib.ExitStack() as undo:
        path = Path(folder)
        undo.enter_context(measured_in(path / "cache" if arguments.smoke else None))
        for number in range(arguments.rounds):
            for mix in arguments.mixes:
                forecast = predicted(mix, arguments, path, again=mix == arguments.mixes[0])
                assert forecast.timing is not None and forecast.work is not None
                found = apart(trained, mix, arguments, path)
                ratios[mix].append(forecast.timing.step_s / found["seconds"])
                moved = forecast.timing.moved
                if mix not in peaks:
                    planned = planned_peaks(forecast)
                    wanted = with_margin(forecast.work.peak_bytes)
                    room = Room(planned[Tier.DEVICE] - forecast.work.peak_bytes + wanted, wanted)
                    most = apart(peaks_in, room, mix, arguments, path)
                    peaks[mix] = {tier.value: [planned[tier], most[tier.value]] for tier in Tier}
                    occupied[mix] = most["occupied"]
                results[mix] = {
                    "predicted_s": forecast.timing.step_s,
                    "measured_s": found["seconds"],
                    "binding": forecast.timing.binding,
                    "ratios": ratios[mix],
                    "ratio": statistics.median(ratios[mix]),
                    "drive_bytes": {
                        "predicted": [moved.drive_read, moved.drive_write],
                        "counted": [found["read"], found["written"]],
                    },
                    "early_units": {"predicted": forecast.timing.early_units, "counted": found["early_units"]},
                    "peak_bytes": peaks[mix],
                    "occupied_bytes": occupied[mix],
                }
                print(
                    f"round {number + 1}, {mix}: predicted {forecast.timing.step_s:.3f} s, measured "
                    f"{found['seconds']:.3f} s",
                    flush=True,
                )
    print(
        f"\n{'mix':32} {'predicted':>9} {'measured':>9} {'ratio':>6}  drive read, written; units updated in backward; "
        "peaks of device, host, NVMe (predicted/measured MB)"
    )
    for mix, row in results.items():
        (read, write), (was_read, was_written) = row["drive_bytes"]["predicted"], row["drive_bytes"]["counted"]
        peak = ", ".join(f"{ours / 1e6:.1f}/{was / 1e6:.1f}" for ours, was in row["peak_bytes"].values())
        print(
            f"{mix:32} {row['predicted_s']:8.3f}s {row['measured_s']:8.3f}s {row['ratio']:6.2f}  "
            f"{read / 1e6:.1f}/{was_read / 1e6:.1f}, {write / 1e6:.1f}/{was_written / 1e6:.1f}; "
            f"{row['early_units']['predicted']}/{'-'.join(map(str, row['early_units']['counted']))}; {peak}; "
            f"{row['binding']} binds"
        )
    emit(arguments.json, {"model": arguments.model, "batch": arguments.batch, "mixes": results})


if __name__ == "__main__":
    main()
