"""Who gathers when: whatever units ranks use, in whatever order, nobody waits for ever and nobody gets a mixture."""

from __future__ import annotations

import ctypes
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

from offload.distributed.ranks import Agreement, OneRank
from offload.errors import RanksError
from offload.memory.arena import Buffer, HostArena
from offload.memory.budget import Tier
from offload.planning.asked import Request
from offload.planning.roles import Role
from offload.planning.units import PAD_NUMEL, Unit
from offload.shards.conductor import Conductor
from offload.shards.shard import Shard, State
from offload.stats import Counters

UNITS = 5
LIMIT_S = 20.0  # whoever waits for so long waits for ever


class Meeting:
    """Ranks that are threads: whoever comes puts something down, and gets what all have put down."""

    def __init__(self, world: int) -> None:
        self._barrier = threading.Barrier(world)
        self._rows: list[Any] = [None] * world

    def share(self, rank: int, mine: Any) -> list[Any]:
        self._rows[rank] = mine
        self._barrier.wait(LIMIT_S)
        rows = list(self._rows)
        self._barrier.wait(LIMIT_S)
        return rows

    def fail(self) -> None:
        self._barrier.abort()


class ThreadRanks:
    """What the conductor asks of ranks, over a meeting."""

    def __init__(self, rank: int, world: int, meeting: Meeting, node: ThreadRanks | None = None) -> None:
        self.rank, self.world, self._meeting = rank, world, meeting
        self.node = self if node is None else node
        self.owners = OneRank()

    def agree(
        self, where: str, *_: Any, wants: int | None = None, numbers: Sequence[float] = (), **__: Any
    ) -> Agreement:
        places, wanted, said = zip(*self._meeting.share(self.rank, (where, wants, numbers)), strict=True)
        if any(wish is not None for wish in wanted):
            return Agreement(said, wanted)
        if len(set(places)) > 1:
            raise RanksError(f"in {sorted(set(places))}")
        return Agreement(())

    def gather(self, full: torch.Tensor, where: str) -> None:
        numel = full.numel() // self.world
        own = full[self.rank * numel : (self.rank + 1) * numel].clone()
        rows = self._meeting.share(self.rank, (where, own))
        assert {place for place, _ in rows} == {where}
        full.copy_(torch.cat([row for _, row in rows]))

    def fail(self, error: BaseException) -> None:
        raise AssertionError(error)

    def close(self) -> None:
        pass


class Here:
    """A transfer that is over."""

    def done(self) -> bool:
        return True

    def wait(self, timeout_s: float | None = None) -> None:
        pass


def make_units(world: int) -> list[Unit]:
    sizes = [(1 + index % 2) * PAD_NUMEL * world for index in range(UNITS)]
    return [Unit(index, f"u{index}", "float32", 4, True, size, (), ranks=world) for index, size in enumerate(sizes)]


