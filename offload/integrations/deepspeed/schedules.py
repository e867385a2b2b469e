"""DeepSpeed's learning rate schedules as schedulers of torch: the same rates, by formulas of the step's number.

Step ``n`` counts from 0. A rate is set when the schedule is made (``n = -1``), and by each ``step()`` for the next
optimizer step. So the first optimizer step has the rate of -1, the second one that of 0.

Source: DeepSpeed 0.19.8, ``deepspeed/runtime/lr_schedules.py``; Smith, A disciplined approach to neural network
hyper-parameters, for the last two. Next: :mod:`offload.integrations.deepspeed.engine` steps one.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.optim.lr_scheduler import LRScheduler

from offload.errors import ConfigError, did_you_mean
from offload.integrations.deepspeed.config import Named
from offload.integrations.libraries import refuse_other_schedule

Rates = float | Sequence[float]


class Schedule(LRScheduler):
    """A schedule of DeepSpeed: learning rates by the number of the step.

    Attributes:
        last_batch_iteration: ``n``.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        """Set the first rates.

        Args:
            optimizer: whose param groups have the rates.
            last_batch_iteration: steps that were made, less one; rates stay as they are if there were any.
        """
        own = [group["lr"] for group in optimizer.param_groups]
        super().__init__(optimizer)
        if last_batch_iteration != -1:
            self.last_epoch = last_batch_iteration + 1
            for group, rate in zip(optimizer.param_groups, own, strict=True):
                group["lr"] = rate

    @property
    def last_batch_iteration(self) -> int:
        """The number of the step."""
        return self.last_epoch - 1

    def rates(self, n: int) -> list[float]:
        """Return the learning rate of each param group at step `n`."""
        raise NotImplementedError

    def get_lr(self) -> list[Any]:
        """Return the learning rates of now."""
        return list(self.rates(self.last_batch_iteration))

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to the step of a number."""
        if last_batch_iteration is not None:
            self.last_epoch = last_batch_iteration
        super().step()

    def state_dict(self) -> dict[str, Any]:
        """Return the number of the step, and nothing else, as DeepSpeed does: the rest is configuration."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Go on from the step of what ``state_dict`` returned, here, in an earlier version, or in DeepSpeed.

        The next ``step()`` sets the rates that this schedule has there. Until then, they stay those of the groups.
        """
        known = "last_batch_iteration" in state_dict
        self.last_epoch = int(state_dict["last_batch_iteration"]) + 1 if known else int(state_dict["last_epoch"])
        self._last_lr = [group["lr"] for group in self.optimizer.param_groups]

    def _each(self, name: str, given: Rates) -> list[float]:
        """Return one number per param group.

        Raises:
            ConfigError: there are several, but not one per group.
        """
        count = len(self.optimizer.param_groups)
        if not isinstance(given, (list, tuple)):
            return [given] * count  # type: ignore[list-item]
        if len(given) != count:
            raise ConfigError(f"{type(self).__name__}: expected {name} once or {count} times but got {list(given)!r}")
        return list(given)


class Warmup(Schedule):
    """A schedule that begins with a rise.

    Attributes:
        warmup_num_steps: steps of the rise.
        warmup_type: ``"log"`` or ``"linear"``.
    """

    def __init__(
        self, optimizer: torch.optim.Optimizer, *, steps: object, kind: object, last_batch_iteration: int
    ) -> None:
        """Begin.

        Args:
            optimizer: whose param groups have the rates.
            steps: of the rise; at least 2 are made.
            kind: ``"log"`` or ``"linear"``.
            last_batch_iteration: as in :class:`Schedule`.

        Raises:
            ConfigError: an argument is out of its range.
        """
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 0:
            raise ConfigError(f"warmup_num_steps: expected a whole number of at least 0 but got {steps!r}")
        if kind not in ("log", "linear"):
            raise ConfigError(f'warmup_type: expected "log" or "linear" but got {kind!r}')
        self.warmup_num_steps, self.warmup_type = max(2, steps), kind
        super().__init__(optimizer, last_batch_iteration)

    def share(self, n: int, low: float) -> float:
        """Return how far the rise from `low` to 1 has come at step `n`, or what :meth:`after` says."""
        steps = self.warmup_num_steps
        if n >= steps:
            return self.after(n)
        risen = math.log(n + 1) * (1.0 / math.log(steps)) if self.warmup_type == "log" else n / steps
        return low + risen * (1.0 - low)

    def after(self, n: int) -> float:
        """Return the share of the maximum at a step after the rise."""
        return 1.0


class WarmupLR(Warmup):
    """From a minimum to a maximum, logarithmically or linearly, and then the maximum."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Begin.

        Args:
            optimizer: whose param groups have the rates.
            warmup_min_lr: a number, or one per param group.
            warmup_max_lr: likewise; None: the group's own rate.
            warmup_num_steps: steps of the rise; at least 2 are made.
            warmup_type: ``"log"`` or ``"linear"``.
            last_batch_iteration: as in :class:`Schedule`.

        Raises:
            ConfigError: an argument is out of its range.
        """
        self.optimizer = optimizer
        own = [group["lr"] for group in optimizer.param_groups]
        self.min_lrs = self._each("warmup_min_lr", warmup_min_lr)
        self.max_lrs = self._each("warmup_max_lr", own if warmup_max_lr is None else warmup_max_lr)
        super().__init__(optimizer, steps=warmup_num_steps, kind=warmup_type, last_batch_iteration=last_batch_iteration)

    def rates(self, n: int) -> list[float]:
        """Return the learning rates at step `n`."""
        if n < 0:
            return self.min_lrs
        share = self.share(n, 0.0)
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]


class WarmupDecayLR(WarmupLR):
    """As :class:`WarmupLR`, and then down to the minimum, linearly."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Begin; `total_num_steps` is the step at which the minimum is reached. See :class:`WarmupLR`."""
        self.total_num_steps = total_num_steps
        super().__init__(optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration)

    def after(self, n: int) -> float:
        """Return the share of the maximum at a step after the rise."""
        return max(0.0, float(self.total_num_steps - n) / float(max(1.0, self.total_num_steps - self.warmup_num_steps)))


