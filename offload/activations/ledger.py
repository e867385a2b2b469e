"""What activations and temporaries take of the device budget: as booked, and as measured.

Booked is what autograd keeps, from the moment it is saved until it is freed. Where the device is the CPU, the resident
set is measured, too: temporaries inside operations, what the loss needs outside the module, and holes that the
allocator leaves are memory as well. The working region of parameters gives way to both: the first micro-batch runs with
the smallest region that works, later ones with what the measured peak has left over.

Owns the ledger of saved tensors and the comparison; resizes the region through :class:`Elastic`. Knows no units and no
modules. Next: :mod:`offload.module.hooks` tells what is saved, and when a moment is safe to move parameters.
"""

from __future__ import annotations

import collections
import dataclasses
import logging
import time
from collections.abc import Mapping
from typing import Protocol

import torch

from offload.errors import BATCH_TOO_LARGE, BudgetError, StateError
from offload.memory.budget import Budget
from offload.sizes import format_bytes
from offload.torch_private import WeakStorage, autocast_keeps_copies, no_functions, storage_use_count
from swap import SwapStore

logger = logging.getLogger(__name__)

TOLERANCE_BYTES = 64 << 20  # of the measured peak over the budget: Python's own objects, imports, the allocator
MARGIN_BYTES = 16 << 20  # kept free beside the highest measured peak
MARGIN_SHARE = 1 / 16
PASSES_REMEMBERED = 64  # whose highest peak the region leaves room for
LEAST_GROWTH_SHARE = 1 / 8  # of the region: less is not worth a change
HOLES_FACTOR = 1.3  # what the allocator may make of a peak when holes are left to it, which is faster
WORTH_SAMPLING_BYTES = 256 << 10
WORTH_ASKING_BYTES = 1 << 20  # of a storage: who else has it
WORTH_TRIMMING_BYTES = 16 << 20
# What helps where autocast has a copy of each parameter, which other remedies leave where it is.
NO_COPIES = "torch.autocast(..., cache_enabled=False), which then keeps no copy of each fp32 parameter on the device"
LOOK_EVERY_S = 1e-3  # compute allocates a few MiB at most in between


class Meter(Protocol):
    """Measures the memory that activations live in.

    Attributes:
        notes_peaks: :meth:`high_water_bytes` has seen every moment, so that nobody needs to look in between.
    """

    @property
    def notes_peaks(self) -> bool:
        """See the class."""

    def now_bytes(self) -> int:
        """Return the bytes that are in use now."""

    def high_water_bytes(self) -> int:
        """Return the most that has been in use at once."""

    def trim(self) -> None:
        """Give back what is kept though nothing is in it."""

    def forget_peak(self) -> None:
        """Note peaks anew, where that can be told."""

    def close(self) -> None:
        """Close it. Idempotent."""


