"""What does it cost to keep activations elsewhere, and how much of the device does it save? Without a GPU.

A bf16 Llama (the real one of 135 M, or a random one) trains in each mode by turns, the same batches in each round:

* keep: activations stay on the device.
* host: they go to host memory.
* nvme: a small part of host memory, and the drive behind it.
* keep, drive: as keep, while another process moves the drive's bytes of nvme, in the same time: what they take of the
  machine.
* recompute: the model's own gradient checkpointing, non-reentrant.
* recompute, host: the same, and what its blocks are given goes to host memory.
* save_on_cpu: torch's hooks around the forward. On a CPU they have nothing to do, as their memory is the same.
* deepspeed: its checkpointing, where it can be imported. Its `checkpoint_in_cpu` fails on a CPU; it would move more.

Per mode: seconds of a step, those of the processor against keep's (what others take of a shared machine is not in
them), the most that was booked of the device for activations, the most that torch's tensors took at once beside what
there was before the step, the most that was resident beside that, and bytes moved. DeepSpeed keeps what its blocks are
given where no book sees it. Torch's allocator sees it, and temporaries, and it sees no host memory of the engine. So
modes are compared by that column; its step is one more, which is not timed. The bound is max(keep, bytes over each link
by its own busy time, bytes of the drive by what it gives) of the same round. Ratios are medians of those inside rounds.
Losses of all modes must be the same bits, and are compared.

`--context` finds instead the longest context that each mode trains in one device budget: of parameters, and of what the
model's own loss and `keep` take for `--tokens` tokens, or of `--device`. The other modes, and `chunked`, which is
`keep`, have `offload.ops.chunk_loss`. Trials of `--json` are not repeated.

`--grid` compares instead, in ten configurations, what ``activations="auto"`` has chosen in its second step with the
seconds of both ways, by turns: activations leave the device, or blocks are computed again. It has picked the faster
one if the other takes at least 0.98 of its seconds. To reach: 9 of 10.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import itertools
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import _deepspeed_step
import torch
from _common import emit, load_model
from _drive_load import busy_drive
from step import drive_gb_s
from torch import nn

import offload
from offload.activations.rss import reset_high_water, status_bytes, trim_heap
from offload.memory.budget import Tier
from offload.sizes import MIB, format_bytes, parse_bytes

BOTH = "recompute, host"
DEEPSPEED = "deepspeed"
BESIDE = "keep, drive"
MODES = ("keep", "host", "nvme", BESIDE, "recompute", BOTH, "save_on_cpu", DEEPSPEED)
SPARE = 1.1  # of what a step takes, for holes of the heap
FIRST_SHORT = ("keep", "chunked")
CONTEXT_MODES = ("keep", "chunked", "recompute", "host", "nvme")


def options(mode: str, path: str, room: dict[str, str | int]) -> dict[str, Any]:
    """Return the engine's options for a mode: parameters on the device, states in host memory."""
    found: dict[str, Any] = {
        "device": "cpu",
        "max_memory": {"device": "12GiB", "cpu": "10GiB", "nvme": "16GiB"},
        "nvme_path": path,
        "offload_param": "none",
        "offload_optimizer": "cpu",
        "activation_memory": room["near"],
    }
    if mode in ("host", "nvme", BOTH):
        found["activations"] = "offload"
        found["activation_cpu_memory"] = room["staging" if mode == "nvme" else "host"]
        found["activation_nvme_memory"] = room["drive"] if mode == "nvme" else 0
    return found


@contextlib.contextmanager
def engine_of(mode: str, name: str, path: str, room: dict[str, str | int], **more: Any) -> Iterator[offload.Engine]:
    """Yield an engine in a mode."""
    model, _ = load_model(name)
    model.train()
    if mode in ("recompute", BOTH):
        model.gradient_checkpointing_enable({"use_reentrant": False})
    if mode == DEEPSPEED:
        _deepspeed_step.checkpoint_blocks(model)
    if more.pop("chunked", False):
        offload.ops.chunk_loss(model)
    engine = offload.Engine(model, offload.AdamW(lr=1e-5), **{**options(mode, path, room), **more})
    try:
        yield engine
    finally:
        engine.close(restore=False)


def batch(number: int, tokens: int, vocabulary: int) -> torch.Tensor:
    """Return token numbers, the same for each mode."""
    return torch.randint(0, vocabulary, (1, tokens), generator=torch.Generator().manual_seed(number))


