"""Will it fit, how long will a step take, and what would help? For models and machines that are not here.

Owns the question (:func:`plan`) and the answer (:class:`Forecast`). The homes are those that an engine would choose.
Next: :mod:`offload.planning.timing` has the formula, :mod:`offload.planning.work` what a batch takes.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import nn

from offload.config import Config, tier_named
from offload.errors import BudgetError, ConfigError
from offload.kernels.optimizers import AdamW
from offload.measuring import Here
from offload.memory.budget import Tier
from offload.memory.devices import open_device
from offload.memory.limits import DEVICE_HEADROOM, HOST_HEADROOM, resolve_budgets
from offload.memory.machine import free_bytes
from offload.meta_models import made_on_meta
from offload.module.quantized import ready_meanwhile
from offload.optim.rules import Rule, rule_of
from offload.planning.choosing import AUTO, KEEP, choose
from offload.planning.hardware import Hardware
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.planner import make_plan
from offload.planning.shared import lanes_of
from offload.planning.timing import Timing, timing_of
from offload.planning.work import Work
from offload.rehearsing import Case, case_of, cases_of, held_bytes
from offload.remedies import Change, is_ids, remedies_of
from offload.request import request_of, unit_bytes_of, units_of
from offload.several import stage_alone
from offload.sizes import Share, figures, format_bytes
from offload.spec import OptimizerSpec

logger = logging.getLogger(__name__)

HERE = "here"
_MORE = 1.5
_WORTH = 0.98  # of the seconds: what saves less is not told
NEAR = 1.15  # of the bound without clipping, which a step that clips is to take


@dataclasses.dataclass(frozen=True, slots=True)
class Clipping:
    """What a step that clips takes more: its updates wait for the norm.

    Attributes:
        bound_s: of a step of the same plan that clips nothing.
        host_bytes: about the smallest host budget with which a step that clips takes :data:`NEAR` of it; the present
            one, if that is enough; None, if all that is on the drive would not be.
    """

    bound_s: float
    host_bytes: int | None


@dataclasses.dataclass(frozen=True, slots=True)
class Forecast:
    """What an engine would do. ``print(forecast)`` shows it.

    Attributes:
        plan: homes and bytes, as ``engine.plan``.
        hardware: the machine; None where nothing is known but its memory.
        work: of one micro-batch; None without a batch.
        timing: seconds of a step; None without either.
        tokens: of a step; None where the batch was given as tensors.
        savings: what would make a step shorter, with its seconds, the best first.
        clipping: what clipping takes; None where nothing clips, or there are no seconds.
        remedies: what would make the batch fit if it does not, each tried, the smallest change first.
        lanes: of one of several ranks, seconds that each lane takes alone; there is no `timing` then.
    """

    plan: Plan
    hardware: Hardware | None
    work: Work | None
    timing: Timing | None
    tokens: int | None
    savings: Mapping[str, float]
    clipping: Clipping | None = None
    remedies: tuple[str, ...] = ()
    lanes: Mapping[str, float] = dataclasses.field(default_factory=dict)

    @property
    def fits(self) -> bool:
        """Whether the activations of the batch fit what the plan leaves them, as far as it is known."""
        return self.missing_bytes == 0

    @property
    def missing_bytes(self) -> int:
        """Bytes that activations need on the device beyond what the plan leaves them."""
        return 0 if self.work is None else _missing_bytes(self.plan, self.work)

    @property
    def peak_bytes(self) -> dict[Tier, int]:
        """Bytes of each tier at once: those of the plan, and on the device the activations of a micro-batch."""
        plan, work = self.plan, self.work
        found = {tier: plan.arena_bytes[tier] + plan.wide_bytes.get(tier, 0) for tier in Tier}
        found[Tier.HOST] += plan.request.own_bytes
        if work is not None:
            found[Tier.DEVICE] += work.device_bytes
        return found

    def remedy(self) -> str:
        """Return what would make a batch fit."""
        ways = f"it fits with {', or with '.join(self.remedies)}" if self.remedies else "take shorter sequences"
        return f"device budget: {self._refusal()}; {ways}"

    def _refusal(self) -> str:
        need = 0 if self.work is None else self.work.device_bytes
        room = format_bytes(_room_bytes(self.plan))
        return f"activations need {format_bytes(need)} at once but the plan leaves them {room}"

    def to_dict(self) -> dict[str, Any]:
        """Return plain values, for JSON.

        Returns:
            ``plan`` as its own, ``fits``, and ``remedies`` if it does not. With a batch: ``flops``, ``tokens``, and
            ``activation_bytes`` at their peak, of which ``device_activation_bytes`` are on the device, and
            ``peak_bytes`` per tier. With a machine, too: ``hardware``, ``step_s``, ``bound_s``, ``fill_s``,
            ``binding``, ``spans`` with seconds per lane, ``bytes`` per lane, ``early_units`` that are updated during
            backward, and ``savings``; if steps clip, ``clipping`` with the attributes of :class:`Clipping`. Of several
            ranks, there are ``hardware`` and ``lanes`` instead.
        """
        found: dict[str, Any] = {"plan": self.plan.to_dict(), "fits": self.fits}
        if self.work is not None:
            found |= {"flops": self.work.flops, "activation_bytes": self.work.peak_bytes, "tokens": self.tokens}
            found |= {"device_activation_bytes": self.work.device_bytes}
            found["peak_bytes"] = {tier.value: size for tier, size in self.peak_bytes.items()}
        if not self.fits:
            found["remedies"] = list(self.remedies)
        if self.timing is not None and self.hardware is not None:
            found |= {
                "hardware": self.hardware.name,
                "step_s": self.timing.step_s,
                "bound_s": self.timing.bound_s,
                "fill_s": self.timing.fill_s,
                "binding": self.timing.binding,
                "spans": [{"name": span.name, "seconds": dict(span.seconds)} for span in self.timing.spans],
                "bytes": dataclasses.asdict(self.timing.moved),
                "early_units": self.timing.early_units,
                "savings": dict(self.savings),
            }
        if self.lanes and self.hardware is not None:
            found |= {"hardware": self.hardware.name, "lanes": dict(self.lanes)}
        if self.clipping is not None:
            found["clipping"] = dataclasses.asdict(self.clipping)
        return found

    def __str__(self) -> str:
        return "\n".join([str(self.plan), *self._lines()])

    def _lines(self) -> Iterator[str]:
        if self.hardware is None and self.plan.request.device_is_host:
            yield (
                "for the CPU of this machine as the device; name a machine (hardware, --hardware) to plan for a GPU, "
                "or 'here' to measure this one"
            )
        if self.work is not None:
            yield (
                f"a micro-batch: {figures(self.work.flops / 1e12, 4)} TFLOP, {format_bytes(self.work.peak_bytes)} of "
                "activations at their peak" + self._held()
            )
            if self.work.unmeasured:
                yield f"  by their bytes, for they do not run alone: {', '.join(self.work.unmeasured)}"
            if self.work.assumed:
                questions = "a question" if self.work.assumed == 1 else f"{self.work.assumed} questions"
                yield f"  assumed: yes, to {questions} of the model about values of tensors"
            peaks = ", ".join(f"{tier.value} {format_bytes(size)}" for tier, size in self.peak_bytes.items() if size)
            locked = self.plan.arena_bytes[Tier.HOST]
            host = "" if self.plan.request.device_is_host else f"; {format_bytes(locked)} of cpu page-locked"
            yield f"at most at once: {peaks}{host}"
        yield from self._beyond()
        if not self.fits:
            yield f"DOES NOT FIT: {self._refusal()}"
            yield from (f"  fits with {remedy}" for remedy in self.remedies)
        if self.lanes and self.hardware is not None:
            yield from self._shared(self.hardware)
        if self.timing is None or self.hardware is None:
            return
        timing = self.timing
        rate = f", {figures(self.tokens / timing.step_s, 4)} tokens/s" if self.tokens else ""
        yield f"a step on {self.hardware.name}: {figures(timing.step_s)} s{rate}; {timing.binding} binds"
        for span in timing.spans:
            lanes = ", ".join(f"{lane} {figures(seconds)} s" for lane, seconds in span.seconds.items() if seconds)
            yield f"  {span.name}: {lanes}"
        yield f"  bound {figures(timing.bound_s)} s, fill {figures(timing.fill_s)} s"
        for what, seconds in self.savings.items():
            yield f"  with {what}: {figures(seconds)} s"
        if self.clipping is not None:
            yield f"  every step clips: {self._clips(self.clipping, timing)}"

    def _beyond(self) -> Iterator[str]:
        """Tell which budgets are larger than what the machine has."""
        if self.hardware is None:
            return
        request, machine = self.plan.request, self.hardware
        for tier, has in ((Tier.DEVICE, machine.device_bytes), (Tier.HOST, machine.host_bytes)):
            many = request.world_size if tier is Tier.HOST else 1
            if request.budgets[tier] * many > has:
                of = f"{many} times " if many > 1 else ""
                budget = f'{of}max_memory["{tier.value}"], {format_bytes(request.budgets[tier])}'
                yield f"NOT OF THIS MACHINE: {budget}, is more than the {format_bytes(has)} of {machine.name}"

    def _shared(self, hardware: Hardware) -> Iterator[str]:
        ranks = self.plan.request.world_size
        lanes = ", ".join(f"{lane} {figures(seconds)} s" for lane, seconds in self.lanes.items() if seconds)
        yield f"{ranks} ranks on one {hardware.name}, each with such a device: they share host memory and the drive"
        yield f"  each lane alone, for one micro-batch of each rank: {lanes}"
        yield "  no step is predicted: no GPUs have exchanged anything yet; offload scale has figures on paper"

    def _held(self) -> str:
        work = self.work
        held = work is not None and work.held_bytes is not None
        return f", {format_bytes(work.device_bytes)} of them on the device" if held and work is not None else ""

    def _clips(self, clipping: Clipping, timing: Timing) -> str:
        share = timing.step_s / clipping.bound_s
        text = f"{share:.2f} of the bound without clipping, {figures(clipping.bound_s)} s"
        if share <= NEAR:
            return text
        if clipping.host_bytes is None:
            return f"{text}; no host budget brings it to {NEAR}"
        return f'{text}; {NEAR} with max_memory["{Tier.HOST.value}"] = {format_bytes(clipping.host_bytes)}'


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
        batch: of one micro-batch: (rows, length) of token ids for a language model, else what its forward takes, as a
            mapping or a sequence. None: bytes without seconds.
        hardware: the machine: a preset (``"rtx4090"``, ``"h200"``, ...), a JSON file with the attributes of
            :class:`offload.planning.hardware.Hardware`, or such a value. Its budgets are shares of its memory where
            `max_memory` does not say, and none of NVMe. ``"here"``: this machine, measured once: the operators of the
            model run one by one on the device, and updates, copies and drives (a file in ``nvme_path``) for a few
            seconds. None: the memory of this machine, and no seconds.
        checkpointing: of activations, where the model is made here; a module stays as it is. None does so unless
            `activations` is among the options: what these move, or compute again, is counted.
        chunk_loss: of a language model that is made here, by :func:`offload.ops.chunk_loss`.
        ranks: that train together on one machine, each with a device: the plan is that of the first one, and budgets
            are each rank's own. There are seconds per lane then, and none of a step.
        stage: of several ranks, as in :class:`offload.Engine`.
        measure_again: forget what was measured of this machine.
        config: options as in :class:`offload.Engine`.
        **options: options of :class:`offload.Config`. A budget of NVMe needs no path.

    Returns:
        The forecast.

    Raises:
        ConfigError: an option, the machine or the batch makes no sense, or shapes cannot be known; names it.
        BudgetError: the model cannot be trained within the budgets; names the smallest that would do.
        ImportError: transformers is needed and not installed.
    """
    _check_ranks(ranks, stage, hardware)
    here = hardware is None or hardware == HERE
    machine = None if here else hardware if isinstance(hardware, Hardware) else Hardware.load(hardware)  # type: ignore[arg-type]
    options = _without_path(config, options)
    asked = Config.load(config, **options)
    if not isinstance(model, nn.Module):
        logger.info("making the model without its weights")
    if checkpointing is None:
        checkpointing = not _names_activations(config, options, asked)

    def make(*, chunked: bool = chunk_loss) -> nn.Module:
        return made_on_meta(model, checkpointing=checkpointing, chunked=chunked)

    module = model if isinstance(model, nn.Module) else make()
    cast = getattr(torch, asked.dtype) if asked.dtype else None
    spec = AdamW(lr=1e-4) if optimizer is None else optimizer
    rule = rule_of(spec, cast)
    with ready_meanwhile(module, cast):
        logger.info("placing parameters, gradients and states")
        planner = functools.partial(_planned, here=here, ranks=ranks, stage=stage)
        found, tree = planner(module, asked, rule, _budgets(asked, machine, ranks))
        if batch is None:
            return Forecast(found, machine, None, None, None, {})
        logger.info("running a micro-batch on shapes alone")
        cases = cases_of(module, batch, found, tree)
        if hardware == HERE:
            logger.info("measuring this machine, as far as it is not known yet")
            machine, cases = _measured(asked, spec, cases, again=measure_again)
        tokens = _tokens(batch, asked)
        mode, (found, work), timing = _chosen(cases, machine, asked)
        remedies: tuple[str, ...] = ()
        if _missing_bytes(found, work):
            logger.info("looking for what would make the batch fit")

            chunked = functools.cache(functools.partial(make, chunked=True))

            def fits(change: Change) -> bool:
                same = change.batch is batch and change.asked.activations == asked.activations
                known = work.device_bytes if same and not change.chunk_loss else None
                return _fits(planner, chunked if change.chunk_loss else lambda: module, rule, change, known)

            start = Change("", asked, found.request.budgets, batch)
            may_chunk, again = module is not model and not chunk_loss, checkpointing and module is not model
            room = _room_bytes(found)
            remedies = tuple(remedies_of(fits, start, work, room, may_chunk=may_chunk, checkpointing=again))
        if machine is None or timing is None:
            return Forecast(found, None, work, None, tokens, {}, remedies=remedies)
        if ranks > 1:
            lanes = lanes_of(found, work, machine)
            return Forecast(found, machine, work, None, tokens, {}, remedies=remedies, lanes=lanes)
        logger.info("looking for what would make a step shorter")

        def planned(budgets: Mapping[Tier, int]) -> Case:
            other, cut = planner(module, asked, rule, budgets)
            return case_of(module, batch, other, mode, cut, work if cut.units == tree.units else None)

        savings = dict(_savings(planned, asked, machine, (found, work), timing.step_s))
        clipping = _clipping(planned, asked, machine, (found, work), timing.step_s)
        return Forecast(found, machine, work, timing, tokens, savings, clipping, remedies)


