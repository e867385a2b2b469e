"""Hyper-parameters of one optimizer step, checked, and the constants that the kernels make of them.

Owns the formulas from hyper-parameters to constants, in float64; the kernels round them once. Knows neither torch nor
addresses. Next to read: ``csrc/cpu_adam/rules.h``, which applies them.

In all of them ``step`` is 1 for the first step, and ``g = grad * grad_scale``: clipping, loss scale and accumulation in
one factor; a negative one maximizes. A weight decay of L2 kind adds ``weight_decay * p`` to ``g``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

Constants = tuple[float, float, float, float, float, float, float, float]


class Hyper(Protocol):
    """What a step needs to know of any optimizer."""

    RULE: ClassVar[int]  # Rule in csrc/cpu_adam/kernels.h
    STATES: ClassVar[tuple[str, ...]]  # names of the states, as in torch

    @property
    def step(self) -> int:
        """Number of the step, from 1."""

    @property
    def grad_scale(self) -> float:
        """Factor on the gradient."""

    def constants(self) -> Constants:
        """Return the kernel's constants, in the order of ``csrc/cpu_adam/kernels.h``."""


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """AdamW, or Adam with L2 decay.

    ::

        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        p = p * (1 - lr * weight_decay) - lr / bc1 * (m / (sqrt(v) / sqrt(bc2) + eps)), bc = 1 - beta**step

    Attributes:
        lr: Learning rate, at least 0.
        beta1: Decay of ``exp_avg``, in [0, 1).
        beta2: Decay of ``exp_avg_sq``, in [0, 1).
        eps: Added to the root of the corrected second moment, at least 0.
        weight_decay: At least 0.
        step: The bias corrections' exponent.
        decoupled: True for AdamW, False for Adam with an L2 term in the gradient.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    RULE: ClassVar[int] = 0
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-8
    weight_decay: float = 0.0
    step: int = 1
    decoupled: bool = True
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "eps", "weight_decay")
        _check_fractions(beta1=self.beta1, beta2=self.beta2)

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        return (
            self.grad_scale,
            0.0 if self.decoupled else self.weight_decay,
            1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            1.0 - self.beta1,
            1.0 - self.beta2,
            self.eps,
            -self.lr / (1.0 - self.beta1**self.step),
            1.0 / math.sqrt(1.0 - self.beta2**self.step),
        )


@dataclass(frozen=True, slots=True)
class SgdHyper:
    """SGD without momentum: ``p -= lr * g``, L2 decay.

    Attributes:
        lr: Learning rate, at least 0.
        weight_decay: At least 0.
        step: Not used.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    RULE: ClassVar[int] = 1
    STATES: ClassVar[tuple[str, ...]] = ()

    lr: float
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "weight_decay")

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        return (self.grad_scale, self.weight_decay, -self.lr, 0.0, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class MomentumHyper:
    """SGD with momentum as in torch, L2 decay.

    ::

        b = momentum * b + (1 - dampening) * g      first step: b = g
        p -= lr * b                                 nesterov: p -= lr * (g + momentum * b)

    Attributes:
        lr: Learning rate, at least 0.
        momentum: At least 0.
        dampening: Of the gradient.
        nesterov: With a momentum above 0 and no dampening only.
        weight_decay: At least 0.
        step: The first one initialises the buffer, which must be zeros before.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    RULE: ClassVar[int] = 2
    STATES: ClassVar[tuple[str, ...]] = ("momentum_buffer",)

    lr: float
    momentum: float = 0.9
    dampening: float = 0.0
    nesterov: bool = False
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "momentum", "weight_decay")
        if not math.isfinite(self.dampening):
            raise ValueError(f"dampening: expected a finite number but got {self.dampening}; correct the option")
        if self.nesterov and (self.momentum == 0.0 or self.dampening != 0.0):
            raise ValueError(
                f"nesterov: expected momentum above 0 and no dampening but got {self.momentum} and {self.dampening}; "
                "switch it off"
            )

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        first = self.step == 1
        keep, take = (0.0, 1.0) if first else (self.momentum, 1.0 - self.dampening)
        nesterov = self.momentum if self.nesterov else 0.0
        return (self.grad_scale, self.weight_decay, -self.lr, keep, take, nesterov, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LionHyper:
    """Lion, with decoupled decay.

    ::

        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    Source: Chen et al., "Symbolic discovery of optimization algorithms", 2023, algorithm 2.

    Attributes:
        lr: Learning rate, at least 0.
        beta1: In [0, 1).
        beta2: In [0, 1).
        weight_decay: At least 0.
        step: Not used.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    RULE: ClassVar[int] = 3
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg",)

    lr: float
    beta1: float = 0.9
    beta2: float = 0.99
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "weight_decay")
        _check_fractions(beta1=self.beta1, beta2=self.beta2)

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        decay = 1.0 - self.lr * self.weight_decay
        return (self.grad_scale, 0.0, decay, -self.lr, 1.0 - self.beta1, 1.0 - self.beta2, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class AdagradHyper:
    """Adagrad as in torch, L2 decay.

    ::

        s += g * g                                  before the first step: initial_accumulator_value
        p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

    Attributes:
        lr: Learning rate, at least 0.
        lr_decay: At least 0.
        eps: At least 0.
        weight_decay: At least 0.
        step: Number of the step.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    RULE: ClassVar[int] = 4
    STATES: ClassVar[tuple[str, ...]] = ("sum",)

    lr: float
    lr_decay: float = 0.0
    eps: float = 1e-10
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "lr_decay", "eps", "weight_decay")

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        lr = self.lr / (1.0 + (self.step - 1) * self.lr_decay)
        return (self.grad_scale, self.weight_decay, -lr, self.eps, 0.0, 0.0, 0.0, 0.0)


@dataclass(frozen=True, slots=True)
class LambHyper:
    """LAMB: AdamW whose step has the length of the parameter.

    ::

        m, v as in Adam
        u = (m / bc1) / (sqrt(v) / sqrt(bc2) + eps) + weight_decay * p, bc = 1 - beta**step
        p -= lr * |p| / |u| * u                     lr * u where a norm is 0

    Source: You et al., "Large batch optimization for deep learning", ICLR 2020, algorithm 2.

    Attributes:
        lr: Learning rate, at least 0.
        beta1: Decay of ``exp_avg``, in [0, 1).
        beta2: Decay of ``exp_avg_sq``, in [0, 1).
        eps: Above 0.
        weight_decay: At least 0.
        step: The bias corrections' exponent.
        grad_scale: Factor on the gradient.

    Raises:
        ValueError: A value is outside its range.
    """

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")

    lr: float
    beta1: float = 0.9
    beta2: float = 0.999
    eps: float = 1e-6
    weight_decay: float = 0.0
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self, "lr", "eps", "weight_decay")
        _check_fractions(beta1=self.beta1, beta2=self.beta2)
        if self.eps == 0.0:
            raise ValueError("eps: expected a number above 0 but got 0; correct the option")

    def constants(self) -> Constants:
        """Return the kernel's constants."""
        return (
            self.grad_scale,
            0.0,
            self.weight_decay,
            1.0 - self.beta1,
            1.0 - self.beta2,
            self.eps,
            1.0 / (1.0 - self.beta1**self.step),
            1.0 / math.sqrt(1.0 - self.beta2**self.step),
        )

    def step_size(self, param_squares: float, direction_squares: float) -> float:
        """Return the factor on the direction: lr times the ratio of the norms."""
        if param_squares == 0.0 or direction_squares == 0.0:
            return self.lr
        return self.lr * math.sqrt(param_squares / direction_squares)


class _Common(Protocol):
    @property
    def step(self) -> int: ...
    @property
    def grad_scale(self) -> float: ...


def _check(hyper: _Common, *not_negative: str) -> None:
    for name in not_negative:
        value = getattr(hyper, name)
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name}: expected a finite number of at least 0 but got {value}; correct the option")
    if hyper.step < 1:
        raise ValueError(f"step: expected 1 or more but got {hyper.step}; count the first step as 1")
    if not math.isfinite(hyper.grad_scale):
        raise ValueError(f"grad_scale: expected a finite number but got {hyper.grad_scale}; skip the step")


def _check_fractions(**betas: float) -> None:
    for name, value in betas.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"{name}: expected a number in [0, 1) but got {value}; correct betas")
