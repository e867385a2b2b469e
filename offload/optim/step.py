"""One optimizer step: whose turn it is, the norm, the factor on all gradients, and its beginning.

Owns the count of micro-batches, who averages over them, the decision to clip or to skip, the loss scale's reaction,
and the guess that updates during backward are made by. What a step does to a unit is the business of
:mod:`offload.optim.recipe`; when it is done, that of :mod:`offload.shards.forward_updates`. Next:
:mod:`offload.training` calls :meth:`Step.take`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from offload.config import Config
from offload.errors import NonFiniteError, StateError
from offload.memory.transfer import CopyDeadlineError, LeftToWhoNeedsIt
from offload.optim.progress import Progress
from offload.optim.recipe import Recipe, StepCounts, trainable_units
from offload.optim.rules import Rule
from offload.planning.units import Unit, Where
from offload.shards.gathers import make_updates
from offload.shards.gradients import GradientNorm
from offload.shards.manager import Manager
from swap import SwapDeadlineError

logger = logging.getLogger(__name__)

CLIP_EPSILON = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does
MOST_CALM_STEPS = 16

Groups = dict[int, list[dict[str, Any] | None]]  # param group per slot of each trainable unit


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` defines it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + CLIP_EPSILON))


class Calm:
    """Whether a step is worth guessing: after calm ones, more of them after each wrong guess.

    A step is calm where each gradient comes in the backward pass that was said to be the last, and nothing multiplies
    it: nothing clips, and no trainer accumulates without saying so.
    """

    def __init__(self, *, expected: bool) -> None:
        """Begin.

        Args:
            expected: the first step is likely to be calm.
        """
        self._steps = 0
        self._needed = 0 if expected else 1

    def __bool__(self) -> bool:
        """Tell whether the next step is likely to be calm."""
        return self._steps >= self._needed

    def note(self, *, calm: bool, guessed: bool) -> None:
        """Note a step: whether it was calm, and whether a guess was made."""
        self._steps = self._steps + 1 if calm else 0
        if not calm:
            self._needed = min(2 * self._needed, MOST_CALM_STEPS) if guessed and self._needed else max(self._needed, 1)
        elif guessed:
            self._needed = max(self._needed // 2, 1)


class MicroBatches:
    """The micro-batches of a step, and who divides by their number.

    Attributes:
        count: of them in a step, as configured.
        done: closed since the last step.
    """

    def __init__(self, config: Config, world: int = 1) -> None:
        self.count = config.gradient_accumulation_steps
        self._world = world  # ranks, each of which has so many
        self.done = 0
        self._divides = config.gradient_reduction != "sum"
        self._is_said = config.gradient_reduction is not None
        self._is_meant = self._is_said  # by the user: told, or shown by how steps are made
        self._passes = 0  # of backward, in the one under way
        self._is_told = False
        self._is_drop_told = False

    @property
    def last(self) -> bool:
        """Whether the one under way is the last before the step."""
        return self.done + 1 >= self.count

    def is_final(self, passes: int) -> bool:
        """Tell whether the backward pass under way is the last one before the step; it is number `passes`."""
        return self.last or passes >= self.count

    def note_meant(self) -> None:
        """Note that the user lets the engine divide."""
        self._is_meant = True

    def note_backward(self) -> None:
        """Note a backward pass, of the micro-batch under way."""
        self._passes += 1

    def close(self) -> bool:
        """Close one; returns whether the step is due. Whoever seems to call this for all of them at once is told."""
        self.note_meant()
        passes, self._passes = self._passes, 0
        if passes == self.count > 1 and not self._is_told:
            self._is_told = True
            logger.warning(
                "step: closes one micro-batch of gradient_accumulation_steps=%d, but %d backward passes came since "
                "the last call; call engine.step() behind each of them. If they are losses of one micro-batch, go on",
                self.count,
                passes,
            )
        self.done += 1
        return self.done >= self.count

    def note_zeroed(self) -> None:
        """Note that the user forgets gradients; who does so before each micro-batch never steps, and is told once."""
        if self.done and not self._is_drop_told:
            self._is_drop_told = True
            logger.warning(
                "zero_grad: drops %d of gradient_accumulation_steps=%d micro-batches, which have to come again before "
                "the step; call it behind a step, or leave it out: a step does it",
                self.done,
                self.count,
            )

    def drop(self) -> None:
        """Forget those that are closed, and what has come of the one under way."""
        self.done = self._passes = 0

    def begin_step(self) -> None:
        """Begin the next step."""
        self.drop()
        self._is_meant = self._is_said

    def state_dict(self) -> dict[str, Any]:
        """Return the position in the step under way, as plain values."""
        return {"done": self.done, "meant": self._is_meant, "count": self.count}

    def can_go_on(self, state: Mapping[str, Any], *, waits: bool) -> bool:
        """Tell whether the step that `state` is of can end here: other micro-batches would be divided by.

        Args:
            state: that :meth:`state_dict` returned; older ones have no count.
            waits: some gradient does for that step.
        """
        count, done = state.get("count"), int(state["done"])
        if count is None:
            return done < self.count
        return count == self.count or not (waits or done)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what :meth:`state_dict` returned, if it can go on."""
        self.done = int(state["done"])
        self._is_meant = self._is_said or bool(state["meant"])

    @property
    def divisor(self) -> int:
        """What the sum over micro-batches is divided by."""
        return self.count * self._world if self._divides else 1

    def refuse_ambiguity(self) -> None:
        """Refuse a step of which nobody has said who divides by the number of micro-batches.

        Raises:
            StateError: it is such a step.
        """
        if self.count > 1 and not self._is_meant:
            raise StateError(
                f"step: expected engine.backward() or engine.step() where gradient_accumulation_steps={self.count} "
                "averages but got loss.backward() and optimizer.step(), as from trainers, which divide the loss; pass "
                'gradient_reduction="sum" if the loss is divided already, "mean" if it is not'
            )