def _names_activations(config: Any, options: Mapping[str, Any], asked: Config) -> bool:
    given = config if isinstance(config, Mapping) else {}
    return "activations" in options or "activations" in given or asked.activations != KEEP


def _chosen(cases: Mapping[str, Case], machine: Hardware | None, asked: Config) -> tuple[str, Case, Timing | None]:
    """Return the mode of activations, its case and its seconds, if the speed of the machine is known.

    If ``"auto"`` has to choose, that is the faster one. Its first steps let activations leave: they have to fit then.
    """
    first = next(iter(cases))
    if asked.activations != AUTO or _missing_bytes(*cases[first]):
        return first, cases[first], None if machine is None else _timed(*cases[first], machine, asked)
    if machine is None:
        found, work = cases[first]
        choice = choose({})[1] if first == KEEP else ""  # else nobody can choose yet
        return first, (dataclasses.replace(found, choice=choice), work), None
    timings = {mode: _timed(*case, machine, asked) for mode, case in cases.items()}
    mode, choice = choose({} if first == KEEP else {mode: timing.step_s for mode, timing in timings.items()})
    found, work = cases[mode]
    return mode, (dataclasses.replace(found, choice=choice), work), timings[mode]


def _room_bytes(found: Plan) -> int:
    """Return what a plan leaves to activations; where the CPU is the device, parameters give way to them."""
    return found.request.budgets[Tier.DEVICE] if found.request.device_is_host else found.activation_bytes


