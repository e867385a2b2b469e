"""Activations that leave the device: the same bits and the same errors, less of the device, and no room lost."""

from __future__ import annotations

import contextlib
import ctypes
import errno
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import Outcome, assert_equal, collect, everything_on_device
from harness import run as train
from hypothesis import given
from hypothesis import strategies as st
from test_activations import FakeRegion
from test_interrupted_calls import _default_handler as _default_handler  # a fixture
from test_interrupted_calls import interrupt
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload.activations import leaving, ledger
from offload.activations.away import Away, room_for
from offload.activations.in_order import InOrder
from offload.activations.leaving import LeavingActivations, SavedElsewhere
from offload.activations.ledger import SavedActivation
from offload.activations.near import Near
from offload.errors import BudgetError, ConfigError, OffloadError, StateError
from offload.memory.arena import HostArena
from offload.memory.budget import Budget, Tier
from offload.memory.cpu import CpuMover
from offload.memory.gaps import Gaps
from offload.memory.transfer import Ticket
from offload.snapshot import take_spans
from offload.stats import Counters
from swap import Fault, FaultAction, FaultTarget, SwapDeadlineError, SwapError, SwapFullError, SwapStore

pytestmark = pytest.mark.usefixtures("single_torch_thread", "small_ones_leave")

PAGE = 4096
SIDE = 32  # a tensor of SIDE x SIDE fp32 is a page
WIDTH, ROWS = 32, 512  # of the nets: an activation is 64 KiB
MIB = 1 << 20


@pytest.fixture
def small_ones_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """A page is worth a copy."""
    monkeypatch.setattr(leaving, "LEAST_BYTES", PAGE)


# --- room -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.one_of(st.integers(1, 9), st.integers(-20, -1)), max_size=60))
def test_gaps_are_what_is_not_handed_out(events: list[int]) -> None:
    """A positive number is taken, a negative one names a range that comes back."""
    size = 20
    gaps, taken = Gaps(size), list[tuple[int, int]]()
    for event in events:
        free = set(range(size)) - {at for begin, length in taken for at in range(begin, begin + length)}
        if event > 0:
            begin = gaps.take(event)
            first = next((at for at in range(size) if free >= set(range(at, at + event)) and at + event <= size), None)
            assert begin == first
            if begin is not None:
                taken.append((begin, event))
        elif taken:
            gaps.give_back(*taken.pop(-event % len(taken)))
        assert gaps.free_bytes == size - sum(length for _, length in taken)


@given(st.lists(st.tuples(st.sampled_from(["add", "discard", "before"]), st.integers(0, 12)), max_size=40))
def test_what_is_in_order_comes_by_key(events: list[tuple[str, int]]) -> None:
    """The model is a dictionary that is sorted each time."""
    things, model = InOrder[str](), dict[int, str]()
    for number, (event, key) in enumerate(events):
        if event == "add":
            things.add(key, f"{key}, {number}")
            model.setdefault(key, f"{key}, {number}")
        elif event == "discard":
            things.discard(key)
            model.pop(key, None)
        else:
            found = []
            for thing in things.before(key):
                found.append(thing)
                if len(found) % 2:
                    things.discard(int(thing.split(",")[0]))
            assert found == [model[k] for k in sorted(model, reverse=True) if k < key]
            for thing in found[::2]:
                del model[int(thing.split(",")[0])]
        assert len(things) == len(model) and all((k in things) == (k in model) for k in range(13))


# --- the ledger alone -------------------------------------------------------------------------------------------------


class Bench:
    """A ledger whose device has room for `near` pages, over `host` pages and a drive of `drive` pages."""

    def __init__(self, store: SwapStore | None, *, near: int, host: int, drive: int, device: int) -> None:
        self.budget = Budget(Tier.DEVICE, device * PAGE)
        self.counters = Counters()
        self.mover = CpuMover(self.counters)
        self.arena = HostArena(Tier.HOST, host * PAGE)
        self.store = store
        self.away = Away(self.arena.take(host * PAGE), store, drive * PAGE)
        self._drive_bytes = self.away._drive_free_bytes
        self.ledger = LeavingActivations(
            self.budget,
            FakeRegion(self.budget, 0, 0, 0),
            None,
            self.away,
            self.mover,
            torch.device("cpu"),
            self.counters,
            near_bytes=near * PAGE,
            deadline_s=60.0,
        )

    def hooks(self) -> torch.autograd.graph.saved_tensors_hooks:
        def unpack(saved: SavedActivation | SavedElsewhere) -> torch.Tensor:
            return saved.get() if isinstance(saved, SavedActivation) else self.ledger.bring(saved)

        return torch.autograd.graph.saved_tensors_hooks(self.ledger.keep, unpack)

    def moved(self, lane: str) -> int:
        """Pages that a lane has moved."""
        return self.counters.links()[lane].bytes // PAGE

    def drive_pages(self) -> int:
        return 0 if self.store is None else self.store.stats().written_bytes // PAGE

    def assert_empty(self) -> None:
        collect()
        assert self.ledger.is_empty() and not self.ledger.has_left()
        assert self.ledger._near.used_bytes == self.ledger._near.needed_bytes == 0
        self.ledger.refund()
        assert self.budget.used_bytes == 0
        assert self.store is None or not len(self.store)
        assert self.away._drive_free_bytes == self._drive_bytes


Make = Callable[..., Bench]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[Make]:
    with contextlib.ExitStack() as last:

        def make(*, near: int = 4, host: int = 64, drive: int = 0, device: int = 1000) -> Bench:
            store = last.enter_context(SwapStore(tmp_path, (drive + 16) * PAGE)) if drive else None
            made = Bench(store, near=near, host=host, drive=drive, device=device)
            last.callback(made.mover.close)
            last.callback(made.ledger.close)
            return made

        yield make


def page(seed: int = 0) -> torch.Tensor:
    return torch.randn(SIDE, SIDE, generator=torch.Generator().manual_seed(seed))


def chain(x: torch.Tensor, length: int = 20) -> torch.Tensor:
    """Twice `length` operators, each of which keeps its result."""
    return stages(x, length).sum()


def stages(x: torch.Tensor, length: int) -> torch.Tensor:
    """The same without a sum."""
    for _ in range(length):
        x = x.exp().tanh()
    return x


def gradient(of: Callable[[torch.Tensor], torch.Tensor], hooks: Any = None, **options: Any) -> torch.Tensor:
    x = page().requires_grad_()
    with hooks or contextlib.nullcontext():
        loss = of(x)
    loss.backward(**options)
    assert x.grad is not None
    return x.grad


