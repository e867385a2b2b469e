"""A checkpoint that is copied while training goes on is that of the moment of the call, and disturbs no bit of it."""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from harness import everything_on_device, tight
from test_checkpoint_errors import SMALL_FILES
from test_checkpoints import NAMES, OTHERS, Run, assert_same, directory, net, placed, seed
from torch import nn

from offload import BudgetError, CheckpointError, Engine
from offload.background import PendingCheckpoint
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format import locks
from offload.checkpoint.format import writer as writers
from offload.memory.budget import Tier
from offload.shards.held import Held
from swap import Fault, SwapError, SwapFullError

pytestmark = pytest.mark.usefixtures("single_torch_thread")
ROOM = {"background_checkpoints": True}


class Gate:
    """Holds the reads of what is held back until it is opened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._open = threading.Event()
        self._open.set()
        real = Held.read

        def read(*args: Any) -> Any:
            assert self._open.wait(20), "nobody opens the gate"
            return real(*args)

        monkeypatch.setattr(Held, "read", read)
        self._monkeypatch = monkeypatch

    def close(self) -> None:
        self._open.clear()

    def open(self) -> None:
        self._open.set()

    def opens_at(self, owner: type, name: str) -> list[str]:
        """Let it be opened when a method is called, which is noted in the list that is returned."""
        real, called = getattr(owner, name), list[str]()

        def method(*args: Any, **options: Any) -> Any:
            called.append(name)
            self.open()
            return real(*args, **options)

        self._monkeypatch.setattr(owner, name, method)
        return called


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> Iterator[Gate]:
    made = Gate(monkeypatch)
    yield made
    made.open()


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    run = Run({**tight(net(), directory(tmp_path, "swap")), **ROOM}, dtype=torch.bfloat16)
    with run.engine:
        run.train(range(1))
        yield run.engine


def begin(engine: Engine, path: Path, *, client_state: Any = None, **options: Any) -> PendingCheckpoint:
    """Save in small files."""
    every = {"tag": None, "keep": None, "file_bytes": SMALL_FILES}
    return engine._checkpoints.begin(path, client_state=lambda: client_state, **{**every, **options})


def train(engine: Engine) -> None:
    """Take a step that changes everything that is trained."""
    model = engine.module
    x = torch.ones(4, 32, dtype=next(model.parameters()).dtype)
    engine.backward(engine(x).float().pow(2).mean())
    engine.step()


# --- the moment of the call -------------------------------------------------------------------------------------------


def resumed_from_the_background(
    gate: Gate,
    first: dict[str, Any],
    path: Path,
    *,
    at: int,
    end: int,
    again: dict[str, Any] | None = None,
    **options: Any,
) -> None:
    """Save after `at` micro-batches, copy after `end`, and go on elsewhere from there; compare with one run."""
    seed()
    whole = Run(first, **options)
    with whole.engine:
        whole.train(range(end))
        truth = whole.outcome()
    seed()
    before = Run({**(again or first), **ROOM}, **options)
    with before.engine as engine:
        before.train(range(at))
        engine.drain()
        used = engine.stats().used_bytes["nvme"]
        gate.close()
        pending = begin(engine, path, client_state=before.client_state())
        held = engine._life.require_open()._held
        assert held is not None
        before.train(range(at, end))
        assert_same(before.outcome(), truth)
        assert pending.done() is False or not held.any
        assert not folders.Folder(path).tags() or not held.any
        gate.open()
        assert pending.wait(60) == pending.path == folders.Folder(path).find(None)
        assert pending.done() and held.released
        engine.drain()
        if not engine._parts.book.waiting():
            assert engine.stats().used_bytes["nvme"] == used
    torch.manual_seed(100)
    after = Run(everything_on_device(), **options)
    with after.engine:
        state = after.engine.load_checkpoint(path)
        after.schedule.load_state_dict(state["schedule"])
        after.train(range(at, end))
        assert all(torch.equal(a, b) for a, b in zip(after.losses, whole.losses[at:], strict=True))
        assert_same(after.outcome(), truth)


@pytest.mark.few(5)
@pytest.mark.parametrize("place", NAMES)
def test_resumed_from_what_was_copied_later(place: str, gate: Gate, tmp_path: Path) -> None:
    dtype = torch.bfloat16 if NAMES.index(place) % 2 else torch.float32
    kind = ("float32", "bfloat16", "int8")[NAMES.index(place) % 3]
    first = placed(place, tmp_path, "swap")
    resumed_from_the_background(gate, first, tmp_path / "saved", at=2, end=5, dtype=dtype, state_dtype=kind)


@pytest.mark.parametrize("at", [0, 4])
def test_before_the_first_step_and_inside_an_accumulation(at: int, gate: Gate, tmp_path: Path) -> None:
    options = {"dtype": torch.bfloat16, "gradient_accumulation_steps": 3, "max_grad_norm": 0.5}
    first = placed("nvme", tmp_path, "swap")
    resumed_from_the_background(gate, first, tmp_path / "saved", at=at, end=7, **options)


@pytest.mark.parametrize("name", ["lamb", "own class, small states"])
def test_other_optimizers(name: str, gate: Gate, tmp_path: Path) -> None:
    def make(model: nn.Module) -> Any:
        return OTHERS[name]([p for p in model.parameters() if p.requires_grad])

    roomy = {"max_memory": {"device": "64MiB", "cpu": "64MiB", "nvme": "256MiB"}}
    first = {**tight(net(), directory(tmp_path, "swap")), **roomy}
    resumed_from_the_background(gate, first, tmp_path / "saved", at=2, end=4, optimizer=make)


def test_a_durable_run_commits_meanwhile(gate: Gate, tmp_path: Path) -> None:
    options = {k: v for k, v in tight(net(), tmp_path).items() if k not in ("nvme_path", "offload_param")}
    options = {k: v for k, v in options.items() if k != "offload_optimizer"}
    first, again = ({**options, "run_dir": tmp_path / name} for name in ("first", "again"))
    resumed_from_the_background(gate, first, tmp_path / "saved", at=2, end=5, again=again)
    with Run({**again, **ROOM, "resume": True}).engine as engine:
        assert engine.resumed is not None and engine.resumed.step == 5


def test_the_working_directory_changes_meanwhile(
    engine: Engine, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    gate.close()
    pending = begin(engine, Path("saved"))
    monkeypatch.chdir(directory(tmp_path, "other"))
    gate.open()
    assert pending.wait(60) == tmp_path / "saved" / pending.path.name
    assert folders.Folder(tmp_path / "saved").tags() == [pending.path.name] and not list(Path().iterdir())


# --- room -------------------------------------------------------------------------------------------------------------


def test_no_room_is_said_at_the_call(tmp_path: Path) -> None:
    options = tight(net(), directory(tmp_path, "swap"))
    with Run(options).engine as engine:
        train(engine)
        before = engine.digests()
        with pytest.raises(BudgetError, match=r"nvme budget: a checkpoint .* needs .* bytes\).*background_checkpoints"):
            engine.save_checkpoint(tmp_path / "saved", wait=False)
        assert not (tmp_path / "saved").exists() and engine.digests() == before
        engine.save_checkpoint(tmp_path / "saved")
        least = engine.plan.arena_bytes[Tier.NVME] - engine.plan.early_bytes
    with pytest.raises(BudgetError, match=r"nvme budget: .*once more those of .*background_checkpoints.*the smallest"):
        Run({**options, **ROOM, "max_memory": {**options["max_memory"], "nvme": least}})


def test_frozen_units_are_written_when_nothing_is_held(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    """The plan has room for three versions of what is trained, and for two of the rest."""
    frozen = {name: torch.zeros_like(value) for name, value in engine.state_dict().items() if "frozen" in name}
    called = gate.opens_at(Held, "await_release")
    before = engine.state_dict()
    gate.close()
    pending = begin(engine, tmp_path / "saved")
    engine.load_state_dict({**engine.state_dict(), **frozen})
    assert called
    pending.wait()
    engine.load_checkpoint(tmp_path / "saved")
    assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items())


# --- one at a time ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["begin", "save", "load", "close"])
def test_who_waits_for_the_one_before(call: str, engine: Engine, gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    called = gate.opens_at(PendingCheckpoint, "settle")
    gate.close()
    first = begin(engine, path, tag="first")
    with pytest.raises(TimeoutError, match="first: expected within 0 s but it is being copied; wait again"):
        first.wait(0)
    assert "copying" in repr(first)
    train(engine)
    if call in ("begin", "save"):
        second = engine.save_checkpoint(path, tag="second", wait=call == "save", keep=1)  # type: ignore[call-overload]
        assert second == path / "second" or second.wait() == path / "second"
    elif call == "load":
        with pytest.raises(CheckpointError, match="there are first"):
            engine.load_checkpoint(path, tag="other")
        engine.load_checkpoint(path)
    else:
        engine.close(restore=False)
    assert called and first.done() and "complete" in repr(first)
    assert folders.Folder(path).tags() == (["second"] if call in ("begin", "save") else ["first"])


@pytest.mark.parametrize("wait", [True, False])
def test_what_is_not_kept_is_deleted_behind_the_call(
    wait: bool, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, begun, goes_on, real = tmp_path / "saved", threading.Event(), threading.Event(), shutil.rmtree
    engine.save_checkpoint(path, tag="old")

    def rmtree(*args: Any, **options: Any) -> None:
        begun.set()
        assert goes_on.wait(20), "the call waits for the deletion"
        real(*args, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    engine.save_checkpoint(path, tag="new", keep=1, wait=wait)  # type: ignore[call-overload]
    assert begun.wait(20) and folders.Folder(path).tags() == ["new"] and list(path.glob(".deleted-*"))
    train(engine)
    goes_on.set()
    engine.close(restore=False)  # waits for it
    assert sorted(os.listdir(path)) == [".lock", "latest", "new"]


@pytest.mark.parametrize("wait", [False, True])
def test_inside_a_loop_that_runs(wait: bool, engine: Engine, tmp_path: Path) -> None:
    """As a notebook's."""
    before = engine.digests()

    async def cell() -> None:
        saved = engine.save_checkpoint(tmp_path / "saved", wait=wait)  # type: ignore[call-overload]
        await asyncio.sleep(0)
        assert (saved if wait else saved.wait()) == folders.Folder(tmp_path / "saved").find(None)

    asyncio.run(cell())
    train(engine)
    engine.load_checkpoint(tmp_path / "saved")
    assert engine.digests() == before