def _missing_bytes(found: Plan, work: Work) -> int:
    return max(work.device_bytes - _room_bytes(found), 0)


def _fits(
    planner: Callable[..., tuple[Plan, UnitTree]],
    made: Callable[[], nn.Module],
    rule: Rule,
    change: Change,
    known: int | None,
) -> bool:
    """Tell whether a batch fits after a change; where nothing leaves, it may be `known` what the device holds."""
    asked = change.asked
    try:
        module = made()
        found, _ = planner(module, asked, rule, change.budgets)
        if known is None or found.near_bytes:
            known = held_bytes(module, change.batch, found, asked.activations)
        return known <= _room_bytes(found)
    except (BudgetError, ConfigError):  # no room for parameters, no blocks to compute again, no such loss
        return False


def _without_path(
    config: Config | Mapping[str, Any] | str | os.PathLike[str] | None, options: dict[str, Any]
) -> dict[str, Any]:
    """Give options a path, which nobody opens, where the drive is of another machine."""
    given = config if isinstance(config, Mapping) else {}
    memory = options.get("max_memory", given.get("max_memory"))
    wants = isinstance(memory, Mapping) and any(tier_named(key) == "nvme" for key in memory)
    wants |= "nvme" in (options.get("offload_param"), options.get("offload_optimizer"))
    named = any(options.get(name) or given.get(name) for name in ("nvme_path", "run_dir"))
    return (
        options
        if named or not wants or isinstance(config, (Config, str, os.PathLike))
        else options | {"nvme_path": "."}
    )


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
        return resolve_budgets(given, open_device(asked.device), free_bytes(tuple(map(_existing, asked.paths()))))
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
    """Return this machine, and the cases with the seconds that their work takes here."""
    found = next(iter(cases.values()))[0]
    known = Here(open_device(asked.device), again=again)
    machine = known.hardware(
        spec,
        state_dtype=asked.state_dtype,
        paths=tuple(map(_existing, asked.paths())) if found.arena_bytes[Tier.NVME] else (),
        piece_numel=found.chunk_numel if any(homes.states is Tier.NVME for homes in found.homes) else None,
        device_bytes=found.request.budgets[Tier.DEVICE],
        host_bytes=found.request.budgets[Tier.HOST],
    )
    return machine, {mode: (plan, known.timed(work, machine)) for mode, (plan, work) in cases.items()}


