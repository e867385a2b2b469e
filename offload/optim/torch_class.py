"""Steps that an optimizer's own class makes, parameter by parameter, on fp32 tensors in host memory.

Owns what such a class remembers beside the states that are placed, and the translation between a chunk's bytes and the
tensors that it sees: the fp32 master, the final gradient, the states. So any class of ``torch.optim`` works, slower
than a kernel, with the results that it has in torch. What a class needs is found out in :mod:`offload.optim.probe`. Its
user is :mod:`offload.optim.recipe`.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch

from offload.errors import StateError
from offload.kernels import cpu_adam
from offload.memory.arena import view_at
from offload.memory.budget import Claim
from offload.nested import tensors_in
from offload.optim.probe import OwnClass, OwnHyper, plain_torch
from offload.planning.roles import Role, States
from offload.planning.units import Slot, Where
from offload.shards.stream import Chunk
from offload.torch_private import storage_at


class Placed(Enum):
    """Stands in a record for a state whose bytes are in the tiers."""

    MARK = "placed"


class Records:
    """What an optimizer's own class remembers of each parameter: states by name, those that are placed as a mark.

    Attributes:
        required: names of the states that every parameter has.
    """

    def __init__(self, own: OwnClass, claim: Claim, parameters: Sequence[Sequence[torch.nn.Parameter]]) -> None:
        """Remember nothing yet.

        Args:
            own: the class.
            claim: of the host budget; holds what was planned, and grows with what nobody could foresee.
            parameters: of the model, by unit and position in it: what the user's optimizer has in its groups.
        """
        self._parameters = parameters
        self.required = own.required
        self._make = own.make
        self._instance = own.make([])
        self._records: dict[Where, dict[str, Any]] = {}
        self._sizes: dict[Where, int] = {}
        self._kept_bytes = 0
        self._claim = claim
        self._allowed_bytes = own.size.kept_bytes
        self._step_bytes = own.size.step_bytes

    @contextlib.contextmanager
    def room_for(self, added: OwnClass) -> Iterator[None]:
        """Hold what a param group more takes, which is added inside the ``with`` block; not if that fails.

        Raises:
            BudgetError: the host budget has no room for it.
        """
        before_bytes, step_bytes = self._claim.size_bytes, max(self._step_bytes, added.size.step_bytes)
        self._claim.resize(before_bytes + added.size.kept_bytes + step_bytes - self._step_bytes)
        try:
            yield
        except BaseException:
            self._claim.resize(before_bytes)
            raise
        self._allowed_bytes += added.size.kept_bytes
        self._step_bytes = step_bytes
        if added.size.step_bytes:  # else there was nothing to try
            self.required &= added.required

    def items(self) -> list[tuple[Where, dict[str, Any]]]:
        """Return copies of the records."""
        return [(where, copy.deepcopy(record)) for where, record in self._records.items()]

    def put(self, where: Where, record: dict[str, Any]) -> None:
        """Remember a record, with tensors of its own.

        Raises:
            BudgetError: the host budget has no room for states that nobody could foresee.
        """
        size_bytes = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(record))
        self._kept_bytes += size_bytes - self._sizes.get(where, 0)
        self._sizes[where], self._records[where] = size_bytes, record
        more = self._kept_bytes - self._allowed_bytes
        if more > 0:
            self._claim.resize(self._claim.size_bytes + more)
            self._allowed_bytes += more

    def keep_only(self, wheres: Container[Where | None]) -> None:
        """Forget the records of all other parameters."""
        for where in [where for where in self._records if where not in wheres]:
            del self._records[where]
            self._kept_bytes -= self._sizes.pop(where)

    def update(self, chunk: Chunk, start: int, hyper: OwnHyper, states: States, *, grad_dtype: cpu_adam.Dtype) -> None:
        """Update the parameter that begins at `start` of the unit, all of which is in the chunk."""
        unit = chunk.unit
        position, slot = next(
            (position, slot) for position, slot in enumerate(unit.slots) if slot.offset_numel == start and slot.numel
        )
        with plain_torch():
            parameter = torch.nn.Parameter(_master(chunk, slot))
            parameter.grad = _gradient(chunk, slot, hyper.grad_scale, grad_dtype)
            record = self._records.get((unit.index, position), {})
            views = {name: _view(chunk, role, slot) for role, name in states.roles()}
            address = parameter.data_ptr()
            borrowed = {address, *(view.data_ptr() for view in views.values())}
            given = {name: views[name] if value is Placed.MARK else value for name, value in record.items()}

            if hyper.make is not self._make:  # the user has changed attributes
                self._make, self._instance = hyper.make, hyper.make([])
            instance = self._instance
            member = hyper.members[id(self._parameters[unit.index][position])]
            instance.param_groups = [member.group(hyper.options, [parameter])]
            instance.state[parameter] = given
            try:
                instance.step()
                left = dict(instance.state.get(parameter, {}))
            finally:
                instance.state.clear()
                instance.param_groups = []

            moves, kept = [], {}
            for name, value in left.items():
                view = views.get(name)
                if view is None or not _fits(value, view):
                    kept[name] = _owned(value, borrowed)
                    continue
                kept[name] = Placed.MARK
                if value.data_ptr() != view.data_ptr():
                    moves.append((view, _owned(value, borrowed)))  # it may be what another state is written over
            for view, value in moves:
                view.copy_(value)
            _write_master(chunk, slot, parameter, moved=parameter.data_ptr() != address)
            self.put((unit.index, position), kept)


def recorded(state: Mapping[str, Any], placed: Container[str]) -> dict[str, Any]:
    """Return the record of a state that comes from outside: floating tensors in fp32, which is what torch does."""
    record: dict[str, Any] = {}
    for name, value in state.items():
        if name in placed:
            record[name] = Placed.MARK
        elif isinstance(value, torch.Tensor):
            wide = value.is_floating_point() and name != "step"
            record[name] = value.detach().to("cpu", torch.float32 if wide else value.dtype, copy=True)
        else:
            record[name] = copy.deepcopy(value)
    record.pop("master", None)
    return record


def _fits(value: Any, view: torch.Tensor) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == view.dtype and value.shape == view.shape


def _owned(value: Any, borrowed: Container[int]) -> Any:
    """Return a state without tensors that share memory with what is only lent."""
    if isinstance(value, torch.Tensor):
        lent = value.untyped_storage().data_ptr() in borrowed or value.untyped_storage().nbytes() > value.nbytes
        return value.detach().clone() if lent else value.detach()
    if isinstance(value, dict):
        return {key: _owned(item, borrowed) for key, item in value.items()}
    if type(value) in (list, tuple):
        return type(value)(_owned(item, borrowed) for item in value)
    return value


def _view(chunk: Chunk, role: Role, slot: Slot) -> torch.Tensor:
    """Return a parameter's fp32 elements in `role`, in place."""
    return _tensor_at(chunk.at(role, slot.offset_numel, 4), slot.shape, slot.numel)


