"""When is each unit used next? The recorded trace of a step and the table made of it.

Owns the trace of the previous step, the position in it, and resynchronisation when the control flow differs. Pure
Python over unit indices: no tensors, no I/O, no clocks. Next: :mod:`offload.planning.eviction` chooses by it who
leaves, :mod:`offload.shards.manager` what comes.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

NEVER = 1 << 60
PREFETCH_WINDOW = 64  # uses that prefetching looks at
MOST_USES = 1 << 18  # that are recorded: somebody may run forwards, and never a step


class Schedule:
    """Next-use table over a cyclic trace of unit uses.

    The trace of step t predicts step t+1. Uses are recorded as they happen; :meth:`restart` closes a step. A use that
    the trace did not predict moves the position to that unit's next predicted use, if there is one: dynamic control
    flow costs prefetches, never correctness. Of a step of very many uses, the first ones predict all.

    Attributes:
        order: the units of a step in the order in which it uses each first.
        edition: another number whenever another trace is predicted.
    """

    def __init__(self, first_guess: list[int]) -> None:
        """Start from a guess, normally the units in model order and back."""
        self.edition = 0
        self._recorded: list[int] = []
        self._position = 0  # grows beyond the trace, if nobody restarts
        self._next: dict[int, int] = {}  # per unit, the position of its next use
        self._adopt(first_guess)

    @property
    def trace(self) -> tuple[int, ...]:
        """The uses that are predicted for a step."""
        return tuple(self._trace)

    @property
    def last(self) -> int | None:
        """The unit that was used last in this cycle: it may be in use still."""
        return self._recorded[-1] if self._recorded else None

    def coming(self, distance: int) -> int:
        """Return the unit that is used after `distance` further uses."""
        return self._trace[(self._position + distance) % len(self._trace)]

    @property
    def turn(self) -> int:
        """Which use of the trace comes next: while the same trace is predicted, all distances follow from it."""
        return self._position % len(self._trace) if self._trace else 0

    @property
    def position(self) -> int:
        """Uses of this cycle so far, as far as they were predicted."""
        return self._position

    def use(self, unit: int) -> None:
        """Record that `unit` is used now and move on."""
        if self._recorded and self._recorded[-1] == unit:
            return
        if len(self._recorded) < MOST_USES:
            self._recorded.append(unit)
        else:
            self._recorded[-1] = unit
        position, length = self._next.get(unit, -1) + 1, len(self._trace)
        for passed in range(self._position, position):  # a single one, where the trace has predicted it
            self._next[self._trace[passed % length]] += self._until_next[passed % length]
            self._position = passed + 1

    def restart(self) -> None:
        """Close a step: what was recorded becomes the prediction, the position goes to its start."""
        if self._recorded and self._recorded != self._trace:
            self._adopt(self._recorded)
        self._recorded = []
        self._position, self._next = 0, dict(self._first)

    def distance(self, unit: int, *, behind: int = 0) -> int:
        """Return after how many further uses `unit` is used again (0: next), :data:`NEVER` if not in the trace.

        The first `behind` uses do not count; they are at most one cycle.
        """
        found = self._next.get(unit)
        if found is None:
            return NEVER
        while found < self._position + behind:
            found += self._until_next[found % len(self._trace)]
        return found - self._position

    def used_later(self, units: Iterable[int], distance: int) -> list[int]:
        """Return those of `units` that are used again after more than `distance` further uses, or never."""
        following, limit = self._next, self._position + distance
        return [unit for unit in units if following.get(unit, NEVER) > limit]

    def latest(self, limit: int) -> int:
        """Return after how many further uses the last of some units is used again, or a lower bound of `limit`.

        These are the one in use now, and those of the next `limit` uses but the last; `limit` is at most one cycle.
        """
        now = (self._position - 1) % len(self._trace) + 1
        return max(self._again[now - 1 : now + limit - 1]) - now

    def upcoming(self, limit: int, *, within_step: bool = False) -> Iterator[int]:
        """Iterate over the next distinct units, nearest first, looking at most `limit` uses ahead.

        With `within_step`, none that are only used after the step.
        """
        length, seen = len(self._trace), set[int]()
        first = self._position % length if length else 0
        ahead = max(length - self._position, 0) if within_step else length
        for unit in self._twice[first : first + min(limit, ahead)]:
            if unit not in seen:
                seen.add(unit)
                yield unit

    def _adopt(self, trace: list[int]) -> None:
        """Predict `trace`, again and again."""
        length = len(trace)
        self.edition += 1
        self._trace = list(trace)
        self.order = tuple(dict.fromkeys(trace))
        self._twice = trace * 2
        self._first: dict[int, int] = {}  # per unit, the position of its first use
        self._until_next = [0] * length  # per use, how many uses later the same unit is used again
        for position in reversed(range(2 * length)):
            unit = self._twice[position]
            if position < length:
                self._until_next[position] = self._first[unit] - position
            self._first[unit] = position
        self._again = [at + until for at, until in enumerate(self._until_next * 2)]  # of two cycles, where that is
        self._next = dict(self._first)


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
