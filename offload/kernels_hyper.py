"""Hyper-parameters of one optimizer step, checked, and the constants that the kernels make of them.

Owns the formulas from hyper-parameters to constants, in float64; the kernels round them once. Knows neither torch nor
addresses. Next to read: ``csrc/cpu_adam/rules.h``, which applies them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

Constants = tuple[float, float, float, float, float, float, float, float]


@dataclass(frozen=True, slots=True)
class AdamHyper:
    """Hyper-parameters of one step of AdamW or Adam.

    ::

        g = grad * grad_scale (+ weight_decay * p for L2)
        m += (1 - beta1) * (g - m)
        v += (1 - beta2) * (g * g - v)
        p = p * (1 - lr * weight_decay) - lr / bc1 * (m / (sqrt(v) / sqrt(bc2) + eps)), bc = 1 - beta**step

    Attributes:
        lr: Learning rate, at least 0.
        beta1: Decay of ``exp_avg``, in [0, 1).
        beta2: Decay of ``exp_avg_sq``, in [0, 1).
        eps: Added to the root of the corrected second moment, at least 0.
        weight_decay: At least 0.
        step: 1 for the first step; the bias corrections' exponent.
        decoupled: True for AdamW, False for Adam with an L2 term in the gradient.
        grad_scale: Factor on the gradient before anything else: clipping, loss scale and accumulation in one; a
            negative one maximizes.

    Raises:
        ValueError: A value is outside its range.
    """

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
        _check_common(self, "lr", "eps", "weight_decay")
        _check_betas(self.beta1, self.beta2)

    def constants(self) -> Constants:
        """Return the kernel's constants, in the order of ``csrc/cpu_adam/kernels.h``."""
        bias1 = 1.0 - self.beta1**self.step
        bias2 = 1.0 - self.beta2**self.step
        return (
            self.grad_scale,
            0.0 if self.decoupled else self.weight_decay,
            1.0 - self.lr * self.weight_decay if self.decoupled else 1.0,
            1.0 - self.beta1,
            1.0 - self.beta2,
            self.eps,
            -self.lr / bias1,
            1.0 / math.sqrt(bias2),
        )


def _check_common(hyper: AdamHyper, *not_negative: str) -> None:
    for name in not_negative:
        value = getattr(hyper, name)
        if not (value >= 0.0 and math.isfinite(value)):
            raise ValueError(f"{name}: expected a finite number of at least 0 but got {value}; correct the option")
    if hyper.step < 1:
        raise ValueError(f"step: expected 1 or more but got {hyper.step}; count the first step as 1")
    if not math.isfinite(hyper.grad_scale):
        raise ValueError(f"grad_scale: expected a finite number but got {hyper.grad_scale}; skip the step")


def _check_betas(*betas: float) -> None:
    for number, value in enumerate(betas, 1):
        if not 0.0 <= value < 1.0:
            raise ValueError(f"beta{number}: expected a number in [0, 1) but got {value}; correct betas")
