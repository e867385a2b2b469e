"""Small files of a checkpoint: each has its old or its new content, whatever ends the process that writes it.

Owns the order of write, flush and rename. A loop of asyncio makes the calls, through aiofiles. It runs in the thread
that saves, which is one beside training for ``wait=False``. Next: :mod:`offload.checkpoint.format.folder`.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Callable, Coroutine
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
T = TypeVar("T")


def write_text(path: Path, text: str) -> None:
    """Let a file have this content. Its name is on the drive when its directory is flushed.

    Also inside a loop that runs in this thread, as a notebook's does: that loop waits.

    Raises:
        OSError: it cannot be written; the old content is there still.
    """
    try:
        asyncio.get_running_loop()
    except RuntimeError:
        _run(_write_text(path, text))
        return
    with ThreadPoolExecutor(1, thread_name_prefix="checkpoint") as beside:  # a thread runs one loop at a time
        beside.submit(_run, _write_text(path, text)).result()


def _run(work: Coroutine[Any, Any, None]) -> None:
    with contextlib.closing(asyncio.new_event_loop()) as loop:  # asyncio.run would forget the loop that a user has set
        loop.run_until_complete(work)


async def _write_text(path: Path, text: str) -> None:
    import aiofiles

    new, here, loop = path.with_name(f".{path.name}.new"), _Here(), asyncio.get_running_loop()
    file = await aiofiles.open(new, "w", encoding="utf-8", executor=here)
    try:
        await file.write(text)
        await file.flush()
        await loop.run_in_executor(here, os.fsync, file.fileno())
    finally:
        await file.close()
    await loop.run_in_executor(here, new.replace, path)


class _Here(Executor):
    """Makes calls in the thread of the loop, one behind the other.

    A pool of threads takes no more work once the interpreter ends, which waits for a save that is under way. And
    whoever interrupts a save would leave a call to another thread, which goes on.
    """

    def submit(self, function: Callable[P, T], /, *arguments: P.args, **named: P.kwargs) -> Future[T]:
        """Return what has become of a call."""
        done: Future[T] = Future()
        try:
            done.set_result(function(*arguments, **named))
        except BaseException as error:
            done.set_exception(error)
        return done
