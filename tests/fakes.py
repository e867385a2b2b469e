"""Stand-ins for the neighbours of the memory manager: a binder, a swap store in memory, plans with given homes."""

from __future__ import annotations

import contextlib
import ctypes
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future
from typing import Any

import pytest
import torch

from offload.interrupt import Deferral
from offload.memory.arena import Arena, HostArena
from offload.memory.budget import Budget, Tier
from offload.memory.cpu import CpuDevice
from offload.planning.asked import Homes, Request
from offload.planning.plan import STAGING_SLOTS, Plan
from offload.planning.roles import ADAM_STATES, STATE_ROLES, Role, States, role_bytes
from offload.planning.units import Unit, lay_out
from offload.shards import tiers
from offload.shards.manager import Manager
from offload.sizes import whole_pages
from offload.stats import Counters

ITEMSIZE = {"bfloat16": 2, "float16": 2, "float32": 4, "int8": 1}
CPU = torch.device("cpu")


def peek(address: int, size_bytes: int) -> bytes:
    """Return the bytes at an address."""
    return ctypes.string_at(address, size_bytes)


def poke(address: int, data: bytes) -> None:
    """Set the bytes at an address."""
    ctypes.memmove(address, data, len(data))


def make_unit(index: int, sizes: Sequence[int], dtype: str = "bfloat16", trainable: bool = True) -> Unit:
    """Return a unit of one-dimensional parameters with `sizes` elements."""
    slots, numel = lay_out([(f"u{index}.p{number}", (size,)) for number, size in enumerate(sizes)])
    return Unit(index, f"u{index}", dtype, ITEMSIZE[dtype], trainable, numel, slots)


def make_plan_with(
    units: Sequence[Unit],
    homes: Sequence[Homes],
    *,
    working_bytes: int = 0,
    chunk_numel: int = 4096,
    accumulate: bool = False,
    pool_buffers: int = 2,
    states: States = ADAM_STATES,
    early_bytes: int = 0,
    staging_slots: int = STAGING_SLOTS,
    device_is_host: bool = True,
) -> Plan:
    """Return a plan with exactly these homes, and the arenas they need."""
    everything = dict.fromkeys(Tier, 1 << 40)
    request = Request(units, everything, accumulate=accumulate, states=states, device_is_host=device_is_host)

    def span(unit: Unit, role: Role, numel: int) -> int:
        return role_bytes(unit, role, numel, accumulate=accumulate, states=states)

    def size(unit: Unit, *roles: Role) -> int:
        return sum(whole_pages(span(unit, role, unit.numel)) for role in roles)

    used = dict.fromkeys(Tier, 0)
    spilled = 0
    for unit, home in zip(units, homes, strict=True):
        used[home.param] += size(unit, Role.PARAM)
        if home.grad is not None and home.states is not None:
            used[home.grad] += size(unit, Role.GRAD)
            used[home.states] += size(unit, *STATE_ROLES)
            spilled = max(spilled, size(unit, Role.GRAD) if home.grad is Tier.NVME else 0)
    every = (Role.PARAM, Role.GRAD, *STATE_ROLES)
    slot = whole_pages(max(sum(span(unit, role, chunk_numel) for role in every) for unit in units))
    staging = staging_slots * slot
    arena = {
        Tier.DEVICE: used[Tier.DEVICE] + working_bytes,
        Tier.HOST: used[Tier.HOST] + staging + pool_buffers * spilled,
        Tier.NVME: used[Tier.NVME] + 16 * slot,
    }
    return Plan(
        request=request,
        homes=tuple(homes),
        working_bytes=working_bytes,
        activation_bytes=0,
        grad_pool_bytes=pool_buffers * spilled,
        fetch_staging_bytes=0,
        grad_staging_bytes=0,
        chunk_numel=chunk_numel,
        staging_slots=staging_slots,
        staging_slot_bytes=slot,
        arena_bytes=arena,
        step_bytes={},
        early_bytes=early_bytes,
    )


