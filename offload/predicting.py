"""Will it fit, how long will a step take, and what would help? The question, for models and machines that are not here.

Owns :func:`plan`. The homes are those that an engine would choose. Next: :mod:`offload.forecast` is the answer,
:mod:`offload.planning.work` tells what a batch takes, :mod:`offload.trials` tries what would make it fit.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import numbers
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.activations.ledger import with_margin
from offload.activations.tiling import with_tiles
from offload.classes import is_a
from offload.config import Config, tier_named, values_of
from offload.errors import BudgetError, ConfigError
from offload.forecast import NEAR, Clipping, Forecast, given_way, missing_bytes, room_bytes
from offload.kernels import cpu_adam
from offload.kernels.optimizers import AdamW
from offload.memory.budget import Tier
from offload.memory.devices import is_host, open_device
from offload.memory.limits import DEVICE_HEADROOM, HOST_HEADROOM, resolve_budgets
from offload.memory.machine import free_bytes
from offload.meta_models import made_on_meta, names_dtype, positions_of, shortened
from offload.module.quantized import ready_meanwhile
from offload.module.refusals import refuse_model
from offload.optim.rules import Rule, rule_of
from offload.optimizer import refuse_spec
from offload.planning.asked import Request
from offload.planning.choosing import AUTO, KEEP, choose
from offload.planning.hardware import Hardware
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.planner import is_possible, make_plan
from offload.planning.shared import lanes_of
from offload.planning.timing import Timing, timing_of
from offload.planning.work import Work, is_ids
from offload.rehearsing import Case, Rehearsals
from offload.remedies import Change, remedies_of
from offload.request import request_of, unit_bytes_of, units_of, updates_on
from offload.several import refuse_options, stage_alone
from offload.sizes import Share, format_bytes, parse_bytes
from offload.spec import OptimizerSpec
from offload.trials import Trials

logger = logging.getLogger(__name__)

HERE = "here"
_MORE = 1.5
_MOST_MICRO_BATCHES = 100_000  # of a step: some seconds
_WORTH = 0.98  # of the seconds: what saves less is not told


@torch.inference_mode(False)  # or a model that is made here, or backward, would be one of inference
def plan(
    model: nn.Module | str | os.PathLike[str] | Any,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None = None,
    *,
    batch: tuple[int, int] | Mapping[str, Any] | Sequence[Any] | None = None,
    hardware: Hardware | str | os.PathLike[str] | None = None,
    checkpointing: bool | None = None,
    chunk_loss: bool = False,
    ranks: int = 1,
    stage: int | str = "auto",
    measure_again: bool = False,
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None = None,
    **options: Any,
) -> Forecast:
    """Tell where an engine would put everything, and what a step would take. Nothing is loaded or moved.

    Args:
        model: a module, which is not changed, on the meta device, too; a config of transformers; a folder with
            ``config.json``; or the name of a known model, such as ``"llama-3.1-70b"``.
        optimizer: as in :class:`offload.Engine`; None is ``AdamW``.
        batch: of one micro-batch: (rows, length) of token ids, also in a list, for a language model; else what its
            forward takes, as a mapping or a sequence. None: bytes without seconds.
        hardware: the machine: a preset (``"rtx4090"``, ``"h200"``, ...), a JSON file with the attributes of
            :class:`offload.planning.hardware.Hardware`, or such a value. Its budgets are shares of its memory where
            `max_memory` does not say, and none of NVMe. ``"here"``: this machine, measured once: the operators of the
            model run one by one on the device, and updates, copies and drives (a file in ``nvme_path``) for a few
            seconds. None: the memory of this machine, and no seconds.
        checkpointing: of activations, where the model is made here; beside a module, it is refused. None does so unless
            the model cannot, or `activations` is among the options: what these move, or compute again, is counted.
        chunk_loss: of a language model that is made here, by :func:`offload.ops.chunk_loss`; likewise.
        ranks: that train together on one machine, each with a device: the plan is that of the first one, and budgets
            are each rank's own. There are seconds per lane then; of a step, those that it takes at least.
        stage: of several ranks, as in :class:`offload.Engine`.
        measure_again: forget what was measured of this machine.
        config: options as in :class:`offload.Engine`.
        **options: options of :class:`offload.Config`. A budget of NVMe needs no path.

    Returns:
        The forecast.

    Raises:
        ConfigError: an option, the machine or the batch makes no sense, or shapes cannot be known; names it. Or
            transformers is needed and not installed, or this machine cannot be measured.
        StateError: somebody else calls, moves or reduces what an engine would.
        BudgetError: the model cannot be trained within the budgets; names the smallest that would do.
    """
    _check_ranks(ranks, stage, hardware)
    if measure_again and (hardware != HERE or batch is None):
        raise ConfigError(
            'measure_again: expected hardware="here" and a batch beside it, for which it is measured; name both'
        )
    if isinstance(batch, Sequence) and not isinstance(batch, str) and all(map(_is_size, batch)):
        batch = tuple(map(int, batch))
    here = hardware is None or hardware == HERE
    machine = None if here else hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)  # type: ignore[arg-type]
    options = _without_path(config, options)
    asked = Config.load(config, **options)
    if machine is not None and asked.device is not None and is_host(asked.device):
        raise ConfigError(
            f"device: expected an accelerator beside hardware {machine.name}, which has one, but got "
            f'{str(asked.device)!r}; leave device out, or pass hardware="{HERE}"'
        )
    if batch is not None and hardware is not None and not asked.prefetch:
        raise ConfigError(
            "prefetch: expected True beside a machine and a batch, for seconds are those of fetching ahead, but got "
            "False; leave it out, or leave hardware out to have bytes"
        )
    if batch is not None and asked.gradient_accumulation_steps > _MOST_MICRO_BATCHES:
        raise ConfigError(
            f"gradient_accumulation_steps: expected at most {_MOST_MICRO_BATCHES} beside a batch, whose passes are "
            f"counted one by one, but got {asked.gradient_accumulation_steps}; pass fewer, which take as long each"
        )
    if isinstance(model, nn.Module):
        _check_module_options(checkpointing, chunk_loss)
    else:
        logger.info("making the model without its weights")
    wanted = checkpointing
    if checkpointing is None:
        checkpointing = not _names_activations(config, options, asked)

    def make(chunked: bool, again: bool) -> nn.Module:
        return made_on_meta(model, checkpointing=again, chunked=chunked)

    module = model if isinstance(model, nn.Module) else make(chunk_loss, checkpointing)
    may_checkpoint = module is not model and bool(module.supports_gradient_checkpointing)
    if wanted and not may_checkpoint:
        raise ConfigError(
            f"checkpointing: expected a model that computes activations again by itself but {type(module).__name__} of "
            'transformers does not; leave it out, or pass activations="recompute"'
        )
    checkpointing = checkpointing and may_checkpoint
    if module is not model and asked.dtype is None and not names_dtype(model):
        logger.warning(
            "model: its config names no dtype, so the plan is for bfloat16; if the weights have another one, add it to "
            'the config, such as "dtype": "float32"'
        )
    refuse_model(module)
    cast = getattr(torch, asked.dtype) if asked.dtype else None
    spec = AdamW(lr=1e-4) if optimizer is None else optimizer
    rule = rule_of(spec, cast)
    if optimizer is not None:  # else it may be a plan to evaluate
        refuse_spec(spec, list(module.parameters()))
    _check_length(module, batch)
    refuse_options(ranks, spec, rule)
    with ready_meanwhile(module, cast):
        logger.info("placing parameters, gradients and states")
        planner = functools.partial(_planned, here=here, ranks=ranks, stage=stage)
        found, tree = planner(module, asked, rule, _budgets(asked, machine, ranks), tiles=ranks == 1)
        if batch is None:
            return Forecast(found, machine, None, None, None, {})
        logger.info("running a micro-batch on shapes alone")
        rehearsals = Rehearsals(cast)
        cases = rehearsals.cases(module, batch, found, tree)
        if hardware == HERE:
            logger.info("measuring this machine, as far as it is not known yet")
            machine, cases = _measured(asked, spec, cases, again=measure_again)
        tokens = _tokens(batch, asked)
        mode, (found, work), timing = _chosen(cases, machine, asked)
        remedies: tuple[str, ...] = ()
        if missing_bytes(found, work):
            logger.info("looking for what would make the batch fit")
            made_here = module is not model

            @functools.cache
            def pair(chunked: bool, again: bool) -> tuple[nn.Module, nn.Module]:
                same = (chunked, again) == (chunk_loss, checkpointing)
                return shortened(make(chunked, again)), module if same else make(chunked, again)

            def made(change: Change) -> tuple[nn.Module | None, nn.Module]:
                options = chunk_loss or change.chunk_loss, checkpointing or change.checkpointing
                return pair(*options) if made_here else (None, module)

            def replanned(changed: Config, budgets: Mapping[Tier, int]) -> Plan:
                return planner(module, changed, rule, budgets)[0]

            trials = Trials(asked, found, replanned, made, rehearsals)
            remedies = tuple(
                remedies_of(
                    trials.fits,
                    Change("", asked, found.request.budgets, batch),
                    work,
                    room_bytes(found),
                    may_chunk=made_here and not chunk_loss,
                    may_checkpoint=may_checkpoint and not checkpointing,
                    checkpointing=checkpointing,
                )
            )
        if machine is None or timing is None:
            return Forecast(found, None, work, None, tokens, {}, remedies=remedies)
        if ranks > 1:
            lanes = lanes_of(found, work, machine)
            return Forecast(found, machine, work, None, tokens, {}, remedies=remedies, lanes=lanes)
        logger.info("looking for what would make a step shorter")

        def planned(budgets: Mapping[Tier, int], **options: Any) -> Case:
            other, cut = planner(module, dataclasses.replace(asked, **options), rule, budgets)
            return rehearsals.case(module, batch, other, mode, cut, work if cut.units == tree.units else None)

        savings = dict(_savings(planned, asked, machine, (found, work), timing.step_s))
        clipping = _clipping(planned, asked, machine, (found, work), timing.step_s)
        return Forecast(found, machine, work, timing, tokens, savings, clipping, remedies)


def _check_module_options(checkpointing: bool | None, chunk_loss: bool) -> None:
    kept = "expected a model that is made here beside it but got a module, which stays as it is"
    if checkpointing is not None:
        raise ConfigError(
            f"checkpointing: {kept}; turn it on or off in the module, as model.gradient_checkpointing_enable() of "
            "transformers does"
        )
    if chunk_loss:
        raise ConfigError(f"chunk_loss: {kept}; call offload.ops.chunk_loss(model) before")


def _check_length(module: nn.Module, batch: Any) -> None:
    """Refuse sequences that end in an error when they are run: on shapes, nobody sees that a table is too short."""
    model: Any = module
    if is_a(module, "peft", "PeftModel"):
        model = model.get_base_model()
    if not is_ids(batch) or not is_a(model, "transformers", "PreTrainedModel"):
        return
    length, positions = max(batch[1:], default=0), positions_of(model)
    if positions is not None and length > positions:
        raise ConfigError(
            f"batch: expected sequences of at most {positions} tokens, the model's positions, but got {length}; take "
            "shorter ones"
        )


def _is_size(value: object) -> bool:
    return isinstance(value, numbers.Integral) and not isinstance(value, bool)  # of numpy, too


def _names_activations(config: Any, options: Mapping[str, Any], asked: Config) -> bool:
    given = {} if isinstance(config, Config) else values_of(config)
    return "activations" in options or "activations" in given or asked.activations != KEEP


def _chosen(cases: Mapping[str, Case], machine: Hardware | None, asked: Config) -> tuple[str, Case, Timing | None]:
    """Return the mode of activations, its case and its seconds, if the speed of the machine is known.

    If ``"auto"`` has to choose, that is the faster one. Its first steps let activations leave: they have to fit then.
    """
    first = next(iter(cases))
    if asked.activations != AUTO or missing_bytes(*cases[first]):
        return first, cases[first], None if machine is None else _timed(*cases[first], machine, asked)
    if machine is None:
        found, work = cases[first]
        choice = choose({})[1] if first == KEEP else ""  # else nobody can choose yet
        return first, (dataclasses.replace(found, choice=choice), work), None
    fitting = {mode: case for mode, case in cases.items() if not missing_bytes(*case)}
    timings = {mode: _timed(*case, machine, asked) for mode, case in fitting.items()}
    seconds = {} if first == KEEP else {mode: timing.step_s for mode, timing in timings.items()}
    mode, choice = choose(seconds, fits=len(fitting) == len(cases))
    found, work = cases[mode]
    return mode, (dataclasses.replace(found, choice=choice), work), timings[mode]


def _without_path(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Give options a path, which nobody opens, where the drive is of another machine."""
    said = {**values_of(config), **options}
    memory = said.get("max_memory")
    wants = isinstance(memory, Mapping) and any(tier_named(key) == "nvme" for key in memory)
    wants |= "nvme" in (said.get("offload_param"), said.get("offload_optimizer"))
    wants |= said.get("activation_nvme_memory") is not None
    named = said.get("nvme_path") or said.get("run_dir")
    return options if named or not wants else options | {"nvme_path": "."}


