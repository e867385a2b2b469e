"""The engine that ``deepspeed.initialize`` returns: an :class:`offload.Engine` with the names that scripts call.

Owns the counts that DeepSpeed keeps and the schedule's steps. What is saved and loaded goes through the project's
checkpoints (:mod:`offload.integrations.deepspeed.checkpoints`). Next: :mod:`offload.integrations.deepspeed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import itertools
import logging
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn
from torch.utils.data import DataLoader

from offload.checkpoint.foreign.found import Facts
from offload.engine import Engine
from offload.errors import ConfigError, StateError, did_you_mean
from offload.importing import import_checkpoint
from offload.integrations.deepspeed.checkpoints import load_run, save_run
from offload.integrations.deepspeed.config import Translation
from offload.integrations.deepspeed.data import make_loader
from offload.integrations.deepspeed.full_values import FullValues
from offload.integrations.deepspeed.schedules import make_schedule
from offload.replacing import replacing, save_torch
from offload.spec import OptimizerSpec

logger = logging.getLogger(__name__)
_T = TypeVar("_T")

# What DeepSpeed's engine has and this one refuses: the remedy.
REFUSED = {
    "compile": "parameters come and go, which a compiled module does not expect; leave the call out",
    "set_train_batch_size": "room for accumulation is planned; set gradient_accumulation_steps in the configuration",
    "set_gradient_accumulation_boundary": "set gradient_accumulation_steps in the configuration, call step() each time",
    "allreduce_gradients": "backward adds the gradients of all processes; leave the call out",
    "scale": "call engine.backward(loss), which scales it",
    "monitor": "log engine.stats(), engine.get_lr() and engine.get_global_grad_norm() yourself",
    "timers": "see engine.stats(), or torch.profiler",
    "tput_timer": "see engine.stats(), or torch.profiler",
    "offload_states": "states are where the plan has them; leave the call out",
    "reload_states": "states are where the plan has them; leave the call out",
    "zero_offload_optimizer": "print(engine.plan) says where states are",
    "zero_offload_param": "print(engine.plan) says where parameters are",
    "load_module_state_dict": "call engine.load_state_dict with what the checkpoint has in 'module'",
    "get_batch_info": "call engine.train_batch_size() and the like",
    "set_custom_curriculum_learning_schedule": "choose the data in the script",
    "cuda": "the engine has its device; leave the call out, or pass device= to initialize",
    "cpu": "the engine has its device; leave the call out, or pass device= to initialize",
    "half": 'set "fp16": {"enabled": true} in the configuration',
    "bfloat16": 'set "bf16": {"enabled": true} in the configuration',
    "float": "leave bf16 and fp16 out of the configuration",
    "double": "parameters are float32, bfloat16 or float16; leave the call out",
}
_engines: weakref.WeakValueDictionary[int, DeepSpeedEngine] = weakref.WeakValueDictionary()  # by when they were made
_numbers = itertools.count()


class MissingError(StateError, AttributeError):
    """Something of DeepSpeed's engine that this one has not; the text has the remedy."""


