"""The door of Lightning: what a module logs is what it logs without an engine, whole and resumed."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fsspec
import lightning
import pytest
import torch
from harness import host, nvme
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO
from torch import nn
from trainers import (
    Log,
    adam,
    assert_close,
    calls_of_handles,
    lightning_module,
    lightning_trainer,
    loader,
    model,
    rows,
)

from offload.errors import CheckpointError, ConfigError
from offload.integrations import lightning as door_of_lightning
from offload.integrations.lightning import FORMER, NEW, OffloadStrategy

pytestmark = [pytest.mark.usefixtures("single_torch_thread"), pytest.mark.filterwarnings("ignore")]


def scheduled(core: nn.Module) -> Any:
    optimizer = adam(core)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


def strategy(place: Callable[..., dict[str, Any]], path: Path, **more: Any) -> OffloadStrategy:
    options = place(model(), path) if place is nvme else place(model())
    del options["device"]
    return OffloadStrategy(options, **more)


def keep(path: Path, **more: Any) -> ModelCheckpoint:
    return ModelCheckpoint(dirpath=path / "kept", save_top_k=-1, filename="{step}", **more)


def fit(
    path: Path, door: OffloadStrategy | None = None, *, ckpt_path: str | None = None, batches: int = 10, **more: Any
) -> tuple[Any, Log]:
    """Train a fresh model; returns the trainer and what was logged."""
    log = Log()
    make = more.pop("make", scheduled)
    trainer = lightning_trainer(path, **({} if door is None else {"strategy": door}), **more)
    trainer.fit(lightning_module(model(), make, log), loader(2 * batches), ckpt_path=ckpt_path)
    return trainer, log


NIGHTLY = pytest.mark.nightly
CLIPS: dict[str, dict[str, Any]] = {
    "by norm": {"gradient_clip_val": 0.1},
    "by value": {"gradient_clip_val": 1e-3, "gradient_clip_algorithm": "value"},
    "accumulates": {"accumulate_grad_batches": 3, "gradient_clip_val": 0.5},
    "mixed": {"precision": "bf16-mixed"},
}


@pytest.mark.few(2)
@pytest.mark.parametrize("steps", [8, pytest.param(20, marks=NIGHTLY)])
@pytest.mark.parametrize("name", [name if name != "mixed" else pytest.param(name, marks=NIGHTLY) for name in CLIPS])
def test_fits_as_without(name: str, steps: int, tmp_path: Path) -> None:
    """Two epochs. Where three batches are a step, the last one of an epoch has one."""
    more, middle = {**CLIPS[name], "max_steps": steps}, f"step={steps // 2}.ckpt"
    more["batches"] = 3 * (steps // 2) - 2 if "accumulate_grad_batches" in more else steps // 2

    def both(path: Path, place: Callable[..., dict[str, Any]] | None) -> tuple[Log, Log, Any]:
        """Return what a run and the rest of it from its middle have logged, and the digests at the end."""
        logs, digests = [], None
        for resume in (None, str(path / "kept" / middle)):
            door = None if place is None else strategy(place, tmp_path)
            saves = {"callbacks": [keep(path, save_on_train_epoch_end=True)], "enable_checkpointing": True}
            trainer, log = fit(path, door, ckpt_path=resume, **more, **({} if resume else saves))
            logs.append(log)
            if door is not None:
                with door.engine as engine:
                    assert engine.stats().step == steps
                    digests = engine.digests()
        return logs[0], logs[1], digests

    truth, ours = both(tmp_path / "plain", None), both(tmp_path / "nvme", nvme)
    assert ours == both(tmp_path / "host", host)
    if name == "mixed":  # rounding to bf16 adds up
        assert_close(ours[0].losses[:4], truth[0].losses[:4], 2e-3)
        assert_close(ours[0].norms[:4], truth[0].norms[:4], 8e-3)
        return
    for log, other in zip(ours[:2], truth[:2], strict=True):
        assert_close(log.losses, other.losses, 1e-4)
        assert_close(log.norms, other.norms, 1e-4)


def test_resumes_to_the_bit(tmp_path: Path) -> None:
    """Lightning itself repeats batches where it resumes, so all batches are the same here."""
    found = []
    for resume in (None, str(tmp_path / "kept" / "step=2.ckpt")):
        door, log = strategy(nvme, tmp_path), Log()
        saves = {"callbacks": [keep(tmp_path, every_n_train_steps=2)], "enable_checkpointing": True}
        trainer = lightning_trainer(tmp_path, strategy=door, max_steps=4, **({} if resume else saves))
        batches = torch.utils.data.DataLoader(rows(1) * 16, batch_size=2)
        trainer.fit(lightning_module(model(), scheduled, log), batches, ckpt_path=resume)
        with door.engine as engine:
            found.append((log.losses[-2:], log.norms[-2:], engine.digests()))
    assert found[0] == found[1]


class Resumable:
    """Ten batches, and where it is among them, as Lightning wants to know it to resume inside of an epoch."""

    def __init__(self) -> None:
        self.batches, self.done = list(loader(20)), 0

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[Any]:
        while self.done < len(self.batches):
            self.done += 1
            yield self.batches[self.done - 1]
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


OLD_LIGHTNING = tuple(map(int, lightning.__version__.split(".")[:2])) < (2, 6)
OLD = pytest.mark.skipif(OLD_LIGHTNING, reason="Lightning counts the last batch again")


@pytest.mark.parametrize(("accumulation", "left"), [(1, 5), pytest.param(3, 13, marks=OLD)])
def test_resumes_inside_of_an_epoch(accumulation: int, left: int, tmp_path: Path) -> None:
    """Ten batches an epoch; seven steps, saved behind the second one."""
    path = tmp_path / "last.ckpt"
    more = {"accumulate_grad_batches": accumulation, "gradient_clip_val": 0.1}
    first, rest = {"callbacks": [SavesAt(path, {2})]}, {"ckpt_path": str(path)}
    (truth, digests), (log, found) = (
        fit_to(7, tmp_path, strategy(nvme, tmp_path), batches=Resumable(), **more, **part) for part in (first, rest)
    )
    assert (len(log.losses), len(log.norms)) == (left, 5)
    assert (log.losses, log.norms, found) == (truth.losses[-left:], truth.norms[2:], digests)


class SavesAt(lightning.Callback):
    """Saves at some steps, always to the same path."""

    def __init__(self, path: Path, steps: set[int]) -> None:
        self.path, self.steps = path, set(steps)

    def on_train_batch_end(self, trainer: Any, *rest: Any) -> None:
        if trainer.global_step in self.steps:
            self.steps.remove(trainer.global_step)
            trainer.save_checkpoint(self.path)


class FullAt(TorchCheckpointIO):
    """Finds the drive full when it writes what Lightning keeps at some step."""

    def __init__(self, step: int) -> None:
        self.step = step

    def save_checkpoint(self, checkpoint: dict[str, Any], *given: Any, **more: Any) -> None:
        if checkpoint["global_step"] == self.step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        super().save_checkpoint(checkpoint, *given, **more)


def fit_to(step: int, tmp_path: Path, door: OffloadStrategy, **more: Any) -> tuple[Log, dict[str, Any]]:
    """Train a fresh model, on batches that are all the same unless given; returns what was logged, and the digests."""
    log, ckpt_path = Log(), more.pop("ckpt_path", None)
    batches = more.pop("batches", None) or torch.utils.data.DataLoader(rows(1) * 16, batch_size=2)
    trainer = lightning_trainer(tmp_path, strategy=door, max_steps=step, **more)
    try:
        trainer.fit(lightning_module(model(), scheduled, log), batches, ckpt_path=ckpt_path)
        assert trainer.global_step == step == door.engine.stats().step
        return log, door.engine.digests()
    finally:
        door.engine.close()


def test_a_path_is_replaced_as_a_whole(tmp_path: Path) -> None:
    """A save that ends before Lightning's part is written leaves all of the checkpoint before."""
    path = tmp_path / "last.ckpt"
    truth, digests = fit_to(5, tmp_path, strategy(nvme, tmp_path))
    full = strategy(nvme, tmp_path, checkpoint_io=FullAt(4))
    with pytest.raises(OSError, match="No space left"):
        fit_to(5, tmp_path, full, callbacks=[SavesAt(path, {2, 4})])
    assert sorted(each.name for each in path.iterdir()) == [".lock", "latest", "step-00000002"]
    log, found = fit_to(5, tmp_path, strategy(nvme, tmp_path), ckpt_path=str(path))
    assert (log.losses, log.norms, found) == (truth.losses[2:], truth.norms[2:], digests)


