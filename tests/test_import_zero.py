"""Checkpoints that DeepSpeed has written, loaded into an engine: its values, and its further steps."""

from __future__ import annotations

import dataclasses
import shutil
import tarfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from foreign.deepspeed_recorder import DECAY, DTYPES, LR, STEPS, Net, groups_of, loss_of
from harness import everything_on_device, host, nvme

import offload
from offload.checkpoint.foreign.inert import read_torch_file
from offload.checkpoint.foreign.opening import open_foreign
from offload.checkpoint.foreign.zero import read_zero
from offload.checkpoint.sources import numel_of
from offload.errors import ConfigError

RECORDED = Path(__file__).parent / "foreign" / "deepspeed.tar.xz"
CASES = [f"zero{stage}-{dtype}-x{n}" for stage in (1, 2, 3) for dtype in ("bf16", "fp32") for n in (1, 2, 3)]
CASES += [f"zero{stage}-fp16-x2" for stage in (1, 2, 3)]
# Three steps apart, as multiples of the learning rate. Gradients of 16-bit models have 8 or 11 bits: one that rounds to
# the other side, as a mean over ranks may, moves the moments. In fp32 only the update's own rounding differs, by a few
# 2^-24 of it.
TOLERANCE = {"bf16": 5e-3 * LR, "fp16": 5e-4 * LR, "fp32": 2e-5 * LR}
MOMENTS = {"bf16": 2**-8, "fp16": 2**-11, "fp32": 2**-20}  # of the largest one


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("deepspeed")
    with tarfile.open(RECORDED) as archive:
        archive.extractall(folder, filter="data")
    return folder


@pytest.fixture
def copy(recorded: Path, tmp_path: Path) -> Iterator[Path]:
    """One folder that a test may damage."""
    yield Path(shutil.copytree(recorded / "zero2-bf16-x2", tmp_path / "run"))


def net(case: str) -> Net:
    torch.manual_seed(5)  # other values than those that were saved
    model = Net().to(DTYPES[case.split("-")[1]])
    model.scale = model.scale.float()
    return model


def engine(case: str, options: dict[str, Any] | None = None) -> offload.Engine:
    model = net(case)
    return offload.Engine(model, offload.AdamW(groups_of(model), lr=0.5), **(options or everything_on_device()))


def tensors(of: offload.Engine) -> dict[str, torch.Tensor]:
    """Return masters, moments and weights by ``what:name``, flat, in fp32."""
    assert of.optimizer is not None
    packed, weights = of.optimizer.state_dict(), of.state_dict()
    name_of = {id(p): name for name, p in of.module.named_parameters()}
    names = [name_of[id(p)] for group in of.optimizer.param_groups for p in group["params"]]
    found = {f"weight:{name}": weights[name] for name in name_of.values()}
    for number, name in enumerate(names):
        state = packed["state"][number]
        found[f"master:{name}"] = state.get("master", weights[name])
        found |= {f"{key}:{name}": state[key] for key in ("exp_avg", "exp_avg_sq")}
    return {key: value.reshape(-1).float() for key, value in found.items()}


def steps(of: offload.Engine) -> set[float]:
    """Return the updates that parameters have had."""
    assert of.optimizer is not None
    return {float(state["step"]) for state in of.optimizer.state_dict()["state"].values()}


def expected(folder: Path, when: str) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    found = load_file(folder / "expected.safetensors")
    return {key.removeprefix(f"{when}:"): value.float() for key, value in found.items() if key.startswith(f"{when}:")}


@pytest.mark.parametrize("case", CASES)
def test_values_are_deepspeeds_and_further_steps_follow_it(case: str, recorded: Path) -> None:
    dtype = case.split("-")[1]
    with engine(case) as ours:
        assert ours.optimizer is not None
        facts = ours.import_checkpoint(recorded / case)
        assert (facts.global_step, facts.skipped_steps) == (STEPS, 0)
        assert facts.kind == f"DeepSpeed ZeRO-{case[4]} of {case[-1]} ranks"
        assert [(group["lr"], group["weight_decay"]) for group in ours.optimizer.param_groups] == [(LR, DECAY), (LR, 0)]
        assert ours.loss_scale == (256.0 if dtype == "fp16" else 1.0)
        got, truth = tensors(ours), expected(recorded / case, "before")
        assert got.keys() == truth.keys() and steps(ours) == {STEPS}
        for key, value in truth.items():
            assert torch.equal(got[key], value), key
        for number in range(STEPS, 2 * STEPS):
            ours.backward(loss_of(ours, number, DTYPES[dtype]))
            assert ours.step()
        got, truth = tensors(ours), expected(recorded / case, "after")
        assert steps(ours) == {2 * STEPS}
        for key, value in truth.items():
            kind = key.split(":")[0]
            if kind == "master":
                assert (got[key] - value).abs().max() <= TOLERANCE[dtype], key
            elif kind != "weight":
                assert (got[key] - value).abs().max() <= MOMENTS[dtype] * value.abs().max(), key


@pytest.mark.parametrize("home", ["host", "nvme"])
def test_every_placement_has_the_same_bits(home: str, recorded: Path, tmp_path: Path) -> None:
    case = "zero3-bf16-x3"
    model = net(case)
    options = host(model) if home == "host" else nvme(model, tmp_path)
    with engine(case) as device, engine(case, options) as other:
        for one in (device, other):
            one.import_checkpoint(recorded / case)
            one.backward(loss_of(one, STEPS, torch.bfloat16))
            one.step()
        assert device.digests() == other.digests()


def refuse(folder: Path, message: str, case: str = "zero2-bf16-x2", **more: Any) -> None:
    """Check that a folder is refused, and that the engine is as it was."""
    with engine(case) as ours:
        before = ours.digests()
        with pytest.raises(ConfigError, match=message):
            ours.import_checkpoint(folder, **more)
        assert ours.digests() == before
        assert ours.optimizer is not None and ours.optimizer.param_groups[0]["lr"] == 0.5


