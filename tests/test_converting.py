"""``offload checkpoint import``: what it writes is what an engine has that imports the same source."""

from __future__ import annotations

import errno
import os
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign import deepspeed_recorder as zero
from harness import everything_on_device, nvme
from test_import_foreign import OPTIMIZERS, SAVES, Net, begun, fresh, llama, save_dcp_by_name, save_torch, train
from torch import nn

import offload
from offload.checkpoint.foreign.files import FileTensor
from offload.checkpoint.sources import PIECE_NUMEL
from offload.cli import main as cli

pytestmark = pytest.mark.usefixtures("single_torch_thread")
RECORDED = Path(__file__).parent / "foreign" / "deepspeed.tar.xz"
MODEL = f"{Net.__module__}:Net"


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


def zero_net() -> nn.Module:
    """Return DeepSpeed's model in the dtype that :data:`CASE` names."""
    made = zero.Net().to(zero.DTYPES[CASE.split("-")[1]])
    made.scale = made.scale.float()
    return made


CASE = "zero1-bf16-x2"


def convert(source: Path, directory: Path, *words: str, model: str = MODEL) -> int:
    return cli.main(["checkpoint", "import", str(source), str(directory), "--model", model, *words])


def everything(engine: offload.Engine) -> dict[str, Any]:
    assert engine.optimizer is not None
    packed = engine.optimizer.state_dict()
    groups = [{**group, "params": 0} for group in packed["param_groups"]]
    return {
        "digests": engine.digests(),
        "groups": groups,
        "run": packed["run"],
        "buffers": dict(engine.module.named_buffers()),
    }


def assert_same(one: dict[str, Any], two: dict[str, Any]) -> None:
    for name, value in one.pop("buffers").items():
        assert torch.equal(value, two["buffers"][name]), name
    two.pop("buffers")
    assert one == two


@pytest.mark.parametrize("save", SAVES)
def test_every_program_s_file(save: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, optimizer = begun(OPTIMIZERS["AdamW"])
    source = SAVES[save](model, optimizer, tmp_path)
    assert convert(source, tmp_path / "run") == 0
    assert "AdamW, param groups of [1, 3] parameters" in capsys.readouterr().out
    assert cli.main(["checkpoint", "verify", str(tmp_path / "run")]) == 0
    check(OPTIMIZERS["AdamW"], source, tmp_path / "run")


def check(make: Any, source: Path, run: Path, **options: Any) -> None:
    """Compare an engine that loads the new checkpoint with one that imports the source, and train both on."""
    engines = []
    for load in ("load_checkpoint", "import_checkpoint"):
        model, optimizer = fresh(make, seed=3)
        model.first.to(options.get("dtype", torch.float32))
        engine = offload.Engine(model, optimizer, **{**everything_on_device(), **options})
        getattr(engine, load)(source if load == "import_checkpoint" else run)
        engines.append(engine)
    one, two = engines
    with one, two:
        assert_same(everything(one), everything(two))
        assert one.optimizer is not None and two.optimizer is not None
        for a, b in zip(train(one, one.optimizer, range(3, 5)), train(two, two.optimizer, range(3, 5)), strict=True):
            assert torch.equal(a, b)
        assert one.digests() == two.digests()


def thawed_net() -> nn.Module:
    """Return a model that does not know what was frozen, as one that is made of a config."""
    return Net().requires_grad_()


def test_what_is_in_no_group_was_frozen(tmp_path: Path) -> None:
    source = save_dcp_by_name(*begun(OPTIMIZERS["AdamW"]), tmp_path)
    assert convert(source, tmp_path / "run", model=f"{__name__}:thawed_net") == 0
    check(OPTIMIZERS["AdamW"], source, tmp_path / "run")


@pytest.mark.parametrize("name", [name for name in OPTIMIZERS if name != "RMSprop"])
def test_every_optimizer_of_a_kernel(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    source = save_torch(*begun(make), tmp_path)
    assert convert(source, tmp_path / "run") == 0
    check(make, source, tmp_path / "run")


@pytest.mark.parametrize("case", ["zero1-bf16-x3", "zero2-fp16-x2", "zero3-bf16-x2", "zero3-fp32-x3"])
def test_zero(case: str, recorded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters, moments, counts and the loss scale; into homes on NVMe, from pieces that are cut within parameters."""
    monkeypatch.setitem(globals(), "CASE", case)
    monkeypatch.setattr("offload.converting.PIECE_NUMEL", 64)
    monkeypatch.setattr("offload.converting.FILE_BYTES", 512)
    assert convert(recorded / case, tmp_path / "run", model=f"{__name__}:zero_net") == 0
    assert len(list((tmp_path / "run" / "step-00000003").glob("tensors-*"))) > 1
    found = []
    for load in ("load_checkpoint", "import_checkpoint"):
        model = zero_net()
        adamw = offload.AdamW(zero.groups_of(model), lr=0.5)
        path = tmp_path / load
        path.mkdir()
        with offload.Engine(model, adamw, **nvme(model, path)) as engine:
            getattr(engine, load)(recorded / case if load == "import_checkpoint" else tmp_path / "run")
            found.append((everything(engine), engine.loss_scale))
    assert_same(found[0][0], found[1][0])
    assert found[0][1] == found[1][1] == (256.0 if "fp16" in case else 1.0)


def test_the_trainers_folder_of_a_model_of_transformers(tmp_path: Path) -> None:
    """By its config alone, in another dtype, with the trainer's two groups and its small facts."""
    model = llama()
    groups = [[p for p in model.parameters() if (p.ndim > 1) is yes] for yes in (True, False)]
    optimizer = torch.optim.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}], lr=1e-2)
    model(input_ids=torch.ones(1, 4, dtype=torch.long), labels=torch.ones(1, 4, dtype=torch.long)).loss.backward()
    optimizer.step()
    model.save_pretrained(tmp_path / "hf")
    torch.save(optimizer.state_dict(), tmp_path / "hf" / "optimizer.pt")
    torch.save({"last_epoch": 1}, tmp_path / "hf" / "scheduler.pt")
    torch.save({"cpu": torch.get_rng_state()}, tmp_path / "hf" / "rng_state.pth")
    (tmp_path / "hf" / "trainer_state.json").write_text('{"global_step": 1, "epoch": 0.5}')
    words = ["--dtype", "bfloat16", "--tag", "begin"]
    assert convert(tmp_path / "hf", tmp_path / "run", *words, model=str(tmp_path / "hf")) == 0
    engines = []
    for load in ("load_checkpoint", "import_checkpoint"):
        other = llama(seed=1).bfloat16()
        groups = [[p for p in other.parameters() if (p.ndim > 1) is yes] for yes in (True, False)]
        adamw = offload.AdamW([{"params": groups[0]}, {"params": groups[1], "weight_decay": 0.0}])
        engine = offload.Engine(other, adamw, **everything_on_device())
        given = getattr(engine, load)(tmp_path / "hf" if load == "import_checkpoint" else tmp_path / "run")
        engines.append((engine, given))
    (one, client), (two, _) = engines
    with one, two:
        assert_same(everything(one), everything(two))
    assert client["imported"]["scheduler"] == {"last_epoch": 1} and client["imported"]["epoch"] == 0.5
    assert client["imported"]["rng"]["cpu"].shape == torch.get_rng_state().shape


