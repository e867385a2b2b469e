"""Parameters of several ranks after a step: each rank has updated its slices, and takes the others' in.

Owns the way from a shard's home, wherever it is, to the other ranks and back. All ranks come through here with the same
units in one order. Next: :mod:`offload.shards.gradients_of_ranks` has the memory, :mod:`offload.optim.step` calls.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterable

from offload.memory.budget import Tier
from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.gradients_of_ranks import MicroBatch
from offload.shards.manager import Manager
from offload.shards.stream import Chunk

_PARAM = frozenset({Role.PARAM})


def gather_updated(manager: Manager, units: Iterable[Unit]) -> None:
    """Let the parameters of `units` be what their ranks have made of them; nothing where each has made all.

    Raises:
        RanksError: another rank has failed, ended or not come. Parameters are lost then.
        swap.SwapError: an I/O error, likewise.
    """
    shared = manager.tiers.shared
    request = manager.tiers.plan.request
    if shared is not None and request.slices > 1 and not request.slices_parameters:  # else who needs them gathers them
        for unit in units:
            _gather(manager, shared, unit)


def _gather(manager: Manager, shared: MicroBatch, unit: Unit) -> None:
    room = shared.room_for(unit.index)
    base, size = room.data_ptr(), unit.itemsize

    def take_out(chunk: Chunk) -> None:
        ctypes.memmove(base + chunk.begin * size, chunk.addresses[Role.PARAM], chunk.numel * size)

    def put_in(chunk: Chunk) -> None:
        ctypes.memmove(chunk.addresses[Role.PARAM], base + chunk.begin * size, chunk.numel * size)

    def fill(chunk: Chunk) -> None:
        shared.gather_at(chunk.addresses[Role.PARAM], unit.index)

    in_place = Tier.DEVICE if manager.tiers.device.addressable else Tier.HOST
    if manager.tiers.plan.home(unit, Role.PARAM) is in_place:
        manager.stream([unit], fill, reads=_PARAM, writes=_PARAM)  # in place: all of it is one chunk
        return
    manager.stream([unit], take_out, reads=_PARAM, span=shared.owned(unit.index))
    shared.gather(room, unit.index)
    manager.stream([unit], put_in, reads=frozenset(), writes=_PARAM)
