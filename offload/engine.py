"""The engine: wraps a module and trains it within memory budgets.

Owns the order of things - plan, load, forward, backward, step, close - and the errors for calls out of order. The work
is done below: :mod:`offload.planning.placement` plans, :mod:`offload.checkpoint.loading` sets up,
:mod:`offload.shards.manager` moves, :mod:`offload.module.hooks` ties in the module, :mod:`offload.optimizer` updates,
:mod:`offload.checkpoint.module_state` reads and writes the module's tensors.
"""

from __future__ import annotations

import contextlib
import logging
import os
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.activations.ledger import Activations
from offload.activations.rss import open_resident_set
from offload.checkpoint.digests import take_digests
from offload.checkpoint.loading import Loader, open_tiers
from offload.checkpoint.module_state import ModuleTensors
from offload.config import Config
from offload.errors import TRAIN_MORE, ConfigError, NonFiniteError, StateError
from offload.interrupt import Deferral
from offload.kernels import cpu_adam
from offload.memory.device import resolve_device
from offload.memory.machine import free_bytes
from offload.memory.tiers import Budget, Tier, resolve_budgets
from offload.module import refusals
from offload.module.absent import is_lost
from offload.module.gradient_tensors import GradientTensors
from offload.module.handles import GradientNorm, Handles
from offload.module.hooks import Ask, Hooks
from offload.module.quantized import make_ready
from offload.module.torch_calls import tensors_in
from offload.optim.progress import LossScaler, Progress
from offload.optim.recipe import Recipe, StepCounts, begin_step, clip_factor, group_of_slots
from offload.optim.rules import rule_of
from offload.optim.takeover import unwrapped
from offload.optimizer import OffloadOptimizer, tie_optimizer
from offload.planning.partition import find_units
from offload.planning.placement import ADAM_STATES, WORKING_UNITS, Plan, Request, make_plan
from offload.shards.backward_updates import Calm, EarlyUpdates
from offload.shards.manager import Manager
from offload.spec import OptimizerSpec
from offload.stats import Counters, Stats

logger = logging.getLogger(__name__)

