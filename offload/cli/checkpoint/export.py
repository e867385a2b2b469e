"""Writes a checkpoint in other formats: weights in safetensors, state dicts for ``torch.load``.

Owns what goes into them. Weights pass through a few buffers; state dicts are tensors in memory. Next:
:mod:`offload.checkpoint.restoring` reads single tensors.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.checkpoint.columns import MASTER, PARAMETER
from offload.checkpoint.format.index import Entry, Index
from offload.checkpoint.format.nested import decode
from offload.checkpoint.format.reader import Reader, Source
from offload.checkpoint.format.safetensors import ITEMSIZES, Member
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.checkpoint.format.writer import FileWriter
from offload.checkpoint.restoring import fp32_values, read_tensor, read_weights, trained_of
from offload.checkpoint.safetensors_files import INDEX, SINGLE
from offload.cli.folders import written_whole
from offload.errors import CheckpointError
from offload.replacing import save_torch

BUFFER_PREFIX = "buffer:"
SHARDS = "model-*-of-*.safetensors"


def export_weights(path: Path, index: Index, output: Path, limit_bytes: int, deadline_s: float) -> list[Path]:
    """Write parameters and buffers in sharded safetensors, with an index of several files, as ``save_pretrained`` does.

    Names are the module's. Of some models ``save_pretrained`` writes others, as of experts: the engine's does.

    Args:
        path: of the checkpoint.
        index: of it.
        output: folder to write to.
        limit_bytes: of a file; a larger tensor has one of its own.
        deadline_s: of one transfer.

    Returns:
        The files.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder cannot be written to, or a file is there already, or
            one that would be read instead.
        swap.SwapFullError: no room on the drive.
    """
    shards: list[list[tuple[str, Entry]]] = [[]]
    size = 0
    for entry in index.entries:
        if entry.role == PARAMETER:
            name = entry.name
        elif entry.role == "value" and entry.name.startswith(BUFFER_PREFIX):
            name = entry.name.removeprefix(BUFFER_PREFIX)
        else:
            continue
        if shards[-1] and size + entry.size_bytes > limit_bytes:
            shards.append([])
            size = 0
        shards[-1].append((name, entry))
        size += entry.size_bytes
    old = sorted(path for name in (SINGLE, INDEX, SHARDS) for path in output.glob(name))
    if old:
        raise CheckpointError(f"{old[0]}: is there already; readers would mix both up; name another folder")
    source, files, weights = Source(path, index), [], {}
    with written_whole(output) as new:
        with (
            Staging(BUFFERS, BUFFER_BYTES, deadline_s=deadline_s) as reading,
            Staging(BUFFERS, BUFFER_BYTES, deadline_s=deadline_s) as writing,
        ):
            for number, shard in enumerate(shards, start=1):
                counted = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
                files.append(f"model{counted}.safetensors")
                _write_shard(new / files[-1], source, shard, reading, writing)
                weights.update({name: files[-1] for name, _ in shard})
        if len(shards) > 1:
            total = sum(entry.size_bytes for shard in shards for _, entry in shard)
            files.append(INDEX)
            listing = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}
            (new / INDEX).write_text(json.dumps(listing, indent=2) + "\n", encoding="utf-8")
    return [output / name for name in files]


def _write_shard(
    file: Path, source: Source, shard: list[tuple[str, Entry]], reading: Staging, writing: Staging
) -> None:
    ordered = sorted(shard, key=lambda pair: -ITEMSIZES[pair[1].dtype])
    writer = FileWriter(file, {"all": [Member(name, entry.dtype, entry.shape) for name, entry in ordered]}, writing)
    part = torch.empty(BUFFER_BYTES, dtype=torch.uint8)
    try:
        with Reader({"": source.stretches(entry for _, entry in ordered)}, reading) as reader:
            for name, entry in ordered:
                for begin in range(0, entry.size_bytes, BUFFER_BYTES):
                    size = min(BUFFER_BYTES, entry.size_bytes - begin)
                    reader.take("", part.data_ptr(), size)
                    writer.append("all", name, part.data_ptr(), size)
        writer.finish()
    except BaseException:
        writing.settle()
        writer.close()
        raise


def export_torch(path: Path, index: Index, output: Path, deadline_s: float) -> Path:
    """Write ``checkpoint.pt``: a dict with ``model``, ``optimizer`` and ``client_state``, for ``torch.load``.

    The optimizer's is what ``engine.optimizer.state_dict()`` returned: in torch's format, states in fp32. All of it is
    in memory meanwhile.

    Raises:
        CheckpointError: the checkpoint is damaged, or the folder cannot be written to, or the file is there already.
        swap.SwapFullError: no room on the drive.
    """
    file = output / "checkpoint.pt"
    if file.exists():
        raise CheckpointError(f"{file}: is there already; name another folder")
    source, found = Source(path, index), index.by_role()
    with Staging(BUFFERS, BUFFER_BYTES, deadline_s=deadline_s) as staging:
        values = {e.name: read_tensor(source, e, staging) for e in index.entries if e.role == "value"}
        model = read_weights(source, index, staging)
        result = {"model": model, "client_state": decode(index.contents["client_state"], values.__getitem__)}
        saved = decode(index.contents["optimizer"], values.__getitem__)
        if saved is not None:
            result["optimizer"] = _optimizer_dict(index, saved, found, source, staging)
    with written_whole(output) as new, (new / file.name).open("wb") as stream:
        save_torch(result, stream)
    return file


def _optimizer_dict(
    index: Index, saved: Mapping[str, Any], found: Mapping[tuple[str, str], Entry], source: Source, staging: Staging
) -> dict[str, Any]:
    """Return an optimizer's state dict in torch's format."""
    names = [name for group in saved["groups"] for name in group["params"]]
    numbers = {name: number for number, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = {}
    masters: dict[int, torch.Tensor | None] = {}
    for name, kept, placed in trained_of(index, saved):
        values = fp32_values(found, name, source, staging, placed)
        parameter = values.pop(PARAMETER)
        if kept is not None:
            state[numbers[name]] = {**kept, **values}
        elif (master := values.get(MASTER)) is not None:
            masters[numbers[name]] = None if torch.equal(master, parameter.float()) else master
    groups = [{**group, "params": [numbers[name] for name in group["params"]]} for group in saved["groups"]]
    return {
        "state": state,
        "param_groups": groups,
        **({"masters": masters} if masters else {}),
        "run": saved["run"],
    }
