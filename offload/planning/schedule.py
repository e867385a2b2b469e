"""When is each unit used next? The recorded trace of a step and the table made of it.

Owns the trace of the previous step, the position in it, and resynchronisation when the control flow differs. Pure
Python over unit indices: no tensors, no I/O, no clocks. Next: :mod:`offload.planning.eviction` chooses by it who
leaves, :mod:`offload.shards.manager` what comes.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterator

NEVER = 1 << 60
PREFETCH_WINDOW = 64  # uses that prefetching looks at


class Schedule:
    """Next-use table over a cyclic trace of unit uses.

    The trace of step t predicts step t+1. Uses are recorded as they happen; :meth:`restart` closes a step. A use that
    the trace did not predict moves the position to that unit's next predicted use, if there is one: dynamic control
    flow costs prefetches, never correctness.
    """

    def __init__(self, first_guess: list[int]) -> None:
        """Start from a guess, normally the units in model order and back."""
        self._trace: list[int] = []
        self._positions: dict[int, list[int]] = {}
        self._recorded: list[int] = []
        self._position = 0
        self._adopt(first_guess)

    @property
    def trace(self) -> tuple[int, ...]:
        """The uses that are predicted for a step."""
        return tuple(self._trace)

    @property
    def order(self) -> tuple[int, ...]:
        """The units of a step in the order in which it uses each first."""
        return tuple(dict.fromkeys(self._trace))

    @property
    def last(self) -> int | None:
        """The unit that was used last in this cycle: it may be in use still."""
        return self._recorded[-1] if self._recorded else None

    def coming(self, distance: int) -> int:
        """Return the unit that is used after `distance` further uses."""
        return self._trace[(self._position + distance) % len(self._trace)]

    @property
    def position(self) -> int:
        """Uses of this cycle so far, as far as they were predicted."""
        return self._position

    def use(self, unit: int) -> None:
        """Record that `unit` is used now and move on."""
        if self._recorded and self._recorded[-1] == unit:
            return
        self._recorded.append(unit)
        if self._trace and self._trace[self._position % len(self._trace)] == unit:
            self._position += 1
            return
        distance = self.distance(unit)
        if distance != NEVER:
            self._position += distance + 1

    def restart(self) -> None:
        """Close a step: what was recorded becomes the prediction, the position goes to its start."""
        if self._recorded:
            self._adopt(self._recorded)
            self._recorded = []
        self._position = 0

    def distance(self, unit: int, *, behind: int = 0) -> int:
        """Return after how many further uses `unit` is used again (0: next), :data:`NEVER` if not in the trace.

        The first `behind` uses do not count; they are at most one cycle.
        """
        positions = self._positions.get(unit)
        if not positions:
            return NEVER
        length = len(self._trace)
        now = self._position % length
        first = now + behind
        around = length if first >= length else 0
        index = bisect.bisect_left(positions, first - around)
        found = positions[index] if index < len(positions) else positions[0] + length
        return found + around - now

    def upcoming(self, limit: int, *, within_step: bool = False) -> Iterator[int]:
        """Yield the next distinct units, nearest first, looking at most `limit` uses ahead.

        With `within_step`, none that are only used after the step.
        """
        seen: set[int] = set()
        length = len(self._trace)
        ahead = max(length - self._position, 0) if within_step else length
        for step in range(min(limit, ahead)):
            unit = self._trace[(self._position + step) % length]
            if unit not in seen:
                seen.add(unit)
                yield unit

    def _adopt(self, trace: list[int]) -> None:
        self._trace = list(trace)
        self._positions = {}
        for position, unit in enumerate(self._trace):
            self._positions.setdefault(unit, []).append(position)


class Schedules:
    """The schedules of an engine's training steps and evaluations.

    Attributes:
        training: of steps.
        current: of the pass that is under way.
    """

    def __init__(self, order: list[int]) -> None:
        """Start from units in model order, and back."""
        self.training = Schedule(order + order[::-1])
        self._evaluation: Schedule | None = None
        self.current = self.training

    def begin(self, *, training: bool) -> None:
        """Note which kind of pass begins, or goes on. The first evaluation is expected to go as training forwards."""
        if not training and self._evaluation is None:
            self._evaluation = Schedule(list(self.training.order))
        self.current = self.training if training or self._evaluation is None else self._evaluation
