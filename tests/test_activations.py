"""Activations: what is booked, what is measured, and how the working region gives way."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import offload
from offload.activations import ledger as activations
from offload.activations.ledger import (
    TOLERANCE_BYTES,
    WORTH_SAMPLING_BYTES,
    Activations,
    SavedActivation,
)
from offload.activations.rss import Rss, open_rss, trim_heap
from offload.errors import BudgetError
from offload.memory.budget import Budget, Tier

MIB = 1 << 20


class FakeRegion:
    """A working region of `working_bytes`, between `smallest` and `largest`, that keeps the ledger as the real one.

    Gradients on their way have `leaving_bytes`, and can leave `leavable` more to others.
    """

    leavable = 0

    def __init__(self, budget: Budget, working: int, smallest: int, largest: int) -> None:
        self.budget, self.size_bytes, self.smallest, self.largest = budget, working, smallest, largest
        self.claim = budget.claim("arena", working)
        self.gradients = budget.claim("gradients on their way")

    @property
    def leaving_bytes(self) -> int:
        return self.gradients.size_bytes

    def make_room(self, by_bytes: int) -> int:
        given = min(by_bytes, self.leaving_bytes)
        self.gradients.resize(self.leaving_bytes - given)
        return given

    def leave_more(self, by_bytes: int) -> int:
        given = min(by_bytes, self.leavable)
        self.leavable -= given
        return given

    @property
    def smallest_arena_bytes(self) -> int:
        return self.smallest

    def shrink(self, by_bytes: int) -> int:
        given = min(by_bytes, self.size_bytes - self.smallest)
        self.size_bytes -= given
        self.claim.resize(self.claim.size_bytes - given)
        return given

    def grow(self, by_bytes: int) -> int:
        taken = min(by_bytes, self.largest - self.size_bytes)
        self.size_bytes += taken
        self.claim.resize(self.claim.size_bytes + taken)
        return taken


TRIMS: list[None] = []  # of meters in the test that runs


class FakeMeter:
    """A resident set of `resident` bytes beside the region, whose peaks the kernel notes."""

    notes_peaks = False

    def __init__(self, region: FakeRegion, trims: list[None]) -> None:
        self.region, self.resident, self.peak = region, 1000 * MIB, 0
        self.trims = trims

    def trim(self) -> None:
        self.trims.append(None)

    def forget_peak(self) -> None:
        self.peak = 0

    def close(self) -> None:
        pass

    def now_bytes(self) -> int:
        self.peak = max(self.peak, self.resident + self.region.size_bytes)
        return self.resident + self.region.size_bytes

    def high_water_bytes(self) -> int:
        self.now_bytes()
        return self.peak

    def spike(self, size_bytes: int) -> None:
        self.resident += size_bytes
        self.now_bytes()
        self.resident -= size_bytes


class Bench:
    """Budget 1000 MiB; the region has 100 MiB now, and lies between 100 and 600."""

    def __init__(self, *, working: int = 100, gradients: int = 0) -> None:
        self.budget = Budget(Tier.DEVICE, 1000 * MIB)
        self.region = FakeRegion(self.budget, working * MIB, 100 * MIB, 600 * MIB)
        self.meter = FakeMeter(self.region, TRIMS)
        self.activations = Activations(self.budget, self.region, self.meter, gradient_bytes=gradients * MIB)
        self.run(spike=0)  # after the first micro-batch, holes in the heap are left to the allocator if there is room

    def run(self, *, spike: int) -> None:
        """One micro-batch that takes `spike` bytes in passing."""
        self.activations.open_pass()
        self.meter.spike(spike)
        self.activations.close_pass()


@pytest.fixture(autouse=True)
def trims(monkeypatch: pytest.MonkeyPatch) -> list[None]:
    """One entry per call."""
    TRIMS.clear()
    monkeypatch.setattr(activations, "LOOK_EVERY_S", 0.0)  # a look at every call
    return TRIMS


def tensor(size_bytes: int) -> torch.Tensor:
    return torch.empty(size_bytes, dtype=torch.uint8)


def test_a_storage_is_charged_once_and_refunded_with_its_last_tensor() -> None:
    bench = Bench()
    whole = tensor(3 * MIB)
    first, second = SavedActivation(whole, bench.activations), SavedActivation(whole[5:], bench.activations)
    assert bench.budget.claims()["activations"] == 3 * MIB
    del first
    bench.activations.refund()
    assert bench.budget.claims()["activations"] == 3 * MIB
    del second
    bench.activations.refund()
    assert "activations" not in bench.budget.claims()


@pytest.mark.parametrize("owner", ["user", "nobody"])
def test_a_small_part_of_what_somebody_has_is_charged_alone(owner: str) -> None:
    """Rows of data that was there before; a part of a result takes what the result does once nobody has that."""
    plain = bare(10 * MIB)
    data = tensor(64 * MIB)
    kept = [SavedActivation(data[MIB : 3 * MIB], plain), SavedActivation(data[5 * MIB :], plain)]
    if owner == "nobody":
        del data
        with pytest.raises(BudgetError, match=r"activations needs 62\.00 MiB more, 64\.00 MiB in all"):
            plain.balance()
    else:
        plain.balance()
        assert plain._claim.size_bytes == 2 * MIB
    kept.clear()
    plain.balance()
    assert plain._claim.size_bytes == plain._owed_bytes == 0


@pytest.mark.parametrize("mode", ["keep", "offload", "auto"])
def test_a_batch_may_be_a_slice_of_what_is_larger_than_the_budget(mode: str) -> None:
    """32 rows of 64 MiB."""
    data, net = torch.zeros(32 << 10, 512), torch.nn.Sequential(torch.nn.Linear(512, 8), torch.nn.Tanh())
    room = {"device": "24MiB", "cpu": "16MiB"}
    with offload.Engine(net, offload.AdamW(), device="cpu", max_memory=room, activations=mode) as engine:
        for begin in (0, 32):
            engine.backward(engine(data[begin : begin + 32]).square().mean())
            engine.step()
        assert engine.stats().peak_bytes["device"] < MIB


def bare(limit_bytes: int) -> Activations:
    """Return a ledger without a meter, and without parameters."""
    budget = Budget(Tier.DEVICE, limit_bytes)
    return Activations(budget, FakeRegion(budget, 0, 0, 0), None)


@given(st.lists(st.tuples(st.sampled_from(["keep", "free", "drop", "balance"]), st.integers(0, 99)), max_size=30))
def test_every_charge_is_given_back_however_storages_are_shared(events: list[tuple[str, int]]) -> None:
    """The model knows who has each of three storages of 4 pages, of which a quarter may be kept."""
    size, whole_of = activations.WORTH_ASKING_BYTES, list[torch.Tensor | None]()
    plain, kept = bare(5 * size), list[tuple[int, SavedActivation]]()
    whole_of += [tensor(size) for _ in range(3)]
    charged = dict[int, int]()  # by storage, of those of which something is kept
    for event, number in events:
        which = number % 3
        whole = whole_of[which]
        if event == "keep" and whole is not None:
            part = size // 4 * (1 + number % 4)
            kept.append((which, SavedActivation(whole[:part], plain)))
            charged.setdefault(which, part if part <= size // 2 else size)
        elif event == "free" and kept:
            which = kept.pop(number % len(kept))[0]
            if which not in {other for other, _ in kept}:
                del charged[which]
        elif event == "drop":
            whole_of[which] = whole = None
        elif event == "balance":
            plain.balance()
            charged = {which: size if whole_of[which] is None else bytes_ for which, bytes_ in charged.items()}
        del whole
        plain.refund()
        assert plain._claim.size_bytes == sum(charged.values()) and not plain._owed_bytes
        assert set(plain._tensors) == set(plain._sizes) >= set(plain._parts)
    kept.clear()
    plain.refund()
    assert not plain._claim.size_bytes and not plain._parts and plain.is_empty()


def test_what_does_not_fit_is_owed_until_the_region_has_given_way() -> None:
    bench = Bench(working=600)
    kept = SavedActivation(tensor(500 * MIB), bench.activations)  # 400 are free
    assert bench.region.size_bytes == 600 * MIB  # an operation is under way: nothing moves
    bench.activations.balance()
    assert bench.region.size_bytes == 500 * MIB  # 1000 - 500
    assert bench.budget.claims() == {"arena": 500 * MIB, "activations": 500 * MIB}
    del kept
    bench.activations.refund()
    assert bench.budget.used_bytes == 500 * MIB


def test_what_does_not_fit_beside_the_smallest_region_is_refused_and_refunded() -> None:
    bench = Bench(working=600)
    kept = [SavedActivation(tensor(450 * MIB), bench.activations) for _ in range(2)]
    bench.activations.balance()  # 900 + 100: exactly the budget
    assert bench.budget.free_bytes == 0
    kept.append(SavedActivation(tensor(1), bench.activations))
    for _ in range(2):  # it stays owed, however often one asks
        with pytest.raises(BudgetError, match=r'device budget: activations needs 1 B more.*max_memory\["device"\]'):
            bench.activations.balance()
    kept.pop()
    bench.activations.balance()
    kept.clear()
    bench.activations.balance()
    assert bench.budget.claims() == {"arena": 100 * MIB}


def test_the_region_grows_into_what_the_highest_peak_has_left() -> None:
    bench = Bench()
    bench.run(spike=700 * MIB)
    margin = 700 * MIB // 16
    assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - margin
    bench.run(spike=100 * MIB)  # a short one in between changes nothing: the next may be long again
    assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - margin


def test_a_peak_that_is_seen_once_is_left_room_for_as_long_as_it_may_be_there() -> None:
    """The kernel's mark tells of a peak between two samples once: the same one again is no record."""
    bench = Bench()
    margin = 700 * MIB // 16
    for _ in range(2 * activations.PASSES_REMEMBERED + 2):
        bench.run(spike=700 * MIB)
        assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - margin