def test_saves_with_a_thread_of_lightnings(tmp_path: Path) -> None:
    """The folder has all of it when it gets its name."""
    path = tmp_path / "last.ckpt"
    door = strategy(nvme, tmp_path, checkpoint_io=AsyncCheckpointIO())
    truth, digests = fit_to(4, tmp_path, door, callbacks=[SavesAt(path, {1, 2})])
    assert (path / "step-00000002" / door_of_lightning.FILE).is_file()
    log, found = fit_to(4, tmp_path, strategy(nvme, tmp_path), ckpt_path=str(path))
    assert (log.losses, log.norms, found) == (truth.losses[2:], truth.norms[2:], digests)


def test_checkpoints_of_earlier_versions(tmp_path: Path) -> None:
    """What Lightning keeps was beside the engine's folder. The next save replaces both."""
    path = tmp_path / "last.ckpt"
    truth, digests = fit_to(4, tmp_path, strategy(nvme, tmp_path), callbacks=[SavesAt(path, {2})])
    (path / "step-00000002" / door_of_lightning.FILE).rename(path / door_of_lightning.FILE)
    resumed = {"ckpt_path": str(path), "callbacks": [SavesAt(path, {3})]}
    log, found = fit_to(4, tmp_path, strategy(nvme, tmp_path), **resumed)
    assert (log.losses, log.norms, found) == (truth.losses[2:], truth.norms[2:], digests)
    assert not (path / door_of_lightning.FILE).exists()
    log, found = fit_to(4, tmp_path, strategy(nvme, tmp_path), ckpt_path=str(path))
    assert (log.losses, log.norms, found) == (truth.losses[3:], truth.norms[3:], digests)