def _check_ranks(ranks: int, stage: int | str, hardware: object) -> None:
    if not isinstance(ranks, int) or isinstance(ranks, bool) or ranks < 1:
        raise ConfigError(f"ranks: expected a whole number >= 1 but got {ranks!r}")
    if stage not in (1, 2, 3, "auto") or isinstance(stage, bool):
        raise ConfigError(f'stage: expected 1, 2, 3 or "auto" but got {stage!r}')
    if ranks > 1 and hardware == HERE:
        raise ConfigError(
            'ranks: expected one with hardware="here", which measures one process, but got several; name '
            "another machine, or leave hardware out to have bytes"
        )


def _budgets(asked: Config, machine: Hardware | None, ranks: int) -> dict[Tier, int]:
    """Return the budgets of one rank; those that nobody has named are its part of the machine's."""
    given = asked.budgets()
    if machine is None:
        free = free_bytes(tuple(map(_existing, asked.paths())))
        part = None if free is None else free // ranks
        return resolve_budgets(given, open_device(asked.device), part, ranks=ranks)
    size = {Tier.DEVICE: machine.device_bytes, Tier.HOST: machine.host_bytes / ranks, Tier.NVME: 0}
    share = {Tier.DEVICE: DEVICE_HEADROOM, Tier.HOST: HOST_HEADROOM, Tier.NVME: 0}
    budgets = {}
    for tier in Tier:
        value = given.get(tier.value)
        if isinstance(value, Share) and tier is Tier.NVME:
            raise ConfigError('max_memory["nvme"]: expected bytes for a machine that is not here but got a percentage')
        fraction = value.fraction if isinstance(value, Share) else share[tier]
        budgets[tier] = value if isinstance(value, int) else int(size[tier] * fraction)
    return budgets


