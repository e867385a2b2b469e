"""Damaged, foreign and half-written checkpoints are refused by name; whatever ends a save leaves the ones before."""

from __future__ import annotations

import dataclasses
import errno
import json
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import warnings
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from harness import WIDTH, assert_same_tensors, everything_on_device, host, tight
from test_checkpoints import Net, Run, assert_same, directory, net, optimizer_of
from torch import nn

from offload import LAMB, SGD, Adam, AdamW, CheckpointError, Engine, Lion, StateError
from offload.checkpoint.format import folder as folders
from offload.checkpoint.format import writer as writers
from offload.checkpoint.format.index import Index
from offload.checkpoint.format.locks import lock
from offload.checkpoint.format.reader import Source
from offload.checkpoint.format.staging import Staging
from offload.checkpoint.restoring import read_tensor
from offload.memory.budget import Tier
from swap import Fault, FaultTarget, SwapError, SwapFullError

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


def save(engine: Engine, path: Path, *, client_state: Any = None, **options: Any) -> Path:
    """Save in small files."""
    return engine._checkpoints.save(
        path, client_state=lambda: client_state, **{"tag": None, "keep": None, "file_bytes": SMALL_FILES, **options}
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


def test_damage_of_a_state_is_mended_by_another_load(copy: Path, tmp_path: Path) -> None:
    """Until then, nobody can use what was loaded half."""
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=torch.bfloat16)
    index = Index.read(copy / "index.json")
    last = [entry for entry in index.entries if entry.role == "exp_avg" and entry.ranges][-1]
    _, member = Source(copy, index).range_sums(last, last.ranges[-1])
    flip(copy / last.ranges[-1].file, member.offset)
    with run.engine as engine:
        run.train(range(1))
        with pytest.raises(CheckpointError, match="is damaged.*load another checkpoint"):
            engine.load_checkpoint(copy.parent)
        half = "loading a checkpoint of .* failed half way .* is damaged.*; repeat it, or load another checkpoint"
        for call in (engine.state_dict, engine.digests, engine.step):
            with pytest.raises(StateError, match=half):
                call()
        with pytest.raises(StateError, match=half):  # something may be left out
            engine.load_checkpoint(copy.parent, strict=False)
        with pytest.raises(CheckpointError, match="there is none"):
            engine.load_checkpoint(copy.parent, tag="another")
        with pytest.raises(StateError, match=half):
            engine.save_checkpoint(tmp_path / "other")
        flip(copy / last.ranges[-1].file, member.offset)
        engine.load_checkpoint(copy.parent)
        whole = Run(tight(net(), directory(tmp_path, "whole")), dtype=torch.bfloat16)
        with whole.engine:
            whole.engine.load_checkpoint(copy.parent)
            assert_same(run.outcome(), whole.outcome())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_load_that_the_drive_has_ended_is_repeated(dtype: torch.dtype, saved: Path, tmp_path: Path) -> None:
    """Whether what is saved is stored as the engine stores it or not."""
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=dtype)
    with run.engine as engine:
        assert engine._manager is not None and engine._manager.tiers.store is not None
        engine.load_checkpoint(saved)
        truth, half = engine.digests(), 0
        for target in (FaultTarget.READS, FaultTarget.WRITES):
            for nth in (1, 2, 3, 5, 8, 13, 21, 34, 55, 1000):
                run.train(range(1))
                engine.drain()
                engine._manager.tiers.store.inject(Fault(nth=nth, target=target))
                failed = True
                try:
                    engine.load_checkpoint(saved)
                    failed = False
                except SwapError as error:
                    assert error.errno == errno.EIO
                engine._manager.tiers.store.clear_faults()
                if failed:
                    half += engine._life.unusable is not None
                    engine.load_checkpoint(saved)
                engine._manager.check()
                assert engine.digests() == truth, (target, nth)
                if not failed:
                    break
        assert half > 2


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
    text = "parameters stay as they are where checkpoint step-.* differs: it lacks more.weight, more.bias; has also odd"
    with Engine(Other(), None, device="cpu") as engine, pytest.warns(UserWarning, match=text) as told:
        engine.load_checkpoint(saved, strict=False)
    assert {each.filename for each in told if "parameters stay" in str(each.message)} == {__file__}
    wrapped = nn.ModuleDict({"model": net(torch.bfloat16)})  # all names have a prefix: nothing would be loaded
    with Engine(wrapped, None, device="cpu") as engine:
        for strict in (True, False):
            with pytest.raises(CheckpointError, match=r"another model: it lacks model\..* that it was saved from$"):
                engine.load_checkpoint(saved, strict=strict)
    model = net(torch.bfloat16)
    model.blocks[1] = nn.Linear(WIDTH, 2 * WIDTH, dtype=torch.bfloat16)
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        before = engine.digests()
        with pytest.raises(CheckpointError, match=r"blocks.1.weight has shape \(32, 32\) instead of \(64, 32\)"):
            engine.load_checkpoint(saved, strict=False)
        assert engine.digests() == before


