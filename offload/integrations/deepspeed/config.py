"""Reads a DeepSpeed configuration: options of an engine, what the script asks for beside, and a report of all keys.

Owns the checks of batch sizes and the filling of ``"auto"``. What each key is here is said by
:mod:`offload.integrations.deepspeed.keys`. Next: :mod:`offload.integrations.deepspeed.engine`.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from offload.config import Config
from offload.errors import ConfigError, did_you_mean
from offload.integrations.deepspeed.keys import Does, find, is_section, names_in
from offload.integrations.libraries import processes

AUTO = "auto"
OWN_SECTION = "offload"
_FOREVER = 2**31 - 1  # steps
PRINTED_EVERY = 10  # steps, where steps_per_print says nothing


@dataclasses.dataclass(frozen=True, slots=True)
class Batch:
    """Samples per step, per micro-batch, micro-batches per step of one process, and processes.

    The first is the product of the others.
    """

    train: int
    micro: int
    accumulation: int
    world: int = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Named:
    """An optimizer or a schedule, as a configuration names it."""

    type: str
    params: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One key: its path, its value as text, what happened to it, and what it is here."""

    path: str
    value: str
    does: Does
    here: str


@dataclasses.dataclass(frozen=True, slots=True)
class Translation:
    """What a configuration asks for; prints itself as a report.

    Attributes:
        options: of :class:`offload.Config`.
        batch: batch sizes.
        optimizer, scheduler: None where the configuration has none.
        stage: of ZeRO, as asked for.
        steps_per_print: None prints nothing.
        drop_last: the loader leaves out a last batch that is too small.
        is_dynamic: the loss scale moves.
        lines: one per key.
    """

    options: Mapping[str, Any]
    batch: Batch
    optimizer: Named | None
    scheduler: Named | None
    stage: int
    steps_per_print: float | None
    drop_last: bool
    is_dynamic: bool
    lines: tuple[Line, ...]

    @property
    def config(self) -> Config:
        """The options as an engine takes them.

        Raises:
            ConfigError: one is invalid.
        """
        return Config(**self.options)

    @property
    def slices(self) -> int | None:
        """The engine's stage; None of one process. Stage 0 of several is 1, which has the same bits."""
        return max(self.stage, 1) if self.batch.world > 1 else None

    @property
    def left_out(self) -> list[Line]:
        """Keys that ask for something which is not done."""
        return [line for line in self.lines if line.does is Does.LEFT_OUT]

    def _columns(self) -> tuple[list[str], list[str]]:
        return [line.path for line in self.lines], [line.value for line in self.lines]

    def __str__(self) -> str:
        path, value = (max((len(one) for one in column), default=0) for column in self._columns())
        rows = [f"{line.path:<{path}}  {line.value:<{value}}  {line.does.value}: {line.here}" for line in self.lines]
        named = ", ".join(f"{name}={value!r}" for name, value in self.options.items())
        return "\n".join([*rows, f"offload.Config({named})"])


def config_from(source: Mapping[str, Any] | str | os.PathLike[str], *, args: Any = None, **options: Any) -> Translation:
    """Translate a DeepSpeed configuration.

    How many processes there are is what the process group says, or else the launcher.

    Budgets are not in it. Without ``max_memory``, in `options` or in a section ``"offload"``, each tier may take what
    is free, less head-room.

    Args:
        source: a dict, or a JSON file.
        args: what ``"auto"`` values are filled from, with the names of Hugging Face's ``TrainingArguments``.
        **options: of :class:`offload.Config`, on top.

    Returns:
        The options, and what became of each key; printable.

    Raises:
        ConfigError: a key is unknown, or would change results; batch sizes contradict each other; a value is missing or
            is ``"auto"`` and nothing says what it is.
    """
    values = _read(source)
    if isinstance(values.get("zero_optimization"), bool):
        values["zero_optimization"] = {"stage": int(values["zero_optimization"])}
    if "bfloat16" in values:
        values.setdefault("bf16", values.pop("bfloat16"))
    world = processes()
    _fill(values, args, world)
    lines = tuple(_lines(values))
    batch = _batch(values, world)
    fp16, is_dynamic = _section(values, "fp16"), True
    mapped: dict[str, Any] = {
        "gradient_accumulation_steps": batch.accumulation,
        "gradient_reduction": "mean",
        **_tiers(values),
        **_dtype(values),
    }
    if _section(values, "activation_checkpointing").get("cpu_checkpointing"):
        mapped["activations"] = "offload"
    if values.get("gradient_clipping"):
        mapped["max_grad_norm"] = _number(values, "gradient_clipping")
    every = None if not values.get("steps_per_print") else _number(values, "steps_per_print")
    if values.get("wall_clock_breakdown"):
        mapped["log_every"] = PRINTED_EVERY if every is None else _whole_steps(every)
    if fp16.get("enabled"):
        mapped |= _loss_scale(fp16)
        is_dynamic = not fp16.get("loss_scale")
    stage = _section(values, "zero_optimization").get("stage", 0)
    if stage not in (0, 1, 2, 3):
        raise ConfigError(f"zero_optimization.stage: expected 0, 1, 2 or 3 but got {stage!r}")
    return Translation(
        options={**mapped, **_section(values, OWN_SECTION), **options},
        batch=batch,
        optimizer=_named(values, "optimizer"),
        scheduler=_named(values, "scheduler"),
        stage=int(stage),
        steps_per_print=every,
        drop_last=bool(values.get("dataloader_drop_last")),
        is_dynamic=is_dynamic,
        lines=lines,
    )


