"""Durable runs: whatever ends the process, the next engine goes on from the last commit, with the same bits."""

from __future__ import annotations

import ctypes
import errno
import gc
import itertools
import logging
import mmap
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from conftest import PROFILE
from harness import PAGE, WIDTH, batch, guess_nothing, tight
from test_durable import FaultyDisk, PowerCut, PowerDisk
from torch import nn

import offload
import offload.engine
from offload.errors import BudgetError
from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.planning.roles import Role
from offload.shards.commits import STATE_KEY, read_object
from offload.sizes import HUGE_PAGE_BYTES
from swap import (
    Fault,
    FaultAction,
    FaultTarget,
    Mode,
    SwapCorruptError,
    SwapDeadlineError,
    SwapError,
    SwapFullError,
    SwapLockedError,
    SwapStore,
)
from swap.durable.disk import Disk

pytestmark = pytest.mark.usefixtures("single_torch_thread")
TESTS = str(Path(__file__).parent)
STEPS = 12


class Net(nn.Module):
    """Four linear layers; draws from three generators, and has a buffer that every forward changes."""

    def __init__(self, dtype: torch.dtype = torch.float32, layers: int = 4) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(layers))
        self.drop = nn.Dropout(0.1)
        self.register_buffer("mean", torch.zeros(WIDTH))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.layers[0].weight.dtype)
        for layer in self.layers:
            x = self.drop(layer(x)).relu() + x
        if self.training and torch.is_grad_enabled():
            with torch.no_grad():
                self.mean.lerp_(x.float().mean(0), 0.1)
        return x.float() * (1 + random.random()) + self.mean


def options(model: nn.Module, path: Path, **more: Any) -> dict[str, Any]:
    """Options of a durable run in `path`; states and parameters are on NVMe in any case."""
    found = tight(model, path, **{name: value for name, value in more.items() if name == "dtype"})
    for option in ("nvme_path", "offload_param", "offload_optimizer"):
        del found[option]
    return {**found, "run_dir": path, **more}


def adamw() -> Any:
    return offload.AdamW(lr=1e-2)


def durable(path: Path, *, dtype: torch.dtype = torch.float32, make: Callable[[], Any] = adamw, **more: Any) -> Any:
    model = Net(dtype)
    torch.manual_seed(7)
    random.seed(7)
    optimizer = make() if make is adamw else make(model)  # type: ignore[call-arg]
    return offload.Engine(model, optimizer, **options(model, path, **more))


def position(engine: offload.Engine) -> int:
    return 0 if engine.resumed is None else int(engine.resumed.client_state["batch"])


def events(engine: offload.Engine, losses: dict[int, float], *, micro: int = 1, until: int = STEPS) -> Iterator[str]:
    """Train on from where the engine has found itself, with a pause after everything that happens."""
    assert engine.optimizer is not None
    for number in range(position(engine), until):
        value = 0.0
        for part in range(micro):
            noise = torch.rand(())  # as a data loader draws, before the step begins
            loss = engine(batch(number * micro + part) + noise).sub(1).pow(4).mean()
            value += loss.item()
            yield "forward"
            engine.backward(loss)
            del loss
            yield "backward"
            if part < micro - 1:
                engine.step()
        assert losses.setdefault(number, value) == value, f"batch {number}"
        engine.step()
        yield "step"
        for group in engine.optimizer.param_groups:  # as a scheduler does
            group["lr"] *= 0.9
        engine.client_state = {"batch": number + 1}
        yield "state"


def finish(engine: offload.Engine, losses: dict[int, float], **more: Any) -> dict[str, torch.Tensor]:
    """Train to the end; returns what is left."""
    with engine:
        for _ in events(engine, losses, **more):
            pass
        packed = engine.optimizer.state_dict()["state"]  # type: ignore[union-attr]
        states = {f"{n}.{name}": value for n, state in packed.items() for name, value in state.items()}
        return {**engine.state_dict(), **states}


def die(engine: offload.Engine) -> None:
    """Leave an engine as SIGKILL does: nothing is finished or committed."""
    assert engine._manager is not None and engine._manager.tiers.store is not None
    store = engine._manager.tiers.store
    engine._parts.hooks.detach()
    engine._life.end()
    store.close()


def assert_same(found: dict[str, Any], truth: dict[str, Any]) -> None:
    assert found.keys() == truth.keys()
    for name, value in truth.items():
        same = torch.equal(found[name], value) if isinstance(value, torch.Tensor) else found[name] == value
        assert same, name


def own_class(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.RAdam(model.parameters(), lr=1e-2)


VARIANTS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"dtype": torch.bfloat16},
    "float16": {"dtype": torch.float16, "initial_loss_scale": 2.0**11, "loss_scale_hysteresis": 1},
    "int8 moments": {"state_dtype": "int8"},
    "clipped": {"max_grad_norm": 0.1},
    "accumulated": {"gradient_accumulation_steps": 2},
    "own class": {"make": own_class},
}


