"""A user's own optimizer whose place an engine's has taken: what is called on the one happens to the other.

Owns what the user's object gets for that. Code that holds it goes on as before: its ``step``, ``zero_grad``, groups and
dicts are those of the engine's optimizer, its successor, and its step hooks run once with every step, whoever asks for
it. Its ``state`` refuses, as the successor's does, until the engine is closed. Nothing can be done when ``state`` or
``param_groups`` is assigned, so the next step refuses that.
Must not know what a step does. Next: :mod:`offload.optimizer`.
"""

from __future__ import annotations

import collections
import types
import weakref
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch

from offload.classes import is_a
from offload.errors import ConfigError, StateError
from offload.optim.offloaded_states import OffloadedStates, refuse
from offload.torch_private import below_wrappers

_Kind = TypeVar("_Kind", bound=torch.optim.Optimizer)
_taken: weakref.WeakKeyDictionary[torch.optim.Optimizer, TakenOver] = weakref.WeakKeyDictionary()


def unwrapped(optimizer: Any) -> Any:
    """Return the optimizer inside what accelerate makes of one; it goes on calling the one inside.

    Raises:
        ConfigError: it is an engine's own.
    """
    while is_a(optimizer, "accelerate", "AcceleratedOptimizer"):
        optimizer = optimizer.optimizer
    if is_a(optimizer, "offload", "OffloadOptimizer"):
        raise ConfigError(
            "optimizer: expected a spec like offload.AdamW or an optimizer of torch but got one that an engine has "
            "made; pass what that engine was made with, and load the other's state_dict()"
        )
    return optimizer


def refuse_own_step(optimizer: torch.optim.Optimizer) -> None:
    """Refuse an optimizer whose ``step`` somebody has replaced: nobody would call that one.

    Raises:
        ConfigError: so it is, and the ``step`` is neither an engine's nor a counter of an LR scheduler.
    """
    step = vars(optimizer).get("step")
    kind = type(optimizer)
    if step is None or below_wrappers(step) in (_step, below_wrappers(kind.step)):
        return
    raise ConfigError(
        f"optimizer: expected {kind.__name__} to step as its class does but got one with a step of its own, "
        f"{getattr(step, '__qualname__', type(step).__name__)}, which an engine would not call; `del optimizer.step`, "
        "and make a class of your own with that step, or use register_step_pre_hook"
    )


def take_over(optimizer: torch.optim.Optimizer, successor: torch.optim.Optimizer) -> None:
    """Let whatever is called on `optimizer` happen to `successor` from now on."""
    taken = _taken.get(optimizer)
    if taken is None:
        taken = _taken[optimizer] = TakenOver(optimizer)
    taken.hand_to(optimizer, successor)


def hide_states(optimizer: torch.optim.Optimizer) -> None:
    """Let the ``state`` of a user's optimizer, whose states have moved to the engine, refuse what would need them."""
    _taken[optimizer].hide_states(optimizer)


def give_back(optimizer: torch.optim.Optimizer, successor: torch.optim.Optimizer, *, lost: bool) -> None:
    """Make ``state`` and ``add_param_group`` of a user's optimizer its own again: its engine is closed.

    Args:
        optimizer: the user's.
        successor: the engine's, which may have another successor by now.
        lost: there were states, and they went with the engine.
    """
    taken = _taken.get(optimizer)
    if taken is not None:
        taken.give_back(optimizer, successor, lost=lost)


def idle(optimizer: _Kind) -> _Kind:
    """Return an optimizer of the same class that has nothing to update, and nobody to tell."""
    found = object.__new__(type(optimizer))
    vars(found).update((name, value) for name, value in vars(optimizer).items() if name not in GIVEN)
    vars(found).update((name, collections.OrderedDict()) for name in vars(optimizer) if name.startswith("_optimizer_"))
    vars(found).update(state=collections.defaultdict(dict), param_groups=[])
    return found


def as_hooks_get_it(state_dict: Any) -> Any:
    """Return a dict that is to be loaded, or a shallow copy of it: hooks may change that, as in torch."""
    return dict(state_dict) if isinstance(state_dict, Mapping) else state_dict


