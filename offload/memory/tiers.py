"""Memory tiers: how large they are, who has claimed what, and the arenas behind them.

Owns the budgets (hard ledgers), the arenas (memory taken once and handed out as buffers) and the placement of variable
sized buffers inside a region. Knows bytes, addresses and numbered owners; must not know units, shards or training.
Next: :mod:`offload.shards.shard` says what the bytes mean, :mod:`offload.shards.manager` decides who gets them.
"""

from __future__ import annotations

import ctypes
import dataclasses
import logging
import mmap
import threading
from collections.abc import Callable, Mapping, Sequence
from enum import Enum

import psutil
import torch

from offload.config import Share, format_bytes
from offload.errors import BudgetError
from offload.memory import machine
from offload.torch_private import no_dispatch, no_functions, storage_at

logger = logging.getLogger(__name__)

HUGE_PAGE_BYTES = 2 << 20
BUFFER_ALIGNMENT_BYTES = 4096
HOST_HEADROOM = 0.85  # of what is available, where the user names no host budget
DEVICE_HEADROOM = 0.90


class Tier(Enum):
    """Where bytes live, ordered by distance from compute."""

    DEVICE = "device"
    HOST = "cpu"
    NVME = "nvme"

    # Members are singletons: identity is enough, and this keeps dictionary lookups off the interpreter.
    __hash__ = object.__hash__


class Budget:
    """Hard byte limit of one tier, with a ledger of claims. Safe from several threads.

    Invariant: used == sum of claims <= limit.
    """

    def __init__(self, tier: Tier, limit_bytes: int) -> None:
        self.tier = tier
        self.limit_bytes = limit_bytes
        self.peak_bytes = 0
        self._used_bytes = 0
        self._held: dict[str, int] = {}  # by the names of claims
        self._lock = threading.Lock()

    @property
    def used_bytes(self) -> int:
        """Bytes claimed now."""
        return self._used_bytes

    @property
    def free_bytes(self) -> int:
        """Bytes that can still be claimed."""
        return self.limit_bytes - self._used_bytes

    def claim(self, name: str, size_bytes: int = 0) -> Claim:
        """Claim `size_bytes` under `name`; the claim exists before the bytes do.

        Raises:
            BudgetError: the claim does not fit. Nothing is claimed then.
        """
        claim = Claim(self, name)
        claim.resize(size_bytes)
        return claim

    def claims(self) -> dict[str, int]:
        """Return the bytes claimed by name."""
        with self._lock:
            return {name: size for name, size in self._held.items() if size}

    def _change(self, name: str, by_bytes: int) -> None:
        with self._lock:
            wanted = self._used_bytes + by_bytes
            if by_bytes > 0 and wanted > self.limit_bytes:
                holders = ", ".join(f"{k} {format_bytes(v)}" for k, v in self._held.items() if v)
                raise BudgetError(
                    f"{self.tier.value} budget: {name} needs {format_bytes(by_bytes)} more, "
                    f"{format_bytes(wanted)} in all, but the limit is {format_bytes(self.limit_bytes)} "
                    f"(held: {holders or 'nothing'}); "
                    f'raise max_memory["{self.tier.value}"]'
                )
            self._used_bytes = wanted
            self._held[name] = self._held.get(name, 0) + by_bytes
            self.peak_bytes = max(self.peak_bytes, wanted)


class Claim:
    """Bytes of a budget that one owner holds, given back by :meth:`close` or at the end of a ``with`` block.

    Attributes:
        budget: of which.
        name: what error messages call it; several claims may have the same.
        size_bytes: held now.
    """

    __slots__ = ("budget", "name", "size_bytes")

    def __init__(self, budget: Budget, name: str) -> None:
        self.budget = budget
        self.name = name
        self.size_bytes = 0

    def resize(self, size_bytes: int) -> None:
        """Hold `size_bytes` from now on.

        Raises:
            BudgetError: they do not fit. The claim is as it was then.
        """
        assert size_bytes >= 0, f"{self.name}: {size_bytes} bytes"
        self.budget._change(self.name, size_bytes - self.size_bytes)
        self.size_bytes = size_bytes

    def close(self) -> None:
        """Hold nothing any more. Idempotent."""
        self.resize(0)

    def __enter__(self) -> Claim:
        """Return the claim."""
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


