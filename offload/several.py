"""Several ranks of one engine: what they must have in common, and what they cannot have yet.

Owns the facts that ranks compare when an engine is made and before each step, and the refusals by name. How they are
compared is :mod:`offload.distributed.processes`' business. Next: :mod:`offload.build`, :mod:`offload.training` ask.
"""

from __future__ import annotations

import contextlib
import ctypes
import hashlib
import json
import logging
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from offload.config import Config
from offload.distributed.processes import open_ranks
from offload.distributed.ranks import Fact, OneRank, Ranks
from offload.distributed.records import MOST_NUMBERS
from offload.errors import BudgetError, ConfigError, OffloadError, RanksError, StateError
from offload.memory import machine
from offload.memory.budget import Tier
from offload.memory.device import Device
from offload.module.refusals import refuse_ranks
from offload.optim.copies import is_plain
from offload.optim.progress import Progress
from offload.optim.rules import Rule
from offload.planning.choosing import AUTO
from offload.planning.partition import UnitTree
from offload.planning.plan import Plan
from offload.planning.roles import Role
from offload.planning.units import Where
from offload.shards.gradients_of_ranks import facts_of_waiting
from offload.shards.manager import Manager
from offload.shards.stream import Chunk
from offload.stats import Counters

logger = logging.getLogger(__name__)

_SAME = (  # options that decide on bits
    "dtype",
    "state_dtype",
    "max_grad_norm",
    "gradient_accumulation_steps",
    "gradient_reduction",
    "initial_loss_scale",
    "loss_scale_window",
    "loss_scale_hysteresis",
    "min_loss_scale",
)


_MASTERED = " (16 bits: with engine.load_checkpoint, or values in float32, all ranks have one master again)"
Stage = int | str | None  # of ZeRO


APART = "apart"  # a stage: each process has all of an engine that only evaluates


def ranks_of(stage: Stage, group: Any, counters: Counters, *, trains: bool = True) -> Ranks:
    """Return the ranks of an engine, once all of them have come; one process is a rank of its own.

    Args:
        stage: of ZeRO, or ``"auto"``; None where several processes are not meant.
        group: their process group, or a device mesh of (ranks) or (nodes, ranks of a node); None for the default group.
        counters: of the bytes that are sent.
        trains: the engine; one that only evaluates may be apart.

    Raises:
        ConfigError: a stage that there is not, or a mesh of other dimensions or ranks.
        StateError: there are several processes, and no stage or no process group.
        RanksError: a rank has not come.
    """
    if stage == APART and trains:
        raise ConfigError('stage: expected an engine that only evaluates for "apart" but got an optimizer; pass "auto"')
    if stage == APART:
        return OneRank()
    if stage is None:
        refuse_ranks()
        if group is not None:
            raise ConfigError('group: expected stage="auto" beside it but got none; pass both for several ranks')
        return OneRank()
    if stage not in (1, 2, 3, "auto") or isinstance(stage, bool):
        raise ConfigError(
            'stage: expected 1 or 2, gradients and optimizer states in slices, 3, parameters, too, "auto", or "apart", '
            f"to evaluate with a whole engine in each process, but got {stage!r}"
        )
    if not torch.distributed.is_available() or not torch.distributed.is_initialized():
        if os.environ.get("WORLD_SIZE", "").strip() not in ("", "1"):
            raise StateError(
                f"engine: expected a process group but got none, and WORLD_SIZE={os.environ['WORLD_SIZE']}; call "
                "torch.distributed.init_process_group() before"
            )
        if group is not None:
            raise StateError(
                f"engine: expected a process group but got a {type(group).__name__} of one that is gone; call "
                "torch.distributed.init_process_group() before, and make it anew"
            )
        return OneRank()
    return open_ranks(group, counters=counters)


@contextlib.contextmanager
def made_together(ranks: Ranks) -> Iterator[None]:
    """Tell the other ranks if this one's engine is not made: they would wait for it."""
    try:
        yield
    except BaseException as error:
        if not isinstance(error, RanksError):  # which all of them raise
            ranks.fail(error)
        ranks.close()
        raise


def refuse_options(world: int, optimizer: object, rule: Rule | None) -> None:
    """Refuse what several ranks cannot have yet; nothing where there is one.

    Raises:
        ConfigError: it is asked for.
    """
    if world == 1:
        return
    if rule is None or optimizer is None:
        raise ConfigError(
            "optimizer: expected one but got None: several ranks are for training; to evaluate, pass "
            'stage="apart" for a whole engine in each process'
        )
    refused = {
        f"optimizer {type(optimizer).__name__}, whose own class makes the steps": rule.own is not None,
        "a torch optimizer that has states": isinstance(optimizer, torch.optim.Optimizer) and bool(optimizer.state),
    }
    for what, is_asked_for in refused.items():
        if is_asked_for:
            raise ConfigError(f"{what}: not with several ranks yet; leave it out, or train in one process")


