"""Which gradients all ranks have: what each says in a round, and what follows from it for all of them.

Owns the bytes of what is said, and the order of exchanges. In a round each rank says which units are *settled*: nothing
more will come of them in this backward pass. It also says which of their parameters have a gradient. What is settled on
all ranks is exchanged, in one order, for all have heard the same. So ranks may meet units in any order, or not at all.
Pure arithmetic. Next: :mod:`offload.shards.exchanges` takes part in rounds.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping, Sequence

_ENDED, _STUCK = 1, 2
Presence = Mapping[int, Sequence[bool]]  # per unit, which of its parameters have a gradient


@dataclasses.dataclass(frozen=True, slots=True)
class Said:
    """What a rank says in a round.

    Attributes:
        settled: units of which nothing more will come in this backward pass.
        present: per unit and parameter, whether a gradient is there.
        ended: its backward pass is over: all is settled.
        stuck: it has no room for another unit before some of these have gone.
    """

    settled: frozenset[int]
    present: Presence
    ended: bool = False
    stuck: bool = False


class Standing:
    """How far a rank is in rounds, for others that wait for it elsewhere.

    Attributes:
        heard: rounds in which it has heard all ranks so far; whether it waits for the next one and can do nothing else.
        computes: gradients are taken in a thread apart, and the one that computes does not wait for that.
    """

    def __init__(self) -> None:
        self.heard = (0, False)
        self.computes = False

    def hear(self) -> None:
        """Note that a round has been heard: what follows from it comes without any other rank's help."""
        self.heard = (self.heard[0] + 1, False)

    def wait(self) -> None:
        """Note that the rank can do nothing before the next round."""
        self.heard = (self.heard[0], True)


class Rounds:
    """The rounds of one micro-batch."""

    def __init__(self, slots: Mapping[int, int]) -> None:
        """Begin with nothing exchanged; `slots` tells how many parameters each unit has."""
        self._slots = dict(slots)
        self._order = sorted(slots, reverse=True)  # gradients come in about this order
        self._left = list(self._order)

    @property
    def over(self) -> bool:
        """Whether all units have been agreed on."""
        return not self._left

    @property
    def size_bytes(self) -> int:
        """Bytes of what a rank says."""
        return 1 + (len(self._order) + sum(self._slots.values()) + 7) // 8

    def pack(self, said: Said) -> bytes:
        """Return what a rank says as bytes."""
        flags = _ENDED * said.ended | _STUCK * said.stuck
        bits, at = 0, 0
        for index in self._order:
            for flag in (said.ended or index in said.settled, *said.present[index]):
                bits |= int(flag) << at
                at += 1
        return bytes([flags]) + bits.to_bytes(self.size_bytes - 1, "little")

    def unpack(self, data: bytes) -> Said:
        """Return what :meth:`pack` was given; of a rank that has ended, all is settled."""
        bits, at = int.from_bytes(data[1:], "little"), 0
        settled, present = set[int](), dict[int, list[bool]]()
        for index in self._order:
            if bits >> at & 1:
                settled.add(index)
            count = self._slots[index]
            present[index] = [bool(bits >> (at + 1 + slot) & 1) for slot in range(count)]
            at += 1 + count
        return Said(frozenset(settled), present, bool(data[0] & _ENDED), bool(data[0] & _STUCK))

    def agree(self, every: Collection[Said]) -> list[int]:
        """Return the units that all ranks exchange after a round in which they have said this, in this order."""
        agreed = [index for index in self._left if all(index in said.settled for said in every)]
        self._left = [index for index in self._left if index not in agreed]
        return agreed

    def begin(self) -> None:
        """Begin the next micro-batch."""
        self._left = list(self._order)
