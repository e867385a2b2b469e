"""How much of what ranks send is hidden behind compute? Virtual seconds of one rank of several, on a simulated device.

An 8 B Llama in bf16 with gradient checkpointing trains in a dry run, as in ``simulated.py``. Each rank has a GPU on a
node of its own, and a link of 400 Gb/s to the others, at the share of it that ``offload/planning/clusters.py`` assumes.
One rank is simulated: the others do the same at the same times. Its agreements, its threads, the order of its
collectives and how it waits for them are the engine's own; what a collective takes is its bytes over the link.

Parameters and states live in host memory. No step clips. Beside each kind of message stand its seconds on the link in
a step, the part of them in which the device computed, and that in which it did or the CPU worked. To reach: 0.9 of
gradients with stages 2 and 3, and 0.9 of parameters with stage 3. By design, gradients leave behind backward with stage
1. With stages 1 and 2, a unit's new parameters go round in the step, beside the next unit's update.

Not in these figures: what gloo takes of the processors, links that are shared, and ranks that are late.
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Mapping
from typing import Any

from _common import emit
from _llama import FULL, SMALL, engine_of, made, memory_of, steps_of
from simulated.engine import engine_clock
from simulated.figures import Figures
from simulated.ranks import GRADIENTS, PARAMETERS, WORDS, Wires

from offload.planning.clusters import H200_NODE
from offload.planning.hardware import H200
from offload.spans import COLLECTIVES

HIDDEN = 0.9  # to reach
KINDS = {"gradients": GRADIENTS, "parameters": PARAMETERS, "words": WORDS}


@dataclasses.dataclass(frozen=True)
class Case:
    """Ranks that train together.

    Attributes:
        world: how many.
        stage: of ZeRO.
        rows: of a micro-batch of each rank, which makes up its part of a step.
    """

    world: int
    stage: int
    rows: int = 8


CASES = tuple(Case(world, stage) for world in (2, 4) for stage in (1, 2, 3))


def figures_of(case: Case, sizes: dict[str, int]) -> tuple[Figures, int]:
    """Return what steps of a rank take, and how many bytes the plan says that it sends in one."""
    wires = Wires(case.world, H200_NODE.network_bytes_s)
    options = {"offload_param": "cpu", "offload_optimizer": "cpu", "stage": case.stage, "max_memory": memory_of(H200)}
    with engine_clock(H200, dry=True, wires=wires) as watch, engine_of(made(sizes), **options) as ours:
        return steps_of(ours, watch, H200, rows=case.rows), ours.plan.step_bytes[COLLECTIVES]


def shares(figures: Figures, seconds: Mapping[str, float]) -> dict[str, float]:
    """Return the part of each kind's time on the link that these seconds per lane are."""
    return {kind: seconds[lane] / figures.busy_s[lane] for kind, lane in KINDS.items() if lane in figures.busy_s}


def run_case(case: Case, sizes: dict[str, int]) -> dict[str, Any]:
    """Measure a case, print a line and return its figures."""
    figures, planned_bytes = figures_of(case, sizes)
    hidden, beside = shares(figures, figures.hidden_s), shares(figures, figures.beside_s)
    told = [
        f"{kind} {figures.busy_s[lane]:.3f} s, {hidden[kind]:.2f} hidden, {beside[kind]:.2f} with the CPU's work"
        for kind, lane in KINDS.items()
    ]
    print(
        f"{case.world} ranks, stage {case.stage}: step {figures.step_s:.2f} s, U {figures.used:.3f}, bound "
        f"{figures.bound_s:.2f} s ({figures.binding}); {'; '.join(told)}"
    )
    found = {name: value for name, value in dataclasses.asdict(figures).items() if name not in ("turns", "ahead")}
    found |= {"U": figures.used, "R": figures.reached, "hidden": hidden, "beside": beside}
    found |= {"planned_bytes": planned_bytes}
    return {**dataclasses.asdict(case), **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--smoke", action="store_true", help="a model of three layers, two ranks")
    parser.add_argument("--json", help="write the result here")
    arguments = parser.parse_args()
    sizes = SMALL if arguments.smoke else FULL
    cases = [case for case in CASES if not arguments.smoke or case.world == 2]
    results = [run_case(case, sizes) for case in cases]
    link = {"network_bytes_s": H200_NODE.network_bytes_s, "latency_s": Wires(2, 1.0).latency_s}
    emit(arguments.json, {"model": sizes, "cases": results, "machine_of_each": dataclasses.asdict(H200), **link})


if __name__ == "__main__":
    main()
