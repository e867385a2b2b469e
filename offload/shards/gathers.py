"""Parameters of several ranks after a step: each rank has updated its slices, and takes the others' in.

Owns the way from a shard's home, wherever it is, to the other ranks and back. All ranks come through here with the same
units in one order. What the hosts of all ranks have in place goes round by a thread of its own, while the next unit is
updated. Next: :mod:`offload.shards.gradients_of_ranks` has the memory, :mod:`offload.optim.step` calls.
"""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections.abc import Sequence
from concurrent.futures import Future, wait

from offload.planning.roles import Role
from offload.planning.units import Unit
from offload.shards.gradients_of_ranks import MicroBatch
from offload.shards.leases import Leases
from offload.shards.manager import Manager
from offload.shards.stream import Chunk

_PARAM = frozenset({Role.PARAM})


def make_updates(manager: Manager, units: Sequence[Unit]) -> None:
    """Make the updates of a step; let the parameters of `units` be what their ranks have made of them.

    Where that fails, parameters of all units that have not come from all ranks are lost: they would be a mixture of old
    and new slices, or old ones where the others' are new.

    Raises:
        RanksError: another rank has failed, ended or not come.
        swap.SwapError: an I/O error, one that may be repeated among them: the other ranks do not wait for that.
    """
    shared = manager.tiers.shared
    request = manager.tiers.plan.request
    if shared is None or request.slices == 1 or request.slices_parameters:  # each has made all; or who needs it gathers
        manager.finish_updates()
        return
    come = set[int]()
    try:
        _go_round(manager, shared, [unit for unit in units if unit.index in shared.in_place], come)
        for unit in units:
            if unit.index not in shared.in_place:
                _gather(manager, shared, unit)
                come.add(unit.index)
    except BaseException as error:
        if manager.forward.failure is None:
            manager.forward.lose(error)
        for unit in units:
            if unit.index not in come:
                with contextlib.suppress(Exception):  # the first error is on its way up, and the step is lost anyway
                    _lose(manager, unit)
        raise


def _go_round(manager: Manager, shared: MicroBatch, units: Sequence[Unit], come: set[int]) -> None:
    """Make all updates, and gather each of `units` where it is at home, beside the updates that follow its own.

    What all ranks have sent of has `come`, also where another one fails.
    """
    started = list[tuple[Unit, Future[None]]]()
    try:
        for unit in units:
            manager.forward.require(unit.index)
            buffer = manager.tiers.param(unit.index).home_buffer
            assert buffer is not None
            started.append((unit, shared.start_gather(buffer.address, unit.index)))
        manager.finish_updates()
    finally:
        begin = time.perf_counter()
        wait([gather for _, gather in started])
        manager.tiers.counters.wait_for_ranks(begin, time.perf_counter())
        come.update(unit.index for unit, gather in started if gather.exception() is None)
    for _, gather in started:
        gather.result()


def _lose(manager: Manager, unit: Unit) -> None:
    """Note that the parameters of a unit are of no use: some ranks' slices have not come."""
    leases = Leases(manager.tiers)
    leases.open(unit, reads=frozenset(), writes=_PARAM)
    leases.abandon({unit.index})


def _gather(manager: Manager, shared: MicroBatch, unit: Unit) -> None:
    room = shared.room_for(unit.index)
    base, size = room.data_ptr(), unit.itemsize

    def take_out(chunk: Chunk) -> None:
        ctypes.memmove(base + chunk.begin * size, chunk.addresses[Role.PARAM], chunk.numel * size)

    def put_in(chunk: Chunk) -> None:
        ctypes.memmove(chunk.addresses[Role.PARAM], base + chunk.begin * size, chunk.numel * size)

    manager.stream([unit], take_out, reads=_PARAM, span=shared.owned(unit.index))
    shared.gather(room, unit.index)
    manager.stream([unit], put_in, reads=frozenset(), writes=_PARAM)
