"""A step of many GPUs, on paper: where slices live, bytes and seconds per link, and a simulated step.

Owns the formulas, which ``docs/scale.md`` tells, and the simulation. Each GPU is a rank with 1/W of everything (stage
3). Pure arithmetic over plain values: nobody has run this. Next: :mod:`offload.cli.scale` prints it.
"""

from __future__ import annotations

import dataclasses
import heapq
import math
from collections.abc import Mapping, Sequence

from offload.memory.budget import Tier
from offload.memory.limits import DEVICE_HEADROOM, HOST_HEADROOM
from offload.planning.asked import LOOK_AHEAD, WORKING_UNITS
from offload.planning.clusters import Cluster
from offload.planning.sizing import ACTIVATION_SHARE

LINKS = ("fabric", "network", "h2d", "d2h", "cpu", "drive")
LANES = ("compute", *LINKS)
PARAM, GRAD, STATES = 2, 4, 10  # bytes per parameter: bf16; sums in fp32; the master's rest, two moments in fp32
FLOPS = 8  # per parameter and token: forward, backward of twice as much, forward again
UNITS_PER_DEVICE = 8  # a unit is at most this part of a GPU's memory
STEPS = 3  # simulated, of which the last counts
_ROUNDING = 1e-9  # of shares


@dataclasses.dataclass(frozen=True, slots=True)
class Case:
    """What is asked.

    Attributes:
        cluster: of which nodes.
        gpus: how many, in all.
        parameters: of the model.
        layers: units, at least.
        tokens: of each GPU and step.
        two_level: gradients are added within nodes first, and not in rank order.
    """

    cluster: Cluster
    gpus: int
    parameters: int
    layers: int
    tokens: int
    two_level: bool = False

    @property
    def nodes(self) -> int:
        """How many there are."""
        return math.ceil(self.gpus / self.cluster.gpus)

    @property
    def local(self) -> int:
        """GPUs of a node."""
        return min(self.gpus, self.cluster.gpus)

    @property
    def units(self) -> int:
        """Parts of the model that are gathered at once."""
        return max(self.layers, math.ceil(PARAM * self.parameters * UNITS_PER_DEVICE / self.cluster.device_bytes))


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """What a case takes.

    Attributes:
        homes: per kind of shard, the share of it that is at home in each tier.
        bytes: of one GPU and step, per link.
        seconds: of work per lane.
        step_s: of a simulated step.
    """

    homes: Mapping[str, Mapping[Tier, float]]
    bytes: Mapping[str, float]
    seconds: Mapping[str, float]
    step_s: float

    @property
    def binding(self) -> str:
        """The lane with the most work."""
        return max(self.seconds, key=lambda lane: self.seconds[lane])

    @property
    def efficiency(self) -> float:
        """The part of a step in which a GPU computes."""
        return self.seconds["compute"] / self.step_s


def step_of(case: Case) -> Step | None:
    """Return what a step takes; None where the model does not fit."""
    homes = _homes(case)
    if homes is None:
        return None
    moved = _moved(case, homes)
    seconds = _seconds(case, moved)
    return Step(homes, moved, seconds, _simulated(case, moved, seconds))


def most_parameters(case: Case) -> int:
    """Return how large a model the memory of all tiers holds, by the same homes."""
    return int(case.gpus * sum(_rooms(case).values()) / (PARAM + GRAD + STATES))


def _rooms(case: Case) -> dict[Tier, float]:
    """Return the bytes of each tier that one GPU's slices may take."""
    cluster, unit_bytes = case.cluster, PARAM * case.parameters / case.units
    device = cluster.device_bytes * DEVICE_HEADROOM * (1 - ACTIVATION_SHARE)
    return {
        Tier.DEVICE: max(device - (WORKING_UNITS + LOOK_AHEAD) * unit_bytes, 0.0),
        Tier.HOST: cluster.host_bytes * HOST_HEADROOM / case.local,
        Tier.NVME: cluster.drive_bytes / case.local,
    }


def _homes(case: Case) -> dict[str, dict[Tier, float]] | None:
    """Return the homes; None where there is no room.

    Parameters come first on a device, then states and gradients together, for what it updates by itself. Of the rest,
    host memory takes gradients first, then parameters, then states.
    """
    left, own = _rooms(case), case.parameters / case.gpus
    sizes = {"gradients": GRAD * own, "parameters": PARAM * own, "states": STATES * own}
    params = min(left[Tier.DEVICE] / sizes["parameters"], 1.0)
    updates = min((left[Tier.DEVICE] - params * sizes["parameters"]) / (sizes["gradients"] + sizes["states"]), 1.0)
    updates = updates if updates > _ROUNDING else 0.0
    homes = {kind: {Tier.DEVICE: params if kind == "parameters" else updates} for kind in sizes}
    for kind, size in sizes.items():
        for tier in (Tier.HOST, Tier.NVME):
            rest = 1 - sum(homes[kind].values())
            homes[kind][tier] = min(rest, left[tier] / size) if rest > _ROUNDING else 0.0
            left[tier] -= homes[kind][tier] * size
        if 1 - sum(homes[kind].values()) > _ROUNDING:
            return None
    return homes


