"""Who sends which parameters when, where each of several ranks has a slice of them.

Owns the order of gathers, which is the same on all ranks. Before each one, all of them say what they want next: units
that some want are gathered in rank order, and who does not want one takes part and drops it. So no rank waits for what
another does not send, whichever modules it uses. A rank that comes to an agreement takes part until all have come
there; so does one that waits for others elsewhere, as long as it waits. One thread does all this, ahead of the one that
computes; what is there ahead is a guess that others' wishes do not depend on.

Where there are several nodes, each has all slices: its ranks gather among themselves. Nodes meet where all agree, each
when nobody in it wants anything any more.

It is what several ranks ask each other through: a :class:`.Ranks`. Next: :mod:`offload.shards.working_set` asks for
units, :mod:`offload.distributed.processes` sends.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import itertools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, TypeVar

import torch

from offload.distributed.ranks import ARRIVED, NOTHING, Agreement, Fact, Ranks
from offload.distributed.rounds import Standing
from offload.errors import RanksError, StateError
from offload.memory.arena import HOST, Buffer, view_at
from offload.memory.errands import Errands
from offload.memory.transfer import Brought, Mover, TicketGroup, Transfer
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.copies import Copies
from offload.shards.shard import Shard, State
from offload.stats import Counters
from offload.torch_private import storage_at

T = TypeVar("T")
_SHORTEST_PAUSE_S, _LONGEST_PAUSE_S = 1e-3, 0.1  # between agreements of who waits elsewhere


class Conductor:
    """The ranks of one engine with slices of parameters. See the module's text.

    Attributes:
        rank, world, node, owners: as in :class:`.Ranks`.
        standing: how far this rank is in exchanges of gradients.
    """

    def __init__(
        self,
        ranks: Ranks,
        plan: Plan,
        copies: Copies,
        landing: Buffer,
        counters: Counters,
        begin_thread: Callable[[], None],
        *,
        deadline_s: float,
        passing: Sequence[Buffer] = (),
    ) -> None:
        """Begin.

        Args:
            ranks: what is asked and sent through; nobody else does from now on.
            plan: which slice is whose.
            copies: the shards.
            landing: host memory for a unit that only others want.
            counters: of gathers.
            begin_thread: what the thread calls first.
            deadline_s: after which a read of a slice counts as lost.
            passing: host memory for units on their way to a device that the host cannot address.
        """
        self.rank = ranks.rank
        self.world = ranks.world
        self.node = ranks.node
        self.owners = ranks.owners
        self.standing = Standing()
        self._ranks = ranks
        self._plan = plan
        self._copies = copies
        self._landing = landing
        self._passing = itertools.cycle(passing)
        self._counters = counters
        self._deadline_s = deadline_s
        self._errands: Errands[Any] = Errands(1, "offload-ranks", begin_thread)
        self._called = threading.Event()  # the thread, which may be serving
        self._blocks = set[threading.Event]()  # in which it serves: an event of each, which is set behind it
        self._meets = False  # it may be in an agreement with others, though this rank wants nothing

    # --- parameters -------------------------------------------------------------------------------------------------

    def place(self, shard: Shard, buffer: Buffer) -> Buffer:
        """Return where this rank's slice belongs in `buffer`, which is to have all of its unit."""
        begin = self._plan.request.owned(shard.unit, Role.PARAM)[0] * shard.unit.itemsize
        address, offset = buffer.address + begin, buffer.offset_bytes + begin
        return dataclasses.replace(buffer, address=address, offset_bytes=offset, size_bytes=shard.size_bytes)

    def start(self, shard: Shard, buffer: Buffer, slice_on_its_way: Transfer) -> Transfer:
        """Start to gather a unit in `buffer`, where `slice_on_its_way` brings this rank's slice to its place."""

        def gather() -> None:
            slice_on_its_way.wait(self._deadline_s)
            self._gather(shard.unit, buffer.address)

        return Brought(self._submit(gather), f"gather of {shard.unit.name}")

    def start_apart(self, shard: Shard, buffer: Buffer, mover: Mover, *, urgent: bool) -> Transfer:
        """Start to gather a unit in host memory, from where it goes to `buffer`, which the host cannot address."""
        bring = functools.partial(self._gather_in_passing, shard, mover)
        return mover.fetch_when(bring, buffer, shard.work_bytes, urgent=urgent, begin=self._submit)

    def read(self, shard: Shard, mover: Mover) -> int:
        """Gather a unit in host memory; returns its address, for as long as no other one is asked for."""
        return self._submit(lambda: self._gather_in_passing(shard, mover)).result()

    def _gather_in_passing(self, shard: Shard, mover: Mover) -> int:
        room = next(self._passing)
        mover.await_source(room.address)  # what was there before may not have left
        self._put_slice(shard, room)
        self._gather(shard.unit, room.address)
        return room.address

    def _gather(self, unit: Unit, address: int) -> None:
        """Gather a unit at an address of the host, where this rank's slice is in place."""
        is_there = False
        while not is_there:
            heard, _ = self.standing.heard
            agreement = self.node.agree(f"parameters of {unit.name}", wants=unit.index, numbers=[heard])
            is_there = self._serve(agreement, mine=unit.index, address=address)

    def _serve(self, agreement: Agreement, *, mine: int | None = None, address: int = 0) -> bool:
        """Gather what some ranks want, in rank order; `mine` at `address`, where this rank's slice is in place.

        Nothing yet, if a rank waits elsewhere that has not heard what another one has: it can go on without help, and
        may be about to want the same.

        Returns:
            Whether anything was gathered.
        """
        said = list(zip(agreement.wanted, agreement.numbers, strict=True))
        units = dict.fromkeys(wish for wish, _ in said if wish is not None and wish < ARRIVED)
        heard = max((numbers[0] for wish, numbers in said if wish in units), default=0)
        if any(wish == NOTHING and numbers[0] < heard for wish, numbers in said):
            return False
        for index in units:
            shard = self._copies.of(index, Role.PARAM)
            full = address if index == mine else self._land(shard)
            size_bytes = shard.unit.param_bytes  # as bytes: gloo does not know all dtypes of frozen parameters
            whole = view_at(storage_at(full, size_bytes, HOST), torch.uint8, 0, (size_bytes,))
            self.node.gather(whole, f"gather of {shard.unit.name}")
            self._counters.gathers += 1
            self._counters.gathers_for_others += index != mine
        return bool(units)

    def _land(self, shard: Shard) -> int:
        """Bring this rank's slice of a unit that others want to its place; returns where the unit begins."""
        try:
            if shard.state in (State.EMPTY, State.FAILED):
                raise StateError(f"parameters of {shard.unit.name}: another rank wants them but they have no content")
            self._put_slice(shard, self._landing)
        except BaseException as error:
            self._ranks.fail(error)  # they wait for it
            raise
        return self._landing.address

    def _put_slice(self, shard: Shard, whole: Buffer) -> None:
        """Bring this rank's slice of a unit to its place in `whole`, which the host can address.

        Its home has the content whatever else has it: nobody writes there while others may want it.
        """
        target = self.place(shard, whole).address
        if shard.home_buffer is not None:
            ctypes.memmove(target, shard.home_buffer.address, shard.size_bytes)
        else:
            TicketGroup(self._copies.start_reads(shard, target, urgent=True)).wait(self._deadline_s)

    # --- what ranks ask each other ----------------------------------------------------------------------------------

    def agree(
        self,
        where: str,
        facts: Mapping[str, Fact] | None = None,
        *,
        numbers: Sequence[float] = (),
        error: BaseException | None = None,
        wants: int | None = None,
    ) -> Agreement:
        """Meet all ranks in one place; take part in what those want that have not come yet."""
        assert wants is None

        def meet() -> Agreement:
            while True:
                if self.node is not self._ranks:  # whoever wants something in this node gets it first
                    here = self.node.agree(where, wants=ARRIVED)
                    if any(wish != ARRIVED for wish in here.wanted):
                        self._serve(here)
                        continue
                agreement = self._ranks.agree(where, facts, numbers=numbers, error=error)
                if not agreement.wanted:
                    return agreement
                self._serve(agreement)

        begin = time.perf_counter()
        future = self._submit(meet)
        try:
            return future.result()
        except KeyboardInterrupt as interrupt:
            self._ranks.fail(interrupt)
            raise
        finally:
            self._counters.wait_for_ranks(begin, time.perf_counter())
            del future
            error = None  # this may be a part of its traceback

    @contextlib.contextmanager
    def serving(self, where: str) -> Iterator[None]:
        """Take part in what others want, in the block; see :meth:`.Ranks.serving`.

        An agreement that is under way at the block's end goes on: the next thing that this rank wants comes behind it.
        What another thread of this rank wants meanwhile is done first. As long as one computes, it comes to what others
        want by itself.
        """
        over = threading.Event()

        def serve() -> None:
            pause_s = _SHORTEST_PAUSE_S
            self._called.clear()
            try:
                while not over.is_set():
                    self._called.wait(pause_s)
                    self._called.clear()
                    self._errands.do_urgent()
                    pause_s = _SHORTEST_PAUSE_S if self.standing.computes else min(2 * pause_s, _LONGEST_PAUSE_S)
                    heard, waits = self.standing.heard
                    self._meets = True  # before it looks: whoever ends the block and then closes has to know
                    if not over.is_set() and waits and not self.standing.computes:
                        if self._serve(self.node.agree(where, wants=NOTHING, numbers=[heard])):
                            pause_s = _SHORTEST_PAUSE_S
                    self._meets = False
            except BaseException as error:
                self._ranks.fail(error)  # nobody looks at what becomes of this
                raise

        self._blocks.add(over)
        try:
            self._submit(serve, urgent=False)
            yield
        finally:
            over.set()
            self._blocks.discard(over)
            self._called.set()

    def gather(self, full: torch.Tensor, where: str) -> None:
        """As :meth:`.Ranks.gather`; behind an agreement, after which nothing is wanted until this returns."""
        self._ranks.gather(full, where)

    def gather_from_all(self, mine: torch.Tensor, where: str) -> torch.Tensor:
        """As :meth:`.Ranks.gather_from_all`, behind an agreement."""
        return self._ranks.gather_from_all(mine, where)

    def swap(self, received: torch.Tensor, sent: torch.Tensor, where: str) -> None:
        """As :meth:`.Ranks.swap`, behind an agreement."""
        self._ranks.swap(received, sent, where)

    def beside(self, name: str, *, patience: int = 1) -> Ranks:
        """Return the same ranks for another thread; see :meth:`.Ranks.beside`."""
        return self._ranks.beside(name, patience=patience)

    def fail(self, error: BaseException) -> None:
        """Tell the others that this rank has failed."""
        self._ranks.fail(error)

    @property
    def deadline_s(self) -> float:
        """Seconds after which a rank that does not come counts as lost."""
        return self._ranks.deadline_s

    @property
    def ended(self) -> bool:
        """Whether nobody waits any more."""
        return self._ranks.ended

    @property
    def unfinished(self) -> bool:
        """Whether memory of what nobody waits for any more may still be written to."""
        return self._ranks.unfinished

    def has_told(self, error: BaseException) -> bool:
        """Tell whether all ranks know of an error of this one."""
        return self._ranks.has_told(error)

    def close(self) -> None:
        """End the thread. Whoever waits for something that was started here is told. Idempotent.

        Nobody waits for a thread that has not noticed yet that the block in which it served is over.
        """
        if self._errands.busy or self._blocks or self._meets:
            self._ranks.fail(RanksError(f"rank {self.rank} has closed its engine"))
        self._ranks.close()
        self._errands.close()

    def _submit(self, errand: Callable[[], T], *, urgent: bool = True) -> Future[T]:
        future = self._errands.submit(lambda _: errand(), urgent=urgent)
        self._called.set()
        return future
