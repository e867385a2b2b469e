"""The door of Hugging Face: a mixin for ``transformers.Trainer`` and the trainers of TRL, and a callback.

Owns who does what between trainer and engine: the trainer makes the optimizer and the schedule, divides the loss and
clips; the engine adds gradients, steps, and saves what ``optimizer.pt`` would hold. Private methods that are overridden
here are named in :data:`PRIVATE`, and pinned by a test.
"""

from __future__ import annotations

import dataclasses
import inspect
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from offload.classes import is_a, package_of
from offload.config import Config
from offload.engine import Engine
from offload.errors import ConfigError, StateError
from offload.integrations.accelerate import LossScaling, StayingOptimizer, clip_together, scale_together
from offload.integrations.libraries import is_closed, processes, refuse_other_schedule, refuse_two_sides, require
from offload.module.absent import owner_of
from offload.run_state import drawn_so_far, set_drawn
from offload.several import APART
from offload.stats import Stats

require("transformers", "4.56", door="offload.hf")
import transformers  # noqa: E402

logger = logging.getLogger(__name__)

FOLDER = "offload"  # of the engine's checkpoint, inside the trainer's
STATES, SCHEDULE, ARGUMENTS = "optimizer.pt", "scheduler.pt", "training_args.bin"  # files of transformers

# Private methods of transformers.Trainer that are overridden, with their parameters.
PRIVATE = {
    "_move_model_to_device": ("self", "model", "device"),
    "_wrap_model": ("self", "model", "training", "dataloader"),
    "_save": ("self", "output_dir", "state_dict"),
    "_save_optimizer_and_scheduler": ("self", "output_dir"),
    "_load_from_checkpoint": ("self", "resume_from_checkpoint", "model"),
    "_load_optimizer_and_scheduler": ("self", "checkpoint"),
    "_save_scaler": ("self", "output_dir"),
    "_load_scaler": ("self", "checkpoint"),
}

# Trainers of TRL that call the model equally often in all processes: the others generate.
IN_STEP = ("SFTTrainer", "RewardTrainer", "DPOTrainer")
BETA_REFERS = ("GRPOTrainer", "RLOOTrainer")  # those that load a reference model where beta is not 0

Options = Config | Mapping[str, Any] | str | Path
_Trainer: Any = object  # what the mixin is mixed into