def _moved(case: Case, homes: Mapping[str, Mapping[Tier, float]]) -> dict[str, float]:
    """Return the bytes of one GPU and step per link."""
    total, many, nodes, local = case.parameters, case.gpus, case.nodes, case.local
    own = total / many
    away = 1 - homes["parameters"][Tier.DEVICE]
    by_host = 1 - homes["states"][Tier.DEVICE]  # of the updates
    drive = {kind: homes[kind][Tier.NVME] for kind in homes}
    # A gather brings the slices of other nodes once to each node, and from there to all of its GPUs.
    gathered = 2 * PARAM * total
    fabric, network = gathered * (local - 1) / local, gathered * (nodes - 1) / many
    if case.two_level:  # sums of a node in 16 bits, and sums of nodes in fp32
        fabric, network = fabric + PARAM * total * (local - 1) / local, network + GRAD * total * (nodes - 1) / many
    else:  # each GPU gets its slice of every GPU's gradients
        fabric, network = fabric + PARAM * total * (local - 1) / many, network + PARAM * total * (many - local) / many
    return {
        "fabric": fabric,
        "network": network,
        "h2d": own * PARAM * (2 * away + max(by_host - away, 0)),
        "d2h": own * (GRAD * by_host + PARAM * max(by_host - away, 0)),
        "cpu": own * by_host * (2 * (PARAM + STATES) + GRAD),
        "drive": own * (4 * PARAM * drive["parameters"] + 2 * STATES * drive["states"] + 2 * GRAD * drive["gradients"]),
    }


def _seconds(case: Case, moved: Mapping[str, float]) -> dict[str, float]:
    cluster = case.cluster
    rates = {
        "fabric": cluster.fabric_bytes_s,
        "network": cluster.network_bytes_s,
        "h2d": cluster.link_bytes_s,
        "d2h": cluster.link_bytes_s,
        "cpu": cluster.update_bytes_s / case.local,
        "drive": cluster.drive_bytes_s / case.local,
    }
    compute_s = FLOPS * case.parameters * case.tokens / (cluster.flops * cluster.flops_share)
    return {"compute": compute_s} | {link: moved[link] / rates[link] for link in LINKS}


class _Graph:
    """Operations on lanes: each begins when those that it waits for are over, and its lane is free."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, float, list[int]]] = []

    def add(self, lane: str, seconds: float, behind: Sequence[int]) -> int:
        """Return the number of a new operation; the lower it is, the sooner its lane takes it."""
        self.operations.append((lane, seconds, list(behind)))
        return len(self.operations) - 1

    def run(self) -> list[float]:
        """Return when each operation is over."""
        waits = [len(set(behind)) for _, _, behind in self.operations]
        then: list[list[int]] = [[] for _ in self.operations]
        for number, (_, _, behind) in enumerate(self.operations):
            for before in set(behind):
                then[before].append(number)
        ready: dict[str, list[int]] = {lane: [] for lane in LANES}
        busy, over, running, now = set[str](), [0.0] * len(waits), list[tuple[float, int]](), 0.0
        for number, many in enumerate(waits):
            if not many:
                heapq.heappush(ready[self.operations[number][0]], number)
        while True:
            for lane, queue in ready.items():
                if queue and lane not in busy:
                    number = heapq.heappop(queue)
                    busy.add(lane)
                    heapq.heappush(running, (now + self.operations[number][1], number))
            if not running:
                return over
            now, ended = heapq.heappop(running)
            over[ended] = now
            busy.discard(self.operations[ended][0])
            for number in then[ended]:
                waits[number] -= 1
                if not waits[number]:
                    heapq.heappush(ready[self.operations[number][0]], number)


def _simulated(case: Case, moved: Mapping[str, float], seconds: Mapping[str, float]) -> float:
    """Return the seconds of a step in which all lanes work beside each other.

    A unit is fetched when the one :data:`LOOK_AHEAD` before it is computed, and not before its update. It is computed
    when it is there. Its gradient is exchanged, comes down, and is used by its update: drive, CPU, drive.
    """
    graph, units = _Graph(), case.units
    gathered = 2 * PARAM * case.parameters
    first = {  # what a gather takes of the links between GPUs; the rest is of gradients
        "fabric": gathered * (case.local - 1) / case.local / moved["fabric"] if moved["fabric"] else 0.0,
        "network": gathered * (case.nodes - 1) / case.gpus / moved["network"] if moved["network"] else 0.0,
    }
    own, homes = case.parameters / case.gpus, _homes(case)
    assert homes is not None
    fetched = 2 * PARAM * own * homes["parameters"][Tier.NVME] / moved["drive"] if moved["drive"] else 0.0
    each = {lane: whole / units for lane, whole in seconds.items()}
    updated, ends, computed = [list[int]() for _ in range(units)], list[int](), list[int]()

    def use(unit: int, share: float) -> int:
        behind = [*updated[unit], *computed[-1 - LOOK_AHEAD : len(computed) - LOOK_AHEAD]]
        for lane, part in (
            ("drive", fetched),
            ("h2d", 1.0),
            ("network", first["network"]),
            ("fabric", first["fabric"]),
        ):
            behind = [graph.add(lane, each[lane] * part / 2, behind)]
        computed.append(graph.add("compute", each["compute"] * share, [*behind, *computed[-1:]]))
        return computed[-1]

    for _ in range(STEPS):
        for unit in range(units):
            use(unit, 1 / 4)
        for unit in reversed(range(units)):
            behind = [use(unit, 3 / 4)]
            for lane, part in (("fabric", 1 - first["fabric"]), ("network", 1 - first["network"]), ("d2h", 1.0)):
                behind = [graph.add(lane, each[lane] * part, behind)]
            for lane, part in (("drive", (1 - fetched) / 2), ("cpu", 1.0), ("drive", (1 - fetched) / 2)):
                behind = [graph.add(lane, each[lane] * part, behind)]
            updated[unit] = behind
        ends.append(computed[-1])
    over = graph.run()
    return over[ends[-1]] - over[ends[-2]]
