"""Budgets, arenas and the placement of buffers in a region."""

from __future__ import annotations

import ctypes
import itertools
import mmap
import os
import threading
import types
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from offload.errors import BudgetError
from offload.memory import machine
from offload.memory.arena import Buffer, HostArena
from offload.memory.budget import Budget, Claim, Tier
from offload.memory.cpu import AT_ONCE_BYTES, CpuDevice, CpuMover
from offload.memory.limits import DEVICE_HEADROOM, HOST_HEADROOM, resolve_budgets
from offload.memory.region import Region
from offload.memory.transfer import MoverNeeds
from offload.sizes import HUGE_PAGE_BYTES, PAGE_BYTES, Share
from offload.stats import Counters
from offload.torch_private import storage_use_count

PAGE = PAGE_BYTES
CPU = torch.device("cpu")


# --- Device ---------------------------------------------------------------------------------------------------------


def test_the_cpu_as_device_copies_and_has_nothing_outstanding() -> None:
    device = CpuDevice()
    assert device.place == CPU and device.addressable and device.name() and device.free_bytes() > 0
    arena, host = device.arena(4 * PAGE), device.host_arena(4 * PAGE)
    claim = Budget(Tier.DEVICE, 0).claim("gradients")
    sizes = {"fetch_bytes": 0, "gradient_bytes": 0, "largest_gradient_bytes": 0}
    needs = MoverNeeds(counters=Counters(), host=host, **sizes, gradient_claim=claim, deadline_s=30.0)
    mover = device.mover(needs)
    try:
        here, there = host.take(PAGE), arena.take(PAGE)
        ctypes.memset(here.address, 7, PAGE)
        mover.upload(here.address, there.address, PAGE).wait(30.0)
        ctypes.memset(here.address, 0, PAGE)
        mover.download(there.address, here.address, PAGE).wait(30.0)
        assert ctypes.string_at(here.address, PAGE) == b"\7" * PAGE
        device.event().synchronize()
        assert device.event().query()
        device.synchronize()
    finally:
        mover.close()
        arena.close()
        host.close()


class Noting(CpuMover):
    """Notes the threads that copy."""

    def __init__(self) -> None:
        super().__init__(Counters())
        self.threads: list[int] = []

    def _copy(self, *args: Any, **options: Any) -> None:
        self.threads.append(threading.get_ident())
        super()._copy(*args, **options)


def test_a_copy_is_handed_over_where_it_takes_longer_than_that() -> None:
    size = AT_ONCE_BYTES + PAGE
    host, arena, mover = HostArena(Tier.HOST, size), HostArena(Tier.DEVICE, size), Noting()
    try:
        source, target = host.take(size), arena.take(size)
        for value, size_bytes in enumerate((AT_ONCE_BYTES, size), start=1):
            ctypes.memset(source.address, value, size)
            copy = mover.fetch_host(source.address, target, size_bytes, urgent=False)
            assert copy.done() or size_bytes > AT_ONCE_BYTES
            copy.wait(30.0)
            assert ctypes.string_at(target.address, size_bytes) == bytes([value]) * size_bytes
        assert [thread == threading.get_ident() for thread in mover.threads] == [True, False]
    finally:
        mover.close()
        arena.close()
        host.close()


@pytest.mark.parametrize("tier", [Tier.DEVICE, Tier.HOST])
def test_memory_that_the_system_does_not_map_is_a_budget_too_large(tier: Tier) -> None:
    size = 1 << 57  # more than addresses reach
    words = rf'^{tier.value} budget: expected 131072.00 TiB of main memory .*; lower max_memory\["{tier.value}"\]'
    with pytest.raises(BudgetError, match=words):
        HostArena(tier, size)


# --- Budget ---------------------------------------------------------------------------------------------------------


