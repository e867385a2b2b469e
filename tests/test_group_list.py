"""Which learning rate a run has that goes on: its own, unless somebody has said otherwise."""

from __future__ import annotations

import copy
import pickle
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, batch, tight
from torch import nn
from torch.optim import lr_scheduler

import offload
from offload.optim.group_list import GroupList

MAKE: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "lambda": lambda given: lr_scheduler.LambdaLR(given, lambda step: min(step / 4, 1.0)),
    "multiplicative": lambda given: lr_scheduler.MultiplicativeLR(given, lambda step: 0.9),
    "linear": lambda given: lr_scheduler.LinearLR(given, total_iters=3),
    "one cycle": lambda given: lr_scheduler.OneCycleLR(given, max_lr=1e-2, total_steps=20),
    "cyclic": lambda given: lr_scheduler.CyclicLR(given, base_lr=1e-4, max_lr=1e-2, step_size_up=3),
    "restarts": lambda given: lr_scheduler.CosineAnnealingWarmRestarts(given, T_0=4),
    "sequential": lambda given: lr_scheduler.SequentialLR(
        given, [lr_scheduler.LinearLR(given, total_iters=2), lr_scheduler.CosineAnnealingLR(given, T_max=10)], [2]
    ),
    "chained": lambda given: lr_scheduler.ChainedScheduler(
        [lr_scheduler.LinearLR(given, total_iters=2), lr_scheduler.ExponentialLR(given, 0.9)], optimizer=given
    ),
    "plateau": lambda given: lr_scheduler.ReduceLROnPlateau(given, patience=0),
}
NUMBERS = ("lr", "betas", "initial_lr", "max_lr", "min_lr")


def made() -> torch.optim.Optimizer:
    """Return an optimizer as an engine has it: of two groups, in a list that looks at its readers."""
    groups = [{"params": [nn.Parameter(torch.ones(2))], "lr": lr} for lr in (1e-3, 5e-4)]
    optimizer = torch.optim.AdamW(groups)
    optimizer.param_groups = GroupList(optimizer.param_groups)
    return optimizer


def numbers(optimizer: torch.optim.Optimizer) -> list[dict[str, Any]]:
    return [{name: group[name] for name in NUMBERS if name in group} for group in optimizer.param_groups]