def test_validates_checkpoints_with_a_live_engine(tmp_path: Path) -> None:
    saves = {"callbacks": [keep(tmp_path, every_n_train_steps=1)], "enable_checkpointing": True, "max_steps": 2}
    trainer, _ = fit(tmp_path, strategy(nvme, tmp_path), make=adam, **saves)
    first = str(tmp_path / "kept" / "step=1.ckpt")
    with trainer.strategy.engine as engine:
        torch.manual_seed(1)
        last = trainer.validate(trainer.lightning_module, loader(), verbose=False)[0]["val_loss"]
        drawn = torch.get_rng_state()
        torch.manual_seed(1)
        again = trainer.validate(trainer.lightning_module, loader(), ckpt_path=first, verbose=False)[0]["val_loss"]
        assert trainer.strategy.engine is engine and engine.stats().step == 1
        assert again != last and torch.equal(torch.get_rng_state(), drawn)
    alone = lightning_trainer(tmp_path, strategy=strategy(nvme, tmp_path))  # a process that only evaluates
    module = lightning_module(model(), adam, Log())
    assert alone.validate(module, loader(), ckpt_path=first, verbose=False)[0]["val_loss"] == again
    with alone.strategy.engine as engine:
        assert engine.optimizer is None


def test_reads_and_writes_weights_in_files_of_lightnings(tmp_path: Path) -> None:
    """A checkpoint of another strategy is resumed; one of weights alone is a file that others read."""
    saves = {"callbacks": [keep(tmp_path, every_n_train_steps=2)], "enable_checkpointing": True, "max_steps": 4}
    fit(tmp_path, make=adam, **saves)
    middle = {"make": adam, "max_steps": 4, "ckpt_path": str(tmp_path / "kept" / "step=2.ckpt")}
    _, truth = fit(tmp_path, **middle)
    trainer, resumed = fit(tmp_path, strategy(nvme, tmp_path), **middle)
    assert_close(resumed.losses, truth.losses, 1e-4)
    with trainer.strategy.engine as engine:
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
        found = torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]
        truth_of = engine.state_dict()
    assert found.keys() == truth_of.keys()
    assert all(torch.equal(value, truth_of[name]) for name, value in found.items())


