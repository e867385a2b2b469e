"""Checkpoints of one engine: everything that decides on its next step, out of the tiers and into files, and back.

Owns the order of things. ``docs/checkpoints.md`` describes the files. What is saved beside the shards is said by
:mod:`offload.run_state`; the bytes are the business of :mod:`offload.checkpoint.saving` and
:mod:`offload.checkpoint.restoring`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from offload.background import PendingCheckpoint
from offload.build import Parts
from offload.checkpoint.columns import FILE_BYTES
from offload.checkpoint.copying import READS_AHEAD, copy_held
from offload.checkpoint.format.folder import Folder, check_tag
from offload.checkpoint.format.index import FILE_NAME, Entry, Index, StoredFile
from offload.checkpoint.format.nested import Encoder, decode
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.layout import Files
from offload.checkpoint.restoring import Restorer, read_tensor
from offload.checkpoint.saving import Contents, write_values
from offload.errors import BudgetError, CheckpointError
from offload.life import Life
from offload.memory.budget import Tier
from offload.optim import progress
from offload.run_state import VALUES, RunState, set_drawn
from offload.shards.held import Held
from offload.shards.manager import Manager
from offload.sizes import MIB, format_bytes
from offload.training import Training

LEAST_BUFFER_BYTES = MIB // 16
SPARE_BUFFERS = 12  # that are on their way while one per column fills
HELD_BUFFER_BYTES = MIB  # of what is read as nobody waits for it: requests are no larger
SPARE_READS = 6  # the same beside those that are being read


class Checkpoints:
    """Saves and loads one engine. See the module's text."""

    def __init__(self, state: RunState, parts: Parts, life: Life, training: Training) -> None:
        """Prepare.

        Args:
            state: of the run, beside the shards.
            parts: of the engine.
            life: whether it can be used.
            training: forgets gradients.
        """
        self._state = state
        self._parts = parts
        self._life = life
        self._training = training
        self._pending: PendingCheckpoint | None = None

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        tag: str | None,
        client_state: Any,
        keep: int | None,
        latest: bool = True,
        file_bytes: int = FILE_BYTES,
    ) -> Path:
        """Write a checkpoint; see ``Engine.save_checkpoint``. With `latest`, that file names it."""
        with self._begin(directory, tag, client_state, keep, file_bytes, hold=False) as save:
            return save.complete(latest=latest)

    def begin(
        self,
        directory: str | Path,
        *,
        tag: str | None,
        client_state: Any,
        keep: int | None,
        file_bytes: int = FILE_BYTES,
    ) -> PendingCheckpoint:
        """Write what lives in memory, hold what lives on NVMe, and have a thread do the rest."""
        with contextlib.ExitStack() as undo:
            save = undo.enter_context(self._begin(directory, tag, client_state, keep, file_bytes, hold=True))
            save.staging.step_back()
            last = undo.pop_all()

        def complete() -> Path:
            with last:
                return save.complete()

        try:
            self._pending = PendingCheckpoint(save.folder.path / save.tag, complete)
        except BaseException:  # no thread could be started
            last.__exit__(*sys.exc_info())
            raise
        return self._pending

    def settle(self) -> None:
        """Wait until no save is under way; raise why it failed, if nobody was told."""
        if self._pending is not None and self._life.here:
            self._pending.settle()
            self._pending = None

    def tell(self) -> None:
        """Raise why a save has failed that is over, if nobody was told."""
        if self._pending is not None:
            self._pending.tell()

    @contextlib.contextmanager
    def _begin(
        self,
        directory: str | Path,
        tag: str | None,
        client_state: Any,
        keep: int | None,
        file_bytes: int,
        *,
        hold: bool,
    ) -> Iterator[_Save]:
        """Yield a save of which all is written that cannot be held; it is undone if the block raises."""
        manager, parts = self._life.require_open(), self._parts
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep: expected a whole number of at least 1, or None, but got {keep!r}")
        tag = check_tag(f"step-{parts.steps.run.steps:08d}" if tag is None else tag)
        self.settle()
        parts.changes.adopt()
        manager.working.refuse_changes()
        parts.book.adopt()
        manager.gradients.await_copies()
        manager.forward.finish()  # what an optimizer's own class keeps is known when its updates are made
        encoder = Encoder()
        described = self._state.describe(encoder, {} if client_state is None else client_state)
        with contextlib.ExitStack() as last:
            held = last.enter_context(manager.hold()) if hold else None
            contents = Contents(manager, parts.book.waiting(), file_bytes, held)
            folder = Folder(directory)
            needed = contents.size_bytes + sum(tensor.nbytes for tensor in encoder.tensors.values())
            last.enter_context(folder.writing())
            sequence = folder.next_sequence()
            new = last.enter_context(folder.begin(tag, needed))
            buffers = contents.buffers + (READS_AHEAD + SPARE_READS if hold else SPARE_BUFFERS)
            staging = last.enter_context(self._staging(manager, buffers, held))
            files = Files(new, contents.now, staging)
            last.callback(files.close)
            contents.write(files)
            values = write_values(new, encoder.tensors, staging)
            index = Index(tag, sequence, (), {}, described)
            yield _Save(folder, tag, keep, new, staging, contents, held, files, values, index)

    # --- looking ----------------------------------------------------------------------------------------------------

    @staticmethod
    def newer(directory: str | Path, steps: int | None) -> Path | None:
        """Return the checkpoint in `directory` that has the most steps, if these are more than `steps`."""
        folder = Folder(directory)
        found = [(int(Index.read(folder.path / tag / FILE_NAME).contents["step"]), tag) for tag in folder.tags()]
        best = max(found, default=None)
        return None if best is None or (steps is not None and best[0] <= steps) else folder.path / best[1]

    # --- loading ----------------------------------------------------------------------------------------------------

    def load(self, directory: str | Path, *, tag: str | None, strict: bool) -> Any:
        """Read a checkpoint; see ``Engine.load_checkpoint``."""
        manager, parts = self._life.require_open(), self._parts
        self.settle()
        folder = Folder(directory)
        path = folder.find(None if tag is None else check_tag(tag))
        with folder.reading(path):
            index = Index.read(path / FILE_NAME)
            source = Source(path, index)
            manager.tiers.refuse_leased(manager.units)
            restorer = Restorer(manager, index, strict=strict)
            self._refuse_another_class(index, strict=strict)
            with self._staging(manager, BUFFERS) as staging:
                values = _read_values(source, index, staging)
                found = {name: decode(index.contents[name], values.__getitem__) for name in VALUES}
                groups = self._state.groups(found["optimizer"], strict=strict)
                parts.changes.forget_copies()
                parts.changes.adopt()
                self._training.zero_grad()
                manager.finish_updates()
                try:
                    restorer.read(source, staging, parts.steps.counts)
                    waiting = restorer.read_gradients(source, staging)
                    known_updates = {name: int(row["updates"]) for name, row in index.contents["parameters"].items()}
                    self._state.restore(found, known_updates, restorer.loaded, restorer.fresh)
                except BaseException as error:
                    self._life.lose(f"loading checkpoint {path} failed half way ({type(error).__name__}: {error})")
                    raise
                names = self._state.names()
                for where in waiting:
                    known = found["accumulation"]["gradients"][names[where]]
                    parts.book.restore(where, scale=float(known["scale"]), clip=float(known["clip"]))
                self._state.load_groups(groups)
        set_drawn(found["random"])
        return found["client_state"]

    def _refuse_another_class(self, index: Index, *, strict: bool) -> None:
        optimizer, saved = self._parts.steps.optimizer, index.contents["optimizer"]
        if optimizer is None or not strict:
            return
        if saved is None:
            raise CheckpointError(
                f"checkpoint {index.tag}: was saved by an engine without an optimizer; pass strict=False to begin anew "
                "with its parameters"
            )
        if (saved["records"] is None) != (self._parts.steps.counts.records is None):
            raise CheckpointError(
                f"checkpoint {index.tag}: was saved with {saved['class']}, whose states are kept otherwise than those "
                f"of {optimizer.made_of}; make the engine with the optimizer that it was saved with, or pass "
                "strict=False to load parameters only"
            )
        progress.check_state(decode(saved["run"], lambda name: torch.empty(0)))

    # --- what both need ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _staging(self, manager: Manager, buffers: int, held: Held | None = None) -> Iterator[Staging]:
        """Yield buffers within the budgets: those of the host, or of a device that is the host.

        Where something is `held`, its reads and those of the files share the queue of the swap store.
        """
        self._parts.activations.refund()
        tiers = [Tier.HOST, *([Tier.DEVICE] if manager.tiers.device.addressable else [])]
        aio = manager.copies.require_store().aio if held is not None and held.any else None
        size = BUFFER_BYTES if held is None else HELD_BUFFER_BYTES
        while True:
            for tier in tiers:
                budget = self._parts.budgets[tier]
                if budget.free_bytes >= buffers * size:
                    with budget.claim("checkpoint", buffers * size):
                        with Staging(buffers, size, deadline_s=manager.tiers.deadline_s, aio=aio) as staging:
                            yield staging
                    return
            if size == LEAST_BUFFER_BYTES:
                raise BudgetError(
                    f"cpu budget: a checkpoint needs {format_bytes(buffers * size)} of buffers but "
                    f'{format_bytes(self._parts.budgets[Tier.HOST].free_bytes)} are free; raise max_memory["cpu"]'
                )
            size //= 2


