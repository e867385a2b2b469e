"""How fast, and in how much memory, is a checkpoint saved and loaded within training budgets? A random bf16 Llama.

By default 1.07 B parameters under AdamW in 1 GiB of device and 1.5 GiB of host budget, on a machine without a GPU, so
nearly all of it lives on NVMe: to save is to read it there and to write files, to load is the reverse. Bound: the bytes
of both directions over what the drive gives right before and right after, through the same engine: one file read and
another one written, which is new for a save; and device + host budget + 64 MiB of memory over the libraries. Beside it,
``torch.save`` and ``torch.load`` of the same state in memory, flushed and read without the page cache, as ours are.
Each in a process of its own; medians of rounds.

``--background`` asks instead how much a checkpoint that is copied in the background takes from training. Steps without
and with one alternate in one process. The stall is the time of the call. The updates that the last step has left to do
are made before, as for every reader, and are missing from the next step. So it also says how far training is behind
after the first step beside the copy. Bounds: 5 % of a step and 100 ms; steps beside the copy take 1.25 times as long,
by the medians of all. ``--tokens 2`` makes of it a run that the drive holds up, if the drive is slow enough: it says
which part of the drive's rate steps take by themselves, how busy its lanes are, and for how long computing waits.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from _common import SLACK_BYTES, emit, initialise, meta_llama

from offload.activations.rss import reset_high_water, status_bytes
from offload.checkpoint.format.staging import BUFFER_BYTES, Staging
from offload.sizes import MIB
from swap.io.aio import preallocate

SIZES = {  # layers, hidden size, vocabulary, device and host budget
    "large": (20, 2048, 32000, "1GiB", "1.5GiB"),
    "medium": (14, 1536, 32000, "512MiB", "768MiB"),
    "background": (12, 1024, 16000, "256MiB", "320MiB"),
    "small": (6, 768, 8000, "96MiB", "100MiB"),
}

STEPS_ALONE = 4  # before each save
DRIVE_BUFFERS = 32  # that are with the drive while it is measured


def drive_seconds(folder: Path, size: int, *, fresh: bool) -> float:
    """Read `size` bytes of one file and write as many to another, `fresh` or not, at once; return the seconds."""
    paths = [folder / "read", folder / "written"]
    with Staging(DRIVE_BUFFERS, BUFFER_BYTES, deadline_s=600) as staging:
        files = []
        for path in paths:
            if path is paths[1] and fresh:
                path.unlink(missing_ok=True)
            new = not path.exists()
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
            files.append(descriptor)
            if new:
                preallocate(descriptor, size)
            if new and not (path is paths[1] and fresh):
                pump(staging, [(True, descriptor)], size)
        begin = time.perf_counter()
        pump(staging, [(False, files[0]), (True, files[1])], size)
        seconds = time.perf_counter() - begin
        for descriptor in files:
            os.close(descriptor)
    return seconds


def pump(staging: Staging, directions: list[tuple[bool, int]], size: int) -> None:
    """Move `size` bytes of each file, in buffers that are all in flight."""
    for at in range(0, size, BUFFER_BYTES):
        for write, descriptor in directions:
            address = staging.take()
            start = staging.aio.write if write else staging.aio.read
            staging.give(address, [start(descriptor, at, address, BUFFER_BYTES)])
    staging.land()


def run_ours(name: str, path: Path) -> dict[str, Any]:
    """Take a step, save, take another, load; returns seconds and bytes, and whether what was loaded was saved."""
    import offload

    torch.manual_seed(0)
    layers, hidden, vocabulary, device, cpu = SIZES[name]
    model = meta_llama(layers, hidden, vocabulary)
    ids = torch.randint(0, vocabulary, (1, 64))
    base = status_bytes("VmRSS")
    engine = offload.Engine(
        model,
        offload.AdamW(lr=1e-4),
        device="cpu",
        max_memory={"device": device, "cpu": cpu, "nvme": "24GiB"},
        nvme_path=path,
        init_weights=initialise,
    )

    def step() -> None:
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        engine.drain()

    step()
    before = engine.digests()
    result: dict[str, Any] = {"limit_bytes": sum(engine.stats().budget_bytes[t] for t in ("device", "cpu"))}
    target, size = path / "saved", (1 if name == "small" else 3) << 30
    for verb in ("save", "load"):
        around = [drive_seconds(path, size, fresh=verb == "save")]
        reset_high_water()
        resident, start = status_bytes("VmRSS"), engine.stats().links
        begin, busy = time.perf_counter(), time.process_time()
        engine.save_checkpoint(target) if verb == "save" else engine.load_checkpoint(target)
        seconds, busy = time.perf_counter() - begin, time.process_time() - busy
        after = engine.stats().links
        swapped = sum(after[link].bytes - start[link].bytes for link in ("nvme_read", "nvme_write"))
        stored = sum(file.stat().st_size for file in target.rglob("*") if file.is_file())
        peak = status_bytes("VmHWM")
        around.append(drive_seconds(path, size, fresh=verb == "save"))
        result[verb] = {
            "seconds": seconds,
            "processor_seconds": busy,
            "others": os.getloadavg()[0],  # threads that want a core, ours included
            "file_bytes": stored,
            "moved_bytes": stored + swapped,
            "drive_gb_s": 4 * size / sum(around) / 1e9,
            "peak_bytes": peak - base,
            "added_bytes": peak - resident,
        }
        if verb == "save":
            step()
    result["equal"] = engine.digests() == before
    result["parameters"] = sum(slot.numel for unit in engine.plan.request.units for slot in unit.slots)
    engine.close(restore=False)
    return result


def run_background(name: str, path: Path, rounds: int, tokens: int) -> dict[str, Any]:
    """Alternate steps alone and beside the copy of a checkpoint; returns the seconds of each."""
    import offload

    torch.manual_seed(0)
    layers, hidden, vocabulary, device, cpu = SIZES[name]
    model = meta_llama(layers, hidden, vocabulary)
    ids = torch.randint(0, vocabulary, (1, tokens))
    size = (1 if name == "small" else 3) << 30
    drive = 2 * size / drive_seconds(path, size, fresh=False)
    for file in ("read", "written"):
        (path / file).unlink()
    engine = offload.Engine(
        model,
        offload.AdamW(lr=1e-4),
        device="cpu",
        max_memory={"device": device, "cpu": cpu, "nvme": "48GiB"},
        nvme_path=path,
        init_weights=initialise,
        offload_param="nvme",
        offload_optimizer="nvme",
        background_checkpoints=True,
    )

    def step() -> float:
        begin = time.perf_counter()
        engine.backward(engine(input_ids=ids, labels=ids, use_cache=False).loss)
        engine.step()
        return time.perf_counter() - begin

    def moved() -> int:
        links = engine.stats().links
        return sum(links[link].bytes for link in ("nvme_read", "nvme_write"))

    for _ in range(3):
        step()
    found = []
    for _ in range(rounds):
        before = moved()
        alone = [step() for _ in range(STEPS_ALONE)]
        step_bytes, report = (moved() - before) // len(alone), engine.report()
        rate = step_bytes * len(alone) / sum(alone)
        shares = {lane: report.lanes[lane].seconds / report.seconds for lane in ("nvme_read", "nvme_write")}
        shares["waited"] = report.waited_seconds / report.seconds
        begin = time.perf_counter()
        engine.drain()
        drain_seconds = time.perf_counter() - begin
        begin = time.perf_counter()
        pending = engine.save_checkpoint(path / "saved", keep=1, wait=False)
        call_seconds = time.perf_counter() - begin
        beside = [step()]
        while not pending.done() or len(beside) < 2:
            beside.append(step())
        copy_seconds = time.perf_counter() - begin
        stored = sum(file.stat().st_size for file in pending.wait().rglob("*") if file.is_file())
        found.append(
            {
                "alone_seconds": alone,
                "beside_seconds": beside,
                "drain_seconds": drain_seconds,
                "call_seconds": call_seconds,
                "copy_seconds": copy_seconds,
                "file_bytes": stored,
                "of_drive": rate / drive,
                "step_bytes": step_bytes,
                **shares,
                "others": os.getloadavg()[0],  # threads that want a core, ours included
            }
        )
        print(
            f"alone {step_bytes / 1e9:.2f} GB per step, {rate / drive:.2f} of the drive's {drive / 1e9:.2f} GB/s; "
            f"{', '.join(f'{name} {share:.2f}' for name, share in shares.items())} of the time; "
            f"updates left over {drain_seconds:.3f} s, call {call_seconds:.3f} s; "
            f"{len(beside)} steps beside the copy of {stored / 1e9:.2f} GB in "
            f"{copy_seconds:.1f} s, {statistics.median(beside):.3f} s each, {statistics.median(alone):.3f} s alone",
            flush=True,
        )
    engine.close(restore=False)
    alone, beside = (
        statistics.median(seconds for one in found for seconds in one[f"{which}_seconds"])
        for which in ("alone", "beside")
    )
    return {
        "rounds": found,
        "tokens": tokens,
        "drive_gb_s": drive / 1e9,
        **{name: statistics.median(one[name] for one in found) for name in ("of_drive", "step_bytes", *shares)},
        "step_seconds": alone,
        "drain_seconds": statistics.median(one["drain_seconds"] for one in found),
        "behind_seconds": statistics.median(
            one["drain_seconds"] + one["call_seconds"] + one["beside_seconds"][0] - alone for one in found
        ),
        "stall_seconds": statistics.median(one["call_seconds"] for one in found),
        "stall_bound_seconds": 0.05 * alone + 0.1,
        "step_ratio": beside / alone,
    }


def run_torch(name: str, path: Path) -> dict[str, Any]:
    """Save and load the same state with torch alone: bf16 parameters, 16 bits more of masters, two moments of fp32."""
    model = meta_llama(*SIZES[name][:3])
    base = status_bytes("VmRSS")
    dtypes = {"parameter": torch.bfloat16, "master": torch.int16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
    state: dict[str, Any] = {
        parameter_name: {role: torch.ones(parameter.shape, dtype=dtype) for role, dtype in dtypes.items()}
        for parameter_name, parameter in model.named_parameters()
    }
    file = path / "state.pt"
    result: dict[str, Any] = {}
    for verb in ("save", "load"):
        reset_high_water()
        begin = time.perf_counter()
        if verb == "save":
            torch.save(state, file)
            flushed(file)
            state.clear()
        else:
            state = torch.load(file)
        result[verb] = {"seconds": time.perf_counter() - begin, "peak_bytes": status_bytes("VmHWM") - base}
    return result


def flushed(file: Path) -> None:
    """Wait until a file is on the drive, and take it out of the page cache."""
    descriptor = os.open(file, os.O_RDONLY)
    os.fsync(descriptor)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
    os.close(descriptor)


RUNS = {"ours": run_ours, "torch": run_torch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--path", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--smoke", action="store_true", help="50 M parameters, one round")
    parser.add_argument("--no-torch", action="store_true", help="without torch.save, which wants all in memory")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--one", choices=list(RUNS), help=argparse.SUPPRESS)
    parser.add_argument("--background", action="store_true", help="copied while training goes on")
    parser.add_argument("--tokens", type=int, default=64, help="of a step beside a copy")
    parser.add_argument("--size", choices=list(SIZES), help="1.07, 0.47, 0.17 or 0.05 B parameters")
    arguments = parser.parse_args()
    name = arguments.size or ("small" if arguments.smoke else "background" if arguments.background else "large")
    if arguments.background:
        with tempfile.TemporaryDirectory(dir=arguments.path) as made:
            result = run_background(name, Path(made), 1 if arguments.smoke else arguments.rounds, arguments.tokens)
        print(json.dumps({key: value for key, value in result.items() if key != "rounds"}, indent=1))
        emit(arguments.json, result)
        return
    if arguments.one:
        print(json.dumps(RUNS[arguments.one](name, Path(arguments.path))))
        return
    rounds: list[dict[str, Any]] = []
    for number in range(1 if arguments.smoke else arguments.rounds):
        found: dict[str, Any] = {}
        for run in RUNS if not arguments.no_torch else ["ours"]:
            folder = Path(tempfile.mkdtemp(dir=arguments.path))
            try:
                command = [sys.executable, __file__, "--one", run, "--path", str(folder), "--size", name]
                done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True)
            finally:
                shutil.rmtree(folder)
            found[run] = json.loads(done.stdout.splitlines()[-1])
        rounds.append(found)
        show(number, found)
    result = {"rounds": rounds}
    for verb in ("save", "load"):
        result[verb] = {
            "seconds": statistics.median(r["ours"][verb]["seconds"] for r in rounds),
            "of_drive": statistics.median(of_drive(r, verb) for r in rounds),
            "peak_of_limit": max(
                r["ours"][verb]["peak_bytes"] / (r["ours"]["limit_bytes"] + SLACK_BYTES) for r in rounds
            ),
        }
    print(json.dumps({verb: result[verb] for verb in ("save", "load")}, indent=1))
    emit(arguments.json, result)


def of_drive(found: dict[str, Any], verb: str) -> float:
    """Return the bandwidth of one round, of both directions, as a share of the drive's."""
    ours = found["ours"][verb]
    return float(ours["moved_bytes"] / ours["seconds"] / 1e9 / ours["drive_gb_s"])


def show(number: int, found: dict[str, Any]) -> None:
    ours = found["ours"]
    print(f"round {number}: equal: {ours['equal']}")
    for verb in ("save", "load"):
        one = ours[verb]
        text = f"  {verb}: {one['seconds']:.2f} s, {one['processor_seconds']:.2f} s of processors, "
        text += f"{one['file_bytes'] / ours['parameters']:.2f} B per parameter, "
        text += f"{one['moved_bytes'] / one['seconds'] / 1e9:.2f} GB/s = {of_drive(found, verb):.2f} "
        text += f"of the drive's {one['drive_gb_s']:.2f}; "
        text += f"peak {one['peak_bytes'] / MIB:.0f} of {(ours['limit_bytes'] + SLACK_BYTES) / MIB:.0f} MiB, "
        text += f"{one['added_bytes'] / MIB:.0f} MiB of it added"
        if "torch" in found:
            other = found["torch"][verb]
            text += f"; torch.{verb} {other['seconds']:.2f} s, peak {other['peak_bytes'] / MIB:.0f} MiB"
        print(text, flush=True)


if __name__ == "__main__":
    main()
