"""What the planner is asked, for a model, an optimizer and options: with a device, or without one.

Owns how options become a request. Next: :mod:`offload.build` makes an engine of the plan, :mod:`offload.predicting`
tells what a step would take.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from offload.config import Config
from offload.kernels import cpu_adam
from offload.memory.budget import Tier
from offload.memory.device import Device
from offload.memory.device_kernels import have_kernels
from offload.optim.rules import Rule
from offload.planning.asked import WORKING_UNITS, Commit, Request
from offload.planning.partition import UnitTree, find_units
from offload.planning.roles import ADAM_STATES
from offload.sizes import whole_pages

_FORCED = {"auto": None, "none": Tier.DEVICE, "cpu": Tier.HOST, "nvme": Tier.NVME}
UNITS_PER_DEVICE = 8  # a unit is at most this part of the device budget, where modules can be split
SMALLEST_UNIT_LIMIT = 1 << 20
ACTIVATION_SHARE = 4  # this part of a budget is for activations that leave the device
NVME_ACTIVATIONS = 4  # times those in host memory
RECORD_BYTES = 1 << 20  # of a durable run, for what the user keeps there, too
RECORD_BYTES_PER_PARAMETER = 256


def unit_bytes_of(config: Config, device_bytes: int) -> int:
    """Return by which size units are cut."""
    return config.bytes_of("unit_bytes") or max(device_bytes // UNITS_PER_DEVICE, SMALLEST_UNIT_LIMIT)


def units_of(
    model: nn.Module, config: Config, rule: Rule | None, unit_bytes: int, *, ranks: int = 1, slices_frozen: bool = False
) -> UnitTree:
    """Return the units of a model; without a rule nothing of it is trained.

    Args:
        model: any module.
        config: options.
        rule: of the optimizer; None where nothing is trained.
        unit_bytes: by which size units are cut.
        ranks: how many share gradients and states.
        slices_frozen: they may share the parameters of frozen units, too.

    Raises:
        ConfigError: as :func:`offload.planning.partition.find_units`.
    """
    return find_units(
        model,
        max_unit_bytes=unit_bytes,
        dtype=getattr(torch, config.dtype) if config.dtype else None,
        train=rule is not None,
        whole=rule is not None and rule.whole and ranks == 1,  # several ranks look at slices, in two passes
        ranks=ranks,
        slices_frozen=slices_frozen,
    )


def updates_on(device: Device | None, rule: Rule | None, config: Config, tree: UnitTree) -> bool:
    """Tell whether a device that the host cannot address makes the steps of an optimizer, with the CPU's bits.

    Args:
        device: whose kernels are compared with the CPU's, unless that was done; None: one of CUDA that is not here.
        rule: of the optimizer; None where nothing is trained.
        config: options.
        tree: of units that it would update.

    Raises:
        ConfigError: states are not stored so.
    """
    if rule is None or rule.own is not None or _FORCED[config.offload_optimizer] not in (None, Tier.DEVICE):
        return False
    kind = rule.states(cpu_adam.StateKind(config.state_dtype)).kind
    if device is None:
        return have_kernels(rule.kernels, kind)
    if device.kernels is None or config.run_dir is not None:
        return False
    dtypes = {cpu_adam.Dtype[unit.dtype.upper()] for unit in tree.units if unit.trainable}
    return device.kernels.refusal(rule.kernels, kind, dtypes) is None


def request_of(
    model: nn.Module,
    config: Config,
    rule: Rule | None,
    tree: UnitTree,
    budgets: Mapping[Tier, int],
    *,
    device_is_host: bool,
    updates_on_device: bool,
    rank: int = 0,
    world_size: int = 1,
    nodes: int = 1,
    stage: int = 1,
) -> Request:
    """Return what the planner is asked.

    Args:
        model: with the units of `tree`.
        config: options.
        rule: of the optimizer; None where nothing is trained.
        tree: units.
        budgets: bytes per tier.
        device_is_host: see :class:`Request`.
        updates_on_device: see :class:`Request`.
        rank: of this process, among those that train together.
        world_size: how many these are.
        nodes: see :class:`Request`.
        stage: see :class:`Request`.
    """
    durable = config.run_dir is not None
    host_bytes, nvme_bytes = _activation_bytes(config, budgets)
    return Request(
        units=tree.units,
        budgets=budgets,
        param_tier=Tier.NVME if durable else _FORCED[config.offload_param],
        optimizer_tier=Tier.NVME if durable else _FORCED[config.offload_optimizer],
        accumulate=config.gradient_accumulation_steps * world_size > 1,
        device_is_host=device_is_host,
        updates_on_device=updates_on_device,
        activation_bytes=config.bytes_of("activation_memory"),
        activations=config.activations,
        host_activation_bytes=host_bytes,
        nvme_activation_bytes=nvme_bytes,
        chunk_numel=config.chunk_numel,
        states=rule.states(cpu_adam.StateKind(config.state_dtype)) if rule else ADAM_STATES,
        held_together=tree.held_together(model, more_than=WORKING_UNITS),
        own=rule.own.size if rule and rule.own else None,
        update_passes=2 if rule and rule.whole and rule.own is None else 1,
        commit=_commit(model, tree, rule, config) if durable else None,
        holds=config.background_checkpoints,
        rank=rank,
        world_size=world_size,
        nodes=nodes,
        stage=stage,
        clips=config.max_grad_norm is not None,
    )


def _activation_bytes(config: Config, budgets: Mapping[Tier, int]) -> tuple[int, int]:
    """Return what is set aside of host memory and of the drive for activations that leave the device, whole pages."""
    if config.activations not in ("offload", "auto"):
        return 0, 0
    host = config.bytes_of("activation_cpu_memory")
    host = whole_pages(budgets[Tier.HOST] // ACTIVATION_SHARE if host is None else host)
    nvme = config.bytes_of("activation_nvme_memory")
    if nvme is None:
        nvme = min(host * NVME_ACTIVATIONS, budgets[Tier.NVME] // ACTIVATION_SHARE)
    return host, whole_pages(nvme)


def _commit(model: nn.Module, tree: UnitTree, rule: Rule | None, config: Config) -> Commit:
    """Return what a step leaves beside the shards: names and counts, buffers, the user's own."""
    slots = sum(len(unit.slots) for unit in tree.units)
    own = rule.own.size.kept_bytes if rule and rule.own else 0
    buffers = sum(buffer.nbytes for buffer in model.buffers())
    return Commit(RECORD_BYTES + slots * RECORD_BYTES_PER_PARAMETER + own + buffers, len(config.paths()))