class DeepSpeedEngine(Engine):
    """An engine with DeepSpeed's names, made by :func:`offload.deepspeed.initialize`.

    What neither has is looked for in the module, as in DeepSpeed: ``engine.generate`` is ``engine.module.generate``.

    Attributes:
        translation: what the configuration asks for; printable.
        lr_scheduler: stepped after each optimizer step that was taken; None where there is none.
        training_dataloader: of ``training_data``; None where there is none.
        global_samples: seen by the optimizer steps so far.
        local_rank, global_rank: of this process; 0 where there is one.
        world_size, dp_world_size: how many there are.
        mp_world_size: how many have parts of one model: 1.
    """

    mp_world_size = 1

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSpec | torch.optim.Optimizer | None,
        translation: Translation,
        *,
        lr_scheduler: Any = None,
        training_data: Any = None,
        collate_fn: Any = None,
    ) -> None:
        """Make the engine; see :func:`offload.deepspeed.initialize`."""
        super().__init__(model, optimizer, translation.config, stage=translation.slices)
        self.translation = translation
        self.local_rank = int(os.environ.get("LOCAL_RANK", "0"))
        self.global_rank = self._parts.ranks.rank
        self.world_size = self.dp_world_size = self._parts.ranks.world
        self.global_samples = 0
        self._batch = translation.batch
        self._full = FullValues(self._parts)
        self._collate = collate_fn
        self._inside_no_sync = False
        self._was_taken = False
        self._is_zero_told = False
        try:
            self._refuse_left_out()
            self.lr_scheduler = make_schedule(self.optimizer, lr_scheduler, translation.scheduler)
            self.training_dataloader = None if training_data is None else self.deepspeed_io(training_data)
        except BaseException:
            self.close()
            raise
        _engines[next(_numbers)] = self

    def _refuse_left_out(self) -> None:
        """Refuse gradients that no param group has: norm and clipping count them, and DeepSpeed's do not.

        Raises:
            ConfigError: there would be some.
        """
        if self.optimizer is None:
            return
        trained = {id(parameter) for group in self.optimizer.param_groups for parameter in group["params"]}
        left = [name for name, one in self.module.named_parameters() if one.requires_grad and id(one) not in trained]
        if left:
            raise ConfigError(
                f"model_parameters: expected all parameters that require a gradient but {len(left)} are left out, such "
                f"as {', '.join(left[:3])}; the norm of gradients would count theirs, so freeze what model_parameters "
                "or the optimizer leaves out: requires_grad_(False)"
            )

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the module.

        Raises:
            MissingError: it is one of DeepSpeed's engine that is not here.
        """
        if name in REFUSED:
            raise MissingError(f"engine.{name}: expected one of those that are here; {REFUSED[name]}")
        module = self.__dict__.get("module")
        if module is not None and not name.startswith("__"):
            with contextlib.suppress(AttributeError):
                return getattr(module, name)
        known = [one for one in dir(type(self)) if not one.startswith("_")]
        raise AttributeError(f"engine.{name}: neither the engine nor the module has it{did_you_mean(name, known)}")

    # --- training ---------------------------------------------------------------------------------------------------

    def backward(  # type: ignore[override]
        self, loss: torch.Tensor, retain_graph: bool = False, scale_wrt_gas: bool = True, **kwargs: Any
    ) -> torch.Tensor:
        """Run backward from `loss`, which is not divided by the number of accumulation steps.

        Args:
            loss: scalar tensor.
            retain_graph: as in ``torch.Tensor.backward``.
            scale_wrt_gas: average over the accumulation; False only adds.
            **kwargs: passed to ``torch.Tensor.backward``.

        Returns:
            The loss, divided by the number of accumulation steps where `scale_wrt_gas`.

        Raises:
            NonFiniteError, StateError: see :meth:`offload.Engine.backward`.
        """
        steps = self._batch.accumulation
        if retain_graph:
            kwargs["retain_graph"] = True
        super().backward(loss if scale_wrt_gas or steps == 1 else loss * steps, **kwargs)
        return (loss / steps if scale_wrt_gas else loss).detach()

    def step(self, lr_kwargs: Mapping[str, Any] | None = None) -> bool:
        """Close a micro-batch; at the end of an accumulation, step the optimizer, and then the schedule.

        Where float16 gradients overflowed, neither steps.

        Returns:
            True where parameters were updated.

        Raises:
            ConfigError, NonFiniteError, StateError: see :meth:`offload.Engine.step`; or inside :meth:`no_sync`.
        """
        if self._inside_no_sync:
            raise StateError("step: expected to be outside of no_sync() but got a call inside; leave the block first")
        ends = self.is_gradient_accumulation_boundary()
        self._was_taken = False
        self._was_taken = super().step()
        if self._was_taken and self.lr_scheduler is not None:
            self.lr_scheduler.step(**(lr_kwargs or {}))
        if ends:
            self.global_samples += self._batch.train
            every, number = self.translation.steps_per_print, self.global_steps
            if every and number % every == 0 and self.global_rank == 0:
                logger.info("step=%d, skipped=%d, lr=%s", number, self.skipped_steps, self.get_lr())
        return self._was_taken

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients; inside of an accumulation do nothing, as DeepSpeed with ZeRO, which has them elsewhere.

        The optimizer's ``zero_grad`` does the same. There, ``offload.Engine.zero_grad(engine)`` forgets them.

        Args:
            set_to_none: see ``offload.Engine.zero_grad``.

        Raises:
            StateError: the engine is closed or asleep.
        """
        done = 0 if self._step is None else self._step.micro_batches.done
        if not done:
            super().zero_grad(set_to_none)
        elif not self._is_zero_told:
            self._is_zero_told = True
            logger.warning(
                "zero_grad: leaves the gradients of %d micro-batches of %d alone, as DeepSpeed with ZeRO; "
                "offload.Engine.zero_grad(engine) drops them. This is said once",
                done,
                self._batch.accumulation,
            )

    def was_step_applied(self) -> bool:
        """Tell whether the last :meth:`step` has updated parameters."""
        return self._was_taken

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Add gradients of several backward passes; :meth:`step` is refused inside.

        The passes do not count for the accumulation, as in DeepSpeed. Several processes add theirs in each pass.

        Raises:
            StateError: this is inside another one.
        """
        if self._inside_no_sync:
            raise StateError("no_sync: expected to be outside of another one; use one block")
        self._inside_no_sync = True
        try:
            yield
        finally:
            self._inside_no_sync = False

    coalesce_grad_reduction = no_sync

    def get_global_grad_norm(self) -> float | None:
        """Return the global gradient norm of the last step, before clipping; None before the first step."""
        return None if self._step is None else self._step.grad_norm

    @property
    def global_steps(self) -> int:
        """Optimizer steps so far, skipped ones among them."""
        return self._parts.steps.run.steps + self.skipped_steps

    @property
    def skipped_steps(self) -> int:
        """Steps that were skipped because float16 gradients overflowed."""
        return self._parts.steps.run.skipped

    @property
    def micro_steps(self) -> int:
        """Micro-batches so far."""
        done = 0 if self._step is None else self._step.micro_batches.done
        return self.global_steps * self._batch.accumulation + done

    @property
    def cur_scale(self) -> float:
        """Current loss scale; 1.0 unless float16 is trained."""
        return self.loss_scale

    def get_lr(self) -> list[float]:
        """Return the learning rate of each param group."""
        return self._of_groups("lr")

    def get_mom(self) -> list[Any]:
        """Return the momentum, or betas, of each param group."""
        groups = [] if self.optimizer is None else self.optimizer.param_groups
        return [group.get("momentum", group.get("betas", 0.0)) for group in groups]

    def _of_groups(self, option: str) -> list[Any]:
        return [] if self.optimizer is None else [group.get(option, 0.0) for group in self.optimizer.param_groups]

    # --- what the configuration says --------------------------------------------------------------------------------

    def train_batch_size(self) -> int:
        """Return the samples per optimizer step."""
        return self._batch.train

    def train_micro_batch_size_per_gpu(self) -> int:
        """Return the samples per micro-batch."""
        return self._batch.micro

    def gradient_accumulation_steps(self) -> int:
        """Return the micro-batches per optimizer step."""
        return self._batch.accumulation

    def set_train_micro_batch_size(self, micro_batch_size: int) -> None:
        """Note that micro-batches have another size from now on; their number per step stays."""
        steps = self._batch.accumulation
        train = micro_batch_size * steps * self._batch.world
        self._batch = dataclasses.replace(self._batch, micro=micro_batch_size, train=train)

    def gradient_clipping(self) -> float:
        """Return the norm to clip to; 0.0 where nothing is clipped."""
        return self.config.max_grad_norm or 0.0

    def zero_optimization_stage(self) -> int:
        """Return the stage that the configuration asks for. Whatever it is, everything can be offloaded."""
        return self.translation.stage

    def zero_optimization(self) -> bool:
        """Tell whether the configuration asks for a stage above 0."""
        return self.translation.stage > 0

    def zero_optimization_partition_gradients(self) -> bool:
        """Tell whether the configuration asks for stage 2 or 3."""
        return self.translation.stage >= 2

    def zero_optimization_partition_weights(self) -> bool:
        """Tell whether the configuration asks for stage 3."""
        return self.translation.stage == 3

    def zero_gather_16bit_weights_on_model_save(self) -> bool:
        """Return True, whatever the configuration says: :meth:`save_16bit_model` always gathers."""
        return True

    def steps_per_print(self) -> float | None:
        """Return after how many steps there is a line in the log; None where there is none."""
        return self.translation.steps_per_print

    def get_data_parallel_rank(self) -> int:
        """Return the number of this process."""
        return self.global_rank

    def fp16_enabled(self) -> bool:
        """Tell whether the parameters are cast to float16."""
        return self.config.dtype == "float16"

    def bfloat16_enabled(self) -> bool:
        """Tell whether the parameters are cast to bfloat16."""
        return self.config.dtype == "bfloat16"

    def dynamic_loss_scale(self) -> bool:
        """Tell whether the loss scale moves."""
        return self.translation.is_dynamic

    def optimizer_name(self) -> str | None:
        """Return the name of the optimizer's class, or what the configuration calls it."""
        section = self.translation.optimizer
        if section is not None:
            return section.type
        return None if self.optimizer is None else self.optimizer.made_of

    def scheduler_name(self) -> str | None:
        """Return what the configuration calls the schedule."""
        return None if self.translation.scheduler is None else self.translation.scheduler.type

    # --- the module's own -------------------------------------------------------------------------------------------

    def to(self, *args: Any, **kwargs: Any) -> DeepSpeedEngine:
        """Return the engine, where it is there already.

        Raises:
            StateError: another device or dtype is asked for.
        """
        dtype = next((one.dtype for one in self.module.parameters()), torch.float32)
        there = torch.empty(0, dtype=dtype, device=self.device)
        asked = there.to(*args, **kwargs)
        if (asked.device, asked.dtype) != (there.device, dtype):
            raise StateError(
                f"to: expected {there.device} and {dtype}, where the engine computes, but got {asked.device} and "
                f"{asked.dtype}; pass device= to initialize, and set bf16 or fp16 in the configuration"
            )
        return self

    def destroy(self) -> None:
        """Free all tiers: :meth:`close`."""
        self.close()

    def empty_partition_cache(self) -> None:
        """Do nothing: what was fetched stays within the device budget, and makes room for what comes."""

    def deepspeed_io(
        self,
        dataset: Any,
        batch_size: int | None = None,
        route: str = "train",
        pin_memory: bool = True,
        data_sampler: Any = None,
        collate_fn: Any = None,
        num_local_io_workers: int | None = None,
    ) -> DataLoader[Any]:
        """Return a loader over a dataset; see :func:`offload.integrations.deepspeed.data.make_loader`.

        Args:
            dataset: of torch.
            batch_size: None: that of a micro-batch.
            route: ``"train"`` shuffles; ``"eval"`` and ``"predict"`` do not.
            pin_memory: where the device cannot use ordinary memory.
            data_sampler: None: DeepSpeed's order.
            collate_fn: None: that of ``initialize``.
            num_local_io_workers: None: two.

        Raises:
            ConfigError: it is no dataset.
        """
        return make_loader(
            dataset,
            self._batch.micro if batch_size is None else batch_size,
            shuffle=route == "train",
            pin_memory=pin_memory and not self._parts.device.addressable,
            drop_last=self.translation.drop_last,
            sampler=data_sampler,
            collate_fn=self._collate if collate_fn is None else collate_fn,
            workers=num_local_io_workers,
            rank=self.global_rank,
            world=self.world_size,
        )

    # --- one parameter ----------------------------------------------------------------------------------------------

    def has(self, parameter: object) -> bool:
        """Tell whether a parameter is one of the open engine's."""
        return not self._life.closed and bool(self._parts.hooks.binding.places_of(parameter))

    def read_full(self, parameter: nn.Parameter, state: str | None = None) -> torch.Tensor | None:
        """Return a copy of a parameter's fp32 master, or of a state; None where there is none (yet).

        Several processes call this together.

        Args:
            parameter: of the engine.
            state: ``exp_avg`` and the like; None: the master.
        """
        return self._full.read(self._require_open(), parameter, state)

    def write_full(self, parameter: nn.Parameter, value: torch.Tensor, state: str | None = None) -> None:
        """Let a parameter's master, or a state, have other elements; several processes call this together.

        Args:
            parameter: of the engine.
            value: of the parameter's shape.
            state: ``exp_avg`` and the like; None: the master, whose rounding is the parameter.

        Raises:
            ConfigError: the shape does not fit.
            StateError: there is no such state, or not yet.
        """
        self._full.write(self._require_open(), parameter, value, state)

    def take_from(self, rank: int, parameters: Iterable[nn.Parameter], error: BaseException | None) -> None:
        """Let gathered parameters have the elements that they have on one rank; nothing where there is one.

        Args:
            rank: whose elements.
            parameters: of the engine, gathered to be modified.
            error: why this rank has none; all ranks learn of it.

        Raises:
            RanksError: another rank has an error.
        """
        if self.world_size == 1:
            return
        self.wait_for_ranks("zero.GatheredParameters", error)
        for parameter in parameters:
            torch.distributed.broadcast(parameter.detach(), rank)

    # --- saving and loading -----------------------------------------------------------------------------------------

    def save_checkpoint(  # type: ignore[override]
        self,
        save_dir: str | Path,
        tag: object = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
        *,
        keep: int | None = None,
    ) -> bool:
        """Save everything that decides on the next step, with the schedule, in the project's format.

        Args:
            save_dir: of the checkpoints; made where it is missing.
            tag: None: ``global_step`` and the number of steps.
            client_state: nested dicts, lists, tuples, numbers, texts, bytes and tensors.
            save_latest: let ``latest`` name it.
            exclude_frozen_parameters: has to be False: they are part of the model.
            keep: so many checkpoints stay; None: all.

        Returns:
            True.

        Raises:
            CheckpointError, StateError, swap.SwapError: see :meth:`offload.Engine.save_checkpoint`.
        """
        if exclude_frozen_parameters:
            raise ConfigError("exclude_frozen_parameters: expected False but got True; adapters: save_pretrained")
        state = save_run(self.lr_scheduler, self.global_samples, client_state or {})
        name = f"global_step{self.global_steps}" if tag is None else str(tag)
        self._checkpoints.save(save_dir, tag=name, client_state=lambda: state, keep=keep, latest=save_latest)
        return True

    def load_checkpoint(  # type: ignore[override]
        self,
        load_dir: str | Path,
        tag: object = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: object = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Load what :meth:`save_checkpoint` has saved, or DeepSpeed with ZeRO-1, 2 or 3.

        Args:
            load_dir: of the checkpoints.
            tag: None: what ``latest`` names.
            load_module_strict: refuse what is missing or left over.
            load_optimizer_states: False begins them anew, whatever optimizer has saved.
            load_lr_scheduler_states: False leaves the schedule as it is.
            load_module_only: weights alone, whatever optimizer has saved; steps, optimizer, schedule and random numbers
                stay, gradients are dropped.
            custom_load_fn: has to be None.

        Returns:
            The folder, and the ``client_state``; (None, None), with a warning, where `tag` is None and there is no
            checkpoint.

        Raises:
            CheckpointError, ConfigError, StateError: see :meth:`offload.Engine.load_checkpoint`.
        """
        if custom_load_fn is not None:
            raise ConfigError("custom_load_fn: expected None; pass engine.load_state_dict what it makes")
        loaded = load_run(
            self,
            self._parts.steps.run,
            load_dir,
            None if tag is None else str(tag),
            strict=load_module_strict,
            module_only=load_module_only,
            states=load_optimizer_states and not load_module_only,
            drop=super().zero_grad,
        )
        if loaded is None:
            return None, None
        if not load_module_only:
            seen = self.global_steps * self._batch.train
            self.global_samples = seen if loaded.samples is None else loaded.samples
            if load_lr_scheduler_states and self.lr_scheduler is not None and loaded.schedule is not None:
                self.lr_scheduler.load_state_dict(loaded.schedule)
        return str(loaded.path), loaded.client_state

    def resume_from(self, directory: Path, *, strict: bool, states: bool) -> Any:
        """Load a checkpoint of the project as :meth:`offload.Engine.load_checkpoint` does; returns its client state.

        Without `states`, the optimizer stays as it is, whatever it was saved with.
        """
        return self._checkpoints.load(directory, tag=None, strict=strict, states=states)

    def import_from(self, path: Path, *, strict: bool, states: bool) -> Facts:
        """Load another program's checkpoint as :meth:`offload.Engine.import_checkpoint` does, `states` as above."""
        return import_checkpoint(path, self.module, self._parts, self._life, strict=strict, states=states)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str = "pytorch_model.bin", exclude_frozen_parameters: bool = False
    ) -> bool:
        """Save the module's state dict, 16-bit parameters as such, by ``torch.save``; all of it is in memory meanwhile.

        For models larger than memory: :meth:`offload.Engine.save_pretrained`. Several processes call this together; the
        first one writes.

        Returns:
            True, whatever ``stage3_gather_16bit_weights_on_model_save`` says.

        Raises:
            ConfigError, OSError: it cannot be written. A file that was there before is as it was.
            RanksError: the first process could not write it.
        """

        def save() -> None:
            state = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
            Path(save_dir).mkdir(parents=True, exist_ok=True)
            with replacing(Path(save_dir, save_filename), "save_16bit_model", binary=True) as stream:
                save_torch(state, stream)

        self._in_first("save_16bit_model", save)
        return True

    save_fp16_model = save_16bit_model

    def module_state_dict(self, *, exclude_frozen_parameters: bool = False) -> dict[str, torch.Tensor]:
        """Return :meth:`offload.Engine.state_dict`, without frozen parameters if asked for."""
        state = self.state_dict()
        if exclude_frozen_parameters:
            for name, parameter in self.module.named_parameters(remove_duplicate=False):
                if not parameter.requires_grad:
                    state.pop(name, None)
        return state

    def _zero3_consolidated_16bit_state_dict(
        self, exclude_frozen_parameters: bool = False
    ) -> dict[str, torch.Tensor] | None:
        """Return :meth:`module_state_dict` in the first process, None in others; several call this together.

        Scripts, and Accelerate, call DeepSpeed's by this name before they save a model.
        """
        return self._in_first(
            "_zero3_consolidated_16bit_state_dict",
            lambda: self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters),
        )

    def _in_first(self, where: str, work: Callable[[], _T]) -> _T | None:
        """Do something in the first process; the others wait, and learn of its error. They get None."""
        done: _T | None = None
        failure: BaseException | None = None
        if self.global_rank == 0:
            try:
                done = work()
            except (OSError, ConfigError) as error:
                failure = error
        self.wait_for_ranks(where, failure)
        return done


def engine_of(parameter: object) -> DeepSpeedEngine | None:
    """Return the open engine that has a parameter."""
    return next((engine for engine in _engines.values() if engine.has(parameter)), None)


def meet(where: str) -> None:
    """Wait for all processes in each engine with slices of parameters: others may still need those of this one.

    Of several engines, those that nobody has any more are forgotten first, in all processes alike.

    Args:
        where: the same in all processes; for errors.

    Raises:
        RanksError, StateError: see :meth:`offload.Engine.wait_for_ranks`.
    """
    if len(_sliced()) > 1:
        gc.collect()  # one that was dropped is in cycles, and goes at other times in other processes
    for engine in _sliced():
        engine.wait_for_ranks(where)


def _sliced() -> list[DeepSpeedEngine]:
    """Return the engines with slices of parameters that are open and awake, in the order in which they were made."""
    open_ones = (engine for _, engine in sorted(_engines.items()) if not (engine._life.closed or engine._life.asleep))
    return [engine for engine in open_ones if engine.plan.request.slices_parameters]