def _tensor_at(address: int, shape: Sequence[int], numel: int) -> torch.Tensor:
    return view_at(storage_at(address, numel * 4, torch.device("cpu")), torch.float32, 0, shape)


def _master(chunk: Chunk, slot: Slot) -> torch.Tensor:
    """Return the fp32 master: in place, or a copy where it is split."""
    if chunk.unit.dtype == "float32":
        return _view(chunk, Role.PARAM, slot)
    if chunk.unit.dtype == "float16":
        return _view(chunk, Role.MASTER, slot)
    joined = torch.empty(slot.shape, dtype=torch.float32, device="cpu")
    param, rest = (chunk.at(role, slot.offset_numel, 2) for role in (Role.PARAM, Role.MASTER))
    cpu_adam.join_master(param, rest, joined.data_ptr(), slot.numel)
    return joined


def _write_master(chunk: Chunk, slot: Slot, parameter: torch.Tensor, *, moved: bool) -> None:
    """Store the updated master, and the parameter that follows from it."""
    master = parameter.detach().contiguous()
    if master.dtype != torch.float32 or master.shape != slot.shape:
        raise StateError(
            f"{slot.name}: expected the optimizer to leave {slot.shape} in float32 but got {tuple(master.shape)} in "
            f"{master.dtype}; use another class"
        )
    unit, numel = chunk.unit, slot.numel
    param = chunk.at(Role.PARAM, slot.offset_numel, unit.itemsize)
    if unit.dtype == "bfloat16":
        cpu_adam.split_master(master.data_ptr(), param, chunk.at(Role.MASTER, slot.offset_numel, 2), numel)
        return
    home = param if unit.dtype == "float32" else chunk.at(Role.MASTER, slot.offset_numel, 4)
    if moved:
        ctypes.memmove(home, master.data_ptr(), numel * 4)
    if unit.dtype == "float16":
        cpu_adam.convert(home, cpu_adam.Dtype.FLOAT32, param, cpu_adam.Dtype.FLOAT16, numel)


def _gradient(chunk: Chunk, slot: Slot, scale: float, dtype: cpu_adam.Dtype) -> torch.Tensor:
    """Return the final gradient, stored as `dtype`, as a tensor of its own."""
    gradient = torch.empty(slot.shape, dtype=torch.float32, device="cpu")
    source = chunk.at(Role.GRAD, slot.offset_numel, dtype.itemsize)
    cpu_adam.convert(source, dtype, gradient.data_ptr(), cpu_adam.Dtype.FLOAT32, slot.numel)
    return gradient if scale == 1.0 else gradient.mul_(scale)