class FakeBinder:
    """Remembers what is bound, with a view per slot as parameters have; refuses to bind twice."""

    def __init__(self) -> None:
        self.bound: dict[int, torch.UntypedStorage] = {}
        self._views: dict[int, list[torch.Tensor]] = {}

    def bind(self, unit: Unit, address: int, views: Sequence[torch.Tensor]) -> None:
        assert unit.index not in self.bound
        self.bound[unit.index] = views[0].untyped_storage()
        assert self.bound[unit.index].data_ptr() == address
        self._views[unit.index] = [view.detach() for view in views]

    def unbind(self, unit: Unit) -> None:
        del self.bound[unit.index], self._views[unit.index]

    def changed(self, unit: Unit) -> str | None:
        return None

    def count_update(self, unit: Unit) -> None:
        assert unit.index in self.bound


class ApartDevice(CpuDevice):
    """A device whose memory counts as out of the host's reach, though it is the host's: a worker makes the updates."""

    addressable = False

    def arena(self, size_bytes: int) -> Arena:
        return _FixedArena(Tier.DEVICE, size_bytes)

    def host_arena(self, size_bytes: int) -> Arena:
        return _FixedArena(Tier.HOST, size_bytes)


class _FixedArena(HostArena):
    elastic = False

    def __init__(self, tier: Tier, size_bytes: int) -> None:
        super().__init__(tier, size_bytes)
        self.elastic = False


class LateTask(Future):  # type: ignore[type-arg]
    """Arithmetic that takes place when it is waited for, together with all that comes before it in the queue."""

    def __init__(self, worker: LateWorker, work: Callable[[], None], *, urgent: bool) -> None:
        super().__init__()
        self._worker = worker
        self._work = work
        self.urgent = urgent

    def run(self) -> None:
        self._worker.queue.remove(self)
        try:
            self.set_result(self._work())
        except Exception as error:
            self.set_exception(error)
        if self._worker.begins_next and self._worker.queue:
            self._worker.begun = self._worker.queue[0]

    def result(self, timeout: float | None = None) -> Any:
        self._worker.before_wait()
        self.exception()
        return super().result(0)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        while not self.done():
            self._worker.queue[0].run()
        return super().exception(0)

    def cancel(self) -> bool:
        if not self.done() and self is not self._worker.begun:
            self._worker.queue.remove(self)
            super().cancel()
        return self.cancelled()


class LateWorker:
    """A worker beside an accelerator that does nothing before somebody waits for it.

    Attributes:
        queue: what it was given and has not done.
        begun: of these, what it is at: too late to take back.
        begins_next: it is at the next thing as soon as one is done.
        before_wait: called by whoever waits; what it raises leaves the work under way.
    """

    apart = True

    def __init__(self) -> None:
        self.queue: list[LateTask] = []
        self.begun: LateTask | None = None
        self.begins_next = False
        self.before_wait: Callable[[], None] = lambda: None

    def submit(self, work: Callable[[], None], *, urgent: bool = False) -> LateTask:
        task = LateTask(self, work, urgent=urgent)
        later = (index for index, other in enumerate(self.queue) if other is not self.begun and not other.urgent)
        self.queue.insert(next(later, len(self.queue)) if urgent else len(self.queue), task)
        return task

    def do(self, many: int) -> None:
        """Do so many things."""
        for _ in range(many):
            self.queue[0].run()

    def close(self) -> None:
        self.queue.clear()


@contextlib.contextmanager
def late_worker() -> Iterator[LateWorker]:
    """Let managers that are made inside have a :class:`LateWorker` beside their :class:`ApartDevice`."""
    worker = LateWorker()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tiers, "WorkerThread", lambda begin: worker)
        yield worker


class FakeTicket:
    """An operation of :class:`FakeStore` that takes place only when it is waited for."""

    def __init__(self, store: FakeStore, kind: str, key: Hashable, address: int, size_bytes: int) -> None:
        self._store = store
        self.kind = kind
        self.key = key
        self.address = address
        self.end = address + size_bytes
        self.over = False
        self.error: BaseException | None = None

    def done(self) -> bool:
        return self.over

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.over:
            self._store.before_wait(self)
            self.over = True
            self._store.finish(self)
        if self.error is not None:
            raise self.error