def test_the_region_grows_when_what_samples_see_is_less_for_long() -> None:
    bench = Bench()

    def run(seen: int) -> None:
        """One micro-batch that takes so much where it is sampled, and 100 MiB more in between."""
        bench.activations.open_pass()
        bench.meter.resident += seen
        bench.activations.sample()
        bench.meter.spike(100 * MIB)
        bench.meter.resident -= seen
        bench.activations.close_pass()

    run(600 * MIB)
    assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - 700 * MIB // 16
    for _ in range(activations.PASSES_REMEMBERED - 1):
        run(400 * MIB)
    assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - 700 * MIB // 16
    run(400 * MIB)
    assert bench.region.size_bytes == 1000 * MIB - 500 * MIB - 500 * MIB // 16


def test_a_micro_batch_that_is_refused_says_nothing_of_smaller_ones() -> None:
    """As where somebody searches for a batch size."""
    bench, margin = Bench(), 100 * MIB // 16
    bench.activations.open_pass()
    bench.meter.spike(900 * MIB + TOLERANCE_BYTES + MIB)
    with pytest.raises(BudgetError):
        bench.activations.close_pass()
    for _ in range(2):
        bench.run(spike=100 * MIB)
    assert bench.region.size_bytes == 600 * MIB < 1000 * MIB - 100 * MIB - margin, "as large as the plan made it"


