"""What decides on an engine's next step beside the shards, as plain values, and back.

Owns that list - counts, groups, the loss scale, the position in an accumulation, buffers, extra states, random
generators, the user's own - and how each of them is taken and put. Where the values are kept is the business of
:mod:`offload.checkpoints` and of :mod:`offload.durable`.
"""

from __future__ import annotations

import random
import sys
import warnings
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint.format.nested import Encoder
from offload.errors import ConfigError
from offload.life import Life
from offload.memory.devices import random_states, set_random_states
from offload.optim.torch_class import Placed
from offload.planning.units import Where

VALUES = ("optimizer", "accumulation", "buffers", "extra", "random", "client_state")  # that an encoder has seen


class RunState:
    """Takes and puts the state of one engine's run. See the module's text."""

    def __init__(self, module: nn.Module, parts: Parts, life: Life) -> None:
        """Prepare for `module`, whose engine has these parts and this life."""
        self._module = module
        self._parts = parts
        self._life = life
        self._units = parts.tree.units

    # --- taking -----------------------------------------------------------------------------------------------------

    def describe(self, encoder: Encoder, client_state: Any, drawn: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return everything; `drawn` is what :func:`drawn_so_far` returned, None for now."""
        steps, book = self._parts.steps, self._parts.book
        counts, gradients = steps.counts, self._life.require_open().gradients
        names = self.names()
        parameters = {
            slot.name: {
                "trained": unit.trainable,
                "updates": counts.counts[unit.index][position] if unit.trainable else 0,
            }
            for unit in self._units
            for position, slot in enumerate(unit.slots)
        }
        waiting = {
            names[where]: {"scale": value.scale, "clip": value.clip, "passes": gradients.count(*where)}
            for where, value in book.waiting().items()
        }
        step = steps.step
        accumulation = {"gradients": waiting, "micro_batches": step.micro_batches.state_dict() if step else None}
        return {
            "step": steps.run.steps,
            "written_by": {"torch": str(torch.__version__)},
            "parameters": parameters,
            "optimizer": self._describe_optimizer(encoder),
            "accumulation": encoder.encode(accumulation, "accumulation"),
            "buffers": {name: encoder.encode(value, f"buffer:{name}") for name, value in self._buffers().items()},
            "extra": {
                name: encoder.encode(module.get_extra_state(), f"extra:{name}") for name, module in self._extra()
            },
            "random": encoder.encode(drawn_so_far() if drawn is None else drawn, "random"),
            "client_state": encoder.encode(client_state, "client_state"),
        }

    def _describe_optimizer(self, encoder: Encoder) -> dict[str, Any] | None:
        steps = self._parts.steps
        optimizer, step = steps.optimizer, steps.step
        if optimizer is None or step is None:
            return None
        states = self._parts.plan.request.states
        named = self.name_of_parameters()
        groups = [
            {**group, "params": [named[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        described = {
            "class": optimizer.made_of,
            "states": list(states.names),
            "state_dtype": states.kind.value,
            "groups": groups,
            "records": self.records(),
            "run": steps.run.state_dict(),
            "grad_norm": step.grad_norm,
        }
        encoded: dict[str, Any] = encoder.encode(described, "optimizer")
        return encoded

    def records(self) -> dict[str, Any] | None:
        """Return what an optimizer's own class remembers, by parameter; updates change it."""
        known = self._parts.steps.counts.records
        if known is None:
            return None
        names, records = self.names(), {}
        for where, record in known.items():
            placed = [name for name, value in record.items() if value is Placed.MARK]
            kept = {name: value for name, value in record.items() if value is not Placed.MARK}
            records[names[where]] = {"placed": placed, "kept": kept}
        return records

    # --- putting ----------------------------------------------------------------------------------------------------

    def groups(self, saved: Any, *, strict: bool) -> list[dict[str, Any]] | None:
        """Return saved param groups as the optimizer loads them; None where there is nothing to load.

        Raises:
            ConfigError: they do not fit.
        """
        optimizer = self._parts.steps.optimizer
        if optimizer is None or saved is None:
            return None
        named = self.name_of_parameters()
        mine = [[named[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
        theirs = [group["params"] for group in saved["groups"]]
        try:
            if mine != theirs and [len(names) for names in mine] == [len(names) for names in theirs]:
                raise ConfigError(
                    "checkpoint: expected param groups with the same parameters, in the same order; make the optimizer "
                    "with the groups that it was saved with"
                )
            return optimizer.check_groups({"state": {}, "param_groups": saved["groups"]})
        except ConfigError as error:
            if strict:
                raise
            warnings.warn(f"load_checkpoint: the param groups stay as they are: {error}", stacklevel=4)
            return None

    def restore(
        self,
        found: Mapping[str, Any],
        updates: Mapping[str, int],
        loaded: Mapping[Where, str],
        fresh: Container[Where] = (),
    ) -> None:
        """Put everything but groups, waiting gradients and random generators.

        Args:
            found: decoded values, by their names in :data:`VALUES`.
            updates: that each parameter has had, by name.
            loaded: parameters whose content was loaded, with the names that it was saved under.
            fresh: of them, those whose states begin anew.
        """
        steps, saved = self._parts.steps, found["optimizer"]
        own = self._buffers()
        with torch.no_grad():
            for name, value in found["buffers"].items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)
        for name, module in self._extra():
            if name in found["extra"]:
                module.set_extra_state(found["extra"][name])
        for (unit, slot), name in loaded.items():
            if unit in steps.counts.counts:
                steps.counts.counts[unit][slot] = 0 if (unit, slot) in fresh else updates[name]
        if steps.counts.records is not None:
            records = (saved or {}).get("records") or {}
            places = {name: where for where, name in loaded.items() if where not in fresh and name in records}
            steps.counts.records.keep_only(places.values())
            for name, where in places.items():
                marks = dict.fromkeys(records[name]["placed"], Placed.MARK)
                steps.counts.records.put(where, {**records[name]["kept"], **marks})
        if saved is not None and steps.step is not None:
            steps.run.load_state_dict(saved["run"])
            steps.step.grad_norm = saved["grad_norm"]
            steps.step.micro_batches.load_state_dict(found["accumulation"]["micro_batches"])

    def load_groups(self, groups: list[dict[str, Any]] | None) -> None:
        """Put what :meth:`groups` has returned."""
        if groups is not None and self._parts.steps.optimizer is not None:
            self._parts.steps.optimizer.load_groups(groups)

    # --- names ------------------------------------------------------------------------------------------------------

    def names(self) -> dict[Where, str]:
        """Return the name of each parameter."""
        return {(unit.index, position): slot.name for unit in self._units for position, slot in enumerate(unit.slots)}

    def name_of_parameters(self) -> dict[int, str]:
        """Return the names by the parameters' identities."""
        parameters = self._parts.tree.parameters
        return {id(parameters[index][slot]): name for (index, slot), name in self.names().items()}

    def buffers_bytes(self) -> int:
        """Return the bytes of what a state dict has beside the parameters."""
        return sum(value.nbytes for value in self._buffers().values())

    def _buffers(self) -> dict[str, torch.Tensor]:
        """Return what a state dict has beside the parameters."""
        binding = self._parts.hooks.binding
        found: dict[str, torch.Tensor] = {}
        for path, module in self._module.named_modules():
            prefix = f"{path}." if path else ""
            kept = {k: b for k, b in module._buffers.items() if k not in module._non_persistent_buffers_set}
            for name, value in {**module._parameters, **kept}.items():
                if value is not None and binding.slot_of(value) is None:
                    found[prefix + name] = value
        return found

    def _extra(self) -> list[tuple[str, nn.Module]]:
        """Return the modules that have states of their own."""
        plain = nn.Module.get_extra_state
        return [
            (name, module) for name, module in self._module.named_modules() if type(module).get_extra_state != plain
        ]


# --- random generators --------------------------------------------------------------------------------------------


def drawn_so_far() -> dict[str, Any]:
    """Return the states of the random generators of torch, Python, and NumPy where it is in use."""
    numpy: Any = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        drawn = (str(name), keys.tobytes(), *(value for value in map(_plain, rest)))
    return {"torch": random_states(), "python": random.getstate(), "numpy": drawn}


def set_drawn(states: Mapping[str, Any] | None) -> None:
    """Put what :func:`drawn_so_far` returned; None, of a checkpoint that was imported, changes nothing."""
    if states is None:
        return
    left = set_random_states(states["torch"])
    if left:
        warnings.warn(
            f"random generators of {', '.join(left)} were saved but this process does not use these devices; what is "
            "drawn there begins anew",
            stacklevel=4,
        )
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states["numpy"] is not None:
        name, keys, *rest = states["numpy"]
        found = numpy.frombuffer(keys, numpy.uint32) if isinstance(keys, bytes) else numpy.array(keys, numpy.uint32)
        numpy.random.set_state((name, found, *rest))


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else int(value)
