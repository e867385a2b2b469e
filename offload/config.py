"""Options of the engine: one frozen value, validated once.

Owns the spelling of every option, its defaults and the parsing of byte counts. Knows nothing of torch or of hardware:
percentages and missing budgets are resolved against the machine in :mod:`offload.memory.tiers`. Next:
:mod:`offload.engine`.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

from offload.errors import ConfigError, did_you_mean
from offload.groups import parse_groups

OffloadTier = Literal["auto", "none", "cpu", "nvme"]
DtypeName = Literal["bfloat16", "float16", "float32"]
StateDtype = Literal["float32", "bfloat16", "int8"]
Reduction = Literal["mean", "sum"]

_UNITS = {"": 1, "B": 1}
for _power, _letter in enumerate("KMGT", start=1):
    _UNITS[f"{_letter}B"] = 1000**_power
    _UNITS[f"{_letter}IB"] = 1024**_power
    _UNITS[_letter] = 1024**_power
_SIZE = re.compile(r"^\s*([0-9]*\.?[0-9]+)\s*([A-Za-z]*|%)\s*$")
_TIER_ALIASES: dict[object, str] = {
    "device": "device",
    "gpu": "device",
    "cuda": "device",
    0: "device",
    "0": "device",
    "cpu": "cpu",
    "host": "cpu",
    "nvme": "nvme",
    "disk": "nvme",
}
TIER_NAMES = ("device", "cpu", "nvme")


@dataclasses.dataclass(frozen=True, slots=True)
class Share:
    """A budget given as a share of what the tier has free, in 0..1."""

    fraction: float


def parse_bytes(value: int | str | float, *, subject: str) -> int | Share:
    """Parse a byte count.

    Args:
        value: an integer (bytes), ``"8GiB"``, ``"500 MB"`` (decimal), ``"1.5G"`` (binary) or ``"80%"``.
        subject: what is being parsed, for the error text.

    Returns:
        Bytes, or a :class:`Share` for a percentage.

    Raises:
        ConfigError: the text is not a byte count, or is negative.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise ConfigError(f'{subject}: expected bytes as int or text like "8GiB" but got {value!r}')
    if not isinstance(value, str):
        if not math.isfinite(value) or value < 0 or value != int(value):
            raise ConfigError(f"{subject}: expected a whole, non-negative number of bytes but got {value!r}")
        return int(value)
    match = _SIZE.match(value)
    if match is None:
        raise ConfigError(f'{subject}: expected bytes like "8GiB", "500MB" or "80%" but got {value!r}')
    number, unit = float(match.group(1)), match.group(2)
    if unit == "%":
        if not 0 < number <= 100:
            raise ConfigError(f"{subject}: expected a percentage in (0, 100] but got {value!r}")
        return Share(number / 100)
    if unit.upper() not in _UNITS:
        raise ConfigError(f"{subject}: unknown unit in {value!r}; use B, KiB, MiB, GiB, TiB, KB, MB, GB, TB or %")
    return int(number * _UNITS[unit.upper()])


def format_bytes(size_bytes: float) -> str:
    """Return `size_bytes` for people, with binary units: ``1.50 GiB``."""
    size = float(size_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.2f} {unit}"
        size /= 1024
    return f"{size:.2f} TiB"


_Spec = TypeVar("_Spec")
# Options of torch's classes that say how their steps are made. Here, the kernels make them: any value will do.
_HOW = ("foreach", "fused", "capturable")
# Options of torch's classes that change the step, and which of its classes make such steps when they are given.
_OTHER_STEPS = {
    "amsgrad": ("AdamW", "Adam"),
    "maximize": ("AdamW", "Adam", "SGD", "Adagrad"),
    "decoupled_weight_decay": ("Adam",),
    "initial_accumulator_value": ("Adagrad",),
    "differentiable": (),
}