def test_no_more_is_left_room_for_than_a_pass_has_taken() -> None:
    """The same peak was seen by a sample in one pass, and between two of them in another one."""
    bench = Bench()
    for seen in (100, 650):
        bench.activations.open_pass()
        bench.meter.resident += seen * MIB
        bench.activations.sample()
        bench.meter.spike((700 - seen) * MIB)
        bench.meter.resident -= seen * MIB
        bench.activations.close_pass()
    bench.region.make_room(100 * MIB)  # which it gets back
    bench.run(spike=0)
    assert bench.region.size_bytes == 1000 * MIB - 700 * MIB - 700 * MIB // 16


def test_the_region_shrinks_when_a_micro_batch_needs_more() -> None:
    bench = Bench()
    bench.run(spike=300 * MIB)
    assert bench.region.size_bytes == 600 * MIB
    bench.activations.open_pass()
    bench.meter.resident += 850 * MIB  # and it is seen while it is there
    bench.activations.balance()
    assert bench.region.size_bytes == 150 * MIB
    bench.meter.resident -= 850 * MIB
    bench.activations.close_pass()
    assert bench.region.size_bytes == 150 * MIB  # 850 and a margin leave nothing to grow into


def test_a_measured_peak_over_the_budget_is_refused_with_what_would_do() -> None:
    bench = Bench()
    bench.run(spike=900 * MIB + TOLERANCE_BYTES)  # at the edge
    peak = 901 * MIB + TOLERANCE_BYTES  # 965 MiB, and a sixteenth: 1025.3; with 100 for parameters 1125.3 = 1.10 GiB
    bench.activations.open_pass()
    bench.meter.spike(peak)
    with pytest.raises(BudgetError, match=r"took 965.00 MiB .* 900.00 MiB are left .* to 1.10 GiB, use gradient check"):
        bench.activations.close_pass()
    bench.run(spike=100 * MIB)  # a smaller one goes on


