"""Memory taken once and handed out as buffers.

Owns the mappings, and what is kept of them while tensors of the user point into them. Knows bytes and addresses; must
not know what they are for. Next: :mod:`offload.memory.device` says which memory a device has.
"""

from __future__ import annotations

import ctypes
import dataclasses
import itertools
import logging
import mmap
import os
import random
import weakref
from collections.abc import Callable, Sequence

import torch

from offload.errors import BudgetError
from offload.memory.budget import Tier
from offload.sizes import HUGE_PAGE_BYTES, MIB, PAGE_BYTES, format_bytes, round_up
from offload.torch_private import no_dispatch, no_functions, storage_at

logger = logging.getLogger(__name__)

HOST = torch.device("cpu")


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An aligned range of an arena: `address` for copies and kernels, `offset_bytes` inside its arena."""

    tier: Tier
    address: int
    offset_bytes: int
    size_bytes: int

    def moved(self, by_bytes: int) -> Buffer:
        """Return the same range of an arena that is elsewhere."""
        return dataclasses.replace(self, address=self.address + by_bytes)


class Arena:
    """Memory of one tier, whose ranges are handed out for its life.

    Attributes:
        tier: which.
        size_bytes: of all of it.
        place: torch's device of its tensors.
        base_address: of its first byte; 0 where it has none.
        elastic: whether parts of it can be given back.
    """

    elastic = False

    def __init__(self, tier: Tier, size_bytes: int, place: torch.device, memory: object, base_address: int) -> None:
        """Own `memory`, which is kept alive; `base_address` is aligned."""
        _release_kept()
        self.tier = tier
        self.size_bytes = size_bytes
        self.place = place
        self.base_address = base_address
        self._memory = memory
        self._end = 0

    @property
    def addressable(self) -> bool:
        """Whether the host can read and write it."""
        return self.place == HOST

    def take(self, size_bytes: int) -> Buffer:
        """Hand out the next `size_bytes` for the life of the arena.

        Raises:
            BudgetError: the arena is smaller than what the plan counted (a bug in the plan).
        """
        size_bytes = round_up(size_bytes, PAGE_BYTES)
        offset = self._end
        if offset + size_bytes > self.size_bytes:
            raise BudgetError(
                f"{self.tier.value} arena: {format_bytes(size_bytes)} do not fit behind {format_bytes(offset)} of "
                f"{format_bytes(self.size_bytes)}; this is a bug of the plan, please report it with engine.plan"
            )
        self._end += size_bytes
        return Buffer(self.tier, self.base_address + offset, offset, size_bytes)

    def spans(self, address: int, size_bytes: int) -> list[tuple[int, int]]:
        """Return the ranges of `size_bytes` at `address`, from 0 on, that a device can copy at once."""
        return [(0, size_bytes)]

    def storage(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return a new torch storage over `buffer`.

        Its reference count tells who still uses the bytes: that is why each unit has a storage of its own.
        """
        return storage_at(buffer.address, buffer.size_bytes, self.place)

    def discard(self, buffer: Buffer) -> None:
        """Return the pages of `buffer`, where that is possible; its content is lost, its range stays."""

    def release(self) -> None:
        """Return all of the memory for a while; its content is lost, what was handed out stays handed out."""
        self._memory = None

    def take_again(self, make: Callable[[int], Arena]) -> int:
        """Have memory again; returns how far it is from where it was, in bytes.

        Args:
            make: takes an arena of a size, of the same kind.

        Raises:
            BudgetError: there is none.
        """
        if self.size_bytes:
            made, before = make(self.size_bytes), self.base_address
            self._memory, self.base_address = made._memory, made.base_address
            return self.base_address - before
        return 0

    def close(self, busy: Sequence[Callable[[], bool]] = (), *, written: bool = False) -> None:
        """Return the memory, but keep it mapped while one of `busy` says that a tensor of the user points into it.

        Where it may still be `written` to by whom nobody waits for, its addresses are not given to anyone again.
        """
        _release_kept()
        if busy:
            _kept[next(_numbers)] = self._memory, busy
        self._memory = None


