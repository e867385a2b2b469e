"""What decides on an engine's next step beside the shards, as plain values, and back.

Owns that list - counts, groups, the loss scale, the position in an accumulation, buffers, extra states, random
generators, the user's own - and how each of them is taken and put. Where the values are kept is the business of
:mod:`offload.checkpoints` and of :mod:`offload.durable`.
"""

from __future__ import annotations

import logging
import random
import sys
import warnings
from collections.abc import Container, Mapping
from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint.beside import buffers_of, giving_extra, others_of, taking_extra
from offload.checkpoint.format.nested import Encoder
from offload.checkpoint.format.parts import RANKS
from offload.distributed.ranks import Ranks
from offload.errors import CheckpointError, ConfigError
from offload.life import Life
from offload.memory.devices import moved, random_states, set_random_states
from offload.module.quantized import needs_scales
from offload.optim.torch_class import Placed
from offload.planning.units import Where, without_reference

logger = logging.getLogger(__name__)

OWN = ("buffers", "extra", "random", "client_state")  # of which each rank has its own
VALUES = ("optimizer", "accumulation", *OWN)  # that an encoder has seen


class RunState:
    """Takes and puts the state of one engine's run. See the module's text."""

    def __init__(self, module: nn.Module, parts: Parts, life: Life) -> None:
        """Prepare for `module`, whose engine has these parts and this life."""
        self._module = module
        self._parts = parts
        self._life = life
        self._units = without_reference(parts.tree.units)

    # --- taking -----------------------------------------------------------------------------------------------------

    def describe(self, encoder: Encoder, client_state: Any, drawn: Mapping[str, Any] | None = None) -> dict[str, Any]:
        """Return everything; `drawn` is what :meth:`drawn_so_far` returned, None for now."""
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
        members = self._parts.tree.parameters
        quantized = [names[where] for where in names if needs_scales(members[where[0]][where[1]])]
        accumulation = {"gradients": waiting, "micro_batches": step.micro_batches.state_dict() if step else None}
        return {
            "step": steps.run.steps,
            "written_by": {"torch": str(torch.__version__)},
            "added_first": _added_first(self._parts.ranks),
            "parameters": parameters,
            "wrappers": self._parts.tree.describe_wrappers(),
            "quantized": quantized,
            "optimizer": self._describe_optimizer(encoder),
            "accumulation": encoder.encode(accumulation, "accumulation"),
            **self.describe_own(encoder, client_state, drawn),
        }

    def describe_own(
        self, encoder: Encoder, client_state: Any, drawn: Mapping[str, Any] | None = None, *, prefix: str = ""
    ) -> dict[str, Any]:
        """Return what each of several ranks has of its own; `prefix` tells its tensors from those of others."""
        buffers = buffers_of(self._module, self._parts.hooks.binding)
        return {
            "buffers": {name: encoder.encode(value, f"{prefix}buffer:{name}") for name, value in buffers.items()},
            "extra": {
                name: encoder.encode(module.get_extra_state(), f"{prefix}extra:{name}")
                for name, module in giving_extra(self._module).items()
            },
            "random": encoder.encode(self.drawn_so_far() if drawn is None else drawn, f"{prefix}random"),
            "client_state": encoder.encode(client_state, f"{prefix}client_state"),
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

    def drawn_so_far(self) -> dict[str, Any]:
        """Return the states of random generators, and which device the engine computes on."""
        return drawn_so_far() | {"device": str(self._parts.device.place)}

    # --- putting ----------------------------------------------------------------------------------------------------

    @staticmethod
    def own_of(contents: Mapping[str, Any], ranks: Ranks, tag: str) -> dict[str, Any]:
        """Return what a rank takes of what each has of its own: of as many ranks, its own; else that of the first.

        Random generators are those of the rank with the same number, or stay as they are.

        Args:
            contents: of the index.
            ranks: who loads it.
            tag: of the checkpoint.

        Raises:
            CheckpointError: it was saved inside a step of another number of ranks.
        """
        here, before = _added_first(ranks), contents.get("added_first", 1)
        if here != before:
            logger.warning(
                "checkpoint %s: gradients of %d ranks were added up first, and of %d from here on: other rounding",
                *(tag, before, here),
            )
        saved: list[dict[str, Any]] = contents.get(RANKS, [{}])
        rank = ranks.rank
        own: dict[str, Any] = {name: contents[name] for name in OWN}
        if len(saved) == ranks.world:
            return own | saved[rank]
        position = contents["accumulation"]
        if position["gradients"] or (position["micro_batches"] or {"done": 0})["done"]:
            raise CheckpointError(
                f"checkpoint {tag}: was saved by {len(saved)} ranks between two steps and cannot be loaded by "
                f"{ranks.world}; load it with {len(saved)}, or save right behind a step"
            )
        if rank < len(saved):
            return own | {"random": (own | saved[rank])["random"]}
        logger.warning("checkpoint %s: has no random generators of rank %d; they stay as they are", tag, rank)
        return own | {"random": None}

    def refuse_other_wrappers(self, saved: Mapping[str, Any], tag: str) -> None:
        """Refuse inner tensors of parameters that are made of theirs in another way.

        Args:
            saved: how each parameter was made, by name.
            tag: of the checkpoint.

        Raises:
            CheckpointError: one was quantized in another way.
        """
        for name, mine in self._parts.tree.describe_wrappers().items():
            if name in saved and saved[name] != mine:
                raise CheckpointError(
                    f"checkpoint {tag}: expected {name} made as {mine} but got it made as {saved[name]}; quantize the "
                    "model as it was when the checkpoint was saved"
                )

    def refuse_other_buffers(self, found: Mapping[str, Any], tag: str, *, strict: bool, imported: bool = False) -> None:
        """Refuse buffers and extra states that are missing, left over, of another shape, or would lose bits.

        Args:
            found: decoded values, by their names in :data:`VALUES`.
            tag: of the checkpoint.
            strict: raise; else warn.
            imported: see :func:`others_of`.

        Raises:
            CheckpointError: there are some.
        """
        others = others_of(self._module, self._parts.hooks.binding, found, imported=imported)
        if others and strict:
            raise CheckpointError(
                f"checkpoint {tag}: is of another model: {others}; load it into the model that it was saved from, or "
                "pass strict=False to load what both have"
            )
        if others:
            stay = f"load_checkpoint: buffers and extra states stay as they are where checkpoint {tag} differs"
            warnings.warn(f"{stay}: {others}; values of other dtypes are converted", stacklevel=5)

    def accumulation(self, saved: Mapping[str, Any], tag: str, *, strict: bool) -> Mapping[str, Any]:
        """Return the position in an accumulation to go on from: as saved, or where that cannot be, a step's beginning.

        Args:
            saved: the position.
            tag: of the checkpoint.
            strict: raise; else warn.

        Raises:
            CheckpointError: it is inside a step of another number of micro-batches.
        """
        step, position = self._parts.steps.step, saved["micro_batches"]
        if step is None or position is None:
            return saved
        batches = step.micro_batches
        if batches.can_go_on(position, waits=bool(saved["gradients"])):
            return saved
        told = (
            f"was saved inside a step of {position.get('count', 'more')} micro-batches but this engine has "
            f"gradient_accumulation_steps={batches.count}"
        )
        if strict:
            raise CheckpointError(
                f"checkpoint {tag}: {told}; load it with the same number, save right behind a step, or pass "
                "strict=False to run the step's micro-batches again"
            )
        dropped = "its gradients are dropped; run the step's micro-batches again"
        warnings.warn(f"load_checkpoint: checkpoint {tag} {told}: {dropped}", stacklevel=5)
        return {"gradients": {}, "micro_batches": {**position, "done": 0}}

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
            if saved["class"] != optimizer.made_of:  # its learning rate and decay mean something else
                raise ConfigError(
                    f"checkpoint: expected param groups of {optimizer.made_of} but got those of {saved['class']}; make "
                    "the engine with the optimizer that it was saved with"
                )
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
        *,
        states: bool = True,
    ) -> None:
        """Put everything but groups, waiting gradients and random generators.

        Args:
            found: decoded values, by their names in :data:`VALUES`.
            updates: that each parameter has had, by name.
            loaded: parameters whose content was loaded, with the names that it was saved under.
            fresh: of them, those whose states begin anew.
            states: were loaded, too; else what is counted for them stays.
        """
        steps, saved = self._parts.steps, found["optimizer"]
        own = buffers_of(self._module, self._parts.hooks.binding, every_name=True)
        with torch.no_grad():
            for name, value in found["buffers"].items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)
        for name, module in taking_extra(self._module).items():
            if name in found["extra"]:
                module.set_extra_state(found["extra"][name])
        if saved is not None and steps.step is not None:
            steps.run.load_state_dict(saved["run"])
        if not states:
            return
        for (unit, slot), name in loaded.items():
            if unit in steps.counts.counts:
                steps.counts.counts[unit][slot] = 0 if (unit, slot) in fresh else updates[name]
        if steps.counts.records is not None:
            records = (saved or {}).get("records") or {}
            places = {name: where for where, name in loaded.items() if where not in fresh and name in records}
            steps.counts.records.keep_only({*places.values(), *(self.names().keys() - loaded.keys())})
            for name, where in places.items():
                marks = dict.fromkeys(records[name]["placed"], Placed.MARK)
                steps.counts.records.put(where, {**records[name]["kept"], **marks})
        if saved is not None and steps.step is not None:
            steps.step.grad_norm = saved["grad_norm"]
            steps.step.micro_batches.load_state_dict(found["accumulation"]["micro_batches"])

    def set_drawn(self, states: Mapping[str, Any] | None) -> None:
        """Put what :meth:`drawn_so_far` returned: what the engine's device had then, its device has now."""
        if states is not None and "device" in states:
            here = str(self._parts.device.place)
            states = {**states, "torch": moved(states["torch"], states["device"], here)}
        set_drawn(states)

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
        return self._parts.tree.names()


