"""Activations that leave the device between forward and backward, and come back in time.

What autograd keeps leaves in the order in which it was saved, once enough was saved after it: the last ones stay, for
they are needed first. It comes back in the reverse order, ahead of its use. What somebody else holds as well stays,
too: moving it would free nothing. So whatever has left cannot be changed by anybody.

Owns when a storage leaves and comes back, and the copies between the device and :mod:`offload.activations.away`. A
storage moves once, however many tensors of it are saved. Knows no units and no modules. Next:
:mod:`offload.module.saved` hands tensors over.
"""

from __future__ import annotations

import dataclasses
import time
import weakref
from collections import deque
from collections.abc import Mapping

import torch

from offload.activations.away import Away, Room, room_for
from offload.activations.in_order import InOrder
from offload.activations.ledger import Activations, Elastic, Meter, Passed, SavedActivation, changed_in_place
from offload.activations.near import Near
from offload.errors import BudgetError, StateError
from offload.memory.arena import view_at
from offload.memory.budget import Budget
from offload.memory.transfer import Arriving, LeftToWhoNeedsIt, Mover, Ticket
from offload.sizes import format_bytes
from offload.stats import Counters
from offload.torch_private import (
    counted_by,
    have_one_counter,
    no_dispatch,
    no_functions,
    storage_place,
    storage_use_count,
)
from swap import SwapStore

LEAST_BYTES = 128 << 10  # of a storage that is worth a copy
LONGEST_START_S = 1e-3  # that beginning a few copies takes; what takes longer has waited
_ALONE = 2  # uses of a storage that one tensor has, while one asks


class Leaver:
    """A storage that autograd keeps; it lives as long as somebody may ask for it.

    A destructor may run anywhere: it leaves its record behind, for :class:`LeavingActivations` to give the room back.

    Attributes:
        held: what keeps it on the device, charged; None where it is elsewhere.
        record: what is known of it.
    """

    __slots__ = ("__weakref__", "_gone", "held", "record")

    def __init__(self, held: SavedActivation, number: int, room: Room, size_bytes: int, gone: deque[_Record]) -> None:
        self.held: SavedActivation | None = held
        self.record = _Record(room, weakref.ref(self), number, size_bytes)
        self._gone = gone

    def __del__(self) -> None:
        self._gone.append(self.record)


@dataclasses.dataclass(slots=True, eq=False)
class _Record:
    """What is known of one storage.

    Attributes:
        room: elsewhere.
        leaver: the storage itself.
        number: torch's of the storage, as long as it has not left.
        size_bytes: of it.
        handles: tensors of it that were saved.
        time: it has come back so many times; `unpacked` tensors of it were asked for since.
        going, coming: a copy under way, with what keeps the device's memory meanwhile; None where compute follows a
            copy that is coming, and so does whoever has the memory next.
        near, needed: see :class:`offload.activations.near.Storage`.
        dead: nobody wants it any more.
        given: a tensor without elements, which counts changes in place of all that was handed out of it since it has
            come, or was saved; None where nothing was.
    """

    room: Room
    leaver: weakref.ref[Leaver]
    number: int
    size_bytes: int
    handles: int = 0
    time: int = 0
    unpacked: int = 0
    going: tuple[Ticket, SavedActivation] | None = None
    coming: tuple[Arriving, SavedActivation | None] | None = None
    near: bool = False
    needed: bool = False
    dead: bool = False
    given: torch.Tensor | None = None

    @property
    def changed(self) -> bool:
        """Whether a node of the backward pass has changed in place what it was handed out."""
        return self.given is not None and self.given._version > 0


class SavedElsewhere:
    """What autograd keeps of a tensor whose storage may leave the device."""

    __slots__ = ("dtype", "leaver", "offset", "shape", "stride", "time")

    def __init__(self, leaver: Leaver, tensor: torch.Tensor) -> None:
        self.leaver = leaver
        self.dtype = tensor.dtype
        self.offset = int(tensor.storage_offset())
        self.shape = tensor.shape
        self.stride = tensor.stride()
        self.time = -1  # of the storage's, when it was asked for last


