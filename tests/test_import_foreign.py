"""Checkpoints that torch, its DCP and the Hugging Face trainer have written, loaded into an engine."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import tarfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from harness import WIDTH, everything_on_device, host, loss_of, nvme
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import offload
from offload.checkpoint.foreign.opening import open_foreign
from offload.errors import ConfigError, StateError
from swap import Fault, FaultTarget, SwapError

STEPS = 3


class Net(nn.Module):
    """Tied and frozen parameters, and buffers that are saved and not."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(WIDTH, WIDTH)
        self.frozen = nn.Linear(WIDTH, WIDTH)
        self.norm = nn.LayerNorm(WIDTH)
        self.last = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last.weight = self.first.weight
        self.frozen.requires_grad_(False)
        self.register_buffer("scale", torch.full((), 0.5 + seed))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.norm(self.frozen(self.first(x).tanh()))) * self.scale
        return out


Make = Callable[[Any], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "AdamW": lambda params: torch.optim.AdamW(params, lr=1e-3, weight_decay=0.1, betas=(0.8, 0.99)),
    "Adam": lambda params: torch.optim.Adam(params, lr=1e-3, weight_decay=0.01),
    "SGD": lambda params: torch.optim.SGD(params, lr=1e-2, momentum=0.9, nesterov=True),
    "SGD without momentum": lambda params: torch.optim.SGD(params, lr=1e-2),
    "Adagrad": lambda params: torch.optim.Adagrad(params, lr=1e-2),
    "RMSprop": lambda params: torch.optim.RMSprop(params, lr=1e-3),  # steps itself: torch's own bits
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    trained = [p for p in model.parameters() if p.requires_grad]
    return [
        {"params": [p for p in trained if p.ndim > 1]},
        {"params": [p for p in trained if p.ndim == 1], "eps": 1e-6},
    ]


def train(forward: Any, optimizer: torch.optim.Optimizer, numbers: range) -> list[torch.Tensor]:
    losses = []
    for number in numbers:
        loss = loss_of(forward, number)
        loss.backward()
        losses.append(loss.detach().clone())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def begun(make: Make) -> tuple[Net, torch.optim.Optimizer]:
    """Return a run in plain PyTorch after some steps, at a learning rate that its optimizer was not made with."""
    model = Net()
    optimizer = make(groups_of(model))
    train(model, optimizer, range(STEPS))
    for group in optimizer.param_groups:
        group["lr"] *= 0.5
    return model, optimizer


def fresh(make: Make, seed: int = 7) -> tuple[Net, torch.optim.Optimizer]:
    model = Net(seed)
    return model, make(groups_of(model))


def state_of(engine: offload.Engine) -> tuple[dict[str, torch.Tensor], dict[int, dict[str, Any]]]:
    assert engine.optimizer is not None
    return engine.state_dict(), engine.optimizer.state_dict()["state"]


def save_torch(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2, "global_step": STEPS}
    torch.save(content, path / "run.pt")
    return path / "run.pt"


def save_beside_tensors(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """Save a loss, a step and random numbers as tensors beside the dicts, as nanoGPT and torch's tutorial do."""
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2}
    beside = {"global_step": torch.tensor(STEPS), "best_val_loss": torch.tensor(0.5), "rng": torch.get_rng_state()}
    torch.save(content | beside, path / "ckpt.pt")
    return path / "ckpt.pt"


def save_beside_a_model_of_before(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """With weights of another time under a usual name, in a dict beside the model, which has an unusual name."""
    best = {"model": {name: value * 2 for name, value in model.state_dict().items()}, "epoch": 1}
    content = {"network": model.state_dict(), "best": best, "optimizer": optimizer.state_dict()}
    torch.save({**content, "epoch": 2, "global_step": STEPS}, path / "run.pt")
    return path / "run.pt"


def save_weights_at_the_top(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """Save the model's tensors beside the optimizer's dict, as torchtitan does, with small tensors in another dict."""
    content = {**model.state_dict(), "optimizer": optimizer.state_dict(), "train_state": {"seen": torch.ones(1)}}
    torch.save(content | {"global_step": STEPS, "epoch": 2}, path / "titan.pt")
    return path / "titan.pt"


def save_lightning(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    state = {f"model.{name}": value for name, value in model.state_dict().items()}
    content = {"state_dict": state, "optimizer_states": [optimizer.state_dict()], "epoch": 2, "global_step": STEPS}
    torch.save(content, path / "run.ckpt")
    return path / "run.ckpt"


def save_dcp(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    import torch.distributed.checkpoint as dcp

    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": 2, "global_step": STEPS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save(content, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def save_dcp_by_name(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, *, flat: bool = False) -> Path:
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict

    weights, states = get_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=flat))
    content = {"model": weights, "optim": states, "epoch": 2, "global_step": STEPS}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(content, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def save_dcp_app(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """Save both in one object with state, as PyTorch's own recipe for DCP does."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import get_state_dict
    from torch.distributed.checkpoint.stateful import Stateful

    class AppState(Stateful):
        def state_dict(self) -> dict[str, Any]:
            weights, states = get_state_dict(model, optimizer)
            return {"model": weights, "optim": states}

        def load_state_dict(self, state_dict: dict[str, Any]) -> None:
            raise NotImplementedError

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        content = {"app": AppState(), "epoch": 2, "global_step": STEPS}
        dcp.save(content, checkpoint_id=path / "dcp", no_dist=True)
    return path / "dcp"


def save_trainer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    """Write the files of the Hugging Face trainer; the test below has it write them itself."""
    from safetensors.torch import save_file

    weights = {name: value.clone() for name, value in model.state_dict().items() if name != "last.weight"}
    save_file(weights, str(path / "model.safetensors"))
    torch.save(optimizer.state_dict(), path / "optimizer.pt")
    (path / "trainer_state.json").write_text(json.dumps({"global_step": STEPS, "epoch": 2.0}), encoding="utf-8")
    return path


SAVES: dict[str, Callable[[nn.Module, torch.optim.Optimizer, Path], Path]] = {
    "torch.save": save_torch,
    "torch.save, tensors beside": save_beside_tensors,
    "torch.save, a model of before beside": save_beside_a_model_of_before,
    "torch.save, weights at the top": save_weights_at_the_top,
    "Lightning": save_lightning,
    "DCP": save_dcp,
    "DCP by name": save_dcp_by_name,
    "DCP by name, flat": lambda *args: save_dcp_by_name(*args, flat=True),
    "DCP by PyTorch's recipe": save_dcp_app,
    "trainer": save_trainer,
}


def check_goes_on(make: Make, saved: Path, model: Net, optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Check that an engine has what was saved, and takes the steps that it takes where it has had it all along."""
    ours, theirs = fresh(make)
    same = Net()
    same.load_state_dict(model.state_dict())
    other = make(groups_of(same))
    other.load_state_dict(optimizer.state_dict())
    with offload.Engine(ours, theirs, **options) as engine, offload.Engine(same, other, **options) as truth:
        assert engine.optimizer is not None and truth.optimizer is not None
        facts = engine.import_checkpoint(saved)
        assert (facts.global_step, facts.epoch) == (STEPS, 2)
        for name, value in model.state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name
        states = engine.optimizer.state_dict()["state"]
        for number, state in optimizer.state_dict()["state"].items():
            for key, value in state.items():
                if value is not None:
                    assert torch.equal(torch.as_tensor(states[number][key]), torch.as_tensor(value)), (number, key)
        for group, saved_group in zip(engine.optimizer.param_groups, optimizer.param_groups, strict=True):
            assert {**group, "params": 0} == {**saved_group, "params": 0}
        numbers = range(STEPS, 2 * STEPS)
        losses = train(engine, engine.optimizer, numbers)
        assert all(map(torch.equal, losses, train(truth, truth.optimizer, numbers)))
        assert engine.digests() == truth.digests()
    plain = train(model, optimizer, numbers)  # a kernel's rounding is not torch's: the losses agree
    for one, two in zip(losses, plain, strict=True):
        assert torch.allclose(one, two, rtol=1e-5)
    if make is OPTIMIZERS["RMSprop"]:
        assert all(map(torch.equal, losses, plain))


@pytest.mark.parametrize("save", SAVES)
def test_every_program_s_file_goes_on(save: str, tmp_path: Path) -> None:
    model, optimizer = begun(OPTIMIZERS["AdamW"])
    check_goes_on(
        OPTIMIZERS["AdamW"], SAVES[save](model, optimizer, tmp_path), model, optimizer, **everything_on_device()
    )


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_every_optimizer_goes_on(name: str, tmp_path: Path) -> None:
    make = OPTIMIZERS[name]
    model, optimizer = begun(make)
    check_goes_on(make, save_torch(model, optimizer, tmp_path), model, optimizer, **everything_on_device())


@pytest.mark.parametrize("home", ["host", "nvme"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_home_and_dtype_has_the_same_bits(home: str, dtype: str, tmp_path: Path) -> None:
    """An fp32 run goes on in 16 bits with its weights as masters; where the bytes live does not matter."""
    model, optimizer = begun(OPTIMIZERS["AdamW"])
    saved = save_torch(model, optimizer, tmp_path)
    one, two = fresh(OPTIMIZERS["AdamW"]), fresh(OPTIMIZERS["AdamW"])
    options = host(two[0]) if home == "host" else nvme(two[0], tmp_path, dtype=dtype)
    everywhere = {**everything_on_device(), "dtype": dtype}
    with offload.Engine(*one, **everywhere) as first, offload.Engine(*two, **{**options, "dtype": dtype}) as other:
        for engine in (first, other):
            engine.import_checkpoint(saved)
        assert first.digests() == other.digests()
        assert first.optimizer is not None
        if dtype != "float32":
            packed = first.optimizer.state_dict()["state"]
            assert torch.equal(packed[0]["master"], model.first.weight)


def test_values_of_16_bits_are_their_own_masters(tmp_path: Path) -> None:
    """Also where the engine's parameter has the same 16 bits, but a master with more."""
    model = Net().bfloat16()
    optimizer = torch.optim.AdamW(groups_of(model), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) if parameter.requires_grad else None
    optimizer.step()
    saved = save_torch(model, optimizer, tmp_path)
    other = Net()
    with torch.no_grad():
        for mine, theirs in zip(other.parameters(), model.parameters(), strict=True):
            mine.copy_(theirs.float() * (1 + 2**-12))
    spec = offload.AdamW(groups_of(other))
    with offload.Engine(other, spec, **everything_on_device(), dtype="bfloat16") as engine:
        assert engine.optimizer is not None
        engine.import_checkpoint(saved)
        packed = engine.optimizer.state_dict()
        masters = [s.get("master") for s in packed["state"].values()] + list(packed.get("masters", {}).values())
        assert all(master is None or torch.equal(master, master.bfloat16().float()) for master in masters)
        assert torch.equal(engine.state_dict()["norm.weight"], model.norm.weight)


def make_engine(**options: Any) -> offload.Engine:
    model, optimizer = fresh(OPTIMIZERS["AdamW"])
    return offload.Engine(model, optimizer, **everything_on_device(), **options)


def edited(path: Path, **changes: Callable[[Any], Any]) -> Path:
    """Save a run of AdamW with some of its parts changed."""
    model, optimizer = begun(OPTIMIZERS["AdamW"])
    content = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    for name, change in changes.items():
        content[name] = change(content[name])
    torch.save(content, path / "run.pt")
    return path / "run.pt"


REFUSED: dict[str, tuple[dict[str, Callable[[Any], Any]], str]] = {
    "missing": (
        {"model": lambda state: {k: v for k, v in state.items() if k != "norm.weight"}},
        r"\['norm.weight'\] are missing, unexpected \[\]; .* strict=False",
    ),
    "unexpected": (
        {"model": lambda state: {**state, "more": torch.ones(1)}},
        r"\[\] are missing, unexpected \['more'\]",
    ),
    "shape": (
        {"model": lambda state: {**state, "norm.weight": torch.ones(3)}},
        r"expected shapes norm.weight: \(32,\) but got \(3,\); make the model as it was saved",
    ),
    "buffer": ({"model": lambda state: {**state, "scale": torch.ones(3)}}, r"scale: \(\) but got \(3,\)"),
    "untied": (
        {"model": lambda state: {**state, "last.weight": state["last.weight"] + 1}},
        "expected one value for first.weight and last.weight, which the model ties",
    ),
    "groups": (
        {"optimizer": lambda o: {**o, "param_groups": o["param_groups"][:1]}},
        r"expected param groups of \[1, 3\] parameters but got \[1\]",
    ),
    "options": (
        {"optimizer": lambda o: {**o, "param_groups": [{**g, "amsgrad": True} for g in o["param_groups"]]}},
        "expected amsgrad=False",
    ),
    "a state's shape": (
        {"optimizer": lambda o: {**o, "state": {0: {**o["state"][0], "exp_avg": torch.ones(3)}}}},
        r"expected exp_avg of first.weight in shape \(32, 32\) but got \(3,\)",
    ),
    "a state more": (
        {"optimizer": lambda o: {**o, "state": {0: {**o["state"][0], "max_exp_avg_sq": torch.ones(32, 32)}}}},
        r"expected the states \['exp_avg', 'exp_avg_sq'\] of first.weight but got",
    ),
    "a state less": (
        {"optimizer": lambda o: {**o, "state": {0: {"step": 1, "exp_avg": torch.ones(32, 32)}}}},
        r"expected the states \['exp_avg', 'exp_avg_sq'\] of first.weight but got \['exp_avg'\]",
    ),
    "a step that is none": (
        {"optimizer": lambda o: {**o, "state": {0: {**o["state"][0], "step": 1.5}}}},
        "first.weight: expected step as a whole number",
    ),
    "Adam's decay": (
        {
            "optimizer": lambda o: {
                **o,
                "param_groups": [{**g, "decoupled_weight_decay": False} for g in o["param_groups"]],
            }
        },
        "of AdamW, but got Adam with weight_decay=0.1; make the engine with offload.Adam",
    ),
    "weights alone": ({"optimizer": lambda o: 1}, "expected an optimizer's state but it has weights alone"),
    "no model": (
        {"model": lambda state: 1},
        r"expected a model's state dict but got the keys \['model', 'optimizer'\]",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused_and_changes_nothing(case: str, tmp_path: Path) -> None:
    changes, message = REFUSED[case]
    saved = edited(tmp_path, **changes)
    with make_engine() as engine:
        assert engine.optimizer is not None
        before, options = engine.digests(), [dict(group) for group in engine.optimizer.param_groups]
        with pytest.raises(ConfigError, match=message):
            engine.import_checkpoint(saved)
        assert engine.digests() == before
        assert [dict(group) for group in engine.optimizer.param_groups] == options


def test_parameters_in_use_are_refused_before_anything_changes(tmp_path: Path) -> None:
    saved = edited(tmp_path)
    with make_engine() as engine:
        before = engine.digests()
        with engine.gather(engine.module.frozen.weight), pytest.raises(StateError):
            engine.import_checkpoint(saved)
        assert engine.digests() == before


@pytest.mark.few
@pytest.mark.parametrize("name", ["AdamW", "SGD", "RMSprop"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_an_import_that_the_drive_has_ended_is_repeated(name: str, dtype: str, tmp_path: Path) -> None:
    """Any one read or write of the swap files may fail: nobody sees the half, and the next import has all of it."""
    saved = save_torch(*begun(OPTIMIZERS[name]), tmp_path)
    model, optimizer = fresh(OPTIMIZERS[name])
    with offload.Engine(model, optimizer, **nvme(model, tmp_path, dtype=dtype)) as engine:
        assert engine._manager is not None and engine._manager.tiers.store is not None
        store, half = engine._manager.tiers.store, 0
        engine.import_checkpoint(saved)
        truth = engine.digests()
        for target in (FaultTarget.READS, FaultTarget.WRITES):
            for nth in range(1, 100):
                engine.drain()
                store.inject(Fault(nth=nth, target=target))
                failed = True
                try:
                    engine.import_checkpoint(saved)
                    failed = False
                except SwapError as error:
                    assert error.errno == errno.EIO
                store.clear_faults()
                if failed:
                    half += engine._life.unusable is not None
                    with contextlib.suppress(StateError):
                        assert engine.digests() == truth  # nothing was written: they are the same values
                    engine.import_checkpoint(saved)
                engine._manager.check()
                assert engine.digests() == truth, (target, nth)
                if not failed:
                    break
        assert half > 2
        if dtype == "float32":
            engine.backward(loss_of(engine, 0))
            engine.step()


def test_strict_false_takes_what_fits_and_names_the_rest(tmp_path: Path) -> None:
    saved = edited(tmp_path, model=lambda state: {"norm.weight": state["norm.weight"], "more": torch.ones(1)})
    with make_engine() as engine:
        before = engine.state_dict()
        with pytest.warns(UserWarning, match=r"lacks 6 of .*: \['first.bias', .*; 1 others .*: \['more'\]"):
            engine.import_checkpoint(saved, strict=False)
        after = engine.state_dict()
        changed = {name for name in after if not torch.equal(before[name], after[name])}
        assert changed == {"norm.weight"}


def test_strict_false_names_states_that_it_leaves_out(tmp_path: Path) -> None:
    saved = SAVES["DCP by name"](*begun(OPTIMIZERS["AdamW"]), tmp_path)
    model = Net(7)
    model.norm.bias.requires_grad_(False)
    with offload.Engine(model, offload.AdamW(groups_of(model)), **everything_on_device()) as engine:
        with pytest.warns(UserWarning, match=r"states of 1 parameters .* left out: \['norm.bias'\]"):
            engine.import_checkpoint(saved, strict=False)


@pytest.mark.parametrize("strict", [True, False])
def test_a_checkpoint_of_which_no_name_fits_is_refused(strict: bool, tmp_path: Path) -> None:
    """Also with ``strict=False``, which the error does not advise: training would go on from the model's own values."""
    saved = edited(tmp_path, model=lambda state: {f"net.{name}": value for name, value in state.items()})
    with make_engine() as engine:
        before = engine.digests()
        with pytest.raises(ConfigError, match=r"unexpected \['net.* make the model as it was saved: no name fits$"):
            engine.import_checkpoint(saved, strict=strict)
        assert engine.digests() == before


def test_weights_alone_keep_the_optimizers_state(tmp_path: Path) -> None:
    model, _ = begun(OPTIMIZERS["AdamW"])
    torch.save(model.state_dict(), tmp_path / "weights.pt")
    with make_engine() as engine:
        assert engine.optimizer is not None
        train(engine, engine.optimizer, range(1))
        with pytest.warns(UserWarning, match="weights.pt has weights alone; the optimizer's state stays as it is"):
            engine.import_checkpoint(tmp_path / "weights.pt", strict=False)
        assert torch.equal(engine.state_dict()["first.weight"], model.first.weight)
        assert engine.optimizer.state_dict()["state"][0]["step"] == 1


def test_an_engine_that_only_evaluates_takes_weights(tmp_path: Path) -> None:
    saved = edited(tmp_path)
    model, _ = begun(OPTIMIZERS["AdamW"])
    with offload.Engine(Net(7), **everything_on_device()) as engine:
        engine.import_checkpoint(saved)
        assert torch.equal(engine.state_dict()["first.weight"], model.first.weight)


def test_a_wrappers_prefix_is_left_out(tmp_path: Path) -> None:
    saved = edited(tmp_path, model=lambda state: {f"module.{name}": value for name, value in state.items()})
    with make_engine() as engine:
        engine.import_checkpoint(saved)
        assert torch.equal(engine.state_dict()["first.weight"], begun(OPTIMIZERS["AdamW"])[0].first.weight)


def test_names_are_needed_only_where_the_file_has_none(tmp_path: Path) -> None:
    saved = edited(tmp_path)
    with pytest.raises(ConfigError, match=r"expected names of the optimizer's parameters, which it numbers"):
        open_foreign(saved)
    model = Net()
    optimizer = torch.optim.AdamW([(name, p) for name, p in model.named_parameters() if p.requires_grad], lr=1e-3)
    train(model, optimizer, range(1))
    found = open_foreign(save_torch(model, optimizer, tmp_path))
    assert found.groups[0].names == ("first.weight", "first.bias", "norm.weight", "norm.bias")
    assert torch.equal(
        found.states["norm.bias"]["exp_avg"].read(3, 5), optimizer.state[model.norm.bias]["exp_avg"][3:5]
    )


def test_a_cut_or_missing_file_of_dcp_is_named(tmp_path: Path) -> None:
    folder = save_dcp(*begun(OPTIMIZERS["AdamW"]), tmp_path)
    file = next(folder.glob("*.distcp"))
    with make_engine() as engine:
        os.truncate(file, file.stat().st_size - 1)
        with pytest.raises(ConfigError, match=rf"{file}: expected \d+ bytes but got \d+; it was cut off"):
            engine.import_checkpoint(folder)
        file.unlink()
        with pytest.raises(ConfigError, match=rf"{file}: expected the file of a rank but it is missing"):
            engine.import_checkpoint(folder)


def test_what_fsdp_has_saved_on_two_ranks_goes_on(tmp_path: Path) -> None:
    from foreign.dcp_recorder import Net as Sharded

    with tarfile.open(Path(__file__).parent / "foreign" / "fsdp.tar.xz") as archive:
        archive.extractall(tmp_path, filter="data")
    model = Sharded()
    with offload.Engine(model, offload.AdamW(), **everything_on_device()) as engine:
        assert engine.optimizer is not None
        facts = engine.import_checkpoint(tmp_path / "run")
        assert facts.kind == "torch.distributed.checkpoint"
        truth = torch.load(tmp_path / "expected.pt", weights_only=True)
        weights, states = state_of(engine)
        for number, (name, weight) in enumerate(truth["model"].items()):
            assert torch.equal(weights[name], weight)
            for key, value in truth["optim"]["state"][name].items():
                assert torch.equal(states[number][key], value), (name, key)
        assert engine.optimizer.param_groups[0]["lr"] == 1e-2


@given(rows=st.integers(1, 5), columns=st.integers(1, 5), data=st.data())
def test_boxes_of_several_ranks_are_one_tensor(rows: int, columns: int, data: st.DataObject) -> None:
    """A tensor that is cut along both dimensions, as sharding and tensor parallelism cut it."""
    from offload.checkpoint.foreign.dcp import Boxes, _Box

    class Held:
        def __init__(self, values: torch.Tensor) -> None:
            self.flat, self.shape = values.reshape(-1), tuple(values.shape)

        def read(self, start: int, stop: int) -> torch.Tensor:
            return self.flat[start:stop]

    truth = torch.randn(rows, columns, 2)
    at = [data.draw(st.integers(0, rows)), data.draw(st.integers(0, columns))]
    boxes = [
        _Box((first, second, 0), Held(truth[first:one, second:two]))  # type: ignore[arg-type]
        for first, one in ((0, at[0]), (at[0], rows))
        for second, two in ((0, at[1]), (at[1], columns))
        if first < one and second < two
    ]
    begin = data.draw(st.integers(0, truth.numel()))
    end = data.draw(st.integers(begin, truth.numel()))
    found = Boxes(tuple(truth.shape), torch.float32, tuple(boxes)).read(begin, end)
    assert torch.equal(found, truth.view(-1)[begin:end])


def test_an_empty_or_unknown_folder_says_what_is_known(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("hello", encoding="utf-8")
    with pytest.raises(
        ConfigError, match=r"\.metadata\) but got \['notes.txt'\]; pass the folder that has these files"
    ):
        open_foreign(tmp_path)
    with pytest.raises(ConfigError, match="expected a checkpoint but there is nothing"):
        open_foreign(tmp_path / "nothing")


def llama(seed: int = 0) -> Any:
    """Return a tiny model of transformers, its embedding tied."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=64,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=2,
            tie_word_embeddings=True,
            architectures=["LlamaForCausalLM"],
        )
    )


def test_what_the_trainer_itself_has_saved_goes_on(tmp_path: Path) -> None:
    """Two groups, fused weights in several files, schedules and random numbers."""
    from transformers import Trainer, TrainingArguments

    model = llama()
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(0, 64, (16, 8))]
    arguments = TrainingArguments(
        output_dir=str(tmp_path),
        per_device_train_batch_size=4,
        max_steps=3,
        save_steps=3,
        report_to=[],
        use_cpu=True,
        learning_rate=1e-2,
        disable_tqdm=True,
    )
    trainer = Trainer(model=model, args=arguments, train_dataset=rows)
    trainer.train()
    other = llama(seed=1)
    decayed = set(trainer.get_decay_parameter_names(other))
    named = list(other.named_parameters())
    groups = [
        {"params": [p for name, p in named if name in decayed], "weight_decay": 0.0},
        {"params": [p for name, p in named if name not in decayed], "weight_decay": 0.0},
    ]
    with offload.Engine(other, offload.AdamW(groups), **everything_on_device()) as engine:
        assert engine.optimizer is not None
        facts = engine.import_checkpoint(tmp_path / "checkpoint-3")
        assert (facts.kind, facts.global_step) == ("transformers.Trainer", 3)
        assert facts.scheduler["last_epoch"] == 3 and np.asarray(facts.rng["numpy"][1]).shape == (624,)
        for name, value in model.state_dict().items():
            assert torch.equal(engine.state_dict()[name], value), name
        states = engine.optimizer.state_dict()["state"]
        for number, state in trainer.optimizer.state_dict()["state"].items():
            for key, value in state.items():
                assert torch.equal(states[number][key], value)


def test_what_accelerate_has_saved_goes_on(tmp_path: Path) -> None:
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True)
    model = Net()
    prepared = accelerator.prepare(model, torch.optim.AdamW(groups_of(model), lr=1e-3))
    schedule = accelerator.prepare(torch.optim.lr_scheduler.StepLR(prepared[1], 1))
    train(*prepared, range(STEPS))
    accelerator.save_state(str(tmp_path))
    with make_engine() as engine:
        facts = engine.import_checkpoint(tmp_path)
        assert facts.kind == "Accelerate" and facts.scheduler == schedule.state_dict()
        weights, states = state_of(engine)
        assert torch.equal(weights["norm.weight"], model.norm.weight)
        assert torch.equal(states[0]["exp_avg"], prepared[1].state_dict()["state"][0]["exp_avg"])


def test_one_of_several_models_is_not_chosen(tmp_path: Path) -> None:
    """Accelerate numbers those of two networks that train together."""
    model, optimizer = begun(OPTIMIZERS["AdamW"])
    save_trainer(model, optimizer, tmp_path)
    for name in ("model_1.safetensors", "optimizer_1.bin"):
        (tmp_path / name).write_bytes(b"")
        with pytest.raises(
            ConfigError, match=f"expected one model and one optimizer but got {name}, too; put the files"
        ):
            open_foreign(tmp_path)
        (tmp_path / name).unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model_fsdp.bin")
    (tmp_path / "model.safetensors").unlink()
    with make_engine() as engine:  # as FSDP has it in one file
        engine.import_checkpoint(tmp_path)
        assert torch.equal(engine.state_dict()["norm.weight"], model.norm.weight)


def test_adapters_alone_are_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "trainer_state.json").write_text("{}", encoding="utf-8")
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"got adapters of PEFT alone; .* PeftModel\.from_pretrained"):
        open_foreign(tmp_path)


def test_shards_of_fsdp_are_refused_and_the_remedy_is_true(tmp_path: Path) -> None:
    """The trainer and Accelerate write two folders of torch.distributed.checkpoint."""
    import torch.distributed.checkpoint as dcp

    model, _ = begun(OPTIMIZERS["AdamW"])
    shards = tmp_path / "pytorch_model_fsdp_0"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of one process
        dcp.save({"model": model.state_dict()}, checkpoint_id=shards, no_dist=True)
    with make_engine() as engine:
        with pytest.raises(ConfigError, match=rf"got shards of FSDP; import {shards} with strict=False"):
            engine.import_checkpoint(tmp_path)
        with pytest.warns(UserWarning, match="has weights alone"):
            engine.import_checkpoint(shards, strict=False)
        assert torch.equal(engine.state_dict()["norm.weight"], model.norm.weight)


def test_a_large_tensor_is_never_in_memory_as_a_whole(tmp_path: Path) -> None:
    """What is read at once does not grow with the tensor."""
    from offload.checkpoint.foreign.files import FileTensor
    from offload.checkpoint.sources import PIECE_NUMEL

    model = nn.Linear(2048, 1025, bias=False)
    torch.save({"model": model.state_dict()}, tmp_path / "run.pt")
    most = 0
    read = FileTensor.read

    def watched(self: FileTensor, start: int, stop: int) -> torch.Tensor:
        nonlocal most
        most = max(most, stop - start)
        return read(self, start, stop)

    with (
        pytest.MonkeyPatch.context() as patch,
        offload.Engine(nn.Linear(2048, 1025, bias=False), device="cpu") as engine,
    ):
        patch.setattr(FileTensor, "read", watched)
        engine.import_checkpoint(tmp_path / "run.pt")
        assert torch.equal(engine.state_dict()["weight"], model.weight)
    assert 0 < most <= PIECE_NUMEL < model.weight.numel()
