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

    def resume_from(self, directory: Path, tag: str | None, *, strict: bool) -> Any:
        """Load a checkpoint of the project; return its client state."""

    def import_checkpoint(self, path: str | Path, *, strict: bool = True) -> Facts:
        """Load another program's checkpoint."""


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
        module_only: steps, groups and random numbers stay as they are.
        states: load the optimizer's states and groups, too; else they begin anew.
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
    groups = [] if engine.optimizer is None else [_options(group) for group in engine.optimizer.param_groups]
    if is_zero(path):
        facts = engine.import_checkpoint(path, strict=strict)
        loaded = Loaded(path, dict(facts.client_state), facts.scheduler, facts.samples)
    else:
        saved = engine.resume_from(path, None, strict=strict)
        if isinstance(saved, Mapping) and _MARK in saved:
            own = saved[_MARK]
            loaded = Loaded(path, dict(saved["client_state"]), own["schedule"], own["samples"])
        else:
            loaded = Loaded(path, saved, None, None)
    if not states and engine.optimizer is not None:
        drop()
        _begin_anew(engine.optimizer, groups, before if module_only else run.state_dict())
    if module_only:
        set_drawn(drawn)
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


def _options(group: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in group.items() if name != "params"}


def _begin_anew(optimizer: OffloadOptimizer, groups: list[dict[str, Any]], run: Mapping[str, Any]) -> None:
    """Let an optimizer have no states, and groups with these options."""
    numbered, first = [], 0
    for group, options in zip(optimizer.param_groups, groups, strict=True):
        last = first + len(group["params"])
        numbered.append({**options, "params": list(range(first, last))})
        first = last
    optimizer.load_state_dict({"state": {}, "param_groups": numbered, "run": run})
