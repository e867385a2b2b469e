"""The door of Lightning: strategies that train a LightningModule through an engine, in one process or in several.

Owns who does what: Lightning divides the loss, runs the hooks and keeps the loops; the engine has the module, steps,
and saves. A checkpoint is the engine's, whose folder has Lightning's own values in it before it gets its name.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import logging
import os
import shutil
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import torch

from offload.checkpoint.format.folder import Folder
from offload.checkpoint.restoring import read_state_dict
from offload.classes import is_a
from offload.config import Config
from offload.engine import Engine
from offload.errors import CheckpointError, ConfigError
from offload.integrations.libraries import is_closed, refuse_two_sides, require, trains_float16
from offload.module.clipping import clip_handles, handles_of
from offload.run_state import drawn_so_far, set_drawn
from offload.several import APART

require("lightning", "2.4", door="offload.lightning")
from lightning.pytorch import LightningModule  # noqa: E402
from lightning.pytorch.accelerators import CPUAccelerator  # noqa: E402
from lightning.pytorch.callbacks import BaseFinetuning, StochasticWeightAveraging  # noqa: E402
from lightning.pytorch.plugins.io import AsyncCheckpointIO, TorchCheckpointIO  # noqa: E402
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy, Strategy  # noqa: E402
from lightning.pytorch.trainer.states import TrainerFn  # noqa: E402

logger = logging.getLogger(__name__)

FILE = "trainer.ckpt"  # what Lightning keeps, inside the folder of the engine's checkpoint
NEW, FORMER = ".offload-new", ".offload-former"  # behind a path where a file replaces a folder, or a folder a file
TIED = "offload_tied"  # there: the other names of tensors, of which the engine's checkpoint has the first ones
CURRENT = "current_model_state"  # there: the weights, where Lightning's WeightAveraging has put means in their place


_Strategy: Any = object  # what the mixin is mixed into


class _FittedEngine(Engine):
    """An engine whose checkpoints have a file of Lightning's in them."""

    def save_with(self, directory: str | Path, write: Callable[[Path], None]) -> None:
        """Replace the checkpoint in a directory by one to whose folder `write` adds before it is found there.

        Args:
            directory: as of :meth:`offload.Engine.save_checkpoint`.
            write: called with the folder, in the first process.
        """
        state = None if self._durable is None else self._durable.client_state
        self._checkpoints.save(directory, tag=None, client_state=lambda: state, keep=1, beside=write)