def most_alive_bytes(work: Callable[[], None]) -> int:
    """Return the most that torch's tensors take at once during `work`, beside what there was before."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        work()
    events = profile.profiler.kineto_results.events()  # type: ignore[union-attr]
    changes = sorted((event.start_ns(), event.nbytes()) for event in events if event.name() == "[memory]")
    return max(itertools.accumulate(size for _, size in changes), default=0)


def run_mode(mode: str, name: str, path: str, room: dict[str, str | int], tokens: int, steps: int) -> dict[str, Any]:
    """Train for `steps` and return what the last ones took; the first one fills caches."""
    seconds, processor, losses, resident = [], [], [], 0
    with engine_of(mode, name, path, room) as engine:
        vocabulary = engine.module.config.vocab_size

        def train(number: int) -> None:
            ids = batch(number, tokens, vocabulary)
            saving = torch.autograd.graph.save_on_cpu() if mode == "save_on_cpu" else contextlib.nullcontext()
            with saving:
                loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            engine.backward(loss)
            losses.append(loss.item())
            del loss
            engine.step()
            engine.drain()

        for number in range(steps):
            engine.drain()
            trim_heap()
            before, rss = engine.stats(), status_bytes("VmRSS")
            reset_high_water()
            begin, busy_before = time.perf_counter(), time.process_time()
            train(number)
            if number:
                seconds.append(time.perf_counter() - begin)
                processor.append(time.process_time() - busy_before)
                resident = max(resident, status_bytes("VmHWM") - rss)
        after = engine.stats()
        moved = {link: after.links[link].bytes - before.links[link].bytes for link in before.links}
        busy = {link: after.links[link].seconds - before.links[link].seconds for link in before.links}
        booked = after.peak_bytes["device"] - engine.plan.arena_bytes[Tier.DEVICE]
        alive = most_alive_bytes(lambda: train(steps))
    return {
        "seconds": statistics.median(seconds),
        "processor_seconds": statistics.median(processor),
        "losses": losses,
        "booked_bytes": booked,
        "alive_bytes": alive,
        "resident_bytes": resident,
        "moved": moved,
        "busy": busy,
    }


def on_drive_bytes(run: dict[str, Any]) -> int:
    """Return what a step has moved from and to the drive."""
    return int(run["moved"]["nvme_read"] + run["moved"]["nvme_write"])


def bound_s(run: dict[str, Any], keep_s: float, drive: float) -> float:
    """Return the most of computing, copying, and what the drive needs at `drive` GB/s."""
    return max(keep_s, run["busy"]["d2h"] + run["busy"]["h2d"], on_drive_bytes(run) / drive / 1e9)


def compare(arguments: argparse.Namespace, room: dict[str, str | int]) -> dict[str, Any]:
    """Run all modes by turns, and print a table."""
    runs: dict[str, list[dict[str, Any]]] = {mode: [] for mode in arguments.modes}
    drives = []
    for _ in range(arguments.rounds):
        drives.append(drive_gb_s(arguments.path, (64 if arguments.smoke else 512) * MIB))
        for mode in arguments.modes:
            beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
            if mode == BESIDE:
                other = runs["nvme"][-1]
                beside = busy_drive(arguments.path, on_drive_bytes(other) / other["seconds"])
            with beside:
                run = run_mode(mode, arguments.model, arguments.path, room, arguments.tokens, arguments.steps)
            runs[mode].append(run)
    drive = statistics.median(drives)
    kept = max(run["booked_bytes"] for run in runs["keep"])
    kept_alive = max(run["alive_bytes"] for run in runs["keep"])
    print(f"{arguments.model}, {arguments.tokens} tokens; drive: {drive:.2f} GB/s, half read and half written")
    print(f"{'mode':<16}{'s/step':>8}{'/keep':>7}{'bound':>8}{'/bound':>8}{'cpu /keep':>11}", end="")
    print(f"{'booked MiB':>12}{'less':>7}{'alive MiB':>11}{'less':>7}{'resident MiB':>14}", end="")
    print(f"{'d2h+h2d MiB':>13}{'drive MiB':>11}")
    table = {}
    for mode, results in runs.items():
        seconds = statistics.median(run["seconds"] for run in results)
        ratio = statistics.median(a["seconds"] / b["seconds"] for a, b in zip(results, runs["keep"], strict=True))
        pairs = zip(results, runs["keep"], strict=True)
        busy = statistics.median(a["processor_seconds"] / b["processor_seconds"] for a, b in pairs)
        last = results[-1]
        rounds = zip(results, runs["keep"], drives, strict=True)
        bounds = [bound_s(run, keep["seconds"], here) for run, keep, here in rounds]
        to_bound = statistics.median(run["seconds"] / least for run, least in zip(results, bounds, strict=True))
        bound = statistics.median(bounds)
        booked = max(run["booked_bytes"] for run in results)
        resident = max(run["resident_bytes"] for run in results)
        copied = (last["moved"]["d2h"] + last["moved"]["h2d"]) / MIB
        on_drive = on_drive_bytes(last) / MIB
        alive = max(run["alive_bytes"] for run in results)
        counts = mode not in ("save_on_cpu", DEEPSPEED)  # what they keep is in no book of ours
        print(f"{mode:<16}{seconds:>8.3f}{ratio:>7.2f}{bound:>8.3f}{to_bound:>8.2f}{busy:>11.2f}", end="")
        print(f"{booked / MIB if counts else float('nan'):>12.0f}", end="")
        print(f"{100 * (1 - booked / kept) if counts else float('nan'):>6.0f}%{alive / MIB:>11.0f}", end="")
        print(f"{100 * (1 - alive / kept_alive):>6.0f}%{resident / MIB:>14.0f}{copied:>13.0f}{on_drive:>11.0f}")
        table[mode] = {"seconds": seconds, "to_keep": ratio, "processor_to_keep": busy}
        table[mode] |= {"bound_s": bound, "to_bound": to_bound}
        table[mode] |= {
            "booked_bytes": booked,
            "alive_bytes": alive,
            "resident_bytes": resident,
            "moved": last["moved"],
            "busy": last["busy"],
        }
    losses = {mode: results[0]["losses"] for mode, results in runs.items()}
    if any(loss != losses["keep"] for mode, loss in losses.items()):
        sys.exit(f"losses differ: {losses}")
    print("losses of all modes have the same bits")
    return {"modes": table, "drive_gb_s": drive}


def trial(
    mode: str, name: str, path: str, room: dict[str, str | int], tokens: int, device: int | None
) -> dict[str, Any]:
    """Train one step in a device budget; returns its seconds and bytes, no seconds where that does not fit."""
    memory = {"device": "16GiB" if device is None else device, "cpu": "12GiB", "nvme": "16GiB"}
    more: dict[str, Any] = {"max_memory": memory, "chunked": mode != "keep"}
    if device is not None:
        more["activation_memory"] = room["near"]
    try:
        with engine_of(mode, name, path, room, **more) as engine:
            ids = batch(0, tokens, engine.module.config.vocab_size)
            trim_heap()
            before = status_bytes("VmRSS")
            reset_high_water()
            begin = time.perf_counter()
            loss = engine(input_ids=ids, labels=ids, use_cache=False).loss
            value = loss.item()
            engine.backward(loss)
            del loss
            engine.step()
            engine.drain()
            arena = engine.plan.arena_bytes[Tier.DEVICE]
            taken = {"booked_bytes": engine.stats().peak_bytes["device"] - arena}
            taken["resident_bytes"] = status_bytes("VmHWM") - before
            return {"seconds": time.perf_counter() - begin, "loss": value, **taken}
    except offload.BudgetError as error:
        return {"seconds": None, "error": str(error).splitlines()[0]}


class Trials:
    """Trials that have been made, in a file beside the result."""

    def __init__(self, arguments: argparse.Namespace, room: dict[str, str | int]) -> None:
        self._arguments = arguments
        self._room = room
        self._path = Path(f"{arguments.json}.trials") if arguments.json else None
        self._made: dict[str, dict[str, Any]] = {}
        if self._path is not None and self._path.exists():
            self._made = json.loads(self._path.read_text(encoding="utf-8"))

    def make(self, mode: str, tokens: int, device: int | None) -> dict[str, Any]:
        """Make one, if it has not been made."""
        key = f"{self._arguments.model} {mode} {tokens} {device}"
        if key not in self._made:
            room = self._room
            self._made[key] = trial(mode, self._arguments.model, self._arguments.path, room, tokens, device)
            if self._path is not None:
                self._path.write_text(json.dumps(self._made, indent=1), encoding="utf-8")
            said = self._made[key].get("error") or f"{self._made[key]['seconds']:.1f} s"
            print(f"  {mode}, {tokens} tokens: {said}", file=sys.stderr, flush=True)
        return self._made[key]


def arena_bytes(arguments: argparse.Namespace, room: dict[str, str | int]) -> int:
    """Return what the parameters take of the device."""
    with engine_of("keep", arguments.model, arguments.path, {**room, "near": "1GiB"}) as engine:
        return engine.plan.arena_bytes[Tier.DEVICE]


def find_contexts(arguments: argparse.Namespace, room: dict[str, str | int]) -> dict[str, Any]:
    """Find the longest context of each mode, by doubling, and print it."""
    trials = Trials(arguments, room)
    arena = arena_bytes(arguments, room)
    device = int(parse_bytes(arguments.device, subject="--device")) if arguments.device else 0
    if not device:
        room["near"] = "12GiB"  # as much as it takes
        device = arena + int(trials.make("keep", arguments.tokens, None)["resident_bytes"] * SPARE)
    room["near"] = device - arena
    print(f"{arguments.model} in a device budget of {format_bytes(device)}, {format_bytes(arena)} for parameters")
    found = {}
    for mode in (mode for mode in CONTEXT_MODES if mode in arguments.modes):
        tried = [arguments.tokens << i for i in range(32) if arguments.tokens << i <= arguments.most_tokens]
        longest, took = 0, 0.0
        while tried:  # from the shorter end where little fits, else from the longer one
            tokens = tried.pop(0 if mode in FIRST_SHORT else -1)
            seconds = trials.make(mode, tokens, device)["seconds"]
            if seconds is not None:
                longest, took = tokens, seconds
            if (seconds is None) == (mode in FIRST_SHORT):
                break
        most = ", the most that was tried" if longest == arguments.most_tokens else ""
        print(f"{mode:<16}{longest:>6} tokens{most}; its first step took {took:.1f} s", flush=True)
        found[mode] = {"tokens": longest, "seconds": took, "is_most_tried": bool(most)}
    return {"contexts": found, "device_bytes": device, "near_bytes": room["near"]}


@dataclasses.dataclass(frozen=True)
class Cell:
    """One configuration of the grid: a net of blocks, its batch, and the memory for activations.

    Attributes:
        wide: features of a block, whose inner layer has four times as many.
        tanhs: operators of a block that keep much and compute little.
        rows: of a batch.
        near: of the device, in MiB: less than what is kept.
        host: of host memory, in MiB.
        drive: of the drive, in MiB.
    """

    wide: int
    tanhs: int
    rows: int
    near: int
    host: int
    drive: int = 0


GRID = (
    Cell(768, 0, 512, 8, 512),  # much to compute, and room in host memory
    Cell(512, 0, 1024, 8, 512),
    Cell(256, 0, 2048, 8, 512),
    Cell(768, 0, 512, 8, 16, 512),  # the same on the drive
    Cell(512, 0, 1024, 8, 16, 512),
    Cell(256, 0, 2048, 8, 16, 512),
    Cell(256, 12, 2048, 8, 1024),  # little to compute, and much that is kept
    Cell(128, 24, 4096, 8, 1024),
    Cell(256, 12, 2048, 8, 16, 1024),
    Cell(128, 24, 4096, 8, 16, 1024),
)
BLOCKS = 8
WAYS = ("auto", "offload", "recompute")


class Block(nn.Module):
    """Two layers and some operators."""

    def __init__(self, cell: Cell) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(cell.wide, 4 * cell.wide), nn.Linear(4 * cell.wide, cell.wide)
        self.tanhs = cell.tanhs

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return what `x` is of."""
        y = self.down(nn.functional.gelu(self.up(x)))
        for _ in range(self.tanhs):
            y = y.tanh()
        return x + y


