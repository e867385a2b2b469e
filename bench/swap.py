"""What do the promises of the swap store cost? Checksums, batches, fetches, commits; medians of interleaved rounds.

Checksums: the kernels alone (bound: what one core reads from memory), then a store that writes and reads objects with
and without them. Batches: many small reads started one by one and together. Tensors: many small objects through the
store, beside fio with requests of their length and DeepSpeed's handle, where these are installed. Fetches: an object of
1 MiB that somebody waits for, on an idle drive and while write-back saturates it. Commits: a durable store with many
keys of which few change, and with as many changes as keys; bound: one flush of the drive.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from _common import emit
from nvme.deepspeed import DeepSpeed, deepspeed_installed
from nvme.peers import Fio, fio_installed

from offload.cli.drive.measure import (
    Contender,
    ContenderError,
    Pattern,
    Sample,
    Settings,
    Workload,
    Workspace,
    timed,
)
from offload.cli.drive.results import ratio_of, speed_of
from offload.sizes import MIB, short_bytes
from swap import Aio, Job, Mode, StoreTicket, SwapStore, wait_all
from swap.io.checksums import crc32c_at, crc32c_kernel
from swap.io.files import open_unlinked, reserve

BLOCK = 4096


class Memory:
    """An anonymous mapping on huge pages where the kernel gives them, filled with noise."""

    def __init__(self, size: int) -> None:
        self.map = mmap.mmap(-1, size + 2 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self.map.madvise(mmap.MADV_HUGEPAGE)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self.map))
        self.address = -(-start // (2 * MIB)) * 2 * MIB
        noise = os.urandom(MIB)
        for at in range(0, size, MIB):
            ctypes.memmove(self.address + at, noise, min(MIB, size - at))


def interleaved(
    rounds: int, contenders: dict[str, Callable[[], object]], moved_bytes: int
) -> dict[str, dict[str, float]]:
    """Run all contenders in turn `rounds` times; return the medians of GB/s and of processor seconds per GB."""
    samples: dict[str, list[Sample]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, action in contenders.items():
            samples[name].append(timed(moved_bytes, action))
    return {name: medians(runs) for name, runs in samples.items()}


def medians(runs: list[Sample]) -> dict[str, float]:
    """Return the medians of GB/s and of processor seconds per GB."""
    return {"gb_s": speed_of(runs), "cpu_s_per_gb": statistics.median(one.cpu_seconds_per_gb for one in runs)}


def kernels(size: int, rounds: int) -> dict[str, dict[str, float]]:
    memory = Memory(size)
    return interleaved(
        rounds,
        {
            crc32c_kernel(): lambda: crc32c_at(memory.address, size),
            "tables": lambda: crc32c_at(memory.address, size, portable=True),
        },
        size,
    )


def stores(path: str, total: int, object_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Write, then read `total` bytes; every object has memory of its own in a window of 64 MiB."""
    window = min(total, 64 * MIB)
    memory = Memory(window)
    slots = window // object_bytes
    results = {}
    with (
        SwapStore(path, total + window, checksums=False) as plain,
        SwapStore(path, total + window, checksums=True) as summed,
    ):
        for store in (plain, summed):
            store.register_buffer(memory.address, window)

        def run(store: SwapStore, what: str) -> None:
            flying: list[Any] = []
            for number in range(total // object_bytes):
                if len(flying) == slots:
                    flying.pop(0).wait()
                address = memory.address + number % slots * object_bytes
                start = store.put if what == "write" else store.get
                flying.append(start(number, address, object_bytes))
            for ticket in flying:
                ticket.wait()

        for store in (plain, summed):
            run(store, "write")
        for what in ("write", "read"):
            runs = {
                "without": lambda what=what: run(plain, what),
                "with": lambda what=what: run(summed, what),
            }
            for name, figures in interleaved(rounds, runs, total).items():
                results[f"{what} {name}"] = figures
    return results


def batches(path: str, count: int, object_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    memory = Memory(count * object_bytes)
    file = open_unlinked(path)
    try:
        reserve(file, count * object_bytes)
        with Aio() as aio:
            aio.register_file(file.fd)
            aio.register_buffer(memory.address, count * object_bytes)
            places = [(i * object_bytes, memory.address + i * object_bytes) for i in range(count)]

            def one_by_one(write: bool) -> None:
                start = aio.write if write else aio.read
                for ticket in [start(file.fd, offset, address, object_bytes) for offset, address in places]:
                    ticket.wait()

            def together(write: bool) -> None:
                jobs = [Job(write, file.fd, offset, address, object_bytes) for offset, address in places]
                for ticket in aio.submit(jobs):
                    ticket.wait()

            one_by_one(True)
            return interleaved(
                rounds,
                {
                    "write one by one": lambda: one_by_one(True),
                    "write together": lambda: together(True),
                    "read one by one": lambda: one_by_one(False),
                    "read together": lambda: together(False),
                },
                count * object_bytes,
            )
    finally:
        os.close(file.fd)


def tensors(path: str, count: int, object_bytes: int, rounds: int) -> dict[str, dict[str, float]]:
    """Put and get `count` objects with one call each way; `ratio` is the store's bandwidth to the peer's, by round."""
    total = count * object_bytes
    peers: dict[str, Contender] = {}
    if fio_installed():
        peers["fio"] = Fio()
    if deepspeed_installed():
        peers["DeepSpeed"] = DeepSpeed()
    window = Settings().footprint_bytes
    results: dict[str, dict[str, float]] = {}
    with Workspace([Path(path)], -(-total // MIB) * MIB, window) as place, SwapStore(path, 2 * total) as store:
        store.register_buffer(place.base_address, window)
        slots = window // object_bytes
        items = [(key, place.base_address + key % slots * object_bytes, object_bytes) for key in range(count)]
        for _ in range(2):  # every block of the files is written once before anything is measured
            wait_all(store.put_many(items))
        with Aio() as aio:
            fill = [Job(True, place.files[0].fd, at, place.base_address, MIB) for at in range(0, place.size_bytes, MIB)]
            wait_all(aio.submit(fill))
        for pattern in (Pattern.WRITE, Pattern.READ):
            start = store.put_many if pattern is Pattern.WRITE else store.get_many
            workload = Workload(pattern=pattern, total_bytes=total, object_bytes=object_bytes)
            samples: dict[str, list[Sample]] = {"store": [], **{name: [] for name in peers}}
            for _ in range(rounds):
                samples["store"].append(timed(total, lambda start=start: wait_all(start(items))))
                for name, peer in list(peers.items()):
                    try:
                        samples[name].append(peer.run(workload, place))
                    except ContenderError as error:
                        print(f"{name}: left out: {error}")
                        del peers[name], samples[name]
            for name, runs in samples.items():
                results[f"{pattern.value} {name}"] = medians(runs) | {"ratio": ratio_of(samples["store"], runs) or 0.0}
    return results


def fetches(path: str, written: int, rounds: int) -> dict[str, float]:
    """Time urgent gets of 1 MiB, alone and while puts of 16 MiB keep the drive busy; seconds."""
    big = min(16 * MIB, written // 4)
    memory = Memory(4 * big + MIB)
    target = memory.address + 4 * big
    idle, busy, ratios = [], [], []
    with SwapStore(path, 12 * big + MIB) as store:
        store.register_buffer(memory.address, 4 * big + MIB)
        store.put("fetched", target, MIB).wait()

        def fetch() -> float:
            start = time.perf_counter()
            store.get("fetched", target, MIB, urgent=True).wait()
            return time.perf_counter() - start

        for _ in range(rounds):
            alone = [fetch() for _ in range(50)]
            flying: list[StoreTicket] = []
            beside = []
            for number in range(written // big):
                if len(flying) == 4:
                    while not flying[0].done():
                        beside.append(fetch())
                    flying.pop(0).wait()
                flying.append(store.put(("written", number % 4), memory.address + number % 4 * big, big))
            wait_all(flying)
            idle.append(statistics.median(alone))
            if beside:
                busy.append(statistics.median(beside))
                ratios.append(busy[-1] / idle[-1])
    if not ratios:
        return {"idle, s": statistics.median(idle)}
    return {
        "idle, s": statistics.median(idle),
        "under write-back, s": statistics.median(busy),
        "ratio": statistics.median(ratios),
    }


def commits(path: str, keys: int, rounds: int) -> dict[str, float]:
    memory = Memory(BLOCK)
    results = {}
    with tempfile.TemporaryDirectory(dir=path) as directory:
        capacity = (2 * keys + 100) * BLOCK
        with SwapStore(directory, capacity, mode=Mode.DURABLE) as store:

            def put(count: int) -> None:
                for ticket in [store.put(("unit", key, "exp_avg"), memory.address, BLOCK) for key in range(count)]:
                    ticket.wait()

            put(keys)
            results[f"all {keys} keys, s"] = timed(0, store.commit).seconds
            for count in (1, 10, 100, 1000):
                if count > keys:
                    break
                samples = []
                for _ in range(rounds):
                    put(count)
                    samples.append(timed(0, store.commit).seconds)
                results[f"{count} of {keys} keys, s"] = statistics.median(samples)
        reopening = timed(0, lambda: SwapStore(directory, capacity, mode=Mode.DURABLE).close())
        results[f"reopening {keys} keys, s"] = reopening.seconds
        with open(os.path.join(directory, "probe"), "wb") as probe:
            samples = []
            for _ in range(rounds):
                probe.write(b"x" * 100)
                probe.flush()
                samples.append(timed(0, lambda: os.fdatasync(probe.fileno())).seconds)
        results["bound: one flush, s"] = statistics.median(samples)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--path", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="a few MiB")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    small = arguments.smoke
    rounds = 2 if small else arguments.rounds
    result: dict[str, Any] = {
        "kernel": kernels(16 * MIB if small else 256 * MIB, rounds),
        "store": stores(arguments.path, 16 * MIB if small else 1024 * MIB, 4 * MIB, rounds),
        "batch": batches(arguments.path, 100 if small else 2000, 64 << 10, rounds),
        "tensors": {
            short_bytes(size): tensors(arguments.path, 40 if small else count, size, rounds)
            for size, count in ((64 << 10, 2000), (256 << 10, 1000), (MIB, 512))
        },
        "fetch": fetches(arguments.path, (16 if small else 1024) * MIB, rounds),
        "commit": commits(arguments.path, 200 if small else 20_000, rounds),
    }
    for title, figures in (("crc32c", "kernel"), ("store, 4 MiB objects", "store"), ("64 KiB tensors", "batch")):
        for name, values in result[figures].items():
            print(f"{title + ': ' + name:44s} {values['gb_s']:7.2f} GB/s {values['cpu_s_per_gb']:8.4f} CPU s/GB")
    for size, figures_of_size in result["tensors"].items():
        for name, values in figures_of_size.items():
            ratio = "" if name.endswith("store") else f"   store / this {values['ratio']:.2f}"
            title = f"tensors of {size}: {name}"
            print(f"{title:44s} {values['gb_s']:7.2f} GB/s {values['cpu_s_per_gb']:8.4f} CPU s/GB{ratio}")
    for name, value in result["fetch"].items():
        shown = f"{value:10.2f} (at most 3)" if name == "ratio" else f"{value * 1e3:10.3f} ms"
        print(f"fetch of 1 MiB: {name:28s} {shown}")
    for what in ("write", "read"):
        without, with_sums = result["store"][f"{what} without"], result["store"][f"{what} with"]
        extra = with_sums["cpu_s_per_gb"] - without["cpu_s_per_gb"]
        ratio = with_sums["gb_s"] / without["gb_s"]
        print(f"checksums cost a {what} {extra:.4f} CPU s/GB and leave {ratio:.0%} of its bandwidth")
    for name, seconds in result["commit"].items():
        print(f"commit: {name:36s} {seconds * 1e3:10.2f} ms")
    emit(arguments.json, result)


if __name__ == "__main__":
    main()
