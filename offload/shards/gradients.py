"""Gradients: taken in as they arrive, summed over micro-batches, spilled to NVMe where host memory cannot hold them.

Owns what has arrived since the last step, the sums that the norm is made of, the precision in which backward passes
are added, and who leaves the pool of gradients on their way to NVMe. Knows neither where a gradient comes from nor what
becomes of it. Whoever changes gradients comes through :mod:`offload.shards.manager`, which undoes what was made of
them. Next: :mod:`offload.module.handles` stands for them in ``.grad``, :mod:`offload.optim.recipe` uses them.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Container

import torch

from offload.errors import InternalError, StateError
from offload.kernels import cpu_adam
from offload.memory.arena import HOST, Buffer, view_at
from offload.memory.budget import Tier
from offload.memory.transfer import Mover, TicketGroup
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.units import Unit, Where
from offload.shards.copies import Copies
from offload.shards.gradients_on_device import GradientsOnDevice
from offload.shards.shard import Event, Shard, State
from offload.spans import CPU_ADAM
from offload.stats import Counters
from offload.torch_private import no_dispatch, no_functions, storage_at

WIDEN_NUMEL = 1 << 20  # elements that are widened at once

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
        missing: slots whose gradient has not come since there was one of each.
        sums: per slot, the sum of squares and number of non-finite elements of the final gradient, None until known.
        passes: per slot, the backward pass in which it came last, and how many have brought one.
        final_adds: per slot, gradients that were taken, or are about to be, with no further micro-batch to come.
        final_come: per slot, those of them that are there.
        handed_over: gradients that the mover was given since it had one of each slot.
    """

    arrived: list[bool]
    missing: set[int]
    sums: list[tuple[float, int] | None]
    passes: list[tuple[int, int]]
    final_adds: list[int]
    final_come: list[int]
    handed_over: int = 0

    @classmethod
    def of(cls, unit: Unit) -> Gradient:
        """Return that of a unit of which nothing has arrived."""
        slots = len(unit.slots)
        final_adds, final_come = [0] * slots, [0] * slots
        return cls([False] * slots, set(range(slots)), [None] * slots, [(-1, 0)] * slots, final_adds, final_come)


@dataclasses.dataclass(frozen=True, slots=True)
class GradientNorm:
    """Global norm of a step's gradients: of all of the model's, whether the optimizer has the parameter or not.

    Attributes:
        squares: sum of squares of the raw gradients (sums over micro-batches, with the loss scale in them), before
            clipping.
        left: the same after what torch has clipped.
        bad: names of parameters with NaN or infinite elements.
        spoilt: names of parameters whose gradient was multiplied by NaN or infinity.
        count: parameters that have a gradient.
        factors: per parameter what its gradient was multiplied by; 1 where it is absent.
    """

    squares: float
    left: float
    bad: list[str]
    spoilt: list[str]
    count: int
    factors: dict[Where, float]


