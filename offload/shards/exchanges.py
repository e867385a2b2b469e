"""A micro-batch's gradients on their way: where they wait until all ranks have theirs, and when they are exchanged.

Owns that room, and the rounds in which ranks tell each other what they have. With stage 1 there is one round, when
backward has ended, and room for all. With stages 2 and 3 a unit leaves as soon as all ranks have its gradient: a thread
takes part in rounds while backward goes on. Where ranks meet units in other orders, what waits may need more room than
there is; it takes what the budget has left, and is refused by name where that is nothing.

Rounds and gathers of parameters have an order each, so none waits behind the other. But a rank that waits for rounds
may be what others' gathers wait for, before they can go on to a round: so it serves them meanwhile.

A unit is *settled* where nothing more will come of it: each parameter that backward can reach has its gradient, or
backward has ended. Next: :mod:`offload.distributed.rounds`, :mod:`offload.distributed.exchange`.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Protocol

import torch

from offload.distributed.exchange import KERNEL_DTYPE, Exchange, Part, share
from offload.distributed.ranks import Ranks
from offload.distributed.rounds import Rounds, Said, Standing
from offload.errors import BudgetError, StateError
from offload.kernels import cpu_adam
from offload.memory.arena import HOST, Arena, view_at
from offload.memory.budget import Claim, Tier
from offload.memory.region import Region
from offload.planning.plan import Plan
from offload.planning.units import Unit, Where
from offload.shards.copies import touch
from offload.stats import Counters
from offload.torch_private import storage_at

_DROPPED = "backward: its gradients were dropped while other ranks waited for them"


class Sums(Protocol):
    """Sums over micro-batches, of which this rank has its slices."""

    def arrived(self, index: int) -> list[bool]:
        """Return per parameter of a unit whether there is a sum of earlier micro-batches."""

    def address(self, index: int) -> int:
        """Return where this rank's slice of a unit's sum is, until another one is asked for."""

    def leave(self, index: int) -> None:
        """Note that nothing more will be added to a unit's sum in this micro-batch."""


