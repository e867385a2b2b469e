"""The mover of an accelerator alone, on the simulated one."""

from __future__ import annotations

import ctypes
import functools
import gc
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NoReturn

import pytest
import torch
from simulated import EAGER, LAZY, counts, first, fixed, pending, running
from simulated.faults import ALL, WORK, failing
from simulated.instead import MOVER_STREAMS

from offload.errors import OffloadError
from offload.memory import gradient_reader
from offload.memory.accelerator import AcceleratorDevice, AcceleratorMover
from offload.memory.arena import HOST, Arena, Buffer, bytes_at
from offload.memory.budget import Budget, Tier
from offload.memory.transfer import CopyDeadlineError, MoverNeeds
from offload.stats import Counters

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

PAGE = 4096
DEADLINE_S = 60.0
DOWN, AHEAD, URGENT = 1, 2, 3  # streams of a mover, in the order in which it makes them
SCHEDULES = fixed(MOVER_STREAMS + 1)  # and one of a user


class Bench:
    """A mover with its memory: of the device, and of the host beside what the mover has taken of it."""

    def __init__(self, *, ring_pages: int = 1, budget_pages: int = 1 << 20, deadline_s: float = DEADLINE_S) -> None:
        self.device = AcceleratorDevice(torch.device("sim", 0))
        self.counters = Counters()
        self.arena = self.device.arena(16 * PAGE)
        self.host = self.device.host_arena((ring_pages + 34) * PAGE)
        self.claim = Budget(Tier.DEVICE, budget_pages * PAGE).claim("gradients")
        needs = MoverNeeds(
            counters=self.counters,
            host=self.host,
            fetch_bytes=8 * PAGE,
            gradient_bytes=ring_pages * PAGE,
            gradient_claim=self.claim,
            largest_gradient_bytes=PAGE,
            deadline_s=deadline_s,
        )
        self.mover: AcceleratorMover = self.device.mover(needs)

    def place(self, page: int, pages: int = 1) -> Buffer:
        """Return a range of the device's arena."""
        return Buffer(Tier.DEVICE, self.arena.base_address + page * PAGE, page * PAGE, pages * PAGE)

    def home(self, value: int, pages: int = 1) -> int:
        """Return the address of host memory full of `value`."""
        address = self.host.take(pages * PAGE).address
        ctypes.memset(address, value, pages * PAGE)
        return address

    def seen(self, buffer: Buffer) -> torch.Tensor:
        """Return a result of compute on the current stream over the bytes of a buffer."""
        self.mover.use(buffer)
        return bytes_at(buffer.address, buffer.size_bytes, self.device.place).add(0)

    def close(self) -> None:
        self.mover.close()
        self.free()

    def free(self) -> None:
        self.device.synchronize()
        for arena in (self.host, self.arena):
            arena.close()


@pytest.fixture
def make_bench() -> Iterator[Callable[..., Bench]]:
    """Makes benches; a function, so that a schedule is set before."""
    made: list[Bench] = []

    def make(**options: int) -> Bench:
        made.append(Bench(**options))
        return made[-1]

    yield make
    for bench in made:
        bench.close()


