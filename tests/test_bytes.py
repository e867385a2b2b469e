"""The bytes that a step moves over each link: as predicted, to the last one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import host, nvme
from models import BY_NAME

import offload
from offload.memory.budget import Tier
from offload.planning import sizing
from offload.planning.hardware import Hardware
from offload.planning.timing import timing_of
from swap import SwapStore, wait_all

SPARE_BYTES = 256 << 20
SMALL_HOST = "400KiB"  # few gradients have room
LEARNED, MEASURED = 4, 3  # steps: the trace is known, and the working region has its size
PROMPT = dataclasses.replace(
    Hardware.load("desktop"), drive_read_bytes_s=1e15, drive_write_bytes_s=1e15, drive_mixed_bytes_s=1e15
)
MIXES: dict[str, dict[str, Any]] = {
    "all": {},
    "all, more room on the device": {"units": 9},
    "all, room for all units": {"units": 99},
    "states in int8": {"state_dtype": "int8"},
    "states alone": {"offload_param": "none", "max_memory": {"device": 32 << 20, "cpu": "16MiB", "nvme": "64MiB"}},
    "parameters alone": {"offload_optimizer": "cpu", "units": 6},
    "in 16 bits": {"dtype": "bfloat16", "units": 5},
}


@pytest.fixture
def prompt_drive(monkeypatch: pytest.MonkeyPatch) -> None:
    """A drive that is over with what it is asked for at once: no copy stays because it is not home yet."""

    def prompt(start: Callable[..., Any]) -> Callable[..., Any]:
        def wait(*arguments: Any, **named: Any) -> Any:
            started = start(*arguments, **named)
            wait_all(started if isinstance(started, list) else [started])
            return started

        return wait

    for name in ("get", "put", "get_many", "put_many"):
        monkeypatch.setattr(SwapStore, name, prompt(getattr(SwapStore, name)))


def check(model: torch.nn.Module, options: dict[str, Any]) -> offload.Stats:
    """Train, and compare what each link has moved with what was predicted."""
    kind, memory = BY_NAME["llama"], options["max_memory"]
    if "activation_memory" in options:  # more than the process takes meanwhile: the region has its size soon
        memory = {**memory, "device": memory["device"] + SPARE_BYTES}
        options = {**options, "max_memory": memory, "activation_memory": options["activation_memory"] + SPARE_BYTES}
    micro_batches = options.get("gradient_accumulation_steps", 1)
    forecast = offload.plan(model, offload.AdamW(lr=1e-3), batch=kind.batch(0), device="cpu", **without_device(options))
    assert forecast.work is not None and forecast.work.uses is not None
    with offload.Engine(model, offload.AdamW(lr=1e-3), **options) as engine:
        assert engine.plan.homes == forecast.plan.homes

        def steps(count: int) -> offload.Stats:
            for _ in range(count):
                for number in range(micro_batches):
                    engine.backward(engine(**kind.batch(number)).loss)
                    engine.step()
            return engine.stats()

        before = steps(LEARNED)
        assert engine._manager is not None
        assert engine._manager.working.size_bytes in (0, engine.plan.working_bytes)
        after = steps(MEASURED)
    last = forecast.work.uses.forward[0]  # its gradient ends backward: nothing is left that its update could go beside
    early = {unit.index for unit in forecast.plan.request.units if forecast.plan.updates_early(unit)} - {last}
    early = set() if "max_grad_norm" in options else early
    assert after.early_units - before.early_units == MEASURED * len(early)
    clips = "max_grad_norm" in options
    timing = timing_of(forecast.plan, forecast.work, PROMPT, micro_batches=micro_batches, clips=clips)
    assert timing.early_units == len(early)
    moved = timing.moved
    if micro_batches == 1:
        bound = forecast.plan.step_bytes
        assert moved.drive_read <= bound["nvme_read"] and moved.h2d <= bound["h2d"]
    counted = {link: after.links[link].bytes - before.links[link].bytes for link in ("nvme_read", "nvme_write", "h2d")}
    assert counted == {
        "nvme_read": MEASURED * moved.drive_read,
        "nvme_write": MEASURED * moved.drive_write,
        "h2d": MEASURED * moved.h2d,
    }
    return after


def without_device(options: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in options.items() if name != "device"}


@pytest.mark.few
@pytest.mark.cpu("a drive, and homes, of the CPU")
@pytest.mark.usefixtures("single_torch_thread", "prompt_drive")
@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("mix", MIXES)
def test_the_bytes_of_a_step_are_as_predicted(mix: str, clips: bool, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    clipping = {"max_grad_norm": 1e-6} if clips else {}
    stats = check(model, {**nvme(model, tmp_path, **MIXES[mix]), **clipping})
    assert stats.links["nvme_read"].bytes > 0


@pytest.mark.cpu("a drive, and homes, of the CPU")
@pytest.mark.usefixtures("single_torch_thread", "prompt_drive")
def test_the_bytes_of_accumulated_steps_are_as_predicted(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    check(model, nvme(model, tmp_path, units=6, gradient_accumulation_steps=3))


@pytest.mark.cpu("a drive, and homes, of the CPU")
@pytest.mark.usefixtures("single_torch_thread", "prompt_drive")
@pytest.mark.parametrize("micro_batches", [1, 3])
def test_the_bytes_of_gradients_at_home_on_the_drive_are_as_predicted(
    micro_batches: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each micro-batch writes them, and each but the first one reads them before, as updates do."""
    monkeypatch.setattr(sizing, "MIN_CHUNK_NUMEL", 4096)  # small slots: without room for all gradients there are some
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    options = nvme(model, tmp_path, units=6, gradient_accumulation_steps=micro_batches)
    options["max_memory"]["cpu"] = SMALL_HOST
    asked = without_device(options)
    plan = offload.plan(model, offload.AdamW(lr=1e-3), device="cpu", **asked).plan
    assert sum(homes.grad is Tier.NVME for homes in plan.homes) > len(plan.homes) / 2
    check(model, options)


@pytest.mark.cpu("a drive, and homes, of the CPU")
@pytest.mark.usefixtures("single_torch_thread", "prompt_drive")
def test_the_bytes_of_frozen_units_are_as_predicted_and_no_more_than_the_plan_says(tmp_path: Path) -> None:
    """Backward goes through all of them, to what is trained in front."""
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_("embed_tokens" in name)
    check(model, nvme(model, tmp_path))


@pytest.mark.cpu("homes are those of the CPU")
@pytest.mark.usefixtures("single_torch_thread")
def test_the_bytes_from_host_memory_are_as_predicted() -> None:
    torch.manual_seed(0)
    model = BY_NAME["llama"].build()
    stats = check(model, host(model))
    assert stats.links["h2d"].bytes > 0
