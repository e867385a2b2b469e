"""The small files of a checkpoint: whole whatever happens, whoever's loop runs, and in the thread that saves."""

from __future__ import annotations

import asyncio
import errno
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from offload.checkpoint.format.small_files import write_text


def test_a_file_is_flushed_before_it_has_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All calls are made in the thread that writes: whoever interrupts it leaves none under way."""
    file, calls = tmp_path / "index.json", list[str]()
    file.write_text("old")
    for owner, name in ((os, "fsync"), (Path, "replace")):
        real = getattr(owner, name)

        def call(*args: Any, real: Any = real, name: str = name) -> Any:
            assert threading.current_thread() is threading.main_thread()
            assert file.read_text() == "old" and (tmp_path / ".index.json.new").read_text() == "nüw"
            calls.append(name)
            return real(*args)

        monkeypatch.setattr(owner, name, call)
    write_text(file, "nüw")
    assert calls == ["fsync", "replace"]
    assert file.read_text(encoding="utf-8") == "nüw" and os.listdir(tmp_path) == ["index.json"]


@pytest.mark.parametrize(("owner", "name"), [(os, "fsync"), (Path, "replace")])
@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "full"), KeyboardInterrupt(), SystemExit(3)])
def test_what_fails_leaves_the_old_content(
    owner: Any, name: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "latest"
    write_text(file, "old")
    descriptors = len(os.listdir("/proc/self/fd"))

    def fails(*args: Any) -> None:
        raise error

    monkeypatch.setattr(owner, name, fails)
    with pytest.raises(type(error)) as raised:
        write_text(file, "new")
    assert raised.value is error
    assert file.read_text() == "old" and len(os.listdir("/proc/self/fd")) == descriptors
    with pytest.raises(OSError, match="No such file"):
        write_text(tmp_path / "nowhere" / "latest", "new")


def test_inside_a_loop_that_runs(tmp_path: Path) -> None:
    """As in a notebook: its loop waits, and goes on."""

    async def cell() -> str:
        write_text(tmp_path / "latest", "new")
        with pytest.raises(OSError, match="No such file"):
            write_text(tmp_path / "nowhere" / "latest", "new")
        await asyncio.sleep(0)
        return (tmp_path / "latest").read_text()

    assert asyncio.run(cell()) == "new"


def test_a_loop_that_is_set_stays_set(tmp_path: Path) -> None:
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    try:
        write_text(tmp_path / "latest", "new")
        assert asyncio.get_event_loop() is loop and not loop.is_closed()
    finally:
        asyncio.set_event_loop(None)
        loop.close()


LATE = """
import sys, threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from offload.checkpoint.format.small_files import write_text
def late():
    pool = ThreadPoolExecutor(1)
    try:
        while True:
            pool.submit(int).result()
    except RuntimeError:  # the interpreter ends, and waits for this thread
        write_text(Path(sys.argv[1]), "late")
threading.Thread(target=late).start()
"""


def test_while_the_interpreter_ends(tmp_path: Path) -> None:
    """It waits for a save that is under way, and executors take no more work then."""
    command = [sys.executable, "-c", LATE, str(tmp_path / "latest")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "latest").read_text() == "late"