@dataclasses.dataclass(frozen=True, slots=True)
class Buffer:
    """An aligned range of an arena: `address` for copies and kernels, `offset_bytes` inside its arena."""

    tier: Tier
    address: int
    offset_bytes: int
    size_bytes: int


class Arena:
    """Memory of one tier, taken once.

    On the CPU it is an anonymous mapping advised to use huge pages and not to be copied by fork; with a GPU present
    the host arena is page-locked and the device arena is one CUDA allocation. Pages are touched only when used.
    """

    def __init__(self, tier: Tier, size_bytes: int, device: torch.device, *, page_locked: bool = False) -> None:
        _release_kept()
        self.tier = tier
        self.size_bytes = size_bytes
        self.device = device
        self._mapping: mmap.mmap | None = None
        self._tensor: torch.Tensor | None = None
        self._registered = False
        self._end = 0
        if size_bytes == 0:
            self.base_address = 0
            return
        if device.type == "cuda":
            self._tensor = torch.empty(size_bytes + BUFFER_ALIGNMENT_BYTES, dtype=torch.uint8, device=device)
            self.base_address = _round_up(self._tensor.data_ptr(), BUFFER_ALIGNMENT_BYTES)
            return
        self._mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        for advice in ("MADV_HUGEPAGE", "MADV_DONTFORK"):
            if hasattr(mmap, advice):
                try:
                    self._mapping.madvise(getattr(mmap, advice))
                except OSError as error:  # a kernel without huge pages: slower, not wrong
                    logger.info("%s arena: %s refused (%s)", tier.value, advice, error)
        start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
        self.base_address = _round_up(start, HUGE_PAGE_BYTES)
        if page_locked:
            status = int(torch.cuda.cudart().cudaHostRegister(self.base_address, size_bytes, 0))
            self._registered = status == 0
            if status:
                logger.warning("host arena: page-locking %s failed (%d)", format_bytes(size_bytes), status)

    def take(self, size_bytes: int) -> Buffer:
        """Hand out the next `size_bytes` for the life of the arena.

        Raises:
            BudgetError: the arena is smaller than what the plan counted (a bug in the plan).
        """
        size_bytes = _round_up(size_bytes, BUFFER_ALIGNMENT_BYTES)
        offset = self._end
        if offset + size_bytes > self.size_bytes:
            raise BudgetError(
                f"{self.tier.value} arena: {format_bytes(size_bytes)} do not fit behind {format_bytes(offset)} of "
                f"{format_bytes(self.size_bytes)}; this is a bug of the plan, please report it with engine.plan"
            )
        self._end += size_bytes
        return Buffer(self.tier, self.base_address + offset, offset, size_bytes)

    def storage(self, buffer: Buffer) -> torch.UntypedStorage:
        """Return a new torch storage over `buffer`.

        Its reference count tells who still uses the bytes: that is why each residency gets a storage of its own.
        """
        return storage_at(buffer.address, buffer.size_bytes, self.device)

    def discard(self, buffer: Buffer) -> None:
        """Return the pages of `buffer`, where that is possible; its content is lost, its range stays."""
        if self._mapping is not None and not self._registered and hasattr(mmap, "MADV_DONTNEED"):
            start = ctypes.addressof(ctypes.c_char.from_buffer(self._mapping))
            self._mapping.madvise(mmap.MADV_DONTNEED, buffer.address - start, buffer.size_bytes)

    def close(self, busy: Sequence[Callable[[], bool]] = ()) -> None:
        """Return the memory, but keep it mapped while one of `busy` says that a tensor of the user points into it."""
        _release_kept()
        if self._registered:
            torch.cuda.cudart().cudaHostUnregister(self.base_address)
            self._registered = False
        if busy:
            _kept.append((self._mapping, self._tensor, busy))
        self._mapping = None
        self._tensor = None


