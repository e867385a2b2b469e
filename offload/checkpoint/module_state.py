"""The module's own tensors by name: its state dict with real content, loading, and parameters gathered for a while.

Owns the hooks that make ``module.state_dict()`` return real tensors, and what users change through the engine. Where
the bytes are is :mod:`offload.checkpoint.values`'s business. Next: :mod:`offload.engine`, which offers this to users.
"""

from __future__ import annotations

import contextlib
import dataclasses
import inspect
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from offload.activations.tiling import join_tiles, split_tiles
from offload.checkpoint import values as checkpoint
from offload.checkpoint.beside import extra_key, taking_extra
from offload.checkpoint.dict_memory import DictMemory
from offload.checkpoint.unread_state import SHARD_BYTES, deferred_state, in_one_form, warn_of_shard, without_quantizer
from offload.classes import is_a
from offload.errors import ConfigError, StateError
from offload.memory.budget import Tier
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.module.hooks import Hooks
from offload.module.lending import Loan
from offload.module.refusals import unreadable
from offload.module.saved import address_of
from offload.planning.units import Where, without_reference
from offload.shards.manager import Manager
from offload.torch_private import IncompatibleKeys, no_functions
from offload.wrappers import Shell, is_wrapper, take_apart

_ADAPTED = ("BaseTunerLayer", "AuxiliaryTrainingWrapper")  # what PEFT puts in the place of modules
SWAP_NUMEL = 1 << 20  # elements that change places at once


