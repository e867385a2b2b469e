"""What a step does to each unit: ranges with their hyper-parameters, and the update as a visit of chunks.

Owns the recipe of a step, and the counts of updates that bias correction needs.
:mod:`offload.shards.backward_updates` and :mod:`offload.shards.forward_updates` visit chunks with it when a unit's turn
has come. The arithmetic of an element is in ``csrc/cpu_adam``. Where a parameter's bytes are is none of its business.
Next: :mod:`offload.optim.step`.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch

from offload.kernels import cpu_adam
from offload.kernels.optimizers import LAMB
from offload.labels import labelled
from offload.memory.budget import Claim
from offload.optim.norms_of_ranks import Norms
from offload.optim.probe import OwnClass, OwnHyper
from offload.optim.rules import STATE_SEED, Rule, StepOf
from offload.optim.torch_class import Records
from offload.planning.roles import Role, States
from offload.planning.units import Unit, Where
from offload.shards.gradients import KERNEL_DTYPE
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk, copy_sources
from offload.shards.tiers import Tiers
from offload.spans import CPU_ADAM
from offload.spec import Hyper


def trainable_units(units: Iterable[Unit]) -> list[Unit]:
    """Return the units that the optimizer updates, in update order."""
    return [unit for unit in units if unit.trainable]


Own = tuple[OwnClass, Claim, Sequence[Sequence[torch.nn.Parameter]]]


class StepCounts:
    """Updates that each parameter has had: bias correction counts only those, as in torch.

    Attributes:
        counts: per trainable unit and slot.
        records: what an optimizer's own class remembers, where it makes the steps, else None.
    """

    def __init__(self, units: Iterable[Unit], own: Own | None = None) -> None:
        """Begin with none.

        Args:
            units: of the model.
            own: an optimizer's own class that makes the steps, the claim that holds what it keeps, and the parameters
                by unit and position.
        """
        self.counts = {unit.index: [0] * len(unit.slots) for unit in trainable_units(units)}
        self.records = Records(*own) if own else None

    def forget(self) -> None:
        """Let no parameter have had an update."""
        for updates in self.counts.values():
            updates[:] = [0] * len(updates)
        if self.records is not None:
            self.records.keep_only(())


def group_of_slots(
    param_groups: Iterable[dict[str, Any]], units: Sequence[Unit], parameters: Sequence[Sequence[torch.nn.Parameter]]
) -> dict[int, list[dict[str, Any] | None]]:
    """Return per trainable unit and slot the param group it is in, None where the optimizer leaves it out."""
    group_of = {id(p): group for group in param_groups for p in group["params"]}
    return {unit.index: [group_of.get(id(p)) for p in parameters[unit.index]] for unit in trainable_units(units)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """Elements [begin, end) of a unit with the same hyper-parameters; `shift` more are their global indices.

    They are of the parameter at position `slot`, and of those behind it.
    """

    begin: int
    end: int
    shift: int
    hyper: StepOf
    slot: int

    def goes_on_in(self, other: _Segment) -> bool:
        """Tell whether the two are one."""
        return self.end == other.begin and self.shift == other.shift and self.hyper is other.hyper


class Recipe:
    """What a step does to each unit. All that decides on the result is read when it is made.

    What happens to groups afterwards changes nothing.
    """

    def __init__(
        self,
        tiers: Tiers,
        counts: StepCounts,
        groups: dict[int, list[dict[str, Any] | None]],
        *,
        rule: Rule,
        grad_scale: float,
        factors: Mapping[Where, float] | None = None,
    ) -> None:
        """Read the hyper-parameters.

        Args:
            tiers: the shards.
            counts: updates so far.
            groups: param group per slot.
            rule: the optimizer.
            grad_scale: factor on every gradient: clipping, averaging and loss scale in one.
            factors: what some parameters' gradients are multiplied by in addition.
        """
        self._tiers = tiers
        self._counts = counts
        self._groups = groups
        self._hyper_of: dict[tuple[int, int, float], StepOf] = {}
        self._whole = rule.whole
        self._make = rule.hyper
        self._grad_scale = grad_scale
        self._factors = factors or {}
        self._ranges: dict[int, list[_Segment]] = {}
        self._step_sizes: dict[Where, float] | None = None  # of LAMB's second pass, where ranks have made the first

    def measure(self, manager: Manager, units: Sequence[Unit], where: str) -> None:
        """Make the first pass of a step that needs norms of whole parameters, of which ranks have slices.

        Args:
            manager: owner of the shards.
            units: that are updated.
            where: the place, for errors.

        Raises:
            RanksError: another rank has failed, is elsewhere, ended or not come. The moments are of no use then.
            swap.SwapError: an I/O error; the same.
        """
        norms = Norms(manager, {unit.index: self.updated(unit) for unit in units})
        hypers: dict[Where, Hyper] = {}

        def visit(chunk: Chunk) -> None:
            grad_dtype = self._tiers.gradients.dtype(chunk.unit)
            for segment in self._ranges[chunk.unit.index]:
                start, stop = max(segment.begin, chunk.begin), min(segment.end, chunk.end)
                make = functools.partial(_arrays, chunk, segment=segment, states=self._states, grad_dtype=grad_dtype)
                if start < stop:
                    assert isinstance(segment.hyper, Hyper)
                    at, slot = (chunk.unit.index, segment.slot), chunk.unit.slots[segment.slot]
                    norms.add(at, slot, start, stop, make, segment.hyper)

        for unit in units:
            for segment in self.ranges(unit):
                assert isinstance(segment.hyper, Hyper)
                hypers[unit.index, segment.slot] = segment.hyper
        manager.stream(units, visit, reads=ALL_STATES | {Role.PARAM, Role.GRAD}, writes=ALL_STATES, parts=True)
        sizes: dict[Where, float] = {}
        for at, sums in norms.join(where).items():
            spec = hypers[at].spec
            assert isinstance(spec, LAMB)
            sizes[at] = spec.step_size(*sums)
        self._step_sizes = sizes

    def updated(self, unit: Unit) -> list[int]:
        """Return the slots of a unit that are updated: those with a gradient that the optimizer has."""
        arrived, groups = self._tiers.gradients.arrived(unit.index), self._groups[unit.index]
        return [slot for slot, group in enumerate(groups) if arrived[slot] and group is not None]

    def ranges(self, unit: Unit) -> list[_Segment]:
        """Return the ranges of a unit that are updated, in order.

        Raises:
            ConfigError: a hyper-parameter is out of its range.
        """
        known = self._ranges.get(unit.index)
        if known is not None:
            return known
        # What lies behind a parameter must not scale its last block, or count for its norm.
        exact_ends = self._whole or self._states.kind is cpu_adam.StateKind.INT8
        ranges: list[_Segment] = []
        for position in self.updated(unit):
            slot = unit.slots[position]
            end = unit.slots[position + 1].offset_numel if position + 1 < len(unit.slots) else unit.numel
            segment = _Segment(
                slot.offset_numel,
                slot.end_numel if exact_ends else end,
                slot.global_numel - slot.offset_numel,
                self._hyper(unit, position),
                position,
            )
            if ranges and not self._whole and ranges[-1].goes_on_in(segment):
                ranges[-1] = dataclasses.replace(ranges[-1], end=segment.end)
            else:
                ranges.append(segment)
        self._ranges[unit.index] = ranges
        return ranges

    @labelled("update")
    def visit(self, chunk: Chunk) -> None:
        """Update a chunk of a unit that :meth:`ranges` was asked for."""
        begin = time.perf_counter()
        tiers, done = self._tiers, 0
        if chunk.sources and not self._steps_apart(chunk):
            copy_sources(tiers, chunk)
        for segment in self._ranges[chunk.unit.index]:
            start, stop = max(segment.begin, chunk.begin), min(segment.end, chunk.end)
            if start < stop:
                grad_dtype = tiers.gradients.dtype(chunk.unit)
                if isinstance(segment.hyper, OwnHyper):
                    assert self._counts.records is not None
                    self._counts.records.update(chunk, start, segment.hyper, self._states, grad_dtype=grad_dtype)
                else:
                    size = None if self._step_sizes is None else self._step_sizes[chunk.unit.index, segment.slot]
                    _update_range(chunk, start, stop, segment, self._states, grad_dtype=grad_dtype, step_size=size)
                done += stop - start
        if tiers.plan.on_device(chunk.unit):
            return
        size = tiers.update_bytes(chunk.unit, chunk.begin, chunk.begin + done)
        end = time.perf_counter()
        tiers.counters.add("cpu_adam", size_bytes=size, seconds=end - begin)
        tiers.counters.spans.add(CPU_ADAM, chunk.unit.name, begin, end, size)

    def _steps_apart(self, chunk: Chunk) -> bool:
        """Tell whether a kernel writes all of a chunk beside the old content, without a copy of it."""
        position = chunk.begin
        for segment in self._ranges[chunk.unit.index]:
            if isinstance(segment.hyper, OwnHyper) or isinstance(segment.hyper.spec, LAMB):
                return False
            if segment.end > chunk.begin and segment.begin > position:
                return False
            position = max(position, segment.end)
        written = (address for role, address in chunk.addresses.items() if role not in (Role.GRAD, Role.SCALES))
        return position >= chunk.end and not any(address % cpu_adam.LINE_BYTES for address in written)

    @property
    def _states(self) -> States:
        return self._tiers.plan.request.states

    def _hyper(self, unit: Unit, position: int) -> StepOf:
        group = self._groups[unit.index][position]
        assert group is not None
        count = self._counts.counts[unit.index][position] + 1
        scale = self._grad_scale * self._factors.get((unit.index, position), 1.0)
        key = (id(group), count, scale)
        hyper = self._hyper_of.get(key)
        if hyper is None:
            hyper = self._hyper_of[key] = self._make(group, count, scale)
        return hyper


def _update_range(
    chunk: Chunk,
    start: int,
    stop: int,
    segment: _Segment,
    states: States,
    *,
    grad_dtype: cpu_adam.Dtype,
    step_size: float | None,
) -> None:
    assert not isinstance(segment.hyper, OwnHyper)
    arrays = _arrays(chunk, start, stop, segment, states, grad_dtype=grad_dtype)
    if step_size is not None:
        cpu_adam.lamb_apply(arrays, segment.hyper, step_size)
        return
    if chunk.sources:
        target = cpu_adam.StepTarget(master=arrays.master, param=arrays.param, states=arrays.states, units=arrays.units)
        old = _arrays(chunk.before(), start, stop, segment, states, grad_dtype=grad_dtype)
        arrays = dataclasses.replace(old, emit=arrays.emit, target=target)
    chunk.kernels.step(arrays, segment.hyper)  # all of a parameter is here where that matters: see Rule.whole


def _arrays(
    chunk: Chunk, start: int, stop: int, segment: _Segment, states: States, *, grad_dtype: cpu_adam.Dtype
) -> cpu_adam.StepArrays:
    unit = chunk.unit
    dtype = KERNEL_DTYPE[unit.dtype]
    param = chunk.at(Role.PARAM, start, unit.itemsize)
    split, half = dtype is cpu_adam.Dtype.BFLOAT16, dtype is cpu_adam.Dtype.FLOAT16
    found, scales = chunk.states_at(start, states)
    return cpu_adam.StepArrays(
        numel=stop - start,
        grad=chunk.at(Role.GRAD, start, grad_dtype.itemsize),
        grad_dtype=grad_dtype,
        master=chunk.at(Role.MASTER, start, 2 if split else 4) if split or half else param,
        master_kind=cpu_adam.MasterKind.SPLIT if split else cpu_adam.MasterKind.FLOAT32,
        states=found,
        param=param if split else 0,
        state_kind=states.kind,
        units=scales,
        emit=param if half else 0,
        emit_dtype=dtype if half else None,
        seed=STATE_SEED,
        offset=start + segment.shift,
    )
