"""Checkpoints of one engine: everything that decides on its next step, out of the tiers and into files, and back.

Owns what that is beside the shards - counts, groups, the loss scale, the position in an accumulation, random
generators, the user's own - and the order of things. ``docs/checkpoints.md`` describes the files. The bytes are the
business of :mod:`offload.checkpoint.saving` and :mod:`offload.checkpoint.restoring`. Next: :mod:`offload.engine`.
"""

from __future__ import annotations

import contextlib
import random
import sys
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.checkpoint.columns import FILE_BYTES
from offload.checkpoint.format.folder import Folder, check_tag
from offload.checkpoint.format.index import FILE_NAME, Entry, Index
from offload.checkpoint.format.nested import Encoder, decode
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.restoring import Restorer, read_tensor
from offload.checkpoint.saving import Contents, write_values
from offload.errors import BudgetError, CheckpointError, ConfigError
from offload.life import Life
from offload.memory.budget import Tier
from offload.memory.devices import random_states, set_random_states
from offload.optim import progress
from offload.optim.torch_class import Placed
from offload.shards.manager import Manager
from offload.sizes import MIB, format_bytes
from offload.training import Training

LEAST_BUFFER_BYTES = MIB // 16
SPARE_BUFFERS = 12  # that are on their way while one per column fills