_FORCED = {"auto": None, "none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
UNITS_PER_DEVICE = 8  # a unit is at most this part of the device budget, where modules can be split
SMALLEST_UNIT_LIMIT = 1 << 20


class Engine:
    """Trains a module whose parameters, gradients and optimizer states do not fit the device.

    Calling the engine calls the module. ``backward`` and ``step`` follow; ``loss.backward()`` works, too (not with
    float16, which needs the loss scaled). Gradients are averaged over `gradient_accumulation_steps` micro-batches:
    do not divide the loss (or pass ``gradient_reduction="sum"``). Everything is bit-identical for every placement.

    The module keeps its parameters' names, shapes, dtypes and identity; between uses they may have no memory of their
    own. Reading one brings it; writing needs :meth:`gather` or :meth:`apply`. After backward, ``parameter.grad`` is a
    handle that torch's clipping works on; :meth:`gather_gradients` gives the elements.

    Attributes:
        module: the wrapped module.
        optimizer: a ``torch.optim.Optimizer`` over its parameters; None for an engine that only evaluates.
        plan: homes, buffers and predicted bytes; printable.
        config: the options.
        device: where compute runs.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizer: OptimizerSpec | torch.optim.Optimizer | None = None,
        config: Config | Mapping[str, Any] | str | Path | None = None,
        **options: Any,
    ) -> None:
        """Plan, then load the model into its tiers.

        Args:
            model: any module, on the CPU; parameters may be on the meta device (see ``Config.init_weights``).
            optimizer: ``offload.AdamW(...)`` (or ``Adam``, ``SGD``, ``Lion``, ``Adagrad``, ``LAMB``), with parameters
                and groups as in torch or for all that are trainable; or an optimizer of torch over the model's
                parameters, which is taken over: kernels step like ``torch.optim.AdamW``, ``Adam``, ``SGD`` and
                ``Adagrad``, other classes make their steps themselves, slower; None for an engine that only evaluates.
            config: options as Config, dict or JSON file.
            **options: options of :class:`offload.Config`, on top of `config`.

        Raises:
            ConfigError: unknown or contradicting options, or a model that cannot be trained as asked.
            BudgetError: the budgets cannot hold the model; nothing has been loaded then.
            StateError: the model is wrapped already, or somebody else places, calls or reduces its parameters.
            swap.SwapError: the NVMe path is missing, not writable, or full.
        """
        self._manager: Manager | None = None
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module but got {type(model).__name__}")
        refusals.refuse_ranks()
        refusals.refuse_model(model)
        optimizer = unwrapped(optimizer)
        self.config = Config.load(config, **options)
        self.module = model
        self.device = resolve_device(self.config.device)
        self._unusable: str | None = None
        self._closed = False
        self._process = os.getpid()
        self._deferral = Deferral()

        cast = getattr(torch, self.config.dtype) if self.config.dtype else None
        rule = None if optimizer is None else rule_of(optimizer, cast)
        make_ready(model, cast)
        limits = resolve_budgets(self.config.budgets(), self.device, free_bytes(self.config.paths()))
        limit = self.config.bytes_of("unit_bytes")
        self._tree = find_units(
            model,
            max_unit_bytes=limit or max(limits[Tier.DEVICE] // UNITS_PER_DEVICE, SMALLEST_UNIT_LIMIT),
            dtype=cast,
            train=optimizer is not None,
            whole=rule is not None and rule.whole,
        )
        self._hooks = Hooks(model, self._tree, self.device)
        self.plan: Plan = make_plan(
            Request(
                units=self._tree.units,
                budgets=limits,
                param_tier=_FORCED[self.config.offload_param],
                optimizer_tier=_FORCED[self.config.offload_optimizer],
                accumulate=self.config.gradient_accumulation_steps > 1,
                device_is_host=self.device.type == "cpu",
                activation_bytes=self.config.bytes_of("activation_memory"),
                chunk_numel=self.config.chunk_numel,
                states=rule.states(cpu_adam.StateKind(self.config.state_dtype)) if rule else ADAM_STATES,
                held_together=self._tree.held_together(model, more_than=WORKING_UNITS),
                own=rule.own.size if rule and rule.own else None,
            )
        )
        if self.config.threads is not None:
            cpu_adam.set_num_threads(self.config.threads)
        self._counters = Counters()
        self._budgets = {tier: Budget(tier, limits[tier]) for tier in Tier}
        self._step_counts = StepCounts(self._tree.units, rule.own if rule else None)
        if self._step_counts.records is not None:
            self._step_counts.records.charge = lambda size: self._budgets[Tier.HOST].reserve("optimizer", size)
        trains_fp16 = any(unit.trainable and unit.dtype == "float16" for unit in self._tree.units)
        self._scaler = LossScaler(self.config, enabled=trains_fp16)
        self._run = Progress(self._scaler)
        self._micro_batch = 0
        self._in_backward = False
        self._step_is_ours = False  # not asked for by optimizer.step(), which does nothing where torch's would not
        self._divides: bool | None = None if self.config.gradient_reduction is None else True  # known to be meant
        self._last_loss: weakref.ref[torch.Tensor] | None = None
        self._grad_norm: float | None = None
        self._overlap = True  # updates are made while backward and the next forward compute; else inside the step
        self._calm = Calm(expected=self.config.max_grad_norm is None)
        self._early: EarlyUpdates | None = None

        self.optimizer = (
            None if optimizer is None else OffloadOptimizer(list(model.parameters()), optimizer, rule, self._run)
        )
        self._loader = Loader(model, self._tree, self._hooks, self.config.init_weights)
        manager = open_tiers(self.plan, self.config, self.device, self._budgets, self._hooks, self._counters)
        self._manager = manager
        try:
            self._loader.load(manager)
            if self.optimizer is not None:
                self.optimizer.on_step = self._step_now
                self.optimizer.on_zero_grad = self.zero_grad
                tie_optimizer(self.optimizer, optimizer, self._require_open, self._tree, self._hooks, self._step_counts)
        except BaseException:
            with contextlib.ExitStack() as last:
                unloaded: dict[int, list[torch.Tensor]] = {}
                last.callback(self._loader.give_back, unloaded)
                last.callback(manager.close)
                self._manager = None
                unloaded.update(self._loader.unload(manager))
            raise
        meter = open_resident_set() if self.device.type == "cpu" else None
        try:
            self._activations = Activations(
                self._budgets[Tier.DEVICE], manager.working, meter, beside_bytes=self.plan.request.own_bytes
            )
            self._tensors = ModuleTensors(model, self._tree, self._hooks, self._require_open)
            self._handles = Handles(
                self._tree.units, self._tree.parameters, manager.gradients, self.device, self._averaging
            )
            self._gradients = GradientTensors(self._handles, self._hooks, self._budgets, self._require_open)
            ask = Ask(
                final_micro_batch=self._is_final,
                refuse_gradient=self._refuse_gradient,
                check_interrupt=self._deferral.check,
                assign=self._tensors.assign,
                take_over=self._tensors.take_over,
                load=self._tensors.load_one,
            )
            self._hooks.attach(manager, self._activations, self._handles, ask)
        except BaseException:
            if meter is not None:
                meter.close()
            raise
        self._tensors.attach()
        if self.plan.early_bytes and self.optimizer is not None:
            self._early = EarlyUpdates(manager, self._guess, safe_point=self._deferral)
        self._loader.move_buffers(self.device)
        manager.prefetch()
        logger.info("plan:\n%s", self.plan)

    # --- training ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Raises:
            StateError: the engine is closed, or a batch is on the wrong device.
            BudgetError: activations do not fit the device budget.
        """
        self._require_open()
        self._check_batch(args, kwargs)
        begin, stalled = time.perf_counter(), self._counters.waits_seconds
        with self._deferral:
            try:
                with self._hooks.watch():  # hooks of the user may run before ours, or after
                    output = self.module(*args, **kwargs)
                if not torch.is_grad_enabled():
                    self._activations.close_pass()
                return output
            except BaseException:
                _clean_up(self._hooks.unwind, self._activations.abandon_pass)
                raise
            finally:
                self._count_compute(begin, stalled)

    forward = __call__

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward from `loss`.

        Args:
            loss: scalar tensor, not divided by the number of accumulation steps.
            **kwargs: passed to ``torch.Tensor.backward``.

        Raises:
            NonFiniteError: the loss is NaN or infinite; no gradient was computed.
            StateError: backward was called for this loss already, or the engine is closed.
        """
        manager = self._require_open()
        self._divides = True
        if not isinstance(loss, torch.Tensor):
            raise StateError(f"backward: expected the loss as a tensor but got {type(loss).__name__}; pass output.loss")
        if self.optimizer is None:
            raise StateError("backward: this engine only evaluates; pass optimizer=offload.AdamW(...)")
        if self._last_loss is not None and self._last_loss() is loss:
            raise StateError(
                "backward: called twice for the same loss; run the forward again, or pass retain_graph=True"
            )
        if loss.device.type == "cpu" and not torch.isfinite(loss.detach()).all():
            raise NonFiniteError(
                f"loss: expected a finite value but got {loss.detach().flatten()[0].item()}; nothing was changed. "
                "Look at the batch and the learning rate, or for labels that are all ignored"
            )
        begin, stalled = time.perf_counter(), self._counters.waits_seconds
        self._handles.adopt()
        self._in_backward = True
        with self._deferral:
            try:
                self._hooks.backward(loss * self._scaler.scale if self._scaler.enabled else loss, **kwargs)
                self._activations.close_pass()
                self._deferral.check()  # before it counts: whoever is interrupted here runs the micro-batch again
            except BaseException:
                self._micro_batch = 0
                _clean_up(self._hooks.unwind, self._handles.clear, self._activations.abandon_pass, manager.reset)
                raise
            finally:
                self._in_backward = False
                self._count_compute(begin, stalled)
        kept = kwargs.get("retain_graph") or kwargs.get("create_graph")
        self._last_loss = None if kept else weakref.ref(loss)

    def step(self) -> bool:
        """Close a micro-batch; at the end of an accumulation, take the optimizer step.

        Returns:
            True where parameters were updated; False inside an accumulation, or where float16 gradients overflowed and
            the step was skipped.

        Raises:
            ConfigError: a param group has a parameter of another model, or an option with which the engine cannot
                step; nothing was changed, the gradients are dropped.
            StateError: no gradient has arrived since the last step (``optimizer.step()`` does nothing then, as in
                torch).
            NonFiniteError: a gradient is not finite; nothing was changed, the gradients are dropped.
            swap.SwapError: an I/O error. The gradients are dropped; if it came while parameters or states were being
                written, the engine cannot be used further and says so.
        """
        self._require_open()
        if self.optimizer is None:
            raise StateError("step: this engine only evaluates; pass optimizer=offload.AdamW(...)")
        self._divides = True
        self._micro_batch += 1
        if self._micro_batch < self.config.gradient_accumulation_steps:
            return False
        before = self._run.steps
        self._step_is_ours = True
        try:
            self.optimizer.step()  # so that its hooks and LR schedulers see it
        finally:
            self._step_is_ours = False
        return self._run.steps > before

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the global norm of the gradients that have arrived, as ``torch.nn.utils.clip_grad_norm_`` does.

        Args:
            max_norm: the norm afterwards, at most; at least 0.
            norm_type: order of the norm; may be infinite.

        Returns:
            The norm before, a 0-dim tensor.

        Raises:
            ConfigError: `max_norm` is negative or NaN.
            StateError: no gradient has arrived since the last step.
        """
        self._require_open()
        if not isinstance(max_norm, (int, float)) or not max_norm >= 0:
            raise ConfigError(f"clip_grad_norm_: expected max_norm as a number of at least 0 but got {max_norm!r}")
        if self.optimizer is None or not self._has_gradients():
            raise StateError("clip_grad_norm_: expected gradients but none has arrived; call backward first")
        return torch.nn.utils.clip_grad_norm_(self._handles.parameters(), max_norm, norm_type)

    def drain(self) -> None:
        """Wait until the last step is done and home; without this, that is when the next forward has used all units.

        Whatever reads parameters or states waits by itself: this is for those who look at times and bytes.

        Raises:
            swap.SwapError: an I/O error.
        """
        self._require_open().finish_updates()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next :meth:`step` updates the parameters."""
        return self._micro_batch + 1 >= self.config.gradient_accumulation_steps

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last step."""
        manager = self._require_open()
        self._hooks.unwind()
        self._drop_gradients(manager)
        self._micro_batch = 0

    def _drop_gradients(self, manager: Manager) -> None:
        self._handles.clear()
        manager.gradients.drop()

    def _has_gradients(self) -> bool:
        """Tell whether any gradient waits for the next step; take over what somebody has put in ``.grad``."""
        if self._manager is None or self._closed or self.optimizer is None:
            return False
        self._handles.adopt()
        return self._manager.gradients.any_arrived

    def _is_final(self, passes: int) -> bool:
        """Tell whether the backward pass under way is the last one before the step; it is number `passes`."""
        return self.is_gradient_accumulation_boundary() or passes >= self.config.gradient_accumulation_steps

    def _step_now(self) -> bool:
        manager = self._require_open()
        self._last_loss = None
        self._hooks.unwind()
        with self._deferral:  # Ctrl-C comes through when the step is done
            try:
                return self._take_step(manager)
            except BaseException as error:
                self._micro_batch = 0
                if manager.has_lost_content():
                    self._unusable = f"a step failed half way ({type(error).__name__}: {error})"
                else:
                    with contextlib.suppress(Exception):  # the first error is on its way up
                        self._drop_gradients(manager)  # the micro-batches are run again, after every kind of error
                raise

    def _take_step(self, manager: Manager) -> bool:
        offloaded = self.optimizer
        assert offloaded is not None
        name = self._hooks.untrained()
        if name is not None:
            raise StateError(
                f"parameter {name}: requires a gradient but was frozen, or not there, when the engine was made; freeze "
                f"it again, or {TRAIN_MORE}"
            )
        offloaded.refuse_foreign()
        self._activations.close_pass()
        self._hooks.settle_changes()
        manager.finish_step()  # of units that were not used since the last step
        manager.working.refuse_changes()
        self._handles.adopt()
        norm = self._handles.measure()
        if not self._step_is_ours and (norm.count == 0 or offloaded.only_makes_states(norm.squares)):
            self._micro_batch = 0
            self._drop_gradients(manager)  # also where there are none: updates that were guessed may be under way
            manager.restart_schedule()
            if norm.count == 0:
                offloaded.note_nothing()
            return False
        if norm.count == 0:
            raise StateError("step: expected gradients but none has arrived since the last step; call backward first")
        self._refuse_ambiguity()
        averaged = self._averaging()
        guessed = self._early is not None and self._early.guessed
        if norm.bad or norm.spoilt:
            self._calm.note(calm=False, guessed=guessed)
            return self._skip(norm, averaged)
        self._grad_norm = norm.squares**0.5 * averaged
        factor = clip_factor(norm.left**0.5 * averaged, self.config.max_grad_norm)
        as_expected = manager.gradients.most_passes <= self.config.gradient_accumulation_steps
        self._calm.note(calm=factor == 1.0 and not norm.factors and as_expected, guessed=guessed)
        manager.restart_schedule()
        recipe = self._recipe(factor * averaged, norm.factors)
        begin_step(manager, self._step_counts, recipe, self._early, safe_point=self._deferral)
        self._handles.clear()
        self._run.steps += 1
        self._micro_batch = 0
        self._divides = None if self.config.gradient_reduction is None else True
        self._scaler.succeeded()
        if not self._overlap:
            manager.finish_updates()
        elif manager.updates is not None:
            manager.updates.begin()
        manager.prefetch()
        return True

    def _averaging(self) -> float:
        """Return what makes the mean over micro-batches (or the sum) of a sum of scaled gradients."""
        divides = self.config.gradient_reduction != "sum"
        return 1.0 / ((self.config.gradient_accumulation_steps if divides else 1) * self._scaler.scale)

    def _refuse_ambiguity(self) -> None:
        """Refuse a step of which nobody has said who divides by the number of micro-batches."""
        count = self.config.gradient_accumulation_steps
        if count > 1 and not self._divides:
            raise StateError(
                f"step: expected engine.backward() or engine.step() where gradient_accumulation_steps={count} averages "
                "but got loss.backward() and optimizer.step(), as from trainers, which divide the loss; pass "
                'gradient_reduction="sum" if the loss is divided already, "mean" if it is not'
            )

    def _guess(self) -> Recipe | None:
        """Return what the step will do if it clips nothing, None where that is unlikely."""
        if not self._overlap or not self._calm:
            return None
        return self._recipe(self._averaging())

    def _recipe(self, grad_scale: float, factors: Mapping[tuple[int, int], float] | None = None) -> Recipe:
        manager, offloaded = self._require_open(), self.optimizer
        assert offloaded is not None
        groups = group_of_slots(offloaded.param_groups, self._tree.units, self._tree.parameters)
        return Recipe(manager, self._step_counts, groups, rule=offloaded.rule, grad_scale=grad_scale, factors=factors)

    def _skip(self, norm: GradientNorm, averaged: float) -> bool:
        """Leave everything as it is: a gradient is not finite."""
        manager = self._require_open()
        self._micro_batch = 0
        self._grad_norm = norm.squares**0.5 * averaged
        self._drop_gradients(manager)
        manager.restart_schedule()
        if self._scaler.enabled and norm.bad:
            self._run.skipped += 1
            self._scaler.overflowed()
            logger.info("step skipped: gradient overflow in %s; loss scale %g", norm.bad[0], self._scaler.scale)
            return False
        if not norm.bad:
            raise NonFiniteError(
                f"gradient of {norm.spoilt[0]}: was multiplied by NaN or infinity; the step was skipped, parameters "
                "and states are unchanged. Look at max_norm of clip_grad_norm_, or at what else scales gradients"
            )
        more = f" and {len(norm.bad) - 1} more" if len(norm.bad) > 1 else ""
        raise NonFiniteError(
            f"gradient of {norm.bad[0]}{more}: expected finite values but got NaN or infinity; the step was skipped, "
            "parameters and states are unchanged. Look at the batch, the learning rate and the loss"
        )

    def _refuse_gradient(self) -> str | None:
        if self._scaler.enabled and not self._in_backward:
            return "float16: the loss must be scaled; call engine.backward(loss) instead of loss.backward()"
        return None

    # --- reading and writing tensors --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict with real tensors: parameters as CPU copies, buffers as they are."""
        return self._tensors.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load parameters and buffers by name; masters follow the given values, moments are kept.

        A 16-bit value that equals the present parameter leaves its master as it is, so that it does not matter whether
        the optimizer's state is loaded before or after.

        Raises:
            ConfigError: it is no mapping, or names or shapes do not fit (with `strict`, missing and unexpected names
                too).
            StateError: parameters are in use, inside :meth:`gather` or a forward. Nothing was loaded in either case.
        """
        self._tensors.load(state_dict, strict=strict)

    def gather_gradients(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None = None, modify: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Let ``parameter.grad`` be a tensor with elements inside the ``with`` block.

        It is what the coming step would use: averaged, unscaled, times its factors; None where none has arrived.

        Args:
            params: a parameter, several, or a module; None for all that are trained.
            modify: keep what was changed: the elements, another tensor, or None. Gradients that are not changed keep
                their precision.

        Raises:
            BudgetError: they do not fit the device budget at once.
            ConfigError: `params` is something else.
            StateError: one is not trained by this engine, or was changed without `modify`, which undoes the change.
        """
        return self._gradients.gather(params, modify=modify)

    def apply(
        self,
        function: Callable[[str, nn.Parameter], object],
        params: nn.Parameter | nn.Module | Iterable[nn.Parameter] | None = None,
    ) -> None:
        """Call ``function(name, parameter)`` for parameters with real data on the device, and keep what it changes.

        They are gathered unit by unit, so the budgets hold however large the model is: for merging, averaging
        (``average[name].lerp_(parameter, 0.001)``), histograms and weight surgery.

        Args:
            function: gets the parameter's name in the module and the parameter, without gradients being recorded.
            params: a parameter, several, or a module; None for all.

        Raises:
            ConfigError, StateError: as :meth:`gather`. Units that came before keep what was changed.
        """
        self._tensors.apply(function, self.module if params is None else params)

    def gather(
        self, params: nn.Parameter | nn.Module | Iterable[nn.Parameter], modify: bool = False
    ) -> contextlib.AbstractContextManager[None]:
        """Give parameters real data on the device inside the ``with`` block.

        Args:
            params: a parameter, several, or a module.
            modify: write what was changed home; the fp32 masters of 16-bit elements that change become their new
                values, the others stay. Takes as much memory again as their units, to see what was changed; after an
                exception inside the block all is as before.

        Raises:
            BudgetError: they do not fit the device budget at once.
            ConfigError: `params` is something else.
            StateError: a parameter is not this engine's, or is in use already and to be modified, or one was changed
                in place without `modify` or without being gathered; what may be changed is kept. The change is undone
                with `modify`, and where there is a copy at home; elsewhere the next step refuses it again.
        """
        return self._tensors.gather(params, modify=modify)

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save a Hugging Face model with its own ``save_pretrained``.

        Raises:
            StateError: the module has no ``save_pretrained``.
        """
        self._require_open()
        save = getattr(self.module, "save_pretrained", None)
        if save is None:
            raise StateError(
                f"save_pretrained: {type(self.module).__name__} is not a Hugging Face model; "
                "use torch.save(engine.state_dict(), path)"
            )
        save(directory, state_dict=self.state_dict(), **kwargs)

    # --- looking at it ----------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm, averaged and unscaled, before clipping; None before the first backward.

        It is that of the gradients that wait for the next step, or of the last step where there are none.
        """
        if self._has_gradients():
            return float(self._handles.measure().squares ** 0.5 * self._averaging())
        return self._grad_norm

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1.0 unless float16 is trained."""
        return self._scaler.scale

    @property
    def training(self) -> bool:
        """Whether the module is in training mode."""
        return self.module.training

    def train(self, mode: bool = True) -> Engine:
        """Put the module in training mode."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode."""
        self.module.eval()
        return self

    def stats(self) -> Stats:
        """Return a frozen snapshot of bytes, seconds, hits and stalls."""
        links = self._counters.links()
        peak = {tier.value: budget.peak_bytes for tier, budget in self._budgets.items()}
        self._activations.settle()
        used = {tier.value: budget.used_bytes for tier, budget in self._budgets.items()}
        manager = self._manager
        if manager is not None:
            used = manager.used_bytes()
            if manager.store is not None:
                swapped = manager.store.stats()
                links["nvme_read"] = type(links["h2d"])(swapped.read_bytes, swapped.read_seconds)
                links["nvme_write"] = type(links["h2d"])(swapped.written_bytes, swapped.write_seconds)
                peak[Tier.NVME.value] = swapped.peak_used_bytes
        return Stats(
            step=self._run.steps,
            skipped_steps=self._run.skipped,
            links=links,
            hits=self._counters.hits,
            misses=self._counters.misses,
            stalls=self._counters.stalls,
            stall_seconds=self._counters.stall_seconds,
            update_chunks=self._counters.update_chunks,
            update_stalls=self._counters.update_stalls,
            update_seconds=self._counters.update_seconds,
            update_stall_seconds=self._counters.update_stall_seconds,
            early_units=self._counters.early_units,
            early_units_dropped=self._counters.early_units_dropped,
            used_bytes=used,
            peak_bytes=peak,
            budget_bytes={tier.value: budget.limit_bytes for tier, budget in self._budgets.items()},
            loss_scale=self._scaler.scale,
        )

    def digests(self) -> dict[str, dict[str, str]]:
        """Return a short digest of the bits of every parameter, gradient and state: equal where the bits are equal.

        For whoever hunts a difference between two runs: the first digests that differ say where it began. They do not
        depend on budgets, homes or chunks; runs are compared that have the same model, dtype, optimizer and
        ``state_dtype``. Nothing is changed by looking: gradients wait as they did, and updates that were made during
        backward are kept. The last step is finished first, as by every reader. Takes staging buffers and a MiB.

        Returns:
            Per parameter, by name, a digest of 16 hex digits per role: ``parameter`` (as stored), and of trained ones
            ``master`` (fp32, where the parameter has 16 bits), each state by its name in ``optimizer.state_dict()``
            (as stored; ``scales`` beside 8-bit ones), ``step``, and ``gradient`` where one waits for the next step (the
            sum over micro-batches, and what it was multiplied by). States without an update are zeros, and a master
            is the parameter then. Buffers of modules are not among them.

        Raises:
            StateError: the engine is closed or unusable, a step has lost the content, or gradients are gathered.
            swap.SwapError: an I/O error.
        """
        manager = self._require_open()
        self._hooks.settle_changes()
        self._handles.adopt()
        return take_digests(manager, self._step_counts, self._handles.factors())

    # --- closing ----------------------------------------------------------------------------------------------------

    def close(self, *, restore: bool | None = None) -> None:
        """Free all tiers; idempotent.

        The optimizer's states are freed. To go on in a new engine, save ``engine.optimizer.state_dict()`` before, and
        load it into the new engine's optimizer.

        Args:
            restore: give the module's parameters ordinary memory again, on the device they came from. None does so
                where they fit the host budget (on a CPU, with the device budget) that is being freed. Without it, the
                module's forward raises a clear error.

        Raises:
            swap.SwapError: the parameters could not be read back, or the drive hangs; the engine is closed then, too.
            StateError: somebody has changed a parameter in a forward, and the change is lost; the engine is closed.
        """
        manager = self._manager
        if manager is None or self._closed or os.getpid() != self._process:  # what a forked child has is its parent's
            return
        total = sum(unit.param_bytes for unit in self._tree.units)
        if restore is None:
            room = self._budgets[Tier.HOST].limit_bytes
            room += self._budgets[Tier.DEVICE].limit_bytes if self.device.type == "cpu" else 0
            restore = self._unusable is None and total <= room
        _clean_up(self._hooks.unwind)
        lost: Exception | None = None
        if restore:
            try:
                self._hooks.settle_changes()
                self._hooks.refuse_rebound()
            except Exception as error:  # told when the engine is closed
                lost = error
        else:
            manager.updates = None  # nobody will see what they would have made
        self._closed = True
        if self.optimizer is not None:
            self.optimizer.release(lost=any(map(any, self._step_counts.counts.values())))
        with contextlib.suppress(Exception):  # closing: pending gradients are dropped, whatever became of them
            manager.reset()
        self._tensors.detach()
        restored: dict[int, list[torch.Tensor]] = {}
        with contextlib.ExitStack() as last:  # all of it, whatever fails on the way
            last.callback(self._leave_module, restored)
            last.callback(manager.close)
            last.callback(self._hooks.detach)
            last.callback(self._activations.close)
            if restore:
                restored.update(self._loader.unload(manager))
        if lost is not None:
            raise lost

    def _leave_module(self, restored: dict[int, list[torch.Tensor]]) -> None:
        """Give the module what was restored, or a guard against being used."""
        self._manager = None
        self._loader.give_back(restored)
        if not restored:
            self.module.register_forward_pre_hook(_refuse_forward)

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            StateError: always.
        """
        raise StateError(
            "engine: cannot be copied or pickled; save engine.state_dict() and engine.optimizer.state_dict(), and load "
            "them into a new engine and its optimizer"
        )

    def __enter__(self) -> Engine:
        """Return the engine; leaving the block closes it."""
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        try:
            self.close()
        except Exception as failure:
            if error is None:
                raise
            logger.warning("close: %s", failure)  # the error on its way up came first

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # the interpreter may be shutting down
            if getattr(self, "_manager", None) is not None:
                self.close(restore=False)

    # --- checks -----------------------------------------------------------------------------------------------------

    def _require_open(self) -> Manager:
        refusals.refuse_child(self._process)
        if self._unusable is not None:
            raise StateError(f"engine: {self._unusable}; close it and resume from a checkpoint")
        if self._closed or self._manager is None:
            states = " and load what engine.optimizer.state_dict() returned before" if self.optimizer else ""
            raise StateError(f"engine: it is closed; make a new one{states}")
        updates = self._manager.updates
        if updates is not None and updates.failure is not None:
            self._unusable = f"a step failed half way ({type(updates.failure).__name__}: {updates.failure})"
            updates.check()
        return self._manager

    def _check_batch(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        for name, argument in (*enumerate(args), *kwargs.items()):
            for value in tensors_in(argument):
                if value.device != self.device:
                    raise StateError(
                        f"batch: argument {name!r} is on {value.device} but the engine computes on {self.device}; "
                        f"move it with .to(engine.device)"
                    )

    def _count_compute(self, begin: float, stalled_before: float) -> None:
        stalled = self._counters.waits_seconds - stalled_before
        self._counters.add("compute", seconds=max(time.perf_counter() - begin - stalled, 0.0))


def _clean_up(*steps: Callable[[], None]) -> None:
    """Take all steps, whatever fails on the way: the first error, which is on its way up, is what the user gets.

    Raises:
        BaseException: an interrupt came meanwhile.
    """
    interrupt: BaseException | None = None
    for step in steps:
        try:
            step()
        except Exception as failure:
            logger.warning("clean-up after an error: %s: %s", type(failure).__name__, failure)
        except BaseException as another:
            interrupt = another
    if interrupt is not None:
        raise interrupt


def _refuse_forward(module: nn.Module, args: object) -> None:
    for name, parameter in module.named_parameters():
        if is_lost(parameter):
            raise StateError(f"model: parameter {name}: {refusals.LOST}")
