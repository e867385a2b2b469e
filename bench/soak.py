"""Are the bits the same whatever the world does? Engines in lockstep, one per placement, disturbed on purpose.

``device`` has everything on the device, ``nvme`` parameters and states on NVMe, ``mixed`` some of each.
All get the same batches, and in each step what the seed has drawn: late I/Os, memory that comes and goes, a busy
processor, thread counts, clipping, evaluation in between. From time to time all are made anew, with other formats and
budgets. Losses and norms are compared in every step; digests of all parameters, gradients, masters and states (see
``engine.digests``) in most, before the optimizer's step and sometimes behind it. The first difference is reported with
the unit, the role, the step and what was under way, and ends the run.

The same ``--seed`` draws the same steps. What is late by itself, and when the kernel takes memory, is not drawn.
``--cut`` lets four reads of a step bring a wrong byte, to see that it is found.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import copy
import dataclasses
import json
import random
import secrets
import sys
import tempfile
import time
from typing import Any

from _soak_noise import MIB, Ballast, Load, Step, late  # first: it says how threads wait

# isort: split
import torch
from _common import emit, load_model

import offload
from offload.kernels import cpu_adam
from swap import Fault, FaultAction, FaultTarget

Digests = dict[str, dict[str, str]]


class Different(Exception):
    """Two sides differ; the text says where, `what` is the same for a file."""

    def __init__(self, what: dict[str, Any]) -> None:
        super().__init__("\n".join(f"{name}: {value}" for name, value in what.items()))
        self.what = what


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
    """What goes with the size of a model.

    Attributes:
        tokens: per micro-batch.
        steps: a life has one of these.
        activations: room for them; what they take stays below, and ballast brings it above.
        ballast: most of a piece; there are four.
        operations: I/Os of a step, about.
        units: there are about so many in the parameters' size; None leaves it to the engine.
    """

    tokens: int
    steps: tuple[int, ...]
    activations: int
    ballast: int
    operations: int
    units: int | None


SIZES = {
    "tiny": Size(tokens=32, steps=(3, 10, 40, 120), activations=48 * MIB, ballast=2 * MIB, operations=40, units=12),
    "small": Size(tokens=64, steps=(3, 10, 30), activations=40 * MIB, ballast=6 * MIB, operations=100, units=None),
    "real": Size(tokens=256, steps=(5, 10), activations=600 * MIB, ballast=40 * MIB, operations=600, units=None),
}


@dataclasses.dataclass(frozen=True)
class Life:
    """The formats and budgets between two times that the engines are made anew; drawn from the seed."""

    steps: int
    dtype: str
    state_dtype: str
    accumulation: int
    clips: bool
    mixed: tuple[str, str]
    gradients_in_memory: float
    on_device: float

    @classmethod
    def draw(cls, rng: random.Random, size: Size) -> Life:
        """Draw a life."""
        return cls(
            steps=rng.choice(size.steps),
            dtype=rng.choice(("bfloat16", "bfloat16", "float32")),
            state_dtype=rng.choice(("float32", "float32", "bfloat16", "int8")),
            accumulation=rng.choice((1, 1, 2)),
            clips=rng.random() < 0.5,
            mixed=rng.choice((("cpu", "nvme"), ("nvme", "cpu"), ("none", "nvme"), ("none", "cpu"), ("nvme", "nvme"))),
            gradients_in_memory=rng.choice((0.4, 0.4, 1.0)),
            on_device=rng.choice((0.3, 0.6, 0.9)),
        )


def placements(life: Life, model: torch.nn.Module, path: str, kind: Size) -> dict[str, dict[str, Any]]:
    """Return the options of each side."""
    itemsize = 4 if life.dtype == "float32" else 2
    sizes = [p.numel() * itemsize for p in model.parameters()]
    size, working = sum(sizes), max(3 * max(sizes), int(sum(sizes) * life.on_device))
    gradients = size * (2 if life.accumulation > 1 and itemsize == 2 else 1)
    activations = kind.activations
    staging = 4 * MIB + size // 8
    common = {
        "device": "cpu",
        "dtype": life.dtype,
        "state_dtype": life.state_dtype,
        "gradient_accumulation_steps": life.accumulation,
        "activation_memory": activations,
        "nvme_path": path,
    }
    small = common | {"unit_bytes": size // kind.units if kind.units else None}
    nvme = {"nvme": 64 * size + 256 * MIB}
    host = gradients * life.gradients_in_memory + size * (life.mixed[0] == "cpu") + 6 * size * (life.mixed[1] == "cpu")
    return {
        "device": common | {"max_memory": {"device": activations + 12 * size, "cpu": 64 * MIB}},
        "nvme": small
        | {
            "max_memory": {"device": activations + working, "cpu": staging + gradients, **nvme},
            "offload_param": "nvme",
            "offload_optimizer": "nvme",
        },
        "mixed": small
        | {
            "max_memory": {
                "device": activations + working + size * (life.mixed[0] == "none"),
                "cpu": staging + int(host),
                **nvme,
            },
            "offload_param": life.mixed[0],
            "offload_optimizer": life.mixed[1],
        },
    }


class Side:
    """One engine, and what was under way in it."""

    def __init__(self, name: str, model: torch.nn.Module, options: dict[str, Any], rng: random.Random) -> None:
        self.name = name
        self.ballast = Ballast(model, rng)
        self.engine = offload.Engine(model, offload.AdamW(lr=1e-3, weight_decay=0.1), **options)
        self.under_way: collections.deque[str] = collections.deque(maxlen=12)
        self.region_sizes: set[int] = set()  # of the working region of parameters, which gives way to other memory

    @property
    def store(self) -> Any:
        """The swap store, None where there is none."""
        return self.engine._manager.tiers.store if self.engine._manager is not None else None

    def note(self, when: str) -> None:
        """Note what is under way: updates that the last step left, updates of the next one, transfers."""
        manager = self.engine._manager
        assert manager is not None
        self.region_sizes.add(manager.working.size_bytes)
        parts = []
        for title, owner in (("update", manager.forward), ("early update", manager.backward)):
            for state, field in (
                ("waits", "_waiting"),
                ("is open", "_open"),
                ("is done", "_done"),
                ("goes", "_leaving"),
            ):
                found = getattr(owner, field, ())
                parts += [f"{title} of {unit_name(each)} {state}" for each in found]
        for shard in manager.copies:
            if shard.state.value not in ("empty", "stored", "resident"):
                parts.append(f"{shard.role.value} of {shard.unit.name} is {shard.state.value}")
        if manager.tiers.store is not None:
            parts.append(f"{manager.tiers.store.stats().in_flight} I/Os in flight")
        self.under_way.append(f"{self.name}, {when}: " + ("; ".join(parts) or "nothing"))

    def unit_of(self, parameter: str) -> str:
        """Return the name of the unit that a parameter is in."""
        units = self.engine._manager.units if self.engine._manager is not None else ()
        return next((unit.name for unit in units for slot in unit.slots if slot.name == parameter), "none")


def unit_name(entry: Any) -> str:
    """Return the name of the unit that an entry of a queue of updates is about."""
    update = getattr(entry, "update", entry)
    name: str = getattr(update, "unit", update).name
    return name


class Lockstep:
    """Sides that take the same steps, and the comparison."""

    def __init__(self, sides: list[Side], counts: collections.Counter[str]) -> None:
        self.sides = sides
        self.counts = counts
        self.number = 0  # of the step
        self.step: Step | None = None

    def compare(self, when: str, values: list[Any]) -> None:
        """Compare a number of each side.

        Raises:
            Different: they are not all the same.
        """
        if any(value != values[0] for value in values[1:]):
            found = [side.engine.digests() for side in self.sides]
            self._differ(when, dict(zip((side.name for side in self.sides), values, strict=True)), found)

    def compare_digests(self, when: str) -> None:
        """Compare all bits.

        Raises:
            Different: they are not all the same.
        """
        found = [side.engine.digests() for side in self.sides]
        self.counts["digests"] += sum(len(entry) for entry in found[0].values())
        if any(other != found[0] for other in found[1:]):
            self._differ(when, {}, found)

    def _differ(self, when: str, values: dict[str, Any], found: list[Digests]) -> None:
        first, where = found[0], []
        for side, digests in zip(self.sides[1:], found[1:], strict=True):
            for name, roles in digests.items():
                for role in sorted(roles.keys() | first[name].keys()):
                    if roles.get(role) != first[name].get(role):
                        where.append(f"{side.name}: unit {side.unit_of(name)}, {role} of {name}")
        raise Different(
            {
                "step": self.number,
                "when": when,
                "values": values,
                "differs": where[:20],
                "differences": len(where),
                "drawn": str(self.step),
                "under way": [line for side in self.sides for line in side.under_way if not line.endswith("nothing")],
            }
        )

    def take(self, step: Step, batches: list[dict[str, Any]]) -> None:
        """Take a step on every side, one side after the other, and compare.

        Raises:
            Different: something differs.
        """
        self.step, self.number = step, self.number + 1
        torch.set_num_threads(step.threads)
        losses: list[list[float]] = [[] for _ in self.sides]
        norms = []
        for side, kernel_threads, mine in zip(self.sides, step.kernel_threads, losses, strict=True):
            cpu_adam.set_num_threads(kernel_threads)
            side.ballast.piece_bytes = step.ballast_bytes
            engine = side.engine
            with late(side.store, step):
                if step.evaluates:
                    with torch.no_grad():
                        mine.append(engine(**batches[-1]).loss.item())
                for number, batch in enumerate(batches):
                    loss = engine(**batch).loss
                    mine.append(loss.item())
                    side.note("behind the forward")
                    engine.backward(loss)
                    side.note("behind backward")
                    if number < len(batches) - 1:
                        engine.step()  # closes the micro-batch
            norms.append(engine.grad_norm)
        self.compare("losses", losses)
        self.compare("norm", norms)
        if step.looks:
            self.compare_digests("before the step")
        for side in self.sides:
            with late(side.store, step):
                if step.clip is not None:
                    side.engine.clip_grad_norm_(step.clip * norms[0])
                side.engine.step()
            side.note("behind the step")
        if step.looks_after:
            self.compare_digests("behind the step")
        self.counts["steps"] += 1
        self.counts["micro-batches"] += len(batches)
        self.counts["clipped steps"] += step.clip is not None and step.clip < 1
        self.counts["late I/Os drawn"] += len(step.delays) * (len(self.sides) - 1)
        self.counts["steps beside a busy process"] += step.burn_s > 0
        self.counts["steps with ballast"] += step.ballast_bytes > 0


def live(
    life: Life, base: torch.nn.Module, arguments: argparse.Namespace, load: Load, rng: random.Random, **more: Any
) -> None:
    """Make all engines, take the steps of a life, and close them.

    Raises:
        Different: something differs.
    """
    counts, vocabulary, end, kind = more["counts"], more["vocabulary"], more["end"], SIZES[arguments.model]
    with contextlib.ExitStack() as stack:
        path = stack.enter_context(tempfile.TemporaryDirectory(dir=arguments.path))
        sides = []
        for name, options in placements(life, base, path, kind).items():
            side = Side(name, copy.deepcopy(base).train(), options, random.Random(rng.random()))
            stack.callback(side.engine.close, restore=False)
            sides.append(side)
        lockstep = Lockstep(sides, counts)
        lockstep.number = counts["steps"]
        data = torch.Generator().manual_seed(rng.randrange(1 << 30))
        for _ in range(life.steps):
            if counts["steps"] >= arguments.steps or time.monotonic() > end:
                break
            step = Step.draw(
                rng,
                sides=len(sides),
                operations=kind.operations,
                ballast_bytes=kind.ballast,
                clips=life.clips,
            )
            batches = []
            for _ in range(life.accumulation):
                tokens = torch.randint(0, vocabulary, (1, arguments.tokens), generator=data)
                batches.append({"input_ids": tokens, "labels": tokens, "use_cache": False})
            load.burn(step.burn_s)
            if arguments.cut is not None and counts["steps"] == arguments.cut:
                for nth in range(1, 5):
                    sides[1].store.inject(Fault(nth=nth, action=FaultAction.LIE, target=FaultTarget.READS))
                step = dataclasses.replace(step, delays=())
            lockstep.take(step, batches)
        lockstep.compare_digests("at the end of a life")
        for side in sides:
            stats = side.engine.stats()
            for field in ("early_units", "early_units_dropped", "stalls", "misses", "update_stalls"):
                counts[f"{side.name} {field}"] += getattr(stats, field)
            counts[f"{side.name} sizes of the working region"] += len(side.region_sizes)
        counts["lives"] += 1


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--minutes", type=float, default=float("inf"), help="end after so many, whatever --steps says")
    parser.add_argument("--seed", type=int, help="of everything that is drawn; printed")
    parser.add_argument("--model", choices=SIZES, default="tiny")
    parser.add_argument("--tokens", type=int, help="per micro-batch")
    parser.add_argument("--path", default="/var/tmp", help="directory on the drive")
    parser.add_argument("--smoke", action="store_true", help="a few steps")
    parser.add_argument("--json", help="write the result here")
    parser.add_argument("--cut", type=int, metavar="STEP", help="let reads of this step be wrong")
    arguments = parser.parse_args()
    if arguments.smoke:
        arguments.model, arguments.steps = "tiny", min(arguments.steps, 20)
    if arguments.tokens is None:
        arguments.tokens = SIZES[arguments.model].tokens
    seed = secrets.randbelow(1 << 32) if arguments.seed is None else arguments.seed
    print(f"seed {seed}", flush=True)

    begin = time.monotonic()
    base, vocabulary = load_model(arguments.model)
    counts: collections.Counter[str] = collections.Counter()
    load, difference, number, told = Load(), None, 0, begin
    end = begin + 60 * arguments.minutes
    try:
        while counts["steps"] < arguments.steps and time.monotonic() < end:
            rng = random.Random(f"{seed}/{number}")
            life = Life.draw(rng, SIZES[arguments.model])
            live(life, base, arguments, load, rng, counts=counts, vocabulary=vocabulary, end=end)
            number += 1
            if time.monotonic() - told > 60:
                told = time.monotonic()
                print(f"{(told - begin) / 60:.0f} min: {counts['steps']} steps, {number} lives", flush=True)
    except Different as found:
        difference = found.what | {"life": number, **dataclasses.asdict(life)}
        print(f"DIFFERENT in life {number}: {life}\n{found}")
    finally:
        load.close()
    minutes = (time.monotonic() - begin) / 60
    print(f"{counts['steps']} steps in {minutes:.1f} min, differences: {int(difference is not None)}")
    print(json.dumps(counts, indent=1))
    result = {"model": arguments.model, "tokens": arguments.tokens, "seed": seed, "minutes": round(minutes, 1)}
    emit(arguments.json, result | {"counts": counts, "difference": difference})
    if difference is not None:
        sys.exit(1)


if __name__ == "__main__":
    main()
