"""The optimizer's public face: a ``torch.optim.Optimizer`` whose states are in the tiers.

Owns groups, options and dicts as torch's optimizers have them. The states are the business of
:mod:`offload.checkpoint.optimizer_state`, a step is that of :mod:`offload.optim.step`. Next: :mod:`offload.build`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from offload.checkpoint.optimizer_dict import REMEDY, SUBJECT, by_parameter, part, saved_groups
from offload.checkpoint.optimizer_state import OptimizerStates
from offload.errors import TRAIN_MORE, ConfigError, StateError
from offload.interrupt import Deferral
from offload.kernels.optimizers import Adam, AdamW
from offload.nested import tensors_in
from offload.optim import progress
from offload.optim.group_list import GroupList
from offload.optim.offloaded_states import OffloadedStates, refuse
from offload.optim.probe import of_added
from offload.optim.rules import Rule
from offload.optim.takeover import as_hooks_get_it, give_back, idle, take_over
from offload.spec import NOT_NEGATIVE, OptimizerSpec


@dataclasses.dataclass(frozen=True, slots=True)
class Calls:
    """What the optimizer asks of its engine.

    Attributes:
        step: takes the step.
        zero_grad: forgets the gradients.
        deferral: holds Ctrl-C back while something is half done.
    """

    step: Callable[[], object]
    zero_grad: Callable[[], None]
    deferral: Deferral


def refuse_spec(spec: OptimizerSpec | torch.optim.Optimizer, parameters: Sequence[torch.nn.Parameter]) -> None:
    """Refuse what a user gave, if no engine of a model with these parameters could train with it.

    Raises:
        ConfigError: it has parameters of another model; or it is to have all that are trained, and there are none.
    """
    if isinstance(spec, OptimizerSpec):
        _trainable(parameters)
        groups = [] if spec.params is None else spec.params.copies()
    else:
        groups = spec.param_groups
    own = set(map(id, parameters))
    for parameter in tensors_in([group["params"] for group in groups]):
        if id(parameter) not in own:
            raise _foreign(parameter)


def warn_of_zeros(call: str) -> None:
    """Say that gradients are None where zeros were asked for.

    Args:
        call: what has called this, and was called by the user.

    Warns:
        UserWarning: always.
    """
    warnings.warn(
        f"{call}: set_to_none=False would leave zeros, but gradients are None all the same: a step leaves a parameter "
        "alone that no backward has reached; drop the argument",
        stacklevel=3,
    )


def _trainable(parameters: Sequence[torch.nn.Parameter]) -> list[torch.nn.Parameter]:
    found = [parameter for parameter in parameters if parameter.requires_grad]
    if not found:
        raise ConfigError(
            "model: expected parameters that require a gradient but all are frozen; call requires_grad_(True) on what "
            "is to be trained, or leave the optimizer out to evaluate"
        )
    return found


def _foreign(parameter: torch.Tensor) -> ConfigError:
    return ConfigError(
        f"optimizer: a parameter of shape {tuple(parameter.shape)} is not one of the model's; make the optimizer from "
        "model.parameters() of the same model"
    )


class OffloadOptimizer(torch.optim.Optimizer):
    """The engine's optimizer: param groups, LR schedulers and step hooks as in torch; the states are offloaded.

    :meth:`state_dict` gathers the states as real tensors in torch's own format. ``state`` is an empty mapping that
    refuses to read or write a state.

    Options of a param group may change at any time, as in torch. Those that ask for another step than the engine was
    made for (``maximize``, ``amsgrad``, ...) are refused by the next step. ``foreach``, ``fused`` and ``capturable``
    choose among torch's implementations of the same step, and are not heeded.
    """

    def __init__(
        self,
        parameters: Sequence[torch.nn.Parameter],
        spec: OptimizerSpec | torch.optim.Optimizer,
        rule: Rule,
        run: progress.Progress,
        offloaded: OptimizerStates,
        calls: Calls,
    ) -> None:
        """Take over hyper-parameters and groups.

        Args:
            parameters: the model's parameters.
            spec: hyper-parameters, for all trainable ones or those that it names, or a torch optimizer whose groups are
                shared from now on.
            rule: of `spec`.
            run: what is saved beside the states.
            offloaded: the states.
            calls: what is asked of the engine.

        Raises:
            ConfigError: an optimizer class or option that is not supported, or parameters of another model.
        """
        self.rule = rule
        self._made = False
        self._states = OffloadedStates()
        self._nothing_was_said = False  # that a step found no gradient
        self._trained = {id(p): p.requires_grad for p in parameters}
        self._model = parameters  # kept alive, so that no other tensor gets their ids
        self._run = run
        self._predecessor = spec  # kept alive: hooks that it has are run
        self._offloaded = offloaded
        self._calls = calls
        if isinstance(spec, torch.optim.Optimizer):
            super().__init__([{**group} for group in spec.param_groups], dict(spec.defaults))
            if "param_groups" in vars(spec):  # not what a class makes of them
                spec.param_groups = GroupList(spec.param_groups)
            self.param_groups = spec.param_groups  # shared: schedulers made for `spec` keep working
        else:
            trainable = _trainable(parameters)
            given: list[Any] = trainable if spec.params is None else spec.params.copies()
            try:
                super().__init__(given, spec.options())
            except (TypeError, ValueError) as error:  # a tensor that is no parameter, one in two groups, ...
                raise ConfigError(
                    f"optimizer: expected parameters and groups that torch.optim takes, too, but got: {error}"
                ) from error
            self.param_groups = GroupList(self.param_groups)
        self.refuse_foreign()
        self._made = True
        if isinstance(spec, torch.optim.Optimizer):
            take_over(spec, self)

    @property  # type: ignore[override]
    def state(self) -> OffloadedStates:
        """An empty mapping: the engine keeps the states.

        Raises:
            StateError: it is assigned, or asked for a state or to write one; use :meth:`state_dict`.
        """
        return self._states

    @state.setter
    def state(self, value: object) -> None:
        if self._made and value is not self._states:  # torch assigns one when it makes an optimizer
            refuse("state = ...")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a group of parameters that were trainable when the engine was made and are in no group yet.

        Args:
            param_group: as in torch: ``params``, and options of its own.

        Raises:
            ConfigError: a parameter is not the model's, or was frozen then, an option is out of its range, or a class
                that steps itself cannot step on a parameter.
            BudgetError: the host budget has no room for what such a class keeps of it, or makes in a step. Nothing was
                changed in either case.
            TypeError, ValueError: from torch: it is no group, or a parameter is in another one already.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        self._refuse_added(param_group)
        before, room = self._predecessor, contextlib.ExitStack()
        if self.rule.own is not None:
            copy = self._without_hooks()
            copy.param_groups = list(self.param_groups)
            super(OffloadOptimizer, copy).add_param_group({**param_group})
            room.enter_context(self._offloaded.room_for(of_added(self.rule.own, copy.param_groups[-1])))
        with room:
            if isinstance(before, torch.optim.Optimizer):
                type(before).add_param_group(before, param_group)  # to the list that both have
            else:
                super().add_param_group(param_group)

    def hand_back(self, *, lost: bool) -> None:
        """Let a torch optimizer that was taken over be an ordinary one again, as far as it can without its engine.

        Args:
            lost: there were states, which go with the engine.
        """
        if isinstance(self._predecessor, torch.optim.Optimizer):
            give_back(self._predecessor, self, lost=lost)

    def refuse_foreign(self) -> None:
        """Refuse groups with parameters of another model.

        Raises:
            ConfigError: there is one.
        """
        if {id(p) for group in self.param_groups for p in group["params"]} <= self._trained.keys():
            return
        for parameter in self._parameters():
            self._refuse_if_foreign(parameter)

    def _refuse_if_foreign(self, parameter: torch.Tensor) -> None:
        if id(parameter) not in self._trained:
            raise _foreign(parameter)

    def _refuse_added(self, group: Any) -> None:
        """Check a group that is to be added, as far as torch does not.

        Raises:
            ConfigError: it cannot be trained.
        """
        if not isinstance(group, dict) or "params" not in group or isinstance(group["params"], (set, frozenset)):
            return  # torch says what is wrong
        given = group["params"]
        if not isinstance(given, torch.Tensor):
            given = group["params"] = list(given)  # a generator can be read once
        for member in [given] if isinstance(given, torch.Tensor) else given:
            parameter = member[1] if isinstance(member, tuple) and len(member) == 2 else member
            if not isinstance(parameter, torch.Tensor):
                return
            self._refuse_if_foreign(parameter)
            if not self._trained[id(parameter)]:
                raise ConfigError(
                    f"optimizer: expected parameters that required a gradient when the engine was made but got one of "
                    f"shape {tuple(parameter.shape)} that was frozen; leave it out, or {TRAIN_MORE}"
                )
        self._refuse_group(
            {**self.defaults, **group},
            len(self.param_groups),
            subject="optimizer",
            remedy="give the group options like those of the others",
        )

    def lists(self, parameter: torch.Tensor) -> bool:
        """Tell whether a param group has `parameter`, trained or not."""
        return any(each is parameter for each in self._parameters())

    def only_makes_states(self, squares: float) -> bool:
        """Tell whether a step is one that torch.distributed.checkpoint makes so that there are states to be loaded.

        Gradients and learning rates are zero in it. Torch makes it where ``state`` is empty, which it always is here.
        No parameter would change, but the moments that the engine has would decay.

        Args:
            squares: sum of the gradients' squares.
        """
        return squares == 0 and all(group.get("lr", 1) == 0 for group in self.param_groups)

    def note_nothing(self) -> None:
        """Say, once, that a step has found no gradient.

        Warns:
            UserWarning: the first time.
        """
        if not self._nothing_was_said:
            self._nothing_was_said = True
            warnings.warn(
                "optimizer.step: no gradient has arrived since the last step, so nothing was updated; call backward "
                "first if that was not meant. This is said once",
                stacklevel=8,  # whoever calls step()
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters now from the gradients that have arrived, whatever the accumulation count.

        Where none has arrived, nothing happens, as in torch; hooks and LR schedulers see the call. Nothing happens,
        either, where all gradients and learning rates are zero: so libraries make states, which are there already.

        Args:
            closure: computes the loss again, once, with gradients being recorded; None: it was computed.

        Returns:
            What `closure` returned.

        Raises:
            ConfigError: a param group has a parameter of another model, an option out of its range, or one that asks
                for another step than the engine was made for; nothing was changed.
            NonFiniteError: a gradient is not finite; nothing was changed.
            StateError: the engine is closed.

        Warns:
            UserWarning: no gradient has arrived, the first time.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        if self._calls.step() and isinstance(self.param_groups, GroupList):
            self.param_groups.end_run()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have arrived since the last step.

        Args:
            set_to_none: without it, the same happens, and a warning says what that changes: ``parameter.grad`` is
                None afterwards.

        Raises:
            StateError: the engine is closed or asleep.
        """
        if not set_to_none:
            warn_of_zeros("optimizer.zero_grad")
        self._calls.zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states in torch's format, states as fp32 CPU tensors of the parameters' shapes.

        As in torch, parameters that have never been updated have no state. The fp32 masters of 16-bit ones among them
        are beside the states, in ``masters``, which torch ignores; None where the parameter itself is the master. So is
        ``run``: steps taken and skipped, and float16's loss scale.

        Unlike torch's, the tensors are copies: the optimizer sees changes of them after :meth:`load_state_dict`. Where
        the host budget has no room for them they lie in files without a name on the NVMe path, which vanish with them:
        ``torch.save`` holds no memory then.

        Several ranks call this together, and each gets all of it.

        Returns:
            ``state`` by the number of the parameter, ``param_groups``, ``masters`` and ``run``.

        Raises:
            RanksError: another rank has failed, ended, not come, or is elsewhere.
            swap.SwapFullError: the drive has no room for them, either.

        Warns:
            UserWarning: all that takes more memory than the host budget, and there is no NVMe path.
        """
        for before in list(self._optimizer_state_dict_pre_hooks.values()):
            before(self)
        packed = super(OffloadOptimizer, self._without_hooks()).state_dict()
        positions = {parameter: position for position, parameter in enumerate(self._parameters())}
        with self._calls.deferral:
            states, masters = self._offloaded.gather()
        # A user may have taken parameters out of the groups since: the engine keeps what it has of those.
        packed["state"] = {positions[parameter]: state for parameter, state in states.items() if parameter in positions}
        own = {positions[parameter]: master for parameter, master in masters.items() if parameter in positions}
        if own:
            packed["masters"] = own
        packed["run"] = self._run.state_dict()
        for after in list(self._optimizer_state_dict_post_hooks.values()):
            changed = after(self, packed)
            packed = packed if changed is None else changed
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` or the same optimizer of ``torch.optim`` returned.

        Args:
            state_dict: with states in the parameters' shapes, on any device.

        Raises:
            ConfigError: a state does not fit its parameter, groups or options do not fit the optimizer, or the dict is
                none of an optimizer's.
            StateError: parameters are in use, inside ``engine.gather`` or a forward. Nothing was loaded in either case.
        """
        state_dict = as_hooks_get_it(state_dict)
        for before in list(self._optimizer_load_state_dict_pre_hooks.values()):
            changed = before(self, state_dict)
            state_dict = state_dict if changed is None else changed
        groups, parameters = self.param_groups, self._parameters()
        state = part(state_dict, "state")
        masters = part(state_dict, "masters") if "masters" in state_dict else {}
        run = state_dict.get("run")
        if run is not None:
            progress.check_state(run)
        saved = self.check_groups(state_dict)
        numbers_of = [number for group in saved for number in group["params"]]
        states = {}
        for parameter, entry in by_parameter(state, "state", numbers_of, parameters).items():
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{SUBJECT}: expected states as dicts but got {type(entry).__name__}; {REMEDY}")
            if entry:  # torch takes an empty one for none, too
                states[parameter] = dict(entry)
        own = by_parameter(masters, "masters", numbers_of, parameters)
        with self._calls.deferral:
            loaded = self._converted(saved)
            self._offloaded.replace(states, own)
            if run is not None:
                self._run.load_state_dict(run)
            for group, values in zip(groups, loaded, strict=True):
                group.update(values)
        for after in list(self._optimizer_load_state_dict_post_hooks.values()):
            after(self)

    def check_groups(self, state_dict: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Return the param groups of a state dict, with which steps can be made.

        Raises:
            ConfigError: they do not fit those of the optimizer.
        """
        groups = self.param_groups
        saved = saved_groups(state_dict, groups)
        if self.is_adamw:
            for values in saved:  # as torch's AdamW does, for dicts of Adam
                values.update({"decoupled_weight_decay": True} if "decoupled_weight_decay" in values else {})
        for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
            self._refuse_group({**group, **values, "params": group["params"]}, number, subject=SUBJECT, remedy=REMEDY)
        return saved

    def load_groups(self, saved: list[dict[str, Any]]) -> None:
        """Take over the options of groups that :meth:`check_groups` has returned, those of a run that goes on."""
        for group, values in zip(self.param_groups, self._converted(saved), strict=True):
            group.update(values)
        if isinstance(self.param_groups, GroupList):
            self.param_groups.begin_run()

    def _converted(self, saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
        """Return groups as torch loads them, with the parameters of the present ones."""
        copy = self._without_hooks()  # groups stay the same objects: schedulers hold them
        super(OffloadOptimizer, copy).load_state_dict({"state": {}, "param_groups": saved})
        return copy.param_groups

    def _without_hooks(self) -> OffloadOptimizer:
        """Return an optimizer with these groups and without hooks: they are not to see a dict without states."""
        copy = idle(self)
        copy.param_groups = self.param_groups
        return copy

    def _refuse_group(self, group: dict[str, Any], number: int, *, subject: str, remedy: str) -> None:
        """Check that steps can be made with the options of a param group that is to be loaded or added.

        Raises:
            ConfigError: one is missing, out of its range, or no number.
        """
        try:
            if self.rule.own is None:
                self.rule.hyper(group, 1, 1.0)
            self.rule.refuse_others(group)
            if self.rule.own is not None and isinstance(group.get("lr"), (int, float)):  # others are the class's own
                NOT_NEGATIVE.check(group["lr"], "param group: lr")
        except ConfigError:
            raise
        except (TypeError, ValueError, LookupError, RuntimeError) as error:
            raise ConfigError(
                f"{subject}: expected options that {type(self).__name__} can step with but got, in param group "
                f"{number}, {type(error).__name__}: {error}; {remedy}"
            ) from error

    def __reduce_ex__(self, protocol: object) -> Any:
        """Refuse to be copied or pickled: neither parameters nor states are in here.

        Raises:
            StateError: always.
        """
        raise StateError("optimizer: cannot be copied or pickled; save engine.optimizer.state_dict()")

    @property
    def made_of(self) -> str:
        """Name of the class that the user gave."""
        return type(self._predecessor).__name__

    @property
    def is_adamw(self) -> bool:
        """Whether weight decay is decoupled for all groups, whatever a loaded dict says."""
        given = self._predecessor
        return isinstance(given, (torch.optim.AdamW, AdamW)) and not isinstance(given, Adam)

    def _parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups, as torch numbers them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]
