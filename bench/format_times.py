"""How much processor time does a step take per element, with each format of the optimizer's states?

Two places: data that stay in the second-level cache, which shows the loops themselves, and data larger than all caches.
A round runs every format once, in an order of its own; ratios are medians of those inside a round, so they hold on a
shared machine, too. What a call costs without elements is subtracted. Prints nanoseconds of processors per element,
the least and the median, and the ratio to float32 states with the same master. Writes JSON.
"""

from __future__ import annotations

import argparse
import os
import random
import statistics
import time
from collections.abc import Callable

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch, whose threads would count

from _common import emit
from _cpu_adam_contenders import HYPER, Memory

from offload import _cpu_adam
from offload.kernels import cpu_adam
from offload.kernels.cpu_adam import Dtype, MasterKind, StateKind, StepArrays

MASTERS = {"split": (MasterKind.SPLIT, 0), "float32, bf16 emitted": (MasterKind.FLOAT32, 2)}
Times = dict[str, list[float]]  # nanoseconds per element of every round


def call(arrays: StepArrays, master_code: int, numel: int) -> Callable[[], None]:
    """Return a step without the checks of Python, which take as long as a small step."""
    words = {
        "rule": HYPER.spec.kernel,
        "state_kind": arrays.state_kind.code,
        "mode": 0,
        "numel": numel,
        "grad": arrays.grad,
        "grad_dtype": Dtype.BFLOAT16.value,
        "param": arrays.param,
        "master": arrays.master,
        "master_kind": master_code,
        "state0": arrays.states[0],
        "state1": arrays.states[1],
        "units": arrays.units,
        "emit": arrays.emit,
        "constants": HYPER.constants(),
        "seed": 0,
        "number": 10,
        "offset": 0,
    }
    return lambda: _cpu_adam.step(**words)


def measure(numel: int, repeats: int, rounds: int) -> Times:
    """Return the times of every format on `numel` elements, after one round that does not count."""
    memory = Memory(numel)
    pairs: dict[str, tuple[Callable[[], None], Callable[[], None]]] = {}
    for name, (kind, code) in MASTERS.items():
        for states in StateKind:
            arrays = memory.arrays(kind, states)
            pairs[f"{name}, {states.value}"] = call(arrays, code, numel), call(arrays, code, 0)
    found: Times = {name: [] for name in pairs}
    order, names = random.Random(0), list(pairs)
    for counted in [False] + [True] * rounds:
        order.shuffle(names)
        for name in names:
            step, empty = pairs[name]
            begin = time.process_time_ns()
            for _ in range(repeats):
                step()
            middle = time.process_time_ns()
            for _ in range(repeats):
                empty()
            if counted:
                found[name].append((2 * middle - begin - time.process_time_ns()) / repeats / numel)
    return found


def table(times: Times) -> dict[str, dict[str, float]]:
    """Return the least and the median of each format, and its ratio to float32 states."""
    rows = {}
    for name, values in times.items():
        exact = times[f"{name.rpartition(', ')[0]}, {StateKind.FLOAT32.value}"]
        rows[name] = {
            "least_ns": min(values),
            "median_ns": statistics.median(values),
            "of_float32": statistics.median(a / b for a, b in zip(values, exact, strict=True)),
        }
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--numel", type=int, default=64 << 20, help="elements beyond all caches")
    parser.add_argument("--cached", type=int, default=64 << 10, help="elements that stay in a cache")
    parser.add_argument("--threads", type=int, nargs="+", default=[1, 2], help="of the large case")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--isa", choices=cpu_adam.available_isas(), help="default: the widest")
    parser.add_argument("--smoke", action="store_true", help="small and short: shows that it runs")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.numel, arguments.cached, arguments.rounds = 1 << 18, 1 << 14, 2
    if arguments.isa:
        cpu_adam.force_isa(arguments.isa)
    places = [(f"{arguments.cached} elements, 1 thread", arguments.cached, 1, 40, 4 * arguments.rounds)]
    for threads in arguments.threads:
        name = f"{arguments.numel} elements, {threads} thread{'s' if threads > 1 else ''}"
        places.append((name, arguments.numel, threads, 1, arguments.rounds))
    result = {}
    for name, numel, threads, repeats, rounds in places:
        cpu_adam.set_num_threads(threads)
        rows = table(measure(numel, repeats, rounds))
        print(f"\n| {name} | least ns | median ns | of float32 |\n|---|---|---|---|")
        for what, row in rows.items():
            print(f"| {what} | {row['least_ns']:.3f} | {row['median_ns']:.3f} | {row['of_float32']:.3f} |")
        result[name] = rows
    emit(
        arguments.json, {"isa": cpu_adam.isa(), "rounds": arguments.rounds, "smoke": arguments.smoke, "places": result}
    )


if __name__ == "__main__":
    main()
