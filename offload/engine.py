"""The engine: wraps a module and trains it within memory budgets.

Owns the order of things - forward, backward, step, close - and the errors for calls out of order. The work is done
below: :mod:`offload.build` makes the parts, :mod:`offload.shards.manager` moves, :mod:`offload.module.hooks` ties in
the module, :mod:`offload.optim.step` takes steps, :mod:`offload.checkpoint.module_state` reads and writes tensors.
"""

from __future__ import annotations

import contextlib
import logging
import time
import weakref
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import EngineCalls, build
from offload.checkpoint.digests import take_digests
from offload.config import Config
from offload.errors import TRAIN_MORE, ConfigError, NonFiniteError, StateError
from offload.interrupt import Deferral
from offload.life import Life
from offload.memory.tiers import Tier
from offload.module import refusals
from offload.module.absent import is_lost
from offload.module.torch_calls import tensors_in
from offload.optim.step import Step
from offload.optim.takeover import unwrapped
from offload.optimizer import Calls, OffloadOptimizer
from offload.planning.placement import Plan
from offload.shards.manager import Manager
from offload.spec import OptimizerSpec
from offload.stats import Stats

logger = logging.getLogger(__name__)


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
        self._life = Life(trains=optimizer is not None)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module but got {type(model).__name__}")
        refusals.refuse_ranks()
        refusals.refuse_model(model)
        self.module = model
        self.config = Config.load(config, **options)
        self._deferral = Deferral()
        self._step_is_ours = False  # not asked for by optimizer.step(), which does nothing where torch's would not
        self._last_loss: weakref.ref[torch.Tensor] | None = None
        calls = EngineCalls(Calls(self._step_now, self.zero_grad), self._deferral, self._life)
        parts = build(model, unwrapped(optimizer), self.config, calls)
        self.device = parts.device
        self.plan: Plan = parts.plan
        self.optimizer: OffloadOptimizer | None = parts.steps.optimizer
        self._step = parts.steps.step
        self._run = parts.steps.run
        self._counts = parts.steps.counts
        self._counters = parts.counters
        self._budgets = parts.budgets
        self._tree = parts.tree
        self._hooks = parts.hooks
        self._changes = parts.changes
        self._loader = parts.loader
        self._activations = parts.activations
        self._tensors = parts.tensors
        self._book = parts.book
        self._gradients = parts.gradients

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
        manager, step = self._require_open(), self._require_step("backward")
        step.micro_batches.note_meant()
        if not isinstance(loss, torch.Tensor):
            raise StateError(f"backward: expected the loss as a tensor but got {type(loss).__name__}; pass output.loss")
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
        self._book.adopt()
        with self._run.scaler.applied() as factor, self._deferral:
            try:
                self._hooks.backward(loss if factor is None else loss * factor, **kwargs)
                self._activations.close_pass()
                self._deferral.check()  # before it counts: whoever is interrupted here runs the micro-batch again
            except BaseException:
                step.micro_batches.done = 0
                _clean_up(self._hooks.unwind, self._book.clear, self._activations.abandon_pass, manager.reset)
                raise
            finally:
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
        step = self._require_step("step")
        step.micro_batches.note_meant()
        if not step.micro_batches.close():
            return False
        assert self.optimizer is not None
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
        return torch.nn.utils.clip_grad_norm_(self._book.parameters(), max_norm, norm_type)

    def drain(self) -> None:
        """Wait until the last step is done and home; without this, that is when the next forward has used all units.

        Whatever reads parameters or states waits by itself: this is for those who look at times and bytes.

        Raises:
            swap.SwapError: an I/O error.
        """
        self._require_open().finish_updates()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next :meth:`step` updates the parameters."""
        return self._step is None or self._step.micro_batches.last

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last step."""
        manager = self._require_open()
        self._hooks.unwind()
        self._drop_gradients(manager)
        if self._step is not None:
            self._step.micro_batches.done = 0

    def _drop_gradients(self, manager: Manager) -> None:
        self._book.clear()
        manager.drop_gradients()

    def _has_gradients(self) -> bool:
        """Tell whether any gradient waits for the next step; take over what somebody has put in ``.grad``."""
        manager = self._manager
        if manager is None or self._life.closed or self.optimizer is None:
            return False
        self._book.adopt()
        return manager.gradients.any_arrived

    def _step_now(self) -> bool:
        manager, step = self._require_open(), self._require_step("step")
        self._last_loss = None
        self._hooks.unwind()
        with self._deferral:  # Ctrl-C comes through when the step is done
            try:
                return self._take_step(manager, step)
            except BaseException as error:
                step.micro_batches.done = 0
                if manager.has_lost_content():
                    self._life.lose(f"a step failed half way ({type(error).__name__}: {error})")
                else:
                    with contextlib.suppress(Exception):  # the first error is on its way up
                        self._drop_gradients(manager)  # the micro-batches are run again, after every kind of error
                raise

    def _take_step(self, manager: Manager, step: Step) -> bool:
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
        self._changes.adopt()
        manager.forward.finish()  # updates of units that were not used since the last step
        manager.working.refuse_changes()
        self._book.adopt()
        norm = self._book.measure()
        if not self._step_is_ours and (norm.count == 0 or offloaded.only_makes_states(norm.squares)):
            self._book.clear()
            step.pass_over()
            if norm.count == 0:
                offloaded.note_nothing()
            return False
        if norm.count == 0:
            raise StateError("step: expected gradients but none has arrived since the last step; call backward first")
        taken = step.take(norm)
        self._book.clear()
        return taken

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
            return float(self._book.measure().squares ** 0.5 * self._require_step("grad_norm").averaging())
        return None if self._step is None else self._step.grad_norm

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1.0 unless float16 is trained."""
        return self._run.scaler.scale

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
            used = manager.tiers.used_bytes()
            if manager.tiers.store is not None:
                swapped = manager.tiers.store.stats()
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
            loss_scale=self._run.scaler.scale,
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
        self._changes.adopt()
        self._book.adopt()
        return take_digests(manager, self._counts, self._book.factors())

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
        if manager is None or self._life.closed or not self._life.here:
            return
        total = sum(unit.param_bytes for unit in self._tree.units)
        if restore is None:
            room = self._budgets[Tier.HOST].limit_bytes
            room += self._budgets[Tier.DEVICE].limit_bytes if self.device.type == "cpu" else 0
            restore = self._life.unusable is None and total <= room
        _clean_up(self._hooks.unwind)
        lost: Exception | None = None
        if restore:
            try:
                self._changes.adopt()
                self._hooks.binding.refuse_rebound()
            except Exception as error:  # told when the engine is closed
                lost = error
        else:
            manager.forward.abandon()  # nobody will see what they would have made
        self._life.close()
        if self.optimizer is not None:
            self.optimizer.release(lost=any(map(any, self._counts.counts.values())))
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
        self._life.end()
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
            if self._manager is not None:
                self.close(restore=False)

    # --- checks -----------------------------------------------------------------------------------------------------

    @property
    def _manager(self) -> Manager | None:
        return self._life.manager

    def _require_open(self) -> Manager:
        return self._life.require_open()

    def _require_step(self, what: str) -> Step:
        if self._step is None:
            raise StateError(f"{what}: this engine only evaluates; pass optimizer=offload.AdamW(...)")
        return self._step

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
