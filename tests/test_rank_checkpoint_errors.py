"""Checkpoints of several ranks: what fails on one of them is one named error on all, and what was saved stays."""

from __future__ import annotations

import errno
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from several_ranks import Ended, Raised, run
from test_stage_1 import content, joined
from test_stage_1_errors import WORLD, backward, engine_of

from offload import Engine
from offload.checkpoint.format import writer
from offload.checkpoint.layout import Files
from offload.distributed.processes import Processes

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")


def error_of(call: Callable[[], object]) -> tuple[str, str]:
    """Return the public class of what a call raises, and its text."""
    try:
        call()
    except BaseException as error:
        public = ("offload.errors", "swap.errors", "builtins")
        return next(kind.__name__ for kind in type(error).__mro__ if kind.__module__ in public), str(error)
    return "nothing", ""


@contextmanager
def instead(owner: Any, name: str, function: Any) -> Iterator[None]:
    """Let `function(real, ...)` be called in the place of a function."""
    real = getattr(owner, name)
    setattr(owner, name, lambda *args, **options: function(real, *args, **options))
    try:
        yield
    finally:
        setattr(owner, name, real)


def full(*args: Any, **options: Any) -> Any:
    return errno.ENOSPC


def full_error(*args: Any, **options: Any) -> Any:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def no_room(*args: Any, **options: Any) -> Any:
    raise MemoryError("no room")


def interrupt(*args: Any, **options: Any) -> Any:
    raise KeyboardInterrupt


def seen(engine: Engine) -> dict[Any, Any]:
    here = content(engine)
    return here["parameters"] | joined(here)


