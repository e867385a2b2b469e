"""The engine's calls that outlive the process: checkpoints, durable runs, and the runs of other programs.

Owns what they promise to users, who call them as methods of :class:`offload.Engine`, and what a new engine goes on
with. The work is done by :mod:`offload.checkpoints`, :mod:`offload.durable` and :mod:`offload.importing`. Next:
:mod:`offload.engine`.
"""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any, Literal, overload

from torch import nn

from offload.background import PendingCheckpoint
from offload.build import Parts
from offload.checkpoint.foreign.found import Facts
from offload.checkpoint.format.folder import Folder, first_whole
from offload.checkpoint.format.index import DamagedError
from offload.checkpoints import Checkpoints
from offload.config import Config
from offload.distributed.together import Together
from offload.durable import DurableRun, Resumed
from offload.errors import CheckpointError, ConfigError, StateError
from offload.importing import import_checkpoint
from offload.life import Life
from offload.run_state import RunState

logger = logging.getLogger(__name__)


class EngineRuns:
    """The part of :class:`offload.Engine` that saves and goes on. Its constructor makes the attributes."""

    module: nn.Module
    config: Config
    _parts: Parts
    _life: Life
    _checkpoints: Checkpoints
    _durable: DurableRun | None
    _resumed: Resumed | None

    @overload
    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        tag: str | None = None,
        client_state: Any = None,
        keep: int | None = None,
        wait: Literal[True] = True,
    ) -> Path: ...

    @overload
    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        tag: str | None = None,
        client_state: Any = None,
        keep: int | None = None,
        wait: Literal[False],
    ) -> PendingCheckpoint: ...

    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        tag: str | None = None,
        client_state: Any = None,
        keep: int | None = None,
        wait: bool = True,
    ) -> Path | PendingCheckpoint:
        """Save everything that decides on the next step into a folder of `directory`, within the budgets.

        These are parameters, masters, moments as they are stored, step counts, parameter groups, the loss scale, the
        position in an accumulation with the gradients that wait, buffers, the random generators of torch, Python and
        NumPy, and `client_state`. The files are safetensors and one JSON index. Until the folder is complete and on the
        drive it has another name; ``latest`` is written last. So a save that ends early leaves the ones before.

        With ``wait=False``, what lives on NVMe is held as it is and copied while training goes on, which needs the
        option ``background_checkpoints``. What lives in memory is written before this returns. The engine saves one
        checkpoint at a time: the next save, a load and :meth:`close` wait for it.

        Several ranks call this together, with the same directory, tag, `keep` and `wait`. Each writes its slices;
        generators, buffers and `client_state` are each rank's own. If one fails, no rank has the checkpoint.

        Args:
            directory: of the checkpoints; made where it is missing.
            tag: name of the folder; None: ``step-`` and the number of steps. One that is there is replaced.
            client_state: of schedulers, samplers and the like: nested dicts, lists, tuples, numbers, texts, bytes and
                tensors. :meth:`load_checkpoint` returns it. None: of a durable run, what was assigned for this step.
            keep: so many checkpoints stay in `directory`, the latest ones; None: all.
            wait: until it is complete.

        Returns:
            The folder; with ``wait=False`` what tells when it is complete. Its ``wait`` raises what goes wrong
            meanwhile; if nobody waits, the engine's next call that saves, loads, drains or closes does.

        Raises:
            BudgetError: the budgets have no room for the smallest buffers, or the swap files for what is held.
            CheckpointError: `client_state` has something else, a name cannot be one, another save is under way in
                `directory`, it is a checkpoint itself, or it cannot be written to.
            StateError: the engine is closed or unusable, or parameters or gradients are gathered; or a durable run's
                ``client_state`` was assigned for the step before, and not for the last one.
            RanksError: another rank has failed, ended, not come, or has something else. Older checkpoints stay.
            swap.SwapFullError: the drive has no room. Older checkpoints stay in every case.
            swap.SwapError: another I/O error.
        """
        own = self._durable if client_state is None else None
        given = (lambda: client_state) if own is None else own.client_state_of_step
        save = self._checkpoints.save if wait else self._checkpoints.begin
        return save(directory, tag=tag, client_state=given, keep=keep)

    def load_checkpoint(self, directory: str | Path, *, tag: str | None = None, strict: bool = True) -> Any:
        """Go on where :meth:`save_checkpoint` was called, with the same bits, whatever the budgets are and were.

        Every byte is compared with its checksum. What waits for the next step is forgotten first. Several ranks call
        this together, however many have saved it; each reads what it keeps.

        Args:
            directory: of the checkpoints, or the folder of one.
            tag: which; None: the latest.
            strict: refuse what is missing or left over, of parameters, buffers and extra states, and what would lose
                bits. False loads what both have: other optimizers' states begin anew, groups of another class stay as
                they are, and other dtypes of parameters and states are converted. Warnings name parameters, groups,
                buffers and extra states that stay as they are.

        Returns:
            What was saved as ``client_state``; an empty dict where nothing was.

        Raises:
            CheckpointError: there is none, it is damaged (names file, tensor and bytes), of a newer format, or does not
                fit this model, optimizer or ``state_dtype``.
            ConfigError: the parameter groups do not fit.
            RanksError: another rank has failed, ended, not come, or loads another checkpoint.
            StateError: the engine is closed or unusable, or parameters are in use.
            swap.SwapError: an I/O error. If it, or the damage, comes while parameters are written, the engine says so
                at each call, until a load with ``strict`` succeeds; in all other cases nothing was changed.
        """
        client_state = self._checkpoints.load(directory, tag=tag, strict=strict)
        if self._durable is not None:
            self._durable.take_over(client_state)
            self._durable.end_step()
        return client_state

    def wait_for_ranks(self, where: str = "wait_for_ranks", error: BaseException | None = None) -> None:
        """Wait until all ranks have come here, and take part in what they need until then; nothing in one process.

        An engine that is closed waits for nobody.

        With ``stage=3``, call it on all ranks before a collective of your own that may find another rank inside a
        forward, and behind what one rank does alone: such a rank needs the others, who have to be where they meet.

        Args:
            where: the same on all ranks; for errors.
            error: why this rank cannot go on: it is raised here, and told to the others.

        Raises:
            RanksError: another rank has failed, ended, not come, or is elsewhere.
            StateError: the engine is unusable.
        """
        if self._life.closed and error is None:
            return
        if error is None:
            self._life.require_open()
        self._parts.ranks.agree(where, error=error)

    def import_checkpoint(self, path: str | Path, *, strict: bool = True) -> Facts:
        """Go on with a run that another program has saved: weights, masters, optimizer states, step counts, loss scale.

        Several ranks call this together; each keeps its slices of what it reads.

        Args:
            path: a file of ``torch.save``, or a folder of the Hugging Face trainer, of Accelerate, of DeepSpeed with
                ZeRO-1, 2 or 3, or of torch.distributed.checkpoint. Pickles are read without running what they name.
            strict: names and an optimizer's state must all be there, and no others.

        Returns:
            The small facts: which program, steps, epoch, and states of schedules and random numbers, which are yours to
            load.

        Raises:
            ConfigError: a file is missing, damaged or unknown, or does not fit the model or the optimizer. Nothing was
                loaded.
            RanksError: another rank has failed, is elsewhere, ended or not come, or reads something else.
            StateError: parameters are in use, or the engine is closed. Nothing was loaded.
            swap.SwapError: an I/O error of the drive. If it, or an unreadable file, comes when something was written,
                the engine says so at each call, until this one is repeated or a checkpoint is loaded, with ``strict``.
        """
        return import_checkpoint(path, self.module, self._parts, self._life, strict=strict)

    # --- durable runs -----------------------------------------------------------------------------------------------

    @property
    def resumed(self) -> Resumed | None:
        """What this engine has found in its run directory, or among its checkpoints; None where it began anew."""
        return self._resumed

    @property
    def client_state(self) -> Any:
        """What the user keeps with each commit of a durable run: the data position, states of schedulers.

        Assign it after each step. What is assigned after ``step()``, and before the next forward that records
        gradients, is committed with that step. Reading it gives a fresh copy.

        Raises:
            StateError: the engine has no run directory.
            CheckpointError: what is assigned has something else than nested dicts, lists, tuples, numbers, texts, bytes
                and tensors; names it.
        """
        return self._require_durable().client_state

    @client_state.setter
    def client_state(self, value: Any) -> None:
        self._require_durable().client_state = value

    def _require_durable(self) -> DurableRun:
        if self._durable is None:
            raise StateError(
                "client_state: expected a durable run but the engine has no run_dir; pass run_dir=..., or use "
                "client_state of engine.save_checkpoint"
            )
        return self._durable

    def _begin_run(self, optimizer: object) -> DurableRun | None:
        if self.config.run_dir is None:
            return None
        if optimizer is None:
            raise ConfigError("run_dir: expected an engine that trains but got no optimizer; leave run_dir out")
        return DurableRun(str(self.config.paths()[0]))

    def _take_up(self, state: RunState, begin: float) -> Resumed | None:
        """Go on with what is there, the newest of run directory and checkpoints."""
        durable = self._durable
        if durable is None:
            return None
        durable.open(state, self._parts, self._life)
        with Together(self._parts.ranks, "going on with a run") as together:
            source = self._find_source(durable)
            together.end()
        if source is None:
            logger.info("run_dir %s: there was no run; a new one begins", self.config.paths()[0])
            self._tell_of_checkpoints()
            return None
        logger.info("run_dir %s: goes on from step %d, of %s", self.config.paths()[0], self._steps, source)
        return Resumed(self._steps, durable.client_state, source, time.perf_counter() - begin)

    def _find_source(self, durable: DurableRun) -> str | None:
        """Restore what the engine goes on with; returns where that was, None where there is nothing."""
        source = str(self.config.paths()[0]) if durable.restore() else None
        if self.config.checkpoint_dir is not None and self.config.resume is not False:
            source = self._load_newer(self.config.checkpoint_dir, source)
        if source is None and self.config.resume is True:
            raise ConfigError(
                f"run_dir {self.config.paths()[0]}: resume=True expects a run there, or a checkpoint, but there is "
                'none; pass resume="auto" to begin one'
            )
        return source

    def _load_newer(self, directory: str | Path, run: str | None) -> str | None:
        """Load the newest whole checkpoint, if it has more steps than the `run` that was found; returns the source.

        Raises:
            CheckpointError: all are damaged, and there is no run; or the run's content was written over meanwhile.
        """
        steps = self._steps
        newer = self._checkpoints.newer(directory, None if run is None else steps)
        if not newer:
            return run
        if self._parts.ranks.world > 1:  # one that is damaged for one rank is for all
            self.load_checkpoint(newer[0])
            return str(newer[0])
        try:
            return str(first_whole(newer, self.load_checkpoint)[0])
        except DamagedError as error:
            if run is None:
                raise
            if self._life.unusable is None:
                return run
            raise CheckpointError(
                f"run_dir {run}: expected to go on with a checkpoint of more than its {steps} steps, but {error}. Or "
                f"delete {newer[-1]}: then the run goes on from step {steps}"
            ) from error

    def _tell_of_checkpoints(self) -> None:
        """Log that a run begins anew beside checkpoints, which nobody was told to look at."""
        directory = self.config.paths()[0]
        tags = [] if self.config.checkpoint_dir is not None or self.config.resume is False else Folder(directory).tags()
        if tags:
            logger.warning(
                "run_dir %s: begins anew beside checkpoint %s; pass checkpoint_dir=%r to go on with it",
                directory,
                tags[-1],
                str(directory),
            )

    @property
    def _steps(self) -> int:
        return self._parts.steps.run.steps