def _like_torch(kind: type[_Spec]) -> type[_Spec]:
    """Let a class of hyper-parameters take what the class of that name in torch takes, or name what it does not."""
    make = kind.__init__
    names = [field.name for field in dataclasses.fields(kind)]  # type: ignore[arg-type]

    @functools.wraps(make)
    def initialise(self: _Spec, *args: Any, **options: Any) -> None:
        _refuse_other_steps(kind.__name__, options)
        for name in options:
            if name not in (*names, *_HOW, *_OTHER_STEPS):
                raise ConfigError(
                    f"{kind.__name__}: unknown option {name!r}{did_you_mean(name, names)}; options: {', '.join(names)}"
                )
        make(self, *args, **{name: value for name, value in options.items() if name in names})

    kind.__init__ = initialise  # type: ignore[method-assign, assignment]
    return kind


def _refuse_other_steps(subject: str, options: Mapping[str, Any]) -> None:
    """Refuse options of torch's classes that are set and would not be heeded."""
    for name, kinds in _OTHER_STEPS.items():
        if options.get(name):
            kind, value = subject.partition(",")[0], options[name]
            own = f"pass torch.optim.{kind}(..., {name}={value!r}), which makes such steps itself"
            raise ConfigError(
                f"{subject}: expected no {name}, which is another step than its own, but got {value!r}; "
                f"{own if kind in kinds else 'leave it out'}"
            )


def hyper_parameters(spec: OptimizerSpec) -> dict[str, Any]:
    """Return the options of an optimizer by name, for all groups that have none of their own."""
    return {field.name: getattr(spec, field.name) for field in dataclasses.fields(spec) if field.name != "params"}


def options_by_group(spec: OptimizerSpec) -> list[dict[str, Any]]:
    """Return the options of each group of an optimizer, which is one where no parameters were given."""
    own = [{}] if spec.params is None else spec.params.options()
    return [{**hyper_parameters(spec), **options} for options in own]


def _check(spec: OptimizerSpec) -> None:
    """Check what an optimizer was made of, and keep the parameters that an iterator gives only once.

    Raises:
        ConfigError: an option is out of its range, of one group or of all, or the parameters are none.
    """
    subject = type(spec).__name__
    _check_options(hyper_parameters(spec), subject)
    if spec.params is None:
        return
    object.__setattr__(spec, "params", parse_groups(spec.params, subject=subject))
    for number, options in enumerate(options_by_group(spec)):
        _refuse_other_steps(f"{subject}, param group {number}", options)
        _check_options(options, f"{subject}, param group {number}")


def _check_options(options: Mapping[str, Any], subject: str) -> None:
    betas = options.get("betas", (0.0, 0.0))
    if not isinstance(betas, Sequence) or isinstance(betas, str) or len(betas) != 2:
        raise ConfigError(f"{subject}: expected betas as two numbers but got {betas!r}")
    try:
        check_hyper_parameters(options, subject=subject)
    except TypeError as error:
        raise ConfigError(f"{subject}: expected numbers but got {dict(options)!r}: {error}") from error


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class AdamW:
    """Hyper-parameters of AdamW (decoupled weight decay).

    Attributes:
        params: as in ``torch.optim``: parameters, pairs of a name and a parameter, or dicts of them with options of
            their own. Parameters that are left out are not updated. None: all trainable parameters of the model, as
            one group.
        lr, betas, eps, weight_decay: options of all groups that have none of their own.

    Source: Loshchilov and Hutter, Decoupled Weight Decay Regularization, algorithm 2.
    """

    params: Any = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check(self)


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class Adam(AdamW):
    """Hyper-parameters of Adam; `weight_decay` is added to the gradient (L2), as in ``torch.optim.Adam``.

    Source: Kingma and Ba, Adam: A Method for Stochastic Optimization, algorithm 1.
    """

    weight_decay: float = 0.0


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class SGD:
    """Hyper-parameters of SGD as in ``torch.optim.SGD``: L2 decay; one state with a momentum, none without.

    `params` as in :class:`AdamW`; either all groups have a momentum or none.
    """

    params: Any = None
    lr: float = 1e-3
    momentum: float = 0.0
    dampening: float = 0.0
    weight_decay: float = 0.0
    nesterov: bool = False

    def __post_init__(self) -> None:
        _check(self)


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class Lion:
    """Hyper-parameters of Lion, which has one state; learning rates are 3 to 10 times smaller than AdamW's.

    `params` as in :class:`AdamW`.

    Source: Chen et al., Symbolic Discovery of Optimization Algorithms, algorithm 2.
    """

    params: Any = None
    lr: float = 1e-4
    betas: tuple[float, float] = (0.9, 0.99)
    weight_decay: float = 0.0

    def __post_init__(self) -> None:
        _check(self)


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class Adagrad:
    """Hyper-parameters of Adagrad as in ``torch.optim.Adagrad``, whose sum starts at 0: L2 decay, one state.

    `params` as in :class:`AdamW`.
    """

    params: Any = None
    lr: float = 1e-2
    lr_decay: float = 0.0
    weight_decay: float = 0.0
    eps: float = dataclasses.field(default=1e-10, kw_only=True)  # in torch, another option comes before it

    def __post_init__(self) -> None:
        _check(self)