class Noted(nn.Module):
    """Keeps a state of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.note: Any = 0

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


class Beside(nn.Module):
    """A layer with buffers that are persistent, not, or None, and modules with states of their own."""

    def __init__(self, norm: str = "norm", rows: int | None = 3, noted: str | None = "noted") -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.add_module(norm, nn.BatchNorm1d(WIDTH, affine=False))
        self.register_buffer("rows", None if rows is None else torch.arange(float(rows)))
        self.register_buffer("nothing", None)
        self.register_buffer("mask", torch.ones(1 if rows is None else rows), persistent=False)
        self.other = Noted()
        if noted is not None:
            self.add_module(noted, Noted())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x)


def beside(model: Beside) -> dict[str, Any]:
    """Return what a model has beside parameters, as plain values."""
    found = {name: buffer.tolist() for name, buffer in model.named_buffers()}
    return found | {name: part.note for name, part in model.named_modules() if isinstance(part, Noted)}


@pytest.fixture(scope="module")
def saved_beside(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of `Beside`, whose values are none that it is made with."""
    path, model = tmp_path_factory.mktemp("beside"), Beside()
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        for buffer in model.buffers():
            buffer.fill_(7)
        model.other.note = model.noted.note = {"seen": 7}
        engine.save_checkpoint(path)
    return path


@pytest.mark.parametrize(
    ("options", "text", "taken"),
    [
        ({"norm": "new"}, "of buffers it lacks new.running_mean, .*; has also norm.running_mean, ", {"rows", "noted"}),
        ({"rows": 4}, r"buffer rows has shape \(3,\) instead of \(4,\)", {"noted", "norm.running_mean"}),
        ({"rows": None}, "of buffers it has also rows", {"noted", "norm.running_mean"}),
        ({"noted": None}, "of extra states it has also noted", {"rows", "norm.running_mean"}),
        ({"noted": "new"}, "of extra states it lacks new; has also noted", {"rows", "norm.running_mean"}),
    ],
)
def test_buffers_and_extra_states_of_another_model(
    options: dict[str, Any], text: str, taken: set[str], saved_beside: Path
) -> None:
    """Refused by name, before anything is changed; else a warning names them, and what both have is loaded."""
    model = Beside(**options)
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        before = engine.digests(), beside(model)
        with pytest.raises(CheckpointError, match=f"^checkpoint step-00000000: is of another model: {text}"):
            engine.load_checkpoint(saved_beside)
        assert (engine.digests(), beside(model)) == before
        with pytest.warns(UserWarning, match=f"stay as they are where checkpoint step-00000000 differs: {text}"):
            engine.load_checkpoint(saved_beside, strict=False)
        assert engine.digests() != before[0]
        for name, value in beside(model).items():
            changed = value != before[1][name]
            assert changed == (name in taken or name in ("other", "norm.running_var", "norm.num_batches_tracked")), name


def test_a_buffer_that_is_a_conjugate(tmp_path: Path) -> None:
    """Its bytes are those of what it is the conjugate of."""
    turn, models = torch.polar(torch.ones(3), torch.arange(3.0)), [Beside(), Beside()]
    for model, buffer in zip(models, (turn.conj(), torch.zeros_like(turn)), strict=True):
        model.register_buffer("turn", buffer)
        with Engine(model, AdamW(), **everything_on_device()) as engine:
            (engine.save_checkpoint if model is models[0] else engine.load_checkpoint)(tmp_path)
    assert torch.equal(models[1].turn, turn.conj_physical())


