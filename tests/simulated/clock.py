"""Time that goes by costs: workers, futures and a drive whose actions take place in the order of a virtual clock.

clock.h says what an actor is. Everything here runs one actor at a time, so that a run depends on its costs alone. In a
dry run, operators have shapes and costs but no bytes. It knows nothing of the project.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import gc
import heapq
import itertools
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Any, Generic, TypeVar

import simulated

T = TypeVar("T")

NEVER = float("inf")
POLL_S = 1e-6  # of whoever asks whether something is done
IDLE = "work"  # what a worker without any waits for


@dataclasses.dataclass(frozen=True)
class Costs:
    """What work takes; rates per second. The C++ structure of this name has the meanings."""

    flops_16: float = 1e12
    flops_32: float = 1e12
    device_bytes: float = 1e9
    h2d_bytes: float = 1e9
    d2h_bytes: float = 1e9
    kernel_s: float = 0.0
    copy_s: float = 0.0
    launch_s: float = 0.0
    operator_s: float = 0.0


@dataclasses.dataclass(frozen=True)
class Operation:
    """Something that took time on a lane: from `begin` to `end`, in seconds."""

    lane: str
    name: str
    size_bytes: int
    begin: float
    end: float


@contextlib.contextmanager
def clock(costs: Costs, *, dry: bool) -> Iterator[None]:
    """Let the body run by the clock, from zero; work that is given to a stream runs at once.

    Collections of garbage would come at other places in another run, so there are none in the body.

    Args:
        costs: of operators and copies.
        dry: operators have no bytes: results are not computed, and what the host reads of them is 1, or true.
    """
    core = simulated.load()
    given = core.Costs()
    for name, value in dataclasses.asdict(costs).items():
        setattr(given, name, value)
    simulated._begin(core, simulated.EAGER)
    collects = gc.isenabled()
    gc.collect()
    gc.disable()
    core.start_clock(given, dry)
    core.records(True)
    try:
        yield
    finally:
        core.records(False)
        core.stop_clock()
        simulated._begin(core, simulated.EAGER)
        if collects:
            gc.enable()


def now() -> float:
    """Return the caller's time in seconds."""
    return float(simulated.load().now())


def spend(seconds: float, what: str = "") -> None:
    """Let the caller work for a while."""
    simulated.load().spend(seconds, what)


def operations() -> list[Operation]:
    """Return what took time on a lane since the last call, in the order in which it was given."""
    return [Operation(*record) for record in simulated.load().records(True)]


class VirtualFuture(Future):  # type: ignore[type-arg]
    """A future whose reader waits by the clock."""

    def __init__(self, what: str) -> None:
        super().__init__()
        self._what = what
        self._core = simulated.load()
        self._waiting: list[int] = []

    def done(self) -> bool:
        """Tell whether it is done at the caller's time."""
        self._core.spend(POLL_S, "")
        return super().done()

    def result(self, timeout: float | None = None) -> Any:
        """Wait for the result."""
        self.wait(timeout)
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait for the end."""
        self.wait(timeout)
        return super().exception(0)

    def cancel(self) -> bool:
        """Take it back, if it has not begun, and let those who wait for it know."""
        taken = super().cancel()
        if taken:
            self._wake()
        return taken

    def wait(self, timeout: float | None = None) -> None:
        """Wait for the end, whatever came of it."""
        until = NEVER if timeout is None else self._core.now() + timeout
        while not super().done():
            self._waiting.append(self._core.acting())
            if self._core.sleep(until, self._what) >= until and not super().done():
                raise FutureTimeoutError

    def end(self, function: Callable[[], Any]) -> None:
        """Call what it stands for, unless it was taken back, and wake who waits for it."""
        if not self.set_running_or_notify_cancel():
            return
        try:
            self.set_result(function())
        except BaseException as error:
            self.set_exception(error)
        self._wake()

    def _wake(self) -> None:
        while self._waiting:
            self._core.wake(self._waiting.pop(0))


def wait_for_all(futures: Iterable[VirtualFuture]) -> None:
    """Stand for concurrent.futures.wait."""
    for future in futures:
        future.wait()


class VirtualLock:
    """Stands for a lock: whoever holds it may let time go by."""

    def __init__(self) -> None:
        self._core = simulated.load()
        self._held = False
        self._waiting: collections.deque[int] = collections.deque()

    def __enter__(self) -> None:
        while self._held:
            self._waiting.append(self._core.acting())
            self._core.sleep(NEVER, "lock")
        self._held = True

    def __exit__(self, *_: object) -> None:
        self._held = False
        if self._waiting:
            self._core.wake(self._waiting.popleft())


class VirtualCondition:
    """Stands for a condition: whoever holds it may hold it again, and let time go by."""

    def __init__(self) -> None:
        self._core = simulated.load()
        self._lock = VirtualLock()
        self._owner: int | None = None
        self._depth = 0
        self._waiting: list[int] = []

    def __enter__(self) -> None:
        me = self._core.acting()
        if self._owner != me:
            self._lock.__enter__()
            self._owner = me
        self._depth += 1

    def __exit__(self, *_: object) -> None:
        self._depth -= 1
        if not self._depth:
            self._owner = None
            self._lock.__exit__()

    def wait(self) -> None:
        """Let others have it until somebody tells of a change."""
        me, depth = self._core.acting(), self._depth
        assert self._owner == me
        self._owner, self._depth = None, 0
        self._lock.__exit__()
        self._waiting.append(me)
        while me in self._waiting:  # whoever wakes an actor for another reason tells of no change
            self._core.sleep(NEVER, "condition")
        self._lock.__enter__()
        self._owner, self._depth = me, depth

    def notify_all(self) -> None:
        """Tell all who wait of a change."""
        while self._waiting:
            self._core.wake(self._waiting.pop(0))


class VirtualEvent:
    """Stands for an event."""

    def __init__(self) -> None:
        self._core = simulated.load()
        self._set = False
        self._waiting: list[int] = []

    def is_set(self) -> bool:
        """Tell whether it has come."""
        return self._set

    def set(self) -> None:
        """Let it have come."""
        self._set = True
        while self._waiting:
            self._core.wake(self._waiting.pop(0))

    def clear(self) -> None:
        """Let it not have come."""
        self._set = False

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for it; returns whether it has come."""
        me, until = self._core.acting(), NEVER if timeout is None else self._core.now() + timeout
        if not self._set:
            self._waiting.append(me)
            while me in self._waiting and self._core.now() < until:
                self._core.sleep(until, "event")
            self._waiting = [other for other in self._waiting if other != me]
        return self._set


