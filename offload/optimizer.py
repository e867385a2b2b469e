"""Optimizers over offloaded shards: one definition of the step, wherever the bytes live.

Owns the optimizer's public face (a ``torch.optim.Optimizer``), clipping and the update itself as a visit of chunks,
which :mod:`offload.early` and :mod:`offload.pending` call when a unit's turn has come. The arithmetic of an element is
in ``csrc/cpu_adam``. Where a parameter's bytes are is none of its business.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from offload import cpu_adam, progress
from offload.config import Adam, AdamW, OptimizerSpec, check_hyper_parameters, hyper_parameters
from offload.early import EarlyUpdates
from offload.errors import TRAIN_MORE, ConfigError, StateError
from offload.generic import Records
from offload.gradients import KERNEL_DTYPE
from offload.handles import Where
from offload.manager import Manager
from offload.optimizer_dict import REMEDY, SUBJECT, by_parameter, part, saved_groups
from offload.optimizer_state import OffloadedStates, refuse
from offload.pending import PendingUpdates
from offload.placement import States
from offload.probe import OwnClass, OwnHyper
from offload.rules import STATE_SEED, Rule, StepOf, rule_of
from offload.shard import Role, Unit
from offload.stream import ALL_STATES, Chunk
from offload.takeover import give_back, take_over

StatesOf = dict[torch.Tensor, dict[str, Any]]  # by parameter
MastersOf = dict[torch.Tensor, torch.Tensor | None]  # by parameter without a state; None: it is its own master

CLIP_EPSILON = 1e-6  # added to the norm, as torch.nn.utils.clip_grad_norm_ does


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
        rule: Rule | None = None,
        run: progress.Progress | None = None,
    ) -> None:
        """Take over hyper-parameters and groups.

        Args:
            parameters: the model's parameters.
            spec: hyper-parameters, for all trainable ones or those that it names, or a torch optimizer whose groups are
                shared from now on.
            rule: of `spec`, where it is known.
            run: what is saved beside the states.

        Raises:
            ConfigError: an optimizer class or option that is not supported, or parameters of another model.
        """
        self.rule: Rule = rule or rule_of(spec)
        self._made = False
        self._states = OffloadedStates()
        self._nothing_was_said = False  # that a step found no gradient
        self._trained = {id(p): p.requires_grad for p in parameters}
        self._model = parameters  # kept alive, so that no other tensor gets their ids
        self._run = run
        self._predecessor = spec  # kept alive: hooks that it has are run
        self.on_step: Callable[[], object] = lambda: None
        self.on_zero_grad: Callable[[], None] = lambda: None
        self.gather_state: Callable[[], tuple[StatesOf, MastersOf]] = lambda: ({}, {})
        self.scatter_state: Callable[[StatesOf, MastersOf], None] = lambda states, masters: None
        if isinstance(spec, torch.optim.Optimizer):
            super().__init__([{**group} for group in spec.param_groups], dict(spec.defaults))
            self.param_groups = spec.param_groups  # shared: schedulers made for `spec` keep working
        else:
            trainable = [p for p in parameters if p.requires_grad]
            if not trainable:
                raise ConfigError("model: expected parameters that require a gradient but all are frozen")
            given: list[Any] = trainable if spec.params is None else spec.params.copies()
            try:
                super().__init__(given, hyper_parameters(spec))
            except (TypeError, ValueError) as error:  # a tensor that is no parameter, one in two groups, ...
                raise ConfigError(
                    f"optimizer: expected parameters and groups that torch.optim takes, too, but got: {error}"
                ) from error
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

        Raises:
            ConfigError: a parameter is not the model's, or was frozen then, or an option is out of its range. Nothing
                was changed.
            TypeError, ValueError: from torch: it is no group, or a parameter is in another one already.
        """
        if not self._made:
            super().add_param_group(param_group)
            return
        self._check_added(param_group)
        before = self._predecessor
        if isinstance(before, torch.optim.Optimizer):
            type(before).add_param_group(before, param_group)  # to the list that both have
        else:
            super().add_param_group(param_group)

    def release(self, *, lost: bool) -> None:
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
            raise ConfigError(
                f"optimizer: a parameter of shape {tuple(parameter.shape)} is not one of the model's; make the "
                "optimizer from model.parameters() of the same model"
            )

    def _check_added(self, group: Any) -> None:
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
        self._check_group(
            {**self.defaults, **group},
            len(self.param_groups),
            subject="optimizer",
            remedy="give the group options like those of the others",
        )

    def only_makes_states(self, squares: float) -> bool:
        """Tell whether a step is one that torch.distributed.checkpoint makes so that there are states to be loaded.

        Gradients and learning rates are zero in it. Torch makes it where ``state`` is empty, which it always is here.
        No parameter would change, but the moments that the engine has would decay.

        Args:
            squares: sum of the gradients' squares.
        """
        return squares == 0 and all(float(group.get("lr", 1)) == 0 for group in self.param_groups)

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
                stacklevel=7,  # whoever calls step()
            )

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """Update the parameters now from the gradients that have arrived, whatever the accumulation count.

        Where none has arrived, nothing happens, as in torch; hooks and LR schedulers see the call. Nothing happens,
        either, where all gradients and learning rates are zero: so libraries make states, which are there already.

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
        self.on_step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients that have arrived since the last step."""
        self.on_zero_grad()

    def state_dict(self) -> dict[str, Any]:
        """Return groups and states in torch's format, states as fp32 CPU tensors of the parameters' shapes.

        As in torch, parameters that have never been updated have no state. The fp32 masters of 16-bit ones among them
        are beside the states, in ``masters``, which torch ignores; None where the parameter itself is the master. So is
        ``run``: steps taken and skipped, and float16's loss scale.

        Unlike torch's, the tensors are copies: the optimizer sees changes of them after :meth:`load_state_dict`.

        Warns:
            UserWarning: all that takes more memory than the host budget.
        """
        packed = super().state_dict()
        positions = {parameter: position for position, parameter in enumerate(self._parameters())}
        states, masters = self.gather_state()
        packed["state"] = {positions[parameter]: state for parameter, state in states.items()}
        own = {positions[parameter]: master for parameter, master in masters.items() if parameter in positions}
        if own:
            packed["masters"] = own
        if self._run is not None:
            packed["run"] = self._run.state_dict()
        return packed

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` or the same optimizer of ``torch.optim`` returned.

        Raises:
            ConfigError: a state does not fit its parameter, groups or options do not fit the optimizer, or the dict is
                none of an optimizer's.
            StateError: parameters are in use, inside ``engine.gather`` or a forward. Nothing was loaded in either case.
        """
        groups, parameters = self.param_groups, self._parameters()
        state = part(state_dict, "state")
        masters = part(state_dict, "masters") if "masters" in state_dict else {}
        run = state_dict.get("run")
        if run is not None:
            progress.check(run)
        saved = saved_groups(state_dict, groups)
        if self._is_adamw:
            for values in saved:  # as torch's AdamW does, for dicts of Adam
                values.update({"decoupled_weight_decay": True} if "decoupled_weight_decay" in values else {})
        for number, (group, values) in enumerate(zip(groups, saved, strict=True)):
            self._check_group({**group, **values, "params": group["params"]}, number, subject=SUBJECT, remedy=REMEDY)
        numbers_of = [number for group in saved for number in group["params"]]
        states = {}
        for parameter, entry in by_parameter(state, "state", numbers_of, parameters).items():
            if not isinstance(entry, Mapping):
                raise ConfigError(f"{SUBJECT}: expected states as dicts but got {type(entry).__name__}; {REMEDY}")
            if entry:  # torch takes an empty one for none, too
                states[parameter] = dict(entry)
        own = by_parameter(masters, "masters", numbers_of, parameters)
        try:
            super().load_state_dict({"state": {}, "param_groups": saved})
            loaded = self.param_groups
        finally:
            self.param_groups = groups  # the same objects: schedulers hold them
            vars(self).pop("state", None)  # torch has put one there
        self.scatter_state(states, own)
        if run is not None and self._run is not None:
            self._run.load_state_dict(run)
        for group, values in zip(groups, loaded, strict=True):
            group.update(values)

    def _check_group(self, group: dict[str, Any], number: int, *, subject: str, remedy: str) -> None:
        """Check that steps can be made with the options of a param group that is to be loaded or added.

        Raises:
            ConfigError: one is missing, out of its range, or no number.
        """
        try:
            if self.rule.own is None:
                self.rule.hyper(group, 1, 1.0)
            self.rule.refuse_others(group)
            if self.rule.own is not None and isinstance(group.get("lr"), (int, float)):  # others are the class's own
                check_hyper_parameters({"lr": group["lr"]}, subject="param group")
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
    def _is_adamw(self) -> bool:
        given = self._predecessor
        return isinstance(given, (torch.optim.AdamW, AdamW)) and not isinstance(given, Adam)

    def _parameters(self) -> list[torch.Tensor]:
        """Return the parameters of all groups, as torch numbers them."""
        return [parameter for group in self.param_groups for parameter in group["params"]]


def trainable_units(units: Iterable[Unit]) -> list[Unit]:
    """Return the units that the optimizer updates, in update order."""
    return [unit for unit in units if unit.trainable]


def clip_factor(norm: float, max_norm: float | None) -> float:
    """Return what gradients are multiplied by, as ``torch.nn.utils.clip_grad_norm_`` defines it."""
    return 1.0 if max_norm is None else min(1.0, max_norm / (norm + CLIP_EPSILON))


class StepCounts:
    """Updates that each parameter has had: bias correction counts only those, as in torch.

    Attributes:
        counts: per trainable unit and slot.
        records: what an optimizer's own class remembers, where it makes the steps, else None.
    """

    def __init__(self, units: Iterable[Unit], own: OwnClass | None = None) -> None:
        self.counts = {unit.index: [0] * len(unit.slots) for unit in trainable_units(units)}
        self.records = Records(own) if own else None


def group_of_slots(
    optimizer: OffloadOptimizer, units: Sequence[Unit], parameters: Sequence[Sequence[torch.nn.Parameter]]
) -> dict[int, list[dict[str, Any] | None]]:
    """Return per trainable unit and slot the param group it is in, None where the optimizer leaves it out."""
    group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    return {unit.index: [group_of.get(id(p)) for p in parameters[unit.index]] for unit in trainable_units(units)}


@dataclasses.dataclass(frozen=True, slots=True)
class _Segment:
    """Elements [begin, end) of a unit with the same hyper-parameters; `shift` more are their global indices."""

    begin: int
    end: int
    shift: int
    hyper: StepOf

    def goes_on_in(self, other: _Segment) -> bool:
        """Tell whether the two are one."""
        return self.end == other.begin and self.shift == other.shift and self.hyper is other.hyper


class Recipe:
    """What a step does to each unit. All that decides on the result is read when it is made.

    What happens to groups afterwards changes nothing.
    """

    def __init__(
        self,
        manager: Manager,
        counts: StepCounts,
        groups: dict[int, list[dict[str, Any] | None]],
        *,
        rule: Rule,
        grad_scale: float,
        factors: Mapping[Where, float] | None = None,
    ) -> None:
        """Read the hyper-parameters.

        Args:
            manager: owner of the shards.
            counts: updates so far.
            groups: param group per slot.
            rule: the optimizer.
            grad_scale: factor on every gradient: clipping, averaging and loss scale in one.
            factors: what some parameters' gradients are multiplied by in addition.
        """
        self._manager = manager
        self._counts = counts
        self._groups = groups
        self._hyper_of: dict[tuple[int, int, float], StepOf] = {}
        self._whole = rule.whole
        self._make = rule.hyper
        self._grad_scale = grad_scale
        self._factors = factors or {}
        self._ranges: dict[int, list[_Segment]] = {}

    def updated(self, unit: Unit) -> list[int]:
        """Return the slots of a unit that are updated: those with a gradient that the optimizer has."""
        arrived, groups = self._manager.gradients.arrived(unit.index), self._groups[unit.index]
        return [slot for slot, group in enumerate(groups) if arrived[slot] and group is not None]

    def ranges(self, unit: Unit) -> list[_Segment]:
        """Return the ranges of a unit that are updated, in order.

        Raises:
            ConfigError: a hyper-parameter is out of its range.
        """
        known = self._ranges.get(unit.index)
        if known is not None:
            return known
        # What lies behind a parameter must not scale its last block, or count for its norm.
        exact_ends = self._whole or self._states.kind is cpu_adam.StateKind.INT8
        ranges: list[_Segment] = []
        for position in self.updated(unit):
            slot = unit.slots[position]
            end = unit.slots[position + 1].offset_numel if position + 1 < len(unit.slots) else unit.numel
            segment = _Segment(
                slot.offset_numel,
                slot.end_numel if exact_ends else end,
                slot.global_numel - slot.offset_numel,
                self._hyper(unit, position),
            )
            if ranges and not self._whole and ranges[-1].goes_on_in(segment):
                ranges[-1] = dataclasses.replace(ranges[-1], end=segment.end)
            else:
                ranges.append(segment)
        self._ranges[unit.index] = ranges
        return ranges

    def visit(self, chunk: Chunk) -> None:
        """Update a chunk of a unit that :meth:`ranges` was asked for."""
        begin = time.perf_counter()
        manager, done = self._manager, 0
        for segment in self._ranges[chunk.unit.index]:
            start, stop = max(segment.begin, chunk.begin), min(segment.end, chunk.end)
            if start < stop:
                grad_dtype = manager.gradients.dtype(chunk.unit)
                if isinstance(segment.hyper, OwnHyper):
                    assert self._counts.records is not None
                    self._counts.records.update(chunk, start, segment.hyper, self._states, grad_dtype=grad_dtype)
                else:
                    _update_range(chunk, start, stop, segment, self._states, grad_dtype=grad_dtype)
                done += stop - start
        size = sum(
            manager.chunk_bytes(chunk.unit, role, chunk.begin, chunk.begin + done)
            for role in (Role.PARAM, Role.GRAD, *ALL_STATES)
        )
        manager.counters.add("cpu_adam", size_bytes=size, seconds=time.perf_counter() - begin)

    @property
    def _states(self) -> States:
        return self._manager.plan.request.states

    def _hyper(self, unit: Unit, position: int) -> StepOf:
        group = self._groups[unit.index][position]
        assert group is not None
        count = self._counts.counts[unit.index][position] + 1
        scale = self._grad_scale * self._factors.get((unit.index, position), 1.0)
        key = (id(group), count, scale)
        hyper = self._hyper_of.get(key)
        if hyper is None:
            hyper = self._hyper_of[key] = self._make(group, count, scale)
        return hyper


def begin_step(
    manager: Manager,
    counts: StepCounts,
    recipe: Recipe,
    early: EarlyUpdates | None,
    *,
    safe_point: contextlib.AbstractContextManager[object],
) -> None:
    """Take one optimizer step with the gradients that have arrived; the updates are made when they are needed.

    Args:
        manager: owner of the shards.
        counts: updates so far; raised by one for what is updated.
        recipe: what is done.
        early: updates that were made in backward.
        safe_point: held while an update is half done.

    Raises:
        ConfigError: a hyper-parameter is out of its range.
        StateError: parameters are in use. Nothing was changed in either case.
    """
    updated = [unit for unit in trainable_units(manager.units) if recipe.ranges(unit)]
    counted = {unit.index: recipe.updated(unit) for unit in updated}
    manager.refuse_in_use(updated)
    taken = early.settle(recipe) if early is not None else set()
    left = [unit for unit in updated if unit.index not in taken]
    order, stays = manager.order_of_use(), manager.plan.stays
    left.sort(key=lambda unit: (not stays(unit), order[unit.index]))
    pending = PendingUpdates(manager, left, recipe.visit, safe_point=safe_point)
    for index, slots in counted.items():
        for slot in slots:
            counts.counts[index][slot] += 1
    viewed = [unit for unit in left if manager.working.borrowed(unit.index)]
    for unit in left:
        if stays(unit) or unit in viewed:  # whoever views parameters sees their update now, as in torch
            pending.require(unit.index)
    if viewed:
        pending.finish_open()  # and may write to them: nothing of it may be on its way home


def _update_range(
    chunk: Chunk, start: int, stop: int, segment: _Segment, states: States, *, grad_dtype: cpu_adam.Dtype
) -> None:
    unit = chunk.unit
    dtype = KERNEL_DTYPE[unit.dtype]
    param = chunk.at(Role.PARAM, start, unit.itemsize)
    split, half = dtype is cpu_adam.Dtype.BFLOAT16, dtype is cpu_adam.Dtype.FLOAT16
    found, scales = chunk.states_at(start, states)
    arrays = cpu_adam.StepArrays(
        numel=stop - start,
        grad=chunk.at(Role.GRAD, start, grad_dtype.itemsize),
        grad_dtype=grad_dtype,
        master=chunk.at(Role.MASTER, start, 2 if split else 4) if split or half else param,
        master_kind=cpu_adam.MasterKind.SPLIT if split else cpu_adam.MasterKind.FLOAT32,
        states=found,
        param=param if split else 0,
        state_kind=states.kind,
        units=scales,
        emit=param if half else 0,
        emit_dtype=dtype if half else None,
        seed=STATE_SEED,
        offset=start + segment.shift,
    )
    if isinstance(segment.hyper, cpu_adam.LambHyper):  # all of a parameter is here: see Rule.whole
        sums = cpu_adam.lamb_moments(arrays, segment.hyper)
        cpu_adam.lamb_apply(arrays, segment.hyper, segment.hyper.step_size(*sums))
    else:
        assert not isinstance(segment.hyper, OwnHyper)
        cpu_adam.step(arrays, segment.hyper)
