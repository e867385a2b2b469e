"""What a step moves: bytes per link, and the seconds that a unit saves which the device updates.

Owns the formulas. Pure Python over plain values. Next: :mod:`offload.planning.planner` chooses by them.
"""

from __future__ import annotations

from collections.abc import Sequence

from offload.memory.budget import Tier
from offload.planning.asked import Homes, Request
from offload.planning.roles import STATE_ROLES, Role
from offload.planning.units import Unit
from offload.stats import BETWEEN_NODES

BLOCK_NUMEL, BLOCK_SUM_BYTES = 4096, 8  # whose squares are one sum, which goes to all ranks
SUM_BYTES = 4  # of an element of a sum of gradients
LINK_BYTES_S, HOST_BYTES_S = 25e9, 60e9  # of any machine: what counts is which unit gains most by staying on a device


def saved_s(request: Request, unit: Unit) -> float:
    """Return about how many seconds of a step a unit saves that is updated on the device: of the link and the CPU."""
    own = request.owned_numel(unit, Role.MASTER)
    grad = request.role_bytes(unit, Role.GRAD)
    updated = sum(request.chunk_bytes(unit, role, own) for role in (Role.PARAM, *STATE_ROLES)) + grad
    return (2 * unit.param_bytes + grad) / LINK_BYTES_S + updated / HOST_BYTES_S


def step_bytes(request: Request, homes: Sequence[Homes], chunk_numel: int, working_bytes: int = 0) -> dict[str, int]:
    """Predict bytes per link for one optimizer step with one micro-batch, working copies never surviving.

    Of several ranks, ``collectives`` is what this one sends to others: their slices of its gradients, what it has
    measured of its slices for the norm, and its slices of parameters. New ones are sent once. Where ranks have slices
    only, all are sent in the forward, and in the backward again, but for what survives in `working_bytes`. This stays
    in a node. ``between_nodes`` is what goes to the owners of the same slice: parts of a node's sum, and of the total.
    """
    read = write = h2d = adam = d2h = sent = between = 0
    passes = 2 if any(unit.trainable for unit in request.units) else 1  # backward goes through frozen units, too
    for unit, home in zip(request.units, homes, strict=True):
        own = request.owned_numel(unit, Role.MASTER)
        states = request.kept_bytes(unit, STATE_ROLES)
        grad = request.role_bytes(unit, Role.GRAD)
        kept = request.role_bytes(unit, Role.PARAM)
        in_place = request.device_is_host and not request.slices_parameters
        if home.param is Tier.NVME:
            read += passes * kept
            if unit.trainable:
                write += kept
                read += 0 if in_place else kept  # else what forward fetches is updated
        stays = home.param is Tier.DEVICE and not request.slices_parameters
        if not stays and not (request.device_is_host and home.param is Tier.NVME):
            h2d += passes * (kept if request.device_is_host else unit.param_bytes)
        if home.states is Tier.NVME:
            record = request.record_bytes(unit, STATE_ROLES, chunk_numel)
            read += record
            write += record
        if home.grad is Tier.NVME:
            read += grad
            write += grad
        if unit.trainable:
            sums = own // BLOCK_NUMEL * BLOCK_SUM_BYTES
            sent += (request.slices - 1) * (own * unit.itemsize + sums)
            between += 2 * own * SUM_BYTES * (request.nodes - 1) // request.nodes
        if unit.trainable and not request.on_device(home):
            adam += request.chunk_bytes(unit, Role.PARAM, own) + grad + states
            d2h += unit.param_bytes if not request.device_is_host else 0
            if home.param is Tier.DEVICE and not request.device_is_host:  # down to be updated, and up again
                mine = own * unit.itemsize
                h2d, d2h = h2d + mine, d2h + mine
                if request.world_size > 1:  # what this rank has made goes to the others, and all of it comes back
                    h2d, d2h = h2d + unit.param_bytes, d2h + mine
    links = {"nvme_read": read, "nvme_write": write, "h2d": h2d, "d2h": d2h, "cpu_adam": adam}
    if request.world_size == 1:
        return links
    gathered = _gathered_bytes(request, working_bytes) * (request.slices - 1) // request.slices
    links |= {"collectives": sent + gathered}
    return links | ({BETWEEN_NODES: between} if request.nodes > 1 else {})


def _gathered_bytes(request: Request, working_bytes: int) -> int:
    """Return the bytes of parameters that become whole in a step."""
    if not request.slices_parameters:
        return sum(unit.param_bytes for unit in request.units if unit.trainable)
    gathered, left = 2 * sum(unit.param_bytes for unit in request.units), working_bytes
    for unit in reversed(request.units):  # the last ones of the forward are still there
        left -= unit.param_bytes
        gathered -= unit.param_bytes if left >= 0 else 0
    return gathered
