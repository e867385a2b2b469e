"""Several ranks: what they agree on, what they send each other, and that no failure of one leaves another waiting."""

from __future__ import annotations

import os
import signal
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from resource import RUSAGE_SELF, getrusage
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from several_ranks import Ended, Raised, run

from offload.distributed import processes
from offload.distributed.exchange import KERNEL_DTYPE, Exchange, Part, parts_of, share
from offload.distributed.processes import open_ranks
from offload.distributed.ranks import OneRank, Ranks
from offload.distributed.records import MOST_NUMBERS, RECORD_BYTES, Record, all_agree, digest_of, disagreement
from offload.errors import ConfigError, InternalError, RanksError
from offload.kernels import cpu_adam
from offload.torch_private import start_all_gather

WORLDS = (3, 4)  # with two ranks, a sum has one order
pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")


# --- records ----------------------------------------------------------------------------------------------------------

texts = st.text(max_size=40).filter(lambda text: not text.endswith("\0"))
records = st.builds(
    Record,
    texts,
    st.binary(min_size=32, max_size=32),
    st.booleans(),
    st.integers(0, 2**32 - 1),
    st.lists(st.floats(allow_nan=False), max_size=MOST_NUMBERS).map(tuple),
    st.none() | st.integers(0, 2**16 - 2),
)


@given(records)
def test_a_record_says_what_it_was_told(record: Record) -> None:
    packed = record.pack()
    assert len(packed) == RECORD_BYTES
    assert Record.unpack(packed) == record


def test_a_long_place_is_cut_and_still_compared() -> None:
    record = Record("ö" * 300, bytes(32), False, 0, ())
    assert Record.unpack(record.pack()).where == "ö" * 80


def test_more_numbers_than_fit_are_a_mistake() -> None:
    with pytest.raises(InternalError, match=f"at most {MOST_NUMBERS} numbers"):
        Record("", bytes(32), False, 0, (0.0,) * (MOST_NUMBERS + 1)).pack()


def said(where: str, **facts: Any) -> Record:
    return Record(where, digest_of(facts), False, 0, ())


def test_facts_have_no_order() -> None:
    assert digest_of({"a": 1, "b": 2.5}) == digest_of({"b": 2.5, "a": 1}) != digest_of({"a": 1, "b": 2})


def test_places_come_before_facts() -> None:
    found = [said("step 3", lr=1.0), said("a save", lr=2.0), said("step 3", lr=1.0)]
    assert not all_agree(found)
    text = disagreement(found, [b"{}"] * 3)
    assert "step 3 on ranks 0, 2, a save on rank 1; call the same methods" in text


# --- one rank ---------------------------------------------------------------------------------------------------------


def test_one_rank_agrees_with_itself() -> None:
    ranks: Ranks = open_ranks()
    assert isinstance(ranks, OneRank) and (ranks.rank, ranks.world) == (0, 1)
    agreement = ranks.agree("here", {"a": 1}, numbers=[2.0])
    assert agreement.numbers == ((2.0,),)
    with pytest.raises(ConfigError, match="mine"):
        ranks.agree("here", error=ConfigError("mine"))
    values = torch.arange(4.0)
    ranks.gather(values, "here")
    assert torch.equal(ranks.gather_from_all(values, "here"), values.view(1, 4))
    received = torch.zeros(1, 4)
    ranks.swap(received, values.view(1, 4), "here")
    assert torch.equal(received[0], values)
    ranks.fail(RuntimeError("nobody hears it"))
    ranks.close()


# --- several ----------------------------------------------------------------------------------------------------------