def who_shares(ranks: Ranks, drives: Collection[int]) -> tuple[int, dict[int, int]]:
    """Return how many processes share this machine, and how many of them use each of this one's drives.

    They are those that train together, or as many as the launcher has started here, if these are more: some may be
    apart, or in another group. Those may use each drive.

    Args:
        ranks: who train together.
        drives: numbers of devices.

    Raises:
        RanksError: another rank has failed, ended, not come, or is elsewhere.
    """
    here, told = _number(machine.identity()), [*drives][: MOST_NUMBERS - 1]
    said = ranks.agree("making an engine", numbers=[here, *told]).numbers
    near = [set(named) for number, *named in said if number == here]
    started = os.environ.get("LOCAL_WORLD_SIZE", "").strip()
    others = max(int(started) - len(near), 0) if started.isdecimal() else 0
    users = {drive: (sum(drive in named for named in near) or len(near)) + others for drive in drives}
    if len(near) > 1:
        count = len(near) + others
        logger.info("budgets: %d ranks share this machine, so shares and defaults are of their part", count)
    return len(near) + others, users


def agree_on_options(
    ranks: Ranks, config: Config, optimizer: object, unit_bytes: int, stage: Stage, device: Device
) -> int:
    """Compare options; returns by which size all ranks cut units: the smallest that one of them wants.

    Raises:
        RanksError: an option differs, or two ranks have one device.
    """
    if ranks.world == 1:
        return unit_bytes
    facts: dict[str, Fact] = {option: getattr(config, option) for option in _SAME}
    facts |= {"torch": torch.__version__, "optimizer": type(optimizer).__name__, "stage": stage}
    facts['activations="auto"'] = config.activations == AUTO  # which ranks choose together
    facts["the kind of device"] = device.place.type
    identity = device.identity()
    known = 0 if identity is None else _number(identity)
    agreement = ranks.agree("making an engine", facts, numbers=[unit_bytes, known])
    _refuse_one_device([int(number) for _, number in agreement.numbers], device)
    return int(min(size for size, _ in agreement.numbers))


def _number(text: str) -> int:
    """Return a number that two ranks have in common where they have the same text."""
    return int(hashlib.sha256(text.encode()).hexdigest()[:12], 16)


def _refuse_one_device(known: Sequence[int], device: Device) -> None:
    """Refuse two ranks that compute on one device; `known` has a number for each rank's, 0 where nobody can tell."""
    for rank, number in enumerate(known):
        if number and number in known[:rank]:
            kind = device.place.type
            raise RanksError(
                f"ranks: expected a device of its own for each but ranks {known.index(number)} and {rank} have the "
                f'same; call torch.{kind}.set_device(int(os.environ["LOCAL_RANK"])) before, or pass '
                f"device=f\"{kind}:{{os.environ['LOCAL_RANK']}}\""
            )


def agree_on_plan(ranks: Ranks, tree: UnitTree, make: Callable[[int], Plan], stage: Stage, device: Device) -> Plan:
    """Return the plan of this rank, once all ranks have one for the same model.

    Args:
        ranks: who train together.
        tree: units.
        make: makes the plan for a stage.
        stage: as it is asked for.
        device: where compute runs.

    Raises:
        RanksError: the models differ, or another rank has no plan.
        OffloadError: this one has none.
    """
    chosen = _choose_stage(ranks, make, device) if stage == "auto" else int(stage or 1)
    try:
        plan = make(chosen)
    except OffloadError as error:
        if ranks.world > 1:
            ranks.agree("planning", error=error)
        raise
    if ranks.world > 1:
        ranks.agree("planning", _facts_of_model(tree))
    return plan


def _choose_stage(ranks: Ranks, make: Callable[[int], Plan], device: Device) -> int:
    """Return the stage that one rank would take alone if all of them can take it, else 3."""
    mine = stage_alone(make, device_is_host=device.addressable)
    return int(max(stage for (stage,) in ranks.agree("choosing a stage", numbers=[mine]).numbers))


def stage_alone(make: Callable[[int], Plan], *, device_is_host: bool) -> int:
    """Return a stage with whole parameters if the memory of a rank holds them, else 3.

    Beside an accelerator that is 2, for gradients go to other ranks while it computes backward. On the CPU it is 1:
    there, what goes beside backward takes its cores.

    Args:
        make: makes the rank's plan for a stage.
        device_is_host: the CPU computes.
    """
    whole = 1 if device_is_host else 2
    try:
        plan = make(whole)
    except BudgetError:
        return 3
    return whole if all(plan.home(unit, Role.PARAM) is not Tier.NVME for unit in plan.request.units) else 3


def _facts_of_model(tree: UnitTree) -> dict[str, Fact]:
    facts: dict[str, Fact] = {}
    for unit in tree.units:
        trained = "trained" if unit.trainable else "frozen"
        for slot in unit.slots:
            facts[f"parameter {slot.name}"] = f"{unit.dtype} {slot.shape} {trained} at {unit.index}/{slot.offset_numel}"
    for wrapper in tree.wrappers:
        with contextlib.suppress(ConfigError):  # what has no plain values cannot be compared
            facts[f"what makes {wrapper.name}"] = json.dumps(wrapper.shell.described(), sort_keys=True)
    return facts


