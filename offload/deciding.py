"""What an engine makes of ``activations="auto"``, decided once: in the step that has its second micro-batch.

Owns when that is, and the seconds: a step's by the plan's formula, with the rates of copies, drive and compute that
were measured in the last micro-batch before. The first one of a process takes longer than others. Until the choice, and
later on, what does not fit leaves the device. Where a micro-batch finds no room before, blocks are computed again from
the next one on. Next: :mod:`offload.planning.choosing` has the rule.
"""

from __future__ import annotations

import dataclasses
import logging
import weakref

import torch
from torch import nn

from offload.activations.ledger import Passed
from offload.build import Parts
from offload.config import Config
from offload.errors import BudgetError
from offload.life import Life
from offload.module.recomputing import can_recompute, share_of_blocks
from offload.planning.choosing import OFFLOAD, RECOMPUTE, choose
from offload.planning.hardware import DESKTOP, Hardware
from offload.planning.plan import Plan
from offload.planning.timing import timing_of
from offload.planning.work import Work
from offload.snapshot import take_snapshot
from offload.stats import LinkStats

logger = logging.getLogger(__name__)

PASSES_SEEN = 2  # micro-batches, before the choice
_SLOWEST, _FASTEST = 1e6, 1e15  # bytes per second that a machine may have
_FORWARD_SHARE = 1 / 3  # of a micro-batch: backward has two products for each of forward's


