"""Sets an engine up: opens the tiers, and moves the module's parameters into them; and back again.

Owns what happens once, at the beginning and at the end: memory and initial values for what is on the meta device, and
each unit's way home and out. Next: :mod:`offload.build`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from offload.checkpoint import values as checkpoint
from offload.checkpoint.deferred import Unread
from offload.checkpoint.pretrained import Weights
from offload.config import Config
from offload.distributed.ranks import Ranks
from offload.errors import ConfigError, RanksError
from offload.interrupt import Deferral
from offload.memory import drives
from offload.memory.budget import Budget, Tier
from offload.memory.device import Device
from offload.module.binding import Binding, stand_in
from offload.module.quantized import EightBitModules, FourBitModules
from offload.module.saved import SavedTensors
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.units import Where
from offload.shards.bound import Binder
from offload.shards.commits import Record
from offload.shards.manager import Manager
from offload.stats import Counters
from swap import Mode, SwapStore

SWAP_ALIGNMENT = 4096


def open_tiers(
    plan: Plan,
    config: Config,
    device: Device,
    budgets: dict[Tier, Budget],
    binder: Binder,
    counters: Counters,
    safe_point: Deferral,
    record: Record | None = None,
    capacity_bytes: int = 0,
    ranks: Ranks | None = None,
) -> Manager:
    """Take the memory that the plan wants, on the drive too.

    With the `record` of a durable run, the store is one that survives; `capacity_bytes` are there already.

    Raises:
        ConfigError: the drive wants transfers that are aligned more coarsely than this version can do.
        swap.SwapError: an NVMe path is missing, not writable, or full.
    """
    store = None
    deadline_s = config.io_deadline_s
    if plan.store_bytes:
        paths = config.paths()
        size_bytes = max(plan.store_bytes, capacity_bytes)
        mode = Mode.SCRATCH if record is None else Mode.DURABLE
        store = SwapStore(paths, size_bytes, mode=mode, deadline_s=deadline_s, **drives.store_options(paths))
    try:
        if store is not None and store.alignment > SWAP_ALIGNMENT:
            raise ConfigError(
                f"nvme_path: the file system wants transfers aligned to {store.alignment} bytes, more than the "
                f"{SWAP_ALIGNMENT} this version can do; use another file system"
            )
        return Manager(
            plan,
            device,
            budgets,
            store,
            binder,
            counters,
            deadline_s=deadline_s,
            safe_point=safe_point,
            prefetch=config.prefetch,
            record=record,
            ranks=ranks,
        )
    except BaseException:
        if store is not None:
            store.close()
        raise


class Loader:
    """Moves a module's parameters to their homes; can be undone."""

    def __init__(
        self, module: nn.Module, tree: UnitTree, binding: Binding, initialise: Any, weights: Weights | None = None
    ) -> None:
        """Prepare.

        Args:
            module: the model.
            tree: its units.
            binding: of its parameters.
            initialise: callable that gives a module's meta parameters their values; None for the module's own way.
            weights: values of what is on the meta device.
        """
        self._module = module
        self._tree = tree
        self._binding = binding
        self._initialise = initialise
        self._weights = weights
        self._originals: dict[Where, torch.Tensor] = {}  # in whose place came what files have
        self._loaded: list[int] = []
        self.digests: dict[str, str] = {}  # of what ranks are still to compare, by name
        self._half_loaded: dict[Where, Unread | torch.Tensor] = {}  # what a unit had when loading it failed
        self._devices = [
            [torch.device("cpu") if parameter.is_meta else parameter.device for parameter in members]
            for members in tree.parameters
        ]
        self._four_bit = FourBitModules(module)
        self._eight_bit = EightBitModules(module)
        self._buffers: list[tuple[nn.Module, str, torch.device]] = []  # that have been moved, with where they were
        self._former: list[tuple[nn.Module, str, torch.Tensor, torch.Tensor]] = []  # buffers and content, while loading

    def load(self, manager: Manager) -> None:
        """Move the parameters to their homes unit by unit; each unit's original memory is freed at once.

        Raises:
            ConfigError: something is on the meta device and gets no values; a file was cut off meanwhile.
            OSError: a file cannot be read.
        """
        compared = self._compare_slices(manager) if manager.tiers.plan.request.slices_parameters else set()
        self._eight_bit.release()
        meta_buffers = self._materialise_buffers()
        for unit in self._tree.units:
            manager.safe_point.check()
            members = self._tree.parameters[unit.index]
            given = self._take_weights(unit.index)
            if any(parameter.is_meta for parameter in members):
                self._materialise(unit.index)
            values = {(unit.index, slot): given.pop(slot, p.data) for slot, p in enumerate(members)}
            if manager.tiers.plan.request.slices_parameters:
                self._take_digests(values, besides=compared)
            try:
                checkpoint.scatter_parameters(manager, values)
            except BaseException:
                self._half_loaded = values
                raise
            del values
            if unit.index not in manager.bound:
                self._binding.unbind(unit)
            self._loaded.append(unit.index)
        for name, buffer in meta_buffers.items():
            _refuse_uninitialised(name, buffer)
        self._originals = {where: original for where, original in self._originals.items() if original.is_meta}
        self._former.clear()

    def take_up(self, manager: Manager, record: Mapping[str, Any]) -> None:
        """Let the parameters be those of a run that was committed, whatever they are now.

        Raises:
            ConfigError: a buffer is on the meta device and gets no values.
            swap.SwapCorruptError: the store lacks a part of the content.
        """
        manager.take_up(frozenset(record["sides"]))
        self._eight_bit.release()
        meta_buffers = self._materialise_buffers()
        made = {id(buffer) for buffer in meta_buffers.values()}
        for unit in self._tree.units:
            members = self._tree.parameters[unit.index]
            if any(parameter.is_meta for parameter in members):
                owners = self._owners(unit.index)
                if any(id(buffer) in made for module, _ in owners for buffer in module.buffers(recurse=False)):
                    self._materialise(unit.index)  # which gives the buffers their values
                else:
                    _leave_meta(members)
            self._binding.unbind(unit)
            self._loaded.append(unit.index)
        for name, buffer in meta_buffers.items():
            if name not in record["contents"]["buffers"]:
                _refuse_uninitialised(name, buffer)
        self._former.clear()

    def unload(self, manager: Manager, *, undo: bool = False) -> dict[int, list[torch.Tensor]]:
        """Return ordinary tensors in host memory with the units' parameters; the manager is only to be closed then.

        States and gradients give way first, then each unit for its own tensors: the peak is what the tiers hold anyway,
        or the parameters and one unit.

        Args:
            manager: owner of the shards.
            undo: the engine is not made: what files have given a value is as it was before, on the meta device.
        """
        manager.finish_updates()
        manager.tiers.drop_training_state()
        if not undo:
            self._originals.clear()
        unloaded: dict[int, list[torch.Tensor]] = {}
        for index in self._loaded:
            wheres = [(index, slot) for slot in range(len(self._tree.units[index].slots))]
            try:
                values = checkpoint.gather_parameters(manager, set(wheres) - self._originals.keys())
                if manager.tiers.plan.request.slices_parameters:  # none is dropped that another rank is to have
                    manager.tiers.ranks.agree(f"giving back {self._tree.units[index].name}")
            except RanksError:
                if undo:
                    break  # the ranks have failed, and with them what they had of these
                raise
            for where, original in self._originals.items():
                if where in wheres:  # it comes back at the end; until then, something without memory
                    values[where] = stand_in(tuple(original.shape), original.dtype, torch.device("cpu"))
            unloaded[index] = [values[where] for where in wheres]
            manager.tiers.drop_parameters(index)
        return unloaded

    def give_back(self, unloaded: dict[int, list[torch.Tensor]]) -> None:
        """Give parameters these tensors, and buffers their content, on the devices where they were before."""
        self._four_bit.detach()
        for index, tensors in unloaded.items():
            places = zip(tensors, self._devices[index], strict=True)
            self._binding.replace(self._tree.units[index], [tensor.to(device) for tensor, device in places])
        for index in self._loaded:
            if index not in unloaded:
                self._binding.mark_lost(index)
        for (index, slot), value in self._half_loaded.items():
            if isinstance(value, torch.Tensor):
                self._binding.rebind(self._tree.parameters[index][slot], value)
        for (index, slot), original in self._originals.items():
            if index in unloaded or index not in self._loaded:
                _exchange(self._tree.parameters[index][slot], original)
        for part, name, device in self._buffers:
            buffer = part._buffers.get(name)
            if buffer is not None:
                part._buffers[name] = buffer.to(device)
        for part, name, former, content in reversed(self._former):  # one may have two names
            part._buffers[name] = former.copy_(content)
        self._binding.settle_devices()
        self._eight_bit.detach()

    def move_buffers(self, device: torch.device, saved: SavedTensors) -> None:
        """Move the buffers of all modules to the device, where compute wants them, and what is like them."""
        self._four_bit.attach(device, saved)
        self._eight_bit.attach(device)
        self._binding.settle_devices()
        for part in self._module.modules():
            for name, buffer in part.named_buffers(recurse=False):
                if buffer.device != device and not buffer.is_meta:
                    self._buffers.append((part, name, buffer.device))
                    part._buffers[name] = buffer.to(device)

    def _take_weights(self, index: int) -> dict[int, Unread | torch.Tensor]:
        """Return what files have of a unit by slot; its parameters are stand-ins meanwhile."""
        given = {}
        for slot, parameter in enumerate(self._tree.parameters[index]):
            value = None if self._weights is None else self._weights.parameters.pop(id(parameter), None)
            if value is not None:
                given[slot] = value
                self._originals[index, slot] = parameter.detach()
                _exchange(parameter, self._binding.stand_in_of((index, slot)))
        return given

    def _compare_slices(self, manager: Manager) -> set[Where]:
        """Compare the parameters that have values with other ranks', of which each will have slices; returns which.

        Raises:
            RanksError: one differs. Nothing was changed.
        """
        awaited = set() if self._weights is None else set(self._weights.parameters)
        values = {
            (unit.index, slot): parameter.data
            for unit, members in zip(self._tree.units, self._tree.parameters, strict=True)
            for slot, parameter in enumerate(members)
            if not parameter.is_meta and id(parameter) not in awaited
        }
        self._take_digests(values, besides=set())
        facts = {f"the values of {name}": digest for name, digest in self.digests.items()}
        self.digests = {}
        manager.tiers.ranks.agree("loading", facts)
        return set(values)

    def _take_digests(self, values: Mapping[Where, Unread | torch.Tensor], *, besides: set[Where]) -> None:
        for (index, slot), value in values.items():
            if (index, slot) not in besides:
                self.digests[self._tree.units[index].slots[slot].name] = checkpoint.digest(value)

    def _materialise_buffers(self) -> dict[str, torch.Tensor]:
        """Give buffers what files have, and meta buffers memory, without parameters beside them initial values too."""
        made: dict[str, torch.Tensor] = {}
        with torch.no_grad():
            for module, name, value in () if self._weights is None else self._weights.buffers:
                former = module.get_buffer(name)
                self._former.append((module, name, former, former.clone()))
                module._buffers[name] = value if former.is_meta else former.copy_(value)  # which others may share
            for path, module in self._module.named_modules():
                own = {name: b for name, b in module._buffers.items() if b is not None and b.is_meta}
                for name, buffer in own.items():
                    module._buffers[name] = made[f"{path}.{name}" if path else name] = _poisoned(buffer)
                if own and not any(p is not None for p in module._parameters.values()):
                    self._initialiser(module, path)(module)
        return made

    def _materialise(self, index: int) -> None:
        """Give a unit's meta parameters memory and their initial values."""
        members = self._tree.parameters[index]
        with torch.no_grad():
            for parameter in members:
                if parameter.is_meta:
                    _exchange(parameter, _poisoned(parameter))
            for module, path in self._owners(index):
                self._initialiser(module, path)(module)
            for slot, parameter in zip(self._tree.units[index].slots, members, strict=True):
                _refuse_uninitialised(slot.name, parameter)

    def _owners(self, index: int) -> list[tuple[nn.Module, str]]:
        """Return the modules that have parameters of a unit, with their names."""
        owned = {id(parameter) for parameter in self._tree.parameters[index]}
        return [
            (module, path)
            for module, path in self._tree.module_names.items()
            if any(id(parameter) in owned for parameter in module.parameters(recurse=False))
        ]

    def _initialiser(self, module: nn.Module, path: str) -> Callable[[nn.Module], object]:
        if self._initialise is not None:
            return self._initialise  # type: ignore[no-any-return]
        if hasattr(module, "reset_parameters"):
            return lambda m: m.reset_parameters()  # type: ignore[operator]
        raise ConfigError(
            f"module {path or type(module).__name__}: its parameters or buffers are on the meta device and it has no "
            "reset_parameters; pass init_weights=callable"
        )


