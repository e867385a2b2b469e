"""Gradients: taken in as they arrive, summed over micro-batches, spilled to NVMe where host memory cannot hold them.

Owns what has arrived since the last step, the sums that the norm is made of, and who leaves the pool of gradients on
their way to NVMe. Knows neither where a gradient comes from nor what becomes of it. Next: :mod:`offload.optimizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Container, Sequence

import torch

from offload import cpu_adam
from offload.copies import Copies
from offload.errors import InternalError, StateError
from offload.shard import Event, Role, Shard, State, Unit
from offload.tiers import Buffer, Tier
from offload.transfer import Mover, TicketGroup

KERNEL_DTYPE = {
    "float32": cpu_adam.Dtype.FLOAT32,
    "bfloat16": cpu_adam.Dtype.BFLOAT16,
    "float16": cpu_adam.Dtype.FLOAT16,
}


@dataclasses.dataclass(slots=True)
class Gradient:
    """What is known of a unit's gradient in the current step.

    Attributes:
        arrived: per slot, whether a gradient has come since the last step.
        missing: slots whose gradient has not come in the current backward.
        sums: per slot, the sum of squares and number of non-finite elements of the final gradient, None until known.
        final_adds: gradients that were taken, or are about to be, with no further micro-batch to come.
    """

    arrived: list[bool]
    missing: set[int]
    sums: list[tuple[float, int] | None]
    final_adds: int = 0

    @classmethod
    def of(cls, unit: Unit) -> Gradient:
        """Return that of a unit of which nothing has arrived."""
        slots = len(unit.slots)
        return cls([False] * slots, set(range(slots)), [None] * slots)


class Gradients:
    """Gradients of one engine. See the module's text."""

    def __init__(self, units: Sequence[Unit], copies: Copies, mover: Mover, *, accumulate: bool, deadline_s: float):
        self._copies = copies
        self._mover = mover
        self._accumulate = accumulate
        self._deadline_s = deadline_s
        self._gradients = {unit.index: Gradient.of(unit) for unit in units if unit.trainable}
        self._held: set[int] = set()  # units whose gradients belong to a step that has not used them yet
        self.finish_step: Callable[[], None] = lambda: None  # makes that step use them, and leave idle buffers
        self.on_complete: Callable[[int], None] = lambda index: None  # all of a unit's gradient has come
        self.on_change: Callable[[int], None] = lambda index: None  # more is added to what was complete
        self.on_drop: Callable[[], None] = lambda: None  # all are about to be forgotten

    def add(self, index: int, slot: int, gradient: torch.Tensor, *, final: bool) -> None:
        """Add one parameter's gradient to what has arrived since the last step.

        Args:
            index: unit.
            slot: position of the parameter in the unit.
            gradient: (slot shape) in the unit's dtype, on the device.
            final: no further micro-batch follows before the step, so the sum of squares is taken now.
        """
        self.finish_step()  # what it keeps or has on its way in this memory is about to be overwritten
        if final:
            known = self._gradients[index]
            known.final_adds += 1
            if known.final_adds > len(known.arrived):
                self.on_change(index)
        gradient = gradient.contiguous()
        self._mover.read_tensor(gradient, lambda address: self._add(index, slot, address, final=final))

    def _add(self, index: int, slot: int, source: int, *, final: bool) -> None:
        shard, gradient = self._copies.of(index, Role.GRAD), self._gradients[index]
        total = cpu_adam.take_gradient(
            src=source,
            src_dtype=KERNEL_DTYPE[shard.unit.dtype],
            dst=self._address(shard, slot),
            dst_dtype=self._dtype(shard.unit),
            numel=shard.unit.slots[slot].numel,
            add=gradient.arrived[slot],
            measure=final,
        )
        gradient.arrived[slot] = True
        gradient.sums[slot] = total if final else None
        gradient.missing.discard(slot)
        if not gradient.missing:
            gradient.missing = set(range(len(shard.unit.slots)))
            if shard.home is Tier.NVME:
                self._copies.start_flush(shard)
            if final:
                self.on_complete(index)

    def is_whole(self, index: int) -> bool:
        """Tell whether each parameter's gradient has come once since the last micro-batch, and all are there."""
        gradient = self._gradients[index]
        return gradient.final_adds == len(gradient.arrived) and all(gradient.arrived)

    def sums(self, index: int) -> list[tuple[float, int] | None]:
        """Return per slot (sum of squares, non-finite elements) of the step's gradient; None where none has arrived.

        Sums that were not taken at arrival (the last micro-batch did not reach the parameter) are taken now.
        """
        gradient, shard = self._gradients[index], self._copies.of(index, Role.GRAD)
        for slot, arrived in enumerate(gradient.arrived):
            if arrived and gradient.sums[slot] is None:
                numel = shard.unit.slots[slot].numel
                gradient.sums[slot] = cpu_adam.sum_of_squares(
                    self._address(shard, slot), self._dtype(shard.unit), numel
                )
        return [total if gradient.arrived[s] else None for s, total in enumerate(gradient.sums)]

    def arrived(self, index: int) -> list[bool]:
        """Return per slot whether a gradient has arrived since the last step."""
        return self._gradients[index].arrived

    def settle(self) -> None:
        """Wait until every gradient is in host memory (they may still be on their way to NVMe)."""
        self._mover.settle(self._deadline_s)

    def drop(self) -> None:
        """Forget all gradients that have arrived since the last step."""
        self.settle()
        self.on_drop()
        for index in self._gradients:
            shard = self._copies.of(index, Role.GRAD)
            if index not in self._held:
                self._copies.discard(shard)
            self._gradients[index] = Gradient.of(shard.unit)

    def hold(self, indices: Container[int]) -> list[Buffer]:
        """Close a step: forget what has arrived, but keep the gradients of units `indices` until :meth:`release`.

        Returns:
            Host memory of gradients that nothing is kept of: idle, and the step's until it has ended.
        """
        self._held = {index for index in self._gradients if index in indices}
        self.drop()
        return [buffer for index in self._gradients if index not in self._held for buffer in self._idle(index)]

    def release(self, index: int) -> list[Buffer]:
        """Let the gradient of a unit that was held go: the step has used it; returns its memory as :meth:`hold`."""
        self._held.discard(index)
        self._copies.discard(self._copies.of(index, Role.GRAD))
        return self._idle(index)

    def _idle(self, index: int) -> list[Buffer]:
        """Return the host memory that only this gradient is ever in."""
        shard = self._copies.of(index, Role.GRAD)
        return [shard.home_buffer] if shard.home is Tier.HOST and shard.home_buffer is not None else []

    def _dtype(self, unit: Unit) -> cpu_adam.Dtype:
        return cpu_adam.Dtype.FLOAT32 if self._accumulate else KERNEL_DTYPE[unit.dtype]

    def _address(self, shard: Shard, slot: int) -> int:
        """Return where a parameter's gradient may be read and written now, in host memory."""
        buffer = self._at_home(shard) if shard.home_buffer is not None else self._in_pool(shard)
        return buffer.address + shard.unit.slots[slot].offset_numel * self._dtype(shard.unit).itemsize

    def _at_home(self, shard: Shard) -> Buffer:
        if shard.state is State.EMPTY:
            self._copies.change(shard, Event.OVERWRITE_HOME)
        assert shard.home_buffer is not None
        return shard.home_buffer

    def _in_pool(self, shard: Shard) -> Buffer:
        copies = self._copies
        copies.settle(shard)
        if shard.state is State.STORED:
            buffer = self._room_for(shard)
            copies.start_fetch(
                shard, buffer, lambda: TicketGroup(copies.start_reads(shard, buffer.address, urgent=True))
            )
            copies.settle(shard)
        if shard.state is State.RESIDENT:
            copies.change(shard, Event.MODIFY)
        elif shard.state is State.EMPTY:
            buffer = self._room_for(shard)
            copies.change(shard, Event.OVERWRITE_WORK)
            shard.work_buffer = buffer
        elif shard.state is State.FAILED:
            raise StateError(
                f"gradient of {shard.unit.name}: part of it was lost by a failed transfer; drop the gradients with "
                "engine.zero_grad() and run the micro-batches again"
            )
        assert shard.work_buffer is not None, shard.describe()
        return shard.work_buffer

    def _room_for(self, shard: Shard) -> Buffer:
        """Find room in the pool: the oldest one leaves first."""
        while True:
            buffer = self._copies.allocate(shard)
            if buffer is not None:
                return buffer
            owners = [owner for owner in self._copies.regions[Role.GRAD].owners() if owner >= 0]
            if not owners:
                raise InternalError(f"{shard.describe()}: does not fit the gradient pool\n{self._copies.dump()}")
            oldest = self._copies.of(max(owners), Role.GRAD)  # in backward, units come in reverse model order
            if oldest.state is State.DIRTY:
                self._copies.start_flush(oldest)
            self._copies.settle(oldest)
            self._copies.evict(oldest)
