"""Who makes the steps of the optimizer that a user gave: a kernel or its own class, and what that one remembers.

Owns the way from an optimizer to states and hyper-parameters: what is placed, streamed, saved and computed follows from
it. The optimizers with a kernel are in :mod:`offload.kernels.optimizers`. Next: :mod:`offload.optim.recipe`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.errors import NEW_ENGINE, ConfigError
from offload.kernels import optimizers
from offload.kernels.cpu_adam import StateKind
from offload.optim.probe import OwnClass, OwnHyper, members_of, options_of, own_class
from offload.optim.takeover import refuse_own_step
from offload.planning.roles import States
from offload.spec import Hyper, OptimizerSpec
from offload.torch_private import below_wrappers

STATE_SEED = 0x0FF10AD  # of the bits that round states; a constant: a run is reproducible whatever the options


StepOf = Hyper | OwnHyper  # hyper-parameters of one step


# What else can be done about an option that an engine refuses after it was made.
_ELSE = {
    "differentiable": "",  # refused then, too
    "maximize": f", or {NEW_ENGINE}: one of torch.optim, made with maximize=True; set that again after loading",
}
_REFUSED = ("maximize", "amsgrad", "differentiable")
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
        kernels: which make the steps of its groups, by kernels.h of csrc/cpu_adam; none if one step needs several.
        whole: a parameter is updated as a whole: something depends on all of it.
        own: the class that makes the steps; None where a kernel does.
        refused: options that ask for another step than this one where they are set.
    """

    names: tuple[str, ...]
    make: Callable[[Mapping[str, Any], int, float], StepOf]
    counts_steps: bool = True
    compressible: bool = False
    kernels: frozenset[int] = frozenset()
    whole: bool = False
    own: OwnClass | None = None
    refused: tuple[str, ...] = _REFUSED

    def hyper(self, group: Mapping[str, Any], step: int, grad_scale: float) -> StepOf:
        """Return the hyper-parameters of a step.

        Raises:
            ConfigError: one is out of its range, or needs a step or a state that the optimizer has been made without.
        """
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


_TABLE: list[type[OptimizerSpec]] = [
    kind
    for kind in vars(optimizers).values()
    if isinstance(kind, type) and issubclass(kind, OptimizerSpec) and kind is not OptimizerSpec
]
# Classes of torch whose steps the kernels make.
_IN_TORCH: dict[Any, type[OptimizerSpec]] = {
    getattr(torch.optim, kind.__name__): kind for kind in _TABLE if kind.IN_TORCH
}
_MORE_STATES = ("amsgrad", "centered")  # options of torch's classes that want states which are made in the first step


def rule_of(spec: OptimizerSpec | torch.optim.Optimizer, dtype: torch.dtype | None = None) -> Rule:
    """Return the rule of an optimizer that the user gave.

    Args:
        spec: hyper-parameters, or any optimizer of torch.
        dtype: what parameters will be cast to; None where they keep theirs.

    Raises:
        ConfigError: not an optimizer, or one whose class or option is not supported.
    """
    if isinstance(spec, OptimizerSpec):
        return _kernel_rule(type(spec), spec.options_by_group())
    if not isinstance(spec, torch.optim.Optimizer):
        raise ConfigError(
            f"optimizer: expected an instance of offload.{', '.join(kind.__name__ for kind in _TABLE)}, or of a class "
            f"of torch.optim, but got {spec!r}"
        )
    refuse_own_step(spec)
    if any(group.get("differentiable") for group in spec.param_groups):
        raise ConfigError("optimizer: differentiable=True is not supported; make the optimizer without it")
    kind = _kernel_class(spec)
    return _own_rule(own_class(spec, dtype), spec) if kind is None else _kernel_rule(kind, spec.param_groups)


def _kernel_class(given: torch.optim.Optimizer) -> type[OptimizerSpec] | None:
    """Return the optimizer whose kernel makes the steps of a torch optimizer, None where its own class must."""
    base: Any = next((base for base in type(given).__mro__ if base in _IN_TORCH), None)
    if base is None or below_wrappers(type(given).step) is not below_wrappers(base.step):
        return None
    if getattr(type(given), "_init_group", None) is not getattr(base, "_init_group", None):  # which torch's steps call
        return None
    kind = _IN_TORCH[base]
    other = any(group.get(option) for group in given.param_groups for option in kind.OTHER_STEPS)
    return None if other else kind


def _kernel_rule(kind: type[OptimizerSpec], groups: Sequence[Mapping[str, Any]]) -> Rule:
    names = max((kind.of(group).states for group in groups), key=len, default=kind.STATES)

    def make(group: Mapping[str, Any], step: int, grad_scale: float) -> Hyper:
        spec = kind.of(group)
        spec.check_states(names)
        return Hyper(spec, step, grad_scale)

    later = {*_REFUSED, *kind.OTHER_STEPS} - {"initial_accumulator_value"}  # which is in the states by then
    rule = Rule(
        names,
        make,
        counts_steps=kind.COUNTS_STEPS,
        compressible=kind.COMPRESSIBLE,
        kernels=frozenset() if kind.WHOLE else frozenset(kind.of(group).kernel for group in groups),
        whole=kind.WHOLE,
        refused=tuple(sorted(later)),
    )
    for group in groups:
        rule.hyper(group, 1, 1.0)
    return rule


def _own_rule(own: OwnClass, spec: torch.optim.Optimizer) -> Rule:
    """Return the rule of a class that steps itself: it heeds its options, but needs states from its first step on."""
    more = (*_MORE_STATES, "momentum") if isinstance(spec, torch.optim.RMSprop) else _MORE_STATES
    had = {name for name in more if any(group.get(name) for group in spec.param_groups)}

    copies = own.make

    def make(group: Mapping[str, Any], step: int, grad_scale: float) -> OwnHyper:
        nonlocal copies
        copies = copies.current()
        return OwnHyper(options_of(group), grad_scale, copies, members_of(group))

    refused = ("differentiable", *(name for name in more if name not in had))
    return Rule(own.names, make, whole=True, own=own, refused=refused)
