"""Options of the engine: one frozen value, validated once.

Owns the spelling of every option, and its defaults. Knows nothing of torch or of hardware: percentages and missing
budgets are resolved against the machine in :mod:`offload.memory.limits`. Options of an optimizer are in
:mod:`offload.kernels.optimizers`. Next: :mod:`offload.build`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

from offload.errors import ConfigError, did_you_mean
from offload.sizes import PAGE_BYTES, Share, parse_bytes

OffloadTier = Literal["auto", "none", "cpu", "nvme"]
DtypeName = Literal["bfloat16", "float16", "float32"]
StateDtype = Literal["float32", "bfloat16", "int8"]
Reduction = Literal["mean", "sum"]
ActivationMode = Literal["auto", "keep", "offload", "recompute"]
ByteOption = Literal["activation_memory", "activation_cpu_memory", "activation_nvme_memory", "unit_bytes"]
Paths = str | Path | Sequence[str | Path]

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


def tier_named(key: object) -> str | None:
    """Return the name of the tier that a key of `max_memory` means, None where it means none."""
    return _TIER_ALIASES.get(key)


@dataclasses.dataclass(frozen=True, slots=True)
class Config:
    """All options of :class:`offload.Engine`.

    Attributes:
        device: torch device or its name: the CPU, CUDA or another accelerator of torch; None takes ``"cuda"`` where
            there is one, else ``"cpu"``.
        max_memory: budget per tier, keys ``"device"`` (or 0), ``"cpu"``, ``"nvme"`` (or ``"disk"``); bytes as int or
            text, or a percentage of what is free. A missing tier gets what is free less head-room. Several ranks of a
            machine have a part each of what it has free. ``nvme`` needs `nvme_path`, unless it is 0.
        nvme_path: directory, or several, for the swap files. None: the NVMe tier is not used.
        run_dir: directory, or several, for the swap files of a durable run, in the place of `nvme_path`; made where it
            is missing. Parameters and states live there, and each step is committed: whatever ends the process, an
            engine with the same `run_dir` goes on from the last commit, with the same bits. It loses at most the step
            in progress and the one still being finished. If a schedule of torch is made and its state loaded before the
            first step, the run's learning rates stay. Each of several ranks has a folder of its own in it. None:
            nothing survives the process but checkpoints.
        resume: ``"auto"`` goes on with the newest of `run_dir` and `checkpoint_dir`, or begins where there is nothing;
            True wants something there; False wants nothing there. A damaged checkpoint is left out with a warning.
        checkpoint_dir: directory of checkpoints that `resume` looks at, too; a durable run's only.
        background_checkpoints: keep room on NVMe for ``engine.save_checkpoint(wait=False)``: once more what training
            writes there. What is copied stays as it was while training goes on.
        dtype: cast parameters to ``"bfloat16"``, ``"float16"`` or ``"float32"``; None keeps the model's. The master
            weights keep full precision. Buffers keep their dtype, for running statistics and rotary frequencies lose
            too much; where a module wants them like its parameters (BatchNorm does), cast them first:
            ``buffer.data = buffer.data.bfloat16()``.
        state_dtype: how the moments of Adam and AdamW are stored, wherever they live. ``"float32"`` is exact. The
            others are lossy, rounded stochastically so that nothing stalls, and results stay the same bits for every
            placement: take ``"bfloat16"`` (4 bytes per parameter for both moments instead of 8) where states on NVMe
            set the pace, and ``"int8"`` (8-bit floating point in blocks of 128 elements, 2.02 bytes) where the drive
            or its wear still does, after comparing the loss of a short run with that of ``"float32"``.
        offload_param: home of parameters: ``"none"`` (the device), ``"cpu"`` or ``"nvme"``; ``"auto"`` lets the plan
            choose.
        offload_optimizer: the same of optimizer states. What is forced is placed first: states forced to ``"cpu"`` may
            leave so little of it that gradients and parameters go to the drive, which moves more than ``"auto"``; the
            plan says how much.
        max_grad_norm: clip the global gradient norm to this value; None does not clip. As with
            ``clip_grad_norm_(model.parameters())``, parameters that the optimizer leaves out count if they got a
            gradient (their gradients are dropped at every step, as with ``model.zero_grad()``).
        gradient_accumulation_steps: micro-batches per optimizer step. Their gradients are added in fp32.
        gradient_reduction: ``"mean"`` divides the sum by `gradient_accumulation_steps`: do not divide the loss.
            ``"sum"`` only adds: for trainers (of Hugging Face, Lightning, Accelerate) that divide the loss themselves.
            The number of micro-batches then only tells the plan to keep room for fp32. None is ``"mean"``, but a step
            that leaves open who divides is refused: one by ``optimizer.step()`` after ``loss.backward()``.
        activation_memory: part of the device budget kept for activations and temporaries, bytes as int or text; None:
            half of it, less where the parameters need the room.
        activations: what becomes of what autograd keeps between forward and backward. ``"keep"`` leaves it on the
            device. ``"offload"`` moves it to host memory, and from there to NVMe, and brings it back in time.
            ``"recompute"`` computes blocks that repeat again in backward, or asks a model of transformers to do so.
            ``"auto"`` leaves on the device what fits. If not all fits, the second micro-batch tells which of the two is
            faster. The bits are the same.
        activation_cpu_memory: part of the host budget for activations that leave the device, bytes as int or text;
            None: a quarter of it. What does not fit stays on the device.
        activation_nvme_memory: part of the NVMe budget for those that do not fit there, bytes as int or text; None:
            four times the part in host memory, a quarter of the budget at most. No commit of a durable run has any.
        unit_bytes: split modules whose parameters are larger than this, bytes as int or text; None chooses from the
            budget.
        chunk_numel: elements per optimizer chunk; None chooses from the budget.
        threads: threads of the CPU's kernels, which all engines of a process share: of several that name a number, the
            last one decides until it is closed. None takes one per core, or what another engine has named.
        prefetch: fetch the next units while one computes.
        io_deadline_s: seconds after which a wait for a transfer is given up with an error.
        initial_loss_scale: of float16: what the loss is multiplied by at first.
        loss_scale_window: steps without an overflow after which the scale doubles.
        loss_scale_hysteresis: overflows after which it halves.
        min_loss_scale: it falls no further.
        log_every: a line of ``logging`` at INFO every so many steps, with the milliseconds of forward, backward,
            updates and waits, and the bytes and milliseconds of each link; None logs none.
        visible: let ``python -m offload top`` show this engine: once a second, while it computes, it writes how it is
            to a file of 2 KiB in the user's cache folder, and it removes that file when it is closed.
        init_weights: callable initialising a module whose parameters are on the meta device, given that module;
            None uses the model's own ``_init_weights`` or ``reset_parameters``.
    """

    device: Any = None
    max_memory: Mapping[Any, int | str] | None = None
    nvme_path: Paths | None = None
    run_dir: Paths | None = None
    resume: bool | Literal["auto"] = "auto"
    checkpoint_dir: str | Path | None = None
    background_checkpoints: bool = False
    dtype: DtypeName | None = None
    state_dtype: StateDtype = "float32"
    offload_param: OffloadTier = "auto"
    offload_optimizer: OffloadTier = "auto"
    max_grad_norm: float | None = None
    gradient_accumulation_steps: int = 1
    gradient_reduction: Reduction | None = None
    activation_memory: int | str | None = None
    activations: ActivationMode = "keep"
    activation_cpu_memory: int | str | None = None
    activation_nvme_memory: int | str | None = None
    unit_bytes: int | str | None = None
    chunk_numel: int | None = None
    threads: int | None = None
    prefetch: bool = True
    io_deadline_s: float = 60.0
    initial_loss_scale: float = 65536.0
    loss_scale_window: int = 1000
    loss_scale_hysteresis: int = 2
    min_loss_scale: float = 1.0
    log_every: int | None = None
    visible: bool = True
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
            if tier == "nvme" and self.nvme_path is None and self.run_dir is None:
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
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
            if not absent and not (is_number and value > 0):
                raise ConfigError(f"{option}: expected a number > 0 but got {value!r}")
            if option.endswith("loss_scale") and math.isinf(value):  # half of it is as much, and all is lost
                raise ConfigError(f"{option}: expected a finite number > 0 but got {value!r}")
        for option in ("background_checkpoints", "prefetch", "visible"):
            if not isinstance(getattr(self, option), bool):
                raise ConfigError(f"{option}: expected True or False but got {getattr(self, option)!r}")
        for option in ("chunk_numel", "threads", "loss_scale_window", "loss_scale_hysteresis", "log_every"):
            value = getattr(self, option)
            absent = value is None and option in ("chunk_numel", "threads", "log_every")
            if not absent and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
                raise ConfigError(f"{option}: expected a whole number >= 1 but got {value!r}")
        if self.max_memory is not None and not isinstance(self.max_memory, Mapping):
            raise ConfigError(
                f'max_memory: expected a mapping like {{"device": "8GiB", "cpu": "16GiB"}} but got {self.max_memory!r}'
            )
        for option in ("nvme_path", "run_dir"):
            given = getattr(self, option)
            paths = (given,) if isinstance(given, (str, Path)) else given or ()
            if not isinstance(paths, Sequence) or not all(isinstance(p, (str, Path)) and str(p) for p in paths):
                raise ConfigError(f"{option}: expected a directory or several but got {given!r}")
        self._check_run()
        if self.budgets().get("nvme") and not self.paths():
            raise ConfigError(
                'max_memory["nvme"]: a budget without a drive; name a directory on it with nvme_path or run_dir'
            )
        for name in get_args(ByteOption):
            self.bytes_of(name)
        self._check_activations()

    def _check_activations(self) -> None:
        modes = get_args(ActivationMode)
        if self.activations not in modes:
            raise ConfigError(
                f"activations: expected one of {', '.join(modes)} but got {self.activations!r}"
                f"{did_you_mean(str(self.activations), modes)}"
            )
        for option in ("activation_cpu_memory", "activation_nvme_memory"):
            if getattr(self, option) is not None and self.activations not in ("offload", "auto"):
                raise ConfigError(
                    f'{option}: expected activations="offload" or "auto" beside it but got {self.activations!r}'
                )
        part = self.bytes_of("activation_memory")
        if part is not None and part < PAGE_BYTES and self.activations in ("offload", "auto"):
            raise ConfigError(
                f'activation_memory: expected at least {PAGE_BYTES} bytes beside activations="{self.activations}", for '
                f"what leaves and comes back passes there, but got {self.activation_memory!r}; leave it out"
            )
        if self.bytes_of("activation_nvme_memory") and not self.paths():
            raise ConfigError("activation_nvme_memory: nvme_path is missing; name a directory on the drive")

    def _check_run(self) -> None:
        if not isinstance(self.resume, bool) and self.resume != "auto":  # 1 == True, and is none
            raise ConfigError(f'resume: expected True, False or "auto" but got {self.resume!r}')
        if self.checkpoint_dir is not None and not isinstance(self.checkpoint_dir, (str, Path)):
            raise ConfigError(f"checkpoint_dir: expected a directory but got {self.checkpoint_dir!r}")
        if self.run_dir is None:
            for option, default in (("resume", "auto"), ("checkpoint_dir", None)):
                if getattr(self, option) != default:
                    raise ConfigError(
                        f"{option}: expected run_dir beside it but got none; name the directory of the run, or call "
                        "engine.load_checkpoint"
                    )
            return
        if not isinstance(self.run_dir, (str, Path)) and not self.run_dir:
            raise ConfigError(f"run_dir: expected a directory or several but got {self.run_dir!r}")
        if self.nvme_path is not None:
            raise ConfigError("nvme_path: a durable run has its swap files in run_dir; leave nvme_path out")
        for option in ("offload_param", "offload_optimizer"):
            tier = getattr(self, option)
            if tier not in ("auto", "nvme"):
                raise ConfigError(
                    f"{option}: expected a home on the drive, where a commit finds it, but got {tier!r}; leave it out "
                    "for a durable run, or leave run_dir out and save checkpoints"
                )

    def budgets(self) -> dict[str, int | Share]:
        """Return the budgets that were given, by canonical tier name (``device``, ``cpu``, ``nvme``)."""
        budgets: dict[str, int | Share] = {}
        for key, value in (self.max_memory or {}).items():
            name = tier_named(key)
            if name is None:
                raise ConfigError(
                    f"max_memory: expected keys device, cpu, nvme but got {key!r}{did_you_mean(str(key), TIER_NAMES)}"
                )
            if name in budgets:
                raise ConfigError(f"max_memory: {name!r} is given twice (as {key!r} and under another name)")
            budgets[name] = parse_bytes(value, subject=f"max_memory[{key!r}]")
        return budgets

    def bytes_of(self, option: ByteOption) -> int | None:
        """Return a byte option as a number, or None where it was not given.

        Raises:
            ConfigError: it is a percentage or not a byte count.
        """
        value = getattr(self, option)
        if value is None:
            return None
        size = parse_bytes(value, subject=option, shares=False)
        if isinstance(size, Share):
            raise ConfigError(f"{option}: expected bytes but got {value!r}")
        return size

    def paths(self) -> tuple[Path, ...]:
        """Return the NVMe directories: those of a durable run where there is one."""
        given = self.nvme_path if self.run_dir is None else self.run_dir
        if given is None:
            return ()
        return (Path(given),) if isinstance(given, (str, Path)) else tuple(Path(path) for path in given)

    def absolute(self) -> Config:
        """Return the same options, whose NVMe directories stay where they are if the working directory changes."""
        paths = [str(path.absolute()) for path in self.paths()]
        given: Paths | None = (paths[0] if len(paths) == 1 else paths) if paths else None
        if self.run_dir is None:
            return dataclasses.replace(self, nvme_path=given)
        return dataclasses.replace(self, run_dir=given)

    @classmethod
    def load(cls, source: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None, **options: Any) -> Config:
        """Make a Config from another one, a dict or a JSON file, with keyword options on top.

        Raises:
            ConfigError: an option is unknown (with a suggestion) or invalid, or the file is not a JSON object.
        """
        values = {**values_of(source), **options}
        known = [field.name for field in dataclasses.fields(cls)]
        for name in values:
            if name not in known:
                raise ConfigError(
                    f"unknown option {name!r}{did_you_mean(str(name), known)}; options: {', '.join(known)}"
                )
        return cls(**values)


def values_of(source: Config | Mapping[str, Any] | str | os.PathLike[str] | None) -> dict[str, Any]:
    """Return the options that a config, a mapping or a JSON file names.

    Raises:
        ConfigError: it is none of these, or the file is not a JSON object.
    """
    if source is None:
        return {}
    if isinstance(source, Config):
        return {field.name: getattr(source, field.name) for field in dataclasses.fields(source)}
    if isinstance(source, Mapping):
        return dict(source)
    if not isinstance(source, (str, os.PathLike)):
        raise ConfigError(
            f"config: expected options, a Config or a JSON file but got a {type(source).__name__}; pass one of them"
        )
    try:
        values = json.loads(Path(source).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"config file {os.fspath(source)}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"config file {os.fspath(source)}: expected a JSON object at the top")
    return values