class _Offloading(_Strategy):  # type: ignore[misc]
    """What strategies do that train through an engine, however many processes there are."""

    engine: _FittedEngine | None
    _options: Config
    _folder: Path | None  # of the engine's checkpoint that is being restored
    _stage: int | str | None = None  # of ZeRO

    # --- beginning and ending ---------------------------------------------------------------------------------------

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Whether checkpoints are loaded into the engine, and so after it was made."""
        return True

    def setup(self, trainer: Any) -> None:
        """Set up as ever, and make the engine where ``fit`` has not.

        Raises:
            ConfigError: both sides accumulate or clip, there are several optimizers, batch norms of several processes
                would have to wait for each other, checkpoints would go to a URL, a backward of the module would not be
                called, or a callback has frozen what it will train later.
        """
        if getattr(self, "_layer_sync", None) is not None:
            raise ConfigError(
                "sync_batchnorm: expected batch norms of a process each but got sync_batchnorm=True, with which they "
                "would ask other processes inside of a forward; leave it out, or use GroupNorm"
            )
        if trainer.state.fn == TrainerFn.FITTING:
            _warn_of_uploads(trainer.loggers)
            for each in trainer.checkpoint_callbacks:
                if not getattr(each, "save_weights_only", False):
                    _refuse_url(getattr(each, "dirpath", None))
            _refuse_frozen_for_now(trainer.callbacks, self.lightning_module)
        super().setup(trainer)
        if self.engine is not None and (is_closed(self.engine) or self.engine.module is not self.model):
            self.engine.close(restore=True)
            self.engine = None
        if self.engine is None:
            self._open(None, trainer)

    def model_to_device(self) -> None:
        """Leave the module where it is: the engine moves its parameters."""

    def setup_optimizers(self, trainer: Any) -> None:
        """Let the module make its optimizer, and an engine that takes it over."""
        if self.engine is not None:
            self.engine.close(restore=True)  # each fit begins with a fresh optimizer
            self.engine = None
        super().setup_optimizers(trainer)
        made = [each for each in super().optimizers if any(group["params"] for group in each.param_groups)]
        if len(made) != 1:
            raise ConfigError(
                f"configure_optimizers: expected one optimizer but got {len(made)}; return one, with a "
                "parameter group for each part of the model"
            )
        self.optimizers = [self._open(made[0], trainer).optimizer]

    def _open(self, optimizer: Any, trainer: Any) -> _FittedEngine:
        """Make the engine."""
        options = self._options
        refuse_two_sides(
            options,
            accumulates=f"accumulate_grad_batches={trainer.accumulate_grad_batches}",
            clips=f"gradient_clip_val={trainer.gradient_clip_val}" if trainer.gradient_clip_val else None,
        )
        config = dataclasses.replace(
            options,
            device=str(self.root_device),
            gradient_accumulation_steps=trainer.accumulate_grad_batches,
            gradient_reduction="sum",  # Lightning has divided the loss
        )
        assert self.model is not None
        if optimizer is not None and (options.dtype == "float16" or self._takes_backward(self.model)):
            _refuse_own_backward(self.lightning_module)
        stage = APART if optimizer is None and self.world_size > 1 else self._stage if optimizer is not None else None
        self.engine = _FittedEngine(self.model, optimizer, config, stage=stage)
        return self.engine

    def teardown(self) -> None:
        """End what is not the engine's: it keeps the module's parameters."""
        self.precision_plugin.teardown()
        assert self.accelerator is not None
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    # --- a step -----------------------------------------------------------------------------------------------------

    def backward(self, closure_loss: torch.Tensor, optimizer: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
        """Run backward; of float16, from the loss times the loss scale; of several processes, from their mean loss."""
        engine, module, world = self.engine, self.lightning_module, self.world_size
        if engine is None or module is None or not self._takes_backward(module):
            loss: torch.Tensor = super().backward(closure_loss, optimizer, *args, **kwargs)
            return loss
        loss = self.precision_plugin.pre_backward(closure_loss, module)
        engine.backward(loss if world == 1 else loss / world, **kwargs)
        loss = self.precision_plugin.post_backward(loss, module)
        return loss

    def _takes_backward(self, module: torch.nn.Module) -> bool:
        """Tell whether backward is the engine's: it scales the loss, or adds the gradients of several processes."""
        return self.world_size > 1 or trains_float16(module)

    @property
    def precision_plugin(self) -> Any:
        """The precision plugin, which clips values parameter by parameter, and by norm all at once."""
        return super().precision_plugin

    @precision_plugin.setter
    def precision_plugin(self, plugin: Any) -> None:
        chosen = None if plugin is None else _clipping_handles(plugin, self)
        Strategy.precision_plugin.fset(self, chosen)

    def clip_values(self, optimizer: Any, most: float) -> None:
        """Clip the elements of an optimizer's gradients, one parameter at a time.

        Args:
            optimizer: whose.
            most: the largest magnitude afterwards.
        """
        assert self.engine is not None
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    with self.engine.gather_gradients(parameter, modify=True):
                        parameter.grad.clamp_(-most, most)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return nothing: the engine's checkpoint has the weights."""
        return {}

    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """Return nothing: the engine's checkpoint has the states."""
        return {}

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Save a folder with the engine's checkpoint; without an optimizer's state, a file of Lightning's as ever.

        What an earlier save has left at the path is replaced, be it a folder or a file.

        Raises:
            CheckpointError: a folder is there that is no checkpoint of this door, or the engine cannot save.
            ConfigError: the engine's checkpoint would go to a URL.
        """
        engine = self.engine if "optimizer_states" in checkpoint else None
        if engine is not None:
            _refuse_url(filepath)
        in_way = os.path.isfile(filepath) if engine is not None else _is_checkpoint(filepath)
        place = f"{os.fspath(filepath)}{NEW}" if in_way else filepath
        with contextlib.ExitStack() as behind:
            if in_way and self.is_global_zero:
                _remove(place)  # of a save that was killed
                behind.callback(_remove, place)  # of this one, if it fails
            if engine is not None:
                self._save(engine, checkpoint, place, storage_options)
            else:
                self._save_weights(checkpoint, place, storage_options, now=in_way)
            if in_way and self.is_global_zero:
                self._replace(place, filepath)

    def _save_weights(self, checkpoint: dict[str, Any], path: Any, storage_options: Any, *, now: bool) -> None:
        """Save a file with the weights in the first process; with `now`, it is on the drive when this returns."""
        if not self.is_global_zero:
            return
        assert self.lightning_module is not None
        checkpoint["state_dict"] = self.lightning_module.state_dict()
        self.lightning_module.on_save_checkpoint(checkpoint)  # which has seen no weights before
        if now:
            self._write(checkpoint, path, storage_options)
        else:
            super().save_checkpoint(checkpoint, path, storage_options)

    def _replace(self, new: str, path: Any) -> None:
        """Let a file take the place of a folder, or the other way round, and delete what was there."""
        former = f"{os.fspath(path)}{FORMER}"
        try:
            _remove(former)
            os.rename(path, former)
            try:
                os.rename(new, path)
            except OSError:
                os.rename(former, path)
                raise
        except OSError as error:
            if self.engine is not None:
                self.engine.wait_for_ranks("barrier", error)  # where Lightning has the others wait
            raise
        _remove(former)

    def _save(self, engine: _FittedEngine, checkpoint: dict[str, Any], filepath: Any, storage_options: Any) -> None:
        """Save a folder with the engine's checkpoint."""
        if engine.optimizer is None and not self.is_global_zero:
            return  # of several processes, each has an engine of its own that only evaluates
        checkpoint[TIED] = _tied(engine.module)
        engine.save_with(filepath, lambda folder: self._write(checkpoint, folder / FILE, storage_options))
        super().remove_checkpoint(os.path.join(filepath, FILE))  # an earlier version's, whose checkpoint is replaced

    def _write(self, checkpoint: dict[str, Any], path: str | Path, storage_options: Any) -> None:
        """Write what Lightning keeps; it is on the drive when this returns."""
        io = self.checkpoint_io
        if isinstance(io, AsyncCheckpointIO):  # would write when the folder has another name
            io = io.checkpoint_io
        io.save_checkpoint(checkpoint, path, storage_options=storage_options)
        with open(path, "rb") as file:
            os.fsync(file.fileno())

    def load_checkpoint(self, checkpoint_path: Any, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """Read what Lightning keeps; :meth:`load_model_state_dict` reads the rest."""
        self._folder, path = _find(checkpoint_path) if os.path.isdir(checkpoint_path) else (None, checkpoint_path)
        found: dict[str, Any] = super().load_checkpoint(path, *args, **kwargs)
        return found

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load parameters, and with the engine's checkpoint everything else that decides on the next step."""
        if self._folder is None:
            super().load_model_state_dict(checkpoint, strict)
            return
        assert self.engine is not None and self.lightning_module is not None
        drawn = drawn_so_far()
        self.engine.load_checkpoint(self._folder, strict=strict)
        trainer, given = self.lightning_module.trainer, checkpoint["state_dict"]
        if trainer.state.fn != TrainerFn.FITTING:
            set_drawn(drawn)  # a run that looks at a checkpoint goes on with its own random numbers
        elif any(is_a(each, "lightning", "WeightAveraging") for each in trainer.callbacks):  # which loads both of them
            place = cast(dict[str, Any], checkpoint)
            if CURRENT in place:
                place[CURRENT] = self.engine.state_dict()
                return
            place["state_dict"] = {**self.engine.state_dict(), **given}
        if given:  # hooks have put other weights there
            whole = {**self.lightning_module.state_dict(), **given}
            super().load_model_state_dict({"state_dict": whole}, strict)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load the optimizer's state, unless the engine's checkpoint had it."""
        if self._folder is None:
            super().load_optimizer_state_dict(checkpoint)
        assert self.lightning_module is not None
        trainer = self.lightning_module.trainer
        for callback in trainer.callbacks:  # Lightning asks it only where checkpoints are loaded before the setup
            if isinstance(callback, StochasticWeightAveraging) and callback._scheduler_state is not None:
                callback._clear_schedulers(trainer)


class OffloadStrategy(_Offloading, SingleDeviceStrategy):  # type: ignore[misc]
    """Trains through an engine: ``Trainer(strategy=OffloadStrategy(max_memory=..., nvme_path=...))``.

    The engine is made around the whole LightningModule and its optimizer when ``fit`` begins, and stays until it is
    closed: ``trainer.strategy.engine.close()`` gives the module back. Without ``fit``, it only evaluates.

    Attributes:
        engine: the engine; None before it is made.
    """

    strategy_name = "offload"

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        accelerator: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """Prepare.

        Args:
            config: options of the engine, as :class:`offload.Config`, dict or JSON file. The trainer gives
                `gradient_accumulation_steps` and `gradient_reduction`, and clips, unless it has no
                `gradient_clip_val`. `device` is the trainer's accelerator, if it is not given.
            accelerator: as of other strategies.
            checkpoint_io: as of other strategies.
            precision_plugin: as of other strategies.
            **options: options, on top of `config`.

        Raises:
            ConfigError: an option is unknown or out of its range.
        """
        self._options = Config.load(config, **options)
        self._folder = None
        self._devices: Sequence[torch.device] = ()
        self.engine = None
        device = "cpu" if self._options.device is None else self._options.device
        super().__init__(device, accelerator, checkpoint_io, precision_plugin)

    @property
    def root_device(self) -> torch.device:
        """The engine's device."""
        if self._options.device is not None or self.accelerator is None or isinstance(self.accelerator, CPUAccelerator):
            return torch.device(self._options.device or "cpu")
        found: torch.device = (self._devices or self.accelerator.get_parallel_devices([0]))[0]
        return found

    @property
    def parallel_devices(self) -> None:
        """None: there is one device. Lightning assigns those that the trainer has, of which the engine takes the one.

        Raises:
            ConfigError: it has several.
        """
        return None

    @parallel_devices.setter
    def parallel_devices(self, devices: Sequence[torch.device] | None) -> None:
        if devices is not None and len(devices) > 1:
            raise ConfigError(
                f"devices: expected one but got {len(devices)}; pass devices=1, or a process for each by "
                "strategy=offload.lightning.OffloadRanksStrategy(...)"
            )
        self._devices = devices or ()


class _OneModel(DDPStrategy):  # type: ignore[misc]
    """Several processes with torch's process group, and without torch's DistributedDataParallel."""

    def setup(self, trainer: Any) -> None:
        """Set up as strategies do that wrap nothing."""
        Strategy.setup(self, trainer)

    def _setup_model(self, model: torch.nn.Module) -> torch.nn.Module:
        return model


class OffloadRanksStrategy(_Offloading, _OneModel):
    """Trains through an engine in several processes: ``Trainer(devices=4, strategy=OffloadRanksStrategy(...))``.

    Lightning starts the processes, or torchrun does. Everything else is as with :class:`OffloadStrategy`.

    Attributes:
        engine: the engine; None before it is made.
    """

    strategy_name = "offload_ranks"

    def __init__(
        self,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        *,
        stage: int | str = "auto",
        accelerator: Any = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        """Prepare.

        Args:
            config: as of :class:`OffloadStrategy`; budgets are those of each process.
            stage: of ZeRO, as of :class:`offload.Engine`.
            accelerator: as of other strategies.
            cluster_environment: as of other strategies.
            checkpoint_io: as of other strategies.
            precision_plugin: as of other strategies.
            **options: options, on top of `config`.

        Raises:
            ConfigError: an option is unknown or out of its range.
        """
        self._options = Config.load(config, **options)
        self._folder = None
        self.engine = None
        self._stage = stage
        super().__init__(accelerator, None, cluster_environment, checkpoint_io, precision_plugin)

    def teardown(self) -> None:
        """End what is not the engine's: it keeps the module's parameters."""
        super().teardown()
        assert self.cluster_environment is not None
        self.cluster_environment.teardown()

    # --- what processes ask each other, when all of them have come: an engine may need others until then ------------

    def _meet(self, where: str) -> None:
        if self.engine is not None:
            self.engine.wait_for_ranks(where)

    def _meet_behind(self, step: Sequence[Any]) -> None:
        """With slices of parameters, meet behind a loader's last batch: what asks torch's process group comes next.

        That are metrics of torchmetrics, and Lightning's loop before each training batch. Processes may have other
        numbers of batches, so they do not meet behind each.
        """
        if self.engine is None or not self.engine.plan.request.slices_parameters:
            return
        assert self.lightning_module is not None
        loop = self.lightning_module.trainer._evaluation_loop
        of_several = len(step) == 3  # batch, its number, that of its loader
        if loop._data_fetcher.done or (of_several and step[1] + 1 == loop.max_batches[step[2]]):
            self._meet("the last batch of an evaluation")

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        """Validate a batch."""
        found = super().validation_step(*args, **kwargs)
        self._meet_behind(args)
        return found

    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        """Test a batch."""
        found = super().test_step(*args, **kwargs)
        self._meet_behind(args)
        return found

    def barrier(self, *args: Any, **kwargs: Any) -> None:
        """Wait for all processes."""
        self._meet("barrier")
        super().barrier(*args, **kwargs)

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return what process `src` has."""
        self._meet("broadcast")
        return super().broadcast(obj, src)

    def reduce(self, tensor: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the mean over all processes, or the sum."""
        self._meet("reduce")
        return super().reduce(tensor, *args, **kwargs)

    def all_gather(self, tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        """Return what all processes have."""
        self._meet("all_gather")
        return super().all_gather(tensor, *args, **kwargs)


def load_from_checkpoint(kind: Any, path: str | Path, **kwargs: Any) -> Any:
    """Return what ``kind.load_from_checkpoint(path)`` does, also of a folder that a strategy of this door has saved.

    Lightning opens files only. The weights are in a temporary file meanwhile, and in memory twice, as with Lightning.

    Args:
        kind: class of the LightningModule or LightningDataModule.
        path: of the checkpoint, a folder or a file.
        **kwargs: of ``load_from_checkpoint``.

    Raises:
        CheckpointError: there is none, it is damaged, or has quantized weights.
        swap.SwapError: an I/O error.
    """
    if not os.path.isdir(path):
        return kind.load_from_checkpoint(path, **kwargs)
    with tempfile.TemporaryFile() as file:
        trusted = {name: kwargs[name] for name in ("weights_only",) if name in kwargs}
        folder, beside = _find(path)
        torch.save(_as_file(folder, TorchCheckpointIO().load_checkpoint(beside, **trusted)), file)
        file.seek(0)
        return kind.load_from_checkpoint(file, **kwargs)


def _find(path: str | Path) -> tuple[Path, Path]:
    """Return the folder of the engine's checkpoint in a folder, and the file that Lightning keeps with it.

    Raises:
        CheckpointError: there is none.
    """
    folder = Folder(path).find(None)
    inside = folder / FILE
    return folder, inside if inside.exists() else Path(path) / FILE  # there, earlier versions wrote it


def _refuse_frozen_for_now(callbacks: Iterable[Any], module: torch.nn.Module | None) -> None:
    """Refuse to make the engine while a callback has parameters frozen that it will train later.

    Raises:
        ConfigError: there is one, which would end the training when it adds them to the optimizer.
    """
    for each in callbacks:
        if isinstance(each, BaseFinetuning) and module is not None:
            if not all(parameter.requires_grad for parameter in module.parameters()):
                raise ConfigError(
                    "callbacks: expected that what will be trained requires a gradient when the engine is made but got "
                    f"{type(each).__name__}, which freezes parameters before; give the optimizer all of them, and call "
                    "requires_grad_() in on_train_epoch_start of a callback of your own"
                )


def _refuse_url(path: Any) -> None:
    """Refuse a URL, which an engine would take for a folder below the one that the process is in.

    Raises:
        ConfigError: it is one.
    """
    if "://" in str(path):
        raise ConfigError(
            f"dirpath: expected a folder on a file system that is mounted but got {path}; name one, and upload what is "
            "saved there, or pass save_weights_only=True, whose files Lightning writes"
        )


def _is_checkpoint(path: Any) -> bool:
    """Tell whether a folder is at a path where a file is to be; one of this door may be replaced.

    Raises:
        CheckpointError: it is another one.
    """
    if "://" in str(path) or not os.path.isdir(path):
        return False
    with contextlib.suppress(CheckpointError):
        if _find(path)[1].exists():
            return True
    raise CheckpointError(
        f"checkpoint {path}: expected a checkpoint that is replaced, or nothing of this name, but another folder is "
        "there; save to another path, or move it away"
    )


def _remove(path: str | Path) -> None:
    """Delete a file, or a folder with all that is in it; what cannot be deleted stays."""
    shutil.rmtree(path, ignore_errors=True)
    with contextlib.suppress(OSError):
        os.unlink(path)


def _as_file(folder: str | Path, kept: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a file of Lightning's would have: what it `kept` in the folder, with the weights of the engine.

    What hooks have put in their place goes first.
    """
    weights = read_state_dict(folder)
    aliases = {alias: weights[name] for alias, name in kept.get(TIED, {}).items()}
    return {**kept, "state_dict": weights | aliases | kept.get("state_dict", {})}


def _warn_of_uploads(loggers: Iterable[Any]) -> None:
    """Warn of loggers that would upload checkpoints: they look for files."""
    for each in loggers:
        if getattr(each, "_log_model", False):
            logger.warning(
                "%s: log_model uploads no checkpoint, for those of this strategy are folders, and it uploads files; "
                "upload what `python -m offload checkpoint export` writes, or save with save_weights_only=True",
                type(each).__name__,
            )


def _refuse_own_backward(module: Any) -> None:
    """Refuse a module with a backward of its own, where the engine's takes its place.

    Raises:
        ConfigError: it has one.
    """
    if type(module).backward is not LightningModule.backward:
        raise ConfigError(
            f"backward: expected LightningModule's but got one of {type(module).__name__}, which would not be called: "
            "with several processes or float16, the engine's scales the loss and adds gradients; scale the loss in "
            "training_step, or train one process in another dtype"
        )


def _tied(module: torch.nn.Module) -> dict[str, str]:
    """Return the first name of each tensor in a state dict that has several, by its other names."""
    first: dict[int, str] = {}
    names = {name: first.setdefault(id(each), name) for name, each in module.state_dict(keep_vars=True).items()}
    return {name: found for name, found in names.items() if name != found}


def _clipping_handles(plugin: Any, strategy: _Offloading) -> Any:
    """Return a precision plugin that clips gradients that have moved away."""

    class OfHandles(type(plugin)):  # type: ignore[misc]
        def clip_grad_by_value(self, optimizer: Any, clip_val: float) -> None:
            strategy.clip_values(optimizer, clip_val)

        def clip_grad_by_norm(self, optimizer: Any, clip_val: float) -> None:
            handles = handles_of(self.main_params(optimizer))
            if handles is None:
                super().clip_grad_by_norm(optimizer, clip_val)
            else:
                clip_handles(handles, clip_val, 2.0)

    OfHandles.__qualname__ = type(plugin).__qualname__  # the key of its state in checkpoints
    made = copy.copy(plugin)
    made.__class__ = OfHandles
    return made
