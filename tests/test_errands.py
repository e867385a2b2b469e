"""Threads that do errands: what is urgent first, the others in order, and all of them before the end."""

from __future__ import annotations

import threading

import pytest

from offload.memory.errands import Errands

DEADLINE_S = 60.0


def test_what_fails_at_the_beginning_of_a_thread_is_told() -> None:
    errands: Errands[int] = Errands(1, "test", lambda: 1 // 0)
    with pytest.raises(ZeroDivisionError):
        errands.submit(lambda _: 1, urgent=False).result(10)
    assert errands.submit(lambda _: 2, urgent=False).result(10) == 2
    errands.close()


def test_what_is_urgent_comes_first_and_the_rest_in_order() -> None:
    errands: Errands[int] = Errands(1, "test")
    begun, may_end, done = threading.Event(), threading.Event(), []

    def hold(thread: int) -> int:
        begun.set()
        assert may_end.wait(DEADLINE_S)
        return thread

    def note(number: int) -> int:
        done.append(number)
        return number

    first = errands.submit(hold, urgent=False)
    assert begun.wait(DEADLINE_S)
    rest = [errands.submit(lambda _, n=n: note(n), urgent=n % 3 == 0) for n in range(1, 9)]
    may_end.set()
    assert [future.result(DEADLINE_S) for future in (first, *rest)] == [0, *range(1, 9)]
    assert done == [3, 6, 1, 2, 4, 5, 7, 8]
    errands.close()


def test_each_thread_has_a_number() -> None:
    errands: Errands[int] = Errands(3, "test")
    together = threading.Barrier(3)

    def meet(thread: int) -> int:
        together.wait(DEADLINE_S)
        return thread

    found = [errands.submit(meet, urgent=False) for _ in range(3)]
    assert sorted(future.result(DEADLINE_S) for future in found) == [0, 1, 2]
    errands.close()


def test_what_fails_is_told_and_the_thread_goes_on() -> None:
    errands: Errands[int] = Errands(1, "test")

    def fail(thread: int) -> int:
        raise OSError("no")

    failed, fine = errands.submit(fail, urgent=False), errands.submit(lambda thread: 7, urgent=False)
    with pytest.raises(OSError, match="no"):
        failed.result(DEADLINE_S)
    assert fine.result(DEADLINE_S) == 7
    errands.close()


def test_closing_does_what_is_left() -> None:
    errands: Errands[int] = Errands(2, "test")
    found = [errands.submit(lambda thread: 1, urgent=False) for _ in range(50)]
    errands.close()
    errands.close()
    assert sum(future.result(0) for future in found) == 50


def test_without_errands_there_are_no_threads() -> None:
    before = threading.active_count()
    errands: Errands[int] = Errands(2, "test")
    assert threading.active_count() == before
    errands.close()


def test_what_is_urgent_is_done_inside_of_an_errand_that_looks_for_it() -> None:
    errands, log = Errands[None](1, "test"), list[str]()
    begun, may_look = threading.Event(), threading.Event()

    def look(number: int) -> None:
        begun.set()
        assert may_look.wait(DEADLINE_S)
        log.append("looks")
        errands.do_urgent()
        log.append("goes on")

    futures = [errands.submit(look, urgent=False)]
    assert begun.wait(DEADLINE_S)  # or what is urgent would be done before it
    futures.append(errands.submit(lambda _: log.append("later"), urgent=False))
    futures += [errands.submit(lambda _, name=name: log.append(name), urgent=True) for name in ("first", "second")]
    futures.append(errands.submit(lambda _: [][0], urgent=True))
    may_look.set()
    errands.close()
    assert log == ["looks", "first", "second", "goes on", "later"]
    assert [type(future.exception()) for future in futures] == [type(None)] * 4 + [IndexError]


def test_it_is_busy_until_the_last_urgent_errand_is_done() -> None:
    errands: Errands[int] = Errands(1, "test")
    begun, may_end = threading.Event(), threading.Event()
    first = errands.submit(lambda thread: begun.set() or int(may_end.wait(DEADLINE_S)), urgent=False)
    assert begun.wait(DEADLINE_S) and not errands.busy
    second = errands.submit(lambda thread: 2, urgent=True)
    assert errands.busy
    may_end.set()
    assert first.result(DEADLINE_S) and second.result(DEADLINE_S) == 2 and not errands.busy
    errands.close()