def test_a_buffer_that_the_checkpoint_does_not_have(tmp_path: Path) -> None:
    with Engine(Beside(rows=None), AdamW(), **everything_on_device()) as engine:
        engine.save_checkpoint(tmp_path)
        engine.load_checkpoint(tmp_path)
    with Engine(Beside(), AdamW(), **everything_on_device()) as engine:
        with pytest.raises(CheckpointError, match="of buffers it lacks rows; load it into"):
            engine.load_checkpoint(tmp_path)


def test_a_buffer_that_would_lose_bits(saved_beside: Path) -> None:
    """Refused as a parameter is; what holds all of its values takes it."""
    model, text = Beside(), "buffer rows is torch.float32, of which torch.bfloat16 loses bits"
    model.rows = model.rows.bfloat16()
    model.norm.running_mean = model.norm.running_mean.double()
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        before = beside(model)
        with pytest.raises(CheckpointError, match=f"of another model: {text}; load it into"):
            engine.load_checkpoint(saved_beside)
        assert beside(model) == before
        with pytest.warns(UserWarning, match=f"differs: {text}; values of other dtypes are converted$"):
            engine.load_checkpoint(saved_beside, strict=False)
        assert model.rows.dtype is torch.bfloat16 and beside(model)["rows"] == [7] * 3
        assert beside(model)["norm.running_mean"] == [7] * WIDTH


@pytest.mark.parametrize("pair", [(torch.float8_e4m3fn, torch.float32), (torch.int64, torch.float64)])
def test_buffers_of_other_dtypes_that_torch_may_not_promote(
    pair: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    for dtype in pair:
        model = Beside()
        model.rows = model.rows.to(dtype)
        with Engine(model, AdamW(), **everything_on_device()) as engine:
            if dtype is pair[0]:
                engine.save_checkpoint(tmp_path)
            elif dtype is torch.float64:
                engine.load_checkpoint(tmp_path)
            else:
                with pytest.raises(CheckpointError, match="buffer rows is torch.float8_e4m3fn, of which"):
                    engine.load_checkpoint(tmp_path)


def test_buffers_of_modules_with_several_names(saved_beside: Path, tmp_path: Path) -> None:
    """One of the names is enough, and all may be there; of another program's run no extra states are kept."""
    shutil.copytree(saved_beside, tmp_path / "saved")
    path = tmp_path / "saved" / "step-00000000" / "index.json"
    index = Index.read(path)
    buffers = index.contents["buffers"]
    buffers.update({f"new.{name.removeprefix('norm.')}": at for name, at in buffers.items() if "norm." in name})
    for names in (("norm", "new"), ("new", "norm")):
        model = Beside(names[0])
        model.add_module(names[1], model.get_submodule(names[0]))
        with Engine(model, AdamW(), **everything_on_device()) as engine:
            engine.load_checkpoint(saved_beside)
            assert model.norm.running_mean.tolist() == [7.0] * WIDTH and model.noted.note == {"seen": 7}
            model.norm.running_mean.zero_()
            path.write_text(index.to_json())
            engine.load_checkpoint(tmp_path / "saved")
            assert model.norm.running_mean.tolist() == [7.0] * WIDTH
            imported = dataclasses.replace(index, contents=index.contents | {"extra": {}, "random": None})
            path.write_text(imported.to_json())
            engine.load_checkpoint(tmp_path / "saved")
            assert model.noted.note == {"seen": 7}


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
    for other in (Lion, LAMB, Adam):  # which know the same states, or some of them
        model = net(torch.bfloat16)
        trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups = [{"params": [p for name, p in trained if ("bias" in name) is bare]} for bare in (False, True)]
        with Engine(model, other(groups, lr=0.1), **everything_on_device()) as engine:
            before = engine.digests()
            with pytest.raises(CheckpointError, match=rf"saved with AdamW but this engine has {other.__name__}"):
                engine.load_checkpoint(saved)
            assert engine.digests() == before
    with Engine(net(torch.bfloat16), None, device="cpu") as engine:  # which only evaluates
        engine.load_checkpoint(saved)
        assert_same_tensors(engine.state_dict(), loaded)
    model = net(torch.bfloat16)
    given = torch.optim.RMSprop([p for p in model.parameters() if p.requires_grad])
    with Engine(model, given, **everything_on_device()) as engine:
        with pytest.raises(CheckpointError, match="has the states|kept otherwise"):
            engine.load_checkpoint(saved)


def test_groups_stay_as_made_where_the_optimizer_is_of_another_class(saved: Path) -> None:
    """A learning rate of AdamW means something else to Lion."""
    model = net(torch.bfloat16)
    trained = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
    groups = [{"params": [p for name, p in trained if ("bias" in name) is bare]} for bare in (False, True)]
    with Engine(model, Lion(groups, lr=1e-4, betas=(0.8, 0.7)), **everything_on_device()) as engine:
        weights, made = engine.digests(), engine.optimizer.state_dict()["param_groups"]
        text = "the param groups stay as they are: checkpoint: expected param groups of Lion but got those of AdamW"
        with pytest.warns(UserWarning, match=text):
            engine.load_checkpoint(saved, strict=False)
        assert engine.optimizer.state_dict()["param_groups"] == made
        assert engine.digests() != weights


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


OWN_CLASSES: dict[str, Callable[[list[nn.Parameter]], torch.optim.Optimizer]] = {
    "NAdam": lambda parameters: torch.optim.NAdam(parameters, lr=1e-2),
    "RMSprop": lambda parameters: torch.optim.RMSprop(parameters, lr=1e-3, momentum=0.9, centered=True),
    "amsgrad": lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, amsgrad=True),
    "small states": lambda parameters: torch.optim.Adafactor(parameters, lr=1e-2),
}


