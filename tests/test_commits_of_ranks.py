"""Commits of several ranks: wherever each is killed, all have one in common, with one content."""

from __future__ import annotations

import contextlib
import dataclasses
from types import SimpleNamespace
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from offload.shards.commits import Commits
from offload.stats import Counters
from swap import NO_MARK

WORLD = 3
Content = tuple[int, int]  # steps, and how often somebody has written behind the last one


class Store:
    """Stands for a store whose log is written anew at each commit before which it may be."""

    def __init__(self) -> None:
        self.mark = NO_MARK
        self.content: Content = (0, 0)
        self.found: dict[int, Content | None] = {NO_MARK: None}  # what may be gone back to, by mark
        self.snapshots = 0

    @property
    def uncommitted(self) -> bool:
        return self.content != self.found[self.mark]

    def put(self, *_: Any) -> Any:
        return SimpleNamespace(wait=lambda: None)

    def snapshot(self) -> Any:
        self.snapshots += 1

        def release() -> None:
            self.snapshots -= 1

        return SimpleNamespace(release=release)

    def commit(self, mark: tuple[int, ...]) -> None:
        assert mark[0] >= self.mark
        kept = {self.mark} if self.mark in mark[1:] else set(mark[1:])
        self.found = {one: content for one, content in self.found.items() if one in kept}
        self.mark = mark[0]
        self.found[self.mark] = self.content


@dataclasses.dataclass
class Rank:
    """A rank that steps, writes and commits."""

    store: Store
    commits: Commits

    @classmethod
    def begin(cls) -> Rank:
        store: Any = Store()
        record: Any = SimpleNamespace(late=lambda: b"", renew=lambda: None, note_commit=lambda: None)
        record.seal = lambda: repr(store.content).encode()
        ranks: Any = SimpleNamespace(world=WORLD, ended=False)
        return cls(store, Commits(store, record, contextlib.nullcontext(), Counters(), ranks))

    def commit(self) -> None:
        self.commits.seal()
        self.commits.make()

    def write(self) -> None:
        self.commits.note_write()
        self.store.content = self.store.content[0], self.store.content[1] + 1


moves = st.lists(st.tuples(st.booleans(), st.lists(st.booleans(), min_size=WORLD, max_size=WORLD)), max_size=4)
stops = st.lists(st.integers(0, 6), min_size=WORLD, max_size=WORLD)


@given(st.lists(moves, min_size=1, max_size=5), stops)
def test_all_can_go_back_to_one_commit(steps: list[list[tuple[bool, list[bool]]]], stopped: list[int]) -> None:
    """Between two steps all write alike, and each commits when it likes; behind the last one each is killed somewhere.

    Args:
        steps: of each what follows: whether all write, and which ranks commit then.
        stopped: behind so many moves of the last step each rank is killed.
    """
    ranks = [Rank.begin() for _ in range(WORLD)]
    for number, following in enumerate(steps, 1):
        for rank in ranks:
            if number > 1:
                rank.commit()  # the next forward has begun
        marks = [rank.commits.marks for rank in ranks]
        for place, rank in enumerate(ranks):
            rank.commits.pass_on(marks)
            assert rank.store.snapshots <= 2
            rank.store.content = number, 0
            is_last = number == len(steps)
            for writes, commit in following[: stopped[place] if is_last else None]:
                if writes:
                    rank.write()
                if commit[place]:
                    rank.commit()
            assert rank.store.snapshots <= 3
            if is_last and stopped[place] > len(following):
                rank.commit()  # it has closed its engine, or begun the next step
    common = set.intersection(*(set(rank.store.found) for rank in ranks))
    assert common and len({rank.store.found[max(common)] for rank in ranks}) == 1
