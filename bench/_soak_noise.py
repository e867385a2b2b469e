"""What the soak disturbs a run with: a processor that is busy, memory that comes and goes, a drive that is late."""

from __future__ import annotations

import contextlib
import os

os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # before torch: threads that spin cost the soak most of its steps

import collections
import dataclasses
import random
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import torch

from swap import Fault, FaultAction, FaultTarget

MIB = 1 << 20
LONGEST_DELAYS_S = (0.02, 0.02, 0.02, 0.4)  # the last is longer than what the small models take for a pass
_BURN = """
import sys, time
for line in sys.stdin:
    end = time.perf_counter() + float(line)
    while time.perf_counter() < end:
        pass
"""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Step:
    """What happens in one step, the same on all sides; drawn from the seed.

    Attributes:
        threads: of torch.
        kernel_threads: of the optimizer's kernels, per side.
        clip: share of the gradients' norm that they are clipped to; None where nothing clips.
        burn_s: seconds for which a process of its own computes beside.
        ballast_bytes: of each piece of memory that modules find taken, or given back.
        delays: (the number of the I/O that is late, seconds, which I/Os are counted).
        looks: digests are compared before the step.
        looks_after: and behind it.
        evaluates: a forward without gradients comes first.
    """

    threads: int
    kernel_threads: tuple[int, ...]
    clip: float | None
    burn_s: float
    ballast_bytes: int
    delays: tuple[tuple[int, float, FaultTarget], ...]
    looks: bool
    looks_after: bool
    evaluates: bool

    @classmethod
    def draw(cls, rng: random.Random, *, sides: int, operations: int, ballast_bytes: int, clips: bool) -> Step:
        """Draw a step.

        Args:
            rng: decides.
            sides: number of engines.
            operations: so many I/Os a step has, about.
            ballast_bytes: most memory that comes at once.
            clips: this is a time in which steps clip, now and then.
        """
        late = rng.choice((0, 0, 1, 3, 9))
        longest_s = rng.choice(LONGEST_DELAYS_S)
        return cls(
            threads=rng.choice((1,) * 8 + (2, 3)),
            kernel_threads=tuple(rng.choice((1, 1, 2, 3)) for _ in range(sides)),
            clip=rng.choice((None, 0.5, 2.0)) if clips else None,  # 2.0 asks for it, and nothing is to be clipped
            burn_s=rng.choice((0.0,) * 6 + (0.02, 0.2)),
            ballast_bytes=rng.choice((0, 0, ballast_bytes)),
            delays=tuple(
                (rng.randint(1, operations), rng.random() ** 3 * longest_s, rng.choice(tuple(FaultTarget)))
                for _ in range(late)
            ),
            looks=rng.random() < 0.5,
            looks_after=rng.random() < 0.1,
            evaluates=rng.random() < 0.05,
        )


class Load:
    """A process beside that computes when it is told to."""

    def __init__(self) -> None:
        self._process = subprocess.Popen([sys.executable, "-c", _BURN], stdin=subprocess.PIPE, text=True)

    def burn(self, seconds: float) -> None:
        """Let it compute for some time from now, or from when it has done what it was told before."""
        if seconds:
            assert self._process.stdin is not None
            self._process.stdin.write(f"{seconds}\n")
            self._process.stdin.flush()

    def close(self) -> None:
        """End it."""
        self._process.kill()
        self._process.communicate()


class Ballast:
    """Memory that comes and goes between the modules of a model."""

    PIECES = 4

    def __init__(self, model: torch.nn.Module, rng: random.Random) -> None:
        self._rng = rng
        self._pieces: collections.deque[torch.Tensor] = collections.deque(maxlen=self.PIECES)
        self.piece_bytes = 0
        for module in model.modules():
            module.register_forward_pre_hook(self._pass_by)

    def _pass_by(self, module: torch.nn.Module, args: Any) -> None:
        if not self.piece_bytes:
            self._pieces.clear()
        elif self._rng.random() < 0.1:
            if self._rng.random() < 0.5:
                self._pieces.clear()
            self._pieces.append(torch.ones(self._rng.randint(1, self.piece_bytes), dtype=torch.uint8))


@contextlib.contextmanager
def late(store: Any, step: Step) -> Iterator[None]:
    """Delay I/Os of a swap store inside the block."""
    if store is None or not step.delays:
        yield
        return
    for nth, delay_s, target in step.delays:
        store.inject(Fault(nth=nth, action=FaultAction.DELAY, delay_s=delay_s, target=target))
    try:
        yield
    finally:
        store.clear_faults()