def test_loading_leaves_random_numbers_alone(tmp_path: Path) -> None:
    source = save_torch(*begun(OPTIMIZERS["AdamW"]), tmp_path)
    assert convert(source, tmp_path / "run") == 0
    model, optimizer = fresh(OPTIMIZERS["AdamW"])
    with offload.Engine(model, optimizer, **everything_on_device()) as engine:
        torch.manual_seed(1)
        truth = torch.rand(3)
        torch.manual_seed(1)
        engine.load_checkpoint(tmp_path / "run")
        assert torch.equal(torch.rand(3), truth)


def test_weights_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model, _ = begun(OPTIMIZERS["AdamW"])
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    assert convert(tmp_path / "weights.pt", tmp_path / "run") == 1
    assert "has weights alone; pass --weights-only" in capsys.readouterr().err
    assert convert(tmp_path / "weights.pt", tmp_path / "run", "--weights-only") == 0
    with offload.Engine(Net(5), None, **everything_on_device()) as engine:
        engine.load_checkpoint(tmp_path / "run")
        for name, value in engine.state_dict().items():
            assert torch.equal(value, model.state_dict()[name]), name


def test_a_large_tensor_is_read_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = nn.Linear(1024, 1025, bias=False)
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    most, read = [0], FileTensor.read

    def watched(self: FileTensor, start: int, stop: int) -> torch.Tensor:
        most.append(stop - start)
        return read(self, start, stop)

    monkeypatch.setattr(FileTensor, "read", watched)
    assert convert(tmp_path / "run.pt", tmp_path / "run", "--weights-only", model=f"{__name__}:wide_net") == 0
    assert 0 < max(most) <= PIECE_NUMEL < model.weight.numel()


def wide_net() -> nn.Module:
    return nn.Linear(1024, 1025, bias=False)


# --- what is refused --------------------------------------------------------------------------------------------------


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return save_torch(*begun(OPTIMIZERS["AdamW"]), tmp_path)


