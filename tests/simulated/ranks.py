"""Several ranks by the clock, of which one is here: the others do the same at the same times.

Ranks that train one model in equal parts call the same collectives in one order. So what one of them sees tells of all:
a collective begins when it comes, and takes what its bytes take of the link. The engine's own ranks are above it, with
their agreements, their groups, and how they wait. Of what others have there are no bytes: for dry runs.
"""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Sequence
from typing import Any

import torch

import simulated
from offload.distributed.processes import DEADLINE_S, Processes
from offload.distributed.ranks import OneRank, Ranks
from offload.stats import Counters

WORDS, PARAMETERS, GRADIENTS = "wire words", "wire parameters", "wire gradients"  # lanes of one link
LANES = (WORDS, PARAMETERS, GRADIENTS)


@dataclasses.dataclass(frozen=True)
class Wires:
    """The ranks, each on a node of its own, and what connects them.

    Attributes:
        world: how many ranks there are.
        bytes_s: that a rank sends per second, and receives meanwhile.
        latency_s: of a collective, beside its bytes.
    """

    world: int
    bytes_s: float
    latency_s: float = 50e-6  # a message there and back over TCP, roughly


class Wire:
    """A rank's link to the others: one collective at a time, in the order in which they are given."""

    def __init__(self, wires: Wires) -> None:
        self.wires = wires
        self._core = simulated.load()
        self._end = self._busy_s = 0.0

    def start(self, lane: str, size_bytes: int) -> _Work:
        """Begin a collective in which each rank sends `size_bytes`."""
        begin, seconds = max(self._core.now(), self._end), self.wires.latency_s + size_bytes / self.wires.bytes_s
        self._end = begin + seconds
        self._busy_s += seconds
        self._core.note(lane, lane, size_bytes, begin, self._end)
        return _Work(lane, self._end)

    def moved_bytes(self) -> float:
        """Return the bytes of host memory that it has taken so far: what is sent is read, what comes is written."""
        return 2 * self.wires.bytes_s * (self._busy_s - max(self._end - self._core.now(), 0.0))


class _Work:
    """A collective under way."""

    def __init__(self, lane: str, end: float) -> None:
        self._core = simulated.load()
        self._lane = lane
        self._end = end

    def is_completed(self) -> bool:
        """Tell whether it is over at the caller's time."""
        return bool(self._core.now() >= self._end)

    def wait(self) -> None:
        """Wait for its end."""
        self._core.wait_until(self._end, self._lane)


class _Group:
    """Stands for a group of torch.distributed."""

    def __init__(self, wire: Wire, world: int) -> None:
        self._wire = wire
        self._world = world

    def allgather(self, full: Sequence[Sequence[torch.Tensor]], own: Sequence[torch.Tensor]) -> _Work:
        return self._wire.start(PARAMETERS, own[0].nbytes * (self._world - 1))

    def _allgather_base(self, full: torch.Tensor, own: torch.Tensor) -> _Work:
        full.view(self._world, -1).copy_(own.view(1, -1))  # what ranks say is the same on all of them
        return self._wire.start(WORDS, own.nbytes * (self._world - 1))

    def alltoall_base(self, received: torch.Tensor, sent: torch.Tensor, *_: Any) -> _Work:
        return self._wire.start(GRADIENTS, sent.nbytes // self._world * (self._world - 1))


class _Meeting:
    """Stands for what the threads of a rank have in common: nobody has failed, and none is in another place."""

    def __init__(self, wire: Wire, counters: Counters) -> None:
        self._wire = wire
        self.rank, self.world, self.nodes = 0, wire.wires.world, 1
        self.deadline_s = DEADLINE_S
        self.counters = counters
        self.ended: str | None = None
        self.left: list[_Work] = []
        self.words = types.SimpleNamespace(is_alarmed=lambda: False, fail=lambda text: text, leave=lambda: None)

    def connect(self, name: str, patience: int, among: Sequence[int]) -> _Group:
        return _Group(self._wire, len(among))


def stand_ins(wire: Wire) -> dict[tuple[str, str], Any]:
    """Return what takes the places of names in the engine's modules, by module and name.

    Values of parameters are not compared: nobody has any.
    """

    def ranks_of(stage: Any, group: Any, counters: Counters, *, trains: bool = True) -> Ranks:
        meeting: Any = _Meeting(wire, counters)
        return OneRank() if stage is None else Processes(meeting, "control", "data")

    return {
        ("offload.engine", "ranks_of"): ranks_of,
        ("offload.several", "_digests"): lambda manager: {},
        ("offload.checkpoint.values", "digest"): lambda value: "",
    }