@pytest.mark.few(4)
@pytest.mark.parametrize("variant", VARIANTS)
def test_a_run_that_is_killed_again_and_again_is_one_run(variant: str, tmp_path: Path) -> None:
    """Killed after forwards, backwards, steps and assignments, it loses two steps at most, and no bit."""
    given = VARIANTS[variant]
    micro = given.get("gradient_accumulation_steps", 1)
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole", **given), losses, micro=micro)
    chance = random.Random(variant)
    used = set()
    for kill in range(6):
        engine = durable(tmp_path / "killed", **given)
        done = position(engine)
        if chance.random() < 0.5:
            guess_nothing(engine)
        run = events(engine, losses, micro=micro)
        first = 0 if kill else 8 * micro
        done += list(itertools.islice(run, first + chance.randint(1, 7))).count("state")
        die(engine)
        again = durable(tmp_path / "killed", **given)
        assert done - 1 <= position(again) <= done
        if again.stats().step:
            used.add(again._manager.tiers.store.used_bytes)
        die(again)
    assert_same(finish(durable(tmp_path / "killed", **given), losses, micro=micro), truth)
    assert not used or max(used) <= min(used) + 2 * PAGE  # digits of the record


def test_a_durable_run_computes_what_torch_does(tmp_path: Path) -> None:
    model = Net()
    torch.manual_seed(7)
    random.seed(7)
    optimizer = own_class(model)  # kernels round less often than torch does
    truth = {}
    for number in range(STEPS):
        loss = model(batch(number) + torch.rand(())).sub(1).pow(4).mean()
        truth[number] = loss.item()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        for group in optimizer.param_groups:
            group["lr"] *= 0.9
    losses: dict[int, float] = {}
    engine = durable(tmp_path, make=own_class)
    for _ in events(engine, losses, until=4):
        pass
    die(engine)
    left = finish(durable(tmp_path, make=own_class), losses)
    assert losses == truth
    assert_same({name: left[name] for name in model.state_dict()}, model.state_dict())


# ---- what belongs to a commit ----


def test_what_was_found_is_told(tmp_path: Path) -> None:
    first = durable(tmp_path, resume=False)
    assert first.resumed is None and first.client_state is None
    for _ in events(first, {}, until=3):
        pass
    value = first.client_state
    value["batch"] = 99
    assert first.client_state == {"batch": 3}  # a copy each time
    first.close()
    with durable(tmp_path, resume=True) as again:
        assert again.resumed.step == again.stats().step == 3
        assert again.resumed.client_state == {"batch": 3} and again.resumed.source == str(tmp_path)
        assert again.optimizer.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.9**3)


def test_before_the_first_commit_there_is_no_run(tmp_path: Path) -> None:
    engine = durable(tmp_path)
    for event in events(engine, {}):
        if event == "state":
            break
    die(engine)
    with durable(tmp_path, resume=False) as again:
        assert again.resumed is None


@pytest.mark.parametrize("drained", [False, True])
def test_a_step_without_its_client_state_is_not_committed_by_closing(drained: bool, tmp_path: Path) -> None:
    """Between step() and the assignment, the content would stand beside the data position of the step before."""
    engine = durable(tmp_path)
    steps = 0
    for event in events(engine, {}):
        steps += event == "step"
        if drained and event == "state":
            engine.drain()
            assert engine.stats().commits == steps
        if steps == 3:
            break
    engine.close()
    with durable(tmp_path) as again:
        assert (again.resumed.step, again.resumed.client_state) == (2, {"batch": 2})


@pytest.mark.parametrize("end", ["close", "kill"])
@pytest.mark.parametrize("host", [False, True])
def test_a_step_is_committed_before_the_engine_sleeps(host: bool, end: str, tmp_path: Path) -> None:
    """With restore=False, closing does not wake it to commit; and a kill wakes nobody."""
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses, until=4)
    engine, steps = durable(tmp_path / "asleep"), 0
    for event in events(engine, losses):
        if event == "state":
            steps += 1
            engine.sleep(host=host)
            assert engine.stats().commits == steps
            if steps == 3:
                break
            engine.wake()
    if end == "close":
        engine.close(restore=False)
    else:
        die(engine)
    again = durable(tmp_path / "asleep")
    assert (again.resumed.step, again.resumed.client_state) == (3, {"batch": 3})
    assert_same(finish(again, losses, until=4), truth)


def test_a_step_without_its_client_state_is_not_committed_by_sleeping(tmp_path: Path) -> None:
    engine = durable(tmp_path)
    steps = 0
    for event in events(engine, {}):
        steps += event == "step"
        if steps == 3:
            break
    engine.sleep()
    engine.close(restore=False)
    with durable(tmp_path) as again:
        assert (again.resumed.step, again.resumed.client_state) == (2, {"batch": 2})


def fall_asleep(path: Path, *, assigned: bool) -> offload.Engine:
    """Return an engine that sleeps, with the second step not committed; its client state is `assigned` then."""
    engine = durable(path)
    for number in range(2):
        engine.backward(engine(batch(number)).pow(2).mean())
        engine.step()
        if number == 0:
            engine.client_state = {"batch": 1}
    engine.sleep()
    if assigned:
        engine.client_state = {"batch": 2}
    return engine


