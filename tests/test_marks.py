"""Commits with marks: a durable store goes back to one of those whose content somebody has held."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from aligned_memory import pattern
from hypothesis import given
from hypothesis import strategies as st
from test_durable import CAPACITY, contents, open_store, reopened
from test_store import BLOCK, put

from swap import NO_MARK, Mode, Snapshot, SwapLockedError, SwapStore, find_run, go_back, marks_of
from swap.durable import manifest as manifests

Mapping = dict[object, bytes]


def commit(store: SwapStore, mark: int, held: dict[int, Snapshot]) -> Mapping:
    """Commit beside all that is held, and hold it, too; returns what was committed."""
    store.commit(mark=(mark, *(one for one in held if one != mark)))
    before = held.pop(mark, None)
    held[mark] = store.snapshot()
    if before is not None:
        before.release()
    return contents(store)


def test_a_run_goes_back_to_what_is_held(tmp_path: Path) -> None:
    assert marks_of([tmp_path]) == [NO_MARK]
    go_back([tmp_path], NO_MARK)  # there is no run
    known: dict[int, Mapping] = {}
    with open_store(tmp_path) as store:
        held = {store.mark: store.snapshot()}
        for mark in (1, 1, 2, 4):
            for key in range(4):
                put(store, key, pattern(BLOCK, 10 * mark + key + len(known)))
            known[mark] = commit(store, mark, held)
        with pytest.raises(SwapLockedError):
            go_back([tmp_path], 1)
        assert store.mark == 4
    assert marks_of([tmp_path]) == [NO_MARK, 1, 2, 4]
    for mark in (4, 2, 1):
        go_back([tmp_path], mark)
        assert reopened(tmp_path) == known[mark]
        assert marks_of([tmp_path]) == [one for one in (NO_MARK, 1, 2, 4) if one <= mark]
    go_back([tmp_path], NO_MARK)
    assert reopened(tmp_path) == {} and find_run([tmp_path], 0)[1] is False


def test_what_is_let_go_is_none_to_go_back_to(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        held = {store.mark: store.snapshot()}
        for mark in (0, 1, 2):
            put(store, "key", pattern(BLOCK, mark))
            commit(store, mark, held)
            held.pop(mark - 1).release()
        put(store, "key", pattern(BLOCK, 3))
        store.commit()  # without one
    assert marks_of([tmp_path]) == [1, 2]


def test_a_commit_of_nothing_keeps_its_mark(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "key", pattern(BLOCK, 1))
        store.commit(mark=(1,))
        before = (tmp_path / "swap.manifest").stat().st_size
        store.commit(mark=(1,))
        store.commit()
        assert (tmp_path / "swap.manifest").stat().st_size == before
        store.commit(mark=(2, 1))
        assert store.mark == 2
    assert marks_of([tmp_path]) == [1, 2]
    with open_store(tmp_path) as store:
        store.commit(mark=(2,))
    assert marks_of([tmp_path]) == [2]
    assert reopened(tmp_path) == {"key": pattern(BLOCK, 1)}


def test_files_that_grow_leave_what_is_held(tmp_path: Path) -> None:
    known: dict[int, Mapping] = {}
    with open_store(tmp_path) as store:
        held = {store.mark: store.snapshot()}
        for mark in (1, 2, 3):
            put(store, "key", pattern(BLOCK, mark))
            known[mark] = commit(store, mark, held)
            if mark > 1:
                store.grow(CAPACITY * mark)
    assert find_run([tmp_path], "key") == (3 * CAPACITY, True) and marks_of([tmp_path]) == [NO_MARK, 1, 2, 3]
    with SwapStore(tmp_path, 3 * CAPACITY, mode=Mode.DURABLE, block_bytes=BLOCK) as store:
        assert contents(store) == known[3]
    go_back([tmp_path], 2)
    assert find_run([tmp_path], "key") == (CAPACITY, True)
    assert reopened(tmp_path) == known[2]
    assert (tmp_path / "swap.data").stat().st_size == CAPACITY


def test_a_piece_of_a_commit_is_cut_off(tmp_path: Path) -> None:
    with open_store(tmp_path) as store:
        put(store, "key", pattern(BLOCK, 1))
        before = commit(store, 1, {})
    path = tmp_path / "swap.manifest"
    whole = path.read_bytes()
    path.write_bytes(whole + whole[-20:-1])
    assert marks_of([tmp_path]) == [1]
    go_back([tmp_path], 1)
    assert path.read_bytes() == whole and reopened(tmp_path) == before


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 3), st.booleans()), max_size=12), st.integers(1, 2000))
def test_any_run_goes_back(tmp_path_factory: pytest.TempPathFactory, steps: list[Any], log_bytes: int) -> None:
    """Whatever was written, and however often the log was written anew: at most the last two commits are held."""
    path, known, mark = tmp_path_factory.mktemp("run"), dict[int, Mapping](), 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(manifests, "_LEAST_LOG_BYTES", log_bytes)
        patch.setattr(manifests, "_GROWTH", 1)
        with open_store(path) as store:
            held = {store.mark: store.snapshot()}
            for further, key, again in steps:
                mark += further
                for older in [one for one in held if one < max((one for one in held if one < mark), default=mark)]:
                    held.pop(older).release()
                for turn in range(1 + again):
                    put(store, key, pattern(BLOCK, 100 * mark + 10 * key + turn))
                    known[mark] = commit(store, mark, held)
            put(store, 9, pattern(BLOCK, 5))  # to extents that nobody holds
        marks = marks_of([path])
        assert marks[-1] == (mark if steps else NO_MARK)
        assert set(held) <= {*marks, NO_MARK} and len(marks) <= 3
        for one in reversed(marks):
            go_back([path], one)
            assert reopened(path) == known.get(one, {})
