"""Writes a checkpoint as a folder of torch.distributed.checkpoint (DCP), whose own writer makes the files.

Owns the layout: names as torch's ``get_state_dict`` has them. One parameter at a time is in memory, with its master and
states. Next: :mod:`offload.cli.checkpoint.operations`.
"""

from __future__ import annotations

import errno
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from offload.checkpoint.beside import extra_key
from offload.checkpoint.columns import MASTER, PARAMETER
from offload.checkpoint.format.index import Index
from offload.checkpoint.format.nested import decode
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.safetensors import DTYPES
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.restoring import fp32_values, read_tensor, trained_of
from offload.cli.folders import REMEDY, things_in, written_whole
from offload.errors import CheckpointError
from offload.memory.machine import free_space
from swap.errors import SwapFullError, format_bytes


def export_dcp(path: Path, index: Index, output: Path, deadline_s: float) -> list[Path]:
    """Write ``model``, ``optimizer`` and what is beside them, for ``torch.distributed.checkpoint.load``.

    The optimizer's are ``state`` and ``param_groups`` by the parameters' names; ``masters`` has the fp32 masters of
    16-bit parameters, ``run`` the counts and the loss scale.

    Args:
        path: of the checkpoint.
        index: of it.
        output: folder, which is made whole or not at all.
        deadline_s: of one transfer.

    Returns:
        The files.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder is not empty or cannot be written to.
        swap.SwapFullError: no room on the drive.
    """
    there = things_in(output)
    if there is not None:
        raise CheckpointError(f"{output}: expected an empty folder, or nothing, but it {there}; name another folder")
    with Staging(BUFFERS, BUFFER_BYTES, deadline_s=deadline_s) as staging, written_whole(output) as new:
        content = _Content(Source(path, index), index, staging)
        _refuse_if_full(output, new, sum(_bytes_of(content.tree)))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of one process, which is meant
            try:
                save(content.tree, checkpoint_id=new, planner=_Streaming(content), no_dist=True)
            except CheckpointException as error:
                raise _cause(error) from error
    return sorted(output.iterdir())


class _Content:
    """What is written: a tree of plain values, small tensors, and tensors without elements, which are read when due.

    Attributes:
        tree: as ``torch.distributed.checkpoint.save`` takes it.
    """

    def __init__(self, source: Source, index: Index, staging: Staging) -> None:
        self._source = source
        self._staging = staging
        self._found = index.by_role()
        self._places: dict[str, tuple[str, str]] = {}  # parameter and column, by the flat name in the tree
        self._latest: tuple[str, dict[str, torch.Tensor]] = ("", {})  # what was read of one parameter
        self._states: dict[str, list[str]] = {}  # of parameters that were updated
        values = {e.name: read_tensor(source, e, staging) for e in index.entries if e.role == "value"}
        saved = decode(index.contents["optimizer"], values.__getitem__)
        model = {
            e.name: self._later(f"model.{e.name}", e.name, PARAMETER) for e in index.entries if e.role == PARAMETER
        }
        model |= decode(index.contents["buffers"], values.__getitem__)
        extra = decode(index.contents["extra"], values.__getitem__)
        model |= {extra_key(name): state for name, state in extra.items()}
        client_state = decode(index.contents["client_state"], values.__getitem__)
        self.tree: dict[str, Any] = {
            "model": model,
            "global_step": index.contents["step"],
            "client_state": client_state,
        }
        if saved is not None:
            self.tree |= self._optimizer(index, saved)

    def read(self, name: str) -> torch.Tensor:
        """Return the tensor with a flat name."""
        parameter, column = self._places[name]
        if self._latest[0] != parameter:
            self._latest = (parameter, {})  # first: there may be no room for two
            states = self._states.get(parameter, [])
            self._latest = (parameter, fp32_values(self._found, parameter, self._source, self._staging, states))
        return self._latest[1][column]

    def is_later(self, name: str) -> bool:
        """Tell whether a flat name is one of a tensor without elements."""
        return name in self._places

    def _later(self, flat: str, parameter: str, column: str) -> torch.Tensor:
        """Return a tensor without elements: of a parameter's own dtype, or fp32."""
        entry = self._found[PARAMETER, parameter]
        self._places[flat] = (parameter, column)
        dtype = getattr(torch, DTYPES[entry.dtype]) if column == PARAMETER else torch.float32
        return torch.empty(entry.shape, dtype=dtype, device="meta")

    def _optimizer(self, index: Index, saved: Mapping[str, Any]) -> dict[str, Any]:
        state: dict[str, dict[str, Any]] = {}
        for name, kept, placed in trained_of(index, saved):
            if kept is not None:
                self._states[name] = placed
                later = {one: self._later(f"optimizer.state.{name}.{one}", name, one) for one in placed}
                state[name] = {**kept, **later}
        masters = {name: self._later(f"masters.{name}", name, MASTER) for role, name in self._found if role == MASTER}
        groups = [{**_defaults(saved["class"]), **group} for group in saved["groups"]]
        optimizer = {"state": state, "param_groups": groups}
        return {"optimizer": optimizer, "run": saved["run"], **({"masters": masters} if masters else {})}


def _defaults(kind: str) -> dict[str, Any]:
    """Return the options of torch's class of this name, which its loader wants all to be there; none without one."""
    made = getattr(torch.optim, kind, None)
    return {} if made is None else dict(made([torch.zeros(1, 1)]).defaults)


class _Streaming(DefaultSavePlanner):
    """Has a tensor read when it is written."""

    def __init__(self, content: _Content) -> None:
        super().__init__()
        self._content = content

    def lookup_object(self, index: MetadataIndex) -> Any:
        """Return what the writer asks for."""
        later = self._content.is_later(index.fqn)
        return self._content.read(index.fqn) if later else super().lookup_object(index)


def _refuse_if_full(output: Path, new: Path, size_bytes: int) -> None:
    free = free_space(new)
    if free < size_bytes:
        raise SwapFullError(
            f"{output}: the export needs {format_bytes(size_bytes)} but {format_bytes(free)} are free",
            errno=errno.ENOSPC,
            path=str(output),
            remedy=REMEDY,
        )


def _bytes_of(tree: Any) -> Iterator[int]:
    """Yield the bytes of each tensor in a tree."""
    if isinstance(tree, torch.Tensor):
        yield tree.nbytes
    elif isinstance(tree, Mapping):
        for value in tree.values():
            yield from _bytes_of(value)


def _cause(error: CheckpointException) -> Exception:
    """Return why the writer has failed."""
    for failure, _ in error.failures.values():
        if isinstance(failure, Exception):
            return failure
    return CheckpointError(f"the writer of torch.distributed.checkpoint has failed: {error}")
