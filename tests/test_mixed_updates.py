"""Updates during backward where a unit's parameters and states live in different places: taken or dropped as one."""

from __future__ import annotations

from pathlib import Path
from typing import Any, NoReturn

import pytest
import torch
from early_updates import compare_guesses, fail_in_backward, guesses, train
from harness import LINEAR_BYTES, apart, assert_same_tensors, everything, everything_on_device, host, one_torch_thread
from hypothesis import given
from hypothesis import strategies as st
from test_host_updates import make, seen_in

from offload import AdamW, Engine
from offload.memory.budget import Tier
from offload.memory.transfer import CopyDeadlineError
from offload.shards.forward_updates import ForwardUpdates
from swap import Fault, FaultTarget, SwapDeadlineError

HOMES = [("cpu", "nvme"), ("none", "nvme"), ("nvme", "cpu")]


def mixed(homes: tuple[str, str], path: Path) -> dict[str, Any]:
    """Options: parameters and states there, room for a second version of all."""
    where = host(make(), unit_bytes=LINEAR_BYTES) | {"nvme_path": path}
    where["max_memory"] = where["max_memory"] | {"nvme": "256MiB"}
    if homes[0] == "none":
        where["max_memory"]["device"] = "64MiB"
    return where | {"offload_param": homes[0], "offload_optimizer": homes[1]}


@pytest.mark.few
@pytest.mark.parametrize("homes", HOMES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "state_dtype", "accumulation"),
    [(torch.bfloat16, "float32", 1), (torch.bfloat16, "int8", 2), (torch.float16, "float32", 1)],
    ids=str,
)
@pytest.mark.usefixtures("single_torch_thread")
def test_guesses_right_and_wrong_change_no_bit(
    dtype: torch.dtype, state_dtype: str, accumulation: int, homes: tuple[str, str], tmp_path: Path
) -> None:
    kind = AdamW(lr=1e-2), state_dtype, accumulation
    truth = guesses(make(dtype), *kind, arrives=False, **everything_on_device())
    with apart():
        ours = guesses(make(dtype), *kind, arrives=True, **mixed(homes, tmp_path))
    compare_guesses(ours, truth)
    assert truth.early == (0, 0) and ours.early[0] >= 8 and ours.early[1] >= 2
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("target", [FaultTarget.READS, FaultTarget.WRITES])
@pytest.mark.usefixtures("single_torch_thread")
def test_any_single_transfer_of_the_backward_may_fail(target: FaultTarget, tmp_path: Path) -> None:
    """Fail the n-th: neither half of the unit's update counts, and the step makes it, bit for bit the same."""
    truth = fail_in_backward(make(), target, None, arrives=False, **everything_on_device())
    dropped = 0
    with apart():
        for nth in range(1, 5):
            ours = fail_in_backward(make(), target, nth, arrives=True, **mixed(HOMES[0], tmp_path))
            assert_same_tensors(ours.tensors, truth.tensors)
            assert not ours.again
            dropped += ours.dropped
    assert dropped, "an early update was among what failed"


@pytest.mark.usefixtures("single_torch_thread")
def test_a_read_that_fails_or_is_late_behind_a_step_is_met_by_whoever_needs_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Somebody views parameters, so the step updates them, and before it units whose states must be read."""

    late = {"drive is late": SwapDeadlineError("it stalls"), "copy is late": CopyDeadlineError("it goes on")}

    def miss_deadline(how: str) -> NoReturn:
        raise late[how]

    def run(how: str, **where: Any) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
        with Engine(make(), AdamW(lr=1e-2), **where) as engine:
            view = engine.module[2].weight.data
            for number in range(3):
                train(engine, number)
                store = engine._manager.tiers.store
                with monkeypatch.context() as patch:
                    if store is not None and number == 1:
                        engine.drain()
                        if how == "fails":
                            store.inject(Fault(nth=1, target=FaultTarget.READS))
                        if how in late:
                            patch.setattr(ForwardUpdates, "_wait", lambda *_: miss_deadline(how))
                    engine.step()
                    if store is not None:
                        assert engine.stats().step == number + 1, "it is taken: the micro-batch is not run again"
                        store.clear_faults()
            return everything(engine), view.clone()

    truth = run("works", **everything_on_device())
    for how in ("works", "fails", *late):
        ours = run(how, **mixed(("cpu", "nvme"), tmp_path))
        assert_same_tensors(ours[0], truth[0])
        assert torch.equal(ours[1], truth[1])


@given(
    actions=st.lists(st.sampled_from(["calm", "clip", "read", "twice"]), min_size=1, max_size=4),
    homes=st.sampled_from(HOMES),
    waits=st.booleans(),
    nvme=st.sampled_from(["256MiB", "17MiB"]),
)
def test_any_sequence_gives_the_same(
    actions: list[str], homes: tuple[str, str], waits: bool, nvme: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with one_torch_thread():
        truth = seen_in(actions, waits=waits, **everything_on_device())
        where = mixed(homes, tmp_path_factory.mktemp("swap", numbered=True))
        where["max_memory"]["nvme"] = nvme
        with apart():
            for ours, theirs in zip(seen_in(actions, waits=waits, **where), truth, strict=True):
                assert_same_tensors(ours, theirs)


def test_the_plan_counts_both_versions(tmp_path: Path) -> None:
    with apart(), Engine(make(), AdamW(), **mixed(HOMES[0], tmp_path)) as engine:
        plan = engine.plan
        units = plan.request.units
        assert plan.spare_bytes == sum(unit.param_bytes for unit in units)
        assert plan.early_bytes == sum(plan.aside_bytes(unit) for unit in units) > 0
        assert all(plan.updates_early(unit) for unit in units)
        assert plan.arena_bytes[Tier.HOST] == engine.stats().peak_bytes["cpu"]