class LeavingActivations(Activations):
    """Ledger of one engine's activations, which leave the device. See the module's text."""

    def __init__(
        self,
        budget: Budget,
        region: Elastic,
        meter: Meter | None,
        away: Away,
        mover: Mover,
        place: torch.device,
        counters: Counters,
        *,
        near_bytes: int,
        kept_bytes: int | None = None,
        deadline_s: float,
        beside_bytes: int = 0,
        gradient_bytes: int = 0,
    ) -> None:
        """Begin with nothing.

        Args:
            budget: as in :class:`Activations`.
            region: the same.
            meter: the same.
            away: rooms elsewhere.
            mover: of bytes between there and the device.
            place: torch's device.
            counters: of waits.
            near_bytes: of the device budget, for the last ones and those that come and go.
            kept_bytes: of them, for the last ones; None is half.
            deadline_s: after which a copy counts as lost.
            beside_bytes: as in :class:`Activations`.
            gradient_bytes: the same.
        """
        super().__init__(budget, region, meter, beside_bytes=beside_bytes, gradient_bytes=gradient_bytes)
        self._away = away
        self._mover = mover
        self._place = place
        self._counters = counters
        self._near = Near(near_bytes, near_bytes // 2 if kept_bytes is None else kept_bytes)
        self._deadline_s = deadline_s
        self._closed = False
        self._records: dict[int, _Record] = {}  # by key, in the order in which they were saved
        self._left = InOrder[_Record]()  # of those that somebody may ask for, the ones whose leaver holds nothing
        self._gone: deque[_Record] = deque()
        self._by_number: dict[int, weakref.ref[Leaver]] = {}  # storages that have not left
        self._last_key = 0
        self._waiting: deque[tuple[int, weakref.ref[Leaver]]] = deque()  # on the device, and what was saved by then
        self._others: list[weakref.ref[Leaver]] = []  # of these, the ones that are charged in part
        self._going: deque[_Record] = deque()
        self._coming: deque[_Record] = deque()
        self._behind_bytes = 0  # of copies under way that compute is behind: their memory has been given back
        self._used_up: list[weakref.ref[Leaver]] = []  # all of whose tensors were asked for since it has come back
        self._prefetching = LeftToWhoNeedsIt("prefetch of activations")
        self._moved_bytes = {"d2h": 0, "h2d": 0}
        self._copying_s = 0.0  # that beginning copies has taken, or making them
        self._moving_s = 0.0  # that keeping and bringing has taken as a whole
        self._waited_s = 0.0  # of it
        self._began: tuple[int, Mapping[str, int], float, float, float] | None = None  # a pass: what there was then

    # --- going ------------------------------------------------------------------------------------------------------

    def keep(self, tensor: torch.Tensor) -> SavedActivation | SavedElsewhere:
        """Return what autograd shall keep for a tensor of the device.

        Raises:
            swap.SwapError: what has left before could not be written to the drive.
        """
        self._look()
        self._collect()
        size_bytes = tensor.untyped_storage().nbytes()
        if size_bytes < LEAST_BYTES or not _may_leave(tensor):
            return SavedActivation(tensor, self)
        number = storage_place(tensor)
        found = self._by_number.get(number)
        leaver = found() if found is not None else None
        if leaver is None or not _is_as_saved(leaver, tensor):
            leaver = self._begin(tensor, number, size_bytes)
        leaver.record.handles += 1
        self._near.note(leaver.record)
        return SavedElsewhere(leaver, tensor)

    def _begin(self, tensor: torch.Tensor, number: int, size_bytes: int) -> Leaver:
        self._mover.note_stream()  # who makes it, maybe without any parameter: its copy follows all that compute
        self._last_key += 1
        room = room_for(self._last_key, size_bytes)
        with no_functions(), no_dispatch():
            own = tensor.detach()  # so that the uses of the storage tell whether anybody else has the tensor
        held = SavedActivation(own, self)
        leaver = Leaver(held, number, room, size_bytes, self._gone)
        self._records[room.key] = leaver.record
        self._by_number[number] = leaver.record.leaver
        if self.is_in_part(held):
            self._others.append(leaver.record.leaver)
        else:
            self._near.save(leaver.record)
        self._waiting.append((self._near.saved_bytes, leaver.record.leaver))
        self._go_on(self._near.kept_bytes)
        return leaver

    def _go_on(self, kept_bytes: int) -> None:
        """Let storages leave whose turn it is; with too much on its way, wait."""
        start, copying_s, begun = time.perf_counter(), self._copying_s, self._mover.begin_waiting()
        self._let_go(kept_bytes)
        while self._going and self._near.used_bytes > self._near.most_bytes:
            self._end_going()
        end = time.perf_counter()
        self._moving_s += end - start
        start += self._copying_s - copying_s
        if end - start > LONGEST_START_S:  # for room in host memory, or a copy
            self._note_wait(start, end, begun)

    def _let_go(self, kept_bytes: int) -> None:
        """Let storages leave after which more than `kept_bytes` were saved; those in use wait once more as long.

        Where one finds no room, others of its size find none, either: thousands may be waiting for it.
        """
        away = self._away
        least, most = away.largest_bytes + 1, max(away.largest_bytes, away.refused_bytes)  # that find none, as is known
        for _ in range(len(self._waiting)):
            saved_bytes, reference = self._waiting[0]
            if self._near.saved_bytes - saved_bytes <= kept_bytes:
                return
            self._waiting.popleft()
            leaver = reference()
            if leaver is None:
                continue
            room = leaver.record.room
            if not least <= room.size_bytes <= most:
                held = leaver.held
                if held is None or held.changed or leaver.record.changed:
                    self._near.need(leaver.record)
                    continue
                if storage_use_count(held.tensor.untyped_storage()) <= _ALONE:
                    if not leaver.record.near:
                        self._charge_rest()
                        self._near.come(leaver.record)
                    if away.take(room):
                        self._begin_going(leaver, held)
                        continue
                    least, most = min(least, room.size_bytes), max(most, room.size_bytes)
                else:
                    self._near.leave_to_others(leaver.record)
            self._near.need(leaver.record)
            self._waiting.append((self._near.saved_bytes, reference))

    def _begin_going(self, leaver: Leaver, held: SavedActivation) -> None:
        record = leaver.record
        source = held.tensor.untyped_storage().data_ptr()
        begin = time.perf_counter()
        ticket = self._mover.save(source, self._away.address(record.room), record.size_bytes)
        self._copying_s += time.perf_counter() - begin
        self._near.need_no_more(record)
        self._moved_bytes["d2h"] += record.size_bytes
        record.going = ticket, held
        self._going.append(record)
        self._by_number.pop(record.number, None)
        self._put_away(leaver)

    def _end_going(self) -> None:
        """Wait for the first of the copies that are leaving; the device's memory is free then."""
        record = self._going[0]
        assert record.going is not None
        ticket, held = record.going
        ticket.wait(self._deadline_s)
        self._going.popleft()  # not before: what is late is still under way
        record.going = None
        leaver = record.leaver()
        if leaver is None or leaver.held is not held:
            self._near.go(record)
        if record.dead:
            self._away.release(record.room)
        else:
            self._away.rest(record.room)

    # --- coming back ------------------------------------------------------------------------------------------------

    def bring(self, saved: SavedElsewhere) -> torch.Tensor:
        """Return a tensor that was saved.

        Raises:
            BudgetError: the device budget, or the part of host memory, has no room for it.
            StateError: it was changed in place since, or the engine is closed.
            swap.SwapError: the drive could not be read.
        """
        start, moving_s = time.perf_counter(), self._moving_s
        self._look()
        self._collect()
        self._keep_pace()
        leaver = saved.leaver
        record = leaver.record
        if leaver.held is None:
            if self._closed:
                raise StateError("backward: the engine that ran this forward is closed; run backward before close()")
            if record.going is not None:  # it need not leave
                self._take_back(leaver, record.going[1])
            else:
                self._bring_now(leaver)
        held = leaver.held
        assert held is not None
        if not self._closed:
            with self._prefetching:
                self._bring_ahead(record.room.key)
        if record.coming is not None:
            begin, begun = time.perf_counter(), self._mover.begin_waiting()
            record.coming[0].use(self._deadline_s)
            self._note_wait(begin, time.perf_counter(), begun)
        whole = held.get()
        if record.changed:
            raise changed_in_place(saved.shape)
        if record.time:
            self._mover.note_use(whole)
        if saved.time != record.time:
            saved.time = record.time
            record.unpacked += 1
            if record.unpacked >= record.handles and self._has_copy(record):
                self._used_up.append(record.leaver)
        self._near.need(record)
        self._near.note()
        self._moving_s = moving_s + time.perf_counter() - start
        view = view_at(whole.untyped_storage(), saved.dtype, saved.offset, saved.shape, saved.stride)
        return self._hand_out(record, view)

    def _hand_out(self, record: _Record, view: torch.Tensor) -> torch.Tensor:
        """Return a tensor that has the memory of `view`, and whose changes in place count for the record."""
        with no_functions(), no_dispatch():
            if record.given is None:
                record.given = torch.empty(0, dtype=torch.uint8, device=self._place)
            return counted_by(record.given, view)

    def _keep_pace(self) -> None:
        """Let the host wait where it is too far ahead of copies: gradients of what it runs through would pile up."""
        while self._coming and self._behind_bytes > self._near.most_bytes:
            begin, begun = time.perf_counter(), self._mover.begin_waiting()
            self._end_coming(self._coming[0])
            self._note_wait(begin, time.perf_counter(), begun)

    def _bring_now(self, leaver: Leaver) -> None:
        """Begin to bring a storage that is asked for: its place in host memory, and on the device."""
        away, room = self._away, leaver.record.room
        begin, begun = time.perf_counter(), self._mover.begin_waiting()
        self._end_earlier(leaver.record)
        if not away.is_here(room):
            while room.ticket is None and not away.read(room):
                if self._coming:
                    self._end_coming(self._coming[0])
                elif not away.make_room():
                    raise BudgetError(
                        f"cpu budget: {format_bytes(room.size_bytes)} of activations have to come back from the drive "
                        "but what is set aside for them is in use; raise activation_cpu_memory"
                    )
            away.wait(room)
            self._note_wait(begin, time.perf_counter(), begun)
        room.copied = True  # it stays, whatever makes room below
        try:
            held = SavedActivation(self._memory(leaver.record.size_bytes), self)
            self.balance()
        except BaseException:
            room.copied = False
            raise
        self._begin_coming(leaver, held)

    def _bring_ahead(self, key: int) -> None:
        """Begin to bring what was saved before `key`, the last one first, as far as there is room."""
        away = self._away
        for record in self._left.before(key):
            leaver = record.leaver()
            if leaver is None:
                continue
            if record.going is not None:  # it need not leave: nor must it queue behind what is needed later
                self._take_back(leaver, record.going[1])
                continue
            if record.coming is not None and not record.coming[0].done():
                break  # for a pass before, and nobody waits here
            self._end_earlier(record)
            room_bytes = min(self._near.most_bytes - self._near.used_bytes, self._budget.free_bytes)
            if record.size_bytes > room_bytes or not away.is_here(record.room):
                break
            self._begin_coming(leaver, SavedActivation(self._memory(record.size_bytes), self))
        away.read_ahead(key, self._left)

    def _put_away(self, leaver: Leaver) -> None:
        """Let a storage hold nothing of the device, or nothing but what a copy still needs."""
        leaver.held = None
        self._left.add(leaver.record.room.key, leaver.record)

    def _take_back(self, leaver: Leaver, held: SavedActivation) -> None:
        """Let it hold what the device has of it."""
        leaver.held = held
        self._left.discard(leaver.record.room.key)

    def _end_earlier(self, record: _Record) -> None:
        """Wait for the copy that an earlier backward pass of the same graph has wanted, if it is still under way."""
        if record.coming is not None:
            self._end_coming(record)

    def _begin_coming(self, leaver: Leaver, held: SavedActivation) -> None:
        record, away = leaver.record, self._away
        target = held.tensor.untyped_storage().data_ptr()
        copy = self._mover.restore(away.address(record.room), target, record.size_bytes)
        self._moved_bytes["h2d"] += record.size_bytes
        record.room.copied = True
        record.coming, record.given = (copy, held), None
        record.time, record.unpacked = record.time + 1, 0
        self._near.come(record)
        self._coming.append(record)
        self._take_back(leaver, held)

    def _end_coming(self, record: _Record) -> None:
        """Wait for a copy, mostly the first of those under way; nobody reads the host's memory then."""
        assert record.coming is not None
        copy, held = record.coming
        copy.wait(self._deadline_s)
        self._coming.remove(record)  # not before, as above
        record.coming = None
        if held is None:
            self._behind_bytes -= record.size_bytes
        self._away.vacate(record.room)
        if record.dead:
            self._near.go(record)
            self._away.release(record.room)

    def _memory(self, size_bytes: int) -> torch.Tensor:
        """Return memory of the device; no mode sees it."""
        with no_functions(), no_dispatch():
            return torch.empty(size_bytes, dtype=torch.uint8, device=self._place)

    # --- what a micro-batch takes -------------------------------------------------------------------------------------

    def open_pass(self) -> None:
        """See :meth:`Activations.open_pass`."""
        super().open_pass()
        if not self._records:
            self._near.open_pass()
            begin, waited_s = time.perf_counter(), self._counters.waits_seconds - self._waited_s
            self._began = self._last_key, self.moved(), begin, self._moving_s, waited_s

    def close_pass(self) -> None:
        """See :meth:`Activations.close_pass`.

        Raises:
            BudgetError: it needed more than the device budget leaves beside the smallest region.
        """
        self._near.close_pass()
        super().close_pass()
        if self._began is None or self._last_key == self._began[0] or not self.is_empty():
            return
        _, moved, begin, moving_s, waited_s = self._began
        self._began, now, seconds = None, self.moved(), time.perf_counter() - begin
        moving_s, waited_s = self._moving_s - moving_s, self._counters.waits_seconds - self._waited_s - waited_s
        self._note_pass(Passed({link: now[link] - moved[link] for link in now}, seconds, moving_s, waited_s))

    def abandon_pass(self) -> None:
        """See :meth:`Activations.abandon_pass`."""
        super().abandon_pass()
        self._began = None

    def moved(self) -> dict[str, int]:
        """Return the bytes that were moved so far, per link."""
        away = self._away
        return {**self._moved_bytes, "nvme_read": away.drive_read_bytes, "nvme_write": away.drive_written_bytes}

    # --- bookkeeping ------------------------------------------------------------------------------------------------

    def balance(self) -> None:
        """See :meth:`Activations.balance`; first, what leaves is waited for, where it is in the way.

        Raises:
            BudgetError: what autograd keeps does not fit beside the smallest region.
        """
        self._collect()
        if self._near.is_short:
            self._go_on(self._near.kept_bytes or -1)  # -1: the very last one, too
        if self._owed_bytes > self._budget.free_bytes:
            self._go_away()
        super().balance()
        if not self._parts:
            self._others.clear()  # what was of these is gone

    def _charge_rest(self) -> None:
        """See :meth:`Activations._charge_rest`; these count as near from now on."""
        super()._charge_rest()
        others, self._others = self._others, []
        for reference in others:
            leaver = reference()
            if leaver is None or leaver.held is None:
                continue
            if self.is_in_part(leaver.held):
                self._others.append(reference)
            else:
                self._near.save(leaver.record)

    def _look(self) -> None:
        """See whether the operations that have ended took more than any before in this pass."""
        if self._near.is_worth_a_look and self._meter is not None and self._meter.notes_peaks:
            self._note_high_water()

    def _note_used(self, used_bytes: int) -> None:
        if used_bytes > self._peak_bytes:
            self._near.note_peak()
        super()._note_used(used_bytes)

    def _let_others_take_less(self, excess: int, peak_bytes: int, early_bytes: int, room_bytes: int) -> int:
        if excess > 0:
            self._near.look_again()
        return super()._let_others_take_less(excess, peak_bytes, early_bytes, room_bytes)

    @property
    def _spare_bytes(self) -> int:
        """See :meth:`Activations._spare_bytes`."""
        return self._near.spare_bytes

    def _stay_less(self, by_bytes: int) -> int:
        """See :meth:`Activations._stay_less`; with no room near, each waits for its own copy."""
        return self._near.take_less(by_bytes)

    def _way_out(self) -> str:
        text = "activation_cpu_memory and activation_nvme_memory, which say how much of the activations may leave"
        text += ', or activations="recompute"'
        stayed = self._away.refused_bytes
        if not stayed:
            return text
        wanted = f'activation_cpu_memory="{self._away.wanted_bytes >> 10}KiB"'
        return f"{text}; what has up to {format_bytes(stayed)} stays unless {wanted} or more"

    def _go_away(self) -> None:
        """Let all leave that may, and wait until they have."""
        self._let_go(0)
        while self._going:
            self._end_going()
        self.refund()

    def is_empty(self) -> bool:
        """See :meth:`Activations.is_empty`."""
        self._collect()
        if self._records:
            return False
        self._end_all()  # copies of what nobody wants any more
        self.refund()
        return super().is_empty()

    @property
    def store(self) -> SwapStore | None:
        """See :meth:`Activations.store`."""
        return self._away.apart

    def has_left(self) -> bool:
        """See :meth:`Activations.has_left`; waits for what is under way."""
        self._collect()
        self._end_all()
        self._away.settle()
        return bool(self._away.used_bytes)

    def _end_all(self) -> None:
        """Wait for the copies under way."""
        while self._going:
            self._end_going()
        while self._coming:
            self._end_coming(self._coming[0])

    def close(self) -> None:
        """Wait for what is under way, and bring nothing back any more. Idempotent."""
        self._closed = True
        for copies in (self._going, self._coming):
            while copies:
                record = copies[0]
                copy = record.going or record.coming
                if copy is not None:
                    copy[0].wait(self._deadline_s)
                record.going = record.coming = None
                copies.popleft()  # not before: what is late is still under way, and another call waits for it
        self._away.close()
        self._records.clear()
        super().close()

    def _collect(self) -> None:
        """Take note of what has happened meanwhile: copies that are over, storages that nobody wants any more."""
        while self._gone:
            self._bury(self._gone.popleft())
        while self._going and self._going[0].going is not None and self._going[0].going[0].done():
            self._end_going()
        while self._coming and self._coming[0].coming is not None and self._coming[0].coming[0].done():
            self._end_coming(self._coming[0])
        if self._used_up:
            self._used_up = [reference for reference in self._used_up if not self._put_down(reference)]
        self._away.reap()

    def _bury(self, record: _Record) -> None:
        self._left.discard(record.room.key)
        if self._records.pop(record.room.key, None) is None:
            return  # the engine is closed
        found = self._by_number.get(record.number)
        if found is record.leaver:
            del self._by_number[record.number]
        if record.coming is not None and record.unpacked:
            self._leave_to_compute(record)
        if record.going is not None or record.coming is not None:
            record.dead = True
            return
        self._near.go(record)
        self._away.release(record.room)

    def _put_down(self, reference: weakref.ref[Leaver]) -> bool:
        """Free the device's memory of what is wanted again at most in another backward pass; False where it is used."""
        leaver = reference()
        if leaver is None or leaver.held is None:
            return True
        record = leaver.record
        if record.going is not None:
            return False
        if storage_use_count(leaver.held.tensor.untyped_storage()) > _ALONE:
            return False
        self._leave_to_compute(record)
        self._put_away(leaver)
        return True

    def _leave_to_compute(self, record: _Record) -> None:
        """Free the device's memory of what was asked for: who has it next follows compute, which follows the copy."""
        if record.coming is not None and record.coming[1] is not None:
            record.coming = record.coming[0], None
            self._behind_bytes += record.size_bytes
        self._near.go(record)

    def _has_copy(self, record: _Record) -> bool:
        return record.room.stored or record.room.offset is not None

    def _note_wait(self, begin: float, end: float, begun: object | None) -> None:
        self._waited_s += end - begin
        self._counters.activation_stall_seconds += end - begin
        self._mover.end_waiting("activations", begun, begin)


def _is_as_saved(leaver: Leaver, tensor: torch.Tensor) -> bool:
    """Tell whether nobody has changed a storage since it was saved, and would be seen to do so through `tensor`."""
    held = leaver.held
    if held is None or held.changed or leaver.record.changed:
        return False
    return held.version == tensor._version and have_one_counter(held.tensor, tensor)


def _may_leave(tensor: torch.Tensor) -> bool:
    """Tell whether bytes, shape and strides are all of a tensor: no subclass, not nested, no further bits."""
    if type(tensor) is not torch.Tensor or tensor.is_nested:
        return False
    return not (tensor.is_conj() or tensor.is_neg() or tensor.is_quantized)
