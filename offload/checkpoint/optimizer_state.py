"""An optimizer's states by parameter, in and out of the tiers.

Owns the translation between torch's parameters and places, and what is not in a dict that is loaded: it begins anew.
The bytes are :mod:`offload.checkpoint.values`'s business. Next: :mod:`offload.optimizer`.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.checkpoint import values as checkpoint
from offload.checkpoint.dict_memory import DictMemory
from offload.checkpoint.sources import Source
from offload.distributed.ranks import Fact, Ranks
from offload.distributed.together import Together
from offload.errors import StateError
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.optim.probe import OwnClass
from offload.optim.recipe import StepCounts
from offload.optim.rules import Rule
from offload.optim.takeover import hide_states
from offload.shards.manager import Manager

DIGEST_NUMEL = 1 << 20  # elements that are looked at together
StatesOf = dict[torch.Tensor, dict[str, Any]]  # by parameter
MastersOf = dict[torch.Tensor, torch.Tensor | None]  # by parameter without a state; None: it is its own master


class OptimizerStates:
    """States of one engine's optimizer. See the module's text."""

    def __init__(
        self,
        rule: Rule,
        manager: Callable[[], Manager],
        binding: Binding,
        changes: OutsideChanges,
        counts: StepCounts,
        memory: DictMemory,
        ranks: Ranks,
    ) -> None:
        """Prepare.

        Args:
            rule: the optimizer.
            manager: returns the owner of the shards, or raises where it is not to be used any more.
            binding: units and parameters of the model.
            changes: what others have written to parameters.
            counts: updates that each parameter has had.
            memory: of state dicts.
            ranks: who trains together.
        """
        self._rule = rule
        self._manager = manager
        self._tree = binding.tree
        self._binding = binding
        self._changes = changes
        self._counts = counts
        self._memory = memory
        self._ranks = ranks

    def gather(self) -> tuple[StatesOf, MastersOf]:
        """Return states and masters as tensors on the CPU; see :class:`DictMemory` for where they lie.

        Of several ranks, each gets all of them, and all have to ask.

        Raises:
            RanksError: another rank has failed, is elsewhere, ended or not come.
            swap.SwapFullError: neither the host budget nor the drive has room.

        Warns:
            UserWarning: they take more memory than the host budget, and there is no drive.
        """
        counts, parameters, where = self._counts, self._tree.parameters, "optimizer.state_dict"
        with Together(self._ranks, where) as together:
            self._changes.adopt()
            manager = self._manager()
            with self._memory.open(where, checkpoint.states_bytes(manager, counts)) as memory:
                together.meet({"the updates of parameters": str(list(counts.counts.values()))})
                with together.sending():
                    states = checkpoint.gather_states(manager, counts, memory, where=where, pauses=True)
                    masters = checkpoint.gather_masters(manager, states, memory, where=where)
        return (
            {parameters[index][slot]: state for (index, slot), state in states.items()},
            {parameters[index][slot]: master for (index, slot), master in masters.items()},
        )

    def found(self) -> StatesOf:
        """Return the states that there are as tensors in host memory, or none where they cannot be read."""
        with contextlib.suppress(Exception):  # the error that is on its way up came first
            found = checkpoint.gather_states(self._manager(), self._counts)
            return {self._tree.parameters[index][slot]: state for (index, slot), state in found.items()}
        return {}

    def replace(self, states: StatesOf, masters: MastersOf) -> None:
        """Let these be the states; what is not among them starts anew, as in torch.

        Raises:
            ConfigError: a state does not fit its parameter.
            StateError: parameters are in use. Nothing was changed in either case.
            RanksError: another rank loads something else, or has failed.
        """
        with Together(self._ranks, "optimizer.load_state_dict") as together:
            if self._ranks.world > 1:
                together.meet(self._facts(states, masters))
            self._replace(states, masters)
            together.end()
            commits = self._manager().commits
            if commits is not None:
                commits.pass_on()

    def _replace(self, states: StatesOf, masters: MastersOf) -> None:
        counts = self._counts
        if counts.records is not None:
            self._scatter(states, masters)
            counts.records.keep_only([self._binding.slot_of(parameter) for parameter in states])
            return
        everything = dict(states)
        for index, updates in counts.counts.items():
            for slot, count in enumerate(updates):
                parameter = self._tree.parameters[index][slot]
                if count and parameter not in states:
                    shape = self._tree.units[index].slots[slot].shape
                    zeros = {  # one each: compressed states are made of both moments, which must not overlap
                        name: torch.zeros(shape, dtype=torch.float32, device="cpu") for name in self._rule.names
                    }
                    everything[parameter] = {"step": 0, **zeros}
        self._scatter(everything, masters)

    def room_for(self, added: OwnClass) -> contextlib.AbstractContextManager[None]:
        """Hold host memory for what the optimizer's own class needs for parameters that are added to it.

        Raises:
            BudgetError: the host budget has no room for it.
        """
        assert self._counts.records is not None
        return self._counts.records.room_for(added)

    def adopt(self, given: torch.optim.Optimizer) -> None:
        """Move the states that a torch optimizer brings to the tiers.

        Raises:
            ConfigError: a state does not fit its parameter.
        """
        # Not a `master` that an engine's state dict has left there: in torch, the parameter itself is what is updated.
        # Adagrad's are there before the first step, and say nothing then, but to its own class.
        own = self._counts.records is not None
        updated = {
            p: state for p, state in given.state.items() if state and (_has_steps(state) or (own and p.requires_grad))
        }
        self._scatter({p: {k: v for k, v in state.items() if k != "master"} for p, state in updated.items()}, {})
        if given.state:
            given.state.clear()
        hide_states(given)

    def _facts(self, states: StatesOf, masters: MastersOf) -> dict[str, Fact]:
        """Return digests of what is to be loaded."""
        facts: dict[str, Fact] = {}
        for what, known in (("states", states), ("master", masters)):
            for parameter, values in known.items():
                index, slot = self._place_of(parameter)
                named = values if isinstance(values, Mapping) else {"master": values}
                facts[f"the {what} of {self._tree.units[index].slots[slot].name}"] = _digest(named)
        return facts

    def _scatter(self, states: StatesOf, masters: MastersOf) -> None:
        values = {self._place_of(parameter): self._rule.with_step(state) for parameter, state in states.items()}
        own = {self._place_of(parameter): master for parameter, master in masters.items()}
        checkpoint.scatter_states(self._manager(), self._counts, values, own)

    def _place_of(self, parameter: torch.Tensor) -> tuple[int, int]:
        where = self._binding.slot_of(parameter)
        if where is None:
            raise StateError("optimizer state: belongs to a parameter that is not the model's")
        return where


def _digest(values: Mapping[str, Any]) -> str:
    """Return what tells values by name from others."""
    known = hashlib.blake2b(digest_size=16)
    for name, value in sorted(values.items()):
        tensor = isinstance(value, (torch.Tensor, Source))
        known.update(f"{name} {value.dtype if tensor else value}".encode())
        if isinstance(value, Source):
            known.update(checkpoint.digest(value).encode())
        elif isinstance(value, torch.Tensor) and not value.is_meta and value.layout is torch.strided:
            for part in value.detach().reshape(-1).split(DIGEST_NUMEL):
                known.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return known.hexdigest()


def _has_steps(state: Mapping[str, Any]) -> bool:
    """Tell whether a state says that its parameter has been updated; also where ``step`` is nothing that can count."""
    step = state.get("step", 1)
    if isinstance(step, torch.Tensor):
        return step.is_meta or step.numel() != 1 or bool(step.item())
    return step is None or bool(step)
