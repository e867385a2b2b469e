"""What does a commit per step cost, and how long does a killed run take to go on? On the real bf16 model by default.

``cost``: steps of a durable run beside those of the same run without commits, everything on NVMe in both, in turns;
bytes, flushes and seconds of a commit. Bound: as many bytes written to a file and as many flushes, alone.
``--kills N``: a process that trains is killed N times at random moments; each time, the next one goes on. Every third
is killed while it saves a checkpoint in the background: what was cut off must be ignored and said, and what ``latest``
names is compared with its checksums, every byte. Every loss is compared with that of a run that nobody killed, bit by
bit. Disk use must not grow: the swap files keep their length and what is in use of them, and there are no more
checkpoints than are kept. The median time to resume is printed.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from _common import emit, load_model, vocabulary_size

import offload
from offload.background import PendingCheckpoint
from offload.checkpoint.format.folder import LATEST, Folder
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

KEPT = 2  # checkpoints
LOG_BYTES = 2 << 20  # by which a manifest grows before it is written anew, and some
RECORD_BYTES = 1 << 16  # by which the record of a step differs from that of another, at most
TRAIN, SAVE, CUT = "train", "save", "cut"  # what a process is killed in: a step, a step after a save, a save


@dataclasses.dataclass
class Killed:
    """A process that trained until it was killed.

    Attributes:
        kind: what it was to be killed in.
        began: step that it began with.
        seconds: that its engine took to be made; 0 where it began anew.
        used_bytes: of the store then; 0 where it did not go on with the last commit, but with a newer checkpoint.
        told: saves that it said were broken off.
        left: those that there were.
        losses: by step.
        saving: whether a save was under way at its end.
    """

    kind: str
    began: int
    seconds: float
    used_bytes: int
    told: int
    left: int
    losses: dict[int, str]
    saving: bool = False


class Told(logging.Handler):
    """Counts what an engine says of saves that were broken off."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def emit(self, record: logging.LogRecord) -> None:
        """Count it."""
        self.count += "was broken off; it is ignored" in record.getMessage()


def train_in_child(model: torch.nn.Module, name: str, path: Path, kind: str, pipe: int) -> None:
    """Go on with the run in a process of its own, until it is killed."""
    told = Told()
    logging.getLogger("offload").addHandler(told)
    options = {"checkpoint_dir": path / "checkpoints", "background_checkpoints": True}
    engine = make_engine(model, name, run_dir=path / "run", **options)
    found = engine.resumed
    first = 0 if found is None else found.client_state["batch"]

    def say(text: str) -> None:
        os.write(pipe, f"{text}\n".encode())

    def wait(pending: PendingCheckpoint) -> None:
        pending.wait()
        say("saved")

    is_run = found is not None and found.source == str(path / "run")
    used = engine.stats().used_bytes["nvme"] if is_run else 0
    say(f"{first} {found.seconds if found else 0.0} {used} {told.count}")
    for number in range(first, 1 << 30):
        value = take_step(engine, name, number)
        engine.client_state = {"batch": number + 1}
        say(f"{number} {value.hex()}")
        if kind != TRAIN and number == first:
            say("saving")
            pending = engine.save_checkpoint(options["checkpoint_dir"], keep=KEPT, wait=False)
            threading.Thread(target=wait, args=(pending,)).start()


def killed_once(
    model: torch.nn.Module, name: str, path: Path, kind: str, chance: random.Random, pace: dict[str, float]
) -> Killed:
    """Start a process, and kill it at a random moment: of `pace` seconds, which are measured on the way."""
    left = len(Folder(path / "checkpoints").unfinished())
    reading, writing = os.pipe()
    process = os.fork()
    if not process:
        try:
            os.close(reading)
            train_in_child(model, name, path, kind, writing)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    with os.fdopen(reading) as lines:
        began, seconds, used, told = lines.readline().split()
        found = Killed(kind, int(began), float(seconds), int(used), int(told), left, {})
        at = time.perf_counter()

        def read(line: str) -> str:
            nonlocal at
            first, *rest = line.split()
            now = time.perf_counter()
            if first in ("saving", "saved"):
                found.saving = first == "saving"
                if first == "saved":
                    pace["save"] = now - since
            else:
                found.losses[int(first)] = rest[0]
                pace["step"] = max(pace["step"], now - at)
                at = now
            return first

        since = 0.0
        stop = chance.randint(0, 3) if kind == TRAIN else 1
        while len(found.losses) < stop:
            read(lines.readline())
        if kind != TRAIN:
            assert read(lines.readline()) == "saving"
            since = time.perf_counter()
        while kind == SAVE and read(lines.readline()) != "saved":
            pass
        time.sleep(chance.random() * (pace["save"] if kind == CUT else 1.2 * pace["step"]))
        os.kill(process, signal.SIGKILL)
        for line in lines:
            read(line)
        os.waitpid(process, 0)
    return found


