"""Reads and writes real tensors through the tiers: state dicts, loading, restoring.

Owns the translation between named tensors and shards. Everything goes through :func:`offload.shards.stream.stream`, so
that a parameter's home is of no interest here. Tensors come out on the CPU, contiguous.
"""

from __future__ import annotations

import ctypes
import hashlib
import itertools
import math
import numbers
from collections.abc import Container, Iterator, Mapping
from typing import Any, NamedTuple

import torch

from offload.checkpoint.dict_memory import ORDINARY, Memory
from offload.checkpoint.of_ranks import found_by_any, share_slices
from offload.checkpoint.sources import PIECE_NUMEL, Source, elements, on_cpu
from offload.classes import is_a, package_of
from offload.errors import PARTS, ConfigError, StateError
from offload.kernels import cpu_adam
from offload.memory.arena import view_at
from offload.module.refusals import unreadable
from offload.optim.recipe import StepCounts
from offload.optim.rules import STATE_SEED
from offload.optim.torch_class import Placed, Records, recorded
from offload.planning.roles import Role, States
from offload.planning.units import Slot, Unit, Where
from offload.shards.manager import Manager
from offload.shards.shard import State
from offload.shards.stream import ALL_STATES, Chunk
from offload.torch_private import storage_at

MOST_UPDATES = 1 << 53  # which a float counts exactly


def gather_parameters(
    manager: Manager, wanted: set[Where] | None = None, memory: Memory = ORDINARY, *, pauses: bool = False
) -> dict[Where, torch.Tensor]:
    """Return parameters as tensors of their shape and stored dtype.

    Args:
        manager: owner of the shards.
        wanted: which ones; None for all.
        memory: of the tensors.
        pauses: Ctrl-C may end it.
    """
    result: dict[Where, torch.Tensor] = {}
    units = _units_of(manager, wanted)
    for unit in units:
        dtype = getattr(torch, unit.dtype)
        for index, slot in enumerate(unit.slots):
            if wanted is None or (unit.index, index) in wanted:
                result[unit.index, index] = memory.empty(slot.shape, dtype, slot.name)

    def visit(chunk: Chunk) -> None:
        if pauses:
            manager.safe_point.check()
        size = chunk.unit.itemsize
        for index, slot, start, stop in overlaps(chunk):
            tensor = result.get((chunk.unit.index, index))
            if tensor is not None:
                target = tensor.data_ptr() + (start - slot.offset_numel) * size
                ctypes.memmove(target, chunk.at(Role.PARAM, start, size), (stop - start) * size)
                memory.touch([tensor], (stop - start) * size)

    manager.stream(units, visit, reads=frozenset({Role.PARAM}))
    return result


def scatter_parameters(
    manager: Manager, values: Mapping[Where, torch.Tensor | Source], *, keep_masters: bool = True
) -> None:
    """Write parameters home, and their masters: a master is the given value in fp32, exactly.

    Args:
        manager: owner of the shards.
        values: new values, of any floating dtype for floating parameters; moments stay as they are. Sources are read
            piece by piece.
        keep_masters: 16-bit values that equal the present parameter leave its fp32 master alone. False where the
            present one may have been changed by others.

    Raises:
        ConfigError: something is not a tensor that can be copied, or of another shape.
        StateError: one is in use. Nothing was written in either case.
    """
    units = _units_of(manager, set(values))
    manager.tiers.refuse_leased(units)
    sources: dict[Where, torch.Tensor | Source] = {}
    for (index, position), value in values.items():
        unit = manager.units[index]
        slot = unit.slots[position]
        stored = getattr(torch, unit.dtype)
        refuse_unreadable(value, slot.name, "a tensor", into=stored)
        if tuple(value.shape) != slot.shape:
            raise ConfigError(f"{slot.name}: expected shape {slot.shape} but got {tuple(value.shape)}")
        wide = unit.trainable and stored in (torch.bfloat16, torch.float16) and value.dtype != stored
        sources[index, position] = on_cpu(value, torch.float32 if wide else stored)

    manager.finish_updates()  # a first one makes masters
    _tell_ranks(manager, sources)

    def visit(chunk: Chunk) -> None:
        for index, slot, start, stop in overlaps(chunk, at_most=PIECE_NUMEL):
            source = sources.get((chunk.unit.index, index))
            if source is not None:
                part = elements(source, start - slot.offset_numel, stop - slot.offset_numel)
                _write_parameter(chunk, start, stop - start, part.data_ptr(), part.dtype, keep_masters=keep)

    for unit in units:
        given = [sources.get((unit.index, index)) for index in range(len(unit.slots))]
        whole = all(source is not None for source in given)
        wide = any(source is not None and source.dtype.itemsize > unit.itemsize for source in given)
        fresh = not _has_masters(manager, unit)
        reads: frozenset[Role] = frozenset() if whole else frozenset({Role.PARAM})
        writes = frozenset({Role.PARAM})
        if unit.trainable and unit.dtype != "float32" and (wide or not fresh):
            reads, writes = reads | ALL_STATES, writes | ALL_STATES
            if manager_has_parameter(manager, unit):
                reads |= {Role.PARAM}
        keep = keep_masters and not fresh
        manager.stream([unit], visit, reads=reads, writes=writes, parts=True)