def _planned(
    module: nn.Module,
    asked: Config,
    rule: Rule,
    budgets: Mapping[Tier, int],
    *,
    here: bool,
    ranks: int,
    stage: int | str,
) -> tuple[Plan, UnitTree]:
    sliced = stage in (3, "auto")
    tree = units_of(module, asked, rule, unit_bytes_of(asked, budgets[Tier.DEVICE]), ranks=ranks, slices_frozen=sliced)
    host = here and open_device(asked.device).addressable

    def make(chosen: int) -> Plan:
        together = {"world_size": ranks, "stage": chosen}
        return make_plan(
            request_of(module, asked, rule, tree, budgets, device_is_host=host, updates_on_device=False, **together)
        )

    if ranks > 1 and stage == "auto":
        stage = stage_alone(make, device_is_host=host)
    return make(1 if stage == "auto" else int(stage)), tree


def _timed(found: Plan, work: Work, machine: Hardware, asked: Config) -> Timing:
    steps = asked.gradient_accumulation_steps
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

    def is_near(host_bytes: int) -> bool:
        try:
            other, computed = planned({**budgets, Tier.HOST: host_bytes})
        except BudgetError:  # larger units
            return False
        computed = dataclasses.replace(computed, measured_s=work.measured_s)
        return _timed(other, computed, machine, asked).step_s <= NEAR * calm.bound_s

    low = budgets[Tier.HOST]
    high = low + found.arena_bytes[Tier.NVME]
    if step_s <= NEAR * calm.bound_s:
        return Clipping(calm.bound_s, low)
    if not is_near(high):
        return Clipping(calm.bound_s, None)
    while high - low > high // 100:
        middle = (low + high) // 2
        low, high = (low, middle) if is_near(middle) else (middle, high)
    return Clipping(calm.bound_s, high)


