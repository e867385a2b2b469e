"""The engine on the simulated accelerator: the same bits wherever bytes live, however late or early copies are.

The CPU's tests show planning, bookkeeping, files and kernels; here are streams, events and memory that is not shared.
"""

from __future__ import annotations

import contextlib
import copy
import re
import textwrap
import threading
from collections.abc import Callable
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import forked
import pytest
import torch
from harness import (
    LINEAR_BYTES,
    UNIT_BYTES,
    WIDTH,
    Outcome,
    assert_equal,
    assert_same_tensors,
    batch,
    everything_on_device,
    working_bytes,
)
from harness import run as train
from simulated import EAGER, LAZY, Schedule, at_random, counts, fixed, running
from simulated.instead import MOVER_STREAMS
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import AdamW, Engine
from offload.memory import devices, page_lock
from offload.memory.accelerator import AcceleratorDevice
from offload.memory.arena import view_at
from offload.shards.manager import Manager
from offload.shards.shard import Event

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MIB = 1 << 20
SCHEDULES = fixed(MOVER_STREAMS)
PARTLY_BYTES = 100 << 10  # for states and gradients of three of :class:`Net`'s units
EACH = [LAZY, *(pytest.param(each, marks=pytest.mark.nightly) for each in SCHEDULES if each is not LAZY)]
HOMES = ["device", "cpu", "nvme"]
CHECKPOINTING = [None, False, True]  # none, non-reentrant, reentrant
MAIN = ["llama", "gpt2", "t5", "bert"]
named = {"ids": lambda value: getattr(value, "name", str(value))}


class Net(nn.Module):
    """Six blocks of a unit each, a buffer, and a parameter that two forwards use."""

    def __init__(self, checkpointing: bool | None) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(6))
        self.register_buffer("shift", torch.full((WIDTH,), 0.1))
        self.checkpointing = checkpointing

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate([*self.blocks, self.blocks[0]]):
            if self.checkpointing is None or number == 0:
                x = torch.tanh(block(x)) + self.shift
            else:
                x = torch.tanh(checkpoint(block, x, use_reentrant=self.checkpointing)) + self.shift
        return x


