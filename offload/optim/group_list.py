"""The list of param groups, which keeps the numbers of a run that goes on when its schedule is made.

Making a schedule of ``torch.optim.lr_scheduler`` sets learning rates, and loading it does not set them again. In torch,
the schedule is made first and the optimizer loaded then. An engine with a ``run_dir`` loads its groups when it is made,
and before that there is no ``engine.optimizer`` to make a schedule of. So the list puts the numbers of the run back.

Owns who has set a number: a schedule reads the groups after it has set them. What somebody else has set stays. Next:
:mod:`offload.optimizer`.
"""

from __future__ import annotations

import logging
import sys
import weakref
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

logger = logging.getLogger(__name__)

_SET_BY_SCHEDULES = ("lr", "betas", "momentum", "initial_lr", "max_lr", "min_lr")


class GroupList(list[dict[str, Any]]):
    """Param groups. See the module's text."""

    def __init__(self, groups: Iterable[dict[str, Any]]) -> None:
        super().__init__(groups)
        self._of_run: list[dict[str, Any]] | None = None  # numbers by group
        self._set: list[dict[str, Any]] | None = None  # those that the last schedule has left
        self._schedules: weakref.WeakSet[LRScheduler] = weakref.WeakSet()

    def begin_run(self) -> None:
        """Take the numbers in the groups for those of a run that goes on."""
        self.end_run()
        self._of_run = self._numbers()

    def end_run(self) -> None:
        """Let all numbers be as they are: the run has taken a step."""
        self._of_run = self._set = None
        self._schedules.clear()

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if self._of_run is not None:
            self._note_reader(sys._getframe(1), self._of_run)
        return super().__iter__()

    def __getitem__(self, index: Any) -> Any:
        if self._of_run is not None:
            self._note_reader(sys._getframe(1), self._of_run)
        return super().__getitem__(index)

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (list(self),)  # a copy is no list of an optimizer

    def _note_reader(self, reader: FrameType, of_run: list[dict[str, Any]]) -> None:
        """See what a schedule has set; for anybody else, put the numbers back if a schedule was loaded."""
        schedule = _schedule_of(reader)
        if schedule is not None:
            self._schedules.add(schedule)
            self._set = self._numbers()
        elif self._set is not None and any(_goes_on(schedule, of_run) for schedule in self._schedules):
            self._put_back(of_run, self._set)
            self._set = None

    def _put_back(self, of_run: list[dict[str, Any]], was_set: list[dict[str, Any]]) -> None:
        every = zip(super().__iter__(), self._numbers(), was_set, of_run, strict=False)  # a group may have been added
        for position, (group, now, left, run) in enumerate(every):
            for name, value in run.items():
                if now.get(name) == value or now.get(name) != left.get(name):
                    continue
                logger.info("param group %d: %s stays %r, as the run has it", position, name, value)
                if isinstance(group.get(name), torch.Tensor):
                    group[name].fill_(value)
                else:
                    group[name] = value

    def _numbers(self) -> list[dict[str, Any]]:
        return [
            {name: _number(group[name]) for name in _SET_BY_SCHEDULES if name in group} for group in super().__iter__()
        ]


def _number(value: Any) -> Any:
    return value.item() if isinstance(value, torch.Tensor) else value


def _schedule_of(reader: FrameType) -> LRScheduler | None:
    """Return the schedule one of whose methods reads, or has called a function that does."""
    for frame in (reader, reader.f_back):
        if frame is None or frame.f_code.co_varnames[:1] != ("self",):
            continue
        seen = frame.f_locals
        owner = seen.get("self")
        if sys.version_info < (3, 13):
            seen.clear()  # the frame has this copy, and would keep alive what is in it
        if isinstance(owner, LRScheduler):
            return owner
    return None


def _goes_on(schedule: LRScheduler, of_run: list[dict[str, Any]]) -> bool:
    """Tell whether a schedule was loaded, and says what the run has."""
    try:
        was_loaded, rates = schedule.last_epoch > 0, schedule.get_last_lr()
    except AttributeError:  # a chain has no epoch, and what is being made has no rates
        return False
    return was_loaded and [_number(rate) for rate in rates] == [numbers.get("lr") for numbers in of_run]