class Rank:
    """One rank's slices and its conductor. Element e of unit u has the value 100000 * u + e."""

    def __init__(self, ranks: ThreadRanks, on_drive: set[int], units: Sequence[Unit] | None = None) -> None:
        rank, world = ranks.rank, ranks.world
        nodes = world // ranks.node.world
        units = make_units(world) if units is None else units
        sizes = [unit.numel for unit in units]
        self.whole = [torch.arange(size, dtype=torch.float32) + 100000 * index for index, size in enumerate(sizes)]
        self._request = Request(units, {}, rank=rank, world_size=world, nodes=nodes, stage=3)
        self._arena = HostArena(Tier.HOST, 4 * (max(sizes) + 2 * sum(sizes)))
        self._shards = [self._shard(unit, on_drive=unit.index in on_drive) for unit in units]
        self.buffers = [self._arena.take(unit.param_bytes) for unit in units]
        self.counters = Counters()
        copies: Any = SimpleNamespace(of=lambda index, role: self._shards[index], start_reads=self._read)
        plan: Any = SimpleNamespace(request=self._request)
        every: Any = ranks
        landing = self._arena.take(4 * max(sizes))
        self.conductor = Conductor(every, plan, copies, landing, self.counters, lambda: None, deadline_s=LIMIT_S)

    def _shard(self, unit: Unit, *, on_drive: bool) -> Shard:
        begin, end = self._request.owned(unit, Role.PARAM)
        home = Tier.NVME if on_drive else Tier.HOST
        shard = Shard(unit, Role.PARAM, home, (end - begin) * 4, State.STORED)
        if not on_drive:
            shard.home_buffer = self._arena.take(shard.size_bytes)
            self._read(shard, shard.home_buffer.address)
        return shard

    def _read(self, shard: Shard, address: int, *, urgent: bool = False) -> list[Here]:
        begin = self._request.owned(shard.unit, Role.PARAM)[0]
        ctypes.memmove(address, self.whole[shard.unit.index].data_ptr() + 4 * begin, shard.size_bytes)
        return [Here()]

    def start(self, index: int) -> Callable[[], None]:
        """Start to gather a unit; returns what waits for it and looks at every element."""
        shard, buffer = self._shards[index], self.buffers[index]
        ctypes.memset(buffer.address, 0xFF, buffer.size_bytes)  # NaN
        place: Buffer = self.conductor.place(shard, buffer)
        self._read(shard, place.address)
        gathering = self.conductor.start(shard, buffer, Here())

        def check() -> None:
            gathering.wait(LIMIT_S)
            found = torch.frombuffer(
                (ctypes.c_char * buffer.size_bytes).from_address(buffer.address), dtype=torch.float32
            )
            assert torch.equal(found, self.whole[index]), index

        return check

    def follow(self, passes: Sequence[Sequence[int]], ahead: int, *, last: str = "the end") -> int:
        """Use units in passes, at the end of each of which all ranks meet; returns how many were gathered."""
        for number, units in enumerate(passes):
            under_way: deque[tuple[int, Callable[[], None]]] = deque()
            for index in units:
                while len(under_way) > ahead or any(index == other for other, _ in under_way):
                    under_way.popleft()[1]()
                under_way.append((index, self.start(index)))
            if number % 2:  # what was asked for ahead is not waited for before all meet
                self.conductor.agree(f"pass {number}")
            for _, check in under_way:
                check()
            self.conductor.agree(f"after pass {number}")
        self.conductor.agree(last)
        return self.counters.gathers