def run_way(way: str, cell: Cell, path: str, steps: int) -> dict[str, Any]:
    """Train a net of the grid; returns the seconds of a step behind the first two, losses, and what auto has chosen."""
    torch.manual_seed(0)
    model = nn.Sequential(*(Block(cell) for _ in range(BLOCKS)))
    given = {
        "device": "cpu",
        "max_memory": {"device": "4GiB", "cpu": "6GiB", "nvme": "4GiB"},
        "nvme_path": path,
        "offload_param": "none",
        "offload_optimizer": "cpu",
        "activations": way,
        "activation_memory": cell.near * MIB,
    }
    if way != "recompute":
        given |= {"activation_cpu_memory": cell.host * MIB, "activation_nvme_memory": cell.drive * MIB}
    seconds, losses = [], []
    with offload.Engine(model, offload.AdamW(lr=1e-4), **given) as engine:
        for number in range(steps + 2):
            x = torch.randn(cell.rows, cell.wide, generator=torch.Generator().manual_seed(number))
            begin = time.perf_counter()
            loss = engine(x).square().mean()
            engine.backward(loss)
            losses.append(loss.item())
            del loss
            engine.step()
            engine.drain()
            seconds.append(time.perf_counter() - begin)
        told = engine.report().activations
    return {"seconds": statistics.median(seconds[2:]), "losses": losses, "told": told, "chosen": told.split(",")[0]}


