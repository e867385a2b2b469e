"""The gate to one engine's memory: everybody who uses or changes shards comes through here.

Owns the order of things between those who use parameters, the updates that the last step has left, and those that are
made ahead of the next one; and the schedule that prefetching follows. What it asks is below:
:mod:`offload.shards.tiers` has the memory, :mod:`offload.shards.forward_updates` and
:mod:`offload.shards.backward_updates` have the updates. Knows neither modules nor hyper-parameters. Next:
:mod:`offload.module.hooks` asks for parameters.

Called from one thread at a time: the one that computes, or the one that runs the optimizer step while the former waits.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Container, Iterable, Iterator, Mapping

import torch

from offload.distributed.ranks import OneRank, Ranks
from offload.errors import ASLEEP, PARTS, BudgetError, RanksError, StateError
from offload.interrupt import Deferral
from offload.memory.budget import Budget, Tier
from offload.memory.device import Device
from offload.memory.transfer import LeftToWhoNeedsIt
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.schedule import PREFETCH_WINDOW, Schedule, Schedules
from offload.planning.units import Unit
from offload.shards.backward_updates import BackwardUpdates, Recipe
from offload.shards.bound import Binder, Form
from offload.shards.commits import RECORD_KEYS, Commits, Record
from offload.shards.copies import Lease
from offload.shards.device_updates import DeviceUpdates
from offload.shards.forward_updates import ForwardUpdates
from offload.shards.held import Held
from offload.shards.leases import Access, Leases
from offload.shards.prefetching import Prefetching
from offload.shards.read_ahead import ReadAhead
from offload.shards.rewritten import Rewritten
from offload.shards.shard import Shard, State
from offload.shards.stream import Chunk, stream
from offload.shards.tiers import Tiers
from offload.sizes import format_bytes
from offload.stats import Counters
from swap import SwapStore

logger = logging.getLogger(__name__)


class Manager:
    """Memory of one engine. See the module's text.

    Attributes:
        tiers: the memory, and its parts: `copies`, `bound`, `working`, `gradients`, `counters`, `units`.
        forward: updates that the last step has left to do.
        backward: updates that the next step may have no need to do.
        ahead: states that the next step's first updates need, read before it.
        on_device: updates that the device makes.
        commits: of a durable run; None where nothing is committed.
        may_hide_parameters: whether any unit's parameters are away at times: at home elsewhere, or old after a step.
        overwrites: how often somebody has begun to write content outside of steps.
        safe_point: held while something is half done: hands Ctrl-C on at its end.
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
        safe_point: Deferral,
        prefetch: bool = True,
        record: Record | None = None,
        ranks: Ranks | None = None,
    ) -> None:
        """Take the memory that the plan wants.

        Args:
            plan: what lives where.
            device: where compute runs.
            budgets: of all tiers.
            store: the swap store; None where nothing lives on NVMe.
            binder: rebinds parameters.
            counters: of bytes and seconds.
            deadline_s: after which an operation counts as lost.
            safe_point: see above.
            prefetch: bring parameters before they are asked for.
            record: of a durable run, beside what the store has; None where nothing is committed.
            ranks: who trains together; None for one process.

        Raises:
            BudgetError: a budget has less than the plan wants.
        """
        self.tiers = Tiers(
            plan,
            device,
            budgets,
            store,
            binder,
            counters,
            deadline_s=deadline_s,
            reclaim=self._finish_open_updates,
            ranks=OneRank() if ranks is None else ranks,
        )
        self.units = self.tiers.units
        self.copies, self.gradients = self.tiers.copies, self.tiers.gradients
        self.bound, self.working = self.tiers.bound, self.tiers.working
        self._schedules = Schedules([unit.index for unit in self.units])
        self.safe_point = safe_point
        self.forward = ForwardUpdates(self.tiers, safe_point, self._schedules)
        self.backward = BackwardUpdates(self.tiers, safe_point)
        self.ahead = ReadAhead(self.tiers, safe_point)
        self._away: list[int] | None = None  # while memory is given back: units that are at home on the device
        self._refusal = ASLEEP
        self._held: Held | None = None  # what somebody has asked to hold last
        self.overwrites = 0
        self._rewritten = Rewritten(self.tiers)
        self.on_device = DeviceUpdates(self.tiers)
        self.commits: Commits | None = None
        if store is not None and record is not None:
            self.commits = Commits(store, record, safe_point, counters, self.tiers.ranks)
        self._streams_parameters = Role.PARAM in self.copies.regions
        waits_for_updates = any(unit.trainable and not plan.stays(unit) for unit in self.units)
        self.may_hide_parameters = self._streams_parameters or waits_for_updates
        others = store is not None or plan.request.world_size > 1  # a drive, or ranks: whose parts come one by one
        self._always_has_more = self._streams_parameters or (waits_for_updates and others)
        self._is_asynchronous = not device.addressable  # compute: it uses a unit later than the host asks for it
        self._is_sliced = plan.request.slices_parameters
        self._tolerant = LeftToWhoNeedsIt("prefetch")
        self._prefetching = Prefetching(self.tiers, self.forward, self.backward, wanted=prefetch)

    # --- parameters -------------------------------------------------------------------------------------------------

    @property
    def schedule(self) -> Schedule:
        """That of the pass that is under way."""
        return self._schedules.current

    @property
    def hides_parameters(self) -> bool:
        """Whether any unit's parameters may be away now, or until the next step."""
        return self._streams_parameters or self.forward.hides_any

    @property
    def has_more_to_do(self) -> bool:
        """Whether a module's forward is a moment to go on with transfers, or with updates."""
        if self._always_has_more or not self.may_hide_parameters:
            return self._always_has_more
        return self.forward.active or self.gradients.any_completed or self.backward.has_more_to_do

    def acquire(self, index: int) -> Lease:
        """Return a READ lease on unit `index`'s parameters on the device, fetching them if need be."""
        self.require_awake()
        shard = self.copies.params[index]
        if self._is_asynchronous:
            self.working.release_idle()
        self._make_resident(shard)
        if self._is_asynchronous:
            self.working.use(shard)
        lease = self.copies.lease(shard)  # prefetching must not evict what was asked for
        if self._prefetching.active:
            try:
                with self._tolerant:
                    self.prefetch()
            except BaseException:
                lease.close()
                raise
        return lease

    def discard_working_copy(self, index: int) -> None:
        """Drop what was changed in a working copy: the home holds the content."""
        shard = self.tiers.param(index)
        if shard.state is State.RESIDENT and not shard.readers and not self.bound.borrowed(index):
            self.working.evict(shard)

    def note_use(self, index: int) -> None:
        """Tell the schedule of a use that will come without a lease, if the unit is here for it."""
        if index in self.bound:
            self.schedule.use(index)

    def view_of(self, index: int, form: Form, *, aside: bool = False) -> torch.Tensor:
        """Return a tensor over a unit's parameters on the device, which keeps them there as long as it lives.

        Args:
            index: unit.
            form: of the tensor.
            aside: other units may be wanted while the tensor lives, so the unit must not lie in their way.
        """
        if self.hides_parameters or index not in self.bound:
            self._schedules.begin(training=True)  # only backward asks for it
            lease = self.acquire(index)
            if aside:
                self.working.lay_aside(self.tiers.param(index))
            lease.close()
        else:
            self.tiers.counters.hits += 1
            if self._is_asynchronous:
                self.working.use(self.copies.params[index])
        return self.bound.view(index, form)

    def begin_pass(self, *, training: bool) -> None:
        """Note that a forward begins: evaluation has its own schedule, each pass a cycle of it."""
        self.require_awake()
        self._schedules.begin(training=training)
        if not training:
            self.schedule.restart()
        elif self.commits is not None:
            self.commits.seal()
            self._try_commit()

    def restart_schedule(self) -> None:
        """Note that a training step has ended: what was used in it predicts the next one."""
        self._schedules.begin(training=True)
        self.schedule.restart()
        self._prefetching.try_again()

    def order_of_use(self) -> list[int]:
        """Return per unit its turn in the training step that begins next, as far as is known."""
        training = self._schedules.training
        order = list(training.upcoming(len(training.trace)))
        turn = {index: position for position, index in enumerate(order)}
        return [turn.get(unit.index, len(order) + unit.index) for unit in self.units]

    def prefetch(self, uses: int = PREFETCH_WINDOW) -> None:
        """Start fetching the units of the next `uses`, as far as units used later give way."""
        self._prefetching.look_ahead(self.schedule, uses)

    def _make_resident(self, shard: Shard) -> None:
        self.schedule.use(shard.unit.index)
        self._bring(shard)

    def _bring(self, shard: Shard) -> None:
        index, counters = shard.unit.index, self.tiers.counters
        missed = self.forward.active and self._require_update(shard)
        assert not self.bound.hides(index), shard.describe()
        if index in self.bound:
            counters.hits += not missed
            return
        self.copies.forgive(shard)
        if shard.state is State.FETCHING and not self.copies.is_late(shard):
            counters.hits += not missed
            self.working.wait_for_prefetch(shard)
            if index in self.bound:
                return
        begin, begun = time.perf_counter(), self.tiers.mover.begin_waiting()
        if shard.state is State.FETCHING:
            counters.stalls += 1
            self.working.wait_for_prefetch(shard)
        if shard.state is not State.RESIDENT:
            if shard.state is not State.STORED:
                raise self._no_content(shard)
            self._count_fetch(index)
            with self._telling_ranks():
                self.working.start_fetch(shard, self.schedule, required=True)
                self.working.wait_for_fetch(shard)
        self.working.use(shard)  # before it is known how long compute stands still
        counters.stall_seconds += time.perf_counter() - begin
        self.tiers.mover.end_waiting(f"parameters: {shard.unit.name}", begun, begin)

    def _count_fetch(self, index: int) -> None:
        """Count a fetch that starts where the unit is used: a miss, unless one was asked for and had no room yet."""
        if index == self._prefetching.held_up:
            self.tiers.counters.stalls += 1
        else:
            self.tiers.counters.misses += 1

    @staticmethod
    def _no_content(shard: Shard) -> StateError:
        return StateError(
            f"parameters of {shard.unit.name}: expected content but got state {shard.state.value}; "
            "load them again with engine.load_state_dict"
        )

    @contextlib.contextmanager
    def _telling_ranks(self) -> Iterator[None]:
        """Tell other ranks that have slices of the same unit what has failed here: they would wait for this one."""
        try:
            yield
        except BaseException as error:
            if self._is_sliced and not isinstance(error, RanksError):
                self.tiers.ranks.fail(error)
            raise

    def _require_update(self, shard: Shard) -> bool:
        """Make a unit's update, if it is due; returns whether a fetch had to be started for it, which is a miss."""
        index = shard.unit.index
        absent = shard.state is State.STORED and not shard.stays
        missed = index in self.forward and absent and self._prefetching.may_fetch(shard)
        if missed:
            self._count_fetch(index)
            self.working.start_fetch(shard, self.schedule, required=True)
        self.forward.require(index)
        return missed

    # --- gradients --------------------------------------------------------------------------------------------------

    def add_gradient(
        self, index: int, slot: int, gradient: torch.Tensor, *, final: bool, backward_pass: int = 0
    ) -> None:
        """Add one parameter's gradient to what has arrived since the last step; see :meth:`Gradients.add`."""
        self.require_awake()
        if self.commits is not None:
            self.finish_step()
        self.forward.make()  # what it keeps or has on its way in this memory is about to be overwritten
        while not self.gradients.is_there(index) and self.gradients.await_next(gradient.nbytes):
            self.backward.go_on()
        if final and self.gradients.is_complete(index):
            self.backward.withdraw(index)
        self.gradients.add(index, slot, gradient, final=final, backward_pass=backward_pass)

    def overwrite_gradient(self, index: int, slot: int, content: torch.Tensor | float) -> None:
        """Let a parameter's gradient be `content`; see :meth:`Gradients.overwrite`."""
        self.require_awake()
        self.finish_step()
        self.backward.withdraw(index)
        self.gradients.overwrite(index, slot, content)

    def multiply_gradient(self, index: int, slot: int, factor: float) -> None:
        """Multiply what has arrived of a parameter's gradient."""
        self.require_awake()
        self.backward.withdraw(index)
        self.gradients.multiply(index, slot, factor)

    def forget_gradient(self, index: int, slot: int) -> None:
        """Forget what has arrived of a parameter's gradient."""
        self.require_awake()
        self.backward.withdraw(index)
        self.gradients.forget(index, slot)

    def drop_gradients(self) -> None:
        """Forget all gradients that have arrived since the last step."""
        self._withdraw_early()
        self.gradients.drop()

    # --- updates ----------------------------------------------------------------------------------------------------

    def advance_updates(self, guess: Callable[[], Recipe | None]) -> None:
        """Let updates go on as far as nothing has to be waited for; `guess` as in :meth:`BackwardUpdates.advance`."""
        if not self.may_hide_parameters and self.commits is None:
            return  # steps leave nothing to do
        settled = self.forward.settled
        self.forward.advance()
        if self.forward.settled != settled and self._prefetching.active:
            self._prefetching.try_again()  # what is home can leave, and what is updated can come
            with self._tolerant:
                self.prefetch()
        if self.commits is not None:
            self._try_commit()
        self._advance_early(guess)

    def _advance_early(self, guess: Callable[[], Recipe | None]) -> None:
        """Let what can be done before the step go on: updates, or if the step is likely to clip, their reads."""
        come = self.gradients.take_completed()  # once: more may come meanwhile
        if self.forward.active and come and self.backward.has_room and guess() is not None:
            self.forward.finish()  # staging is needed
        self.backward.advance(guess, come)
        order, completed = self._schedules.training.order, self.backward.completed
        if self.backward.rests:
            self.ahead.advance(order, completed, self.forward.idle_slot)
        elif self.backward.is_ending:
            left = (index for index in order if not self.backward.has_begun(index))
            self.ahead.advance(left, completed, self.backward.idle_slot)

    def await_gradients(self, guess: Callable[[], Recipe | None]) -> None:
        """Wait for gradients on their way, and let updates go on with what has come."""
        while self.gradients.await_next():
            self._advance_early(guess)

    def finish_step(self) -> None:
        """Finish the last step, for what is to become the next one; commit it where each one is.

        Raises:
            swap.SwapError: an I/O error, or it could not be committed.
            StateError: content was lost, so that there is nothing to commit.
        """
        self.forward.finish()
        if self.commits is not None:
            self.commits.seal()
            self.commit()

    def commit(self) -> None:
        """Commit what is sealed of a durable run and is home; raises as :meth:`finish_step`."""
        if self.commits is None or not self.commits.due or self.forward.active:
            return
        lost = next((shard for shard in self.copies if self.copies.is_lost(shard)), None)
        if lost is not None:
            raise StateError(
                f"durable run: cannot be committed, for the content of {lost.unit.name} is lost; load it again with "
                "engine.load_state_dict or engine.load_checkpoint, or close the engine and open the run again"
            )
        self.commits.make()
        self._rewritten.note_commit()

    def _try_commit(self) -> None:
        """Commit if a step is home; what fails is met by whoever begins to change content."""
        if self.commits is None or self.commits.failed:
            return
        try:
            self.commit()
        except (OSError, StateError) as error:
            logger.warning("commit: %s", str(error))

    def finish_updates(self) -> None:
        """Finish the last step and leave the next: whoever looks at the shards from outside comes through here.

        Raises:
            swap.SwapError: an I/O error. Where nothing was lost by it, this may be called again.
        """
        self.forward.finish()
        self._try_commit()
        self._withdraw_early()

    def _withdraw_early(self) -> None:
        """Undo what was done before the step."""
        self.ahead.drop(keep_slots=not self.backward.has_lent)
        self.backward.withdraw_all()

    def stream(
        self,
        units: Iterable[Unit],
        visit: Callable[[Chunk], None],
        *,
        reads: frozenset[Role],
        writes: frozenset[Role] = frozenset(),
        span: tuple[int, int] | None = None,
        keep_early: bool = False,
        widely: bool = False,
        parts: bool = False,
        slices: bool = False,
    ) -> None:
        """Call `visit` for every chunk of `units`, in order, with the roles in `reads | writes` addressable.

        Where several ranks have slices of parameters, those that are only read are gathered: a chunk is a whole unit,
        and all ranks come here, or to where they meet. Those that are written are this rank's slices, on all ranks.

        Args:
            units: what to run over.
            visit: works on a chunk in place; chunks of `reads` hold the current content (states that have none yet
                count as zero moments and a master equal to the parameter).
            reads: roles whose content is needed. The state roles go together, in one record on NVMe.
            writes: roles that `visit` changes as a whole; they are written home.
            span: of a unit's elements, where only chunks that have some of them are to be read; None for all.
            keep_early: updates that are made during backward stay as they are; not where anything is written.
            widely: what passes through staging takes the idle memory of gradients, too, so that more is on its way.
            parts: `visit` does with the gradients and states of what this rank owns; others have no address.
            slices: only chunks that have some of what this rank owns are to be read.

        Raises:
            StateError: parameters that are to be written are in use, or several ranks have a part each of what is
                wanted whole; nothing was touched.
            swap.SwapError: an I/O error or a missed deadline. What was to be written of units that `visit` has seen is
                then FAILED; the others are as they were.
            Exception: what `visit` raised, likewise.
        """
        self.require_awake()
        units = list(units)
        assert not (writes and (span or slices))
        if self.tiers.shared is not None and not parts and reads | writes != {Role.PARAM}:
            raise StateError(PARTS)
        if self._is_sliced and not (parts or writes):
            self._visit_whole(units, visit)
            return
        if Role.PARAM in writes:
            self.tiers.refuse_leased(units)
            if self._is_sliced:  # nobody gathers half of it
                self.tiers.ranks.agree(f"writing parameters of {', '.join(unit.name for unit in units)}")
        if keep_early:
            assert not writes
            self.forward.finish()
            self.backward.rest()
            self.ahead.drop()
        else:
            self.finish_updates()
        if writes:
            self.commit()  # what is written now belongs to the next one
            if self.commits is not None and Role.PARAM in writes:
                self.commits.note_write()
            self._await_release(units)
            if self.commits is not None and self.commits.has_made:
                self._rewritten.make_room(units)
            self.overwrites += 1
        stream(self.tiers, units, visit, reads=reads, writes=writes, span=span, widely=widely, slices=slices)

    def _visit_whole(self, units: Iterable[Unit], visit: Callable[[Chunk], None]) -> None:
        """Call `visit` with all of each unit's parameters, of which each rank has a slice: all ranks come here."""
        self.finish_updates()
        for unit in units:
            shard = self.tiers.param(unit.index)
            addresses, leases = {Role.PARAM: self._whole_address(shard)}, Leases(self.tiers)
            lease = self.copies.lease(shard)
            try:
                visit(Chunk(unit, 0, 0, unit.numel, addresses, Access(addresses, fresh_states=False), leases))
            finally:
                lease.close()

    def _whole_address(self, shard: Shard) -> int:
        """Return the host's address of all of a unit, of which each rank has a slice, until another one is wanted."""
        if not self._is_asynchronous:
            self._bring(shard)
            assert shard.work_buffer is not None, shard.describe()
            return shard.work_buffer.address
        self.copies.forgive(shard)
        if shard.state in (State.EMPTY, State.FAILED):
            raise self._no_content(shard)
        with self._telling_ranks():
            return self.tiers.read_whole(shard.unit.index)

    def rest(self, tiers: Container[Tier]) -> None:
        """Have nothing in the memory of `tiers` but what is at home there, until :meth:`go_on`.

        Raises:
            StateError: somebody views parameters on the device, or has changed them.
            swap.SwapError: an I/O error.
        """
        self.finish_updates()
        self.gradients.read_sums()
        if Tier.HOST in tiers:
            self.copies.await_late()
            self.gradients.empty_pool()
        self._away = self.working.leave()

    def go_on(self) -> None:
        """Undo :meth:`rest`: the content is there again."""
        away, self._away = self._away, None
        self.working.come_back(away or ())

    def give_up(self, why: str) -> None:
        """Refuse everything but to be closed, with this text."""
        self._away, self._refusal = [], why

    def require_awake(self) -> None:
        """Refuse to use memory that was given back.

        Raises:
            StateError: the engine is asleep, or was given up.
        """
        if self._away is not None:
            raise StateError(self._refusal)

    def hold(self) -> Held:
        """Finish the last step, and hold what lives on NVMe as it is then, until it is released.

        Raises:
            BudgetError: the swap files have no room for versions that are held and those that training writes.
            swap.SwapError: an I/O error.
        """
        assert self._held is None or self._held.released, "one at a time"
        self.forward.finish()
        for unit in self.units:
            self.copies.forgive(self.tiers.param(unit.index))
        held = Held(self.tiers)
        plan = self.tiers.plan
        needed = held.changing_bytes(unit for unit in self.units if unit.trainable)
        if needed > plan.held_bytes:
            held.release()
            raise BudgetError(
                f"nvme budget: a checkpoint that is copied while training goes on needs {format_bytes(needed)} "
                f"({needed} bytes) of the swap files for what it copies but the plan has {plan.held_bytes} bytes for "
                "that; make the engine with background_checkpoints=True, or save with wait=True"
            )
        self._held = held
        return held

    def _await_release(self, units: Iterable[Unit]) -> None:
        """Wait until nothing is held, if frozen units are to be written: the swap files have no third version of it."""
        if self._held is not None and any(not unit.trainable and self._held.has(unit, Role.PARAM) for unit in units):
            self._held.await_release()

    def _finish_open_updates(self) -> None:
        occupied = (State.DIRTY, State.FLUSHING)
        if any(self.tiers.param(unit.index).state in occupied for unit in self.units):
            self.forward.make_room()

    # --- life and death ---------------------------------------------------------------------------------------------

    def take_up(self, sides: Container[int]) -> None:
        """Let what an earlier process has committed be the content of all units; `sides` is :meth:`Copies.sides`.

        Raises:
            swap.SwapCorruptError: a part of it is missing.
        """
        for unit in self.units:
            self.copies.find_stored(unit.index, side=unit.index in sides)
        self.copies.forget_others(RECORD_KEYS)

    def reset(self) -> None:
        """Return to a settled state after an exception in forward or backward.

        Leases are dropped, transfers awaited, working copies and gradients discarded. Parameters and optimizer states
        are untouched: they are only ever written inside a step.
        """
        with contextlib.suppress(Exception):  # whoever needs what the step has left to do meets the error again
            self.finish_updates()
        for unit in self.units:
            shard = self.tiers.param(unit.index)
            self.copies.drop_leases(shard)
            if shard.state is State.FETCHING:
                with contextlib.suppress(Exception):  # the reader of the parameter will meet the error again
                    self.working.wait_for_fetch(shard)
            self.copies.forgive(shard)
        with contextlib.suppress(Exception):  # they are dropped
            self.gradients.await_copies()
        self.drop_gradients()
        self.restart_schedule()

    def close(self) -> None:
        """Drop everything and return the memory. Idempotent."""
        with contextlib.ExitStack() as last:  # all of it, whatever state it is in
            last.callback(self.tiers.close)
            if self.commits is not None:
                last.callback(self.commits.close)
            self._withdraw_early()

    def check(self) -> None:
        """Check the invariants of every shard; used by tests and after resets.

        Raises:
            InternalError: one does not hold.
        """
        self.tiers.check()

    def has_lost_content(self) -> bool:
        """Tell whether a part of a step was lost, or parameters or states by a failure while they were written."""
        if self.forward.failure is not None:
            return True
        return any(self.copies.is_lost(shard) for shard in self.copies if shard.role is not Role.GRAD)