def agree_on_things(rank: int) -> list[Any]:
    ranks = open_ranks()
    found: list[Any] = []
    agreement = ranks.agree("step 1", {"lr": 0.1}, numbers=[rank, 10.0 * rank])
    found.append(agreement.numbers)
    for facts, where in (({"lr": rank // 2, "eps": 1}, "step 2"), ({}, f"place {rank % 2}")):
        try:
            ranks.agree(where, facts)
        except RanksError as error:
            found.append(str(error))
    try:
        ranks.agree("step 3", error=ConfigError("no room") if rank == 2 else None)
    except (RanksError, ConfigError) as error:
        found.append((type(error).__name__, str(error)))
    full = torch.zeros(3 * ranks.world, dtype=torch.bfloat16)
    full[3 * rank : 3 * rank + 3] = rank + 1
    before = full.data_ptr()
    ranks.gather(full, "a gather")
    found.append((full.tolist(), full.data_ptr() == before))
    found.append(ranks.gather_from_all(torch.tensor([rank, 7]), "a gather").tolist())
    received = torch.zeros(ranks.world, 2)
    ranks.swap(received, torch.arange(2.0 * ranks.world).view(-1, 2) + 100 * rank, "a swap")
    found.append(received.tolist())
    again = open_ranks()  # a second engine has words and groups of its own
    found.append(again.agree("step 1", numbers=[rank]).numbers)
    again.close()
    again.close()
    ranks.agree("the end")
    ranks.close()
    return found


@pytest.mark.parametrize("world", WORLDS)
def test_ranks_agree_and_send_each_other_what_they_have(world: int) -> None:
    every = run(agree_on_things, world)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        numbers, facts, places, failed, gathered, rows, swapped, again = found
        assert numbers == tuple((float(r), 10.0 * r) for r in range(world))
        last = "1 on rank 2" if world == 3 else "1 on ranks 2, 3"
        assert facts == (
            f"ranks: expected one value of lr in step 2 but got 0 on ranks 0, 1, {last}; give all ranks the same"
        )
        assert "place 0 on ranks 0, 2, place 1 on rank" in places
        assert failed == (("ConfigError", "no room") if rank == 2 else ("RanksError", "rank 2: ConfigError: no room"))
        assert gathered == ([float(r + 1) for r in range(world) for _ in range(3)], True)
        assert rows == [[r, 7] for r in range(world)]
        assert swapped == [[100.0 * r + 2 * rank, 100.0 * r + 2 * rank + 1] for r in range(world)]
        assert again == tuple((float(r),) for r in range(world))


def gather_much(rank: int) -> tuple[list[bool], int]:
    """Return of each rank's part whether it has come, and by how much the gather has raised the peak of memory."""

    def draw(into: torch.Tensor, seed: int) -> torch.Tensor:
        return into.random_(generator=torch.Generator().manual_seed(seed))

    ranks = open_ranks()
    full = torch.ones(ranks.world, (64 << 20) // ranks.world + 1, dtype=torch.uint8)
    draw(full[rank], rank)
    before = getrusage(RUSAGE_SELF).ru_maxrss
    ranks.gather(full.view(-1), "a gather")
    grown_bytes = (getrusage(RUSAGE_SELF).ru_maxrss - before) << 10
    came = [torch.equal(part, draw(torch.empty_like(part), other)) for other, part in enumerate(full)]
    ranks.agree("the end")
    ranks.close()
    return came, grown_bytes


def test_a_gather_takes_little_memory_beside_where_it_goes() -> None:
    for found in run(gather_much, 3):
        assert not isinstance(found, (Raised, Ended)), found
        came, grown_bytes = found
        assert came == [True] * 3 and grown_bytes < 32 << 20, found


def gather_what_gloo_does_not_know(rank: int) -> str:
    ranks = open_ranks()
    try:
        ranks.gather(torch.zeros(3, dtype=torch.complex64), "a gather")
    except RanksError as error:
        return str(error)
    return "nothing"


def test_what_gloo_cannot_do_is_no_lost_connection() -> None:
    text = "ranks: expected all in one place but gloo failed (Invalid scalar type): ranks 0, 1, 2 waiting in a gather; "
    every = run(gather_what_gloo_does_not_know, 3)
    assert all(isinstance(found, str) and found.startswith(text) for found in every), every


def agree_in_a_part(rank: int) -> Any:
    group = torch.distributed.new_group([0, 2, 3])
    if rank == 1:
        try:
            open_ranks(group)
        except ConfigError as error:
            return str(error)
    ranks = open_ranks(group)
    return ranks.rank, ranks.gather_from_all(torch.tensor([rank]), "a gather").flatten().tolist()


def test_a_part_of_the_processes_can_be_the_ranks() -> None:
    found = run(agree_in_a_part, 4)
    assert [found[0], found[2], found[3]] == [(0, [0, 2, 3]), (1, [0, 2, 3]), (2, [0, 2, 3])]
    assert "expected one that this process is in" in found[1]


def take_the_place(rank: int) -> Any:
    """Let ranks 0 and 1 have engines; then rank 1 ends, and rank 2 takes its place in a group that is made anew."""
    distributed = torch.distributed
    store = distributed.distributed_c10d._get_default_store()
    distributed.destroy_process_group()
    found = []
    for number, members in enumerate([(0, 1), (0, 2)]):
        if rank in members:
            place = {"rank": members.index(rank), "world_size": 2}
            distributed.init_process_group("gloo", store=distributed.PrefixStore(f"group {number}", store), **place)
            for _ in range(2):
                ranks = open_ranks(deadline_s=5.0)
                found.append(ranks.gather_from_all(torch.tensor([rank]), "a gather").flatten().tolist())
                ranks.close()
            distributed.destroy_process_group()
    return found


def test_a_process_may_take_another_one_s_place_in_a_new_group() -> None:
    assert run(take_the_place, 3) == [[[0, 1], [0, 1], [0, 2], [0, 2]], [[0, 1], [0, 1]], [[0, 2], [0, 2]]]


# --- failures ---------------------------------------------------------------------------------------------------------

DEADLINE_S = 20.0


def end(rank: int, how: str, deadline_s: float) -> Any:
    """Let rank 1 fail while the others wait; return what they have seen."""
    ranks = open_ranks(deadline_s=deadline_s)
    begin = time.monotonic()
    try:
        ranks.agree("the beginning")
        if rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 1 and how == "failed":
            ranks.fail(ValueError("out of data"))
        if rank == 1 and how == "interrupted":
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
        if rank == 1 and how == "silent":
            torch.distributed.distributed_c10d._get_default_store().wait(["done"])
        elif rank == 1 and how == "elsewhere":
            ranks.agree("a save")
        elif how == "interrupted" and rank == 2:
            torch.distributed.distributed_c10d._get_default_store().wait(["done"])
        else:
            ranks.gather_from_all(torch.zeros(1 << 16), "an exchange")
    except KeyboardInterrupt:
        return "KeyboardInterrupt", "", 0.0
    except RanksError as error:
        first, seconds = str(error), time.monotonic() - begin
    else:
        return "nothing", "", 0.0
    finally:
        torch.distributed.distributed_c10d._get_default_store().set("done", "1")
    try:
        ranks.agree("afterwards")
    except RanksError as error:
        assert str(error).startswith(first) and "close the engine" in str(error)
    ranks.close()
    return "RanksError", first, seconds


@pytest.mark.parametrize("world", WORLDS)
def test_a_killed_rank_is_noticed_by_all(world: int) -> None:
    found = run(end, world, "killed", DEADLINE_S)
    assert found[1] == Ended(-signal.SIGKILL)
    others = [one for rank, one in enumerate(found) if rank != 1]
    assert len({text for _, text, _ in others}) == 1, others
    for kind, text, seconds in others:
        assert kind == "RanksError" and "no word of rank 1, rank" in text and "waiting in" in text, text
        assert seconds < DEADLINE_S / 2


def test_a_word_of_failure_is_seen_by_all_who_wait() -> None:
    found = run(end, 3, "failed", DEADLINE_S)
    for rank, (kind, text, _) in enumerate(found):  # who goes on after it has failed is told more
        more = " (close the engine and resume from a checkpoint)" if rank == 1 else ""
        assert (kind, text) == ("RanksError", f"rank 1: ValueError: out of data{more}")
    assert all(seconds < DEADLINE_S / 2 for _, _, seconds in found)


def test_a_silent_rank_is_named_at_the_deadline() -> None:
    found = run(end, 3, "silent", 0.7)
    for rank in (0, 2):
        kind, text, seconds = found[rank]
        assert kind == "RanksError" and seconds >= 0.6  # its deadline is 0.7
        assert "expected rank 1 but nobody came within 0.7 s" in text and "ranks 0, 2 waiting in an exchange" in text
        assert text.endswith("pass a longer one to init_process_group, as timeout=timedelta(hours=2)")
    assert found[0][1] == found[2][1]


def open_with_timeouts(rank: int) -> list[float]:
    """Return the deadlines of ranks whose groups have torch's timeout, a longer one and a shorter one."""
    processes.DEADLINE_S = 100.0
    hours, short = (torch.distributed.new_group(timeout=timedelta(seconds=seconds)) for seconds in (7200, 50))
    found = []
    for group in (None, hours, short):
        ranks = open_ranks(group)
        ranks.agree("here")
        found.append(ranks.deadline_s)
        ranks.agree("the end")
        ranks.close()
    return found


def test_who_gives_the_group_a_longer_timeout_waits_longer() -> None:
    assert run(open_with_timeouts, 3) == [[100.0, 7200.0, 100.0]] * 3


def wait_in_two_engines(rank: int) -> str:
    """Let rank 1 be in another engine than the others, each of which waits for who does not come."""
    engines = [open_ranks(deadline_s=seconds) for seconds in (0.7, DEADLINE_S)]
    try:
        engines[rank == 1].agree("a forward")
    except RanksError as error:
        return str(error)
    finally:
        for engine in engines:
            engine.close()
    return "nothing"


def test_who_waits_in_another_engine_of_the_process_is_told_apart() -> None:
    found = run(wait_in_two_engines, 3)
    assert found[0] == found[2]
    assert "no word of rank 1, ranks 0, 2 waiting in a forward" in found[0]
    assert "perhaps in another engine: this process has 1 more, and all ranks should call" in found[0]


def test_a_rank_that_agrees_while_others_exchange_is_named_with_its_place() -> None:
    found = run(end, 3, "elsewhere", 0.7)
    assert {kind for kind, _, _ in found} == {"RanksError"} and len({text for _, text, _ in found}) == 1
    assert "waiting in an exchange" in found[0][1] and "rank 1 waiting in a save" in found[0][1]


def test_ctrl_c_in_a_wait_is_told_to_the_others() -> None:
    found = run(end, 3, "interrupted", DEADLINE_S)
    assert found[1][0] == "KeyboardInterrupt"
    assert found[0][:2] == ("RanksError", "rank 1: KeyboardInterrupt: ")


def interrupt_at_the_start(rank: int) -> Any:
    """Interrupt rank 0 when its collective has begun and nobody has it yet; return whether it counts as unfinished."""
    ranks = open_ranks(deadline_s=DEADLINE_S)
    ranks.agree("the beginning")
    if rank == 0:

        def begin(*given: Any) -> Any:
            start_all_gather(*given)
            raise KeyboardInterrupt

        processes.start_all_gather = begin
        with pytest.raises(KeyboardInterrupt):
            ranks.gather_from_all(torch.zeros(1 << 10), "an exchange")
    ranks.close()
    return ranks.unfinished


def test_what_an_interrupt_has_begun_may_still_be_written_to() -> None:
    assert run(interrupt_at_the_start, 2) == [True, False]


def come_late(rank: int) -> Any:
    torch.distributed.barrier()  # a rank that ends while others still connect to it fails theirs
    return "here" if rank == 1 else open_ranks(deadline_s=0.3).world


def test_a_rank_that_makes_no_engine_is_named() -> None:
    found = run(come_late, 3)
    assert found[1] == "here"
    for rank in (0, 2):
        assert found[rank] == Raised("RanksError", found[0].text)
    assert "expected all 3 to begin an engine within 0.3 s but got no word of rank 1" in found[0].text


def begin_alone(rank: int) -> tuple[str, Any]:
    """Begin an engine on rank 0 alone, by mistake, and then one on all ranks."""
    alone = ""
    if rank == 0:
        try:
            open_ranks(deadline_s=0.1)
        except RanksError as error:
            alone = str(error)
    torch.distributed.barrier()
    ranks = open_ranks(deadline_s=DEADLINE_S)
    numbers = ranks.agree("an engine", numbers=[rank]).numbers
    ranks.close()
    return alone, numbers


def test_all_ranks_begin_an_engine_behind_one_that_a_rank_has_begun_alone() -> None:
    every = run(begin_alone, 3)
    assert every[1:] == [("", ((0.0,), (1.0,), (2.0,)))] * 2, every
    assert "got no word of ranks 1, 2; make the engine on all ranks" in every[0][0] and every[0][1] == every[1][1]


def connect_late(rank: int) -> list[Any]:
    """Let rank 1 be longer than gloo waits for a connection: in an agreement of patient ranks, then to connect."""
    ranks = open_ranks(deadline_s=DEADLINE_S)
    ranks.agree("the beginning")
    ranks._meeting.deadline_s = 0.25  # not before: the ranks begin one after the other
    patient = ranks.beside("patient", patience=1000)
    if rank == 1:
        time.sleep(1.2)  # more than four times the deadline
        return [patient.agree("late", numbers=[rank]).numbers]
    found = [patient.agree("late", numbers=[rank]).numbers]
    try:
        ranks.beside("alone", patience=1000)
    except RanksError as error:
        found.append(str(error))
    return found


@pytest.mark.skipif(not hasattr(torch.distributed.ProcessGroupGloo, "set_timeout"), reason="torch is too old")
def test_who_waits_patiently_does_not_wait_so_to_connect() -> None:
    first, one, last = run(connect_late, 3)
    numbers = ((0.0,), (1.0,), (2.0,))
    assert one == [numbers]
    for found in first, last:
        assert found[0] == numbers and found[1].startswith("ranks: expected to reach all 3 but one has ended"), found


# --- the exchange of gradients ----------------------------------------------------------------------------------------


class Board:
    """Ranks that are threads of one process, for what does not need processes."""

    def __init__(self, rank: int, world: int, rows: list[Any], barrier: threading.Barrier) -> None:
        self.rank, self.world, self._rows, self._barrier = rank, world, rows, barrier
        self.node: Any = self
        self.owners: Any = OneRank()

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        self._rows[self.rank] = sent
        self._barrier.wait(10)
        for rank, rows in enumerate(self._rows):
            received[rank].copy_(rows[self.rank])
        self._barrier.wait(10)

    def fail(self, error: BaseException) -> None:
        self._barrier.abort()


def gradients(world: int, micro_batches: int, numel: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    """Return (micro_batches, world, numel) gradients, with magnitudes that make sums depend on their order."""
    random = torch.Generator().manual_seed(seed)
    values = torch.randn(micro_batches, world, numel, generator=random)
    values *= 10.0 ** torch.randint(-4, 5, values.shape, generator=random)
    values[torch.rand(values.shape, generator=random) < 0.2] = -0.0
    return values.to(dtype)


def in_order(found: torch.Tensor, present: Sequence[Sequence[Sequence[bool]]], slots: Sequence[tuple[int, int]]) -> Any:
    """Return the sum that one process makes of them, micro-batch after micro-batch; NaN where none is."""
    total, arrived = torch.full((found.shape[2],), float("nan")), [False] * len(slots)
    for batch, of_ranks in zip(found, present, strict=True):
        for gradient, there in zip(batch, of_ranks, strict=True):
            for slot, (begin, end) in enumerate(slots):
                if there[slot]:
                    cpu_adam.take_gradient(
                        src=gradient[begin:].data_ptr(),
                        src_dtype=KERNEL_DTYPE[gradient.dtype],
                        dst=total[begin:].data_ptr(),
                        dst_dtype=cpu_adam.Dtype.FLOAT32,
                        numel=end - begin,
                        add=arrived[slot],
                        measure=False,
                    )
                    arrived[slot] = True
    return total, arrived


def bits(values: torch.Tensor) -> list[int]:
    return list(values.view(torch.int32).tolist())


def drawn_presence(data: st.DataObject, ranks: int, numel: int) -> tuple[list[tuple[int, int]], list[list[list[bool]]]]:
    """Draw the slots of a unit of so many elements; and per micro-batch, rank and slot, whether there is a gradient."""
    cuts = sorted(data.draw(st.sets(st.integers(0, numel), max_size=5), "cuts"))
    slots = list(zip([0, *cuts], [*cuts, numel], strict=True))
    flags = st.lists(st.booleans(), min_size=len(slots), max_size=len(slots))
    batches = data.draw(st.integers(1, 3), "micro-batches")
    of_ranks = st.lists(flags, min_size=ranks, max_size=ranks)
    return slots, data.draw(st.lists(of_ranks, min_size=batches, max_size=batches), "present")


def summed(
    every: Sequence[Any],
    found: torch.Tensor,
    present: Sequence[Sequence[Sequence[bool]]],
    slots: Sequence[tuple[int, int]],
    room: int,
) -> tuple[list[torch.Tensor], list[list[bool]]]:
    """Let ranks that are threads exchange gradients.

    Args:
        every: the ranks, each with its node.
        found: (micro-batches, ranks, elements).
        present: per micro-batch, rank and slot, whether a gradient is there.
        slots: the elements of each.
        room: bytes of a buffer of the exchange.

    Returns:
        By rank, the sums of its slice, NaN where there are none; and which slots have one.
    """
    local, numel = every[0].node.world, found.shape[2]
    width = numel // local
    totals = [torch.full((width,), float("nan")) for _ in every]
    known = [[False] * len(slots) for _ in every]
    failures = list[BaseException]()

    def be(rank: int) -> None:
        try:
            buffers = [torch.full((room,), 255, dtype=torch.uint8) for _ in range(2)]
            exchange, place = Exchange(every[rank], *buffers), rank % local
            parts = parts_of(slots, place * width, (place + 1) * width)
            for batch, there in zip(found, present, strict=True):
                known[rank] = exchange.add(
                    batch[rank].clone() if any(there[rank]) else None,
                    parts,
                    there,
                    known[rank],
                    total=totals[rank].data_ptr(),
                    numel=numel,
                    dtype=found.dtype,
                    where="here",
                )
        except BaseException as error:
            failures.append(error)
            for ranks in (every[rank].node, every[rank].owners):
                ranks.fail(error)

    threads = [threading.Thread(target=be, args=(rank,)) for rank in range(len(every))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures, failures
    return totals, known


@given(st.data(), st.integers(1, 4), st.sampled_from(list(KERNEL_DTYPE)), st.integers(0, 1000))
def test_the_sum_of_all_ranks_is_that_of_one_process(
    data: st.DataObject, world: int, dtype: torch.dtype, seed: int
) -> None:
    width = data.draw(st.integers(1, 9), "elements of a slice")
    slots, present = drawn_presence(data, world, world * width)
    room = data.draw(st.integers(4 * world, 4 * world * width + 40), "bytes of a piece")
    found = gradients(world, len(present), world * width, dtype, seed)
    expected, arrived = in_order(found, present, slots)
    rows, barrier = [None] * world, threading.Barrier(world)
    totals, known = summed([Board(rank, world, rows, barrier) for rank in range(world)], found, present, slots, room)
    assert known == [arrived] * world
    assert bits(torch.cat(totals)) == bits(expected)


def exchange_over_gloo(rank: int, world: int, dtype: torch.dtype, room: int) -> Any:
    ranks, width, slots = open_ranks(), 8192, [(0, 5000), (8192, 8192 * world - 300)]
    slots.append((slots[-1][1] + 44, 8192 * world))
    found = gradients(world, 2, world * width, dtype, 5)
    present = [[[True, (batch + r) % 3 != 0, False] for r in range(world)] for batch in range(2)]
    total, arrived = torch.full((width,), float("nan")), [False] * 3
    exchange = Exchange(ranks, torch.empty(room, dtype=torch.uint8), torch.empty(room, dtype=torch.uint8))
    for batch, there in zip(found, present, strict=True):
        shared = [[bool(flag) for flag in row] for row in share(ranks, bytes(there[rank]), "an exchange")]
        assert shared == there
        parts = parts_of(slots, rank * width, (rank + 1) * width)
        arrived = exchange.add(
            batch[rank].clone(),
            parts,
            shared,
            arrived,
            total=total.data_ptr(),
            numel=world * width,
            dtype=dtype,
            where="an exchange",
        )
    expected, known = in_order(found, present, slots)
    same = bits(total) == bits(expected[rank * width : (rank + 1) * width])
    ranks.agree("the end")
    return same, arrived == known, struct.pack("f", float(total[0]))


@pytest.mark.parametrize(("world", "dtype"), [(3, torch.float32), (4, torch.bfloat16), (3, torch.float16)])
def test_gradients_over_gloo_are_added_in_rank_order(world: int, dtype: torch.dtype) -> None:
    for room in (4 * 8192 * world, 10_000):  # at once, and in pieces
        assert [one[:2] for one in run(exchange_over_gloo, world, world, dtype, room)] == [(True, True)] * world


def test_a_slice_knows_its_parts() -> None:
    slots = [(0, 10), (10, 10), (16, 40), (40, 41)]
    assert parts_of(slots, 8, 40) == [Part(0, 0, 2), Part(2, 8, 32)]
    assert parts_of(slots, 41, 50) == []