def facts_of_groups(groups: Iterable[Mapping[str, Any]], names: Mapping[int, str]) -> dict[str, Fact]:
    """Return in which of the optimizer's groups each parameter is; `names` by identity."""
    return {
        f"the parameter group of {names.get(id(parameter), 'a parameter')}": number
        for number, group in enumerate(groups)
        for parameter in group["params"]
    }


def agree_on_values(manager: Manager, loaded: Mapping[str, str], grouped: Mapping[str, Fact]) -> None:
    """Compare the parameters that have been loaded, and their groups; nothing where there is one rank.

    Args:
        manager: owner of the shards.
        loaded: digests by name, where the shards have slices of what was loaded.
        grouped: the parameters' groups, of :func:`facts_of_groups`.

    Raises:
        RanksError: one differs.
    """
    shared = manager.tiers.shared
    if shared is None:
        return
    digests = loaded if manager.tiers.plan.request.slices_parameters else _digests(manager)
    values = {f"the values of {name}": digest for name, digest in digests.items()}
    manager.tiers.ranks.agree("loading", {**grouped, **values})
    shared.note_loaded()


def _digests(manager: Manager) -> dict[str, str]:
    """Return a digest of each parameter's values, by name."""
    found = {slot.name: hashlib.blake2b(digest_size=16) for unit in manager.units for slot in unit.slots}

    def visit(chunk: Chunk) -> None:
        size = chunk.unit.itemsize
        for _, slot, start, stop in chunk.unit.overlaps(chunk.begin, chunk.end):
            content = (ctypes.c_char * ((stop - start) * size)).from_address(chunk.at(Role.PARAM, start, size))
            found[slot.name].update(content)

    manager.stream(manager.units, visit, reads=frozenset({Role.PARAM}))
    return {name: known.hexdigest() for name, known in found.items()}


def agree_on_step(
    ranks: Ranks,
    manager: Manager,
    factors: Callable[[], Mapping[Where, float]],
    groups: Sequence[Mapping[str, Any]],
    names: Mapping[int, str],
    run: Progress,
    micro_batches: int,
) -> None:
    """Compare what decides on a step, beside the gradients; nothing where there is one rank.

    Args:
        ranks: who takes it.
        manager: has the gradients that wait, and knows what was written to parameters.
        factors: returns what these gradients were multiplied by. Each rank multiplies its slice.
        groups: the optimizer's.
        names: of parameters, by identity.
        run: steps so far, and the loss scale.
        micro_batches: closed since the last step.

    Raises:
        RanksError: something differs, or a rank is elsewhere. Nothing was changed.
    """
    shared = manager.tiers.shared
    if shared is None:
        return
    commits = manager.commits
    marks = [] if commits is None else commits.marks
    where, grouped = where_of_step(run), facts_of_groups(groups, names)
    facts = facts_of_step(manager, factors, groups, run, micro_batches)
    said = ranks.agree(where, facts, numbers=[_number(repr(grouped)), *marks])
    if len({number for number, *_ in said.numbers}) > 1:
        ranks.agree(where, grouped)
    shared.note_loaded()
    if commits is not None:
        commits.pass_on(marks for _, *marks in said.numbers)


def where_of_step(run: Progress) -> str:
    """Return the place where all ranks meet before the step that comes next."""
    return f"step {run.steps + 1}"


def facts_of_step(
    manager: Manager,
    factors: Callable[[], Mapping[Where, float]],
    groups: Iterable[Mapping[str, Any]],
    run: Progress,
    micro_batches: int,
) -> dict[str, Fact]:
    """Return what decides on a step, beside the gradients, and is the same on all ranks; arguments as above."""
    shared = manager.tiers.shared
    if shared is None:
        return {}
    facts: dict[str, Fact] = {"the loss scale": run.scaler.scale, "the number of micro-batches": micro_batches}
    for name, digest in shared.written.items():
        facts[f"what was written to {name}{_MASTERED if name in shared.mastered else ''}"] = digest
    for number, group in enumerate(groups):
        for name, value in group.items():
            if name != "params" and is_plain(plain := _plain(value)):  # others have another text on each rank
                facts[f"{name} of parameter group {number}"] = repr(plain)
    if manager.gradients.any_arrived:  # which a rank may have dropped that has had others since
        facts["the micro-batches of the gradients that wait"] = shared.exchanges.summed
    factor_of, trained = factors(), [unit for unit in manager.units if unit.trainable]
    facts |= facts_of_waiting(trained, manager.gradients.arrived)
    for unit in trained:
        known = [(slot.name, factor_of.get((unit.index, number), 1.0)) for number, slot in enumerate(unit.slots)]
        scaled = [f"{name} by {factor!r}" for name, factor in known if factor != 1.0]
        if scaled:
            facts[f"what gradients of {unit.name} were multiplied by"] = ", ".join(scaled)
    return facts


def _plain(value: Any) -> Any:
    """Return an entry of a param group with numbers in place of what holds numbers."""
    if isinstance(value, (list, tuple)):
        return tuple(map(_plain, value))
    return value.tolist() if hasattr(value, "tolist") else value