class Saved(lightning.LightningModule):
    """With hyper-parameters, a tied weight, a buffer, and a state of its own."""

    def __init__(self, seed: int = 0, rate: float = 0.1) -> None:
        super().__init__()
        self.save_hyperparameters()
        torch.manual_seed(seed)
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.second.weight = self.first.weight
        self.norm = nn.BatchNorm1d(8)
        self.seen = 0

    def training_step(self, batch: torch.Tensor, number: int) -> torch.Tensor:
        self.seen += 1
        return self.norm(self.second(self.first(batch))).pow(4).mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


@pytest.mark.parametrize("whole", [True, False])
def test_a_checkpoint_is_loaded_without_a_trainer(whole: bool, tmp_path: Path) -> None:
    """`load_from_checkpoint` opens files only; a file of weights alone is one."""
    path, module = tmp_path / "kept.ckpt", Saved(seed=1, rate=0.5)
    door = OffloadStrategy(max_memory={"device": "32MiB", "cpu": "64MiB"})
    trainer = lightning_trainer(tmp_path, strategy=door, max_steps=3)
    trainer.fit(module, torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4))
    with door.engine:
        trainer.save_checkpoint(path, weights_only=not whole)
    assert path.is_dir() == whole
    found = door_of_lightning.load_from_checkpoint(Saved, path)
    assert (found.hparams.seed, found.hparams.rate, found.seen) == (1, 0.5, 3)
    truth = module.state_dict()
    assert "second.weight" in truth and found.second.weight is found.first.weight
    for name, value in found.state_dict().items():
        assert name.startswith("_extra") or torch.equal(value, truth[name]), name
    again = door_of_lightning.load_from_checkpoint(Saved, str(path), rate=0.25)
    assert again.hparams.rate == 0.25 and again.hparams.seed == 1


def save(trainer: Any, path: Path | str, alone: bool) -> dict[str, Any]:
    """Save, the weights `alone` if so; returns what is found at the path again."""
    trainer.save_checkpoint(path, weights_only=alone)
    assert os.path.isfile(path) == alone
    found: dict[str, Any] = door_of_lightning.load_from_checkpoint(Saved, path).state_dict()
    return found


@pytest.fixture
def saver(tmp_path: Path) -> Iterator[Any]:
    """Yield a trainer with an engine that has trained a step."""
    door = OffloadStrategy(max_memory={"device": "32MiB", "cpu": "64MiB"})
    trainer = lightning_trainer(tmp_path / "trainer", strategy=door, max_steps=1)
    trainer.fit(Saved(seed=1), torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4))
    with trainer.strategy.engine:
        yield trainer


