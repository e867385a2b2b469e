"""Shards: what is tracked, placed, moved and versioned; and the state machine every one of them follows.

Owns the vocabulary (State, Event, Shard) and the transition table. Values only: this file moves no
byte and knows no torch module. ``copies.py`` is the only writer of a shard's state; :func:`advance` is the only way.

A shard has one *home* (the tier the plan gave it) and at most one *working copy*::

              overwrite_home            fetch             fetched
     EMPTY -------------------> STORED --------> FETCHING --------> RESIDENT
       |                        |   ^               |               |  |  ^
       |         overwrite_work |   +---- evict ----|---------------+  |  |
       |                        v                   |                  |  |
       +--- overwrite_work ---> DIRTY <--- modify --|------------------+  |
                                |  ^                | fetch_failed        |
                          flush |  | flush_failed   v                     |
                                v  |              FAILED --restore--> EMPTY
                              FLUSHING -------------- flushed ------------+
     STORED, RESIDENT, DIRTY --discard--> EMPTY      STORED, DIRTY --abandon--> FAILED

Next: :mod:`offload.planning.planner` chooses homes, :mod:`offload.shards.copies` drives the machine.
"""

from __future__ import annotations

import dataclasses
from enum import Enum

from offload.errors import InternalError
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.planning.roles import Role
from offload.planning.units import Unit


class State(Enum):
    """Where the valid copies of a shard are."""

    EMPTY = "empty"  # no valid copy
    STORED = "stored"  # home only
    FETCHING = "fetching"  # home, and a transfer is filling the working copy
    RESIDENT = "resident"  # home and working copy, equal
    DIRTY = "dirty"  # working copy is newer than home
    FLUSHING = "flushing"  # dirty, and a transfer is writing it home
    FAILED = "failed"  # no valid copy; after a failed read, Copies.forgive brings it back

    __hash__ = object.__hash__


class Event(Enum):
    """What can happen to a shard."""

    OVERWRITE_HOME = "overwrite_home"
    OVERWRITE_WORK = "overwrite_work"
    FETCH = "fetch"
    FETCHED = "fetched"
    FETCH_FAILED = "fetch_failed"
    MODIFY = "modify"
    FLUSH = "flush"
    FLUSHED = "flushed"
    FLUSH_FAILED = "flush_failed"
    EVICT = "evict"
    DISCARD = "discard"
    ABANDON = "abandon"
    RESTORE = "restore"

    __hash__ = object.__hash__


TRANSITIONS: dict[tuple[State, Event], State] = {
    (State.EMPTY, Event.OVERWRITE_HOME): State.STORED,
    (State.STORED, Event.OVERWRITE_HOME): State.STORED,
    (State.EMPTY, Event.OVERWRITE_WORK): State.DIRTY,
    (State.STORED, Event.OVERWRITE_WORK): State.DIRTY,
    (State.STORED, Event.FETCH): State.FETCHING,
    (State.FETCHING, Event.FETCHED): State.RESIDENT,
    (State.FETCHING, Event.FETCH_FAILED): State.FAILED,
    (State.RESIDENT, Event.MODIFY): State.DIRTY,
    (State.DIRTY, Event.MODIFY): State.DIRTY,
    (State.DIRTY, Event.FLUSH): State.FLUSHING,
    (State.FLUSHING, Event.FLUSHED): State.RESIDENT,
    (State.FLUSHING, Event.FLUSH_FAILED): State.DIRTY,
    (State.RESIDENT, Event.EVICT): State.STORED,
    (State.STORED, Event.DISCARD): State.EMPTY,
    (State.RESIDENT, Event.DISCARD): State.EMPTY,
    (State.DIRTY, Event.DISCARD): State.EMPTY,
    (State.STORED, Event.ABANDON): State.FAILED,
    (State.DIRTY, Event.ABANDON): State.FAILED,
    (State.FAILED, Event.RESTORE): State.EMPTY,
}

