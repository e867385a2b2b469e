"""Reads what the files of a checkpoint hold into an engine's tiers, whatever tier it comes to and once lay in.

What is stored as this engine stores it goes home chunk by chunk, by stream. What is stored otherwise is made fp32, one
parameter at a time, and comes in as a loaded state does. Owns what fits and what does not. Next:
:mod:`offload.checkpoints`.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint import values as tensors
from offload.checkpoint.beside import extra_key
from offload.checkpoint.columns import GRADIENT, MASTER, PARAMETER, SCALES, Column, columns_of
from offload.checkpoint.format.folder import Folder
from offload.checkpoint.format.index import FILE_NAME, Entry, Index, differences
from offload.checkpoint.format.nested import decode
from offload.checkpoint.format.reader import Reader, Source, Stretch
from offload.checkpoint.format.safetensors import DTYPES, ITEMSIZES
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.errors import CheckpointError
from offload.kernels import cpu_adam
from offload.optim.recipe import StepCounts
from offload.planning.roles import Role
from offload.planning.units import Slot, Unit, Where, without_reference
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk
from offload.sizes import MIB

READ_BYTES = 4 * MIB
READ_DEADLINE_S = 600.0  # of one transfer of what is read without an engine: a slow drive is no error
_KINDS = {"F32": cpu_adam.StateKind.FLOAT32, "BF16": cpu_adam.StateKind.BFLOAT16, "U8": cpu_adam.StateKind.INT8}
_GRADIENTS = {"F32": cpu_adam.Dtype.FLOAT32, "BF16": cpu_adam.Dtype.BFLOAT16, "F16": cpu_adam.Dtype.FLOAT16}
_FLOATS = ("F32", "BF16", "F16")


def read_tensor(source: Source, entry: Entry, staging: Staging) -> torch.Tensor:
    """Return one tensor of a checkpoint, of its own dtype.

    Raises:
        CheckpointError: it is damaged.
    """
    value = torch.empty(entry.shape, dtype=getattr(torch, DTYPES[entry.dtype]), device="cpu")
    with Reader({"": source.stretches([entry])}, staging) as reader:
        reader.take("", value.data_ptr(), entry.size_bytes)
    return value


def read_weights(source: Source, index: Index, staging: Staging) -> dict[str, Any]:
    """Return the parameters, buffers and extra states of a checkpoint by the names of a state dict, in memory.

    Raises:
        CheckpointError: it is damaged.
    """
    values = {entry.name: entry for entry in index.entries if entry.role == "value"}
    weights = {entry.name: read_tensor(source, entry, staging) for entry in index.entries if entry.role == PARAMETER}
    for kind, key in (("buffers", str), ("extra", extra_key)):
        found = decode(index.contents[kind], lambda name: read_tensor(source, values[name], staging))
        weights.update({key(name): value for name, value in found.items()})
    return weights


def refuse_quantized(path: Path, index: Index) -> None:
    """Refuse a checkpoint that has elements of quantized weights: the model has what makes weights of them.

    Raises:
        CheckpointError: it has some.
    """
    integers = (e.name for e in index.entries if e.role == PARAMETER and e.dtype in ("U8", "I8"))
    quantized = index.contents.get("quantized", integers)  # which older checkpoints do not tell
    for name in (*index.contents.get("wrappers", ()), *quantized):
        raise CheckpointError(
            f"checkpoint {path}: expected plain weights but {name} is quantized; make the model, load it with "
            "engine.load_checkpoint, and save it with engine.save_pretrained, or with offload.peft.merge_and_save and "
            "dequantize="
        )


def read_state_dict(directory: str | Path) -> dict[str, Any]:
    """Return the weights of the latest checkpoint in a folder, as the module's state dict has them.

    Raises:
        CheckpointError: there is none, it is damaged, or its weights are quantized.
        swap.SwapError: an I/O error.
    """
    with Folder(directory).reading(None) as path, Staging(BUFFERS, BUFFER_BYTES, deadline_s=READ_DEADLINE_S) as staging:
        index = Index.read(path / FILE_NAME)
        refuse_quantized(path, index)
        return read_weights(Source(path, index), index, staging)


def fp32_values(
    found: Mapping[tuple[str, str], Entry], name: str, source: Source, staging: Staging, states: Sequence[str]
) -> dict[str, torch.Tensor]:
    """Return a parameter as it is, as ``parameter``, and in fp32 its ``master`` and its states, exactly.

    Without a master, and if it is not fp32 itself, the parameter stands alone.
    """
    result = {PARAMETER: read_tensor(source, found[PARAMETER, name], staging)}
    parameter, numel = result[PARAMETER], result[PARAMETER].numel()
    master = found.get((MASTER, name))
    if master is not None:
        stored = read_tensor(source, master, staging)
        result[MASTER] = torch.empty(parameter.shape, dtype=torch.float32, device="cpu")
        if master.dtype == "I16":
            cpu_adam.join_master(parameter.data_ptr(), stored.data_ptr(), result[MASTER].data_ptr(), numel)
        else:
            result[MASTER] = stored
    raw = {state: read_tensor(source, found[state, name], staging) for state in states}
    if raw and (kind := _KINDS[found[states[0], name].dtype]) is not cpu_adam.StateKind.FLOAT32:
        scales = read_tensor(source, found[SCALES, name], staging) if (SCALES, name) in found else None
        wide = {state: torch.empty(parameter.shape, dtype=torch.float32, device="cpu") for state in states}
        first, second = states
        cpu_adam.load_states(
            kind,
            values=(wide[first].data_ptr(), wide[second].data_ptr()),
            states=(raw[first].data_ptr(), raw[second].data_ptr()),
            units=0 if scales is None else scales.data_ptr(),
            numel=numel,
        )
        raw = wide
    return result | raw


def trained_of(index: Index, saved: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any] | None, list[str]]]:
    """Yield the trained parameters in an optimizer's order, with what it remembers of each: values, names of states.

    Where it has not updated one yet, the values are None, and there are no states.

    Args:
        index: of the checkpoint.
        saved: its entry ``optimizer``, decoded.
    """
    records = saved["records"]
    for name in (name for group in saved["groups"] for name in group["params"]):
        described = index.contents["parameters"][name]
        record = None if records is None else records.get(name)
        if not described["trained"]:
            continue
        if record is not None:
            yield name, dict(record["kept"]), list(record["placed"])
        elif records is None and described["updates"] > 0:
            yield name, {"step": torch.tensor(float(described["updates"]))}, list(saved["states"])
        else:
            yield name, None, []


@dataclasses.dataclass(frozen=True, slots=True)
class _Fit:
    """How a parameter of a checkpoint gets into an engine.

    Attributes:
        name: of it.
        as_is: every column is stored as here.
        states: those that are taken over; the others begin anew.
    """

    name: str
    as_is: bool
    states: tuple[str, ...]


class Restorer:
    """Reads one checkpoint into one engine. See the module's text."""

    def __init__(self, manager: Manager, index: Index, *, strict: bool, states: bool = True) -> None:
        """Compare what there is with what is wanted.

        Args:
            manager: owner of the shards.
            index: of the checkpoint.
            strict: refuse what is missing, left over, or would lose bits.
            states: read the optimizer's states, too; else they stay as they are, as gradients do, whatever was saved.

        Raises:
            CheckpointError: it is another model's, another optimizer's, or would lose bits. If not `strict`: nothing of
                it fits.
        """
        self._manager = manager
        self._units = without_reference(manager.units)
        self._index = index
        self._strict = strict
        self._with_states = states
        self._found = index.by_role()
        self._states = manager.tiers.plan.request.states
        self._takes_frozen = not states or not any(unit.trainable for unit in self._units)
        self._columns = [
            [each for each in columns_of(unit, self._states, None) if states or each.label in (PARAMETER, MASTER)]
            for unit in self._units
        ]
        self._request = manager.tiers.plan.request
        self._places = {
            slot.name: (unit.index, position) for unit in self._units for position, slot in enumerate(unit.slots)
        }
        self._refuse_another_model()
        self._fits: dict[Where, _Fit] = {}
        for unit in self._units:
            for position, slot in enumerate(unit.slots):
                if (PARAMETER, slot.name) in self._found:
                    self._fits[unit.index, position] = self._fit(unit, slot)
        self._gradients = [
            entry for entry in index.entries if states and entry.role == GRADIENT and self._takes_gradient(entry.name)
        ]

    @property
    def fresh(self) -> set[Where]:
        """Parameters whose states begin anew, or are not in the checkpoint."""
        everything = {
            (unit.index, position) for unit in self._units if unit.trainable for position in range(len(unit.slots))
        }
        names = self._states.names
        return {where for where in everything if where in self._fits and self._fits[where].states != names}

    @property
    def loaded(self) -> dict[Where, str]:
        """Parameters that are loaded, with their names."""
        return {where: fit.name for where, fit in self._fits.items()}

    # --- does it fit? -----------------------------------------------------------------------------------------------

    def _refuse_another_model(self) -> None:
        found = {entry.name: entry for entry in self._index.entries if entry.role == PARAMETER}
        different = []
        for unit in self._units:
            for slot in unit.slots:
                if slot.name in found and found[slot.name].shape != slot.shape:
                    different.append(f"{slot.name} has shape {found[slot.name].shape} instead of {slot.shape}")
        if different:
            raise CheckpointError(
                f"checkpoint {self._index.tag}: is of another model: {'; '.join(different[:5])}; load it into the "
                "model that it was saved from"
            )
        names = differences(list(self._places), list(found))
        some = found.keys() & self._places.keys()
        if names and (self._strict or not some):
            parts = ", or pass strict=False to load what both have" if some else ""
            raise CheckpointError(
                f"checkpoint {self._index.tag}: is of another model: it {names}; load it into the model that it was "
                f"saved from{parts}"
            )
        if names:
            stay = f"load_checkpoint: parameters stay as they are where checkpoint {self._index.tag} differs"
            warnings.warn(f"{stay}: it {names}", stacklevel=6)

    def _fit(self, unit: Unit, slot: Slot) -> _Fit:
        name, columns = slot.name, self._columns[unit.index]
        found = {column.label: self._found.get((column.label, name)) for column in columns}
        if all(entry is not None and entry.dtype == column.dtype for column, entry in _pairs(columns, found)):
            if unit.trainable or self._takes_frozen or not self._is_trained(name) or not self._strict:
                return _Fit(name, True, self._states.names)
        parameter = self._found[PARAMETER, name]
        if unit.trainable != self._is_trained(name) and not self._takes_frozen:
            here, there = ("trained", "frozen") if unit.trainable else ("frozen", "trained")
            self._refuse(f"{name} is {there} in it and {here} here", "freeze the same parameters")
        mine = columns_of_parameter(columns)
        exact = {mine, parameter.dtype} <= set(_FLOATS) and (
            mine == "F32" or (unit.trainable and self._is_trained(name))  # the latter keeps all bits in the master
        )
        if parameter.dtype != mine and not exact:
            self._refuse(f"{name} is stored as {parameter.dtype}, of which {mine} loses bits", "take the same dtype")
        if not self._with_states:
            return _Fit(name, False, ())
        states = self._states.names if unit.trainable else ()
        saved = self._state_names(name)
        if unit.trainable and self._is_trained(name) and set(states) != set(saved):
            self._refuse(
                f"{name} has the states [{', '.join(saved)}] instead of [{', '.join(states)}]",
                "make the engine with the optimizer that it was saved with",
            )
        if any(state not in saved for state in states):
            states = ()
        kinds = {self._found[state, name].dtype for state in states}
        here_kind = self._states.kind
        if kinds - {"F32" if here_kind is cpu_adam.StateKind.FLOAT32 else _name_of(here_kind)}:
            if here_kind is not cpu_adam.StateKind.FLOAT32:
                self._refuse(
                    f"the states of {name} are stored as {', '.join(sorted(kinds))}, of which "
                    f"state_dtype={here_kind.value!r} loses bits",
                    "take the same state_dtype",
                )
        return _Fit(name, False, states)

    def _refuse(self, what: str, remedy: str) -> None:
        if self._strict:
            raise CheckpointError(
                f"checkpoint {self._index.tag}: {what}; {remedy}, or pass strict=False to load what can be, converted"
            )

    def _is_trained(self, name: str) -> bool:
        return bool(self._index.contents["parameters"][name]["trained"])

    def _state_names(self, name: str) -> list[str]:
        optimizer = self._index.contents.get("optimizer")
        names = optimizer["states"] if optimizer else []
        return [state for state in names if (state, name) in self._found]

    def _takes_gradient(self, name: str) -> bool:
        where = self._places.get(name)
        return where is not None and where in self._fits and self._units[where[0]].trainable

    def refuse_narrow_gradients(self) -> None:
        """Refuse gradients that wait for a step, if they would lose bits here.

        Raises:
            CheckpointError: one would.
        """
        plan = self._manager.tiers.plan
        for entry in self._gradients:
            unit = self._units[self._places[entry.name][0]]
            mine = plan.request.accumulate or bool(plan.wide_bytes) or unit.dtype == "float32"
            if (
                entry.dtype == "F32"
                and not mine
                or entry.dtype in ("BF16", "F16")
                and unit.dtype
                not in (
                    "float32",
                    DTYPES[entry.dtype],
                )
            ):
                raise CheckpointError(
                    f"checkpoint {self._index.tag}: the gradient of {entry.name} that waits for a step is stored as "
                    f"{entry.dtype}, of which this engine would lose bits; make it with the same "
                    "gradient_accumulation_steps"
                )

    # --- reading ----------------------------------------------------------------------------------------------------

    def read(self, source: Source, staging: Staging, counts: StepCounts) -> None:
        """Read parameters, masters, and states if asked to. No gradient may wait, and no parameter may be in use.

        Raises:
            CheckpointError: something is damaged.
            swap.SwapError: an I/O error. In either case, the engine has a part of both.
        """
        everything = frozenset({Role.PARAM}) | ALL_STATES
        whole, partial = list[Unit](), list[Unit]()
        for unit in self._units:
            here = [self._streams(unit, position) for position in range(len(unit.slots))]
            if any(here):
                (whole if all(here) and self._with_states else partial).append(unit)
        widths = {column.label: ITEMSIZES[column.dtype] for columns in self._columns for column in columns}
        lanes = {label: self._stretches(source, [*whole, *partial], label) for label in sorted(widths)}
        with Reader(lanes, staging, widths) as reader:

            def visit(chunk: Chunk) -> None:
                self._manager.safe_point.check()  # whoever loads knows what to do about the rest
                for column, _, start, stop in self._pieces(chunk.unit, chunk.begin, chunk.end):
                    reader.take(column.label, column.address(chunk, start), column.size_bytes(stop - start))

            self._manager.stream(whole, visit, reads=frozenset(), writes=everything, widely=True, parts=True)
            self._manager.stream(partial, visit, reads=everything, writes=everything, parts=True)
        for where, fit in self._fits.items():
            if not fit.as_is:
                self._convert(where, fit, source, staging, counts)

    def _streams(self, unit: Unit, position: int) -> bool:
        fit = self._fits.get((unit.index, position))
        return fit is not None and fit.as_is

    def _pieces(self, unit: Unit, begin: int, end: int) -> Iterator[tuple[Column, Slot, int, int]]:
        """Yield what is read of a unit's elements [begin, end), in order: what this rank keeps of each column."""
        for column in self._columns[unit.index]:
            first, last = self._request.owned(unit, column.role)
            for position, slot, start, stop in unit.overlaps(max(begin, first), min(end, last)):
                if self._streams(unit, position):
                    yield column, slot, start, stop

    def _stretches(self, source: Source, units: Sequence[Unit], label: str) -> Iterator[Stretch]:
        """Yield one column of `units`: however they are cut into chunks, its elements come in this order."""
        for unit in units:
            for column, slot, start, stop in self._pieces(unit, 0, unit.numel):
                if column.label == label:
                    begin, end = column.numel(start - slot.offset_numel), column.numel(stop - slot.offset_numel)
                    yield from source.stretches_of(self._found[label, slot.name], begin, end)

    def _convert(self, where: Where, fit: _Fit, source: Source, staging: Staging, counts: StepCounts) -> None:
        """Load a parameter through fp32."""
        manager, unit = self._manager, self._units[where[0]]
        found = fp32_values(self._found, fit.name, source, staging, fit.states)
        parameter = found.pop(PARAMETER)
        value = found.pop(MASTER, parameter)
        wide = value if unit.trainable else parameter
        tensors.scatter_parameters(manager, {where: wide}, keep_masters=False)
        if not self._with_states or not unit.trainable or (not self._states.names and unit.dtype == "float32"):
            return
        shape = unit.slots[where[1]].shape
        states: dict[str, Any] = {"step": self._updates(fit)}
        for name in self._states.names:
            states[name] = found.get(name, torch.zeros(shape, dtype=torch.float32, device="cpu"))
        if counts.records is not None:  # what else is remembered is not here: all of it comes in its place
            states = dict.fromkeys(counts.records.required, 0) | states
        tensors.scatter_states(manager, counts, {where: states})

    def _updates(self, fit: _Fit) -> int:
        return int(self._index.contents["parameters"][fit.name]["updates"]) if fit.states else 0

    def read_gradients(self, source: Source, staging: Staging) -> list[Where]:
        """Read the gradients that wait for a step; returns whose they are.

        Raises:
            CheckpointError, swap.SwapError: as :meth:`read`.
        """
        passes = self._index.contents["accumulation"]["gradients"]
        parts = [(entry, *self._kept(entry.name)) for entry in self._gradients]
        stretches = (stretch for part in parts for stretch in source.stretches_of(*part))
        with Reader({GRADIENT: stretches}, staging) as reader:
            for entry, first, last in parts:
                index, slot = self._places[entry.name]
                gradients, unit = self._manager.gradients, self._units[index]
                stored = _GRADIENTS[entry.dtype]
                address = gradients.restore(index, slot, stored, int(passes[entry.name]["passes"]))
                mine = gradients.dtype(unit)
                if gradients.is_there(index):
                    value = torch.empty(entry.numel, dtype=getattr(torch, DTYPES[entry.dtype]), device="cpu")
                    reader.take(GRADIENT, value.data_ptr(), entry.size_bytes)
                    gradients.overwrite(index, slot, value)
                    continue
                if mine is stored:
                    reader.take(GRADIENT, address + first * mine.itemsize, (last - first) * mine.itemsize)
                    continue
                part = torch.empty(READ_BYTES // stored.itemsize, dtype=torch.int16, device="cpu")
                for begin in range(first, last, part.numel()):
                    numel = min(part.numel(), last - begin)
                    reader.take(GRADIENT, part.data_ptr(), numel * stored.itemsize)
                    cpu_adam.convert(part.data_ptr(), stored, address + begin * mine.itemsize, mine, numel)
        return [self._places[entry.name] for entry in self._gradients]

    def _kept(self, name: str) -> tuple[int, int]:
        """Return the elements [first, last) of a parameter whose gradient this rank keeps."""
        index, position = self._places[name]
        unit = self._units[index]
        slot, (begin, end) = unit.slots[position], self._request.owned(unit, Role.GRAD)
        first, last = max(begin, slot.offset_numel), min(end, slot.end_numel)
        return first - slot.offset_numel, max(first, last) - slot.offset_numel


def columns_of_parameter(columns: Sequence[Column]) -> str:
    """Return the dtype that parameters have in a file."""
    return next(column.dtype for column in columns if column.label == PARAMETER)


def _name_of(kind: cpu_adam.StateKind) -> str:
    return next(name for name, known in _KINDS.items() if known is kind)


def _pairs(columns: Sequence[Column], found: Mapping[str, Entry | None]) -> Iterator[tuple[Column, Entry | None]]:
    for column in columns:
        yield column, found[column.label]
