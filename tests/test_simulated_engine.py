"""The engine on the simulated accelerator: the same bits wherever bytes live, however late or early copies are.

The CPU's tests show planning, bookkeeping, files and kernels; here are streams, events and memory that is not shared.
"""

from __future__ import annotations

import contextlib
import copy
import inspect
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

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
from simulated import EAGER, LAZY, Run, Schedule, at_random, fixed, running
from torch import nn
from torch.utils.checkpoint import checkpoint

import offload
from offload import AdamW, Engine
from offload.memory import accelerator, devices
from offload.memory.arena import view_at

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread")

MIB = 1 << 20
SCHEDULES = fixed(2)  # a mover makes a stream for uploads, then one for downloads
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
    """Options: parameters and states at `home`; unless that is the device, it has room for three units."""
    memory: dict[str, Any] = {"device": "16MiB", "cpu": "16MiB"}
    options: dict[str, Any] = {"device": "sim", "max_memory": memory, "unit_bytes": unit_bytes, **more}
    if home == "device":
        return {**options, "offload_param": "none", "offload_optimizer": "cpu"}
    memory["device"] = MIB + working_bytes(model, unit_bytes=unit_bytes)
    options |= {"activation_memory": MIB, "offload_param": home, "offload_optimizer": home}
    if home == "nvme":
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


def run_evaluated(home: str, path: Path) -> Outcome:
    """Like :func:`run_net`, with an evaluation between backward and step for which the host waits only at the end."""
    model = net()
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    losses: list[torch.Tensor] = []
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        for number in range(4):
            x = batch(number).pin_memory().to(engine.device, non_blocking=True)
            engine.backward(loss_of(engine, x))
            with torch.no_grad():
                losses.append(loss_of(engine, x))
            engine.step()
            engine.drain()
        losses = [loss.cpu() for loss in losses]
        return Outcome(losses, [], engine.state_dict(), {}, [], engine.stats(), engine.plan)


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