class WarmupCosineLR(Warmup):
    """From a share of each group's own rate up to all of it, and then down to another share, by a cosine."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: str = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        """Begin.

        Args:
            optimizer: whose param groups have the rates.
            total_num_steps: the step at which `cos_min_ratio` is reached.
            warmup_min_ratio: share of the rate at the beginning.
            warmup_num_steps: as in :class:`WarmupLR`.
            cos_min_ratio: share of the rate at the end.
            warmup_type: as in :class:`WarmupLR`.
            last_batch_iteration: as in :class:`Schedule`.

        Raises:
            ConfigError: an argument is out of its range.
        """
        self.total_num_steps = total_num_steps
        self.warmup_min_ratio, self.cos_min_ratio = warmup_min_ratio, cos_min_ratio
        self.own_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        super().__init__(optimizer, steps=warmup_num_steps, kind=warmup_type, last_batch_iteration=last_batch_iteration)

    def rates(self, n: int) -> list[float]:
        """Return the learning rates at step `n`."""
        share = 0.0 if n < 0 else self.share(n, self.warmup_min_ratio)
        return [rate * share for rate in self.own_lrs]

    def after(self, n: int) -> float:
        """Return the share of the maximum at a step after the rise."""
        done = min(1.0, (n - self.warmup_num_steps + 1) / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(0.0, self.cos_min_ratio + (1.0 - self.cos_min_ratio) * ((1 + math.cos(math.pi * done)) / 2))


class LRRangeTest(Schedule):
    """A rate that grows from a minimum for ever, to find out which is too large."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        """Begin.

        Args:
            optimizer: whose param groups have the rates.
            lr_range_test_min_lr: the first rate, or one per param group.
            lr_range_test_step_size: steps in which it grows by `lr_range_test_step_rate` times itself.
            lr_range_test_step_rate: how much it grows.
            lr_range_test_staircase: grow at once after so many steps.
            last_batch_iteration: as in :class:`Schedule`.

        Raises:
            ConfigError: an argument is out of its range.
        """
        size = lr_range_test_step_size
        if isinstance(size, bool) or not isinstance(size, int) or size < 1:
            raise ConfigError(f"lr_range_test_step_size: expected a whole number of at least 1 but got {size!r}")
        self.optimizer = optimizer
        self.min_lrs = self._each("lr_range_test_min_lr", lr_range_test_min_lr)
        self.step_size, self.step_rate, self.staircase = size, lr_range_test_step_rate, lr_range_test_staircase
        super().__init__(optimizer, last_batch_iteration)

    def rates(self, n: int) -> list[float]:
        """Return the learning rates at step `n`."""
        interval = float(n + 1) / self.step_size
        growth = 1 + self.step_rate * (math.floor(interval) if self.staircase else interval)
        return [rate * growth for rate in self.min_lrs]


class OneCycle(Schedule):
    """One cycle of rates up and down, against Adam's first beta down and up; then both decay.

    While betas are cycled, the second one is 0.99, as in DeepSpeed.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        """Begin.

        Args:
            optimizer: whose param groups have the rates.
            cycle_min_lr: the lowest rate, a number or one per param group.
            cycle_max_lr: the highest.
            decay_lr_rate: how much rates decay every `decay_step_size` steps after the cycle.
            cycle_first_step_size: steps up.
            cycle_second_step_size: steps down; None: as many.
            cycle_first_stair_count: stairs up; 0: none.
            cycle_second_stair_count: stairs down; None: as many.
            decay_step_size: 0: nothing decays.
            cycle_momentum: cycle the first beta, too, where the optimizer has betas.
            cycle_min_mom: the lowest beta.
            cycle_max_mom: the highest.
            decay_mom_rate: how much betas change every `decay_step_size` steps after the cycle.
            last_batch_iteration: as in :class:`Schedule`.

        Raises:
            ConfigError: an argument is out of its range.
        """
        first = float(cycle_first_step_size)
        second = first if cycle_second_step_size is None else float(cycle_second_step_size)
        if first <= 0 or second < 0:
            raise ConfigError(
                f"OneCycle: expected cycle_first_step_size above 0 and cycle_second_step_size of at least 0 but got "
                f"{first} and {second}"
            )
        stairs = cycle_first_stair_count
        self.optimizer = optimizer
        self.first_step_size, self.second_step_size = first, second
        self.stairs = (stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count)
        self.decay_step_size, self.decay_lr_rate, self.decay_mom_rate = decay_step_size, decay_lr_rate, decay_mom_rate
        self.min_lrs = self._each("cycle_min_lr", cycle_min_lr)
        self.max_lrs = self._each("cycle_max_lr", cycle_max_lr)
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        self.min_moms = self._each("cycle_min_mom", cycle_min_mom)
        self.max_moms = self._each("cycle_max_mom", cycle_max_mom)
        super().__init__(optimizer, last_batch_iteration)
        if self.cycle_momentum and last_batch_iteration == -1:
            self._set_betas(self.min_moms)

    def rates(self, n: int) -> list[float]:
        """Return the learning rates at step `n`."""
        decay = self._decay(n, self.decay_lr_rate)
        if decay is not None:
            return [low / decay for low in self.min_lrs]
        up = self._height(n + 1)
        return [low + (high - low) * up for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def momenta(self, n: int) -> list[float]:
        """Return the first beta of each param group at step `n`."""
        decay = self._decay(n, self.decay_mom_rate)
        if decay is not None:
            return [high * decay for high in self.max_moms]
        up = self._height(n + 1)
        return [high - (high - low) * up for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to the step of a number."""
        super().step(last_batch_iteration)
        if self.cycle_momentum and self.last_batch_iteration >= 0:
            self._set_betas(self.momenta(self.last_batch_iteration))

    def _set_betas(self, momenta: Sequence[float]) -> None:
        for group, momentum in zip(self.optimizer.param_groups, momenta, strict=True):
            group["betas"] = (momentum, 0.99)

    def _decay(self, n: int, rate: float) -> float | None:
        """Return the factor of a decay at step `n`; None while the cycle lasts."""
        steps = n - (self.first_step_size + self.second_step_size)
        if steps < 0:
            return None
        return 1.0 if math.isclose(self.decay_step_size, 0) else 1 + rate * ((steps + 1) / self.decay_step_size)

    def _height(self, steps: float) -> float:
        """Return where in the cycle so many steps lead: 0 at its ends, 1 at its top."""
        first, second = self.first_step_size, self.second_step_size
        turns = steps / (first + second)
        part, top = 1.0 + turns - math.floor(1 + turns), first / (first + second)
        rising = part <= top
        count = self.stairs[0 if rising else 1]
        if count > 0:
            within = steps % (first + second)
            at = within * count / first if within <= first else (first + second - within) * count / second
            return math.floor(at) / count
        return part / top if rising else (part - 1) / (top - 1)


BY_NAME: Mapping[str, type[Schedule]] = {
    kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)
}


def make_schedule(optimizer: torch.optim.Optimizer | None, given: Any, section: Named | None) -> Any:
    """Return the schedule that a script gives, or else its configuration; None where neither does.

    Args:
        optimizer: of the engine.
        given: a schedule, a function that makes one of the optimizer, or None.
        section: of the configuration.

    Raises:
        ConfigError: it is unknown, there is no optimizer, it is another one's, or it cannot be stepped without more
            arguments.
    """
    if given is None and section is None:
        return None
    if optimizer is None:
        raise ConfigError("lr_scheduler: expected an optimizer, too, but got none; pass one, or leave it out")
    if given is None:
        assert section is not None
        made = _class_of(section.type)
        try:
            given = made(optimizer, **section.params)
        except TypeError as error:
            raise ConfigError(f"scheduler.params: expected those of {section.type} but got: {error}") from error
    elif isinstance(given, type) or not hasattr(given, "step"):
        given = given(optimizer)
    refuse_other_schedule("lr_scheduler", given, [optimizer])
    needed = [
        name
        for name, one in inspect.signature(given.step).parameters.items()
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)
    ]
    if needed:
        raise ConfigError(
            f"lr_scheduler: expected one whose step() needs no argument but {type(given).__name__}.step needs "
            f"{', '.join(needed)}; make it for engine.optimizer, and step it yourself"
        )
    return given


def _class_of(name: str) -> Any:
    """Return the class of a schedule, of DeepSpeed or of torch.

    Raises:
        ConfigError: there is none.
    """
    found = BY_NAME.get(name, getattr(torch.optim.lr_scheduler, name, None))
    if not isinstance(found, type):
        raise ConfigError(
            f"scheduler.type: unknown {name!r}{did_you_mean(name, BY_NAME)}; {', '.join(BY_NAME)}, or one of "
            "torch.optim.lr_scheduler"
        )
    return found
