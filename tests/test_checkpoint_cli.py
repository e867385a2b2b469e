"""``offload checkpoint``: what it lists, finds damaged, and writes for others."""

from __future__ import annotations

import copy
import errno
import io
import json
import os
import shutil
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import assert_same_tensors, everything_on_device, tight
from test_checkpoints import Run, directory, net, optimizer_of
from torch import nn

from offload import AdamW, Engine
from offload.checkpoint.format.index import Index
from offload.checkpoint.format.reader import Source
from offload.cli import main as cli
from offload.cli.checkpoint import export_dcp

pytestmark = pytest.mark.usefixtures("single_torch_thread")


@pytest.fixture
def saved(tmp_path: Path) -> tuple[Run, Path]:
    run = Run(tight(net(), directory(tmp_path, "swap")), dtype=torch.bfloat16, state_dtype="int8")
    run.train(range(1))
    run.engine.save_checkpoint(tmp_path / "saved")
    run.train(range(1, 3))
    run.engine._checkpoints.save(
        tmp_path / "saved", tag=None, client_state=run.client_state, keep=None, file_bytes=20_000
    )
    return run, tmp_path / "saved"


def test_ls(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = saved[1]
    (path / ".saving-x-1").mkdir()
    assert cli.main(["checkpoint", "ls", str(path)]) == 0
    rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["tag", "step", "size", "files", "saved"]
    assert rows[1].split()[:2] == ["step-00000001", "1"] and "latest" not in rows[1]
    assert rows[2].split()[:2] == ["step-00000003", "3"] and rows[2].endswith("latest")
    assert rows[3].split(maxsplit=1) == [".saving-x-1", "broken off; it is ignored"]
    assert cli.main(["checkpoint", "ls", str(path / "nowhere")]) == 1
    assert "does not exist" in capsys.readouterr().err


def test_verify_names_every_damaged_tensor(saved: tuple[Run, Path], capsys: pytest.CaptureFixture[str]) -> None:
    path = saved[1]
    assert cli.main(["checkpoint", "verify", str(path)]) == 0
    assert "every byte is what was written" in capsys.readouterr().out
    folder = path / "step-00000003"
    index = Index.read(folder / "index.json")
    source = Source(folder, index)
    harmed = [entry for entry in index.entries if entry.ranges][1::7]
    for entry in harmed:
        _, member = source.range_sums(entry, entry.ranges[0])
        with (folder / entry.ranges[0].file).open("r+b") as file:
            file.seek(member.offset)
            byte = file.read(1)
            file.seek(member.offset)
            file.write(bytes([byte[0] ^ 1]))
    assert cli.main(["checkpoint", "verify", str(path)]) == 1
    output = capsys.readouterr()
    assert all(f"{entry.role} of {entry.name}, elements [0, " in output.out for entry in harmed)
    assert len(output.out.splitlines()) == len(harmed)
    assert f"{len(harmed)} of {len(index.entries)} tensors are damaged" in output.err
    assert cli.main(["checkpoint", "verify", str(path), "--tag", "step-00000001"]) == 0


@pytest.mark.parametrize("limit", ["5GB", "2KiB"])
def test_export_of_weights(saved: tuple[Run, Path], limit: str, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    run, path = saved
    words = ["checkpoint", "export", str(path), "--output", str(tmp_path / "hf"), "--max-shard-size", limit]
    assert cli.main(words) == 0
    expected = run.engine.state_dict()
    if limit == "5GB":
        found = load_file(tmp_path / "hf" / "model.safetensors")
    else:
        listing = json.loads((tmp_path / "hf" / "model.safetensors.index.json").read_text())["weight_map"]
        assert len(set(listing.values())) > 3
        found = {name: load_file(tmp_path / "hf" / file)[name] for name, file in listing.items()}
    assert_same_tensors(found, expected)
    assert cli.main(words) == 1  # nothing is written over


@pytest.mark.parametrize("limit", ["5GB", "2KiB"])
@pytest.mark.parametrize(
    "old", ["model.safetensors", "model.safetensors.index.json", "model-00001-of-00002.safetensors"]
)
def test_no_export_is_mixed_up_with_what_is_there(
    old: str, limit: str, saved: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """With both in a folder, ``from_pretrained`` takes the single file, and shards of two models look like one."""
    words = ["checkpoint", "export", str(saved[1]), "--output", str(tmp_path / "hf"), "--max-shard-size", limit]
    (tmp_path / "hf").mkdir()
    (tmp_path / "hf" / old).write_text("mine")
    assert cli.main(words) == 1
    assert f"{old}: is there already; " in capsys.readouterr().err
    assert os.listdir(tmp_path / "hf") == [old]


class Noted(nn.Module):
    """Has one parameter under two names, a buffer, and a state of its own."""

    def __init__(self, note: Any) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.register_buffer("rows", torch.arange(3.0))
        self.note = note

    def get_extra_state(self) -> Any:
        return self.note

    def set_extra_state(self, state: Any) -> None:
        self.note = state


@pytest.mark.parametrize("form", ["torch", "dcp"])
def test_extra_states_are_exported(form: str, tmp_path: Path) -> None:
    note, output = {"seen": torch.arange(2), "of": "it"}, tmp_path / "out"
    with Engine(Noted(note), AdamW(), **everything_on_device()) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        expected = engine.state_dict()
    words = ["checkpoint", "export", str(tmp_path / "saved"), "--to", form, "--output", str(output)]
    assert cli.main(words) == 0
    if form == "dcp":
        from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

        dcp_to_torch_save(str(output), str(output / "checkpoint.pt"))
    found = torch.load(output / "checkpoint.pt")["model"]
    assert set(expected) - set(found) == {"second.weight"}
    model = Noted(None)
    assert model.load_state_dict(found, strict=False).missing_keys == ["second.weight"]
    assert model.note["of"] == "it" and torch.equal(model.note["seen"], note["seen"])
    assert torch.equal(model.second.weight, expected["first.weight"])


def test_names_of_exported_weights_are_the_modules(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of experts in the hub are others, which save_pretrained writes; the help tells it, and who writes them."""
    transformers = pytest.importorskip("transformers")
    from safetensors.torch import load_file

    shape = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    heads = {"num_key_value_heads": 2, "num_local_experts": 2, "vocab_size": 32}
    model = transformers.MixtralForCausalLM(transformers.MixtralConfig(**shape, **heads))
    with Engine(model, AdamW(lr=1e-3), **everything_on_device()) as engine:
        engine.save_checkpoint(tmp_path / "saved")
        engine.save_pretrained(tmp_path / "hub")
        names = engine.state_dict().keys()
    assert cli.main(["checkpoint", "export", str(tmp_path / "saved"), "--output", str(tmp_path / "hf")]) == 0
    assert load_file(tmp_path / "hf" / "model.safetensors").keys() == names
    assert load_file(tmp_path / "hub" / "model.safetensors").keys() != names
    capsys.readouterr()
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "export", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "by the module's names (if those of the hub differ, as of experts, engine.save_pretrained writes" in shown


def test_export_for_torch(saved: tuple[Run, Path], tmp_path: Path) -> None:
    run, path = saved
    assert cli.main(["checkpoint", "export", str(path), "--format", "torch", "--output", str(tmp_path / "pt")]) == 0
    found = torch.load(tmp_path / "pt" / "checkpoint.pt")
    packed = run.engine.optimizer.state_dict()
    assert_same_tensors(found["model"], run.engine.state_dict())
    assert found["client_state"] == run.client_state()
    assert found["optimizer"].keys() == packed.keys()
    assert found["optimizer"]["param_groups"] == packed["param_groups"] and found["optimizer"]["run"] == packed["run"]
    for number, state in packed["state"].items():
        assert_same_tensors(found["optimizer"]["state"][number], state)
    model = net(torch.bfloat16)
    with Engine(model, optimizer_of(model), **everything_on_device(), state_dtype="int8") as engine:
        engine.load_state_dict(found["model"])
        engine.optimizer.load_state_dict(found["optimizer"])
        assert engine.optimizer.state_dict()["state"].keys() == packed["state"].keys()


def test_export_of_an_own_class(tmp_path: Path) -> None:
    model = net(torch.bfloat16)
    given = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad])
    with Engine(model, given, **everything_on_device()) as engine:
        engine.backward(engine(torch.ones(4, 32, dtype=torch.bfloat16)).float().sum())
        engine.step()
        engine.save_checkpoint(tmp_path / "saved")
        packed = engine.optimizer.state_dict()
    words = ["checkpoint", "export", str(tmp_path / "saved"), "--format", "torch", "--output", str(tmp_path / "pt")]
    assert cli.main(words) == 0
    found = torch.load(tmp_path / "pt" / "checkpoint.pt")["optimizer"]
    assert found["state"].keys() == packed["state"].keys()
    for number, state in packed["state"].items():
        assert_same_tensors(found["state"][number], state)
    model = net(torch.bfloat16)
    other = torch.optim.NAdam([p for p in model.parameters() if p.requires_grad])
    with Engine(model, other, **everything_on_device()) as engine:
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.optimizer.state_dict()["state"].keys() == packed["state"].keys()
        for number, state in engine.optimizer.state_dict()["state"].items():
            assert_same_tensors(state, packed["state"][number])
    shutil.rmtree(tmp_path / "pt")


def dcp_template(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Return what torch.distributed.checkpoint loads into: a fresh model's and optimizer's dicts, by name."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    weights, states = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": states}


def test_export_for_dcp(tmp_path: Path) -> None:
    """Torch's own loader puts it into a plain model and optimizer, which go on as from the state dicts."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    run = Run(tight(net(), directory(tmp_path, "swap")))
    run.train(range(3))
    run.engine.save_checkpoint(tmp_path / "saved", client_state={"note": [1, "two"]})
    words = ["checkpoint", "export", str(tmp_path / "saved"), "--to", "dcp", "--output", str(tmp_path / "dcp")]
    assert cli.main(words) == 0
    packed = run.engine.optimizer.state_dict()
    models = []
    for _ in range(2):
        model = net()
        groups = [
            {**group, "params": [dict(model.named_parameters())[name] for name in names]} for group, names in named(run)
        ]
        models.append((model, torch.optim.AdamW(groups)))
    (plain, optimizer), (other, truth) = models
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        state = dcp_template(plain, optimizer)
        dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
        set_state_dict(plain, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    other.load_state_dict(run.engine.state_dict())
    truth.load_state_dict(copy.deepcopy(packed))  # it keeps the tensors of steps
    assert_same_tensors(plain.state_dict(), other.state_dict())
    for model, stepped in models:
        model.eval()
        model(torch.ones(4, 32)).sum().backward()
        stepped.step()
    assert_same_tensors(plain.state_dict(), other.state_dict())
    model = net()
    with Engine(model, optimizer_of(model), **everything_on_device()) as engine:  # and our own reader takes it
        facts = engine.import_checkpoint(tmp_path / "dcp")
        assert facts.global_step == 3 and engine.optimizer is not None
        assert_same_tensors(engine.state_dict(), run.engine.state_dict())
        for number, entry in engine.optimizer.state_dict()["state"].items():
            assert_same_tensors(entry, packed["state"][number])


def named(run: Run) -> list[tuple[dict[str, Any], list[str]]]:
    """Return the options of each param group, with the names of its parameters."""
    names = {id(parameter): name for name, parameter in run.model.named_parameters()}
    groups = run.engine.optimizer.param_groups
    return [
        ({k: v for k, v in group.items() if k in ("lr", "betas")}, [names[id(p)] for p in group["params"]])
        for group in groups
    ]


def test_export_for_dcp_of_16_bits_and_8_bit_states(saved: tuple[Run, Path], tmp_path: Path) -> None:
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    run, path = saved
    assert cli.main(["checkpoint", "export", str(path), "--to", "dcp", "--output", str(tmp_path / "dcp")]) == 0
    dcp_to_torch_save(str(tmp_path / "dcp"), str(tmp_path / "whole.pt"))
    found = torch.load(tmp_path / "whole.pt", weights_only=False)
    packed = run.engine.optimizer.state_dict()
    assert_same_tensors(found["model"], run.engine.state_dict())
    assert found["client_state"] == run.client_state() and found["run"] == packed["run"]
    flat = [name for _, names in named(run) for name in names]
    assert [name for group in found["optimizer"]["param_groups"] for name in group["params"]] == flat
    for number, entry in packed["state"].items():
        master = entry.pop("master", None)
        ours = found["optimizer"]["state"].get(flat[number], {})
        assert_same_tensors(ours, entry)
        if master is not None:
            assert torch.equal(found["masters"][flat[number]], master)


def test_an_export_for_dcp_is_whole_or_not_there(
    saved: tuple[Run, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = saved[1]

    def refused(output: Path) -> str:
        assert cli.main(["checkpoint", "export", str(path), "--to", "dcp", "--output", str(output)]) == 1
        return capsys.readouterr().err

    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "lost+found").mkdir()  # as on a drive that was just formatted
    (tmp_path / "there" / "file").write_text("")
    assert "there: expected an empty folder, or nothing, but it has " in refused(tmp_path / "there")
    assert "cannot be written to" in refused(tmp_path / "there" / "file" / "below")
    before = sorted(tmp_path.iterdir())
    with monkeypatch.context() as patch:
        patch.setattr(export_dcp, "free_space", lambda _: 10)
        assert "but 10 bytes are free (ENOSPC" in refused(tmp_path / "dcp")

    def broken(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr("torch.distributed.checkpoint.filesystem._write_item", broken)
        assert "dcp: cannot be written to (ENOSPC 28" in refused(tmp_path / "dcp")
    file = next(path.rglob("step-00000003/tensors-00002.safetensors"))
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)
    assert "tensors-00002.safetensors" in refused(tmp_path / "dcp")
    assert sorted(tmp_path.iterdir()) == before


class Full(io.BytesIO):
    """A file on a drive that soon has no room."""

    def write(self, content: Any) -> int:
        if self.tell() > 500:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return super().write(content)


@pytest.mark.parametrize("form", ["safetensors", "torch", "dcp"])
def test_an_export_that_fails_leaves_nothing(
    form: str,
    saved: tuple[Run, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So the next one is not refused; an empty folder that is there, as a mounted drive, stays there."""
    output = tmp_path / "out"
    (output / "lost+found").mkdir(parents=True)
    inode = output.stat().st_ino
    words = ["checkpoint", "export", str(saved[1]), "--to", form, "--output", str(output), "--max-shard-size", "2KiB"]

    def full(*_: Any, **__: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        if form == "safetensors":
            patch.setattr(Path, "write_text", full)  # of the index, behind all shards
        elif form == "torch":
            save = torch.save
            patch.setattr("torch.save", lambda result, _: save(result, Full()))
        else:
            patch.setattr("torch.distributed.checkpoint.filesystem._write_item", full)
        assert cli.main(words) == 1
    assert "out: cannot be written to (ENOSPC 28" in capsys.readouterr().err
    assert os.listdir(output) == ["lost+found"] and not [
        path for path in tmp_path.iterdir() if path.name.startswith(".")
    ]
    assert cli.main(words) == 0
    assert output.stat().st_ino == inode and len(os.listdir(output)) > 1


def test_export_of_muon_for_dcp(tmp_path: Path) -> None:
    """torch's class refuses parameters of one dimension."""
    net = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    optimizer = torch.optim.Muon(net.parameters(), lr=0.01)
    with Engine(net, optimizer, **everything_on_device()) as engine:
        engine.backward(engine(torch.ones(2, 8)).sum())
        optimizer.step()
        engine.save_checkpoint(tmp_path / "saved")
    words = ["checkpoint", "export", str(tmp_path / "saved"), "--to", "dcp", "--output", str(tmp_path / "dcp")]
    assert cli.main(words) == 0
    names = torch.distributed.checkpoint.FileSystemReader(tmp_path / "dcp").read_metadata().state_dict_metadata
    assert "optimizer.state.0.weight.momentum_buffer" in names


def test_commands_are_quick_and_say_what_they_want(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["checkpoint", "verfy", "x"])
    assert "verify" in capsys.readouterr().err