class LedgerMachine(RuleBasedStateMachine):
    """A budget against a dictionary."""

    LIMIT = 100

    def __init__(self) -> None:
        super().__init__()
        self.budget = Budget(Tier.HOST, self.LIMIT)
        self.claims: list[Claim] = []
        self.model: dict[str, int] = {}
        self.peak = 0

    def refused(self, name: str, more: int) -> bool:
        return sum(self.model.values()) + more > self.LIMIT

    def note(self, name: str, more: int) -> None:
        self.model[name] = self.model.get(name, 0) + more
        self.peak = max(self.peak, sum(self.model.values()))

    @rule(name=st.sampled_from("abc"), size=st.integers(0, 70))
    def claim(self, name: str, size: int) -> None:
        if self.refused(name, size):
            with pytest.raises(BudgetError, match=f"cpu budget: {name} needs {size} B"):
                self.budget.claim(name, size)
            return
        self.claims.append(self.budget.claim(name, size))
        self.note(name, size)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), size=st.integers(0, 100))
    def resize(self, data: st.DataObject, size: int) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        before = claim.size_bytes
        if size > before and self.refused(claim.name, size - before):
            with pytest.raises(BudgetError, match=f"cpu budget: {claim.name} needs {size - before} B"):
                claim.resize(size)
            assert claim.size_bytes == before
            return
        claim.resize(size)
        self.note(claim.name, size - before)

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), again=st.booleans())
    def close(self, data: st.DataObject, again: bool) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        self.note(claim.name, -claim.size_bytes)
        claim.close()
        if again:
            claim.close()

    @precondition(lambda self: self.claims)
    @rule(data=st.data(), size=st.integers(-50, -1))
    def negative(self, data: st.DataObject, size: int) -> None:
        claim = data.draw(st.sampled_from(self.claims))
        with pytest.raises(AssertionError, match=claim.name):
            claim.resize(size)

    @invariant()
    def ledger_agrees(self) -> None:
        assert self.budget.claims() == {name: size for name, size in self.model.items() if size}
        assert self.budget.used_bytes == sum(self.model.values()) <= self.LIMIT
        assert self.budget.free_bytes == self.LIMIT - self.budget.used_bytes
        assert self.budget.peak_bytes == self.peak


TestLedger = LedgerMachine.TestCase


def test_a_refused_claim_names_what_holds_the_budget() -> None:
    budget = Budget(Tier.DEVICE, 10 << 20)
    budget.claim("arena", 8 << 20)
    with pytest.raises(BudgetError) as caught:
        budget.claim("activations", 4 << 20)
    text = str(caught.value)
    for part in ("device budget", "activations needs 4.00 MiB", "12.00 MiB in all", "10.00 MiB", "arena 8.00 MiB"):
        assert part in text
    assert 'raise max_memory["device"]' in text


def test_claims_of_several_threads_never_exceed_the_limit() -> None:
    budget = Budget(Tier.HOST, 100)
    start = threading.Barrier(4)
    refused = []

    def work() -> None:
        start.wait()
        for _ in range(500):
            try:
                claim = budget.claim("x", 30)
            except BudgetError:
                refused.append(1)
            else:
                claim.close()

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert budget.used_bytes == 0
    assert budget.peak_bytes in (30, 60, 90)


# --- Arena ----------------------------------------------------------------------------------------------------------


def test_an_arena_hands_out_disjoint_aligned_buffers_until_it_is_full() -> None:
    arena = HostArena(Tier.HOST, 4 * PAGE)
    assert arena.base_address % HUGE_PAGE_BYTES == 0
    first, second, third = arena.take(1), arena.take(PAGE + 1), arena.take(PAGE)
    assert [b.offset_bytes for b in (first, second, third)] == [0, PAGE, 3 * PAGE]
    assert [b.size_bytes for b in (first, second, third)] == [PAGE, 2 * PAGE, PAGE]
    assert all(b.address == arena.base_address + b.offset_bytes for b in (first, second, third))
    with pytest.raises(BudgetError, match="do not fit"):
        arena.take(1)
    arena.close()


def test_an_empty_arena_takes_no_memory() -> None:
    arena = HostArena(Tier.DEVICE, 0)
    assert arena.base_address == 0
    with pytest.raises(BudgetError):
        arena.take(1)
    arena.close()


def test_memory_that_is_in_use_is_kept_whichever_threads_look() -> None:
    """Two look at once: the one has let the first go when the other is at the second."""
    used, nested = [True] * 3, False

    def is_second_busy() -> bool:
        nonlocal nested
        if nested:
            return used[1]
        nested = True
        thread = threading.Thread(target=lambda: HostArena(Tier.HOST, PAGE).close())
        thread.start()
        thread.join()
        return used[1]

    busy = [lambda: used[0], is_second_busy, lambda: used[2]]
    arenas = [HostArena(Tier.HOST, PAGE) for _ in busy]
    for is_busy, arena in zip(busy, arenas, strict=True):
        nested = True
        arena.close([is_busy])
    nested, used[0] = False, False
    HostArena(Tier.HOST, PAGE).close()
    assert [is_mapped(arena.base_address) for arena in arenas[1:]] == [True, True]
    used = [False] * 3
    HostArena(Tier.HOST, PAGE).close()
    assert [is_mapped(arena.base_address) for arena in arenas[1:]] == [False, False]


