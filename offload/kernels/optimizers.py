"""The optimizers, one class each: options and their ranges, states, and the constants that a kernel makes steps with.

Owns all that is known of an optimizer beside its arithmetic, which is in ``csrc/cpu_adam/rules.h``. Knows neither torch
nor addresses. What they have in common is in :mod:`offload.spec`; next, :mod:`offload.kernels.step` calls the kernels.

In the formulas ``step`` is 1 for the first step, ``bc`` is ``1 - beta**step``, and ``g`` is the gradient times
``grad_scale``. A weight decay of L2 kind adds ``weight_decay * p`` to ``g``. Constants are computed in float64; the
kernels round them once.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY
from typing import Any, ClassVar

from offload.errors import ConfigError
from offload.spec import BelowOne, Finite, NotNegative, OptimizerSpec, Positive, optimizer

# Of a square that does not count as zero: what eps is at least, so that no step divides by less.
_LEAST_ROOT = 2.0**-63


def _weight(beta: float) -> float:
    """Return the kernel's constant for a running mean, which keeps all digits of the smaller one of beta and the rest.

    It is 1 - beta, or -beta where that is smaller in size (-0.0 for 0).
    """
    return 1.0 - beta if beta >= 0.5 else -float(beta)


@optimizer
class AdamW(OptimizerSpec):
    """Hyper-parameters of AdamW (decoupled weight decay).

    ::

        m += (1 - beta1) * (g - m)
        v = beta2 * v + (1 - beta2) * g * g
        p = p * (1 - lr * weight_decay) - lr / bc1 * (m / (sqrt(v) / sqrt(bc2) + eps))

    Attributes:
        params: as in ``torch.optim``: parameters, pairs of a name and a parameter, or dicts of them with options of
            their own. Parameters that are left out are not updated. None: all trainable parameters of the model, as
            one group.
        lr: learning rate; it and the others are options of all groups that have none of their own.
        betas: decay of the first and of the second moment per step.
        eps: added to the root of the second moment.
        weight_decay: of the parameter, per step and unit of the learning rate.

    Raises:
        ConfigError: an option is unknown or out of its range, or `params` has no parameters; as for all optimizers.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    KERNEL: ClassVar[int] = 0
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    IN_TORCH: ClassVar[bool] = True
    OTHER_STEPS: ClassVar[tuple[str, ...]] = ("amsgrad", "maximize")
    COMPRESSIBLE: ClassVar[bool] = True
    DECOUPLED: ClassVar[bool] = True

    lr: NotNegative = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: NotNegative = 1e-8
    weight_decay: NotNegative = 1e-2

    @classmethod
    def variant(cls, group: Mapping[str, Any]) -> type[OptimizerSpec]:
        """Return AdamW or Adam: in torch, an option of a param group says which."""
        decoupled = bool(group.get("decoupled_weight_decay", cls.DECOUPLED))
        if decoupled == cls.DECOUPLED:
            return cls
        return AdamW if decoupled else Adam

    def constants(self, step: int) -> tuple[float, ...]:
        """Return l2, decay, one_minus_beta1, beta2, one_minus_beta2, eps, neg_step, inv_sqrt_bc2."""
        beta1, beta2 = self.betas
        bc2 = 1.0 - beta2**step
        return (
            0.0 if self.DECOUPLED else self.weight_decay,
            1.0 - self.lr * self.weight_decay if self.DECOUPLED else 1.0,
            _weight(beta1),
            beta2,
            1.0 - beta2,
            max(self.eps, _LEAST_ROOT / math.sqrt(bc2)),
            -self.lr / (1.0 - beta1**step),
            1.0 / math.sqrt(bc2),
        )


@optimizer
class Adam(AdamW):
    """Hyper-parameters of Adam; `weight_decay` is added to the gradient (L2), as in ``torch.optim.Adam``.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 1.
    """

    DECOUPLED: ClassVar[bool] = False

    weight_decay: NotNegative = 0.0