def _existing(path: Path) -> Path:
    """Return the directory in which an engine would make `path`, or that itself."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.exists())


def _measured(
    asked: Config, spec: OptimizerSpec | torch.optim.Optimizer, cases: Mapping[str, Case], *, again: bool
) -> tuple[Hardware, dict[str, Case]]:
    """Return this machine, and the cases with the seconds that their work takes here.

    Raises:
        ConfigError: it cannot be measured.
    """
    from offload.measuring import Here  # which imports all of an engine
    from swap import SwapError

    found = next(iter(cases.values()))[0]
    # The generator of the caller stays as it is, and gradients are computed wherever this is called.
    with torch.random.fork_rng(devices=[]), torch.enable_grad(), contextlib.ExitStack() as asking:
        if asked.threads is not None:
            asking.enter_context(contextlib.closing(cpu_adam.Threads(asked.threads)))
        try:
            known = asking.enter_context(Here(open_device(asked.device), again=again))
            machine = known.hardware(
                spec,
                state_dtype=asked.state_dtype,
                paths=tuple(map(_existing, asked.paths())) if found.arena_bytes[Tier.NVME] else (),
                chunk_numel=found.chunk_numel,
                streams_states=any(homes.states is Tier.NVME for homes in found.homes),
            )
            return machine, {mode: (plan, known.timed(work, machine)) for mode, (plan, work) in cases.items()}
        except (BudgetError, SwapError, torch.OutOfMemoryError) as error:  # of small models and files, not of this one
            raise ConfigError(
                f"hardware={HERE!r}: this machine could not be measured: {' '.join(str(error).split())}; mend that, or "
                "leave hardware out to have bytes"
            ) from error


def _planned(
    module: nn.Module,
    asked: Config,
    rule: Rule,
    budgets: Mapping[Tier, int],
    *,
    here: bool,
    ranks: int,
    stage: int | str,
    tiles: bool = False,
) -> tuple[Plan, UnitTree]:
    """Return the plan and its units; with `tiles`, an error names the size with which there would be a plan."""
    sliced = stage in (3, "auto")

    def cut(device_bytes: int) -> UnitTree:
        return units_of(module, asked, rule, unit_bytes_of(asked, device_bytes), ranks=ranks, slices_frozen=sliced)

    tree = cut(budgets[Tier.DEVICE])
    device = open_device(asked.device) if here else None
    host = device is not None and device.addressable
    there = ranks == 1 and updates_on(device, rule, asked, tree)

    def make(chosen: int) -> Plan:
        options: dict[str, Any] = {"device_is_host": host, "updates_on_device": there}
        options |= {"world_size": ranks, "stage": chosen}

        def request(with_budgets: Mapping[Tier, int], *, again: bool = False) -> Request:
            device_bytes = with_budgets[Tier.DEVICE]
            cut_so = tree if device_bytes == budgets[Tier.DEVICE] and not again else cut(device_bytes)
            return request_of(module, asked, rule, cut_so, with_budgets, **options)

        try:
            return make_plan(request(budgets), request)
        except BudgetError as error:
            tiled = module if tiles else None
            raise with_tiles(error, tiled, lambda: is_possible(request(budgets, again=True))) from None

    if ranks > 1 and stage == "auto":
        stage = stage_alone(make, device_is_host=host)
    return make(1 if stage == "auto" else int(stage)), tree


def _timed(found: Plan, work: Work, machine: Hardware, asked: Config) -> Timing:
    steps, found = asked.gradient_accumulation_steps, given_way(found, work)
    return timing_of(found, work, machine, micro_batches=steps, clips=asked.max_grad_norm is not None)


def _tokens(batch: Any, asked: Config) -> int | None:
    if not is_ids(batch):
        return None
    return int(batch[0]) * int(batch[1]) * asked.gradient_accumulation_steps


def _clipping(
    planned: Callable[[Mapping[Tier, int]], Case], asked: Config, machine: Hardware, case: Case, step_s: float
) -> Clipping | None:
    """Return what clipping takes, and the host budget that would help; `planned` has the plan for other budgets."""
    if asked.max_grad_norm is None:
        return None
    found, work = case
    calm = _timed(found, work, machine, dataclasses.replace(asked, max_grad_norm=None))
    budgets = dict(found.request.budgets)

    def is_near(host_mib: int) -> bool:
        try:
            other, computed = planned({**budgets, Tier.HOST: host_mib << 20})
        except BudgetError:  # larger units
            return False
        computed = dataclasses.replace(computed, measured_s=work.measured_s)
        return _timed(other, computed, machine, asked).step_s <= NEAR * calm.bound_s

    if step_s <= NEAR * calm.bound_s:
        return Clipping(calm.bound_s, budgets[Tier.HOST])
    low = budgets[Tier.HOST] >> 20  # whole MiB, so that what is told is what was tried
    high = low + 1 + (found.arena_bytes[Tier.NVME] >> 20)
    if not is_near(high):
        return Clipping(calm.bound_s, None)
    while high - low > max(high // 100, 1):
        middle = (low + high) // 2
        low, high = (low, middle) if is_near(middle) else (middle, high)
    return Clipping(calm.bound_s, high << 20)


def _savings(
    planned: Callable[..., Case], asked: Config, machine: Hardware, case: Case, step_s: float
) -> Iterator[tuple[str, float]]:
    """Yield what would make a step shorter, the best first; `planned` has the plan for other budgets and options."""
    found, work = case
    budgets = dict(found.request.budgets)
    seconds = {}
    enough = -(-with_margin(work.device_bytes) >> 20) << 20
    if not found.request.device_is_host and not found.near_bytes and enough < found.activation_bytes:
        with contextlib.suppress(BudgetError):
            other, computed = planned(budgets, activation_memory=enough)  # the rest of the device is for states
            computed = dataclasses.replace(computed, measured_s=work.measured_s)
            if not missing_bytes(other, computed):
                seconds[f"activation_memory = {format_bytes(enough)}"] = _timed(other, computed, machine, asked).step_s
    for tier in (Tier.DEVICE, Tier.HOST):
        said = format_bytes(budgets[tier] * _MORE)
        try:
            size = parse_bytes(said, subject=tier.value)  # as whoever follows it does
            assert isinstance(size, int)
            other, computed = planned({**budgets, tier: size})
        except (BudgetError, ConfigError):  # larger units, or more than any machine has
            continue
        computed = dataclasses.replace(computed, measured_s=work.measured_s)
        seconds[f'max_memory["{tier.value}"] = {said}'] = _timed(other, computed, machine, asked).step_s
    for lane, names in (
        ("a drive", ("drive_read_bytes_s", "drive_write_bytes_s", "drive_mixed_bytes_s")),
        ("a link to the host", ("h2d_bytes_s", "d2h_bytes_s")),
        ("host memory", ("update_bytes_s", "host_bytes_s")),
        ("a device", ("flops_16", "flops_32", "device_bytes_s")),
    ):
        try:
            faster = dataclasses.replace(machine, **{name: getattr(machine, name) * 2 for name in names})
        except ConfigError:  # no machine is
            continue
        there = work.twice_as_fast() if lane == "a device" else work
        seconds[f"{lane} of twice the speed"] = _timed(found, there, faster, asked).step_s
    yield from (
        (what, took) for what, took in sorted(seconds.items(), key=lambda item: item[1]) if took < step_s * _WORTH
    )