@pytest.mark.parametrize("name", OWN_CLASSES)
@pytest.mark.parametrize("dtypes", [(torch.bfloat16, torch.float32), (torch.float32, torch.bfloat16)])
def test_states_of_an_own_class_are_converted_with_what_it_counts(
    name: str, dtypes: tuple[torch.dtype, torch.dtype], tmp_path: Path
) -> None:
    """They and the masters are those that were saved, whatever the parameters are stored as."""

    def make(model: nn.Module) -> torch.optim.Optimizer:
        return OWN_CLASSES[name]([p for p in model.parameters() if p.requires_grad])

    found = []
    for number, dtype in enumerate(dtypes):
        run = Run(host(net(), whole=True), dtype=dtype, optimizer=make)
        with run.engine as engine:
            if number:
                engine.load_checkpoint(tmp_path / "saved", strict=dtype is torch.float32)  # frozen weights lose bits
            else:
                run.train(range(3))
                save(engine, tmp_path / "saved")
            packed = engine.optimizer.state_dict()["state"]
            parameters = [p for group in engine.optimizer.param_groups for p in group["params"]]
            assert len(packed) > 8
            for position, state in packed.items():
                with engine.gather(parameters[position]):
                    state.setdefault("master", parameters[position].detach().float().clone())
            found.append(packed)
    assert found[0].keys() == found[1].keys()
    for position, state in found[0].items():
        assert_same_tensors(state, found[1][position])
        assert state["step"] == 3


def test_records_of_parameters_that_the_checkpoint_lacks_stay(tmp_path: Path) -> None:
    """As their moments do: an optimizer of an own class goes on with them, and takes what the checkpoint has."""
    found = []
    for number, names in enumerate((["a"], ["a", "b"])):
        model = nn.ModuleDict({name: nn.Linear(4, 4) for name in names})
        with Engine(model, torch.optim.NAdam(model.parameters()), **everything_on_device()) as engine:
            for _ in range(number + 1):
                sum(part(torch.ones(2, 4)).sum() for part in model.values()).backward()
                engine.step()
            if number:
                found.append(engine.optimizer.state_dict()["state"])
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # of what is not in it
                    engine.load_checkpoint(tmp_path, strict=False)
            else:
                engine.save_checkpoint(tmp_path)
            found.append(engine.optimizer.state_dict()["state"])
    saved, before, after = found
    for position in (0, 1):
        assert_same_tensors(after[position], saved[position])
    for position in (2, 3):
        assert before[position]["step"] == 2
        assert_same_tensors(after[position], before[position])


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