class FakeStore:
    """A swap store in memory whose operations are as late as they may be.

    A write takes its bytes, and a read delivers them, only at the wait: whoever reuses memory too early loses data.
    Ranges in flight are checked as well, and everything is logged in `events` as (what, key).

    Attributes:
        urgent: keys of the reads and writes that were.
        fail: called with ("get" or "put", key, how many of this kind came before); an exception it returns is raised
            by the ticket's wait.
        before_wait: called with a ticket that is waited for; what it raises leaves the ticket in flight.
    """

    alignment = 4096
    capacity_bytes = 0  # it is never longer than the plan wants

    def __init__(self) -> None:
        self.objects: dict[Hashable, bytes] = {}
        self.events: list[tuple[str, Any]] = []
        self.flying: list[FakeTicket] = []
        self.urgent: list[Hashable] = []
        self.fail: Callable[[str, Hashable, int], BaseException | None] = lambda kind, key, count: None
        self.before_wait: Callable[[FakeTicket], None] = lambda ticket: None
        self._counts = {"get": 0, "put": 0}

    def __contains__(self, key: Hashable) -> bool:
        return key in self.objects

    @property
    def used_bytes(self) -> int:
        return sum(map(len, self.objects.values()))

    def put(self, key: Hashable, address: int, length: int, *, urgent: bool = False) -> FakeTicket:
        self.urgent += [key] * urgent
        return self._start("put", key, address, length)

    def get(self, key: Hashable, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> FakeTicket:
        assert length <= len(self.objects[key]) and offset == 0
        self.urgent += [key] * urgent
        return self._start("get", key, address, length)

    def put_many(self, items: Sequence[tuple[Hashable, int, int]], *, urgent: bool = False) -> list[FakeTicket]:
        return [self.put(*item, urgent=urgent) for item in items]

    def get_many(self, items: Sequence[tuple[Hashable, int, int]], *, urgent: bool = False) -> list[FakeTicket]:
        return [self.get(*item, urgent=urgent) for item in items]

    def delete(self, key: Hashable) -> None:
        del self.objects[key]

    def register_buffer(self, address: int, length: int) -> bool:
        return True

    def close(self) -> None:
        assert not self.flying

    def _start(self, kind: str, key: Hashable, address: int, length: int) -> FakeTicket:
        assert address % self.alignment == 0 and length > 0
        ticket = FakeTicket(self, kind, key, address, length)
        for other in self.flying:
            overlap = other.address < ticket.end and ticket.address < other.end
            assert not overlap or kind == other.kind == "put", f"{kind} {key} reuses memory of {other.kind} {other.key}"
        self.events.append((kind, key))
        self.flying.append(ticket)
        ticket.error = self.fail(kind, key, self._counts[kind])
        self._counts[kind] += 1
        return ticket

    def finish(self, ticket: FakeTicket) -> None:
        self.flying.remove(ticket)
        self.events.append((f"{ticket.kind} over", ticket.key))
        if ticket.error is not None:
            return
        if ticket.kind == "put":
            self.objects[ticket.key] = peek(ticket.address, ticket.end - ticket.address)
        else:
            poke(ticket.address, self.objects[ticket.key][: ticket.end - ticket.address])


def versions(manager: Manager) -> list[int]:
    """Return per unit the version of its parameters' content."""
    return [manager.tiers.param(unit.index).version for unit in manager.units]


def make_manager(
    plan: Plan,
    store: Any,
    *,
    binder: FakeBinder | None = None,
    prefetch: bool = False,
    device: CpuDevice | None = None,
) -> Manager:
    """Return a manager on the CPU with budgets that are exactly the plan's arenas."""
    limits = {tier: Budget(tier, plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0)) for tier in Tier}
    return Manager(
        plan,
        device or CpuDevice(),
        limits,
        store,
        binder or FakeBinder(),
        Counters(),
        deadline_s=30.0,
        safe_point=Deferral(),
        prefetch=prefetch,
    )
