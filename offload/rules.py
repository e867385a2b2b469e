"""The optimizers: what each of them remembers of an element, and how a step is made of a param group.

Owns the table from a user's optimizer to states and hyper-parameters: what is placed, streamed, saved and computed
follows from it. The formulas are in :mod:`offload.kernels_hyper`. Next: :mod:`offload.optimizer`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.config import LAMB, SGD, Adagrad, Adam, AdamW, Lion, OptimizerSpec, check_hyper_parameters
from offload.cpu_adam import AdagradHyper, AdamHyper, Hyper, LambHyper, LionHyper, MomentumHyper, SgdHyper, StateKind
from offload.errors import ConfigError
from offload.placement import States

STATE_SEED = 0x0FF10AD  # of the bits that round states; a constant: a run is reproducible whatever the options


StepOf = Hyper | LambHyper  # hyper-parameters of one step


@dataclasses.dataclass(frozen=True, slots=True)
class Rule:
    """One optimizer.

    Attributes:
        names: its states, as in torch.
        make: hyper-parameters of a step from a param group, the number of the step (from 1) and the factor on the
            gradient.
        counts_steps: torch keeps ``step`` with the states.
        compressible: the states may be stored in fewer than 32 bits.
        whole: a parameter is updated as a whole: something depends on all of it.
    """

    names: tuple[str, ...]
    make: Callable[[Mapping[str, Any], int, float], StepOf]
    counts_steps: bool = True
    compressible: bool = False
    whole: bool = False

    def hyper(self, group: Mapping[str, Any], step: int, grad_scale: float) -> StepOf:
        """Return the hyper-parameters of a step.

        Raises:
            ConfigError: one is out of its range, or needs a state that the optimizer has been made without.
        """
        check_hyper_parameters(group, subject="param group")
        return self.make(group, step, grad_scale)

    def states(self, kind: StateKind) -> States:
        """Return what is remembered, stored as `kind`.

        Raises:
            ConfigError: these states are not compressed.
        """
        if kind is not StateKind.FLOAT32 and not self.compressible:
            raise ConfigError(
                f'state_dtype: expected "float32" but got {kind.value!r}; only the moments of Adam and AdamW are '
                "compressed"
            )
        return States(self.names, kind)

    def with_step(self, state: Mapping[str, Any]) -> dict[str, Any]:
        """Return a parameter's state with ``step``; torch's SGD does not count, but has taken a first step."""
        return dict(state) if self.counts_steps else {"step": 1, **state}


def _adam(decoupled: bool) -> Rule:
    def make(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
        return AdamHyper(
            lr=float(group["lr"]),
            beta1=float(group["betas"][0]),
            beta2=float(group["betas"][1]),
            eps=float(group["eps"]),
            weight_decay=float(group["weight_decay"]),
            step=step,
            decoupled=decoupled,
            grad_scale=grad_scale,
        )

    return Rule(AdamHyper.STATES, make, compressible=True)


def _sgd(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
    if group["momentum"]:
        raise ConfigError(
            f"param group: expected momentum 0 but got {group['momentum']}; make the optimizer with a momentum in all "
            "groups, so that there is room for its buffer"
        )
    return SgdHyper(float(group["lr"]), float(group["weight_decay"]), step, grad_scale)


def _momentum(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
    if not group["momentum"]:
        raise ConfigError(
            "param group: expected a momentum above 0 but got 0; have one in all groups of SGD, or in none"
        )
    return MomentumHyper(
        lr=float(group["lr"]),
        momentum=float(group["momentum"]),
        dampening=float(group["dampening"]),
        nesterov=bool(group["nesterov"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        grad_scale=grad_scale,
    )


def _lion(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
    beta1, beta2 = map(float, group["betas"])
    return LionHyper(float(group["lr"]), beta1, beta2, float(group["weight_decay"]), step, grad_scale)


def _lamb(group: Mapping[str, Any], step: int, grad_scale: float) -> LambHyper:
    beta1, beta2 = map(float, group["betas"])
    return LambHyper(
        lr=float(group["lr"]),
        beta1=beta1,
        beta2=beta2,
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        grad_scale=grad_scale,
    )


def _adagrad(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
    return AdagradHyper(
        lr=float(group["lr"]),
        lr_decay=float(group["lr_decay"]),
        eps=float(group["eps"]),
        weight_decay=float(group["weight_decay"]),
        step=step,
        grad_scale=grad_scale,
    )


ADAM = _adam(decoupled=False)
ADAMW = _adam(decoupled=True)
PLAIN_SGD = Rule(SgdHyper.STATES, _sgd, counts_steps=False)
MOMENTUM_SGD = Rule(MomentumHyper.STATES, _momentum, counts_steps=False)
LION = Rule(LionHyper.STATES, _lion)
ADAGRAD = Rule(AdagradHyper.STATES, _adagrad)
LAMB_RULE = Rule(LambHyper.STATES, _lamb, whole=True)

_TORCH = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_REFUSED = ("amsgrad", "maximize", "differentiable", "initial_accumulator_value")


def rule_of(spec: OptimizerSpec | torch.optim.Optimizer) -> Rule:
    """Return the rule of an optimizer that the user gave.

    Raises:
        ConfigError: an optimizer class or option that is not supported.
    """
    if not isinstance(spec, torch.optim.Optimizer):
        return _rule_of_spec(spec)
    if not isinstance(spec, _TORCH):
        raise ConfigError(
            f"optimizer: expected one of torch.optim.AdamW, Adam, SGD or Adagrad, or of offload.AdamW, Adam, SGD, Lion "
            f"or Adagrad but got {type(spec).__name__}; other optimizers are not supported yet"
        )
    for group in spec.param_groups:
        for option in _REFUSED:
            if group.get(option):
                raise ConfigError(
                    f"optimizer: {option}={group[option]} is not supported; make the optimizer without it"
                )
    if isinstance(spec, torch.optim.SGD):
        rule = MOMENTUM_SGD if any(group["momentum"] for group in spec.param_groups) else PLAIN_SGD
        for group in spec.param_groups:
            rule.hyper(group, 1, 1.0)
        return rule
    if isinstance(spec, torch.optim.Adagrad):
        return ADAGRAD
    decoupled = isinstance(spec, torch.optim.AdamW) or bool(spec.defaults.get("decoupled_weight_decay"))
    return ADAMW if decoupled else ADAM


def _rule_of_spec(spec: OptimizerSpec) -> Rule:
    match spec:
        case Adam():  # a kind of AdamW
            return ADAM
        case AdamW():
            return ADAMW
        case SGD():
            return MOMENTUM_SGD if spec.momentum else PLAIN_SGD
        case Lion():
            return LION
        case Adagrad():
            return ADAGRAD
        case LAMB():
            return LAMB_RULE
    raise ConfigError(
        f"optimizer: expected an instance of offload.AdamW, Adam, SGD, Lion, Adagrad or LAMB, or of torch.optim.AdamW, "
        f"Adam, SGD or Adagrad but got {spec!r}"
    )