def net(checkpointing: bool | None = None, dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    return Net(checkpointing).to(dtype)


def loss_of(forward: Callable[..., torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    return forward(x).float().sub(1).pow(4).mean()


def placed(home: str, model: nn.Module, path: Path, *, unit_bytes: int = LINEAR_BYTES, **more: Any) -> dict[str, Any]:
    """Options: parameters and states at `home`; unless that is the device, it has room for three units.

    "device" has states in host memory, "mixed" on NVMe, with the parameters in host memory. If the device has kernels
    (see simulated.kernels), states are on it for "resident", and those of some units for "partly".
    """
    memory: dict[str, Any] = {"device": "16MiB", "cpu": "16MiB"}
    options: dict[str, Any] = {"device": "sim", "max_memory": memory, "unit_bytes": unit_bytes, **more}
    if home == "device":
        return {**options, "offload_param": "none", "offload_optimizer": "cpu"}
    if home == "resident":
        return {**options, "offload_param": "none", "offload_optimizer": "none"}
    if home == "partly":
        memory["device"] = MIB + working_bytes(model, units=100, unit_bytes=unit_bytes) + PARTLY_BYTES
        return {**options, "offload_param": "none", "activation_memory": MIB}
    memory["device"] = MIB + working_bytes(model, unit_bytes=unit_bytes)
    param, states = ("cpu", "nvme") if home == "mixed" else (home, home)
    options |= {"activation_memory": MIB, "offload_param": param, "offload_optimizer": states}
    if states == "nvme":
        memory["nvme"] = "64MiB"
        options["nvme_path"] = path
    return options


def run_net(
    home: str, path: Path, *, checkpointing: bool | None = None, dtype: torch.dtype = torch.float32, **more: Any
) -> Outcome:
    """Train for four steps with clipping; at home "truth" everything is on the CPU."""
    model = net(checkpointing, dtype)
    more = {"max_grad_norm": 0.5, **more}
    options = {**everything_on_device(), **more} if home == "truth" else placed(home, model, path, **more)
    place = "cpu" if home == "truth" else options["device"]
    data = [batch(number).to(place, dtype) for number in range(4)]
    return train(model, data, optimizer=AdamW(lr=1e-2), loss_of=loss_of, **options)


def run_evaluated(home: str, path: Path, **more: Any) -> Outcome:
    """Like :func:`run_net`, with an evaluation between backward and step for which the host waits only at the end."""
    model = net()
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    losses: list[torch.Tensor] = []
    with Engine(model, AdamW(lr=1e-2), **options, **more) as engine:
        for number in range(4):
            x = batch(number).pin_memory().to(engine.device, non_blocking=True)
            engine.backward(loss_of(engine, x))
            with torch.no_grad():
                losses.append(loss_of(engine, x))
            engine.step()
            engine.drain()
        losses = [loss.cpu() for loss in losses]
        return Outcome(losses, [], engine.state_dict(), {}, [], engine.stats(), engine.plan)


def run_clipped(home: str, path: Path) -> Outcome:
    """Like :func:`run_evaluated`, but every step clips: no update is made before it."""
    return run_evaluated(home, path, max_grad_norm=1e-3)


def seen_now(what: str) -> int:
    """Return what was counted on all streams so far."""
    return sum(found.get(what, 0) for found in counts().values())


def test_a_durable_run_goes_on(tmp_path: Path) -> None:
    """Where updates replace what is on the device, a run is committed and taken up by the same rule."""
    batches = [batch(number).to("sim") for number in range(6)]
    losses: dict[int, torch.Tensor] = {}
    for begin, end in ((0, 3), (3, 6), (0, 6)):  # in two processes, as it were, and at once
        model = net()
        options = placed("nvme", model, tmp_path)
        for option in ("nvme_path", "offload_param", "offload_optimizer"):
            del options[option]
        with Engine(model, AdamW(lr=1e-2), run_dir=tmp_path / f"{end - begin}", **options) as engine:
            assert (engine.resumed.client_state if engine.resumed else 0) == begin
            for number in range(begin, end):
                loss = loss_of(engine, batches[number])
                assert torch.equal(losses.setdefault(number, loss.detach().cpu()), loss.detach().cpu())
                engine.backward(loss)
                engine.step()
                engine.client_state = number + 1


def on_cpu(outcome: Outcome) -> Outcome:
    outcome.losses = [loss.cpu() for loss in outcome.losses]
    return outcome


# --- the same bits ----------------------------------------------------------------------------------------------------


@pytest.mark.few
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("home", [*HOMES, "mixed"])
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_bits_are_the_cpus_under_every_schedule(
    home: str, schedule: Schedule, checkpointing: bool | None, tmp_path: Path
) -> None:
    truth = run_net("truth", tmp_path, checkpointing=checkpointing)
    with running(schedule) as seen:
        ours = run_net(home, tmp_path, checkpointing=checkpointing)
    assert_equal(on_cpu(ours), truth)
    assert seen.races == [], schedule.name
    if home != "device":
        assert ours.stats.links["h2d"].bytes > 0 and ours.stats.links["d2h"].bytes > 0


@pytest.mark.parametrize("home", HOMES)
def test_weights_come_from_files(home: str, tmp_path: Path) -> None:
    from safetensors.torch import save_file

    truth = run_net("truth", tmp_path)
    save_file(dict(net().state_dict()), tmp_path / "model.safetensors")
    data = [batch(number).to("sim") for number in range(4)]
    for schedule in (LAZY, EAGER):
        with torch.device("meta"):
            model = Net(None)
        options = {**placed(home, model, tmp_path), "max_grad_norm": 0.5, "weights": tmp_path}
        with running(schedule) as seen:
            ours = train(model, data, optimizer=AdamW(lr=1e-2), loss_of=loss_of, **options)
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_the_host_waits_only_where_it_consumes(home: str, tmp_path: Path) -> None:
    """In a step: once per unit for its gradient, and for staging that is read into again; for no stream."""
    units, steps = 6, 4
    with running(LAZY) as seen:
        model = net()
        options = placed(home, model, tmp_path)
        with Engine(model, AdamW(lr=1e-2), max_grad_norm=0.5, **options) as engine:
            data = [batch(number).pin_memory().to("sim", non_blocking=True) for number in range(steps)]
            before = {what: seen_now(what) for what in ("synchronizations", "event_synchronizations", "d2h_copies")}
            for x in data:
                loss = torch.tanh(engine(x)).sum()
                loss.backward()
                engine.step()
            after = {what: seen_now(what) - before[what] for what in before}
    fetches = engine.stats().links["h2d"].bytes // LINEAR_BYTES if home == "nvme" else 0
    assert after["synchronizations"] == 0
    assert after["d2h_copies"] == steps * units * 2  # weight and bias
    homes = units * steps if home == "cpu" else 0  # an update overwrites what an upload may still read
    assert after["event_synchronizations"] <= steps * units + homes + fetches
    assert seen.races == []


@pytest.mark.few
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_the_device_budget_holds_as_torch_counts_it(home: str, schedule: Schedule, tmp_path: Path) -> None:
    """Room for five units: three of parameters, a gradient on its way and the next one; activations fit, too."""
    width, rows = 256, 2
    unit_bytes = width * width * 2
    device = torch.get_device_module("sim")
    model = nn.Sequential(*(nn.Linear(width, width, bias=False, dtype=torch.bfloat16) for _ in range(16)))
    options = placed(home, model, tmp_path, unit_bytes=unit_bytes)
    options["max_memory"] |= {"device": 5 * unit_bytes, "cpu": "64MiB"}
    options["activation_memory"] = 2 * unit_bytes - 4096
    with running(schedule):
        device.reset_peak_memory_stats(0)
        before = device.memory_allocated(0)
        with Engine(model, AdamW(lr=1e-4), **options) as engine:
            for number in range(2):
                x = batch(number, rows, width).to("sim", torch.bfloat16)
                engine.backward(loss_of(engine, x))
                engine.step()
        most = device.max_memory_allocated(0) - before - 3 * unit_bytes
        assert most <= 2 * unit_bytes * 5 // 4, schedule.name  # in blocks that may be a quarter larger


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", [LAZY, EAGER], **named)
def test_accumulation_in_bf16(schedule: Schedule, home: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "dtype": torch.bfloat16}
    truth = run_net("device", tmp_path, **options)
    with running(schedule) as seen:
        assert_equal(run_net(home, tmp_path, **options), truth)
    assert seen.races == []


@pytest.mark.few
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_during_backward(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    """Nothing clips, so units are updated as soon as their gradient is there."""
    truth = run_net("truth", tmp_path, dtype=dtype, max_grad_norm=None)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_net(home, tmp_path, dtype=dtype, max_grad_norm=None)
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [], schedule.name


class Pair(nn.Module):
    """A unit of two layers; a micro-batch may pass the second one by, as one without images does."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, given: tuple[torch.Tensor, bool]) -> tuple[torch.Tensor, bool]:
        x, both = given
        x = torch.tanh(self.first(x))
        return (torch.tanh(self.second(x)) if both else x), both


def pairs() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(Pair() for _ in range(3)))


def run_pairs(model: nn.Module, **where: Any) -> tuple[dict[str, torch.Tensor], int]:
    """Return the parameters after three steps, whose first micro-batch of two passes layers by; and early updates."""
    with Engine(model, AdamW(lr=1e-2), gradient_accumulation_steps=2, **where) as engine:
        for number in range(6):
            given = (batch(number).to(engine.device), number % 2 == 1)
            engine.backward(engine(given)[0].sub(1).pow(4).mean())
            engine.step()
        return engine.state_dict(), engine.stats().early_units


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_no_update_is_made_from_a_gradient_that_is_on_its_way(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The layers that the last micro-batch alone reaches come first; then the others are handed over, too."""
    truth, _ = run_pairs(pairs(), **everything_on_device())
    advance = Manager.advance_updates

    def advance_late(manager: Manager, guess: Any) -> None:
        """Look when no unit is handed over in part, and what the reader was sent is used."""
        if all(sum(known.final_adds) in (0, 4) for known in manager.gradients._gradients.values()):
            wait([sent.used for sent in manager.tiers.mover._gradients._flying])  # type: ignore[attr-defined]
            advance(manager, guess)

    monkeypatch.setattr(Manager, "advance_updates", advance_late)
    with running(LAZY) as seen:
        ours, early = run_pairs(pairs(), **placed(home, pairs(), tmp_path, unit_bytes=2 * LINEAR_BYTES))
    assert_same_tensors(ours, truth)
    assert seen.races == [] and early > 0


@pytest.mark.few
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_an_overflow_skips_the_step(home: str, schedule: Schedule, tmp_path: Path) -> None:
    model = net(dtype=torch.float16)
    options = placed(home, model, tmp_path, initial_loss_scale=2.0**40)
    with running(schedule) as seen, Engine(model, AdamW(lr=1e-3), **options) as engine:
        before = engine.state_dict()
        engine.backward(loss_of(engine, batch(0).to("sim", torch.float16)))
        assert not engine.step()
        assert_same_tensors(engine.state_dict(), before)
    assert seen.races == [], schedule.name


@pytest.mark.few
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", fixed(6), **named)
def test_two_engines_share_the_device(home: str, schedule: Schedule, tmp_path: Path) -> None:
    truth = run_net("truth", tmp_path)
    with running(schedule) as seen, contextlib.ExitStack() as closing:
        models = [net(), net()]
        engines = [
            closing.enter_context(Engine(m, AdamW(lr=1e-2), max_grad_norm=0.5, **placed(home, m, tmp_path)))
            for m in models
        ]
        losses: list[list[torch.Tensor]] = [[], []]
        for number in range(4):
            for engine, kept in zip(engines, losses, strict=True):
                loss = loss_of(engine, batch(number).to("sim"))
                kept.append(loss.detach().clone())
                engine.backward(loss)
                engine.step()
        for engine, kept in zip(engines, losses, strict=True):
            assert all(torch.equal(a.cpu(), b) for a, b in zip(kept, truth.losses, strict=True)), schedule.name
            assert_same_tensors(engine.state_dict(), truth.parameters)
    assert seen.races == [], schedule.name


@pytest.mark.few
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_the_model_is_the_users_again_behind_the_end(home: str, schedule: Schedule, tmp_path: Path) -> None:
    """Where it was, with the weights of the last step; what is gathered meanwhile is there."""
    truth = run_net("truth", tmp_path)
    model = net()
    with running(schedule) as seen:
        options = placed(home, model, tmp_path)
        with Engine(model, AdamW(lr=1e-2), max_grad_norm=0.5, **options) as engine:
            for number in range(4):
                engine.backward(loss_of(engine, batch(number).to("sim")))
                engine.step()
            weight = model.blocks[2].weight
            with engine.gather(weight):
                assert torch.equal(weight.cpu(), truth.parameters["blocks.2.weight"])
            with engine.gather(weight, modify=True), torch.no_grad():
                weight.mul_(2)
        assert torch.equal(model.blocks[2].weight, truth.parameters["blocks.2.weight"] * 2), schedule.name
        with torch.no_grad():
            model.blocks[2].weight.mul_(0.5)
        assert_same_tensors(dict(model.state_dict()), truth.parameters)
    assert seen.races == [], schedule.name


@pytest.mark.few
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_the_second_device_has_streams_and_threads_of_its_own(
    home: str, schedule: Schedule, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    truth = run_net("truth", tmp_path)
    real, begun = AcceleratorDevice.begin_thread, set[tuple[str, int]]()

    def begin_thread(device: AcceleratorDevice) -> None:
        real(device)
        name = re.sub(r"[-_]\d+$", "", threading.current_thread().name)
        begun.add((name, torch.accelerator.current_device_index()))

    monkeypatch.setattr(AcceleratorDevice, "begin_thread", begin_thread)
    with running(schedule) as seen:
        ours = run_net(home, tmp_path, device="sim:1")
    threads = {"offload-d2h", "offload-gradients", "offload-update", *(["offload-h2d"] if home == "nvme" else [])}
    assert begun - {("offload-wait", 1)} == {(name, 1) for name in threads}
    assert_equal(on_cpu(ours), truth)
    assert seen.races == [] and {name[:5] for name in seen.counts if "kernels" in seen.counts[name]} == {"sim:1"}


@pytest.mark.few
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_an_evaluation_computes_with_the_weights_that_were_there(home: str, schedule: Schedule, tmp_path: Path) -> None:
    truth = run_evaluated("truth", tmp_path)
    with running(schedule) as seen:
        ours = run_evaluated(home, tmp_path)
    assert_equal(ours, truth)
    assert seen.races == [], schedule.name


@pytest.mark.few
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_an_evaluation_does_not_see_what_is_loaded_behind_it(home: str, schedule: Schedule, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = net()(batch(0))
    model = net()
    with (
        running(schedule) as seen,
        Engine(model, AdamW(), **placed(home, model, tmp_path)) as engine,
        torch.no_grad(),
    ):
        x = batch(0).pin_memory().to("sim", non_blocking=True)
        output = engine(x)
        engine.load_state_dict({name: torch.zeros_like(value) for name, value in engine.state_dict().items()})
        assert engine(x).cpu().ne(expected).all()
        assert torch.equal(output.cpu(), expected)
    assert seen.races == [], schedule.name


def run_model(name: str, home: str, path: Path, dtype: torch.dtype, checkpointing: bool | None) -> Outcome:
    from models import BY_NAME

    torch.manual_seed(0)
    model = BY_NAME[name].build().to(dtype)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": checkpointing})
    data = [{key: value.to("sim") for key, value in BY_NAME[name].batch(i).items()} for i in range(4)]
    options = placed(home, model, path, unit_bytes=UNIT_BYTES)
    return train(model, data, optimizer=AdamW(lr=1e-3), max_grad_norm=1.0, **options)


def assert_placement_changes_nothing(
    name: str, schedules: list[Schedule], homes: list[str], path: Path, dtype: torch.dtype, checkpointing: bool | None
) -> None:
    truth = run_model(name, "device", path, dtype, checkpointing)
    for schedule in schedules:
        for home in homes:
            with running(schedule) as seen:
                ours = run_model(name, home, path, dtype, checkpointing)
            assert_equal(ours, truth)
            assert seen.races == [], (schedule.name, home)


@pytest.mark.few(3)
@pytest.mark.parametrize("home", HOMES)
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_a_llama_under_every_schedule(schedule: Schedule, home: str, tmp_path: Path) -> None:
    assert_placement_changes_nothing("llama", [schedule], [home], tmp_path, torch.bfloat16, checkpointing=False)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAIN)
def test_models_under_every_schedule(name: str, dtype: torch.dtype, checkpointing: bool | None, tmp_path: Path) -> None:
    schedules = [*SCHEDULES, *map(at_random, range(5))]
    assert_placement_changes_nothing(name, schedules, HOMES, tmp_path, dtype, checkpointing)


@pytest.mark.few
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_the_arena_may_be_memory_on_which_work_is_queued(home: str, schedule: Schedule, tmp_path: Path) -> None:
    """The allocator hands memory out in the order of one stream; uploads come on another."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))  # no buffers: nothing makes the host wait
    options = placed(home, model, tmp_path)
    with torch.no_grad():
        expected = model(batch(0))
    with running(schedule) as seen:
        before = torch.ones(options["max_memory"]["device"] - MIB + 4096, dtype=torch.uint8, device="sim")
        place = before.data_ptr()
        del before
        with Engine(model, AdamW(), **options) as engine, torch.no_grad():
            arena = engine._manager.tiers._arenas[offload.memory.budget.Tier.DEVICE]
            assert place <= arena.base_address < place + 4096
            output = engine(batch(0).pin_memory().to("sim", non_blocking=True)).cpu()
    assert torch.equal(output, expected), schedule.name
    assert seen.races == [], schedule.name


def run_on_two_streams(home: str, path: Path) -> Outcome:
    """Evaluate on two streams that nothing orders, which plain modules allow, and train on one of them."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    if home == "cpu":
        options["max_memory"]["device"] += MIB  # all stay there: who comes second finds them, and fetches nothing
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        side = None if home == "truth" else torch.Stream("sim:0")
        losses = []
        for number in range(3):
            for stream in (None, side):
                with stream or contextlib.nullcontext(), torch.no_grad():
                    x = batch(number).pin_memory().to(engine.device, non_blocking=True)
                    losses.append((loss_of(engine, x), stream))
            engine.backward(loss_of(engine, batch(number).to(engine.device)))
            engine.step()
            engine.drain()
        kept = []
        for loss, stream in losses:
            with stream or contextlib.nullcontext():
                kept.append(loss.cpu())
        return Outcome(kept, [], engine.state_dict(), {}, [], engine.stats(), engine.plan)


@pytest.mark.parametrize("home", HOMES)
def test_the_users_own_streams(home: str, tmp_path: Path) -> None:
    truth = run_on_two_streams("truth", tmp_path)
    for schedule in fixed(MOVER_STREAMS + 1):
        with running(schedule) as seen:
            ours = run_on_two_streams(home, tmp_path)
        assert_equal(ours, truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_parameters_move_together_on_the_device(home: str, tmp_path: Path) -> None:
    """What is in use cuts four rooms into free, held, free, held; the last unit needs two rooms in one piece."""
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(3)] + [nn.Linear(WIDTH, 7 * WIDTH)]
    weights = [block.weight.detach().clone().view(-1) for block in blocks]
    for schedule in fixed(MOVER_STREAMS + 1):
        model = nn.Sequential(*copy.deepcopy(blocks))
        options = placed(home, model, tmp_path, unit_bytes=32 << 10, prefetch=False)
        with running(schedule) as seen, Engine(model, AdamW(), **options) as engine, torch.no_grad():
            manager, side = engine._manager, torch.Stream("sim:0")
            with side:
                held = [manager.acquire(0)]  # rooms are handed out from the high end
            manager.acquire(1).close()
            held += [manager.acquire(2), manager.acquire(3)]
            for stream in (side, contextlib.nullcontext()):
                with stream:
                    for index in (0, 2, 3):
                        storage = manager.bound.storage(index)
                        ours = view_at(storage, torch.float32, 0, weights[index].shape)
                        assert torch.equal(ours.add(0).cpu(), weights[index]), schedule.name
            for lease in held:
                lease.close()
        assert seen.total("d2d_bytes") == 32 << 10 and seen.races == [], schedule.name


@pytest.mark.few
@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", SCHEDULES, **named)
def test_memory_that_a_users_tensor_has_left_is_overwritten_behind_what_reads_it(
    home: str, schedule: Schedule, tmp_path: Path
) -> None:
    """The tensor dies on the host while the device has still to read it."""
    model = net()
    weight = model.blocks[0].weight.detach().clone().view(-1)
    options = placed(home, model, tmp_path, prefetch=False)
    with running(schedule) as seen, Engine(model, AdamW(), **options) as engine, torch.no_grad():
        manager = engine._manager
        assert manager is not None
        manager.acquire(0).close()
        view = view_at(manager.bound.storage(0), torch.float32, 0, weight.shape)
        shard = manager.tiers.param(0)
        manager.copies.change(shard, Event.EVICT)
        manager.working.unbind_lost(shard)  # as after an error: it goes, and its memory stays the tensor's
        output = view.add(0)
        del view
        for index in range(1, 6):
            manager.acquire(index).close()
        assert torch.equal(output.cpu(), weight), schedule.name
    assert seen.races == [], schedule.name


# --- which device -----------------------------------------------------------------------------------------------------


def test_the_accelerator_that_torch_has_is_accepted() -> None:
    for given, index in (("sim", 0), ("sim:1", 1), (torch.device("sim"), 0)):
        assert devices.resolve_device(given) == torch.device("sim", index)
    with torch.get_device_module("sim").device(1):
        assert devices.resolve_device("sim") == torch.device("sim", 1)
    assert devices.resolve_device(None).type == "cpu"  # it must be asked for
    with pytest.raises(offload.ConfigError, match=r"'sim' with an index below 2 but got 'sim:2'; torch sees 2 sim dev"):
        devices.resolve_device("sim:2")
    with pytest.raises(offload.ConfigError, match=r"expected 'sim', 'cuda' or 'cpu' but got 'xpu'"):
        devices.resolve_device("xpu")


def locking(most_bytes: int, lock: Callable[[int, int], None]) -> Callable[[int, int], None]:
    """Return what locks so many bytes and refuses to lock more."""
    left = [most_bytes]

    def register(address: int, size_bytes: int) -> None:
        left[0] -= size_bytes
        if left[0] < 0:
            raise RuntimeError("no more of it")
        lock(address, size_bytes)

    return register


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize(
    ("refusal", "most_bytes"), [("not with this back end", None), ("no more of it", 0), ("no more of it", 64 << 10)]
)
def test_without_page_locking_copies_are_slower_and_right(
    home: str,
    refusal: str,
    most_bytes: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    truth, module = run_net("truth", tmp_path), torch.get_device_module("sim")
    lock = module.host_register
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 16 << 10)
    if most_bytes is None:
        monkeypatch.delattr(module, "host_register")
    for schedule in (LAZY, EAGER):
        if most_bytes is not None:
            monkeypatch.setattr(module, "host_register", locking(most_bytes, lock))
        with running(schedule) as seen:
            assert_equal(on_cpu(run_net(home, tmp_path)), truth)
        assert seen.races == []
    told = re.search(
        r"host arena: (.*) of (.*) could not be page-locked for sim:0 \((.*)\): copies.*slower", caplog.text
    )
    assert told is not None and told[3] == refusal
    assert (told[1] == told[2]) == (not most_bytes)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_gradients_that_lie_in_two_locked_pieces_may_be_read_and_changed(
    home: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each weight takes more than a piece; CUDA copies nothing that lies in two."""

    def train_with(place: str, **options: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        with Engine(model, AdamW(lr=1e-2), **options) as engine:
            for number in range(3):
                engine.backward(engine(batch(number, 4, 64).to(place)).square().sum())
                with engine.gather_gradients(modify=True):
                    for parameter in model.parameters():
                        assert parameter.grad is not None
                        parameter.grad.mul_(0.5)
                with engine.gather_gradients():
                    doubled = [parameter.grad.mul(2) for parameter in model.parameters() if parameter.grad is not None]
                for parameter, gradient in zip(model.parameters(), doubled, strict=True):
                    parameter.grad = gradient
                engine.step()
            return {name: tensor.cpu() for name, tensor in engine.state_dict().items()}

    truth = train_with("cpu", **everything_on_device())
    monkeypatch.setattr(page_lock, "PIECE_BYTES", 12 << 10)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
    with running(LAZY) as seen:
        ours = train_with("sim", **placed(home, model, tmp_path))
    assert seen.races == []
    assert all(torch.equal(ours[name], value) for name, value in truth.items())


# --- the end ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("end", ["closed", "collected"])
def test_an_engine_that_ends_waits_for_what_is_queued(end: str) -> None:
    """Its host arena is unmapped: a copy that is still queued would read there."""
    code = """
        import gc, sys, torch, simulated
        from torch import nn
        from offload import AdamW, Engine
        from offload.memory.accelerator import AcceleratorDevice
        simulated.load()
        if "hasty" in sys.argv:
            AcceleratorDevice.synchronize = lambda self: None
        model = nn.Sequential(*(nn.Linear(32, 32) for _ in range(6)))
        memory = {"device": (1 << 20) + 3 * 16384, "cpu": "16MiB"}
        with simulated.running(simulated.LAZY) as run:
            engine = Engine(
                model, AdamW(), device="sim", max_memory=memory, unit_bytes=4608, activation_memory=1 << 20,
                offload_param="cpu", offload_optimizer="cpu",
            )
            with torch.no_grad():
                engine(torch.ones(4, 32, device="sim"))
            if "closed" in sys.argv:
                engine.close(restore=False)
            del engine, model
            gc.collect()
        print(run.races)
    """
    ended = [forked.run(textwrap.dedent(code), *arguments) for arguments in ((end,), (end, "hasty"))]
    assert (ended[0].returncode, ended[0].stdout) == (0, "[]\n"), ended[0].stderr
    assert ended[1].returncode < 0 or "unlocks" in ended[1].stdout