def gradient(value: float, pages: int = 1) -> torch.Tensor:
    return torch.full((pages * PAGE // 4,), float(value), device="sim")


def host_floats(address: int, pages: int = 1) -> torch.Tensor:
    return bytes_at(address, pages * PAGE, HOST).view(torch.float32)


def full(value: int, pages: int = 1) -> torch.Tensor:
    return torch.full((pages * PAGE,), value, dtype=torch.uint8)


class Reads:
    """Reads of a drive that end when the test lets them; each fills its part of the memory with a value."""

    def __init__(
        self,
        values: Sequence[int],
        *,
        fails: int | None = None,
        late: int | None = None,
        held: bool = False,
        log: list[int] | None = None,
    ) -> None:
        self.values = values
        self.log: list[int] = [] if log is None else log  # first values of those that were started
        self.fails = fails
        self.late = late  # this one is given up, once somebody has asked whether it is over
        self.limits: list[float | None] = []  # of waits
        self.started, self.waited, self.asked, self.waited_again = (threading.Event() for _ in range(4))
        self.may_end = [threading.Event() for _ in values]
        for event in () if held else self.may_end:
            event.set()

    def start(self, address: int) -> list[Read]:
        reads = [Read(self, number, address + number * PAGE) for number in range(len(self.values))]
        self.log.append(self.values[0])
        self.started.set()
        return reads


class Read:
    """One of them, of a page."""

    def __init__(self, reads: Reads, number: int, address: int) -> None:
        self._reads, self._number, self._address = reads, number, address

    def done(self) -> bool:
        self._reads.asked.set()
        return self._reads.may_end[self._number].is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        self._reads.limits.append(timeout_s)
        if self._number == self._reads.late:
            self._give_up() if not self._reads.waited.is_set() else self._reads.waited_again.set()
        assert self._reads.may_end[self._number].wait(DEADLINE_S)
        if self._number == self._reads.late:
            self._reads.log.append(0)
        if self._number == self._reads.fails:
            raise OSError("the drive is gone")
        ctypes.memset(self._address, self._reads.values[self._number], PAGE)

    def _give_up(self) -> None:
        self._reads.waited.set()
        assert self._reads.asked.wait(DEADLINE_S)
        raise TimeoutError("the drive is late")


# --- what others bring ------------------------------------------------------------------------------------------------


def test_what_others_bring_follows_who_reads_its_place(
    make_bench: Callable[..., Bench],
) -> None:
    for schedule in SCHEDULES:
        with running(schedule) as seen, ThreadPoolExecutor(1) as others:
            bench = make_bench()
            place, room, may_come = bench.place(0, 2), bench.home(0, 2), threading.Event()

            def bring(value: int, room: int = room, may_come: threading.Event = may_come) -> int:
                assert may_come.wait(DEADLINE_S)
                ctypes.memset(room, value, 2 * PAGE)
                return room

            bench.mover.fetch_host(bench.home(1, 2), place, 2 * PAGE, urgent=False).wait(DEADLINE_S)
            results = [bench.seen(place)]
            for value in (2, 3):
                may_come.clear()
                bench.mover.release(place)
                fetch = functools.partial(bench.mover.fetch_when, functools.partial(bring, value), place, 2 * PAGE)
                on_its_way = fetch(urgent=value == 3, begin=others.submit)
                assert not on_its_way.done()
                threading.Timer(0.01, may_come.set).start()
                on_its_way.wait(0.0)
                results.append(bench.seen(place))
                bench.mover.await_source(room)  # before the next one overwrites it
            assert [torch.equal(result.cpu(), full(n, 2)) for n, result in enumerate(results, 1)] == [True] * 3
        assert seen.races == [], schedule.name


# --- gradients --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("error", [RuntimeError("the device was lost"), OSError("no space"), ValueError("a bug")])
@pytest.mark.parametrize("ring_pages", [1, 4])
def test_what_fails_in_a_gradients_use_is_told_by_wait(
    error: Exception, ring_pages: int, make_bench: Callable[..., Bench]
) -> None:
    """Not by the next gradient, in whose hook it would look like that one's."""
    used: list[int] = []

    def fail(address: int) -> None:
        used.append(address)
        if len(used) < 3:
            raise error if len(used) == 1 else RuntimeError("another")

    with running(LAZY) as seen:
        mover = make_bench(ring_pages=ring_pages).mover
        for number in range(4):
            mover.read_tensor(gradient(number), fail, group=number // 3, last=False)
        with pytest.raises(type(error), match=str(error)):
            mover.wait(DEADLINE_S)
        assert len(used) == 4
        mover.wait(DEADLINE_S)  # told once
    assert seen.races == []


def test_gradients_arrive_in_order_whatever_the_ring(make_bench: Callable[..., Bench]) -> None:
    sizes = [1, 2, 1, 3, 1, 1, 2, 3, 3, 1]

    def note(number: int, arrived: list[tuple[int, bool]], address: int) -> None:
        arrived.append((number, bool(host_floats(address, sizes[number]).eq(number).all())))

    for schedule in SCHEDULES:
        for ring_pages in (3, 4, 7):
            arrived: list[tuple[int, bool]] = []
            with running(schedule) as seen:
                bench = make_bench(ring_pages=ring_pages)
                for number, pages in enumerate(sizes):
                    tensor = gradient(number, pages)
                    use = functools.partial(note, number, arrived)
                    bench.mover.read_tensor(tensor, use, group=number // 3, last=number % 3 == 2)
                    del tensor  # who hands it over keeps nothing
                bench.mover.wait(DEADLINE_S)
            assert arrived == [(number, True) for number in range(len(sizes))], schedule.name
            assert seen.races == [] and bench.claim.size_bytes == 0


def test_a_group_is_waited_for_once(make_bench: Callable[..., Bench]) -> None:
    """And nobody waits for a stream: there is one event per group, and the consumer waits for it."""
    with running(LAZY) as seen:
        mover = make_bench(ring_pages=12).mover
        for group in range(3):
            for number in range(4):
                mover.read_tensor(gradient(number), lambda address: None, group=group, last=number == 3)
        mover.wait(DEADLINE_S)
    assert seen.total("event_synchronizations") == 3 and seen.total("synchronizations") == 0


def test_what_a_gradient_waits_for_is_no_time_of_its_copy(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The download stream begins to count behind what makes the gradient."""
    done: list[bool] = []
    with running(LAZY):
        bench = make_bench(ring_pages=4)
        made = torch.Event("sim")

        def start(stream: torch.Stream) -> None:
            here = torch.Event("sim")
            here.record(stream)
            here.synchronize()
            done.append(made.query())

        monkeypatch.setattr(bench.mover._watch, "start", start)
        one = gradient(1)
        made.record(bench.device.current_stream())
        assert not made.query()
        bench.mover.read_tensor(one, lambda address: None, group=0, last=False)
    assert done == [True]


def test_gradients_are_waited_for_one_group_after_the_other(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    """For all, or until there is room for the next gradient; here the reader's own thread waits for nothing yet."""
    may_go_on, real = threading.Event(), gradient_reader._await_copies
    monkeypatch.setattr(
        gradient_reader, "_await_copies", lambda batch, arrived: (may_go_on.wait(DEADLINE_S), real(batch, arrived))
    )
    used: list[int] = []
    with running(LAZY):
        mover = make_bench(ring_pages=6).mover
        for number in range(6):
            mover.read_tensor(gradient(number), used.append, group=number // 2, last=number % 2 == 1)
        left = [event for event, _ in mover._leaving]
        assert not mover.await_next(DEADLINE_S, room_for=0)
        assert not any(event.query() for event in left)
        assert mover.await_next(DEADLINE_S, room_for=PAGE)
        assert [event.query() for event in left] == [True, False, False]
        assert not mover.await_next(DEADLINE_S, room_for=2 * PAGE), "there is room now"
        assert mover.await_next(DEADLINE_S) and mover.await_next(DEADLINE_S)
        assert all(event.query() for event in left) and not mover.await_next(DEADLINE_S)
        may_go_on.set()
        mover.wait(DEADLINE_S)
        assert len(used) == 6


def test_the_thread_that_computes_goes_on_while_gradients_are_used(make_bench: Callable[..., Bench]) -> None:
    """As far as the ring is large: here the consumer is stuck until all have been handed over."""
    may_end, used = threading.Event(), []

    def use(address: int) -> None:
        assert may_end.wait(DEADLINE_S)
        used.append(address)

    with running(LAZY):
        mover = make_bench(ring_pages=6).mover
        for number in range(6):
            mover.read_tensor(gradient(number), use, group=number // 2, last=number % 2 == 1)
        assert used == []
        may_end.set()
        mover.wait(DEADLINE_S)
    assert len(used) == 6


@pytest.mark.parametrize("budget_pages", [1, 2, 3, 100])
@pytest.mark.parametrize("ring_pages", [1, 6])
def test_gradients_on_their_way_keep_to_the_device_budget(
    ring_pages: int, budget_pages: int, make_bench: Callable[..., Bench]
) -> None:
    """With the next one, which autograd makes before it hands it over."""
    gc.collect()  # tensors of a test before
    for schedule in SCHEDULES:
        with running(schedule):
            bench = make_bench(ring_pages=ring_pages, budget_pages=budget_pages)
            device = torch.get_device_module("sim")
            device.reset_peak_memory_stats(0)
            before = device.memory_allocated(0)
            for number in range(12):
                bench.mover.read_tensor(gradient(number), lambda address: None, group=number // 2, last=number % 2 == 1)
                assert bench.claim.size_bytes <= budget_pages * PAGE
            most = device.max_memory_allocated(0) - before  # in blocks that may be a quarter larger
            assert most <= budget_pages * PAGE * 5 // 4, schedule.name
            bench.mover.wait(DEADLINE_S)
            assert device.memory_allocated(0) == before and bench.claim.size_bytes == 0


def test_whoever_needs_the_room_waits_for_gradients(make_bench: Callable[..., Bench]) -> None:
    with running(LAZY):
        bench = make_bench(ring_pages=6)
        for number in range(6):
            bench.mover.read_tensor(gradient(number), lambda address: None, group=0, last=False)
        assert bench.claim.size_bytes == 6 * PAGE  # more of the group may come
        assert bench.mover.make_room(2 * PAGE) == 6 * PAGE
        assert bench.claim.size_bytes == 0 and bench.mover.make_room(2 * PAGE) == 0


def test_gradients_on_their_way_leave_what_they_are_told_to(make_bench: Callable[..., Bench]) -> None:
    def most(bench: Bench) -> int:
        pages = list[int]()
        for number in range(8):  # of a group that may have more
            bench.mover.read_tensor(gradient(number), lambda address: None, group=0, last=False)
            pages.append(bench.mover.leaving_bytes // PAGE)
        bench.mover.make_room(9 * PAGE)
        bench.mover.wait(DEADLINE_S)  # or the ring, which is full of what is yet to be used, sends what is collected
        return max(pages)

    with running(LAZY):
        bench = make_bench(ring_pages=12, budget_pages=9)
        assert bench.mover.leave_more(PAGE) == 0  # there were none
        assert most(bench) == 8  # room for one is left to the next
        assert bench.mover.leave_more(3 * PAGE) == 3 * PAGE
        assert most(bench) == 5
        assert bench.mover.leave_more(100 * PAGE) == 5 * PAGE
        assert most(bench) == 0  # each is waited for
        assert bench.mover.leave_more(PAGE) == 0


def test_a_gradient_that_is_late_is_told_and_not_used_any_more(make_bench: Callable[..., Bench]) -> None:
    """It may have been dropped meanwhile: what comes then must not be added to the next one."""
    may_end, used = threading.Event(), []

    def stuck(address: int) -> None:
        assert may_end.wait(DEADLINE_S)

    with running(EAGER):
        bench = make_bench(ring_pages=2)
        bench.mover.read_tensor(gradient(0), stuck, group=0, last=False)
        bench.mover.read_tensor(gradient(1), used.append, group=0, last=True)
        with pytest.raises(OffloadError, match="copy of gradients to the host: expected to end within 0 s"):
            bench.mover.wait(0)
        may_end.set()
        bench.mover.wait(DEADLINE_S)
        bench.mover.read_tensor(gradient(2), used.append, group=1, last=True)
        bench.mover.wait(DEADLINE_S)
    assert len(used) == 1


def test_a_gradient_that_was_given_up_is_waited_for_once_its_room_is_needed(make_bench: Callable[..., Bench]) -> None:
    may_end, used = threading.Event(), list[int]()

    def stuck(address: int) -> None:
        assert may_end.wait(DEADLINE_S)
        raise ValueError("of what was given up")

    with running(EAGER):
        bench = make_bench(deadline_s=0)
        bench.mover.read_tensor(gradient(0), stuck, group=0, last=True)
        with pytest.raises(CopyDeadlineError):
            bench.mover.wait(0)
        with pytest.raises(CopyDeadlineError):
            bench.mover.read_tensor(gradient(1), used.append, group=1, last=True)
        may_end.set()
        bench.mover._gradients._consumer.submit(lambda: None).result(DEADLINE_S)
        bench.mover.read_tensor(gradient(2), used.append, group=2, last=True)
        bench.mover.wait(DEADLINE_S)
    assert len(used) == 1


# --- parameters -------------------------------------------------------------------------------------------------------


def test_closing_waits_for_who_uses_a_gradient_though_the_device_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """One group is being used, the next cannot be sent any more: the memory of the first is about to be unmapped."""
    begun, closing, used = threading.Event(), threading.Event(), list[int]()

    def use(address: int) -> None:
        begun.set()
        assert closing.wait(DEADLINE_S)
        used.append(address)

    with running(EAGER):
        bench = Bench(ring_pages=2)
        threads = bench.mover._gradients._consumer
        shutdown = threads.shutdown
        monkeypatch.setattr(threads, "shutdown", lambda: (closing.set(), shutdown()))
        bench.mover.read_tensor(gradient(1), use, group=0, last=True)
        assert begun.wait(DEADLINE_S)
        bench.mover.read_tensor(gradient(2), use, group=1, last=False)
        with failing(1, ALL, lost=True), pytest.raises(torch.AcceleratorError, match="the device is lost"):
            bench.mover.close()
        over = len(used)
        closing.set()
        assert over == 1
        bench.free()


def test_a_copy_waits_for_those_who_read_its_place_and_for_no_others(make_bench: Callable[..., Bench]) -> None:
    """Compute runs when something waits for it, copies at once: what is copied has waited for nobody."""
    with running(first(DOWN, AHEAD, URGENT)) as seen:
        bench = make_bench()
        here, there = bench.place(0, 2), bench.place(4, 2)
        reads = [bench.seen(here), bench.seen(there)]
        bench.mover.release(here)
        later = bench.seen(there)
        bench.mover.fetch_host(bench.home(1), bench.place(8), PAGE, urgent=False)
        assert pending()["sim:0/0"] and not pending().get(f"sim:0/{AHEAD}")  # a place that nobody reads
        ran = pending()["sim:0/0"]
        bench.mover.fetch_host(bench.home(2), bench.place(1), PAGE, urgent=False)  # in the middle of the first
        assert 0 < pending()["sim:0/0"] < ran, "waits for the release, and not for what came later"
        bench.mover.release(there)
        bench.mover.fetch_host(bench.home(2), bench.place(4), PAGE, urgent=True)
        del reads, later
    assert seen.races == []


def test_the_arena_may_be_memory_on_which_work_is_queued(make_bench: Callable[..., Bench]) -> None:
    """The allocator hands memory out in the order of one stream; uploads come on others."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            before = torch.ones(17 * PAGE, dtype=torch.uint8, device="sim")
            place = before.data_ptr()
            del before
            bench = make_bench()
            assert place <= bench.arena.base_address < place + PAGE
            for urgent in (False, True):
                bench.mover.fetch_host(bench.home(1), bench.place(urgent), PAGE, urgent=urgent).wait(DEADLINE_S)
            assert torch.equal(bench.seen(bench.place(0, 1)).cpu(), full(1)), schedule.name
            assert torch.equal(bench.seen(bench.place(1, 1)).cpu(), full(1)), schedule.name
        assert seen.races == [], schedule.name


def test_what_is_urgent_passes_what_was_fetched_ahead(make_bench: Callable[..., Bench]) -> None:
    with running(first(0, DOWN, URGENT)) as seen:
        bench = make_bench()
        ahead = bench.mover.fetch_host(bench.home(1), bench.place(0), PAGE, urgent=False)
        urgent = bench.mover.fetch_host(bench.home(2), bench.place(1), PAGE, urgent=True)
        urgent.wait(DEADLINE_S)
        assert urgent.done() and not ahead.done()
        assert torch.equal(bench.seen(bench.place(1)).cpu(), full(2)) and not ahead.done()
    assert seen.races == []


def test_a_required_read_of_the_drive_passes_those_ahead(make_bench: Callable[..., Bench]) -> None:
    """Two are under way, of which one gets on; a third one and what is required wait for a staging buffer."""
    log: list[int] = []
    reads = [Reads([number], held=number < 3, log=log) for number in range(1, 5)]
    with running(EAGER):
        bench = make_bench()
        fetches = []
        for number, read in enumerate(reads):
            if number == 2:
                assert reads[0].started.wait(DEADLINE_S) and reads[1].started.wait(DEADLINE_S)
            urgent = number == 3
            fetches.append(bench.mover.fetch_nvme(read.start, bench.place(number), [PAGE], urgent=urgent))
        reads[0].may_end[0].set()
        fetches[3].wait(DEADLINE_S)
        for read in reads:
            read.may_end[0].set()
        for fetch in fetches:
            fetch.wait(DEADLINE_S)
        assert log[2:] == [4, 3]
        assert [int(bench.seen(bench.place(n)).cpu()[0]) for n in range(4)] == [1, 2, 3, 4]


def test_a_fetch_is_copied_chunk_by_chunk_as_it_arrives(make_bench: Callable[..., Bench]) -> None:
    reads = Reads([5, 6, 7], held=True)
    with running(EAGER):
        bench = make_bench()
        fetch = bench.mover.fetch_nvme(reads.start, bench.place(0, 3), [PAGE] * 3, urgent=True)
        for number, event in enumerate(reads.may_end):
            copied = counts().get(f"sim:0/{URGENT}", {}).get("h2d_copies", 0)
            assert copied <= number
            event.set()
            while counts().get(f"sim:0/{URGENT}", {}).get("h2d_copies", 0) <= number:
                pass  # before the next one has arrived
        fetch.wait(DEADLINE_S)
        assert bench.seen(bench.place(0, 3)).cpu().view(3, PAGE)[:, 0].tolist() == [5, 6, 7]


def test_fetches_of_the_drive_have_their_bytes_under_every_schedule(make_bench: Callable[..., Bench]) -> None:
    """More than there are staging buffers, into few places."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            outputs = []
            for number in range(8):
                place = bench.place(4 * (number % 2), 4)
                reads = Reads([10 * number + part for part in range(4)])
                bench.mover.fetch_nvme(reads.start, place, [PAGE] * 4, urgent=number % 3 == 0).wait(DEADLINE_S)
                outputs.append(bench.seen(place))
                bench.mover.release(place)
            found = [output.cpu().view(4, PAGE)[:, 0].tolist() for output in outputs]
        assert found == [[10 * number + part for part in range(4)] for number in range(8)], schedule.name
        assert seen.races == [], schedule.name


def test_a_read_that_fails_leaves_nothing_that_still_copies(make_bench: Callable[..., Bench]) -> None:
    """What has failed gives its place away at once: whoever gets it must not be overwritten."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            reads = Reads([1, 2, 3], fails=1)
            fetch = bench.mover.fetch_nvme(reads.start, bench.place(0, 3), [PAGE] * 3, urgent=False)
            with pytest.raises(OSError, match="the drive is gone"):
                fetch.wait(DEADLINE_S)
            assert fetch.done()
            bench.mover.fetch_host(bench.home(9, 3), bench.place(0, 3), 3 * PAGE, urgent=True).wait(DEADLINE_S)
            assert torch.equal(bench.seen(bench.place(0, 3)).cpu(), full(9, 3)), schedule.name
        assert seen.races == [], schedule.name


def test_a_late_read_is_told_by_the_drive_and_keeps_its_staging_buffer(make_bench: Callable[..., Bench]) -> None:
    """The mover's own time is over before the drive's, whose error says more; the read may still write there."""
    late = Reads([1, 2, 3], late=1, held=True)
    for number in (0, 2):
        late.may_end[number].set()
    with running(EAGER):
        bench = make_bench()
        fetch = bench.mover.fetch_nvme(late.start, bench.place(0, 3), [PAGE] * 3, urgent=True)
        assert late.waited.wait(DEADLINE_S)
        with pytest.raises(TimeoutError, match="the drive is late"):
            fetch.wait(0.2)  # one time is over when the drive is asked, the drive's error comes in another one
        assert fetch.done() and late.limits == [None, None, 0], "one deadline for all"
        others = [Reads([number], held=True, log=late.log) for number in (5, 6)]
        fetches = [
            bench.mover.fetch_nvme(reads.start, bench.place(reads.values[0]), [PAGE], urgent=True) for reads in others
        ]
        assert late.waited_again.wait(DEADLINE_S)
        late.may_end[1].set()
        for reads in others:
            reads.may_end[0].set()
        for fetch in fetches:
            fetch.wait(DEADLINE_S)
        assert late.log[0] == 1 and 0 in late.log[1:3], "one of the others goes through the other buffer"
        assert [int(bench.seen(bench.place(number)).cpu()[0]) for number in (5, 6)] == [5, 6]


def test_what_arrived_unused_is_overwritten_behind_its_arrival(make_bench: Callable[..., Bench]) -> None:
    """The two copies come on two streams."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            bench.mover.fetch_host(bench.home(1, 2), bench.place(0, 2), 2 * PAGE, urgent=False).wait(DEADLINE_S)
            bench.mover.fetch_host(bench.home(2), bench.place(1), PAGE, urgent=True).wait(DEADLINE_S)
            assert torch.equal(bench.seen(bench.place(1)).cpu(), full(2)), schedule.name
        assert seen.races == [], schedule.name


def test_what_arrived_unused_is_overwritten_in_parts_behind_its_arrival(make_bench: Callable[..., Bench]) -> None:
    """Something shorter comes to where it begins, then something else to its rest: on the other stream."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            for value, place, urgent in ((1, (0, 4), False), (2, (0, 1), False), (3, (2, 1), True)):
                home, target = bench.home(value, place[1]), bench.place(*place)
                bench.mover.fetch_host(home, target, target.size_bytes, urgent=urgent).wait(DEADLINE_S)
            for page, value in ((0, 2), (2, 3)):
                assert torch.equal(bench.seen(bench.place(page)).cpu(), full(value)), schedule.name
        assert seen.races == [], schedule.name


def test_what_arrived_unused_is_moved_over_behind_its_arrival(make_bench: Callable[..., Bench]) -> None:
    """What moves came on another stream; its own place is then overwritten in parts, too."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            for value, place, urgent in ((2, (4, 4), False), (1, (0, 3), False), (3, (4, 2), True)):
                home, target = bench.home(value, place[1]), bench.place(*place)
                bench.mover.fetch_host(home, target, target.size_bytes, urgent=urgent).wait(DEADLINE_S)
            bench.mover.move(bench.place(4, 2), bench.place(0, 2), 2 * PAGE)
            for value, page in ((5, 2), (6, 7)):
                target = bench.place(page)
                bench.mover.fetch_host(bench.home(value), target, PAGE, urgent=True).wait(DEADLINE_S)
            assert torch.equal(bench.seen(bench.place(0, 2)).cpu(), full(3, 2)), schedule.name
            for value, page in ((5, 2), (6, 7)):
                assert torch.equal(bench.seen(bench.place(page)).cpu(), full(value)), schedule.name
        assert seen.races == [], schedule.name


def test_the_host_waits_before_it_overwrites_a_home(make_bench: Callable[..., Bench]) -> None:
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            home = bench.home(1)
            bench.mover.fetch_host(home, bench.place(0), PAGE, urgent=False).wait(DEADLINE_S)
            bench.mover.await_source(home)
            ctypes.memset(home, 2, PAGE)
            assert torch.equal(bench.seen(bench.place(0)).cpu(), full(1)), schedule.name
        assert seen.races == [], schedule.name


def test_a_host_that_has_waited_in_vain_waits_again(
    make_bench: Callable[..., Bench], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_slow(*_: object) -> NoReturn:
        raise TimeoutError("a slow device")

    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            home = bench.home(1)
            bench.mover.fetch_host(home, bench.place(0), PAGE, urgent=False).wait(DEADLINE_S)
            with monkeypatch.context() as patch, pytest.raises(TimeoutError, match="a slow device"):
                patch.setattr(bench.mover, "_moment", too_slow)
                bench.mover.await_source(home)
            bench.mover.await_source(home)
            ctypes.memset(home, 2, PAGE)
            assert torch.equal(bench.seen(bench.place(0)).cpu(), full(1)), schedule.name
        assert seen.races == [], schedule.name


def test_a_stream_that_comes_later_waits_for_what_has_arrived(make_bench: Callable[..., Bench]) -> None:
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            side = torch.Stream("sim:0")
            bench.mover.fetch_host(bench.home(1), bench.place(0), PAGE, urgent=True).wait(DEADLINE_S)
            outputs = [bench.seen(bench.place(0))]
            with side:
                outputs.append(bench.seen(bench.place(0)))
            bench.mover.release(bench.place(0))
            bench.mover.fetch_host(bench.home(2), bench.place(0), PAGE, urgent=False).wait(DEADLINE_S)
            with side:
                outputs.append(bench.seen(bench.place(0)))
                assert [output.cpu()[0].item() for output in outputs[1:]] == [1, 2], schedule.name
            assert outputs[0].cpu()[0].item() == 1, schedule.name
        assert seen.races == [], schedule.name


def test_threads_that_copy_on_one_stream_leave_each_others_current_stream(make_bench: Callable[..., Bench]) -> None:
    """A thread of the drive is in the middle of its copy, while the one that computes begins and ends one."""

    def current() -> int:
        return bench.device.current_stream().stream_id

    def copy() -> None:
        with bench.mover._copying("h2d", bench.mover._ahead, PAGE):
            inside.set()
            assert left.wait(DEADLINE_S)
        found.append(current())

    with running(LAZY):
        bench, inside, left, found = make_bench(), threading.Event(), threading.Event(), list[int]()
        thread, side = threading.Thread(target=copy), torch.Stream("sim:0")
        default = current()
        with side:
            with bench.mover._copying("h2d", bench.mover._ahead, PAGE):
                thread.start()
                assert inside.wait(DEADLINE_S) and current() == bench.mover._ahead.stream_id
            assert current() == side.stream_id
            left.set()
            thread.join(DEADLINE_S)
        assert found == [default]


@pytest.mark.parametrize("distance", [PAGE, 2 * PAGE, 5 * PAGE])
def test_bytes_move_behind_all_that_reads_them_and_before_all_that_comes(
    distance: int, make_bench: Callable[..., Bench]
) -> None:
    """Three pages, which overlap themselves where they move by less; then something else comes to where they were."""
    content = torch.randint(256, (3 * PAGE,), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    old = torch.arange(8 * PAGE).to(torch.uint8)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            side = torch.Stream("sim:0")
            memory = bytes_at(bench.arena.base_address, 8 * PAGE, bench.device.place)
            memory.copy_(old.pin_memory(), non_blocking=True)
            memory[distance : distance + 3 * PAGE].copy_(content.pin_memory(), non_blocking=True)
            side.wait_stream(torch.accelerator.current_stream(torch.device("sim:0")))
            source, target = bench.place(distance // PAGE, 3), bench.place(0, 3)
            with side:
                before = bench.seen(source)
            bench.mover.move(source, target, 3 * PAGE)
            bench.mover.fetch_host(bench.home(7), bench.place(distance // PAGE + 2), PAGE, urgent=True)
            with side:
                after = bench.seen(target)
                assert torch.equal(after.cpu(), content), schedule.name
                assert torch.equal(before.cpu(), content), schedule.name
        assert seen.races == [], schedule.name


def test_copies_of_chunks_are_waited_for_by_the_host_alone(make_bench: Callable[..., Bench]) -> None:
    """What is at home on the device goes to the host, is changed there, and comes back."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            place, home = bench.place(0), bench.home(0)
            bench.mover.upload(bench.home(3), place.address, PAGE).wait(DEADLINE_S)
            bench.seen(place)
            bytes_at(place.address, PAGE, bench.device.place).add_(1)
            down = bench.mover.download(place.address, home, PAGE)
            down.wait(DEADLINE_S)
            assert down.done() and torch.equal(bytes_at(home, PAGE, HOST), full(4)), schedule.name
            late = bytes_at(place.address, PAGE, bench.device.place).add(0)
            ctypes.memset(home, 9, PAGE)
            bench.mover.upload(home, place.address, PAGE).wait(DEADLINE_S)
            ctypes.memset(home, 0, PAGE)
            assert torch.equal(bench.seen(place).cpu(), full(9)) and torch.equal(late.cpu(), full(4)), schedule.name
        assert seen.races == [] and seen.total("synchronizations") <= 2, schedule.name


def test_what_is_settled_does_not_wait_for_compute_and_compute_may_be_waited_for(
    make_bench: Callable[..., Bench],
) -> None:
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            place, home = bench.place(0), bench.home(0)
            bench.mover.upload(bench.home(3), place.address, PAGE).wait(DEADLINE_S)
            bench.mover.use(place)
            bytes_at(place.address, PAGE, bench.device.place).add_(1)
            bench.mover.await_compute(DEADLINE_S)
            other = bytes_at(bench.place(1).address, PAGE, bench.device.place).add_(1)
            bench.mover.download(place.address, home, PAGE, settled=True).wait(DEADLINE_S)
            assert torch.equal(bytes_at(home, PAGE, HOST), full(4)), schedule.name
            if schedule.name == "lazy":
                assert any(pending().values()), "compute that came later has not run"
            del other
        assert seen.races == [], schedule.name


def test_a_place_is_filled_part_by_part_from_memory_that_is_used_again(make_bench: Callable[..., Bench]) -> None:
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            place, slot = bench.place(0, 3), bench.home(0)
            bench.mover.fetch_host(bench.home(1, 3), place, 3 * PAGE, urgent=True).wait(DEADLINE_S)
            before = bench.seen(place)
            bench.mover.release(place)
            for part in range(3):
                ctypes.memset(slot, 5 + part, PAGE)
                bench.mover.fill(slot, place, part * PAGE, PAGE).wait(DEADLINE_S)
                ctypes.memset(slot, 0, PAGE)
            for part in range(3):
                bench.mover.fill(bench.home(8 + part), place, part * PAGE, PAGE)
            after = bench.seen(place).cpu()
            assert torch.equal(after, torch.cat([full(8), full(9), full(10)])), schedule.name
            assert torch.equal(before.cpu(), full(1, 3)), schedule.name
        assert seen.races == [], schedule.name


def test_a_copy_that_fails_in_its_second_part_leaves_nothing_that_still_copies(
    make_bench: Callable[..., Bench],
) -> None:
    """The first part was given to a stream by then; another copy may come to its place at once."""
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            bench = make_bench()
            home = bench.home(1, 2)
            bench.host.locked_bytes = home + PAGE - bench.host.base_address  # type: ignore[attr-defined]
            with failing(2, WORK), pytest.raises(torch.AcceleratorError):
                bench.mover.fetch_host(home, bench.place(0, 2), 2 * PAGE, urgent=False)
            bench.mover.fetch_host(bench.home(9, 2), bench.place(0, 2), 2 * PAGE, urgent=True).wait(DEADLINE_S)
            assert torch.equal(bench.seen(bench.place(0, 2)).cpu(), full(9, 2)), schedule.name
        assert seen.races == [], schedule.name


def test_memory_that_is_locked_in_part_is_copied_in_two_parts(make_bench: Callable[..., Bench]) -> None:
    """CUDA refuses a copy of which the host's side is page-locked in part."""
    with running(LAZY) as seen:
        bench = make_bench()
        arena: Arena = bench.host
        home = bench.home(1, 2)
        arena.locked_bytes = home + PAGE - arena.base_address  # type: ignore[attr-defined]
        bench.mover.fetch_host(home, bench.place(0, 2), 2 * PAGE, urgent=True).wait(DEADLINE_S)
        assert torch.equal(bench.seen(bench.place(0, 2)).cpu(), full(1, 2))
    assert seen.counts[f"sim:0/{URGENT}"]["h2d_copies"] == 2
