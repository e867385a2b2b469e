"""This machine, measured: operators one by one, and what is kept of it."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import json
import zlib
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import offload
from offload import measuring
from offload.cli.doctor import diagnose, gather
from offload.cli.main import main
from offload.errors import BudgetError, ConfigError
from offload.kernels import cpu_adam
from offload.measuring import Here, seconds_of
from offload.memory import drives, limits
from offload.memory.device import Device
from offload.memory.devices import open_device
from offload.memory.kept import keep
from offload.memory.machine import queued_s
from offload.optim.rules import StepOf
from offload.planning.hardware import DESKTOP, Hardware
from offload.planning.work import Blank, Call, work_of
from offload.sizes import MIB
from offload.spec import Hyper
from swap import SwapStore
from swap.errors import SwapFullError
from swap.store import StoreTicket


class Model(nn.Module):
    """Has products, a lookup, attention, and an operator whose backward differs on the meta device."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(50, 16)
        self.norm = nn.LayerNorm(16, dtype=torch.bfloat16)
        self.out = nn.Linear(16, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return a number."""
        x = self.embed(tokens)[:, None]
        x = nn.functional.scaled_dot_product_attention(x, x, x, is_causal=True)[:, 0]
        x = self.norm(x.bfloat16()).float()
        return nn.functional.cross_entropy(self.out(x).flatten(0, 1), tokens.flatten())


TOKENS = [torch.zeros(2, 8, dtype=torch.int64)]


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Measure small things, and keep them apart."""
    monkeypatch.setattr(drives, "cache_file", lambda: tmp_path / "drives.json")
    for name, value in (("_WIDE", 512), ("_OBJECTS", 2), ("_COPY_BYTES", MIB), ("_CACHE_BYTES", MIB)):
        monkeypatch.setattr(measuring, name, value)


def planned(**options: Any) -> offload.Forecast:
    return offload.plan(Model(), batch=TOKENS, hardware="here", **options)


def test_each_operator_has_seconds_and_those_that_do_not_run_alone_are_named() -> None:
    found = planned()
    assert found.work is not None
    assert found.work.measured_s is not None
    assert found.timing is not None
    assert min(found.work.measured_s) > 0
    assert found.work.unmeasured == ("aten.native_layer_norm_backward.default",)
    assert "do not run alone: aten.native_layer_norm_backward" in str(found)
    assert found.timing.spans[-1].seconds["compute"] >= sum(found.work.measured_s)
    assert found.timing.spans[-1].seconds["drive"] == 0
    assert "a step on this machine" in str(found)


def test_operators_that_memory_has_no_room_for_are_named_and_measured_when_there_is(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Of 16 x 50 fp32 parameters of a layer, a product touches more than 3 KiB; half of 4 KiB are free for it."""
    run = list[Call]()
    monkeypatch.setattr(measuring, "seconds_of", lambda call, device: run.append(call) or 1.0)
    monkeypatch.setattr(measuring, "_host_costs", lambda device: dict.fromkeys(measuring._HOST_COSTS, 1e-6))
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "free_host_bytes", lambda: 4 << 10)
        found = planned()
        assert found.work is not None
        large = {k.call for k in {**found.work.forward, **found.work.backward} if k.size_bytes > 2 << 10}
        assert large and run and not large.intersection(run)
        assert set(found.work.too_large) == {call.operator for call in large} and not found.work.unmeasured
        assert f"too little memory is free to run them alone: {', '.join(found.work.too_large)}" in str(found)
        assert found.to_dict()["too_large"] == list(found.work.too_large)
        run.clear()
        assert planned().work == found.work and not run
    again = planned()
    assert again.work is not None and set(run) == large and not again.work.too_large


def test_an_operator_that_a_device_has_no_memory_for_is_not_kept_as_one_that_does_not_run(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def full(*_: Any, **__: Any) -> float:
        raise torch.OutOfMemoryError("full")

    here, work = Here(open_device("cpu")), work_of(nn.Linear(8, 8), [torch.ones(2, 8)])
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_median_s", full)
        found = here.timed(work, offload.Hardware.load("desktop"))
    assert found.too_large and not found.unmeasured and not here.operators
    assert not here.timed(work, offload.Hardware.load("desktop")).too_large and here.operators


@pytest.mark.parametrize(
    ("calls", "expected"),
    [
        ([(5, 5), (0.1, 0), (5, 4), (0.3, 0), (0.2, 0.001), (9, 9)], 0.2),  # those that have not queued
        ([(5, 5)] * 9 + [(4, 3)] * 50 + [(0.1, 0)], 4),  # all have, until it was enough
    ],
)
def test_a_call_that_waits_for_a_processor_does_not_count(
    monkeypatch: pytest.MonkeyPatch, calls: list[tuple[float, float]], expected: float
) -> None:
    """Milliseconds of each call, and those that its threads have queued."""
    clock, queued, left = [0.0], [0.0], iter([(7.0, 0.0), *calls])  # the first one is none that counts

    def call() -> None:
        took, waited = next(left)
        clock[0] += took / 1e3
        queued[0] += waited / 1e3

    with monkeypatch.context() as patch:
        patch.setattr(measuring, "queued_s", lambda: queued[0])
        patch.setattr(measuring, "time", SimpleNamespace(perf_counter=lambda: clock[0]))
        patch.setattr(measuring, "_MOST", 3)
        busy = pytest.warns(UserWarning, match="other processes have the processors")
        with busy if min(waited for _, waited in calls[:50]) else contextlib.nullcontext():
            assert measuring._median_s(call, open_device("cpu")) == pytest.approx(expected / 1e3)


def test_threads_that_end_and_kernels_that_do_not_tell_have_not_queued(tmp_path: Path) -> None:
    for number, content in enumerate(("1000 2000000 7", "1 500000000 9", "", "0")):
        (tmp_path / str(number)).mkdir()
        (tmp_path / str(number) / "schedstat").write_text(content)
    (tmp_path / "ended").mkdir()
    assert queued_s(tmp_path) == pytest.approx(0.502) and queued_s(tmp_path / "none") == 0
    assert queued_s() >= 0


def test_twice_the_operators_take_twice_the_seconds() -> None:
    device = open_device("cpu")
    machine = offload.Hardware.load("desktop")
    x = torch.ones(4, 64)
    one, two = (work_of(nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(count))), [x]) for count in (1, 2))
    with Here(device) as here:
        (first, _), (second, _) = (here.timed(work, machine).measured_s or (0.0, 0.0) for work in (one, two))
    (known,) = json.loads(here.file.read_text()).values()
    product = next(known[str(kernel.call)] for kernel in one.forward if kernel.flops)
    assert second - first == pytest.approx(product)


def test_what_does_not_run_alone_has_no_seconds() -> None:
    wrong = Blank(torch.float32, (2, 3), (3, 1))
    assert seconds_of(Call("aten.mm.default", (wrong, wrong), ()), open_device("cpu")) is None
    assert seconds_of(Call("nobody.knows.this", (), ()), open_device("cpu")) is None


def test_content_fits_the_strides_of_any_tensor() -> None:
    """Also of those that overlap themselves or are empty."""
    for shape, strides in (((3, 4), (0, 1)), ((0, 4), (4, 1)), ((), ()), ((2, 2), (1, 2))):
        tensor = measuring._filled(Blank(torch.int64, shape, strides), open_device("cpu"))
        assert (tuple(tensor.shape), tensor.stride()) == (shape, strides)
        assert not tensor.any()


def test_budgets_that_are_more_than_this_machine_has_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Device and host are one memory: of 8 GiB, 5 and 3 are there, and a byte more is not. A container has less."""
    monkeypatch.setattr(limits.psutil, "virtual_memory", lambda: SimpleNamespace(total=8 << 30, available=8 << 30))
    monkeypatch.setattr(limits.machine, "cgroup_memory_limit", lambda: None)
    enough = {"device": 5 << 30, "cpu": 3 << 30}
    found = planned(device="cpu", max_memory=enough)
    assert found.hardware is not None and found.hardware.host_bytes == 8 << 30
    assert not found.beyond_machine and "NOT OF THIS MACHINE" not in str(found)
    said = 'NOT OF THIS MACHINE: max_memory["device"] and max_memory["cpu"], 8.00 GiB of the same memory, are more than'
    more = planned(device="cpu", max_memory=enough | {"cpu": (3 << 30) + 1})
    assert f"{said} the 8.00 GiB of this machine" in str(more) and more.to_dict()["beyond_machine"] == {"cpu": 8 << 30}
    monkeypatch.setattr(limits.machine, "cgroup_memory_limit", lambda: 1 << 30)
    assert f"{said} the 1.00 GiB of this machine" in str(planned(device="cpu", max_memory=enough))
    assert "NOT OF THIS MACHINE" not in str(offload.plan(Model(), batch=TOKENS, device="cpu", max_memory=enough))


def test_a_step_is_timed_with_the_region_that_activations_leave() -> None:
    """All eight units have room in it beside fewer rows, and nothing comes then; activations of these leave three."""
    model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(8)))
    options = {"max_memory": {"device": "4MiB", "cpu": "64MiB"}, "offload_param": "cpu", "offload_optimizer": "cpu"}
    few, many = (
        offload.plan(model, batch=[torch.ones(rows, 256)], hardware="here", device="cpu", **options)
        for rows in (32, 280)
    )
    assert few.plan.working_bytes == many.plan.working_bytes == 8 * 4 * 256**2
    assert many.fits and few.timing is not None and many.timing is not None
    assert few.timing.moved.h2d == 0 and many.timing.moved.h2d >= 2 * 5 * 4 * 256**2


