"""What compute runs on, as far as memory is concerned.

Owns the questions; each kind of device answers them in a file of its own. Nobody else asks what kind it is. Next:
:mod:`offload.memory.devices` chooses one.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import torch

from offload.errors import BudgetError
from offload.kernels.on_device import DeviceKernels
from offload.memory.arena import Arena
from offload.memory.transfer import Mover, MoverNeeds


class Event(Protocol):
    """A moment in the work that a device has been given."""

    def query(self) -> bool:
        """Tell whether that work is done."""

    def synchronize(self) -> None:
        """Wait until it is."""


class Device(Protocol):
    """What compute runs on. See the module's text.

    Attributes:
        place: torch's device, with its index as tensors have it.
        addressable: whether the host can read and write its memory, so that device and host share one.
        kernels: arithmetic on its memory, where the host cannot do it; None where there is none whose bits were
            compared with the CPU's.
    """

    place: torch.device
    addressable: bool
    kernels: DeviceKernels | None

    def name(self) -> str:
        """Return what its maker calls it."""

    def identity(self) -> str | None:
        """Return what tells it from all other devices of all machines; None where nobody knows, or all may share it."""

    def free_bytes(self) -> int:
        """Return the bytes of its memory that nobody has."""

    def total_bytes(self) -> int:
        """Return the bytes of its memory."""

    def trim(self) -> None:
        """Give the system what torch keeps of memory that nobody has."""

    def arena(self, size_bytes: int) -> Arena:
        """Take memory on the device."""

    def host_arena(self, size_bytes: int) -> Arena:
        """Take host memory from which it copies fastest."""

    def mover(self, needs: MoverNeeds) -> Mover:
        """Return what moves bytes between it, the host and NVMe."""

    def out_of_memory(
        self, error: BaseException, *, what: str, limit_bytes: int, held: Mapping[str, int]
    ) -> BudgetError | None:
        """Return what to raise instead of `error`, if that says that the device's memory is full.

        Args:
            error: of whatever was done.
            what: was done.
            limit_bytes: the device budget.
            held: bytes of it by the names of claims.
        """

    def begin_thread(self) -> None:
        """Let the thread that calls be this device's: it is one of the engine's own, and has just begun."""

    def event(self) -> Event:
        """Return the moment when all that it has been given so far is done."""

    def synchronize(self) -> None:
        """Wait until all that it has been given is done."""