class OffloadTrainerMixin(_Trainer):  # type: ignore[misc]
    """Lets a trainer of transformers or TRL train through an engine: ``class SFT(OffloadTrainerMixin, SFTTrainer)``.

    The engine is made when training or an evaluation begins, around the optimizer that the trainer makes or was given.
    The trainer's arguments decide on precision, accumulation, clipping and the device. A folder of the trainer's
    checkpoints has the engine's checkpoint in place of ``optimizer.pt``; of a PEFT model, whose checkpoints hold
    adapters only, it has the files that it has without this.

    Attributes:
        engine: the engine; None before it is made. ``trainer.engine.close()`` gives the models back.
    """

    engine: Engine | None = None
    _reference_model: Any = None
    _meeting: Any = None  # the hook by which processes meet behind each forward of the engine's module
    _given_optimizer: Any = None  # what the engine's is made of

    def __init__(
        self,
        *args: Any,
        offload: Options | None = None,
        offload_reference: None = None,
        offload_stage: int | str | None = None,
        **kwargs: Any,
    ) -> None:
        """Make the trainer.

        Args:
            *args: of the trainer.
            offload: options of the engine, as :class:`offload.Config`, dict or JSON file. The trainer's arguments give
                `gradient_accumulation_steps`, `gradient_reduction` and `device`. The trainer clips, unless its
                `max_grad_norm` is 0 and the engine has one.
            offload_reference: refused: `offload` has the budgets of the model and its reference model together.
            offload_stage: of ZeRO, where several processes train together, as `stage` of :class:`offload.Engine`; None:
                ``"auto"``, with TRL 1.
            **kwargs: of the trainer.

        Raises:
            ConfigError: an option is unknown, both sides accumulate or clip, or an argument cannot be had together with
                parameters that come and go.
        """
        self._options = Config.load(offload)
        if offload_reference is not None:
            raise ConfigError(
                "offload_reference: expected no budgets for the reference model alone but got some; leave it out, and "
                "add its cpu and nvme to those of offload, whose engine has both models"
            )
        self._stage = offload_stage
        args, kwargs = load_into_host(type(self), args, kwargs)
        super().__init__(*args, **kwargs)

    # --- the trainer's life -----------------------------------------------------------------------------------------

    def create_accelerator_and_postprocess(self) -> None:
        """Make the accelerator; refuse before it what no engine can do.

        Raises:
            ConfigError: see :meth:`__init__`.
        """
        refuse_arguments(self.args, self._options)
        super().create_accelerator_and_postprocess()
        self.accelerator.prepare_model = LeavesReference(self, self.accelerator).prepare_model

    def create_optimizer(self, *args: Any, **kwargs: Any) -> Any:
        """Make the trainer's optimizer, and the engine that takes it over; return the engine's."""
        self._forget_closed()
        self._close_of_other()
        if self.engine is None:
            refuse_other_schedule("optimizers", self.lr_scheduler, [self.optimizer])
            self._open(super().create_optimizer(*args, **kwargs))
        return self.optimizer

    def _wrap_model(self, model: Any, training: bool = True, *args: Any, **kwargs: Any) -> Any:
        """Leave the model as it is: the engine has it, whoever has made the optimizer."""
        if training:
            self._ensure_engine()
        return super()._wrap_model(model, training, *args, **kwargs)

    def _ensure_engine(self) -> None:
        """Make the engine if nobody has: a `create_optimizer` of the user's class may not call the one of this."""
        self._forget_closed()
        self._close_of_other()
        if self.engine is None:
            self._open(self.optimizer)

    def _forget_closed(self) -> None:
        """Make another engine next, of the same optimizer, if the user has closed the one that was there."""
        if self.engine is not None and is_closed(self.engine):
            if self.engine.optimizer is not None and self.engine.module is self.model and not self._has_another():
                self.optimizer = self._given_optimizer
            self._leave()

    def _has_another(self) -> bool:
        """Tell whether the optimizer is not the engine's: a `create_optimizer` may make one at each call."""
        own: Any = None if self.engine is None else self.engine.optimizer
        return self.optimizer is not None and own not in (self.optimizer, getattr(self.optimizer, "optimizer", None))

    def _close_of_other(self) -> None:
        """Close an engine of another model, which model_init has made, or of another optimizer, or of none."""
        if self.engine is None:
            return
        if self.engine.module is not self.model or self.engine.optimizer is None or self._has_another():
            self.engine.close(restore=self.engine.module is self.model or self.engine.reference is not None)
            self._leave()

    def _leave(self) -> None:
        """Have no engine any more."""
        self.engine = None
        if self._meeting is not None:
            self._meeting.remove()

    def _open(self, optimizer: Any) -> None:
        """Make the engine."""
        config, several = engine_config(self.args, self._options), self.args.world_size > 1
        stage = None if not several else APART if optimizer is None else self._stage_of_several()
        self.engine = Engine(self.model, optimizer, config, reference=self._own_reference(), stage=stage)
        if several:
            # This marks it as prepared; else the trainer would have it wrapped in DDP, which adds gradients, too.
            self.accelerator.prepare_model(self.model, evaluation_mode=True)
            if self.engine.plan.request.slices_parameters and self._gathers_behind_forward:
                self._meeting = self.model.register_forward_hook(lambda *_: self._meet("the end of a forward"))
        if self.engine.optimizer is not None:
            try:
                scale_together(self.accelerator, self.engine)
            except ConfigError:
                self.engine.close()
                self._leave()
                raise
            self._given_optimizer = optimizer
            made: Any = self.engine.optimizer
            self.optimizer = StayingOptimizer(made, scaler=self.accelerator.scaler)
            clip_together(self.accelerator, self.engine)
        callbacks = self.callback_handler.callbacks
        for callback in [each for each in callbacks if isinstance(each, OffloadCallback)]:
            callback.follow(self.engine)
            callbacks.remove(callback)
            callbacks.insert(0, callback)  # those that report see its figures

    @property
    def _gathers_behind_forward(self) -> bool:
        """Whether the trainer gathers metrics there, which finds other processes inside theirs."""
        return any(package_of(kind) == "trl" for kind in type(self).__mro__)

    def _stage_of_several(self) -> int | str:
        """Return the stage; refuse slices of parameters where processes cannot meet behind each forward."""
        gathers = self._gathers_behind_forward
        stage = self._stage or (1 if gathers else "auto")
        if gathers and stage not in (1, 2) and not any(is_a(self, "trl", name) for name in IN_STEP):
            raise ConfigError(
                f"offload_stage: expected 1 or 2 of {type(self).__name__} in several processes but got {stage!r}: with "
                f"slices of parameters they have to call the model equally often, as {', '.join(IN_STEP)} do; pass "
                "offload_stage=1"
            )
        return stage

    def _meet(self, where: str, failure: Exception | None = None) -> None:
        """Wait for the other processes, and send what they need; raise `failure`, and tell them."""
        if self.engine is not None and self.args.world_size > 1:
            self.engine.wait_for_ranks(where, failure)
        elif failure is not None:
            raise failure

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate a batch, and wait for those of other processes: the trainer gathers what comes of it."""
        found = super().prediction_step(*args, **kwargs)
        self._meet("prediction_step")
        return found

    def evaluation_loop(self, *args: Any, **kwargs: Any) -> Any:
        """Evaluate or predict through the engine; without a data set to train on, through one that only evaluates.

        So it does if the user has closed the engine.
        """
        closed = self.engine is not None and is_closed(self.engine)
        self._forget_closed()
        if self.engine is None:
            if self.train_dataset is None or closed:
                self._open(None)
            else:
                self.create_optimizer()
                self._ensure_engine()
        return super().evaluation_loop(*args, **kwargs)

    def compute_ref_log_probs(self, *args: Any, **kwargs: Any) -> Any:
        """Ask the reference model through the engine: before training, through one that only evaluates."""
        self._forget_closed()
        if self.engine is None:
            self._open(None)
        return super().compute_ref_log_probs(*args, **kwargs)

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """Leave the model where it is: the engine moves its parameters."""

    # --- reference models of TRL ------------------------------------------------------------------------------------

    @property
    def ref_model(self) -> Any:
        """The reference model of DPO and GRPO, in the model's engine; None where there is none."""
        return self._reference_model

    @ref_model.setter
    def ref_model(self, model: Any) -> None:
        if model is not None and model is not self._reference_model and self.engine is not None:
            raise StateError(
                "ref_model: expected the reference model before the engine is made but got one afterwards; give it to "
                "the trainer's constructor"
            )
        self._reference_model = model

    def _own_reference(self) -> Any:
        """Return the reference model; None where there is none, or an engine of the user's own has it."""
        first = None if self._reference_model is None else next(iter(self._reference_model.parameters()), None)
        return None if first is None or owner_of(first) is not None else self._reference_model

    def add_callback(self, callback: Any) -> None:
        """Add a callback; the one that mixes the model into its reference model does so unit by unit."""
        if is_a(callback, "trl", "SyncRefModelCallback"):
            callback = ReferenceSync(self)
        super().add_callback(callback)

    # --- checkpoints ------------------------------------------------------------------------------------------------

    @property
    def _saves_adapters(self) -> bool:
        return is_a(self.model, "peft", "PeftModel")

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save weights, by the first of several processes; the others wait, and send what it needs."""
        failure: Exception | None = None
        try:
            super().save_model(output_dir, _internal_call)
        except Exception as error:
            failure = error
        self._meet("save_model", failure)

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """Save weights, one file in memory at a time."""
        known = is_a(self.model, "transformers", "PreTrainedModel") or self._saves_adapters
        if self.engine is None or is_closed(self.engine) or state_dict is not None or not known:
            super()._save(output_dir, state_dict)
            return
        if not self.args.should_save:
            return
        folder = self.args.output_dir if output_dir is None else output_dir
        os.makedirs(folder, exist_ok=True)
        self.engine.save_pretrained(folder)
        tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder)
        torch.save(self.args, os.path.join(folder, ARGUMENTS))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """Save the engine's checkpoint instead of ``optimizer.pt``, and the schedule as ever."""
        if self.engine is None:
            super()._save_optimizer_and_scheduler(output_dir)
            return
        states = None
        if self._saves_adapters:
            states = self.optimizer.state_dict()  # of all processes, whose parts it has
        else:
            self.engine.save_checkpoint(os.path.join(output_dir, FOLDER), keep=1)
        if self.args.should_save:
            if states is not None:
                torch.save(states, os.path.join(output_dir, STATES))
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULE))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights; not yet those of the engine's checkpoint, which come with the optimizer's states."""
        if not os.path.isdir(os.path.join(resume_from_checkpoint, FOLDER)):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Load the engine's checkpoint where there is one, and the schedule as ever."""
        folder = None if checkpoint is None else os.path.join(checkpoint, FOLDER)
        if self.engine is None or checkpoint is None or folder is None or not os.path.isdir(folder):
            super()._load_optimizer_and_scheduler(checkpoint)
            return
        drawn = drawn_so_far()  # the trainer sets its generators itself, after the batches that it skips
        self.engine.load_checkpoint(folder)
        set_drawn(drawn)
        schedule = os.path.join(checkpoint, SCHEDULE)
        if os.path.isfile(schedule):
            self.lr_scheduler.load_state_dict(torch.load(schedule, weights_only=True))

    def _save_scaler(self, output_dir: str) -> None:
        """Write no file of the loss scale where the engine has it: the plain trainer would fail at an empty one."""
        if not isinstance(self.accelerator.scaler, LossScaling):
            super()._save_scaler(output_dir)

    def _load_scaler(self, checkpoint: str | None) -> None:
        """Load a file of the loss scale where there is a scaler for it; earlier versions have left empty ones."""
        if not isinstance(self.accelerator.scaler, (LossScaling, type(None))):
            super()._load_scaler(checkpoint)


