"""Activations that leave and come back in a step that is played: :mod:`offload.activations.leaving` by the lanes.

Owns the order of copies, and the room that they take on the device and in host memory:

* What a unit's forward keeps leaves behind it, in pieces. It waits for earlier pieces where too many are under way.
* The last pieces stay. So do those that are still leaving when backward begins.
* Backward needs them in the reverse order. They come ahead, as far as the device has room.
* What was kept first goes on to the drive, and is read ahead as far as host memory has room.

Pure arithmetic over plain values. Next: :mod:`offload.planning.played`.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence

from offload.planning.hardware import Hardware
from offload.planning.lanes import COMPUTE, D2H, H2D, READ, WRITE, Lanes, Moment, Process

MOST_PIECES = 32  # of a unit
SMOOTH = 4  # so many pieces are under way at once, at least


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """What a micro-batch keeps between forward and backward, and the room for it.

    Attributes:
        kept_bytes: per unit, in the order of the forward.
        near_bytes: of the device; of them `last_bytes` are for what stays.
        host_bytes: of host memory.
        resting_bytes: of them, for what need not go on to the drive.
    """

    kept_bytes: Mapping[int, int]
    near_bytes: int
    last_bytes: int
    host_bytes: int
    resting_bytes: int


@dataclasses.dataclass(slots=True, eq=False)
class _Piece:
    """A part of what one unit's forward keeps, which ends at `end_bytes` of all."""

    end_bytes: int
    size_bytes: int
    is_leaving: bool = False
    is_in_host: bool = False
    stays: bool = False
    is_wanted: bool = False
    is_used: bool = False  # by backward
    read: Moment = dataclasses.field(default_factory=Moment)  # by the drive
    here: Moment = dataclasses.field(default_factory=Moment)  # on the device


class PlayedActivations:
    """Processes of copies, beside those of compute. See the module's text.

    Attributes:
        stayed_bytes: that were still leaving when the last backward began, and did not have to come back.
    """

    def __init__(self, lanes: Lanes, hardware: Hardware, saved: Saved) -> None:
        self.stayed_bytes = 0
        self._lanes = lanes
        self._hardware = hardware
        self._saved = saved
        ends = itertools.accumulate(saved.kept_bytes.values())
        self._begins = {i: end - saved.kept_bytes[i] for i, end in zip(saved.kept_bytes, ends, strict=True)}
        self._pieces = {index: self._cut(index) for index in saved.kept_bytes}
        self._last: deque[_Piece] = deque()  # on the device, none of which is leaving
        self._going = 0  # pieces that are
        self._near = self._host = 0  # bytes on the device, and in host memory
        self._resting: deque[_Piece] = deque()  # in host memory, those that were kept first in front
        self._resting_bytes = 0
        self._writes = 0  # under way
        self._changed = Moment()

    def _cut(self, index: int) -> list[_Piece]:
        """Return the pieces of what a unit keeps."""
        size, begin, saved = self._saved.kept_bytes[index], self._begins[index], self._saved
        many = math.ceil(size * SMOOTH / max(min(saved.near_bytes - saved.last_bytes, saved.host_bytes), 1))
        many = min(max(many, 1), MOST_PIECES)
        ends = [size * number // many for number in range(many + 1)]
        return [_Piece(begin + end, end - before) for before, end in itertools.pairwise(ends)]

    def forward(self, index: int, compute_s: float) -> Process:
        """Compute a unit, and let leave what it keeps."""
        pieces = self._pieces[index] = self._cut(index) if index in self._begins else []
        for piece in pieces:
            yield COMPUTE, compute_s / len(pieces)
            self._last.append(piece)
            self._near += piece.size_bytes
            while self._last[0].end_bytes + self._saved.last_bytes < piece.end_bytes:
                while self._writes and self._host + self._last[0].size_bytes > self._saved.host_bytes:
                    yield self._changed
                first = self._last.popleft()
                first.is_leaving = True
                self._going += 1
                self._occupy(first)
                self._lanes.begin(self._leave(first))
            while self._going and self._near > self._saved.near_bytes:
                yield self._changed
        if not pieces:
            yield COMPUTE, compute_s

    def turn(self) -> None:
        """Begin a backward pass: what is there stays, everything else comes."""
        order = [piece for pieces in reversed(self._pieces.values()) for piece in reversed(pieces)]
        self.stayed_bytes = sum(piece.size_bytes for piece in order if piece.is_leaving)
        for piece in order:
            piece.read, piece.here, piece.stays = Moment(), Moment(), piece.is_leaving or piece in self._last
            if piece.stays:
                self._lanes.come(piece.here)
        self._last.clear()
        left = [piece for piece in order if not piece.stays]
        self._lanes.begin(self._read(left))
        self._lanes.begin(self._bring(left))

    def backward(self, index: int, compute_s: float) -> Process:
        """Compute a unit, once what its forward has kept is there."""
        pieces = self._pieces.get(index, ())
        for piece in reversed(pieces):
            yield piece.here
            yield COMPUTE, compute_s / len(pieces)
            self._near -= piece.size_bytes
            piece.is_used = True
            if not piece.is_leaving:
                self._vacate(piece)  # of one that stayed
            self._note()
        if not pieces:
            yield COMPUTE, compute_s

    def _occupy(self, piece: _Piece) -> None:
        self._host += piece.size_bytes
        piece.is_in_host = True

    def _vacate(self, piece: _Piece) -> None:
        """Give a piece's room in host memory back, if it has any."""
        if piece in self._resting:
            self._resting.remove(piece)
            self._resting_bytes -= piece.size_bytes
        self._host -= piece.size_bytes * piece.is_in_host
        piece.is_in_host = piece.is_wanted = False
        self._note()

    def _note(self) -> None:
        changed, self._changed = self._changed, Moment()
        self._lanes.come(changed)

    def _leave(self, piece: _Piece) -> Process:
        """Copy a piece to host memory; more than may rest there goes on."""
        size = piece.size_bytes
        yield D2H, size + self._hardware.copy_s * self._hardware.d2h_bytes_s
        piece.is_leaving = False
        self._going -= 1
        self._near -= size * (not piece.stays)
        if piece.is_used:
            self._vacate(piece)
            return
        self._resting.append(piece)
        self._resting_bytes += size
        while self._resting_bytes > self._saved.resting_bytes:
            first = self._resting.popleft()
            self._resting_bytes -= first.size_bytes
            self._writes += 1
            self._lanes.begin(self._write(first))
        self._note()

    def _write(self, piece: _Piece) -> Process:
        """Let a piece go on to the drive."""
        yield WRITE, piece.size_bytes
        self._writes -= 1
        if piece.is_wanted:
            self._note()
        else:
            self._vacate(piece)

    def _read(self, left: Sequence[_Piece]) -> Process:
        """Read what the drive alone has, as far as host memory has room."""
        for piece in left:
            piece.is_wanted = piece.is_in_host
            if not piece.is_in_host:
                while self._host > 0 and self._host + piece.size_bytes > self._saved.host_bytes:
                    yield self._changed
                self._occupy(piece)
                yield READ, piece.size_bytes
            self._lanes.come(piece.read)

    def _bring(self, left: Sequence[_Piece]) -> Process:
        """Copy to the device, as far as it has room."""
        for piece in left:
            while self._near > 0 and self._near + piece.size_bytes > self._saved.near_bytes:
                yield self._changed
            self._near += piece.size_bytes
            yield piece.read
            yield H2D, piece.size_bytes + self._hardware.copy_s * self._hardware.h2d_bytes_s
            self._lanes.come(piece.here)
            self._vacate(piece)
