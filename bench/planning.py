"""How long does ``python -m offload plan`` take? For models of 8 B to 405 B, dense and of experts.

Each call is a process of its own: with imports, the plan, a micro-batch on shapes, and what would help. The calls take
turns. Seconds are medians of turns; those of the processor tell what a busy machine adds to the wall's.
"""

from __future__ import annotations

import argparse
import os
import resource
import statistics
import subprocess
import sys
import time

from _common import emit

HOST = ["--cpu", "64GiB", "--nvme", "8TB"]
CASES = {
    "8 B": ["llama-3.1-8b", "--hardware", "desktop", "--cpu", "150GiB"],
    "8 B, every step clips": ["llama-3.1-8b", "--hardware", "desktop", *HOST, "--clip"],
    "8 B, activations do not fit": ["llama-3.1-8b", "--hardware", "desktop", "--cpu", "150GiB", "--device", "6GiB"],
    "70 B": ["llama-3.1-70b", "--hardware", "h100", *HOST],
    "405 B": ["llama-3.1-405b", "--hardware", "h100", *HOST],
    "141 B of experts": ["mixtral-8x22b", "--hardware", "h100", *HOST],
    "235 B of experts": ["qwen3-235b-a22b", "--hardware", "h100", *HOST],
}
SMOKE = {"8 B": CASES["8 B"]}


def seconds_of(model: str, *options: str) -> tuple[float, float]:
    """Return seconds of one call, and those that processors had for it."""
    words = [sys.executable, "-m", "offload", "plan", "--model", model, "--batch", "2x2048", *options]
    before, begin = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    took, after = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_CHILDREN)
    if not done.stdout:
        sys.exit(done.stderr)
    return took, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def main() -> None:
    """Run the bench."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--smoke", action="store_true", help="one call")
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    cases, rounds = (SMOKE, 1) if arguments.smoke else (CASES, arguments.rounds)
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in cases}
    loads = []
    for _ in range(rounds):
        loads.append(os.getloadavg()[0])
        for name, words in cases.items():
            taken[name].append(seconds_of(*words))
    found = {}
    for name, seconds in taken.items():
        wall, processor = (statistics.median(part) for part in zip(*seconds, strict=True))
        found[name] = {"call": cases[name], "wall_s": wall, "processor_s": processor, "rounds": seconds}
        print(f"{name:28} {wall:6.2f} s, {processor:6.2f} s of processors")
    emit(arguments.json, {"loads": loads, "calls": found})


if __name__ == "__main__":
    main()
