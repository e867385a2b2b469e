"""How many bytes each tier may take: what the user says, or a share of what this machine has free.

Owns the defaults. Next: :mod:`offload.build` makes budgets of them.
"""

from __future__ import annotations

from collections.abc import Mapping

import psutil

from offload.memory import machine
from offload.memory.budget import Tier
from offload.memory.device import Device
from offload.sizes import Share

HOST_HEADROOM = 0.85  # of what is available, where the user names no host budget
DEVICE_HEADROOM = 0.90


def free_host_bytes() -> int:
    """Return the bytes of main memory that this process may still take, in the container where there is one."""
    available = int(psutil.virtual_memory().available)
    container = machine.cgroup_memory_free()
    return available if container is None else min(available, container)


def total_host_bytes() -> int:
    """Return the bytes of main memory that there are, in the container where there is one."""
    total = int(psutil.virtual_memory().total)
    container = machine.cgroup_memory_limit()
    return total if container is None else min(total, container)


def resolve_budgets(
    given: Mapping[str, int | Share], device: Device, nvme_free_bytes: int | None, *, ranks: int = 1
) -> dict[Tier, int]:
    """Turn given budgets into bytes per tier.

    Args:
        given: budgets by canonical name; shares are taken of what is free now, in the container where there is one.
        device: the compute device. Where the host can use its memory, device and host budgets are both main memory: a
            missing one gets half, or what the other one leaves of the default, if that is less; an eighth at least.
        nvme_free_bytes: free bytes at the NVMe paths, this process's part of them; None without paths.
        ranks: that share main memory, each with an accelerator of its own: the budgets are those of one.
    """
    available = free_host_bytes() // ranks
    if device.addressable:
        device_free = available
        both = int(available * HOST_HEADROOM)
        default = dict.fromkeys(("device", "cpu"), both // 2)
        for name, beside in (("device", "cpu"), ("cpu", "device")):
            if beside in given:
                left = both - _size_of(given[beside], available)
                default[name] = min(max(left, both // 8), both // 2)
    else:
        device_free = device.free_bytes()
        default = {"device": int(device_free * DEVICE_HEADROOM), "cpu": int(available * HOST_HEADROOM)}
    default["nvme"] = int((nvme_free_bytes or 0) * DEVICE_HEADROOM)
    free = {"device": device_free, "cpu": available, "nvme": nvme_free_bytes or 0}
    budgets: dict[Tier, int] = {}
    for tier in Tier:
        value = given.get(tier.value, default[tier.value])
        budgets[tier] = _size_of(value, free[tier.value])
    if nvme_free_bytes is None:
        budgets[Tier.NVME] = 0
    return budgets


def _size_of(value: int | Share, free_bytes: int) -> int:
    return int(value.fraction * free_bytes) if isinstance(value, Share) else value