def test_gradients_that_are_dropped_need_no_room(tmp_path: Path) -> None:
    """Wide ones of another number of micro-batches, where the budget has no room for such gradients."""
    with (run := Run(everything_on_device(), dtype=torch.bfloat16, gradient_accumulation_steps=4)).engine as engine:
        run.train(range(1))
        save(engine, tmp_path / "saved")
    models = [net(torch.bfloat16) for _ in range(2)]
    options = host(models[0])
    with Engine(models[0], optimizer_of(models[0]), **options) as engine:
        least = engine.plan.arena_bytes[Tier.HOST] + engine.plan.request.own_bytes
    options["max_memory"] = {**options["max_memory"], "cpu": least + 4096}
    with Engine(models[1], optimizer_of(models[1]), **options) as engine:
        assert not engine.plan.wide_bytes
        with pytest.warns(UserWarning, match="its gradients are dropped"):
            engine.load_checkpoint(tmp_path / "saved", strict=False)
        assert not any("gradient" in one for one in engine.digests().values())


@pytest.mark.parametrize("written", ["now", "before"])
@pytest.mark.parametrize("count", [2, 8])
def test_micro_batches_of_another_number_are_refused(count: int, written: str, tmp_path: Path) -> None:
    """They would be divided by the wrong one. Files from before have none: it is refused what is too few."""
    with (run := Run(everything_on_device(), gradient_accumulation_steps=4)).engine as engine:
        run.train(range(3))
        path = save(engine, tmp_path / "saved")
    if written == "before":
        index = Index.read(path / "index.json")
        del index.contents["accumulation"]["micro_batches"]["count"]
        (path / "index.json").write_text(index.to_json())
    with (run := Run(everything_on_device(), gradient_accumulation_steps=count)).engine as engine:
        before = engine.digests()
        if written == "before" and count == 8:
            engine.load_checkpoint(tmp_path / "saved")
            assert engine._step.micro_batches.done == 3  # type: ignore[union-attr]
            return
        said = "4" if written == "now" else "more"
        text = f"inside a step of {said} micro-batches but this engine has gradient_accumulation_steps={count}; load"
        with pytest.raises(CheckpointError, match=text):
            engine.load_checkpoint(tmp_path / "saved")
        assert engine.digests() == before
        with pytest.warns(UserWarning, match="its gradients are dropped; run the step's micro-batches again"):
            engine.load_checkpoint(tmp_path / "saved", strict=False)
        assert not any("gradient" in one for one in engine.digests().values())
        run.train(range(count))
        assert engine._parts.steps.run.steps == 1
        saved_again = save(engine, tmp_path / "again")
    with Run(everything_on_device(), gradient_accumulation_steps=3).engine as engine:  # right behind a step
        engine.load_checkpoint(saved_again)


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
    with folders.Folder(path).reading("a"):
        with pytest.raises(CheckpointError, match="is being read and cannot be replaced"):
            engine.save_checkpoint(path, tag="a")
        engine.save_checkpoint(path, tag="b", keep=1)
        assert folders.Folder(path).tags() == ["a", "b"]
    engine.save_checkpoint(path, tag="c", keep=1)
    assert folders.Folder(path).tags() == ["c"]
    engine._checkpoints.settle()
    assert sorted(os.listdir(path)) == [".lock", "c", "latest"]