# Memory of closed arenas that tensors of the user still point into; looked at when arenas are made and closed.
_kept: list[tuple[mmap.mmap | None, torch.Tensor | None, Sequence[Callable[[], bool]]]] = []


def _release_kept() -> None:
    _kept[:] = [kept for kept in _kept if any(busy() for busy in kept[2])]


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
    if torch.is_inference_mode_enabled():
        with torch.inference_mode(False):
            return view_at(storage, dtype, offset_numel, shape, stride)
    with no_functions(), no_dispatch():
        tensor = torch.empty(0, dtype=dtype, device=storage.device)
        set_storage: Callable[..., torch.Tensor] = tensor.set_
        if stride is None:
            return set_storage(storage, offset_numel, shape)
        return set_storage(storage, offset_numel, shape, stride)


def _round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


class Region:
    """Places variable-sized buffers of different owners into one buffer; evicts by windows.

    Small blocks are placed from the low end and large ones (a quarter of the region and more) from the high end, so
    that a large embedding and a stream of blocks do not cut each other's room into pieces.
    Invariant: blocks are disjoint, sorted by offset, inside the region.

    Attributes:
        size_bytes: present size, at most the buffer's.
    """

    def __init__(self, buffer: Buffer) -> None:
        self._buffer = buffer
        self.size_bytes = buffer.size_bytes
        self._blocks: list[tuple[int, int, int]] = []  # offset, size, owner

    @property
    def whole(self) -> Buffer:
        """All of the region as one buffer."""
        return self._part(0, self.size_bytes)

    @property
    def largest_bytes(self) -> int:
        """Bytes of the buffer it lies in."""
        return self._buffer.size_bytes

    @property
    def end_bytes(self) -> int:
        """End of the last block."""
        return self._blocks[-1][0] + self._blocks[-1][1] if self._blocks else 0

    def owners_beyond(self, offset_bytes: int) -> list[int]:
        """Return the owners of blocks that reach beyond `offset_bytes`, the last one first."""
        return [owner for offset, size, owner in reversed(self._blocks) if offset + size > offset_bytes]

    def resize(self, size_bytes: int) -> Buffer:
        """Let the region end at `size_bytes`; returns the part by which it has grown or shrunk."""
        assert self.end_bytes <= size_bytes <= self.largest_bytes, (self.end_bytes, size_bytes, self.largest_bytes)
        before, self.size_bytes = self.size_bytes, size_bytes
        return self._part(min(before, size_bytes), abs(size_bytes - before))

    @property
    def used_bytes(self) -> int:
        """Bytes handed out now."""
        return sum(size for _, size, _ in self._blocks)

    def owners(self) -> list[int]:
        """Return the owners in address order."""
        return [owner for _, _, owner in self._blocks]

    def room_beside(self, owner: int) -> int:
        """Return the bytes in one piece that there would be if the block of `owner` were the only one."""
        offset, size = next((offset, size) for offset, size, own in self._blocks if own == owner)
        return max(offset, self.size_bytes - offset - size)

    def allocate(self, size_bytes: int, owner: int) -> Buffer | None:
        """Return a buffer for `owner`, or None where no gap is large enough."""
        size_bytes = _round_up(size_bytes, BUFFER_ALIGNMENT_BYTES)
        gaps = [(start, end) for start, end in self._gaps() if end - start >= size_bytes]
        if not gaps:
            return None
        if size_bytes * 4 >= self.size_bytes:
            offset = gaps[-1][1] - size_bytes
        else:
            offset = gaps[0][0]
        self._blocks.append((offset, size_bytes, owner))
        self._blocks.sort(key=lambda block: block[0])
        return self._part(offset, size_bytes)

    def free(self, owner: int) -> None:
        """Take back the buffer of `owner`."""
        before = len(self._blocks)
        self._blocks = [block for block in self._blocks if block[2] != owner]
        assert len(self._blocks) == before - 1, f"{owner} holds {before - len(self._blocks)} buffers"

    def hand_over(self, owner: int, heir: int) -> None:
        """Let the buffer of `owner` belong to `heir` from now on."""
        assert heir not in self.owners(), heir
        self._blocks = [(offset, size, heir if own == owner else own) for offset, size, own in self._blocks]

    def pack(self, movable: Callable[[int], bool]) -> list[tuple[int, Buffer, Buffer]]:
        """Move blocks to the low end, in address order, so that the gaps become one as far as possible.

        Args:
            movable: whether an owner's block may be moved.

        Returns:
            (owner, old buffer, new buffer) of what moves, in the order in which the bytes must be moved (the two may
            overlap).
        """
        moves, blocks, end = [], [], 0
        for offset, size, owner in self._blocks:
            if offset > end and movable(owner):
                moves.append((owner, self._part(offset, size), self._part(end, size)))
                offset = end
            blocks.append((offset, size, owner))
            end = offset + size
        self._blocks = blocks
        return moves

    def _part(self, offset: int, size: int) -> Buffer:
        return Buffer(self._buffer.tier, self._buffer.address + offset, self._buffer.offset_bytes + offset, size)

    def cheapest_window(self, size_bytes: int, cost: Callable[[int], float | None]) -> list[int] | None:
        """Return the owners to evict so that `size_bytes` fit in one piece, at the least highest cost.

        Args:
            size_bytes: what must fit.
            cost: cost of evicting an owner; None where it must stay.
        """
        size_bytes = _round_up(size_bytes, BUFFER_ALIGNMENT_BYTES)
        costs = [cost(owner) for _, _, owner in self._blocks]
        best: tuple[float, int, list[int]] | None = None
        for first in range(len(self._blocks)):
            start = self._blocks[first - 1][0] + self._blocks[first - 1][1] if first else 0
            highest = float("-inf")
            for last in range(first, len(self._blocks)):
                value = costs[last]
                if value is None:
                    break
                highest = max(highest, value)
                end = self._blocks[last + 1][0] if last + 1 < len(self._blocks) else self.size_bytes
                if end - start >= size_bytes:
                    if best is None or (highest, last - first) < best[:2]:
                        best = (highest, last - first, [b[2] for b in self._blocks[first : last + 1]])
                    break
        return None if best is None else best[2]

    def _gaps(self) -> list[tuple[int, int]]:
        gaps, end = [], 0
        for offset, size, _ in self._blocks:
            if offset > end:
                gaps.append((end, offset))
            end = offset + size
        if end < self.size_bytes:
            gaps.append((end, self.size_bytes))
        return gaps


