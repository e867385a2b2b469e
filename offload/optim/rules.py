"""The optimizers: what each of them remembers of an element, and how a step is made of a param group.

Owns the table from a user's optimizer to states and hyper-parameters: what is placed, streamed, saved and computed
follows from it. The formulas are in :mod:`offload.kernels.hyper`. Next: :mod:`offload.optim.recipe`.
"""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch

from offload.config import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Lion,
    OptimizerSpec,
    check_hyper_parameters,
    options_by_group,
)
from offload.errors import NEW_ENGINE, ConfigError
from offload.kernels.cpu_adam import (
    AdagradHyper,
    AdamHyper,
    Hyper,
    LambHyper,
    LionHyper,
    MomentumHyper,
    SgdHyper,
    StateKind,
)
from offload.optim.probe import OwnClass, OwnHyper, options_of, own_class
from offload.planning.placement import States

STATE_SEED = 0x0FF10AD  # of the bits that round states; a constant: a run is reproducible whatever the options


StepOf = Hyper | LambHyper | OwnHyper  # hyper-parameters of one step


# What else can be done about an option that an engine refuses after it was made.
_ELSE = {
    "differentiable": "",  # refused then, too
    "maximize": f", or {NEW_ENGINE}: one of torch.optim, made with maximize=True; set that again after loading",
}
_FROM_THE_START = ", or train from the start with an optimizer of torch.optim that has it: its states must be there"


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
        own: the class that makes the steps; None where a kernel does.
        refused: options that ask for another step than this one where they are set.
    """

    names: tuple[str, ...]
    make: Callable[[Mapping[str, Any], int, float], StepOf]
    counts_steps: bool = True
    compressible: bool = False
    whole: bool = False
    own: OwnClass | None = None
    refused: tuple[str, ...] = ("maximize", "amsgrad", "differentiable")

    def hyper(self, group: Mapping[str, Any], step: int, grad_scale: float) -> StepOf:
        """Return the hyper-parameters of a step.

        Raises:
            ConfigError: one is out of its range, or needs a step or a state that the optimizer has been made without.
        """
        if self.own is None:
            check_hyper_parameters(group, subject="param group")
        self.refuse_others(group)
        return self.make(group, step, grad_scale)

    def refuse_others(self, group: Mapping[str, Any]) -> None:
        """Refuse options of a param group that ask for another step.

        Raises:
            ConfigError: there is one.
        """
        for name in self.refused:
            if group.get(name):
                raise ConfigError(
                    f"param group: expected {name}={type(group[name])()!r}, as when the engine was made, but got "
                    f"{group[name]!r}; set it back{_ELSE.get(name, _FROM_THE_START)}"
                )

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
            decoupled=bool(group.get("decoupled_weight_decay", decoupled)),
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

# Whose steps the kernels make; from which options on they do not.
_KERNELS: tuple[type[torch.optim.Optimizer], ...] = (
    torch.optim.AdamW,
    torch.optim.Adam,
    torch.optim.SGD,
    torch.optim.Adagrad,
)
_OWN_OPTIONS = ("amsgrad", "maximize", "initial_accumulator_value")
_MORE_STATES = ("amsgrad", "centered")  # options of torch's classes that want states which are made in the first step


def rule_of(spec: OptimizerSpec | torch.optim.Optimizer, dtype: torch.dtype | None = None) -> Rule:
    """Return the rule of an optimizer that the user gave.

    Args:
        spec: hyper-parameters, or any optimizer of torch.
        dtype: what parameters will be cast to; None where they keep theirs.

    Raises:
        ConfigError: not an optimizer, or one whose class or option is not supported.
    """
    if not isinstance(spec, torch.optim.Optimizer):
        return _rule_of_spec(spec)
    if any(group.get("differentiable") for group in spec.param_groups):
        raise ConfigError("optimizer: differentiable=True is not supported; make the optimizer without it")
    kind = _kernel_class(spec)
    if kind is None:
        return _own_rule(own_class(spec, dtype), spec)
    if kind is torch.optim.SGD:
        rule = MOMENTUM_SGD if any(group["momentum"] for group in spec.param_groups) else PLAIN_SGD
        for group in spec.param_groups:
            rule.hyper(group, 1, 1.0)
        return rule
    if kind is torch.optim.Adagrad:
        return ADAGRAD
    decoupled = kind is torch.optim.AdamW or bool(spec.defaults.get("decoupled_weight_decay"))
    return ADAMW if decoupled else ADAM


def _kernel_class(spec: torch.optim.Optimizer) -> type[torch.optim.Optimizer] | None:
    """Return the class of torch that a kernel steps like, None where it would not do the same as the optimizer's."""
    if any(group.get(option) for group in spec.param_groups for option in _OWN_OPTIONS):
        return None
    kind = next((kind for kind in _KERNELS if isinstance(spec, kind)), None)
    if kind is None or inspect.unwrap(type(spec).step) is not inspect.unwrap(kind.step):
        return None
    return kind


def _own_rule(own: OwnClass, spec: torch.optim.Optimizer) -> Rule:
    """Return the rule of a class that steps itself: it heeds its options, but needs states from its first step on."""
    more = (*_MORE_STATES, "momentum") if isinstance(spec, torch.optim.RMSprop) else _MORE_STATES
    had = {name for name in more if any(group.get(name) for group in spec.param_groups)}

    def make(group: Mapping[str, Any], step: int, grad_scale: float) -> OwnHyper:
        return OwnHyper(options_of(group), grad_scale)

    refused = ("differentiable", *(name for name in more if name not in had))
    return Rule(own.names, make, whole=True, own=own, refused=refused)


def _rule_of_spec(spec: OptimizerSpec) -> Rule:
    rule = _kernel_rule(spec)
    for options in options_by_group(spec):
        rule.hyper(options, 1, 1.0)
    return rule


def _kernel_rule(spec: OptimizerSpec) -> Rule:
    match spec:
        case Adam():  # a kind of AdamW
            return ADAM
        case AdamW():
            return ADAMW
        case SGD():
            momentum = any(options["momentum"] for options in options_by_group(spec))
            return MOMENTUM_SGD if momentum else PLAIN_SGD
        case Lion():
            return LION
        case Adagrad():
            return ADAGRAD
        case LAMB():
            return LAMB_RULE
    raise ConfigError(
        f"optimizer: expected an instance of offload.AdamW, Adam, SGD, Lion, Adagrad or LAMB, or of a class of "
        f"torch.optim but got {spec!r}"
    )