def _tell_ranks(manager: Manager, sources: Mapping[Where, torch.Tensor | Source]) -> None:
    """Let the next step find out whether all ranks have written the same."""
    shared = manager.tiers.shared
    if shared is not None and shared.compares_writes:
        for (index, position), source in sources.items():
            slot = manager.units[index].slots[position]
            ends = range(0, slot.numel, PIECE_NUMEL)
            shared.note_written(slot.name, (elements(source, b, min(b + PIECE_NUMEL, slot.numel)) for b in ends))


def digest(value: torch.Tensor | Source) -> str:
    """Return a digest of the bits of a tensor, which is read piece by piece."""
    known = hashlib.blake2b(str(value.dtype).encode(), digest_size=16)
    source, numel = on_cpu(value, value.dtype), math.prod(value.shape)
    for begin in range(0, numel, PIECE_NUMEL):
        piece = elements(source, begin, min(begin + PIECE_NUMEL, numel))
        known.update(piece.contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return known.hexdigest()


def refuse_unreadable(value: Any, subject: str, expected: str, *, into: torch.dtype = torch.float32) -> None:
    """Check that a value is a tensor whose elements can be copied to `into`.

    Raises:
        ConfigError: it is not.
    """
    if isinstance(value, Source):
        if not value.dtype.is_complex or into.is_complex:
            return
        got = f"one of {value.dtype}; load real values"
    elif not isinstance(value, torch.Tensor):
        got = f"a value of type {type(value).__name__}; load what state_dict() returned"
    elif (kind := unreadable(value)) is not None:
        way = "convert it to an ordinary dense tensor first"
        if is_a(value, "torch", "DTensor"):
            way = "load its full_tensor()"
        elif package_of(type(value)) == "torchao":
            way = "load its dequantize()"
        got = f"{kind}; {way}"
    elif value.is_meta:
        got = "one on the meta device, which has no content; load it to the CPU first"
    elif value.is_complex() and not into.is_complex:
        got = f"one of {value.dtype}; load real values"
    else:
        return
    raise ConfigError(f"{subject}: expected {expected} but got {got}")


def manager_has_parameter(manager: Manager, unit: Unit) -> bool:
    """Tell whether the unit's parameters have content yet."""
    shard = manager.copies.get(unit.index, Role.PARAM)
    return shard is not None and shard.state is not State.EMPTY


def _write_parameter(
    chunk: Chunk, start: int, numel: int, source: int, dtype: torch.dtype, *, keep_masters: bool
) -> None:
    """Write elements and, where it is open, their master (with `keep_masters`, of elements that change)."""
    unit = chunk.unit
    size = unit.itemsize
    target = chunk.at(Role.PARAM, start, size)
    wide = dtype.itemsize > size
    if not wide and Role.MASTER in chunk.addresses:
        _set_masters(chunk, start, numel, source, all_of_them=not keep_masters)
    if not wide:
        ctypes.memmove(target, source, numel * size)
    elif unit.dtype == "float16":
        cpu_adam.convert(source, cpu_adam.Dtype.FLOAT32, target, cpu_adam.Dtype.FLOAT16, numel)
    if Role.MASTER not in chunk.addresses:
        if wide and unit.dtype == "bfloat16":
            cpu_adam.convert(source, cpu_adam.Dtype.FLOAT32, target, cpu_adam.Dtype.BFLOAT16, numel)
        return
    if wide and unit.dtype == "bfloat16":
        cpu_adam.split_master(source, target, chunk.at(Role.MASTER, start, 2), numel)
    elif wide:
        ctypes.memmove(chunk.at(Role.MASTER, start, 4), source, numel * 4)


def _set_masters(chunk: Chunk, start: int, numel: int, source: int, *, all_of_them: bool) -> None:
    """Let the masters of 16-bit parameters (those that change, or all) be their new values."""
    cpu = torch.device("cpu")
    new = view_at(storage_at(source, numel * 2, cpu), torch.int16, 0, (numel,))
    old = view_at(storage_at(chunk.at(Role.PARAM, start, 2), numel * 2, cpu), torch.int16, 0, (numel,))
    changed = torch.ones_like(new, dtype=torch.bool) if all_of_them else new != old
    if chunk.unit.dtype == "bfloat16":
        remainder = storage_at(chunk.at(Role.MASTER, start, 2), numel * 2, cpu)
        view_at(remainder, torch.int16, 0, (numel,))[changed] = 0
    else:
        master = storage_at(chunk.at(Role.MASTER, start, 4), numel * 4, cpu)
        view_at(master, torch.float32, 0, (numel,))[changed] = new.view(torch.float16)[changed].float()


def gather_states(
    manager: Manager,
    counts: StepCounts,
    memory: Memory = ORDINARY,
    *,
    wanted: Container[Where] | None = None,
    where: str | None = None,
    pauses: bool = False,
) -> dict[Where, dict[str, Any]]:
    """Return per parameter ``step`` (0-dim fp32) and the optimizer's states by name (fp32, parameter's shape).

    Compressed states are converted, exactly: :func:`scatter_states` stores the same bits again. 16-bit parameters have
    a ``master``, too; fp32 ones are their own, and a second copy could become stale. Parameters that have never been
    updated are left out, as in torch; so are those that are not `wanted`.

    Several ranks ask together, for the same: `where` is what for. If it `pauses`, Ctrl-C may end it.

    Raises:
        StateError: this is one of several ranks, which asks alone.
        RanksError: another rank has failed, ended or not come.
    """
    _refuse_alone(manager, where)
    manager.finish_updates()  # they count, too
    states = manager.tiers.plan.request.states
    result = {where: entry for where, entry in _remembered(counts, states).items() if wanted is None or where in wanted}
    moved: dict[Where, dict[str, torch.Tensor]] = {}
    for (index, position), entry in result.items():
        unit = manager.units[index]
        names = [name for name, value in entry.items() if value is Placed.MARK]
        names += ["master"] * (unit.dtype != "float32")
        slot = unit.slots[position]
        moved[index, position] = {
            name: memory.empty(slot.shape, torch.float32, f"{name} of {slot.name}") for name in names
        }
        entry.update(moved[index, position])
    units = _units_of(manager, set(result))

    def visit(chunk: Chunk) -> None:
        if pauses:
            manager.safe_point.check()
        for index, slot, start, stop in overlaps(chunk):
            tensors = moved.get((chunk.unit.index, index))
            if tensors is None:
                continue
            skip = (start - slot.offset_numel) * 4
            addresses = {name: tensor.data_ptr() + skip for name, tensor in tensors.items()}
            _move_states(chunk, slot, start, stop, states, addresses, save_at_step=None)
            if "master" in addresses:
                read_master(chunk, start, stop - start, addresses["master"])
            memory.touch(tensors.values(), (stop - start) * 4 * len(tensors))

    manager.stream(units, visit, reads=ALL_STATES | {Role.PARAM}, parts=True, slices=True)
    share_slices(manager, moved, memory, where or "")
    return result


def _refuse_alone(manager: Manager, where: str | None) -> None:
    if manager.tiers.ranks.world > 1 and where is None:
        raise StateError(PARTS)


def gather_masters(
    manager: Manager,
    updated: Container[Where],
    memory: Memory = ORDINARY,
    *,
    wanted: Container[Where] | None = None,
    where: str | None = None,
) -> dict[Where, torch.Tensor | None]:
    """Return the fp32 masters of 16-bit parameters that are not among `updated`; None where it is the parameter itself.

    With `wanted`, those of no others. Several ranks ask together, as :func:`gather_states` says.

    Which of the two it is depends on the values only, not on whether the shards have been made yet.
    """
    _refuse_alone(manager, where)
    manager.finish_updates()
    result: dict[Where, torch.Tensor | None] = {}
    found: dict[Where, torch.Tensor] = {}
    for unit in manager.units:
        if not unit.trainable or unit.dtype == "float32":
            continue
        for position, slot in enumerate(unit.slots):
            at = unit.index, position
            if at in updated or not (wanted is None or at in wanted):
                continue
            result[at] = None
            if _has_masters(manager, unit):
                found[at] = memory.empty(slot.shape, torch.float32, f"master of {slot.name}")
    differ: set[Where] = set()

    def visit(chunk: Chunk) -> None:
        manager.safe_point.check()
        for index, slot, start, stop in overlaps(chunk):
            at = chunk.unit.index, index
            if at not in found:
                continue
            part = found[at].view(-1)[start - slot.offset_numel : stop - slot.offset_numel]
            read_master(chunk, start, stop - start, part.data_ptr())
            address = chunk.at(Role.PARAM, start, 2)
            stored = storage_at(address, part.numel() * 2, torch.device("cpu"))
            values = view_at(stored, getattr(torch, chunk.unit.dtype), 0, (part.numel(),)).float()
            if not torch.allclose(part, values, rtol=0.0, atol=0.0, equal_nan=True):
                differ.add(at)
            memory.touch([found[at]], part.nbytes)

    manager.stream(_units_of(manager, set(found)), visit, reads=ALL_STATES | {Role.PARAM}, parts=True, slices=True)
    flags = found_by_any(manager, [at in differ for at in found], where or "")
    kept = {at: tensor for (at, tensor), flag in zip(found.items(), flags, strict=True) if flag}
    share_slices(manager, {at: {"master": tensor} for at, tensor in kept.items()}, memory, where or "")
    return result | kept


def states_bytes(manager: Manager, counts: StepCounts) -> int:
    """Return the bytes that :func:`gather_states` and :func:`gather_masters` will take, at most."""
    found = _remembered(counts, manager.tiers.plan.request.states)
    size_bytes = 0
    for unit in manager.units:
        if unit.trainable:
            for position, slot in enumerate(unit.slots):
                names = [value for value in found.get((unit.index, position), {}).values() if value is Placed.MARK]
                size_bytes += 4 * slot.numel * (len(names) + (unit.dtype != "float32"))
    return size_bytes


def _has_masters(manager: Manager, unit: Unit) -> bool:
    """Tell whether the unit has masters that are not its parameters by definition."""
    shard = manager.copies.get(unit.index, Role.MASTER)
    return shard is not None and shard.state is not State.EMPTY


def _remembered(counts: StepCounts, states: States) -> dict[Where, dict[str, Any]]:
    """Return the states of parameters that have been updated; those that are placed as a mark."""
    if counts.records is not None:
        return dict(counts.records.items())
    return {
        (index, position): {
            "step": torch.tensor(float(count), dtype=torch.float32, device="cpu"),
            **dict.fromkeys(states.names, Placed.MARK),
        }
        for index, updates in counts.counts.items()
        for position, count in enumerate(updates)
        if count
    }


def read_master(chunk: Chunk, start: int, numel: int, target: int) -> None:
    """Copy the fp32 master of elements from `start` on to `target`."""
    unit = chunk.unit
    param = chunk.at(Role.PARAM, start, unit.itemsize)
    if unit.dtype == "bfloat16":
        cpu_adam.join_master(param, chunk.at(Role.MASTER, start, 2), target, numel)
    else:
        ctypes.memmove(target, chunk.at(Role.MASTER, start, 4), numel * 4)


def _move_states(
    chunk: Chunk,
    slot: Slot,
    start: int,
    stop: int,
    states: States,
    addresses: Mapping[str, int],
    *,
    save_at_step: int | None,
) -> None:
    """Copy a slot's states from `start` on to `addresses` (fp32), or back with the number of the last step."""
    numel, skip = stop - start, start - slot.offset_numel
    addresses = {name: addresses[name] for name in states.names if name in addresses}
    found, scales = chunk.states_at(start, states)
    if states.kind is cpu_adam.StateKind.FLOAT32:
        for name, state in zip(states.names, found, strict=True):
            if name in addresses:  # what an optimizer's own class has not made yet is not there
                value = addresses[name]
                source, target = (state, value) if save_at_step is None else (value, state)
                ctypes.memmove(target, source, numel * 4)
        return
    common: dict[str, Any] = {"values": tuple(addresses.values()), "states": found, "units": scales, "numel": numel}
    common["offset"] = slot.global_numel + skip
    if save_at_step is None:
        cpu_adam.load_states(states.kind, **common)
    else:
        cpu_adam.save_states(states.kind, seed=STATE_SEED, step=save_at_step, **common)


def scatter_states(
    manager: Manager,
    counts: StepCounts,
    values: Mapping[Where, Mapping[str, Any]],
    masters: Mapping[Where, torch.Tensor | None] | None = None,
) -> None:
    """Write optimizer states home; a missing ``master`` keeps the parameter's present one.

    A ``master`` of another dtype than fp32 counts as missing: torch's optimizers cast it to the parameter's, and leave
    it as it was while the parameter moves on. States that are not placed are kept in fp32, too, as torch does.

    Args:
        manager: owner of the shards.
        counts: updates so far.
        values: states by parameter. Sources are read piece by piece.
        masters: what :func:`gather_masters` returned, of parameters without a state; of 16-bit ones it is written.

    Raises:
        ConfigError: a shape does not fit, a state or ``step`` is missing or not what it has to be, or a parameter is
            frozen.
        StateError: a parameter is in use. Nothing was written in either case.
    """
    states, records = manager.tiers.plan.request.states, counts.records
    sources, updates = _read_states(manager, values, records)
    given = _read_masters(manager, masters or {}, sources)
    manager.tiers.refuse_leased(_units_of(manager, set(sources) | set(given)))
    manager.finish_updates()  # a first one makes masters
    given = {
        where: master
        for where, master in given.items()
        if master is not None or _has_masters(manager, manager.units[where[0]])
    }

    def visit(chunk: Chunk) -> None:
        unit = chunk.unit
        for index, slot, start, stop in overlaps(chunk, at_most=PIECE_NUMEL):
            where, numel, skip = (unit.index, index), stop - start, slot.offset_numel
            values = {"master": given.get(where), **sources.get(where, {})}
            parts = {name: elements(v, start - skip, stop - skip) for name, v in values.items() if v is not None}
            if where in sources:
                addresses = {name: part.data_ptr() for name, part in parts.items()}
                if all(role in chunk.addresses for role, _ in states.roles()):  # else another rank keeps them
                    _move_states(chunk, slot, start, stop, states, addresses, save_at_step=updates[where])
            if "master" in parts:
                address = parts["master"].data_ptr()
                _write_parameter(chunk, start, numel, address, torch.float32, keep_masters=False)
            elif where in given and Role.MASTER in chunk.addresses:
                _set_masters(chunk, start, numel, chunk.at(Role.PARAM, start, 2), all_of_them=True)

    units = _units_of(manager, set(sources) | set(given))
    for roles, some in itertools.groupby(units, lambda unit: _roles_of_states(manager, unit)):
        manager.stream(some, visit, reads=roles.reads, writes=roles.writes, parts=True)
    for (index, position), entry in values.items():
        counts.counts[index][position] = updates[index, position]
        if records is not None:
            records.put((index, position), recorded(entry, sources[index, position]))


class _Roles(NamedTuple):
    reads: frozenset[Role]
    writes: frozenset[Role]


def _roles_of_states(manager: Manager, unit: Unit) -> _Roles:
    """Return what of a unit is read and written with its states: parameters only where these have masters.

    States that were lost begin anew, but for what is given: all that had any.
    """
    writes = ALL_STATES if unit.dtype == "float32" else ALL_STATES | {Role.PARAM}
    found = (manager.copies.get(unit.index, role) for role in ALL_STATES)
    lost = any(shard is not None and manager.copies.is_lost(shard) for shard in found)
    return _Roles(writes - ALL_STATES if lost else writes, writes)


def _read_states(
    manager: Manager, values: Mapping[Where, Mapping[str, Any]], records: Records | None
) -> tuple[dict[Where, dict[str, torch.Tensor | Source]], dict[Where, int]]:
    """Return the states that are placed, as they are moved, and the updates that each parameter has had.

    Raises:
        ConfigError: as :func:`scatter_states`.
    """
    states = manager.tiers.plan.request.states
    required = {"step", *states.names} if records is None else records.required
    sources: dict[Where, dict[str, torch.Tensor | Source]] = {}
    updates: dict[Where, int] = {}
    for (index, position), entry in values.items():
        unit = manager.units[index]
        slot = unit.slots[position]
        if not unit.trainable:
            raise ConfigError(
                f"{slot.name}: expected no optimizer state, for it is frozen; take it out: `del optimizer.state[...]` "
                "before the engine is made, or its entry in 'state' of the dict that is loaded"
            )
        for name in sorted(required, key=lambda name: (name != "step", name)):
            if name not in entry:
                raise ConfigError(f"{slot.name}: optimizer state lacks {name!r}")
        tensors: dict[str, torch.Tensor | Source] = {}
        for name in states.names:
            value = entry.get(name)
            if name in required or isinstance(value, (torch.Tensor, Source)):  # an own class may have anything
                tensors[name] = _state(value, slot, name)
        master = entry.get("master")
        if master is not None and unit.dtype != "float32" and _is_exact(master, slot):
            tensors["master"] = _state(master, slot, "master")
        sources[index, position] = tensors
        counted = _updates(entry["step"], slot) if "step" in required and "step" not in states.names else 0
        updates[index, position] = counted if records is None else 1  # an own class counts for itself, if it does
    return sources, updates


def _read_masters(
    manager: Manager, masters: Mapping[Where, torch.Tensor | None], sources: Mapping[Where, Mapping[str, Any]]
) -> dict[Where, torch.Tensor | Source | None]:
    """Return the masters of parameters without one among their states; None where the parameter is its own.

    Raises:
        ConfigError: as :func:`scatter_states`.
    """
    given: dict[Where, torch.Tensor | Source | None] = {}
    for (index, position), master in masters.items():
        unit = manager.units[index]
        slot = unit.slots[position]
        if not unit.trainable or unit.dtype == "float32" or "master" in sources.get((index, position), {}):
            continue
        if master is None:
            given[index, position] = None
        elif _is_exact(master, slot):
            given[index, position] = _state(master, slot, "master")
    return given


def _state(value: Any, slot: Slot, name: str) -> torch.Tensor | Source:
    """Return a state that comes from outside as it is moved: in fp32, on the CPU."""
    refuse_unreadable(value, slot.name, f"{name} of shape {slot.shape}")
    if tuple(value.shape) != slot.shape:
        raise ConfigError(f"{slot.name}: expected {name} of shape {slot.shape} but got {tuple(value.shape)}")
    return on_cpu(value, torch.float32)


def _is_exact(master: Any, slot: Slot) -> bool:
    """Tell whether a ``master`` is one: of fp32."""
    refuse_unreadable(master, slot.name, f"master of shape {slot.shape}")
    return bool(master.dtype == torch.float32)


def _updates(step: Any, slot: Slot) -> int:
    """Return the updates that a parameter has had, from the ``step`` of a state."""
    value = step
    if isinstance(step, torch.Tensor) and step.numel() == 1 and not step.is_meta:
        value = step.item()
    if isinstance(value, numbers.Real) and 0 <= float(value) < MOST_UPDATES and float(value).is_integer():
        return int(float(value))
    if isinstance(step, torch.Tensor) and value is step:
        value = f"a tensor of shape {tuple(step.shape)} on {step.device}"
    raise ConfigError(
        f"{slot.name}: expected step as a whole number of updates, 0 or more, but got {value}; load what state_dict() "
        "returned"
    )


def _units_of(manager: Manager, wanted: set[Where] | None) -> list[Unit]:
    if wanted is None:
        return list(manager.units)
    indices = {index for index, _ in wanted}
    return [unit for unit in manager.units if unit.index in indices]


def overlaps(chunk: Chunk, *, at_most: int | None = None) -> Iterator[tuple[int, Slot, int, int]]:
    """Yield (slot index, slot, start, stop) of the unit's elements [start, stop) that are in the chunk.

    With `at_most`, a multiple of :data:`SLOT_ALIGN_NUMEL`, no range is longer.
    """
    for index, slot, start, stop in chunk.unit.overlaps(chunk.begin, chunk.end):
        for begin in range(start, stop, at_most or stop - start):
            yield index, slot, begin, min(begin + (at_most or stop), stop)