def damage(folder: Path, rank: int) -> None:
    """Change the last byte of what a rank has written: of a state."""
    (file,) = folder.glob(f"tensors-of-rank-{rank}-*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def fail(rank: int, path: str) -> dict[str, Any]:
    """Let rank 1 (or 0) fail in one thing after the other; return what each rank is told."""
    odd, saved, found = rank == 1, Path(path) / "saved", dict[str, Any]()
    with engine_of() as engine:
        backward(engine)
        engine.step()
        engine.save_checkpoint(saved, tag="good")
        before = seen(engine)

        def save(directory: Path = saved, **more: Any) -> None:
            engine.save_checkpoint(directory, **({"tag": "new"} | more))

        found["tag"] = error_of(lambda: save(tag=f"tag-{odd}"))
        found["keep"] = error_of(lambda: save(keep=1 + odd))
        found["bad tag"] = error_of(lambda: save(tag="a/b" if odd else "new"))
        found["background"] = error_of(lambda: save(wait=not odd))
        found["client"] = error_of(lambda: save(client_state={"x": object()} if odd else {}))
        found["directory"] = error_of(lambda: save(saved / "other" if odd else saved))
        with instead(writer, "preallocate", full if odd else lambda real, *args: real(*args)):
            found["full"] = error_of(save)
        with instead(Path, "rename", full_error if rank == 0 else lambda real, *args: real(*args)):
            found["rename"] = error_of(save)
        with instead(Files, "append", interrupt if odd else lambda real, *args: real(*args)):
            found["interrupt"] = error_of(save)
        engine.optimizer.param_groups[0]["lr"] = 0.2 if odd else 0.1
        found["lr"] = error_of(save)
        engine.optimizer.param_groups[0]["lr"] = 0.1
        found["left"] = sorted(one.name for one in saved.iterdir()), (saved / "latest").read_text()
        found["missing"] = error_of(lambda: engine.load_checkpoint(Path(path) / "none" if odd else saved))
        assert seen(engine) == before
        if odd:
            engine.module.register_buffer("more", torch.zeros(1))
        found["buffer"] = error_of(lambda: engine.load_checkpoint(saved))
        engine.module._buffers.clear()
        assert seen(engine) == before
        save(tag="other")
        own = Path(path) / f"copy-{rank}"
        shutil.copytree(saved, own)
        found["another"] = error_of(lambda: engine.load_checkpoint(own, tag="good" if odd else "other"))
        if odd:
            damage(own / "good", 0)
        engine.load_checkpoint(own, tag="good")  # rank 1 needs no states of rank 0
        if odd:
            damage(own / "good", 1)
        found["damaged"] = error_of(lambda: engine.load_checkpoint(own, tag="good"))
        found["unusable"] = error_of(lambda: backward(engine))
        engine.load_checkpoint(saved, tag="good")
        assert seen(engine) == before
        with engine.gather(engine.module[0].bias, modify=odd), torch.no_grad():
            if odd:
                engine.module[0].bias.add_(1.0)
        found["written"] = error_of(save)
        packed = engine.optimizer.state_dict()
        if odd:
            packed["state"][0]["exp_avg"] += 1.0
        found["states"] = error_of(lambda: engine.optimizer.load_state_dict(packed))
        found["alone"] = error_of(engine.optimizer.state_dict if odd else save)
        engine.load_checkpoint(saved, tag="good")
        backward(engine)
        assert engine.step()  # they have the same parameters again
        found["save alone"] = error_of(save if odd else lambda: backward(engine))
        with instead(Processes, "gather_from_all", no_room if odd else lambda real, *args: real(*args)):
            found["sending"] = error_of(engine.optimizer.state_dict)
    found["closed"] = [error_of(save), error_of(engine.optimizer.state_dict), error_of(lambda: backward(engine))]
    return found


def test_what_fails_on_one_rank_fails_on_all_and_is_named(tmp_path: Path) -> None:
    every = run(fail, WORLD, str(tmp_path))
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        for what, text in (
            ("tag", 'expected one value of tag in save_checkpoint but got "tag-False" on ranks 0, 2, "tag-True" on'),
            ("background", "expected one value of wait in save_checkpoint but got true on ranks 0, 2, false on rank 1"),
            ("keep", "expected one value of keep in save_checkpoint but got 1 on ranks 0, 2, 2 on rank 1; give"),
            ("states", "expected one value of the states of 0.weight in optimizer.load_state_dict but got"),
            ("written", "expected one value of what was written to 0.bias in save_checkpoint but got nothing on ranks"),
            ("lr", "expected one value of lr of parameter group 0 in save_checkpoint but got"),
            ("another", "expected one value of the checkpoint in load_checkpoint but got"),
        ):
            assert found[what] == every[0][what] and found[what][0] == "RanksError", found[what]
            assert text in found[what][1], found[what]
        for what, who, kind, text in (
            ("bad tag", 1, "CheckpointError", "tag: expected letters, digits"),
            ("client", 1, "CheckpointError", "rank 1 client_state.x: expected a plain value"),
            ("directory", 1, "CheckpointError", "name the same directory on all ranks, on a file system that all"),
            ("full", 1, "SwapFullError", "tensors-of-rank-1-00001.safetensors: cannot be given its"),
            ("rename", 0, "SwapFullError", "cannot be written to"),
            ("interrupt", 1, "KeyboardInterrupt", ""),
            ("missing", 1, "CheckpointError", "the directory does not exist"),
            ("buffer", 1, "CheckpointError", "is of another model: of buffers it lacks more; load it into the model"),
            ("damaged", 1, "CheckpointError", "is damaged"),
            ("sending", 1, "MemoryError", "no room"),
        ):
            assert found[what][0] == (kind if rank == who else "RanksError"), found[what]
            assert text in found[what][1] or not found[what][1], found[what]
            assert rank == who or found[what][1].startswith(f"rank {who}: "), found[what]
        assert found["left"] == ([".lock", "good", "latest"], "good\n")
        assert all(kind == "StateError" and "engine: it is closed" in text for kind, text in found["closed"])
        assert found["unusable"][0] == "StateError" and "failed half way" in found["unusable"][1]
        for what, text in (
            ("alone", "save_checkpoint on ranks 0, 2, optimizer.state_dict on rank 1; call the same"),
            ("save alone", "backward 3 on ranks 0, 2, save_checkpoint on rank 1; call the same"),
        ):
            assert found[what] == every[0][what] and found[what][0] == "RanksError" and text in found[what][1]


def end(rank: int, path: str, who: int, where: str) -> tuple[str, str]:
    """Let a rank be killed in a save; return what the others are told."""

    def kill(real: Any, *args: Any, **options: Any) -> Any:
        if rank == who:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    with engine_of() as engine:
        backward(engine)
        engine.step()
        engine.save_checkpoint(path, tag="good")
        owner, name = {"writing": (Files, "append"), "flushed": (os, "fsync"), "renaming": (Path, "rename")}[where]
        with instead(owner, name, kill):
            found = error_of(lambda: engine.save_checkpoint(path, tag="new"))
        assert "close the engine" in error_of(lambda: backward(engine))[1]
        return found


@pytest.mark.parametrize(("who", "where"), [(1, "writing"), (2, "flushed"), (0, "renaming")])
def test_a_killed_rank_leaves_the_checkpoint_before(who: int, where: str, tmp_path: Path) -> None:
    every = run(end, WORLD, str(tmp_path), who, where)
    assert every.pop(who) == Ended(-signal.SIGKILL)
    assert every[0] == every[1] and every[0][0] == "RanksError"
    assert f"no word of rank {who}" in every[0][1] and "waiting in save_checkpoint" in every[0][1]
    assert (tmp_path / "latest").read_text() == "good\n"
    with engine_of(stage=None) as engine:
        engine.load_checkpoint(tmp_path)
        saved = engine.save_checkpoint(tmp_path)  # puts right what was left
    assert sorted(one.name for one in tmp_path.iterdir()) == [".lock", "good", "latest", "step-00000001"]
    assert saved.name == "step-00000001"  # it is that of the checkpoint that was loaded