def _exchange(parameter: nn.Parameter, content: torch.Tensor) -> None:
    """Let a parameter have this content; torch would not let a meta tensor's ``.data`` be on another device."""
    torch.utils.swap_tensors(parameter, nn.Parameter(content, parameter.requires_grad))


def _leave_meta(members: Sequence[nn.Parameter]) -> None:
    """Let parameters on the meta device be ordinary ones without memory: their content is elsewhere."""
    for parameter in members:
        if parameter.is_meta:
            empty = stand_in(tuple(parameter.shape), parameter.dtype, torch.device("cpu"))
            _exchange(parameter, empty)


def _poison(dtype: torch.dtype) -> float | int | None:
    """Return the value that marks memory nobody has written yet; None where every value is an ordinary one."""
    if dtype.is_floating_point or dtype.is_complex:
        return float("nan")
    return None if dtype in (torch.bool, torch.uint8) else torch.iinfo(dtype).min


def _poisoned(tensor: torch.Tensor) -> torch.Tensor:
    """Return CPU memory for a meta tensor, full of :func:`_poison`."""
    return torch.full(tensor.shape, _poison(tensor.dtype) or 0, dtype=tensor.dtype, device="cpu")


def _refuse_uninitialised(name: str, tensor: torch.Tensor) -> None:
    poison = _poison(tensor.dtype)
    if poison is None:
        return
    if (tensor.isnan() if tensor.is_floating_point() else tensor == poison).any():
        raise ConfigError(
            f"{name}: it was on the meta device, and initialising its module left it without values; pass "
            "init_weights=callable"
        )
