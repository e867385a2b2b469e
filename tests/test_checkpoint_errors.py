"""Damaged, foreign and half-written checkpoints are refused by name; whatever ends a save leaves the ones before."""

from __future__ import annotations

import errno
import json
import logging
import os
import re
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, assert_same_tensors, everything_on_device, host, tight
from test_checkpoints import Net, Run, assert_same, directory, net, optimizer_of
from torch import nn

from offload import SGD, AdamW, CheckpointError, Engine, StateError
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format import writer as writers
from offload.checkpoint.format.index import Index
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.staging import Staging, lock
from offload.checkpoint.restoring import read_tensor
from swap import SwapFullError

pytestmark = pytest.mark.usefixtures("single_torch_thread")
SMALL_FILES = 30_000


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint in several files, after two steps."""
    path = tmp_path_factory.mktemp("made")
    run = Run(tight(net(), directory(path, "swap")), dtype=torch.bfloat16)
    with run.engine:
        run.train(range(2))
        save(run.engine, path / "saved")
    return path / "saved"


def save(engine: Engine, path: Path, **options: Any) -> Path:
    """Save in small files."""
    return engine._checkpoints.save(
        path, **{"tag": None, "client_state": None, "keep": None, "file_bytes": SMALL_FILES, **options}
    )


@pytest.fixture
def copy(saved: Path, tmp_path: Path) -> Path:
    """A copy of it that may be damaged; returns the folder of the checkpoint."""
    shutil.copytree(saved, tmp_path / "saved")
    return tmp_path / "saved" / "step-00000002"


@pytest.fixture
def engine(tmp_path: Path) -> Iterator[Engine]:
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=torch.bfloat16)
    with run.engine:
        yield run.engine


def flip(file: Path, offset: int) -> None:
    data = bytearray(file.read_bytes())
    data[offset] ^= 0x10
    file.write_bytes(bytes(data))


# --- damaged files ----------------------------------------------------------------------------------------------------


def test_a_wrong_byte_is_named(copy: Path, engine: Engine) -> None:
    """For one byte in each tensor: its role, its name, the elements and the bytes of the file around it."""
    before = engine.digests()
    index = Index.read(copy / "index.json")
    source = Source(copy, index)
    with Staging(4, 65536, deadline_s=60) as staging:
        for entry in index.entries:
            for part in entry.ranges:
                _, member = source.range_sums(entry, part)
                flip(copy / part.file, member.offset + member.size_bytes - 1)
                begin, end = member.offset, member.offset + member.size_bytes
                label = f"{entry.role} of {entry.name}, elements [{part.begin}, {part.end}), bytes [{begin}, {end})"
                with pytest.raises(CheckpointError, match=re.escape(label)):
                    read_tensor(source, entry, staging)
                flip(copy / part.file, member.offset + member.size_bytes - 1)
    assert engine.digests() == before
    engine.load_checkpoint(copy.parent)


def test_damage_of_a_state_ends_the_engine(copy: Path, tmp_path: Path) -> None:
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=torch.bfloat16)
    index = Index.read(copy / "index.json")
    last = [entry for entry in index.entries if entry.role == "exp_avg" and entry.ranges][-1]
    _, member = Source(copy, index).range_sums(last, last.ranges[-1])
    flip(copy / last.ranges[-1].file, member.offset)
    with run.engine as engine:
        run.train(range(1))
        with pytest.raises(CheckpointError, match="is damaged.*load another checkpoint"):
            engine.load_checkpoint(copy.parent)
        with pytest.raises(StateError, match="loading checkpoint .* failed half way.*resume from a checkpoint"):
            engine.state_dict()


@pytest.mark.parametrize("where", ["index", "header", "values"])
def test_damage_that_is_seen_before_anything_is_written(where: str, copy: Path, engine: Engine) -> None:
    before = engine.digests()
    values = copy / "values.safetensors"
    {
        "index": lambda: flip(copy / "index.json", 200),
        "header": lambda: flip(copy / "tensors-00002.safetensors", 100),
        "values": lambda: flip(values, values.stat().st_size - 1),
    }[where]()
    with pytest.raises(CheckpointError, match="is damaged"):
        engine.load_checkpoint(copy.parent)
    assert engine.digests() == before


def _cut(folder: Path) -> None:
    os.truncate(folder / "tensors-00002.safetensors", (folder / "tensors-00002.safetensors").stat().st_size - 1)


def _swap(folder: Path) -> None:
    one, other = folder / "tensors-00001.safetensors", folder / "tensors-00002.safetensors"
    one.rename(folder / "x")
    other.rename(one)
    (folder / "x").rename(other)


@pytest.mark.parametrize(
    ("harm", "text"),
    [
        (_cut, r"tensors-00002.safetensors: expected \d+ bytes but got \d+"),
        (_swap, "tensors-00001.safetensors: is damaged, or another one"),
        (lambda f: (f / "tensors-00001.safetensors").unlink(), "tensors-00001.safetensors: is missing"),
        (lambda f: (f / "tensors-00001.safetensors").write_bytes(b"short"), "its header would take"),
    ],
)
def test_files_that_are_not_what_they_were(harm: Callable[[Path], None], text: str, copy: Path, engine: Engine) -> None:
    before = engine.digests()
    harm(copy)
    with pytest.raises(CheckpointError, match=text):
        engine.load_checkpoint(copy.parent)
    assert engine.digests() == before


def test_a_newer_format(copy: Path, engine: Engine) -> None:
    body = json.loads((copy / "index.json").read_text())
    body["version"] = 2
    body.pop("checksum")
    body["checksum"] = zlib.crc32(json.dumps(body, separators=(",", ":")).encode())
    (copy / "index.json").write_text(json.dumps(body, separators=(",", ":")))
    with pytest.raises(CheckpointError, match="expected version 1 of the format but got 2.*or a later one"):
        engine.load_checkpoint(copy.parent)


def test_what_is_not_there(tmp_path: Path, saved: Path, engine: Engine) -> None:
    with pytest.raises(CheckpointError, match="does not exist"):
        engine.load_checkpoint(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match="there is no checkpoint in it; it holds none"):
        engine.load_checkpoint(directory(tmp_path, "empty"))
    with pytest.raises(CheckpointError, match="step-3: there is none; there are step-00000002"):
        engine.load_checkpoint(saved, tag="step-3")


# --- foreign checkpoints ----------------------------------------------------------------------------------------------


class Other(Net):
    def __init__(self) -> None:
        super().__init__()
        self.more = nn.Linear(WIDTH, 3)
        del self.odd

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x


def test_another_model(saved: Path) -> None:
    with Engine(Other(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(CheckpointError, match="of another model: it lacks more.weight, more.bias; has also odd"):
            engine.load_checkpoint(saved)
        with pytest.warns(UserWarning, match="param groups stay as they are"):
            engine.load_checkpoint(saved, strict=False)
    model = net(torch.bfloat16)
    model.blocks[1] = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        before = engine.digests()
        with pytest.raises(CheckpointError, match=r"blocks.1.weight has shape \(32, 32\) instead of \(64, 32\)"):
            engine.load_checkpoint(saved, strict=False)
        assert engine.digests() == before


def test_other_param_groups(saved: Path) -> None:
    with Engine(net(torch.bfloat16), AdamW(), **everything_on_device()) as engine:
        before = engine.digests()
        with pytest.raises(Exception, match="expected groups of"):
            engine.load_checkpoint(saved)
        assert engine.digests() == before
        with pytest.warns(UserWarning, match="param groups stay as they are"):
            engine.load_checkpoint(saved, strict=False)


def test_another_optimizer(saved: Path) -> None:
    """Refused; if it is asked for, parameters and masters come, and states begin anew."""
    with Engine(net(torch.bfloat16), SGD(lr=0.1, momentum=0.9), **everything_on_device()) as engine:
        with pytest.raises(CheckpointError, match=r"has the states \[exp_avg, exp_avg_sq\] instead of \[momentum"):
            engine.load_checkpoint(saved)
        with pytest.warns(UserWarning, match="param groups"):
            engine.load_checkpoint(saved, strict=False)
        assert engine.optimizer is not None and engine.optimizer.state_dict()["state"] == {}
        loaded = engine.state_dict()
    with Engine(net(torch.bfloat16), None, device="cpu") as engine:  # which only evaluates
        engine.load_checkpoint(saved)
        assert_same_tensors(engine.state_dict(), loaded)
    model = net(torch.bfloat16)
    given = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad])
    with Engine(model, given, **everything_on_device()) as engine:
        with pytest.raises(CheckpointError, match="has the states|kept otherwise"):
            engine.load_checkpoint(saved)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", ["float32", "bfloat16", "int8"])
def test_what_is_stored_otherwise_is_converted_where_that_is_exact(
    dtype: torch.dtype, kind: str, tmp_path: Path
) -> None:
    """Into fp32 everything goes: masters and states are those of the optimizer's own dict."""
    run = Run(tight(net(dtype), directory(tmp_path, "swap")), dtype=dtype, state_dtype=kind, initial_loss_scale=8.0)
    with run.engine as engine:
        run.train(range(3))
        save(engine, tmp_path / "saved")
        packed, parameters = engine.optimizer.state_dict(), engine.state_dict()
    model = net()
    with Engine(model, optimizer_of(model), **host(model)) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        found, names = engine.optimizer.state_dict(), engine.state_dict()
        assert found["state"].keys() == packed["state"].keys()
        for position, state in packed["state"].items():
            mine = dict(found["state"][position])
            assert_same_tensors(mine, {name: value for name, value in state.items() if name != "master"})
        ordered = [p for group in engine.optimizer.param_groups for p in group["params"]]
        by_id = {id(p): name for name, p in model.named_parameters()}
        for position, parameter in enumerate(ordered):
            name = by_id[id(parameter)]
            master = packed["state"].get(position, {}).get("master", parameters[name].float())
            assert torch.equal(names[name], master.float()), name


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_lossy_states_are_refused_unless_asked_for(kind: str, saved: Path) -> None:
    model = net(torch.bfloat16)
    with Engine(model, optimizer_of(model), **everything_on_device()) as engine:
        engine.load_checkpoint(saved)
        exact = engine.optimizer.state_dict()
    model = net(torch.bfloat16)
    with Engine(model, optimizer_of(model), **everything_on_device(), state_dtype=kind) as engine:
        before = engine.digests()
        with pytest.raises(CheckpointError, match=f"state_dtype='{kind}' loses bits; take the same state_dtype"):
            engine.load_checkpoint(saved)
        assert engine.digests() == before
        engine.load_checkpoint(saved, strict=False)
        packed = engine.optimizer.state_dict()
        engine.optimizer.load_state_dict(exact)  # rounds the same states with the same random bits
        for position, state in engine.optimizer.state_dict()["state"].items():
            assert_same_tensors(packed["state"][position], state)