class Step:
    """Takes the optimizer steps of one engine. See the module's text.

    Attributes:
        micro_batches: of the step under way.
        grad_norm: global norm of the last step's gradients, averaged and unscaled, before clipping; None before it.
        overlap: updates are made while backward and the next forward compute; else inside the step.
    """

    def __init__(
        self,
        manager: Manager,
        config: Config,
        rule: Rule,
        counts: StepCounts,
        run: Progress,
        groups: Callable[[], Groups],
    ) -> None:
        """Prepare.

        Args:
            manager: owner of the shards.
            config: says how to accumulate and to clip.
            rule: the optimizer.
            counts: updates so far.
            run: steps so far, and the loss scale.
            groups: returns the hyper-parameters as they are now.
        """
        self._manager = manager
        self._config = config
        self._rule = rule
        self._counts = counts
        self._run = run
        self._read_groups = groups
        self._calm = Calm(expected=config.max_grad_norm is None)
        world = manager.tiers.ranks.world
        self.micro_batches = MicroBatches(config, world)
        self.grad_norm: float | None = None
        self.overlap = world == 1  # with several, a step ends when all ranks have all parameters

    def averaging(self) -> float:
        """Return what makes the mean over micro-batches (or the sum) of a sum of scaled gradients."""
        return 1.0 / (self.micro_batches.divisor * self._run.scaler.scale)

    def guess(self) -> Recipe | None:
        """Return what the step will do if it clips nothing, None where that is unlikely."""
        return self._recipe(self.averaging()) if self.overlap and self._calm else None

    def take(self, norm: GradientNorm) -> bool:
        """Take a step with the gradients that have arrived; the updates are made when they are needed.

        Args:
            norm: of these gradients; at least one has arrived.

        Returns:
            False where float16 gradients overflowed: the step was skipped.

        Raises:
            ConfigError: a hyper-parameter is out of its range.
            NonFiniteError: a gradient is not finite.
            StateError: parameters are in use, or nobody has said who averages. Nothing was changed in any case.
            Exception: what an update has raised, as one of the user's class; a part of the step is lost.
        """
        self.micro_batches.refuse_ambiguity()
        manager, averaging = self._manager, self.averaging()
        guessed = manager.backward.guessed
        self.grad_norm = norm.squares**0.5 * averaging
        if norm.bad or norm.spoilt:
            self._calm.note(calm=False, guessed=guessed)
            return self._skip(norm)
        factor = clip_factor(norm.left**0.5 * averaging, self._config.max_grad_norm)
        as_expected = manager.gradients.most_passes <= self.micro_batches.count
        self._calm.note(calm=factor == 1.0 and not norm.factors and as_expected, guessed=guessed)
        manager.restart_schedule()
        recipe = self._recipe(factor * averaging, norm.factors)
        if self._rule.whole and not self.overlap:
            units = [unit for unit in trainable_units(manager.units) if recipe.ranges(unit)]
            manager.tiers.refuse_in_use(units)
            recipe.measure(manager, units, f"norms of step {self._run.steps + 1}")
        updated, left = self._begin(recipe)
        self._run.steps += 1
        self.micro_batches.begin_step()
        self._run.scaler.succeeded()
        if not self.overlap:
            make_updates(manager, updated)
        try:
            with LeftToWhoNeedsIt("step"):  # it is taken: who takes an error for its failure would take it again
                self._update_now(updated, left)
                manager.prefetch(uses=1)  # while nothing is updated, so that everything can be moved
                manager.forward.read_ahead()
                manager.prefetch()
        except (SwapDeadlineError, CopyDeadlineError) as error:  # whoever needs the bytes waits again
            logger.warning("step: %s", str(error))
        if manager.forward.failure is not None:  # nobody can meet later what has lost a part of the step
            raise manager.forward.failure
        return True

    def pass_over(self) -> None:
        """Leave a step out: nothing has arrived that it could use."""
        self.micro_batches.done = 0
        self._manager.drop_gradients()  # also where there are none: updates that were guessed may be under way
        self._manager.restart_schedule()

    def _begin(self, recipe: Recipe) -> tuple[list[Unit], list[Unit]]:
        """Begin the updates; returns the units that are updated, and those of them that are left to the forward."""
        manager = self._manager
        updated = [unit for unit in trainable_units(manager.units) if recipe.ranges(unit)]
        counted = {unit.index: recipe.updated(unit) for unit in updated}
        manager.tiers.refuse_in_use(updated)
        taken, under_way = manager.backward.reconcile(recipe)
        here = [unit for unit in updated if manager.on_device.makes(unit)]
        left = [unit for unit in updated if unit.index not in taken and unit not in here]
        order, stays = manager.order_of_use(), manager.tiers.plan.stays
        left.sort(key=lambda unit: (not stays(unit), order[unit.index]))
        try:
            manager.on_device.make(here, recipe.visit)
            manager.forward.begin(left, recipe.visit, manager.ahead, under_way)
            if under_way:
                manager.forward.join(manager.ahead, manager.backward.finish(recipe, manager.forward.advance_beside))
        except BaseException as error:
            if taken or here or manager.forward.hides_any:
                manager.forward.lose(error)
            manager.backward.withdraw_all()
            for index in under_way:
                manager.gradients.let_go(index)
            manager.ahead.drop(keep_slots=False)
            raise
        for index, slots in counted.items():
            for slot in slots:
                self._counts.counts[index][slot] += 1
        return updated, left

    def _update_now(self, updated: Sequence[Unit], left: Sequence[Unit]) -> None:
        """Make updates that nothing has to come for, and those of parameters that somebody views: as torch does."""
        manager = self._manager
        viewed = [unit for unit in updated if manager.bound.borrowed(unit.index)]
        for unit in left:
            if manager.tiers.plan.stays(unit) or unit in viewed:
                manager.forward.require(unit.index)
        for unit in viewed:
            manager.bound.count_update(unit)
        if viewed:
            manager.forward.finish_open()  # whoever views them may write to them: nothing may be on its way home

    def _recipe(self, grad_scale: float, factors: Mapping[Where, float] | None = None) -> Recipe:
        return Recipe(
            self._manager.tiers,
            self._counts,
            self._read_groups(),
            rule=self._rule,
            grad_scale=grad_scale,
            factors=factors,
        )

    def _skip(self, norm: GradientNorm) -> bool:
        """Leave everything as it is: a gradient is not finite."""
        self.pass_over()
        scaler = self._run.scaler
        if scaler.enabled and norm.bad:
            self._run.skipped += 1
            scaler.overflowed()
            logger.info("step skipped: gradient overflow in %s; loss scale %g", norm.bad[0], scaler.scale)
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