def test_the_refusal_says_where_fewer_parameters_on_the_device_would_do() -> None:
    bench = Bench()
    bench.budget.claim("arena", 500 * MIB)  # parameters whose home is the device
    bench.activations.open_pass()
    bench.meter.spike(600 * MIB)  # 400 are left; 600 and a sixteenth would fit beside 100
    with pytest.raises(BudgetError, match="set activation_memory to 637.50 MiB, so that parameters leave the device"):
        bench.activations.close_pass()


def test_the_refusal_says_where_fewer_states_on_the_device_would_do() -> None:
    bench = Bench(gradients=50)  # they wait on the device where states are there, too
    bench.budget.claim("arena", 500 * MIB)
    bench.activations.open_pass()
    bench.meter.spike(650 * MIB)
    with pytest.raises(
        BudgetError, match=r"of parameters and optimizer states; set .* 637.50 MiB, so that optimizer states leave"
    ):
        bench.activations.close_pass()


def test_memory_that_stays_is_not_an_activation() -> None:
    """The user loads data, or a module imports others: neither is refused, and the region recovers."""
    bench = Bench()
    bench.run(spike=100 * MIB)
    assert bench.region.size_bytes == 600 * MIB
    bench.activations.open_pass()
    bench.meter.resident += 5000 * MIB
    bench.activations.balance()
    assert bench.region.size_bytes == 100 * MIB
    bench.activations.close_pass()
    bench.run(spike=100 * MIB)
    assert bench.region.size_bytes == 600 * MIB


def test_memory_that_the_user_frees_gives_activations_no_more_room() -> None:
    """What he had when the engine was made, or has taken meanwhile."""
    bench = Bench()
    for more in (-400, 5000, -5000):  # MiB
        bench.activations.open_pass()
        bench.meter.resident += max(more, 0) * MIB
        bench.activations.balance()
        bench.activations.close_pass()
        bench.meter.resident += min(more, 0) * MIB
        bench.activations.open_pass()
        bench.meter.resident += 700 * MIB
        bench.activations.balance()
        bench.meter.resident -= 700 * MIB
        bench.activations.close_pass()
        assert bench.region.size_bytes <= 1000 * MIB - 700 * MIB


def test_what_another_engine_takes_in_a_pass_is_measured_and_the_refusal_says_so() -> None:
    one, two = Bench(), Bench()
    one.meter = two.meter  # of one process
    one.activations = Activations(one.budget, one.region, one.meter)
    for bench in (one, two):
        bench.activations.open_pass()
        bench.meter.resident += 500 * MIB
    two.activations.balance()
    two.meter.resident -= 1000 * MIB
    for bench in (two, one):
        with pytest.raises(BudgetError, match=r"took 1000\.00 MiB .* What other engines took meanwhile is in it"):
            bench.activations.close_pass()


def test_a_failed_pass_is_forgotten() -> None:
    bench = Bench()
    bench.activations.open_pass()
    bench.meter.spike(5000 * MIB)
    bench.activations.abandon_pass()
    bench.run(spike=100 * MIB)
    assert bench.region.size_bytes == 600 * MIB


def test_a_peak_between_passes_is_no_concern() -> None:
    bench = Bench()
    bench.run(spike=100 * MIB)
    bench.meter.spike(5000 * MIB)
    bench.run(spike=100 * MIB)
    assert bench.region.size_bytes == 600 * MIB


def test_holes_in_the_heap_are_given_back_where_room_is_short(trims: list[None]) -> None:
    def holes(bench: Bench, size_bytes: int) -> int:
        """Trims in a micro-batch that finds that much resident which nothing has booked."""
        bench.activations.open_pass()
        before = len(trims)
        bench.meter.resident += size_bytes
        for _ in range(3):
            bench.activations.balance()
        done = len(trims) - before
        bench.meter.resident -= size_bytes
        bench.activations.close_pass()
        return done

    worth = activations.WORTH_TRIMMING_BYTES
    roomy = Bench()
    assert holes(roomy, 100 * MIB) == 0  # the first micro-batch has told that there is room
    assert holes(roomy, 901 * MIB) == 1  # over the room beside the smallest region; a second trim could give nothing
    assert holes(roomy, worth + 1) == 1  # so much in one go must fit on top from now on
    before = len(trims)
    roomy.meter.resident += 901 * MIB  # left over from outside
    roomy.activations.open_pass()
    assert len(trims) == before + 1

    def fresh(room: int) -> Bench:
        bench = Bench()
        bench.budget.claim("arena", bench.budget.free_bytes - room)
        bench.activations = Activations(bench.budget, bench.region, bench.meter)
        return bench

    assert holes(fresh(10 * MIB), worth) == 0  # a first micro-batch, which may have anything ahead
    assert holes(fresh(10 * MIB), worth + 1) == 1
    tight = fresh(200 * MIB)
    tight.run(spike=190 * MIB)  # from now on that much must fit on top
    assert holes(tight, worth + 1) == 1
    tight = fresh(216 * MIB)
    tight.run(spike=190 * MIB)
    assert holes(tight, worth + 1) == 0  # it does
    assert holes(tight, 26 * MIB + 1) == 1