def resolve_budgets(
    given: Mapping[str, int | Share], device: torch.device, nvme_free_bytes: int | None
) -> dict[Tier, int]:
    """Turn given budgets into bytes per tier.

    Args:
        given: budgets by canonical name; shares are taken of what is free now, in the container where there is one.
        device: the compute device. On the CPU, device and host budgets are both main memory: a missing one gets half.
        nvme_free_bytes: free bytes at the NVMe paths, None without paths.
    """
    available = psutil.virtual_memory().available
    container = machine.cgroup_memory_free()
    if container is not None:
        available = min(available, container)
    if device.type == "cuda":
        device_free = torch.cuda.mem_get_info(device)[0]
        default = {"device": int(device_free * DEVICE_HEADROOM), "cpu": int(available * HOST_HEADROOM)}
    else:
        device_free = available
        half = int(available * HOST_HEADROOM / 2)
        default = {"device": half, "cpu": half}
    default["nvme"] = int((nvme_free_bytes or 0) * DEVICE_HEADROOM)
    free = {"device": device_free, "cpu": available, "nvme": nvme_free_bytes or 0}
    budgets: dict[Tier, int] = {}
    for tier in Tier:
        value = given.get(tier.value, default[tier.value])
        budgets[tier] = int(value.fraction * free[tier.value]) if isinstance(value, Share) else value
    if nvme_free_bytes is None:
        budgets[Tier.NVME] = 0
    return budgets
