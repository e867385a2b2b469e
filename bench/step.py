"""What does a step cost, and how much memory, for each placement? A real 135 M model and text, 512 tokens, clipping on.

Each placement runs in a process of its own (for its resident set), several times in turn; medians are reported, with
the bound max(compute + CPU Adam, bytes moved / what the drive gives) beside the measurement: the drive is measured in
every round, half reads and half writes, as a step's traffic is. ``nvme`` makes its updates while the next forward
computes, ``nvme, in turn`` inside the step: the same work and the same numbers, one after the other. ``plain`` is an
ordinary PyTorch loop with ``torch.optim.AdamW`` on fp32 masters. Where deepspeed can be imported, its ZeRO-3 runs
beside (``--no-peers`` leaves it out). The norm is above the usual limit of 1 in every step, on the real text as on the
random tokens of a random model; with ``--max-grad-norm 1000`` nothing is clipped, and ``nvme`` makes its updates during
backward as well. Where all steps clip, a line says what ``nvme`` takes of the bound of that: backward + max(forward +
updates, the drive's work not done in backward), for updates wait for the norm. ``device, drive`` is ``device`` while
another process moves as many bytes of the drive per second as ``nvme`` did in the same round: what a busy drive takes
of the processor is in no bound. ``--model large`` is a random Llama of 1.1 B; what needs more memory than there is can
be left out (``--placements``).
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import _deepspeed_step
import torch
from _common import (
    call_vector_functions,
    emit,
    load_model,
    model_directory,
    plain_step,
    text_file,
    text_windows,
    vocabulary_size,
)
from _drive_load import busy_drive

from offload.activations.rss import reset_high_water, status_bytes
from offload.cli.drive.measure import Ours, Pattern, Settings, Workload, Workspace
from offload.cli.finetune.settings import Settings as TextSettings
from offload.sizes import GIB, MIB

IN_TURN = "nvme, in turn"
BESIDE = "device, drive"
OURS = ("device", "cpu", "nvme", IN_TURN, BESIDE)
TOKEN_BYTES = {False: 3 * MIB // 2, True: 5 * MIB}  # of activations, for one token more; of the large model
PEERS = tuple(_deepspeed_step.PLACEMENTS)


def options(placement: str, *, large: bool, tokens: int) -> dict[str, Any]:
    """Return the engine's options for a placement; more than 512 tokens add to the device what they take there."""
    more = max(tokens - 512, 0) * TOKEN_BYTES[large]
    if placement in ("device", BESIDE):
        return {"max_memory": {"device": (20 * GIB if large else 4 * GIB) + more, "cpu": 256 * MIB}}
    if placement == "cpu":
        device, host = (4 * GIB, 16 * GIB) if large else (1536 * MIB, 2 * GIB)
        activations = 3 * GIB if large else 1280 * MIB
    else:  # as little as the step is made in
        device, host = (3 * GIB, 3 * GIB) if large else (900 * MIB, 400 * MIB)
        activations = 2304 * MIB if large else 700 * MIB
    tier, nvme = ("cpu", 0) if placement == "cpu" else ("nvme", (40 if large else 4) * GIB)
    return {
        "max_memory": {"device": device + more, "cpu": host, "nvme": nvme},
        "offload_param": tier,
        "offload_optimizer": tier,
        "activation_memory": activations + more,
    }


def token_windows(name: str, tokens: int, count: int) -> torch.Tensor:
    """Return (count, tokens) token numbers: of the real text for the real model, else random ones."""
    if name == "real" and model_directory().exists() and text_file().exists():
        settings = TextSettings(model=model_directory(), data=text_file(), sequence_length=tokens)
        return text_windows(settings).train[:count].clone()
    return torch.randint(0, vocabulary_size(name), (count, tokens), generator=torch.Generator().manual_seed(0))


def run_plain(
    model: torch.nn.Module, data: list[dict[str, Any]], max_grad_norm: float
) -> tuple[list[float], list[float]]:
    """Train with torch alone; returns seconds and losses per step."""
    step, _ = plain_step(model, max_grad_norm, lr=1e-5, weight_decay=0.1)
    seconds, losses = [], []
    for batch in data:
        begin = time.perf_counter()
        losses.append(step(batch))
        seconds.append(time.perf_counter() - begin)
    return seconds, losses


def drive_gb_s(path: str, size: int) -> float:
    """Measure what the drive gives when half of the bytes are read and half are written, in 1e9 bytes per second."""
    ours, settings = Ours(), Settings()
    with Workspace([Path(path)], size, settings.footprint_bytes) as place:
        for pattern in (Pattern.WRITE, Pattern.MIXED):  # blocks that were never written are another matter
            work = Workload(pattern=pattern, total_bytes=size, object_bytes=settings.block_bytes)
            sample = ours.run(work, place)
    return sample.bandwidth_gb_s


def processor_seconds(engine: Any) -> float:
    """Return how long an engine has computed and made updates so far, without what it has waited."""
    links = engine.stats().links
    return float(links["compute"].seconds + links["cpu_adam"].seconds)