@optimizer
class SGD(OptimizerSpec):
    """Hyper-parameters of SGD as in ``torch.optim.SGD``: L2 decay; one state with a momentum, none without.

    ::

        b = momentum * b + (1 - dampening) * g      first step: b = g
        p -= lr * b                                 nesterov: p -= lr * (g + momentum * b)

    `params` as in :class:`AdamW`; either all groups have a momentum or none. Without one, ``p -= lr * g``. With one,
    the buffer must be zeros before the first step.
    """

    STATES: ClassVar[tuple[str, ...]] = ("momentum_buffer",)
    IN_TORCH: ClassVar[bool] = True
    OTHER_STEPS: ClassVar[tuple[str, ...]] = ("maximize",)
    COUNTS_STEPS: ClassVar[bool] = False

    lr: NotNegative = 1e-3
    momentum: NotNegative = 0.0
    dampening: Finite = 0.0
    weight_decay: NotNegative = 0.0
    nesterov: bool = False

    @property
    def kernel(self) -> int:
        """One kernel with a momentum, another without."""
        return 2 if self.momentum else 1

    @property
    def states(self) -> tuple[str, ...]:
        """The buffer, where there is a momentum."""
        return self.STATES if self.momentum else ()

    @classmethod
    def conflict(cls, options: Mapping[str, Any]) -> str:
        """Refuse Nesterov's step without a momentum or with dampening, as torch does."""
        wrong = options["nesterov"] and not (options["momentum"] > 0 and options["dampening"] == 0)
        return "nesterov=True needs a momentum above 0 and no dampening" if wrong else ""

    def check_states(self, states: tuple[str, ...]) -> None:
        """Refuse a momentum without a buffer, and a buffer without a momentum."""
        if states and not self.momentum:
            raise ConfigError(
                "param group: expected a momentum above 0 but got 0; have one in all groups of SGD, or in none"
            )
        if self.momentum and not states:
            raise ConfigError(
                f"param group: expected momentum 0 but got {self.momentum}; make the optimizer with a momentum in all "
                "groups, so that there is room for its buffer"
            )

    def constants(self, step: int) -> tuple[float, ...]:
        """Return l2, neg_lr, keep, take, nesterov."""
        keep, take = (0.0, 1.0) if step == 1 else (self.momentum, 1.0 - self.dampening)
        return self.weight_decay, -self.lr, keep, take, self.momentum if self.nesterov else 0.0


@optimizer
class Lion(OptimizerSpec):
    """Hyper-parameters of Lion, which has one state; learning rates are 3 to 10 times smaller than AdamW's.

    ::

        p = p * (1 - lr * weight_decay) - lr * sign(beta1 * m + (1 - beta1) * g)
        m = beta2 * m + (1 - beta2) * g

    `params` as in :class:`AdamW`.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.
    """

    KERNEL: ClassVar[int] = 3
    STATES: ClassVar[tuple[str, ...]] = ("exp_avg",)

    lr: NotNegative = 1e-4
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.99)
    weight_decay: NotNegative = 0.0

    def constants(self, step: int) -> tuple[float, ...]:
        """Return l2, decay, neg_lr, one_minus_beta1, one_minus_beta2."""
        beta1, beta2 = self.betas
        return 0.0, 1.0 - self.lr * self.weight_decay, -self.lr, _weight(beta1), _weight(beta2)


@optimizer
class Adagrad(OptimizerSpec):
    """Hyper-parameters of Adagrad as in ``torch.optim.Adagrad``, whose sum starts at 0: L2 decay, one state.

    ::

        s += g * g
        p -= lr / (1 + (step - 1) * lr_decay) * g / (sqrt(s) + eps)

    `params` as in :class:`AdamW`.
    """

    KERNEL: ClassVar[int] = 4
    STATES: ClassVar[tuple[str, ...]] = ("sum",)
    IN_TORCH: ClassVar[bool] = True
    OTHER_STEPS: ClassVar[tuple[str, ...]] = ("maximize", "initial_accumulator_value")

    lr: NotNegative = 1e-2
    lr_decay: NotNegative = 0.0
    weight_decay: NotNegative = 0.0
    _: KW_ONLY  # in torch, another option comes before the next one
    eps: NotNegative = 1e-10

    def constants(self, step: int) -> tuple[float, ...]:
        """Return l2, neg_lr, eps."""
        return self.weight_decay, -(self.lr / (1.0 + (step - 1) * self.lr_decay)), max(self.eps, _LEAST_ROOT)


@optimizer
class LAMB(OptimizerSpec):
    """Hyper-parameters of LAMB: AdamW whose update of each parameter gets the parameter's norm; for large batches.

    ::

        m, v as in AdamW
        u = (m / bc1) / (sqrt(v) / sqrt(bc2) + eps) + weight_decay * p
        p -= lr * |p| / |u| * u                     lr * u where a norm is 0

    `params` as in :class:`AdamW`.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2, with bias correction.
    """

    STATES: ClassVar[tuple[str, ...]] = ("exp_avg", "exp_avg_sq")
    WHOLE: ClassVar[bool] = True

    lr: NotNegative = 1e-3
    betas: tuple[BelowOne, BelowOne] = (0.9, 0.999)
    eps: Positive = 1e-6
    weight_decay: NotNegative = 1e-2

    def constants(self, step: int) -> tuple[float, ...]:
        """Return l2, decay, one_minus_beta1, beta2, one_minus_beta2, eps, inv_bc1, inv_sqrt_bc2."""
        beta1, beta2 = self.betas
        bc1, bc2 = 1.0 - beta1**step, 1.0 - beta2**step
        least = max(self.eps, _LEAST_ROOT / math.sqrt(bc2))
        means = _weight(beta1), beta2, 1.0 - beta2
        return 0.0, self.weight_decay, *means, least, 1.0 / bc1, 1.0 / math.sqrt(bc2)

    def step_size(self, param_squares: float, direction_squares: float) -> float:
        """Return the factor on the direction, from the sums of squares of a whole parameter and of its direction."""
        if param_squares == 0.0 or direction_squares == 0.0:
            return self.lr
        return self.lr * math.sqrt(param_squares / direction_squares)
