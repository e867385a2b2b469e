"""Where the parameters of a model are: views of their unit's bytes on the device, or stand-ins; rebinds ``param.data``.

Owns which of the two each unit is, who is lent its parameters, and what others have changed in them meanwhile:

* A parameter that is not resident has as ``.data`` one NaN *expanded* to its shape (stride 0): shape, dtype and
  identity stay real, it takes no memory, and a use that slipped through turns into NaN, which is noticed.
* Outside of a use, a parameter's own class sees every call (:mod:`offload.module.absent`); while it is lent, it is an
  ordinary parameter.
* Of a parameter that is made of inner tensors, these are what is bound; it is lent while all of them are.

Asks nobody: :mod:`offload.shards.working_set` says when a unit comes and goes. Next: :mod:`offload.module.hooks`.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from offload.errors import ConfigError, StateError
from offload.labels import labelled
from offload.module.absent import Absent, absent_class
from offload.planning.partition import UnitTree, Wrapper
from offload.planning.units import Unit, Where
from offload.torch_private import no_functions, no_subclasses
from offload.wrappers import Shell, is_wrapper, take_apart


class Binding:
    """Parameters of one engine's model. See the module's text.

    Attributes:
        tree: units and parameters.
        dtypes: of the units.
        rebound: per unit, a parameter that somebody has changed while it was a stand-in.
    """

    def __init__(self, tree: UnitTree, device: torch.device) -> None:
        self.tree = tree
        self.dtypes = [getattr(torch, unit.dtype) for unit in tree.units]
        self.rebound: dict[int, str] = {}
        self._slot_of: dict[int, Where] = {}
        self._stand_ins: list[list[torch.Tensor]] = []
        for unit, parameters in zip(tree.units, tree.parameters, strict=True):
            self._stand_ins.append([stand_in(s.shape, self.dtypes[unit.index], device) for s in unit.slots])
            for slot, parameter in enumerate(parameters):
                self._slot_of[id(parameter)] = (unit.index, slot)
        self._stood_in_for = {
            stand.untyped_storage().data_ptr(): (index, slot)
            for index, stands in enumerate(self._stand_ins)
            for slot, stand in enumerate(stands)
        }
        self._units_of: dict[int, tuple[int, ...]] = {n: (where[0],) for n, where in self._slot_of.items()}
        self._wrapper_of = {id(wrapper.parameter): wrapper for wrapper in tree.wrappers}
        self._wrappers_in: dict[int, list[Wrapper]] = {}
        for number, wrapper in self._wrapper_of.items():
            self._units_of[number] = tuple(dict.fromkeys(index for index, _ in wrapper.places))
            for index in self._units_of[number]:
                self._wrappers_in.setdefault(index, []).append(wrapper)
        self._kinds = [[type(parameter) for parameter in parameters] for parameters in tree.parameters]
        self._lent = [0] * len(tree.units)  # to those who use a unit's parameters now
        self._bases: dict[int | None, int] = {}  # by address; None is none
        self._base_of: dict[int, int] = {}
        self._bound: dict[int, list[tuple[int, int]]] = {}  # what _look returned when the unit was bound
        self._away: dict[int, list[tuple[int, int]]] = {}  # the same of units whose parameters are stand-ins

    # --- coming and going -------------------------------------------------------------------------------------------

    @labelled("bind")
    def bind(self, unit: Unit, address: int, views: Sequence[torch.Tensor]) -> None:
        """Let the unit's parameters be what `views` view, one each: the unit's bytes begin at `address`."""
        index, away = unit.index, self._away.pop(unit.index, None)
        with no_functions():
            found = self._seen(index)
            for parameter, view in zip(self.tree.parameters[index], views, strict=True):
                parameter.data = view  # which does not count as a change
            self._bound[index] = [(seen[0], view.data_ptr()) for seen, view in zip(found, views, strict=True)]
        if away is not None and found != away:
            self._note_rebound(unit, away, found)
        self._bases[address] = index
        self._base_of[index] = address

    def unbind(self, unit: Unit) -> None:
        """Let the unit's parameters be stand-ins."""
        index, own = unit.index, self._stand_ins[unit.index]
        base = self._base_of.pop(index, None)
        self._bound.pop(index, None)
        self.rebound.pop(index, None)
        if base is not None:
            del self._bases[base]
        with no_functions():
            for parameter, stand in zip(self.tree.parameters[index], own, strict=True):
                parameter.data = stand
            self._away[index] = self._seen(index)

    def _note_rebound(self, unit: Unit, away: list[tuple[int, int]], found: list[tuple[int, int]]) -> None:
        """Note a parameter that is not the stand-in any more, or whose content was written to through an alias."""
        changed = [now != then for now, then in zip(found, away, strict=True)]
        self.rebound[unit.index] = unit.slots[changed.index(True)].name

    def replace(self, unit: Unit, tensors: Iterable[torch.Tensor]) -> None:
        """Give the unit's parameters ordinary memory: the engine is being closed."""
        with no_subclasses():
            for parameter, tensor in zip(self.tree.parameters[unit.index], tensors, strict=True):
                parameter.data = tensor
        self._set_classes(unit.index, self._kinds[unit.index])

    def mark_lost(self, index: int) -> None:
        """Let nobody read parameters whose content is lost."""
        self._set_classes(index, map(absent_class, self._kinds[index]))

    @staticmethod
    def rebind(parameter: nn.Parameter, memory: torch.Tensor) -> None:
        """Let a parameter view this memory, its own where somebody else had rebound it."""
        with no_subclasses():
            parameter.data = memory

    def stand_in_of(self, where: Where) -> torch.Tensor:
        """Return what a parameter's ``.data`` is while it is away."""
        return self._stand_ins[where[0]][where[1]]

    # --- lending ----------------------------------------------------------------------------------------------------

    def lend(self, index: int) -> None:
        """Let a unit's parameters be ordinary ones for one more user."""
        if not self._lent[index]:
            try:
                self._set_classes(index, self._kinds[index])
            except BaseException:  # a signal handler of the user's, such as that of a timeout
                self.watch(index)
                raise
        self._lent[index] += 1

    def take_back(self, index: int) -> None:
        """Note that one of those who use a unit's parameters is done with them."""
        self._lent[index] -= 1
        if not self._lent[index]:
            self.watch(index)

    def is_lent(self, index: int) -> bool:
        """Tell whether somebody uses a unit's parameters."""
        return self._lent[index] > 0

    def watch(self, index: int) -> None:
        """Let the parameters' own class see every call, whoever has been lent them."""
        self._set_classes(index, map(absent_class, self._kinds[index]))

    def _set_classes(self, index: int, kinds: Iterable[type]) -> None:
        for parameter, kind in zip(self.tree.parameters[index], kinds, strict=True):
            parameter.__class__ = kind
        for wrapper in self._wrappers_in.get(index, ()):
            self._settle_class(wrapper)

    def _settle_class(self, wrapper: Wrapper) -> None:
        absent = any(isinstance(self._member(where), Absent) for where in wrapper.places)
        wrapper.parameter.__class__ = absent_class(wrapper.shell.kind) if absent else wrapper.shell.kind

    # --- parameters that are made of inner tensors ------------------------------------------------------------------

    def settle_devices(self) -> None:
        """Let parameters that are made of inner tensors say that they are where these are.

        The device that such a tensor has is fixed when it is made: another one takes its place.
        """
        for wrapper in self.tree.wrappers:
            shell, parameter = wrapper.shell.map(self._member), wrapper.parameter
            with no_subclasses():
                if all(inner.device == parameter.device for _, inner in shell.items()):
                    continue
                made = shell.tensor()
                vars(made).update({name: value for name, value in vars(parameter).items() if name not in vars(made)})
                torch.utils.swap_tensors(parameter, made)
            self._settle_class(wrapper)

    def refuse_replaced(self, index: int) -> None:
        """Check that parameters still have the inner tensors that are in a unit.

        Raises:
            StateError: somebody has put another one in the place of one; names it.
        """
        for wrapper in self._wrappers_in.get(index, ()):
            inner = vars(wrapper.parameter)
            for name, part in wrapper.shell.parts.items():
                if not isinstance(part, Shell) and inner.get(name, self._member(part)) is not self._member(part):
                    raise StateError(
                        f"parameter {wrapper.name}: expected its own inner tensor {name} but got another one in its "
                        "place, which the engine does not have; put it back, and write into it inside "
                        "engine.gather(parameter, modify=True)"
                    )

    def _member(self, where: Where) -> torch.Tensor:
        return self.tree.parameters[where[0]][where[1]]

    def spread(self, parameter: torch.Tensor, value: Any) -> dict[Where, Any]:
        """Return what a value of a parameter is to each of its places.

        Raises:
            ConfigError: it is of another class than a parameter that is made of inner tensors, or made in another way.
        """
        wrapper = self._wrapper_of.get(id(parameter))
        if wrapper is None:
            return {self._slot_of[id(parameter)]: value}
        if isinstance(value, torch.Tensor) and is_wrapper(value):
            shell = take_apart(value)
            if shell.described() == wrapper.shell.described():
                inner = dict(shell.items())
                return {where: inner[name] for name, where in wrapper.shell.items()}
        kind = type(value).__name__
        if isinstance(value, torch.Tensor):
            kind += f" of shape {tuple(value.shape)}"
        raise ConfigError(
            f"{wrapper.name}: expected a {wrapper.shell.kind.__name__} of shape {tuple(wrapper.shell.shape)}, "
            f"quantized in the same way, but got a {kind}; load what state_dict() of a model that was quantized alike "
            "returned"
        )

    # --- what others have changed -----------------------------------------------------------------------------------

    def changed(self, unit: Unit) -> str | None:
        """Return the name of a parameter that somebody else has written to or rebound since the unit was bound."""
        changed = self.changes(unit)
        return unit.slots[changed[0]].name if changed else None

    def changes(self, unit: Unit) -> list[int]:
        """Return the slots of parameters that somebody else has written to or rebound since the unit was bound."""
        bound, rebound = self._bound.get(unit.index), self.rebound.get(unit.index)
        if bound is None or ((found := self._look(unit.index)) == bound and rebound is None):
            return []
        return [i for i, slot in enumerate(unit.slots) if found[i] != bound[i] or slot.name == rebound]

    def _look(self, index: int) -> list[tuple[int, int]]:
        """Return torch's version counter and the address of each of a unit's parameters."""
        with no_functions():
            return self._seen(index)

    def _seen(self, index: int) -> list[tuple[int, int]]:
        """As :meth:`_look`, where no class of the parameters sees it."""
        return [(parameter._version, parameter.data_ptr()) for parameter in self.tree.parameters[index]]

    def accept_changes(self, unit: Unit) -> None:
        """Take the present content of the unit's parameters as its own."""
        self.rebound.pop(unit.index, None)
        if unit.index in self._bound:
            now, bound = self._look(unit.index), self._bound[unit.index]
            self._bound[unit.index] = [(new[0], old[1]) for new, old in zip(now, bound, strict=True)]

    def count_update(self, unit: Unit) -> None:
        """Let torch count a change of each of a bound unit's parameters, which is nobody else's."""
        for parameter in self.tree.parameters[unit.index]:
            torch.autograd.graph.increment_version(parameter)
        self.accept_changes(unit)

    def refuse_rebound(self) -> None:
        """Check that no parameter is other memory than its unit's: what somebody has put there in a forward.

        Raises:
            StateError: one is; names it.
        """
        for index, bound in self._bound.items():
            for slot, now, then in zip(self.tree.units[index].slots, self._look(index), bound, strict=True):
                if now[1] != then[1]:
                    raise StateError(
                        f"parameter {slot.name}: was rebound (its .data replaced) inside a forward, and what was put "
                        "there is lost; assign outside of forwards, or inside engine.gather(parameter, modify=True)"
                    )

    # --- which is which ---------------------------------------------------------------------------------------------

    def is_bound(self, index: int) -> bool:
        """Tell whether a unit's parameters view bytes on the device."""
        return index in self._base_of

    def unit_at(self, address: int | None) -> int | None:
        """Return the unit whose bytes begin at `address`, None where none does."""
        return self._bases.get(address)

    def stood_in_for(self, address: int) -> Where | None:
        """Return the parameter whose stand-in has its storage at `address`, None where none has."""
        return self._stood_in_for.get(address)

    def identities(self) -> Collection[int]:
        """Return the identities of all parameters: they are kept alive, so these are theirs alone."""
        return self._units_of.keys()

    def slot_of(self, parameter: object) -> Where | None:
        """Return (unit, slot) of a parameter of this model; None for a wrapper, and for anything else."""
        return self._slot_of.get(id(parameter))

    def wrapper_of(self, parameter: object) -> Wrapper | None:
        """Return what a parameter of this model that is made of inner tensors is; None for anything else."""
        return self._wrapper_of.get(id(parameter))

    def places_of(self, parameter: object) -> list[Where]:
        """Return where a parameter of this model has its elements; nothing for anything else."""
        wrapper = self._wrapper_of.get(id(parameter))
        if wrapper is not None:
            return wrapper.places
        where = self._slot_of.get(id(parameter))
        return [] if where is None else [where]

    def units_of(self, values: Iterable[Any]) -> list[int]:
        """Return the units of the parameters in `values` (one level deep)."""
        used: list[int] = []
        for value in values:
            units = self._units_of.get(id(value))
            if units is not None:
                used.extend(units)
            elif type(value) in (list, tuple):
                used.extend(self.units_of(value))
        return used

    def name(self, parameter: torch.Tensor) -> str:
        """Return what a parameter of this model is called."""
        wrapper = self._wrapper_of.get(id(parameter))
        if wrapper is not None:
            return wrapper.name
        unit, slot = self._slot_of[id(parameter)]
        return self.tree.units[unit].slots[slot].name


def stand_in(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of `shape` without memory of its own, full of NaN (zeros where the dtype has no NaN)."""
    value = float("nan") if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((), value, dtype=dtype, device=device).expand(shape)
