"""What a step moves: bytes per link, and the seconds that a unit saves which the device updates.

Owns the formulas. Pure Python over plain values. Next: :mod:`offload.planning.planner` chooses by them.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.memory.budget import Tier
from offload.planning.plan import Homes, Request
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit

LINK_BYTES_S, HOST_BYTES_S = 25e9, 60e9  # of any machine: what counts is which unit gains most by staying on a device


def saved_s(request: Request, unit: Unit) -> float:
    """Return about how many seconds of a step a unit saves that is updated on the device: of the link and the CPU."""
    own = request.owned_numel(unit, Role.MASTER)
    grad = request.role_bytes(unit, Role.GRAD)
    updated = sum(request.chunk_bytes(unit, role, own) for role in (Role.PARAM, *STATE_ROLES)) + grad
    return (2 * unit.param_bytes + grad) / LINK_BYTES_S + updated / HOST_BYTES_S


def step_bytes(request: Request, homes: Sequence[Homes], chunk_numel: int) -> dict[str, int]:
    """Predict bytes per link for one optimizer step with one micro-batch, working copies never surviving."""
    read = write = h2d = adam = d2h = 0
    for unit, home in zip(request.units, homes, strict=True):
        own = request.owned_numel(unit, Role.MASTER)
        states = sum(request.chunk_bytes(unit, role, own) for role in STATE_ROLES)
        grad = request.role_bytes(unit, Role.GRAD)
        passes = 2 if unit.trainable else 1
        if home.param is Tier.NVME:
            read += passes * unit.param_bytes
            if unit.trainable:
                write += unit.param_bytes
                read += 0 if request.device_is_host else unit.param_bytes  # else what forward fetches is updated
        if home.param is not Tier.DEVICE and not (request.device_is_host and home.param is Tier.NVME):
            h2d += passes * unit.param_bytes
        if home.states is Tier.NVME:
            record = request.record_bytes(unit, STATE_ROLES, chunk_numel)
            read += record
            write += record
        if home.grad is Tier.NVME:
            read += grad
            write += grad
        if unit.trainable and not request.on_device(home):
            adam += request.chunk_bytes(unit, Role.PARAM, own) + grad + states
            d2h += unit.param_bytes if not request.device_is_host else 0
    return {"nvme_read": read, "nvme_write": write, "h2d": h2d, "d2h": d2h, "cpu_adam": adam}