def test_a_spike_is_what_comes_on_top_of_the_moment_before_it(trims: list[None]) -> None:
    """The loss needs 700 MiB when little else is there, which a later 500 MiB, at another time, have no part in."""
    bench = Bench()
    bench.activations = Activations(bench.budget, bench.region, bench.meter)  # of which no micro-batch is known

    def run(left: int) -> list[int]:
        """Return how often holes were given back before each of three moments; `left` are holes of the loss's time."""
        done = []
        bench.activations.open_pass()
        for resident, spike in ((left, 700 * MIB), (500 * MIB, 0), (0, 0)):
            before = len(trims)
            bench.meter.resident += resident
            bench.activations.balance()
            done.append(len(trims) - before)
            if done[-1]:
                bench.meter.resident -= resident  # they were holes
                resident = 0
            bench.meter.spike(spike)
            bench.meter.resident -= resident
        bench.activations.close_pass()
        return done

    assert run(0) == [0, 1, 0]  # the first micro-batch may have anything ahead
    room = bench.activations.room_bytes
    assert run(room - 700 * MIB)[0] == 0
    assert run(room - 700 * MIB + 1)[0] == 1


def test_a_pass_ends_when_nothing_of_it_is_kept() -> None:
    bench = Bench()
    bench.activations.open_pass()
    kept = SavedActivation(tensor(100 * MIB), bench.activations)
    bench.meter.resident += 100 * MIB
    bench.activations.close_pass()  # a second forward before the backward of the first
    bench.activations.open_pass()
    assert bench.region.size_bytes == 100 * MIB
    bench.meter.spike(200 * MIB)
    del kept
    bench.meter.resident -= 100 * MIB
    bench.activations.close_pass()
    assert bench.region.size_bytes == 600 * MIB  # both together took 300
    bench.activations.close_pass()  # it has been looked at already


class PeakMeter(FakeMeter):
    """One that has seen every moment, and is asked only where a pass begins and ends."""

    notes_peaks = True

    def now_bytes(self) -> int:
        self.trims.append(None)
        return super().now_bytes()


def test_a_meter_that_notes_peaks_is_asked_where_passes_begin_and_end(trims: list[None]) -> None:
    budget = Budget(Tier.DEVICE, 1000 * MIB)
    region = FakeRegion(budget, 100 * MIB, 100 * MIB, 100 * MIB)
    meter = PeakMeter(region, trims)
    ledger = Activations(budget, region, meter)
    for spike in (0, 500 * MIB, 900 * MIB, 900 * MIB + TOLERANCE_BYTES):
        ledger.open_pass()
        meter.spike(spike)
        asked = len(trims)
        kept = [SavedActivation(tensor(WORTH_SAMPLING_BYTES), ledger) for _ in range(3)]
        ledger.balance()
        assert len(trims) == asked
        del kept
        ledger.close_pass()
    ledger.open_pass()
    meter.spike(901 * MIB + TOLERANCE_BYTES)
    with pytest.raises(BudgetError, match="a micro-batch took 965.00 MiB of activations and temporaries as measured"):
        ledger.close_pass()


def test_memory_that_the_user_frees_on_a_gpu_gives_activations_no_more_room(trims: list[None]) -> None:
    budget = Budget(Tier.DEVICE, 1000 * MIB)
    region = FakeRegion(budget, 100 * MIB, 100 * MIB, 100 * MIB)
    ledger = Activations(budget, region, meter := PeakMeter(region, trims))
    meter.resident -= 400 * MIB
    meter.forget_peak()
    ledger.open_pass()
    meter.spike(901 * MIB + TOLERANCE_BYTES)
    with pytest.raises(BudgetError, match="a micro-batch took 965.00 MiB of activations and temporaries as measured"):
        ledger.close_pass()