@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("home", HOMES)
def test_bits_are_the_cpus_under_every_schedule(home: str, checkpointing: bool | None, tmp_path: Path) -> None:
    truth = run_net("truth", tmp_path, checkpointing=checkpointing)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_net(home, tmp_path, checkpointing=checkpointing)
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [], schedule.name
        if home != "device":
            assert ours.stats.links["h2d"].bytes > 0 and ours.stats.links["d2h"].bytes > 0


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("schedule", [LAZY, EAGER], **named)
def test_accumulation_in_bf16(schedule: Schedule, home: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "dtype": torch.bfloat16}
    truth = run_net("device", tmp_path, **options)
    with running(schedule) as seen:
        assert_equal(run_net(home, tmp_path, **options), truth)
    assert seen.races == []


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_updates_during_backward(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    """Nothing clips, so units on NVMe are updated as soon as their gradient is there."""
    truth = run_net("truth", tmp_path, dtype=dtype, max_grad_norm=None)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_net(home, tmp_path, dtype=dtype, max_grad_norm=None)
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", HOMES)
def test_an_overflow_skips_the_step(home: str, tmp_path: Path) -> None:
    for schedule in SCHEDULES:
        model = net(dtype=torch.float16)
        options = placed(home, model, tmp_path, initial_loss_scale=2.0**40)
        with running(schedule) as seen, Engine(model, AdamW(lr=1e-3), **options) as engine:
            before = engine.state_dict()
            engine.backward(loss_of(engine, batch(0).to("sim", torch.float16)))
            assert not engine.step()
            assert_same_tensors(engine.state_dict(), before)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_two_engines_share_the_device(home: str, tmp_path: Path) -> None:
    truth = run_net("truth", tmp_path)
    for schedule in fixed(4):
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


@pytest.mark.parametrize("home", HOMES)
def test_the_model_is_the_users_again_behind_the_end(home: str, tmp_path: Path) -> None:
    """Where it was, with the weights of the last step; what is gathered meanwhile is there."""
    truth = run_net("truth", tmp_path)
    for schedule in SCHEDULES:
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


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_the_second_device_has_streams_of_its_own(home: str, tmp_path: Path) -> None:
    truth = run_net("truth", tmp_path)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_net(home, tmp_path, device="sim:1")
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [] and {name[:5] for name in seen.counts if "kernels" in seen.counts[name]} == {"sim:1"}


@pytest.mark.parametrize("home", HOMES)
def test_an_evaluation_computes_with_the_weights_that_were_there(home: str, tmp_path: Path) -> None:
    truth = run_evaluated("truth", tmp_path)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_evaluated(home, tmp_path)
        assert_equal(ours, truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", HOMES)
def test_an_evaluation_does_not_see_what_is_loaded_behind_it(home: str, tmp_path: Path) -> None:
    with torch.no_grad():
        expected = net()(batch(0))
    for schedule in SCHEDULES:
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
    name: str, schedules: list[Schedule], path: Path, dtype: torch.dtype, checkpointing: bool | None
) -> None:
    truth = run_model(name, "device", path, dtype, checkpointing)
    for schedule in schedules:
        for home in HOMES:
            with running(schedule) as seen:
                ours = run_model(name, home, path, dtype, checkpointing)
            assert_equal(ours, truth)
            assert seen.races == [], (schedule.name, home)


def test_a_llama_under_every_schedule(tmp_path: Path) -> None:
    assert_placement_changes_nothing("llama", SCHEDULES, tmp_path, torch.bfloat16, checkpointing=False)


@pytest.mark.nightly
@pytest.mark.parametrize("checkpointing", CHECKPOINTING)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", MAIN)
def test_models_under_every_schedule(name: str, dtype: torch.dtype, checkpointing: bool | None, tmp_path: Path) -> None:
    schedules = [*SCHEDULES, *map(at_random, range(5))]
    assert_placement_changes_nothing(name, schedules, tmp_path, dtype, checkpointing)


@pytest.mark.parametrize("home", ["cpu", "nvme"])
def test_the_arena_may_be_memory_on_which_work_is_queued(home: str, tmp_path: Path) -> None:
    """The allocator hands memory out in the order of one stream; uploads come on another."""
    for schedule in SCHEDULES:
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
    for schedule in fixed(3):
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
    for schedule in fixed(3):
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
                        storage = manager.working.storage(index)
                        ours = view_at(storage, torch.float32, 0, weights[index].shape)
                        assert torch.equal(ours.add(0).cpu(), weights[index]), schedule.name
            for lease in held:
                lease.close()
        assert seen.total("d2d_bytes") == 32 << 10 and seen.races == [], schedule.name


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


def refuse_to_lock(address: int, size_bytes: int) -> None:
    raise RuntimeError("no more of it")


@pytest.mark.parametrize("home", ["cpu", "nvme"])
@pytest.mark.parametrize("refusal", ["not with this back end", "no more of it"])
def test_without_page_locking_copies_are_slower_and_right(
    home: str, refusal: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    truth, module = run_net("truth", tmp_path), torch.get_device_module("sim")
    if refusal == "no more of it":
        monkeypatch.setattr(module, "host_register", refuse_to_lock)
    else:
        monkeypatch.delattr(module, "host_register")
    for schedule in (LAZY, EAGER):
        with running(schedule) as seen:
            assert_equal(on_cpu(run_net(home, tmp_path)), truth)
        assert seen.races == []
    assert f"could not be page-locked for sim:0 ({refusal})" in caplog.text


# --- waits that are left out ------------------------------------------------------------------------------------------

# wait of the mover -> its text in accelerator.py
WAITS = {
    "an upload behind compute that reads what it overwrites": "self._upload.wait_event(before)",
    "a vacated buffer is noted": "self._released[buffer.address] = self._computed()",
    "compute behind the upload": "stream.wait_event(self._future.result())",
    "a gradient's download behind compute": "self._download.wait_event(ready)",
    "the host behind a gradient's download": "self._download.synchronize()",
    "the host behind the upload from staging": "used.synchronize()",
    "a direct copy behind compute": "stream.wait_event(event)",
    "the host behind a direct copy": "stream.synchronize()",
    "the host behind the last upload from a home": "future.result().synchronize()",
    "a stream of the user behind what has arrived": "stream.wait_stream(self._upload)",
}


def leave_out(wait: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let devices be made of sources without a wait."""
    source = inspect.getsource(accelerator)
    assert source.count(f"{WAITS[wait]}\n") == 1, f"the mover has changed: {WAITS[wait]}"
    contents: dict[str, Any] = {"__name__": accelerator.__name__}
    exec(compile(source.replace(WAITS[wait], "pass"), accelerator.__file__, "exec"), contents)
    monkeypatch.setattr(devices, "AcceleratorDevice", contents["AcceleratorDevice"])


Program = Callable[[str, Path], Outcome]


def verdict(program: Program, schedule: Schedule, home: str, truth: Outcome, path: Path) -> tuple[str | None, Run]:
    """Return what is wrong with a run, and what was seen of it."""
    with running(schedule) as seen:
        try:
            assert_equal(on_cpu(program(home, path)), truth)
        except (AssertionError, offload.OffloadError) as error:
            return f"{schedule.name}, {home}: {error}", seen
    return None, seen


@pytest.mark.parametrize("wait", WAITS)
def test_a_wait_of_the_mover_that_is_left_out_is_seen(
    wait: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs: list[tuple[Program, str]] = [
        (program, home) for program in (run_net, run_evaluated, run_on_two_streams) for home in HOMES
    ]
    truths = {program: program("truth", tmp_path) for program, _ in programs}
    leave_out(wait, monkeypatch)
    for schedule in fixed(3):
        for program, home in programs:
            wrong, seen = verdict(program, schedule, home, truths[program], tmp_path)
            if wrong or seen.races:
                return
    pytest.fail("nothing has missed it")


def test_an_engine_that_closes_waits_for_what_is_queued() -> None:
    """Its host arena is unmapped: a copy that is still queued would read there."""
    code = """
        import sys, torch, simulated
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
            engine.close(restore=False)
            del engine
        print(run.races)
    """
    ended = []
    for arguments in ((), ("hasty",)):
        command = [sys.executable, "-c", textwrap.dedent(code), *arguments]
        here = Path(__file__).parent
        environment = {"PYTHONPATH": f"{here}:{here.parent}", "PATH": "/usr/bin:/bin"}
        ended.append(subprocess.run(command, cwd=here, env=environment, capture_output=True, text=True, check=False))
    assert (ended[0].returncode, ended[0].stdout) == (0, "[]\n"), ended[0].stderr
    assert ended[1].returncode < 0 or "unlocks" in ended[1].stdout