class Checkpoints:
    """Saves and loads one engine. See the module's text."""

    def __init__(self, module: nn.Module, parts: Parts, life: Life, training: Training) -> None:
        """Prepare.

        Args:
            module: the model.
            parts: of the engine.
            life: whether it can be used.
            training: forgets gradients.
        """
        self._module = module
        self._parts = parts
        self._life = life
        self._training = training

    # --- saving -----------------------------------------------------------------------------------------------------

    def save(
        self,
        directory: str | Path,
        *,
        tag: str | None,
        client_state: Any,
        keep: int | None,
        file_bytes: int = FILE_BYTES,
    ) -> Path:
        """Write a checkpoint; see ``Engine.save_checkpoint``."""
        manager, parts = self._life.require_open(), self._parts
        if keep is not None and (isinstance(keep, bool) or not isinstance(keep, int) or keep < 1):
            raise CheckpointError(f"keep: expected a whole number of at least 1, or None, but got {keep!r}")
        tag = check_tag(f"step-{parts.steps.run.steps:08d}" if tag is None else tag)
        parts.changes.adopt()
        manager.working.refuse_changes()
        parts.book.adopt()
        manager.gradients.await_copies()
        manager.forward.finish()  # what an optimizer's own class keeps is known when its updates are made
        encoder = Encoder()
        described = self._describe(manager, encoder, {} if client_state is None else client_state)
        shards = Contents(manager, parts.book.waiting(), file_bytes)
        folder = Folder(directory)
        needed = shards.size_bytes + sum(tensor.nbytes for tensor in encoder.tensors.values())
        with folder.writing():
            sequence = folder.next_sequence()
            with folder.begin(tag, needed) as new, self._staging(manager, shards.buffers + SPARE_BUFFERS) as staging:
                entries, files = shards.write(new, staging)
                more, other = write_values(new, encoder.tensors, staging)
                index = Index(tag, sequence, (*entries, *more), {**files, **other}, described)
                path = folder.publish(new, tag, index.to_json())
            if keep is not None:
                folder.keep(keep)
        return path

    def _describe(self, manager: Manager, encoder: Encoder, client_state: Any) -> dict[str, Any]:
        """Return what the index says beside the tensors."""
        steps, book = self._parts.steps, self._parts.book
        counts, gradients = steps.counts, manager.gradients
        names = self._names(manager)
        parameters = {
            slot.name: {
                "trained": unit.trainable,
                "updates": counts.counts[unit.index][position] if unit.trainable else 0,
            }
            for unit in manager.units
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
            "optimizer": self._describe_optimizer(manager, encoder),
            "accumulation": encoder.encode(accumulation, "accumulation"),
            "buffers": {name: encoder.encode(value, f"buffer:{name}") for name, value in self._buffers().items()},
            "extra": {
                name: encoder.encode(module.get_extra_state(), f"extra:{name}") for name, module in self._extra()
            },
            "random": encoder.encode(_random_states(), "random"),
            "client_state": encoder.encode(client_state, "client_state"),
        }

    def _describe_optimizer(self, manager: Manager, encoder: Encoder) -> dict[str, Any] | None:
        steps = self._parts.steps
        optimizer, step = steps.optimizer, steps.step
        if optimizer is None or step is None:
            return None
        names, states = self._names(manager), manager.tiers.plan.request.states
        named = self._name_of_parameters(manager)
        groups = [
            {**group, "params": [named[id(parameter)] for parameter in group["params"]]}
            for group in optimizer.param_groups
        ]
        records = None
        if steps.counts.records is not None:
            records = {}
            for where, record in steps.counts.records.items():
                placed = [name for name, value in record.items() if value is Placed.MARK]
                kept = {name: value for name, value in record.items() if value is not Placed.MARK}
                records[names[where]] = {"placed": placed, "kept": kept}
        described = {
            "class": optimizer.made_of,
            "states": list(states.names),
            "state_dtype": states.kind.value,
            "groups": groups,
            "records": records,
            "run": steps.run.state_dict(),
            "grad_norm": step.grad_norm,
        }
        encoded: dict[str, Any] = encoder.encode(described, "optimizer")
        return encoded

    # --- loading ----------------------------------------------------------------------------------------------------

    def load(self, directory: str | Path, *, tag: str | None, strict: bool) -> Any:
        """Read a checkpoint; see ``Engine.load_checkpoint``."""
        manager, parts = self._life.require_open(), self._parts
        folder = Folder(directory)
        path = folder.find(None if tag is None else check_tag(tag))
        with folder.reading(path):
            index = Index.read(path / FILE_NAME)
            source = Source(path, index)
            manager.tiers.refuse_leased(manager.units)
            restorer = Restorer(manager, index, strict=strict)
            self._refuse_another_class(index, strict=strict)
            with self._staging(manager, BUFFERS) as staging:
                values = _read_values(source, index, staging)
                found = {
                    name: decode(index.contents[name], values.__getitem__)
                    for name in ("optimizer", "accumulation", "buffers", "extra", "random", "client_state")
                }
                groups = self._groups(manager, found["optimizer"], strict=strict)
                parts.changes.forget_copies()
                parts.changes.adopt()
                self._training.zero_grad()
                manager.finish_updates()
                try:
                    restorer.read(source, staging, parts.steps.counts)
                    waiting = restorer.read_gradients(source, staging)
                    self._restore(manager, index, restorer, found)
                except BaseException as error:
                    self._life.lose(f"loading checkpoint {path} failed half way ({type(error).__name__}: {error})")
                    raise
                names = self._names(manager)
                for where in waiting:
                    known = found["accumulation"]["gradients"][names[where]]
                    parts.book.restore(where, scale=float(known["scale"]), clip=float(known["clip"]))
                if groups is not None and parts.steps.optimizer is not None:
                    parts.steps.optimizer.load_groups(groups)
        self._set_random(found["random"])
        return found["client_state"]

    def _refuse_another_class(self, index: Index, *, strict: bool) -> None:
        optimizer, saved = self._parts.steps.optimizer, index.contents["optimizer"]
        if optimizer is None or not strict:
            return
        if saved is None:
            raise CheckpointError(
                f"checkpoint {index.tag}: was saved by an engine without an optimizer; pass strict=False to begin anew "
                "with its parameters"
            )
        if (saved["records"] is None) != (self._parts.steps.counts.records is None):
            raise CheckpointError(
                f"checkpoint {index.tag}: was saved with {saved['class']}, whose states are kept otherwise than those "
                f"of {optimizer.made_of}; make the engine with the optimizer that it was saved with, or pass "
                "strict=False to load parameters only"
            )
        progress.check_state(decode(saved["run"], lambda name: torch.empty(0)))

    def _groups(self, manager: Manager, saved: Any, *, strict: bool) -> list[dict[str, Any]] | None:
        """Return the param groups of a checkpoint as the optimizer loads them; None where there is nothing to load."""
        optimizer = self._parts.steps.optimizer
        if optimizer is None or saved is None:
            return None
        named = self._name_of_parameters(manager)
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

    def _restore(self, manager: Manager, index: Index, restorer: Restorer, found: Mapping[str, Any]) -> None:
        """Restore what is beside the shards."""
        steps, saved = self._parts.steps, found["optimizer"]
        own = self._buffers()
        with torch.no_grad():
            for name, value in found["buffers"].items():
                if name in own and own[name].shape == value.shape:
                    own[name].copy_(value)
        for name, module in self._extra():
            if name in found["extra"]:
                module.set_extra_state(found["extra"][name])
        fresh = restorer.fresh
        for (unit, slot), name in restorer.loaded.items():
            if unit in steps.counts.counts:
                known = 0 if (unit, slot) in fresh else int(index.contents["parameters"][name]["updates"])
                steps.counts.counts[unit][slot] = known
        if steps.counts.records is not None:
            records = (saved or {}).get("records") or {}
            places = {name: where for where, name in restorer.loaded.items() if where not in fresh and name in records}
            steps.counts.records.keep_only(places.values())
            for name, where in places.items():
                marks = dict.fromkeys(records[name]["placed"], Placed.MARK)
                steps.counts.records.put(where, {**records[name]["kept"], **marks})
        if saved is not None and steps.step is not None:
            steps.run.load_state_dict(saved["run"])
            steps.step.grad_norm = saved["grad_norm"]
            steps.step.micro_batches.load_state_dict(found["accumulation"]["micro_batches"])

    # --- what both need ---------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def _staging(self, manager: Manager, buffers: int) -> Iterator[Staging]:
        """Yield buffers within the budgets: those of the host, or of a device that is the host."""
        self._parts.activations.refund()
        tiers = [Tier.HOST, *([Tier.DEVICE] if manager.tiers.device.addressable else [])]
        size = BUFFER_BYTES
        while True:
            for tier in tiers:
                budget = self._parts.budgets[tier]
                if budget.free_bytes >= buffers * size:
                    with budget.claim("checkpoint", buffers * size):
                        with Staging(buffers, size, deadline_s=manager.tiers.deadline_s) as staging:
                            yield staging
                    return
            if size == LEAST_BUFFER_BYTES:
                raise BudgetError(
                    f"cpu budget: a checkpoint needs {format_bytes(buffers * size)} of buffers but "
                    f'{format_bytes(self._parts.budgets[Tier.HOST].free_bytes)} are free; raise max_memory["cpu"]'
                )
            size //= 2

    @staticmethod
    def _names(manager: Manager) -> dict[tuple[int, int], str]:
        return {(unit.index, position): slot.name for unit in manager.units for position, slot in enumerate(unit.slots)}

    def _name_of_parameters(self, manager: Manager) -> dict[int, str]:
        parameters = self._parts.tree.parameters
        return {id(parameters[index][slot]): name for (index, slot), name in self._names(manager).items()}

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

    @staticmethod
    def _set_random(states: Mapping[str, Any]) -> None:
        left = set_random_states(states["torch"])
        if left:
            warnings.warn(
                f"load_checkpoint: random generators of {', '.join(left)} were saved but this process does not use "
                "these devices; what is drawn there begins anew",
                stacklevel=4,
            )
        random.setstate(states["python"])
        numpy = sys.modules.get("numpy")
        if numpy is not None and states["numpy"] is not None:
            name, keys, *rest = states["numpy"]
            numpy.random.set_state((name, numpy.array(keys, dtype=numpy.uint32), *rest))


def _random_states() -> dict[str, Any]:
    numpy: Any = sys.modules.get("numpy")
    drawn = None
    if numpy is not None:
        name, keys, *rest = numpy.random.get_state()
        drawn = (str(name), [int(key) for key in keys], *(value for value in map(_plain, rest)))
    return {"torch": random_states(), "python": random.getstate(), "numpy": drawn}


def _plain(value: Any) -> Any:
    return float(value) if isinstance(value, float) else int(value)


def _read_values(source: Source, index: Index, staging: Staging) -> dict[str, torch.Tensor]:
    entries: list[Entry] = [entry for entry in index.entries if entry.role == "value"]
    return {entry.name: read_tensor(source, entry, staging) for entry in entries}