def is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [[int(end, 16) for end in line.split()[0].split("-")] for line in maps]
    return any(begin <= address < end for begin, end in ranges)


def test_a_forked_child_that_collects_an_arena_keeps_its_own_memory() -> None:
    """The arena is not there, and what the child maps may lie in its place."""
    arena = HostArena(Tier.HOST, PAGE)
    fixed, map_at = 0x10, ctypes.CDLL(None).mmap
    map_at.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    child = os.fork()
    if child == 0:
        start, stays = arena._start, False
        try:
            map_at(start, PAGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | fixed, -1, 0)
            del arena
            stays = is_mapped(start)
        finally:
            os._exit(not stays)
    assert os.waitpid(child, 0)[1] == 0
    arena.close()


def test_storages_view_the_arena_and_count_their_users() -> None:
    arena = HostArena(Tier.DEVICE, 2 * PAGE)
    arena.take(PAGE)
    buffer = arena.take(PAGE)
    storage, other = arena.storage(buffer), arena.storage(buffer)
    assert storage.data_ptr() == buffer.address and storage.nbytes() == PAGE
    alone = storage_use_count(storage)
    tensor = torch.empty(0, dtype=torch.float32).set_(storage, 1, (2, 3))  # type: ignore[call-overload]
    assert tensor.data_ptr() == buffer.address + 4
    assert storage_use_count(storage) > alone
    assert storage_use_count(other) == alone  # each residency has a count of its own
    view = tensor[1]
    del tensor
    assert storage_use_count(storage) > alone
    torch.empty(0, dtype=torch.float32).set_(other, 0, (8,)).fill_(7.0)  # type: ignore[call-overload]
    assert view.tolist() == [7.0] * 3
    del view
    assert storage_use_count(storage) == alone
    del storage, other
    arena.close()


def test_a_closed_arena_stays_mapped_as_long_as_tensors_of_the_user_point_into_it() -> None:
    arena = HostArena(Tier.DEVICE, 4 << 20)
    storage = arena.storage(arena.take(4 << 20))
    tensor: torch.Tensor | None = torch.empty(0).set_(storage, 0, (4,))  # type: ignore[call-overload]
    address = arena.base_address
    ctypes.memset(address, 0, 4 << 20)
    before = psutil.Process().memory_info().rss
    arena.close([lambda: storage_use_count(storage) > 1])
    HostArena(Tier.DEVICE, PAGE).close()
    assert tensor is not None and tensor.fill_(3.0).tolist() == [3.0] * 4
    tensor = None
    HostArena(Tier.DEVICE, PAGE).close()
    assert psutil.Process().memory_info().rss <= before - (3 << 20)


# --- Region ---------------------------------------------------------------------------------------------------------