@_like_torch
@dataclasses.dataclass(frozen=True, slots=True)
class LAMB:
    """Hyper-parameters of LAMB: AdamW whose update of each parameter gets the parameter's norm; for large batches.

    `params` as in :class:`AdamW`.

    Source: You et al., Large Batch Optimization for Deep Learning, algorithm 2, with bias correction.
    """

    params: Any = None
    lr: float = 1e-3
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-6
    weight_decay: float = 1e-2

    def __post_init__(self) -> None:
        _check(self)
        if any(options["eps"] == 0 for options in options_by_group(self)):
            raise ConfigError("LAMB: eps is out of range: expected a number above 0 but got 0; take 1e-6")


OptimizerSpec = AdamW | SGD | Lion | Adagrad | LAMB


def check_hyper_parameters(values: Mapping[str, Any], *, subject: str) -> None:
    """Check the ranges of those hyper-parameters that are there.

    Raises:
        ConfigError: one is out of its range.
    """
    for name in ("lr", "eps", "weight_decay", "momentum", "lr_decay"):
        if name in values and not (values[name] >= 0 and math.isfinite(values[name])):
            raise ConfigError(f"{subject}: {name} is out of range: {values[name]!r}")
    for position, beta in enumerate(values.get("betas", ())):
        if not 0 <= beta < 1:
            raise ConfigError(f"{subject}: betas[{position}] is out of range: {beta!r}")
    if values.get("nesterov") and not (values["momentum"] > 0 and values["dampening"] == 0):
        raise ConfigError(f"{subject}: nesterov=True needs a momentum above 0 and no dampening")


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All options of :class:`offload.Engine`.

    Attributes:
        device: torch device or its name; None takes ``"cuda"`` where there is one, else ``"cpu"``.
        max_memory: budget per tier, keys ``"device"`` (or 0), ``"cpu"``, ``"nvme"`` (or ``"disk"``); bytes as int or
            text, or a percentage of what is free. A missing tier gets what is free less head-room; ``nvme`` needs
            `nvme_path`, unless it is 0.
        nvme_path: directory, or several, for the swap files. None: the NVMe tier is not used.
        dtype: cast parameters to this dtype; None keeps the model's. The master weights keep full precision. Buffers
            keep their dtype, for running statistics and rotary frequencies lose too much; where a module wants them
            like its parameters (BatchNorm does), cast them first: ``buffer.data = buffer.data.bfloat16()``.
        state_dtype: how the moments of Adam and AdamW are stored, wherever they live. ``"float32"`` is exact. The
            others are lossy, rounded stochastically so that nothing stalls, and results stay the same bits for every
            placement: take ``"bfloat16"`` (4 bytes per parameter for both moments instead of 8) where states on NVMe
            set the pace, and ``"int8"`` (8-bit floating point in blocks of 128 elements, 2.02 bytes) where the drive
            or its wear still does, after comparing the loss of a short run with that of ``"float32"``.
        offload_param, offload_optimizer: force a home (``"none"`` = device), or let the plan choose (``"auto"``). What
            is forced is placed first: states forced to ``"cpu"`` may leave so little of it that gradients and
            parameters go to the drive, which moves more than ``"auto"``; the plan says how much.
        max_grad_norm: clip the global gradient norm to this value; None does not clip. As with
            ``clip_grad_norm_(model.parameters())``, parameters that the optimizer leaves out count if they got a
            gradient (their gradients are dropped at every step, as with ``model.zero_grad()``).
        gradient_accumulation_steps: micro-batches per optimizer step. Their gradients are added in fp32.
        gradient_reduction: ``"mean"`` divides the sum by `gradient_accumulation_steps`: do not divide the loss.
            ``"sum"`` only adds: for trainers (of Hugging Face, Lightning, Accelerate) that divide the loss themselves.
            The number of micro-batches then only tells the plan to keep room for fp32. None is ``"mean"``, but a step
            that leaves open who divides is refused: one by ``optimizer.step()`` after ``loss.backward()``.
        activation_memory: part of the device budget kept for activations and temporaries; None: half of it, less
            where the parameters need the room.
        unit_bytes: split modules whose parameters are larger than this; None chooses from the budget.
        chunk_numel: elements per optimizer chunk; None chooses from the budget.
        threads: threads of the CPU optimizer; None takes one per core.
        prefetch: fetch the next units while one computes.
        io_deadline_s: seconds after which a wait for a transfer is given up with an error.
        initial_loss_scale, loss_scale_window, loss_scale_hysteresis, min_loss_scale: dynamic loss scaling for float16.
        init_weights: callable initialising a module whose parameters are on the meta device, given that module;
            None uses the model's own ``_init_weights`` or ``reset_parameters``.
    """

    device: Any = None
    max_memory: Mapping[Any, int | str] | None = None
    nvme_path: str | Path | Sequence[str | Path] | None = None
    dtype: DtypeName | None = None
    state_dtype: StateDtype = "float32"
    offload_param: OffloadTier = "auto"
    offload_optimizer: OffloadTier = "auto"
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1
    gradient_reduction: Reduction | None = None
    activation_memory: int | str | None = None
    unit_bytes: int | str | None = None
    chunk_numel: int | None = None
    threads: int | None = None
    prefetch: bool = True
    io_deadline_s: float = 60.0
    initial_loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    min_loss_scale: float = 1.0
    init_weights: Any = None

    def __post_init__(self) -> None:
        if self.device is not None and not isinstance(self.device, str):
            object.__setattr__(self, "device", str(self.device))
        if self.dtype is not None:
            name = str(self.dtype).removeprefix("torch.")
            if name not in get_args(DtypeName):
                raise ConfigError(
                    f"dtype: expected one of {', '.join(get_args(DtypeName))} but got {self.dtype!r}"
                    f"{did_you_mean(name, get_args(DtypeName))}"
                )
            object.__setattr__(self, "dtype", name)
        state_name = str(self.state_dtype).removeprefix("torch.")
        if state_name not in get_args(StateDtype):
            raise ConfigError(
                f"state_dtype: expected one of {', '.join(get_args(StateDtype))} but got {self.state_dtype!r}"
                f"{did_you_mean(state_name, get_args(StateDtype))}"
            )
        object.__setattr__(self, "state_dtype", state_name)
        for option in ("offload_param", "offload_optimizer"):
            tier = getattr(self, option)
            if tier not in get_args(OffloadTier):
                raise ConfigError(
                    f"{option}: expected one of {', '.join(get_args(OffloadTier))} but got {tier!r}"
                    f"{did_you_mean(str(tier), get_args(OffloadTier))}"
                )
            if tier == "nvme" and self.nvme_path is None:
                raise ConfigError(f'{option}="nvme": nvme_path is missing; name a directory on the drive')
        if self.gradient_reduction not in (None, *get_args(Reduction)):
            raise ConfigError(
                f"gradient_reduction: expected one of {', '.join(get_args(Reduction))} but got "
                f"{self.gradient_reduction!r}{did_you_mean(str(self.gradient_reduction), get_args(Reduction))}"
            )
        steps = self.gradient_accumulation_steps
        if isinstance(steps, bool) or not isinstance(steps, int) or steps < 1:
            raise ConfigError(f"gradient_accumulation_steps: expected a whole number >= 1 but got {steps!r}")
        for option in ("max_grad_norm", "io_deadline_s", "initial_loss_scale", "min_loss_scale"):
            value = getattr(self, option)
            absent = value is None and option == "max_grad_norm"
            if not absent and not (isinstance(value, (int, float)) and value > 0):
                raise ConfigError(f"{option}: expected a number > 0 but got {value!r}")
        for option in ("chunk_numel", "threads", "loss_scale_window", "loss_scale_hysteresis"):
            value = getattr(self, option)
            absent = value is None and option in ("chunk_numel", "threads")
            if not absent and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{option}: expected a whole number >= 1 but got {value!r}")
        if self.max_memory is not None and not isinstance(self.max_memory, Mapping):
            raise ConfigError(
                f'max_memory: expected a mapping like {{"device": "8GiB", "cpu": "16GiB"}} but got {self.max_memory!r}'
            )
        paths = (self.nvme_path,) if isinstance(self.nvme_path, (str, Path)) else self.nvme_path or ()
        if not isinstance(paths, Sequence) or not all(isinstance(path, (str, Path)) for path in paths):
            raise ConfigError(f"nvme_path: expected a directory or several but got {self.nvme_path!r}")
        if self.budgets().get("nvme") and not paths:
            raise ConfigError('max_memory["nvme"]: a budget without a drive; name a directory on it with nvme_path')
        self.bytes_of("activation_memory")
        self.bytes_of("unit_bytes")

    def budgets(self) -> dict[str, int | Share]:
        """Return the budgets that were given, by canonical tier name (``device``, ``cpu``, ``nvme``)."""
        budgets: dict[str, int | Share] = {}
        for key, value in (self.max_memory or {}).items():
            name = _TIER_ALIASES.get(key)
            if name is None:
                raise ConfigError(
                    f"max_memory: expected keys device, cpu, nvme but got {key!r}{did_you_mean(str(key), TIER_NAMES)}"
                )
            if name in budgets:
                raise ConfigError(f"max_memory: {name!r} is given twice (as {key!r} and under another name)")
            budgets[name] = parse_bytes(value, subject=f"max_memory[{key!r}]")
        return budgets

    def bytes_of(self, option: Literal["activation_memory", "unit_bytes"]) -> int | None:
        """Return a byte option as a number, or None where it was not given.

        Raises:
            ConfigError: it is a percentage or not a byte count.
        """
        value = getattr(self, option)
        if value is None:
            return None
        size = parse_bytes(value, subject=option)
        if isinstance(size, Share):
            raise ConfigError(f"{option}: expected bytes but got {value!r}")
        return size

    def paths(self) -> tuple[Path, ...]:
        """Return the NVMe directories."""
        if self.nvme_path is None:
            return ()
        if isinstance(self.nvme_path, (str, Path)):
            return (Path(self.nvme_path),)
        return tuple(Path(path) for path in self.nvme_path)

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **options: Any) -> Config:
        """Make a Config from another one, a dict or a JSON file, with keyword options on top.

        Raises:
            ConfigError: an option is unknown (with a suggestion) or invalid, or the file is not a JSON object.
        """
        values: dict[str, Any]
        if source is None:
            values = {}
        elif isinstance(source, Config):
            values = {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
        elif isinstance(source, Mapping):
            values = dict(source)
        else:
            try:
                values = json.loads(Path(source).read_text(encoding="utf-8"))
            except (OSError, ValueError) as error:
                raise ConfigError(f"config file {os.fspath(source)}: cannot be read as JSON: {error}") from error
            if not isinstance(values, dict):
                raise ConfigError(f"config file {os.fspath(source)}: expected a JSON object at the top")
        values.update(options)
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r}{did_you_mean(str(name), known)}; options: {', '.join(known)}"
                )
        return cls(**values)