def drive_bytes(engine: Any) -> int:
    """Return what an engine has moved from and to the drive so far."""
    links = engine.stats().links
    return int(links["nvme_read"].bytes + links["nvme_write"].bytes)


def step_drive_bytes(run: Mapping[str, Any]) -> float:
    """Return what a step of a run of ours has moved from and to the drive."""
    return float(run["nvme_read"]["bytes"] + run["nvme_write"]["bytes"])


def clipped_bound(results: Sequence[Mapping[str, Any]], moved: float, speed: float) -> float:
    """Return the least seconds of a step that clips: its updates wait for the norm, at the end of backward.

    Backward + max(forward + updates, the drive's work not done in backward), from medians of rounds. The drive moves
    `moved` bytes in a step, at `speed` in 1e9 bytes per second.
    """
    work, back, done = (
        statistics.median(run[name] for run in results)
        for name in ("work_seconds", "backward_seconds", "backward_drive_bytes")
    )
    return float(back + max(work - back, (moved - done) / speed / 1e9))


def run_one(placement: str, path: str, *, windows: str, max_grad_norm: float, name: str) -> dict[str, Any]:
    """Run one placement in this process, a step for each of the token windows in the file `windows`."""
    import offload

    torch.ones(2, 2) @ torch.ones(2, 2)
    call_vector_functions()
    model, _ = load_model(name)
    model.train()
    data = [{"input_ids": row, "labels": row, "use_cache": False} for row in torch.load(windows)[:, None]]
    steps = len(data)
    own = sum(p.numel() * p.element_size() for p in model.parameters())
    base = status_bytes("VmRSS") - own  # libraries, not the model
    reset_high_water()
    result: dict[str, Any] = {}
    if placement == "plain":
        seconds, losses = run_plain(model, data, max_grad_norm)
    elif placement in _deepspeed_step.PLACEMENTS:
        with tempfile.TemporaryDirectory(dir=path) as swap:
            seconds, losses = _deepspeed_step.run(model, data, placement, swap, max_grad_norm)
    else:
        engine = offload.Engine(
            model,
            offload.AdamW(lr=1e-5, weight_decay=0.1),
            device="cpu",
            nvme_path=path,
            max_grad_norm=max_grad_norm,
            **options(placement, large=name == "large", tokens=data[0]["input_ids"].numel()),
        )
        engine._step.overlap = placement != IN_TURN
        seconds, losses, work, back, back_moved = [], [], [], [], []
        before = engine.stats()
        for number, batch in enumerate(data):
            if number == 1:
                before = engine.stats()
            busy = processor_seconds(engine)
            begin = time.perf_counter()
            loss = engine(**batch).loss
            computed, moved = processor_seconds(engine), drive_bytes(engine)
            engine.backward(loss)
            back.append(processor_seconds(engine) - computed)
            back_moved.append(drive_bytes(engine) - moved)
            engine.step()
            losses.append(loss.item())
            seconds.append(time.perf_counter() - begin)
            work.append(processor_seconds(engine) - busy)
        after = engine.stats()
        result["work_seconds"] = statistics.median(work[1:])
        result["backward_seconds"] = statistics.median(back[1:])
        result["backward_drive_bytes"] = statistics.median(back_moved[1:])
        for name in ("update_chunks", "update_stalls", "update_seconds", "update_stall_seconds", "early_units"):
            result[name] = (getattr(after, name) - getattr(before, name)) / (steps - 1)
        for link, stats in after.links.items():
            result[link] = {
                "bytes": (stats.bytes - before.links[link].bytes) / (steps - 1),
                "seconds": (stats.seconds - before.links[link].seconds) / (steps - 1),
            }
        result["planned"] = dict(engine.plan.step_bytes)
        engine.close(restore=False)
    return result | {
        "step_seconds": statistics.median(seconds[1:]),
        "losses": losses,
        "peak_bytes": status_bytes("VmHWM") - base,
    }


