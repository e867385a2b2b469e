"""The door of Accelerate: an engine in the place of a model and its optimizer, and its checkpoint in ``save_state``.

Owns who does what: the accelerator divides the loss, knows when gradients are complete, casts and clips; the engine
adds, steps, and saves. ``accelerator.prepare(engine.module, engine.optimizer)`` works, too, with files of
Accelerate's, which hold whole state dicts in memory.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch

from offload.engine import Engine
from offload.errors import ConfigError
from offload.integrations.libraries import is_closed, refuse_durable, refuse_other_schedule, require, trains_float16
from offload.module.clipping import clip_handles, handles_of
from offload.module.left_out import note_told

require("accelerate", "1.10", door="offload.accelerate")
from accelerate import Accelerator, DistributedType  # noqa: E402
from accelerate.optimizer import AcceleratedOptimizer  # noqa: E402

FOLDER = "offload"  # of the engine's checkpoint, inside the accelerator's; of further engines offload_1, offload_2
PLAIN = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)


def prepare(accelerator: Accelerator, *objects: Any) -> tuple[Any, ...]:
    """Prepare an engine and whatever else ``accelerator.prepare`` takes, in any order.

    ``accelerator.save_state`` and ``load_state`` then save and load the engine's checkpoint, within its budgets. The
    prepared optimizer's ``state_dict`` and ``load_state_dict`` are those of ``engine.optimizer``.

    Args:
        accelerator: of one process, or of several on CPUs, whose engines have a stage.
        *objects: one engine, data loaders, schedulers of its optimizer, other models. A further engine of the
            accelerator has a call of its own.

    Returns:
        The prepared objects in their order; in the engine's place its module and its optimizer.

    Raises:
        ConfigError: the accelerator shards or wraps by itself, there is no engine that trains, or more than one, both
            sides average over micro-batches, the engine has other processes, a scheduler is one of another optimizer,
            it is a durable run, or the loss is scaled otherwise than the engine can.
    """
    if accelerator.distributed_type not in PLAIN:
        raise ConfigError(
            f"prepare: expected an accelerator without a plugin but got one of {accelerator.distributed_type.value}, "
            "which would shard the engine's module; leave the plugin out, and pass stage= to the engine"
        )
    engines = [each for each in objects if isinstance(each, Engine)]
    found = engines[0].optimizer if len(engines) == 1 else None
    if found is None:
        got = "one that only evaluates" if len(engines) == 1 else f"{len(engines)} engines"
        raise ConfigError(
            f"prepare: expected one engine with an optimizer but got {got}; pass offload.Engine(model, optimizer, ...) "
            "in the place of the model and its optimizer"
        )
    engine = engines[0]
    options, steps = engine.config, accelerator.gradient_accumulation_steps
    refuse_durable(options)
    for each in objects:
        if isinstance(each, torch.optim.lr_scheduler.LRScheduler):
            refuse_other_schedule("prepare", each, [found, *objects])
    if options.gradient_reduction != "sum" and (options.gradient_reduction or options.gradient_accumulation_steps != 1):
        raise ConfigError(
            f"offload: expected an engine that adds, for the accelerator divides the loss by its "
            f"gradient_accumulation_steps={steps}, but got gradient_accumulation_steps="
            f'{options.gradient_accumulation_steps} without gradient_reduction="sum"; pass both, or neither'
        )
    world = engine.plan.request.world_size
    if world != accelerator.num_processes:
        raise ConfigError(
            f"prepare: expected an accelerator of the engine's processes, {world}, but got one of "
            f"{accelerator.num_processes}; pass cpu=True to Accelerator if there is no GPU, and no group to the engine"
        )
    kept = kept_by(accelerator)
    kept.drop_closed(accelerator)
    others = [one for one in kept.engines if one is not engine]
    scale_together(accelerator, engine, others)
    module = accelerator.prepare_model(engine.module, evaluation_mode=True)  # else it would be wrapped in DDP
    accelerator._models.remove(module)  # the engine saves and loads it
    note_told(accelerator, engine.module)
    optimizer = accelerator.prepare_optimizer(kept.add(engine, found, accelerator.scaler))
    clip_together(accelerator, engine, others)
    prepared: list[Any] = []
    for each in objects:
        prepared += [module, optimizer] if each is engine else [accelerator.prepare(each)]
    return tuple(prepared)


class StayingOptimizer(AcceleratedOptimizer):  # type: ignore[misc]
    """An engine's optimizer as accelerate has it, whose states stay where the engine has them."""

    _is_accelerate_prepared = True  # for accelerate, which makes one of its own otherwise

    def __init__(self, optimizer: torch.optim.Optimizer, scaler: Any) -> None:
        """Wrap it, and leave its states where they are."""
        super().__init__(optimizer, device_placement=False, scaler=scaler)