@dataclasses.dataclass(frozen=True, slots=True)
class _Save:
    """A save of which all is written but what is held."""

    folder: Folder
    tag: str
    keep: int | None
    new: Path
    staging: Staging
    contents: Contents
    held: Held | None
    files: Files
    values: tuple[list[Entry], dict[str, StoredFile]]
    index: Index

    def complete(self, *, latest: bool = True) -> Path:
        """Write what is held, give the folder its name, and delete what is not to be kept; in any thread."""
        ranges = self.files.flush()
        stored = dict(self.files.stored)
        if self.held is not None:
            further = Files(self.new, self.contents.held, self.staging)
            try:
                copy_held(self.held, self.contents.held, further, self.staging)
                ranges |= further.flush()
            finally:
                further.close()
            stored |= further.stored
            self.held.release()
        entries, others = self.values
        found = (*self.contents.columns.entries(ranges), *entries)
        index = dataclasses.replace(self.index, entries=found, files={**stored, **others})
        path = self.folder.publish(self.new, self.tag, index.to_json(), latest=latest)
        if self.keep is not None:
            self.folder.keep(self.keep)
        return path


def _read_values(source: Source, index: Index, staging: Staging) -> dict[str, torch.Tensor]:
    entries: list[Entry] = [entry for entry in index.entries if entry.role == "value"]
    return {entry.name: read_tensor(source, entry, staging) for entry in entries}