class TakenOver:
    """The link from a user's optimizer to its successor, which may change: an engine is closed, another one is made."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._successor: weakref.ref[torch.optim.Optimizer] | None = None
        self._hooks_run = False  # of the user's optimizer, by torch
        self._states: OffloadedStates | None = None  # what stands for those that an engine has
        self._lost = False  # whether states went with the last engine
        self._groups = optimizer.param_groups
        self._own = (self._own_step, self._refuse_own_load)  # hooks that are not the user's
        optimizer.register_step_pre_hook(self._own[0])
        optimizer.register_load_state_dict_pre_hook(self._own[1])
        optimizer.register_state_dict_post_hook(self._state_dict, prepend=True)  # those of the user see the states

    def hand_to(self, optimizer: torch.optim.Optimizer, successor: torch.optim.Optimizer) -> None:
        """Take `successor` for the one from now on."""
        self._successor = weakref.ref(successor)
        self._groups = successor.param_groups
        self._lost = False
        for name, function in _METHODS.items():
            setattr(optimizer, name, types.MethodType(function, optimizer))  # LR schedulers want a method
        vars(optimizer)["_step_supports_amp_scaling"] = False  # of fused=True: GradScaler would not unscale
        successor.register_step_pre_hook(self._before_step)
        successor.register_step_post_hook(self._after_step)

    def hide_states(self, optimizer: torch.optim.Optimizer) -> None:
        """Put what refuses in the place of the states, where the class has left that to torch."""
        if "state" in vars(optimizer):
            vars(optimizer)["state"] = self._states = OffloadedStates()

    def give_back(self, optimizer: torch.optim.Optimizer, successor: torch.optim.Optimizer, *, lost: bool) -> None:
        """Make what is not called through the engine the optimizer's own again."""
        if self._alive() not in (successor, None):  # None: both are being collected
            return
        self._lost = lost
        if _state_of(optimizer) is self._states:
            vars(optimizer)["state"] = collections.defaultdict(dict)
        self._states = None
        vars(optimizer).pop("add_param_group", None)

    def _refuse_replaced(self, optimizer: torch.optim.Optimizer, successor: torch.optim.Optimizer) -> None:
        """Refuse a user's optimizer of which somebody has assigned what the engine's has, too.

        Raises:
            StateError: so it is. What was assigned is dropped.
        """
        if self._states is not None and _state_of(optimizer) is not self._states:
            self.hide_states(optimizer)
            refuse("state = ...")
        own = vars(optimizer).get("param_groups", self._groups)  # not what a class makes of them
        if own is not self._groups or successor.param_groups is not self._groups:
            optimizer.param_groups = successor.param_groups = self._groups
            raise StateError(
                "optimizer: expected param_groups to be the list that it has in common with engine.optimizer but got "
                "another one, which was dropped; change the groups in place, or call add_param_group"
            )

    def _alive(self) -> torch.optim.Optimizer | None:
        return None if self._successor is None else self._successor()

    def successor(self) -> torch.optim.Optimizer:
        """Return the engine's optimizer.

        Raises:
            StateError: it is gone with its engine.
        """
        successor = self._alive()
        if successor is None:
            raise StateError(
                "optimizer: an engine has taken this optimizer over, and is gone with its states; make a new engine "
                "with it, and load what engine.optimizer.state_dict() returned before"
            )
        return successor

    # --- steps --------------------------------------------------------------------------------------------------------

    def _before_step(self, successor: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any] | None:
        """Run the hooks that the user's optimizer has before a step; they may change its arguments."""
        optimizer = self._optimizer()
        if optimizer is None or self._alive() is not successor:
            return None
        self._refuse_replaced(optimizer, successor)
        if self._hooks_run:
            return None
        args = (optimizer, *args[1:])
        for hook in list(optimizer._optimizer_step_pre_hooks.values()):
            changed = hook(optimizer, args, kwargs) if hook not in self._own else None
            if changed is not None:
                args, kwargs = changed
        return (successor, *args[1:]), kwargs

    def _after_step(self, successor: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        optimizer = self._optimizer()
        if optimizer is None or self._alive() is not successor:
            return
        optimizer._opt_called = True  # type: ignore[attr-defined]  # where schedulers look whether a step was taken
        if not self._hooks_run:
            for hook in list(optimizer._optimizer_step_post_hooks.values()):
                hook(optimizer, (optimizer, *args[1:]), kwargs)

    def _own_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """Take the successor's step where the class's own was called, by somebody who has kept it.

        Torch runs the hooks of the user's optimizer around this, and the class's step, for which nothing is left.
        """
        self._hooks_run = True
        try:
            loss = self.successor().step(*args[1:], **kwargs)
        finally:
            self._hooks_run = False
        return (idle(optimizer), *([] if loss is None else [lambda: loss])), {}

    # --- dicts --------------------------------------------------------------------------------------------------------

    def load_state_dict(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        """Load the successor's state, between the hooks that the user's optimizer has for that."""
        successor = self.successor()
        state_dict = as_hooks_get_it(state_dict)
        for before in list(optimizer._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(optimizer, state_dict) if before not in self._own else None
            state_dict = state_dict if changed is None else changed
        successor.load_state_dict(state_dict)
        if self._states is not None:
            self.hide_states(optimizer)  # what somebody has put there is replaced, as in torch
        for after in list(optimizer._optimizer_load_state_dict_post_hooks.values()):
            after(optimizer)

    def _state_dict(self, optimizer: torch.optim.Optimizer, own: dict[str, Any]) -> dict[str, Any]:
        successor = self._alive()
        if successor is not None:
            self._refuse_replaced(optimizer, successor)
            return successor.state_dict()
        if self._lost and not optimizer.state:
            self.successor()  # which refuses
        return own

    def _refuse_own_load(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        raise StateError(
            "optimizer: the engine has taken this optimizer over; call engine.optimizer.load_state_dict(state_dict)"
        )

    def add_param_group(self, optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
        """Add a group to both."""
        successor = self._alive()
        if successor is None:
            type(optimizer).add_param_group(optimizer, param_group)
        else:
            successor.add_param_group(param_group)

    def zero_grad(self, set_to_none: bool) -> None:
        """Forget the successor's gradients."""
        successor = self._alive()
        if successor is not None:
            successor.zero_grad(set_to_none)


def _step(optimizer: torch.optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
    return _taken[optimizer].successor().step(*args, **kwargs)


vars(_step)["_wrapped_by_lr_sched"] = True  # LR schedulers look for this: a step is noted for them


def _zero_grad(optimizer: torch.optim.Optimizer, set_to_none: bool = True) -> None:
    _taken[optimizer].zero_grad(set_to_none)


def _load_state_dict(optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
    _taken[optimizer].load_state_dict(optimizer, state_dict)


def _add_param_group(optimizer: torch.optim.Optimizer, param_group: dict[str, Any]) -> None:
    _taken[optimizer].add_param_group(optimizer, param_group)


_METHODS: dict[str, Callable[..., Any]] = {
    "step": _step,
    "zero_grad": _zero_grad,
    "load_state_dict": _load_state_dict,
    "add_param_group": _add_param_group,
}
GIVEN = tuple(_METHODS)  # attributes of a user's optimizer that are an engine's: copies do without them


def _state_of(optimizer: torch.optim.Optimizer) -> object:
    return vars(optimizer).get("state")