class ModuleTensors:
    """Tensors of one engine's module. See the module's text."""

    def __init__(
        self,
        module: nn.Module,
        hooks: Hooks,
        changes: OutsideChanges,
        manager: Callable[[], Manager],
        memory: DictMemory,
    ) -> None:
        """Prepare; :meth:`attach` registers the hooks.

        Args:
            module: the model.
            hooks: of its parameters.
            changes: what others have written to them.
            manager: returns the owner of the shards, or raises where it is not to be used any more.
            memory: of state dicts.
        """
        self._module = module
        self._tree = hooks.binding.tree
        self._binding = hooks.binding
        self._hooks = hooks
        self._changes = changes
        self._manager = manager
        self._memory = memory
        self._handles: list[RemovableHandle] = []
        self._gathered: Counter[Where] = Counter()  # by blocks that are under way

    def attach(self) -> None:
        """Let ``module.state_dict()`` return real tensors."""
        outermost: list[tuple[nn.Module, str, bool]] = []  # where state_dict() was called

        def begin(module: nn.Module, prefix: str, keep_vars: bool) -> None:
            if outermost and not (prefix.startswith(outermost[0][1]) and prefix != outermost[0][1]):
                outermost.clear()  # an earlier call was broken off by an exception
            if not outermost:
                outermost.append((module, prefix, keep_vars))

        def fill(module: nn.Module, state: dict[str, Any], prefix: str, metadata: object) -> None:
            if outermost and outermost[0][:2] == (module, prefix):
                _, _, keep_vars = outermost.pop()
                if not keep_vars:  # else the values are the parameters themselves
                    with self._hooks.deferral:
                        self._fill(state)

        for module in self._tree.leases:
            self._handles.append(module.register_state_dict_pre_hook(begin))
            self._handles.append(module.register_state_dict_post_hook(fill))

    def detach(self) -> None:
        """Remove the hooks. Idempotent."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def state_dict(self) -> dict[str, Any]:
        """Return the module's state dict; see ``Engine.state_dict``."""
        self._manager()
        state = dict(self._module.state_dict())
        self._changes.forget_copies()  # these are said to be copies
        return state

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save a Hugging Face model with its own ``save_pretrained``; see ``Engine.save_pretrained``."""
        manager = self._manager()
        save = getattr(self._module, "save_pretrained", None)
        if save is None:
            raise StateError(
                f"save_pretrained: {type(self._module).__name__} is not a Hugging Face model; "
                "use torch.save(engine.state_dict(), path)"
            )
        if is_a(getattr(self._module, "base_model", None), "peft", "BaseTuner") and not any(
            is_a(part, "peft", kind) for part in self._module.modules() for kind in _ADAPTED
        ):
            raise StateError(
                "save_pretrained: expected adapters but they are merged and unloaded, so that nothing would be saved; "
                "save what merge_and_unload() returned with its own save_pretrained"
            )
        adapts = is_a(self._module, "peft", "PeftModel")
        known = adapts or is_a(self._module, "transformers", "PreTrainedModel")

        def joined(state: dict[str, Any]) -> dict[str, Any]:
            return state if adapts else join_tiles(self._module, state)  # PEFT looks for adapters where they are

        if not known or not kwargs.get("safe_serialization", True):
            with without_quantizer(self._module):
                save(directory, state_dict=joined(self.state_dict()), **kwargs)
            return
        if is_a(self._module, "transformers", "PreTrainedModel"):  # adapters are small
            takes = inspect.signature(save).parameters.values()  # a class may have a method of its own
            if any(each.name == "max_shard_size" or each.kind is each.VAR_KEYWORD for each in takes):
                kwargs.setdefault("max_shard_size", SHARD_BYTES)
            total = sum(unit.param_bytes for unit in without_reference(self._tree.units))
            warn_of_shard(kwargs.get("max_shard_size", "50GB"), total, manager.tiers.budgets[Tier.HOST].limit_bytes)
        with in_one_form(directory), without_quantizer(self._module):
            save(directory, state_dict=joined(self.deferred_state(self._module)), **kwargs)

    def deferred_state(self, module: nn.Module) -> dict[str, Any]:
        """Return a module's state dict with deferred tensors; see ``Engine.deferred_state_dict``."""
        manager = self._manager()
        with self._hooks.deferral:
            self._changes.adopt()
            manager.bound.refuse_changes()
            return deferred_state(module, self._binding, manager)

    def load(self, state_dict: Mapping[str, Any], *, strict: bool) -> IncompatibleKeys:
        """Load parameters, buffers and extra states by name; see ``Engine.load_state_dict``."""
        self._manager()
        if not isinstance(state_dict, Mapping):
            raise ConfigError(
                f"state dict: expected a mapping of names to tensors but got a value of type "
                f"{type(state_dict).__name__}; load what state_dict() returned"
            )
        state_dict = split_tiles(self._module, state_dict)
        own = tensors_by_name(self._module)
        extra = {extra_key(name): part for name, part in taking_extra(self._module).items()}
        known = own.keys() | extra.keys()
        missing = [name for name in (*own, *extra) if name not in state_dict]
        unexpected = [name for name in state_dict if name not in known]
        if strict and (missing or unexpected):
            raise ConfigError(
                f"state dict: missing {missing[:5]}, unexpected {unexpected[:5]}; pass strict=False to ignore"
            )
        values = {}
        buffers: list[tuple[torch.Tensor, Any]] = []
        for name, value in state_dict.items():
            tensor = own.get(name)
            if tensor is None:
                continue
            if self._binding.places_of(tensor):
                values.update(self._binding.spread(tensor, value))
                continue
            if unreadable(tensor) is None or not isinstance(value, torch.Tensor):
                checkpoint.refuse_unreadable(value, name, "a tensor", into=tensor.dtype)
            if tuple(tensor.shape) != tuple(value.shape):
                raise ConfigError(f"{name}: expected shape {tuple(tensor.shape)} but got {tuple(value.shape)}")
            buffers.append((tensor, value))
        with self._hooks.deferral, torch.no_grad():
            self._changes.write(values)  # first, for it may refuse
            for tensor, value in buffers:
                tensor.copy_(value)
        for name, part in extra.items():
            if name in state_dict:
                part.set_extra_state(state_dict[name])
        return IncompatibleKeys(missing, unexpected)

    def apply(self, function: Callable[[str, nn.Parameter], object], params: Any) -> None:
        """Call ``function(name, parameter)`` unit by unit; see ``Engine.apply``."""
        units: dict[int, list[Any]] = {}
        for parameter, places in self._members(params):
            units.setdefault(places[0][0], []).append(parameter)
        for members in units.values():
            with self.gather(members, modify=True), torch.no_grad():
                for parameter in members:
                    function(self._binding.name(parameter), parameter)

    @contextlib.contextmanager
    def gather(self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter], *, modify: bool) -> Iterator[None]:
        """Give parameters real data on the device inside the ``with`` block; see ``Engine.gather``."""
        gathered, begun = _Gathered(self._manager(), modify), False
        try:
            with self._hooks.deferral:
                self._begin_gather(gathered, params)
            yield
            gathered.whole = True
        finally:
            try:
                with self._hooks.deferral:
                    begun = True
                    self._end_gather(gathered)
            except BaseException:
                if not begun:  # Ctrl-C came before it was held back
                    with self._hooks.deferral:
                        self._end_gather(gathered)
                raise

    def _begin_gather(self, gathered: _Gathered, params: object) -> None:
        manager, modify = gathered.manager, gathered.modify
        places = self._places(params)
        self._changes.adopt()
        manager.finish_updates()  # what is changed must not be on its way home
        indices = dict.fromkeys(index for index, _ in places)
        if modify:
            manager.tiers.refuse_leased(self._tree.units[index] for index in indices)
        for index in indices:
            gathered.loans.append(self._hooks.lending.lend(index))
        gathered.stale = self._refuse_changes(places)
        gathered.seen = {
            (index, slot): _Seen(parameter, keep=modify)
            for index in indices
            for slot, parameter in enumerate(self._tree.parameters[index])
            if (index, slot) in places or not self._gathered[index, slot]
        }
        self._gathered.update(places.keys())
        gathered.places = places
        gathered.watch.enter_context(self._hooks.watch())

    def _end_gather(self, gathered: _Gathered) -> None:
        manager, places, seen, stale = gathered.manager, gathered.places, gathered.seen, gathered.stale
        modify, whole = gathered.modify, gathered.whole
        values = {}
        refused: list[Where] = []  # changed, but not to be modified
        left: list[Where] = []  # of these, what is not undone yet
        rebound: list[Where] = []
        try:
            gathered.watch.close()
            mine = [where for where in seen if modify and where in places]
            self._gathered.subtract(places.keys())
            rebound = [where for where in mine if not seen[where].rebind()]
            whole = whole and not rebound
            changed = [where for where in mine if where in stale or seen[where].changed()]
            values = {where: seen[where].take_out() for where in changed}  # all is as it was, whatever happens next
            refused = [where for where, one in seen.items() if where not in mine and one.refuse()]
            left = [where for where in refused if not modify and seen[where].written()]
            seen.clear()  # a view of a unit keeps it where it is
            for index in {index for index, _ in (*changed, *refused)}:
                self._binding.accept_changes(self._tree.units[index])
        finally:
            for loan in gathered.loans:
                loan.close()
            for index in {index for index, _ in left}:
                manager.discard_working_copy(index)
            self._mark_changed(where for where in left if where[0] in manager.bound)
            if not whole:
                self._mark_changed(where for where in values if where in stale)
        if not gathered.whole:
            return
        if rebound:
            parameter = places[rebound[0]]
            raise StateError(
                f"gather: {self._name(rebound[0])} was replaced by a tensor of another shape, dtype or device than "
                f"{tuple(parameter.shape)}, {parameter.dtype}, {parameter.device}; write into it instead"
            )
        if values:
            checkpoint.scatter_parameters(manager, values, keep_masters=not stale)
        for where in sorted(refused, key=lambda where: where not in places):
            if where in places:
                raise StateError(f"gather: {self._name(where)} was changed; pass modify=True to keep changes")
            raise StateError(
                f"gather: {self._name(where)} was changed but not gathered, and the change would be lost; gather it "
                "too, with modify=True"
            )

    def _places(self, params: object) -> dict[Where, nn.Parameter]:
        """Return the parameters that are to be gathered by their place, of a wrapper its inner tensors."""
        parameters = self._tree.parameters
        return {(index, slot): parameters[index][slot] for _, found in self._members(params) for index, slot in found}

    def _members(self, params: object) -> Iterator[tuple[Any, list[Where]]]:
        """Yield the parameters that are to be gathered, each once, with their places."""
        expected = "gather: expected a parameter, several, or a module but got"
        if isinstance(params, nn.Module):
            params = params.parameters()
        elif isinstance(params, torch.Tensor):
            params = [params]
        elif not isinstance(params, Iterable):
            raise ConfigError(f"{expected} a value of type {type(params).__name__}; pass some of the model's own")
        seen: set[int] = set()
        for parameter in params:
            if not isinstance(parameter, torch.Tensor):
                got = f"a value of type {type(parameter).__name__} in a {type(params).__name__}"
                raise ConfigError(f"{expected} {got}; pass some of the model's own")
            places = self._binding.places_of(parameter)
            if not places:
                raise StateError(
                    f"gather: a parameter of shape {tuple(parameter.shape)} is not one of this engine's model"
                )
            if id(parameter) not in seen:
                seen.add(id(parameter))
                yield parameter, places

    def _refuse_changes(self, places: Mapping[Where, nn.Parameter]) -> set[Where]:
        """Refuse changes from before in the units of `places`; returns the places that have them, or may."""
        stale: set[Where] = set()
        for index in {index for index, _ in places}:
            unit = self._tree.units[index]
            if any(self._gathered[index, slot] for slot in range(len(unit.slots))):
                continue  # they may be from the block around this one, which looks for itself
            name = self._binding.changed(unit)
            if name is None:
                continue
            first = [slot.name for slot in unit.slots].index(name)
            if (index, first) not in places:
                raise StateError(
                    f"parameter {name}: was changed in place or rebound outside the engine, and would be lost; change "
                    "it inside engine.gather(parameter, modify=True)"
                )
            stale.update(where for where in places if where[0] == index and where[1] >= first)
        return stale

    def _mark_changed(self, places: Iterable[Where]) -> None:
        """Let parameters count as changed outside of gather: the next step refuses them."""
        for index, slot in places:
            torch.autograd.graph.increment_version(self._tree.parameters[index][slot])

    def _name(self, where: Where) -> str:
        index, slot = where
        return f"parameter {self._tree.units[index].slots[slot].name}"

    def _fill(self, state: dict[str, Any]) -> None:
        """Replace parameters by their real content, under whatever name; what hooks have made of them stays."""
        wanted: dict[str, Shell[Where] | Where] = {}
        for name, value in state.items():
            source = self._source(value)
            if source is not None:
                wanted[name] = source
                state[name] = None  # it may be a view, which keeps its unit where it is
            elif isinstance(value, torch.Tensor) and value.grad_fn is not None:
                state[name] = value.detach()  # a hook has made it of a parameter
        manager = self._manager()
        self._changes.adopt()
        manager.bound.refuse_changes()
        everything = {where for source in wanted.values() for where in _places_in(source)}
        with self._memory.open("state_dict", sum(map(self._bytes, everything))) as memory:
            values = checkpoint.gather_parameters(manager, everything, memory, pauses=True)
        for name, source in wanted.items():
            state[name] = source.map(values.__getitem__).tensor() if isinstance(source, Shell) else values[source]
        self._changes.note_copies([(name, values[where]) for name in wanted for where in _places_in(wanted[name])])

    def _source(self, value: Any) -> Shell[Where] | Where | None:
        """Return where the bytes are of a parameter, or of a whole view of one, as torch makes of one that is lent."""
        wrapper = self._binding.wrapper_of(value)
        if wrapper is not None:
            return wrapper.shell
        where = self._binding.slot_of(value)
        if where is not None or not isinstance(value, torch.Tensor):
            return where
        if is_wrapper(value):
            shell: Shell[Any] = take_apart(value).map(self._source)
            return shell if all(isinstance(inner, tuple) for _, inner in shell.items()) else None
        index = self._binding.unit_at(address_of(value))
        if index is None:
            return None
        with no_functions():
            for slot, parameter in enumerate(self._tree.parameters[index]):
                if parameter.is_set_to(value) and _reading(parameter) == _reading(value):
                    return index, slot
        return None

    def _bytes(self, where: Where) -> int:
        unit = self._tree.units[where[0]]
        return unit.slots[where[1]].numel * unit.itemsize


