"""What torch holds of an accelerator's memory: as measured, and in words where there is no more.

Owns the reading of the allocator's statistics, and the error of a device that is full. Knows no budgets but by what it
is told. Next: :mod:`offload.activations.ledger` compares, :mod:`offload.training` tells.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from offload.errors import BudgetError
from offload.sizes import format_bytes

WORTH_TELLING_SHARE = 1 / 8  # of what torch holds: unused, so that the device's memory is in pieces


class DeviceFullError(BudgetError, torch.OutOfMemoryError):
    """The device has less memory than its budget: torch's own error, with what holds the memory and a remedy."""


class DeviceMeter:
    """Memory that torch's allocator has handed out on one device. See :class:`offload.activations.ledger.Meter`."""

    notes_peaks = True

    def __init__(self, place: torch.device) -> None:
        """Read that of `place`.

        Raises:
            AttributeError: torch's back end does not count.
        """
        module: Any = torch.get_device_module(place)
        self._now, self._most = module.memory_allocated, module.max_memory_allocated
        self._forget = getattr(module, "reset_peak_memory_stats", None)
        self._place = place

    def now_bytes(self) -> int:
        """Return the bytes that are handed out now."""
        return int(self._now(self._place))

    def high_water_bytes(self) -> int:
        """Return the most that has been handed out at once, since somebody has reset torch's peak."""
        return int(self._most(self._place))

    def trim(self) -> None:
        """Nothing to give back: what is not handed out does not count."""

    def forget_peak(self) -> None:
        """Have torch count its peak anew, if the back end can."""
        if self._forget is not None:
            self._forget(self._place)

    def close(self) -> None:
        """Nothing to close."""


def open_device_meter(place: torch.device) -> DeviceMeter | None:
    """Return a meter, None where torch's back end does not count."""
    try:
        meter = DeviceMeter(place)
        meter.high_water_bytes()
    except (AttributeError, RuntimeError):
        return None
    return meter


def unused_bytes(place: torch.device) -> int:
    """Return the bytes of blocks in torch's cache of which nobody has any part; 0 where its back end does not count.

    Torch gives them back as soon as it finds no other memory.
    """
    try:
        stats: Mapping[str, int] = torch.get_device_module(place).memory_stats(place)
        had, used, split = (stats[f"{kind}_bytes.all.current"] for kind in ("reserved", "active", "inactive_split"))
    except (AttributeError, KeyError, RuntimeError):
        return 0
    return max(had - used - split, 0)


def device_full(
    error: BaseException, place: torch.device, *, what: str, limit_bytes: int, held: Mapping[str, int]
) -> DeviceFullError:
    """Return the error that tells what holds a device's memory.

    Args:
        error: torch's.
        place: of the device.
        what: wanted more.
        limit_bytes: the device budget.
        held: bytes of it by the names of claims.
    """
    module: Any = torch.get_device_module(place)

    def read(name: str) -> int | None:
        try:
            return int(getattr(module, name)(place))
        except (AttributeError, RuntimeError):  # no such count, or an allocator of the user's that keeps none
            return None

    free, total = map(int, module.mem_get_info(place))
    allocated, reserved = read("memory_allocated"), read("memory_reserved")
    claims = ", ".join(f"{name} {format_bytes(size)}" for name, size in held.items() if size)
    facts = [
        f"the device budget is {format_bytes(limit_bytes)} ({f'held: {claims}' if claims else 'nothing held'})",
        f"{format_bytes(free)} of {format_bytes(total)} are free by the driver",
    ]
    pieces = ""
    if allocated is not None:
        cached = 0 if reserved is None else reserved - allocated
        unused = f" and keeps {format_bytes(cached)} unused" if reserved is not None else ""
        facts.append(f"torch has handed out {format_bytes(allocated)}{unused}")
        if cached > allocated * WORTH_TELLING_SHARE:
            pieces = ", set PYTORCH_ALLOC_CONF=expandable_segments:True (before torch 2.9: PYTORCH_CUDA_ALLOC_CONF)"
    return DeviceFullError(
        f'device memory: {place} has no room for {what}: {"; ".join(facts)}. Lower max_memory["device"] to what is '
        f"free, drop other tensors on the device{pieces}, use gradient checkpointing, or take smaller micro-batches. "
        f"Torch says: {error}"
    )