def test_a_missing_rank_is_named(copy: Path) -> None:
    missing = copy / "global_step3" / "bf16_zero_pp_rank_1_mp_rank_00_optim_states.pt"
    missing.unlink()
    refuse(copy, rf"{missing}: expected the file of each of 2 ranks")


def test_a_missing_rank_of_the_model_is_named(recorded: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(recorded / "zero3-bf16-x3", tmp_path / "run"))
    missing = folder / "global_step3" / "zero_pp_rank_2_mp_rank_00_model_states.pt"
    missing.unlink()
    refuse(folder, rf"{missing}: expected the file of each of 3 ranks")


@pytest.mark.parametrize("left", [0, 1, 100, 0.5, 0.99])
def test_a_file_that_was_cut_off_is_named(copy: Path, left: float) -> None:
    file = copy / "global_step3" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt"
    content = file.read_bytes()
    file.write_bytes(content[: left if isinstance(left, int) else int(len(content) * left)])
    refuse(copy, rf"{file}: expected a whole file of torch.save")


def test_a_tag_without_its_folder_is_named(copy: Path) -> None:
    (copy / "latest").write_text("global_step9", encoding="utf-8")
    refuse(copy, r"latest: expected the name of a folder beside it but got 'global_step9'")
    (copy / "latest").write_text("../run/global_step3", encoding="utf-8")
    refuse(copy, r"latest: expected the name of a folder beside it")


def test_a_tags_own_folder_is_taken(copy: Path) -> None:
    assert read_zero(copy / "global_step3").facts.global_step == STEPS


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("zero_pp_rank_0_mp_rank_01_optim_states.pt", "tensor parallelism .*; join it by DeepSpeed's ds_to_universal"),
        ("layer_00-model_states.pt", "pipeline or expert parallelism; put the weights of its layer_"),
        (
            "layer_0_expert_0_mp_rank_00_model_states.pt",
            "pipeline or expert parallelism; put the weights of its layer_",
        ),
    ],
)
def test_other_kinds_of_parallelism_are_refused(copy: Path, name: str, message: str) -> None:
    (copy / "global_step3" / name).write_bytes(b"")
    refuse(copy, message)


def test_a_run_without_zero_is_refused(copy: Path) -> None:
    for file in (copy / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    refuse(copy, r"expected \*_optim_states.pt of ZeRO-1, 2 or 3 but got none")


def test_an_optimizer_on_nvme_is_refused(recorded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepSpeed has its masters in raw files, and saves empty tensors."""

    def without_masters(path: Path) -> Any:
        content = read_torch_file(path)
        saved = content.get("optimizer_state_dict")
        if saved is None:
            return content
        empty = [dataclasses.replace(flat, shape=(0,), stride=(1,)) for flat in saved["fp32_flat_groups"]]
        return {**content, "optimizer_state_dict": {**saved, "fp32_flat_groups": empty}}

    monkeypatch.setattr("offload.checkpoint.foreign.zero.read_torch_file", without_masters)
    refuse(recorded / "zero3-bf16-x2", r"_optim_states.pt: .* an optimizer on NVMe; .*16bit_model", "zero3-bf16-x2")


def test_a_universal_checkpoint_is_refused(copy: Path) -> None:
    """What DeepSpeed's ds_to_universal.py makes of a folder: models' files, and one per parameter and state."""
    for file in (copy / "global_step3").glob("*optim_states.pt"):
        file.unlink()
    (copy / "global_step3" / "zero").mkdir()
    refuse(copy, "but got a universal checkpoint; import the folder that it was made of")


def test_another_optimizer_is_refused(recorded: Path) -> None:
    model = net("zero1-fp32-x2")
    for optimizer in (offload.SGD(groups_of(model), lr=0.1, momentum=0.9), offload.Lion(groups_of(model), lr=0.1)):
        with offload.Engine(model, optimizer, **everything_on_device()) as ours:
            before = ours.digests()
            with pytest.raises(ConfigError, match=r"but got \['exp_avg', 'exp_avg_sq'\]; make the engine with the opt"):
                ours.import_checkpoint(recorded / "zero1-fp32-x2")
            assert ours.digests() == before


def test_other_groups_are_refused_unless_they_are_finer(recorded: Path) -> None:
    model = net("zero1-fp32-x2")
    with offload.Engine(model, offload.AdamW(lr=0.1), **everything_on_device()) as ours:
        with pytest.raises(ConfigError, match="param group 0 to be the same for all of its parameters but got several"):
            ours.import_checkpoint(recorded / "zero1-fp32-x2")
    model = net("zero1-fp32-x2")
    finer = [{"params": [p]} for group in groups_of(model) for p in group["params"]]
    with offload.Engine(model, offload.AdamW(finer, lr=0.1), **everything_on_device()) as ours:
        ours.import_checkpoint(recorded / "zero1-fp32-x2")
        assert ours.optimizer is not None
        assert {group["weight_decay"] for group in ours.optimizer.param_groups} == {DECAY, 0.0}


def test_the_reader_needs_no_engine(recorded: Path) -> None:
    """Any range of any tensor, as a conversion to another format reads it."""
    for case in ("zero1-bf16-x3", "zero3-bf16-x3"):
        found, truth = open_foreign(recorded / case), expected(recorded / case, "before")
        for name, master in found.masters.items():
            numel = numel_of(master)
            for begin in range(0, numel, 7):
                for end in {begin, begin + 1, (begin + numel) // 2, numel}:
                    assert torch.equal(master.read(begin, end), truth[f"master:{name}"][begin:end])
