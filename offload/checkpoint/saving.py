"""Writes what an engine holds to the files of a checkpoint, chunk by chunk and whatever tier it is in.

Owns which bytes of a chunk go to which file: of several ranks, each writes what it keeps of gradients and states, and
as much of parameters; of several nodes, only those of the first. Bytes come through
:func:`offload.shards.stream.stream`; nothing is changed, and updates that are made ahead of a step stay as they are.
What somebody holds is left to :mod:`offload.checkpoint.copying`. Next: :mod:`offload.checkpoints`.
"""

from __future__ import annotations

import itertools
from collections.abc import Container, Mapping
from pathlib import Path

import torch

from offload.checkpoint.columns import Column, Span, columns_of
from offload.checkpoint.format.index import Entry, Range, StoredFile
from offload.checkpoint.format.safetensors import ITEMSIZES, NAMES, Member
from offload.checkpoint.format.staging import Staging
from offload.checkpoint.format.writer import FileWriter
from offload.checkpoint.layout import Columns, Files, Layout, key_of
from offload.distributed.ranks import Ranks
from offload.errors import CheckpointError
from offload.planning.roles import Role
from offload.planning.units import Unit, Where, without_reference
from offload.shards.held import Held
from offload.shards.manager import Manager
from offload.shards.stream import ALL_STATES, Chunk


class Contents:
    """What an engine's shards put into a checkpoint. See the module's text.

    Attributes:
        columns: all that is stored.
        now: where that of it is which is written from the tiers.
        held: where that of it is which somebody holds, in further files.
    """

    def __init__(self, manager: Manager, waiting: Container[Where], file_bytes: int, held: Held | None) -> None:
        """Decide which file has what.

        Args:
            manager: owner of the shards.
            waiting: parameters whose gradient waits for the next step.
            file_bytes: of a file, about.
            held: what does not change any more; None where all is written from the tiers.
        """
        self._manager = manager
        self._units = units = without_reference(manager.units)
        request, gradients = manager.tiers.plan.request, manager.gradients
        slices = {unit.index: request.owned(unit, Role.GRAD) for unit in units}  # of each role
        waits = [any((unit.index, slot) in waiting for slot in range(len(unit.slots))) for unit in units]
        found: list[list[Column]] = [[] for _ in units]
        if manager.tiers.ranks.rank < request.slices:  # others have what these have
            found = [
                columns_of(unit, request.states, gradients.dtype(unit) if waits[unit.index] else None) for unit in units
            ]
        self.columns = Columns(units, found, waiting, slices)

        def of(kept: bool) -> Columns:
            chosen = [
                [column for column in found[unit.index] if (held is not None and held.has(unit, column.role)) is kept]
                for unit in units
            ]
            return Columns(units, chosen, waiting, slices)

        suffix = suffix_of(manager.tiers.ranks)
        self.now = Layout(of(kept=False), file_bytes, suffix=suffix)
        self.held = Layout(of(kept=True), file_bytes, first=self.now.files, suffix=suffix)

    @property
    def size_bytes(self) -> int:
        """Bytes of the tensors."""
        return self.now.size_bytes + self.held.size_bytes

    @property
    def buffers(self) -> int:
        """How many a :class:`Staging` needs at least."""
        return max(self.now.buffers, self.held.buffers)

    def write(self, files: Files) -> None:
        """Write what comes from the tiers.

        Raises:
            StateError: content was lost by a failed step.
            swap.SwapError: an I/O error.
        """
        by_unit: dict[int, list[Span]] = {}
        for span in self.now.spans:
            by_unit.setdefault(span.unit, []).append(span)

        def visit(chunk: Chunk) -> None:
            self._manager.safe_point.check()
            for span in by_unit.get(chunk.unit.index, ()):
                for column in self.now.columns.of[chunk.unit.index]:
                    for position, slot, start, stop in span.overlaps(chunk.unit, chunk.begin, chunk.end):
                        if self.columns.has(column, (chunk.unit.index, position)):
                            size = column.size_bytes(stop - start)
                            address = column.address(chunk, start)
                            files.append(span.file, column.label, key_of(column, slot), address, size)

        for roles, units in itertools.groupby(self._units, self._reads):
            if roles:
                self._manager.stream(units, visit, reads=roles, keep_early=True, widely=True, parts=True, slices=True)
        files.end()

    def _reads(self, unit: Unit) -> frozenset[Role]:
        """Return the roles that have to be there to write a unit: states that are not yet are made of parameters."""
        columns = self.now.columns.of[unit.index]
        roles = {column.role for column in columns}
        if roles & ALL_STATES:
            roles |= ALL_STATES | {Role.PARAM}
        return frozenset(roles)


def suffix_of(ranks: Ranks) -> str:
    """Return what the names of this rank's files have; nothing where there is one."""
    return f"-of-rank-{ranks.rank}" if ranks.world > 1 else ""


def write_values(
    folder: Path, values: Mapping[str, torch.Tensor], staging: Staging, suffix: str = ""
) -> tuple[list[Entry], dict[str, StoredFile]]:
    """Write tensors that are in memory, by name; returns what the index says of them.

    Args:
        folder: of the checkpoint.
        values: the tensors.
        staging: buffers.
        suffix: of the file's name.

    Raises:
        CheckpointError: safetensors has no such dtype.
        swap.SwapError: an I/O error.
    """
    if not values:
        return [], {}
    file_name = f"values{suffix}.safetensors"
    members: dict[str, list[Member]] = {}
    for name, value in values.items():
        dtype = NAMES.get(str(value.dtype).removeprefix("torch."))
        if dtype is None:
            raise CheckpointError(f"{name}: expected a dtype that safetensors has but got {value.dtype}; convert it")
        members.setdefault(dtype, []).append(Member(name, dtype, tuple(value.shape)))
    order = sorted(members, key=lambda dtype: -ITEMSIZES[dtype])
    writer = FileWriter(folder / file_name, {"all": [m for dtype in order for m in members[dtype]]}, staging)
    try:
        for dtype in order:
            for member in members[dtype]:
                plain = values[member.key].detach().to("cpu").resolve_conj().resolve_neg().contiguous()
                writer.append("all", member.key, plain.data_ptr(), member.size_bytes)
        writer.finish()
    finally:
        staging.settle()
        writer.close()
    entries = []
    for dtype in order:
        for member in members[dtype]:
            numel = member.size_bytes // ITEMSIZES[dtype]
            place = Range(file_name, member.key, 0, numel, writer.sums[member.key].result())
            entries.append(Entry("value", member.key, dtype, member.shape, (place,) if numel else ()))
    return entries, {file_name: writer.stored}