class Elastic(Protocol):
    """What gives way: the working region, which parameters can do without, and gradients on their way to the host."""

    def shrink(self, by_bytes: int) -> int:
        """Give memory and its reservation back, `by_bytes` or as much as can be spared; returns how much."""

    def grow(self, by_bytes: int) -> int:
        """Take memory and its reservation, at most `by_bytes`; returns how much."""

    def make_room(self, by_bytes: int) -> int:
        """Wait until gradients on their way take `by_bytes` less, or all have left; returns how many less."""

    def leave_more(self, by_bytes: int) -> int:
        """Let gradients on their way leave so many bytes more to others from now on; returns how many they can."""

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the budget that gradients on their way have now."""

    @property
    def size_bytes(self) -> int:
        """Present size of the region."""

    @property
    def smallest_arena_bytes(self) -> int:
        """Device memory that the parameters need at least, were they placed for it."""


def changed_in_place(shape: torch.Size) -> StateError:
    """Return the error that a saved tensor of this shape is not what was saved."""
    return StateError(
        f"backward: a tensor of shape {tuple(shape)} that its gradient needs was changed in place after the forward "
        "had used it, so the gradient would be wrong; clone it before the change (torch.autograd.set_detect_anomaly "
        "names the operation)"
    )


class SavedActivation:
    """A tensor kept for backward, charged to the device budget as long as it is kept.

    It is kept detached: an operator's output knows the operator, which keeps this, and nobody could break that cycle.
    With hooks in place torch does not look whether a tensor was changed in place after it was saved, so this does.

    Attributes:
        tensor: detached.
        version: torch's count of changes, when it was saved.
    """

    __slots__ = ("_freed", "_key", "tensor", "version")

    def __init__(
        self, tensor: torch.Tensor, activations: Activations | None = None, address: int | None = None
    ) -> None:
        """Keep `tensor`.

        Args:
            tensor: what is saved.
            activations: ledger to charge it to; None for a tensor that is not of the engine's device.
            address: where its storage begins, if that is known.
        """
        self.tensor = tensor.detach() if tensor.requires_grad else tensor
        self.version = tensor._version
        self._freed: collections.deque[int] | None = None
        if activations is not None:
            self._key = tensor.untyped_storage().data_ptr() if address is None else address
            if activations.charge(tensor, self._key):
                self.tensor = tensor.detach()
            self._freed = activations.freed

    def get(self) -> torch.Tensor:
        """Return the tensor.

        Raises:
            StateError: it was changed in place since.
        """
        tensor = self.tensor
        with no_functions():  # the mode that sees uses of parameters need not see this
            if tensor._version == self.version:
                return tensor
        raise changed_in_place(tensor.shape)

    @property
    def changed(self) -> bool:
        """Whether the tensor was changed in place since."""
        with no_functions():
            return self.tensor._version != self.version

    def __del__(self) -> None:
        freed = getattr(self, "_freed", None)  # nothing, if an interrupt has come while it was made
        if freed is not None:
            freed.append(self._key)


@dataclasses.dataclass(frozen=True, slots=True)
class Passed:
    """What a forward and its backward took.

    Attributes:
        moved: bytes of activations per link, as in ``engine.stats()``.
        seconds: from the beginning of the one to the end of the other.
        moving_s: of these, of the thread that computes, for activations that leave and come back: beginning copies, or
            making them, and waiting.
        waited_s: of these, for anything else.
    """

    moved: Mapping[str, int]
    seconds: float
    moving_s: float
    waited_s: float


class Activations:
    """Ledger and measurement of one engine's activations.

    A tensor may be freed anywhere, also by garbage collection inside the budget's own lock: it only leaves its key in
    `freed`, and the charge is given back at the next :meth:`refund`. A tensor may be saved in the middle of an
    operation whose parameters must not move: a charge that does not fit is owed until the next :meth:`balance`.

    Attributes:
        first_pass, last_pass: that were seen as a whole, of those that are counted; else None.

    Args:
        budget: of the device.
        region: what gives way.
        meter: measures the memory that activations live in: the resident set, or what torch counts of a GPU; None
            where it cannot be read.
        beside_bytes: of the host budget, outside its arena: what updates inside a forward take is resident, too. While
            they take less, the measurement lets the device have it; the two budgets together are kept.
        gradient_bytes: of the device budget outside its arena, for gradients that wait there: they come and go, so the
            region does not grow by what is free of it.
    """

    def __init__(
        self, budget: Budget, region: Elastic, meter: Meter | None, *, beside_bytes: int = 0, gradient_bytes: int = 0
    ) -> None:
        self.freed: collections.deque[int] = collections.deque()
        self._budget = budget
        self._claim = budget.claim("activations")
        self._region = region
        self._meter = meter
        self._tensors: dict[int, int] = {}  # that are kept, per address of a storage
        self._sizes: dict[int, int] = {}  # what is charged; dicts of numbers: Python looks for garbage among all others
        self._parts: dict[int, WeakStorage] = {}  # of these, the storages that are charged in part
        self._owed_bytes = 0
        self._peak_bytes = 0  # measured, in this pass
        self._seen_bytes = 0  # the same, by samples alone
        self._unseen_bytes = 0  # the most by which the former was above the latter, in any pass that had room
        self._most_bytes = 0  # the most that was measured in one of these
        self._early_bytes: int | None = None  # the same, before any gradient was on its way to the host; None: not yet
        self._calm_bytes = 0  # the same, when nothing was under way the last time
        self._spike_bytes = 0  # the most above that moment, in this pass
        self._spikes: collections.deque[int] = collections.deque(maxlen=PASSES_REMEMBERED)
        self._peaks: collections.deque[int] = collections.deque(maxlen=PASSES_REMEMBERED)
        self._tight: bool | None = None  # holes in the heap are given back before they add up; None: so far
        self._trimmed_bytes = 0  # what was resident after the last trim in this pass
        self._next_look_s = 0.0
        self._open = False  # a forward has begun whose end has not been looked at
        self._floor_bytes = 0  # what is resident beside the region when nothing is kept
        self._high_water_bytes = 0
        self._gradient_bytes = gradient_bytes
        self._outside_bytes = beside_bytes + gradient_bytes
        self.first_pass: Passed | None = None
        self.last_pass: Passed | None = None
        if meter is not None:
            meter.trim()  # what loading the model has left behind
            self._floor_bytes = meter.now_bytes() - region.size_bytes + self._outside_bytes
            self._high_water_bytes = meter.high_water_bytes()

    def is_empty(self) -> bool:
        """Tell whether nothing is kept."""
        return not self._tensors

    @property
    def store(self) -> SwapStore | None:
        """The swap store that has activations and nothing else; None where there is none."""
        return None

    def has_left(self) -> bool:
        """Tell whether something that is kept is in host memory."""
        return False

    def close(self) -> None:
        """Close the meter: nothing is measured any more. Idempotent."""
        if self._meter is not None:
            self._meter.close()
            self._meter = None

    # --- as booked --------------------------------------------------------------------------------------------------

    def charge(self, tensor: torch.Tensor, address: int) -> bool:
        """Charge a tensor's storage, which begins at `address`, once however many tensors view it.

        A tensor may be a small part of a large storage that somebody else has anyway: rows of data, or of a table. So
        of such a storage the first tensor alone is charged, until nobody else has it.

        Returns:
            Whether that is so. What is kept then must not keep what the tensor is a view of.
        """
        if self.freed:
            self.refund()
        tensors = self._tensors.get(address)
        if tensors is not None:
            self._tensors[address] = tensors + 1
            return address in self._parts
        storage = tensor.untyped_storage()
        size_bytes = storage.nbytes()
        self._tensors[address] = 1
        is_part = size_bytes >= WORTH_ASKING_BYTES and tensor.nbytes <= size_bytes // 2
        if is_part:
            self._parts[address] = WeakStorage(storage)
            size_bytes = tensor.nbytes
        self._sizes[address] = size_bytes
        self._book(size_bytes)
        if size_bytes >= WORTH_SAMPLING_BYTES:
            self.sample()
        return is_part

    def _book(self, size_bytes: int) -> None:
        if self._owed_bytes or not self._claim.grow(size_bytes):
            self._owed_bytes += size_bytes

    def is_in_part(self, saved: SavedActivation) -> bool:
        """Tell whether the storage of what is kept is charged in part."""
        return saved._key in self._parts

    def _charge_rest(self) -> None:
        """Charge all of the storages that nobody else has any more."""
        for address, weak in list(self._parts.items()):
            storage = weak.get()
            if storage is not None and storage_use_count(storage) - 1 <= self._tensors[address]:
                del self._parts[address]
                part_bytes, self._sizes[address] = self._sizes[address], storage.nbytes()
                self._book(self._sizes[address] - part_bytes)

    def refund(self) -> None:
        """Give back the charges of tensors that are gone."""
        freed, tensors_of, given_bytes = self.freed, self._tensors, 0
        while freed:
            address = freed.popleft()
            if tensors_of[address] > 1:
                tensors_of[address] -= 1
                continue
            del tensors_of[address]
            self._parts.pop(address, None)
            size_bytes = self._sizes.pop(address)
            owed = min(size_bytes, self._owed_bytes)
            self._owed_bytes -= owed
            given_bytes += size_bytes - owed
        if given_bytes:
            self._claim.resize(self._claim.size_bytes - given_bytes)

    # --- as measured ------------------------------------------------------------------------------------------------

    @property
    def room_bytes(self) -> int:
        """What the device budget leaves for activations beside the arena, as it is now."""
        return self._budget.free_bytes + self._claim.size_bytes

    def sample(self) -> int:
        """Note what is resident now; returns the bytes by which it exceeds the room, 0 where a meter notes peaks."""
        if self._meter is None or self._meter.notes_peaks:
            return 0
        used_bytes = self._used(self._meter.now_bytes())
        self._seen_bytes = max(self._seen_bytes, used_bytes)
        self._note_used(used_bytes)
        return used_bytes - self.room_bytes

    def balance(self) -> None:
        """Let the working region give way to what is owed, and to what is measured. No operation may be under way.

        Raises:
            BudgetError: what autograd keeps does not fit beside the smallest region.
        """
        if self.freed:
            self.refund()
        if self._parts:
            self._charge_rest()
        if self._owed_bytes:
            missing = self._owed_bytes - self._budget.free_bytes
            if missing > 0:
                missing -= self._shrink(missing)
            if missing > 0:
                self._region.make_room(missing)
            owed, self._owed_bytes = self._owed_bytes, 0
            try:
                self._claim.resize(self._claim.size_bytes + owed)
            except BudgetError as error:
                self._owed_bytes = owed
                states = ", or activation_memory, for which optimizer states leave it" if self._gradient_bytes else ""
                casts = f", or {NO_COPIES}" if autocast_keeps_copies() else ""
                raise BudgetError(f"{error}{states}{casts}, or {self._way_out()}{BATCH_TOO_LARGE}") from None
        now_s = time.perf_counter()
        if now_s < self._next_look_s:
            return
        self._next_look_s = now_s + LOOK_EVERY_S
        excess = self.sample()
        if excess > 0:
            excess -= self._shrink(excess)
        self._calm_bytes = used = excess + self.room_bytes
        if self._tight:  # a spike must still fit; in the first pass, nobody knows how high it will be
            excess += max(self._spike_bytes, *self._spikes)
        if (excess > 0 or self._tight is None) and self._meter is not None and not self._meter.notes_peaks:
            if used - max(self._claim.size_bytes, self._trimmed_bytes) > WORTH_TRIMMING_BYTES:
                self._meter.trim()
                self._calm_bytes = self._trimmed_bytes = self._used(self._meter.now_bytes())

    def await_gradient(self) -> None:
        """Balance before a gradient is given away: no other will have taken room so far, if it is the first.

        Raises:
            BudgetError: see :meth:`balance`.
        """
        self.balance()
        if self._early_bytes is None and self._meter is not None and self._meter.notes_peaks:
            self._note_high_water()
            self._early_bytes = self._peak_bytes

    def _way_out(self) -> str:
        """Return what helps beside a larger budget, in words."""
        return 'activations="auto", with which they leave the device or are computed again'

    def open_pass(self) -> None:
        """Note that a forward begins. What has been resident before it is no concern of the engine."""
        self.refund()
        if self._meter is not None and self.is_empty():
            if self.sample() > 0:  # what a failed micro-batch, or the user, has left in the heap
                self._meter.trim()
            floor_bytes = self._meter.now_bytes() - self._region.size_bytes + self._outside_bytes
            self._floor_bytes = min(self._floor_bytes, floor_bytes)  # what the user has freed is nobody's any more
            self._high_water_bytes = self._meter.high_water_bytes()
            self._peak_bytes = self._calm_bytes = self._spike_bytes = self._trimmed_bytes = self._seen_bytes = 0
            self._early_bytes = 0 if self._region.leaving_bytes else None  # those of the last pass are in the way
            self._open = True

    def abandon_pass(self) -> None:
        """Note that a micro-batch has failed: what it took says nothing of those that will not."""
        self._open = False

    def close_pass(self) -> None:
        """Note that a micro-batch has ended, if nothing is kept of it: adapt the region to what it has needed.

        Raises:
            BudgetError: it needed more than the device budget leaves beside the smallest region.
        """
        self.refund()
        if self._meter is None or not self._open or not self.is_empty():
            return
        self._open = False
        self.sample()
        self._note_high_water()
        peak, early, leaving = self._peak_bytes, self._early_bytes or 0, self._region.leaving_bytes
        unseen = max(self._unseen_bytes, peak - self._seen_bytes)
        likely = self._seen_bytes + unseen  # a peak that is no record is not seen, and may be there again
        if peak > self.room_bytes + leaving:
            leaving -= self._region.make_room(leaving)  # so that what stays can be told from them
            self._meter.trim()
            grown = self._used(self._meter.now_bytes()) - leaving
            if grown > 0:  # what stays when nothing is kept is not an activation: data of the user, modules imported
                self._floor_bytes += grown
                peak, early, likely = peak - grown, early - grown, likely - grown
        self._spikes.append(self._spike_bytes)
        excess = peak - self.room_bytes - leaving
        if excess > 0:
            excess -= self._shrink(excess)
        room = self.room_bytes + leaving
        excess = self._let_others_take_less(excess, peak, early, room)
        self._unseen_bytes, self._most_bytes = unseen, max(self._most_bytes, peak)
        if self._tight is None:
            self._tight = peak * HOLES_FACTOR + MARGIN_BYTES > self.room_bytes + leaving
            if not self._tight:
                return  # the next pass tells what it takes with holes
        self._tight = self._tight or excess > 0
        self._peaks.append(min(likely, self._most_bytes))
        spare = self.room_bytes + leaving - with_margin(max(self._peaks)) - self._gradient_bytes
        if spare > self._region.size_bytes * LEAST_GROWTH_SHARE:
            self._region.grow(spare)

    def _let_others_take_less(self, excess: int, peak_bytes: int, early_bytes: int, room_bytes: int) -> int:
        """Have activations that leave, and gradients on their way, take less where a pass took too much.

        It is told, and the next peak is noted anew, so that the next pass tells whether it was enough.

        Args:
            excess: bytes that are missing.
            peak_bytes: that the pass has taken.
            early_bytes: the same, before any gradient was on its way.
            room_bytes: that there are.

        Returns:
            The bytes that are missing still.

        Raises:
            BudgetError: more than is tolerated.
        """
        most = room_bytes + TOLERANCE_BYTES
        given = {"activations that leave": 0, "gradients on their way": 0}
        if excess > TOLERANCE_BYTES and early_bytes - self._spare_bytes <= most:
            if early_bytes > most:
                given["activations that leave"] += self._stay_less(early_bytes - room_bytes)
            left = excess - given["activations that leave"]
            if left > 0:
                given["gradients on their way"] = self._region.leave_more(left)
            left = excess - sum(given.values())
            if TOLERANCE_BYTES < left <= self._spare_bytes + TOLERANCE_BYTES:
                given["activations that leave"] += self._stay_less(left)
        left = excess - sum(given.values())
        if left > TOLERANCE_BYTES:
            raise BudgetError(self._refusal(early_bytes if early_bytes > most else peak_bytes, room_bytes))
        if any(given.values()):
            assert self._meter is not None
            logger.warning(
                "device budget: a micro-batch took %s of activations, temporaries and gradients on their way "
                "but %s are left; %s from now on. If the next one takes too much, too, it is refused%s. "
                'To avoid this, raise max_memory["device"], or take smaller micro-batches',
                format_bytes(peak_bytes),
                format_bytes(room_bytes),
                ", ".join(f"{who} take up to {format_bytes(size)} less" for who, size in given.items() if size),
                " (torch's count of the peak begins anew for that)" if self._meter.notes_peaks else "",
            )
            self._meter.forget_peak()
        return left

    @property
    def _spare_bytes(self) -> int:
        """What activations that leave could take less."""
        return 0

    def _stay_less(self, by_bytes: int) -> int:
        """Let what leaves take so many bytes less of the device from now on; returns how many it can."""
        return 0

    def forget_passes(self) -> None:
        """Let the next pass be the first: what is kept will be something else."""
        self.first_pass = self.last_pass = None

    def _note_pass(self, passed: Passed) -> None:
        self.last_pass = passed
        self.first_pass = self.first_pass or passed

    def _note_used(self, used_bytes: int) -> None:
        self._peak_bytes = max(self._peak_bytes, used_bytes)
        self._spike_bytes = max(self._spike_bytes, used_bytes - self._calm_bytes)

    def _used(self, resident_bytes: int) -> int:
        return resident_bytes - self._floor_bytes - self._region.size_bytes

    def _note_high_water(self) -> None:
        """Take what the kernel saw between two samples, where it was the process's highest ever."""
        if self._meter is not None:
            high_water = self._meter.high_water_bytes()
            if high_water > self._high_water_bytes:
                self._high_water_bytes = high_water
                self._note_used(self._used(high_water))

    def _shrink(self, by_bytes: int) -> int:
        self._note_high_water()  # what was seen so far belongs to the region so far
        given = self._region.shrink(by_bytes)
        if given:
            logger.debug("working region: gave %s to activations", format_bytes(given))
        return given

    def _refusal(self, peak_bytes: int, room_bytes: int) -> str:
        arena_bytes = self._budget.limit_bytes - room_bytes
        wanted_bytes = with_margin(peak_bytes)
        need_bytes = wanted_bytes + self._region.smallest_arena_bytes
        leaving, there = "parameters", "parameters"
        if self._gradient_bytes:
            leaving, there = "optimizer states", "parameters and optimizer states"
        if need_bytes <= self._budget.limit_bytes:
            remedy = f"set activation_memory to {format_bytes(wanted_bytes)}, so that {leaving} leave the device"
        else:
            remedy = f'raise max_memory["device"] to {format_bytes(need_bytes)}'
        return (
            f"device budget: a micro-batch took {format_bytes(peak_bytes)} of activations and temporaries as measured "
            f"but {format_bytes(room_bytes)} are left beside {format_bytes(arena_bytes)} of {there}; {remedy}, "
            "use gradient checkpointing, or take smaller micro-batches. What other engines took meanwhile is in it"
            f"{BATCH_TOO_LARGE}"
        )


def with_margin(peak_bytes: int) -> int:
    """Return the room that an engine leaves to activations whose highest peak this was."""
    return peak_bytes + max(MARGIN_BYTES, int(peak_bytes * MARGIN_SHARE))
