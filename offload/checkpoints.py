"""Checkpoints of one engine: everything that decides on its next step, out of the tiers and into files, and back.

Owns the order of things. ``docs/checkpoints.md`` describes the files. What is saved beside the shards is said by
:mod:`offload.run_state`; the bytes are the business of :mod:`offload.checkpoint.saving` and
:mod:`offload.checkpoint.restoring`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch

from offload.background import PendingCheckpoint
from offload.build import Parts
from offload.checkpoint.blank import make_blank
from offload.checkpoint.columns import FILE_BYTES
from offload.checkpoint.copying import READS_AHEAD, copy_held
from offload.checkpoint.format.folder import Folder, check_tag, new_token
from offload.checkpoint.format.index import FILE_NAME, Entry, Index, StoredFile
from offload.checkpoint.format.nested import Encoder, decode
from offload.checkpoint.format.parts import join_parts, write_part
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.layout import Files
from offload.checkpoint.restoring import Restorer, read_tensor
from offload.checkpoint.saving import Contents, suffix_of, write_values
from offload.distributed.ranks import Fact, Ranks
from offload.distributed.together import Together
from offload.errors import BudgetError, CheckpointError, RanksError
from offload.life import Life
from offload.memory.budget import Tier
from offload.optim import progress
from offload.run_state import VALUES, RunState
from offload.several import facts_of_step
from offload.shards.held import Held
from offload.shards.manager import Manager
from offload.sizes import MIB, format_bytes
from offload.training import Training

LEAST_BUFFER_BYTES = MIB // 16
SPARE_BUFFERS = 28  # that are on their way while one per column fills
HELD_BUFFER_BYTES = MIB  # of what is read as nobody waits for it: requests are no larger
SPARE_READS = 6  # the same beside those that are being read
PATIENCE = 144  # copies in the background: so many times longer may ranks wait for each other there


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
        self._beside: Ranks | None = None  # whom threads that copy meet

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        tag: str | None,
        client_state: Callable[[], Any],
        keep: int | None,
        latest: bool = True,
        file_bytes: int = FILE_BYTES,
        beside: Callable[[Path], None] | None = None,
    ) -> Path:
        """Write a checkpoint; see ``Engine.save_checkpoint``. With `latest`, that file names it.

        Rank 0 calls `beside` with the folder before that has its name: to write and flush files of others.
        """
        deferral = self._parts.hooks.deferral
        with deferral, self._begin(directory, tag, client_state, keep, file_bytes, hold=False) as save:
            path = save.complete(latest=latest, beside=beside)
        if save.ranks.rank == 0 and save.folder.given_up():
            with contextlib.suppress(RuntimeError):  # no thread could be started: the next save deletes it
                self._pending = PendingCheckpoint(path, save.folder.sweep)
        return path

    def begin(
        self,
        directory: str | Path,
        *,
        tag: str | None,
        client_state: Callable[[], Any],
        keep: int | None,
        file_bytes: int = FILE_BYTES,
    ) -> PendingCheckpoint:
        """Write what lives in memory, hold what lives on NVMe, and have a thread do the rest."""
        with self._parts.hooks.deferral:
            return self._begin_copy(directory, tag, client_state, keep, file_bytes)

    def _begin_copy(
        self, directory: str | Path, tag: str | None, client_state: Callable[[], Any], keep: int | None, file_bytes: int
    ) -> PendingCheckpoint:
        with contextlib.ExitStack() as undo:
            save = undo.enter_context(self._begin(directory, tag, client_state, keep, file_bytes, hold=True))
            save.staging.step_back()
            last = undo.pop_all()

        def complete() -> None:
            try:
                with last:
                    save.complete()
            except RanksError as error:  # told at the next call, which is this rank's own
                raise CheckpointError(
                    f"checkpoint {save.folder.path / save.tag}: expected all ranks to complete it but {error}; save it "
                    "again, or load one from before"
                ) from error
            if save.ranks.rank == 0:
                save.folder.sweep()

        try:
            self._pending = PendingCheckpoint(save.folder.path / save.tag, complete)
        except BaseException:  # no thread could be started
            last.__exit__(*sys.exc_info())
            raise
        return self._pending

    def settle(self, pause: Callable[[], None] = lambda: None) -> None:
        """Wait until no save is under way, calling `pause`; raise why it failed, if nobody was told."""
        if self._pending is not None and self._life.here:
            self._pending.settle(pause)
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
        client_state: Callable[[], Any],
        keep: int | None,
        file_bytes: int,
        *,
        hold: bool,
    ) -> Iterator[_Save]:
        """Yield a save of which all is written that cannot be held; it is undone if the block raises."""
        ranks = self._parts.ranks
        with contextlib.ExitStack() as last, Together(ranks, "save_checkpoint") as together:
            tag = self._prepare(tag, keep)
            manager, parts = self._life.require_open(), self._parts
            encoder = Encoder()
            described = self._describe(encoder, client_state(), ranks)
            held = last.enter_context(manager.hold()) if hold else None
            contents = Contents(manager, parts.book.waiting(), file_bytes, held)
            folder = Folder(directory)
            needed = contents.size_bytes + sum(tensor.nbytes for tensor in encoder.tensors.values())
            said = together.meet(self._facts(manager, tag, keep, wait=not hold), [needed, new_token()]).numbers
            needed, token = sum(int(size) for size, _ in said), int(said[0][1])
            sequence = 0
            if ranks.rank == 0:
                last.enter_context(folder.writing())
                sequence = folder.next_sequence()
                new = last.enter_context(folder.begin(tag, needed, token))
            sequence = int(together.meet(numbers=[sequence]).numbers[0][0])
            if ranks.rank:
                new = folder.join(tag, token)
            buffers = contents.buffers + (READS_AHEAD + SPARE_READS if hold else SPARE_BUFFERS)
            staging = last.enter_context(self._staging(manager, buffers, held))
            files = Files(new, contents.now, staging)
            last.callback(files.close)
            contents.write(files)
            values = write_values(new, encoder.tensors, staging, suffix_of(ranks))
            index = Index(tag, sequence, (), {}, described)
            if hold:
                together.end()  # training goes on
                together = last.enter_context(Together(self._ranks_beside(), f"checkpoint {tag}"))
            yield _Save(folder, tag, keep, new, staging, contents, held, files, values, index, ranks, together)

    def _ranks_beside(self) -> Ranks:
        """Return the ranks for a thread that copies, whose meetings training does not see."""
        if self._beside is None:
            self._beside = self._parts.ranks.beside("checkpoint", patience=PATIENCE)
        return self._beside

    def _prepare(self, tag: str | None, keep: int | None) -> str:
        """Let everything be as it is to be saved; returns the tag."""
        manager, parts = self._life.require_open(), self._parts
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep: expected a whole number of at least 1, or None, but got {keep!r}")
        tag = check_tag(f"step-{parts.steps.run.steps:08d}" if tag is None else tag)
        self.settle(manager.safe_point.check)
        parts.changes.adopt()
        manager.bound.refuse_changes()
        parts.book.adopt()
        manager.gradients.await_copies()
        manager.forward.finish()  # what an optimizer's own class keeps is known when its updates are made
        return tag

    def _describe(self, encoder: Encoder, client_state: Any, ranks: Ranks) -> dict[str, Any]:
        client_state = {} if client_state is None else client_state
        if ranks.rank == 0:
            return self._state.describe(encoder, client_state)
        return self._state.describe_own(encoder, client_state, prefix=f"rank {ranks.rank} ")

    def _facts(self, manager: Manager, tag: str, keep: int | None, *, wait: bool) -> dict[str, Fact]:
        steps = self._parts.steps
        facts: dict[str, Fact] = {"tag": tag, "keep": keep, "wait": wait, "the number of steps": steps.run.steps}
        if steps.optimizer is None or steps.step is None:
            return facts
        done = steps.step.micro_batches.done
        factors = self._parts.book.factors
        return facts | facts_of_step(manager, factors, steps.optimizer.param_groups, steps.run, done)

    # --- looking ----------------------------------------------------------------------------------------------------

    @staticmethod
    def newer(directory: str | Path, steps: int | None) -> list[Path]:
        """Return the checkpoints in `directory` that have more than `steps`, the one with the most first.

        Raises:
            CheckpointError: all are damaged, and there is no run to go on with instead.
        """
        folder = Folder(directory)
        folder.tell_unfinished()
        found, damage = [], None
        for tag in folder.tags():
            try:
                found.append((int(Index.read(folder.at(tag) / FILE_NAME).contents["step"]), tag))
            except CheckpointError as error:  # tags() has told of it
                damage = error
        if damage is not None and not found and steps is None:
            raise damage
        return [folder.at(tag) for taken, tag in sorted(found, reverse=True) if steps is None or taken > steps]

    # --- loading ----------------------------------------------------------------------------------------------------

    def load(self, directory: str | Path, *, tag: str | None, strict: bool, states: bool = True) -> Any:
        """Read a checkpoint; see ``Engine.load_checkpoint``.

        Without `states`, those of the optimizer, its groups and an accumulation are left out, whatever was saved. They
        stay as they are, and gradients are dropped.
        """
        with self._parts.hooks.deferral, Together(self._parts.ranks, "load_checkpoint") as together:
            with self._life.refilling(f"loading a checkpoint of {directory}", strict=strict and states) as again:
                return self._load(directory, tag, together, strict=strict, states=states, again=again)

    def _load(
        self, directory: str | Path, tag: str | None, together: Together, *, strict: bool, states: bool, again: bool
    ) -> Any:
        manager, parts = self._life.require_open(), self._parts
        self.settle(manager.safe_point.check)
        with Folder(directory).reading(None if tag is None else check_tag(tag)) as path:
            index = Index.read(path / FILE_NAME)
            source = Source(path, index)
            manager.tiers.refuse_leased(manager.units)
            restorer = Restorer(manager, index, strict=strict, states=states)
            self._refuse_another_class(index, strict=strict and states)
            self._state.refuse_other_wrappers(index.contents.get("wrappers", {}), index.tag)
            with self._staging(manager, BUFFERS) as staging:
                contents = index.contents | self._state.own_of(index.contents, parts.ranks, index.tag)
                values = {entry.name: entry for entry in index.entries if entry.role == "value"}
                found = {
                    name: decode(contents[name], lambda key: read_tensor(source, values[key], staging))
                    for name in VALUES
                }
                imported = index.contents["random"] is None
                self._state.refuse_other_buffers(found, index.tag, strict=strict, imported=imported)
                if not states:
                    found["accumulation"] = {"gradients": {}, "micro_batches": None}
                found["accumulation"] = self._state.accumulation(found["accumulation"], index.tag, strict=strict)
                if found["accumulation"]["gradients"]:
                    restorer.refuse_narrow_gradients()
                groups = self._state.groups(found["optimizer"], strict=strict) if states else None
                together.meet({"strict": strict, "states": states, "the checkpoint": _digest(path)})
                parts.changes.forget_copies()
                parts.changes.adopt()
                self._training.zero_grad()
                manager.finish_updates()
                if again:
                    make_blank(manager, parts.steps.counts)
                restorer.read(source, staging, parts.steps.counts)
                waiting = restorer.read_gradients(source, staging) if found["accumulation"]["gradients"] else []
                known_updates = {name: int(row["updates"]) for name, row in index.contents["parameters"].items()}
                self._state.restore(found, known_updates, restorer.loaded, restorer.fresh, states=states)
                names = self._state.names()
                for where in waiting:
                    known = found["accumulation"]["gradients"][names[where]]
                    parts.book.restore(where, scale=float(known["scale"]), clip=float(known["clip"]))
                self._state.load_groups(groups)
            if manager.tiers.shared is not None:
                manager.tiers.shared.note_loaded()
            together.end()
            if manager.commits is not None:
                manager.commits.pass_on()
        self._state.set_drawn(found["random"])
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
        if saved["class"] != optimizer.made_of:  # it may know the same states
            raise CheckpointError(
                f"checkpoint {index.tag}: was saved with {saved['class']} but this engine has {optimizer.made_of}; "
                "make it with the optimizer that it was saved with, or pass strict=False to load what both have"
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
    ranks: Ranks
    together: Together

    def complete(self, *, latest: bool = True, beside: Callable[[Path], None] | None = None) -> Path:
        """Write what is held, give the folder its name, and give up what is not to be kept; in any thread."""
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
        if self.ranks.rank:
            write_part(self.folder, self.new, self.ranks.rank, index)
        self.together.meet()
        if self.ranks.rank == 0:
            index = join_parts(self.folder, self.new, index, self.ranks.world)
            if beside is not None:
                beside(self.new)
            self.folder.publish(self.new, self.tag, index.to_json(), latest=latest)
            if self.keep is not None:
                self.folder.keep(self.keep)
        self.together.end()
        return self.folder.path / self.tag


def _digest(path: Path) -> str:
    """Return what tells a checkpoint from others: its index has the checksum of every byte."""
    return hashlib.blake2b((path / FILE_NAME).read_bytes(), digest_size=16).hexdigest()
