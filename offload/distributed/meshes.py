"""Which ranks an engine has, and in how many nodes: what a process group or a device mesh says of it.

Owns the refusals of meshes that mean something else. Next: :mod:`offload.distributed.processes` connects the ranks.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import torch

from offload.errors import ConfigError

distributed: Any = torch.distributed

_OTHERS = frozenset(  # in names of dimensions along which ranks do not train with whole batches of their own
    {"tp", "pp", "cp", "sp", "ep", "mp", "etp", "tensor", "pipeline", "context", "sequence", "expert", "model"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class Members:
    """The ranks of an engine.

    Attributes:
        ranks: in the default group, node after node.
        nodes: how many have all slices each.
    """

    ranks: tuple[int, ...]
    nodes: int = 1

    @property
    def shape(self) -> str:
        """What they are called: ``"4 ranks"``, or ``"2 nodes of 2 ranks"``."""
        count = len(self.ranks) // self.nodes
        return f"{self.nodes} nodes of {count} ranks" if self.nodes > 1 else f"{count} ranks"


def members_of(group: Any) -> Members:
    """Return the ranks of a process group, of a device mesh, or of the default group, which there is.

    Raises:
        ConfigError: this process is not in the group, or the mesh has other dimensions or ranks.
    """
    if is_mesh(group):
        return _members_of_mesh(group)
    if distributed.get_rank(group) < 0:
        raise ConfigError(
            f"group: expected one that this process is in but got ranks {distributed.get_process_group_ranks(group)}, "
            f"and it is rank {distributed.get_rank()}; make the engine only in processes of the group"
        )
    return Members(tuple(distributed.get_process_group_ranks(group)))


def is_mesh(group: Any) -> bool:
    """Tell whether this is a ``DeviceMesh``."""
    from torch.distributed.device_mesh import DeviceMesh

    return isinstance(group, DeviceMesh)


def _members_of_mesh(mesh: Any) -> Members:
    """Return the ranks of a mesh of (ranks), or of (nodes, ranks of a node); raises as :func:`members_of`."""
    ranks, names = mesh.mesh.flatten().tolist(), tuple(mesh.mesh_dim_names or ())
    told = f"a mesh {tuple(mesh.mesh.shape)} of ranks {mesh.mesh.tolist()}{f' called {names}' if names else ''}"
    others = [name for name in names if _OTHERS.intersection(name.lower().split("_"))]
    world = distributed.get_world_size()
    if others:
        raise ConfigError(
            f"group: expected a mesh of data parallelism but got dimension {others[0]} in {told}; tensor, pipeline, "
            "context and expert parallelism are not there yet: pass init_device_mesh(device, (nodes, ranks of a node)) "
            f"of all {world} processes"
        )
    if mesh.mesh.ndim > 2:
        raise ConfigError(
            f"group: expected a mesh of one dimension, or of two, nodes and ranks of a node, but got {told}; pass "
            "init_device_mesh(device, (nodes, ranks of a node))"
        )
    if len(names) == 2 and ("shard" in names[0].lower() or "repl" in names[1].lower()):
        raise ConfigError(
            f"group: expected nodes, which have replicas, as the first dimension but got {told}; pass a mesh whose "
            "first dimension replicates, and whose second one shards"
        )
    if len(ranks) != world:
        raise ConfigError(
            f"group: expected a mesh of all {world} processes but got {told}; pass the mesh that it is a part of, or "
            "its process group (mesh.get_group()) if the other processes train something else"
        )
    if ranks != list(range(world)):
        raise ConfigError(
            f"group: expected ranks 0 to {world - 1} in order, node after node, but got {told}; pass "
            "init_device_mesh(device, (nodes, ranks of a node))"
        )
    return Members(tuple(ranks), mesh.mesh.shape[0] if mesh.mesh.ndim == 2 else 1)