# --- between the arguments of both ------------------------------------------------------------------------------------


def refuse_arguments(args: Any, options: Config) -> None:
    """Refuse arguments of a trainer with which no engine can train, and options that the trainer's arguments give.

    Args:
        args: the ``TrainingArguments``.
        options: for the engine.

    Raises:
        ConfigError: there is one.
    """
    for name in ("torch_compile", "fsdp", "deepspeed", "fp16_full_eval", "bf16_full_eval"):
        value = getattr(args, name, None)
        if value:
            remedy = 'pass offload={"dtype": ...}' if name.endswith("eval") else "leave it out"
            raise ConfigError(
                f"{name}: expected parameters that the engine alone places and casts but got {name}={value!r}; {remedy}"
            )
    if args.load_best_model_at_end and args.save_strategy == "no":
        raise ConfigError(
            "load_best_model_at_end: expected checkpoints to choose from but got save_strategy='no'; pass the same "
            "save_strategy and eval_strategy"
        )
    if args.world_size != processes():
        raise ConfigError(
            f"use_cpu: expected arguments of {processes()} processes but got those of {args.world_size}, which would "
            "train apart; pass use_cpu=True where there is no GPU"
        )
    if args.n_gpu > 1:
        raise ConfigError(
            f"n_gpu: expected one device but got {args.n_gpu}, over which the trainer spreads copies of the model "
            "(DataParallel); set CUDA_VISIBLE_DEVICES to one of them"
        )
    refuse_two_sides(
        options,
        accumulates=f"gradient_accumulation_steps={args.gradient_accumulation_steps}",
        clips=f"max_grad_norm={args.max_grad_norm}" if args.max_grad_norm else None,
    )
    if options.device is not None and torch.device(options.device) != torch.device(args.device):
        raise ConfigError(
            f"device: expected the trainer's, {args.device}, but got {options.device}; leave it out of offload"
        )


