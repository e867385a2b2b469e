"""Durable runs of several ranks: whoever is killed when, all go on from a step that all have, with the same bits."""

from __future__ import annotations

import logging
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
from several_ranks import Ended, Raised, run
from test_rank_checkpoint_errors import error_of, instead
from test_stage_1 import batch, net, options

from offload import AdamW, Engine
from offload.checkpoint.format.index import Index
from offload.checkpoints import Checkpoints
from offload.optim.recipe import Recipe
from swap import SwapStore, marks_of

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

WORLD, STEPS = 3, 5


def begin(name: str, path: str, world: int, stage: int, **more: Any) -> Engine:
    settings = options(name, path) | {"gradient_accumulation_steps": WORLD // world}
    if world > 1:
        settings |= {"stage": stage, "run_dir": f"{path}/run"}
        settings.pop("nvme_path")
    return Engine(net(name), AdamW(lr=0.01, weight_decay=0.1), **(settings | more))


def train(
    rank: int, world: int, name: str, path: str, stage: int, kills: dict[int, tuple[str, int]], last: int
) -> dict[str, Any]:
    """Train up to step `last`. A rank in `kills` is killed in an nth step, or at its commit."""
    where, nth = kills.get(rank, ("", 0))
    calls = under_way = 0

    def kill(real: Any, *args: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if nth == (under_way if where == "updating" else calls) and where != "committed":
            os.kill(os.getpid(), signal.SIGKILL)
        result = real(*args, **options)
        if calls == nth and where == "committed":
            os.kill(os.getpid(), signal.SIGKILL)
        return result

    owner, name_of = (Recipe, "visit") if where == "updating" else (SwapStore, "commit")
    engine = begin(name, path, world, stage)
    found: dict[str, Any] = {"losses": {}, "resumed": None, "error": ("nothing", "")}
    if world > 1 and engine.resumed is not None:
        found["resumed"] = engine.resumed.step, engine.client_state
    first = 0 if found["resumed"] is None else found["resumed"][0]

    def go_on() -> None:
        nonlocal under_way
        for step in range(first, last):
            under_way = step + 1
            for number in range(step * WORLD + rank, (step + 1) * WORLD, world):
                loss = engine(*batch(number))
                found["losses"][number] = loss.item()
                engine.backward(loss)
                engine.step()
            if world > 1:
                engine.client_state = {"step": step + 1, "rank": rank}
        found["digests"] = engine.digests()

    with instead(owner, name_of, kill):
        found["error"] = error_of(go_on)
        engine.close()
    return found


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "stage", "kills"),
    [
        ("bfloat16-int8-nvme", 3, {1: ("committed", 3)}),
        ("float32-float32-nvme", 1, {0: ("committing", 3), 1: ("committed", 3), 2: ("committed", 3)}),
        pytest.param("float32-int8-nvme", 2, {2: ("updating", 3)}, marks=pytest.mark.nightly),
        pytest.param("bfloat16-float32-nvme", 1, {0: ("committed", 1)}, marks=pytest.mark.nightly),
        pytest.param(
            "bfloat16-float32-nvme", 3, {0: ("committed", 2), 2: ("committing", 2)}, marks=pytest.mark.nightly
        ),
    ],
)
def test_killed_ranks_go_on(name: str, stage: int, kills: dict[int, tuple[str, int]], tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (one,) = run(train, 1, 1, name, str(tmp_path / "one"), stage, {}, STEPS)
    assert not isinstance(one, (Raised, Ended)), one
    losses: dict[int, float] = {}
    every = run(train, WORLD, WORLD, name, str(tmp_path), stage, kills, STEPS)
    killed = {rank for rank, found in enumerate(every) if found == Ended(-signal.SIGKILL)}
    assert killed and killed <= kills.keys()  # one that is to be killed may learn before that another one was
    for rank, found in enumerate(every):
        if rank not in killed:
            assert found["error"][0] == "RanksError", found
            losses |= found["losses"]
    every = run(train, WORLD, WORLD, name, str(tmp_path), stage, {}, STEPS)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["error"] == ("nothing", ""), found["error"]
        step = every[0]["resumed"][0]
        assert found["resumed"] == (step, {"step": step, "rank": rank})
        assert found["digests"] == one["digests"]
        losses |= found["losses"]
    assert 0 < step < STEPS
    assert losses.items() <= one["losses"].items()  # those of a killed rank went with it
    for found in run(train, WORLD, WORLD, name, str(tmp_path), stage, {}, STEPS):  # there is nothing left to do
        assert found["resumed"][0] == STEPS and found["digests"] == one["digests"], found


def test_a_rank_without_a_commit_has_all_begin_anew(tmp_path: Path) -> None:
    """Rank 1 is killed before its first commit; others have one."""
    name = "float32-float32-nvme"
    every = run(train, WORLD, WORLD, name, str(tmp_path), 1, {1: ("committing", 1)}, 2)
    assert every.pop(1) == Ended(-signal.SIGKILL)
    assert marks_of([tmp_path / "run/rank-1-of-3"]) == [-1]
    before, after = marks_of([tmp_path / "run/rank-0-of-3"])
    assert before == -1 and after > 0
    for found in run(train, WORLD, WORLD, name, str(tmp_path), 1, {}, 2):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["resumed"] is None and found["error"] == ("nothing", "")


def sleep_and_close(rank: int, world: int, path: str) -> int | None:
    engine = begin("float32-float32-nvme", path, world, 3)
    resumed = None if engine.resumed is None else engine.resumed.step
    for step in range(resumed or 0, 2):
        for number in range(step * WORLD + rank, (step + 1) * WORLD, world):
            engine.backward(engine(*batch(number)))
            engine.step()
        engine.client_state = {"step": step + 1, "rank": rank}
        engine.sleep(host=bool(step))
        if step == 0:
            engine.wake()
    engine.close(restore=False)
    return resumed


def test_ranks_commit_before_they_sleep(tmp_path: Path) -> None:
    assert run(sleep_and_close, WORLD, WORLD, str(tmp_path)) == [None] * WORLD
    assert run(sleep_and_close, WORLD, WORLD, str(tmp_path)) == [2] * WORLD


def forget(rank: int, path: str) -> list[str]:
    """Let rank 1 alone assign a client state, and not the second time."""
    engine, found = begin("float32-float32-nvme", path, WORLD, 1), list[str]()
    for step in range(2):
        engine.backward(engine(*batch(step * WORLD + rank)))
        engine.step()
        if rank == 1 and step == 0:
            engine.client_state = {"step": 1}
        try:
            engine.save_checkpoint(f"{path}/saved")
        except RuntimeError as error:
            found.append(str(error))
    engine.close(restore=False)
    return found


def test_what_one_rank_has_not_assigned_is_told_to_all(tmp_path: Path) -> None:
    for rank, found in enumerate(run(forget, WORLD, str(tmp_path))):
        assert not isinstance(found, (Raised, Ended)), found
        (text,) = found
        assert "client_state: expected that of step 2 but it was assigned for step 1" in text
        assert rank == 1 or text.startswith("rank 1: ")


def overwrite(rank: int, path: str, drains: bool) -> Any:
    """Be killed before the third commit or behind it, as rank 1; else write over what that has, and commit again."""
    engine = begin("float32-float32-nvme", path, WORLD, 1)
    found = []
    for step in range(3):
        engine.backward(engine(*batch(step * WORLD + rank)))
        engine.step()
        found.append(engine.digests())
    if rank == 1 and drains:
        engine.drain()
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    engine.drain()
    for factor in (0.5, 3.0):
        engine.load_state_dict({name: value * factor for name, value in engine.state_dict().items()})
        engine.drain()
    engine.close(restore=False)
    return found


@pytest.mark.parametrize("drains", [False, True])
def test_what_another_rank_may_lack_is_held(drains: bool, tmp_path: Path) -> None:
    every = run(overwrite, WORLD, str(tmp_path), drains)
    assert every.pop(1) == Ended(-signal.SIGKILL)
    assert not isinstance(every[0], (Raised, Ended)), every[0]
    for found in run(train, WORLD, WORLD, "float32-float32-nvme", str(tmp_path), 1, {}, 2):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["resumed"] == (2, None) and found["digests"] == every[0][1]


def write_behind_a_step(rank: int, path: str, stage: int) -> Any:
    """Write parameters behind the last step; rank 0 alone has committed it before. Then go on from that."""
    with begin("float32-float32-nvme", path, WORLD, stage) as engine:
        resumed = None if engine.resumed is None else engine.resumed.step
        if resumed is None:
            engine.backward(engine(*batch(rank)))
            engine.step()
            if rank == 0:
                engine.drain()
            values = engine.state_dict()
            engine.wait_for_ranks()
            engine.load_state_dict({name: value * 2.0 for name, value in values.items()})
        return resumed, engine.digests()


@pytest.mark.parametrize("stage", [1, 3])
def test_what_is_written_behind_a_step_is_committed(stage: int, tmp_path: Path) -> None:
    before, after = (run(write_behind_a_step, WORLD, str(tmp_path), stage) for _ in range(2))
    for one, two in zip(before, after, strict=True):
        assert not isinstance(one, (Raised, Ended)) and not isinstance(two, (Raised, Ended)), (one, two)
        assert (one[0], two[0]) == (None, 1) and one[1] == two[1]


def leave_out(rank: int, path: str) -> list[str]:
    """Let rank 1 fail behind a step; return what the log has of its commit."""
    told = list[str]()
    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("offload.durable").addHandler(handler)
    with begin("float32-float32-nvme", path, WORLD, 1) as engine:
        engine.backward(engine(*batch(rank)))
        engine.step()
        if rank == 1:
            engine._parts.ranks.fail(ValueError("a bad day"))
            engine.drain()
            return told
    return told


def test_a_commit_that_is_left_out_is_told(tmp_path: Path) -> None:
    text = "step 1 is not committed, for the ranks have failed; the drive holds step 0"
    every = run(leave_out, WORLD, str(tmp_path))
    assert [[text in line for line in told] for told in every] == [[], [True, True], []], every  # by drain and close


def open_and_close(rank: int, world: int, path: str, **more: Any) -> tuple[str, str]:
    return error_of(lambda: begin("float32-float32-nvme", path, world, 1, **more).close())


def alone(rank: int, path: str) -> tuple[str, str]:
    settings = {"run_dir": f"{path}/run", "nvme_path": None, "gradient_accumulation_steps": 1}
    return error_of(lambda: begin("float32-float32-nvme", path, 1, 1, **settings).close())


def with_a_run_on_two(rank: int, path: str) -> tuple[str, str]:
    return open_and_close(rank, WORLD, path, **({"run_dir": None, "nvme_path": path} if rank == 1 else {}))


def test_a_run_that_is_another_s_is_refused(tmp_path: Path) -> None:
    name, path = "float32-float32-nvme", str(tmp_path)
    for found in run(train, WORLD, WORLD, name, path, 1, {}, 3):
        assert found["error"] == ("nothing", ""), found
    (one,) = run(alone, 1, path)
    assert one[0] == "ConfigError" and "expected a run of 1 rank but got one of 3; go on with 3" in one[1]
    for found in run(open_and_close, 2, 2, path):
        assert found[0] in ("ConfigError", "RanksError")
        assert "expected a run of 2 ranks but got one of 3; go on with 3" in found[1]
    for found in run(with_a_run_on_two, WORLD, path):
        assert found[0] == "RanksError" and "opening run_dir on ranks 0, 2" in found[1]
    shutil.rmtree(tmp_path / "run/rank-1-of-3")
    for found in run(open_and_close, WORLD, WORLD, path):
        assert found[0] == "ConfigError" and "expected a commit that all ranks have but got [" in found[1]
        assert "[-1] on rank 1" in found[1]


def save(rank: int, name: str, path: str) -> int:
    """Save a checkpoint of where a run has come to; return its step."""
    with begin(name, path, WORLD, 2) as engine:
        assert engine.resumed is not None
        engine.save_checkpoint(f"{path}/saved")
        return engine.resumed.step


def go_on_alone(rank: int, name: str, path: str) -> dict[str, Any]:
    """Go on from that checkpoint in one process, with a run in another folder."""
    more = {"run_dir": f"{path}/other", "nvme_path": None, "checkpoint_dir": f"{path}/saved"}
    with begin(name, path, 1, 2, **more) as engine:
        assert engine.resumed is not None
        found: dict[str, Any] = {"resumed": engine.resumed.step}
        for number in range(found["resumed"] * WORLD, STEPS * WORLD):
            engine.backward(engine(*batch(number)))
            engine.step()
        return found | {"digests": engine.digests()}


def test_a_run_goes_on_with_another_number_of_ranks_through_a_checkpoint(tmp_path: Path) -> None:
    name = "bfloat16-int8-nvme"
    (tmp_path / "one").mkdir()
    (one,) = run(train, 1, 1, name, str(tmp_path / "one"), 2, {}, STEPS)
    for found in run(train, WORLD, WORLD, name, str(tmp_path), 2, {}, 3):
        assert found["error"] == ("nothing", ""), found
    assert run(save, WORLD, name, str(tmp_path)) == [3] * WORLD
    for resumed in (3, STEPS):  # from the checkpoint, then from what the other run has committed
        (found,) = run(go_on_alone, 1, name, str(tmp_path))
        assert not isinstance(found, (Raised, Ended)), found
        assert found == {"resumed": resumed, "digests": one["digests"]}


def lead(rank: int, path: str, step: int) -> dict[str, Any]:
    """Save a checkpoint ahead of a run, or load it into one that is behind; then go on."""
    with begin("bfloat16-float32-nvme", path, WORLD, 3, checkpoint_dir=f"{path}/saved") as engine:
        found: dict[str, Any] = {"resumed": None if engine.resumed is None else engine.resumed.step}
        for number in range(step, step + 2):
            engine.backward(engine(*batch(number * WORLD + rank)))
            engine.step()
        if not step:
            engine.save_checkpoint(f"{path}/saved")
        found["digests"] = engine.digests()
    return found


def test_a_checkpoint_that_is_ahead_of_the_run_is_taken(tmp_path: Path) -> None:
    before = run(lead, WORLD, str(tmp_path), 0)
    shutil.rmtree(tmp_path / "run")
    every = run(lead, WORLD, str(tmp_path), 2)
    again = run(lead, WORLD, str(tmp_path), 4)
    for one, two, three in zip(before, every, again, strict=True):
        assert not isinstance(two, (Raised, Ended)), two
        assert (one["resumed"], two["resumed"], three["resumed"]) == (None, 2, 4)
        assert two["digests"] == every[0]["digests"] != one["digests"]


def be_damaged(rank: int, path: str) -> tuple[str, str]:
    """Let rank 1 alone find no whole checkpoint, when its engine is made already."""
    if rank == 1:
        Checkpoints.newer = staticmethod(lambda *_: Index.read(Path(path) / "none"))  # type: ignore[method-assign]
    return error_of(lambda: begin("bfloat16-float32-nvme", path, WORLD, 3, checkpoint_dir=f"{path}/saved"))


def test_a_rank_that_cannot_go_on_is_told_to_all(tmp_path: Path) -> None:
    every = run(be_damaged, WORLD, str(tmp_path))
    assert every[1][0] == "CheckpointError", every
    assert every[0] == every[2] == ("RanksError", f"rank 1: CheckpointError: {every[1][1]}"), every
