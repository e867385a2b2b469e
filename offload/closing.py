"""How an engine's work ends: after an error, and for good.

Owns the order in which the parts are closed, and going through with it whatever fails on the way. Next:
:mod:`offload.engine` closes.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence

import torch
from torch import nn

from offload.build import Parts
from offload.errors import RanksError, StateError
from offload.life import Life
from offload.memory.budget import Tier
from offload.module import refusals
from offload.module.absent import is_lost
from offload.shards.manager import Manager
from offload.snapshot import keep_drive

logger = logging.getLogger(__name__)


def clean_up(*steps: Callable[[], None]) -> None:
    """Take all steps, whatever fails on the way: the first error, which is on its way up, is what the user gets.

    Raises:
        BaseException: an interrupt came meanwhile.
    """
    interrupt: BaseException | None = None
    for step in steps:
        try:
            step()
        except Exception as failure:
            logger.warning("clean-up after an error: %s: %s", type(failure).__name__, failure)
        except BaseException as another:
            interrupt = another
    if interrupt is not None:
        raise interrupt


def may_restore(parts: Parts, life: Life) -> bool:
    """Tell whether the parameters can have ordinary memory again, in what is being freed where they came from."""
    room_bytes = parts.budgets[Tier.HOST].limit_bytes
    room_bytes += parts.budgets[Tier.DEVICE].limit_bytes if parts.device.addressable else 0
    return life.unusable is None and sum(unit.param_bytes for unit in parts.tree.units) <= room_bytes


def close(
    modules: Sequence[nn.Module], parts: Parts, life: Life, manager: Manager, *, restore: bool, meets: bool
) -> None:
    """Close all parts; see ``Engine.close``.

    Args:
        modules: that the engine has wrapped.
        parts: of the engine.
        life: ends here.
        manager: owner of the shards.
        restore: give the parameters ordinary memory again; the engine is awake then.
        meets: wait for the other ranks, if each has slices of parameters: what they still gather needs this one's.

    Raises:
        swap.SwapError: the parameters could not be read back, or the drive hangs.
        StateError: somebody has changed a parameter in a forward, and the change is lost.
    """
    clean_up(parts.hooks.unwind)
    if parts.plan.request.slices_parameters:
        meets = meets and life.unusable is None and (restore or not life.asleep)  # asleep, there is nothing to send
        restore = _all_restore(parts, restore=restore, meets=meets)
    lost: Exception | None = None
    if restore:
        try:
            parts.changes.adopt()
            parts.hooks.binding.refuse_rebound()
        except Exception as error:  # told when the engine is closed
            lost = error
    else:
        manager.forward.abandon()  # nobody will see what they would have made
    life.close()
    if parts.steps.optimizer is not None:
        parts.steps.optimizer.hand_back(lost=any(map(any, parts.steps.counts.counts.values())))
    with contextlib.suppress(Exception):  # closing: pending gradients are dropped, whatever became of them
        manager.reset()
    parts.tensors.detach()
    restored: dict[int, list[torch.Tensor]] = {}
    with contextlib.ExitStack() as last:  # all of it, whatever fails on the way
        last.callback(parts.ranks.close)
        if parts.threads is not None:
            last.callback(parts.threads.close)
        last.callback(_leave_modules, modules, parts, life, restored)
        last.callback(manager.close)
        last.callback(parts.hooks.detach)
        last.callback(parts.activations.close)
        last.callback(keep_drive, parts, manager)
        if parts.recomputing is not None:
            last.callback(parts.recomputing.detach)
        if restore:
            restored.update(parts.loader.unload(manager))
    if lost is not None:
        raise lost


def _all_restore(parts: Parts, *, restore: bool, meets: bool) -> bool:
    """Wait for the ranks, each of which has slices of parameters; tell whether all of them give parameters back."""
    try:
        if meets:
            all_restore = all(wanted for (wanted,) in parts.ranks.agree("closing", numbers=[restore]).numbers)
            if restore and not all_restore:
                logger.warning("close: parameters are not restored, for another rank closes without")
            return all_restore
    except RanksError as error:
        logger.warning("close: %s; parameters are not restored", str(error))
    parts.ranks.close()  # nobody waits any more for what was asked of them ahead
    return False


def _leave_modules(
    modules: Sequence[nn.Module], parts: Parts, life: Life, restored: dict[int, list[torch.Tensor]]
) -> None:
    """Give the modules what was restored, or a guard against being used."""
    life.end()
    parts.loader.give_back(restored)
    for module in () if restored else modules:
        _Guard(module)


class _Guard:
    """Refuses a module's forward, as long as any parameter's content is lost."""

    def __init__(self, module: nn.Module) -> None:
        self._hook = module.register_forward_pre_hook(self)

    def __call__(self, module: nn.Module, args: object) -> None:
        for name, parameter in module.named_parameters():
            if is_lost(parameter):
                raise StateError(f"model: parameter {name}: {refusals.LOST}")
        self._hook.remove()