def blocks_bytes(path: Path) -> int:
    """Return what the files in a folder take of the drive."""
    return sum(file.stat().st_blocks * 512 for file in path.rglob("*") if file.is_file())


def verify(path: Path) -> str:
    """Compare every byte of the latest checkpoint with its checksums; returns its tag."""
    named = (path / LATEST).read_text(encoding="utf-8").strip()
    command = [sys.executable, "-m", "offload", "checkpoint", "verify", str(path)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0 and f"{named}: " in done.stdout, done.stdout + done.stderr
    return named


def kinds_of(kills: int) -> list[str]:
    """Return what each process is killed in: a whole checkpoint comes first, every third kill cuts one off."""
    return [CUT if number % 3 == 1 else SAVE if number % 9 == 0 else TRAIN for number in range(kills)]


def measure_kills(name: str, path: Path, kills: int, step_seconds: float) -> dict[str, Any]:
    """Kill a run again and again; compare it with one that nobody kills."""
    torch.set_num_threads(1)  # a forked child has none of its parent's threads
    model, chance = load_model(name)[0], random.Random(0)
    pace = {"step": step_seconds, "save": step_seconds}
    found: list[Killed] = []
    reached, verified = 0, []
    run_bytes, saved_bytes, store_bytes = list[int](), list[int](), set[int]()
    for kind in kinds_of(kills):
        one = killed_once(model, name, path, kind, chance, pace)
        assert one.began >= reached - 1, f"{reached - one.began} steps were lost"
        assert one.told == one.left, f"{one.left} saves were broken off, {one.told} were told of"
        reached = max([one.began, *(number + 1 for number in one.losses)])
        found.append(one)
        if one.kind != TRAIN:
            verified.append(verify(path / "checkpoints"))
        run_bytes.append(blocks_bytes(path / "run"))
        saved_bytes.append(blocks_bytes(path / "checkpoints"))
        store_bytes.add((path / "run" / "swap.data").stat().st_size)
        assert len(Folder(path / "checkpoints").tags()) <= KEPT + 1  # a kill may come before the oldest is deleted
        assert len(Folder(path / "checkpoints").unfinished()) <= 1
    assert len(store_bytes) == 1, f"the swap file has grown: {store_bytes}"
    used_bytes = sorted({one.used_bytes for one in found if one.used_bytes})
    assert not used_bytes or used_bytes[-1] <= used_bytes[0] + RECORD_BYTES, f"in use at the starts: {used_bytes}"
    assert max(run_bytes) <= run_bytes[0] + LOG_BYTES, f"{run_bytes[0]} bytes became {max(run_bytes)}"
    wrong, last = compare(model, name, path, found)
    resumed = [one for one in found if one.began]
    result = {
        "kills": kills,
        "resumed": len(resumed),
        "steps": last,
        "losses_compared": sum(len(one.losses) for one in found),
        "wrong": wrong,
        "while_saving": sum(one.saving for one in found),
        "told": sum(one.told for one in found),
        "verified": len(verified),
        "save_seconds": pace["save"],
        "resume_seconds": statistics.median(one.seconds for one in resumed) if resumed else None,
        "resumed_from_checkpoints": sum(not one.used_bytes for one in resumed),
        "store_used_bytes": used_bytes,
        "disk_bytes": [run_bytes[0], max(run_bytes)],
        "checkpoint_bytes": [saved_bytes[0], max(saved_bytes)],
    }
    print(
        f"{kills} kills: {result['losses_compared']} losses compared, {len(wrong)} wrong; resumed {len(resumed)} "
        f"times, median {result['resume_seconds'] or 0.0:.3f} s; disk {run_bytes[0]} bytes after the first kill, at "
        f"most {max(run_bytes)}\n"
        f"{result['while_saving']} kills while a checkpoint was copied: engines said {result['told']} times that one "
        f"was broken off, and ignored it; the latest was whole each of {len(verified)} times; checkpoints "
        f"{saved_bytes[0]} bytes after the first save, at most {max(saved_bytes)} with what was cut off"
    )
    assert not wrong
    return result


def compare(model: torch.nn.Module, name: str, path: Path, found: list[Killed]) -> tuple[list[int], int]:
    """Return the steps whose loss is not that of a run that nobody kills, and how many steps that had."""
    last = max([1, *(number + 1 for one in found for number in one.losses)])
    truth = {}
    with make_engine(model, name, nvme_path=path, offload_param="nvme", offload_optimizer="nvme") as engine:
        for number in range(last):
            truth[number] = take_step(engine, name, number).hex()
    return [number for one in found for number, value in one.losses.items() if truth[number] != value], last


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