IN_FLIGHT = frozenset({State.FETCHING, State.FLUSHING})
HAS_WORKING_COPY = frozenset({State.RESIDENT, State.DIRTY, State.FLUSHING})
_EXCLUSIVE = frozenset({Event.OVERWRITE_HOME, Event.OVERWRITE_WORK, Event.MODIFY, Event.DISCARD, Event.RESTORE})


@dataclasses.dataclass(slots=True, eq=False)
class Shard:
    """One unit in one role: where it is, in which state, and who may touch it.

    Attributes:
        home_buffer: bytes at home, None where the home is NVMe (the swap store maps the keys).
        work_buffer: the working copy's bytes while it has one or a transfer is filling one.
        readers: READ leases, on whichever copy.
        drops: times that all READ leases were dropped: older ones count no more.
        writing: a WRITE lease is out.
        version: of PARAM's content: raised whenever it is written.
        side: which of its two names the content has in the swap store; what is written aside has the other one.
        spare_buffer: host memory for the content after an update that may be undone, None where the plan has no room.
        is_sliced: other ranks have the rest of these parameters: a working copy is of the whole unit.
        stays: it is used where it is at home, on the device, and has no working copies.
        work_bytes: of a working copy.
    """

    unit: Unit
    role: Role
    home: Tier
    size_bytes: int
    state: State = State.EMPTY
    home_buffer: Buffer | None = None
    work_buffer: Buffer | None = None
    readers: int = 0
    writing: bool = False
    side: bool = False
    drops: int = 0
    version: int = 0
    spare_buffer: Buffer | None = None
    is_sliced: bool = dataclasses.field(init=False)
    stays: bool = dataclasses.field(init=False)
    work_bytes: int = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.is_sliced = self.role is Role.PARAM and self.size_bytes < self.unit.param_bytes
        self.stays = self.home is Tier.DEVICE and not self.is_sliced
        self.work_bytes = self.unit.param_bytes if self.is_sliced else self.size_bytes

    def describe(self) -> str:
        """One line for state dumps."""
        leases = f"{self.readers} readers" + (", writing" if self.writing else "")
        return (
            f"{self.unit.name}/{self.role.value}: {self.state.value}, home {self.home.value}, "
            f"{self.size_bytes} B, {leases}"
        )


def advance(shard: Shard, event: Event) -> State:
    """Return the state that follows `event`, without changing the shard.

    Raises:
        InternalError: the event has no meaning in this state, or would break a lease.
    """
    following = TRANSITIONS.get((shard.state, event))
    if following is None:
        raise InternalError(f"{shard.describe()}: event {event.value} has no meaning in this state")
    if event in _EXCLUSIVE and (shard.readers or shard.writing):
        raise InternalError(f"{shard.describe()}: event {event.value} needs the shard unleased")
    if event is Event.EVICT and shard.readers:
        raise InternalError(f"{shard.describe()}: cannot evict a copy that is being read")
    if event in (Event.FETCH, Event.FLUSH) and shard.writing:
        raise InternalError(f"{shard.describe()}: cannot {event.value} while it is being written")
    return following


def check(shard: Shard) -> None:
    """Check that a shard's copies and leases follow from its state.

    Raises:
        InternalError: they do not.
    """
    problems = []
    if shard.writing and shard.readers:
        problems.append("READ and WRITE leases at once")
    if shard.state in (State.EMPTY, State.FAILED) and (shard.readers or shard.writing):
        problems.append("leased without content")
    if shard.state in HAS_WORKING_COPY | {State.FETCHING} and shard.work_buffer is None:
        problems.append("no working buffer")
    if shard.state in (State.EMPTY, State.STORED, State.FAILED) and shard.work_buffer is not None:
        problems.append("a working buffer that nothing is in")
    if shard.writing and shard.state not in (State.STORED, State.DIRTY):
        problems.append("WRITE lease in this state")
    if problems:
        raise InternalError(f"{shard.describe()}: {'; '.join(problems)}")
