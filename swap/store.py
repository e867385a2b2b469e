r"""The swap store: objects of bytes under keys, on disk, written by copy-on-write.

Owns: what a user of the store sees, the parts it is made of, and its life from opening to closing.
Must not know: what the bytes mean; tensors, shards, budgets of other tiers.
Next: `objects` for puts and gets, `commits` for what takes effect when, `backing` for the files, `transfers` for what
is in flight. docs/swap.md tells the whole story.

A put never touches the bytes that are valid now. It writes to a fresh extent; when the write has been reaped
successfully the key is mapped to the new extent, and the old one becomes free once nothing needs it any more:

    put(k) --> fresh extent --write--> reaped well:  mapping[k] = fresh, old extent released
                                   \-> failed:       fresh extent freed, mapping[k] as before

With `Mode.EXPLICIT` there are two mappings. Puts and deletes change the working one; `commit` makes it the committed
one, `abort` goes back to that, and `snapshot` keeps it readable whatever happens afterwards. With `Mode.DURABLE` the
committed mapping is also on the drive, in files that have names.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable, Iterable, Sequence
from pathlib import Path
from types import TracebackType

from swap.backing import Mode, open_backing
from swap.commits import Commits
from swap.durable.disk import Disk
from swap.durable.manifest import NO_MARK
from swap.durable.records import encode_key
from swap.io.aio import Aio
from swap.io.checksums import granule_for
from swap.io.faults import Fault
from swap.lifetime import Gate, Holdings, weakly
from swap.objects import Item, Objects, Snapshot
from swap.space.allocation import check_weights
from swap.space.contents import Contents
from swap.stats import PastTransfer, SwapStats
from swap.transfers import StoreTicket, Transfers

__all__ = ["StoreTicket", "SwapStore"]

_log = logging.getLogger(__name__)


class SwapStore:
    """Objects of bytes on disk, each under a key. Safe from several threads.

    A put writes to a fresh extent. It takes effect when its ticket was reaped successfully; until then, and if it
    fails, the key has the version before.

    Addresses, offsets and lengths are multiples of `alignment`; a length that is not is rounded up, and the
    caller's buffer must be padded accordingly. Memory given to `put` and `get` must stay valid and untouched
    until the ticket is done. A put needs room for the new version while the old one still exists.

    Constructing one creates and preallocates the swap files, or opens those of a durable store that exists.

    Args:
        paths: existing directories. Large objects lie on all of them at once. A durable store has them for itself
            and wants them in the same order every time.
        capacity_bytes: size of all files together, rounded down to the alignment. A durable store that has less
            grows, one that has more is refused.
        mode: what puts promise.
        weights: share of every path in files and objects, usually its measured bandwidth. None spreads objects
            equally, and the capacity in proportion to free space.
        checksums: compare every read with the checksums of what was written; None means for DURABLE only.
        engine: "auto", "io_uring" or "threads"; see `swap.io.aio.Aio`.
        deadline_s: limit in seconds of waits that give none.
        disk: how manifests are written and flushed, for tests.
        queue_depth: requests given to the kernel at a time (io_uring).
        block_bytes: largest request; longer transfers are cut. A multiple of 4096.
        threads: workers of the thread engine.

    Attributes:
        mode: what puts promise.
        checksums: whether every read is compared with the checksums of what was written.
        paths: directories that hold the files.

    Raises:
        SwapFullError: the file systems have not enough room; the text names needed and free bytes per path.
        SwapLockedError: another store uses the run directory.
        SwapCorruptError: files of the durable store are damaged, cut off, missing or foreign.
        SwapError: a directory is missing or not writable, the engine asked for does not work here, or the durable
            store is of another version or larger than allowed.
        ValueError: no path, a capacity below the alignment, or weights that are not one positive number per path.
    """

    def __init__(
        self,
        paths: Sequence[str | Path] | str | Path,
        capacity_bytes: int,
        *,
        mode: Mode = Mode.SCRATCH,
        weights: Sequence[float] | None = None,
        checksums: bool | None = None,
        engine: str = "auto",
        deadline_s: float = 60.0,
        disk: Disk | None = None,
        queue_depth: int = 32,
        block_bytes: int = 4 << 20,
        threads: int = 4,
    ) -> None:
        directories = [paths] if isinstance(paths, (str, Path)) else list(paths)
        if not directories:
            raise ValueError("paths: expected at least one directory but got none")
        if weights is not None:
            check_weights(weights, len(directories))
        self._weights = weights
        self.paths = tuple(str(directory) for directory in directories)
        self.mode = mode
        self.checksums = mode is Mode.DURABLE if checksums is None else checksums
        self._gate = Gate("swap store")
        self._backing = backing = open_backing(self.paths, capacity_bytes, mode, weights, disk or Disk())
        with contextlib.ExitStack() as undo:
            undo.callback(backing.close)
            self._aio = Aio(
                engine=engine,
                queue_depth=queue_depth,
                block_bytes=block_bytes,
                threads=threads,
                deadline_s=deadline_s,
            )
            undo.pop_all()
        self._holdings = Holdings(self, self._aio, backing.descriptors, backing.close_manifest)
        self._contents = Contents(backing.space, backing.versions, explicit_commit=mode is not Mode.SCRATCH)
        granule_bytes = granule_for(self.alignment) if self.checksums else 0
        lock, release = self._contents.lock, self._contents.mapping.release
        self._transfers = Transfers(self._aio, backing, lock, granule_bytes, weakly(self.dump), release)
        self._holdings.take_memory(self._transfers.flying)
        self._objects = Objects(self._contents, self._transfers, self._gate)
        self._commits = Commits(self._contents, self._transfers, backing)
        if self.fallback_reason:
            _log.warning("swap: io_uring cannot be used, threads are used instead: %s", self.fallback_reason)

    # ---- what it is ----

    @property
    def alignment(self) -> int:
        """Of addresses, offsets and lengths, bytes; a multiple of 4096."""
        return self._backing.space.alignment

    @property
    def capacity_bytes(self) -> int:
        """Size of all files together."""
        return self._backing.space.capacity_bytes

    @property
    def deadline_s(self) -> float:
        """Limit in seconds of waits that give none."""
        return self._aio.deadline_s

    @property
    def direct(self) -> bool:
        """Whether the page cache is bypassed on every path."""
        return all(file.direct for file in self._backing.files)

    @property
    def aio(self) -> Aio:
        """The engine that moves its bytes: if other files of its drives are moved by it, priorities hold among all."""
        return self._aio

    @property
    def engine(self) -> str:
        """The engine in use: "io_uring" or "threads"."""
        return self._aio.engine

    @property
    def fallback_reason(self) -> str | None:
        """Why the engine is not io_uring, or None."""
        return self._aio.fallback_reason

    # ---- objects ----

    def put(self, key: Hashable, address: int, length: int, *, urgent: bool = False) -> StoreTicket:
        """Start writing a new version of `key`. It takes effect when the ticket has been reaped successfully.

        Of several puts of one key in flight, the one started last wins. Blocks only when the store has no
        room until transfers in flight are over.

        Args:
            key: which object.
            address: of the bytes, a multiple of the alignment.
            length: bytes; the buffer holds it rounded up to the alignment.
            urgent: overtake everything that waits and is not urgent (something waits until it is written).

        Returns:
            What tells when it is done.

        Raises:
            ValueError: address not aligned, or length not positive.
            TypeError: a durable store cannot write such a key down.
            SwapFullError: no room even when nothing is in flight any more.
            SwapDeadlineError: no room because transfers in flight do not finish.
            SwapError: the store is closed or belongs to the parent process.
        """
        if self.mode is Mode.DURABLE:
            encode_key(key)
        return self._objects.put([(key, address, length)], urgent=urgent)[0]

    def put_many(self, items: Sequence[Item], *, urgent: bool = False) -> list[StoreTicket]:
        """Start several puts: for many small objects, cheaper than one call each.

        None is started unless there is room for all. Each takes effect by itself. `swap.wait_all` waits for the
        tickets.

        Args:
            items: key, address and length of each object. Of several with one key, the last wins.
            urgent: as of `put`.

        Returns:
            One ticket per item, in the same order.

        Raises:
            SwapFullError: no room for all of them beside what they replace, even when nothing is in flight any more.
            Exception: what `put` raises.
        """
        if self.mode is Mode.DURABLE:
            for key, _, _ in items:
                encode_key(key)
        return self._objects.put(items, urgent=urgent) if items else []

    def get(self, key: Hashable, address: int, length: int, *, offset: int = 0, urgent: bool = False) -> StoreTicket:
        """Start reading the current version of `key`, or `length` bytes of it from `offset`.

        Args:
            key: which object.
            address: where to, a multiple of the alignment.
            length: bytes; the buffer holds it rounded up to the alignment.
            offset: first byte within the object, a multiple of the alignment.
            urgent: overtake everything that waits and is not urgent (something waits for these bytes).

        Returns:
            What tells when it is done.

        Raises:
            KeyError: the key has no version (never put, put not reaped yet, or deleted).
            ValueError: not aligned, or the range is not inside the object.
            SwapError: the store is closed or belongs to the parent process.
        """
        return self._objects.get([(key, address, length)], offset=offset, urgent=urgent)[0]

    def get_many(self, items: Sequence[Item], *, urgent: bool = False) -> list[StoreTicket]:
        """Start several gets, each from the start of its object; none unless all can be. See `put_many`.

        Args:
            items: key, address and length of each object.
            urgent: as of `get`.

        Returns:
            One ticket per item, in the same order.

        Raises:
            Exception: what `get` raises.
        """
        return self._objects.get(items, offset=0, urgent=urgent) if items else []

    def delete(self, key: Hashable) -> None:
        """Forget `key`; puts of it that are in flight will have no effect. Reads in flight still succeed.

        Raises:
            KeyError: the key has no version, no put in flight and no failed put to undo.
        """
        self._objects.delete(key)

    def length_of(self, key: Hashable) -> int:
        """Length in bytes of the current version, rounded up to the alignment.

        Raises:
            KeyError: the key has no version.
        """
        with self._contents.lock:
            return self._objects.version(key).length

    def __contains__(self, key: Hashable) -> bool:
        with self._contents.lock:
            return key in self._contents.mapping.working

    def __len__(self) -> int:
        with self._contents.lock:
            return len(self._contents.mapping.working)

    def keys(self) -> list[Hashable]:
        """Keys that have a version, as of now."""
        with self._contents.lock:
            return list(self._contents.mapping.working)

    # ---- several objects at once ----

    @property
    def mark(self) -> int:
        """Of the last commit that had one; -1 where none had, or nothing is durable."""
        run = self._backing.run
        return NO_MARK if run is None else run.manifest.mark

    def commit(self, deadline_s: float | None = None, *, mark: tuple[int, ...] | None = None) -> None:
        """Make everything that was put and deleted since the last commit take effect as one.

        Waits for the puts in flight, not for gets. A durable store then flushes the data, and after that appends to the
        manifest and flushes it: a crash at any moment leaves this commit or the one before, whole.

        Args:
            deadline_s: seconds to wait for puts in flight at most; None uses the deadline of the store.
            mark: of this commit, at least that of the last one, and the others that `swap.go_back` shall take:
                somebody holds what each of these commits has in a :meth:`snapshot`.

        Raises:
            SwapDeadlineError: puts did not finish in time; nothing is committed.
            SwapFullError: no room for the manifest; nothing is committed.
            SwapError: a put since the last commit failed and its key was neither put again nor deleted, or something
                could not be flushed; nothing is committed. Repeat what the text asks for and commit again, or `abort`.
            ValueError: the mode has no commits.
        """
        self._check_explicit("commit")
        self._commits.commit(self.deadline_s if deadline_s is None else deadline_s, mark)

    def abort(self) -> None:
        """Undo everything that was put and deleted since the last commit, puts in flight included.

        Does not wait: memory of puts in flight stays in use until their tickets are done.

        Raises:
            SwapError: the store is closed or belongs to the parent process; or a failed commit may be on the drive and
                cannot be undone there, then nothing has changed.
            ValueError: the mode has no commits.
        """
        self._check_explicit("abort")
        self._commits.abort()

    def snapshot(self, keys: Iterable[Hashable] | None = None) -> Snapshot:
        """Keep the committed mapping readable until the snapshot is released; in SCRATCH mode the current one.

        Its extents stay in use meanwhile. Costs time in proportion to the number of keys, but moves no bytes.

        Args:
            keys: keep these alone, as `get` sees them now: with what was put since the last commit.

        Returns:
            What reads them, until it is released.

        Raises:
            KeyError: one of `keys` has no version.
            SwapError: the store is closed or belongs to the parent process.
        """
        return self._objects.snapshot(keys)

    @property
    def uncommitted(self) -> bool:
        """Something was put (and reaped) or deleted since the last commit."""
        with self._contents.lock:
            return self._contents.mapping.changed

    # ---- the whole store ----

    @property
    def used_bytes(self) -> int:
        """Bytes in extents: current and committed versions, those being written, and old ones still read or held."""
        with self._contents.lock:
            return self._backing.space.used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that a put could take now."""
        with self._contents.lock:
            return self._backing.space.free_bytes

    def grow(self, capacity_bytes: int) -> None:
        """Make the files longer, to about `capacity_bytes` together; nothing happens if they have that much.

        A durable store stays as long. What was put since the last commit stays uncommitted.

        Raises:
            SwapFullError: the file systems have not enough room; nothing has changed.
            SwapError: something could not be written or flushed; the store has no more room than before. If it asks for
                it, repeat what was put since the last commit.
        """
        self._gate.check()
        self._commits.grow(capacity_bytes, self._weights)

    def drain(self, deadline_s: float | None = None) -> None:
        """Wait until nothing is in flight; all successful puts have taken effect then.

        Args:
            deadline_s: seconds to wait at most; None uses the deadline of the store.

        Raises:
            SwapDeadlineError: transfers did not finish in time.
            SwapError: the first failure that nobody has waited for.
        """
        self._gate.check()
        self._transfers.drain(self.deadline_s if deadline_s is None else deadline_s)

    def register_buffer(self, address: int, length: int) -> bool:
        """Pin a memory range once for all transfers (best effort); see `swap.io.aio.Aio.register_buffer`."""
        self._gate.check()
        return self._aio.register_buffer(address, length)

    def unregister_buffer(self, address: int) -> None:
        """Forget a range given to `register_buffer`, before the memory is unmapped."""
        self._gate.check()
        self._aio.unregister_buffer(address)

    def inject(self, fault: Fault) -> None:
        """Plan a fault, for tests."""
        self._aio.inject(fault)

    def clear_faults(self) -> None:
        """Drop all planned faults."""
        self._aio.clear_faults()

    def stats(self) -> SwapStats:
        """Counters since the store was opened."""
        io = self._aio.stats()
        with self._contents.lock:
            return SwapStats(
                read_bytes=io.read_bytes,
                written_bytes=io.write_bytes,
                read_seconds=io.read_seconds,
                write_seconds=io.write_seconds,
                reads=io.reads,
                writes=io.writes,
                read_latency=io.read_latency,
                write_latency=io.write_latency,
                in_flight=io.in_flight,
                peak_in_flight=io.peak_in_flight,
                queue_depth=io.queue_depth,
                peak_queue_depth=io.peak_queue_depth,
                used_bytes=self.used_bytes,
                peak_used_bytes=self._backing.space.peak_used_bytes,
                capacity_bytes=self.capacity_bytes,
                engine=self.engine,
                fallback_reason=self.fallback_reason,
                direct=self.direct,
                paths=self.paths,
            )

    def past(self, *, writes: bool) -> list[PastTransfer]:
        """The last reads (or `writes`) that went well, `PAST_TRANSFERS` at most, in the order of reaping.

        Those that are over are reaped for it.
        """
        self._transfers.reap_finished()
        return self._transfers.past(writes=writes)

    def dump(self) -> str:
        """State of the store and its engine, for error messages."""
        if self._gate.inherited:
            return "swap store of the parent process"
        with self._contents.lock:
            waiting = self._transfers.in_flight()
            lines = [
                f"swap store: {len(self)} objects, {self.used_bytes} of {self.capacity_bytes} bytes used, "
                f"{len(waiting)} tickets not reaped"
            ]
            lines += [
                f"  {path}: {extents.used_bytes} of {extents.capacity} bytes used, "
                f"longest free range {extents.largest_free}"
                for path, extents in zip(self.paths, self._backing.space.allocators, strict=True)
            ]
            oldest = ", ".join(ticket.what for ticket in waiting[:8])
            lines += [f"  oldest: {oldest}"] if oldest else []
            lines.append(self._aio.dump())
        return "\n".join(lines)

    def close(self) -> None:
        """Wait for the transfers in flight, stop the engine, drop the files.

        Idempotent; does nothing in a forked child.

        Raises:
            SwapDeadlineError: transfers did not finish in time (the store is closed nevertheless); if the
                text says that the kernel still holds them, their memory must not be reused.
        """
        if self._gate.inherited or self._gate.closed:
            return
        with self._contents.lock:
            self._gate.close()
        try:
            self._aio.close(self.deadline_s)
        finally:
            self._transfers.reap_finished()
            self._holdings.close()

    def __enter__(self) -> SwapStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _check_explicit(self, what: str) -> None:
        self._gate.check()
        if self.mode is Mode.SCRATCH:
            raise ValueError(
                f"{what}: expected a store with explicit commits but its mode is {self.mode.name}, where every put "
                "takes effect by itself; open it with mode=Mode.EXPLICIT"
            )
