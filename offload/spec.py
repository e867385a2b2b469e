"""What all optimizers have in common: options with ranges, parameters as in torch, and the steps made of them.

Owns the checks of options, wherever they come from: a user, a param group or a saved dict. Knows nothing of torch. The
optimizers themselves, one class each, are in :mod:`offload.kernels.optimizers`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar, TypeVar, get_args, get_origin, get_type_hints

from offload.errors import ConfigError, did_you_mean
from offload.groups import parse_groups

if sys.version_info >= (3, 11):
    from typing import dataclass_transform
else:
    from typing_extensions import dataclass_transform  # which torch needs

CONSTANTS = 9  # kConstants in csrc/cpu_adam/kernels.h


@dataclasses.dataclass(frozen=True, slots=True)
class Range:
    """Numbers that an option may be.

    Attributes:
        text: the numbers, for an error.
        holds: tells whether a number is one of them.
    """

    text: str
    holds: Callable[[float], bool]

    def check(self, value: Any, name: str) -> None:
        """Refuse other values.

        Raises:
            ConfigError: it is another number, or none.
        """
        with contextlib.suppress(TypeError, ValueError, RuntimeError):  # of text, of an array
            if self.holds(value):
                return
        raise ConfigError(f"{name} is out of range: {value!r}; take {self.text}")


NOT_NEGATIVE = Range("a finite number of at least 0", lambda value: value >= 0 and math.isfinite(value))
Finite = Annotated[float, Range("a finite number", math.isfinite)]
NotNegative = Annotated[float, NOT_NEGATIVE]
Positive = Annotated[float, Range("a finite number above 0", lambda value: value > 0 and math.isfinite(value))]
BelowOne = Annotated[float, Range("a number in [0, 1)", lambda value: 0 <= value < 1)]

# Options of torch's classes that say how their steps are made. Here, the kernels make them: any value will do.
_HOW = ("foreach", "fused", "capturable")
# Options of torch's classes that change the step, and what to do where one is set.
_OTHER_STEPS = {
    "amsgrad": "leave it out",
    "maximize": "leave it out",
    "differentiable": "leave it out",
    "initial_accumulator_value": "leave it out",
    "decoupled_weight_decay": "take offload.AdamW with it, offload.Adam without",
}


@dataclasses.dataclass(frozen=True, slots=True)
class OptimizerSpec:
    """Options of an optimizer; a subclass for each, made by :func:`optimizer`.

    The fields of a subclass are its options. Annotations give their ranges: :data:`NotNegative` and the like, a tuple
    of two of them, or bool.

    Attributes:
        params: what :func:`offload.groups.parse_groups` takes; None: all trainable parameters, as one group.
        KERNEL: number of the rule in csrc/cpu_adam/kernels.h.
        STATES: what is remembered of each element, by the names that torch has for it; at most as many as there are
            :data:`offload.planning.roles.MOMENTS`.
        IN_TORCH: ``torch.optim`` has a class with the same name, options, states and steps.
        OTHER_STEPS: options with which the class in torch makes other steps. It makes them itself then; once an engine
            is made, they are refused.
        COUNTS_STEPS: torch keeps ``step`` with the states.
        COMPRESSIBLE: there are kernels for states of fewer than 32 bits.
        WHOLE: a parameter is updated as a whole: something depends on all of it.
        TYPES: annotations of the options, in order.
    """

    KERNEL: ClassVar[int]
    STATES: ClassVar[tuple[str, ...]]
    IN_TORCH: ClassVar[bool] = False
    OTHER_STEPS: ClassVar[tuple[str, ...]] = ()
    COUNTS_STEPS: ClassVar[bool] = True
    COMPRESSIBLE: ClassVar[bool] = False
    WHOLE: ClassVar[bool] = False
    TYPES: ClassVar[Mapping[str, Any]] = {}

    params: Any = None

    def __post_init__(self) -> None:
        kind, subject = type(self), type(self).__name__
        kind._read(self.options(), subject)
        if self.params is None:
            return
        object.__setattr__(self, "params", parse_groups(self.params, subject=subject))
        for number, options in enumerate(self.options_by_group()):
            kind._refuse_other_steps(options, f"{subject}, param group {number}")
            kind._read(options, f"{subject}, param group {number}")

    # --- what a subclass may say --------------------------------------------------------------------------------------

    def constants(self, step: int) -> tuple[float, ...]:
        """Return the kernel's constants behind ``grad_scale``, in the order of csrc/cpu_adam/kernels.h, in float64.

        Args:
            step: its number, from 1.
        """
        raise NotImplementedError

    @property
    def kernel(self) -> int:
        """Number of the rule in csrc/cpu_adam/kernels.h."""
        return self.KERNEL

    @property
    def states(self) -> tuple[str, ...]:
        """Names of the states that steps with these options need."""
        return self.STATES

    @classmethod
    def conflict(cls, options: Mapping[str, Any]) -> str:
        """Return what is wrong with options that are in their ranges, empty where nothing is."""
        return ""

    @classmethod
    def variant(cls, group: Mapping[str, Any]) -> type[OptimizerSpec]:
        """Return the class whose steps a param group asks for."""
        return cls

    def check_states(self, states: tuple[str, ...]) -> None:
        """Refuse options that need other states than the engine has.

        Raises:
            ConfigError: they do.
        """

    # --- options ------------------------------------------------------------------------------------------------------

    @classmethod
    def of(cls, group: Mapping[str, Any]) -> OptimizerSpec:
        """Return the options in a param group, which may have more.

        Raises:
            ConfigError: one is out of its range.
            KeyError: one is missing.
        """
        kind = cls.variant(group)
        return kind(**kind._read(group, "param group"))

    def options(self) -> dict[str, Any]:
        """Return the options by name, for all groups that have none of their own."""
        return {name: getattr(self, name) for name in self.TYPES}

    def options_by_group(self) -> list[dict[str, Any]]:
        """Return the options of each group, which is one where no parameters were given."""
        own = [{}] if self.params is None else self.params.options()
        return [{**self.options(), **options} for options in own]

    @classmethod
    def _read(cls, options: Mapping[str, Any], subject: str) -> dict[str, Any]:
        """Return the options as plain numbers, checked."""
        found = {name: _read(kind, options[name], name, subject) for name, kind in cls.TYPES.items()}
        if wrong := cls.conflict(found):
            raise ConfigError(f"{subject}: {wrong}")
        return found

    @classmethod
    def _refuse_other_steps(cls, options: Mapping[str, Any], subject: str) -> None:
        """Refuse options of torch's classes that are set and would not be heeded."""
        for name in (*cls.OTHER_STEPS, *_OTHER_STEPS):
            says_what_it_is = name == "decoupled_weight_decay" and getattr(cls, "DECOUPLED", False)
            if options.get(name) and not says_what_it_is:
                own = f"pass torch.optim.{cls.__name__}(..., {name}={options[name]!r}), which makes such steps itself"
                raise ConfigError(
                    f"{subject}: expected no {name}, which is another step than its own, but got {options[name]!r}; "
                    f"{own if name in cls.OTHER_STEPS else _OTHER_STEPS[name]}"
                )


