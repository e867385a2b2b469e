"""Ctrl-C at places where nothing is half done.

Owns the deferral of SIGINT while the engine works: the signal is noted, and handed to the handler that was installed
before at the next safe point (between modules, between gradients, after a step). A second Ctrl-C while the first one
waits is handed on at once. Only the main thread receives signals; elsewhere, and where no Python handler is installed,
nothing is changed. The handler is put back when the engine's call ends.

A handler may raise between any two instructions, also in those that install ours and put the former one back:

* Whoever hands a signal on at once has put the former handler back before, so that it does not matter what is skipped.
* What is left where some other exception has skipped the end of a ``with`` block (a timeout's alarm) is found at the
  next one: the function that the block was in is not running any more (of a generator that cannot be told).

What such an exception, or a second Ctrl-C, has torn out of is half done, and nobody can say which half. The owner of
the deferral is told, unless the handler raised in code of the user's that the engine has called.
"""

from __future__ import annotations

import _signal  # type: ignore[import-not-found]  # `signal` makes enumerations of what it returns: 2 us a call
import inspect
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from signal import SIGINT
from types import CodeType, FrameType, TracebackType
from typing import Any, TypeVar

T = TypeVar("T")
_Function = TypeVar("_Function", bound=Callable[..., Any])

_OURS = tuple(f"{Path(__file__).parent.parent / package}/" for package in ("offload", "swap"))
_MOST_ARGUMENTS = 3  # of a signal handler: its object, the signal, the frame
_users_code: set[CodeType] = set()


def calls_users_code(function: _Function) -> _Function:
    """Say of a function that what is raised in it is raised by the user's code that it calls: nothing is half done."""
    code = function.__code__
    _users_code.update([code, *(inner for inner in code.co_consts if isinstance(inner, CodeType))])
    return function


class Deferral:
    """Holds SIGINT back inside a ``with`` statement; may be nested and used again."""

    def __init__(self, torn: Callable[[BaseException], None] = lambda error: None) -> None:
        """Begin with nothing held; `torn` is told of an exception that came out of what is half done now."""
        self._torn = torn
        self._handler: Callable[[int, FrameType | None], Any] | None = None  # the former one
        self._inside: list[FrameType] = []  # the frames of the `with` statements, outermost first
        self._pending = False

    def __enter__(self) -> Deferral:
        """Start holding SIGINT back."""
        if threading.current_thread() is threading.main_thread():
            caller = sys._getframe(1)
            if self._inside:
                while self._inside and not _is_running(self._inside[-1], caller):
                    self._inside.pop()
                if not self._inside:
                    self._put_back()
            if self._inside:
                self._inside.append(caller)
            else:
                self._begin(caller)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if threading.current_thread() is not threading.main_thread():
            return
        torn = None if error is None else _torn_by(error, trace)
        if torn is not None:
            self._torn(torn)
        caller = sys._getframe(1)
        while self._inside and self._inside.pop() is not caller:
            pass
        if self._inside:
            return
        self._put_back()
        if self._pending and self._handler is not None:
            self._pending = False
            if error is None or isinstance(error, Exception):  # else that ends the program
                self._handler(SIGINT, None)

    def around(self, function: Callable[..., T], *args: Any) -> T:
        """Call a function while SIGINT is held back; where it is already, without a block of its own."""
        if self._inside:
            return function(*args)
        with self:
            return function(*args)

    def check(self) -> None:
        """Hand on a signal that came meanwhile: nothing is half done here."""
        if self._pending and self._handler is not None and threading.current_thread() is threading.main_thread():
            self._pending = False
            self._handler(SIGINT, None)

    def _begin(self, caller: FrameType) -> None:
        handler = _signal.getsignal(SIGINT)
        if handler != self._note:  # else it was left there, and the former one is known
            self._handler = handler if callable(handler) else None
        self._pending = False
        try:
            self._inside.append(caller)
            if self._handler is not None:
                _signal.signal(SIGINT, self._note)
        except BaseException:
            self._put_back()
            raise

    def _put_back(self) -> None:
        """Install the former handler, if ours is there."""
        try:
            if self._handler is not None and _signal.getsignal(SIGINT) == self._note:
                _signal.signal(SIGINT, self._handler)
        finally:
            self._inside = []

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._inside and not self._pending:
            self._pending = True
            return
        assert self._handler is not None
        inside, pending = self._inside, self._pending
        self._pending = False
        self._put_back()
        self._handler(number, frame)
        if inside and _signal.getsignal(SIGINT) == self._handler:  # it did not raise: go on
            self._inside, self._pending = inside, pending
            _signal.signal(SIGINT, self._note)


def _torn_by(error: BaseException | None, trace: TracebackType | None) -> BaseException | None:
    """Return what a signal handler has raised in the midst of the engine's work: an error, or that of which it came."""
    around: list[FrameType] = []  # frames that the error which has taken this one's place went through
    while error is not None:
        frames = list(_frames(trace))
        if around and frames:
            if frames[0] not in around:  # it was there before
                return None
            frames = around[: around.index(frames[0])] + frames
        for number in range(1, len(frames)):
            if _is_handler(frames[number], frames[number - 1]):
                return error if _works(frames[:number]) else None
        around = frames
        error = error.__cause__ or error.__context__
        trace = None if error is None else error.__traceback__
    return None


def _frames(trace: TracebackType | None) -> Iterator[FrameType]:
    while trace is not None:
        yield trace.tb_frame
        trace = trace.tb_next


def _is_handler(frame: FrameType, interrupted: FrameType) -> bool:
    """Tell whether a frame is a signal handler's: nobody else is given the frame that he comes from."""
    code = frame.f_code
    count = code.co_argcount + code.co_kwonlyargcount
    several = bool(code.co_flags & inspect.CO_VARARGS)
    if not code.co_flags & inspect.CO_OPTIMIZED or not several and count > _MOST_ARGUMENTS:
        return False
    there = frame.f_locals
    given = [there.get(name) for name in code.co_varnames[: count + several]]
    if sys.version_info < (3, 13):
        there.clear()  # the frame would keep them, though it is cleared
    return any(any(one is interrupted for one in (value if type(value) is tuple else (value,))) for value in given)


def _works(frames: Sequence[FrameType]) -> bool:
    """Tell whether the innermost frame of the engine is one that works itself."""
    for frame in reversed(frames):
        code = frame.f_code
        if code.co_filename.startswith(_OURS) and code.co_filename != __file__:
            return code not in _users_code
    return False


def _is_running(frame: FrameType, innermost: FrameType | None) -> bool:
    if frame.f_code.co_flags & inspect.CO_GENERATOR:  # suspended where a `with` block of its caller runs
        return True
    while innermost is not None and innermost is not frame:
        innermost = innermost.f_back
    return innermost is frame
