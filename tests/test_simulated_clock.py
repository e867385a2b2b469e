"""The clock of the simulated accelerator: small schedules by hand, the same run twice, dry runs beside real ones."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import TimeoutError as FutureTimeoutError

import pytest
import simulated
import torch
from simulated.clock import (
    IDLE,
    Actor,
    Costs,
    Drive,
    VirtualCondition,
    VirtualErrands,
    VirtualEvent,
    VirtualExecutor,
    VirtualLock,
    clock,
    now,
    operations,
    spend,
    wait_for_all,
)

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MB = 1_000_000
# A square product of 1000 has 2e9 operations: 2 s. 1 MB takes 1 s up, 0.5 s down. A call takes the host 0.125 s.
COSTS = Costs(flops_32=1e9, device_bytes=1e12, h2d_bytes=1e6, d2h_bytes=2e6, operator_s=0.125)
CALL = 0.125
POLL = 1e-6


def square() -> torch.Tensor:
    return torch.empty(1000, 1000, device="sim")


def pinned(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8).pin_memory()


def compute() -> torch.Stream:
    return torch.accelerator.current_stream(torch.device("sim", 0))


def spans(lane: str) -> list[tuple[float, float]]:
    return [(done.begin, done.end) for done in operations() if done.lane == lane]


# --- operators and streams --------------------------------------------------------------------------------------------


def test_the_host_runs_ahead_of_a_stream() -> None:
    with clock(COSTS, dry=True):
        x = square()
        for _ in range(3):
            x.mm(x)
        assert now() == 3 * CALL  # which does not wait
        torch.accelerator.synchronize("sim:0")
        assert now() == CALL + 3 * 2.0  # the first call, then three products
        assert spans("compute") == [(CALL, CALL + 2), (CALL + 2, CALL + 4), (CALL + 4, CALL + 6)]
        assert simulated.load().waits(False) == {"host: end of the device": 6.0 + CALL - 3 * CALL}


@pytest.mark.parametrize(
    ("call", "seconds"),
    [
        (lambda x, y: x @ y, 2 * 1000**3 / 1e9),
        (lambda x, y: torch.addmm(x, x, y), 2 * 1000**3 / 1e9),
        (lambda x, y: x[None].bmm(y[None]), 2 * 1000**3 / 1e9),
        (lambda x, y: x.bfloat16(), (4 + 2) * MB / 1e12),
        (lambda x, y: x.add(y), 3 * 4 * MB / 1e12),
        (lambda x, y: x[:1].expand(1000, 1000).add(y), (4000 + 8 * MB) / 1e12),  # expanded bytes are read once
        (lambda x, y: x.zero_(), 2 * 4 * MB / 1e12),
    ],
)
def test_an_operator_takes_its_operations_or_its_bytes(
    call: Callable[[torch.Tensor, torch.Tensor], object], seconds: float
) -> None:
    with clock(COSTS, dry=True):
        x, y = square(), square()
        operations()
        call(x, y)
        ((begin, end),) = spans("compute")
        assert end - begin == pytest.approx(seconds, rel=1e-9)


@pytest.mark.parametrize("causal", [False, True])
def test_attention_takes_two_products_and_five_more(causal: bool) -> None:
    """Of 2 x 3 heads: 256 queries and keys of 64 elements; half of it where it is causal."""
    product = 2 * (2 * 3) * 256 * 256 * 64 / 1e9 / (2 if causal else 1)
    with clock(COSTS, dry=True):
        q, k, v = (torch.empty(2, 3, 256, 64, device="sim", requires_grad=True) for _ in range(3))
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=causal).sum().backward()
        found = {done.name: done.end - done.begin for done in operations()}
    name = "_scaled_dot_product_flash_attention_for_cpu"
    assert found[name] == pytest.approx(2 * product) and found[f"{name}_backward"] == pytest.approx(5 * product)


def test_a_stream_waits_for_an_event_of_another() -> None:
    with clock(COSTS, dry=True):
        x, side = square(), torch.Stream("sim:0")
        x.mm(x)  # given at 0.125, ends at 2.125
        side.wait_event(compute().record_event())  # two calls: 0.375
        with side:
            x.mm(x)  # given at 0.5, waits until 2.125
        assert now() == 4 * CALL
        side.synchronize()
        assert now() == 2.125 + 2
        assert simulated.load().idle(False)["compute"] == {"compute": 2.0, "host: calls": 2 * CALL}


def test_a_stream_that_has_work_does_not_wait_for_an_event_of_the_past() -> None:
    with clock(COSTS, dry=True):
        x, side = square(), torch.Stream("sim:0")
        early = compute().record_event()
        with side:
            x.mm(x)  # given at 0.25
        side.wait_event(early)
        with side:
            x.mm(x)
        side.synchronize()
        assert now() == 2 * CALL + 2 + 2


def test_a_copy_goes_beside_a_product() -> None:
    with clock(COSTS, dry=True):
        x, up, down = square(), torch.Stream("sim:0"), torch.Stream("sim:0")
        host, device = pinned(2 * MB), torch.empty(2 * MB, dtype=torch.uint8, device="sim")
        x.mm(x)  # 0.125 to 2.125
        with up:
            device.copy_(host, non_blocking=True)  # 0.25 to 2.25
            device.copy_(host, non_blocking=True)  # to 4.25
        with down:
            host.copy_(device, non_blocking=True)  # given at 0.5, takes 1
        torch.accelerator.synchronize("sim:0")
        assert now() == 4.25
        done = operations()
    assert [(d.lane, d.name, d.size_bytes, d.begin, d.end) for d in done if d.lane != "compute"] == [
        ("h2d", "h2d", 2 * MB, 0.25, 2.25),
        ("h2d", "h2d", 2 * MB, 2.25, 4.25),
        ("d2h", "d2h", 2 * MB, 0.5, 1.5),
    ]


def test_two_streams_share_a_lane_and_a_gap_is_used() -> None:
    with clock(COSTS, dry=True):
        x, late, early = square(), torch.Stream("sim:0"), torch.Stream("sim:0")
        host, device = pinned(MB), torch.empty(MB, dtype=torch.uint8, device="sim")
        x.mm(x)
        late.wait_stream(compute())  # until 2.125
        with late:
            device.copy_(host, non_blocking=True)  # 2.125 to 3.125
        with early:
            device.copy_(host, non_blocking=True)  # given at 0.625: before it
            device.copy_(host, non_blocking=True)  # 1.625 to 2.625 would overlap: 3.125
        assert spans("h2d") == [(2.125, 3.125), (0.625, 1.625), (3.125, 4.125)]


def test_a_copy_of_unlocked_memory_and_a_number_make_the_host_wait() -> None:
    with clock(COSTS, dry=True):
        torch.empty(MB, dtype=torch.uint8).to("sim", non_blocking=False)
        assert now() == CALL + 1
        x = square()
        x.mm(x).view(-1)[0].item()
        assert now() == CALL + 1 + CALL + 2


def test_an_event_is_done_when_its_time_has_come() -> None:
    with clock(COSTS, dry=True):
        x = square()
        x.mm(x)
        event = compute().record_event()
        assert not event.query()
        spend(2.125 - now() - 2 * POLL)
        assert not event.query()
        assert event.query()


def test_what_depends_on_values_is_refused_in_a_dry_run() -> None:
    with clock(COSTS, dry=True):
        x = square()
        assert x.sum().item() == 1.0 and x.isnan().any().item()  # nobody knows
        with pytest.raises(RuntimeError, match="sim: aten::nonzero depends on values, and there are none"):
            x.nonzero()


def test_a_real_run_has_bytes_and_the_same_times() -> None:
    def program() -> torch.Tensor:
        x = torch.ones(100, 100).pin_memory().to("sim", non_blocking=True)
        y = (x @ x).add(1).cpu()
        spend(now())
        return y

    seen = []
    for dry in (True, False):
        with clock(COSTS, dry=dry):
            y = program()
            seen.append((operations(), now()))
    assert seen[0] == seen[1]
    assert y.eq(101).all()


def test_without_a_clock_time_stands_still() -> None:
    x = torch.ones(4, device="sim")
    assert x.add(1).cpu().eq(2).all() and now() == 0.0


# --- actors -----------------------------------------------------------------------------------------------------------


def test_a_worker_works_beside_the_host() -> None:
    seen: list[tuple[str, float]] = []

    def task() -> str:
        seen.append(("begins", now()))
        spend(3.0, "work")
        seen.append(("ends", now()))
        return "result"

    with clock(COSTS, dry=True):
        workers = VirtualExecutor(1)
        spend(1.0)
        future = workers.submit(task)
        spend(1.0)
        seen.append(("host", now()))
        assert not future.done()
        assert future.result() == "result" and now() == 4.0
        workers.shutdown()
    assert seen == [("begins", 1.0), ("host", 2.0), ("ends", 4.0)]


def test_what_a_worker_does_is_seen_at_its_time() -> None:
    """Not before, though nothing but the order of actors keeps it."""
    told: list[float] = []

    def task() -> None:
        for _ in range(4):
            spend(1.0)
            told.append(now())

    with clock(COSTS, dry=True):
        workers = VirtualExecutor(1)
        workers.submit(task)
        seen = []
        for _ in range(3):
            spend(1.5)
            seen.append(len(told))
        workers.shutdown()
    assert seen == [1, 3, 4]  # at 1.5, 3 (when both are there, the worker was first) and 4.5


def test_operators_hand_on_too() -> None:
    told: list[float] = []
    with clock(COSTS, dry=True):
        workers, x = VirtualExecutor(1), square()
        workers.submit(lambda: (spend(0.2), told.append(now())))
        x.add(1)
        assert told == []
        x.add(1)
        assert told == [0.2]
        workers.shutdown()


def test_tasks_of_one_worker_follow_each_other_and_two_work_at_once() -> None:
    for many, end in ((1, 4.0), (2, 2.0)):
        with clock(COSTS, dry=True):
            workers = VirtualExecutor(many)
            futures = [workers.submit(spend, 2.0) for _ in range(2)]
            for future in futures:
                future.result()
            assert now() == end
            workers.shutdown()


def test_a_failure_comes_out_of_the_future_and_a_deadline_passes() -> None:
    def fail() -> None:
        spend(2.0)
        raise OSError("no space")

    with clock(COSTS, dry=True):
        workers = VirtualExecutor(1)
        future = workers.submit(fail)
        with pytest.raises(FutureTimeoutError):
            future.result(1.5)
        assert now() == 1.5
        assert isinstance(future.exception(), OSError) and now() == 2.0
        with pytest.raises(OSError, match="no space"):
            future.result()
        workers.shutdown()


def test_urgent_errands_come_first_and_know_who_does_them() -> None:
    done: list[tuple[str, int, float]] = []

    def errand(name: str) -> Callable[[int], None]:
        return lambda number: (spend(1.0), done.append((name, number, now())))[-1]

    with clock(COSTS, dry=True):
        errands = VirtualErrands[None](1, "errands")
        first = errands.submit(errand("first"), urgent=False)
        spend(0.5)  # it has begun
        for name, urgent in (("second", False), ("third", False), ("urgent", True)):
            errands.submit(errand(name), urgent=urgent)
        assert not first.done()
        errands.close()
    assert done == [("first", 0, 1.0), ("urgent", 0, 2.0), ("second", 0, 3.0), ("third", 0, 4.0)]


def test_what_has_not_begun_can_be_taken_back() -> None:
    with clock(COSTS, dry=True):
        workers, others = VirtualExecutor(1), VirtualExecutor(1)
        running, taken, dropped = (workers.submit(spend, 2.0) for _ in range(3))
        waiting = others.submit(lambda: (wait_for_all([taken]), now())[-1])
        spend(1.0)
        assert not running.cancel() and taken.cancel() and taken.cancelled()
        assert waiting.result() == 1.0
        workers.shutdown(cancel_futures=True)
        assert now() == 2.0 and running.result() is None and dropped.cancelled()
        others.shutdown()


def test_who_holds_a_lock_lets_time_go_by() -> None:
    lock = VirtualLock()

    def hold() -> float:
        with lock:
            spend(1.0)
            return now()

    with clock(COSTS, dry=True):
        workers = VirtualExecutor(3)
        futures = [workers.submit(hold) for _ in range(3)]
        assert [future.result() for future in futures] == [1.0, 2.0, 3.0]
        workers.shutdown()


def test_where_everybody_waits_it_is_told() -> None:
    with clock(COSTS, dry=True):
        workers = VirtualExecutor(1)
        ours = VirtualExecutor(1)
        stuck = ours.submit(lambda: stuck.result())
        with pytest.raises(RuntimeError, match="clock: everybody waits: host for worker;.* worker for worker"):
            stuck.result()
        assert workers.submit(now).result() == 0.0
        workers.shutdown()


def test_behind_the_end_of_a_clock_nobody_waits() -> None:
    with clock(COSTS, dry=True):
        workers = VirtualExecutor(1)
        future = workers.submit(spend, 1.0)
    with pytest.raises(RuntimeError, match="clock: who waits for worker waits behind its end"):
        future.result()


def drive() -> Drive:
    """Of 2 MB/s read and 1 MB/s written, or half of each at once."""
    return Drive(read=2.0 * MB, write=1.0 * MB, mixed=1.5 * MB, latency_s=0.25)


def test_a_ticket_is_over_when_its_bytes_have_passed() -> None:
    with clock(COSTS, dry=True):
        disk, over = drive(), []
        spend(1.0)
        first = disk.start("read", 2 * MB, ended=lambda: over.append(now()))  # 1 to 2, and 0.25 more
        second = disk.start("read", 4 * MB)  # 2 to 4
        assert not first.done()
        second.wait()
        assert now() == 4.25 and first.done() and over == [2.0]
        assert simulated.load().waits(False)["host: drive read"] == 4.25 - 1.0 - POLL
        disk.close()


def test_reads_and_writes_share_the_drive() -> None:
    with clock(COSTS, dry=True):
        disk = drive()
        read, written = disk.start("read", 2 * MB), disk.start("write", 2 * MB)
        read.wait()  # at 1 MB/s: 2 s, in which 1 MB was written at 0.5 MB/s
        assert now() == 2.25
        written.wait()  # the other one alone, at 1 MB/s
        assert now() == 3.25
        disk.close()


def test_urgent_reads_come_first() -> None:
    with clock(COSTS, dry=True):
        disk = drive()
        tickets = [disk.start("read", 2 * MB, urgent=urgent) for urgent in (False, False, True)]
        spend(10.0)
        assert [ticket.end for ticket in tickets] == [2.25, 3.25, 1.25]
        disk.close()


def test_a_thread_that_begins_behind_the_clocks_end_acts_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    begin, late, acted = threading.Event(), list[threading.Thread](), list[str]()

    class Late(threading.Thread):
        def start(self) -> None:
            late.append(self)
            super().start()

        def run(self) -> None:
            begin.wait(60.0)
            super().run()

    with clock(COSTS, dry=True), monkeypatch.context() as patch:
        patch.setattr(threading, "Thread", Late)
        Actor("late", lambda actor: acted.append(actor.name))
    with clock(COSTS, dry=True):
        other = Actor("other", lambda actor: acted.append(actor.name))
        begin.set()
        late[0].join(60.0)
        assert not late[0].is_alive() and not acted
        other.join()
    assert acted == ["other"]


def test_an_actor_sleeps_until_it_is_woken() -> None:
    woken: list[float] = []
    with clock(COSTS, dry=True):
        sleeper = Actor("sleeper", lambda actor: woken.extend((actor.sleep(), actor.sleep(5.0), actor.sleep(5.5))))
        spend(2.0)
        sleeper.wake()
        spend(1.0)
        sleeper.wake()
        sleeper.join()
        assert simulated.load().waits(False)[f"sleeper: {IDLE}"] == 5.5
    assert woken == [2.0, 3.0, 5.5]


def test_who_waits_on_a_condition_goes_on_when_it_is_told_and_has_it() -> None:
    seen: list[float] = []
    with clock(COSTS, dry=True):
        condition = VirtualCondition()

        def work(actor: Actor) -> None:
            with condition:
                while not seen:
                    condition.wait()
                seen.append(now())

        worker = Actor("worker", work)
        spend(1.0)
        with condition:
            condition.notify_all()  # of nothing
        spend(1.0)
        with condition, condition:  # whoever has it may take it again
            seen.append(now())
            condition.notify_all()
            spend(2.0)
        worker.join()
    assert seen == [2.0, 4.0]


def test_who_waits_for_an_event_does_so_for_a_time_or_until_it_comes() -> None:
    seen: list[tuple[bool, float]] = []
    with clock(COSTS, dry=True):
        event = VirtualEvent()

        def work(actor: Actor) -> None:
            seen.append((event.wait(0.5), now()))
            seen.append((event.wait(), now()))
            event.clear()
            seen.append((event.is_set(), now()))

        worker = Actor("worker", work)
        spend(3.0)
        event.set()
        worker.join()
    assert seen == [(False, 0.5), (True, 3.0), (False, 3.0)]


def test_an_errand_does_what_is_urgent_and_comes_meanwhile() -> None:
    seen: list[tuple[str, float]] = []
    with clock(COSTS, dry=True):
        errands = VirtualErrands[None](1, "errands")

        def serve(number: int) -> None:
            spend(2.0)
            errands.do_urgent()
            seen.append(("served", now()))

        errands.submit(serve, urgent=False)
        spend(1.0)
        errands.submit(lambda _: seen.append(("later", now())), urgent=False)
        errands.submit(lambda _: seen.append(("urgent", now())), urgent=True)
        errands.close()
    assert seen == [("urgent", 2.0), ("served", 2.0), ("later", 2.0)]
