"""What activations that leave have of the device, and how much they may have.

Owns both, and what was there at the peak of a pass: so it tells how much of that peak had not to be there. Knows
storages by their sizes alone. Next: :mod:`offload.activations.leaving` moves them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol


class Storage(Protocol):
    """One that may leave.

    Attributes:
        size_bytes: of it.
        near: it counts as one that is on the device.
        needed: it has to be there: it was asked for, somebody else has it, too, or there is no room elsewhere. What
            is large, and somebody else's for long, does not count as near.
    """

    @property
    def size_bytes(self) -> int:
        """See the class."""

    near: bool
    needed: bool


class _Moment(NamedTuple):
    """What there was at a moment, and the part of it that had to be there."""

    used_bytes: int = 0
    needed_bytes: int = 0


class Near:
    """Books of one engine's activations on the device. See the module's text.

    Attributes:
        used_bytes: that they have; of these, `needed_bytes` have to be there.
        most_bytes: that they may have; of these, `kept_bytes` are for the last ones.
        saved_bytes: of all that was ever saved.
        is_short: so much room is missing that what was in use leaves as soon as it can.
    """

    def __init__(self, most_bytes: int, kept_bytes: int) -> None:
        """Begin with nothing."""
        self.used_bytes = self.needed_bytes = self.saved_bytes = 0
        self.most_bytes = most_bytes
        self.kept_bytes = kept_bytes
        self.is_short = False
        self._large_bytes = most_bytes // 2
        self._then = self._at_peak = _Moment()  # after the last call, and at the peak of the pass
        self._before_bytes = self._most_saved_bytes = 0  # saved before this pass, and in any pass so far
        self._largest_bytes = 0

    def save(self, storage: Storage) -> None:
        """Note a storage that autograd has begun to keep."""
        self.saved_bytes += storage.size_bytes
        self._largest_bytes = max(self._largest_bytes, storage.size_bytes)
        self.come(storage)

    def come(self, storage: Storage) -> None:
        """Note that a storage is on the device, if it was not."""
        if not storage.near:
            storage.near = True
            self.used_bytes += storage.size_bytes

    def go(self, storage: Storage) -> None:
        """Note that it is there no more, if it was."""
        if storage.near:
            storage.near = False
            self.used_bytes -= storage.size_bytes
            self.need_no_more(storage)

    def need(self, storage: Storage) -> None:
        """Note that it has to be there, if it is."""
        if storage.near and not storage.needed:
            storage.needed = True
            self.needed_bytes += storage.size_bytes

    def leave_to_others(self, storage: Storage) -> None:
        """Note that somebody else has had it for long: if it is large, it would be in the way of all others."""
        if storage.needed and storage.size_bytes > self._large_bytes:
            self.go(storage)

    def need_no_more(self, storage: Storage) -> None:
        """Note that it may leave."""
        self.needed_bytes -= storage.size_bytes * storage.needed
        storage.needed = False

    # --- the peak of a pass -------------------------------------------------------------------------------------------

    def open_pass(self) -> None:
        """Begin a pass in which nothing was saved so far."""
        self._then = self._at_peak = _Moment()
        self._before_bytes = self.saved_bytes

    def close_pass(self) -> None:
        """End it."""
        self._most_saved_bytes = max(self._most_saved_bytes, self.saved_bytes - self._before_bytes)

    def look_again(self) -> None:
        """Let the next pass be worth a look, too."""
        self._most_saved_bytes = 0

    @property
    def is_worth_a_look(self) -> bool:
        """Whether this pass has saved more than any before: looking at each call takes time."""
        return self.saved_bytes - self._before_bytes > self._most_saved_bytes

    def note(self, storage: Storage | None = None) -> None:
        """Remember what there is now, behind a call; the next operation has `storage`, too."""
        if not self.is_worth_a_look:
            self._then = _Moment()
            return
        more_bytes = storage.size_bytes if storage is not None and storage.near and not storage.needed else 0
        self._then = _Moment(self.used_bytes, self.needed_bytes + more_bytes)

    def note_peak(self) -> None:
        """Note that what came behind the last call took more than anything before in the pass."""
        self._at_peak = self._then

    @property
    def spare_bytes(self) -> int:
        """What of the peak had not to be there."""
        return max(self._at_peak.used_bytes - self._at_peak.needed_bytes, 0)

    def take_less(self, by_bytes: int) -> int:
        """Have so many bytes less at such a moment from now on; returns how many that can be."""
        given = min(by_bytes, self.spare_bytes)
        if given:
            then = self._at_peak = _Moment(self._at_peak.used_bytes - given, self._at_peak.needed_bytes)
            self.most_bytes = min(self.most_bytes, then.used_bytes)
            last_bytes = self.most_bytes - then.needed_bytes - self._largest_bytes  # they are beside what is in use
            self.kept_bytes = max(min(self.kept_bytes, last_bytes), 0)
            self.is_short = True
        return given
