"""Budgets hold as measured, not only as booked: resident set, swap files, and the plan's host need."""

from __future__ import annotations

import ctypes
import dataclasses
from pathlib import Path
from typing import Any

import benches
import pytest
import torch
from torch import nn

import offload
from offload.activations.rss import reset_high_water, status_bytes
from offload.memory import machine
from offload.memory.arena import HostArena
from offload.memory.budget import Tier
from offload.planning.asked import Request
from offload.planning.planner import make_plan
from offload.planning.units import Unit, lay_out

GIB = 1 << 30


def check(tmp_path: Path, *words: str) -> dict[str, Any]:
    """Run the bench; return its figures."""
    figures, _ = benches.run("memory", tmp_path, "--path", str(tmp_path), *words)
    # The modelling library is imported before the engine exists; its code is no part of the budgets.
    assert figures["peak_bytes"] - figures["library_bytes"] <= figures["limit_bytes"]
    for tier, budget in figures["budgets"].items():
        assert figures["budget_peaks"][tier] <= budget, tier
    assert figures["nvme_write"] > 0 and figures["nvme_read"] > 0
    assert figures["losses"][-1] < figures["losses"][0]  # and it learns
    assert sorted(path.name for path in tmp_path.iterdir()) == ["memory.json"]  # nothing is left behind
    return figures


def test_what_is_given_back_has_no_part_of_others_on_large_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel gives back pages, of 16 or 64 KiB on some machines: a part of one may be somebody else's."""
    given = list[tuple[int, int]]()

    class Mapping:
        def madvise(self, _: int, begin: int, size: int) -> None:
            given.append((begin, size))

    arena = HostArena(Tier.HOST, 1 << 20)
    buffers = [arena.take(12 << 10) for _ in range(9)]
    with monkeypatch.context() as patch:
        patch.setattr("mmap.PAGESIZE", 16 << 10)
        patch.setattr(arena, "_mapping", Mapping())
        patch.setattr(arena, "_start", arena.base_address)
        for buffer in (buffers[0], buffers[5]):
            arena.discard(buffer)
        assert given == []
        arena.discard(dataclasses.replace(buffers[3], size_bytes=40 << 10))  # from 36 to 76 KiB
    assert given == [(48 << 10, 16 << 10)]


def test_who_is_bound_by_openmp(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OMP_PROC_BIND", "GOMP_CPU_AFFINITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("os.sched_getaffinity", lambda _: {0}, raising=False)
    assert machine.bound_by(64) is None, "by taskset, perhaps"
    monkeypatch.setenv("OMP_PROC_BIND", "false")
    assert machine.bound_by(64) is None
    monkeypatch.setenv("OMP_PROC_BIND", "close")
    assert machine.bound_by(64) == "OMP_PROC_BIND" and machine.bound_by(1) is None


def test_an_engine_that_is_bound_says_so(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.setattr("offload.build.bound_by", lambda _: "OMP_PROC_BIND")
    offload.Engine(nn.Linear(4, 4), offload.AdamW(), max_memory={"device": "64MiB", "cpu": "64MiB"}).close()
    assert "threads: OMP_PROC_BIND binds the thread" in caplog.text


@pytest.mark.parametrize("home", ["none", "cpu", "nvme"])
def test_restoring_takes_no_more_than_training(home: str, tmp_path: Path) -> None:
    """Homes give way as their parameters come back: no moment has both, whatever the parameters' home."""
    width, count = 1024, 12
    unit = 4 * width * width
    model = nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(count)))
    engine = offload.Engine(
        model,
        offload.AdamW(),
        device="cpu",
        max_memory={"device": "128MiB", "cpu": "256MiB", "nvme": "128MiB"},
        activation_memory="64MiB",
        unit_bytes=unit,
        nvme_path=tmp_path,
        offload_param=home,
        offload_optimizer="cpu",
    )
    engine.backward(engine(torch.ones(1, width)).mean())
    engine.step()
    truth = {name: value.sum().item() for name, value in engine.state_dict().items()}
    ctypes.CDLL(None).malloc_trim(0)  # what the allocator has kept would be used again
    before = status_bytes("VmRSS")
    reset_high_water()  # the peak starts anew
    engine.close(restore=True)
    extra = status_bytes("VmHWM") - before
    assert extra <= unit + (4 << 20), "one unit, and what the allocator keeps"
    assert status_bytes("VmRSS") <= before - 2 * count * unit  # gradients and states are gone
    assert {name: value.sum().item() for name, value in model.state_dict().items()} == truth


