"""An engine that gives its memory back for a while: sharing a GPU between training and generation.

Owns what was in the memory meanwhile - in host memory where the budget has room, else on the drive - and the order of
leaving and coming back. Several ranks sleep and wake together, or none of them does. The memory itself is the business
of :mod:`offload.shards.tiers`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
import ctypes
import mmap
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

import torch

from offload.build import Parts
from offload.config import Config
from offload.distributed.together import Together
from offload.durable import DurableRun
from offload.errors import BudgetError, StateError
from offload.interrupt import Deferral
from offload.life import Life
from offload.memory.arena import Buffer, bytes_at
from offload.memory.budget import Budget, Tier
from offload.shards.manager import Manager
from offload.sizes import MIB, PAGE_BYTES, format_bytes, whole_pages
from swap import SwapStore
from swap.io.aio import is_memory_held
from swap.lifetime import leave

PIECE_BYTES = 4 * MIB  # that are copied at once


class _Place(Protocol):
    """Where the content is meanwhile: `size_bytes` that are written and read once, in pieces."""

    def put(self, at: int, address: int, size_bytes: int) -> None:
        """Keep what is at host `address`."""

    def get(self, at: int, address: int, size_bytes: int) -> None:
        """Bring it back."""

    def close(self) -> None:
        """Give the room back."""


class _InMemory:
    """In ordinary host memory, within the budget."""

    def __init__(self, budget: Budget, size_bytes: int) -> None:
        """Take it.

        Raises:
            BudgetError: the budget has no room, or the machine does not give it.
        """
        self._claim = budget.claim("asleep", size_bytes)
        try:
            self._memory: mmap.mmap | None = mmap.mmap(-1, max(size_bytes, 1))
        except BaseException as error:
            self._claim.close()
            if not isinstance(error, OSError):
                raise
            raise BudgetError(
                f"sleep: what is in memory takes {format_bytes(size_bytes)} but the machine does not give so much "
                f"host memory: {error.strerror}; free some, or pass host=True with a drive, which nvme_path names"
            ) from error
        self._start = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))

    def put(self, at: int, address: int, size_bytes: int) -> None:
        """See :class:`_Place`."""
        ctypes.memmove(self._start + at, address, size_bytes)

    def get(self, at: int, address: int, size_bytes: int) -> None:
        """See :class:`_Place`."""
        ctypes.memmove(address, self._start + at, size_bytes)

    def close(self) -> None:
        """See :class:`_Place`."""
        self._memory = None
        self._claim.close()


class _OnDrive:
    """In files without a name."""

    def __init__(self, config: Config, budget: Budget, size_bytes: int) -> None:
        """Take the room.

        Raises:
            BudgetError: the budget has no room.
            swap.SwapFullError: the drive has none.
        """
        self._claim = budget.claim("asleep", size_bytes)
        try:
            room = size_bytes + size_bytes // PAGE_BYTES + MIB
            self._store = SwapStore(config.paths(), room, checksums=True, deadline_s=config.io_deadline_s)
        except BaseException:
            self._claim.close()
            raise

    def put(self, at: int, address: int, size_bytes: int) -> None:
        """See :class:`_Place`."""
        self._store.put(at, address, size_bytes).wait()

    def get(self, at: int, address: int, size_bytes: int) -> None:
        """See :class:`_Place`."""
        self._store.get(at, address, size_bytes).wait()

    def close(self) -> None:
        """See :class:`_Place`."""
        self._store.close()
        self._claim.close()


class Sleeping:
    """One engine's sleep. See the module's text."""

    def __init__(
        self, config: Config, parts: Parts, life: Life, deferral: Deferral, durable: DurableRun | None
    ) -> None:
        """Begin awake; `deferral` holds Ctrl-C back while something is half done, `durable` commits the last step."""
        self._config = config
        self._parts = parts
        self._life = life
        self._deferral = deferral
        self._durable = durable
        self._place: _Place | None = None
        self._tiers: tuple[Tier, ...] = ()
        self._left: list[mmap.mmap] = []  # memory of pieces that the drive may still use

    def sleep(self, *, host: bool) -> None:
        """Give the memory back; see ``Engine.sleep``."""
        with self._deferral, Together(self._parts.ranks, "sleep") as together:
            manager = self._prepare(host=host)
            together.meet()  # with slices of parameters: what ranks have asked each other for ahead has come
            self._tiers = (Tier.DEVICE, Tier.HOST) if host else (Tier.DEVICE,)
            manager.rest(self._tiers)
            content = manager.tiers.content(self._tiers)
            size_bytes = sum(whole_pages(size) for _, _, _, size in _pieces(content))
            with contextlib.ExitStack() as undo:
                undo.callback(manager.go_on)
                self._place = self._room(size_bytes, host=host)
                undo.callback(self._forget)
                for at, buffer, first, size in _pieces(content):
                    self._deferral.check()
                    with self._on_host(buffer, first, size, write=False) as address:
                        self._place.put(at, address, size)
                together.end()
                undo.pop_all()
            manager.tiers.release(self._tiers)
            self._life.sleep()

    def _prepare(self, *, host: bool) -> Manager:
        """Let nothing be under way; returns the owner of the shards."""
        manager, parts = self._life.require_open(), self._parts
        if host and parts.activations.has_left():
            raise StateError(
                "sleep: activations of a forward are in host memory, which cannot be given back; run backward, or drop "
                "the loss, before"
            )
        parts.changes.adopt()
        manager.bound.refuse_changes()
        parts.book.adopt()
        manager.gradients.await_copies()
        manager.finish_updates()
        manager.tiers.refuse_leased(manager.units)
        if self._durable is not None:
            self._durable.finish()  # nobody could commit it while the engine sleeps, nor if it is closed then
        return manager

    def wake(self) -> None:
        """Take the memory again; see ``Engine.wake``."""
        with self._deferral, Together(self._parts.ranks, "wake") as together:
            self._take_again(together.end, self._deferral.check).prefetch()

    def wake_alone(self, left: str) -> None:
        """Do the same without other ranks, to close.

        Args:
            left: what is lost if it is closed asleep.

        Raises:
            BudgetError: somebody else has it. The engine is still asleep.
            swap.SwapError: an I/O error. The engine is still asleep.
        """
        try:
            self._take_again(lambda: None, lambda: None)
        except BudgetError as error:
            raise BudgetError(
                f"close: the engine is asleep still, for its memory is gone: {error}. Nothing is lost; give memory "
                f"back and close again, or pass restore=False to close without {left}"
            ) from error

    def _take_again(self, agree: Callable[[], object], pause: Callable[[], None]) -> Manager:
        """Have the content in its memory; asleep still, if it cannot be, or if `agree` or `pause` raises."""
        if not self._life.asleep:
            self._life.require_open()
            raise StateError("engine: expected to be asleep but it is awake; call engine.sleep() before engine.wake()")
        manager = self._life.manager
        assert self._place is not None and manager is not None
        manager.tiers.take_again(self._tiers)
        try:
            for at, buffer, first, size in _pieces(manager.tiers.content(self._tiers)):
                pause()
                with self._on_host(buffer, first, size, write=True) as address:
                    self._place.get(at, address, size)
            agree()
        except BaseException:
            manager.tiers.release(self._tiers)
            raise
        self._forget()
        self._life.wake()
        manager.go_on()
        return manager

    def close(self) -> None:
        """Give back what is kept. Idempotent."""
        self._forget()

    def _forget(self) -> None:
        place, self._place = self._place, None
        if place is not None:
            place.close()
        if is_memory_held():  # else all that was late has come, or never will
            leave(self._left)
        self._left = []

    def _room(self, size_bytes: int, *, host: bool) -> _Place:
        budgets = self._parts.budgets
        free_bytes = budgets[Tier.HOST].free_bytes
        if not host and size_bytes <= free_bytes:
            return _InMemory(budgets[Tier.HOST], size_bytes)
        if self._config.paths():
            return _OnDrive(self._config, budgets[Tier.NVME], size_bytes)
        where = "host=True expects a drive" if host else f"the cpu budget has {format_bytes(free_bytes)} free"
        raise BudgetError(
            f"sleep: what is in memory takes {format_bytes(size_bytes)} but {where}; name one with nvme_path"
            + ("" if host else ', or raise max_memory["cpu"]')
        )

    @contextlib.contextmanager
    def _on_host(self, buffer: Buffer, first: int, size: int, *, write: bool) -> Iterator[int]:
        """Yield where the host finds a piece of a buffer, or a copy of it."""
        place = self._parts.device.place
        if buffer.tier is Tier.HOST or self._parts.device.addressable:
            yield buffer.address + first
            return
        memory = mmap.mmap(-1, PIECE_BYTES)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        there = bytes_at(buffer.address + first, size, place)
        here = bytes_at(address, size, torch.device("cpu"))
        if not write:
            here.copy_(there)
        try:
            yield address
        except BaseException:
            self._left.append(memory)
            raise
        if write:
            there.copy_(here)


def _pieces(content: Sequence[Buffer]) -> Iterator[tuple[int, Buffer, int, int]]:
    """Yield position among all that is kept, buffer, and first byte and bytes of each piece of what is in memory."""
    at = 0
    for buffer in content:
        for first in range(0, buffer.size_bytes, PIECE_BYTES):
            size = min(PIECE_BYTES, buffer.size_bytes - first)
            yield at, buffer, first, size
            at += whole_pages(size)