def _savings(
    planned: Callable[[Mapping[Tier, int]], Case], asked: Config, machine: Hardware, case: Case, step_s: float
) -> Iterator[tuple[str, float]]:
    """Yield what would make a step shorter, the best first; `planned` has the plan for other budgets."""
    found, work = case
    budgets = dict(found.request.budgets)
    seconds = {}
    for tier in (Tier.DEVICE, Tier.HOST):
        more = {**budgets, tier: int(budgets[tier] * _MORE)}
        try:
            other, computed = planned(more)
        except BudgetError:  # larger units
            continue
        computed = dataclasses.replace(computed, measured_s=work.measured_s)
        seconds[f'max_memory["{tier.value}"] = {format_bytes(more[tier])}'] = _timed(
            other, computed, machine, asked
        ).step_s
    for lane, names in (
        ("a drive", ("drive_read_bytes_s", "drive_write_bytes_s", "drive_mixed_bytes_s")),
        ("a link to the host", ("h2d_bytes_s", "d2h_bytes_s")),
        ("host memory", ("update_bytes_s", "host_bytes_s")),
        ("a device", ("flops_16", "flops_32", "device_bytes_s")),
    ):
        faster = dataclasses.replace(machine, **{name: getattr(machine, name) * 2 for name in names})
        there = work.twice_as_fast() if lane == "a device" else work
        seconds[f"{lane} of twice the speed"] = _timed(found, there, faster, asked).step_s
    yield from (
        (what, took) for what, took in sorted(seconds.items(), key=lambda item: item[1]) if took < step_s * _WORTH
    )
