"""Digests of what one engine holds: short names of exact bits, the same wherever the bytes are.

Owns what is hashed of a parameter in each role, and in which order. Bytes come chunk by chunk through
:func:`offload.shards.stream.stream`, so homes, budgets and chunks are of no interest here. Changes nothing. Its user is
:meth:`offload.engine.Engine.digests`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Mapping
from typing import Any

import torch

from offload.checkpoint.values import overlaps, read_master
from offload.optim.recipe import StepCounts
from offload.optim.torch_class import Placed
from offload.planning.roles import Role
from offload.planning.units import Where
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk

DIGEST_BYTES = 8
MASTER_NUMEL = 1 << 18  # masters that are joined at once


def take_digests(manager: Manager, counts: StepCounts, factors: Mapping[Where, float]) -> dict[str, dict[str, str]]:
    """Return per parameter and role the digest of its bits; see ``Engine.digests``.

    Args:
        manager: owner of the shards.
        counts: updates so far.
        factors: per gradient that waits for the next step what it has been multiplied by.

    Raises:
        StateError: content was lost by a failed step.
        swap.SwapError: an I/O error.
    """
    manager.gradients.await_copies()
    hashes: dict[tuple[Where, str], Any] = {}
    states = manager.tiers.plan.request.states
    scratch = torch.empty(MASTER_NUMEL, dtype=torch.float32, device="cpu")

    def add(where: Where, role: str, address: int, size_bytes: int) -> None:
        known = hashes.get((where, role))
        if known is None:
            known = hashes[where, role] = _new()
        if size_bytes:
            known.update((ctypes.c_char * size_bytes).from_address(address))

    def add_masters(where: Where, chunk: Chunk, start: int, stop: int) -> None:
        for begin in range(start, stop, MASTER_NUMEL):
            numel = min(stop - begin, MASTER_NUMEL)
            read_master(chunk, begin, numel, scratch.data_ptr())
            add(where, "master", scratch.data_ptr(), numel * 4)

    def visit(chunk: Chunk) -> None:
        unit = chunk.unit
        for position, _, start, stop in overlaps(chunk):
            where, numel = (unit.index, position), stop - start
            add(where, "parameter", chunk.at(Role.PARAM, start, unit.itemsize), numel * unit.itemsize)
            if where in factors:
                size = manager.gradients.dtype(unit).itemsize
                add(where, "gradient", chunk.at(Role.GRAD, start, size), numel * size)
            if not unit.trainable:
                continue
            if Role.MASTER in chunk.addresses:
                add_masters(where, chunk, start, stop)
            found, scales = chunk.states_at(start, states)
            for name, address in zip(states.names, found, strict=True):
                add(where, name, address, numel * states.kind.itemsize)
            if scales:
                add(where, "scales", scales, states.kind.units_bytes(numel))

    roles = frozenset({Role.PARAM}) | ALL_STATES
    manager.stream(manager.units, visit, reads=roles | {Role.GRAD} if factors else roles, keep_early=True)
    for where, factor in factors.items():
        if factor != 1.0 and (where, "gradient") in hashes:
            hashes[where, "gradient"].update(struct.pack("<d", factor))
    return _by_name(manager, counts, hashes)


def _by_name(
    manager: Manager, counts: StepCounts, hashes: Mapping[tuple[Where, str], Any]
) -> dict[str, dict[str, str]]:
    names = {(unit.index, position): slot.name for unit in manager.units for position, slot in enumerate(unit.slots)}
    result: dict[str, dict[str, str]] = {name: {} for name in names.values()}
    for (where, role), known in hashes.items():
        result[names[where]][role] = known.hexdigest()
    if counts.records is not None:
        for where, record in counts.records.items():
            kept = {name: value for name, value in record.items() if value is not Placed.MARK}
            result[names[where]].update({name: _of_value(value) for name, value in kept.items()})
    else:
        for index, updates in counts.counts.items():
            for position, count in enumerate(updates):
                result[names[index, position]]["step"] = _of_value(count)
    return result


def _of_value(value: Any) -> str:
    """Return the digest of what is remembered beside the tiers: a tensor's bytes, of others what they print."""
    known = _new()
    if isinstance(value, torch.Tensor):
        plain = value.detach().to("cpu").contiguous()
        known.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        size_bytes = plain.numel() * plain.element_size()
        if size_bytes:
            known.update((ctypes.c_char * size_bytes).from_address(plain.data_ptr()))
    else:
        known.update(repr(value).encode())
    return str(known.hexdigest())


def _new() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