@pytest.mark.parametrize("alone", [True, False])
def test_a_file_replaces_a_folder_and_a_folder_a_file(alone: bool, saver: Any, tmp_path: Path) -> None:
    """As files replace files with Lightning, of which a run is resumed with the same `dirpath`."""
    path = tmp_path / "kept" / "last.ckpt"
    before = save(saver, path, not alone)["first.weight"]
    saver.strategy.engine.apply(lambda name, parameter: parameter.zero_())
    assert before.any() and not save(saver, str(path), alone)["first.weight"].any()
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("alone", [True, False])
def test_what_is_not_replaced_is_as_it_was(alone: bool, saver: Any, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "last.ckpt"
    before = save(saver, path, not alone)["first.weight"]
    saver.strategy.checkpoint_io = FullAt(1)
    with pytest.raises(OSError, match="No space left"):
        saver.save_checkpoint(path, weights_only=alone)
    assert path.is_dir() == alone
    assert torch.equal(door_of_lightning.load_from_checkpoint(Saved, path).state_dict()["first.weight"], before)
    assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


@pytest.mark.parametrize("alone", [True, False])
@pytest.mark.parametrize("nth", [0, 1, 2])
def test_a_kill_while_something_is_replaced_loses_nothing(
    alone: bool, nth: int, saver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before, between and behind the two renames; the next save clears up."""
    path = tmp_path / "kept" / "last.ckpt"
    save(saver, path, not alone)
    made: list[tuple[Any, Any]] = []

    class Killed(BaseException):
        """Nothing that is cleared up behind."""

    def rename(old: Any, new: Any) -> None:
        ours = str(old).endswith(NEW) or str(new).endswith(FORMER)
        if ours and len(made) == nth:
            raise Killed
        real(old, new)
        made.extend([(old, new)] * ours)

    real = os.rename
    with monkeypatch.context() as patch:
        patch.setattr(door_of_lightning.os, "rename", rename)
        patch.setattr(door_of_lightning, "_remove", lambda path: None)
        with contextlib.nullcontext() if nth == 2 else pytest.raises(Killed):
            saver.save_checkpoint(path, weights_only=alone)
    left = {each.name.removeprefix("last.ckpt") for each in path.parent.iterdir()}
    assert left == {0: {"", NEW}, 1: {NEW, FORMER}, 2: {"", FORMER}}[nth]
    if nth != 1:
        door_of_lightning.load_from_checkpoint(Saved, path)
    for name in left - {""}:
        door_of_lightning.load_from_checkpoint(Saved, f"{path}{name}")
    if nth == 0:
        save(saver, path, alone)
        assert [each.name for each in path.parent.iterdir()] == ["last.ckpt"]


def test_a_thread_of_lightnings_has_written_before_a_folder_goes(saver: Any, tmp_path: Path) -> None:
    path = tmp_path / "kept" / "last.ckpt"
    before = save(saver, path, False)["first.weight"]
    saver.strategy.checkpoint_io = AsyncCheckpointIO(FullAt(1))
    with pytest.raises(OSError, match="No space left"):
        saver.save_checkpoint(path, weights_only=True)
    assert torch.equal(door_of_lightning.load_from_checkpoint(Saved, path).state_dict()["first.weight"], before)


def test_a_folder_of_others_is_not_replaced(saver: Any, tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes").touch()
    with pytest.raises(CheckpointError, match="another folder is there; save to another path"):
        saver.save_checkpoint(tmp_path / "mine", weights_only=True)
    saver.strategy.engine.save_checkpoint(tmp_path / "engine")
    with pytest.raises(CheckpointError, match="another folder is there; save to another path"):
        saver.save_checkpoint(tmp_path / "engine", weights_only=True)
    assert (tmp_path / "mine" / "notes").exists() and (tmp_path / "engine" / "latest").exists()


def test_a_url_is_refused_before_training(saver: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It was a folder below the one that the process is in. Lightning writes files of weights there."""
    monkeypatch.chdir(tmp_path)
    log = Log()
    trainer = lightning_trainer(
        tmp_path,
        strategy=strategy(nvme, tmp_path),
        callbacks=[ModelCheckpoint(dirpath="memory://run")],
        enable_checkpointing=True,
    )
    with pytest.raises(ConfigError, match=r"dirpath: expected a folder on a file system.* but got memory://run; name"):
        trainer.fit(lightning_module(model(), adam, log), loader())
    with pytest.raises(ConfigError, match="but got memory://run/whole.ckpt"):
        saver.save_checkpoint("memory://run/whole.ckpt")
    saver.save_checkpoint("memory://run/weights.ckpt", weights_only=True)
    assert fsspec.filesystem("memory").isfile("/run/weights.ckpt")
    assert not log.losses and not Path("memory:").exists()


class OwnBackward(Saved):
    """Counts its backward passes."""

    passes = 0

    def backward(self, loss: torch.Tensor, *given: Any, **more: Any) -> None:
        self.passes += 1
        super().backward(loss, *given, **more)


def test_a_backward_of_the_module_is_called_or_refused(tmp_path: Path) -> None:
    for precision in ("32-true", "16-true"):
        door, module = OffloadStrategy(max_memory={"device": "32MiB", "cpu": "64MiB"}), OwnBackward(seed=1)
        trainer = lightning_trainer(tmp_path, strategy=door, max_steps=2, precision=precision)
        batches = torch.utils.data.DataLoader(torch.randn(32, 8), batch_size=4)
        if precision == "32-true":
            trainer.fit(module, batches)
            assert module.passes == 2
            door.engine.close()
            continue
        with pytest.raises(ConfigError, match="backward: expected LightningModule's but got one of OwnBackward"):
            trainer.fit(module, batches)


def test_the_device_is_the_one_that_the_trainer_has_chosen() -> None:
    door = OffloadStrategy(accelerator=lightning.pytorch.accelerators.CUDAAccelerator())
    door.parallel_devices = [torch.device("cuda", 1)]
    assert door.root_device == torch.device("cuda", 1)
    door.parallel_devices = None
    assert door.root_device == torch.device("cuda", 0)
    named = OffloadStrategy(device="cpu", accelerator=lightning.pytorch.accelerators.CUDAAccelerator())
    named.parallel_devices = [torch.device("cuda", 1)]
    assert named.root_device == torch.device("cpu")


def test_a_folder_that_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="there is no checkpoint in it"):
        door_of_lightning.load_from_checkpoint(Saved, tmp_path)


def test_float16_is_scaled(tmp_path: Path) -> None:
    door = strategy(nvme, tmp_path, initial_loss_scale=2.0**24, loss_scale_hysteresis=1)
    trainer, log = fit(tmp_path, door, precision="16-true", max_steps=8, make=adam)
    with trainer.strategy.engine as engine:
        assert engine.stats().skipped_steps > 0 and engine.loss_scale < 2.0**24
    assert log.losses[-1] < log.losses[0]


def test_clipping_takes_no_call_per_gradient(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's own function, which asks each gradient, leaves the same bits."""
    calls, found = calls_of_handles(monkeypatch), []
    for asks_each in (False, True):
        if asks_each:
            monkeypatch.setattr(door_of_lightning, "handles_of", lambda parameters: None)
        trainer, log = fit(tmp_path, strategy(nvme, tmp_path), max_steps=2, gradient_clip_val=0.1)
        with trainer.strategy.engine as engine:
            found.append((log, engine.digests()))
        assert min(log.norms) > 0.1 and bool(calls["mul_"]) == asks_each  # the module itself asks for norms
    assert found[0] == found[1]


def test_a_module_that_optimizes_by_hand(tmp_path: Path) -> None:
    """Its optimizer is the engine's, and it clips by itself."""

    def fitted(**more: Any) -> tuple[Any, list[float]]:
        log = Log()
        module = lightning_module(model(), adam, log)
        module.automatic_optimization = False
        inner = module.training_step

        def training_step(batch: Any, batch_idx: int) -> None:
            optimizer = module.optimizers()
            module.manual_backward(inner(batch, batch_idx))
            module.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")
            optimizer.step()
            optimizer.zero_grad()

        module.training_step = training_step
        trainer = lightning_trainer(tmp_path, max_steps=4, **more)
        trainer.fit(module, loader())
        return trainer, log.losses

    trainer, ours = fitted(strategy=strategy(nvme, tmp_path))
    with trainer.strategy.engine as engine:
        assert engine.stats().step == 4
    assert_close(ours, fitted()[1], 1e-4)


@pytest.mark.skipif(not hasattr(lightning.pytorch.callbacks, "WeightAveraging"), reason="Lightning has none yet")
@pytest.mark.parametrize("averages", [True, False])
def test_mean_weights_are_saved_and_resumed(averages: bool, tmp_path: Path) -> None:
    """Where a checkpoint has the mean of the weights, it is evaluated, and training goes on with both."""
    found = []
    for name in ("plain", "ours"):
        path, log, results = tmp_path / name / "last.ckpt", Log(), []
        batches = torch.utils.data.DataLoader(rows(1) * 16, batch_size=2)

        def trainer(steps: int = 4, *callbacks: Any, name: str = name) -> Any:
            ours = OffloadStrategy(max_memory={"device": "32MiB", "cpu": "64MiB"})  # all parameters, for torch's mean
            more = {} if name == "plain" else {"strategy": ours}
            return lightning_trainer(tmp_path, max_steps=steps, callbacks=[*callbacks], **more)

        def mean() -> Any:
            made = lightning.pytorch.callbacks.WeightAveraging()
            if not averages:  # nor later: the mean is what was loaded
                made.should_update = lambda **step: False
            return made

        def validated(one: Any, module: Any, ckpt_path: Any, *, batches: Any = batches) -> float:
            return float(one.validate(module, batches, ckpt_path=ckpt_path, verbose=False)[0]["val_loss"])

        first = trainer(2, *([mean()] if averages else []))
        first.fit(lightning_module(model(), adam, log), batches)
        first.save_checkpoint(path)
        alone = trainer()
        results.append(validated(alone, lightning_module(model(), adam, Log()), path))
        resumed, module = trainer(4, mean()), lightning_module(model(), adam, log)
        resumed.fit(module, batches, ckpt_path=path)
        results.append(validated(resumed, module, None))
        file = torch.load(path, weights_only=False) if path.is_file() else None
        if file is None:
            folder, beside = door_of_lightning._find(path)
            file = door_of_lightning._as_file(folder, torch.load(beside, weights_only=False))
        for one in (first, alone, resumed) if name == "ours" else ():
            one.strategy.engine.close()
        found.append((log.losses, results, {name: value.clone() for name, value in file["state_dict"].items()}))
    (truth, validations, weights), (ours, others, saved) = found
    assert_close(ours, truth, 1e-4)
    assert_close(others, validations, 1e-4)
    assert weights.keys() == saved.keys()
    for name, value in weights.items():
        assert torch.allclose(value, saved[name], atol=1e-5), name


def test_a_hook_leaves_weights_out_of_a_file_of_weights_alone(tmp_path: Path) -> None:
    module = lightning_module(model(), adam, Log())

    def leave_out(checkpoint: dict[str, Any]) -> None:
        for name in [name for name in checkpoint["state_dict"] if "lm_head" not in name]:
            del checkpoint["state_dict"][name]

    module.on_save_checkpoint = leave_out
    trainer = lightning_trainer(tmp_path, strategy=strategy(nvme, tmp_path), max_steps=1)
    trainer.fit(module, loader(4))
    with trainer.strategy.engine:
        trainer.save_checkpoint(tmp_path / "weights.ckpt", weights_only=True)
    assert [*torch.load(tmp_path / "weights.ckpt", weights_only=False)["state_dict"]] == ["core.lm_head.weight"]


def by_epochs(core: nn.Module) -> Any:
    optimizer = adam(core)
    return [optimizer], [torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 0.5**epoch)]


@pytest.mark.parametrize("left", [1, 2])
def test_averages_of_the_last_epochs_go_on(left: int, tmp_path: Path) -> None:
    """Lightning's own schedule stands in the place of the module's when the checkpoint is saved."""
    path, found = tmp_path / "kept", []
    for resume in (None, f"epoch={3 - left}.ckpt"):
        log, door = Log(), strategy(nvme, tmp_path)
        mean = lightning.pytorch.callbacks.StochasticWeightAveraging(swa_lrs=1e-3, swa_epoch_start=2)
        saves = ModelCheckpoint(dirpath=path, save_top_k=-1, filename="{epoch}", save_on_train_epoch_end=True)
        trainer = lightning_trainer(
            tmp_path,
            strategy=door,
            max_steps=-1,
            max_epochs=4,
            callbacks=[mean, *([] if resume else [saves])],
            enable_checkpointing=resume is None,
        )
        trainer.fit(lightning_module(model(), by_epochs, log), loader(4), ckpt_path=resume and str(path / resume))
        with door.engine as engine:
            found.append((log.losses[-2 * left :], engine.digests()))
    assert found[0][0] == found[1][0] and len(found[0][0]) == 2 * left
    assert found[0][1] == found[1][1]


def test_a_closed_engine_is_followed_by_another(tmp_path: Path) -> None:
    """So is one of another module, which is closed then."""
    saves = {"callbacks": [keep(tmp_path, every_n_train_steps=2)], "enable_checkpointing": True, "max_steps": 2}
    trainer, _ = fit(tmp_path, strategy(nvme, tmp_path), make=adam, **saves)
    module, path = trainer.lightning_module, str(tmp_path / "kept" / "step=2.ckpt")
    trainer.strategy.engine.close()
    loss = trainer.validate(module, loader(4), ckpt_path=path, verbose=False)[0]["val_loss"]
    first, other = trainer.strategy.engine, lightning_module(model(), adam, Log())
    assert trainer.validate(other, loader(4), ckpt_path=path, verbose=False)[0]["val_loss"] == loss
    with trainer.strategy.engine as engine:
        assert first._manager is None and engine.module is other
    assert torch.equal(module.core.lm_head.weight, other.core.lm_head.weight)


def test_refuses_batch_norms_of_several_processes(tmp_path: Path) -> None:
    door = door_of_lightning.OffloadRanksStrategy(max_memory={"device": "32MiB", "cpu": "64MiB"})
    trainer = lightning_trainer(tmp_path, strategy=door, sync_batchnorm=True)
    with pytest.raises(ConfigError, match=r"sync_batchnorm: expected batch norms of a process each.*leave it out"):
        door.setup(trainer)


class Uploads(lightning.pytorch.loggers.CSVLogger):
    """A logger that uploads checkpoints, as the one of Weights & Biases does with the same argument."""

    _log_model = True


def test_warns_of_uploads(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer, _ = fit(tmp_path, strategy(nvme, tmp_path), make=adam, max_steps=1, logger=Uploads(tmp_path))
    trainer.strategy.engine.close()
    told = [message for message in caplog.messages if message.startswith("Uploads: log_model uploads no checkpoint")]
    assert len(told) == 1 and "checkpoint export" in told[0]


class Unfreezes(lightning.Callback):
    """Trains the last layers alone, and all of them from the second epoch on."""

    def on_train_epoch_start(self, trainer: Any, pl_module: Any) -> None:
        pl_module.core.model.requires_grad_(trainer.current_epoch > 0)


def test_a_callback_unfreezes_what_the_optimizer_has(tmp_path: Path) -> None:
    """Lightning's own freeze before the engine is made, and would fail epochs later."""
    found = []
    for door in (None, strategy(nvme, tmp_path)):
        log = fit(tmp_path, door, callbacks=[Unfreezes()], batches=2, max_steps=4)[1]
        assert log.norms[2] > log.norms[0]
        found.append(log)
    assert_close(found[1].losses, found[0].losses, 1e-4)
    assert_close(found[1].norms, found[0].norms, 1e-4)


class Freezes(lightning.pytorch.callbacks.BaseFinetuning):
    def __init__(self, frozen: bool) -> None:
        super().__init__()
        self.frozen = frozen

    def freeze_before_training(self, pl_module: Any) -> None:
        pl_module.core.model.requires_grad_(not self.frozen)

    def finetune_function(self, pl_module: Any, epoch: int, optimizer: Any) -> None:
        self.make_trainable(pl_module.core.model)


def test_a_callback_that_freezes_before_the_engine_is_made_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^callbacks: expected .* but got Freezes, .*; give the optimizer all"):
        fit(tmp_path, strategy(nvme, tmp_path), callbacks=[Freezes(True)], max_steps=1)
    assert fit(tmp_path, strategy(nvme, tmp_path), callbacks=[Freezes(False)], batches=1, max_steps=1)[1].losses


def test_fits_twice(tmp_path: Path) -> None:
    """Each begins with a fresh optimizer, as without an engine."""

    def twice(**more: Any) -> tuple[Any, Log]:
        log = Log()
        trainer, module = lightning_trainer(tmp_path, max_steps=2, **more), lightning_module(model(), adam, log)
        trainer.fit(module, loader())
        trainer.fit_loop.epoch_loop.max_steps = 4
        trainer.fit(module, loader())
        return trainer, log

    trainer, ours = twice(strategy=strategy(nvme, tmp_path))
    trainer.strategy.engine.close()
    assert_close(ours.losses, twice()[1].losses, 1e-4)


@pytest.mark.parametrize(
    ("options", "more", "message"),
    [
        ({"max_grad_norm": 1.0}, {"gradient_clip_val": 0.1}, r"max_grad_norm=1.0 beside gradient_clip_val=0.1.*leave"),
        ({"gradient_accumulation_steps": 2}, {}, r"beside accumulate_grad_batches=1.*leave it out"),
        ({}, {"make": lambda core: None}, r"expected one optimizer but got 0; return one"),
    ],
)
def test_refuses(options: dict[str, Any], more: dict[str, Any], message: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=message):
        fit(tmp_path, strategy(nvme, tmp_path, **options), **more)