@pytest.mark.parametrize("restore", [None, False])
@pytest.mark.parametrize("assigned", [False, True])
def test_a_client_state_that_comes_asleep_is_committed_by_closing(
    assigned: bool, restore: bool | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where the parameters have no room to be given back, too: that alone wakes nobody."""
    monkeypatch.setattr(offload.engine, "may_restore", lambda *given: False)
    fall_asleep(tmp_path / "run", assigned=assigned).close(restore=restore)
    again = durable(tmp_path / "run")
    assert again.resumed.step == position(again) == 1 + assigned
    again.close(restore=False)


def test_a_client_state_that_cannot_be_committed_keeps_the_engine_asleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Where its memory is gone; whoever closes it all the same is told what is lost."""
    monkeypatch.setattr(offload.engine, "may_restore", lambda *given: False)
    for closed_without in (False, True):
        engine = fall_asleep(tmp_path / "run", assigned=True)
        budget = engine._parts.budgets[Tier.DEVICE]
        with budget.claim("others", budget.free_bytes):
            with pytest.raises(BudgetError, match="asleep still.*close without the client_state that was assigned"):
                engine.close()
            if closed_without:
                engine.close(restore=False)
                assert "close: the engine is closed asleep, without the client_state" in caplog.text
                assert "Nothing is lost" not in caplog.text
        engine.close()
        with durable(tmp_path / "run") as again:
            assert again.resumed.step == (3 if closed_without else 2)


def test_without_client_state_each_step_is_committed(tmp_path: Path) -> None:
    with durable(tmp_path) as engine:
        for number in range(3):
            engine.backward(engine(batch(number)).pow(2).mean())
            engine.step()
        for _ in range(2):
            engine.drain()
            assert engine.stats().commits == 3
        engine(batch(3))
        assert engine.stats().commits == 3  # nothing has changed
    with durable(tmp_path) as again:
        assert again.resumed.step == 3 and again.resumed.client_state is None


def test_changes_outside_of_steps_belong_to_the_next_commit(tmp_path: Path) -> None:
    """What is written between steps is committed with the step before; inside a step, with that step."""
    engine = durable(tmp_path)
    run = events(engine, {})
    for event in run:
        if event == "state":
            break
    weight = engine.module.layers[1].weight
    with torch.no_grad(), engine.gather(weight, modify=True):
        weight.fill_(2.0)
    assert next(run) == "forward" and next(run) == "backward"
    with torch.no_grad(), engine.gather(weight, modify=True):
        weight.fill_(3.0)
    die(engine)
    with durable(tmp_path) as again:
        assert again.resumed.step == 1
        assert again.state_dict()["layers.1.weight"].eq(2.0).all()


def test_an_evaluation_does_not_begin_the_next_step(tmp_path: Path) -> None:
    engine = durable(tmp_path)
    for number in range(2):
        engine.backward(engine(batch(number)).pow(2).mean())
        engine.step()
        with torch.no_grad():
            engine(batch(50))
        assert engine.stats().commits == number
        engine.client_state = {"batch": number + 1}
    die(engine)
    with durable(tmp_path) as again:
        assert again.resumed.client_state == {"batch": 1}


def test_tensors_and_nested_values_come_back(tmp_path: Path) -> None:
    given = {"order": torch.randperm(7), "nested": [(1, 2.5, None), {"a": b"\x00"}, float("inf")], "n": torch.tensor(3)}
    with durable(tmp_path) as engine:
        engine.optimizer.param_groups[0]["lr"] = numpy.float64(0.25)
        engine.backward(engine(batch(0)).pow(2).mean())
        engine.step()
        engine.client_state = {**given, "rate": numpy.float64(0.5)}
        with pytest.raises(offload.OffloadError, match=r"client_state.bad: expected a plain value but got one of type"):
            engine.client_state = {"bad": object()}
    with durable(tmp_path) as again:
        found = again.resumed.client_state
        assert torch.equal(found.pop("order"), given.pop("order")) and torch.equal(found.pop("n"), given.pop("n"))
        assert type(found["rate"]) is float and found == {**given, "rate": 0.5}
        rate = again.optimizer.param_groups[0]["lr"]
        assert type(rate) is float and rate == 0.25


def test_a_model_on_the_meta_device_goes_on(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    engine = durable(tmp_path / "run")
    for _ in events(engine, losses, until=4):
        pass
    engine.close()
    with torch.device("meta"):
        model = Net()
    model.mean = torch.empty(WIDTH)
    engine = offload.Engine(model, adamw(), **options(model, tmp_path / "run"))
    assert_same(finish(engine, losses), truth)


def test_budgets_may_change_and_the_cut_stays(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    engine = durable(tmp_path / "run")
    for _ in events(engine, losses, until=4):
        pass
    engine.close()
    roomy = {"device": "64MiB", "cpu": "64MiB", "nvme": "300MiB"}
    engine = durable(tmp_path / "run", max_memory=roomy, unit_bytes=None)
    assert len(engine.plan.request.units) == 4
    assert_same(finish(engine, losses), truth)
    with pytest.raises(offload.BudgetError, match=r"device budget: .* keeps its units and chunks"):
        durable(tmp_path / "run", max_memory={**roomy, "device": "1MiB"}, activation_memory=1 << 20, unit_bytes=None)
    with pytest.raises(offload.BudgetError, match=r'smallest max_memory\["nvme"\] that would do is \d+ bytes') as found:
        durable(tmp_path / "run", max_memory={**roomy, "nvme": "1MiB"}, unit_bytes=None)
    assert f"is {found.value.budgets['nvme']} bytes" in str(found.value)


def test_several_directories(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    paths = [tmp_path / "a", tmp_path / "b"]
    engine = durable(tmp_path, run_dir=paths)
    for _ in events(engine, losses, until=5):
        pass
    die(engine)
    moved = [shutil.copytree(path, tmp_path / f"{path.name}-elsewhere") for path in paths]  # of another machine, say
    for where in (paths, moved):
        assert_same(finish(durable(tmp_path, run_dir=where), losses), truth)
    with pytest.raises(SwapError, match="expected 2 paths but got 1"):
        durable(tmp_path, run_dir=paths[:1])
    for wrong in (paths[::-1], [paths[0], tmp_path / "c"], [paths[0], moved[0]]):
        with pytest.raises(SwapCorruptError, match="name the paths of the run in their order"):
            durable(tmp_path, run_dir=wrong)


# ---- checkpoints ----


def test_the_newest_of_run_and_checkpoints_is_taken(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    run, saved = tmp_path / "run", tmp_path / "saved"
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    engine = durable(run)
    for number, event in enumerate(events(engine, losses, until=5)):
        if event == "state" and number // 4 == 2:
            engine.save_checkpoint(saved)
    die(engine)
    (saved / ".saving-step-00000009-1f2e3d4c").mkdir()
    with durable(run, checkpoint_dir=saved) as newer:
        assert newer.resumed.source == str(run) and newer.resumed.step == 4
    assert "9-1f2e3d4c: a save was broken off; it is ignored" in caplog.text
    shutil.copytree(saved, tmp_path / "other")
    shutil.rmtree(run)
    engine = durable(run, checkpoint_dir=saved)
    assert engine.resumed.source == str(saved / "step-00000003")
    assert (engine.resumed.step, engine.client_state) == (3, {"batch": 3})
    assert_same(finish(engine, losses), truth)
    index = saved / "step-00000003" / "index.json"
    index.write_text(index.read_text()[:-9])
    with durable(run, checkpoint_dir=saved) as again:
        assert (again.resumed.step, again.resumed.source) == (STEPS, str(run))
    assert "index.json: is damaged" in caplog.text
    with pytest.raises(offload.CheckpointError, match="index.json: is damaged"):  # not begun anew beside it
        durable(tmp_path / "third", checkpoint_dir=saved)


def test_a_damaged_checkpoint_is_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The one before it is taken, or the run, if nothing of that was written over; the log says which."""
    caplog.set_level(logging.INFO)
    run, saved, before = tmp_path / "run", tmp_path / "saved", tmp_path / "before"
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    for until in (2, 3):
        with durable(run) as engine:
            for event in events(engine, losses, until=until):
                if event == "state":
                    engine.save_checkpoint(saved)
        if until == 2:
            shutil.copytree(run, before)
    newest = saved / "step-00000003" / "tensors-00001.safetensors"
    newest.write_bytes(newest.read_bytes()[:-1] + b"?")
    engine = durable(tmp_path / "another", checkpoint_dir=saved)
    assert "tensors-00001.safetensors: is damaged" in caplog.text
    assert f"run_dir {run}: there was no run; a new one begins" in caplog.text
    assert (engine.resumed.step, engine.resumed.source) == (2, str(saved / "step-00000002"))
    assert_same(finish(engine, losses), truth)
    text = (
        r"before: expected to go on with .* 2 steps, but .*is damaged.*step-00000003: then the run goes on from step 2$"
    )
    with pytest.raises(offload.CheckpointError, match=text):
        durable(before, checkpoint_dir=saved)
    newest.unlink()
    engine = durable(before, checkpoint_dir=saved)
    assert "tensors-00001.safetensors: is missing" in caplog.text
    assert f"run_dir {before}: goes on from step 2, of {before}" in caplog.text
    assert (engine.resumed.step, engine.resumed.source) == (2, str(before))
    assert_same(finish(engine, losses), truth)


def test_a_checkpoint_without_client_state_is_one_of_nobody(tmp_path: Path) -> None:
    """So the steps that follow it are committed without one."""

    def step(engine: Any, number: int) -> None:
        engine.backward(engine(batch(number)).pow(2).mean())
        engine.step()

    with offload.Engine(Net(), adamw(), **tight(Net(), tmp_path)) as engine:
        for number in range(3):
            step(engine, number)
        engine.save_checkpoint(tmp_path / "saved")
    with durable(tmp_path / "run", checkpoint_dir=tmp_path / "saved") as engine:
        assert engine.resumed.step == 3 and engine.resumed.client_state is None
        step(engine, 3)
    with durable(tmp_path / "run", checkpoint_dir=tmp_path / "saved") as engine:
        assert engine.resumed.step == 4 and engine.resumed.source == str(tmp_path / "run")
        engine.client_state = {"batch": 4}
        step(engine, 4)
        engine.load_checkpoint(tmp_path / "saved")
        assert engine.client_state is None, "that of the steps is of another moment"
    with durable(tmp_path / "run") as engine:
        assert engine.resumed.step == 3 and engine.resumed.client_state is None


def test_a_checkpoint_of_a_run_has_the_client_state_of_its_step(tmp_path: Path) -> None:
    with durable(tmp_path / "run") as engine:
        for number in range(2):
            engine.backward(engine(batch(number)).pow(2).mean())
            engine.step()
            if number == 1:
                text = "client_state: expected that of step 2 but it was assigned for step 1; assign"
                with pytest.raises(offload.StateError, match=text):
                    engine.save_checkpoint(tmp_path / "saved")
                engine.save_checkpoint(tmp_path / "saved", tag="given", client_state={"batch": 7})
            engine.client_state = {"batch": number + 1}
            engine.save_checkpoint(tmp_path / "saved", tag=f"{number}")
        engine(batch(2))
        engine.save_checkpoint(tmp_path / "saved", tag="next")
        with pytest.raises(offload.StateError, match="expected gradients"):
            engine.step()
        engine.save_checkpoint(tmp_path / "saved", tag="failed")  # the last one that was taken is that of before
    with durable(tmp_path / "run") as engine:
        found = {path.name: engine.load_checkpoint(path) for path in (tmp_path / "saved").iterdir() if path.is_dir()}
    assert found.pop("0") == {"batch": 1} and found.pop("given") == {"batch": 7}
    assert all(state == {"batch": 2} for state in found.values()) and len(found) == 3


def test_a_run_that_begins_beside_checkpoints_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with durable(tmp_path / "run") as engine:
        for _ in events(engine, {}, until=1):
            pass
        engine.save_checkpoint(tmp_path / "saved")
    assert "begins anew" not in caplog.text
    with durable(tmp_path / "saved") as beside:
        assert beside.resumed is None
    assert "saved: begins anew beside checkpoint step-00000001; pass checkpoint_dir='" in caplog.text
    with durable(tmp_path / "saved", checkpoint_dir=tmp_path / "saved") as again:
        assert again.resumed.step == 1


# ---- the plan ----


def test_the_plan_counts_both_versions_and_tells_what_a_commit_costs(tmp_path: Path) -> None:
    with durable(tmp_path / "run") as engine:
        plan, store = engine.plan, engine._manager.tiers.store
        for _ in events(engine, {}):
            pass
        engine.drain()
        assert engine.stats().peak_bytes["nvme"] <= plan.arena_bytes[Tier.NVME]
        assert 0 < plan.committed_bytes - store.used_bytes < 2 * plan.request.commit.record_bytes
    assert "each step is committed: about" in str(plan) and "2 flushes" in str(plan)
    with offload.Engine(Net(), adamw(), **tight(Net(), tmp_path)) as other:
        ordinary = other.plan.arena_bytes[Tier.NVME] - other.plan.early_bytes
    assert plan.arena_bytes[Tier.NVME] - ordinary == plan.committed_bytes
    with pytest.raises(offload.BudgetError, match=r"nvme budget: .* twice those of parameters and states \(run_dir"):
        durable(tmp_path / "small", max_memory={**engine.config.max_memory, "nvme": "14MiB"})


def test_frozen_units_are_on_the_drive_once_until_somebody_writes_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step does. Whoever does makes the files longer, within the budget, or is told; the run goes on."""
    monkeypatch.setattr("offload.request.RECORD_BYTES", 1 << 16)  # so that frozen units are more than all that is spare
    monkeypatch.setattr("offload.planning.sizing.NVME_SLACK_CHUNKS", 1)

    def make(name: str, nvme: int | str) -> Any:
        model = Net(layers=102)
        for layer in model.layers[:100]:
            layer.requires_grad_(False)
            for parameter in layer.parameters():
                parameter.mul_(0.01)  # so that so many of them give a finite loss
        torch.manual_seed(7)
        random.seed(7)
        given = options(model, tmp_path / name)
        return offload.Engine(model, adamw(), **{**given, "max_memory": {**given["max_memory"], "nvme": nvme}})

    def lengths(engine: offload.Engine) -> set[int]:
        assert engine._manager is not None and engine._manager.tiers.store is not None
        budget = engine._parts.budgets[Tier.NVME]
        return {engine._manager.tiers.store.capacity_bytes, budget.used_bytes}

    losses: dict[int, float] = {}
    with make("ample", "256MiB") as engine:
        plan, truth = engine.plan, {name: value.clone() for name, value in engine.state_dict().items()}
        once, numel = plan.arena_bytes[Tier.NVME], plan.chunk_numel
        units = [unit for unit in plan.request.units if not unit.trainable]
        frozen = sum(plan.request.record_bytes(unit, (Role.PARAM,), numel) for unit in units)
        for _ in events(engine, losses, until=3):
            pass
        engine.drain()
        assert lengths(engine) == {once}
        weight = engine.module.layers[0].weight
        with torch.no_grad(), engine.gather(weight, modify=True):
            weight.mul_(1.0)
        assert lengths(engine) == {once + frozen // 100}
        engine.load_state_dict(truth)  # all of it, beside the last commit
        assert lengths(engine) == {once + frozen}
    with make("ample", "256MiB") as engine:
        assert lengths(engine) == {once + frozen} and position(engine) == 3
        for name, value in engine.state_dict().items():
            assert torch.equal(value, truth[name]), name
    with pytest.raises(offload.BudgetError, match=rf'max_memory\["nvme"\] that would do is {once} bytes'):
        make("small", once - 4096)
    engine = make("tight", once)
    engine.load_state_dict(truth)  # there is no commit yet
    for _ in events(engine, losses, until=3):
        pass
    engine.drain()
    before = {name: value.clone() for name, value in engine.state_dict().items()}
    with pytest.raises(SwapFullError):
        engine.load_state_dict(truth)
    assert lengths(engine) == {once}
    die(engine)
    with make("tight", once) as engine:
        assert position(engine) >= 2
        for _ in events(engine, losses, until=3):
            pass
        engine.drain()
        for name, value in engine.state_dict().items():
            assert torch.equal(value, before[name]), name


class CountingDisk(Disk):
    """Counts flushes, and bytes of the manifest."""

    def __init__(self) -> None:
        self.flushes = self.written = 0

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.written += len(data)
        super().write(fd, data, offset)

    def sync(self, fd: int) -> None:
        self.flushes += 1
        super().sync(fd)


def use(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("swap.store.Disk", lambda: disk)
    monkeypatch.setattr("offload.checkpoint.run_files.Disk", lambda: disk)


def test_a_commit_costs_what_the_plan_says(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = CountingDisk()
    use(disk, monkeypatch)
    with durable(tmp_path) as engine:
        costs = []
        for event in events(engine, {}):
            if event == "state":
                costs.append((disk.flushes, disk.written, engine.stats().record_bytes, engine.stats().commits))
        flushes, written, record, commits = (b - a for a, b in zip(costs[2], costs[-1], strict=True))
        commit = engine.plan.request.commit
        assert commits == STEPS - 3 and flushes == commits * commit.flushes
        assert written / commits == pytest.approx(engine.plan.request.manifest_bytes(engine.plan.chunk_numel), rel=0.5)
        assert 0 < record / commits <= commit.record_bytes


# ---- faults ----


def test_after_a_fault_at_any_write_flush_or_rename_a_whole_step_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What fails once may be tried again, what goes on failing ends the run: what is there afterwards is one step."""
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses, until=4)
    for nth in range(1, 200, 3 if PROFILE == "quick" else 1):
        disk = FaultyDisk(nth, forever=nth % 2 == 0, code=errno.EIO if nth % 4 < 2 else errno.ENOSPC)
        path, engine = tmp_path / f"{nth}", None
        with monkeypatch.context() as patched:
            use(disk, patched)
            done = 0
            try:
                engine = durable(path)
                for event in events(engine, losses, until=4):
                    done += event == "state"
                engine.close()
            except OSError as error:
                assert engine is None or "the drive holds step" in str(error), error
            finally:
                if engine is not None and not engine._life.closed:
                    die(engine)
        again = durable(path)
        assert position(again) <= done and (disk.failed or position(again) == 4)
        assert_same(finish(again, losses, until=4), truth)
        shutil.rmtree(path)
        if not disk.failed:
            assert nth > 15
            return
    pytest.fail("no run passed")


@pytest.mark.parametrize("seed", range(1 if PROFILE == "quick" else 10))
def test_after_a_power_cut_a_whole_step_is_there(tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses, until=4)
    for nth in range(1 + seed, 200, 3 if PROFILE == "quick" else 1):
        path, image = tmp_path / f"{nth}", tmp_path / f"{nth}-image"
        path.mkdir()
        disk, engine, done = PowerDisk(path, image, nth, 1000 * seed + nth), None, 0
        with monkeypatch.context() as patched:
            use(disk, patched)
            try:
                engine = durable(path)
                for event in events(engine, losses, until=4):
                    done += event == "state"
                engine.close()
            except PowerCut:
                if engine is not None and not engine._life.closed:
                    die(engine)
        if not disk.cut:
            assert nth > 15
            return
        again = durable(image)
        assert done - 1 <= position(again) <= done
        assert_same(finish(again, losses, until=4), truth)
        shutil.rmtree(path)
        shutil.rmtree(image)
    pytest.fail("no run passed")


@pytest.mark.parametrize("nth", [1, 4, 9, 14])
def test_a_write_that_fails_leaves_the_last_commit(nth: int, tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses, until=6)
    engine = durable(tmp_path / "run")
    if nth % 2:
        guess_nothing(engine)
    run = events(engine, losses, until=6)
    while next(run) != "state" or engine.client_state != {"batch": 3}:
        pass
    engine._manager.tiers.store.inject(Fault(nth=nth, target=FaultTarget.WRITES, errno=errno.ENOSPC, forever=True))
    with pytest.raises((OSError, offload.StateError)):
        for _ in run:
            pass
    die(engine)
    again = durable(tmp_path / "run")
    assert 2 <= position(again) <= 5
    assert_same(finish(again, losses, until=6), truth)


def test_a_write_aside_that_failed_once_is_no_hindrance(tmp_path: Path) -> None:
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    engine = durable(tmp_path / "run")
    run = events(engine, losses)
    while next(run) != "forward" or engine.stats().commits < 3:
        pass
    engine._manager.finish_step()  # else the fault may hit the last step, which a slow drive has not brought home
    engine._manager.tiers.store.inject(Fault(target=FaultTarget.WRITES))
    before = engine.stats().early_units_dropped
    assert next(run) == "backward"
    commits = engine.stats().commits
    for _ in run:
        pass
    assert engine.stats().commits > commits + 3 and engine.stats().early_units_dropped > before
    die(engine)
    assert_same(finish(durable(tmp_path / "run"), losses), truth)


class FullDisk(Disk):
    """Has no room for a manifest while it is full."""

    def __init__(self) -> None:
        self.full = False
        self.refused = 0

    def write(self, fd: int, data: bytes, offset: int) -> None:
        self.refused += self.full
        super().write(fd, data[: 7 if self.full else len(data)], offset)
        if self.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def test_without_room_for_the_manifest_training_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The error names what is there; with room, training goes on with the same bits."""
    losses: dict[int, float] = {}
    truth = finish(durable(tmp_path / "whole"), losses)
    disk = FullDisk()
    use(disk, monkeypatch)
    engine = durable(tmp_path / "run")
    run = events(engine, losses)
    while next(run) != "state" or engine.client_state != {"batch": 4}:
        pass
    disk.full = True
    assert next(run) == "forward"
    with pytest.raises(
        SwapFullError, match=r"run: step 4 is not committed, the drive holds step 3 as a whole .*; free"
    ):
        next(run)
    assert disk.refused <= 2  # it is not tried again and again
    disk.full = False
    engine.drain()
    assert engine._durable.describe()[1:] == (4, 4)
    die(engine)
    assert_same(finish(durable(tmp_path / "run"), losses), truth)


# ---- what is refused ----


def test_a_run_of_another_model_or_optimizer_is_refused(tmp_path: Path) -> None:
    with durable(tmp_path) as engine:
        for _ in events(engine, {}, until=2):
            pass
    other = Net()
    other.layers[2] = nn.Linear(WIDTH, WIDTH, bias=False)
    other.layers.append(nn.Linear(WIDTH, WIDTH))
    with pytest.raises(offload.ConfigError, match=r"parameter layers.2.bias is missing; .*layers.4.weight is new"):
        offload.Engine(other, adamw(), **options(Net(), tmp_path))
    assert other.layers[0].weight.abs().sum() > 0  # as it was
    with pytest.raises(offload.ConfigError, match=r"the optimizer's class was AdamW and is SGD; .*states was"):
        offload.Engine(Net(), offload.SGD(lr=0.1, momentum=0.5), **options(Net(), tmp_path))
    with pytest.raises(offload.ConfigError, match="state_dtype was float32 and is int8"):
        durable(tmp_path, state_dtype="int8")
    with pytest.raises(offload.ConfigError, match="layers.0.weight was .*float32.* and is .*bfloat16"):
        durable(tmp_path, dtype=torch.bfloat16)
    with pytest.raises(offload.ConfigError, match="unit_bytes: the run in .* was cut by 4608 bytes but got 9999"):
        durable(tmp_path, unit_bytes=9999)
    model = Net()
    groups = [{"params": [p]} for p in model.parameters()]
    with pytest.raises(offload.ConfigError, match="expected param groups with the parameters of the run's"):
        offload.Engine(model, offload.AdamW(groups, lr=0.1), **options(model, tmp_path))
    for rows, text in ((WIDTH + 1, r"buffer mean has shape \(32,\) instead of \(33,\)"), (None, "it has also mean")):
        other = Net()
        other.mean = None if rows is None else torch.zeros(rows)
        with torch.no_grad():
            other.layers[0].weight.fill_(3)
        with pytest.raises(offload.ConfigError, match=f"expected the run of this model .* another one: .*{text}"):
            offload.Engine(other, adamw(), **options(Net(), tmp_path))
        assert (other.layers[0].weight == 3).all()
    with durable(tmp_path) as again:
        assert again.resumed.step == 2
        assert again.module.mean.abs().sum() > 0


def test_a_run_has_one_engine(tmp_path: Path) -> None:
    with durable(tmp_path):
        with pytest.raises(SwapLockedError, match=rf"run directory {tmp_path}: expected to be its only user but got"):
            durable(tmp_path)


def test_resume_is_what_was_asked_for(tmp_path: Path) -> None:
    with pytest.raises(
        offload.ConfigError, match="resume=True expects a run there, or a checkpoint, but there is none"
    ):
        durable(tmp_path, resume=True)
    with durable(tmp_path) as engine:
        for _ in events(engine, {}, until=2):
            pass
    with pytest.raises(
        offload.ConfigError, match="resume=False expects no run there but there is one; pass resume=True"
    ):
        durable(tmp_path, resume=False)


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({"nvme_path": "/tmp"}, "nvme_path: a durable run has its swap files in run_dir"),
        ({"offload_optimizer": "cpu"}, "offload_optimizer: expected a home on the drive, .* but got 'cpu'; leave it"),
        ({"offload_param": "none"}, "offload_param: expected a home on the drive, .* but got 'none'; leave it"),
        ({"resume": "always"}, "resume: expected True, False or \"auto\" but got 'always'"),
        ({"resume": 0}, 'resume: expected True, False or "auto" but got 0'),
        ({"resume": 1}, 'resume: expected True, False or "auto" but got 1'),
        ({"run_dir": 7}, "run_dir: expected a directory or several but got 7"),
        ({"run_dir": []}, "run_dir: expected a directory or several but got \\[\\]"),
        ({"run_dir": None, "resume": True}, "resume: expected run_dir beside it but got none"),
        ({"run_dir": None, "checkpoint_dir": "x"}, "checkpoint_dir: expected run_dir beside it but got none"),
        ({"checkpoint_dir": 7}, "checkpoint_dir: expected a directory but got 7"),
    ],
)
def test_options_that_contradict_are_refused(more: dict[str, Any], text: str, tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match=text):
        durable(tmp_path, **more)


def test_an_engine_without_a_run_says_so(tmp_path: Path) -> None:
    with pytest.raises(offload.ConfigError, match="run_dir: expected an engine that trains but got no optimizer"):
        offload.Engine(Net(), **options(Net(), tmp_path))
    with offload.Engine(Net(), adamw(), **tight(Net(), tmp_path)) as engine:
        assert engine.resumed is None
        with pytest.raises(
            offload.StateError, match="client_state: expected a durable run but the engine has no run_dir"
        ):
            engine.client_state = {}


def test_a_directory_that_cannot_be_written_to(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SwapError, match=r"file: cannot be made .*; name a directory that this user can write to"):
        durable(tmp_path / "file")


def test_a_damaged_run_is_refused_and_not_overwritten(tmp_path: Path) -> None:
    with durable(tmp_path) as engine:
        for _ in events(engine, {}, until=2):
            pass
    facts = (tmp_path / "run.json").read_text()
    (tmp_path / "run.json").unlink()
    with pytest.raises(SwapCorruptError, match="run.json is missing; restore the directory"):
        durable(tmp_path)
    (tmp_path / "run.json").write_text(facts[:100])
    with pytest.raises(SwapCorruptError, match="run.json is damaged"):
        durable(tmp_path)
    (tmp_path / "run.json").write_text(facts.replace('"run": "', '"run": "0'))
    with pytest.raises(SwapCorruptError, match="expected the record of run 0.* but got that of"):
        durable(tmp_path)
    (tmp_path / "run.json").write_text(facts.replace('"version": 2', '"version": 3'))
    with pytest.raises(SwapError, match="expected version 2 but got version 3; go on with the version"):
        durable(tmp_path)
    (tmp_path / "run.json").write_text(facts)
    with durable(tmp_path) as again:
        assert again.resumed.step == 2


def test_a_purge_of_old_files_does_not_lose_a_run(tmp_path: Path) -> None:
    """What is written once in a run looks as new as the last commit, and is written again if it is gone."""
    path = tmp_path / "run.json"
    with durable(tmp_path) as engine:
        facts = path.read_bytes()
        os.utime(path, (1, 1))
        for _ in events(engine, {}, until=2):
            pass
        engine.drain()
        assert path.stat().st_mtime > 1
        path.unlink()
        for _ in events(engine, {}, until=2):
            pass
    assert path.read_bytes() == facts
    with durable(tmp_path) as again:
        assert again.resumed.step == 4


# ---- kill -9 ----

SERVER = """
import os, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
import torch
import offload.engine
import test_durable_runs as tests

torch.set_num_threads(1)
tests.own_class(tests.Net())  # which imports what torch leaves for later
while path := sys.stdin.readline():  # a process for each: it has imported everything
    child = os.fork()
    if child:
        os.waitpid(child, 0)
        print("killed", flush=True)
        continue
    engine = tests.durable(Path(path.strip()))
    print(os.getpid(), tests.position(engine), flush=True)
    losses = {}
    for event in tests.events(engine, losses, until=1 << 30):
        if event == "state":
            number = engine.client_state["batch"] - 1
            print(number, losses[number].hex(), flush=True)
"""


def killed_runs(path: Path, kills: int, seed: int) -> Iterator[tuple[int, dict[int, float]]]:
    """Kill a run at random moments; yield where each process began, and its losses."""
    chance = random.Random(seed)
    server = subprocess.Popen(
        [sys.executable, "-c", SERVER, TESTS], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with server:
        assert server.stdin is not None and server.stdout is not None
        for _ in range(kills):
            server.stdin.write(f"{path}\n")
            server.stdin.flush()
            process, began = map(int, server.stdout.readline().split())
            stop, losses = chance.randint(0, 5), {}
            while True:
                if len(losses) == stop:
                    time.sleep(chance.random() * 0.05)  # any moment of a step will do
                    os.kill(process, signal.SIGKILL)
                line = server.stdout.readline()
                if line == "killed\n":
                    break
                number, value = line.split()
                losses[int(number)] = float.fromhex(value)
            yield began, losses


def check_kills(path: Path, kills: int, seed: int) -> None:
    truth: dict[int, float] = {}
    most, done, sizes = 0, 0, set()
    seen: list[tuple[int, dict[int, float]]] = []
    for began, losses in killed_runs(path / "killed", kills, seed):
        assert most - 1 <= began, "a kill loses the step in progress and the one that is being finished"
        done = max([began, *(number + 1 for number in losses)])
        most = max(began, done)
        seen.append((began, losses))
        data = path / "killed" / "swap.data"
        if data.exists():
            sizes.add(os.stat(data).st_blocks * 512)
    last = max(number + 1 for _, losses in seen for number in losses)
    with durable(path / "whole") as engine:
        for _ in events(engine, truth, until=last):
            pass
    for _, losses in seen:
        assert all(truth[number] == value for number, value in losses.items())
    assert len(sizes) == 1 and any(began for began, _ in seen)


def test_a_process_that_is_killed_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=15, seed=1)


@pytest.mark.nightly
def test_a_process_that_is_killed_very_often_goes_on_bit_for_bit(tmp_path: Path) -> None:
    check_kills(tmp_path, kills=1000, seed=2)


def test_a_record_that_comes_late_comes_to_nobody_elses_memory(tmp_path: Path) -> None:
    """Opening a run reads it into memory of its own, which a missed deadline must not give to others."""
    with SwapStore(tmp_path, 1 << 20, mode=Mode.DURABLE, deadline_s=0.05) as store:
        size = 64 << 10
        source = HostArena(Tier.HOST, size)
        ctypes.memset(source.base_address, 1, size)
        store.put(STATE_KEY, source.base_address, size).wait(60.0)
        store.commit(60.0)
        assert read_object(store, STATE_KEY) == b"\1" * size
        store.inject(Fault(action=FaultAction.DELAY, delay_s=0.4, target=FaultTarget.READS))
        with pytest.raises(SwapDeadlineError):
            read_object(store, STATE_KEY)
        gc.collect()
        others = [mmap.mmap(-1, size + more) for more in (0, HUGE_PAGE_BYTES, 4096) * 4]
        store.drain(60.0)  # raises if the late read has failed
        assert not any(any(other[:]) for other in others)