class RegionMachine(RuleBasedStateMachine):
    """A region of 16 pages against a dictionary of page sets."""

    PAGES = 16

    def __init__(self) -> None:
        super().__init__()
        self.region = Region(Buffer(Tier.DEVICE, 1 << 30, 5 * PAGE, self.PAGES * PAGE))
        self.held: dict[int, Buffer] = {}
        self.pages = self.PAGES
        self.layouts: dict[int, object] = {}
        self.numbers: dict[object, int] = {}

    @property
    def next(self) -> int:
        """The least number that owns nothing: layouts come back."""
        return next(owner for owner in itertools.count() if owner not in self.held)

    def _taken(self, buffer: Buffer, size: int) -> None:
        assert buffer.size_bytes == -(-size // PAGE) * PAGE
        self.held[self.next] = buffer

    def _pages(self, buffer: Buffer) -> set[int]:
        first = (buffer.offset_bytes - 5 * PAGE) // PAGE
        return set(range(first, first + buffer.size_bytes // PAGE))

    def _has_gap(self, pages: int, without: frozenset[int] = frozenset()) -> bool:
        used = set().union(*(self._pages(b) for owner, b in self.held.items() if owner not in without), set())
        free = "".join("x" if page in used else "." for page in range(self.pages))
        return "." * pages in free

    sizes = st.integers(1, 3 * PAGE) | st.integers(1, 9).map(lambda pages: pages * PAGE)

    @rule(size=sizes)
    def allocate(self, size: int) -> None:
        buffer = self.region.allocate(size, self.next)
        assert (buffer is not None) == self._has_gap(-(-size // PAGE))
        if buffer is not None:
            self._taken(buffer, size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        owner = data.draw(st.sampled_from(sorted(self.held)))
        self.region.free(owner)
        del self.held[owner]

    @rule(size=sizes, data=st.data())
    def evict_window(self, size: int, data: st.DataObject) -> None:
        """Room in one piece is found exactly when there is any, without pinned owners, at the least highest cost."""
        pages = -(-size // PAGE)
        if self._has_gap(pages):
            return
        choices = st.none() | st.integers(0, 5).map(float)
        costs: dict[int, float | None] = {owner: data.draw(choices, label=f"cost {owner}") for owner in self.held}

        def cost(owner: int) -> float | None:
            return costs[owner]

        window = self.region.cheapest_window(size, cost)
        levels = sorted({c for c in costs.values() if c is not None})
        enough = [
            level
            for level in levels
            if self._has_gap(pages, frozenset(o for o, c in costs.items() if c is not None and c <= level))
        ]
        if not enough:
            assert window is None
            return
        assert window is not None
        highest = [costs[owner] for owner in window]
        assert None not in highest
        assert max(c for c in highest if c is not None) == enough[0]
        for owner in window:
            self.region.free(owner)
            del self.held[owner]
        buffer = self.region.allocate(size, self.next)
        assert buffer is not None
        self._taken(buffer, size)

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def hand_over(self, data: st.DataObject) -> None:
        owner, heir = data.draw(st.sampled_from(sorted(self.held))), -2 - self.next  # as strays are called
        if heir in self.held:
            return
        self.region.hand_over(owner, heir)
        self.held[heir] = self.held.pop(owner)

    @rule(fixed=st.sets(st.integers(0, 9), max_size=2))
    def pack(self, fixed: set[int]) -> None:
        for owner, source, target in self.region.pack(lambda owner: owner not in fixed):
            assert owner not in fixed and self.held[owner] == source and target.address < source.address
            self.held[owner] = target

    @rule(pages=st.integers(9, 16))
    def resize(self, pages: int) -> None:
        """What lies beyond the new end must have gone; all room below it is still found."""
        beyond = self.region.owners_beyond(pages * PAGE)
        assert beyond == [o for o in reversed(self.region.owners()) if max(self._pages(self.held[o])) >= pages]
        if beyond:
            with pytest.raises(AssertionError):
                self.region.resize(pages * PAGE)
            return
        before = self.pages
        part = self.region.resize(pages * PAGE)
        assert part.size_bytes == abs(pages - before) * PAGE
        assert part.address == (1 << 30) + min(pages, before) * PAGE
        self.pages = pages

    @rule(owner=st.integers(1000, 1001))
    def free_nothing(self, owner: int) -> None:
        with pytest.raises(AssertionError, match=str(owner)):
            self.region.free(owner)

    @invariant()
    def a_layout_has_one_number(self) -> None:
        now = self.pages, tuple(sorted((owner, b.address, b.size_bytes) for owner, b in self.held.items()))
        assert self.layouts.setdefault(self.region.layout, now) == now
        assert self.numbers.setdefault(now, self.region.layout) == self.region.layout

    @invariant()
    def blocks_are_disjoint_sorted_and_inside(self) -> None:
        by_address = sorted(self.held, key=lambda owner: self.held[owner].address)
        assert self.region.owners() == by_address
        end = 1 << 30
        for owner in by_address:
            buffer = self.held[owner]
            assert buffer.tier is Tier.DEVICE
            assert buffer.address - (1 << 30) == buffer.offset_bytes - 5 * PAGE
            assert buffer.address % PAGE == 0 and buffer.address >= end
            end = buffer.address + buffer.size_bytes
        assert end <= (1 << 30) + self.region.size_bytes == (1 << 30) + self.pages * PAGE
        assert self.region.whole == Buffer(Tier.DEVICE, 1 << 30, 5 * PAGE, self.pages * PAGE)
        assert self.region.used_bytes == sum(b.size_bytes for b in self.held.values())


TestRegion = RegionMachine.TestCase


def test_discarded_pages_come_back_empty() -> None:
    arena = HostArena(Tier.DEVICE, 4 * PAGE)
    first, second = arena.take(2 * PAGE), arena.take(2 * PAGE)
    for buffer in (first, second):
        ctypes.memset(buffer.address, 7, buffer.size_bytes)
    arena.discard(second)
    assert ctypes.string_at(first.address, first.size_bytes) == b"\x07" * first.size_bytes
    assert ctypes.string_at(second.address, second.size_bytes) == bytes(second.size_bytes)
    arena.close()


def test_large_blocks_come_from_the_high_end_and_small_ones_from_the_low_end() -> None:
    region = Region(Buffer(Tier.DEVICE, PAGE, 0, 16 * PAGE))
    small, large = region.allocate(PAGE, 1), region.allocate(4 * PAGE, 2)  # 4 of 16 pages: a quarter
    assert small is not None and large is not None
    assert (small.offset_bytes, large.offset_bytes) == (0, 12 * PAGE)


def test_small_blocks_fill_the_tightest_gap() -> None:
    region = Region(Buffer(Tier.DEVICE, PAGE, 0, 16 * PAGE))
    for owner in range(4):
        region.allocate(2 * PAGE, owner)
    region.free(1)  # a gap of 2 pages at 2; 8 pages are free at the end
    buffer = region.allocate(2 * PAGE, 9)
    assert buffer is not None and buffer.offset_bytes == 2 * PAGE


def test_the_cost_of_a_window_is_that_of_its_dearest_owner() -> None:
    region = Region(Buffer(Tier.DEVICE, PAGE, 0, 16 * PAGE))
    for owner in range(4):
        region.allocate(3 * PAGE, owner)  # 4 pages are left at the end
    costs = [3.0, 1.0, 2.0, None]
    assert region.cheapest_window(6 * PAGE, lambda owner: costs[owner]) == [1, 2]  # not [0, 1], though 1 is cheapest
    assert region.cheapest_window(9 * PAGE, lambda owner: costs[owner]) == [0, 1, 2]
    assert region.cheapest_window(10 * PAGE, lambda owner: costs[owner]) is None


def test_a_buffer_can_change_its_owner() -> None:
    region = Region(Buffer(Tier.DEVICE, PAGE, 0, 4 * PAGE))
    region.allocate(PAGE, 1)
    region.allocate(PAGE, 2)
    region.hand_over(1, -1)
    assert sorted(region.owners()) == [-1, 2] and region.used_bytes == 2 * PAGE
    with pytest.raises(AssertionError):
        region.hand_over(2, -1)
    region.free(-1)
    with pytest.raises(AssertionError):
        region.free(1)


def test_what_is_larger_than_the_region_never_fits() -> None:
    region = Region(Buffer(Tier.DEVICE, PAGE, 0, 4 * PAGE))
    region.allocate(PAGE, 1)
    assert region.allocate(5 * PAGE, 2) is None
    assert region.cheapest_window(5 * PAGE, lambda owner: 0.0) is None


# --- budgets of the machine -----------------------------------------------------------------------------------------


@given(
    shares=st.dictionaries(
        st.sampled_from(["device", "cpu", "nvme"]),
        st.integers(0, 1 << 45) | st.floats(0.01, 1.0).map(Share),
    ),
    nvme_free=st.none() | st.integers(0, 1 << 42),
    container=st.none() | st.integers(0, 16 << 30),
    ranks=st.integers(1, 8),
)
def test_budgets_are_what_was_given_and_shares_of_what_is_free(
    shares: dict[str, int | Share], nvme_free: int | None, container: int | None, ranks: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 8 << 30}))
        patch.setattr(machine, "cgroup_memory_free", lambda: container)
        budgets = resolve_budgets(shares, CpuDevice(), nvme_free, ranks=ranks)
    available = (8 << 30 if container is None else min(8 << 30, container)) // ranks
    free = {"device": available, "cpu": available, "nvme": nvme_free or 0}
    both, sizes = int(available * HOST_HEADROOM), dict[str, int]()
    for name, value in shares.items():
        sizes[name] = int(value.fraction * free[name]) if isinstance(value, Share) else value
    default = {"nvme": int((nvme_free or 0) * DEVICE_HEADROOM)}
    default["device"] = min(max(both // 8, both - sizes.get("cpu", 0)), both // 2)
    default["cpu"] = min(max(both // 8, both - sizes.get("device", 0)), both // 2)
    for tier in Tier:
        if tier is Tier.NVME and nvme_free is None:
            assert budgets[tier] == 0
        else:
            assert budgets[tier] == sizes.get(tier.value, default[tier.value])
    if not {"device", "cpu"} <= shares.keys():
        assert budgets[Tier.DEVICE] + budgets[Tier.HOST] <= max(both, max(sizes.values(), default=0) + both // 8)


def test_two_folders_of_one_drive_have_its_free_bytes_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda path: types.SimpleNamespace(free=100))
    folders = (tmp_path / "a", tmp_path / "b", tmp_path / "missing")
    for folder in folders[:2]:
        folder.mkdir()
    (drive,) = machine.drives_of(folders)
    assert machine.free_bytes(folders) == 100 and machine.free_bytes(folders, {drive: 3}) == 33
    assert machine.free_bytes(()) is None
