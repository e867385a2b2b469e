"""``deepspeed.comm``: what collectives give in one process, whether a process group was made or not.

A sum, a mean or a maximum over one process is what it has: reductions and broadcasts leave tensors as they are, and
gathers copy. What needs another process is refused. Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed import HashStore, ReduceOp  # type: ignore[attr-defined]

from offload.errors import ConfigError
from offload.integrations.deepspeed.refusals import missing
from offload.module.refusals import refuse_ranks

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
    """Make a process group of one, so that ``torch.distributed.get_rank()`` and the like work.

    Args:
        dist_backend: of torch; None: torch's choice.
        auto_mpi_discovery: not heeded, as all that is said of others.
        distributed_port: not heeded.
        verbose: not heeded.
        timeout: not heeded.
        init_method: not heeded.
        dist_init_required: False makes none.
        config: not heeded.
        rank: 0 or -1.
        world_size: 1 or -1.

    Raises:
        StateError: there are several processes.
        ConfigError: there are to be.
    """
    refuse_ranks()
    if world_size > 1 or rank > 0:
        raise ConfigError(f"init_distributed: expected one process but got rank {rank} of {world_size}; start one")
    there = torch.distributed.is_available() and not torch.distributed.is_initialized()
    if there and dist_init_required is not False:
        store = HashStore()
        torch.distributed.init_process_group(dist_backend, store=store, rank=0, world_size=1)


# --- who there is -----------------------------------------------------------------------------------------------------


def is_available() -> bool:
    """Tell that collectives can be called."""
    return True


def is_initialized() -> bool:
    """Tell whether :func:`init_distributed`, or torch, has made a process group."""
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def get_rank(group: Any = None) -> int:
    """Return 0.

    Raises:
        StateError: there are several processes.
    """
    refuse_ranks()
    return 0


def get_world_size(group: Any = None) -> int:
    """Return 1.

    Raises:
        StateError: there are several processes.
    """
    refuse_ranks()
    return 1


def get_local_rank() -> int:
    """Return what ``LOCAL_RANK`` says, or 0."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def get_global_rank(group: Any = None, group_rank: int = 0) -> int:
    """Return 0."""
    return _root(group_rank)


def get_world_group() -> None:
    """Return None, which stands for all processes wherever a group can be given."""


def new_group(ranks: Sequence[int] | None = None) -> None:
    """Return None, which stands for all processes wherever a group can be given."""
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


def barrier(group: Any = None, async_op: bool = False, device_ids: Any = None) -> Done | None:
    """Do nothing: nobody is waited for."""
    return _done(async_op)


def monitored_barrier(group: Any = None, timeout: Any = None, wait_all_ranks: bool = False) -> None:
    """Do nothing: nobody is waited for."""


def log_summary(show_straggler: bool = False) -> None:
    """Do nothing: nothing was sent."""


def all_reduce(tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False) -> Done | None:
    """Leave the tensor, which is the sum, the mean and the maximum over one process."""
    return _done(async_op)


def reduce(
    tensor: torch.Tensor, dst: int = 0, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done | None:
    """Leave the tensor; see :func:`all_reduce`."""
    _root(dst)
    return _done(async_op)


def broadcast(tensor: torch.Tensor, src: int = 0, group: Any = None, async_op: bool = False) -> Done | None:
    """Leave the tensor, which is rank 0's."""
    _root(src)
    return _done(async_op)


def broadcast_object_list(object_list: list[Any], src: int = 0, group: Any = None, device: Any = None) -> None:
    """Leave the objects, which are rank 0's."""
    _root(src)


def all_gather(
    tensor_list: list[torch.Tensor], tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor to the only one of a list."""
    return _copied(tensor_list[0], tensor, async_op)


def all_gather_into_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor."""
    return _copied(output_tensor, tensor, async_op)


def all_gather_object(object_list: list[Any], obj: Any, group: Any = None) -> None:
    """Put the object into a list of one."""
    object_list[0] = obj


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


def reduce_scatter(
    output: torch.Tensor,
    input_list: list[torch.Tensor],
    op: Any = ReduceOp.SUM,
    group: Any = None,
    async_op: bool = False,
) -> Done | None:
    """Copy the only tensor of a list."""
    return _copied(output, input_list[0], async_op)


def reduce_scatter_tensor(
    output_tensor: torch.Tensor, tensor: torch.Tensor, op: Any = ReduceOp.SUM, group: Any = None, async_op: bool = False
) -> Done | None:
    """Copy the tensor."""
    return _copied(output_tensor, tensor, async_op)


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
