"""Tries what would make a batch fit: a plan, and a micro-batch on shapes. Nothing of either is done twice.

Owns what has been tried. Next: :mod:`offload.remedies` has the changes, :mod:`offload.predicting` asks for them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any

from torch import nn

from offload.config import Config
from offload.errors import BudgetError, ConfigError
from offload.forecast import room_bytes
from offload.memory.budget import Tier
from offload.planning.plan import Plan
from offload.planning.work import is_ids
from offload.rehearsing import Rehearsals
from offload.remedies import Change

MANY_TOKENS = 1 << 17  # of a micro-batch: the loss of more takes long, chunk by chunk
FEWER = 8

Planner = Callable[[Config, Mapping[Tier, int]], Plan]
Made = Callable[[Change], tuple[nn.Module | None, nn.Module]]


class Trials:
    """Tells of changes whether a batch fits with them."""

    def __init__(self, asked: Config, plan: Plan, planner: Planner, made: Made, rehearsals: Rehearsals) -> None:
        """Begin with what is known.

        Args:
            asked: what was asked for.
            plan: of that.
            planner: makes a plan of options and budgets; raises as :func:`offload.plan` does.
            made: returns the model of a change, and before it one that needs no more than that, if there is one. Each
                time they are the same objects.
            rehearsals: of micro-batches.
        """
        self._planner = planner
        self._made = made
        self._rehearsals = rehearsals
        self._plans: list[tuple[Config, Mapping[Tier, int], Plan | None]] = [(asked, plan.request.budgets, plan)]

    def fits(self, change: Change) -> bool:
        """Tell whether a batch fits after a change."""
        with contextlib.suppress(ConfigError):  # no blocks to compute again, no such loss
            plan, fewer = self._plan(change), _fewer(change.batch)
            if plan is None or (fewer is not None and not self.fits(dataclasses.replace(change, batch=fewer))):
                return False
            least, model = self._made(change)
            return not self._is_short(least, change, plan) and self._holds(model, change, plan)
        return False

    def _is_short(self, least: nn.Module | None, change: Change, plan: Plan) -> bool:
        """Tell whether it does not fit, by a smaller model, whose micro-batch takes less time."""
        with contextlib.suppress(ConfigError):  # that cannot be told of the smaller one
            return least is not None and not self._holds(least, change, plan)
        return False

    def _holds(self, model: nn.Module, change: Change, plan: Plan) -> bool:
        return self._rehearsals.held_bytes(model, change.batch, plan, change.asked.activations) <= room_bytes(plan)

    def _plan(self, change: Change) -> Plan | None:
        """Return the plan; None if the budgets have no room for parameters, gradients and states."""
        for asked, budgets, plan in self._plans:
            if (asked, budgets) == (change.asked, change.budgets):
                return plan
        found = None
        with contextlib.suppress(BudgetError):
            found = self._planner(change.asked, change.budgets)
        self._plans.append((change.asked, change.budgets, found))
        return found


def _fewer(batch: Any) -> tuple[int, int] | None:
    """Return a smaller batch, which takes less time: if it does not fit, `batch` does not. None if that is small."""
    if not is_ids(batch) or math.prod(batch) <= MANY_TOKENS:
        return None
    rows, length = batch
    return (rows // FEWER, length) if rows >= FEWER else (rows, length // FEWER)