def tensors_by_name(module: nn.Module) -> dict[str, torch.Tensor]:
    """Return what a module's state dict holds, without reading parameters."""
    tensors: dict[str, torch.Tensor] = {}
    for path, part in module.named_modules(remove_duplicate=False):
        prefix = f"{path}." if path else ""
        for name, parameter in part._parameters.items():
            if parameter is not None:
                tensors[prefix + name] = parameter
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                tensors[prefix + name] = buffer
    return tensors


def _places_in(source: Shell[Where] | Where) -> list[Where]:
    return [where for _, where in source.items()] if isinstance(source, Shell) else [source]


def _reading(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """Return how the bytes of a tensor are read."""
    return tensor.dtype, tensor.is_conj(), tensor.is_neg()


@dataclasses.dataclass(slots=True)
class _Gathered:
    """What one block has gathered, and how it was."""

    manager: Manager
    modify: bool
    places: Mapping[Where, nn.Parameter] = dataclasses.field(default_factory=dict)
    loans: list[Loan] = dataclasses.field(default_factory=list)
    seen: dict[Where, _Seen] = dataclasses.field(default_factory=dict)
    stale: set[Where] = dataclasses.field(default_factory=set)  # places that were changed before, or may have been
    watch: contextlib.ExitStack = dataclasses.field(default_factory=contextlib.ExitStack)
    whole: bool = False  # the block has ended well


class _Seen:
    """A parameter as it was when it was gathered, to tell whether it has been changed."""

    def __init__(self, parameter: nn.Parameter, *, keep: bool) -> None:
        """Note content and storage; with `keep` also bytes, for torch does not count changes through ``.data``."""
        self._parameter = parameter
        self._version = parameter._version
        self._own = parameter.detach()
        self._before = self._own.clone() if keep else None
        self._replaced = False

    def rebind(self) -> bool:
        """Give the parameter its own storage again, with the content of what took its place; False if it cannot be."""
        now = self._parameter.detach()
        self._replaced = now.data_ptr() != self._own.data_ptr()
        if not self._replaced:
            return True
        fits = (now.shape, now.dtype, now.device) == (self._own.shape, self._own.dtype, self._own.device)
        if fits:
            self._own.copy_(now)
        Binding.rebind(self._parameter, self._own)
        return fits

    def written(self) -> bool:
        """Tell whether torch has counted a change of the content."""
        return self._parameter._version != self._version

    def changed(self) -> bool:
        """Tell whether the content is another one, or may be."""
        if self._replaced or self.written():
            return True
        return self._before is not None and not torch.equal(_bits(self._before), _bits(self._own))

    def take_out(self) -> torch.Tensor:
        """Return the present content, and let the parameter have the kept one again."""
        assert self._before is not None
        here, kept = self._own.view(-1), self._before.view(-1)
        for begin in range(0, kept.numel(), SWAP_NUMEL):
            part = here[begin : begin + SWAP_NUMEL].clone()
            here[begin : begin + SWAP_NUMEL] = kept[begin : begin + SWAP_NUMEL]
            kept[begin : begin + SWAP_NUMEL] = part
        return self._before

    def refuse(self) -> bool:
        """Tell whether the parameter was changed; undo that, with what was kept."""
        self._replaced = self._parameter.data_ptr() != self._own.data_ptr()
        if self._replaced:
            Binding.rebind(self._parameter, self._own)
        if not self.changed():
            return False
        if self._before is not None:
            self._own.copy_(self._before)
        return True


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(-1).view({4: torch.int32, 2: torch.int16}.get(values.element_size(), torch.uint8))