@dataclasses.dataclass(frozen=True, slots=True)
class Hyper:
    """Hyper-parameters of one step.

    Attributes:
        spec: The optimizer's options.
        step: Number of the step, from 1.
        grad_scale: Factor on the gradient: clipping, loss scale and accumulation in one; a negative one maximizes.

    Raises:
        ValueError: `step` or `grad_scale` is outside its range.
    """

    spec: OptimizerSpec
    step: int = 1
    grad_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.step < 1:
            raise ValueError(f"step: expected 1 or more but got {self.step}; count the first step as 1")
        if not math.isfinite(self.grad_scale):
            raise ValueError(f"grad_scale: expected a finite number but got {self.grad_scale}; skip the step")

    def constants(self) -> tuple[float, ...]:
        """Return all constants of the kernel, in the order of csrc/cpu_adam/kernels.h."""
        own = self.spec.constants(self.step)
        return (self.grad_scale, *own, *[0.0] * (CONSTANTS - 1 - len(own)))


_Spec = TypeVar("_Spec", bound=OptimizerSpec)


@dataclass_transform(frozen_default=True)
def optimizer(kind: type[_Spec]) -> type[_Spec]:
    """Make a subclass of :class:`OptimizerSpec` a frozen dataclass that takes what a class in torch takes.

    Options that only say how torch makes a step are dropped, those that ask for another step refused.
    """
    kind = dataclasses.dataclass(frozen=True, slots=True)(kind)
    hints = get_type_hints(kind, include_extras=True)
    names = [field.name for field in dataclasses.fields(kind)]
    kind.TYPES = {name: hints[name] for name in names if name != "params"}
    make = kind.__init__

    @functools.wraps(make)
    def initialise(self: _Spec, *args: Any, **options: Any) -> None:
        kind._refuse_other_steps(options, kind.__name__)
        for name in options:
            if name not in (*names, *_HOW, *_OTHER_STEPS, *kind.OTHER_STEPS):
                raise ConfigError(
                    f"{kind.__name__}: unknown option {name!r}{did_you_mean(name, names)}; options: {', '.join(names)}"
                )
        make(self, *args, **{name: value for name, value in options.items() if name in names})

    kind.__init__ = initialise  # type: ignore[method-assign, assignment]
    return kind


def _read(kind: Any, value: Any, name: str, subject: str) -> Any:
    if get_origin(kind) is tuple:
        if not isinstance(value, Sequence) or isinstance(value, str) or len(value) != 2:
            raise ConfigError(f"{subject}: expected {name} as two numbers but got {value!r}")
        pair = zip(get_args(kind), value, strict=True)
        return tuple(_read(part, item, f"{name}[{place}]", subject) for place, (part, item) in enumerate(pair))
    if get_origin(kind) is Annotated:
        number, bounds = get_args(kind)
        bounds.check(value, f"{subject}: {name}")
        return number(value)
    return kind(value)
