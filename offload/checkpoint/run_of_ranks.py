"""A durable run of several ranks: each has folders of its own, and all go on from the newest step that all have.

Each rank commits by itself. Whoever ends them may do so between two commits, so one rank may have a step that another
has not: it goes back to the one before. Owns the names of the folders, and which step that is. Next:
:mod:`offload.shards.commits` keeps what is gone back to.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from pathlib import Path

from offload.checkpoint.run_files import FILE_NAME
from offload.config import Config
from offload.distributed.ranks import Ranks
from offload.distributed.records import MOST_NUMBERS
from offload.distributed.together import Together
from offload.errors import ConfigError
from swap import go_back, marks_of

_FOLDER = re.compile(r"rank-(\d+)-of-(\d+(?:x\d+)?)")


def run_of_rank(config: Config, ranks: Ranks) -> Config:
    """Return options with this rank's own folders of a durable run, whose last commit is one that all ranks have.

    Raises:
        ConfigError: the run is one of another number of ranks, or they have no commit in common.
        RanksError: another rank has failed, is elsewhere, ended or not come.
        swap.SwapError: a folder cannot be read or written, is damaged, or somebody uses it.
    """
    if config.run_dir is None:
        return config
    paths = config.paths()
    nodes = ranks.owners.world
    shape = f"{nodes}x{ranks.world // nodes}" if nodes > 1 else str(ranks.world)
    if ranks.world == 1:
        _refuse_others(paths[0], shape)
        return config
    with Together(ranks, "opening run_dir") as together:
        _refuse_others(paths[0], shape)
        own = tuple(path / f"rank-{ranks.rank}-of-{shape}" for path in paths)
        marks = together.meet(numbers=marks_of(own)[-MOST_NUMBERS:]).numbers
        common = set(map(int, marks[0])).intersection(*marks)
        if not common:
            raise ConfigError(
                f"run_dir {paths[0]}: expected a commit that all ranks have but got {_told(marks)}; restore the "
                "folder of the rank that is behind, or name an empty directory and load a checkpoint"
            )
        go_back(own, max(common))
        together.end()
    return dataclasses.replace(config, run_dir=own)


def _refuse_others(path: Path, shape: str) -> None:
    """Refuse the run of another number of ranks, or of another number of nodes: ``"4"``, or ``"2x2"``."""
    found = {"1"} if (path / FILE_NAME).is_file() else set()
    if path.is_dir():
        found |= {match[2] for one in path.iterdir() if (match := _FOLDER.fullmatch(one.name))}
    for others in sorted(found - {shape}):
        raise ConfigError(
            f"run_dir {path}: expected a run of {shape} rank{'s' * (shape != '1')} but got one of {others}; go on with "
            f"{others}, or save a checkpoint with them, and load it in a run in another directory"
        )


def _told(marks: Sequence[Sequence[float]]) -> str:
    return ", ".join(f"{[int(mark) for mark in row]} on rank {rank}" for rank, row in enumerate(marks))
