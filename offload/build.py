"""Makes an engine's parts, in the order in which they need each other.

Owns that order - options, units, plan, memory, optimizer, loading, hooks - and how to undo it. Next:
:mod:`offload.engine` is the face of the parts.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping

import torch
from torch import nn

from offload import several
from offload.activations.away import Away
from offload.activations.leaving import LeavingActivations
from offload.activations.ledger import Activations
from offload.activations.rss import open_rss
from offload.activations.tiling import with_tiles
from offload.checkpoint.dict_memory import DictMemory
from offload.checkpoint.loading import Loader, open_tiers
from offload.checkpoint.module_state import ModuleTensors
from offload.checkpoint.optimizer_state import OptimizerStates
from offload.checkpoint.pretrained import Weights
from offload.checkpoint.run_files import RunFacts, RunFiles
from offload.checkpoint.writing_home import ParameterWriter
from offload.config import Config
from offload.distributed.ranks import Ranks
from offload.distributed.together import Together
from offload.errors import BudgetError
from offload.interrupt import Deferral
from offload.kernels import cpu_adam
from offload.life import Life
from offload.memory import drives
from offload.memory.budget import Budget, Tier
from offload.memory.device import Device
from offload.memory.device_memory import open_device_meter
from offload.memory.devices import open_device
from offload.memory.limits import resolve_budgets
from offload.memory.machine import bound_by, drives_of, free_bytes
from offload.module.binding import Binding
from offload.module.changes import OutsideChanges
from offload.module.forwards import Forwards
from offload.module.gradient_book import GradientBook
from offload.module.gradient_hooks import HookCalls
from offload.module.gradient_tensors import GradientTensors
from offload.module.hooks import Hooks, refuse_taken
from offload.module.pass_times import PassCalls
from offload.module.quantized import make_ready
from offload.module.recomputing import Recomputing, can_recompute
from offload.optim.progress import LossScaler, Progress
from offload.optim.recipe import StepCounts, group_of_slots
from offload.optim.rules import Rule, rule_of
from offload.optim.step import Groups, Step
from offload.optimizer import Calls, OffloadOptimizer
from offload.planning.asked import Request
from offload.planning.choosing import AUTO, RECOMPUTE
from offload.planning.partition import UnitTree, WithReference
from offload.planning.plan import Plan
from offload.planning.planner import is_possible, make_plan
from offload.request import request_of, unit_bytes_of, units_of, updates_on
from offload.shards.commits import Record
from offload.shards.manager import Manager
from offload.spec import OptimizerSpec
from offload.stats import Counters
from swap import SwapStore

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, slots=True)
class Steps:
    """What steps are made of; where an engine only evaluates, there are no optimizer, states and step.

    Attributes:
        run: steps taken, and the loss scale.
        counts: updates that each parameter has had.
        states: of the optimizer.
        optimizer: the face.
        step: takes the steps.
    """

    run: Progress
    counts: StepCounts
    states: OptimizerStates | None = None
    optimizer: OffloadOptimizer | None = None
    step: Step | None = None

    def averaging(self) -> float:
        """Return what makes the mean over micro-batches of a sum of scaled gradients."""
        return 1.0 if self.step is None else self.step.averaging()

    def put_back(self, given: OptimizerSpec | torch.optim.Optimizer | None) -> None:
        """Give a torch optimizer back what was taken from it: its engine is not made."""
        assert self.optimizer is not None and self.states is not None
        if isinstance(given, torch.optim.Optimizer):
            found = self.states.found()
            self.optimizer.hand_back(lost=False)
            for parameter, state in found.items():
                if not given.state.get(parameter):
                    given.state[parameter].update(state)

    def calls(self, calls: EngineCalls) -> HookCalls:
        """Return what hooks ask."""
        step, deferral = self.step, calls.deferral
        if step is None:
            return HookCalls(lambda passes: True, lambda: None, lambda: None, deferral, calls.passes, calls.optimizer)
        refuse = self.run.scaler.refuse_gradient
        return HookCalls(step.micro_batches.is_final, step.guess, refuse, deferral, calls.passes, calls.optimizer)


@dataclasses.dataclass(frozen=True, slots=True)
class Parts:
    """What an engine is made of."""

    device: Device
    plan: Plan
    budgets: dict[Tier, Budget]
    counters: Counters
    tree: UnitTree
    hooks: Hooks
    changes: OutsideChanges
    loader: Loader
    activations: Activations
    tensors: ModuleTensors
    book: GradientBook
    gradients: GradientTensors
    recomputing: Recomputing | None
    steps: Steps
    run: RunFiles | None
    ranks: Ranks
    threads: cpu_adam.Threads | None


@dataclasses.dataclass(frozen=True, slots=True)
class EngineCalls:
    """What the parts ask of their engine.

    Attributes:
        optimizer: what its optimizer asks.
        deferral: holds Ctrl-C back while something is half done.
        passes: what is told of passes.
        life: begins when the memory is there.
        record: of a durable run; None where nothing survives the process.
    """

    optimizer: Calls
    deferral: Deferral
    passes: PassCalls
    life: Life
    record: Record | None = None


def build(
    model: nn.Module,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None,
    config: Config,
    calls: EngineCalls,
    ranks: Ranks,
    counters: Counters,
    weights: Weights | None = None,
    *,
    reference: nn.Module | None = None,
    stage: several.Stage = None,
) -> Parts:
    """Plan, take the memory, load the model and register the hooks; or leave the model as it was.

    A torch optimizer has its states back then; it steps again when another engine has it. `weights` are values of what
    files have. A `reference` model, frozen, has a part in all memory. `stage` is that of ZeRO, where there are several
    ranks.

    Raises:
        ConfigError, BudgetError, StateError, swap.SwapError: as :class:`offload.Engine` says.
    """
    device = open_device(config.device)
    place = device.place
    cast = getattr(torch, config.dtype) if config.dtype else None
    rule = None if optimizer is None else rule_of(optimizer, cast)
    several.refuse_options(ranks.world, optimizer, rule)
    recomputing = _recomputing(model, config)
    everything = model if reference is None else WithReference(model, reference)
    make_ready(everything, cast)
    run = None if calls.record is None else RunFiles(config)
    there_bytes = 0 if run is None else run.capacity_bytes
    near, users = several.who_shares(ranks, drives_of(config.paths()))
    free = free_bytes(config.paths(), users)
    limits = resolve_budgets(config.budgets(), device, None if free is None else free + there_bytes, ranks=near)
    unit_bytes = _unit_bytes(config, limits[Tier.DEVICE], run)
    unit_bytes = several.agree_on_options(ranks, config, optimizer, unit_bytes, stage, device)
    tree = units_of(everything, config, rule, unit_bytes, ranks=ranks.world, slices_frozen=stage in (3, "auto"))
    tiled = model if weights is None and ranks.world == 1 else None
    refuse_taken(model, tree)
    binding = Binding(tree, place)
    make = functools.partial(_plan, everything, config, rule, tree, limits, device, run, ranks, tiled)
    plan = several.agree_on_plan(ranks, tree, make, stage, device)
    life = calls.life
    budgets = {tier: Budget(tier, limits[tier]) for tier in Tier}
    loader = Loader(everything, tree, binding, config.init_weights or getattr(model, "_init_weights", None), weights)
    calls.deferral.check()  # from here on, there is something to undo
    manager = open_tiers(
        plan, config, device, budgets, binding, counters, calls.deferral, calls.record, there_bytes, ranks
    )
    with contextlib.ExitStack() as undo, Together(manager.tiers.ranks, "making an engine") as together:
        unloaded: dict[int, list[torch.Tensor]] = {}
        undo.callback(loader.give_back, unloaded)
        undo.callback(manager.close)
        undo.callback(lambda: unloaded.update(loader.unload(manager, undo=True)))
        undo.callback(life.end)
        life.open(manager)
        variable = bound_by(torch.get_num_threads())
        if variable is not None:
            logger.warning(
                "threads: %s binds the thread that has imported torch to %d of the processors, and with it updates and "
                "the drive's work; unset it (taskset and numactl restrict a process as a whole)",
                variable,
                cpu_adam.num_threads(),
            )
        threads = None if config.threads is None else cpu_adam.Threads(config.threads)
        if threads is not None:
            undo.callback(threads.close)
        writer, forwards = ParameterWriter(binding, life.require_open), Forwards()
        changes = OutsideChanges(binding, forwards, manager, writer)
        steps = _steps(model, optimizer, rule, config, manager, binding, changes, calls)
        if steps.optimizer is not None:
            undo.callback(steps.put_back, optimizer)
        if run is not None:
            _open_run(run, plan, unit_bytes, model, binding, manager, steps)
        _fill(manager, loader, run, steps, optimizer)
        groups = () if steps.optimizer is None else steps.optimizer.param_groups
        several.agree_on_values(manager, loader.digests, several.facts_of_groups(groups, tree.names()))
        activations = _activations(manager, budgets, plan, config, device, undo)  # counts what comes from here on
        book = GradientBook(tree.units, tree.parameters, manager, place, steps.averaging)
        asked = steps.calls(calls)
        hooks = Hooks(model, binding, forwards, changes, manager, activations, book, place, asked)
        undo.callback(hooks.detach)
        hooks.attach()
        if steps.optimizer is not None:
            steps.optimizer.register_state_dict_pre_hook(hooks.left_out.look)
        if recomputing is not None and config.activations == RECOMPUTE:
            undo.callback(recomputing.detach)
            recomputing.attach()
        memory = DictMemory(budgets[Tier.HOST], config.paths())
        tensors = ModuleTensors(model, hooks, changes, life.require_open, memory)
        undo.callback(tensors.detach)
        tensors.attach()
        loader.move_buffers(place, hooks.saved)
        manager.prefetch()
        together.end()  # all have one, or all undo theirs: what they give back is in slices, perhaps
        undo.pop_all()
    logger.info("plan:\n%s", plan)
    return Parts(
        device=device,
        plan=plan,
        budgets=budgets,
        counters=counters,
        tree=tree,
        hooks=hooks,
        changes=changes,
        loader=loader,
        activations=activations,
        tensors=tensors,
        book=book,
        gradients=GradientTensors(book, binding, budgets, life.require_open),
        recomputing=recomputing,
        steps=steps,
        run=run,
        ranks=manager.tiers.ranks,
        threads=threads,
    )


def _recomputing(model: nn.Module, config: Config) -> Recomputing | None:
    """Return the blocks of a model, if they may have to be computed again; with "auto" there need not be any."""
    possible = config.activations == RECOMPUTE or (config.activations == AUTO and can_recompute(model))
    return Recomputing(model, may_give_up=config.activations == AUTO) if possible else None


def _fill(
    manager: Manager,
    loader: Loader,
    run: RunFiles | None,
    steps: Steps,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None,
) -> None:
    """Give the shards their content: that of the model and its optimizer, or what a run has committed."""
    if run is not None and run.saved is not None:
        loader.take_up(manager, run.saved)
        return
    loader.load(manager)
    if steps.states is not None and isinstance(optimizer, torch.optim.Optimizer):
        steps.states.adopt(optimizer)


def _open_run(
    run: RunFiles, plan: Plan, unit_bytes: int, model: nn.Module, binding: Binding, manager: Manager, steps: Steps
) -> None:
    """Find the run that the engine goes on with, or begin one."""
    assert manager.tiers.store is not None and steps.optimizer is not None
    names = binding.tree.names()
    facts = RunFacts.of(plan, unit_bytes, steps.optimizer.made_of, binding.tree.describe_wrappers())
    groups = [[names.get(id(p), "") for p in group["params"]] for group in steps.optimizer.param_groups]
    run.open(manager.tiers.store, facts, groups, model, binding)


def _steps(
    model: nn.Module,
    optimizer: OptimizerSpec | torch.optim.Optimizer | None,
    rule: Rule | None,
    config: Config,
    manager: Manager,
    binding: Binding,
    changes: OutsideChanges,
    calls: EngineCalls,
) -> Steps:
    tree = binding.tree
    trains_fp16 = any(unit.trainable and unit.dtype == "float16" for unit in tree.units)
    run = Progress(LossScaler(config, enabled=trains_fp16, several_ranks=manager.tiers.ranks.world > 1))
    own = (rule.own, manager.tiers.optimizer_claim, tree.parameters) if rule and rule.own else None
    counts = StepCounts(tree.units, own)
    if optimizer is None or rule is None:
        return Steps(run, counts)
    memory = DictMemory(manager.tiers.budgets[Tier.HOST], config.paths())
    ranks = manager.tiers.ranks
    states = OptimizerStates(rule, calls.life.require_open, binding, changes, counts, memory, ranks)
    face = OffloadOptimizer(list(model.parameters()), optimizer, rule, run, states, calls.optimizer)
    return Steps(run, counts, states, face, Step(manager, config, rule, counts, run, _groups_of(face, tree)))


def _unit_bytes(config: Config, device_bytes: int, run: RunFiles | None) -> int:
    """Return by which size units are cut: a run keeps its cut."""
    if run is not None and run.facts is not None:
        return run.facts.unit_bytes
    return unit_bytes_of(config, device_bytes)


def _plan(
    model: nn.Module,
    config: Config,
    rule: Rule | None,
    tree: UnitTree,
    limits: dict[Tier, int],
    device: Device,
    run: RunFiles | None,
    ranks: Ranks,
    tiled: nn.Module | None,
    stage: int,
) -> Plan:
    """Return the plan; if there is none, the error names tiles of the layers of `tiled` with which there would be."""
    facts = None if run is None else run.facts
    there = ranks.world == 1 and updates_on(device, rule, config, tree)

    def request(budgets: Mapping[Tier, int], *, again: bool = False) -> Request:
        kept = ranks.world > 1 or budgets[Tier.DEVICE] == limits[Tier.DEVICE]  # all ranks have the same units
        asked = request_of(
            model,
            config,
            rule,
            tree
            if kept and not again
            else units_of(model, config, rule, _unit_bytes(config, budgets[Tier.DEVICE], run)),
            budgets,
            device_is_host=device.addressable,
            updates_on_device=there,
            rank=ranks.rank,
            world_size=ranks.world,
            nodes=ranks.owners.world,
            stage=stage,
        )
        return asked if facts is None else dataclasses.replace(asked, chunk_numel=facts.chunk_numel)

    try:
        plan = make_plan(request(limits), request)
        if run is not None and run.capacity_bytes > limits[Tier.NVME]:
            raise BudgetError(
                f"nvme budget: the files in {run.path} have {run.capacity_bytes} bytes but the limit is "
                f'{limits[Tier.NVME]}; the smallest max_memory["nvme"] that would do is {run.capacity_bytes} bytes',
                budgets={Tier.NVME.value: run.capacity_bytes},
            )
    except BudgetError as error:
        if facts is None:
            raise with_tiles(error, tiled, lambda: is_possible(request(limits, again=True))) from None
        text = f"{error}; the run in {run.path if run else ''} keeps its units and chunks"
        raise BudgetError(text, budgets=error.budgets) from error
    return plan


def _groups_of(optimizer: OffloadOptimizer, tree: UnitTree) -> Callable[[], Groups]:
    return lambda: group_of_slots(optimizer.param_groups, tree.units, tree.parameters)


def _activations(
    manager: Manager,
    budgets: dict[Tier, Budget],
    plan: Plan,
    config: Config,
    device: Device,
    undo: contextlib.ExitStack,
) -> Activations:
    meter = open_rss() if device.addressable else open_device_meter(device.place)
    if meter is not None:
        undo.callback(meter.close)
    beside_bytes = plan.request.own_bytes if device.addressable else 0
    budget, tiers = budgets[Tier.DEVICE], manager.tiers
    if not plan.near_bytes:
        return Activations(budget, manager.working, meter, beside_bytes=beside_bytes, gradient_bytes=plan.loose_bytes)
    store, drive_bytes = tiers.store, plan.request.nvme_activation_bytes
    if plan.apart_bytes:
        paths = config.paths()
        store = SwapStore(paths, plan.apart_bytes, deadline_s=tiers.deadline_s, **drives.store_options(paths))
        undo.callback(store.close)
        drive_bytes = store.capacity_bytes
    return LeavingActivations(
        budget,
        manager.working,
        meter,
        Away(tiers.activations, store, drive_bytes, apart=plan.apart_bytes > 0),
        tiers.mover,
        device.place,
        tiers.counters,
        near_bytes=plan.near_bytes,
        kept_bytes=plan.last_bytes,
        deadline_s=tiers.deadline_s,
        beside_bytes=beside_bytes,
        gradient_bytes=plan.loose_bytes,
    )
