"""``deepspeed.comm``: collectives. Of several processes they are torch's, which have the same arguments in one order.

Engines with slices of parameters meet before those of all processes: one that evaluates may be inside of a forward, and
need the others. In one process, collectives give what it has, whether a process group was made or not: reductions and
broadcasts leave tensors as they are, and gathers copy. Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch.distributed import HashStore, ReduceOp  # type: ignore[attr-defined]

from offload.errors import ConfigError, StateError
from offload.integrations.deepspeed.engine import meet
from offload.integrations.deepspeed.refusals import missing
from offload.integrations.libraries import launched

__all__ = [
    "ReduceOp",
    "all_gather",
    "all_gather_into_tensor",
    "all_gather_object",
    "all_reduce",
    "all_to_all_single",
    "barrier",
    "broadcast",
    "broadcast_object_list",
    "destroy_process_group",
    "gather",
    "get_global_rank",
    "get_local_rank",
    "get_rank",
    "get_world_group",
    "get_world_size",
    "init_distributed",
    "is_available",
    "is_initialized",
    "log_summary",
    "monitored_barrier",
    "new_group",
    "reduce",
    "reduce_scatter",
    "reduce_scatter_tensor",
    "scatter",
]

Call = TypeVar("Call", bound=Callable[..., Any])
_distributed: Any = torch.distributed


def init_distributed(
    dist_backend: str | None = None,
    auto_mpi_discovery: bool = True,
    distributed_port: int = 29500,
    verbose: bool = True,
    timeout: Any = None,
    init_method: str | None = None,
    dist_init_required: bool | None = None,
    config: Any = None,
    rank: int = -1,
    world_size: int = -1,
) -> None:
    """Make torch's process group, as torchrun or another launcher has said; else one of this process alone.

    Args:
        dist_backend: of torch; None: torch's choice.
        auto_mpi_discovery: not heeded.
        distributed_port: not heeded: launchers say it.
        verbose: not heeded.
        timeout: of torch; None: torch's choice.
        init_method: of torch; None: the launcher's environment.
        dist_init_required: False makes none.
        config: not heeded.
        rank: of this process; -1: as the launcher says.
        world_size: processes; -1: as the launcher says.

    Raises:
        ConfigError: there are to be several processes but the launcher has not said where they meet.
    """
    there = torch.distributed.is_available() and not torch.distributed.is_initialized()
    if not there or dist_init_required is False:
        return
    world = world_size if world_size > 0 else launched()
    if world == 1:
        if rank > 0:
            raise ConfigError(f"init_distributed: expected rank 0 of one process but got {rank}; pass world_size, too")
        _distributed.init_process_group(dist_backend, store=HashStore(), rank=0, world_size=1)
        return
    absent = [name for name in ("RANK", "MASTER_ADDR", "MASTER_PORT") if not os.environ.get(name)]
    if init_method is None and absent:
        raise ConfigError(
            f"init_distributed: expected {world} processes that know of each other but got no {', '.join(absent)}; "
            "start them with torchrun"
        )
    own = int(os.environ["RANK"]) if rank < 0 and init_method is None else rank
    _distributed.init_process_group(
        dist_backend, init_method=init_method or "env://", timeout=timeout, rank=own, world_size=world
    )


def are_several() -> bool:
    """Tell whether there are several processes.

    Raises:
        StateError: there are, but no process group.
    """
    if is_initialized():
        return bool(_distributed.get_world_size() > 1)
    if launched() > 1:
        raise StateError(
            f"deepspeed.comm: expected a process group but got none, and WORLD_SIZE={launched()}; call "
            "deepspeed.init_distributed() before"
        )
    return False


def _or_torch(call: Call) -> Call:
    """Let several processes have torch's function of the same name."""
    signature = inspect.signature(call)  # torch has other names for some arguments

    @functools.wraps(call)
    def chosen(*args: Any, **kwargs: Any) -> Any:
        if not are_several():
            return call(*args, **kwargs)
        bound = signature.bind(*args, **kwargs)
        return getattr(_distributed, call.__name__)(*bound.args, **bound.kwargs)

    return chosen  # type: ignore[return-value]


def _collective(call: Call) -> Call:
    """Let several processes have torch's function of the same name, behind a meeting of all if all call it."""
    chosen, signature = _or_torch(call), inspect.signature(call)

    @functools.wraps(call)
    def met(*args: Any, **kwargs: Any) -> Any:
        if are_several():
            group = signature.bind(*args, **kwargs).arguments.get("group")
            if _distributed.get_world_size(group) == _distributed.get_world_size():  # of all, whatever it is called
                meet(f"deepspeed.comm.{call.__name__}")
        return chosen(*args, **kwargs)

    return met  # type: ignore[return-value]


