"""Gradients of several ranks: this one's of a micro-batch, and the sum of all, of which each rank keeps its slices.

Owns what is measured of sums of which each rank has a part, and what was written to parameters since all ranks had the
same. Next: :mod:`offload.shards.exchanges` sends and adds up, :mod:`offload.shards.gathers` brings the parameters that
come of it.
"""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import torch

from offload.distributed.exchange import Part, parts_of
from offload.distributed.ranks import Fact, Ranks
from offload.distributed.rounds import Standing
from offload.errors import StateError
from offload.kernels import cpu_adam
from offload.memory.arena import Arena
from offload.memory.budget import Claim, Tier
from offload.memory.transfer import Mover
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.slices import owned_range
from offload.planning.units import Unit, Where
from offload.shards.copies import Copies
from offload.shards.exchanges import Exchanges, elements_at
from offload.shards.gradients import Gradients
from offload.stats import Counters

_SUM_BYTES = 4  # of an element of a sum


def facts_of_waiting(units: Iterable[Unit], arrived: Callable[[int], Sequence[bool]]) -> dict[str, Fact]:
    """Return which gradients wait, of units that are trained: all ranks should have the same.

    Args:
        units: that are trained.
        arrived: returns per slot of a unit whether there is a gradient.
    """
    return {
        f"the gradients that wait of {unit.name}": "".join("x" if flag else "." for flag in arrived(unit.index))
        for unit in units
    }


