"""A device whose memory the host cannot touch, by torch's generic streams and events.

Owns its streams, and the copies that they carry. Written against ``torch.accelerator``. The order of copies and compute
is in :mod:`offload.memory.ordering`, gradients have :mod:`offload.memory.gradient_reader`, and what differs between
back ends is in :mod:`offload.memory.page_lock`. Next: :mod:`offload.memory.devices`.
"""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import torch

from offload.errors import BudgetError
from offload.kernels.on_device import DeviceKernels
from offload.memory.arena import HOST, Arena, Buffer, bytes_at
from offload.memory.budget import Tier
from offload.memory.device_kernels import open_kernels
from offload.memory.device_memory import DeviceFullError, device_full, unused_bytes
from offload.memory.errands import Errands
from offload.memory.gradient_reader import GradientReader
from offload.memory.ordering import Ordering, entered
from offload.memory.page_lock import LockedArena
from offload.memory.timing import Pass, Stopwatch
from offload.memory.transfer import FutureTransfer, MoverNeeds, Ticket, Transfer
from offload.sizes import PAGE_BYTES, format_bytes, round_up
from offload.torch_private import no_dispatch, no_functions

FETCHES = 2  # from the drive at once: one is read while the other is copied


class AcceleratorDevice:
    """An accelerator of torch. See :class:`offload.memory.device.Device`."""

    addressable = False

    def __init__(self, place: torch.device) -> None:
        """Use the accelerator at `place`, which has an index."""
        self.place = place
        self.kernels: DeviceKernels | None = open_kernels(place)

    def name(self) -> str:
        """Return what its driver calls it."""
        return str(torch.get_device_module(self.place).get_device_name(self.place))

    def identity(self) -> str | None:
        """Return its UUID, where its driver tells one."""
        tell = getattr(torch.get_device_module(self.place), "get_device_properties", None)
        uuid = None if tell is None else getattr(tell(self.place), "uuid", None)
        return None if uuid is None else str(uuid)

    def free_bytes(self) -> int:
        """Return what its driver says, and what torch's cache would give back."""
        return int(torch.get_device_module(self.place).mem_get_info(self.place)[0]) + unused_bytes(self.place)

    def total_bytes(self) -> int:
        """Return what its driver says."""
        return int(torch.get_device_module(self.place).mem_get_info(self.place)[1])

    def trim(self) -> None:
        """Empty torch's cache, which other processes cannot use."""
        torch.get_device_module(self.place).empty_cache()

    def arena(self, size_bytes: int) -> Arena:
        """Take one allocation of torch's.

        Raises:
            BudgetError: the device has no piece of that size free.
        """
        if not size_bytes:
            return Arena(Tier.DEVICE, 0, self.place, None, 0)
        try:
            memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, device=self.place)
        except torch.OutOfMemoryError as error:
            what = f"{format_bytes(size_bytes)} of parameters"
            raise device_full(error, self.place, what=what, limit_bytes=size_bytes, held={}) from error
        return Arena(Tier.DEVICE, size_bytes, self.place, memory, round_up(memory.data_ptr(), PAGE_BYTES))

    def host_arena(self, size_bytes: int) -> Arena:
        """Take page-locked main memory."""
        return LockedArena(Tier.HOST, size_bytes, self.place)

    def mover(self, needs: MoverNeeds) -> AcceleratorMover:
        """Return a mover with staging buffers in host memory."""
        host, part = needs.host, needs.fetch_bytes // FETCHES
        staging = [host.take(part) for _ in range(FETCHES)] if part else []
        watch = Stopwatch(needs.counters, self.place)
        ring, largest_bytes = host.take(needs.gradient_bytes), needs.largest_gradient_bytes
        reader = GradientReader(self, host, ring, needs.gradient_claim, watch, self.place, largest_bytes=largest_bytes)
        return AcceleratorMover(self, host, staging, reader, needs.gradient_bytes, watch, needs.deadline_s)

    def out_of_memory(
        self, error: BaseException, *, what: str, limit_bytes: int, held: Mapping[str, int]
    ) -> BudgetError | None:
        """Return torch's error with what holds the memory; None where it is another one, or told already."""
        if isinstance(error, torch.OutOfMemoryError) and not isinstance(error, DeviceFullError):
            return device_full(error, self.place, what=what, limit_bytes=limit_bytes, held=held)
        return None

    def begin_thread(self) -> None:
        """Make it the current device: else what a stream is given there would open the first device, too."""
        torch.accelerator.set_device_index(self.place)

    def current_stream(self) -> torch.Stream:
        """Return the stream that compute is given to now."""
        return torch.accelerator.current_stream(self.place.index)  # of a device, it asks much more

    def event(self, stream: torch.Stream | None = None) -> torch.Event:
        """Return the moment when all that was given to `stream` so far is done; of None to the current one."""
        event = torch.Event(self.place)
        event.record(self.current_stream() if stream is None else stream)
        return event

    def synchronize(self) -> None:
        """Wait for all streams."""
        torch.accelerator.synchronize(self.place)


