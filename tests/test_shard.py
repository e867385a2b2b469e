"""The state machine of a shard: the table is the drawing, and every reachable situation is sound."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque

import pytest
from hypothesis import given
from hypothesis import strategies as st

from offload.errors import InternalError
from offload.memory.arena import Buffer
from offload.memory.budget import Tier
from offload.planning.roles import Role
from offload.planning.units import PAD_NUMEL, SLOT_ALIGN_NUMEL, Unit, aligned_numel, lay_out
from offload.shards import shard as module
from offload.shards.shard import (
    HAS_WORKING_COPY,
    IN_FLIGHT,
    TRANSITIONS,
    Event,
    Shard,
    State,
    advance,
    check,
)
from offload.sizes import PAGE_BYTES

HAS_VALID_HOME = {State.STORED, State.FETCHING, State.RESIDENT}
UNIT = Unit(0, "blocks.0", "bfloat16", 2, True, PAD_NUMEL, ())
BUFFER = Buffer(Tier.DEVICE, 4096, 0, PAD_NUMEL * 2)

# The drawing of the module's text, arrow by arrow.
DRAWING = """
EMPTY overwrite_home STORED
EMPTY overwrite_work DIRTY
STORED overwrite_home STORED
STORED overwrite_work DIRTY
STORED fetch FETCHING
FETCHING fetched RESIDENT
FETCHING fetch_failed FAILED
RESIDENT evict STORED
RESIDENT modify DIRTY
DIRTY modify DIRTY
DIRTY flush FLUSHING
FLUSHING flush_failed DIRTY
FLUSHING flushed RESIDENT
FAILED restore EMPTY
STORED discard EMPTY
RESIDENT discard EMPTY
DIRTY discard EMPTY
STORED abandon FAILED
DIRTY abandon FAILED
"""


def make(state: State, *, readers: int = 0, writing: bool = False) -> Shard:
    work = BUFFER if state in HAS_WORKING_COPY | {State.FETCHING} else None
    return Shard(UNIT, Role.PARAM, Tier.HOST, BUFFER.size_bytes, state, None, work, readers, writing)


def test_the_table_is_the_drawing() -> None:
    arrows = {
        (State[source], Event(event)): State[target]
        for source, event, target in (line.split() for line in DRAWING.strip().splitlines())
    }
    assert arrows == TRANSITIONS
    assert module.__doc__ is not None
    for event in Event:
        assert event.value in module.__doc__


def test_every_event_off_the_table_is_refused_and_changes_nothing() -> None:
    for state, event in itertools.product(State, Event):
        shard = make(state)
        before = dataclasses.astuple(shard)
        if (state, event) in TRANSITIONS:
            assert advance(shard, event) is TRANSITIONS[state, event]
        else:
            with pytest.raises(InternalError, match=f"{state.value}.*{event.value}"):
                advance(shard, event)
        assert dataclasses.astuple(shard) == before


@pytest.mark.parametrize(
    ("state", "event", "lease", "allowed"),
    [
        (State.STORED, Event.OVERWRITE_HOME, "read", False),
        (State.STORED, Event.OVERWRITE_HOME, "write", False),
        (State.STORED, Event.OVERWRITE_WORK, "read", False),
        (State.STORED, Event.DISCARD, "read", False),
        (State.STORED, Event.FETCH, "read", True),
        (State.STORED, Event.FETCH, "write", False),
        (State.STORED, Event.ABANDON, "write", True),
        (State.RESIDENT, Event.MODIFY, "read", False),
        (State.RESIDENT, Event.EVICT, "read", False),
        (State.RESIDENT, Event.DISCARD, "read", False),
        (State.DIRTY, Event.MODIFY, "write", False),
        (State.DIRTY, Event.FLUSH, "read", True),
        (State.DIRTY, Event.FLUSH, "write", False),
        (State.DIRTY, Event.ABANDON, "write", True),
        (State.FETCHING, Event.FETCHED, "read", True),
        (State.FLUSHING, Event.FLUSHED, "read", True),
    ],
)
def test_leases_hold_events_back(state: State, event: Event, lease: str, allowed: bool) -> None:
    shard = make(state, readers=int(lease == "read"), writing=lease == "write")
    if allowed:
        assert advance(shard, event) is TRANSITIONS[state, event]
    else:
        with pytest.raises(InternalError):
            advance(shard, event)


@dataclasses.dataclass(frozen=True)
class Situation:
    """A shard and the versions of its copies; 0 is no valid content.

    Attributes:
        home, work: versions of the copies.
        last: version of the last completed write.
        lease: where a WRITE lease is out: "", "home" or "work".
    """

    state: State
    home: int
    work: int
    readers: int
    lease: str
    last: int

    def shard(self) -> Shard:
        return make(self.state, readers=self.readers, writing=bool(self.lease))


VERSIONS, READERS = 3, 2


def follow(now: Situation) -> list[tuple[str, Situation]]:
    """Return every step that :func:`advance` and the rules of leases allow, with the versions that follow."""
    steps: list[tuple[str, Situation]] = []
    shard = now.shard()
    for event in Event:
        try:
            state = advance(shard, event)
        except InternalError:
            continue
        after = dataclasses.replace(now, state=state)
        if event in (Event.OVERWRITE_HOME, Event.OVERWRITE_WORK, Event.MODIFY):
            if now.last == VERSIONS:
                continue
            if event is Event.OVERWRITE_HOME:
                after = dataclasses.replace(after, home=now.last + 1, work=0, lease="home")
            else:
                after = dataclasses.replace(after, work=now.last + 1, lease="work")
        elif event is Event.FETCHED:
            after = dataclasses.replace(after, work=now.home)
        elif event is Event.FLUSHED:
            after = dataclasses.replace(after, home=now.work)
        elif event is Event.EVICT:
            after = dataclasses.replace(after, work=0)
        elif event in (Event.DISCARD, Event.RESTORE):
            after = dataclasses.replace(after, home=0, work=0, last=0)
        elif event is Event.FETCH_FAILED:
            after = dataclasses.replace(after, home=0, work=0, last=0, readers=0)
        elif event is Event.ABANDON:
            if not now.lease:
                continue  # what an exception leaves is a WRITE lease
            after = dataclasses.replace(after, home=0, work=0, last=0, lease="")
        steps.append((event.value, after))
    readable = now.state not in (State.EMPTY, State.FAILED)
    if readable and not now.lease and now.readers < READERS:
        steps.append(("read", dataclasses.replace(now, readers=now.readers + 1)))
    if now.readers:
        steps.append(("release", dataclasses.replace(now, readers=now.readers - 1)))
    if now.lease:
        last = now.work if now.lease == "work" else now.home
        steps.append(("commit", dataclasses.replace(now, lease="", last=last)))
    return steps


def explore() -> dict[Situation, list[tuple[str, Situation]]]:
    start = Situation(State.EMPTY, 0, 0, 0, "", 0)
    edges: dict[Situation, list[tuple[str, Situation]]] = {}
    queue = deque([start])
    while queue:
        now = queue.popleft()
        if now not in edges:
            edges[now] = follow(now)
            queue.extend(after for _, after in edges[now])
    return edges


def test_every_reachable_situation_is_sound() -> None:
    edges = explore()
    assert {now.state for now in edges} == set(State)
    for now in edges:
        check(now.shard())
        if now.state in HAS_VALID_HOME and now.lease != "home":
            assert now.home == now.last, now
        if now.state is State.RESIDENT:
            assert now.work == now.home == now.last and not now.lease
        if now.state in (State.DIRTY, State.FLUSHING):
            assert now.work > now.home
            assert now.lease == "work" or now.work == now.last
        if now.state in IN_FLIGHT:
            assert not now.lease  # a transfer never copies bytes that are being written
        if now.lease:
            assert now.readers == 0
        if now.readers:  # READ sees the last completed write, on whichever copy
            assert now.last in (now.home, now.work) and now.last > 0


def test_every_situation_but_a_failed_one_can_settle_without_losing_anything() -> None:
    edges = explore()
    losing = {"fetch_failed", "flush_failed", "abandon", "discard", "restore", "modify"}
    losing |= {"overwrite_home", "overwrite_work", "read", "fetch"}
    settled = {now for now in edges if now.state in (State.STORED, State.EMPTY) and not (now.readers or now.lease)}
    while True:
        more = {
            now
            for now in edges.keys() - settled
            if any(after in settled for name, after in edges[now] if name not in losing)
        }
        if not more:
            break
        settled |= more
    assert {now.state for now in edges.keys() - settled} == {State.FAILED}


def test_check_names_what_contradicts_itself() -> None:
    wrong = [
        (dataclasses.replace(make(State.STORED), readers=1, writing=True), "READ and WRITE"),
        (dataclasses.replace(make(State.EMPTY), readers=1), "leased without content"),
        (dataclasses.replace(make(State.FAILED), writing=True), "leased without content"),
        (dataclasses.replace(make(State.RESIDENT), work_buffer=None), "no working buffer"),
        (dataclasses.replace(make(State.FETCHING), work_buffer=None), "no working buffer"),
        (dataclasses.replace(make(State.STORED), work_buffer=BUFFER), "nothing is in"),
        (dataclasses.replace(make(State.FAILED), work_buffer=BUFFER), "nothing is in"),
        (dataclasses.replace(make(State.RESIDENT), writing=True), "WRITE lease in this state"),
        (dataclasses.replace(make(State.FLUSHING), writing=True), "WRITE lease in this state"),
    ]
    for shard, text in wrong:
        with pytest.raises(InternalError, match=text):
            check(shard)
    for state in State:
        check(make(state))


def test_the_groups_of_states() -> None:
    assert {State.FETCHING, State.FLUSHING} == IN_FLIGHT


# --- layout ---------------------------------------------------------------------------------------------------------

shapes = st.lists(st.lists(st.integers(0, 40) | st.just(500), max_size=3).map(tuple), max_size=12)


@given(shapes)
def test_parameters_are_laid_out_in_order_aligned_and_disjoint(sizes: list[tuple[int, ...]]) -> None:
    slots, numel = lay_out([(f"p{number}", shape) for number, shape in enumerate(sizes)])
    assert [slot.name for slot in slots] == [f"p{number}" for number in range(len(sizes))]
    end = 0
    for slot, shape in zip(slots, sizes, strict=True):
        product = 1
        for extent in shape:
            product *= extent
        assert (slot.shape, slot.numel) == (shape, product)
        assert slot.offset_numel % SLOT_ALIGN_NUMEL == 0
        gap = slot.offset_numel - end
        assert 0 <= gap < PAD_NUMEL  # no overlap, and no more padding than needed
        if gap >= SLOT_ALIGN_NUMEL:
            assert slot.offset_numel % PAD_NUMEL == 0
            assert slot.numel >= PAD_NUMEL or end % PAD_NUMEL + aligned_numel(slot.numel) > PAD_NUMEL
        assert slot.offset_numel // PAD_NUMEL == max(slot.end_numel - 1, slot.offset_numel) // PAD_NUMEL or (
            slot.offset_numel % PAD_NUMEL == 0
        )
        end = slot.end_numel
    assert numel > 0 and numel % PAD_NUMEL == 0
    assert max(end, 1) <= numel < end + SLOT_ALIGN_NUMEL + PAD_NUMEL


@pytest.mark.parametrize("itemsize", [1, 2, 4, 8])
def test_every_role_of_a_unit_is_a_whole_number_of_pages(itemsize: int) -> None:
    assert PAD_NUMEL * itemsize % PAGE_BYTES == 0
    assert SLOT_ALIGN_NUMEL * 4 % 64 == 0  # cache lines in fp32


@given(numel=st.integers(1, 10_000), chunk=st.integers(1, 4_000))
def test_chunks_cover_a_unit_without_gaps(numel: int, chunk: int) -> None:
    unit = dataclasses.replace(UNIT, numel=numel)
    ranges = unit.chunks(chunk)
    assert ranges[0][0] == 0 and ranges[-1][1] == numel
    assert all(left[1] == right[0] for left, right in itertools.pairwise(ranges))
    assert all(end - begin == chunk for begin, end in ranges[:-1])
    assert 0 < ranges[-1][1] - ranges[-1][0] <= chunk


def test_bytes_of_a_unit() -> None:
    assert UNIT.param_bytes == 2 * PAD_NUMEL
    assert "blocks.0/param: resident, home cpu" in make(State.RESIDENT).describe()


@given(sizes=st.lists(st.integers(0, 3 * PAD_NUMEL), min_size=1, max_size=12), chunk=st.integers(1, 5 * PAD_NUMEL))
def test_chunks_of_an_undivided_unit_hold_whole_parameters(sizes: list[int], chunk: int) -> None:
    """They cover the unit, begin on pages of every role, hold whole parameters, and are no longer than is needed."""
    slots, numel = lay_out([(f"p{number}", (size,)) for number, size in enumerate(sizes)], whole=True)
    unit = Unit(0, "u", "bfloat16", 2, True, numel, slots, whole=True)
    ranges = unit.chunks(chunk)
    assert [begin for begin, _ in ranges] == [0, *(end for _, end in ranges[:-1])] and ranges[-1][1] == numel
    for begin, end in ranges:
        assert begin % PAD_NUMEL == end % PAD_NUMEL == 0 and begin < end
        assert end - begin <= unit.chunk_limit(chunk)
    for before, slot in zip([None, *slots], slots, strict=False):
        assert before is None or before.end_numel <= slot.offset_numel
        assert slot.offset_numel % SLOT_ALIGN_NUMEL == 0
        assert any(begin <= slot.offset_numel and slot.end_numel <= end for begin, end in ranges)
    # what is less than a page is packed, inside pages: a large parameter costs less than two pages more than its own
    large = [size for size in sizes if size >= PAD_NUMEL]
    packed = sum(aligned_numel(size) for size in sizes if size < PAD_NUMEL)
    assert numel <= sum(aligned_numel(size, PAD_NUMEL) + PAD_NUMEL for size in large) + 2 * packed + PAD_NUMEL
