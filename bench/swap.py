"""What do the promises of the swap store cost? Checksums, batches, commits; medians of interleaved rounds.

Checksums: the kernels alone (bound: what one core reads from memory), then a store that writes and reads objects with
and without them. Batches: many small reads started one by one and together. Commits: a durable store with many keys of
which few change, and with as many changes as keys; bound: one flush of the drive.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import os
import resource
import statistics
import tempfile
import time
from collections.abc import Callable
from typing import Any

from _common import emit

from swap import Aio, Job, Mode, SwapStore
from swap.checksums import crc32c_at, crc32c_kernel
from swap.files import open_unlinked, reserve

MIB = 1 << 20
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


def cpu_seconds() -> float:
    """Return the processor time of all threads of this process."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


def timed(action: Callable[[], object]) -> tuple[float, float]:
    """Return wall and processor seconds of `action`."""
    cpu, start = cpu_seconds(), time.perf_counter()
    action()
    return time.perf_counter() - start, cpu_seconds() - cpu


def interleaved(
    rounds: int, contenders: dict[str, Callable[[], object]], moved_bytes: int
) -> dict[str, dict[str, float]]:
    """Run all contenders in turn `rounds` times; return the medians of GB/s and of processor seconds per GB."""
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, action in contenders.items():
            samples[name].append(timed(action))
    return {
        name: {
            "gb_s": statistics.median(moved_bytes / wall / 1e9 for wall, _ in runs),
            "cpu_s_per_gb": statistics.median(cpu / moved_bytes * 1e9 for _, cpu in runs),
        }
        for name, runs in samples.items()
    }


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
            results[f"all {keys} keys, s"] = timed(store.commit)[0]
            for count in (1, 10, 100, 1000):
                if count > keys:
                    break
                samples = []
                for _ in range(rounds):
                    put(count)
                    samples.append(timed(store.commit)[0])
                results[f"{count} of {keys} keys, s"] = statistics.median(samples)
        results[f"reopening {keys} keys, s"] = timed(lambda: SwapStore(directory, capacity, mode=Mode.DURABLE).close())[
            0
        ]
        with open(os.path.join(directory, "probe"), "wb") as probe:
            samples = []
            for _ in range(rounds):
                probe.write(b"x" * 100)
                probe.flush()
                samples.append(timed(lambda: os.fdatasync(probe.fileno()))[0])
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
        "commit": commits(arguments.path, 200 if small else 20_000, rounds),
    }
    for title, figures in (("crc32c", "kernel"), ("store, 4 MiB objects", "store"), ("64 KiB tensors", "batch")):
        for name, values in result[figures].items():
            print(f"{title + ': ' + name:44s} {values['gb_s']:7.2f} GB/s {values['cpu_s_per_gb']:8.4f} CPU s/GB")
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