def together(world: int, on_drive: set[int], act: Callable[[Rank, int], Any], nodes: int = 1) -> list[Any]:
    meeting, local = Meeting(world), world // nodes
    of_nodes = [Meeting(local) for _ in range(nodes if nodes > 1 else 0)]
    levels = [ThreadRanks(rank % local, local, of_nodes[rank // local]) if of_nodes else None for rank in range(world)]
    ranks = [Rank(ThreadRanks(rank, world, meeting, levels[rank]), on_drive) for rank in range(world)]
    with ThreadPoolExecutor(world) as pool:
        futures = [pool.submit(act, one, rank) for rank, one in enumerate(ranks)]
        try:
            return [future.result(LIMIT_S) for future in futures]
        finally:
            for one in ranks:
                one.conductor.close()


orders = st.lists(st.integers(0, UNITS - 1), max_size=8)


@given(st.data(), st.integers(2, 5), st.integers(1, 3), st.sets(st.integers(0, UNITS - 1)))
def test_any_orders_come_to_their_end(data: st.DataObject, world: int, passes: int, on_drive: set[int]) -> None:
    """Each rank has passes of its own: all get what they want, take part in the same gathers, and meet."""
    programs = [data.draw(st.lists(orders, min_size=passes, max_size=passes)) for _ in range(world)]
    aheads = [data.draw(st.integers(0, 3)) for _ in range(world)]
    counts = together(world, on_drive, lambda one, rank: one.follow(programs[rank], aheads[rank]))
    assert len(set(counts)) == 1
    assert (
        max(sum(map(len, program)) for program in programs) <= counts[0] <= sum(len(p) for pr in programs for p in pr)
    )


@given(st.data(), st.sampled_from([(2, 2), (2, 3), (3, 2)]), st.integers(1, 3))
def test_nodes_gather_apart_and_meet(data: st.DataObject, shape: tuple[int, int], passes: int) -> None:
    """What ranks of a node want is gathered in it alone, whatever other nodes do."""
    nodes, local = shape
    programs = [data.draw(st.lists(orders, min_size=passes, max_size=passes)) for _ in range(nodes * local)]
    aheads = [data.draw(st.integers(0, 3)) for _ in programs]
    counts = together(nodes * local, set(), lambda one, rank: one.follow(programs[rank], aheads[rank]), nodes)
    for first in range(0, nodes * local, local):
        sizes = [sum(map(len, program)) for program in programs[first : first + local]]
        assert len(set(counts[first : first + local])) == 1
        assert max(sizes) <= counts[first] <= sum(sizes)


@given(st.lists(orders, min_size=1, max_size=3), st.integers(2, 4), st.integers(0, 3))
def test_equal_orders_gather_each_unit_once(program: list[list[int]], world: int, ahead: int) -> None:
    counts = together(world, set(), lambda one, rank: one.follow(program, ahead))
    assert counts == [sum(map(len, program))] * world


@given(orders, orders)
def test_different_ends_are_an_error_on_all(first: list[int], second: list[int]) -> None:
    def act(one: Rank, rank: int) -> str:
        try:
            one.follow([(first, second)[rank]], 1, last=("a step", "an evaluation")[rank])
        except RanksError as error:
            return str(error)
        return "nothing"

    assert together(2, set(), act) == ["in ['a step', 'an evaluation']"] * 2


@given(st.data(), st.sampled_from([(1, 2), (1, 3), (1, 4), (2, 2), (2, 3)]), st.integers(1, 3))
def test_who_waits_elsewhere_takes_part_in_what_others_want(
    data: st.DataObject, shape: tuple[int, int], turns: int
) -> None:
    """Ranks go on one after the other; what each gathers in its turn needs those of its node that wait for theirs."""
    nodes, local = shape
    world = nodes * local
    programs = [[data.draw(orders) for _ in range(turns)] for _ in range(world)]
    passed = [[threading.Event() for _ in range(turns)] for _ in range(world)]

    def act(one: Rank, rank: int) -> int:
        for turn in range(turns):
            before = passed[rank - 1][turn] if rank else passed[world - 1][turn - 1] if turn else None
            if before is not None:
                one.conductor.standing.wait()
                with one.conductor.serving("another's turn"):
                    assert before.wait(LIMIT_S)
            for index in programs[rank][turn]:
                one.start(index)()
            passed[rank][turn].set()
        one.conductor.agree("the end")
        return one.counters.gathers

    wanted = [sum(map(len, program)) for program in programs]
    wanted = [sum(wanted[rank - rank % local :][:local]) for rank in range(world)]
    assert together(world, set(), act, nodes) == wanted


def test_who_has_not_heard_what_others_have_is_waited_for() -> None:
    """It is about to want the same: were it gathered without it, it would be gathered again."""

    def act(one: Rank, rank: int) -> int:
        if rank:
            one.conductor.standing.hear()
        else:
            one.conductor.standing.wait()
            with one.conductor.serving("a round"):
                time.sleep(0.05)  # it says meanwhile that it waits
        one.start(2)()
        one.conductor.agree("the end")
        return one.counters.gathers

    assert together(3, set(), act) == [1] * 3


def test_two_threads_of_a_rank_get_what_each_has_asked_for() -> None:
    """One comes while the other is being told what becomes of its wish."""

    def act(one: Rank, rank: int) -> Any:
        conductor, entered, leave = one.conductor, threading.Event(), threading.Event()
        call = conductor._called.set

        def serve() -> None:
            with conductor.serving("elsewhere"):
                entered.set()
                leave.wait(1.0)

        def call_late() -> None:
            conductor._called.set = call
            other.start()
            entered.wait(LIMIT_S)
            call()

        other = threading.Thread(target=serve)
        conductor._called.set = call_late
        agreement = conductor.agree("a place")
        leave.set()
        other.join()
        conductor.agree("the end")  # behind what the other one has begun
        return agreement

    assert together(2, set(), act) == [Agreement(())] * 2


def test_who_closes_behind_a_block_fails_nobody_where_the_thread_has_yet_to_notice_its_end() -> None:
    def act(one: Rank, rank: int) -> None:
        conductor, begun, met, closes = one.conductor, *(threading.Event() for _ in range(3))
        ranks, do_urgent = conductor._ranks, conductor._errands.do_urgent
        agree = ranks.agree

        def agree_and_note(*args: Any, **options: Any) -> Agreement:
            agreement = agree(*args, **options)
            met.set()
            return agreement

        def do_late() -> None:
            begun.set()
            do_urgent()
            assert not met.is_set() or closes.wait(LIMIT_S)

        conductor._errands.do_urgent = do_late  # type: ignore[method-assign]
        ranks.agree = agree_and_note  # type: ignore[method-assign]
        ranks.close = closes.set  # type: ignore[method-assign]
        with conductor.serving("elsewhere"):
            assert begun.wait(LIMIT_S)
            conductor.agree("the end")  # what serves does it
        conductor.close()

    assert together(2, set(), act) == [None] * 2
