"""SIGINT is held back and handed on, whatever comes between two instructions of the deferral itself."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

import pytest

from offload import interrupt
from offload.interrupt import Deferral


class Alarm(Exception):
    """What the handler of some other signal raises."""


@pytest.fixture(autouse=True)
def _default_handler() -> Iterator[None]:
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


def interrupted() -> None:
    signal.raise_signal(signal.SIGINT)


def interrupted_twice() -> None:
    signal.raise_signal(signal.SIGINT)
    signal.raise_signal(signal.SIGINT)


def alarmed() -> None:
    raise Alarm


def at_instruction(number: int, action: Callable[[], None], call: Callable[[], None]) -> tuple[bool, str | None]:
    """Call, with `action` before the given instruction of the deferral; return whether there is one, and what came."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if frame.f_code.co_filename != interrupt.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            count += 1
            if count == number:
                action()
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        call()
    except BaseException as error:
        return count >= number, type(error).__name__
    finally:
        sys.settrace(before)
    return count >= number, None


def is_default() -> bool:
    return signal.getsignal(signal.SIGINT) is signal.default_int_handler


def check_holds(deferral: Deferral) -> None:
    reached = False
    with pytest.raises(KeyboardInterrupt):
        with deferral:
            assert not is_default()
            interrupted()
            reached = True
    assert reached, "it was not held back"
    assert is_default()
    with deferral:
        pass
    assert is_default()


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("action", [interrupted, interrupted_twice, alarmed])
def test_no_instruction_is_a_bad_moment(action: Callable[[], None], nested: bool) -> None:
    def inside(deferral: Deferral) -> None:
        with deferral:
            deferral.check()

    def block() -> None:
        with deferral:
            if nested:
                inside(deferral)

    number, more = 0, True
    while more:
        number += 1
        deferral = Deferral()
        more, error = at_instruction(number, action, block)
        if action is alarmed:
            assert error == ("Alarm" if more else None)
        else:
            assert error == ("KeyboardInterrupt" if more else None), number
            assert is_default(), number
        check_holds(deferral)
    assert number > 20


def test_an_error_in_place_of_the_start() -> None:
    """The former handler raises before ours is there."""
    deferral = Deferral()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("offload.interrupt._signal.getsignal", lambda _: signal.default_int_handler(2, None))
        with pytest.raises(KeyboardInterrupt), deferral:
            pass
    check_holds(deferral)


def test_a_block_that_was_not_left_is_found_inside_another() -> None:
    """The outer block ends as if the inner one had."""
    deferral = Deferral()

    def skipping() -> None:
        deferral.__enter__()

    def block() -> None:
        with deferral:
            skipping()
            with deferral:
                interrupted()
            skipping()
            assert not is_default()

    with pytest.raises(KeyboardInterrupt):
        block()
    assert is_default()
    skipping()
    assert not is_default()
    check_holds(deferral)


def test_a_handler_that_returns_is_called_for_every_signal() -> None:
    calls: list[int] = []

    def count(number: int, frame: FrameType | None) -> None:
        calls.append(number)

    signal.signal(signal.SIGINT, count)
    deferral = Deferral()
    with deferral, deferral:
        interrupted()
        assert len(calls) == 0
        interrupted()
        assert len(calls) == 1, "the second one is handed on at once"
        assert signal.getsignal(signal.SIGINT) is not count
        deferral.check()
        assert len(calls) == 2
        interrupted()
        assert len(calls) == 2
    assert len(calls) == 3
    assert signal.getsignal(signal.SIGINT) is count


def test_a_handler_that_the_block_has_installed_stays() -> None:
    def other(number: int, frame: FrameType | None) -> None:
        pass

    with Deferral():
        signal.signal(signal.SIGINT, other)
    assert signal.getsignal(signal.SIGINT) is other


def test_two_deferrals_inside_each_other() -> None:
    """Engines may be called in hooks of each other's models."""
    first, second = Deferral(), Deferral()
    for signals in (1, 2):
        reached = False
        with pytest.raises(KeyboardInterrupt):
            with first:
                with second:
                    with first:
                        interrupted()
                        reached = True
                        if signals == 2:
                            interrupted()
        assert reached
        assert is_default()
    check_holds(first)
    check_holds(second)


def test_nothing_is_changed_in_other_threads_and_without_a_python_handler() -> None:
    deferral = Deferral()
    seen: list[bool] = []

    def block() -> None:
        with deferral:
            seen.append(is_default())

    thread = threading.Thread(target=block)
    thread.start()
    thread.join()
    assert seen == [True]
    for handler in (signal.SIG_IGN, signal.SIG_DFL):
        signal.signal(signal.SIGINT, handler)
        with deferral:
            assert signal.getsignal(signal.SIGINT) is handler
        assert signal.getsignal(signal.SIGINT) is handler
    signal.signal(signal.SIGINT, signal.default_int_handler)
    check_holds(deferral)


def test_a_block_around_the_body_of_another_with_statement() -> None:
    """As the updates of a step have it: its generator is suspended while the body runs."""
    deferral = Deferral()

    @contextlib.contextmanager
    def working() -> Iterator[None]:
        with deferral:
            yield

    reached = 0
    with pytest.raises(KeyboardInterrupt):
        with deferral:
            with working():
                with deferral:
                    interrupted()
                reached += 1
            reached += 1
        raise AssertionError
    assert reached == 2 and is_default()
    with pytest.raises(KeyboardInterrupt):
        with working():
            with working(), deferral:
                interrupted()
            reached += 1
    assert reached == 3 and is_default()
    check_holds(deferral)


def test_a_function_that_is_called_around_is_not_torn_out_of() -> None:
    deferral, done = Deferral(), list[int]()

    def work(number: int) -> int:
        interrupted()
        done.append(number)
        return number

    with pytest.raises(KeyboardInterrupt):
        deferral.around(work, 1)
    assert done == [1] and is_default()
    with pytest.raises(KeyboardInterrupt), deferral:
        assert deferral.around(work, 2) == 2
        assert not is_default(), "the block goes on"
    assert done == [1, 2] and is_default()
    check_holds(deferral)


def test_an_interrupt_outlives_an_error_of_the_block() -> None:
    deferral = Deferral()
    with pytest.raises(KeyboardInterrupt) as found:
        with deferral, deferral:
            interrupted()
            raise ValueError
    assert isinstance(found.value.__context__, ValueError) and is_default()
    with pytest.raises(SystemExit), deferral:
        interrupted()
        raise SystemExit
    check_holds(deferral)
