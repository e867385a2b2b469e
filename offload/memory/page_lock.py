"""Host memory that a device copies from and to by itself.

Owns page-locking, which is where back ends of torch differ: :func:`_register`. Next:
:mod:`offload.memory.accelerator`.
"""

from __future__ import annotations

import ctypes
import functools
import itertools
import logging
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch

from offload.memory.arena import Arena, HostArena
from offload.memory.budget import Tier
from offload.sizes import format_bytes

logger = logging.getLogger(__name__)

TOUCHED_BYTES = 64 << 20  # brought in by a thread at once; with less, nobody notices
PIECE_BYTES = 4 << 30  # locked at once: a call for all of a large arena takes minutes, and fails as a whole
_PORTABLE = 1  # cudaHostRegisterPortable: locked for every device


class LockedArena(HostArena):
    """Host memory that stays where it is, so that the device can copy from and to it by itself.

    Attributes:
        locked_bytes: page-locked part, from the start on: all of it, unless the system refuses.
    """

    def __init__(self, tier: Tier, size_bytes: int, place: torch.device) -> None:
        super().__init__(tier, size_bytes)
        self._device = place
        self._unlock: list[Callable[[], None]] = []
        self.locked_bytes = 0
        if size_bytes:
            self._lock(place)
        self.elastic = not self.locked_bytes

    def _lock(self, place: torch.device) -> None:
        """Page-lock as much as the system lets us."""
        module: Any = torch.get_device_module(place)
        while self.locked_bytes < self.size_bytes:
            address = self.base_address + self.locked_bytes
            piece_bytes = min(PIECE_BYTES, self.size_bytes - self.locked_bytes)
            _touch(address, piece_bytes)
            try:
                with module.device(place):  # a back end makes a context, and that on the device that is current
                    unregister = _register(module, address, piece_bytes, place.type)
            except RuntimeError as error:
                logger.warning(
                    "host arena: %s of %s could not be page-locked for %s (%s): copies of that part are several times "
                    "slower, and who starts one waits for it; a lower max_memory['cpu'] may fit what the system lets a "
                    "process lock (ulimit -l)",
                    format_bytes(self.size_bytes - self.locked_bytes),
                    format_bytes(self.size_bytes),
                    place,
                    error,
                )
                return
            self._unlock.append(functools.partial(_unlock, module, place, unregister, address))
            self.locked_bytes += piece_bytes

    def spans(self, address: int, size_bytes: int) -> list[tuple[int, int]]:
        """Return ranges of `size_bytes` at `address`: each was locked by one call, or not: CUDA copies no others."""
        begin = address - self.base_address
        ends = [*range(PIECE_BYTES, self.locked_bytes, PIECE_BYTES), self.locked_bytes]
        cuts = [0, *(end - begin for end in ends if 0 < end - begin < size_bytes), size_bytes]
        return list(itertools.pairwise(cuts))

    def release(self) -> None:
        """Unlock it, and return all pages."""
        self._unlock_all()
        super().release()

    def take_again(self, make: Callable[[int], Arena]) -> int:
        """Lock it again."""
        if self.size_bytes:
            self._lock(self._device)
        return 0

    def close(self, busy: Sequence[Callable[[], bool]] = (), *, written: bool = False) -> None:
        """Unlock and unmap it, as :meth:`Arena.close` says. Idempotent."""
        self._unlock_all()
        super().close(busy, written=written)

    def _unlock_all(self) -> None:
        while self._unlock:
            self._unlock.pop()()
        self.locked_bytes = 0


def _touch(address: int, size_bytes: int) -> None:
    """Bring pages in, in several threads: locking them would do that, too, but in one."""
    starts = range(0, size_bytes - TOUCHED_BYTES + 1, TOUCHED_BYTES) if size_bytes > TOUCHED_BYTES else ()
    ends = [*starts[1:], size_bytes]
    with ThreadPoolExecutor() as pool:
        for begin, end in zip(starts, ends, strict=False):
            pool.submit(ctypes.memset, address + begin, 0, end - begin)


def refusal(place: torch.device, size_bytes: int) -> str | None:
    """Page-lock some memory and let it go again; returns why that is refused, None where it is not."""
    module: Any = torch.get_device_module(place)
    arena = HostArena(Tier.HOST, size_bytes)
    try:
        with module.device(place):
            _register(module, arena.base_address, size_bytes, place.type)(arena.base_address)
    except RuntimeError as error:
        return str(error)
    finally:
        arena.close()
    return None


def _unlock(module: Any, place: torch.device, unregister: Callable[[int], object], address: int) -> None:
    with module.device(place):
        unregister(address)


def _register(module: Any, address: int, size_bytes: int, kind: str) -> Callable[[int], object]:
    """Page-lock host memory; returns the function that undoes it.

    CUDA and ROCm have ``cudaHostRegister``. Of any other back end, torch's device module is asked for two functions:
    ``host_register(address, size_bytes)``, which raises RuntimeError if it cannot, and ``host_unregister(address)``.

    Raises:
        RuntimeError: it is not possible.
    """
    unregister: Callable[[int], object]
    if kind == "cuda":
        runtime = module.cudart()
        status = int(runtime.cudaHostRegister(address, size_bytes, _PORTABLE))
        if status:
            _forget_error()
            raise RuntimeError(f"error {status} of cudaHostRegister")
        unregister = runtime.cudaHostUnregister
    elif hasattr(module, "host_register"):
        module.host_register(address, size_bytes)
        unregister = module.host_unregister
    else:
        raise RuntimeError("not with this back end")
    return unregister


def _forget_error() -> None:
    """Take back CUDA's last error, which torch's next launch of a kernel would report as its own."""
    libraries: Any = ctypes.CDLL(None)
    for name in ("cudaGetLastError", "hipGetLastError"):
        if hasattr(libraries, name):
            getattr(libraries, name)()