def compare_ways(arguments: argparse.Namespace) -> dict[str, Any]:
    """Run the grid, and print what auto has chosen in each cell, and whether that was the faster way."""
    cells = (Cell(128, 0, 512, 1, 64), Cell(128, 4, 512, 1, 4, 64)) if arguments.smoke else GRID
    print(f"{'cell':<52}{'offload':>9}{'recompute':>11}{'auto':>9}  chosen")
    found, right = [], 0
    for cell in cells:
        runs: dict[str, list[dict[str, Any]]] = {way: [] for way in WAYS}
        for _ in range(arguments.rounds):
            for way in WAYS:
                runs[way].append(run_way(way, cell, arguments.path, arguments.steps))
        losses = [run["losses"] for way in WAYS for run in runs[way]]
        if any(one != losses[0] for one in losses):
            sys.exit(f"losses differ: {cell}")
        seconds = {way: statistics.median(run["seconds"] for run in runs[way]) for way in WAYS}
        chosen = [run["chosen"] for run in runs["auto"]]
        mode = statistics.mode(chosen)
        good = mode in seconds and min(seconds["offload"], seconds["recompute"]) >= 0.98 * seconds[mode]
        right += good
        text = f"{cell.wide} wide, {cell.tanhs} tanh, {cell.rows} rows, {cell.host} + {cell.drive} MiB"
        print(f"{text:<52}{seconds['offload']:>8.3f}s{seconds['recompute']:>10.3f}s{seconds['auto']:>8.3f}s", end="")
        print(f"  {', '.join(chosen)}{'' if good else '  (the slower one)'}", flush=True)
        told = [run["told"] for run in runs["auto"]]
        found.append({**dataclasses.asdict(cell), "seconds": seconds, "told": told, "right": good})
    print(f"auto has picked the faster way in {right} of {len(cells)}; losses of all ways have the same bits")
    return {"cells": found, "right": right}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=["tiny", "small", "medium", "real"], default="real")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--most-tokens", type=int, default=8192, help="with --context")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=3)
    parser.add_argument("--modes", nargs="+", choices=[*MODES, "chunked"])
    parser.add_argument("--near", default="512MiB", help="of the device, for activations and temporaries")
    parser.add_argument("--device", help="budget for --context, in place of what keep takes for --tokens")
    parser.add_argument("--host", default="3GiB", help="of host memory, for mode host")
    parser.add_argument("--staging", default="256MiB", help="of host memory, for mode nvme")
    parser.add_argument("--drive", default="4GiB", help="of the drive, for mode nvme")
    parser.add_argument("--path", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--context", action="store_true", help="find the longest context instead")
    parser.add_argument("--grid", action="store_true", help='compare what "auto" chooses with both ways instead')
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, one round")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    modes = [mode for mode in MODES if mode != DEEPSPEED or _deepspeed_step.available()]
    arguments.modes = arguments.modes or list(CONTEXT_MODES if arguments.context else modes)
    if BESIDE in arguments.modes and "nvme" not in arguments.modes[: arguments.modes.index(BESIDE)]:
        parser.error(f'--modes: expected nvme before "{BESIDE}", which does as much with the drive')
    if arguments.smoke:
        arguments.model, arguments.rounds, arguments.steps = "tiny", 1, 2
        arguments.tokens, arguments.most_tokens = (1024, 8192) if arguments.context else (2048, 2048)
        arguments.near, arguments.host, arguments.staging, arguments.drive = "16MiB", "128MiB", "4MiB", "128MiB"
    room = {name: getattr(arguments, name) for name in ("near", "host", "staging", "drive")}
    run = find_contexts if arguments.context else compare
    result = compare_ways(arguments) if arguments.grid else run(arguments, room)
    emit(arguments.json, result)


if __name__ == "__main__":
    main()