class Exchanges:
    """The exchanges of one rank. See the module's text.

    Attributes:
        early: whether units leave during backward.
        summed: micro-batches in the sums, if there are any sums; those that a checkpoint had count as one.
    """

    def __init__(
        self,
        plan: Plan,
        ranks: Ranks,
        host: Arena,
        claim: Claim,
        counters: Counters,
        parts: Mapping[int, Sequence[Part]],
        standing: Standing,
    ) -> None:
        """Take the room that the plan wants of `host`.

        Args:
            plan: what lives where.
            ranks: who takes part.
            host: gives the room.
            claim: for more of it, where ranks meet units in other orders.
            counters: of waits.
            parts: per unit, what of its parameters is in this rank's slice.
            standing: is told how far this rank is in rounds.
        """
        request = plan.request
        self._units = {unit.index: unit for unit in request.units if unit.trainable}
        self._parts, self._claim, self._counters, self._standing = parts, claim, counters, standing
        self.early = request.exchanges_early
        self._serves = request.slices_parameters
        self._is_apart = not request.device_is_host  # gradients are taken by a thread in which nothing computes
        standing.computes = self._is_apart
        self._main = ranks
        self._ranks = ranks.beside("exchange") if self.early else ranks
        self._region = Region(host.take(request.waiting_bytes))
        pieces = [host.take(request.piece_bytes) for _ in range(2)]
        for buffer in (self._region.whole, *pieces):
            touch(buffer)
        storages = [storage_at(piece.address, piece.size_bytes, HOST) for piece in pieces]
        self._exchange = Exchange(self._ranks, *(view_at(s, torch.uint8, 0, (s.nbytes(),)) for s in storages))
        self._rounds = Rounds({index: len(unit.slots) for index, unit in self._units.items()})
        spilt = any(plan.homes[index].grad is Tier.NVME for index in self._units)
        # A sum on NVMe comes to host memory by the thread that computes, which then takes part in rounds, too.
        self._thread = ThreadPoolExecutor(1, "offload-exchange") if self.early and not spilt else None
        self._running: Future[None] | None = None
        self._number = self.summed = 0
        self._sums: Sums | None = None
        self._drops = 0
        self._changed = threading.Condition()  # guards all that follows
        self._whole: dict[int, torch.Tensor] = {}
        self._beside: dict[int, int] = {}  # bytes that are not in the region
        self._begin()

    def _begin(self) -> None:
        """Have nothing of any unit."""
        for index in list(self._whole):
            self._free(index)
        self._present = {index: [False] * len(unit.slots) for index, unit in self._units.items()}
        self._missing = {index: set(range(len(unit.slots))) for index, unit in self._units.items()}
        self._settled = set[int]()
        self._found: dict[int, list[bool]] = {}
        self._failure: BaseException | None = None
        self._ended = self._has_news = self._is_dropped = False
        self._is_asking = False  # in a round that has not been heard
        self._wants_room = self._is_stuck = False  # the thread that computes; with nothing left in the budget
        self._was_fruitless = self._are_all_stuck = False  # the last round
        self._rounds.begin()

    @property
    def where(self) -> str:
        """The micro-batch, for errors."""
        return f"backward {self._number}"

    @property
    def _next(self) -> str:
        """The micro-batch in which all ranks are to meet."""
        return f"backward {self._number + 1}"

    # --- a micro-batch ----------------------------------------------------------------------------------------------

    def begin(self, sums: Sums, reached: Collection[Where] | None) -> None:
        """Begin a micro-batch whose gradients leave during backward.

        Args:
            sums: to which they are added.
            reached: parameters that backward may reach; None where that is not known.

        Raises:
            RanksError: a rank is elsewhere, or has failed, ended or not come.
        """
        self._meet(sums)
        if reached is not None:
            for index, missing in self._missing.items():
                missing.intersection_update(slot for unit, slot in reached if unit == index)
        self._settled.update(index for index, missing in self._missing.items() if not missing)
        if self._thread is not None:
            for index in self._units:
                sums.address(index)  # exists from now on: nothing changes that this thread would have to know of
            self._running = self._thread.submit(self._run)

    def refuse(self, error: BaseException) -> None:
        """Let no rank begin a micro-batch, or end it, for this one cannot; all ranks can be used further.

        Raises:
            RanksError: another rank is elsewhere, or has failed, ended or not come.
            BaseException: `error`.
        """
        try:
            self._main.agree(self._next, error=error)
        finally:
            del error  # of whose traceback this is a part

    def take(self, where: Where, source: int) -> None:
        """Let a parameter have a gradient: at address `source`, in its dtype. A second one is added in that.

        Raises:
            StateError: its unit may have left.
            BudgetError: there is no room for what has to wait for other ranks.
            RanksError: another rank has failed, ended or not come.
        """
        index, slot = where
        unit = self._units[index]
        place = unit.slots[slot]
        if self._failure is not None:
            raise self._failure
        if index in self._settled:
            raise StateError(
                f"gradient of {place.name}: expected all of it before those of {unit.name} go to the other ranks but "
                "got it, or more of it, afterwards; pass stage=1, or use_reentrant=False where activations are "
                "checkpointed"
            )
        whole = self._whole.get(index)
        if whole is None:
            whole = self._open(unit)
        dtype = KERNEL_DTYPE[whole.dtype]
        cpu_adam.take_gradient(
            src=source,
            src_dtype=dtype,
            dst=whole.data_ptr() + place.offset_numel * whole.itemsize,
            dst_dtype=dtype,
            numel=place.numel,
            add=self._present[index][slot],
            measure=False,
        )
        self._present[index][slot] = True
        self._missing[index].discard(slot)
        if self.early and not self._missing[index]:
            self._settle(index)

    def _settle(self, index: int) -> None:
        with self._changed:
            self._settled.add(index)
            self._has_news = True
            self._changed.notify_all()
        if self._thread is None:
            with self._taking(), self._serving():
                self._round()

    @contextlib.contextmanager
    def awaited(self) -> Iterator[None]:
        """Tell that in the block the thread that computes may wait for gradients to be taken."""
        self._standing.computes = False
        try:
            yield
        finally:
            self._standing.computes = self._is_apart

    def end(self, sums: Sums) -> dict[int, list[bool]]:
        """End a micro-batch: exchange what is left, and wait until all is done.

        Returns:
            Per unit that any rank had a gradient of, and per parameter, whether there is a sum now.

        Raises:
            RanksError: another rank has failed, ended or not come.
        """
        if not self.early:
            self._meet(sums)
        with self._changed:
            self._ended = True
            self._changed.notify_all()
        if self._running is None:
            with self._waiting(), self._serving():
                while not self._rounds.over:
                    self._round()
        if self._serves:
            self._main.agree(f"{self.where}, its end")  # until then others may want parameters
        if self._running is not None:
            with self._waiting():
                self._running.result()
            self._running = None  # not before: whoever is interrupted here drops what is under way
        found = self._found
        adds = any(any(sums.arrived(index)) for index in self._units)
        self.summed = max(self.summed, 1) + 1 if adds else 1
        self._begin()
        return found

    def drop(self) -> None:
        """Forget what all ranks have not added up. Whoever comes here during backward has failed."""
        running, self._running = self._running, None
        if running is not None:
            with self._changed:
                self._is_dropped = True
                self._changed.notify_all()
            self._main.fail(StateError(_DROPPED))
            wait([running])
        self.summed = 0
        with self._changed:
            self._drops += 1
            self._begin()
            self._changed.notify_all()

    def room(self, unit: Unit) -> torch.Tensor:
        """Return memory for a unit's elements in its dtype, (numel,): that of gradients, while none wait."""
        assert not self._whole
        return elements_at(self._region.whole.address, unit)

    def close(self) -> None:
        """End the thread. Idempotent."""
        self.drop()
        if self._thread is not None:
            self._thread.shutdown(wait=True)

    def _meet(self, sums: Sums) -> None:
        """Meet all ranks before anything is sent."""
        self._sums = sums
        self._main.agree(self._next)
        self._number += 1  # not before: a rank that was elsewhere has not counted this one

    @contextlib.contextmanager
    def _waiting(self) -> Iterator[None]:
        """Count the seconds of the ``with`` block as a wait for other ranks, unless they are counted where it waits."""
        begin = time.perf_counter()
        try:
            yield
        finally:
            if self.early:
                self._counters.wait_for_ranks(begin, time.perf_counter())

    def _taking(self) -> contextlib.AbstractContextManager[None]:
        """Do the same where a gradient is taken: in a thread apart, whoever waits for that counts it."""
        return contextlib.nullcontext() if self._is_apart else self._waiting()

    def _serving(self) -> contextlib.AbstractContextManager[None]:
        return self._main.serving(f"{self.where}, gradients of other ranks")

    # --- rounds -----------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        """Take part in rounds, until all units have gone: what a thread beside backward does."""
        try:
            while not self._rounds.over:
                with self._changed:
                    while not (self._has_news or self._ended or self._wants_room or self._is_dropped):
                        self._changed.wait()
                    if self._is_dropped:
                        return
                self._round()
        except BaseException as error:
            with self._changed:
                self._failure = error
                self._changed.notify_all()
            self._main.fail(error)  # the thread that computes may wait for others, which wait for this one
            raise

    def _round(self) -> None:
        """Meet all ranks, and exchange what is settled on all of them."""
        with self._changed:
            said = Said(frozenset(self._settled), self._present, self._ended, self._is_stuck)
            mine = self._rounds.pack(said)
            self._has_news, self._is_asking = False, True
            self._note_standing()
        every = [self._rounds.unpack(row) for row in share(self._ranks, mine, self.where)]
        with self._changed:
            self._is_asking = False
            self._standing.hear()  # before anything of it leaves, and gives room
        agreed = self._rounds.agree(every)
        for index in agreed:
            self._send(index, [said.present[index] for said in every])
        with self._changed:
            self._was_fruitless = self._wants_room and not agreed
            self._wants_room = False  # whoever still does says so again: a round without news would mislead the others
            self._are_all_stuck = not agreed and all(said.stuck or said.ended for said in every)
            self._changed.notify_all()

    def _note_standing(self) -> None:
        """Note whether the thread that computes can do nothing before this round is heard."""
        if self._is_asking and (self._wants_room or self._thread is None):
            self._standing.wait()

    def _send(self, index: int, presence: Sequence[Sequence[bool]]) -> None:
        """Add all ranks' gradients of a unit to their sum."""
        if any(map(any, presence)):
            unit, sums = self._units[index], self._sums
            assert sums is not None
            self._found[index] = self._exchange.add(
                self._whole.get(index),
                self._parts[index],
                presence,
                sums.arrived(index),
                total=sums.address(index),
                numel=unit.numel,
                dtype=getattr(torch, unit.dtype),
                where=f"{self.where}, gradients of {unit.name}",
            )
            sums.leave(index)
        with self._changed:
            self._free(index)

    # --- room -------------------------------------------------------------------------------------------------------

    def _open(self, unit: Unit) -> torch.Tensor:
        """Return room for a unit's gradients; where there is none, wait until others have gone.

        Raises:
            BudgetError: none will go, for no rank has room for what the others wait for.
        """
        with self._changed:
            whole = self._find_room(unit)
            if whole is None:
                with self._taking(), self._serving():
                    whole = self._await_room(unit)
            self._wants_room = self._is_stuck = self._was_fruitless = False
            self._whole[unit.index] = whole
        return whole

    def _await_room(self, unit: Unit) -> torch.Tensor:
        """Return room for a unit's gradients, once others have gone; raises as :meth:`_open`."""
        number = self._drops
        while True:
            self._wants_room = True
            self._note_standing()
            self._changed.notify_all()
            if self._thread is None:
                self._round()
            else:
                self._changed.wait()
            if self._failure is not None:
                raise self._failure
            if self._drops != number:  # meanwhile, by another thread
                raise StateError(_DROPPED)
            whole = self._find_room(unit)
            if whole is not None:
                return whole

    def _find_room(self, unit: Unit) -> torch.Tensor | None:
        """Return room in the region, or beside it where a round has brought nothing.

        Raises:
            BudgetError: there is none, and no rank has.
        """
        buffer = self._region.allocate(unit.param_bytes, unit.index)
        if buffer is not None:
            return elements_at(buffer.address, unit)
        if not self._was_fruitless:
            return None
        try:
            self._claim.resize(self._claim.size_bytes + unit.param_bytes)
        except BudgetError as error:
            if self._is_stuck and self._are_all_stuck:
                raise BudgetError(
                    f"{error}, or pass stage=1: gradients of {unit.name} have to wait for other ranks, which meet "
                    "units in another order"
                ) from error
            self._is_stuck = True
            return None
        self._beside[unit.index] = unit.param_bytes
        return torch.empty(unit.numel, dtype=getattr(torch, unit.dtype))

    def _free(self, index: int) -> None:
        """Give the room of a unit back, if it has any."""
        if self._whole.pop(index, None) is None:
            return
        beside = self._beside.pop(index, 0)
        if beside:
            self._claim.resize(self._claim.size_bytes - beside)
        else:
            self._region.free(index)


def elements_at(address: int, unit: Unit) -> torch.Tensor:
    """Return what a unit's elements in its dtype are, at an address of the host: (numel,)."""
    storage = storage_at(address, unit.param_bytes, HOST)
    return view_at(storage, getattr(torch, unit.dtype), 0, (unit.numel,))