@pytest.mark.nightly
def test_peak_rss_of_a_small_model_with_spilled_gradients(tmp_path: Path) -> None:
    check(tmp_path, "--smoke")


@pytest.mark.parametrize(
    "home",
    [
        "nvme",
        # Parameters stay on the device then, so nothing gives way: 5 to 30 MiB below the limit, and once 7.6 above.
        pytest.param("auto", marks=pytest.mark.nightly),
    ],
)
def test_peak_rss_with_activations_that_the_plan_did_not_know(home: str, tmp_path: Path) -> None:
    """Without checkpointing, and with a loss whose temporaries nobody books: the working region gives way."""
    check(tmp_path, "--smoke", "--no-checkpointing", "--steps", "5", "--offload-param", home)


@pytest.mark.slow
@pytest.mark.nightly
def test_peak_rss_of_a_billion_parameters_in_two_and_a_half_gib(tmp_path: Path) -> None:
    assert check(tmp_path)["parameters"] > 1_050_000_000


@pytest.mark.slow
def test_peak_rss_where_memory_has_no_room_for_gradients_beside_parameters(tmp_path: Path) -> None:
    """As with the billion, a seventh of it: 3 bytes per parameter, of the 16 that training takes."""
    sizes = ["--layers", "10", "--hidden", "1024", "--vocabulary", "16000", "--tokens", "128"]
    figures = check(tmp_path, *sizes, "--device", "192MiB", "--cpu", "240MiB", "--nvme", "6GiB")
    assert figures["budgets"]["device"] + figures["budgets"]["cpu"] < 3.1 * figures["parameters"]


def llama_units(layers: int, hidden: int, intermediate: int, vocabulary: int, *, tied: bool) -> list[Unit]:
    shapes = [[("embed", (vocabulary, hidden))]]
    for layer in range(layers):
        matrices = [(hidden, hidden)] * 4 + [(intermediate, hidden)] * 3
        shapes.append([(f"{layer}.{i}", shape) for i, shape in enumerate(matrices)])
    if not tied:
        shapes.append([("head", (vocabulary, hidden))])
    units = []
    for index, sizes in enumerate(shapes):
        slots, numel = lay_out(sizes)
        units.append(Unit(index, sizes[0][0], "bfloat16", 2, True, numel, slots))
    return units


@pytest.mark.parametrize(
    "units",
    [
        llama_units(30, 576, 1536, 49152, tied=True),
        llama_units(20, 2048, 5632, 32000, tied=False),
        llama_units(32, 4096, 14336, 128256, tied=False),
    ],
    ids=["135M", "1.2B", "8B"],
)
def test_host_need_with_states_and_parameters_on_nvme(units: list[Unit]) -> None:
    # Gradients take 2 B per parameter; everything else in host memory is buffers, not per-parameter copies.
    count = sum(slot.numel for unit in units for slot in unit.slots)
    plan = make_plan(
        Request(
            units,
            {Tier.DEVICE: 24 * GIB, Tier.HOST: 512 * GIB, Tier.NVME: 4096 * GIB},
            param_tier=Tier.NVME,
            optimizer_tier=Tier.NVME,
        )
    )
    assert all(home.grad is Tier.HOST and home.states is Tier.NVME for home in plan.homes)
    assert plan.arena_bytes[Tier.HOST] <= 2.3 * count