class Actor:
    """A thread that acts by the clock."""

    def __init__(self, name: str, work: Callable[[Actor], None]) -> None:
        """Begin `work`, which is given this object."""
        self._core = simulated.load()
        self._number = self._core.add_actor(name)
        self._work = work
        self._joining: int | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()
        self.name = name
        self.wake()

    def sleep(self, until: float = NEVER) -> float:
        """Wait, inside its work, for a time or to be woken; returns the time."""
        return float(self._core.sleep(until, IDLE))

    def wake(self) -> None:
        """Let it go on now, if it waits."""
        self._core.wake(self._number)

    def join(self) -> None:
        """Wait for the end of its work."""
        self._joining = self._core.acting()
        while not self._ended:
            self._core.sleep(NEVER, f"end of {self.name}")
        self._thread.join()

    def _run(self) -> None:
        if not self._core.enter(self._number):
            return  # the thread has begun behind the clock's end
        try:
            self._work(self)
        finally:
            self._ended = True
            if self._joining is not None:
                self._core.wake(self._joining)
            self._core.leave()


class VirtualErrands(Generic[T]):
    """Stands for threads that do errands, what is urgent first: they are actors."""

    def __init__(self, threads: int, name: str, begin: Callable[[], object] = lambda: None) -> None:
        self._name = name
        self._begin = begin
        self._count = itertools.count()
        self._queue: list[tuple[bool, int, Callable[[int], T], VirtualFuture]] = []
        self._idle: list[Actor] = []
        self.open = True
        self._actors = [Actor(name, functools.partial(self._work, number)) for number in range(threads)]
        self._undone: weakref.WeakSet[VirtualFuture] = weakref.WeakSet()  # and perhaps some that are done

    @property
    def busy(self) -> bool:
        """Whether an errand waits or is under way."""
        return not all(future.done() for future in self._undone)

    def submit(self, errand: Callable[[int], T], *, urgent: bool) -> VirtualFuture:
        """Have an errand done, which is given the number of the actor."""
        assert self.open and self._actors
        future = VirtualFuture(self._name)
        self._undone.add(future)
        heapq.heappush(self._queue, (not urgent, next(self._count), errand, future))
        if self._idle:
            self._idle.pop(0).wake()
        return future

    def do_urgent(self) -> None:
        """Do what is urgent and waits, inside of an errand of the one actor."""
        while self._queue and not self._queue[0][0]:
            _, _, errand, future = heapq.heappop(self._queue)
            future.end(functools.partial(errand, 0))

    def close(self, *, cancel: bool = False) -> None:
        """Let the actors end what is left to do, or take that back. Idempotent."""
        for *_, future in self._queue if cancel else ():
            future.cancel()
        self.open = False
        for actor in self._actors:
            actor.wake()
        while self._actors:
            self._actors.pop().join()

    def _work(self, number: int, actor: Actor) -> None:
        self._begin()
        while self.open or self._queue:
            if self._queue:
                _, _, errand, future = heapq.heappop(self._queue)
                future.end(functools.partial(errand, number))
                del errand, future  # an actor that waits keeps nothing alive
            else:
                if actor not in self._idle:
                    self._idle.append(actor)
                actor.sleep()