class HostArena(Arena):
    """An anonymous mapping, advised to use huge pages and not to be copied by fork. Pages are touched when used."""

    elastic = True

    def __init__(self, tier: Tier, size_bytes: int) -> None:
        """Map it.

        Raises:
            BudgetError: the system does not.
        """
        self._mapping: mmap.mmap | None = None
        self._start = 0
        if size_bytes:
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
            try:
                self._mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=flags)
            except OSError as error:
                raise BudgetError(
                    f"{tier.value} budget: expected {format_bytes(size_bytes)} of main memory but the system does not "
                    f'map them ({error}); lower max_memory["{tier.value}"], or raise what a process may map '
                    "(ulimit -v, vm.overcommit_memory)"
                ) from error
            _mappings.add(self._mapping)
            for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
                if hasattr(mmap, advice):
                    try:
                        self._mapping.madvise(getattr(mmap, advice))
                    except OSError as error:  # a kernel without huge pages: slower, not wrong
                        logger.info("%s arena: %s refused (%s)", tier.value, advice, error)
            self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        super().__init__(tier, size_bytes, HOST, self._mapping, round_up(self._start, HUGE_PAGE_BYTES))

    def discard(self, buffer: Buffer) -> None:
        """Return the pages of `buffer`; its content is lost, its range stays. Pages that others have a part of stay."""
        if self._mapping is not None and self.elastic and hasattr(mmap, "MADV_DONTNEED"):
            begin = buffer.address - self._start
            first = round_up(begin, mmap.PAGESIZE)
            last = (begin + buffer.size_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
            if last > first:
                self._mapping.madvise(mmap.MADV_DONTNEED, first, last - first)

    def release(self) -> None:
        """Return all pages: the addresses stay."""
        if self._mapping is not None and hasattr(mmap, "MADV_DONTNEED"):
            self._mapping.madvise(mmap.MADV_DONTNEED)

    def take_again(self, make: Callable[[int], Arena]) -> int:
        """Nothing to take: pages come when they are used."""
        return 0

    def close(self, busy: Sequence[Callable[[], bool]] = (), *, written: bool = False) -> None:
        """Unmap it, as :meth:`Arena.close` says."""
        if written and self._mapping is not None:
            _keep_for_good(self._mapping)
            if not busy:
                self.release()
        super().close(busy, written=written)
        self._mapping = None


_mappings: weakref.WeakSet[mmap.mmap] = weakref.WeakSet()  # of arenas


def _keep_for_good(mapping: mmap.mmap) -> None:
    """Never unmap it, not even at the process's end."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(mapping))


def _keep_in_child() -> None:
    """Leave the addresses of a parent's arenas alone in a forked child: it has nothing there, or memory of its own."""
    for mapping in list(_mappings):
        _keep_for_good(mapping)


os.register_at_fork(after_in_child=_keep_in_child)

# Memory of closed arenas that tensors of the user still point into; looked at when arenas are made and closed, in any
# thread.
_kept: dict[int, tuple[object, Sequence[Callable[[], bool]]]] = {}
_numbers = itertools.count()


def _release_kept() -> None:
    for number, (_, busy) in list(_kept.items()):
        if not any(is_busy() for is_busy in busy):
            _kept.pop(number, None)


def view_at(
    storage: torch.UntypedStorage,
    dtype: torch.dtype,
    offset_numel: int,
    shape: Sequence[int],
    stride: Sequence[int] | None = None,
) -> torch.Tensor:
    """Return a tensor over a part of `storage`; contiguous unless `stride` is given.

    Modes of the user do not see it: selective checkpointing, for one, wants the same operations in a repetition, and a
    tensor that is made in inference mode could not be used for training afterwards.
    """
    place = (offset_numel, shape) if stride is None else (offset_numel, shape, stride)
    return views_at(storage, dtype, (place,))[0]


def views_at(
    storage: torch.UntypedStorage, dtype: torch.dtype, places: Sequence[tuple[int | Sequence[int], ...]]
) -> list[torch.Tensor]:
    """Return what :func:`view_at` does for several `places`: offset, shape, and stride where it is not contiguous."""
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return views_at(storage, dtype, places)
    with no_functions(), no_dispatch():
        first = torch.empty(0, dtype=dtype, device=storage.device)
        tensors = [first, *(first.new_empty(0) for _ in places[1:])]
        for tensor, place in zip(tensors, places, strict=True):
            set_storage: Callable[..., torch.Tensor] = tensor.set_
            set_storage(storage, *place)
    return tensors


def bytes_at(address: int, size_bytes: int, place: torch.device) -> torch.Tensor:
    """Return a tensor of `size_bytes` bytes over memory that somebody else owns."""
    return view_at(storage_at(address, size_bytes, place), torch.uint8, 0, (size_bytes,))


def fill_with_noise(address: int, length: int) -> None:
    """Fill memory with bytes that no drive can compress."""
    generator = random.Random(0)
    for start in range(0, length, MIB):
        part = min(MIB, length - start)
        ctypes.memmove(address + start, generator.randbytes(part), part)