# --- who there is -----------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Tell that collectives can be called."""
    return True


def is_initialized() -> bool:
    """Tell whether :func:`init_distributed`, or torch, has made a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


@_or_torch
def get_rank(group: Any = None) -> int:
    """Return the rank of this process; 0 of one.

    Raises:
        StateError: there are several processes, but no process group.
    """
    return 0


@_or_torch
def get_world_size(group: Any = None) -> int:
    """Return how many processes there are.

    Raises:
        StateError: there are several, but no process group.
    """
    return 1


def get_local_rank() -> int:
    """Return what ``LOCAL_RANK`` says, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return the rank among all processes of one that is `group_rank` in a group; None is the group of all."""
    if are_several():
        return group_rank if group is None else int(_distributed.get_global_rank(group, group_rank))
    return _root(group_rank)


def get_world_group() -> None:
    """Return None, which stands for all processes wherever a group can be given."""


@_or_torch
def new_group(ranks: Sequence[int] | None = None) -> None:
    """Return a group of several processes; of one process None, which stands for all wherever a group can be given."""
    for rank in ranks or ():
        _root(rank)


def destroy_process_group(group: Any = None) -> None:
    """End torch's process group, where there is one."""
    if is_initialized():
        torch.distributed.destroy_process_group()


def _root(rank: int) -> int:
    """Return the only rank.

    Raises:
        ConfigError: it is another.
    """
    if rank != 0:
        raise ConfigError(f"rank: expected 0, the only process, but got {rank}; pass 0")
    return rank


# --- collectives ------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, slots=True)
class Done:
    """What an asynchronous call returns: it is done."""

    def wait(self, timeout: Any = None) -> bool:
        """Return True."""
        return True

    def is_completed(self) -> bool:
        """Return True."""
        return True


def _done(is_async: bool) -> Done | None:
    return Done() if is_async else None


def _copied(target: torch.Tensor, source: torch.Tensor, is_async: bool) -> Done | None:
    with torch.no_grad():
        target.copy_(source.reshape(target.shape))
    return _done(is_async)


@_collective
def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Done | None:
    """Do nothing: nobody is waited for."""
    return _done(async_op)


@_collective
def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Do nothing: nobody is waited for."""


def log_summary(show_straggler: bool = False) -> None:
    """Do nothing: nothing was sent."""


@_collective
def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done | None:
    """Leave the tensor, which is the sum, the mean and the maximum over one process."""
    return _done(async_op)


@_collective
def reduce(
    tensor: torch.Tensor, dst: int = 0, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done | None:
    """Leave the tensor; see :func:`all_reduce`."""
    _root(dst)
    return _done(async_op)


@_collective
def broadcast(tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Done | None:
    """Leave the tensor, which is rank 0's."""
    _root(src)
    return _done(async_op)


@_collective
def broadcast_object_list(object_list: list[Any], src: int = 0, group: Any = None, device: Any = None) -> None:
    """Leave the objects, which are rank 0's."""
    _root(src)


@_collective
def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor to the only one of a list."""
    return _copied(tensor_list[0], tensor, async_op)


@_collective
def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor."""
    return _copied(output_tensor, tensor, async_op)


@_collective
def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Put the object into a list of one."""
    object_list[0] = obj


@_collective
def gather(
    tensor: torch.Tensor,
    gather_list: list[torch.Tensor] | None = None,
    dst: int = 0,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """Copy the tensor to the only one of a list."""
    _root(dst)
    return _done(async_op) if gather_list is None else _copied(gather_list[0], tensor, async_op)


@_collective
def scatter(
    tensor: torch.Tensor,
    scatter_list: list[torch.Tensor] | None = None,
    src: int = 0,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """Copy the only tensor of a list."""
    _root(src)
    return _done(async_op) if scatter_list is None else _copied(tensor, scatter_list[0], async_op)


@_collective
def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """Copy the only tensor of a list."""
    return _copied(output, input_list[0], async_op)


@_collective
def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor."""
    return _copied(output_tensor, tensor, async_op)


@_collective
def all_to_all_single(
    output: torch.Tensor,
    tensor: torch.Tensor,
    output_split_sizes: Any = None,
    input_split_sizes: Any = None,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """Copy the tensor."""
    return _copied(output, tensor, async_op)


def __getattr__(name: str) -> Any:
    raise missing("deepspeed.comm", name, __all__)