# --- random generators --------------------------------------------------------------------------------------------


def drawn_so_far() -> dict[str, Any]:
    """Return the states of the random generators of torch, Python, and NumPy where it is in use."""
    numpy: Any = sys.modules.get("numpy")
    drawn = None if numpy is None else _plain(numpy.random.get_state(legacy=False))
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
            stacklevel=6,
        )
    random.setstate(states["python"])
    numpy = sys.modules.get("numpy")
    if numpy is not None and states["numpy"] is not None:
        saved, here = _of_numpy(states["numpy"], numpy), numpy.random.get_state(legacy=False)["bit_generator"]
        if saved["bit_generator"] == here:
            numpy.random.set_state(saved)
        else:
            warnings.warn(
                f"random generator of NumPy was saved as {saved['bit_generator']} but is {here} here; it stays "
                "as it is",
                stacklevel=6,
            )


def _plain(value: Any) -> Any:
    """Return a state of NumPy's without arrays: dtype and bytes in the place of each."""
    if isinstance(value, Mapping):
        return {name: _plain(each) for name, each in value.items()}
    return (value.dtype.str, value.tobytes()) if getattr(value, "ndim", 0) else value


def _of_numpy(value: Any, numpy: Any) -> Any:
    """Return what :func:`_plain` was given; older files have the tuple that was NumPy's for MT19937 alone."""
    if isinstance(value, Mapping):
        return {name: _of_numpy(each, numpy) for name, each in value.items()}
    if not isinstance(value, tuple):
        return value
    if len(value) == 2:
        return numpy.frombuffer(value[1], value[0])
    name, keys, at, *gauss = value
    key = numpy.frombuffer(keys, numpy.uint32) if isinstance(keys, bytes) else numpy.array(keys, numpy.uint32)
    more = dict(zip(("has_gauss", "gauss"), gauss, strict=True))
    return {"bit_generator": name, "state": {"key": key, "pos": at}} | more


def _added_first(ranks: Ranks) -> int:
    """Return of how many ranks gradients are added up before they are added to the sum: it is part of the bits."""
    return ranks.node.world if ranks.owners.world > 1 else 1
