"""Shards: what is tracked, placed, moved and versioned; and the state machine every one of them follows.

Owns the vocabulary (Role, State, Event, Unit, Slot, Shard) and the transition table. Values only: this file moves no
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

Next: :mod:`offload.placement` chooses homes, :mod:`offload.copies` drives the machine.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum

from offload.errors import InternalError
from offload.tiers import Buffer, Tier

PAD_NUMEL = 4096  # units are padded to this many elements, so that every role is a whole number of 4 KiB pages
SLOT_ALIGN_NUMEL = 128  # parameters start at a block of 8-bit states, and on cache lines in every role


class Role(Enum):
    """What bytes mean."""

    PARAM = "param"
    GRAD = "grad"
    MASTER = "master"
    EXP_AVG = "exp_avg"  # an optimizer's first state, whatever it is called
    EXP_AVG_SQ = "exp_avg_sq"  # its second
    STATE_3 = "state_3"  # its further ones
    STATE_4 = "state_4"
    STATE_5 = "state_5"
    STATE_6 = "state_6"
    SCALES = "scales"  # of the blocks of 8-bit states
    ACTIVATION = "activation"

    __hash__ = object.__hash__


class State(Enum):
    """Where the valid copies of a shard are."""

    EMPTY = "empty"  # no valid copy
    STORED = "stored"  # home only
    FETCHING = "fetching"  # home, and a transfer is filling the working copy
    RESIDENT = "resident"  # home and working copy, equal
    DIRTY = "dirty"  # working copy is newer than home
    FLUSHING = "flushing"  # dirty, and a transfer is writing it home
    FAILED = "failed"  # content lost by an exception inside a WRITE lease or by an I/O error

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
SETTLED = frozenset({State.EMPTY, State.STORED, State.RESIDENT})
HAS_WORKING_COPY = frozenset({State.RESIDENT, State.DIRTY, State.FLUSHING})
HAS_VALID_HOME = frozenset({State.STORED, State.FETCHING, State.RESIDENT})
_EXCLUSIVE = frozenset({Event.OVERWRITE_HOME, Event.OVERWRITE_WORK, Event.MODIFY, Event.DISCARD, Event.RESTORE})


@dataclasses.dataclass(frozen=True, slots=True)
class Slot:
    """One parameter inside its unit.

    Attributes:
        name: path in the model.
        shape: of the parameter.
        numel: elements.
        offset_numel: elements from the unit's start to its first one, in every role.
        global_numel: index of its first element in the whole model: it depends on neither units nor placement.
    """

    name: str
    shape: tuple[int, ...]
    numel: int
    offset_numel: int
    global_numel: int

    @property
    def end_numel(self) -> int:
        """First element behind the parameter."""
        return self.offset_numel + self.numel


@dataclasses.dataclass(frozen=True, slots=True)
class Unit:
    """Parameters that travel together: one module's, of one dtype, all trainable or all frozen.

    Attributes:
        index: position in model order; also the order of optimizer updates.
        name: module path, with a suffix where a module has several units.
        dtype: torch dtype name, e.g. ``"bfloat16"``.
        itemsize: bytes per element of the parameter.
        trainable: has gradients and optimizer states.
        numel: elements including padding, a multiple of :data:`PAD_NUMEL`.
        slots: the parameters.
        whole: no chunk divides a parameter.
    """

    index: int
    name: str
    dtype: str
    itemsize: int
    trainable: bool
    numel: int
    slots: tuple[Slot, ...]
    whole: bool = False

    @property
    def param_bytes(self) -> int:
        """Bytes of the PARAM shard."""
        return self.numel * self.itemsize

    def chunks(self, chunk_numel: int) -> list[tuple[int, int]]:
        """Return the element ranges [begin, end) in which the unit is updated and swapped."""
        if not self.whole:
            return [(begin, min(begin + chunk_numel, self.numel)) for begin in range(0, self.numel, chunk_numel)]
        pieces = self._pieces()
        limit = max(chunk_numel, *(end - begin for begin, end in pieces))
        ranges = [pieces[0]]
        for begin, end in pieces[1:]:
            if end - ranges[-1][0] <= limit:
                ranges[-1] = (ranges[-1][0], end)
            else:
                ranges.append((begin, end))
        return ranges

    def chunk_limit(self, chunk_numel: int) -> int:
        """Return the most elements that a chunk has room for."""
        return max(chunk_numel, *(end - begin for begin, end in self._pieces())) if self.whole else chunk_numel

    def _pieces(self) -> list[tuple[int, int]]:
        """Return the smallest ranges that begin on a page in every role, and divide no parameter."""
        begins = {slot.offset_numel for slot in self.slots if slot.offset_numel % PAD_NUMEL == 0}
        starts = sorted({0} | (begins - {self.numel}))
        return list(zip(starts, [*starts[1:], self.numel], strict=True))


def aligned_numel(numel: int, multiple: int = SLOT_ALIGN_NUMEL) -> int:
    """Return the elements that a parameter of `numel` takes in its unit."""
    return -(-numel // multiple) * multiple


def lay_out(
    sizes: Sequence[tuple[str, tuple[int, ...]]], global_numels: Sequence[int] | None = None, *, whole: bool = False
) -> tuple[tuple[Slot, ...], int]:
    """Place parameters one behind the other.

    Args:
        sizes: (name, shape) of each parameter.
        global_numels: index of each one's first element in the model; None where the unit is all of it.
        whole: no chunk will divide a parameter, so that those of a page and more begin on one.

    Returns:
        The slots, and the unit's padded number of elements.
    """
    slots, offset = [], 0
    for position, (name, shape) in enumerate(sizes):
        numel = math.prod(shape)
        if whole and numel >= PAD_NUMEL:
            offset = aligned_numel(offset, PAD_NUMEL)
        slots.append(Slot(name, shape, numel, offset, offset if global_numels is None else global_numels[position]))
        offset += aligned_numel(numel, PAD_NUMEL if whole and numel >= PAD_NUMEL else SLOT_ALIGN_NUMEL)
    return tuple(slots), max(-(-offset // PAD_NUMEL), 1) * PAD_NUMEL


@dataclasses.dataclass(slots=True)
class Shard:
    """One unit in one role: where it is, in which state, and who may touch it.

    Attributes:
        home_buffer: bytes at home, None where the home is NVMe (the swap store maps the keys).
        work_buffer: the working copy's bytes while it has one or a transfer is filling one.
        readers: READ leases, on whichever copy.
        writing: a WRITE lease is out.
        side: which of its two names the content has in the swap store; what is written aside has the other one.
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