class Decision:
    """Of one engine. See the module's text."""

    def __init__(self, model: nn.Module, parts: Parts, config: Config, life: Life) -> None:
        """Prepare; nothing is decided unless ``activations="auto"``."""
        self._told = ""
        self._recomputes = False
        self._model = model
        self._parts = parts
        self._config = config
        self._life = life
        self._is_open = config.activations == "auto"
        self._passes = 0  # micro-batches of the steps that were made, on all ranks alike
        self._tensors: dict[int, tuple[weakref.ref[torch.Tensor], int]] = {}  # beside parameters, as they were
        self._note_tensors()

    @property
    def told(self) -> str:
        """The choice in words; empty before."""
        recomputing = self._parts.recomputing
        if recomputing is not None and recomputing.given_up:
            return f"{OFFLOAD}, for {recomputing.given_up} cannot be computed again any more"
        return self._told

    def plan(self) -> Plan:
        """Return the plan, with what a micro-batch has moved of activations once that is known."""
        plan, first = self._parts.plan, self._parts.activations.first_pass
        if first is None and not self.told:
            return plan
        return plan.with_activations(None if first is None else first.moved, self.told)

    def decide(self) -> None:
        """Decide if that is still to be done, and enough micro-batches were seen; all ranks call this in one order."""
        self._passes += self._config.gradient_accumulation_steps
        recomputing = self._parts.recomputing
        if self._recomputes and recomputing is not None and recomputing.given_up:
            self._recomputes = False
            self._parts.activations.forget_passes()
        if not self._is_open:
            return
        if self._passes < PASSES_SEEN:
            self._note_tensors()
            return
        activations = self._parts.activations
        passed, ranks = activations.last_pass, self._parts.ranks
        moved = passed is not None and any(passed.moved.values())
        again = self._can_recompute()
        seconds = self._seconds(passed) if passed is not None and moved else {OFFLOAD: 0.0, RECOMPUTE: 0.0}
        mine = [float(moved), float(not again), seconds[OFFLOAD], seconds[RECOMPUTE]]
        of_all = ranks.agree("choosing activations", numbers=mine).numbers if ranks.world > 1 else [mine]
        some_moved, some_not, moving_s, again_s = (max(numbers) for numbers in zip(*of_all, strict=True))
        possible = {OFFLOAD: moving_s} if some_not else {OFFLOAD: moving_s, RECOMPUTE: again_s}
        mode, told = choose(possible if some_moved else {})
        self._choose(mode, told)

    def note_failure(self, error: BaseException) -> None:
        """Have blocks computed again from now on if a micro-batch found no room before the choice; `error` says so."""
        if not self._is_open or not isinstance(error, BudgetError) or not torch.is_grad_enabled():
            return
        if self._parts.ranks.world > 1 or not self._can_recompute():  # other ranks would choose something else
            return
        self._choose(RECOMPUTE, f"{RECOMPUTE}, for a micro-batch found no room before")
        error.args = (f'{error}; from the next micro-batch on, "auto" is activations="recompute"',)

    def _can_recompute(self) -> bool:
        return self._parts.recomputing is not None and can_recompute(self._model) and not self._changes_tensors()

    def _choose(self, mode: str, told: str) -> None:
        self._told = told
        self._is_open = False
        self._tensors.clear()
        if mode == RECOMPUTE and self._parts.recomputing is not None:
            self._recomputes = True
            self._parts.recomputing.attach()
            self._parts.activations.forget_passes()
        logger.info("activations: %s", told)

    def _note_tensors(self) -> None:
        """Note the buffers and tensors that modules have beside parameters, with their versions."""
        for module in self._model.modules():
            for value in (*vars(module).values(), *module._buffers.values()):
                if isinstance(value, torch.Tensor) and not value.is_inference():
                    self._tensors.setdefault(id(value), (weakref.ref(value), value._version))

    def _changes_tensors(self) -> bool:
        """Tell whether a forward has changed one in place, which would happen twice."""
        known = [(reference(), version) for reference, version in self._tensors.values()]
        return any(tensor is not None and tensor._version != version for tensor, version in known)

    def _seconds(self, passed: Passed) -> dict[str, float]:
        """Return those of a step, by mode."""
        plan, config = self._parts.plan, self._config
        computed_s = max(passed.seconds - passed.moving_s - passed.waited_s, 0.0)
        forward_s, backward_s = computed_s * _FORWARD_SHARE, computed_s * (1 - _FORWARD_SHARE)
        repeated_s = forward_s * share_of_blocks(self._model)
        hardware, moved = self._hardware(), passed.moved
        if plan.request.device_is_host:  # copies have taken a part of `moving_s`
            moved = {link: size for link, size in moved.items() if link.startswith("nvme")}

        def step_s(plan: Plan, backward_s: float) -> float:
            work = Work({}, {}, (0, 0), 0, 0, (forward_s, backward_s))
            clips = config.max_grad_norm is not None
            steps = config.gradient_accumulation_steps
            return timing_of(plan, work, hardware, micro_batches=steps, clips=clips).step_s

        return {
            OFFLOAD: step_s(plan.with_activations(moved), backward_s + passed.moving_s),
            RECOMPUTE: step_s(plan, backward_s + repeated_s),
        }

    def _hardware(self) -> Hardware:
        """Return this machine, as far as it has been used; for the rest, a desktop."""
        links = take_snapshot(self._parts, self._life.require_open()).links
        rates = {
            "h2d_bytes_s": links["h2d"],
            "d2h_bytes_s": links["d2h"],
            "drive_read_bytes_s": links["nvme_read"],
            "drive_write_bytes_s": links["nvme_write"],
            "update_bytes_s": links["cpu_adam"],
        }
        found = {name: _rate(link, getattr(DESKTOP, name)) for name, link in rates.items()}
        mixed = max(found["drive_read_bytes_s"], found["drive_write_bytes_s"])
        found["host_bytes_s"] = max(DESKTOP.host_bytes_s, found["update_bytes_s"])  # which updates go through
        return dataclasses.replace(DESKTOP, name="this machine", drive_mixed_bytes_s=mixed, **found)


def _rate(link: LinkStats, otherwise: float) -> float:
    if not link.bytes or link.seconds <= 0:
        return otherwise
    return min(max(link.bytes / link.seconds, _SLOWEST), _FASTEST)