@pytest.mark.parametrize("tag", ["a", "b"])
def test_a_checkpoint_that_vanishes_as_it_is_opened_is_not_read(
    tag: str, engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody replaces it, or does not keep it, when it was found and is not locked yet."""
    path, real, tags = tmp_path / "saved", folders.lock, [tag]
    save(engine, path, tag="a")

    def locked(fd: int, *, shared: bool = False) -> bool:
        if shared and tags:
            save(engine, path, tag=tags.pop(), keep=1)
        return real(fd, shared=shared)

    monkeypatch.setattr(folders, "lock", locked)
    with folders.Folder(path).reading(None) as found:
        assert not tags and found == path / tag
        save(engine, path, tag="c", keep=1)
        assert folders.Folder(path).tags() == [tag, "c"]


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


def test_a_rename_that_fails_leaves_what_was_to_be_replaced(
    engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real, left = tmp_path / "saved", Path.rename, [2]
    save(engine, path, tag="old")
    before = engine.digests()
    engine.backward(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()

    def rename(self: Path, target: Path) -> Path:
        left[0] -= 1
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, target)

    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(SwapFullError, match="ENOSPC"):
        save(engine, path, tag="old")
    assert folders.Folder(path).tags() == ["old"]
    engine.load_checkpoint(path)
    assert engine.digests() == before


class PowerCut(Exception):
    pass


class Power:
    """Cuts the power before the nth flush, rename or deletion, and leaves in `image` what the drive could hold then.

    Of every file the flushed content is there; of what was written since, any sectors. Of the names in each directory
    either those of its last flush or the present ones.
    """

    SECTOR = 512

    def __init__(self, folder: Path, image: Path, nth: int, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.image, self.left = folder, image, nth
        self.random = random.Random(nth)
        self.files = {file.stat().st_ino: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        self.names = {path.stat().st_ino: self.listing(path) for path in (folder, *folder.iterdir()) if path.is_dir()}
        sync = os.fsync

        def fsync(fd: int) -> None:
            self.step()
            sync(fd)
            path, inode = Path(os.readlink(f"/proc/self/fd/{fd}")), os.fstat(fd).st_ino
            if path.is_dir():
                self.names[inode] = self.listing(path)
            else:
                self.files[inode] = path.read_bytes()

        def guarded(real: Callable[..., Any]) -> Callable[..., Any]:
            def call(*args: Any, **options: Any) -> Any:
                self.step()
                return real(*args, **options)

            return call

        monkeypatch.setattr(os, "fsync", fsync)
        monkeypatch.setattr(os, "unlink", guarded(os.unlink))
        for name in ("rename", "replace"):
            monkeypatch.setattr(Path, name, guarded(getattr(Path, name)))

    def step(self) -> None:
        self.left -= 1
        if self.left == 0:
            self.leave(self.folder, self.image)
            raise PowerCut

    @staticmethod
    def listing(path: Path) -> dict[str, int]:
        return {entry.name: entry.stat().st_ino for entry in path.iterdir()}

    def leave(self, path: Path, image: Path) -> None:
        """Leave a directory; what has a name and was never flushed is there without content."""
        image.mkdir()
        now = self.listing(path)
        names = now if self.random.random() < 0.5 else self.names.get(path.stat().st_ino, {})
        where = {entry.stat().st_ino: entry for entry in self.folder.rglob("*")}
        for name, inode in names.items():
            there = where.get(inode)
            if there is not None and there.is_dir():
                self.leave(there, image / name)
                continue
            old = self.files.get(inode, b"")
            new = old if there is None else there.read_bytes()
            length = self.random.choice([len(old), len(new)])
            mixed = bytearray(length)
            for at in range(0, length, self.SECTOR):
                sector = self.random.choice([old, new])[at : at + self.SECTOR][: length - at]
                mixed[at : at + len(sector)] = sector
            (image / name).write_bytes(mixed)


@pytest.mark.parametrize("tag", ["new", "old"])
def test_a_power_cut_at_any_flush_or_rename_leaves_a_whole_checkpoint(tag: str, engine: Engine, tmp_path: Path) -> None:
    """Of what was saved before, or of the new one, whether it is kept alone or replaces the old one."""
    first = save(engine, tmp_path / "first", tag="old").parent
    before = engine.digests()
    engine.backward(engine(torch.ones(4, WIDTH, dtype=torch.bfloat16)).float().pow(2).mean())
    engine.step()
    after = engine.digests()
    found = []
    other = Run(tight(net(), directory(tmp_path, "swap-2")), dtype=torch.bfloat16).engine
    with other:
        for nth in range(1, 100):
            path, image = tmp_path / f"{nth}", tmp_path / f"{nth}-image"
            shutil.copytree(first, path)
            with pytest.MonkeyPatch.context() as patch:
                power = Power(path, image, nth, patch)
                try:
                    save(engine, path, tag=tag, client_state={"n": torch.ones(1)}, keep=1)
                    engine._checkpoints.settle()  # what is not kept is deleted
                except PowerCut:
                    pass
            if power.left > 0:
                break
            if tag == "old" and not (image / "old").exists():  # between two renames: the next save puts it back
                with folders.Folder(image).writing():
                    pass
            for each in (None, *folders.Folder(image).tags()):
                other.load_checkpoint(image, tag=each)
                found.append(other.digests())
                assert found[-1] in (before, after), nth
            shutil.rmtree(image)
    assert before in found and nth > 8
    assert tag == "old" or after in found


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
    done = forked.run(CRASH, str(number), str(path), call, tag)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    unfinished = folders.Folder(path).unfinished()
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(4)])
    with Engine(model, AdamW(), **everything_on_device()) as engine:
        if tag == "old":  # between the two renames of a replacement: it is read, and the next save puts it back
            assert not (path / "old").exists()
            engine.load_checkpoint(path)
            save(engine, path, tag="next")
            assert folders.Folder(path).tags() == ["old", "next"] and (path / "old").is_dir()
            engine.load_checkpoint(path, tag="old")
        else:
            with caplog.at_level(logging.WARNING):
                engine.load_checkpoint(path)
            assert all("was broken off; it is ignored" in caplog.text for _ in unfinished)
            assert bool(unfinished) == (call != "replace")
            save(engine, path, tag="next", keep=1)
        assert not folders.Folder(path).unfinished()


@pytest.fixture
def aside(copy: Path) -> Path:
    """What a kill between the two renames of a replacement has left: the former checkpoint under another name."""
    return copy.rename(copy.parent / f".replaced-{copy.name}")


@pytest.mark.parametrize("how", ["latest", "tag", "no latest", "folder", "newest"])
def test_what_a_broken_off_replacement_has_put_aside_is_found(how: str, aside: Path, engine: Engine) -> None:
    """Whoever reads renames nothing: several ranks do, and a directory may be read-only."""
    path, tag = aside.parent, "step-00000002"
    if how == "no latest":
        (path / "latest").unlink()
    before = sorted(os.listdir(path))
    folder = folders.Folder(path)
    assert folder.tags() == [tag] and folder.next_sequence() == 2
    if how == "newest":
        (found,) = engine._checkpoints.newer(path, 1)
        engine.load_checkpoint(found)
    elif how == "folder":
        engine.load_checkpoint(path / tag)
    else:
        engine.load_checkpoint(path, tag=tag if how == "tag" else None)
    assert engine._parts.steps.run.steps == 2 and sorted(os.listdir(path)) == before
    with folder.reading(tag):  # which the save leaves where it is
        save(engine, path, tag="next", keep=1)
        assert folder.tags() == [tag, "next"] and folder.at(tag) == aside
        save(engine, path, tag=tag)
        assert folder.tags() == ["next", tag] and folder.at(tag) == path / tag
        with pytest.raises(CheckpointError, match="is being read and cannot be replaced"):
            save(engine, path, tag=tag)
    save(engine, path, tag="last", keep=2)
    engine._checkpoints.settle()
    assert sorted(os.listdir(path)) == [".lock", "last", "latest", tag]


def test_what_was_put_aside_is_no_checkpoint_beside_the_one_that_replaced_it(aside: Path) -> None:
    folder = folders.Folder(aside.parent)
    shutil.copytree(aside, aside.parent / "step-00000002")
    assert folder.tags() == ["step-00000002"] and folder.find(None).name == "step-00000002"


CUT_OFF = """
import os, signal, sys
from pathlib import Path
import torch
from offload import AdamW, Engine
left, path = int(sys.argv[1]), Path(sys.argv[2])
model = torch.nn.Sequential(*[torch.nn.Linear(32, 32) for _ in range(4)])
engine = Engine(model, AdamW(), device="cpu", max_memory={"device": "64MiB", "cpu": "64MiB"},
                nvme_path=path, background_checkpoints=True)
engine.save_checkpoint(path / "saved", tag="old")
real = os.unlink
def kill(*args, **options):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
    return real(*args, **options)
os.unlink = kill
engine.save_checkpoint(path / "saved", tag=sys.argv[3], keep=1, wait=sys.argv[4] == "wait")
"""


@pytest.mark.parametrize("kind", ["folder", "file", "link"])
def test_what_is_no_checkpoint_is_not_replaced(kind: str, engine: Engine, tmp_path: Path) -> None:
    """The folder of a tag may be where somebody has put weights for others."""
    path = tmp_path / "saved"
    mine, other = path / "best", tmp_path / "elsewhere"
    for folder in (path, other):
        folder.mkdir()
    if kind == "folder":
        mine.mkdir()
        (mine / "model.safetensors").write_text("mine")
    elif kind == "file":
        mine.write_text("mine")
    else:
        mine.symlink_to(other)
    with pytest.raises(CheckpointError, match=r"best: expected a checkpoint that is replaced.*save under another tag"):
        save(engine, path, tag="best")
    assert not list(path.glob(".saving-*")) and not folders.Folder(path).unfinished()
    assert kind != "folder" or (mine / "model.safetensors").read_text() == "mine"
    assert save(engine, path, tag="next", keep=1).name == "next" and os.path.lexists(mine)


def test_no_checkpoint_is_saved_into_another_one(engine: Engine, tmp_path: Path) -> None:
    """A load takes the folder that save_checkpoint returned; the next save there would be found by nobody."""
    path = save(engine, tmp_path / "saved")
    before = sorted(os.listdir(path))
    with pytest.raises(CheckpointError, match=rf"is a checkpoint itself.*name the directory .*, {path.parent}$"):
        save(engine, path, tag="next")
    assert sorted(os.listdir(path)) == before


@pytest.mark.parametrize(("number", "tag", "how"), [(1, "new", "wait"), (2, "old", "go on")])
def test_a_kill_in_a_deletion_leaves_nothing_that_looks_whole(
    number: int, tag: str, how: str, engine: Engine, tmp_path: Path
) -> None:
    """What is left of the former one is no checkpoint to anybody, and the next save deletes it."""
    done = forked.run(CUT_OFF, str(number), str(tmp_path), tag, how)
    assert done.returncode == -signal.SIGKILL, done.stderr[-2000:]
    path = tmp_path / "saved"
    folder = folders.Folder(path)
    assert folder.tags() == [tag] and folder.find(None) == path / tag and not folder.unfinished()
    (left,) = path.glob(".deleted-*")
    assert len(os.listdir(left)) == 4 - number
    save(engine, path, tag="next", keep=2)
    engine._checkpoints.settle()
    assert sorted(os.listdir(path)) == sorted([".lock", "latest", "next", tag])


def test_a_deletion_that_fails_fails_no_save(engine: Engine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "saved"
    save(engine, path, tag="old")

    def refused(*args: object, **options: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(os, "unlink", refused)
    save(engine, path, tag="new", keep=1)
    engine.drain()
    engine._checkpoints.settle()
    monkeypatch.undo()
    assert folders.Folder(path).tags() == ["new"] and list(path.glob(".deleted-*"))
    save(engine, path, tag="next")
    assert not list(path.glob(".deleted-*"))


def test_a_link_to_a_checkpoint_is_deleted_and_what_it_leads_to_stays(engine: Engine, tmp_path: Path) -> None:
    path = tmp_path / "saved"
    save(engine, path, tag="old").rename(tmp_path / "moved")
    (path / "old").symlink_to(tmp_path / "moved")
    save(engine, path, tag="new", keep=1)
    engine._checkpoints.settle()
    assert sorted(os.listdir(path)) == [".lock", "latest", "new"]
    assert (tmp_path / "moved" / "index.json").is_file()


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


@pytest.mark.parametrize("index", ['{"pages": ["a"]}', '{"format": "offload-checkpoint", "version": 99}'])
def test_a_folder_with_an_index_of_others_is_never_given_up(index: str, engine: Engine, tmp_path: Path) -> None:
    theirs = tmp_path / "saved" / "site"
    theirs.mkdir(parents=True)
    (theirs / "index.json").write_text(index)
    for tag in ("a", "b", "c"):
        engine.save_checkpoint(tmp_path / "saved", tag=tag, keep=1)
    engine._checkpoints.settle()
    assert (theirs / "index.json").read_text() == index
    assert sorted(path.name for path in (tmp_path / "saved").iterdir() if path.is_dir()) == ["c", "site"]