class _Upload:
    """A copy into a buffer: compute waits for it where it uses the buffer, the host does not."""

    def __init__(
        self, ordering: Ordering, target: Buffer, event: Future[torch.Event], enqueued: FutureTransfer
    ) -> None:
        self._ordering = ordering
        self._target = target
        self._event = event
        self._enqueued = enqueued

    def done(self) -> bool:
        """Tell whether the copy is complete."""
        if not self._event.done():
            return False
        return self._event.exception() is not None or bool(self._event.result().query())

    def wait(self, timeout_s: float) -> None:
        """Wait until a stream has been given the copy: who uses the buffer from now on is ordered behind it."""
        self._enqueued.wait(timeout_s)
        self._ordering.arrive(self._target, self._event.result())


class _Brought(_Upload):
    """An upload of what others bring: how long that may take is theirs to say."""

    def wait(self, timeout_s: float) -> None:
        """Wait until it is there, as long as that takes, and a stream has been given the copy."""
        self._event.result()
        super().wait(timeout_s)


class _Moment:
    """A copy that the host waits for."""

    def __init__(self, event: torch.Event, waiter: ThreadPoolExecutor, subject: str) -> None:
        self._event = event
        self._waiter = waiter
        self._subject = subject

    def done(self) -> bool:
        """Tell whether the copy is complete."""
        return bool(self._event.query())

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait until it is; in a thread that may be late, because a device that hangs lets nobody go."""
        if not self._event.query():
            FutureTransfer(self._waiter.submit(self._event.synchronize), self._subject).wait(timeout_s)


class _Restored(_Moment):
    """A copy to memory of torch's: compute waits for it where it uses the memory, the host does not."""

    def __init__(self, device: AcceleratorDevice, event: torch.Event, waiter: ThreadPoolExecutor, subject: str) -> None:
        super().__init__(event, waiter, subject)
        self._device = device

    def use(self, timeout_s: float) -> None:
        """Let the current stream wait for it."""
        self._device.current_stream().wait_event(self._event)