class VirtualExecutor:
    """Stands for a ThreadPoolExecutor: its workers are actors."""

    def __init__(
        self,
        max_workers: int = 1,
        thread_name_prefix: str = "worker",
        initializer: Callable[[], object] = lambda: None,
    ) -> None:
        self._errands = VirtualErrands[Any](max_workers, thread_name_prefix, initializer)

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> VirtualFuture:
        """Have a worker call a function."""
        if not self._errands.open:
            raise RuntimeError("cannot schedule new futures after shutdown")
        return self._errands.submit(lambda _: function(*args, **kwargs), urgent=False)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Let the workers end what they have been given; waits in any case. Idempotent."""
        self._errands.close(cancel=cancel_futures)


class VirtualTicket:
    """An operation of :class:`Drive`."""

    def __init__(self, side: str, size_bytes: int, ended: Callable[[], None]) -> None:
        self.side = side
        self.size_bytes = size_bytes
        self.left = float(size_bytes)
        self.begin = self.end = NEVER
        self.ended = ended
        self.waiting: list[int] = []
        self._core = simulated.load()

    def done(self) -> bool:
        """Tell whether it is over at the caller's time."""
        self._core.spend(POLL_S, "")
        return self.end <= self._core.now()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; a deadline has no meaning here."""
        what = f"drive {self.side}"
        while self.end == NEVER:
            self.waiting.append(self._core.acting())
            self._core.sleep(NEVER, what)
        self._core.wait_until(self.end, what)


class Drive:
    """Reads and writes in turn, one of each at a time; where it does both, they share what it can do then.

    Urgent operations come before the others.
    """

    SIDES = ("read", "write")

    def __init__(self, *, read: float, write: float, mixed: float, latency_s: float) -> None:
        """Begin with nothing to do; rates are bytes per second, `mixed` of both together."""
        self._core = simulated.load()
        self._rates = {"read": read, "write": write}
        self._slower = min(mixed / (read + write), 1.0)
        self._latency_s = latency_s
        self._waiting: dict[tuple[str, bool], collections.deque[VirtualTicket]] = {
            (side, urgent): collections.deque() for side in self.SIDES for urgent in (True, False)
        }
        self._current: dict[str, VirtualTicket] = {}
        self._at = self._moved_bytes = 0.0  # when it has last looked, and what it had moved then
        self._open = True
        self._actor = Actor("drive", self._work)

    def start(
        self, side: str, size_bytes: int, *, urgent: bool = False, ended: Callable[[], None] = lambda: None
    ) -> VirtualTicket:
        """Begin an operation; `ended` is called at its end."""
        ticket = VirtualTicket(side, size_bytes, ended)
        self._waiting[side, urgent].append(ticket)
        self._actor.wake()
        return ticket

    def moved_bytes(self) -> float:
        """Return the bytes that it has moved so far."""
        return self._moved_bytes + (self._core.now() - self._at) * sum(map(self._rate, self._current))

    def close(self) -> None:
        """End it, once all is done."""
        self._open = False
        self._actor.wake()
        self._actor.join()

    def _rate(self, side: str) -> float:
        return self._rates[side] * (self._slower if len(self._current) == len(self.SIDES) else 1.0)

    def _take(self) -> None:
        for side in self.SIDES:
            for urgent in (True, False):
                if side not in self._current and self._waiting[side, urgent]:
                    self._current[side] = self._waiting[side, urgent].popleft()
                    self._current[side].begin = self._core.now()

    def _work(self, actor: Actor) -> None:
        while self._open or self._current:
            self._take()
            before = self._at = self._core.now()
            rates = {side: self._rate(side) for side in self._current}
            ends = {side: before + ticket.left / rates[side] for side, ticket in self._current.items()}
            time = actor.sleep(min(ends.values(), default=NEVER))
            self._moved_bytes, self._at = self.moved_bytes(), time
            for side, ticket in list(self._current.items()):
                ticket.left -= (time - before) * rates[side]
                if time >= ends[side]:
                    self._end(self._current.pop(side), time)

    def _end(self, ticket: VirtualTicket, time: float) -> None:
        ticket.end = time + self._latency_s
        self._core.note(f"drive {ticket.side}", ticket.side, ticket.size_bytes, ticket.begin, time)
        ticket.ended()
        for actor in ticket.waiting:
            self._core.wake(actor)