def unsteady(losses: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, int]:
    """Return the placements whose rounds did not all have the same losses, and the first step that differs.

    Args:
        losses: per placement, of each round, of each step.
    """
    found = {}
    for name, rounds in losses.items():
        for step, values in enumerate(zip(*rounds, strict=True)):
            if len(set(values)) > 1:
                found[name] = step
                break
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--max-grad-norm", type=float, default=1.0)
    parser.add_argument("--path", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--smoke", action="store_true", help="a tiny random model, one round")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--no-peers", action="store_true", help="without DeepSpeed")
    parser.add_argument("--model", choices=["real", "large"], default="real", help="135 M, or 1.1 B")
    everything = ["plain", *OURS, *PEERS]
    parser.add_argument("--placements", nargs="+", choices=everything, default=everything, metavar="PLACEMENT")
    parser.add_argument("--one", choices=everything, help=argparse.SUPPRESS)
    parser.add_argument("--windows", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.rounds, arguments.steps, arguments.tokens = 1, 3, 32
    name = "tiny" if arguments.smoke else arguments.model
    if arguments.one:
        one = run_one(
            arguments.one,
            arguments.path,
            windows=arguments.windows,
            max_grad_norm=arguments.max_grad_norm,
            name=name,
        )
        print(json.dumps(one))
        return

    left_out = PEERS if arguments.no_peers or not _deepspeed_step.available() else ()
    placements = [name for name in arguments.placements if name not in left_out]
    if BESIDE in placements and "nvme" not in placements[: placements.index(BESIDE)]:
        parser.error(f"--placements: expected nvme before {BESIDE!r}, which moves as much")
    runs: dict[str, list[dict[str, Any]]] = {placement: [] for placement in placements}
    speeds = []
    with tempfile.NamedTemporaryFile(suffix=".pt") as windows:
        torch.save(token_windows(name, arguments.tokens, arguments.steps), windows)
        windows.flush()
        for _ in range(arguments.rounds):
            if {"nvme", IN_TURN} & runs.keys():
                speeds.append(drive_gb_s(arguments.path, 128 * MIB if arguments.smoke else 1024 * MIB))
            for placement in runs:
                command = [sys.executable, __file__, "--one", placement, "--path", arguments.path]
                command += ["--windows", windows.name, "--model", arguments.model]
                command += ["--max-grad-norm", str(arguments.max_grad_norm)]
                command += ["--smoke"] if arguments.smoke else []
                beside: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
                if placement == BESIDE:
                    other = runs["nvme"][-1]
                    beside = busy_drive(arguments.path, step_drive_bytes(other) / other["step_seconds"])
                with beside:
                    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=Path.cwd())
                if done.returncode:
                    sys.exit(f"{placement}: {done.stderr[-2000:]}")
                runs[placement].append(json.loads(done.stdout.splitlines()[-1]))

    table: dict[str, dict[str, Any]] = {}
    plain = statistics.median(run["step_seconds"] for run in runs["plain"]) if "plain" in runs else float("nan")
    speed = statistics.median(speeds) if speeds else None
    if speed is not None:
        print(f"drive: {speed:.2f} GB/s, half read and half written")
    print(
        f"{'placement':<16}{'s/step':>8}{'/plain':>8}{'bound':>8}{'/bound':>8}{'waited':>8}{'peak MiB':>10}"
        f"{'NVMe MiB':>10}  loss"
    )
    for name, results in runs.items():
        seconds = statistics.median(run["step_seconds"] for run in results)
        peak = max(run["peak_bytes"] for run in results)
        last = results[-1]
        bound, moved = float("nan"), 0.0
        if name in OURS:
            work = statistics.median(run["work_seconds"] for run in results)
            moved = step_drive_bytes(last)
            bound = work if speed is None else max(work, moved / speed / 1e9)
        clipped = clipped_bound(results, moved, speed) if name == "nvme" and speed is not None else None
        table[name] = {
            "step_seconds": seconds,
            "clipped_bound_seconds": clipped,
            "ratio_to_plain": seconds / plain if "plain" in runs else None,
            "bound_seconds": bound if name in OURS else None,
            "peak_bytes": peak,
            "nvme_bytes": moved,
            "planned": last.get("planned"),
            "losses": last["losses"],
            **{name: last[name] for name in last if name.startswith(("update_", "early_"))},
        }
        waited = statistics.median(run.get("update_stall_seconds", 0.0) for run in results)
        print(
            f"{name:<16}{seconds:>8.3f}{seconds / plain:>8.2f}{bound:>8.3f}{seconds / bound:>8.2f}{waited:>8.3f}"
            f"{peak / MIB:>10.0f}{moved / MIB:>10.0f}  {last['losses'][-1]:.6f}"
        )
    bound = table.get("nvme", {}).get("clipped_bound_seconds")
    if bound is not None and not table["nvme"]["early_units"]:
        share = table["nvme"]["step_seconds"] / bound
        print(f"nvme, where every step clips: {bound:.3f} s at least; {share:.2f} of it (to reach: 1.10)")
    if BESIDE in runs:
        pairs = zip(runs["nvme"], runs[BESIDE], strict=True)
        share = statistics.median(ours["step_seconds"] / other["step_seconds"] for ours, other in pairs)
        print(f"nvme: {share:.2f} of {BESIDE}")
    for peer, ours in zip(PEERS, ("cpu", "nvme"), strict=True):
        if {peer, ours} <= table.keys():
            times = table[peer]["step_seconds"] / table[ours]["step_seconds"]
            share = table[ours]["peak_bytes"] / table[peer]["peak_bytes"]
            print(f"{peer}: {times:.2f} of our time; our peak is {share:.2f} of its")
    differing = unsteady({name: [run["losses"] for run in results] for name, results in runs.items()})
    for name, step in differing.items():
        print(f"{name}: the losses of its rounds differ from step {step} on; bench/soak.py finds out where")
    same = len({tuple(run["losses"]) for name in OURS if name in runs for run in runs[name]}) <= 1
    print(f"losses of {', '.join(name for name in OURS if name in table)} equal to the last bit: {same}")
    conditions = {name: vars(arguments)[name] for name in ("model", "tokens", "max_grad_norm", "rounds")}
    emit(arguments.json, conditions | {"drive_gb_s": speed, "placements": table, "equal": same, "unsteady": differing})
    if not same:
        sys.exit("placement changed a loss")


if __name__ == "__main__":
    main()
