"""How long may threads of OpenMP spin before they sleep? A step on idle cores, and on cores that others want, too.

Each setting has a process of its own that makes forward and backward of a model. The processes take turns of a few
steps, so that what else the machine does hits them alike. The cases are: alone, and beside as many busy processes as
there are cores, which the bench starts itself. Seconds are medians of turns. A ratio is to the best setting of its
case; a setting holds if none of its ratios is above 1.05. Run it on a machine of its own.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from typing import Any

from _paired import Side

WITHIN = 1.05
BUSY = "while True: pass"
VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT")
DEFAULT, PASSIVE = "default", "passive"
VOCABULARY = 4096
SIZES = {"tiny": (64, 3), "small": (256, 12), "medium": (512, 12)}  # width and layers
Case = dict[str, dict[str, list[float]]]  # setting: wall and processor seconds of a step, in each turn


def settings(spins: list[int]) -> dict[str, dict[str, str]]:
    """Return the variables of each setting."""
    bounded = {f"spin {count}": {"GOMP_SPINCOUNT": str(count)} for count in spins}
    return {DEFAULT: {}, PASSIVE: {"OMP_WAIT_POLICY": "PASSIVE"}, **bounded}


def serve(arguments: argparse.Namespace) -> None:
    """Be the process of a setting: make so many steps per line of input, answer with seconds."""
    import torch  # alone: each process of the bench has to start

    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    width, layers = SIZES[arguments.model]
    layer = torch.nn.TransformerEncoderLayer(width, width // 64, 3 * width, dropout=0.0, batch_first=True)
    model = torch.nn.Sequential(
        torch.nn.Embedding(VOCABULARY, width),
        torch.nn.TransformerEncoder(layer, layers),
        torch.nn.Linear(width, VOCABULARY),
    ).to(torch.bfloat16)
    tokens = torch.randint(0, VOCABULARY, (1, arguments.tokens))

    def step() -> None:
        torch.nn.functional.cross_entropy(model(tokens)[0].float(), tokens[0]).backward()
        model.zero_grad()

    for _ in range(2):
        step()
    print("ready", flush=True)
    for line in sys.stdin:
        steps, wall, processors = int(line), time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        seconds = [(time.perf_counter() - wall) / steps, (time.process_time() - processors) / steps]
        print(json.dumps(seconds), flush=True)


@contextlib.contextmanager
def busy(count: int) -> Iterator[None]:
    """Keep so many cores busy."""
    beside = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(count)]
    try:
        yield
    finally:
        for process in beside:
            process.kill()
            process.wait()


def measure(sides: dict[str, Side], rounds: int, steps: int) -> Case:
    """Let the settings take turns, the first one of a round being another each time."""
    found: Case = {name: {"wall_s": [], "processor_s": []} for name in sides}
    names = list(sides)
    for number in range(rounds + 1):
        first = number % len(names)
        for name in names[first:] + names[:first]:
            wall, processors = sides[name].ask(str(steps))
            if number:  # the first round warms up
                found[name]["wall_s"].append(wall)
                found[name]["processor_s"].append(processors)
    return found


def table(case: Case) -> dict[str, dict[str, float]]:
    """Return medians of each setting, and its ratio to the best one."""
    medians = {name: statistics.median(of["wall_s"]) for name, of in case.items()}
    best = min(medians.values())
    return {
        name: {
            "wall_s": medians[name],
            "processor_s": statistics.median(of["processor_s"]),
            "of_best": medians[name] / best,
        }
        for name, of in case.items()
    }


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure both cases."""
    words = [__file__, "--serve", "--model", arguments.model]
    words += ["--tokens", str(arguments.tokens), "--threads", str(arguments.threads)]
    inherited = {name: value for name, value in os.environ.items() if name not in VARIABLES}
    cores = len(os.sched_getaffinity(0))
    cases: dict[str, Case] = {}
    with contextlib.ExitStack() as stack:
        sides = {}
        for name, variables in settings(arguments.spins).items():
            sides[name] = Side(*words, environment=inherited | variables)
            stack.callback(sides[name].close)
        cases["alone"] = measure(sides, arguments.rounds, arguments.steps)
        with busy(cores):
            cases[f"beside {cores} busy processes"] = measure(sides, arguments.rounds, arguments.steps)
    return {
        "load_average_after": os.getloadavg()[0],
        "cores": cores,
        "cases": {name: table(case) for name, case in cases.items()},
        "turns": cases,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=SIZES, default="small")
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--spins", type=int, nargs="*", default=[10000, 30000, 60000, 100000], metavar="COUNT")
    parser.add_argument("--rounds", type=int, default=15, help="turns of each setting in each case")
    parser.add_argument("--steps", type=int, default=5, help="steps of a turn")
    parser.add_argument("--smoke", action="store_true", help="short: shows that it runs, measures nothing")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments)
        return
    if arguments.smoke:
        arguments.model, arguments.tokens, arguments.spins = "tiny", 8, [1000]
        arguments.rounds = arguments.steps = 1
    result: dict[str, Any] = {key: value for key, value in vars(arguments).items() if key not in ("serve", "json")}
    result |= run(arguments)
    worst = dict.fromkeys(settings(arguments.spins), 0.0)
    for name, rows in result["cases"].items():
        print(f"\n| {name} | ms | ms of processors | of the best |\n|---|---|---|---|")
        for setting, row in rows.items():
            print(f"| {setting} | {1e3 * row['wall_s']:.1f} | {1e3 * row['processor_s']:.1f} | {row['of_best']:.2f} |")
            worst[setting] = max(worst[setting], row["of_best"])
    result["worst_ratio"] = worst
    held = [name for name, ratio in worst.items() if ratio <= WITHIN]
    print(f"\nwithin {WITHIN} of the best in all cases: {', '.join(held) or 'none'}")
    if arguments.json:
        from _common import emit

        emit(arguments.json, result)


if __name__ == "__main__":
    main()