@pytest.mark.parametrize(("host", "drive"), [(64, 0), (8, 64), (16, 0)])
def test_what_leaves_comes_back(bench: Make, host: int, drive: int) -> None:
    """Forty pages are kept; where there is room for 16 alone, the others stay."""
    made = bench(host=host, drive=drive)
    assert torch.equal(gradient(chain, made.hooks()), gradient(chain))
    assert made.moved("d2h") >= 14 and made.moved("h2d") >= 14
    assert (made.drive_pages() > 20) == bool(drive)
    if host + drive > 40:
        assert made.budget.peak_bytes <= (4 + 2) * PAGE  # and the one that is saved, and the one that is used
    made.assert_empty()


@pytest.mark.parametrize(("numel", "left"), [(PAGE // 4, 20 - 3), (PAGE // 4 - 1, 0)])
def test_only_what_is_worth_a_copy_leaves(numel: int, left: int, bench: Make) -> None:
    """Of 20 pages those leave behind which more than two were saved: two of four are for the last ones."""
    made = bench(near=4)
    saved = [made.ledger.keep(torch.zeros(numel)) for _ in range(20)]
    assert made.moved("d2h") == left
    del saved
    made.assert_empty()


def test_every_byte_moves_once(bench: Make) -> None:
    """Of a storage that is saved several times, in any shape; and nothing else that is near is touched."""
    made = bench(near=2)

    def several(x: torch.Tensor) -> torch.Tensor:
        y = x.tanh()  # kept by all of these
        return chain((y * y.t()).sum(0, keepdim=True) + y[:, ::2].sin().sum() + y.view(-1)[5:].tanh().sum() + y.sin())

    assert torch.equal(gradient(several, made.hooks()), gradient(several))
    assert made.moved("h2d") == made.moved("d2h")
    keys = made.ledger._last_key
    assert made.moved("d2h") < keys  # one each, less those that stayed
    made.assert_empty()


def test_the_next_ones_come_ahead(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made = bench(near=8)
    asked: list[str] = []
    bring, restore, save = made.ledger.bring, made.mover.restore, made.mover.save

    def saved(*place: int) -> Ticket:
        ticket = save(*place)
        ticket.wait(60.0)  # what is asked for on its way out stays, too: here, nothing is
        return ticket

    monkeypatch.setattr(made.mover, "save", saved)
    monkeypatch.setattr(made.ledger, "bring", lambda saved: (asked.append("use"), bring(saved))[1])
    monkeypatch.setattr(made.mover, "restore", lambda *a: (asked.append("copy"), restore(*a))[1])
    gradient(lambda x: chain(x, 30), made.hooks())
    copies = [number for number, what in enumerate(asked) if what == "copy"]
    uses = [number for number, what in enumerate(asked) if what == "use"]
    for number, at in enumerate(copies[:-1]):
        # four of the 60 stay and are used first; a copy begins while at least two later uses lie before its own
        assert uses[number + 4] > at or number < 4, (number, asked)
    made.assert_empty()


class Late:
    """A copy that is over once somebody waits for it."""

    def __init__(self, late: list[Late]) -> None:
        self.is_over = False
        late.append(self)

    def done(self) -> bool:
        return self.is_over

    def wait(self, timeout_s: float | None = None) -> None:
        self.is_over = True


class LateUse(Late):
    """One that compute waits for, and the host does not."""

    is_used = False

    def use(self, timeout_s: float) -> None:
        """By compute alone."""
        self.is_used = True


def come_late(made: Bench, monkeypatch: pytest.MonkeyPatch) -> list[Late]:
    """Let the host never wait for what comes back; returns the copies to come."""
    late, restore = list[Late](), made.mover.restore
    monkeypatch.setattr(made.mover, "restore", lambda *place: (restore(*place), LateUse(late))[1])
    return late


def test_what_is_still_leaving_stays_and_nothing_comes_before_it(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies that lag behind: those of what backward wants first would queue behind all that it wants later."""
    made, going, back = bench(near=16), list[Late](), list[int]()
    save, restore = made.mover.save, made.mover.restore
    monkeypatch.setattr(made.mover, "save", lambda *place: (save(*place), Late(going))[1])
    monkeypatch.setattr(made.mover, "restore", lambda source, *place: (back.append(source), restore(source, *place))[1])
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(x)
    under_way = sum(not copy.is_over for copy in going)
    assert made.moved("d2h") == 40 - 9  # half of the near ones are for the last, which stay, and one is being saved
    assert under_way == 16 - 9
    asked, bring = list[int](), made.ledger.bring

    def brought(saved: SavedElsewhere) -> torch.Tensor:
        asked.append(0)
        if len(asked) == 4:  # now they have left
            for copy in going:
                copy.wait()
        return bring(saved)

    monkeypatch.setattr(made.ledger, "bring", brought)
    loss.backward()
    truth = page().requires_grad_()
    chain(truth).backward()
    assert torch.equal(x.grad, truth.grad)
    assert len(back) == 40 - 9 - under_way
    assert back == sorted(back, reverse=True)  # rooms were given one behind the other
    del loss
    made.assert_empty()


def test_a_host_that_is_ahead_of_copies_takes_no_more_of_the_device(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What compute waits for need not be waited for by the host, which gives its memory to the next ones."""
    made = bench(near=4)
    late = come_late(made, monkeypatch)
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(x)
    most = []
    bring = made.ledger.bring
    monkeypatch.setattr(
        made.ledger,
        "bring",
        lambda saved: (
            bring(saved),
            most.append((made.ledger._near.used_bytes, sum(not copy.is_over for copy in late))),
        )[0],
    )
    loss.backward()
    near, under_way = (max(values) for values in zip(*most, strict=True))
    assert near <= (4 + 1) * PAGE
    assert 4 <= under_way <= 4 + 4 + 2  # of twice as many: what is near, and what compute is behind
    del loss
    made.assert_empty()


def test_what_has_just_come_may_be_wanted_again(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """By another pass of the graph, while the copy for the first one is under way."""
    made = bench(near=4)
    late = come_late(made, monkeypatch)
    x, y = page().requires_grad_(), page().requires_grad_()
    with made.hooks():
        loss = chain(x, 3)
    truth = chain(y, 3)
    for _ in range(3):
        loss.backward(retain_graph=True)
        truth.backward(retain_graph=True)
        assert torch.equal(x.grad, y.grad)
    assert any(not copy.is_over for copy in late)
    del loss
    made.assert_empty()


def test_memory_of_what_compute_does_not_wait_for_stays_until_its_copy_is_over(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph is dropped while storages of it come back ahead."""
    made, middle = bench(near=8), list[torch.Tensor]()
    late = come_late(made, monkeypatch)

    def through(x: torch.Tensor) -> torch.Tensor:
        middle.append(x.exp().tanh().exp().tanh().exp().tanh())
        return chain(middle[0])

    with made.hooks():
        loss = through(page().requires_grad_())
    torch.autograd.grad(loss, middle.pop())
    del loss
    collect()
    made.ledger.balance()
    unasked = sum(not copy.is_used for copy in late)
    assert unasked and made.budget.used_bytes == unasked * PAGE
    for copy in late:
        copy.wait()
    made.ledger.balance()
    assert made.budget.used_bytes == 0
    made.assert_empty()


def test_what_was_asked_for_before_it_left_is_not_asked_for_again_by_that(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A graph that was used while it was there comes ahead for nobody, and is dropped."""
    made = bench(near=8)
    late = come_late(made, monkeypatch)
    with made.hooks():
        first = chain(page(1).requires_grad_(), 2)
    first.backward(retain_graph=True)
    assert not late
    with made.hooks():
        second = chain(page(2).requires_grad_(), 10)
    second.backward()
    del first, second
    collect()
    made.ledger.balance()
    unasked = sum(not copy.is_used for copy in late)
    assert unasked == 4 and made.budget.used_bytes == unasked * PAGE
    made.assert_empty()


def test_what_has_come_from_the_drive_stays_while_room_is_made_on_the_device(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever leaves for that takes host memory, too."""
    made = bench(host=8, drive=64)
    balance = made.ledger.balance

    def made_room() -> None:
        while made.away.make_room():
            pass
        balance()

    with made.hooks():
        loss = chain(x := page().requires_grad_())
    monkeypatch.setattr(made.ledger, "balance", made_room)
    monkeypatch.setattr(made.ledger, "_bring_ahead", lambda key: None)
    loss.backward()
    assert torch.equal(x.grad, gradient(chain))
    del loss
    made.assert_empty()


def test_a_graph_may_be_used_again(bench: Make) -> None:
    made = bench(host=16, drive=64)
    x, y = page().requires_grad_(), page().requires_grad_()
    with made.hooks():
        loss = chain(x)
    truth = chain(y)
    for _ in range(3):
        loss.backward(retain_graph=True)
        truth.backward(retain_graph=True)
        assert torch.equal(x.grad, y.grad)
        made.ledger.balance()
        assert made.ledger._near.used_bytes <= 5 * PAGE
    del loss
    made.assert_empty()


def test_gradients_of_gradients(bench: Make) -> None:
    made = bench()
    grads = []
    for hooks in (made.hooks(), contextlib.nullcontext()):
        x = page().requires_grad_()
        with hooks:
            (first,) = torch.autograd.grad(chain(x, 6), x, create_graph=True)
            first.pow(2).sum().backward()
        grads.append(x.grad)
        del first
    assert torch.equal(*grads)
    made.assert_empty()


def test_what_never_comes_back_leaves_its_room(bench: Make) -> None:
    made = bench(host=8, drive=64)
    for _ in range(5):
        with made.hooks():
            loss = chain(page().requires_grad_())
        del loss
    made.assert_empty()


def test_room_of_a_failed_forward_comes_back(bench: Make) -> None:
    made = bench(host=8, drive=64)
    for _ in range(3):
        with made.hooks(), pytest.raises(RuntimeError, match="cannot be multiplied"):
            torch.ones(2, 3) @ chain(page().requires_grad_()).expand(2, 2)
    made.assert_empty()


def test_in_place_changes_are_refused(bench: Make) -> None:
    """What somebody can still change has not left: torch's check would see it, and so does this."""
    made = bench(near=2)
    x = page().requires_grad_()
    with made.hooks():
        y = x.exp()
        loss = y.sin().sum() + chain(x)
        y.mul_(2)
        with pytest.raises(StateError, match="was changed in place"):
            loss.backward()
    del loss, y
    made.assert_empty()


class Sine(torch.autograd.Function):
    """The sine."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x.sin()


class Cosine(Sine):
    """The sine, whose backward takes the memory of what it has saved."""

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        found: torch.Tensor = ctx.saved_tensors[0].cos_()
        return found * gradient


@pytest.mark.parametrize("last", [False, True])  # whether what is changed has left the device
def test_a_node_that_changes_what_it_has_saved_spoils_it_for_others(bench: Make, last: bool) -> None:
    made = bench(near=2)
    x = page().requires_grad_()
    with made.hooks():
        y = x * 2
        both = Cosine.apply(y).sum() + Cosine.apply(y.view(-1)).sum()
        loss = chain(both * x) if not last else both
        with pytest.raises(StateError, match="was changed in place"):
            loss.sum().backward()
        y = x * 2
        alone = Cosine.apply(y).sum()
        alone = chain(alone * x) if not last else alone
        alone.sum().backward(retain_graph=True)
    del both, loss, y, alone
    made.assert_empty()


def test_what_a_node_has_changed_does_not_leave(bench: Make) -> None:
    """It would come back changed, as if it had been saved so."""
    made = bench(near=2)
    x = page().requires_grad_()
    with made.hooks():
        loss = Cosine.apply(x * 2).sum()
        loss.backward(retain_graph=True)
        other = chain(page(9).requires_grad_())
        with pytest.raises(StateError, match="was changed in place"):
            loss.backward()
    del loss, other
    made.assert_empty()


def test_a_storage_that_changes_between_saves_has_both_contents_checked(bench: Make) -> None:
    made = bench(near=2)
    x = page().requires_grad_()
    with made.hooks():
        y = x * 1
        first = y.detach().exp().requires_grad_()
        loss = (first * first).sum()
        with torch.no_grad():
            first.mul_(0.5)
        again = (first * first).sum()
        again.backward()
        assert torch.equal(first.grad, 2 * first)
        with pytest.raises(StateError, match="was changed in place"):
            loss.backward()


def test_an_alias_with_a_count_of_its_own_is_another_one(bench: Make) -> None:
    """Torch counts changes of ``.data`` apart: what is saved of it is right, what was saved before is not."""
    made = bench(near=2)
    w = page(1).requires_grad_()
    with made.hooks():
        x = page(2)
        before = (w * x).sum()
        alias = x.data
        x.add_(1)
        (w * alias).sum().backward()
        assert torch.equal(w.grad, x)
        with pytest.raises(StateError, match="was changed in place"):
            before.backward()


def test_what_somebody_holds_stays(bench: Make) -> None:
    made = bench(near=2)
    held = page(1)

    def of(x: torch.Tensor) -> torch.Tensor:
        loss = (x * held).sum()
        for seed in range(2, 8):
            loss = loss + (x * page(seed)).sum()
        return loss

    x = page().requires_grad_()
    with made.hooks():
        loss = of(x)
    made.ledger.balance()
    assert made.moved("d2h") >= 3
    leavers = [record.leaver() for record in made.ledger._records.values()]
    near = [leaver.held.tensor.data_ptr() for leaver in leavers if leaver is not None and leaver.held is not None]
    assert held.data_ptr() in near
    del leavers
    loss.backward()
    assert torch.equal(x.grad, gradient(of))


@pytest.mark.parametrize("rows", [1, 4])
def test_what_somebody_holds_is_not_in_the_way_of_copies(
    rows: int, bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part, or all, of a table as large as what the device has for activations: others still come ahead."""
    monkeypatch.setattr(ledger, "WORTH_ASKING_BYTES", PAGE)
    made = bench(near=4)
    table = torch.randn(4, SIDE, SIDE)

    def of(x: torch.Tensor) -> torch.Tensor:
        return chain((x * table[:rows]).sum(0))

    asked, bring_now = list[object](), made.ledger._bring_now
    monkeypatch.setattr(made.ledger, "_bring_now", lambda leaver: (asked.append(leaver.record), bring_now(leaver))[1])
    assert torch.equal(gradient(of, made.hooks()), gradient(of))
    assert made.moved("h2d") > 30 > 10 * len(asked)
    asked.clear()
    made.assert_empty()


EVENTS = st.sampled_from(["keep", "keep", "drop", "free", "bring", "balance"])


@given(st.lists(st.tuples(EVENTS, st.integers(0, 99)), max_size=40))
def test_what_is_near_is_what_is_booked_whoever_has_it(events: list[tuple[str, int]]) -> None:
    """Storages of four pages, of which one or all are kept, and which somebody has or has no more."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ledger, "WORTH_ASKING_BYTES", PAGE)
        made = Bench(None, near=8, host=64, drive=0, device=1000)
        owned, kept = list[torch.Tensor](), list[tuple[SavedActivation | SavedElsewhere, torch.Tensor]]()
        for number, (event, which) in enumerate(events):
            if event == "keep":
                owned.append(torch.full((4, SIDE, SIDE), float(number)))
                part = owned[-1 - which % len(owned)][: 1 + 3 * (which % 2)]
                kept.append((made.ledger.keep(part), part.clone()))
                del part
            elif event == "drop" and owned:
                del owned[which % len(owned)]
            elif event == "free" and kept:
                del kept[which % len(kept)]
            elif event == "bring" and kept:
                saved, truth = kept[which % len(kept)]
                assert isinstance(saved, SavedElsewhere) and torch.equal(made.ledger.bring(saved), truth)
                del saved, truth
            elif event == "balance":
                made.ledger.balance()
            made.ledger._collect()
            made.ledger.refund()
            near, records = made.ledger._near, made.ledger._records.values()
            assert near.used_bytes == sum(record.size_bytes for record in records if record.near)
            assert near.needed_bytes == sum(record.size_bytes for record in records if record.needed)
            assert made.budget.used_bytes == sum(made.ledger._sizes.values())
        owned.clear()
        made.ledger.balance()
        assert not made.ledger._parts and not made.ledger._others
        kept.clear()
        made.assert_empty()
        made.ledger.close()
        made.mover.close()


def test_nested_tensors_stay(bench: Make) -> None:
    """They have neither shape nor strides."""
    made = bench(near=1)

    def of(x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor([x[:3], x[3:]])
        for seed in range(4):
            rows = torch.nn.functional.linear(rows, page(seed))
        return torch.nested.to_padded_tensor(rows, 0.0).square().sum()

    assert torch.equal(gradient(of, made.hooks()), gradient(of))


class Tagged(torch.Tensor):
    """A subclass with memory of its own."""


def test_subclasses_are_left_alone(bench: Make) -> None:
    made = bench(near=1)
    classes: list[type] = []

    class Times(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(other)
            return x * other.as_subclass(torch.Tensor)

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
            (other,) = ctx.saved_tensors
            classes.append(type(other))
            return grad * other.as_subclass(torch.Tensor), None

    def of(x: torch.Tensor) -> torch.Tensor:
        for seed in range(4):
            x = Times.apply(x, page(seed).as_subclass(Tagged))
        return x.sum()

    assert torch.equal(gradient(of, made.hooks()), gradient(of))
    assert classes == [Tagged] * 8 and made.moved("d2h") == 0


def test_what_has_no_room_is_refused_with_the_remedy(bench: Make) -> None:
    made = bench(near=2, host=4, device=12)
    with made.hooks():
        loss = chain(page().requires_grad_())
        with pytest.raises(BudgetError, match=r"device budget: activations needs .* activation_cpu_memory"):
            made.ledger.balance()
    del loss
    made.assert_empty()


def test_what_is_too_large_to_pass_is_told_with_the_room_that_it_needs(bench: Make) -> None:
    """A quarter of host memory passes storages on to the drive: a page does not pass a quarter of three pages."""
    made = bench(near=2, host=3, drive=64, device=12)
    with made.hooks():
        loss = chain(page().requires_grad_())
        wanted = 4 * PAGE >> 10
        with pytest.raises(BudgetError, match=rf'stays unless activation_cpu_memory="{wanted}KiB" or more'):
            made.ledger.balance()
    del loss
    made.assert_empty()
    passing = bench(near=2, host=4, drive=64, device=12)
    with passing.hooks():
        loss = chain(page().requires_grad_())
        passing.ledger.balance()
    del loss
    passing.assert_empty()


def test_room_is_made_where_the_budget_is_short(bench: Make) -> None:
    """What would have stayed for a while leaves at once."""
    made = bench(near=40, host=64, device=24)
    with made.hooks():
        x = page().requires_grad_()
        loss = chain(x)
        made.ledger.balance()
    assert made.budget.used_bytes <= 24 * PAGE
    loss.backward()
    assert torch.equal(x.grad, gradient(chain))


def test_a_drive_that_is_full_or_broken_is_told(bench: Make) -> None:
    """A write that fails is told in the forward, a read in backward; what was not lost can be used again."""
    made = bench(host=8, drive=64)
    assert made.store is not None
    made.store.inject(Fault(nth=3, errno=errno.ENOSPC, target=FaultTarget.WRITES, forever=True))
    with made.hooks(), pytest.raises(SwapFullError, match="ENOSPC"):
        chain(page().requires_grad_())
    made.store.clear_faults()
    made.assert_empty()
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(x)
    made.store.inject(Fault(target=FaultTarget.READS, forever=True))
    with pytest.raises(SwapError, match="EIO"):
        loss.backward(retain_graph=True)
    made.store.clear_faults()
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, gradient(chain))
    del loss
    made.assert_empty()


def counted_calls(store: SwapStore, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int, bool]]:
    """Return a list of calls to come: their names, how many objects they have, and whether they are urgent."""
    calls: list[tuple[str, int, bool]] = []
    for name in ("put_many", "get_many"):

        def counted(items: Sequence[Any], name: str = name, urgent: bool = False) -> Any:
            calls.append((name, len(items), urgent))
            return getattr(SwapStore, name)(store, items, urgent=urgent)

        monkeypatch.setattr(store, name, counted)
    return calls


def test_the_drive_is_called_for_several_at_a_time(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """A call takes longer than to hand one more storage over."""
    made = bench(host=64, drive=128)
    assert made.store is not None
    calls = counted_calls(made.store, monkeypatch)
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(x, 120)
    loss.backward()
    assert torch.equal(x.grad, gradient(lambda x: chain(x, 120)))
    for name in ("put_many", "get_many"):
        sizes = [size for call, size, _ in calls if call == name]
        assert sum(sizes) >= 60 and len(sizes) <= 0.6 * sum(sizes), (name, sizes)
    del loss
    made.assert_empty()


def test_what_backward_saves_finds_room_beside_what_is_read_ahead(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Segments that are computed again move little to the drive that would else rest, and little is read twice."""

    def trained(made: Bench, segments: int) -> None:
        x = page().requires_grad_()
        with made.hooks():
            loss = stages(x, 100)
            for _ in range(segments):
                loss = checkpoint(lambda y: stages(y, 20), loss, use_reentrant=True)
            loss.sum().backward()

    alone, made = bench(near=16, host=128, drive=512), bench(near=16, host=128, drive=512)
    trained(alone, 0)
    assert made.store is not None
    calls = counted_calls(made.store, monkeypatch)
    trained(made, 6)
    assert alone.drive_pages() >= 50
    assert sum(size for name, size, _ in calls if name == "put_many") <= alone.drive_pages() + 80
    reads = [(size, urgent) for name, size, urgent in calls if name == "get_many"]
    assert sum(size for size, _ in reads) <= alone.drive_pages() + 80 and not any(urgent for _, urgent in reads)
    made.assert_empty()


def test_what_every_stage_asks_for_again_lets_nothing_be_read_twice(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Backward asks for what was saved first in each stage, as for the angles of rotary embeddings."""
    made = bench(near=8, host=128, drive=512)
    assert made.store is not None
    x = page().requires_grad_()
    with made.hooks():
        first, loss = stages(x, 4), x
        for _ in range(200):
            loss = (loss * first).tanh()
        del first
        loss = chain(loss, 30)
    made.away.settle()
    calls = counted_calls(made.store, monkeypatch)
    written = made.drive_pages()
    loss.backward()
    assert written >= 50 and sum(size for _, size, _ in calls) <= written
    assert not any(urgent for _, _, urgent in calls)
    del loss
    made.assert_empty()


def test_what_a_part_of_a_graph_has_read_ahead_gives_way_to_another_graph(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is needed later, if at all: the other one's backward still finds what it needs."""
    made = bench(host=128, drive=512)
    assert made.store is not None
    x, y = page().requires_grad_(), page(1).requires_grad_()
    with made.hooks():
        middle = stages(x, 128)
        first, second = stages(middle, 3).sum(), chain(y, 56)
        third = chain(page(2).requires_grad_())
    made.away.settle()
    torch.autograd.grad(first, middle, retain_graph=True)
    made.away.settle()
    calls = counted_calls(made.store, monkeypatch)
    second.backward(retain_graph=True)
    reads = [(size, urgent) for name, size, urgent in calls if name == "get_many"]
    assert sum(size for size, _ in reads) >= 20 and not any(urgent for _, urgent in reads)
    del middle, first, second, third
    made.assert_empty()


def test_a_forward_that_waits_for_the_drive_says_so(bench: Make) -> None:
    """What it takes to compute is known only without that."""
    made = bench(host=8, drive=64)
    assert made.store is not None
    made.store.inject(Fault(action=FaultAction.DELAY, delay_s=0.05, target=FaultTarget.WRITES, forever=True))
    with made.hooks():
        loss = chain(page().requires_grad_())
    assert made.counters.waits_seconds == made.counters.activation_stall_seconds >= 0.05
    assert {span.name for span in made.counters.spans.recorded().spans if span.lane == "wait"} == {"activations"}
    made.store.clear_faults()
    del loss
    made.assert_empty()


@pytest.mark.parametrize("waits", ["for it", "for room"])
def test_memory_that_a_late_read_may_write_to_is_given_to_nobody(tmp_path: Path, waits: str) -> None:
    """A read is not over when its deadline has passed: what took its memory would have its bytes."""
    arena = HostArena(Tier.HOST, 8 * PAGE)
    with SwapStore(tmp_path, 64 * PAGE, deadline_s=0.05) as store:
        away = Away(arena.take(8 * PAGE), store, 32 * PAGE)
        rooms = [room_for(key, PAGE) for key in range(8)]
        for room in rooms:  # a quarter of the memory is for what passes through: the first two go on
            assert away.take(room)
            ctypes.memset(away.address(room), room.key + 1, PAGE)
            away.rest(room)
        away.settle()
        late = rooms[0]
        assert late.stored and late.offset is None
        store.inject(Fault(action=FaultAction.DELAY, delay_s=0.3, target=FaultTarget.READS))
        assert away.read(late)
        offset = late.offset
        with pytest.raises(SwapDeadlineError):
            away.wait(late) if waits == "for it" else away.make_room()
        other = room_for(8, PAGE)
        assert away.take(other) and other.offset != offset
        ctypes.memset(away.address(other), 9, PAGE)
        while not away.is_here(late):
            assert late.ticket is not None  # it is still under way
        assert ctypes.string_at(away.address(late), PAGE) == bytes([1]) * PAGE
        assert ctypes.string_at(away.address(other), PAGE) == bytes([9]) * PAGE
        for room in (*rooms, other):
            away.release(room)
        away.settle()
        assert not away.used_bytes and not len(store)


@pytest.mark.parametrize("is_wanted", [False, True])
def test_what_is_wanted_while_it_is_written_need_not_be_read(is_wanted: bool, tmp_path: Path) -> None:
    """Nobody lacks its place."""
    arena = HostArena(Tier.HOST, 8 * PAGE)
    with SwapStore(tmp_path, 64 * PAGE) as store:
        away = Away(arena.take(8 * PAGE), store, 32 * PAGE)
        rooms = [room_for(key, PAGE) for key in range(7)]
        for room in rooms:  # six may rest
            assert away.take(room)
            away.rest(room)
        assert rooms[0].ticket is not None and rooms[1].ticket is None
        if is_wanted:
            away.read_ahead(len(rooms), range(len(rooms)))
        away.settle()
        assert away.is_here(rooms[0]) == is_wanted
        more = [room_for(key, PAGE) for key in range(7, 27)]
        for room in more:
            assert away.take(room)
            away.rest(room)
        for room in (*rooms, *more):
            away.release(room)
        away.settle()
        assert not away.used_bytes and not len(store)


@pytest.mark.parametrize("near", [4, 40])
def test_a_closed_ledger_brings_nothing_back(near: int, bench: Make) -> None:
    """Neither what is asked for nor, while the last ones are there, anything ahead: its memory may be gone."""
    made = bench(near=near, host=64, drive=64)
    with made.hooks():
        loss = chain(page().requires_grad_(), 60)
    made.ledger.close()
    before = made.moved("h2d")
    with pytest.raises(StateError, match="the engine that ran this forward is closed"):
        loss.backward()
    assert made.moved("h2d") == before


def test_what_found_no_room_on_the_device_gives_its_place_in_host_memory_back(
    bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody copies it: whoever comes later may read something else there."""
    made = bench(host=8, drive=64)
    with made.hooks():
        loss = chain(x := page().requires_grad_())
    balance = made.ledger.balance

    def refuse() -> None:
        raise BudgetError("device budget: full")

    monkeypatch.setattr(made.ledger, "_bring_ahead", lambda key: None)
    monkeypatch.setattr(made.ledger, "balance", refuse)
    with pytest.raises(BudgetError, match="full"):
        loss.backward(retain_graph=True)
    assert not any(record.room.copied for record in made.ledger._records.values())
    monkeypatch.setattr(made.ledger, "balance", balance)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, gradient(chain))
    del loss
    made.assert_empty()


@pytest.mark.parametrize("error", [KeyboardInterrupt, OffloadError])
def test_a_wait_that_fails_leaves_the_copy_to_the_next_one(
    error: type[BaseException], bench: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its room, and its share of what is near, are given back when it is over."""

    class Torn(Late):
        def wait(self, timeout_s: float | None = None) -> None:
            if self is going[0] and not tries:
                tries.append(self)
                raise error
            super().wait()

    made, going, tries = bench(), list[Late](), list[Late]()
    save = made.mover.save
    monkeypatch.setattr(made.mover, "save", lambda *place: (save(*place), Torn(going))[1])
    with made.hooks(), pytest.raises(error):
        chain(page().requires_grad_())
    assert tries
    made.assert_empty()
    assert made.away.used_bytes == 0


def test_a_ledger_that_closes_waits_for_what_is_leaving(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    made, going = bench(near=16), list[Late]()
    save = made.mover.save
    monkeypatch.setattr(made.mover, "save", lambda *place: (save(*place), Late(going))[1])
    with made.hooks():
        loss = chain(page().requires_grad_())
    assert not all(copy.is_over for copy in going)
    made.ledger.close()
    assert all(copy.is_over for copy in going)
    del loss


# --- engines ----------------------------------------------------------------------------------------------------------


class Net(nn.Module):
    """Blocks of a unit each, with a residual and a dropout; checkpointed where that is asked for."""

    def __init__(self, checkpointing: bool | None = None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Dropout(0.1)) for _ in range(6)
        )
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            again = self.checkpointing is not None and number
            x = x + (checkpoint(block, x, use_reentrant=self.checkpointing) if again else block(x))
        return x


def net(checkpointing: bool | None = None) -> Net:
    torch.manual_seed(0)
    return Net(checkpointing)


def rows(number: int) -> torch.Tensor:
    return torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(number))


def loss_of(forward: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return forward(x).sub(1).pow(4).mean()


def options(path: Path, *, home: str = "none", **more: Any) -> dict[str, Any]:
    """Options: an eighth of 2 MiB stays near, which is four activations."""
    return {
        "device": "cpu",
        "max_memory": {"device": "16MiB", "cpu": "32MiB", "nvme": "32MiB"},
        "activation_memory": "2MiB",
        "offload_param": home,
        "offload_optimizer": "cpu",
        "nvme_path": path,
        "unit_bytes": 8 << 10,
        "activations": "offload",
        **more,
    }


def run(model: nn.Module, **given_options: Any) -> Outcome:
    data = [rows(number) for number in range(3)]
    return train(model, data, optimizer=offload.AdamW(lr=1e-2), loss_of=loss_of, max_grad_norm=0.5, **given_options)


@pytest.mark.parametrize("checkpointing", [None, False, True])
def test_the_same_bits_wherever_they_are(checkpointing: bool | None, tmp_path: Path) -> None:
    truth = run(net(checkpointing), **everything_on_device())
    kept = truth.stats.peak_bytes["device"] - truth.plan.arena_bytes[Tier.DEVICE]
    homes = (("none", "8MiB", 0), ("nvme", "512KiB", "8MiB"), ("cpu", "256KiB", 0))
    for home, host, drive in homes if checkpointing is None else homes[1:2]:
        room = {"activation_cpu_memory": host, "activation_nvme_memory": drive}
        ours = run(net(checkpointing), **options(tmp_path, home=home, **room))
        assert_equal(ours, truth)
        links = ours.stats.links
        if checkpointing is None:
            assert links["d2h"].bytes > MIB // 2
            assert not drive or links["nvme_write"].bytes > MIB
            if home == "none":
                assert ours.stats.peak_bytes["device"] - ours.plan.arena_bytes[Tier.DEVICE] < 0.4 * kept


def test_nothing_is_installed_where_activations_are_kept() -> None:
    with offload.Engine(net(), offload.AdamW(), **everything_on_device()) as engine:
        assert not isinstance(engine._parts.activations, LeavingActivations)
        assert engine.plan.near_bytes == 0
        assert engine._parts.hooks.saved._leaving is None


def test_evaluation_and_dropped_graphs_take_no_room(tmp_path: Path) -> None:
    with offload.Engine(net(), offload.AdamW(), **options(tmp_path)) as engine:
        with torch.no_grad():
            engine(rows(0))
        assert engine.stats().links["d2h"].bytes == 0
        for number in range(3):
            loss_of(engine, rows(number))  # nobody runs its backward
        collect()
        assert engine._parts.activations.is_empty()
        assert engine.stats().used_bytes["device"] == engine.plan.arena_bytes[Tier.DEVICE]


@pytest.mark.parametrize(("owner", "name"), [(Gaps, "take"), (CpuMover, "save"), (Near, "save")])
def test_an_interrupt_waits_until_what_is_kept_is_noted(
    owner: type, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a forward that was called on the module itself, of which no block of the engine's is around."""
    made, keep = list[object](), LeavingActivations.keep

    def noted(ledger: LeavingActivations, tensor: torch.Tensor) -> SavedActivation | SavedElsewhere:
        made.append(None)
        saved = keep(ledger, tensor)
        made.pop()
        return saved

    with offload.Engine(net(), offload.AdamW(), **options(tmp_path)) as engine:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(LeavingActivations, "keep", noted)
            interrupt(patch, owner, name, nth=2, behind=True)
            engine.module(rows(0))
        assert not made
        collect()
        activations = engine._parts.activations
        assert isinstance(activations, LeavingActivations)
        assert activations.is_empty() and not activations.has_left()


def test_in_place_changes_are_refused_in_a_module(tmp_path: Path) -> None:
    class Changes(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.blocks[0](x).exp()
            z = super().forward(y)
            y.add_(1)
            return z

    torch.manual_seed(0)
    with offload.Engine(Changes(), offload.AdamW(), **options(tmp_path)) as engine:
        loss = loss_of(engine, rows(0))
        with pytest.raises(StateError, match="was changed in place"):
            engine.backward(loss)


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_a_drive_that_fails_in_backward_drops_the_gradients(code: int, tmp_path: Path) -> None:
    """ENOSPC: a reentrant segment is repeated, and what it keeps has no room. EIO: the drive cannot be read."""
    full = code == errno.ENOSPC
    target = FaultTarget.WRITES if full else FaultTarget.READS
    room = {"activation_cpu_memory": "256KiB", "activation_nvme_memory": "8MiB", "activation_memory": "1MiB"}

    class Segments(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = x + 0 * self.blocks[0](x).sum()
            return checkpoint(super().forward, x, use_reentrant=True) if full else super().forward(x)

    def make() -> nn.Module:
        torch.manual_seed(0)
        return Segments()

    truth = run(make(), **everything_on_device())
    with offload.Engine(make(), offload.AdamW(lr=1e-2), max_grad_norm=0.5, **options(tmp_path, **room)) as engine:
        store = engine._manager.tiers.store
        torch.manual_seed(1000)
        loss = loss_of(engine, rows(0))
        store.inject(Fault(errno=code, target=target, forever=True))
        with pytest.raises(SwapFullError if full else SwapError):
            engine.backward(loss)
        store.clear_faults()
        del loss
        assert not engine._training.has_gradients()
        for number in range(3):
            torch.manual_seed(1000 + number)
            loss = loss_of(engine, rows(number))
            assert torch.equal(loss.detach(), truth.losses[number])
            engine.backward(loss)
            del loss
            engine.step()
            assert engine.grad_norm == truth.norms[number]


def test_host_memory_is_not_given_back_under_a_graph(tmp_path: Path) -> None:
    with offload.Engine(net(), offload.AdamW(), **options(tmp_path)) as engine:
        loss = loss_of(engine, rows(0))
        with pytest.raises(StateError, match="sleep: activations of a forward are in host memory"):
            engine.sleep(host=True)
        engine.backward(loss)
        engine.step()
        del loss
        engine.sleep(host=True)
        engine.wake()
        engine.backward(loss_of(engine, rows(1)))
        engine.step()


def test_the_plan_says_what_is_set_aside(tmp_path: Path) -> None:
    room = {"activation_cpu_memory": "4MiB", "activation_nvme_memory": "6MiB"}
    with offload.Engine(net(), offload.AdamW(), **options(tmp_path, **room)) as engine:
        line = (
            "activations that leave the device: 4.00 MiB of the cpu buffers, 6.00 MiB of the nvme buffers; 256.00 KiB"
        )
        assert line in str(engine.plan)
        kept = offload.Engine(net(), offload.AdamW(), **options(tmp_path, activations="keep"))
        for tier, size in ((Tier.HOST, 4 * MIB), (Tier.NVME, 6 * MIB)):
            assert engine.plan.arena_bytes[tier] - kept.plan.arena_bytes[tier] >= size
        kept.close()


def test_defaults_are_shares_of_the_budgets(tmp_path: Path) -> None:
    with offload.Engine(net(), offload.AdamW(), **options(tmp_path)) as engine:
        request = engine.plan.request
        assert (request.host_activation_bytes, request.nvme_activation_bytes) == (8 * MIB, 8 * MIB)  # quarters


def test_parts_that_do_not_fit_are_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    with pytest.raises(BudgetError, match=r'cpu budget: .*smallest max_memory\["cpu"\]'):
        offload.Engine(net(), offload.AdamW(), **options(tmp_path, activation_cpu_memory="40MiB"))
    with pytest.raises(
        BudgetError, match=r"nvme budget: .* and activations do not fit beside the rest: the tier needs"
    ):
        offload.Engine(net(), offload.AdamW(), **options(tmp_path, activation_nvme_memory="40MiB"))


@pytest.mark.parametrize(
    ("given_options", "message"),
    [
        (
            {"activations": "ofload"},
            "activations: expected one of auto, keep, offload, recompute but got 'ofload'.*offload",
        ),
        (
            {"activation_cpu_memory": "1GiB"},
            'activation_cpu_memory: expected activations="offload" or "auto" beside it',
        ),
        ({"activations": "offload", "activation_nvme_memory": "1GiB"}, "activation_nvme_memory: nvme_path is missing"),
        ({"activations": "offload", "activation_cpu_memory": "10%"}, "activation_cpu_memory: expected bytes"),
    ],
)
def test_contradicting_options_are_refused(given_options: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        offload.Config(**given_options)


def test_no_commit_of_a_durable_run_has_any(tmp_path: Path) -> None:
    """They are in a file of their own; whoever goes on with the run has the same bits."""
    truth = run(net(), **everything_on_device())
    folder = tmp_path / "run"
    room = {"activation_cpu_memory": "256KiB", "activation_nvme_memory": "8MiB"}
    given_options = options(tmp_path, run_dir=folder, **room)
    for option in ("nvme_path", "offload_param", "offload_optimizer"):
        del given_options[option]

    def step(engine: offload.Engine, number: int) -> None:
        torch.manual_seed(1000 + number)
        loss = loss_of(engine, rows(number))
        assert torch.equal(loss.detach(), truth.losses[number])
        assert engine._parts.activations.has_left()
        engine.backward(loss)
        del loss
        engine.step()
        assert engine.grad_norm == truth.norms[number]

    kept = {key: value for key, value in given_options.items() if key not in room} | {"activations": "keep"}
    with offload.Engine(net(), offload.AdamW(lr=1e-2), max_grad_norm=0.5, **given_options) as engine:
        store, own = engine._manager.tiers.store, engine._parts.activations.store
        step(engine, 0)
        step(engine, 1)
        assert {key[0] for key in store.keys()}.isdisjoint({"activation"})  # noqa: SIM118 - no mapping
        assert own.stats().written_bytes == own.stats().read_bytes > MIB
        written = engine.stats().links["nvme_write"].bytes
        assert written == own.stats().written_bytes + store.stats().written_bytes
        assert engine.plan.arena_bytes[Tier.NVME] - engine.plan.store_bytes == 8 * MIB
        assert engine.stats().peak_bytes["nvme"] <= engine.plan.arena_bytes[Tier.NVME]
        assert any(span.name == "activation" for span in take_spans(engine._parts, engine._manager).spans)
        engine.drain()
        loss_of(engine, rows(2))  # whose backward nobody runs
    with offload.Engine(net(), offload.AdamW(lr=1e-2), max_grad_norm=0.5, **given_options) as engine:
        assert engine.resumed is not None and engine.resumed.step == 2
        step(engine, 2)
        found = {name: value.clone() for name, value in engine.state_dict().items()}
    assert all(torch.equal(found[name], value) for name, value in truth.parameters.items())
    with offload.Engine(net(), offload.AdamW(lr=1e-2), max_grad_norm=0.5, **kept) as engine:  # with another mode, too
        assert engine.resumed is not None and engine.resumed.step == 3


@pytest.mark.parametrize("changed", [True, False])
def test_an_alias_that_was_saved_beside_what_it_is_an_alias_of_is_another_one(changed: bool, bench: Make) -> None:
    """Changed before or not, so that both have the same count but not the same counter: a change is of it alone."""
    made = bench(near=2)
    w = page(1).requires_grad_()
    with made.hooks():
        x = page(2)
        alias = x.data
        if changed:
            alias.add_(1)
        before = (w * x).sum()
        after = (w * alias).sum()
        alias.mul_(2)
        with pytest.raises(StateError, match="was changed in place"):
            after.backward()
    del before, after


def test_views_and_what_is_saved_twice_leave_once(bench: Make) -> None:
    """Telling counters apart changes none."""
    made = bench(near=2)
    w = page(1).requires_grad_()
    with made.hooks():
        x = page(2)
        versions = x._version, w._version
        loss = (w * x).sum() + (w * x.detach()).sum() + (w[1:] * x[1:]).sum()
        assert len(made.ledger._records) == 1
        assert (x._version, w._version) == versions
    loss.backward()
    expected = 2 * x
    expected[1:] += x[1:]
    assert w.grad is not None and torch.equal(w.grad, expected)


def test_what_a_node_has_changed_may_be_saved_anew(bench: Make) -> None:
    """What is saved then is what there is then."""
    made = bench(near=2)
    x, w = page().requires_grad_(), page(1).requires_grad_()
    with made.hooks():
        y = x * 2
        first = Cosine.apply(y).sum()
        first.backward(retain_graph=True)
        (w * y.detach()).sum().backward()
    assert torch.equal(w.grad, y.detach())


def test_a_write_of_what_nobody_wants_any_more_may_fail(tmp_path: Path) -> None:
    """Whoever comes next has lost nothing by it."""
    arena = HostArena(Tier.HOST, 8 * PAGE)
    with SwapStore(tmp_path, 64 * PAGE) as store:
        away = Away(arena.take(8 * PAGE), store, 32 * PAGE)
        store.inject(Fault(target=FaultTarget.WRITES, forever=True))
        rooms = [room_for(key, PAGE) for key in range(7)]
        for room in rooms:  # six may rest
            assert away.take(room)
            away.rest(room)
        assert rooms[0].ticket is not None
        for room in rooms:
            away.release(room)
        away.settle()
        assert not away.used_bytes and not len(store)


def test_what_a_node_has_changed_comes_back_as_it_was_saved(bench: Make) -> None:
    """Another pass of the same graph has what is elsewhere, and no change of it."""
    made = bench(near=2)
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(Cosine.apply(x * 2))
    for retain in (True, False):
        x.grad = None
        loss.backward(retain_graph=retain)
        assert torch.equal(x.grad, gradient(lambda x: chain(Cosine.apply(x * 2))))
    del loss
    made.assert_empty()


class Keeping(Sine):
    """The sine, whose backward keeps what it has saved."""

    kept: list[torch.Tensor] = []

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        Keeping.kept.append(ctx.saved_tensors[0])
        return Keeping.kept[-1].cos() * gradient


def test_what_has_come_back_takes_the_budget_as_long_as_somebody_uses_it(bench: Make) -> None:
    made = bench(near=2)
    with made.hooks():
        loss = chain(Keeping.apply(page().requires_grad_() * 2))
    loss.backward(retain_graph=True)
    collect()
    made.ledger.balance()
    used_bytes = made.budget.used_bytes
    Keeping.kept.clear()
    made.ledger.balance()
    made.ledger.balance()
    assert made.budget.used_bytes == used_bytes - PAGE
    del loss
    made.assert_empty()


def test_a_read_that_could_not_begin_is_begun_again(bench: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody takes for the content what is where it should have come to."""
    made = bench(host=8, drive=64)
    assert made.store is not None
    x = page().requires_grad_()
    with made.hooks():
        loss = chain(x)
    with monkeypatch.context() as patch:

        def fails(*_: object, **named: object) -> list[Ticket]:
            raise SwapError("no more threads")

        patch.setattr(made.store, "get_many", fails)
        with pytest.raises(SwapError, match="no more threads"):
            loss.backward(retain_graph=True)
    x.grad = None
    loss.backward()
    assert torch.equal(x.grad, gradient(chain))
    del loss
    made.assert_empty()
