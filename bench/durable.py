"""What does a commit per step cost, and how long does a killed run take to go on? On the real bf16 model by default.

``cost``: steps of a durable run beside those of the same run without commits, everything on NVMe in both, in turns;
bytes, flushes and seconds of a commit. Bound: as many bytes written to a file and as many flushes, alone.
``--kills N``: a process that trains is killed N times at random moments; each time, the next one goes on. Every loss is
compared with that of a run that nobody killed, bit by bit; the disk use and the median time to resume are printed.
"""

from __future__ import annotations

import argparse
import os
import random
import shutil
import signal
import statistics
import tempfile
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from _common import emit, load_model, vocabulary_size

import offload
from swap.durable.disk import Disk

BUDGETS = {
    "tiny": ("8MiB", "16MiB"),
    "small": ("64MiB", "128MiB"),
    "real": ("512MiB", "1GiB"),
    "large": ("2GiB", "3GiB"),
}


class CountingDisk(Disk):
    """Counts what commits write and flush beside the shards."""

    written = flushes = 0

    def write(self, fd: int, data: bytes, offset: int) -> None:
        """Count the bytes."""
        CountingDisk.written += len(data)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        """Count the flush."""
        CountingDisk.flushes += 1
        super().sync(fd)


def make_engine(model: torch.nn.Module, name: str, **more: Any) -> offload.Engine:
    device, host = BUDGETS[name]
    return offload.Engine(
        model, offload.AdamW(lr=1e-4), device="cpu", max_memory={"device": device, "cpu": host}, **more
    )


def take_step(engine: offload.Engine, name: str, number: int) -> float:
    generator = torch.Generator().manual_seed(number)
    tokens = torch.randint(0, vocabulary_size(name), (1, 32), generator=generator)
    loss = engine(input_ids=tokens, labels=tokens).loss
    value: float = loss.item()
    engine.backward(loss)
    engine.step()
    return value


def flush_seconds(path: Path, size: int, flushes: int) -> float:
    """Write `size` bytes to a file and flush it so often, alone; return the median of some tries."""
    found = []
    with open(path / "alone", "wb") as file:
        for _ in range(9):
            begin = time.perf_counter()
            file.write(bytes(size))
            file.flush()
            for _ in range(flushes):
                os.fdatasync(file.fileno())
            found.append(time.perf_counter() - begin)
    (path / "alone").unlink()
    return statistics.median(found)


def measure_cost(name: str, path: Path, steps: int) -> dict[str, Any]:
    """Train two engines in turns; return seconds per step, and what a commit costs."""
    plain = make_engine(load_model(name)[0], name, nvme_path=path, offload_param="nvme", offload_optimizer="nvme")
    durable = make_engine(load_model(name)[0], name, run_dir=path / "run")
    seconds: dict[str, list[float]] = {"plain": [], "durable": []}
    counts: list[tuple[int, int, int, float, int]] = []
    for number in range(steps + 2):
        for kind, engine in (("plain", plain), ("durable", durable)):
            begin = time.perf_counter()
            take_step(engine, name, number)
            if kind == "durable":
                engine.client_state = {"batch": number + 1}
            engine.drain()
            seconds[kind].append(time.perf_counter() - begin)
        stats = durable.stats()
        row = (CountingDisk.written, CountingDisk.flushes, stats.commits, stats.commit_seconds, stats.record_bytes)
        counts.append(row)
    written, flushes, commits, waited, record = (b - a for a, b in zip(counts[1], counts[-1], strict=True))
    predicted = durable.plan.request
    assert predicted.commit is not None
    result = {
        "step_seconds": {kind: statistics.median(values[2:]) for kind, values in seconds.items()},
        "commit_seconds": waited / commits,
        "manifest_bytes": written / commits,
        "record_bytes": record / commits,
        "flushes": flushes / commits,
        "planned_manifest_bytes": predicted.manifest_bytes(durable.plan.chunk_numel),
        "planned_flushes": predicted.commit.flushes,
        "alone_seconds": flush_seconds(path, int((written + record) / commits), round(flushes / commits)),
    }
    plain.close(restore=False)
    durable.close(restore=False)
    shutil.rmtree(path / "run")
    print(
        f"commit: {result['commit_seconds'] * 1e3:.2f} ms, manifest {result['manifest_bytes'] / 1024:.1f} KiB "
        f"(planned {result['planned_manifest_bytes'] / 1024:.1f}), record {result['record_bytes'] / 1024:.1f} KiB, "
        f"{result['flushes']:.2f} flushes (planned {result['planned_flushes']}); "
        f"alone {result['alone_seconds'] * 1e3:.2f} ms"
    )
    step = result["step_seconds"]
    print(f"step: {step['durable'] * 1e3:.1f} ms durable, {step['plain'] * 1e3:.1f} ms without commits", flush=True)
    return result


