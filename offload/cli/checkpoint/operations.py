"""What ``offload checkpoint`` does: lists, compares and exports, and prints.

Knows neither engines nor models: a checkpoint is read without running code of it. Next:
:mod:`offload.cli.checkpoint.export`; :mod:`offload.checkpoint.format` reads the files.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from offload.checkpoint.format.folder import Folder, check_tag
from offload.checkpoint.format.index import FILE_NAME, Entry, Index
from offload.checkpoint.format.reader import DamagedTensorError, Reader, Source
from offload.checkpoint.format.staging import BUFFER_BYTES, BUFFERS, Staging
from offload.errors import CheckpointError, ConfigError
from offload.sizes import Share, format_bytes, parse_bytes

DEADLINE_S = 600.0  # of one transfer: a slow drive is no error


def _list(arguments: argparse.Namespace) -> None:
    folder = Folder(arguments.directory)
    latest = folder.find(None)
    rows = [("tag", "step", "size", "files", "saved", "")]
    for tag in folder.tags() or [""]:
        path = folder.at(tag) / FILE_NAME
        saved = datetime.datetime.fromtimestamp(path.stat().st_mtime).isoformat(" ", "seconds")
        try:
            index = Index.read(path)
        except CheckpointError:
            rows.append((tag, "", "", "", saved, "its index is damaged, or newer"))
            continue
        size, note = format_bytes(index.size_bytes), "latest" if path.parent == latest else ""
        rows.append((index.tag, str(index.contents["step"]), size, str(len(index.files)), saved, note))
    rows += [(name, "", "", "", "", "broken off; it is ignored") for name in folder.unfinished()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def _verify(arguments: argparse.Namespace) -> None:
    with _opened(arguments) as (path, index), Staging(BUFFERS, BUFFER_BYTES, deadline_s=DEADLINE_S) as staging:
        damages = list(damages_of(Source(path, index), index.entries, staging))
    for damage in damages:
        print(damage)
    if damages:
        raise CheckpointError(f"checkpoint {path}: {len(damages)} of {len(index.entries)} tensors are damaged")
    print(f"{path}: {len(index.entries)} tensors, {format_bytes(index.size_bytes)}: every byte is what was written")


def damages_of(source: Source, entries: Sequence[Entry], staging: Staging) -> Iterator[str]:
    """Yield what is wrong with each tensor of a checkpoint that is damaged."""
    while entries:
        with Reader({"": source.stretches(entries)}, staging) as reader:
            for number, entry in enumerate(entries):
                try:
                    reader.take("", 0, entry.size_bytes)
                except DamagedTensorError as error:  # of this tensor, or of one behind it in the same buffer
                    yield str(error)
                    entries = entries[entries.index(error.entry, number) + 1 :]
                    break
            else:
                return


def _export(arguments: argparse.Namespace) -> None:
    from offload.checkpoint.restoring import refuse_quantized
    from offload.cli.checkpoint.export import export_torch, export_weights

    limit = parse_bytes(arguments.max_shard_size, subject="--max-shard-size")
    if isinstance(limit, Share):
        raise ConfigError(f"--max-shard-size: expected bytes such as 5GB but got {arguments.max_shard_size!r}")
    with _opened(arguments) as (path, index):
        refuse_quantized(path, index)
        if arguments.format == "torch":
            files = [export_torch(path, index, arguments.output, DEADLINE_S)]
        elif arguments.format == "dcp":
            from offload.cli.checkpoint.export_dcp import export_dcp

            files = export_dcp(path, index, arguments.output, DEADLINE_S)
        else:
            files = export_weights(path, index, arguments.output, limit, DEADLINE_S)
    for file in files:
        print(f"wrote {file}")


@contextlib.contextmanager
def _opened(arguments: argparse.Namespace) -> Iterator[tuple[Path, Index]]:
    """Yield the checkpoint that is asked for; a run that trains meanwhile does not delete it."""
    with Folder(arguments.directory).reading(None if arguments.tag is None else check_tag(arguments.tag)) as path:
        yield path, Index.read(path / FILE_NAME)


def _import(arguments: argparse.Namespace) -> None:
    from offload.cli.checkpoint.skeleton import make_skeleton, usual_groups
    from offload.converting import convert

    model = make_skeleton(arguments.model, arguments.dtype)
    done = convert(
        arguments.source,
        model,
        arguments.directory,
        guesses=usual_groups(model),
        optimizer=arguments.optimizer,
        weights_only=arguments.weights_only,
        tag=arguments.tag,
    )
    optimizer = done.index.contents["optimizer"]
    trained = "weights alone"
    if optimizer is not None:
        members = [len(group["params"]) for group in optimizer["groups"]]
        trained = f"{optimizer['class']}, param groups of {members} parameters"
    size = format_bytes(done.index.size_bytes)
    print(f"{done.kind}: {len(done.index.entries)} tensors, {size}; step {done.index.contents['step']}; {trained}")
    for reason in done.left_out:
        print(f"left out: {reason}")
    print(f"wrote {done.path}")


OPERATIONS: dict[str, Callable[[argparse.Namespace], None]] = {
    "ls": _list,
    "verify": _verify,
    "export": _export,
    "import": _import,
}