@pytest.mark.parametrize("early", [False, True])
def test_gradients_on_their_way_leave_more_where_they_were_in_the_way(
    early: bool, trims: list[None], caplog: pytest.LogCaptureFixture
) -> None:
    """Of 900 MiB: 600 as they leave, and temporaries of 500; not where a loss has taken 1000 before the first."""
    budget = Budget(Tier.DEVICE, 1000 * MIB)
    region = FakeRegion(budget, 100 * MIB, 100 * MIB, 100 * MIB)
    ledger = Activations(budget, region, meter := PeakMeter(region, trims))
    make_room, region.leavable = region.make_room, 600 * MIB

    def fly() -> None:
        region.gradients.resize(600 * MIB)
        meter.resident += 600 * MIB

    def land(by_bytes: int) -> int:
        given = make_room(by_bytes)
        meter.resident -= given
        return given

    region.make_room = land  # type: ignore[method-assign]
    ledger.open_pass()
    meter.spike((1000 if early else 300) * MIB)
    ledger.await_gradient()
    fly()
    meter.spike(500 * MIB)
    ledger.await_gradient()
    if not early:
        ledger.close_pass()
        assert region.leavable == 600 * MIB - (1100 - 900) * MIB
        assert "took 1.07 GiB of activations, temporaries and gradients on their way" in caplog.text
        assert region.leaving_bytes == 0
        ledger.open_pass()  # what is still on its way when a pass ends is no data of the user
        fly()
        meter.spike(300 * MIB)
        ledger.close_pass()
        assert region.leavable == 400 * MIB
        return
    with pytest.raises(BudgetError, match=r"took 1000.00 MiB .* but 900.00 MiB are left beside 100.00 MiB"):
        ledger.close_pass()
    assert region.leavable == 600 * MIB


def test_gradients_on_their_way_make_room_for_what_is_owed() -> None:
    budget = Budget(Tier.DEVICE, 10 * MIB)
    region = FakeRegion(budget, 4 * MIB, 3 * MIB, 4 * MIB)
    plain = Activations(budget, region, None)
    region.gradients.resize(3 * MIB)
    kept = SavedActivation(tensor(6 * MIB), plain)
    plain.balance()
    assert region.size_bytes == 3 * MIB and region.leaving_bytes == MIB
    assert plain.room_bytes == 6 * MIB
    del kept


def test_without_a_meter_only_the_ledger_counts() -> None:
    budget = Budget(Tier.DEVICE, 10 * MIB)
    region = FakeRegion(budget, 4 * MIB, 4 * MIB, 4 * MIB)
    plain = Activations(budget, region, None)
    plain.open_pass()
    kept = SavedActivation(tensor(6 * MIB), plain)
    plain.balance()
    plain.close_pass()
    assert budget.free_bytes == 0
    del kept
    plain.refund()
    assert budget.free_bytes == 6 * MIB


def test_the_resident_set_counts_what_is_touched() -> None:
    meter = open_rss()
    if meter is None:
        pytest.skip("/proc/self/statm is missing")
    gc.collect()
    trim_heap()  # what tests before this one have left is not to be given back between the two looks
    before = meter.now_bytes()
    touched = torch.ones(64 * MIB, dtype=torch.uint8)
    assert 60 * MIB <= meter.now_bytes() - before <= 80 * MIB
    assert meter.high_water_bytes() >= meter.now_bytes() - MIB
    del touched
    trim_heap()
    assert meter.now_bytes() - before <= 20 * MIB
    meter.close()
    meter.close()
    assert isinstance(meter, Rss)


def test_a_file_whose_pages_are_taken_away_is_no_peak(tmp_path: Path) -> None:
    """As the kernel does with those of libraries, where memory is short."""
    meter = open_rss()
    if meter is None or not meter.high_water_bytes():
        pytest.skip("the kernel does not tell the resident set")
    path = tmp_path / "file"
    path.write_bytes(b"1" * 64 * MIB)
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped:
        assert sum(mapped[::4096]) == 64 * MIB // 4096 * ord("1")
        meter.now_bytes()
        before = meter.high_water_bytes()
    assert meter.high_water_bytes() <= before + MIB
    meter.close()