# --- kill -9 ----------------------------------------------------------------------------------------------------------


def train_in_child(model: torch.nn.Module, name: str, path: Path, pipe: int) -> None:
    """Go on with the run in a process of its own, until it is killed."""
    engine = make_engine(model, name, run_dir=path)
    found = engine.resumed
    first = 0 if found is None else found.client_state["batch"]
    os.write(pipe, f"{first} {found.seconds if found else 0.0} {engine.stats().used_bytes['nvme']}\n".encode())
    number = first
    while True:
        value = take_step(engine, name, number)
        number += 1
        engine.client_state = {"batch": number}
        os.write(pipe, f"{number - 1} {value.hex()}\n".encode())


def killed_once(
    model: torch.nn.Module, name: str, path: Path, chance: random.Random, step_seconds: float
) -> tuple[int, float, int, dict[int, str]]:
    """Start, kill, and return where it began, in how many seconds, the store's bytes in use, and its losses."""
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reading)
            train_in_child(model, name, path, writing)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        began, seconds, used = lines.readline().split()
        losses: dict[int, str] = {}
        stop = chance.randint(0, 3)
        while len(losses) < stop:
            number, value = lines.readline().split()
            losses[int(number)] = value
        time.sleep(chance.random() * 1.2 * step_seconds)
        os.kill(process, signal.SIGKILL)
        for line in lines:
            number, value = line.split()
            losses[int(number)] = value
        os.waitpid(process, 0)
    return int(began), float(seconds), int(used), losses


def measure_kills(name: str, path: Path, kills: int, step_seconds: float) -> dict[str, Any]:
    """Kill a run again and again; compare it with one that nobody kills."""
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    model, chance = load_model(name)[0], random.Random(0)
    found, reached = [], 0
    disk: list[int] = []
    for _ in range(kills):
        began, seconds, used, losses = killed_once(model, name, path / "killed", chance, step_seconds)
        assert began >= reached - 1, f"{reached - began} steps were lost"
        reached = max([began, *(number + 1 for number in losses)])
        found.append((began, seconds, used, losses))
        disk.append(sum(file.stat().st_blocks * 512 for file in (path / "killed").iterdir()))
    last = max([1, *(number + 1 for *_, losses in found for number in losses)])
    truth = {}
    with make_engine(model, name, nvme_path=path, offload_param="nvme", offload_optimizer="nvme") as engine:
        for number in range(last):
            truth[number] = take_step(engine, name, number).hex()
    compared = sum(len(losses) for *_, losses in found)
    wrong = [n for *_, losses in found for n, value in losses.items() if truth[n] != value]
    resumed = [(seconds, used) for began, seconds, used, _ in found if began]
    result = {
        "kills": kills,
        "resumed": len(resumed),
        "steps": last,
        "losses_compared": compared,
        "wrong": wrong,
        "resume_seconds": statistics.median(seconds for seconds, _ in resumed) if resumed else None,
        "store_used_bytes": sorted({used for _, used in resumed}),
        "disk_bytes": [disk[0], max(disk)],
    }
    print(
        f"{kills} kills: {compared} losses compared, {len(wrong)} wrong; resumed {len(resumed)} times, median "
        f"{result['resume_seconds'] or 0.0:.3f} s; disk {disk[0]} bytes after the first kill, at most {max(disk)}"
    )
    assert not wrong
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=BUDGETS, default="real")
    parser.add_argument("--path", default=tempfile.gettempdir(), help="a directory on the drive")
    parser.add_argument("--steps", type=int, default=10, help="that are measured")
    parser.add_argument("--kills", type=int, default=0)
    parser.add_argument("--json")
    parser.add_argument("--smoke", action="store_true", help="a tiny model, a few steps and kills")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.steps, arguments.kills = "tiny", 3, arguments.kills or 3
    folder = Path(tempfile.mkdtemp(dir=arguments.path))
    import swap.store

    result: dict[str, Any] = {"model": arguments.model}
    try:
        if arguments.kills:  # first: a process that has threads cannot fork
            result["kills"] = measure_kills(arguments.model, folder, arguments.kills, 0.5)
        swap.store.Disk = CountingDisk  # type: ignore[misc]
        result["cost"] = measure_cost(arguments.model, folder, arguments.steps)
    finally:
        shutil.rmtree(folder)
    emit(arguments.json, result)


if __name__ == "__main__":
    main()
