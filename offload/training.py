"""The order of one engine's training: forward, backward, step, and what is undone where one of them fails.

Owns that order, and where Ctrl-C comes through. The hooks do the work of a forward and a backward pass
(:mod:`offload.module.hooks`), :mod:`offload.optim.step` that of a step. Next: :mod:`offload.engine` is the face.
"""

from __future__ import annotations

import contextlib
import time
import weakref
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from offload.build import Parts
from offload.closing import clean_up
from offload.deciding import Decision
from offload.durable import DurableRun
from offload.errors import TRAIN_LISTED, TRAIN_MORE, ConfigError, NonFiniteError, RanksError, StateError
from offload.interrupt import Deferral, calls_users_code
from offload.life import Life
from offload.memory.budget import Tier
from offload.module import refusals
from offload.optim.recipe import trainable_units
from offload.optim.step import Step
from offload.optimizer import OffloadOptimizer
from offload.several import agree_on_step, where_of_step
from offload.shards.manager import Manager
from offload.spans import STEP
from offload.watching import Watch


class Training:
    """Trains one engine's module. See the module's text."""

    def __init__(
        self,
        parts: Parts,
        life: Life,
        deferral: Deferral,
        decision: Decision,
        watch: Watch,
        durable: DurableRun | None = None,
    ) -> None:
        """Prepare.

        Args:
            parts: of the engine.
            life: whether it can be used.
            deferral: holds Ctrl-C back while something is half done.
            decision: of what becomes of activations.
            watch: sees steps, and what losses are.
            durable: learns when a step ends; None where nothing is committed.
        """
        self._decision = decision
        self._durable = durable
        self._watch = watch
        self._hooks = parts.hooks
        self._changes = parts.changes
        self._activations = parts.activations
        self._book = parts.book
        self._counters = parts.counters
        self._device = parts.device
        self._budget = parts.budgets[Tier.DEVICE]
        self._run = parts.steps.run
        self._step = parts.steps.step
        self._optimizer = parts.steps.optimizer
        self._life = life
        self._deferral = deferral
        self._ranks = parts.ranks
        self._names = parts.tree.names()
        self._is_sliced = parts.plan.request.slices_parameters
        self._is_ours = False  # the step: not asked for by optimizer.step(), which does nothing where torch's would not
        self._last_loss: weakref.ref[torch.Tensor] | None = None

    @calls_users_code
    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the module's forward; see ``Engine.__call__``."""
        self._hooks.refuse_other_threads()
        all_wait = torch.is_grad_enabled() or self._is_sliced
        telling = self._telling_ranks() if all_wait else contextlib.nullcontext()
        with telling, self._hooks.times.counting("forward"), self._deferral:
            try:
                with self._hooks.watch():  # hooks of the user may run before ours, or after
                    output = module(*args, **kwargs)
                if not torch.is_grad_enabled():
                    self._activations.close_pass()
                return output
            except BaseException as error:
                clean_up(self._hooks.unwind, self._activations.abandon_pass)
                self._tell(error, "a forward")
                refusals.explain_transform(error)
                raise

    def backward(self, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        """Run backward; see ``Engine.backward``."""
        drops = True  # what Ctrl-C tears out of: outside of the block, or behind its last safe point
        try:
            with self._deferral:
                drops = False
                manager, step = self._life.require_open(), self.require_step("backward")
                self._hooks.refuse_other_threads()
                step.micro_batches.note_meant()
                with self._telling_ranks(NonFiniteError), self._hooks.times.counting("backward"):
                    self._backward(manager, step, loss, kwargs)
                drops = True
        except BaseException:
            if drops and self._life.manager is not None and not self._life.asleep:
                with self._deferral:
                    self._forget_step(self._life.manager)
            raise

    def _backward(self, manager: Manager, step: Step, loss: torch.Tensor, kwargs: dict[str, Any]) -> None:
        if self._ranks.world == 1:
            self._refuse_loss(manager, loss)
        try:
            self._book.adopt()
            with self._run.scaler.applied() as factor:
                gradients = manager.gradients
                if self._ranks.world > 1:
                    self._refuse_loss(manager, loss)
                gradients.begin_backward(lambda: self._hooks.reached(loss, **kwargs))
                self._hooks.backward(loss if factor is None else loss * factor, **kwargs)
                self._activations.close_pass()
                if self._ranks.world > 1:
                    gradients.exchange()
                    self._book.note_arrived()
            self._deferral.check()  # before it counts: whoever is interrupted here runs the micro-batch again
        except BaseException as error:
            self._tell_ranks(error, NonFiniteError)  # first: what is under way with them ends
            step.micro_batches.drop()
            held = self._budget.claims()
            clean_up(self._hooks.unwind, self._book.clear, self._activations.abandon_pass, manager.reset)
            self._tell(error, "a backward pass", held)
            raise
        step.micro_batches.note_backward()
        if self._watch.knows_losses and loss.numel() == 1 and loss.is_floating_point():
            self._watch.note_loss(loss.detach().item())
        kept = kwargs.get("retain_graph") or kwargs.get("create_graph")
        self._last_loss = None if kept else weakref.ref(loss)

    def _refuse_loss(self, manager: Manager, loss: torch.Tensor) -> None:
        """Refuse what backward cannot begin from; all ranks refuse it where one does."""
        last = None if self._last_loss is None else self._last_loss()
        try:
            refusals.refuse_loss(loss, last, several_ranks=self._ranks.world > 1)
        except (NonFiniteError, StateError) as error:
            manager.gradients.refuse_backward(error)
            raise

    def step(self) -> bool:
        """Close a micro-batch; at the end of an accumulation, take the step; see ``Engine.step``."""
        manager = self._life.require_open()
        step = self.require_step("step")
        assert self._optimizer is not None
        before = self._run.steps
        self._is_ours = True
        try:
            if not step.micro_batches.close():
                return False
            self._optimizer.step()  # so that its hooks and LR schedulers see it
        except Exception:
            raise
        except BaseException:  # Ctrl-C: who is interrupted here runs the micro-batches again, unless the step was taken
            if self._run.steps == before and self._life.unusable is None:
                with self._deferral:
                    self._forget_step(manager)
            raise
        finally:
            self._is_ours = False
        return self._run.steps > before

    def take_step(self) -> bool:
        """Take the optimizer's step now, whatever the accumulation count; False where nothing was updated."""
        manager, step = self._life.require_open(), self.require_step("step")
        assert self._optimizer is not None
        self._hooks.refuse_other_threads()
        self._last_loss = None
        self._hooks.unwind()
        with self._telling_ranks(NonFiniteError, ConfigError), self._deferral:  # Ctrl-C comes when the step is done
            try:
                before = self._run.steps + self._run.skipped
                taken = self._take_step(manager, step, self._optimizer)
                if self._run.steps + self._run.skipped > before:
                    self._note_end()
                return taken
            except BaseException as error:
                step.micro_batches.drop()
                if manager.has_lost_content():
                    self._life.lose(f"a step failed half way ({type(error).__name__}: {error})")
                else:
                    with contextlib.suppress(Exception):  # the first error is on its way up
                        self._drop_gradients(manager)  # the micro-batches are run again, after every kind of error
                raise
            finally:
                if self._durable is not None:
                    self._durable.end_step()

    def zero_grad(self) -> None:
        """Forget the gradients that have arrived since the last step."""
        manager = self._life.require_open()
        self._hooks.refuse_other_threads()
        with self._deferral:
            self._forget_step(manager)

    def has_gradients(self) -> bool:
        """Tell whether any gradient waits for the next step; take over what somebody has put in ``.grad``."""
        manager = self._life.manager
        if manager is None or self._life.closed or self._optimizer is None:
            return False
        self._book.adopt()
        return manager.gradients.any_arrived

    @property
    def grad_norm(self) -> float | None:
        """Global gradient norm, averaged and unscaled, before clipping; see ``Engine.grad_norm``."""
        if self.has_gradients():
            return float(self._book.measure().squares ** 0.5 * self.require_step("grad_norm").averaging())
        return None if self._step is None else self._step.grad_norm

    def require_step(self, what: str) -> Step:
        """Return what takes the steps.

        Raises:
            StateError: the engine only evaluates.
        """
        if self._step is None:
            raise StateError(f"{what}: this engine only evaluates; pass optimizer=offload.AdamW(...)")
        return self._step

    def _take_step(self, manager: Manager, step: Step, optimizer: OffloadOptimizer) -> bool:
        with self._refusing_together(manager):
            self._prepare_step(manager, optimizer)
        done = step.micro_batches.done
        agree_on_step(self._ranks, manager, self._book.factors, optimizer.param_groups, self._names, self._run, done)
        manager.await_gradients(step.guess)
        norm = self._book.measure()
        if not self._is_ours and (norm.count == 0 or optimizer.only_makes_states(norm.squares)):
            self._book.clear()
            step.pass_over()
            if norm.count == 0:
                optimizer.note_nothing()
            return False
        with self._refusing_together(manager):  # all ranks: they have agreed on which gradients wait
            if norm.count == 0:
                raise StateError(
                    "step: expected gradients but none has arrived since the last step; call backward first"
                )
        self._decision.decide()
        taken = step.take(norm)
        self._book.clear()
        return taken

    def _prepare_step(self, manager: Manager, optimizer: OffloadOptimizer) -> None:
        """Finish what comes before a step, and refuse what this rank alone can tell."""
        untrained = self._hooks.untrained()
        if untrained is not None:
            name, parameter = untrained
            raise StateError(
                f"parameter {name}: requires a gradient but was frozen, or not there, when the engine was made; freeze "
                f"it again, or {TRAIN_LISTED if optimizer.lists(parameter) else TRAIN_MORE}"
            )
        optimizer.refuse_foreign()
        self._activations.close_pass()
        self._changes.adopt()
        manager.finish_step()  # with updates of units that were not used since the last one
        manager.bound.refuse_changes()
        self._book.adopt()
        if self._ranks.world > 1:  # before others begin to update
            arrived = manager.gradients.arrived
            manager.tiers.refuse_in_use(unit for unit in trainable_units(manager.units) if any(arrived(unit.index)))

    @contextlib.contextmanager
    def _refusing_together(self, manager: Manager) -> Iterator[None]:
        """Bring what refuses a step, before it has changed anything, to where all ranks meet: they can be used on."""
        try:
            yield
        except (StateError, ConfigError) as error:
            if not manager.has_lost_content():
                with contextlib.suppress(RanksError):  # they have failed, and this is the first that is known of it
                    self._ranks.agree(where_of_step(self._run), error=error)
            raise

    @contextlib.contextmanager
    def _telling_ranks(self, *shared: type[BaseException]) -> Iterator[None]:
        """Tell other ranks of an error, for they would wait for this one; not of those that all of them raise."""
        try:
            yield
        except BaseException as error:
            self._tell_ranks(error, *shared)
            raise

    def _tell_ranks(self, error: BaseException, *shared: type[BaseException]) -> None:
        """Tell other ranks of an error, unless all of them raise it."""
        if not isinstance(error, (RanksError, *shared)):
            self._ranks.fail(error)

    def _note_end(self) -> None:
        """Note when a step ended, which loss scaling may have skipped: the next one begins."""
        end = time.perf_counter()
        begin = self._watch.stepped(end)
        if begin is not None:
            self._counters.spans.add(STEP, f"step {self._run.steps + self._run.skipped}", begin, end)

    def _tell(self, error: BaseException, what: str, held: Mapping[str, int] | None = None) -> None:
        """Raise what tells more than `error`, where the device's memory is full.

        Raises:
            BudgetError: it is.
        """
        budget = self._budget
        held = budget.claims() if held is None else held
        full = self._device.out_of_memory(error, what=what, limit_bytes=budget.limit_bytes, held=held)
        self._decision.note_failure(error if full is None else full)
        if full is not None:
            raise full from error

    def _forget_step(self, manager: Manager) -> None:
        """Let the step that comes next begin anew."""
        self._hooks.unwind()
        self._drop_gradients(manager)
        if self._step is not None:
            self._step.micro_batches.drop()

    def _drop_gradients(self, manager: Manager) -> None:
        self._book.clear()
        manager.drop_gradients()