def test_gradients_that_wait_need_their_precision(tmp_path: Path) -> None:
    place = everything_on_device()
    run = Run(place, dtype=torch.bfloat16, gradient_accumulation_steps=2)
    with run.engine as engine:
        run.train(range(1))
        save(engine, tmp_path / "saved")
        waiting = {name: one["gradient"] for name, one in engine.digests().items() if "gradient" in one}
    tightest = host(net(torch.bfloat16))
    model = net(torch.bfloat16)
    with Engine(model, optimizer_of(model), **{**tightest, "gradient_accumulation_steps": 2}) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert {name: one["gradient"] for name, one in engine.digests().items() if "gradient" in one} == waiting
        engine.zero_grad()
        assert not any("gradient" in one for one in engine.digests().values())


# --- saves that end early ---------------------------------------------------------------------------------------------


def test_another_save_is_under_way(engine: Engine, tmp_path: Path) -> None:
    path = directory(tmp_path, "saved")
    fd = os.open(path / ".lock", os.O_RDWR | os.O_CREAT)
    assert lock(fd)
    with pytest.raises(CheckpointError, match="another save is under way"):
        engine.save_checkpoint(path)
    os.close(fd)
    engine.save_checkpoint(path)


def test_a_checkpoint_that_is_read_is_neither_replaced_nor_deleted(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    engine.save_checkpoint(path, tag="a")
    with folders.Folder(path).reading(path / "a"):
        with pytest.raises(CheckpointError, match="is being read and cannot be replaced"):
            engine.save_checkpoint(path, tag="a")
        engine.save_checkpoint(path, tag="b", keep=1)
        assert folders.Folder(path).tags() == ["a", "b"]
    engine.save_checkpoint(path, tag="c", keep=1)
    assert folders.Folder(path).tags() == ["c"]
    assert sorted(os.listdir(path)) == [".lock", "c", "latest"]


@pytest.mark.parametrize("tag", ["", "latest", ".x", "a/b", "..", "a b", 3, "x" * 300])
def test_names_that_no_folder_can_have(tag: Any, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^tag: expected letters"):
        engine.save_checkpoint(tmp_path / "saved", tag=tag)


@pytest.mark.parametrize("keep", [0, -1, True, 1.5])
def test_numbers_that_nothing_can_be_kept_by(keep: Any, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="^keep: expected a whole number"):
        engine.save_checkpoint(tmp_path / "saved", keep=keep)


def test_a_target_that_is_no_directory(engine: Engine, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match="cannot be written to"):
        engine.save_checkpoint(tmp_path / "file")


CALLS = [
    (writers, "preallocate"),
    (os, "fsync"),
    (os, "pwrite"),
    (Path, "rename"),
    (Path, "replace"),
    (Path, "mkdir"),
]


@pytest.mark.parametrize(("owner", "name"), CALLS)
def test_a_full_drive_leaves_the_checkpoint_before(
    owner: Any, name: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The Nth call says that the drive is full, for N = 1, 2, ... until a save passes."""
    path = tmp_path / "saved"
    save(engine, path, tag="old")
    before = engine.digests()
    real = getattr(owner, name)
    for failing in range(1, 100):
        left = [failing]

        def full(*args: Any, left: list[int] = left, **options: Any) -> Any:
            left[0] -= 1
            if left[0]:
                return real(*args, **options)
            if name == "preallocate":
                return errno.ENOSPC
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(owner, name, full)
        try:
            save(engine, path, tag="new")
            failed = False
        except SwapFullError as error:
            failed = True
            assert "ENOSPC" in str(error) and str(path) in str(error)
        monkeypatch.setattr(owner, name, real)
        assert engine.digests() == before
        assert "old" in folders.Folder(path).tags() and not list(path.glob(".saving*"))
        engine.load_checkpoint(path)
        if not failed and left[0] > 0:
            return
    raise AssertionError("no save has passed")


CRASH = """
import os, signal, sys
from pathlib import Path
import torch
from offload import AdamW, Engine
from offload.checkpoint.format.writer import FileWriter
left, path = int(sys.argv[1]), Path(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
engine = Engine(model, AdamW(), device="cpu", max_memory={"device": "64MiB", "cpu": "64MiB"})
engine.save_checkpoint(path, tag="old")
calls = {"append": (FileWriter, "append"), "rename": (Path, "rename"), "replace": (Path, "replace")}
owner, name = calls[sys.argv[3]]
real = getattr(owner, name)
def kill(*args):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args)
setattr(owner, name, kill)
engine.save_checkpoint(path, tag=sys.argv[4])
"""


@pytest.mark.parametrize(
    ("number", "call", "tag"),
    [(1, "append", "new"), (17, "append", "new"), (1, "rename", "new"), (2, "replace", "new"), (2, "rename", "old")],
)
def test_a_kill_in_the_middle_leaves_the_checkpoint_before(
    number: int, call: str, tag: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "saved"
    command = [sys.executable, "-c", CRASH, str(number), str(path), call, tag]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    unfinished = folders.Folder(path).unfinished()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        if tag == "old":  # between the two renames of a replacement: the next save puts the former one back
            assert not (path / "old").exists()
            save(engine, path, tag="next")
            engine.load_checkpoint(path, tag="old")
        else:
            with caplog.at_level(logging.WARNING):
                engine.load_checkpoint(path)
            assert all("was broken off; it is ignored" in caplog.text for _ in unfinished)
            assert bool(unfinished) == (call != "replace")
            save(engine, path, tag="next", keep=1)
        assert not folders.Folder(path).unfinished()


def test_ctrl_c_while_saving(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    save(engine, path, tag="old")
    real = writers.FileWriter.append

    def interrupted(self: Any, *args: Any) -> None:
        real(self, *args)
        raise KeyboardInterrupt

    monkeypatch.setattr(writers.FileWriter, "append", interrupted)
    before = engine.digests()
    with pytest.raises(KeyboardInterrupt):
        save(engine, path, tag="new")
    monkeypatch.undo()
    assert engine.digests() == before
    assert sorted(os.listdir(path)) == [".lock", "latest", "old"]


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Callable[..., Path]]:
    """Return a function that mounts a tmpfs with options; skips where that is not allowed."""
    mounted: list[Path] = []

    def make(options: str) -> Path:
        path = directory(tmp_path, f"mount{len(mounted)}")
        done = subprocess.run(["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(path)], capture_output=True)
        if done.returncode:
            pytest.skip("mounting a tmpfs needs root")
        mounted.append(path)
        return path

    yield make
    for path in mounted:
        subprocess.run(["umount", str(path)], check=True)


def test_a_drive_without_room(engine: Engine, mount: Callable[..., Path]) -> None:
    path = mount("size=200k")
    save(engine, path, tag="old")
    with pytest.raises(SwapFullError, match=r"a checkpoint needs .* bytes\) but .* are free"):
        save(engine, path, tag="new")
    assert folders.Folder(path).tags() == ["old"]
    engine.load_checkpoint(path)


def test_a_drive_that_is_read_only(engine: Engine, mount: Callable[..., Path]) -> None:
    path = mount("size=1m")
    save(engine, path)
    subprocess.run(["mount", "-o", "remount,ro", str(path)], check=True)
    with pytest.raises(CheckpointError, match="cannot be written to.*mounted for writing"):
        save(engine, path)
    engine.load_checkpoint(path)


def test_a_load_that_is_resumed_by_another_engine(saved: Path, tmp_path: Path) -> None:
    """What was refused leaves the engine as it was, and training goes on from the checkpoint."""
    one, other = (Run(tight(net(), directory(tmp_path, name)), dtype=torch.bfloat16) for name in "ab")
    with one.engine, other.engine:
        one.engine.load_checkpoint(saved)
        other.train(range(1))
        other.engine.load_checkpoint(saved)
        assert_same(one.outcome(), other.outcome())


def test_closed_and_gathered(saved: Path, engine: Engine, tmp_path: Path) -> None:
    with engine.gather(engine.module.odd), pytest.raises(StateError, match="in use"):  # type: ignore[arg-type]
        engine.load_checkpoint(saved)
    engine.close()
    for call in (engine.save_checkpoint, engine.load_checkpoint):
        with pytest.raises(StateError, match="closed"):
            call(tmp_path / "saved")
    assert not (tmp_path / "saved").exists()