# --- copies that fail -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("call", ["save", "load", "drain", "close", "wait", "leave"])
def test_an_error_is_raised_once_by_whoever_comes_next(
    call: str, engine: Engine, gate: Gate, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "saved"
    gate.close()
    pending = begin(engine, path)
    engine._life.require_open().copies.require_store().inject(Fault(forever=True))
    gate.open()
    pending._over.wait()
    engine._life.require_open().copies.require_store().clear_faults()
    calls: dict[str, Callable[[], object]] = {
        "save": lambda: begin(engine, path),
        "load": lambda: engine.load_checkpoint(path),
        "drain": engine.drain,
        "close": lambda: engine.close(restore=False),
        "wait": pending.wait,
    }
    assert f"checkpoint {pending.path}: " in caplog.text and "failed" in repr(pending)
    if call == "leave":  # the error on its way up comes first
        with pytest.raises(ZeroDivisionError), engine:
            raise ZeroDivisionError
        return
    with pytest.raises(SwapError, match="EIO"):
        calls[call]()
    assert not list(path.glob(".saving*"))
    engine.drain() if call != "close" else None
    with pytest.raises(SwapError, match="EIO"):
        pending.wait()


def test_a_fault_of_any_transfer_leaves_training_and_the_checkpoint_before(
    engine: Engine, gate: Gate, tmp_path: Path
) -> None:
    """The Nth transfer of the copy fails, for N = 1, 3, 7, ... until a copy passes."""
    path = tmp_path / "saved"
    begin(engine, path, tag="old").wait()
    store = engine._life.require_open().copies.require_store()
    used, before, nth = store.used_bytes, engine.digests(), 1
    while True:
        gate.close()
        pending = begin(engine, path, tag="new")
        store.inject(Fault(nth=nth))
        gate.open()
        try:
            pending.wait()
            break
        except SwapError:
            assert folders.Folder(path).tags() == ["old"] and not list(path.glob(".saving*"))
            assert store.used_bytes == used and engine.digests() == before
        nth = 2 * nth + 1
    store.clear_faults()
    assert nth > 15 and engine.digests() == before
    engine.load_checkpoint(path, tag="new")
    assert engine.digests() == before
    train(engine)


CALLS = [(writers, "preallocate"), (os, "fsync"), (os, "pwrite"), (Path, "rename"), (Path, "replace")]


@pytest.mark.parametrize(("owner", "name"), CALLS)
def test_a_drive_that_becomes_full(
    owner: Any, name: str, engine: Engine, gate: Gate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Nth call of the thread says that the drive is full, for N = 1, 2, 4, ... until a copy passes."""
    path = tmp_path / "saved"
    begin(engine, path, tag="old").wait()
    before, real = engine.digests(), getattr(owner, name)
    for failing in (2**power for power in range(9)):
        left = [failing]

        def full(*args: Any, left: list[int] = left, **options: Any) -> Any:
            if threading.current_thread() is threading.main_thread():
                return real(*args, **options)
            left[0] -= 1
            if left[0]:
                return real(*args, **options)
            if name == "preallocate":
                return errno.ENOSPC
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(owner, name, full)
        pending = begin(engine, path, tag="new")
        try:
            pending.wait()
            passed = left[0] > 0
        except SwapFullError as error:
            passed = False
            assert "ENOSPC" in str(error) and str(path) in str(error)
        monkeypatch.setattr(owner, name, real)
        assert engine.digests() == before
        assert "old" in folders.Folder(path).tags() and not list(path.glob(".saving*"))
        if passed:
            assert failing > 1
            engine.load_checkpoint(path)
            return
    raise AssertionError("no save has passed")


@contextlib.contextmanager
def forked_child() -> Iterator[int]:
    """Yield the id of a child that lives as long as the block, as workers of a data loader do."""
    ready, begun = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.write(begun, b".")
            signal.pause()
        finally:
            os._exit(0)
    try:
        assert os.read(ready, 1) == b"."
        yield child
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        os.close(ready)
        os.close(begun)


def test_a_child_that_is_forked_meanwhile_keeps_no_lock(engine: Engine, gate: Gate, tmp_path: Path) -> None:
    """Neither the one of the directory, nor that of a checkpoint that is read."""
    path = tmp_path / "saved"
    engine.save_checkpoint(path, tag="old")
    gate.close()
    pending = begin(engine, path, tag="new")
    with contextlib.ExitStack() as last:
        with folders.Folder(path).reading("old"):
            child = last.enter_context(forked_child())
        opened = [os.readlink(link) for link in Path(f"/proc/{child}/fd").iterdir()]
        assert not any(name.endswith((".lock", "old/index.json")) for name in opened)
        gate.open()
        pending.wait()
        train(engine)
        engine.save_checkpoint(path, tag="old")
    assert folders.Folder(path).tags() == ["new", "old"]


def test_a_lock_ends_with_what_it_was_taken_for(tmp_path: Path) -> None:
    """Whoever else has the file open: a child that the interpreter was not told of, say."""
    folder = folders.Folder(tmp_path)
    with contextlib.ExitStack() as last:
        with folder.writing():
            for fd in locks._locked:
                last.callback(os.close, os.dup(fd))
        with folder.writing():
            pass


ENDS = """
import os, signal, sys
from pathlib import Path
import torch
from offload import AdamW, Engine
from offload.shards.held import Held
path, kills = Path(sys.argv[1]), sys.argv[2] == "kill"
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
engine = Engine(model, AdamW(), device="cpu", max_memory={"device": "64MiB", "cpu": "64MiB", "nvme": "64MiB"},
                nvme_path=path, offload_param="nvme", offload_optimizer="nvme", background_checkpoints=True)
engine.backward(engine(torch.ones(2, 32)).sum())
engine.step()
engine.save_checkpoint(path / "saved", tag="old")
real, left = Held.read, [3]
def read(*args):
    left[0] -= 1
    if kills and not left[0]:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
Held.read = read
engine.save_checkpoint(path / "saved", tag="new", wait=False)
"""


@pytest.mark.parametrize("end", ["kill", "exit"])
def test_how_the_process_ends(end: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """A kill leaves the checkpoint before, and what says that another one was broken off; an exit waits."""
    if end == "kill":
        done = forked.run(ENDS, str(tmp_path), end)
    else:  # what waits is registered with atexit
        command = [sys.executable, "-c", ENDS, str(tmp_path), end]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == (-signal.SIGKILL if end == "kill" else 0), done.stderr[-2000:]
    folder = folders.Folder(tmp_path / "saved")
    assert bool(folder.unfinished()) == (end == "kill")
    with caplog.at_level(logging.WARNING):
        assert folder.find(None).name == ("old" if end == "kill" else "new")
    assert ("was broken off; it is ignored" in caplog.text) == (end == "kill")
