"""Several ranks that give their memory back together, and digests of what all of them have: those of one process."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
from several_ranks import Ended, Raised, run
from test_rank_checkpoint_errors import error_of, instead
from test_stage_1 import batch, net, options
from test_stage_1_errors import WORLD, backward, engine_of

import offload.engine
from offload import AdamW, Engine
from offload.memory.budget import Tier
from offload.sleeping import Sleeping

pytestmark = pytest.mark.cpu(reason="ranks send each other what is in host memory")

STEPS = 3
ACCUMULATION = 2
Digests = dict[str, dict[str, str]]


def train(rank: int, world: int, name: str, path: str, stage: int, host: bool | None) -> dict[str, Any]:
    """Train this rank's share; with `host`, sleep inside a step and behind one. Return all that must be equal."""
    micro_batches = WORLD * ACCUMULATION
    settings = options(name, path) | {"gradient_accumulation_steps": micro_batches // world, "nvme_path": path}
    settings |= {"stage": stage} if world > 1 else {}
    losses, norms, digests = dict[int, float](), [], list[Digests]()
    with Engine(net(name), AdamW(lr=0.01, weight_decay=0.1), **settings) as engine:
        digests.append(engine.digests())
        for step in range(STEPS):
            for micro in range(micro_batches // world):
                number = step * micro_batches + micro * world + rank
                loss = engine(*batch(number))
                engine.backward(loss)
                losses[number] = loss.item()
                del loss
                if micro == (ACCUMULATION * WORLD // world) // 2 - 1:  # half of the step's micro-batches
                    digests.append(engine.digests())
                    rest(engine, host)
                    assert engine.digests() == digests[-1]
                engine.step()
            norms.append(engine.grad_norm)
            digests.append(engine.digests())
            rest(engine, host)
        parameters = {key: value.tolist() for key, value in engine.state_dict().items()}
    return {"losses": losses, "norms": norms, "digests": digests, "parameters": parameters}


def rest(engine: Engine, host: bool | None) -> None:
    if host is None:
        return
    before = engine.stats().used_bytes
    engine.sleep(host=host)
    asleep = engine.stats().used_bytes
    assert asleep["device"] == 0 and (not host or asleep["cpu"] < before["cpu"])
    engine.wake()


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("name", "stage", "host"),
    [
        ("float32-float32-device", 3, True),
        ("bfloat16-int8-host", 1, True),
        ("bfloat16-bfloat16-nvme", 2, False),
        pytest.param("float16-float32-nvme", 3, True, marks=pytest.mark.nightly),
        pytest.param("bfloat16-int8-device", 2, True, marks=pytest.mark.nightly),
        pytest.param("float32-int8-host", 3, False, marks=pytest.mark.nightly),
    ],
)
def test_ranks_that_sleep_are_one_process_that_does_not(name: str, stage: int, host: bool, tmp_path: Path) -> None:
    """Digests of each moment, too: of parameters, masters, states, scales and gradients that wait."""
    (one,) = run(train, 1, 1, name, str(tmp_path), stage, None)
    assert not isinstance(one, (Raised, Ended)), one
    losses: dict[int, float] = {}
    for found in run(train, WORLD, WORLD, name, str(tmp_path), stage, host):
        assert not isinstance(found, (Raised, Ended)), found
        losses |= found.pop("losses")
        assert found == {key: value for key, value in one.items() if key != "losses"}
    assert losses == one["losses"]
    roles = set(one["digests"][1]["blocks.0.0.weight"])
    assert {"parameter", "gradient", "step", "exp_avg"} <= roles
    assert ("scales" in roles) == ("int8" in name)
    assert len({found["blocks.0.0.weight"]["parameter"] for found in one["digests"]}) == STEPS + 1


def fail(rank: int, path: str, stage: int) -> dict[str, Any]:
    """Let rank 1 fail to sleep, and to wake; return what each rank is told, and whether anything was changed."""
    odd, found = rank == 1, dict[str, Any]()
    engine = engine_of(stage=stage, nvme_path=path, max_memory={"device": "16MiB", "cpu": "16MiB", "nvme": "16MiB"})
    backward(engine)
    before, budgets = engine.digests(), engine._parts.budgets

    def fall_asleep(real: Any, *args: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    with instead(Sleeping, "_room", fall_asleep if odd else lambda real, *args, **options: real(*args, **options)):
        found["asleep"] = error_of(engine.sleep)
    found["awake"] = error_of(engine.wake)
    found["same"] = engine.digests() == before
    found["alone"] = error_of(engine.sleep if odd else engine.step)
    engine.zero_grad()
    before = engine.digests()
    engine.sleep(host=odd)  # which of them gives more back is its own business
    found["twice"] = error_of(engine.sleep)
    found["used"] = error_of(lambda: engine.module[0].weight.sum())
    with budgets[Tier.DEVICE].claim("others", budgets[Tier.DEVICE].free_bytes if odd else 0):
        found["wake"] = error_of(engine.wake)
        found["still"] = error_of(engine.state_dict)
    engine.wake()
    found["same again"] = engine.digests() == before
    backward(engine)
    found["step"] = engine.step()
    values = {name: value.tolist() for name, value in engine.state_dict().items()}
    engine.sleep()
    engine.close()
    found["back"] = {name: value.tolist() for name, value in engine.module.state_dict().items()} == values
    return found


def close_asleep(rank: int, how: str) -> tuple[tuple[str, str], bool, bool]:
    """Let rank 1 have no room for parameters, or none to wake; tell what close raises, and what is there then."""
    engine = engine_of(stage=3)
    backward(engine)
    engine.step()
    engine.sleep()
    odd, device = rank == 1, engine._parts.budgets[Tier.DEVICE]
    taken = device.free_bytes if odd and how == "taken" else 0
    fits = (lambda real, *args: False) if odd and how == "small" else lambda real, *args: real(*args)
    with instead(offload.engine, "may_restore", fits), device.claim("others", taken):
        raised = error_of(engine.close)
    return raised, "asleep" in repr(engine), "closed" in repr(engine)


def test_ranks_that_are_closed_asleep_do_not_wait_for_one_that_cannot() -> None:
    assert run(close_asleep, WORLD, "small") == [(("nothing", ""), False, True)] * WORLD
    (first, *others) = [*(every := run(close_asleep, WORLD, "taken"))[1:2], every[0], every[2]]
    assert first[0][0] == "BudgetError" and "asleep still" in first[0][1] and first[1:] == (True, False)
    assert others == [(("nothing", ""), False, True)] * (WORLD - 1)


@pytest.mark.parametrize("stage", [1, 3])
def test_what_fails_on_one_rank_leaves_all_as_they_were(stage: int, tmp_path: Path) -> None:
    every = run(fail, WORLD, str(tmp_path), stage)
    for rank, found in enumerate(every):
        assert not isinstance(found, (Raised, Ended)), found
        assert found["same"] and found["same again"] and found["step"] and found["back"]
        for what, kind, text in (("asleep", "MemoryError", "no room"), ("wake", "BudgetError", "held: others")):
            assert found[what][0] == (kind if rank == 1 else "RanksError") and text in found[what][1], found[what]
            assert rank == 1 or found[what][1].startswith(f"rank 1: {kind}: ")
        for what, text in (("awake", "expected to be asleep but it is awake"), ("twice", "asleep; call engine.wake")):
            assert found[what][0] == "StateError" and text in found[what][1]
        for what in ("used", "still"):
            assert found[what][0] == "StateError" and "asleep; call engine.wake" in found[what][1]
        assert found["alone"] == every[0]["alone"] and found["alone"][0] == "RanksError"
        assert "step 1 on ranks 0, 2, sleep on rank 1" in found["alone"][1]


def end(rank: int, stage: int, call: str) -> tuple[tuple[str, str], tuple[str, str]]:
    """Let rank 1 be killed while it falls asleep, or wakes up."""

    def kill(real: Any, *args: Any, **options: Any) -> Any:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return real(*args, **options)

    with engine_of(stage=stage) as engine:
        backward(engine)
        assert engine.step()
        if call == "wake":
            engine.sleep()
        with instead(Sleeping, "_on_host", kill):
            return error_of(getattr(engine, call)), error_of(lambda: backward(engine))


@pytest.mark.parametrize(("stage", "call"), [(3, "sleep"), (1, "wake")])
def test_a_killed_rank_keeps_nobody_waiting(stage: int, call: str) -> None:
    every = run(end, WORLD, stage, call)
    assert every.pop(1) == Ended(-signal.SIGKILL)
    assert every[0] == every[1] and every[0][0][0] == "RanksError", every
    assert f"no word of rank 1, ranks 0, 2 waiting in {call}" in every[0][0][1]
    assert every[0][1][0] == ("RanksError" if call == "sleep" else "StateError")


def look(rank: int) -> dict[str, tuple[str, str]]:
    """Let rank 1 look alone, and have another number of updates."""
    with engine_of() as engine:
        backward(engine)
        found = {"alone": error_of(engine.digests if rank == 1 else engine.step)}
        engine.zero_grad()
        engine._parts.steps.counts.counts[0][0] += rank == 1
        return found | {"updates": error_of(engine.digests)}


def test_digests_are_asked_for_by_all_ranks() -> None:
    every = run(look, WORLD)
    for found in every:
        assert not isinstance(found, (Raised, Ended)), found
        assert found == every[0]
        assert "step 1 on ranks 0, 2, digests on rank 1" in found["alone"][1]
        assert "expected one value of the updates in digests but got" in found["updates"][1]