def advance(optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    optimizer.step()
    optimizer.param_groups.end_run()  # type: ignore[attr-defined]
    schedule.step(*([1.0] if isinstance(schedule, lr_scheduler.ReduceLROnPlateau) else []))


def run_of(name: str, steps: int) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """Return the numbers of a run that has had so many steps, and the state of its schedule."""
    optimizer = made()
    schedule = MAKE[name](optimizer)
    for _ in range(steps):
        advance(optimizer, schedule)
    return numbers(optimizer), copy.deepcopy(schedule.state_dict())


def taken_up(run: list[dict[str, Any]]) -> torch.optim.Optimizer:
    """Return the optimizer of a new engine, which has loaded the groups of a run."""
    optimizer = made()
    for group, values in zip(optimizer.param_groups, run, strict=True):
        group.update(values)
    optimizer.param_groups.begin_run()  # type: ignore[attr-defined]
    return optimizer


@pytest.mark.parametrize("steps", [1, 2, 3, 7])
@pytest.mark.parametrize("name", MAKE)
def test_a_schedule_that_is_made_and_loaded_leaves_the_numbers(name: str, steps: int) -> None:
    run, state = run_of(name, steps)
    optimizer = taken_up(run)
    schedule = MAKE[name](optimizer)
    schedule.load_state_dict(state)
    assert numbers(optimizer) == run
    advance(optimizer, schedule)
    assert numbers(optimizer) == run_of(name, steps + 1)[0]


@pytest.mark.parametrize("name", MAKE)
def test_a_rate_that_is_set_by_hand_stays(name: str) -> None:
    """Before or after the schedule is loaded, through the list or a group that somebody holds."""
    run, state = run_of(name, 3)
    for held in (False, True):
        optimizer = taken_up(run)
        groups = list(optimizer.param_groups)
        MAKE[name](optimizer).load_state_dict(copy.deepcopy(state))
        for group in groups if held else optimizer.param_groups:
            group["lr"] = 0.125
        assert [group["lr"] for group in optimizer.param_groups] == [0.125, 0.125]
    optimizer = taken_up(run)
    optimizer.param_groups[0]["lr"] = 0.125
    assert numbers(optimizer) == [{**run[0], "lr": 0.125}, run[1]]


@pytest.mark.parametrize("name", MAKE)
def test_a_schedule_that_begins_anew_sets_its_rates(name: str) -> None:
    """As in torch, where it is made for groups that were loaded."""
    run, _ = run_of(name, 3)
    plain = torch.optim.AdamW([{"params": [nn.Parameter(torch.ones(2))], **group} for group in run])
    optimizer = taken_up(run)
    for each in (plain, optimizer):
        schedule = MAKE[name](each)
        each.step()
        for _ in range(2):
            schedule.step(*([1.0] if name == "plateau" else []))
    assert numbers(optimizer) == numbers(plain)


def test_a_second_schedule_behind_the_first_step_sets_its_rates() -> None:
    run, state = run_of("one cycle", 3)
    optimizer = taken_up(run)
    first = MAKE["one cycle"](optimizer)
    first.load_state_dict(state)
    optimizer.step()
    optimizer.param_groups.end_run()  # type: ignore[attr-defined]
    second = lr_scheduler.LambdaLR(optimizer, lambda step: 0.5)
    assert [group["lr"] for group in optimizer.param_groups] == second.get_last_lr() != run


def test_copies_are_ordinary_lists() -> None:
    groups = GroupList([{"params": [], "lr": 0.5}])
    groups.begin_run()
    for found in (copy.copy(groups), copy.deepcopy(groups), pickle.loads(pickle.dumps(groups))):
        assert type(found) is list and found == groups


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH))


@pytest.mark.parametrize("of", ["engine.optimizer", "the optimizer behind", "the optimizer before"])
def test_a_durable_run_goes_on_with_its_rates(of: str, tmp_path: Path) -> None:
    def begin(path: Path) -> tuple[offload.Engine, Any]:
        model = net()
        given: Any = offload.AdamW(lr=1e-3) if of == "engine.optimizer" else torch.optim.AdamW(model.parameters())
        schedule = MAKE["linear"](given) if of == "the optimizer before" else None
        options = tight(model, path)
        for option in ("nvme_path", "offload_param", "offload_optimizer"):
            del options[option]
        engine = offload.Engine(model, given, **options, run_dir=path)
        if schedule is None:
            schedule = MAKE["linear"](engine.optimizer if of == "engine.optimizer" else given)
        if engine.resumed is not None:
            schedule.load_state_dict(engine.resumed.client_state)
        return engine, schedule

    def rates(path: Path, ends: tuple[int, ...]) -> list[float]:
        found: list[float] = []
        for end in ends:
            engine, schedule = begin(path)
            assert engine.optimizer is not None
            while len(found) < end:
                engine.backward(engine(batch(0)).square().mean())
                assert engine.step()
                found += [group["lr"] for group in engine.optimizer.param_groups]
                schedule.step()
                engine.client_state = schedule.state_dict()
            engine.close()
        return found

    once = rates(tmp_path / "once", (8,))
    assert rates(tmp_path / "often", (2, 5, 8)) == once and len(set(once)) == 4


class _Large:
    """What a reader has in a variable."""


class _Reader:
    """Reads rates in a method, as trainers do."""

    def read(self, groups: GroupList) -> weakref.ref[_Large]:
        large = _Large()
        assert groups[0]["lr"] == 1.0
        found = weakref.ref(large)
        del large
        assert found() is None
        return found


def test_looking_at_readers_keeps_nothing_of_theirs() -> None:
    groups = GroupList([{"params": [], "lr": 1.0}])
    groups.begin_run()
    _Reader().read(groups)
    large = _Large()
    assert [group["lr"] for group in groups] == [1.0]
    found = weakref.ref(large)
    del large
    assert found() is None
