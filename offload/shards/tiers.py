"""The memory of one engine: what its plan has taken of every tier, and the shards that live there.

Owns the arenas, their claims on the budgets, the staging buffers, and how all this ends. It decides nothing and asks
nobody above. Its parts do the work: :mod:`offload.shards.copies` has the states and the transfers,
:mod:`offload.shards.working_set` the parameters on the device, :mod:`offload.shards.gradients` the gradients. Next:
:mod:`offload.shards.leases` and :mod:`offload.shards.stream` run over shards, :mod:`offload.shards.manager` is the gate
through which all others come.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

from offload.distributed.ranks import Ranks
from offload.distributed.rounds import Standing
from offload.errors import BudgetError, StateError
from offload.memory.arena import Arena, Buffer
from offload.memory.budget import Budget, Claim, Tier
from offload.memory.device import Device
from offload.memory.transfer import Mover, MoverNeeds
from offload.planning.asked import PASSING_UNITS
from offload.planning.plan import Plan
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.shards.bound import Binder, BoundUnits
from offload.shards.conductor import Conductor
from offload.shards.copies import Copies, touch
from offload.shards.gradients import Gradients
from offload.shards.gradients_of_ranks import MicroBatch, SharedGradients
from offload.shards.gradients_on_device import GradientsOnDevice
from offload.shards.shard import Shard, State
from offload.shards.worker import Caller, Worker, WorkerThread
from offload.shards.working_set import WorkingSet
from offload.sizes import format_bytes
from offload.stats import Counters
from swap import SwapStore
from swap.io.aio import is_memory_held


class Tiers:
    """Memory and shards of one engine. See the module's text.

    Attributes:
        plan: what was planned.
        units: of the model.
        device: where compute runs.
        budgets: of all tiers.
        store: the swap store; None where nothing lives on NVMe.
        counters: of bytes and seconds.
        copies, bound, working, gradients: its parts.
        gradients_there: those that wait on a device which the host cannot address; None where none may.
        ranks: who trains together.
        shared: this rank's part in what several ranks add up; None where there is one.
        mover: of bytes between device and host.
        worker: does the arithmetic of updates.
        staging: buffers of host memory through which chunks pass.
        activations: part of host memory for those that leave the device.
        optimizer_claim: of the host budget, for what an optimizer's own class keeps.
        deadline_s: after which an operation counts as lost.
    """

    def __init__(
        self,
        plan: Plan,
        device: Device,
        budgets: Mapping[Tier, Budget],
        store: SwapStore | None,
        binder: Binder,
        counters: Counters,
        *,
        deadline_s: float,
        reclaim: Callable[[], None],
        ranks: Ranks,
    ) -> None:
        """Take the memory that the plan wants; `binder` as in :class:`BoundUnits`, `reclaim` as in :class:`WorkingSet`.

        Raises:
            BudgetError: a budget has less than the plan wants.
        """
        self.plan = plan
        self.units = plan.request.units
        self.device = device
        self.store = store
        self.counters = counters
        self.deadline_s = deadline_s
        self.budgets = budgets
        sizes = {tier: plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) for tier in Tier}
        if store is not None:  # a durable run's may be longer
            sizes[Tier.NVME] = max(sizes[Tier.NVME], store.capacity_bytes + plan.apart_bytes)
        claims = {tier: budgets[tier].claim("arena", sizes[tier]) for tier in Tier}
        self.optimizer_claim = budgets[Tier.HOST].claim("optimizer", plan.request.own_bytes)
        in_flight = budgets[Tier.DEVICE].claim("gradients on their way")
        self._claims = [*claims.values(), self.optimizer_claim, in_flight]
        self._arena_claims = claims
        self._put_down: dict[Tier, int] = {}  # bytes of claims, of arenas that were released
        with contextlib.ExitStack() as undo:
            arena = device.arena(sizes[Tier.DEVICE] - plan.loose_bytes)
            host = device.host_arena(sizes[Tier.HOST])
            undo.callback(host.close)  # it may be page-locked
            self._arenas = {Tier.DEVICE: arena, Tier.HOST: host}
            # Where a gradient is used it may wait for other ranks, and who waits for its use waits as long.
            patience_s = max(deadline_s, ranks.deadline_s)
            self.mover = self._make_mover(host, in_flight, patience_s)
            undo.callback(self.mover.close)
            self.copies = Copies(
                plan, self._arenas, store, deadline_s=deadline_s, release=self.mover.release, dump=self.dump
            )
            self._conductor: Conductor | None = None
            if plan.request.slices_parameters:
                landing = host.take(plan.request.landing_bytes)
                passing_bytes = plan.request.passing_bytes // PASSING_UNITS
                passing = [host.take(passing_bytes) for _ in range(PASSING_UNITS) if passing_bytes]
                ranks.agree("taking memory")  # who has failed meanwhile is not to be waited for below
                beside = ranks.beside("parameters")  # where a thread of its own waits
                self._conductor = Conductor(
                    beside,
                    plan,
                    self.copies,
                    landing,
                    counters,
                    device.begin_thread,
                    deadline_s=deadline_s,
                    passing=passing,
                )
            self.ranks = self._conductor or ranks
            self._sizes: dict[tuple[int, Role, int], int] = {}  # of ranges, as they have been asked for
            self._kept_sizes: dict[tuple[int, int], int] = {}  # of ranges, in all roles but GRAD
            self.staging = [host.take(plan.staging_slot_bytes) for _ in range(plan.staging_slots)]
            self.activations = host.take(plan.request.host_activation_bytes)
            self._touch_buffers()
            self.bound = BoundUnits(self.units, arena, binder)
            self.working = WorkingSet(
                plan.request,
                self.copies,
                arena,
                device.addressable,
                claims[Tier.DEVICE],
                self.mover,
                self.bound,
                reclaim,
                self._conductor,
            )
            self.worker: Worker = Caller() if device.addressable else WorkerThread(device.begin_thread)
            self.gradients_there: GradientsOnDevice | None = None
            if device.kernels is not None:
                totals = arena.take(plan.totals_bytes)
                self.gradients_there = GradientsOnDevice(plan, device.kernels, device.place, totals)
            there = self.gradients_there
            self.shared: MicroBatch | None = None
            if ranks.world > 1:
                claim = budgets[Tier.HOST].claim("gradients that wait for other ranks")
                self._claims.append(claim)
                standing = Standing() if self._conductor is None else self._conductor.standing
                ranks.agree("taking memory")  # as above: all of it, but for what gradients want
                self.shared = MicroBatch(plan, self.ranks, host, claim, counters, standing)
            if self.shared is None:
                self.gradients = Gradients(plan, self.copies, self.mover, counters, there, deadline_s=deadline_s)
            else:
                self.gradients = SharedGradients(
                    plan, self.copies, self.mover, counters, self.shared, deadline_s=patience_s
                )
            # Registering page-locks: not for the region, which gives memory back.
            if store is not None and host.size_bytes:
                store.register_buffer(host.base_address, host.size_bytes)
            undo.pop_all()

    def _make_mover(self, host: Arena, gradients: Claim, deadline_s: float) -> Mover:
        """Return what moves bytes, with staging buffers of `host`."""
        plan = self.plan
        largest = max((slot.numel * u.itemsize for u in self.units if u.trainable for slot in u.slots), default=0)
        needs = MoverNeeds(
            counters=self.counters,
            host=host,
            fetch_bytes=plan.fetch_staging_bytes,
            gradient_bytes=plan.grad_staging_bytes,
            gradient_claim=gradients,
            largest_gradient_bytes=largest,
            deadline_s=deadline_s,
        )
        return self.device.mover(needs)

    # --- where things are -------------------------------------------------------------------------------------------

    def param(self, index: int) -> Shard:
        """Return the shard of a unit's parameters."""
        return self.copies.params[index]

    def chunk_bytes(self, unit: Unit, role: Role, begin: int, end: int) -> int:
        """Return the bytes of elements [begin, end) in `role`; `begin` is where a block of 8-bit states starts."""
        if role is Role.GRAD:
            return (end - begin) * self.gradients.dtype(unit).itemsize
        key = (unit.index, role, end - begin)
        size_bytes = self._sizes.get(key)
        if size_bytes is None:
            size_bytes = self._sizes[key] = self.plan.chunk_bytes(unit, role, end - begin)
        return size_bytes

    def update_bytes(self, unit: Unit, begin: int, end: int) -> int:
        """Return the bytes of elements [begin, end) in all roles, as :meth:`chunk_bytes`."""
        key = (unit.index, end - begin)
        kept = self._kept_sizes.get(key)
        if kept is None:
            roles = (Role.PARAM, *STATE_ROLES)
            kept = self._kept_sizes[key] = sum(self.plan.chunk_bytes(unit, role, end - begin) for role in roles)
        return kept + self.chunk_bytes(unit, Role.GRAD, begin, end)

    def offset_bytes(self, unit: Unit, role: Role, element: int) -> int:
        """Return where a unit's `element` lies in its shard of `role`, in bytes from the shard's start."""
        return self.chunk_bytes(unit, role, self.plan.request.owned(unit, role)[0], element)

    def working_address(self, index: int) -> int | None:
        """Return the host's address of a unit's parameters on the device; None where they have none."""
        shard = self.copies.params[index]
        if not self.device.addressable or shard.state is not State.RESIDENT or shard.work_buffer is None:
            return None
        return shard.work_buffer.address

    def read_whole(self, index: int) -> int:
        """Gather a unit's parameters, of which ranks have slices, in host memory; all ranks come here.

        Returns:
            The host's address, for as long as no other unit is asked for.
        """
        assert self._conductor is not None
        return self._conductor.read(self.copies.params[index], self.mover)

    def comes_before_update(self, shard: Shard) -> bool:
        """Tell whether a working copy of PARAM may be fetched before an update, which then changes it as well."""
        return self.device.addressable and not shard.is_sliced

    def updates_in_place(self, shard: Shard) -> bool:
        """Tell whether a working copy of PARAM is best fetched before an update: it is changed there and read once."""
        return shard.home is Tier.NVME and self.comes_before_update(shard)

    # --- who may write ----------------------------------------------------------------------------------------------

    def refuse_leased(self, units: Iterable[Unit]) -> None:
        """Check that nobody uses the parameters of `units`, which are about to be written.

        Raises:
            StateError: somebody does; names the unit.
        """
        for unit in units:
            if self.copies.params[unit.index].readers:
                raise StateError(
                    f"parameters of {unit.name}: cannot be written while they are in use; leave the engine.gather "
                    "block, or the forward, first"
                )

    def refuse_in_use(self, units: Iterable[Unit]) -> None:
        """Check that the parameters of `units` can be updated.

        Raises:
            StateError: somebody uses them, views device memory that would be replaced, or has changed a gradient
                behind the engine's back; names the unit.
        """
        units = list(units)
        self.refuse_leased(units)
        for unit in units:
            if self.gradients_there is not None:
                self.gradients_there.parts(unit, 0, unit.numel)
        if not self.device.addressable or self._conductor is not None:
            for unit in units:
                self.working.refuse_borrowed(self.copies.params[unit.index])

    # --- more of the drive -------------------------------------------------------------------------------------------

    def lengthen(self, size_bytes: int) -> None:
        """Make the swap files `size_bytes` long together, or as long as the budget allows; never shorter.

        Those of activations stay as they are.

        Raises:
            swap.SwapFullError: the drive has no room; nothing has changed.
            swap.SwapError: another I/O error.
        """
        claim, budget = self._arena_claims[Tier.NVME], self.budgets[Tier.NVME]
        before, apart = claim.size_bytes, self.plan.apart_bytes
        size_bytes = min(size_bytes + apart, before + budget.free_bytes)
        if self.store is None or size_bytes <= before:
            return
        claim.resize(size_bytes)
        try:
            self.store.grow(size_bytes - apart)
        except BaseException:
            claim.resize(before)
            raise

    # --- giving memory back for a while -----------------------------------------------------------------------------

    def content(self, tiers: Container[Tier]) -> list[Buffer]:
        """Return the memory of `tiers` that has the content of shards at home there, in an order that stays."""
        homes = [
            shard.home_buffer
            for shard in self.copies
            if shard.home_buffer is not None and shard.home in tiers and shard.state is not State.EMPTY
        ]
        there = self.gradients_there if Tier.DEVICE in tiers else None
        return homes + (there.buffers() if there is not None else [])

    def release(self, tiers: Iterable[Tier]) -> None:
        """Return the memory of `tiers`: its content is lost; nothing may be in flight."""
        self.device.synchronize()
        for tier in tiers:
            arena, claim = self._arenas[tier], self._arena_claims[tier]
            if tier is Tier.HOST and self.store is not None and arena.size_bytes:
                self.store.unregister_buffer(arena.base_address)
            arena.release()
            if tier is Tier.DEVICE and self.gradients_there is not None:
                self.gradients_there.put_down()
            self._put_down[tier] = claim.size_bytes
            claim.resize(0)
        self.device.trim()

    def _touch_buffers(self) -> None:
        for buffer in (*self.staging, self.activations):
            touch(buffer)

    def take_again(self, tiers: Iterable[Tier]) -> None:
        """Have the memory of `tiers` again, with any content.

        Raises:
            BudgetError: it is gone; nothing was taken.
        """
        taken: list[Tier] = []
        try:
            for tier in tiers:
                arena, size_bytes = self._arenas[tier], self._put_down[tier]
                self._arena_claims[tier].resize(size_bytes)
                taken.append(tier)
                free_bytes = self.device.free_bytes() if self.device.addressable else size_bytes
                if free_bytes < size_bytes:
                    raise BudgetError(
                        f"{tier.value} budget: {format_bytes(size_bytes)} have to be taken again but the machine has "
                        f"{format_bytes(free_bytes)} free; give memory back elsewhere"
                    )
                moved = arena.take_again(self.device.arena if tier is Tier.DEVICE else self.device.host_arena)
                self.copies.move_homes(tier, moved)
                if tier is Tier.DEVICE and self.gradients_there is not None:
                    self._take_gradients_again(self.gradients_there, moved, size_bytes)
                if tier is Tier.HOST and self.store is not None and arena.size_bytes:
                    self.store.register_buffer(arena.base_address, arena.size_bytes)
        except BaseException:
            self.release(taken)
            raise
        for region in self.copies.regions.values():  # what is resident is measured: it shall not grow later
            if region.whole.tier in taken and (self.device.addressable or region.whole.tier is Tier.HOST):
                touch(region.whole)
        self.copies.touch_empty({tier: self._arenas[tier] for tier in taken})
        if Tier.HOST in taken:
            self._touch_buffers()
        self.device.synchronize()  # work of the memory's last owner may be queued

    def _take_gradients_again(self, there: GradientsOnDevice, moved: int, limit_bytes: int) -> None:
        try:
            there.take_again(moved)
        except RuntimeError as error:
            full = self.device.out_of_memory(error, what="gradients that wait", limit_bytes=limit_bytes, held={})
            raise (full or error) from error

    # --- the end ----------------------------------------------------------------------------------------------------

    def drop_training_state(self) -> None:
        """Give the memory of gradients and optimizer states back, ahead of :meth:`close`."""
        host = self._arenas[Tier.HOST]
        if self.store is not None and host.size_bytes:  # pages that the drive may write to are not given back
            self.store.unregister_buffer(host.base_address)
        if self.gradients_there is not None:
            self.gradients_there.put_down()
        for shard in self.copies:
            if shard.role is not Role.PARAM:
                self._drop(shard)

    def drop_parameters(self, index: int) -> None:
        """Give the memory of a unit's parameters back, ahead of :meth:`close`; not where somebody views it."""
        if self.bound.borrowed(index):
            return
        if index in self.bound:
            self.working.unbind_lost(self.copies.params[index])
        self._drop(self.copies.params[index])

    def _drop(self, shard: Shard) -> None:
        self.copies.discard(shard)
        if shard.home_buffer is not None:
            self._arenas[shard.home].discard(shard.home_buffer)
        if shard.spare_buffer is not None:
            self._arenas[Tier.HOST].discard(shard.spare_buffer)

    def close(self) -> None:
        """Drop everything and return the memory. Idempotent."""
        with contextlib.ExitStack() as last:  # all of it, whatever fails on the way
            for claim in self._claims:
                last.callback(claim.close)
            last.callback(self._close_memory)
            last.callback(self.device.synchronize)
            last.callback(self.mover.close)
            last.callback(self.copies.close)
            if self._conductor is not None:
                last.callback(self._conductor.close)  # before: what is on its way comes, or fails
            last.callback(self.worker.close)
            if self.shared is not None:
                last.callback(self.shared.close)

    def _close_memory(self) -> None:
        busy = [*self.working.close(), *self.copies.strays()]
        if self.gradients_there is not None:
            self.gradients_there.put_down()
        with contextlib.ExitStack() as last:
            last.callback(self._close_arenas, busy)
            if self.store is not None:
                last.callback(self.store.close)

    def _close_arenas(self, busy: Sequence[Callable[[], bool]]) -> None:
        written = self.ranks.unfinished or is_memory_held()
        with contextlib.ExitStack() as last:
            for arena in self._arenas.values():
                last.callback(arena.close, busy, written=written)

    # --- looking at it ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants of every shard; used by tests and after resets.

        Raises:
            InternalError: one does not hold.
        """
        if any(home.grad is Tier.NVME for home in self.plan.homes):
            self.gradients.await_copies()  # beside an accelerator, a thread sends them there
        self.copies.check()
        self.working.check()

    @property
    def store_bytes(self) -> int:
        """Bytes of the swap files together."""
        return 0 if self.store is None else self.store.capacity_bytes

    def used_bytes(self) -> dict[str, int]:
        """Return bytes in use per tier: device arena and activations, host arena, occupied swap space."""
        used = {tier.value: self.budgets[tier].used_bytes for tier in Tier}
        used[Tier.NVME.value] = self.store.used_bytes if self.store is not None else 0
        return used

    def dump(self) -> str:
        """Return the state of every shard that is not simply at home, for error messages."""
        lines = [f"tiers: {self.used_bytes()}"]
        for shard in self.copies:
            if shard.state not in (State.EMPTY, State.STORED) or shard.readers or shard.writing:
                borrowed = shard.role is Role.PARAM and self.bound.borrowed(shard.unit.index)
                lines.append("  " + shard.describe() + (", borrowed" if borrowed else ""))
        return "\n".join(lines)
