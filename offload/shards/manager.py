"""The memory manager: one engine's memory, and the right to use it.

Owns the arenas, the leases on parameters and the schedule that prefetching follows. Its parts do the rest:
:mod:`offload.shards.copies` writes shard state and owns the transfers, :mod:`offload.shards.working_set` brings
parameters to the device, :mod:`offload.shards.gradients` takes gradients; :mod:`offload.shards.leases` leases shards to
be streamed over. Knows neither modules nor hyper-parameters. Next: :mod:`offload.module.hooks` asks for parameters,
:mod:`offload.shards.stream` runs over shards.

Called from one thread at a time: the one that computes, or the one that runs the optimizer step while the former waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterable
from typing import Protocol

import torch

from offload.errors import StateError
from offload.memory.tiers import Arena, Budget, Tier
from offload.memory.transfer import CpuMover, CudaMover, Mover
from offload.planning.placement import Plan
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.copies import Copies, touch
from offload.shards.gradients import Gradients
from offload.shards.schedule import Schedule
from offload.shards.shard import Shard, State
from offload.shards.working_set import Binder, WorkingSet
from offload.stats import Counters
from swap import SwapStore

logger = logging.getLogger(__name__)

PREFETCH_WINDOW = 64  # uses of the schedule that are looked at
PATIENCE = 4  # acquisitions of one unit after which room for a prefetch is looked for again


class Updates(Protocol):
    """Updates of parameters that a step has fixed and that are still to be made, unit by unit.

    Attributes:
        failure: what a part of the step was lost by; None where all is well.
    """

    failure: BaseException | None

    def __contains__(self, index: int) -> bool:
        """Tell whether the unit's parameters are still those of before the step."""

    def require(self, index: int) -> None:
        """Make the update of a unit, whose parameters are about to be used, if it has not been made."""

    def begin(self) -> None:
        """Start the first reads."""

    def advance(self) -> None:
        """Do what can be done without waiting."""

    def finish_open(self) -> None:
        """Make the updates that are under way, so that nothing of them lies in anybody's way."""

    def finish(self) -> None:
        """Make all updates and wait until they are home."""

    def check(self) -> None:
        """Raise what went wrong, if anything did."""


class Early(Protocol):
    """Updates that are made during backward, aside of the content, in case the step will make them as well."""

    def advance(self) -> None:
        """Do what can be done without waiting."""

    def rest(self) -> None:
        """Finish those that are begun: the staging buffers are free then, and all is as it was."""

    def withdraw_all(self) -> None:
        """Undo them."""