def engine_config(args: Any, options: Config) -> Config:
    """Return options with what the trainer's arguments say."""
    return dataclasses.replace(
        options,
        device=str(args.device),
        gradient_accumulation_steps=args.gradient_accumulation_steps,
        gradient_reduction="sum",  # the trainer has divided the loss: by tokens, where it can
    )


def load_into_host(kind: type, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Let a trainer of TRL load models into host memory: beside a GPU, it would fill that.

    Args:
        kind: the trainer's class.
        args: of its constructor.
        kwargs: of its constructor.

    Returns:
        Both, with the trainer's arguments where they were left out: those that TRL would take.
    """
    bases = [each for each in kind.__mro__ if package_of(each) == "trl" and each.__name__.endswith("Trainer")]
    if not bases:
        return args, kwargs
    base = bases[0]
    given = {**dict(zip(inspect.signature(base).parameters, args, strict=False)), **kwargs}
    model, name = given.get("model"), base.__name__.removesuffix("Trainer")
    config: Any = given.get("args")
    made = getattr(sys.modules["trl"], f"{name}Config", None)
    if config is None and made is not None:
        path = model if isinstance(model, str) else str(getattr(getattr(model, "config", None), "_name_or_path", ""))
        config = made(f"{path.split('/')[-1]}-{name}")
        args, kwargs = (), {**given, "args": config}
    if hasattr(config, "model_init_kwargs") and (isinstance(model, str) or _loads_reference(base, given, config)):
        config.model_init_kwargs = {"device_map": None, **(config.model_init_kwargs or {})}
    return args, kwargs


def _loads_reference(base: type, given: Mapping[str, Any], config: Any) -> bool:
    """Tell whether a trainer of TRL loads a reference model beside a model that it was given."""
    adapts = given.get("peft_config") is not None or is_a(given.get("model"), "peft", "PeftModel")
    if adapts or not hasattr(sys.modules[base.__module__], "create_model_from_path"):  # others load none, or for no GPU
        return False
    if "ref_model" in inspect.signature(base).parameters:
        return given.get("ref_model") is None and not getattr(config, "precompute_ref_log_probs", False)
    return base.__name__ in BETA_REFERS and bool(getattr(config, "beta", 0.0))


class LeavesReference:
    """Has what an accelerator's ``prepare_model`` is where an engine moves the parameters of a reference model."""

    def __init__(self, trainer: OffloadTrainerMixin, accelerator: Any) -> None:
        """Prepare.

        Args:
            trainer: has the reference model, before there is an engine.
            accelerator: moves models as a whole.
        """
        self._trainer = trainer
        self._without_engine = accelerator.prepare_model

    def prepare_model(
        self, model: Any, device_placement: bool | None = None, evaluation_mode: bool = False, **kwargs: Any
    ) -> Any:
        """Prepare a model as ever, but leave the reference model where it is."""
        placement = False if model is self._trainer.ref_model else device_placement
        return self._without_engine(model, device_placement=placement, evaluation_mode=evaluation_mode, **kwargs)


# --- callbacks --------------------------------------------------------------------------------------------------------


class ReferenceSync(transformers.TrainerCallback):  # type: ignore[misc]
    """Mixes the model into its reference model every so many steps, as TRL does, unit by unit."""

    def __init__(self, trainer: OffloadTrainerMixin) -> None:
        self._trainer = trainer

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Mix, where it is time to."""
        if state.global_step % args.ref_model_sync_steps != 0:
            return
        engine, alpha = self._trainer.engine, args.ref_model_mixup_alpha
        if engine is None or engine.reference is None:
            raise StateError(
                "sync_ref_model: expected a reference model in the trainer's engine but got one in another; pass the "
                "reference model as it is"
            )
        pairs = zip(engine.reference.parameters(), engine.module.parameters(), strict=True)
        sources = {id(target): source for target, source in pairs}

        def mix(name: str, target: torch.nn.Parameter) -> None:
            source = sources[id(target)]
            with engine.gather(source):
                target.mul_(1.0 - alpha).add_(source, alpha=alpha)

        engine.apply(mix, engine.reference)


class OffloadCallback(transformers.TrainerCallback):  # type: ignore[misc]
    """Adds what the engine does to each log: bytes per tier, stalls, the drive's speed and wear since the last log.

    Of a trainer with :class:`OffloadTrainerMixin`: ``callbacks=[OffloadCallback()]``. Of another one, give it the
    engine, and callbacks before it (TensorBoard's) do not see its figures.
    """

    def __init__(self, engine: Engine | None = None) -> None:
        """Prepare.

        Args:
            engine: whose figures; None: the trainer says it.
        """
        self._engine = engine
        self._last: Stats | None = None

    def follow(self, engine: Engine) -> None:
        """Log the figures of another engine from now on."""
        self._engine, self._last = engine, None

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """Add figures to `logs` and to the trainer's history."""
        if self._engine is None or logs is None or "loss" not in logs:
            return
        stats = self._engine.stats()
        found = figures(stats, self._last)
        self._last = stats
        logs.update(found)
        if state.log_history:
            state.log_history[-1].update(found)


def figures(now: Stats, before: Stats | None) -> dict[str, float]:
    """Return what a log gets to see of an engine.

    Args:
        now: its snapshot.
        before: the one at the last log; None at the first.

    Returns:
        ``offload/..._bytes`` per tier, used and at the peak; stalls, their seconds, seconds of waits for activations
        and the drive's GB/s since `before`; bytes written to the drive since the beginning.
    """
    found: dict[str, float] = {}
    for tier, size_bytes in now.used_bytes.items():
        found[f"offload/{tier}_bytes"] = size_bytes
        found[f"offload/{tier}_peak_bytes"] = now.peak_bytes[tier]
    stalled = now.stalls + now.misses - (before.stalls + before.misses if before else 0)
    found["offload/stalls"] = stalled
    for name in ("stall_seconds", "activation_stall_seconds"):
        found[f"offload/{name}"] = getattr(now, name) - (getattr(before, name) if before else 0.0)
    for link in ("nvme_read", "nvme_write"):
        size_bytes = now.links[link].bytes - (before.links[link].bytes if before else 0)
        seconds = now.links[link].seconds - (before.links[link].seconds if before else 0.0)
        found[f"offload/{link}_gb_s"] = size_bytes / seconds / 1e9 if seconds > 0 else 0.0
    found["offload/nvme_written_bytes"] = now.links["nvme_write"].bytes
    return found


class OffloadTrainer(OffloadTrainerMixin, transformers.Trainer):  # type: ignore[misc]
    """``transformers.Trainer`` through an engine: ``OffloadTrainer(model=..., args=..., offload={...})``."""
