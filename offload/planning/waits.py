"""Gradients that the host's thread waits for in a backward, as it hands them over faster than they leave the device.

Owns which these are, in the order of a backward, and when in the backward of their unit they come. Pure arithmetic over
plain values. Next: :mod:`offload.planning.played` has what the thread does when it passes by.
"""

from __future__ import annotations

import dataclasses
from collections import deque
from collections.abc import Iterable, Mapping, Sequence

from offload.planning.units import Unit


@dataclasses.dataclass(frozen=True, slots=True)
class Gradient:
    """That of one parameter: its unit, when it comes in the unit's backward, what part of the unit, and bytes."""

    unit: int
    share: float
    part: float
    size_bytes: int


def leaves_of(
    order: Iterable[int],
    trained: Mapping[int, Unit],
    gradients: Mapping[int, Sequence[tuple[int, float]]],
    room_bytes: int,
) -> dict[int, list[tuple[float, float]]]:
    """Return per unit behind which shares of its backward the thread waits for a part of the gradient, and which part.

    The last part of a unit comes when all of it is computed.

    Args:
        order: of backward, by unit.
        trained: units whose gradients leave.
        gradients: per unit those of its parameters, as :attr:`Part.gradients`; by default, they come at its end.
        room_bytes: for gradients on their way.
    """
    come = [
        Gradient(index, share, numel / trained[index].numel, numel * trained[index].itemsize)
        for index in order
        if index in trained
        for numel, share in gradients.get(index) or ((trained[index].numel, 1.0),)
    ]
    awaited = awaited_of(come, room_bytes)
    found: dict[int, list[tuple[float, float]]] = {index: [] for index in trained}
    left, part = dict.fromkeys(trained, 1.0), 0.0
    for number, gradient in enumerate(come):
        part += gradient.part
        if number + 1 == len(come) or come[number + 1].unit != gradient.unit:
            found[gradient.unit].append((1.0, left[gradient.unit]))
            part = 0.0
        elif number in awaited:
            found[gradient.unit].append((gradient.share, part))
            left[gradient.unit] -= part
            part = 0.0
    return found


def awaited_of(come: Sequence[Gradient], room_bytes: int) -> set[int]:
    """Return the numbers of gradients that the host's thread waits for: of the last ones of what leaves together.

    Those of a unit leave together, but for the ones before a wait. The thread waits for the oldest unit if all units on
    their way leave no room for the next gradient, and for the oldest of all if these of its own unit do not.
    """
    awaited, unit_bytes, batch_bytes = set[int](), 0, 0
    units, batches = deque[tuple[int, int]](), deque[tuple[int, int]]()  # bytes, and the number of the last one

    def leave(oldest: deque[tuple[int, int]]) -> None:
        last = oldest.popleft()[1]
        awaited.add(last)
        for others in (units, batches):
            while others and others[0][1] <= last:
                others.popleft()

    for number, gradient in enumerate(come):
        if number and come[number - 1].unit != gradient.unit:
            units.append((unit_bytes, number - 1))
            batches.append((batch_bytes, number - 1))
            unit_bytes = batch_bytes = 0
        while units and sum(size for size, _ in units) + gradient.size_bytes > room_bytes:
            leave(units)
        while sum(size for size, _ in batches) + batch_bytes + gradient.size_bytes > room_bytes:
            if batch_bytes:
                batches.append((batch_bytes, number - 1))
                batch_bytes = 0
            if not batches:
                break
            leave(batches)
        unit_bytes += gradient.size_bytes
        batch_bytes += gradient.size_bytes
    return awaited
