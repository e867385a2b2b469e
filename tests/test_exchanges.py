"""Gradients of several ranks leave during backward: in whatever order ranks meet units, the sums are one process's."""

from __future__ import annotations

import contextlib
import dataclasses
import random
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any

import pytest
import torch
from fakes import make_plan_with
from hypothesis import given
from hypothesis import strategies as st

from offload.distributed.exchange import KERNEL_DTYPE, Part, parts_of
from offload.distributed.ranks import OneRank
from offload.distributed.rounds import Rounds, Said, Standing
from offload.errors import BudgetError, RanksError, StateError
from offload.kernels import cpu_adam
from offload.memory.arena import HostArena
from offload.memory.budget import Budget, Tier
from offload.planning.asked import Homes
from offload.planning.plan import Plan
from offload.planning.units import Unit, Where, lay_out
from offload.shards.exchanges import Exchanges
from offload.stats import Counters

WORLD = 3  # with two ranks, a sum has one order
pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")


class Lane:
    """Ranks that are threads of one process, and meet in one order."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world)
        self.rows: list[Any] = [None] * world

    def meet(self, rank: int, mine: Any, use: Callable[[list[Any]], Any]) -> Any:
        """Let all see what all have."""
        try:
            self.rows[rank] = mine
            self.barrier.wait(20)
            found = use(list(self.rows))
            self.barrier.wait(20)
        except threading.BrokenBarrierError:
            raise RanksError("another rank has failed") from None
        return found


class Boards:
    """What the ranks have in common."""

    def __init__(self, world: int) -> None:
        self.lanes = {name: Lane(world) for name in ("main", "exchange")}

    def fail(self) -> None:
        for lane in self.lanes.values():
            lane.barrier.abort()


@dataclasses.dataclass
class Board:
    """One rank of them; with a seed, it is slow at times."""

    rank: int
    world: int
    boards: Boards
    name: str = "main"
    sent_bytes: int = 0
    owners = OneRank()

    @property
    def node(self) -> Board:
        return self

    def beside(self, name: str, *, patience: int = 1) -> Board:
        return Board(self.rank, self.world, self.boards, name)

    def agree(self, where: str) -> None:
        assert len(set(self._meet(where, list))) == 1

    def serving(self, where: str) -> contextlib.AbstractContextManager[None]:
        return contextlib.nullcontext()

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        return self._meet(mine, torch.stack)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        def copy(rows: list[torch.Tensor]) -> None:
            for rank, row in enumerate(rows):
                received[rank].copy_(row[self.rank])

        self._meet(sent, copy)

    def fail(self, error: BaseException) -> None:
        self.boards.fail()

    def _meet(self, mine: Any, use: Callable[[list[Any]], Any]) -> Any:
        return self.boards.lanes[self.name].meet(self.rank, mine, use)


class Sums:
    """Sums of one rank's slices."""

    def __init__(self, units: Sequence[Unit], world: int) -> None:
        self.content = {unit.index: torch.full((unit.numel // world,), float("nan")) for unit in units}
        self.known = {unit.index: [False] * len(unit.slots) for unit in units}

    def arrived(self, index: int) -> list[bool]:
        return self.known[index]

    def address(self, index: int) -> int:
        return self.content[index].data_ptr()

    def leave(self, index: int) -> None:
        pass


def make_units(slots: Sequence[int], dtype: str = "bfloat16") -> list[Unit]:
    units = []
    for index, count in enumerate(slots):
        places, numel = lay_out([(f"u{index}.p{slot}", (40 + 7 * slot,)) for slot in range(count)], ranks=WORLD)
        units.append(Unit(index, f"u{index}", dtype, 4 if dtype == "float32" else 2, True, numel, places, False, WORLD))
    return units


def make_plan(units: Sequence[Unit], rank: int, *, spilt: bool, stage: int = 2) -> Plan:
    homes = [Homes(Tier.HOST, Tier.NVME if spilt else Tier.HOST, Tier.HOST) for _ in units]
    plan = make_plan_with(units, homes, accumulate=True)
    return dataclasses.replace(
        plan, request=dataclasses.replace(plan.request, rank=rank, world_size=WORLD, stage=stage)
    )


def parts_of_units(units: Sequence[Unit], rank: int) -> dict[int, list[Part]]:
    """Return the parts of each unit's slots that are a rank's."""
    parts = {}
    for unit in units:
        width = unit.numel // WORLD
        spans = [(slot.offset_numel, slot.end_numel) for slot in unit.slots]
        parts[unit.index] = parts_of(spans, rank * width, (rank + 1) * width)
    return parts


@dataclasses.dataclass
class Rank:
    """A rank under test."""

    exchanges: Exchanges
    sums: Sums
    arena: HostArena
    budget: Budget


def make_rank(rank: int, boards: Boards, units: Sequence[Unit], left: int, *, spilt: bool, stage: int = 2) -> Rank:
    plan = make_plan(units, rank, spilt=spilt, stage=stage)
    arena, budget = HostArena(Tier.HOST, plan.request.exchange_bytes), Budget(Tier.HOST, left)
    board: Any = Board(rank, WORLD, boards)
    claim, parts = budget.claim("gradients"), parts_of_units(units, rank)
    exchanges = Exchanges(plan, board, arena, claim, Counters(), parts, Standing())
    return Rank(exchanges, Sums(units, WORLD), arena, budget)


def all_ranks(work: Callable[[int], None]) -> list[BaseException | None]:
    """Run `work` as each rank, in threads; return what each has raised."""
    failures: list[BaseException | None] = [None] * WORLD

    def be(rank: int) -> None:
        try:
            work(rank)
        except BaseException as error:
            failures[rank] = error

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(WORLD)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive(), "a rank hangs"
    return failures


def gradient_of(unit: Unit, slot: int, rank: int, batch: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * unit.index + 100 * slot + 10 * rank + batch)
    values = torch.randn(unit.slots[slot].numel, generator=generator)
    values *= 10.0 ** torch.randint(-4, 5, values.shape, generator=generator)
    return values.to(getattr(torch, unit.dtype))


Orders = list[list[list[Where]]]  # per micro-batch and rank, the gradients in the order in which they come


def expected(units: Sequence[Unit], orders: Orders) -> dict[Where, torch.Tensor]:
    """Return the sums that one process makes."""
    sums: dict[Where, torch.Tensor] = {}
    for batch, of_ranks in enumerate(orders):
        for rank, order in enumerate(of_ranks):
            for index, slot in sorted(set(order)):
                gradient, first = gradient_of(units[index], slot, rank, batch), (index, slot) not in sums
                total = sums.setdefault((index, slot), torch.empty(gradient.numel()))
                cpu_adam.take_gradient(
                    src=gradient.data_ptr(),
                    src_dtype=KERNEL_DTYPE[gradient.dtype],
                    dst=total.data_ptr(),
                    dst_dtype=cpu_adam.Dtype.FLOAT32,
                    numel=gradient.numel(),
                    add=not first,
                    measure=False,
                )
    return sums


def found(units: Sequence[Unit], ranks: Sequence[Rank]) -> dict[Where, torch.Tensor]:
    """Return the sums that the ranks have."""
    sums = {}
    for unit in units:
        whole = torch.cat([rank.sums.content[unit.index] for rank in ranks])
        assert len({tuple(rank.sums.known[unit.index]) for rank in ranks}) == 1
        for slot, known in enumerate(ranks[0].sums.known[unit.index]):
            if known:
                place = unit.slots[slot]
                sums[unit.index, slot] = whole[place.offset_numel : place.end_numel]
    return sums


def train(
    units: Sequence[Unit],
    orders: Orders,
    reached: Callable[[list[Where]], Collection[Where] | None],
    left: int,
    *,
    spilt: bool,
    stage: int = 2,
    slow: int | None = None,
) -> tuple[list[Rank], list[BaseException | None]]:
    """Let each rank take its gradients in its order, and exchange them."""
    boards, ranks = Boards(WORLD), dict[int, Rank]()

    def work(number: int) -> None:
        rank = ranks[number] = make_rank(number, boards, units, left, spilt=spilt, stage=stage)
        pauses = random.Random(0 if slow is None else slow + number)
        try:
            for batch, of_ranks in enumerate(orders):
                if rank.exchanges.early:
                    rank.exchanges.begin(rank.sums, reached(of_ranks[number]))
                for index, slot in of_ranks[number]:
                    if slow is not None and pauses.random() < 0.3:
                        time.sleep(pauses.random() / 500)
                    gradient = gradient_of(units[index], slot, number, batch)
                    rank.exchanges.take((index, slot), gradient.data_ptr())
                rank.sums.known |= rank.exchanges.end(rank.sums)
        except BaseException as error:
            if not isinstance(error, RanksError):
                boards.fail()
            raise
        finally:
            rank.exchanges.close()

    failures = all_ranks(work)
    return [ranks[number] for number in range(WORLD)], failures


def same(left: dict[Where, torch.Tensor], right: dict[Where, torch.Tensor]) -> bool:
    return left.keys() == right.keys() and all(
        torch.equal(left[key].view(torch.int32), right[key].view(torch.int32)) for key in left
    )


REACHED: dict[str, Callable[[list[Where]], Collection[Where] | None]] = {"known": list, "unknown": lambda order: None}


@given(
    st.data(),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
    st.booleans(),
    st.sampled_from(["bfloat16", "float16", "float32"]),
    st.sampled_from(list(REACHED)),
    st.sampled_from([0, 1 << 30]),
    st.sampled_from([1, 2, 2]),
)
def test_in_any_order_the_sums_are_those_of_one_process_or_all_ranks_are_refused(
    data: st.DataObject, slots: list[int], spilt: bool, dtype: str, reached: str, left: int, stage: int
) -> None:
    units = make_units(slots, dtype)
    places = [(unit.index, slot) for unit in units for slot in range(len(unit.slots))]
    order = st.permutations(places).flatmap(lambda every: st.integers(0, len(every)).map(lambda n: every[:n]))
    batches = data.draw(st.integers(1, 2), "micro-batches")
    some = st.lists(order | st.just(places[::-1]), min_size=WORLD, max_size=WORLD)
    orders = data.draw(st.lists(some, min_size=batches, max_size=batches), "orders")
    ranks, failures = train(units, orders, REACHED[reached], left, spilt=spilt, stage=stage)
    if any(failures):
        assert (
            stage == 2 and left == 0 and all(isinstance(failure, (BudgetError, RanksError)) for failure in failures)
        ), failures
        refusals = [str(failure) for failure in failures if isinstance(failure, BudgetError)]
        assert refusals and all("pass stage=1: gradients of u" in text for text in refusals)
    else:
        assert same(found(units, ranks), expected(units, orders))
    for rank in ranks:
        assert rank.budget.used_bytes == 0


def test_in_one_order_little_room_is_enough_and_nothing_is_beside_it() -> None:
    units = make_units([2] * 12)
    places = [(unit.index, slot) for unit in reversed(units) for slot in range(2)]
    request = make_plan(units, 0, spilt=False).request
    assert request.waiting_bytes == sum(unit.param_bytes for unit in units) // 4  # 3 of 12
    for seed in range(8):
        ranks, failures = train(units, [[places] * WORLD] * 2, list, 1 << 30, spilt=seed == 0, slow=seed)
        assert failures == [None] * WORLD
        assert [rank.budget.peak_bytes for rank in ranks] == [0] * WORLD
        assert same(found(units, ranks), expected(units, [[places] * WORLD] * 2))


class Ahead(Board):
    """A rank whose others have everything; the first round takes until this one has no room."""

    rounds: Rounds
    said: list[Said]
    has_no_room: Callable[[], bool]

    def beside(self, name: str, *, patience: int = 1) -> Board:
        return self

    def agree(self, where: str) -> None:
        pass

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        said = self.rounds.unpack(mine.numpy().tobytes())
        self.said.append(said)
        while len(self.said) == 1 and not self.has_no_room():
            time.sleep(0.001)
        everything = self.rounds.pack(Said(frozenset(), {index: [True] for index in said.present}, ended=True))
        return torch.stack([mine] + [torch.frombuffer(bytearray(everything), dtype=torch.uint8)] * (WORLD - 1))

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        received.copy_(sent)


def test_who_waited_for_room_and_has_it_takes_part_in_no_round_without_news() -> None:
    """Ranks in such a round would learn nothing, and take room beside the region."""
    units, arena = make_units([1] * 12), HostArena(Tier.HOST, 1 << 20)
    plan = make_plan(units, 0, spilt=False)
    board: Any = Ahead(0, WORLD, Boards(WORLD))
    board.rounds, board.said = Rounds({unit.index: 1 for unit in units}), []
    claim, parts = Budget(Tier.HOST, 0).claim("gradients"), parts_of_units(units, 0)
    exchanges = Exchanges(plan, board, arena, claim, Counters(), parts, Standing())
    board.has_no_room = lambda: exchanges._wants_room
    sums = Sums(units, WORLD)
    exchanges.begin(sums, None)
    for unit in units:
        gradient = gradient_of(unit, 0, 0, 0)
        exchanges.take((unit.index, 0), gradient.data_ptr())
    exchanges.end(sums)
    exchanges.close()
    settled = [said.settled for said in board.said if not said.ended]
    assert all(before < after for before, after in zip(settled, settled[1:], strict=False)), settled


def test_ranks_with_experts_of_their_own_need_no_more_room_where_that_is_known() -> None:
    units = make_units([1] * 12)
    every = [(unit.index, 0) for unit in reversed(units)]
    orders = [[[place for place in every if place[0] % WORLD == rank] for rank in range(WORLD)]]
    for reached, fails in (("known", False), ("unknown", True)):
        ranks, failures = train(units, orders, REACHED[reached], 0, spilt=False)
        assert any(failures) is fails, failures
        if not fails:
            assert same(found(units, ranks), expected(units, orders))


@pytest.mark.parametrize("spilt", [False, True])
def test_units_leave_before_backward_ends(spilt: bool) -> None:
    """A rank that never ends its backward keeps no other from having what all have."""
    units, boards = make_units([1, 1]), Boards(WORLD)
    left = threading.Barrier(WORLD)

    def work(number: int) -> None:
        rank = make_rank(number, boards, units, 0, spilt=spilt)
        gone = threading.Event()
        rank.sums.leave = lambda index: gone.set()  # type: ignore[method-assign]
        rank.exchanges.begin(rank.sums, None)
        gradients = [gradient_of(unit, 0, number, 0) for unit in units]
        rank.exchanges.take((1, 0), gradients[1].data_ptr())
        assert gone.wait(20)
        left.wait(20)
        rank.exchanges.take((0, 0), gradients[0].data_ptr())
        assert rank.exchanges.end(rank.sums) == {0: [True], 1: [True]}
        rank.exchanges.close()

    assert all_ranks(work) == [None] * WORLD


def test_a_gradient_of_a_unit_that_may_have_left_is_refused_whether_it_has_or_not() -> None:
    units, boards, refused = make_units([1, 1]), Boards(WORLD), threading.Barrier(WORLD)

    def work(number: int) -> None:
        rank = make_rank(number, boards, units, 0, spilt=False)
        rank.exchanges.begin(rank.sums, None)
        source = gradient_of(units[1], 0, number, 0)
        rank.exchanges.take((1, 0), source.data_ptr())
        with pytest.raises(StateError, match=r"gradient of u1\.p0: expected all of it before"):
            rank.exchanges.take((1, 0), source.data_ptr())
        refused.wait(20)
        rank.exchanges.close()

    assert all_ranks(work) == [None] * WORLD


def test_a_second_gradient_of_one_pass_is_added_in_its_dtype_until_the_unit_leaves() -> None:
    units, boards = make_units([2], "bfloat16"), Boards(WORLD)
    ranks = dict[int, Rank]()

    def work(number: int) -> None:
        rank = ranks[number] = make_rank(number, boards, units, 0, spilt=False)
        rank.exchanges.begin(rank.sums, None)
        for value in (256.0, 1.0) if number == 0 else ():
            gradient = torch.full((40,), value, dtype=torch.bfloat16)
            rank.exchanges.take((0, 0), gradient.data_ptr())
        rank.sums.known |= rank.exchanges.end(rank.sums)
        rank.exchanges.close()

    assert all_ranks(work) == [None] * WORLD
    (total,) = found(units, [ranks[number] for number in range(WORLD)]).values()
    assert torch.equal(total, torch.full((40,), 256.0))  # 257 in float32


def test_what_is_dropped_in_backward_ends_the_others() -> None:
    units, boards = make_units([1, 1]), Boards(WORLD)

    def work(number: int) -> None:
        rank = make_rank(number, boards, units, 0, spilt=False)
        rank.exchanges.begin(rank.sums, None)
        try:
            if number == 1:
                rank.exchanges.drop()
            else:
                rank.exchanges.end(rank.sums)
        finally:
            rank.exchanges.close()

    failures = all_ranks(work)
    assert failures[1] is None
    assert all(isinstance(failures[number], RanksError) for number in (0, 2)), failures


@given(
    st.dictionaries(st.integers(0, 9), st.integers(1, 5), min_size=1, max_size=5),
    st.data(),
    st.booleans(),
    st.booleans(),
)
def test_what_a_rank_says_is_what_others_read(
    slots: dict[int, int], data: st.DataObject, ended: bool, stuck: bool
) -> None:
    rounds = Rounds(slots)
    settled = frozenset(data.draw(st.sets(st.sampled_from(list(slots)))))
    present = {
        index: data.draw(st.lists(st.booleans(), min_size=count, max_size=count)) for index, count in slots.items()
    }
    packed = rounds.pack(Said(settled, present, ended, stuck))
    assert len(packed) == rounds.size_bytes
    assert rounds.unpack(packed) == Said(frozenset(slots) if ended else settled, present, ended, stuck)


def test_a_round_agrees_on_what_is_settled_on_all_ranks_once() -> None:
    rounds, present = Rounds({0: 1, 1: 1, 2: 1}), {0: [True], 1: [True], 2: [False]}
    first = [Said(frozenset({0, 2}), present), Said(frozenset({0, 1, 2}), present)]
    assert rounds.agree(first) == [2, 0] and not rounds.over
    assert rounds.agree(first) == []
    assert rounds.agree([Said(frozenset({0, 1, 2}), present)] * 2) == [1] and rounds.over
    rounds.begin()
    assert not rounds.over