def test_what_was_measured_is_kept_until_it_is_to_be_measured_again(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gather().operators_measured == 0
    first = planned()
    assert first.work is not None
    kernels = {kernel.call for kernel in {**first.work.forward, **first.work.backward}}
    assert gather().operators_measured == len(kernels)
    measured: list[Call] = []
    monkeypatch.setattr(measuring, "seconds_of", lambda call, device: measured.append(call) or 1.0)
    with monkeypatch.context() as patch:
        for name in ("_engine_rates", "_streamed_rate", "_product_rate", "_copy_rate", "_host_costs"):
            patch.setattr(measuring, name, lambda *_: pytest.fail("measured a second time"))
        assert planned().work == first.work
        assert not measured
    monkeypatch.setattr(measuring, "_host_costs", lambda device: dict.fromkeys(measuring._HOST_COSTS, 1e-6))
    assert planned(measure_again=True).work != first.work
    assert set(measured) == kernels


def test_a_cpu_has_the_hosts_part_of_a_step_beside_what_operators_take_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its operators take no time alone, or they take all of it."""
    device = open_device("cpu")
    monkeypatch.setattr(measuring, "_alone_s", lambda work, device: 0.0)
    found = measuring._host_costs(device)
    assert 0 < found["operator"] < 1e-3 and 0 < found["hook"] < 1e-2
    monkeypatch.setattr(measuring, "_alone_s", lambda work, device: 1e3)
    found = measuring._host_costs(device)
    assert found["operator"] < 1e-9 and all(map(measuring._is_measured, found.values()))


def test_operators_in_succession_run_as_often_as_they_were_counted() -> None:
    device, ran = open_device("cpu"), list[Call]()
    net = measuring._Blocks()
    work = work_of(net, (torch.ones(1, measuring._HEADS, measuring._NARROW),), on_cpu=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(measuring, "_run_of", lambda call, device: lambda: ran.append(call))
        patch.setattr(measuring, "_median_s", lambda run, device, *, cold: run())
        measuring._alone_s(work, device)
    counted = {kernel.call: 0 for kernel in {**work.forward, **work.backward}}
    for part in (work.forward, work.backward):
        for kernel, many in part.items():
            counted[kernel.call] += many
    assert {call: ran.count(call) for call in counted} == counted and len(ran) == sum(counted.values()) > 100
    assert measuring._alone_s(work, device) > 0


def test_doctor_tells_each_rate_that_is_kept() -> None:
    here = Here(open_device("cpu"))
    planned()
    ((machine, known),) = json.loads(here.file.read_text()).items()
    told = [line.partition(": ")[0] for line in gather().rates_measured]
    assert told == sorted(name for name in known if not name.startswith("Call(")) and len(told) >= 5
    kept = {"drive d": {"write": 2.44e9, "read": 1.5e9}, "products in torch.float32": 0.38e12, "memory of host": 22e9}
    kept |= {"the host's part of a step": {"operator": 9e-6}, "memory of device": -1.0, "drive e": {}, "drive f": []}
    keep(here.file, machine, {"Call(add)": 1e-3, **kept})
    assert [finding.text for finding in diagnose(gather()) if finding.subject == "measured"] == [
        "1 operators; offload plan --hardware here --measure-again does it anew",
        "drive d: read 1.5 GB/s, write 2.44 GB/s",
        "memory of host: 22 GB/s",
        "products in torch.float32: 0.38 TFLOP/s",
        "the host's part of a step: operator 9 us",
    ]


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_measuring_leaves_the_generator_as_it_is_and_needs_no_gradients_of_the_caller(mode: Any) -> None:
    model, before = Model(), torch.get_rng_state()
    with mode():
        assert offload.plan(model, batch=TOKENS, hardware="here", measure_again=True).timing is not None
    assert torch.equal(torch.get_rng_state(), before)


def test_a_machine_is_measured_with_the_threads_that_are_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And apart from the same machine with other ones."""
    seen = list[tuple[int, str]]()

    def noted(here: Here, *_: Any, **__: Any) -> Hardware:
        seen.append((cpu_adam.num_threads(), here._name))
        return DESKTOP

    monkeypatch.setattr(Here, "hardware", noted)
    monkeypatch.setattr(Here, "timed", lambda _, work, __: work)
    before = cpu_adam.num_threads()
    for threads in (before + 1, before + 2):
        offload.plan(Model(), batch=TOKENS, hardware="here", threads=threads)
        assert cpu_adam.num_threads() == before and seen[-1][0] == threads
    assert len({name for _, name in seen}) == 2


@pytest.mark.parametrize("content", ["", "[]", '{"other machine": {}}'])
def test_a_file_that_says_nothing_is_no_hindrance(content: str) -> None:
    here = Here(open_device("cpu"))
    here.file.parent.mkdir(parents=True, exist_ok=True)
    here.file.write_text(content)
    assert planned().timing is not None
    known = json.loads(here.file.read_text())
    assert len(known) == 1 + ("other machine" in known)


def test_what_cannot_have_been_measured_is_measured_again() -> None:
    """Somebody else has written to the file: no number of a machine follows from it."""
    values = ["fast", [1.0], -5.0, 0.0, float("nan"), True, {"update": 1.0}, {"h2d": None}]
    here, first = Here(open_device("cpu")), planned()
    kept = json.loads(here.file.read_text())
    assert sum(map(len, kept.values())) > len(values)
    for known in kept.values():
        for number, name in enumerate(known):
            known[name] = values[number % len(values)]
    here.file.write_text(json.dumps(kept))
    again = planned()
    assert again.timing is not None and again.work is not None and first.work is not None
    assert 0 < again.timing.step_s < 10 and again.work.unmeasured == first.work.unmeasured
    [found] = json.loads(here.file.read_text()).values()
    assert found.keys() == known.keys() and all(found[name] != value for name, value in known.items())


@pytest.mark.parametrize("value", ["fast", [1.0], -5.0, 0.0, float("nan"), True, {"update": 1.0}, {"h2d": None}])
@pytest.mark.parametrize("parts", [(), ("update", "h2d")])
def test_no_value_of_the_file_stands_for_a_number(value: object, parts: tuple[str, ...]) -> None:
    """Of an operator it might be that it does not run alone, which is None."""
    here, found = Here(open_device("cpu")), dict.fromkeys(parts, 2.0) or 2.0
    here._known["memory of device"] = value
    assert here._value("memory of device", lambda: found, parts) == found


def test_a_drive_is_measured_where_the_plan_has_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And once more if `offload tune` has found other settings for it."""
    memory = {"device": "1MiB", "cpu": "8MiB", "nvme": "64MiB"}
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    options: dict[str, Any] = {"nvme_path": tmp_path, "max_memory": memory, "offload_optimizer": "nvme"}
    found = offload.plan(model, batch=[torch.ones(1, 128)], hardware="here", **options)
    assert found.hardware is not None
    assert found.hardware.drive_read_bytes_s > 1e6
    assert found.timing is not None
    (known,) = json.loads(Here(open_device("cpu")).file.read_text()).values()
    (streamed,) = (name for name in known if name.startswith("updates of") and "through drive" in name)
    assert found.hardware.update_bytes_s == known[streamed]
    assert found.timing.seconds["drive"] > 0
    assert not list(tmp_path.glob("*.swap"))
    settings = {"engine": "threads", "queue_depth": 2, "block_bytes": 1 << 16, "threads": 1}
    monkeypatch.setattr(drives, "store_options", lambda _: settings)
    offload.plan(model, batch=[torch.ones(1, 128)], hardware="here", **options)
    (known,) = json.loads(Here(open_device("cpu")).file.read_text()).values()
    assert ["queue_depth 2" in name for name in known if "drive " in name].count(True) == 2


def test_a_drive_is_measured_with_bytes_that_cannot_be_compressed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Zeros may never reach it."""
    packed: list[int] = []

    class Looking(SwapStore):
        def put_many(self, items: Sequence[tuple[Any, int, int]]) -> list[StoreTicket]:
            packed.extend(len(zlib.compress(ctypes.string_at(address, size), 1)) for _, address, size in items)
            return super().put_many(items)

    monkeypatch.setattr(measuring, "SwapStore", Looking)
    monkeypatch.setattr(measuring, "_OBJECT_BYTES", MIB)
    assert min(measuring._drive_rates([tmp_path]).values()) > 0
    assert min(packed) >= MIB


@pytest.mark.parametrize("direct", [True, False])
def test_a_drive_that_is_the_page_cache_is_told(
    direct: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, recwarn: pytest.WarningsRecorder
) -> None:
    monkeypatch.setattr(SwapStore, "direct", direct)
    monkeypatch.setattr(measuring, "_OBJECT_BYTES", 4096)
    measuring._drive_rates([tmp_path])
    told = [str(one.message) for one in recwarn]
    assert any(f"without direct I/O (O_DIRECT) in {tmp_path}" in text for text in told) == (not direct)


def test_what_was_measured_before_a_refusal_or_an_interrupt_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The drive is full, behind all other rates; then Ctrl-C, at the second operator."""
    seconds = iter([1.0])

    def measured(call: Call, device: Device) -> float:
        for one in seconds:
            return one
        raise KeyboardInterrupt

    def full(paths: Sequence[Path]) -> dict[str, float]:
        raise SwapFullError("swap path d: full")

    monkeypatch.setattr(measuring, "seconds_of", measured)
    monkeypatch.setattr(measuring, "_engine_rates", lambda *_: dict.fromkeys(measuring._RATES, 1e9))
    monkeypatch.setattr(measuring, "_host_costs", lambda *_: dict.fromkeys(measuring._HOST_COSTS, 1e-6))
    for name in ("_streamed_rate", "_product_rate", "_copy_rate"):
        monkeypatch.setattr(measuring, name, lambda *_: 1e9)
    with monkeypatch.context() as patch:
        patch.setattr(measuring, "_drive_rates", full)
        with pytest.raises(ConfigError, match="could not be measured: swap path d: full"):
            planned(nvme_path=tmp_path, offload_optimizer="nvme")
    rates = gather().rates_measured
    assert any(rate.startswith("memory of host") for rate in rates)
    with pytest.raises(KeyboardInterrupt):
        planned()
    assert gather().operators_measured == 1
    assert set(rates) < set(gather().rates_measured)


def test_the_processor_that_streams_states_counts_as_updates(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two seconds of the processor beyond those of states in memory, and one of updates."""
    options: list[dict[str, Any]] = []
    steps_of = measuring._steps_of

    def steps(device: Device, step: StepOf, **asked: Any) -> measuring._Steps:
        options.append(asked)
        found = steps_of(device, step, **asked)
        assert found.processor_s > 0
        seconds = 3.0 if "nvme_path" in asked else 1.0
        return dataclasses.replace(found, busy_s={"cpu_adam": 1.0}, processor_s=seconds)

    monkeypatch.setattr(measuring, "_steps_of", steps)
    found = measuring._streamed_rate(open_device("cpu"), Hyper(offload.AdamW(lr=1e-4)), "float32", [tmp_path], 1 << 16)
    assert [asked["offload_optimizer"] for asked in options] == ["cpu", "nvme"]
    assert {asked["chunk_numel"] for asked in options} == {1 << 16}
    numel = measuring._LAYERS * measuring._WIDE**2
    assert found == numel * 26 / 3.0  # bytes of an update in bf16


def test_an_optimizer_of_torch_is_measured_by_its_own_class() -> None:
    model = Model()
    found = offload.plan(model, torch.optim.RMSprop(model.parameters()), batch=TOKENS, hardware="here")
    assert found.timing is not None
    kept = next(iter(json.loads(Here(open_device("cpu")).file.read_text()).values()))
    assert any("RMSprop" in name for name in kept)


class Own(torch.optim.Optimizer):
    """Has options of other names than its arguments, and asks for an attribute of parameters."""

    def __init__(self, parameters: Any, speed: float) -> None:
        super().__init__(parameters, {"lr": speed})

    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.data -= group["lr"] * parameter.factor * parameter.grad


@pytest.mark.parametrize(
    "make",
    [
        torch.optim.AdamW,  # has an option that its class does not take
        offload.AdamW,  # of parameters that the small model has not
        lambda parameters: offload.AdamW([{"params": list(parameters), "lr": 1e-3}]),
        lambda parameters: torch.optim.RMSprop([("a", *parameters)]),
        lambda parameters: Own(parameters, 0.1),
    ],
)
def test_an_optimizer_of_a_model_is_measured_with_a_small_one(make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_STEPS", 1), ("_product_rate", lambda *_: 1e9), ("_copy_rate", lambda *_: 1e9)):
        monkeypatch.setattr(measuring, name, value)
    weight = nn.Parameter(torch.ones(16, 16))
    vars(weight)["factor"] = 2.0
    how: dict[str, Any] = {"state_dtype": "float32", "paths": (), "chunk_numel": 1 << 16, "streams_states": False}
    assert Here(open_device("cpu")).hardware(make([weight]), **how).update_bytes_s > 0


def test_updates_are_measured_by_what_makes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of options, those count with which another kernel makes the steps, or the class itself does other ones."""
    for name in ("_product_rate", "_copy_rate"):
        monkeypatch.setattr(measuring, name, lambda *_: 1e9)
    rates = iter(range(10**9, 2 * 10**9))
    monkeypatch.setattr(measuring, "_engine_rates", lambda *_: dict.fromkeys(measuring._RATES, float(next(rates))))
    here, parameters = Here(open_device("cpu")), list(nn.Linear(8, 8).parameters())

    def rate(kind: Any, **options: Any) -> float:
        how: dict[str, Any] = {"state_dtype": "float32", "paths": (), "chunk_numel": 1, "streams_states": False}
        return here.hardware(kind(parameters, **options), **how).update_bytes_s

    optim = torch.optim
    same = [
        ((optim.Adam, {}), (optim.Adam, {"lr": 0.5}), (offload.Adam, {"betas": (0.5, 0.5)})),
        ((optim.Adam, {"amsgrad": True}), (optim.Adam, {"amsgrad": True, "lr": 0.5})),
        ((optim.Adam, {"maximize": True}),),
        ((optim.SGD, {"lr": 0.5}), (offload.SGD, {"lr": 0.25})),
        ((optim.SGD, {"momentum": 0.5}), (optim.SGD, {"momentum": 0.9})),
        ((optim.RMSprop, {}), (optim.RMSprop, {"lr": 0.5})),
        ((optim.RMSprop, {"centered": True}),),
        ((offload.LAMB, {}),),
    ]
    found = [{rate(kind, **options) for kind, options in ones} for ones in same]
    assert all(len(rates) == 1 for rates in found) and len(set.union(*found)) == len(same)


@pytest.mark.parametrize("momentum", [0.9, 0.0])
@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_a_learning_rate_with_which_others_diverge_is_no_hindrance(home: str, momentum: float, tmp_path: Path) -> None:
    """Without momentum in fp32 there are no states, and nothing is on the drive wherever these are to be."""
    model = nn.Sequential(*(nn.Linear(128, 128) for _ in range(4)))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e6, momentum=momentum)
    batch, where = [torch.ones(1, 128)], {"nvme_path": tmp_path} if home == "nvme" else {}
    found = offload.plan(model, optimizer, batch=batch, hardware="here", offload_optimizer=home, **where)
    assert found.timing is not None


def words_of(folder: Path) -> list[str]:
    config = {"model_type": "llama", "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    config |= {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 64}
    (folder / "config.json").write_text(json.dumps(config))
    return ["plan", "--model", str(folder), "--batch", "1x8", "--hardware", "here", "--json", "--measure-again"]


def test_the_command_measures_this_machine(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(words_of(tmp_path)) == 0
    assert json.loads(capsys.readouterr().out)["hardware"] == "this machine"


@pytest.mark.parametrize("error", [BudgetError("cpu budget: too small"), SwapFullError("swap path d: full")])
def test_a_machine_that_cannot_be_measured_is_not_a_model_that_does_not_fit(
    error: Exception, capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise error

    monkeypatch.setattr(Here, "hardware", fail)
    assert main(words_of(tmp_path)) == 2
    out, err = capsys.readouterr()
    plain = json.loads(out)
    assert plain["fits"] is None and plain["error"] in err
    assert f"--hardware here: this machine could not be measured: {error}; " in err
