"""Saves and loads a run in DeepSpeed's terms, through the project's checkpoints; DeepSpeed's own are imported.

Owns what is saved beside the engine's state: the schedule, the samples, and the script's ``client_state``. Next:
:mod:`offload.integrations.deepspeed.engine`.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

from offload.checkpoint.foreign.found import Facts
from offload.checkpoint.foreign.zero import is_zero
from offload.checkpoint.format.folder import LATEST, Folder
from offload.checkpoint.format.index import FILE_NAME
from offload.optim.progress import Progress
from offload.optimizer import OffloadOptimizer
from offload.run_state import drawn_so_far, set_drawn

logger = logging.getLogger(__name__)

_MARK = "offload.deepspeed"  # in the client_state of a checkpoint that this file has made


class Loads(Protocol):
    """An engine, as far as loading needs one."""

    optimizer: OffloadOptimizer | None

    def resume_from(self, directory: Path, *, strict: bool, states: bool) -> Any:
        """Load a checkpoint of the project, with the optimizer's `states` or without; return its client state."""

    def import_from(self, path: Path, *, strict: bool, states: bool) -> Facts:
        """Load another program's checkpoint, likewise."""


@dataclasses.dataclass(frozen=True, slots=True)
class Loaded:
    """What was found beside the engine's state.

    Attributes:
        path: the folder.
        client_state: the script's.
        schedule: state of the schedule; None where none was saved.
        samples: seen so far; None where nothing says.
    """

    path: Path
    client_state: dict[str, Any]
    schedule: Mapping[str, Any] | None
    samples: int | None


def save_run(schedule: Any, samples: int, client_state: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a checkpoint keeps beside the engine's state."""
    saved = None if schedule is None else schedule.state_dict()
    return {_MARK: {"schedule": saved, "samples": samples}, "client_state": dict(client_state)}


def load_run(
    engine: Loads,
    run: Progress,
    directory: str | Path,
    tag: str | None,
    *,
    strict: bool,
    module_only: bool,
    states: bool,
    drop: Callable[[], None],
) -> Loaded | None:
    """Load a checkpoint into an engine.

    Args:
        engine: gets it.
        run: how far the engine has come.
        directory: of the checkpoints, or the folder of one.
        tag: None: the latest.
        strict: names have to be the same.
        module_only: steps, optimizer and random numbers stay as they are.
        states: load the optimizer's states and groups, too; else states begin anew, unless `module_only`.
        drop: forgets gradients that wait for a step.

    Returns:
        What is beside it; None, with a warning, where `tag` is None and there is no checkpoint.

    Raises:
        CheckpointError, ConfigError, StateError: see ``Engine.load_checkpoint`` and ``Engine.import_checkpoint``.
    """
    path = _find(Path(directory), tag)
    if path is None:
        logger.warning("load_checkpoint %s: no file %r there, so nothing was loaded; pass a tag", directory, LATEST)
        return None
    before, drawn = run.state_dict(), drawn_so_far()
    if is_zero(path):
        facts = engine.import_from(path, strict=strict, states=states)
        if not states and facts.taken is not None:
            run.load_state_dict(facts.run(facts.taken))
        loaded = Loaded(path, dict(facts.client_state), facts.scheduler, facts.samples)
    else:
        saved = engine.resume_from(path, strict=strict, states=states)
        if isinstance(saved, Mapping) and _MARK in saved:
            own = saved[_MARK]
            loaded = Loaded(path, dict(saved["client_state"]), own["schedule"], own["samples"])
        else:
            loaded = Loaded(path, saved, None, None)
    if not states:
        drop()
    if module_only:
        run.load_state_dict(before)
        set_drawn(drawn)
    elif not states and engine.optimizer is not None:
        _begin_anew(engine.optimizer, run.state_dict())
    return loaded


def _find(directory: Path, tag: str | None) -> Path | None:
    """Return the folder of a checkpoint; None where nobody says which."""
    if tag is None:
        if (directory / FILE_NAME).is_file():
            return directory
        if not (directory / LATEST).is_file():
            return None
        named = directory / (directory / LATEST).read_text(encoding="utf-8").strip()
        if is_zero(named):
            return named
    elif is_zero(directory / tag):
        return directory / tag
    return Folder(directory).find(tag)


def _begin_anew(optimizer: OffloadOptimizer, run: Mapping[str, Any]) -> None:
    """Let an optimizer have no states, and the groups that it has."""
    numbered, first = [], 0
    for group in optimizer.param_groups:
        last = first + len(group["params"])
        numbered.append({**group, "params": list(range(first, last))})
        first = last
    optimizer.load_state_dict({"state": {}, "param_groups": numbered, "run": run})
