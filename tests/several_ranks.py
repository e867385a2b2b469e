"""Runs functions in several processes that are the ranks of one process group over gloo, on this machine.

A server process that has imported everything forks them: so a rank costs milliseconds. The store of the group is here,
as torchrun's is in its agent, and outlives any rank.
"""

from __future__ import annotations

import dataclasses
import faulthandler
import functools
import multiprocessing
import os
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import jitter

LIMIT_S = 60.0  # for all ranks of a case: whoever is not done then is killed
_TELLS_AT = 0.9  # of the limit: then each notes where its threads are
_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "TORCH_CPP_LOG_LEVEL": "ERROR"}


@dataclasses.dataclass(frozen=True)
class Raised:
    """What a rank has raised instead of returning something."""

    kind: str
    text: str


@dataclasses.dataclass(frozen=True)
class Ended:
    """A rank that ended without a word: its exit status, None where it had to be killed here, and where it was then."""

    status: int | None
    threads: str = ""


def run(
    case: Callable[..., Any],
    world: int,
    *args: Any,
    environment: Mapping[str, str] | None = None,
    limit_s: float = LIMIT_S,
) -> list[Any]:
    """Return what ``case(rank, *args)`` has returned in each of `world` processes, or how it failed.

    `limit_s` is for ranks that import more than what all need.
    """
    from torch.distributed import TCPStore

    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    context = server()
    pipes, processes = [], []
    until = time.monotonic() + limit_s
    with tempfile.TemporaryDirectory() as folder:
        notes = [Path(folder) / str(rank) for rank in range(world)]
        for rank, note in enumerate(notes):
            here, there = context.Pipe(duplex=False)
            told = str(note), limit_s * _TELLS_AT
            process = context.Process(
                target=_be_rank,
                args=(case, rank, world, store.port, there, dict(environment or {}), told, args),
                daemon=True,
            )
            process.start()
            there.close()
            pipes.append(here)
            processes.append(process)
        try:
            return [_result(*each, until) for each in zip(pipes, processes, notes, strict=True)]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _result(pipe: Connection, process: Any, note: Path, until: float) -> Any:
    status = None
    try:
        if pipe.poll(max(until - time.monotonic(), 0.0)):
            return pipe.recv()
    except EOFError:
        process.join(max(until - time.monotonic(), 0.1))
        status = process.exitcode
    return Ended(status, note.read_text() if note.exists() else "")


@functools.cache
def server() -> Any:
    """Return what starts processes, with the server that forks them."""
    context = multiprocessing.get_context("forkserver")
    # The second is what torch imports when it makes its first optimizer.
    context.set_forkserver_preload(["torch.distributed", "torch._dynamo", "offload.engine", "pytest", "hypothesis"])
    before = dict(os.environ)
    os.environ.update(_ENVIRONMENT)
    try:
        process = context.Process(target=int, daemon=True)  # begins the server, with this environment
        process.start()
        process.join()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _be_rank(
    case: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    environment: Mapping[str, str],
    told: tuple[str, float],
    args: Iterable[Any],
) -> None:
    note, tells_s = told
    with open(note, "w") as file:
        faulthandler.enable(file)
        faulthandler.dump_traceback_later(tells_s, file=file)
        try:
            with jitter.jittering():
                _take_part(case, rank, world, port, pipe, environment, args)
        finally:
            faulthandler.cancel_dump_traceback_later()
            faulthandler.disable()


def _take_part(
    case: Callable[..., Any],
    rank: int,
    world: int,
    port: int,
    pipe: Connection,
    environment: Mapping[str, str],
    args: Iterable[Any],
) -> None:
    import torch
    from torch import distributed

    os.environ.update(environment)
    torch.set_num_threads(1)
    store = distributed.TCPStore("127.0.0.1", port, is_master=False)
    distributed.init_process_group("gloo", store=store, rank=rank, world_size=world)
    try:
        result = case(rank, *args)
    except Exception as error:
        result = Raised(type(error).__name__, str(error))
    pipe.send(result)