class MicroBatch:
    """A micro-batch's gradients of all ranks. See the module's text.

    Attributes:
        exchanges: of gradients.
        in_place: units whose parameters all ranks have where the host can work on them; homes may be each rank's own.
        mastered: names of parameters with masters, which a write of 16 bits leaves as they are where nothing changes.
    """

    def __init__(
        self, plan: Plan, ranks: Ranks, host: Arena, claim: Claim, counters: Counters, standing: Standing
    ) -> None:
        """Take the memory that the plan wants of `host`; `claim`, `counters` and `standing` as in Exchanges."""
        request = plan.request
        self._ranks = ranks
        self._node = ranks.node  # which has all slices
        self._units = {unit.index: unit for unit in request.units if unit.trainable}
        self._slices = {index: request.owned(unit, Role.GRAD) for index, unit in self._units.items()}
        self._parts = {index: self._parts_of(unit, self._node.rank) for index, unit in self._units.items()}
        self._beside = ranks
        self._gathers: ThreadPoolExecutor | None = None
        if self._node.world > 1 and not request.slices_parameters:
            self._beside = ranks.beside("updated parameters")  # first: behind it something may fail
            self._gathers = ThreadPoolExecutor(1, "offload-gather")
        self.exchanges = Exchanges(plan, ranks, host, claim, counters, self._parts, standing)
        self.in_place = self._in_place(plan)
        self._written: dict[str, str] | None = None  # digests of what was written to parameters, once they are loaded
        of_two_bytes = [unit for unit in self._units.values() if unit.itemsize < _SUM_BYTES]
        self.mastered = frozenset(slot.name for unit in of_two_bytes for slot in unit.slots)

    def _in_place(self, plan: Plan) -> frozenset[int]:
        if self._gathers is None:
            return frozenset()
        where = Tier.DEVICE if plan.request.device_is_host else Tier.HOST
        mine = torch.tensor([plan.home(unit, Role.PARAM) is where for unit in plan.request.units], dtype=torch.uint8)
        by_all = self._ranks.gather_from_all(mine, "making an engine").all(dim=0).tolist()
        return frozenset(index for index, here in enumerate(by_all) if here)

    def _parts_of(self, unit: Unit, rank: int) -> list[Part]:
        spans = [(slot.offset_numel, slot.end_numel) for slot in unit.slots]
        return parts_of(spans, *owned_range(unit.numel, rank, self._node.world))

    def measure(
        self, total_of: Callable[[int], int], arrived: Mapping[int, Sequence[bool]]
    ) -> dict[Where, tuple[float, int]]:
        """Return (sum of squares, elements that are not finite) of each sum: the same bits as one process's.

        Args:
            total_of: returns the address of this rank's slice of a unit, until it is asked for another one.
            arrived: per unit and slot, whether there is a sum.

        Raises:
            RanksError: another rank has failed, ended or not come, or other gradients wait there.
        """
        where = f"norm after {self.exchanges.where}"
        summed: dict[str, Fact] = {"the micro-batches of the gradients that wait": self.exchanges.summed}
        # Else ranks would send each other different numbers of bytes.
        self._ranks.agree(where, {**summed, **facts_of_waiting(self._units.values(), arrived.__getitem__)})
        blocks = [self._blocks(rank, arrived) for rank in range(self._node.world)]
        longest = max(sum(count + 1 for count in of_rank.values()) for of_rank in blocks)
        mine = torch.zeros(max(longest, 1), dtype=torch.float64)
        at = 0
        for index, parts in self._parts.items():
            here = [part for part in parts if arrived[index][part.slot]]
            total = total_of(index) if here else 0
            for part in here:
                first, numel = total + part.begin * _SUM_BYTES, part.end - part.begin
                count = blocks[self._node.rank][index, part.slot]
                _, bad = cpu_adam.sum_of_squares(first, cpu_adam.Dtype.FLOAT32, numel, blocks=mine[at:].data_ptr())
                mine[at + count] = bad
                at += count + 1
        rows = self._node.gather_from_all(mine, where)
        return self._join(rows, blocks, arrived)

    def _blocks(self, rank: int, arrived: Mapping[int, Sequence[bool]]) -> dict[Where, int]:
        """Return how many blocks a rank measures of each sum, in the order in which it does."""
        size = cpu_adam.SUM_BLOCK
        return {
            (index, part.slot): -(-(part.end - part.begin) // size)
            for index, unit in self._units.items()
            for part in self._parts_of(unit, rank)
            if arrived[index][part.slot]
        }

    def _join(
        self, rows: torch.Tensor, blocks: Sequence[Mapping[Where, int]], arrived: Mapping[int, Sequence[bool]]
    ) -> dict[Where, tuple[float, int]]:
        sums: dict[Where, list[torch.Tensor]] = {}
        bad: dict[Where, int] = {}
        for row, counts in zip(rows, blocks, strict=True):
            at = 0
            for where, count in counts.items():  # a parameter's slices follow each other in rank order
                sums.setdefault(where, []).append(row[at : at + count])
                bad[where] = bad.get(where, 0) + int(row[at + count])
                at += count + 1
        found: dict[Where, tuple[float, int]] = {}
        for index, unit in self._units.items():
            for slot in range(len(unit.slots)):
                if arrived[index][slot]:
                    joined = torch.cat(sums.get((index, slot), [torch.zeros(0, dtype=torch.float64)]))
                    total = cpu_adam.join_block_sums(joined.data_ptr(), joined.numel())
                    found[index, slot] = (total, bad.get((index, slot), 0))
        return found

    # --- new parameters ---------------------------------------------------------------------------------------------

    def note_loaded(self) -> None:
        """Note that all ranks have the same parameters; what is written from now on has to be the same, too."""
        self._written = {}

    @property
    def compares_writes(self) -> bool:
        """Whether parameters have been loaded, so that what is written has to be the same on all ranks."""
        return self._written is not None

    def note_written(self, name: str, pieces: Iterable[torch.Tensor]) -> None:
        """Note what is written to all of a parameter: in pieces, on the CPU."""
        assert self._written is not None
        known, before = hashlib.blake2b(digest_size=16), self._written.pop(name, "")
        for piece in pieces:
            if name in self.mastered and piece.itemsize < _SUM_BYTES:  # what was there before is not gone
                known.update(before.encode())
            known.update(piece.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
        self._written[name] = known.hexdigest()

    @property
    def written(self) -> dict[str, str]:
        """Digests of what was written to parameters since :meth:`note_loaded`, by name."""
        return dict(self._written or {})

    def room_for(self, index: int) -> torch.Tensor:
        """Return memory for a unit's parameters, (numel,) of its dtype: that of gradients, while none wait."""
        return self.exchanges.room(self._units[index])

    def owned(self, index: int) -> tuple[int, int]:
        """Return the elements [begin, end) of a unit that this rank updates."""
        return self._slices[index]

    def gather(self, full: torch.Tensor, index: int) -> None:
        """Fill `full`: (numel,) of a unit's parameters, of which this rank's slice is in place.

        Raises:
            RanksError: another rank has failed, ended or not come.
        """
        self._node.gather(full, f"gather of {self._units[index].name} after {self.exchanges.where}")

    def start_gather(self, address: int, index: int) -> Future[None]:
        """Start to gather a unit at an address of the host, where this rank's slice is in place.

        What is started is gathered in this order, by a thread of its own, until one fails.
        """
        assert self._gathers is not None
        full, where = elements_at(address, self._units[index]), f"gather of {self._units[index].name}, updated"

        def gather() -> None:
            try:
                self._beside.node.gather(full, where)
            except BaseException as error:
                self._beside.fail(error)  # now: others would take the next unit for this one
                raise

        return self._gathers.submit(gather)

    def close(self) -> None:
        """End the threads. Idempotent."""
        self.exchanges.close()
        if self._gathers is not None:
            self._gathers.shutdown(wait=True)


class SharedGradients(Gradients):
    """Gradients of an engine that is one of several ranks: nobody sees one as a whole when they have been added up."""

    def __init__(
        self, plan: Plan, copies: Copies, mover: Mover, counters: Counters, batch: MicroBatch, *, deadline_s: float
    ) -> None:
        """Begin with none; `batch` has those of the micro-batch under way."""
        super().__init__(plan, copies, mover, counters, deadline_s=deadline_s)
        self._batch = batch
        self._exchanges = batch.exchanges

    def begin_backward(self, reached: Callable[[], Collection[Where] | None]) -> None:
        """Begin a backward pass; `reached` returns which parameters it may reach, None where that is not known.

        Raises:
            RanksError: a rank is elsewhere, or has failed, ended or not come.
        """
        if self._exchanges.early:
            self._exchanges.begin(self, reached())

    def refuse_backward(self, error: BaseException) -> None:
        """Let no rank have this backward pass; see :meth:`Exchanges.refuse`."""
        try:
            self._exchanges.refuse(error)
        finally:
            del error  # of whose traceback this is a part

    def add(self, index: int, slot: int, gradient: torch.Tensor, *, final: bool, backward_pass: int = 0) -> None:
        """Take one parameter's gradient of this micro-batch; see :meth:`Gradients.add`.

        What the mover does not use at once may wait for other ranks where it is used, in a thread of the mover's.
        """
        known = self._gradients[index]
        known.handed_over = (known.handed_over + 1) % len(known.arrived)
        take = functools.partial(self._exchanges.take, (index, slot))
        with self._exchanges.awaited():
            self._mover.read_tensor(gradient.contiguous(), take, group=index, last=not known.handed_over)

    def exchange(self) -> None:
        """Add this micro-batch's gradients of all ranks to what has arrived.

        Raises:
            RanksError: another rank has failed, ended or not come.
        """
        with self._exchanges.awaited():
            self.await_copies()
            found = self._exchanges.end(self)
        for index, arrived in found.items():
            known = self._gradients[index]
            known.arrived, known.sums = arrived, [None] * len(arrived)

    def address(self, index: int) -> int:
        """Return where this rank's slice of a unit's sum is, until another one is asked for."""
        return self._base(self._copies.of(index, Role.GRAD))

    def leave(self, index: int) -> None:
        """Let a unit's sum go home."""
        shard = self._copies.of(index, Role.GRAD)
        if shard.home is Tier.NVME:
            self._copies.start_flush(shard)

    def sum_of(self, index: int, slot: int) -> tuple[float, int] | None:
        """Return (sum of squares, non-finite elements) of a parameter's gradient, None where none has arrived.

        The first time after a micro-batch, all ranks have to ask.
        """
        known = self._gradients[index]
        if known.arrived[slot] and known.sums[slot] is None:
            arrived = {other: gradient.arrived for other, gradient in self._gradients.items()}
            found = self._batch.measure(self.address, arrived)
            for (unit, position), total in found.items():
                self._gradients[unit].sums[position] = total
        return known.sums[slot]

    def content(self, index: int, slot: int) -> torch.Tensor:
        """Refuse: nobody has all of it."""
        raise self._parts(index, slot)

    def overwrite(self, index: int, slot: int, content: torch.Tensor | float) -> None:
        """Refuse: other ranks do not know."""
        raise self._parts(index, slot)

    def multiply(self, index: int, slot: int, factor: float) -> None:
        """Refuse: other ranks do not know."""
        raise self._parts(index, slot)

    def forget(self, index: int, slot: int) -> None:
        """Refuse: other ranks do not know."""
        raise self._parts(index, slot)

    def _parts(self, index: int, slot: int) -> StateError:
        name = self._copies.of(index, Role.GRAD).unit.slots[slot].name
        return StateError(
            f"gradient of {name}: expected it to be left alone between backward and step but each of several ranks has "
            "a part of it; use engine.zero_grad() and max_grad_norm, or train in one process"
        )

    def drop(self) -> None:
        """Forget all gradients that have arrived since the last step."""
        self._exchanges.drop()
        super().drop()