class SavedByEngine:
    """What accelerate saves and loads of an object that the engine's checkpoint has: nothing."""

    def state_dict(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Do nothing."""


class Kept:
    """The engines that an accelerator saves and loads, each in a folder of its own."""

    def __init__(self) -> None:
        self._by_folder: dict[str, tuple[Engine, StayingOptimizer]] = {}

    @property
    def engines(self) -> list[Engine]:
        """All of them."""
        return [engine for engine, _ in self._by_folder.values()]

    def drop_closed(self, accelerator: Any) -> None:
        """Forget engines that are closed: the next one has the folder."""
        for engine, wrapper in self._by_folder.values():
            if is_closed(engine) and wrapper in accelerator._optimizers:
                accelerator._optimizers.remove(wrapper)
        self.drop_let_go(accelerator)

    def drop_let_go(self, accelerator: Any) -> None:
        """Forget engines whose optimizer the accelerator no longer has, as behind its ``free_memory``."""
        for folder, (_, wrapper) in [*self._by_folder.items()]:
            if wrapper not in accelerator._optimizers:
                del self._by_folder[folder]

    def add(self, engine: Engine, optimizer: torch.optim.Optimizer, scaler: Any) -> StayingOptimizer:
        """Save and load an engine from now on; return what accelerate has of its optimizer, the same each time."""
        for known, wrapper in self._by_folder.values():
            if known is engine:
                return wrapper
        names = (FOLDER if number == 0 else f"{FOLDER}_{number}" for number in range(len(self._by_folder) + 1))
        made = StayingOptimizer(optimizer, scaler=scaler)
        self._by_folder[next(name for name in names if name not in self._by_folder)] = (engine, made)
        return made

    @contextlib.contextmanager
    def out_of_files(self, accelerator: Any) -> Iterator[None]:
        """Let an accelerator save and load nothing of the engines' optimizers: their checkpoints have it."""
        self.drop_let_go(accelerator)
        optimizers, kept = accelerator._optimizers, [wrapper for _, wrapper in self._by_folder.values()]
        before = [*optimizers]
        optimizers[:] = [SavedByEngine() if each in kept else each for each in before]
        try:
            yield
        finally:
            optimizers[:] = before

    def save(self, models: list[Any], weights: list[Any], output_dir: str) -> None:
        """Save the engines' checkpoints: what accelerate calls before it saves."""
        for folder, (engine, _) in self._by_folder.items():
            engine.save_checkpoint(os.path.join(output_dir, folder), keep=1)

    def load(self, models: list[Any], input_dir: str) -> None:
        """Load the engines' checkpoints: what accelerate calls before it loads."""
        for folder, (engine, _) in self._by_folder.items():
            engine.load_checkpoint(os.path.join(input_dir, folder))


_kept: weakref.WeakKeyDictionary[Any, Kept] = weakref.WeakKeyDictionary()  # by accelerator


def kept_by(accelerator: Any) -> Kept:
    """Return what an accelerator saves and loads of engines, from now on."""
    kept = _kept.get(accelerator)
    if kept is None:
        kept = _kept[accelerator] = Kept()
        accelerator.register_save_state_pre_hook(kept.save)
        accelerator.register_load_state_pre_hook(kept.load)
        save_without_states(accelerator, kept)
        load_of_others(accelerator, kept)
    return kept


def save_without_states(accelerator: Any, kept: Kept) -> None:
    """Let an accelerator's ``save_state`` leave optimizers to the checkpoints of their engines."""
    save_state = accelerator.save_state

    @functools.wraps(save_state)
    def save_all(*args: Any, **kwargs: Any) -> Any:
        with kept.out_of_files(accelerator):
            return save_state(*args, **kwargs)

    accelerator.save_state = save_all


def load_of_others(accelerator: Any, kept: Kept) -> None:
    """Let an accelerator's ``load_state`` load what another number of processes has saved.

    Accelerate looks for a file of the scale where there are several, and goes on counting micro-batches of a process.
    The engine's checkpoint has the scale. Where no gradient waits in it, an accumulation begins.
    """
    load_state = accelerator.load_state

    @functools.wraps(load_state)
    def load_all(*args: Any, **kwargs: Any) -> None:
        scaler = accelerator.scaler
        accelerator.scaler = None if isinstance(scaler, LossScaling) else scaler
        try:
            with kept.out_of_files(accelerator):
                load_state(*args, **kwargs)
        finally:
            accelerator.scaler = scaler
        parameters = [parameter for engine in kept.engines for parameter in engine.module.parameters()]
        if all(parameter.grad is None for parameter in parameters):
            accelerator.step -= accelerator.step % accelerator.gradient_accumulation_steps

    accelerator.load_state = load_all


def clip_together(accelerator: Any, engine: Engine, others: Iterable[Engine] = ()) -> None:
    """Let an accelerator's ``clip_grad_norm_`` clip gradients that have moved away all at once, with the same bits."""
    known = accelerator.clip_grad_norm_
    without_engine = known.without_engine if isinstance(known, ClipsTogether) else known
    accelerator.clip_grad_norm_ = ClipsTogether(accelerator, [*others, engine], without_engine)


class ClipsTogether:
    """What an accelerator's ``clip_grad_norm_`` is where it has an engine."""

    def __init__(self, accelerator: Any, engines: list[Engine], without_engine: Callable[..., Any]) -> None:
        """Prepare.

        Args:
            accelerator: unscales gradients where torch's ``GradScaler`` has scaled them.
            engines: of the accelerator.
            without_engine: what the accelerator's ``clip_grad_norm_`` is without an engine.
        """
        self._accelerator = accelerator
        self._engines = engines
        self.without_engine = without_engine

    def __call__(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Any:
        """Clip gradients.

        Args:
            parameters: whose.
            max_norm: the norm afterwards, at most; infinite: only measure.
            norm_type: order of the norm.

        Returns:
            The norm before, a 0-dim tensor.

        Raises:
            ConfigError: their engine clips, too.
        """
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        handles = handles_of(given)
        if handles is None:
            return self.without_engine(given, max_norm, norm_type)
        asked = {id(parameter) for parameter in given} if math.isfinite(max_norm) else set()
        for engine in self._engines:
            own = engine.config.max_grad_norm
            if own is not None and any(id(parameter) in asked for parameter in engine.module.parameters()):
                raise ConfigError(
                    f"clip_grad_norm_: expected one side that clips but got max_norm={max_norm} beside "
                    f"max_grad_norm={own} of the engine; leave out one of them"
                )
        self._accelerator.unscale_gradients()
        return clip_handles(handles, max_norm, norm_type)


def scale_together(accelerator: Any, engine: Engine, others: Iterable[Engine] = ()) -> None:
    """Let backward passes be the engine's where torch's will not do: of float16, or of several processes.

    Args:
        accelerator: runs backward, and has a ``GradScaler`` where it computes in float16.
        engine: which takes a place on it.
        others: that it has already.

    Raises:
        ConfigError: there are several processes, whose float32 parameters need the accelerator's ``GradScaler``; or
            there is another engine, and backward cannot be that of both.
    """
    own = accelerator.scaler
    theirs = isinstance(own, LossScaling)
    if isinstance(own, LossScaling):
        own = own.without_engine
    scales, several = trains_float16(engine.module), engine.plan.request.world_size > 1
    if several and own is not None and not scales:
        raise ConfigError(
            'mixed_precision: expected "no" or "bf16" of several processes but got "fp16", whose GradScaler an engine '
            'of several processes does not call; choose "bf16", or give the engine dtype="float16": it scales that loss'
        )
    if any(True for _ in others) and (theirs or scales or several):
        raise ConfigError(
            "prepare: expected one engine on an accelerator that scales its loss, for float16 or for several "
            "processes, but got a further one; give it an accelerator of its own, or close the other one before"
        )
    accelerator.scaler = LossScaling(engine, skips=scales, without_engine=own) if scales or several else own


class LossScaling(SavedByEngine):
    """What accelerate takes for a ``GradScaler``: the engine scales the loss, and takes or skips the step.

    Where the engine only adds, the loss is divided by the number of processes.
    """

    def __init__(self, engine: Engine, *, skips: bool, without_engine: Any) -> None:
        """Prepare.

        Args:
            engine: whose backward it is.
            skips: steps are skipped whose gradients are not finite.
            without_engine: what the accelerator has scaled with before.
        """
        self._engine = engine
        self.without_engine = without_engine
        self._divisor = engine.plan.request.world_size if engine.config.gradient_reduction == "sum" else 1
        self._skips = skips

    def scale(self, loss: torch.Tensor) -> ScaledLoss:
        """Return what ``backward()`` is called on."""
        return ScaledLoss(self._engine, loss if self._divisor == 1 else loss / self._divisor)

    def step(self, optimizer: torch.optim.Optimizer, closure: Any = None) -> None:
        """Take the step; an overflow is seen by accelerate in that ``optimizer.step``, its own, was not called."""
        norm = self._engine.grad_norm if self._skips else None
        if norm is not None and not math.isfinite(norm):
            type(optimizer).step(optimizer)  # lowers the scale, and leaves the rest
        else:
            optimizer.step(closure)

    def update(self) -> None:
        """Do nothing: the step has."""

    def unscale_(self, optimizer: torch.optim.Optimizer) -> None:
        """Do nothing: gradients are unscaled for whoever looks at them."""


@dataclasses.dataclass(frozen=True, slots=True)
class ScaledLoss:
    """A loss whose backward pass is the engine's."""

    engine: Engine
    loss: torch.Tensor

    def backward(self, **kwargs: Any) -> None:
        """Run backward from the loss times the loss scale."""
        self.engine.backward(self.loss, **kwargs)
