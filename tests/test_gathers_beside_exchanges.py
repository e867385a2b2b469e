"""Ranks gather parameters and exchange gradients in orders of their own: none hangs, and all sums are right."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import test_conductor
import torch
from hypothesis import given
from hypothesis import strategies as st
from test_conductor import Meeting, ThreadRanks
from test_exchanges import (
    REACHED,
    WORLD,
    Board,
    Boards,
    Sums,
    all_ranks,
    expected,
    gradient_of,
    make_plan,
    make_units,
    parts_of_units,
    same,
)
from test_exchanges import found as sums_of

from offload.distributed.ranks import Agreement
from offload.errors import BudgetError, RanksError
from offload.memory.arena import HostArena
from offload.memory.budget import Budget, Tier
from offload.planning.units import Unit
from offload.shards.exchanges import Exchanges
from offload.stats import Counters

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")


class Both(ThreadRanks):
    """Ranks that are threads, with an order for parameters and one for gradients."""

    def __init__(self, rank: int, meeting: Meeting, boards: Boards) -> None:
        super().__init__(rank, WORLD, meeting)
        self.meeting, self.boards = meeting, boards

    def beside(self, name: str, *, patience: int = 1) -> Board:
        return Board(self.rank, WORLD, self.boards, name)

    def agree(self, where: str, *_: Any, **said: Any) -> Agreement:
        try:
            return super().agree(where, **said)
        except threading.BrokenBarrierError:
            raise RanksError("another rank has failed") from None

    def gather(self, full: torch.Tensor, where: str) -> None:
        try:
            super().gather(full, where)
        except threading.BrokenBarrierError:
            raise RanksError("another rank has failed") from None

    def fail(self, error: BaseException) -> None:
        self.meeting.fail()
        self.boards.fail()


class Rank(test_conductor.Rank):
    """One rank's slices of parameters and of sums."""

    def __init__(self, ranks: Both, units: Sequence[Unit], left: int, *, spilt: bool) -> None:
        super().__init__(ranks, set(), units)
        plan = make_plan(units, ranks.rank, spilt=spilt, stage=3)
        self.budget = Budget(Tier.HOST, left)
        self.sums = Sums(units, WORLD)
        self._room, claim = HostArena(Tier.HOST, plan.request.exchange_bytes), self.budget.claim("gradients")
        parts, standing = parts_of_units(units, ranks.rank), self.conductor.standing
        self.exchanges = Exchanges(plan, self.conductor, self._room, claim, Counters(), parts, standing)

    def close(self) -> None:
        self.exchanges.close()
        self.conductor.close()


@given(
    st.data(),
    st.lists(st.integers(1, 3), min_size=1, max_size=8),
    st.lists(st.booleans(), min_size=WORLD, max_size=WORLD),
    st.sampled_from(list(REACHED)),
    st.sampled_from([0, 1 << 30]),
    st.integers(0, 2),
)
def test_any_orders_of_both_come_to_their_end(
    data: st.DataObject, slots: list[int], spilt: list[bool], reached: str, left: int, ahead: int
) -> None:
    """Each rank needs a unit's parameters before it has its gradients, in an order of its own; some leave units out."""
    units = make_units(slots, "float32")
    places = [(unit.index, slot) for unit in units for slot in range(len(unit.slots))]
    order = st.permutations(places).flatmap(lambda every: st.integers(0, len(every)).map(lambda n: every[:n]))
    some = st.lists(order | st.just(places[::-1]), min_size=WORLD, max_size=WORLD) | order.map(
        lambda one: [one] * WORLD
    )
    orders = data.draw(st.lists(some, min_size=1, max_size=2), "orders")
    meeting, boards, ranks = Meeting(WORLD), Boards(WORLD), dict[int, Rank]()

    def work(number: int) -> None:
        both = Both(number, meeting, boards)
        rank = ranks[number] = Rank(both, units, left, spilt=spilt[number])
        try:
            for batch, of_ranks in enumerate(orders):
                mine = of_ranks[number]
                rank.exchanges.begin(rank.sums, REACHED[reached](mine))
                under_way: dict[int, Callable[[], None]] = {}
                for at, (index, slot) in enumerate(mine):
                    for after, _ in mine[at : at + 1 + ahead]:
                        if after not in under_way:
                            under_way[after] = rank.start(after)
                    under_way[index]()
                    if index not in [after for after, _ in mine[at + 1 : at + 1 + ahead]]:
                        del under_way[index]
                    gradient = gradient_of(units[index], slot, number, batch)
                    rank.exchanges.take((index, slot), gradient.data_ptr())
                rank.sums.known |= rank.exchanges.end(rank.sums)
            rank.conductor.agree("the end")
        except BaseException as error:
            if not isinstance(error, RanksError):
                both.fail(error)
            raise
        finally:
            rank.close()

    failures = all_ranks(work)
    if any(failures):
        assert left == 0 and all(isinstance(failure, (BudgetError, RanksError)) for failure in failures), failures
        assert any(isinstance(failure, BudgetError) for failure in failures), failures
    else:
        every: list[Any] = [ranks[number] for number in range(WORLD)]
        assert same(sums_of(units, every), expected(units, orders))
        if not any(spilt) and all(of_ranks == [of_ranks[0]] * WORLD for of_ranks in orders):
            assert [rank.counters.gathers_for_others for rank in every] == [0] * WORLD
    for rank in ranks.values():
        assert rank.budget.used_bytes == 0
