"""Are the homes that the planner chooses as good as any? Against random feasible ones, by the simulated clock.

A Llama of 1.1 B in bf16 with gradient checkpointing trains in a dry run on the desktop of
``offload/planning/hardware.py``, once with the planner's homes, and then with many random ones that fit the same
budgets: random orders of shards fill random parts of host memory and of the device, the rest goes to NVMe. All else -
buffers, staging, room for updates during backward - follows from the homes as it does for the planner's. The clock is
deterministic, so a step's seconds are exact; docs/architecture.md says what it cannot show.

Budgets are bytes per parameter. Printed are seconds of a step by the planner's homes, by the best and by the median of
the random ones, and the planner's over the best. To reach: 1.05. One setting has room for everything: there nothing is
on the drive, and a step takes what compute and the host's updates take.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import random
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from typing import Any

from _common import emit
from _llama import LEAST_NORM, engine_of, made, steps_of
from simulated import load
from simulated.engine import engine_clock
from simulated.figures import Figures

from offload import build
from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.hardware import PRESETS
from offload.planning.plan import Plan
from offload.planning.planner import Asks, make_plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.sizing import TooSmall, least_buffers, plan_of

MACHINE = "desktop"
GOAL = 1.05
MOST_TRIES = 1000  # of random homes until some fit
ACTIVATION_BYTES = 12 << 30

LARGE = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "vocab_size": 32000,
}
SMALL = {
    "hidden_size": 512,
    "intermediate_size": 2048,
    "num_hidden_layers": 12,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "vocab_size": 2000,
}


@dataclasses.dataclass(frozen=True)
class Setting:
    """Budgets, and how is trained.

    Attributes:
        device: bytes per parameter of it that are left to parameters.
        host: the same of host memory, for all.
        rows: of a micro-batch, of 2048 tokens each.
        micro_batches: of a step.
        clips: every step does.
        optimizer: a home of states that is forced.
        trained: parameters of which modules; None: all.
    """

    name: str
    device: float
    host: float
    rows: int = 4
    micro_batches: int = 1
    clips: bool = False
    state_dtype: str = "float32"
    optimizer: str = "auto"
    trained: str | None = None


SETTINGS = (
    Setting("states partly on NVMe", 0.7, 9.0, rows=12),
    Setting("states partly on NVMe, short compute", 0.7, 9.0),
    Setting("states partly on NVMe, every step clips", 0.7, 9.0, rows=12, clips=True),
    Setting("states partly on NVMe, 4 micro-batches", 0.7, 11.0, micro_batches=4),
    Setting("parameters partly on NVMe", 0.7, 4.0, rows=12),
    Setting("parameters partly on NVMe, int8 states", 0.7, 4.0, state_dtype="int8"),
    Setting("gradients partly on NVMe", 0.7, 2.4, rows=12),
    Setting("half of the parameters on the device", 1.4, 6.0, rows=12),
    Setting("states forced to NVMe", 0.7, 3.5, rows=12, optimizer="nvme"),
    Setting("everything fits host memory", 0.7, 40.0),
    Setting("less of the device, 16384 tokens", 0.5, 6.5, rows=8),
    Setting("2 micro-batches, every step clips", 0.7, 6.0, rows=6, micro_batches=2, clips=True),
    Setting("attention alone is trained", 0.7, 2.6, rows=8, trained="self_attn"),
    Setting("a few states on NVMe, 2048 tokens", 1.4, 11.5, rows=1),
    Setting("a few states on NVMe, 2048 tokens, every step clips", 1.4, 11.5, rows=1, clips=True),
)


@contextlib.contextmanager
def homes_by(choose: Callable[[Request, Asks], Plan]) -> Iterator[None]:
    """Let engines have plans by `choose`."""
    before = build.make_plan
    build.make_plan = choose
    try:
        yield
    finally:
        build.make_plan = before


def drawn(request: Request, chance: random.Random) -> Plan:
    """Return the plan of random homes that fit."""
    for _ in range(MOST_TRIES):
        with contextlib.suppress(TooSmall):
            return plan_of(request, _homes(request, chance))
    raise SystemExit("no random homes fit the budgets")


def _homes(request: Request, chance: random.Random) -> list[Homes]:
    """Return homes by chance: roles have random weights, units random ones beside, and memory is filled in part."""
    weight = {role: chance.random() for role in ("param", "grad", "states")}
    spread, kept = 2 * chance.random() ** 2, chance.random()
    roles = {"param": (Role.PARAM,), "grad": (Role.GRAD,), "states": STATE_ROLES}
    sizes = {
        (unit.index, kind): request.shard_bytes(unit, roles[kind])
        for unit in request.units
        for kind in roles
        if unit.trainable or kind == "param"
    }
    found = dict.fromkeys(sizes, Tier.NVME)
    if request.optimizer_tier is not None:
        found |= {key: request.optimizer_tier for key in sizes if key[1] == "states"}
    fixed = [key for key in sizes if key[1] == "states" and request.optimizer_tier is not None]
    buffers = least_buffers(request, [unit.index for unit in request.units], nvme=True)
    rooms = {
        Tier.HOST: (request.budgets[Tier.HOST] - buffers.total_bytes) * (1 - 0.3 * chance.random() ** 2),
        Tier.DEVICE: (request.budgets[Tier.DEVICE] - (request.activation_bytes or 0)) * kept,
    }
    for key in sorted(sizes, key=lambda key: weight[key[1]] + spread * chance.random()):
        tiers = [Tier.DEVICE, Tier.HOST] if key[1] == "param" else [Tier.HOST]
        for tier in tiers if key not in fixed else ():
            if sizes[key] <= rooms[tier]:
                rooms[tier] -= sizes[key]
                found[key] = tier
                break
    return [
        Homes(found[unit.index, "param"], found.get((unit.index, "grad")), found.get((unit.index, "states")))
        for unit in request.units
    ]


def timed(setting: Setting, sizes: dict[str, int], choose: Callable[[Request, Asks], Plan]) -> tuple[Plan, Figures]:
    """Return the plan, and what a step takes."""
    hardware = PRESETS[MACHINE]
    with engine_clock(hardware, dry=True) as watch, homes_by(choose), tempfile.TemporaryDirectory() as folder:
        model = made(sizes)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_(setting.trained is None or setting.trained in name)
        numel = sum(parameter.numel() for parameter in model.parameters())
        options: dict[str, Any] = {"activation_memory": ACTIVATION_BYTES, "state_dtype": setting.state_dtype}
        options |= {"max_grad_norm": LEAST_NORM if setting.clips else None, "offload_optimizer": setting.optimizer}
        memory = {
            "device": ACTIVATION_BYTES + int(setting.device * numel),
            "cpu": int(setting.host * numel),
            "nvme": 40 * numel,
        }
        options |= {"max_memory": memory, "nvme_path": folder, "gradient_accumulation_steps": setting.micro_batches}
        rows, micro_batches = setting.rows, setting.micro_batches
        with engine_of(model, **options) as ours:
            return ours.plan, steps_of(ours, watch, hardware, rows=rows, micro_batches=micro_batches)


def described(plan: Plan, figures: Figures) -> dict[str, Any]:
    """Return what is stored of a plan."""
    request = plan.request
    shares = {}
    for kind, roles in (("param", (Role.PARAM,)), ("grad", (Role.GRAD,)), ("states", STATE_ROLES)):
        size = dict.fromkeys(Tier, 0)
        for unit in request.units:
            home = plan.home(unit, roles[0])
            if home is not None:
                size[home] += request.shard_bytes(unit, roles)
        shares[kind] = {tier.value: round(size[tier] / sum(size.values()), 3) for tier in Tier}
    return {
        "step_s": figures.step_s,
        "work_s": dict(figures.work_s),
        "shares": shares,
        "spare_units": len(plan.spare_units),
        "early_bytes": plan.early_bytes,
        "staging_slots": plan.staging_slots,
    }


def run_setting(setting: Setting, sizes: dict[str, int], many: int, seed: int) -> dict[str, Any]:
    """Time the planner's homes and random ones; print the ratio and return all."""
    began = time.perf_counter()
    chosen = described(*timed(setting, sizes, make_plan))
    chance = random.Random(seed)
    others = [described(*timed(setting, sizes, lambda request, _: drawn(request, chance))) for _ in range(many)]
    best = min(others, key=lambda each: each["step_s"])
    median = statistics.median(each["step_s"] for each in others)
    ratio = chosen["step_s"] / best["step_s"]
    print(
        f"{setting.name:48} {chosen['step_s']:8.3f} {best['step_s']:8.3f} {median:8.3f} {ratio:8.3f}"
        f"{'' if ratio <= GOAL else '  missed'}",
        flush=True,
    )
    return {
        **dataclasses.asdict(setting),
        "chosen": chosen,
        "best": best,
        "seconds": sorted(each["step_s"] for each in others),
        "of_best": ratio,
        "simulated_in_s": time.perf_counter() - began,
    }


def main() -> None:
    """Print a line per setting."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--smoke", action="store_true", help="a model of 50 M, two settings, two random plans")
    parser.add_argument("--only", help="settings whose name contains this")
    parser.add_argument("--random", type=int, default=50, help="plans per setting")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--json", metavar="FILE")
    arguments = parser.parse_args()
    load()
    sizes, many = (SMALL, 2) if arguments.smoke else (LARGE, arguments.random)
    settings = (SETTINGS[0], SETTINGS[9]) if arguments.smoke else SETTINGS
    settings = tuple(each for each in settings if not arguments.only or arguments.only in each.name)
    print(f"{'setting':48} {'chosen s':>8} {'best s':>8} {'median s':>8} {'/ best':>8}")
    results = [run_setting(setting, sizes, many, arguments.seed) for setting in settings]
    machine = dataclasses.asdict(PRESETS[MACHINE])
    emit(
        arguments.json,
        {"model": sizes, "random": many, "seed": arguments.seed, "machine_": machine, "settings": results},
    )


if __name__ == "__main__":
    main()
