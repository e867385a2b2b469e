"""The engine: wraps a module and trains it within memory budgets.

Owns what users call, and what it promises them: here training, looking and closing; what reads and writes tensors is in
:mod:`offload.engine_tensors`, what saves and goes on in :mod:`offload.engine_runs`. The work is done below:
:mod:`offload.build` makes the parts, :mod:`offload.training` orders forward, backward and step,
:mod:`offload.checkpoint.module_state` reads and writes tensors, :mod:`offload.closing` ends.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.build import EngineCalls, build
from offload.checkpoint.pretrained import Weights, find_weights
from offload.checkpoint.run_of_ranks import run_of_rank
from offload.checkpoints import Checkpoints
from offload.closing import close, may_restore
from offload.config import Config
from offload.deciding import Decision
from offload.engine_runs import EngineRuns
from offload.engine_tensors import EngineTensors
from offload.errors import BudgetError, ConfigError, StateError
from offload.interrupt import Deferral
from offload.life import Life
from offload.module import refusals
from offload.module.clipping import clip_grad_norm_
from offload.module.pass_times import PassCalls
from offload.optim.takeover import unwrapped
from offload.optimizer import Calls, OffloadOptimizer, warn_of_zeros
from offload.planning.plan import Plan
from offload.planning.timing import Timing
from offload.report import Report, make_report
from offload.run_state import RunState
from offload.seeing.counted import counted_report
from offload.seeing.page import Content, write_page
from offload.several import APART, made_together, ranks_of
from offload.shards.manager import Manager
from offload.sleeping import Sleeping
from offload.snapshot import take_snapshot, take_spans
from offload.spans import Recorded
from offload.spec import OptimizerSpec
from offload.stats import Counters, Stats
from offload.trace import write_trace
from offload.training import Training
from offload.watching import Watch
from swap import SwapError

logger = logging.getLogger(__name__)

_LATE = "the client_state that was assigned meanwhile"

_LARGEST_STEP = 1 << 53  # of which a chart tells the next one


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


class Engine(EngineTensors, EngineRuns):
    """Trains a module whose parameters, gradients and optimizer states do not fit the device.

    Calling the engine calls the module. ``backward`` and ``step`` follow; ``loss.backward()`` works, too (not with
    float16, which needs the loss scaled). Gradients are averaged over `gradient_accumulation_steps` micro-batches:
    do not divide the loss (or pass ``gradient_reduction="sum"``). Everything is bit-identical for every placement.

    The module keeps its parameters' names, shapes, dtypes and identity; between uses they may have no memory of their
    own. Reading one brings it; writing needs :meth:`gather` or :meth:`apply`. After backward, ``parameter.grad`` is a
    handle that torch's clipping works on; :meth:`gather_gradients` gives the elements.

    Attributes:
        module: the wrapped module.
        reference: the reference model; None where there is none.
        optimizer: a ``torch.optim.Optimizer`` over its parameters; None for an engine that only evaluates.
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
        reference: nn.Module | None = None,
        stage: int | str | None = None,
        group: Any = None,
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
            weights: a folder with safetensors, or one such file: values of parameters and saved buffers, on the meta
                device or the CPU. What no file has keeps its own on the CPU. It is read chunk by chunk, each parameter
                straight to its home. A model of transformers gets what its ``from_pretrained`` would give it: keys are
                renamed, what the files lack is initialised, and both are logged. Of another module, each key has to be
                there.
            reference: a model beside it that is only evaluated, such as DPO's. The budgets, and the region of the
                device for units in use, are those of both. Its parameters are frozen; :meth:`gather` writes to them. No
                checkpoint or state dict has it.
            stage: of ZeRO, where several processes train together. 1 or 2: each has a slice of gradients and states,
                and with 2, gradients leave during backward. 3: of parameters, too. ``"auto"``: if the memory of each
                holds whole parameters, 1 on CPUs and 2 on accelerators; else 3. ``"apart"``: without an optimizer, each
                process has an engine that evaluates, and knows of no other. None is for one process.
            group: ``torch.distributed.ProcessGroup`` of these processes; None for the default one. Or a ``DeviceMesh``
                of all processes: (ranks), or (nodes, ranks of a node). Each node has all slices then, and the other
                nodes have the same ones. Gradients are added up within nodes first, which has other bits.
            **options: options of :class:`offload.Config`, on top of `config`.

        Raises:
            ConfigError: unknown or contradicting options, or a model that cannot be trained as asked; `weights` that
                are damaged, or not the model's.
            BudgetError: the budgets cannot hold the model; nothing has been loaded then.
            StateError: the model is wrapped already, or somebody else places, calls or reduces its parameters.
            RanksError: ranks have different models, values or options, or one has not come.
            swap.SwapError: the NVMe path is missing, not writable, or full.
        """
        begin = time.perf_counter()
        self._life = Life(trains=optimizer is not None)
        if not isinstance(model, nn.Module):
            raise ConfigError(f"model: expected a torch.nn.Module but got {type(model).__name__}")
        counters = Counters()
        ranks = ranks_of(stage, group, counters, trains=optimizer is not None)
        self._deferral = Deferral(self._life.tear)
        is_made = False
        try:
            with self._deferral:
                with made_together(ranks):
                    refusals.refuse_model(model)
                    if reference is not None:
                        refusals.refuse_reference(model, reference)
                        reference.requires_grad_(False)
                    self.module, self.reference = model, reference
                    self.config = run_of_rank(Config.load(config, **options).absolute(), ranks)
                    self._durable = self._begin_run(optimizer)
                    passes = PassCalls(self._pass_begins, self._passed)
                    optimizing = Calls(self._step_now, self.zero_grad, self._deferral)
                    calls = EngineCalls(optimizing, self._deferral, passes, self._life, self._durable)
                    if weights is not None and not isinstance(weights, Weights):
                        weights = find_weights(model, weights)
                    with contextlib.closing(weights) if weights is not None else contextlib.nullcontext():
                        self._parts = build(
                            model,
                            unwrapped(optimizer),
                            self.config,
                            calls,
                            ranks,
                            counters,
                            weights,
                            reference=reference,
                            stage=None if stage == APART else stage,
                        )
                parts, life = self._parts, self._life
                self._watch = Watch(type(model).__name__, self.config, parts, life)
                self._decision = Decision(model, parts, self.config, life)
                self._training = Training(parts, life, self._deferral, self._decision, self._watch, self._durable)
                state = RunState(model, parts, life)
                self._checkpoints = Checkpoints(state, parts, life, self._training)
                self._sleeping = Sleeping(self.config, parts, life, self._deferral, self._durable)
                self.device = parts.device.place
                self.optimizer: OffloadOptimizer | None = parts.steps.optimizer
                self._step = parts.steps.step
                is_made = True
                self._resumed = self._take_up(state, begin)
                _engines.add(self)
        except BaseException:  # Ctrl-C, perhaps, that came meanwhile
            if is_made:
                self._close(restore=None, commit=False)
            raise

    # --- training ---------------------------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's forward.

        Args:
            *args: of the module's forward; tensors on :attr:`device`.
            **kwargs: the same.

        Returns:
            What the module's forward returns.

        Raises:
            StateError: the engine is closed or asleep, or a batch is on the wrong device.
            BudgetError: activations do not fit the device budget.
        """
        self._require_open()
        refusals.refuse_batch(args, kwargs, self.device)
        return self._training.forward(self.module, args, kwargs)

    forward = __call__

    def backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        """Run backward from `loss`.

        Args:
            loss: tensor of one element, on :attr:`device`, not divided by the number of accumulation steps.
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
        with self._deferral:
            if not self._training.has_gradients():
                raise StateError("clip_grad_norm_: expected gradients but none has arrived; call backward first")
            return clip_grad_norm_(self._parts.book.parameters(), max_norm, norm_type)

    def drain(self) -> None:
        """Wait until the last step is done and home; without this, that is when the next forward has used all units.

        A durable run commits it, too; not if ``client_state`` was assigned for the step before, and not for this one.
        Whatever reads parameters or states waits by itself: this is for those who look at times and bytes.

        Raises:
            StateError: the engine is closed, asleep or unusable.
            swap.SwapError: an I/O error.
        """
        self._require_open().finish_updates()
        if self._durable is not None:
            self._durable.finish()
        self._checkpoints.tell()

    def is_gradient_accumulation_boundary(self) -> bool:
        """Tell whether the next :meth:`step` updates the parameters."""
        return self._step is None or self._step.micro_batches.last

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have arrived since the last step, and begin its micro-batches anew.

        Args:
            set_to_none: without it, the same happens, and a warning says what that changes.

        Raises:
            StateError: the engine is closed or asleep.
        """
        if not set_to_none:
            warn_of_zeros("zero_grad")
        self._require_open()
        if self._step is not None:
            self._step.micro_batches.note_zeroed()
        self._training.zero_grad()

    def _step_now(self) -> bool:
        self._require_open()  # first: a model whose engine was not made may have hooks that lead here
        return self._training.take_step()

    def _pass_begins(self, what: str) -> None:
        self._watch.begins(what)

    def _passed(self, what: str) -> None:
        self._watch.passed(what)

    # --- looking at it ----------------------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan:
        """Homes, buffers and predicted bytes; printable. What activations move is in it from the first step on."""
        return self._decision.plan()

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm, averaged and unscaled, before clipping; None before the first backward.

        It is that of the gradients that wait for the next step, or of the last step where there are none.

        Raises:
            StateError: gradients wait, and the engine is asleep.
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
        """Put the module in training mode, or with False in evaluation mode; returns the engine."""
        self.module.train(mode)
        return self

    def eval(self) -> Engine:
        """Put the module in evaluation mode; returns the engine."""
        self.module.eval()
        return self

    def generate(self, *args: Any, **kwargs: Any) -> Any:
        """Call the module's ``generate``, as models of transformers have it.

        Args:
            *args: of that method; tensors on :attr:`device`.
            **kwargs: the same.

        Returns:
            What it returns.

        Raises:
            StateError: the module has none, or the engine is closed or asleep.
        """
        self._require_open()
        method = getattr(self.module, "generate", None)
        if method is None:
            raise StateError(
                f"generate: expected a module that has it but got {type(self.module).__name__}; call the engine, "
                "or the part of engine.module that generates"
            )
        return method(*args, **kwargs)

    def stats(self) -> Stats:
        """Return a frozen snapshot of bytes, seconds, hits and stalls."""
        return take_snapshot(self._parts, self._manager)

    def report(
        self,
        path: str | Path | None = None,
        *,
        predicted: Timing | None = None,
        losses: Sequence[tuple[int, float]] = (),
    ) -> Report:
        """Return where the time of the last steps went; ``print`` it, or have a page with charts of the whole run.

        It has seconds, bytes and GB/s per lane, the lane that binds, what computing has waited for, and the tiers. It
        looks at a few steps, of which everything is still recorded, or at what was counted of the last one. An
        accelerator does first what it was given.

        Args:
            path: of an HTML file for a browser, which is replaced; its folder must exist. None writes none. Of several
                ranks, each needs a path of its own.
            predicted: ``timing`` of :func:`offload.plan`: shown beside what was measured. That is None without a batch
                or a machine, and for several ranks: nothing is compared then.
            losses: steps and their losses, in the order of steps, for the page. Without them it has the losses that
                :meth:`backward` got; on an accelerator none, for looking at one would wait.

        Raises:
            ConfigError: the file cannot be written, or an argument is none of these.
            StateError: the engine is closed.
        """
        self._life.require_records("report")
        if predicted is not None and not isinstance(predicted, Timing):
            raise ConfigError(
                f"report: predicted: expected the timing of a forecast but got a {type(predicted).__name__}; pass "
                "offload.plan(...).timing"
            )
        try:
            pairs = [(int(step), float(loss)) for step, loss in losses]
            if any(abs(step) >= _LARGEST_STEP for step, _ in pairs):
                raise ValueError
        except (TypeError, ValueError, OverflowError):
            raise ConfigError(f"report: losses: expected pairs of a step and its loss but got {losses!r}") from None
        if pairs and path is None:
            raise ConfigError("report: losses: expected a path beside them, for the page alone shows them; pass path=")
        spans = self._spans("report")
        seconds = None if predicted is None else {"step": predicted.step_s, **predicted.seconds}
        host = self._parts.device.addressable
        stats, samples = self.stats(), self._watch.samples()
        report = make_report(spans, stats, host_computes=host, predicted=seconds)
        if not report.step_seconds:
            counted = counted_report(spans, samples, stats, host_computes=host, predicted=seconds)
            report = report if counted is None else counted
        report = dataclasses.replace(report, activations=self._decision.told)
        if path is not None:
            title = f"{self._watch.title}{self._which_rank()}"
            write_page(path, Content(title, str(self.plan), report, spans, samples, pairs))
        return report

    def trace(self, path: str | Path) -> None:
        """Write what all lanes have lately done to a file, for https://ui.perfetto.dev or ``chrome://tracing``.

        An accelerator does first what it was given.

        Args:
            path: of the file (JSON), which is replaced; its folder must exist. Of several ranks, each needs a path of
                its own.

        Raises:
            ConfigError: the file cannot be written.
            StateError: the engine is closed.
        """
        write_trace(path, self._spans("trace"), f"offload{self._which_rank()}")

    def _spans(self, what: str) -> Recorded:
        """Return what all lanes have lately done; waits for the device, unless it may be what the engine has lost."""
        manager = self._life.require_records(what)
        if self._life.unusable is None:
            self._parts.device.synchronize()
        return take_spans(self._parts, manager)

    def _which_rank(self) -> str:
        """Return which of several ranks this is, in words."""
        ranks = self._parts.ranks
        return f", rank {ranks.rank} of {ranks.world}" if ranks.world > 1 else ""

    # --- sharing the memory -----------------------------------------------------------------------------------------

    def sleep(self, *, host: bool = False) -> None:
        """Give the device's memory back until :meth:`wake`: for generation, or another engine, on the same GPU.

        The last step is finished first; a durable run commits it as :meth:`drain` does. What lives on the device goes
        to host memory, within the budget, else to files on the drive. Gradients that wait for the next step are kept.
        Until :meth:`wake`, everything but :meth:`stats`, :meth:`report`, :meth:`trace` and :meth:`close` is refused.
        Buffers of the module stay on the device.

        Several ranks call this together, and :meth:`wake`: if one of them cannot, none does.

        Args:
            host: give host memory back, too; what lives there goes to files on the drive.

        Raises:
            BudgetError: neither the host budget nor the drive has room.
            StateError: the engine is closed, asleep or unusable, parameters are in use, or a tensor outside the model
                views them. The engine is awake then.
            RanksError: another rank has failed, or is elsewhere. The engine is awake then.
            swap.SwapError: an I/O error. The engine is awake then.
        """
        self._sleeping.sleep(host=host)

    def wake(self) -> None:
        """Take the memory again, with the same bits.

        Raises:
            BudgetError: somebody else has it. The engine is still asleep, and nothing is lost.
            StateError: the engine is not asleep.
            RanksError: another rank has failed, or is elsewhere. The engine is still asleep.
            swap.SwapError: an I/O error. The engine is still asleep.
        """
        self._sleeping.wake()

    # --- closing ----------------------------------------------------------------------------------------------------

    @staticmethod
    def of(model: nn.Module) -> Engine | None:
        """Return the open engine that has parameters of a model; None where none has.

        A model keeps its engine, also if no variable has it any more: after an error in a notebook, for one. Close it
        before the model gets a new one, or go on with it.

        Args:
            model: any module.
        """
        parameters = list(model.parameters())
        engines = (engine for engine in list(_engines) if not engine._life.closed)
        return next((e for e in engines if any(map(e._parts.hooks.binding.places_of, parameters))), None)

    def close(self, *, restore: bool | None = None) -> None:
        """Free all tiers; idempotent.

        The optimizer's states are freed. To go on in a new engine, save ``engine.optimizer.state_dict()`` before, and
        load it into the new engine's optimizer. Where each of several ranks has slices of parameters, closing waits for
        the others, which may need them.

        Args:
            restore: give the module's parameters ordinary memory again, on the device they came from. None does so
                where they fit the host budget (on a CPU, with the device budget) that is being freed. Without it, the
                module's forward raises a clear error.

        Raises:
            BudgetError: the engine is asleep, and its memory is gone, so that the parameters cannot be given back, or
                a ``client_state`` that was assigned meanwhile cannot be committed. It is still asleep, and nothing is
                lost: free memory, or pass ``restore=False``, which closes without what cannot be had.
            swap.SwapError: the parameters could not be read back, or the drive hangs; the engine is closed then, too,
                unless it was asleep, and is still.
            StateError: somebody has changed a parameter in a forward, and the change is lost; the engine is closed.
        """
        self._close(restore=restore, commit=True)

    def _close(self, *, restore: bool | None, commit: bool, meets: bool = True) -> None:
        manager = self._manager
        if manager is None or self._life.closed or not self._life.here:
            return
        with self._deferral, contextlib.ExitStack() as last:
            last.enter_context(torch.inference_mode(False))  # parameters that are given back shall be ordinary ones
            restore = self._wake_to_close(restore, commit=commit, meets=meets)  # first: if it cannot, it sleeps on
            last.callback(self._sleeping.close)
            last.callback(self._watch.close)
            modules = [self.module] if self.reference is None else [self.module, self.reference]
            last.callback(close, modules, self._parts, self._life, manager, restore=restore, meets=meets)
            last.callback(self._checkpoints.settle)
            if commit and self._durable is not None and self._life.unusable is None and not self._life.asleep:
                self._durable.finish()

    def _wake_to_close(self, restore: bool | None, *, commit: bool, meets: bool) -> bool:
        """Wake the engine, if what is done at its end needs that; tell whether parameters are given back."""
        parts, life = self._parts, self._life
        wanted = may_restore(parts, life) if restore is None else restore
        if not life.asleep or life.unusable is not None:
            return wanted
        late = commit and self._durable is not None and self._durable.was_assigned_late
        meets = meets and restore is not False and parts.plan.request.slices_parameters and parts.ranks.world > 1
        if wanted or meets or late:
            left = [what for what, is_wanted in (("the parameters", wanted), (_LATE, late)) if is_wanted]
            try:
                self._sleeping.wake_alone(" and ".join(left))
            except (BudgetError, SwapError) as error:
                if meets:
                    parts.ranks.fail(error)  # the others wait for this one's slices
                if wanted or (late and restore is None):
                    raise
                why = error.__cause__ or error
                logger.warning("close: the engine is closed asleep%s: %s", f", without {_LATE}" if late else "", why)
        return wanted

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled.

        Raises:
            StateError: always.
        """
        raise StateError(
            "engine: cannot be copied or pickled; save engine.state_dict() and engine.optimizer.state_dict(), and load "
            "them into a new engine and its optimizer"
        )

    def __getattr__(self, name: str) -> Any:
        """Say of what modules have, and an engine has not, where it is.

        Raises:
            AttributeError: always.
        """
        raise AttributeError(refusals.not_there(type(self).__name__, name), name=name, obj=self)

    def __repr__(self) -> str:
        what = f"{type(self.module).__name__}: {self.plan.headline()}"
        state = "closed" if self._life.closed else "asleep" if self._life.asleep else f"on {self.device}"
        return f"<offload.Engine of {what}, {state}>"

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
        except BaseException:  # Ctrl-C, which came before it was held back, perhaps
            self._close(restore=None, commit=error is None)
            raise

    def __del__(self) -> None:
        try:
            if self._manager is not None:
                self._close(restore=False, commit=False, meets=False)  # nobody knows when the others come here
        except Exception:  # the interpreter may be shutting down, without this module's names
            pass

    @property
    def _manager(self) -> Manager | None:
        return self._life.manager

    def _require_open(self) -> Manager:
        return self._life.require_open()