class Manager:
    """Memory of one engine. See the module's text.

    Attributes:
        copies, working, gradients: its parts.
        staging: buffers of host memory through which chunks pass.
        versions: per unit, of the parameters' content: raised whenever they are written.
        hides_parameters: whether any unit's parameters are away at times: at home elsewhere, or old after a step.
        resets: times that all leases were dropped.
        updates: what the last step has left to do; None when that is done.
        early: what the next step may have no need to do; None where nothing is done early.
    """

    def __init__(
        self,
        plan: Plan,
        device: torch.device,
        budgets: dict[Tier, Budget],
        store: SwapStore | None,
        binder: Binder,
        counters: Counters,
        *,
        deadline_s: float,
        prefetch: bool = True,
    ) -> None:
        self.plan = plan
        self.units = plan.request.units
        self.device = device
        self.budgets = budgets
        self.store = store
        self.counters = counters
        self.deadline_s = deadline_s
        self.resets = 0
        self.updates: Updates | None = None
        self.early: Early | None = None
        self.versions = [0] * len(self.units)
        order = [unit.index for unit in self.units]
        self._schedules = {True: Schedule(order + order[::-1]), False: Schedule(order)}
        self.schedule = self._schedules[True]

        sizes = {tier: plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) for tier in Tier}
        for tier in Tier:
            budgets[tier].reserve("arena", sizes[tier])
        budgets[Tier.HOST].reserve("optimizer", plan.request.own_bytes)
        cpu, host_device = torch.device("cpu"), device.type == "cpu"
        host = Arena(Tier.HOST, sizes[Tier.HOST], cpu, page_locked=not host_device)
        self._arenas = {Tier.DEVICE: Arena(Tier.DEVICE, sizes[Tier.DEVICE], device), Tier.HOST: host}
        self.copies = Copies(plan, self._arenas, store, deadline_s=deadline_s, dump=self.dump)
        self._params = [self.copies.of(unit.index, Role.PARAM) for unit in self.units]
        streams_parameters = Role.PARAM in self.copies.regions
        waits_for_updates = any(unit.trainable and not plan.stays(unit) for unit in self.units)
        self.hides_parameters = streams_parameters or waits_for_updates
        self._prefetches = prefetch and streams_parameters
        self._no_room_at = (self.schedule, -1)  # where in which schedule a prefetch found no room
        self._patience = 0
        self._sizes: dict[tuple[int, Role, int], int] = {}  # of ranges, as they have been asked for
        self._staging_bytes = plan.staging_slots * plan.staging_slot_bytes
        self.staging = [host.take(plan.staging_slot_bytes) for _ in range(plan.staging_slots)]
        for buffer in self.staging:
            touch(buffer)
        if host_device:
            self.mover: Mover = CpuMover(counters)
        else:
            half = plan.fetch_staging_bytes // 2
            fetch = [host.take(half) for _ in range(2)] if half else []
            self.mover = CudaMover(counters, device, fetch, host.take(plan.grad_staging_bytes), deadline_s)
        self.working = WorkingSet(
            plan.request, self.copies, self._arenas[Tier.DEVICE], budgets[Tier.DEVICE], self.mover, binder
        )
        self.gradients = Gradients(plan, self.copies, self.mover, deadline_s=deadline_s)
        self.gradients.finish_step = self.finish_step
        self.working.finish_open_updates = self._finish_open_updates
        if store is not None and host.size_bytes:  # registering page-locks: not for the region, which gives memory back
            store.register_buffer(host.base_address, host.size_bytes)

    # --- parameters -------------------------------------------------------------------------------------------------

    def acquire(self, index: int) -> None:
        """Take a READ lease on unit `index`'s parameters on the device, fetching them if need be."""
        shard = self._params[index]
        self._make_resident(shard)
        self.copies.lease(shard)  # prefetching must not evict what was asked for
        try:
            self.prefetch()
        except OSError as error:  # whoever needs what could not be fetched meets the error again
            logger.warning("prefetch: %s", error)
        except BaseException:
            self.copies.return_lease(shard)
            raise

    def release(self, index: int) -> None:
        """Return a lease."""
        self.copies.return_lease(self._params[index])

    def refuse_leased(self, units: Iterable[Unit]) -> None:
        """Check that nobody uses the parameters of `units`, which are about to be written.

        Raises:
            StateError: somebody does; names the unit.
        """
        for unit in units:
            if self._params[unit.index].readers:
                raise StateError(
                    f"parameters of {unit.name}: cannot be written while they are in use; leave the engine.gather "
                    "block, or the forward, first"
                )

    def refuse_in_use(self, units: Iterable[Unit]) -> None:
        """Check that the parameters of `units` can be updated.

        Raises:
            StateError: somebody uses them, or views device memory that would be replaced; names the unit.
        """
        units = list(units)
        self.refuse_leased(units)
        if self.device.type != "cpu":
            for unit in units:
                self.working.refuse_borrowed(self._params[unit.index])

    def discard_working_copy(self, index: int) -> None:
        """Drop what was changed in a working copy: the home holds the content."""
        shard = self._params[index]
        if shard.state is State.RESIDENT and not shard.readers and not self.working.borrowed(index):
            self.working.evict(shard)

    def note_use(self, index: int) -> None:
        """Tell the schedule of a use that will come without a lease, if the unit is here for it."""
        if index in self.working:
            self.schedule.use(index)

    def resident_storage(self, index: int, *, aside: bool = False) -> torch.UntypedStorage:
        """Return the device storage of a unit for a tensor that keeps it there as long as the tensor lives.

        Args:
            index: unit.
            aside: other units may be wanted while the tensor lives, so the unit must not lie in their way.
        """
        self.schedule = self._schedules[True]  # only backward asks for it
        self.acquire(index)
        if aside:
            self.working.lay_aside(self._params[index])
        self.release(index)
        return self.working.storage(index)

    def begin_pass(self, *, training: bool) -> None:
        """Note that a forward begins: evaluation has its own schedule, each pass a cycle of it."""
        self.schedule = self._schedules[training]
        if not training:
            self.schedule.restart()

    def order_of_use(self) -> list[int]:
        """Return per unit its turn in the training step that begins next, as far as is known."""
        order = list(self._schedules[True].upcoming(len(self._schedules[True].trace)))
        turn = {index: position for position, index in enumerate(order)}
        return [turn.get(unit.index, len(order) + unit.index) for unit in self.units]

    def prefetch(self) -> None:
        """Start fetching the units used next, as far as units used later give way."""
        if not self._prefetches:
            return
        here = (self.schedule, self.schedule.position)
        if here == self._no_room_at and self._patience:  # a unit has many modules: little has changed since the last
            self._patience -= 1
            return
        for index in self.schedule.upcoming(PREFETCH_WINDOW):
            shard = self._params[index]
            if shard.state is State.STORED and shard.home is not Tier.DEVICE and self._may_fetch(shard):
                if self.updates is not None and shard.home is Tier.NVME and self._late_bytes() >= self._staging_bytes:
                    return  # the drive has updates to bring first
                if not self.working.start_fetch(shard, self.schedule, required=False):
                    self._no_room_at, self._patience = here, PATIENCE - 1
                    return

    def _late_bytes(self) -> int:
        """Return the bytes of parameters that are on their way to the device."""
        fetched = (shard for shard in self.copies.in_flight(Role.PARAM) if shard.state is State.FETCHING)
        return sum(shard.size_bytes for shard in fetched if self.copies.is_late(shard))

    def _make_resident(self, shard: Shard) -> None:
        index = shard.unit.index
        self.schedule.use(index)
        if self.updates is not None:
            self._require_update(shard)
        assert not self.working.hides(index), shard.describe()
        if index in self.working:
            self.counters.hits += 1
            return
        begin = time.perf_counter()
        self.copies.forgive(shard)
        if shard.state is State.FETCHING:
            self.counters.stalls += 1
            self.working.finish_prefetch(shard)
        if shard.state is not State.RESIDENT:
            if shard.state is not State.STORED:
                raise StateError(
                    f"parameters of {shard.unit.name}: expected content but got state {shard.state.value}; "
                    "load them again with engine.load_state_dict"
                )
            self.counters.misses += 1
            self.working.start_fetch(shard, self.schedule, required=True)
            self.working.finish_fetch(shard)
        self.counters.stall_seconds += time.perf_counter() - begin

    # --- updates that a step has left to do -------------------------------------------------------------------------

    def updates_in_place(self, shard: Shard) -> bool:
        """Tell whether a working copy of PARAM is best fetched before an update: it is changed there and read once."""
        return shard.home is Tier.NVME and self.device.type == "cpu"

    def advance_updates(self) -> None:
        """Let the step go on as far as nothing has to be waited for."""
        if self.updates is not None:
            self.updates.advance()
        if self.early is not None:
            self.early.advance()

    def finish_step(self) -> None:
        """Finish the last step.

        Raises:
            swap.SwapError: an I/O error. Where nothing was lost by it, this may be called again.
        """
        if self.updates is not None:
            self.updates.finish()

    def finish_updates(self) -> None:
        """Finish the last step and leave the next: whoever looks at the shards from outside comes through here.

        Raises:
            swap.SwapError: an I/O error. Where nothing was lost by it, this may be called again.
        """
        self.finish_step()
        if self.early is not None:
            self.early.withdraw_all()

    def rest_updates(self) -> None:
        """Finish the last step and let the next one rest: whoever reads the shards and disturbs nothing comes here.

        Raises:
            swap.SwapError: as :meth:`finish_updates`.
        """
        self.finish_step()
        if self.early is not None:
            self.early.rest()

    def working_address(self, index: int) -> int | None:
        """Return the address of a unit's parameters on a device that is the CPU, None where they are not there."""
        shard = self._params[index]
        if self.device.type != "cpu" or shard.state is not State.RESIDENT or shard.work_buffer is None:
            return None
        return shard.work_buffer.address

    def _finish_open_updates(self) -> None:
        if self.updates is not None:
            self.updates.finish_open()

    def _may_fetch(self, shard: Shard) -> bool:
        """Tell whether the home's content is of use on the device."""
        pending = self.updates is not None and shard.unit.index in self.updates
        return not shard.writing and (not pending or self.updates_in_place(shard))

    def _require_update(self, shard: Shard) -> None:
        updates = self.updates
        assert updates is not None
        index = shard.unit.index
        if index in updates and shard.state is State.STORED and self.updates_in_place(shard) and not shard.writing:
            self.working.start_fetch(shard, self.schedule, required=True)
        updates.require(index)

    # --- life and death ---------------------------------------------------------------------------------------------

    def reset(self) -> None:
        """Return to a settled state after an exception in forward or backward.

        Leases are dropped, transfers awaited, working copies and gradients discarded. Parameters and optimizer states
        are untouched: they are only ever written inside a step.
        """
        self.resets += 1
        with contextlib.suppress(Exception):  # whoever needs what the step has left to do meets the error again
            self.finish_updates()
        for unit in self.units:
            shard = self._params[unit.index]
            self.copies.drop_leases(shard)
            if shard.state is State.FETCHING:
                with contextlib.suppress(Exception):  # the reader of the parameter will meet the error again
                    self.working.finish_fetch(shard)
            self.copies.forgive(shard)
        with contextlib.suppress(Exception):  # they are dropped
            self.gradients.settle()
        self.gradients.drop()
        self.restart_schedule()

    def restart_schedule(self) -> None:
        """Note that a training step has ended: what was used in it predicts the next one."""
        self.schedule = self._schedules[True]
        self.schedule.restart()

    def drop_training_state(self) -> None:
        """Give the memory of gradients and optimizer states back, ahead of :meth:`close`."""
        host = self._arenas[Tier.HOST]
        if self.store is not None and host.size_bytes:  # pages that the drive may write to are not given back
            self.store.unregister_buffer(host.base_address)
        for shard in self.copies:
            if shard.role is not Role.PARAM:
                self._drop(shard)

    def drop_parameters(self, index: int) -> None:
        """Give the memory of a unit's parameters back, ahead of :meth:`close`; not where somebody views it."""
        if self.working.borrowed(index):
            return
        if index in self.working:
            self.working.unbind_lost(self._params[index])
        self._drop(self._params[index])

    def _drop(self, shard: Shard) -> None:
        self.copies.discard(shard)
        if shard.home_buffer is not None:
            self._arenas[shard.home].discard(shard.home_buffer)

    def close(self) -> None:
        """Drop everything and return the memory. Idempotent."""
        if self.early is not None:
            self.early.withdraw_all()
        self.copies.close()
        self.mover.close()
        busy = [*self.working.close(), *self.copies.strays()]
        if self.store is not None:
            self.store.close()
        for arena in self._arenas.values():
            arena.close(busy)
        for tier in Tier:
            for name in ("arena", "optimizer"):
                self.budgets[tier].release(name, self.budgets[tier].reservations().get(name, 0))

    # --- looking at it ----------------------------------------------------------------------------------------------

    def check(self) -> None:
        """Check the invariants of every shard; used by tests and after resets.

        Raises:
            InternalError: one does not hold.
        """
        self.copies.check()
        self.working.check()

    def has_lost_content(self) -> bool:
        """Tell whether parameters or states were lost by a failure while they were written."""
        return any(self.copies.is_lost(shard) for shard in self.copies if shard.role is not Role.GRAD)

    def shard(self, index: int, role: Role) -> Shard | None:
        """Return a shard for inspection."""
        return self.copies.get(index, role)

    def chunk_bytes(self, unit: Unit, role: Role, begin: int, end: int) -> int:
        """Return the bytes of elements [begin, end) in `role`; `begin` is where a block of 8-bit states starts."""
        if role is Role.GRAD:
            return (end - begin) * self.gradients.dtype(unit).itemsize
        key = (unit.index, role, end - begin)
        size_bytes = self._sizes.get(key)
        if size_bytes is None:
            size_bytes = self._sizes[key] = self.plan.chunk_bytes(unit, role, end - begin)
        return size_bytes

    def used_bytes(self) -> dict[str, int]:
        """Return bytes in use per tier: device arena and activations, host arena, occupied swap space."""
        used = {tier.value: self.budgets[tier].used_bytes for tier in Tier}
        used[Tier.NVME.value] = self.store.used_bytes if self.store is not None else 0
        return used

    def dump(self) -> str:
        """Return the state of every shard that is not simply at home, for error messages."""
        lines = [f"step position {len(self.schedule.trace)} uses; tiers: {self.used_bytes()}"]
        for shard in self.copies:
            if shard.state not in (State.EMPTY, State.STORED) or shard.readers or shard.writing:
                borrowed = shard.role is Role.PARAM and self.working.borrowed(shard.unit.index)
                lines.append("  " + shard.describe() + (", borrowed" if borrowed else ""))
        return "\n".join(lines)