class Gradients:
    """Gradients of one engine. See the module's text."""

    def __init__(
        self,
        plan: Plan,
        copies: Copies,
        mover: Mover,
        counters: Counters,
        there: GradientsOnDevice | None = None,
        *,
        deadline_s: float,
    ) -> None:
        """Begin with none; `there` computes on those that wait on the device, where the host cannot."""
        self._there = there
        self._request = plan.request
        self._copies = copies
        self._mover = mover
        self._counters = counters
        self._took_s, self._took_bytes = 0.0, 0  # since there was a span of that
        self._accumulate = plan.request.accumulate
        self._may_widen = bool(plan.wide_bytes)
        self._deadline_s = deadline_s
        self._gradients = {unit.index: Gradient.of(unit) for unit in plan.request.units if unit.trainable}
        self._adding = threading.Lock()  # held by whoever adds one, in a thread of the mover's, or drops all
        self._held: set[int] = set()  # units whose gradients belong to a step that has not used them yet
        self._wide: set[int] = set()  # units of 16 bits whose gradients have become fp32
        self._completed: deque[int] = deque()  # of which all has come that will come before the step, in this order

    def add(self, index: int, slot: int, gradient: torch.Tensor, *, final: bool, backward_pass: int = 0) -> None:
        """Add one parameter's gradient to what has arrived since the last step.

        What comes in one backward pass is added in the gradient's dtype, as autograd does. What comes in another one is
        added in fp32.

        Args:
            index: unit.
            slot: position of the parameter in the unit.
            gradient: (slot shape) in the unit's dtype, on the device.
            final: no further micro-batch follows before the step, so the host takes the sum of squares now.
            backward_pass: a number that the gradients of one backward pass have in common.

        Raises:
            StateError: it comes in a second backward pass, and the plan has no room for the sum in fp32. What has
                arrived is as it was.
        """
        known = self._gradients[index]
        latest, count = known.passes[slot]
        some = known.arrived[slot] or count > 0  # what the mover has not brought yet counts, too
        another = some and backward_pass != latest
        widen = another and not self._is_fp32(self._copies.of(index, Role.GRAD).unit)
        if widen and not self._may_widen:
            raise StateError(self._refusal(self._copies.of(index, Role.GRAD).unit, slot))
        known.passes[slot] = (backward_pass, count + 1 if another or not count else count)
        known.final_adds[slot] += final
        known.handed_over = (known.handed_over + 1) % len(known.arrived)
        if self._there is not None and index in self._there:
            self._keep(self._there, (index, slot), gradient.contiguous(), final=final, widen=widen)
            return
        self._mover.read_tensor(
            gradient.contiguous(),
            lambda address: self._take_in(known, (index, slot), address, final=final, widen=widen),
            group=index,
            last=not known.handed_over,
        )

    def _take_in(self, known: Gradient, where: Where, source: int, *, final: bool, widen: bool) -> None:
        """Add what the mover has brought, unless all was dropped since it was asked to."""
        with self._adding:
            if self._gradients[where[0]] is known:
                self._add(*where, source, final=final, widen=widen)

    def _add(self, index: int, slot: int, source: int, *, final: bool, widen: bool) -> None:
        shard, gradient = self._copies.of(index, Role.GRAD), self._gradients[index]
        if widen:
            self._widen(shard)
        unit, dtype, numel = shard.unit, self.dtype(shard.unit), shard.unit.slots[slot].numel
        begin, adds = time.perf_counter(), gradient.arrived[slot]
        total = cpu_adam.take_gradient(
            src=source,
            src_dtype=KERNEL_DTYPE[unit.dtype],
            dst=self._address(shard, slot, dtype),
            dst_dtype=dtype,
            numel=numel,
            add=adds,
            measure=final,
        )
        end = time.perf_counter()
        self._took_s += end - begin
        self._took_bytes += numel * (KERNEL_DTYPE[unit.dtype].itemsize + (2 if adds else 1) * dtype.itemsize)
        self._arrive(shard, slot, total if final else None, final=final)
        if len(gradient.missing) == len(gradient.arrived):  # a whole unit
            if not self._request.device_is_host:  # else it is a part of the pass
                self._counters.spans.add(CPU_ADAM, f"gradients: {unit.name}", end - self._took_s, end, self._took_bytes)
            self._took_s, self._took_bytes = 0.0, 0

    def _keep(
        self, there: GradientsOnDevice, where: Where, gradient: torch.Tensor, *, final: bool, widen: bool
    ) -> None:
        """Let a gradient wait on the device."""
        shard = self._copies.of(where[0], Role.GRAD)
        if widen:
            self._widen(shard)
        self._begin(shard)
        dtype = self.dtype(shard.unit)
        self._mover.note_stream()
        if not there.keep(where, gradient, dtype):
            with self._mover.alone():
                there.add(where, gradient, dtype)
        self._arrive(shard, where[1], None, final=final)

    def _arrive(self, shard: Shard, slot: int, total: tuple[float, int] | None, *, final: bool) -> None:
        """Note what has arrived, and what was measured of it."""
        gradient = self._gradients[shard.unit.index]
        gradient.arrived[slot] = True
        gradient.sums[slot] = total
        gradient.missing.discard(slot)
        if not gradient.missing:
            gradient.missing = set(range(len(shard.unit.slots)))
            if shard.home is Tier.NVME:
                self._copies.start_flush(shard)
        gradient.final_come[slot] += final
        if final and gradient.final_come[slot] == 1 and all(gradient.final_come):
            self._completed.append(shard.unit.index)

    def begin_backward(self, reached: Callable[[], Collection[Where] | None]) -> None:
        """Begin a backward pass; nothing where there is one rank."""

    def refuse_backward(self, error: BaseException) -> None:
        """Let no rank have this backward pass, for this one cannot; nothing where there is one rank."""

    def exchange(self) -> None:
        """Add the other ranks' gradients of this micro-batch to what has arrived; nothing where there is one rank."""

    @property
    def any_completed(self) -> bool:
        """Whether :meth:`take_completed` has any now."""
        return bool(self._completed)

    def take_completed(self) -> list[int]:
        """Return units of which all has come that will come before the step, in this order, each once."""
        return [self._completed.popleft() for _ in range(len(self._completed))]

    def is_complete(self, index: int) -> bool:
        """Tell whether all of a unit's gradient was to be there: what comes now changes it."""
        return all(self._gradients[index].final_adds)

    def passes(self, index: int, slot: int, backward_pass: int) -> int:
        """Return how many backward passes will have brought a gradient since the last step when this one has."""
        latest, count = self._gradients[index].passes[slot]
        return count + (backward_pass != latest)

    @property
    def most_passes(self) -> int:
        """The most backward passes that have brought a gradient of one parameter since the last step."""
        return max((count for known in self._gradients.values() for _, count in known.passes), default=0)

    def is_whole(self, index: int) -> bool:
        """Tell whether each parameter's gradient has come once in the last micro-batch, and none is on its way."""
        gradient = self._gradients[index]
        counts = zip(gradient.final_adds, gradient.final_come, strict=True)
        return all(given == come == 1 for given, come in counts) and all(gradient.arrived)

    def sums(self, index: int) -> list[tuple[float, int] | None]:
        """Return per slot (sum of squares, non-finite elements) of the step's gradient; None where none has arrived.

        Sums that were not taken at arrival are taken now: of what waits on the device, and where the last micro-batch
        did not reach the parameter.

        Raises:
            StateError: others have changed a gradient that waits there; see :meth:`GradientsOnDevice.address`.
        """
        return [self.sum_of(index, slot) for slot in range(len(self._gradients[index].arrived))]

    def sum_of(self, index: int, slot: int) -> tuple[float, int] | None:
        """Return (sum of squares, non-finite elements) of a parameter's gradient, None where none has arrived."""
        gradient = self._gradients[index]
        if not gradient.arrived[slot]:
            return None
        if gradient.sums[slot] is None and self.is_there(index):
            self.read_sums()
        total = gradient.sums[slot]
        if total is None:
            shard = self._copies.of(index, Role.GRAD)
            numel = shard.unit.slots[slot].numel
            dtype = self.dtype(shard.unit)
            total = cpu_adam.sum_of_squares(self._address(shard, slot, dtype), dtype, numel)
            gradient.sums[slot] = total
        return total

    def read_sums(self) -> None:
        """Have what waits on the device measured there, and wait for it; nothing where none does."""
        if self._there is None:
            return
        wanted = [
            (index, slot)
            for index, gradient in self._gradients.items()
            if index in self._there
            for slot, (arrived, known) in enumerate(zip(gradient.arrived, gradient.sums, strict=True))
            if arrived and known is None
        ]
        with self._mover.alone():
            for (index, slot), total in zip(wanted, self._there.measure(wanted), strict=True):
                self._gradients[index].sums[slot] = total

    def is_there(self, index: int) -> bool:
        """Tell whether a unit's gradient waits on a device that the host cannot address."""
        return self._there is not None and index in self._there

    def arrived(self, index: int) -> list[bool]:
        """Return per slot whether a gradient has arrived since the last step."""
        return self._gradients[index].arrived

    @property
    def any_arrived(self) -> bool:
        """Whether any gradient has come since the last step; those on their way to the host count."""
        known = self._gradients.values()
        return any(any(each.arrived) or any(count for _, count in each.passes) for each in known)

    # --- what has arrived, for those who look at it or change it -----------------------------------------------------

    def content(self, index: int, slot: int) -> torch.Tensor:
        """Return a view of what has arrived of a parameter's gradient, as long as no other one is asked for.

        Returns:
            (numel,) in :meth:`dtype`, where it waits: the sum over micro-batches, with the loss scale in it.
        """
        self.await_copies()
        with self._mover.alone():  # what others have given the device comes first, and they see what is done next
            shard = self._copies.of(index, Role.GRAD)
            dtype = torch.float32 if self._is_fp32(shard.unit) else getattr(torch, shard.unit.dtype)
            numel = shard.unit.slots[slot].numel
            address = self._address(shard, slot, self.dtype(shard.unit))
            storage = storage_at(address, numel * dtype.itemsize, self._place(index))
            return view_at(storage, dtype, 0, (numel,))

    def copied(self, index: int, slot: int, device: torch.device) -> torch.Tensor:
        """Return a copy of :meth:`content` on a device; what waits in host memory passes through memory of torch's.

        For that of the arena may be locked in pieces, and CUDA copies nothing that lies in two of them.
        """
        content = self.content(index, slot)
        if content.device == device:
            return content.clone()
        return (content.clone() if content.device == HOST else content).to(device)

    def overwrite(self, index: int, slot: int, content: torch.Tensor | float) -> None:
        """Let a parameter's gradient be `content`: (numel,) of any dtype on any device, or one number for all."""
        self.await_copies()
        gradient = self._gradients[index]
        gradient.arrived[slot] = True
        self._spoil(index, slot)
        view = self.content(index, slot)
        with self._mover.alone():
            if isinstance(content, torch.Tensor):
                view.copy_(content.to(view.device))  # through memory of torch's, as in copied()
            else:
                view.fill_(content)

    def multiply(self, index: int, slot: int, factor: float) -> None:
        """Multiply what has arrived of a parameter's gradient."""
        view = self.content(index, slot)  # what is on its way is measured when it comes
        self._spoil(index, slot)
        with self._mover.alone():
            view.mul_(factor)

    def forget(self, index: int, slot: int) -> None:
        """Forget what has arrived of a parameter's gradient."""
        self.await_copies()
        self._spoil(index, slot)
        gradient = self._gradients[index]
        gradient.arrived[slot], gradient.passes[slot] = False, (-1, 0)
        if self._there is not None:
            self._there.release((index, slot))
        if index not in self._held and not any(gradient.arrived):  # its memory is idle: what comes next waits for it
            self._discard(self._copies.of(index, Role.GRAD))

    def count(self, index: int, slot: int) -> int:
        """Return how many backward passes have brought a parameter's gradient since the last step."""
        return self._gradients[index].passes[slot][1]

    def _spoil(self, index: int, slot: int) -> None:
        """Note that a parameter's gradient has become another one: what was measured is of no use."""
        self._gradients[index].sums[slot] = None

    def restore(self, index: int, slot: int, dtype: cpu_adam.Dtype, count: int) -> int:
        """Let a parameter have a gradient of `count` backward passes, whose elements somebody writes.

        Returns:
            Where to, until another one is asked for: (numel,) in `dtype`; see :meth:`is_there`.

        Raises:
            StateError: this engine stores it in fewer bits, and has no room for more.
        """
        shard = self._copies.of(index, Role.GRAD)
        if dtype is cpu_adam.Dtype.FLOAT32 and not self._is_fp32(shard.unit):
            if not self._may_widen:
                raise StateError(self._refusal(shard.unit, slot))
            self._widen(shard)
        self._spoil(index, slot)
        gradient = self._gradients[index]
        gradient.arrived[slot], gradient.passes[slot] = True, (-1, count)
        gradient.missing = set(range(len(shard.unit.slots)))
        return self._address(shard, slot, self.dtype(shard.unit))

    # --- life and death ---------------------------------------------------------------------------------------------

    def await_next(self, room_for: int | None = None) -> bool:
        """Wait until one more unit's gradient has left the device; returns False where none has to be waited for.

        Args:
            room_for: bytes of a gradient that is to come; None where all are to leave.
        """
        return self._mover.await_next(self._deadline_s, room_for=room_for)

    def await_copies(self) -> None:
        """Wait until every gradient is in host memory (they may still be on their way to NVMe)."""
        self._mover.wait(self._deadline_s)

    def drop(self) -> None:
        """Forget all gradients that have arrived since the last step, behind one that is being added, though late."""
        self.await_copies()
        with self._adding:
            self._completed.clear()
            for index in self._gradients:
                shard = self._copies.of(index, Role.GRAD)
                if index not in self._held:
                    self._discard(shard)
                self._gradients[index] = Gradient.of(shard.unit)

    def hold(self, indices: Container[int]) -> list[Buffer]:
        """Close a step: forget what has arrived, but keep the gradients of units `indices` until :meth:`let_go`.

        Returns:
            Host memory of gradients that nothing is kept of: idle, and the step's until it has ended.
        """
        self._held = {index for index in self._gradients if index in indices}
        self.drop()
        return [buffer for index in self._gradients if index not in self._held for buffer in self._idle(index)]

    def idle(self) -> list[Buffer]:
        """Return host memory in which no gradient waits: idle until one is added; nothing where any waits."""
        self.await_copies()
        if self._held or self.any_arrived:
            return []
        return [buffer for index in self._gradients for buffer in self._idle(index)]

    def let_go(self, index: int) -> list[Buffer]:
        """Let the gradient of a unit that was held go: the step has used it; returns its memory as :meth:`hold`."""
        self._held.discard(index)
        self._discard(self._copies.of(index, Role.GRAD))
        return self._idle(index)

    def _discard(self, shard: Shard) -> None:
        self._copies.discard(shard)
        self._wide.discard(shard.unit.index)
        if self._there is not None:
            self._there.release_all(shard.unit)

    def _idle(self, index: int) -> list[Buffer]:
        """Return the host memory that only this gradient is ever in; not the room for fp32, which stays untouched."""
        shard = self._copies.of(index, Role.GRAD)
        if shard.home is not Tier.HOST or shard.home_buffer is None:
            return []
        used_bytes = self._request.owned_numel(shard.unit, Role.GRAD) * self.dtype(shard.unit).itemsize
        return [dataclasses.replace(shard.home_buffer, size_bytes=used_bytes)]

    def empty_pool(self) -> None:
        """Send what is in the pool home, and have nothing there."""
        for index in self._gradients:
            shard = self._copies.of(index, Role.GRAD)
            if shard.home is Tier.NVME:
                if shard.state is State.DIRTY:
                    self._copies.start_flush(shard)
                self._copies.wait(shard)
                if shard.state is State.RESIDENT:
                    self._copies.evict(shard)

    # --- how it is stored -------------------------------------------------------------------------------------------

    def dtype(self, unit: Unit) -> cpu_adam.Dtype:
        """Return the dtype in which a unit's gradient is stored now."""
        return cpu_adam.Dtype.FLOAT32 if self._is_fp32(unit) else KERNEL_DTYPE[unit.dtype]

    def _is_fp32(self, unit: Unit) -> bool:
        return self._accumulate or unit.dtype == "float32" or unit.index in self._wide

    def _place(self, index: int) -> torch.device:
        """Return torch's device of what has arrived of a unit."""
        return HOST if self._there is None or index not in self._there else self._there.place

    def _widen(self, shard: Shard) -> None:
        """Let a unit's gradient be fp32 from now on, where it is: the last elements move first."""
        unit = shard.unit
        if self._is_fp32(unit):  # another of its parameters was here before
            return
        if self._there is not None and unit.index in self._there:
            with self._mover.alone():
                self._there.widen(unit)
            self._wide.add(unit.index)
            return
        memory = storage_at(self._at_home(shard).address, unit.numel * 4, HOST)
        narrow = view_at(memory, getattr(torch, unit.dtype), 0, (unit.numel,))
        wide = view_at(memory, torch.float32, 0, (unit.numel,))
        with no_functions(), no_dispatch():
            for end in range(unit.numel, 0, -WIDEN_NUMEL):
                begin = max(end - WIDEN_NUMEL, 0)
                wide[begin:end] = narrow[begin:end].float()
        self._wide.add(unit.index)

    @staticmethod
    def _refusal(unit: Unit, slot: int) -> str:
        return (
            f"gradient of {unit.slots[slot].name}: expected one backward pass per step but got a second one, which "
            f"would be added in {unit.dtype}; the budgets leave no room for the sum in fp32, so pass "
            "gradient_accumulation_steps, the number of backward passes per step (and gradient_reduction='sum' where "
            "the loss is divided by it already)"
        )

    def _address(self, shard: Shard, slot: int, dtype: cpu_adam.Dtype) -> int:
        """Return where a parameter's gradient in `dtype` may be read and written now, by the host or where it waits."""
        if self._there is not None and shard.unit.index in self._there:
            self._begin(shard)
            return self._there.room((shard.unit.index, slot), shard.unit.slots[slot].numel, dtype)
        begin = self._request.owned(shard.unit, Role.GRAD)[0]  # of several ranks: the parameter may begin before it
        return self._base(shard) + (shard.unit.slots[slot].offset_numel - begin) * dtype.itemsize

    def _base(self, shard: Shard) -> int:
        """Return where a shard of gradients may be read and written now."""
        return (self._at_home(shard) if shard.home_buffer is not None else self._in_pool(shard)).address

    def _begin(self, shard: Shard) -> None:
        if shard.state is State.EMPTY:
            self._copies.await_late()  # a stream may have used the memory while it was idle
            self._copies.change(shard, Event.OVERWRITE_HOME)

    def _at_home(self, shard: Shard) -> Buffer:
        self._begin(shard)
        assert shard.home_buffer is not None
        return shard.home_buffer

    def _in_pool(self, shard: Shard) -> Buffer:
        copies = self._copies
        copies.wait(shard)
        if shard.state is State.STORED:
            buffer = self._room_for(shard)
            copies.start_fetch(
                shard, buffer, lambda: TicketGroup(copies.start_reads(shard, buffer.address, urgent=True))
            )
            copies.wait(shard)
        if shard.state is State.RESIDENT:
            copies.change(shard, Event.MODIFY)
        elif shard.state is State.EMPTY:
            buffer = self._room_for(shard)
            copies.begin_in(shard, buffer)
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
            self._copies.wait(oldest)
            self._copies.evict(oldest)