def nvme_path_of(source: Mapping[str, Any] | str | os.PathLike[str] | None) -> str | None:
    """Return the directory on a drive that a configuration names; None where it names none.

    That of the section ``"offload"`` comes first, as it does for the engine, and then that for parameters.
    """
    values = {} if source is None else _read(source)
    own = _section(values, OWN_SECTION).get("nvme_path")
    if own:
        return os.fspath(own if isinstance(own, (str, os.PathLike)) else own[0])
    for path in ("zero_optimization.offload_param", "zero_optimization.offload_optimizer"):
        section = {} if isinstance(values.get("zero_optimization"), bool) else _section(values, path)
        if section.get("device") == "nvme" and section.get("nvme_path"):
            return str(section["nvme_path"])
    return None


# --- reading ----------------------------------------------------------------------------------------------------------


def _read(source: Any) -> dict[str, Any]:
    """Return a configuration as nested dicts of one's own."""
    if isinstance(source, Mapping):
        return _copied(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(f"config: expected a dict or a JSON file but got {type(source).__name__}; pass either")
    try:
        values = json.loads(Path(source).read_text(encoding="utf-8"), object_pairs_hook=_once)
    except ConfigError:
        raise
    except (OSError, ValueError) as error:
        raise ConfigError(f"config {os.fspath(source)}: expected a JSON file but got: {error}; pass another") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config {os.fspath(source)}: expected a JSON object at the top; put the keys into {{}}")
    return values


def _copied(source: Mapping[str, Any]) -> dict[str, Any]:
    return {key: _copied(value) if isinstance(value, Mapping) else value for key, value in source.items()}


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON whose keys are there once."""
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise ConfigError(f"config: expected each key once but got {key!r} twice; remove one")
        found[key] = value
    return found


def _section(values: Mapping[str, Any], path: str) -> Mapping[str, Any]:
    """Return a section; an empty one where there is none."""
    section = values
    for name in path.split("."):
        found = section.get(name)
        if found is None:
            return {}
        if not isinstance(found, Mapping):
            raise ConfigError(f"{path}: expected a section, {{...}}, but got {found!r}")
        section = found
    return section


def _lines(values: Mapping[str, Any], section: str = "") -> Iterator[Line]:
    """Yield what happens to each key.

    Raises:
        ConfigError: one is unknown, or refused.
    """
    for name, value in values.items():
        path = f"{section}.{name}" if section else str(name)
        row = find(path)
        if row is None:
            if is_section(path):
                if not isinstance(value, Mapping | None):
                    raise ConfigError(f"{path}: expected a section, {{...}}, but got {value!r}; put its keys into one")
                yield from _lines(value or {}, path)
                continue
            known = names_in(section)
            raise ConfigError(
                f"config key {path!r}: unknown{did_you_mean(str(name), known)}; remove it, or see docs/deepspeed.md "
                "for the keys that are known"
            )
        asks, text = row.asks(value), _shown(value)
        if row.does is Does.REFUSED and asks:
            raise ConfigError(f"{path}: expected it to be off but got {text}, which is not done here; {row.here}")
        off = not asks and row.does in (Does.REFUSED, Does.LEFT_OUT)
        yield Line(path, text, Does.NEEDLESS if off else row.does, "off" if off else row.here)


def _shown(value: Any) -> str:
    text = json.dumps(value, default=str)
    return text if len(text) <= 24 else f"{text[:21]}..."


# --- "auto" -----------------------------------------------------------------------------------------------------------


def _total_steps(args: Any) -> int | None:
    steps = getattr(args, "max_steps", None)
    return steps if isinstance(steps, int) and steps > 0 else None


def _warmup_steps(args: Any) -> int | None:
    """Return the steps of the rise as transformers counts them: from 1 on they are steps, below a share of all."""
    steps, total = getattr(args, "warmup_steps", None), _total_steps(args)
    if steps is not None and steps >= 1:
        return int(steps)  # transformers 5 has a float
    share = getattr(args, "warmup_ratio", None) or steps
    if share == 0:
        return 0
    return None if total is None or share is None else -int(-total * share // 1)


def _train_batch(args: Any) -> int | None:
    """Return the samples of one process."""
    parts = [getattr(args, name, None) for name in ("per_device_train_batch_size", "gradient_accumulation_steps")]
    return parts[0] * parts[1] if None not in parts else None  # type: ignore[operator]


def _named_arg(name: str) -> Callable[[Any], Any]:
    return lambda args: getattr(args, name, None)


def _betas(args: Any) -> list[float] | None:
    found = [getattr(args, name, None) for name in ("adam_beta1", "adam_beta2")]
    return None if None in found else found  # type: ignore[return-value]


# Keys that Hugging Face fills where their value is "auto", and from which of its arguments.
FILLED: Mapping[str, Callable[[Any], Any]] = {
    "train_batch_size": _train_batch,
    "train_micro_batch_size_per_gpu": _named_arg("per_device_train_batch_size"),
    "gradient_accumulation_steps": _named_arg("gradient_accumulation_steps"),
    "gradient_clipping": _named_arg("max_grad_norm"),
    "optimizer.params.lr": _named_arg("learning_rate"),
    "optimizer.params.betas": _betas,
    "optimizer.params.eps": _named_arg("adam_epsilon"),
    "optimizer.params.weight_decay": _named_arg("weight_decay"),
    "scheduler.params.warmup_min_lr": lambda args: 0 if hasattr(args, "learning_rate") else None,
    "scheduler.params.warmup_max_lr": _named_arg("learning_rate"),
    "scheduler.params.warmup_num_steps": _warmup_steps,
    "scheduler.params.total_num_steps": _total_steps,
    "bf16.enabled": _named_arg("bf16"),
    "fp16.enabled": _named_arg("fp16"),
}


def _fill(values: dict[str, Any], args: Any, world: int, section: str = "") -> None:
    """Replace ``"auto"`` by what the arguments say, where the key means something here.

    Raises:
        ConfigError: they say nothing.
    """
    for name, value in values.items():
        path = f"{section}.{name}" if section else str(name)
        if isinstance(value, dict):
            if path != OWN_SECTION:  # "auto" is a value of its options
                _fill(value, args, world, path)
        elif value == AUTO:
            row = find(path)
            if row is not None and (row.does is not Does.MAPPED or not row.asks(value)):
                continue
            filled = FILLED[path](args) if path in FILLED else None
            if filled is None:
                value = "true or false" if name == "enabled" else "a value"
                why = "outside of Hugging Face's Trainer nobody fills it" if args is None else "args= does not say it"
                raise ConfigError(
                    f'{path}: expected {value} but got "auto", and {why}; write {value} into the configuration, or '
                    "pass args= with the names of Hugging Face's TrainingArguments (a schedule needs max_steps)"
                )
            values[name] = filled * world if path == "train_batch_size" else filled


# --- what is mapped ---------------------------------------------------------------------------------------------------


def _number(values: Mapping[str, Any], name: str, section: str = "") -> float:
    value = values[name]
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise ConfigError(f"{section}{name}: expected a number but got {value!r}")
    return value


def _whole_steps(every: float) -> int:
    """Return a number of steps; scripts write a very large one to have no line."""
    return int(min(max(1, every), _FOREVER))


def _batch(values: Mapping[str, Any], world: int) -> Batch:
    """Return the batch sizes, those that are not given from the others.

    Raises:
        ConfigError: they contradict each other, or none is given.
    """
    names = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    train, micro, steps = (values.get(name) for name in names)
    for name, value in zip(names, (train, micro, steps), strict=True):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise ConfigError(f"{name}: expected a whole number of at least 1 but got {value!r}")
    if train is None and micro is None:
        raise ConfigError(f"config: expected {names[0]} or {names[1]} but got neither; give one")
    if micro is None:
        assert train is not None
        micro = train // (world * (steps or 1))
    if steps is None:
        steps = 1 if train is None else train // max(micro * world, 1)
    if train is None:
        train = micro * steps * world
    if train != micro * steps * world or train == 0:
        raise ConfigError(
            f"train_batch_size: expected train_micro_batch_size_per_gpu * gradient_accumulation_steps * {world} "
            f"process{'es' if world > 1 else ''} but got {train} != {micro} * {steps} * {world}; each process does its "
            "part of what several GPUs did, so accumulate more or less, or leave train_batch_size out"
        )
    return Batch(train, micro, steps, world)


def _tiers(values: Mapping[str, Any]) -> dict[str, Any]:
    zero = _section(values, "zero_optimization")
    options: dict[str, Any] = {}
    paths: list[str] = []
    for kind, old in (("param", ("cpu_offload_param", "cpu_offload_params")), ("optimizer", ("cpu_offload",))):
        path = f"zero_optimization.offload_{kind}"
        section = _section(values, path)
        device = section.get("device") or "none"
        if device == "none" and any(zero.get(name) for name in old):
            device = "cpu"
        if device not in ("none", "cpu", "nvme"):
            raise ConfigError(
                f"{path}.device: expected none, cpu or nvme but got {device!r}"
                f"{did_you_mean(str(device), ('none', 'cpu', 'nvme'))}"
            )
        options[f"offload_{kind}"] = "auto" if device == "none" else device
        if device == "nvme":
            if not section.get("nvme_path"):
                raise ConfigError(f"{path}.nvme_path: expected a directory on the drive but got none; name one")
            paths.append(os.fspath(section["nvme_path"]))
    if paths:
        options["nvme_path"] = paths[0] if len(set(paths)) == 1 else paths
    return options


def _dtype(values: Mapping[str, Any]) -> dict[str, Any]:
    on = [name for name in ("bf16", "fp16") if _section(values, name).get("enabled")]
    if len(on) == 2:
        raise ConfigError("bf16.enabled: expected one of bf16 and fp16 but got both; disable one")
    wanted = _section(values, "data_types").get("param_dtype")
    if wanted not in (None, on[0] if on else "fp32"):
        raise ConfigError(
            f"data_types.param_dtype: expected {on[0] if on else 'fp32'}, as bf16 and fp16 say, but got {wanted!r}; "
            "leave it out"
        )
    return {"dtype": {"bf16": "bfloat16", "fp16": "float16"}[on[0]]} if on else {}


def _loss_scale(fp16: Mapping[str, Any]) -> dict[str, Any]:
    static = _number(fp16, "loss_scale", "fp16.") if fp16.get("loss_scale") else 0
    if static:  # it does not grow, and cannot become smaller
        return {
            "initial_loss_scale": float(static),
            "min_loss_scale": float(static),
            "loss_scale_window": _FOREVER,
        }
    found: dict[str, Any] = (
        {"initial_loss_scale": 2.0 ** _number(fp16, "initial_scale_power", "fp16.")}
        if ("initial_scale_power" in fp16)
        else {}
    )
    for name, option in (
        ("loss_scale_window", "loss_scale_window"),
        ("hysteresis", "loss_scale_hysteresis"),
        ("min_loss_scale", "min_loss_scale"),
    ):
        if name in fp16:
            found[option] = fp16[name]
    return found


def _named(values: Mapping[str, Any], path: str) -> Named | None:
    section = _section(values, path)
    if section.get("type") is None:
        return None
    if not isinstance(section["type"], str):
        raise ConfigError(f"{path}.type: expected a name but got {section['type']!r}")
    return Named(section["type"], _section(values, f"{path}.params"))
