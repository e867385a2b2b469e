"""The engine: wraps a module and trains it within memory budgets.

Owns what users call, and what it promises them. The work is done below: :mod:`offload.build` makes the parts,
:mod:`offload.training` orders forward, backward and step, :mod:`offload.checkpoint.module_state` reads and writes
tensors, :mod:`offload.closing` ends.
"""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import EngineCalls, build
from offload.checkpoint.digests import take_digests
from offload.checkpoint.foreign.found import Facts
from offload.checkpoint.pretrained import Weights, find_weights
from offload.checkpoints import Checkpoints
from offload.closing import close
from offload.config import Config
from offload.durable import DurableRun, Resumed
from offload.errors import ConfigError, StateError
from offload.importing import import_checkpoint
from offload.interrupt import Deferral
from offload.life import Life
from offload.module import refusals
from offload.optim.takeover import unwrapped
from offload.optimizer import Calls, OffloadOptimizer
from offload.planning.plan import Plan
from offload.run_state import RunState
from offload.shards.manager import Manager
from offload.snapshot import take_snapshot
from offload.spec import OptimizerSpec
from offload.stats import Stats
from offload.training import Training

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
        *,
        weights: str | Path | Weights | None = None,
        **options: Any,
    ) -> None:
        """Plan, then load the model into its tiers.

        Args:
            model: any module, on the CPU; parameters may be on the meta device (see `weights`, and
                ``Config.init_weights``).
            optimizer: ``offload.AdamW(...)`` (or ``Adam``, ``SGD``, ``Lion``, ``Adagrad``, ``LAMB``), with parameters
                and groups as in torch or for all that are trainable; or an optimizer of torch over the model's
                parameters, which is taken over: kernels step like ``torch.optim.AdamW``, ``Adam``, ``SGD`` and
                ``Adagrad``, other classes make their steps themselves, slower; None for an engine that only evaluates.
            config: options as Config, dict or JSON file.
            weights: a folder with safetensors, or one such file, for what is on the meta device; the rest of the model
                keeps its own values. It is read chunk by chunk, each parameter straight to its home. A model of
                transformers gets what its ``from_pretrained`` would give it: keys are renamed, what the files lack is
                initialised, and both are logged. Of another module, each key has to be there.
            **options: options of :class:`offload.Config`, on top of `config`.

        Raises:
            ConfigError: unknown or contradicting options, or a model that cannot be trained as asked; `weights` that
                are damaged, or not the model's.
            BudgetError: the budgets cannot hold the model; nothing has been loaded then.
            StateError: the model is wrapped already, or somebody else places, calls or reduces its parameters.
            swap.SwapError: the NVMe path is missing, not writable, or full.
        """
        begin = time.perf_counter()
        self._life = Life(trains=optimizer is not None)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module but got {type(model).__name__}")
        refusals.refuse_ranks()
        refusals.refuse_model(model)
        self.module = model
        self.config = Config.load(config, **options)
        deferral = Deferral()
        self._durable = self._begin_run(optimizer)
        calls = EngineCalls(Calls(self._step_now, self.zero_grad), deferral, self._life, self._durable)
        if weights is not None and not isinstance(weights, Weights):
            weights = find_weights(model, weights)
        with contextlib.closing(weights) if weights is not None else contextlib.nullcontext():
            self._parts = build(model, unwrapped(optimizer), self.config, calls, weights)
        self._training = Training(self._parts, self._life, deferral, self._durable)
        state = RunState(model, self._parts, self._life)
        self._checkpoints = Checkpoints(state, self._parts, self._life, self._training)
        self.device = self._parts.device.place
        self.plan: Plan = self._parts.plan
        self.optimizer: OffloadOptimizer | None = self._parts.steps.optimizer
        self._step = self._parts.steps.step
        self._resumed = None if self._durable is None else self._take_up(self._durable, state, begin)

    # --- training ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Raises:
            StateError: the engine is closed, or a batch is on the wrong device.
            BudgetError: activations do not fit the device budget.
        """
        self._require_open()
        refusals.refuse_batch(args, kwargs, self.device)
        return self._training.forward(self.module, args, kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward from `loss`.

        Args:
            loss: scalar tensor, not divided by the number of accumulation steps.
            **kwargs: passed to ``torch.Tensor.backward``.

        Raises:
            NonFiniteError: the loss is NaN or infinite; no gradient was computed. A loss on an accelerator is not
                looked at, for that would wait for the forward: :meth:`step` refuses the gradients that come of it.
            StateError: backward was called for this loss already, or the engine is closed.
        """
        self._training.backward(loss, kwargs)

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
        return self._training.step()

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
        if not self._training.has_gradients():
            raise StateError("clip_grad_norm_: expected gradients but none has arrived; call backward first")
        return torch.nn.utils.clip_grad_norm_(self._parts.book.parameters(), max_norm, norm_type)

    def drain(self) -> None:
        """Wait until the last step is done and home; without this, that is when the next forward has used all units.

        A durable run commits it, too; not if ``client_state`` was assigned for the step before, and not for this one.
        Whatever reads parameters or states waits by itself: this is for those who look at times and bytes.

        Raises:
            swap.SwapError: an I/O error.
        """
        self._require_open().finish_updates()
        if self._durable is not None:
            self._durable.finish()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next :meth:`step` updates the parameters."""
        return self._step is None or self._step.micro_batches.last

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last step."""
        self._require_open()
        self._training.zero_grad()

    def _step_now(self) -> bool:
        self._require_open()  # first: a model whose engine was not made may have hooks that lead here
        return self._training.take_step()

    # --- reading and writing tensors --------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, torch.Tensor]:
        """Return the module's state dict with real tensors: parameters as CPU copies, buffers as they are.

        Copies that do not fit the host budget are on the drive, as those of ``optimizer.state_dict()``.
        """
        return self._parts.tensors.state_dict()

    def load_state_dict(self, state_dict: Mapping[str, torch.Tensor], strict: bool = True) -> None:
        """Load parameters and buffers by name; masters follow the given values, moments are kept.

        A 16-bit value that equals the present parameter leaves its master as it is, so that it does not matter whether
        the optimizer's state is loaded before or after.

        Raises:
            ConfigError: it is no mapping, or names or shapes do not fit (with `strict`, missing and unexpected names
                too).
            StateError: parameters are in use, inside :meth:`gather` or a forward. Nothing was loaded in either case.
        """
        self._parts.tensors.load(state_dict, strict=strict)

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
        return self._parts.gradients.gather(params, modify=modify)

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
        self._parts.tensors.apply(function, self.module if params is None else params)

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
        return self._parts.tensors.gather(params, modify=modify)

    def import_checkpoint(self, path: str | Path, *, strict: bool = True) -> Facts:
        """Go on with a run that another program has saved: weights, masters, optimizer states, step counts, loss scale.

        Args:
            path: a file of ``torch.save``, or a folder of the Hugging Face trainer, of DeepSpeed with ZeRO-1, 2 or 3,
                or of torch.distributed.checkpoint. Pickles are read without running what they name.
            strict: names and an optimizer's state must all be there, and no others.

        Returns:
            The small facts: which program, steps, epoch, and states of schedules and random numbers, which are yours to
            load.

        Raises:
            ConfigError: a file is missing, damaged or unknown, or does not fit the model or the optimizer. Nothing was
                loaded.
            StateError: parameters are in use, or the engine is closed. Nothing was loaded.
            swap.SwapError: an I/O error of the drive.
        """
        return import_checkpoint(path, self.module, self._parts, self._require_open(), strict=strict)

    def save_pretrained(self, directory: str | Path, **kwargs: Any) -> None:
        """Save a Hugging Face model with its own ``save_pretrained``; holds one file in host memory at a time.

        How large that is says ``max_shard_size``, one of the arguments that `kwargs` may have. A tied weight comes on
        top. Of a PEFT model, nothing but its adapters is read.

        Raises:
            StateError: the module has no ``save_pretrained``.
        """
        self._parts.tensors.save_pretrained(directory, **kwargs)

    def save_checkpoint(
        self,
        directory: str | Path,
        *,
        tag: str | None = None,
        client_state: Any = None,
        keep: int | None = None,
    ) -> Path:
        """Save everything that decides on the next step into a folder of `directory`, within the budgets.

        These are parameters, masters, moments as they are stored, step counts, parameter groups, the loss scale, the
        position in an accumulation with the gradients that wait, buffers, the random generators of torch, Python and
        NumPy, and `client_state`. The files are safetensors and one JSON index. Until the folder is complete and on the
        drive it has another name; ``latest`` is written last. So a save that ends early leaves the ones before.

        Args:
            directory: of the checkpoints; made where it is missing.
            tag: name of the folder; None: ``step-`` and the number of steps. One that is there is replaced.
            client_state: of schedulers, samplers and the like: nested dicts, lists, tuples, numbers, texts, bytes and
                tensors. :meth:`load_checkpoint` returns it.
            keep: so many checkpoints stay in `directory`, the latest ones; None: all.

        Returns:
            The folder.

        Raises:
            BudgetError: the budgets have no room for the smallest buffers.
            CheckpointError: `client_state` has something else, a name cannot be one, another save is under way in
                `directory`, or it cannot be written to.
            StateError: the engine is closed or unusable, or parameters or gradients are gathered.
            swap.SwapFullError: the drive has no room. Older checkpoints stay in every case.
            swap.SwapError: another I/O error.
        """
        if client_state is None and self._durable is not None:
            client_state = self._durable.client_state
        return self._checkpoints.save(directory, tag=tag, client_state=client_state, keep=keep)

    def load_checkpoint(self, directory: str | Path, *, tag: str | None = None, strict: bool = True) -> Any:
        """Go on where :meth:`save_checkpoint` was called, with the same bits, whatever the budgets are and were.

        Every byte is compared with its checksum. What waits for the next step is forgotten first.

        Args:
            directory: of the checkpoints, or the folder of one.
            tag: which; None: the latest.
            strict: refuse what is missing or left over, and what would lose bits. False loads what both have: other
                optimizers' states begin anew, and other dtypes of parameters and states are converted.

        Returns:
            What was saved as ``client_state``; an empty dict where nothing was.

        Raises:
            CheckpointError: there is none, it is damaged (names file, tensor and bytes), of a newer format, or does not
                fit this model, optimizer or ``state_dtype``.
            ConfigError: the parameter groups do not fit.
            StateError: the engine is closed or unusable, or parameters are in use.
            swap.SwapError: an I/O error. If it, or the damage, comes while parameters are written, the engine cannot be
                used further, and says so; in all other cases nothing was changed.
        """
        client_state = self._checkpoints.load(directory, tag=tag, strict=strict)
        if self._durable is not None:
            self._durable.client_state = client_state
            self._durable.end_step()
        return client_state

    # --- durable runs -----------------------------------------------------------------------------------------------

    @property
    def resumed(self) -> Resumed | None:
        """What this engine has found in its run directory, or among its checkpoints; None where it began anew."""
        return self._resumed

    @property
    def client_state(self) -> Any:
        """What the user keeps with each commit of a durable run: the data position, states of schedulers.

        Assign it after each step. What is assigned after ``step()``, and before the next forward that records
        gradients, is committed with that step. Reading it gives a fresh copy.

        Raises:
            StateError: the engine has no run directory.
            CheckpointError: what is assigned has something else than nested dicts, lists, tuples, numbers, texts, bytes
                and tensors; names it.
        """
        return self._require_durable().client_state

    @client_state.setter
    def client_state(self, value: Any) -> None:
        self._require_durable().client_state = value

    def _require_durable(self) -> DurableRun:
        if self._durable is None:
            raise StateError(
                "client_state: expected a durable run but the engine has no run_dir; pass run_dir=..., or use "
                "client_state of engine.save_checkpoint"
            )
        return self._durable

    def _begin_run(self, optimizer: object) -> DurableRun | None:
        if self.config.run_dir is None:
            return None
        if optimizer is None:
            raise ConfigError("run_dir: expected an engine that trains but got no optimizer; leave run_dir out")
        return DurableRun(str(self.config.paths()[0]))

    def _take_up(self, durable: DurableRun, state: RunState, begin: float) -> Resumed | None:
        """Go on with what is there, the newest of run directory and checkpoints."""
        durable.open(state, self._parts, self._life)
        try:
            source = str(self.config.paths()[0]) if durable.restore() else None
            if self.config.checkpoint_dir is not None and self.config.resume is not False:
                newer = self._checkpoints.newer(self.config.checkpoint_dir, None if source is None else self._steps)
                if newer is not None:
                    self.load_checkpoint(newer)
                    source = str(newer)
            if source is None and self.config.resume is True:
                raise ConfigError(
                    f"run_dir {self.config.paths()[0]}: resume=True expects a run there, or a checkpoint, but there is "
                    'none; pass resume="auto" to begin one'
                )
        except BaseException:
            self._close(restore=None, commit=False)
            raise
        if source is None:
            return None
        return Resumed(self._steps, durable.client_state, source, time.perf_counter() - begin)

    @property
    def _steps(self) -> int:
        return self._parts.steps.run.steps

    # --- looking at it ----------------------------------------------------------------------------------------------

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm, averaged and unscaled, before clipping; None before the first backward.

        It is that of the gradients that wait for the next step, or of the last step where there are none.
        """
        return self._training.grad_norm

    @property
    def loss_scale(self) -> float:
        """Current loss scale; 1.0 unless float16 is trained."""
        return self._parts.steps.run.scaler.scale

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
        return take_snapshot(self._parts, self._manager)

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
        self._parts.changes.adopt()
        self._parts.book.adopt()
        return take_digests(manager, self._parts.steps.counts, self._parts.book.factors())

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
        self._close(restore=restore, commit=True)

    def _close(self, *, restore: bool | None, commit: bool) -> None:
        manager = self._manager
        if manager is None or self._life.closed or not self._life.here:
            return
        with contextlib.ExitStack() as last:
            last.callback(close, self.module, self._parts, self._life, manager, restore=restore)
            if commit and self._durable is not None and self._life.unusable is None:
                self._durable.finish()

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
            self._close(restore=None, commit=error is None)
        except Exception as failure:
            if error is None:
                raise
            logger.warning("close: %s", failure)  # the error on its way up came first

    def __del__(self) -> None:
        try:
            if self._manager is not None:
                self._close(restore=False, commit=False)
        except Exception:  # the interpreter may be shutting down, without this module's names
            pass

    @property
    def _manager(self) -> Manager | None:
        return self._life.manager

    def _require_open(self) -> Manager:
        return self._life.require_open()