def refused(capsys: pytest.CaptureFixture[str], *arguments: Any, **options: Any) -> str:
    assert convert(*arguments, **options) == 1
    return capsys.readouterr().err


def left(directory: Path) -> list[str]:
    """Return what a refused import has left behind."""
    return sorted(path.name for path in directory.iterdir() if path.name != ".lock") if directory.exists() else []


def test_what_does_not_fit_is_refused_by_name(
    source: Path, recorded: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    (tmp_path / "empty").mkdir()
    assert "expected a checkpoint but there is nothing" in refused(capsys, tmp_path / "nowhere", run)
    assert "expected a file of torch.save, or a folder" in refused(capsys, tmp_path / "empty", run)
    cut = tmp_path / "cut.pt"
    cut.write_bytes(source.read_bytes()[:-1000])
    assert "cut.pt" in refused(capsys, cut, run)
    damaged = Path(shutil.copytree(recorded / "zero2-bf16-x2", tmp_path / "zero"))
    next(damaged.rglob("*rank_1_mp_rank_00_optim_states.pt")).unlink()
    assert "rank_1_mp_rank_00_optim_states.pt: expected the file of each of 2 ranks" in refused(
        capsys, damaged, run, model=f"{__name__}:zero_net"
    )
    other = tmp_path / "other"
    other.mkdir()
    rms = save_torch(*begun(OPTIMIZERS["RMSprop"]), other)
    assert "but got ['square_avg']; import it into an engine with that optimizer" in refused(capsys, rms, run)
    assert "expected an optimizer's states to be those of sgd" in refused(capsys, source, run, "--optimizer", "sgd")
    assert "expected the model's names" in refused(capsys, source, run, model=f"{__name__}:wide_net")
    assert "expected a folder with config.json" in refused(capsys, source, run, model=str(tmp_path / "nowhere"))
    assert "to have Nothing, which returns the model" in refused(capsys, source, run, model=f"{__name__}:Nothing")
    assert "tag: expected letters" in refused(capsys, source, run, "--tag", "../x")
    assert left(run) == []


def test_a_target_that_is_there_full_or_no_folder_is_refused(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    assert convert(source, run) == 0
    before = left(run)
    assert "step-00000003: is there already; name another --tag" in refused(capsys, source, run)
    assert convert(source, run, "--tag", "again") == 0
    (tmp_path / "file").write_text("")
    assert "cannot be written to" in refused(capsys, source, tmp_path / "file")
    real = os.statvfs

    class Full:
        f_bavail, f_frsize = 1, 512

    monkeypatch.setattr(os, "statvfs", lambda path: Full() if Path(path) == run else real(path))
    assert "but 512 bytes are free" in refused(capsys, source, run, "--tag", "third")
    assert left(run) == sorted([*before, "again"])


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Count the reads of files of tensors; number ``wanted[0]`` fails."""
    wanted, real = [-1, 0], os.preadv

    def preadv(*arguments: Any) -> int:
        wanted[1] += 1
        if wanted[1] == wanted[0]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*arguments)

    monkeypatch.setattr(os, "preadv", preadv)
    yield wanted


def test_every_read_of_a_conversion_may_fail(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], reads: list[int]
) -> None:
    assert convert(source, tmp_path / "whole") == 0
    total, run = reads[1], tmp_path / "run"
    assert total > 10
    for number in range(1, total + 1):
        reads[:] = [number, 0]
        assert "run.pt: cannot be read: [Errno 5]" in refused(capsys, source, run), number
        assert left(run) == []
    reads[:] = [-1, 0]
    assert convert(source, run) == 0


def test_every_read_of_an_import_may_fail(source: Path, tmp_path: Path, reads: list[int]) -> None:
    """The error names the file; what is half written is refused by name, until all of it is imported again."""
    model, optimizer = fresh(OPTIMIZERS["AdamW"], seed=3)
    with offload.Engine(model, optimizer, **nvme(model, tmp_path)) as engine:
        reads[1] = 0
        engine.import_checkpoint(source)
        total, truth = reads[1], engine.digests()
        assert total > 10
        half = 0
        for number in range(1, total + 1):
            reads[:] = [number, 0]
            with pytest.raises(offload.ConfigError, match=r"run.pt: cannot be read: \[Errno 5\]"):
                engine.import_checkpoint(source)
            reads[:] = [-1, 0]
            try:
                assert engine.digests() == truth, number  # the same values again
            except offload.StateError as error:
                assert "run.pt: cannot be read: [Errno 5]" in str(error) and "failed half way" in str(error)
                half += 1
                with pytest.raises(offload.StateError, match="repeat it, or load another checkpoint with strict=True"):
                    engine.import_checkpoint(source, strict=False)
            engine.import_checkpoint(source)
            assert engine.digests() == truth, number
        assert half
