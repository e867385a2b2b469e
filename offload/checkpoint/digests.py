"""Digests of what one engine holds: short names of exact bits, the same wherever the bytes are.

Owns what is hashed of a parameter in each role, and in which order. Bytes come chunk by chunk through
:func:`offload.shards.stream.stream`, so homes, budgets and chunks are of no interest here. Changes nothing. Its user is
:meth:`offload.engine.Engine.digests`.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.checkpoint.dict_memory import DictMemory
from offload.checkpoint.of_ranks import share_slices
from offload.checkpoint.values import overlaps, read_master
from offload.distributed.together import Together
from offload.optim.recipe import StepCounts
from offload.optim.torch_class import Placed
from offload.planning.roles import Role
from offload.planning.units import Unit, Where
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk

DIGEST_BYTES = 8
MASTER_NUMEL = 1 << 18  # masters that are joined at once


def take_digests(
    manager: Manager, counts: StepCounts, factors: Mapping[Where, float], memory: DictMemory
) -> dict[str, dict[str, str]]:
    """Return per parameter and role the digest of its bits; see ``Engine.digests``. Several ranks come here together.

    Args:
        manager: owner of the shards.
        counts: updates so far.
        factors: per gradient that waits for the next step what it has been multiplied by.
        memory: of several ranks, for the bytes of a unit, of which each has its slice.

    Raises:
        StateError: content was lost by a failed step.
        RanksError: another rank has failed, is elsewhere, ended or not come.
        swap.SwapError: an I/O error.
    """
    ranks, where = manager.tiers.ranks, "digests"
    with Together(ranks, where) as together:
        manager.gradients.await_copies()
        hashes: dict[tuple[Where, str], Any] = {}
        if ranks.world == 1:

            def add(at: Where, role: str, _: int, address: int, size_bytes: int) -> None:
                known = hashes.setdefault((at, role), _new())
                known.update((ctypes.c_char * size_bytes).from_address(address))

            _read(manager, manager.units, factors, add)
        else:
            together.meet({"the gradients that wait": str(factors), "the updates": str(list(counts.counts.values()))})
            for unit in manager.units:
                with together.sending():
                    hashes |= _of_slices(manager, unit, factors, memory, where)
    for at, factor in factors.items():
        if factor != 1.0 and (at, "gradient") in hashes:
            hashes[at, "gradient"].update(struct.pack("<d", factor))
    return _by_name(manager, counts, hashes)


def _of_slices(
    manager: Manager, unit: Unit, factors: Mapping[Where, float], memory: DictMemory, where: str
) -> dict[tuple[Where, str], Any]:
    """Return what a unit's bytes make, of which each rank has its slice."""
    sizes = _sizes(manager, unit)
    parts: dict[Where, dict[str, torch.Tensor]] = {}
    wanted = {
        (unit.index, position): [role for role in sizes if role != "gradient" or (unit.index, position) in factors]
        for position, slot in enumerate(unit.slots)
        if slot.numel
    }
    total = sum(sizes[role](unit.slots[slot].numel) for (_, slot), roles in wanted.items() for role in roles)
    with memory.open(where, total) as made:
        for at, roles in wanted.items():
            slot = unit.slots[at[1]]
            parts[at] = {role: made.empty((sizes[role](slot.numel),), torch.uint8, slot.name) for role in roles}

        def put(at: Where, role: str, skip: int, address: int, size_bytes: int) -> None:
            ctypes.memmove(parts[at][role].data_ptr() + sizes[role](skip), address, size_bytes)

        _read(manager, [unit], factors, put)
        share_slices(manager, parts, made, where, sizes)
    hashes = {}
    for at, named in parts.items():
        for role, content in named.items():
            known = hashes[at, role] = _new()
            known.update(content.numpy().data)
    return hashes


def _sizes(manager: Manager, unit: Unit) -> dict[str, Callable[[int], int]]:
    """Return by role the bytes of the first elements of a parameter."""

    def times(size_bytes: int) -> Callable[[int], int]:
        return lambda numel: numel * size_bytes

    states = manager.tiers.plan.request.states
    sizes = {"parameter": times(unit.itemsize)}
    if unit.trainable:
        sizes["gradient"] = times(manager.gradients.dtype(unit).itemsize)
        if unit.dtype != "float32":
            sizes["master"] = times(4)
        sizes |= dict.fromkeys(states.names, times(states.kind.itemsize))
        if states.kind.units_bytes(1):
            sizes["scales"] = states.kind.units_bytes
    return sizes


def _read(
    manager: Manager,
    units: Sequence[Unit],
    factors: Mapping[Where, float],
    add: Callable[[Where, str, int, int, int], None],
) -> None:
    """Call `add` with parameter, role, first element in it, address and bytes of each piece that this rank has."""
    request, gradients = manager.tiers.plan.request, manager.gradients
    states = request.states
    scratch = torch.empty(MASTER_NUMEL, dtype=torch.float32, device="cpu")

    def visit(chunk: Chunk) -> None:
        manager.safe_point.check()
        unit = chunk.unit
        first, last = request.owned(unit, Role.GRAD)
        for position, slot, begin, end in overlaps(chunk):
            start, stop = max(begin, first), min(end, last)
            if start >= stop:  # another rank keeps them
                continue
            where, numel, skip = (unit.index, position), stop - start, start - slot.offset_numel
            add(where, "parameter", skip, chunk.at(Role.PARAM, start, unit.itemsize), numel * unit.itemsize)
            if where in factors:
                size = gradients.dtype(unit).itemsize
                add(where, "gradient", skip, chunk.at(Role.GRAD, start, size), numel * size)
            if not unit.trainable:
                continue
            if Role.MASTER in chunk.addresses:
                for at in range(start, stop, MASTER_NUMEL):
                    count = min(stop - at, MASTER_NUMEL)
                    read_master(chunk, at, count, scratch.data_ptr())
                    add(where, "master", at - slot.offset_numel, scratch.data_ptr(), count * 4)
            found, scales = chunk.states_at(start, states)
            for name, address in zip(states.names, found, strict=True):
                add(where, name, skip, address, numel * states.kind.itemsize)
            if scales:
                add(where, "scales", skip, scales, states.kind.units_bytes(numel))

    roles = frozenset({Role.PARAM}) | ALL_STATES | ({Role.GRAD} if factors else set())
    manager.stream(units, visit, reads=roles, keep_early=True, parts=True, slices=True)


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
        plain = value.detach().to("cpu").resolve_conj().resolve_neg().contiguous()
        known.update(f"{plain.dtype} {tuple(plain.shape)}".encode())
        size_bytes = plain.numel() * plain.element_size()
        if size_bytes:
            known.update((ctypes.c_char * size_bytes).from_address(plain.data_ptr()))
    else:
        known.update(repr(value).encode())
    return str(known.hexdigest())


def _new() -> Any:
    return hashlib.blake2b(digest_size=DIGEST_BYTES)