class AcceleratorMover:
    """Mover for an accelerator: streams of its own, ordered with compute by events.

    There are two streams for uploads: what compute waits for does not queue behind what was fetched ahead. What comes
    from NVMe passes through page-locked staging buffers, chunk by chunk. A buffer is reused only after the event that
    was recorded behind its last copy. Gradients have a :class:`GradientReader`. What is settled has a stream that waits
    for nothing: gradients' stream waits for compute that the device has been given far ahead.
    """

    def __init__(
        self,
        device: AcceleratorDevice,
        host: Arena,
        staging: Sequence[Buffer],
        gradients: GradientReader,
        ring_bytes: int,
        watch: Stopwatch,
        deadline_s: float,
    ) -> None:
        """Begin with nothing on its way.

        Args:
            device: to and from which bytes move.
            host: arena of all host addresses.
            staging: buffers for what comes from NVMe: so many fetches are under way at once.
            gradients: reads them.
            ring_bytes: of gradients for which it has room.
            watch: counts bytes and seconds.
            deadline_s: after which a copy counts as lost.
        """
        self._device = device
        self._host = host
        self._gradients = gradients
        self._ring_bytes = ring_bytes
        self._watch = watch
        self._deadline_s = deadline_s
        self._ordering = Ordering(device)
        self._ahead, self._urgent, self._settled = (torch.Stream(device.place) for _ in range(3))
        for stream in (self._ahead, self._urgent, self._settled):
            stream.wait_stream(device.current_stream())  # work of the arena's last owner may be queued
        self._staging = list(staging)
        self._staged: list[torch.Event | None] = [None] * len(staging)  # the last copy from each
        self._reading: list[Sequence[Ticket]] = [()] * len(staging)  # what is read into each
        self._late: list[Sequence[Ticket]] = [()] * len(staging)  # given up, and may still write there
        self._reads = Errands[torch.Event](len(staging), "offload-h2d", device.begin_thread)
        self._waiter = ThreadPoolExecutor(1, "offload-wait", device.begin_thread)
        self._uploads: dict[int, torch.Event] = {}  # the last one from each host address
        self._leaving: deque[tuple[torch.Event, int]] = deque()  # of groups on their way: the end, and bytes
        self._given_bytes = 0  # of the group that is not among them yet

    # --- parameters -------------------------------------------------------------------------------------------------

    def use(self, buffer: Buffer) -> None:
        """Let the current stream wait for what has arrived in `buffer`, and be waited for."""
        self._ordering.use(buffer)

    def release(self, buffer: Buffer) -> None:
        """Record where the streams that have used `buffer` are now."""
        self._ordering.release(buffer)

    def fetch_host(self, source: int, target: Buffer, size_bytes: int, *, urgent: bool) -> Transfer:
        """Copy from page-locked memory; the caller enqueues it."""
        enqueued: Future[torch.Event] = Future()
        enqueued.set_result(self._send(source, target, size_bytes, self._ordering.before(target), urgent=urgent))
        subject = f"copy of {size_bytes} bytes to {self._device.place}"
        return _Upload(self._ordering, target, enqueued, FutureTransfer(enqueued, subject))

    def fetch_when(
        self,
        bring: Callable[[], int],
        target: Buffer,
        size_bytes: int,
        *,
        urgent: bool,
        begin: Callable[[Callable[[], Any]], Future[Any]],
    ) -> Transfer:
        """Copy from page-locked memory; the thread that has waited for it enqueues it."""
        before = self._ordering.before(target)
        event = begin(lambda: self._send(bring(), target, size_bytes, before, urgent=urgent))
        subject = f"copy of {size_bytes} bytes to {self._device.place}"
        return _Brought(self._ordering, target, event, FutureTransfer(event, subject))

    def _send(
        self, source: int, target: Buffer, size_bytes: int, before: Sequence[torch.Event], *, urgent: bool
    ) -> torch.Event:
        """Give a stream a copy from page-locked memory, behind events; returns when it is over."""
        stream = self._stream(urgent)
        self._follow(stream, before)
        event = self._uploads[source] = self._upload(stream, source, target.address, size_bytes)
        return event

    def fetch_nvme(
        self, read: Callable[[int], list[Ticket]], target: Buffer, sizes: Sequence[int], *, urgent: bool
    ) -> Transfer:
        """Read into staging, and copy each part as soon as it is there; a thread waits in between."""
        before = self._ordering.before(target)

        def run(number: int) -> torch.Event:
            self._await_late(number)
            self._await_staging(number)
            tickets = read(self._staging[number].address)
            with self._read_by_drive(number, tickets):
                return self._pass_on(number, tickets, target, sizes, before, urgent=urgent)

        event = self._reads.submit(run, urgent=urgent)
        subject = f"fetch of {sum(sizes)} bytes to {self._device.place}"
        enqueued = FutureTransfer(event, subject, is_waiting=self._waits_for_reads)
        return _Upload(self._ordering, target, event, enqueued)

    def _waits_for_reads(self) -> bool:
        """Tell whether the drive keeps a thread, which gives it up after a time of its own."""
        return any(not ticket.done() for tickets in self._reading for ticket in tickets)

    @contextlib.contextmanager
    def _read_by_drive(self, number: int, tickets: Sequence[Ticket]) -> Iterator[None]:
        """Note what is read into a staging buffer, and where it fails, what may still write there."""
        self._reading[number] = tickets
        try:
            yield
        except BaseException:
            self._late[number] = tickets
            raise
        finally:
            self._reading[number] = ()

    def _await_late(self, number: int) -> None:
        """Wait until no read that was given up writes to a staging buffer."""
        with self._read_by_drive(number, self._late[number]):
            for ticket in self._late[number]:
                try:
                    ticket.wait(None)
                except Exception:
                    if not ticket.done():
                        raise
        self._late[number] = ()

    def _await_staging(self, number: int) -> None:
        used = self._staged[number]
        if used is not None:
            used.synchronize()

    def _pass_on(
        self,
        number: int,
        tickets: Sequence[Ticket],
        target: Buffer,
        sizes: Sequence[int],
        before: Sequence[torch.Event],
        *,
        urgent: bool,
    ) -> torch.Event:
        """Copy parts of a staging buffer as they arrive; waits for all of them, also after one has failed."""
        stream, offset = self._stream(urgent), 0
        failure: BaseException | None = None
        self._follow(stream, before)
        for ticket, size in zip(tickets, sizes, strict=True):
            try:
                ticket.wait(0 if isinstance(failure, TimeoutError) else None)  # the store's own deadline, once
                if failure is None:
                    source, to = self._staging[number].address + offset, target.address + offset
                    self._staged[number] = self._upload(stream, source, to, size)
            except Exception as error:
                failure = failure or error
            offset += size
        if failure is not None:
            self._await_staging(number)  # nothing may be copied to the target once it is known to have failed
            raise failure
        event = self._staged[number]
        assert event is not None
        return event

    def fill(self, source: int, target: Buffer, offset_bytes: int, size_bytes: int) -> Ticket:
        """Copy a part from page-locked memory, behind compute that reads `target`; all parts go on one stream."""
        self._follow(self._ahead, self._ordering.before(target))
        event = self._upload(self._ahead, source, target.address + offset_bytes, size_bytes)
        self._ordering.arrive(target, event)
        return self._moment(event, f"copy of {size_bytes} bytes to {self._device.place}")

    def await_source(self, source: int) -> None:
        """Let the host wait for the last upload from there: compute waits for uploads without it."""
        event = self._uploads.get(source)
        if event is not None:
            self._moment(event, "copy to the device").wait(self._deadline_s)
            del self._uploads[source]  # now: a wait that takes too long is repeated

    def await_compute(self, timeout_s: float) -> None:
        """Let the host wait for all streams that compute."""
        for event in self._ordering.computed():
            self._moment(event, "compute").wait(timeout_s)

    def move(self, source: Buffer, target: Buffer, size_bytes: int) -> None:
        """Copy on the current stream, in pieces that do not overlap; the others that compute wait on both sides."""
        others = self._ordering.move(source)
        self._follow(self._device.current_stream(), self._ordering.before(target))
        step = source.address - target.address
        for begin in range(0, size_bytes, step):
            piece = min(step, size_bytes - begin)
            bytes_at(target.address + begin, piece, self._device.place).copy_(
                bytes_at(source.address + begin, piece, self._device.place)
            )
        for stream in others:
            stream.wait_stream(self._device.current_stream())
        self._ordering.moved(source, target)

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Let the current stream wait for all that compute, and these for it."""
        others = self._ordering.begin_alone()
        try:
            yield
        finally:
            self._ordering.end_alone(others)

    def note_stream(self) -> int:
        """Let :meth:`alone` wait for the current stream, too; return its number."""
        return self._ordering.note_stream().stream_id

    # --- chunks of what is at home on the device --------------------------------------------------------------------

    def download(self, source: int, target: int, size_bytes: int, *, settled: bool = False) -> Ticket:
        """Copy device address `source` to page-locked host address `target`, behind compute unless it is `settled`."""
        stream = self._settled if settled else self._gradients.stream
        if not settled:
            self._follow(stream, self._ordering.computed())
        return self._download(stream, source, target, size_bytes)

    def upload(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy page-locked host address `source` to device address `target`, behind compute."""
        self._follow(self._urgent, self._ordering.computed())
        event = self._upload(self._urgent, source, target, size_bytes)
        return self._moment(event, f"copy of {size_bytes} bytes to {self._device.place}")

    # --- activations ------------------------------------------------------------------------------------------------

    def save(self, source: int, target: int, size_bytes: int) -> Ticket:
        """Copy on the download stream, behind all streams that compute."""
        stream = self._gradients.stream
        self._follow(stream, [*self._ordering.computed(), self._device.event()])
        return self._download(stream, source, target, size_bytes)

    def restore(self, source: int, target: int, size_bytes: int) -> _Restored:
        """Copy on the stream of what is fetched ahead, behind who had the memory before."""
        self._follow(self._ahead, [self._device.event()])
        event = self._upload(self._ahead, source, target, size_bytes)
        subject = f"copy of {size_bytes} bytes of activations to {self._device.place}"
        return _Restored(self._device, event, self._waiter, subject)

    def note_use(self, tensor: torch.Tensor) -> None:
        """Let torch's allocator know the current stream, so that nobody else has the memory before it is done."""
        with no_functions(), no_dispatch():  # modes of the user
            tensor.record_stream(self._device.current_stream())

    # --- gradients --------------------------------------------------------------------------------------------------

    def read_tensor(self, tensor: torch.Tensor, use: Callable[[int], None], *, group: int, last: bool) -> None:
        """Copy on the download stream; a thread waits for the copies of a group and calls `use`."""
        self._gradients.read(tensor, use, group=group, last=last, deadline_s=self._deadline_s)
        self._given_bytes += tensor.nbytes
        if last:
            while self._leaving and self._leaving[0][0].query():
                self._leaving.popleft()
            self._leaving.append((self._device.event(self._gradients.stream), self._given_bytes))
            self._given_bytes = 0

    def make_room(self, wanted_bytes: int) -> int:
        """Wait for gradients on their way until they take `wanted_bytes` less of the device; returns how many less."""
        return self._gradients.make_room(wanted_bytes, self._deadline_s)

    def leave_more(self, by_bytes: int) -> int:
        """Let gradients on their way wait for more room than so far."""
        return self._gradients.leave_more(by_bytes)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of the budget that gradients on their way have."""
        return self._gradients.leaving_bytes

    def await_next(self, timeout_s: float, *, room_for: int | None = None) -> bool:
        """Wait for the copies of the next group; its use may still be under way."""
        while self._leaving:
            if room_for is not None and sum(size for _, size in self._leaving) + room_for <= self._ring_bytes:
                return False
            left, _ = self._leaving.popleft()
            if not left.query():
                self._moment(left, "copy of gradients to the host").wait(timeout_s)
                return True
        return False

    def wait(self, timeout_s: float) -> None:
        """Wait for the gradients on their way."""
        self._gradients.wait(timeout_s)

    # --- the end ----------------------------------------------------------------------------------------------------

    def begin_computing(self) -> object | None:
        """Return the current stream, and the moment when it has come so far."""
        return self._watch.begin_pass(self._device.current_stream())

    def end_computing(self, what: str, begun: object) -> None:
        """Count the seconds of that stream since that moment, beside its waits; their span has both."""
        assert isinstance(begun, Pass)
        self._watch.end_pass(what, begun)

    def begin_waiting(self) -> object | None:
        """Return the moment when the current stream has come so far."""
        return self._watch.start(self._device.current_stream())

    def end_waiting(self, what: str, begun: object | None, begin: float) -> None:
        """Keep that the current stream has had nothing to do since that moment, for it has waited."""
        assert begun is None or isinstance(begun, torch.Event)
        self._watch.end_wait(what, self._device.current_stream(), begun, begin)

    def note_times(self) -> None:
        """Count the device's seconds of what is over."""
        self._watch.read()

    def close(self) -> None:
        """End the threads, all of them whatever fails."""
        with contextlib.ExitStack() as last:
            last.callback(self._waiter.shutdown)
            last.callback(self._gradients.close)
            self._reads.close()

    # --- helpers ----------------------------------------------------------------------------------------------------

    def _stream(self, urgent: bool) -> torch.Stream:
        return self._urgent if urgent else self._ahead

    @staticmethod
    def _follow(stream: torch.Stream, before: Sequence[torch.Event]) -> None:
        for event in before:
            stream.wait_event(event)

    def _download(self, stream: torch.Stream, source: int, target: int, size_bytes: int) -> Ticket:
        """Give `stream` a copy to the host; returns what waits for it."""
        with self._copying("d2h", stream, size_bytes):
            for first, last in self._host.spans(target, size_bytes):
                place = bytes_at(target + first, last - first, HOST)
                place.copy_(bytes_at(source + first, last - first, self._device.place), non_blocking=True)
            event = self._device.event(stream)
        return self._moment(event, f"copy of {size_bytes} bytes to the host")

    def _upload(self, stream: torch.Stream, source: int, target: int, size_bytes: int) -> torch.Event:
        """Give `stream` a copy to the device; returns when it is over."""
        with self._copying("h2d", stream, size_bytes):
            for first, last in self._host.spans(source, size_bytes):
                place = bytes_at(target + first, last - first, self._device.place)
                place.copy_(bytes_at(source + first, last - first, HOST), non_blocking=True)
            return self._device.event(stream)

    @contextlib.contextmanager
    def _copying(self, link: str, stream: torch.Stream, size_bytes: int) -> Iterator[None]:
        """Let `stream` be the current one and count its copies; where one fails, none is under way any more."""
        begin = self._watch.start(stream)
        try:
            with entered(stream):
                yield
            self._watch.stop(link, stream, begin, size_bytes)
        except BaseException:
            stream.synchronize()  # both places are about to be used for something else
            raise

    def _moment(self, event: torch.Event, subject: str) -> Ticket:
        return _Moment(event, self._waiter, subject)
