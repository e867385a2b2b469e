"""States on the simulated device, updated by its own kernels: the bits of every other placement, and who waits."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from harness import WIDTH, Outcome, assert_equal, assert_same_tensors, batch, everything_on_device
from harness import run as train
from simulated import EAGER, LAZY, at_random, first, fixed, running
from simulated.faults import WORK, failing
from simulated.instead import MOVER_STREAMS
from simulated.kernels import SimulatedKernels, updating
from test_simulated_checkpoints import resume_elsewhere
from test_simulated_engine import LINEAR_BYTES, MIB, loss_of, net, on_cpu, placed, run_net, seen_now
from test_simulated_faults import in_use
from torch import nn

from offload import LAMB, SGD, Adagrad, Adam, AdamW, Engine, Lion
from offload.activations import ledger
from offload.errors import BudgetError, ConfigError, NonFiniteError, StateError

pytestmark = pytest.mark.usefixtures("sim", "single_torch_thread", "kernels")

SCHEDULES = [LAZY, EAGER, first(0), at_random(0)]
HERE = ["resident", "partly"]


@pytest.fixture
def kernels() -> Iterator[None]:
    with updating():
        yield


def on_device(engine: Engine) -> int:
    """Return how many units the device updates."""
    return sum(engine.plan.on_device(unit) for unit in engine.plan.request.units)


def trained(home: str, make: Callable[[], Any], dtype: torch.dtype = torch.float32, **more: Any) -> Outcome:
    """Train for three steps of clipping; at home "truth" everything is on the CPU."""
    model = net(dtype=dtype)
    options = everything_on_device() if home == "truth" else placed(home, model, Path())
    place = options["device"]
    data = [batch(number).to(place, dtype) for number in range(3)]
    return train(model, data, optimizer=make(), loss_of=loss_of, max_grad_norm=0.5, **options, **more)


def test_the_plan_says_what_is_updated_where() -> None:
    for home, most in (("resident", 6), ("partly", 3), ("device", 0)):
        with Engine(net(), AdamW(), **placed(home, net(), Path())) as engine:
            units = on_device(engine)
            assert most - 1 <= units <= most and (units == most or home == "partly")
            assert f"updates on the device: {units} of 6 units" in str(engine.plan)
    assert "no kernel" not in str(engine.plan)


@pytest.mark.parametrize(
    ("dtype", "home"),
    [(torch.float32, "resident"), (torch.bfloat16, "resident"), (torch.bfloat16, "partly"), (torch.float16, "partly")],
)
def test_bits_are_the_cpus_under_every_schedule(dtype: torch.dtype, home: str, tmp_path: Path) -> None:
    truth = run_net("truth", tmp_path, dtype=dtype)
    for schedule in SCHEDULES:
        with running(schedule) as seen:
            ours = run_net(home, tmp_path, dtype=dtype)
        assert_equal(on_cpu(ours), truth)
        assert seen.races == [], schedule.name
        assert (ours.stats.links["cpu_adam"].bytes > 0) == (home == "partly")


@pytest.mark.parametrize(
    "make",
    [
        lambda: Adam(lr=1e-2, weight_decay=0.1),
        lambda: SGD(lr=1e-2),
        lambda: SGD(lr=1e-2, momentum=0.9, nesterov=True),
        lambda: Lion(lr=1e-3),
        lambda: LAMB(lr=1e-2),
        lambda: Adagrad(lr=1e-2),
    ],
)
def test_every_optimizer_with_a_kernel(make: Callable[[], Any]) -> None:
    truth = trained("truth", make, torch.bfloat16)
    with running(LAZY) as seen:
        assert_equal(on_cpu(trained("resident", make, torch.bfloat16)), truth)
    assert seen.races == []


@pytest.mark.parametrize("kind", ["bfloat16", "int8"])
def test_compressed_states(kind: str) -> None:
    truth = trained("truth", AdamW, torch.bfloat16, state_dtype=kind)
    with running(LAZY) as seen:
        assert_equal(on_cpu(trained("partly", AdamW, torch.bfloat16, state_dtype=kind)), truth)
    assert seen.races == []


@pytest.mark.parametrize("home", HERE)
def test_accumulation(home: str, tmp_path: Path) -> None:
    options: dict[str, Any] = {"gradient_accumulation_steps": 2, "dtype": torch.bfloat16}
    truth = run_net("truth", tmp_path, **options)
    with running(LAZY) as seen:
        assert_equal(on_cpu(run_net(home, tmp_path, **options)), truth)
    assert seen.races == []


def second_pass(home: str) -> dict[str, torch.Tensor]:
    """Return the parameters after steps of two backward passes that nobody announced; one gradient is changed."""
    model = net(dtype=torch.bfloat16)
    options = everything_on_device() if home == "truth" else placed(home, model, Path())
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        weight = model.blocks[0].weight  # type: ignore[index,union-attr]
        for number in range(2):
            for part in range(2):
                x = batch(2 * number + part).to(engine.device, torch.bfloat16)
                engine.backward(loss_of(engine, x))
            with engine.gather_gradients(weight, modify=True):
                weight.grad.mul_(0.5)  # type: ignore[union-attr]
            torch.nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            engine.step()
        return engine.state_dict()


@pytest.mark.parametrize("home", ["resident", "partly"])
def test_gradients_become_fp32_and_are_looked_at(home: str) -> None:
    truth = second_pass("truth")
    for schedule in (LAZY, EAGER):
        with running(schedule) as seen:
            assert_same_tensors(second_pass(home), truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize("home", HERE)
def test_an_overflow_skips_the_step_and_what_is_not_finite_is_refused(home: str, tmp_path: Path) -> None:
    for dtype in (torch.float16, torch.bfloat16):
        model = net(dtype=dtype)
        options = placed(home, model, tmp_path, **({"initial_loss_scale": 2.0**40} if dtype is torch.float16 else {}))
        with running(LAZY) as seen, Engine(model, AdamW(lr=1e-3), **options) as engine:
            before = {name: value.clone() for name, value in engine.state_dict().items()}
            loss = loss_of(engine, batch(0).to("sim", dtype))
            if dtype is torch.float16:
                engine.backward(loss)
                assert not engine.step()
            else:
                (loss * torch.inf).backward()
                with pytest.raises(NonFiniteError, match="expected finite values"):
                    engine.step()
            assert_same_tensors(engine.state_dict(), before)
            engine.backward(loss_of(engine, batch(1).to("sim", dtype)))
            engine.zero_grad()
        assert seen.races == []


class Sharing(nn.Module):
    """Parameters whose gradients are views of one tensor, the same tensor, of another layout, and twice in a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ParameterList(nn.Parameter(batch(number, WIDTH, WIDTH)) for number in range(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d, e, f = self.parts
        x = torch.tanh(x @ torch.cat([a, b], dim=1)) @ torch.cat([c, d])
        return torch.tanh(x @ (e + f) + a.sum(0)) @ e.t().contiguous() + f.expand(2, WIDTH, WIDTH).sum((0, 1))


def run_sharing(home: str, dtype: torch.dtype) -> Outcome:
    """Train :class:`Sharing` for three steps of clipping; at home "truth" on the CPU."""
    torch.manual_seed(0)
    model = Sharing().to(dtype)
    options = everything_on_device() if home == "truth" else placed(home, model, Path())
    data = [batch(number, 4, WIDTH).to(options["device"], dtype) for number in range(3)]
    return train(model, data, optimizer=AdamW(lr=1e-2), loss_of=loss_of, max_grad_norm=0.5, **options)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_gradients_that_share_memory(dtype: torch.dtype) -> None:
    truth = run_sharing("truth", dtype)
    for schedule in (LAZY, EAGER):
        with running(schedule) as seen:
            assert_equal(on_cpu(run_sharing("resident", dtype)), truth)
        assert seen.races == [], schedule.name
        assert any(operation.endswith(" take") for operation in seen.order), "what others have, too, was kept"


@pytest.mark.parametrize(("micro_batches", "copied"), [(1, 0), (2, 24)])
def test_what_autograd_has_made_is_not_copied(micro_batches: int, copied: int) -> None:
    """12 parameters; in bf16 a sum over micro-batches is fp32, and each gradient is added to it."""
    model = net(dtype=torch.bfloat16)
    options = placed("resident", model, Path(), gradient_accumulation_steps=micro_batches)
    with running(LAZY) as seen, Engine(model, AdamW(lr=1e-2), **options) as engine:
        for number in range(micro_batches):
            engine.backward(loss_of(engine, batch(number).to("sim", torch.bfloat16)))
            engine.step()
    kernels = [operation.split()[1] for operation in seen.order]
    assert kernels.count("take") == copied
    assert kernels.count("update") == 12


def test_a_gradient_that_somebody_has_kept_and_changes_is_refused() -> None:
    kept: list[torch.Tensor] = []

    def run(changes: bool) -> dict[str, torch.Tensor]:
        model = net()
        model.blocks[2].weight.register_post_accumulate_grad_hook(  # type: ignore[index,union-attr]
            lambda parameter: kept.append(parameter.grad)  # type: ignore[func-returns-value]
        )
        with Engine(model, AdamW(lr=1e-2), **placed("resident", model, Path())) as engine:
            for number in range(2):
                if changes:
                    engine.backward(loss_of(engine, batch(number).to("sim")))
                    kept[-1].mul_(2)
                    with pytest.raises(
                        StateError, match=r"gradient of blocks\.2\.weight: expected as backward has left"
                    ):
                        engine.step()
                    engine.zero_grad()
                engine.backward(loss_of(engine, batch(number).to("sim")))
                assert engine.step()
            return engine.state_dict()

    assert_same_tensors(run(changes=True), run(changes=False))


def test_memory_of_gradients_is_given_back(tmp_path: Path) -> None:
    device = torch.get_device_module("sim")
    before, model = in_use(), net()
    with running(LAZY), Engine(model, AdamW(lr=1e-2), **placed("resident", model, tmp_path)) as engine:
        awake = device.memory_allocated(0)
        for number, end in enumerate((engine.step, engine.zero_grad)):
            engine.backward(loss_of(engine, batch(number).to("sim")))
            assert device.memory_allocated(0) - awake == 6 * (4 * WIDTH * WIDTH + 512), "the allocator's smallest piece"
            end()
            assert device.memory_allocated(0) == awake
        engine.backward(loss_of(engine, batch(0).to("sim")))
    del engine, model, end
    assert in_use() == before


def run_on_changing_streams(home: str, path: Path) -> Outcome:
    """Train with forward, backward and step on a stream each: plain modules allow it."""
    model = net()
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    losses = []
    with Engine(model, AdamW(lr=1e-2), max_grad_norm=0.5, **options) as engine:
        streams = [contextlib.nullcontext() if home == "truth" else torch.Stream("sim:0") for _ in range(3)]
        forward, backward, step = streams
        data = [batch(number).to(engine.device) for number in range(4)]
        for x in data:
            with forward:
                loss = loss_of(engine, x)
            with backward:
                engine.backward(loss)
            losses.append(loss.detach())
            with step:
                engine.step()
        return _outcome(engine, losses)


def run_on_new_streams(home: str, path: Path) -> Outcome:
    """Evaluate behind each step on a stream that was never used before, and wait for none of it."""
    model = net()
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    losses = []
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        for number in range(3):
            x = batch(number).pin_memory().to(engine.device, non_blocking=True)
            loss = loss_of(engine, x)
            new = contextlib.nullcontext() if home == "truth" else torch.Stream("sim:0")
            with new, torch.no_grad():
                losses.append(loss_of(engine, batch(number).pin_memory().to(engine.device, non_blocking=True)))
            engine.backward(loss)
            with new, torch.no_grad():
                losses.append(loss_of(engine, batch(number).pin_memory().to(engine.device, non_blocking=True)))
            engine.step()
        return _outcome(engine, losses)


class Aside(nn.Module):
    """A unit of two layers; the second is also used beside the forward, and nobody waits for that."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.beside: list[Callable[[], torch.Tensor]] = []
        self.found: list[torch.Tensor] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        while self.beside:
            self.found.append(self.beside.pop()())
        return self.second(x)


def run_nested_on_new_streams(home: str, path: Path) -> Outcome:
    """Have a module inside of another one compute on a stream that was never used before, and wait for none of it."""
    torch.manual_seed(0)
    model = nn.Sequential(Aside(), Aside())
    options = everything_on_device() if home == "truth" else placed(home, model, path, unit_bytes=2 * LINEAR_BYTES)
    with Engine(model, AdamW(lr=1e-2), **options) as engine:

        def beside(aside: Aside, x: torch.Tensor) -> Callable[[], torch.Tensor]:
            def compute() -> torch.Tensor:
                with contextlib.nullcontext() if home == "truth" else torch.Stream("sim:0"), torch.no_grad():
                    return aside.second(x.to(engine.device, non_blocking=True))

            return compute

        for number in range(3):
            x = batch(number).pin_memory() if home != "truth" else batch(number)
            for aside in model:
                aside.beside.append(beside(aside, x))
            engine.backward(loss_of(engine, x.to(engine.device, non_blocking=True)))
            engine.step()
        return _outcome(engine, [found.sum() for aside in model for found in aside.found])


def run_added(home: str, path: Path) -> Outcome:
    """Let gradients come on two streams on which nothing was ever computed, and be measured on another."""
    model, norms = net(), []
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        gradients = engine._manager.gradients
        for number in range(2):
            stream = contextlib.nullcontext() if home == "truth" else torch.Stream("sim:0")
            for unit in engine.plan.request.units:
                with stream:
                    for slot, known in enumerate(unit.slots):
                        source = batch(unit.index, known.numel).pin_memory()
                        gradient = source.to(engine.device, non_blocking=True) * (number + 2)
                        gradients.add(unit.index, slot, gradient, final=number == 1, backward_pass=number)
        gradients.await_copies()
        for unit in engine.plan.request.units:
            norms += [total[0] for total in gradients.sums(unit.index) if total is not None]
        gradients.drop()
        return Outcome([], norms, {}, {}, [], engine.stats(), engine.plan)


def _outcome(engine: Engine, losses: list[torch.Tensor]) -> Outcome:
    parameters = engine.state_dict()
    if engine.device.type != "cpu":
        torch.accelerator.synchronize()
    return Outcome([loss.cpu() for loss in losses], [], parameters, {}, [], engine.stats(), engine.plan)


@pytest.mark.parametrize("run", [run_on_changing_streams, run_on_new_streams, run_nested_on_new_streams, run_added])
def test_streams_of_the_user(run: Callable[[str, Path], Outcome], tmp_path: Path) -> None:
    truth = run("truth", tmp_path)
    for schedule in fixed(MOVER_STREAMS + 1):
        with running(schedule) as seen:
            ours = run("partly", tmp_path)
        assert_equal(ours, truth)
        assert seen.races == [], schedule.name


@pytest.mark.parametrize(("first", "second"), [("resident", "nvme"), ("cpu", "resident"), ("resident", "partly")])
def test_resumed_elsewhere(first: str, second: str, tmp_path: Path) -> None:
    resume_elsewhere(first, second, LAZY, tmp_path)


def run_reloaded(home: str, path: Path) -> Outcome:
    """Load states and parameters by the optimizer's and the module's dicts, and write a parameter in place."""
    model = net()
    weight: Any = model.blocks[1].weight  # type: ignore[index,union-attr]
    options = everything_on_device() if home == "truth" else placed(home, model, path)
    with Engine(model, AdamW(lr=1e-2), **options) as engine:
        assert engine.optimizer is not None
        x = batch(0).to(engine.device)
        for number in range(3):
            engine.backward(loss_of(engine, x))
            engine.step()
            if number == 0:
                parameters, states = engine.state_dict(), engine.optimizer.state_dict()
        engine.load_state_dict(parameters)
        engine.optimizer.load_state_dict(states)
        with engine.gather(weight, modify=True), torch.no_grad():
            weight.mul_(2)
        engine.backward(loss_of(engine, x))
        engine.step()
        return Outcome([], [], engine.state_dict(), engine.optimizer.state_dict()["state"], [], engine.stats(), None)


@pytest.mark.parametrize("home", HERE)
def test_what_is_loaded_or_written_is_what_the_next_step_starts_from(home: str, tmp_path: Path) -> None:
    truth = run_reloaded("truth", tmp_path)
    for schedule in (LAZY, EAGER):
        with running(schedule) as seen:
            assert_equal(run_reloaded(home, tmp_path), truth)
        assert seen.races == [], schedule.name


def test_the_host_waits_once_per_step(tmp_path: Path) -> None:
    """For what is measured of all gradients; nothing else goes to the host, nothing comes from it."""
    waits = ("synchronizations", "event_synchronizations", "device_synchronizations", "d2h_copies", "h2d_copies")
    with running(LAZY):
        model = net()
        with Engine(model, AdamW(lr=1e-2), max_grad_norm=0.5, **placed("resident", model, tmp_path)) as engine:
            data = [batch(number).pin_memory().to("sim", non_blocking=True) for number in range(4)]
            before = {what: seen_now(what) for what in waits}
            for x in data:
                torch.tanh(engine(x)).sum().backward()
                engine.step()
            seen = {what: seen_now(what) - before[what] for what in waits}
    assert seen == {**dict.fromkeys(waits, 0), "synchronizations": 4, "d2h_copies": 4}


def test_a_kernel_that_fails_loses_the_step_and_says_so(tmp_path: Path) -> None:
    model = net()
    with Engine(model, AdamW(lr=1e-2), **placed("resident", model, tmp_path)) as engine:
        engine.backward(loss_of(engine, batch(0).to("sim")))
        with pytest.raises(torch.AcceleratorError), failing(12 + 1 + 2, WORK):  # sums, their copy, an update, this one
            engine.step()
        with pytest.raises(StateError, match="half way|lost"):
            engine.step() or engine(batch(0).to("sim"))


def test_what_cannot_be_there_is_refused_by_name(tmp_path: Path) -> None:
    model = net()
    options = placed("resident", model, tmp_path)
    with pytest.raises(ConfigError, match="only with the parameters"):
        Engine(model, AdamW(), **{**options, "offload_param": "cpu"})
    with pytest.raises(ConfigError, match="Muon|RMSprop"):
        Engine(model, torch.optim.RMSprop(model.parameters()), **options)
    with pytest.raises(ConfigError, match="state_dtype"):
        Engine(model, SGD(), **{**options, "state_dtype": "bfloat16"})
    with pytest.raises(BudgetError, match="device budget"):
        Engine(model, AdamW(), **{**options, "max_memory": {"device": "100KiB", "cpu": "16MiB"}})


def test_kernels_are_asked_only_where_they_may_be_needed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(SimulatedKernels, "refusal", lambda self, *what: asked.append(what))
    model = net()
    memory: dict[str, Any] = {"device": "sim", "max_memory": {"device": "64MiB", "cpu": "64MiB"}}
    for optimizer, more, asks in (
        (AdamW(), {}, True),
        (AdamW(), {"offload_optimizer": "cpu"}, False),
        (torch.optim.RMSprop(model.parameters()), {}, False),
    ):
        asked.clear()
        with Engine(model, optimizer, **memory, **more) as engine:
            assert len(asked) == asks
            many = len(engine.plan.request.units)
            told = next(line for line in str(engine.plan).splitlines() if line.startswith("updates on the device"))
        assert told == f"updates on the device: {many if asks else 0} of {many} units"


def test_states_leave_the_device_for_activations_that_are_told_to_need_the_room() -> None:
    """The error for a batch that does not fit beside them names the option with which it does."""
    options: dict[str, Any] = {"device": "sim", "max_memory": {"device": "2MiB", "cpu": "64MiB"}}
    x = torch.ones(1024, WIDTH, device="sim")
    with Engine(net(), AdamW(), **options) as engine:
        assert sum(map(engine.plan.on_device, engine.plan.request.units)) == 6
        with pytest.raises(BudgetError, match="or activation_memory, for which optimizer states leave it, or"):
            engine.backward(engine(x).sum())
    with Engine(net(), AdamW(), activation_memory="1900KiB", **options) as engine:
        assert sum(map(engine.plan.on_device, engine.plan.request.units)) == 1
        engine.backward(engine(x).sum())
        engine.step()


@pytest.mark.parametrize("activation_memory", [MIB, 24 << 10])
def test_budgets_hold_as_torch_counts_them(
    activation_memory: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All of a device budget that just does: gradients that wait take no more than the plan has counted.

    They are 27 KiB, and no activations.
    """
    monkeypatch.setattr(ledger, "TOLERANCE_BYTES", 0)
    model, rows = net(), 4
    options = placed("resident", model, tmp_path, activation_memory=activation_memory)
    with pytest.raises(BudgetError) as refused:
        Engine(model, AdamW(), **{**options, "max_memory": {"device": activation_memory, "cpu": "16MiB"}})
    least = int(str(refused.value).split("that would do is ")[1].split()[0])
    options["max_memory"] = {"device": least, "cpu": "16MiB"}
    device = torch.get_device_module("sim")
    before = device.memory_allocated(0)
    device.reset_peak_memory_stats(0)
    with running(LAZY), Engine(model, AdamW(lr=1e-3), **options) as engine:
        floor = engine._parts.activations._floor_bytes
        for number in range(2):
            engine.backward(loss_of(engine, batch(number, rows, WIDTH).to("sim")))
            engine.step()
        assert device.max_memory_allocated(0) - before <= least
        assert engine.stats().peak_bytes["device"] <= least
        assert engine._parts.activations._floor_bytes == floor, "gradients count as such"
